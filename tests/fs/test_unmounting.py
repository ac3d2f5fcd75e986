"""What was written and not promised: truncated beside a close, closed beside a rename, and the unmount."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from cachefs.base.errors import CachefsError, OriginFailed
from tests.fs.test_writing_model import WRITERS, World

MODES = pytest.mark.parametrize("mode", WRITERS)


@asynccontextmanager
async def running(path: Path, mode: str) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        world = World(path, nursery, writeback=mode == "writeback")
        await world.start()
        yield world
        await world.stop()
        nursery.cancel_scope.cancel()


async def shrink(world: World, path: str, size: int) -> None:
    await world.mount.fs.setattr(await world.mount.ino(path), size=size)


@MODES
@pytest.mark.parametrize("release_comes", [True, False])
async def test_truncated_between_a_close_and_its_release(
    release_comes: bool, mode: str, tmp_path: Path
) -> None:
    """No close follows, and a reader keeps the file open: the truncation promises what it did."""
    async with running(tmp_path, mode) as world:
        writer = await world.mount.open("new", os.O_RDWR | os.O_CREAT)
        await world.mount.fs.write(writer, 0, b"0123456789")
        await world.mount.fs.flush(writer)
        await world.uploads.flush()
        reader = await world.mount.open("new")
        await shrink(world, "new", 4)
        if mode == "durable":
            assert world.bucket.content("new") == b"0123"
        if release_comes:
            world.mount.fs.release(writer)
        await world.mount.fs.aclose(unmounted=True)
        assert not await world.uploads.aclose(30)
        assert world.bucket.content("new") == b"0123"
        assert world.mount.fs.status()["open_files"] == 0 and reader


@MODES
async def test_the_last_messages_of_an_unmount_do_not_come(mode: str, tmp_path: Path) -> None:
    """All processes have closed the file, perhaps through another descriptor of it; no message says so."""
    async with running(tmp_path, mode) as world:
        writer = await world.mount.open("new", os.O_RDWR | os.O_CREAT)
        await world.mount.open("new")
        await world.mount.fs.write(writer, 0, b"written")
        await world.mount.fs.aclose(unmounted=True)
        assert not await world.uploads.aclose(30)
        assert world.bucket.content("new") == b"written"


@MODES
async def test_half_a_file_at_a_signal(mode: str, tmp_path: Path) -> None:
    """Its process goes on writing it, and hears of the end: no reader is to have half of it."""
    async with running(tmp_path, mode) as world:
        writer = await world.mount.open("new", os.O_RDWR | os.O_CREAT)
        await world.mount.fs.write(writer, 0, b"half")
        await world.mount.fs.aclose()
        assert not await world.uploads.aclose(30)
        assert "new" not in world.bucket.objects


@MODES
async def test_closed_while_a_rename_over_it_fails(mode: str, tmp_path: Path) -> None:
    """The close waits for what becomes of its name, and then promises the file that kept it."""
    async with running(tmp_path, mode) as world:
        writer = await world.mount.open("new", os.O_RDWR | os.O_CREAT)
        await world.mount.fs.write(writer, 0, b"kept")

        def refuse(kind: str, key: str) -> CachefsError | None:
            return OriginFailed("no copies today") if kind == "copy" else None

        async def rename() -> None:
            with pytest.raises(OriginFailed):
                await world.mount.rename("old", "new")

        world.bucket.before, world.bucket.delay = refuse, 1.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rename)
            await trio.sleep(0.5)  # the name is looked up, and the copy is on its way
            await world.mount.fs.flush(writer)
            if mode == "durable":
                assert world.bucket.content("new") == b"kept"
            else:
                assert [found.acknowledged for found in world.uploads.pending()] == [True]
        await world.mount.close_file(writer)

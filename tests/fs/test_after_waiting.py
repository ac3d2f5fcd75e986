"""What was known before an operation waited may be false behind it: each of these changes something meanwhile."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import ObjectChanged
from cachefs.base.names import ObjectId
from tests.fs.bucket import Bytes, WritableBucket
from tests.fs.mount import mounted
from tests.fs.test_writing_model import World
from tests.fs.writers import MemoryWriter

RW: dict[str, Any] = {"file_mode": 0o644, "dir_mode": 0o755}


@asynccontextmanager
async def world(path: Path, *, writeback: bool = False) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        world = World(path, nursery, writeback=writeback)
        await world.start()
        yield world
        await world.stop()
        nursery.cancel_scope.cancel()


class Held:
    """The next request of a kind is answered when it is `released`."""

    def __init__(self, bucket: Any, kind: str, *, before: bool = False) -> None:
        """`before`: it takes effect then, too."""
        self.reached, self.released = trio.Event(), trio.Event()
        plain: Callable[..., Any] = getattr(bucket, kind)

        async def held(*what: Any, **how: Any) -> Any:
            setattr(bucket, kind, plain)
            if before:
                self.reached.set()
                await self.released.wait()
                return await plain(*what, **how)
            answer = await plain(*what, **how)
            self.reached.set()
            await self.released.wait()
            return answer

        setattr(bucket, kind, held)


async def test_a_file_that_is_removed_while_its_open_asks_for_it(tmp_path: Path) -> None:
    """It is gone then, which is no failure of a disk."""
    async with world(tmp_path, writeback=True) as w, trio.open_nursery() as nursery:
        mount, tree = w.mount, w.mount.fs._tree
        ino = await mount.ino("old")
        tree.root.ttls.revalidate = True
        head = Held(w.bucket, "head")

        async def read() -> None:
            with pytest.raises(ObjectChanged):
                await mount.fs.open(ino, os.O_RDONLY, 1)

        nursery.start_soon(read)
        await head.reached.wait()
        await mount.write("old", b"is here alone")
        async with tree.writing:
            head.released.set()
            await trio.sleep(0.1)
            nursery.start_soon(mount.unlink, "old")
            await trio.sleep(1)


async def test_a_file_that_is_renamed_while_its_attributes_are_asked_for() -> None:
    """It has a name, and shows what is written under it."""
    bucket = WritableBucket(["f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount, trio.open_nursery() as nursery:
        fh = await mount.open("f", os.O_RDWR)
        ino = await mount.ino("f")
        mount.clock.now += 61
        head = Held(bucket, "head")
        nursery.start_soon(mount.fs.getattr, ino)
        await head.reached.wait()
        await mount.fs.write(fh, 0, b"changed")
        await mount.rename("f", "g")
        head.released.set()
        await trio.sleep(1)
        await mount.fs.write(fh, 10, b"and more")
        assert (await mount.fstat(fh)).size == 18 and not mount.fs._files.nameless
        await mount.close_file(fh)
        assert bucket.content("g")[-8:] == b"and more"


class Slow(Bytes):
    """Its next read asks the origin when it is `released`."""

    def __init__(self, bucket: Any) -> None:
        super().__init__(bucket)
        self.released = trio.Event()

    async def read(self, opened: ObjectId, offset: int, size: int, pid: int) -> bytes:
        await self.released.wait()
        return await super().read(opened, offset, size, pid)


async def test_a_file_that_is_rewritten_here_while_it_is_read() -> None:
    """The read is not told that its version is gone: the file has another here."""
    bucket = WritableBucket(["f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount, trio.open_nursery() as nursery:
        slow = Slow(bucket)
        mount.fs.read_through(slow)
        reader, found = await mount.open("f"), list[bytes]()

        async def read() -> None:
            found.append(await mount.pread(reader))

        nursery.start_soon(read)
        await trio.sleep(1)
        await mount.write("f", b"another")
        slow.released.set()
        await trio.sleep(1)
        assert found == [b"another"]
        await mount.close_file(reader)

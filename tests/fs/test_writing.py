"""Writing: files that come to be, change and go, over a store and an upload room in memory."""

from __future__ import annotations

import os

import pytest

from cachefs.errors import AlreadyExists, NotFound
from tests.fs.bucket import WritableBucket
from tests.fs.mount import ROOT, mounted
from tests.fs.writers import MemoryWriter

RW = {"file_mode": 0o644, "dir_mode": 0o755}


async def test_a_file_is_there_while_it_is_written_and_afterwards() -> None:
    bucket, writer = WritableBucket(["d/x"]), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        fh = await mount.open("d/new", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        bucket.reset()
        await mount.fs.write(fh, 0, b"hello")
        assert await mount.pread(fh) == b"hello"
        assert await mount.read("d/new") == b"hello"
        assert await mount.walk() == {b"d": None, b"d/new": 5, b"d/x": 10}
        assert bucket.counts == (0, 0) and bucket.writes == (0, 0, 0)
        await mount.close_file(fh)
        assert bucket.content("d/new") == b"hello"
        assert await mount.walk() == {b"d": None, b"d/new": 5, b"d/x": 10}
        assert await mount.read("d/new") == b"hello"
        assert bucket.counts == (0, 0) and bucket.writes == (1, 0, 0)
        with pytest.raises(AlreadyExists):
            await mount.fs.create(await mount.ino("d"), b"new", os.O_EXCL, 0o644, 1, 0, 0)
        await mount.unlink("d/new")
        assert await mount.stat("d/new") is None
        assert "d/new" not in bucket.objects and bucket.writes == (1, 0, 1)
        with pytest.raises(NotFound):
            await mount.unlink("d/new")
        assert not writer.drafts and mount.bytes.open_count == 0


async def test_directories_come_and_go() -> None:
    bucket = WritableBucket()
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.entries(ROOT)
        bucket.reset()
        await mount.mkdir("d")
        assert bucket.objects["d/"].size == 0 and bucket.writes == (1, 0, 0)
        assert await mount.walk() == {b"d": None}
        await mount.write("d/f", b"abc")
        assert bucket.counts == (0, 0) and bucket.writes == (2, 0, 0)
        await mount.unlink("d/f")
        await mount.rmdir("d")
        assert await mount.walk() == {} == bucket.objects
        assert bucket.counts == (1, 0) and bucket.writes == (2, 0, 2)


async def test_rewriting_a_file() -> None:
    bucket = WritableBucket(["f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        old = await mount.read("f")
        ino = await mount.ino("f")
        await mount.write("f", b"XY", os.O_WRONLY, at=4)
        assert bucket.content("f") == old[:4] + b"XY" + old[6:]
        assert await mount.read("f") == bucket.content("f")
        await mount.write("f", b"new")
        assert await mount.read("f") == b"new" == bucket.content("f")
        assert await mount.ino("f") == ino
        bucket.reset()
        await mount.write("f", b"", os.O_WRONLY)
        assert bucket.writes == (0, 0, 0)

"""Writing: files that come to be, change and go, over a store and an upload room in memory."""

from __future__ import annotations

import os

import pytest

from cachefs.base.errors import AlreadyExists, NotFound
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
        assert not writer.dirty_files and mount.bytes.open_count == 0


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


@pytest.mark.parametrize("left", ["directory", "file that is being written"])
async def test_a_directory_that_exists_by_its_keys_alone_outlives_what_was_in_it(left: str) -> None:
    """As on a local disk: here, and for other nodes, who see a marker."""
    bucket = WritableBucket(["a/b/c"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.walk()
        await mount.unlink("a/b/c")
        if left == "file that is being written":
            fh = await mount.open("a/new", os.O_WRONLY | os.O_CREAT)
        await mount.rmdir("a/b")
        if left == "file that is being written":
            await mount.unlink("a/new")
            await mount.close_file(fh)
        mount.clock.now += 3600
        assert await mount.walk() == {b"a": None} and list(bucket.objects) == ["a/"]
        await mount.rmdir("a")
        assert await mount.walk() == {} == bucket.objects


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


async def test_space_that_is_allocated_behind_the_end_is_a_change_of_the_file() -> None:
    async with mounted(WritableBucket(["f"]), writer=MemoryWriter(), **RW) as mount:
        fh = await mount.open("f", os.O_RDWR)
        ino = await mount.ino("f")
        for length, kept in ((10, True), (11, False)):
            await mount.fs.setattr(ino, mtime_ns=10**9)
            await mount.fs.fallocate(fh, 0, 0, length)
            found = await mount.stat("f")
            assert found is not None and (found.size, found.mtime_ns == 10**9) == (length, kept)
        await mount.close_file(fh)


async def test_a_temporary_file_that_replaces_another() -> None:
    bucket = WritableBucket(["d/f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.walk()
        for i in range(5):
            bucket.reset()
            await mount.write("d/tmp", b"version %d" % i)
            await mount.rename("d/tmp", "d/f")
            assert bucket.counts == (0, 0) and bucket.writes == (1, 1, 1)
            assert await mount.read("d/f") == b"version %d" % i == bucket.content("d/f")
            assert await mount.walk() == {b"d": None, b"d/f": 9}
        assert set(bucket.objects) == {"d/f"}


async def test_what_is_not_uploaded_moves_for_nothing() -> None:
    bucket, writer = WritableBucket(["d/f", "e/x"]), MemoryWriter(writeback=True)
    async with mounted(bucket, writer=writer, **RW) as mount:
        await mount.walk()
        bucket.reset()
        for i in range(3):
            await mount.write("d/tmp", b"version %d" % i)
            await mount.rename("d/tmp", "d/f")
            assert await mount.read("d/f") == b"version %d" % i
        await mount.rename("d/f", "e/g")
        assert bucket.puts == ["d/", "e/g"] and bucket.deletes == ["d/f"], (
            "the old one has to go, when the new one is there, and takes no directory along"
        )
        assert await mount.walk() == {b"d": None, b"e": None, b"e/g": 9, b"e/x": 10}
        await writer.upload_all()
        assert bucket.content("e/g") == b"version 2"
        assert await mount.walk() == {b"d": None, b"e": None, b"e/g": 9, b"e/x": 10}
        assert bucket.counts == (0, 0) and bucket.writes == (2, 0, 1)
        assert set(bucket.objects) == {"d/", "e/g", "e/x"}


async def test_a_file_that_is_open_keeps_its_number_when_it_moves() -> None:
    bucket = WritableBucket(["d/x", "e/x"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        fh = await mount.open("d/a", os.O_RDWR | os.O_CREAT)
        ino = await mount.ino("d/a")
        await mount.fs.write(fh, 0, b"one")
        await mount.rename("d/a", "e/b")
        assert await mount.ino("e/b") == ino
        await mount.fs.write(fh, 3, b"two")
        assert (await mount.fs.getattr(ino))[0].size == 6
        await mount.write("d/a", b"another")
        assert await mount.ino("d/a") != ino
        assert await mount.read("e/b") == b"onetwo"
        await mount.close_file(fh)
        assert bucket.content("e/b") == b"onetwo" and bucket.content("d/a") == b"another"
        assert await mount.ino("e/b") == ino
        await mount.rename("e/b", "d/a")
        assert await mount.read("d/a") == b"onetwo"
        assert await mount.ino("d/a") == ino
        assert "e/b" not in bucket.objects


async def test_a_directory_moves_with_all_that_is_below() -> None:
    bucket, writer = (
        WritableBucket([f"d/{i}/{j}" for i in range(3) for j in range(3)] + ["d//odd"]),
        MemoryWriter(),
    )
    async with mounted(bucket, writer=writer, **RW) as mount:
        before = await mount.walk()
        fh = await mount.open("d/1/new", os.O_RDWR | os.O_CREAT)
        await mount.fs.write(fh, 0, b"begun")
        await mount.mkdir("d/empty")
        await mount.rename("d", "e")
        assert await mount.stat("d") is None
        expected = {b"e" + path[1:]: size for path, size in before.items()}
        assert await mount.walk() == expected | {b"e/1/new": 5, b"e/empty": None}
        await mount.fs.write(fh, 5, b"!")
        await mount.close_file(fh)
        assert bucket.content("e/1/new") == b"begun!"
        assert await mount.read("e/1/new") == b"begun!"
        assert not [key for key in bucket.objects if key.startswith("d/")]
        assert "e//odd" in bucket.objects
        assert not writer.noted

"""The database of names is cut short under a mount: the mount goes on, and learns them again."""

from __future__ import annotations

import os

import pytest
import trio
import trio.testing

from cachefs.base.errors import CachefsError, CacheUnusable, OriginFailed
from cachefs.fs import Volume
from tests.fs.bucket import Bucket, WritableBucket
from tests.fs.mount import ROOT, Mount, mounted
from tests.fs.test_writing import RW
from tests.fs.writers import MemoryWriter

KEYS = [f"d/{number}/{name}" for number in range(3) for name in "xyz"]


async def cut_short(mount: Mount, length: int) -> None:
    mount.database.flush()
    os.truncate(mount.database.stored.path / "data.mdb", length)


async def found_out(mount: Mount) -> None:
    """The next look at a name fails, and the one after that does not."""
    with pytest.raises(CacheUnusable, match="cut short"):
        await mount.stat("d/0/nothing of that name")
    await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("length", [0, 4096, 8192, -4096])
async def test_names_are_learnt_again(length: int, caplog: pytest.LogCaptureFixture) -> None:
    bucket = Bucket(KEYS, page=2)
    async with mounted(bucket) as mount:
        mount.fs.renew_names()
        before = await mount.walk()
        inos = {key: await mount.ino(key) for key in KEYS}
        fh = await mount.open("d/1/x")
        directory = await mount.ino("d/1")
        file = mount.database.stored.path / "data.mdb"
        mount.database.flush()
        await cut_short(mount, length if length >= 0 else file.stat().st_size + length)
        await found_out(mount)
        assert await mount.walk() == before
        # The kernel may know the old numbers: they are no other file's.
        again = {await mount.ino(key) for key in KEYS}
        assert len(again) == len(KEYS) and not again & set(inos.values())
        assert directory == await mount.ino("d/1")
        assert (await mount.fstat(fh)).size == 10 and await mount.stat("d/9") is None
        mount.fs.release(fh)
        bucket.put("d/0/new")
        await trio.sleep(61)
        assert await mount.stat("d/0/new") is not None
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len([line for line in told if "cut short; it will be learnt again" in line]) == 1


async def test_a_reader_of_a_directory_is_told_and_never_sees_a_shorter_one() -> None:
    async with mounted(Bucket([f"d/{n:03d}" for n in range(300)], page=10)) as mount:
        mount.fs.renew_names()
        ino = await mount.ino("d")
        reader = mount.fs.opendir(ino)
        some = await mount.fs.readdir(reader, 0, 5)
        assert len(some) == 5
        await cut_short(mount, 8192)
        with pytest.raises(CachefsError):
            await mount.stat("d/nothing")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(OriginFailed, match="read again"):
            await mount.fs.readdir(reader, some[-1].next_offset, 5)
        mount.fs.releasedir(reader)
        assert len(await mount.names("d")) == 300


async def test_a_listing_that_is_under_way_begins_anew() -> None:
    bucket = Bucket([f"d/{n:03d}" for n in range(100)], page=10)
    async with mounted(bucket) as mount:
        mount.fs.renew_names()
        ino = await mount.ino("d")
        reader = mount.fs.opendir(ino)
        await mount.fs.readdir(reader, 0, 5)
        mount.fs.releasedir(reader)
        assert mount.fs._tree.directory(ino).listing is not None  # it has not seen the last page
        await cut_short(mount, 8192)
        with pytest.raises(CachefsError):
            await mount.stat("d/nothing")
        await trio.testing.wait_all_tasks_blocked()
        assert len(await mount.names("d")) == 100
        assert await mount.stat("d/000") is not None and await mount.stat("d/099") is not None


async def test_what_is_being_written_stays() -> None:
    bucket, writer = WritableBucket(["d/x", "e/y"]), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        mount.fs.renew_names()
        await mount.walk()
        fh = await mount.open("d/new", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        await mount.fs.write(fh, 0, b"hello")
        ino = await mount.ino("d/new")
        await cut_short(mount, 8192)
        with pytest.raises(CacheUnusable):
            await mount.stat("e/nothing")
        await trio.testing.wait_all_tasks_blocked()
        assert await mount.walk() == {b"d": None, b"d/new": 5, b"d/x": 10, b"e": None, b"e/y": 10}
        assert await mount.ino("d/new") == ino and await mount.pread(fh) == b"hello"
        await mount.close_file(fh)
        assert bucket.content("d/new") == b"hello" and await mount.read("d/new") == b"hello"
        await mount.rename("d/new", "e/new")
        await mount.unlink("d/x")
        assert await mount.walk() == {b"d": None, b"e": None, b"e/new": 5, b"e/y": 10}


async def test_several_volumes_are_there_again() -> None:
    buckets = [Bucket(["d/x"]), Bucket(["y"])]
    volumes = [Volume("one", buckets[0]), Volume("two", buckets[1])]  # type: ignore[arg-type]
    async with mounted(buckets[0], volumes=volumes) as mount:
        mount.fs.renew_names()
        before = await mount.walk()
        await cut_short(mount, 8192)
        with pytest.raises(CacheUnusable):
            await mount.stat("one/nothing")
        await trio.testing.wait_all_tasks_blocked()
        assert await mount.walk() == before and sorted(await mount.names()) == [b"one", b"two"]
        assert (await mount.fs.getattr(ROOT))[0].is_dir

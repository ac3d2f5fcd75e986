"""Opens of files that are about to be whole: who waits, and what is opened then."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from cachefs.base.errors import ObjectChanged
from cachefs.base.names import ObjectId
from tests.fs.bucket import Bucket, WritableBucket
from tests.fs.mount import mounted
from tests.fs.test_writing_beside import Passthrough
from tests.fs.writers import MemoryWriter


class Coming(Passthrough):
    """Everything is on its way, and here when somebody has waited for it."""

    in_flight_fetches = 1
    comes = True

    def __init__(self, bucket: Any) -> None:
        super().__init__(bucket)
        self.waited: list[str] = []
        self.meanwhile: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint

    def soon_cached(self, obj: ObjectId) -> bool:
        return obj not in self.warm

    async def wait_until_cached(self, obj: ObjectId, pid: int) -> None:
        self.waited.append(obj.key)
        await self.meanwhile()
        if self.comes:
            self.warm.add(obj)

    def reopen_backing(self, backing: Any) -> None: ...
    def release_backing(self, backing: Any) -> None: ...


def coming(mount: Any, bucket: Bucket) -> Coming:
    reader = Coming(bucket)
    mount.fs.read_through(reader)
    mount.fs.enable_passthrough(lambda backing: True)
    return reader


async def test_an_open_waits_once_and_is_passthrough_what_has_come() -> None:
    bucket = Bucket(["a", "b"])
    async with mounted(bucket) as mount:
        reader = coming(mount, bucket)
        ino = await mount.ino("a")
        assert mount.fs.open_now(ino, os.O_RDONLY, 1) is None
        fh, backing = await mount.fs.open(ino, os.O_RDONLY, 1)
        assert backing and reader.waited == ["a"]
        mount.fs.release(fh)
        again = mount.fs.open_now(ino, os.O_RDONLY, 1)
        assert again is not None and again[1]
        mount.fs.release(again[0])
        reader.warm.clear()  # and of what was opened before, too
        assert mount.fs.open_now(ino, os.O_RDONLY, 1) is None
        assert reader.waited == ["a"]


async def test_what_does_not_come_in_time_is_opened_as_it_is() -> None:
    bucket = Bucket(["a"])
    async with mounted(bucket) as mount:
        reader = coming(mount, bucket)
        reader.comes = False
        fh, backing = await mount.fs.open(await mount.ino("a"), os.O_RDONLY, 1)
        assert not backing
        mount.fs.release(fh)


async def test_nobody_waits_whose_way_of_reading_is_decided() -> None:
    bucket = Bucket(["a"])
    async with mounted(bucket) as mount:
        reader = coming(mount, bucket)
        ino = await mount.ino("a")
        mount.fs._files.on_passthrough = None  # the kernel takes no files
        first = mount.fs.open_now(ino, os.O_RDONLY, 1)
        assert first is not None
        mount.fs.enable_passthrough(lambda backing: True)
        second = mount.fs.open_now(ino, os.O_RDONLY, 2)  # beside one that reads through the daemon
        assert second is not None and not second[1]
        for fh in (first[0], second[0]):
            mount.fs.release(fh)
        assert mount.fs.open_now(ino, os.O_RDONLY, 1) is None
        reader.soon_cached = lambda obj: False  # type: ignore[method-assign]
        third = mount.fs.open_now(ino, os.O_RDONLY, 1)
        assert third is not None
        mount.fs.release(third[0])
        assert not reader.waited


async def test_who_writes_does_not_wait() -> None:
    bucket, writer = WritableBucket(["f"]), MemoryWriter()
    async with mounted(bucket, writer=writer, file_mode=0o644, dir_mode=0o755) as mount:
        reader = coming(mount, bucket)
        fh, backing = await mount.fs.open(await mount.ino("f"), os.O_RDWR, 1)
        assert not backing and not reader.waited
        mount.fs.release(fh)


async def test_a_version_that_came_meanwhile_is_the_one_that_is_opened() -> None:
    bucket = Bucket(["a"])
    async with mounted(bucket) as mount:
        reader = coming(mount, bucket)
        ino = await mount.ino("a")

        async def replaced() -> None:
            bucket.set("a", 10, version=1)
            await mount.fs.refresh("a")
            assert await mount.stat("a") is not None

        reader.meanwhile = replaced
        with pytest.raises(ObjectChanged):  # it is another inode: the kernel walks again
            await mount.fs.open(ino, os.O_RDONLY, 1)
        fh = await mount.open("a")
        data = await mount.fs.read(fh, 0, 100)
        assert bytes(data) == Coming.content(ObjectId("", "a", bucket.objects["a"].etag, 10))
        mount.fs.release(fh)


async def test_no_name_is_asked_for_twice_for_it() -> None:
    bucket = Bucket(["a"])
    async with mounted(bucket, revalidate_at_open=True) as mount:
        reader = coming(mount, bucket)
        ino = await mount.ino("a")
        bucket.reset()
        fh, backing = await mount.fs.open(ino, os.O_RDONLY, 1)
        assert backing and reader.waited == ["a"] and sum(bucket.counts) == 1
        mount.fs.release(fh)

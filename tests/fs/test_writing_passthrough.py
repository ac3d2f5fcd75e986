"""Dirty files that the kernel writes by itself: what is shown of them, and that all handles of an inode are served alike."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from cachefs.base.errors import NotFound, ObjectChanged
from cachefs.base.names import ObjectId
from cachefs.fs.dirty_files import DirtyFiles
from tests.fs.bucket import WritableBucket
from tests.fs.mount import Mount, mounted
from tests.fs.test_writing_beside import Passthrough, open_as_kernel
from tests.fs.writers import MemoryDirtyFile, MemoryWriter

RW = {"file_mode": 0o644, "dir_mode": 0o755}


def passthrough() -> MemoryWriter:
    writer = MemoryWriter(writeback=True)
    writer.passthrough = True
    return writer


def kernel_writes(dirty_file: MemoryDirtyFile, data: bytes) -> None:
    """Of which nobody tells."""
    assert dirty_file.passthrough is not None
    dirty_file.passthrough.data = bytearray(data)


async def created(mount: Mount, path: str) -> tuple[int, int, int]:
    """(ino, fh, backing)"""
    attributes, _, opened = await mount.fs.create(
        *await mount.parent(path), os.O_RDWR | os.O_CREAT, 0o644, 1, 1000, 1000
    )
    return attributes.ino, opened[0], opened[1]


async def test_all_who_have_it_open_share_its_file() -> None:
    bucket, writer = WritableBucket(), passthrough()
    async with mounted(bucket, writer=writer, **RW) as mount:
        ino, fh, backing = await created(mount, "f")
        assert backing
        opened = [
            await open_as_kernel(mount, "f", flags) for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND)
        ]
        assert {(number, passthrough) for number, _, passthrough in opened} == {(ino, backing)}
        kernel_writes(writer.dirty_files[0], b"by itself")
        assert await mount.walk() == {b"f": 9}
        for _, other, _ in opened:
            await mount.close_file(other)
        await mount.close_file(fh)
        await writer.upload_all()
        assert bucket.content("f") == b"by itself"
        assert not writer.dirty_files


async def test_what_is_emptied_is_passthrough_and_what_is_only_opened_is_not() -> None:
    bucket, writer = WritableBucket(["f"]), passthrough()
    async with mounted(bucket, writer=writer, **RW) as mount:
        _, fh, backing = await open_as_kernel(mount, "f", os.O_RDWR)
        assert not backing and not writer.dirty_files, "opening costs nothing"
        await mount.close_file(fh)
        _, fh, backing = await open_as_kernel(mount, "f", os.O_WRONLY | os.O_TRUNC)
        assert backing
        await mount.close_file(fh)
        assert writer.dirty_files[0].writers == 0


async def test_a_time_that_is_set_holds_until_the_next_write() -> None:
    bucket, writer = WritableBucket(), passthrough()
    async with mounted(bucket, writer=writer, **RW) as mount:
        ino, fh, _ = await created(mount, "f")
        kernel_writes(writer.dirty_files[0], b"1")
        shown, _ = await mount.fs.setattr(ino, mtime_ns=5)
        assert (shown.mtime_ns, shown.size) == (5, 1)
        assert (await mount.fs.getattr(ino))[0].mtime_ns == 5
        kernel_writes(writer.dirty_files[0], b"2")
        assert (await mount.fs.getattr(ino))[0].mtime_ns != 5
        await mount.close_file(fh)


@pytest.mark.parametrize("seed", range(60))
async def test_all_handles_under_one_number_are_served_alike(seed: int) -> None:
    """The kernel's rule, whatever comes: else it fails an open with an error."""
    rng = random.Random(seed)
    bucket, writer = WritableBucket(["a", "b"]), passthrough()
    async with mounted(bucket, writer=writer, **RW) as mount:
        reader = Passthrough(bucket)
        mount.fs.read_through(reader)
        mount.fs.enable_passthrough(lambda backing: True)
        handles: dict[int, tuple[int, int]] = {}  # fh → (ino, backing)

        def check() -> None:
            served: dict[int, set[int]] = {}
            for ino, backing in handles.values():
                served.setdefault(ino, set()).add(backing)
            assert all(len(kinds) == 1 for kinds in served.values()), served

        async def step() -> None:
            action = rng.choice(
                ["open"] * 5 + ["close"] * 4 + ["write"] * 3 + ["upload", "rename", "unlink", "sync"]
            )
            path = rng.choice("abc")
            if action == "open":
                flags = rng.choice([os.O_RDONLY, os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
                found: Any = await mount.stat(path)
                ino, fh, backing = (
                    await created(mount, path) if found is None else await open_as_kernel(mount, path, flags)
                )
                handles[fh] = ino, backing
                if found is None or flags & os.O_TRUNC:
                    # No two versions are alike: the same content is the same etag, and so the same version.
                    dirty_file = mount.fs._files.handles[fh].node.dirty_file  # type: ignore[union-attr]
                    if backing:
                        kernel_writes(dirty_file, b"%d" % fh)  # type: ignore[arg-type]
                    else:
                        await mount.fs.write(fh, 0, b"%d" % fh)
            elif action == "close" and handles:
                fh = rng.choice(list(handles))
                del handles[fh]
                await mount.close_file(fh)
            elif action == "write":
                written = [dirty_file for dirty_file in writer.dirty_files if dirty_file.writers]
                if written:
                    kernel_writes(rng.choice(written), rng.randbytes(rng.randrange(8, 20)))
            elif action == "upload":
                for dirty_file in writer.pending():
                    if not dirty_file.writers:
                        await writer.upload(dirty_file)
            elif action == "rename":
                await mount.rename(path, rng.choice("abc"))
            elif action == "unlink":
                await mount.unlink(path)
            elif handles:
                await mount.fs.fsync(rng.choice(list(handles)))

        for _ in range(150):
            try:
                await step()
            except (NotFound, ObjectChanged):
                pass
            check()
        for fh in handles:
            await mount.close_file(fh)
        await writer.upload_all()
        assert not writer.dirty_files and not reader.backings
        shown = await mount.walk()
        assert {name.encode(): len(bucket.content(name)) for name in bucket.objects} == shown


async def test_a_writer_waits_a_second_for_reads_of_the_daemon() -> None:
    """Then it goes on without its readers: they see what is written at their next open."""
    tries = list[float]()
    backing = object()
    version = ObjectId("s3://bucket", "f", '"v1"', 1)
    handle = SimpleNamespace(backing=backing, object=version)
    files = SimpleNamespace(under=lambda ino: [handle])
    writer = SimpleNamespace(
        disk_answers=trio.lowlevel.checkpoint, take=lambda *_: tries.append(trio.current_time())
    )
    dirty_files = object.__new__(DirtyFiles)
    dirty_files._files, dirty_files._writer = cast(Any, files), cast(Any, writer)
    dirty_files._tree = cast(Any, SimpleNamespace(row=lambda *_: None))
    node: Any = SimpleNamespace(ino=1, directory=None, name=b"f", origin=None, attrs={}, removed=True)
    began = trio.current_time()
    await dirty_files._take(node, version)
    assert trio.current_time() - began == pytest.approx(1.0) and 90 < len(tries) <= 101

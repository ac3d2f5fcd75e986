"""Which error each wrong call is, and what is left afterwards; by tables."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import CachefsError, CacheUnusable, OriginFailed, PermissionDenied
from cachefs.fs import Volume
from cachefs.fuse.errno_table import errno_of
from tests.fs.bucket import Bucket, WritableBucket
from tests.fs.mount import ROOT, Mount, mounted
from tests.fs.test_writing_model import WRITERS, World
from tests.fs.writers import MemoryWriter

RW: dict[str, Any] = {"file_mode": 0o644, "dir_mode": 0o755}
LONG = b"n" * 256


async def create(mount: Mount, path: str, name: bytes | None = None, flags: int = os.O_EXCL) -> None:
    parent, last = await mount.parent(path)
    _, _, opened = await mount.fs.create(parent, name or last, flags, 0o644, 1, 1000, 1000)
    mount.fs.release(opened[0])


async def open_file(mount: Mount, path: str, flags: int) -> None:
    mount.fs.release((await mount.fs.open(await mount.ino(path), flags, 1))[0])


async def rename(mount: Mount, path: str, to: str, flags: int = 0, newname: bytes | None = None) -> None:
    parent, name = await mount.parent(path)
    newparent, last = await mount.parent(to)
    await mount.fs.rename(parent, name, newparent, newname or last, flags)


async def mkdir(mount: Mount, path: str, name: bytes | None = None) -> None:
    parent, last = await mount.parent(path)
    await mount.fs.mkdir(parent, name or last, 0o755, 0, 0)


async def mknod(mount: Mount, path: str, mode: int) -> None:
    await mount.fs.mknod(*await mount.parent(path), mode, 1, 0, 0)


async def write_through(mount: Mount, path: str, flags: int, at: int = 0) -> None:
    fh = (await mount.fs.open(await mount.ino(path), flags, 1))[0]
    try:
        await mount.fs.write(fh, at, b"x")
    finally:
        mount.fs.release(fh)


async def allocate(mount: Mount, path: str, mode: int, offset: int, length: int) -> None:
    fh = (await mount.fs.open(await mount.ino(path), os.O_RDWR, 1))[0]
    try:
        await mount.fs.fallocate(fh, mode, offset, length)
    finally:
        mount.fs.release(fh)


async def resize(mount: Mount, path: str, size: int) -> None:
    await mount.fs.setattr(await mount.ino(path), size=size)


WRONG: list[tuple[int, Any, tuple[Any, ...]]] = [
    (errno.EEXIST, create, ("f",)),
    (errno.EEXIST, create, ("d",)),
    (errno.EISDIR, create, ("d", None, 0)),
    (errno.ENAMETOOLONG, create, ("x", LONG)),
    (errno.EINVAL, create, ("x", b"\xff\xfe")),
    (errno.EINVAL, create, ("x", b"a\0b")),
    (errno.ENOTDIR, create, ("f/x",)),
    (errno.EISDIR, open_file, ("d", os.O_WRONLY)),
    (errno.EISDIR, open_file, ("d", os.O_RDWR | os.O_TRUNC)),
    (errno.EBADF, write_through, ("f", os.O_RDONLY)),
    (errno.EFBIG, write_through, ("f", os.O_WRONLY, 5 << 40)),
    (errno.EFBIG, resize, ("f", (5 << 40) + 1)),
    (errno.EISDIR, resize, ("d", 0)),
    (errno.EOPNOTSUPP, allocate, ("f", 1, 0, 5)),
    (errno.EINVAL, allocate, ("f", 0, 0, 0)),
    (errno.EFBIG, allocate, ("f", 0, 5 << 40, 1)),
    (errno.ENOENT, Mount.unlink, ("none",)),
    (errno.EISDIR, Mount.unlink, ("d",)),
    (errno.ENOTDIR, Mount.unlink, ("f/x",)),
    (errno.ENOENT, Mount.rmdir, ("none",)),
    (errno.ENOTDIR, Mount.rmdir, ("f",)),
    (errno.ENOTEMPTY, Mount.rmdir, ("d",)),
    (errno.ENOTEMPTY, Mount.rmdir, ("hidden",)),
    (errno.EEXIST, mkdir, ("d",)),
    (errno.EEXIST, mkdir, ("f",)),
    (errno.ENOTDIR, mkdir, ("f/x",)),
    (errno.ENAMETOOLONG, mkdir, ("x", LONG)),
    (errno.EINVAL, mkdir, ("x", b"\xff")),
    (errno.EPERM, mknod, ("x", stat.S_IFIFO | 0o644)),
    (errno.EPERM, mknod, ("x", stat.S_IFCHR | 0o644)),
    (errno.EEXIST, mknod, ("f", stat.S_IFREG | 0o644)),
    (errno.ENOENT, rename, ("none", "x")),
    (errno.ENOTDIR, rename, ("d", "f")),
    (errno.EISDIR, rename, ("f", "d")),
    (errno.ENOTEMPTY, rename, ("e", "d")),
    (errno.EINVAL, rename, ("d", "d/sub/x")),
    (errno.EINVAL, rename, ("d", "d/x")),
    (errno.EEXIST, rename, ("f", "d/a", 1)),
    (errno.EINVAL, rename, ("f", "d/a", 2)),
    (errno.EINVAL, rename, ("f", "x", 4)),
    (errno.ENAMETOOLONG, rename, ("f", "x", 0, LONG)),
    (errno.EINVAL, rename, ("f", "x", 0, b"\xff")),
]
KEYS = ["f", "d/a", "d/sub/b", "e/c", "hidden//x"]


@pytest.mark.parametrize(
    ("number", "call", "arguments"), WRONG, ids=lambda v: getattr(v, "__name__", str(v)[:20])
)
async def test_wrong_calls_change_nothing(number: int, call: Any, arguments: tuple[Any, ...]) -> None:
    bucket, writer = WritableBucket(KEYS), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        tree, objects = await mount.walk(), dict(bucket.objects)
        with pytest.raises(CachefsError) as caught:
            await call(mount, *arguments)
        assert errno_of(caught.value)[0] == number
        assert await mount.walk() == tree and bucket.objects == objects
        assert not writer.dirty_files and mount.bytes.open_count == 0


CHANGES: list[tuple[Any, tuple[Any, ...]]] = [
    (create, ("x",)),
    (open_file, ("f", os.O_WRONLY)),
    (open_file, ("f", os.O_RDWR)),
    (open_file, ("f", os.O_RDONLY | os.O_TRUNC)),
    (resize, ("f", 0)),
    (Mount.unlink, ("f",)),
    (Mount.rmdir, ("d",)),
    (mkdir, ("x",)),
    (mknod, ("x", stat.S_IFREG)),
    (rename, ("f", "x")),
]


@pytest.mark.parametrize(("call", "arguments"), CHANGES, ids=lambda v: getattr(v, "__name__", str(v)[:20]))
@pytest.mark.parametrize("why", ["no writer", "no store that can be written"])
async def test_what_can_only_be_read_says_so(call: Any, arguments: tuple[Any, ...], why: str) -> None:
    bucket = Bucket(KEYS) if why != "no writer" else WritableBucket(KEYS)
    async with mounted(bucket, writer=None if why == "no writer" else MemoryWriter()) as mount:
        with pytest.raises(CachefsError) as caught:
            await call(mount, *arguments)
        assert errno_of(caught.value)[0] == errno.EROFS


async def test_between_two_sources_nothing_moves_and_their_list_is_fixed() -> None:
    one, two = WritableBucket(["f"]), WritableBucket(["g"])
    two.source = "s3://other"
    volumes: list[Any] = [Volume("one", one), Volume("two", two)]  # type: ignore[arg-type]
    async with mounted(one, volumes=volumes, writer=MemoryWriter(), **RW) as mount:
        for number, call, arguments in [
            (errno.EXDEV, rename, ("one/f", "two/f")),
            (errno.EPERM, create, ("x",)),
            (errno.EPERM, mkdir, ("x",)),
            (errno.EPERM, Mount.rmdir, ("one",)),
            (errno.EPERM, rename, ("one", "three")),
        ]:
            with pytest.raises(CachefsError) as caught:
                await call(mount, *arguments)
            assert errno_of(caught.value)[0] == number
        await mount.write("one/new", b"1")
        await mount.write("two/new", b"22")
        assert one.content("new") == b"1" and two.content("new") == b"22"


async def test_a_failed_upload_is_an_error_of_close_and_the_file_is_kept() -> None:
    bucket, writer = WritableBucket(["f"]), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        for path in ("f", "new"):
            writer.failure = PermissionDenied("no")
            with pytest.raises(PermissionDenied):
                await mount.write(path, b"content")
            assert await mount.read(path) == b"content"
            assert (await mount.walk())[path.encode()] == 7
            writer.failure = None
            await writer.upload_all()
            assert bucket.content(path) == b"content"
        assert not writer.dirty_files


@pytest.mark.parametrize("kind", ["put", "copy", "delete"])
async def test_a_store_that_refuses_changes_leaves_a_tree_that_is_true(kind: str) -> None:
    bucket, writer = WritableBucket(["d/f", "d/g", "e/h"]), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        await mount.walk()
        bucket.before = lambda what, key: OriginFailed("broken") if what == kind else None
        calls: list[tuple[str, Any, tuple[str, ...]]] = [
            ("put", Mount.mkdir, ("x",)),
            ("delete", Mount.unlink, ("d/f",)),
            ("copy", Mount.rename, ("d/f", "d/x")),
            ("copy", Mount.rename, ("d/f", "d/g")),
            ("copy", Mount.rename, ("d", "x")),
        ]
        for needs, call, arguments in calls:
            if needs == kind:
                with pytest.raises(OriginFailed):
                    await call(mount, *arguments)
        bucket.before = lambda what, key: None
        async with mounted(bucket) as other:
            assert await mount.walk() == await other.walk()
        assert not writer.noted
        for path in ("d/f", "d/g", "e/h"):
            assert await mount.read(path) == bucket.content(path)
        assert await mount.ino("d") != ROOT


@pytest.mark.parametrize("what", ["open", "open_backing"])
async def test_a_create_that_fails_leaves_no_name_and_no_object(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name shows the file already when its handle is made. That fails: no descriptor is left, or the caller gives up."""
    bucket, writer = WritableBucket(["f", "d/f"]), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        before = await mount.walk()
        for path in ("new", "d/new"):
            parent, name = await mount.parent(path)
            with monkeypatch.context() as patch, trio.CancelScope() as scope:

                def fail(dirty_file: Any) -> None:
                    raise CacheUnusable("no descriptor is left")

                async def wait(dirty_file: Any, scope: trio.CancelScope = scope) -> None:
                    scope.cancel()
                    await trio.sleep_forever()

                patch.setattr(writer, what, fail if what == "open" else wait)
                with pytest.raises(CacheUnusable if what == "open" else trio.Cancelled):
                    await mount.fs.create(parent, name, os.O_EXCL, 0o644, 1, 1000, 1000)
            assert await mount.stat(path) is None and await mount.walk() == before
            assert not mount.fs._files.handles and not writer.pending()
            assert set(bucket.objects) == {"f", "d/f"}
        await mount.write("new", b"content", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        assert bucket.content("new") == b"content"


async def test_a_mknod_whose_upload_fails_leaves_no_name_and_no_object() -> None:
    bucket, writer = WritableBucket(["f"]), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        writer.failure = PermissionDenied("no")
        with pytest.raises(PermissionDenied):
            await mknod(mount, "new", stat.S_IFREG | 0o644)
        assert await mount.stat("new") is None and not writer.pending()


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_RDWR | os.O_TRUNC])
async def test_an_open_goes_without_passthrough_where_that_fails(
    flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an open that says it has failed would have emptied the file."""
    bucket, writer = WritableBucket(["f"]), MemoryWriter(writeback=True)
    writer.passthrough = True
    async with mounted(bucket, writer=writer, **RW) as mount:

        async def fail(dirty_file: Any) -> None:
            raise CacheUnusable("no descriptor is left")

        monkeypatch.setattr(writer, "open_backing", fail)
        fh, backing = await mount.fs.open(await mount.ino("f"), flags, 1)
        assert not backing
        assert await mount.pwrite(fh, 0, b"written") == 7
        await mount.close_file(fh)
        assert (await mount.read("f"))[:7] == b"written"
        await writer.upload_all()


async def test_a_change_that_cannot_be_read_by_all_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader's handle cannot turn to what is written: no descriptor is left. The write fails, and nothing has happened."""
    bucket, writer = WritableBucket(["f"]), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        reader = await mount.open("f")
        fh = await mount.open("f", os.O_RDWR)
        content, before = await mount.pread(reader), bucket.objects["f"].etag
        with monkeypatch.context() as patch:

            def fail(dirty_file: Any) -> None:
                raise CacheUnusable("no descriptor is left")

            patch.setattr(writer, "open", fail)
            with pytest.raises(CacheUnusable):
                await mount.pwrite(fh, 0, b"new")
        assert await mount.pread(reader) == content == await mount.pread(fh)
        assert (await mount.fstat(reader)).nlink == 1 and await mount.walk() == {b"f": len(content)}
        await mount.close_file(fh)
        assert not writer.pending() and bucket.objects["f"].etag == before
        fh = await mount.open("f", os.O_RDWR)
        await mount.pwrite(fh, 0, b"new")
        assert (await mount.pread(reader))[:3] == b"new"
        await mount.close_file(fh)
        mount.fs.release(reader)
        assert bucket.content("f") == b"new" + content[3:]


async def test_a_first_change_without_a_name_that_fails_is_uploaded_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file is open for writing, and its name was removed. Its dirty file cannot be opened for the reader."""
    bucket, writer = WritableBucket(["d/f", "d/g"]), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        reader, fh = await mount.open("d/f"), await mount.open("d/f", os.O_RDWR)
        await mount.unlink("d/f")
        bucket.set("d/f", 10, 1)  # another client's, which is not to be replaced
        theirs, begin = bucket.objects["d/f"].etag, writer.begin

        async def begun(*args: Any, **how: Any) -> Any:
            return await begin(*args, **{**how, "base": None})  # what was read is cached

        monkeypatch.setattr(writer, "begin", begun)
        with monkeypatch.context() as patch:

            def fail(dirty_file: Any) -> None:
                raise CacheUnusable("no descriptor is left")

            patch.setattr(writer, "open", fail)
            with pytest.raises(CacheUnusable):
                await mount.pwrite(fh, 0, b"new")
        assert not writer.pending()
        await mount.pwrite(fh, 0, b"new")
        assert await mount.pread(fh) == b"new" == await mount.pread(reader)
        await mount.close_file(fh)
        mount.fs.release(reader)
        assert not writer.dirty_files and bucket.objects["d/f"].etag == theirs


@pytest.mark.parametrize("here", [True, False])
async def test_a_first_change_of_what_was_removed_and_is_not_cached_is_estale(here: bool) -> None:
    """By this node, which leaves the file without a name, or by another client. A descriptor does not answer ENOENT."""
    bucket, writer = WritableBucket(["f", "g"]), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        fh = await mount.open("f", os.O_RDWR)
        if here:
            await mount.unlink("f")
        else:
            del bucket.objects["f"]
        with pytest.raises(CachefsError) as raised:
            await mount.pwrite(fh, 0, b"new")
        assert errno_of(raised.value)[0] == errno.ESTALE
        mount.fs.release(fh)
        assert not writer.pending() and "f" not in bucket.objects


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("uploaded", [False, True])
@pytest.mark.parametrize("mode", WRITERS)
async def test_a_file_whose_removal_fails_after_the_origin_has_deleted_it_is_sent_once_more(
    tmp_path: Path, mode: str, uploaded: bool, is_open: bool
) -> None:
    """Otherwise its name would show a file that the origin does not have, and a close would promise that it does."""
    async with trio.open_nursery() as nursery:
        world = World(tmp_path, nursery, writeback=mode == "writeback")
        await world.start()
        mount, fs, bucket = world.mount, world.mount.fs, world.bucket
        bucket.delay, delete = 1.0, bucket.delete

        async def delete_without_reply(key: str) -> None:
            await delete(key)
            raise OriginFailed("no reply")

        parent = await mount.ino("dir")
        _, _, (fh, _) = await fs.create(parent, b"new", os.O_RDWR, 0o644, 1, 1000, 1000)
        await fs.write(fh, 0, b"data")

        async def close() -> None:
            with suppress(CachefsError):
                await fs.flush(fh)
            if not is_open:
                fs.release(fh)

        nursery.start_soon(close)
        while not bucket.puts:  # noqa: ASYNC110
            await trio.sleep(0.05)
        if uploaded:
            await trio.sleep(4)
        bucket.delete = delete_without_reply  # type: ignore[method-assign]
        with pytest.raises(OriginFailed):
            await mount.unlink("dir/new")
        bucket.delete = delete  # type: ignore[method-assign]
        if is_open:
            await fs.flush(fh)
            fs.release(fh)
        assert not await world.uploads.flush()
        shown = await mount.stat("dir/new")
        assert (shown is not None) == ("dir/new" in bucket.objects) == (is_open or not uploaded)
        await world.stop()
        nursery.cancel_scope.cancel()

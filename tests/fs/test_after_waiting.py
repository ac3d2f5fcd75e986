"""What was known before an operation waited may be false behind it: each of these changes something meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.errors import AlreadyExists, CachefsError, NotFound, ObjectChanged, OriginFailed
from cachefs.base.names import ObjectId
from cachefs.fs.changing import NOREPLACE
from cachefs.fs.inodes import ROOT, inode_key
from cachefs.origin.protocol import ObjectInfo
from cachefs.upload.staging import StagingFile
from tests.fs.bucket import Bytes, WritableBucket
from tests.fs.mount import mounted
from tests.fs.test_writing_beside import Passthrough, open_as_kernel
from tests.fs.test_writing_model import NoCache, World
from tests.fs.writers import MemoryWriter

RW: dict[str, Any] = {"file_mode": 0o644, "dir_mode": 0o755}


@asynccontextmanager
async def world(path: Path, *, writeback: bool = False, bucket: Any = None) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        world = World(path, nursery, writeback=writeback)
        world.bucket = bucket or world.bucket
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


@pytest.mark.parametrize("what", ["open", "lookup", "getattr"])
async def test_a_file_whose_upload_ends_between_an_answer_and_another_caller_that_waited_for_it(
    what: str,
) -> None:
    """The answer says that the file is being written. The caller does not take it for empty."""
    bucket, writer = WritableBucket(["f"]), MemoryWriter(writeback=True)
    async with mounted(bucket, writer=writer, **RW) as mount, trio.open_nursery() as nursery:
        ino, written = await mount.ino("f"), await mount.open("f", os.O_RDWR)
        mount.clock.now += 61
        head = Held(bucket, "head")
        found: list[bytes | int] = []

        async def ask() -> None:
            await mount.fs.lookup(1, b"f")
            # There is no checkpoint from here on, so the other caller has not gone on yet.
            for dirty_file in writer.pending():
                dirty_file.dirty, dirty_file.made = False, bucket._made("f", bytes(dirty_file.data))
                writer.on_committed(dirty_file, dirty_file.made)
                writer._settle(dirty_file)

        async def wait() -> None:
            if what == "lookup":
                shown, _ = await mount.fs.lookup(1, b"f")
                assert shown is not None
                found.append(shown.size)
            elif what == "getattr":
                found.append((await mount.fs.getattr(ino))[0].size)
            else:
                fh, _ = await mount.fs.open(ino, os.O_RDONLY, 1)
                found.append(await mount.pread(fh))
                await mount.close_file(fh)

        nursery.start_soon(ask)
        await head.reached.wait()
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await mount.fs.write(written, 0, b"written")
        await mount.close_file(written)
        head.released.set()
        await trio.sleep(1)
        content = bucket.content("f")
        assert len(content) == 10 and content.startswith(b"written")
        assert found == [content if what == "open" else len(content)]


async def test_a_file_that_another_client_replaces_while_an_open_empties_it() -> None:
    """Emptied here, it is what the name shows."""
    bucket = WritableBucket(["f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.fs._looker.ask(mount.fs._tree.root, b"f")  # known by itself, with no listing
        opened: list[int] = []

        async def empty() -> None:
            opened.append(await mount.open("f", os.O_WRONLY | os.O_TRUNC))

        async with trio.open_nursery() as nursery:
            bucket.set("f", version=1)
            async with mount.fs._tree.writing:
                nursery.start_soon(mount.entries)
                await trio.sleep(1)  # its page waits to be written down
                nursery.start_soon(empty)
                await trio.sleep(1)
        await mount.fs.write(opened[0], 0, b"seven b")
        assert (await mount.fstat(opened[0])).size == 7
        await mount.close_file(opened[0])
        assert bucket.content("f") == b"seven b" == await mount.read("f")


async def test_a_file_whose_other_writer_closes_it_while_an_open_empties_it(tmp_path: Path) -> None:
    """That close uploads the empty file, whose name does not show it yet."""
    async with world(tmp_path) as w, trio.open_nursery() as nursery:
        mount, opened = w.mount, list[int]()
        other = await mount.open("old", os.O_RDWR)

        async def empty() -> None:
            opened.append(await mount.open("old", os.O_WRONLY | os.O_TRUNC))

        async with mount.fs._tree.writing:
            nursery.start_soon(empty)
            await trio.testing.wait_all_tasks_blocked()
            assert w.uploads._dirty_files and not opened
            await mount.close_file(other)
            await trio.sleep(1)
            assert w.bucket.content("old") == b""
        await trio.sleep(1)
        await mount.pwrite(opened[0], 0, b"new")
        await mount.close_file(opened[0])
        assert w.bucket.content("old") == await mount.read("old") == b"new"


async def test_a_file_that_is_flushed_while_it_is_made(tmp_path: Path) -> None:
    async with world(tmp_path) as w, trio.open_nursery() as nursery:
        mount, opened = w.mount, list[int]()

        async def create() -> None:
            opened.append(await mount.open("new", os.O_WRONLY | os.O_CREAT))

        await mount.names()
        async with mount.fs._tree.writing:
            nursery.start_soon(create)
            await trio.testing.wait_all_tasks_blocked()
            assert w.uploads._dirty_files and not opened
            assert await w.uploads.flush() == []
            await trio.sleep(1)
        await trio.sleep(1)
        await mount.pwrite(opened[0], 0, b"new")
        await mount.close_file(opened[0])
        assert w.bucket.content("new") == await mount.read("new") == b"new"


async def test_a_directory_that_another_client_removes_while_a_file_is_made_in_it(tmp_path: Path) -> None:
    """The file is there, or the process was told that it is not; then nothing of it comes to the origin."""
    async with world(tmp_path) as w:
        mount = w.mount
        inside = await mount.ino("dir/deep")
        assert await mount.entries(inside) and await mount.entries(await mount.ino("dir"))
        failed: list[CachefsError] = []

        async def create() -> None:
            try:
                await mount.fs.create(inside, b"new", os.O_RDWR | os.O_CREAT, 0o644, 1, 1000, 1000)
            except CachefsError as exc:
                failed.append(exc)

        head = Held(w.bucket, "head", before=True)
        mount.clock.now += 6
        async with trio.open_nursery() as nursery:
            nursery.start_soon(create)
            await head.reached.wait()
            del w.bucket.objects["dir/deep/y"]
            mount.clock.now += 61
            await mount.entries(await mount.ino("dir"))
            head.released.set()
        await trio.sleep(1)
        assert isinstance(failed[0], ObjectChanged | NotFound)
        assert not await w.uploads.flush() and "dir/deep/new" not in w.bucket.objects
        assert not mount.fs._writing._local_changes.pending  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["write", "truncate", "chmod"])
async def test_a_file_that_is_changed_while_a_removal_fails(what: str, tmp_path: Path) -> None:
    """The change holds."""
    async with world(tmp_path) as w, trio.open_nursery() as nursery:
        mount = w.mount
        await mount.write("f", b"stored")
        reader = await mount.open("f")  # so it is read here, and not held
        writer = await mount.open("f", os.O_RDWR)
        await mount.fs.write(writer, 0, b"again ")
        await mount.close_file(writer)
        writer = await mount.open("f", os.O_RDWR)
        ino = await mount.ino("f")
        delete = Held(w.bucket, "delete", before=True)

        async def unlink() -> None:
            with pytest.raises(OriginFailed):
                await mount.unlink("f")

        nursery.start_soon(unlink)
        await delete.reached.wait()
        if what == "write":
            assert mount.fs.write_now(writer, 0, b"written") is None
            nursery.start_soon(mount.fs.write, writer, 0, b"written")
        elif what == "truncate":
            nursery.start_soon(partial(mount.fs.setattr, ino, size=7))
        else:
            await mount.fs.setattr(ino, mode=0o600)
            changed = await mount.stat("f")
            assert changed is not None and changed.mode & 0o777 == 0o600
        await trio.sleep(1)
        w.bucket.before = lambda kind, key: OriginFailed("no") if kind == "delete" else None
        delete.released.set()
        await trio.sleep(1)
        w.bucket.before = lambda kind, key: None
        shown = await mount.stat("f")
        assert shown is not None and shown.ino == ino
        assert (shown.size, shown.mode & 0o777) == ((6, 0o600) if what == "chmod" else (7, 0o644))
        await mount.close_file(writer)
        await mount.close_file(reader)
        shown = await mount.stat("f")
        assert shown is not None and shown.ino == ino
        assert (shown.size, shown.mode & 0o777) == ((6, 0o600) if what == "chmod" else (7, 0o644))
        assert await mount.read("f") == w.bucket.content("f")


@pytest.mark.parametrize("fails", [False, True])
async def test_a_file_that_goes_and_is_opened_after_its_last_reader_has_left(
    tmp_path: Path, fails: bool
) -> None:
    """The cache does not get what it holds: an open that does not wait would read it where it may be gone."""
    async with world(tmp_path, writeback=True) as w, trio.open_nursery() as nursery:
        mount = w.mount
        await mount.write("f", b"written here")
        reader = await mount.open("f")
        ino = (await mount.fstat(reader)).ino
        assert not await w.uploads.flush()
        delete = Held(w.bucket, "delete", before=True)
        opened = list[int | None]()

        async def unlink() -> None:
            with suppress(OriginFailed):
                await mount.unlink("f")

        async def open_again() -> None:
            try:
                opened.append((await mount.fs.open(ino, os.O_RDONLY, 2))[0])
            except ObjectChanged:
                opened.append(None)

        nursery.start_soon(unlink)
        await delete.reached.wait()
        await mount.close_file(reader)
        nursery.start_soon(open_again)
        await trio.sleep(1)
        assert opened == [], "its name goes, or stays"
        w.bucket.before = lambda kind, key: OriginFailed("no") if fails and kind == "delete" else None
        delete.released.set()
        await trio.sleep(1)
        if fails:
            assert opened[0] is not None and await mount.pread(opened[0]) == b"written here"
            await mount.close_file(opened[0])
            w.bucket.before = lambda kind, key: None
            await mount.unlink("f")
        else:
            assert opened == [None]
        assert await mount.stat("f") is None and not mount.fs._writing._local_changes._places


async def test_a_file_whose_upload_ends_while_another_fails_to_replace_it(tmp_path: Path) -> None:
    """Its object goes when it is removed."""
    async with world(tmp_path) as w, trio.open_nursery() as nursery:
        mount = w.mount
        fh = await mount.open("new", os.O_RDWR | os.O_CREAT)
        await mount.fs.write(fh, 0, b"new")
        put = Held(w.bucket, "put")

        async def replace() -> None:
            with pytest.raises(OriginFailed):
                await mount.rename("old", "new")

        nursery.start_soon(mount.fs.fsync, fh)
        await put.reached.wait()
        w.bucket.before = lambda kind, key: OriginFailed("no") if kind == "copy" else None
        nursery.start_soon(replace)
        await trio.sleep(1)
        put.released.set()
        await trio.sleep(1)
        assert "new" in w.bucket.objects
        await mount.unlink("new")
        assert "new" not in w.bucket.objects
        await mount.close_file(fh)


async def test_a_file_that_is_stored_while_a_rename_marks_its_directory(tmp_path: Path) -> None:
    async with world(tmp_path, writeback=True) as w, trio.open_nursery() as nursery:
        mount = w.mount
        await mount.unlink("dir/deep/y")
        del w.bucket.objects["dir/deep/"]
        mount.fs._tree.directory(await mount.ino("dir/deep")).marked = False
        await mount.write("dir/deep/f", b"written here")
        put = Held(w.bucket, "put")  # the marker's
        nursery.start_soon(mount.rename, "dir/deep/f", "g")
        await put.reached.wait()
        assert not await w.uploads.flush()
        await trio.sleep(1)
        put.released.set()
        await trio.sleep(1)
        assert await mount.read("g") == b"written here" and "dir/deep/f" not in w.bucket.objects


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


async def test_a_question_that_was_asked_before_a_refresh() -> None:
    """Who looks after the refresh is not content with its answer."""
    bucket = WritableBucket(["f"])
    async with mounted(bucket, **RW) as mount, trio.open_nursery() as nursery:
        await mount.stat("f")
        mount.clock.now += 61
        head = Held(bucket, "head")
        nursery.start_soon(mount.stat, "f")
        await head.reached.wait()
        bucket.set("f", size=5, version=1)
        await mount.fs.refresh("f")
        seen: list[Any] = []

        async def look() -> None:
            seen.append(await mount.stat("f"))

        nursery.start_soon(look)
        await trio.sleep(1)
        head.released.set()
        await trio.sleep(1)
        assert [found.size for found in seen] == [5]


class Tokens(WritableBucket):
    """Remembers with which token an object was made."""

    def __init__(self, *what: Any, **how: Any) -> None:
        super().__init__(*what, **how)
        self.tokens: dict[str, str] = {}

    async def put(self, *what: Any, token: str = "", **how: Any) -> Any:  # type: ignore[override]
        made = await super().put(*what, **how)
        self.tokens[made.etag] = token
        return made

    async def look(self, key: str) -> tuple[ObjectInfo, str]:
        info = await self.head(key)
        return info, self.tokens.get(info.etag, "")


async def test_a_kill_between_the_upload_of_a_renamed_file_and_its_copy(tmp_path: Path) -> None:
    """What was under the new name is no sign that the rename was done: the file keeps its old name."""
    bucket = Tokens(delay=0.001)
    async with world(tmp_path / "killed", writeback=True, bucket=bucket) as w, trio.open_nursery() as nursery:
        mount = w.mount
        await mount.write("new", b"is replaced")
        assert not await w.uploads.flush()
        put = Held(w.bucket, "put")
        await mount.write("f", b"was acknowledged")
        await put.reached.wait()
        copy = Held(w.bucket, "copy", before=True)
        nursery.start_soon(mount.rename, "f", "new")
        await trio.sleep(1)
        put.released.set()
        await copy.reached.wait()
        await trio.sleep(1)
        shutil.copytree(tmp_path / "killed", tmp_path / "again")
        async with world(tmp_path / "again", writeback=True, bucket=bucket) as later:
            assert await later.mount.read("f") == b"was acknowledged"
            assert await later.mount.read("new") == b"is replaced"
        copy.released.set()


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_kill_behind_the_copy_of_a_rename_that_may_replace_nothing(
    is_open: bool, tmp_path: Path
) -> None:
    """The copy is no other file, if the kernel repeats the request."""
    bucket = Tokens(delay=0.001)
    async with world(tmp_path / "killed", bucket=bucket) as w, trio.open_nursery() as nursery:
        mount = w.mount
        await mount.write("f", b"content")
        await mount.write("there", b"before")
        if is_open:
            fh = await mount.open("f", os.O_RDWR)
            await mount.pwrite(fh, 0, b"C")
        copy = Held(w.bucket, "copy")
        nursery.start_soon(mount.rename, "f", "new", NOREPLACE)
        await copy.reached.wait()
        mount.database.flush()
        shutil.copytree(tmp_path / "killed", tmp_path / "again")
        at_kill = dict(bucket.objects)
        copy.released.set()
        await trio.sleep(1)
        if is_open:
            await mount.close_file(fh)
    bucket.objects = at_kill
    async with world(tmp_path / "again", bucket=bucket) as w:
        mount, ino = w.mount, await w.mount.ino("f")
        # The note was for this daemon alone.
        assert not any(value for _, value in mount.database.scan("local"))
        for name, again in [("new", False), ("there", True)]:
            with pytest.raises(AlreadyExists):
                await mount.rename("f", name, NOREPLACE, again=again)
        await mount.rename("f", "new", NOREPLACE, again=True)
        assert await mount.ino("new") == ino and await mount.read("new") == b"content"
        assert bucket.objects.keys() == {"new", "there"} and await mount.read("there") == b"before"


async def test_a_rename_that_may_replace_nothing_and_fails_leaves_no_note(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.bucket.before = lambda kind, key: OriginFailed("500") if kind == "copy" else None
        with pytest.raises(OriginFailed):
            await w.mount.rename("old", "new", NOREPLACE)
        assert w.mount.database.scan("local") == []


@pytest.mark.parametrize("done", [False, True])
async def test_the_older_version_of_a_renamed_file_goes_once_the_new_name_has_the_file(
    done: bool, tmp_path: Path
) -> None:
    """What was under the new name before is no sign of that."""
    bucket = Tokens()
    old, new = bucket._made("old", b"older"), bucket._made("new", b"renamed" if done else b"was there")
    async with world(tmp_path, bucket=bucket) as w:
        before = "of another object" if done else new.etag
        note = {"source": bucket.source, "from": "old", "to": "new", "versions": [old.etag], "before": before}
        await w.uploads.note("n", {**note, "file": "which did not come back"})
    async with world(tmp_path, bucket=bucket) as w:
        assert await w.mount.stat("old") is None if done else await w.mount.read("old") == b"older"
        assert w.uploads.notes() == {}


async def test_what_a_rename_has_left_is_deleted_by_the_first_start_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(key: str) -> ObjectInfo:
        raise OriginFailed(f"no reply about {key}")

    bucket = Tokens()
    old, _ = bucket._made("old", b"renamed"), bucket._made("new", b"renamed")
    async with world(tmp_path, bucket=bucket) as w:
        tree = w.mount.fs._tree
        left = json.dumps({"to": "new", "versions": [old.etag]}).encode()
        tree.database.write([("local", tree.root.key + b"old", left)])
    with monkeypatch.context() as out:
        out.setattr(bucket, "head", fails)
        async with world(tmp_path, bucket=bucket):
            assert "old" in bucket.objects
    async with world(tmp_path, bucket=bucket) as w:
        assert await w.mount.stat("old") is None and await w.mount.read("new") == b"renamed"
        assert w.mount.fs._tree.database.scan("local") == []


async def test_a_kill_between_an_upload_and_the_removal_of_its_row(tmp_path: Path) -> None:
    """The file comes back, because its row is there, and keeps its inode."""
    async with world(tmp_path / "killed", writeback=True) as w, trio.open_nursery() as nursery:
        await w.mount.write("f", b"uploaded")
        shown = await w.mount.stat("f")
        removal = Held(w.uploads._records, "forget", before=True)
        nursery.start_soon(w.uploads.flush)
        await removal.reached.wait()
        w.mount.fs._tree.database.flush()
        shutil.copytree(tmp_path / "killed", tmp_path / "again")
        removal.released.set()
    async with world(tmp_path / "again", writeback=True, bucket=w.bucket) as later:
        assert len(later.uploads.pending()) == 1
        assert await later.mount.stat("f") == shown
        assert await later.mount.read("f") == b"uploaded"


@pytest.mark.parametrize("change", ["rename", "rename over it", "unlink"])
async def test_a_name_that_another_client_gave_away_while_its_file_is_read(
    change: str, tmp_path: Path
) -> None:
    """The reader keeps what was written here; a change of the name is one of the other client's file."""
    async with world(tmp_path) as w:
        mount = w.mount
        await mount.write("f", b"written here")
        reader = await mount.open("f")
        await mount.write("f", b"and again")
        theirs = w.bucket._made("f", b"theirs")
        await mount.fs.refresh()
        assert await mount.read("f") == b"theirs"
        if change == "rename":
            await mount.rename("f", "g")
            assert await mount.read("g") == b"theirs" == w.bucket.content("g") and "f" not in w.bucket.objects
        elif change == "unlink":
            await mount.unlink("f")
            assert await mount.stat("f") is None and "f" not in w.bucket.objects
        else:
            await mount.rename("old", "f")
            assert w.bucket.objects["f"].etag != theirs.etag and "old" not in w.bucket.objects
        assert await mount.pread(reader) == b"and again"
        await mount.close_file(reader)


async def test_a_directory_whose_file_another_client_removes_while_it_is_open(tmp_path: Path) -> None:
    """Nothing is in it."""
    async with world(tmp_path) as w:
        mount = w.mount
        await mount.mkdir("d")
        await mount.write("d/f", b"data")
        fh = await mount.open("d/f", os.O_RDWR)
        del w.bucket.objects["d/f"]
        await mount.fs.refresh()
        assert await mount.names("d") == []
        await mount.rmdir("d")
        assert await mount.stat("d") is None and not [key for key in w.bucket.objects if key[:2] == "d/"]
        with pytest.raises(ObjectChanged):
            await mount.fs.write(fh, 0, b"late")
        await mount.close_file(fh)
        assert not [key for key in w.bucket.objects if key[:2] == "d/"]


async def test_a_directory_that_another_client_replaces_by_a_file_while_one_is_written_in_it(
    tmp_path: Path,
) -> None:
    """It is shown, as where keys below it stand beside the object."""
    async with world(tmp_path) as w:
        mount = w.mount
        fh = await mount.open("dir/deep/new", os.O_RDWR | os.O_CREAT)
        await mount.fs.write(fh, 0, b"data")
        del w.bucket.objects["dir/deep/y"]
        w.bucket.set("dir/deep", size=5)
        mount.clock.now += 61
        shown = await mount.stat("dir/deep/new")
        assert shown is not None and shown.size == 4
        await mount.close_file(fh)
        assert await mount.read("dir/deep/new") == b"data" == w.bucket.content("dir/deep/new")


async def test_a_removed_file_whose_last_handle_is_closed_while_it_is_opened_again() -> None:
    bucket = WritableBucket([f"f{n}" for n in range(20)])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        nodes = mount.fs._writing._local_changes.nodes  # type: ignore[union-attr]
        for name in list(bucket.objects):
            ino, fh = await mount.ino(name), await mount.open(name)
            await mount.unlink(name)

            async def again(ino: int = ino) -> None:
                with suppress(ObjectChanged):
                    mount.fs.release((await mount.fs.open(ino, os.O_RDWR, 1))[0])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(again)
                while ino not in nodes:
                    await trio.lowlevel.checkpoint()
                mount.fs.release(fh)


async def test_a_removed_file_whose_last_handle_is_closed_while_it_is_truncated(tmp_path: Path) -> None:
    async with world(tmp_path) as w, trio.open_nursery() as nursery:
        mount = w.mount
        fh = await mount.open("f", os.O_RDWR | os.O_CREAT)
        await mount.fs.write(fh, 0, b"data")
        ino = await mount.ino("f")
        await mount.unlink("f")
        node = mount.fs._files.handles[fh].node
        assert node is not None and node.dirty_file is not None

        async def truncate() -> None:
            with suppress(ObjectChanged):
                await mount.fs.setattr(ino, size=2)

        async with node.dirty_file.lock:  # type: ignore[attr-defined]
            nursery.start_soon(truncate)
            await trio.sleep(1)
            mount.fs.release(fh)


async def test_a_mode_that_is_set_while_a_file_goes_that_is_not_open(tmp_path: Path) -> None:
    """The name shows it until it is gone."""
    async with world(tmp_path, writeback=True) as w, trio.open_nursery() as nursery:
        mount = w.mount
        await mount.write("old", b"is here alone")
        delete = Held(w.bucket, "delete", before=True)
        nursery.start_soon(mount.unlink, "old")
        await delete.reached.wait()
        await mount.fs.setattr(await mount.ino("old"), mode=0o600)
        shown = await mount.stat("old")
        assert shown is not None and shown.mode & 0o777 == 0o600
        delete.released.set()


@pytest.mark.parametrize("name", ["old", "dir"])
async def test_the_kernel_looks_again_at_the_names_of_a_rename_that_failed_in_the_end(
    name: str, tmp_path: Path
) -> None:
    """It knows the new one as missing, and the old one as the inode that has the new one."""
    async with world(tmp_path) as w:
        mount = w.mount
        assert await mount.stat("new") is None and await mount.stat(name) is not None
        w.bucket.before = lambda kind, key: OriginFailed("no") if kind == "delete" else None
        mount.invalidated.clear()
        with pytest.raises(OriginFailed):
            await mount.rename(name, "new")
        w.bucket.before = lambda kind, key: None
        assert {told[2] for told in mount.invalidated} >= {name.encode(), b"new"}
        assert await mount.stat("new") is not None and await mount.stat(name) is not None


async def test_a_name_that_is_looked_up_in_a_directory_which_has_just_been_removed(tmp_path: Path) -> None:
    """It is missing: a process is in the directory, and its number is no older one's."""
    async with world(tmp_path) as w, trio.open_nursery() as nursery:
        mount = w.mount
        ino = await mount.mkdir("d")
        async with mount.fs._tree.writing:
            nursery.start_soon(mount.rmdir, "d")
            await trio.sleep(1)
        for _ in range(20):
            assert (await mount.fs.lookup(ino, b"x"))[0] is None
            await trio.lowlevel.checkpoint()
        with pytest.raises(ObjectChanged):
            await mount.fs.mkdir(ino, b"x", 0o755, 1000, 1000)


@contextmanager
def answers_lost(bucket: WritableBucket, request: str) -> Iterator[None]:
    """The bucket carries these requests out, and fails them."""
    plain = getattr(bucket, request)

    async def fails(*what: Any, **how: Any) -> Any:
        await plain(*what, **how)
        raise OriginFailed("silence")

    setattr(bucket, request, fails)
    yield
    setattr(bucket, request, plain)


@pytest.mark.parametrize("there", [False, True])
async def test_a_copy_whose_answer_is_lost_is_asked_about(there: bool, tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        mount = w.mount
        if there:
            await mount.write("new", b"is replaced")
            await trio.sleep(1)  # until the cache has it
        content = await mount.read("old")
        assert {b"old"} <= set(await mount.names())
        assert (await mount.stat("new") is not None) is there

        mount.invalidated.clear()
        with answers_lost(w.bucket, "copy"), pytest.raises(OriginFailed):
            await mount.rename("old", "new")
        assert b"new" in {told[2] for told in mount.invalidated}
        assert (await mount.stat("new")).size == len(content) and await mount.read("new") == content
        assert await mount.read("old") == content


async def test_a_file_that_a_copy_without_answer_has_replaced_is_sent_again(tmp_path: Path) -> None:
    """As long as its content is at hand: the cache has not taken it yet."""
    async with world(tmp_path) as w:
        mount = w.mount
        await mount.write("new", b"is replaced")
        content = await mount.read("old")

        with answers_lost(w.bucket, "copy"), pytest.raises(OriginFailed):
            await mount.rename("old", "new")
        assert await mount.read("new") == b"is replaced" and await mount.read("old") == content
        await trio.sleep(1)
        assert w.bucket.content("new") == b"is replaced"
        assert await mount.read("new") == b"is replaced" and await mount.read("old") == content


async def test_a_directory_whose_marker_may_have_been_made_is_asked_about(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        mount = w.mount
        assert b"d" not in await mount.names() and await mount.stat("d") is None

        mount.invalidated.clear()
        with answers_lost(w.bucket, "put"), pytest.raises(OriginFailed):
            await mount.mkdir("d")
        assert b"d" in {told[2] for told in mount.invalidated}
        assert (await mount.stat("d")).is_dir and b"d" in await mount.names()


@pytest.mark.parametrize("name", ["old", "d"])
async def test_a_removal_whose_answer_is_lost_is_asked_about(name: str, tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        mount = w.mount
        await mount.mkdir("d")
        assert {b"old", b"d"} <= set(await mount.names())
        with answers_lost(w.bucket, "delete"):
            with pytest.raises(OriginFailed):
                await (mount.rmdir(name) if name == "d" else mount.unlink(name))
            assert await mount.stat(name) is None and (await mount.stat("dir/x")) is not None


async def test_a_truncation_of_a_removed_file_that_is_closed_meanwhile_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ESTALE the kernel would truncate the file that has the name now, too."""
    reached, released, plain = trio.Event(), trio.Event(), StagingFile.truncate

    async def waits(self: StagingFile, size: int) -> None:
        reached.set()
        await released.wait()
        await plain(self, size)

    async with world(tmp_path) as w, trio.open_nursery() as nursery:
        mount, sizes = w.mount, list[int]()
        fh = await mount.open("old", os.O_RDWR)
        await mount.pwrite(fh, 0, b"12345")
        ino = await mount.ino("old")
        await mount.unlink("old")

        async def truncate() -> None:
            sizes.append((await mount.fs.setattr(ino, size=1))[0].size)

        monkeypatch.setattr(StagingFile, "truncate", waits)
        nursery.start_soon(truncate)
        await reached.wait()
        await mount.close_file(fh)
        released.set()
    assert sizes == [1]


class TakingCache(NoCache):
    """Takes every file that was written."""

    async def adopt(self, version: ObjectId, path: Path) -> bool:
        os.unlink(path)
        return True

    async def adopt_bytes(self, versions: Sequence[tuple[ObjectId, bytes]]) -> list[bool]:
        return [True] * len(versions)


@pytest.mark.parametrize("how", ["replaced", "removed"])
@pytest.mark.parametrize("size", [3, 300_000])
async def test_a_file_that_the_cache_takes_while_a_removal_fails_keeps_its_name(
    how: str, size: int, tmp_path: Path
) -> None:
    """Its upload ends while the removal waits for it; the cache takes it while the origin is asked to remove the name."""
    async with world(tmp_path, writeback=True) as w, trio.open_nursery() as nursery:
        mount, w.uploads._store = w.mount, TakingCache()
        await mount.write("f", b"x" * size)
        put = Held(w.bucket, "put")
        await put.reached.wait()
        asked = Held(w.bucket, "copy" if how == "replaced" else "delete", before=True)
        w.bucket.before = lambda kind, _: OriginFailed("not now") if kind in ("copy", "delete") else None

        async def change() -> None:
            with pytest.raises(OriginFailed, match="not now"):
                await (mount.rename("old", "f") if how == "replaced" else mount.unlink("f"))

        nursery.start_soon(change)
        await trio.testing.wait_all_tasks_blocked()
        put.released.set()
        await asked.reached.wait()
        await trio.sleep(10)
        asked.released.set()
        await trio.testing.wait_all_tasks_blocked()
        assert await mount.names() == [b"dir", b"f", b"old"]
        await trio.sleep(10)
        assert await mount.names() == [b"dir", b"f", b"old"]
        assert await mount.read("f") == b"x" * size
        assert not w.uploads._dirty_files


async def test_a_write_that_is_cancelled_when_it_has_a_dirty_file_for_a_removed_file(tmp_path: Path) -> None:
    """Nothing of it is uploaded: the name is gone."""
    async with world(tmp_path) as w:
        mount, begin, scope = w.mount, w.uploads.begin, trio.CancelScope()
        fh = await mount.open("old", os.O_RDWR)
        await mount.unlink("old")

        async def begun(*what: Any, **how: Any) -> Any:
            scope.cancel()
            with trio.CancelScope(shield=True):
                return await begin(*what, **how)

        w.uploads.begin = begun  # type: ignore[method-assign]
        w.reader.open = lambda origin, version: bytes(version.size)  # type: ignore[method-assign]
        with scope:
            await mount.fs.write(fh, 0, b"late")
        mount.fs.release(fh)
        await trio.sleep(10)
        assert "old" not in w.bucket.objects and not w.uploads._dirty_files


async def test_an_open_that_is_cancelled_when_it_has_the_cache_file_of_a_removed_file() -> None:
    """Nothing of it is uploaded: the name is gone."""
    bucket, writer = WritableBucket(["f"]), MemoryWriter()
    writer.takes = writer.passthrough = True
    async with mounted(bucket, writer=writer, **RW) as mount:
        mount.fs.read_through(Passthrough(bucket))
        mount.fs.enable_passthrough(lambda backing: True)
        await mount.read("f")
        ino, reader, _ = await open_as_kernel(mount, "f", os.O_RDONLY)
        await mount.unlink("f")
        bucket.set("f")
        take, discard, scope = writer.take, writer.discard, trio.CancelScope()

        def taken(*what: Any) -> Any:
            scope.cancel()
            return take(*what)

        async def discarded(*what: Any, **how: Any) -> None:
            await trio.lowlevel.checkpoint()
            await discard(*what, **how)

        writer.take, writer.discard = taken, discarded  # type: ignore[method-assign]
        with scope:
            await mount.fs.open(ino, os.O_RDWR, 1)
        assert [dirty_file.discarded for dirty_file in writer.dirty_files] == [True]
        await mount.close_file(reader)


@pytest.mark.parametrize("how", ["taken", "left"])
async def test_a_mode_that_is_set_while_an_open_waits_for_a_file_in_passthrough(how: str) -> None:
    """It holds, whether the open gets the cache file of the reader, or the reader closes it."""
    bucket, writer = WritableBucket(["f"]), MemoryWriter()
    writer.passthrough = True
    async with mounted(bucket, writer=writer, **RW) as mount, trio.open_nursery() as nursery:
        mount.fs.read_through(Passthrough(bucket))
        mount.fs.enable_passthrough(lambda backing: True)
        await mount.read("f")
        ino, reader, _ = await open_as_kernel(mount, "f", os.O_RDONLY)
        opened: list[int] = []

        async def write() -> None:
            opened.append((await mount.fs.open(ino, os.O_RDWR, 1))[0])

        writer.takes = False
        nursery.start_soon(write)
        await trio.sleep(0.1)
        await mount.fs.setattr(ino, mode=0o600)
        writer.takes = how == "taken"
        if how == "left":
            await mount.close_file(reader)
        await trio.sleep(1)
        await mount.fs.write(opened[0], 0, b"new")
        await mount.close_file(opened[0])
        if how == "taken":
            await mount.close_file(reader)
        shown = await mount.stat("f")
        assert shown is not None and (shown.ino, shown.mode & 0o777) == (ino, 0o600)


async def test_a_directory_that_another_client_removes_while_a_name_in_it_is_asked_for() -> None:
    """It comes back before the answer does, and is another directory: no row is written below the removed one."""
    bucket = WritableBucket(["d/f", "other"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount, trio.open_nursery() as nursery:
        ino = await mount.ino("d")
        assert await mount.names("d") == [b"f"]
        mount.clock.now += 61
        head = Held(bucket, "head")

        async def look() -> None:
            with pytest.raises(ObjectChanged):
                await mount.fs.lookup(ino, b"f")

        nursery.start_soon(look)
        await head.reached.wait()
        del bucket.objects["d/f"]
        assert await mount.names() == [b"other"]
        await trio.sleep(1)  # until the rows of the directory are erased
        bucket.set("d/f")
        head.released.set()
        await trio.sleep(1)
        assert [key[-5:] for key, _ in mount.database.scan("names")] == [b"other"]
        assert [key for key, _ in mount.database.scan("directories")] == [inode_key(ROOT)]

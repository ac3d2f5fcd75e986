"""Writing beside other things: listings under way, readers in passthrough, other clients of the origin, a death."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import (
    AlreadyExists,
    CachefsError,
    NotFound,
    ObjectChanged,
    OriginFailed,
    Unreachable,
)
from tests.fs.bucket import Bytes, WritableBucket
from tests.fs.mount import ROOT, Mount, mounted
from tests.fs.writers import MemoryWriter

RW: dict[str, Any] = {"file_mode": 0o644, "dir_mode": 0o755}


# -- readers of a directory in which names are added --------------------------------------------------------

ADDING: dict[str, Callable[[Mount, str], Awaitable[Any]]] = {
    "rename": lambda mount, name: mount.rename(name, f"z{name}"),
    "create": lambda mount, name: mount.write(f"z{name}", b"abc"),
    "mkdir": lambda mount, name: mount.mkdir(f"z{name}"),
}


@pytest.mark.parametrize("add", ADDING)
@pytest.mark.parametrize("page", [3, 1000])
async def test_a_program_that_adds_a_name_for_each_it_reads_ends(add: str, page: int) -> None:
    """As `for entry in os.scandir(...): os.rename(entry, "z" + entry)`: the new names lie behind all that it reads."""
    before = [f"f{number}" for number in range(10)]
    async with mounted(WritableBucket(before, page=page), writer=MemoryWriter(), **RW) as mount:
        if page == 3:
            await mount.entries()
        handle, seen, offset = mount.fs.opendir(ROOT), [], 0
        while len(seen) < 100 and (some := await mount.fs.readdir(handle, offset, 1)):
            offset = some[0].next_offset
            seen.append(some[0].name.decode())
            await ADDING[add](mount, seen[-1])
        assert seen == before
        now = [*([] if add == "rename" else before), *(f"z{name}" for name in before)]
        again = await mount.fs.readdir(handle, 0, 100)  # rewinddir(3)
        assert [entry.name.decode() for entry in again] == now
        assert await mount.names() == [name.encode() for name in now]
        mount.fs.releasedir(handle)


# -- listings that were asked for before ------------------------------------------------------------------

CHANGES: dict[str, tuple[Callable[[Mount], Awaitable[None]], dict[bytes, int | None]]] = {}


def change(**after: int | None) -> Any:
    def keep(function: Callable[[Mount], Awaitable[None]]) -> Any:
        CHANGES[function.__name__] = (function, {k.encode(): v for k, v in after.items()})
        return function

    return keep


@change(b=5, c=5, new=3)
async def create(mount: Mount) -> None:
    await mount.write("new", b"abc")


@change(b=3, c=5)
async def rewrite(mount: Mount) -> None:
    await mount.write("b", b"abc")


@change(c=5)
async def remove(mount: Mount) -> None:
    await mount.unlink("b")


@change(c=5)
async def create_and_remove(mount: Mount) -> None:
    await mount.write("new", b"abc")
    await mount.unlink("new")
    await mount.unlink("b")


@change(c=5, z=5)
async def move(mount: Mount) -> None:
    await mount.rename("b", "z")


@change(c=5)
async def replace(mount: Mount) -> None:
    await mount.rename("b", "c")


@change(b=5, c=5, d=None)
async def make_directory(mount: Mount) -> None:
    await mount.mkdir("d")


@change(c=5, b=None)
async def file_to_directory(mount: Mount) -> None:
    await mount.unlink("b")
    await mount.mkdir("b")


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("held_back", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 1])
async def test_a_page_asked_for_before_a_change_does_not_undo_it(
    name: str, held_back: int, before: int
) -> None:
    """One page of the listing is answered as it was before the change, and lands after it."""
    function, after = CHANGES[name]
    bucket = WritableBucket(page=1, delay=0.001)
    for key in ("b", "c"):
        bucket.set(key, size=5)
    plain, pages = bucket.list_page, 0
    changed = trio.Event()

    async def late(prefix: str, **kwargs: Any) -> Any:
        nonlocal pages
        page = await plain(prefix, **kwargs)
        if armed and kwargs["limit"] > 1:
            pages += 1
            if pages == held_back:
                reached.set()
                await changed.wait()
        return page

    bucket.list_page = late  # type: ignore[method-assign]
    armed, reached = False, trio.Event()
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        for _ in range(before):
            await mount.walk()
        await mount.fs.refresh()
        for key in (b"b", b"c", b"new", b"d", b"z"):
            await mount.fs._looker.ask(mount.fs._tree.root, key)  # known by themselves, with no listing
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.entries)
            armed = True
            with trio.move_on_after(1):
                await reached.wait()
            await function(mount)
            changed.set()
        armed = False
        assert await mount.walk() == after
        for path, size in after.items():
            if size is not None:
                assert await mount.read(path.decode()) == bucket.content(path.decode())
        mount.clock.now += 61
        assert await mount.walk() == after


async def test_a_question_asked_before_a_change_does_not_undo_it() -> None:
    """Its answer is true for a moment between a create and a removal, and comes behind both."""
    bucket = WritableBucket(["f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        plain, made, released = bucket.head, trio.Event(), trio.Event()

        async def late(key: str) -> Any:
            await made.wait()
            info = await plain(key)
            await released.wait()
            return info

        root, seen = mount.fs._tree.root, list[Any]()

        async def ask() -> None:
            seen.append(await mount.fs._looker.ask(root, b"new", share=False))

        assert await mount.stat("new") is None
        bucket.head = late  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.1)
            await mount.write("new", b"abc")
            made.set()
            await trio.sleep(0.1)
            await mount.unlink("new")
            released.set()
        assert seen == [mount.fs._tree.root.ttls.negative_ttl]
        assert await mount.walk() == {b"f": 10}


# -- readers in passthrough -----------------------------------------------------------------------------


class BackingFile:
    def __init__(self) -> None:
        self.id, self.fd, self.users = 7, -1, 1

    def registered(self, backing_id: int) -> None: ...


class Passthrough(Bytes):
    """Opens in passthrough everything that was read once."""

    passthrough = True

    def __init__(self, bucket: Any) -> None:
        super().__init__(bucket)
        self.backings = 0

    def open_backing(self, opened: Any) -> Any:
        if opened not in self.warm:
            return None
        self.backings += 1
        return BackingFile()

    def reopen_backing(self, backing: Any) -> None:
        self.backings += 1

    def release_backing(self, backing: Any) -> None:
        self.backings -= 1


async def open_as_kernel(mount: Mount, path: str, flags: int) -> tuple[int, int, int]:
    """(ino, fh, backing), walked again after ESTALE."""
    for _ in range(2):
        ino = await mount.ino(path)
        try:
            opened = mount.fs.open_now(ino, flags, 1) or await mount.fs.open(ino, flags, 1)
        except ObjectChanged:
            continue
        return ino, opened[0], opened[1]
    raise AssertionError("ESTALE twice")


async def test_a_file_that_is_passthrough_and_that_others_use_is_written_under_another_number() -> None:
    bucket = WritableBucket(["f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        reader = Passthrough(bucket)
        mount.fs.read_through(reader)
        mount.fs.enable_passthrough(lambda backing: True)
        old = await mount.read("f")
        own, passthrough, backing = await open_as_kernel(mount, "f", os.O_RDONLY)
        assert backing == 7
        before = (await mount.fs.getattr(own))[0]
        number, fh, backing = await open_as_kernel(mount, "f", os.O_RDWR)
        assert backing == 0 and number != own
        await mount.fs.write(fh, 0, b"new")
        third, other, backing = await open_as_kernel(mount, "f", os.O_RDONLY)
        assert (third, backing) == (number, 0)
        assert await mount.pread(other) == b"new" + old[3:]
        await mount.close_file(fh)
        assert bucket.content("f") == b"new" + old[3:]
        assert (await mount.fs.getattr(own))[0] == before and await mount.pread(passthrough) == old
        mount.fs.release(passthrough)
        mount.fs.release(other)
        assert await mount.ino("f") == number
        assert await mount.read("f") == b"new" + old[3:]
        assert reader.backings == 0 and reader.open_count == 0


async def test_a_file_that_is_passthrough_is_written_where_its_readers_have_it() -> None:
    bucket, writer = WritableBucket(["f"]), MemoryWriter()
    writer.takes = writer.passthrough = True
    async with mounted(bucket, writer=writer, **RW) as mount:
        reader = Passthrough(bucket)
        mount.fs.read_through(reader)
        mount.fs.enable_passthrough(lambda backing: True)
        old = await mount.read("f")
        opened = [await open_as_kernel(mount, "f", os.O_RDONLY) for _ in range(2)]
        opened.append(await open_as_kernel(mount, "f", os.O_RDWR))
        opened.append(await open_as_kernel(mount, "f", os.O_RDONLY))
        opened.append(await open_as_kernel(mount, "f", os.O_WRONLY))
        assert {(ino, backing) for ino, _, backing in opened} == {(opened[0][0], 7)}
        assert writer.taken == [2]
        attributes, _ = await mount.fs.getattr(opened[0][0])
        await mount.fs.write(opened[2][1], 0, b"new")
        for _, fh, _ in opened:
            assert await mount.pread(fh) == b"new" + old[3:]
        after, _ = await mount.fs.getattr(opened[0][0])
        assert (after.ino, after.size) == (attributes.ino, len(old))
        for _, fh, _ in opened:
            await mount.close_file(fh)
        assert bucket.content("f") == b"new" + old[3:]
        reader.backings -= 2  # they are the dirty file's
        assert reader.backings == 0 and reader.open_count == 0 and not writer.dirty_files


async def test_what_readers_have_of_an_older_version_is_not_written() -> None:
    """Another client has replaced the object: a write here would put the old content in the place of the new."""
    bucket, writer = WritableBucket(["f"]), MemoryWriter()
    writer.takes = writer.passthrough = True
    async with mounted(bucket, writer=writer, **RW) as mount:
        mount.fs.read_through(Passthrough(bucket))
        mount.fs.enable_passthrough(lambda backing: True)
        await mount.read("f")
        ino, reader, _ = await open_as_kernel(mount, "f", os.O_RDONLY)
        bucket.set("f", size=20, version=1)
        replaced = bucket.content("f")
        await mount.fs.refresh()
        await mount.stat("f")
        with pytest.raises(ObjectChanged):
            await mount.fs.open(ino, os.O_RDWR, 1)
        assert writer.taken == []
        await mount.close_file(reader)
        assert bucket.content("f") == replaced


async def test_a_reader_that_comes_while_a_mapping_may_write_the_file() -> None:
    """It has the dirty file, like all that are open under the number, though that may not be used as the stored version."""
    bucket, writer = WritableBucket(["f"]), MemoryWriter()
    writer.takes = writer.passthrough = True
    async with mounted(bucket, writer=writer, **RW) as mount:
        mount.fs.read_through(Passthrough(bucket))
        mount.fs.enable_passthrough(lambda backing: True)
        old = await mount.read("f")
        reader, written = [(await open_as_kernel(mount, "f", flags))[1] for flags in (os.O_RDONLY, os.O_RDWR)]
        await mount.close_file(written)
        dirty_file = writer.dirty_files[0]
        made, dirty_file.made = dirty_file.made, None
        _, fh, backing = await open_as_kernel(mount, "f", os.O_RDONLY)
        assert dirty_file.passthrough is not None and backing == dirty_file.passthrough.id
        assert dirty_file.handles == 2 and await mount.pread(fh) == old
        dirty_file.made = made
        for one in (reader, fh):
            await mount.close_file(one)


async def test_a_file_that_is_passthrough_and_only_opened_to_write_stays_what_it_is() -> None:
    bucket, writer = WritableBucket(["f"]), MemoryWriter()
    writer.takes = writer.passthrough = True
    async with mounted(bucket, writer=writer, **RW) as mount:
        mount.fs.read_through(Passthrough(bucket))
        mount.fs.enable_passthrough(lambda backing: True)
        await mount.read("f")
        ino, reader, _ = await open_as_kernel(mount, "f", os.O_RDONLY)
        before, etag = await mount.fs.getattr(ino), bucket.objects["f"].etag
        _, fh, _ = await open_as_kernel(mount, "f", os.O_RDWR)
        await mount.close_file(fh)
        assert (await mount.fs.getattr(ino))[0] == before[0]
        await mount.close_file(reader)
        assert bucket.objects["f"].etag == etag and not writer.dirty_files
        assert (await mount.fs.getattr(await mount.ino("f")))[0] == before[0]


async def test_who_reads_through_the_daemon_sees_what_is_written() -> None:
    bucket = WritableBucket(["f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        mount.fs.read_through(reader := Passthrough(bucket))
        mount.fs.enable_passthrough(lambda backing: True)
        ino, fd, backing = await open_as_kernel(mount, "f", os.O_RDONLY)
        assert backing == 0
        old = await mount.pread(fd)
        same, fh, _ = await open_as_kernel(mount, "f", os.O_WRONLY)
        assert same == ino
        late, third, backing = await open_as_kernel(mount, "f", os.O_RDONLY)
        assert (late, backing) == (ino, 0), "no passthrough beside a writer"
        await mount.fs.write(fh, 2, b"XYZ")
        for handle in (fd, third):
            assert await mount.pread(handle) == old[:2] + b"XYZ" + old[5:]
        await mount.close_file(fh)
        assert await mount.ino("f") == ino
        for handle in (fd, third):
            assert await mount.pread(handle) == bucket.content("f")
            mount.fs.release(handle)
        assert reader.open_count == 0


async def test_an_unlinked_file_lives_as_long_as_it_is_open() -> None:
    bucket, writer = WritableBucket(), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        fh = await mount.open("f", os.O_RDWR | os.O_CREAT)
        ino = await mount.ino("f")
        await mount.fs.write(fh, 0, b"one")
        await mount.unlink("f")
        assert await mount.stat("f") is None
        attributes, _ = await mount.fs.getattr(ino)
        assert (attributes.size, attributes.nlink) == (3, 0)
        await mount.fs.write(fh, 3, b"two")
        await mount.write("f", b"another")
        assert await mount.ino("f") != ino
        assert await mount.pread(fh) == b"onetwo"
        assert (await mount.fs.setattr(ino, size=2, mode=0o600))[0].size == 2
        await mount.fs.fsync(fh)
        await mount.close_file(fh)
        assert bucket.content("f") == b"another" and not writer.dirty_files
        assert await mount.read("f") == b"another"
        with pytest.raises(CachefsError):
            await mount.fs.write(fh, 0, b"x")


async def test_readers_of_a_file_read_on_when_it_is_renamed() -> None:
    bucket = WritableBucket(["d/f", "e/x"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        content = bucket.content("d/f")
        fd = await mount.open("d/f")
        ino = await mount.ino("d/f")
        await mount.rename("d/f", "e/f")
        assert await mount.ino("e/f") == ino
        assert await mount.pread(fd) == content
        assert mount.fs.attributes_now(ino) is not None
        mount.fs.release(fd)
        assert await mount.read("e/f") == content and mount.bytes.open_count == 0


async def test_a_number_that_moved_is_never_that_of_a_new_name() -> None:
    """The kernel may know B/f under the number that A/f had: for as long as it does, A/f has another."""
    bucket = WritableBucket(["A/f", "B/x"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        directory = await mount.ino("A")
        seen = {await mount.ino("A/f")}
        for i in range(4):
            await mount.rename("A/f", f"B/{i}")
            await mount.write("A/f", b"%d" % i)
            ino = await mount.ino("A/f")
            assert ino not in seen
            seen.add(ino)
        for i in range(4):
            assert await mount.ino(f"B/{i}") in seen
        await mount.rename("A", "C")
        assert await mount.ino("C") == directory
        await mount.mkdir("A")
        assert await mount.ino("A") != directory
        found, _ = await mount.fs.lookup(directory, b"f")
        assert found is not None and found.size == 1


# -- another hand at the store ------------------------------------------------------------------------------


async def test_what_was_set_goes_with_the_inode() -> None:
    """Another client's file of the same name has nothing of it."""
    bucket = WritableBucket(["f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        ino = await mount.ino("f")
        await mount.fs.setattr(ino, mode=0o600, uid=7)
        await mount.write("f", b"written here", os.O_WRONLY)
        found = await mount.stat("f")
        assert found is not None and (found.ino, found.mode & 0o777, found.uid) == (ino, 0o600, 7)
        bucket.set("f", size=20, version=1)
        mount.clock.now += 61
        found = await mount.stat("f")
        assert found is not None and (found.mode & 0o777, found.uid) == (0o644, 1000) and found.ino != ino
        mount.database.flush()
        assert mount.database.stored.count("kept") == 0


async def test_the_last_close_wins() -> None:
    bucket = WritableBucket(["f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        fh = await mount.open("f", os.O_RDWR)
        await mount.fs.write(fh, 0, b"ours")
        bucket.set("f", size=50, version=9)
        mount.clock.now += 61
        assert (await mount.walk())[b"f"] == 10, "what is written here is shown here"
        await mount.close_file(fh)
        assert bucket.content("f")[:4] == b"ours" and bucket.objects["f"].size == 10
        bucket.set("f", size=50, version=10)
        mount.clock.now += 61
        assert (await mount.walk())[b"f"] == 50, "and no longer than that"
        assert await mount.read("f") == bucket.content("f")


async def test_who_has_the_old_version_open_cannot_write_over_a_new_one_unseen() -> None:
    bucket = WritableBucket(["f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        fh = await mount.open("f", os.O_RDWR)
        bucket.set("f", size=50, version=9)
        with pytest.raises(ObjectChanged):
            await mount.fs.write(fh, 0, b"ours")
        mount.fs.release(fh)
        assert bucket.objects["f"].size == 50


async def test_a_removed_directory_with_something_new_in_it_stays() -> None:
    bucket = WritableBucket(["d/f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.walk()
        await mount.unlink("d/f")
        bucket.set("d/theirs")
        with pytest.raises(CachefsError):
            await mount.rmdir("d")
        assert "d/theirs" in bucket.objects


async def test_a_directory_moves_with_what_the_store_has_of_its_dirty_files() -> None:
    bucket, writer = WritableBucket(["d/f", "x"]), MemoryWriter(writeback=True)
    async with mounted(bucket, writer=writer, **RW) as mount:
        await mount.write("d/f", b"one")
        await mount.rename("d", "e")
        assert bucket.objects.keys() == {"e/f", "x"} and bucket.content("e/f") != b"one"
        for _ in range(3):
            mount.clock.now += 61
            assert await mount.walk() == {b"e": None, b"e/f": 3, b"x": 10}
            mount.clock.now += 61
            assert await mount.read("e/f") == b"one"
        await writer.upload_all()
        mount.clock.now += 61
        assert await mount.walk() == {b"e": None, b"e/f": 3, b"x": 10}


# -- a daemon that died ---------------------------------------------------------------------------------


async def test_what_was_being_written_at_a_death_is_looked_up_anew(tmp_path: Path) -> None:
    bucket = WritableBucket(["d/f", "d/g"])
    async with mounted(bucket, path=tmp_path, writer=MemoryWriter(), immutable=True, **RW) as mount:
        await mount.walk()
        await mount.write("d/g", b"", os.O_WRONLY)
        for path in ("d/f", "d/new"):
            fh = await mount.open(path, os.O_RDWR | os.O_CREAT)
            await mount.fs.write(fh, 0, b"lost")
    for writer in (None, MemoryWriter()):
        async with mounted(bucket, path=tmp_path, writer=writer, immutable=True, **RW) as mount:
            await mount.fs.recover()
            assert await mount.walk() == {b"d": None, b"d/f": 10, b"d/g": 10}
            mount.database.flush()
            assert mount.database.stored.count("local") == 0


async def test_what_was_promised_is_shown_after_a_death_even_without_names(tmp_path: Path) -> None:
    bucket, writer = WritableBucket(["d/f", "x"]), MemoryWriter(writeback=True)
    async with mounted(bucket, path=tmp_path / "1", writer=writer, **RW) as mount:
        await mount.walk()
        await mount.mkdir("d/made")
        await mount.write("d/f", b"one")
        await mount.write("d/made/new", b"three")
        await mount.rename("d", "e")
    for place in ("1", "2"):
        again = MemoryWriter(writeback=True)
        again.dirty_files = writer.pending()
        for dirty_file in again.dirty_files:
            dirty_file.handles = 0
        async with mounted(bucket, path=tmp_path / place, writer=again, **RW) as mount:
            await mount.fs.recover()
            tree = {b"e": None, b"e/f": 3, b"e/made": None, b"e/made/new": 5, b"x": 10}
            assert await mount.walk() == tree
            assert await mount.read("e/made/new") == b"three"
            if place == "2":
                await again.upload_all()
                assert await mount.walk() == tree
                assert bucket.content("e/f") == b"one"


@pytest.mark.parametrize("left", range(10))
async def test_a_rename_of_a_directory_that_was_cut_short_is_finished(tmp_path: Path, left: int) -> None:
    """The store stops taking anything after so many copies and deletions, and the daemon dies."""
    bucket, writer = WritableBucket([f"d/{i}" for i in range(4)]), MemoryWriter(writeback=True)

    class Dead(BaseException):
        pass

    async with mounted(bucket, path=tmp_path, writer=writer, **RW) as mount:
        await mount.write("d/0", b"begun")
        contents = {f"e/{i}": bucket.content(f"d/{i}") for i in range(1, 4)} | {"e/0": b"begun"}
        steps, noted = 0, dict[str, Any]()

        def die(kind: str, key: str) -> CachefsError | None:
            nonlocal steps
            steps += kind in ("copy", "delete")
            if steps > left and kind in ("copy", "delete"):
                noted.update(noted or writer.noted)
                return OriginFailed("dead")
            return None

        bucket.before = die
        with trio.move_on_after(1) as scope:
            try:
                await mount.rename("d", "e")
            except OriginFailed:
                scope.cancel()
    bucket.before = lambda kind, key: None
    again = MemoryWriter(writeback=True)
    again.noted = noted
    again.dirty_files = writer.pending()
    for dirty_file in again.dirty_files:
        dirty_file.handles = 0
    async with mounted(bucket, path=tmp_path, writer=again, **RW) as mount:
        await mount.fs.recover()
        await again.upload_all()
        if noted or left >= 9:
            assert {key: bucket.content(key) for key in bucket.objects if key != "d/"} == contents
        assert not again.noted
        assert await mount.stat("nothing") is None
        with pytest.raises(NotFound):
            await mount.unlink("nothing")
        assert await mount.entries(ROOT)


# -- names that others have taken -------------------------------------------------------------------------


async def taken(mount: Mount, bucket: WritableBucket, *, directory: bool = False) -> None:
    """`d/new` was missing when it was looked at, and is another node's by now."""
    assert await mount.stat("d/new") is None
    await trio.sleep(1)
    bucket.set("d/new/x" if directory else "d/new", size=7)
    assert await mount.stat("d/new") is None  # the cached answer


async def make_directory_there(mount: Mount) -> None:
    await mount.mkdir("d/new")


async def move_there(mount: Mount) -> None:
    d = await mount.ino("d")
    await mount.fs.rename(d, b"f", d, b"new", 1)


async def make_exclusively(mount: Mount) -> None:
    await mount.open("d/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)


@pytest.mark.parametrize("call", [make_exclusively, move_there, make_directory_there])
async def test_what_must_not_be_there_is_not_believed_missing(
    call: Callable[[Mount], Awaitable[None]],
) -> None:
    bucket = WritableBucket(["d/f", "d/g"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.walk()
        await taken(mount, bucket)
        theirs = bucket.objects["d/new"]
        mount.invalidated.clear()
        with pytest.raises(AlreadyExists):
            await call(mount)
        assert bucket.writes == (0, 0, 0)
        assert b"new" in [name for _, _, name in mount.invalidated]  # which was missing to the kernel
        found = await mount.stat("d/new")
        assert found is not None and found.size == 7
        assert bucket.objects["d/new"] is theirs


async def test_a_directory_that_another_node_made_is_there() -> None:
    bucket = WritableBucket(["d/f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.walk()
        await taken(mount, bucket, directory=True)
        with pytest.raises(AlreadyExists):
            await mount.mkdir("d/new")
        assert await mount.names("d/new") == [b"x"]


@pytest.mark.parametrize("flags", [os.O_APPEND, 0])
async def test_who_keeps_what_is_there_gets_what_another_node_wrote(flags: int) -> None:
    bucket = WritableBucket(["d/f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.walk()
        await taken(mount, bucket)
        theirs = bucket.content("d/new")
        fh = await mount.open("d/new", os.O_WRONLY | os.O_CREAT | flags)
        await mount.fs.write(fh, 7, b"more")
        await mount.close_file(fh)
        assert bucket.content("d/new") == theirs + b"more"


async def test_an_absence_is_as_old_as_the_question_however_late_the_listing_comes() -> None:
    bucket = WritableBucket(["d/f", "d/g"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        plain, asked, released = bucket.list_page, trio.Event(), trio.Event()

        async def late(prefix: str, **kwargs: Any) -> Any:
            page = await plain(prefix, **kwargs)
            if prefix == "d/" and kwargs["limit"] > 1:
                asked.set()
                await released.wait()
            return page

        bucket.list_page = late  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.stat, "d/new")
            await asked.wait()
            await trio.sleep(1)
            bucket.set("d/new")
            released.set()
        with pytest.raises(AlreadyExists):
            await make_exclusively(mount)
        assert bucket.writes == (0, 0, 0)


async def test_it_is_asked_once_and_only_where_it_matters() -> None:
    """(LIST, HEAD) of what is made in a directory that was listed a while ago."""
    bucket = WritableBucket(["d/f", "d/g"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.walk()
        for number, (flags, asked) in enumerate(
            [(os.O_TRUNC, (0, 0)), (os.O_EXCL, (0, 1)), (os.O_APPEND, (0, 1)), (0, (0, 1))]
        ):
            await trio.sleep(1)
            bucket.reset()
            await mount.write(f"d/{number}", b"abc", os.O_WRONLY | os.O_CREAT | flags)
            assert (bucket.counts, bucket.writes) == (asked, (1, 0, 0))
        await trio.sleep(1)
        bucket.reset()
        await mount.mkdir("d/new")
        assert bucket.counts == (1, 1)
        # It was known to be empty just now.
        await mount.write("d/new/1", b"abc", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        assert bucket.counts == (1, 1)


async def test_while_the_store_is_out_what_is_believed_counts() -> None:
    bucket = WritableBucket(["d/f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.walk()
        await trio.sleep(1)
        bucket.before = lambda kind, key: Unreachable("out") if kind == "head" else None
        fh = await mount.open("d/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        await mount.close_file(fh)
        assert "d/new" in bucket.objects


async def test_a_file_that_was_opened_while_it_was_renamed_can_be_written_once_it_is_settled() -> None:
    """Its reader has the stored version, and keeps what was known of the dirty file."""
    bucket, writer = WritableBucket(), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        writer.settles = False
        await mount.write("f", b"one")
        rename, readers = writer.rename, []

        async def rename_beside_a_reader(*what: Any, **how: Any) -> bool:
            left = await rename(*what, **how)
            readers.append(await mount.open("f"))
            return left

        writer.rename = rename_beside_a_reader  # type: ignore[method-assign]
        await mount.rename("f", "g")
        writer.settles = True
        writer._settle(writer.dirty_files[0])
        await mount.write("g", b"two")
        assert bucket.content("g") == b"two" and bucket.objects.keys() == {"g"}
        mount.fs.release(readers[0])

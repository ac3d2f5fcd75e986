"""A handle is of the file that was opened: what is shown of it, and its bytes, stay when its name goes to another one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.errors import NotFound, ObjectChanged
from cachefs.base.names import ObjectId
from cachefs.fs.attributes import Attributes
from cachefs.fuse.operations import Operations, Pending, Waiting
from cachefs.fuse.walks import ASSUMED_S, MAX_LOOKUPS, MAX_WALKS, SecondWalks, _Walk
from cachefs.origin.protocol import ObjectInfo
from tests.fs.bucket import Bucket, WritableBucket, content_of
from tests.fs.mount import ROOT, Mount, mounted
from tests.fs.test_writing_beside import Passthrough
from tests.fs.test_writing_model import WRITERS, Reader, World
from tests.fs.writers import MemoryDirtyFile, MemoryWriter

RW: dict[str, Any] = {"file_mode": 0o644, "dir_mode": 0o755}

Change = Callable[[Mount], Awaitable[None]]


async def unlink(mount: Mount) -> None:
    await mount.unlink("d/f")


async def rename_over(mount: Mount) -> None:
    await mount.write("d/new", b"another")
    await mount.rename("d/new", "d/f")


async def rename_a_stored_file_over(mount: Mount) -> None:
    await mount.rename("d/g", "d/f")


async def unlink_and_create(mount: Mount) -> None:
    await mount.unlink("d/f")
    await mount.write("d/f", b"another")


async def unlink_and_put_the_same_back(mount: Mount) -> None:
    data = await mount.read("d/f")
    await mount.unlink("d/f")
    await mount.write("d/f", data)


LOCAL = [unlink, rename_over, rename_a_stored_file_over, unlink_and_create, unlink_and_put_the_same_back]


def shown(found: Attributes) -> tuple[Any, ...]:
    return found.ino, found.mode, found.size, found.mtime_ns, found.uid, found.gid


@pytest.mark.parametrize("change", LOCAL)
@pytest.mark.parametrize("written", ["at the origin", "here", "here, and closed", "open for writing"])
@pytest.mark.parametrize("mode", WRITERS)
async def test_a_local_change_of_its_name(mode: str, written: str, change: Change, tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        world = World(tmp_path, nursery, writeback=mode == "writeback")
        await world.start()
        mount, data = world.mount, world.bucket.content("dir/x")
        await mount.rename("dir", "d")
        await mount.write("d/g", b"gee")
        if written == "at the origin":
            await mount.rename("d/x", "d/f")
            assert not await world.uploads.flush()
        else:
            data = b"was written here"
            await mount.write("d/f", data)
        ino = await mount.ino("d/f")
        await mount.fs.setattr(ino, mode=0o640, mtime_ns=1_234_567_890_000_000_000)
        fh = await mount.open("d/f", os.O_RDWR if written == "open for writing" else os.O_RDONLY)
        other = await mount.open("d/f") if written == "here, and closed" else None
        if other is not None:
            await mount.close_file(other)
        assert await mount.pread(fh) == data
        before = await mount.fstat(fh)
        assert before.mode & 0o777 == 0o640 and before.nlink == 1
        await change(mount)
        for _ in range(2):
            after = await mount.fstat(fh)
            assert shown(after) == shown(before) and after.nlink == 0
            assert await mount.pread(fh) == data
            assert not await world.uploads.flush()
        found = await mount.stat("d/f")
        assert (found is None) == (change is unlink)
        if found is not None:
            assert found.nlink == 1 and found.ino != after.ino
        # What is set of the descriptor is not set of the name, and the other way round.
        await mount.fs.setattr(after.ino, mode=0o600)
        assert (await mount.fstat(fh)).mode & 0o777 == 0o600
        if found is not None:
            now = await mount.stat("d/f")
            assert now is not None and now.mode == found.mode
            await mount.fs.setattr(await mount.ino("d/f"), mode=0o611)
            assert (await mount.fstat(fh)).mode & 0o777 == 0o600
        # It can be opened once more, as through /proc/self/fd, or by who looked it up before.
        again = (
            mount.fs.open_now(after.ino, os.O_RDONLY, 2) or await mount.fs.open(after.ino, os.O_RDONLY, 2)
        )[0]
        assert await mount.pread(again) == data
        await mount.close_file(fh)
        assert await mount.pread(again) == data and (await mount.fstat(again)).nlink == 0
        await mount.close_file(again)
        assert not mount.fs._files.nameless
        await world.stop()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("change", ["replaced", "removed"])
@pytest.mark.parametrize("writable", [False, True])
async def test_a_change_at_the_origin(change: str, writable: bool) -> None:
    bucket = WritableBucket(["d/f"])
    async with mounted(
        bucket, metadata_ttl=1.0, negative_ttl=1.0, writer=MemoryWriter() if writable else None
    ) as mount:
        fh = await mount.open("d/f")
        data, before = await mount.pread(fh), await mount.fstat(fh)
        if change == "replaced":
            bucket.set("d/f", size=20, version=1)
        else:
            del bucket.objects["d/f"]
        mount.clock.now += 2
        for _ in range(3):
            found = await mount.stat("d/f")
            assert found is None if change == "removed" else found is not None and found.size == 20
            after = await mount.fstat(fh)
            assert shown(after) == shown(before)
            assert await mount.pread(fh) == data
        mount.bytes.warm.clear()
        with pytest.raises(ObjectChanged):
            await mount.pread(fh)
        assert shown(await mount.fstat(fh)) == shown(before)
        await mount.close_file(fh)


async def test_a_change_that_fstat_itself_notices() -> None:
    bucket = Bucket(["f"])
    async with mounted(bucket, metadata_ttl=1.0, negative_ttl=1.0) as mount:
        fh = await mount.open("f")
        before = await mount.fstat(fh)
        bucket.put("f", size=20, version=1)
        mount.clock.now += 2
        heads = len(bucket.heads)
        for _ in range(3):
            assert shown(await mount.fstat(fh)) == shown(before)
        assert len(bucket.heads) == heads + 1  # no request is sent for a version that is gone
        mount.fs.release(fh)


async def test_versions_that_are_open_at_a_time() -> None:
    bucket = Bucket(["a", "b", "c"])
    async with mounted(bucket, metadata_ttl=0.0, negative_ttl=0.0, revalidate_at_open=True) as mount:
        held = [await mount.open(name) for name in "abc"]
        for name in "abc":
            bucket.put(name, size=20, version=1)
        held += [await mount.open(name) for name in "abc"]
        assert [(await mount.fstat(fh)).size for fh in held] == [10, 10, 10, 20, 20, 20]
        for fh in held:
            mount.fs.release(fh)
        assert not mount.fs._files.nameless


# -- directories -----------------------------------------------------------------------------------------


async def listed(mount: Mount, dh: int, limit: int = 100) -> list[bytes]:
    names: list[bytes] = []
    offset = 0
    while page := await mount.fs.readdir(dh, offset, limit):
        names += [entry.name for entry in page]
        offset = page[-1].next_offset
    return names


@pytest.mark.parametrize("mode", WRITERS)
@pytest.mark.parametrize("known", ["looked up", "used"])
async def test_a_directory_below_one_that_is_renamed(mode: str, known: str, tmp_path: Path) -> None:
    """What the kernel does for a program whose working directory it is, and for an open descriptor of it."""
    async with trio.open_nursery() as nursery:
        world = World(tmp_path, nursery, writeback=mode == "writeback")
        await world.start()
        mount, fs = world.mount, world.mount.fs
        deep = await mount.ino("dir/deep")
        await fs.setattr(deep, mode=0o750)
        dh = fs.opendir(deep)
        if known == "used":
            assert await listed(mount, dh) == [b"y"]
            await mount.write("dir/deep/z", b"zed")
        reader, number = await mount.open("dir/deep/y"), await mount.ino("dir/deep/y")
        data, before = await mount.pread(reader, 0, 2), await mount.fstat(reader)
        names = ["dir", "moved", "again", "dir"]
        for at, name in enumerate(names[1:]):
            await mount.rename(names[at], name)
            for ino in (deep, await mount.ino(f"{name}/deep")):
                assert (await fs.getattr(ino))[0].ino == deep and (await fs.getattr(ino))[
                    0
                ].mode & 0o777 == 0o750
            new = b"n%d" % at
            _, _, opened = await fs.create(deep, new, os.O_RDWR, 0o644, 1, 1000, 1000)
            await mount.close_file(opened[0])
            await fs.mkdir(deep, b"d" + new, 0o755, 1000, 1000)
            assert (await fs.lookup(deep, new))[0] is not None
            assert {new, b"d" + new, b"y"} <= set(await listed(mount, dh))
            assert set(await listed(mount, dh)) == set(await mount.names(f"{name}/deep"))
            assert await mount.ino(f"{name}/deep/{new.decode()}")
            # A reader of a file in it goes on, with what was not read before, too.
            assert (await mount.fstat(reader)).ino == number == await mount.ino(f"{name}/deep/y")
            assert (await mount.fstat(reader)).nlink == 1 and (await mount.fstat(reader)).size == before.size
            mount.bytes.warm.clear()
            assert (await mount.pread(reader))[:2] == data
            if name != "dir":
                assert await mount.stat("dir") is None
        await mount.close_file(reader)
        fs.releasedir(dh)
        assert not await world.uploads.flush()
        await world.stop()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_directory_that_is_renamed_while_it_is_read(limit: int) -> None:
    bucket = WritableBucket([f"d/e/{number:02}" for number in range(10)])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        dh = mount.fs.opendir(await mount.ino("d/e"))
        page = await mount.fs.readdir(dh, 0, limit)
        names = [entry.name for entry in page]
        for new in ("moved", "again"):
            await mount.rename("d" if new == "moved" else "moved", new)
            page = await mount.fs.readdir(dh, page[-1].next_offset, limit)
            names += [entry.name for entry in page]
        while page := await mount.fs.readdir(dh, page[-1].next_offset, limit):
            names += [entry.name for entry in page]
        assert names == [b"%02d" % number for number in range(10)]
        mount.fs.releasedir(dh)


@pytest.mark.parametrize("limit", [3, 100, 250])
async def test_a_reader_is_given_each_name_as_it_is_then(limit: int) -> None:
    """The kernel enters the names, inodes and attributes that it reads into its caches. With an entry from before a rename,
    a program that writes a new file of the old name would write into the renamed one."""
    bucket = WritableBucket([f"d/{number:03}" for number in range(300)])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        dh = mount.fs.opendir(await mount.ino("d"))
        page = await mount.fs.readdir(dh, 0, limit)
        renamed = {await mount.ino(f"d/{number}") for number in (251, 253)}
        await mount.rename("d/251", "d/000x")
        await mount.rename("d/253", "d/252")
        await mount.unlink("d/254")
        await mount.write("d/255", b"longer than it was")
        await mount.unlink(f"d/{page[-1].name.decode()}")
        entries = list(page)
        while page := await mount.fs.readdir(dh, page[-1].next_offset, limit):
            entries += page
        mount.fs.releasedir(dh)
    found = {entry.name: entry for entry in entries}
    assert len(entries) == len(found) and not {b"251", b"253", b"254"} & found.keys()
    assert {name for name, entry in found.items() if entry.attributes.ino in renamed} <= {b"000x", b"252"}
    assert found[b"255"].attributes.size == len(b"longer than it was")
    assert {b"%03d" % number for number in range(300) if number not in (251, 252, 253, 254)} <= found.keys()


async def test_a_read_that_a_signal_interrupts_is_repeated_behind_a_name_that_is_gone() -> None:
    """The kernel drops the reply, and asks again for what comes behind the same place."""
    bucket = WritableBucket([f"d/{number}" for number in range(9)])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        dh = mount.fs.opendir(await mount.ino("d"))
        offset = (await mount.fs.readdir(dh, 0, 3))[-1].next_offset
        first = await mount.fs.readdir(dh, offset, 3)
        await mount.unlink("d/2")
        again = await mount.fs.readdir(dh, offset, 3)
        mount.fs.releasedir(dh)
    assert [entry.name for entry in first] == [entry.name for entry in again] == [b"3", b"4", b"5"]


async def test_a_read_behind_a_place_of_an_earlier_daemon_is_repeated_from_the_beginning() -> None:
    """Its name is gone, so the reader is given all names once more, also if a signal interrupts it."""
    bucket = WritableBucket([f"d/{number}" for number in range(9)])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        ino, offset = await mount.ino("d"), await mount.ino("d/2")
        await mount.unlink("d/2")
        mount.fs.follow(8)
        mount.fs.reopen_directory(7, ino)
        for _ in range(2):
            page = await mount.fs.readdir(7, offset, 3)
            assert [entry.name for entry in page] == [b"0", b"1", b"3"]
        mount.fs.releasedir(7)


async def test_a_directory_that_is_removed() -> None:
    bucket = WritableBucket(["d/e/f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        ino = await mount.ino("d/e")
        dh = mount.fs.opendir(ino)
        await mount.unlink("d/e/f")
        assert await listed(mount, dh) == []
        await mount.rmdir("d/e")
        with pytest.raises(NotFound):  # getdents(2) gives ENOENT, which readdir(3) takes for the end
            await listed(mount, dh)
        found, ttl = mount.fs.attributes_now(ino) or await mount.fs.getattr(ino)
        assert (found.ino, found.is_dir, found.nlink, ttl) == (ino, True, 0, 0)
        await mount.mkdir("d/e")
        await mount.write("d/e/other", b"")
        assert await mount.names("d/e") == [b"other"]
        mount.fs.releasedir(dh)


# -- between lookup and open -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", WRITERS)
async def test_an_open_file_is_opened_again_while_its_name_goes_to_another(mode: str, tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        world = World(tmp_path, nursery, writeback=mode == "writeback")
        await world.start()
        mount = world.mount
        await mount.write("dir/f", b"first")
        await mount.write("dir/new", b"second")
        held = await mount.open("dir/f")
        ino = (await mount.fstat(held)).ino
        assert await mount.pread(held) == b"first"  # it is cached
        opened: list[int] = []

        async def open_again() -> None:
            opened.append((await mount.fs.open(ino, os.O_RDONLY, 2))[0])

        async with trio.open_nursery() as both:
            both.start_soon(mount.rename, "dir/new", "dir/f")
            for _ in range(40):
                both.start_soon(open_again)
                await trio.sleep(0.0001)
        for fh in opened:
            assert await mount.pread(fh) in (b"first", b"second")
            assert (await mount.pread(fh) == b"first") == ((await mount.fstat(fh)).nlink == 0)
            await mount.close_file(fh)
        assert len(opened) == 40
        await mount.close_file(held)
        await world.stop()
        nursery.cancel_scope.cancel()


class Program:
    """A thread whose calls the kernel passes on, at a file that other processes replace."""

    def __init__(self, mount: Mount, operations: Operations, thread: int = 1) -> None:
        self.mount, self.operations, self.thread = mount, operations, thread

    async def _answer(self, found: Any) -> Any:
        return await Waiting(found, self.operations).answer() if isinstance(found, Pending) else found

    async def walk(self, name: bytes = b"f") -> int:
        """The number that the name leads to; 0 if there is none."""
        found = (await self._answer(self.operations.lookup(self.thread, ROOT, name)))[0]
        return int(found.ino) if found is not None else 0

    async def open(self, ino: int, flags: int = os.O_RDONLY) -> int:
        return int((await self._answer(self.operations.open(self.thread, ino, flags)))[0])

    async def truncate(self, ino: int, size: int) -> None:
        keep = dict.fromkeys(("mode", "uid", "gid", "atime_ns", "mtime_ns", "fh"))
        pending = self.operations.setattr(self.thread, ino, size=size, clear_set_ids=False, **keep)
        await self._answer(pending)

    async def stat(self, ino: int) -> Any:
        return (await self._answer(self.operations.getattr(self.thread, ino)))[0]

    async def create(self, name: bytes = b"f") -> int:
        made = self.operations.create(self.thread, ROOT, name, os.O_RDWR, 0o644, 0, 0)
        return int((await self._answer(made))[2][0])

    async def replace(self, data: bytes) -> None:
        """Another process does."""
        await self.mount.write("new", data)
        await self.mount.rename("new", "f")

    @property
    def files(self) -> int:
        """Handles that are open."""
        return len(self.mount.fs._files)


@asynccontextmanager
async def program(thread: int = 1, told: str = "open") -> AsyncIterator[Program]:
    """It was told ESTALE of `f` just now, by an open or a stat."""
    async with mounted(WritableBucket(), writer=MemoryWriter(), **RW) as mount:
        program = Program(mount, Operations(mount.fs, mount.metrics, 5.0, writable=True), thread)
        await mount.write("f", b"0")
        ino = await program.walk()
        await program.replace(b"1")
        assert program.files == 0
        with pytest.raises(ObjectChanged):
            await (program.open(ino) if told == "open" else program.stat(ino))
        yield program
        await trio.sleep(program.operations.deadline_s + 1)
        assert program.files == 0


@pytest.mark.parametrize("late", ["walk", "open"])
@pytest.mark.parametrize("how", ["read", "write", "truncate", "stat"])
async def test_what_a_second_walk_finds_can_be_opened(how: str, late: str) -> None:
    """The kernel walks a path once more after ESTALE, and tells the program of the second one. It may have to wait for the
    directory, as long as others change names in it."""
    async with program() as p:
        await trio.sleep(60 if late == "walk" else 0)
        ino = await p.walk()
        assert p.files == 1
        await trio.sleep(p.operations.deadline_s - 1 if late == "open" else 0)
        assert await p.mount.read("f") == b"1"  # from now on it is cached
        await p.replace(b"2")
        if how == "truncate":
            await p.truncate(ino, 0)
        elif how == "stat":
            assert (await p.stat(ino)).nlink == 0
            return
        else:
            fh = await p.open(ino, os.O_RDONLY if how == "read" else os.O_RDWR)
            assert await p.mount.pread(fh) == b"1"
            await trio.testing.wait_all_tasks_blocked()
            assert p.files == 1, "it is held open no longer than until then"
            p.operations.drop(fh)
        await trio.testing.wait_all_tasks_blocked()
        assert p.files == 0
        assert await p.walk() == await p.mount.ino("f") and p.files == 0, "and this is no second walk"


@pytest.mark.parametrize(("later", "writable"), [(False, True), (True, True), (False, False)])
async def test_a_thread_that_the_daemon_before_has_told_walks_again(later: bool, writable: bool) -> None:
    """The daemon that continues knows no thread that was told. Such a thread comes at once, and where names are changed."""
    async with program() as p:
        p.operations = Operations(p.mount.fs, p.mount.metrics, 5.0, writable=writable)
        p.operations.took_over()
        await trio.sleep(ASSUMED_S + 0.1 if later else 0)
        ino = await p.walk()
        later |= not writable
        assert p.files == (not later)
        assert await p.mount.read("f") == b"1"
        await p.replace(b"2")
        if later:
            with pytest.raises(ObjectChanged):
                await p.open(ino)
            return
        fh = await p.open(ino)
        assert await p.mount.pread(fh) == b"1"
        p.operations.drop(fh)


@pytest.mark.parametrize("told", ["open", "stat"])
async def test_the_kernel_asks_several_times_in_one_walk(told: str) -> None:
    """It drops what it knows of a name that leads elsewhere, and asks again."""
    async with program(told=told) as p:
        for data in (b"2", b"3"):
            ino = await p.walk()
            await p.replace(data)
        await p.mount.unlink("f")
        assert await p.walk() == 0
        await p.mount.write("f", b"4")
        ino = await p.walk()
        assert await p.mount.read("f") == b"4"
        await p.replace(b"5")
        fh = await p.open(ino)
        assert await p.mount.pread(fh) == b"4"
        p.operations.drop(fh)


async def test_a_thread_that_opens_nothing_is_not_taken_to_walk_for_ever() -> None:
    async with program() as p:
        for _ in range(2 * MAX_LOOKUPS):
            await p.walk()
        assert p.files == MAX_LOOKUPS
        await trio.sleep(p.operations.deadline_s + 1)
        await p.walk()
        assert p.files == 0


async def test_threads_whose_numbers_are_unknown_leave_each_other_what_they_found() -> None:
    """They are all 0: processes of another PID namespace."""
    async with program(0) as p:
        ino = await p.walk()
        p.operations.drop(await p.open(ino))  # of another one
        assert await p.mount.read("f") == b"1"
        await p.replace(b"2")
        p.operations.drop(await p.open(ino))


async def test_a_create_that_is_told_estale_is_a_walk_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with program() as p:
        p.operations.drop(await p.create(b"other"))  # this ended the walk
        await p.walk()
        assert p.files == 0

        async def stale(*_: Any) -> Any:
            raise ObjectChanged("f is read in passthrough")

        with monkeypatch.context() as patched:
            patched.setattr(p.mount.fs, "create", stale)
            with pytest.raises(ObjectChanged):
                await p.create()
        await p.walk()
        assert p.files == 1


async def test_what_a_walk_holds_is_left_at_the_end_of_the_daemon() -> None:
    """trio cancels such a task when everything else has ended. The uploads take nothing any more."""
    async with program() as p:
        fh = await p.mount.open("f")
        with trio.move_on_after(p.operations.deadline_s / 2):
            await p.operations.walks._hold(fh, _Walk())
        assert p.files == 1
        p.operations.drop(fh)


async def test_walks_are_bounded() -> None:
    async with mounted(WritableBucket(["f"]), writer=MemoryWriter(), **RW) as mount:
        walks = SecondWalks(mount.fs, 10.0)
        for thread in range(MAX_WALKS + 10):
            walks.begin(thread)
        assert len(walks.threads) == MAX_WALKS and not walks.is_second(9) and walks.is_second(10)


class Cached(Reader):
    """The cache has what the origin had under "old"."""

    def __init__(self, old: bytes) -> None:
        self._old = old

    def open(self, origin: Any, object_id: ObjectId) -> bytes:
        assert object_id.key == "old" and object_id.size == len(self._old)
        return self._old


@pytest.mark.parametrize("change", ["unlink", "replace"])
@pytest.mark.parametrize("how", ["write", "append", "truncate"])
@pytest.mark.parametrize("mode", WRITERS)
async def test_a_first_write_after_the_name_is_gone(mode: str, how: str, change: str, tmp_path: Path) -> None:
    """As on a local disk: it goes to the file without a name, and to no other."""
    async with trio.open_nursery() as nursery:
        world = World(tmp_path, nursery, writeback=mode == "writeback")
        world.reader = Cached(bytes(world.file("old").data))
        await world.start()
        mount, old = world.mount, world.bucket.content("old")
        fh, other = await mount.open("old", os.O_RDWR), await mount.open("old")
        if change == "unlink":
            await mount.unlink("old")
        else:
            await mount.write("new", b"another")
            await mount.rename("new", "old")
        if how == "truncate":
            await mount.fs.setattr(mount.fs._files.handles[fh].ino, size=3, fh=fh)
            expected = old[:3]
        else:
            at = len(old) if how == "append" else 0
            await mount.fs.write(fh, at, b"late")
            expected = old[:at] + b"late" + old[at + 4 :]
        for one in (fh, other):
            assert await mount.pread(one) == expected
            assert ((await mount.fstat(one)).size, (await mount.fstat(one)).nlink) == (len(expected), 0)
            await mount.close_file(one)
        assert not await world.uploads.flush()
        assert ("old" in world.bucket.objects) == (change == "replace")
        if change == "replace":
            assert world.bucket.content("old") == b"another" == await mount.read("old")
        await world.stop()
        nursery.cancel_scope.cancel()


class FromTheCache(MemoryWriter):
    """Older versions can be written, too: they are cached."""

    async def begin(self, origin: Any, key: str, *, base: ObjectId | None, **how: Any) -> MemoryDirtyFile:
        dirty_file = await super().begin(origin, key, base=None, **how)
        if base is not None:
            dirty_file.data[:] = content_of(origin, base)[: how["upto"]]
        return dirty_file

    def take(self, origin: Any, base: ObjectInfo, *how: Any) -> MemoryDirtyFile | None:
        dirty_file = super().take(origin, base, *how)
        if dirty_file is not None:
            dirty_file.data[:] = content_of(origin, base.version(origin.source))
        return dirty_file


@pytest.mark.parametrize("passthrough", [False, True])
@pytest.mark.parametrize("what", ["write", "empty", "truncate", "chmod"])
async def test_what_a_second_walk_finds_can_be_changed(what: str, passthrough: bool) -> None:
    """It is that file which changes, under whatever name, or none."""
    bucket, writer = WritableBucket(), FromTheCache()
    writer.takes = writer.passthrough = passthrough
    async with mounted(bucket, writer=writer, **RW) as mount:
        if passthrough:
            mount.fs.read_through(Passthrough(bucket))
            mount.fs.enable_passthrough(lambda backing: True)
        operations = Operations(mount.fs, mount.metrics, 5.0, writable=True)
        nothing = dict.fromkeys(("size", "mode", "uid", "gid", "atime_ns", "mtime_ns", "fh"))

        async def answer(found: Any) -> Any:
            return await Waiting(found, operations).answer() if isinstance(found, Pending) else found

        async def change(ino: int) -> Any:
            if what in ("write", "empty"):
                flags = os.O_RDWR | (os.O_TRUNC if what == "empty" else 0)
                return (await answer(operations.open(1, ino, flags)))[0]
            news = nothing | ({"size": 2} if what == "truncate" else {"mode": 0o600})
            return (await answer(operations.setattr(1, ino, clear_set_ids=False, **news)))[0]

        async def replace(data: bytes) -> None:
            await mount.write("new", data)
            await mount.read("new")  # from now on it is cached
            await mount.rename("new", "f")
            await mount.read("f")

        async def walk() -> int:
            return int((await answer(operations.lookup(1, ROOT, b"f")))[0].ino)

        await replace(b"first")
        number = await walk()
        await replace(b"second")
        with pytest.raises(ObjectChanged):
            await change(number)
        number = await walk()
        await replace(b"third")
        changed = await change(number)
        shown = (await answer(operations.getattr(1, number)))[0]
        assert shown.nlink == 0
        if what in ("write", "empty"):
            await mount.fs.write(changed, 1, b"x")
            assert await mount.pread(changed) == (b"sxcond" if what == "write" else b"\0x")
            await answer(operations.flush(1, changed))
            operations.drop(changed)
        elif what == "truncate":
            assert changed.size == shown.size == 2
        else:
            assert changed.mode & 0o777 == shown.mode & 0o777 == 0o600
        assert await mount.read("f") == bucket.content("f") == b"third"
        found = await mount.stat("f")
        assert found is not None and found.mode & 0o777 == 0o644
        await trio.sleep(10)
        assert len(mount.fs._files) == 0 and not writer.dirty_files


async def test_what_is_cached_of_an_open_file_is_noted_before_its_name_goes() -> None:
    bucket, writer = WritableBucket(["a", "b", "c", "d", "e"]), MemoryWriter()
    noted: list[tuple[int, int]] = []  # (calls, objects deleted) before each change

    async with mounted(bucket, writer=writer, **RW) as mount:

        async def changed(change: Awaitable[object], calls: int) -> None:
            before, deleted, keep = writer.kept_cached, len(bucket.deletes), writer.keep_cached

            async def keeps(*what: Any) -> None:
                noted.append((writer.kept_cached, len(bucket.deletes) - deleted))
                await keep(*what)

            writer.keep_cached = keeps  # type: ignore[method-assign]
            await change
            writer.keep_cached = keep  # type: ignore[method-assign]
            assert writer.kept_cached - before == calls

        await changed(mount.unlink("a"), 0)
        for name, flags in (("b", os.O_RDONLY), ("c", os.O_RDWR)):
            await mount.open(name, flags)
            await changed(mount.unlink(name), 1)
        await mount.open("d")
        await changed(mount.rename("e", "d"), 1)
        fh = await mount.open("new", os.O_RDWR | os.O_CREAT)
        await mount.pwrite(fh, 0, b"not uploaded")
        await changed(mount.unlink("new"), 0)
    assert [deleted for _, deleted in noted] == [0, 0, 0]

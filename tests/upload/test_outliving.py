"""Files that are being written when their daemon dies, and the next one goes on (`cachefs.base.shared_memory`).

A test copies what outlives a daemon (its memory, the staging directory, the journal, the origin) at some moment, and goes on
from the copy as the next daemon would: as if the first one had been killed at that moment."""

from __future__ import annotations

import copy
import errno
import itertools
import logging
import mmap
import os
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import trio
import trio.testing

from cachefs.base.database import MARK, Database
from cachefs.base.errors import CacheUnusable, NoRoom, OriginFailed
from cachefs.base.names import ObjectId
from cachefs.base.shared_memory import FileRecords, SharedMemory
from cachefs.upload import DirtyFile, journal, orphans, recovery, sending, staging, uploads
from cachefs.upload.content import Row
from cachefs.upload.journal import Journal
from cachefs.upload.staging import HELD, Shape, StagingFile
from tests.conftest import LEVEL
from tests.upload.scripted import KIB, MIB, PART, Desk, Room, ScriptedStore, add, desk, in_trio
from tests.upload.test_contents import full, no_room
from tests.upload.test_passthrough import Kernel

INO = 77
SIZES = (0, 100, 200 * KIB, 300 * KIB, 2 * MIB + 100)


class Daemon:
    """What outlives one."""

    opened: ClassVar[list[int]] = []

    def __init__(self, path: Path, store: ScriptedStore) -> None:
        self.path, self.store = path, store
        self.fd = os.memfd_create("test")
        self.opened.append(self.fd)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        path.mkdir(exist_ok=True)

    def memory(self) -> SharedMemory:
        return SharedMemory(self.fd, mmap.PAGESIZE)

    def killed(self, path: Path) -> Daemon:
        """As it is now."""
        shutil.copytree(self.path, path)
        store = copy.copy(self.store)
        store.rules, store.uploads = [], copy.deepcopy(self.store.uploads)
        store.objects, store.tokens = dict(self.store.objects), dict(self.store.tokens)
        after = Daemon(path, store)
        os.ftruncate(after.fd, os.fstat(self.fd).st_size)
        at = 0
        while True:
            try:
                at = os.lseek(self.fd, at, os.SEEK_DATA)
            except OSError:
                return after
            end = os.lseek(self.fd, at, os.SEEK_HOLE)
            os.pwrite(after.fd, os.pread(self.fd, end - at, at), at)
            at = end

    @asynccontextmanager
    async def alive(self, *open_inos: int, **how: Any) -> AsyncIterator[tuple[Desk, list[DirtyFile]]]:
        """The next daemon, and the dirty files that it goes on with; `open_inos` are open."""
        async with (
            trio.open_nursery() as nursery,
            desk(self.path, self.store, recover=False, memory=self.memory(), **how) as d,
        ):
            await d.uploads.recover(set(open_inos))
            nursery.start_soon(d.uploads.run)
            resumed = sorted(d.uploads._dirty_files.values(), key=lambda one: one.key)
            for one in resumed:
                if one.ino in open_inos:
                    d.uploads.open(one)
            yield d, resumed
            nursery.cancel_scope.cancel()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    yield Daemon(tmp_path / "first", ScriptedStore())
    while Daemon.opened:
        os.close(Daemon.opened.pop())


async def create(d: Desk, key: str = "k", ino: int = INO) -> DirtyFile:
    dirty_file = await d.create(key)
    d.uploads.outlive(dirty_file, ino, named=True)
    return dirty_file


async def content(dirty_file: DirtyFile) -> bytes:
    return bytes(await dirty_file.read(0, dirty_file.size + 1))


@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("size", SIZES)
@in_trio
async def test_what_was_written_is_there_and_more_can_be_written(
    daemon: Daemon, tmp_path: Path, size: int, writeback: bool
) -> None:
    """Of files in memory, on the disk, and with their end in memory."""
    data = os.urandom(size)
    async with daemon.alive(writeback=writeback) as (d, _):
        first = await create(d)
        for at in range(0, size, 30_000):
            await add(first, data[at : at + 30_000])
        after = daemon.killed(tmp_path / "second")
        mtime_ns = first.mtime_ns
        await d.close(first)
    async with after.alive(INO, writeback=writeback) as (d, (second,)):
        assert (second.ino, second.mtime_ns) == (INO, mtime_ns)
        assert await content(second) == data
        await add(second, b"more")
        third = after.killed(tmp_path / "third")
        await d.close(second)
        assert await d.uploads.flush() == []
        assert after.store.content("k") == data + b"more"
    async with third.alive(INO, writeback=writeback) as (d, (dirty_file,)):
        assert await content(dirty_file) == data + b"more"
        await d.close(dirty_file)
        assert await d.uploads.flush() == []
        await d.quiet()
        assert third.store.content("k") == data + b"more"
        assert third.store.uploads == {} and await d.files() == []
        assert d.uploads.journal.rows(journal.ORPHANS) == {}
    assert third.memory().records.found() == {} and third.memory().tails.found() == []


def with_copies(daemon: Daemon, copy_now: Callable[[], None]) -> tuple[Any, Any]:
    """(`ScriptedStore.request`, `Journal._write`) that also call `copy_now`, before and after."""
    request, write = daemon.store.request, journal.Journal._write

    @asynccontextmanager
    async def copying(kind: str, key: str) -> AsyncIterator[None]:
        copy_now()
        async with request(kind, key):
            yield
        copy_now()

    def committing(self: Any, *rows: Any) -> None:
        copy_now()
        write(self, *rows)
        copy_now()

    return copying, committing


@pytest.mark.long
@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_killed_at_each_request_and_each_commit_of_the_journal(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writeback: bool
) -> None:
    """A large file is written, synced, and written on: at the end the origin has it as it was written, and nothing else."""
    monkeypatch.setattr(sending, "PUT_BYTES", 2 * PART)
    data = os.urandom(10 * PART + 1000)
    numbers = itertools.count()
    copies: list[tuple[Daemon, int]] = []
    written = [0]

    def copy_now() -> None:
        count = written[0]  # first: this may be another thread
        copies.append((daemon.killed(tmp_path / f"copy{next(numbers)}"), count))

    copying, committing = with_copies(daemon, copy_now)

    async with daemon.alive(writeback=writeback) as (d, _):
        first = await create(d)
        monkeypatch.setattr(daemon.store, "request", copying)
        monkeypatch.setattr(journal.Journal, "_write", committing)
        for at in range(0, len(data), 50_000):
            await add(first, data[at : at + 50_000])
            written[0] = first.size
            copy_now()
            if at == 400_000:
                await d.uploads.commit(first)
        await d.uploads.commit(first)
        copy_now()
        monkeypatch.undo()
        monkeypatch.setattr(sending, "PUT_BYTES", 2 * PART)
        d.uploads.release(first)
    assert len(copies) > (15 if writeback else 40)
    for after, count in copies[:: 3 if LEVEL == "short" else 1]:
        vars(after.store).pop("request", None)
        async with after.alive(INO, writeback=writeback) as (d, (dirty_file,)):
            assert dirty_file.size >= count
            assert (await content(dirty_file))[:count] == data[:count]
            for at in range(count, len(data), 50_000):
                await dirty_file.write(at, data[at : at + 50_000])
            await d.close(dirty_file)
            assert await d.uploads.flush() == []
            await d.quiet()
            await trio.sleep(100)
            assert after.store.content("k") == data
            assert await d.files() == []
            assert d.uploads.journal.rows(journal.DIRTY_FILES) == {}


@in_trio
async def test_parts_that_were_sent_are_not_sent_again(daemon: Daemon, tmp_path: Path) -> None:
    data = os.urandom(20 * MIB)
    async with daemon.alive() as (d, _):
        first = await create(d)
        for at in range(0, len(data), MIB):
            await add(first, data[at : at + MIB])
        await d.quiet()
        sent = daemon.store.counts["part"]
        assert sent > 10
        after = daemon.killed(tmp_path / "second")
        await d.close(first)
    after.store.counts = type(after.store.counts)()
    async with after.alive(INO) as (d, (dirty_file,)):
        await add(dirty_file, b"x" * 100)
        await d.close(dirty_file)
        assert after.store.content("k") == data + b"x" * 100
        assert after.store.counts["begin"] == 0
        assert after.store.counts["part"] <= dirty_file.parts.count - sent + 1
        assert after.store.uploads == {}


@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_a_close_that_was_not_answered_is_made_again(
    daemon: Daemon, tmp_path: Path, writeback: bool
) -> None:
    async with daemon.alive(writeback=writeback) as (d, _):
        first = await create(d)
        await add(first, b"data")
        after = daemon.killed(tmp_path / "second")
        await d.close(first)
    async with after.alive(writeback=writeback) as (d, (second,)):
        assert second.handles == 0
        await trio.sleep(10)
        assert after.store.content("k") == b"data"
        assert d.settled == ["k"] and await d.files() == []


@in_trio
async def test_an_open_that_is_repeated_comes_before_the_upload(daemon: Daemon, tmp_path: Path) -> None:
    """No reader is shown an empty file because the daemon died between making a file and the answer to that."""
    async with daemon.alive() as (d, _):
        first = await create(d)
        after = daemon.killed(tmp_path / "second")
        await d.close(first)
    async with after.alive() as (d, (second,)):
        d.uploads.open(second)
        await add(second, b"data")
        await trio.sleep(10)
        assert after.store.objects == {}
        await d.close(second)
        assert after.store.seen["k"][-1:] == [b"data"]


@in_trio
async def test_two_seconds_are_left_for_an_open_that_is_repeated(daemon: Daemon, tmp_path: Path) -> None:
    async with daemon.alive() as (d, _):
        first = await create(d)
        await add(first, b"data")
        after = daemon.killed(tmp_path / "second")
        await d.close(first)
    held, began = after.store.hold("put"), trio.current_time()
    async with after.alive():
        await held.reached.wait()
        assert trio.current_time() - began == pytest.approx(2.0, abs=0.1)
        assert held.release is not None
        held.release.set()
        await trio.sleep(10)
        assert after.store.content("k") == b"data"


@pytest.mark.parametrize("size", [100, HELD + 1000])
@in_trio
async def test_what_was_removed_is_there_for_its_users(daemon: Daemon, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    async with daemon.alive(writeback=True) as (d, _):
        first = await create(d)
        await add(first, data)
        await d.uploads.commit(first)
        await d.uploads.discard(first)
        await add(first, b"more")
        after = daemon.killed(tmp_path / "second")
        d.uploads.release(first)
        assert await d.files() == []
    assert daemon.memory().records.found() == {}
    unused = after.killed(tmp_path / "third")
    async with after.alive(INO, writeback=True) as (d, (second,)):
        assert d.uploads.pending() == [] and d.uploads.nameless() == [second]
        assert await content(second) == data + b"more"
        await add(second, b"x")
        await d.uploads.commit(second)
        d.uploads.release(second)
        await d.quiet()
        assert await d.files() == [] and after.store.objects == {}
        assert d.uploads.journal.rows(journal.DIRTY_FILES) == {}
    assert after.memory().records.found() == {}
    async with unused.alive(writeback=True) as (d, found):
        assert found == [] and await d.files() == []


@in_trio
async def test_a_file_that_another_one_was_renamed_over_does_not_come_back(
    daemon: Daemon, tmp_path: Path
) -> None:
    async with daemon.alive(writeback=True) as (d, _):
        old, new = await create(d, "k", 1), await create(d, "new", 2)
        await add(old, b"old")
        await d.uploads.commit(old)
        await add(new, b"new")
        await d.uploads.rename(new, "k", over=old)
        after = daemon.killed(tmp_path / "second")
        await d.uploads.discard(old, replaced=True)
        d.uploads.release(old)
        await d.close(new)
    async with after.alive(1, 2, writeback=True) as (d, found):
        assert {one.ino: one.discarded for one in found} == {1: True, 2: False}
        assert [one.key for one in d.uploads.pending()] == ["k"]
        assert [await content(one) for one in found] == [b"old", b"new"]
        third, fourth = after.killed(tmp_path / "third"), after.killed(tmp_path / "fourth")
        for one in found:
            await d.close(one)
        assert await d.uploads.flush() == []
        assert after.store.content("k") == b"new"
    async with third.alive(2, writeback=True) as (d, (one,)):
        assert await content(one) == b"new"
        await d.close(one)
    async with fourth.alive(1, 2, writeback=True) as (d, found):
        assert [await content(one) for one in found] == [b"old", b"new"]
        for one in found:
            await d.close(one)


@pytest.mark.long
@pytest.mark.parametrize("users", [0, 1], ids=["closed", "open"])
@pytest.mark.parametrize("sent", [False, True], ids=["new", "changed"])
@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_killed_at_each_step_of_a_rename_over_another_file(
    daemon: Daemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    writeback: bool,
    sent: bool,
    users: int,
) -> None:
    """Once the next daemon has the new file under the name, the replaced one does not come back. `sent`: the origin has an
    earlier version of the new file, whose upload is a step of the rename. Users of the replaced file still have it."""
    numbers, copies = itertools.count(), list[Daemon]()

    def copy_now() -> None:
        copies.append(daemon.killed(tmp_path / f"copy{next(numbers)}"))

    copying, committing = with_copies(daemon, copy_now)
    unlink = StagingFile.unlink

    def unlinking(self: StagingFile) -> None:
        unlink(self)
        copy_now()

    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        old, new = await create(d, "k", 1), await create(d, "new", 2)
        await add(old, b"old")
        await d.uploads.commit(old)
        if sent:
            await add(new, b"first")
            await d.uploads.commit(new)
            await d.uploads.flush(lambda one: one is new)
            await new.truncate(0)
        await add(new, b"new")
        await d.close(new)
        begun = daemon.killed(tmp_path / "begun")
        d.uploads.release(old)
    # Files of the previous daemon have a row and a record, however they are used.
    monkeypatch.setattr(begun.store, "request", copying)
    daemon, open_inos = begun, [1] * users
    async with daemon.alive(*open_inos, writeback=writeback, upload_delay_s=3600) as (d, (one, other)):
        old, new = sorted((one, other), key=lambda found: found.key)
        assert (old.key, new.key) == ("k", "new")
        monkeypatch.setattr(journal.Journal, "_write", committing)
        monkeypatch.setattr(StagingFile, "unlink", unlinking)
        copy_now()

        async def rename() -> None:
            await d.uploads.rename(new, "k", over=old)

        await d.uploads.discard(old, replaced=True, instead=rename)
        copy_now()
        monkeypatch.undo()
        if users:
            d.uploads.release(old)
    moved = 0
    for after in copies:
        vars(after.store).pop("request", None)
        caplog.clear()
        async with after.alive(*open_inos, writeback=writeback, upload_delay_s=3600) as (d, found):
            under = {one.key: await content(one) for one in d.uploads.pending()}
            assert len(under) == len(d.uploads.pending())
            by_content = {await content(one): one for one in found}
            if "new" not in under:
                moved += 1
                assert under.get("k", b"new") == b"new"
                assert all(one.discarded for data, one in by_content.items() if data == b"old")
            else:
                assert under == {"k": b"old", "new": b"new"}
            assert not users or b"old" in by_content
            for one in found:
                if one.handles:
                    await d.close(one)
            assert await d.uploads.flush() == []
            assert after.store.content("k") == (b"old" if "new" in under else b"new")
        assert "is lost" not in caplog.text and "ERROR" not in caplog.text
    assert 1 < moved < len(copies)


@in_trio
async def test_a_file_whose_upload_ends_while_it_is_being_removed(
    daemon: Daemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next daemon does not miss the staging file, which the cache has got."""
    async with daemon.alive() as (d, _), trio.open_nursery() as nursery:
        dirty_file = await create(d)
        await add(dirty_file, b"data")
        await dirty_file.file.spill()
        put, adopt, adopted = d.store.hold("put"), d.cache.adopt, trio.Event()
        copies = list[Daemon]()

        async def adopting(*what: Any) -> bool:
            done = await adopt(*what)
            copies.append(daemon.killed(tmp_path / "second"))
            adopted.set()
            return done

        async def discard() -> None:
            await d.uploads.discard(dirty_file, instead=adopted.wait)

        monkeypatch.setattr(d.cache, "adopt", adopting)
        d.uploads.release(dirty_file)
        await put.reached.wait()
        nursery.start_soon(discard)
        await trio.testing.wait_all_tasks_blocked()
        assert put.release is not None
        put.release.set()
    (after,) = copies
    after.store.rules = []
    async with after.alive() as (d, found):
        assert found == [] and await d.files() == []
    assert "ERROR" not in caplog.text


@in_trio
async def test_what_the_origin_has_is_dropped_unless_it_is_open(daemon: Daemon, tmp_path: Path) -> None:
    """An open one counts as dirty: it may have been written just now."""
    async with daemon.alive() as (d, _):
        first = await create(d)
        await add(first, b"data")
        await d.uploads.commit(first)
        after, closed = daemon.killed(tmp_path / "second"), daemon.killed(tmp_path / "third")
        await add(first, b"more")
        written = daemon.killed(tmp_path / "fourth")
        await d.close(first)
    async with closed.alive() as (d, found):
        assert found == [] and await d.files() == []
    async with after.alive(INO) as (d, (dirty_file,)):
        assert dirty_file.dirty and await content(dirty_file) == b"data"
        await d.close(dirty_file)
        assert after.store.content("k") == b"data"
    async with written.alive() as (d, (dirty_file,)):
        assert await content(dirty_file) == b"datamore"


@in_trio
async def test_a_file_that_was_removed_from_outside_is_lost_alone(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with daemon.alive() as (d, _):
        files = [await create(d, key, ino) for key, ino in (("a", 1), ("b", 2), ("c", 3))]
        for one in files:
            await add(one, b"x" * (HELD + 1))
        await add(files[2], b"in memory")
        after = daemon.killed(tmp_path / "second")
        for one in files:
            await d.close(one)
    for one in (files[0], files[2]):
        (after.path / "staging" / one.file.path.name).unlink()
    with caplog.at_level(logging.ERROR):
        async with after.alive(1, 2, 3) as (d, (left,)):
            assert left.key == "b"
            await d.close(left)
    assert sum("is lost" in line for line in caplog.messages) == 2


@in_trio
async def test_a_kill_amid_a_truncation_leaves_what_was_cut(daemon: Daemon, tmp_path: Path) -> None:
    """The file was cut, and the end of it that lay in memory was not freed yet."""
    async with daemon.alive() as (d, _):
        first = await create(d)
        await add(first, b"x" * (HELD + 1))
        await add(first, b"in memory")
        after = daemon.killed(tmp_path / "second")
        await d.close(first)
    os.truncate(after.path / "staging" / first.file.path.name, 3)
    async with after.alive(INO) as (d, (left,)):
        assert await content(left) == b"xxx"
        await d.close(left)


@in_trio
async def test_a_failed_fsync_is_remembered(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    async with daemon.alive(writeback=True) as (d, _):
        first = await create(d)
        await add(first, b"data")
        d.uploads.journal._room = 0  # of its content: its file is synced
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", fails)
            with pytest.raises(CacheUnusable):
                await d.uploads.commit(first)
        after = daemon.killed(tmp_path / "second")
        await first.truncate(0)
        await d.close(first)
    async with after.alive(INO, writeback=True) as (d, (second,)):
        with pytest.raises(CacheUnusable):
            await d.uploads.commit(second)
        await second.truncate(0)
        await d.close(second)


@in_trio
async def test_what_has_no_place_in_memory_goes_to_the_disk(daemon: Daemon, tmp_path: Path) -> None:
    async with daemon.alive() as (d, _):
        assert d.uploads._disk.shared is not None
        d.uploads._disk.shared.tails.free.clear()
        first = await create(d)
        await add(first, b"data")
        after = daemon.killed(tmp_path / "second")
        await d.close(first)
        assert daemon.store.content("k") == b"data"
    async with after.alive(INO) as (d, (second,)):
        assert await content(second) == b"data"
        await d.close(second)


@in_trio
async def test_a_file_is_written_down_once_for_each_change_of_what_it_is(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is made, when the kernel writes it, when it is sent, when the origin has it, and when it is written again;
    between these its time alone."""
    put, puts = FileRecords.put, list[bool]()

    def counted(self: FileRecords, name: str, mtime_ns: int, row: Mapping[str, Any]) -> bool:
        puts.append(row["dirty"])
        return put(self, name, mtime_ns, row)

    monkeypatch.setattr(FileRecords, "put", counted)
    async with daemon.alive(writeback=True, upload_delay_s=0.0) as (d, _):
        Kernel(d)
        dirty_file = await d.uploads.begin(d.store, "k")
        d.uploads.outlive(dirty_file, INO, named=True)
        d.uploads.open(dirty_file)
        assert await d.uploads.open_backing(dirty_file) is not None
        assert puts == [True, True]
        dirty_file.file.path.write_bytes(b"1")
        await d.uploads.commit(dirty_file)
        assert puts == [True, True]
        async with daemon.killed(tmp_path / "second").alive(INO) as (_, [second]):
            assert second.dirty and second.mtime_ns == dirty_file.mtime_ns
            puts.clear()
        d.uploads.returned(dirty_file)
        await d.uploads.flush()
        assert puts == [True, False]
        puts.clear()
        await dirty_file.write(0, b"2")
        await dirty_file.write(0, b"3")
        assert puts == [True]
        await d.close(dirty_file)
        await d.uploads.flush()


@pytest.mark.parametrize("acknowledged", [False, True])
@in_trio
async def test_a_process_writes_in_passthrough_while_the_next_daemon_takes_the_file_over(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acknowledged: bool
) -> None:
    """Between any two calls on the file. All that was written is there, and is uploaded."""
    async with daemon.alive(writeback=True) as (d, _):
        Kernel(d)
        dirty_file = await create(d)
        assert await d.uploads.open_backing(dirty_file) is not None
        if acknowledged:
            await d.uploads.commit(dirty_file)
            daemon.memory().records.drop(dirty_file.id)
        after = daemon.killed(tmp_path / "second")
    plain, written = StagingFile.shape, list[Path]()

    def shape(file: StagingFile) -> Shape:
        if not written:
            written.append(file.path)
            file.path.write_bytes(b"written")
        return plain(file)

    monkeypatch.setattr(StagingFile, "shape", shape)
    async with after.alive(INO, writeback=True, upload_delay_s=0.0) as (d, (second,)):
        assert written == [second.file.path]
        assert await content(second) == b"written"
        await d.uploads.commit(second)
        await d.close(second)
        assert await d.uploads.flush() == []
        assert after.store.content("k") == b"written"


@in_trio
async def test_closed_files_that_wait_for_their_upload_need_no_memory(daemon: Daemon) -> None:
    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        for number in range(5):
            one = await create(d, f"{number}", number + 1)
            await add(one, b"data")
            await d.close(one)
        await d.quiet()
        assert daemon.memory().records.found() == {} and daemon.memory().tails.found() == []
        again = next(iter(d.uploads._dirty_files.values()))
        d.uploads.open(again)
        assert set(daemon.memory().records.found()) == {again.id}
        d.uploads.release(again)
        assert daemon.memory().records.found() == {}


@in_trio
async def test_a_small_file_that_the_origin_has_leaves_no_file_behind(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in memory alone, and the daemon dies before the cache has it."""
    copies: list[Daemon] = []

    async def adopt_bytes(self: Room, versions: Sequence[tuple[ObjectId, bytes]]) -> list[bool]:
        copies.append(daemon.killed(tmp_path / "second"))
        return [False] * len(versions)

    monkeypatch.setattr(Room, "adopt_bytes", adopt_bytes)
    async with daemon.alive() as (d, _):
        dirty_file = await create(d)
        await add(dirty_file, b"small")
        await d.close(dirty_file)
        await d.quiet()
    (after,) = copies
    async with after.alive() as (d, resumed):
        assert resumed == [] and await d.files() == []
    assert [path.name for path in after.path.iterdir() if "orphaned" in path.name] == []


@pytest.mark.parametrize("outlives", [False, True])
@in_trio
async def test_what_a_rename_leaves_at_the_origin_is_told_before(daemon: Daemon, outlives: bool) -> None:
    """Else the rename would be repeated with that, over the file that has moved already."""
    old = daemon.store.show("k", b"old")
    told: list[tuple[str, str]] = []
    async with desk(daemon.path, daemon.store, memory=daemon.memory() if outlives else None) as d:
        first = await create_of(d, "k")
        await add(first, b"more")

        async def leaves(info: Any) -> None:
            told.append((info.etag, first.key))

        assert await d.uploads.rename(first, "new", leaves=leaves)
        await d.close(first)
        assert daemon.store.content("new") == b"oldmore"
    assert told == [(old.etag, "k")] * outlives


@in_trio
async def test_a_file_that_is_settled_while_it_is_renamed_leaves_no_record(daemon: Daemon) -> None:
    async with daemon.alive() as (d, _):
        first = await create(d)
        await add(first, b"data")
        await d.uploads.commit(first)
        held = daemon.store.hold("copy")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.rename, first, "new")
            await held.reached.wait()
            d.uploads.release(first)
            await trio.sleep(1)
            assert d.settled == ["new"] and held.release is not None
            held.release.set()
        assert daemon.store.objects.keys() == {"new"}
    assert daemon.memory().records.found() == {}


async def create_of(d: Desk, key: str) -> DirtyFile:
    """Of a file that the origin has."""
    dirty_file = await d.create(key, base=d.store.version(key))
    d.uploads.outlive(dirty_file, INO, named=True)
    return dirty_file


@in_trio
async def test_killed_around_the_commit_of_a_small_file(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in memory, and then in the journal: at no moment in none of them."""
    copies, write = list[Daemon](), journal.Journal._write

    def committing(self: Any, *rows: Any) -> None:
        copies.append(daemon.killed(tmp_path / "before"))
        write(self, *rows)
        copies.append(daemon.killed(tmp_path / "after"))

    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        first = await create(d)
        await add(first, b"data")
        monkeypatch.setattr(journal.Journal, "_write", committing)
        await d.uploads.commit(first)
        monkeypatch.undo()
        copies.append(daemon.killed(tmp_path / "acknowledged"))
        assert await d.files() == [] and daemon.memory().tails.found() == []
        await add(first, b"more")
        copies.append(daemon.killed(tmp_path / "written"))
        await d.close(first)
        copies.append(daemon.killed(tmp_path / "closed"))
    assert len(copies) == 5
    for after, data in zip(copies, [b"data"] * 3 + [b"datamore"] * 2, strict=True):
        async with after.alive(INO, writeback=True, upload_delay_s=3600) as (d, (dirty_file,)):
            if not dirty_file.handles:
                d.uploads.open(dirty_file)
            assert await content(dirty_file) == data
            await d.close(dirty_file)
            assert await d.uploads.flush() == []
            await d.quiet()
            assert after.store.content("k") == data and await d.files() == []


@pytest.mark.parametrize("saved", [False, True])
@in_trio
async def test_an_open_file_that_lies_in_memory_stays_there_while_the_disk_is_full(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """One that is `saved` is in the journal, too: its daemon was killed before it gave the memory back."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        first = await create(d)
        await add(first, b"data")
        if saved:
            monkeypatch.setattr(first.file, "promised", lambda content: None)
            await d.uploads.commit(first)
        after = daemon.killed(tmp_path / "second")
        monkeypatch.undo()
        await d.close(first)
    monkeypatch.setattr(staging, "_write", full)
    async with after.alive(INO, writeback=True, upload_delay_s=3600) as (d, (second,)):
        assert await content(second) == b"data" and await d.files() == []
        assert staging.HELD_ALTOGETHER - d.uploads._disk.memory_left == 4
        if saved:
            with pytest.raises(NoRoom):
                await add(second, b"more")
        else:
            await add(second, b"more")
        third = after.killed(tmp_path / "third")
        await d.close(second)
        assert await d.uploads.flush() == []
        await d.quiet()
        assert d.uploads._disk.memory_left == staging.HELD_ALTOGETHER
    assert after.memory().tails.found() == []
    monkeypatch.undo()
    async with third.alive(INO, writeback=True) as (d, (dirty_file,)):
        assert await content(dirty_file) == (b"data" if saved else b"datamore")
        assert orphans.never_acknowledged(dirty_file.file.path) != saved
        await d.close(dirty_file)
        assert await d.uploads.flush() == []


@pytest.mark.parametrize("memory", [True, False])
@in_trio
async def test_an_open_file_that_lies_in_memory_is_there_after_its_upload(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    """The journal loses its content then; without `memory` for another end it goes to the disk."""
    copies, write = list[Daemon](), journal.Journal._write

    def removing(self: Any, puts: Sequence[Any], batch: Any) -> None:
        copies.append(daemon.killed(tmp_path / f"before{len(copies)}"))
        write(self, puts, batch)
        copies.append(daemon.killed(tmp_path / f"after{len(copies)}"))

    async with daemon.alive(writeback=True, upload_delay_s=1) as (d, _):
        first = await create(d)
        await add(first, b"data")
        await d.uploads.commit(first)
        assert d.uploads._disk.shared is not None
        if not memory:
            d.uploads._disk.shared.tails.free.clear()
        monkeypatch.setattr(journal.Journal, "_write", removing)
        await trio.sleep(5)
        await d.quiet()
        assert first.committed is not None and not first.acknowledged
        assert daemon.store.content("k") == await content(first) == b"data"
        assert await d.files() == [] if memory else [first.id]
        monkeypatch.undo()
        await add(first, b"more")
        copies.append(daemon.killed(tmp_path / "written"))
        await d.close(first)
    for after in copies:
        async with after.alive(INO, writeback=True, upload_delay_s=1) as (d, (second,)):
            assert await content(second) == (b"datamore" if after is copies[-1] else b"data")
            await add(second, b"!")
            await d.close(second)
            assert await d.uploads.flush() == []
            await d.quiet()
            assert after.store.content("k").endswith(b"!") and await d.files() == []


class SlowJournal:
    """Transactions of the journal do not begin until `goes_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writing, self.goes_on = threading.Event(), threading.Event()
        write = journal.Journal._write

        def slow(of: Any, puts: Sequence[Any], batch: Any) -> None:
            self.writing.set()
            self.goes_on.wait(30)
            write(of, puts, batch)

        monkeypatch.setattr(journal.Journal, "_write", slow)

    async def reached(self) -> None:
        while not self.writing.is_set():
            await trio.lowlevel.checkpoint()


@in_trio
async def test_a_file_that_is_removed_while_it_is_acknowledged_is_there_for_its_users(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the removal begins, its bytes are not in the journal alone yet."""
    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        first = await create(d)
        await add(first, b"data")
        disk = SlowJournal(monkeypatch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.commit, first)
            await disk.reached()
            nursery.start_soon(d.uploads.discard, first)
            while not first.record.turn.waited_for:
                await trio.lowlevel.checkpoint()
            disk.goes_on.set()
        after = daemon.killed(tmp_path / "second")
        d.uploads.release(first)
    async with after.alive(INO, writeback=True) as (d, (second,)):
        assert second.discarded and await content(second) == b"data"
        d.uploads.release(second)


@pytest.mark.parametrize("outlives", [False, True])
@in_trio
async def test_a_file_that_is_renamed_while_it_is_acknowledged_comes_back_under_its_new_name(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outlives: bool
) -> None:
    """One process closes it while another one renames it."""
    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        first = await create(d)
        await add(first, b"data")
        disk = SlowJournal(monkeypatch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.commit, first)
            await disk.reached()
            nursery.start_soon(d.rename, first, "new")
            for _ in range(1000):
                await trio.lowlevel.checkpoint()
            disk.goes_on.set()
        d.uploads.release(first)
        after = daemon.killed(tmp_path / "second")
    memory = after.memory() if outlives else None
    async with desk(after.path, after.store, writeback=True, upload_delay_s=3600, memory=memory) as d:
        assert [(one.key, await content(one)) for one in d.uploads.pending()] == [("new", b"data")]


@in_trio
async def test_a_replaced_file_does_not_come_back_after_a_kill_amid_the_takeover(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload of the file that has replaced it had just ended at the first kill."""
    copies = list[Daemon]()
    async with daemon.alive() as (d, _):
        old, new = await create(d, "k", 1), await create(d, "new", 2)
        await add(old, b"old")
        daemon.store.fail("put", lambda: OriginFailed("no"))
        with pytest.raises(OriginFailed):
            await d.close(old)  # its row restores it from now on
        await add(new, b"new")
        await d.uploads.rename(new, "k", over=old)
        old.content.name_goes()  # as until its removal

        async def killed(self: Any, dirty_file: DirtyFile) -> None:
            copies.append(daemon.killed(tmp_path / "second"))

        with monkeypatch.context() as patched:
            patched.setattr(journal.Records, "forget_replaced", killed)
            await d.close(new)
        await d.uploads.discard(old, replaced=True)
        await d.quiet()
    (second,) = copies

    async def dies(*_: object) -> list[DirtyFile]:
        copies.append(second.killed(tmp_path / "third"))
        raise CacheUnusable("killed")

    with monkeypatch.context() as patched:
        patched.setattr(recovery.Recovery, "restore", dies)
        with pytest.raises(CacheUnusable):
            async with second.alive():
                pass
    async with copies[-1].alive() as (d, _):
        assert d.uploads.pending() == []


async def replaced(
    daemon: Daemon, second: Path, old_id: str, new_id: str, monkeypatch: pytest.MonkeyPatch
) -> Daemon:
    """A daemon that was killed after "new" (inode 2, open) was renamed over "k" (inode 1, closed), both acknowledged, and
    before the replaced file was discarded."""
    ids = iter((old_id, new_id))
    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        with monkeypatch.context() as patched:
            patched.setattr(uploads, "uuid4", lambda: SimpleNamespace(hex=next(ids) * 32))
            old, new = await create(d, "k", 1), await create(d, "new", 2)
        await add(old, b"old")
        await d.close(old)
        await add(new, b"new")
        await d.uploads.commit(new)
        await d.uploads.rename(new, "k", over=old)
        after = daemon.killed(second)
        await d.uploads.discard(old, replaced=True)
        await d.close(new)
    return after


@in_trio
async def test_a_file_whose_staging_file_was_removed_has_replaced_none(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with daemon.alive(writeback=True) as (d, _):
        old, new = await create(d, "k", 1), await create(d, "new", 2)
        await add(old, b"old")
        await add(new, bytes(HELD + 1))
        await d.uploads.rename(new, "k", over=old)
        after = daemon.killed(tmp_path / "second")
        await d.uploads.discard(old, replaced=True)
        d.uploads.release(old)
        await d.close(new)
    (after.path / "staging" / new.file.path.name).unlink()
    async with after.alive(1, 2, writeback=True) as (d, found):
        (one,) = found
        assert await content(one) == b"old" and d.uploads.pending() == [one]
        await d.close(one)
    assert "is lost: its staging file was removed" in caplog.text


@pytest.mark.parametrize("ids", ["ab", "ba"])
@in_trio
async def test_no_power_cut_at_a_takeover_brings_a_replaced_file_back(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: str
) -> None:
    after = await replaced(daemon, tmp_path / "second", *ids, monkeypatch)
    cuts, write = list[Path](), Journal._write

    def committing(self: Journal, *rows: Any) -> None:
        write(self, *rows)
        disk = shutil.copytree(after.path, tmp_path / f"cut{len(cuts)}")
        mark = disk / "state" / "journal" / MARK
        mark.write_text(re.sub(r"\bopen \S+", "open another", mark.read_text()))  # of another boot
        cuts.append(disk)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_write", committing)
        async with after.alive(2, writeback=True, upload_delay_s=3600) as (d, found):
            patched.undo()
            for one in found:
                await d.close(one)
    assert cuts
    for disk in cuts:
        async with desk(disk, writeback=True, upload_delay_s=3600) as d:
            assert [(one.key, await content(one)) for one in d.uploads.pending()] == [("k", b"new")], disk


@pytest.mark.parametrize("users", [0, 1], ids=["closed", "open"])
@in_trio
async def test_the_parts_of_a_replaced_file_go_after_a_kill(
    daemon: Daemon, tmp_path: Path, users: int
) -> None:
    async with daemon.alive() as (d, _):
        old, new = await create(d, "k", 1), await create(d, "new", 2)
        for _ in range(20):
            await add(old, bytes(MIB))
        await d.quiet()
        assert len(daemon.store.uploads) == 1
        await add(new, b"new")
        await d.uploads.rename(new, "k", over=old)
        after = daemon.killed(tmp_path / "second")
        await d.uploads.discard(old, replaced=True)
        d.uploads.release(old)
        await d.close(new)
    async with after.alive(*[1] * users, 2) as (d, found):
        for one in found:
            if one.handles:
                await d.close(one)
        assert await d.uploads.flush() == []
        await d.quiet()
        await trio.sleep(100)
        assert after.store.content("k") == b"new" and after.store.uploads == {}


@in_trio
async def test_a_row_that_a_full_disk_refuses_at_a_takeover_is_written_later(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        new = await create(d, "new", 2)
        await add(new, b"new")
        await d.uploads.commit(new)
        new.new_token()  # only its record has the token
        after = daemon.killed(tmp_path / "second")
        await d.close(new)
    with monkeypatch.context() as patched:
        patched.setattr(staging, "_write", full)
        patched.setattr(Database, "write", no_room)
        async with after.alive(2, writeback=True, upload_delay_s=3600) as (d, found):
            (one,) = (one for one in found if one.handles)
            assert await content(one) == b"new" and d.uploads._records.unwritten == [one]
            patched.undo()
            await trio.sleep(100)
            assert d.uploads._records.unwritten == []
            assert d.uploads.journal.rows(journal.DIRTY_FILES)[one.id]["tokens"] == one.record.tokens
            await d.close(one)


@in_trio
async def test_a_small_file_that_is_opened_right_after_its_upload_outlives_a_kill(
    daemon: Daemon, tmp_path: Path
) -> None:
    """The journal had its bytes until then."""
    async with daemon.alive(writeback=True, upload_delay_s=0) as (d, _):
        first = await create(d)
        await add(first, b"data")
        await d.close(first)
        assert await d.uploads.flush() == [] and d.settled == [] and first.content.row is Row.NONE
        d.uploads.open(first)
        after = daemon.killed(tmp_path / "second")
        d.uploads.release(first)
    async with after.alive(INO, writeback=True) as (d, (second,)):
        assert await content(second) == b"data"
        await d.close(second)


@in_trio
async def test_a_staging_file_that_vanishes_during_a_start_is_lost_alone(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = os.urandom(HELD + 1)
    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        await d.save("first", data)
        await d.save("second", data)
        after = daemon.killed(tmp_path / "second")
    restorable = recovery.restorable

    def vanishes(rows: Mapping[str, Mapping[str, Any]], files: Any) -> set[str]:
        found = restorable(rows, files)
        (
            after.path / "staging" / next(row["file"] for row in rows.values() if row["key"] == "first")
        ).unlink()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(recovery, "restorable", vanishes)
        async with desk(after.path, after.store, writeback=True) as d:
            assert [one.key for one in d.uploads.pending()] == ["second"]
            assert len(d.uploads.journal.rows(journal.DIRTY_FILES)) == 1
            assert await d.uploads.flush() == []
    assert [
        r.getMessage()
        for r in caplog.records
        if r.levelno == logging.ERROR and "/first was to be" in r.message
    ]


@in_trio
async def test_a_content_that_cannot_be_read_refuses_the_start(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        await d.save("small", b"data")
        after = daemon.killed(tmp_path / "second")
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "content", lambda self, key: None)
        with pytest.raises(CacheUnusable, match="small waits for its upload, and cannot be read"):
            async with desk(after.path, after.store, writeback=True):
                pass
    async with desk(after.path, after.store, writeback=True, upload_delay_s=3600) as d:
        assert [(one.key, await content(one)) for one in d.uploads.pending()] == [("small", b"data")]


@in_trio
async def test_a_replaced_file_whose_row_a_full_disk_keeps_does_not_come_back_after_two_kills(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        old, new = await create(d, "k", 1), await create(d, "new", 2)
        await add(old, b"old")
        await d.close(old)
        await add(new, b"new")
        await d.uploads.rename(new, "k", over=old)
        second = daemon.killed(tmp_path / "second")
        await d.uploads.discard(old, replaced=True)
        await d.close(new)
    with monkeypatch.context() as patched:
        patched.setattr(Database, "write", no_room)
        async with second.alive(2, writeback=True, upload_delay_s=3600) as (d, (one,)):
            one.new_token()  # its record is written again
            third = second.killed(tmp_path / "third")
            patched.undo()
            await d.close(one)
            await d.quiet()
    async with third.alive(2, writeback=True, upload_delay_s=3600) as (d, found):
        assert [(one.key, await content(one)) for one in d.uploads.pending()] == [("k", b"new")]
        await d.close(*found)


@pytest.mark.parametrize("size", [100, 300 * KIB])
@pytest.mark.parametrize("users", [0, 1], ids=["closed", "open"])
@in_trio
async def test_a_removed_file_whose_row_a_full_disk_keeps_does_not_come_back_after_two_kills(
    daemon: Daemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    users: int,
    size: int,
) -> None:
    """For example because a file that the origin has was renamed over it."""
    writeback: dict[str, Any] = {"writeback": True, "upload_delay_s": 3600}
    async with daemon.alive(**writeback) as (d, _):
        old = await create(d, "k", 1)
        await add(old, bytes(size))
        await d.uploads.commit(old)
        if not users:
            d.uploads.release(old)
        with monkeypatch.context() as patched:
            patched.setattr(Database, "write", no_room)
            await d.uploads.discard(old, replaced=True)
            if users:
                d.uploads.release(old)
            await d.files()
            second = daemon.killed(tmp_path / "second")
            async with second.alive(**writeback) as (e, found):
                assert found == [] and e.uploads.pending() == []
                third = second.killed(tmp_path / "third")
                patched.undo()
                await e.save("other", b"")
                await e.quiet()
                assert e.uploads.journal.left is None and second.memory().records.found().keys() <= {"other"}
    async with third.alive(**writeback) as (d, found):
        await d.quiet()
        assert found == [] and d.uploads.pending() == [] and await d.files() == []
        assert not d.uploads.journal.rows("drafts") and not third.memory().records.found()
    assert "ERROR" not in caplog.text


@pytest.mark.parametrize("settled", [False, True])
@in_trio
async def test_an_uploaded_file_whose_row_a_full_disk_keeps_is_not_uploaded_again_after_a_kill(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: bool
) -> None:
    """It may have been renamed or replaced meanwhile."""
    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        one = await create(d, "k", 1)
        await add(one, b"data")
        await d.close(one)
        with monkeypatch.context() as patched:
            patched.setattr(Database, "write", no_room)
            assert await d.uploads.flush() == []
            await trio.sleep(1 if settled else 0)
            assert (one.id not in d.uploads._dirty_files) is settled
            after = daemon.killed(tmp_path / "second")
        await d.save("other", b"")
        await d.quiet()
        await trio.sleep(1)
        assert d.uploads.journal.left is None and not daemon.memory().records.found()
    # The file is open again, under its inode. It is the origin's version then, which another daemon's handle reads.
    async with after.alive(*[1] * settled, writeback=True) as (d, found):
        assert found == d.uploads.pending() == [] and not d.uploads.journal.rows("drafts")


@pytest.mark.parametrize("users", [0, 1], ids=["closed", "open"])
@in_trio
async def test_a_file_that_is_lost_has_replaced_none(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: int
) -> None:
    """A kill amid a rename over an acknowledged file. The end of the new file was in memory, and the disk is full."""
    async with daemon.alive(writeback=True, upload_delay_s=3600) as (d, _):
        old, new = await create(d, "k", 1), await create(d, "new", 2)
        await add(old, b"old")
        await d.uploads.commit(old)
        if not users:
            await d.close(old)
        for _ in range(15):
            await add(new, b"n" * 30 * KIB)
        assert new.file.ends_in_memory and not new.file.in_memory
        await d.uploads.rename(new, "k", over=old)
        after = daemon.killed(tmp_path / "second")
        await d.uploads.discard(old, replaced=True)
        if users:
            d.uploads.release(old)
        await d.close(new)
    with monkeypatch.context() as patched:
        patched.setattr(staging, "_write", full)
        async with after.alive(*[1] * users, 2, writeback=True, upload_delay_s=3600) as (d, found):
            assert [(one.key, await content(one), one.discarded) for one in found] == [("k", b"old", False)]
            patched.undo()
            for one in found:
                if one.handles:
                    await d.close(one)


@in_trio
async def test_a_file_whose_rename_has_failed_keeps_its_key_though_the_journal_failed_to_write_it(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has the new key in its row: the daemon dies before it is written again. Another file has that key then."""
    daemon.store.show("a", b"v1")
    async with daemon.alive(writeback=True, upload_delay_s=100) as (d, _):
        first = await d.create("a", b"v2", base=daemon.store.version("a"), upto=0)
        d.uploads.outlive(first, INO, named=True)
        await d.close(first)
        with monkeypatch.context() as patched:

            def failing() -> OriginFailed:
                patched.setattr(Database, "write", no_room)
                return OriginFailed("no copy")

            daemon.store.fail("copy", failing)
            with pytest.raises(OriginFailed, match="no copy"):
                await d.rename(first, "b", upload=False)
        d.uploads.open(first)
        await d.close(first)
        other = await create(d, "b", INO + 1)
        await add(other, b"other")
        await d.close(other)
        assert d.uploads.journal.rows(journal.DIRTY_FILES)[first.id]["key"] == "b"
        after = daemon.killed(tmp_path / "second")
        await trio.sleep(2)
        assert d.uploads.journal.rows(journal.DIRTY_FILES)[first.id]["key"] == "a"
        assert daemon.memory().records.found() == {}
    async with after.alive(writeback=True) as (d, files):
        assert [(one.key, await content(one)) for one in files] == [("a", b"v2"), ("b", b"other")]
        assert await d.uploads.flush() == []
        await d.quiet()
        assert after.store.content("a") == b"v2" and after.store.content("b") == b"other"
        assert d.uploads.journal.rows(journal.DIRTY_FILES) == {} and await d.files() == []
        assert after.memory().records.found() == {}

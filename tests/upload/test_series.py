"""Series longer than what goes at once, and failures in the middle: afterwards all is counted as before (`counters.py`)."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base import database
from cachefs.base.errors import CacheUnusable, NoRoom, OriginFailed
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.upload import refuse_foreign, room, sending
from cachefs.upload.journal import DIRTY_FILES, Journal
from cachefs.upload.queue import IN_BACKGROUND
from cachefs.upload.staging import HELD
from tests.fetch.scripted import content
from tests.upload import counters
from tests.upload.scripted import LIMITS, MIB, PART, Desk, ScriptedReader, ScriptedStore, add, desk, in_trio

FILES = 2 * IN_BACKGROUND + 5

TURNS = 2


@pytest.mark.parametrize("trouble", [False, pytest.param(True, marks=pytest.mark.long)])
@in_trio
async def test_more_files_than_go_at_once_all_arrive(tmp_path: Path, trouble: bool) -> None:
    async with desk(tmp_path, writeback=True) as d:
        d.store.latency_s = 0.1
        for turn in range(TURNS):
            if trouble:
                d.store.fail("put", lambda: OriginFailed("trouble"), times=FILES)
            async with trio.open_nursery() as nursery:
                for number in range(FILES):
                    nursery.start_soon(d.save, f"{turn}/{number}", b"%d" % number)
            await trio.sleep(3)
            assert 1 < d.store.most_in_flight <= IN_BACKGROUND
            await trio.sleep(1000 if trouble else 10)
            await d.quiet()
            assert d.uploads.pending() == [] and await d.files() == []
            assert d.store.counts["put"] >= FILES * (turn + 1) * (1 + trouble)
        counters.check_unused(d.uploads)
    assert len(d.store.objects) == TURNS * FILES


@in_trio
async def test_what_is_due_waits_for_a_place_and_for_nothing_else(tmp_path: Path) -> None:
    """As many as may be are held back: one that ends makes way for one."""
    async with desk(tmp_path, writeback=True) as d:
        held = [d.store.hold("put", key=f"{n}") for n in range(IN_BACKGROUND)]
        async with trio.open_nursery() as nursery:
            for number in range(IN_BACKGROUND):
                nursery.start_soon(d.save, f"{number}", b"x")
        await trio.sleep(5)
        async with trio.open_nursery() as nursery:
            for number in range(IN_BACKGROUND, IN_BACKGROUND + 4):
                nursery.start_soon(d.save, f"{number}", b"x")
        await trio.sleep(5)
        await d.quiet()
        assert d.store.in_flight == IN_BACKGROUND and not d.store.objects
        for done in range(4):
            held[done].release.set()
            await d.quiet()
        assert d.store.in_flight == IN_BACKGROUND - 4 and len(d.store.objects) == 8
        for hold in held:
            hold.release.set()
        await d.quiet()
        assert len(d.store.objects) == IN_BACKGROUND + 4


# -- failures in the middle ---------------------------------------------------------------------------


class Pwrite:
    """`os.pwrite` of staging files fails after half of what it is given, `times` times."""

    def __init__(self, below: Path) -> None:
        self._below, self._real, self.times = str(below), os.pwrite, 0

    def __call__(self, fd: int, data: Any, offset: int) -> int:
        if not self.times or not os.readlink(f"/proc/self/fd/{fd}").startswith(self._below):
            return self._real(fd, data, offset)
        self.times -= 1
        self._real(fd, memoryview(data)[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def pwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pwrite]:
    pwrite = Pwrite(tmp_path)
    monkeypatch.setattr(os, "pwrite", pwrite)
    yield pwrite


@pytest.mark.parametrize("offset", [0, PART + 100, 3 * PART - 10, 3 * PART])
@in_trio
async def test_after_a_write_that_failed_the_store_gets_what_the_file_holds(
    tmp_path: Path, pwrite: Pwrite, offset: int
) -> None:
    """Parts that were sent before are sent again where the failure may have changed them."""
    async with desk(tmp_path) as d:
        data = content(1, 3 * PART)
        dirty_file = await d.create("k", data)
        await d.quiet()
        assert d.store.counts["part"] >= 2
        pwrite.times = 2
        with pytest.raises(NoRoom):
            await dirty_file.write(offset, b"2" * (PART + 1))
        assert dirty_file.size == len(data)
        held = bytes(await dirty_file.read(0, 4 * PART))
        assert held[:offset] == data[:offset] and len(held) == len(data)
        await d.close(dirty_file)
        await d.quiet()
        assert d.store.content("k") == held


@in_trio
async def test_a_disk_that_was_full_for_a_moment_is_seen_by_nobody(tmp_path: Path, pwrite: Pwrite) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", content(1, 5 * PART))
        pwrite.times = 1
        await dirty_file.write(PART, b"2" * PART)
        assert not pwrite.times and d.cache.asked
        await d.close(dirty_file)
        assert (
            d.store.content("k")
            == content(1, 5 * PART)[:PART] + b"2" * PART + content(1, 5 * PART)[2 * PART :]
        )


@pytest.mark.parametrize("kind", ["put", "complete"])
@in_trio
async def test_an_outcome_out_of_our_hands_is_waited_for_by_who_writes(tmp_path: Path, kind: str) -> None:
    size = 100 if kind == "put" else 20 * PART
    async with desk(tmp_path, writeback=True) as d:
        if kind == "complete":
            d.uploads.on_committed = lambda dirty_file, info: None
        first = content(1, size)
        hold = d.store.hold(kind)
        dirty_file = await d.create("k", first)
        if kind == "complete":
            dirty_file.sender.upload = await d.store.begin_upload("k")
        await d.uploads.commit(dirty_file)
        await hold.reached.wait()
        written = trio.Event()

        async def overwrite() -> None:
            await dirty_file.write(0, b"2")
            written.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(overwrite)
            await trio.sleep(5)
            assert not written.is_set(), "the request may be at the store already"
            hold.release.set()
        await d.close(dirty_file)
        await trio.sleep(5)
        await d.quiet()
        assert d.store.seen["k"] == [first, b"2" + first[1:]]


@in_trio
async def test_what_nobody_has_closed_or_synced_is_not_sent_by_itself(tmp_path: Path) -> None:
    """Its commit was given up, and broken off by a write."""
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"first")
        hold = d.store.hold("begin")
        dirty_file.sender.upload = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.commit, dirty_file)
            await d.quiet()
            nursery.cancel_scope.cancel()
        hold.release.set()
        await dirty_file.write(0, b"F")
        await trio.sleep(1000)
        before = dict(d.store.counts)
        await add(dirty_file, b"!")
        await trio.sleep(1000)
        assert d.store.counts == before
        await d.close(dirty_file)
        assert d.store.content("k") == b"First!"


@in_trio
async def test_one_that_is_removed_while_it_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came in between and is due, so the promise would begin an upload; but there is nothing to send any more."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1) as d:
        d.uploads.journal._room = 0  # of contents: files are synced
        dirty_file = await d.save("k", b"first")
        d.uploads.open(dirty_file)
        await add(dirty_file, b", second")
        await trio.sleep(5)
        assert dirty_file.trying.overdue and not d.store.objects
        syncing, go_on = threading.Event(), threading.Event()
        real = os.fdatasync

        def slow(fd: int) -> None:
            syncing.set()
            go_on.wait(30)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.commit, dirty_file)
            while not syncing.is_set():
                await trio.lowlevel.checkpoint()
            await d.uploads.discard(dirty_file)
            go_on.set()
        d.uploads.release(dirty_file)
        await trio.sleep(100)
        assert not d.store.objects and await d.files() == []


# -- what is durable ----------------------------------------------------------------------------------


def test_a_journal_is_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB syncs each transaction by itself, unless it is told not to."""
    environments: list[Any] = []
    real = database.lmdb.open
    monkeypatch.setattr(
        database.lmdb,
        "open",
        lambda *args, **how: (environments.append(real(*args, **how)), environments[-1])[1],
    )
    journal = Journal(tmp_path / "journal")
    try:
        trio.run(journal.write, DIRTY_FILES, "a", {"key": "k"})
        flags = environments[-1].flags()
        assert flags["sync"] and flags["metasync"] and not flags["map_async"]
    finally:
        journal.close()


def test_a_journal_of_another_format_is_refused_and_ours_is_not(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    refuse_foreign(directory)
    Journal(directory).close()
    refuse_foreign(directory)
    (directory / "version").write_text("journal-0\nopen BOOT\n")
    with pytest.raises(CacheUnusable, match="journal-0"):
        refuse_foreign(directory)


# -- users --------------------------------------------------------------------------------------------


@in_trio
async def test_what_is_closed_without_a_commit_goes_to_the_store_by_itself(tmp_path: Path) -> None:
    """As when a program is killed."""
    async with desk(tmp_path) as d:
        d.uploads.release(await d.create("k", b"data"))
        await trio.sleep(1)
        await d.quiet()
        assert d.store.content("k") == b"data" and d.settled == ["k"]


@in_trio
async def test_who_opens_it_while_the_cache_takes_it_is_the_last_to_settle_it(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        adopt, taking, go_on = d.cache.adopt, trio.Event(), trio.Event()

        async def slow(object_id: ObjectId, path: Path) -> bool:
            taking.set()
            await go_on.wait()
            return await adopt(object_id, path)

        d.cache.adopt = slow  # type: ignore[method-assign]
        dirty_file = await d.save("k", b"data")
        await taking.wait()
        d.uploads.open(dirty_file)
        go_on.set()
        await d.quiet()
        assert d.settled == [] and await dirty_file.read(0, 10) == b"data"
        d.uploads.release(dirty_file)
        assert d.settled == ["k"], "at once: its file is the cache's"
        assert dirty_file not in d.uploads._dirty_files.values()


@in_trio
async def test_a_store_without_parts_does_not_hold_the_writer_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "UNSENT", PART)
    async with desk(tmp_path, ScriptedStore(replace(LIMITS, most_parts=0))) as d:
        dirty_file = await d.create("k")
        for _ in range(8):
            await add(dirty_file, b"x" * PART)
        await d.close(dirty_file)
        assert d.store.counts == {"put": 1} and len(d.store.content("k")) == 8 * PART


@in_trio
async def test_what_can_be_read_without_waiting_is_all_or_nothing(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        data = content(1, 3 * HELD)
        dirty_file = await d.create("k", data)
        for offset, size in ((0, 10), (HELD - 5, HELD), (3 * HELD - 10, 10)):
            found = dirty_file.file.read_now(offset, size)
            assert found is None or bytes(found) == data[offset : offset + size]
        assert dirty_file.file.read_now(3 * HELD - 10, 20) is None, "it ends before"
        await d.close(dirty_file)


@pytest.mark.parametrize("fails", [False, True])
@in_trio
async def test_what_a_dirty_file_begins_with_is_read_in_order_and_closed(tmp_path: Path, fails: bool) -> None:
    data, read = content(1, 3 * MIB + 5), list[tuple[int, int]]()

    class Reader(ScriptedReader):
        async def read(self, opened: bytes, offset: int, size: int, pid: int) -> bytes:
            if fails and offset:
                raise OriginFailed("trouble")
            read.append((offset, size))
            return await super().read(opened, offset, size, pid)

    reader = Reader()
    async with desk(tmp_path, reader=reader) as d:
        d.store.show("k", data)
        if fails:
            with pytest.raises(OriginFailed):
                await d.create("k", base=d.store.version("k"), upto=2 * MIB + 7)
        else:
            dirty_file = await d.create("k", base=d.store.version("k"), upto=2 * MIB + 7)
            assert read == [(0, MIB), (MIB, MIB), (2 * MIB, 7)]
            assert bytes(await dirty_file.read(0, 3 * MIB)) == data[: 2 * MIB + 7]
            await d.close(dirty_file)
        assert reader.users == 0


# -- the guards themselves ----------------------------------------------------------------------------


def _busy(d: Desk) -> None:
    d.uploads._queue._busy += 1


def _memory(d: Desk) -> None:
    d.uploads._disk.memory_left -= 1


def _writers(d: Desk) -> None:
    d.uploads.passthrough._writers += 1


def _users(d: Desk) -> None:
    next(iter(d.uploads._dirty_files.values())).file._users += 1


def _under_way(d: Desk) -> None:
    next(iter(d.uploads._dirty_files.values())).parts.under_way[1] = sending.Piece(1, 0, 1, 0)


@pytest.mark.parametrize("damage", [_busy, _memory, _writers, _users, _under_way])
def test_what_is_miscounted_is_noticed(tmp_path: Path, damage: Callable[[Desk], None]) -> None:
    @in_trio
    async def run() -> None:
        async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
            await d.save("k", b"data")
            damage(d)

    with pytest.raises(AssertionError):
        run()


# -- when it is tried again ---------------------------------------------------------------------------


@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_what_was_written_during_an_upload_follows_by_itself(tmp_path: Path, writeback: bool) -> None:
    """Closed while the earlier content was on its way: nothing else brings it to the store."""
    async with desk(tmp_path, writeback=writeback) as d:
        hold = d.store.hold("put")
        dirty_file = await d.create("k", b"first")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.commit, dirty_file)
            await d.quiet()
            if writeback:
                await trio.sleep(2)
            await hold.reached.wait()
            d.uploads.open(dirty_file)
            await add(dirty_file, b", second")
            if writeback:
                await d.uploads.commit(dirty_file)
            d.uploads.release(dirty_file)
            d.uploads.release(dirty_file)
            await d.quiet()
            hold.release.set()
        await trio.sleep(100)
        await d.quiet()
        assert d.store.content("k") == b"first, second"
        assert d.uploads.pending() == [] and await d.files() == []


@in_trio
async def test_waits_after_failures_double_from_half_a_second_to_a_minute(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        d.store.fail("put", lambda: OriginFailed("trouble"), times=1000)
        at: list[float] = []
        d.uploads._queue._metrics = _Noting(at)  # type: ignore[assignment]
        await d.save("k", b"data")
        await trio.sleep(1000)
        waits = [later - earlier for earlier, later in itertools.pairwise(at)]
        assert len(waits) > 12
        for number, wait in enumerate(waits):
            longest = min(60.0, 0.5 * 2**number)
            assert longest / 2 - 0.1 <= wait <= longest + 0.5, f"after {number + 1} failures: {wait} s"
        d.store.rules.clear()
        await trio.sleep(61)
        assert d.store.content("k") == b"data"


class _Noting:
    """Of the metrics, what a failure counts, and when."""

    def __init__(self, at: list[float]) -> None:
        self._at = at
        self.uploaded_files = 0
        self.ledger = Metrics().ledger

    @property
    def upload_failures(self) -> int:
        return len(self._at)

    @upload_failures.setter
    def upload_failures(self, count: int) -> None:
        assert count == len(self._at) + 1
        self._at.append(trio.current_time())

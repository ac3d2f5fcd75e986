"""Writeback: acknowledged on this disk, uploaded by itself, found again by the next run."""

from __future__ import annotations

import errno
import itertools
import math
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.behind import GATHER_S
from cachefs.base.errors import CacheUnusable, NoRoom, OriginFailed, PermissionDenied
from cachefs.upload import queue
from cachefs.upload.journal import Journal, Records
from cachefs.upload.uploads import TOGETHER_S
from tests.fetch.scripted import content
from tests.upload.scripted import MIB, PART, SOURCE, ScriptedStore, add, desk, in_trio


@in_trio
async def test_a_close_returns_before_the_store_hears_of_it(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        dirty_file = await d.save("k", b"data")
        assert d.store.counts == {} and dirty_file.acknowledged and dirty_file.dirty
        row = d.uploads.journal.rows("drafts")[dirty_file.id]
        assert (row["source"], row["key"], row["acknowledged"]) == (SOURCE, "k", True)
        await trio.sleep(2)
        await d.quiet()
        assert d.store.content("k") == b"data" and d.settled == ["k"] and await d.files() == []
        assert d.uploads.journal.rows("drafts") == {} and d.uploads.pending() == []


@pytest.mark.parametrize("small", [True, False])
@in_trio
async def test_an_acknowledged_file_is_on_the_disk_before_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """Or with it, in one transaction: then it costs the disk no sync besides."""
    done: list[str] = []

    def spy(module: object, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (done.append(name), real(*args))[1])

    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        if not small:
            d.uploads.journal._room = 0
        spy(os, "fdatasync")
        spy(os, "fsync")
        spy(d.uploads.journal._database, "write")
        dirty_file = await d.create("k", b"data")
        await d.uploads.commit(dirty_file)
        assert done == (["write"] if small else ["fdatasync", "fsync", "write"]), "bytes, name, row"
        done.clear()
        await d.uploads.commit(dirty_file)
        assert done == [], "nothing changed"
        await add(dirty_file, b"more")
        await d.uploads.commit(dirty_file)
        assert done == (["write"] if small else ["fdatasync"]), "the row says the same"
        monkeypatch.undo()


@in_trio
async def test_nothing_is_sent_before_the_delay_is_over(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=10) as d:
        dirty_file = await d.create("tmp", content(1, 30 * PART))
        await d.quiet()
        await d.close(dirty_file)
        await trio.sleep(5)
        assert d.store.counts == {}
        await d.uploads.rename(dirty_file, "final")
        await trio.sleep(10)
        await d.quiet()
        assert d.store.objects.keys() == {"final"}
        assert d.store.counts["copy"] == d.store.counts["delete"] == d.store.counts["abort"] == 0


@in_trio
async def test_an_upload_by_itself_is_one_task_and_wakes_nothing_before_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, plain = list[str](), queue.contained

    def counted(nursery: trio.Nursery, what: str, *work: Any) -> None:
        begun.extend([what] if what.startswith("the upload") else [])
        plain(nursery, what, *work)

    async with desk(tmp_path, writeback=True, upload_delay_s=60) as d:
        monkeypatch.setattr(queue, "contained", counted)
        await d.save("a", b"1")
        await d.quiet()
        waiting = d.uploads._queue._changed
        await trio.sleep(1)
        await d.save("b", b"2")
        assert not waiting.is_set(), "it waits for the first of them"
        await trio.sleep(59.5)
        assert list(d.store.objects) == ["a"]
        await trio.sleep(1)
        assert list(d.store.objects) == ["a", "b"] and begun == ["the upload of a", "the upload of b"]
        await d.save("c", b"3")
        d.uploads._queue.plan(await d.save("d", b"4"), 1)
        await trio.sleep(2)
        assert list(d.store.objects) == ["a", "b", "d"], "one that comes before all others does wake it"


@in_trio
async def test_what_is_being_written_again_is_not_uploaded_by_halves(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=10) as d:
        dirty_file = await d.save("k", b"first")
        await trio.sleep(5)
        d.uploads.open(dirty_file)
        await dirty_file.truncate(0)
        await add(dirty_file, b"sec")
        await trio.sleep(100)
        assert await d.uploads.flush() == []
        assert d.store.counts == {}
        await add(dirty_file, b"ond")
        await d.uploads.commit(dirty_file)
        await trio.sleep(11)
        assert d.store.content("k") == b"second", "synced is as good as closed"
        await add(dirty_file, b", third")
        await trio.sleep(100)
        assert d.store.content("k") == b"second"
        await d.close(dirty_file)
        await trio.sleep(11)
        await d.quiet()
        assert d.store.content("k") == b"second, third"


@in_trio
async def test_a_file_replaced_again_and_again_is_uploaded_once(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        for number in range(20):
            old = next(iter(d.uploads.pending()), None)
            dirty_file = await d.save("tmp", b"%d" % number)
            if old is not None:
                await d.uploads.discard(old, replaced=True)
            await d.uploads.rename(dirty_file, "final")
        await trio.sleep(5)
        await d.quiet()
        assert d.store.counts == {"put": 1} and d.store.content("final") == b"19"


@in_trio
async def test_a_file_that_stays_open_is_uploaded_from_time_to_time(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=10) as d:
        log = await d.create("log")
        for number in range(100):
            await add(log, b"%d\n" % number)
            await d.uploads.commit(log)
            await trio.sleep(1)
        assert 5 <= d.store.counts["put"] <= 10
        await d.close(log)
        await trio.sleep(20)
        await d.quiet()
        assert d.store.content("log") == b"".join(b"%d\n" % n for n in range(100))


@in_trio
async def test_who_overwrites_breaks_an_upload_off_that_nobody_waits_for(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        data = content(1, 300 * PART)
        dirty_file = await d.create("k", data)
        await d.uploads.commit(dirty_file)
        d.store.hold("part", times=16)
        await trio.sleep(3)
        await d.quiet()
        assert d.store.in_flight == 16
        await dirty_file.write(0, b"new")
        assert d.store.in_flight == 0 and dirty_file.attempt is None
        await d.uploads.commit(dirty_file)
        await trio.sleep(5)
        await d.quiet()
        assert d.store.content("k") == b"new" + data[3:] and d.store.seen["k"] == [b"new" + data[3:]]


@in_trio
async def test_who_overwrites_waits_for_an_upload_that_somebody_waits_for(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        data = content(1, 300 * PART)
        dirty_file = await d.create("k")
        await dirty_file.write(PART, data[PART:])
        await dirty_file.write(0, data[: PART - 1])
        await dirty_file.write(0, data[:PART])
        held = d.store.hold("part")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.commit, dirty_file)
            await held.reached.wait()
            nursery.start_soon(dirty_file.write, 0, b"new")
            await dirty_file_waits()
            assert dirty_file.content.generation == 3
            held.release.set()
        assert d.store.content("k") == data and dirty_file.dirty
        await d.close(dirty_file)
        assert d.store.seen["k"] == [data, b"new" + data[3:]]


@in_trio
async def test_who_appends_does_not_wait(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        data = content(1, 5 * PART)
        dirty_file = await d.create("k", data)
        held = d.store.hold("complete")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.commit, dirty_file)
            await held.reached.wait()
            await add(dirty_file, b"more")
            held.release.set()
        assert d.store.content("k") == data and dirty_file.dirty
        await d.close(dirty_file)
        assert d.store.seen["k"] == [data, data + b"more"]


async def dirty_file_waits() -> None:
    for _ in range(3):
        await trio.testing.wait_all_tasks_blocked(0.005)


@in_trio
async def test_a_failed_upload_is_told_once_by_the_next_commit(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        d.store.fail("put", lambda: PermissionDenied("403"), times=1)
        dirty_file = await d.create("k", b"data")
        await d.uploads.commit(dirty_file)
        await trio.sleep(5)
        with pytest.raises(PermissionDenied):
            await d.uploads.commit(dirty_file)
        await d.uploads.commit(dirty_file)
        await d.close(dirty_file)
        await trio.sleep(120)
        await d.quiet()
        assert d.store.content("k") == b"data"


@in_trio
async def test_flush(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        for number in range(40):
            await d.save(f"{number % 2}/{number}", b"%d" % number)
        being_written = await d.create("0/open", b"...")
        assert await d.uploads.flush(lambda dirty_file: dirty_file.key.startswith("0/")) == []
        assert len(d.store.objects) == 20 and len(d.uploads.pending()) == 21
        d.store.fail("put", lambda: OriginFailed("no"), times=10_000)
        left = await d.uploads.flush()
        assert len(left) == 20 and d.store.counts["put"] == 40
        before = trio.current_time()
        assert await d.uploads.flush(deadline_s=30) == left
        assert trio.current_time() == before + 30 and 100 <= d.store.counts["put"] <= 300
        d.store.rules[0].times = 20
        assert await d.uploads.flush(deadline_s=300) == []
        assert len(d.store.objects) == 40 and d.uploads.pending() == [being_written]


# -- the next run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 10, 20 * PART])
@in_trio
async def test_what_was_acknowledged_is_found_again(tmp_path: Path, size: int) -> None:
    store, data = ScriptedStore(), content(1, size)
    async with desk(tmp_path, store, writeback=True) as d:
        dirty_file = await d.save("k", data, attrs={"mode": 0o600}, mtime_ns=5)
        await d.create("open", b"never acknowledged")
        moved = await d.save("from", b"x")
        await d.uploads.rename(moved, "to")
        gone = await d.save("gone", b"x")
        await d.uploads.discard(gone)
    async with desk(tmp_path, store, recover=False, writeback=True) as d:
        found = {f.key: f for f in await d.uploads.recover()}
        assert found.keys() == {"k", "to"} and len(await d.files()) == 2 and d.uploads.pending()
        again = found["k"]
        assert (again.id, again.size, again.attrs) == (dirty_file.id, size, {"mode": 0o600}) and again.dirty
        d.uploads.open(again)
        assert bytes(await again.read(0, size)) == data
        await add(again, b"!")
        await d.close(again)
        assert await d.uploads.flush() == []
        assert store.content("k") == data + b"!" and store.objects.keys() == {"k", "to"}
    async with desk(tmp_path, store, writeback=True) as d:
        assert d.uploads.pending() == [] and await d.files() == []


@in_trio
async def test_what_is_found_again_is_uploaded_though_a_process_reads_it(tmp_path: Path) -> None:
    """It is whole, as it was acknowledged: no change of it is half made."""
    store = ScriptedStore()
    async with desk(tmp_path, store, writeback=True, upload_delay_s=10_000) as d:
        await d.save("k", b"data")
    async with desk(tmp_path, store, writeback=True, upload_delay_s=5) as d:
        (dirty_file,) = d.uploads.pending()
        d.uploads.open(dirty_file)
        assert not dirty_file.between
        await trio.sleep(6)
        await d.quiet()
        assert store.content("k") == b"data" and not dirty_file.dirty
        d.uploads.release(dirty_file)
        await d.quiet()
        assert d.settled == ["k"]


@in_trio
async def test_an_upload_in_parts_goes_on_with_what_the_store_has(tmp_path: Path) -> None:
    store, data = ScriptedStore(), bytearray(content(1, 300 * PART))
    async with desk(tmp_path, store, writeback=True) as d:
        dirty_file = await d.save("k", bytes(data))
        store.latency_s = 0.1
        held = store.hold("complete")
        await held.reached.wait()
        file = dirty_file.file.path
    store.latency_s = 0
    sent = store.counts["part"]
    assert sent > 20
    with open(file, "r+b") as changed:  # noqa: ASYNC230 - as if it had been written and not committed
        changed.write(b"new")
    data[:3] = b"new"
    async with desk(tmp_path, store, writeback=True) as d:
        await trio.sleep(5)
        await d.quiet()
        assert store.content("k") == data and store.counts["part"] == sent + 1
        assert store.counts["begin"] == 1 and store.uploads == {} and d.settled == ["k"]


@in_trio
async def test_an_upload_that_the_store_has_forgotten_is_begun_anew(tmp_path: Path) -> None:
    store, data = ScriptedStore(), content(1, 300 * PART)
    async with desk(tmp_path, store, writeback=True) as d:
        await d.save("k", data)
        held = store.hold("part", times=20)
        await held.reached.wait()
    store.uploads.clear()
    store.rules.clear()
    async with desk(tmp_path, store, writeback=True) as d:
        await trio.sleep(5)
        await d.quiet()
        assert store.content("k") == data and store.counts["begin"] == 2


@in_trio
async def test_a_durable_upload_that_was_cut_off_is_aborted(tmp_path: Path) -> None:
    store = ScriptedStore()
    async with desk(tmp_path, store) as d:
        await d.create("k", content(1, 5 * PART))
        await d.quiet()
        assert store.counts["part"] == 4
    assert len(store.uploads) == 1
    async with desk(tmp_path, store) as d:
        await trio.sleep(5)
        await d.quiet()
        assert store.uploads == {} and store.objects == {} and await d.files() == []
        assert d.uploads.journal.rows("drafts") == d.uploads.journal.rows("orphans") == {}


@in_trio
async def test_a_durable_upload_that_failed_is_kept_over_a_crash(tmp_path: Path) -> None:
    store = ScriptedStore()
    async with desk(tmp_path, store) as d:
        store.fail("put", lambda: OriginFailed("down"), times=3)
        with pytest.raises(OriginFailed):
            await d.save("k", b"data")
    store.rules.clear()
    async with desk(tmp_path, store) as d:
        assert [dirty_file.key for dirty_file in d.uploads.pending()] == ["k"]
        await trio.sleep(5)
        await d.quiet()
        assert store.content("k") == b"data"


@in_trio
async def test_a_store_that_is_not_mounted_keeps_its_dirty_files_for_later(tmp_path: Path) -> None:
    store, other = ScriptedStore(), ScriptedStore(source="scripted://other")
    async with desk(tmp_path, store, writeback=True) as d:
        await d.save("k", b"data")
    async with desk(tmp_path, other, writeback=True) as d:
        assert d.uploads.pending() == [] and len(await d.files()) == 1
        await trio.sleep(10)
    async with desk(tmp_path, store, writeback=True) as d:
        assert await d.uploads.flush() == []
    assert store.content("k") == b"data" and other.counts == {}


@in_trio
async def test_a_staging_file_that_somebody_removed_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk(tmp_path, writeback=True) as d:
        d.uploads.journal._room = 0  # of its content
        dirty_file = await d.save("k", b"data")
        dirty_file.file.path.unlink()
    async with desk(tmp_path, d.store, writeback=True) as d:
        assert d.uploads.pending() == []
    assert "was removed" in caplog.text
    async with desk(tmp_path, d.store, writeback=True) as d:
        assert d.uploads.journal.rows("drafts") == {}


@in_trio
async def test_a_stop_waits_until_its_deadline_and_leaves_the_rest_to_the_next_run(tmp_path: Path) -> None:
    store = ScriptedStore()
    async with desk(tmp_path, store, writeback=True, upload_delay_s=1000) as d:
        await d.save("good", b"1")
        await d.save("bad", content(1, 300 * PART))
        await d.create("open", b"3")
        shown = await d.save("shown", b"4")
        d.uploads.open(shown)
        held = store.hold("part", times=50)
        before = trio.current_time()
        left = await d.uploads.aclose(10)
        assert held.reached.is_set() and 10 <= trio.current_time() - before <= 14
        assert [dirty_file.key for dirty_file in left] == ["bad"] and store.objects.keys() == {
            "good",
            "shown",
        }
        assert len(await d.files()) == 1
    store.rules.clear()
    async with desk(tmp_path, store, writeback=True) as d:
        assert [dirty_file.key for dirty_file in d.uploads.pending()] == ["bad"]
        assert await d.uploads.flush() == [] and store.counts["begin"] == 1


@in_trio
async def test_what_a_stop_leaves_behind_is_promised_to_the_next_run_in_every_mode(tmp_path: Path) -> None:
    """Its close has not returned: until then no row says that there is something to send."""
    store = ScriptedStore()
    async with desk(tmp_path, store) as d:
        held = store.hold("put", times=50)
        async with trio.open_nursery() as writer:
            writer.start_soon(d.save, "k", b"data")
            await held.reached.wait()
            writer.cancel_scope.cancel()  # its program is killed
        assert [dirty_file.key for dirty_file in await d.uploads.aclose(1)] == ["k"]
    store.rules.clear()
    async with desk(tmp_path, store) as d:
        assert [dirty_file.key for dirty_file in d.uploads.pending()] == ["k"]
        assert await d.uploads.flush() == [] and store.content("k") == b"data"


@in_trio
async def test_a_stop_works_when_the_tasks_have_been_cancelled(tmp_path: Path) -> None:
    store = ScriptedStore()
    async with desk(tmp_path, store, writeback=True) as d, trio.open_nursery() as inner:
        d.uploads._queue.nursery = inner
        held = store.hold("put")
        await d.save("k", b"data")
        await held.reached.wait()
        inner.cancel_scope.cancel()
        assert await d.uploads.aclose(10) == []
    assert store.content("k") == b"data" and await d.files() == []


@in_trio
async def test_a_file_that_is_still_shown_at_a_stop_is_not_looked_at_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk(tmp_path) as d:
        shown = True
        d.uploads.on_settling = lambda _: not shown
        dirty_file = await d.save("k", b"data")
        await trio.sleep(2 * TOGETHER_S)  # the file is looked at every LOOK_S now
        assert await d.uploads.aclose(0.0) == []
        await trio.sleep(10)
        shown = False
        await d.uploads._settle(dirty_file)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("size", [100, 2 * MIB])
@in_trio
async def test_a_stop_right_after_an_upload_removes_its_row(tmp_path: Path, size: int) -> None:
    """The row goes a moment after the origin has the file. The next start would send it once more, over what another
    client has put there meanwhile, or miss its staging file."""
    store = ScriptedStore()
    async with desk(tmp_path, store, writeback=True, upload_delay_s=1) as d:
        committed = trio.Event()
        d.uploads.on_committed = lambda *_: committed.set()
        await d.save("k", b"1" * size)
        await committed.wait()
        assert await d.uploads.aclose(0.0) == []
        assert await d.files() == []
    await store.delete("k")
    async with desk(tmp_path, store, writeback=True, recover=False) as d:
        assert d.uploads.journal.rows("drafts") == {}
        await d.uploads.recover()
        assert d.uploads.pending() == [] and store.objects == {}


# -- the journal -----------------------------------------------------------------------------------


def test_rows_round_trip(tmp_path: Path) -> None:
    async def use() -> None:
        journal = Journal(tmp_path / "journal")
        rows = {f"id{n}": {"key": "k\ud800\x00ö", "n": n, "upload": {"parts": {}}} for n in range(50)}
        async with trio.open_nursery() as nursery:
            for name, row in rows.items():
                nursery.start_soon(journal.write, "drafts", name, row)
        await journal.write("notes", "n", {"rename": ["a", "b"]})
        await journal.write("drafts", "id7", None)
        del rows["id7"]
        assert journal.rows("drafts") == rows and journal.rows("notes") == {"n": {"rename": ["a", "b"]}}
        journal.close()
        again = Journal(tmp_path / "journal")
        assert again.rows("drafts") == rows
        again.close()

    trio.run(use)


def test_rows_that_wait_are_written_before_a_close(tmp_path: Path) -> None:
    async def use() -> None:
        journal = Journal(tmp_path / "journal")
        await journal.write("drafts", "a", {"key": "k"})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(journal.write, "drafts", "a", None, patient=True))
            await trio.testing.wait_all_tasks_blocked()
            await journal.quiet()
            journal.close()
        again = Journal(tmp_path / "journal")
        assert again.rows("drafts") == {}
        again.close()

    trio.run(use)


def test_rows_written_at_once_share_a_transaction(tmp_path: Path) -> None:
    async def use() -> None:
        journal = Journal(tmp_path / "journal")
        calls = itertools.count()
        write = journal._database.write
        journal._database.write = lambda puts: (next(calls), write(puts))[1]  # type: ignore[assignment]
        async with trio.open_nursery() as nursery:
            for n in range(100):
                nursery.start_soon(journal.write, "drafts", str(n), {})
        assert next(calls) <= 3 and len(journal.rows("drafts")) == 100
        journal._database.write = lambda puts: (_ for _ in ()).throw(NoRoom(os.strerror(errno.ENOSPC)))  # type: ignore[assignment]
        with pytest.raises(NoRoom):
            await journal.write("drafts", "x", {})
        journal.close()

    trio.run(use)


@pytest.mark.parametrize("cancelled", [False, True])
@in_trio
async def test_a_writer_alone_waits_for_the_disk_without_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """The rows that come meanwhile go in the next transaction, also when the first writer is cancelled."""
    journal, tasks = Journal(tmp_path / "journal"), list[object]()
    spawn = trio.lowlevel.spawn_system_task
    monkeypatch.setattr(
        trio.lowlevel, "spawn_system_task", lambda *a, **k: (tasks.append(a[0]), spawn(*a, **k))[1]
    )
    for number in range(3):
        await journal.write("drafts", str(number), {})
    assert tasks == []
    transactions, write, go_on = list[int](), journal._database.write, threading.Event()
    journal._database.write = lambda puts: (  # type: ignore[assignment]
        transactions.append(len(puts)),
        go_on.wait(30),
        write(puts),
    )[2]
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(_write_in, scope, journal, "a")
            while journal._since == math.inf:
                await trio.lowlevel.checkpoint()
            for key in "bcd":
                nursery.start_soon(journal.write, "drafts", key, {})
            await trio.lowlevel.checkpoint()
            if cancelled:
                scope.cancel()
            go_on.set()
    assert transactions == [1, 3] and len(tasks) == 1
    assert sorted(journal.rows("drafts")) == ["0", "1", "2", "a", "b", "c", "d"]
    journal.close()


async def _write_in(scope: trio.CancelScope, journal: Journal, key: str) -> None:
    with scope:
        await journal.write("drafts", key, {})


@in_trio
async def test_a_row_that_no_caller_waits_for_goes_along_with_the_next(tmp_path: Path) -> None:
    journal, transactions = Journal(tmp_path / "journal"), list[int]()
    write = journal._database.write
    journal._database.write = lambda puts: (transactions.append(len(puts)), write(puts))[1]  # type: ignore[assignment]
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(journal.write, "drafts", "0", {}, patient=True))
            while not journal._next.rows:
                await trio.lowlevel.checkpoint()
            await journal.write("drafts", "1", {})
            assert transactions == [2]
        began = trio.current_time()
        await journal.write("drafts", "0", None, patient=True)
        assert transactions == [2, 1] and trio.current_time() >= began + GATHER_S
        began = trio.current_time()
        await journal.write("drafts", "1", None)
        assert transactions == [2, 1, 1] and trio.current_time() == began, "it waits for the disk alone"
    finally:
        journal.close()


@pytest.mark.parametrize("pause_s", [0.0, 0.015])
@in_trio
async def test_an_upload_in_the_background_shares_its_transaction_with_the_next_save(
    tmp_path: Path, pause_s: float
) -> None:
    """Of files that are saved one after another, up to 60 a second, each costs the disk one transaction and not two."""
    async with desk(tmp_path, writeback=True, upload_delay_s=0.0) as d:
        transactions = list[int]()
        write = d.uploads.journal._database.write
        d.uploads.journal._database.write = lambda puts: (  # type: ignore[assignment]
            transactions.append(len(puts)),
            write(puts),
        )[1]
        for number in range(4):
            dirty_file = await d.create(str(number), b"1")
            await d.uploads.commit(dirty_file)
            d.uploads.release(dirty_file)
            while d.metrics.uploaded_files <= number:
                await trio.lowlevel.checkpoint()
            await trio.sleep(pause_s)
        await trio.sleep(1)
        assert transactions == [2, 4, 4, 4, 2] and await d.files() == [], "each time a row and a content"


@in_trio
async def test_a_removal_that_finds_its_upload_at_the_end_takes_no_longer_than_one_at_the_origin(
    tmp_path: Path,
) -> None:
    """A DELETE takes about 30 ms. The removal waits for the row of the upload, which no caller waited for before."""
    async with desk(tmp_path, writeback=True, upload_delay_s=0.0) as d:
        dirty_file = await d.save("k", b"1")
        while not d.metrics.uploaded_files:
            await trio.lowlevel.checkpoint()
        assert dirty_file.attempt is not None, "its row waits"
        began = trio.current_time()
        await d.uploads.discard(dirty_file)
        assert began < trio.current_time() <= began + 0.03
        await d.quiet()


@pytest.mark.parametrize("how", ["cut", "zeros", "version", "changed"])
def test_a_damaged_journal_is_refused_and_left_as_it_is(tmp_path: Path, how: str) -> None:
    path = tmp_path / "journal"

    async def fill() -> None:
        journal = Journal(path)
        for n in range(200):
            await journal.write("drafts", str(n), {"n": n})
        if how == "changed":
            journal.close()
        else:
            journal._database.close(clean=False)

    trio.run(fill)
    data = path / "data.mdb"
    whole = data.read_bytes()
    if how == "cut":
        data.write_bytes(whole[: len(whole) // 2])
    elif how == "version":
        (path / "version").write_text("journal-99\nopen BOOT\n")
    elif how == "zeros":
        data.write_bytes(bytes(len(whole)))
    else:
        data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    before = data.read_bytes()
    for _ in range(2):
        with pytest.raises(CacheUnusable, match=str(path)):
            Journal(path)
    assert data.read_bytes() == before


@pytest.mark.parametrize("how", ["no JSON", "no text"])
def test_a_damaged_row_is_no_row_that_is_left_out(tmp_path: Path, how: str) -> None:
    """LMDB has no checksums, so it reads a row of which a sector was lost."""
    path = tmp_path / "journal"

    async def fill() -> None:
        journal = Journal(path)
        for n in range(3):
            await journal.write("drafts", str(n), {"name": f"file {n}"})
        journal._database.close(clean=False)

    trio.run(fill)
    data = path / "data.mdb"
    whole = data.read_bytes()
    assert b'{"name": "file 1"}' in whole
    data.write_bytes(whole.replace(b'"file 1"', bytes(8) if how == "no JSON" else b"\xff" * 8))
    for _ in range(2):
        with pytest.raises(CacheUnusable, match=f"{path}.*a row is damaged.*cachefs recover {tmp_path} "):
            Journal(path)
    assert b'"file 2"' in data.read_bytes()


def test_a_journal_after_a_kill_is_read(tmp_path: Path) -> None:
    async def fill() -> None:
        journal = Journal(tmp_path / "journal")
        await journal.write("drafts", "a", {"n": 1})
        journal._database.close(clean=False)

    trio.run(fill)
    again = Journal(tmp_path / "journal")
    assert again.rows("drafts") == {"a": {"n": 1}}
    again.close()


@pytest.mark.parametrize("left", ["fresh", "version"])
def test_a_kill_while_the_journal_is_made_is_no_damage(tmp_path: Path, left: str) -> None:
    path = tmp_path / "journal"
    Journal(path).close()
    (path / "fresh").mkdir()
    (path / "data.mdb").rename(path / "fresh" / "data.mdb")
    if left == "fresh":
        (path / "version").unlink()
    journal = Journal(path)
    assert journal.rows("drafts") == {}
    journal.close()


@pytest.mark.parametrize("order", [1, -1])
def test_a_dirty_file_belongs_to_the_innermost_prefix_that_is_mounted(order: int) -> None:
    stores = [ScriptedStore(), ScriptedStore(), ScriptedStore(source="s3://other")]
    stores[1].prefix = stores[2].prefix = "a/b/"
    records = Records(None, stores[::order])  # type: ignore[arg-type]
    for key, store in (("a/b/f", stores[1]), ("a/f", stores[0]), ("a/bf", stores[0])):
        assert records.origin(SOURCE, key) is store  # type: ignore[comparison-overlap]
    assert records.origin("s3://other", "a/f") is None

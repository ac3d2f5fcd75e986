"""Rows that are written behind: what is read is what was written, whatever the disk does meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.base import behind
from cachefs.base.behind import WriteBehind
from cachefs.base.database import Database
from cachefs.base.errors import CacheUnusable, NoRoom

TABLES = ("a", "b")


class Disk:
    """Holds up each commit until `frozen` is over, and fails those that it is told to."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.failures: list[Exception] = []
        self.commits = 0
        self.committed = threading.Event()
        self.database = Database(path, TABLES, version="v1", fsync=False)
        write = self.database.write

        def slow(*rows: Any) -> None:
            assert self.answers.wait(30)
            if self.failures:
                raise self.failures.pop()
            self.commits += 1
            write(*rows)
            self.committed.set()

        monkeypatch.setattr(self.database, "write", slow)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path / "db", monkeypatch)
    yield disk
    disk.answers.set()
    disk.database.close()


def again(path: Path) -> Database:
    return Database(path, TABLES, version="v1", fsync=False)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_is_what_was_written(disk: Disk, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are in the database, on their way there, or wait; a dictionary says what they are."""
    rng = random.Random(seed)
    monkeypatch.setattr(behind, "GATHER_S", 0.0)
    rows, model = WriteBehind(disk.database), {table: dict[bytes, bytes]() for table in TABLES}

    def key() -> bytes:
        return bytes(rng.choices(b"\0\1mz\xff", k=rng.randrange(1, 4)))

    for step in range(300):
        if rng.random() < 0.05:
            disk.answers.clear() if rng.random() < 0.5 else disk.answers.set()
        if rng.random() < 0.5:
            ranges = []
            if rng.random() < 0.2:
                table, (start, stop) = rng.choice(TABLES), sorted((key(), key()))
                ranges.append((table, start, stop))
                model[table] = {k: v for k, v in model[table].items() if not start <= k < stop}
            puts: list[Any] = []
            for _ in range(rng.randrange(4)):
                table, name = rng.choice(TABLES), key()
                value = None if rng.random() < 0.3 else b"%d" % step
                puts.append((table, name, value))
                if value is None:
                    model[table].pop(name, None)
                else:
                    model[table][name] = value
            rows.write(puts, ranges, soon=rng.random() < 0.2)
        table = rng.choice(TABLES)
        known, keys = model[table], [key() for _ in range(3)]
        assert rows.get(table, keys[0]) == known.get(keys[0])
        assert rows.get_many(table, keys) == [known.get(k) for k in keys]
        start, stop = rng.choice([b"", key()]), rng.choice([None, key()])
        limit = rng.choice([None, 1, 2, 5])
        wanted = sorted((k, v) for k, v in known.items() if k >= start and (stop is None or k < stop))
        assert rows.scan(table, start, stop, limit) == (wanted if limit is None else wanted[:limit])
    disk.answers.set()
    rows.close()
    with_all = again(disk.database.path)
    assert with_all.was_clean
    assert {table: dict(with_all.scan(table)) for table in TABLES} == model
    with_all.close()


def test_rows_that_replace_each_other_cost_one_commit(disk: Disk) -> None:
    rows = WriteBehind(disk.database)
    for number in range(100):
        rows.write([("a", b"k", b"%d" % number)])
    rows.flush()
    assert disk.commits <= 2 and disk.database.get("a", b"k") == b"99"
    rows.close()


def test_rows_that_belong_together_outlive_a_kill_together(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in the database and in the memory that outlives this process."""
    monkeypatch.setattr(behind, "GATHER_S", 0.0)
    groups = list[list[bytes]]()
    log: Any = SimpleNamespace(
        found=dict, clear=lambda: None, append=lambda rows: groups.append([key[1:] for key in rows])
    )
    log.swap = log.committed = log.clear
    rows = WriteBehind(disk.database, log)
    with rows.together():
        rows.write([("a", b"1", b"x")], soon=True)
        assert not disk.committed.wait(0.01) and rows.get("a", b"1") == b"x"
        rows.write([("b", b"2", b"y")])
        assert groups == []
    rows.flush()
    assert disk.commits == 1 and groups == [[b"1", b"2"]]
    rows.write([("a", b"3", b"z")])
    assert groups[1:] == [[b"3"]]
    rows.close()


def test_rows_are_gathered_until_a_caller_waits(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """So rows that replace each other while no caller waits cost one commit."""
    monkeypatch.setattr(behind, "GATHER_S", 3600.0)
    rows = WriteBehind(disk.database)
    wait_for, gathering = rows._changed.wait_for, threading.Event()

    def watched(predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        if timeout == behind.GATHER_S:
            gathering.set()
        return wait_for(predicate, timeout)

    monkeypatch.setattr(rows._changed, "wait_for", watched)
    rows.write([("a", b"k", b"first")])
    rows.flush()  # the thread waits by `watched` from now on
    rows.write([("a", b"k", b"second")])
    assert gathering.wait(30), "the thread does not gather"
    gathering.clear()
    for number in range(100):
        rows.write([("a", b"k", b"%d" % number)])
    rows.flush()
    assert disk.commits == 2 and disk.database.get("a", b"k") == b"99"
    rows.close()


def test_as_many_rows_as_are_wanted_or_one_less_wait(disk: Disk) -> None:
    rows = WriteBehind(disk.database)
    rows.write([("a", b"b1", b""), ("a", b"b3", b"")])
    rows.flush()
    disk.answers.clear()
    rows.write([("a", b"b0", b""), ("a", b"b2", b""), ("a", b"b4", b"")])
    words = [b"b0", b"b1", b"b2", b"b3", b"b4"]
    for limit in range(1, 6):
        assert [key for key, _ in rows.scan("a", limit=limit)] == words[:limit]
        assert [key for key, _ in rows.scan("a", b"b2", limit=limit)] == words[2 : 2 + limit]
    disk.answers.set()
    rows.close()


def test_after_a_caller_that_hurried_rows_are_gathered_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind, "GATHER_S", 3600.0)
    rows = WriteBehind(disk.database)
    for number in range(3):
        rows.write([("a", b"k", b"%d" % number)])
        rows.flush()
        assert disk.commits == number + 1 and not rows._hurry and not rows._callers and not rows.waiting_rows
    rows.close()


def test_rows_are_written_where_no_thread_can_be_started_any_more(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another row, and without a caller."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    rows = WriteBehind(disk.database)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for number in range(1, 3):
        disk.committed.clear()
        rows.write([("a", b"k", b"%d" % number)])
        assert disk.committed.wait(10), "nothing was written"
        assert disk.commits == number
    rows.close()


def test_a_database_without_its_thread_is_not_opened(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is free again."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CacheUnusable, match="no thread can be started"):
            WriteBehind(disk.database)
    again(disk.database.path).close()


def test_the_thread_ends_with_the_database(disk: Disk) -> None:
    before = set(threading.enumerate())
    rows = WriteBehind(disk.database)
    rows.write([("a", b"k", b"v")])
    [thread] = set(threading.enumerate()) - before
    rows.close()
    thread.join(10)
    assert not thread.is_alive() and disk.commits == 1
    rows.close()
    rows.write([("a", b"k", b"late")])
    with pytest.raises(CacheUnusable, match="closed"):
        trio.run(rows.written)


async def _written(rows: WriteBehind, within_s: float) -> str:
    try:
        await rows.written(within_s)
    except CacheUnusable as exc:
        return str(exc)
    return ""


def test_who_has_to_know_waits_for_the_commit_so_long(disk: Disk) -> None:
    rows = WriteBehind(disk.database)
    disk.answers.clear()

    async def main() -> None:
        await rows.written()  # there is nothing
        rows.write([("a", b"k", b"v")], soon=True)
        assert "does not answer" in await _written(rows, 0.1)
        assert rows.get("a", b"k") == b"v" and disk.database.get("a", b"k") is None
        began = trio.current_time()
        assert "does not answer" in await _written(rows, 0.1), "the next one does not wait as long again"
        assert trio.current_time() - began < 0.05
        disk.answers.set()
        await rows.written()
        assert disk.database.get("a", b"k") == b"v" and not rows.waiting_rows

    trio.run(main)
    rows.close()


def test_a_commit_that_fails_is_said_and_tried_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        while not rows._callers:
            time.sleep(0.001)

    monkeypatch.setattr(behind, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    rows = WriteBehind(disk.database)
    disk.failures = [NoRoom("full"), NoRoom("full")]

    async def main() -> None:
        rows.write([("a", b"k", b"v"), ("b", b"k", b"v")])
        with pytest.raises(NoRoom):
            await rows.written()
        rows.write([("a", b"k", b"newer")])
        with pytest.raises(NoRoom):
            await rows.written()
        await rows.written()

    trio.run(main)
    assert (disk.database.get("a", b"k"), disk.database.get("b", b"k")) == (b"newer", b"v")
    assert caplog.text.count("full; trying again") == 1
    rows.close()
    assert waits == [behind.LOOK_EVERY_S] * 2


def test_a_database_that_lacks_rows_is_not_closed_as_clean(disk: Disk) -> None:
    rows = WriteBehind(disk.database)
    rows.write([("a", b"k", b"v")])
    rows.flush()
    disk.failures = [NoRoom("full")]
    rows.write([("a", b"k", b"newer")])
    rows.close()
    left = again(disk.database.path)
    assert not left.was_clean and left.get("a", b"k") == b"v"
    left.close()


def test_who_writes_much_waits_and_a_disk_that_hangs_is_not_waited_for_until_memory_is_full(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind, "MANY_ROWS", 10)
    monkeypatch.setattr(behind, "MOST_ROWS", 20)
    monkeypatch.setattr(behind, "PATIENCE_S", 0.05)
    rows = WriteBehind(disk.database)

    async def main() -> None:
        rows.write([("a", b"%d" % number, b"") for number in range(11)])
        assert rows.crowded
        await rows.uncrowded()
        assert not rows.crowded
        disk.answers.clear()
        rows.write([("b", b"%d" % number, b"") for number in range(20)])
        with trio.fail_after(5):
            await rows.uncrowded()
        assert rows.crowded
        rows.write([("b", b"one more", b"")])
        with trio.move_on_after(0.3) as given_up:
            await rows.uncrowded()
        assert given_up.cancelled_caught
        disk.answers.set()
        await rows.uncrowded()
        assert not rows.crowded

    trio.run(main)
    rows.close()

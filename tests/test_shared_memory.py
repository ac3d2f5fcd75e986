"""Memory that outlives the process: what was torn is never read, and what was published always is."""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cachefs.base import shared_memory
from cachefs.base.behind import WriteBehind, _Rows
from cachefs.base.database import Database
from cachefs.base.errors import NoRoom
from cachefs.base.shared_memory import MOST_TAILS, TAIL_BYTES, SharedMemory, Tails

A, B, C = "a" * 32, "b" * 32, "c" * 32


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def again(fd: int) -> SharedMemory:
    """As the next process sees it."""
    return SharedMemory(fd, mmap.PAGESIZE)


# -- killed at each store ------------------------------------------------------------------------------


class Killed(BaseException):
    """Here the process ends."""


class Torn:
    """Memory whose owner is killed at the store behind the first `left` ones."""

    def __init__(self, memory: mmap.mmap, left: int) -> None:
        self.memory, self.left = memory, left

    def __getitem__(self, where: Any) -> Any:
        return self.memory[where]

    def __setitem__(self, where: slice, data: bytes) -> None:
        self.store()
        self.memory[where] = data

    def store(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


class Word:
    """A struct that counts as one store."""

    def __init__(self, real: Any) -> None:
        self.real, self.size, self.pack = real, real.size, real.pack

    def unpack_from(self, memory: Any, at: int) -> Any:
        return self.real.unpack_from(getattr(memory, "memory", memory), at)

    def pack_into(self, memory: Any, at: int, *values: Any) -> None:
        if isinstance(memory, Torn):
            memory.store()
        self.real.pack_into(getattr(memory, "memory", memory), at, *values)


def killed_at_each_store(
    monkeypatch: pytest.MonkeyPatch,
    table: Callable[[SharedMemory], Any],
    before: Callable[[Any], Any],
    change: Callable[[Any], object],
    found: Callable[[SharedMemory], Any],
) -> list[Any]:
    """What the next process finds if the one that makes the change is killed before the first store, behind it, and so on up
    to the end. `before` returns what is changed."""
    for name in ("_HALF", "_ROW", "_RECORD", "_TAIL", "_WORD", "_SIGNED"):
        monkeypatch.setattr(shared_memory, name, Word(getattr(shared_memory, name)))
    seen = []
    for stores in range(100):
        memory = os.memfd_create("test")
        try:
            changed = before(table(again(memory)))
            torn = changed._memory = Torn(changed._memory, stores)
            with suppress(Killed):
                change(changed)
            seen.append(found(again(memory)))
        finally:
            os.close(memory)
        if torn.left >= 0:
            return seen
    raise AssertionError("it never ends")


# -- records ---------------------------------------------------------------------------------------------


def test_records_come_back_as_they_were(fd: int) -> None:
    records = again(fd).records
    assert records.found() == {}
    for name in (A, B, C):
        assert records.put(name, 5, {"key": f"\udcff{name}"})
    records.touch(A, -7)
    records.put(B, 6, {"key": "new"})
    records.drop(C)
    second = again(fd).records
    assert second.found() == {A: (-7, {"key": f"\udcff{A}"}), B: (6, {"key": "new"})}
    second.put(C, 1, {})
    second.drop(A)
    assert again(fd).records.found() == {B: (6, {"key": "new"}), C: (1, {})}


def test_a_record_is_the_old_one_or_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(records: Any) -> Any:
        records.put(A, 1, {"n": 1})
        return records

    def change(records: Any) -> None:
        records.put(A, 2, {"n": 2})
        records.drop(A)

    seen = killed_at_each_store(
        monkeypatch, lambda m: m.records, before, change, lambda m: m.records.found().get(A, (3, {"n": 3}))
    )
    assert seen == sorted(seen, key=lambda row: row[0])
    assert [row for row, more in zip(seen, [*seen[1:], None], strict=True) if row != more] == [
        (n, {"n": n}) for n in (1, 2, 3)
    ]


def test_what_is_too_long_or_too_many_has_no_record(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MOST_RECORDS", 2)
    records = again(fd).records
    assert records.put(A, 1, {})
    assert not records.put(A, 1, {"key": "k" * shared_memory.RECORD_BYTES})
    assert again(fd).records.found() == {}
    assert [records.put(name, 1, {}) for name in (A, B, C)] == [True, True, False]
    assert set(again(fd).records.found()) == {A, B}


# -- the ends of files -----------------------------------------------------------------------------------


def test_tails_come_back_as_they_were(fd: int) -> None:
    tails = again(fd).tails
    tail, other = tails.make(A, 100), tails.make(B, 0)
    assert tail is not None and other is not None
    tail.extend(bytes(10))
    tail[2:5] = b"abc"
    other.extend(b"x" * TAIL_BYTES)
    assert bytes(tail) == b"\0\0abc\0\0\0\0\0" == bytes(tail.view())
    del tail[4:]
    second = again(fd).tails
    assert {one.name: (one.start, bytes(one)) for one in second.found()} == {
        A: (100, b"\0\0ab"),
        B: (0, b"x" * TAIL_BYTES),
    }
    third = second.make(C, 7)
    assert third is not None and len(third) == 0
    assert {one.name for one in again(fd).tails.found()} == {A, B, C}


def test_tails_have_a_bound_and_give_their_memory_back(fd: int) -> None:
    tails = again(fd).tails
    made = [tails.make(A, 0) for _ in range(MOST_TAILS)]
    assert None not in made and tails.make(A, 0) is None
    for tail in made[:200]:
        assert tail is not None
        tail.extend(b"x" * TAIL_BYTES)
        tail.release()
    assert tails.make(A, 0) is not None
    assert os.fstat(fd).st_blocks * 512 < shared_memory.MEMORY_KEPT + (1 << 20)


class Memory(mmap.mmap):
    """Counts how often a part of it is given back to the machine."""

    given_back = 0

    def madvise(self, *how: Any) -> None:
        self.given_back += 1
        super().madvise(*how)


def test_files_that_are_written_one_after_another_use_the_same_memory(fd: int) -> None:
    """Memory that is given back has to be cleared by the kernel before its next use, page by page."""
    again(fd)
    memory = Memory(fd, shared_memory.LENGTH, offset=mmap.PAGESIZE)
    tails = Tails(memory)
    for number in range(100):
        tail = tails.make(A, 0)
        assert tail is not None
        tail[0:100_000] = bytes([number]) * 100_000
        assert bytes(tail) == bytes([number]) * 100_000
        tail.release()
    assert memory.given_back == 0 and os.fstat(fd).st_blocks * 512 < 200_000
    made = [tails.make(A, 0) for _ in range(20)]
    for tail in made:
        assert tail is not None and bytes(tail) == b""
        tail.extend(b"x" * TAIL_BYTES)
    for tail in made:
        assert tail is not None
        tail.release()
    assert memory.given_back == 20 - shared_memory.MEMORY_KEPT // TAIL_BYTES
    assert os.fstat(fd).st_blocks * 512 < shared_memory.MEMORY_KEPT + (64 << 10)


def test_what_is_written_behind_the_end_of_a_tail_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not made longer with zeros first; and the bytes are there before the length says so."""

    def before(tails: Any) -> Any:
        tail = tails.make(A, 0)
        tail.extend(b"old")
        return tail

    def change(tail: Any) -> None:
        tail[2:6] = b"dnew"

    seen = killed_at_each_store(
        monkeypatch, lambda m: m.tails, before, change, lambda m: [bytes(one) for one in m.tails.found()]
    )
    assert seen == [[b"old"], [b"old"], [b"oldnew"]], "two stores: the bytes, and then the length"


def test_a_tail_is_as_long_as_was_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(tails: Any) -> Any:
        tail = tails.make(A, 0)
        tail.extend(b"old")
        return tail

    seen = killed_at_each_store(
        monkeypatch,
        lambda m: m.tails,
        before,
        lambda tail: tail.extend(b"new"),
        lambda m: [bytes(one) for one in m.tails.found()],
    )
    assert [seen[0], seen[-1]] == [[b"old"], [b"oldnew"]]
    assert all(one in (seen[0], seen[-1]) for one in seen)


# -- rows that wait for their commit -------------------------------------------------------------------


def test_the_latest_times_are_found(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MOST_TIMES", 3)
    times = again(fd).times
    for ino, time_ns in ((1, 10), (2, 20), (3, 30), (1, 40), (4, 50)):
        times.put(ino, time_ns)
    later = again(fd).times
    assert [later.get(ino) for ino in range(1, 6)] == [40, None, 30, 50, None]
    later.put(3, 60)
    later.put(5, 70)
    later.drop(3)
    later.drop(9)
    last = again(fd).times
    assert [last.get(ino) for ino in (3, 5)] == [None, 70] and (last.get(1) is None) != (last.get(4) is None)
    last.put(3, 80)
    assert again(fd).times.get(3) == 80


def test_a_time_is_never_that_of_another_inode(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed at each store."""
    monkeypatch.setattr(shared_memory, "MOST_TIMES", 1)
    for left in range(4):
        times = again(fd).times
        times.put(1, 10)
        times._words = Words(times._words, left)  # type: ignore[assignment]
        with suppress(Killed):
            times.put(2, 20)
        found = again(fd).times
        assert (found.get(1), found.get(2)) in ((10, None), (None, None), (None, 20))
        os.pwrite(fd, bytes(16), mmap.PAGESIZE + shared_memory._TIMES_AT)


class Words:
    """Words whose owner is killed at the store behind the first `left` ones."""

    def __init__(self, words: memoryview, left: int) -> None:
        self.words, self.left = words, left

    def __getitem__(self, where: int) -> int:
        found: int = self.words[where]
        return found

    def __setitem__(self, where: int, value: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed
        self.words[where] = value


def test_a_kill_loses_no_row(fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is committed, is being committed or waits, and whichever commits fail."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # this test commits, step by step
    rng = random.Random(1)
    tables = ("a", "b")
    database = Database(tmp_path / "db", tables, version="v1", fsync=False)
    log = again(fd).rows
    rows = WriteBehind(database, log)
    model: dict[tuple[str, bytes], bytes | None] = {}
    for _ in range(400):
        puts: list[Any] = [
            (
                rng.choice(tables),
                b"%d" % rng.randrange(20),
                rng.choice([None, b"", b"v%d" % rng.randrange(9)]),
            )
            for _ in range(2)
        ]
        rows.write(puts)
        model.update({(table, key): value for table, key, value in puts})
        if rng.random() < 0.3:
            going = rows._waiting[0]
            log.swap()
            fails = rng.random() < 0.4
            if not fails:
                rows._commit(going)
                log.committed()
            rows._waiting = (going if fails else _Rows({})), _Rows({})
        left = dict(again(fd).rows.found())
        shown = {
            (table, key): left.get(bytes([tables.index(table)]) + key, database.get(table, key))
            for table, key in model
        }
        assert shown == model
    second = WriteBehind(database, again(fd).rows)
    assert {place: database.get(*place) for place in model} == model
    assert second.waiting_rows == 0 and list(again(fd).rows.found()) == []
    database.close()


def test_rows_that_are_written_together_are_found_together(monkeypatch: pytest.MonkeyPatch) -> None:
    group: dict[bytes, bytes | None] = {b"\0one": b"1", b"\0two": None, b"\1three": b""}

    def before(rows: Any) -> Any:
        rows.append({b"\0before": b"x"})
        return rows

    seen = killed_at_each_store(
        monkeypatch,
        lambda m: m.rows,
        before,
        lambda rows: rows.append(group),
        lambda m: dict(m.rows.found()),
    )
    assert [seen[0], seen[-1]] == [{b"\0before": b"x"}, {b"\0before": b"x", **group}]
    assert all(one in (seen[0], seen[-1]) for one in seen)


@pytest.mark.parametrize(("length", "given_back"), [(1000, 0), (64 << 10, 0), ((64 << 10) + 1, 17)])
def test_only_a_long_log_gives_its_memory_back(fd: int, length: int, given_back: int) -> None:
    """A commit of a few rows costs no system call."""
    rows = again(fd).rows
    rows.append({b"\0a": bytes(length - shared_memory._ROW.size - 2)})
    before = os.fstat(fd).st_blocks * 512
    rows.swap()
    rows.committed()
    assert list(again(fd).rows.found()) == []
    assert before - os.fstat(fd).st_blocks * 512 == given_back * mmap.PAGESIZE


def test_a_full_log_keeps_what_it_has(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "LOG_BYTES", 100)
    rows = again(fd).rows
    rows.append({b"\0a": b"1" * 60})
    rows.append({b"\0b": b"2" * 60})
    rows.append({b"\0c": b"3"})  # would be found without the one before
    assert set(dict(again(fd).rows.found())) == {b"\0a"}
    rows.swap()
    rows.append({b"\0d": b"4"})  # the same, until the commit is made
    rows.committed()
    rows.append({b"\0e": b"5"})  # would be found without d
    assert list(again(fd).rows.found()) == []
    rows.swap()
    rows.committed()
    rows.append({b"\0f": b"6"})
    assert set(dict(again(fd).rows.found())) == {b"\0f"}


@pytest.mark.parametrize("failed", [False, True])
def test_no_row_of_a_full_log_undoes_its_own_commit(
    fd: int, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """The process dies right behind the commit of rows that had no room here; `failed`: of the second try."""
    monkeypatch.setattr(shared_memory, "LOG_BYTES", 100)
    rows = again(fd).rows
    rows.append({b"\0key": b"older"})
    if failed:
        rows.swap()
        rows.append({b"\0key": b"old"})
    rows.append({b"\0key": b"new" * 30})
    rows.swap()  # and all of it is committed
    assert list(again(fd).rows.found()) == []


def test_the_log_of_a_database_that_was_dropped_is_dropped(fd: int, tmp_path: Path) -> None:
    Database(tmp_path / "db", ("a",), version="v1", fsync=False).close()
    again(fd).rows.append({b"\0key": b"value"})
    database = Database(tmp_path / "db", ("a",), version="v2", fsync=False)
    assert database.dropped
    assert WriteBehind(database, again(fd).rows).get("a", b"key") is None
    assert list(again(fd).rows.found()) == []
    database.close()


def test_a_commit_that_fails_leaves_its_rows_in_the_log(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(tmp_path / "db", ("a",), version="v1", fsync=False)
    rows = WriteBehind(database, again(fd).rows)
    with monkeypatch.context() as patched:
        patched.setattr(database, "write", fails)
        rows.write([("a", b"k", b"v")])
        rows.flush()
        assert dict(again(fd).rows.found())[b"\0k"] == b"v"
    rows.flush()
    assert list(again(fd).rows.found()) == []
    rows.close()


def test_rows_that_cannot_be_committed_at_the_start_wait(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(fd).rows.append({b"\0k": b"v"})
    database = Database(tmp_path / "db", ("a",), version="v1", fsync=False)
    with monkeypatch.context() as patched:
        patched.setattr(database, "write", fails)
        rows = WriteBehind(database, again(fd).rows)
    assert rows.get("a", b"k") == b"v" and dict(again(fd).rows.found()) == {b"\0k": b"v"}
    rows.flush()
    assert database.get("a", b"k") == b"v" and list(again(fd).rows.found()) == []
    rows.close()


def fails(puts: Any) -> None:
    raise NoRoom("full")

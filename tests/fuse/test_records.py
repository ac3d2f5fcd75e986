"""Records of open files, in memory that outlives the daemon."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base.names import ObjectId
from cachefs.fs import Former
from cachefs.fuse import handover
from cachefs.fuse.callers import Writers
from cachefs.fuse.handover import HandleRecord, HandleTable, describe_handle
from cachefs.fuse.protocol import RESENT
from cachefs.fuse.records import Records


@pytest.fixture
def memory() -> Any:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def record(fh: int, key: str = "a/ü\udcff", etag: str = '"e"') -> HandleRecord:
    return HandleRecord(fh, fh + 100, fh | 1 << 47, 1 << 40, -5, 3, 1234, handover.WRITES, 2, key, etag)


def add(table: HandleTable, one: HandleRecord) -> int:
    fh, unique, *file = one
    return table.add(fh, unique, describe_handle(*file))


def found(table: HandleTable) -> dict[int, HandleRecord]:
    return {one.fh: one for _, one in table.records()}


def test_the_next_daemon_finds_what_is_open(memory: int) -> None:
    table = HandleTable(memory, 4096)
    slots = {fh: add(table, record(fh)) for fh in range(1, 20)}
    for fh in range(2, 20, 3):
        table.drop(slots[fh])
    add(table, record(50, "b" * 1024))
    assert found(HandleTable(memory, 4096)) == {
        **{fh: record(fh) for fh in range(1, 20) if fh % 3 != 2},
        50: record(50, "b" * 1024),
    }


def test_the_next_daemon_goes_on_in_the_same_table(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "DISTINCT_SLOTS", 0)
    add(HandleTable(memory, 0), record(1))
    second = HandleTable(memory, 0)
    [(slot, one)] = second.records()
    assert one.fh == 1
    add(second, record(2))
    second.drop(slot)
    third = HandleTable(memory, 0)
    assert list(found(third)) == [2]
    assert add(third, record(3)) == slot
    assert set(found(HandleTable(memory, 0))) == {2, 3}
    assert os.fstat(memory).st_blocks * 512 < 1 << 20


def test_what_is_too_long_or_too_many_has_no_record(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = HandleTable(memory, 0)
    assert not add(table, record(1, "k" * handover.DESCRIPTION_BYTES))
    table.drop(0)
    monkeypatch.setattr(handover, "MOST_HANDLES", 3)
    assert [bool(add(table, record(fh))) for fh in (2, 3, 4)] == [True, True, False]
    assert set(found(HandleTable(memory, 0))) == {2, 3}


def test_a_file_that_is_opened_again_is_not_described_again(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "DISTINCT_SLOTS", 3)
    table = HandleTable(memory, 0)
    files = [describe_handle(*record(fh)[2:]) for fh in range(5)]
    slots = [table.add(fh + 1, 0, file) for fh, file in enumerate(files[:3])]
    for slot in slots:
        table.drop(slot)
    assert table.add_again(10, 0, files[0], slots[0])
    # The slots of the others are used for further files, that of the open one is not.
    assert {table.add(11, 0, files[3]), table.add(12, 0, files[4])} == set(slots[1:])
    assert not table.add_again(13, 0, files[1], slots[1])
    assert table.add(13, 0, files[1]) not in slots
    inos = {one.fh: one.ino for one in found(HandleTable(memory, 0)).values()}
    assert inos == {fh: record(n).ino for fh, n in ((10, 0), (11, 3), (12, 4), (13, 1))}


@given(
    kept=st.integers(0, 6),
    most=st.integers(1, 8),
    steps=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=80),
)
def test_the_next_daemon_finds_exactly_what_is_open(
    kept: int, most: int, steps: list[tuple[int, bool]]
) -> None:
    """Files are opened and closed in any order; `True` says that another version of one has another description, and a
    daemon may die at any step. Whatever has a slot is found; others have slot 0."""
    fd = os.memfd_create("test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "DISTINCT_SLOTS", kept)
        patch.setattr(handover, "MOST_HANDLES", most)
        table = HandleTable(fd, 0)
        described_as: dict[int, bytes] = {}
        slots: dict[int, int] = {}
        is_open: dict[int, int] = {}  # file → handle
        for fh, (file, again) in enumerate(steps, start=1):
            if file in is_open:
                del is_open[file]
                table.drop(slots[file])
                continue
            if again or file not in described_as:
                described_as[file] = describe_handle(*record(fh)[2:-2], f"{file}-{fh}", "")
            taken = sum(bool(slots[other]) for other in is_open)
            if not table.add_again(fh, fh, described_as[file], slots.get(file, 0)):
                slots[file] = table.add(fh, fh, described_as[file])
            is_open[file] = fh
            expected = {fh: described_as[file] for file, fh in is_open.items() if slots[file]}
            assert bool(slots[file]) == (taken < most - 1)
            now = found(HandleTable(fd, 0))
            assert {fh: describe_handle(*one[2:]) for fh, one in now.items()} == expected
    os.close(fd)


def test_backing_ids(memory: int) -> None:
    table = HandleTable(memory, 0)
    for number in (1, 2, 9):
        table.registered(number)
    table.unregistered(2)
    table.unregistered(5)
    second = HandleTable(memory, 0)
    assert second.backing_ids() == {1, 9}
    second.registered(10)
    second.unregistered(1)
    assert HandleTable(memory, 0).backing_ids() == {9, 10}


class _Origin:
    source = "s3://b"


class _Files:
    """What `Records` asks of a filesystem."""

    def __init__(self) -> None:
        self.origin = _Origin()
        self.handles: dict[int, Any] = {}
        self.followed = 0

    def follow(self, count: int) -> None:
        self.followed = count

    def restore(self, was: Former) -> bool:
        assert was.origin is self.origin and not was.unsaved and not was.writes
        what = was.ino, was.object, was.mtime_ns, was.backing_id
        self.handles[was.fh] = SimpleNamespace(what=what)
        return True

    def release(self, fh: int) -> None:
        del self.handles[fh]


def test_a_handle_that_the_kernel_never_heard_of_goes_when_it_asks_again(memory: int) -> None:
    before, files = HandleTable(memory, 0), _Files()
    writer = Records(files, SimpleNamespace(table=before), [files.origin])  # type: ignore[arg-type]
    obj = ObjectId("s3://b", "key", "etag", 10)
    for fh in (1, 2):
        files.handles[fh] = SimpleNamespace(
            ino=40 + fh, origin=files.origin, object=obj, mtime_ns=5, description=b"", record=0, node=None
        )
        before.registered(fh)
        writer.opened(fh, 1000 + fh, fh)
    before.registered(7)

    after = _Files()
    table = HandleTable(memory, 0)
    reader = Records(
        after, SimpleNamespace(table=table, open=list(table.records()), restarts=1), [after.origin]
    )  # type: ignore[arg-type]
    assert reader.take_over(Writers()) == {7}
    assert after.followed == 1
    restored = {fh: handle.what for fh, handle in after.handles.items()}
    assert restored == {fh: (40 + fh, obj, 5, fh) for fh in (1, 2)}

    reader.release_unanswered(1002 | RESENT)  # the reply to this one was lost
    reader.release_unanswered(999 | RESENT)  # this one was not answered at all
    assert set(after.handles) == {1}
    assert list(found(HandleTable(memory, 0))) == [1]

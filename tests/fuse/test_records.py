"""Records of open files, in memory that outlives the daemon."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from cachefs.base.names import ObjectId
from cachefs.fs import Former
from cachefs.fuse import held
from cachefs.fuse.callers import Writers
from cachefs.fuse.held import HandleRecord, HandleTable, described
from cachefs.fuse.protocol import RESENT
from cachefs.fuse.records import Records


@pytest.fixture
def memory() -> Any:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def record(fh: int, key: str = "a/ü\udcff", etag: str = '"e"') -> HandleRecord:
    return HandleRecord(fh, fh + 100, fh | 1 << 47, 1 << 40, -5, 3, 1234, held.WRITES, 2, key, etag)


def add(table: HandleTable, one: HandleRecord) -> None:
    fh, unique, *file = one
    if described(*file):
        table.add(fh, unique, described(*file))


def test_the_next_daemon_finds_what_is_open(memory: int) -> None:
    table = HandleTable(memory, 4096)
    for fh in range(1, 20):
        add(table, record(fh))
    for fh in range(2, 20, 3):
        table.drop(fh)
    add(table, record(50, "b" * 1024))
    found = {one.fh: one for one in HandleTable(memory, 4096).records()}
    assert found == {
        **{fh: record(fh) for fh in range(1, 20) if fh % 3 != 2},
        50: record(50, "b" * 1024),
    }


def test_the_next_daemon_goes_on_in_the_same_table(memory: int) -> None:
    add(HandleTable(memory, 0), record(1))
    second = HandleTable(memory, 0)
    assert [one.fh for one in second.records()] == [1]
    add(second, record(2))
    second.drop(1)
    second.drop(1)
    third = HandleTable(memory, 0)
    assert [one.fh for one in third.records()] == [2]
    add(third, record(3))  # where the first one was
    assert {one.fh for one in HandleTable(memory, 0).records()} == {2, 3}
    assert os.fstat(memory).st_blocks * 512 < 1 << 20


def test_what_is_too_long_or_too_many_has_no_record(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = HandleTable(memory, 0)
    add(table, record(1, "k" * held.RECORD_BYTES))
    table.drop(1)
    monkeypatch.setattr(held, "MOST_HANDLES", 2)
    for fh in (2, 3, 4):
        add(table, record(fh))
    table.drop(4)
    assert {one.fh for one in HandleTable(memory, 0).records()} == {2, 3}


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
        self.open: dict[int, Any] = {}
        self.followed = 0

    def follow(self, count: int) -> None:
        self.followed = count

    def open_file(self, fh: int) -> Any:
        return self.open[fh]

    def restore(self, was: Former) -> bool:
        assert was.origin is self.origin and not was.unsaved and not was.writes
        self.open[was.fh] = was.ino, was.object, was.mtime_ns, was.backing_id
        return True

    def release(self, fh: int) -> None:
        del self.open[fh]


class _Device:
    def __init__(self) -> None:
        self.released: set[int] = set()
        self.told: list[int] = []

    def unregister(self, number: int) -> None:
        self.released.add(number)

    def notify_beside(self) -> None:
        """No thread waits in this kernel."""

    def notify(self, code: int, body: bytes) -> None:
        self.told.append(code)


def test_a_handle_that_the_kernel_never_heard_of_goes_when_it_asks_again(memory: int) -> None:
    before, files = HandleTable(memory, 0), _Files()
    writer = Records(files, SimpleNamespace(table=before), [files.origin])  # type: ignore[arg-type]
    obj = ObjectId("s3://b", "key", "etag", 10)
    for fh in (1, 2):
        files.open[fh] = SimpleNamespace(
            ino=40 + fh, origin=files.origin, object=obj, mtime_ns=5, record=b"", node=None
        )
        before.registered(fh)
        writer.opened(fh, 1000 + fh, fh)
    before.registered(7)

    after, device = _Files(), _Device()
    table = HandleTable(memory, 0)
    reader = Records(
        after, SimpleNamespace(table=table, open=list(table.records()), restarts=1), [after.origin]
    )  # type: ignore[arg-type]
    reader.take_over(device, Writers())  # type: ignore[arg-type]
    assert after.followed == 1
    assert after.open == {fh: (40 + fh, obj, 5, fh) for fh in (1, 2)}
    assert device.released >= {7}
    assert not device.released & {1, 2}
    assert 7 in device.told

    reader.asked_again(1002 | RESENT)  # the reply to this one was lost
    reader.asked_again(999 | RESENT)  # this one was not answered at all
    assert set(after.open) == {1}
    assert [one.fh for one in HandleTable(memory, 0).records()] == [1]

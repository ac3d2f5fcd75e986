"""What a daemon leaves to the next one, which may be of another version (`cachefs.fuse.handover.FORMAT`).

`state-N.xz` is what a daemon with FORMAT N has left: the memory file's bytes, where there are any. A version reads its own,
and refuses the others by their number. When FORMAT is raised, a new one is recorded, the new number and digest are put into
`LAYOUTS`, and the old ones stay:

    python -m tests.fuse.test_state"""

from __future__ import annotations

import hashlib
import lzma
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cachefs.base import shared_memory
from cachefs.base.shared_memory import SharedMemory
from cachefs.fuse import handover, holder
from cachefs.fuse.handover import HandleRecord, HandleTable, Handover, describe_handle

LAYOUTS = {2: "eb6adad46cf4cc95", 3: "4084e19ad4e3e8df"}
"""FORMAT → digest of what says where what lies in the memory file (`layout`)."""

HERE = Path(__file__).parent
RECORDED = {int(path.stem.partition("-")[2]): path for path in HERE.glob("state-*.xz")}

PIECE = struct.Struct("=QQ")
"""Where bytes lie in the memory file, and how many, before the bytes."""

IDENTITY = "('one', 's3://bucket')"
CONNECTION = ("0:57", 45, (1 << 39) + 5)

HANDLES = [
    HandleRecord(
        (1 << 40) + number,
        100 + number,
        7 + number,
        1 << 33,
        -number,
        number,
        4711,
        number,
        0,
        f"d/ü{number}",
        '"etag"',
    )
    for number in range(3)
]
BACKING_IDS = {1, 2, 9}
ROWS: list[tuple[bytes, bytes | None]] = [(b"\1key", b"value"), (b"\2", b""), (b"\1gone", None)]
NAMES = ["a" * 32, "b" * 32]
FILES: dict[str, tuple[int, dict[str, Any]]] = {
    NAMES[0]: (5, {"key": "d/\udcff", "ino": 77, "tokens": ["t"], "upload": None}),
    NAMES[1]: (-6, {"key": "other", "committed": True}),
}
TIMES = {7: 1 << 60, 1 << 40: 5}
TAILS = [(NAMES[0], 0, b"small"), (NAMES[1], 300_000, bytes(range(256)))]


def written() -> int:
    """A memory file in which a daemon has left all that it can leave."""
    fd = os.memfd_create("state")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        daemon = Handover(os.dup(fd), theirs.detach())
        daemon.stand_by("1.2.2", IDENTITY)
        number, minor, flags = CONNECTION
        daemon.hold(ours.fileno(), Path("/mnt/data"), number, minor, flags)
        daemon._socket.close()
        os.close(daemon._state_fd)
    os.pwrite(fd, holder.DEATHS.pack(3, 12.5, 1), 0)
    os.pwrite(fd, holder.KILLED.pack(True), holder.KILLED_AT)
    table = HandleTable(fd, handover._TABLE_AT)
    for fh, unique, *file in HANDLES:
        table.add(fh, unique, describe_handle(*file))
    for number in BACKING_IDS:
        table.registered(number)
    memory = SharedMemory(fd, handover._SHARED_AT)
    memory.rows.append(dict(ROWS[:1]))
    memory.rows.swap()
    memory.rows.append(dict(ROWS[1:]))
    for name, (mtime_ns, row) in FILES.items():
        memory.records.put(name, 0, {})
        memory.records.put(name, mtime_ns, row)
    for ino, time_ns in TIMES.items():
        memory.times.put(ino, time_ns)
    for name, start, data in TAILS:
        tail = memory.tails.make(name, start)
        assert tail is not None
        tail.extend(data)
    return fd


def pieces(fd: int) -> Iterator[tuple[int, bytes]]:
    at, end = 0, os.fstat(fd).st_size
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return
        until = os.lseek(fd, at, os.SEEK_HOLE)
        yield at, os.pread(fd, until - at, at)
        at = until


def record() -> None:
    fd = written()
    data = b"".join(PIECE.pack(at, len(piece)) + piece for at, piece in pieces(fd))
    (HERE / f"state-{handover.FORMAT}.xz").write_bytes(lzma.compress(data))
    print(f"{handover.FORMAT}: {layout()!r}")


def played(path: Path) -> int:
    data, fd, at = lzma.decompress(path.read_bytes()), os.memfd_create("state"), 0
    while at < len(data):
        where, length = PIECE.unpack_from(data, at)
        at += PIECE.size
        os.pwrite(fd, data[at : at + length], where)
        at += length
    return fd


def daemon_on(fd: int) -> Handover:
    _, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Handover(fd, theirs.detach())


PLACES = ("_AT", "_BYTES", "LENGTH", "_STRIDE")
NUMBERS = (
    "MOST_HANDLES",
    "MOST_RECORDS",
    "MOST_TAILS",
    "MOST_TIMES",
    "READS",
    "READS_WRITTEN",
    "WRITES",
    "HANDED_OVER",
    "RENEW",
)

# -- the layout --------------------------------------------------------------------------------------


def described_layout() -> dict[tuple[str, str], str]:
    """All structures of the memory file, and all numbers that say where they lie, by module and name."""
    found = {}
    for module in (holder, handover, shared_memory):
        for name, value in vars(module).items():
            if isinstance(value, struct.Struct):
                found[module.__name__, name] = value.format
            elif name in NUMBERS or (name.endswith(PLACES) and name != "GIVE_BACK_BYTES"):
                found[module.__name__, name] = str(int(value))
    return found


def layout() -> str:
    text = "\n".join(
        f"{module} {name} {value}" for (module, name), value in sorted(described_layout().items())
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_what_is_left_has_another_number_when_it_lies_otherwise() -> None:
    """If this fails, a daemon of this version would misread what one before has left: raise FORMAT."""
    assert LAYOUTS.get(handover.FORMAT) == layout(), described_layout()
    assert handover.FORMAT in RECORDED


@pytest.mark.parametrize("module", [holder, handover, shared_memory])
def test_each_structure_counts(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = layout()
    names = [name for where, name in described_layout() if where == module.__name__]
    assert len(names) > 4
    for name in names:
        value = getattr(module, name)
        with monkeypatch.context() as patched:
            other: Any = (
                struct.Struct(value.format + "B") if isinstance(value, struct.Struct) else int(value) + 1
            )
            patched.setattr(module, name, other)
            assert layout() != before, name


# -- another version ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", RECORDED)
def test_what_a_version_has_left_is_read_or_refused_by_its_number(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fd = played(RECORDED[number])
    daemon = daemon_on(os.dup(fd))
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    daemon.stand_by("1.2.3", IDENTITY)
    assert ended == ([] if number == handover.FORMAT else [1])
    if ended:
        assert caplog.messages == [
            f"this version cannot go on with a mount of state {number}: it knows {handover.FORMAT}"
        ]
        return
    assert holder.STANDBY.unpack(os.pread(fd, holder.STANDBY.size, holder.STANDBY_AT))[:2] == (
        os.getpid(),
        number,
    )
    assert daemon.agreed() == CONNECTION
    assert os.pread(fd, 10, holder.MOUNTPOINT_AT) == b"/mnt/data\0"
    assert holder.DEATHS.unpack(os.pread(fd, holder.DEATHS.size, 0)) == (3, 12.5, 1)
    assert holder.KILLED.unpack(os.pread(fd, holder.KILLED.size, holder.KILLED_AT)) == (True,)
    table = HandleTable(fd, handover._TABLE_AT)
    assert [one for _, one in table.records()] == HANDLES and table.backing_ids() == BACKING_IDS
    memory = SharedMemory(fd, handover._SHARED_AT)
    assert list(memory.rows.found()) == ROWS
    assert memory.records.found() == FILES
    assert {ino: memory.times.get(ino) for ino in TIMES} == TIMES
    assert [(tail.name, tail.start, bytes(tail)) for tail in memory.tails.found()] == TAILS
    daemon._socket.close()
    os.close(fd)


def test_a_mount_of_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fd = written()
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    for identity, refused in ((IDENTITY, []), (f"{IDENTITY}/p", [1])):
        daemon = daemon_on(os.dup(fd))
        daemon.stand_by("1.2.3", identity)
        assert ended == refused
        daemon._socket.close()
        os.close(daemon._state_fd)
    assert "other sources" in caplog.text
    os.close(fd)


def test_a_later_version_refuses_what_this_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = written()
    daemon = daemon_on(fd)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(handover, "FORMAT", handover.FORMAT + 1)
    daemon.stand_by("1.2.3", IDENTITY)
    assert ended == [1]
    daemon._socket.close()
    os.close(fd)


if __name__ == "__main__":
    record()

"""What the kernel asks of a mount that can be written, and what it is answered: over a filesystem that only notes it."""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from dataclasses import replace
from typing import Any

import pytest
import trio

from cachefs.base import errors
from cachefs.fs import Attributes
from cachefs.fs.attributes import Space
from cachefs.fs.freshness import BURST_S
from cachefs.fuse import protocol
from cachefs.fuse.native_backend import COPIED, MAX_WRITE, MOST_DETACHED
from cachefs.fuse.protocol import Op, OpenFlags, Setattr
from tests.fs.bucket import Bucket
from tests.fuse.kernel import DEADLINE_S, PID, Kernel, kernel, opened, release_in
from tests.fuse.test_waiting import interrupt

MTIME = 1_500_000_000_123_456_789
NEW = Attributes(77, stat.S_IFREG | 0o644, 1, 5, MTIME, 1000, 1000, MTIME, MTIME)
DIRECTORY = 5
ENTRY_BYTES = 128


class Noted:
    """A filesystem. `calls` is what it was asked; each call raises what is in `fails`, and waits for `gate` first."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, Exception] = {}
        self.there = True
        self.gate: trio.Event | None = None
        self.finished: list[str] = []
        self.released: list[int] = []
        self.written: dict[int, bytes] = {}
        self.cleared: list[tuple[int, bool]] = []

    async def _note(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if self.gate is not None:
            await self.gate.wait()
        if name in self.fails:
            raise self.fails[name]
        self.finished.append(name)

    async def open(self, ino: int, flags: int, pid: int) -> tuple[int, int]:
        await self._note("open", ino, flags, pid)
        return 9, 0

    def create_now(self, *arguments: Any) -> None:
        """It has to wait."""

    async def create(self, *arguments: Any) -> tuple[Attributes, float, tuple[int, int]]:
        await self._note("create", *arguments)
        return NEW, 1.5, (9, 0)

    async def lookup(self, parent: int, name: bytes) -> tuple[Attributes | None, float]:
        return (NEW if self.there else None), 1.5

    async def mknod(self, *arguments: Any, again: bool) -> tuple[Attributes, float]:
        await self._note("mknod", *arguments, *(["again"] if again else []))
        return NEW, 1.5

    async def mkdir(self, *arguments: Any, again: bool) -> tuple[Attributes, float]:
        await self._note("mkdir", *arguments, *(["again"] if again else []))
        return NEW, 1.5

    def write_now(self, fh: int, offset: int, data: bytes | memoryview) -> int | None:
        """What ends so takes no waiting."""
        if bytes(data[-4:]) != b"now!":
            return None
        self.calls.append(("write_now", fh, offset, bytes(data)))
        return len(data)

    async def write(self, fh: int, offset: int, data: bytes | memoryview) -> int:
        await self._note("write", fh, offset, len(data))
        self.calls[-1] = ("write", fh, offset, bytes(data))  # as it is once there is time for it
        self.written[offset] = bytes(data)
        return len(data)

    async def setattr(self, ino: int, **wanted: Any) -> tuple[Attributes, float]:
        await self._note(
            "setattr", ino, {k: v for k, v in wanted.items() if v is not None and v is not False}
        )
        return NEW, 1.5

    def clear_set_ids(self, fh: int, *, later: bool = False) -> None:
        self.cleared.append((fh, later))

    async def flush(self, fh: int) -> None:
        await self._note("flush", fh)

    async def fsync(self, fh: int) -> None:
        await self._note("fsync", fh)

    async def fallocate(self, *arguments: int) -> None:
        await self._note("fallocate", *arguments)

    async def unlink(self, *arguments: Any) -> None:
        await self._note("unlink", *arguments)

    async def rmdir(self, *arguments: Any) -> None:
        await self._note("rmdir", *arguments)

    async def rename(self, *arguments: Any, again: bool) -> None:
        await self._note("rename", *arguments, *(["again"] if again else []))

    def open_known(self, ino: int, pid: int) -> None:
        """No file is known."""

    def close_known(self, fh: int) -> bool:
        return False

    def open_now(self, ino: int, flags: int, pid: int) -> tuple[int, int]:
        self.calls.append(("open_now", ino, flags, pid))
        return 8, 0

    def release(self, fh: int) -> None:
        self.released.append(fh)

    def statfs(self) -> Space:
        return Space(4096, 1000, 500, 10, 5, 255)


def create_in(name: bytes, flags: int = os.O_WRONLY | os.O_CREAT, mode: int = 0o100644) -> bytes:
    return protocol.CREATE_IN.pack(flags, mode, 0o22, 0) + name + b"\0"


def write_in(fh: int, offset: int, data: bytes, size: int | None = None) -> bytes:
    return protocol.WRITE_IN.pack(fh, offset, len(data) if size is None else size, 0, 0, 0, 0) + data


def flush_in(fh: int) -> bytes:
    return protocol.FLUSH_IN.pack(fh, 0, 0, 0)


def open_in(flags: int) -> bytes:
    return protocol.OPEN_IN.pack(flags, 0)


def setattr_in(valid: int, **values: int) -> bytes:
    names = (
        "valid",
        "padding",
        "fh",
        "size",
        "lock_owner",
        "atime",
        "mtime",
        "ctime",
        "atimensec",
        "mtimensec",
        "ctimensec",
        "mode",
        "unused4",
        "uid",
        "gid",
        "unused5",
    )
    return protocol.SETATTR_IN.pack(*({"valid": valid, **values}.get(name, 0) for name in names))


def writing(fs: Noted) -> Any:
    return kernel(Bucket([]), writes_to=fs)


# -- each request and what it becomes ----------------------------------------------------------------

DONE = b""
CASES: dict[str, tuple[int, bytes, tuple[Any, ...]]] = {
    "unlink": (Op.UNLINK, b"old\0", ("unlink", DIRECTORY, b"old")),
    "rmdir": (Op.RMDIR, b"old\0", ("rmdir", DIRECTORY, b"old")),
    "rename": (
        Op.RENAME,
        protocol.RENAME_IN.pack(6) + b"old\0new\0",
        ("rename", DIRECTORY, b"old", 6, b"new", 0),
    ),
    "rename2": (
        Op.RENAME2,
        protocol.RENAME2_IN.pack(6, 1, 0) + b"o\0n\0",
        ("rename", DIRECTORY, b"o", 6, b"n", 1),
    ),
    "fallocate": (
        Op.FALLOCATE,
        protocol.FALLOCATE_IN.pack(9, 100, 50, 1, 0),
        ("fallocate", 9, 1, 100, 50),
    ),
    "flush": (Op.FLUSH, flush_in(9), ("flush", 9)),
    "fsync": (Op.FSYNC, protocol.FSYNC_IN.pack(9, 1, 0), ("fsync", 9)),
    "mkdir": (
        Op.MKDIR,
        protocol.MKDIR_IN.pack(0o755, 0o22) + b"d\0",
        ("mkdir", DIRECTORY, b"d", 0o755, 1000, 1000),
    ),
    "mknod": (
        Op.MKNOD,
        protocol.MKNOD_IN.pack(0o100600, 0, 0o22, 0) + b"f\0",
        ("mknod", DIRECTORY, b"f", 0o100600, PID, 1000, 1000),
    ),
    "create": (
        Op.CREATE,
        create_in(b"f"),
        ("create", DIRECTORY, b"f", os.O_WRONLY | os.O_CREAT, 0o100644, PID, 1000, 1000),
    ),
    "open": (Op.OPEN, open_in(os.O_RDWR | os.O_APPEND), ("open", DIRECTORY, os.O_RDWR | os.O_APPEND, PID)),
    "truncate at open": (
        Op.OPEN,
        open_in(os.O_RDONLY | os.O_TRUNC),
        ("open", DIRECTORY, os.O_RDONLY | os.O_TRUNC, PID),
    ),
    "write": (Op.WRITE, write_in(9, 1 << 40, b"bytes"), ("write", 9, 1 << 40, b"bytes")),
    "truncate": (
        Op.SETATTR,
        setattr_in(Setattr.SIZE | Setattr.FH, size=3, fh=9),
        ("setattr", DIRECTORY, {"size": 3, "fh": 9}),
    ),
    "chmod": (Op.SETATTR, setattr_in(Setattr.MODE, mode=0o100640), ("setattr", DIRECTORY, {"mode": 0o640})),
    "chown": (
        Op.SETATTR,
        setattr_in(Setattr.UID | Setattr.GID, uid=0, gid=5),
        ("setattr", DIRECTORY, {"uid": 0, "gid": 5}),
    ),
    "utimes": (
        Op.SETATTR,
        setattr_in(Setattr.ATIME | Setattr.MTIME, atime=1, mtime=3, mtimensec=7),
        ("setattr", DIRECTORY, {"atime_ns": 1_000_000_000, "mtime_ns": 3_000_000_007}),
    ),
    "a time before 1970": (
        Op.SETATTR,
        setattr_in(Setattr.MTIME, mtime=(1 << 64) - 1, mtimensec=5),
        ("setattr", DIRECTORY, {"mtime_ns": -999_999_995}),
    ),
    "chown of a file with set-uid bits": (
        Op.SETATTR,
        setattr_in(Setattr.UID | Setattr.KILL_SUIDGID, uid=4),
        ("setattr", DIRECTORY, {"uid": 4, "clear_set_ids": True}),
    ),
    "a time of the last use alone": (
        Op.SETATTR,
        setattr_in(Setattr.ATIME, atime=1),
        ("setattr", DIRECTORY, {"atime_ns": 1_000_000_000}),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_requests(case: tuple[int, bytes, tuple[Any, ...]]) -> None:
    opcode, body, expected = case
    fs = Noted()
    async with writing(fs) as asking:
        reply = await asking.ask(opcode, DIRECTORY, body)
        assert not reply.error
        assert fs.calls == [expected]
        if opcode in (Op.MKDIR, Op.MKNOD):
            assert int.from_bytes(reply.body[:8], "little") == NEW.ino
            assert len(reply.body) == ENTRY_BYTES
        elif opcode == Op.CREATE:
            assert int.from_bytes(reply.body[:8], "little") == NEW.ino
            assert len(reply.body) == ENTRY_BYTES + 16
            assert reply.body[ENTRY_BYTES] == 9
        elif opcode == Op.OPEN:
            assert opened(reply) == (9, OpenFlags.KEEP_CACHE, 0)
        elif opcode == Op.WRITE:
            assert reply.body == (5).to_bytes(8, "little")
        elif opcode == Op.SETATTR:
            assert len(reply.body) == 104
        else:
            assert reply.body == b""
        assert asking.metrics.fuse_other == 0
        assert asking.metrics.fuse_errors == 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_every_failure_is_an_errno(case: tuple[int, bytes, tuple[Any, ...]]) -> None:
    opcode, body, expected = case
    fs = Noted()
    async with writing(fs) as asking:
        for failure, number in (
            (errors.NoRoom("full"), errno.ENOSPC),
            (errors.OriginFailed("down"), errno.EIO),
            (errors.NotEmpty("names"), errno.ENOTEMPTY),
            (RuntimeError("ours"), errno.EIO),
        ):
            fs.fails[expected[0]] = failure
            assert (await asking.ask(opcode, DIRECTORY, body)).error == number


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_cut_off_requests_are_refused(case: tuple[int, bytes, tuple[Any, ...]]) -> None:
    opcode, body, _ = case
    fs = Noted()
    async with writing(fs) as asking:
        for length in range(len(body) - 1):
            if opcode == Op.FLUSH and length >= protocol.FLUSH_IN.size:
                continue
            assert (await asking.ask(opcode, DIRECTORY, body[:length])).error == errno.EINVAL
        assert fs.calls == []


@pytest.mark.parametrize(
    ("opcode", "number"),
    [
        (Op.SYMLINK, errno.EPERM),
        (Op.LINK, errno.EPERM),
        (Op.COPY_FILE_RANGE, errno.ENOSYS),
        (Op.TMPFILE, errno.ENOSYS),
        (46, errno.ENOSYS),  # LSEEK
    ],
)
async def test_what_there_is_not(opcode: int, number: int) -> None:
    async with writing(fs := Noted()) as asking:
        assert (await asking.ask(opcode, DIRECTORY, bytes(64))).error == number
        assert fs.calls == []


@pytest.mark.parametrize(
    ("name", "number"), [(b"user.cachefs.etag", 0), (b"user.mine", errno.EOPNOTSUPP), (b"", errno.EINVAL)]
)
async def test_attributes_of_ours_are_taken_and_not_kept(name: bytes, number: int) -> None:
    async with writing(fs := Noted()) as asking:
        body = protocol.SETXATTR_IN.pack(5, 0) + name + b"\0value"
        assert (await asking.ask(Op.SETXATTR, DIRECTORY, body)).error == number
        assert (await asking.ask(Op.REMOVEXATTR, DIRECTORY, name + b"\0")).error == number
        assert fs.calls == []


async def test_now_is_the_daemons() -> None:
    async with writing(fs := Noted()) as asking:
        before = time.time_ns()
        valid = Setattr.ATIME | Setattr.MTIME | Setattr.ATIME_NOW | Setattr.MTIME_NOW
        await asking.ask(Op.SETATTR, DIRECTORY, setattr_in(valid, mtime=5))
        assert before <= fs.calls[0][2]["mtime_ns"] <= time.time_ns()


async def test_writers_are_told_of_closes_and_readers_are_not() -> None:
    async with writing(Noted()) as asking:
        kept = int(OpenFlags.KEEP_CACHE)
        assert opened(await asking.ask(Op.OPEN, 7, open_in(os.O_WRONLY)))[1] == kept
        assert (
            opened(await asking.ask(Op.OPEN, 7, open_in(os.O_RDONLY)))[1]
            == OpenFlags.NOFLUSH | OpenFlags.KEEP_CACHE
        )
        made = await asking.ask(Op.CREATE, DIRECTORY, create_in(b"f"))
        assert int.from_bytes(made.body[ENTRY_BYTES + 8 : ENTRY_BYTES + 12], "little") == kept


@pytest.mark.parametrize(("size", "wanted"), [(0, BURST_S), (1, 0.0)])
async def test_a_new_file_needs_not_be_asked_about_at_once(size: int, wanted: float) -> None:
    class Fresh(Noted):
        async def create(self, *arguments: Any) -> tuple[Attributes, float, tuple[int, int]]:
            return replace(NEW, size=size), 0.0, (9, 0)

    async with writing(Fresh()) as asking:
        made = await asking.ask(Op.CREATE, DIRECTORY, create_in(b"f"))
        _, _, name, attributes, name_ns, attributes_ns = struct.unpack_from("=QQQQII", made.body)
        assert (name, name_ns) == (0, 0), "others may come to it by another number"
        assert attributes + attributes_ns / 1e9 == wanted


async def test_counters() -> None:
    async with writing(Noted()) as asking:
        for opcode, body, _ in CASES.values():
            await asking.ask(opcode, DIRECTORY, body)
        metrics = asking.metrics
        assert (metrics.fuse_open, metrics.fuse_create, metrics.fuse_flush) == (2, 2, 2)
        assert (metrics.fuse_write, metrics.fuse_write_bytes) == (1, 5)
        assert metrics.fuse_change == 13
        assert metrics.fuse_other == 0


# -- bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, COPIED, COPIED + 1, MAX_WRITE])
async def test_bytes_of_a_write_that_waits_are_not_those_of_the_next(size: int) -> None:
    fs = Noted()
    async with writing(fs) as asking:
        fs.gate = trio.Event()
        first = asking.send(Op.WRITE, 7, write_in(9, 0, b"a" * size))
        second = asking.send(Op.WRITE, 7, write_in(9, size, b"b" * size))
        await asking.idle()
        assert len(fs.calls) == 2
        asking.send(Op.LOOKUP, DIRECTORY, b"x" * 200 + b"\0")
        fs.gate.set()
        for sent in (first, second):
            assert (await asking.reply(sent)).body == size.to_bytes(8, "little")
        assert asking.line.detached == 0


async def test_buffers_are_used_again() -> None:
    async with writing(Noted()) as asking:
        for number in range(30):
            data = bytes([number]) * MAX_WRITE
            assert not (await asking.ask(Op.WRITE, 7, write_in(9, 0, data))).error
        assert asking.line.detached == 0
        assert len(asking.line._spare) <= 2


async def test_a_write_of_another_length_than_it_says() -> None:
    async with writing(fs := Noted()) as asking:
        for size in (0, 4, 6, 1 << 31):
            assert (await asking.ask(Op.WRITE, 7, write_in(9, 0, b"bytes", size))).error == errno.EINVAL
        assert fs.calls == []


async def test_writes_that_wait_hold_up_nothing_else() -> None:
    """As when a mapped file is written back while it is being uploaded: 128 writes of 68 KiB, and more."""
    fs = Noted()
    async with writing(fs) as asking:
        fs.gate = trio.Event()
        sent = []
        for number in range(300):
            sent.append(asking.send(Op.WRITE, 7, write_in(9, number, bytes([number % 251]) * (68 << 10))))
            await asking.idle()
        assert len(fs.calls) == 300
        assert asking.line.detached == MOST_DETACHED
        statfs = asking.send(Op.STATFS, 7)
        await asking.idle()
        assert statfs in asking.replies
        interrupt(asking, sent[-1])
        assert (await asking.reply(sent[-1])).error == errno.EINTR
        fs.gate.set()
        for unique in sent[:-1]:
            assert not (await asking.reply(unique)).error
        await asking.idle()
        assert fs.written == {number: bytes([number % 251]) * (68 << 10) for number in range(300)}
        assert asking.line.detached == 0
        assert asking.backend.operations.admission.held_bytes == 0


async def test_writes_that_find_no_memory_are_refused() -> None:
    fs = Noted()
    async with writing(fs) as asking:
        asking.backend.operations.admission.limit_bytes = 6 << 20
        fs.gate = trio.Event()
        sent = [asking.send(Op.WRITE, 7, write_in(9, 0, bytes(MAX_WRITE))) for _ in range(8)]
        await asking.idle()
        refused = [unique for unique in sent if unique in asking.replies]
        assert [asking.replies[unique][0].error for unique in refused] == [errno.ENOMEM] * len(refused)
        assert refused == sent[5:]
        flush = asking.send(Op.FLUSH, 7, flush_in(9))
        await asking.idle()
        assert fs.calls[-1] == ("flush", 9)
        fs.gate.set()
        for unique in (*sent[:5], flush):
            assert not (await asking.reply(unique)).error
        assert asking.line.detached == 0
        assert asking.backend.operations.admission.held_bytes == 0


# -- waiting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_no_deadline_but_the_stores(case: tuple[int, bytes, tuple[Any, ...]]) -> None:
    opcode, body, _ = case
    fs = Noted()
    async with writing(fs) as asking:
        fs.gate = trio.Event()
        sent = asking.send(opcode, DIRECTORY, body)
        await trio.sleep(50 * DEADLINE_S)
        asking.drain()
        assert sent not in asking.replies
        fs.gate.set()
        assert not (await asking.reply(sent)).error


@pytest.mark.parametrize("name", ["unlink", "rename", "write", "create", "mkdir", "truncate"])
async def test_a_signal_ends_the_wait_and_not_the_change(name: str) -> None:
    opcode, body, expected = CASES[name]
    fs = Noted()
    async with writing(fs) as asking:
        fs.gate = trio.Event()
        sent = asking.send(opcode, DIRECTORY, body)
        await asking.idle()
        for _ in range(2):
            interrupt(asking, sent)
        assert (await asking.reply(sent)).error == errno.EINTR
        fs.gate.set()
        await asking.idle()
        assert fs.finished == [expected[0]]
        assert fs.released == ([9] if name == "create" else [])
        assert len(asking.replies[sent]) == 1


@pytest.mark.parametrize("name", ["write", "truncate", "fallocate"])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_handle_that_is_released_during_its_change_is_closed_after_it(name: str, fails: bool) -> None:
    """The process was killed. A change after the last close of a file would not be uploaded."""
    opcode, body, expected = CASES[name]
    fs = Noted()
    fs.fails = {expected[0]: errors.NoRoom("full")} if fails else {}
    async with writing(fs) as asking:
        fs.gate = trio.Event()
        changes = [asking.send(opcode, DIRECTORY, body) for _ in range(2)]
        await asking.idle()
        for sent in changes:
            interrupt(asking, sent)
        assert not (await asking.ask(Op.RELEASE, DIRECTORY, release_in(9))).error
        await asking.idle()
        assert fs.released == [] and fs.finished == []
        fs.gate.set()
        await asking.idle()
        assert fs.finished == ([] if fails else [expected[0]] * 2)
        assert fs.released == [9]


@pytest.mark.parametrize("name", ["flush", "fsync"])
async def test_a_signal_ends_the_wait_for_an_upload(name: str) -> None:
    opcode, body, _ = CASES[name]
    fs = Noted()
    async with writing(fs) as asking:
        fs.gate = trio.Event()
        sent = asking.send(opcode, DIRECTORY, body)
        await asking.idle()
        interrupt(asking, sent)
        assert (await asking.reply(sent)).error == errno.EINTR
        assert fs.finished == []


async def test_changes_of_one_directory_have_their_turns() -> None:
    """Also when one was given up, which the kernel takes for done."""
    fs = Noted()
    async with writing(fs) as asking:
        fs.gate = trio.Event()
        given_up = asking.send(Op.UNLINK, DIRECTORY, b"f\0")
        await asking.idle()
        interrupt(asking, given_up)
        await asking.reply(given_up)
        rename = protocol.RENAME_IN.pack(DIRECTORY) + b"old\0new\0"
        after = [
            asking.send(Op.CREATE, DIRECTORY, create_in(b"f")),
            asking.send(Op.RENAME, DIRECTORY + 1, rename),
            asking.send(Op.RENAME, DIRECTORY, protocol.RENAME_IN.pack(DIRECTORY + 1) + b"a\0b\0"),
        ]
        elsewhere = asking.send(Op.UNLINK, DIRECTORY + 2, b"f\0")
        await asking.idle()
        assert [(call[0], call[1]) for call in fs.calls] == [("unlink", DIRECTORY), ("unlink", DIRECTORY + 2)]
        fs.gate.set()
        for sent in (*after, elsewhere):
            assert not (await asking.reply(sent)).error
        assert sorted(call[0] for call in fs.calls[2:]) == ["create", "rename", "rename"]
        assert not asking.backend.operations._directory_locks


async def test_a_change_that_a_signal_overtakes_keeps_its_turn() -> None:
    """The signal is read before the task of the change has run. The kernel sends the next change once that is answered."""

    class Creating(Noted):
        def create_now(self, *arguments: Any) -> tuple[Attributes, float, tuple[int, int]]:  # type: ignore[override]
            self.calls.append(("create", *arguments))
            return NEW, 0.0, (9, 0)

    fs = Creating()
    async with writing(fs) as asking:
        await asking.idle()
        rename = asking.send(Op.RENAME, DIRECTORY, protocol.RENAME_IN.pack(DIRECTORY) + b"old\0name\0")
        interrupt(asking, rename)
        asking.backend._serve_burst()
        asking.drain()
        if rename not in asking.replies:
            await asking.reply(rename)
        create = asking.send(Op.CREATE, DIRECTORY, create_in(b"name"))
        asking.backend._serve_burst()
        assert not (await asking.reply(create)).error
        assert [call[0] for call in fs.calls] == ["rename", "create"]


async def test_a_change_that_fails_after_its_process_ended_is_no_failure() -> None:
    fs = Noted()
    fs.fails["unlink"] = errors.OriginFailed("down")
    async with writing(fs) as asking:
        fs.gate = trio.Event()
        sent = asking.send(Op.UNLINK, DIRECTORY, b"f\0")
        await asking.idle()
        interrupt(asking, sent)
        await asking.reply(sent)
        fs.gate.set()
        await asking.idle()
        assert len(asking.replies[sent]) == 1
        assert asking.metrics.fuse_errors == 0


@pytest.mark.parametrize("name", ["create", "open"])
async def test_a_handle_whose_reply_is_not_taken_is_released(name: str) -> None:
    opcode, body, _ = CASES[name]
    fs = Noted()
    async with writing(fs) as asking:
        sent = 1 << 40
        asking.line.deaf.add(sent)
        asking.send(opcode, DIRECTORY, body, unique=sent)
        await asking.idle()
        assert fs.released == [9]


# -- which close is the last -------------------------------------------------------------------------


async def flushes(asking: Kernel, fs: Noted) -> int:
    fs.calls.clear()
    assert not (await asking.ask(Op.FLUSH, 7, flush_in(9))).error
    return len(fs.calls)


async def test_only_the_last_close_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def still(process: int, inode: int, device: str) -> bool:
        return (process, inode) == (4712, 7)

    monkeypatch.setattr("cachefs.fuse.callers._process_of", lambda thread: thread + 1)
    monkeypatch.setattr("cachefs.fuse.callers._has_open", still)
    async with writing(fs := Noted()) as asking:
        assert await flushes(asking, fs) == 1  # it is not known which process opened it
        await asking.ask(Op.OPEN, 7, open_in(os.O_WRONLY))
        assert await flushes(asking, fs) == 0
        assert not (await asking.ask(Op.FSYNC, 7, protocol.FSYNC_IN.pack(9, 0, 0))).error
        assert fs.calls == [("fsync", 9)]  # fsync is never skipped
        monkeypatch.setattr("cachefs.fuse.callers._has_open", lambda process, inode, device: False)
        assert await flushes(asking, fs) == 1
        monkeypatch.setattr("cachefs.fuse.callers._has_open", still)
        await asking.ask(Op.RELEASE, 7, release_in(9))
        assert await flushes(asking, fs) == 1


async def test_whose_writes_take_set_ids_away() -> None:
    """The kernel says so of writes, and of opens that empty the file; of the other opens for writing the user says it."""
    async with writing(fs := Noted()) as asking:
        await asking.ask(Op.OPEN, DIRECTORY, open_in(os.O_RDWR))
        await asking.ask(Op.OPEN, DIRECTORY, open_in(os.O_WRONLY | os.O_TRUNC))
        kills = protocol.WRITE_IN.pack(9, 0, 5, protocol.WRITE_KILL_SUIDGID, 0, 0, 0) + b"bytes"
        await asking.ask(Op.WRITE, DIRECTORY, kills)
        await asking.ask(Op.WRITE, DIRECTORY, write_in(9, 0, b"bytes"))
        assert fs.cleared == [(9, True), (9, False), (9, False)]
        await asking.ask(Op.WRITE, DIRECTORY, kills[:-5] + b"!now!")
        assert fs.calls[-1] == ("write_now", 9, 0, b"!now!") and fs.cleared[3:] == [(9, False)]


@pytest.mark.parametrize("size", [5, COPIED + 1])
async def test_a_write_that_waits_for_nothing_is_answered_at_once(size: int) -> None:
    """And keeps none of the device's buffers."""
    async with writing(fs := Noted()) as asking:
        fs.gate = trio.Event()  # what waits would wait for this
        data = bytes(size - 4) + b"now!"
        for offset in range(3):
            reply = await asking.ask(Op.WRITE, DIRECTORY, write_in(9, offset, data))
            assert reply.body == size.to_bytes(8, "little") and asking.line.detached == 0
            assert fs.calls[-1] == ("write_now", 9, offset, data)


# -- requests that the kernel repeats ----------------------------------------------------------------

MISSING = errors.NotFound("it is not there")
TWO_NAMES = protocol.RENAME_IN.pack(6) + b"old\0new\0"
REPEATED: dict[str, tuple[int, bytes, Exception, int]] = {
    "unlink": (Op.UNLINK, b"name\0", MISSING, errno.ENOENT),
    "rmdir": (Op.RMDIR, b"name\0", MISSING, errno.ENOENT),
    "rename": (Op.RENAME, TWO_NAMES, MISSING, errno.ENOENT),
}
"""Request → opcode, body, what it raises when it was carried out before, and the errno of that where it is not repeated."""


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("found", [True, False])
async def test_a_change_that_is_repeated_may_have_been_made(name: str, found: bool) -> None:
    """A daemon that has died may have made it, and its answer never came. Where that cannot be, it is an error as usual."""
    opcode, body, raised, number = REPEATED[name]
    fs = Noted()
    fs.there = found
    fs.fails[name] = raised
    async with writing(fs) as asking:
        assert (await asking.ask(opcode, DIRECTORY, body)).error == number
        reply = await asking.reply(asking.send(opcode, DIRECTORY, body, unique=777 | protocol.RESENT))
        made = found or name in ("unlink", "rmdir")
        assert reply.error == (0 if made else errno.ENOENT)
        fs.fails[name] = errors.CacheUnusable("another failure")
        reply = await asking.reply(asking.send(opcode, DIRECTORY, body, unique=779 | protocol.RESENT))
        assert reply.error == errno.EIO
        del fs.fails[name]
        reply = await asking.reply(asking.send(opcode, DIRECTORY, body, unique=781 | protocol.RESENT))
        assert not reply.error


@pytest.mark.parametrize(
    ("op", "body", "length"),
    [
        (Op.MKDIR, protocol.MKDIR_IN.pack(0o755, 0) + b"name\0", ENTRY_BYTES),
        (Op.MKNOD, protocol.MKNOD_IN.pack(0o100644, 0, 0, 0) + b"name\0", ENTRY_BYTES),
        (Op.RENAME2, protocol.RENAME2_IN.pack(6, 1, 0) + b"o\0n\0", 0),
    ],
)
async def test_the_filesystem_is_told_that_a_change_is_repeated(op: Op, body: bytes, length: int) -> None:
    async with writing(fs := Noted()) as asking:
        for unique in (777, 777 | protocol.RESENT):
            reply = await asking.reply(asking.send(op, DIRECTORY, body, unique=unique))
            assert not reply.error and len(reply.body) == length
        assert ["again" in arguments for _, *arguments in fs.calls] == [False, True]


async def test_a_create_that_is_repeated_takes_what_it_may_have_made() -> None:
    async with writing(fs := Noted()) as asking:
        body = create_in(b"name", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for unique in (777, 777 | protocol.RESENT):
            assert not (await asking.reply(asking.send(Op.CREATE, DIRECTORY, body, unique=unique))).error
        asked = [flags for called, _, _, flags, *_ in fs.calls if called == "create"]
        assert asked == [os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.O_WRONLY | os.O_CREAT]

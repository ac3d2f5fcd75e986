"""INIT: what is agreed with kernels that we have, had, and will have."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.base.errors import MountError
from cachefs.config.config import Config
from cachefs.fuse import connection, native_backend, protocol
from cachefs.fuse.native_backend import (
    MAX_PAGES,
    MAX_WRITE,
    WANTED,
    WANTED_TO_WRITE,
    Device,
    Negotiated,
    negotiate,
)
from cachefs.fuse.protocol import Init, Op
from tests.fuse.kernel import request

EVERYTHING = (1 << 64) - 1
MODERN = int(WANTED) | 1 << 3 | 1 << 36
OLD = int(WANTED) & 0xFFFFFFFF & ~Init.INIT_EXT


def init(major: int, minor: int, flags: int, readahead: int = 131072, unique: int = 2) -> bytes:
    """As a kernel of that version says it: the structure grew in 7.36."""
    body = protocol.INIT_IN.pack(major, minor, readahead, flags & 0xFFFFFFFF)
    if (major, minor) >= (7, 36):
        body += protocol.INIT_IN_FLAGS2.pack(flags >> 32) + bytes(44)
    return request(Op.INIT, unique, 0, body)


class Answer:
    def __init__(self, reply: bytes) -> None:
        self.length, self.error, self.unique = protocol.OUT_HEADER.unpack_from(reply)
        assert self.length == len(reply) == 80
        fields = protocol.INIT_OUT.unpack_from(reply, protocol.OUT_HEADER.size)
        self.major, self.minor, self.readahead, flags = fields[:4]
        self.background, self.congestion, self.max_write, self.time_gran, self.max_pages = fields[4:9]
        self.flags = flags | fields[10] << 32
        self.stack_depth, self.timeout = fields[11:13]


def ask(request: bytes, depth: int = 1) -> tuple[Answer, Negotiated | None]:
    reply, agreed = negotiate(request, depth)
    return Answer(reply), agreed


@pytest.mark.parametrize(
    ("minor", "flags", "spoken", "passthrough"),
    [
        (31, OLD, 31, False),  # Linux 5.4
        (34, OLD, 34, False),
        (36, OLD, 36, False),  # has room for the upper flags, and does not announce them
        (39, MODERN & ~Init.PASSTHROUGH, 39, False),
        (40, MODERN, 40, True),  # Linux 6.9
        (45, MODERN, 45, True),
        (99, MODERN, 45, True),
        (45, EVERYTHING, 45, True),
    ],
)
def test_versions(minor: int, flags: int, spoken: int, passthrough: bool) -> None:
    answer, agreed = ask(init(7, minor, flags))
    assert agreed is not None
    assert (answer.major, answer.minor, answer.error, answer.unique) == (7, spoken, 0, 2)
    assert agreed == Negotiated(spoken, Init(answer.flags))
    assert agreed.passthrough is passthrough
    assert answer.stack_depth == (1 if passthrough else 0)
    assert not answer.flags & ~flags
    assert not answer.flags & ~int(WANTED)
    assert answer.time_gran == 1  # nanoseconds
    assert answer.readahead == 131072
    assert 0 < answer.congestion <= answer.background
    assert answer.max_write >= 4096
    assert answer.timeout == 0


def test_a_mount_that_can_be_written_agrees_on_more() -> None:
    reply, agreed = negotiate(init(7, 45, EVERYTHING), 1, writable=True)
    answer = Answer(reply)
    assert agreed is not None
    assert answer.flags == int(WANTED_TO_WRITE)
    assert answer.flags & ~int(WANTED) == Init.ATOMIC_O_TRUNC | Init.HANDLE_KILLPRIV_V2
    assert answer.max_write == MAX_WRITE == MAX_PAGES * 4096
    # WRITEBACK_CACHE: the kernel would keep what close is to bring to the store.
    assert not answer.flags & 1 << 16


def test_a_mount_that_cannot_be_written_agrees_on_no_more() -> None:
    answer, _ = ask(init(7, 45, EVERYTHING))
    assert answer.flags == int(WANTED)
    assert answer.max_write == 4096


@pytest.mark.parametrize("writable", [False, True])
def test_a_request_fits_its_buffer(writable: bool) -> None:
    """The kernel refuses to be read (EINVAL) with a buffer that is shorter than what it may have to say."""
    made = Device(os.open("/dev/null", os.O_RDWR), writable=writable)
    room = len(made._buffer) - protocol.IN_HEADER.size - protocol.WRITE_IN.size
    assert room >= (MAX_WRITE if writable else 4096)
    made.close()


@pytest.mark.parametrize(("major", "minor"), [(7, 23), (7, 30), (7, 0), (6, 99), (0, 0)])
def test_a_kernel_that_is_too_old_is_told_in_words(major: int, minor: int) -> None:
    with pytest.raises(MountError, match=rf"{major}\.{minor}.*7\.31") as caught:
        negotiate(init(major, minor, OLD), 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("minor", [0, 5, 99])
def test_a_kernel_of_the_next_version_is_told_ours_and_asks_again(minor: int) -> None:
    answer, agreed = ask(init(8, minor, MODERN))
    assert agreed is None
    assert (answer.major, answer.minor) == (protocol.MAJOR, protocol.MINOR)
    again, agreed = ask(init(7, 45, MODERN, unique=4))
    assert agreed is not None
    assert again.unique == 4


def test_upper_flags_that_are_not_announced_are_noise() -> None:
    """Before 7.36 there is nothing behind the structure, later there may be anything unless INIT_EXT says otherwise."""
    body = protocol.INIT_IN.pack(7, 40, 0, OLD) + b"\xff" * 48
    answer, agreed = ask(request(Op.INIT, 2, 0, body))
    assert agreed is not None
    assert not agreed.passthrough
    assert answer.flags >> 32 == 0


@pytest.mark.parametrize("absent", [flag for flag in Init if flag in WANTED and flag != Init.INIT_EXT])
def test_without_one_flag_all_others_are_agreed(absent: Init) -> None:
    answer, agreed = ask(init(7, 45, MODERN & ~absent))
    assert agreed is not None
    assert answer.flags == int(WANTED) & ~absent
    assert answer.stack_depth == (0 if absent == Init.PASSTHROUGH else 1)


@given(
    st.integers(7, 9),
    st.integers(0, 120),
    st.integers(0, EVERYTHING),
    st.integers(0, 2**32 - 1),
    st.integers(1, 2),
)
@settings(max_examples=200, deadline=None)
def test_nothing_is_agreed_that_was_not_offered(
    major: int, minor: int, flags: int, readahead: int, depth: int
) -> None:
    try:
        answer, agreed = ask(init(major, minor, flags, readahead), depth)
    except MountError:
        # A kernel of before 7.36 that announces what it has no room for is refused, too.
        assert (major, minor) < (7, 31) or ((major, minor) < (7, 36) and flags & Init.INIT_EXT)
        return
    offered = flags if (major, minor) >= (7, 36) and flags & Init.INIT_EXT else flags & 0xFFFFFFFF
    assert not answer.flags & ~offered
    assert (answer.major, answer.minor) <= (7, 45)
    assert (agreed is None) == (major > 7)
    assert answer.stack_depth == (depth if answer.flags & Init.PASSTHROUGH else 0)
    assert answer.readahead <= readahead
    # Without MAX_PAGES the kernel takes 32 pages a request and looks at neither of these.
    assert answer.max_pages == MAX_PAGES or not answer.flags & Init.MAX_PAGES


@given(st.binary(max_size=120) | st.binary(max_size=80).map(lambda body: request(Op.INIT, 2, 0, body)))
@settings(max_examples=200, deadline=None)
def test_a_malformed_beginning_is_a_mount_error(data: bytes) -> None:
    """What `Device.connect` promises to raise is what `backends` catches."""
    try:
        negotiate(data, 1)
    except MountError as exc:
        assert "\n" not in str(exc)


@pytest.mark.parametrize("opcode", [Op.LOOKUP, Op.GETATTR, Op.FORGET, Op.INTERRUPT, 4096])
def test_another_request_first(opcode: int) -> None:
    with pytest.raises(MountError, match="instead of INIT"):
        negotiate(request(opcode, 2, 1, bytes(64)), 1)


# -- over a connection -----------------------------------------------------------------------------


class Pair:
    def __init__(self) -> None:
        self.near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        far.setblocking(False)
        self.device = Device(far.detach())

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.close()
        self.near.close()


def test_shaking_hands() -> None:
    with Pair() as pair:
        pair.near.send(init(7, 44, MODERN))
        agreed = pair.device._negotiate(2)
        assert (agreed.minor, agreed.passthrough) == (44, True)
        assert Answer(pair.near.recv(100)).stack_depth == 2


def test_shaking_hands_twice() -> None:
    with Pair() as pair:
        pair.near.send(init(8, 3, MODERN))
        pair.near.send(init(7, 45, MODERN, unique=4))
        assert pair.device._negotiate(1).minor == 45
        assert [Answer(pair.near.recv(100)).unique for _ in range(2)] == [2, 4]


def test_the_kernel_has_as_long_as_the_whole_mount() -> None:
    assert [field.default for field in fields(Config) if field.name == "mount_timeout"] == [
        connection.MOUNTING_S
    ]


def test_a_kernel_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_backend, "MOUNTING_S", 0.01)
    with Pair() as pair, pytest.raises(MountError, match="did not begin"):
        pair.device._negotiate(1)


def test_a_mount_that_goes_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted connection is readable for ever, and says ENODEV each time."""
    asked = 0

    def readv(fd: int, buffers: object) -> int:
        nonlocal asked
        asked += 1
        assert asked < 100, "asks a dead connection for ever"
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    with Pair() as pair:
        pair.near.send(init(7, 45, MODERN))
        monkeypatch.setattr(os, "readv", readv)
        with pytest.raises(MountError):
            pair.device._negotiate(1)


# -- what a device does with what it reads and writes ------------------------------------------------


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENODEV, None),
        (errno.ECONNABORTED, None),
        (errno.ENOMEM, b"x"),
        (errno.EAGAIN, b""),
        (errno.EINTR, b"x"),
        (errno.ENOENT, b"x"),
    ],
)
def test_reading(number: int, expected: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(number, os.strerror(number))]
    readv = os.readv

    def failing(fd: int, buffers: object) -> int:
        if failures:
            raise failures.pop()
        return readv(fd, buffers)  # type: ignore[arg-type]

    with Pair() as pair:
        pair.near.send(b"x")
        monkeypatch.setattr(os, "readv", failing)
        found = pair.device.read()
        assert (None if found is None else bytes(found)) == expected


@pytest.mark.parametrize(
    "number", [errno.ENOENT, errno.ENODEV, errno.ECONNABORTED, errno.ENOTCONN, errno.EINVAL]
)
def test_writing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int, data: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", failing)
    monkeypatch.setattr(os, "writev", failing)
    with Pair() as pair:
        for parts in ([b"x" * 16], [b"x" * 16, b"y"]):
            if number == errno.EINVAL:
                with pytest.raises(OSError):
                    pair.device.write(*parts)
            else:
                assert pair.device.write(*parts) is False


def test_unanswered_requests_are_repeated_also_by_a_kernel_without_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []

    def write(message: bytes) -> bool:
        _, code, _ = protocol.OUT_HEADER.unpack(message)
        sent.append(code)
        if code == protocol.NOTIFY_INC_EPOCH:
            raise OSError(errno.EINVAL, "")
        return True

    with Pair() as pair:
        monkeypatch.setattr(pair.device, "write", write)
        pair.device.repeat_requests()
    assert sent == [protocol.NOTIFY_INC_EPOCH, protocol.NOTIFY_RESEND]


def test_a_closed_device_stays_closed() -> None:
    with Pair() as pair:
        pair.device.close()
        fd = os.open("/dev/null", os.O_RDONLY)  # takes the number that was freed
        pair.device.close()
        os.close(fd)


# -- the end ---------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """What closing did."""

    unmounted: list[tuple[Path, int]]
    aborted: list[str]


@pytest.mark.parametrize(
    ("attached", "number", "there", "gone", "expected"),
    [
        ("/mnt", "0:57", "0:57", "", Ended([(Path("/mnt"), 3)], [])),
        ("/mnt", "0:57", "0:58", "", Ended([], ["0:57"])),  # another mount lies over it, or in its place
        ("/mnt", "0:57", None, "", Ended([], ["0:57"])),  # unmounted lazily
        ("/mnt", "0:57", "0:57", "read", Ended([], [])),  # another mount has the number now
        ("/mnt", "0:57", "0:57", "unread", Ended([], [])),
        (
            "/mnt",
            "0:57",
            None,
            "unread",
            Ended([], []),
        ),  # unmounted, and the number is not known to be ours
        ("/mnt", "0:57", "0:57", "aborted", Ended([(Path("/mnt"), 2)], [])),
        ("/mnt", "0:57", "0:58", "aborted", Ended([], [])),
        ("/mnt", "", None, "", Ended([(Path("/mnt"), 3)], [])),  # attached, and not found
        (None, "", "0:57", "", Ended([], [])),  # never attached
    ],
)
def test_closing_unmounts_what_is_ours(
    attached: str | None,
    number: str,
    there: str | None,
    gone: str,
    expected: Ended,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = Ended([], [])

    monkeypatch.setattr(connection, "umount", lambda path, flags: done.unmounted.append((path, flags)))
    monkeypatch.setattr(connection, "abort", done.aborted.append)
    monkeypatch.setattr(connection, "mount_at", lambda _: there and SimpleNamespace(device=there))
    with Pair() as pair:
        if gone == "unread":
            pair.near.close()  # what poll says of it then, it says of a connection that has ended
        elif gone:
            monkeypatch.setattr(os, "readv", refuse)
            assert pair.device.read() is None
        if gone == "aborted":
            monkeypatch.setattr(os, "statvfs", not_connected)
        else:
            monkeypatch.setattr(os, "statvfs", lambda _: None)
        pair.device._attached, pair.device.number = attached and Path(attached), number  # type: ignore[assignment]
        pair.device.close()
        pair.device.close()
        pair.device.unregister(1)  # too late, and no failure
    assert done == expected


def refuse(*_: object) -> int:
    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))


def not_connected(*_: object) -> int:
    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))


def test_an_abort_of_a_connection_that_is_gone_is_no_failure() -> None:
    connection.abort("0:999999999")
    connection.abort("")

"""What outlives the daemon where a holder keeps its connection (`cachefs.fuse.holder`), and how a daemon takes it over.

The holder's memory file has five parts: what the holder says of deaths, what the daemon has agreed with the kernel, what the
daemon that stands by says of itself, the table of open files, and what is being written (`cachefs.base.shared_memory`). The
table has a record of fixed length for each handle that the kernel has, written before the reply to its OPEN and cleared
before the reply to its RELEASE. A record names the request (`unique`) that it answers. If the kernel repeats that request,
it never got the reply, and does not have the handle. Before the records, the table has the backing ids that are registered.
Readers of a directory need no record: the kernel sends inode and position with each request.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import NamedTuple

import trio

from cachefs.base.errors import MountError
from cachefs.base.linux import end_with_parent
from cachefs.base.shared_memory import SharedMemory
from cachefs.fuse.holder import (
    DEATHS,
    DESCRIPTORS,
    MOUNTPOINT_AT,
    MOUNTPOINT_BYTES,
    RENEW,
    STANDBY,
    STANDBY_AT,
)

log = logging.getLogger(__name__)

FORMAT = 2
"""Of all that a daemon leaves here for the next one."""

_CONNECTION_AT, _CONNECTION = 24, struct.Struct("=IIQd32s")
"""format, minor, flags, longest pause, device number"""

_TABLE_AT = 2 * mmap.PAGESIZE

LOOK_S = 0.05
"""How often is looked for what another process writes here."""

MOST_HANDLES = 65_536
"""Handles with a record, 2 KiB of address space each; only those that were ever in use at once take memory. Others answer
ESTALE after the daemon died. As many backing ids are known, 4 bytes each; a further one keeps its file until the connection
ends. Guessed: more than the open files of any job."""

RECORD_BYTES = 2048
_USED = struct.Struct("=QQ")
"""At the beginning: how many records, and how many backing ids, there is room for so far."""
_HANDLE = struct.Struct("=QQ")
"""A record begins with unique and fh (0: no record). Then comes what it tells of the file."""
_FILE = struct.Struct("=QQqIIHHH")
"""ino, size, mtime_ns, backing id, process, use, volume, bytes of the text, which follows: the key, a zero and the etag."""
_NO_FH = bytes(8)
_BACKING = struct.Struct("=I")  # 0: none
_RECORDS_AT = RECORD_BYTES * -(-(_USED.size + MOST_HANDLES * _BACKING.size) // RECORD_BYTES)
_LENGTH = _RECORDS_AT + MOST_HANDLES * RECORD_BYTES

_SHARED_AT = mmap.PAGESIZE * -(-(_TABLE_AT + _LENGTH) // mmap.PAGESIZE)
"""What files that are being written need (`SharedMemory`)."""


class Held:
    """One for each daemon that a holder has started."""

    def __init__(self, state_fd: int, socket_fd: int) -> None:
        for passed in (state_fd, socket_fd):
            os.set_inheritable(passed, False)
        self.fd = -1  # the connection of the daemon before
        self.open: list[HandleRecord] = []  # its handles
        self.holds = False  # whether the connection outlives this daemon
        self.restarts, self._died_at, self.handed_over = 0, 0.0, 0
        self.pause_s = 0.0  # before this daemon went on
        self._holder = os.getppid()
        self._socket = socket.socket(fileno=socket_fd)
        if os.fstat(state_fd).st_size < _TABLE_AT:
            os.ftruncate(state_fd, _TABLE_AT)
        self._state = mmap.mmap(state_fd, _TABLE_AT)
        self._state_fd = state_fd

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Held | None:
        """None without a holder. No child inherits anything of it."""
        text = environ.pop(DESCRIPTORS, "")
        if text and "NOTIFY_SOCKET" in environ:
            end_with_parent()  # a service manager starts another holder, whose daemon goes on with the same connection
        try:
            state_fd, socket_fd = map(int, text.split(","))
            return cls(state_fd, socket_fd)
        except (ValueError, OSError):  # none, or a variable that was left in the environment
            return None

    def stand_by(self, version: str) -> None:
        """Say that this process could go on, if it understands what is here; otherwise it ends."""
        (found,) = struct.unpack_from("=I", self._state, _CONNECTION_AT)
        STANDBY.pack_into(self._state, STANDBY_AT, 0, FORMAT, version.encode()[:40])
        struct.pack_into("=I", self._state, STANDBY_AT, os.getpid())  # last: a reader waits for it
        if found not in (0, FORMAT):
            log.error("this version cannot go on with a mount of state %d: it knows %d", found, FORMAT)
            os._exit(1)

    def wait(self) -> None:
        """Return when this daemon is to begin. Ends the process if the holder has ended instead."""
        told, fds, _, _ = socket.recv_fds(self._socket, 16, 1)
        if not told:
            os._exit(0)
        for fd in fds:
            os.set_inheritable(fd, False)
            self.fd, self.holds = fd, True
        self.restarts, self._died_at, self.handed_over = DEATHS.unpack_from(self._state)
        self.table = HandleTable(self._state_fd, _TABLE_AT)
        self.open = list(self.table.records())
        self.memory = SharedMemory(self._state_fd, _SHARED_AT)
        os.close(self._state_fd)

    @property
    def taking_over(self) -> bool:
        """Whether this daemon goes on with the connection of another one."""
        return self.fd >= 0

    @property
    def holder(self) -> int:
        """The process id of the holder, 0 if it has died."""
        return self._holder if self._holder == os.getppid() else 0

    # -- the connection ----------------------------------------------------------------------------

    def hold(self, fd: int, mountpoint: Path, number: str, minor: int, flags: int) -> None:
        """From now on the connection `fd`, made by this daemon, outlives it."""
        path = os.fsencode(mountpoint)
        if len(path) >= MOUNTPOINT_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(mountpoint))
        self._state[MOUNTPOINT_AT : MOUNTPOINT_AT + len(path) + 1] = path + b"\0"
        _CONNECTION.pack_into(self._state, _CONNECTION_AT, FORMAT, minor, flags, 0.0, number.encode())
        socket.send_fds(self._socket, [b"/dev/fuse"], [fd])
        self.holds = True

    def agreed(self) -> tuple[str, int, int]:
        """The mount's device number, protocol minor version and flags."""
        _, minor, flags, _, number = _CONNECTION.unpack_from(self._state, _CONNECTION_AT)
        return number.rstrip(b"\0").decode(), minor, flags

    def status(self) -> dict[str, int | float]:
        """For `cachefs status`."""
        return {
            "pid": self.holder,
            "restarts": self.restarts,
            "handed_over": self.handed_over,
            "pause_s": self.pause_s,
            "longest_pause_s": self.longest_pause_s,
        }

    # -- the daemon that stands by -------------------------------------------------------------------

    async def renewed(self, within_s: float) -> str:
        """Have another daemon stand by, as it is installed now; its version. Raises `MountError` if it cannot go on, or does
        not say within `within_s` that it could."""
        if not self.holder:
            raise MountError("the process that would start another daemon has died: umount, and mount again")
        before = STANDBY.unpack_from(self._state, STANDBY_AT)[0]
        os.kill(self.holder, RENEW)
        with trio.move_on_after(within_s):
            while True:
                pid, known, version = STANDBY.unpack_from(self._state, STANDBY_AT)
                if pid not in (0, before):
                    break
                await trio.sleep(LOOK_S)
            if not known:
                raise MountError("what is installed now does not start: cachefs logs says why")
            if known != FORMAT:
                raise MountError(
                    f"version {_text(version)} cannot go on with this mount's state ({FORMAT}, it knows {known}): "
                    "umount, and mount again"
                )
            return _text(version)
        raise MountError(
            f"what is installed now was not ready within {within_s:g} s: cachefs logs may say why; the mount goes on"
        )

    # -- pauses ------------------------------------------------------------------------------------

    @property
    def longest_pause_s(self) -> float:
        """From a death until the next daemon answered."""
        pause: float = _CONNECTION.unpack_from(self._state, _CONNECTION_AT)[3]
        return pause

    def answering(self) -> None:
        """This daemon, which has taken over, has begun to answer."""
        found, minor, flags, longest, number = _CONNECTION.unpack_from(self._state, _CONNECTION_AT)
        self.pause_s = pause = time.monotonic() - self._died_at
        log.info("the kernel is answered again after %.2f s", pause)
        _CONNECTION.pack_into(self._state, _CONNECTION_AT, found, minor, flags, max(longest, pause), number)


def _text(version: bytes) -> str:
    return version.rstrip(b"\0").decode()


# -- open files ------------------------------------------------------------------------------------


class HandleRecord(NamedTuple):
    """`volume` is the index of the mount's volume that the object is in. `backing_id` is 0 without passthrough. `use` is
    `READS`, `READS_WRITTEN` or `WRITES`; `process` has opened it to write (0: unknown)."""

    fh: int
    unique: int
    ino: int
    size: int
    mtime_ns: int
    backing_id: int
    process: int
    use: int
    volume: int
    key: str
    etag: str


READS, READS_WRITTEN, WRITES = range(3)
"""A handle was opened to read a version of the store, to read what is being written, or to write."""


def described(
    ino: int,
    size: int,
    mtime_ns: int,
    backing_id: int,
    process: int,
    use: int,
    volume: int,
    key: str,
    etag: str,
) -> bytes:
    """What a record tells of an open file; b"" if its name is too long for one. See `HandleRecord`."""
    text = f"{key}\0{etag}".encode("utf-8", "surrogatepass")
    if _HANDLE.size + _FILE.size + len(text) > RECORD_BYTES:
        log.debug("no record of the open file %s: its name is too long", key)
        return b""
    return _FILE.pack(ino, size, mtime_ns, backing_id, process, use, volume, len(text)) + text


class HandleTable:
    """The table at `offset` (a multiple of the page size) of the file `fd`, which it makes long enough."""

    def __init__(self, fd: int, offset: int) -> None:
        if os.fstat(fd).st_size < offset + _LENGTH:
            os.ftruncate(fd, offset + _LENGTH)  # sparse
        self._memory = mmap.mmap(fd, _LENGTH, offset=offset)
        self._used, self._backings_used = _USED.unpack_from(self._memory)
        self._slots: dict[int, int] = {}  # fh → where its record is
        self._free: list[int] = []  # where a record was: used again first, since its page is there
        self._backing_slots: dict[int, int] = {}
        self._backing_free: list[int] = []

    # -- what the daemon before has left -------------------------------------------------------------

    def records(self) -> Iterator[HandleRecord]:
        """Those of the daemon before. Each has to be kept (it is, unless it is dropped). Once, before anything is added."""
        memory = self._memory
        for at in range(_RECORDS_AT, _RECORDS_AT + self._used * RECORD_BYTES, RECORD_BYTES):
            unique, fh = _HANDLE.unpack_from(memory, at)
            if not fh:
                self._free.append(at)
                continue
            self._slots[fh] = at
            ino, size, mtime_ns, backing, process, use, volume, length = _FILE.unpack_from(
                memory, at + _HANDLE.size
            )
            text_at = at + _HANDLE.size + _FILE.size
            key, _, etag = (
                memory[text_at : text_at + length].decode("utf-8", "surrogatepass").rpartition("\0")
            )
            yield HandleRecord(fh, unique, ino, size, mtime_ns, backing, process, use, volume, key, etag)

    def backing_ids(self) -> set[int]:
        """Those that the daemon before had registered. Once, before any is added."""
        found: set[int] = set()
        for at in range(_USED.size, _USED.size + self._backings_used * _BACKING.size, _BACKING.size):
            (number,) = _BACKING.unpack_from(self._memory, at)
            if number:
                found.add(number)
                self._backing_slots[number] = at
            else:
                self._backing_free.append(at)
        return found

    # -- handles -----------------------------------------------------------------------------------

    def add(self, fh: int, unique: int, file: bytes) -> None:
        """A record, before the reply with this handle is sent. `file` is what `described` returned."""
        if not self._free and not self._extend():
            return
        at = self._free.pop()
        self._memory[at + _HANDLE.size : at + _HANDLE.size + len(file)] = file
        _HANDLE.pack_into(self._memory, at, unique, fh)  # last: the process may be killed at any instruction
        self._slots[fh] = at

    def _extend(self) -> bool:
        if self._used == MOST_HANDLES:
            return False
        self._free.append(_RECORDS_AT + self._used * RECORD_BYTES)
        self._used += 1
        _USED.pack_into(self._memory, 0, self._used, self._backings_used)
        return True

    def drop(self, fh: int) -> None:
        """The kernel does not have this handle any more, or never had it."""
        at = self._slots.pop(fh, None)
        if at is not None:
            self._memory[at + 8 : at + 16] = _NO_FH
            self._free.append(at)

    # -- backing ids -------------------------------------------------------------------------------

    def registered(self, backing_id: int) -> None:
        if not self._backing_free:
            if self._backings_used == MOST_HANDLES:
                return
            self._backing_free.append(_USED.size + self._backings_used * _BACKING.size)
            self._backings_used += 1
            _USED.pack_into(self._memory, 0, self._used, self._backings_used)
        at = self._backing_free.pop()
        _BACKING.pack_into(self._memory, at, backing_id)
        self._backing_slots[backing_id] = at

    def unregistered(self, backing_id: int) -> None:
        at = self._backing_slots.pop(backing_id, None)
        if at is not None:
            _BACKING.pack_into(self._memory, at, 0)
            self._backing_free.append(at)

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
import hashlib
import logging
import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trio

from cachefs.base import linux
from cachefs.base.errors import MountError
from cachefs.base.linux import end_with_parent
from cachefs.base.shared_memory import SharedMemory
from cachefs.fuse.holder import (
    DEATHS,
    DESCRIPTORS,
    KILLED,
    KILLED_AT,
    MOUNTPOINT_AT,
    MOUNTPOINT_BYTES,
    RENEW,
    STANDBY,
    STANDBY_AT,
)

if TYPE_CHECKING:
    from cachefs.config.config import Config

log = logging.getLogger(__name__)

FORMAT = 3
"""Of all that a daemon leaves here for the next one."""

_CONNECTION_AT, _CONNECTION = 24, struct.Struct("=IIQd32s")
"""format, minor, flags, longest pause, device number"""

_IDENTITY_AT, _IDENTITY_BYTES = KILLED_AT + 8, 16
"""What the mount is of: a digest, zeros before there is a mount."""

_TABLE_AT = 2 * mmap.PAGESIZE

RESENDS_SINCE = (6, 9)
TOO_OLD = "this kernel cannot repeat requests (Linux 6.9 can)"

LOOK_S = 0.05
"""How often is looked for what no event tells: what another process writes here, whether a process has another signal."""

MOST_HANDLES = 65_536
"""Places for records, 2 KiB of address space each; only those that were ever used take memory. Handles without a place
answer ESTALE after the daemon died. As many backing ids are known, 4 bytes each; a further one keeps its file until the
connection ends. A bound of address space: 128 MiB."""

KEPT_PLACES = 4096
"""So many places are used before one is used for another file: a file that is opened again finds its description there.
As many as there are files that the kernel holds without users (`IDLE_BACKINGS`), whose opens cost least: 8 MiB."""

DESCRIPTION_BYTES = 2048
_USED = struct.Struct("=QQ")
"""At the beginning: how many places, and how many backing ids, there is room for so far."""
_FILE = struct.Struct("=QQqIIHHH")
"""A description: ino, size, mtime_ns, backing id, process, use, volume, bytes of the text. The text: the key, a zero, and
the etag."""
_BACKING = struct.Struct("=I")  # 0: none
_HANDLES_AT = mmap.PAGESIZE * -(-(_USED.size + MOST_HANDLES * _BACKING.size) // mmap.PAGESIZE)
"""Two words for each place, unique and fh (0: no record), side by side: an open changes these alone."""
_FILES_AT = _HANDLES_AT + MOST_HANDLES * 16
_LENGTH = _FILES_AT + MOST_HANDLES * DESCRIPTION_BYTES

_SHARED_AT = mmap.PAGESIZE * -(-(_TABLE_AT + _LENGTH) // mmap.PAGESIZE)
"""What files that are being written need (`SharedMemory`)."""


def why_not(config: Config) -> str:
    """Why no mount with this configuration can outlive its daemon here; "" if one may."""
    if not config.restart:
        return "it was made with --no-restart"
    if config.descriptor is not None:
        return "another process has mounted it"
    if config.zero_open:
        return "with --zero-open the kernel does not say which files are open"
    if config.fuse == "pyfuse3":
        return "the FUSE backend is pyfuse3 (as asked)"
    if os.geteuid():
        return "only a mount that root makes outlives its daemon"
    if linux.release() < RESENDS_SINCE:
        return TOO_OLD
    return ""


class Agreed(NamedTuple):
    """What a connection was negotiated to: the mount's device number, the protocol's minor version, and flags."""

    number: str
    minor: int
    flags: int


class Held:
    """One for each daemon that a holder has started."""

    def __init__(self, state_fd: int, socket_fd: int) -> None:
        for passed in (state_fd, socket_fd):
            os.set_inheritable(passed, False)
        self.fd = -1  # the connection of the daemon before
        self.open: list[tuple[int, HandleRecord]] = []  # its handles, and where in the table they are
        self.holds = False  # whether the connection outlives this daemon
        self.restarts, self._died_at, self.handed_over = 0, 0.0, 0
        self.killed = False  # the daemon before, by SIGKILL
        self._identity = bytes(_IDENTITY_BYTES)
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

    def stand_by(self, version: str, identity: str) -> None:
        """Say that this process could go on, if it understands what is here, and if the mount is of the same `identity`;
        otherwise it ends."""
        self._identity = hashlib.blake2b(identity.encode(), digest_size=_IDENTITY_BYTES).digest()
        before = self._state[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES]
        (found,) = struct.unpack_from("=I", self._state, _CONNECTION_AT)
        if found == FORMAT and before != self._identity:
            log.error(
                "the configuration has other sources, another cache directory or block size than the mount: no daemon goes "
                "on with it until they are as before"
            )
            os._exit(1)  # without a word: the daemon that asks for this one goes on itself
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
        self.killed = self.taking_over and KILLED.unpack_from(self._state, KILLED_AT)[0]
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
        self._state[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES] = self._identity
        _CONNECTION.pack_into(self._state, _CONNECTION_AT, FORMAT, minor, flags, 0.0, number.encode())
        socket.send_fds(self._socket, [b"/dev/fuse"], [fd])
        self.holds = True

    def agreed(self) -> Agreed:
        """What the daemon that negotiated has written down."""
        _, minor, flags, _, number = _CONNECTION.unpack_from(self._state, _CONNECTION_AT)
        return Agreed(number.rstrip(b"\0").decode(), minor, flags)

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
"""A handle was opened to read a version of the origin, to read what is being written, or to write."""


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
    if _FILE.size + len(text) > DESCRIPTION_BYTES:
        log.debug("no record of the open file %s: its name is too long", key)
        return b""
    return _FILE.pack(ino, size, mtime_ns, backing_id, process, use, volume, len(text)) + text


class HandleTable:
    """The table at `offset` (a multiple of the page size) of the file `fd`, which it makes long enough."""

    def __init__(self, fd: int, offset: int) -> None:
        if os.fstat(fd).st_size < offset + _LENGTH:
            os.ftruncate(fd, offset + _LENGTH)  # sparse
        self._memory = mmap.mmap(fd, _LENGTH, offset=offset)
        self._words = memoryview(self._memory)[_HANDLES_AT:_FILES_AT].cast("Q")
        used, self._backings_used = _USED.unpack_from(self._memory)
        # By place: the description that is there, and whether the place waits in `_free`. Place 0 has no record that is ever
        # read: what has no other place may be written there.
        self._descriptions: list[bytes | None] = [None] * max(used, 1)
        self._waits: list[bool] = [True] * max(used, 1)
        self._free: deque[int] = deque()  # the one that was left first comes first; some are in use again
        self._backing_slots: dict[int, int] = {}
        self._backing_free: list[int] = []

    # -- what the daemon before has left -------------------------------------------------------------

    def records(self) -> Iterator[tuple[int, HandleRecord]]:
        """Those of the daemon before, and their places. Each stays until it is dropped. Once, before anything is added."""
        memory, words = self._memory, self._words
        for place in range(1, len(self._waits)):
            unique, fh = words[2 * place : 2 * place + 2]
            if not fh:
                self._free.append(place)
                continue
            self._waits[place] = False
            at = _FILES_AT + place * DESCRIPTION_BYTES
            ino, size, mtime_ns, backing, process, use, volume, length = _FILE.unpack_from(memory, at)
            text = memory[at + _FILE.size : at + _FILE.size + length].decode("utf-8", "surrogatepass")
            key, _, etag = text.rpartition("\0")
            yield (
                place,
                HandleRecord(fh, unique, ino, size, mtime_ns, backing, process, use, volume, key, etag),
            )

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

    def add(self, fh: int, unique: int, description: bytes) -> int:
        """A record, before the reply with this handle is sent: its place, 0 if there is none. `description` is what
        `described` returned."""
        place = self._place() if description else 0
        if place:
            at = _FILES_AT + place * DESCRIPTION_BYTES
            self._memory[at : at + len(description)] = description
            self._descriptions[place] = description
        self._words[2 * place] = unique
        self._words[2 * place + 1] = fh  # last: the process may be killed at any instruction
        return place

    def add_again(self, fh: int, unique: int, description: bytes, place: int) -> bool:
        """`add` at the place of an earlier record of the file, which was dropped. False if its description is not there any
        more. Most opens wait for this."""
        if self._descriptions[place] is not description:
            return False
        self._words[2 * place] = unique
        self._words[2 * place + 1] = fh
        return True

    def _place(self) -> int:
        """A place without a record; 0 if all have one."""
        if len(self._waits) <= KEPT_PLACES and (place := self._new_place()):
            return place
        while self._free:
            place = self._free.popleft()
            self._waits[place] = False
            if not self._words[2 * place + 1]:
                return place
        return self._new_place()

    def _new_place(self) -> int:
        """One that was never used; 0 if there is none."""
        place = len(self._waits)
        if place >= MOST_HANDLES:
            return 0
        self._descriptions.append(None)
        self._waits.append(False)
        _USED.pack_into(self._memory, 0, place + 1, self._backings_used)
        return place

    def drop(self, place: int) -> None:
        """The kernel does not have the handle of this record any more, or never had it."""
        self._words[2 * place + 1] = 0
        if not self._waits[place]:
            self._waits[place] = True
            self._free.append(place)

    # -- backing ids -------------------------------------------------------------------------------

    def registered(self, backing_id: int) -> None:
        if not self._backing_free:
            if self._backings_used == MOST_HANDLES:
                return
            self._backing_free.append(_USED.size + self._backings_used * _BACKING.size)
            self._backings_used += 1
            _USED.pack_into(self._memory, 0, len(self._waits), self._backings_used)
        at = self._backing_free.pop()
        _BACKING.pack_into(self._memory, at, backing_id)
        self._backing_slots[backing_id] = at

    def unregistered(self, backing_id: int) -> None:
        at = self._backing_slots.pop(backing_id, None)
        if at is not None:
            _BACKING.pack_into(self._memory, at, 0)
            self._backing_free.append(at)

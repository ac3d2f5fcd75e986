"""The state that outlives a daemon whose connection a holder keeps (`cachefs.fuse.holder`), and how the next daemon takes it
over.

The holder's memory file has five parts: the holder's counts of deaths, the parameters negotiated with the kernel, the
standby daemon's version, the table of open files, and the files that are being written (`cachefs.base.shared_memory`). The
table has a record of fixed length for each handle of the kernel. It is written before the reply to OPEN and cleared before
the reply to RELEASE. A record has the `unique` of the OPEN that it answers. If the kernel repeats that request, it did not
get the reply, and does not have the handle. Before the records, the table has the registered backing ids. Open directories
need no record, because the kernel sends inode and position with each request.
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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trio

from cachefs.base import linux
from cachefs.base.errors import MountError
from cachefs.base.linux import end_with_parent
from cachefs.base.shared_memory import SharedMemory
from cachefs.fuse import holder

if TYPE_CHECKING:
    from cachefs.config.config import Config

log = logging.getLogger(__name__)

FORMAT = 3
"""Version of the format of everything that a daemon leaves in the memory file for the next one."""

_CONNECTION_AT, _CONNECTION = 24, struct.Struct("=IIQd32s")
"""format, minor version of the protocol, its flags, longest pause in seconds, device number"""

_IDENTITY_AT, _IDENTITY_BYTES = holder.KILLED_AT + 8, 16
"""Digest of the mount's identity (see `stand_by`); zeros before there is a mount."""

_TABLE_AT = 2 * mmap.PAGESIZE

RESENDS_SINCE = (6, 9)
TOO_OLD = "this kernel cannot repeat requests (Linux 6.9 can)"

LOOK_S = 0.05
"""Period of polling for changes without an event: what another process writes to the memory file, further signals of a
process."""

MOST_HANDLES = 65_536
"""Slots for records, 2 KiB of address space each; only those that were ever used take memory. Handles without a slot
answer ESTALE after the daemon died. The table has room for as many backing ids, 4 bytes each; the file of a further one
stays registered until the connection ends. A bound of address space: 128 MiB."""

DISTINCT_SLOTS = 4096
"""So many different slots are used before one is used for another file: a file that is opened again then finds its
description in its slot. As many as idle backing files (`IDLE_BACKINGS`), whose opens are the cheapest: 8 MiB."""

DESCRIPTION_BYTES = 2048
_USED = struct.Struct("=QQ")
"""At the beginning of the table: how many slots for records, and how many for backing ids, were used so far."""
_FILE = struct.Struct("=QQqIIHHH")
"""A description: ino, size, mtime_ns, backing id, process, use, volume, bytes of the text that follows: the key, a zero byte
and the etag."""
_BACKING = struct.Struct("=I")  # a backing id, 0: none
_HANDLES_AT = mmap.PAGESIZE * -(-(_USED.size + MOST_HANDLES * _BACKING.size) // mmap.PAGESIZE)
"""Two words for each slot: unique and fh (0: no record). They lie together, because most opens change only these."""
_FILES_AT = _HANDLES_AT + MOST_HANDLES * 16
_LENGTH = _FILES_AT + MOST_HANDLES * DESCRIPTION_BYTES

_SHARED_AT = mmap.PAGESIZE * -(-(_TABLE_AT + _LENGTH) // mmap.PAGESIZE)
"""Where the state of files that are being written lies (`SharedMemory`)."""


def why_not(config: Config) -> str:
    """The reason why a mount with this configuration cannot outlive its daemon here; "" if it can."""
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
    """The negotiated parameters of a connection: the mount's device number, the protocol's minor version, and flags."""

    number: str
    minor: int
    flags: int


class Handover:
    """The holder's memory file and socket, as seen by a daemon that the holder has started."""

    def __init__(self, state_fd: int, socket_fd: int) -> None:
        for passed in (state_fd, socket_fd):
            os.set_inheritable(passed, False)
        self.fd = -1  # the previous daemon's connection
        # The previous daemon's handles, with their slots in the table.
        self.open: list[tuple[int, HandleRecord]] = []
        self.outlives_daemon = False  # True if the connection outlives this daemon
        self.restarts, self._died_at, self.handed_over = 0, 0.0, 0
        self.killed = False  # True if the previous daemon ended by SIGKILL
        self._identity = bytes(_IDENTITY_BYTES)
        self.pause_s = 0.0  # from the previous daemon's end until this one answered
        self._holder = os.getppid()
        self._socket = socket.socket(fileno=socket_fd)
        if os.fstat(state_fd).st_size < _TABLE_AT:
            os.ftruncate(state_fd, _TABLE_AT)
        self._state = mmap.mmap(state_fd, _TABLE_AT)
        self._state_fd = state_fd

    @classmethod
    def from_environment(cls) -> Handover | None:
        """Open what the holder passed; None without a holder. Children inherit neither the variable nor the descriptors."""
        text = os.environ.pop(holder.DESCRIPTORS, "")
        if text and "NOTIFY_SOCKET" in os.environ:
            # The service manager starts another holder, whose daemon takes over the same connection.
            end_with_parent()
        try:
            state_fd, socket_fd = map(int, text.split(","))
            return cls(state_fd, socket_fd)
        except (ValueError, OSError):  # no variable, or one that is no longer true
            return None

    def stand_by(self, version: str, identity: str) -> None:
        """Announce this process as the standby daemon. Ends the process if it does not know the format of the state, or if
        the mount has another `identity`."""
        self._identity = hashlib.blake2b(identity.encode(), digest_size=_IDENTITY_BYTES).digest()
        before = self._state[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES]
        (found,) = struct.unpack_from("=I", self._state, _CONNECTION_AT)
        if found == FORMAT and before != self._identity:
            log.error(
                "the configuration has other sources, another cache directory or block size than the mount: no daemon goes "
                "on with it until they are as before"
            )
            os._exit(1)  # without an announcement, so that the daemon that asked for this one goes on itself
        holder.STANDBY.pack_into(self._state, holder.STANDBY_AT, 0, FORMAT, version.encode()[:40])
        # Last, because `renewed` waits for it.
        struct.pack_into("=I", self._state, holder.STANDBY_AT, os.getpid())
        if found not in (0, FORMAT):
            log.error("this version cannot go on with a mount of state %d: it knows %d", found, FORMAT)
            os._exit(1)

    def wait(self) -> None:
        """Wait until this daemon is to begin, and read the state that it takes over. Ends the process if the holder ends."""
        message, fds, _, _ = socket.recv_fds(self._socket, 16, 1)
        if not message:
            os._exit(0)
        for fd in fds:
            os.set_inheritable(fd, False)
            self.fd, self.outlives_daemon = fd, True
        self.restarts, self._died_at, self.handed_over = holder.DEATHS.unpack_from(self._state)
        self.killed = self.taking_over and holder.KILLED.unpack_from(self._state, holder.KILLED_AT)[0]
        self.table = HandleTable(self._state_fd, _TABLE_AT)
        self.open = list(self.table.records())
        self.memory = SharedMemory(self._state_fd, _SHARED_AT)
        os.close(self._state_fd)

    @property
    def taking_over(self) -> bool:
        """True if this daemon takes over the connection of another one."""
        return self.fd >= 0

    @property
    def holder(self) -> int:
        """The process id of the holder, 0 if it has died."""
        return self._holder if self._holder == os.getppid() else 0

    # -- the connection ----------------------------------------------------------------------------

    def hold(self, fd: int, mountpoint: Path, number: str, minor: int, flags: int) -> None:
        """Pass the connection `fd`, which this daemon has made, to the holder: it outlives this daemon from now on."""
        path = os.fsencode(mountpoint)
        if len(path) >= holder.MOUNTPOINT_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(mountpoint))
        self._state[holder.MOUNTPOINT_AT : holder.MOUNTPOINT_AT + len(path) + 1] = path + b"\0"
        self._state[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES] = self._identity
        _CONNECTION.pack_into(self._state, _CONNECTION_AT, FORMAT, minor, flags, 0.0, number.encode())
        socket.send_fds(self._socket, [b"/dev/fuse"], [fd])
        self.outlives_daemon = True

    def agreed(self) -> Agreed:
        """The parameters that `hold` recorded, in this daemon or an earlier one."""
        _, minor, flags, _, number = _CONNECTION.unpack_from(self._state, _CONNECTION_AT)
        return Agreed(_text(number), minor, flags)

    def status(self) -> dict[str, int | float]:
        """Counts and pauses for `cachefs status`."""
        return {
            "pid": self.holder,
            "restarts": self.restarts,
            "handed_over": self.handed_over,
            "pause_s": self.pause_s,
            "longest_pause_s": _CONNECTION.unpack_from(self._state, _CONNECTION_AT)[3],
        }

    # -- the standby daemon --------------------------------------------------------------------------

    async def renewed(self, within_s: float) -> str:
        """Have the holder load another standby daemon, of the installed version; returns that version. Raises `MountError`
        if it cannot take over, or has not announced itself within `within_s` seconds."""
        if not self.holder:
            raise MountError("the process that would start another daemon has died: umount, and mount again")
        before = holder.STANDBY.unpack_from(self._state, holder.STANDBY_AT)[0]
        os.kill(self.holder, holder.RENEW)
        with trio.move_on_after(within_s):
            while True:
                pid, known, version = holder.STANDBY.unpack_from(self._state, holder.STANDBY_AT)
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

    def answering(self) -> None:
        """Record the pause, now that this daemon, which has taken over, begins to answer."""
        found, minor, flags, longest, number = _CONNECTION.unpack_from(self._state, _CONNECTION_AT)
        self.pause_s = pause = time.monotonic() - self._died_at
        log.info("the kernel is answered again after %.2f s", pause)
        _CONNECTION.pack_into(self._state, _CONNECTION_AT, found, minor, flags, max(longest, pause), number)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode()


# -- open files ------------------------------------------------------------------------------------


class HandleRecord(NamedTuple):
    """An open file of the previous daemon. `volume` is the index of the mount's volume that the object is in. `backing_id`
    is 0 without passthrough. `use` is `READS`, `READS_WRITTEN` or `WRITES`. `process` opened it for writing (0: unknown)."""

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
"""A handle reads a version of the origin, reads a file that is being written, or writes."""


def describe_handle(
    ino: int, size: int, mtime_ns: int, backing: int, process: int, use: int, volume: int, key: str, etag: str
) -> bytes:
    """The description of an open file for a record, with the fields of `HandleRecord`; b"" if its name is too long."""
    text = f"{key}\0{etag}".encode("utf-8", "surrogatepass")
    if _FILE.size + len(text) > DESCRIPTION_BYTES:
        log.debug("no record of the open file %s: its name is too long", key)
        return b""
    return _FILE.pack(ino, size, mtime_ns, backing, process, use, volume, len(text)) + text


class HandleTable:
    """The table of open files and backing ids, at `offset` (a multiple of the page size) of the file `fd`. It extends the
    file if it is too short."""

    def __init__(self, fd: int, offset: int) -> None:
        if os.fstat(fd).st_size < offset + _LENGTH:
            os.ftruncate(fd, offset + _LENGTH)  # sparse
        self._memory = mmap.mmap(fd, _LENGTH, offset=offset)
        self._words = memoryview(self._memory)[_HANDLES_AT:_FILES_AT].cast("Q")
        used, self._backings_used = _USED.unpack_from(self._memory)
        # By slot: its description, and whether it is in `_free`. Slot 0 is written for records that have no slot, and
        # never read.
        self._descriptions: list[bytes | None] = [None] * max(used, 1)
        self._in_free_list: list[bool] = [True] * max(used, 1)
        # In the order in which they became free; some are in use again (`add_again`).
        self._free: deque[int] = deque()
        self._backing_offsets: dict[int, int] = {}  # backing id → where it lies in `_memory`
        self._free_backing_offsets: list[int] = []

    # -- records of the previous daemon --------------------------------------------------------------

    def records(self) -> Iterator[tuple[int, HandleRecord]]:
        """(slot, record) of the previous daemon's handles. Each stays until it is dropped. To be called once, before
        `add`."""
        memory, words = self._memory, self._words
        for slot in range(1, len(self._in_free_list)):
            unique, fh = words[2 * slot : 2 * slot + 2]
            if not fh:
                self._free.append(slot)
                continue
            self._in_free_list[slot] = False
            at = _FILES_AT + slot * DESCRIPTION_BYTES
            ino, size, mtime_ns, backing, process, use, volume, length = _FILE.unpack_from(memory, at)
            text = memory[at + _FILE.size : at + _FILE.size + length].decode("utf-8", "surrogatepass")
            key, _, etag = text.rpartition("\0")
            yield (
                slot,
                HandleRecord(fh, unique, ino, size, mtime_ns, backing, process, use, volume, key, etag),
            )

    def backing_ids(self) -> set[int]:
        """The backing ids that the previous daemon had registered. To be called once, before `registered`."""
        found: set[int] = set()
        for at in range(_USED.size, _USED.size + self._backings_used * _BACKING.size, _BACKING.size):
            (number,) = _BACKING.unpack_from(self._memory, at)
            if number:
                found.add(number)
                self._backing_offsets[number] = at
            else:
                self._free_backing_offsets.append(at)
        return found

    # -- handles -----------------------------------------------------------------------------------

    def add(self, fh: int, unique: int, description: bytes) -> int:
        """Write the record of a handle, before the reply with the handle is sent. Returns its slot, 0 if there is no free
        one. `description` is what `describe_handle` returned."""
        slot = self._take_slot() if description else 0
        if slot:
            at = _FILES_AT + slot * DESCRIPTION_BYTES
            self._memory[at : at + len(description)] = description
            self._descriptions[slot] = description
        self._words[2 * slot] = unique
        # Last, because the process may be killed between any two instructions.
        self._words[2 * slot + 1] = fh
        return slot

    def add_again(self, fh: int, unique: int, description: bytes, slot: int) -> bool:
        """`add` at the slot of an earlier, dropped record of the same file. False if another description is there by now.
        It is short, because most opens call it."""
        if self._descriptions[slot] is not description:
            return False
        self._words[2 * slot] = unique
        self._words[2 * slot + 1] = fh
        return True

    def _take_slot(self) -> int:
        """A free slot; 0 if there is none."""
        slot = len(self._in_free_list)  # it was never used
        if slot > DISTINCT_SLOTS or slot >= MOST_HANDLES:
            while self._free:
                free = self._free.popleft()
                self._in_free_list[free] = False
                if not self._words[2 * free + 1]:
                    return free
        if slot >= MOST_HANDLES:
            return 0
        self._descriptions.append(None)
        self._in_free_list.append(False)
        _USED.pack_into(self._memory, 0, slot + 1, self._backings_used)
        return slot

    def drop(self, slot: int) -> None:
        """Clear the record of a handle that the kernel does not have, or has released. The slot becomes free."""
        self._words[2 * slot + 1] = 0
        if not self._in_free_list[slot]:
            self._in_free_list[slot] = True
            self._free.append(slot)

    # -- backing ids -------------------------------------------------------------------------------

    def registered(self, backing_id: int) -> None:
        if not self._free_backing_offsets:
            if self._backings_used == MOST_HANDLES:
                return
            self._free_backing_offsets.append(_USED.size + self._backings_used * _BACKING.size)
            self._backings_used += 1
            _USED.pack_into(self._memory, 0, len(self._in_free_list), self._backings_used)
        at = self._free_backing_offsets.pop()
        _BACKING.pack_into(self._memory, at, backing_id)
        self._backing_offsets[backing_id] = at

    def unregistered(self, backing_id: int) -> None:
        at = self._backing_offsets.pop(backing_id, None)
        if at is not None:
            _BACKING.pack_into(self._memory, at, 0)
            self._free_backing_offsets.append(at)

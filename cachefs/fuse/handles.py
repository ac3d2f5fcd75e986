"""Open files in memory that outlives the daemon: what a daemon that takes over a connection has to know of them.

One record of fixed length for each handle that the kernel has, written before the reply to its OPEN and cleared before the
reply to its RELEASE. A record names the request (`unique`) that it answers. If the kernel repeats that request, it never
got the reply, and does not have the handle. Before the records, the table has the backing ids that are registered.

The memory is a file without a name, which a process of its own keeps (`cachefs.fuse.holder`). Readers of a directory need
no record: the kernel sends inode and position with each request.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

log = logging.getLogger(__name__)

MOST_HANDLES = 65_536
"""Handles with a record, 2 KiB of address space each; only those that were ever in use at once take memory. Others answer
ESTALE after the daemon died. Guessed: more than the open files of any job."""

MOST_BACKINGS = 65_536
"""Backing ids that are known, 4 bytes each. A further one keeps its file until the connection ends. Guessed."""

RECORD_BYTES = 2048
_USED = struct.Struct("=QQ")
"""At the beginning: how many records, and how many backing ids, there is room for so far."""
_RECORD = struct.Struct("=QQQQqIHHQ")
"""unique, ino, stable, size, mtime_ns, backing id, volume, bytes of the text, fh (0: no record). The text is the key, a zero
and the etag."""
_FH_AT = _RECORD.size - 8
_NO_FH = bytes(8)
_BACKING = struct.Struct("=I")  # 0: none
_TEXT_BYTES = RECORD_BYTES - _RECORD.size
_RECORDS_AT = RECORD_BYTES * -(-(_USED.size + MOST_BACKINGS * _BACKING.size) // RECORD_BYTES)
_LENGTH = _RECORDS_AT + MOST_HANDLES * RECORD_BYTES


class HandleRecord(NamedTuple):
    """`volume` is the index of the mount's volume that the object is in. `backing_id` is 0 without passthrough."""

    fh: int
    unique: int
    ino: int
    stable: int
    size: int
    mtime_ns: int
    backing_id: int
    volume: int
    key: str
    etag: str


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
            unique, ino, stable, size, mtime_ns, backing, volume, length, fh = _RECORD.unpack_from(memory, at)
            if not fh:
                self._free.append(at)
                continue
            self._slots[fh] = at
            text = memory[at + _RECORD.size : at + _RECORD.size + length]
            key, _, etag = text.decode("utf-8", "surrogatepass").rpartition("\0")
            yield HandleRecord(fh, unique, ino, stable, size, mtime_ns, backing, volume, key, etag)

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

    def add(
        self,
        fh: int,
        unique: int,
        ino: int,
        stable: int,
        size: int,
        mtime_ns: int,
        backing_id: int,
        volume: int,
        key: str,
        etag: str,
    ) -> None:
        """A record, before the reply with this handle is sent: in as few steps as that takes."""
        text = f"{key}\0{etag}".encode("utf-8", "surrogatepass")
        length = len(text)
        if length > _TEXT_BYTES:
            log.debug("no record of the open file %s: its name is too long", key)
            return
        if not self._free and not self._extend():
            return
        at = self._free.pop()
        begin = at + _RECORD.size
        self._memory[begin : begin + length] = text
        # The handle comes last: the process may be killed at any instruction.
        _RECORD.pack_into(
            self._memory, at, unique, ino, stable, size, mtime_ns, backing_id, volume, length, fh
        )
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
            self._memory[at + _FH_AT : at + _FH_AT + 8] = _NO_FH
            self._free.append(at)

    # -- backing ids -------------------------------------------------------------------------------

    def registered(self, backing_id: int) -> None:
        if not self._backing_free:
            if self._backings_used == MOST_BACKINGS:
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

"""Memory that outlives this process, for the next daemon of the mount.

It is a part of a memory file of another process, the mount's holder. It survives the end of this process, but not a reboot.
It has four tables: rows of a database that are not committed yet (`RowLog`), records of dirty files (`FileRecords`), the
ends of dirty files that are in memory (`Tails`), and the time of the last change in each directory (`Times`).

A process may be killed between any two instructions. So each table writes the bytes first, and then one word that makes them
valid: a torn write is never read. One thread at a time uses a table.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

LOG_BYTES = 16 << 20
"""Size of each half of the row log. Derived: half of the rows that may wait for a disk that does not answer."""

MOST_RECORDS, RECORD_BYTES = 16_384, 4096
"""Most dirty files, and the bytes of each record; a key has 1 KiB at most. A bound of memory: 64 MiB, of which a record
takes its part only once it was in use."""

MOST_TAILS, TAIL_BYTES = 1024, 256 << 10
"""Most files whose end is in memory, and the most bytes of such an end (`staging.HELD`). Further ends are written to the
disk at once. A bound of memory: 256 MiB, of which a tail takes only what it holds."""

MOST_TIMES = 16_384
"""Most directories whose last change is stored: 16 bytes each, and about 120 of the process. A bound of memory: 2 MB."""

GIVE_BACK_BYTES = 64 << 10
"""A longer used part is returned to the kernel when it is free. Measured: to return one page and to fault it in again takes
13 µs, which each commit of a few rows would pay."""

MEMORY_KEPT = 2 << 20
"""Memory of freed tails that is not returned to the kernel, for the next ones. Derived: twenty files of 100 KB, as many as
wait to be given to the cache together. Returning the memory of one and having the kernel clear it again takes 0.1 ms."""

_HALF = struct.Struct("=QQ")
"""Head of a half of the row log: its number (the newer half has the larger one), and the number of valid bytes."""
_ROW = struct.Struct("=Ii")
"""Head of a row: lengths of its key and of its value (-1: the row is deleted), which follow."""

_RECORD = struct.Struct("=Q32sQq")
"""Head of a record: its number (0: no record; of two with one name the larger is valid), its name, the length of its JSON,
which follows, and mtime_ns."""
_MTIME_AT = 48

_TAIL, _TAIL_STRIDE = struct.Struct("=Q32sQQ"), 64
"""Head of a tail: 1 if it is in use, the file's name, the offset of the bytes in the file, and their number."""
_LENGTH_AT = 48

_WORD = struct.Struct("=Q")
_SIGNED = struct.Struct("=q")

_HALVES_AT = mmap.PAGESIZE
_RECORDS_AT = _HALVES_AT + 2 * LOG_BYTES
_TAIL_HEADS_AT = _RECORDS_AT + MOST_RECORDS * RECORD_BYTES
_TAILS_AT = _TAIL_HEADS_AT + MOST_TAILS * _TAIL_STRIDE
_USED_AT = 2 * _HALF.size
"""Offset of the number of records that were ever in use: the next daemon does not read the pages behind them."""

_TIMES_AT = _TAILS_AT + MOST_TAILS * TAIL_BYTES
"""Offset of the times: two words each, inode (0: none) and time (0: unknown)."""

_TIMES_BYTES = MOST_TIMES * 2 * _WORD.size

LENGTH = _TIMES_AT + _TIMES_BYTES


class SharedMemory:
    """The tables, from `offset` (a multiple of the page size) on in the file `fd`, which is extended if it is too short."""

    def __init__(self, fd: int, offset: int) -> None:
        if os.fstat(fd).st_size < offset + LENGTH:
            os.ftruncate(fd, offset + LENGTH)
        memory = mmap.mmap(fd, LENGTH, offset=offset)
        self.rows = RowLog(memory)
        self.records = FileRecords(memory)
        self.tails = Tails(memory)
        self.times = Times(memoryview(memory)[_TIMES_AT:LENGTH])


def _give_back(memory: mmap.mmap, at: int, length: int) -> None:
    """Return the pages of [at, at + length) to the kernel, if they are many. `at` is a multiple of the page size."""
    if length > GIVE_BACK_BYTES:
        memory.madvise(mmap.MADV_REMOVE, at, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE)


class RowLog:
    """Rows that are written and not committed. One half takes new rows while those of the other one are being committed. A
    group of rows that is appended is read as a whole or not at all. When a half is full, further rows are not stored: a kill
    before their commit loses them, as without this log. Rows are stored again once all unstored ones are committed."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        numbers = [self._head(half)[0] for half in (0, 1)]
        self._active = int(numbers[1] > numbers[0])
        self._length = self._head(self._active)[1]
        self._full = self._missing = False  # `_missing`: some rows are neither stored nor in a commit

    def _head(self, half: int) -> tuple[int, int]:
        number, length = _HALF.unpack_from(self._memory, half * _HALF.size)
        return number, length

    def _set_length(self, half: int, length: int) -> None:
        _WORD.pack_into(self._memory, half * _HALF.size + 8, length)

    def found(self) -> Iterator[tuple[bytes, bytes | None]]:
        """(key, value) of the rows that the previous process left, in their order."""
        for half in (1 - self._active, self._active):
            at = _HALVES_AT + half * LOG_BYTES
            end = at + self._head(half)[1]
            while at < end:
                word, value = _ROW.unpack_from(self._memory, at)
                at += _ROW.size
                key, at = self._memory[at : at + word], at + word
                yield key, None if value < 0 else self._memory[at : at + value]
                at += max(value, 0)

    def clear(self) -> None:
        """Remove all rows: those that were found are committed."""
        for half in (1 - self._active, self._active):  # the older one first
            self._empty(half)
        self._length = 0

    def _empty(self, half: int) -> None:
        length = self._head(half)[1]
        self._set_length(half, 0)
        _give_back(self._memory, _HALVES_AT + half * LOG_BYTES, length)

    def append(self, rows: Mapping[bytes, bytes | None]) -> None:
        """Store a group of rows."""
        pieces: list[bytes] = []
        for word, value in rows.items():
            pieces += [_ROW.pack(len(word), -1 if value is None else len(value)), word, value or b""]
        data = b"".join(pieces)
        end = self._length + len(data)
        self._full |= end > LOG_BYTES
        if self._full:
            self._missing = True
            return
        at = _HALVES_AT + self._active * LOG_BYTES
        self._memory[at + self._length : at + end] = data
        self._length = end
        self._set_length(self._active, end)

    def swap(self) -> None:
        """Begin the commit of the rows that were appended: new rows go to the other half, unless it has the rows of a failed
        commit. Then a row may be found after its commit; writing it again changes nothing."""
        other = 1 - self._active
        if self._full:
            # The commit has newer rows than these, which the next process would write over them.
            # The newer half first, so that its rows are not found without the older ones.
            self._empty(self._active)
            self._empty(other)
            self._length, self._missing = 0, False
            return
        if self._head(other)[1]:
            return
        number, _ = self._head(self._active)
        self._active, self._length = other, 0
        _WORD.pack_into(self._memory, other * _HALF.size, number + 1)

    def committed(self) -> None:
        """End the commit: its rows are in the database."""
        self._empty(1 - self._active)
        self._full = self._missing


class FileRecords:
    """JSON objects by name (32 characters), each with an mtime that is changed in place."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        (self._used,) = _WORD.unpack_from(memory, _USED_AT)
        self._places: dict[str, int] = {}
        self._free: list[int] = []
        self._number = 0

    def found(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """Name → (mtime_ns, object) of the records that the previous process left. Called once, before any `put`."""
        numbers: dict[str, int] = {}
        found: dict[str, tuple[int, dict[str, Any]]] = {}
        for at in range(_RECORDS_AT, _RECORDS_AT + self._used * RECORD_BYTES, RECORD_BYTES):
            number, text, length, mtime_ns = _RECORD.unpack_from(self._memory, at)
            name = text.decode()
            if number <= numbers.get(name, 0):  # no record, or one that was being replaced
                self._forget(at)
                continue
            if name in self._places:
                self._forget(self._places[name])
            start = at + _RECORD.size
            numbers[name], self._places[name] = number, at
            found[name] = mtime_ns, json.loads(self._memory[start : start + length])
            self._number = max(self._number, number)
        return found

    def _forget(self, at: int) -> None:
        _WORD.pack_into(self._memory, at, 0)
        self._free.append(at)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def put(self, name: str, mtime_ns: int, row: Mapping[str, Any]) -> bool:
        """Write or replace a record. False if it is too long or there are too many; then there is no record of that name."""
        data = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        if _RECORD.size + len(data) > RECORD_BYTES or not (self._free or self._extend()):
            self.drop(name)
            return False
        at, before = self._free.pop(), self._places.get(name)
        self._number += 1
        _RECORD.pack_into(self._memory, at, 0, name.encode(), len(data), mtime_ns)
        self._memory[at + _RECORD.size : at + _RECORD.size + len(data)] = data
        _WORD.pack_into(self._memory, at, self._number)
        self._places[name] = at
        if before is not None:
            self._forget(before)
        return True

    def _extend(self) -> bool:
        if self._used == MOST_RECORDS:
            return False
        self._free.append(_RECORDS_AT + self._used * RECORD_BYTES)
        self._used += 1
        _WORD.pack_into(self._memory, _USED_AT, self._used)
        return True

    def touch(self, name: str, mtime_ns: int) -> None:
        """Change the mtime of a record, if it exists."""
        at = self._places.get(name)
        if at is not None:
            _SIGNED.pack_into(self._memory, at + _MTIME_AT, mtime_ns)

    def drop(self, name: str) -> None:
        at = self._places.pop(name, None)
        if at is not None:
            self._forget(at)


class Tail:
    """The bytes of a file from the offset `start` on, with methods of a bytearray."""

    def __init__(self, tails: Tails, index: int, name: str, start: int, length: int, in_use: int = 0) -> None:
        """`in_use` bytes of its memory are in use already, left by an earlier tail, and are returned with its own."""
        self.name, self.start = name, start
        self._tails, self._index = tails, index
        self._memory = tails.memory
        self._head, self._at = _TAIL_HEADS_AT + index * _TAIL_STRIDE, _TAILS_AT + index * TAIL_BYTES
        self._length, self._most = length, max(length, in_use)

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return self._memory[self._at : self._at + self._length]

    def view(self) -> memoryview:
        """The bytes, until the next change."""
        return memoryview(self._memory)[self._at : self._at + self._length]

    def _resize(self, length: int) -> None:
        self._length, self._most = length, max(self._most, length)
        _WORD.pack_into(self._memory, self._head + _LENGTH_AT, length)

    def extend(self, data: bytes) -> None:
        end = self._length + len(data)
        self._memory[self._at + self._length : self._at + end] = data
        self._resize(end)

    def __delitem__(self, cut: slice) -> None:
        """Remove the bytes from `cut.start` to the end."""
        self._resize(min(cut.start, self._length))

    def __setitem__(self, where: slice, data: bytes | bytearray | memoryview) -> None:
        """Overwrite bytes. `where` begins at the end of the tail or before, and may extend it."""
        self._memory[self._at + where.start : self._at + where.stop] = data
        if where.stop > self._length:
            self._resize(where.stop)

    def release(self) -> None:
        """Free it for another file."""
        _WORD.pack_into(self._memory, self._head, 0)
        if not self._tails.keeps(self._index, self._most):
            _give_back(self._memory, self._at, self._most)
        self._tails.free.append(self._index)


class Tails:
    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.free = list(range(MOST_TAILS - 1, -1, -1))  # a stack: the pages of the last one are in memory
        self._kept: dict[int, int] = {}  # index of a free tail → bytes of memory that it has kept

    def found(self) -> list[Tail]:
        """The tails that the previous process left. Called once, before any `make`. The caller releases each."""
        found = []
        for index in range(MOST_TAILS):
            used, name, start, length = _TAIL.unpack_from(self.memory, _TAIL_HEADS_AT + index * _TAIL_STRIDE)
            if used:
                found.append(Tail(self, index, name.decode(), start, length))
        taken = {tail._index for tail in found}
        self.free = [index for index in self.free if index not in taken]
        return found

    def make(self, name: str, start: int, data: bytes = b"") -> Tail | None:
        """A tail for the file of this name (32 characters) that holds `data`; None if there are too many. After a kill it is
        found with all of `data`, or not at all."""
        if not self.free:
            return None
        index = self.free.pop()
        head, at = _TAIL_HEADS_AT + index * _TAIL_STRIDE, _TAILS_AT + index * TAIL_BYTES
        _TAIL.pack_into(self.memory, head, 0, name.encode(), start, len(data))
        self.memory[at : at + len(data)] = data
        _WORD.pack_into(self.memory, head, 1)
        return Tail(self, index, name, start, len(data), self._kept.pop(index, 0))

    def keeps(self, index: int, length: int) -> bool:
        """True if `length` bytes of memory of a tail that becomes free are kept for the next one, within `MEMORY_KEPT`."""
        if sum(self._kept.values()) + length > MEMORY_KEPT:
            return False
        self._kept[index] = length
        return True


class Times:
    """Inode of a directory → time of the last change in it, in ns since the epoch. The least recently changed directory is
    evicted. Without `memory` they end with this process."""

    def __init__(self, memory: memoryview | None = None) -> None:
        self._words = (memoryview(bytearray(_TIMES_BYTES)) if memory is None else memory).cast("Q")
        self._places: OrderedDict[int, int] = OrderedDict()
        for place in range(MOST_TIMES):  # read the times of the previous daemon
            if not (ino := self._words[2 * place]):
                break
            self._places[ino] = place

    def get(self, ino: int) -> int | None:
        place = self._places.get(ino)
        return None if place is None else self._words[2 * place + 1] or None

    def put(self, ino: int, time_ns: int) -> None:
        place = self._places.pop(ino, None)
        if place is None and len(self._places) == MOST_TIMES:
            place = self._places.popitem(last=False)[1]
        self._places[ino] = place = len(self._places) if place is None else place
        if self._words[2 * place] != ino:
            self._words[2 * place + 1] = 0  # so that a kill around the next line leaves no wrong time
            self._words[2 * place] = ino
        self._words[2 * place + 1] = time_ns

    def drop(self, ino: int) -> None:
        """Forget the time of a directory, whose attributes are stored elsewhere from now on."""
        if (place := self._places.get(ino)) is not None:
            self._words[2 * place + 1] = 0

"""Inode numbers: they are given out in ascending order, and none twice.

A number belongs to one file or directory as long as that exists, also when it is renamed. The kernel, programs and the
holder of the connection may remember a number for longer than this process lives, so numbers are reserved on the disk before
they are given out.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachefs.base.behind import WriteBehind

ROOT = 1
NUMBER_BYTES = 6

RESERVED = 1 << 20
"""Numbers of one reservation. The next reservation is written when half of them are left. Derived: more than five times the
rows that may wait for the disk (`behind.MOST_ROWS`), so it is on the disk before its first number is given out."""

START_BITS = 46
"""The first number of a new database is random, of so many bits, so that it does not repeat numbers of a lost one."""

_NEXT = b"next inode"


def inode_key(ino: int) -> bytes:
    return ino.to_bytes(NUMBER_BYTES, "big")


class Numbers:
    """The source of inode numbers. Opening it waits for the disk. One thread at a time may call `next`."""

    def __init__(self, database: WriteBehind) -> None:
        self._database = database
        stored = database.get("state", _NEXT)
        self._next = self._end = (
            ROOT + 1 + secrets.randbits(START_BITS) if stored is None else int.from_bytes(stored, "big")
        )
        self.reserve()
        database.flush()

    def next(self) -> int:
        """A number that was not given out before."""
        number = self._next
        self._next += 1
        if self._end - number < RESERVED // 2:
            self.reserve()
        return number

    def reserve(self) -> None:
        """Reserve more numbers."""
        self._end += RESERVED
        self._database.write([("state", _NEXT, inode_key(self._end))])

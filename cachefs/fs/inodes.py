"""Inode numbers: given out one after the other, and none of them twice.

A number belongs to one file or directory as long as that exists, under whatever name. The kernel, programs and the holder
of a connection may remember a number for longer than this process lives, so numbers are reserved on the disk before they
are given out.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachefs.base.behind import WriteBehind

ROOT = 1
NUMBER_BYTES = 6

RESERVED = 1 << 20
"""Numbers of one reservation. The next one is written when half of them are left. Derived: more than five times as many as
rows that may wait for the disk (`behind.MOST_ROWS`), so it is on the disk by the time when its first number is given out."""

START_BITS = 46
"""Where a database begins that is new, or was lost, is random: so numbers of the one before do not come again."""

_NEXT = b"next inode"


def inode_key(ino: int) -> bytes:
    return ino.to_bytes(NUMBER_BYTES, "big")


class Numbers:
    """Opening it waits for the disk. `next` is called by one thread at a time."""

    def __init__(self, database: WriteBehind) -> None:
        self._database = database
        stored = database.get("state", _NEXT)
        self._next = self._end = (
            ROOT + 1 + secrets.randbits(START_BITS) if stored is None else int.from_bytes(stored, "big")
        )
        self.reserve()
        database.flush()

    def next(self) -> int:
        """A number that was never given out."""
        number = self._next
        self._next += 1
        if self._end - number < RESERVED // 2:
            self.reserve()
        return number

    def reserve(self) -> None:
        """Write down that numbers behind those that are reserved may be given out, too."""
        self._end += RESERVED
        self._database.write([("state", _NEXT, inode_key(self._end))])

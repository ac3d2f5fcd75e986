"""Inode numbers: 28 bits that say which directory, 35 bits that say which name in it. Pure.

Both parts are hashes, all the way down from the root, so a path has the same number after a restart and after the loss
of the database. What belongs to one directory is one contiguous range of numbers: it can be deleted as a range, and the
pages of the table that a busy directory touches are few. A hash that is taken is followed by the next free number, the
same way each time; only such a collision (expected once among 260,000 names of one directory, or among 23,000
directories) can give a path another number, and only when the database was lost and names were met in another order.
Nothing is ever decided by a hash alone: the tables hold the names.

63 bits are a path's own number. Numbers with the 64th bit are aliases: one version of one file, while its own number is
held by readers of another (`cachefs.fs.files`).
"""

from __future__ import annotations

import hashlib

ROOT = 1
LOW_BITS = 35
LOW_MASK = (1 << LOW_BITS) - 1
NUMBER_MASK = (1 << 28) - 1
FIRST_ALIAS = 1 << 63
FIRST_LOW = 2
"""0 is no inode and 1 is the root; the lower part is also the readdir cookie, where 0 means the beginning."""


def low_of(name: bytes) -> int:
    """Where the lower part for `name` is looked for first."""
    low = int.from_bytes(hashlib.blake2b(name, digest_size=5).digest(), "big") & LOW_MASK
    return low if low >= FIRST_LOW else FIRST_LOW


def next_low(low: int) -> int:
    return low + 1 if low < LOW_MASK else FIRST_LOW


def number_of(ino: int) -> int:
    """Where the number of the directory `ino` is looked for first. The root is 0, and no other directory is."""
    if ino == ROOT:
        return 0
    number = (
        int.from_bytes(hashlib.blake2b(ino.to_bytes(8, "big"), digest_size=4).digest(), "big") & NUMBER_MASK
    )
    return number or 1


def next_number(number: int) -> int:
    return number + 1 if number < NUMBER_MASK else 1


def alias_of(ino: int, etag: str, size: int) -> int:
    """Where the alias of a version of the file `ino` is looked for first."""
    text = f"{ino} {size} {etag}".encode("utf-8", "surrogatepass")
    return FIRST_ALIAS | int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def next_alias(alias: int) -> int:
    return FIRST_ALIAS | (alias + 1) & (FIRST_ALIAS - 1)


def join(number: int, low: int) -> int:
    """The inode number of a name in directory `number`."""
    return number << LOW_BITS | low

"""A compact list of paths: a plan may have over a million, the same for each rank of a job. Pure.

The paths lie in one buffer, one behind the other. An open-addressed hash table of their numbers finds them; it is built when
the list is complete, so that until then a list takes no more than its text. Measured: 1.2 M paths of 50 bytes take 65 bytes
each, a third of a dict of strings.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from cachefs.base.errors import ConfigError

MOST_FILES = 1 << 26
"""Files of one list: with paths of 60 bytes, the four gigabytes that the offsets reach. Derived."""


class Files:
    """`total` paths, added in order, each found by its bytes. Paths are relative to the mount, without a leading slash."""

    def __init__(self, total: int) -> None:
        if not 0 <= total <= MOST_FILES:
            raise ConfigError(f"a list of {total} files: at most {MOST_FILES} are taken")
        self.total = total
        self._text = bytearray()
        self._ends = array("I")
        self._hash = hashlib.blake2b(digest_size=16)
        self._table = array("I")  # number + 1; 0 is free

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def digest(self) -> bytes:
        """Of the paths in their order: lists with the same digest are the same."""
        return self._hash.digest()

    @property
    def text(self) -> bytes:
        """The paths as `from_text` takes them: each with a NUL behind it, which no path has."""
        parts = bytearray()
        for number in range(len(self._ends)):
            parts += self[number] + b"\0"
        return bytes(parts)

    @classmethod
    def from_text(cls, text: bytes) -> Files:
        """Raises ValueError for what `text` cannot have been."""
        paths = text.split(b"\0")
        if paths.pop() != b"":
            raise ValueError("the last path has no end")
        files = cls(len(paths))
        files.extend(paths)
        files.make_table()
        return files

    def extend(self, paths: Iterable[bytes]) -> None:
        """Raises `ConfigError` when there are more than `total`, or one has a NUL in it."""
        for path in paths:
            number = len(self._ends)
            end = len(self._text) + len(path)
            if number >= self.total or end > 0xFFFFFFFF:
                raise ConfigError("more paths than were announced, or four gigabytes of them")
            if b"\0" in path:
                raise ConfigError("a path with a NUL in it")
            self._text += path
            self._ends.append(end)
            self._hash.update(path + b"\0")

    def make_table(self) -> None:
        """Build the table of the complete list. Takes seconds for a million; any thread may do it."""
        slots = 8
        while slots < len(self) + len(self) // 2:
            slots *= 2
        table = array("I", bytes(4 * slots))
        for number in range(len(self)):
            slot = self._slot(table, self[number])
            if not table[slot]:
                table[slot] = number + 1  # of paths given twice, the first is found
        self._table = table

    def __getitem__(self, number: int) -> bytes:
        start = self._ends[number - 1] if number else 0
        return bytes(self._text[start : self._ends[number]])

    def find(self, path: bytes) -> int | None:
        """The number of a path."""
        if not self._table:
            self.make_table()
        found = self._table[self._slot(self._table, path)]
        return found - 1 if found else None

    def _slot(self, table: array[int], path: bytes) -> int:
        """Where `path` is in the table, or would be."""
        mask = len(table) - 1
        slot = hash(path) & mask
        while (found := table[slot]) and self[found - 1] != path:
            slot = (slot + 1) & mask
        return slot

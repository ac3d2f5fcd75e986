"""Which copies were found right since the daemon started, for longer than their bookkeeping stays in memory. Pure.

What was fetched ahead is verified as it comes, and whoever opens it hours later expects to have it lent. By then its
bookkeeping may have made room for other versions': this says that its bytes need no second look. A copy is known by a hash
of 64 bits, so that one of 2^46 copies that nobody has checked is taken for one of them.
"""

from __future__ import annotations

from cachefs.store.epochs import unit_hash
from cachefs.store.index import CopyKey

COPIES = 131_072
"""Copies of each of two generations, about 70 bytes each (measured), so 18 MiB in all. Guessed."""


class Checked:
    """A set of copies. The `COPIES` added last are in it at least; the oldest go, `COPIES` at a time."""

    def __init__(self) -> None:
        self._young: set[int] = set()
        self._old: set[int] = set()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, key: CopyKey) -> bool:
        name = _name(key)
        return name in self._young or name in self._old

    def add(self, key: CopyKey) -> None:
        if len(self._young) >= COPIES:
            self._old, self._young = self._young, set()
        self._young.add(_name(key))

    def discard(self, key: CopyKey) -> None:
        if self._young or self._old:
            name = _name(key)
            self._young.discard(name)
            self._old.discard(name)

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()


def _name(key: CopyKey) -> int:
    return unit_hash(key[1], key[2]) ^ key[0]

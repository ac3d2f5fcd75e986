"""Which units an epoch has had, cached or not: a Bloom filter that grows. Pure.

Two bytes a unit when full. It says yes to all that were added, and to less than one in a hundred that were not.
"""

from __future__ import annotations

from collections.abc import Iterator

BITS, PROBES = 16, 5
"""Of a unit. Derived: each full filter answers wrongly once in 700 times, and a million units have six."""

FIRST = 1024
"""Units that the first filter takes; each further one takes four times as many as the one before."""

MOST = 1 << 24
"""Units of the last filter, 32 MiB. Beyond it nothing is added. Guessed: no epoch over so many files ends on one node."""


class Seen:
    """A set of 64-bit hashes, evenly distributed."""

    def __init__(self) -> None:
        self._filters: list[bytearray] = []
        self._room = 0

    def __contains__(self, unit: int) -> bool:
        return any(
            all(bits[place >> 3] >> (place & 7) & 1 for place in _places(unit, len(bits)))
            for bits in reversed(self._filters)
        )

    def add(self, unit: int) -> None:
        if unit in self:
            return
        if not self._room:
            size = FIRST << 2 * len(self._filters)
            if size > MOST:
                return
            self._filters.append(bytearray(size * BITS // 8))
            self._room = size
        self._room -= 1
        bits = self._filters[-1]
        for place in _places(unit, len(bits)):
            bits[place >> 3] |= 1 << (place & 7)


def _places(unit: int, size: int) -> Iterator[int]:
    step = unit >> 32 | 1
    for probe in range(PROBES):
        yield (unit + probe * step) & (8 * size - 1)

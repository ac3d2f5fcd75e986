"""Which units an epoch has had, cached or not: a Bloom filter that grows. Pure.

Two bytes a unit when full. It says yes to all that were added, and to less than one in a hundred that were not.
"""

from __future__ import annotations

BITS, PROBES = 16, 5
"""Of a unit. Derived: each full filter answers wrongly once in 700 times, and a million units have six."""

FIRST = 1024
"""Units that the first filter takes; each further one takes four times as many as the one before."""

MOST = 1 << 24
"""Units of the last filter, 32 MiB. Beyond it nothing is added. Guessed: no epoch over so many files ends on one node."""

_DIGIT = (1 << 28) - 1
"""Places come from 28 bits of a hash, as many as the last filter has, and their steps from 28 others: such numbers are
Python's fastest."""


class Seen:
    """A set of 64-bit hashes, evenly distributed. Adding takes 2 µs among 200,000 (measured)."""

    def __init__(self) -> None:
        self._filters: list[tuple[bytearray, int]] = []  # and the mask of its places; the largest first
        self._room = 0

    def __contains__(self, unit: int) -> bool:
        start, step = unit & _DIGIT, unit >> 36 | 1
        for bits, last in self._filters:
            # The probes are written out: of what was not added, nearly all is told from by the first or the second.
            place = start & last
            if bits[place >> 3] >> (place & 7) & 1:
                place = start + step & last
                if bits[place >> 3] >> (place & 7) & 1:
                    place = start + 2 * step & last
                    if bits[place >> 3] >> (place & 7) & 1:
                        place = start + 3 * step & last
                        if bits[place >> 3] >> (place & 7) & 1:
                            place = start + 4 * step & last
                            if bits[place >> 3] >> (place & 7) & 1:
                                return True
        return False

    def add(self, unit: int) -> None:
        if unit in self:
            return
        if not self._room:
            size = FIRST << 2 * len(self._filters)
            if size > MOST:
                return
            self._filters.insert(0, (bytearray(size * BITS // 8), size * BITS - 1))
            self._room = size
        self._room -= 1
        bits, last = self._filters[0]
        start, step = unit & _DIGIT, unit >> 36 | 1
        for place in range(start, start + PROBES * step, step):
            place &= last
            bits[place >> 3] |= 1 << (place & 7)

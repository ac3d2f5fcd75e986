"""The access filter against plain sets of places: it answers as they do for each unit, and takes the memory that is said."""

from __future__ import annotations

import random

import pytest

from cachefs.store import eviction
from cachefs.store.eviction import BITS, PROBES, AccessFilter


class Places:
    """A filter as sets: each takes `FILTER_FIRST` units, or four times as many as the one before."""

    def __init__(self) -> None:
        self.filters: list[tuple[int, set[int]]] = []  # (its places, those that are set), the first one first
        self.left = 0

    @staticmethod
    def of(unit: int, count: int) -> set[int]:
        start, step = unit % (1 << 28), unit >> 36 | 1
        return {(start + number * step) % count for number in range(PROBES)}

    def __contains__(self, unit: int) -> bool:
        return any(self.of(unit, count) <= places for count, places in self.filters)

    def add(self, unit: int) -> None:
        if unit in self:
            return
        if not self.left:
            units = eviction.FILTER_FIRST * 4 ** len(self.filters)
            if units > eviction.FILTER_MOST:
                return
            self.filters.append((units * BITS, set()))
            self.left = units
        self.left -= 1
        count, places = self.filters[-1]
        places |= self.of(unit, count)


@pytest.mark.parametrize("first, most", [(4, 64), (8, 100), (16, 16)])
@pytest.mark.parametrize("seed", range(3))
def test_a_filter_answers_as_sets_of_places_do(
    monkeypatch: pytest.MonkeyPatch, seed: int, first: int, most: int
) -> None:
    """Units whose bits differ at both ends, in the middle, and everywhere; more than the filters take."""
    monkeypatch.setattr(eviction, "FILTER_FIRST", first)
    monkeypatch.setattr(eviction, "FILTER_MOST", most)
    rng, seen, places = random.Random(f"{seed} {first}"), AccessFilter(), Places()
    shifts = (0, 4, 20, 27, 28, 35, 36, 37, 40, 60)
    units = [rng.getrandbits(64) for _ in range(60)] + [1 << rng.choice(shifts) for _ in range(20)]
    units += [rng.choice(units) ^ 1 << rng.choice(shifts) for _ in range(120)]
    for unit in units:
        seen.add(unit)
        places.add(unit)
        for other in (unit, *rng.choices(units, k=20), rng.getrandbits(64)):
            assert (other in seen) == (other in places)
    sizes = [len(bits) * 8 for bits, _ in seen._filters]
    assert sizes == [count for count, _ in reversed(places.filters)]


def test_adding_once_more_takes_no_room() -> None:
    seen = AccessFilter()
    for number in (7, 7, 7):
        seen.add(number)
    assert seen._room == eviction.FILTER_FIRST - 1

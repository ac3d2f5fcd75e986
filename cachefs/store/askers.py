"""A dataset that several nodes read through this one: which of them have had a unit in this epoch. Pure.

When each of four nodes reads all of a dataset in an order of its own, the node that keeps a unit sees it used four times an
epoch. That looks like no epoch, or like four short ones. So uses are told apart by who asks: of *pairs*, a unit and a node
that asks for it, each occurs once an epoch, and what `epochs.Dataset` sees in the uses of units it sees in those of pairs.
A unit is *spent* when as many nodes have had it in this epoch as had one in the last. Where each node reads a part that
changes from epoch to epoch (a distributed sampler), pairs show no epochs, and units do.

Who asks is told by its host: several nodes on one host are one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from cachefs.store.turns import EPOCHS_REMEMBERED, Dataset

SLOTS = 256
"""Nodes that are told apart; further ones share the last slot. Guessed."""

FIRST_LEAST, FIRST_AGAIN = 256, 0.05
"""In the first epoch, after so many pairs of which at most this share came again, there are epochs until the opposite shows:
uses at random or by popularity come again much sooner. Guessed."""

_FULL = 1 << 64


class Slots:
    """Numbers of those who ask, in the order in which they came; the readers of this node, "", are number 0."""

    def __init__(self) -> None:
        self._slots = {"": 0}

    def __call__(self, asker: str) -> int:
        slot = self._slots.get(asker)
        if slot is None:
            slot = min(len(self._slots), SLOTS - 1)
            if slot < SLOTS - 1:
                self._slots[asker] = slot
        return slot


class Shared:
    """A dataset's pairs. `each` is how many nodes used a unit in the last epoch, as a rule; 0 before one has passed."""

    def __init__(self, clock: int) -> None:
        # A few are used twice an epoch: what was fetched ahead from here and went before it was read is asked for again.
        self.pairs = Dataset(start=clock, previous=clock, edge=clock, noisy=True)
        self.pairs.starts = deque([clock], maxlen=EPOCHS_REMEMBERED)
        self.each = 0
        self._askers: dict[int, int] = {}  # slot → epoch of its last use

    def used(self, unit: int, slot: int, clock: int, length: int, hit: bool) -> bool:
        """As `Dataset.used`; `slot` says who asks."""
        pairs = self.pairs
        self._askers[slot] = pairs.number
        pairs.last, pairs.idle = clock, False
        pairs.seen.add(_mixed(unit, slot))
        if unit >= pairs.threshold:
            return False
        # All pairs of a unit are sampled, or none: they differ in the lowest bits.
        if not pairs.used(unit // SLOTS * SLOTS + slot, clock, length, hit):
            return False
        self._askers = {slot: last for slot, last in self._askers.items() if last >= pairs.number - 1}
        self.each = _askers_each(pair for pair, use in pairs.sample.items() if use[0] >= pairs.previous)
        return True

    def comes(self, unit: int) -> None:
        """As `Epochs.comes`."""
        self.pairs.seen.add(_mixed(unit, 0))

    def had_here(self, unit: int) -> bool:
        """Whether this node's own readers have had it in this epoch."""
        return _mixed(unit, 0) in self.pairs.seen

    @property
    def epochs(self) -> bool:
        """Whether its pairs have epochs, as far as is known."""
        pairs = self.pairs
        first = pairs.number == 1 and pairs.count >= FIRST_LEAST and len(self._askers) > 1
        return pairs.epochs or (first and len(pairs.agains) <= FIRST_AGAIN * pairs.count)

    def spent(self, unit: int) -> bool:
        """Whether all have had it that are expected to; in the first epoch, all that are known."""
        missing = len(self._askers) - self.each if self.each else 0
        for slot in self._askers:
            if _mixed(unit, slot) not in self.pairs.seen:
                missing -= 1
                if missing < 0:
                    return False
        return True


def _askers_each(pairs: Iterable[int]) -> int:
    """Pairs for each unit among them."""
    count, units = 0, set()
    for pair in pairs:
        count += 1
        units.add(pair // SLOTS)
    # Rather one too many: then less is spent, and nothing that somebody still wants.
    return math.ceil(count / len(units) - 0.1) if units else 0


def _mixed(unit: int, slot: int) -> int:
    """A pair as a hash that is evenly distributed; one of this node's readers is the unit itself."""
    return unit ^ slot * 0x9E3779B97F4A7C15 % _FULL

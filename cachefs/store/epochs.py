"""Which copies will be wanted again: eviction that knows epochs. Pure: no I/O, no clock of its own.

Training reads a dataset once per epoch, in another order each time. With a dataset larger than the cache, the least recently
used copy is then exactly what comes next. The best victim is whatever was *already used in this epoch*: it is wanted last.
What was used in the epoch before and is still to come in this one is protected; what was not used for a whole epoch is dead,
and goes first. Nothing is refused admission: what is fetched and consumed is the next victim by itself.

So all that has to be known of a dataset is when its epochs began, on the logical clock of the cache (`turns.py`), and
whether it has any (`auto`); without, plain recency decides. What this epoch has had is not worth fetching ahead once more.

Where several nodes read a dataset through this one, it may be the pairs of a unit and a node that occur once an epoch
(`askers.py`). If they do, they decide: a unit is protected until all nodes have had it, and then it is *spent*.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal

from cachefs.store.askers import Shared, Slots
from cachefs.store.turns import EPOCHS_REMEMBERED, Dataset, packed, unpacked

Policy = Literal["auto", "epoch", "lru"]

TRACKED = 32
"""Datasets lately used that are watched, at most 1 MiB each. The others are evicted by recency. Guessed."""

_FULL = 1 << 64


def unit_hash(digest: bytes, extent: int) -> int:
    """What an extent of the version `digest` is called here."""
    return (int.from_bytes(digest[:8], "big") + extent * 0x9E3779B97F4A7C15) % _FULL


class Epochs:
    """All datasets of a cache. `version` changes whenever copies that were protected no longer are."""

    def __init__(self, policy: Policy = "auto") -> None:
        self.policy = policy
        self.version = 0
        self._datasets: OrderedDict[int, Dataset] = OrderedDict()
        self._shared: dict[int, Shared] = {}
        self._slot = Slots()
        self._now = 0
        self._looked = 0

    def used(self, dataset: int, unit: int, clock: int, length: int, *, hit: bool, asker: str = "") -> bool:
        """A unit (any 64-bit hash, evenly distributed) of `length` bytes is used at `clock`, which never goes back; `hit` if
        it was cached; by this node's readers, or for another node, the `asker`. Whether a new epoch of its dataset has
        begun."""
        self._now = clock
        if clock - self._looked >= 64:
            self._look_for_idle()
        found = self._datasets.get(dataset)
        if found is None:
            found = self._add(dataset, clock)
        found.last = clock
        found.idle = False
        found.seen.add(unit)
        before = self._decides(dataset)
        begun = unit < found.threshold and found.used(unit, clock, length, hit)
        shared = self._shared.get(dataset)
        if shared is None and asker:
            shared = self._shared[dataset] = Shared(clock)
        decides = found
        if shared is not None:
            begun_shared = shared.used(unit, self._slot(asker), clock, length, hit)
            decides = self._decides(dataset)  # type: ignore[assignment]
            begun = decides is not before or (begun_shared if decides is shared.pairs else begun)
        if begun:
            self._datasets.move_to_end(dataset)
            self.version += 1
        return begun

    def _decides(self, dataset: int) -> Dataset | None:
        """What is known of its units, or of its pairs where these are what has epochs."""
        found, shared = self._datasets.get(dataset), self._shared.get(dataset)
        if shared is None or found is None or (found.epochs and not shared.epochs):
            return found
        return shared.pairs

    def protects(self, dataset: int, clock: int) -> bool:
        """Whether a copy last used at `clock` is still to be used in this epoch of its dataset, unless it is `spent`."""
        found = self._decides(dataset)
        if found is None or clock < found.previous or found.idle or not self._keeps(dataset, found):
            return False
        return clock < found.start or (dataset in self._shared and self._shared[dataset].pairs is found)

    def spent(self, dataset: int, unit: int) -> bool:
        """Whether all nodes have had the unit in this epoch; False where it is not nodes that matter."""
        shared = self._shared.get(dataset)
        return (
            shared is not None
            and shared.pairs is self._decides(dataset)
            and self._keeps(dataset, shared.pairs)
            and shared.spent(unit)
        )

    def start(self, dataset: int) -> int:
        """The clock when its epoch began."""
        found = self._decides(dataset)
        return found.start if found is not None else 0

    def has_epochs(self, dataset: int) -> bool:
        found = self._decides(dataset)
        return found is not None and self._keeps(dataset, found)

    def _keeps(self, dataset: int, found: Dataset) -> bool:
        shared = self._shared.get(dataset)
        epochs = shared.epochs if shared is not None and shared.pairs is found else found.epochs
        return self.policy == "epoch" or (epochs and self.policy == "auto")

    def number(self, dataset: int) -> int:
        """Of the epoch that the dataset is in: it grows when one begins. 0: nothing is known."""
        found = self._decides(dataset)
        return found.number if found is not None else 0

    def comes(self, dataset: int, unit: int) -> None:
        """A reader of this node is about to use it: this epoch has as good as had it."""
        (self._datasets.get(dataset) or self._add(dataset, self._now)).seen.add(unit)
        if dataset in self._shared:
            self._shared[dataset].comes(unit)

    def had(self, dataset: int, unit: int) -> bool:
        """Whether this node's readers have had the unit in this epoch of the dataset already, cached or not. It may be wrong
        once in a hundred."""
        found = self._decides(dataset)
        if found is None:
            return False
        shared = self._shared.get(dataset)
        if shared is not None and shared.pairs is found:
            return shared.had_here(unit)
        use = found.sample.get(unit)
        return unit in found.seen or (use is not None and use[0] >= found.start)

    def _add(self, dataset: int, clock: int) -> Dataset:
        if len(self._datasets) >= TRACKED:
            last = min(self._datasets, key=lambda d: self._datasets[d].last)
            del self._datasets[last]
            self._shared.pop(last, None)
            self.version += 1
        found = self._datasets[dataset] = Dataset(start=clock, previous=clock, edge=clock)
        found.starts = deque([clock], maxlen=EPOCHS_REMEMBERED)
        return found

    def _look_for_idle(self) -> None:
        """A dataset that was not used while others were for half as long as its epoch took has come to an end: what was
        protected of it is not wanted any more."""
        self._looked = self._now
        pairs = (shared.pairs for shared in self._shared.values())
        for found in chain(self._datasets.values(), pairs):
            if not found.idle and self._now - found.last > max(64, (found.start - found.previous) // 2):
                found.idle = True
                self.version += 1

    def status(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Dataset → what is known of it, the one used last first."""
        for dataset in sorted(self._datasets, key=lambda d: -self._datasets[d].last):
            found, shared = self._decides(dataset), self._shared.get(dataset)
            assert found is not None
            each = max(1, shared.each) if shared is not None and shared.pairs is found else 1
            yield (
                dataset,
                {
                    "mode": "epoch" if self._keeps(dataset, found) else "lru",
                    "epoch": found.number,
                    "used_share": round(found.fresh / max(1, found.alive), 3),
                    "footprint_bytes": int(found.alive / each / found.rate * found.unit_bytes),
                    "hit_ratio": _rounded(found.hit_ratio),
                    "last_hit_ratio": _rounded(found.last_hit_ratio),
                },
            )

    # -- over restarts -----------------------------------------------------------------------------

    def changes(self) -> tuple[bytes, dict[int, bytes]]:
        """(list of all datasets, those that changed since the last call), to be given to `restore`."""
        changed = {number: packed(found) for number, found in self._datasets.items() if found.changed}
        for number in changed:
            self._datasets[number].changed = False
        return json.dumps([self._now, list(self._datasets)]).encode(), changed

    def restore(self, listed: bytes | None, rows: Iterable[tuple[int, bytes | None]]) -> int:
        """Go on where `changes` was called; what is damaged is learnt again. The clock as it was."""
        try:
            now, numbers = json.loads(listed or b"[0, []]")
            self._now = int(now)
            wanted = {int(number) for number in numbers}
        except (ValueError, TypeError):
            return self._now
        for number, row in rows:
            found = unpacked(row or b"")
            if number in wanted and found is not None:
                self._datasets[number] = found
        return self._now

    @staticmethod
    def listed(row: bytes | None) -> list[int]:
        """The datasets that a row of `changes` lists."""
        try:
            return [int(number) for number in json.loads(row or b"[0, []]")[1]]
        except (ValueError, TypeError, IndexError):
            return []


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 3)

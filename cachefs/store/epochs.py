"""Which copies will be wanted again: eviction that knows epochs. Pure: no I/O, no clock of its own.

Training reads a dataset once per epoch, in another order each time. With a dataset larger than the cache, the least recently
used copy is then exactly what comes next. The best victim is whatever was *already used in this epoch*: it is wanted last.
What was used in the epoch before and is still to come in this one is protected; what was not used for a whole epoch is dead,
and goes first. Nothing is refused admission: what is fetched and consumed is the next victim by itself.

So all that has to be known of a dataset is when its epochs began, on the logical clock of the cache. It shows in the uses
themselves: a use *again*, of a unit (an extent of a version) that this epoch has had already. One is noise, many close
together are a new epoch, which began with the first of them. A dataset is believed to have epochs (`auto`) if at that
moment most of what is known of it had been used, and nearly every use was one again. Neither holds for uses at random or by
popularity: those stay with plain recency.

What was used is remembered beyond what is cached, as a sample by hash (as SHARDS has it): of a dataset with more units,
every second, fourth, ... one. What this epoch has had is remembered of all units, more compactly (`seen.py`): it is not
worth fetching ahead once more.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from cachefs.store.seen import Seen

Policy = Literal["auto", "epoch", "lru"]

SAMPLE = 4096
"""Units remembered of each dataset, 250 bytes each. Derived: 1 % of it are 40 uses, known to a sixth."""

TRACKED = 32
"""Datasets lately used that are watched, at most 1 MiB each. The others are evicted by recency. Guessed."""

AGAIN_SHARE = 0.01
"""Uses again, of the units used in this epoch, that make a new one. What is evicted until then was wanted: a half to one
percent of the dataset, measured with the simulator. Less is soon met by a few files read twice."""

AGAIN_LEAST = 4
"""And this many at least. Guessed."""

DONE_SHARE = 0.95
"""Of a dataset with epochs, used in this one: then the first use again begins the next. What would be evicted until more
came is all still wanted: of 64 extents, a tenth. Guessed: what has not been used by then counts for little."""

AGAIN_DENSITY = 0.25
"""They must make up this share of the uses meanwhile: a few in a hundred, spread over an epoch, never add up. Guessed."""

EPOCH_SHARE = 0.6
"""A dataset has epochs if this much of it had been used when a new one began, and this many of the uses there were again.
Simulated: orders without replacement give 0.9 and more of both, uses at random and by popularity less than 0.5 of one."""

CORRELATED_LEAST, CORRELATED_MOST = 4, 256
"""Other units that must have been used meanwhile for a use to be another one, and not the same still going on: an eighth of
the dataset, between these. Derived: 64 readers of large files touch at most 128 extents from one second to the next."""

EPOCHS_REMEMBERED = 4
"""A unit not used for so many epochs is no longer part of its dataset. Derived: two would not tell uses at random, whose
supposed epochs each touch a third, from those without replacement."""

_FULL = 1 << 64


def unit_hash(digest: bytes, extent: int) -> int:
    """What an extent of the version `digest` is called here."""
    return (int.from_bytes(digest[:8], "big") + extent * 0x9E3779B97F4A7C15) % _FULL


@dataclass(slots=True)
class Dataset:
    """What is known of one. Its units before `previous` were not used for an epoch, from `start` on they were used in this
    one. What was used between `edge` and `start` may have been the first of this epoch or the last of the one before it.
    `sample` has unit → (clock when this use of it began, number of the last use); `threshold` is above the hashes that are
    sampled. `size` was how many of these belonged to it when this epoch began, 0 if that is not known."""

    start: int = 0
    previous: int = 0
    edge: int = 0
    number: int = 1
    epochs: bool = False
    last: int = 0
    idle: bool = False
    threshold: int = _FULL
    sample: dict[int, tuple[int, int]] = field(default_factory=dict)
    count: int = 0
    fresh: int = 0
    size: int = 0
    lately: deque[int] = field(default_factory=lambda: deque(maxlen=CORRELATED_MOST))
    agains: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SAMPLE))
    starts: deque[int] = field(default_factory=lambda: deque([0], maxlen=EPOCHS_REMEMBERED))
    hits: int = 0
    uses: int = 0
    last_hit_ratio: float | None = None
    unit_bytes: float = 0.0
    changed: bool = True
    seen: Seen = field(default_factory=Seen)

    @property
    def rate(self) -> float:
        """Share of the units that are sampled."""
        return self.threshold / _FULL

    @property
    def correlated(self) -> float:
        """Uses of other units before one is another."""
        return min(max(len(self.sample) / self.rate / 8, CORRELATED_LEAST), CORRELATED_MOST)

    @property
    def alive(self) -> int:
        """Sampled units that were used in the last epochs."""
        return sum(use[0] >= self.starts[0] for use in self.sample.values())

    @property
    def hit_ratio(self) -> float | None:
        """Share of the uses in this epoch that found their unit cached."""
        return self.hits / self.uses if self.uses else None

    def used(self, unit: int, clock: int, length: int, hit: bool) -> bool:
        """Whether a new epoch has begun, with this use or shortly before."""
        known = self.sample.get(unit)
        if known is not None:
            meanwhile = (self.count - known[1]) / self.rate
            if meanwhile <= self.correlated:
                self.sample[unit] = (known[0], self.count)
                return False
        self.changed = True
        self.count += 1
        self.uses += 1
        self.hits += hit
        self.unit_bytes += (length - self.unit_bytes) / min(self.count, 1000)
        self.sample[unit] = (clock, self.count)
        self.lately.append(clock)
        if known is not None and known[0] >= self.start:
            self.agains.append((self.count, clock))
            return self._look()
        self.fresh += 1
        if len(self.sample) > SAMPLE:
            self._sample_less()
        return False

    def _look(self) -> bool:
        """After a use again: are they enough by now?"""
        enough = max(AGAIN_LEAST, math.ceil(AGAIN_SHARE * self.fresh))
        if self.epochs and self.size and self.fresh >= DONE_SHARE * self.size:
            enough = 1
        if len(self.agains) < enough:
            return False
        count, clock = self.agains[-enough]
        density = enough / (self.count - count + 1)
        if density < AGAIN_DENSITY:
            return False
        self._begin(clock, density)
        return True

    def _begin(self, clock: int, density: float) -> None:
        self.starts.append(clock)
        # Those used again since the epoch began count for the one before it as well.
        fresh = sum(use[0] >= clock for use in self.sample.values())
        used = sum(use[0] >= self.start for use in self.sample.values())
        self.size = self.alive
        self.epochs = min(density, used / self.size) >= EPOCH_SHARE
        self.previous, self.start, self.fresh = self.edge, clock, fresh
        before = [used for used in self.lately if used < clock]
        self.edge = before[-min(len(before), math.ceil(self.correlated * self.rate))] if before else clock
        self.number += 1
        self.agains.clear()
        self.seen = Seen()
        self.last_hit_ratio = self.hit_ratio
        self.hits = self.uses = 0

    def _sample_less(self) -> None:
        """Forget what no longer belongs to it; if that is not much, every second unit."""
        if self.alive > 0.75 * SAMPLE:
            self.threshold //= 2
            self.sample = {unit: use for unit, use in self.sample.items() if unit < self.threshold}
        else:
            self.sample = {unit: use for unit, use in self.sample.items() if use[0] >= self.starts[0]}
        self.fresh = sum(use[0] >= self.start for use in self.sample.values())
        self.size = 0
        self.agains.clear()


class Epochs:
    """All datasets of a cache. `version` changes whenever copies that were protected no longer are."""

    def __init__(self, policy: Policy = "auto") -> None:
        self.policy = policy
        self.version = 0
        self._datasets: OrderedDict[int, Dataset] = OrderedDict()
        self._now = 0
        self._looked = 0

    def used(self, dataset: int, unit: int, clock: int, length: int, *, hit: bool) -> bool:
        """A unit (any 64-bit hash, evenly distributed) of `length` bytes is used at `clock`, which never goes back; `hit` if
        it was cached. Whether a new epoch of its dataset has begun."""
        self._now = clock
        if clock - self._looked >= 64:
            self._look_for_idle()
        found = self._datasets.get(dataset)
        if found is None:
            found = self._add(dataset, clock)
        found.last = clock
        found.idle = False
        found.seen.add(unit)
        if unit >= found.threshold:
            return False
        begun = found.used(unit, clock, length, hit)
        if begun:
            self._datasets.move_to_end(dataset)
            self.version += 1
        return begun

    def protects(self, dataset: int, clock: int) -> bool:
        """Whether a copy last used at `clock` is still to be used in this epoch of its dataset."""
        found = self._datasets.get(dataset)
        return (
            found is not None
            and found.previous <= clock < found.start
            and self._keeps(found)
            and not found.idle
        )

    def start(self, dataset: int) -> int:
        """The clock when its epoch began."""
        found = self._datasets.get(dataset)
        return found.start if found is not None else 0

    def has_epochs(self, dataset: int) -> bool:
        found = self._datasets.get(dataset)
        return found is not None and self._keeps(found)

    def _keeps(self, found: Dataset) -> bool:
        return self.policy == "epoch" or (found.epochs and self.policy == "auto")

    def number(self, dataset: int) -> int:
        """Of the epoch that the dataset is in: it grows when one begins. 0: nothing is known."""
        found = self._datasets.get(dataset)
        return found.number if found is not None else 0

    def comes(self, dataset: int, unit: int) -> None:
        """A reader is about to use it: this epoch has as good as had it."""
        (self._datasets.get(dataset) or self._add(dataset, self._now)).seen.add(unit)

    def had(self, dataset: int, unit: int) -> bool:
        """Whether this epoch of the dataset has had the unit already, cached or not. It may be wrong once in a hundred."""
        found = self._datasets.get(dataset)
        if found is None:
            return False
        use = found.sample.get(unit)
        return unit in found.seen or (use is not None and use[0] >= found.start)

    def _add(self, dataset: int, clock: int) -> Dataset:
        if len(self._datasets) >= TRACKED:
            del self._datasets[min(self._datasets, key=lambda d: self._datasets[d].last)]
            self.version += 1
        found = self._datasets[dataset] = Dataset(start=clock, previous=clock, edge=clock)
        found.starts = deque([clock], maxlen=EPOCHS_REMEMBERED)
        return found

    def _look_for_idle(self) -> None:
        """A dataset that was not used while others were for half as long as its epoch took has come to an end: what was
        protected of it is not wanted any more."""
        self._looked = self._now
        for found in self._datasets.values():
            if not found.idle and self._now - found.last > max(64, (found.start - found.previous) // 2):
                found.idle = True
                self.version += 1

    def status(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Dataset → what is known of it, the one used last first."""
        for dataset in sorted(self._datasets, key=lambda d: -self._datasets[d].last):
            found = self._datasets[dataset]
            yield (
                dataset,
                {
                    "mode": "epoch" if self._keeps(found) else "lru",
                    "epoch": found.number,
                    "used_share": round(found.fresh / max(1, found.alive), 3),
                    "footprint_bytes": int(found.alive / found.rate * found.unit_bytes),
                    "hit_ratio": _rounded(found.hit_ratio),
                    "last_hit_ratio": _rounded(found.last_hit_ratio),
                },
            )

    # -- over restarts -----------------------------------------------------------------------------

    def changes(self) -> tuple[bytes, dict[int, bytes]]:
        """(list of all datasets, those that changed since the last call), to be given to `restore`."""
        changed = {number: _packed(found) for number, found in self._datasets.items() if found.changed}
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
            found = _unpacked(row or b"")
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


_PLAIN: tuple[str, ...] = (
    *(
        "start",
        "previous",
        "edge",
        "number",
        "epochs",
        "last",
        "threshold",
        "count",
        "fresh",
        "size",
        "unit_bytes",
    ),
    *("hits", "uses", "last_hit_ratio"),
)
_LENGTH = struct.Struct(">I")


def _packed(found: Dataset) -> bytes:
    head = {name: getattr(found, name) for name in _PLAIN}
    head["starts"], head["agains"] = list(found.starts), list(found.agains)[-SAMPLE // 8 :]
    text = json.dumps(head).encode()
    columns = (
        array("Q", found.sample),
        *(array("Q", column) for column in zip(*found.sample.values(), strict=True)),
    )
    return _LENGTH.pack(len(text)) + text + b"".join(column.tobytes() for column in columns)


def _unpacked(row: bytes) -> Dataset | None:
    try:
        (length,) = _LENGTH.unpack_from(row)
        head = json.loads(row[4 : 4 + length])
        numbers = array("Q", row[4 + length :])
        size = len(numbers) // 3
        uses = zip(numbers[size : 2 * size], numbers[2 * size :], strict=True)
        found = Dataset(
            **{name: head[name] for name in _PLAIN}, sample=dict(zip(numbers[:size], uses, strict=True))
        )
        found.starts.clear()
        found.starts.extend(head["starts"])
        found.agains.extend((count, clock) for count, clock in head["agains"])
    except (ValueError, TypeError, KeyError, struct.error):
        return None
    return found


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 3)

"""When the epochs of one dataset begin, as it shows in the uses of its units. Pure. What follows is in `epochs.py`.

A use *again* is one of a unit that this epoch has had already. One is noise, many close together are a new epoch, which
began with the first of them. A dataset is believed to have epochs if at that moment most of what is known of it had been
used, and nearly every use was one again. Neither holds for uses at random or by popularity.

What was used is remembered beyond what is cached, as a sample by hash (as SHARDS has it): of a dataset with more units,
every second, fourth, ... one. What this epoch has had is remembered of all units, more compactly (`seen.py`).
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections import deque
from dataclasses import dataclass, field

from cachefs.store.seen import Seen

SAMPLE = 4096
"""Units remembered of each dataset, 250 bytes each. Derived: 1 % of it are 40 uses, known to a sixth."""

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

PATIENCE = 4
"""Where uses again are no rare thing, so many times more of them begin an epoch if they are not nearly all uses: those of a
true beginning soon are, and it must not look like less. Guessed."""

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


@dataclass(slots=True)
class Dataset:
    """What is known of one. Its units before `previous` were not used for an epoch, from `start` on they were used in this
    one. What was used between `edge` and `start` may have been the first of this epoch or the last of the one before it.
    `sample` has unit → (clock when this use of it began, number of the last use); `threshold` is above the hashes that are
    sampled. `size` was how many of these belonged to it when this epoch began, 0 if that is not known. `noisy` says
    that some units are used again within an epoch."""

    start: int = 0
    previous: int = 0
    edge: int = 0
    number: int = 1
    epochs: bool = False
    last: int = 0
    idle: bool = False
    noisy: bool = False
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
        if self.epochs and not self.noisy and self.size and self.fresh >= DONE_SHARE * self.size:
            enough = 1
        if len(self.agains) < enough:
            return False
        count, clock = self.agains[-enough]
        density = enough / (self.count - count + 1)
        if self.noisy and density < EPOCH_SHARE and len(self.agains) >= PATIENCE * enough:
            count, clock = self.agains[-PATIENCE * enough]
            density = PATIENCE * enough / (self.count - count + 1)
        elif self.noisy and density < EPOCH_SHARE:
            return False
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


def packed(found: Dataset) -> bytes:
    head = {name: getattr(found, name) for name in _PLAIN}
    head["starts"], head["agains"] = list(found.starts), list(found.agains)[-SAMPLE // 8 :]
    text = json.dumps(head).encode()
    columns = (
        array("Q", found.sample),
        *(array("Q", column) for column in zip(*found.sample.values(), strict=True)),
    )
    return _LENGTH.pack(len(text)) + text + b"".join(column.tobytes() for column in columns)


def unpacked(row: bytes) -> Dataset | None:
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

"""The order of eviction: which copy of a tier goes first.

A copy's place is one key: (tier, priority class, clock of its last use), lowest first. The index keeps rows by (tier,
clock). The class is not stored, because it changes for many copies at once when an epoch begins; it is computed from
what is known here: which copies other nodes own, which wait for their first reader, and what this epoch of a dataset
has had.

A search walks a tier's rows, least recently used first, and passes over those of a higher class. A row that is
protected stays so until an epoch begins, so it is looked at once: with a million rows, the search goes on where it was.
Rows that only cannot go right now, and those that come in below, are looked at again after each flush.

**Epoch detection** says which copies of a dataset will be used again soon, and which will not. It is pure: no I/O, no
clock of its own.

Training reads a dataset once per epoch, in another order each time. If the dataset is larger than the cache, the least
recently used copy is exactly the one that comes next. The best victim is a copy that was *already used in this epoch*:
its next use is the furthest away. A copy that was used in the last epoch and not yet in this one is protected. A copy
that was not used for a whole epoch is dead and goes first. Nothing is refused admission: a block that was fetched and
read becomes the next victim by itself.

So the policy only has to know when the epochs of a dataset began, on the logical clock of the cache. With `auto` it
also decides whether a dataset has epochs at all; without them, recency decides.

- `Dataset` detects epochs in a sequence of uses. A *re-reference* is a use of a unit that this epoch has had already. One
  is noise; many close together mean that a new epoch began with the first of them. A dataset has epochs if at that moment
  most of its known units had been used, and nearly every use was a re-reference. Neither holds for uses at random or by
  popularity. Used units are remembered beyond what is cached, as a sample by hash (as in SHARDS).
- `AccessFilter` says which units this epoch has had. It covers all units, more compactly than the sample.
- `SharedDataset` handles a dataset that several nodes read through this one. If each of four nodes reads all of it in its
  own order, a unit is used four times an epoch, which looks like no epoch or four short ones. Each *pair* of a unit and a
  requesting peer occurs once an epoch, so pairs are watched in the same way. A unit is *evictable first* when as many nodes
  have had it in this epoch as in the last. If each node reads a part that changes every epoch (a distributed sampler), pairs
  show no epochs and units do. Peers are told apart by host.

Why not set dueling (DIP: recency against bimodal insertion, decided by two sampled caches)? It was played over the
shapes of `cachefs simulate` (`bench/set_dueling.py`). At half a dataset, from the third epoch on, it hits 0.48 to 0.49
(insertion of one in 32 or 64), so that condition holds. These do not: a second dataset that takes over reaches 0.10 in
its fourth epoch, against 0.49 in its second here; files opened twice hit 0.58, against 0.75; four nodes that read
through one owner miss 37 to 59 units an epoch, against 25 allowed. It also cannot say what prefetch asks: whether this
epoch has had a file (`Epochs.had`).
"""

from __future__ import annotations

import enum
import json
import math
import struct
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import trio

from cachefs.base.names import ObjectId
from cachefs.store.catalog import UNITS, CachedObject, Catalog, Copy, CopyKey, Index, Row, unit_hash
from cachefs.store.tier import Tier

Policy = Literal["auto", "epoch", "lru"]

# -- the access filter -----------------------------------------------------------------------------

BITS, PROBES = 16, 5
"""Bits and probes of a unit. Derived: each full filter answers wrongly once in 700 times, and a million units have six."""

FILTER_FIRST = 1024
"""Units that the first filter takes; each further one takes four times as many as the one before."""

FILTER_MOST = 1 << 24
"""Units of the last filter, 32 MiB; beyond it none are added. A bound: no epoch over so many files ends on one node."""

_DIGIT = (1 << 28) - 1
"""Places come from 28 bits of a hash, as many as the last filter has, and their steps from 28 others: such numbers are
Python's fastest."""


class AccessFilter:
    """A growing Bloom filter of evenly distributed 64-bit hashes: two bytes a unit when full. It contains all units that
    were added, and less than one in a hundred of the others. Adding takes 2 µs among 200,000 (measured)."""

    def __init__(self) -> None:
        self._filters: list[tuple[bytearray, int]] = []  # (bits, mask of its places); the largest first
        self._room = 0

    def __contains__(self, unit: int) -> bool:
        start, step = unit & _DIGIT, unit >> 36 | 1
        for bits, last in self._filters:
            # The probes are written out: the first or second rejects nearly all units that were not added.
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
            size = FILTER_FIRST << 2 * len(self._filters)
            if size > FILTER_MOST:
                return
            self._filters.insert(0, (bytearray(size * BITS // 8), size * BITS - 1))
            self._room = size
        self._room -= 1
        bits, last = self._filters[0]
        start, step = unit & _DIGIT, unit >> 36 | 1
        for place in range(start, start + PROBES * step, step):
            place &= last
            bits[place >> 3] |= 1 << (place & 7)


# -- the epochs of one dataset ---------------------------------------------------------------------

SAMPLE = 4096
"""Units remembered of each dataset, 250 bytes each. Derived: 1 % of it are 40 uses, known to a sixth."""

AGAIN_SHARE = 0.01
"""Re-references, as a share of the units used in this epoch, that make a new one. What is evicted until then was still
wanted: a half to one percent of the dataset, measured with the simulator. A few files read twice soon reach a smaller
share."""

AGAIN_LEAST = 4
"""And this many at least. Guessed."""

DONE_SHARE = 0.95
"""If a dataset with epochs has had this share of its units, the first re-reference begins the next epoch. Evicting until
more came would cost units that are all still wanted: of 64 extents, a tenth. Guessed: the units unused by then count for
little."""

AGAIN_DENSITY = 0.25
"""Re-references must make up this share of the uses meanwhile: a few in a hundred, spread over an epoch, never add up.
Guessed."""

PATIENCE = 4
"""Where re-references are common, so many times more of them begin an epoch if they are not nearly all uses. Those of a true
beginning soon are, and must not look like less. Guessed."""

EPOCH_SHARE = 0.6
"""A dataset has epochs if this share of it had been used when a new one began, and this share of the uses there were
re-references. Simulated: orders without replacement give 0.9 and more of both, uses at random and by popularity less than
0.5 of one."""

CORRELATED_LEAST, CORRELATED_MOST = 4, 256
"""Other units that must have been used meanwhile for a use to be a separate one: an eighth of the dataset, between these.
Derived: 64 readers of large files touch at most 128 extents from one second to the next."""

EPOCHS_REMEMBERED = 4
"""A unit not used for so many epochs is no longer part of its dataset. Derived: two would not tell uses at random, whose
supposed epochs each touch a third, from those without replacement."""

Use = tuple[int, int]
"""(clock when this use of a unit began, number of the dataset's last use of it)"""


@dataclass(slots=True)
class Dataset:
    """Detects the epochs of one dataset. Clocks are the cache's.

    `start` is when this epoch began, `previous` when the last one did. What was used between `edge` and `start` may have
    been the first of this epoch or the last of the one before it. `sample` has the known units below the hash
    `threshold`. `fresh` counts those used in this epoch, `size` those that belonged to the dataset when it began (0: not
    known). `noisy` says that some units are used again within an epoch."""

    start: int = 0
    previous: int = 0
    edge: int = 0
    number: int = 1
    epochs: bool = False
    last: int = 0
    idle: bool = False
    noisy: bool = False
    threshold: int = UNITS
    sample: dict[int, Use] = field(default_factory=dict)
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
    access_filter: AccessFilter = field(default_factory=AccessFilter)

    @classmethod
    def begun(cls, clock: int, *, noisy: bool = False) -> Dataset:
        """One whose first use comes at `clock`."""
        starts = deque([clock], maxlen=EPOCHS_REMEMBERED)
        return cls(start=clock, previous=clock, edge=clock, noisy=noisy, starts=starts)

    @property
    def rate(self) -> float:
        """Share of the units that are sampled."""
        return self.threshold / UNITS

    @property
    def correlated(self) -> float:
        """Uses of other units that separate two uses of one."""
        return min(max(len(self.sample) / self.rate / 8, CORRELATED_LEAST), CORRELATED_MOST)

    @property
    def alive(self) -> int:
        """Sampled units that were used in the last `EPOCHS_REMEMBERED` epochs."""
        return self._used_since(self.starts[0])

    @property
    def hit_ratio(self) -> float | None:
        """Share of the uses in this epoch that found their unit cached."""
        return self.hits / self.uses if self.uses else None

    def used(self, unit: int, clock: int, length: int, hit: bool) -> bool:
        """A sampled unit is used. True if a new epoch has begun, with this use or shortly before."""
        known = self.sample.get(unit)
        if known is not None:
            others = self.count - known[1]  # of the sample: the whole dataset has had no fewer
            if others <= CORRELATED_MOST and others / self.rate <= self.correlated:
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

    def _used_since(self, clock: int) -> int:
        return sum(use[0] >= clock for use in self.sample.values())

    def _look(self) -> bool:
        """After a re-reference: begin an epoch if there have been enough."""
        enough = max(AGAIN_LEAST, math.ceil(AGAIN_SHARE * self.fresh))
        if self.epochs and not self.noisy and self.size and self.fresh >= DONE_SHARE * self.size:
            enough = 1
        if len(self.agains) < enough:
            return False
        count, clock = self.agains[-enough]
        density = enough / (self.count - count + 1)
        if self.noisy and density < EPOCH_SHARE:
            if len(self.agains) < PATIENCE * enough:
                return False
            count, clock = self.agains[-PATIENCE * enough]
            density = PATIENCE * enough / (self.count - count + 1)
        if density < AGAIN_DENSITY:
            return False
        self._begin(clock, density)
        return True

    def _begin(self, clock: int, density: float) -> None:
        self.starts.append(clock)
        # Those used again since the epoch began count for the one before it as well.
        fresh, used = self._used_since(clock), self._used_since(self.start)
        self.size = self.alive
        self.epochs = min(density, used / self.size) >= EPOCH_SHARE
        self.previous, self.start, self.fresh = self.edge, clock, fresh
        before = [used for used in self.lately if used < clock]
        self.edge = before[-min(len(before), math.ceil(self.correlated * self.rate))] if before else clock
        self.number += 1
        self.agains.clear()
        self.access_filter = AccessFilter()
        self.last_hit_ratio = self.hit_ratio
        self.hits = self.uses = 0

    def _sample_less(self) -> None:
        """Forget units that no longer belong to the dataset; if these are few, every second unit."""
        if self.alive > 0.75 * SAMPLE:
            self.threshold //= 2
            self.sample = {unit: use for unit, use in self.sample.items() if unit < self.threshold}
        else:
            self.sample = {unit: use for unit, use in self.sample.items() if use[0] >= self.starts[0]}
        self.fresh = self._used_since(self.start)
        self.size = 0
        self.agains.clear()

    # A row is: the length of the head, the head as JSON, three columns of `sample` as 64-bit integers.

    def packed(self) -> bytes:
        """What `unpacked` takes, over restarts."""
        head = {name: getattr(self, name) for name in _PLAIN}
        head["starts"], head["agains"] = list(self.starts), list(self.agains)[-SAMPLE // 8 :]
        text = json.dumps(head).encode()
        columns = [array("Q", self.sample)]
        columns += [array("Q", column) for column in zip(*self.sample.values(), strict=True)]
        return _LENGTH.pack(len(text)) + text + b"".join(column.tobytes() for column in columns)

    @classmethod
    def unpacked(cls, row: bytes) -> Dataset | None:
        """None for a damaged row."""
        try:
            (length,) = _LENGTH.unpack_from(row)
            head = json.loads(row[4 : 4 + length])
            numbers = array("Q", row[4 + length :])
            size = len(numbers) // 3
            uses = zip(numbers[size : 2 * size], numbers[2 * size :], strict=True)
            sample = dict(zip(numbers[:size], uses, strict=True))
            found = cls(**{name: head[name] for name in _PLAIN}, sample=sample)
            found.starts.clear()
            found.starts.extend(head["starts"])
            found.agains.extend((count, clock) for count, clock in head["agains"])
        except (ValueError, TypeError, KeyError, struct.error):
            return None
        return found


_PLAIN = [
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
    "hits",
    "uses",
    "last_hit_ratio",
]
_LENGTH = struct.Struct(">I")


# -- a dataset that several nodes read through this one --------------------------------------------

SLOTS = 256
"""Nodes that are told apart; further ones share the last slot. A bound of what pairs cost."""

FIRST_LEAST, FIRST_AGAIN = 256, 0.05
"""In the first epoch, after so many pairs of which at most this share came again, the dataset is taken to have epochs:
uses at random or by popularity are re-referenced much sooner. Guessed."""


class SharedDataset:
    """A dataset's pairs of unit and node. `each` is how many nodes used a unit in the last epoch, as a rule; 0 before one
    has passed."""

    def __init__(self, clock: int) -> None:
        # A few pairs occur twice an epoch: what was prefetched here and evicted before it was read is requested again.
        self.pairs = Dataset.begun(clock, noisy=True)
        self.each = 0
        self._requesters: dict[int, int] = {}  # slot → epoch of its last use

    def used(self, unit: int, slot: int, clock: int, length: int, hit: bool) -> bool:
        """As `Dataset.used`; `slot` is the node's number."""
        pairs = self.pairs
        self._requesters[slot] = pairs.number
        pairs.last, pairs.idle = clock, False
        pairs.access_filter.add(_mixed(unit, slot))
        if unit >= pairs.threshold:
            return False
        # All pairs of a unit are sampled, or none: they differ in the lowest bits.
        if not pairs.used(unit // SLOTS * SLOTS + slot, clock, length, hit):
            return False
        self._requesters = {slot: last for slot, last in self._requesters.items() if last >= pairs.number - 1}
        units = [pair // SLOTS for pair, use in pairs.sample.items() if use[0] >= pairs.previous]
        # Rounded up: too high a number makes fewer units evictable first, and none that a node still wants.
        self.each = math.ceil(len(units) / len(set(units)) - 0.1) if units else 0
        return True

    def comes(self, unit: int) -> None:
        """As `Epochs.comes`."""
        self.pairs.access_filter.add(_mixed(unit, 0))

    def had_here(self, unit: int) -> bool:
        """True if this node's own readers have had it in this epoch."""
        return _mixed(unit, 0) in self.pairs.access_filter

    @property
    def epochs(self) -> bool:
        """True if its pairs have epochs, as far as is known."""
        pairs = self.pairs
        first = pairs.number == 1 and pairs.count >= FIRST_LEAST and len(self._requesters) > 1
        return pairs.epochs or (first and len(pairs.agains) <= FIRST_AGAIN * pairs.count)

    def evictable_first(self, unit: int) -> bool:
        """True if all nodes that are expected to read it have; in the first epoch, all that are known."""
        missing = len(self._requesters) - self.each if self.each else 0
        for slot in self._requesters:
            if _mixed(unit, slot) not in self.pairs.access_filter:
                missing -= 1
                if missing < 0:
                    return False
        return True


def _mixed(unit: int, slot: int) -> int:
    """A pair as an evenly distributed hash. Slot 0 is this node's own readers: then it is the unit itself."""
    return unit ^ slot * 0x9E3779B97F4A7C15 % UNITS


# -- the policy ------------------------------------------------------------------------------------

TRACKED = 32
"""Datasets lately used that are watched, at most 1 MiB each; the others are evicted by recency. A bound of memory."""


class Epochs:
    """All datasets of a cache. `version` changes whenever copies that were protected no longer are."""

    def __init__(self, policy: Policy = "auto") -> None:
        self.policy = policy
        self.version = 0
        self._datasets: OrderedDict[int, Dataset] = OrderedDict()
        self._shared: dict[int, SharedDataset] = {}
        self._slots = {"": 0}  # node → number, in the order in which they came; this node's readers are ""
        self._now = 0
        self._looked = 0

    def used(
        self, dataset: int, unit: int, clock: int, length: int, *, hit: bool, requester: str = ""
    ) -> bool:
        """A unit of `length` bytes is used at `clock`, which never goes back; `hit` if it was cached. `requester` is the
        requesting peer, "" for this node's readers. True if a new epoch of the dataset has begun."""
        self._now = clock
        if clock - self._looked >= 64:
            self._look_for_idle()
        found = self._datasets.get(dataset)
        if found is None:
            found = self._add(dataset, clock)
        found.last = clock
        found.idle = False
        found.access_filter.add(unit)
        shared = self._shared.get(dataset)
        before = found if shared is None else self._decides(dataset)
        begun = unit < found.threshold and found.used(unit, clock, length, hit)
        if shared is None and requester:
            shared = self._shared[dataset] = SharedDataset(clock)
        if shared is not None:
            slot = self._slots.setdefault(requester, min(len(self._slots), SLOTS - 1))
            begun_shared = shared.used(unit, slot, clock, length, hit)
            decides = self._decides(dataset)
            begun = decides is not before or (begun_shared if decides is shared.pairs else begun)
        if begun:
            self._datasets.move_to_end(dataset)
            self.version += 1
        return begun

    def _decides(self, dataset: int) -> Dataset | None:
        """The detection that decides: that of the units, or that of the pairs where only these have epochs."""
        found, shared = self._datasets.get(dataset), self._shared.get(dataset)
        if shared is None or found is None or (found.epochs and not shared.epochs):
            return found
        return shared.pairs

    def protects(self, dataset: int, clock: int) -> bool:
        """True if a copy last used at `clock` is still to be used in this epoch, unless it is `evictable_first`."""
        found = self._decides(dataset)
        if found is None or clock < found.previous or found.idle or not self._keeps(dataset, found):
            return False
        return clock < found.start or (dataset in self._shared and self._shared[dataset].pairs is found)

    def evictable_first(self, dataset: int, unit: int) -> bool:
        """True if all nodes have had the unit in this epoch; False where pairs do not decide."""
        shared = self._shared.get(dataset)
        return (
            shared is not None
            and shared.pairs is self._decides(dataset)
            and self._keeps(dataset, shared.pairs)
            and shared.evictable_first(unit)
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
        """The epoch that the dataset is in; 0 if nothing is known of it."""
        found = self._decides(dataset)
        return found.number if found is not None else 0

    def comes(self, dataset: int, unit: int) -> None:
        """A reader of this node is about to use it: from now on this epoch has had it."""
        (self._datasets.get(dataset) or self._add(dataset, self._now)).access_filter.add(unit)
        if dataset in self._shared:
            self._shared[dataset].comes(unit)

    def had(self, dataset: int, unit: int) -> bool:
        """True if this node's readers have had the unit in this epoch of the dataset, cached or not. Wrong at most once in a
        hundred."""
        found = self._decides(dataset)
        if found is None:
            return False
        shared = self._shared.get(dataset)
        if shared is not None and shared.pairs is found:
            return shared.had_here(unit)
        use = found.sample.get(unit)
        return unit in found.access_filter or (use is not None and use[0] >= found.start)

    def _add(self, dataset: int, clock: int) -> Dataset:
        if len(self._datasets) >= TRACKED:
            last = min(self._datasets, key=lambda d: self._datasets[d].last)
            del self._datasets[last]
            self._shared.pop(last, None)
            self.version += 1
        found = self._datasets[dataset] = Dataset.begun(clock)
        return found

    def _look_for_idle(self) -> None:
        """Protect nothing of a dataset that was not used while others were, for half as long as its epoch took."""
        self._looked = self._now
        pairs = (shared.pairs for shared in self._shared.values())
        for found in chain(self._datasets.values(), pairs):
            if not found.idle and self._now - found.last > max(64, (found.start - found.previous) // 2):
                found.idle = True
                self.version += 1

    def status(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(dataset, what is known of it), the one used last first."""
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
        """(list of all datasets, rows of those that changed since the last call), for `restore`."""
        changed = {number: found.packed() for number, found in self._datasets.items() if found.changed}
        for number in changed:
            self._datasets[number].changed = False
        return json.dumps([self._now, list(self._datasets)]).encode(), changed

    def restore(self, listed: bytes | None, rows: Iterable[tuple[int, bytes | None]]) -> None:
        """Go on where `changes` was called, without what is damaged."""
        try:
            now, numbers = json.loads(listed or b"[0, []]")
            self._now = int(now)
            wanted = {int(number) for number in numbers}
        except (ValueError, TypeError):
            return
        for number, row in rows:
            found = Dataset.unpacked(row or b"")
            if number in wanted and found is not None:
                self._datasets[number] = found

    @staticmethod
    def listed(row: bytes | None) -> list[int]:
        """The datasets that a row of `changes` lists."""
        try:
            return [int(number) for number in json.loads(row or b"[0, []]")[1]]
        except (ValueError, TypeError, IndexError):
            return []


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 3)


# -- which dataset an object belongs to ------------------------------------------------------------

MOST = 64
"""First components that one source may have as datasets of their own; more are classes, days or users. Guessed."""


class Datasets:
    """ObjectId → number of its dataset (32 bits), and back to a name for people.

    A dataset is the first component of a name below the prefix that is mounted. A source whose first components are parts of
    a dataset (`train/` mounted, with a directory for each of a thousand classes) is one dataset."""

    def __init__(self) -> None:
        self.version = 0  # grows when objects may belong to another dataset than before
        self._prefixes: dict[str, list[str]] = {}
        self._seen: dict[str, set[str]] = {}
        self._whole: set[str] = set()
        self._names: dict[int, str] = {}
        self._numbers: dict[tuple[str, str], int] = {}  # by place and first component

    def mounted(self, places: Iterable[tuple[str, str]]) -> None:
        """What is mounted: (source, prefix of its keys) each."""
        self.version += 1
        for source, prefix in places:
            self._prefixes.setdefault(source, []).append(prefix)
        for prefixes in self._prefixes.values():
            prefixes.sort(key=len, reverse=True)

    def __call__(self, object_id: ObjectId) -> int:
        source, key = object_id.source, object_id.key
        prefix = ""
        for mounted in self._prefixes.get(source, ()):  # a plain loop: each file comes here four times
            if key.startswith(mounted):
                prefix = mounted
                break
        first, slash, _ = key[len(prefix) :].lstrip("/").partition("/")
        place = f"{source}\0{prefix}"
        if not slash or place in self._whole:
            first = ""
        number = self._numbers.get((place, first))
        return number if number is not None else self._number(place, prefix, first)

    def _number(self, place: str, prefix: str, first: str) -> int:
        """The number of a component that is new, or one too many."""
        if place not in self._whole:
            seen = self._seen.setdefault(place, set())
            seen.add(first)
            if len(seen) > MOST:
                del self._seen[place]
                self._whole.add(place)
                self.version += 1
                first = ""
        number = zlib.crc32(f"{place}\0{first}".encode("utf-8", "surrogatepass"))
        if number not in self._names:
            self._names[number] = prefix + first
        self._numbers[place, first] = number
        return number

    def name(self, number: int) -> str:
        """The prefix and first component of its names."""
        return self._names.get(number, f"{number:08x}")

    def dump(self) -> bytes:
        """What `restore` takes."""
        return json.dumps([sorted(self._whole), self._names]).encode()

    def restore(self, row: bytes | None) -> None:
        """Go on where `dump` was called; with nothing if the row is damaged."""
        try:
            whole, names = json.loads(row or b"[[], {}]")
            self._whole = {str(place) for place in whole}
            self._names = {int(number): str(name) for number, name in names.items()}
        except (ValueError, TypeError, AttributeError):
            pass


class Course:
    """How far a version's dataset has come in its epoch, for prefetch."""

    def __init__(self, epochs: Epochs, datasets: Datasets) -> None:
        self._epochs = epochs
        self._datasets = datasets

    def epoch(self, object_id: ObjectId) -> int:
        """Its dataset's epoch: the number grows when one begins; 0 if nothing is known."""
        return self._epochs.number(self._datasets(object_id))

    def had(self, object_id: ObjectId) -> bool:
        """True if (the beginning of) the version was used in this epoch, cached or not."""
        return self._epochs.had(self._datasets(object_id), unit_hash(object_id.digest, 0))

    def comes(self, object_id: ObjectId) -> None:
        """A reader has come for the version: from now on this epoch has had it."""
        self._epochs.comes(self._datasets(object_id), unit_hash(object_id.digest, 0))


# -- the order of eviction -------------------------------------------------------------------------

PREFETCHED_S = 900.0
"""How long prefetched blocks wait for their first reader before they are evicted like anything else. Guessed."""

PREFETCHED_COPIES = 65_536
"""Copies that may wait so, about 400 bytes each: a terabyte of large files. Beyond it the oldest wait no longer. A bound of
memory."""

EVICTABLE_FIRST = 65_536
"""Copies to be evicted first that are remembered of a tier, about 200 bytes each. A bound of memory: many more than are
evicted before there are others."""

KEPT_AT_ONCE = 1024
"""Protected rows, and copies in use, that one search passes over, about 1 ms. Derived: after an epoch began, a million rows
cost a thousand demands the right victim, a thousandth of them."""

HELD = 4096
"""Rows remembered because they could not go just then; beyond it the walk starts over. A bound of memory."""

EPOCHS_SAVED_EVERY = 10
"""Flushes from one writing of the epochs' state to the next, 100 KB for each dataset in use. Derived: 10 KB a second, with
a flush in each. What a crash loses of it makes the next epoch look a little less like one."""


class Class(enum.IntEnum):
    """Priority classes, the first to go first."""

    REMOTE_OWNED = 0
    """Another node owns it, and it does not wait for a reader."""
    EVICTABLE = 1
    """Used in this epoch already, or not in all of the last; or its dataset has no epochs."""
    REMOTE_PREFETCHED = 2
    """Another node owns it, and it waits for its first reader."""
    PROTECTED = 3
    """It waits for its first reader, or this epoch has yet to use it."""


OrderKey = tuple[int, Class, int]
"""(tier, priority class, clock): the order of eviction."""

Classes = tuple[Class, ...]
"""Classes that may be evicted for something to come, in their order."""

NOTHING: Classes = ()
REMOTE_OWNED: Classes = (Class.REMOTE_OWNED,)
ANY_REMOTE_OWNED: Classes = (Class.REMOTE_OWNED, Class.REMOTE_PREFETCHED)
LOWEST: Classes = (Class.REMOTE_OWNED, Class.EVICTABLE)
ANY: Classes = tuple(Class)
OURS: Classes = (Class.EVICTABLE, Class.PROTECTED)

Victim = tuple[CachedObject, Copy]


Verdict = bool | None
"""What is known of a row's copy: it can go (True), or not now; None: it is no longer there, or another row speaks of it."""


class Walk:
    """A search of a tier's rows in the order of their clocks. `keep` tells which to pass over. Rows that are looked at once
    more have an empty cursor."""

    def __init__(self, index: Index, tier: int, keep: Callable[[CopyKey, int, int], bool]) -> None:
        self._index = index
        self._tier = tier
        self._keep = keep
        self._rows: deque[Row] = deque()
        self._held: list[Row] = []
        self._after = b""
        self.passed = -1
        """Clock of the last row passed: nothing below it will be looked at without `add`."""

    def first(self, judge: Callable[[CopyKey, int], Verdict], older_than: int | None) -> CopyKey | None:
        """The first copy that can go. It is found again until it has gone."""
        kept = 0
        while True:
            if not self._rows:
                self._rows.extend(self._index.oldest(self._tier, self._after, 256))
                if not self._rows:
                    return None
            row = self._rows[0]
            _, key, clock, dataset = row
            if older_than is not None and clock >= older_than:
                return None
            if self._keep(key, clock, dataset):
                kept += 1
            else:
                verdict = judge(key, clock)
                if verdict:
                    return key
                if verdict is not None:
                    self._held.append((b"", key, clock, dataset))
            self._rows.popleft()
            if row[0]:
                self._after, self.passed = row[0], clock
            if kept >= KEPT_AT_ONCE:
                return None

    def add(self, key: CopyKey, clock: int, dataset: int) -> None:
        """A row is to be looked at after the next flush, if it was passed; else the search will come to it in its place."""
        if clock <= self.passed:
            self._held.append((b"", key, clock, dataset))

    def flushed(self) -> None:
        """Rows are up to date again: go on where the walk was, after those that were held."""
        if len(self._held) > HELD:
            self.restart()
            return
        self._held += (row for row in self._rows if not row[0])  # no search has come that far
        self._rows = deque(sorted(self._held, key=lambda row: row[2]))
        self._held = []

    def restart(self) -> None:
        self._rows.clear()
        self._held.clear()
        self._after, self.passed = b"", -1


class Keys:
    """Keys of copies by tier, used longest ago first."""

    def __init__(self, most: int | None = None) -> None:
        self.tiers: dict[int, OrderedDict[CopyKey, None]] = {}  # empty: no key was ever added
        self._most = most

    def __contains__(self, key: CopyKey) -> bool:
        return key in self.tiers.get(key[0], ())

    def add(self, key: CopyKey) -> None:
        keys = self.tiers.setdefault(key[0], OrderedDict())
        if self._most is None or len(keys) < self._most:
            keys[key] = None

    def discard(self, key: CopyKey) -> bool:
        """True if it was there."""
        return key in self and self.tiers[key[0]].pop(key) is None

    def used(self, key: CopyKey) -> None:
        """Those used again stay longer."""
        keys = self.tiers.get(key[0])
        if keys is not None and key in keys:
            keys.move_to_end(key)

    def clear(self, tier: int | None = None) -> None:
        """Of one tier, or all."""
        if tier is None:
            self.tiers.clear()
        else:
            self.tiers.pop(tier, None)

    def oldest(self, tier: int) -> Iterator[CopyKey]:
        """Some of a tier, in the order in which they go. What is passed over is looked at last in the next search."""
        keys = self.tiers.get(tier, OrderedDict())
        for _ in range(min(len(keys), KEPT_AT_ONCE)):
            key = next(iter(keys))
            yield key
            self.used(key)


class Waiting(NamedTuple):
    """A prefetched copy that waits for its first reader until the time `until`."""

    until: float
    clock: int
    dataset: int


class Eviction:
    """The order of eviction of all tiers, and every change of a copy's place in it.

    `remote_owned` are copies of extents that other nodes own. They lie in the fastest tier while nothing else wants their
    place: they displace only each other, go before everything else, are neither moved nor saved at a stop, and after a
    restart are like any other copy. `room.py` alone changes which they are, with the bytes that it counts of them."""

    def __init__(
        self, catalog: Catalog, index: Index, tiers: list[Tier], policy: Policy, now: Callable[[], float]
    ) -> None:
        self._catalog = catalog
        self._tier = {tier.number: tier for tier in tiers}
        self._now = now
        self.epochs = Epochs(policy)
        self.datasets = Datasets()
        self.course = Course(self.epochs, self.datasets)
        self.remote_owned = Keys()
        self._evictable_first = Keys(EVICTABLE_FIRST)
        self._waiting: OrderedDict[CopyKey, Waiting] = OrderedDict()
        self._evictable = {
            tier.number: Walk(index, tier.number, lambda *row: self.class_of(*row) is not Class.EVICTABLE)
            for tier in tiers
        }
        self._any = {
            tier.number: Walk(index, tier.number, lambda key, *_: key in self.remote_owned) for tier in tiers
        }
        self._flush_lock = trio.Lock()
        self._flushes = 0
        self._restore(index)
        self._seen_version = self._saved_version = self.epochs.version

    # -- a copy's place ----------------------------------------------------------------------------

    def class_of(self, key: CopyKey, clock: int, dataset: int) -> Class:
        if key in self.remote_owned:
            return Class.REMOTE_PREFETCHED if key in self._waiting else Class.REMOTE_OWNED
        return Class.PROTECTED if self._wanted(key, clock, dataset) else Class.EVICTABLE

    def _wanted(self, key: CopyKey, clock: int, dataset: int) -> bool:
        return key in self._waiting or (
            self.epochs.protects(dataset, clock) and key not in self._evictable_first
        )

    def key(self, copy: Copy) -> OrderKey:
        """The copy's place in the order of eviction."""
        return copy.tier, self.class_of(copy.key, copy.clock, copy.dataset), copy.clock

    def protected(self, copy: Copy) -> bool:
        """True if it is pinned, waits for its first reader, or is still to be used in this epoch."""
        return copy.pinned or self._wanted(copy.key, copy.clock, copy.dataset)

    def touch(self, copy: Copy) -> None:
        """Used now."""
        key = self._catalog.touch(copy)
        if self._waiting:
            self._waiting.pop(key, None)
        if self.remote_owned.tiers:
            self.remote_owned.used(key)

    def touch_if_old(self, copy: Copy) -> bool:
        """`touch`, if this is a separate use and not the last one still going on."""
        if self._catalog.lately_used(copy) or not copy.bitmap:
            return False
        self.touch(copy)
        return True

    def touch_if_flushed(self, copy: Copy) -> bool:
        """`touch`, unless it was used since the last flush: then it is young anyway."""
        if self._catalog.used_since_flush(copy) or not copy.bitmap:
            return False
        self.touch(copy)
        return True

    def used(self, obj: CachedObject, copy: Copy, *, hit: bool, requester: str = "") -> None:
        """Tell the policy of a use, after `touch`; `requester` is the requesting peer, "" for this node's readers. Copies
        that other nodes own are no part of the datasets kept here: each epoch brings other parts of them."""
        if copy.dataset_version != self.datasets.version:
            copy.dataset = self.datasets(obj.id)
            copy.dataset_version = self.datasets.version  # which may have grown just now
        unit = unit_hash(copy.digest, copy.extent)
        if self.remote_owned.tiers and copy.key in self.remote_owned:
            self.epochs.comes(copy.dataset, unit)
            return
        length = self._catalog.extent_bytes(copy)
        self.epochs.used(copy.dataset, unit, copy.clock, length, hit=hit, requester=requester)
        self._look_again()
        if self.epochs.evictable_first(copy.dataset, unit):
            self._evictable_first.add(copy.key)

    def prefetched(self, copy: Copy) -> None:
        """Blocks have come that no reader has asked for yet."""
        self.touch(copy)
        copy.used = 0
        self._wait(copy, self._now() + PREFETCHED_S)

    def _wait(self, copy: Copy, until: float) -> None:
        self._waiting[copy.key] = Waiting(until, copy.clock, copy.dataset)
        if len(self._waiting) > PREFETCHED_COPIES:
            self._give_up(next(iter(self._waiting)))

    def left_behind(self, obj: CachedObject) -> None:
        """Its readers have gone: what was prefetched for them waits no longer."""
        for copy in obj.copies.values() if self._waiting else ():
            if copy is not None and copy.key in self._waiting:
                self._give_up(copy.key)

    def _give_up(self, key: CopyKey) -> None:
        """It may go like anything else."""
        waited = self._waiting.pop(key)
        self._evictable[key[0]].add(key, waited.clock, waited.dataset)

    def own(self, copy: Copy) -> bool:
        """This node keeps it from now on. True if another node owned it until now."""
        if not self.remote_owned.tiers or not self.remote_owned.discard(copy.key):
            return False
        self._evictable[copy.tier].add(copy.key, copy.clock, copy.dataset)
        return True

    def moved(self, source: Copy, target: Copy) -> None:
        """The target is as old as what it was copied from."""
        if source.clock > target.clock:
            target.clock, target.used = source.clock, source.used
        if source.key in self._waiting and target.key not in self._waiting:
            self._wait(target, self._waiting[source.key].until)
        if source.key in self._evictable_first:
            self._evictable_first.add(target.key)
        self._catalog.changed(target)

    def removed(self, copy: Copy) -> None:
        """It has gone."""
        key = copy.key
        self._waiting.pop(key, None)
        self.remote_owned.discard(key)
        self._evictable_first.discard(key)

    def forget_tier(self, tier: int) -> None:
        self.remote_owned.clear(tier)
        self._evictable_first.clear(tier)

    # -- the search --------------------------------------------------------------------------------

    def victim(
        self, tier: int, classes: Classes = ANY, *, older_than: int | None = None, moving: bool = False
    ) -> Victim | None:
        """The first copy in the order of eviction that is of these classes and that no caller uses, nor anything that would
        have to go with it. It stays the first until it has gone. `older_than` is a clock, for copies of this node's own.
        `moving`: it goes to another tier, so it may be pinned."""
        self._look_again()
        for one in classes:
            if one in (Class.REMOTE_OWNED, Class.REMOTE_PREFETCHED):
                found = self._remote_owned_victim(tier, waiting=one is Class.REMOTE_PREFETCHED)
            elif one is Class.EVICTABLE:
                found = self._first(self._evictable[tier], tier, True, older_than, moving)
            else:
                found = self._first(self._any[tier], tier, False, older_than, moving)
            if found is not None:
                return found
        return None

    def _remote_owned_victim(self, tier: int, *, waiting: bool) -> Victim | None:
        for key in self.remote_owned.oldest(tier):
            obj = self._catalog.by_digest(key[1])
            copy = self._catalog.copy(obj, key[0], key[2])
            if (
                copy is not None
                and (waiting or key not in self._waiting)
                and self._can_go(obj, copy, moving=False)
            ):
                whole = self._catalog.copies(obj, tier) if obj.is_immutable(self._tier[tier]) else ()
                if all(other.key in self.remote_owned for other in whole):
                    return obj, copy
        return None

    def _first(
        self, walk: Walk, tier: int, evictable: bool, older_than: int | None, moving: bool
    ) -> Victim | None:
        """The first copy of this node's own; only `evictable` ones, or any."""
        catalog = self._catalog

        def judge(key: CopyKey, clock: int) -> Verdict:
            if catalog.unlisted(key):
                return None
            obj = catalog.by_digest(key[1])
            copy = catalog.copy(obj, key[0], key[2])
            if copy is None:
                catalog.damaged(key, clock)
                return None
            if copy.clock != clock:
                return None
            return self._can_go(obj, copy, moving)

        # Rows first: a copy that was touched since the last flush is younger than every row that is up to date.
        key = walk.first(judge, older_than)
        if key is not None:
            obj = catalog.by_digest(key[1])
            return obj, obj.copies[key[0], key[2]]  # type: ignore[return-value]
        first = (
            catalog.copy(catalog.by_digest(d), t, e)
            for t, d, e in self._evictable_first.oldest(tier)
            if evictable
        )
        young = (
            copy
            for copy in chain(first, catalog.unwritten())
            if copy is not None and copy.tier == tier and copy.bitmap and copy.key not in self.remote_owned
        )
        for copy in islice(young, KEPT_AT_ONCE):
            _, priority, clock = self.key(copy)
            if (older_than is None or clock < older_than) and not (evictable and priority is Class.PROTECTED):
                obj = catalog.by_digest(copy.digest)
                if self._can_go(obj, copy, moving):
                    return obj, copy
        return None

    def _can_go(self, obj: CachedObject, copy: Copy, moving: bool) -> bool:
        if copy.pins or (copy.pinned and not moving):
            return False
        tier = self._tier[copy.tier]
        return not (obj.is_immutable(tier) and any(other.pins for other in obj.on(tier)))

    def _look_again(self) -> None:
        """After an epoch began: copies that were protected no longer are."""
        if self._seen_version != self.epochs.version:
            self._seen_version = self.epochs.version
            self._evictable_first.clear()
            for walk in self._evictable.values():
                walk.restart()

    # -- the index ---------------------------------------------------------------------------------

    async def flush(self, *, closing: bool = False) -> None:
        """Write what changed to the index. Durable when this returns, or kept for next time and `index_error` says why."""
        async with self._flush_lock:
            self._catalog.flush_begins()
            while self._waiting and next(iter(self._waiting.values())).until < self._now():
                self._give_up(next(iter(self._waiting)))
            if not self._catalog.changes and not closing:
                return
            try:
                for key, clock, dataset in await self._catalog.flush(self._notes(closing)) or ():
                    self._evictable[key[0]].add(key, clock, dataset)
            finally:
                for walk in self._evictable.values():
                    walk.flushed()
                for walk in self._any.values():
                    walk.restart()

    def _notes(self, closing: bool) -> dict[bytes, bytes]:
        """What the index is told besides its rows: the clock, and the epochs' state when it is time to write it.

        Rows alone do not tell the clock: what is pinned on the last tier has no place in the order, and a start reads no
        others. If the clock went back, what is used now would look older than what was used then."""
        notes = {b"clock": self._catalog.clock.to_bytes(8, "big")}
        self._flushes += 1
        if self._saved_version == self.epochs.version and self._flushes % EPOCHS_SAVED_EVERY and not closing:
            return notes
        self._saved_version = self.epochs.version
        listed, rows = self.epochs.changes()
        notes |= {b"epochs": listed, b"datasets": self.datasets.dump()}
        return notes | {b"epochs%08x" % number: row for number, row in rows.items()}

    def _restore(self, index: Index) -> None:
        """Go on where an earlier daemon was: with its datasets, and behind every clock that it has given."""
        self.datasets.restore(index.note(b"datasets"))
        listed = index.note(b"epochs")
        rows = [(number, index.note(b"epochs%08x" % number)) for number in self.epochs.listed(listed)]
        self.epochs.restore(listed, rows)
        noted = int.from_bytes(index.note(b"clock") or b"", "big")
        self._catalog.clock = max(self._catalog.clock, noted + 1)
        self._catalog.flush_begins()

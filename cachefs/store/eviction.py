"""The order of eviction: which copy of a tier is evicted first.

A copy's place is one key: (tier, priority class, clock of its last use), lowest first. The index keeps rows by (tier,
clock). The class is computed, because it changes for many copies at once when an epoch begins: from which copies other
nodes own, which wait for their first reader, and which units this epoch of a dataset has used.

A search walks a tier's rows, least recently used first, and skips those of a higher class. A protected row stays
protected until an epoch begins, so it is looked at once: with a million rows, the search goes on where it was. Rows whose
copies were in use, and rows that are added behind the search, are looked at after the next flush.

**Epoch detection** is pure: it has no I/O and no clock of its own. Training reads a dataset once per epoch, in another
order each time. The best victim is a copy that was *already used in this epoch*, because its next use is the furthest
away. A copy that was used in the last epoch and not yet in this one is protected. A copy that was not used for a whole
epoch is evicted first. Nothing is refused admission: a block that was fetched and read becomes the next victim. So the
policy only needs the clocks at which the epochs of a dataset began, on the logical clock of the cache. With `auto` it
also decides whether a dataset has epochs at all; without epochs, recency decides.

- `Dataset` detects epochs in a sequence of uses. A *re-reference* is a use of a unit that was used in this epoch already.
  Many close together mean that a new epoch began with the first of them. A dataset has epochs if at that moment most of
  its known units had been used, and nearly every use was a re-reference. Neither holds for uses at random or by
  popularity. Used units are remembered beyond what is cached, as a sample by hash (as in SHARDS).
- `AccessFilter` is the set of units used in this epoch. It covers all units, more compactly than the sample.
- `SharedDataset` handles a dataset that several nodes read through this one. If each of four nodes reads all of it in its
  own order, a unit is used four times an epoch, which looks like no epoch or four short ones. Each *pair* of a unit and a
  requesting peer occurs once an epoch, so pairs are watched in the same way. A unit is *evictable first* when as many nodes
  have used it in this epoch as in the last. If each node reads a part that changes every epoch (a distributed sampler),
  pairs show no epochs and units do. Peers are told apart by host.

Set dueling (DIP) would be simpler, and was simulated: `bench/set_dueling.py` says which requirements it misses.
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
"""The first place of a unit is taken from 28 bits of its hash, as many as the last filter needs, and the step between places
from 28 others. Python computes fastest with such small numbers."""


class AccessFilter:
    """A growing Bloom filter of evenly distributed 64-bit hashes: two bytes a unit when full. It contains all units that
    were added, and less than one in a hundred of the others. Adding takes 2 µs among 200,000 (measured)."""

    def __init__(self) -> None:
        self._filters: list[tuple[bytearray, int]] = []  # (bits, mask of its places); the largest first
        self._room = 0  # units that the largest filter still takes

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
"""Units remembered of each dataset, 250 bytes each. Derived: 1 % of them are 40 uses, whose number is known to a sixth."""

REREFERENCE_SHARE = 0.01
"""Re-references, as a share of the units used in this epoch, that make a new epoch. Units evicted until then are still
needed: half a percent to one percent of the dataset, measured with the simulator. A smaller share would soon be reached
by a few files that are read twice."""

FEWEST_REREFERENCES = 4
"""The least number of re-references that make a new epoch. Guessed between two cases: a user reads three files of a small
dataset again, which is no epoch, and the second epoch of 40 shards is noticed before an eighth of them was read."""

DONE_SHARE = 0.95
"""Once this share of the units of a dataset with epochs was used, the first re-reference begins the next epoch. Waiting for
more would evict units that are all still needed: of 64 extents, a tenth. Guessed: few units are unused by then."""

REREFERENCE_DENSITY = 0.25
"""Re-references must be this share of the uses since the first of them, so that a few in a hundred, spread over an epoch,
never make a new one. Guessed."""

PATIENCE = 4
"""Where re-references are common (`noisy`), an epoch begins with so many times more of them, unless they make up
`EPOCH_SHARE` of the uses, as they soon do when an epoch has really begun. Guessed."""

EPOCH_SHARE = 0.6
"""A dataset has epochs if this share of it had been used when a new epoch began, and this share of the uses at that moment
were re-references. Simulated: orders without replacement give 0.9 and more for both shares, uses at random and by
popularity less than 0.5 for one of them."""

CORRELATED_LEAST, CORRELATED_MOST = 4, 256
"""Bounds for the number of other units between two separate uses of a unit; the number is an eighth of the dataset.
Derived: 64 readers of large files touch at most 128 extents from one second to the next."""

EPOCHS_REMEMBERED = 4
"""Epochs without a use after which a unit is no longer part of its dataset. Derived: with two, uses at random, whose
supposed epochs each touch a third of the units, would look like uses without replacement."""

Use = tuple[int, int]
"""(clock when this use of a unit began, number of the dataset's last use of it)"""


@dataclass(slots=True)
class Dataset:
    """Detects the epochs of one dataset. Clocks are the cache's.

    `start` is when this epoch began, `previous` the `edge` of the epoch before. A unit used between `edge` and `start` may
    have been used in this epoch or in the one before. `sample` maps the known units below the hash `threshold` to their last
    use. `fresh` counts those used in this epoch, `size` those that belonged to the dataset when it began (0: not known).
    `rereferences` are (count, clock) each. `noisy`: some units are used again within an epoch. `shared` watches the pairs of
    units and nodes once a peer has read the dataset."""

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
    rereferences: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SAMPLE))
    starts: deque[int] = field(default_factory=lambda: deque([0], maxlen=EPOCHS_REMEMBERED))
    hits: int = 0
    uses: int = 0
    last_hit_ratio: float | None = None
    unit_bytes: float = 0.0
    changed: bool = True
    access_filter: AccessFilter = field(default_factory=AccessFilter)
    shared: SharedDataset | None = None

    @classmethod
    def begun(cls, clock: int, *, noisy: bool = False) -> Dataset:
        """A dataset whose first use is at `clock`."""
        starts = deque([clock], maxlen=EPOCHS_REMEMBERED)
        return cls(start=clock, previous=clock, edge=clock, noisy=noisy, starts=starts)

    @property
    def followed(self) -> Dataset:
        """The detection to follow: this one if only units have epochs, or no peer reads the dataset; else that of the
        pairs."""
        shared = self.shared
        return self if shared is None or (self.epochs and not shared.epochs) else shared.pairs

    @property
    def rate(self) -> float:
        """Share of the units that are sampled."""
        return self.threshold / UNITS

    @property
    def correlated(self) -> float:
        """Number of uses of other units that must lie between two separate uses of a unit."""
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
        """Note the use of a sampled unit. True if a new epoch has begun, with this use or shortly before."""
        known = self.sample.get(unit)
        if known is not None:
            others = self.count - known[1]  # uses of sampled units, at most those of the whole dataset
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
            self.rereferences.append((self.count, clock))
            return self._look()
        self.fresh += 1
        if len(self.sample) > SAMPLE:
            self._sample_less()
        return False

    def _used_since(self, clock: int) -> int:
        return sum(use[0] >= clock for use in self.sample.values())

    def _look(self) -> bool:
        """Begin an epoch if there have been enough re-references. True if one has begun."""
        enough = max(FEWEST_REREFERENCES, math.ceil(REREFERENCE_SHARE * self.fresh))
        if self.epochs and not self.noisy and self.size and self.fresh >= DONE_SHARE * self.size:
            enough = 1
        if len(self.rereferences) < enough:
            return False
        count, clock = self.rereferences[-enough]
        density = enough / (self.count - count + 1)
        if self.noisy and density < EPOCH_SHARE:
            if len(self.rereferences) < PATIENCE * enough:
                return False
            count, clock = self.rereferences[-PATIENCE * enough]
            density = PATIENCE * enough / (self.count - count + 1)
        if density < REREFERENCE_DENSITY:
            return False
        self._begin(clock, density)
        return True

    def _begin(self, clock: int, density: float) -> None:
        self.starts.append(clock)
        # Units used again since `clock` were used in the epoch before, too: `used` counts them.
        fresh, used = self._used_since(clock), self._used_since(self.start)
        self.size = self.alive
        self.epochs = min(density, used / self.size) >= EPOCH_SHARE
        self.previous, self.start, self.fresh = self.edge, clock, fresh
        before = [used for used in self.lately if used < clock]
        self.edge = before[-min(len(before), math.ceil(self.correlated * self.rate))] if before else clock
        self.number += 1
        self.rereferences.clear()
        self.access_filter = AccessFilter()
        self.last_hit_ratio = self.hit_ratio
        self.hits = self.uses = 0

    def _sample_less(self) -> None:
        """Forget units that no longer belong to the dataset; if these are few, half of the hashes instead."""
        if self.alive > 0.75 * SAMPLE:
            self.threshold //= 2
            self.sample = {unit: use for unit, use in self.sample.items() if unit < self.threshold}
        else:
            self.sample = {unit: use for unit, use in self.sample.items() if use[0] >= self.starts[0]}
        self.fresh = self._used_since(self.start)
        self.size = 0
        self.rereferences.clear()

    # A row is: the length of the head, the head as JSON, three columns of `sample` as 64-bit integers.

    def packed(self) -> bytes:
        """The state as a row for `unpacked`, to keep over restarts."""
        head = {name: getattr(self, name) for name in _PLAIN}
        head["starts"], head["agains"] = list(self.starts), list(self.rereferences)[-SAMPLE // 8 :]
        text = json.dumps(head).encode()
        columns = [array("Q", self.sample)]
        columns += [array("Q", column) for column in zip(*self.sample.values(), strict=True)]
        return _LENGTH.pack(len(text)) + text + b"".join(column.tobytes() for column in columns)

    @classmethod
    def unpacked(cls, row: bytes) -> Dataset | None:
        """The dataset of a row of `packed`; None if the row is damaged."""
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
            found.rereferences.extend((count, clock) for count, clock in head["agains"])
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
"""Nodes that are told apart; further ones share the last slot. A bound of the cost of pairs."""

FIRST_EPOCH_PAIRS, FIRST_EPOCH_REREFERENCES = 256, 0.05
"""In the first epoch, after so many pairs of which at most this share were re-references, the dataset is taken to have
epochs: uses at random or by popularity have re-references much sooner. Guessed."""


class SharedDataset:
    """A dataset's pairs of unit and node. `each` is the mean number of nodes that used a unit in the last epoch, rounded up;
    0 before an epoch has passed."""

    def __init__(self, clock: int) -> None:
        # A few pairs occur twice an epoch: a unit that was prefetched here, and evicted before its read, is requested again.
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
        # The pairs of a unit differ only in the lowest bits, so either all of them are sampled or none.
        if not pairs.used(unit // SLOTS * SLOTS + slot, clock, length, hit):
            return False
        self._requesters = {slot: last for slot, last in self._requesters.items() if last >= pairs.number - 1}
        units = [pair // SLOTS for pair, use in pairs.sample.items() if use[0] >= pairs.previous]
        # Rounded up: with too high a number fewer units are evictable first, but none that a node still needs.
        self.each = math.ceil(len(units) / len(set(units)) - 0.1) if units else 0
        return True

    @property
    def epochs(self) -> bool:
        """True if its pairs have epochs, or in the first epoch seem to."""
        pairs = self.pairs
        first = pairs.number == 1 and pairs.count >= FIRST_EPOCH_PAIRS and len(self._requesters) > 1
        return pairs.epochs or (first and len(pairs.rereferences) <= FIRST_EPOCH_REREFERENCES * pairs.count)

    def evictable_first(self, unit: int) -> bool:
        """True if as many nodes have used the unit as are expected to; in the first epoch, all that are known."""
        missing = len(self._requesters) - self.each if self.each else 0
        for slot in self._requesters:
            if _mixed(unit, slot) not in self.pairs.access_filter:
                missing -= 1
                if missing < 0:
                    return False
        return True


def _mixed(unit: int, slot: int) -> int:
    """The pair as an evenly distributed hash. For slot 0, this node's own readers, it is the unit itself."""
    return unit ^ slot * 0x9E3779B97F4A7C15 % UNITS


# -- the policy ------------------------------------------------------------------------------------

TRACKED = 32
"""Datasets whose epochs are detected, those used last, at most 1 MiB each. Others are evicted by recency. A bound of
memory."""


class Epochs:
    """The epochs of all datasets of a cache. `version` grows whenever copies lose their protection."""

    def __init__(self, policy: Policy = "auto") -> None:
        self.policy = policy
        self.version = 0
        self._datasets: OrderedDict[int, Dataset] = OrderedDict()
        self._slots = {"": 0}  # node → slot, in the order of their first uses; this node's readers are ""
        self._now = 0
        self._looked = 0

    def used(
        self, dataset: int, unit: int, clock: int, length: int, *, hit: bool, requester: str = ""
    ) -> bool:
        """Note the use of a unit of `length` bytes at `clock`, which never goes back; `hit` if it was cached. `requester` is
        the requesting peer, "" for this node's readers. True if a new epoch of the dataset has begun."""
        self._now = clock
        if clock - self._looked >= 64:
            self._look_for_idle()
        found = self._datasets.get(dataset) or self._add(dataset, clock)
        found.last = clock
        found.idle = False
        found.access_filter.add(unit)
        before = found if found.shared is None else found.followed
        begun = unit < found.threshold and found.used(unit, clock, length, hit)
        if found.shared is None and requester:
            found.shared = SharedDataset(clock)
        if found.shared is not None:
            slot = self._slots.setdefault(requester, min(len(self._slots), SLOTS - 1))
            begun_shared = found.shared.used(unit, slot, clock, length, hit)
            followed = found.followed
            begun = followed is not before or (begun if followed is found else begun_shared)
        if begun:
            self._datasets.move_to_end(dataset)
            self.version += 1
        return begun

    def protects(self, dataset: int, clock: int) -> bool:
        """True if a copy last used at `clock` should still be used in this epoch, unless it is `evictable_first`."""
        found = self._datasets.get(dataset)
        if found is None or not self._has_epochs(found):
            return False
        followed = found.followed
        return (
            followed.previous <= clock
            and not followed.idle
            and (clock < followed.start or followed is not found)
        )

    def evictable_first(self, dataset: int, unit: int) -> bool:
        """True if all nodes have used the unit in this epoch; False for a dataset whose pairs are not followed."""
        found = self._datasets.get(dataset)
        if found is None or found.shared is None or found.followed is found:
            return False
        return self._has_epochs(found) and found.shared.evictable_first(unit)

    def start(self, dataset: int) -> int:
        """The clock when its epoch began."""
        found = self._datasets.get(dataset)
        return found.followed.start if found is not None else 0

    def has_epochs(self, dataset: int) -> bool:
        found = self._datasets.get(dataset)
        return found is not None and self._has_epochs(found)

    def _has_epochs(self, found: Dataset) -> bool:
        """True if its units or its pairs have epochs, or are taken to have."""
        has_epochs = found.epochs or (found.shared is not None and found.shared.epochs)
        return self.policy == "epoch" or (self.policy == "auto" and has_epochs)

    def number(self, dataset: int) -> int:
        """The epoch that the dataset is in; 0 if nothing is known of it."""
        found = self._datasets.get(dataset)
        return found.followed.number if found is not None else 0

    def mark_used(self, dataset: int, unit: int) -> None:
        """Count the unit as used in this epoch: a reader of this node is about to use it."""
        found = self._datasets.get(dataset) or self._add(dataset, self._now)
        found.access_filter.add(unit)
        if found.shared is not None:
            found.shared.pairs.access_filter.add(unit)  # the pair with this node, see `_mixed`

    def was_used(self, dataset: int, unit: int) -> bool:
        """True if this node's readers have used the unit in this epoch of the dataset, cached or not. For an unused unit,
        less than one answer in a hundred is wrong."""
        found = self._datasets.get(dataset)
        if found is None:
            return False
        followed = found if found.shared is None else found.followed
        # The filter is that of units, or of pairs, where the pair with this node has the unit's hash.
        if unit in followed.access_filter:
            return True
        use = found.sample.get(unit) if followed is found else None
        return use is not None and use[0] >= found.start

    def _add(self, dataset: int, clock: int) -> Dataset:
        if len(self._datasets) >= TRACKED:
            last = min(self._datasets, key=lambda d: self._datasets[d].last)
            del self._datasets[last]
            self.version += 1
        found = self._datasets[dataset] = Dataset.begun(clock)
        return found

    def _look_for_idle(self) -> None:
        """Mark a dataset idle, which ends its protection, if others had half as many uses since its last use as its last
        epoch took."""
        self._looked = self._now
        pairs = (found.shared.pairs for found in self._datasets.values() if found.shared is not None)
        for found in chain(self._datasets.values(), pairs):
            if not found.idle and self._now - found.last > max(64, (found.start - found.previous) // 2):
                found.idle = True
                self.version += 1

    def status(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(dataset, what is known of it), the one used last first."""
        for dataset, units in sorted(self._datasets.items(), key=lambda item: -item[1].last):
            found, shared = units.followed, units.shared
            each = max(1, shared.each) if shared is not None and found is not units else 1
            yield (
                dataset,
                {
                    "mode": "epoch" if self._has_epochs(units) else "lru",
                    "epoch": found.number,
                    "used_share": round(found.fresh / max(1, found.alive), 3),
                    "footprint_bytes": int(found.alive / each / found.rate * found.unit_bytes),
                    "hit_ratio": _rounded(found.hit_ratio),
                    "last_hit_ratio": _rounded(found.last_hit_ratio),
                },
            )

    # -- over restarts -----------------------------------------------------------------------------

    def changes(self) -> dict[bytes, bytes]:
        """Notes by name, for `restore`: the list of all datasets, and each one that changed since the last call."""
        notes = {b"epochs": json.dumps([self._now, list(self._datasets)]).encode()}
        for number, found in self._datasets.items():
            if found.changed:
                found.changed = False
                notes[b"epochs%08x" % number] = found.packed()
        return notes

    def restore(self, note: Callable[[bytes], bytes | None]) -> None:
        """Restore the state that `changes` returned. `note` returns the last note of a name; damaged ones are left out."""
        try:
            now, numbers = json.loads(note(b"epochs") or b"[0, []]")
            self._now = int(now)
            wanted = [int(number) for number in numbers]
        except (ValueError, TypeError):
            return
        for number in wanted:
            found = Dataset.unpacked(note(b"epochs%08x" % number) or b"")
            if found is not None:
                self._datasets[number] = found


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 3)


# -- which dataset an object belongs to ------------------------------------------------------------

MOST = 64
"""First components of one prefix that may be datasets of their own; if there are more, they are classes, days or users.
Guessed between two cases: fifty datasets in a bucket have epochs of their own, and the hundred classes of CIFAR-100 are one
dataset."""


class Datasets:
    """Maps an ObjectId to the number of its dataset (32 bits), and the number to a name for users.

    A dataset is the first component of a key below the mounted prefix. A prefix with more than `MOST` first components
    (`train/` mounted, with a directory for each of a thousand classes) is one dataset."""

    def __init__(self) -> None:
        self.version = 0  # grows when objects may belong to another dataset than before
        self._prefixes: dict[str, list[str]] = {}
        self._whole: set[str] = set()
        self._names: dict[int, str] = {}
        self._numbers: dict[str, dict[str, int]] = {}  # by place, then by first component

    def mounted(self, places: Iterable[tuple[str, str]]) -> None:
        """Add mounted places: (source, prefix of its keys) each."""
        self.version += 1
        for source, prefix in places:
            self._prefixes.setdefault(source, []).append(prefix)
        for prefixes in self._prefixes.values():
            prefixes.sort(key=len, reverse=True)

    def __call__(self, object_id: ObjectId) -> int:
        source, key = object_id.source, object_id.key
        prefix = ""
        # A plain loop is faster, and each file calls this four times.
        for mounted in self._prefixes.get(source, ()):
            if key.startswith(mounted):
                prefix = mounted
                break
        first, slash, _ = key[len(prefix) :].lstrip("/").partition("/")
        place = f"{source}\0{prefix}"
        if not slash or place in self._whole:
            first = ""
        number = self._numbers.get(place, {}).get(first)
        return number if number is not None else self._number(place, prefix, first)

    def _number(self, place: str, prefix: str, first: str) -> int:
        """Number a new component; beyond `MOST`, the whole prefix becomes one dataset."""
        numbers = self._numbers.setdefault(place, {})
        if place not in self._whole and len(numbers) >= MOST:
            self._whole.add(place)
            self.version += 1
            first = ""
        number = zlib.crc32(f"{place}\0{first}".encode("utf-8", "surrogatepass"))
        if number not in self._names:
            self._names[number] = prefix + first
        numbers[first] = number
        return number

    def name(self, number: int) -> str:
        """The prefix and first component of the dataset's keys, or its number if they are not known."""
        return self._names.get(number, f"{number:08x}")

    def dump(self) -> bytes:
        """The state as a row for `restore`."""
        return json.dumps([sorted(self._whole), self._names]).encode()

    def restore(self, row: bytes | None) -> None:
        """Restore the state that `dump` returned; nothing if the row is damaged."""
        try:
            whole, names = json.loads(row or b"[[], {}]")
            self._whole = {str(place) for place in whole}
            self._names = {int(number): str(name) for number, name in names.items()}
        except (ValueError, TypeError, AttributeError):
            pass


class EpochProgress:
    """How far a version's dataset has come in its epoch, for prefetch."""

    def __init__(self, epochs: Epochs, datasets: Datasets) -> None:
        self._epochs = epochs
        self._datasets = datasets

    def epoch(self, object_id: ObjectId) -> int:
        """The number of its dataset's epoch, which grows when one begins; 0 if nothing is known of the dataset."""
        return self._epochs.number(self._datasets(object_id))

    @property
    def version(self) -> int:
        """A number that grows whenever `epoch` may return another one than before, unless that was 0."""
        return self._epochs.version + self._datasets.version

    def was_used(self, object_id: ObjectId) -> bool:
        """True if (the beginning of) the version was used in this epoch, cached or not."""
        return self._epochs.was_used(self._datasets(object_id), unit_hash(object_id.digest, 0))

    def mark_used(self, object_id: ObjectId) -> None:
        """Count the version as used in this epoch: a reader has opened it."""
        self._epochs.mark_used(self._datasets(object_id), unit_hash(object_id.digest, 0))


# -- the order of eviction -------------------------------------------------------------------------

PREFETCHED_S = 600.0
"""How long prefetched blocks are protected, and prefetched files awaited, before their first reader comes. Guessed between
two cases: a training goes on after an evaluation of nine minutes, and a job begins a quarter of an hour after one died."""

PREFETCHED_COPIES = 65_536
"""Copies that may wait for their first reader, about 400 bytes each: a terabyte of large files. Beyond it the oldest lose
their protection. A bound of memory."""

EVICTABLE_FIRST = 65_536
"""Copies of a tier that are remembered as evictable first, about 200 bytes each. A bound of memory: far fewer are evicted
before others are added."""

SKIPPED_AT_ONCE = 1024
"""Protected rows, and copies in use, that one search skips before it gives up, about 1 ms. Derived: after an epoch began,
with a million rows, a thousand searches fail to find the right victim."""

IN_USE_REMEMBERED = 4096
"""Rows remembered because their copies were in use; beyond it the walk starts over. A bound of memory."""

EPOCHS_SAVED_EVERY = 10
"""Flushes from one writing of the epochs' state to the next, 100 KB for each dataset in use. Derived: 10 KB a second, with
a flush in each. What a crash loses of it makes the next epoch look a little less like one."""


class PriorityClass(enum.IntEnum):
    """Priority classes, the lowest is evicted first."""

    REMOTE_OWNED = 0
    """A copy that another node owns, and that does not wait for a reader."""
    EVICTABLE = 1
    """A copy that was used in this epoch, or not used for a whole one, or whose dataset has no epochs."""
    REMOTE_PREFETCHED = 2
    """A copy that another node owns, and that waits for its first reader."""
    PROTECTED = 3
    """A copy that waits for its first reader, or that should still be used in this epoch."""


Classes = tuple[PriorityClass, ...]
"""Classes that may be evicted to free space, in their order."""

NOTHING: Classes = ()
REMOTE_OWNED: Classes = (PriorityClass.REMOTE_OWNED,)
ANY_REMOTE_OWNED: Classes = (PriorityClass.REMOTE_OWNED, PriorityClass.REMOTE_PREFETCHED)
LOWEST: Classes = (PriorityClass.REMOTE_OWNED, PriorityClass.EVICTABLE)
ANY: Classes = tuple(PriorityClass)
OURS: Classes = (PriorityClass.EVICTABLE, PriorityClass.PROTECTED)

Victim = tuple[CachedObject, Copy]
"""A version, and the copy of one of its extents that is evicted."""


class Verdict(enum.Enum):
    """What a search does with a row whose class may be evicted."""

    EVICT = enum.auto()
    LATER = enum.auto()
    """The copy is in use: the row is looked at again after the next flush."""
    STALE = enum.auto()
    """The copy is gone, or has another clock by now, so the next flush replaces the row."""


class Walk:
    """A search of a tier's rows in the order of their clocks. `skips(key, clock, dataset)` is true for rows that are passed
    without a verdict, because their class is not searched for. They are not looked at again before `restart` or `add`.

    The search goes on where it was. Rows behind it that are to be looked at again have an empty cursor."""

    def __init__(self, index: Index, tier: int, skips: Callable[[CopyKey, int, int], bool]) -> None:
        self._index = index
        self._tier = tier
        self._skips = skips
        self._rows: deque[Row] = deque()  # read from the index, and not passed yet
        self._again: list[Row] = []  # to look at again after the next flush
        self._after = b""  # cursor of the last row passed
        self.passed = -1
        """Clock of the last row passed: a row at or below it is only looked at again after `add`."""

    def first(self, judge: Callable[[CopyKey, int], Verdict], older_than: int | None) -> CopyKey | None:
        """The first copy whose verdict is EVICT; None if there is none below the clock `older_than`, or after
        `SKIPPED_AT_ONCE` skipped rows. The same copy is found again until it is evicted."""
        skipped = 0
        while True:
            if not self._rows:
                self._rows.extend(self._index.oldest(self._tier, self._after, 256))
                if not self._rows:
                    return None
            row = self._rows[0]
            _, key, clock, dataset = row
            if older_than is not None and clock >= older_than:
                return None
            if self._skips(key, clock, dataset):
                skipped += 1
            else:
                verdict = judge(key, clock)
                if verdict is Verdict.EVICT:
                    return key
                if verdict is Verdict.LATER:
                    self._again.append((b"", key, clock, dataset))
            self._rows.popleft()
            if row[0]:
                self._after, self.passed = row[0], clock
            if skipped >= SKIPPED_AT_ONCE:
                return None

    def add(self, key: CopyKey, clock: int, dataset: int) -> None:
        """Have a row that was passed looked at again after the next flush. The search will reach any other row by itself."""
        if clock <= self.passed:
            self._again.append((b"", key, clock, dataset))

    def flushed(self) -> None:
        """After a flush, when the rows are up to date: look at the rows in `_again`, then go on where the walk was."""
        if len(self._again) > IN_USE_REMEMBERED:
            self.restart()
            return
        self._again += (row for row in self._rows if not row[0])  # no search has reached these
        self._rows = deque(sorted(self._again, key=lambda row: row[2]))
        self._again = []

    def restart(self) -> None:
        self._rows.clear()
        self._again.clear()
        self._after, self.passed = b"", -1


class Keys:
    """Keys of copies by tier, least recently used first; at most `most` of a tier."""

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
        """Remove the key. True if it was there."""
        return key in self and self.tiers[key[0]].pop(key) is None

    def used(self, key: CopyKey) -> None:
        """Make the key the most recently used one of its tier, if it is there."""
        keys = self.tiers.get(key[0])
        if keys is not None and key in keys:
            keys.move_to_end(key)

    def oldest(self, tier: int) -> Iterator[CopyKey]:
        """Up to `SKIPPED_AT_ONCE` keys of a tier, least recently used first. Each becomes the most recently used one when
        the caller asks for the next, so that another search looks at it last."""
        keys = self.tiers.get(tier, OrderedDict())
        for _ in range(min(len(keys), SKIPPED_AT_ONCE)):
            key = next(iter(keys))
            yield key
            self.used(key)


SAME_USE = 4
"""Uses of other copies after which a use is a separate one, also without a flush between. Derived from two cases: a reader
beside three others spares the accounting, 2 µs a read; of five files that are read by turns, each read is a use. Without
it, an epoch that takes two seconds hides uses: shuffled shards hit 0.33 to 0.38 in their fourth one, in place of 0.48."""


class Waiting(NamedTuple):
    """A prefetched copy that waits for its first reader until the time `until`."""

    until: float
    clock: int
    dataset: int


class Eviction:
    """The order of eviction of all tiers, and every change of a copy's place in it.

    `remote_owned` are copies of extents that other nodes own. They lie in the fastest tier, displace only each other, are
    neither moved nor saved at a stop, and are like any other copy after a restart. Only `space.py` adds them and makes them
    this node's, with their accounting."""

    def __init__(
        self, catalog: Catalog, index: Index, tiers: list[Tier], policy: Policy, now: Callable[[], float]
    ) -> None:
        self._catalog = catalog
        self._tier = {tier.number: tier for tier in tiers}
        self._now = now
        self.epochs = Epochs(policy)
        self.datasets = Datasets()
        self.epoch_progress = EpochProgress(self.epochs, self.datasets)
        self.remote_owned = Keys()
        self._evictable_first = Keys(EVICTABLE_FIRST)
        self._waiting: OrderedDict[CopyKey, Waiting] = OrderedDict()  # prefetched, and not read yet
        # By tier: the search for copies of the class EVICTABLE, and the one for any of this node's own copies.
        self._evictable_walks = {
            tier.number: Walk(
                index, tier.number, lambda *row: self.class_of(*row) is not PriorityClass.EVICTABLE
            )
            for tier in tiers
        }
        self._any_walks = {
            tier.number: Walk(index, tier.number, lambda key, *_: key in self.remote_owned) for tier in tiers
        }
        self._flush_lock = trio.Lock()
        self._flushes = 0
        self.datasets.restore(index.note(b"datasets"))
        self.epochs.restore(index.note)
        self._seen_version = self._saved_version = self.epochs.version

    # -- a copy's place ----------------------------------------------------------------------------

    def class_of(self, key: CopyKey, clock: int, dataset: int) -> PriorityClass:
        if key in self.remote_owned:
            return PriorityClass.REMOTE_PREFETCHED if key in self._waiting else PriorityClass.REMOTE_OWNED
        return PriorityClass.PROTECTED if self._wanted(key, clock, dataset) else PriorityClass.EVICTABLE

    def _wanted(self, key: CopyKey, clock: int, dataset: int) -> bool:
        return key in self._waiting or (
            self.epochs.protects(dataset, clock) and key not in self._evictable_first
        )

    def protected(self, copy: Copy) -> bool:
        """True if it is pinned, waits for its first reader, or is still to be used in this epoch."""
        return copy.pinned or self._wanted(copy.key, copy.clock, copy.dataset)

    def touch(self, copy: Copy) -> None:
        """Make it the most recently used copy."""
        key = self._catalog.touch(copy)
        if self._waiting:
            self._waiting.pop(key, None)
        if self.remote_owned.tiers:
            self.remote_owned.used(key)

    def touch_if_separate(self, copy: Copy) -> bool:
        """`touch`, unless this continues the last use: there was no flush since, nor `SAME_USE` uses of other copies. True
        if it was touched."""
        catalog = self._catalog
        if (copy.used > catalog.recent and catalog.clock - copy.used < SAME_USE) or not copy.bitmap:
            return False
        self.touch(copy)
        return True

    def used(self, obj: CachedObject, copy: Copy, *, hit: bool, requester: str = "") -> None:
        """Tell the policy of a use, after `touch`. `requester` is the requesting peer, "" for this node's readers. Uses of
        remote-owned copies are not counted, because each epoch this node caches others of them."""
        if copy.dataset_version != self.datasets.version:
            copy.dataset = self.datasets(obj.id)
            copy.dataset_version = self.datasets.version  # read after the call, which may raise it
        unit = unit_hash(copy.digest, copy.extent)
        if self.remote_owned.tiers and copy.key in self.remote_owned:
            self.epochs.mark_used(copy.dataset, unit)
            return
        length = self._catalog.extent_bytes(copy)
        self.epochs.used(copy.dataset, unit, copy.clock, length, hit=hit, requester=requester)
        if self._seen_version != self.epochs.version:
            self._look_again()
        if self.epochs.evictable_first(copy.dataset, unit):
            self._evictable_first.add(copy.key)

    def prefetched(self, copy: Copy) -> None:
        """Note prefetched blocks of a copy, and protect it until its first reader or for `PREFETCHED_S`."""
        self.touch(copy)
        copy.used = 0
        self._wait(copy, self._now() + PREFETCHED_S)

    def _wait(self, copy: Copy, until: float) -> None:
        self._waiting[copy.tier, copy.digest, copy.extent] = Waiting(until, copy.clock, copy.dataset)
        if len(self._waiting) > PREFETCHED_COPIES:
            self._give_up(next(iter(self._waiting)))

    def left_behind(self, obj: CachedObject) -> None:
        """End the protection of a version's prefetched copies, because its readers have closed it."""
        for copy in obj.copies.values() if self._waiting else ():
            if copy is not None and copy.key in self._waiting:
                self._give_up(copy.key)

    def _give_up(self, key: CopyKey) -> None:
        """End the wait of a prefetched copy for its first reader."""
        waited = self._waiting.pop(key)
        self._evictable_walks[key[0]].add(key, waited.clock, waited.dataset)

    def make_own(self, copy: Copy) -> bool:
        """Make the copy this node's own. True if another node owned it until now."""
        if not self.remote_owned.tiers or not self.remote_owned.discard(copy.key):
            return False
        self._evictable_walks[copy.tier].add(copy.key, copy.clock, copy.dataset)
        return True

    def moved(self, source: Copy, target: Copy) -> None:
        """Give a copy's age and its wait for a reader to the copy that was made from it on another tier."""
        if source.clock > target.clock:
            target.clock, target.used = source.clock, source.used
        waits = self._waiting.get(target.key) or self._waiting.get(source.key)
        if waits is not None:
            self._wait(target, waits.until)
        if source.key in self._evictable_first:
            self._evictable_first.add(target.key)
        self._catalog.changed(target)

    def removed(self, copy: Copy) -> None:
        """Forget a copy that has no blocks any more."""
        key = copy.key
        self._waiting.pop(key, None)
        self.remote_owned.discard(key)
        self._evictable_first.discard(key)

    # -- the search --------------------------------------------------------------------------------

    def victim(
        self, tier: int, classes: Classes = ANY, *, older_than: int | None = None, moving: bool = False
    ) -> Victim | None:
        """The first copy in the order of eviction that is of these classes and not in use, nor any copy that would be
        dropped with it. Of this node's own copies, only those used before the clock `older_than` count. `moving`: it is
        moved to another tier, so pinned copies count, too."""
        self._look_again()
        for one in classes:
            if one in (PriorityClass.REMOTE_OWNED, PriorityClass.REMOTE_PREFETCHED):
                found = self._remote_owned_victim(tier, waiting=one is PriorityClass.REMOTE_PREFETCHED)
            else:
                found = self._first(tier, older_than, evictable=one is PriorityClass.EVICTABLE, moving=moving)
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

    def _first(self, tier: int, older_than: int | None, *, evictable: bool, moving: bool) -> Victim | None:
        """The first of this node's own copies; of class EVICTABLE if `evictable`, or of any. It is searched for in three
        places, in this order: the rows of the index, the copies that are evictable first, the copies without an up-to-date
        row."""
        catalog = self._catalog

        def judge(key: CopyKey, clock: int) -> Verdict:
            if catalog.is_row_stale(key):
                return Verdict.STALE
            obj = catalog.by_digest(key[1])
            copy = catalog.copy(obj, key[0], key[2])
            if copy is None:
                catalog.damaged(key, clock)
                return Verdict.STALE
            if copy.clock != clock:
                return Verdict.STALE
            return Verdict.EVICT if self._can_go(obj, copy, moving) else Verdict.LATER

        # Rows first: a copy touched since the last flush is younger than each row that is up to date.
        key = (self._evictable_walks if evictable else self._any_walks)[tier].first(judge, older_than)
        if key is not None:
            obj = catalog.by_digest(key[1])
            return obj, obj.copies[key[0], key[2]]  # type: ignore[return-value]
        evictable_first = (
            catalog.copy(catalog.by_digest(digest), number, extent)
            for number, digest, extent in self._evictable_first.oldest(tier)
            if evictable
        )
        without_row = (
            copy
            for copy in chain(evictable_first, catalog.unwritten())
            if copy is not None and copy.tier == tier and copy.bitmap and copy.key not in self.remote_owned
        )
        for copy in islice(without_row, SKIPPED_AT_ONCE):
            protected = evictable and self._wanted(copy.key, copy.clock, copy.dataset)
            if (older_than is None or copy.clock < older_than) and not protected:
                obj = catalog.by_digest(copy.digest)
                if self._can_go(obj, copy, moving):
                    return obj, copy
        return None

    def _can_go(self, obj: CachedObject, copy: Copy, moving: bool) -> bool:
        if copy.pins or (copy.pinned and not moving):
            return False
        tier = self._tier[copy.tier]
        return not (obj.is_immutable(tier) and any(other.pins for other in obj.copies_on(tier)))

    def _look_again(self) -> None:
        """Start the walks over if an epoch has begun: copies that were skipped may have lost their protection."""
        if self._seen_version != self.epochs.version:
            self._seen_version = self.epochs.version
            self._evictable_first.tiers.clear()
            for walk in self._evictable_walks.values():
                walk.restart()

    # -- the index ---------------------------------------------------------------------------------

    async def flush(self, *, closing: bool = False) -> None:
        """Write changes to the index. They are durable when this returns; or they are kept for the next flush, and
        `index_error` says why."""
        async with self._flush_lock:
            self._catalog.flush_begins()
            while self._waiting and next(iter(self._waiting.values())).until < self._now():
                self._give_up(next(iter(self._waiting)))
            if not self._catalog.changes and not closing:
                return
            try:
                for key, clock, dataset in await self._catalog.flush(self._notes(closing)):
                    self._evictable_walks[key[0]].add(key, clock, dataset)
            finally:
                for walk in self._evictable_walks.values():
                    walk.flushed()
                for walk in self._any_walks.values():
                    walk.restart()

    def _notes(self, closing: bool) -> dict[bytes, bytes]:
        """The notes that the index stores besides its rows: from time to time the epochs' state."""
        self._flushes += 1
        if self._saved_version == self.epochs.version and self._flushes % EPOCHS_SAVED_EVERY and not closing:
            return {}
        self._saved_version = self.epochs.version
        return {**self.epochs.changes(), b"datasets": self.datasets.dump()}

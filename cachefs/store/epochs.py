"""Epoch detection: which copies of a dataset will be used again soon, and which will not. Pure: no I/O, no clock of its own.

Training reads a dataset once per epoch, in another order each time. If the dataset is larger than the cache, the least
recently used copy is exactly the one that comes next. The best victim is a copy that was *already used in this epoch*:
its next use is the furthest away. A copy that was used in the last epoch and not yet in this one is protected. A copy
that was not used for a whole epoch is dead and goes first. Nothing is refused admission: a block that was fetched and
read becomes the next victim by itself.

So the policy only has to know when the epochs of a dataset began, on the logical clock of the cache. With `auto` it also
decides whether a dataset has epochs at all; without them, recency decides.

- `Dataset` detects epochs in a sequence of uses. A *re-reference* is a use of a unit that this epoch has had already. One
  is noise; many close together mean that a new epoch began with the first of them. A dataset has epochs if at that moment
  most of its known units had been used, and nearly every use was a re-reference. Neither holds for uses at random or by
  popularity. Used units are remembered beyond what is cached, as a sample by hash (as in SHARDS).
- `Seen` is the access filter: which units this epoch has had. It covers all units, more compactly than the sample.
- `SharedDataset` handles a dataset that several nodes read through this one. If each of four nodes reads all of it in its
  own order, a unit is used four times an epoch, which looks like no epoch or four short ones. Each *pair* of a unit and a
  requesting peer occurs once an epoch, so pairs are watched in the same way. A unit is *spent* when as many nodes have
  had it in this epoch as in the last. If each node reads a part that changes every epoch (a distributed sampler), pairs
  show no epochs and units do. Peers are told apart by host.

Why not set dueling (DIP: recency against bimodal insertion, decided by two sampled caches)? It was played over the shapes
of `cachefs simulate` (`bench/set_dueling.py`). At half a dataset, from the third epoch on, it hits 0.48 to 0.49
(insertion of one in 32 or 64), so that condition holds. These do not: a second dataset that takes over reaches 0.10 in
its fourth epoch, against 0.49 in its second here; files opened twice hit 0.58, against 0.75; four nodes that read through
one owner miss 37 to 59 units an epoch, against 25 allowed. It also cannot say what prefetch asks: whether this epoch has
had a file (`Epochs.had`).
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from cachefs.base.names import ObjectId

Policy = Literal["auto", "epoch", "lru"]

_FULL = 1 << 64


def unit_hash(digest: bytes, extent: int) -> int:
    """The unit (a 64-bit hash) of an extent of the version `digest`."""
    return (int.from_bytes(digest[:8], "big") + extent * 0x9E3779B97F4A7C15) % _FULL


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


class Seen:
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
    threshold: int = _FULL
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
    seen: Seen = field(default_factory=Seen)

    @classmethod
    def begun(cls, clock: int, *, noisy: bool = False) -> Dataset:
        """One whose first use comes at `clock`."""
        starts = deque([clock], maxlen=EPOCHS_REMEMBERED)
        return cls(start=clock, previous=clock, edge=clock, noisy=noisy, starts=starts)

    @property
    def rate(self) -> float:
        """Share of the units that are sampled."""
        return self.threshold / _FULL

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
        self.seen = Seen()
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
        pairs.seen.add(_mixed(unit, slot))
        if unit >= pairs.threshold:
            return False
        # All pairs of a unit are sampled, or none: they differ in the lowest bits.
        if not pairs.used(unit // SLOTS * SLOTS + slot, clock, length, hit):
            return False
        self._requesters = {slot: last for slot, last in self._requesters.items() if last >= pairs.number - 1}
        units = [pair // SLOTS for pair, use in pairs.sample.items() if use[0] >= pairs.previous]
        # Rounded up: too high a number means that less is spent, and no unit that a node still wants.
        self.each = math.ceil(len(units) / len(set(units)) - 0.1) if units else 0
        return True

    def comes(self, unit: int) -> None:
        """As `Epochs.comes`."""
        self.pairs.seen.add(_mixed(unit, 0))

    def had_here(self, unit: int) -> bool:
        """True if this node's own readers have had it in this epoch."""
        return _mixed(unit, 0) in self.pairs.seen

    @property
    def epochs(self) -> bool:
        """True if its pairs have epochs, as far as is known."""
        pairs = self.pairs
        first = pairs.number == 1 and pairs.count >= FIRST_LEAST and len(self._requesters) > 1
        return pairs.epochs or (first and len(pairs.agains) <= FIRST_AGAIN * pairs.count)

    def spent(self, unit: int) -> bool:
        """True if all nodes that are expected to read it have; in the first epoch, all that are known."""
        missing = len(self._requesters) - self.each if self.each else 0
        for slot in self._requesters:
            if _mixed(unit, slot) not in self.pairs.seen:
                missing -= 1
                if missing < 0:
                    return False
        return True


def _mixed(unit: int, slot: int) -> int:
    """A pair as an evenly distributed hash. Slot 0 is this node's own readers: then it is the unit itself."""
    return unit ^ slot * 0x9E3779B97F4A7C15 % _FULL


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
        found.seen.add(unit)
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
        """True if a copy last used at `clock` is still to be used in this epoch of its dataset, unless it is `spent`."""
        found = self._decides(dataset)
        if found is None or clock < found.previous or found.idle or not self._keeps(dataset, found):
            return False
        return clock < found.start or (dataset in self._shared and self._shared[dataset].pairs is found)

    def spent(self, dataset: int, unit: int) -> bool:
        """True if all nodes have had the unit in this epoch; False where pairs do not decide."""
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
        """The epoch that the dataset is in; 0 if nothing is known of it."""
        found = self._decides(dataset)
        return found.number if found is not None else 0

    def comes(self, dataset: int, unit: int) -> None:
        """A reader of this node is about to use it: from now on this epoch has had it."""
        (self._datasets.get(dataset) or self._add(dataset, self._now)).seen.add(unit)
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
        return unit in found.seen or (use is not None and use[0] >= found.start)

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
        prefix = next((p for p in self._prefixes.get(source, ()) if key.startswith(p)), "")
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

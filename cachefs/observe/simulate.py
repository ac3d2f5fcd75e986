"""Simulation of eviction over a trace: how much cache is enough.

The policy is the store's own (`store/eviction.py`). The cache around it is a model: one tier, extents of sixteen blocks, no
readahead, no limits. A hit ratio here is that of a cache whose tiers have the given size in all.

A recorded trace has a JSON line for each open (of the whole file) or range read: path, size of the object, offset, length.
Synthetic traces have shapes: orders of training, scans, popularity.
"""

from __future__ import annotations

import random
import zlib
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from cachefs.base.errors import ConfigError
from cachefs.base.names import BLOCKS_PER_EXTENT
from cachefs.store.eviction import Epochs, Policy

WHOLE_BYTES = 4 << 20
"""Smaller objects are fetched whole (`fetch/fetcher.py`)."""


@dataclass
class Trace:
    """Accesses in order, as parallel columns. `files` has indices of `sizes` and `datasets`; `epochs` has the epoch of each
    access, from 1, or is empty. Sizes, offsets and lengths are in bytes."""

    sizes: array[int] = field(default_factory=lambda: array("Q"))
    datasets: array[int] = field(default_factory=lambda: array("Q"))
    files: array[int] = field(default_factory=lambda: array("L"))
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    epochs: array[int] = field(default_factory=lambda: array("L"))

    def file(self, size: int, dataset: int = 0) -> int:
        """Add a file. Returns its index."""
        self.sizes.append(size)
        self.datasets.append(dataset)
        return len(self.sizes) - 1

    def access(self, file: int, offset: int, length: int, epoch: int | None = None) -> None:
        self.files.append(file)
        self.offsets.append(offset)
        self.lengths.append(length)
        if epoch is not None:
            self.epochs.append(epoch)

    def read(self, files: Iterable[int], epoch: int, times: int = 1) -> None:
        """Access each file whole, `times` times in a row."""
        for file in files:
            for _ in range(times):
                self.access(file, 0, self.sizes[file], epoch)


@dataclass
class Result:
    """The result for one cache: bytes read by epoch (`asked`, cached: `hit`), and those from the origin (`store_bytes`)."""

    policy: str
    cache_bytes: int
    asked: Counter[int] = field(default_factory=Counter)
    hit: Counter[int] = field(default_factory=Counter)
    store_bytes: int = 0

    def ratio(self, epoch: int) -> float:
        return self.hit[epoch] / max(1, self.asked[epoch])

    def as_dict(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "cache_bytes": self.cache_bytes,
            "epochs": [
                {"epoch": e, "bytes": self.asked[e], "hit_ratio": round(self.ratio(e), 4)}
                for e in sorted(self.asked)
            ],
            "hit_ratio": round(sum(self.hit.values()) / max(1, sum(self.asked.values())), 4),
            "store_bytes": self.store_bytes,
        }


def simulate(trace: Trace, cache_bytes: int, policy: Policy, block_size: int = 1 << 20) -> Result:
    """Replay the trace on a cache that is empty at first."""
    result = Result(policy, cache_bytes)
    cache = Model(cache_bytes, policy)
    epoch_of = _epochs(trace, block_size)
    for number, use in enumerate(units(trace, block_size)):
        missing = cache.use(use, trace.datasets[use.file], block_size)
        epoch = epoch_of(number, use)
        result.asked[epoch] += use.asked
        result.hit[epoch] += use.asked * (use.wanted & ~missing).bit_count() // use.wanted.bit_count()
        result.store_bytes += _bytes(missing, use.length, block_size)
    return result


class Use(NamedTuple):
    """The part of an access in one extent. `wanted` has a bit for each block that is read, `fetched` for each that a miss
    fetches. `length` is the extent's in bytes, `asked` the number of bytes read, `access` the index of the access."""

    file: int
    extent: int
    wanted: int
    fetched: int
    length: int
    access: int
    asked: int


def units(trace: Trace, block_size: int) -> Iterator[Use]:
    """Split all accesses into extents, in their order."""
    unit = BLOCKS_PER_EXTENT * block_size
    sizes = trace.sizes
    accesses = zip(trace.files, trace.offsets, trace.lengths, strict=True)
    for number, (file, offset, length) in enumerate(accesses):
        size = sizes[file]
        end = min(offset + length, size)
        while offset < end:
            extent = offset // unit
            start, stop = extent * unit, min((extent + 1) * unit, size)
            read_to = min(stop, end)
            first, last = (offset - start) // block_size, (read_to - 1 - start) // block_size
            wanted = ((2 << (last - first)) - 1) << first
            fetched = (1 << -(-(stop - start) // block_size)) - 1 if size <= WHOLE_BYTES else wanted
            yield Use(file, extent, wanted, fetched, stop - start, number, read_to - offset)
            offset = read_to


def _epochs(trace: Trace, block_size: int) -> Callable[[int, Use], int]:
    """A function from (index of a use, use) to its epoch. A trace without epochs gets those that the policy detects."""
    if trace.epochs:
        return lambda _, use: trace.epochs[use.access]
    watch = Epochs("auto")
    starts: dict[int, list[int]] = {}
    for clock, use in enumerate(units(trace, block_size), 1):
        dataset, unit = trace.datasets[use.file], unit_of(use.file, use.extent)
        if watch.used(dataset, unit, clock, use.length, hit=False) and watch.has_epochs(dataset):
            starts.setdefault(dataset, []).append(watch.start(dataset))
    return lambda number, use: 1 + bisect_right(starts.get(trace.datasets[use.file], ()), number + 1)


def _bytes(blocks: int, length: int, block_size: int) -> int:
    """Bytes of the given blocks (bits) of an extent of `length` bytes."""
    last = (length - 1) // block_size
    short = (last + 1) * block_size - length if blocks >> last & 1 else 0
    return blocks.bit_count() * block_size - short


def unit_of(file: int, extent: int) -> int:
    """A hash of an extent, uniform in 64 bits: splitmix64."""
    mixed = (file * 0x9E3779B97F4A7C15 + extent * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) % (1 << 64)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % (1 << 64)
    return mixed ^ mixed >> 31


@dataclass(slots=True)
class _Cached:
    """A cached extent: the clock of its last use, its blocks (bits) and their bytes."""

    clock: int = 0
    blocks: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Resident:
    """A dataset's extents, least recently used first. `young` ones were used in its present epoch, `old` ones before."""

    young: OrderedDict[tuple[int, int], _Cached] = field(default_factory=OrderedDict)
    old: OrderedDict[tuple[int, int], _Cached] = field(default_factory=OrderedDict)

    def begin_epoch(self, start: int) -> None:
        """Move the extents that were not used since `start` to `old`."""
        while self.young:
            key, cached = next(iter(self.young.items()))
            if cached.clock >= start:
                return
            self.old[key] = self.young.pop(key)


class Model:
    """A cache with one tier."""

    def __init__(self, limit_bytes: int, policy: Policy) -> None:
        self.epochs = Epochs(policy)
        self.used_bytes = 0
        self._limit = limit_bytes
        self._datasets: defaultdict[int, _Resident] = defaultdict(_Resident)
        self._clock = 0

    def use(self, use: Use, dataset: int, block_size: int) -> int:
        """Read a part of an extent. Returns the blocks that had to be fetched, as bits."""
        self._clock += 1
        key = (use.file, use.extent)
        resident = self._datasets[dataset]
        cached = resident.young.pop(key, None) or resident.old.pop(key, None) or _Cached()
        missing = use.fetched & ~cached.blocks if use.wanted & ~cached.blocks else 0
        if self.epochs.used(dataset, unit_of(*key), self._clock, use.length, hit=not missing):
            resident.begin_epoch(self.epochs.start(dataset))
        if missing:
            need = _bytes(missing, use.length, block_size)
            while self.used_bytes + need > self._limit and self._evict():
                pass
            if self.used_bytes + need <= self._limit:
                self.used_bytes += need
                cached.blocks |= missing
                cached.bytes += need
        cached.clock = self._clock
        if cached.blocks:
            resident.young[key] = cached
        return missing

    def _evict(self) -> bool:
        """Evict the least recently used extent of the lowest priority class. False if there is none."""
        best: tuple[bool, int, OrderedDict[tuple[int, int], _Cached]] | None = None
        for dataset, resident in self._datasets.items():
            for place in (resident.old, resident.young):
                if place:
                    clock = next(iter(place.values())).clock
                    rank = (self.epochs.protects(dataset, clock), clock, place)
                    if best is None or rank[:2] < best[:2]:
                        best = rank
        if best is None:
            return False
        self.used_bytes -= best[2].popitem(last=False)[1].bytes
        return True


# -- traces ----------------------------------------------------------------------------------------


def load(path: Path) -> Trace:
    """Read a recorded trace. Raises `ConfigError`, with the number of a malformed line."""
    from cachefs.daemon.recording import parsed  # slow to import

    trace = Trace()
    files: dict[tuple[str, int], int] = {}
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        name, size, offset, length = parsed(line)
                    except ValueError as exc:
                        raise ConfigError(f"{path} line {number} is no line of a trace: {exc}") from exc
                    if (name, size) not in files:
                        first, slash, _ = name.lstrip("/").partition("/")
                        dataset = zlib.crc32(first.encode("utf-8", "surrogateescape")) if slash else 0
                        files[name, size] = trace.file(size, dataset)
                    trace.access(files[name, size], offset, length)
    except OSError as exc:
        raise ConfigError(f"cannot read the trace {path}: {exc.strerror}") from exc
    if not trace.files:
        raise ConfigError(f"the trace {path} is empty")
    return trace


# -- shapes ----------------------------------------------------------------------------------------


def shape(name: str, dataset_bytes: int, file_bytes: int, epochs: int, seed: int) -> Trace:
    """A synthetic trace, one of `SHAPES`."""
    trace = Trace()
    count = max(1, dataset_bytes // file_bytes)
    files = [trace.file(file_bytes) for _ in range(count)]
    SHAPES[name](trace, files, epochs, random.Random(seed))
    return trace


def _shuffled(trace: Trace, files: list[int], epochs: int, rng: random.Random, times: int = 1) -> None:
    for epoch in range(1, epochs + 1):
        trace.read(rng.sample(files, len(files)), epoch, times)


def _scan(trace: Trace, files: list[int], epochs: int, rng: random.Random) -> None:
    for epoch in range(1, epochs + 1):
        trace.read(files, epoch)


def _zipf(trace: Trace, files: list[int], epochs: int, rng: random.Random) -> None:
    weights = list(accumulate(1 / rank for rank in range(1, len(files) + 1)))
    order = rng.sample(files, len(files))
    for epoch in range(1, epochs + 1):
        trace.read(rng.choices(order, cum_weights=weights, k=len(files)), epoch)


def _uniform(trace: Trace, files: list[int], epochs: int, rng: random.Random) -> None:
    for epoch in range(1, epochs + 1):
        trace.read(rng.choices(files, k=len(files)), epoch)


def _validated(trace: Trace, files: list[int], epochs: int, rng: random.Random) -> None:
    validation = [trace.file(trace.sizes[0], 1) for _ in range(max(1, len(files) // 20))]
    for epoch in range(1, epochs + 1):
        trace.read(rng.sample(files, len(files)), epoch)
        trace.read(validation, epoch)


def _takeover(trace: Trace, files: list[int], epochs: int, rng: random.Random) -> None:
    _shuffled(trace, files, epochs, rng)
    others = [trace.file(trace.sizes[0], 1) for _ in files]
    for epoch in range(epochs + 1, 2 * epochs + 1):
        trace.read(rng.sample(others, len(others)), epoch)


def _turns(trace: Trace, files: list[int], epochs: int, rng: random.Random) -> None:
    others = [trace.file(trace.sizes[0], 1) for _ in files]
    for epoch in range(1, epochs + 1):
        trace.read(rng.sample(files, len(files)), epoch)
        trace.read(rng.sample(others, len(others)), epoch)


def _two_jobs(trace: Trace, files: list[int], epochs: int, rng: random.Random) -> None:
    def endless() -> Iterator[int]:
        while True:
            yield from rng.sample(files, len(files))

    one, other = endless(), endless()
    for _ in range(len(files) // 3):
        next(other)
    for epoch in range(1, epochs + 1):
        for _ in files:
            trace.read((next(one), next(other)), epoch)


SHAPES: dict[str, Callable[[Trace, list[int], int, random.Random], None]] = {
    "shuffled-files": _shuffled,
    "shuffled-shards": _shuffled,
    "scan": _scan,
    "zipf": _zipf,
    "uniform": _uniform,
    "opened-twice": partial(_shuffled, times=2),
    "validated": _validated,
    "takeover": _takeover,
    "turns": _turns,
    "two-jobs": _two_jobs,
}
"""Orders of reading: shuffled in each epoch; always the same; by popularity; at random; shuffled, each file twice; with a
validation set after each epoch; a second dataset after this one; two datasets alternately; two jobs on one dataset."""

MOST_FILES = 5_000_000
"""Most files of a shape. Derived: half a kilobyte of memory each."""

FILE_BYTES = {"shuffled-shards": 64 << 20}
"""Default size of a shape's files where it is not 1 MiB."""

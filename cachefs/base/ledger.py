"""Accounting by name, besides the counters: requests by dataset, waits by process, reasons of misses.

Entries are made where a request waits anyway (for the origin, for a disk, for an upload), so a warm read costs nothing more.
The daemon does not see requests that the kernel answers by itself. Every table is bounded: an evicted row is added to the
row `OTHERS`, or forgotten where only the latest count. Only the trio thread changes the tables.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from cachefs.base.linux import UNSEEN, Identity, identify
from cachefs.base.names import ObjectId

OTHERS = "…"
"""The row that sums datasets or processes without a row of their own."""

DATASETS = 64
"""Rows of datasets. Borrowed from the cache store, which has no datasets for a source with more first components."""

PROCESSES = 512
"""Rows of processes; further ones share one. A bound of memory: half a MiB."""

THREAD_S = 10.0
"""How long a thread's process is cached. Derived: the kernel reuses a thread's number after minutes at the earliest, and
0.1 ms in 10 s for each thread that waits is no load."""

REMEMBERED = 16_384
"""Rows of each table that keeps only the latest. Derived: 3 MB a table; extents of 256 GiB at the default block size."""

SLOW_S, SLOWEST, SLOW_FOR_S = 0.01, 32, 900.0
"""The slowest reads on the page and in `--json`: at least `SLOW_S` long, at most `SLOWEST` of them, of the last
`SLOW_FOR_S`. Derived: one round trip to a near origin takes less than 10 ms; the page shows a dozen."""

ORIGIN, PEER, DISK = "origin", "peer", "disk"
READ_FROM = (ORIGIN, PEER, DISK)
"""Reasons why reads wait: bytes from the origin, from another node, or from this node's tiers."""

NAMES, WRITES = "names", "writes"
WAITED_FOR = (*READ_FROM, NAMES, WRITES)
"""Reasons why requests wait. `NAMES`: lookup, listing, open, create, rename and removal. `WRITES`: write, close and
fsync."""

REASONS = {
    "cold": "it was never here, as far as is remembered",
    "evicted": "it was here and was evicted, for space or by cachefs evict",
    "changed": "another version of the file was here",
    "damaged": "it was here, and its checksum or its disk failed",
    "not_admitted": "it was read before, and no tier had space for it",
    "prefetch_in_flight": "its prefetch was in flight, and had not arrived yet",
}
"""Reason why a reader had to wait for a block → its text for users. Each has a counter `misses_…`."""

ORIGIN_REQUESTS = ("get", "list", "head", "put", "put_part", "upload", "copy", "delete")
"""Kinds of requests, in the order of `cachefs ledger`. Each has a counter `origin_…`."""

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histograms."""


@dataclass(slots=True)
class Histogram:
    """Durations by bucket: `counts[i]` is of those up to `BUCKETS_S[i]`, the last one of longer ones."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


Account = Counter[str]
"""Requests and bytes of one dataset or process, under the names of the counters (`origin_get`, `origin_bytes`, …)."""


# -- waits -----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Process:
    """A process that waited. `waited` is the sum of its requests' waits in seconds, by reason. `blocked_s` are the seconds
    in which at least one request waited. `calls` counts its requests that were no reads. `account` has the requests to the
    origin that its reads waited for, and those that its other requests caused."""

    identity: Identity
    since: float
    account: Account = field(default_factory=Account)
    reads: int = 0
    calls: int = 0
    bytes: int = 0
    waiting: int = 0
    waited: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WAITED_FOR, 0.0))
    blocked_s: float = 0.0
    _blocked_since: float = 0.0

    def began(self, now: float) -> None:
        if not self.waiting:
            self._blocked_since = now
        self.waiting += 1

    def ended(self, now: float) -> None:
        self.waiting -= 1
        if not self.waiting:
            self.blocked_s += now - self._blocked_since

    def add(self, other: Process) -> None:
        """Add the totals of another process."""
        self.account += other.account
        self.reads += other.reads
        self.calls += other.calls
        self.bytes += other.bytes
        self.blocked_s += other.blocked_s
        for what in WAITED_FOR:
            self.waited[what] += other.waited[what]


class Wait:
    """One request that waits, from now on. `request` is its name, `on` the reason of its present wait, `key` the object's
    ("": unknown), `shares` the seconds that it has waited, by reason."""

    def __init__(
        self, waits: Waits, thread: int, on: str, request: str, key: str = "", offset: int = 0
    ) -> None:
        self._waits: Waits | None = waits
        self.thread = thread
        self.process = waits.process(thread)
        self.request = request
        self.key = key
        self.offset = offset
        self.on = on
        self.shares: dict[str, float] = {}
        self.began = self._marked = waits.clock()
        waits.began(self)

    def now_for(self, what: str) -> None:
        """Note that the request waits for `what` from now on."""
        if self._waits is not None:
            now = self._waits.clock()
            self.shares[self.on] = self.shares.get(self.on, 0.0) + now - self._marked
            self._marked = now
            self.on = what

    def end(self, count: int = 0) -> None:
        """Note that the request was answered (a read with `count` bytes), or cancelled. Further calls change nothing."""
        if self._waits is not None:
            self.now_for(self.on)
            waits, self._waits = self._waits, None
            waits.ended(self, count)

    def shown(self) -> dict[str, Any]:
        identity = self.process.identity
        return {
            "key": self.key,
            "offset": self.offset,
            "on": self.on,
            "pid": identity.pid,
            "name": identity.name,
        }


current_call: ContextVar[Wait | None] = ContextVar("current_call", default=None)
"""The request that this task, or the task that began it, answers; None for reads and in the background."""


def about(key: str) -> None:
    """Note the key that the current request is about."""
    call = current_call.get()
    if call is not None:
        call.key = key


class SlowRead(NamedTuple):
    seconds: float
    ended: float
    wait: Wait


class Waits:
    """Processes that waited, how long and why. Times are seconds of `clock`; `identify` finds a thread's process."""

    def __init__(self, clock: Callable[[], float], identify: Callable[[int], Identity]) -> None:
        self.clock = clock
        self._identify = identify
        self._threads: OrderedDict[int, tuple[float, Process]] = OrderedDict()
        self._processes: OrderedDict[tuple[int, int], Process] = OrderedDict()
        self._slow: list[SlowRead] = []  # the slowest first
        self._waiting: set[Wait] = set()
        self.total = Process(Identity(0, 0, 0, "all"), clock())
        self.read_seconds = Histogram()
        self.open_seconds = Histogram()

    def process(self, thread: int) -> Process:
        """The row of the process that a thread belongs to."""
        now = self.clock()
        known = self._threads.get(thread)
        if known is not None and now < known[0]:
            return known[1]
        process = self._row(self._identify(thread) if thread else UNSEEN, now)
        _put(self._threads, thread, (now + THREAD_S, process))
        return process

    def _row(self, identity: Identity, now: float) -> Process:
        key = identity.pid, identity.started
        process = self._processes.get(key)
        if process is None:
            if len(self._processes) >= PROCESSES:
                self._forget_one(now)
            process = self._processes[key] = Process(identity, now)
        process.identity = identity  # its name may have changed
        self._processes.move_to_end(key)
        return process

    def _forget_one(self, now: float) -> None:
        """Add the least recently seen process that does not wait to `OTHERS`, and forget it."""
        others = self._processes.setdefault((-1, 0), Process(Identity(-1, 0, 0, OTHERS), now))
        for key, process in self._processes.items():
            if not process.waiting and process is not others:
                others.add(process)
                del self._processes[key]
                self._threads.clear()  # threads of the process may be in it
                break

    def begin(self, thread: int, object_id: ObjectId, offset: int) -> Wait:
        """Note that a read of that thread cannot be answered at once."""
        return Wait(self, thread, DISK, "read", object_id.key, offset)

    def call(self, thread: int, on: str, request: str) -> Wait:
        """Note that a request of that thread, other than a read, cannot be answered at once."""
        return Wait(self, thread, on, request)

    def began(self, wait: Wait) -> None:
        for process in (wait.process, self.total):
            process.began(wait.began)
        self._waiting.add(wait)

    def ended(self, wait: Wait, count: int) -> None:
        """See `Wait.end`."""
        self._waiting.discard(wait)
        now = self.clock()
        seconds, is_read = now - wait.began, wait.request == "read"
        for process in (wait.process, self.total):
            process.ended(now)
            process.reads += is_read
            process.calls += not is_read
            process.bytes += count
            for what, share in wait.shares.items():
                process.waited[what] += share
        if wait.request == "open":
            self.open_seconds.add(seconds)
        if is_read:
            self.read_seconds.add(seconds)
            if seconds >= SLOW_S:
                wait.on = max(READ_FROM, key=lambda what: wait.shares.get(what, 0.0))
                reads = [SlowRead(seconds, now, wait), *self._fresh(now)]
                self._slow = sorted(reads, key=attrgetter("seconds"), reverse=True)[:SLOWEST]

    def _fresh(self, now: float) -> list[SlowRead]:
        return [read for read in self._slow if now - read.ended <= SLOW_FOR_S]

    # Plain values for JSON. Points in time are seconds before now.

    def processes(self) -> list[dict[str, Any]]:
        """Processes that have waited, the latest first."""
        now = self.clock()
        return [_shown(process, now) for process in reversed(self._processes.values())]

    def totals(self) -> dict[str, Any]:
        """All processes together: `blocked_s` are seconds in which at least one of them waited."""
        return _shown(self.total, self.clock())

    def slowest(self) -> list[dict[str, Any]]:
        """The slowest reads of the last quarter of an hour, the slowest first."""
        now = self.clock()
        return [
            {"seconds": seconds, "ago_s": now - ended, **wait.shown()}
            for seconds, ended, wait in self._fresh(now)
        ]

    def waiting(self) -> list[dict[str, Any]]:
        """The requests that wait now, the longest first."""
        now = self.clock()
        return [
            {"request": wait.request, "seconds": now - wait.began, **wait.shown()}
            for wait in sorted(self._waiting, key=lambda wait: wait.began)
        ]


def _shown(process: Process, now: float) -> dict[str, Any]:
    identity = process.identity
    return {
        "pid": identity.pid,
        "parent": identity.parent,
        "name": identity.name,
        "seen_s": now - process.since,
        "waiting": process.waiting,
        "reads": process.reads,
        "calls": process.calls,
        "bytes": process.bytes,
        "blocked_s": process.blocked_s + (now - process._blocked_since if process.waiting else 0.0),
        "waited_s": dict(process.waited),
        "requests": dict(process.account),
    }


# -- misses ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Miss:
    """The last time that a reader had to wait for blocks of an extent. `at` is in seconds since the epoch; `asked` has where
    they were requested, in that order."""

    at: float
    reason: str
    asked: list[str] = field(default_factory=list)


class Misses:
    """Why blocks were not cached when a reader wanted them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._gone: OrderedDict[tuple[bytes, int], str] = OrderedDict()
        self._last: OrderedDict[tuple[bytes, int], Miss] = OrderedDict()
        # `_name` → (digest of the version fetched last, whether another one was fetched before it)
        self._versions: OrderedDict[int, tuple[bytes, bool]] = OrderedDict()

    def gone(self, digest: bytes, extent: int, reason: str) -> None:
        """Note that blocks of an extent were dropped, and why."""
        _put(self._gone, (digest, extent), reason)

    def fetched(self, object_id: ObjectId) -> None:
        """Note that a version is being fetched."""
        name = _name(object_id)
        before = self._versions.get(name)
        if before is None or before[0] != object_id.digest:
            _put(self._versions, name, (object_id.digest, before is not None))

    def missed(
        self, object_id: ObjectId, extent: int, *, joins: bool = False, prefetch_in_flight: bool
    ) -> str:
        """Note that a reader has to wait for blocks of that extent. Returns the reason. `joins`: another reader
        waits for them already. `prefetch_in_flight`: they are being prefetched."""
        place = object_id.digest, extent
        before = self._last.get(place) if joins else None
        reason = "prefetch_in_flight" if prefetch_in_flight else self._gone.get(place, "")
        if not reason:
            digest, changed = self._versions.get(_name(object_id), (object_id.digest, False))
            reason = "changed" if changed or digest != object_id.digest else "cold"
        _put(self._last, place, Miss(self._clock(), reason, before.asked if before is not None else []))
        return reason

    def asked(self, digest: bytes, extent: int, place: str) -> None:
        """Note where missing blocks were requested, and the outcome."""
        miss = self._last.get((digest, extent))
        if miss is not None and len(miss.asked) < 8 and place not in miss.asked[-1:]:
            miss.asked.append(place)

    def last(self, digest: bytes, extents: int) -> Iterator[tuple[int, Miss]]:
        """(extent, its last miss) of a version, for its first `extents` extents."""
        for extent in range(extents):
            miss = self._last.get((digest, extent))
            if miss is not None:
                yield extent, miss


def _name(object_id: ObjectId) -> int:
    return hash((object_id.source, object_id.key))


def _put(table: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > REMEMBERED:
        table.popitem(last=False)


class Ledger:
    """Requests to the origin by dataset, waits and misses, and durations of requests to the origin and of uploads. A dataset
    is the first path component below the mounted prefix."""

    def __init__(self) -> None:
        self.datasets: dict[str, Account] = defaultdict(Account)
        self.waits = Waits(time.monotonic, identify)
        self.misses = Misses(time.time)
        self.origin_seconds = {kind: Histogram() for kind in ORIGIN_REQUESTS}
        self.upload_seconds = Histogram()

    def account(self, prefix: str, key: str) -> Account:
        """The account of the dataset that a key (or the prefix of a listing) belongs to."""
        first, slash, _ = key[len(prefix) :].lstrip("/").partition("/")
        name = prefix + first if slash else prefix
        if name not in self.datasets and len(self.datasets) >= DATASETS:
            name = OTHERS
        return self.datasets[name]

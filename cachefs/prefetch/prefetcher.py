"""The executor of prefetch: one task that takes groups of candidates, the most certain first. One call begins the small
files of a group, without tasks; each other transfer has a task.

Plans come first, then the next shards, then the rest of a directory. Two bounds hold for all of them together: transfers in
flight, which leave the origin's last slots to readers, and bytes that were fetched and not used yet (`UNUSED_SHARE`). A
prefetched file is *awaited* until it is opened; then it is *used*. A predicted shard is used when it was read
(`shards.READ_SHARE`).

The cache store refuses a block that would displace blocks worth more. Then prefetch pauses until a file was used or a
second has passed. After a failure it pauses for a second, too, so that only readers send requests to an origin that is
down."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from cachefs.base.errors import CachefsError, IsADirectory, NoRoom, NotFound, ObjectChanged, Unreachable
from cachefs.base.metrics import Metrics
from cachefs.base.tasks import contained
from cachefs.fetch import Fetcher
from cachefs.fs import LARGE, FileSystem, Volume
from cachefs.prefetch.plans import FOLLOWED_S, Hints, Plan, PlanStore
from cachefs.prefetch.sources import Candidate, FromDirectories, FromPlans, FromShards, Paths
from cachefs.store.eviction import PREFETCHED_S

if TYPE_CHECKING:
    from cachefs.base.names import ObjectId
    from cachefs.origin import Origin

log = logging.getLogger(__name__)

PART_BYTES, PARTS = 8 << 20, 8
"""`Fetcher.prefetch` fetches a large file in parts of `PART_BYTES`, `PARTS` at a time. It counts as so many transfers."""

AT_ONCE = 16
"""Files of a group, which are begun before the daemon's other tasks run: about 1 ms. A group waits until so many slots are
free; otherwise each fetch that ends would begin a group of one. Measured: with half as many, a cold small file takes an
eighth more processor time with 8 readers."""

LEAST_GROUPS = 4
"""At least so many groups fill the slots. Guessed: three quarters of the slots stay in use while a group waits for slots."""

UNUSED_SHARE = 2
"""Files that were prefetched and not opened yet may take half of the cache. Given: the rest is for files read again."""

LARGEST_SHARE = 4
"""A file takes at most a quarter of the bytes that may be unused. Of a larger one only the beginning is fetched."""

MOST_AWAITED = 65_536
"""Most awaited files, about 600 bytes of memory each."""

PAUSE_S = 1.0
"""How long prefetch pauses when it is refused or fails. Given."""

SWEEP_EVERY_S = 60.0
"""The time between two passes through the awaited files."""

UNREAD_S = 60.0
"""A predicted shard that was opened and then not read for so long counts as not wanted."""

SHOWN = 4
"""Most directories that the status shows."""


@dataclass(slots=True, eq=False)
class _Prefetched:
    """A prefetched file: `size` bytes of it. `fetched` of these came with the prefetch, which is known when it is `done`."""

    candidate: Candidate
    object: ObjectId
    size: int
    since: float
    done: bool = False
    used: bool = False
    fetched: int = 0


@dataclass(slots=True, eq=False)
class Awaited:
    """The digests of files whose opens must be reported to prefetch (see `FileSystem.watch_opens`). `unread` are predicted
    shards that were opened and not read yet. `unused_bytes` are those of both together."""

    everything: bool = False  # plans follow every open
    files: OrderedDict[bytes, _Prefetched] = field(default_factory=OrderedDict)
    unread: dict[bytes, _Prefetched] = field(default_factory=dict)
    unused_bytes: int = 0

    def __contains__(self, digest: object) -> bool:
        return self.everything or digest in self.files

    def put(self, file: _Prefetched) -> None:
        self.files[file.object.digest] = file
        self.unused_bytes += file.size

    def opened(self, digest: bytes) -> _Prefetched | None:
        file = self.files.pop(digest, None)
        if file is not None:
            self.stop_counting(digest)
            self.unread[digest] = file
        return file

    def stop_counting(self, digest: bytes) -> _Prefetched | None:
        """Stop counting an opened file as unused: it was used, or is not wanted. Returns None if it was not counted."""
        file = self.unread.pop(digest, None)
        if file is not None:
            self.unused_bytes -= file.size
        return file

    def drop(self, file: _Prefetched) -> bool:
        """Forget a file; False if it was opened meanwhile."""
        digest = file.object.digest
        if self.files.get(digest) is file:
            del self.files[digest]
            self.unused_bytes -= file.size
            return True
        if self.unread.get(digest) is file:
            self.stop_counting(digest)
        return False


class _Watched:
    """The digests of large files whose reads the daemon must see. These are opened without passthrough."""

    def __init__(self, awaited: Awaited, shards: FromShards) -> None:
        self._files = awaited.files
        self._shards = shards.shards

    def __contains__(self, digest: object) -> bool:
        file = self._files.get(digest)  # type: ignore[call-overload]
        stream = None if file is None else file.candidate.stream
        return stream is not None and self._shards.must_see_reads(*stream)


@dataclass(eq=False, repr=False)
class Prefetcher:
    """`slots` transfers at a time. `capacity` returns what the cache may hold now, in bytes. `directory` is for plans."""

    _fs: FileSystem
    _fetcher: Fetcher
    volumes: InitVar[list[Volume]]
    _metrics: Metrics
    slots: int
    capacity: Callable[[], int]
    directory: InitVar[Path]
    clock: Callable[[], float] = time.time

    def __post_init__(self, volumes: list[Volume], directory: Path) -> None:
        self.slots = max(1, self.slots)
        self._group = max(1, min(AT_ONCE, self.slots // LEAST_GROUPS))
        # As `trio.current_time`, which takes three more calls to find its clock.
        self._now = trio.lowlevel.current_clock().current_time
        fs, fetcher = self._fs, self._fetcher
        paths = self._paths = Paths(volumes)
        self._plans = FromPlans(fs, self._wanted, self._still_wanted, self.clock, fetcher.preload)
        self._shards = FromShards(fs, paths, self._still_wanted)
        self._directories = FromDirectories(
            fs, paths, self._still_wanted, fetcher.preload, fetcher.epoch_progress
        )
        self.hints = Hints(self._plans.plans, PlanStore(directory), self._plans_changed, self.clock)
        self.awaited = Awaited()
        self._nursery: trio.Nursery | None = None
        self._in_flight = 0  # transfers
        self._wake_up = trio.Event()
        self._sweep_soon = trio.Event()
        self._resume_at = float("-inf")
        self._pause_reason = ""
        self._fetched_bytes = self._used_bytes = self._unknown = 0

    # -- events ------------------------------------------------------------------------------

    def opened(self, ino: int, pid: int, origin: Origin, obj: ObjectId, passthrough: bool) -> None:
        """See `OpenHook`."""
        try:
            self._opened(ino, pid, origin, obj, passthrough)
        except Exception:
            log.exception("an open could not be followed")

    def _opened(self, ino: int, pid: int, origin: Origin, obj: ObjectId, passthrough: bool) -> None:
        now = self._now()
        file = self.awaited.opened(obj.digest)
        if file is not None:
            self._metrics.prefetch_used_files += file.done
            file.since = now
            if file.candidate.stream is None or passthrough:
                self._use(obj.digest)
            if file.candidate.walk is not None:
                self._directories.hit(file.candidate.walk, obj, now)
            if self._pause_reason == "no room":
                self._resume_at = now
            self._wake()
        plans = self._plans.plans
        if plans.by_name and plans.opened(os.fsencode(self._paths.of(origin, obj)), self.clock()):
            if any(plan.jumped for plan in plans.by_name.values()):
                self._sweep_soon.set()
            self._wake()
            return  # the plan says what comes next
        if obj.size > LARGE:
            counts = file is not None or not self._fetcher.whole(obj)
            cold = file is not None or not self._fetcher.cached_bytes(obj)
            self._shards.opened(ino, pid, origin, obj, cold=cold, counts=counts)
            self._wake()
        elif obj.size and file is None and not passthrough and self._still_wanted(obj):
            self._fetcher.epoch_progress.mark_used(obj)
            walk = self._directories.missed(ino, origin, obj, now)
            if walk is not None and self._nursery is not None:
                contained(self._nursery, "prefetch", self._count, walk)
            self._wake()

    def read(self, obj: ObjectId, offset: int, size: int) -> None:
        """See `ReadHook`."""
        try:
            if self._shards.read(obj, offset, size):
                self._use(obj.digest)
                self._wake()
        except Exception:
            log.exception("a read could not be followed")

    def _use(self, digest: bytes) -> None:
        file = self.awaited.stop_counting(digest)
        if file is not None:
            file.used = True
            self._used_bytes += file.fetched

    async def _count(self, walk: Any) -> None:
        await self._directories.count(walk)
        self._wake()

    def _plans_changed(self) -> None:
        self._follow()
        self._wake()

    def _follow(self) -> None:
        plans, now = self._plans.plans.by_name.values(), self.clock()
        everything = any(plan.orders and not plan.quiet(now, FOLLOWED_S) for plan in plans)
        if everything and not self.awaited.everything:
            self._fs.forget_known()
        self.awaited.everything = everything

    # -- transfers ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Prefetch until cancelled."""
        self._fetcher.watch_reads(self.read, _Watched(self.awaited, self._shards))
        await self.hints.load()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._sweep_now_and_then)
            try:
                while True:
                    self._wake_up = trio.Event()
                    if await self._start_some(nursery):
                        await trio.lowlevel.checkpoint()
                    else:
                        with trio.move_on_at(self._resume_at if self._paused() else float("inf")):
                            await self._wake_up.wait()
            finally:
                self._nursery = None
                await self.hints.aclose()

    def _wake(self) -> None:
        if self._has_slots:  # otherwise the end of a transfer wakes the task
            self._wake_up.set()

    @property
    def _has_slots(self) -> bool:
        """True if a group may begin."""
        return self._in_flight + self._group <= self.slots

    def _paused(self) -> bool:
        return self._now() < self._resume_at

    async def _start_some(self, nursery: trio.Nursery) -> bool:
        """Begin a group of transfers. True if others may follow, False if there is nothing to begin now."""
        budget = self._budget()
        if not self._has_slots or self._is_full(budget) or self._paused():
            return False
        group = (
            await self._plans.next(self._group)
            or await self._shards.next()
            or await self._directories.next(self._group)
        )
        self._start(nursery, group, budget)
        return bool(group)

    def _budget(self) -> int:
        """How many bytes may be unused now."""
        return self.capacity() // UNUSED_SHARE

    def _is_full(self, budget: int) -> bool:
        """True if as many prefetched files or bytes as allowed wait to be used."""
        return self.awaited.unused_bytes >= budget or len(self.awaited.files) >= MOST_AWAITED

    def _wanted(self, obj: ObjectId) -> bool:
        return bool(obj.size) and obj.digest not in self.awaited.files and not self._fetcher.whole(obj)

    def _still_wanted(self, obj: ObjectId) -> bool:
        """`_wanted` for predictions: not a file that was read in this epoch. It may have been evicted."""
        return self._wanted(obj) and not self._fetcher.epoch_progress.was_used(obj)

    def _start(self, nursery: trio.Nursery, group: list[Candidate], budget: int) -> None:
        """Begin the transfers of as many candidates as the bounds allow. The rest are put back."""
        now = self._now()
        small: dict[Origin, list[_Prefetched]] = {}
        for number, candidate in enumerate(group):
            if self._in_flight >= self.slots or self._is_full(budget):
                for other in reversed(group[number:]):
                    other.postpone()
                break
            if candidate.found is None:
                self._in_flight += 1
                contained(nursery, "prefetch", self._look_up, nursery, candidate)
                continue
            origin, obj = candidate.found
            if obj.digest in self.awaited.files:
                continue  # two plans name it, or it was prefetched during the lookup
            size = min(obj.size, budget // LARGEST_SHARE)
            file = _Prefetched(candidate, obj, size, now)
            self.awaited.put(file)
            transfers = max(1, min(PARTS, size // PART_BYTES))
            self._in_flight += transfers
            if size == obj.size <= LARGE:
                small.setdefault(origin, []).append(file)
            else:
                contained(nursery, "prefetch", self._fetch, origin, file, transfers)
        for origin, files in small.items():
            begun = [(file.object, partial(self._ended, file, 1)) for file in files]
            others = self._fetcher.prefetch_small(origin, begun)
            for file in files:
                if file.object in others:
                    contained(nursery, "prefetch", self._fetch, origin, file, 1)

    async def _look_up(self, nursery: trio.Nursery, candidate: Candidate) -> None:
        """Look up a path that no listing has, then fetch it."""
        assert candidate.item is not None
        try:
            candidate.found = await self._fs.tree_queries.resolve(os.fsdecode(candidate.item.path))
        except CachefsError as exc:
            self._failed(exc, candidate)
            return
        finally:
            self._in_flight -= 1
            self._wake()
        if candidate.found is None:
            self._unknown += 1
        elif self._wanted(candidate.found[1]):
            self._start(nursery, [candidate], self._budget())

    async def _fetch(self, origin: Origin, file: _Prefetched, transfers: int) -> None:
        fetched = 0
        failure: BaseException | None = None
        try:
            fetched = await self._fetcher.prefetch(origin, file.object, 0, file.size)
        except BaseException as exc:
            failure = exc
            if not isinstance(exc, CachefsError):
                raise
        finally:
            self._ended(file, transfers, fetched, failure)

    def _ended(self, file: _Prefetched, transfers: int, fetched: int, failure: BaseException | None) -> None:
        """Note that a transfer has ended, or could not begin."""
        self._in_flight -= transfers
        if failure is None:
            file.fetched, file.done = fetched, True
            self._fetched_bytes += fetched
            self._used_bytes += fetched if file.used else 0
            self._metrics.prefetch_files += 1
            self._metrics.prefetch_used_files += self.awaited.files.get(file.object.digest) is not file
        else:
            if isinstance(failure, CachefsError):
                self._failed(failure, file.candidate)
            if self.awaited.drop(file) and file.candidate.walk is not None:
                file.candidate.walk.policy.failed()
        self._wake()

    def _failed(self, exc: CachefsError, candidate: Candidate) -> None:
        if isinstance(exc, NoRoom | Unreachable):
            candidate.put_back()  # the reason is not this file, and will pass
        if isinstance(exc, NoRoom):
            self._pause_for("no room")
            return
        self._metrics.prefetch_errors += 1
        log.debug("prefetch: %s", exc)
        if not isinstance(exc, NotFound | IsADirectory | ObjectChanged):  # those are of this file alone
            self._pause_for(str(exc))

    def _pause_for(self, reason: str) -> None:
        self._pause_reason = reason
        self._resume_at = self._now() + PAUSE_S

    # -- housekeeping ------------------------------------------------------------------------------

    async def _sweep_now_and_then(self) -> None:
        while True:
            await trio.sleep(PAUSE_S)
            with trio.move_on_after(SWEEP_EVERY_S):
                await self._sweep_soon.wait()
            self._sweep_soon = trio.Event()
            for plan in self._plans.plans.by_name.values():
                plan.jumped = False
            await self._sweep()
            await self.hints.drop_unused()
            self._follow()
            self._wake()

    async def _sweep(self) -> None:
        """Stop awaiting files that were evicted or are not wanted any more."""
        for number, file in enumerate(list(self.awaited.files.values())):
            if number % 64 == 0:
                await trio.lowlevel.checkpoint()
            if file.done and (self._given_up(file) or not self._fetcher.cached_bytes(file.object)):
                self.awaited.drop(file)
        for digest, file in list(self.awaited.unread.items()):
            if file.done and file.since < self._now() - UNREAD_S:
                self.awaited.stop_counting(digest)

    def _given_up(self, file: _Prefetched) -> bool:
        """True if a file is no longer awaited: it was not opened for `PREFETCHED_S`, and no plan in use names it."""
        item = file.candidate.item
        if item is not None and self._plans.plans.by_name.get(item.plan.name) is item.plan:
            if item.plan.is_past(item.epoch, item.place):
                return True
            if not item.plan.quiet(self.clock()):
                return False
        return file.since < self._now() - PREFETCHED_S

    def status(self) -> dict[str, Any]:
        """For `cachefs status`: plain values. `paused` is why nothing is fetched, else ""."""
        full = "enough lies unused" if self._is_full(self._budget()) else ""
        return {
            "directories": self._directories.status(SHOWN),
            "shards": len(self._shards.shards),
            "plans": [_shown(plan) for _, plan in sorted(self._plans.plans.by_name.items())],
            "in_flight": self._in_flight,
            "unused_bytes": self.awaited.unused_bytes,
            "fetched_bytes": self._fetched_bytes,
            "used_bytes": self._used_bytes,
            "unknown_paths": self._unknown,
            "paused": self._pause_reason if self._paused() else full,
        }


def _shown(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "files": len(plan.files),
        "position": plan.position,
        "epoch": plan.epoch,
        "ahead": max(0, plan.ahead - plan.position),
    }

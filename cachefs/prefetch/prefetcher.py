"""Fetching ahead: one task that takes candidates in the order of their worth, and a task for each transfer.

What jobs have announced comes first, then the shards that come next, then the rest of a directory. Two bounds hold for
all of them together: transfers under way, which leave the store's last slots to readers, and bytes that were fetched and
not used yet, which are a share of the cache. A file is *awaited* until it is opened, and then it is *used*. Of a large one
that was guessed only as much is used as is seen to be read: who opens it may look at its footer and go on to the next.

The store refuses what would displace something that somebody will miss. Then prefetch pauses, until something was used or
a second has passed. It pauses as long after a failure: a store that is down is asked by readers alone. An error here costs
the prefetch and nobody else.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from cachefs.errors import CachefsError, IsADirectory, NoRoom, NotFound, ObjectChanged
from cachefs.fetch import Fetcher
from cachefs.fs import LARGE, FileSystem, Volume
from cachefs.metrics import Metrics
from cachefs.prefetch.announced import Announced
from cachefs.prefetch.plans import FOLLOWED_S, Plan
from cachefs.prefetch.shelf import Shelf
from cachefs.prefetch.sources import Candidate, FromDirectories, FromPlans, FromShards, Paths
from cachefs.tasks import contained

if TYPE_CHECKING:
    from cachefs.names import ObjectId
    from cachefs.origin import Origin

log = logging.getLogger(__name__)

PART_BYTES, PARTS = 8 << 20, 8
"""How a large file is fetched (see `Fetcher.bring`): it counts as so many transfers."""

LARGEST_SHARE = 4
"""A file takes at most this part of the bytes that may lie unused; of a larger one the beginning is fetched. Guessed."""

MOST_AWAITED = 65_536
"""Files that may lie unused, about 600 bytes of memory each. Guessed: as many as readers use in a minute."""

PAUSE_S = 1.0
"""How long prefetch rests when it is refused or fails. Given."""

SWEEP_EVERY_S = 60.0
"""How often what is awaited is looked through. Guessed."""

UNREAD_S = 60.0
"""What was not read for so long of a large file that was opened will not be read. Guessed."""

AWAITED_S = 600.0
"""What nobody opened for so long will not be opened, unless a plan in use says so. Guessed."""

SHOWN = 4
"""Directories in the status."""


class _Ahead:
    """A file that is fetched ahead, `size` bytes of it. `fetched` is known when it is done."""

    __slots__ = ("candidate", "counted", "done", "fetched", "object", "read", "since", "size")

    def __init__(self, candidate: Candidate, obj: ObjectId, size: int, since: float) -> None:
        self.candidate = candidate
        self.object = obj
        self.size = size
        self.since = since
        self.done = False
        self.fetched = self.read = self.counted = 0

    def use(self, count: int) -> int:
        """So many bytes were read, or may have been. Returns how many more of those fetched are used than before."""
        self.read = min(self.size, self.read + count)
        before, self.counted = self.counted, min(self.read, self.fetched)
        return self.counted - before


class Awaited:
    """Whose opens are worth telling, by digest: see `FileSystem.watch_opens`. `unread` are those that were opened, and not
    read to their end."""

    __slots__ = ("bytes", "everything", "files", "unread")

    def __init__(self) -> None:
        self.everything = False  # plans follow every open
        self.files: OrderedDict[bytes, _Ahead] = OrderedDict()
        self.unread: dict[bytes, _Ahead] = {}
        self.bytes = 0

    def __contains__(self, digest: object) -> bool:
        return self.everything or digest in self.files

    def put(self, ahead: _Ahead) -> None:
        self.files[ahead.object.digest] = ahead
        self.bytes += ahead.size

    def pop(self, digest: bytes) -> _Ahead | None:
        ahead = self.files.pop(digest, None)
        if ahead is not None:
            self.bytes -= ahead.size
        return ahead

    def drop(self, ahead: _Ahead) -> bool:
        """Give it up; False when it was used meanwhile."""
        return self.files.get(ahead.object.digest) is ahead and self.pop(ahead.object.digest) is ahead

    def opened(self, ahead: _Ahead) -> None:
        """It is used by being read."""
        self.end(ahead.object.digest)
        self.unread[ahead.object.digest] = ahead
        self.bytes += ahead.size

    def read(self, digest: bytes, size: int, now: float) -> int:
        """Some of it was read. Returns how many bytes more are used."""
        ahead = self.unread.get(digest)
        if ahead is None:
            return 0
        before, ahead.since = ahead.read, now
        used = ahead.use(size)
        self.bytes -= ahead.read - before
        if ahead.read == ahead.size and ahead.done:
            del self.unread[digest]
        return used

    def end(self, digest: bytes) -> None:
        """The rest of it will not be read."""
        ahead = self.unread.pop(digest, None)
        if ahead is not None:
            self.bytes -= ahead.size - ahead.read


class _Unlent:
    """Digests of large files whose reads are to be seen."""

    def __init__(self, awaited: Awaited, shards: FromShards) -> None:
        self._files = awaited.files
        self._shards = shards.shards

    def __contains__(self, digest: object) -> bool:
        ahead = self._files.get(digest)  # type: ignore[call-overload]
        stream = None if ahead is None else ahead.candidate.stream
        return stream is not None and self._shards.doubts(*stream)


class Prefetcher:
    """`slots` are transfers at a time, `budget` the bytes that may lie unused now. Plans are kept in `directory`."""

    def __init__(
        self,
        fs: FileSystem,
        fetcher: Fetcher,
        volumes: list[Volume],
        metrics: Metrics,
        *,
        slots: int,
        budget: Callable[[], int],
        directory: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fs = fs
        self._fetcher = fetcher
        self._metrics = metrics
        self._slots = max(1, slots)
        self._budget = budget
        self._clock = clock
        self._paths = Paths(volumes)
        self._plans = FromPlans(fs, self._wanted, self._still_wanted, clock)
        self._shards = FromShards(fs, self._paths, self._still_wanted)
        self._directories = FromDirectories(fs, self._paths, self._still_wanted)
        self._announced = Announced(self._plans.plans, Shelf(directory) if directory else None, clock)
        self._announced.on_change = self._plans_changed
        self.awaited = Awaited()
        self._nursery: trio.Nursery | None = None
        self._in_flight = 0  # transfers
        self._stirred = False
        self._news = trio.Event()
        self._sweep_soon = trio.Event()
        self._resume_at = float("-inf")
        self._pause = ""
        self._fetched_bytes = self._used_bytes = self._unknown = 0

    # -- what is told ------------------------------------------------------------------------------

    def opened(self, ino: int, pid: int, origin: Origin, obj: ObjectId, lent: bool) -> None:
        """See `OpenHook`."""
        try:
            self._opened(ino, pid, origin, obj, lent)
        except Exception:
            log.exception("an open could not be followed")

    def _opened(self, ino: int, pid: int, origin: Origin, obj: ObjectId, lent: bool) -> None:
        now = trio.current_time()
        ahead = self.awaited.pop(obj.digest)
        if ahead is not None:
            self._metrics.prefetch_used_files += 1
            if ahead.candidate.stream is None or lent:
                self._used_bytes += ahead.use(ahead.size)
            else:
                self.awaited.opened(ahead)
            if ahead.candidate.directory is not None:
                self._directories.hit(ino, ahead.candidate.directory, self._fetcher.course.epoch(obj), now)
            if self._pause == "no room":
                self._resume_at = now
            self._wake()
        if self._plans.plans.by_name:
            path = self._paths.of(origin, obj).encode("utf-8", "surrogateescape")
            if self._plans.plans.opened(path, self._clock()):
                if self._plans.plans.jumped:
                    self._sweep_soon.set()
                self._wake()
                return  # the plan knows better
        if obj.size > LARGE:
            counts = ahead is not None or not self._fetcher.whole(obj)
            cold = ahead is not None or not self._fetcher.cached_bytes(obj)  # to its readers
            self._shards.opened(ino, pid, origin, obj, cold=cold, counts=counts, seen=not lent)
            self._wake()
        elif obj.size and ahead is None and not lent and self._still_wanted(obj):
            self._fetcher.course.comes(obj)
            walk = self._directories.missed(ino, origin, obj, self._fetcher.course.epoch(obj), now)
            if walk is not None and self._nursery is not None:
                contained(self._nursery, "prefetch", self._count, walk)
            self._wake()

    def read(self, obj: ObjectId, offset: int, size: int) -> None:
        """See `ReadHook`."""
        try:
            if self.awaited.unread:
                self._used_bytes += self.awaited.read(obj.digest, size, trio.current_time())
            if self._shards.read(obj, offset, size):
                self._wake()
        except Exception:
            log.exception("a read could not be followed")

    async def _count(self, walk: Any) -> None:
        await self._directories.count(walk)
        self._wake()

    async def hint_files(self, plan: str, paths: list[str], at: int, total: int) -> int:
        """The files of a plan, relative to the mount, from the `at`th of `total` on. Returns how many have come."""
        return await self._announced.files(plan, paths, at, total)

    async def hint_order(
        self, plan: str, epoch: int, indices_b64: str, at: int, total: int, files: str = ""
    ) -> int:
        """The order of an epoch of a plan: places in its list of files, little-endian 32-bit numbers in base64, from the
        `at`th of `total` on. `files` is the digest of the list they are meant for. Returns how many have come."""
        return await self._announced.order(plan, epoch, indices_b64, at, total, files)

    async def hint_drop(self, plan: str) -> bool:
        """Forget a plan. Whether there was one."""
        return await self._announced.drop(plan)

    def _plans_changed(self) -> None:
        self._follow()
        self._wake()

    def _follow(self) -> None:
        plans, now = self._plans.plans.by_name.values(), self._clock()
        self.awaited.everything = any(plan.orders and not plan.quiet(now, FOLLOWED_S) for plan in plans)

    # -- what is done ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Fetch ahead until cancelled."""
        self._fetcher.watch_reads(self.read, _Unlent(self.awaited, self._shards))
        await self._announced.load()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._sweep_now_and_then)
            try:
                while True:
                    self._stirred = False
                    if self._may_start() and (candidate := await self._next()) is not None:
                        self._start(nursery, candidate)
                        await trio.lowlevel.checkpoint()
                    elif not self._stirred:
                        self._news = trio.Event()
                        with trio.move_on_at(self._resume_at if self._paused() else float("inf")):
                            await self._news.wait()
            finally:
                self._nursery = None

    def _wake(self) -> None:
        self._stirred = True
        self._news.set()

    def _paused(self) -> bool:
        return trio.current_time() < self._resume_at

    def _may_start(self) -> bool:
        return self._in_flight < self._slots and not self._enough() and not self._paused()

    def _enough(self) -> bool:
        return self.awaited.bytes >= self._budget() or len(self.awaited.files) >= MOST_AWAITED

    async def _next(self) -> Candidate | None:
        return await self._plans.next() or await self._shards.next() or await self._directories.next()

    def _wanted(self, obj: ObjectId) -> bool:
        return bool(obj.size) and obj.digest not in self.awaited.files and not self._fetcher.whole(obj)

    def _still_wanted(self, obj: ObjectId) -> bool:
        """For who guesses: what this epoch has had may be gone, but nobody will miss it."""
        return self._wanted(obj) and not self._fetcher.course.had(obj)

    def _start(self, nursery: trio.Nursery, candidate: Candidate) -> None:
        if candidate.found is None:
            self._in_flight += 1
            contained(nursery, "prefetch", self._look_up, nursery, candidate)
            return
        origin, obj = candidate.found
        size = min(obj.size, self._budget() // LARGEST_SHARE)
        if obj.digest in self.awaited.files:
            return  # two plans, or a look-up that took its time
        ahead = _Ahead(candidate, obj, size, trio.current_time())
        self.awaited.put(ahead)
        transfers = max(1, min(PARTS, size // PART_BYTES))
        self._in_flight += transfers
        contained(nursery, "prefetch", self._bring, origin, ahead, transfers)

    async def _look_up(self, nursery: trio.Nursery, candidate: Candidate) -> None:
        """Find a path that nothing is known of, then fetch it."""
        assert candidate.item is not None
        try:
            candidate.found = await self._fs.survey.resolve(
                candidate.item.path.decode("utf-8", "surrogateescape")
            )
        except CachefsError as exc:
            self._failed(exc, candidate)
            return
        finally:
            self._in_flight -= 1
            self._wake()
        if candidate.found is None:
            self._unknown += 1
        elif self._wanted(candidate.found[1]):
            self._start(nursery, candidate)

    async def _bring(self, origin: Origin, ahead: _Ahead, transfers: int) -> None:
        fetched = False
        try:
            ahead.fetched = await self._fetcher.bring(origin, ahead.object, 0, ahead.size)
            fetched = ahead.done = True
            self._fetched_bytes += ahead.fetched
            self._used_bytes += ahead.use(0)
            self._metrics.prefetch_files += 1
        except CachefsError as exc:
            self._failed(exc, ahead.candidate)
        finally:
            self._in_flight -= transfers
            if not fetched:
                if self.awaited.drop(ahead) and ahead.candidate.directory is not None:
                    ahead.candidate.directory.failed()
                if self.awaited.unread.get(ahead.object.digest) is ahead:
                    self.awaited.end(ahead.object.digest)
            self._wake()

    def _failed(self, exc: CachefsError, candidate: Candidate) -> None:
        if isinstance(exc, NoRoom):
            self._rest("no room")
            candidate.give_back()
            return
        self._metrics.prefetch_errors += 1
        log.debug("prefetch: %s", exc)
        if not isinstance(exc, NotFound | IsADirectory | ObjectChanged):  # which are of this file alone
            self._rest(str(exc))

    def _rest(self, reason: str) -> None:
        self._pause = reason
        self._resume_at = trio.current_time() + PAUSE_S

    # -- housekeeping ------------------------------------------------------------------------------

    async def _sweep_now_and_then(self) -> None:
        while True:
            await trio.sleep(PAUSE_S)
            with trio.move_on_after(SWEEP_EVERY_S):
                await self._sweep_soon.wait()
            self._sweep_soon = trio.Event()
            self._plans.plans.jumped = False
            await self._sweep()
            await self._announced.drop_unused()
            self._follow()
            self._wake()

    async def _sweep(self) -> None:
        """What is gone from the cache, or will not be opened, is not awaited any more."""
        for number, ahead in enumerate(list(self.awaited.files.values())):
            if number % 64 == 0:
                await trio.lowlevel.checkpoint()
            if ahead.done and (self._given_up(ahead) or not self._fetcher.cached_bytes(ahead.object)):
                self.awaited.drop(ahead)
        for digest, ahead in list(self.awaited.unread.items()):
            if ahead.done and ahead.since < trio.current_time() - UNREAD_S:
                self.awaited.end(digest)

    def _given_up(self, ahead: _Ahead) -> bool:
        item = ahead.candidate.item
        if item is not None and self._plans.plans.by_name.get(item.plan.name) is item.plan:
            if item.plan.passed(item.epoch, item.place):
                return True
            if not item.plan.quiet(self._clock()):
                return False
        return ahead.since < trio.current_time() - AWAITED_S

    def status(self) -> dict[str, Any]:
        """For `cachefs status`: plain values. `paused` says why nothing is fetched, "" when it may be."""
        full = "enough lies unused" if self._enough() else ""
        return {
            "directories": self._directories.status(SHOWN),
            "shards": len(self._shards.shards),
            "plans": [_shown(plan) for plan in self._plans.plans.by_name.values()],
            "in_flight": self._in_flight,
            "unused_bytes": self.awaited.bytes,
            "fetched_bytes": self._fetched_bytes,
            "used_bytes": self._used_bytes,
            "unknown_paths": self._unknown,
            "paused": self._pause if self._paused() else full,
        }


def _shown(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "files": len(plan.files),
        "position": plan.position,
        "epoch": plan.epoch,
        "ahead": max(0, plan.ahead - plan.position),
    }

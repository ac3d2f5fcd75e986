"""Jobs over many files that a user names: warm, check, pin, unpin, evict.

A job is a list of paths, files or directories, and one action for each file below them. The list comes in pieces over the
control socket. The tasks that walk the tree are only a few files ahead of those that fetch, so a job over a million files
has few of them in memory. A job keeps no state on disk: it skips files that are cached whole, so a second run goes on
where the first one ended.

A job must not evict what it has fetched itself. It adds up the bytes of its files, and fails with one line before they
exceed the capacity of the cache. Jobs fetch with background priority, so readers overtake them.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, NamedTuple

import trio

from cachefs.base.errors import CachefsError, ConfigError, NoRoom, NotFound, ObjectChanged
from cachefs.base.names import ObjectId
from cachefs.base.tasks import contained
from cachefs.base.units import about_bytes
from cachefs.fetch import Fetcher
from cachefs.fs.tree_queries import TreeQueries
from cachefs.origin import Origin
from cachefs.store import Store
from cachefs.store.space import SPILL_ABOVE
from cachefs.store.tier import PAGE, allocated

log = logging.getLogger(__name__)

MOST_AT_ONCE = 1024
"""Files of one job in progress, whatever the command asks for. A bound: far more than an origin takes requests at once."""

LIST_BYTES = 256 << 20
"""Bytes of one job's list that may wait to be walked. Derived: five million paths of 50 bytes."""

INPUT_DEADLINE_S = 60.0
"""Longest wait for the next piece of a list, after which its client counts as dead. Derived: the client's own deadline."""

SLICE_BYTES = 256 << 20
"""Bytes of a large file that count as done together. Derived: at 1 GB/s the progress moves as often as the command asks."""

FAILURES_NAMED = 10
"""Failures of a job that the status names. A bound of the reply."""

FAILURES_IN_A_ROW = 200
"""A job gives up after so many failures in a row. A directory without permission usually has fewer files."""

ENDED_REMEMBERED = 32
"""Ended jobs whose status is kept."""

SHOWN = 4
"""Ended jobs that the status shows, because a job with --background reports its end only there."""

FAILURES_LOGGED = 3
"""Failures of a job that its line in the log names, so that it stays one line."""


class Wanted(NamedTuple):
    """Bytes [start, stop) of one file."""

    path: str
    origin: Origin
    object: ObjectId
    start: int
    stop: int


@dataclass
class Job:
    """One job. `files` and `bytes` count what the walk has found so far (all of it, once `walked` is set); the other numbers
    count the results. `silent` are nodes that do not answer, whose successors fetch their share. `error` says why the job
    gave up."""

    id: int
    action: str
    at_once: int
    vanish: bool
    cluster: bool = False
    state: str = "running"
    started: float = field(default_factory=time.time)
    ended: float = 0.0
    walked: bool = False
    files: int = 0
    bytes: int = 0
    done_files: int = 0
    done_bytes: int = 0
    cached_files: int = 0
    cached_bytes: int = 0
    fetched_bytes: int = 0
    elsewhere_bytes: int = 0
    silent: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    kept_files: int = 0
    vanished: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self.scope = trio.CancelScope()
        self.pieces: deque[str] = deque()
        self.items: deque[Any] = deque()
        self.waiting_bytes = 0
        self.complete = False
        self.more = trio.Event()
        self.failures_in_a_row = 0
        self.pinned = 0  # bytes of its files that are pinned
        self.own_bytes = 0  # the part of `bytes` that this node fetches

    def as_dict(self) -> dict[str, Any]:
        """For the control socket: plain values."""
        return {**asdict(self), "seconds": (self.ended or time.time()) - self.started}

    def summary(self) -> str:
        """How the job ended, in one line."""
        line = f"{self.state}, {self.done_files:,} of {self.files:,} files"
        line += f", {self.vanished:,} are not there any more" if self.vanished else ""
        if self.failed:
            more = ", …" if self.failed > FAILURES_LOGGED else ""
            line += f", {self.failed:,} failed: {'; '.join(self.failures[:FAILURES_LOGGED])}{more}"
        return line + (f": {self.error}" if self.error else "")

    def give_up(self, error: str) -> None:
        """End the job. `error` says why, in one line."""
        if not self.error:
            self.error = error
        self.scope.cancel()

    def fail(self, path: str, exc: CachefsError) -> None:
        """Count a file that failed; the others go on."""
        if self.vanish and isinstance(exc, NotFound):
            self.vanished += 1
            return
        self.failed += 1
        self.failures_in_a_row += 1
        if len(self.failures) < FAILURES_NAMED:
            self.failures.append(f"{path}: {exc}")
        if self.failures_in_a_row >= FAILURES_IN_A_ROW:
            self.give_up(f"{self.failures_in_a_row} files in a row failed, the last one with: {exc}")


class Jobs:
    """All jobs of a mount. `nursery` runs them. `at_once` is how many paths each looks up or lists at a time by default, and
    as many files are fetched at a time. `first` is the number of the first job."""

    def __init__(
        self,
        tree_queries: TreeQueries,
        fetcher: Fetcher,
        store: Store,
        nursery: trio.Nursery,
        at_once: int,
        first: int = 1,
    ) -> None:
        self._tree_queries = tree_queries
        self._fetcher = fetcher
        self._store = store
        self._nursery = nursery
        self._at_once = at_once
        self._numbers = count(first)
        self._jobs: OrderedDict[int, Job] = OrderedDict()
        self._actions: dict[str, Callable[[Job, Wanted], Awaitable[None]]] = {
            "warm": self._warm,
            "check": self._check,
            "pin": self._pin,
            "unpin": self._unpin,
            "evict": self._evict,
        }

    def status(self) -> list[dict[str, Any]]:
        """Jobs that run, and the last ones that have ended."""
        ended = [job.id for job in self._jobs.values() if job.state != "running"]
        old = set(ended[:-SHOWN])
        return [job.as_dict() for job in self._jobs.values() if job.id not in old]

    # -- verbs of the control socket -------------------------------------------------------------------------------------

    async def start(
        self, action: str = "warm", at_once: int = 0, vanish: bool = False, cluster: bool = False
    ) -> int:
        """Begin a job without paths. Returns its number. With `vanish`, missing paths are no failures. With `cluster`, other
        nodes are asked to fetch their shares."""
        if action not in self._actions:
            raise ConfigError(f"no such job: {action!r}: there are {', '.join(self._actions)}")
        job = Job(next(self._numbers), action, min(at_once, MOST_AT_ONCE) or self._at_once, vanish, cluster)
        self._jobs[job.id] = job
        ended = [old for old in self._jobs.values() if old.state != "running"]
        for old in ended[: max(0, len(ended) - ENDED_REMEMBERED)]:
            del self._jobs[old.id]
        contained(self._nursery, f"job {job.id}", self._run, job)
        return job.id

    async def add(self, job: int, items: list[Any], complete: bool = False) -> str:
        """Add paths, relative to the mount, or [path, offset, length] for a part of a file. With `complete` these are the
        last. Returns the job's state; a job that has ended takes no more."""
        found = self._find(job)
        if found.state != "running":
            return found.state
        text = json.dumps(items)
        if found.waiting_bytes + len(text) > LIST_BYTES:
            found.give_up("the list is too long: give the directories of these files, or several lists")
            raise ConfigError(found.error)
        found.waiting_bytes += len(text)
        found.pieces.append(text)
        found.complete = found.complete or complete
        found.more.set()
        return found.state

    async def status_of(self, job: int) -> dict[str, Any]:
        return self._find(job).as_dict()

    async def stop(self, job: int | None = None) -> int:
        """Stop one job, or all. Returns how many were running."""
        running = [j for j in self._jobs.values() if j.state == "running" and job in (None, j.id)]
        for one in running:
            one.scope.cancel()
        return len(running)

    def _find(self, number: int) -> Job:
        try:
            return self._jobs[number]
        except KeyError:
            raise NotFound(
                f"no job {number} any more, as after a restart of the daemon: run the command again"
            ) from None

    # -- running -----------------------------------------------------------------------------------

    async def _run(self, job: Job) -> None:
        done = False
        try:
            with job.scope:
                if job.action == "warm":
                    job.silent = await self._fetcher.probe()
                async with trio.open_nursery() as nursery:
                    send, receive = trio.open_memory_channel[Wanted](job.at_once)
                    nursery.start_soon(self._walk_all, job, send)
                    for _ in range(job.at_once):
                        nursery.start_soon(self._work, job, receive)
                done = True
        except Exception as exc:
            log.exception("job %d (%s) failed", job.id, job.action)
            job.error = f"internal error ({type(exc).__name__}): the log has more"
        if job.action in ("pin", "unpin"):
            await self._store.flush()  # a pin must survive a kill once it is reported
        if job.action == "pin" and job.error and job.done_files:
            job.error += f"; {job.done_files:,} files of them are pinned (cachefs unpin lets them go)"
        job.state = "failed" if job.error else "done" if done else "stopped"
        job.ended = time.time()
        job.pieces.clear()
        job.items.clear()
        level = logging.WARNING if job.error or job.failed else logging.INFO
        log.log(level, "job %d (%s): %s", job.id, job.action, job.summary())

    async def _walk_all(self, job: Job, send: trio.MemorySendChannel[Wanted]) -> None:
        async with send, trio.open_nursery() as nursery:
            for _ in range(job.at_once):
                nursery.start_soon(self._walk, job, send)
        job.walked = True

    async def _walk(self, job: Job, send: trio.MemorySendChannel[Wanted]) -> None:
        while (item := await self._next_item(job)) is not None:
            path, offset, length = item if isinstance(item, list) else (item, 0, None)
            try:
                async with aclosing(self._tree_queries.walk(path)) as files:
                    async for found, origin, obj in files:
                        stop = obj.size if length is None else min(obj.size, offset + length)
                        wanted = Wanted(found, origin, obj, min(offset, stop), stop)
                        self._count(job, wanted)
                        await send.send(wanted)
                if job.action == "unpin" and not path:
                    # The walk does not meet pinned versions that were replaced or removed.
                    await self._store.flush()
                    await self._store.pins.unpin_all()
            except CachefsError as exc:
                job.fail(path, exc)

    def _count(self, job: Job, wanted: Wanted) -> None:
        """Count what the job has to do, and end the job if it is too much."""
        obj = wanted.object
        job.files += 1
        job.bytes += wanted.stop - wanted.start
        job.own_bytes += self._own_bytes(job, wanted)
        cached = self._store.peek(obj)
        if self._store.whole(cached) and cached.pinned:
            job.pinned += allocated(obj.size)
        if job.action in ("warm", "pin"):
            self._check_capacity(job)
        if job.action == "pin":
            self._check_pin_budget(job)

    async def _next_item(self, job: Job) -> Any:
        while not job.items:
            if job.pieces:
                piece = job.pieces.popleft()
                job.waiting_bytes -= len(piece)
                job.items.extend(json.loads(piece))
            elif job.complete:
                return None
            else:
                job.more = trio.Event() if job.more.is_set() else job.more
                with trio.move_on_after(INPUT_DEADLINE_S) as scope:
                    await job.more.wait()
                if scope.cancelled_caught:
                    job.give_up("the client that began this job has sent no more of its list")
        return job.items.popleft()

    def _check_capacity(self, job: Job) -> None:
        left = self._capacity() - max(0, self._store.pinned_bytes - job.pinned)
        if job.own_bytes + job.files * (PAGE // 2) > left:
            job.give_up(
                f"{job.files:,} files of {about_bytes(job.own_bytes)} so far do not fit: the cache holds "
                f"{about_bytes(left)}; give fewer, or mount with a larger --cache-size"
            )

    def _check_pin_budget(self, job: Job) -> None:
        """End the job before it fetches more than the pin budget has left."""
        budget, others = self._store.pins.budget_bytes, max(0, self._store.pinned_bytes - job.pinned)
        if job.own_bytes + others > budget:
            in_use = f", of which {about_bytes(others)} are in use" if others else ""
            job.give_up(
                f"{job.files:,} files of {about_bytes(job.own_bytes)} so far cannot be pinned: all pins together may "
                f"take {about_bytes(budget)}{in_use}; give fewer, end all pins with cachefs unpin MOUNTPOINT, or mount "
                "with a larger --pin-budget"
            )

    def _own_bytes(self, job: Job, wanted: Wanted) -> int:
        """The bytes of a file that this node fetches: with peers, each node fetches its share."""
        if job.action == "pin":
            return wanted.stop - wanted.start
        pieces = self._fetcher.kept_here(wanted.object, wanted.start, wanted.stop)
        return sum(stop - start for start, stop, kept in pieces if kept)

    def _capacity(self) -> int:
        """Bytes that a job may fetch before it evicts its own: the last tier, and what stays above it after spilling."""
        limits = [tier.limit_bytes() for tier in self._store.tiers]
        return int(sum(limits[:-1]) * SPILL_ABOVE) + sum(limits[-1:])

    async def _work(self, job: Job, receive: trio.MemoryReceiveChannel[Wanted]) -> None:
        async for wanted in receive:
            try:
                await self._act(job, wanted)
            except NoRoom as exc:
                job.give_up(f"{exc}" if job.action == "pin" else f"{exc} ({job.done_files:,} files are done)")
            except CachefsError as exc:
                job.fail(wanted.path, exc)
            else:
                job.failures_in_a_row = 0
                job.done_files += 1
            await trio.lowlevel.checkpoint()

    async def _act(self, job: Job, wanted: Wanted) -> None:
        """Do the job's action for a file, or for its present version if the origin has not the listed one any more."""
        act = self._actions[job.action]
        try:
            await act(job, wanted)
        except (NotFound, ObjectChanged):
            old, found = wanted.object, await self._tree_queries.look_again(wanted.path, wanted.object)
            if found is None or found[1] == old:
                raise
            origin, obj = found
            stop = obj.size if wanted.stop == old.size else min(wanted.stop, obj.size)
            job.files -= 1
            job.bytes -= wanted.stop - wanted.start
            job.own_bytes -= self._own_bytes(job, wanted)
            wanted = Wanted(wanted.path, origin, obj, min(wanted.start, stop), stop)
            self._count(job, wanted)
            await act(job, wanted)

    # -- actions -----------------------------------------------------------------------------------

    async def _warm(self, job: Job, wanted: Wanted) -> None:
        whole, length = self._fetcher.whole(wanted.object), wanted.stop - wanted.start
        if whole:
            # Used now, so that this job does not evict it for what it fetches.
            self._store.renew(self._store.object(wanted.object))
        if job.cluster and job.action == "warm":

            async def fetch_here(start: int, stop: int) -> None:
                await self._fetch(job, wanted, start, stop)

            elsewhere = await self._fetcher.prefetch_everywhere(
                wanted.object, wanted.start, wanted.stop, fetch_here
            )
            job.elsewhere_bytes += elsewhere
            job.done_bytes += elsewhere
            return
        if whole:
            job.cached_files += 1
            job.cached_bytes += length
            job.done_bytes += length
            return
        for start, stop, kept in self._fetcher.kept_here(wanted.object, wanted.start, wanted.stop):
            if kept or job.action == "pin":
                await self._fetch(job, wanted, start, stop)
            else:
                job.elsewhere_bytes += stop - start
                job.done_bytes += stop - start

    async def _fetch(self, job: Job, wanted: Wanted, begin: int, end: int) -> None:
        for start in range(begin, end, SLICE_BYTES):
            stop = min(end, start + SLICE_BYTES)
            fetched = await self._fetcher.prefetch(
                wanted.origin, wanted.object, start, stop, prefetched=False, as_own=True
            )
            job.fetched_bytes += fetched  # `+= await …` would lose what other tasks add meanwhile
            job.done_bytes += stop - start

    async def _check(self, job: Job, wanted: Wanted) -> None:
        cached = self._fetcher.cached_bytes(wanted.object)
        job.cached_files += cached == wanted.object.size
        job.cached_bytes += cached
        job.done_bytes += wanted.object.size

    async def _pin(self, job: Job, wanted: Wanted) -> None:
        self._store.pins.check(self._store.object(wanted.object))  # refuse it before it is fetched
        await self._warm(job, wanted)
        obj = self._store.object(wanted.object)
        was_pinned = obj.pinned
        self._store.pin(obj)
        job.pinned += 0 if was_pinned else allocated(wanted.object.size)

    async def _unpin(self, job: Job, wanted: Wanted) -> None:
        self._store.unpin(self._store.object(wanted.object))
        job.done_bytes += wanted.object.size

    async def _evict(self, job: Job, wanted: Wanted) -> None:
        job.freed_bytes += self._store.evict(self._store.object(wanted.object))
        job.kept_files += self._fetcher.cached_bytes(wanted.object) > 0
        job.done_bytes += wanted.object.size

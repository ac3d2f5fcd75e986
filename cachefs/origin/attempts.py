"""Requests to one origin: everything around an attempt that is the same for all vendors.

A client makes one attempt, in a worker thread if it blocks. Here it gets a slot of the gate, repetition with growing waits,
resumption of a body at the byte where it broke, the deadline, the limits on bytes a second, and counting. Only the trio task
changes counters and the limiter.

A thread that hangs inside a vendor's library is abandoned at the deadline or on cancellation. It may wake up much later. By
then its transfer is closed: the thread ends at its next chunk, and neither calls the sink nor reads the source."""

from __future__ import annotations

import errno
import logging
import math
import random
import re
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import trio

from cachefs.base.errors import (
    CachefsError,
    Conflict,
    NoSuchUpload,
    NotFound,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    Throttled,
    Transient,
    Unreachable,
    Unsupported,
)
from cachefs.base.ledger import Account, current_call
from cachefs.base.metrics import Metrics
from cachefs.base.names import ERRORS, OnOutage
from cachefs.base.tasks import Stoppable, in_thread, in_thread_at_last
from cachefs.origin.protocol import (
    AskedToWait,
    BlockingCall,
    ByteRange,
    Client,
    ConnectionEnded,
    InMemory,
    Sink,
    Source,
    Writer,
    blocking_call,
)

log = logging.getLogger(__name__)

# -- which requests may be in flight ---------------------------------------------------------------

WINDOW_S = 2.0
"""Length of the window in which the bytes that arrive under a limit are measured. Simulated with small files whose rate
varies by four fifths: a window of one second reports falls that did not happen, and one of two seconds does not."""

CLEARLY_MORE = 1.15
"""A lower limit is better if it brings more than so many times the bytes of the higher one. It is then kept or tried at
once, and the higher one is not kept. Derived: halfway between a steady store, which delivers the same at both, and requests
that hinder each other, of which three quarters bring a third more."""

PATIENCE = 4
MOST_PATIENCE = 64
"""Windows between two trials: `PATIENCE` at first, doubled by each trial that finds no better limit. Derived: then at most
every 64th window runs at three quarters of the limit, which costs a store that could take more 0.4 %."""

THROTTLED, FALLING = "throttled", "falling throughput"


class Measured(NamedTuple):
    """The bytes a second that arrived in a window under this limit."""

    limit: int
    rate: float


@dataclass(slots=True)
class Concurrency:
    """How many requests may be in flight: `limit`, between 1 and `maximum`. Pure; times are seconds of any steady clock.

    There are two signs of too many requests. The origin refuses (503, 429): the limit is halved at once, and a window of
    successes raises it by one (AIMD, as in TCP). Or more requests bring fewer bytes: while the gate is full, one window is
    measured at three quarters of the limit from time to time, and the lower limit is kept only if clearly more bytes arrive.
    From there higher limits are tried again, in steps of an eighth."""

    maximum: int
    limit: int = field(init=False)
    _ceiling: int = field(init=False)  # successes raise the limit up to here
    _successes: int = 0
    _cut_at: float = float("-inf")
    # The window being measured. It begins after as many transfers as the limit have ended under it.
    _until_window: int = 0  # transfers that must still end
    _since: float | None = None
    _bytes: int = 0
    _requests: int = 0
    _full: bool = True
    _before_trial: Measured | None = None  # None while no trial is under way
    _lower: Measured | None = None  # the last trial of a lower limit
    _windows: int = 0  # measured since the last trial
    _patience: int = PATIENCE
    _next_is_lower: bool = True  # the next trial is of a lower limit

    def __post_init__(self) -> None:
        self.limit = self._ceiling = self.maximum

    @property
    def reason(self) -> str:
        """`THROTTLED` or `FALLING` while the limit is below its maximum for that reason, else ""."""
        if self._before_trial is not None:
            return FALLING if self._before_trial.limit < self.maximum else ""
        if self.limit < self._ceiling:
            return THROTTLED
        return FALLING if self._ceiling < self.maximum else ""

    def admits(self, in_flight: int, background: bool) -> bool:
        """True if one more request may start. Background requests leave an eighth of the slots free (guessed), so that a
        reader need not wait until a prefetched range is complete."""
        reserve = self.limit // 8 if background else 0
        return in_flight < self.limit - reserve

    # Replies.

    def succeeded(self) -> None:
        """A request was answered. After as many as the limit, the limit grows by one."""
        if self.limit >= self._ceiling:
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self.limit += 1
            self._measure_again()

    def throttled(self, sent_at: float, now: float) -> None:
        """A request sent at `sent_at` was refused. Requests that were in flight at the last cut tell nothing about the new
        limit, so only a later one cuts again: once per window, whatever the round trip."""
        if sent_at < self._cut_at:
            return
        self._go_back()
        self.limit = max(1, self.limit // 2)
        self._successes = 0
        self._cut_at = now
        self._measure_again()

    # Bytes.

    def arrived(self, count: int) -> None:
        self._bytes += count

    def finished(self, full: bool, now: float) -> None:
        """A transfer ended, with success or not. `full`: other requests wait for its slot."""
        if self._until_window > 0:
            self._until_window -= 1
            return
        if self._since is None:
            self._since, self._bytes, self._requests, self._full = now, 0, 0, True
            return
        self._requests += 1
        self._full = self._full and full
        elapsed = now - self._since
        if elapsed < WINDOW_S or self._requests < self.limit:
            return
        if not self._full or not self._bytes:
            self._go_back()
        elif self.limit >= self._ceiling:
            self._window_ended(self._bytes / elapsed)
        self._since = None

    def _window_ended(self, rate: float) -> None:
        """Note the rate of a window in which the gate was full: end the trial that it belongs to, or perhaps begin one."""
        before = self._before_trial
        if before is None:
            self._windows += 1
            known = self._lower
            fell = known is not None and known.limit < self.limit and rate * CLEARLY_MORE < known.rate
            if fell or self._windows > self._patience:
                lower = self._next_is_lower or fell or self.limit == self.maximum
                self._begin_trial(rate, lower=lower and self.limit > 1)
            return
        lower = self.limit < before.limit
        if lower:
            self._lower = Measured(self.limit, rate)
            better = rate > before.rate * CLEARLY_MORE
        else:
            better = rate * CLEARLY_MORE >= before.rate
        if better:
            self._before_trial = None
            self._patience = 1  # a good direction: try further
        else:
            self._go_back()
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._next_is_lower = not lower
        self._windows = 0

    def _begin_trial(self, rate: float, *, lower: bool) -> None:
        """Measure the next window at another limit."""
        target = self.limit * 3 // 4 if lower else min(self.maximum, self.limit + max(1, self.limit // 8))
        if target not in (0, self.limit):
            self._before_trial = Measured(self.limit, rate)
            self._move(target)

    def _go_back(self) -> None:
        """End a trial, if one is under way, and go back to the limit before it."""
        if self._before_trial is not None:
            before, self._before_trial = self._before_trial, None
            self._move(before.limit)

    def _move(self, limit: int) -> None:
        self.limit = self._ceiling = limit
        self._measure_again()

    def _measure_again(self) -> None:
        self._until_window, self._since = self.limit, None


# -- the order of requests -------------------------------------------------------------------------
#
# Demand (a reader waits) goes before background (prefetching), in two queues: the gate's, before a request is sent, and the
# download limit's, while its bytes arrive.

OVERTAKEN_AT_MOST = 4
"""Demand requests that may go before a waiting background request. Guessed: readahead keeps a fifth of a busy store."""


class Ticket:
    """The priority class of a request in both queues. `thread` is the id of the thread whose read waits for it, or 0."""

    __slots__ = ("background", "queue", "thread")

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self.thread = 0
        self.queue: WaitQueue | None = None

    def promote(self) -> None:
        """Make it demand, behind the demands that wait already."""
        if self.background:
            self.background = False
            if self.queue is not None:
                self.queue.promoted(self)


class WaitQueue:
    """A wait queue of two classes, first come first served within each. It has no deadline: callers set their own."""

    def __init__(self, on_promoted: Callable[[], None] = lambda: None) -> None:
        self.demand: OrderedDict[Ticket, trio.lowlevel.Task] = OrderedDict()
        self.background: OrderedDict[Ticket, trio.lowlevel.Task] = OrderedDict()
        self._on_promoted = on_promoted
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self.demand) + len(self.background)

    async def wait(self, ticket: Ticket) -> None:
        """Return once `call` has chosen this ticket. A ticket is either called or cancelled, never both, even before its
        task runs again: the caller of `call` relies on that."""

        def leave(_: object) -> trio.lowlevel.Abort:
            ticket.queue = None
            (self.background if ticket.background else self.demand).pop(ticket)
            return trio.lowlevel.Abort.SUCCEEDED

        (self.background if ticket.background else self.demand)[ticket] = trio.lowlevel.current_task()
        ticket.queue = self
        await trio.lowlevel.wait_task_rescheduled(leave)

    def promoted(self, ticket: Ticket) -> None:
        self.demand[ticket] = self.background.pop(ticket)
        self._on_promoted()

    @property
    def starved(self) -> bool:
        """True if a background request waits and enough demands overtook it."""
        return bool(self.background) and self._overtaken >= OVERTAKEN_AT_MOST

    def call(self) -> Ticket:
        """Wake and return the next ticket, which there must be: background if it is starved or no demand waits."""
        background = self.starved or not self.demand
        ticket, task = (self.background if background else self.demand).popitem(last=False)
        self._overtaken = 0 if background else self._overtaken + 1
        ticket.queue = None  # it waits no longer, so a later promotion must not move it
        trio.lowlevel.reschedule(task)
        return ticket


class Gate:
    """The admission gate: requests wait here for one of `Concurrency`'s slots."""

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self.queue = WaitQueue(on_promoted=self._admit)
        self._inside: set[Ticket] = set()

    @property
    def in_flight(self) -> int:
        return len(self._inside)

    @property
    def background_in_flight(self) -> int:
        return sum(ticket.background for ticket in self._inside)

    async def enter(self, ticket: Ticket) -> None:
        """Return with a slot, which the caller releases with `leave`."""
        if not self.enters(ticket):
            await self.queue.wait(ticket)

    def enters(self, ticket: Ticket) -> bool:
        """Take a slot, if one is free and no waiting request goes first. False if not."""
        overtaken = self.queue.demand or (ticket.background and self.queue.background)
        if overtaken or not self.concurrency.admits(len(self._inside), ticket.background):
            return False
        self._inside.add(ticket)
        return True

    def leave(self, ticket: Ticket) -> None:
        """Release a slot, and admit waiting requests (several, when the limit has grown)."""
        self._inside.remove(ticket)
        if self.queue.demand or self.queue.background:
            self._admit()

    def _admit(self) -> None:
        queue, concurrency = self.queue, self.concurrency
        while (queue.demand or queue.background) and concurrency.admits(len(self._inside), background=False):
            first = queue.demand or queue.starved  # it goes even into a slot that is kept free for demand
            if not first and not concurrency.admits(len(self._inside), background=True):
                return
            self._inside.add(queue.call())


# -- bytes a second: limits and measurements -------------------------------------------------------


class RateLimit:
    """A limit on bytes a second that transfers share. A transfer takes a chunk at once and then waits until the limit allows
    it, so no chunk is split. The others wait in a queue meanwhile, demand before background, each with one chunk."""

    BURST_S = 0.1
    """Seconds of unused rate that a later chunk may use up. Guessed: enough to hide late wake-ups, too short to be seen."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        # When the limit will have allowed all bytes taken so far; None before the first.
        self._free_at: float | None = None
        self._queue = WaitQueue()
        self._busy = False

    def take(self, count: int, now: float) -> float:
        """Take `count` bytes at time `now`. Returns the seconds to wait before using them."""
        start = now if self._free_at is None else max(self._free_at, now - self.BURST_S)
        self._free_at = start + count / self.bytes_per_s
        return max(0.0, self._free_at - now)

    async def pay(self, count: int, ticket: Ticket) -> None:
        """Return when `count` bytes may be transferred."""
        if self._busy:
            await self._queue.wait(ticket)
        self._busy = True
        try:
            await trio.sleep(self.take(count, trio.current_time()))
        finally:
            if len(self._queue):
                self._queue.call()
            else:
                self._busy = False


class TransferRate:
    """A moving average of the bytes a second of single transfers; 0 before the first. Transfers below `LEAST_BYTES` are
    left out, because they measure the latency of a reply. Pure."""

    LEAST_BYTES = 256 << 10
    """Guessed: at 10 MB/s they take as long as a usual store's first byte, about 25 ms."""

    WEIGHT = 0.2
    """Weight of the newest transfer. Guessed: an average of about the last ten."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def add(self, count: int, seconds: float) -> None:
        if count >= self.LEAST_BYTES:
            rate = count / max(seconds, 1e-3)
            self.bytes_per_s += (rate - self.bytes_per_s) * (self.WEIGHT if self.bytes_per_s else 1.0)


class Throughput:
    """Bytes a second over the last seconds. Pure: the clock is passed in."""

    SECONDS = 5
    """Length of the window. Guessed: current, and longer than the second between two reports of a transfer."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()

    def add(self, count: int, now: float) -> None:
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1] = second, self._seconds[-1][1] + count
            return
        self._seconds.append((second, count))
        self.rate(now)

    def rate(self, now: float) -> float:
        while self._seconds and self._seconds[0][0] <= int(now) - self.SECONDS:
            self._seconds.popleft()
        return sum(count for _, count in self._seconds) / self.SECONDS


# -- attempts --------------------------------------------------------------------------------------

T = TypeVar("T")
E = TypeVar("E", bound=CachefsError)

READS = ("origin_get", "origin_head", "origin_list")
"""Counters of requests that are not sent while the origin is out. Writes are: their caller decides how long to try."""

REFUSALS = (Conflict, NoSuchUpload, NotFound, ObjectChanged, PermissionDenied, Unsupported)
"""Errors that concern one request: they are no sign of too many requests."""

Ended = Callable[[Exception | None], None]
"""Called at the end of a read without a task, with its error or None. Never raises."""


class FailedAttempt(NamedTuple):
    """How an attempt ended, and when it began by `time.monotonic`."""

    error: CachefsError
    began: float


SENT_AT_ONCE = 256 << 10
"""The largest body that the trio thread sends by itself. Derived: its digest takes 0.2 ms, as does a worker thread."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts, doubling from `first_s` up to `longest_s`. Jitter shortens each to between half and all of
    it, so that requests of a node that were refused together are not repeated together. `retries` bounds failures without
    progress; throttling is none. Borrowed: the usual figures of S3 clients."""

    retries: int = 5
    first_s: float = 0.2
    longest_s: float = 10.0

    def wait_s(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after the `failures`-th failure in a row (1 is the first)."""
        ceiling = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 32))
        return ceiling * rng.uniform(0.5, 1.0)


DEFAULT = Backoff()


@dataclass(slots=True)
class _Tries:
    """The attempts of one request. `failures` and `refusals` (throttling) count since the last progress."""

    retries: int
    failures: int = 0
    refusals: int = 0
    renewed: bool = False  # the credentials were renewed for this request
    last: str = "the origin did not answer"

    def failed(self, exc: Transient, gained: bool) -> None:
        """Record a failed attempt. `gained`: it brought bytes that the next one need not repeat."""
        self.last = str(exc)
        if gained:
            self.failures = self.refusals = 0
        if isinstance(exc, Throttled):
            self.refusals += 1
        else:
            self.failures += 1

    def wait_s(self, exc: Transient, backoff: Backoff, rng: random.Random) -> float:
        """Seconds to wait before the next attempt."""
        if isinstance(exc, ConnectionEnded):
            return 0.0
        wait_s = backoff.wait_s(self.failures + self.refusals, rng)
        return max(wait_s, exc.seconds) if isinstance(exc, AskedToWait) else wait_s


class Attempts:
    """The requests of one origin. All methods raise only `cachefs.base.errors`."""

    def __init__(
        self,
        client: Client,
        *,
        source: str,
        prefix: str = "",
        concurrency: int = 64,
        download_limit: int = 0,
        upload_limit: int = 0,
        deadline_s: float = 60.0,
        on_outage: OnOutage = ERRORS,
        metrics: Metrics,
        backoff: Backoff = DEFAULT,
    ) -> None:
        self.client = client
        # A client reads by `fetch` (and perhaps `begin_fetch`), or by `read`.
        self._fetch: Callable[..., Awaitable[None]] | None = getattr(client, "fetch", None)
        self._begin: Callable[..., Callable[[], None] | None] | None = getattr(client, "begin_fetch", None)
        if self._begin is not None and deadline_s < getattr(client, "patience_s", math.inf):
            self._begin = None  # only the client's own timeout, which is longer, would end it
        self._read: Callable[..., Generator[memoryview | bytes, None, None]] | None
        self._read = getattr(client, "read", None)
        self.source = source
        self.prefix = prefix
        self.label = re.split("@(?=https?://)", source)[0]  # as the user wrote it, for messages
        self.deadline_s = deadline_s
        self.backoff = backoff
        self.metrics = metrics
        self.gate = Gate(Concurrency(concurrency))
        # The gate bounds requests in flight. This bounds threads, including abandoned ones, which end at the vendor's own
        # read timeout: a few times the concurrency suffice (guessed).
        self.threads = trio.CapacityLimiter(4 * concurrency + 4)
        self.transfer_rate = TransferRate()
        # A client that has no small LIST has another small request.
        probe = getattr(client, "probe", lambda: client.list_page(prefix, None, 1))
        self.breaker = Breaker(self.label, probe, on_outage, deadline_s, metrics)
        self._rng = random.Random()
        self.set_rate_limits(download=download_limit, upload=upload_limit)
        self._download, self._upload = Throughput(), Throughput()
        self._last_error = ""

    def set_rate_limits(self, *, download: int, upload: int) -> None:
        """Bound the bytes a second of transfers that begin from now on; 0 is no limit."""
        self.download_limit = RateLimit(download) if download else None
        self.upload_limit = RateLimit(upload) if upload else None

    @property
    def writer(self) -> Writer:
        """The client's writer. Raises `Unsupported` if the client cannot write."""
        found = self.client.writer
        if found is None:
            raise Unsupported(f"{self.label}: this origin can only be read")
        return found

    def name(self, key: str) -> str:
        """The key below the origin's URL, for messages."""
        return f"{self.label}/{key}"

    def status(self) -> dict[str, Any]:
        """For `cachefs status`. `limited_by` tells why `concurrency` is below its maximum; rates are in bytes a second."""
        gate, now = self.gate, time.monotonic()
        return {
            "concurrency": gate.concurrency.limit,
            "concurrency_max": gate.concurrency.maximum,
            "in_flight": gate.in_flight,
            "background_in_flight": gate.background_in_flight,
            "demand_waiting": len(gate.queue.demand),
            "background_waiting": len(gate.queue.background),
            "limited_by": gate.concurrency.reason,
            "download_limit": self.download_limit.bytes_per_s if self.download_limit else 0,
            "upload_limit": self.upload_limit.bytes_per_s if self.upload_limit else 0,
            "throughput": round(self._download.rate(now)),
            "upload_throughput": round(self._upload.rate(now)),
            "last_error": self._last_error,
        }

    def close(self) -> None:
        self.breaker.close()
        self.client.close()

    @cached_property
    def _now(self) -> Callable[[], float]:
        """`trio.current_time`, which takes three more calls to find its clock."""
        return trio.lowlevel.current_clock().current_time

    @cached_property
    def token(self) -> trio.lowlevel.TrioToken:
        return trio.lowlevel.current_trio_token()

    def begin(
        self, wanted: ByteRange, sink: Sink, ended: Ended, *, ticket: Ticket
    ) -> Callable[[], None] | None:
        """Begin one attempt of `read`, without a task that waits for it. At the end `ended` is called on the trio thread
        with the error or None; `sink` is not called after that. Returns a function that ends the attempt early, with an
        error. Returns None, and begins nothing, if the attempt would have to wait: for a slot of the gate, a disk, a limit
        on bytes a second, credentials, or an origin that is out."""
        transfer = Receiving(self, ticket, wanted.start, wanted.stop, sink)
        cancel: Callable[[], None] | None = None
        if self._begin is None or transfer.waits or self.breaker.is_out or not self.gate.enters(ticket):
            return None
        since = self._now()

        def over(error: Exception | None) -> None:
            self.breaker.attempt_ended(cancel)
            error = transfer.failure(error)
            transfer.shut()
            self._attempt_ended("origin_get", ticket, transfer, since, error)
            ended(transfer.sink_error or error)

        try:
            cancel = self._begin(wanted, transfer, over)
        except Exception:
            cancel = None  # `read` will meet the same error and raise it
        if cancel is None:
            self.gate.leave(ticket)
            return None
        self._count_request("origin_get", wanted.key, ticket, transfer)
        self.breaker.attempt_began(cancel, since)
        return cancel

    async def read(
        self,
        key: str,
        etag: str,
        start: int,
        stop: int,
        sink: Sink,
        *,
        whole: bool = False,
        ticket: Ticket | None = None,
        failed_attempt: FailedAttempt | None = None,
    ) -> None:
        """Deliver exactly bytes [start, stop) of the version `etag` to `sink.write`, in order, from a worker thread.
        `whole`: the range is the whole object. `ticket` is the request's priority ticket, which may be promoted meanwhile
        (default: demand). `failed_attempt` was made by `begin`; this read repeats it, and counts it.

        Once this has returned or raised, `sink` is not and will not be called. An exception of the sink is raised unchanged.
        The deadline counts from the last byte that arrived: it ends a read from a silent store, not from a slow one."""
        ticket = ticket or Ticket()
        fetch, read = self._fetch, self._read
        transfer = Receiving(self, ticket, start, stop, sink)

        def rest() -> Receiving:
            nonlocal transfer
            transfer = Receiving(self, ticket, transfer.position, stop, sink)
            return transfer

        async def attempt() -> None:
            at = transfer.position
            wanted = ByteRange(key, etag, at, stop, whole and at == start)
            error: Exception | None = None
            try:
                if fetch is not None:
                    await fetch(wanted, transfer)
                elif read is not None:
                    await self.in_thread(lambda: transfer.drain(read(*wanted)))
            except Transient as exc:
                error = exc
            if (error := transfer.failure(error)) is not None:
                raise error

        if start < stop:
            action = f"reading {self.name(key)}"
            await self.repeat(
                attempt,
                action,
                "origin_get",
                key,
                ticket=ticket,
                transfer=rest,
                failed_attempt=failed_attempt,
            )
        if transfer.sink_error is not None:
            raise transfer.sink_error

    async def send(
        self,
        request: Callable[[Sending], T],
        source: Source,
        size: int,
        action: str,
        counter: str,
        key: str,
        ticket: Ticket | None = None,
        *,
        without_thread: Callable[[Sending], Awaitable[T | None]] | None = None,
    ) -> T:
        """The result of `request`, which sends the first `size` bytes of `source`. Arguments as for `call`;
        `without_thread` is for a small `source` in memory. An error of `source` is raised unchanged."""
        ticket = ticket or Ticket()
        body: Sending
        in_memory = self.upload_limit is None and size <= SENT_AT_ONCE
        in_memory = in_memory and isinstance(source, InMemory) and size <= len(source.data)

        def whole() -> Sending:
            nonlocal body
            body = Sending(self, ticket, source, size)
            return body

        async def attempt() -> T | None:
            found = await without_thread(body) if in_memory and without_thread is not None else None
            if found is not None:
                return found
            try:
                return await self.in_thread(lambda: request(body))
            except Exception:
                if body.source_error is None:
                    raise
                return None  # what a library raises then is only the consequence

        result = await self.repeat(attempt, action, counter, key, ticket=ticket, transfer=whole)
        if body.source_error is not None:
            raise body.source_error
        assert result is not None
        return result

    async def call(
        self,
        attempt: Callable[[], T],
        action: str,
        counter: str,
        key: str,
        *,
        retries: int | None = None,
        patience: int = 1,
        without_thread: Callable[[], Awaitable[T | None]] | None = None,
    ) -> T:
        """As `repeat`, for an `attempt` that blocks. `without_thread` makes the same request without a worker thread, or
        returns None, and `attempt` has to make it."""

        async def once() -> T:
            found = await without_thread() if without_thread is not None else None
            return await self.in_thread(attempt) if found is None else found

        return await self.repeat(once, action, counter, key, retries=retries, patience=patience)

    async def repeat(
        self,
        attempt: Callable[[], Awaitable[T]],
        action: str,
        counter: str,
        key: str,
        *,
        ticket: Ticket | None = None,
        transfer: Callable[[], Transfer] | None = None,
        retries: int | None = None,
        patience: int = 1,
        failed_attempt: FailedAttempt | None = None,
    ) -> T:
        """Repeat `attempt` until it succeeds, fails for good, or the deadline (times `patience`) has passed. Each attempt is
        counted under the metric `counter`, for the dataset of `key`. `action` begins error messages. `transfer` makes the
        transfer of the next attempt: each has its own, because the thread of an abandoned one may wake up later. Raises
        `Unreachable` if the origin is out and the request is not sent, or has waited for the origin in vain.
        `failed_attempt`: a first attempt was made already, and is handled as the first one made here."""
        ticket = ticket or Ticket()
        tries = _Tries(self.backoff.retries if retries is None else retries)
        deadline_s = self.deadline_s * patience
        breaker, waits_until = self.breaker, 0.0
        not_sent_if_out = counter in READS or breaker.on_outage.wait_s > 0
        spent_s = time.monotonic() - failed_attempt.began if failed_attempt is not None else 0.0
        with trio.move_on_after(max(0.0, deadline_s - spent_s)) as scope:
            while True:
                if not_sent_if_out and breaker.is_out:
                    # The deadline does not run until the origin answers again. Then it and the count of failures begin anew.
                    waits_until = waits_until or trio.current_time() + breaker.on_outage.wait_s
                    scope.deadline = math.inf
                    await breaker.admit(action, waits_until)
                    scope.deadline = trio.current_time() + deadline_s
                    tries.failures = tries.refusals = 0
                moving = None if transfer is None or failed_attempt is not None else transfer()
                if moving is not None:
                    moving.scope = scope
                # An outage does not interrupt a body that is being sent, because it may have arrived. The client's timeout
                # ends it.
                interruptible = not_sent_if_out and not isinstance(moving, Sending)
                since = time.monotonic()
                try:
                    if failed_attempt is not None:
                        (error, since), failed_attempt = failed_attempt, None
                        raise error  # to the handlers below
                    with breaker.interruptible() if interruptible else nullcontext():
                        return await self._once(attempt, counter, key, ticket, moving, patience)
                    # Only an outage that has interrupted the attempt leads here.
                    if isinstance(moving, Receiving) and moving.gained:
                        waits_until = 0.0
                        if moving.complete:
                            return None  # a read: its last byte came before the silence
                    continue
                except PermissionDenied as exc:
                    if tries.renewed or not await in_thread_at_last(
                        partial(self.client.renew, since), limiter=self.threads
                    ):
                        raise self._failed(exc) from exc.__cause__
                    tries.renewed, wait_s = True, 0.0
                except Transient as exc:
                    gained = moving is not None and moving.gained
                    tries.failed(exc, gained)
                    if gained:
                        waits_until, scope.deadline = 0.0, trio.current_time() + deadline_s
                    if not isinstance(exc, Throttled):
                        breaker.failed(exc)
                    if not_sent_if_out and breaker.is_out:
                        continue
                    if tries.failures > tries.retries:
                        gave_up = f"{action}: gave up after {tries.failures} attempts: {tries.last}"
                        raise self._failed(OriginFailed(gave_up)) from exc
                    wait_s = tries.wait_s(exc, self.backoff, self._rng)
                    self._last_error = tries.last
                self.metrics.origin_retries += 1
                with breaker.interruptible() if interruptible else nullcontext():
                    await trio.sleep(wait_s)
        timed_out = OriginFailed(f"{action}: gave up after {deadline_s:g} s without progress: {tries.last}")
        raise self._failed(timed_out)

    async def _once(
        self,
        attempt: Callable[[], Awaitable[T]],
        counter: str,
        key: str,
        ticket: Ticket,
        transfer: Transfer | None,
        patience: int,
    ) -> T:
        """Make one attempt with a slot of the gate, and report it to the limiter and the breaker. Ends its transfer."""
        await (transfer.enter(self.gate) if isinstance(transfer, Sending) else self.gate.enter(ticket))
        sent_at = self._now()
        self._count_request(counter, key, ticket, transfer)
        error: BaseException | None = None
        suspicious = patience == 1  # a patient request expects a long silence
        if suspicious:
            self.breaker.attempt_began(None, sent_at)
        try:
            return await attempt()
        except BaseException as exc:
            error = exc
            if isinstance(exc, CachefsError) or not isinstance(exc, Exception):
                raise
            log.exception("an origin client raised what it should have translated")
            error = self._failed(OriginFailed(f"{type(exc).__name__}: {exc}".splitlines()[0]))
            raise error from exc
        finally:
            if suspicious:
                self.breaker.attempt_ended(None)
            self._attempt_ended(counter, ticket, transfer, sent_at, error)
            if transfer is not None:
                await transfer.close()
                self._count_bytes(transfer)  # an abandoned thread may have gone on until now

    def _count_request(self, counter: str, key: str, ticket: Ticket, transfer: Transfer | None) -> None:
        """Count a request that is sent: for its dataset, and for the process that waits for it, if any."""
        ledger = self.metrics.ledger
        setattr(self.metrics, counter, getattr(self.metrics, counter) + 1)
        accounts = [ledger.account(self.prefix, key)]
        call = None if counter == "origin_get" else current_call.get()
        thread = ticket.thread if call is None else call.thread
        if thread:
            accounts.append(ledger.waits.process(thread).account)
        for account in accounts:
            account[counter] += 1
        if transfer is not None:
            transfer.accounts = accounts

    def _attempt_ended(
        self,
        counter: str,
        ticket: Ticket,
        transfer: Transfer | None,
        sent_at: float,
        error: BaseException | None,
    ) -> None:
        """Report the end of an attempt that had a slot to the limiter and the breaker, and release the slot."""
        gate, now = self.gate, self._now()
        if isinstance(error, Throttled):
            self.breaker.heard(now)
            self.metrics.origin_throttled += 1
            gate.concurrency.throttled(sent_at, now)
        elif error is None or isinstance(error, REFUSALS):
            self.breaker.heard(now)
            gate.concurrency.succeeded()  # a refusal of this request is no sign of too many requests
        if transfer is not None:
            if error is None and transfer.resumes:
                self.transfer_rate.add(transfer.moved, now - sent_at)
            self._count_bytes(transfer)
            gate.concurrency.finished(bool(gate.queue.demand or gate.queue.background), now)
        gate.leave(ticket)
        self.metrics.ledger.origin_seconds[counter.removeprefix("origin_")].add(now - sent_at)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run a blocking call of the client in a worker thread, which is abandoned if the caller is cancelled."""
        made = BlockingCall()
        token = blocking_call.set(made)
        try:
            return await in_thread(call, abandon_on_cancel=True, limiter=self.threads)
        except OSError as exc:
            if exc.errno != errno.EAGAIN:
                raise
            raise Transient(exc.strerror) from exc
        finally:
            made.abandoned = True
            blocking_call.reset(token)

    def _failed(self, exc: E) -> E:
        self.metrics.origin_errors += 1
        self._last_error = str(exc)
        return exc

    def _count_bytes(self, transfer: Transfer) -> None:
        """Count the bytes of a transfer since it was last counted."""
        count = transfer.position - transfer.counted
        transfer.counted += count
        setattr(self.metrics, transfer.counter, getattr(self.metrics, transfer.counter) + count)
        for account in transfer.accounts:
            account[transfer.counter] += count
        self.gate.concurrency.arrived(count)
        (self._download if transfer.resumes else self._upload).add(count, time.monotonic())

    def progressed(self, transfer: Transfer) -> None:
        """Called about once a second while bytes of a transfer arrive or leave."""
        if transfer.heard:
            self.breaker.heard(trio.current_time())
        self._count_bytes(transfer)


# -- transfers -------------------------------------------------------------------------------------

PROGRESS_S = 1.0
"""Seconds between two reports of a running transfer, which push its deadline back. Derived: a call into trio costs about 0.1
ms, so once a second is free, and a deadline is many seconds."""

CHUNK = 128 << 10
"""Bytes that are read from a source and handed to a connection at once. Derived: a connection waits as long for a chunk
to be taken as for being made (5 s), which at this size is 25 kB/s."""


READ_AHEAD = 1 << 20
"""Bytes that a client may have read from a source before the origin takes any. Derived: the HTTP client holds three
chunks, and the one for fsspec makes one piece of so many bytes."""


class Transfer(Stoppable):
    """The bytes of one attempt, from a client into a sink or from a source into a client's request. A thread moves bytes
    (the HTTP client's, or a worker), and a trio task waits for it. `position` is the next byte. Progress pushes the
    deadline of `scope` back. `counted` (the next byte that the metrics do not have) and `accounts` belong to `Attempts`,
    which hears of progress about once a second, while bytes move."""

    counter: str
    """The metric that counts the bytes."""
    resumes: bool
    """True if an attempt goes on where the last one ended."""

    def __init__(self, attempts: Attempts, ticket: Ticket, limit: RateLimit | None, start: int = 0) -> None:
        self.position = self.counted = self._start = start
        self.accounts: list[Account] = []
        self.scope: trio.CancelScope | None = None
        self._attempts, self._ticket, self._limit = attempts, ticket, limit
        self._reported = time.monotonic()
        self._trio = attempts.token

    # On the trio side.

    @property
    def heard(self) -> bool:
        """True if the bytes that moved show that the origin answers."""
        return True

    @property
    def moved(self) -> int:
        """Bytes so far."""
        return self.position - self._start

    @property
    def gained(self) -> bool:
        """True if it brought bytes that the next attempt need not repeat."""
        return self.resumes and self.moved > 0

    def shut(self) -> None:
        """As `close`, for a caller that knows that no call is running."""
        self._closed = True

    # On the side of other threads.

    def _pace(self, size: int) -> None:
        """Called before `size` bytes are transferred. Waits for the limit on bytes a second, if there is one."""
        if self._limit is not None:
            trio.from_thread.run(self._pay, self._limit, size, trio_token=self._trio)
        else:
            self.coming()

    def coming(self) -> None:
        """Bytes have arrived or will leave: that renews the deadline, also while they wait to be taken."""
        now = time.monotonic()
        if now - self._reported > PROGRESS_S:
            self._reported = now
            self._trio.run_sync_soon(self._alive)

    async def _pay(self, limit: RateLimit, size: int) -> None:
        """On the trio thread: wait for the limit. The origin did not cause this wait, so the deadline is suspended."""
        if self.scope is not None and not self._closed:
            self.scope.deadline = math.inf
        try:
            await limit.pay(size, self._ticket)
        finally:
            self._alive()

    def _alive(self) -> None:
        """On the trio thread: bytes have moved, so the deadline starts again."""
        if not self._closed:
            if self.scope is not None:
                self.scope.deadline = trio.current_time() + self._attempts.deadline_s
            self._attempts.progressed(self)
        self._reported = time.monotonic()


class Receiving(Transfer):
    """Bytes [start, stop) of one version into a sink; implements `Taker`. `sink_error` is what the sink raised."""

    counter, resumes = "origin_bytes", True

    def __init__(self, attempts: Attempts, ticket: Ticket, start: int, stop: int, sink: Sink) -> None:
        super().__init__(attempts, ticket, attempts.download_limit, start)
        self.sink_error: Exception | None = None
        self._stop, self._sink = stop, sink
        self.waits = self._limit is not None or bool(getattr(sink, "waits", False))

    @property
    def complete(self) -> bool:
        """True if it brought the last byte: that the connection broke after that is no failure."""
        return self.gained and self.position == self._stop

    def drain(self, chunks: Generator[memoryview | bytes, None, None]) -> None:
        """Take chunks until they end, the sink raises or the transfer is closed."""
        try:
            for chunk in chunks:
                if not self.take(chunk):
                    return
        finally:
            chunks.close()

    def failure(self, error: Exception | None) -> Exception | None:
        """Why the attempt that ended with `error` failed: also if it raised nothing but bytes are missing."""
        if isinstance(error, Transient) and self.complete:
            return None
        if error is None and self.position != self._stop and self.sink_error is None and not self._closed:
            return Transient(f"the body ended {self._stop - self.position} bytes too early")
        return error

    def take(self, chunk: memoryview | bytes) -> bool:
        """As `Taker.take`."""
        size = len(chunk)
        if size > self._stop - self.position:
            raise Transient("the origin sent more bytes than were asked for")
        self._pace(size)
        self._busy = True
        try:
            if self._closed:
                return False
            self._sink.write(chunk)
            self.position += size
        except Exception as exc:
            self.sink_error = exc
            return False
        finally:
            self._busy = False
        return True


class Sending(Transfer):
    """The first `size` bytes of a source into a request (`Body`). `source_error`: it raised this, or ended early."""

    counter, resumes = "origin_bytes_sent", False

    def __init__(self, attempts: Attempts, ticket: Ticket, source: Source, size: int) -> None:
        super().__init__(attempts, ticket, attempts.upload_limit)
        self.size = size
        self.source_error: Exception | None = None
        self._source = source

    @property
    def heard(self) -> bool:
        return self.moved > READ_AHEAD

    async def enter(self, gate: Gate) -> None:
        """Wait for a slot, with the deadline suspended: a file may have more parts than there are slots."""
        scope = self.scope
        assert scope is not None
        left, scope.deadline = scope.deadline - trio.current_time(), math.inf
        await gate.enter(self._ticket)
        scope.deadline = trio.current_time() + left

    def chunks(self) -> Iterator[bytes]:
        for at in range(0, self.size, CHUNK):
            count = min(CHUNK, self.size - at)
            self._pace(count)
            data = self._read(at, count)
            self.position += count
            yield data

    def look(self) -> Iterator[bytes]:
        for at in range(0, self.size, 8 * CHUNK):
            self.coming()
            yield self._read(at, min(8 * CHUNK, self.size - at))

    def _read(self, at: int, count: int) -> bytes:
        data = b""
        self._busy = True
        try:
            if not self._closed:
                data = self._source.read(at, count)
        except Exception as exc:
            self.source_error = exc
        finally:
            self._busy = False
        if len(data) != count:
            if not self._closed and self.source_error is None:
                self.source_error = OriginFailed("the source of a write is shorter than was said")
            raise Abandoned
        return data


class Abandoned(Exception):
    """The source of a body failed, or its transfer is closed. Libraries would take an OSError for a broken connection."""


# -- an origin that does not answer ----------------------------------------------------------------
#
# A store that refuses (403, 404, 503) answers; one that is out hangs, or breaks every connection. Requests only raise a
# suspicion: nothing was heard for some time while a request waited, or attempts failed in a row. A *probe* decides: one
# small LIST that waits in no queue. So a key that always fails, or a request that takes a minute, is no outage. While the
# origin is out, it is probed every second, one probe at a time, and any reply, to a probe or to a request, ends the outage.
#
# `Outage` is the policy and has no clock; `Breaker` has the clock, the probe, and the requests that hang or wait.

SILENT_S = 5.0
"""Seconds of silence that are suspicious while a request waits, and that a probe may take. Guessed: stores answer in well
under a second, and a slower reply costs one probe."""

FAILING_S, FAILURES = 2.0, 3
"""That many failed attempts in a row, in at least that many seconds, are suspicious, too. Derived: with `Backoff`, a
request fails for good after 3.1 s at the earliest, and its error is to say by then that the origin is out."""

LOOK_EVERY_S, PROBE_EVERY_S = 0.5, 1.0
"""Seconds between two checks for a suspicion, and between two probes. A probe may take `PROBE_EVERY_S` however short the
deadline is: a busy machine is no outage. Derived: 3.1 s suffice for two failures and a check."""

PROBERS = 16
"""Threads of probes. Derived: probes that hang begin every 6 s, and a client's own timeout ends each after 10 s."""


@dataclass(slots=True)
class Outage:
    """The policy: which silence of one origin is suspicious, and whether the origin is out. Times are seconds of any one
    clock. `since`: the origin is out, and silent from then on. `replies` tells a probe whether a reply came meanwhile."""

    silent_s: float = SILENT_S
    failing_s: float = FAILING_S
    since: float | None = None
    replies: int = 0
    _waiting: int = 0
    _failures: int = 0
    _quiet_since: float | None = None

    @property
    def idle(self) -> bool:
        """True if no request waits, none has failed since the last reply, and the origin is not out."""
        return not self._waiting and not self._failures and self.since is None

    def asked(self, now: float) -> None:
        self._waiting += 1
        if self._quiet_since is None:
            self._quiet_since = now

    def ended(self) -> None:
        """A request waits no longer, for any reason."""
        self._waiting -= 1
        if not self._waiting and not self._failures:
            self._quiet_since = None

    def failed(self) -> None:
        """An attempt got no reply, or a 5xx, which a proxy sends too."""
        self._failures += 1

    def heard(self, now: float) -> float | None:
        """A reply came, or bytes of one. Returns the seconds of the outage that this ends, if there was one."""
        since, self.since = self.since, None
        self.replies += 1
        self._failures = 0
        self._quiet_since = now if self._waiting else None
        return None if since is None else now - since

    def suspicious(self, now: float) -> float | None:
        """The beginning of the silence if it is suspicious, else None."""
        if self._quiet_since is None:
            return None
        quiet_s = now - self._quiet_since
        failing = self._failures >= FAILURES and quiet_s >= self.failing_s
        silent = self._waiting > 0 and quiet_s >= self.silent_s
        return self._quiet_since if failing or silent else None

    def probed_in_vain(self, quiet_since: float, replies: int) -> bool:
        """Record a probe that got no reply; it began with these values. True if the origin is out from now on."""
        if self.since is not None or self.replies != replies:
            return False
        self.since = quiet_since
        return True


class Breaker:
    """The circuit breaker of one origin. `probe` blocks. An outage is found within `deadline_s`, the requests' deadline."""

    def __init__(
        self,
        name: str,
        probe: Callable[[], object],
        on_outage: OnOutage,
        deadline_s: float,
        metrics: Metrics,
    ) -> None:
        self.on_outage = on_outage
        self._name = name
        self._probe = probe
        self._metrics = metrics
        self._outage = Outage(min(SILENT_S, deadline_s / 3), min(FAILING_S, deadline_s / 3))
        self._probe_s = min(SILENT_S, max(PROBE_EVERY_S, deadline_s / 3))
        self._probers = trio.CapacityLimiter(PROBERS)
        # Functions that end requests when the origin is found to be out.
        self._hanging: set[Callable[[], None]] = set()
        self._answers_again = trio.Event()
        self._watching: trio.CancelScope | None = None
        self._last_error = ""

    @property
    def is_out(self) -> bool:
        return self._outage.since is not None

    @property
    def serves_stale(self) -> bool:
        """True while the origin is out and cached metadata of any age is served."""
        return self.on_outage.stale and self.is_out

    def heard(self, now: float) -> None:
        outage_s = self._outage.heard(now)
        if outage_s is not None:
            log.warning("%s answers again, after %.0f s", self._name, outage_s)
            self._answers_again.set()
            self._answers_again = trio.Event()

    def failed(self, exc: Transient) -> None:
        self._last_error = str(exc)
        self._outage.failed()
        self._watch()

    def attempt_began(self, end: Callable[[], None] | None, now: float) -> None:
        """An attempt begins whose silence is suspicious. `end` is called if the origin is found to be out."""
        self._outage.asked(now)
        self._watch()
        if end is not None:
            self._hanging.add(end)

    def attempt_ended(self, end: Callable[[], None] | None) -> None:
        """An attempt that `attempt_began` reported is over."""
        self._outage.ended()
        if end is not None:
            self._hanging.discard(end)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Cancel the block when the origin is found to be out: it then ends without an exception."""
        with trio.CancelScope() as scope:
            end = scope.cancel
            self._hanging.add(end)
            try:
                yield
            finally:
                self._hanging.discard(end)

    async def admit(self, action: str, until: float) -> None:
        """Return when a request may be sent; raises `Unreachable` if the origin is still out at `until` (trio's clock)."""
        if self.is_out:
            with trio.move_on_at(until):
                await self._answers_again.wait()
        if self.is_out:
            self._metrics.origin_refused += 1
            raise Unreachable(f"{action}: {self.complaint()}")

    def complaint(self) -> str:
        """One line for the user while the origin is out, else ""."""
        since = self._outage.since
        if since is None:
            return ""
        why = f" ({self._last_error})" if self._last_error else ""
        return f"{self._name} has not answered for {trio.current_time() - since:.0f} s{why}"

    def status(self) -> dict[str, Any]:
        since = self._outage.since
        return {
            "on_outage": str(self.on_outage),
            "out_s": None if since is None else round(trio.current_time() - since, 1),
        }

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = trio.CancelScope()
            trio.lowlevel.spawn_system_task(self._run, self._watching, name="cachefs outage")

    async def _run(self, scope: trio.CancelScope) -> None:
        """Check for a suspicion and probe, until no request waits or has failed and the origin is not out."""
        try:
            with scope:
                while not self._outage.idle:
                    await trio.sleep(min(PROBE_EVERY_S if self.is_out else LOOK_EVERY_S, self._probe_s / 4))
                    quiet_since = self._outage.suspicious(trio.current_time())
                    if self.is_out or quiet_since is not None:
                        await self._decide(quiet_since or 0.0)
        except Exception:  # in a system task, it would end the process
            log.exception("watching %s failed", self._name)
        finally:
            self._watching = None

    async def _decide(self, quiet_since: float) -> None:
        """Probe once, and open or close the circuit accordingly."""
        replies = self._outage.replies
        answers = await self._answers()
        if answers is None:
            return
        self._metrics.origin_list += 1
        if answers:
            self.heard(trio.current_time())
        elif self._outage.probed_in_vain(quiet_since, replies):
            self._metrics.origin_outages += 1
            log.warning("%s; %s", self.complaint(), _CONSEQUENCES[self.on_outage.mode])
            for end in list(self._hanging):
                end()

    async def _answers(self) -> bool | None:
        """True if the origin answers a probe; None if no thread could be started to send it."""
        with trio.move_on_after(self._probe_s):
            try:
                await in_thread(self._probe, abandon_on_cancel=True, limiter=self._probers)
            except Transient as exc:
                if not isinstance(exc, Throttled):
                    self._last_error = str(exc)
                    return False
            except CachefsError:
                pass  # a refusal is an answer
            except Exception as exc:
                if isinstance(exc, OSError) and exc.errno == errno.EAGAIN:
                    return None
                log.debug(
                    "a probe of %s raised what its client should have translated", self._name, exc_info=True
                )
            return True
        return False


_CONSEQUENCES = {
    "serve-stale": "cached names and attributes of any age are served until it answers",
    "eio": "requests for it fail until it answers",
    "wait": "requests wait for it",
}

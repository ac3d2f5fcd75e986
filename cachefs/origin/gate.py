"""Which requests may be in flight: how many (`Concurrency`), in what order (`Gate`), and how fast (`RateLimit`).

How many is pure policy. Two signs show that there are too many. The origin refuses (503, 429): the limit halves at once,
and a window of successes raises it by one (AIMD, as TCP). Or more requests bring fewer bytes, which no reply tells: while
the gate is full, the policy measures one window at three quarters of the limit from time to time, and keeps that limit only
if clearly more bytes arrive. From there it tries higher limits again, by eighths. A store at the end of its bandwidth gives
the same at every limit, so its limit is not cut. A window in which readers asked for less than the limit is not judged.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

WINDOW_S = 2.0
"""Seconds of arrivals that a limit is judged by. Guessed: some hundred requests of a healthy store."""

CLEARLY_MORE = 1.15
"""The ratio of rates at which a lower limit is kept, and at which it is tried at once. Guessed: the noise of a steady store
stays below it; requests that hinder each other bring a third more at three quarters."""

CLEARLY_LESS = 0.95
"""The ratio of rates down to which a higher limit is kept. Guessed: above the noise of a steady store."""

PATIENCE = 4
MOST_PATIENCE = 64
"""Windows between two trials, doubled by each that found nothing. Derived: then at most every 64th window runs at three
quarters, which costs a store that takes more 0.4 %."""

THROTTLED, FALLING = "throttled", "falling throughput"


@dataclass(slots=True)
class Concurrency:
    """The limit, between 1 and `maximum`. Times are seconds of any steady clock."""

    maximum: int
    limit: int = field(init=False)
    _ceiling: int = field(init=False)  # successes raise the limit up to here
    _successes: int = 0
    _cut_at: float = float("-inf")
    # The window being measured. It begins when each slot was used once under the present limit.
    _settling: int = 0
    _since: float | None = None
    _bytes: int = 0
    _requests: int = 0
    _full: bool = True
    # The trial under way and the last one downwards, each as (limit, rate); `_windows` since the last trial.
    _from: tuple[int, float] | None = None
    _below: tuple[int, float] | None = None
    _windows: int = 0
    _patience: int = PATIENCE
    _down: bool = True

    def __post_init__(self) -> None:
        self.limit = self._ceiling = self.maximum

    @property
    def reason(self) -> str:
        """`THROTTLED` or `FALLING` while the limit is below its maximum for that reason, else ""."""
        usual = self._ceiling if self._from is None else self._from[0]
        if self._from is None and self.limit < self._ceiling:
            return THROTTLED
        return FALLING if usual < self.maximum else ""

    def admits(self, in_flight: int, background: bool) -> bool:
        """True if one more request may start. Background leaves an eighth of the slots free (guessed), so that a reader need
        not wait for the end of a prefetched range."""
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
        """Bytes came in."""
        self._bytes += count

    def finished(self, full: bool, now: float) -> None:
        """A transfer ended, with success or not. `full`: others wait for its slot."""
        if self._settling > 0:
            self._settling -= 1
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
            self._judge(self._bytes / elapsed)
        self._since = None

    def _judge(self, rate: float) -> None:
        if self._from is None:
            self._windows += 1
            below = self._below
            fell = below is not None and below[0] < self.limit and rate * CLEARLY_MORE < below[1]
            if fell or self._windows > self._patience:
                self._try(rate, self.limit > 1 and (self._down or fell or self.limit == self.maximum))
            return
        before, rate_before = self._from
        down = self.limit < before
        if down:
            self._below = (self.limit, rate)
        if rate > rate_before * CLEARLY_MORE if down else rate >= rate_before * CLEARLY_LESS:
            self._from = None
            self._patience = 1  # a good direction: try further
        else:
            self._go_back()
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._down = not down
        self._windows = 0

    def _try(self, rate: float, down: bool) -> None:
        """Begin a trial: measure the next window at another limit."""
        there = self.limit * 3 // 4 if down else min(self.maximum, self.limit + max(1, self.limit // 8))
        if there not in (0, self.limit):
            self._from = (self.limit, rate)
            self._move(there)

    def _go_back(self) -> None:
        """End a trial and go back to the limit before it."""
        if self._from is not None:
            (before, _), self._from = self._from, None
            self._move(before)

    def _move(self, limit: int) -> None:
        self.limit = self._ceiling = limit
        self._measure_again()

    def _measure_again(self) -> None:
        self._settling, self._since = self.limit, None


# The order of requests: demand (a reader waits) goes before background (prefetching).
#
# A request carries a priority ticket through both queues, the admission gate in front of the origin and the download limit
# behind it. A background transfer becomes demand when a reader joins it, and then overtakes in the queue where it waits.
# Background is not starved: one background request goes after every few demands.

OVERTAKEN_AT_MOST = 4
"""Demand requests that may go before a waiting background request. Guessed: readahead keeps a fifth of a busy store."""


class Ticket:
    """The priority class of one request in all queues; it waits in one at a time. `thread` is the thread id of the read that
    waits for it, 0 for none."""

    __slots__ = ("background", "line", "thread")

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self.thread = 0
        self.line: Line | None = None

    def promote(self) -> None:
        """Make it demand, behind the demands that wait already."""
        if self.background:
            self.background = False
            if self.line is not None:
                self.line.promoted(self)


class Line:
    """A wait queue of two classes, first come first served within each. Callers have deadlines of their own."""

    def __init__(self, on_promoted: Callable[[], None] = lambda: None) -> None:
        self.demand: OrderedDict[Ticket, trio.lowlevel.Task] = OrderedDict()
        self.background: OrderedDict[Ticket, trio.lowlevel.Task] = OrderedDict()
        self._on_promoted = on_promoted
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self.demand) + len(self.background)

    async def wait(self, turn: Ticket) -> None:
        """Return when `call` has taken this ticket. A ticket that was called cannot be cancelled, and a cancelled one
        cannot be called, not even before its task runs: the caller of `call` relies on it."""

        def leave(_: object) -> trio.lowlevel.Abort:
            turn.line = None
            (self.background if turn.background else self.demand).pop(turn)
            return trio.lowlevel.Abort.SUCCEEDED

        (self.background if turn.background else self.demand)[turn] = trio.lowlevel.current_task()
        turn.line = self
        await trio.lowlevel.wait_task_rescheduled(leave)

    def promoted(self, turn: Ticket) -> None:
        self.demand[turn] = self.background.pop(turn)
        self._on_promoted()

    @property
    def starved(self) -> bool:
        """True if a background request waits and enough demands overtook it."""
        return bool(self.background) and self._overtaken >= OVERTAKEN_AT_MOST

    def call(self, *, background: bool) -> Ticket:
        """Let the first of a class go; the class must not be empty."""
        turn, task = (self.background if background else self.demand).popitem(last=False)
        self._overtaken = 0 if background else self._overtaken + 1
        turn.line = None  # a promotion from here on has nothing to overtake
        trio.lowlevel.reschedule(task)
        return turn


class Gate:
    """The admission gate: requests wait here for one of `Concurrency`'s slots."""

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self.line = Line(on_promoted=self._admit)
        self._inside: set[Ticket] = set()

    @property
    def in_flight(self) -> int:
        return len(self._inside)

    @property
    def background_in_flight(self) -> int:
        return sum(turn.background for turn in self._inside)

    async def enter(self, turn: Ticket) -> None:
        """Return with a slot, which the caller releases with `leave`."""
        if not self.enters(turn):
            await self.line.wait(turn)

    def enters(self, turn: Ticket) -> bool:
        """Take a slot, if one is free and no request waits that goes first."""
        overtaken = len(self.line.demand) + (len(self.line.background) if turn.background else 0)
        if overtaken or not self.concurrency.admits(len(self._inside), turn.background):
            return False
        self._inside.add(turn)
        return True

    def leave(self, turn: Ticket) -> None:
        """Release a slot, and admit waiting requests (several, when the limit has grown)."""
        self._inside.remove(turn)
        self._admit()

    def _admit(self) -> None:
        line, concurrency = self.line, self.concurrency
        while (line.demand or line.background) and concurrency.admits(len(self._inside), background=False):
            if line.demand and not line.starved:
                self._inside.add(line.call(background=False))
            elif line.starved or concurrency.admits(len(self._inside), background=True):
                self._inside.add(line.call(background=True))
            else:
                return


# Rates in bytes a second: limits (a token bucket and its queue) and measurements.


class TokenBucket:
    """A limit on bytes a second. A taker gets all its bytes at once and waits until they are paid off; later takers wait
    behind it, so no chunk is split. Pure: the clock is passed in."""

    BURST_S = 0.1
    """Seconds of unused time that are kept. Guessed: long enough to hide late wake-ups, too short for a user to see the
    limit exceeded."""

    def __init__(self, bytes_per_s: float, now: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = now  # when the bytes taken so far will have been paid off

    def take(self, count: int, now: float) -> float:
        """Take `count` bytes at time `now`. Returns the seconds to wait before using them."""
        start = max(self._free_at, now - self.BURST_S)
        self._free_at = start + count / self.bytes_per_s
        return max(0.0, self._free_at - now)


class RateLimit:
    """A limit that transfers wait for: one chunk is paid for at a time, demand before background. A transfer waits with one
    chunk, so the requests in flight bound the queue."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._bucket: TokenBucket | None = None
        self._line = Line()
        self._busy = False

    async def pay(self, count: int, turn: Ticket) -> None:
        """Return when `count` bytes may go by."""
        if self._busy:
            await self._line.wait(turn)
        self._busy = True
        now = trio.current_time()
        if self._bucket is None:  # trio's clock exists only inside trio
            self._bucket = TokenBucket(self.bytes_per_s, now)
        try:
            await trio.sleep(self._bucket.take(count, now))
        finally:
            line = self._line
            if len(line):
                line.call(background=line.starved or not line.demand)
            else:
                self._busy = False


class TransferRate:
    """Recent bytes a second of one transfer; 0 before the first. Small transfers measure the latency of a reply instead, and
    are left out. Pure."""

    LEAST_BYTES = 256 << 10
    """Guessed: at 10 MB/s they take as long as a usual store's first byte, about 25 ms."""

    WEIGHT = 0.2
    """Of the newest transfer. Guessed: an average of about ten."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def add(self, count: int, seconds: float) -> None:
        if count >= self.LEAST_BYTES:
            rate = count / max(seconds, 1e-3)
            self.bytes_per_s += (rate - self.bytes_per_s) * (self.WEIGHT if self.bytes_per_s else 1.0)


class Throughput:
    """Bytes a second over the last seconds. Pure: the clock is passed in."""

    SECONDS = 5
    """Guessed: short enough to be current, longer than the second between two reports of a transfer."""

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

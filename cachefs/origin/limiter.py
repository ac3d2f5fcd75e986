"""How many requests may be in flight: pure policy. Who goes next is the gate's matter (`gate.py`).

Two signs say that there are too many. The store says so (503, 429): the limit halves at once, and a window of successes
raises it by one, as TCP does. Or more in flight brings less, which no reply says: while the gate is full, the policy
looks from time to time how much arrives at three quarters of the limit, and stays there only if that is clearly more.
From there it looks upwards again, by eighths. A store that is merely at the end of its bandwidth gives the same at every
limit, so nothing is cut; and a window in which the readers asked for less than they may is not judged at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW_S = 2.0
"""How long arrivals are measured before a limit is judged. Guessed: some hundred requests of a healthy store."""

FULL = 0.9
"""The share of requests in a window that must have left somebody waiting. Guessed."""

CLEARLY_MORE = 1.15
"""What a lower limit must bring to be kept, and what makes us look for it at once. Guessed: noise between windows of a
steady store stays below; requests that hinder each other bring a third more at three quarters."""

CLEARLY_LESS = 0.95
"""What a higher limit may bring less, and be kept. Guessed."""

PATIENCE = 4
MOST_PATIENCE = 64
"""Windows between two looks, doubled by each that found nothing. Derived: at most every 64th window then runs at three
quarters, which costs a store that would take more 0.4 %."""

THROTTLED, FALLING = "throttled", "falling throughput"


@dataclass(slots=True)
class Concurrency:
    """The limit now, between 1 and `maximum`. Time is passed in, in seconds of any steady clock."""

    maximum: int
    limit: int = field(init=False)
    _ceiling: int = field(init=False)  # as far as successes raise the limit
    _successes: int = 0
    _cut_at: float = float("-inf")
    # The window that is being measured; it begins when each slot has been used once under the limit of now.
    _settling: int = 0
    _since: float | None = None
    _bytes: int = 0
    _requests: int = 0
    _full: int = 0
    # Looking around: where from and what arrived there, what the last look downwards saw, how many windows ago.
    _from: tuple[int, float] | None = None
    _below: tuple[int, float] | None = None
    _windows: int = 0
    _patience: int = PATIENCE
    _down: bool = True

    def __post_init__(self) -> None:
        self.limit = self._ceiling = self.maximum

    @property
    def reason(self) -> str:
        """Why the limit is below its maximum, or ""."""
        usual = self._ceiling if self._from is None else self._from[0]
        if self._from is None and self.limit < self._ceiling:
            return THROTTLED
        return FALLING if usual < self.maximum else ""

    def admits(self, in_flight: int, background: bool) -> bool:
        """Whether one more may start. Background work leaves an eighth of the slots (guessed) free, so that a
        reader who comes while readahead is busy does not first wait for a whole range to end."""
        reserve = self.limit // 8 if background else 0
        return in_flight < self.limit - reserve

    # What the store says.

    def succeeded(self) -> None:
        """A request was answered; after as many as the limit (one window), the limit grows by one."""
        if self.limit >= self._ceiling:
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self.limit += 1
            self._measure_anew()

    def throttled(self, sent_at: float, now: float) -> None:
        """A request sent at `sent_at` was refused. Requests already in flight at the last cut say nothing new
        about the new limit, so only one sent after it cuts again: once per window, whatever the round trip
        is."""
        if sent_at < self._cut_at:
            return
        self._return()
        self.limit = max(1, self.limit // 2)
        self._successes = 0
        self._cut_at = now
        self._measure_anew()

    # What arrives.

    def arrived(self, count: int) -> None:
        """Bytes came in."""
        self._bytes += count

    def finished(self, full: bool, now: float) -> None:
        """A request for bytes ended, well or not; `full` says that others wait for its slot."""
        if self._settling > 0:
            self._settling -= 1
            return
        if self._since is None:
            self._since, self._bytes, self._requests, self._full = now, 0, 0, 0
            return
        self._requests += 1
        self._full += full
        elapsed = now - self._since
        if elapsed < WINDOW_S or self._requests < self.limit:
            return
        if self._full < FULL * self._requests or not self._bytes:
            self._return()
        elif self.limit >= self._ceiling:
            self._judge(self._bytes / elapsed)
        self._since = None

    def _judge(self, rate: float) -> None:
        if self._from is None:
            self._windows += 1
            below = self._below
            fell = below is not None and below[0] < self.limit and rate * CLEARLY_MORE < below[1]
            if fell or self._windows > self._patience:
                self._look(rate, self.limit > 1 and (self._down or fell or self.limit == self.maximum))
            return
        before, rate_before = self._from
        down = self.limit < before
        if down:
            self._below = (self.limit, rate)
        if rate > rate_before * CLEARLY_MORE if down else rate >= rate_before * CLEARLY_LESS:
            self._from = None
            self._patience = 1  # a good direction: on
        else:
            self._return()
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._down = not down
        self._windows = 0

    def _look(self, rate: float, down: bool) -> None:
        """Measure the next window at another limit."""
        there = self.limit * 3 // 4 if down else min(self.maximum, self.limit + max(1, self.limit // 8))
        if there not in (0, self.limit):
            self._from = (self.limit, rate)
            self._move(there)

    def _return(self) -> None:
        """The look is over, and there is nothing to be said for the limit that was tried."""
        if self._from is not None:
            (before, _), self._from = self._from, None
            self._move(before)

    def _move(self, limit: int) -> None:
        self.limit = self._ceiling = limit
        self._measure_anew()

    def _measure_anew(self) -> None:
        self._settling, self._since = self.limit, None

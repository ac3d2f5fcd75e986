"""How many requests may be in flight: pure policy. `cachefs.origin.gate` decides their order.

Two signs show that there are too many. The origin refuses (503, 429): the limit halves at once, and a window of successes
raises it by one (AIMD, as TCP). Or more requests bring fewer bytes, which no reply tells: while the gate is full, the
policy measures one window at three quarters of the limit from time to time, and keeps that limit only if clearly more
bytes arrive. From there it tries higher limits again, by eighths. A store at the end of its bandwidth gives the same at
every limit, so its limit is not cut. A window in which readers asked for less than the limit is not judged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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

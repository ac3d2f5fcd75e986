"""How many requests may be in flight: pure policy, TCP's additive increase and multiplicative decrease. A throttled reply
halves the limit, a window of successes raises it by one. Who goes next is the gate's matter (`gate.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Concurrency:
    """The limit now, between 1 and `maximum`. Time is passed in, in seconds of any steady clock."""

    maximum: int
    limit: int = field(init=False)
    _successes: int = 0
    _cut_at: float = float("-inf")

    def __post_init__(self) -> None:
        self.limit = self.maximum

    def succeeded(self) -> None:
        """A request was answered; after as many as the limit (one window), the limit grows by one."""
        if self.limit >= self.maximum:
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self.limit += 1

    def throttled(self, sent_at: float, now: float) -> None:
        """A request sent at `sent_at` was refused. Requests already in flight at the last cut say nothing new
        about the new limit, so only one sent after it cuts again: once per window, whatever the round trip
        is."""
        if sent_at < self._cut_at:
            return
        self.limit = max(1, self.limit // 2)
        self._successes = 0
        self._cut_at = now

    def admits(self, in_flight: int, background: bool) -> bool:
        """Whether one more may start. Background work leaves an eighth of the slots (guessed) free, so that a
        reader who comes while readahead is busy does not first wait for a whole range to end."""
        reserve = self.limit // 8 if background else 0
        return in_flight < self.limit - reserve

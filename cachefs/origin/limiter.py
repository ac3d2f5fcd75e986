"""How many requests may be in flight, and who goes next.

Two nouns. `Concurrency` is a pure policy, TCP's additive increase and multiplicative decrease: a throttled
reply halves the limit, a window of successes raises it by one. `Gate` is the queue in front of it: demand
requests (a reader is waiting) overtake background ones (readahead), first come first served inside each
class. But not for ever: a reader may have joined a transfer that began as readahead, so every few demands one
background request has its turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

OVERTAKEN_AT_MOST = 4
"""Demand requests that may go before one waiting background request. Guessed: readahead keeps a fifth of a busy store."""


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


class Gate:
    """The trio side of `Concurrency`: tasks wait here for their turn. Waiting is bounded by the caller's
    deadline."""

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self.in_flight = 0
        self._demand = trio.lowlevel.ParkingLot()
        self._background = trio.lowlevel.ParkingLot()
        self._overtaken = 0

    @property
    def waiting(self) -> int:
        return len(self._demand) + len(self._background)

    async def enter(self, background: bool) -> None:
        """Return holding a slot, which `leave` gives back."""
        queue = self._background if background else self._demand
        overtaken = len(self._demand) + (len(self._background) if background else 0)
        if not overtaken and self.concurrency.admits(self.in_flight, background):
            self.in_flight += 1
            return
        # Whoever unparks us has counted us in; park() cannot be cancelled after that, so no slot is lost.
        await queue.park()

    def leave(self) -> None:
        """Give a slot back and let in whoever may come now (several, when the limit has grown meanwhile)."""
        self.in_flight -= 1
        while self.in_flight < self.concurrency.limit:
            starved = len(self._background) > 0 and self._overtaken >= OVERTAKEN_AT_MOST
            if len(self._demand) and not starved:
                self._overtaken += 1
                queue = self._demand
            elif len(self._background) and (starved or self.concurrency.admits(self.in_flight, True)):
                self._overtaken = 0
                queue = self._background
            else:
                return
            self.in_flight += 1
            queue.unpark()

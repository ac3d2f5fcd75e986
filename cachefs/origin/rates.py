"""Rates in bytes a second: limits (a token bucket and its queue) and measurements."""

from __future__ import annotations

from collections import deque

import trio

from cachefs.origin.gate import Line, Ticket


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

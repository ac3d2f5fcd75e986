"""A limit on bytes a second (one for what comes, one for what is sent): a token bucket, and the queue in front of it."""

from __future__ import annotations

from collections import deque

import trio

from cachefs.origin.gate import Line, Turn


class TokenBucket:
    """Bytes a second. Bytes taken are paid at once and may leave a debt; the taker then waits until the debt is paid off.
    Takers that come meanwhile owe behind it, so no chunk is ever split. Pure: the clock is passed in."""

    BURST_S = 0.1
    """How much unused time is remembered (guessed: long enough to hide scheduling noise, too short to be seen
    as a violation by whoever asked for the limit)."""

    def __init__(self, bytes_per_s: float, now: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = now  # when the bytes taken so far will have been paid off

    def take(self, count: int, now: float) -> float:
        """Take `count` bytes at time `now`; the answer is how many seconds to wait before using them."""
        start = max(self._free_at, now - self.BURST_S)
        self._free_at = start + count / self.bytes_per_s
        return max(0.0, self._free_at - now)


class RateLimit:
    """The bucket's trio side: one chunk is paid for at a time, a reader's before those that nobody waits for. A transfer
    waits with one chunk, so the queue is bounded by the requests in flight."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._bucket: TokenBucket | None = None
        self._line = Line()
        self._busy = False

    async def pay(self, count: int, turn: Turn) -> None:
        """Return when `count` bytes that arrived may be passed on."""
        if self._busy:
            await self._line.wait(turn)
        self._busy = True
        now = trio.current_time()
        if self._bucket is None:  # the clock it counts on exists only inside trio
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
    """Bytes a second that one transfer brings, of late; 0 before the first. Small ones say how long an answer takes, not how
    fast bytes come, and are left out. Pure."""

    LEAST_BYTES = 256 << 10
    """Guessed: at 10 MB/s it takes as long as an answer of a usual store, about 25 ms."""

    WEIGHT = 0.2
    """Of the newest transfer. Guessed: the last ten speak."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def add(self, count: int, seconds: float) -> None:
        if count >= self.LEAST_BYTES:
            rate = count / max(seconds, 1e-3)
            self.bytes_per_s += (rate - self.bytes_per_s) * (self.WEIGHT if self.bytes_per_s else 1.0)


class Throughput:
    """Bytes a second over the last seconds. Pure: the clock is passed in."""

    SECONDS = 5
    """Guessed: short enough to be called now, longer than the second in which a transfer reports its progress."""

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

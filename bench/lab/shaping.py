"""How fast bytes may go.

A pipe is a point in time: the moment it becomes free. Whoever wants to send takes one quantum, which moves that moment
by quantum/rate, and sleeps until its own turn. Nobody holds more than one quantum at a time, so turns alternate: the
pipe is fair among connections, and the first bytes of a new response never wait for the whole of another one. A sleep
that ends late is made up for, because the pipe may lag behind the clock by a few milliseconds.
"""

from __future__ import annotations

import threading
import time

_LAG = 0.01
"""Seconds of unused rate that may be used later: compensates late wake-ups, and bounds the burst after idleness."""
_LEAD = 0.001
"""Shorter waits are not slept: a sleep for each quantum would cost more than it smooths."""


class Pipe:
    """A rate in bytes per second shared by all threads that `take` from it; 0 is unlimited."""

    def __init__(self, rate: float = 0) -> None:
        self.rate = rate
        self._free = 0.0
        self._lock = threading.Lock()

    @property
    def quantum(self) -> int:
        """Bytes of one quantum: a quarter of a millisecond at this rate, within bounds."""
        return min(max(int(self.rate / 4000), 4 << 10), 256 << 10) if self.rate else 256 << 10

    def take(self, count: int) -> None:
        """Wait until `count` bytes may be sent."""
        rate = self.rate
        if not rate:
            return
        with self._lock:
            now = time.monotonic()
            turn = max(self._free, now - _LAG)
            self._free = turn + count / rate
        if turn > now + _LEAD:
            time.sleep(turn - now)

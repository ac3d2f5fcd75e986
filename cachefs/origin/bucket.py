"""A download limit in bytes a second, as a token bucket. Pure: the clock is passed in."""

from __future__ import annotations


class TokenBucket:
    """Bytes taken are paid at once and may leave a debt; the taker then waits until the debt is paid off.
    Takers that come meanwhile owe behind it, so the order is first come first served and no chunk is ever
    split."""

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

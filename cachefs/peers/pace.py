"""How slowly a peer may deliver before the origin is asked for the rest.

A peer is there to be faster than the origin. One that sends a byte a second is not silent, so no deadline between two
pieces ever strikes; it is compared with what the origin gives. Slower than that by `TIMES` is too slow, unless the whole
range would be here within `FLOOR_S` all the same.

Pure: seconds of any steady clock, since the body began, are passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TIMES = 4.0
"""How many times as long as the origin a peer may take. Guessed: the rate of a transfer varies by two around its mean, on
both sides; what is given up costs the origin a request."""

FLOOR_S = 5.0
"""Any range may take so long. Derived: longer than `client.SILENCE_S`, so that silence is told as such; two peers that are
too slow are given up within the usual `--timeout`."""

ASSUMED_RATE = 4 << 20
"""Bytes a second of an origin that was not read yet. Guessed, and low: it is known after the first peer that is given up."""

LOOK_EVERY_S = 0.25
"""How often a transfer is looked at. Guessed: short against `FLOOR_S`."""


@dataclass(frozen=True)
class Pace:
    """What one transfer is compared with: `origin_rate` is what one transfer of the origin brought lately, in bytes a second
    (0: not known). `others` transfers from other peers share this node's link. The next block may take `patience_s`: so long
    a reader can wait for it, and still ask the origin in time."""

    origin_rate: float = 0.0
    others: int = 0
    patience_s: float = math.inf

    def allowed_s(self, size: int) -> float:
        """Seconds that `size` bytes may take."""
        if not self.origin_rate:
            return max(FLOOR_S, TIMES * size / ASSUMED_RATE)
        return max(FLOOR_S, TIMES * (1 + self.others) * size / self.origin_rate)

    def too_slow(self, size: int, received: int, elapsed_s: float, since_last_s: float) -> bool:
        """Whether to give up a transfer of `size` bytes, of which at most `received` came in `elapsed_s`; `since_last_s` ago
        a block was complete."""
        if since_last_s > self.patience_s:
            return True
        if elapsed_s < FLOOR_S or received >= size:
            return False
        return received <= 0 or elapsed_s * size / received > self.allowed_s(size)

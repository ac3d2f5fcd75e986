"""When to try again.

A small loop of our own rather than a retry library's: the budget is *failures without progress* (a body that
breaks at byte 900 of 1000 and is resumed there has not used up its attempts), refusals for being too many do
not count against it, and the store's own Retry-After wins over our guess. No library's loop lets the work
feed that back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits grow from `first_s` by doubling up to `longest_s`; each is cut by jitter to between half and all
    of it, so that a node's requests, refused together, do not come back together. Borrowed: the usual figures
    of S3 clients."""

    retries: int = 5
    first_s: float = 0.2
    longest_s: float = 10.0

    def wait_s(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after the `failures`-th failure in a row (1 is the first)."""
        ceiling = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 32))
        return ceiling * rng.uniform(0.5, 1.0)


DEFAULT = Backoff()

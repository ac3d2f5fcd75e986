"""Whether a peer is worth asking, and how long to wait for it.

A failure makes a peer *suspect*, several in a row make it *dead*; both are left alone for a while that doubles with each
further failure, and then one request tries it. Any success makes it healthy at once. The two differ only for who looks
at them: a suspect will mostly be back for the next request. Nobody is removed here: the ring is made of members, and an
owner that may not be tried is passed over by whoever wanted to read.

Deadlines come from the peer's own answers. The time to the first byte is kept in a histogram of logarithmic buckets
that forgets by halving: a peer that was always quick is given up early, one behind a slow link is given its time.

Pure: the clock (any steady one, in seconds) and the random numbers are passed in.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from itertools import accumulate
from typing import Literal

State = Literal["healthy", "suspect", "dead"]

DEAD_AFTER = 3
"""Failures in a row. Guessed: the second trial comes within two seconds."""

SLOW_IN_A_ROW = 2
"""Requests, one sent after the other, without an answer in time that count as a failure. Guessed: one pause of a loop or
disk is none."""

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
"""The usual pair: soon enough to meet a daemon that restarts, seldom enough for a host that is gone."""

SHORTEST_DEADLINE_S = 0.25
LONGEST_DEADLINE_S = 2.0
"""For the first byte. The upper bound is what a read pays when its peer hangs, before it turns to the store; the lower
covers a busy event loop, whatever the quantile says. Guessed; with 50 ms, four daemons on two processors gave each other up
once in 300 requests, and each time the store was asked twice."""

MARGIN = 2.0
"""Deadline over the 99th percentile. Guessed: one request in a hundred is late by definition, and not for that given up."""

FEWEST = 20
"""Answers before the histogram is believed. Derived: below that its 95th percentile is the maximum."""


class Latencies:
    """How long answers took lately, in seconds: buckets growing by a quarter, from 0.1 ms to 4 s. When 512 have come
    (`HALVED_AT`), all counts are halved, so the last few hundred speak."""

    SMALLEST_S = 1e-4
    GROWTH = 1.25
    BUCKETS = 49
    HALVED_AT = 512.0

    def __init__(self) -> None:
        self._counts = [0.0] * self.BUCKETS
        self.total = 0.0
        """Answers that the histogram stands for."""

    def add(self, seconds: float) -> None:
        index = math.ceil(math.log(max(seconds, self.SMALLEST_S) / self.SMALLEST_S, self.GROWTH) - 1e-9)
        self._counts[min(index, self.BUCKETS - 1)] += 1
        self.total += 1
        if self.total >= self.HALVED_AT:
            self._counts = [count / 2 for count in self._counts]
            self.total = sum(self._counts)

    def quantile(self, share: float) -> float:
        """The upper edge, in seconds, of the bucket that holds this quantile; at most a quarter too long. 0 without any
        answer."""
        if not self.total:
            return 0.0
        cumulative = list(accumulate(self._counts))
        index = min(bisect_left(cumulative, self.total * share - 1e-9), self.BUCKETS - 1)
        return self.SMALLEST_S * self.GROWTH**index


class Health:
    """What is known of one peer. `now` and `sent_at` are times of one steady clock."""

    def __init__(self, rng: random.Random) -> None:
        self.latencies = Latencies()
        self.failures = 0
        """In a row."""
        self.lying = False
        """It has sent bytes that are not the origin's. Nothing it does changes that."""
        self._slow = 0
        self._slow_at = -math.inf
        self._rng = rng
        self._next_trial = -math.inf
        self._failed_at = -math.inf

    @property
    def state(self) -> State:
        if self.lying:
            return "dead"
        if not self.failures:
            return "healthy"
        return "suspect" if self.failures < DEAD_AFTER else "dead"

    def may_try(self, now: float) -> bool:
        """Whether to send a request. For a peer that failed, True is the permission for one trial: others get False until
        it has been answered, or for as long as it may take."""
        if self.lying:
            return False
        if not self.failures:
            return True
        if now < self._next_trial:
            return False
        self._next_trial = now + LONGEST_DEADLINE_S
        return True

    def failed_since(self, moment: float) -> bool:
        """Whether there was a failure from that moment on."""
        return self._failed_at >= moment

    def succeeded(self, seconds: float) -> None:
        """An answer's first byte came after `seconds`: healthy, whatever was before."""
        self.latencies.add(seconds)
        self.failures = self._slow = 0

    def failed(self, sent_at: float, now: float) -> None:
        """No connection, a broken one, or a wrong answer. Requests that were under way at the last failure say nothing
        new: a hundred readers of one dead peer are one failure."""
        if sent_at < self._failed_at:
            return
        self.failures += 1
        self._slow = 0
        self._failed_at = now
        ceiling = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self.failures - 1, 32))
        self._next_trial = now + ceiling * self._rng.uniform(0.5, 1.0)

    def slow(self, sent_at: float, now: float) -> None:
        """Nothing came within the deadline, and it was given up. It is counted as an answer that took so long at least, so
        that the deadline of a peer that has become slower grows to what it needs."""
        self.latencies.add(now - sent_at)
        if sent_at >= self._slow_at:
            self._slow += 1
            self._slow_at = now
        if self.failures or self._slow >= SLOW_IN_A_ROW:
            self.failed(sent_at, now)

    def read_deadline(self) -> float:
        """Seconds to wait for the first byte, and between two pieces."""
        if self.latencies.total < FEWEST:
            return LONGEST_DEADLINE_S
        return min(LONGEST_DEADLINE_S, max(SHORTEST_DEADLINE_S, MARGIN * self.latencies.quantile(0.99)))

"""The health of each peer as this node sees it: whether it may get requests, how long to wait for it, and its counters.

A failure makes a peer *suspect*, several in a row make it *dead*. It then gets no requests during a pause, which doubles
with each further failure; after the pause one request tries the peer. Any success makes it healthy at once. A dead peer's
successors fetch what it owns. No member is removed here: the ring contains all members, and a reader skips an owner that may
not be tried.

Deadlines are derived from the peer's own answers, so a peer that always answered quickly is given up early, and one behind a
slow link is not. A peer that sends a byte a second is never silent, so `Pace` compares a transfer with the origin's rate.

Pure: the clock (any steady one, in seconds) and the random numbers are passed in."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from cachefs.peers.wire import Kind

State = Literal["healthy", "suspect", "dead"]

DEAD_AFTER = 3
"""Failures in a row after which a peer is dead. Derived: with these pauses, its second trial comes within two seconds."""

SLOW_IN_A_ROW = 2
"""So many requests in a row that got no answer in time count as a failure. Each must be sent after the previous one failed.
Derived: a single pause of an event loop or a disk is no failure."""

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
"""Pauses after a failure: the first is short enough for a daemon that restarts, the longest long enough for a lost host."""

SHORTEST_DEADLINE_S = 0.25
LONGEST_DEADLINE_S = 2.0
"""Bounds of the deadline for the first byte. When a peer hangs, a read waits up to the upper bound before it goes to the
origin. The lower bound covers a busy event loop. Measured: with 50 ms, four daemons on two processors gave each other up
once in 300 requests, and each time the origin served the block twice."""

ANSWERS, FEWEST = 128, 20
"""The deadline is set by that many recent answers, as soon as there are the fewest: by the second longest, because one may
be the pause of a process. Derived: of 128 that is about the 98th percentile, of 20 the 95th."""

TIMES_USUAL_ANSWER = 2.0
"""The deadline is so many times that answer: one request in fifty takes longer, and must not be given up."""

SLOWER_THAN_ORIGIN = 4.0
"""A peer may take so many times as long as the origin. The rates of both vary by a factor of two around their means, and a
transfer that is given up costs the origin a request."""

ALWAYS_ALLOWED_S = 5.0
"""Any range may take so long. Derived: longer than `client.SILENCE_S`, so that silence is reported as such; and short enough
to give up two slow peers within the usual `--timeout`."""

ASSUMED_RATE = 4 << 20
"""Assumed bytes a second of an origin that was not read yet; low, so that a slow link is not taken for a slow peer."""

LOOK_EVERY_S = 0.25
"""How often the pace of a transfer is checked. Derived: a twentieth of `ALWAYS_ALLOWED_S`."""

MAX_PEERS = 2048
"""Rows of counters; a further peer replaces the row used least recently. Derived: twice the nodes that a ring is tested
with, since addresses come and go with their nodes."""


class Health:
    """The state of one peer. `now` and `sent_at` are times of one steady clock."""

    def __init__(self, rng: random.Random) -> None:
        self._answers: deque[float] = deque(maxlen=ANSWERS)  # seconds to the first byte
        self.failures = 0  # in a row
        self.lying = False  # it has sent bytes that differ from the origin's; this is final
        self._slow = 0
        self._slow_at = -math.inf
        self._rng = rng
        self._next_trial = -math.inf
        self.failed_at = -math.inf  # the last time

    @property
    def state(self) -> State:
        if self.lying:
            return "dead"
        if not self.failures:
            return "healthy"
        return "suspect" if self.failures < DEAD_AFTER else "dead"

    def may_try(self, now: float) -> bool:
        """True if the caller may send a request. For a peer that failed, True permits one trial: other callers get False
        until the trial is answered, or for as long as an answer may take."""
        if self.lying:
            return False
        if not self.failures:
            return True
        if now < self._next_trial:
            return False
        self._next_trial = now + LONGEST_DEADLINE_S
        return True

    def succeeded(self, seconds: float) -> None:
        """Record that an answer's first byte came after `seconds`: the peer is healthy."""
        self._answers.append(seconds)
        self.failures = self._slow = 0

    def failed(self, sent_at: float, now: float) -> None:
        """Record that there was no connection, a broken one, or a wrong answer. Requests that were in flight at the last
        failure do not count again: a hundred readers of one dead peer are one failure."""
        if sent_at < self.failed_at:
            return
        self.failures += 1
        self._slow = 0
        self.failed_at = now
        ceiling = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self.failures - 1, 32))
        self._next_trial = now + ceiling * self._rng.uniform(0.5, 1.0)

    def slow(self, sent_at: float, now: float) -> None:
        """Record that no byte came in time. It counts as an answer after so long, so the deadline of a slower peer grows."""
        self._answers.append(now - sent_at)
        if sent_at >= self._slow_at:
            self._slow += 1
            self._slow_at = now
        if self.failures or self._slow >= SLOW_IN_A_ROW:
            self.failed(sent_at, now)

    def read_deadline(self) -> float:
        """Seconds to wait for the first byte, and between two pieces."""
        if len(self._answers) < FEWEST:
            return LONGEST_DEADLINE_S
        return min(
            LONGEST_DEADLINE_S, max(SHORTEST_DEADLINE_S, TIMES_USUAL_ANSWER * sorted(self._answers)[-2])
        )


@dataclass(frozen=True)
class Pace:
    """The rate that one transfer is compared with. `origin_rate` is the recent rate of one transfer from the origin, in
    bytes a second (0: not known). `others` is how many transfers from other peers share this node's link. The next block
    may take `patience_s`: a reader that waits so long can still read from the origin in time."""

    origin_rate: float = 0.0
    others: int = 0
    patience_s: float = math.inf

    def allowed_s(self, size: int) -> float:
        """Seconds that `size` bytes may take."""
        if not self.origin_rate:
            return max(ALWAYS_ALLOWED_S, SLOWER_THAN_ORIGIN * size / ASSUMED_RATE)
        return max(ALWAYS_ALLOWED_S, SLOWER_THAN_ORIGIN * (1 + self.others) * size / self.origin_rate)

    def too_slow(self, size: int, received: int, elapsed_s: float, since_last_s: float) -> bool:
        """True if a transfer of `size` bytes should be given up. At most `received` of them came in `elapsed_s`. The last
        block was complete `since_last_s` ago."""
        if since_last_s > self.patience_s:
            return True
        if elapsed_s < ALWAYS_ALLOWED_S or received >= size:
            return False
        return received <= 0 or elapsed_s * size / received > self.allowed_s(size)


@dataclass(slots=True)
class PeerStats:
    """Counters of one peer since this daemon started: our requests to it, and the bytes that it requested. `first_byte_s`
    is the sum over `answered` of the time from sending a request to the reply's head."""

    requests: int = 0
    bytes_in: int = 0
    failures: Counter[Kind] = field(default_factory=Counter)
    first_byte_s: float = 0.0
    answered: int = 0
    bytes_out: int = 0


class PeerTable:
    """The counters of each peer, in `rows`. Peers that we send requests to are keyed by address; clients by host, since
    their ports vary. On the trio thread only."""

    def __init__(self) -> None:
        self.rows: dict[str, PeerStats] = {}

    def of(self, peer: str) -> PeerStats:
        row = self.rows.pop(peer) if peer in self.rows else PeerStats()
        self.rows[peer] = row
        if len(self.rows) > MAX_PEERS:
            del self.rows[next(iter(self.rows))]
        return row

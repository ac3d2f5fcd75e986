"""An epoch over a directory as a model of events: workers that open one file after the other, a store with a round trip
and a bandwidth that all transfers share, and the policy between them. Times are seconds of the model."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence

from cachefs.prefetch.directories import Directory


class Store:
    """A request takes `latency_s` and its bytes; the link sends one transfer after the other."""

    def __init__(self, latency_s: float, bandwidth: float, size: int) -> None:
        self._latency_s = latency_s
        self._each_s = size / bandwidth
        self._free_at = 0.0

    def done_at(self, now: float) -> float:
        self._free_at = max(self._free_at, now + self._latency_s) + self._each_s
        return self._free_at


def raw_s(files: int, store: Store, in_flight: int = 64) -> float:
    """How long a client takes that keeps `in_flight` requests going."""
    now, flying = 0.0, [store.done_at(0.0) for _ in range(min(in_flight, files))]
    for _ in range(files - len(flying)):
        now = heapq.heappop(flying)
        heapq.heappush(flying, store.done_at(now))
    return max(flying)


def epoch(
    files: int, wanted: Sequence[int], store: Store, workers: int = 4, slots: int = 56
) -> tuple[float, int]:
    """(seconds, requests) for the workers to read `wanted` in turns."""
    policy = Directory()
    policy.files = files
    arrives: dict[int, float] = {}  # of everything that was ever asked for
    ahead: set[int] = set()
    orders: list[Iterator[int]] = [iter(wanted[w::workers]) for w in range(workers)]
    events: list[tuple[float, int]] = [(0.0, w) for w in range(workers)]
    cursor, flying, end = 0, 0, 0.0
    landing = workers  # an event that belongs to no worker
    while events:
        now, who = heapq.heappop(events)
        if who == landing:
            flying -= 1
        elif (file := next(orders[who], None)) is not None:
            if file not in arrives:
                policy.missed(now)
                arrives[file] = store.done_at(now)
            elif file in ahead:
                ahead.discard(file)
                policy.hit(now)
            heapq.heappush(events, (max(now, arrives[file]) + 0.0002, who))
        else:
            end = max(end, now)
        while flying < slots and policy.more_files() and cursor < files:
            if cursor not in arrives:
                policy.started()
                ahead.add(cursor)
                arrives[cursor] = store.done_at(now)
                flying += 1
                heapq.heappush(events, (arrives[cursor], landing))
            cursor += 1
    return end, len(arrives)


def shuffled(files: int, count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(files), count)

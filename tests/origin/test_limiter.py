"""The concurrency limit against simulated stores: cut where more in flight brings less, and nowhere else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.origin.attempts import FALLING, THROTTLED, Concurrency

MB = 10**6
REQUEST = 8 * MB


class Simulated:
    """A store that delivers `capacity(n)` bytes a second to n requests in flight, shared alike, with noise."""

    def __init__(self, maximum: int, noise: float = 0.03, request: int = REQUEST) -> None:
        self.policy = Concurrency(maximum)
        self.request = request
        self.now = 0.0
        self.noise = noise
        self.rng = random.Random(1)
        self.limits: list[int] = []
        self.delivered = 0

    def run(self, seconds: float, capacity: Callable[[int], float], *, full: bool = True) -> None:
        end = self.now + seconds
        while self.now < end:
            n = self.policy.limit
            rate = capacity(n) * self.rng.uniform(1 - self.noise, 1 + self.noise)
            # A round: each of n requests delivers a part of its bytes, and one after the other ends.
            for _ in range(n):
                self.now += self.request / rate
                self.policy.arrived(self.request)
                self.delivered += self.request
                self.policy.succeeded()
                self.policy.finished(full, self.now)
            self.limits.append(self.policy.limit)

    def share_at(self, limit: int) -> float:
        return sum(found >= limit for found in self.limits) / len(self.limits)


def bandwidth(n: int) -> float:
    """400 MB/s however many share it: latency grows with their number."""
    return 400.0 * MB


def latency(n: int) -> float:
    """Each request takes the same time, however many there are."""
    return n * 20.0 * MB


def thrash(n: int) -> float:
    """Beyond 16 they hinder each other: a disk that seeks."""
    return min(n, 16) * 25.0 * MB * min(1.0, 16 / n)


def falling(more: float) -> Callable[[int], float]:
    """Three quarters of the requests bring `more` times as much."""
    return lambda n: 400.0 * MB * (64 / n) ** math.log(more, 4 / 3)


@pytest.mark.parametrize(
    "capacity", [bandwidth, latency, falling(1.1)], ids=["bandwidth", "latency", "a tenth more"]
)
def test_a_store_that_does_what_it_can_is_not_cut(capacity: Callable[[int], float]) -> None:
    store = Simulated(64)
    store.run(600, capacity)
    assert store.policy.reason == ""
    assert store.delivered >= 0.98 * 600 * capacity(64) * 0.99
    assert set(store.limits) == {64, 48}, "it does look"


def test_small_files_whose_rate_varies_by_four_fifths_are_no_fall() -> None:
    store = Simulated(64, noise=0.8, request=100_000)
    store.run(120, bandwidth)
    assert store.policy.reason == "" and store.share_at(48) > 0.9


def test_a_fifth_more_at_three_quarters_is_clearly_more() -> None:
    store = Simulated(64)
    store.run(600, falling(1.2))
    assert store.policy.reason == FALLING and min(store.limits) == 1


def test_requests_that_hinder_each_other_become_fewer() -> None:
    store = Simulated(64)
    store.run(600, thrash)
    assert store.policy.reason == FALLING
    store.limits.clear()
    store.run(300, thrash)
    assert min(store.limits) >= 10 and store.share_at(28) < 0.1, sorted(set(store.limits))


def test_when_the_store_has_recovered_the_limit_grows_back() -> None:
    store = Simulated(64)
    store.run(300, thrash)
    assert store.policy.limit < 32
    store.run(1200, latency)
    assert store.policy.reason == ""
    store.limits.clear()
    store.run(100, latency)
    assert store.share_at(64) > 0.8


def test_a_fall_below_what_fewer_brought_is_noticed_at_once() -> None:
    store = Simulated(64)
    store.run(600, bandwidth)
    start, at = len(store.limits), store.now
    while store.policy.reason != FALLING:
        store.run(1, lambda n: 400.0 * MB * min(1.0, 40 / n) ** 2)
        assert store.now < at + 30
    assert min(store.limits[start:]) >= 27, "gently"


def test_a_store_that_is_slower_at_any_number_is_left_alone() -> None:
    store = Simulated(64)
    store.run(300, bandwidth)
    store.run(300, lambda n: 100.0 * MB)
    assert store.policy.reason == ""
    assert store.share_at(64) > 0.9


@pytest.mark.parametrize("idle", [False, True])
def test_readers_who_ask_for_less_are_no_reason(idle: bool) -> None:
    store = Simulated(64)
    store.run(100, latency)
    calls = len(store.limits)
    for step in range(50):
        if idle:
            store.now += 30
        store.run(5, lambda n, step=step: latency(64) / (1 + step % 7), full=False)
    assert set(store.limits[calls + 20 :]) == {64}
    assert store.policy.reason == ""


def test_throttling_ends_a_look_and_says_why() -> None:
    store = Simulated(64)
    while store.policy.limit == 64:
        store.run(1, bandwidth)
    assert (store.policy.limit, store.policy.reason) == (48, "")
    store.policy.throttled(store.now, store.now)
    assert (store.policy.limit, store.policy.reason) == (32, THROTTLED)
    for _ in range(64 * 64):
        store.policy.succeeded()
    assert (store.policy.limit, store.policy.reason) == (64, "")


@given(
    st.integers(1, 70),
    st.lists(
        st.tuples(st.floats(0.001, 3), st.integers(0, 10**9), st.booleans(), st.booleans()), max_size=400
    ),
)
def test_whatever_arrives_the_limit_stays_in_bounds(
    maximum: int, events: list[tuple[float, int, bool, bool]]
) -> None:
    policy, now = Concurrency(maximum), 0.0
    for pause, count, full, good in events:
        now += pause
        policy.arrived(count)
        if good:
            policy.succeeded()
        elif count % 7 == 0:
            policy.throttled(now - pause / 2, now)
        for _ in range(policy.limit):
            policy.finished(full, now)
        assert 1 <= policy.limit <= maximum
        assert policy.admits(0, background=True), "background work must never starve for ever"

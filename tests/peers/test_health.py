"""Which peers are asked, when again, and for how long: by table, and what holds after any history."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.peers.health import (
    DEAD_AFTER,
    FEWEST,
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    LONGEST_DEADLINE_S,
    SHORTEST_DEADLINE_S,
    Health,
)


class Longest(random.Random):
    """Jitter that never shortens."""

    def uniform(self, a: float, b: float) -> float:
        return b


def health() -> Health:
    return Health(Longest())


def test_a_new_peer_is_asked() -> None:
    peer = health()
    assert peer.state == "healthy"
    assert all(peer.may_try(0.0) for _ in range(100))


def test_failures_double_the_wait_up_to_thirty_seconds_and_one_trial_each() -> None:
    peer = health()
    now, waits, states = 100.0, [], []
    for _ in range(9):
        peer.failed(now, now)
        states.append(peer.state)
        start = now
        while not peer.may_try(now):
            now += 0.125
        waits.append(now - start)
        assert not peer.may_try(now), "one trial"
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert states == ["suspect", "suspect"] + ["dead"] * 7


def test_a_trial_is_not_given_up_for_what_failed_before_it() -> None:
    peer = health()
    assert peer.failed_at < 0.0
    peer.failed(0.0, 0.0)
    assert peer.failed_at >= 0.0 and peer.may_try(1.0)
    assert peer.failed_at < 1.0
    peer.failed(1.0, 2.0)
    assert peer.failed_at >= 1.0


def test_a_trial_that_is_never_answered_is_repeated() -> None:
    peer = health()
    peer.failed(0.0, 0.0)
    assert peer.may_try(1.0)
    assert not peer.may_try(1.0 + LONGEST_DEADLINE_S - 0.01)
    assert peer.may_try(1.0 + LONGEST_DEADLINE_S)


def test_a_success_makes_healthy_and_forgets_the_backoff() -> None:
    peer = health()
    for second in range(8):
        peer.failed(float(second), float(second))
    peer.succeeded(0.01)
    assert peer.state == "healthy" and peer.may_try(7.0) and peer.may_try(7.0)
    peer.failed(8.0, 8.0)
    assert peer.state == "suspect" and peer.may_try(8.0 + FIRST_BACKOFF_S)


def test_a_hundred_readers_of_a_peer_that_dies_are_one_failure() -> None:
    peer = health()
    for reader in range(100):
        peer.failed(sent_at=10.0 + reader / 1000, now=11.0 + reader / 1000)
    assert peer.failures == 1
    peer.failed(sent_at=12.0, now=12.1)
    assert peer.failures == 2


@pytest.mark.parametrize(
    ("slow", "state"),
    [
        ([(0.0, 0.2)], "healthy"),
        ([(0.0, 0.2), (0.05, 0.25), (0.1, 0.3)], "healthy"),  # one pause, three readers
        ([(0.0, 0.2), (0.2, 0.4)], "suspect"),
    ],
)
def test_being_slow_again_is_a_failure(slow: list[tuple[float, float]], state: str) -> None:
    peer = health()
    for sent_at, now in slow:
        peer.slow(sent_at, now)
    assert peer.state == state


def test_an_answer_between_two_slow_ones() -> None:
    peer = health()
    peer.slow(0.0, 0.2)
    peer.succeeded(0.01)
    peer.slow(0.3, 0.5)
    assert peer.state == "healthy"


@pytest.mark.parametrize(
    ("answers", "shortest", "longest"),
    [
        ([], 2.0, 2.0),
        ([0.001] * (FEWEST - 1), 2.0, 2.0),
        ([0.001] * 200, 0.25, 0.25),
        ([0.200] * 200, 0.4, 0.5),
        ([0.001] * 150 + [0.300] * 10, 0.6, 0.75),  # one in sixteen is of the slow kind
        ([0.001] * 200 + [1.5], 0.25, 0.25),  # a single pause
        ([3.0] * 50, 2.0, 2.0),
        ([0.300] * 300 + [0.001] * 3000, 0.25, 0.25),  # what was long ago is forgotten
    ],
)
def test_read_deadlines(answers: list[float], shortest: float, longest: float) -> None:
    peer = health()
    for seconds in answers:
        peer.succeeded(seconds)
    assert shortest <= peer.read_deadline() <= longest


def test_the_deadline_of_a_peer_that_became_slower_grows_to_what_it_needs() -> None:
    peer = health()
    for _ in range(300):
        peer.succeeded(0.001)
    now, needs, given_up = 0.0, 0.5, 0
    for _ in range(60):
        if needs <= peer.read_deadline():
            peer.succeeded(needs)
        else:
            given_up += 1
            peer.slow(now, now + peer.read_deadline())
        now += 60.0
    assert needs <= peer.read_deadline() and given_up < 30 and peer.state == "healthy"


EVENTS = st.lists(
    st.tuples(st.sampled_from(["succeeded", "failed", "slow", "try"]), st.floats(0, 40), st.floats(0, 5)),
    max_size=60,
)


@given(events=EVENTS, seed=st.integers(0, 100))
def test_after_any_history(events: list[tuple[str, float, float]], seed: int) -> None:
    peer = Health(random.Random(seed))
    now = 0.0
    for what, later, took in events:
        now += later
        match what:
            case "succeeded":
                peer.succeeded(took)
                assert peer.state == "healthy" and peer.may_try(now)
            case "failed":
                peer.failed(now, now)
                assert not peer.may_try(now + FIRST_BACKOFF_S / 2 - 0.01)
            case "slow":
                peer.slow(now, now + took)
                now += took
            case "try":
                peer.may_try(now)
        assert (peer.state == "healthy") == (peer.failures == 0)
        assert (peer.state == "dead") == (peer.failures >= DEAD_AFTER)
        assert SHORTEST_DEADLINE_S <= peer.read_deadline() <= LONGEST_DEADLINE_S
    assert peer.may_try(now + LONGEST_BACKOFF_S), "nobody is left alone for longer"

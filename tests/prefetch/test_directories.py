"""The ratio by which a directory is fetched ahead of its readers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.prefetch.directories import (
    Directory,
    share,
)
from tests.prefetch.model import Store, epoch, raw_s, shuffled

FILES = 4000


def store() -> Store:
    return Store(latency_s=0.02, bandwidth=100e6, size=100_000)


@pytest.mark.parametrize(
    ("demanded", "expected"), [(0, 0), (0.01, 0.015), (0.05, 0.075), (0.1, 0.675), (0.13, 1), (1, 1)]
)
def test_the_share_that_may_lie_unused(demanded: float, expected: float) -> None:
    assert share(demanded) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_shuffled_epoch_comes_near_to_a_raw_client(seed: int) -> None:
    seconds, requests = epoch(FILES, shuffled(FILES, FILES, seed), store())
    assert requests == FILES
    assert raw_s(FILES, store()) / seconds >= 0.85


def test_without_it_the_epoch_waits_for_round_trips() -> None:
    """What the model says of four workers alone, so that the figure above means something."""
    alone = FILES * (0.02 + 0.001) / 4
    assert raw_s(FILES, store()) / alone < 0.25


@pytest.mark.parametrize("wanted", [0.01, 0.025, 0.05])
@pytest.mark.parametrize("seed", range(3))
def test_a_wanted_twentieth_wastes_a_twelfth(wanted: float, seed: int) -> None:
    count = int(FILES * wanted)
    _, requests = epoch(FILES, shuffled(FILES, count, seed), store())
    assert requests <= count + 0.08 * FILES


def test_in_order_the_window_runs_ahead() -> None:
    seconds, requests = epoch(FILES, range(FILES), store())
    assert requests == FILES
    assert raw_s(FILES, store()) / seconds >= 0.85


def test_a_part_that_is_not_spread_evenly_is_left_alone() -> None:
    """The last eighth is wanted, and fetched ahead is from the front: chance would give more hits than none."""
    policy = Directory()
    policy.files = FILES
    for _ in range(FILES // 8):
        policy.missed(0.0)
        for _ in range(policy.more_files()):
            policy.started()
    assert policy.rarely_used and not policy.more_files()
    assert policy.unused < FILES // 4


def test_an_epoch_begins_anew_and_what_lies_fetched_goes_over() -> None:
    policy = Directory()
    policy.files = 400
    for number in range(400):
        policy.in_epoch(1 if number else 0)  # nothing was known of the data set at its first file
        policy.missed(0.0)
    assert policy.demanded == 400 and not policy.more_files()
    policy.fetched = 7
    policy.in_epoch(2)
    assert (policy.demanded, policy.unused) == (0, 7)
    for _ in range(30):
        policy.in_epoch(2)
        policy.missed(0.0)
    assert policy.demanded == 30 and policy.more_files() and policy.begin_pass()


def test_how_many_there_are_may_not_be_known_yet() -> None:
    policy = Directory()
    for _ in range(10):
        policy.missed(0.0)
    assert policy.more_files() == 15


def test_what_failed_may_be_tried_again_and_what_was_lost_is_waste() -> None:
    policy = Directory()
    policy.files = 100
    for _ in range(3):
        policy.missed(0.0)
    wish = policy.more_files()
    policy.started()
    assert policy.more_files() == wish - 1
    policy.failed()
    assert policy.more_files() == wish


def test_a_long_listing_is_not_gone_through_for_every_file() -> None:
    policy = Directory()
    policy.files = 3200
    passes = 0
    for _ in range(1000):
        policy.missed(0.0)
        passes += policy.begin_pass()
    assert passes == 10  # one for a hundred files


@given(
    st.integers(1, 500),
    st.lists(st.booleans(), max_size=300),
)
def test_what_lies_unused_never_passes_the_share(files: int, events: list[bool]) -> None:
    policy = Directory()
    policy.files = files
    waiting: list[int] = []
    for hit in events:
        if hit and waiting:
            waiting.pop()
            policy.hit(0.0)
        else:
            policy.missed(0.0)
        before, unused = policy.demanded, policy.unused
        for _ in range(policy.more_files()):
            policy.started()
            waiting.append(-len(waiting))
        assert policy.more_files() == 0 and policy.unused == len(waiting)
        assert len(waiting) <= max(unused, min(share(before / files) * files, files - before))
    assert policy.used <= policy.demanded

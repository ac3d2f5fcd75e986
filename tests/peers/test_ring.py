"""Ownership: everybody agrees, only what must move moves, and shares follow weights."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import ring as measured
from cachefs.peers.membership import REMEMBERED, Ring

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
WEIGHTS = st.sampled_from([0.5, 1.0, 1.0, 1.0, 2.0, 7.0])
MEMBERS = st.dictionaries(NAMES, WEIGHTS, min_size=1, max_size=12)
DIGESTS = st.binary(min_size=16, max_size=16)
EXTENTS = st.integers(0, 2**40)


def nodes(count: int) -> dict[str, float]:
    return {f"10.0.{i // 250}.{i % 250 + 1}:7070": 1.0 for i in range(count)}


def shares(ring: Ring, count: int, seed: int = 1) -> Counter[str]:
    """Who owns `count` random extents."""
    rng = random.Random(seed)
    return Counter(ring.owners(rng.randbytes(16), rng.randrange(64))[0] for _ in range(count))


@given(members=MEMBERS, digest=DIGESTS, extent=EXTENTS, order=st.randoms(use_true_random=False))
def test_nodes_with_the_same_members_agree(
    members: dict[str, float], digest: bytes, extent: int, order: random.Random
) -> None:
    shuffled = list(members.items())
    order.shuffle(shuffled)
    mine, theirs = Ring(members), Ring(dict(shuffled))
    for count in (1, 2, len(members) + 1):
        assert mine.owners(digest, extent, count) == theirs.owners(digest, extent, count)


@given(members=MEMBERS, digest=DIGESTS, extent=EXTENTS)
def test_owners_are_an_order_of_all_members(members: dict[str, float], digest: bytes, extent: int) -> None:
    ring = Ring(members)
    everybody = ring.owners(digest, extent, len(members) + 5)
    assert sorted(everybody) == sorted(members)
    for count in range(len(members) + 1):
        assert ring.owners(digest, extent, count) == everybody[:count]


@given(members=MEMBERS, leaver=st.integers(0, 11), digest=DIGESTS, extent=EXTENTS)
def test_a_leaver_s_extents_move_and_no_others(
    members: dict[str, float], leaver: int, digest: bytes, extent: int
) -> None:
    gone = sorted(members)[leaver % len(members)]
    before = Ring(members).owners(digest, extent, len(members))
    after = Ring({n: w for n, w in members.items() if n != gone}).owners(digest, extent, len(members))
    assert after == tuple(name for name in before if name != gone)


@given(members=MEMBERS, digest=DIGESTS, extent=EXTENTS, grown=st.integers(0, 11))
def test_more_weight_takes_extents_and_gives_none(
    members: dict[str, float], digest: bytes, extent: int, grown: int
) -> None:
    name = sorted(members)[grown % len(members)]
    before = Ring(members).owners(digest, extent)
    after = Ring({**members, name: members[name] * 2}).owners(digest, extent)
    assert after in (before, (name,))


@given(members=MEMBERS, digest=DIGESTS)
def test_who_has_no_weight_owns_nothing(members: dict[str, float], digest: bytes) -> None:
    name = min(members)
    ring = Ring({**members, name: 0.0})
    assert name not in ring.owners(digest, 0, len(members))
    assert len(ring.owners(digest, 0, len(members))) == len(members) - 1


def test_nobody_is_there() -> None:
    assert Ring({}).owners(bytes(16), 0, 3) == ()


def test_other_processes_agree() -> None:
    """Nothing in it depends on the hash seed of a process."""
    program = (
        "from cachefs.peers.membership import Ring;"
        "print([Ring({'a:1': 1, 'b:1': 1, 'c:1': 2, 'é:1': 1}).owners(bytes([i] * 16), i, 2) for i in range(20)])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ring = Ring({"é:1": 1, "c:1": 2, "b:1": 1, "a:1": 1})
    assert said.stdout.strip() == str([ring.owners(bytes([i] * 16), i, 2) for i in range(20)])


def test_placement_is_as_it_always_was() -> None:
    """Nodes of several releases share one ring: another hash would need another version of the protocol."""
    ring = Ring({"10.0.0.1:7070": 1, "10.0.0.2:7070": 1, "10.0.0.3:7070": 2.5})
    assert "".join(ring.owners(bytes([i] * 16), i)[0][7] for i in range(32)) == PLACEMENT


PLACEMENT = "32312113113121221213333311331333"


@pytest.mark.parametrize("count", [3, 10, 100])
def test_shares_are_even(count: int) -> None:
    """By chi-square against what chance allows (five standard deviations of its distribution, nearly normal here)."""
    per_member = 2000 if count < 100 else 400
    found = shares(Ring(nodes(count)), per_member * count)
    chi = sum((found[name] - per_member) ** 2 / per_member for name in nodes(count))
    freedom = count - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom) + 10
    if count == 10:
        assert max(found.values()) <= 1.1 * per_member


def test_shares_follow_weights() -> None:
    weights = {"a": 0.25, "b": 1.0, "c": 1.0, "d": 3.0, "e": 10.0}
    sample = 40_000
    found = shares(Ring(weights), sample)
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(found[name] / sample - share) < 5 * math.sqrt(share * (1 - share) / sample)


def test_what_a_leaver_had_is_spread_over_the_rest() -> None:
    members = nodes(6)
    gone, *rest = members
    ring = Ring(members)
    rng = random.Random(3)
    successors: Counter[str] = Counter()
    for _ in range(30_000):
        first, second = ring.owners(rng.randbytes(16), 0, 2)
        if first == gone:
            successors[second] += 1
    assert set(successors) == set(rest)
    assert 4500 < successors.total() < 5500
    assert max(successors.values()) < 1.2 * min(successors.values())


def test_extents_of_one_object_are_spread() -> None:
    ring = Ring(nodes(8))
    found = Counter(ring.owners(b"o" * 16, extent)[0] for extent in range(8000))
    assert len(found) == 8
    assert max(found.values()) < 1.15 * 1000


def test_answers_kept_are_bounded_and_the_same() -> None:
    ring = Ring(nodes(5))
    first = [ring.owners(b"o" * 16, extent) for extent in range(2 * REMEMBERED)]
    assert ring.owners.cache_info().currsize == REMEMBERED
    assert [ring.owners(b"o" * 16, extent) for extent in range(2 * REMEMBERED)] == first


def test_the_bound_that_is_measured_at_a_thousand_members_finds_an_uneven_ring() -> None:
    even = Counter(dict.fromkeys(measured.members(100), 400))
    assert measured.largest(100, measured.unevenness(even, 100)) < 1.1
    fair = measured.counted(Ring(measured.members(100)), 40_000)
    assert fair.total() == 40_000
    assert measured.unevenness(fair, 100) < 0.05
    worse = Counter({name: 300 if number % 2 else 500 for number, name in enumerate(measured.members(100))})
    assert 0.24 < measured.unevenness(worse, 100) < 0.27
    assert measured.largest(100, measured.unevenness(worse, 100)) > 1.5

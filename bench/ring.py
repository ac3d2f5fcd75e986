"""Who owns how much: the ring of peers at 10, 100 and 1,000 members. No mount and no store; only hashes are asked.

A thousand members with 100,000 extents each are 10^8 owners to ask for, more than an hour. So the largest share is not
counted there but bounded: a sample is counted, and what its shares vary beyond chance is how uneven the ring may be,
with two standard errors added. The largest of n shares is then the mean plus as many standard deviations as the largest
of n normal deviates has, and the variance is chance at 100,000 extents plus that unevenness. At ten members all are
counted.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from statistics import NormalDist

from bench.harness import Result, Series, scenario
from bench.workspace import Workspace
from cachefs.peers.membership import Ring

EACH = 100_000
"""Extents of each member in the demand: 1.6 TB."""

SAMPLES = {10: 10 * EACH, 100: 1_000_000, 1000: 400_000}
"""Members → extents counted. Derived: together less than a minute."""

MOVING = 20_000


def members(count: int) -> dict[str, float]:
    return {f"10.0.{number // 250}.{number % 250 + 1}:7070": 1.0 for number in range(count)}


def counted(ring: Ring, sample: int, seed: int = 1) -> Counter[str]:
    """How many of `sample` extents each member owns: those of objects of 16 extents."""
    dice = random.Random(seed)
    owners: Counter[str] = Counter()
    for _ in range(-(-sample // 16)):
        digest = dice.randbytes(16)
        owners.update(ring.owners(digest, extent)[0] for extent in range(16))
    return owners


def unevenness(owners: Counter[str], count: int) -> float:
    """Upper bound of the standard deviation of the true shares over their mean: the counted deviation beyond chance, plus
    two standard errors of it."""
    mean = owners.total() / count
    variance = sum((owners[name] - mean) ** 2 for name in members(count)) / (count - 1)
    beyond = variance / mean - 1  # chance alone: as many as the mean
    return math.sqrt(max(0.0, beyond + 2 * math.sqrt(2 / (count - 1))) / mean)


def largest(count: int, uneven: float, each: int = EACH) -> float:
    """Largest share over the mean, as expected of `count` members with `each` extents and that unevenness."""
    return 1 + NormalDist().inv_cdf(1 - 1 / (2 * count)) * math.sqrt(1 / each + uneven**2)


@scenario("ring")
def ring(work: Workspace, rounds: int) -> Result:
    """Shares of the ring of peers, what moves when members come and go, and the cost of a lookup."""
    result = Result()
    cost = Series("asking for an owner", "µs", {})
    for count, sample in SAMPLES.items():
        asked = Ring(members(count))
        begun = time.perf_counter()
        owners = counted(asked, sample)
        cost.values[f"{count} members"] = [(time.perf_counter() - begun) / sample * 1e6]
        if sample >= count * EACH:
            share = max(owners.values()) / (owners.total() / count)
            how = f"all {sample:,} extents were counted"
        else:
            uneven = unevenness(owners, count)
            share = largest(count, uneven)
            seen = max(owners.values()) / (owners.total() / count)
            how = (
                f"{sample:,} extents were counted, whose largest share was {seen:.3f}; shares are uneven by at most "
                f"{uneven:.2%} beyond chance"
            )
        result.demand(f"largest share / mean, {count:,} members, 100,000 extents each", share, "≤", 1.1)
        result.note(f"{count:,} members: {how}")
    result.series.append(cost)

    everybody = members(100)
    gone = min(everybody)
    before, after = Ring(everybody), Ring({name: 1.0 for name in everybody if name != gone})
    dice = random.Random(2)
    digests = [dice.randbytes(16) for _ in range(MOVING)]
    pairs = [(before.owners(digest, 0)[0], after.owners(digest, 0)[0]) for digest in digests]
    result.demand(
        "extents that move although both owners are there",
        sum(old != new and old != gone for old, new in pairs),
        "=",
        0,
    )
    result.demand(
        "extents that move when 1 of 100 leaves or joins / all",
        sum(old != new for old, new in pairs) / MOVING,
        "≤",
        0.02,
    )
    return result

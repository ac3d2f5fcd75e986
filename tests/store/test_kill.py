"""kill -9 in the middle of everything; then every byte is compared."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from cachefs.base.names import ObjectId
from cachefs.store import scrub
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store.lab import MIB, killed_at_random, running

COUNT, SIZE, PREFIX = 40, 700_001, "object"


@functools.cache
def bytes_of_all() -> list[bytes]:
    return [content(f"{PREFIX}{i}", SIZE) for i in range(COUNT)]


def origin_of_all() -> tuple[ScriptedOrigin, list[ObjectId], list[bytes]]:
    origin = ScriptedOrigin(chunk=16 << 10)
    data = bytes_of_all()
    return origin, [origin.put(f"k{i}", d) for i, d in enumerate(data)], data


async def filler(place: Path, seed: int, ready: Callable[[], None]) -> None:
    """The child: reads at random under pressure, with flushes, spills and evictions, until it is killed."""
    rng = random.Random(seed)
    origin, ids, data = origin_of_all()
    async with running(place, origin, ssd=12 * MIB, ram=4 * MIB, background=True) as lab:

        async def reader() -> None:
            while True:
                i = rng.randrange(COUNT)
                offset = rng.randrange(SIZE)
                size = min(SIZE - offset, 200_000)
                assert await lab.read(ids[i], offset, size) == data[i][offset : offset + size]

        async def flusher() -> None:
            while True:
                await trio.sleep(0.02)
                await lab.store.flush()

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(reader)
            nursery.start_soon(flusher)
            ready()


@pytest.mark.long
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_kills_in_the_middle_of_transfers_never_make_a_wrong_byte(cache_dir: Path, kills: int) -> None:
    for kill in killed_at_random(filler, cache_dir, kills):
        look(cache_dir, ("first", "none", "full")[kill % 3])


@in_trio
async def look(cache_dir: Path, verify: str) -> None:
    origin, ids, data = origin_of_all()
    async with running(cache_dir, origin, ssd=12 * MIB, ram=4 * MIB, verify=verify) as lab:
        await scrub(lab.store)
        lab.check_accounts()
        for i, d in zip(ids, data, strict=True):
            assert await lab.read(i, 100_000, 300_000) == d[100_000:400_000]
        assert lab.metrics.checksum_failures == 0, (
            "a kill loses no bytes that the index knows: the kernel has them"
        )
        await lab.quiet()
        lab.check_accounts()

"""Caches that are too small, crowded or absent: slower, never an error, never a wrong byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.fetch.fetcher import ATTEMPTS
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, KIB, MIB, running, until

WAYS = {
    "no tier": (0, 0, 64 * KIB),
    "one block": (BLOCK, 0, 64 * KIB),
    "two blocks": (2 * BLOCK, 0, 64 * KIB),
    "one extent": (EXTENT, 0, 64 * KIB),
    "half an object": (24 * BLOCK, 0, 64 * KIB),
    "ram of one block, ssd of three": (3 * BLOCK, BLOCK, 64 * KIB),
    "ram only, one extent": (0, EXTENT, 64 * KIB),
    "no tier, 1 MiB blocks": (0, 0, MIB),
    "no tier, 4 MiB blocks": (0, 0, 4 * MIB),
    "one 4 MiB block": (4 * MIB, 0, 4 * MIB),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("piece", [4 * KIB, pytest.param(128 * KIB, marks=pytest.mark.long), MIB])
@pytest.mark.parametrize("size", [3 * MIB + 5, 9 * MIB + 5])
@in_trio
async def test_any_read_the_kernel_can_send_is_answered(
    cache_dir: Path, way: str, piece: int, size: int
) -> None:
    """The kernel asks for up to 1 MiB at once, anywhere in the file."""
    ssd, ram, block = WAYS[way]
    rng = random.Random(f"{way} {piece} {size}")
    async with running(cache_dir, ssd=ssd, ram=ram, block=block, background=True) as lab:
        data = content(size, size)
        object_id = lab.origin.put("k", data)
        offsets = [size - piece, size // 2, *(rng.randrange(size - piece) for _ in range(6))]
        for offset in offsets:
            assert await lab.read(object_id, offset, piece) == data[offset : offset + piece]
        await lab.quiet()
        for tier in lab.store.tiers:
            assert tier.used_bytes <= tier.cap_bytes


@pytest.mark.parametrize("way", WAYS)
@in_trio
async def test_sequential_reading_does_not_fetch_things_many_times(cache_dir: Path, way: str) -> None:
    """A tenth at most: in a cache of one extent a block may go before its reader comes, if the threads' turns fall so."""
    ssd, ram, block = WAYS[way]
    async with running(cache_dir, ssd=ssd, ram=ram, block=block, readahead=8 * MIB) as lab:
        data = content(1, 9 * MIB + 5)
        object_id = lab.origin.put("k", data)
        handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        for offset in range(0, len(data), 128 * KIB):
            length = min(128 * KIB, len(data) - offset)
            assert await lab.read_open(handle, offset, length) == data[offset : offset + length]
        lab.fetcher.close(handle)
        await lab.quiet()
        assert lab.origin.delivered <= 1.1 * len(data) + block


@pytest.mark.parametrize(
    "ram, ssd, block",
    [
        (0, 2 * MIB, BLOCK),
        (1 * MIB, 1 * MIB, BLOCK),
        pytest.param(2 * MIB, 0, BLOCK, marks=pytest.mark.long),
        pytest.param(0, 2 * BLOCK, BLOCK, marks=pytest.mark.long),
        (0, 0, BLOCK),
        (0, 4 * MIB, 1 * MIB),
    ],
)
@in_trio
async def test_a_hundred_concurrent_readers_over_a_cache_of_five_percent(
    cache_dir: Path, ram: int, ssd: int, block: int
) -> None:
    async with running(cache_dir, ram=ram, ssd=ssd, block=block, readahead=MIB, background=True) as lab:
        rng = random.Random(f"{ram} {ssd}")
        sizes = [rng.choice([5_000, 100_000, 700_001, 2 * MIB + 1]) for _ in range(47)] + [6 * MIB + 3]
        data = [content(i, size) for i, size in enumerate(sizes)]
        ids = [lab.origin.put(f"k{i}", d) for i, d in enumerate(data)]

        async def reader(number: int) -> None:
            mine = random.Random(number)
            for _ in range(3):
                i = mine.randrange(len(ids))
                handle = lab.fetcher.open(lab.origin, ids[i])  # type: ignore[arg-type]
                at = mine.randrange(sizes[i]) if mine.random() < 0.5 else 0
                for _ in range(6):
                    length = min(128 * KIB, sizes[i] - at)
                    if length <= 0:
                        break
                    assert await lab.read_open(handle, at, length, number) == data[i][at : at + length]
                    at += length
                lab.fetcher.close(handle)
            for tier in lab.store.tiers:
                assert tier.used_bytes <= tier.cap_bytes

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(reader, number)
        await lab.quiet()
        await trio.sleep(0.02)
        lab.check_accounts()


@in_trio
async def test_a_read_whose_blocks_always_vanish_gets_them_in_the_end(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if other readers' blocks drove them out each time, before this reader ran."""
    async with running(cache_dir, ssd=4 * MIB) as lab:
        data = content(1, 3 * BLOCK)
        object_id = lab.origin.put("k", data)
        joined = 0

        def join(*what: object, **how: object) -> list[object]:
            nonlocal joined
            joined += 1
            return []

        monkeypatch.setattr(lab.fetcher, "_join_or_fetch", join)
        assert await lab.read(object_id, BLOCK - 5, BLOCK + 10) == data[BLOCK - 5 :][: BLOCK + 10]
        await lab.quiet()
        assert (joined, lab.origin.delivered) == (ATTEMPTS - 1, 3 * BLOCK)
        assert lab.store.tiers[0].used_bytes == 0
        lab.check_accounts()


@in_trio
async def test_many_readers_of_large_blocks_without_any_tier(cache_dir: Path) -> None:
    """More blocks are on their way than the heap keeps."""
    async with running(cache_dir, ssd=0, block=4 * MIB) as lab:
        data = [content(i, 5 * MIB) for i in range(16)]
        ids = [lab.origin.put(f"k{i}", d) for i, d in enumerate(data)]

        async def read(i: int) -> None:
            for offset in (0, 3 * MIB + MIB // 2, 4 * MIB):
                assert await lab.read(ids[i], offset, MIB) == data[i][offset : offset + MIB]

        async with trio.open_nursery() as nursery:
            for i in range(16):
                nursery.start_soon(read, i)


@pytest.mark.long
@in_trio
async def test_the_memory_of_readers_without_a_tier_is_bounded(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=0, block=4 * MIB) as lab:
        for i in range(20):
            earlier = lab.origin.put(f"earlier{i}", content(i, 4 * MIB))
            assert await lab.read(earlier, 0, KIB) == content(i, 4 * MIB)[:KIB]
        ids = [lab.origin.put(f"k{i}", content(i, 4 * MIB)) for i in range(40)]
        holds = [lab.origin.hold(f"k{i}", MIB) for i in range(40)]
        done = 0

        async def read(i: int) -> None:
            nonlocal done
            assert await lab.read(ids[i], 3 * MIB, KIB) == content(i, 4 * MIB)[3 * MIB :][:KIB]
            done += 1

        async with trio.open_nursery() as nursery:
            for i in range(40):
                nursery.start_soon(read, i)
            await until(lambda: sum(hold.reached.is_set() for hold in holds) >= 16, 10)
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert lab.fetcher.in_flight_fetches == 40
            assert lab.origin.most_in_flight == 16
            in_flight = lab.fetcher._heap_slots.borrowed_tokens * lab.store.block_size
            assert in_flight == 64 * MIB
            assert in_flight + lab.store.space.heap._bytes < 100 * MIB, "what docs/guarantees.md promises"
            for hold in holds:
                hold.release.set()
        assert done == 40
        await lab.quiet()
        assert lab.fetcher._heap_slots.borrowed_tokens == 0

"""What is fetched ahead: everything once for a sequential reader, nothing for a random one, never more than a window."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from cachefs.fetch import Readahead
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, KIB, MIB, running


@pytest.mark.parametrize("piece", [4 * KIB, 128 * KIB, MIB])
@pytest.mark.parametrize("size", [5 * MIB + 7, 24 * MIB])
@in_trio
async def test_sequential_reading_fetches_every_byte_exactly_once(
    cache_dir: Path, piece: int, size: int
) -> None:
    if piece == 4 * KIB and size > 6 * MIB:
        size = 8 * MIB
    async with running(cache_dir, ssd=256 * MIB, readahead=16 * MIB) as lab:
        data = content(1, size)
        object_id = lab.origin.put("k", data)
        handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        for offset in range(0, size, piece):
            length = min(piece, size - offset)
            assert await lab.read_open(handle, offset, length) == data[offset : offset + length]
        lab.fetcher.close(handle)
        await lab.quiet()
        assert lab.origin.delivered == size
        assert sum(g.background for g in lab.origin.gets) > 0
        assert len(lab.origin.gets) < size / BLOCK / 3, "windows double, and requests with them"


@in_trio
async def test_reading_stays_behind_what_is_on_its_way_and_the_window_is_bounded(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=512 * MIB, readahead=2 * MIB) as lab:
        data = content(1, 24 * MIB)
        object_id = lab.origin.put("k", data)
        handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        for offset in range(0, len(data), 128 * KIB):
            await lab.read_open(handle, offset, 128 * KIB)
            furthest = max(g.stop for g in lab.origin.gets)
            assert furthest <= offset + 128 * KIB + 2 * MIB + BLOCK
            if offset > 8 * MIB and offset < 20 * MIB:
                assert furthest >= offset + 128 * KIB
        lab.fetcher.close(handle)


@pytest.mark.parametrize("size", [64 * MIB, 256 * MIB, 4096 * MIB])
def test_random_reads_ask_for_next_to_nothing_ahead(size: int) -> None:
    extra = 0
    for seed in range(10):
        rng = random.Random(seed)
        policy = Readahead(size, MIB, 64)
        own, ahead = set(), set()
        for _ in range(30):
            at = rng.randrange(1, size // 4096) * 4096
            own.add(at // MIB)
            ahead.update(policy.observe(7, at, 4096))
        extra += len(ahead - own)
    assert extra <= 30, f"{extra} blocks fetched beside the blocks of 300 random reads"


@in_trio
async def test_random_reads_fetch_exactly_their_blocks(cache_dir: Path) -> None:
    rng = random.Random(1)
    async with running(cache_dir, ssd=256 * MIB, readahead=16 * MIB) as lab:
        data = b"\0" * (1 << 20) * 100
        object_id = lab.origin.put("k", data)
        handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        blocks = set()
        for _ in range(12):
            at = rng.randrange(1, len(data) // 4096) * 4096
            blocks.add(at // BLOCK)
            await lab.read_open(handle, at, 4096)
        lab.fetcher.close(handle)
        await lab.quiet()
        assert lab.origin.delivered == len(blocks) * BLOCK
        assert lab.metrics.prefetched == 0


@in_trio
async def test_interleaved_streams_of_several_processes_each_get_their_window(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=256 * MIB, readahead=4 * MIB) as lab:
        part = 8 * MIB
        data = content(1, 4 * part)
        object_id = lab.origin.put("k", data)
        handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        for step in range(0, part, 128 * KIB):
            for pid in range(4):
                offset = pid * part + step
                assert (
                    await lab.read_open(handle, offset, 128 * KIB, pid) == data[offset : offset + 128 * KIB]
                )
        lab.fetcher.close(handle)
        await lab.quiet()
        assert lab.origin.delivered == len(data)
        demanded = sum(not g.background for g in lab.origin.gets)
        assert demanded <= 4 * 12, "each stream soon reads only what was fetched ahead"


@in_trio
async def test_two_readers_of_one_file_a_little_apart_both_read_ahead(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=256 * MIB, readahead=2 * MIB) as lab:
        data = content(1, 16 * MIB)
        object_id = lab.origin.put("k", data)
        handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        for step in range(0, 8 * MIB, 128 * KIB):
            for pid, start in ((1, 0), (2, 6 * MIB)):
                offset = start + step
                assert (
                    await lab.read_open(handle, offset, 128 * KIB, pid) == data[offset : offset + 128 * KIB]
                )
        lab.fetcher.close(handle)
        await lab.quiet()
        assert sum(not g.background for g in lab.origin.gets) <= 24


def windows(policy: Readahead, reads: list[tuple[int, int]], pid: int = 1) -> list[int]:
    return [len(policy.observe(pid, offset, size)) for offset, size in reads]


def test_windows_double_up_to_the_cap_and_name_each_block_once() -> None:
    policy = Readahead(1 << 30, MIB, 64)
    named: list[int] = []
    widest = 0
    for offset in range(0, 1 << 30, MIB):
        wanted = policy.observe(1, offset, MIB)
        assert not wanted or wanted.stop <= offset // MIB + 1 + 64
        widest = max(widest, len(wanted))
        named += wanted
    assert named == list(range(1, 1024))
    assert 16 <= widest <= 64


def test_a_jump_stops_reading_ahead() -> None:
    policy = Readahead(1 << 30, MIB, 64)
    for offset in range(0, 32 * MIB, MIB):
        policy.observe(1, offset, MIB)
    assert (
        windows(policy, [(500 * MIB, MIB), (900 * MIB, MIB), (200 * MIB, MIB), (700 * MIB, MIB)]) == [0] * 4
    )


def test_reading_backwards_asks_for_nothing() -> None:
    policy = Readahead(1 << 30, MIB, 64)
    assert sum(windows(policy, [(o, MIB) for o in range(1000 * MIB, 0, -MIB)])) <= 4


def test_small_readahead_and_none() -> None:
    assert windows(Readahead(1 << 30, MIB, 0), [(o, MIB) for o in range(0, 50 * MIB, MIB)]) == [0] * 50
    assert max(windows(Readahead(1 << 30, MIB, 1), [(o, MIB) for o in range(0, 50 * MIB, MIB)])) == 1


def test_reads_that_the_kernel_sends_out_of_order_are_one_stream() -> None:
    rng = random.Random(2)
    policy = Readahead(1 << 30, MIB, 32)
    named: list[int] = []
    for start in range(0, 256, 12):
        batch = list(range(start, start + 12))
        rng.shuffle(batch)
        for piece in batch:
            named += policy.observe(1, piece * 128 * KIB, 128 * KIB)
    assert len(named) == len(set(named))
    assert set(range(4, 30)) <= set(named)


@in_trio
async def test_a_small_file_comes_whole_in_one_request_and_nothing_ahead(cache_dir: Path) -> None:
    async with running(cache_dir, readahead=8 * MIB, block=MIB) as lab:
        data = content(1, 4 * MIB)
        object_id = lab.origin.put("k", data)
        assert await lab.read(object_id, 3 * MIB, 100) == data[3 * MIB :][:100]
        await lab.quiet()
        assert [(g.start, g.stop, g.whole) for g in lab.origin.gets] == [(0, 4 * MIB, True)]


@in_trio
async def test_closing_the_handle_does_not_start_anything_new(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=256 * MIB, readahead=8 * MIB) as lab:
        object_id = lab.origin.put("k", content(1, 24 * MIB))
        for offset in range(0, 4 * MIB, 128 * KIB):
            await lab.read(
                object_id, offset, 128 * KIB
            )  # a handle each: a stream must prove itself each time
        await lab.quiet()
        gets = len(lab.origin.gets)
        await trio.sleep(0.01)
        assert len(lab.origin.gets) == gets
        assert lab.origin.delivered <= 5 * MIB

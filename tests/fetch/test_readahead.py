"""What is fetched ahead: everything once for a sequential reader, nothing for a random one, never more than a window."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from cachefs.fetch.fetcher import PARTS_AT_ONCE, Fetcher
from cachefs.fetch.readahead import STREAMS, Budget, Readahead, footer_at
from tests.fetch.scripted import BeginningOrigin, ScriptedOrigin, content, in_trio
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
        for offset in range(5 * MIB, len(data), 128 * KIB):  # not from the start: it may not want all of it
            await lab.read_open(handle, offset, 128 * KIB)
            furthest = max(g.stop for g in lab.origin.gets)
            assert furthest <= offset + 128 * KIB + 2 * MIB + BLOCK
            if 12 * MIB < offset < 20 * MIB:
                assert furthest >= offset + 128 * KIB
        lab.fetcher.close(handle)


@in_trio
async def test_what_a_reader_waits_for_is_asked_for_before_its_readahead(cache_dir: Path) -> None:
    """The first request takes the connection that is open already. Tasks would begin in any order."""
    async with (
        trio.open_nursery() as nursery,
        running(cache_dir, BeginningOrigin(nursery), readahead=2 * MIB) as lab,
    ):
        for number in range(12):
            data = content(number, 5 * MIB)
            object_id = lab.origin.put(f"k{number}", data)
            lab.origin.gets.clear()
            assert await lab.read(object_id, 0, 4 * KIB) == data[: 4 * KIB]
            asked = [(get.start, get.background) for get in lab.origin.gets]
            assert asked[0] == (0, False) and (BLOCK, True) in asked, asked
            await lab.quiet()


@in_trio
async def test_a_disk_that_was_full_at_the_start_is_read_ahead_to_when_it_has_space(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=256 * MIB) as lab, trio.open_nursery() as nursery:
        [tier] = lab.store.tiers
        tier.full()
        lab.fetcher = Fetcher(lab.store, nursery, lab.metrics, max_readahead=4 * MIB)
        tier._free_read_again_at = -1e9
        data = content(1, 24 * MIB)
        object_id = lab.origin.put("k", data)
        assert await lab.read(object_id, 0, MIB) == data[:MIB]
        handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        for offset in range(0, len(data), 128 * KIB):
            await lab.read_open(handle, offset, 128 * KIB)
        lab.fetcher.close(handle)
        await lab.quiet()
        assert len(lab.origin.gets) < 24 * MIB / BLOCK / 3
        brought = await lab.fetcher.prefetch(lab.origin, lab.origin.put("l", data))  # type: ignore[arg-type]
        assert brought == 24 * MIB and lab.fetcher._prefetching.total_tokens > PARTS_AT_ONCE


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
            # A handle each: a stream must prove itself each time.
            await lab.read(object_id, offset, 128 * KIB)
        await lab.quiet()
        gets = len(lab.origin.gets)
        await trio.sleep(0.01)
        assert len(lab.origin.gets) == gets
        assert lab.origin.delivered <= 5 * MIB


@pytest.mark.parametrize("budget", [0, 100, 10_000])
def test_a_stream_from_the_start_comes_whole_as_far_as_the_budget_allows(budget: int) -> None:
    shared = Budget(budget)
    policy = Readahead(1 << 30, MIB, 64, 8, shared)
    named: list[int] = []
    furthest = 0

    def ask(wanted: range) -> None:
        named.extend(wanted)
        policy.under_way += len(wanted)
        assert policy.under_way <= 64 + 8, "no more at once than a window"

    for offset in range(0, 1 << 30, MIB):
        ask(policy.observe(1, offset, MIB))
        for _ in range(4):  # the store is faster than the reader
            policy.under_way = max(0, policy.under_way - 8)
            ask(policy.committed())
        ahead = named[-1] - offset // MIB if named else 0
        furthest = max(furthest, ahead)
        assert shared.used == max(0, ahead)
    assert named == list(range(1, 1024))
    if budget == 10_000:
        assert furthest > 600
    else:
        assert furthest <= max(64, budget)
        assert furthest >= max(56, budget - 16)
    policy.close()
    assert shared.used == 0


def test_a_stream_that_began_elsewhere_stays_within_its_window() -> None:
    policy = Readahead(1 << 30, MIB, 64, 8, Budget(10_000))
    for offset in range(100 * MIB, 1 << 30, MIB):
        wanted = policy.observe(1, offset, MIB)
        assert not wanted or wanted.stop <= offset // MIB + 1 + 64
        assert not policy.committed()


def test_full_windows_move_on_in_parts() -> None:
    policy = Readahead(1 << 30, MIB, 64)
    asked = [policy.observe(1, offset, 128 * KIB) for offset in range(0, 900 * MIB, 128 * KIB)]
    late = [(w.start, len(w)) for w in asked if w and w.start > 200]
    assert late == [(start, 8) for start in range(late[0][0], late[-1][0] + 8, 8)]


def test_what_is_declined_is_named_again_when_the_reader_comes_near() -> None:
    shared = Budget(1000)
    policy = Readahead(1 << 30, MIB, 64, 8, shared)
    at, declined = 0, range(0)
    while not declined:
        wanted = policy.observe(1, at * MIB, MIB)
        at += 1
        if wanted and wanted.start > at + 64:
            declined = wanted
    policy.declined(declined.start)
    assert shared.used == declined.start - at
    named: list[int] = []
    for block in range(at, 1000):
        wanted = policy.observe(1, block * MIB, MIB)
        assert not wanted or wanted.stop <= block + 1 + 64, "and from then on it keeps to its window"
        named += wanted
    assert named == list(range(declined.start, named[-1] + 1))


@pytest.mark.parametrize("size, footer", [(5, 1), (64, 1), (256, 4), (512, 8), (4096, 8)])
def test_a_footer_is_a_64th_but_that_of_a_small_file_has_as_many_columns(size: int, footer: int) -> None:
    assert footer_at(size * MIB) == (size - footer) * MIB


@pytest.mark.parametrize("size", [64 * MIB, 300 * MIB, 4096 * MIB])
def test_who_looks_at_the_footer_first_is_not_random(size: int) -> None:
    policy = Readahead(size, MIB, 64)
    footer = min(max(size // 64, MIB), 8 * MIB)
    for back in (8, 64 * KIB, footer, footer // 2, 100, 3000, footer // 3):
        assert not policy.observe(1, size - back, 8)
    assert policy.observe(1, 0, 128 * KIB) == range(1, 2)
    chunk = 32 * MIB
    asked = [policy.observe(1, at, 128 * KIB) for at in range(chunk, chunk + 8 * MIB, 128 * KIB)]
    assert sum(map(len, asked)) >= 8


def test_random_reads_that_come_near_each_other_are_no_stream() -> None:
    rng = random.Random(3)
    policy = Readahead(1 << 40, MIB, 64)
    position, asked = 100 * MIB, 0
    for _ in range(200):  # forwards, within reach, and a 16th of what is passed
        position += rng.randrange(1 * MIB, 3 * MIB)
        asked += len(policy.observe(1, position, 128 * KIB))
    assert asked == 0


def test_a_stream_that_begins_to_skip_must_prove_itself_again() -> None:
    policy = Readahead(1 << 30, MIB, 64)
    for block in range(40):
        policy.observe(1, block * MIB, MIB)
    skipping = [policy.observe(1, at, 128 * KIB) for at in range(41 * MIB, 400 * MIB, 3 * MIB)]
    assert sum(map(len, skipping)) <= 64
    assert not any(skipping[8:])
    again = [policy.observe(1, at * MIB, MIB) for at in range(400, 450)]
    assert sum(map(len, again)) >= 48


@pytest.mark.parametrize("size", [256 * MIB, 4096 * MIB])
def test_random_pieces_of_a_large_file_cost_no_more_than_their_blocks(size: int) -> None:
    fetched: set[int] = set()
    read = 0
    rng = random.Random(5)
    policy = Readahead(size, MIB, 64, 8, Budget(10_000))
    for _ in range(size // MIB // 4):
        at = rng.randrange(size // (128 * KIB)) * 128 * KIB
        fetched.add(at // MIB)
        fetched.update(policy.observe(1, at, 128 * KIB))
        read += 128 * KIB
    assert len(fetched) * MIB <= 8 * read


@pytest.mark.parametrize("workers", [2, 8, 8 * 8])
def test_many_processes_read_one_file_each_in_its_place(workers: int) -> None:
    policy = Readahead(workers * 64 * MIB, MIB, 16)
    named: dict[int, list[int]] = {pid: [] for pid in range(workers)}
    for at in range(0, 64 * MIB, 512 * KIB):
        for pid in range(workers):
            named[pid] += policy.observe(pid, pid * 64 * MIB + at, 512 * KIB)
    for pid, mine in named.items():
        assert len(mine) == len(set(mine))
        assert set(range(pid * 64 + 4, pid * 64 + 64)) <= set(mine)


def test_processes_that_read_the_same_ask_once() -> None:
    """Within reach of each other they are one stream: whoever is ahead asks."""
    policy = Readahead(256 * MIB, MIB, 16)
    named: list[int] = []
    for block in range(200):
        for pid, behind in ((1, 0), (2, 1), (3, 2)):
            if block >= behind:
                named += policy.observe(pid, (block - behind) * MIB, MIB)
    assert len(named) == len(set(named))
    assert set(range(4, 200)) <= set(named)


def test_a_mapped_file_is_read_ahead_though_its_faults_come_in_any_order() -> None:
    rng = random.Random(7)
    policy = Readahead(1 << 30, MIB, 32)
    pieces = list(range(0, 256 * MIB, 64 * KIB))
    for start in range(0, len(pieces), 32):  # 2 MiB at a time
        part = pieces[start : start + 32]
        rng.shuffle(part)
        pieces[start : start + 32] = part
    named = [block for at in pieces for block in policy.observe(1, at, 64 * KIB)]
    assert len(named) == len(set(named))
    assert set(range(8, 250)) <= set(named)


def test_after_jumps_a_stream_finds_its_window_again() -> None:
    policy = Readahead(1 << 30, MIB, 16)
    for at in (100, 300, 500, 700, 900):
        policy.observe(1, at * MIB, MIB)
    assert not policy.observe(1, 0, MIB), "in doubt by now"
    asked = [len(policy.observe(1, at * MIB, MIB)) for at in range(1, 64)]
    assert sum(asked) >= 56
    policy.observe(1, 600 * MIB, MIB)
    assert policy.observe(2, 0, 4096), "and the start is presumed again"


@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(
            st.integers(1, 3),
            st.integers(0, 100 * MIB - 1),
            st.sampled_from([4096, 128 * KIB, MIB]),
            st.booleans(),
        ),
        max_size=200,
    ),
)
def test_whatever_is_read_the_budget_is_kept_and_given_back(
    window: int, reads: list[tuple[int, int, int, bool]]
) -> None:
    shared = Budget(50)
    policy = Readahead(100 * MIB, MIB, window, 8, shared)
    follow = 0
    for pid, offset, length, goes_on in reads:
        offset = follow if goes_on else offset
        length = min(length, 100 * MIB - offset)
        follow = min(offset + length, 100 * MIB - 1)
        for wanted in (policy.observe(pid, offset, length), policy.committed()):
            assert wanted.stop <= 100
            assert len(wanted) <= max(window, 50)
        assert 0 <= shared.used <= max(50, window) * min(STREAMS, len(reads))
    policy.close()
    assert shared.used == 0


class Awaited(ScriptedOrigin):
    """Sees how many bytes are asked for and are not written, which is less than what its requests have left to send: a
    reader goes on as bytes are written, a request ends when its thread has said so."""

    most_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self._under_way: list[tuple[int, Any]] = []

    async def read(self, key: str, etag: str, start: int, stop: int, sink: Any, **how: Any) -> None:
        self._under_way.append(mine := (stop, sink))
        self.most_bytes = max(self.most_bytes, sum(stop - sink.written for stop, sink in self._under_way))
        try:
            await super().read(key, etag, start, stop, sink, **how)
        finally:
            self._under_way.remove(mine)


@in_trio
async def test_a_large_object_is_there_long_before_its_reader(cache_dir: Path) -> None:
    origin = Awaited()
    async with running(cache_dir, origin, ssd=256 * MIB, readahead=2 * MIB) as lab:
        size = 40 * MIB
        data = content(1, size)
        object_id = lab.origin.put("k", data)
        handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        at = 0
        while at < 8 * MIB:
            assert await lab.read_open(handle, at, 128 * KIB) == data[at : at + 128 * KIB]
            at += 128 * KIB
        await lab.quiet()
        assert lab.fetcher.whole(object_id)
        assert MIB < origin.most_bytes <= 2 * MIB + 2 * BLOCK, (
            "a window, and what the reader itself waits for"
        )
        gets = len(lab.origin.gets)
        while at < size:
            assert await lab.read_open(handle, at, 128 * KIB) == data[at : at + 128 * KIB]
            at += 128 * KIB
        assert len(lab.origin.gets) == gets
        assert lab.origin.delivered == size
        lab.fetcher.close(handle)


@pytest.mark.parametrize("readers", [1, 5])
@in_trio
async def test_large_objects_together_stay_within_their_share_of_the_cache(
    cache_dir: Path, readers: int
) -> None:
    async with running(cache_dir, ssd=32 * MIB, readahead=MIB) as lab:
        ids = [lab.origin.put(f"k{i}", content(i, 40 * MIB)) for i in range(readers)]
        handles = [lab.fetcher.open(lab.origin, i) for i in ids]  # type: ignore[arg-type]
        for at in range(0, 4 * MIB, 128 * KIB):
            for handle in handles:
                await lab.read_open(handle, at, 128 * KIB)
        await lab.quiet()
        unread = lab.origin.delivered - readers * 4 * MIB
        assert 7 * MIB <= unread <= 8 * MIB + readers * (MIB + BLOCK), (
            "a quarter of the cache, and a window each"
        )
        gets = len(lab.origin.gets)
        for handle in handles:
            lab.fetcher.close(handle)
        await lab.quiet()
        assert len(lab.origin.gets) == gets, "nobody reads any more"

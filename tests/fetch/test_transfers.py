"""Single in-flight fetch, early waking, failures and cancellation: what a reader of a cold object is promised."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from cachefs.base import errors
from tests.fetch.scripted import BeginningOrigin, ScriptedOrigin, content, in_trio
from tests.store.lab import BLOCK, EXTENT, KIB, MIB, running


@pytest.mark.parametrize("size", [BLOCK // 2, 3 * MIB, 24 * MIB])
@in_trio
async def test_ten_readers_of_one_cold_object_cost_what_one_costs(cache_dir: Path, size: int) -> None:
    data = content(size, size)
    costs = []
    for readers in (1, 10):
        async with running(cache_dir.with_name(f"cache{readers}"), ssd=64 * MIB, readahead=8 * MIB) as lab:
            object_id = lab.origin.put("k", data)

            async def read(pid: int, lab=lab, object_id=object_id) -> None:  # type: ignore[no-untyped-def]
                for offset in range(0, size, 128 * KIB):
                    piece = min(128 * KIB, size - offset)
                    assert await lab.read(object_id, offset, piece, pid) == data[offset : offset + piece]

            async with trio.open_nursery() as nursery:
                for pid in range(readers):
                    nursery.start_soon(read, pid)
            await lab.quiet()
            ranges = sorted((g.start, g.stop) for g in lab.origin.gets)
            assert sum(stop - start for start, stop in ranges) == size
            costs.append(len(ranges))
    assert costs[1] <= costs[0] * 1.5 + 1
    if size <= 4 * MIB:
        assert costs[0] == costs[1]


@in_trio
async def test_ten_readers_of_one_block_make_one_request(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data = content(1, 8 * EXTENT)
        object_id = lab.origin.put("k", data)
        async with trio.open_nursery() as nursery:

            async def read(pid: int) -> None:
                offset = 3 * EXTENT + pid * 100
                assert await lab.read(object_id, offset, 4096, pid) == data[offset : offset + 4096]

            for pid in range(10):
                nursery.start_soon(read, pid)
        await lab.quiet()
        assert len(lab.origin.gets) == 1
        assert lab.origin.delivered == BLOCK


@pytest.mark.parametrize("tiers", ["ssd", "ram", "none"])
@in_trio
async def test_a_reader_is_woken_when_its_bytes_land_not_when_the_transfer_ends(
    cache_dir: Path, tiers: str
) -> None:
    sizes = {"ssd": 0, "ram": 0, tiers: 8 * MIB}
    async with running(cache_dir, ssd=sizes["ssd"], ram=sizes["ram"], block=MIB) as lab:
        data = content(1, 3 * MIB)
        object_id = lab.origin.put("k", data)
        hold = lab.origin.hold("k", 4096)
        with trio.fail_after(2):
            assert await lab.read(object_id, 0, 4096) == data[:4096]
        done = trio.Event()

        async def next_one() -> None:
            assert await lab.read(object_id, 4096, 4096) == data[4096:8192]
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(next_one)
            await hold.reached.wait()
            await trio.sleep(0.01)
            assert not done.is_set()
            hold.release.set()
        await lab.quiet()
        if tiers != "none":
            assert lab.origin.delivered == 3 * MIB
            assert len(lab.origin.gets) == 1


@in_trio
async def test_blocks_that_have_landed_can_be_read_while_the_rest_is_coming(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data = content(1, 8 * BLOCK)
        object_id = lab.origin.put("k", data)
        hold = lab.origin.hold("k", 6 * BLOCK + 10)
        handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        for block in range(6):
            got = await lab.read_open(handle, block * BLOCK, BLOCK)
            assert got == data[block * BLOCK :][:BLOCK]
        assert await lab.read_open(handle, 6 * BLOCK, 10) == data[6 * BLOCK :][:10]
        assert len(lab.origin.gets) == 1
        hold.release.set()
        assert await lab.read_open(handle, 0, len(data)) == data
        lab.fetcher.close(handle)


TROUBLE: list[Callable[[], Exception]] = [
    lambda: errors.Transient("reset"),
    lambda: errors.Throttled("slow down"),
    lambda: errors.OriginFailed("gave up"),
    lambda: errors.PermissionDenied("expired"),
    lambda: errors.ObjectChanged("replaced"),
    lambda: errors.NotFound("gone"),
    lambda: errors.Unsupported("no ranges"),
    lambda: errors.CachefsError("other"),
    lambda: RuntimeError("a bug in a client"),
    lambda: OSError(5, "foreign"),
    lambda: MemoryError(),
]


@pytest.mark.parametrize("after", [0, BLOCK + 5])
@pytest.mark.parametrize("trouble", TROUBLE, ids=lambda t: type(t()).__name__)
@in_trio
async def test_a_failed_transfer_is_told_in_our_words_and_the_next_read_tries_again(
    cache_dir: Path, trouble: Callable[[], Exception], after: int
) -> None:
    async with running(cache_dir) as lab:
        data = content(1, 6 * BLOCK)
        object_id = lab.origin.put("k", data)
        lab.origin.fail(trouble, after=after)
        with pytest.raises(errors.CachefsError) as caught:
            await lab.read(object_id)
        expected = trouble()
        assert isinstance(
            caught.value, type(expected) if isinstance(expected, errors.CachefsError) else errors.OriginFailed
        )
        assert await lab.read(object_id) == data
        await lab.quiet()
        assert lab.used() == 6 * BLOCK
        lab.check_accounts()


@pytest.mark.parametrize("trouble", TROUBLE, ids=lambda t: type(t()).__name__)
@in_trio
async def test_failing_readahead_does_not_fail_the_reader(
    cache_dir: Path, trouble: Callable[[], Exception]
) -> None:
    async with running(cache_dir, readahead=4 * MIB) as lab:
        data = content(1, 8 * MIB)
        object_id = lab.origin.put("k", data)
        if isinstance(trouble(), errors.ObjectChanged):
            return  # that one is true whoever learns it
        lab.origin.fail(trouble, times=1000, background=True)
        handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        for offset in range(0, len(data), 128 * KIB):
            assert await lab.read_open(handle, offset, 128 * KIB) == data[offset : offset + 128 * KIB]
        lab.fetcher.close(handle)
        await lab.quiet()
        lab.check_accounts()


@in_trio
async def test_a_part_that_breaks_goes_on_where_it_broke(cache_dir: Path) -> None:
    """Its first attempt has no task; the next one has."""
    async with (
        trio.open_nursery() as nursery,
        running(cache_dir, BeginningOrigin(nursery), ssd=64 * MIB) as lab,
    ):
        data = content(1, 6 * MIB)
        object_id = lab.origin.put("k", data)
        lab.origin.fail(lambda: errors.Transient("reset"), after=16 * KIB)
        assert await lab.read(object_id, 0, BLOCK) == data[:BLOCK]
        await lab.quiet()
        assert [(get.start, get.stop) for get in lab.origin.gets] == [(0, BLOCK), (16 * KIB, BLOCK)]


@in_trio
async def test_versions_do_not_mix_and_what_is_cached_of_the_old_one_stays_readable(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        old_data, new_data = content("old", 2 * EXTENT + 5 * MIB), content("new", 2 * EXTENT + 5 * MIB)
        old = lab.origin.put("k", old_data)
        handle = lab.fetcher.open(lab.origin, old)  # type: ignore[arg-type]
        assert await lab.read_open(handle, 0, BLOCK) == old_data[:BLOCK]
        new = lab.origin.put("k", new_data)
        assert await lab.read_open(handle, 10, 100) == old_data[10:110]
        for _ in range(2):
            with pytest.raises(errors.ObjectChanged):
                await lab.read_open(handle, EXTENT, BLOCK)
            assert await lab.read(new, EXTENT, BLOCK) == new_data[EXTENT : EXTENT + BLOCK]
            with pytest.raises(errors.ObjectChanged):
                await lab.read_open(handle, 0, 2 * BLOCK)
        assert await lab.read(new, 0, 2 * BLOCK) == new_data[: 2 * BLOCK]
        assert await lab.read_open(handle, 0, BLOCK) == old_data[:BLOCK]
        lab.fetcher.close(handle)
        await lab.quiet()
        lab.check_accounts()


@pytest.mark.parametrize("ram, ssd", [(0, 8 * MIB), (8 * MIB, 0), (0, 0)])
@in_trio
async def test_a_cancelled_reader_leaves_nothing_behind(cache_dir: Path, ram: int, ssd: int) -> None:
    async with running(cache_dir, ram=ram, ssd=ssd) as lab:
        data = content(1, 6 * BLOCK)
        object_id = lab.origin.put("k", data)
        hold = lab.origin.hold("k", BLOCK + 100)
        for _ in range(5):
            with trio.move_on_after(0.01) as scope:
                await lab.read(object_id)
            assert scope.cancelled_caught
        assert len(lab.origin.gets) <= 6  # they join what is under way
        hold.release.set()
        await lab.quiet()
        obj = lab.store.object(object_id)
        assert lab.fetcher.transfers.of(obj) == {}
        assert obj.refs == 0
        assert all(c.pins == 0 for c in obj.copies.values() if c is not None)
        assert obj.fds == {}
        assert await lab.read(object_id) == data
        lab.check_accounts()


@in_trio
async def test_stopping_in_the_middle_of_transfers_gives_their_room_back(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    data = content(1, 6 * BLOCK)
    object_id = origin.put("k", data)
    hold = origin.hold("k", 2 * BLOCK + 5)
    async with running(cache_dir, origin) as lab:
        with trio.move_on_after(0.02):
            await lab.read(object_id)
        await hold.reached.wait()
        lab.closes_files = False  # a transfer that a stop has ended leaves that to the store's end
    origin.holds.clear()
    async with running(cache_dir, origin) as lab:
        lab.check_accounts()
        assert lab.used() == 2 * BLOCK
        assert await lab.read(object_id) == data
        await lab.quiet()
        lab.check_accounts()


@in_trio
async def test_a_hit_is_not_also_counted_for_the_miss_that_brought_it(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        object_id = lab.origin.put("k", content(1, 20 * BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        assert (lab.metrics.misses, lab.metrics.ram_hits, lab.metrics.ssd_hits) == (20, 0, 0)
        await lab.read(object_id)
        assert (lab.metrics.misses, lab.metrics.ram_hits, lab.metrics.ssd_hits) == (20, 20, 0)


@pytest.mark.parametrize("verify", ["first", "full", "none"])
@pytest.mark.parametrize("block", [64 * KIB, 4 * MIB])
@in_trio
async def test_objects_of_every_awkward_size(cache_dir: Path, block: int, verify: str) -> None:
    wanted = [0, 1, block - 1, block, block + 1]
    wanted += [16 * block - 1, 16 * block, 16 * block + 1] if block < MIB else [2 * block + 7]
    origin = ScriptedOrigin(chunk=200_000)
    for start in ("cold", "warm", "restarted"):
        async with running(cache_dir, origin, ssd=64 * MIB, ram=8 * MIB, block=block, verify=verify) as lab:
            for size in wanted:
                data = content(size, size)
                if start == "cold":
                    origin.put(f"k{size}", data)
                from cachefs.base.names import ObjectId
                from tests.fetch.scripted import SOURCE

                object_id = ObjectId(SOURCE, f"k{size}", origin.objects[f"k{size}"][0], size)
                for offset, length in (
                    (0, size),
                    (size // 2, size - size // 2),
                    (max(0, size - 1), min(1, size)),
                ):
                    if length <= MIB:
                        assert await lab.read(object_id, offset, length) == data[offset : offset + length]
                        continue
                    for at in range(offset, offset + length, MIB):
                        piece = min(MIB, offset + length - at)
                        assert await lab.read(object_id, at, piece) == data[at : at + piece]
            await lab.quiet()
            if start == "cold":
                assert origin.delivered == sum(wanted)
            lab.check_accounts()
    assert origin.delivered == sum(wanted)


def test_no_descriptors_are_lost(cache_dir: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))

    @in_trio
    async def work() -> None:
        async with running(cache_dir, ram=4 * MIB) as lab:
            for i in range(50):
                lab.origin.fail(lambda: errors.Transient("cut"), after=1000, key=f"k{i}")
                object_id = lab.origin.put(f"k{i}", content(i, 2 * BLOCK))
                with pytest.raises(errors.Transient):
                    await lab.read(object_id)
                await lab.read(object_id)

    work()
    assert len(os.listdir("/proc/self/fd")) <= before + 2

"""What stays in memory of versions: looks leave no trace, what was verified stays so, and what is counted is there."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.names import ObjectId
from cachefs.store import catalog, scrub
from cachefs.store.catalog import Checked
from cachefs.store.eviction import LOWEST
from cachefs.store.tier import RAM
from tests import threads
from tests.fetch.scripted import content, in_trio
from tests.store import counters
from tests.store.lab import BLOCK, EXTENT, Lab, flip_bit, running

SMALL = 4096


def passthrough_ready(lab: Lab, ids: list[ObjectId]) -> int:
    return sum(passthrough(lab, object_id) for object_id in ids)


def passthrough(lab: Lab, object_id: ObjectId) -> bool:
    passthrough = lab.store.open_backing(lab.store.object(object_id))
    if passthrough is None:
        return False
    passthrough.registered(1)
    lab.store.release_backing(passthrough)
    return True


def put(lab: Lab, count: int, size: int = SMALL) -> list[ObjectId]:
    return [lab.origin.put(f"k{i}", content(i, size)) for i in range(count)]


async def forget_all(lab: Lab) -> None:
    """As thousands of other versions would."""
    await lab.quiet()
    await lab.store.flush()
    while lab.store.catalog._objects:
        lab.store.catalog._forget_some()
    assert lab.store.catalog._loaded == 0


def held(lab: Lab) -> int:
    return sum(bool(copy) for obj in lab.store.catalog._objects.values() for copy in obj.copies.values())


@in_trio
async def test_a_look_leaves_no_trace(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        ids = put(lab, 4)
        for object_id in ids[:3]:
            await lab.read(object_id)
        await forget_all(lab)
        await lab.read(ids[0])
        objects, loaded = lab.store.catalog._objects, lab.store.catalog._loaded
        before = list(objects)
        for object_id in (*ids, *(ObjectId("s", f"other{i}", "e", SMALL) for i in range(100))):
            assert lab.fetcher.whole(object_id) == (object_id in ids[:3])
            assert lab.fetcher.cached_bytes(object_id) == SMALL * (object_id in ids[:3])
        assert list(objects) == before == [ids[0].digest]
        assert lab.store.catalog._loaded == loaded == held(lab)


@in_trio
async def test_the_index_is_written_for_a_version_if_it_lacks_blocks_of_it(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was cached long ago costs no write, however often it is used."""
    async with running(cache_dir) as lab:
        index, writes = lab.store.catalog._index, list[int]()
        write = index.write
        monkeypatch.setattr(index, "write", lambda *what: writes.append(1) or write(*what))
        big = lab.origin.put("big", content(1, 8 * EXTENT))
        (other,) = put(lab, 1)

        async def lists(count: int) -> None:
            await lab.quiet()
            await lab.store.list_all(big)
            assert len(writes) == count

        await lists(0)
        await lab.read(big, 0, BLOCK)
        await lists(1)
        await lab.read(big, 0, BLOCK)  # its clock has changed
        await lab.read(other)
        await lists(1)
        # Once more in an extent that has a row, and in one that has none.
        for offset in (BLOCK, EXTENT):
            await lab.read(big, offset, BLOCK)
            await lists(len(writes) + 1)
        await forget_all(lab)
        await lists(len(writes))
        await lab.read(big, 2 * BLOCK, BLOCK)
        await lab.quiet()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lab.store.flush)
            await (
                trio.testing.wait_all_tasks_blocked()
            )  # the flush has taken the changes, and is in its thread
            before = list(lab.store.catalog._flushing)
            await lab.store.list_all(big)
            assert before and not lab.store.catalog._flushing
    async with running(cache_dir) as lab:
        assert lab.fetcher.cached_bytes(big) == 4 * BLOCK


@in_trio
async def test_looks_at_large_files_keep_few_copies_in_memory(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a program asks of thousands of large files how much is cached."""
    monkeypatch.setattr(catalog, "COPIES_IN_MEMORY", 40)
    extents, count = 16, 12
    async with running(cache_dir, block=SMALL) as lab:
        ids = put(lab, count, extents * 16 * SMALL)
        for object_id in ids:
            await lab.read(object_id)
        await forget_all(lab)
        for _ in range(2):
            for object_id in ids:
                assert lab.fetcher.cached_bytes(object_id) == object_id.size
                looked_at = lab.store.catalog._peeked.values()
                assert sum(len(obj.copies) for obj in looked_at) <= 40 + extents


@in_trio
async def test_versions_that_are_looked_at_together_are_loaded_once(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir) as lab:
        ids = put(lab, 40)
        for object_id in ids[:20]:
            await lab.read(object_id)
        await forget_all(lab)
        transactions = []
        load = lab.store.catalog._index.load
        monkeypatch.setattr(
            lab.store.catalog._index, "load", lambda keys: transactions.append(keys) or load(keys)
        )
        lab.store.preload(ids)
        assert [lab.fetcher.whole(object_id) for object_id in ids] == [True] * 20 + [False] * 20
        assert len(transactions) == 1
        assert lab.store.catalog._loaded == held(lab) == 0
        for object_id in ids:  # what was looked at is what is used, and what came since is seen
            await lab.read(object_id)
            assert lab.fetcher.whole(object_id)
        assert len(transactions) == 1
        assert lab.store.catalog._loaded == held(lab)
        assert len(lab.origin.gets) == 40


@in_trio
async def test_looks_at_others_take_nothing_from_what_is_passthrough(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "OBJECTS_IN_MEMORY", 64)
    async with running(cache_dir) as lab:
        ids = put(lab, 20)
        for object_id in ids:
            await lab.read(object_id)
        assert passthrough_ready(lab, ids) == 20
        await lab.store.flush()
        backings = [lab.store.object(object_id).backing for object_id in ids]
        for number in range(200):
            assert not lab.fetcher.whole(ObjectId("s", f"other{number}", "e", SMALL))
        assert all(backings)
        assert [lab.store.object(object_id).backing for object_id in ids] == backings


@in_trio
async def test_what_was_brought_can_be_passthrough_after_it_was_forgotten(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "OBJECTS_IN_MEMORY", 64)
    async with running(cache_dir) as lab:
        ids = put(lab, 200)
        for object_id in ids:
            await lab.fetcher.prefetch(lab.origin, object_id)  # type: ignore[arg-type]
            await lab.store.flush()
        assert len(lab.store.catalog._objects) <= 64
        assert passthrough_ready(lab, ids) == 200


@in_trio
async def test_what_nobody_has_checked_is_not_passthrough_after_it_was_forgotten(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        ids = put(lab, 3)
        for object_id in ids:
            await lab.read(object_id)
        origin = lab.origin
    async with running(cache_dir, origin) as lab:
        await lab.read(ids[0])
        assert lab.fetcher.whole(ids[1])
        lab.store.object(ids[2])
        await forget_all(lab)
        assert [passthrough(lab, object_id) for object_id in ids] == [True, False, False]


@in_trio
async def test_a_block_that_comes_again_is_judged_anew(cache_dir: Path) -> None:
    """What was remembered of a copy does not hold for what came after it."""
    async with running(cache_dir) as lab:
        [object_id] = put(lab, 1, 2 * BLOCK)
        await lab.read(object_id)
        await forget_all(lab)
        obj = lab.store.object(object_id)
        [copy] = lab.store.catalog.copies(obj, lab.store.tiers[-1].number)
        assert copy.verified == 0b11
        copy.verified = 0b01  # as of a block that was moved, and not read since
        await forget_all(lab)
        assert not passthrough(lab, object_id)
        flip_bit(lab.store.tiers[-1].file_path(object_id.digest), random.Random(1), BLOCK + 1)
        assert await lab.read(object_id) == content(0, 2 * BLOCK)
        assert lab.metrics.checksum_failures == 1


def test_copies_are_remembered_in_two_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "CHECKED_COPIES", 100)
    known = Checked()
    keys = [(n % 2, ObjectId("s", str(n), "e", 1).digest, n % 3) for n in range(1000)]
    for number, key in enumerate(keys, 1):
        known.add(key)
        assert len(known._young) + len(known._old) <= 200
        assert all(recent in known for recent in keys[max(0, number - 100) : number])
    assert keys[0] not in known
    known.discard(keys[-1])
    assert keys[-1] not in known and keys[-2] in known
    known.discard(keys[-150])
    assert keys[-150] not in known and keys[-151] in known, "of the older ones, too"
    tier, digest, extent = keys[-2]
    assert (1 - tier, digest, extent) not in known and (tier, digest, extent + 1) not in known


@in_trio
async def test_a_scrub_counts_nothing_that_it_looked_at(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        ids = put(lab, 20, 3 * BLOCK)
        for object_id in ids:
            await lab.read(object_id)
        origin = lab.origin
    async with running(cache_dir, origin) as lab:
        await lab.read(ids[0])
        for _ in range(3):
            await scrub(lab.store)
            assert lab.store.catalog._loaded == held(lab)
        lab.store.catalog.forget_tier(lab.store.tiers[-1].number)
        lab.counts = False  # who gives a tier up, counts it no more
        assert lab.store.catalog._loaded == held(lab) == 0


@in_trio
async def test_the_clock_never_goes_back(cache_dir: Path) -> None:
    """Not even when all that was used last is pinned, and so has no row in the order of eviction."""
    async with running(cache_dir, eviction="lru") as lab:
        ids = put(lab, 8, EXTENT)
        for object_id in ids:
            await lab.read(object_id)
            lab.store.pin(lab.store.object(object_id))
        origin, clock = lab.origin, lab.store.catalog.clock
        assert clock >= len(ids)
    async with running(cache_dir, origin, eviction="lru") as lab:
        assert lab.store.catalog.clock > clock


@in_trio
async def test_a_scrub_opens_no_file_of_one_block_and_no_file_twice(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["cachefs.store.scrub"]
    inspect, opened = module._inspect, []

    def inspected(tier: Any, digest: bytes, *more: Any) -> Any:
        opened.append(digest)
        return inspect(tier, digest, *more)

    monkeypatch.setattr(module, "_inspect", inspected)
    async with running(cache_dir) as lab:
        small = put(lab, 20, BLOCK)
        large = [lab.origin.put(f"large{i}", content(i, 3 * BLOCK)) for i in range(5)]
        for object_id in (*small, *large):
            await lab.read(object_id)
        await lab.quiet()
        await lab.store.flush()
        with lab.store.catalog.object(large[0]).held():
            await scrub(lab.store)
        assert sorted(opened) == sorted(object_id.digest for object_id in large[1:])
        assert all(lab.store.cached_bytes(object_id) == object_id.size for object_id in (*small, *large))


@in_trio
async def test_a_scrub_of_an_empty_cache_looks_into_no_folder(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["cachefs.store.scrub"]
    looked: list[Path] = []
    files = module._files
    monkeypatch.setattr(module, "_files", lambda folder: looked.append(folder) or files(folder))
    async with running(cache_dir) as lab:
        await scrub(lab.store)
        assert not looked
        await lab.read(put(lab, 1, BLOCK)[0])
        await lab.quiet()
        await scrub(lab.store)
        assert len(looked) == 1


@in_trio
async def test_a_flush_for_which_no_thread_can_be_started_loses_nothing(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one writes what came and what went; the counters and the rows agree at the end."""
    async with running(cache_dir) as lab:
        gone, new = lab.origin.put("gone", content(1, EXTENT)), lab.origin.put("new", content(2, EXTENT))
        await lab.read(gone)
        await lab.quiet()
        await lab.store.flush()
        lab.store.evict(lab.store.object(gone))
        await lab.read(new)
        await lab.quiet()
        with monkeypatch.context() as patch:
            threads.none_starts(patch)
            await lab.store.flush()
            assert "no thread" in lab.store.catalog.index_error
        await lab.store.flush()
        assert lab.store.catalog.index_error == ""
        assert {key[1] for key in counters.rows(lab.store)} == {new.digest}


@in_trio
async def test_a_move_and_a_read_for_which_no_thread_can_be_started_are_made_later(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir, ram=8 * BLOCK) as lab:
        object_id = lab.origin.put("k", content(1, BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        obj, (_, ssd), moves = lab.store.object(object_id), lab.store.tiers, lab.store._moves
        (copy,) = lab.store.catalog.copies(obj, RAM)
        copy.verified = 0
        assert moves is not None
        with monkeypatch.context() as patch:
            threads.none_starts(patch)
            assert not await moves.move(obj, copy, ssd, LOWEST)
            with pytest.raises(BlockingIOError):
                await lab.store.read(obj, 0, BLOCK)
        assert ssd.state == "normal" and not lab.metrics.tier_errors
        assert await moves.move(obj, copy, ssd, LOWEST)
        assert await lab.store.read(obj, 0, BLOCK) == content(1, BLOCK)


@in_trio
async def test_a_disk_that_is_slow_for_a_moment_makes_no_file_immutable(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir) as lab:
        [tier] = lab.store.tiers
        object_id = lab.origin.put("k", content(1, 3 * EXTENT))
        await lab.read(object_id)
        await lab.quiet()
        obj = lab.store.object(object_id)
        with monkeypatch.context() as patch:
            patch.setattr("cachefs.store.tier.cached_lstat", lambda path: None)
            patch.setattr(tier.disk, "at_once", lambda call: None)
            assert obj.is_immutable(tier), "it may be"
        first = lab.store.catalog.copies(obj, tier.number)[0]
        assert lab.store.space.drop(obj, first, first.bitmap) == 16
        assert lab.store.cached_bytes(object_id) == 2 * EXTENT

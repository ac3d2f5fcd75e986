"""Moves between tiers: what a copy takes along, where it does not go, and what a stop saves."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.names import ObjectId
from cachefs.store import space
from cachefs.store.catalog import Copy
from cachefs.store.eviction import ANY, NOTHING, PREFETCHED_S, PriorityClass
from cachefs.store.space import PROMOTED_AT_MOST, REUSE_AFTER_S, SPILL_ABOVE
from cachefs.store.tier import RAM, SSD
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store.lab import BLOCK, EXTENT, Lab, begin_write, running


def put(lab: Lab, object_id: ObjectId, data: bytes, tier: int = RAM, **how: bool) -> Copy:
    """Its blocks come into this tier."""
    store = lab.store
    tiers, obj = store.tiers, store.object(object_id)
    if tier == SSD:
        store.tiers[0].errors_in_a_row, store.tiers[0]._retry_at = 1, 1e18
    cache_write = begin_write(store, obj, 0, -(-object_id.size // BLOCK), **how)
    store.tiers[0].errors_in_a_row = 0
    assert cache_write is not None and cache_write.copy.tier == tier  # type: ignore[attr-defined]
    cache_write.write(data)
    store.end_write(obj, cache_write)
    obj.close_if_unused()
    copy = store.catalog.copy(obj, tier, 0)
    assert copy is not None and store.tiers is tiers
    return copy


def movers(lab: Lab) -> space.Moves:
    assert lab.store._moves is not None
    return lab.store._moves


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("younger", [False, True])
@in_trio
async def test_a_copy_takes_its_age_and_its_wait_along(cache_dir: Path, ahead: bool, younger: bool) -> None:
    """Into a copy of other blocks that may be younger."""
    async with running(cache_dir, ram=16 * BLOCK, eviction="lru") as lab:
        now = 1000.0
        lab.store.eviction._now = lambda: now
        data = content(1, 3 * BLOCK)
        object_id = lab.origin.put("k", data)
        obj = lab.store.object(object_id)
        there = put(lab, object_id, data, SSD)
        lab.store.space.drop(obj, there, 0b110)
        copy = put(lab, object_id, data, prefetched=ahead)
        if younger:
            lab.store.eviction.touch(there)
        clock, used = there.clock, there.used
        now += 1.0
        lab.metrics.evicted_blocks = 0
        assert await movers(lab).move(obj, copy, lab.store.tiers[1], NOTHING)
        assert there.bitmap == there.verified == 0b111 and there.checksums[:3] == copy.checksums[:3]
        assert (there.clock, there.used) == ((clock, used) if younger else (copy.clock, copy.used))
        waiting = lab.store.eviction._waiting
        assert (there.key in waiting) is (copy.key in waiting) is ahead
        if ahead:
            assert waiting[there.key].until == waiting[copy.key].until == 1000.0 + PREFETCHED_S
            assert (
                lab.store.eviction.class_of(there.key, there.clock, there.dataset) is PriorityClass.PROTECTED
            )
        lab.store.space.drop(obj, copy, copy.bitmap)
        assert await lab.read(object_id) == data and not lab.origin.gets


@in_trio
async def test_what_is_there_already_only_gets_its_age(cache_dir: Path) -> None:
    async with running(cache_dir, ram=16 * BLOCK) as lab:
        data = content(1, 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        obj = lab.store.object(object_id)
        there, copy = put(lab, object_id, data, SSD), put(lab, object_id, data)
        assert there.clock < copy.clock
        lab.store.tiers[1].disk.down = True  # nothing is read or written
        assert await movers(lab).move(obj, copy, lab.store.tiers[1], NOTHING)
        lab.store.tiers[1].disk.down = False
        assert there.clock == copy.clock
        lab.store.space.drop(obj, copy, 0b11)
        assert await movers(lab).move(obj, copy, lab.store.tiers[1], NOTHING), "nothing is to be moved"


@pytest.mark.parametrize(
    "trouble", ["down", "its disk is down", "leaving", "full", "unreadable", "unwritable", "short"]
)
@in_trio
async def test_what_cannot_be_moved_says_so_and_changes_nothing(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    async with running(cache_dir, ram=16 * BLOCK) as lab:
        data = content(1, 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        obj, (ram, ssd) = lab.store.object(object_id), lab.store.tiers
        copy = put(lab, object_id, data)
        path = ram.file_path(object_id.digest)
        match trouble:
            case "down":
                ram.disk.down = True
            case "its disk is down":
                ssd.disk.down = True
            case "leaving":
                obj.leaving.add(SSD)
            case "full":
                monkeypatch.setattr(ssd, "limit_bytes", lambda already_there=0: 2 * BLOCK - 1)
            case "unreadable":
                path.unlink()
            case "unwritable":
                monkeypatch.setattr(ssd, "open_for_writing", self_raises(errno.EACCES))
            case "short":
                os.truncate(path, BLOCK + 1)
        before = (ssd.used_bytes, ssd.unlisted_bytes)
        assert not await movers(lab).move(obj, copy, ssd, NOTHING)
        assert (ssd.used_bytes, ssd.unlisted_bytes) == before
        lost = trouble in ("unreadable", "short")
        assert copy.bitmap == (0 if lost else 0b11)
        there = lab.store.catalog.copy(obj, SSD, 0)
        assert there is None and not copy.pins
        errors = {"unwritable": ssd, "short": ram}
        assert [tier for tier in (ram, ssd) if tier.errors_in_a_row] == (
            [errors[trouble]] if trouble in errors else []
        )
        monkeypatch.undo()
        ram.disk.down = ssd.disk.down = False
        obj.leaving.discard(SSD)
        assert await lab.read(object_id) == data


def self_raises(number: int) -> Any:
    def raises(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return raises


@in_trio
async def test_a_block_that_is_dropped_on_its_way_does_not_arrive(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that was found damaged meanwhile is damaged there, too."""
    async with running(cache_dir, ram=16 * BLOCK) as lab:
        data = content(1, 3 * BLOCK)
        object_id = lab.origin.put("k", data)
        obj, (_, ssd) = lab.store.object(object_id), lab.store.tiers
        copy = put(lab, object_id, data)
        sendfile, done, token = os.sendfile, [], trio.lowlevel.current_trio_token()

        def slow(*args: int) -> int:
            if not done:
                done.append(1)
                trio.from_thread.run_sync(lab.store.space.drop, obj, copy, 0b010, trio_token=token)
            return sendfile(*args)

        monkeypatch.setattr(os, "sendfile", slow)
        assert await movers(lab).move(obj, copy, ssd, NOTHING)
        there = lab.store.catalog.copy(obj, SSD, 0)
        assert there is not None and there.bitmap == 0b101 == copy.bitmap
        assert (ssd.used_bytes, ssd.unlisted_bytes) == (2 * BLOCK, 0)
        monkeypatch.undo()
        assert await lab.read(object_id) == data


@in_trio
async def test_a_stop_saves_what_ssd_keeps_longer_and_goes_on_behind_the_rest(cache_dir: Path) -> None:
    """RAM has the oldest and the youngest; SSD is full of what is between them."""
    origin = ScriptedOrigin()
    ids = [origin.put(f"k{n}", content(n, BLOCK)) for n in range(6)]
    async with running(cache_dir, origin, ram=16 * BLOCK, ssd=4 * BLOCK) as lab:
        put(lab, ids[0], content(0, BLOCK))
        for n in range(1, 5):
            put(lab, ids[n], content(n, BLOCK), SSD)
        put(lab, ids[5], content(5, BLOCK))
        await lab.store.flush()
    async with running(cache_dir, origin, ssd=4 * BLOCK) as lab:
        assert [bool(lab.store.cached_bytes(i)) for i in ids] == [False, False, True, True, True, True]


@pytest.mark.parametrize("ssd_works", [True, False])
@in_trio
async def test_a_stop_does_not_drop_what_a_failing_disk_cannot_take(cache_dir: Path, ssd_works: bool) -> None:
    async with running(cache_dir, ram=16 * BLOCK) as lab:
        first, second = (lab.origin.put(n, content(1, BLOCK)) for n in "ab")
        for object_id in (first, second):
            put(lab, object_id, content(1, BLOCK))
        if not ssd_works:
            lab.store.tiers[1].disk.down = True
        await movers(lab).save_all()
        on_ssd = sum(lab.store.catalog.has_copies(lab.store.object(i), SSD) for i in (first, second))
        in_ram = sum(lab.store.catalog.has_copies(lab.store.object(i), RAM) for i in (first, second))
        assert (on_ssd, in_ram) == ((2, 0) if ssd_works else (0, 2))
        lab.store.tiers[1].disk.down = False


@pytest.mark.parametrize(
    ("size", "later", "again", "writable", "epochs", "promoted"),
    [
        (BLOCK, REUSE_AFTER_S, True, True, False, True),
        (BLOCK, REUSE_AFTER_S - 0.1, True, True, False, False),
        (BLOCK, REUSE_AFTER_S, False, True, False, False),
        (BLOCK, REUSE_AFTER_S, True, False, False, False),
        (BLOCK, REUSE_AFTER_S, True, True, True, False),
        (PROMOTED_AT_MOST, REUSE_AFTER_S, True, True, False, True),
        (PROMOTED_AT_MOST + 1, REUSE_AFTER_S, True, True, False, False),
    ],
)
@in_trio
async def test_what_is_used_again_later_is_promoted(
    cache_dir: Path, size: int, later: float, again: bool, writable: bool, epochs: bool, promoted: bool
) -> None:
    async with running(cache_dir, ram=16 * BLOCK, eviction="epoch" if epochs else "lru") as lab:
        object_id, now = lab.origin.put("k", content(1, BLOCK)), 1000.0
        copy = put(lab, object_id, content(1, BLOCK), SSD)
        copy.object_size = size
        mover = movers(lab)
        mover._now = lambda: now
        mover.used(copy)
        now += later
        if not writable:
            lab.store.tiers[0].errors_in_a_row, lab.store.tiers[0]._retry_at = 1, 1e18
        if again:
            mover.used(copy)
        assert (copy.key in mover._promotions) is mover._wake.is_set() is promoted
        lab.store.tiers[0].errors_in_a_row = 0
        copy.object_size = BLOCK


@pytest.mark.parametrize("ssd_blocks", [0, 1, 2, 40])
@in_trio
async def test_ram_spills_its_oldest(cache_dir: Path, ssd_blocks: int) -> None:
    """No more than necessary, whether SSD has room or not."""
    async with running(cache_dir, ram=20 * BLOCK, ssd=40 * BLOCK) as lab:
        mover, (ram, ssd) = movers(lab), lab.store.tiers
        for n in range(40 - ssd_blocks):
            put(lab, lab.origin.put(f"s{n}", content(n, BLOCK)), content(n, BLOCK), SSD)
        ids = [lab.origin.put(f"r{n}", content(n, BLOCK)) for n in range(20)]
        for n, object_id in enumerate(ids):
            mover._wake = type(mover._wake)()
            put(lab, object_id, content(n, BLOCK))
            assert mover._wake.is_set() is (n + 1 > SPILL_ABOVE * 20)
        await lab.store.flush()
        await mover._spill()
        left = [n for n, i in enumerate(ids) if lab.store.catalog.has_copies(lab.store.object(i), RAM)]
        assert ram.used_bytes == SPILL_ABOVE * 20 * BLOCK
        assert left == list(range(2, 20)), "the oldest went"
        assert lab.metrics.spilled_blocks == 2 and ssd.used_bytes <= 40 * BLOCK


@in_trio
async def test_a_move_of_more_than_an_extent_is_made_of_moves(cache_dir: Path) -> None:
    async with running(cache_dir, ram=64 * BLOCK) as lab:
        data = content(1, EXTENT + BLOCK + 1)
        object_id = lab.origin.put("k", data)
        await lab.read(object_id)
        await lab.quiet()
        obj = lab.store.object(object_id)
        copies = lab.store.catalog.copies(obj, RAM)
        for copy in copies:
            assert await movers(lab).move(obj, copy, lab.store.tiers[1], ANY)
            lab.store.space.drop(obj, copy, copy.bitmap)
        gets = len(lab.origin.gets)
        assert await lab.read(object_id) == data and len(lab.origin.gets) == gets


@in_trio
async def test_a_copy_that_waits_for_its_reader_is_found_by_its_new_age_after_a_move(cache_dir: Path) -> None:
    """One block was prefetched to SSD, and another one to RAM, later."""
    async with running(cache_dir, ram=16 * BLOCK) as lab:
        data = content(1, 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        obj, (_, ssd), waiting = lab.store.object(object_id), lab.store.tiers, lab.store.eviction._waiting
        await lab.fetcher.prefetch(lab.origin, object_id, 0, BLOCK)  # type: ignore[arg-type]
        (source,) = lab.store.catalog.copies(obj, RAM)
        assert await movers(lab).move(obj, source, ssd, NOTHING)
        lab.store.space.drop(obj, source, source.bitmap)
        await lab.fetcher.prefetch(lab.origin, object_id, BLOCK)  # type: ignore[arg-type]
        (later,), (target,) = (lab.store.catalog.copies(obj, tier) for tier in (RAM, SSD))
        assert target.key in waiting and later.clock > target.clock
        assert await movers(lab).move(obj, later, ssd, NOTHING)
        assert target.clock == later.clock == waiting[target.key].clock
        lab.store.space.drop(obj, later, later.bitmap)

"""What the store does is cancelled at each of its awaits: what is counted is what there is, bytes are right or a miss."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from cachefs.store.tier import SSD
from tests.fetch.scripted import content, in_trio
from tests.interrupting import interrupted
from tests.store.lab import BLOCK, EXTENT, MIB, Lab, running, until
from tests.store.test_adopting import dirty_file

LARGE = 2 * EXTENT + BLOCK + 77


async def settled(lab: Lab) -> None:
    """Threads that were given up have ended."""
    await lab.quiet()
    await until(
        lambda: not any(obj.in_use() or obj.leaving for obj in lab.store.catalog._objects.values()), 5.0
    )
    assert all(tier.disposal.idle(5.0) for tier in lab.store.tiers)


@pytest.mark.parametrize("size", [1000, LARGE])
@pytest.mark.parametrize("how", ["file", "bytes", "recast"])
@in_trio
async def test_an_adoption_that_is_cancelled_keeps_all_or_nothing(
    cache_dir: Path, how: str, size: int
) -> None:
    data, step, goes_on = content(1, size), 0, True
    async with running(cache_dir) as lab:
        while goes_on:
            step += 1
            object_id = lab.origin.put(f"k{step}", data)
            path = dirty_file(lab, data, f"staged{step}")
            call = partial(lab.store.adopt, object_id, path)
            if how == "bytes":
                call = partial(lab.store.adopt_bytes, [(object_id, data)])  # type: ignore[arg-type]
            elif how == "recast":
                old = lab.origin.put(f"old{step}", data)
                assert await lab.store.adopt(old, path)
                call = partial(lab.store.recast, old, object_id)  # type: ignore[arg-type]
            goes_on = await interrupted(step, call)
            await settled(lab)
            kept = lab.store.cached_bytes(object_id)
            assert kept in (0, size) and (goes_on or kept == size)
            if how == "file":
                assert path.exists() <= (not kept)
            if how == "recast":
                assert lab.store.cached_bytes(old) == size - kept
            lab.check_accounts()
            assert all(tier.unlisted_bytes == 0 for tier in lab.store.tiers)
            assert await lab.read(object_id) == data
            assert len(lab.origin.gets) == 0 or not kept
            lab.origin.gets.clear()
            path.unlink(missing_ok=True)
    assert step > 1


@pytest.mark.parametrize("ram", [0, 8 * MIB])
@in_trio
async def test_a_read_that_is_cancelled_is_made_by_the_next(cache_dir: Path, ram: int) -> None:
    step, goes_on, data = 0, True, content(1, LARGE)
    async with running(cache_dir, ram=ram) as lab:
        while goes_on:
            step += 1
            object_id = lab.origin.put(f"k{step}", data)
            goes_on = await interrupted(step, partial(lab.read, object_id, BLOCK, EXTENT))
            await settled(lab)
            assert await lab.read(object_id) == data
            await settled(lab)
            lab.check_accounts()
            assert lab.store.cached_bytes(object_id) == LARGE
    assert step > 1


@in_trio
async def test_a_save_that_is_cancelled_leaves_each_block_somewhere(cache_dir: Path) -> None:
    step, goes_on = 0, True
    while goes_on:
        step += 1
        place = cache_dir.with_name(f"cache{step}")
        async with running(place, ram=8 * MIB) as lab:
            ids = [lab.origin.put(f"k{n}", content(n, EXTENT + 77)) for n in range(2)]
            for object_id in ids:
                await lab.read(object_id)
            await settled(lab)
            moves = lab.store._moves
            assert moves is not None
            goes_on = await interrupted(step, moves.save_all)
            assert [lab.store.cached_bytes(object_id) for object_id in ids] == [EXTENT + 77] * 2
            lab.check_accounts()
            down = sum(tier.used_bytes for tier in lab.store.tiers if tier.number == SSD)
            assert goes_on or down == lab.used() > 0
            for number, object_id in enumerate(ids):
                assert await lab.read(object_id) == content(number, EXTENT + 77)
    assert step > 3


@in_trio
async def test_a_flush_that_is_cancelled_loses_no_row(cache_dir: Path) -> None:
    step, goes_on = 0, True
    while goes_on:
        step += 1
        place = cache_dir.with_name(f"cache{step}")
        async with running(place, clean=False) as lab:
            ids = [lab.origin.put(f"k{n}", content(n, 3 * BLOCK)) for n in range(3)]
            for object_id in ids:
                await lab.read(object_id)
            await settled(lab)
            goes_on = await interrupted(step, lab.store.flush)
            await lab.store.flush()
            assert not lab.store.catalog.changes and not lab.store.catalog._flushing
            origin = lab.origin
        origin.gets.clear()
        async with running(place, origin) as lab:
            for number, object_id in enumerate(ids):
                assert await lab.read(object_id) == content(number, 3 * BLOCK)
            assert not origin.gets

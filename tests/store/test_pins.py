"""Pins against plain sums: what fits in the budget, to the byte, what is whole, and what dropping gives back."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from cachefs.base.errors import NoRoom
from cachefs.base.names import ObjectId
from cachefs.base.units import Size
from cachefs.store.eviction import ANY
from cachefs.store.tier import RAM, SSD
from tests.fetch.scripted import content, in_trio
from tests.store.counters import loaded
from tests.store.lab import BLOCK, EXTENT, PAGE, Lab, begin_write, running


def pages(length: int) -> int:
    return -(-length // PAGE) * PAGE


def put(lab: Lab, object_id: ObjectId, blocks: set[int]) -> None:
    """These blocks come."""
    obj = lab.store.object(object_id)
    for block in sorted(blocks):
        cache_write = begin_write(lab.store, obj, block, block + 1)
        assert cache_write is not None
        cache_write.write(bytes(cache_write.stop - cache_write.start))
        lab.store.end_write(obj, cache_write)
    obj.close_if_unused()


@pytest.mark.parametrize("seed", range(4))
@in_trio
async def test_what_is_pinned_fits_in_the_budget_and_counts_what_is_here(cache_dir: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with running(cache_dir) as lab:
        store, [tier] = lab.store, lab.store.tiers
        sizes = [0, 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, EXTENT, EXTENT + 1]
        ids = [lab.origin.put(f"k{n}", bytes(size)) for n, size in enumerate(sizes)]
        here: dict[ObjectId, set[int]] = {object_id: set() for object_id in ids}
        pinned: set[ObjectId] = set()

        def length(object_id: ObjectId, block: int) -> int:
            return pages(min(BLOCK, object_id.size - block * BLOCK))

        def held(object_id: ObjectId) -> int:
            return sum(length(object_id, block) for block in here[object_id])

        for _ in range(80):
            object_id = rng.choice(ids)
            obj, count = store.object(object_id), -(-object_id.size // BLOCK)
            match rng.randrange(4):
                case 0 if count:
                    blocks = set(rng.sample(range(count), rng.randrange(1, count + 1)))
                    put(lab, object_id, blocks - here[object_id])
                    here[object_id] |= blocks
                case 1:
                    need = sum(held(i) for i in pinned if i != object_id) + sum(
                        length(object_id, block) for block in range(count)
                    )
                    budget = max(0, need + rng.choice([-1, 0, 1]))
                    store.pins.budget = Size(bytes=budget)
                    assert store.pins.budget_bytes == budget
                    known = object_id in pinned  # what comes of it later is pinned, too
                    if known or need <= budget:
                        store.pin(obj)
                        pinned.add(object_id)
                    else:
                        with pytest.raises(NoRoom, match=object_id.key):
                            store.pin(obj)
                        if not here[object_id]:
                            assert obj.pinned is (object_id in pinned)
                case 2:
                    store.unpin(obj)
                    pinned.discard(object_id)
                case 3:
                    freed = store.evict(obj)
                    assert freed == (0 if object_id in pinned else held(object_id))
                    if object_id not in pinned:
                        here[object_id].clear()
            assert store.pinned_bytes == sum(held(i) for i in pinned) == tier.pinned_bytes
            for other in ids:
                assert store.whole(store.object(other)) is (len(here[other]) == -(-other.size // BLOCK))


@in_trio
async def test_what_is_whole_may_lie_on_two_tiers(cache_dir: Path) -> None:
    async with running(cache_dir, ram=64 * BLOCK) as lab:
        object_id = lab.origin.put("k", content(1, EXTENT + BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        obj, (_, ssd) = lab.store.object(object_id), lab.store.tiers
        copy = lab.store.catalog.copies(obj, RAM)[0]
        assert lab.store._moves is not None and await lab.store._moves.move(obj, copy, ssd, ())
        for at, whole in ((0b0110, True), (0b1000, True)):
            lab.store.space.drop(obj, copy, at)
            assert lab.store.whole(obj) is whole
        there = lab.store.catalog.copies(obj, SSD)[0]
        lab.store.space.drop(obj, there, 0b0001)
        assert lab.store.whole(obj), "RAM has it still"
        lab.store.space.drop(obj, there, 0b0010)
        assert not lab.store.whole(obj)


@in_trio
async def test_what_lies_on_two_tiers_is_pinned_once(cache_dir: Path) -> None:
    async with running(cache_dir, ram=64 * BLOCK) as lab:
        store, (ram, ssd) = lab.store, lab.store.tiers
        store.pins.budget = Size(bytes=3 * EXTENT)
        assert store._moves is not None
        for number in range(3):
            object_id = lab.origin.put(f"k{number}", content(number, EXTENT))
            await lab.read(object_id)
            await lab.quiet()
            obj = store.object(object_id)
            [copy] = store.catalog.copies(obj, RAM)
            assert await store._moves.move(obj, copy, ssd, ())
            if number == 2:  # this one is promoted after it was pinned
                store.space.drop(obj, copy, copy.bitmap)
            store.pin(obj)
            assert store.pinned_bytes == ssd.pinned_bytes == (number + 1) * EXTENT
        [there] = store.catalog.copies(obj, SSD)
        assert await store._moves.move(obj, there, ram, ())
        assert store.pinned_bytes == 3 * EXTENT and len(store.catalog.all_copies(obj)) == 2
        assert store.space.evict_for(ram, 64 * BLOCK, ANY), "RAM may drop what SSD has"
        assert store.whole(obj) and store.evict(obj) == 0
        store.unpin(obj)
        assert store.pinned_bytes == 2 * EXTENT


@in_trio
async def test_all_pins_end_at_once_whichever_versions_they_are_of(cache_dir: Path) -> None:
    """The next daemon knows them by their rows alone."""
    async with running(cache_dir) as lab:
        origin = lab.origin
        ids = [origin.put(f"k{number}", content(number, BLOCK)) for number in range(9)]
        for number, object_id in enumerate(ids):
            put(lab, object_id, {0})
            if number % 2:
                lab.store.pin(lab.store.object(object_id))
    async with running(cache_dir, origin) as lab:
        store = lab.store
        batches = list(store.catalog._index.digests(SSD, 2, pinned=True))
        pinned = sorted(object_id.digest for object_id in ids[1::2])
        assert [digest for batch in batches for digest in batch] == pinned and len(batches) == 5
        assert store.pinned_bytes == 4 * BLOCK
        await store.pins.unpin_all()
        assert store.pinned_bytes == 0 and not any(copy.pinned for copy in loaded(store))
        assert len(loaded(store)) == 4, "no other row was read"


@in_trio
async def test_a_file_that_never_changes_stays_whole_where_a_part_is_pinned(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, EXTENT + BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        obj, [tier] = lab.store.object(object_id), lab.store.tiers
        first, second = lab.store.catalog.copies(obj, SSD)
        lab.store.space.set_pinned(second, True)
        os.close(tier.make_immutable(object_id.digest, object_id.size))
        assert lab.store.evict(obj) == 0 and first.bitmap == 0xFFFF
        lab.store.unpin(obj)
        assert lab.store.evict(obj) == EXTENT + BLOCK and not tier.file_path(object_id.digest).exists()

"""What is in memory and what the index says are one, whatever changes while a flush is under way, and whether it fails."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import NoRoom
from cachefs.base.names import ObjectId
from cachefs.store import catalog
from cachefs.store.eviction import ANY, LOWEST
from cachefs.store.tier import SSD
from tests.fetch.scripted import in_trio
from tests.store import counters
from tests.store.lab import BLOCK, EXTENT, Lab, begin_write, running

SIZES = [1, BLOCK, 2 * BLOCK + 3, EXTENT + BLOCK]


class World:
    """Versions whose blocks come and go, and what of each is here."""

    def __init__(self, lab: Lab, rng: random.Random) -> None:
        self.lab, self.rng = lab, rng
        self.ids = [lab.origin.put(f"k{n}", bytes(SIZES[n % len(SIZES)])) for n in range(10)]
        self.here: dict[ObjectId, set[int]] = {object_id: set() for object_id in self.ids}
        self.pinned: set[ObjectId] = set()

    def step(self) -> None:
        store, rng = self.lab.store, self.rng
        object_id = rng.choice(self.ids)
        obj, here = store.object(object_id), self.here[object_id]
        blocks = -(-object_id.size // BLOCK)
        match rng.randrange(7):
            case 0 | 1 | 2:
                block = rng.randrange(blocks)
                if block not in here:
                    cache_write = begin_write(store, obj, block, block + 1)
                    assert cache_write is not None
                    cache_write.write(bytes(cache_write.stop - cache_write.start))
                    store.end_write(obj, cache_write)
                    here.add(block)
            case 3:
                if object_id not in self.pinned:
                    store.evict(obj)
                    here.clear()
            case 4:
                if here:
                    store.pin(obj)
                    self.pinned.add(object_id)
            case 5:
                store.unpin(obj)
                self.pinned.discard(object_id)
            case 6:
                for copy in store.catalog.all_copies(obj):
                    gone = rng.getrandbits(16) & copy.bitmap
                    store.space.drop(obj, copy, gone)
                    here -= {copy.extent * 16 + at for at in range(16) if gone >> at & 1}
        if not here:  # a pin is known by a copy
            store.unpin(obj)
            self.pinned.discard(object_id)
        obj.close_if_unused()
        self.check(object_id)

    def check(self, object_id: ObjectId) -> None:
        store, here = self.lab.store, self.here[object_id]
        obj = store.peek(object_id)
        assert {b for b in range(-(-object_id.size // BLOCK)) if store.has(obj, b)} == here
        assert store.cached_bytes(object_id) == sum(min(BLOCK, object_id.size - b * BLOCK) for b in here)
        assert store.catalog.has_copies(obj, SSD) is bool(here)
        extents = [copy.extent for copy in store.catalog.copies(obj, SSD)]
        assert extents == sorted({block // 16 for block in here})

    def forget(self) -> None:
        """As when many others were used since."""
        some = self.rng.choice([0, 8, 16, 80])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(catalog, "OBJECTS_IN_MEMORY", some)
            self.lab.store.catalog._forget_some()


@pytest.mark.parametrize("seed", range(6))
@in_trio
async def test_rows_are_those_of_the_copies_though_flushes_fail(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Changes come before, during and after each flush, and versions are forgotten meanwhile."""
    rng = random.Random(seed)
    async with running(cache_dir) as lab:
        lab.store.pins.budget = type(lab.store.pins.budget)(percent=100.0)
        world, index = World(lab, rng), lab.store.catalog._index
        write, gate, begun = index.write, threading.Event(), trio.Event()
        fails, token = False, trio.lowlevel.current_trio_token()

        def gated(*args: Any) -> None:
            trio.from_thread.run_sync(lambda: begun.set(), trio_token=token)
            assert gate.wait(30)
            if fails:
                raise NoRoom("full")
            write(*args)

        monkeypatch.setattr(index, "write", gated)
        for _ in range(25):
            for _ in range(rng.randrange(6)):
                world.step()
            fails, begun = rng.random() < 0.4, trio.Event()
            gate.clear()
            changes = lab.store.catalog.changes
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lab.store.flush)
                if changes:
                    await begun.wait()
                for _ in range(rng.randrange(6)):
                    world.step()
                if rng.random() < 0.5:
                    world.forget()
                for classes in (LOWEST, ANY):  # passes over rows that are being written
                    lab.store.eviction.victim(SSD, classes)
                gate.set()
            if changes:
                assert bool(lab.store.catalog.index_error) is fails
            if rng.random() < 0.5:
                world.forget()
            for object_id in world.ids:
                world.check(object_id)
        fails = False
        await lab.store.flush()
        await lab.store.flush()  # what the first has learnt
        known = counters.rows(lab.store)
        assert sum(copy.bitmap.bit_count() for copy in known.values()) == sum(map(len, world.here.values()))
        await lab.check_counters()
        lab.check_accounts()
        here, pinned = world.here, world.pinned
        monkeypatch.undo()
    async with running(cache_dir) as lab:
        for object_id, blocks in here.items():
            obj = lab.store.object(object_id)
            assert {b for b in range(-(-object_id.size // BLOCK)) if lab.store.has(obj, b)} == blocks
            pins = {copy.pinned for copy in lab.store.catalog.all_copies(obj)}
            assert not blocks or pins == {object_id in pinned}


@in_trio
async def test_what_is_in_use_or_not_written_is_not_forgotten(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir) as lab:
        world = World(lab, random.Random(1))
        rows = lab.store.catalog
        ids = world.ids[:6]
        for object_id in ids:
            cache_write = begin_write(lab.store, lab.store.object(object_id), 0, 1)
            assert cache_write is not None
            cache_write.write(bytes(cache_write.stop - cache_write.start))
            lab.store.end_write(lab.store.object(object_id), cache_write)
        await lab.store.flush()
        used, changed = rows.object(ids[0]), rows.object(ids[1])
        used.hold()
        lab.store.eviction.touch(rows.all_copies(changed)[0])
        monkeypatch.setattr(catalog, "OBJECTS_IN_MEMORY", 8 * 100)
        rows._forget_some()
        assert set(rows._objects) == {ids[0].digest, ids[1].digest}
        assert rows._loaded == sum(len([c for c in o.copies.values() if c]) for o in rows._objects.values())
        assert rows.object(ids[0]) is used and rows.object(ids[1]) is changed
        used.release()
        monkeypatch.undo()


@pytest.mark.parametrize("bound", ["OBJECTS_IN_MEMORY", "COPIES_IN_MEMORY"])
@in_trio
async def test_memory_is_bounded(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """By the versions, and by their copies. Those used last stay."""
    async with running(cache_dir) as lab:
        rows = lab.store.catalog
        monkeypatch.setattr(catalog, "OBJECTS_IN_MEMORY", 16 if bound == "OBJECTS_IN_MEMORY" else 64)
        monkeypatch.setattr(catalog, bound, 16)
        ids = [lab.origin.put(f"k{n}", bytes(BLOCK)) for n in range(60)]
        most = 0
        for _ in range(2):
            for number, object_id in enumerate(ids):
                obj = rows.object(object_id)
                if not lab.store.has(obj, 0):
                    cache_write = begin_write(lab.store, obj, 0, 1)
                    assert cache_write is not None
                    cache_write.write(bytes(BLOCK))
                    lab.store.end_write(obj, cache_write)
                    obj.close_if_unused()
                    await lab.store.flush()
                most = max(most, len(rows._objects))
                assert rows._loaded <= 16 and len(rows._objects) <= 16
                assert list(rows._objects)[-1] == object_id.digest
                if number > 4:
                    again = rows._objects.get(ids[number - 4].digest)
                    assert again is not None and rows.object(ids[number - 4]) is again
        assert most == 16 and all(lab.store.cached_bytes(object_id) for object_id in ids)
        monkeypatch.undo()


@in_trio
async def test_a_copy_made_anew_during_a_flush_that_fails_has_one_place_in_the_order(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index still has the place that the copy before it had, and not the one that the flush was about to write."""
    async with running(cache_dir) as lab:
        store, object_id = lab.store, lab.origin.put("k", bytes(BLOCK))
        obj, index = store.object(object_id), store.catalog._index

        def cache() -> None:
            cache_write = begin_write(store, obj, 0, 1)
            assert cache_write is not None
            cache_write.write(bytes(BLOCK))
            store.end_write(obj, cache_write)

        cache()
        await store.flush()
        store.renew(obj)

        def made_anew() -> None:
            store.evict(obj)
            cache()

        def refuse(*_: Any) -> None:
            trio.from_thread.run_sync(made_anew, trio_token=token)
            raise NoRoom("full")

        token = trio.lowlevel.current_trio_token()
        with monkeypatch.context() as patch:
            patch.setattr(index, "write", refuse)
            await store.flush()
        assert store.catalog.index_error
        await store.flush()
        assert len(index._db.scan("order")) == 1


@pytest.mark.parametrize("stored", [False, True])
@in_trio
async def test_an_index_that_cannot_be_written_costs_no_memory_for_what_it_never_had(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """As when the disk of the index was mounted read-only after an error, and the RAM tier goes on for weeks."""
    async with running(cache_dir, ssd=0, ram=8 * BLOCK) as lab:
        catalog, index = lab.store.catalog, lab.store.catalog._index
        ids = [lab.origin.put(f"k{n}", bytes(BLOCK)) for n in range(60)]
        for object_id in ids[:8]:
            await lab.read(object_id)
        await lab.quiet()
        if stored:
            await lab.store.flush()

        def refuse(*_: Any) -> None:
            raise NoRoom("read-only")

        with monkeypatch.context() as patch:
            patch.setattr(index, "write", refuse)
            for object_id in ids:
                await lab.read(object_id)
                await lab.quiet()
                await lab.store.flush()
                assert len(catalog._dirty) <= 8 and len(catalog._removed) <= 8 * stored
        await lab.store.flush()
        assert len(counters.rows(lab.store)) == 8

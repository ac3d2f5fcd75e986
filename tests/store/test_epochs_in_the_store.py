"""Epochs through the real store: what is fetched again of a dataset twice as large as the cache, on one tier and on two."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from cachefs.base.errors import NoRoom
from cachefs.base.names import ObjectId
from cachefs.store.eviction import EPOCHS_SAVED_EVERY
from cachefs.store.tier import RAM
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store.lab import BLOCK, EXTENT, KIB, Lab, as_kill_leaves_it, begin_write, running

SMALL = 100 * KIB  # one block of 128 KiB
FILES = 320
SHARD = 2 * EXTENT + BLOCK


def dataset(origin: ScriptedOrigin, name: str, count: int, size: int) -> list[ObjectId]:
    data = content(name, size)
    return [origin.put(f"{name}/{number}", data) for number in range(count)]


async def epoch(lab: Lab, ids: Iterable[ObjectId], piece: int = 1 << 30, every: int = 8) -> float:
    """Read all of each, and flush now and then, as once a second; the share of the bytes that was cached."""
    before, asked = lab.origin.delivered, 0
    for number, object_id in enumerate(ids):
        opened = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        for offset in range(0, object_id.size, piece):
            size = min(piece, object_id.size - offset)
            assert len(await lab.read_open(opened, offset, size)) == size
            asked += size
        lab.fetcher.close(opened)
        if number % every == 0:
            await lab.store.flush()
    await lab.quiet()
    return 1 - (lab.origin.delivered - before) / asked


def shuffled(ids: list[ObjectId], seed: object) -> list[ObjectId]:
    return random.Random(str(seed)).sample(ids, len(ids))


@pytest.mark.long
@pytest.mark.parametrize("ram_share", [pytest.param(0, marks=pytest.mark.long), 0.2])
@pytest.mark.parametrize("order", ["shuffled", pytest.param("scan", marks=pytest.mark.long)])
@in_trio
async def test_half_of_many_small_files_is_half_the_hits(
    cache_dir: Path, order: str, ram_share: float
) -> None:
    total = FILES * SMALL // 2
    ram = int(total * ram_share)
    async with running(cache_dir, ssd=total - ram, ram=ram, block=128 * KIB, background=True) as lab:
        ids = dataset(lab.origin, "train", FILES, SMALL)
        hits = [await epoch(lab, shuffled(ids, n) if order == "shuffled" else ids) for n in range(5)]
        # A tenth of RAM is kept free for what comes: a point of these.
        assert min(hits[2:]) >= (0.48 if not ram else 0.47), hits
        assert max(hits) <= 0.51
        (known,) = lab.store.eviction_status()["datasets"]
        assert (known["name"], known["mode"], known["epoch"]) == ("train", "epoch", 5)
        lab.check_accounts()


@pytest.mark.long
@in_trio
async def test_by_recency_it_is_a_sixth_or_nothing(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=FILES * SMALL // 2, block=128 * KIB, eviction="lru") as lab:
        ids = dataset(lab.origin, "train", FILES, SMALL)
        assert [await epoch(lab, ids) for _ in range(3)][1:] == [0.0, 0.0]
        hits = [await epoch(lab, shuffled(ids, n)) for n in range(3)]
        assert max(hits) <= 0.25, hits


@pytest.mark.long
@pytest.mark.parametrize("ram_share", [pytest.param(0, marks=pytest.mark.long), 0.2])
@in_trio
async def test_shards_read_in_pieces_by_a_sequential_reader(cache_dir: Path, ram_share: float) -> None:
    count = 60
    total = count * SHARD // 2
    ram = int(total * ram_share)
    async with running(cache_dir, ssd=total - ram, ram=ram, readahead=EXTENT // 2, background=True) as lab:
        ids = dataset(lab.origin, "shards", count, SHARD)
        hits = [await epoch(lab, shuffled(ids, n), 4 * BLOCK, every=1) for n in range(5)]
        assert min(hits[2:]) >= (0.46 if not ram else 0.44), hits
        lab.check_accounts()


@pytest.mark.long
@in_trio
async def test_another_dataset_takes_over_within_two_epochs(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=FILES * SMALL // 2, block=128 * KIB) as lab:
        one = dataset(lab.origin, "one", FILES, SMALL)
        other = dataset(lab.origin, "other", FILES, SMALL)
        for n in range(3):
            await epoch(lab, shuffled(one, n))
        # Left in the middle: a part of it was still protected.
        await epoch(lab, shuffled(one, 9)[: FILES // 2])
        hits = [await epoch(lab, shuffled(other, n)) for n in range(4)]
        assert min(hits[2:]) >= 0.48, hits


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("clean", marks=pytest.mark.long), "killed"])
@in_trio
async def test_a_restart_in_the_middle_goes_on(cache_dir: Path, kind: str) -> None:
    origin = ScriptedOrigin()
    ids = dataset(origin, "train", FILES, SMALL)
    limit = FILES * SMALL // 2
    place = cache_dir
    async with running(cache_dir, origin, ssd=limit, block=128 * KIB) as lab:
        for n in range(2):
            await epoch(lab, shuffled(ids, n))
        order = shuffled(ids, 2)
        first = await epoch(lab, order[: FILES // 2])
        await lab.store.flush()
        if kind == "killed":
            place = as_kill_leaves_it(cache_dir, cache_dir.with_name("cache-killed"))
    async with running(place, origin, ssd=limit, block=128 * KIB) as lab:
        second = await epoch(lab, order[FILES // 2 :])
        assert (first + second) / 2 >= 0.47
        assert await epoch(lab, shuffled(ids, 3)) >= 0.46
        assert await epoch(lab, shuffled(ids, 4)) >= 0.48


@in_trio
async def test_what_is_fetched_ahead_displaces_nothing_that_is_wanted(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=16 * BLOCK, eviction="epoch") as lab:
        ids = [lab.origin.put(f"d/{i}", b"x" * BLOCK) for i in range(64)]
        store = lab.store
        for n in range(2):
            await epoch(lab, ids[:32] if n == 0 else ids[:20], every=1)
        kept = [i for i in ids[:32] if store.cached_bytes(i)]
        protected = [i for i in ids[20:32] if store.cached_bytes(i)]
        assert protected and len(kept) == 16
        began = 0
        cache_writes = []
        while (
            cache_write := begin_write(store, obj := store.object(ids[32 + began]), 0, 1, prefetched=True)
        ) is not None:
            cache_write.write(b"y" * BLOCK)
            store.end_write(obj, cache_write)
            obj.close_if_unused()
            cache_writes.append(ids[32 + began])
            began += 1
            if began % 3 == 0:
                await store.flush()
            assert began <= 16
        assert began == 16 - len(protected), "all that was used in this epoch made room"
        assert all(store.cached_bytes(i) for i in (*protected, *cache_writes))
        # A demand may, and takes what was used least lately.
        await lab.read(ids[60])
        await lab.quiet()
        assert store.cached_bytes(ids[60]) == BLOCK
        assert sum(not store.cached_bytes(i) for i in protected) == 1
        # Once read, it is the next to go.
        await store.flush()
        await lab.read(cache_writes[0])
        await store.flush()
        await lab.read(ids[61])
        await lab.quiet()
        await store.flush()
        assert [bool(store.cached_bytes(ids[60])), bool(store.cached_bytes(cache_writes[0]))] == [False, True]
        await lab.read(ids[62])
        await lab.quiet()
        assert not store.cached_bytes(cache_writes[0])
        lab.check_accounts()


@in_trio
async def test_what_a_reader_left_behind_does_not_keep_the_rest_out(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=4 * EXTENT, readahead=EXTENT) as lab:
        store = lab.store
        for number in range(3):
            object_id = lab.origin.put(f"d/{number}", b"x" * (5 * EXTENT))
            handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
            for offset in range(0, 5 * BLOCK, BLOCK):
                await lab.read_open(handle, offset, BLOCK)
            await lab.quiet()
            assert store.cached_bytes(object_id) > 6 * BLOCK, "it was read ahead of"
            lab.fetcher.close(handle)
        await store.flush()
        for number in range(4):
            data = b"y" * EXTENT
            obj = store.object(lab.origin.put(f"e/{number}", data))
            cache_write = begin_write(store, obj, 0, 16, prefetched=True)
            assert cache_write is not None, number
            cache_write.write(data)
            store.end_write(obj, cache_write)
            obj.close_if_unused()
            await store.flush()
        obj = store.object(lab.origin.put("e/9", b"y"))
        assert begin_write(store, obj, 0, 1, prefetched=True) is None, (
            "all of these wait, and none displaces another"
        )


@in_trio
async def test_a_reader_that_joins_makes_what_came_ahead_a_used_one(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=64 * BLOCK) as lab:
        store = lab.store
        ids = [lab.origin.put(f"d/{i}", content(i, BLOCK)) for i in range(3)]
        states = []
        for object_id, how in zip(ids, ("nobody", "waited", "read"), strict=True):
            obj = store.object(object_id)
            cache_write = begin_write(store, obj, 0, 1, prefetched=True)
            assert cache_write is not None
            if how == "waited":
                cache_write.wake_at = 5
                cache_write.on_written = lambda: None
            cache_write.write(content(0, BLOCK))
            store.settle(obj, cache_write)
            if how == "read":
                cache_write.read(0, 10)
            store.end_write(obj, cache_write)
            obj.close_if_unused()
            copy = store.catalog.copy(obj, 1, 0)
            assert copy is not None
            states.append(store.eviction.protected(copy))
        assert states == [True, False, False]


@in_trio
async def test_ram_drops_what_was_used_rather_than_displace_what_is_wanted(cache_dir: Path) -> None:
    """SSD holds what this epoch still needs, and nothing else: what RAM has finished with goes."""
    async with running(cache_dir, ssd=16 * BLOCK, ram=8 * BLOCK, eviction="epoch", background=True) as lab:
        ids = [lab.origin.put(f"d/{i}", b"x" * BLOCK) for i in range(48)]
        await epoch(lab, ids, every=1)
        held = [i for i in ids if lab.store.cached_bytes(i)]
        again = [i for i in ids if i not in held]
        await epoch(lab, again, every=1)
        assert sum(lab.store.cached_bytes(i) for i in held) >= 14 * BLOCK
        lab.check_accounts()


# -- pins ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ram", "kind"),
    [
        (0, "clean"),
        pytest.param(0, "killed", marks=pytest.mark.long),
        pytest.param(16 * BLOCK, "clean", marks=pytest.mark.long),
        (16 * BLOCK, "killed"),
    ],
)
@in_trio
async def test_pins_survive_pressure_and_restarts(cache_dir: Path, ram: int, kind: str) -> None:
    origin = ScriptedOrigin()
    ids = [origin.put(f"k{i}", content(i, 2 * BLOCK)) for i in range(64)]
    place = cache_dir
    async with running(cache_dir, origin, ssd=32 * BLOCK, ram=ram, background=True) as lab:
        for i in ids[:4]:
            await lab.read(i)
            lab.store.pin(lab.store.object(i))
        assert lab.store.pinned_bytes == 8 * BLOCK
        await epoch(lab, ids[4:])
        assert [lab.store.whole(lab.store.object(i)) for i in ids[:4]] == [True] * 4
        await lab.store.flush()
        if kind == "killed":
            place = as_kill_leaves_it(cache_dir, cache_dir.with_name("cache-killed"))
    async with running(place, origin, ssd=32 * BLOCK, ram=ram, background=True) as lab:
        if kind == "clean":
            assert lab.store.pinned_bytes == 8 * BLOCK
        await epoch(lab, ids[4:])
        assert [lab.store.whole(lab.store.object(i)) for i in ids[:4]] == [True] * 4
        for i in ids[:4]:
            lab.store.unpin(lab.store.object(i))
        assert lab.store.pinned_bytes == 0
        await epoch(lab, ids[4:])
        await epoch(lab, reversed(ids[4:]))
        await epoch(lab, ids[4:])
        assert not any(lab.store.cached_bytes(i) for i in ids[:4])
        lab.check_accounts()


@in_trio
async def test_the_budget_of_pins_is_kept(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=32 * BLOCK) as lab:
        ids = [lab.origin.put(f"k{i}", content(i, 8 * BLOCK)) for i in range(3)]
        for i in ids:
            await lab.read(i)
        lab.store.pin(lab.store.object(ids[0]))
        lab.store.pin(lab.store.object(ids[0]))
        lab.store.pin(lab.store.object(ids[1]))
        with pytest.raises(NoRoom, match="k2 cannot be pinned"):
            lab.store.pin(lab.store.object(ids[2]))
        assert lab.store.pinned_bytes == 16 * BLOCK
        lab.store.unpin(lab.store.object(ids[0]))
        lab.store.pin(lab.store.object(ids[2]))
        assert lab.store.pinned_bytes == 16 * BLOCK


@in_trio
async def test_blocks_that_come_to_a_pinned_version_are_pinned(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=64 * BLOCK) as lab:
        object_id = lab.origin.put("k", content(1, EXTENT + 4 * BLOCK))
        await lab.read(object_id, 0, BLOCK)
        obj = lab.store.object(object_id)
        lab.store.pin(obj)
        held = lab.store.cached_bytes(object_id)
        assert lab.store.pinned_bytes == held
        await lab.read(object_id)
        await lab.quiet()
        assert lab.store.pinned_bytes == object_id.size
        assert lab.store.whole(obj)


@in_trio
async def test_evict_drops_what_is_not_pinned_and_says_how_much(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=64 * BLOCK, ram=16 * BLOCK) as lab:
        ids = [lab.origin.put(f"k{i}", content(i, 2 * BLOCK + 1)) for i in range(3)]
        for i in ids:
            await lab.read(i)
        await lab.quiet()
        lab.store.pin(lab.store.object(ids[0]))
        freed = [lab.store.evict(lab.store.object(i)) for i in ids]
        assert freed == [0, 2 * BLOCK + 4096, 2 * BLOCK + 4096]
        assert [lab.store.cached_bytes(i) for i in ids] == [2 * BLOCK + 1, 0, 0]
        lab.check_accounts()
        await lab.read(ids[1])
        assert lab.store.whole(lab.store.object(ids[1]))


@in_trio
async def test_what_is_passthrough_leaves_when_its_last_user_does(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=64 * BLOCK) as lab:
        object_id = lab.origin.put("k", content(1, 2 * BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        obj = lab.store.object(object_id)
        backing = lab.store.open_backing(obj)
        assert backing is not None
        assert lab.store.evict(obj) == 2 * BLOCK
        assert lab.store.cached_bytes(object_id) == 0
        assert lab.used() == 2 * BLOCK, "somebody reads it"
        lab.store.release_backing(backing)
        assert lab.used() == 0
        lab.check_accounts()


@in_trio
async def test_a_pinned_passthrough_file_stays(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=32 * BLOCK) as lab:
        ids = [lab.origin.put(f"k{i}", content(i, 2 * BLOCK)) for i in range(40)]
        await lab.read(ids[0])
        await lab.quiet()
        obj = lab.store.object(ids[0])
        backing = lab.store.open_backing(obj)
        assert backing is not None
        lab.store.pin(obj)
        lab.store.release_backing(backing)
        assert lab.store.evict(obj) == 0
        await epoch(lab, ids[1:])
        assert lab.store.whole(obj)
        lab.check_accounts()


@in_trio
async def test_passthrough_is_a_use(cache_dir: Path) -> None:
    async with running(cache_dir, ram=64 * BLOCK, ssd=0) as lab:
        ids = [lab.origin.put(f"d/{i}", content(i, BLOCK)) for i in range(40)]
        for _ in range(2):
            for i in ids:
                if not lab.store.whole(lab.store.object(i)):
                    await lab.read(i)
                    await lab.quiet()
                backing = lab.store.open_backing(lab.store.object(i))
                assert backing is not None and backing.tier.number == RAM
                lab.store.release_backing(backing)
                await lab.store.flush()
        (known,) = lab.store.eviction_status()["datasets"]
        assert (known["epoch"], known["mode"]) == (2, "epoch")


@in_trio
async def test_the_state_of_epochs_is_written_now_and_then_and_when_it_changes(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        eviction = lab.store.eviction
        written = [b"epochs" in eviction._notes(False) for _ in range(2 * EPOCHS_SAVED_EVERY)]
        assert written.count(True) == 2
        assert b"epochs" not in eviction._notes(False) and b"epochs" in eviction._notes(True)
        eviction.epochs.version += 1
        assert b"epochs" in eviction._notes(False) and b"epochs" not in eviction._notes(False)

"""Long series, guards that must refuse, and what is borrowed, pinned and dropped: afterwards the counters are what there is
(`counters.py`, held after each test here as in all others)."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base import linux
from cachefs.base.errors import NoRoom
from cachefs.base.units import Size
from cachefs.store import store
from cachefs.store.eviction import Waiting
from cachefs.store.scrub import reclaim as reclaimed
from cachefs.store.tier import RAM, SSD
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store import counters
from tests.store.counters import open_files
from tests.store.lab import BLOCK, EXTENT, KIB, MIB, Lab, begin_write, cache_files, running

SMALL = 4096


async def settled(lab: Lab) -> None:
    """No transfer is under way, and no move between tiers either, soon."""
    await lab.quiet()
    with trio.move_on_after(30):
        while True:
            try:
                await lab.check_counters()
            except AssertionError:
                await trio.sleep(0.01)
            else:
                return
    await lab.check_counters()


# -- long series --------------------------------------------------------------------------------------


@in_trio
async def test_a_version_of_more_than_255_extents(cache_dir: Path) -> None:
    """Its rows, its places in the order of eviction, and what is read, moved up, dropped and forgotten of it."""
    extents = 300
    size = (extents - 1) * 16 * SMALL + 5
    origin = ScriptedOrigin(chunk=1 * MIB)
    data = content(1, size)
    object_id = origin.put("large", data)
    async with running(cache_dir, origin, ssd=64 * MIB, block=SMALL) as lab:
        await lab.fetcher.prefetch(origin, object_id)  # type: ignore[arg-type]
        await settled(lab)
        assert lab.store.cached_bytes(object_id) == size and lab.fetcher.whole(object_id)
        for extent in (0, 63, 64, 254, 255, 256, 298):
            offset = extent * 16 * SMALL
            assert await lab.read(object_id, offset, 100) == data[offset : offset + 100]
        await settled(lab)  # younger now: each has one place in the order
        rows = counters.rows(lab.store)
        assert sorted(key[2] for key in rows) == list(range(extents))
        assert await lab.read(object_id) == data
        await settled(lab)
    before = len(origin.gets)
    async with running(cache_dir, origin, ssd=64 * MIB, block=SMALL) as lab:
        assert lab.store.cached_bytes(object_id) == size
        assert await lab.read(object_id) == data and len(origin.gets) == before
        await settled(lab)
        assert lab.store.evict(lab.store.object(object_id)) >= size
        await settled(lab)
        assert not lab.used() and not counters.rows(lab.store) and not cache_files(lab.store.tiers[0].path)


@pytest.mark.parametrize("ram, ssd", [(0, 24 * BLOCK), (16 * BLOCK, 24 * BLOCK)])
@in_trio
async def test_a_cache_that_is_used_in_every_way(cache_dir: Path, ram: int, ssd: int) -> None:
    """Reads, prefetches, pins, drops, remote-owned copies and flushes at random: counted at each rest."""
    rng = random.Random(ram)
    async with running(cache_dir, ssd=ssd, ram=ram, background=bool(ram)) as lab:
        store = lab.store
        sizes = [1, SMALL + 1, BLOCK, 3 * BLOCK + 7, EXTENT + 2 * BLOCK]
        ids = [lab.origin.put(f"k{n}", content(n, rng.choice(sizes))) for n in range(40)]
        for step in range(240):
            object_id = rng.choice(ids)
            obj = store.object(object_id)
            match rng.randrange(8):
                case 0 | 1 | 2:
                    await lab.read(object_id)
                case 3:
                    await lab.fetcher.prefetch(lab.origin, object_id, 0, BLOCK, prefetched=False)  # type: ignore[arg-type]
                case 4:
                    borrow(lab, object_id, 0)
                case 5:
                    if object_id.size <= BLOCK and store.pinned_bytes < 4 * BLOCK:
                        store.pin(obj)
                case 6:
                    store.unpin(obj)
                case 7:
                    store.evict(obj)
            if step % 20 == 19:
                await settled(lab)
                lab.check_accounts()


def borrow(lab: Lab, object_id: Any, block: int, *, whole: bool = True) -> bool:
    """A block that another node keeps comes here, or not wholly."""
    obj = lab.store.object(object_id)
    if lab.store.has(obj, block) or lab.fetcher.transfers.of(obj):
        return False
    cache_write = begin_write(lab.store, obj, block, block + 1, remote_owned=True)
    if cache_write is None:
        return False
    length = min(BLOCK, object_id.size - block * BLOCK)
    cache_write.write(bytes(length if whole else length // 2))
    lab.store.end_write(obj, cache_write)
    obj.close_if_unused()
    return whole


@in_trio
async def test_a_copy_whose_bytes_a_reader_still_has_becomes_no_remote_owned_one(cache_dir: Path) -> None:
    """Its bytes were counted as this node's, and would be taken off those of other nodes."""
    async with running(cache_dir, ssd=0, ram=8 * MIB) as lab:
        object_id = lab.origin.put("k", content(1, BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        obj, (ram,) = lab.store.object(object_id), lab.store.tiers
        with obj.held():
            shared = lab.store.pin_block(obj, 0)
            assert shared is not None and lab.store.evict(obj) == BLOCK
            assert borrow(lab, object_id, 0)
            assert (ram.used_bytes, ram.remote_owned_bytes) == (BLOCK, 0)
            lab.store.unpin_block(obj, shared)
        await settled(lab)
        assert lab.store.evict(obj) == BLOCK
        assert (ram.used_bytes, ram.remote_owned_bytes) == (0, 0)


# -- guards -------------------------------------------------------------------------------------------


@in_trio
async def test_no_two_fills_write_one_block(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, 2 * EXTENT))
        obj = lab.store.object(object_id)
        first = begin_write(lab.store, obj, 2, 6)
        assert first is not None
        used = lab.used()
        for start, stop in ((0, 3), (2, 6), (3, 4), (5, 16)):
            assert begin_write(lab.store, obj, start, stop) is None
        assert lab.used() == used, "what was refused has reserved nothing"
        beside = [begin_write(lab.store, obj, start, stop) for start, stop in ((0, 2), (6, 16), (18, 22))]
        assert all(beside)
        first.write(content(1, 2 * EXTENT)[2 * BLOCK : 4 * BLOCK])
        lab.store.settle(obj, first)
        assert begin_write(lab.store, obj, 4, 6) is None, "still on its way"
        for cache_write in (first, *beside):
            assert cache_write is not None
            lab.store.end_write(obj, cache_write)
        again = begin_write(lab.store, obj, 4, 6)
        assert again is not None, "it did not come, so it may come again"
        lab.store.end_write(obj, again)
        obj.close_if_unused()
        await settled(lab)
        assert lab.used() == 2 * BLOCK


@in_trio
async def test_what_did_not_come_is_no_use(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        obj = lab.store.object(lab.origin.put("k", content(1, 2 * BLOCK)))
        clock = lab.store.catalog.clock
        for some in (b"", bytes(BLOCK // 2)):
            cache_write = begin_write(lab.store, obj, 0, 2)
            assert cache_write is not None and cache_write.wanted
            cache_write.write(some)
            lab.store.end_write(obj, cache_write)
        assert lab.store.catalog.clock == clock and not lab.store.eviction_status()["datasets"]
        cache_write = begin_write(lab.store, obj, 0, 2)
        assert cache_write is not None
        cache_write.write(content(1, 2 * BLOCK)[: BLOCK + 1])
        lab.store.end_write(obj, cache_write)
        assert lab.store.catalog.clock > clock and len(lab.store.eviction_status()["datasets"]) == 1
        obj.close_if_unused()


@in_trio
async def test_only_a_file_that_never_changes_goes_on_under_a_new_name(cache_dir: Path) -> None:
    """One that was fetched may be punched and written yet: a second name of it would show that."""
    async with running(cache_dir) as lab:
        data = content(1, 2 * EXTENT + 5)
        old = lab.origin.put("old", data)
        assert await lab.read(old) == data
        await lab.quiet()
        assert lab.fetcher.whole(old)
        new = lab.origin.put("new", data)
        assert not await lab.store.recast(old, new)
        assert lab.fetcher.whole(old) and not lab.store.cached_bytes(new)
        lab.store.evict(lab.store.object(old))
        assert await lab.read(new) == data


@in_trio
async def test_a_new_name_is_nothing_where_the_tier_has_no_room(cache_dir: Path) -> None:
    """Its limit has sunk meanwhile: neither version is cached, and nothing of them is left."""
    async with running(cache_dir) as lab:
        [tier] = lab.store.tiers
        data = content(1, 2 * EXTENT + 5)
        old = lab.origin.put("old", data)
        await lab.read(old)
        await lab.quiet()
        backing = lab.store.open_backing(lab.store.object(old))
        assert backing is not None
        lab.store.release_backing(backing)
        new, cap = lab.origin.put("new", data), tier.cap_bytes
        tier.cap_bytes = 2 * EXTENT
        assert not await lab.store.recast(old, new)
        tier.cap_bytes = cap
        assert not lab.store.cached_bytes(old) and not lab.store.cached_bytes(new)
        await settled(lab)
        assert tier.used_bytes == 0 and not cache_files(tier.path)
        assert await lab.read(new) == data


@in_trio
async def test_what_is_remote_owned_becomes_ones_own_with_all_that_it_counts(cache_dir: Path) -> None:
    """Landed, on its way, and dropped while it is used."""
    async with running(cache_dir, ssd=0, ram=64 * BLOCK) as lab:
        [tier] = lab.store.tiers
        object_id = lab.origin.put("k", content(1, EXTENT))
        obj = lab.store.object(object_id)
        assert tier.number == RAM and borrow(lab, object_id, 0)
        assert not borrow(lab, object_id, 1, whole=False)
        assert tier.remote_owned_bytes == tier.used_bytes == BLOCK
        coming = begin_write(lab.store, obj, 2, 4, remote_owned=True)
        assert coming is not None and tier.remote_owned_bytes == tier.used_bytes == 3 * BLOCK
        lab.store.evict(obj)  # its bytes stay as long as something comes into it
        assert tier.remote_owned_bytes == tier.used_bytes == 3 * BLOCK
        own = begin_write(lab.store, obj, 8, 9)
        assert own is not None
        assert (tier.remote_owned_bytes, tier.own_bytes) == (0, 4 * BLOCK), "an extent is kept as a whole"
        for cache_write in (coming, own):
            lab.store.end_write(obj, cache_write)
        obj.close_if_unused()
        await settled(lab)
        assert (tier.remote_owned_bytes, tier.used_bytes) == (0, 0)


@in_trio
async def test_what_is_empty_may_be_pinned_without_a_budget(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        lab.store.pins.budget = Size(percent=0)
        lab.store.pin(lab.store.object(lab.origin.put("empty", b"")))
        with pytest.raises(NoRoom):
            lab.store.pin(lab.store.object(lab.origin.put("k", b"1")))


@pytest.mark.parametrize("while_used", [False, True])
@in_trio
async def test_what_is_remote_owned_and_dropped_counts_no_more(cache_dir: Path, while_used: bool) -> None:
    async with running(cache_dir, ssd=0, ram=64 * BLOCK) as lab:
        [tier] = lab.store.tiers
        object_id = lab.origin.put("k", content(1, EXTENT))
        obj = lab.store.object(object_id)
        for block in range(3):
            assert borrow(lab, object_id, block)
        coming = begin_write(lab.store, obj, 4, 5, remote_owned=True) if while_used else None
        lab.store.evict(obj)
        assert tier.remote_owned_bytes == tier.used_bytes == (4 * BLOCK if while_used else 0)
        if coming is not None:
            lab.store.end_write(obj, coming)
        obj.close_if_unused()
        await settled(lab)
        assert tier.remote_owned_bytes == tier.used_bytes == 0


@in_trio
async def test_what_is_pinned_and_unpinned_is_counted(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=64 * BLOCK) as lab:
        [tier] = lab.store.tiers
        ids = [lab.origin.put(f"k{n}", content(n, 3 * BLOCK + 1)) for n in range(3)]
        each = 3 * BLOCK + SMALL
        for number, object_id in enumerate(ids, 1):
            await lab.read(object_id)
            lab.store.pin(lab.store.object(object_id))
            assert tier.pinned_bytes == number * each
            await settled(lab)
        lab.store.pin(lab.store.object(ids[0]))
        assert tier.pinned_bytes == 3 * each, "twice is once"
        assert lab.store.evict(lab.store.object(ids[0])) == 0
        lab.store.unpin(lab.store.object(ids[0]))
        lab.store.unpin(lab.store.object(ids[0]))
        assert tier.pinned_bytes == 2 * each
        await settled(lab)
        assert lab.store.evict(lab.store.object(ids[0])) == each
        await settled(lab)
    async with running(cache_dir, lab.origin, ssd=64 * BLOCK) as lab:
        assert lab.store.tiers[0].pinned_bytes == 2 * each


# -- after an unclean stop ----------------------------------------------------------------------------


@in_trio
async def test_what_rows_and_files_disagree_about_is_put_right_and_told(cache_dir: Path) -> None:
    """To the block: what no row speaks of is punched out, what the file has not is forgotten, and all else stays."""
    async with running(cache_dir) as lab:
        [tier] = lab.store.tiers
        data = content(1, 2 * EXTENT)
        object_id = lab.origin.put("k", data)
        obj = lab.store.object(object_id)
        for block in (0, 1, 5, 9, 20):
            assert borrow(lab, object_id, block)
        lab.store.space.make_own(lab.store.catalog.copies(obj, tier.number)[0])
        file = tier.file_path(object_id.digest)

        async def reclaim() -> int:
            await lab.store.flush()
            return await reclaimed(lab.store, tier, object_id.digest, file.stat().st_blocks * 512)

        assert await reclaim() == 0, "a file with holes between its blocks is as it should be"
        fd = os.open(file, os.O_RDWR)
        os.pwrite(fd, b"x" * SMALL, 3 * BLOCK)  # stray
        os.pwrite(fd, b"x" * SMALL, 30 * BLOCK + SMALL)  # stray
        linux.punch(fd, 5 * BLOCK + SMALL, SMALL)  # a hole within
        linux.punch(fd, 20 * BLOCK, BLOCK)
        obj.refs += 1
        assert await reclaim() == 0, "not while it is in use"
        obj.refs -= 1
        assert await reclaim() == 4 * BLOCK
        assert [lab.store.has(obj, block) for block in (0, 1, 3, 5, 9, 20, 30)] == [
            True,
            True,
            False,
            False,
            True,
            False,
            False,
        ]
        assert os.lseek(fd, 2 * BLOCK, os.SEEK_DATA) == 9 * BLOCK
        assert await reclaim() == 0
        lab.check_accounts()
        os.truncate(file, BLOCK + 5)
        assert await reclaim() == 2 * BLOCK
        assert lab.store.has(obj, 0) and not lab.store.has(obj, 1) and not lab.store.has(obj, 9)
        file.unlink()
        assert await reclaimed(lab.store, tier, object_id.digest, 0) == BLOCK
        os.close(fd)
        assert not lab.store.cached_bytes(object_id)


@in_trio
async def test_a_second_reader_of_what_is_lost_does_not_take_its_successor_along(cache_dir: Path) -> None:
    """Both found that the file has gone. The second says so when the block has come again."""
    async with running(cache_dir) as lab:
        data = content(1, 3 * BLOCK)
        object_id = lab.origin.put("k", data)
        assert await lab.read(object_id) == data
        await lab.quiet()
        [tier] = lab.store.tiers
        obj = lab.store.object(object_id)
        [copy] = lab.store.catalog.copies(obj, tier.number)
        tier.file_path(object_id.digest).unlink()
        gone = FileNotFoundError(errno.ENOENT, "gone")
        lab.store.space.lost(obj, copy, gone)
        assert await lab.read(object_id) == data
        await lab.quiet()
        gets = len(lab.origin.gets)
        lab.store.space.lost(obj, copy, gone)
        lab.store.space.corrupt(obj, copy, 0b111)
        assert await lab.read(object_id) == data
        assert len(lab.origin.gets) == gets
        lab.check_accounts()


# -- failures in the middle ---------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwrite", "sendfile", "open", "pread"])
@in_trio
async def test_a_call_that_fails_at_any_time_leaves_nothing_counted(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The n-th one, n = 1, 2, 3, …: reads are right, and what was reserved is given back."""
    real = getattr(os, call)
    left = -1

    def failing(*args: Any, **how: Any) -> Any:
        nonlocal left
        ours = isinstance(args[0], str) and "objects" in args[0] if call == "open" else True
        if ours and left >= 0:
            left -= 1
            if left < 0:
                raise OSError(5, os.strerror(5))
        return real(*args, **how)

    async with running(cache_dir, ssd=24 * BLOCK, ram=8 * BLOCK, background=True, verify="full") as lab:
        monkeypatch.setattr(os, call, failing)
        for turn in range(40):
            data = content(turn, 3 * BLOCK + 5)
            object_id = lab.origin.put(f"k{turn}", data)
            left = turn % 10
            for _ in range(2):
                assert await lab.read(object_id) == data
            left = -1
            for tier in lab.store.tiers:
                tier.worked()
            await settled(lab)
        assert lab.metrics.tier_errors or call != "pwrite"


@in_trio
async def test_no_descriptor_and_no_thread_is_left(cache_dir: Path) -> None:
    threads = counters.own_threads()
    async with running(cache_dir, ram=8 * BLOCK, ssd=64 * BLOCK, background=True) as lab:
        for number in range(40):
            object_id = lab.origin.put(f"k{number}", content(number, 2 * BLOCK))
            await (lab.read(object_id) if number % 2 else lab.fetcher.prefetch(lab.origin, object_id))  # type: ignore[arg-type]
        await lab.quiet()
        await settled(lab)
        assert not [name for tier in lab.store.tiers for name in open_files(tier.path / "objects")]
    assert not open_files(cache_dir)
    assert counters.own_threads() <= threads


# -- the guards themselves ----------------------------------------------------------------------------


def _tier(lab: Lab) -> Any:
    return lab.store.tiers[-1]


def _first(lab: Lab) -> Any:
    return counters.loaded(lab.store)[0]


NOT_THERE = (SSD, b"\xee" * 16, 0)


def _drop_order(lab: Lab) -> None:
    database = lab.store.catalog._index._db
    database.write([("order", database.scan("order")[0][0], None)])


def _second_place(lab: Lab) -> None:
    database = lab.store.catalog._index._db
    key, value = database.scan("order")[0]
    database.write([("order", key[:-1] + b"\xff", value)])


def _drop_row(lab: Lab) -> None:
    database = lab.store.catalog._index._db
    database.write([("copies", database.scan("copies")[0][0], None)])


def _user(lab: Lab) -> None:
    next(iter(lab.store.catalog._objects.values())).refs += 1


def _add(owner: Callable[[Lab], Any], name: str, count: int) -> Callable[[Lab], None]:
    return lambda lab: setattr(owner(lab), name, getattr(owner(lab), name) + count)


def _outdated_look(lab: Lab) -> None:
    """Of a version that is only looked at."""
    catalog = lab.store.catalog
    obj = next(iter(catalog._objects.values()))
    while catalog._objects:
        catalog._forget_some()
    [copy] = catalog.copies(catalog.peek(obj.id), SSD)
    copy.bitmap |= 2


def _passed_over(lab: Lab) -> None:
    """A search has come further than it should have."""
    lab.store.eviction._evictable_walks[SSD].passed = 1 << 40


def _another_wait(lab: Lab) -> None:
    copy = _first(lab)
    lab.store.eviction._waiting[copy.key] = Waiting(1e18, copy.clock - 1, copy.dataset)


def _kept_idle(lab: Lab) -> None:
    obj = next(iter(lab.store.catalog._objects.values()))
    backing = lab.store.open_backing(obj)
    assert backing is not None
    backing.registered(1)
    lab.store.release_backing(backing)
    lab.store.backing_files._idle.clear()


DAMAGES: dict[str, Callable[[Lab], None]] = {
    "used": _add(_tier, "used_bytes", 4 * KIB),
    "unlisted": _add(_tier, "unlisted_bytes", -1),
    "blocks": _add(_tier, "blocks", 1),
    "pinned": _add(_tier, "pinned_bytes", 1),
    "remote_owned": _add(_tier, "remote_owned_bytes", -1),
    "loaded": _add(lambda lab: lab.store.catalog, "_loaded", 1),
    "in_progress": _add(_first, "in_progress", 1),
    "forgotten": _add(_first, "forgotten", 1),
    "pins": _add(_first, "pins", 1),
    "a user": _user,
    "no place": _drop_order,
    "two places": _second_place,
    "no row": _drop_row,
    "one that waits": lambda lab: lab.store.eviction._waiting.update({NOT_THERE: Waiting(1e18, 1, 0)}),
    "one of another node": lambda lab: lab.store.eviction.remote_owned.add(NOT_THERE),
    "one that is evictable first": lambda lab: lab.store.eviction._evictable_first.add(NOT_THERE),
    "bytes on their way out": lambda lab: _tier(lab).disposal._pending.update([b"digest"]),
    "one that was checked, twice": lambda lab: lab.store.catalog._checked.add(_first(lab).key),
    "another clock of its use": _add(_first, "used", -1),
    "a clock behind it": _add(lambda lab: lab.store.catalog, "clock", -1),
    "two bookkeepings": lambda lab: lab.store.catalog._peeked.update(lab.store.catalog._objects),
    "an outdated look": _outdated_look,
    "the heap": _add(lambda lab: lab.store.space.heap, "_bytes", 1),
    "one that no search finds": _passed_over,
    "one that waits as another": _another_wait,
    "a row that is held": lambda lab: lab.store.eviction._any_walks[SSD]._again.append(
        (b"", NOT_THERE, 1, 0)
    ),
    "a search that goes on": lambda lab: setattr(lab.store.eviction._any_walks[SSD], "passed", 0),
    "an idle passthrough file": _kept_idle,
    "a call on the disk": lambda lab: _tier(lab).disk._calls.update({"call": 0.0}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_miscounted_is_noticed(cache_dir: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "HANGS_AFTER_S", 0.0)  # what is said to be on its way out never goes

    @in_trio
    async def run() -> None:
        async with running(cache_dir) as lab:
            for number in range(3):
                await lab.read(lab.origin.put(f"k{number}", content(number, BLOCK)))
            await settled(lab)
            DAMAGES[damage](lab)
            with pytest.raises(AssertionError):
                await lab.check_counters()
            lab.counts = False

    run()

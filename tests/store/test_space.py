"""What becomes of blocks whose file cannot be opened, or be read at once; and what goes to make room."""

from __future__ import annotations

import errno
import itertools
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId, block_count, extent_bits
from cachefs.store import space
from cachefs.store import tier as tier_module
from cachefs.store.catalog import Copy
from cachefs.store.eviction import ANY, LOWEST, NOTHING, REMOTE_OWNED
from tests.conftest import examples
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, KIB, MIB, PAGE, Lab, begin_write, running


def put(lab: Lab, object_id: ObjectId) -> None:
    """All its blocks come."""
    obj = lab.store.object(object_id)
    blocks = -(-object_id.size // BLOCK)
    for first in range(0, blocks, 16):
        cache_write = begin_write(lab.store, obj, first, min(blocks, first + 16))
        assert cache_write is not None
        cache_write.write(bytes(cache_write.stop - cache_write.start))
        lab.store.end_write(obj, cache_write)
    obj.close_if_unused()


@pytest.mark.parametrize(
    "number, immutable, stays, state, errors",
    [
        (errno.ENOENT, False, False, "normal", 1),  # it has vanished, and the disk works
        (errno.EROFS, True, False, "normal", 0),  # it could only be completed by writing
        (errno.EROFS, False, True, "unstable", 1),  # the file system was remounted read-only
        (errno.EIO, True, True, "unstable", 1),
        (errno.EIO, False, True, "unstable", 1),
        (errno.ENOSPC, False, True, "normal", 1),
        (errno.ETIMEDOUT, False, True, "normal", 0),  # a disk that hangs is watched elsewhere
    ],
)
@in_trio
async def test_a_file_that_cannot_be_opened_for_writing(
    cache_dir: Path, number: int, immutable: bool, stays: bool, state: str, errors: int
) -> None:
    async with running(cache_dir) as lab:
        [tier] = lab.store.tiers
        object_id = lab.origin.put("k", content(1, 2 * BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        obj = lab.store.object(object_id)
        if immutable:
            os.close(tier.make_immutable(object_id.digest, object_id.size))
        lab.store.space.not_opened(obj, tier, OSError(number, os.strerror(number)))
        assert lab.store.cached_bytes(object_id) == (object_id.size if stays else 0)
        assert (tier.state, lab.metrics.tier_errors) == (state, errors)
        lab.check_accounts()


SHORT = 0


@pytest.mark.parametrize(
    "ram, number, stays, reads_now",
    [
        (False, errno.EOPNOTSUPP, True, False),  # this file system knows no such reads: threads do them
        (False, errno.EINVAL, True, False),
        (False, errno.EAGAIN, True, True),  # it is not in the kernel's memory
        (False, SHORT, True, True),
        (False, errno.EIO, False, True),
        (True, errno.EINVAL, False, True),
        (True, errno.EIO, False, True),
        (True, SHORT, False, True),
    ],
)
@in_trio
async def test_a_block_that_cannot_be_read_at_once(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, ram: bool, number: int, stays: bool, reads_now: bool
) -> None:
    async with running(cache_dir, ram=8 * MIB if ram else 0) as lab:
        tier = lab.store.tiers[0]
        data = content(1, 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        await lab.read(object_id)
        await lab.quiet()
        obj = lab.store.object(object_id)

        def fail(*_: object) -> int | bytes:
            if number:
                raise OSError(number, os.strerror(number))
            return b"x" if ram else 1

        with obj.held():
            obj.file(tier)
            first = lab.store.read_now(obj, 0, BLOCK)
            if not tier.reads_now:
                pytest.skip("this file system knows no such reads")
            assert first == data[:BLOCK]
            with monkeypatch.context() as patch:
                patch.setattr(os, "pread" if ram else "preadv", fail)
                assert lab.store.read_now(obj, 0, BLOCK) is None
            assert lab.store.cached_bytes(object_id) == (object_id.size if stays else 0)
            assert tier.reads_now is reads_now
            assert (lab.store.read_now(obj, 0, BLOCK) is not None) == (stays and reads_now)


# -- making room, against a plain count --------------------------------------------------------------


def pages(length: int) -> int:
    return -(-length // PAGE) * PAGE


@pytest.mark.parametrize("seed", range(4))
@in_trio
async def test_room_is_made_by_what_goes_first_and_by_no_more(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(space, "VICTIMS_AT_ONCE", 4)
    async with running(cache_dir, ssd=10 * BLOCK) as lab:
        [tier] = lab.store.tiers
        for _ in range(25):
            held: list[tuple[ObjectId, int]] = []
            for number in range(rng.randrange(8)):
                object_id = lab.origin.put(f"{number}", bytes(rng.randrange(1, 2 * BLOCK)))
                if sum(size for _, size in held) + pages(object_id.size) <= tier.cap_bytes:
                    put(lab, object_id)
                    held.append((object_id, pages(object_id.size)))
            if rng.random() < 0.5:
                await lab.store.flush()
            used = sum(size for _, size in held)
            assert tier.used_bytes == used and tier.limit_bytes() == 10 * BLOCK
            exact = [10 * BLOCK - used, 10 * BLOCK - used + 1, 10 * BLOCK, 10 * BLOCK + 1, 0]
            need = rng.choice([*exact, rng.randrange(11 * BLOCK)])
            classes = rng.choice([NOTHING, REMOTE_OWNED, LOWEST, ANY])
            stays, fits, blocks = list(held), False, 0
            for _ in range(4):
                fits = sum(size for _, size in stays) + need <= 10 * BLOCK
                if fits or classes in (NOTHING, REMOTE_OWNED) or need > 10 * BLOCK or not stays:
                    break
                object_id, _ = stays.pop(0)
                blocks += -(-object_id.size // BLOCK)
                fits = False  # until it is looked at once more
            before = lab.metrics.evicted_blocks
            assert lab.store.space.evict_for(tier, need, classes) is fits
            there = [(i, size) for i, size in held if lab.store.cached_bytes(i) == i.size]
            assert there == stays and lab.metrics.evicted_blocks - before == blocks
            lab.check_accounts()
            for object_id, _ in held:
                lab.store.evict(lab.store.object(object_id))


@in_trio
async def test_nothing_goes_for_bytes_that_are_on_their_way_out(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir, ssd=10 * BLOCK) as lab:
        [tier] = lab.store.tiers
        object_id = lab.origin.put("k", bytes(2 * BLOCK))
        put(lab, object_id)
        monkeypatch.setattr(tier.disposal, "going_bytes", tier_module.GOING_BYTES + 3 * BLOCK)
        assert lab.store.space.evict_for(tier, 5 * BLOCK, ANY)
        assert not lab.store.space.evict_for(tier, 6 * BLOCK, ANY)
        assert not lab.store.space.evict_for(tier, 8 * BLOCK, ANY)
        assert lab.store.cached_bytes(object_id) == 2 * BLOCK
        assert not lab.store.space.evict_for(tier, 9 * BLOCK, ANY)
        assert lab.store.cached_bytes(object_id) == 0, "without it more would fit"
        monkeypatch.undo()


@given(limit=st.integers(0, 1 << 30), need=st.integers(0, 4 * BLOCK))
@settings(max_examples=examples(100))
def test_what_is_left_to_readers_is_whole_needs(limit: int, need: int) -> None:
    tier = SimpleNamespace(limit_bytes=lambda: limit)
    made = space.Space(None, None, [], BLOCK, None)  # type: ignore[arg-type]
    one = min(need, BLOCK)
    left = made.left_to_readers(tier, need)  # type: ignore[arg-type]
    share = limit // space.READERS_SHARE
    assert left % one == 0 and left <= share < left + one if one else left == 0


@pytest.mark.parametrize("ram", [0, 64 * BLOCK])
@in_trio
async def test_ranges_that_touch_are_punched_at_once(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, ram: int
) -> None:
    """All of them and nothing else; the end of a file to the end of its page."""
    rng = random.Random(ram)
    async with running(cache_dir, ram=ram) as lab:
        tier = lab.store.tiers[0]
        object_id = lab.origin.put("k", bytes(3 * EXTENT + 5000))
        put(lab, object_id)
        obj = lab.store.object(object_id)
        called: list[tuple[int, int]] = []
        done: list[int] = []
        monkeypatch.setattr(tier_module, "punch", lambda fd, *run: called.append(run))
        monkeypatch.setattr(
            tier.disposal,
            "remove",
            lambda digest, path, runs, freed: (called.extend(runs), done.append(freed)),
        )
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(60):
            called.clear()
            done.clear()
            blocks = sorted(rng.sample(range(49), rng.randrange(50)))
            ranges = [(block * BLOCK, min(BLOCK, object_id.size - block * BLOCK)) for block in blocks]
            lab.store.space.punch(obj, tier, ranges, 7)
            assert done == ([7] if blocks and not ram else [])
            found = [at for start, length in called for at in range(start, start + length, PAGE)]
            assert found == [at for start, length in ranges for at in range(start, start + length, PAGE)]
            assert all(length % PAGE == 0 for _, length in called)
            gaps = itertools.pairwise(called)
            assert all(start + length < later for (start, length), (later, _) in gaps), "one call each"
        assert len(os.listdir("/proc/self/fd")) == before
        monkeypatch.undo()


@in_trio
async def test_a_large_file_is_forgotten_with_one_transaction_and_not_block_by_block(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop does it in one step: what that costs for each block stands still for all readers."""
    async with running(cache_dir) as lab:
        origin, object_id = lab.origin, lab.origin.put("k", content(1, 5 * EXTENT + 100))
        await lab.read(object_id)
        await lab.quiet()
        os.close(lab.store.tiers[0].make_immutable(object_id.digest, object_id.size))
    async with running(cache_dir, origin) as lab:
        catalog, (ssd,) = lab.store.catalog, lab.store.tiers
        load, ranges = catalog._index.load, catalog.ranges
        loaded: list[int] = []
        counted: list[Any] = []

        def loads(keys: list[Any]) -> list[Any]:
            loaded.append(len(keys))
            return load(keys)

        def counts(*arguments: Any) -> Any:
            counted.append(arguments)
            return ranges(*arguments)

        monkeypatch.setattr(catalog._index, "load", loads)
        monkeypatch.setattr(catalog, "ranges", counts)
        obj = lab.store.object(object_id)
        assert lab.store.space.drop_file(obj, ssd) == 5 * BLOCKS_PER_EXTENT + 1
        assert (loaded, counted) == ([6], [])
        assert ssd.disposal.idle(10) and ssd.used_bytes == 0 and not obj.copies


@pytest.mark.parametrize("block", [5000, 64 * KIB])
@in_trio
async def test_blocks_take_what_their_pages_take(tmp_path: Path, block: int) -> None:
    sizes = [1, block - 1, block, block + 1, 16 * block - 1, 16 * block, 16 * block + 1, 40 * block + 4097]
    async with running(tmp_path / "cache", block=block) as lab:
        space = lab.store.space
        for size in sizes:
            blocks = block_count(size, block)
            for extent in range(block_count(blocks, BLOCKS_PER_EXTENT)):
                copy = Copy(1, b"", extent, size)
                whole = extent_bits(blocks, extent)
                for bits in (0, 1, whole, whole & 0x5555, whole & ~(whole >> 1)):
                    pages = sum(-(-length // 4096) for _, length in lab.store.catalog.ranges(copy, bits))
                    assert space.bytes(copy, bits) == pages * 4096


@pytest.mark.parametrize("ahead", [False, True])
@in_trio
async def test_room_for_several_versions_is_looked_for_once(
    cache_dir: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir, ram=16 * MIB) as lab:
        looked: list[int] = []
        real = lab.store.space.evict_for

        def evict_for(tier: Any, need: int, *how: Any, **more: Any) -> bool:
            looked.append(need)
            return real(tier, need, *how, **more)

        monkeypatch.setattr(lab.store.space, "evict_for", evict_for)
        objects = [lab.store.object(lab.origin.put(f"k{n}", bytes(BLOCK))) for n in range(8)]
        cache_writes = lab.store.begin_writes([(obj, 0, 1) for obj in objects], prefetched=ahead)
        assert looked == [8 * BLOCK]
        ram, _ = lab.store.tiers
        assert ram.used_bytes == ram.unlisted_bytes == 8 * BLOCK
        for obj, cache_write in zip(objects, cache_writes, strict=True):
            assert cache_write is not None
            cache_write.write(bytes(BLOCK))
            lab.store.end_write(obj, cache_write)
        assert ram.unlisted_bytes == 0 and ram.blocks == 8


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("ram", [0, 3, 20])
@pytest.mark.parametrize("full", [False, True])
@in_trio
async def test_several_versions_lie_where_each_alone_would(
    tmp_path: Path, ahead: bool, ram: int, full: bool
) -> None:
    """A full cache has blocks that may go, and some of the versions find no room all the same."""
    found = []
    for together in (False, True):
        async with running(tmp_path / f"{together}", ram=ram * BLOCK, ssd=10 * BLOCK) as lab:
            if full:
                for n in range(10 + ram):
                    put(lab, lab.origin.put(f"old{n}", bytes(BLOCK)))
                await lab.store.flush()
            objects = [lab.store.object(lab.origin.put(f"k{n}", bytes(BLOCK))) for n in range(12)]
            runs = [(obj, 0, 1) for obj in objects]
            if together:
                cache_writes = lab.store.begin_writes(runs, prefetched=ahead)
            else:
                cache_writes = [begin_write(lab.store, *run, prefetched=ahead) for run in runs]
            used = [(tier.used_bytes, tier.blocks) for tier in lab.store.tiers]
            found.append(
                (
                    [None if cache_write is None else cache_write.copy.tier for cache_write in cache_writes],
                    used,
                )
            )  # type: ignore[attr-defined]
            for obj, cache_write in zip(objects, cache_writes, strict=True):
                if cache_write is not None:
                    cache_write.write(bytes(BLOCK))
                    lab.store.end_write(obj, cache_write)
    assert found[0] == found[1]

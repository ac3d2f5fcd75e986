"""Rules of the cache as tables: each case beside its neighbours, so that a bound or a condition that is off by one shows."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import xxhash

from cachefs.base.errors import CacheUnusable, NoRoom
from cachefs.base.metrics import Metrics
from cachefs.store import catalog, opening, space, tier
from cachefs.store import ram as ram_module
from cachefs.store import store as store_module
from cachefs.store.catalog import Copy, Index
from cachefs.store.eviction import ANY, ANY_REMOTE_OWNED, LOWEST, NOTHING, Waiting
from cachefs.store.space import PROMOTED_AT_MOST, REUSE_AFTER_S, Moves
from cachefs.store.tier import RAM, SSD, Tier
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, begin_write, cache_files, running, until
from tests.store.test_adopting import adopt, dirty_file
from tests.store.test_shared_epochs import put

# -- uses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", range(6))
@pytest.mark.parametrize("flush", ["", "before", "after"])
@in_trio
async def test_a_use_goes_on_until_so_many_others_or_a_flush(
    cache_dir: Path, flush: str, others: int
) -> None:
    """A reader beside three others continues its use. Of five files that are read by turns, each read is a use."""
    async with running(cache_dir) as lab:
        one, other = lab.origin.put("k", bytes(BLOCK)), lab.origin.put("o", bytes(BLOCK))
        assert put(lab, other) and put(lab, one)
        rows, order = lab.store.catalog, lab.store.eviction
        [copy], [beside] = (rows.copies(lab.store.object(i), SSD) for i in (one, other))
        if flush == "before":
            await lab.store.flush()
        order.touch(copy)
        for _ in range(others):
            order.touch(beside)
        if flush == "after":
            await lab.store.flush()
        clock, separate = copy.clock, others > 3 or flush == "after"
        assert order.touch_if_separate(copy) is separate
        assert (copy.clock > clock) is separate
        bits, copy.bitmap = copy.bitmap, 0
        await lab.store.flush()
        assert not order.touch_if_separate(copy), "it has no blocks"
        copy.bitmap = bits
        rows.changed(copy)


@pytest.mark.parametrize("size, promoted", [(BLOCK, True), (EXTENT, True)])
@pytest.mark.parametrize(
    "passed_s, ram, epochs, large",
    [
        (REUSE_AFTER_S, "", False, False),
        (REUSE_AFTER_S + 1, "", False, False),
        (REUSE_AFTER_S - 0.01, "", False, False),
        (0.0, "", False, False),
        (REUSE_AFTER_S, "fails", False, False),
        (REUSE_AFTER_S, "", True, False),
        (REUSE_AFTER_S, "", False, True),
    ],
)
@in_trio
async def test_a_copy_is_promoted_at_its_next_separate_use(
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    passed_s: float,
    ram: str,
    epochs: bool,
    large: bool,
    size: int,
    promoted: bool,
) -> None:
    assert size <= PROMOTED_AT_MOST
    monkeypatch.setattr(space, "PROMOTED_AT_MOST", size - large)
    async with running(cache_dir, ram=64 * BLOCK) as lab:
        moves, now = lab.store._moves, 100.0
        assert moves is not None
        moves._now = lambda: now
        monkeypatch.setattr(lab.store.eviction.epochs, "has_epochs", lambda dataset: epochs)
        copy = Copy(SSD, bytes(16), 0, size)
        moves.used(copy)
        assert not moves._promotions and not moves._wake.is_set()
        assert copy.first_use == (0.0 if epochs or large else 100.0)
        now += passed_s
        if ram:
            lab.store.tiers[0].failed(OSError(5, "broken"))
        moves.used(copy)
        wanted = promoted and passed_s >= REUSE_AFTER_S and not (ram or epochs or large)
        assert list(moves._promotions) == ([copy.key] if wanted else [])
        assert moves._wake.is_set() is wanted
        moves._promotions.clear()


@in_trio
async def test_uses_beside_what_others_own_are_uses(cache_dir: Path) -> None:
    async with running(cache_dir, ram=64 * BLOCK, ssd=0) as lab:
        own, other = (lab.origin.put(f"{name}/k", bytes(BLOCK)) for name in ("own", "other"))
        assert put(lab, other, remote_owned=True) and put(lab, own)
        known = lab.store.eviction.epochs._datasets
        assert [dataset.uses for dataset in known.values()] == [0, 1]
        assert lab.store.eviction.epoch_progress.was_used(other), "its reader has come for it"


@pytest.mark.parametrize("seed", range(4))
@in_trio
async def test_what_is_not_flushed_yet_goes_in_the_order_of_its_last_use(cache_dir: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with running(cache_dir) as lab:
        order, rows = lab.store.eviction, lab.store.catalog
        ids = [lab.origin.put(f"k{n}", bytes(5)) for n in range(6)]
        assert all(put(lab, object_id) for object_id in ids)
        copies = [rows.copies(lab.store.object(object_id), SSD)[0] for object_id in ids]
        for copy in rng.choices(copies, k=10):
            if rng.random() < 0.7:
                order.touch(copy)
            else:
                rows.changed(copy)
        gone: list[int] = []
        while (victim := order.victim(SSD, ANY)) is not None:
            gone.append(victim[1].clock)
            lab.store.space.drop(*victim, victim[1].bitmap)
        assert len(gone) == 6 and gone == sorted(gone)


@pytest.mark.parametrize("length", range(catalog._HEAD.size + 1))
def test_a_row_that_is_too_short_is_none(length: int) -> None:
    """Even if its checksum fits."""
    body = bytes(length)
    row = body + catalog._CHECK.pack(xxhash.xxh32_intdigest(body))
    found = catalog.unpack_copy((SSD, bytes(16), 0), row)
    assert (found is not None) is (length == catalog._HEAD.size)
    assert catalog.unpack_copy((SSD, bytes(16), 0), row[:-1]) is None


def test_rows_of_another_length_name_nothing(tmp_path: Path) -> None:
    """As damage leaves them: too short or too long, in the key or in the value, before, between and behind whole ones."""
    index, key = Index(tmp_path / "index", BLOCK), (SSD, b"\x55" * 16, 3)
    place, name = catalog._CLOCK.pack(SSD, 1 << 40), catalog._KEY.pack(*key)
    value = catalog._ORDERED.pack(*key, 7)
    index._db.write([("order", place, value), ("copies", name, b"row")])
    for length in (1, 5, 8, 10, 20):
        for first in (b"\x00", b"\x55", b"\xff"):
            odd = bytes([SSD]) + first * (length - 1)
            if len(odd) != len(place):
                index._db.write([("order", odd, value)])
            index._db.write([("copies", odd, b"row"), ("copies", name[:17] + first * (length + 4), b"row")])
    index._db.write([("order", catalog._CLOCK.pack(SSD, 5), value[:-1]), ("meta", b"total1", b"123")])
    assert [row[1:] for row in index.oldest(SSD, b"", 100)] == [(key, 1 << 40, 7)]
    assert list(index.extents_of(SSD, key[1])) == [3]
    assert list(index.digests(SSD, 100)) == [[key[1]]]
    assert index.totals(SSD) == (0, 0, 0)
    index.close()


# -- when RAM spills -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 89, 90, 91, 100])
def test_ram_spills_above_a_share(kept: int) -> None:
    ram = SimpleNamespace(own_bytes=kept, limit_bytes=lambda: 100, number=RAM)
    parts = SimpleNamespace(catalog=None, eviction=None, metrics=None)
    moves = Moves(parts, ram, "ssd", lambda: 0.0)  # type: ignore[arg-type]
    moves.spill_if_full()
    assert moves._wake.is_set() is (kept > 90)


@pytest.mark.parametrize("kept, short", [(0, True), (8, True), (9, False), (10, False)])
@in_trio
async def test_a_reader_displaces_what_waits_for_others_while_ram_has_little_of_its_own(
    cache_dir: Path, kept: int, short: bool
) -> None:
    async with running(cache_dir, ram=10 * BLOCK, ssd=0) as lab:
        cache_writes: Any = lab.store.begin_writes.__self__  # type: ignore[attr-defined]
        for number in range(kept):
            assert put(lab, lab.origin.put(f"k{number}", bytes(BLOCK)))
        nothing, then, *_ = (
            classes for _, classes in cache_writes._places(prefetched=False, remote_owned=False)
        )
        assert (nothing, then) == (NOTHING, ANY_REMOTE_OWNED if short else LOWEST)


@in_trio
async def test_ram_is_looked_at_when_a_fill_begins_and_when_it_ends(cache_dir: Path) -> None:
    """What it has reserved counts already; what it has brought can be moved only then."""
    async with running(cache_dir, ram=10 * BLOCK) as lab:
        moves, store = lab.store._moves, lab.store
        assert moves is not None
        for number in range(10):
            obj = store.object(lab.origin.put(f"k{number}", bytes(BLOCK)))
            cache_write = begin_write(store, obj, 0, 1)
            assert cache_write is not None
            in_ram = cache_write.copy.tier == RAM  # type: ignore[attr-defined]
            assert in_ram and moves._wake.is_set() is (number == 9)
            moves._wake = trio.Event()
            cache_write.write(bytes(BLOCK))
            store.end_write(obj, cache_write)
            assert moves._wake.is_set() is (number == 9)
            moves._wake = trio.Event()


@pytest.mark.parametrize("fails", ["", "RAM is not forgotten", "files are left"])
@in_trio
async def test_a_stop_that_did_not_end_well_leaves_an_index_that_is_looked_at(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Though all other rows could be written after that."""
    async with running(cache_dir, ram=64 * BLOCK) as lab:
        await lab.read(lab.origin.put("k", bytes(BLOCK)))
        await lab.quiet()

        def full(*_: object) -> None:
            raise NoRoom("full")

        if fails == "RAM is not forgotten":
            monkeypatch.setattr(lab.store.catalog._index, "forget_tier", full)
        if fails == "files are left":
            monkeypatch.setattr(lab.store.tiers[-1].disposal, "idle", lambda within_s: False)
        await lab.aclose()
    async with running(cache_dir) as lab:
        assert lab.store.was_clean is (fails == "")


# -- moves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_clock", [4, 5, 6])
@pytest.mark.parametrize("source_waits", [True, False])
@pytest.mark.parametrize("target_waits", [True, False])
@pytest.mark.parametrize("first", [True, False])
@in_trio
async def test_what_is_moved_keeps_its_place(
    cache_dir: Path, first: bool, target_waits: bool, source_waits: bool, target_clock: int
) -> None:
    async with running(cache_dir) as lab:
        order = lab.store.eviction
        source, target = (Copy(tier, bytes(16), 0, 1, bitmap=1) for tier in (RAM, SSD))
        source.clock, source.used, source.dataset = 5, 0 if source_waits else 5, 7
        target.clock, target.used, target.dataset = target_clock, target_clock, 7
        if source_waits:
            order._waiting[source.key] = Waiting(50.0, 5, 7)
        if target_waits:
            order._waiting[target.key] = Waiting(90.0, target_clock, 7)
        if first:
            order._evictable_first.add(source.key)
        order.moved(source, target)
        younger = target_clock < 5
        assert (target.clock, target.used) == (
            (5, source.used) if younger else (target_clock, target_clock)
        ) or target_clock == 5
        waits = order._waiting.get(target.key)
        if target_waits:
            assert waits is not None and waits.until == 90.0
        else:
            assert waits == (Waiting(50.0, max(5, target_clock), 7) if source_waits else None)
        assert (target.key in order._evictable_first) is first
        assert (source.key in order._evictable_first) is first and (
            source.key in order._waiting
        ) is source_waits
        assert lab.store.catalog._dirty == {target.key: target}
        lab.store.catalog._dirty.clear()
        order._waiting.clear()
        order._evictable_first.tiers.clear()


@pytest.mark.parametrize("down", ["", "ram", "ssd"])
@pytest.mark.parametrize("ram", [None, 0, 1])
@pytest.mark.parametrize("ssd", [None, 0, 1])
@in_trio
async def test_a_block_is_found_verified_or_else_where_it_is_fastest(
    cache_dir: Path, ssd: int | None, ram: int | None, down: str
) -> None:
    """None: it is not there; 0: there, and not verified."""
    async with running(cache_dir, ram=64 * BLOCK) as lab:
        object_id = lab.origin.put("k", bytes(2 * BLOCK))
        obj, rows = lab.store.object(object_id), lab.store.catalog
        made: list[Copy] = []
        for number, verified in ((RAM, ram), (SSD, ssd)):
            copy = rows.create(obj, number, 0, 2 * BLOCK, 0)
            copy.bitmap = copy.verified = 1
            if verified is not None:
                copy.bitmap, copy.verified = 3, 1 | verified << 1
            made.append(copy)
            lab.store.tiers[number].disk.down = down == ("ram", "ssd")[number]
        here = [(not v, n) for n, v in enumerate((ram, ssd)) if v is not None and down != ("ram", "ssd")[n]]
        assert rows.find(obj, 1) is (made[min(here)[1]] if here else None)
        obj.copies.clear()
        rows._dirty.clear()
        rows._loaded = 0
        for one in lab.store.tiers:
            one.disk.down = False


@pytest.mark.parametrize("size", [1, BLOCK, EXTENT, EXTENT + 1, 2 * EXTENT - 1, 2 * EXTENT])
@in_trio
async def test_a_use_is_of_the_length_of_its_extent(cache_dir: Path, size: int) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", bytes(size))
        lengths = [min(EXTENT, size - at) for at in range(0, size, EXTENT)]
        copies = [Copy(SSD, object_id.digest, extent, size) for extent in range(len(lengths))]
        assert [lab.store.catalog.extent_bytes(copy) for copy in copies] == lengths
        await lab.read(object_id)
        await lab.quiet()
        [(_, known)] = lab.store.eviction.epochs.status()
        assert known["footprint_bytes"] in (size, size - 1)
        [(extent, bits), *_] = lab.store.catalog.extents(lab.store.object(object_id))
        assert (extent, bits.bit_count()) == (0, min(16, -(-size // BLOCK)))


@pytest.mark.parametrize("why", ["", "no source", "no sink", "short", "read error", "write error"])
def test_what_is_copied_is_closed_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    data, sent = content(1, 100), os.sendfile
    (tmp_path / "source").write_bytes(data)
    (tmp_path / "sink").write_bytes(bytes(100))

    def opened(name: str, flags: int) -> int:
        if why == f"no {name}":
            raise OSError(errno.EIO, "broken")
        return os.open(tmp_path / name, flags)

    def some(sink: int, source: int, offset: int, count: int) -> int:
        if why == "write error":
            raise OSError(errno.ENOSPC, "full")
        return 0 if why == "short" and offset > 50 else sent(sink, source, offset, min(count, 7))

    monkeypatch.setattr(os, "sendfile", some)
    before = len(os.listdir("/proc/self/fd"))
    errors = {"no source": space._SourceFailed, "no sink": space._NotOpened, "short": space._SourceFailed}

    def copy() -> None:
        space._copy_ranges(
            lambda: opened("source", os.O_RDONLY), lambda: opened("sink", os.O_RDWR), [(3, 20), (40, 60)]
        )

    if why in errors:
        with pytest.raises(errors[why]):
            copy()
    elif why == "write error":
        with pytest.raises(OSError, match="full"):
            copy()
    else:
        copy()
        assert (tmp_path / "sink").read_bytes() == bytes(3) + data[3:23] + bytes(17) + data[40:]
    assert len(os.listdir("/proc/self/fd")) == before


# -- what is in memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@in_trio
async def test_versions_are_forgotten_in_the_order_of_their_last_use(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """An eighth at a time; those in use are looked at again after all others, and a look is no use."""
    monkeypatch.setattr(catalog, "OBJECTS_IN_MEMORY", 16)
    rng = random.Random(seed)
    async with running(cache_dir) as lab:
        rows, ids = lab.store.catalog, [lab.origin.put(f"k{n}", bytes(5)) for n in range(40)]
        plain, held = OrderedDict[bytes, int](), dict[bytes, Any]()

        def get(digest: bytes) -> None:
            if digest in plain:
                plain.move_to_end(digest)
                return
            if len(plain) >= 16:
                for old in list(plain)[:2]:
                    if old in held:
                        plain.move_to_end(old)
                    else:
                        del plain[old]
            plain[digest] = 0

        for _ in range(400):
            object_id = rng.choice(ids)
            match rng.choice((0, 1, 2, 4, 5, 6)):
                case 0 | 1:
                    rows.object(object_id)
                    get(object_id.digest)
                case 2:
                    rows.by_digest(object_id.digest)
                    get(object_id.digest)
                case 4:
                    looked = rows.peek(object_id)
                    assert rows.remembers(looked) is (object_id.digest in plain) and looked.id == object_id
                    rows.preload(rng.sample(ids, 3))
                case 5:
                    idle = rows.idle(object_id.digest)
                    assert (idle is None) is (object_id.digest in held)
                case 6:
                    if held and rng.random() < 0.5:
                        held.pop(next(iter(held))).release()
                    elif len(held) < 5 and object_id.digest not in held:
                        held[object_id.digest] = rows.object(object_id)
                        get(object_id.digest)
                        held[object_id.digest].hold()
            assert list(rows._objects) == list(plain)
        for obj in held.values():
            obj.release()


@pytest.mark.parametrize("policy", ["auto", "epoch"])
@in_trio
async def test_a_restart_goes_on_with_what_is_known_of_datasets(cache_dir: Path, policy: str) -> None:
    async with running(cache_dir, eviction=policy) as lab:
        ids = [lab.origin.put(f"d{n % 2}/{n}", bytes(5)) for n in range(12)]
        for _ in range(3):
            for object_id in ids:
                await lab.read(object_id)
                await lab.quiet()
                await lab.store.flush()
        before, now = list(lab.store.eviction.epochs.status()), lab.store.eviction.epochs._now
        names = lab.store.eviction_status()["datasets"]
        assert len(before) == 2 and any(known["epoch"] > 1 for _, known in before)
    async with running(cache_dir, lab.origin, eviction=policy) as lab:
        assert list(lab.store.eviction.epochs.status()) == before
        assert lab.store.eviction.epochs._now == now
        assert lab.store.eviction_status()["datasets"] == names, "by the same names"


@pytest.mark.parametrize("loaded", [[], [0], [1], [0, 1], [5]])
@pytest.mark.parametrize("gone", [[], [0], [1], [0, 1]])
@in_trio
async def test_a_version_has_copies_as_long_as_one_is_there(
    cache_dir: Path, gone: list[int], loaded: list[int]
) -> None:
    """In memory, in the index alone, or gone and not written yet."""
    async with running(cache_dir) as lab:
        rows, object_id = lab.store.catalog, lab.origin.put("k", bytes(EXTENT + BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        await lab.store.flush()
        while rows._objects:
            rows._forget_some()
        obj = lab.store.object(object_id)
        for extent in loaded:
            rows.copy(obj, SSD, extent)
        for extent in gone:
            copy = rows.copy(obj, SSD, extent)
            assert copy is not None
            lab.store.space.drop(obj, copy, copy.bitmap)
        assert rows.has_copies(obj, SSD) is (len(gone) < 2) and not rows.has_copies(obj, RAM)
        await lab.store.flush()
        assert rows.has_copies(obj, SSD) is (len(gone) < 2)
        assert len(cache_files(cache_dir)) == (len(gone) < 2)


@in_trio
async def test_looks_are_forgotten_beyond_a_bound(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "OBJECTS_IN_MEMORY", 4)
    async with running(cache_dir) as lab:
        rows = lab.store.catalog
        for number in range(20):
            obj = rows.peek(object_id := lab.origin.put(f"k{number}", bytes(5)))
            assert rows.peek(object_id) is obj, "what was looked at last is there"
            assert len(rows._peeked) == number % 5 + 1


@in_trio
async def test_a_place_without_a_row_goes_with_the_search_that_finds_it(cache_dir: Path) -> None:
    """As of a row that was damaged."""
    async with running(cache_dir) as lab:
        ids = [lab.origin.put(f"k{n}", bytes(BLOCK)) for n in range(3)]
        assert all(put(lab, object_id) for object_id in ids)
        await lab.store.flush()
        rows, index = lab.store.catalog, lab.store.catalog._index
        while rows._objects:
            rows._forget_some()
        index._db.write([("copies", catalog._KEY.pack(SSD, ids[0].digest, 0), None)])
        victim = lab.store.eviction.victim(SSD, ANY)
        assert victim is not None and victim[1].digest == ids[1].digest
        await lab.store.flush()
        assert [row[1][1] for row in index.oldest(SSD, b"", 9)] == [i.digest for i in ids[1:]]
        lab.store.tiers[0].used_bytes -= BLOCK
        lab.store.tiers[0].blocks -= 1
        rows.changed(victim[1])
        os_path = lab.store.tiers[0].file_path(ids[0].digest)
        os_path.unlink()


# -- what goes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept_by", ["", "a pin", "a user"])
@in_trio
async def test_for_an_inode_all_of_a_file_goes_that_may(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, kept_by: str
) -> None:
    """Of a file with a part that stays, the other part goes, and the next file."""
    async with running(cache_dir) as lab:
        [only], store = lab.store.tiers, lab.store
        ids = [lab.origin.put(f"k{n}", bytes(EXTENT + BLOCK)) for n in range(2)]
        for object_id in ids:
            await lab.read(object_id)
            await lab.quiet()
            await store.flush()
        paths = [only.file_path(object_id.digest) for object_id in ids]
        obj = store.object(ids[0])
        first, second = store.catalog.copies(obj, SSD)
        if kept_by == "a pin":
            store.space.set_pinned(second, True)
            await store.flush()
        elif kept_by == "a user":
            store.space.pin(second)
        monkeypatch.setattr(Tier, "takes_files", property(lambda self: not all(p.exists() for p in paths)))
        assert store.space.evict_for(only, BLOCK, ANY)
        assert [path.exists() for path in paths] == ([True, False] if kept_by else [False, True])
        assert lab.metrics.evicted_blocks == (16 + 17 if kept_by else 17)
        assert (first.bitmap, second.bitmap) == (0, 1 if kept_by else 0)
        if kept_by == "a user":
            store.space.unpin(obj, second)
        obj.close_if_unused()


def test_one_thread_removes_what_is_to_go(tmp_path: Path) -> None:
    begun: list[int] = []
    going = tier.Disposal(tier.Disk("ssd", tmp_path), lambda exc: None)
    going._begin = lambda: begun.append(len(going._jobs))  # type: ignore[method-assign]
    for number in range(3):
        (tmp_path / f"{number}").touch()
        going.remove(bytes([number]), str(tmp_path / f"{number}"), (), 5)
    assert begun == [1] and (going.going_bytes, going.going_files) == (15, 3)
    assert all(going.pending(bytes([number])) for number in range(3)) and not going.idle(0.0)
    going._work(0.0)
    assert os.listdir(tmp_path) == [] and (going.going_bytes, going.going_files) == (0, 0)
    assert going.idle(0.0) and not going.pending(bytes([1]))
    going.remove(b"again", str(tmp_path / "none"), (), 5)
    assert begun == [1, 1]


@pytest.mark.parametrize("ram", [0, 64 * BLOCK])
@in_trio
async def test_a_limit_that_sinks_is_kept_though_nothing_comes(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, ram: int
) -> None:
    monkeypatch.setattr(store_module, "FLUSH_EVERY_S", 0.01)
    async with running(cache_dir, ram=ram, background=True) as lab:
        ssd = lab.store.tiers[-1]
        for number in range(4):
            object_id = lab.origin.put(f"k{number}", content(number, 2 * BLOCK))
            assert await adopt(lab, object_id)
        ssd.cap_bytes = 5 * BLOCK
        await until(lambda: ssd.used_bytes <= 5 * BLOCK, 10.0)
        assert ssd.used_bytes == 4 * BLOCK


@pytest.mark.parametrize("place", ["the cache directory", "shared memory", "another"])
def test_a_store_that_cannot_be_opened_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Wherever its index found a place."""
    path, made = tmp_path / "cache", tmp_path / "made"
    shared = ram_module.shared_directory(path)
    if place != "the cache directory":
        path.write_bytes(b"no directory")
    if place == "another":
        shared.write_bytes(b"no directory")
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    monkeypatch.setattr(opening, "Store", lambda *_: 1 // 0)
    before = set(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(ZeroDivisionError):
            opening.open_store(path, 64 * BLOCK, 64 * BLOCK, 0, BLOCK, "first", Metrics())
        assert os.listdir(made) == [] and not ram_module.own_directory(path).exists()
        assert shared.exists() is (place == "another")
        assert set(os.listdir("/proc/self/fd")) == before
        if place == "the cache directory":  # and can be opened again
            Index(path / "index", BLOCK).close()
    finally:
        shared.unlink(missing_ok=True) if place == "another" else None
        ram_module.remove_ram(path)


@pytest.mark.parametrize("ram", [0, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("ssd", [0, BLOCK - 1, BLOCK])
@in_trio
async def test_a_tier_has_room_for_a_block_or_is_none(cache_dir: Path, ssd: int, ram: int) -> None:
    async with running(cache_dir, ssd=ssd, ram=ram) as lab:
        wanted = [(number, cap) for number, cap in ((RAM, ram), (SSD, ssd)) if cap >= BLOCK]
        assert [(one.number, one.cap_bytes) for one in lab.store.tiers] == wanted
        assert bool(lab.opened.warnings) is not bool(wanted)
        assert (lab.store._moves is not None) is (len(wanted) == 2)


@in_trio
async def test_what_others_own_goes_where_the_limit_of_ram_sinks(cache_dir: Path) -> None:
    """Of this node's own there is little."""
    async with running(cache_dir, ram=16 * BLOCK, background=True) as lab:
        ram = lab.store.tiers[0]
        for number in range(8):
            assert put(lab, lab.origin.put(f"k{number}", bytes(BLOCK)), remote_owned=True)
        assert ram.used_bytes == ram.remote_owned_bytes == 8 * BLOCK
        ram.cap_bytes = 5 * BLOCK
        await until(lambda: ram.used_bytes <= 5 * BLOCK, 10.0)
        assert ram.used_bytes == 5 * BLOCK


# -- a tier that begins ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_disk_without_room_can_still_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    now = [5.0]

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    def made() -> Tier:
        return Tier(SSD, tmp_path, 100, keep_free_bytes=0, clock=lambda: now[0])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", refuse)
        if number not in (errno.ENOSPC, errno.EDQUOT):
            with pytest.raises(CacheUnusable, match=str(tmp_path)):
                made()
            return
        one = made()
    assert one.limit_bytes() == 0 and one.writable() and one.state == "normal"
    now[0] += tier.FREE_SPACE_EVERY_S
    assert one.limit_bytes() == 100


LINKED: dict[str, Callable[[Tier, Path], object]] = {
    "open": lambda one, aside: one.open_file(DIGEST),
    "open_for_writing": lambda one, aside: one.open_for_writing(DIGEST, 5, known=True),
    "move_out": lambda one, aside: one.move_out(DIGEST, aside),
    "make immutable": lambda one, aside: one.make_immutable(DIGEST, 9),
    "punch": lambda one, aside: tier._punch(str(one.file_path(DIGEST)), [(0, 4096)]),
}
DIGEST = bytes(16)


@pytest.mark.parametrize("how", LINKED)
def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, how: str) -> None:
    one = Tier(SSD, tmp_path / "t", 1 << 20, keep_free_bytes=0, clock=lambda: 0.0)
    elsewhere, path = tmp_path / "elsewhere", one.file_path(DIGEST)
    elsewhere.write_bytes(b"not ours!")
    path.parent.mkdir()
    path.symlink_to(elsewhere)
    before = len(os.listdir("/proc/self/fd")), elsewhere.stat().st_mode
    with pytest.raises(OSError) as error:
        LINKED[how](one, tmp_path / "aside")
    assert error.value.errno == errno.ELOOP
    assert elsewhere.read_bytes() == b"not ours!" and path.is_symlink()
    assert (len(os.listdir("/proc/self/fd")), elsewhere.stat().st_mode) == before


@pytest.mark.parametrize("call", ["rename", "fchmod"])
def test_a_file_that_cannot_be_given_is_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Immutable, because the kernel has it, and of no name among the staging files."""
    one = Tier(SSD, tmp_path / "t", 1 << 20, keep_free_bytes=0, clock=lambda: 0.0)
    aside, path = tmp_path / "aside", one.file_path(DIGEST)
    assert one.put(DIGEST, b"content")
    before, real = len(os.listdir("/proc/self/fd")), getattr(os, call)

    def fails_once(*_: Any) -> None:
        monkeypatch.setattr(os, call, real)
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, call, fails_once)
    with pytest.raises(OSError):
        one.move_out(DIGEST, aside)
    assert path.read_bytes() == b"content" and one.immutable(DIGEST) and not aside.exists()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(one.move_out(DIGEST, aside))
    assert aside.read_bytes() == b"content" and not path.exists()


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("size", [1, tier.HUGE_PAGE + 1])
def test_a_large_file_in_memory_has_its_length_at_once(tmp_path: Path, size: int, blocking: bool) -> None:
    """Where its pages may be huge."""
    one = Tier(SSD if blocking else RAM, tmp_path, 1 << 30, keep_free_bytes=0, clock=lambda: 0.0)
    fd = one.new_file(DIGEST, size)
    assert fd is not None and one.new_file(DIGEST, size) is None
    assert os.fstat(fd).st_size in ((0,) if blocking else (size,) if size > 1 else (0, 1))
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


@pytest.mark.parametrize("why, number", [("immutable", errno.EROFS), ("fstat", errno.EIO), ("", 0)])
def test_a_file_that_cannot_be_filled_is_not_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, number: int
) -> None:
    one = Tier(SSD, tmp_path / "t", 1 << 20, keep_free_bytes=0, clock=lambda: 0.0)
    fd = one.open_for_writing(DIGEST, 5, known=False)
    os.close(fd)
    if why == "immutable":
        one.file_path(DIGEST).chmod(0o400)

    def fails(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        if why == "fstat":
            patch.setattr(os, "fstat", fails)
        for known in (True, False):
            if why:
                with pytest.raises(OSError) as error:
                    one.open_for_writing(DIGEST, 5, known=known)
                assert error.value.errno == number
            else:
                os.close(one.open_for_writing(DIGEST, 5, known=known))
    assert len(os.listdir("/proc/self/fd")) == before and not one.disk._calls


@pytest.mark.parametrize("missing", ["", "objects", "the folder of a file"])
@in_trio
async def test_directories_are_made_again_for_their_owner_alone(cache_dir: Path, missing: str) -> None:
    umask = os.umask(0)
    try:
        async with running(cache_dir) as lab:
            await lab.read(lab.origin.put("k", bytes(BLOCK)))
        objects = cache_dir / "objects"
        if missing:
            shutil.rmtree(objects if missing == "objects" else next(objects.iterdir()))
        async with running(cache_dir, lab.origin) as lab:
            assert stat.S_IMODE(objects.stat().st_mode) == 0o700
            for number in range(3):
                await lab.read(lab.origin.put(f"k{number}", bytes(BLOCK)))
            await lab.quiet()
            assert [stat.S_IMODE(folder.stat().st_mode) for folder in objects.iterdir()].count(0o700) >= 3
            assert not (cache_dir / "probe").exists()
            lab.counts = not missing
    finally:
        os.umask(umask)


# -- rare moments of adopting --------------------------------------------------------------------------


@pytest.mark.parametrize("comes", ["nothing", "a block", "all of it", "a reader"])
@in_trio
async def test_what_comes_while_the_old_file_goes_keeps_the_new_one_out(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    async with running(cache_dir) as lab:
        data = content(1, 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        path, [only] = dirty_file(lab, data), lab.store.tiers
        obj, going = lab.store.object(object_id), [True]

        def settle(_: bytes) -> None:
            if going:  # else it is the cache write that asks
                going.clear()
                trio.from_thread.run_sync(come)

        def come() -> None:
            stop = {"nothing": 0, "a block": 1, "a reader": 1}.get(comes, 2)
            if not stop:
                return
            cache_write = begin_write(lab.store, obj, 0, stop)
            assert cache_write is not None
            cache_write.write(data[: stop * BLOCK])
            lab.store.end_write(obj, cache_write)
            if comes == "a reader":
                lab.store.space.pin(*lab.store.catalog.copies(obj, SSD))

        with monkeypatch.context() as patch:
            patch.setattr(only.disposal, "pending", lambda digest: bool(going))
            patch.setattr(only.disposal, "wait_for", settle)
            assert await lab.store.adopt(object_id, path) is (comes == "nothing")
        assert not going and path.exists() is (comes != "nothing")
        if comes == "a reader":
            lab.store.space.unpin(obj, *lab.store.catalog.copies(obj, SSD))
        assert lab.store.cached_bytes(object_id) == (BLOCK if comes in ("a block", "a reader") else 2 * BLOCK)
        assert await lab.read(object_id) == data
        await lab.quiet()
        lab.check_accounts()
        assert len(cache_files(only.path)) == 1


def test_a_link_in_place_of_a_cache_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to read what it leads to, where the file cannot be written, nor to cut it."""
    one = Tier(SSD, tmp_path / "t", 1 << 20, keep_free_bytes=0, clock=lambda: 0.0)
    path, elsewhere = one.file_path(b"d" * 16), tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not ours")
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere)
    real = os.open

    def read_only(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "read-only")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match="symbolic"):
        one.open_file(b"d" * 16)
    monkeypatch.undo()
    monkeypatch.setattr(tier, "SLICE_BYTES", -1)
    with pytest.raises(OSError, match="symbolic"):
        tier._remove(str(path))
    assert elsewhere.read_bytes() == b"not ours"

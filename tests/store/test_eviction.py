"""The order of eviction, and the search for what goes next: right whatever is touched, kept or in use meanwhile, and no row
is looked at again and again."""

from __future__ import annotations

import os
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.store import eviction
from cachefs.store.catalog import Copy, CopyKey, Row
from cachefs.store.eviction import (
    ANY,
    ANY_REMOTE_OWNED,
    IN_USE_REMEMBERED,
    LOWEST,
    OURS,
    SKIPPED_AT_ONCE,
    Keys,
    PriorityClass,
    Verdict,
    Walk,
)
from cachefs.store.tier import RAM, SSD
from tests.conftest import examples
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, Lab, begin_write, running
from tests.store.test_shared_epochs import put


class Rows:
    """Stands in for the index: clock → dataset; a copy is named by its clock. Counts the rows that were read."""

    def __init__(self, rows: dict[int, int]) -> None:
        self.rows = rows
        self.read = 0

    def oldest(self, tier: int, after: bytes, limit: int) -> list[Row]:
        last = int.from_bytes(after, "big") if after else -1
        clocks = sorted(clock for clock in self.rows if clock > last)[:limit]
        self.read += len(clocks)
        return [(c.to_bytes(8, "big"), key_of(c), c, self.rows[c]) for c in clocks]


def key_of(clock: int) -> CopyKey:
    return (1, clock.to_bytes(16, "big"), 0)


def walk_over(rows: Rows, kept: set[int]) -> Walk:
    index: Any = rows
    return Walk(index, 1, lambda key, clock, dataset: clock in kept)


def always(key: CopyKey, clock: int) -> Verdict:
    return Verdict.EVICT


def unless(exception: bool, verdict: Verdict) -> Verdict:
    return verdict if exception else Verdict.EVICT


def test_kept_rows_are_read_once_however_many_are_evicted() -> None:
    rows = Rows(dict.fromkeys(range(50_000), 1))
    walk = walk_over(rows, set(range(40_000)))
    searches = 1
    while walk.first(always, None) is None:
        searches += 1
        assert searches <= 40_000 // SKIPPED_AT_ONCE + 1, (
            "each search passes over so many, and the next goes on"
        )
    for gone in range(40_000, 45_000):
        found = walk.first(lambda key, clock, now=gone: unless(clock < now, Verdict.STALE), None)
        assert found == key_of(gone)
        if gone % 100 == 0:
            for clock in range(40_000, gone):
                rows.rows.pop(clock, None)
            walk.flushed()
    assert rows.read < 45_000 + 50 * 256 + 256


def test_what_was_in_use_is_found_after_the_next_flush() -> None:
    rows = Rows(dict.fromkeys(range(10), 1))
    walk = walk_over(rows, {0, 1})
    busy = {2, 3}

    def judge(key: CopyKey, clock: int) -> Verdict:
        return unless(clock in busy, Verdict.LATER)

    assert walk.first(judge, None) == key_of(4)
    busy.clear()
    assert walk.first(judge, None) == key_of(4)
    walk.flushed()
    assert walk.first(judge, None) == key_of(2)
    del rows.rows[2]
    assert walk.first(lambda key, clock: unless(clock == 2, Verdict.STALE), None) == key_of(3)


def test_a_row_that_comes_in_below_is_found() -> None:
    rows = Rows(dict.fromkeys(range(10, 20), 1))
    walk = walk_over(rows, set(range(10, 15)))
    assert walk.first(always, None) == key_of(15)
    assert walk.passed == 14
    walk.add(key_of(12), 12, 1)  # kept: no search may return it
    walk.add(key_of(3), 3, 1)
    walk.flushed()
    assert walk.first(always, None) == key_of(3)
    assert walk.first(always, 3) is None, "only what is older is wanted"


def test_too_many_held_rows_begin_the_walk_again() -> None:
    rows = Rows(dict.fromkeys(range(IN_USE_REMEMBERED + 10), 1))
    walk = walk_over(rows, set())
    assert walk.first(lambda key, clock: Verdict.LATER, None) is None
    walk.flushed()
    assert walk.first(always, None) == key_of(0)


@given(
    kept=st.sets(st.integers(0, 60)),
    busy=st.lists(st.sets(st.integers(0, 60)), min_size=1, max_size=6),
    limits=st.lists(st.integers(0, 70), min_size=6, max_size=6),
)
@settings(max_examples=examples(200), deadline=None)
def test_the_search_is_that_of_a_plain_one(kept: set[int], busy: list[set[int]], limits: list[int]) -> None:
    """After each flush, the first that is neither kept nor in use."""
    rows = Rows(dict.fromkeys(range(60), 1))
    walk = walk_over(rows, kept)
    for used, limit in zip(busy, limits, strict=False):
        walk.flushed()
        for _ in range(4):

            def judge(key: CopyKey, clock: int, used: set[int] = used) -> Verdict:
                if clock not in rows.rows:
                    return Verdict.STALE
                return unless(clock in used, Verdict.LATER)

            older = None if limit > 60 else limit
            can = [c for c in sorted(rows.rows) if c not in kept | used and (older is None or c < older)]
            found = walk.first(judge, older)
            assert found == (key_of(can[0]) if can else None)
            if can:
                del rows.rows[can[0]]


@in_trio
async def test_what_another_node_owned_has_its_place_when_it_is_ours(cache_dir: Path) -> None:
    """The search has passed over it already."""
    async with running(cache_dir, ssd=0, ram=64 * BLOCK) as lab:
        other, own = (lab.origin.put(name, bytes(BLOCK)) for name in ("other", "own"))
        assert put(lab, other, remote_owned=True) and put(lab, own)
        await lab.store.flush()

        def evictable() -> bytes:
            victim = lab.store.eviction.victim(RAM, (PriorityClass.EVICTABLE,))
            assert victim is not None
            return victim[0].id.digest

        assert evictable() == own.digest
        (copy,) = lab.store.catalog.copies(lab.store.object(other), RAM)
        lab.store.space.make_own(copy)
        assert put(lab, lab.origin.put("next", bytes(BLOCK)))  # something to flush
        await lab.store.flush()
        assert evictable() == other.digest


@in_trio
async def test_what_is_renewed_goes_later_unless_it_is_protected(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        read, waits, last = (lab.origin.put(name, bytes(BLOCK)) for name in ("read", "waits", "last"))
        assert put(lab, read) and put(lab, waits, prefetched=True) and put(lab, last)
        clocks = []
        for object_id in (read, waits):
            obj = lab.store.object(object_id)
            (copy,) = lab.store.catalog.copies(obj, SSD)
            before = copy.clock
            lab.store.renew(obj)
            clocks.append(copy.clock - before)
        assert clocks == [3, 0]


def test_keys_are_kept_by_tier_in_the_order_of_their_use() -> None:
    keys = Keys(most=3)
    fast, slow = ([(tier, bytes([n]) * 16, 0) for n in range(4)] for tier in (0, 1))
    for key in (*fast, *slow[:2], fast[0]):
        keys.add(key)
    assert [key in keys for key in (*fast, *slow)] == [True, True, True, False, True, True, False, False]
    keys.used(fast[0])
    keys.used(slow[3])
    assert list(islice(keys.oldest(0), 2)) == [fast[1], fast[2]]
    assert list(islice(keys.oldest(0), 2)) == [fast[2], fast[0]], "what was passed over comes last"
    assert keys.discard(fast[0]) and not keys.discard(fast[0]) and not keys.discard(slow[2])
    keys.add(fast[3])
    assert fast[3] in keys and fast[0] not in keys
    assert slow[0] in keys and list(keys.oldest(2)) == []


def test_one_search_passes_over_so_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "SKIPPED_AT_ONCE", 2)
    keys = Keys()
    all_keys = [(1, bytes([n]) * 16, 0) for n in range(5)]
    for key in all_keys:
        keys.add(key)
    assert [list(keys.oldest(1)) for _ in range(3)] == [
        all_keys[:2],
        all_keys[2:4],
        [all_keys[4], all_keys[0]],
    ]


@in_trio
async def test_what_goes_next_is_the_copy_with_the_lowest_key(cache_dir: Path) -> None:
    """Copies of all classes, touched in another order than they came; some rows are flushed, some are not."""
    async with running(cache_dir, ssd=64 * BLOCK, eviction="epoch") as lab:
        eviction, catalog = lab.store.eviction, lab.store.catalog
        used = [lab.origin.put(f"d/{n}", bytes(BLOCK)) for n in range(12)]
        for object_id in used[:8]:
            assert put(lab, object_id)
        for object_id in used[:4]:  # the first uses of the next epoch: the other four are protected
            await lab.read(object_id)
            await lab.store.flush()
        for object_id in used[8:]:
            assert put(lab, object_id, prefetched=True)
        others = [lab.origin.put(f"e/{n}", bytes(BLOCK)) for n in range(6)]
        for n, object_id in enumerate(others):
            assert put(lab, object_id, prefetched=n % 2 == 0, remote_owned=True)
        copies = [c for i in (*used, *others) for c in catalog.copies(catalog.object(i), 1)]

        def place(copy: Copy) -> tuple[int, PriorityClass, int]:
            return copy.tier, eviction.class_of(copy.key, copy.clock, copy.dataset), copy.clock

        assert {place(copy)[1] for copy in copies} == set(PriorityClass)
        lowest = sum(place(copy)[1] in LOWEST for copy in copies)
        assert eviction.victim(1, ()) is None
        gone = []
        while (victim := eviction.victim(1, LOWEST if len(gone) < lowest else ANY)) is not None:
            obj, copy = victim
            keys = {other.key: place(other) for other in copies}
            assert keys[copy.key] == min(keys.values())
            gone.append(copy.key)
            copies = [other for other in copies if other is not copy]
            lab.store.space.drop(obj, copy, copy.bitmap)
        assert not copies and len(gone) == 18


# -- against plain rules -----------------------------------------------------------------------------


class Order:
    """Which copies are owned by others, wait for a reader, or are pinned; in the order in which others' would go."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.now = 1000.0
        self.copies: dict[CopyKey, Copy] = {}
        self.remote: list[CopyKey] = []
        self.waiting: dict[CopyKey, float] = {}
        self.busy: set[CopyKey] = set()
        lab.store.eviction._now = lambda: self.now

    def class_of(self, copy: Copy) -> PriorityClass:
        waits = copy.key in self.waiting
        if copy.key in self.remote:
            return PriorityClass.REMOTE_PREFETCHED if waits else PriorityClass.REMOTE_OWNED
        protected = self.lab.store.eviction.epochs.protects(copy.dataset, copy.clock)
        return PriorityClass.PROTECTED if waits or protected else PriorityClass.EVICTABLE

    def touched(self, key: CopyKey) -> None:
        self.waiting.pop(key, None)
        if key in self.remote:
            self.remote.remove(key)
            self.remote.append(key)

    def gone(self, key: CopyKey) -> None:
        del self.copies[key]
        self.waiting.pop(key, None)
        if key in self.remote:
            self.remote.remove(key)
        self.busy.discard(key)

    def waits(self, key: CopyKey) -> None:
        self.waiting.pop(key, None)
        self.waiting[key] = self.now + eviction.PREFETCHED_S
        if len(self.waiting) > eviction.PREFETCHED_COPIES:
            del self.waiting[next(iter(self.waiting))]

    def flushed(self) -> None:
        while self.waiting and next(iter(self.waiting.values())) < self.now:
            del self.waiting[next(iter(self.waiting))]

    def victim(self, classes: tuple[PriorityClass, ...], older_than: int | None) -> CopyKey | None:
        for one in classes:
            if one in (PriorityClass.REMOTE_OWNED, PriorityClass.REMOTE_PREFETCHED):
                for key in list(self.remote):
                    if (
                        one is PriorityClass.REMOTE_PREFETCHED or key not in self.waiting
                    ) and key not in self.busy:
                        return key
                    self.remote.remove(key)
                    self.remote.append(key)
                continue
            found = [
                (copy.clock, key)
                for key, copy in self.copies.items()
                if key not in self.remote
                and key not in self.busy
                and (older_than is None or copy.clock < older_than)
                and (one is PriorityClass.PROTECTED or self.class_of(copy) is PriorityClass.EVICTABLE)
            ]
            if found:
                return min(found)[1]
        return None


@pytest.mark.parametrize("seed", range(6))
@in_trio
async def test_what_goes_next_is_as_the_plain_rules_say(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Copies come, are used, prefetched, owned by others and by this node, in use, pinned, left behind and dropped."""
    rng = random.Random(seed)
    monkeypatch.setattr(eviction, "PREFETCHED_COPIES", 6)
    policy = ["auto", "epoch", "lru"][seed % 3]
    async with running(cache_dir, ssd=64 * BLOCK, eviction=policy) as lab:
        store, order = lab.store, Order(lab)
        ids = [lab.origin.put(f"d{n % 2}/{n}", bytes(BLOCK)) for n in range(24)]
        pinned: set[CopyKey] = set()
        for _ in range(60):
            for _ in range(rng.randrange(10)):
                object_id = rng.choice(ids)
                obj, key = store.object(object_id), (SSD, object_id.digest, 0)
                here = key in order.copies
                what = rng.randrange(8)
                if not here and what < 6:
                    remote, ahead = what % 3 == 0, what % 2 == 0
                    assert put(lab, object_id, prefetched=ahead, remote_owned=remote)
                    copy = store.catalog.copies(obj, SSD)[0]
                    order.copies[key] = copy
                    if remote:
                        order.remote.append(key)
                    if ahead:
                        order.waits(key)
                elif here and what < 3:
                    store.hit(obj, [0])
                    order.touched(key)
                elif here and what == 3:
                    store.left_behind(obj)
                    order.waiting.pop(key, None)
                elif here and what == 4:
                    store.space.make_own(order.copies[key])
                    order.remote = [other for other in order.remote if other != key]
                elif here and what == 5 and key not in order.busy:
                    store.space.drop(obj, order.copies[key], 1)
                    order.gone(key)
                elif here and what == 6:
                    store.eviction.prefetched(order.copies[key])
                    order.touched(key)
                    order.waits(key)
            for key in rng.sample(sorted(order.copies), min(4, len(order.copies))):
                copy, obj = order.copies[key], store.catalog.by_digest(key[1])
                if key in pinned:
                    store.space.set_pinned(copy, False)
                    order.touched(key)
                    pinned.discard(key)
                    order.busy.discard(key)
                elif key in order.busy:
                    store.space.unpin(obj, copy)
                    order.busy.discard(key)
                elif rng.random() < 0.2:
                    store.space.pin(copy)
                    order.busy.add(key)
                elif rng.random() < 0.2:  # this node keeps it, then
                    store.space.set_pinned(copy, True)
                    order.remote = [other for other in order.remote if other != key]
                    order.touched(key)
                    pinned.add(key)
                    order.busy.add(key)
            order.now += rng.choice([0, 1, eviction.PREFETCHED_S / 2, eviction.PREFETCHED_S])
            if order.copies:  # something is to be written, or no row would be looked at again
                store.catalog.changed(rng.choice(list(order.copies.values())))
            await store.flush()
            order.flushed()
            for key in rng.sample(sorted(order.copies), min(3, len(order.copies))):
                if rng.random() < 0.5:  # used since
                    store.hit(store.catalog.by_digest(key[1]), [0])
                    order.touched(key)
            clocks = [copy.clock for copy in order.copies.values()]
            for classes in rng.sample(
                [(), *((one,) for one in PriorityClass), LOWEST, ANY, OURS, ANY_REMOTE_OWNED], 5
            ):
                older_than = rng.choice([None, None, *clocks])
                for copy in order.copies.values():
                    assert store.eviction.class_of(copy.key, copy.clock, copy.dataset) is order.class_of(copy)
                    assert store.eviction.protected(copy) is (
                        copy.pinned
                        or copy.key in order.waiting
                        or store.eviction.epochs.protects(copy.dataset, copy.clock)
                    )
                victim = store.eviction.victim(SSD, classes, older_than=older_than)
                wanted = order.victim(classes, older_than)
                found = victim[1].key if victim is not None else None
                assert found == wanted, (classes, older_than)
        for key in list(order.busy - pinned):
            store.space.unpin(store.catalog.by_digest(key[1]), order.copies[key])


@pytest.mark.parametrize(
    ("immutable", "owned", "goes"), [(True, 0b11, True), (True, 0b01, False), (False, 0b01, True)]
)
@in_trio
async def test_a_file_that_goes_whole_goes_for_others_when_all_of_it_is_theirs(
    cache_dir: Path, immutable: bool, owned: int, goes: bool
) -> None:
    async with running(cache_dir, ssd=0, ram=64 * BLOCK) as lab:
        object_id = lab.origin.put("k", content(1, EXTENT + BLOCK))
        obj, [tier] = lab.store.object(object_id), lab.store.tiers
        for extent, blocks in enumerate((16, 1)):
            remote = bool(owned >> extent & 1)
            cache_write = begin_write(lab.store, obj, 16 * extent, 16 * extent + blocks, remote_owned=remote)
            assert cache_write is not None
            cache_write.write(content(1, EXTENT + BLOCK)[cache_write.start : cache_write.stop])
            lab.store.end_write(obj, cache_write)
        if immutable:
            os.close(tier.make_immutable(object_id.digest, object_id.size))
        victim = lab.store.eviction.victim(RAM, (PriorityClass.REMOTE_OWNED,))
        assert (victim is not None and victim[1].extent == 0) is goes
        assert lab.store.eviction.victim(RAM, (PriorityClass.REMOTE_OWNED,)) == victim, "until it has gone"
        # A user of one part keeps a file that goes whole.
        first, second = lab.store.catalog.copies(obj, RAM)
        lab.store.space.pin(second)
        assert (lab.store.eviction.victim(RAM, (PriorityClass.REMOTE_OWNED,)) is not None) is (
            goes and not immutable
        )
        lab.store.space.unpin(obj, second)
        freed = lab.store.space.drop(obj, first, 1)
        assert freed == (17 if immutable else 1) and tier.used_bytes == (0 if immutable else 16 * BLOCK)
        obj.close_if_unused()

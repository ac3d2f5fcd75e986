"""What must be true of a store without users: nothing is pinned, reserved or remote-owned by a caller, each counter is the
sum of what it counts, and the index says the same. Held after every test that runs a store (`lab.running`)."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from cachefs.base.names import block_length
from cachefs.store import Store
from cachefs.store import catalog as index
from cachefs.store.catalog import Copy
from cachefs.store.eviction import PriorityClass
from cachefs.store.tier import RAM, allocated


def block_bytes(store: Store, copy: Copy, bits: int) -> int:
    """Allocated bytes of the blocks in `bits`."""
    return sum(
        allocated(block_length(copy.extent * 16 + at, copy.object_size, store.block_size))
        for at in range(16)
        if bits >> at & 1
    )


def rows(store: Store) -> dict[Any, Copy]:
    """All copies that the index has, by key."""
    found = {}
    for key, row in store.catalog._index._db.scan("copies"):
        name = index._KEY.unpack(key)
        copy = index.unpack_copy(name, row)
        assert copy is not None, f"a damaged row of {name}"
        found[name] = copy
    return found


def loaded(store: Store) -> list[Copy]:
    return [copy for obj in store.catalog._objects.values() for copy in obj.copies.values() if copy]


def check_at_rest(store: Store) -> None:
    """No transfer, move or read is under way, whatever is still open."""
    for obj in store.catalog._objects.values():
        assert not any(copy.in_progress for copy in obj.copies.values() if copy), (
            f"{obj.id.key}: blocks arrive"
        )
        for (tier, extent), copy in obj.copies.items():
            assert copy is None or (copy.tier, copy.extent) == (tier, extent)
            assert copy is None or not copy.verified & ~copy.bitmap, f"{obj.id.key}: verified, but not there"
    assert store.catalog._loaded == len(loaded(store)), "loaded copies are miscounted"
    assert not store.catalog._flushing


def check_unused(store: Store, *, files: bool = True) -> None:
    """No handle, no passthrough file, no pin of a transfer: every use was given back."""
    check_at_rest(store)
    for obj in store.catalog._objects.values():
        assert obj.refs == 0, f"{obj.id.key}: {obj.refs} users are left"
        pins = {key: copy.pins for key, copy in obj.copies.items() if copy and copy.pins}
        used = obj.backing is not None and obj.backing.users > 0
        assert not pins or used, f"{obj.id.key}: pins are left: {pins}"
        assert not obj.leaving or used, f"{obj.id.key}: its file waits for nothing"
        for copy in obj.copies.values():
            if copy is not None and not copy.pins:
                assert not copy.forgotten, f"{obj.id.key}: bytes of dropped blocks are kept"
                assert copy.bitmap, f"{obj.id.key}: an empty copy is kept"
        if files:
            known = [tier for tier in store.tiers if tier.number in obj.immutable]
            there = [tier for tier in known if tier.immutable(obj.id.digest)]
            assert there == known, f"{obj.id.key}: a file is taken for immutable"
        if files and not obj.in_use():
            assert not obj.fds, f"{obj.id.key}: descriptors of an unused version are open"

    for tier in store.tiers:
        going = tier.disposal
        assert not going._pending and (going.going_bytes, going.going_files) == (0, 0), (
            f"{tier.name}: {going._pending}"
        )
        assert not tier.disk._calls and not tier.disk._readers, (
            f"{tier.name}: calls are counted, and none is made"
        )
        assert not tier.disk._threads.borrowed_tokens, f"{tier.name}: a thread reads"
        backings = [obj.backing for obj in store.catalog._objects.values() if obj.backing is not None]
        known = sum(backing.tier is tier for backing in backings)
        assert tier.registered == known, f"{tier.name}: {tier.registered} passthrough files are counted"
    check_passthrough(store)


def check_passthrough(store: Store) -> None:
    """Of each file that the kernel has: whether it has users, and that its copies are pinned for these alone."""
    files = store.backing_files
    known = {obj.backing: obj for obj in store.catalog._objects.values() if obj.backing is not None}
    idle = {backing for backing in known if not backing.users}
    assert idle == set(files._idle), f"{len(files._idle)} idle passthrough files are kept of {len(idle)}"
    assert not files._closed or not idle, "idle passthrough files outlive the end"
    for backing, obj in known.items():
        assert backing.object is obj
        assert not backing.id or backing.fd < 0, f"{obj.id.key}: the kernel has it, and it is open here"
        if backing.users:
            assert {copy.pins for copy in backing.copies} <= {1}, f"{obj.id.key}: one pin for all users"


def check_counted(store: Store) -> None:
    """After a flush: tiers count what copies hold, and the index has a row, and a place in the order, for each."""
    catalog = store.catalog
    if store.catalog.index_error:
        return
    assert not catalog._dirty and not catalog._removed, "a flush left something unwritten"
    known = rows(store)
    copies = {**known, **{copy.key: copy for copy in loaded(store)}}
    for copy in loaded(store):
        row = known.get(copy.key)
        if not copy.bitmap:
            assert row is None, f"{copy.key}: a row of no block"
            continue
        assert row is not None, f"{copy.key}: no row"
        assert copy.stored_clock is not None, f"{copy.key}: its row would be left behind"
        said = (row.bitmap, row.clock, row.pinned, row.stored_clock, row.dataset, row.object_size)
        assert said == (
            copy.bitmap,
            copy.clock,
            copy.pinned,
            copy.stored_clock,
            copy.dataset,
            copy.object_size,
        )
        for at in range(16):
            assert not copy.bitmap >> at & 1 or row.checksums[at] == copy.checksums[at]
    order = store.eviction
    for what, keys in (
        ("waiting", list(order._waiting)),
        ("remote-owned", [key for tier in order.remote_owned.tiers.values() for key in tier]),
        ("evictable first", [key for tier in order._evictable_first.tiers.values() for key in tier]),
    ):
        assert copies.keys() >= set(keys), f"{what} copies that are not there: {set(keys) - copies.keys()}"
    for tier in store.tiers:
        mine = [copy for copy in copies.values() if copy.tier == tier.number]
        held = sum(block_bytes(store, copy, copy.bitmap) for copy in mine)
        dropped = sum(block_bytes(store, copy, copy.forgotten) for copy in mine)
        remote_owned = [copy for copy in mine if copy.key in store.eviction.remote_owned]
        counted = {
            "used": (tier.used_bytes, held + dropped),
            "unlisted": (tier.unlisted_bytes, dropped),
            "blocks": (tier.blocks, sum(copy.bitmap.bit_count() for copy in mine)),
            "pinned": (tier.pinned_bytes, sum(block_bytes(store, c, c.bitmap) for c in mine if c.pinned)),
            "remote_owned": (
                tier.remote_owned_bytes,
                sum(block_bytes(store, c, c.bitmap | c.forgotten) for c in remote_owned),
            ),
        }
        wrong = {name: pair for name, pair in counted.items() if pair[0] != pair[1]}
        assert not wrong, f"{tier.name}: (counted, there is): {wrong}"
        totals = catalog._index.totals(tier.number)
        assert totals == (held, counted["blocks"][1], counted["pinned"][1]), f"{tier.name}: totals {totals}"
    check_order(store, known)
    check_remembered(store, known)
    check_places(store, copies)


def check_remembered(store: Store, known: dict[Any, Copy]) -> None:
    """What is in memory beside the rows says what they say, and says it once."""
    catalog, order = store.catalog, store.eviction
    for copy in loaded(store):
        assert copy.key not in catalog._checked, f"{copy.key}: its own bookkeeping says what is verified"
        assert copy.used in (0, copy.clock), f"{copy.key}: its last use is none of its clock"
        assert copy.clock <= catalog.clock, f"{copy.key}: it is younger than the clock"
        assert copy.tier != RAM or not copy.first_use, f"{copy.key}: a use of a copy that is not promoted"
        assert not (copy.pinned and copy.key in order.remote_owned), f"{copy.key}: pinned for another node"
    assert catalog.recent == catalog.clock, "a flush begins with what was used until then"
    assert not catalog._objects.keys() & catalog._peeked.keys(), "a version has two bookkeepings"
    for obj in catalog._peeked.values():
        assert not obj.refs and not obj.fds and not obj.leaving and obj.backing is None, obj.id.key
        for (tier, extent), copy in obj.copies.items():
            row = known.get((tier, obj.id.digest, extent))
            here = None if copy is None else (copy.bitmap, copy.stored_clock, copy.pinned)
            assert here == (None if row is None else (row.bitmap, row.stored_clock, row.pinned)), obj.id.key
    heap = store.space.heap
    assert heap._bytes == sum(map(len, heap.blocks.values())), "the heap is miscounted"


def check_places(store: Store, copies: dict[Any, Copy]) -> None:
    """A search for what is evictable comes to each such row: it lies before it, or is held."""
    order = store.eviction
    for key, waits in order._waiting.items():
        assert (waits.clock, waits.dataset) == (copies[key].clock, copies[key].dataset), (
            f"{key}: waits as another"
        )
    for tier in store.tiers:
        if order._seen_version != order.epochs.version:
            continue  # the next search starts from the beginning
        for walk in (order._evictable_walks[tier.number], order._any_walks[tier.number]):
            assert not walk._again, "a flush leaves nothing for the next"
        walk = order._evictable_walks[tier.number]
        held = {(key, clock) for _, key, clock, _ in walk._rows}
        for _, key, clock, dataset in store.catalog._index.oldest(tier.number, b"", 1 << 20):
            evictable = order.class_of(key, clock, dataset) is PriorityClass.EVICTABLE
            if evictable and clock <= walk.passed and key not in order._evictable_first:
                assert (key, clock) in held, f"{key}: no search finds it"
        assert order._any_walks[tier.number].passed == -1, "all of them are looked at again after a flush"


def check_order(store: Store, known: dict[Any, Copy]) -> None:
    """One place in the order of eviction for each row that has one, and no place for what has no row."""
    database = store.catalog._index._db
    places = []
    for key, value in database.scan("order"):
        tier, clock = index._CLOCK.unpack(key)
        *name, dataset = index._ORDERED.unpack(value)
        copy = known.get(tuple(name))
        assert copy is not None, f"a place in the order for {name}, of which there is no row"
        assert tier == copy.tier
        assert (copy.stored_clock, copy.dataset) == (clock, dataset), (
            f"{name}: an outdated place in the order"
        )
        places.append(tuple(name))
    twice = [name for name, count in Counter(places).items() if count > 1]
    assert not twice, f"more than one place in the order: {twice}"
    ages = [copy.stored_clock for copy in known.values() if copy.stored_clock]
    assert store.catalog.clock >= max(ages, default=0)
    missing = {name for name, copy in known.items() if copy.stored_clock} - set(places)
    assert not missing, f"no place in the order: {missing}"


def open_files(below: Path) -> list[str]:
    """What this process has open below a directory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(f"{below}/"):
            found.append(target)
    return found


def own_threads() -> set[int]:
    """Threads that are no idle workers of trio's."""
    return {
        thread.ident or 0
        for thread in threading.enumerate()
        if not thread.name.startswith(("Trio", "MainThread"))
    }

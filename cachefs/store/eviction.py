"""The order of eviction: which copy of a tier goes first.

A copy's place is one key: (tier, priority class, clock of its last use), lowest first. The index keeps rows by (tier,
clock). The class is not stored, because it changes for many copies at once when an epoch begins; it is computed from what
is known here: which copies other nodes own, which wait for their first reader, and what this epoch of a dataset has had.

A search walks a tier's rows, least recently used first, and passes over those of a higher class. A row that is protected
stays so until an epoch begins, so it is looked at once: with a million rows, the search goes on where it was. Rows that
only cannot go right now, and those that come in below, are looked at again after each flush.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import NamedTuple

import trio

from cachefs.store.catalog import CachedObject, Catalog
from cachefs.store.epochs import Course, Datasets, Epochs, Policy, unit_hash
from cachefs.store.index import Copy, CopyKey, Index, Row
from cachefs.store.tier import Tier

PREFETCHED_S = 900.0
"""How long prefetched blocks wait for their first reader before they are evicted like anything else. Guessed."""

PREFETCHED_COPIES = 65_536
"""Copies that may wait so, about 400 bytes each: a terabyte of large files. Beyond it the oldest wait no longer. A bound of
memory."""

SPENT = 65_536
"""Spent copies that are remembered of a tier, about 200 bytes each. A bound of memory: many more than go before the next are
spent."""

LOOKED_AT = 64
"""Remote-owned copies that one search passes over because they are in use; they come last in the next one. Guessed."""

KEPT_AT_ONCE = 1024
"""Protected rows passed over in one search, about 1 ms. Derived: after an epoch began, a million rows cost a thousand
demands the right victim, a thousandth of them."""

HELD = 4096
"""Rows remembered because they could not go just then; beyond it the walk starts over. A bound of memory."""

EPOCHS_SAVED_EVERY = 10
"""Flushes from one writing of the epochs' state to the next, 100 KB for each dataset in use. Guessed: what a crash loses
of it makes the next epoch look a little less like one."""


class Class(enum.IntEnum):
    """Priority classes, the first to go first."""

    REMOTE_OWNED = 0
    """Another node owns it, and it does not wait for a reader."""
    EVICTABLE = 1
    """Used in this epoch already, or not in all of the last; or its dataset has no epochs."""
    REMOTE_PREFETCHED = 2
    """Another node owns it, and it waits for its first reader."""
    PROTECTED = 3
    """It waits for its first reader, or this epoch has yet to use it."""


Classes = tuple[Class, ...]
"""Classes that may be evicted for something to come, in their order."""

NOTHING: Classes = ()
REMOTE_OWNED: Classes = (Class.REMOTE_OWNED,)
ANY_REMOTE_OWNED: Classes = (Class.REMOTE_OWNED, Class.REMOTE_PREFETCHED)
LOWEST: Classes = (Class.REMOTE_OWNED, Class.EVICTABLE)
ANY: Classes = tuple(Class)
OURS: Classes = (Class.EVICTABLE, Class.PROTECTED)

Victim = tuple[CachedObject, Copy]


Verdict = bool | None
"""What is known of a row's copy: it can go (True), or not now; None: it is no longer there, or another row speaks of it."""


class Walk:
    """A search of a tier's rows in the order of their clocks. `keep` tells which to pass over. Rows that are looked at once
    more have an empty cursor."""

    def __init__(self, index: Index, tier: int, keep: Callable[[CopyKey, int, int], bool]) -> None:
        self._index = index
        self._tier = tier
        self._keep = keep
        self._rows: deque[Row] = deque()
        self._held: list[Row] = []
        self._after = b""
        self.passed = -1
        """Clock of the last row passed: nothing below it will be looked at without `add`."""

    def first(self, judge: Callable[[CopyKey, int], Verdict], older_than: int | None) -> CopyKey | None:
        """The first copy that can go. It is found again until it has gone."""
        kept = 0
        while True:
            if not self._rows:
                self._rows.extend(self._index.oldest(self._tier, self._after, 256))
                if not self._rows:
                    return None
            row = self._rows[0]
            _, key, clock, dataset = row
            if older_than is not None and clock >= older_than:
                return None
            if self._keep(key, clock, dataset):
                kept += 1
            else:
                verdict = judge(key, clock)
                if verdict:
                    return key
                if verdict is not None:
                    self._held.append((b"", key, clock, dataset))
            self._rows.popleft()
            if row[0]:
                self._after, self.passed = row[0], clock
            if kept >= KEPT_AT_ONCE:
                return None

    def add(self, key: CopyKey, clock: int, dataset: int) -> None:
        """A row is to be looked at after the next flush, if it was passed; else the search will come to it in its place."""
        if clock <= self.passed:
            self._held.append((b"", key, clock, dataset))

    def flushed(self) -> None:
        """Rows are up to date again: go on where the walk was, after those that were held."""
        if len(self._held) > HELD:
            self.restart()
            return
        self._held += (row for row in self._rows if not row[0])  # no search has come that far
        self._rows = deque(sorted(self._held, key=lambda row: row[2]))
        self._held = []

    def restart(self) -> None:
        self._rows.clear()
        self._held.clear()
        self._after, self.passed = b"", -1


class Keys:
    """Keys of copies by tier, used longest ago first."""

    def __init__(self, most: int | None = None) -> None:
        self.tiers: dict[int, OrderedDict[CopyKey, None]] = {}  # empty: no key was ever added
        self._most = most

    def __contains__(self, key: CopyKey) -> bool:
        return key in self.tiers.get(key[0], ())

    def add(self, key: CopyKey) -> None:
        keys = self.tiers.setdefault(key[0], OrderedDict())
        if self._most is None or len(keys) < self._most:
            keys[key] = None

    def discard(self, key: CopyKey) -> bool:
        """True if it was there."""
        return key in self and self.tiers[key[0]].pop(key) is None

    def used(self, key: CopyKey) -> None:
        """Those used again stay longer."""
        keys = self.tiers.get(key[0])
        if keys is not None and key in keys:
            keys.move_to_end(key)

    def clear(self, tier: int | None = None) -> None:
        """Of one tier, or all."""
        if tier is None:
            self.tiers.clear()
        else:
            self.tiers.pop(tier, None)

    def oldest(self, tier: int) -> Iterator[CopyKey]:
        """Some of a tier, in the order in which they go. What is passed over is looked at last in the next search."""
        for key in list(islice(self.tiers.get(tier, ()), LOOKED_AT)):
            yield key
            self.used(key)


class Waiting(NamedTuple):
    """A prefetched copy that waits for its first reader until the time `until`."""

    until: float
    clock: int
    dataset: int


class Eviction:
    """The order of eviction of all tiers, and every change of a copy's place in it.

    `remote_owned` are copies of extents that other nodes own. They lie in the fastest tier while nothing else wants their
    place: they displace only each other, go before everything else, are neither moved nor saved at a stop, and after a
    restart are like any other copy. `room.py` alone changes which they are, with the bytes that it counts of them."""

    def __init__(
        self, catalog: Catalog, index: Index, tiers: list[Tier], policy: Policy, now: Callable[[], float]
    ) -> None:
        self._catalog = catalog
        self._tier = {tier.number: tier for tier in tiers}
        self._now = now
        self.epochs = Epochs(policy)
        self.datasets = Datasets()
        self.course = Course(self.epochs, self.datasets)
        self.remote_owned = Keys()
        self._spent = Keys(SPENT)
        self._waiting: OrderedDict[CopyKey, Waiting] = OrderedDict()
        self._evictable = {
            tier.number: Walk(index, tier.number, lambda *row: self.class_of(*row) is not Class.EVICTABLE)
            for tier in tiers
        }
        self._any = {
            tier.number: Walk(index, tier.number, lambda key, *_: key in self.remote_owned) for tier in tiers
        }
        self._flush_lock = trio.Lock()
        self._flushes = 0
        self._restore(index)
        self._seen_version = self._saved_version = self.epochs.version

    # -- a copy's place ----------------------------------------------------------------------------

    def class_of(self, key: CopyKey, clock: int, dataset: int) -> Class:
        if key in self.remote_owned:
            return Class.REMOTE_PREFETCHED if key in self._waiting else Class.REMOTE_OWNED
        return Class.PROTECTED if self._wanted(key, clock, dataset) else Class.EVICTABLE

    def _wanted(self, key: CopyKey, clock: int, dataset: int) -> bool:
        return key in self._waiting or (self.epochs.protects(dataset, clock) and key not in self._spent)

    def key(self, copy: Copy) -> tuple[int, Class, int]:
        """The copy's place in the order of eviction."""
        return copy.tier, self.class_of(copy.key, copy.clock, copy.dataset), copy.clock

    def protected(self, copy: Copy) -> bool:
        """True if it is pinned, waits for its first reader, or is still to be used in this epoch."""
        return copy.pinned or self._wanted(copy.key, copy.clock, copy.dataset)

    def touch(self, copy: Copy) -> None:
        """Used now."""
        key = self._catalog.touch(copy)
        if self._waiting:
            self._waiting.pop(key, None)
        if self.remote_owned.tiers:
            self.remote_owned.used(key)

    def touch_if_old(self, copy: Copy) -> bool:
        """`touch`, if this is a separate use and not the last one still going on."""
        if self._catalog.lately_used(copy) or not copy.bitmap:
            return False
        self.touch(copy)
        return True

    def touch_if_flushed(self, copy: Copy) -> bool:
        """`touch`, unless it was used since the last flush: then it is young anyway."""
        if self._catalog.used_since_flush(copy) or not copy.bitmap:
            return False
        self.touch(copy)
        return True

    def used(self, obj: CachedObject, copy: Copy, *, hit: bool, requester: str = "") -> None:
        """Tell the policy of a use, after `touch`; `requester` is the requesting peer, "" for this node's readers. Copies
        that other nodes own are no part of the datasets kept here: each epoch brings other parts of them."""
        if copy.dataset_version != self.datasets.version:
            copy.dataset = self.datasets(obj.id)
            copy.dataset_version = self.datasets.version  # which may have grown just now
        unit = unit_hash(copy.digest, copy.extent)
        if self.remote_owned.tiers and copy.key in self.remote_owned:
            self.epochs.comes(copy.dataset, unit)
            return
        length = self._catalog.extent_bytes(copy)
        self.epochs.used(copy.dataset, unit, copy.clock, length, hit=hit, requester=requester)
        self._look_again()
        if self.epochs.spent(copy.dataset, unit):
            self._spent.add(copy.key)

    def prefetched(self, copy: Copy) -> None:
        """Blocks have come that no reader has asked for yet."""
        self.touch(copy)
        copy.used = 0
        self._wait(copy, self._now() + PREFETCHED_S)

    def _wait(self, copy: Copy, until: float) -> None:
        self._waiting[copy.key] = Waiting(until, copy.clock, copy.dataset)
        if len(self._waiting) > PREFETCHED_COPIES:
            self._give_up(next(iter(self._waiting)))

    def left_behind(self, obj: CachedObject) -> None:
        """Its readers have gone: what was prefetched for them waits no longer."""
        for copy in obj.copies.values() if self._waiting else ():
            if copy is not None and copy.key in self._waiting:
                self._give_up(copy.key)

    def _give_up(self, key: CopyKey) -> None:
        """It may go like anything else."""
        waited = self._waiting.pop(key)
        self._evictable[key[0]].add(key, waited.clock, waited.dataset)

    def own(self, copy: Copy) -> bool:
        """This node keeps it from now on. True if another node owned it until now."""
        was = self.remote_owned.discard(copy.key)
        if was:
            self._evictable[copy.tier].add(copy.key, copy.clock, copy.dataset)
        return was

    def moved(self, source: Copy, target: Copy) -> None:
        """The target is as old as what it was copied from."""
        if source.clock > target.clock:
            target.clock, target.used = source.clock, source.used
        if source.key in self._waiting and target.key not in self._waiting:
            self._wait(target, self._waiting[source.key].until)
        if source.key in self._spent:
            self._spent.add(target.key)
        self._catalog.changed(target)

    def removed(self, copy: Copy) -> None:
        """It has gone."""
        self._waiting.pop(copy.key, None)
        self.remote_owned.discard(copy.key)
        self._spent.discard(copy.key)

    def forget_tier(self, tier: int) -> None:
        self.remote_owned.clear(tier)
        self._spent.clear(tier)

    # -- the search --------------------------------------------------------------------------------

    def victim(
        self, tier: int, classes: Classes = ANY, *, older_than: int | None = None, moving: bool = False
    ) -> Victim | None:
        """The first copy in the order of eviction that is of these classes and that no caller uses, nor anything that would
        have to go with it. It stays the first until it has gone. `older_than` is a clock, for copies of this node's own.
        `moving`: it goes to another tier, so it may be pinned."""
        self._look_again()
        for one in classes:
            if one in (Class.REMOTE_OWNED, Class.REMOTE_PREFETCHED):
                found = self._remote_owned_victim(tier, waiting=one is Class.REMOTE_PREFETCHED)
            elif one is Class.EVICTABLE:
                found = self._first(self._evictable[tier], tier, True, older_than, moving)
            else:
                found = self._first(self._any[tier], tier, False, older_than, moving)
            if found is not None:
                return found
        return None

    def _remote_owned_victim(self, tier: int, *, waiting: bool) -> Victim | None:
        for key in self.remote_owned.oldest(tier):
            obj = self._catalog.by_digest(key[1])
            copy = self._catalog.copy(obj, key[0], key[2])
            if (
                copy is not None
                and (waiting or key not in self._waiting)
                and self._can_go(obj, copy, moving=False)
            ):
                whole = self._catalog.copies(obj, tier) if obj.is_immutable(self._tier[tier]) else ()
                if all(other.key in self.remote_owned for other in whole):
                    return obj, copy
        return None

    def _first(
        self, walk: Walk, tier: int, evictable: bool, older_than: int | None, moving: bool
    ) -> Victim | None:
        """The first copy of this node's own; only `evictable` ones, or any."""
        catalog = self._catalog

        def judge(key: CopyKey, clock: int) -> Verdict:
            if catalog.unlisted(key):
                return None
            obj = catalog.by_digest(key[1])
            copy = catalog.copy(obj, key[0], key[2])
            if copy is None:
                catalog.damaged(key, clock)
                return None
            if copy.clock != clock:
                return None
            return self._can_go(obj, copy, moving)

        # Rows first: a copy that was touched since the last flush is younger than every row that is up to date.
        key = walk.first(judge, older_than)
        if key is not None:
            obj = catalog.by_digest(key[1])
            return obj, obj.copies[key[0], key[2]]  # type: ignore[return-value]
        spent = (
            catalog.copy(catalog.by_digest(d), t, e) for t, d, e in self._spent.oldest(tier) if evictable
        )
        young = (
            copy
            for copy in chain(spent, catalog.unwritten())
            if copy is not None and copy.tier == tier and copy.bitmap and copy.key not in self.remote_owned
        )
        for copy in islice(young, KEPT_AT_ONCE):
            _, priority, clock = self.key(copy)
            if (older_than is None or clock < older_than) and not (evictable and priority is Class.PROTECTED):
                obj = catalog.by_digest(copy.digest)
                if self._can_go(obj, copy, moving):
                    return obj, copy
        return None

    def _can_go(self, obj: CachedObject, copy: Copy, moving: bool) -> bool:
        if copy.pins or (copy.pinned and not moving):
            return False
        tier = self._tier[copy.tier]
        return not (obj.is_immutable(tier) and any(other.pins for other in obj.on(tier)))

    def _look_again(self) -> None:
        """After an epoch began: copies that were protected no longer are."""
        if self._seen_version != self.epochs.version:
            self._seen_version = self.epochs.version
            self._spent.clear()
            for walk in self._evictable.values():
                walk.restart()

    # -- the index ---------------------------------------------------------------------------------

    async def flush(self, *, closing: bool = False) -> None:
        """Write what changed to the index. Durable when this returns, or kept for next time and `index_error` says why."""
        async with self._flush_lock:
            self._catalog.flush_begins()
            while self._waiting and next(iter(self._waiting.values())).until < self._now():
                self._give_up(next(iter(self._waiting)))
            if not self._catalog.changes and not closing:
                return
            try:
                placed = await self._catalog.flush(self._notes(closing))
                if placed is None:
                    self._seen_version = -1  # look again
                for key, clock, dataset in placed or ():
                    self._evictable[key[0]].add(key, clock, dataset)
            finally:
                for walk in self._evictable.values():
                    walk.flushed()
                for walk in self._any.values():
                    walk.restart()

    def _notes(self, closing: bool) -> dict[bytes, bytes]:
        """What the index is told besides its rows: the clock, and the epochs' state when it is time to write it.

        Rows alone do not tell the clock: what is pinned on the last tier has no place in the order, and a start reads no
        others. If the clock went back, what is used now would look older than what was used then."""
        notes = {b"clock": self._catalog.clock.to_bytes(8, "big")}
        self._flushes += 1
        if self._saved_version == self.epochs.version and self._flushes % EPOCHS_SAVED_EVERY and not closing:
            return notes
        self._saved_version = self.epochs.version
        listed, rows = self.epochs.changes()
        notes |= {b"epochs": listed, b"datasets": self.datasets.dump()}
        return notes | {b"epochs%08x" % number: row for number, row in rows.items()}

    def _restore(self, index: Index) -> None:
        """Go on where an earlier daemon was: with its datasets, and behind every clock that it has given."""
        self.datasets.restore(index.note(b"datasets"))
        listed = index.note(b"epochs")
        rows = [(number, index.note(b"epochs%08x" % number)) for number in self.epochs.listed(listed)]
        self.epochs.restore(listed, rows)
        noted = int.from_bytes(index.note(b"clock") or b"", "big")
        self._catalog.clock = max(self._catalog.clock, noted + 1)
        self._catalog.flush_begins()

"""What is where, in memory: the versions lately used, their copies, and what the index has yet to be told.

The index on disk lists every copy; the catalog holds those that were looked at, and writes changes back in batches. The
rules that keep the two one are all here: a key that was removed, or that a flush under way is writing, is never loaded
from the index again; a row whose clock is not the copy's is out of date.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import trio

from cachefs.errors import CacheUnusable, NoRoom
from cachefs.names import BLOCKS_PER_EXTENT, ObjectId, block_length
from cachefs.store.ahead import AHEAD_COPIES, AHEAD_S, Waiting
from cachefs.store.borrowed import Borrowed, Spent
from cachefs.store.checked import Checked
from cachefs.store.datasets import Datasets
from cachefs.store.epochs import Epochs, unit_hash
from cachefs.store.index import Copy, CopyKey, Index, Saved, pack_copy
from cachefs.store.notes import Notes
from cachefs.store.tier import Tier
from cachefs.store.versions import CachedObject, Unnamed
from cachefs.store.victims import KEPT_AT_ONCE, Verdict, Walk

log = logging.getLogger(__name__)

OBJECTS_IN_MEMORY = 8192
"""Versions whose bookkeeping is kept in memory after use, about 1 KiB each. Guessed."""

COPIES_IN_MEMORY = 32_768
"""Copies that this may come to before versions are forgotten early, about 1.5 KiB each (measured). Guessed."""

CHECKED_EXTENTS = 16
"""Extents of a version whose verified copies are remembered as such when it is forgotten: those of a larger one would push
out those of thousands of small files. Guessed."""

LARGE_PASSED = 16
"""Sealed files of several extents, which go whole, that are passed over when what goes is still wanted. Guessed."""

SAME_USE = 4
"""Uses of others, without a flush between, after which one is another. Guessed: it spares a reader that is alone or beside a
few others most of its bookkeeping, 2 µs a read."""


class Catalog:
    """`trust` takes the index's word for the bytes of its blocks; otherwise each is checked before its first use."""

    def __init__(
        self,
        index: Index,
        tiers: list[Tier],
        block_size: int,
        epochs: Epochs,
        now: Callable[[], float],
        *,
        trust: bool,
    ) -> None:
        self._index = index
        self._tiers = tiers
        self._tier = {tier.number: tier for tier in tiers}
        self._block_size = block_size
        self._trust = trust
        self._objects: OrderedDict[bytes, CachedObject] = OrderedDict()
        self._dirty: dict[CopyKey, Copy] = {}
        self._removed: dict[CopyKey, int | None] = {}
        self._flushing: dict[CopyKey, Any] = {}
        self._now = now
        self.epochs = epochs
        self.datasets = Datasets()
        self._ahead: OrderedDict[CopyKey, Waiting] = OrderedDict()
        self.borrowed = Borrowed()
        self._spent = Spent()
        self._spare = {tier.number: Walk(index, tier.number, self._passed_over) for tier in tiers}
        self._all = {
            tier.number: Walk(index, tier.number, lambda key, *_: key in self.borrowed) for tier in tiers
        }
        self._loaded = 0
        self._checked = Checked()
        self._notes = Notes(index, epochs, self.datasets)
        self._clock = self._notes.clock
        self._seen_version = epochs.version
        self._recent = self._clock
        self._flush_lock = trio.Lock()
        self.index_error = ""
        self.unfinished = False  # files are left that no row speaks of
        self.on_forget: Callable[[CachedObject], None] = lambda obj: None
        for tier in tiers:
            tier.used_bytes, tier.blocks, tier.pinned_bytes = index.totals(tier.number)

    # -- objects and copies ------------------------------------------------------------------------

    def object(self, object_id: ObjectId) -> CachedObject:
        """The bookkeeping of this version (made when there is none)."""
        found = self._get(object_id.digest, object_id)
        found.id = object_id  # it may have been met by its digest only
        return found

    def _get(self, digest: bytes, object_id: Any) -> CachedObject:
        found = self._objects.get(digest)
        if found is not None:
            self._objects.move_to_end(digest)
            return found
        if len(self._objects) >= OBJECTS_IN_MEMORY or self._loaded >= COPIES_IN_MEMORY:
            self._forget_some()
        found = self._objects[digest] = CachedObject(object_id)
        return found

    def _remembers(self, obj: CachedObject) -> bool:
        """Whether it is kept in memory, and not only for a look."""
        return self._objects.get(obj.id.digest) is obj

    def _forget_some(self) -> None:
        for digest in list(islice(self._objects, OBJECTS_IN_MEMORY // 8)):
            obj = self._objects[digest]
            copies = [c for c in obj.copies.values() if c]
            if obj.in_use() or any(c.key in self._dirty or c.key in self._flushing for c in copies):
                self._objects.move_to_end(digest)  # looked at again after all others
                continue
            self.on_forget(obj)
            self._loaded -= len(copies)
            for copy in copies if len(copies) <= CHECKED_EXTENTS else ():
                if copy.bitmap and copy.verified == copy.bitmap:
                    self._checked.add(copy.key)
            obj.close_files()
            del self._objects[digest]

    def copy(self, obj: CachedObject, tier: int, extent: int) -> Copy | None:
        """What the tier holds of the extent, loaded on first use."""
        try:
            return obj.copies[tier, extent]
        except KeyError:
            pass
        key = (tier, obj.id.digest, extent)
        copy = None
        if key not in self._removed and key not in self._flushing:
            copy = self._index.load(key)
            if copy is not None:
                obj.pinned |= copy.pinned
                if self._trust or key in self._checked:
                    copy.verified = copy.bitmap
        if self._remembers(obj):
            self._loaded += copy is not None
            self._checked.discard(key)  # its bookkeeping is the one to say so now
        obj.copies[tier, extent] = copy
        return copy

    def copies(self, obj: CachedObject, tier: int) -> list[Copy]:
        """All copies of the version on a tier."""
        extents = {0, *(e for t, e in obj.copies if t == tier)}
        if obj.id.size > BLOCKS_PER_EXTENT * self._block_size:  # most are not, and need no search
            extents.update(self._index.extents_of(tier, obj.id.digest))
        return [c for e in sorted(extents) if (c := self.copy(obj, tier, e)) is not None]

    def find(self, obj: CachedObject, block: int) -> Copy | None:
        """The fastest copy that holds the block, verified ones first."""
        extent, bit = block // BLOCKS_PER_EXTENT, 1 << (block % BLOCKS_PER_EXTENT)
        held = None
        for tier in self._tiers:
            if tier.disk.down:
                continue
            copy = self.copy(obj, tier.number, extent)
            if copy is not None and copy.bitmap & bit:
                if copy.verified & bit:
                    return copy
                held = held or copy
        return held

    def ranges(self, copy: Copy, bits: int) -> Iterator[tuple[int, int]]:
        """(offset, length) of each block in `bits`."""
        while bits:
            block = copy.extent * BLOCKS_PER_EXTENT + (bits & -bits).bit_length() - 1
            bits &= bits - 1
            yield block * self._block_size, block_length(block, copy.object_size, self._block_size)

    def by_digest(self, digest: bytes) -> CachedObject:
        """The version of which nothing else is known."""
        return self._get(digest, Unnamed(digest))

    def look(self, object_id: ObjectId) -> CachedObject:
        """The bookkeeping for a look at it, which leaves no trace: neither is it kept, nor is it younger. Change nothing."""
        found = self._objects.get(object_id.digest) or CachedObject(object_id)
        found.id = object_id
        return found

    def idle(self, digest: bytes) -> CachedObject | None:
        """The same for a version of which nothing else is known; None while it is in use."""
        obj = self._objects.get(digest)
        if obj is None:
            return CachedObject(Unnamed(digest))  # type: ignore[arg-type]
        return None if obj.in_use() else obj

    def has_copies(self, obj: CachedObject, tier: int) -> bool:
        """Whether any block of the version is, or is coming, on a tier."""
        if any(copy for (number, _), copy in obj.copies.items() if number == tier and copy):
            return True
        keys = ((tier, obj.id.digest, e) for e in self._index.extents_of(tier, obj.id.digest))
        return any(
            key not in self._removed and key not in self._flushing and (tier, key[2]) not in obj.copies
            for key in keys
        )

    def listed(self, tier: int, after: bytes) -> tuple[list[bytes], bytes]:
        """The next digests that the index has rows of on a tier, and where to go on; none at the end."""
        return self._index.digests(tier, after, 1000)

    # -- changes -----------------------------------------------------------------------------------

    def create(self, obj: CachedObject, tier: int, extent: int, object_size: int, dataset: int) -> Copy:
        """The copy to write into, made when there is none."""
        copy = self.copy(obj, tier, extent)
        if copy is None:
            copy = Copy(tier, obj.id.digest, extent, object_size, dataset=dataset, pinned=obj.pinned)
            if copy.key in self._removed:
                # Its old row is still there, and speaks of blocks that are gone.
                copy.stored_clock = self._removed.pop(copy.key)
                self._dirty[copy.key] = copy
            obj.copies[tier, extent] = copy
            self._loaded += self._remembers(obj)
        return copy

    def touch(self, copy: Copy) -> None:
        """Used now, and changed: the next flush writes it."""
        copy.clock = copy.used = self._clock = self._clock + 1
        key = copy.key
        self._ahead.pop(key, None)
        self.borrowed.used(key)
        self._dirty.pop(key, None)
        self._dirty[key] = copy  # in the order of the clock

    def touch_if_old(self, copy: Copy) -> bool:
        """Used now. Not again for each of the reads that go on in a copy: nothing much was used since the last one."""
        if (copy.used > self._recent and self._clock - copy.used < SAME_USE) or not copy.bitmap:
            return False
        self.touch(copy)
        return True

    def use(self, obj: CachedObject, copy: Copy, *, hit: bool, asker: str = "") -> None:
        """Tell the policy of a use, after `touch`, by this node's readers or for an `asker`. What other nodes keep is no
        part of the datasets kept here: each epoch brings other parts of it."""
        copy.dataset = self.datasets(obj.id)
        unit = unit_hash(copy.digest, copy.extent)
        if copy.key in self.borrowed:
            self.epochs.comes(copy.dataset, unit)
            return
        self.epochs.used(copy.dataset, unit, copy.clock, self._extent_bytes(copy), hit=hit, asker=asker)
        self._look_again()
        if self.epochs.spent(copy.dataset, unit):
            self._spent.add(copy.key)

    def came_ahead(self, copy: Copy) -> None:
        """Blocks have come that nobody has asked for yet."""
        self.touch(copy)
        copy.used = 0
        self._wait(copy, self._now() + AHEAD_S)

    def _wait(self, copy: Copy, until: float) -> None:
        self._ahead[copy.key] = Waiting(until, copy.clock, copy.dataset)
        if len(self._ahead) > AHEAD_COPIES:
            self._give_up(next(iter(self._ahead)))

    def left_behind(self, obj: CachedObject) -> None:
        """Its readers have gone: what was fetched ahead of them waits for nobody."""
        for copy in obj.copies.values() if self._ahead else ():
            if copy is not None and copy.key in self._ahead:
                self._give_up(copy.key)

    def _give_up(self, key: CopyKey) -> None:
        """It may go like anything else."""
        waited = self._ahead.pop(key)
        self._spare[key[0]].add(key, waited.clock, waited.dataset)

    def own(self, copy: Copy) -> None:
        """It is kept from now on, whatever it was."""
        if self.borrowed.discard(copy.key):
            self._spare[copy.tier].add(copy.key, copy.clock, copy.dataset)

    def _extent_bytes(self, copy: Copy) -> int:
        extent_bytes = BLOCKS_PER_EXTENT * self._block_size
        return min(extent_bytes, copy.object_size - copy.extent * extent_bytes)

    def moved(self, source: Copy, target: Copy) -> None:
        """The target is as old as what it was copied from."""
        if source.clock > target.clock:
            target.clock, target.used = source.clock, source.used
        if source.key in self._ahead and target.key not in self._ahead:
            self._wait(target, self._ahead[source.key].until)
        self._spent.moved(source.key, target.key)
        self.changed(target)

    def changed(self, copy: Copy) -> None:
        """Its blocks changed, its age did not."""
        self._dirty.setdefault(copy.key, copy)

    def remove(self, obj: CachedObject, copy: Copy) -> None:
        if obj.copies.pop((copy.tier, copy.extent), None) is not None:
            self._loaded -= self._remembers(obj)
        self._dirty.pop(copy.key, None)
        self._ahead.pop(copy.key, None)
        self.borrowed.discard(copy.key)
        self._spent.discard(copy.key)
        self._removed[copy.key] = copy.stored_clock

    # -- what may go -------------------------------------------------------------------------------

    def victim(
        self, tier: int, *, spare: bool = False, older_than: int | None = None, moving: bool = False
    ) -> tuple[CachedObject, Copy] | None:
        """What should go next from a tier, and nobody is using it, nor anything that would have to go with it: what other
        nodes keep, what nobody will miss, else (unless only `spare` copies are asked for) the least recently used. It stays
        the next until it has gone. `moving`: to another tier, so it may be pinned, and is not borrowed."""
        self._look_again()
        found = None if moving else self.borrowed_victim(tier, spare=True)
        if found is None:
            found = self._first(self._spare[tier], tier, True, older_than, moving)
        if found is None and not spare:
            found = None if moving else self.borrowed_victim(tier, spare=False)
            found = found or self._first(self._all[tier], tier, False, older_than, moving, LARGE_PASSED)
            if found is None:
                self._all[tier].restart()
                found = self._first(self._all[tier], tier, False, older_than, moving)
        return found

    def borrowed_victim(self, tier: int, *, spare: bool) -> tuple[CachedObject, Copy] | None:
        """The same among what other nodes keep. `spare` ones do not wait for their first reader."""
        for key in self.borrowed.oldest(tier):
            obj = self.by_digest(key[1])
            copy = self.copy(obj, key[0], key[2])
            if copy is None:
                self.borrowed.discard(key)
            elif not (spare and key in self._ahead) and self._can_go(obj, copy, moving=False):
                whole = self.copies(obj, tier) if obj.is_sealed(self._tier[tier]) else ()
                if all(other.key in self.borrowed for other in whole):
                    return obj, copy
        return None

    def _first(
        self, walk: Walk, tier: int, keep: bool, older_than: int | None, moving: bool, passing: int = 0
    ) -> tuple[CachedObject, Copy] | None:
        def judge(key: CopyKey, clock: int) -> Verdict:
            nonlocal passing
            if key in self._removed or key in self._flushing:
                return Verdict.GONE
            obj = self.by_digest(key[1])
            copy = self.copy(obj, key[0], key[2])
            if copy is None:
                self._removed[key] = clock  # an order row without a copy: its row was damaged
                return Verdict.GONE
            if copy.clock != clock:
                return Verdict.GONE
            if passing and len(obj.on(self._tier[tier])) > 1 and obj.is_sealed(self._tier[tier]):
                passing -= 1
                return Verdict.HELD
            return Verdict.GOES if self._can_go(obj, copy, moving) else Verdict.HELD

        # Rows first: whatever was touched since the last flush is younger than every row that is up to date.
        key = walk.first(judge, older_than)
        if key is not None:
            obj = self.by_digest(key[1])
            return obj, obj.copies[key[0], key[2]]  # type: ignore[return-value]
        spent = (self.copy(self.by_digest(d), t, e) for t, d, e in self._spent.oldest(tier) if keep)
        changed = chain(spent, self._flushing.values(), self._dirty.values())
        young = (c for c in changed if isinstance(c, Copy))
        young = (c for c in young if c.tier == tier and c.bitmap and c.key not in self.borrowed)
        for copy in islice(young, KEPT_AT_ONCE):
            too_young = older_than is not None and copy.clock >= older_than
            if not too_young and not (keep and self._kept(copy.key, copy.clock, copy.dataset)):
                obj = self.by_digest(copy.digest)
                if self._can_go(obj, copy, moving):
                    return obj, copy
        return None

    def _kept(self, key: CopyKey, clock: int, dataset: int) -> bool:
        return key in self._ahead or (self.epochs.protects(dataset, clock) and key not in self._spent)

    def _passed_over(self, key: CopyKey, clock: int, dataset: int) -> bool:
        return key in self.borrowed or self._kept(key, clock, dataset)

    def kept(self, copy: Copy) -> bool:
        """Whether somebody is still to use it."""
        return copy.pinned or self._kept(copy.key, copy.clock, copy.dataset)

    def _can_go(self, obj: CachedObject, copy: Copy, moving: bool) -> bool:
        if copy.pins or (copy.pinned and not moving):
            return False
        tier = self._tier[copy.tier]
        return not (obj.is_sealed(tier) and any(other.pins for other in obj.on(tier)))

    def _look_again(self) -> None:
        """Is something that was kept so no longer?"""
        if self._seen_version == self.epochs.version:
            return
        self._seen_version = self.epochs.version
        self._spent.clear()
        for walk in self._spare.values():
            walk.restart()

    # -- the index ---------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Write what changed to the index. Durable when this returns, or kept for next time and `index_error` says why."""
        async with self._flush_lock:
            self._recent = self._clock
            while self._ahead and next(iter(self._ahead.values())).until < self._now():
                self._give_up(next(iter(self._ahead)))
            if not self._dirty and not self._removed and not self._notes.closing:
                return
            saving, self._dirty = self._dirty, {}
            removing, self._removed = self._removed, {}
            saved: list[Saved] = []
            gone = list(removing.items())
            before = {}
            for key, copy in saving.items():
                before[key] = copy.stored_clock
                if copy.bitmap:
                    # What is pinned on the last tier goes nowhere: no search shall meet it.
                    clock = None if copy.pinned and copy.tier == self._tiers[-1].number else copy.clock
                    row = pack_copy(copy, ordered=clock is not None)
                    saved.append((key, row, copy.dataset, clock, copy.stored_clock))
                    copy.stored_clock = clock
                    walk = self._spare[copy.tier]
                    if clock is not None and clock <= walk.passed:
                        walk.add(key, clock, copy.dataset)
                else:  # all its blocks are forgotten, but somebody has it pinned
                    gone.append((key, copy.stored_clock))
                    copy.stored_clock = None
            self._flushing = {**saving, **removing}
            totals = {
                t.number: (max(0, t.used_bytes - t.unlisted_bytes), max(0, t.blocks), max(0, t.pinned_bytes))
                for t in self._tiers
            }
            notes = self._notes.take(self._clock)
            try:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._index.write, saved, gone, totals, notes)
                if self.index_error:
                    log.warning("the cache index can be written again")
                self.index_error = ""
            except (NoRoom, CacheUnusable) as exc:
                if not self.index_error:
                    log.warning("cannot write the cache index, a restart will be colder: %s", exc)
                self.index_error = str(exc)
                self._take_back(saving, removing, before)
                self._seen_version = -1  # look again
            finally:
                self._flushing = {}
                for number, walk in self._spare.items():
                    walk.flushed()
                    self._all[number].restart()

    def _take_back(
        self,
        saving: dict[CopyKey, Copy],
        removing: dict[CopyKey, int | None],
        before: dict[CopyKey, int | None],
    ) -> None:
        """A flush failed: everything it was to write is still to be written, except what has changed since."""
        for key, copy in saving.items():
            copy.stored_clock = before[key]
            if key in self._removed:
                self._removed[key] = copy.stored_clock
            else:
                self._dirty.setdefault(key, copy)
        for key, clock in removing.items():
            newer = self._dirty.get(key)
            if newer is not None:
                newer.stored_clock = clock
            else:
                self._removed.setdefault(key, clock)

    def forget_tier(self, tier: int) -> None:
        """A tier is given up: whatever it held is no longer anywhere."""
        for obj in self._objects.values():
            for key in [key for key in obj.copies if key[0] == tier]:
                self._loaded -= obj.copies.pop(key) is not None
            fd = obj.fds.pop(tier, None)
            if fd is not None:
                os.close(fd)
        self._dirty = {key: copy for key, copy in self._dirty.items() if key[0] != tier}
        self._removed = {key: clock for key, clock in self._removed.items() if key[0] != tier}
        self.borrowed.forget_tier(tier)
        self._spent.forget_tier(tier)
        self._checked.clear()
        try:
            self._index.forget_tier(tier, b"")
        except (NoRoom, CacheUnusable) as exc:
            # A full disk must not keep a stop from going on; the index is not closed cleanly.
            self.index_error = str(exc)

    def abandon(self) -> None:
        """Close the index as it is: the next start looks at all of it."""
        self._index.close(whole=False)

    async def aclose(self, *, trusted: bool) -> None:
        """Flush, then close the index: cleanly if everything in it was written. `trusted`: its files are on disk, too."""
        with trio.CancelScope(shield=True):
            failed = self.index_error
            self._notes.closing = True
            await self.flush()
            for obj in self._objects.values():
                obj.close_files()
                for number in obj.leaving:  # whoever has it goes on reading, but no row speaks of it
                    self._tier[number].unlink(obj.id.digest)
            whole = not (failed or self.index_error or self.unfinished)
            await trio.to_thread.run_sync(self._index.close, whole, whole and trusted)

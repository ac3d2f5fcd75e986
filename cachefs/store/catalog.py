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
from typing import TYPE_CHECKING, Any

import trio

from cachefs.errors import CacheUnusable, NoRoom
from cachefs.names import BLOCKS_PER_EXTENT, ObjectId, block_length
from cachefs.store.index import Copy, CopyKey, Index, pack_copy, pack_key
from cachefs.store.tier import Tier

if TYPE_CHECKING:
    from cachefs.store.backing import Backing

log = logging.getLogger(__name__)

OBJECTS_IN_MEMORY = 8192
"""Versions whose bookkeeping is kept in memory after use, about 1 KiB each. Guessed."""

COPIES_IN_MEMORY = 32_768
"""Copies that this may come to before versions are forgotten early, about 1.5 KiB each (measured). Guessed."""


class CachedObject:
    """One version that is open or was lately used. `copies` has the loaded ones by (tier, extent), None where there is
    none; `fds` its open files by tier; `sealed` the tiers where its file is known to have been lent; `leaving` those of them
    where all its blocks are forgotten and the file waits for its last pin; `backing` what the kernel has of it. Two slots
    belong to the fetch room: `flights` (block → the transfer that is bringing it) and `readahead` (what its readers are
    seen to do)."""

    __slots__ = ("backing", "copies", "fds", "flights", "id", "leaving", "readahead", "refs", "sealed")

    def __init__(self, object_id: ObjectId) -> None:
        self.id = object_id
        self.copies: dict[tuple[int, int], Copy | None] = {}
        self.fds: dict[int, int] = {}
        self.sealed: set[int] = set()
        self.leaving: set[int] = set()
        self.backing: Backing | None = None
        self.flights: dict[int, Any] = {}
        self.readahead: Any = None
        self.refs = 0

    def in_use(self) -> bool:
        return bool(self.refs or self.flights or any(c and c.pins for c in self.copies.values()))

    def is_sealed(self, tier: Tier) -> bool:
        """Whether its file on the tier may never change any more. The file says so itself; here it is remembered."""
        if tier.number not in self.sealed and tier.sealed(self.id.digest):
            self.sealed.add(tier.number)
        return tier.number in self.sealed

    def on(self, tier: Tier) -> list[Copy]:
        """Its loaded copies on the tier."""
        return [copy for (number, _), copy in self.copies.items() if number == tier.number and copy]

    def file(self, tier: Tier) -> int:
        """A descriptor of its file on the tier, kept open while the object is in use. OSError when it is not there."""
        fd = self.fds.get(tier.number)
        if fd is None:
            fd = self.fds[tier.number] = tier.open_file(self.id.digest, create=False)
        return fd

    def close_files(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class _Unnamed:
    """Stands in for the ObjectId of a version only met by its digest (while evicting): the index keeps no keys."""

    __slots__ = ("digest", "key")

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.key = f"version {digest.hex()}"


class Catalog:
    """`trust` takes the index's word for the bytes of its blocks; otherwise each is checked before its first use."""

    def __init__(self, index: Index, tiers: list[Tier], block_size: int, *, trust: bool) -> None:
        self._index = index
        self._tiers = tiers
        self._tier = {tier.number: tier for tier in tiers}
        self._block_size = block_size
        self._trust = trust
        self._objects: OrderedDict[bytes, CachedObject] = OrderedDict()
        self._dirty: dict[CopyKey, Copy] = {}
        self._removed: dict[CopyKey, int | None] = {}
        self._flushing: dict[CopyKey, Any] = {}
        self._victims: dict[int, list[tuple[bytes, CopyKey, int]]] = {}
        self._cursors: dict[int, bytes] = {}
        self._loaded = 0
        self._clock = index.newest_clock() + 1
        self._recent = self._clock
        self._flush_lock = trio.Lock()
        self.index_error = ""
        self.on_forget: Callable[[CachedObject], None] = lambda obj: None
        for tier in tiers:
            tier.used_bytes, tier.blocks = index.totals(tier.number)

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

    def _forget_some(self) -> None:
        for digest in list(islice(self._objects, OBJECTS_IN_MEMORY // 8)):
            obj = self._objects[digest]
            copies = [c for c in obj.copies.values() if c]
            if obj.in_use() or any(c.key in self._dirty or c.key in self._flushing for c in copies):
                self._objects.move_to_end(digest)  # looked at again after all others
                continue
            self.on_forget(obj)
            self._loaded -= len(copies)
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
                self._loaded += 1
                if self._trust:
                    copy.verified = copy.bitmap
        obj.copies[tier, extent] = copy
        return copy

    def copies(self, obj: CachedObject, tier: int) -> list[Copy]:
        """All copies of the version on a tier."""
        extents = set(self._index.extents_of(tier, obj.id.digest)) | {e for t, e in obj.copies if t == tier}
        return [c for e in sorted(extents) if (c := self.copy(obj, tier, e)) is not None]

    def find(self, obj: CachedObject, block: int) -> Copy | None:
        """The fastest copy that holds the block, verified ones first."""
        extent, bit = block // BLOCKS_PER_EXTENT, 1 << (block % BLOCKS_PER_EXTENT)
        held = None
        for tier in self._tiers:
            copy = self.copy(obj, tier.number, extent)
            if copy is not None and copy.bitmap & bit:
                if copy.verified & bit:
                    return copy
                held = held or copy
        return held

    def ranges(self, copy: Copy, bits: int) -> Iterator[tuple[int, int]]:
        """(offset, length) of each block in `bits`."""
        for position in range(BLOCKS_PER_EXTENT):
            if bits >> position & 1:
                block = copy.extent * BLOCKS_PER_EXTENT + position
                yield block * self._block_size, block_length(block, copy.object_size, self._block_size)

    def by_digest(self, digest: bytes) -> CachedObject:
        """The version of which nothing else is known."""
        return self._get(digest, _Unnamed(digest))

    def idle(self, digest: bytes) -> CachedObject | None:
        """A look at a version by its digest, without remembering that it was looked at; None while it is in use."""
        obj = self._objects.get(digest)
        if obj is None:
            return CachedObject(_Unnamed(digest))  # type: ignore[arg-type]
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

    def create(self, obj: CachedObject, tier: int, extent: int, object_size: int) -> Copy:
        """The copy to write into, made when there is none."""
        copy = self.copy(obj, tier, extent)
        if copy is None:
            copy = Copy(tier, obj.id.digest, extent, object_size)
            if copy.key in self._removed:
                # Its old row is still there, and speaks of blocks that are gone.
                copy.stored_clock = self._removed.pop(copy.key)
                self._dirty[copy.key] = copy
            obj.copies[tier, extent] = copy
            self._loaded += 1
        return copy

    def touch(self, copy: Copy) -> None:
        """Used now, and changed: the next flush writes it."""
        self._clock += 1
        copy.clock = self._clock
        self._dirty.pop(copy.key, None)
        self._dirty[copy.key] = copy  # in the order of the clock

    def touch_if_old(self, copy: Copy) -> bool:
        """Used now. Once per flush is enough to keep the order: a row a second for each copy in use."""
        if copy.clock > self._recent or not copy.bitmap:
            return False
        self.touch(copy)
        return True

    def changed(self, copy: Copy) -> None:
        """Its blocks changed, its age did not."""
        self._dirty.setdefault(copy.key, copy)

    def remove(self, obj: CachedObject, copy: Copy) -> None:
        obj.copies.pop((copy.tier, copy.extent), None)
        self._loaded -= 1
        self._dirty.pop(copy.key, None)
        self._removed[copy.key] = copy.stored_clock

    def oldest(self, tier: int) -> tuple[CachedObject, Copy] | None:
        """The least recently used copy on a tier that nobody is using, nor anything that would have to go with it."""
        # Rows first: whatever was touched since the last flush is younger than every row that is up to date.
        while True:
            queue = self._victims.get(tier)
            if not queue:
                queue = self._index.oldest(tier, self._cursors.get(tier, b""), 256)
                if not queue:
                    break
                queue.reverse()
                self._victims[tier] = queue
            self._cursors[tier], key, clock = queue.pop()
            if key in self._removed or key in self._flushing:
                continue
            obj = self.by_digest(key[1])
            copy = self.copy(obj, key[0], key[2])
            if copy is None:
                self._removed[key] = clock  # an order row without a copy: its row was damaged
            elif copy.clock == clock and self._can_go(obj, copy):
                return obj, copy
        for young in chain(self._flushing.values(), self._dirty.values()):
            if isinstance(young, Copy) and young.tier == tier and young.bitmap:
                obj = self._objects[young.digest]
                if self._can_go(obj, young):
                    return obj, young
        return None

    def _can_go(self, obj: CachedObject, copy: Copy) -> bool:
        if copy.pins:
            return False
        tier = self._tier[copy.tier]
        return not (obj.is_sealed(tier) and any(other.pins for other in obj.on(tier)))

    # -- the index ---------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Write what changed to the index. Durable when this returns, or kept for next time and `index_error` says why."""
        async with self._flush_lock:
            self._recent = self._clock
            if not self._dirty and not self._removed:
                return
            saving, self._dirty = self._dirty, {}
            removing, self._removed = self._removed, {}
            saved, gone = [], list(removing.items())
            before = {}
            for key, copy in saving.items():
                before[key] = copy.stored_clock
                if copy.bitmap:
                    saved.append((pack_key(key), pack_copy(copy), copy.clock, copy.stored_clock))
                    copy.stored_clock = copy.clock
                else:  # all its blocks are forgotten, but somebody has it pinned
                    gone.append((key, copy.stored_clock))
                    copy.stored_clock = None
            self._flushing = {**saving, **removing}
            totals = {
                t.number: (max(0, t.used_bytes - t.unlisted_bytes), max(0, t.blocks)) for t in self._tiers
            }
            try:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._index.write, saved, gone, totals)
                if self.index_error:
                    log.warning("the cache index can be written again")
                self.index_error = ""
            except (NoRoom, CacheUnusable) as exc:
                if not self.index_error:
                    log.warning("cannot write the cache index, a restart will be colder: %s", exc)
                self.index_error = str(exc)
                self._take_back(saving, removing, before)
            finally:
                self._flushing = {}
                self._victims.clear()
                self._cursors.clear()

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
                del obj.copies[key]
            fd = obj.fds.pop(tier, None)
            if fd is not None:
                os.close(fd)
        self._dirty = {key: copy for key, copy in self._dirty.items() if key[0] != tier}
        self._removed = {key: clock for key, clock in self._removed.items() if key[0] != tier}
        try:
            self._index.forget_tier(tier, b"")
        except (NoRoom, CacheUnusable) as exc:
            self.index_error = str(
                exc
            )  # a full disk must not keep a stop from going on; the index is not closed cleanly

    async def aclose(self, *, trusted: bool) -> None:
        """Flush, then close the index: cleanly if everything in it was written. `trusted`: its files are on disk, too."""
        with trio.CancelScope(shield=True):
            failed = self.index_error
            await self.flush()
            for obj in self._objects.values():
                obj.close_files()
                for number in obj.leaving:  # whoever has it goes on reading, but no row speaks of it
                    self._tier[number].unlink(obj.id.digest)
            whole = not (failed or self.index_error)
            await trio.to_thread.run_sync(self._index.close, whole, whole and trusted)

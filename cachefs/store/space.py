"""Space accounting: what a tier's bytes are used for, and evicting blocks for those that come.

The life of a block's bytes: *reserved* (one writer: a fill or a move), *landed* (the block exists, a row will say so),
*forgotten* (no search finds it any more, its bytes are still in the file), *freed* (with the last pin of its copy). Bytes
are freed in no other way, so a caller that has a copy pinned may read the bytes it had.

A file goes with its last block; blocks of a file that stays are punched out. A file that was opened in passthrough is
immutable: a process may have it mapped, even after a restart. It is never written or punched: it goes whole, as soon as one
of its blocks has to.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import trio

from cachefs.base.errors import NoRoom
from cachefs.base.metrics import Metrics
from cachefs.base.names import BLOCKS_PER_EXTENT, block_count, extent_bits
from cachefs.base.units import Size, format_bytes
from cachefs.store.catalog import CachedObject, Catalog
from cachefs.store.eviction import ANY, NOTHING, Classes, Eviction
from cachefs.store.index import Copy
from cachefs.store.tier import Tier, allocated

log = logging.getLogger(__name__)

READERS_SHARE = 128
"""This part of a full tier is left free by prefetch, and by remote-owned blocks that it fetches. Guessed: a few files or
blocks of a small cache."""

VICTIMS_AT_ONCE = 512
"""Measured: dropping a one-block file takes 0.15 ms, so this is under 0.1 s."""

HEAP_BYTES = 32 << 20
"""What the heap holds: thirty readers' current blocks. Guessed."""

Range = tuple[int, int]
"""(offset, length) in a file, in bytes"""


class Heap:
    """A few blocks in plain memory, for readers that no tier could serve; the least recently added is dropped first. Without
    it, a reader of 128 KiB pieces would fetch each 1 MiB block eight times once the disk is full."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
        self._bytes = 0

    def get(self, digest: bytes, block: int) -> bytes | None:
        return self._blocks.get((digest, block))

    def drop(self, digest: bytes) -> int:
        """Forget a version. Returns how many bytes that were."""
        keys = [key for key in self._blocks if key[0] == digest]
        freed = sum(len(self._blocks.pop(key)) for key in keys)
        self._bytes -= freed
        return freed

    def put(self, digest: bytes, block: int, data: bytes) -> None:
        self._bytes += len(data) - len(self._blocks.pop((digest, block), b""))
        self._blocks[digest, block] = data
        while self._bytes > HEAP_BYTES and len(self._blocks) > 1:
            _, old = self._blocks.popitem(last=False)
            self._bytes -= len(old)


class Space:
    """Accounting for all tiers: the only writer of copies' block states, of pins, and of the tiers' counters.

    `tiers` are from fastest to slowest. The store's other parts find the catalog, the order of eviction and the heap
    here."""

    def __init__(
        self, catalog: Catalog, eviction: Eviction, tiers: list[Tier], block_size: int, metrics: Metrics
    ) -> None:
        self.catalog = catalog
        self.eviction = eviction
        self.tiers = tiers
        self.block_size = block_size
        self.metrics = metrics
        self.heap = Heap()
        self._tiers = {tier.number: tier for tier in tiers}

    def evict_for(
        self, tier: Tier, need: int, classes: Classes, *, older_than: int | None = None, here: int = 0
    ) -> bool:
        """Evict copies of these classes, last used before the clock `older_than`, until `need` bytes and a file for them
        fit. True if they do. It gives up after `VICTIMS_AT_ONCE`: the next call goes on, and no reader waits for the
        eviction of thousands of files. `here` of the bytes lie on the tier's disk already."""
        for _ in range(VICTIMS_AT_ONCE):
            limit = tier.limit_bytes(here)
            fits = tier.counted_bytes() + need <= limit
            if fits and (tier.takes_files or not need):
                return True
            if classes == NOTHING or need > limit:
                return False
            if not fits and tier.used_bytes + need <= limit:
                return False  # what it takes is on its way out
            victim = self.eviction.victim(tier.number, classes, older_than=older_than)
            if victim is None:
                return False
            obj, copy = victim
            if fits and not any(c.pins or c.pinned for c in self.catalog.copies(obj, tier.number)):
                # Only an inode is missing, and it is free when the whole file goes.
                self.metrics.evicted_blocks += self.drop_file(obj, tier)
            else:
                self.metrics.evicted_blocks += self.drop(obj, copy, copy.bitmap)
        return False

    async def fit(self, tier: Tier, need: int, *, here: int = 0) -> bool:
        """`evict_for` anything, some victims at a time: readers go on meanwhile."""
        while True:
            used = tier.used_bytes
            if self.evict_for(tier, need, ANY, here=here):
                return True
            if tier.used_bytes >= used:
                return False
            await trio.lowlevel.checkpoint()

    def left_to_readers(self, tier: Tier, need: int) -> int:
        """Bytes that stay free beside what is prefetched, in whole `need`s: prefetch takes the place of the lowest
        classes, and then a reader would find nothing to evict but protected copies."""
        need = min(need, self.block_size)
        return tier.limit_bytes() // READERS_SHARE // need * need if need else 0

    # -- users of a copy's bytes -------------------------------------------------------------------

    def pin(self, *copies: Copy) -> None:
        """One more user of the copies: their bytes stay in the file until `unpin`."""
        for copy in copies:
            copy.pins += 1

    def unpin(self, obj: CachedObject, *copies: Copy) -> None:
        """One user of the copies (of one tier) less."""
        for copy in copies:
            copy.pins -= 1
        if obj.leaving and copies and copies[0].tier in obj.leaving:
            self._free_file(obj, self._tiers[copies[0].tier])
            return
        for copy in copies:
            if not copy.pins and (copy.forgotten or not copy.bitmap):
                if obj.is_immutable(self._tiers[copy.tier]):
                    self.drop_file(obj, self._tiers[copy.tier])
                    return
                self._free(obj, copy)

    @contextmanager
    def pinned(self, obj: CachedObject, *copies: Copy) -> Iterator[None]:
        """`copies` are of one tier."""
        self.pin(*copies)
        try:
            yield
        finally:
            self.unpin(obj, *copies)

    def set_pinned(self, copy: Copy, pinned: bool) -> None:
        """It stays until a person unpins it; or may go again, like a copy just used."""
        if copy.pinned != pinned:
            copy.pinned = pinned
            self.own(copy)
            held = self.bytes(copy, copy.bitmap)
            self._tiers[copy.tier].pinned_bytes += held if pinned else -held
            self.eviction.touch(copy)

    def own(self, copy: Copy) -> None:
        """This node keeps it from now on."""
        if self.eviction.own(copy):
            held = self.bytes(copy, copy.bitmap | copy.arriving | copy.forgotten)
            self._tiers[copy.tier].remote_owned_bytes -= held

    def remote_owned(self, copy: Copy) -> None:
        """Another node owns a copy that is about to get its first blocks."""
        if not (copy.bitmap or copy.arriving or copy.pinned):
            self.eviction.remote_owned.add(copy.key)

    # -- the life of a block's bytes: reserve, land, forget, free ----------------------------------

    def reserve(self, copy: Copy, bits: int) -> None:
        """Blocks are about to be written into a (pinned) copy, by one writer. Bytes they left behind are theirs again."""
        copy.arriving |= bits
        new = self.bytes(copy, bits & ~copy.forgotten)
        self._tiers[copy.tier].reserve(new)
        if copy.key in self.eviction.remote_owned:
            self._tiers[copy.tier].remote_owned_bytes += new
        copy.forgotten &= ~bits

    def land(self, copy: Copy, bits: int, verified: int) -> None:
        """Reserved blocks are whole: they exist from here on. How old they are is the caller's to say."""
        copy.arriving &= ~bits
        copy.bitmap |= bits
        copy.verified |= verified & bits
        tier = self._tiers[copy.tier]
        tier.landed(self.bytes(copy, bits))
        tier.pinned_bytes += self.bytes(copy, bits) if copy.pinned else 0
        tier.blocks += bits.bit_count()
        self.catalog.changed(copy)

    def abandon(self, copy: Copy, bits: int) -> None:
        """Reserved blocks did not come."""
        copy.arriving &= ~bits
        copy.forgotten |= bits

    def drop(self, obj: CachedObject, copy: Copy, bits: int, why: str = "evicted") -> int:
        """Remove blocks from a copy, and give their bytes back as soon as no caller uses the copy; of an immutable file, all
        that it holds. Returns how many blocks went. `why` is one of the ledger's reasons."""
        if not obj.has(copy):
            return 0  # a reader found it damaged, as another did before, and a new copy may be in its place
        tier = self._tiers[copy.tier]
        if obj.is_immutable(tier):
            return self.drop_file(obj, tier, why)
        count = self._forget(copy, bits, why)
        if not copy.pins:
            self._free(obj, copy)
        return count

    def drop_file(self, obj: CachedObject, tier: Tier, why: str = "evicted") -> int:
        """Remove everything that a file holds, which is immutable or not in use; it is unlinked with its last pin."""
        backing = obj.backing
        if backing is not None and backing.tier is tier and not backing.users:
            backing.retire()
        obj.leaving.add(tier.number)
        count = sum(self._forget(copy, copy.bitmap, why) for copy in self.catalog.copies(obj, tier.number))
        self._free_file(obj, tier)
        return count

    def goes_with(self, obj: CachedObject, copy: Copy) -> list[Copy]:
        """The copies that are dropped when this one is."""
        tier = self._tiers[copy.tier]
        return self.catalog.copies(obj, tier.number) if obj.is_immutable(tier) else [copy]

    def _forget(self, copy: Copy, bits: int, why: str) -> int:
        bits &= copy.bitmap
        if bits:
            self.metrics.ledger.misses.gone(copy.digest, copy.extent, why)
        tier = self._tiers[copy.tier]
        copy.bitmap &= ~bits
        copy.verified &= ~bits
        copy.forgotten |= bits
        tier.blocks -= bits.bit_count()
        tier.forgot(self.bytes(copy, bits))
        tier.pinned_bytes -= self.bytes(copy, bits) if copy.pinned else 0
        self.catalog.changed(copy)
        return bits.bit_count()

    def _free(self, obj: CachedObject, copy: Copy) -> None:
        tier = self._tiers[copy.tier]
        freed = self._freed(tier, copy)
        if not copy.bitmap:
            self._remove(obj, copy)
            if not self.catalog.has_copies(obj, tier.number):
                self.unlink(obj, tier, freed)
                return
        if freed:
            # All that is no block of ours: of a huge page with one block the kernel has made the other half, too.
            bits = extent_bits(block_count(copy.object_size, self.block_size), copy.extent) & ~copy.bitmap
            self.punch(obj, tier, list(self.catalog.ranges(copy, bits)), freed)

    def _freed(self, tier: Tier, copy: Copy) -> int:
        freed = self.bytes(copy, copy.forgotten)
        tier.freed(freed)
        tier.remote_owned_bytes -= freed if copy.key in self.eviction.remote_owned else 0
        copy.forgotten = 0
        return freed

    def _free_file(self, obj: CachedObject, tier: Tier) -> None:
        """Unlink an immutable file that is leaving, unless it is still in use."""
        copies = obj.on(tier)
        if any(copy.pins for copy in copies):
            return
        freed = 0
        for copy in copies:
            freed += self._freed(tier, copy)
            self._remove(obj, copy)
        self.unlink(obj, tier, freed)

    def _remove(self, obj: CachedObject, copy: Copy) -> None:
        self.catalog.remove(obj, copy)
        self.eviction.removed(copy)

    def bytes(self, copy: Copy, bits: int) -> int:
        """What these blocks take on a disk."""
        return sum(allocated(length) for _, length in self.catalog.ranges(copy, bits)) if bits else 0

    # -- files -------------------------------------------------------------------------------------

    def unlink(self, obj: CachedObject, tier: Tier, freed: int = 0) -> None:
        """The version's file goes, with the `freed` bytes that it takes: at once from memory, soon from a disk."""
        obj.close_file(tier.number)
        tier.unlink(obj.id.digest, freed)
        obj.immutable.discard(tier.number)
        if tier.number in obj.leaving:
            # The heap has blocks that its immutable file could not take. A new one can, and is whole only with them.
            obj.leaving.discard(tier.number)
            self.heap.drop(obj.id.digest)

    def punch(self, obj: CachedObject, tier: Tier, ranges: list[Range], freed: int = 0) -> None:
        """Give ranges of a version's file back, at once to memory, soon to a disk."""
        runs: list[Range] = []
        for start, length in ranges:
            length = allocated(length)  # to the end of its page: a part of a page would only be zeroed
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((start, length))
        if not runs:
            return
        if tier.blocking:
            tier.dispose_of(obj.id.digest, runs, freed)
            return
        opened = obj.fds.get(tier.number)
        try:
            fd = opened if opened is not None else tier.open_file(obj.id.digest)
            try:
                for start, length in runs:
                    tier.punch(fd, start, length)
            finally:
                if opened is None:
                    os.close(fd)
        except OSError as exc:
            tier.failed(exc)

    def file_to_write(self, obj: CachedObject, tier: Tier) -> Callable[[], int] | None:
        """A function that opens the version's file, for a thread; None while an immutable one is on its way out. If it
        fails: `not_opened`."""
        if tier.number in obj.leaving:
            return None
        # What a vanished file held is forgotten before there is a new one: there it would read as zeros.
        known = tier.number in obj.fds or any(copy.bitmap for copy in self.catalog.copies(obj, tier.number))
        return partial(tier.open_to_fill, obj.id.digest, obj.id.size, known=known)

    def not_opened(self, obj: CachedObject, tier: Tier, exc: OSError) -> None:
        """A version's file could not be opened to be written: it has vanished, is immutable, or the tier fails."""
        if exc.errno == errno.ENOENT:
            self._vanished(obj, tier)
        elif exc.errno == errno.EROFS and tier.immutable(obj.id.digest):
            # A crash cost it some of its rows: it could only be completed by writing.
            self.drop_file(obj, tier)
        elif exc.errno != errno.ETIMEDOUT:
            self.failed(tier, exc)

    # -- damage ------------------------------------------------------------------------------------

    def failed(self, tier: Tier, exc: OSError) -> None:
        """An I/O error: it is counted, and the tier is watched."""
        self.metrics.tier_errors += 1
        tier.failed(exc)

    def _vanished(self, obj: CachedObject, tier: Tier) -> None:
        for copy in self.catalog.copies(obj, tier.number):
            if copy.bitmap:
                self.lost(obj, copy, OSError(errno.ENOENT, "its file vanished"))

    def lost(self, obj: CachedObject, copy: Copy, exc: OSError) -> None:
        """A tier failed to give what the index says it has: a miss."""
        self.failed(self._tiers[copy.tier], exc)
        self.drop(obj, copy, copy.bitmap, "damaged")

    def corrupt(self, obj: CachedObject, copy: Copy, bits: int) -> None:
        """Blocks are not what their checksums say: they are dropped, and fetched again."""
        bits &= copy.bitmap
        self.metrics.checksum_failures += bits.bit_count()
        for position in range(BLOCKS_PER_EXTENT):
            if bits >> position & 1:
                log.warning(
                    "block %d of %s in the %s tier fails its checksum: dropped",
                    copy.extent * BLOCKS_PER_EXTENT + position,
                    obj.id.key,
                    self._tiers[copy.tier].name,
                )
        if bits:
            self.drop(obj, copy, bits, "damaged")


class Pins:
    """`cachefs pin` and `cachefs evict`: versions that people keep, and versions that they drop, on all tiers. `budget` is
    what may be pinned, a share of the tiers' limits or bytes.

    A pin is a flag of each copy, in its row: it holds over restarts, follows the copy between tiers, and is given to copies
    that come later while the version is known. So pinning reserves nothing: the caller fetches first."""

    def __init__(self, space: Space) -> None:
        self._catalog = space.catalog
        self._space = space
        self._tiers = space.tiers
        self.budget = Size(percent=50.0)

    @property
    def bytes(self) -> int:
        return sum(tier.pinned_bytes for tier in self._tiers)

    @property
    def budget_bytes(self) -> int:
        """What may be pinned on this node now."""
        return self.budget.resolve(sum(tier.limit_bytes() for tier in self._tiers))

    def check(self, obj: CachedObject) -> None:
        """Raises `NoRoom` if pinning the whole version would exceed the budget."""
        copies = self._catalog.all_copies(obj)
        budget = self.budget_bytes
        held = sum(self._space.bytes(copy, copy.bitmap) for copy in copies if copy.pinned)
        if self.bytes - held + allocated(obj.id.size) > budget:
            raise NoRoom(
                f"{obj.id.key} cannot be pinned: {format_bytes(self.bytes)} of {format_bytes(budget)} are in use"
            )

    def pin(self, obj: CachedObject) -> None:
        """What is cached of the version, or will be while it is known, stays until `unpin`, over restarts. Raises `NoRoom`
        beyond the budget; then nothing has changed."""
        copies = self._catalog.all_copies(obj)
        loose = [copy for copy in copies if not copy.pinned]
        if obj.pinned and not loose:
            return
        self.check(obj)
        obj.pinned = True
        for copy in loose:
            self._space.set_pinned(copy, True)

    def unpin(self, obj: CachedObject) -> None:
        """It may be evicted again, like a version just used."""
        for copy in self._catalog.all_copies(obj):
            self._space.set_pinned(copy, False)
        obj.pinned = False  # only now, for looking at its rows sets it

    def evict(self, obj: CachedObject) -> int:
        """Drop what is not pinned. Bytes in use are counted, too, and go with their last user."""
        freed = 0
        for tier in self._tiers:
            copies = self._catalog.copies(obj, tier.number)
            if obj.is_immutable(tier) and any(copy.pinned for copy in copies):
                continue  # an immutable file goes whole or not at all
            loose = [copy for copy in copies if not copy.pinned]
            freed += sum(self._space.bytes(copy, copy.bitmap) for copy in loose)
            for copy in loose:
                self._space.drop(obj, copy, copy.bitmap)
        return freed

    def whole(self, obj: CachedObject) -> bool:
        """True if all its blocks lie on some tier."""
        for extent, bits in self._catalog.extents(obj):
            held = 0
            for copy in self._catalog.on_any_tier(obj, extent):
                held |= copy.bitmap
            if held != bits:
                return False
        return True

"""Space: accounting of the tiers' bytes, eviction of blocks to free bytes, and the two writers of blocks: a *cache write*
takes them from the origin or a peer, a *move* from the other tier.

The states of a block's bytes: *reserved* (one writer, a cache write or a move, may write them), *committed* (the block
exists, and the next flush writes its row), *forgotten* (no search finds it, its bytes are still in the file), *freed* (the
last pin of its copy is gone). Bytes are freed in no other way, so a caller with a pinned copy may read the bytes it had.

A file is unlinked with its last block; before, evicted blocks are punched out. An immutable file (`tier.IMMUTABLE`) is
never written or punched: when one of its blocks is evicted, the whole file is unlinked.

**Moves**: RAM spills extents to SSD when it fills up, and SSD extents that are used again are promoted to RAM. A promoted
copy stays on SSD, so that RAM can drop it without another copy. A copy keeps its age, so one order of eviction holds over
both tiers: no spilled copy displaces one that is evicted later.

**Cache writes**: `write` runs in a worker thread and changes only the cache write itself; everything that other callers
see changes in `CacheWrites.settle`, on the trio thread. Before a block is settled, only the readers that wait for this
transfer can read it. They may read bytes below `written`, which only grows.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import trio
import xxhash

from cachefs.base.errors import NoRoom
from cachefs.base.metrics import Metrics
from cachefs.base.names import BLOCKS_PER_EXTENT, block_count, block_length, extent_bits
from cachefs.base.tasks import in_thread
from cachefs.base.units import Size, format_bytes
from cachefs.store.catalog import CachedObject, Catalog, Copy, CopyKey
from cachefs.store.eviction import (
    ANY,
    ANY_REMOTE_OWNED,
    LOWEST,
    NOTHING,
    OURS,
    REMOTE_OWNED,
    Classes,
    Eviction,
)
from cachefs.store.tier import RAM, Tier, allocated

log = logging.getLogger(__name__)

READERS_SHARE = 128
"""Prefetch leaves a 128th of a full tier free, also when it fetches remote-owned blocks. Guessed between two cases: eight
workers read files of 100 KB with a cache of 128 MiB, and 99 % of a cache may hold prefetched files."""

VICTIMS_AT_ONCE = 512
"""Copies evicted without a checkpoint. Measured: dropping a one-block file takes 0.15 ms, so this is under 0.1 s."""

OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of opening or reading a file that say nothing about the file: descriptors or memory have run out."""

HEAP_IN_FLIGHT_BYTES = 64 << 20
"""The most that may be in flight to the heap. Derived: 1 GB/s with a round trip of 60 ms has 60 MB in flight."""

HEAP_BYTES = 32 << 20
"""Size of the heap: thirty readers' current blocks. Measured, with four nodes whose caches have 40 MiB each: in a heap of 64
MiB each node finds half of what the others own, so that the owners see too few uses to detect epochs, and fetch twice as
much again. With both limits the daemon's own memory grows by less than 100 MiB, as promised."""

Range = tuple[int, int]
"""(offset, length) in a file, in bytes"""


class Heap:
    """A few blocks in plain memory, for readers that no tier can serve. The block added first is dropped first. Without the
    heap, a reader of 128 KiB pieces would fetch each 1 MiB block eight times once the disk is full."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()  # by (digest, block)
        self._bytes = 0

    def drop(self, digest: bytes) -> int:
        """Drop all blocks of a version. Returns how many bytes they had."""
        keys = [key for key in self.blocks if key[0] == digest]
        freed = sum(len(self.blocks.pop(key)) for key in keys)
        self._bytes -= freed
        return freed

    def put(self, digest: bytes, block: int, data: bytes) -> None:
        self._bytes += len(data) - len(self.blocks.pop((digest, block), b""))
        self.blocks[digest, block] = data
        while self._bytes > HEAP_BYTES and len(self.blocks) > 1:
            _, old = self.blocks.popitem(last=False)
            self._bytes -= len(old)


class Space:
    """Accounting for all tiers (from fastest to slowest): the only writer of copies' block states, of pins, and of the
    tiers' counters."""

    def __init__(
        self, catalog: Catalog, eviction: Eviction, tiers: list[Tier], block_size: int, metrics: Metrics
    ) -> None:
        self.catalog = catalog
        self.eviction = eviction
        self.tiers = tiers
        self.block_size = block_size
        self._block_bytes = allocated(block_size)
        self.metrics = metrics
        self.heap = Heap()
        self._tiers = {tier.number: tier for tier in tiers}

    def evict_for(
        self,
        tier: Tier,
        need: int,
        classes: Classes,
        *,
        older_than: int | None = None,
        already_there: int = 0,
    ) -> bool:
        """Evict copies of these classes, last used before the clock `older_than`, until `need` bytes and an inode for them
        are free. True if they are. It stops after `VICTIMS_AT_ONCE` copies, so that no reader waits for the eviction of
        thousands of files; another call goes on. `already_there` of the bytes lie on the tier's disk already."""
        for _ in range(VICTIMS_AT_ONCE):
            limit = tier.limit_bytes(already_there)
            fits = tier.counted_bytes() + need <= limit
            if fits and (tier.takes_files or not need):
                return True
            if need > limit:
                return False
            if not fits and tier.used_bytes + need <= limit:
                return False  # enough bytes wait for removal: evicting more would be too much
            victim = self.eviction.victim(tier.number, classes, older_than=older_than)
            if victim is None:
                return False
            obj, copy = victim
            if fits and not any(c.pins or c.pinned for c in self.catalog.copies(obj, tier.number)):
                # Only an inode is missing: dropping the whole file frees one.
                self.metrics.evicted_blocks += self.drop_file(obj, tier)
            else:
                self.metrics.evicted_blocks += self.drop(obj, copy, copy.bitmap)
        return False

    async def fit(self, tier: Tier, need: int, *, already_there: int = 0) -> bool:
        """`evict_for` with all classes, repeated with checkpoints between, so that readers go on."""
        while True:
            used = tier.used_bytes
            if self.evict_for(tier, need, ANY, already_there=already_there):
                return True
            if tier.used_bytes >= used:
                return False
            await trio.lowlevel.checkpoint()

    def left_to_readers(self, tier: Tier, need: int) -> int:
        """Bytes that prefetch leaves free, a multiple of `need` or of the block size if that is smaller. Prefetch evicts the
        lowest classes; without this, readers would then have to evict protected copies."""
        need = min(need, self.block_size)
        return tier.limit_bytes() // READERS_SHARE // need * need if need else 0

    # -- users of a copy's bytes -------------------------------------------------------------------

    def pin(self, *copies: Copy) -> None:
        """Add a user to the copies: their bytes stay in the file until `unpin`."""
        for copy in copies:
            copy.pins += 1

    def unpin(self, obj: CachedObject, *copies: Copy) -> None:
        """Remove a user from the copies, which are of one tier, and free what waited for the last pin."""
        for copy in copies:
            copy.pins -= 1
        if copies and copies[0].tier in obj.leaving:
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
        """Pin the copies, which are of one tier, inside the context."""
        self.pin(*copies)
        try:
            yield
        finally:
            self.unpin(obj, *copies)

    def set_pinned(self, copy: Copy, pinned: bool) -> None:
        """Keep the copy until a user unpins it, or let it be evicted again, as old as a copy used now."""
        if copy.pinned != pinned:
            copy.pinned = pinned
            self.make_own(copy)
            held = self.bytes(copy, copy.bitmap)
            self._tiers[copy.tier].pinned_bytes += held if pinned else -held
            self.eviction.touch(copy)

    def make_own(self, copy: Copy) -> None:
        """Make a remote-owned copy one of this node's own."""
        if self.eviction.make_own(copy):
            held = self.bytes(copy, copy.bitmap | copy.in_progress | copy.forgotten)
            self._tiers[copy.tier].remote_owned_bytes -= held

    def mark_remote_owned(self, copy: Copy) -> None:
        """Mark a copy as owned by another node, unless it has bytes already or is pinned."""
        if not (copy.bitmap or copy.in_progress or copy.forgotten or copy.pinned):
            self.eviction.remote_owned.add(copy.key)

    # -- the life of a block's bytes: reserve, commit, forget, free ----------------------------------

    def reserve(self, copy: Copy, bits: int) -> None:
        """Account for blocks that one writer is about to write into a (pinned) copy. Forgotten bytes of the same blocks,
        which are still in the file, are not counted again."""
        copy.in_progress |= bits
        new = self.bytes(copy, bits & ~copy.forgotten)
        self._tiers[copy.tier].reserve(new)
        if self.eviction.remote_owned.tiers and copy.key in self.eviction.remote_owned:
            self._tiers[copy.tier].remote_owned_bytes += new
        copy.forgotten &= ~bits

    def commit(self, copy: Copy, bits: int, verified: int) -> None:
        """Make reserved blocks, which are written now, exist. The caller sets their age, which has the next flush write
        them."""
        copy.in_progress &= ~bits
        copy.bitmap |= bits
        copy.verified |= verified & bits
        tier = self._tiers[copy.tier]
        held = self.bytes(copy, bits)
        tier.unlisted_bytes -= held
        tier.pinned_bytes += held if copy.pinned else 0
        tier.blocks += bits.bit_count()

    def abandon(self, copy: Copy, bits: int) -> None:
        """Turn reserved blocks that were not written into forgotten ones."""
        copy.in_progress &= ~bits
        copy.forgotten |= bits

    def drop(self, obj: CachedObject, copy: Copy, bits: int, why: str = "evicted") -> int:
        """Drop blocks of a copy; their bytes are freed when the copy has no pins. Of an immutable file all blocks are
        dropped. Returns how many blocks were dropped. `why` is one of the ledger's reasons."""
        if not obj.has(copy):
            # Two readers found it damaged; the first one dropped it, and a new copy may be in its place.
            return 0
        tier = self._tiers[copy.tier]
        if obj.is_immutable(tier):
            return self.drop_file(obj, tier, why)
        count = self._forget(copy, bits, why)
        if not copy.pins:
            self._free(obj, copy)
        return count

    def drop_file(self, obj: CachedObject, tier: Tier, why: str = "evicted") -> int:
        """Drop all blocks of a file that is immutable or not in use. It is unlinked when it has no pins. Returns how many
        blocks were dropped."""
        backing = obj.backing
        if backing is not None and backing.tier is tier and not backing.users:
            backing.retire()
        obj.leaving.add(tier.number)
        count = sum(self._forget(copy, copy.bitmap, why) for copy in self.catalog.copies(obj, tier.number))
        self._free_file(obj, tier)
        return count

    def goes_with(self, obj: CachedObject, copy: Copy) -> list[Copy]:
        """The copies that are dropped with this one: all of an immutable file, or itself."""
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
        held = self.bytes(copy, bits)
        tier.blocks -= bits.bit_count()
        tier.unlisted_bytes += held  # no row accounts for them any more, but they are not freed yet
        tier.pinned_bytes -= held if copy.pinned else 0
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
            # Punch all of the extent but our blocks: the kernel allocates a whole huge page for one block.
            bits = extent_bits(block_count(copy.object_size, self.block_size), copy.extent) & ~copy.bitmap
            self.punch(obj, tier, list(self.catalog.ranges(copy, bits)), freed)

    def _freed(self, tier: Tier, copy: Copy) -> int:
        freed = self.bytes(copy, copy.forgotten)
        tier.freed(freed)
        tier.remote_owned_bytes -= freed if copy.key in self.eviction.remote_owned else 0
        copy.forgotten = 0
        return freed

    def _free_file(self, obj: CachedObject, tier: Tier) -> None:
        """Unlink a file that is leaving, unless it is still in use."""
        copies = obj.copies_on(tier)
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
        """Disk bytes that these blocks take."""
        count = bits.bit_count() * self._block_bytes
        # Not block by block: a large file has hundreds of thousands, and one step of the trio loop drops them all.
        last = (copy.object_size - 1) // self.block_size - copy.extent * BLOCKS_PER_EXTENT
        if 0 <= last < BLOCKS_PER_EXTENT and bits >> last & 1:
            count -= self._block_bytes - allocated((copy.object_size - 1) % self.block_size + 1)
        return count

    # -- files -------------------------------------------------------------------------------------

    def unlink(self, obj: CachedObject, tier: Tier, freed: int = 0) -> None:
        """Remove the version's file, which takes `freed` bytes: at once from memory, through a queue from a disk."""
        obj.close_file(tier.number)
        tier.unlink(obj.id.digest, freed)
        obj.immutable.discard(tier.number)
        if tier.number in obj.leaving:
            # The heap has blocks that the immutable file could not take. They are fetched again into a new file, because
            # only a file with all blocks can be opened in passthrough.
            obj.leaving.discard(tier.number)
            self.heap.drop(obj.id.digest)

    def punch(self, obj: CachedObject, tier: Tier, ranges: list[Range], freed: int = 0) -> None:
        """Punch ranges of a version's file, in their order, which take `freed` bytes."""
        runs: list[Range] = []
        for start, length in ranges:
            length = allocated(length)  # whole pages: punching a part of a page only zeroes it
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((start, length))
        if runs:
            tier.punch(obj.id.digest, runs, freed)

    def file_to_write(self, obj: CachedObject, tier: Tier) -> Callable[[], int] | None:
        """A function, for a thread, that opens the version's file for writing; None while an immutable file of it waits for
        its removal. If the function raises, call `not_opened`."""
        if tier.number in obj.leaving:
            return None
        # If the index has blocks, the file must exist: in a new file these blocks would read as zeros.
        known = tier.number in obj.fds
        if not known:
            for copy in self.catalog.copies(obj, tier.number):
                known = known or copy.bitmap != 0
        is_its_file = partial(obj.is_its_file, tier.number)
        return partial(
            tier.open_for_writing, obj.id.digest, obj.id.size, known=known, is_its_file=is_its_file
        )

    def not_opened(self, obj: CachedObject, tier: Tier, exc: OSError, unwritten: int = 0) -> None:
        """Handle a version's file that could not be opened for writing: it has vanished, is immutable, or the tier fails.
        For `unwritten` see `Tier.full`."""
        if exc.errno == errno.ENOENT:
            for copy in self.catalog.copies(obj, tier.number):
                if copy.bitmap:
                    self.lost(obj, copy, exc)
        elif exc.errno == errno.EROFS and tier.immutable(obj.id.digest) is not False:
            # A crash lost some of its rows. An immutable file cannot be completed, so it is dropped and fetched again.
            self.drop_file(obj, tier)
        elif exc.errno != errno.ETIMEDOUT:
            self.failed(tier, exc, unwritten)

    # -- damage ------------------------------------------------------------------------------------

    def failed(self, tier: Tier, exc: OSError, unwritten: int = 0) -> None:
        """Count an I/O error, and have the tier note it. For `unwritten` see `Tier.full`."""
        self.metrics.tier_errors += 1
        tier.failed(exc, unwritten)

    def lost(self, obj: CachedObject, copy: Copy, exc: OSError) -> None:
        """Drop a copy that could not be read: its blocks are misses. It stays if this process had no descriptor or memory
        to read it with, which says nothing about its file."""
        self.failed(self._tiers[copy.tier], exc)
        if exc.errno not in OF_THE_PROCESS:
            self.drop(obj, copy, copy.bitmap, "damaged")

    def corrupt(self, obj: CachedObject, copy: Copy, bits: int) -> None:
        """Drop blocks that failed their checksums: they are fetched again."""
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
    """`cachefs pin` and `cachefs evict`: versions that users keep or drop, on all tiers. `budget` is how much may be pinned,
    a share of the tiers' limits or a number of bytes.

    A pin is a flag in the row of a copy: it outlives restarts and follows the copy to SSD. Pinning reserves no space: the
    caller fetches first."""

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
        """How many bytes may be pinned on this node now."""
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
        """Keep the version's copies, and those made later while it is in memory, until `unpin`, over restarts. Raises
        `NoRoom` beyond the budget, with nothing changed."""
        slower: dict[int, int] = {}
        loose = []
        # A block on both tiers is pinned, and counted, once: in the slower one, so that RAM may drop it.
        for copy in reversed(self._catalog.all_copies(obj)):
            there = slower.get(copy.extent, 0)
            if not copy.pinned and (not there or (copy.bitmap | copy.in_progress) & ~there):
                loose.append(copy)
            slower[copy.extent] = there | copy.bitmap
        if obj.pinned and not loose:
            return
        self.check(obj)
        obj.pinned = True
        for copy in loose:
            self._space.set_pinned(copy, True)

    def unpin(self, obj: CachedObject) -> None:
        """Let the version be evicted again, as old as one used now."""
        for copy in self._catalog.all_copies(obj):
            self._space.set_pinned(copy, False)
        obj.pinned = False  # last, because loading a pinned row sets it

    async def unpin_all(self) -> None:
        """`unpin` each version that the index lists as pinned, also those that no path leads to any more. Flush it first."""
        for tier in self._tiers:
            for digests in self._catalog.listed(tier.number, pinned=True):
                for digest in digests:
                    self.unpin(self._catalog.by_digest(digest))
                await trio.lowlevel.checkpoint()

    def evict(self, obj: CachedObject) -> int:
        """Drop all of the version that is not pinned. Returns its bytes; those in use are freed with their last user."""
        freed = self._space.heap.drop(obj.id.digest)
        for tier in self._tiers:
            copies = self._catalog.copies(obj, tier.number)
            if obj.is_immutable(tier) and any(copy.pinned for copy in copies):
                continue  # an immutable file is dropped as a whole or not at all
            loose = [copy for copy in copies if not copy.pinned]
            freed += sum(self._space.bytes(copy, copy.bitmap) for copy in loose)
            for copy in loose:
                self._space.drop(obj, copy, copy.bitmap)
        return freed


# -- moves between tiers ---------------------------------------------------------------------------

SPILL_ABOVE = 0.90
"""Used share of RAM above which its oldest copies move to SSD. Guessed."""

LOOK_EVERY_S = 0.25
"""How often RAM is checked without a cache write: it may also be too full because its limit has become lower, and copies
can be moved once they have lost their pins."""

PROMOTED_AT_MOST = 16 << 20
"""Size of the largest version that is promoted. Measured: reading a large file from SSD again falls from 2.6 to 0.6 GB/s
while it is copied, and gains nothing afterwards. Small files gain: each of their reads is a seek."""

REUSE_AFTER_S = 5.0
"""Reads closer together than this are one use (LRU-K's correlated reference period). Guessed."""


class Moves:
    """Moves of copies between `ram` and `ssd`: spilling and promoting, in one task."""

    def __init__(self, space: Space, ram: Tier, ssd: Tier, clock: Callable[[], float]) -> None:
        self._catalog = space.catalog
        self._eviction = space.eviction
        self._space = space
        self._ram = ram
        self._ssd = ssd
        self._metrics = space.metrics
        self._now = clock
        self._wake = trio.Event()
        self._promotions: OrderedDict[CopyKey, None] = OrderedDict()

    def spill_if_full(self) -> None:
        """Wake the task if RAM is too full: it has new blocks, or copies that can be moved now."""
        if self._too_full():
            self._wake.set()

    def used(self, copy: Copy) -> None:
        """Note a read of an SSD copy, and promote the copy at its second separate use. Copies of a dataset with epochs are
        not promoted, because they would lie on both tiers until the next epoch."""
        if copy.object_size > PROMOTED_AT_MOST or self._eviction.epochs.has_epochs(copy.dataset):
            return
        now = self._now()
        if not copy.first_use:
            copy.first_use = now
        elif now - copy.first_use >= REUSE_AFTER_S and self._ram.writable():
            self._promotions[copy.key] = None
            self._wake.set()

    async def run(self) -> None:
        while True:
            with trio.move_on_after(LOOK_EVERY_S):
                await self._wake.wait()
            self._wake = trio.Event()
            if self._too_full() or self._ram.used_bytes > self._ram.limit_bytes():
                await self._spill()
            while self._promotions:
                key, _ = self._promotions.popitem(last=False)
                obj = self._catalog.by_digest(key[1])
                copy = self._catalog.copy(obj, key[0], key[2])
                if copy is not None and await self.move(obj, copy, self._ram, NOTHING):
                    self._metrics.promoted_blocks += copy.bitmap.bit_count()

    async def _spill(self) -> None:
        self._space.evict_for(self._ram, 0, ANY_REMOTE_OWNED)  # its limit may have sunk
        while self._too_full():
            victim = self._eviction.victim(self._ram.number, OURS, moving=True)
            if victim is None:
                return
            obj, copy = victim
            group = self._space.goes_with(obj, copy)
            protected = self._eviction.protected(copy)
            if self._ssd.writable() and await self._move_down(obj, group, LOWEST):
                self._metrics.spilled_blocks += sum(c.bitmap.bit_count() for c in group)
            elif not copy.bitmap:
                continue  # its file could not be read, so it was dropped
            elif copy.pinned or (
                self._ram.used_bytes <= self._ram.limit_bytes()
                and not self._is_older_than_ssd(copy, protected)
            ):
                return  # SSD does not take it, and RAM has room for it: keep serving from RAM
            else:
                self._metrics.evicted_blocks += sum(c.bitmap.bit_count() for c in group)
            # During the move the copy may have been dropped or pinned. Or the file was opened in passthrough, and dropping
            # this copy would drop copies that were not moved.
            free = not any(c.pins for c in group)
            if free and len(self._space.goes_with(obj, copy)) == len(group):
                self._space.drop(obj, copy, copy.bitmap)

    def _too_full(self) -> bool:
        """True if this node's own copies take too much of RAM. Remote-owned ones are evicted on demand."""
        return self._ram.own_bytes > SPILL_ABOVE * self._ram.limit_bytes()

    def _is_older_than_ssd(self, copy: Copy, protected: bool) -> bool:
        """True if SSD has refused the copy because every copy that it could evict was used later."""
        if protected or not self._ssd.writable():
            return False
        return self._eviction.victim(self._ssd.number, LOWEST) is not None

    async def save_all(self) -> None:
        """Move everything in RAM to SSD before a stop, evicting older or lower copies there."""
        while (victim := self._eviction.victim(self._ram.number, OURS, moving=True)) is not None:
            obj, copy = victim
            protected = self._eviction.protected(copy)
            saved = await self._move_down(obj, self._space.goes_with(obj, copy), ANY)
            if not saved and copy.bitmap and (protected or not self._ssd.writable()):
                return
            self._space.drop(obj, copy, copy.bitmap)

    async def _move_down(self, obj: CachedObject, group: list[Copy], for_protected: Classes) -> bool:
        """Copy to SSD the copies that will leave RAM together, except remote-owned ones. `for_protected` are the classes
        that may be evicted there for protected ones. True if all were copied."""
        with obj.held():
            for copy in group:
                if copy.key in self._eviction.remote_owned:
                    continue
                # The deadline of a stop cancels here, never in the middle of an extent.
                await trio.lowlevel.checkpoint()
                protected = self._eviction.protected(copy)
                evict, older_than = (for_protected, None) if protected else (LOWEST, copy.clock)
                if not await self.move(obj, copy, self._ssd, evict, older_than):
                    return False
            return True

    async def move(
        self, obj: CachedObject, copy: Copy, to: Tier, evict: Classes, older_than: int | None = None
    ) -> bool:
        """Copy the blocks that `to` lacks into it. False if it has no room for them, or either tier fails."""
        target = self._catalog.copy(obj, to.number, copy.extent)
        wanted = copy.bitmap & ~(target.bitmap | target.in_progress if target is not None else 0)
        if not wanted:
            if target is not None:
                self._eviction.moved(copy, target)
            return True
        ranges = list(self._catalog.ranges(copy, wanted))
        need = sum(allocated(length) for _, length in ranges)
        with obj.held(), self._space.pinned(obj, copy):
            if not self._space.evict_for(to, need, evict, older_than=older_than):
                return False
            source = self._ssd if to is self._ram else self._ram
            return await self._copy_blocks(obj, copy, to, source, ranges, wanted)

    async def _copy_blocks(
        self, obj: CachedObject, copy: Copy, to: Tier, source: Tier, ranges: list[Range], wanted: int
    ) -> bool:
        if source.disk.down or to.disk.down:  # a thread would wait for the disk, and a stop for the thread
            return False
        sink = self._space.file_to_write(obj, to)
        if sink is None:
            return False
        target = self._catalog.create(obj, to.number, copy.extent, copy.object_size, copy.dataset)
        if to is self._ram and not (target.bitmap or target.in_progress):
            self._space.set_pinned(target, False)  # the copy on SSD stays, and has the pin
        self._space.pin(target)
        self._space.reserve(target, wanted)
        moved = 0
        try:
            with trio.CancelScope(shield=True):
                open_source = partial(obj.open, source)
                await in_thread(partial(_copy_ranges, open_source, sink, ranges))
            # A block that the source has dropped meanwhile may be damaged in the target, too.
            moved = wanted & copy.bitmap
            for position, checksum in enumerate(copy.checksums):
                if moved >> position & 1:
                    target.checksums[position] = checksum
            self._space.commit(target, moved, copy.verified)
            self._eviction.moved(copy, target)
        except _SourceFailed as exc:
            self._space.lost(obj, copy, exc)
        except _NotOpened as exc:
            self._space.not_opened(obj, to, exc, self._space.bytes(target, wanted))
        except OSError as exc:
            if exc.errno != errno.EAGAIN:  # no thread can be started, which is not the tier's fault
                self._space.failed(to, exc, self._space.bytes(target, wanted))
        finally:
            self._space.abandon(target, wanted & ~moved)
            self._space.unpin(obj, target)
        return bool(moved)


class _SourceFailed(OSError):
    """The file to copy from is not what the index says."""


class _NotOpened(OSError):
    """The file to copy into cannot be opened."""


def _copy_ranges(open_source: Callable[[], int], open_sink: Callable[[], int], ranges: list[Range]) -> None:
    """Copy byte ranges between files inside the kernel, in a worker thread."""
    try:
        source = open_source()
    except OSError as exc:
        raise _SourceFailed(exc.errno, exc.strerror) from exc
    try:
        sink = open_sink()
    except OSError as exc:
        os.close(source)
        raise _NotOpened(exc.errno, exc.strerror) from exc
    try:
        for start, length in ranges:
            os.lseek(sink, start, os.SEEK_SET)
            done = 0
            while done < length:
                count = os.sendfile(sink, source, start + done, length - done)
                if count == 0:
                    raise _SourceFailed(errno.EIO, "short read")
                done += count
    finally:
        os.close(sink)
        os.close(source)


# -- cache writes -----------------------------------------------------------------------------------------

Completed = tuple[int, int]
"""(block, its xxh3_64)"""

Run = tuple[CachedObject, int, int]
"""(version, start, stop): blocks [start, stop) of it, within one extent"""


class WriteClosed(Exception):
    """The cache write was closed before its transfer ended: the transfer must stop."""


class CacheWrite:
    """Blocks [start_block, stop_block) of one version, delivered in order from the first byte on.

    `in_heap`: it goes to the heap, because no tier takes it; its bytes can be read after it was closed. `waits`: writing may
    wait for a disk. `prefetched`: no reader waits
    for it or has read it yet. `counted`: its use was counted. `requester` is the requesting peer."""

    in_heap = False
    waits = False
    prefetched = False
    requester = ""
    counted = False

    def __init__(self, size: int, block_size: int, start_block: int, stop_block: int) -> None:
        self.start_block = start_block
        self.stop_block = stop_block
        self.start = start_block * block_size
        self.stop = min(size, stop_block * block_size)
        self.written = self.start
        # The lowest offset that a reader waits for: bytes written below it wake no reader.
        self.wake_at = self.stop + 1
        self.on_written: Callable[[], None] | None = None
        self.settled = 0  # number of blocks that all readers find
        self._size = size
        self.block_size = block_size
        self._completed: list[Completed] = []
        self._hash = xxhash.xxh3_64()
        self._lock = threading.Lock()
        self._closed = False

    def write(self, data: memoryview | bytes) -> None:
        """Write the next bytes, in a worker thread. Raises `NoRoom` if the tier cannot take them, `WriteClosed` after
        `close`."""
        view = memoryview(data)
        with self._lock:
            self._place(view)
            position = self.written
            while len(view):
                block = position // self.block_size
                end = block * self.block_size + block_length(block, self._size, self.block_size)
                part = view[: end - position]
                self._hash.update(part)
                position += len(part)
                view = view[len(part) :]
                if position == end:
                    self._completed.append((block, self._hash.intdigest()))
                    self._hash = xxhash.xxh3_64()
            self.written = position
        self._wake_readers(len(data))

    def write_block(self, data: memoryview, checksum: int) -> None:
        """`write` for one whole block whose checksum the sender's reply carried and the client verified: its bytes are not
        hashed again."""
        with self._lock:
            block, within = divmod(self.written, self.block_size)
            if within or len(data) != block_length(block, self._size, self.block_size):
                raise ValueError("not a whole block")
            self._place(data)
            self._completed.append((block, checksum))
            self.written += len(data)
        self._wake_readers(len(data))

    def _place(self, view: memoryview) -> None:
        if self._closed:
            raise WriteClosed
        if self.written + len(view) > self.stop:
            raise ValueError("more bytes than the range has")
        self._put(view, self.written)

    def _wake_readers(self, count: int) -> None:
        """Wake readers after `count` more bytes, if one waits for them. If `count` is the whole range, the end of the
        transfer, which comes now, wakes them instead."""
        wake = self.on_written if count < self.stop - self.start else None
        if self.written >= self.wake_at and wake is not None:
            wake()

    @property
    def wanted(self) -> bool:
        """True if a reader asked for it, waits for it, or has read from it."""
        return not self.prefetched or self.wake_at <= self.stop

    def take_completed(self) -> list[Completed]:
        """Blocks that became whole since the last call."""
        completed = self._completed[self.settled :]
        self.settled += len(completed)
        return completed

    def close(self) -> None:
        """Refuse further bytes. Waits for a running `write`."""
        with self._lock:
            self._closed = True

    def read(self, offset: int, size: int) -> bytes:
        """Written bytes (offset + size <= written), for a reader."""
        self.prefetched = False
        return self.peek(offset, size)

    def peek(self, offset: int, size: int) -> bytes:
        """Written bytes, for a caller that is no reader: it is no use of them."""
        raise NotImplementedError

    def _put(self, view: memoryview, offset: int) -> None:
        raise NotImplementedError


class TierWrite(CacheWrite):
    """A cache write into a tier's file. `fd` is its descriptor, -1 until the first write opens it in the transfer's thread,
    because opening may wait for the disk. `CacheWrites.end` takes the descriptor."""

    def __init__(
        self,
        tier: Tier,
        copy: Copy,
        open_file: Callable[[], int],
        size: int,
        block_size: int,
        start: int,
        stop: int,
    ) -> None:
        super().__init__(size, block_size, start, stop)
        self.tier = tier
        self.waits = tier.blocking
        self.copy = copy
        self.fd = -1
        self.error: OSError | None = None  # of opening the file if `fd` is -1, else of writing
        self._open = open_file

    def _put(self, view: memoryview, offset: int) -> None:
        try:
            if self.fd < 0:
                self.fd = self._open()
            with self.tier.disk.busy():
                while len(view):
                    count = os.pwrite(self.fd, view, offset)
                    offset += count
                    view = view[count:]
        except OSError as exc:
            self.error = exc
            raise NoRoom(f"{self.tier.name} tier: {exc.strerror}") from exc

    def peek(self, offset: int, size: int) -> bytes:
        return os.pread(self.fd, size, offset)


class HeapWrite(CacheWrite):
    """A cache write into memory, for readers whose blocks no tier can take. `leaving` are the tiers that cannot because an
    immutable file of the version waits there for its removal."""

    in_heap = True

    def __init__(
        self, size: int, block_size: int, start: int, stop: int, leaving: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(size, block_size, start, stop)
        self.leaving = leaving
        self._buffer = bytearray()

    def _put(self, view: memoryview, offset: int) -> None:
        if not self._buffer:  # not earlier: until now the transfer may have waited for a slot
            self._buffer = bytearray(self.stop - self.start)
        at = offset - self.start
        self._buffer[at : at + len(view)] = view

    def peek(self, offset: int, size: int) -> bytes:
        at = offset - self.start
        return bytes(memoryview(self._buffer)[at : at + size])


class CacheWrites:
    """Cache writes into the tiers, or into the heap if no tier has space: beginning, settling and ending them."""

    def __init__(self, space: Space, moves: Moves | None) -> None:
        self._catalog = space.catalog
        self._eviction = space.eviction
        self._space = space
        self._moves = moves
        self._tiers = space.tiers
        self._block_size = space.block_size
        self._metrics = space.metrics

    def begin(
        self, wanted: Sequence[Run], *, prefetched: bool = False, remote_owned: bool = False
    ) -> list[CacheWrite | None]:
        """Reserve space for blocks of several versions, each in the fastest tier that has it; None for those for which no
        tier has. A tier is asked for space once for all that are left, and for each of them only if there is too little for
        all. `prefetched`: no reader waits for them, so they displace only the lowest priority classes, and once written they
        wait for a reader. `remote_owned`: another node owns them, so they displace only other remote-owned blocks."""
        cache_writes: list[CacheWrite | None] = [None] * len(wanted)
        left = list(range(len(wanted)))
        # Held, because making space may evict blocks of these objects, and with them close their files.
        for obj, _, _ in wanted:
            obj.hold()
        try:
            for tier, evict in self._places(prefetched=prefetched, remote_owned=remote_owned):
                together = len(left) > 1 and self._evict_for(
                    [wanted[n] for n in left], tier, evict, prefetched=prefetched, remote_owned=remote_owned
                )
                before = len(left)
                for n in left:
                    if together or self._evict_for(
                        [wanted[n]], tier, evict, prefetched=prefetched, remote_owned=remote_owned
                    ):
                        cache_writes[n] = self._write_in(
                            tier, *wanted[n], prefetched=prefetched, remote_owned=remote_owned
                        )
                left = [n for n in left if cache_writes[n] is None]
                if tier.number == RAM and self._moves is not None and len(left) < before:
                    self._moves.spill_if_full()
                if not left:
                    break
        finally:
            for obj, _, _ in wanted:
                obj.release()
        return cache_writes

    def _places(self, *, prefetched: bool, remote_owned: bool) -> Iterator[tuple[Tier, Classes]]:
        """(tier, classes that may be evicted there) in the order to try: the lowest classes of all tiers come before the
        others of any tier."""
        if remote_owned:
            yield from ((tier, REMOTE_OWNED) for tier in self._tiers[:1] if tier.writable())
            return
        tiers = [tier for tier in self._tiers if tier.writable()]
        first, last = tiers[:1], tiers[-1:]
        yield from ((tier, REMOTE_OWNED) for tier in tiers[:-1])
        if not prefetched:
            # This node's own copies may take RAM up to the share where spilling begins, in place of remote-owned ones.
            short = [tier for tier in first if tier.own_bytes < SPILL_ABOVE * tier.limit_bytes()]
            yield from ((tier, NOTHING) for tier in last)
            yield from ((tier, ANY_REMOTE_OWNED) for tier in short)
        yield from ((tier, LOWEST) for tier in reversed(tiers))
        if not prefetched:
            yield from ((tier, ANY_REMOTE_OWNED) for tier in first)
            yield from ((tier, ANY) for tier in last)

    def _evict_for(
        self, wanted: Sequence[Run], tier: Tier, evict: Classes, *, prefetched: bool, remote_owned: bool
    ) -> bool:
        """True if the tier has space for all of these, after evicting copies of the classes `evict` if need be."""
        block = self._block_size
        needs = [allocated(min(obj.id.size, stop * block) - start * block) for obj, start, stop in wanted]
        largest = max(needs)
        left_free = 0
        if prefetched and remote_owned:
            left_free = max(largest, tier.limit_bytes() // READERS_SHARE)
        elif prefetched and evict == LOWEST:
            left_free = self._space.left_to_readers(tier, largest)
        return self._space.evict_for(tier, sum(needs) + left_free, evict)

    def _write_in(
        self, tier: Tier, obj: CachedObject, start: int, stop: int, *, prefetched: bool, remote_owned: bool
    ) -> TierWrite | None:
        """Begin a cache write on a tier that has space for it. None if its file is being removed, or a move writes the
        blocks."""
        open_file = self._space.file_to_write(obj, tier)
        if open_file is None:
            return None
        datasets = self._eviction.datasets
        dataset = datasets(obj.id)  # before its version is read, which the call may raise
        copy = self._catalog.create(
            obj, tier.number, start // BLOCKS_PER_EXTENT, obj.id.size, dataset, datasets.version
        )
        bits = _bits(start, stop)
        if copy.in_progress & bits:
            return None  # a move is writing them, and blocks have one writer
        cache_write = TierWrite(tier, copy, open_file, obj.id.size, self._block_size, start, stop)
        cache_write.prefetched = prefetched
        if remote_owned:
            self._space.mark_remote_owned(copy)
        elif self._eviction.remote_owned.tiers:
            self._space.make_own(copy)
        copy.pins += 1
        self._space.reserve(copy, bits)
        return cache_write

    def bypass(self, obj: CachedObject, block: int) -> CacheWrite:
        """A cache write of one block into memory, for a reader that waits for it and that no tier can serve. The number of
        waiting readers thus bounds what the heap takes."""
        return HeapWrite(obj.id.size, self._block_size, block, block + 1, frozenset(obj.leaving))

    def settle(self, obj: CachedObject, cache_write: CacheWrite) -> None:
        """Make the blocks that are complete visible to all readers."""
        completed = cache_write.take_completed()
        if not completed:
            return
        if isinstance(cache_write, HeapWrite):
            # If an immutable file was removed since, `unlink` dropped the heap's blocks, so that a new file gets them all.
            # The heap does not take this block then, either.
            file_is_there = cache_write.leaving <= obj.leaving
            for block, _ in completed:
                length = block_length(block, obj.id.size, self._block_size)
                if file_is_there:
                    self._space.heap.put(
                        obj.id.digest, block, cache_write.read(block * self._block_size, length)
                    )
                self._metrics.ledger.misses.gone(obj.id.digest, block // BLOCKS_PER_EXTENT, "not_admitted")
                self._metrics.bypassed_bytes += length
            self._metrics.bypassed_blocks += len(completed)
            return
        assert isinstance(cache_write, TierWrite)
        bits = 0
        for block, checksum in completed:
            cache_write.copy.checksums[block % BLOCKS_PER_EXTENT] = checksum
            bits |= 1 << block % BLOCKS_PER_EXTENT
            self._metrics.admitted_bytes += block_length(block, obj.id.size, self._block_size)
        self._space.commit(cache_write.copy, bits, bits)
        if cache_write.wanted:
            self._count_miss(obj, cache_write)
        else:
            self._eviction.prefetched(cache_write.copy)
        self._metrics.admitted_blocks += len(completed)

    def _count_miss(self, obj: CachedObject, cache_write: TierWrite) -> None:
        """Count a miss as a use of the copy, once for the whole cache write."""
        self._eviction.touch(cache_write.copy)
        if not cache_write.counted:
            cache_write.counted = True
            self._eviction.used(obj, cache_write.copy, hit=False, requester=cache_write.requester)

    def end(self, obj: CachedObject, cache_write: CacheWrite) -> None:
        """End a cache write whose transfer is over, whole or not: settle the complete blocks, release the others' space."""
        cache_write.close()
        self.settle(obj, cache_write)
        whole = min(cache_write.stop, (cache_write.start_block + cache_write.settled) * self._block_size)
        self._metrics.discarded_bytes += cache_write.written - whole
        if not isinstance(cache_write, TierWrite):
            return
        copy, tier = cache_write.copy, cache_write.tier
        if cache_write.fd >= 0 and obj.fds.setdefault(tier.number, cache_write.fd) != cache_write.fd:
            os.close(cache_write.fd)  # another cache write has opened it, too
        if cache_write.wanted and not cache_write.counted and copy.bitmap:
            self._count_miss(obj, cache_write)  # a reader read it during the transfer
        unwritten = 0
        if whole < cache_write.stop:
            missing = _bits(cache_write.start_block + cache_write.settled, cache_write.stop_block)
            self._space.abandon(copy, missing)
            unwritten = self._space.bytes(copy, missing)
        if cache_write.error is None:
            if whole == cache_write.stop and tier.errors_in_a_row:
                tier.worked()
        elif cache_write.fd < 0:
            self._space.not_opened(obj, tier, cache_write.error, unwritten)
        else:
            self._space.failed(tier, cache_write.error, unwritten)
        self._space.unpin(obj, copy)
        if not obj.refs:
            obj.close_if_unused()
        if tier.number == RAM and self._moves is not None:
            self._moves.spill_if_full()  # the copy has lost its pin, so it can be moved


def _bits(start: int, stop: int) -> int:
    """Blocks [start, stop) of one extent, as bits."""
    return ((1 << (stop - start)) - 1) << (start % BLOCKS_PER_EXTENT)

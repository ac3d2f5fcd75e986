"""The store's front: what is here, reading it, making room for more.

All state belongs to the trio thread; a plain method that does not await owns the world while it runs. Worker threads
only ever move bytes between descriptors.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import trio
import xxhash

from cachefs.errors import CacheUnusable, NoRoom
from cachefs.metrics import Metrics
from cachefs.names import BLOCKS_PER_EXTENT, ObjectId, block_length
from cachefs.store.fill import Fill, HeapFill, TierFill
from cachefs.store.index import Copy, CopyKey, Index, pack_copy, pack_key
from cachefs.store.tier import RAM, Tier, allocated

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 1.0
"""How long the index may lag behind the files: what a kill -9 can cost in refetches. Guessed."""

OBJECTS_IN_MEMORY = 8192
"""Versions whose bookkeeping is kept in memory after use, about 1 KiB each. Guessed."""

HEAP_BYTES = 32 << 20
"""Blocks kept in memory when no tier takes them, so that a reader's next 128 KiB does not fetch the block again."""

REUSE_AFTER_S = 5.0
"""Touches closer together than this are one use (LRU-K's correlated reference period). Guessed."""

SPILL_ABOVE, SPILL_TO = 0.90, 0.75
"""RAM fill at which the oldest copies start to move to SSD, and where that stops. Guessed."""

Buffer = bytes | bytearray | memoryview


class CachedObject:
    """One version that is open or was lately used. `copies` has the loaded ones, None where there is none.

    `flights` belongs to the fetch room: block → the transfer that is bringing it."""

    __slots__ = ("copies", "fds", "flights", "id", "refs")

    def __init__(self, object_id: ObjectId) -> None:
        self.id = object_id
        self.copies: dict[tuple[int, int], Copy | None] = {}
        self.fds: dict[int, int] = {}
        self.flights: dict[int, Any] = {}
        self.refs = 0


class Store:
    """This node's blocks, on `tiers` from fastest to slowest (possibly none: then everything passes through the heap)."""

    def __init__(
        self,
        index: Index,
        tiers: list[Tier],
        block_size: int,
        verify: str,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.tiers = tiers
        self._tier = {tier.number: tier for tier in tiers}
        self.block_size = block_size
        self._index = index
        self._metrics = metrics
        self._now = clock
        self._check_always = verify == "full"
        # After a crash the files may lag behind the index: then a checksum is looked at whatever was asked for.
        self._trust_index = verify == "none" and index.was_clean
        self._objects: OrderedDict[bytes, CachedObject] = OrderedDict()
        self._dirty: dict[CopyKey, Copy] = {}
        self._removed: dict[CopyKey, int | None] = {}
        self._unsaved: dict[CopyKey, Any] = {}  # what a flush under way is writing or removing
        self._victims: dict[int, list[tuple[bytes, CopyKey, int]]] = {}
        self._heap: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
        self._heap_bytes = 0
        self._first_use: dict[CopyKey, float] = {}
        self._clock = index.newest_clock() + 1
        self._recent = self._clock
        self._flush_lock = trio.Lock()
        self._threads = trio.CapacityLimiter(8)
        self._spill = trio.Event()
        self._promotions: OrderedDict[CopyKey, CachedObject] = OrderedDict()
        self.index_error = ""
        self.was_clean = index.was_clean
        for tier in tiers:
            tier.used_bytes, tier.blocks = index.totals(tier.number)

    # -- objects -----------------------------------------------------------------------------------

    def object(self, object_id: ObjectId) -> CachedObject:
        """The bookkeeping of this version (made when there is none)."""
        digest = object_id.digest
        found = self._objects.get(digest)
        if found is None:
            found = self._objects[digest] = CachedObject(object_id)
            if len(self._objects) > OBJECTS_IN_MEMORY:
                self._forget_some()
        else:
            self._objects.move_to_end(digest)
            found.id = object_id  # it may have been met by its digest only
        return found

    def _forget_some(self) -> None:
        for digest, obj in list(self._objects.items())[: len(self._objects) // 8]:
            if obj.refs or obj.flights:
                continue
            if any(
                c and (c.pins or c.key in self._dirty or c.key in self._unsaved) for c in obj.copies.values()
            ):
                continue
            self._close_files(obj)
            del self._objects[digest]

    def release(self, obj: CachedObject) -> None:
        """A handle on the object is closed."""
        obj.refs -= 1
        if not obj.refs and obj.fds and not obj.flights:
            self._close_files(obj)

    def _close_files(self, obj: CachedObject) -> None:
        for fd in obj.fds.values():
            os.close(fd)
        obj.fds.clear()

    def _copy(self, obj: CachedObject, tier: int, extent: int) -> Copy | None:
        try:
            return obj.copies[tier, extent]
        except KeyError:
            pass
        key = (tier, obj.id.digest, extent)
        copy = None
        if key not in self._removed and key not in self._unsaved:
            copy = self._index.load(key)
            if copy is not None and self._trust_index:
                copy.verified = copy.bitmap
        obj.copies[tier, extent] = copy
        return copy

    def find(self, obj: CachedObject, block: int) -> Copy | None:
        """The fastest copy that holds the block, verified ones first."""
        extent, bit = block // BLOCKS_PER_EXTENT, 1 << (block % BLOCKS_PER_EXTENT)
        held = None
        for tier in self.tiers:
            copy = self._copy(obj, tier.number, extent)
            if copy is not None and copy.bitmap & bit:
                if copy.verified & bit:
                    return copy
                held = held or copy
        return held

    def has(self, obj: CachedObject, block: int) -> bool:
        return self.find(obj, block) is not None or (obj.id.digest, block) in self._heap

    def cached_bytes(self, object_id: ObjectId) -> int:
        """How many bytes of the version lie in any tier."""
        obj = self.object(object_id)
        extents = {e for t in self.tiers for e in self._index.extents_of(t.number, object_id.digest)}
        extents |= {e for _, e in obj.copies}
        total = 0
        for extent in extents:
            bitmap = 0
            for tier in self.tiers:
                copy = self._copy(obj, tier.number, extent)
                bitmap |= copy.bitmap if copy is not None else 0
            for position in range(BLOCKS_PER_EXTENT):
                if bitmap >> position & 1:
                    total += block_length(
                        extent * BLOCKS_PER_EXTENT + position, object_id.size, self.block_size
                    )
        return total

    # -- reading -----------------------------------------------------------------------------------

    def _pieces(self, offset: int, size: int) -> Iterator[tuple[int, int, int]]:
        """(block, offset, length) of each block's share of the range."""
        end = offset + size
        while offset < end:
            block = offset // self.block_size
            length = min(end, (block + 1) * self.block_size) - offset
            yield block, offset, length
            offset += length

    def read_now(self, obj: CachedObject, offset: int, size: int) -> Buffer | None:
        """The bytes, if that takes no waiting: present, verified and not on a device's far side. Else None."""
        if self._check_always:
            return None
        first, last = offset // self.block_size, (offset + size - 1) // self.block_size
        copy = self.find(obj, first)
        if copy is not None and last // BLOCKS_PER_EXTENT == copy.extent:
            mask = ((2 << (last - first)) - 1) << (first % BLOCKS_PER_EXTENT)
            if copy.verified & mask == mask:
                data = self._read_copy_now(obj, copy, offset, size)
                if data is not None:
                    self._hit(obj, copy, last - first + 1)
                return data
        parts = []
        for block, at, length in self._pieces(offset, size):
            bit = 1 << (block % BLOCKS_PER_EXTENT)
            copy = self.find(obj, block)
            if copy is None:
                kept = self._heap.get((obj.id.digest, block))
                if kept is None:
                    return None
                start = at - block * self.block_size
                parts.append(memoryview(kept)[start : start + length])
                continue
            if not copy.verified & bit:
                return None
            data = self._read_copy_now(obj, copy, at, length)
            if data is None:
                return None
            self._hit(obj, copy, 1)
            parts.append(memoryview(data))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_copy_now(self, obj: CachedObject, copy: Copy, offset: int, size: int) -> Buffer | None:
        tier = self._tier[copy.tier]
        try:
            fd = self._file(obj, tier)
            if not tier.blocking:
                data: Buffer = os.pread(fd, size, offset)
            else:
                data = bytearray(size)
                if os.preadv(fd, [data], offset, os.RWF_NOWAIT) != size:
                    return None
        except BlockingIOError:
            return None
        except OSError as exc:
            self._lost(obj, copy, exc)
            return None
        if len(data) != size:
            self._lost(obj, copy, OSError(5, "short read"))
            return None
        return data

    async def read(self, obj: CachedObject, offset: int, size: int) -> Buffer | None:
        """The bytes, verified, waiting for the disk if need be. None when a block is not here, or turned out bad (it is
        dropped then): fetch it."""
        plan: list[tuple[Copy, int, int, int, int, bool]] = []
        for block, at, length in self._pieces(offset, size):
            copy = self.find(obj, block)
            if copy is None:
                if (obj.id.digest, block) in self._heap:
                    return await self._read_pieces(obj, offset, size)
                break
            try:
                fd = self._file(obj, self._tier[copy.tier])
            except OSError as exc:
                self._lost(obj, copy, exc)
                break
            bit = 1 << (block % BLOCKS_PER_EXTENT)
            check = self._check_always or not copy.verified & bit
            if plan and not check and plan[-1][0] is copy and not plan[-1][5]:
                before = plan.pop()
                plan.append((copy, fd, before[2], before[3], before[4] + length, False))
            else:
                plan.append((copy, fd, block, at, length, check))
        else:
            for copy, *_ in plan:
                copy.pins += 1
            obj.refs += 1  # keeps the descriptors open while a thread uses them
            try:
                results = await trio.to_thread.run_sync(
                    self._read_plan, plan, obj.id.size, limiter=self._threads
                )
            finally:
                self.release(obj)
                for copy, *_ in plan:
                    copy.pins -= 1
            return self._judge(obj, plan, results)
        return None

    async def _read_pieces(self, obj: CachedObject, offset: int, size: int) -> Buffer | None:
        """Block by block, for a range of which the heap holds a part."""
        parts = []
        for block, at, length in self._pieces(offset, size):
            kept = self._heap.get((obj.id.digest, block))
            start = at - block * self.block_size
            part = kept[start : start + length] if kept is not None else await self.read(obj, at, length)
            if part is None:
                return None
            parts.append(part)
        return b"".join(parts)

    def _read_plan(
        self, plan: list[tuple[Copy, int, int, int, int, bool]], size: int
    ) -> list[bytes | OSError | None]:
        """Worker thread: the bytes of each step; None for a checksum that does not match."""
        results: list[bytes | OSError | None] = []
        for copy, fd, block, at, length, check in plan:
            try:
                if not check:
                    data: bytes | None = os.pread(fd, length, at)
                    results.append(
                        data if data is not None and len(data) == length else OSError(5, "short read")
                    )
                    continue
                start = block * self.block_size
                whole = os.pread(fd, block_length(block, size, self.block_size), start)
                if xxhash.xxh3_64_intdigest(whole) == copy.checksums[block % BLOCKS_PER_EXTENT]:
                    results.append(whole[at - start : at - start + length] if len(whole) != length else whole)
                else:
                    results.append(None)
            except OSError as exc:
                results.append(exc)
        return results

    def _judge(
        self, obj: CachedObject, plan: list[Any], results: list[bytes | OSError | None]
    ) -> Buffer | None:
        good = True
        for (copy, _, block, _, length, check), result in zip(plan, results, strict=True):
            bit = 1 << (block % BLOCKS_PER_EXTENT)
            if isinstance(result, OSError):
                self._lost(obj, copy, result)
                good = False
            elif result is None:
                good = False
                if copy.bitmap & bit:
                    self._metrics.checksum_failures += 1
                    log.warning(
                        "dropping block %d of %s from the %s tier: its checksum does not match",
                        block,
                        obj.id.key,
                        self._tier[copy.tier].name,
                    )
                    self._drop_blocks(obj, copy, bit)
            else:
                if check:
                    copy.verified |= bit & copy.bitmap
                self._hit(obj, copy, -(-length // self.block_size))
        return b"".join(results) if good and len(results) != 1 else (results[0] if good else None)  # type: ignore[arg-type,return-value]

    def _file(self, obj: CachedObject, tier: Tier, *, create: bool = False) -> int:
        fd = obj.fds.get(tier.number)
        if fd is None:
            fd = obj.fds[tier.number] = tier.open_file(obj.id.digest, create=create)
        return fd

    def _hit(self, obj: CachedObject, copy: Copy, blocks: int) -> None:
        if copy.tier == RAM:
            self._metrics.ram_hits += blocks
        else:
            self._metrics.ssd_hits += blocks
        if copy.clock < self._recent:
            self._touch(copy)
            if copy.tier != RAM and len(self.tiers) > 1:
                first = self._first_use.setdefault(copy.key, self._now())
                if self._now() - first >= REUSE_AFTER_S and self.tiers[0].writable():
                    self._promotions[copy.key] = obj
                    self._spill.set()

    def _touch(self, copy: Copy) -> None:
        self._clock += 1
        copy.clock = self._clock
        self._dirty[copy.key] = copy

    def _lost(self, obj: CachedObject, copy: Copy, exc: OSError) -> None:
        """A tier failed to give what the index says it has: a miss, and the tier is watched."""
        tier = self._tier[copy.tier]
        self._metrics.tier_errors += 1
        tier.failed(exc)
        log.debug("%s tier could not read %s: %s", tier.name, obj.id.key, exc)
        self._drop_blocks(obj, copy, copy.bitmap)

    # -- taking in ---------------------------------------------------------------------------------

    def begin_fill(self, obj: CachedObject, start: int, stop: int, *, demanded: bool) -> Fill | None:
        """Room for blocks [start, stop) (within one extent) in the fastest tier that has it. When none has: the heap takes
        the first block if a reader waits for it, else None. So what the heap holds is bounded by the readers waiting."""
        need = sum(allocated(block_length(b, obj.id.size, self.block_size)) for b in range(start, stop))
        for tier in self.tiers:
            last = not any(slower.writable() for slower in self.tiers if slower.number > tier.number)
            if not tier.writable() or not self._make_room(tier, need, evict=last):
                continue
            try:
                return self._fill_tier(obj, tier, start, stop, need)
            except OSError as exc:
                self._metrics.tier_errors += 1
                tier.failed(exc)
        return HeapFill(obj.id.size, self.block_size, start, start + 1) if demanded else None

    def _fill_tier(self, obj: CachedObject, tier: Tier, start: int, stop: int, need: int) -> TierFill:
        fd = self._file(obj, tier, create=True)
        fill_copy = self._copy_for_write(obj, tier, start // BLOCKS_PER_EXTENT)
        fill = TierFill(tier, fill_copy, fd, obj.id.size, self.block_size, start, stop)
        fill_copy.pins += 1
        tier.used_bytes += need
        if tier.number == RAM and len(self.tiers) > 1 and tier.used_bytes > SPILL_ABOVE * tier.limit_bytes():
            self._spill.set()
        return fill

    def _copy_for_write(self, obj: CachedObject, tier: Tier, extent: int) -> Copy:
        copy = self._copy(obj, tier.number, extent)
        if copy is None:
            copy = Copy(tier.number, obj.id.digest, extent, obj.id.size)
            copy.stored_clock = self._removed.pop(copy.key, None)
            obj.copies[tier.number, extent] = copy
        return copy

    def settle(self, obj: CachedObject, fill: Fill) -> None:
        """Make the blocks that have wholly landed exist."""
        completed = fill.take_completed()
        if not completed:
            return
        if isinstance(fill, TierFill):
            self._settle_blocks(fill.copy, completed)
            self._metrics.admitted_blocks += len(completed)
            return
        for block, _ in completed:
            self._keep_in_heap(obj, block, fill)
        self._metrics.bypassed_blocks += len(completed)

    def _settle_blocks(self, copy: Copy, completed: list[tuple[int, int]]) -> None:
        tier = self._tier[copy.tier]
        for block, checksum in completed:
            position = block % BLOCKS_PER_EXTENT
            if (
                copy.bitmap >> position & 1
            ):  # came twice (a tier was filled while another copy was dropped): counted once
                tier.used_bytes -= allocated(block_length(block, copy.object_size, self.block_size))
            else:
                tier.blocks += 1
            copy.checksums[position] = checksum
            copy.bitmap |= 1 << position
            copy.verified |= 1 << position
        self._touch(copy)

    def end_fill(self, obj: CachedObject, fill: Fill) -> None:
        """The transfer is over, whole or not: settle what landed, give back what did not."""
        fill.close()
        self.settle(obj, fill)
        if not isinstance(fill, TierFill):
            return
        copy, tier = fill.copy, fill.tier
        copy.pins -= 1
        missing = [
            b
            for b in range(fill.start_block, fill.stop_block)
            if not copy.bitmap >> (b % BLOCKS_PER_EXTENT) & 1
        ]
        for block in missing:
            length = block_length(block, obj.id.size, self.block_size)
            tier.used_bytes -= allocated(length)
            if not self._punch(obj, tier, block * self.block_size, length):
                break
        if fill.failure is not None:
            self._metrics.tier_errors += 1
            tier.failed(fill.failure)
        elif not missing and tier.errors_in_a_row:
            tier.worked()
        if not copy.bitmap and not copy.pins:
            self._remove(obj, copy)

    def _keep_in_heap(self, obj: CachedObject, block: int, fill: Fill) -> None:
        data = fill.read(block * self.block_size, block_length(block, obj.id.size, self.block_size))
        self._heap[obj.id.digest, block] = data
        self._heap_bytes += len(data)
        while self._heap_bytes > HEAP_BYTES and len(self._heap) > 1:
            _, old = self._heap.popitem(last=False)
            self._heap_bytes -= len(old)

    # -- making room -------------------------------------------------------------------------------

    def _make_room(self, tier: Tier, need: int, *, evict: bool) -> bool:
        limit = tier.limit_bytes()
        if need > limit:
            return False
        while tier.used_bytes + need > limit:
            if not evict:
                return False
            victim = self._oldest(tier)
            if victim is None:
                return False
            obj, copy = victim
            self._metrics.evicted_blocks += copy.bitmap.bit_count()
            self._drop_blocks(obj, copy, copy.bitmap)
            limit = tier.limit_bytes()
        return True

    def _oldest(self, tier: Tier) -> tuple[CachedObject, Copy] | None:
        """The least recently used copy that nobody is using. Index rows are older than anything touched since the last
        flush, so they come first."""
        cursor = b""
        while True:
            queue = self._victims.get(tier.number)
            if not queue:
                queue = self._index.oldest(tier.number, cursor, 256)
                if not queue:
                    break
                queue.reverse()
                self._victims[tier.number] = queue
            cursor, key, clock = queue.pop()
            if key in self._removed or key in self._unsaved:
                continue
            obj = self._objects.get(key[1])
            if obj is None:
                obj = self._objects[key[1]] = CachedObject(_Unnamed(key[1]))  # type: ignore[arg-type]
            copy = self._copy(obj, key[0], key[2])
            if copy is None:
                self._removed[key] = clock  # an order row without a copy: left by a damaged row
            elif copy.clock == clock and not copy.pins:
                return obj, copy
        self._victims.pop(tier.number, None)
        dirty = [c for c in self._dirty.values() if c.tier == tier.number and not c.pins and c.bitmap]
        if not dirty:
            return None
        copy = min(dirty, key=lambda c: c.clock)
        return self._objects[copy.digest], copy

    def _drop_blocks(self, obj: CachedObject, copy: Copy, bits: int) -> None:
        """Remove blocks from a copy and give their bytes back; the file goes with its last block."""
        bits &= copy.bitmap
        tier = self._tier[copy.tier]
        copy.bitmap &= ~bits
        copy.verified &= ~bits
        runs: list[tuple[int, int]] = []
        for start, length in self._block_ranges(copy, bits):
            tier.used_bytes -= allocated(length)
            tier.blocks -= 1
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((start, length))
        if copy.bitmap or copy.pins:
            self._dirty[copy.key] = copy
            for start, length in runs:
                self._punch(obj, tier, start, length)
            return
        self._remove(obj, copy)
        if not self._file_is_needed(obj, tier, copy.object_size):
            fd = obj.fds.pop(tier.number, None)
            if fd is not None:
                os.close(fd)
            tier.unlink(copy.digest)
        else:
            for start, length in runs:
                self._punch(obj, tier, start, length)

    def _punch(self, obj: CachedObject, tier: Tier, start: int, length: int) -> bool:
        try:
            opened = obj.fds.get(tier.number)
            fd = opened if opened is not None else tier.open_file(obj.id.digest, create=False)
            try:
                return tier.punch(fd, start, length)
            finally:
                if opened is None:
                    os.close(fd)
        except OSError as exc:
            tier.failed(exc)
            return False

    def _file_is_needed(self, obj: CachedObject, tier: Tier, size: int) -> bool:
        if any(c for (t, _), c in obj.copies.items() if t == tier.number and c):
            return True
        if size <= self.block_size * BLOCKS_PER_EXTENT:
            return False
        return any(
            key not in self._removed
            for e in self._index.extents_of(tier.number, obj.id.digest)
            if (key := (tier.number, obj.id.digest, e)) not in self._unsaved
        )

    def _remove(self, obj: CachedObject, copy: Copy) -> None:
        obj.copies[copy.tier, copy.extent] = None
        self._dirty.pop(copy.key, None)
        self._first_use.pop(copy.key, None)
        self._removed[copy.key] = copy.stored_clock

    # -- after an unclean stop ---------------------------------------------------------------------

    def _rows_of(self, tier: Tier, digest: bytes) -> list[Copy] | None:
        """The copies of a version on a tier; None while it is in use (then its file is right, or being made so)."""
        obj = self._objects.get(digest)
        if obj is not None and (obj.refs or obj.flights or any(c and c.pins for c in obj.copies.values())):
            return None
        obj = obj or CachedObject(_Unnamed(digest))  # type: ignore[arg-type]
        extents = set(self._index.extents_of(tier.number, digest)) | {
            e for t, e in obj.copies if t == tier.number
        }
        return [c for e in extents if (c := self._copy(obj, tier.number, e)) is not None]

    def allocated_of(self, tier: Tier, digest: bytes) -> int | None:
        """Disk bytes that a version's rows account for on a tier; None while it is in use."""
        copies = self._rows_of(tier, digest)
        if copies is None:
            return None
        return sum(allocated(n) for c in copies for _, n in self._block_ranges(c, c.bitmap))

    def punch_unknown(self, tier: Tier, digest: bytes) -> None:
        """Give back the blocks of a version's file that no row accounts for."""
        copies = self._rows_of(tier, digest)
        if not copies:
            return
        known = {start for c in copies for start, _ in self._block_ranges(c, c.bitmap)}
        obj = self._objects.get(digest) or CachedObject(_Unnamed(digest))  # type: ignore[arg-type]
        for start in range(0, copies[0].object_size, self.block_size):
            if start not in known:
                self._punch(obj, tier, start, self.block_size)

    def _block_ranges(self, copy: Copy, bits: int) -> Iterator[tuple[int, int]]:
        """(offset, length) of each block in `bits`."""
        for position in range(BLOCKS_PER_EXTENT):
            if bits >> position & 1:
                block = copy.extent * BLOCKS_PER_EXTENT + position
                yield block * self.block_size, block_length(block, copy.object_size, self.block_size)

    # -- in the background -------------------------------------------------------------------------

    async def run(self) -> None:
        """Flush the index, spill and promote, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._flush_loop)
            if len(self.tiers) > 1:
                nursery.start_soon(self._move_loop)

    async def _flush_loop(self) -> None:
        while True:
            await trio.sleep(FLUSH_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what changed to the index; durable when this returns (unless the index fails: then it is kept and said)."""
        async with self._flush_lock:
            self._recent = self._clock
            if not self._dirty and not self._removed:
                return
            saving, self._dirty = self._dirty, {}
            removing, self._removed = self._removed, {}
            saved = []
            before = {}
            for key, copy in saving.items():
                if not copy.bitmap:
                    continue
                saved.append((pack_key(key), pack_copy(copy), copy.clock, copy.stored_clock))
                before[key] = copy.stored_clock
                copy.stored_clock = copy.clock
            self._unsaved = {**saving, **removing}
            self._victims.clear()
            totals = {t.number: (max(0, t.used_bytes), max(0, t.blocks)) for t in self.tiers}
            try:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._index.write, saved, list(removing.items()), totals)
                if self.index_error:
                    log.warning("the cache index can be written again")
                self.index_error = ""
            except (NoRoom, CacheUnusable) as exc:
                if not self.index_error:
                    log.warning("cannot write the cache index, a restart will be colder: %s", exc)
                self.index_error = str(exc)
                for key, clock in before.items():
                    saving[key].stored_clock = clock
                self._dirty = {**saving, **self._dirty}
                self._removed = {**removing, **self._removed}
            finally:
                self._unsaved = {}
                self._victims.clear()

    async def _move_loop(self) -> None:
        ram, ssd = self.tiers[0], self.tiers[1]
        while True:
            await self._spill.wait()
            self._spill = trio.Event()
            if ram.used_bytes > SPILL_ABOVE * ram.limit_bytes():
                await self._spill_oldest(ram, ssd)
            while self._promotions:
                key, obj = self._promotions.popitem(last=False)
                copy = obj.copies.get((key[0], key[2]))
                if copy is not None and copy.bitmap and await self._move(obj, copy, ram, evict=False):
                    self._metrics.promoted_blocks += copy.bitmap.bit_count()

    async def _spill_oldest(self, ram: Tier, ssd: Tier) -> None:
        while ram.used_bytes > SPILL_TO * ram.limit_bytes():
            victim = self._oldest(ram)
            if victim is None:
                return
            obj, copy = victim
            moved = ssd.writable() and await self._move(obj, copy, ssd, evict=True)
            if moved:
                self._metrics.spilled_blocks += copy.bitmap.bit_count()
            elif ram.used_bytes <= ram.limit_bytes():
                return  # nowhere to go and no need to: keep serving from RAM
            else:
                self._metrics.evicted_blocks += copy.bitmap.bit_count()
            if not copy.pins:
                self._drop_blocks(obj, copy, copy.bitmap)

    async def _move(self, obj: CachedObject, copy: Copy, to: Tier, *, evict: bool) -> bool:
        """Copy the blocks that `to` lacks into it. False when it has no room for them or fails."""
        target = self._copy(obj, to.number, copy.extent)
        wanted = copy.bitmap & ~(target.bitmap if target is not None else 0)
        if not wanted:
            return True
        runs = list(self._block_ranges(copy, wanted))
        need = sum(allocated(length) for _, length in runs)
        if not self._make_room(to, need, evict=evict):
            return False
        obj.refs += 1
        copy.pins += 1
        target = self._copy_for_write(obj, to, copy.extent)
        target.pins += 1
        to.used_bytes += need
        done = False
        try:
            source = self._file(obj, self._tier[copy.tier])
            sink = self._file(obj, to, create=True)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_copy_runs, source, sink, runs, limiter=self._threads)
            done = True
        except OSError as exc:
            self._metrics.tier_errors += 1
            to.failed(exc)
        finally:
            obj.refs -= 1
            copy.pins -= 1
            target.pins -= 1
        if not done:
            to.used_bytes -= need
            if not target.bitmap and not target.pins:
                self._remove(obj, target)
                if not self._file_is_needed(obj, to, copy.object_size):
                    to.unlink(copy.digest)
            return False
        verified = copy.verified
        blocks = [start // self.block_size for start, _ in runs]
        self._settle_blocks(target, [(b, copy.checksums[b % BLOCKS_PER_EXTENT]) for b in blocks])
        target.verified &= verified | ~wanted
        return True

    async def aclose(self, spill_deadline_s: float) -> None:
        """Save what RAM holds to the next tier (as far as the deadline allows), then close the index cleanly."""
        if len(self.tiers) > 1:
            with trio.move_on_after(spill_deadline_s, shield=True):
                while (victim := self._oldest(self.tiers[0])) is not None:
                    obj, copy = victim
                    if not await self._move(obj, copy, self.tiers[1], evict=False):
                        break
                    self._drop_blocks(obj, copy, copy.bitmap)
        with trio.CancelScope(shield=True):
            await self.flush()
            for obj in self._objects.values():
                self._close_files(obj)
            await trio.to_thread.run_sync(self._index.close)


class _Unnamed:
    """Stands in for the ObjectId of a version that is only met while evicting: the index keeps digests, not keys."""

    __slots__ = ("digest", "key")

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.key = f"version {digest.hex()}"


def _copy_runs(source: int, sink: int, runs: list[tuple[int, int]]) -> None:
    """Worker thread: copy byte runs between files inside the kernel."""
    for start, length in runs:
        os.lseek(sink, start, os.SEEK_SET)
        done = 0
        while done < length:
            count = os.sendfile(sink, source, start + done, length - done)
            if count == 0:
                raise OSError(5, "short read")
            done += count

"""The cache store: reading cached blocks, and the parts that write, move and evict them.

All state belongs to the trio thread, so no other code changes it while a method without await runs. Worker threads only
move bytes between descriptors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import trio
import xxhash

from cachefs.base.linux import HANGS_AFTER_S, LOOK_EVERY_S
from cachefs.base.metrics import Metrics
from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId, block_length, blocks_covering
from cachefs.store.adopting import Adopting
from cachefs.store.backing import Passthrough
from cachefs.store.catalog import CachedObject, Catalog, Copy, Index
from cachefs.store.eviction import SAME_USE, Eviction, Policy
from cachefs.store.space import CacheWrites, Moves, Pins, Space
from cachefs.store.tier import RAM, Tier

FLUSH_EVERY_S = 1.0
"""How long the index may lag behind the files. After kill -9, blocks written in that time are fetched again. Guessed between
two costs: a kill loses what came in a second, and the disk syncs once a second."""

Buffer = bytes | bytearray | memoryview


Piece = tuple[int, int, int]
"""(block, offset, length): one block's share of a range of bytes."""


class PinnedBlock(NamedTuple):
    """A verified block, as a range of an open file; `checksum` is its xxh3_64."""

    copy: Copy
    fd: int
    offset: int
    length: int
    in_ram: bool
    checksum: int


@dataclass(slots=True)
class Step:
    """A part of a read, for a worker thread: `length` bytes at the offset `at`. `check`: the whole `block`, which contains
    them, is read and its checksum verified."""

    copy: Copy
    block: int
    at: int
    length: int
    check: bool


class Store:
    """This node's blocks, on `tiers` from fastest to slowest (possibly none: then everything passes through the heap).

    Methods of its parts are attributes of the store, too: `catalog` (where blocks lie), `eviction` (its order), `space`
    (accounting), `pins` (versions that users keep), cache writes, moves between tiers, backing files, adopted files."""

    def __init__(
        self,
        index: Index,
        tiers: list[Tier],
        block_size: int,
        verify: str,
        metrics: Metrics,
        clock: Callable[[], float],
        policy: Policy = "auto",
    ) -> None:
        self.tiers = tiers
        self.block_size = block_size
        self.was_clean = index.was_clean
        self._tier = {tier.number: tier for tier in tiers}
        self._metrics = metrics
        self._check_always = verify == "full"
        self._trusting = verify == "none"
        self._closed = False
        # After a crash the files may lag behind the index: then every block is checked, even with verify="none".
        self.catalog = Catalog(index, tiers, block_size, trust=verify == "none" and index.trusted)
        self.eviction = Eviction(self.catalog, index, tiers, policy, clock)
        self.space = Space(self.catalog, self.eviction, tiers, block_size, metrics)
        self._moves = Moves(self.space, tiers[0], tiers[1], clock) if len(tiers) == 2 else None
        self.pins = Pins(self.space)
        cache_writes = CacheWrites(self.space, self._moves)
        files = tiers if not self._check_always else []
        self.backing_files = Passthrough(self.space, files, self._moves, self._verify)
        adopting = Adopting(self.space)

        self.object, self.peek = self.catalog.object, self.catalog.peek
        self.preload, self.whole = self.catalog.preload, self.catalog.whole
        self.datasets = self.eviction.datasets
        self.epoch_progress, self.left_behind = self.eviction.epoch_progress, self.eviction.left_behind
        self.flush = self.eviction.flush
        self.pin, self.unpin, self.evict = self.pins.pin, self.pins.unpin, self.pins.evict
        self.begin_writes, self.begin_bypass = cache_writes.begin, cache_writes.bypass
        self.settle, self.end_write = cache_writes.settle, cache_writes.end
        self.adopt_bytes = adopting.adopt_bytes
        self.adopt, self.recast, self.evict_to_hold = adopting.adopt, adopting.recast, adopting.evict_to_hold
        self.open_backing, self.reopen_backing = self.backing_files.open, self.backing_files.reopen
        self.release_backing, self.restore_backing = self.backing_files.release, self.backing_files.restore
        self.take_out = self.backing_files.take_out
        self.reusable = self.backing_files.reusable
        self.to_make_immutable = self.backing_files.to_make_immutable
        self.make_immutable, self.refuse = self.backing_files.make_immutable, self.backing_files.refuse
        self.prepare_later = self.backing_files.prepare_later

    def eviction_status(self) -> dict[str, Any]:
        """The policy, and the state of the datasets in use, as plain values."""
        datasets = [
            {"name": self.datasets.name(number), **known} for number, known in self.eviction.epochs.status()
        ]
        return {"policy": self.eviction.epochs.policy, "datasets": datasets}

    # -- objects -----------------------------------------------------------------------------------

    def has(self, obj: CachedObject, block: int) -> bool:
        return self.catalog.find(obj, block) is not None or (obj.id.digest, block) in self.space.heap.blocks

    def cached_bytes(self, object_id: ObjectId) -> int:
        """How many bytes of the version lie in any tier."""
        obj = self.peek(object_id)
        held: dict[int, int] = {}
        for copy in self.catalog.all_copies(obj):
            held.update(self.catalog.ranges(copy, copy.bitmap))
        return sum(held.values())

    def layout(self, object_id: ObjectId) -> list[dict[str, Any]]:
        """Where the blocks of a version lie, as plain values: a row for each copy of an extent, with its numbers of blocks,
        and whether it is pinned, remote-owned or in use."""
        return [
            {
                "tier": self._tier[copy.tier].name,
                "extent": copy.extent,
                "blocks": copy.bitmap.bit_count(),
                "verified": copy.verified.bit_count(),
                "in_progress": copy.in_progress.bit_count(),
                "pinned": copy.pinned,
                "remote_owned": copy.key in self.eviction.remote_owned,
                "in_use": copy.pins > 0,
            }
            for copy in self.catalog.all_copies(self.peek(object_id))
        ]

    @property
    def pinned_bytes(self) -> int:
        return self.pins.bytes

    async def list_all(self, object_id: ObjectId) -> None:
        """Have the index list what is cached of a version, so that a start finds it, also after a kill."""
        if not self.catalog.lists_all(object_id):
            await self.flush()

    def renew(self, obj: CachedObject) -> None:
        """Make the version's copies the most recently used ones, without a use for the policy. Protected copies keep their
        age, because a younger one would gain them nothing."""
        for copy in self.catalog.all_copies(obj):
            if not self.eviction.protected(copy):
                self.eviction.touch(copy)

    # -- reading -----------------------------------------------------------------------------------

    def read_now(self, obj: CachedObject, offset: int, size: int, *, count: bool = True) -> Buffer | None:
        """The bytes [offset, offset+size) if they are cached, verified and in memory, so that reading does not wait; else
        None. `count`: count this as a hit. False at the end of a miss."""
        if self._check_always:
            return None
        if size <= 0:
            return b""
        first, last = offset // self.block_size, (offset + size - 1) // self.block_size
        copy = self.catalog.find(obj, first)
        if copy is not None and last // BLOCKS_PER_EXTENT == copy.extent:
            mask = ((2 << (last - first)) - 1) << (first % BLOCKS_PER_EXTENT)
            if copy.verified & mask == mask:
                data = self._read_copy_now(obj, copy, offset, size)
                if data is not None and count:
                    self._hit(obj, copy, last - first + 1)
                return data
        parts: list[Buffer] = []
        for block, at, length in self._pieces(offset, size):
            part: Buffer | None
            in_heap = self.space.heap.blocks.get((obj.id.digest, block))
            if in_heap is not None:
                start = at - block * self.block_size
                part = memoryview(in_heap)[start : start + length]
            elif first == last:
                return None
            else:
                part = self.read_now(obj, at, length, count=False)
            if part is None:
                return None
            parts.append(part)
        if count:
            self.hit(obj, range(first, last + 1))
        return b"".join(parts)

    def _pieces(self, offset: int, size: int) -> Iterator[Piece]:
        """The parts of a range, one for each block."""
        end = offset + size
        while offset < end:
            block = offset // self.block_size
            length = min(end, (block + 1) * self.block_size) - offset
            yield block, offset, length
            offset += length

    def _read_copy_now(self, obj: CachedObject, copy: Copy, offset: int, size: int) -> Buffer | None:
        tier = self._tier[copy.tier]
        if not tier.reads_now or (tier.blocking and copy.tier not in obj.fds):
            return None
        try:
            fd = obj.file(tier)
            if not tier.blocking:
                data: Buffer = os.pread(fd, size, offset)
            else:
                data = bytearray(size)
                if os.preadv(fd, [data], offset, os.RWF_NOWAIT) != size:
                    return None
        except BlockingIOError:
            return None
        except OSError as exc:
            if exc.errno in (errno.EOPNOTSUPP, errno.EINVAL) and tier.blocking:
                tier.reads_now = False  # this file system has no RWF_NOWAIT, so threads do all reads
            else:
                self.space.lost(obj, copy, exc)
            return None
        if len(data) != size:
            self.space.lost(obj, copy, OSError(errno.EIO, "short read"))
            return None
        return data

    async def read(self, obj: CachedObject, offset: int, size: int, *, count: bool = True) -> Buffer | None:
        """The bytes, verified, waiting for the disk if need be. None if a block is not cached, cannot be read, or fails its
        checksum; a failed one is dropped. The caller then fetches it. `count` as in `read_now`."""
        if size <= 0:
            return b""
        parts: list[Step | bytes] = []
        for block, at, length in self._pieces(offset, size):
            copy = self.catalog.find(obj, block)
            if copy is None:
                in_heap = self.space.heap.blocks.get((obj.id.digest, block))
                if in_heap is None:
                    return None
                start = at - block * self.block_size
                parts.append(in_heap[start : start + length])
                continue
            check = self._check_always or not copy.verified >> (block % BLOCKS_PER_EXTENT) & 1
            last = parts[-1] if parts else b""
            if isinstance(last, Step) and last.copy is copy and not check and not last.check:
                last.length += length
            else:
                parts.append(Step(copy, block, at, length, check))
        steps = [part for part in parts if isinstance(part, Step)]
        results = await self._take(obj, steps) if steps else []
        if results is None:
            return None
        judged = [self._judge(obj, step, result) for step, result in zip(steps, results, strict=True)]
        good = [data for data in judged if data is not None]
        if len(good) != len(steps):
            return None
        if count:
            for step in steps:
                self._hit(obj, step.copy, len(blocks_covering(step.at, step.length, self.block_size)))
            self._metrics.heap_hits += len(parts) - len(steps)
        read = iter(good)
        return b"".join(next(read) if isinstance(part, Step) else part for part in parts)

    async def _take(self, obj: CachedObject, steps: list[Step]) -> list[bytes | OSError | None] | None:
        """Run the steps in a thread; see `_take_steps`. None if a disk does not answer. Until the thread has ended, even
        after this has returned, the copies stay pinned and the descriptors open."""
        self.space.pin(*(step.copy for step in steps))
        obj.hold()
        tiers = {step.copy.tier: self._tier[step.copy.tier] for step in steps}
        files = {number: obj.fds.get(number, -1) for number in tiers}
        take = partial(_take_steps, steps, self.block_size, tiers, files, obj.open)

        def finish(_: object) -> None:
            for number, fd in files.items():
                if fd >= 0 and obj.fds.setdefault(number, fd) != fd:
                    os.close(fd)  # another thread has opened the file, too
            for step in steps:
                self.space.unpin(obj, step.copy)
            obj.release()

        try:
            # Tier numbers grow from fast to slow: of two tiers, the slower one has a disk that may hang.
            return await tiers[max(tiers)].disk.run(take, finish)
        except TimeoutError:
            return None

    async def _verify(self, obj: CachedObject, copy: Copy) -> bool:
        """Verify the unverified blocks of a copy. False if one fails, which is dropped, or cannot be read."""
        for start, length in list(self.catalog.ranges(copy, copy.bitmap & ~copy.verified)):
            # It may have been evicted since the last block was read, and another copy may be in its place.
            if not obj.has(copy):
                return False
            step = Step(copy, start // self.block_size, start, length, check=True)
            results = await self._take(obj, [step])
            if results is None or self._judge(obj, step, results[0]) is None:
                return False
        return True

    def _judge(self, obj: CachedObject, step: Step, result: bytes | OSError | None) -> bytes | None:
        """The bytes of a step. None, after dropping what failed, if it could not be read or its checksum does not match."""
        copy, bit = step.copy, 1 << (step.block % BLOCKS_PER_EXTENT)
        if isinstance(result, OSError):
            self.space.lost(obj, copy, result)
            return None
        if result is None:
            self.space.corrupt(obj, copy, bit)
        elif step.check:
            copy.verified |= bit & copy.bitmap
        return result

    def hit(self, obj: CachedObject, blocks: Iterable[int]) -> None:
        """Count these cached blocks as hits, and as uses."""
        for block in blocks:
            copy = self.catalog.find(obj, block)
            if copy is not None:
                self._hit(obj, copy, 1)
            else:
                self._metrics.heap_hits += 1

    def _hit(self, obj: CachedObject, copy: Copy, blocks: int) -> None:
        if copy.tier == RAM:
            self._metrics.ram_hits += blocks
        else:
            self._metrics.ssd_hits += blocks
        # As `touch_if_separate`, but for most reads without a call.
        catalog = self.catalog
        if (copy.used <= catalog.recent or catalog.clock - copy.used >= SAME_USE) and copy.bitmap:
            self.eviction.touch(copy)
            self.eviction.used(obj, copy, hit=True)
            if copy.tier != RAM and self._moves is not None:
                self._moves.used(copy)

    # -- serving other nodes -----------------------------------------------------------------------

    def pin_block(
        self, obj: CachedObject, block: int, *, checked: bool = False, requester: str = ""
    ) -> PinnedBlock | None:
        """The place of a block, if it is cached and verified (or was `checked` just now by `read`); else None. Its bytes
        stay there until `unpin_block`; the caller must hold the object until then. It counts as a use of the `requester`,
        and promotes nothing."""
        copy = self.catalog.find(obj, block)
        if copy is None:
            return None
        position = block % BLOCKS_PER_EXTENT
        if not checked and (self._check_always or not copy.verified >> position & 1):
            return None
        tier = self._tier[copy.tier]
        if tier.blocking and tier.number not in obj.fds:
            return None  # opening the file may take long, and `read` does it in a thread
        try:
            fd = obj.file(tier)
        except OSError as exc:
            self.space.lost(obj, copy, exc)
            return None
        self.space.pin(copy)
        self.eviction.touch(copy)
        self.eviction.used(obj, copy, hit=True, requester=requester)
        length = block_length(block, obj.id.size, self.block_size)
        return PinnedBlock(
            copy, fd, block * self.block_size, length, not tier.blocking, copy.checksums[position]
        )

    def unpin_block(self, obj: CachedObject, block: PinnedBlock) -> None:
        self.space.unpin(obj, block.copy)

    # -- passthrough (see backing.py) --------------------------------------------------------------

    @property
    def passthrough(self) -> bool:
        """False if `open_backing` never succeeds, because each read must be checked or the kernel accepts no tier's
        files."""
        return self.backing_files.possible

    @property
    def hangs(self) -> bool:
        """True if the disk of a tier is down."""
        return any(tier.disk.down for tier in self.tiers)

    # -- in the background -------------------------------------------------------------------------

    async def run(self) -> None:
        """Flush the index, spill and promote, make versions ready for the kernel, until cancelled."""
        async with trio.open_nursery() as nursery:
            if self._moves is not None:
                nursery.start_soon(self._moves.run)
            nursery.start_soon(self.backing_files.run)
            nursery.start_soon(self._watch_disks)
            while True:
                await trio.sleep(FLUSH_EVERY_S)
                for tier in self.tiers[-1:]:
                    await self.space.fit(tier, 0)  # its limit may have become lower
                await self.flush()

    async def _watch_disks(self) -> None:
        while True:
            await trio.sleep(LOOK_EVERY_S)
            for tier in self.tiers:
                tier.disk.look()

    async def aclose(self, spill_deadline_s: float) -> None:
        """Move what RAM holds to SSD as far as the deadline allows, remove the RAM tier, then close the index cleanly."""
        self.backing_files.close()
        if self._moves is not None:
            with trio.move_on_after(spill_deadline_s, shield=True):
                await self._moves.save_all()
        await self.flush()
        ram = self._tier.get(RAM)
        if ram is not None:
            self.catalog.forget_tier(RAM)
            await trio.to_thread.run_sync(ram.remove)
        await self._close_index(HANGS_AFTER_S)

    async def hand_over(self) -> None:
        """Close the index for a daemon that takes over at once, and keep the RAM tier. Instead of `aclose`."""
        await self._close_index(0.0)

    async def _close_index(self, disposal_s: float) -> None:
        """Close the index, cleanly unless removals are not done after `disposal_s` seconds: the next daemon's scrub finishes
        those."""
        self.catalog.remove_leaving()
        for tier in self.tiers:
            if not await trio.to_thread.run_sync(tier.disposal.idle, disposal_s, abandon_on_cancel=True):
                self.catalog.unfinished = True
        # A daemon that verifies no checksums needs files that are as new as the index.
        trusted = self._trusting
        for tier in self.tiers if trusted else ():
            trusted = tier.number == RAM or await trio.to_thread.run_sync(tier.sync)
        with trio.CancelScope(shield=True):
            whole = not self.catalog.index_error
            await self.flush(closing=True)
            await self.catalog.aclose(whole=whole, trusted=trusted)
        self._closed = True

    def abandon(self) -> None:
        """Remove the RAM tier and close the index after a failure, unless `aclose` did. Saves nothing. Blocking."""
        if self._closed:
            return
        self._closed = True
        ram = self._tier.get(RAM)
        if ram is not None:
            ram.remove()
        self.catalog.abandon()


def _take_steps(
    steps: list[Step],
    block_size: int,
    tiers: dict[int, Tier],
    files: dict[int, int],
    open_file: Callable[[Tier], int],
) -> list[bytes | OSError | None]:
    """The bytes of each step, or its OSError, or None if a checksum does not match. For a worker thread: it uses only
    descriptors. `files` are descriptors by tier; those below 0 are opened and replaced."""
    results: list[bytes | OSError | None] = []
    for step in steps:
        try:
            fd = files[step.copy.tier]
            if fd < 0:
                fd = files[step.copy.tier] = open_file(tiers[step.copy.tier])
            if not step.check:
                data = os.pread(fd, step.length, step.at)
                results.append(data if len(data) == step.length else OSError(errno.EIO, "short read"))
                continue
            start = step.block * block_size
            length = block_length(step.block, step.copy.object_size, block_size)
            whole = os.pread(fd, length, start)
            if xxhash.xxh3_64_intdigest(whole) == step.copy.checksums[step.block % BLOCKS_PER_EXTENT]:
                results.append(whole if step.length == length else whole[step.at - start :][: step.length])
            else:
                results.append(None)
        except OSError as exc:
            results.append(exc)
    return results

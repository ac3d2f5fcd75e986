"""The store's front: reading blocks that are here, taking in blocks that come.

All state belongs to the trio thread; a plain method that does not await owns the world while it runs. Worker threads
only ever move bytes between descriptors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import trio

from cachefs.metrics import Metrics
from cachefs.names import BLOCKS_PER_EXTENT, ObjectId, block_length
from cachefs.store.adopting import Adopting
from cachefs.store.backing import Backing, Lending
from cachefs.store.catalog import Catalog
from cachefs.store.datasets import Course, Datasets
from cachefs.store.disk import LOOK_EVERY_S, READ_THREADS
from cachefs.store.epochs import Epochs, Policy
from cachefs.store.fill import Fill
from cachefs.store.filling import Filling
from cachefs.store.heap import Heap
from cachefs.store.index import Copy, Index
from cachefs.store.moves import Moves
from cachefs.store.pins import Pins
from cachefs.store.reading import Step, take_steps
from cachefs.store.room import Evict, Room
from cachefs.store.tier import RAM, Tier
from cachefs.store.versions import CachedObject

FLUSH_EVERY_S = 1.0
"""How long the index may lag behind the files: what a kill -9 can cost in refetches. Guessed."""

DISPOSAL_S = 10.0
"""How long a stop waits for files that are on their way out; what is left then, the next start's scrub finds. Guessed."""

Buffer = bytes | bytearray | memoryview


class Shared(NamedTuple):
    """A verified block, as a range of an open file; `checksum` is its xxh3_64."""

    copy: Copy
    fd: int
    offset: int
    length: int
    in_ram: bool
    checksum: int


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
        eviction: Policy = "auto",
    ) -> None:
        self.tiers = tiers
        self.block_size = block_size
        self.was_clean = index.was_clean
        self._tier = {tier.number: tier for tier in tiers}
        self._metrics = metrics
        self._check_always = verify == "full"
        self._trusting = verify == "none"
        # After a crash the files may lag behind the index: then every block is checked, whatever was asked for.
        self._epochs = Epochs(eviction)
        self._catalog = Catalog(
            *(index, tiers, block_size, self._epochs, clock), trust=verify == "none" and index.trusted
        )
        self.course = Course(self._epochs, self._catalog.datasets)
        self.room = Room(self._catalog, self._tier, block_size, metrics)
        self._closed = False
        self._moves = (
            Moves(self._catalog, self.room, tiers[0], tiers[1], metrics, clock) if len(tiers) == 2 else None
        )
        self.on_retired: Callable[[Backing], None] = lambda backing: None
        self._lending = Lending(
            self._catalog,
            self.room,
            tiers if not self._check_always else [],
            self._moves,
            block_size,
            metrics,
            lambda backing: self.on_retired(backing),
        )
        self.pins = Pins(self._catalog, self.room, tiers, block_size)
        self._heap = Heap()
        self._filling = Filling(self._catalog, self.room, self._moves, self._heap, tiers, block_size, metrics)
        self._adopting = Adopting(self._catalog, self.room, tiers, block_size, metrics)
        self.recast = self._adopting.recast
        self._threads = trio.CapacityLimiter(READ_THREADS)

    @property
    def index_error(self) -> str:
        """Why the index cannot be written, or ""."""
        return self._catalog.index_error

    @property
    def datasets(self) -> Datasets:
        """Which dataset a version belongs to; whoever mounts tells it the prefixes."""
        return self._catalog.datasets

    def eviction_status(self) -> dict[str, Any]:
        """The policy, and what is known of the datasets in use."""
        datasets = [{"name": self.datasets.name(number), **known} for number, known in self._epochs.status()]
        return {"policy": self._epochs.policy, "datasets": datasets}

    # -- objects -----------------------------------------------------------------------------------

    def object(self, object_id: ObjectId) -> CachedObject:
        """The bookkeeping of this version. Who keeps it across an await raises its `refs`, and calls `release`."""
        return self._catalog.object(object_id)

    def look(self, object_id: ObjectId) -> CachedObject:
        """The same for who asks what is here and changes nothing: versions that are only looked at displace no others."""
        return self._catalog.look(object_id)

    def release(self, obj: CachedObject) -> None:
        obj.refs -= 1
        if not obj.refs:
            obj.readahead = None  # the next reader is another
        self.rest(obj)

    def left_behind(self, obj: CachedObject) -> None:
        """Whoever was read ahead of has gone: what has not been read of the version waits for nobody."""
        self._catalog.left_behind(obj)

    def rest(self, obj: CachedObject) -> None:
        """Somebody has finished with the object: when nobody uses it, its descriptors go."""
        if not obj.in_use():
            obj.close_files()

    def has(self, obj: CachedObject, block: int) -> bool:
        return self._catalog.find(obj, block) is not None or self._heap.get(obj.id.digest, block) is not None

    def listed(self, tier: Tier, after: bytes) -> tuple[list[bytes], bytes]:
        """Digests of versions with rows on a tier, a batch at a time: (digests, cursor); an empty cursor is the end."""
        return self._catalog.listed(tier.number, after)

    def lists(self, tier: Tier, digest: bytes) -> bool:
        """Whether a version is in use or has rows on a tier."""
        obj = self._catalog.idle(digest)
        return obj is None or self._catalog.has_copies(obj, tier.number)

    def cached_bytes(self, object_id: ObjectId) -> int:
        """How many bytes of the version lie in any tier."""
        obj = self.look(object_id)
        held: dict[int, int] = {}
        for tier in self.tiers:
            for copy in self._catalog.copies(obj, tier.number):
                held.update(self._catalog.ranges(copy, copy.bitmap))
        return sum(held.values())

    def layout(self, object_id: ObjectId) -> list[dict[str, Any]]:
        """Where the blocks of a version are, as plain values: a row for each tier's copy of an extent, with how many blocks
        there are, how many of them verified, and what keeps or threatens them."""
        obj = self.look(object_id)
        return [
            {
                **{"tier": tier.name, "extent": copy.extent, "blocks": copy.bitmap.bit_count()},
                **{"verified": copy.verified.bit_count(), "arriving": copy.arriving.bit_count()},
                **{"pinned": copy.pinned, "borrowed": copy.key in self._catalog.borrowed},
                "in_use": copy.pins > 0,
            }
            for tier in self.tiers
            for copy in sorted(self._catalog.copies(obj, tier.number), key=lambda copy: copy.extent)
        ]

    def whole(self, obj: CachedObject) -> bool:
        """Whether all blocks of the version lie in some tier."""
        return self.pins.whole(obj)

    @property
    def pinned_bytes(self) -> int:
        return self.pins.bytes

    def pin(self, obj: CachedObject) -> None:
        """What is cached of the version, or will be while it is known, stays until `unpin`, over restarts. Raises `NoRoom`
        beyond the budget."""
        self.pins.pin(obj)

    def unpin(self, obj: CachedObject) -> None:
        """It may be evicted again, like something just used."""
        self.pins.unpin(obj)

    def renew(self, obj: CachedObject) -> None:
        """Let it go after everything that was used up to now. Its age stays where that would be no gain (somebody is still
        to use it in this epoch); the policy takes it for no use."""
        for tier in self.tiers:
            for copy in self._catalog.copies(obj, tier.number):
                if copy.bitmap and not self._catalog.kept(copy):
                    self._catalog.touch(copy)

    def evict(self, obj: CachedObject) -> int:
        """Drop all of the version that is not pinned; how many bytes. What is in use goes with its last user."""
        return self.pins.evict(obj) + self._heap.drop(obj.id.digest)

    # -- reading -----------------------------------------------------------------------------------

    def read_now(self, obj: CachedObject, offset: int, size: int, *, count: bool = True) -> Buffer | None:
        """The bytes, if that takes no waiting: present, verified and not on a device's far side. Else None. `count` says
        that this is a hit, and not the end of a miss."""
        if self._check_always:
            return None
        if size <= 0:
            return b""
        first, last = offset // self.block_size, (offset + size - 1) // self.block_size
        copy = self._catalog.find(obj, first)
        if copy is not None and last // BLOCKS_PER_EXTENT == copy.extent:
            mask = ((2 << (last - first)) - 1) << (first % BLOCKS_PER_EXTENT)
            if copy.verified & mask == mask:
                data = self._read_copy_now(obj, copy, offset, size)
                if data is not None and count:
                    self._hit(obj, copy, last - first + 1)
                return data
        if first == last and copy is not None:
            return None  # not verified yet
        parts: list[Buffer] = []
        for block, at, length in self._pieces(offset, size):
            part: Buffer | None
            kept = self._heap.get(obj.id.digest, block)
            if kept is not None:
                start = at - block * self.block_size
                part = memoryview(kept)[start : start + length]
            elif first == last:
                return None
            else:
                part = self.read_now(obj, at, length, count=False)
            if part is None:
                return None
            parts.append(part)
        if count:
            self.hit(obj, range(first, last + 1))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _pieces(self, offset: int, size: int) -> Iterator[tuple[int, int, int]]:
        """(block, offset, length) of each block's share of the range."""
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
                tier.reads_now = (
                    False  # this file system has no such reads: a thread can wait for all of them
                )
            else:
                self.room.lost(obj, copy, exc)
            return None
        if len(data) != size:
            self.room.lost(obj, copy, OSError(errno.EIO, "short read"))
            return None
        return data

    async def read(self, obj: CachedObject, offset: int, size: int, *, count: bool = True) -> Buffer | None:
        """The bytes, verified, waiting for the disk if need be. None when a block is not here, or turned out bad (it is
        dropped then): fetch it. `count` as above."""
        if size <= 0:
            return b""
        steps: list[Step] = []
        for block, at, length in self._pieces(offset, size):
            copy = self._catalog.find(obj, block)
            if copy is None:
                if self._heap.get(obj.id.digest, block) is not None:
                    return await self._read_pieces(obj, offset, size, count)
                return None
            check = self._check_always or not copy.verified >> (block % BLOCKS_PER_EXTENT) & 1
            if steps and not check and steps[-1].copy is copy and not steps[-1].check:
                steps[-1].length += length
            else:
                steps.append(Step(copy, block, at, length, check))
        results = await self._take(obj, steps)
        if results is None:
            return None
        good = [
            r for s, r in zip(steps, results, strict=True) if self._judge(obj, s, r) and isinstance(r, bytes)
        ]
        if len(good) != len(steps):
            return None
        if count:
            for step in steps:
                self._hit(obj, step.copy, -(-step.length // self.block_size))
        return good[0] if len(good) == 1 else b"".join(good)

    async def _take(self, obj: CachedObject, steps: list[Step]) -> list[bytes | OSError | None] | None:
        """What a thread reads; None when a disk does not answer. Until the thread is done, however long that takes, the
        copies stay pinned and the descriptors open."""
        for step in steps:
            step.copy.pins += 1
        obj.refs += 1
        tiers = {step.copy.tier: self._tier[step.copy.tier] for step in steps}
        files = {number: obj.fds.get(number, -1) for number in tiers}
        take = partial(take_steps, steps, self.block_size, tiers, files, obj.id.digest)

        def finish(_: object) -> None:
            for number, fd in files.items():
                if fd >= 0 and obj.fds.setdefault(number, fd) != fd:
                    os.close(fd)  # another thread has opened it, too
            for step in steps:
                self.room.unpin(obj, step.copy)
            self.release(obj)

        slow = next((tier for tier in tiers.values() if tier.blocking), None)
        if slow is None:
            try:
                return await trio.to_thread.run_sync(take, limiter=self._threads)
            finally:
                finish(None)
        try:
            return await slow.disk.run(take, finish)
        except TimeoutError:
            return None

    async def _read_pieces(self, obj: CachedObject, offset: int, size: int, count: bool) -> Buffer | None:
        """Block by block, for a range of which the heap holds a part."""
        parts = []
        for block, at, length in self._pieces(offset, size):
            kept = self._heap.get(obj.id.digest, block)
            start = at - block * self.block_size
            part: Buffer | None
            if kept is not None:
                part = kept[start : start + length]
                self._metrics.heap_hits += count
            else:
                part = await self.read(obj, at, length, count=count)
            if part is None:
                return None
            parts.append(part)
        return b"".join(parts)

    def _judge(self, obj: CachedObject, step: Step, result: bytes | OSError | None) -> bool:
        copy, bit = step.copy, 1 << (step.block % BLOCKS_PER_EXTENT)
        if isinstance(result, OSError):
            self.room.lost(obj, copy, result)
            return False
        if result is None:
            self.room.corrupt(obj, copy, bit)
            return False
        if step.check:
            copy.verified |= bit & copy.bitmap
        return True

    def hit(self, obj: CachedObject, blocks: Iterable[int]) -> None:
        """Somebody reads these blocks, which are here."""
        for block in blocks:
            copy = self._catalog.find(obj, block)
            if copy is not None:
                self._hit(obj, copy, 1)
            else:
                self._metrics.heap_hits += 1

    def _hit(self, obj: CachedObject, copy: Copy, blocks: int) -> None:
        if copy.tier == RAM:
            self._metrics.ram_hits += blocks
        else:
            self._metrics.ssd_hits += blocks
        self._used(obj, copy)

    def _used(self, obj: CachedObject, copy: Copy) -> None:
        if self._catalog.touch_if_old(copy):
            self._catalog.use(obj, copy, hit=True)
            if copy.tier != RAM and self._moves is not None:
                self._moves.used(copy)

    # -- giving to other nodes ---------------------------------------------------------------------

    def share(
        self, obj: CachedObject, block: int, *, checked: bool = False, asker: str = ""
    ) -> Shared | None:
        """Where the block lies, if it is here and verified (or was `checked` just now, by `read`). It stays there until
        `unshare`; whoever calls keeps the object referenced as long. It is a use for the `asker`, and promotes nothing."""
        copy = self._catalog.find(obj, block)
        if copy is None:
            return None
        position = block % BLOCKS_PER_EXTENT
        if not checked and (self._check_always or not copy.verified >> position & 1):
            return None
        tier = self._tier[copy.tier]
        if tier.blocking and tier.number not in obj.fds:
            return None  # to open it may take long: `read` does it in a thread
        try:
            fd = obj.file(tier)
        except OSError as exc:
            self.room.lost(obj, copy, exc)
            return None
        copy.pins += 1
        if self._catalog.touch_if_old(copy) or asker:
            self._catalog.use(obj, copy, hit=True, asker=asker)
        length = block_length(block, obj.id.size, self.block_size)
        return Shared(copy, fd, block * self.block_size, length, not tier.blocking, copy.checksums[position])

    def unshare(self, obj: CachedObject, shared: Shared) -> None:
        self.room.unpin(obj, shared.copy)

    # -- taking in ---------------------------------------------------------------------------------

    def begin_fill(
        self, obj: CachedObject, start: int, stop: int, *, ahead: bool = False, borrowed: bool = False
    ) -> Fill | None:
        """Room for blocks [start, stop) (within one extent) in the fastest tier that has it, or None. `ahead`: nobody has
        asked for them, so they take the place of nothing that somebody may miss; and once here, they wait for a reader.
        `borrowed`: another node keeps them, so here they take the place of nothing but their like."""
        return self._filling.begin(obj, start, stop, ahead=ahead, borrowed=borrowed)

    def begin_bypass(self, obj: CachedObject, block: int) -> Fill:
        """One block into memory, for a reader that waits for it and whom no tier can serve. So what the heap takes is
        bounded by the readers waiting."""
        return self._filling.bypass(obj, block)

    def settle(self, obj: CachedObject, fill: Fill) -> None:
        """Make the blocks that have wholly landed exist."""
        self._filling.settle(obj, fill)

    def end_fill(self, obj: CachedObject, fill: Fill) -> None:
        """The transfer is over, whole or not: settle what landed, give back what did not."""
        self._filling.end(obj, fill)

    async def adopt(self, object_id: ObjectId, path: Path) -> bool:
        """The whole content of the version is the file at `path`, on the SSD tier's file system, and nobody writes it any
        more: it becomes the version's cache file, verified. Who has it open may go on reading. False: it still is at `path`,
        the caller's to remove, for there is no such tier, no room, the version is (being) cached, or it is no such file."""
        return await self._adopting.adopt(object_id, path)

    async def make_room(self, wanted: int) -> bool:
        """Evict until the SSD tier's disk has `wanted` bytes more than is kept free, for files that are being written there.
        False when nothing more can go. The room is nobody's until it is used."""
        return await self._adopting.make_room(wanted)

    # -- lending whole files to the kernel (see backing.py) ----------------------------------------

    @property
    def lends(self) -> bool:
        """Whether `lend_now` can ever succeed: not when each read must be checked, or no tier's files are taken."""
        return self._lending.possible

    def lend_now(self, obj: CachedObject) -> Backing | None:
        """The version's file, if it is whole and verified on one tier. Who gets it calls `give_back`."""
        return self._lending.lend(obj)

    def must_seal(self, obj: CachedObject) -> bool:
        """Whether `lend_now` will succeed, but may have to wait for a disk unless `seal` was awaited before."""
        return self._lending.to_seal(obj) is not None

    async def seal(self, obj: CachedObject) -> None:
        """Make its file ready for passthrough. Raises nothing."""
        await self._lending.seal(obj)

    def lend_again(self, backing: Backing) -> None:
        """One user more of a backing in use, even if its blocks are forgotten by now: the kernel wants one for all."""
        backing.users += 1

    def give_back(self, backing: Backing) -> None:
        """One user less. Without users it stays registered for the next, as long as its file stays."""
        self._lending.give_back(backing)

    def refuse(self, tier: Tier, reason: str) -> None:
        """The kernel does not take this tier's files."""
        self._lending.refuse(tier, reason)

    def prepare_later(self, obj: CachedObject) -> None:
        """Make `lend_now` succeed for a version that is whole over all tiers: in the background, if there is time."""
        self._lending.prepare_later(obj)

    # -- in the background -------------------------------------------------------------------------

    async def run(self) -> None:
        """Flush the index, spill and promote, make versions ready for the kernel, until cancelled."""
        async with trio.open_nursery() as nursery:
            if self._moves is not None:
                nursery.start_soon(self._moves.run)
            nursery.start_soon(self._lending.run)
            nursery.start_soon(self._watch_disks)
            while True:
                await trio.sleep(FLUSH_EVERY_S)
                # The limit of the last tier may have sunk; a room's worth of victims at a time, for others wait.
                while self.tiers and not self.room.make(self.tiers[-1], 0, evict=Evict.ANY):
                    before = self.tiers[-1].used_bytes
                    await trio.lowlevel.checkpoint()
                    if self.tiers[-1].used_bytes >= before:
                        break
                await self.flush()

    async def _watch_disks(self) -> None:
        while True:
            await trio.sleep(LOOK_EVERY_S)
            for tier in self.tiers:
                tier.disk.look()

    async def flush(self) -> None:
        """Write what changed to the index, durably."""
        await self._catalog.flush()

    async def aclose(self, spill_deadline_s: float) -> None:
        """Save what RAM holds to the next tier (as far as the deadline allows), give the memory back, then close the index
        cleanly."""
        self._lending.close()
        if self._moves is not None:
            with trio.move_on_after(spill_deadline_s, shield=True):
                await self._moves.save_all()
        await self.flush()
        ram = self._tier.get(RAM)
        if ram is not None:
            self._catalog.forget_tier(RAM)
            await trio.to_thread.run_sync(ram.remove)
        for tier in self.tiers:
            if not await trio.to_thread.run_sync(tier.disposal.idle, DISPOSAL_S, abandon_on_cancel=True):
                self._catalog.unfinished = True
        # Whoever does not look at checksums relies on the files being as old as the index.
        trusted = self._trusting
        for tier in self.tiers if trusted else ():
            trusted = tier is ram or await trio.to_thread.run_sync(tier.sync)
        await self._catalog.aclose(trusted=trusted)
        self._closed = True

    def abandon(self) -> None:
        """After a failure: give back the memory and the index, unless `aclose` did. Blocking; saves nothing."""
        if self._closed:
            return
        self._closed = True
        ram = self._tier.get(RAM)
        if ram is not None:
            ram.remove()
        self._catalog.abandon()

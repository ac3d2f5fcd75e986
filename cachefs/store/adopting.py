"""Adopted files: a whole file that was written on the SSD tier's disk becomes the cached version, as it is.

Nothing is copied: its blocks are hashed, room is accounted for, and a thread renames the file to the version's place, where
nothing else puts one meanwhile; then its rows exist. Its writer may still have it open and read from it, so it is immutable,
as after an open in passthrough: no block of it is ever punched out. It goes whole, and its readers keep what they have open.

It is as young as a copy used now, but this is no use: it belongs to no dataset until it is read. Otherwise a checkpoint
beside a dataset would be protected for an epoch, as if this epoch had yet to read it.

A crash before the index has heard of it leaves a file without rows, which the scrub removes.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio
import xxhash

from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId, block_count, block_length
from cachefs.store.catalog import CachedObject, Copy
from cachefs.store.eviction import ANY
from cachefs.store.space import VICTIMS_AT_ONCE, Space
from cachefs.store.tier import SSD, Tier, allocated, checksums

log = logging.getLogger(__name__)

NO_DATASET = 0
"""The dataset of copies that were not read yet. Datasets are hashes, and one of four billion is this."""

HASHED_AT_ONCE = 2
"""Files being hashed at a time, each a thread. Guessed: one does some GB/s, as fast as anything is written."""

HASHED_NOW = 256 << 10
"""A file up to this size is hashed without a thread if the kernel has its pages. Measured: 57 µs, 19 for
100 KB; a thread takes 50 to 100 more."""

ZEROS = bytes(1 << 20)


class Adopting:
    """Into the SSD tier, if there is one."""

    def __init__(self, space: Space) -> None:
        self._catalog = space.catalog
        self._eviction = space.eviction
        self._space = space
        self._tier = next((tier for tier in space.tiers if tier.number == SSD), None)
        self._block_size = space.block_size
        self._metrics = space.metrics
        self._threads = trio.CapacityLimiter(HASHED_AT_ONCE)

    # -- adopting ----------------------------------------------------------------------------------

    async def adopt(self, object_id: ObjectId, path: Path) -> bool:
        """The whole content of the version is the file at `path`, on the SSD tier's file system, and no process writes it
        any more: it becomes the version's cache file, verified. Its readers may go on reading. False if it still is at
        `path`, the caller's to remove: there is no such tier, no room, the version is (being) cached, or it is no such
        file."""
        tier = self._tier
        if tier is None or not tier.writable():
            return False
        obj = self._catalog.object(object_id)
        if self._in_the_way(obj, tier):
            return False
        return await self._held(obj, tier, self._adopt(obj, tier, path))

    async def adopt_bytes(self, object_id: ObjectId, data: bytes) -> bool:
        """The same for the whole content of a small version that lies in memory: a thread makes the cache file of it."""
        tier = self._tier
        if tier is None or not tier.writable() or not data or len(data) != object_id.size:
            return False
        obj = self._catalog.object(object_id)
        if self._in_the_way(obj, tier) or not tier.takes_files:
            return False
        return await self._held(obj, tier, self._adopt_bytes(obj, tier, data))

    async def _held(self, obj: CachedObject, tier: Tier, adopting: Awaitable[bool]) -> bool:
        with obj.held():
            try:
                return await adopting
            except OSError as exc:
                log.debug("cannot keep what was written of %s: %s", obj.id.key, exc)
                if exc.errno != errno.ETIMEDOUT:
                    self._space.failed(tier, exc)
                return False

    async def _adopt_bytes(self, obj: CachedObject, tier: Tier, data: bytes) -> bool:
        async def hashed() -> list[int]:
            starts = range(0, len(data), self._block_size)
            return [xxhash.xxh3_64_intdigest(data[start : start + self._block_size]) for start in starts]

        return await self._become(obj, tier, 0, hashed, partial(tier.put, obj.id.digest, data))

    async def _adopt(self, obj: CachedObject, tier: Tier, path: Path) -> bool:
        size, status = obj.id.size, os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return False
        if status.st_dev != os.stat(tier.path).st_dev:
            return False
        if not size:
            await tier.disk.run(partial(os.unlink, path), _nothing_left)  # there is nothing to keep
            return True
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)

        async def hashed() -> list[int] | None:
            await self._fill_holes(fd, size)
            before = os.fstat(fd)
            found = await self._checksums(fd, size)
            after = os.fstat(fd)
            written = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
            return None if written or after.st_size != size else found

        try:
            here, place = status.st_blocks * 512, partial(tier.take, path, obj.id.digest)
            return await self._become(obj, tier, here, hashed, place)
        finally:
            os.close(fd)

    async def _become(
        self,
        obj: CachedObject,
        tier: Tier,
        here: int,
        hashed: Callable[[], Awaitable[list[int] | None]],
        place: Callable[[], bool],
    ) -> bool:
        """Make room for a version of which the disk has `here` bytes already, have a thread `place` its file, and write its
        rows. False if there is no room, no checksums (`hashed`), or the file is not placed."""
        need = allocated(obj.id.size)
        if not await self._space.fit(tier, need, here=here):
            return False
        tier.reserve(need, here)
        try:
            found = await hashed()
            if found is None or self._in_the_way(obj, tier) or not await self._cleared(obj, tier):
                return False
            taken = await self._placed(obj, tier, place)
        finally:
            tier.freed(need)  # or taken again, as the copies it makes: nothing comes between
        if taken:
            self._put(obj, tier, found)
        self._free_place(obj, tier)
        return taken

    def _in_the_way(self, obj: CachedObject, tier: Tier) -> bool:
        """True if the tier has all of the version already, parts of it are in use there, or blocks of it arrive anywhere."""
        copies = self._catalog.copies(obj, tier.number)
        if tier.number in obj.leaving or any(copy.pins for copy in copies):
            return True
        if any(copy is not None and copy.arriving for copy in obj.copies.values()):
            return True
        verified = sum(copy.verified.bit_count() for copy in copies)
        return 0 < verified == block_count(obj.id.size, self._block_size)

    async def _cleared(self, obj: CachedObject, tier: Tier) -> bool:
        """Drop the blocks that the tier has, and wait until their file has gone: it has the name of the new one."""
        digest = obj.id.digest
        for copy in self._catalog.copies(obj, tier.number):
            if obj.copies.get((tier.number, copy.extent)) is copy:  # else it went with another one
                self._space.drop(obj, copy, copy.bitmap)
        while tier.disposal.pending(digest):
            await trio.to_thread.run_sync(tier.disposal.settle, digest, abandon_on_cancel=True)
        return not (self._in_the_way(obj, tier) or self._catalog.copies(obj, tier.number))

    async def _placed(self, obj: CachedObject, tier: Tier, place: Callable[[], bool]) -> bool:
        """What `place` returns, in a thread: whether the version's file is in its place now. Nothing else puts one there
        until the caller says `_free_place`. OSError; what the disk still does when it was given up is undone."""
        digest = obj.id.digest
        ended = given_up = placed = False

        def end(result: bool | None) -> None:
            nonlocal ended, placed
            ended, placed = True, bool(result)
            if given_up:
                undo()

        def undo() -> None:
            if placed:
                tier.unlink(digest)
            self._free_place(obj, tier)

        obj.close_file(tier.number)
        obj.hold()
        obj.leaving.add(tier.number)
        try:
            return await tier.disk.run(place, end)
        except BaseException:
            given_up = True
            if ended:
                undo()
            raise

    def _free_place(self, obj: CachedObject, tier: Tier) -> None:
        obj.leaving.discard(tier.number)
        obj.release()

    def _put(self, obj: CachedObject, tier: Tier, checksums: list[int]) -> None:
        """Write rows for all of a file that is in its place; the tier has none of its blocks. Copies in RAM stay: they are
        equal, and cost nothing to drop. Measured: 16 µs a row, so a file of 16 GiB stops the trio thread for 16 ms."""
        obj.immutable.add(tier.number)
        for first in range(0, len(checksums), BLOCKS_PER_EXTENT):
            found = checksums[first : first + BLOCKS_PER_EXTENT]
            bits = (1 << len(found)) - 1
            extent = first // BLOCKS_PER_EXTENT
            copy = self._catalog.create(obj, tier.number, extent, obj.id.size, NO_DATASET)
            copy.checksums[: len(found)] = found
            self._space.reserve(copy, bits)
            self._space.land(copy, bits, bits)
            self._eviction.touch(copy)
            copy.used = 0  # its first reader is a use, however soon it comes
        tier.worked()
        self._metrics.admitted_blocks += len(checksums)
        self._metrics.adopted_versions += 1

    async def recast(self, old: ObjectId, new: ObjectId) -> bool:
        """The origin's object `old` is now `new`, byte for byte: the same file goes on under the new name, if all of it lies
        here, verified and immutable, and `old` is forgotten. False if not: then `new` is fetched when it is read."""
        tier, size = self._tier, new.size
        if tier is None or not tier.writable() or not size or old.size != size:
            return False
        was, obj = self._catalog.object(old), self._catalog.object(new)
        if self._copies_of_all(was, tier) is None or self._in_the_way(obj, tier):
            return False
        if self._catalog.copies(obj, tier.number) or tier.disposal.pending(new.digest):
            return False
        need = allocated(size)
        with was.held(), obj.held():
            try:
                await self._placed(obj, tier, partial(tier.link, old.digest, new.digest))
            except OSError as exc:
                log.debug("cannot keep %s under its new name: %s", new.key, exc)
                return False
            copies = self._copies_of_all(was, tier)  # by now
            if copies is not None:
                checksums = [c for copy in copies for c in copy.checksums[: copy.bitmap.bit_count()]]
                for copy in copies:
                    if copy.bitmap:  # else it went with the first: the file goes whole
                        self._space.drop(was, copy, copy.bitmap)
                if self._space.evict_for(tier, need, ANY, here=need):
                    self._put(obj, tier, checksums)
                    self._free_place(obj, tier)
                    return True
            tier.unlink(new.digest)
            self._free_place(obj, tier)
        return False

    def _copies_of_all(self, obj: CachedObject, tier: Tier) -> list[Copy] | None:
        """The copies of a version in their order, if they are all of it, verified, in a file that is immutable."""
        copies = sorted(self._catalog.copies(obj, tier.number), key=lambda copy: copy.extent)
        verified = sum((copy.verified & copy.bitmap).bit_count() for copy in copies)
        whole = verified == block_count(obj.id.size, self._block_size)
        return copies if whole and tier.immutable(obj.id.digest) else None

    async def _fill_holes(self, fd: int, size: int) -> None:
        """A hole counts nothing on the disk, and to the scrub it is a block that is gone: so zeros are written there."""
        at = 0
        step = BLOCKS_PER_EXTENT * self._block_size
        while at < size and (at := os.lseek(fd, at, os.SEEK_HOLE)) < size:
            stop = min(size, at + step)
            await trio.to_thread.run_sync(_write_zeros, fd, at, stop, limiter=self._threads)
            at = stop

    async def _checksums(self, fd: int, size: int) -> list[int]:
        """xxh3_64 of all blocks, an extent at a time: between them it can be cancelled, and other tasks run."""
        blocks = [
            (b * self._block_size, block_length(b, size, self._block_size))
            for b in range(block_count(size, self._block_size))
        ]
        if size <= HASHED_NOW:
            with suppress(OSError):  # then it waits for the disk, or fails again
                return checksums(fd, blocks, os.RWF_NOWAIT)
        found: list[int] = []
        while len(found) < len(blocks):
            some = blocks[len(found) : len(found) + BLOCKS_PER_EXTENT]
            found += await trio.to_thread.run_sync(checksums, fd, some, limiter=self._threads)
        return found

    # -- room for what is being written ------------------------------------------------------------

    async def make_room(self, wanted: int) -> bool:
        """Evict until the SSD tier's disk has `wanted` bytes more than is kept free, for files that are being written there.
        False if nothing more can go. The room is not reserved."""
        tier = self._tier
        if tier is None:
            return False
        # Counted, not looked at again: some file systems free what was unlinked a little later.
        goal = tier.used_bytes - (wanted - tier.spare_bytes())
        victims = 0
        while tier.used_bytes > goal:
            victim = self._eviction.victim(tier.number)
            if victim is None:
                return False
            obj, copy = victim
            self._metrics.evicted_blocks += self._space.drop(obj, copy, copy.bitmap)
            victims += 1
            if victims % VICTIMS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return True


def _nothing_left(_: object) -> None:
    pass


def _write_zeros(fd: int, start: int, stop: int) -> None:
    """Write zeros into the holes of a range, in a worker thread."""
    while start < stop:
        try:
            data = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno != errno.ENXIO:
                raise
            data = stop  # a hole up to the end
        end = min(data, stop)
        while start < end:
            start += os.pwrite(fd, ZEROS[: end - start], start)
        if start < stop:
            start = os.lseek(fd, start, os.SEEK_HOLE)

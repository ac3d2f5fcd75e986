"""Adopted files: a whole file that was written on the SSD tier's disk becomes the cache file of its version.

Nothing is copied: the blocks are hashed, space is reserved, and a thread renames the file to the path of the version's cache
file. Then the rows are made; a crash before leaves a file without rows, which the scrub removes. A program may still have
the file open and read it, so it is immutable, as after an open in passthrough.

The copies are as young as ones used now, but adopting is no use: they belong to no dataset until they are read. Otherwise a
checkpoint beside a dataset would be protected for an epoch, as a file that this epoch should still read.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio
import xxhash

from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId, block_count, block_length
from cachefs.store.catalog import Backing, CachedObject, Copy
from cachefs.store.eviction import ANY
from cachefs.store.space import SPILL_ABOVE, VICTIMS_AT_ONCE, Space
from cachefs.store.tier import RAM, READ_THREADS, SSD, Tier, allocated, checksums, next_data

log = logging.getLogger(__name__)

NO_DATASET = 0
"""The dataset of copies that were not read yet. Datasets are 32-bit hashes, so one of four billion has this number, too."""

ZEROS = bytes(1 << 20)


@dataclass(eq=False, slots=True)
class _File:
    """Content that becomes the cache file of a version. `hashed` returns its checksums, or None if it has changed. `place`
    moves or writes it to the path of the cache file, in a thread. `already_there` bytes of it lie on the disk already."""

    obj: CachedObject
    hashed: Callable[[], Awaitable[list[int] | None]]
    place: Callable[[], bool]
    already_there: int = 0
    checksums: list[int] | None = None

    @property
    def need(self) -> int:
        return allocated(self.obj.id.size)


class Adopting:
    """Adopts files into the SSD tier, if there is one, and contents into the RAM tier, too."""

    def __init__(self, space: Space) -> None:
        self._catalog = space.catalog
        self._eviction = space.eviction
        self._space = space
        self._tiers = {tier.number: tier for tier in space.tiers}
        self._tier = self._tiers.get(SSD)
        self._block_size = space.block_size
        self._metrics = space.metrics
        self._threads = trio.CapacityLimiter(READ_THREADS)

    # -- adopting ----------------------------------------------------------------------------------

    async def adopt(self, object_id: ObjectId, path: Path) -> bool:
        """Make the file at `path`, which is the version's whole content, its cache file, verified. It must lie on the SSD
        tier's file system, and no process may write it any more; its readers may go on. False if the file is still at
        `path`, for the caller to remove: there is no such tier, no space, the version is (being) cached, or the file does
        not fit the version."""
        tier = self._tier
        if tier is None or not tier.writable():
            return False
        obj = self._catalog.object(object_id)
        if self._in_the_way(obj, tier):
            return False
        with obj.held():
            try:
                return await self._adopt(obj, tier, path)
            except OSError as exc:
                self._failed(obj, tier, exc)
                return False

    async def adopt_bytes(self, versions: Sequence[tuple[ObjectId, bytes]]) -> list[bool]:
        """`adopt` for whole contents of small versions in memory: into the RAM tier if it need not spill for them, else
        into the SSD tier. One thread writes all their cache files. Returns for each version whether it is cached now."""
        tier = self._tier_for(sum(allocated(len(data)) for _, data in versions))
        files = dict[ObjectId, _File]()
        if tier is None:
            return [False] * len(versions)
        with ExitStack() as held:
            for object_id, data in versions:
                obj = self._catalog.object(object_id)
                cached = any(self._in_the_way(obj, one) for one in self._tiers.values())
                if data and len(data) == object_id.size and not cached:
                    held.enter_context(obj.held())
                    place = partial(tier.put, object_id.digest, data)
                    files[object_id] = _File(obj, partial(self._hashed, data), place)
            try:
                kept = dict(zip(files, await self._become(list(files.values()), tier), strict=True))
            except OSError as exc:
                self._failed(obj, tier, exc)
                kept = {}
        return [kept.get(object_id, False) for object_id, _ in versions]

    def _tier_for(self, need: int) -> Tier | None:
        """The tier for contents of `need` bytes; None if none takes them. Measured while files of 100 KB are made and
        removed: a thread spends 0.2 to 0.5 ms on each file in ext4, and 0.1 in a tmpfs."""
        ram, ssd = self._tiers.get(RAM), self._tier
        if ram is not None and ram.writable() and ram.takes_files:
            limit = ram.limit_bytes()
            if ram.own_bytes + need <= SPILL_ABOVE * limit and ram.counted_bytes() + need <= limit:
                return ram
        return ssd if ssd is not None and ssd.writable() and ssd.takes_files else None

    async def _hashed(self, data: bytes) -> list[int]:
        starts = range(0, len(data), self._block_size)
        return [xxhash.xxh3_64_intdigest(data[start : start + self._block_size]) for start in starts]

    def _failed(self, obj: CachedObject, tier: Tier, exc: OSError) -> None:
        log.debug("cannot keep what was written of %s: %s", obj.id.key, exc)
        if exc.errno != errno.ETIMEDOUT:
            self._space.failed(tier, exc)

    async def _adopt(self, obj: CachedObject, tier: Tier, path: Path) -> bool:
        size, status = obj.id.size, os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return False
        if status.st_dev != os.stat(tier.path).st_dev:
            return False
        if not size:
            await tier.disk.run(partial(os.unlink, path), lambda _: None)  # an empty version has no blocks
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
            place = partial(tier.move_in, path, obj.id.digest)
            return all(await self._become([_File(obj, hashed, place, status.st_blocks * 512)], tier))
        finally:
            os.close(fd)

    async def _become(self, files: Sequence[_File], tier: Tier) -> list[bool]:
        """Reserve space for versions, have a thread place their files, and make their rows. A version is left out if there
        is no space for it, if it has no checksums, or if its file is not placed. Returns which were adopted."""
        reserved, ready = list[_File](), list[_File]()
        try:
            for file in files:
                if await self._space.fit(tier, file.need, already_there=file.already_there):
                    tier.reserve(file.need, file.already_there)
                    reserved.append(file)
            for file in reserved:
                file.checksums = await file.hashed()
                if file.checksums is not None and not self._in_the_way(file.obj, tier):
                    await self._clear(file.obj, tier)
                    ready.append(file)
            # Checked only now, after the awaits above.
            ready = [file for file in ready if self._is_free(file.obj, tier)]
            placed = await self._placed([file.obj for file in ready], tier, [file.place for file in ready])
        finally:
            for file in reserved:
                # `_put` below reserves it again for the copies, without an await between.
                tier.freed(file.need)
        taken = {file for file, done in zip(ready, placed, strict=True) if done is True}
        for file in ready:
            if file in taken and file.checksums is not None:
                self._put(file.obj, tier, file.checksums)
            self._free_place(file.obj, tier)
        for file, done in zip(ready, placed, strict=True):
            # After the rows of the others are made, because a full disk lowers the limit to what is used by then.
            if isinstance(done, OSError):
                self._failed(file.obj, tier, done)
        return [file in taken for file in files]

    def _in_the_way(self, obj: CachedObject, tier: Tier) -> bool:
        """True if the tier has all of the version, verified, if copies there are in use, or if any tier's are being
        written."""
        number, verified = tier.number, 0
        for copy in self._catalog.copies(obj, number):
            if copy.pins:
                return True
            verified += copy.verified.bit_count()
        for one in obj.copies.values():
            if one is not None and one.in_progress:
                return True
        return number in obj.leaving or 0 < verified == block_count(obj.id.size, self._block_size)

    async def _clear(self, obj: CachedObject, tier: Tier) -> None:
        """Drop the blocks that the tier has, and wait until their file is removed, because the new one gets its path."""
        digest = obj.id.digest
        for copy in self._catalog.copies(obj, tier.number):
            # A copy that is gone was dropped with another one.
            if obj.copies.get((tier.number, copy.extent)) is copy:
                self._space.drop(obj, copy, copy.bitmap)
        while tier.disposal.pending(digest):
            await trio.to_thread.run_sync(tier.disposal.wait_for, digest, abandon_on_cancel=True)

    def _is_free(self, obj: CachedObject, tier: Tier) -> bool:
        return not (self._in_the_way(obj, tier) or self._catalog.copies(obj, tier.number))

    async def _placed(
        self, objs: Sequence[CachedObject], tier: Tier, places: Sequence[Callable[[], bool]]
    ) -> list[bool | OSError]:
        """Call each of `places` in a thread; returns what they return or raise. True: the version's file is in its place. No
        other task creates one there until the caller calls `_free_place`. Raises OSError if the disk is down; files that
        the thread places after that are removed."""
        if not objs:
            return []
        ended, given_up, placed = False, False, list[bool | OSError]()

        def end(result: list[bool | OSError] | None) -> None:
            nonlocal ended, placed
            ended, placed = True, result or []
            if given_up:
                undo()

        def undo() -> None:
            for obj, done in itertools.zip_longest(objs, placed):
                if done is True:
                    self._displace(obj, tier)
                self._free_place(obj, tier)

        for obj in objs:
            obj.close_file(tier.number)
            obj.hold()
            obj.leaving.add(tier.number)
        try:
            return await tier.disk.run(partial(_each, places), end)
        except BaseException:
            given_up = True
            if ended:
                undo()
            raise

    def _displace(self, obj: CachedObject, tier: Tier) -> None:
        """Remove a file that was placed and gets no rows. Meanwhile a caller may have seen that it is immutable."""
        tier.unlink(obj.id.digest)
        obj.immutable.discard(tier.number)

    def _free_place(self, obj: CachedObject, tier: Tier) -> None:
        obj.leaving.discard(tier.number)
        obj.release()

    def _put(self, obj: CachedObject, tier: Tier, checksums: list[int]) -> None:
        """Make the rows of a file that is in its place; the tier must have no copies of the version. Copies in RAM stay:
        they are equal, and can be dropped at once. Measured: 16 µs a row, so a file of 16 GiB stops the trio thread for 16
        ms."""
        obj.immutable.add(tier.number)
        for first in range(0, len(checksums), BLOCKS_PER_EXTENT):
            found = checksums[first : first + BLOCKS_PER_EXTENT]
            bits = (1 << len(found)) - 1
            extent = first // BLOCKS_PER_EXTENT
            copy = self._catalog.create(obj, tier.number, extent, obj.id.size, NO_DATASET)
            copy.checksums[: len(found)] = found
            self._space.reserve(copy, bits)
            self._space.commit(copy, bits, bits)
            self._eviction.touch(copy)
            copy.used = 0  # so that its first read is a separate use, however soon
        tier.worked()
        self._metrics.admitted_blocks += len(checksums)
        self._metrics.adopted_versions += 1

    async def recast(self, old: ObjectId, new: ObjectId) -> bool:
        """Make the cache file of `old` that of `new`, because the origin's object has the same bytes under a new name or
        version. `old` is dropped. False unless all of `old` lies on one tier, verified and immutable, and `new` is not open
        in passthrough; then `new` is fetched when it is read."""
        old_obj, obj, size = self._catalog.object(old), self._catalog.object(new), new.size
        having = (tier for tier in self._tiers.values() if self._copies_of_all(old_obj, tier) is not None)
        tier = next(having, None)
        if tier is None or not tier.writable() or not size or old.size != size or self._in_the_way(obj, tier):
            return False
        if self._catalog.copies(obj, tier.number) or tier.disposal.pending(new.digest):
            return False
        need = allocated(size)
        with old_obj.held(), obj.held():
            try:
                (linked,) = await self._placed([obj], tier, [partial(tier.link, old.digest, new.digest)])
                if isinstance(linked, OSError):
                    self._free_place(obj, tier)
                    raise linked
            except OSError as exc:
                log.debug("cannot keep %s under its new name: %s", new.key, exc)
                return False
            copies = self._copies_of_all(old_obj, tier)  # asked again, after the await above
            # A version has one backing file, and that of `old` would replace one of `new` on another tier.
            if copies is not None and obj.backing is None:
                checksums = [c for copy in copies for c in copy.checksums[: copy.bitmap.bit_count()]]
                for copy in copies:
                    # An empty copy was dropped with the first, because an immutable file is dropped as a whole.
                    if copy.bitmap:
                        self._space.drop(old_obj, copy, copy.bitmap)
                if self._space.evict_for(tier, need, ANY, already_there=need):
                    self._put(obj, tier, checksums)
                    self._free_place(obj, tier)
                    # A backing file without users was retired by `drop`.
                    if old_obj.backing is not None and old_obj.backing.tier is tier:
                        self._recast_backing(old_obj.backing, obj)
                    return True
            self._displace(obj, tier)
            self._free_place(obj, tier)
        return False

    def _recast_backing(self, backing: Backing, obj: CachedObject) -> None:
        """Make `obj`, whose file on the same tier is a link to that of `backing`, the version of `backing` and its users.
        The next open of `obj` then shares the file with them, and `take_out` finds it."""
        old_obj, old_copies = backing.object, backing.copies
        old_obj.backing, obj.backing = None, backing
        backing.object, backing.copies = obj, self._catalog.copies(obj, backing.tier.number)
        self._space.pin(*backing.copies)
        self._space.unpin(old_obj, *old_copies)
        old_obj.close_if_unused()

    def _copies_of_all(self, obj: CachedObject, tier: Tier) -> list[Copy] | None:
        """The copies of a version in order, if they are all of it, verified, in an immutable file; else None."""
        copies = self._catalog.copies(obj, tier.number)
        verified = sum((copy.verified & copy.bitmap).bit_count() for copy in copies)
        whole = verified == block_count(obj.id.size, self._block_size)
        return copies if whole and tier.immutable(obj.id.digest) is not False else None

    async def _fill_holes(self, fd: int, size: int) -> None:
        """Write zeros into a file's holes: a hole takes no disk space, and the scrub would take it for a lost block."""
        at = 0
        step = BLOCKS_PER_EXTENT * self._block_size
        while at < size and (at := os.lseek(fd, at, os.SEEK_HOLE)) < size:
            stop = min(size, at + step)
            await trio.to_thread.run_sync(_write_zeros, fd, at, stop, limiter=self._threads)
            at = stop

    async def _checksums(self, fd: int, size: int) -> list[int]:
        """xxh3_64 of all blocks. One call of a thread hashes one extent, so that this can be cancelled between."""
        blocks = [
            (b * self._block_size, block_length(b, size, self._block_size))
            for b in range(block_count(size, self._block_size))
        ]
        found: list[int] = []
        while len(found) < len(blocks):
            some = blocks[len(found) : len(found) + BLOCKS_PER_EXTENT]
            found += await trio.to_thread.run_sync(checksums, fd, some, limiter=self._threads)
        return found

    # -- space for files that are being written ----------------------------------------------------

    async def evict_to_hold(self, wanted: int) -> bool:
        """Evict until the SSD tier's disk has `wanted` bytes more than are kept free, for files that are being written
        there. False if nothing more can be evicted. The space is not reserved."""
        tier = self._tier
        if tier is None:
            return False
        # Counted, not read from the disk again: some file systems free unlinked bytes a little later.
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


def _each(calls: Sequence[Callable[[], bool]]) -> list[bool | OSError]:
    """Call each in a worker thread; returns what they return or raise."""
    found: list[bool | OSError] = []
    for call in calls:
        try:
            found.append(call())
        except OSError as exc:
            found.append(exc)
    return found


def _write_zeros(fd: int, start: int, stop: int) -> None:
    """Write zeros into the holes of a range, in a worker thread."""
    while start < stop:
        end = min(next_data(fd, start), stop)
        while start < end:
            start += os.pwrite(fd, ZEROS[: end - start], start)
        if start < stop:
            start = os.lseek(fd, start, os.SEEK_HOLE)

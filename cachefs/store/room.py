"""Making room: which blocks go, and how their bytes are given back.

A file goes with its last block; blocks of a file that stays are punched out. While a copy is pinned (being filled, moved or
read by a thread) its blocks can be forgotten, so that nobody finds them, but their bytes stay in the file until the last pin
is gone: somebody may be about to read them.
"""

from __future__ import annotations

import errno
import os

from cachefs.metrics import Metrics
from cachefs.names import BLOCKS_PER_EXTENT
from cachefs.store.catalog import CachedObject, Catalog
from cachefs.store.index import Copy
from cachefs.store.tier import Tier, allocated


class Room:
    """Eviction and accounting for all tiers."""

    def __init__(self, catalog: Catalog, tiers: dict[int, Tier], block_size: int, metrics: Metrics) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._block_size = block_size
        self._metrics = metrics

    def make(self, tier: Tier, need: int, *, evict: bool) -> bool:
        """Whether `need` bytes fit now, after evicting (when allowed) what was used least lately."""
        while tier.used_bytes + need > (limit := tier.limit_bytes()):
            if not evict or need > limit:
                return False
            victim = self._catalog.oldest(tier.number)
            if victim is None:
                return False
            obj, copy = victim
            self._metrics.evicted_blocks += copy.bitmap.bit_count()
            self.drop(obj, copy, copy.bitmap)
        return True

    def drop(self, obj: CachedObject, copy: Copy, bits: int) -> None:
        """Remove blocks from a copy, and give their bytes back as soon as nobody uses the copy."""
        bits &= copy.bitmap
        tier = self._tiers[copy.tier]
        copy.bitmap &= ~bits
        copy.verified &= ~bits
        copy.forgotten |= bits
        tier.blocks -= bits.bit_count()
        tier.unlist(sum(allocated(length) for _, length in self._catalog.ranges(copy, bits)))
        self._catalog.changed(copy)
        if not copy.pins:
            self._give_back(obj, copy)

    def unpin(self, obj: CachedObject, copy: Copy) -> None:
        """One user of the copy less."""
        copy.pins -= 1
        if not copy.pins and (copy.forgotten or not copy.bitmap):
            self._give_back(obj, copy)

    def _give_back(self, obj: CachedObject, copy: Copy) -> None:
        tier = self._tiers[copy.tier]
        freed = list(self._catalog.ranges(copy, copy.forgotten))
        copy.forgotten = 0
        tier.give_back(sum(allocated(length) for _, length in freed))
        if not copy.bitmap:
            self._catalog.remove(obj, copy)
            if not self._file_is_needed(obj, tier, copy.object_size):
                fd = obj.fds.pop(tier.number, None)
                if fd is not None:
                    os.close(fd)
                tier.unlink(copy.digest)
                return
        self.punch(obj, tier, freed)

    def refilled(self, copy: Copy, bits: int) -> None:
        """Blocks came again before their forgotten bytes were given back: those bytes are theirs now."""
        again = copy.forgotten & bits
        if again:
            copy.forgotten &= ~again
            self._tiers[copy.tier].give_back(
                sum(allocated(length) for _, length in self._catalog.ranges(copy, again))
            )

    def _file_is_needed(self, obj: CachedObject, tier: Tier, size: int) -> bool:
        if size > self._block_size * BLOCKS_PER_EXTENT:
            return bool(self._catalog.copies(obj, tier.number))
        return any(c for (t, _), c in obj.copies.items() if t == tier.number and c)

    def punch(self, obj: CachedObject, tier: Tier, ranges: list[tuple[int, int]]) -> None:
        """Give byte ranges of a version's file back to the disk."""
        runs: list[tuple[int, int]] = []
        for start, length in ranges:
            length = allocated(length)  # to the end of its page: a part of a page would only be zeroed
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((start, length))
        if not runs:
            return
        opened = obj.fds.get(tier.number)
        try:
            fd = opened if opened is not None else tier.open_file(obj.id.digest, create=False)
            try:
                for start, length in runs:
                    tier.punch(fd, start, length)
            finally:
                if opened is None:
                    os.close(fd)
        except OSError as exc:
            tier.failed(exc)

    def lost(self, obj: CachedObject, copy: Copy, exc: OSError) -> None:
        """A tier failed to give what the index says it has: a miss, and the tier is watched."""
        tier = self._tiers[copy.tier]
        self._metrics.tier_errors += 1
        tier.failed(exc)
        self.drop(obj, copy, copy.bitmap)

    def file_for_write(self, obj: CachedObject, tier: Tier) -> int:
        """The version's file, made when there is none. Blocks that an earlier, vanished file held are forgotten first: in
        the new one they would read as zeros."""
        try:
            return obj.file(tier)
        except FileNotFoundError:
            pass
        for copy in self._catalog.copies(obj, tier.number):
            if copy.bitmap:
                self.lost(obj, copy, OSError(errno.ENOENT, "its file vanished"))
        fd = obj.fds[tier.number] = tier.open_file(obj.id.digest, create=True)
        return fd

    # -- after an unclean stop (see scrub.py) ------------------------------------------------------

    def reclaim(self, tier: Tier, digest: bytes, on_disk_bytes: int) -> int:
        """Make a file that takes `on_disk_bytes` and its rows agree. Returns the bytes freed (negative: blocks that rows
        spoke of and the file has not)."""
        obj = self._catalog.idle(digest)
        if obj is None:
            return 0
        copies = [c for c in self._catalog.copies(obj, tier.number) if c.bitmap]
        known = dict(r for c in copies for r in self._catalog.ranges(c, c.bitmap))
        excess = on_disk_bytes - sum(map(allocated, known.values()))
        if not copies:
            tier.unlink(digest)
            return excess
        if excess == 0 and copies[0].object_size <= self._block_size:
            return 0  # one block, and it is there; with more blocks, a hole may hide a stray
        try:
            fd = obj.file(tier)
            for start in range(0, copies[0].object_size, self._block_size):
                if start not in known and _has_data(fd, start, self._block_size):
                    self.punch(obj, tier, [(start, self._block_size)])
            for copy in copies:
                holes = [s for s, n in self._catalog.ranges(copy, copy.bitmap) if not _is_whole(fd, s, n)]
                self.drop(obj, copy, sum(1 << s // self._block_size % BLOCKS_PER_EXTENT for s in holes))
        except OSError as exc:
            for copy in copies:
                self.lost(obj, copy, exc)
        finally:
            obj.close_files()
        return excess


def _is_whole(fd: int, start: int, length: int) -> bool:
    """Whether the range is data throughout (a hole begins at the end of the file at the latest)."""
    try:
        return (
            os.lseek(fd, start, os.SEEK_DATA) == start and os.lseek(fd, start, os.SEEK_HOLE) >= start + length
        )
    except OSError as exc:
        if exc.errno == errno.ENXIO:
            return False
        raise


def _has_data(fd: int, start: int, length: int) -> bool:
    try:
        return os.lseek(fd, start, os.SEEK_DATA) < start + length
    except OSError as exc:
        if exc.errno == errno.ENXIO:
            return False
        raise

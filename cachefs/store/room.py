"""Making room: which blocks go, and how their bytes are given back.

A file goes with its last block; blocks of a file that stays are punched out. Nothing that is pinned (being filled, moved
or read by a thread) is touched.
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
        """Remove blocks from a copy and give their bytes back."""
        bits &= copy.bitmap
        tier = self._tiers[copy.tier]
        copy.bitmap &= ~bits
        copy.verified &= ~bits
        freed = list(self._catalog.ranges(copy, bits))
        tier.used_bytes -= sum(allocated(length) for _, length in freed)
        tier.blocks -= len(freed)
        if copy.bitmap or copy.pins:
            self._catalog.changed(copy)
        else:
            self._catalog.remove(obj, copy)
            if not self._file_is_needed(obj, tier, copy.object_size):
                fd = obj.fds.pop(tier.number, None)
                if fd is not None:
                    os.close(fd)
                tier.unlink(copy.digest)
                return
        self.punch(obj, tier, freed)

    def _file_is_needed(self, obj: CachedObject, tier: Tier, size: int) -> bool:
        if size > self._block_size * BLOCKS_PER_EXTENT:
            return bool(self._catalog.copies(obj, tier.number))
        return any(c for (t, _), c in obj.copies.items() if t == tier.number and c)

    def punch(self, obj: CachedObject, tier: Tier, ranges: list[tuple[int, int]]) -> None:
        """Give byte ranges of a version's file back to the disk."""
        runs: list[tuple[int, int]] = []
        for start, length in ranges:
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((start, length))
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
        """Bring a file that takes `on_disk_bytes` back to what its rows account for; the bytes freed."""
        obj = self._catalog.idle(digest)
        if obj is None:
            return 0
        copies = [c for c in self._catalog.copies(obj, tier.number) if c.bitmap]
        known = dict(r for c in copies for r in self._catalog.ranges(c, c.bitmap))
        excess = on_disk_bytes - sum(map(allocated, known.values()))
        if excess <= 0:
            return 0
        if not copies:
            tier.unlink(digest)
        else:
            starts = range(0, copies[0].object_size, self._block_size)
            self.punch(obj, tier, [(start, self._block_size) for start in starts if start not in known])
        return excess

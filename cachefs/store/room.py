"""Making room: which blocks go, and how their bytes are given back.

A file goes with its last block; blocks of a file that stays are punched out. While a copy is pinned (being filled, moved,
lent or read by a thread) its blocks can be forgotten, so that nobody finds them, but their bytes stay in the file until the
last pin is gone: somebody may be about to read them.

A sealed file was lent to the kernel, and somebody may have it mapped, even after a restart. It is never written or punched:
it goes whole, as soon as one of its blocks has to.
"""

from __future__ import annotations

import enum
import errno
import logging
import os
from collections.abc import Callable
from functools import partial

import trio

from cachefs.metrics import Metrics
from cachefs.names import BLOCKS_PER_EXTENT, block_count, extent_bits
from cachefs.store.catalog import Catalog
from cachefs.store.index import Copy
from cachefs.store.tier import Tier, allocated, is_sealed
from cachefs.store.versions import CachedObject

log = logging.getLogger(__name__)

READERS_SHARE = 128
"""Of a full tier, this part is left free by what is fetched ahead. Guessed: a few files or blocks of a small cache."""

VICTIMS_AT_ONCE = 512
"""Measured: dropping a one-block file takes 0.15 ms, so this is under 0.1 s."""


class Evict(enum.IntEnum):
    """What may go for something to come."""

    NOTHING = 0
    BORROWED = 1
    """What other nodes keep, unless it waits for its reader."""
    ANY_BORROWED = 2
    """That first, then what waits."""
    SPARE = 3
    """What nobody will miss: used in this epoch already, or not in all of the last; nothing that waits for its reader."""
    ANY = 4
    """That first, then whatever was used least lately."""


class Room:
    """Eviction and accounting for all tiers."""

    def __init__(self, catalog: Catalog, tiers: dict[int, Tier], block_size: int, metrics: Metrics) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._block_size = block_size
        self._metrics = metrics
        self.on_leaving: Callable[[CachedObject, Tier], None] = lambda obj, tier: None

    def make(
        self, tier: Tier, need: int, *, evict: Evict, older_than: int | None = None, here: int = 0
    ) -> bool:
        """Whether `need` bytes, and a file for them, fit now, after evicting what may go, if it was last used before the
        clock `older_than`. It gives up after some victims: the next call goes on, and no reader waits for the eviction of
        thousands of files. `here` of them lie on the tier's disk already."""
        for _ in range(VICTIMS_AT_ONCE):
            limit = tier.limit_bytes(here)
            fits = tier.counted_bytes() + need <= limit
            if fits and (tier.takes_files or not need):
                return True
            if evict is Evict.NOTHING or need > limit:
                return False
            if not fits and tier.used_bytes + need <= limit:
                return False  # what it takes is on its way out
            if evict >= Evict.SPARE:
                victim = self._catalog.victim(tier.number, spare=evict is Evict.SPARE, older_than=older_than)
            else:
                victim = self._catalog.borrowed_victim(tier.number, spare=True)
                if victim is None and evict is Evict.ANY_BORROWED:
                    victim = self._catalog.borrowed_victim(tier.number, spare=False)
            if victim is None:
                return False
            obj, copy = victim
            if fits:  # only an inode is missing
                self._metrics.evicted_blocks += self._drop_for_its_inode(obj, copy, tier)
            else:
                self._metrics.evicted_blocks += self.drop(obj, copy, copy.bitmap)
        return False

    def _drop_for_its_inode(self, obj: CachedObject, copy: Copy, tier: Tier) -> int:
        """Drop the copy, and with it all that its file holds, for the inode is free when the file goes. What is pinned or in
        use keeps the file."""
        copies = self._catalog.copies(obj, tier.number)
        if any(one.pins or one.pinned for one in copies):
            return self.drop(obj, copy, copy.bitmap)
        return self.drop_file(obj, tier)

    def left_to_readers(self, tier: Tier, need: int) -> int:
        """Bytes that stay free beside what is fetched ahead, in whole `need`s: it takes the place of all that nobody will
        miss, and then a reader would find nothing to displace but what is still wanted."""
        need = min(need, self._block_size)
        return tier.limit_bytes() // READERS_SHARE // need * need if need else 0

    # -- the life of a block's bytes: reserve, land, forget, free ----------------------------------

    def reserve(self, copy: Copy, bits: int) -> None:
        """Blocks are about to be written into a (pinned) copy, by one writer. Bytes they left behind are theirs again."""
        copy.arriving |= bits
        new = self._bytes(copy, bits & ~copy.forgotten)
        self._tiers[copy.tier].reserve(new)
        if copy.key in self._catalog.borrowed:
            self._tiers[copy.tier].borrowed_bytes += new
        copy.forgotten &= ~bits

    def land(self, copy: Copy, bits: int, verified: int) -> None:
        """Reserved blocks are whole: they exist from here on. How old they are is the caller's to say."""
        copy.arriving &= ~bits
        copy.bitmap |= bits
        copy.verified |= verified & bits
        tier = self._tiers[copy.tier]
        tier.landed(self._bytes(copy, bits))
        tier.pinned_bytes += self._bytes(copy, bits) if copy.pinned else 0
        tier.blocks += bits.bit_count()
        self._catalog.changed(copy)

    def abandon(self, copy: Copy, bits: int) -> None:
        """Reserved blocks did not come."""
        copy.arriving &= ~bits
        copy.forgotten |= bits

    def drop(self, obj: CachedObject, copy: Copy, bits: int, why: str = "evicted") -> int:
        """Remove blocks from a copy, and give their bytes back as soon as nobody uses the copy. From a sealed file, all it
        holds is removed. Returns how many blocks went. `why` is one of the ledger's reasons."""
        tier = self._tiers[copy.tier]
        if obj.is_sealed(tier):
            return self.drop_file(obj, tier, why)
        count = self._forget(copy, bits, why)
        if not copy.pins:
            self._free(obj, copy)
        return count

    def drop_file(self, obj: CachedObject, tier: Tier, why: str = "evicted") -> int:
        """Everything that a file holds, which is sealed or not in use; it is unlinked when no part of it is used."""
        self.on_leaving(obj, tier)
        obj.leaving.add(tier.number)
        count = sum(self._forget(copy, copy.bitmap, why) for copy in self._catalog.copies(obj, tier.number))
        self._free_file(obj, tier)
        return count

    def goes_with(self, obj: CachedObject, copy: Copy) -> list[Copy]:
        """What is dropped when this copy is."""
        tier = self._tiers[copy.tier]
        return self._catalog.copies(obj, tier.number) if obj.is_sealed(tier) else [copy]

    def pin(self, copy: Copy, pinned: bool) -> None:
        """It stays until it is unpinned; or may go again, like something just used."""
        if copy.pinned != pinned:
            copy.pinned = pinned
            self.own(copy)
            held = self._bytes(copy, copy.bitmap)
            self._tiers[copy.tier].pinned_bytes += held if pinned else -held
            self._catalog.touch(copy)

    def own(self, copy: Copy) -> None:
        """It is kept here from now on, whatever it was."""
        if copy.key in self._catalog.borrowed:
            held = self._bytes(copy, copy.bitmap | copy.arriving | copy.forgotten)
            self._tiers[copy.tier].borrowed_bytes -= held
            self._catalog.own(copy)

    def _forget(self, copy: Copy, bits: int, why: str) -> int:
        bits &= copy.bitmap
        if bits:
            self._metrics.ledger.misses.gone(copy.digest, copy.extent, why)
        tier = self._tiers[copy.tier]
        copy.bitmap &= ~bits
        copy.verified &= ~bits
        copy.forgotten |= bits
        tier.blocks -= bits.bit_count()
        tier.forgot(self._bytes(copy, bits))
        tier.pinned_bytes -= self._bytes(copy, bits) if copy.pinned else 0
        self._catalog.changed(copy)
        return bits.bit_count()

    def unpin(self, obj: CachedObject, *copies: Copy) -> None:
        """One user of the copies (of one tier) less."""
        for copy in copies:
            copy.pins -= 1
        if obj.leaving and copies and copies[0].tier in obj.leaving:
            self._free_file(obj, self._tiers[copies[0].tier])
            return
        for copy in copies:
            if not copy.pins and (copy.forgotten or not copy.bitmap):
                if obj.is_sealed(self._tiers[copy.tier]):
                    self.drop_file(obj, self._tiers[copy.tier])
                    return
                self._free(obj, copy)

    def _free(self, obj: CachedObject, copy: Copy) -> None:
        tier = self._tiers[copy.tier]
        freed = self._freed(tier, copy)
        if not copy.bitmap:
            self._catalog.remove(obj, copy)
            if not self._catalog.has_copies(obj, tier.number):
                self._unlink(obj, tier, freed)
                return
        if freed:
            # All that is no block of ours: of a huge page with one block the kernel has made the other half, too.
            bits = extent_bits(block_count(copy.object_size, self._block_size), copy.extent) & ~copy.bitmap
            self._punch(obj, tier, list(self._catalog.ranges(copy, bits)), freed)

    def _freed(self, tier: Tier, copy: Copy) -> int:
        freed = self._bytes(copy, copy.forgotten)
        tier.freed(freed)
        tier.borrowed_bytes -= freed if copy.key in self._catalog.borrowed else 0
        copy.forgotten = 0
        return freed

    def _free_file(self, obj: CachedObject, tier: Tier) -> None:
        """Of a sealed file that is leaving, unless it is still in use."""
        copies = obj.on(tier)
        if any(copy.pins for copy in copies):
            return
        freed = 0
        for copy in copies:
            freed += self._freed(tier, copy)
            self._catalog.remove(obj, copy)
        self._unlink(obj, tier, freed)

    def _unlink(self, obj: CachedObject, tier: Tier, freed: int = 0) -> None:
        fd = obj.fds.pop(tier.number, None)
        if fd is not None:
            os.close(fd)
        tier.unlink(obj.id.digest, freed)
        obj.sealed.discard(tier.number)
        obj.leaving.discard(tier.number)

    def _bytes(self, copy: Copy, bits: int) -> int:
        return sum(allocated(length) for _, length in self._catalog.ranges(copy, bits)) if bits else 0

    def _punch(self, obj: CachedObject, tier: Tier, ranges: list[tuple[int, int]], freed: int = 0) -> None:
        """Give byte ranges of a version's file back, at once to memory, soon to a disk."""
        runs: list[tuple[int, int]] = []
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
        self.drop(obj, copy, copy.bitmap, "damaged")

    def corrupt(self, obj: CachedObject, copy: Copy, bits: int) -> None:
        """Blocks are not what their checksums say: they are dropped, and fetched again."""
        bits &= copy.bitmap
        self._metrics.checksum_failures += bits.bit_count()
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

    def way_to_write(self, obj: CachedObject, tier: Tier) -> int | Callable[[], int] | None:
        """A descriptor of the version's file; or, of one on a disk that is not open yet, what opens it, in a thread. None
        while a sealed one is on its way out. When that fails: `not_opened`."""
        if not tier.blocking or tier.number in obj.fds:
            return self._file_for_write(obj, tier)
        if tier.number in obj.leaving:
            return None
        known = any(copy.bitmap for copy in self._catalog.copies(obj, tier.number))
        return partial(tier.open_to_fill, obj.id.digest, known=known)

    def not_opened(self, obj: CachedObject, tier: Tier, exc: OSError) -> None:
        """A version's file could not be opened to be written: it has vanished, is sealed, or the tier fails."""
        if exc.errno == errno.ENOENT:
            for copy in self._catalog.copies(obj, tier.number):
                if copy.bitmap:
                    self.lost(obj, copy, exc)
        elif exc.errno == errno.EROFS and tier.sealed(obj.id.digest):
            self.drop_file(
                obj, tier
            )  # a crash cost it some of its rows: it could only be completed by writing
        elif exc.errno != errno.ETIMEDOUT:
            self._metrics.tier_errors += 1
            tier.failed(exc)

    def _file_for_write(self, obj: CachedObject, tier: Tier) -> int | None:
        """The version's file, made when there is none; None while a sealed one is on its way out. Blocks that an earlier,
        vanished file held are forgotten first: in the new one they would read as zeros."""
        if tier.number not in obj.fds and not self._catalog.copies(obj, tier.number):
            new = tier.new_file(obj.id.digest, obj.id.size)  # as nearly always
            if new is not None:
                obj.fds[tier.number] = new
                return new
        try:
            fd = obj.file(tier)
            if not is_sealed(os.fstat(fd)):
                return fd
            self.drop_file(
                obj, tier
            )  # a crash cost it some of its rows: it could only be completed by writing
        except FileNotFoundError:
            for copy in self._catalog.copies(obj, tier.number):
                if copy.bitmap:
                    self.lost(obj, copy, OSError(errno.ENOENT, "its file vanished"))
        if tier.number in obj.leaving:
            return None
        fd = obj.fds[tier.number] = tier.open_file(obj.id.digest, create=True)
        tier.shape(fd, obj.id.size)
        return fd

    # -- after an unclean stop (see scrub.py) ------------------------------------------------------

    async def reclaim(self, tier: Tier, digest: bytes, on_disk_bytes: int) -> int:
        """Make a file that takes `on_disk_bytes` and its rows agree. Returns by how many bytes they did not."""
        obj = self._catalog.idle(digest)
        known = self._known(tier, obj)
        if obj is None or known is None:
            return 0
        excess = on_disk_bytes - sum(map(allocated, known.values()))
        if not known:
            self._unlink(obj, tier)
            return excess
        if excess == 0 and len(known) == 1 and max(known) == 0:
            return 0  # one block, and it is there; with more blocks, a hole may hide a stray
        strays, holes = await trio.to_thread.run_sync(_inspect, tier, digest, self._block_size, known)
        if self._known(tier, self._catalog.idle(digest)) != known or not (strays or holes):
            return 0  # somebody came by meanwhile
        obj = self._catalog.by_digest(digest)
        if obj.is_sealed(tier):
            self.drop_file(obj, tier, "damaged")
            return (len(strays) + len(holes)) * self._block_size
        self._punch(obj, tier, [(start, self._block_size) for start in strays])
        for copy in self._catalog.copies(obj, tier.number):
            mine = [s for s, _ in self._catalog.ranges(copy, copy.bitmap) if s in holes]
            lost = sum(1 << s // self._block_size % BLOCKS_PER_EXTENT for s in mine)
            self.drop(obj, copy, lost, "damaged")
        obj.close_files()
        return (len(strays) + len(holes)) * self._block_size

    def _known(self, tier: Tier, obj: CachedObject | None) -> dict[int, int] | None:
        """Offset → length of the blocks that rows speak of; None while the version is in use."""
        if obj is None:
            return None
        copies = self._catalog.copies(obj, tier.number)
        return dict(r for c in copies for r in self._catalog.ranges(c, c.bitmap))


def _inspect(tier: Tier, digest: bytes, block_size: int, known: dict[int, int]) -> tuple[list[int], set[int]]:
    """Worker thread: where the file has blocks that are not `known`, and which known ones it has not (wholly)."""
    try:
        fd = tier.open_file(digest, create=False)
    except OSError:
        return [], set(known)
    try:
        size = os.fstat(fd).st_size
        strays = [s for s in range(0, size, block_size) if s not in known and _has_data(fd, s, block_size)]
        return strays, {start for start, length in known.items() if not _is_whole(fd, start, length)}
    except OSError:
        return [], set()
    finally:
        os.close(fd)


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

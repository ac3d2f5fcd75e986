"""Blocks between tiers: RAM spills down when it fills up, SSD blocks that are used again come up.

`move` copies; what it leaves behind is the caller's: a promoted copy stays on SSD, so that RAM can drop it for nothing. A
copy keeps its age. So what goes is decided over both tiers: nothing is spilled to displace what is wanted more.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import trio

from cachefs.metrics import Metrics
from cachefs.store.catalog import Catalog
from cachefs.store.index import Copy, CopyKey
from cachefs.store.room import Evict, Room
from cachefs.store.tier import Tier, allocated
from cachefs.store.versions import CachedObject

SPILL_ABOVE, SPILL_TO = 0.90, 0.75
"""RAM fill at which the oldest copies start to move to SSD, and where that stops. Guessed."""

LOOK_EVERY_S = 0.25
"""RAM may also become too full without taking anything in: pins that held it are gone, or its limit has sunk."""

PROMOTED_AT_MOST = 16 << 20
"""Larger versions stay on SSD. Measured: re-reading a large file from SSD falls from 2.6 to 0.6 GB/s while it is copied up,
and gains nothing after; it is the small files whose every read is a seek."""

REUSE_AFTER_S = 5.0
"""Touches closer together than this are one use (LRU-K's correlated reference period). Guessed."""


class Moves:
    """Between `ram` and `ssd`."""

    def __init__(
        self, catalog: Catalog, room: Room, ram: Tier, ssd: Tier, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._catalog = catalog
        self._room = room
        self._ram = ram
        self._ssd = ssd
        self._metrics = metrics
        self._now = clock
        self._wake = trio.Event()
        self._promotions: OrderedDict[CopyKey, None] = OrderedDict()

    def filled(self) -> None:
        """RAM has taken something in."""
        if self._over(SPILL_ABOVE):
            self._wake.set()

    def used(self, copy: Copy) -> None:
        """A block of an SSD copy was read. What has epochs would lie here twice until the next one."""
        if copy.object_size > PROMOTED_AT_MOST or self._catalog.epochs.has_epochs(copy.dataset):
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
            if self._over(SPILL_ABOVE) or self._ram.used_bytes > self._ram.limit_bytes():
                await self._spill()
            while self._promotions:
                key, _ = self._promotions.popitem(last=False)
                obj = self._catalog.by_digest(key[1])
                copy = self._catalog.copy(obj, key[0], key[2])
                if copy is not None and copy.bitmap and await self.move(obj, copy, self._ram, Evict.NOTHING):
                    self._metrics.promoted_blocks += copy.bitmap.bit_count()

    async def _spill(self) -> None:
        self._room.make(self._ram, 0, evict=Evict.ANY_BORROWED)  # its limit may have sunk
        while self._over(self._spill_to()):
            victim = self._catalog.victim(self._ram.number, moving=True)
            if victim is None:
                return
            obj, copy = victim
            going = self._room.goes_with(obj, copy)
            wanted = self._catalog.kept(copy)
            if self._ssd.writable() and await self._move_down(obj, going, Evict.SPARE):
                self._metrics.spilled_blocks += sum(c.bitmap.bit_count() for c in going)
            elif not copy.bitmap:
                continue  # its file was unreadable: it is gone
            elif copy.pinned or (
                self._ram.used_bytes <= self._ram.limit_bytes() and not self._goes_first(copy, wanted)
            ):
                return  # nowhere to go and no need to: keep serving from RAM
            else:
                self._metrics.evicted_blocks += sum(c.bitmap.bit_count() for c in going)
            # While it was copied it may have gone, or come into use; or the kernel had it, and now more would go with it.
            free = copy.bitmap and not any(c.pins for c in going)
            if free and len(self._room.goes_with(obj, copy)) == len(going):
                self._room.drop(obj, copy, copy.bitmap)

    def _over(self, share: float) -> bool:
        """Whether what is kept takes more of RAM; what other nodes keep goes when its place is wanted."""
        return self._ram.kept_bytes > share * self._ram.limit_bytes()

    def _spill_to(self) -> float:
        """Where spilling stops. What is displaced on SSD for it is lost, so then no more goes than has to."""
        spilling = int((SPILL_ABOVE - SPILL_TO) * self._ram.limit_bytes())
        return SPILL_TO if self._room.make(self._ssd, spilling, evict=Evict.NOTHING) else SPILL_ABOVE

    def _goes_first(self, copy: Copy, wanted: bool) -> bool:
        """Whether SSD did not take it because all it could drop was used later."""
        if wanted or not self._ssd.writable():
            return False
        return self._catalog.victim(self._ssd.number, spare=True) is not None

    async def save_all(self) -> None:
        """Everything in RAM, displacing what is wanted less. Before a stop."""
        while (victim := self._catalog.victim(self._ram.number, moving=True)) is not None:
            obj, copy = victim
            wanted = self._catalog.kept(copy)
            saved = await self._move_down(obj, self._room.goes_with(obj, copy), Evict.ANY)
            if not saved and copy.bitmap and (wanted or not self._ssd.writable()):
                return
            if copy.bitmap:
                self._room.drop(obj, copy, copy.bitmap)

    async def _move_down(self, obj: CachedObject, going: list[Copy], for_wanted: Evict) -> bool:
        """Copy to SSD what will leave RAM together, but for what other nodes keep; `for_wanted`: what goes there for what is
        still wanted."""
        obj.refs += 1
        try:
            for copy in going:
                if copy.key in self._catalog.borrowed:
                    continue
                # Here the deadline of a stop strikes: never in the middle of an extent.
                await trio.lowlevel.checkpoint()
                wanted = self._catalog.kept(copy)
                evict, older_than = (for_wanted, None) if wanted else (Evict.SPARE, copy.clock)
                if not await self.move(obj, copy, self._ssd, evict, older_than):
                    return False
            return True
        finally:
            obj.refs -= 1
            if not obj.in_use():
                obj.close_files()

    async def move(
        self, obj: CachedObject, copy: Copy, to: Tier, evict: Evict, older_than: int | None = None
    ) -> bool:
        """Copy the blocks that `to` lacks into it. False when it has no room for them, or when either side fails."""
        target = self._catalog.copy(obj, to.number, copy.extent)
        wanted = copy.bitmap & ~(target.bitmap | target.arriving if target is not None else 0)
        if not wanted:
            if target is not None:
                self._catalog.moved(copy, target)
            return True
        ranges = list(self._catalog.ranges(copy, wanted))
        need = sum(allocated(length) for _, length in ranges)
        obj.refs += 1
        copy.pins += 1
        try:
            if not self._room.make(to, need, evict=evict, older_than=older_than):
                return False
            source = self._ssd if to is self._ram else self._ram
            return await self._copy_blocks(obj, copy, to, source, ranges, wanted)
        finally:
            self._room.unpin(obj, copy)
            obj.refs -= 1
            if not obj.in_use():
                obj.close_files()

    async def _copy_blocks(
        self,
        obj: CachedObject,
        copy: Copy,
        to: Tier,
        source: Tier,
        ranges: list[tuple[int, int]],
        wanted: int,
    ) -> bool:
        if source.disk.down:
            return False
        try:
            sink = self._room.way_to_write(obj, to)
        except OSError as exc:
            self._metrics.tier_errors += 1
            to.failed(exc)
            return False
        if sink is None:
            return False
        target = self._catalog.create(obj, to.number, copy.extent, copy.object_size, copy.dataset)
        target.pins += 1
        self._room.reserve(target, wanted)
        moved = 0
        try:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_copy_ranges, partial(_open_source, source, obj), sink, ranges)
            moved = wanted & copy.bitmap  # what the source no longer vouches for is doubtful here, too
            for position, checksum in enumerate(copy.checksums):
                if moved >> position & 1:
                    target.checksums[position] = checksum
            self._room.land(target, moved, copy.verified)
            self._catalog.moved(copy, target)
        except _SourceFailed as exc:
            self._room.lost(obj, copy, exc)
        except _NotOpened as exc:
            self._room.not_opened(obj, to, exc.failure)
        except OSError as exc:
            self._metrics.tier_errors += 1
            to.failed(exc)
        finally:
            self._room.abandon(target, wanted & ~moved)
            self._room.unpin(obj, target)
        return bool(moved)


class _SourceFailed(OSError):
    """The file to copy from is not what the index says."""


class _NotOpened(Exception):
    """The file to copy into cannot be opened."""

    def __init__(self, failure: OSError) -> None:
        self.failure = failure


def _open_source(tier: Tier, obj: CachedObject) -> int:
    """A descriptor of one's own."""
    opened = obj.fds.get(tier.number)
    try:
        return os.dup(opened) if opened is not None else tier.open_file(obj.id.digest, create=False)
    except OSError as exc:
        raise _SourceFailed(exc.errno, exc.strerror) from exc


def _copy_ranges(
    open_source: Callable[[], int], to: int | Callable[[], int], ranges: list[tuple[int, int]]
) -> None:
    """Worker thread: copy byte ranges between files inside the kernel."""
    source = open_source()
    try:
        sink = os.dup(to) if isinstance(to, int) else to()
    except OSError as exc:
        os.close(source)
        raise _NotOpened(exc) from exc
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

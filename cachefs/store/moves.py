"""Blocks between tiers: RAM spills down when it fills up, SSD blocks that are used again come up.

`_move` copies; what it leaves behind is the caller's: a promoted copy stays on SSD, so that RAM can drop it for nothing.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable

import trio

from cachefs.metrics import Metrics
from cachefs.store.catalog import CachedObject, Catalog
from cachefs.store.index import Copy, CopyKey
from cachefs.store.room import Room
from cachefs.store.tier import Tier, allocated

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
        if self._ram.used_bytes > SPILL_ABOVE * self._ram.limit_bytes():
            self._wake.set()

    def used(self, copy: Copy) -> None:
        """A block of an SSD copy was read."""
        if copy.object_size > PROMOTED_AT_MOST:
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
            if self._ram.used_bytes > SPILL_ABOVE * self._ram.limit_bytes():
                await self._spill()
            while self._promotions:
                key, _ = self._promotions.popitem(last=False)
                obj = self._catalog.by_digest(key[1])
                copy = self._catalog.copy(obj, key[0], key[2])
                if copy is not None and copy.bitmap and await self.move(obj, copy, self._ram, evict=False):
                    self._metrics.promoted_blocks += copy.bitmap.bit_count()

    async def _spill(self) -> None:
        while self._ram.used_bytes > SPILL_TO * self._ram.limit_bytes():
            victim = self._catalog.oldest(self._ram.number)
            if victim is None:
                return
            obj, copy = victim
            going = self._room.goes_with(obj, copy)
            if self._ssd.writable() and await self._move_down(obj, going):
                self._metrics.spilled_blocks += sum(c.bitmap.bit_count() for c in going)
            elif not copy.bitmap:
                continue  # its file was unreadable: it is gone
            elif self._ram.used_bytes <= self._ram.limit_bytes():
                return  # nowhere to go and no need to: keep serving from RAM
            else:
                self._metrics.evicted_blocks += sum(c.bitmap.bit_count() for c in going)
            # While it was copied it may have gone, or come into use; or the kernel had it, and now more would go with it.
            free = copy.bitmap and not any(c.pins for c in going)
            if free and len(self._room.goes_with(obj, copy)) == len(going):
                self._room.drop(obj, copy, copy.bitmap)

    async def save_all(self) -> None:
        """Everything in RAM, displacing what SSD has not used for longer. Before a stop."""
        while (victim := self._catalog.oldest(self._ram.number)) is not None:
            obj, copy = victim
            if not await self._move_down(obj, self._room.goes_with(obj, copy)) and copy.bitmap:
                return
            if copy.bitmap:
                self._room.drop(obj, copy, copy.bitmap)

    async def _move_down(self, obj: CachedObject, going: list[Copy]) -> bool:
        """Copy to SSD what will leave RAM together."""
        obj.refs += 1
        try:
            for copy in going:
                # Here the deadline of a stop strikes: never in the middle of an extent.
                await trio.lowlevel.checkpoint()
                if not await self.move(obj, copy, self._ssd, evict=True):
                    return False
            return True
        finally:
            obj.refs -= 1
            if not obj.in_use():
                obj.close_files()

    async def move(self, obj: CachedObject, copy: Copy, to: Tier, *, evict: bool) -> bool:
        """Copy the blocks that `to` lacks into it. False when it has no room for them, or when either side fails."""
        target = self._catalog.copy(obj, to.number, copy.extent)
        wanted = copy.bitmap & ~(target.bitmap | target.arriving if target is not None else 0)
        if not wanted:
            return True
        ranges = list(self._catalog.ranges(copy, wanted))
        need = sum(allocated(length) for _, length in ranges)
        obj.refs += 1
        copy.pins += 1
        try:
            if not self._room.make(to, need, evict=evict):
                return False
            try:
                source = obj.file(self._ssd if to is self._ram else self._ram)
            except OSError as exc:
                self._room.lost(obj, copy, exc)
                return False
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
        source: int,
        ranges: list[tuple[int, int]],
        wanted: int,
    ) -> bool:
        try:
            sink = self._room.file_for_write(obj, to)
        except OSError as exc:
            self._metrics.tier_errors += 1
            to.failed(exc)
            return False
        if sink is None:
            return False
        target = self._catalog.create(obj, to.number, copy.extent, copy.object_size)
        target.pins += 1
        self._room.reserve(target, wanted)
        moved = 0
        try:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_copy_ranges, source, sink, ranges)
            moved = wanted & copy.bitmap  # what the source no longer vouches for is doubtful here, too
            for position, checksum in enumerate(copy.checksums):
                if moved >> position & 1:
                    target.checksums[position] = checksum
            self._room.land(target, moved, copy.verified)
        except _SourceFailed as exc:
            self._room.lost(obj, copy, exc)
        except OSError as exc:
            self._metrics.tier_errors += 1
            to.failed(exc)
        finally:
            self._room.abandon(target, wanted & ~moved)
            self._room.unpin(obj, target)
        return bool(moved)


class _SourceFailed(OSError):
    """The file to copy from is not what the index says."""


def _copy_ranges(source: int, sink: int, ranges: list[tuple[int, int]]) -> None:
    """Worker thread: copy byte ranges between files inside the kernel."""
    sink = os.dup(sink)
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

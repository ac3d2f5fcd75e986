"""Blocks between tiers: RAM spills down when it fills up, SSD blocks that are used again come up."""

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
        self._promotions: OrderedDict[CopyKey, CachedObject] = OrderedDict()

    def filled(self) -> None:
        """RAM has taken something in."""
        if self._ram.used_bytes > SPILL_ABOVE * self._ram.limit_bytes():
            self._wake.set()

    def used(self, obj: CachedObject, copy: Copy) -> None:
        """A block of an SSD copy was read."""
        now = self._now()
        if not copy.first_use:
            copy.first_use = now
        elif now - copy.first_use >= REUSE_AFTER_S and self._ram.writable():
            self._promotions[copy.key] = obj
            self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            if self._ram.used_bytes > SPILL_ABOVE * self._ram.limit_bytes():
                await self._spill()
            while self._promotions:
                key, obj = self._promotions.popitem(last=False)
                copy = obj.copies.get((key[0], key[2]))
                if copy is not None and copy.bitmap and await self._move(obj, copy, self._ram, evict=False):
                    self._metrics.promoted_blocks += copy.bitmap.bit_count()

    async def _spill(self) -> None:
        while self._ram.used_bytes > SPILL_TO * self._ram.limit_bytes():
            victim = self._catalog.oldest(self._ram.number)
            if victim is None:
                return
            obj, copy = victim
            if self._ssd.writable() and await self._move(obj, copy, self._ssd, evict=True):
                self._metrics.spilled_blocks += copy.bitmap.bit_count()
            elif self._ram.used_bytes <= self._ram.limit_bytes():
                return  # nowhere to go and no need to: keep serving from RAM
            else:
                self._metrics.evicted_blocks += copy.bitmap.bit_count()
            if not copy.pins:
                self._room.drop(obj, copy, copy.bitmap)

    async def save_all(self) -> None:
        """Everything in RAM that SSD has room for, most recently worth keeping last. Before a stop."""
        while (victim := self._catalog.oldest(self._ram.number)) is not None:
            obj, copy = victim
            if not await self._move(obj, copy, self._ssd, evict=False):
                return
            self._room.drop(obj, copy, copy.bitmap)

    async def _move(self, obj: CachedObject, copy: Copy, to: Tier, *, evict: bool) -> bool:
        """Copy the blocks that `to` lacks into it. False when it has no room for them or fails."""
        target = self._catalog.copy(obj, to.number, copy.extent)
        wanted = copy.bitmap & ~(target.bitmap if target is not None else 0)
        if not wanted:
            return True
        ranges = list(self._catalog.ranges(copy, wanted))
        need = sum(allocated(length) for _, length in ranges)
        obj.refs += 1
        copy.pins += 1
        try:
            if not self._room.make(to, need, evict=evict):
                return False
            source = obj.file(self._ram if copy.tier == self._ram.number else self._ssd)
            sink = self._room.file_for_write(obj, to)
            target = self._catalog.create(obj, to.number, copy.extent)
            target.object_size = copy.object_size
            target.pins += 1
            to.used_bytes += need
            try:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(_copy_ranges, source, sink, ranges)
            except OSError:
                to.used_bytes -= need
                raise
            finally:
                target.pins -= 1
        except OSError as exc:
            self._metrics.tier_errors += 1
            to.failed(exc)
            if target is not None and not target.bitmap and not target.pins:
                self._room.drop(obj, target, 0)
            return False
        finally:
            copy.pins -= 1
            obj.refs -= 1
            if not obj.in_use():
                obj.close_files()
        # What was not yet checked stays so: a copy of doubtful bytes is doubtful.
        target.bitmap |= wanted
        target.verified |= copy.verified & wanted
        for position, checksum in enumerate(copy.checksums):
            if wanted >> position & 1:
                target.checksums[position] = checksum
        to.blocks += len(ranges)
        self._catalog.touch(target)
        return True


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
                    raise OSError(errno.EIO, "short read")
                done += count
    finally:
        os.close(sink)

"""Blocks between tiers: RAM spills down when it fills up, SSD blocks that are used again come up.

`move` copies; the caller decides what happens to the source: a promoted copy stays on SSD, so that RAM can drop it for
nothing. A copy keeps its age. So one order of eviction holds over both tiers: no spilled copy displaces one that goes
later.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import trio

from cachefs.store.catalog import CachedObject
from cachefs.store.eviction import ANY, ANY_REMOTE_OWNED, LOWEST, NOTHING, OURS, Classes
from cachefs.store.index import Copy, CopyKey
from cachefs.store.space import Range, Space
from cachefs.store.tier import Tier, allocated

SPILL_ABOVE, SPILL_TO = 0.90, 0.75
"""RAM fill at which the oldest copies start to move to SSD, and where that stops. Guessed."""

LOOK_EVERY_S = 0.25
"""RAM may also become too full without taking anything in: pins that held it are gone, or its limit has sunk."""

PROMOTED_AT_MOST = 16 << 20
"""Larger versions stay on SSD. Measured: re-reading a large file from SSD falls from 2.6 to 0.6 GB/s while it is copied up,
and gains nothing after. Small files gain: each of their reads is a seek."""

REUSE_AFTER_S = 5.0
"""Touches closer together than this are one use (LRU-K's correlated reference period). Guessed."""


class Moves:
    """Between `ram` and `ssd`."""

    def __init__(self, space: Space, ram: Tier, ssd: Tier, clock: Callable[[], float]) -> None:
        self._catalog = space.catalog
        self._eviction = space.eviction
        self._space = space
        self._ram = ram
        self._ssd = ssd
        self._metrics = space.metrics
        self._now = clock
        self._wake = trio.Event()
        self._promotions: OrderedDict[CopyKey, None] = OrderedDict()

    def filled(self) -> None:
        """RAM has taken something in."""
        if self._over(SPILL_ABOVE):
            self._wake.set()

    def used(self, copy: Copy) -> None:
        """A block of an SSD copy was read: promote it at its next separate use. Copies of a dataset with epochs are not
        promoted: they would lie on both tiers until the next epoch."""
        if copy.object_size > PROMOTED_AT_MOST or self._eviction.epochs.has_epochs(copy.dataset):
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
                if copy is not None and await self.move(obj, copy, self._ram, NOTHING):
                    self._metrics.promoted_blocks += copy.bitmap.bit_count()

    async def _spill(self) -> None:
        self._space.evict_for(self._ram, 0, ANY_REMOTE_OWNED)  # its limit may have sunk
        while self._over(self._spill_to()):
            victim = self._eviction.victim(self._ram.number, OURS, moving=True)
            if victim is None:
                return
            obj, copy = victim
            going = self._space.goes_with(obj, copy)
            wanted = self._eviction.protected(copy)
            if self._ssd.writable() and await self._move_down(obj, going, LOWEST):
                self._metrics.spilled_blocks += sum(c.bitmap.bit_count() for c in going)
            elif not copy.bitmap:
                continue  # its file was unreadable: it is gone
            elif copy.pinned or (
                self._ram.used_bytes <= self._ram.limit_bytes() and not self._goes_first(copy, wanted)
            ):
                return  # nowhere to go and no need to: keep serving from RAM
            else:
                self._metrics.evicted_blocks += sum(c.bitmap.bit_count() for c in going)
            # Meanwhile it may have gone, or come into use; or it was opened in passthrough, and now more would go with it.
            free = copy.bitmap and not any(c.pins for c in going)
            if free and len(self._space.goes_with(obj, copy)) == len(going):
                self._space.drop(obj, copy, copy.bitmap)

    def _over(self, share: float) -> bool:
        """True if this node's own copies take more of RAM; remote-owned ones go when their place is wanted."""
        return self._ram.kept_bytes > share * self._ram.limit_bytes()

    def _spill_to(self) -> float:
        """The share of RAM where spilling stops. If SSD has to evict for it, no more is spilled than necessary."""
        spilling = int((SPILL_ABOVE - SPILL_TO) * self._ram.limit_bytes())
        return SPILL_TO if self._space.evict_for(self._ssd, spilling, NOTHING) else SPILL_ABOVE

    def _goes_first(self, copy: Copy, wanted: bool) -> bool:
        """True if SSD refused it because every copy that it could evict was used later."""
        if wanted or not self._ssd.writable():
            return False
        return self._eviction.victim(self._ssd.number, LOWEST) is not None

    async def save_all(self) -> None:
        """Save everything in RAM before a stop, evicting lower copies on SSD."""
        while (victim := self._eviction.victim(self._ram.number, OURS, moving=True)) is not None:
            obj, copy = victim
            wanted = self._eviction.protected(copy)
            saved = await self._move_down(obj, self._space.goes_with(obj, copy), ANY)
            if not saved and copy.bitmap and (wanted or not self._ssd.writable()):
                return
            if copy.bitmap:
                self._space.drop(obj, copy, copy.bitmap)

    async def _move_down(self, obj: CachedObject, going: list[Copy], for_wanted: Classes) -> bool:
        """Copy to SSD what will leave RAM together, but for remote-owned copies; `for_wanted`: what may be evicted there for
        protected ones."""
        with obj.held():
            for copy in going:
                if copy.key in self._eviction.remote_owned:
                    continue
                # Here the deadline of a stop strikes: never in the middle of an extent.
                await trio.lowlevel.checkpoint()
                wanted = self._eviction.protected(copy)
                evict, older_than = (for_wanted, None) if wanted else (LOWEST, copy.clock)
                if not await self.move(obj, copy, self._ssd, evict, older_than):
                    return False
            return True

    async def move(
        self, obj: CachedObject, copy: Copy, to: Tier, evict: Classes, older_than: int | None = None
    ) -> bool:
        """Copy the blocks that `to` lacks into it. False if it has no room for them, or either side fails."""
        target = self._catalog.copy(obj, to.number, copy.extent)
        wanted = copy.bitmap & ~(target.bitmap | target.arriving if target is not None else 0)
        if not wanted:
            if target is not None:
                self._eviction.moved(copy, target)
            return True
        ranges = list(self._catalog.ranges(copy, wanted))
        need = sum(allocated(length) for _, length in ranges)
        with obj.held(), self._space.pinned(obj, copy):
            if not self._space.evict_for(to, need, evict, older_than=older_than):
                return False
            source = self._ssd if to is self._ram else self._ram
            return await self._copy_blocks(obj, copy, to, source, ranges, wanted)

    async def _copy_blocks(
        self,
        obj: CachedObject,
        copy: Copy,
        to: Tier,
        source: Tier,
        ranges: list[Range],
        wanted: int,
    ) -> bool:
        if source.disk.down or to.disk.down:  # a thread would wait for it, and a stop for the thread
            return False
        sink = self._space.file_to_write(obj, to)
        if sink is None:
            return False
        target = self._catalog.create(obj, to.number, copy.extent, copy.object_size, copy.dataset)
        self._space.pin(target)
        self._space.reserve(target, wanted)
        moved = 0
        try:
            with trio.CancelScope(shield=True):
                open_source = partial(source.open_file, obj.id.digest)
                await trio.to_thread.run_sync(_copy_ranges, open_source, sink, ranges)
            moved = (
                wanted & copy.bitmap
            )  # a block that the source has dropped meanwhile is doubtful here, too
            for position, checksum in enumerate(copy.checksums):
                if moved >> position & 1:
                    target.checksums[position] = checksum
            self._space.land(target, moved, copy.verified)
            self._eviction.moved(copy, target)
        except _SourceFailed as exc:
            self._space.lost(obj, copy, exc)
        except _NotOpened as exc:
            self._space.not_opened(obj, to, exc.failure)
        except OSError as exc:
            self._space.failed(to, exc)
        finally:
            self._space.abandon(target, wanted & ~moved)
            self._space.unpin(obj, target)
        return bool(moved)


class _SourceFailed(OSError):
    """The file to copy from is not what the index says."""


class _NotOpened(Exception):
    """The file to copy into cannot be opened."""

    def __init__(self, failure: OSError) -> None:
        self.failure = failure


def _copy_ranges(open_source: Callable[[], int], open_sink: Callable[[], int], ranges: list[Range]) -> None:
    """Copy byte ranges between files inside the kernel, in a worker thread."""
    try:
        source = open_source()
    except OSError as exc:
        raise _SourceFailed(exc.errno, exc.strerror) from exc
    try:
        sink = open_sink()
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

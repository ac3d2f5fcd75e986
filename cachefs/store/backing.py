"""Passthrough: cache files that the kernel reads and maps by itself, without requests to the daemon.

A version is opened in passthrough from one tier, if all its blocks lie there and are verified. Its first such open makes
its file immutable (`tier.IMMUTABLE`): `space.py` never changes such a file, it only unlinks it.

Programs that have a file open must see what a program on this node writes into it. So on a writable mount, a file that
is about to be changed leaves the cache first (`take_out`) and becomes the staging file, which its readers have open
already. A file of the RAM tier cannot become a staging file.

While a backing file has users, all copies of the version on its tier are pinned. Without users it is *idle*: it pins nothing
and stays registered with the kernel, so that the next open needs no system call. It is retired before its file is removed.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from cachefs.base.names import ObjectId
from cachefs.store.catalog import Backing, CachedObject, Catalog, Copy
from cachefs.store.eviction import LOWEST
from cachefs.store.space import Moves, Space
from cachefs.store.tier import NoTier, Tier, allocated

log = logging.getLogger(__name__)

IDLE_BACKINGS = 4096
"""Idle backing files that stay registered. Each keeps an inode in the kernel's memory. A bound of memory."""

TO_PREPARE = 256
"""Versions that wait to be gathered and verified. A longer queue would hold files that were opened minutes ago. A bound."""


class WholeVersion:
    """A version that is whole on one tier whose files are not opened in passthrough: the daemon reads it."""

    __slots__ = ("_catalog", "_copies", "_object", "blocks")

    def __init__(self, catalog: Catalog, obj: CachedObject, copies: list[Copy]) -> None:
        self._catalog = catalog
        self._object = obj
        self._copies = [(copy, copy.bitmap) for copy in copies]
        self.blocks = sum(copy.bitmap.bit_count() for copy in copies)

    def reuse(self) -> bool:
        """True if the version is still whole there, and in memory."""
        for copy, bits in self._copies:
            if copy.bitmap != bits:
                return False
        return self._catalog.remembers(self._object)


class Passthrough:
    """The backing files, and the task that makes versions ready for passthrough. `tiers` is empty if there is none. `verify`
    checks the unverified blocks of a copy. `on_retired` unregisters a backing file from the kernel."""

    def __init__(
        self,
        space: Space,
        tiers: list[Tier],
        moves: Moves | None,
        verify: Callable[[CachedObject, Copy], Awaitable[bool]],
    ) -> None:
        self._catalog = space.catalog
        self._eviction = space.eviction
        self._space = space
        self._tiers = tiers
        self._moves = moves
        self._verify = verify
        self._metrics = space.metrics
        self.on_retired: Callable[[Backing], None] = lambda backing: None
        self._idle: OrderedDict[Backing, bool] = OrderedDict()  # each value is True; the oldest come first
        self._queue: OrderedDict[bytes, ObjectId] = OrderedDict()
        self._wake = trio.Event()
        self._closed = False

    @property
    def possible(self) -> bool:
        """False if the kernel accepts no tier's files."""
        for tier in self._tiers:  # noqa: SIM110 - any() is slower, and each cold file calls this three times
            if tier.passthrough:
                return True
        return False

    # -- opening -----------------------------------------------------------------------------------

    def open(self, obj: CachedObject, *, on_disk: bool = False) -> Backing | None:
        """The version's backing file with one more user, if the version is whole and verified on one tier; else None. With
        `on_disk` only the disk's tier counts, whose files `take_out` can take. The caller must `release` it."""
        backing = obj.backing or self._make(obj, on_disk)
        if backing is None or backing.tier.disk.down or (on_disk and not backing.tier.blocking):
            return None
        if not backing.users:
            self._idle.pop(backing, None)
            self._space.pin(*backing.copies)
            backing.reused = False
            self._note_use(backing)
        elif backing.tier.number in obj.leaving:
            return None
        self.reopen(backing)
        return backing

    def reopen(self, backing: Backing) -> None:
        """Add a user to a backing file in use, even if its blocks are forgotten: all opens of an inode must share one."""
        backing.users += 1
        self._metrics.passthrough_blocks += backing.blocks

    def _note_use(self, backing: Backing) -> None:
        """Note a use for eviction, if it is a separate one: noting it is most of the cost of an open."""
        for copy in backing.copies:
            if self._eviction.touch_if_separate(copy):
                self._eviction.used(backing.object, copy, hit=True)

    def restore(self, obj: CachedObject, backing_id: int) -> Backing:
        """The backing file that an earlier daemon verified and registered as `backing_id`, with one more user. If the index
        has lost blocks of it since, the tier may have no such file any more, but the kernel still has it."""
        backing = obj.backing
        if backing is None:
            # With `--verify full`, which the earlier daemon may not have had, no tier has passthrough.
            tiers = self._space.tiers
            tier, copies = tiers[-1] if tiers else NoTier(), []
            for candidate in self._tiers:
                found = self._whole(obj, candidate, verified=False) if obj.is_immutable(candidate) else None
                if found is not None:
                    tier, copies = candidate, found
                    break
            backing = self._backing(obj, tier, -1, copies)
            backing.id = backing_id
            self._space.pin(*copies)
        backing.users += 1
        return backing

    def _make(self, obj: CachedObject, on_disk: bool) -> Backing | None:
        for tier in self._tiers:
            if not tier.passthrough or self._closed or tier.disk.down or (on_disk and not tier.blocking):
                continue
            copies = self._whole(obj, tier, verified=True)
            if copies is None:
                continue
            try:
                fd = self._make_immutable(obj, tier)
            except OSError as exc:
                log.debug("no passthrough for %s from the %s tier: %s", obj.id.key, tier.name, exc)
                continue
            obj.immutable.add(tier.number)
            return self._backing(obj, tier, fd, copies)
        return None

    def _backing(self, obj: CachedObject, tier: Tier, fd: int, copies: list[Copy]) -> Backing:
        """Make the version's backing file, which is registered with the kernel next, or was."""
        obj.backing = Backing(fd, obj, tier, copies, self._idle, self.retire, self._metrics)
        tier.registered += 1
        return obj.backing

    def _make_immutable(self, obj: CachedObject, tier: Tier) -> int:
        return tier.make_immutable(obj.id.digest, obj.id.size, partial(obj.is_its_file, tier.number))

    def reusable(self, object_id: ObjectId, *, passthrough: bool, on_disk: bool) -> WholeVersion | None:
        """The version, if it is whole on a tier from which `open` cannot serve it, and no blocks of it lie on one from which
        `open` can. Without `passthrough` that is any tier; with `on_disk`, `open` serves only files of the disk's tier."""
        obj = self._catalog.peek(object_id)
        if not self._catalog.remembers(obj):
            return None
        found = None
        for tier in self._space.tiers:
            if passthrough and tier.passthrough and tier in self._tiers and (tier.blocking or not on_disk):
                if self._catalog.copies(obj, tier.number):
                    return None  # it may become whole and verified there
            elif found is None and (copies := self._whole(obj, tier, verified=False)) is not None:
                found = WholeVersion(self._catalog, obj, copies)
        return found

    def to_make_immutable(self, obj: CachedObject) -> tuple[Tier, list[Copy]] | None:
        """(tier, copies there) that `open` would use, if it would have to make the file immutable, which may wait for a
        disk, so that the caller should await `make_immutable` first. None if `open` does not wait, or finds no file."""
        if obj.backing is not None or self._closed:
            return None
        # From the slowest tier on: most cold files lie in RAM, and are not looked for there twice.
        found = None
        for tier in reversed(self._tiers):
            if not tier.passthrough or tier.disk.down or (found is None and not tier.blocking):
                continue
            copies = self._whole(obj, tier, verified=True)
            if copies is not None:
                found = (tier, copies) if tier.blocking else None
        return None if found is None or obj.is_immutable(found[0]) else found

    async def make_immutable(self, obj: CachedObject) -> None:
        """Make the file that `to_make_immutable` finds immutable, in a thread, so that `open` need not wait. Errors are
        ignored: `open` meets them."""
        found = self.to_make_immutable(obj)
        if found is None:
            return
        tier, copies = found

        def finish(_: object) -> None:
            self._space.unpin(obj, *copies)
            obj.release()

        obj.hold()
        self._space.pin(*copies)
        try:
            await tier.disk.run(lambda: os.close(self._make_immutable(obj, tier)), finish)
        except OSError as exc:
            log.debug("cannot make %s immutable in the %s tier: %s", obj.id.key, tier.name, exc)

    def release(self, backing: Backing) -> None:
        """Remove a user. A file without users becomes idle, or is retired if it cannot be opened again."""
        backing.users -= 1
        if backing.users:
            return
        obj, copies = backing.object, backing.copies
        leaves = obj.leaving and backing.tier.number in obj.leaving
        if not backing.id or self._closed or not self._tiers or leaves:
            self.retire(backing)
            self._space.unpin(obj, *copies)
        else:
            recent, old = self._catalog.recent, False
            # No bytes wait for these pins: an immutable file is dropped as a whole, and is leaving then.
            for copy in copies:
                copy.pins -= 1
                if copy.used <= recent:
                    old = True
            if old:
                self._note_end(backing)
            self._idle[backing] = True
            if len(self._idle) > IDLE_BACKINGS:
                self.retire(self._idle.popitem(last=False)[0])
        if obj.fds:
            obj.close_if_unused()

    def _note_end(self, backing: Backing) -> None:
        """Note the use that the last user ends, once between two flushes (a second apart)."""
        if backing.reused:
            self._catalog.object(backing.object.id)  # it is the one used last
            self._note_use(backing)
        for copy in backing.copies:
            self._eviction.touch_if_separate(copy)

    def take_out(self, backing: Backing, users: int, path: Path) -> int | None:
        """Drop the version from the cache and rename its file to `path`, on the same file system, writable. The `users` of
        the caller go on reading it, and the kernel keeps it as `backing.id`. Returns a read-only descriptor; None, with
        nothing changed, if there are other users, if a copy is in use, or if there is no file."""
        obj, tier = backing.object, backing.tier
        if self._closed or not self._space.tiers or tier.disk.down or tier.number in obj.leaving:
            return None
        copies = self._catalog.copies(obj, tier.number)
        if backing.users != users or any(copy.pins != 1 or copy.in_progress for copy in copies):
            return None
        try:
            fd = tier.move_out(obj.id.digest, path)
        except OSError as exc:
            log.debug("cannot take %s out of the %s tier: %s", obj.id.key, tier.name, exc)
            return None
        tier.registered -= 1
        obj.backing = None
        self._space.drop_file(obj, tier, "changed")
        self._space.unpin(obj, *backing.copies)
        obj.close_if_unused()
        return fd

    def refuse(self, tier: Tier, reason: str) -> None:
        """Open no more files of this tier in passthrough: the kernel has refused one, for `reason`."""
        if tier.passthrough:
            tier.passthrough = False
            log.warning("files of the %s tier are read through the daemon: %s", tier.name, reason)

    def retire(self, backing: Backing) -> None:
        """See `Backing.retire`."""
        self._idle.pop(backing, None)
        backing.tier.registered -= 1
        backing.object.backing = None
        self.on_retired(backing)
        backing.close()

    def close(self) -> None:
        """Allow no more opens, and retire the idle files. A file with users is retired when the last one releases it."""
        self._closed = True
        while self._idle:
            self.retire(next(iter(self._idle)))

    def _whole(self, obj: CachedObject, tier: Tier, *, verified: bool) -> list[Copy] | None:
        """The version's copies on the tier in order, if they have all its blocks, none in progress; else None."""
        if not obj.copies.get((tier.number, 0), True):
            return None  # a shortcut: most cold files lie on no tier, or on one
        copies = []
        for extent, bits in self._catalog.extents(obj):
            copy = self._catalog.copy(obj, tier.number, extent)
            if (
                copy is None
                or copy.bitmap != bits
                or copy.in_progress
                or (verified and copy.verified != bits)
            ):
                return None
            copies.append(copy)
        return copies or None

    # -- making ready ------------------------------------------------------------------------------

    def prepare_later(self, obj: CachedObject) -> None:
        """Queue a version whose blocks are all cached, on any tiers, to be made ready for `open` in the background. A full
        queue drops its oldest."""
        if obj.id.digest in self._queue or not self.possible or self._ready(obj):
            return
        if len(self._queue) >= TO_PREPARE:
            self._queue.popitem(last=False)
        self._queue[obj.id.digest] = obj.id
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._queue:
                await trio.lowlevel.checkpoint()
                _, object_id = self._queue.popitem(last=False)
                obj = self._catalog.object(object_id)
                with obj.held():
                    try:
                        if await self._prepare(obj):
                            self._metrics.prepared_versions += 1
                    except Exception:
                        log.exception("cannot make %s ready for the kernel", object_id.key)

    def _ready(self, obj: CachedObject) -> bool:
        """True if the version is whole and verified on a tier with passthrough."""
        for tier in self._tiers:  # noqa: SIM110 - any() is slower, and this is called for each small file
            if tier.passthrough and self._whole(obj, tier, verified=True):
                return True
        return False

    async def _prepare(self, obj: CachedObject) -> bool:
        """Gather the version on one tier, and verify the blocks that no reader has verified yet. True if `open` can serve it
        then, and could not before."""
        if self._ready(obj):
            return False  # a reader has verified all of it meanwhile
        whole = [tier for tier in self._tiers if self._whole(obj, tier, verified=False)]
        if not whole and await self._gather(obj):
            whole = [self._tiers[-1]]
        for tier in whole:
            if tier.passthrough:
                for copy in self._whole(obj, tier, verified=False) or ():
                    if not await self._verify(obj, copy):
                        return False
                return self._whole(obj, tier, verified=True) is not None
        return False

    async def _gather(self, obj: CachedObject) -> bool:
        """Move a version that lies partly in RAM and partly on SSD to SSD. False if it is not whole there afterwards."""
        if self._moves is None:
            return False
        ram, ssd = self._tiers
        if not ssd.passthrough or not ssd.writable() or allocated(obj.id.size) > ssd.limit_bytes():
            return False
        if obj.is_immutable(ssd):
            return False  # a crash lost some of its rows; its other blocks can still be read
        in_ram, on_ssd = (self._catalog.copies(obj, tier.number) for tier in (ram, ssd))
        if not self._catalog.whole(obj) or any(copy.in_progress for copy in (*in_ram, *on_ssd)):
            return False
        if any(copy.key in self._eviction.remote_owned for copy in in_ram):
            return False
        # All are pinned, so that making space for some of them does not evict the others.
        with self._space.pinned(obj, *in_ram), self._space.pinned(obj, *on_ssd):
            for copy in in_ram:
                if not await self._moves.move(obj, copy, ssd, LOWEST):
                    return False
        if self._whole(obj, ssd, verified=False) is None:
            return False
        for copy in in_ram:
            if copy.bitmap and not copy.pins:
                self._space.drop(obj, copy, copy.bitmap)
        return True

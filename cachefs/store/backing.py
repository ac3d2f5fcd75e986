"""Passthrough: whole files that the kernel reads and maps by itself. The daemon sees nothing of that.

A version is opened in passthrough from one tier, when all its blocks lie there and each was verified. From the first such
open its file is immutable (`tier.IMMUTABLE`): a process may keep a mapping of it long after it closed the file, and
longer than the daemon lives. `space.py` never changes such a file, it only unlinks it.

Programs that have a file open see what a program on this node writes into it. So on a mount that can be written, the
file of a version that is about to be changed leaves the cache first (`take_out`): it is the staging file from then on, and
its readers have it already. A file in memory cannot become one.

While a backing file has users, all copies of the version on its tier are pinned. Without users it is *idle*: it pins nothing
and stays registered with the kernel, so that the next open costs no system call; it is retired before its file goes.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from cachefs.base.names import ObjectId
from cachefs.store.catalog import CachedObject, Catalog, Copy
from cachefs.store.eviction import LOWEST
from cachefs.store.space import Moves, Space
from cachefs.store.tier import Tier, allocated

log = logging.getLogger(__name__)

IDLE_BACKINGS = 4096
"""Files without users that the kernel still holds, each an inode kept in its memory. A bound of memory."""

TO_PREPARE = 256
"""Versions waiting to be gathered and verified; a longer queue would be of files opened minutes ago. A bound."""


class BackingFile:
    """A file on its way to the kernel. `id` is the kernel's name for it, 0 until it has one; `fd` is -1 from then on.
    `blocks` is how many the cache has of it."""

    __slots__ = ("blocks", "fd", "id")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.id = self.blocks = 0

    def registered(self, backing_id: int) -> None:
        """The kernel holds the file by itself now."""
        self.id = backing_id
        self.close()

    def reuse(self) -> bool:
        """See `cachefs.fs.reader.Backing`."""
        return False

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Backing(BackingFile):
    """A whole, verified, immutable file of the cache. `users` counts the opens that share it."""

    __slots__ = ("_idle", "_metrics", "_passthrough", "copies", "object", "reused", "tier", "users")

    def __init__(
        self, passthrough: Passthrough, obj: CachedObject, tier: Tier, fd: int, copies: list[Copy]
    ) -> None:
        super().__init__(fd)
        self._passthrough = passthrough
        self._idle, self._metrics = passthrough._idle, passthrough._metrics
        self.object = obj
        self.tier = tier
        self.copies = copies
        self.blocks = sum(copy.bitmap.bit_count() for copy in copies)
        self.users = 0
        self.reused = False  # opened by `reuse`, whose use is noted when it is released

    def reuse(self) -> bool:
        """`Passthrough.open` for one that was opened before, if it is idle, in as few steps as that takes."""
        if self.tier.disk.down or not self._idle.pop(self, False):
            return False
        self.users = 1
        self.reused = True
        for copy in self.copies:
            copy.pins += 1
        self._metrics.passthrough_blocks += self.blocks
        return True

    def recast(self, obj: CachedObject) -> None:
        """See `Passthrough.recast`."""
        self._passthrough.recast(self, obj)

    def retire(self) -> None:
        """The kernel and the cache forget it. Without users only."""
        self._passthrough.retire(self)


class Settled:
    """A version that is whole on one tier, and that no passthrough can serve from there."""

    __slots__ = ("_catalog", "_copies", "_object", "blocks")

    def __init__(self, catalog: Catalog, obj: CachedObject, copies: list[Copy]) -> None:
        self._catalog = catalog
        self._object = obj
        self._copies = [(copy, copy.bitmap) for copy in copies]
        self.blocks = sum(copy.bitmap.bit_count() for copy in copies)

    def reuse(self) -> bool:
        """Whether that is still so."""
        for copy, bits in self._copies:
            if copy.bitmap != bits:
                return False
        return self._catalog.remembers(self._object)


class Passthrough:
    """Which files the kernel has, and making versions ready for it. `tiers` is empty when there is no passthrough.
    `verify` checks what is not verified of a copy. `on_retired` is told of a file that the kernel may forget."""

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
        self._idle: OrderedDict[Backing, bool] = OrderedDict()  # True of each
        self._queue: OrderedDict[bytes, ObjectId] = OrderedDict()
        self._wake = trio.Event()
        self._closed = False

    @property
    def possible(self) -> bool:
        """False if the kernel takes no tier's files."""
        for tier in self._tiers:  # noqa: SIM110 - a plain loop: each cold file comes here three times
            if tier.passthrough:
                return True
        return False

    # -- opening -----------------------------------------------------------------------------------

    def open(self, obj: CachedObject, *, on_disk: bool = False) -> Backing | None:
        """The version's file, if it is whole and verified on one tier (`on_disk`: on that which `take_out` serves). The
        caller gives it to `release`."""
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
        """One more user of a backing file in use, even if its blocks are forgotten by now: all opens share one."""
        backing.users += 1
        self._metrics.passthrough_blocks += backing.blocks

    def _note_use(self, backing: Backing) -> None:
        """It was opened. Between two flushes, a second apart, this counts once: it is most of what an open costs."""
        for copy in backing.copies:
            if self._eviction.touch_if_flushed(copy):
                self._catalog.remembered(backing.object.id)
                self._eviction.used(backing.object, copy, hit=True)

    def restore(self, obj: CachedObject, backing_id: int) -> Backing:
        """The file that an earlier daemon has registered, with one more user. It was verified then. If the index has lost
        blocks of it since, the file itself may be gone from the tier; the kernel has it all the same."""
        backing = obj.backing
        if backing is None:
            tier, copies = self._tiers[-1], []
            for candidate in self._tiers:
                found = self._whole(obj, candidate, verified=False) if obj.is_immutable(candidate) else None
                if found is not None:
                    tier, copies = candidate, found
                    break
            backing = obj.backing = Backing(self, obj, tier, -1, copies)
            backing.id = backing_id
            tier.registered += 1
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
                fd = tier.make_immutable(obj.id.digest, obj.id.size)
            except OSError as exc:
                log.debug("no passthrough for %s from the %s tier: %s", obj.id.key, tier.name, exc)
                continue
            obj.immutable.add(tier.number)
            backing = obj.backing = Backing(self, obj, tier, fd, copies)
            tier.registered += 1
            return backing
        return None

    def settled(self, object_id: ObjectId, *, passthrough: bool, on_disk: bool) -> Settled | None:
        """The version, if it is whole on a tier, and `open` will not find it on another: there is no `passthrough`, or it
        takes files `on_disk` only."""
        obj = self._catalog.look(object_id)
        if not self._catalog.remembers(obj):
            return None
        settled = None
        for tier in self._space.tiers:
            if passthrough and tier.passthrough and tier in self._tiers and (tier.blocking or not on_disk):
                if self._catalog.copies(obj, tier.number):
                    return None  # it may be whole there soon, and verified
            elif settled is None and (copies := self._whole(obj, tier, verified=False)) is not None:
                settled = Settled(self._catalog, obj, copies)
        return settled

    def to_make_immutable(self, obj: CachedObject) -> tuple[Tier, list[Copy]] | None:
        """The tier that `open` takes once its file is made immutable, if that may have to wait for a disk, and the copies
        there."""
        if obj.backing is not None or self._closed:
            return None
        for tier in self._tiers:
            copies = (
                self._whole(obj, tier, verified=True) if tier.passthrough and not tier.disk.down else None
            )
            if copies is not None:
                return (tier, copies) if tier.blocking and not obj.is_immutable(tier) else None
        return None

    async def make_immutable(self, obj: CachedObject) -> None:
        """Make the file that `to_make_immutable` has found immutable, if possible: `open` then need not wait."""
        found = self.to_make_immutable(obj)
        if found is None:
            return
        tier, copies = found

        def make_immutable() -> None:
            os.close(tier.make_immutable(obj.id.digest, obj.id.size))

        def finish(_: object) -> None:
            self._space.unpin(obj, *copies)
            obj.release()

        obj.hold()
        self._space.pin(*copies)
        try:
            await tier.disk.run(make_immutable, finish)
        except OSError as exc:
            log.debug("cannot make %s immutable in the %s tier: %s", obj.id.key, tier.name, exc)

    def release(self, backing: Backing) -> None:
        """One user less. Without users it stays registered for the next, as long as its file stays."""
        backing.users -= 1
        if backing.users:
            return
        obj, copies = backing.object, backing.copies
        if not backing.id or self._closed or (obj.leaving and backing.tier.number in obj.leaving):
            self.retire(backing)
            self._space.unpin(obj, *copies)
        else:
            recent, changed = self._catalog.recent, False
            for copy in copies:
                copy.pins -= 1
                if copy.used <= recent or copy.forgotten or not copy.bitmap:
                    changed = True
            if changed:
                self._note_end(backing)
            self._idle[backing] = True
            if len(self._idle) > IDLE_BACKINGS:
                self.retire(self._idle.popitem(last=False)[0])
        if obj.fds:
            obj.rest()

    def _note_end(self, backing: Backing) -> None:
        """Copies have no blocks any more, or the use is to be noted: once between two flushes, which are a second apart."""
        self._space.unpinned(backing.object, *backing.copies)
        if backing.reused:
            self._note_use(backing)
        for copy in backing.copies:
            self._eviction.touch_if_flushed(copy)

    def take_out(self, backing: Backing, users: int, path: Path) -> int | None:
        """The cache forgets the version, and its file goes to `path`, on the same file system, to be written there: its
        `users` and the kernel, which has it as `backing.id`, go on with it. Returns a descriptor, for reading only. None,
        and nothing has changed, while others use it, or where there is no such file."""
        obj, tier = backing.object, backing.tier
        if self._closed or tier.disk.down or tier.number in obj.leaving:
            return None
        copies = self._catalog.copies(obj, tier.number)
        if backing.users != users or any(copy.pins != 1 or copy.in_progress for copy in copies):
            return None
        try:
            fd = tier.give(obj.id.digest, path)
        except OSError as exc:
            log.debug("cannot take %s out of the %s tier: %s", obj.id.key, tier.name, exc)
            return None
        tier.registered -= 1
        obj.backing = None
        self._space.drop_file(obj, tier, "changed")
        self._space.unpin(obj, *backing.copies)
        obj.rest()
        return fd

    def recast(self, backing: Backing, obj: CachedObject) -> None:
        """`obj` has the file of `backing` on the same tier now, whole: the users go on under that version, so that the next
        open shares the file with them, and `take_out` finds it."""
        was, before = backing.object, backing.copies
        was.backing, obj.backing = None, backing
        backing.object, backing.copies = obj, self._catalog.copies(obj, backing.tier.number)
        self._space.pin(*backing.copies)
        self._space.unpin(was, *before)
        was.rest()

    def refuse(self, tier: Tier, reason: str) -> None:
        """The kernel does not take this tier's files."""
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
        """No more opens in passthrough; a file that has users is retired with the last."""
        self._closed = True
        while self._idle:
            self.retire(next(iter(self._idle)))

    def _whole(self, obj: CachedObject, tier: Tier, *, verified: bool) -> list[Copy] | None:
        """The version's copies on the tier, if they have all its blocks."""
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
        """Make `open` succeed for a version that is whole over all tiers: in the background, if there is time."""
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
        """True if a tier's file of it can be opened in passthrough as it is."""
        for tier in self._tiers:  # noqa: SIM110 - a plain loop: each small file that comes is asked for
            if tier.passthrough and self._whole(obj, tier, verified=True):
                return True
        return False

    async def _prepare(self, obj: CachedObject) -> bool:
        if self._ready(obj):
            return False  # a reader has read all of it meanwhile
        whole = [tier for tier in self._tiers if self._whole(obj, tier, verified=False)]
        if not whole and await self._gather(obj):
            whole = [self._tiers[-1]]
        for tier in whole:
            if tier.passthrough:
                return await self._check(obj, tier)
        return False

    async def _gather(self, obj: CachedObject) -> bool:
        """Bring together on SSD what lies in parts there and in RAM."""
        if self._moves is None:
            return False
        ram, ssd = self._tiers
        if not ssd.passthrough or not ssd.writable() or allocated(obj.id.size) > ssd.limit_bytes():
            return False
        if obj.is_immutable(ssd):
            return False  # a crash cost it some of its rows; what is left of it can still be read
        parts: list[list[Copy]] = []
        for extent, bits in self._catalog.extents(obj):
            copies = self._catalog.on_any_tier(obj, extent)
            held = 0
            for copy in copies:
                held |= copy.bitmap
            if held != bits or any(c.in_progress for c in copies):
                return False
            parts.append(copies)
        down = [c for copies in parts for c in copies if c.tier == ram.number]
        if any(copy.key in self._eviction.remote_owned for copy in down):
            return False
        kept = [c for copies in parts for c in copies if c.tier == ssd.number]
        # All are pinned: the room that some of them need must not come from the rest.
        with self._space.pinned(obj, *down), self._space.pinned(obj, *kept):
            for copy in down:
                if not await self._moves.move(obj, copy, ssd, LOWEST):
                    return False
        if self._whole(obj, ssd, verified=False) is None:
            return False
        for copy in down:
            if copy.bitmap and not copy.pins:
                self._space.drop(obj, copy, copy.bitmap)
        return True

    async def _check(self, obj: CachedObject, tier: Tier) -> bool:
        """Check the blocks that no reader has verified yet."""
        for copy in self._whole(obj, tier, verified=False) or ():
            if not await self._verify(obj, copy):
                return False
        return self._whole(obj, tier, verified=True) is not None

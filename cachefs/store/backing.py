"""Whole files lent to the kernel: it reads and maps them by itself, and the daemon sees nothing of that (FUSE passthrough).

A version is lent from one tier, when all its blocks lie there and each was verified. From the first lending on its file is
sealed (`tier.SEALED`): a process may keep a mapping of it long after it closed the file, and longer than we live. `room.py`
never changes such a file, it only unlinks it.

While a backing has users, all copies of the version on its tier are pinned. Without users it is *idle*: it pins nothing and
stays registered with the kernel, so that the next open costs no system call; it is retired before its file goes.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable

import trio
import xxhash

from cachefs.metrics import Metrics
from cachefs.names import BLOCKS_PER_EXTENT, ObjectId, block_count, extent_bits
from cachefs.store.catalog import Catalog
from cachefs.store.index import Copy
from cachefs.store.lent import Lent
from cachefs.store.moves import Moves
from cachefs.store.room import Evict, Room
from cachefs.store.tier import Tier, allocated
from cachefs.store.versions import CachedObject

log = logging.getLogger(__name__)

IDLE_BACKINGS = 4096
"""Files that nobody has open but the kernel still holds, each an inode kept in its memory. Guessed."""

TO_PREPARE = 256
"""Versions waiting to be gathered and verified; a longer queue would be of files opened minutes ago. Guessed."""


class Backing(Lent):
    """A whole, verified, sealed file, for the kernel. `users` counts who has it open."""

    __slots__ = ("copies", "object", "tier", "users")

    def __init__(self, obj: CachedObject, tier: Tier, fd: int, copies: list[Copy]) -> None:
        super().__init__(fd)
        self.object = obj
        self.tier = tier
        self.copies = copies
        self.users = 0


class Lending:
    """Which files the kernel has, and making versions ready for it. `tiers` is empty when nothing may be lent."""

    def __init__(
        self,
        catalog: Catalog,
        room: Room,
        tiers: list[Tier],
        moves: Moves | None,
        block_size: int,
        metrics: Metrics,
        retired: Callable[[Backing], None],
    ) -> None:
        self._catalog = catalog
        self._room = room
        self._tiers = tiers
        self._moves = moves
        self._block_size = block_size
        self._metrics = metrics
        self._retired = retired
        self._idle: OrderedDict[Backing, None] = OrderedDict()
        self._queue: OrderedDict[bytes, ObjectId] = OrderedDict()
        self._wake = trio.Event()
        self._one_thread = trio.CapacityLimiter(1)  # readers have their own
        self._closed = False
        catalog.on_forget = self._forgotten
        room.on_leaving = self._leaving

    @property
    def possible(self) -> bool:
        return any(tier.lends for tier in self._tiers)

    # -- lending -----------------------------------------------------------------------------------

    def lend(self, obj: CachedObject) -> Backing | None:
        backing = obj.backing
        if backing is None:
            backing = self._make(obj)
            if backing is None:
                return None
        elif backing.users:
            if backing.tier.number in obj.leaving or backing.tier.disk.down:
                return None
            backing.users += 1
            return backing
        elif backing.tier.disk.down:
            return None
        else:
            del self._idle[backing]
        backing.users = 1
        touch = self._catalog.touch_if_old
        for copy in backing.copies:
            copy.pins += 1
            if touch(copy):
                self._catalog.use(obj, copy, hit=True)
        return backing

    def _make(self, obj: CachedObject) -> Backing | None:
        for tier in self._tiers:
            if not tier.lends or self._closed or tier.disk.down:
                continue
            copies = self._whole(obj, tier, verified=True)
            if copies is None:
                continue
            try:
                fd = tier.seal(obj.id.digest, obj.id.size)
            except OSError as exc:
                log.debug("cannot lend %s from the %s tier: %s", obj.id.key, tier.name, exc)
                continue
            obj.sealed.add(tier.number)
            backing = obj.backing = Backing(obj, tier, fd, copies)
            tier.lent += 1
            return backing
        return None

    def to_seal(self, obj: CachedObject) -> Tier | None:
        """The tier that can lend it once its file is sealed, where that may have to wait for a disk."""
        if obj.backing is not None or self._closed:
            return None
        for tier in self._tiers:
            if tier.lends and not tier.disk.down and self._whole(obj, tier, verified=True):
                return tier if tier.blocking and not obj.is_sealed(tier) else None
        return None

    async def seal(self, obj: CachedObject) -> None:
        """Seal what `to_seal` has found, if that can be done; after that `lend` does not wait for the disk."""
        tier = self.to_seal(obj)
        copies = self._whole(obj, tier, verified=True) if tier is not None else None
        if tier is None or copies is None:
            return
        sealed = [False]

        def seal() -> None:
            os.close(tier.seal(obj.id.digest, obj.id.size))
            sealed[0] = True

        def finish(_: object) -> None:
            if sealed[0]:
                obj.sealed.add(tier.number)
            obj.refs -= 1
            self._room.unpin(obj, *copies)
            if obj.fds and not obj.in_use():
                obj.close_files()

        obj.refs += 1
        for copy in copies:
            copy.pins += 1
        try:
            await tier.disk.run(seal, finish)
        except OSError as exc:
            log.debug("cannot seal %s in the %s tier: %s", obj.id.key, tier.name, exc)

    def give_back(self, backing: Backing) -> None:
        backing.users -= 1
        if backing.users:
            return
        obj = backing.object
        if not backing.id or self._closed or backing.tier.number in obj.leaving:
            self._retire(backing)
            self._room.unpin(obj, *backing.copies)
        else:
            touch = self._catalog.touch_if_old
            for copy in backing.copies:
                copy.pins -= 1
                touch(copy)
            self._idle[backing] = None
            if len(self._idle) > IDLE_BACKINGS:
                self._retire(self._idle.popitem(last=False)[0])
        if obj.fds and not obj.in_use():
            obj.close_files()

    def refuse(self, tier: Tier, reason: str) -> None:
        if tier.lends:
            tier.lends = False
            log.warning("files of the %s tier are read through the daemon: %s", tier.name, reason)

    def _retire(self, backing: Backing) -> None:
        self._idle.pop(backing, None)
        backing.tier.lent -= 1
        backing.object.backing = None
        self._retired(backing)
        backing.close()

    def _leaving(self, obj: CachedObject, tier: Tier) -> None:
        backing = obj.backing
        if backing is not None and backing.tier is tier and not backing.users:
            self._retire(backing)

    def _forgotten(self, obj: CachedObject) -> None:
        if obj.backing is not None:
            self._retire(obj.backing)  # it has no users: those pin copies

    def close(self) -> None:
        """Nothing is lent any more; what has users is retired with the last."""
        self._closed = True
        while self._idle:
            self._retire(next(iter(self._idle)))

    def _whole(self, obj: CachedObject, tier: Tier, *, verified: bool) -> list[Copy] | None:
        """The version's copies on the tier, if they have all its blocks."""
        blocks = block_count(obj.id.size, self._block_size)
        copies = []
        for extent in range(-(-blocks // BLOCKS_PER_EXTENT)):
            bits = extent_bits(blocks, extent)
            copy = self._catalog.copy(obj, tier.number, extent)
            if copy is None or copy.bitmap != bits or copy.arriving or (verified and copy.verified != bits):
                return None
            copies.append(copy)
        return copies or None

    # -- making ready ------------------------------------------------------------------------------

    def prepare_later(self, obj: CachedObject) -> None:
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
                obj.refs += 1
                try:
                    if await self._prepare(obj):
                        self._metrics.prepared_versions += 1
                except Exception:
                    log.exception("cannot make %s ready for the kernel", object_id.key)
                finally:
                    obj.refs -= 1
                    if not obj.in_use():
                        obj.close_files()

    def _ready(self, obj: CachedObject) -> bool:
        """Whether a tier can lend it as it is."""
        return any(tier.lends and self._whole(obj, tier, verified=True) for tier in self._tiers)

    async def _prepare(self, obj: CachedObject) -> bool:
        if self._ready(obj):
            return False  # somebody read all of it meanwhile
        whole = [tier for tier in self._tiers if self._whole(obj, tier, verified=False)]
        if not whole and await self._gather(obj):
            whole = [self._tiers[-1]]
        for tier in whole:
            if tier.lends:
                return await self._verify(obj, tier)
        return False

    async def _gather(self, obj: CachedObject) -> bool:
        """Bring together in SSD what lies in parts there and in RAM."""
        if self._moves is None:
            return False
        ram, ssd = self._tiers
        blocks = block_count(obj.id.size, self._block_size)
        if not ssd.lends or not ssd.writable() or allocated(obj.id.size) > ssd.limit_bytes():
            return False
        if obj.is_sealed(ssd):
            return False  # a crash cost it some of its rows; what is left of it can still be read
        parts: list[list[Copy]] = []
        for extent in range(-(-blocks // BLOCKS_PER_EXTENT)):
            copies = [c for t in (ram, ssd) if (c := self._catalog.copy(obj, t.number, extent)) is not None]
            held = 0
            for copy in copies:
                held |= copy.bitmap
            if held != extent_bits(blocks, extent) or any(c.arriving for c in copies):
                return False
            parts.append(copies)
        down = [c for copies in parts for c in copies if c.tier == ram.number]
        if any(copy.key in self._catalog.borrowed for copy in down):
            return False  # that is for another node to keep
        kept = [c for copies in parts for c in copies if c.tier == ssd.number]
        for copy in (*down, *kept):
            copy.pins += 1  # the room that some of it needs must not come from the rest
        try:
            for copy in down:
                if not await self._moves.move(obj, copy, ssd, Evict.SPARE):
                    return False
        finally:
            self._room.unpin(obj, *down)
            self._room.unpin(obj, *kept)
        if self._whole(obj, ssd, verified=False) is None:
            return False
        for copy in down:
            if copy.bitmap and not copy.pins:
                self._room.drop(obj, copy, copy.bitmap)
        return True

    async def _verify(self, obj: CachedObject, tier: Tier) -> bool:
        """Check the blocks that nobody has read yet."""
        for copy in self._whole(obj, tier, verified=False) or ():
            bits = copy.bitmap & ~copy.verified
            if not bits:
                continue
            ranges = list(self._catalog.ranges(copy, bits))
            positions = [p for p in range(BLOCKS_PER_EXTENT) if bits >> p & 1]
            wanted = [copy.checksums[p] for p in positions]
            copy.pins += 1
            try:
                found = await trio.to_thread.run_sync(
                    _checksums, tier, obj.id.digest, ranges, limiter=self._one_thread
                )
            except OSError as exc:
                self._room.lost(obj, copy, exc)
                return False
            finally:
                self._room.unpin(obj, copy)
            good = sum(1 << p for p, a, b in zip(positions, wanted, found, strict=True) if a == b)
            copy.verified |= good & copy.bitmap
            if good != bits:
                self._room.corrupt(obj, copy, bits & ~good)
                return False
        return self._whole(obj, tier, verified=True) is not None


def _checksums(tier: Tier, digest: bytes, ranges: list[tuple[int, int]]) -> list[int]:
    """Worker thread: xxh3_64 of each range; of what there is, where the file is too short."""
    buffer = memoryview(bytearray(max(length for _, length in ranges)))
    found = []
    fd = tier.open_file(digest, create=False)
    try:
        for start, length in ranges:
            count = os.preadv(fd, [buffer[:length]], start)
            found.append(xxhash.xxh3_64_intdigest(buffer[:count]))
    finally:
        os.close(fd)
    return found

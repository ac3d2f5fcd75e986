"""How much may be written and not be at the origin: when a writer waits, and what it gets when the disk is full.

Two bounds. Of one file, `UNSENT` bytes may wait for their turn on the wire, where they are sent while the file is written:
beyond that the writer goes as fast as the origin. Of the disk, `keep_free` bytes shall stay free: the cache gives way first,
then the writer waits for other files to be uploaded and given to the cache, which can evict them. If that does not help, it
may write into what is kept free, because that is kept free for users' files. The last tenth of it is left to other
programs: then this writer alone gets `NoRoom`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import trio

from cachefs.base.errors import CacheUnusable, NoRoom
from cachefs.base.names import ObjectId
from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.staging import LOOK_S, existing, translated

UNSENT = 512 << 20
"""Guessed: seconds of a fast store, and less than what a node has of page cache."""

WAIT_S = 30.0
"""Guessed: as long as programs wait for a slow disk before a user looks."""

LEFT_TO_OTHERS = 10
"""This part of what is kept free is not written into. Guessed: of the usual 10 %, one of the disk."""

UNASKED = 1 << 30
"""With less room than this, a writer has to ask, so it gets no passthrough. Derived: a disk of 4 GB/s (PCIe 3.0, 4 lanes)
takes it from one look to the next (`LOOK_S`)."""


class Cache(Protocol):
    """What `StagingRoom` asks of the cache store."""

    @property
    def hangs(self) -> bool:
        """Whether its disk is known not to answer."""

    async def adopt(self, obj_id: ObjectId, path: Path) -> bool:
        """Take the file as the whole content of a version; False: it is still there, and the caller's."""

    async def adopt_bytes(self, versions: Sequence[tuple[ObjectId, bytes]]) -> list[bool]:
        """The same for several with their whole contents in memory; False: it is not kept."""

    def take_out(self, backing: Any, users: int, path: Path) -> int | None:
        """The file of a version goes to `path`, with its users; a descriptor of it. None while others use it."""

    async def recast(self, old: ObjectId, new: ObjectId) -> bool:
        """The origin shows `old` as `new` now."""

    async def evict_to_hold(self, wanted: int) -> bool:
        """Evict so that the disk gets freer."""


@dataclass(eq=False, repr=False)
class StagingRoom:
    """The disk that the staging files lie on. `_hopeful` says whether uploads are on their way that will free some."""

    _directory: Path
    _keep_free: int
    _cache: Cache
    _hopeful: Callable[[DirtyFile | None], bool]
    _impatient_until: float = float("-inf")

    def free_bytes(self) -> int:
        """What may be written now. Raises `CacheUnusable`."""
        try:
            try:
                disk = os.statvfs(self._directory)
            except FileNotFoundError:  # it was removed, and is made again for the next file
                disk = os.statvfs(existing(self._directory))
        except OSError as exc:
            raise translated(exc, self._directory) from exc
        return disk.f_bavail * disk.f_frsize - self._keep_free

    def admits(self, dirty_file: DirtyFile, count: int) -> bool:
        """Whether `admit` would return at once."""
        try:
            return not self._is_ahead(dirty_file) and self.free_bytes() >= count
        except CacheUnusable:
            return False

    def _is_ahead(self, dirty_file: DirtyFile) -> bool:
        """Whether too much of it waits for its turn on the wire."""
        return bool(dirty_file.parts.under_way) and dirty_file.parts.waiting_bytes > UNSENT

    async def admit(self, dirty_file: DirtyFile, count: int) -> None:
        """Return when `count` bytes may be written. Raises `NoRoom`."""
        while self._is_ahead(dirty_file):
            await dirty_file.sender.part_ended()
        if self.free_bytes() < count and not await self.more(dirty_file, count):
            kept = self._keep_free - self._keep_free // LEFT_TO_OTHERS
            if self.free_bytes() + kept < count:
                raise NoRoom(f"the disk of {self._directory} has no room for what is written")

    async def relieve(self) -> None:
        """A passthrough writer, which does not ask for room, is writing: evict, and upload what waits."""
        if self.free_bytes() < 0 and not await self._cache.evict_to_hold(0):
            self._hopeful(None)

    async def more(self, dirty_file: DirtyFile, count: int) -> bool:
        """Have the cache make room, then wait for uploads. Whether there is room now."""
        since = trio.current_time()
        while True:
            gives_way = await self._cache.evict_to_hold(count)
            if self.free_bytes() >= count:
                return True
            now = trio.current_time()
            if now < self._impatient_until or not (gives_way or self._hopeful(dirty_file)):
                return False
            if now >= since + WAIT_S:
                # A writer that waited in vain does not wait again at each write.
                self._impatient_until = now + WAIT_S
                return False
            await trio.sleep(LOOK_S)

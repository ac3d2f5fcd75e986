"""Bounds of the bytes that are written and not uploaded: when a writer waits, and when it gets `NoRoom`.

There are two bounds. If parts of a file are sent while it is written, at most `UNSENT` of its bytes may be unsent; beyond
that the writer waits for the origin. And `keep_free` bytes of the disk should stay free: first the cache evicts, then the
writer waits until other files are uploaded and adopted by the cache, which can evict them. If that does not help, the writer
may use the space that is kept free, because it is kept free for users' files. The last tenth of it is left to other
programs: there the writer gets `NoRoom`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

from cachefs.base.errors import CacheUnusable, NoRoom
from cachefs.store import Store
from cachefs.upload.sending import Sender
from cachefs.upload.staging import LOOK_S, nearest_existing, translated

UNSENT = 512 << 20
"""Bytes of one file that may wait to be sent. Guessed: seconds of a fast origin, and less than a node's page cache."""

WAIT_S = 30.0
"""Seconds that a writer waits for space. Guessed: as long as a user lets a program wait for a slow disk."""

LEFT_TO_OTHERS = 10
"""The part of the space kept free that is left to other programs: a tenth. Guessed: 1 % of the disk, of the usual 10 %."""

UNASKED = 1 << 30
"""Free bytes below which a writer gets no passthrough, because each of its writes has to be admitted. Derived: a disk of 4
GB/s (PCIe 3.0, 4 lanes) writes so many bytes between two checks of the free space (`LOOK_S`)."""


class Writer(Protocol):
    """A dirty file that is being written."""

    sender: Sender


@dataclass(eq=False, repr=False)
class StagingRoom:
    """Space on the disk of the staging files. `_begin_planned(dirty_file)` begins the planned uploads of all other dirty
    files, and returns True if uploads of these are running or due, which will free space."""

    _directory: Path
    _keep_free: int
    _cache: Store
    _begin_planned: Callable[[object], bool]
    _impatient_until: float = float("-inf")

    def free_bytes(self) -> int:
        """Bytes that may be written without using the space kept free; may be negative. Raises `CacheUnusable`."""
        try:
            try:
                disk = os.statvfs(self._directory)
            except FileNotFoundError:  # the directory was removed, and is made again for the next file
                disk = os.statvfs(nearest_existing(self._directory))
        except OSError as exc:
            raise translated(exc, self._directory) from exc
        return disk.f_bavail * disk.f_frsize - self._keep_free

    def admits(self, dirty_file: Writer, count: int) -> bool:
        """True if `admit` would return at once."""
        try:
            return not self._is_ahead(dirty_file) and self.free_bytes() >= count
        except CacheUnusable:
            return False

    def _is_ahead(self, dirty_file: Writer) -> bool:
        """True if a file is written faster than it is sent: parts are in flight, and too many of its bytes are unsent."""
        parts = dirty_file.sender.parts
        return bool(parts.under_way) and parts.waiting_bytes > UNSENT

    async def admit(self, dirty_file: Writer, count: int) -> None:
        """Wait until `count` bytes may be written. Raises `NoRoom`, `CacheUnusable`."""
        while self._is_ahead(dirty_file):
            await dirty_file.sender.part_ended()
        if self.free_bytes() < count and not await self.more(dirty_file, count):
            usable = self._keep_free - self._keep_free // LEFT_TO_OTHERS
            if self.free_bytes() + usable < count:
                raise NoRoom(f"the disk of {self._directory} has no room for what is written")

    async def relieve(self) -> None:
        """Evict if no space is left but what is kept free, and upload waiting files if eviction does not help. Called while
        there are passthrough writers, whose writes are not admitted."""
        if self.free_bytes() < 0 and not await self._cache.evict_to_hold(0):
            self._begin_planned(None)

    async def more(self, dirty_file: object, count: int) -> bool:
        """Have the cache evict, then wait for uploads, `WAIT_S` at most. True if `count` bytes may be written now."""
        since = trio.current_time()
        while True:
            evicted = await self._cache.evict_to_hold(count)
            if self.free_bytes() >= count:
                return True
            now = trio.current_time()
            if now < self._impatient_until or not (evicted or self._begin_planned(dirty_file)):
                return False
            if now >= since + WAIT_S:
                # Further writes do not wait, either, for `WAIT_S` from now.
                self._impatient_until = now + WAIT_S
                return False
            await trio.sleep(LOOK_S)

"""Files that the kernel reads without OPEN requests (`--zero-open`): handles by inode, opened at the first read."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass

from cachefs.base.errors import CachefsError, ObjectChanged
from cachefs.fs import FileSystem
from cachefs.fs.reader import Buffer

MOST_HANDLES = 1024
"""Handles kept; beyond it the least recently read one is released. Derived: 64 loader workers (eight accelerators, eight
workers each) that interleave 16 files each keep their readahead. Each handle may take a descriptor, and no program closes
it, so there are fewer than half of the 4,096 that Linux allows a process by default."""


@dataclass(slots=True, eq=False)
class _Handle:
    """A handle, and the number of reads (`readers`) that wait for its bytes. If it has `ended`, the last of them releases
    it."""

    fh: int
    readers: int = 0
    ended: bool = False


class UnopenedFiles:
    def __init__(self, fs: FileSystem) -> None:
        self.handles: OrderedDict[int, _Handle] = OrderedDict()  # by inode, the most recently read last
        self._fs = fs

    def read_now(self, inode: int, offset: int, size: int) -> Buffer | None:
        """The bytes, clipped to the object; None if `read` has to be awaited."""
        handle = self.handles.get(inode)
        if handle is None:
            return None
        self.handles.move_to_end(inode)
        try:
            return self._fs.read_now(handle.fh, offset, size)
        except CachefsError as exc:
            self._end(inode, handle, exc)
            raise

    async def read(self, thread: int, inode: int, offset: int, size: int) -> Buffer:
        handle = self.handles.get(inode)
        if handle is None:
            fh, _ = await self._fs.open(inode, os.O_RDONLY, thread)
            handle = self.handles.get(inode)
            if handle is not None:  # another read has opened it meanwhile
                self._fs.release(fh)
            else:
                handle = self.handles[inode] = _Handle(fh)
                if len(self.handles) > MOST_HANDLES:
                    self._end(*next(iter(self.handles.items())))
        handle.readers += 1
        try:
            return await self._fs.read(handle.fh, offset, size)
        except CachefsError as exc:
            self._end(inode, handle, exc)
            raise
        finally:
            handle.readers -= 1
            if handle.ended and not handle.readers:
                self._fs.release(handle.fh)

    def _end(self, inode: int, handle: _Handle, why: CachefsError | None = None) -> None:
        """Forget a handle, so that the next read opens the file's current version."""
        if self.handles.get(inode) is handle:
            del self.handles[inode]
        if handle.ended:
            return
        handle.ended = True
        if not handle.readers:
            self._fs.release(handle.fh)
        if isinstance(why, ObjectChanged):
            # Without an OPEN the kernel would keep the old version's pages.
            self._fs.on_invalidate(inode, 0, b"")

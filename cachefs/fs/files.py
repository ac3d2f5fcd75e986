"""Open files: handles, and what makes two versions of one object never meet in the kernel's page cache.

The kernel keeps pages per inode, not per handle. So as soon as a version is opened, handles of an older version of that
inode are superseded: their reads fail, lest they put old bytes where the new reader looks. And the first open after a
change tells the kernel to drop what it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cachefs.errors import NotFound

if TYPE_CHECKING:
    from cachefs.fs.reader import Reader
    from cachefs.names import ObjectId
    from cachefs.origin import Origin

CHANGES_REMEMBERED = 65_536
"""Inodes known to have changed and not opened since, about 70 bytes each. Guessed; beyond it the oldest rely on the
invalidation that was sent to the kernel when the change was seen."""


class FileHandle:
    __slots__ = ("counted", "ino", "object", "opened", "pid", "size", "superseded")

    def __init__(self, ino: int, obj: ObjectId, opened: Any, pid: int) -> None:
        self.ino = ino
        self.object = obj
        self.size = obj.size
        self.opened = opened
        self.pid = pid
        self.superseded = False
        self.counted = False


class OpenFiles:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._next = 1
        self._handles: dict[int, FileHandle] = {}
        self._by_ino: dict[int, list[FileHandle]] = {}
        self._changed: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def open(self, ino: int, origin: Origin, obj: ObjectId, pid: int) -> tuple[int, bool]:
        """A handle, and whether pages the kernel has of this inode are of this version.

        Pages cannot be older than the mount, and every change since is noted, so "not noted" means they are."""
        keep = True
        if self._changed and ino in self._changed:
            del self._changed[ino]
            keep = False
        handle = FileHandle(ino, obj, self._reader.open(origin, obj), pid)
        others = self._by_ino.get(ino)
        if others is None:
            self._by_ino[ino] = [handle]
        else:
            for other in others:
                if other.object != obj and not other.superseded:
                    other.superseded = True
                    keep = False
            others.append(handle)
        fh = self._next
        self._next = fh + 1
        self._handles[fh] = handle
        return fh, keep

    def get(self, fh: int) -> FileHandle:
        try:
            return self._handles[fh]
        except KeyError:
            raise NotFound(f"no file handle {fh}") from None

    def of(self, ino: int) -> list[FileHandle]:
        return self._by_ino.get(ino, [])

    def note_change(self, ino: int) -> None:
        """The kernel may have pages of an older version."""
        self._changed.pop(ino, None)
        self._changed[ino] = None
        if len(self._changed) > CHANGES_REMEMBERED:
            del self._changed[next(iter(self._changed))]

    def release(self, fh: int) -> None:
        handle = self._handles.pop(fh, None)
        if handle is None:
            return
        others = self._by_ino[handle.ino]
        if len(others) == 1:
            del self._by_ino[handle.ino]
        else:
            others.remove(handle)
        self._reader.close(handle.opened)

    def close(self) -> None:
        for fh in list(self._handles):
            self.release(fh)

"""The half of `FileSystem` that changes something, as a FUSE backend calls it; what is behind it is in `writing`.

Where nothing can be written, all of it raises `ReadOnly`.
"""

from __future__ import annotations

import stat
from functools import partial
from typing import TYPE_CHECKING, Any

from cachefs.base.errors import ReadOnly
from cachefs.fs.overrides import without_set_ids

if TYPE_CHECKING:
    from cachefs.fs.attributes import Attributes
    from cachefs.fs.reader import Buffer
    from cachefs.fs.tree import Directory, Found
    from cachefs.fs.writing import Opened, Writing


class Writes:
    _writing: Writing | None

    # What the other half has.
    if TYPE_CHECKING:

        def _directory(self, ino: int) -> Directory: ...
        def _answer(
            self, found: Found | float, at: Directory, name: bytes
        ) -> tuple[Attributes | None, float]: ...
        def attributes_now(self, ino: int) -> tuple[Attributes, float] | None: ...
        async def getattr(self, ino: int) -> tuple[Attributes, float]: ...

    @property
    def _write(self) -> Writing:
        if self._writing is None:
            raise ReadOnly("the mount is read-only")
        return self._writing

    async def recover(self) -> None:
        """Show what an earlier daemon did not bring to the store, and finish what it began there. Before the mount, and
        behind the writer's own recovery."""
        if self._writing is not None:
            await self._writing.recover()

    # -- files -------------------------------------------------------------------------------------

    async def create(
        self, parent: int, name: bytes, flags: int, mode: int, pid: int, uid: int, gid: int
    ) -> tuple[Attributes, float, Opened]:
        """A new file and a handle of it; without O_EXCL the one that is there will do. Raises `AlreadyExists`."""
        writing = self._write

        async def create(directory: Directory, name: bytes) -> tuple[int, Opened]:
            return await writing.create(directory, name, flags, mode, pid, uid, gid)

        ino, opened = await self._claimed((parent, name), create)
        try:
            attributes, ttl = self.attributes_now(ino) or await self.getattr(ino)
        except BaseException:
            self._write.release(opened[0])
            raise
        return attributes, ttl, opened

    async def mknod(
        self, parent: int, name: bytes, mode: int, pid: int, uid: int, gid: int
    ) -> tuple[Attributes, float]:
        """A new, empty file at the store. `NotPermitted` for anything but a regular file."""
        writing = self._write

        async def make(directory: Directory, name: bytes) -> int:
            return await writing.mknod(directory, name, mode, pid, uid, gid)

        ino = await self._claimed((parent, name), make)
        return self.attributes_now(ino) or await self.getattr(ino)

    async def write(self, fh: int, offset: int, data: Buffer) -> int:
        """All of it, or an error: `BadHandle`, `NoRoom`, `TooLarge`, `ObjectChanged`. `data` must not change until this
        returns. Where O_APPEND writes to is what the kernel says: it knows the size, and no other node writes here."""
        return await self._write.write(fh, offset, data)

    def clear_set_ids(self, fh: int, *, later: bool = False) -> None:
        """The file was changed by a process that may not keep its set-uid and set-gid bits; `later`: or may be."""
        self._write.clear_set_ids(fh, later)

    async def flush(self, fh: int) -> None:
        """What close(2) waits for, and what it says. Nothing for handles that only read."""
        if self._writing is not None:
            await self._writing.flush(fh)

    async def fsync(self, fh: int) -> None:
        if self._writing is not None:
            await self._writing.fsync(fh)

    async def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        """Only mode 0. Raises `Unsupported`, and what `write` does."""
        await self._write.fallocate(fh, mode, offset, length)

    async def setattr(
        self,
        ino: int,
        *,
        size: int | None = None,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        fh: int | None = None,
        clear: bool = False,
    ) -> tuple[Attributes, float]:
        """Change what is not None. A new size is new content; the rest is kept on this node. A new owner takes the set-uid
        and set-gid bits of a file away, and so does `clear`."""
        writing = self._write
        if size is not None:
            await writing.truncate(ino, size, fh)
        if uid is not None or gid is not None or clear:
            shown, _ = self.attributes_now(ino) or await self.getattr(ino)
            wanted = shown.mode if mode is None else stat.S_IFMT(shown.mode) | mode
            if (clean := without_set_ids(wanted)) != wanted:
                mode = stat.S_IMODE(clean)
        given = {"mode": mode, "uid": uid, "gid": gid, "atime_ns": atime_ns, "mtime_ns": mtime_ns}
        news = {name: value for name, value in given.items() if value is not None}
        kept = bool(news) and writing.keep(ino, news)
        shown_now = self.attributes_now(ino)  # in the same step: the name may go to another file meanwhile
        if kept:
            await writing.kept()
        return shown_now or await self.getattr(ino)

    # -- names -------------------------------------------------------------------------------------

    async def mkdir(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int
    ) -> tuple[Attributes, float]:
        """A marker at the store, so that all see it. Raises `AlreadyExists`."""
        writing = self._write

        async def make(directory: Directory, name: bytes) -> tuple[Attributes | None, float]:
            found = await writing.mkdir(directory, name, mode, uid, gid)
            return self._answer(found, directory, name)

        attributes, ttl = await self._claimed((parent, name), make)
        assert attributes is not None
        return attributes, ttl

    async def unlink(self, parent: int, name: bytes) -> None:
        """Who has it open goes on with what was written here, or with what is cached. Raises `NotFound`, `IsADirectory`."""
        await self._claimed((parent, name), self._write.unlink)

    async def rmdir(self, parent: int, name: bytes) -> None:
        """Raises `NotFound`, `NotADirectory`, `NotEmpty` (by a fresh listing)."""
        await self._claimed((parent, name), self._write.rmdir, trees=True)

    async def rename(self, parent: int, name: bytes, newparent: int, newname: bytes, flags: int) -> None:
        """Replaces a file, or an empty directory by a directory. `flags` as in renameat2: of them, RENAME_NOREPLACE is
        known. Raises `CrossDevice` between two sources."""
        rename = partial(self._write.rename, flags=flags)
        await self._claimed((parent, name), (newparent, newname), rename, trees=True)

    async def _claimed(self, *arguments: Any, trees: bool = False) -> Any:
        """Make a change (the last argument) at names, given as (number of the directory, name)."""
        *names, change = arguments
        return await self._write.claimed(
            lambda: [(self._directory(parent), name) for parent, name in names], change, trees=trees
        )

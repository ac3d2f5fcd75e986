"""pyfuse3's handlers of a mount that can be written.

No deadline here: each request to the store has one, and whatever must not be left half done is not given up. libfuse hands
no INTERRUPT on, so who waits for a close waits until it has been decided.
"""

from __future__ import annotations

import errno
import stat
from typing import Any, NoReturn

import pyfuse3

from cachefs.fuse.closing import Writers
from cachefs.fuse.errno_table import OURS
from cachefs.fuse.kernel_writing import WRITING
from cachefs.fuse.pyfuse3_front import Pyfuse3Base, entry_of
from cachefs.ledger import NAMES, WRITES


class WritablePyfuse3Front(Pyfuse3Base):
    _fs: Any

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._writers = Writers(lambda: self._number)

    # -- handles -----------------------------------------------------------------------------------

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        if not flags & WRITING:
            return await super().open(inode, flags, ctx)
        self._metrics.fuse_open += 1
        try:
            with self._called(ctx.pid, NAMES, "open"):
                fh, keep, _ = await self._fs.open(inode, flags, ctx.pid)
        except Exception as exc:
            self._fail("open", exc)
        self._writers.opened(fh, inode, ctx.pid)
        return pyfuse3.FileInfo(fh=fh, keep_cache=keep)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Any
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        self._metrics.fuse_create += 1
        try:
            with self._called(ctx.pid, NAMES, "create"):
                attributes, ttl, (fh, keep, _) = await self._fs.create(
                    parent_inode, name, flags, mode, ctx.pid, ctx.uid, ctx.gid
                )
        except Exception as exc:
            self._fail("create", exc)
        self._writers.opened(fh, attributes.ino, ctx.pid)
        return pyfuse3.FileInfo(fh=fh, keep_cache=keep), entry_of(attributes, ttl)

    async def release(self, fh: int) -> None:
        self._writers.released(fh)
        await super().release(fh)

    # -- bytes -------------------------------------------------------------------------------------

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        self._metrics.fuse_write += 1
        try:
            with self._admission.holds(len(buf)), self._called(self._writers.process(fh), WRITES, "write"):
                size: int = await self._fs.write(fh, off, buf)
        except Exception as exc:
            self._fail("write", exc)
        self._metrics.fuse_write_bytes += size
        return size

    async def flush(self, fh: int) -> None:
        if fh not in self._writers:
            self._metrics.fuse_other += (
                1  # libfuse's binding cannot say that closes of readers are of no interest
            )
            return
        self._metrics.fuse_flush += 1
        try:
            with self._called(self._writers.process(fh), WRITES, "close"):
                if await self._writers.last(fh):
                    await self._fs.flush(fh)
        except Exception as exc:
            self._fail("flush", exc)

    async def fsync(self, fh: int, datasync: bool) -> None:
        self._metrics.fuse_flush += 1
        try:
            with self._called(self._writers.process(fh), WRITES, "fsync"):
                await self._fs.fsync(fh)
        except Exception as exc:
            self._fail("fsync", exc)

    # -- names and attributes ----------------------------------------------------------------------

    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: Any
    ) -> pyfuse3.EntryAttributes:
        self._metrics.fuse_create += 1
        if not stat.S_ISREG(mode):
            raise pyfuse3.FUSEError(errno.EPERM)  # pipes, sockets, devices
        try:
            with self._called(ctx.pid, NAMES, "mknod"):
                return entry_of(*await self._fs.mknod(parent_inode, name, mode, ctx.pid, ctx.uid, ctx.gid))
        except Exception as exc:
            self._fail("mknod", exc)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        self._metrics.fuse_change += 1
        try:
            with self._called(ctx.pid, NAMES, "mkdir"):
                return entry_of(*await self._fs.mkdir(parent_inode, name, mode, ctx.uid, ctx.gid))
        except Exception as exc:
            self._fail("mkdir", exc)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        self._metrics.fuse_change += 1
        try:
            with self._called(ctx.pid, NAMES, "unlink"):
                await self._fs.unlink(parent_inode, name)
        except Exception as exc:
            self._fail("unlink", exc)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        self._metrics.fuse_change += 1
        try:
            with self._called(ctx.pid, NAMES, "rmdir"):
                await self._fs.rmdir(parent_inode, name)
        except Exception as exc:
            self._fail("rmdir", exc)

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: Any,
    ) -> None:
        self._metrics.fuse_change += 1
        try:
            with self._called(ctx.pid, NAMES, "rename"):
                await self._fs.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags)
        except Exception as exc:
            self._fail("rename", exc)

    async def setattr(
        self, inode: int, attr: pyfuse3.EntryAttributes, fields: Any, fh: int | None, ctx: Any
    ) -> pyfuse3.EntryAttributes:
        self._metrics.fuse_change += 1
        try:
            with self._called(ctx.pid, NAMES, "setattr"):
                found = await self._fs.setattr(
                    inode,
                    size=attr.st_size if fields.update_size else None,
                    mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
                    uid=attr.st_uid if fields.update_uid else None,
                    gid=attr.st_gid if fields.update_gid else None,
                    mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
                    fh=fh,
                )
        except Exception as exc:
            self._fail("setattr", exc)
        return entry_of(*found)

    # -- what there is not -------------------------------------------------------------------------

    async def _not_permitted(self, *_: Any, **__: Any) -> NoReturn:
        self._metrics.fuse_other += 1
        raise pyfuse3.FUSEError(errno.EPERM)

    symlink = link = _not_permitted

    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: Any) -> None:
        await self.removexattr(inode, name, ctx)

    async def removexattr(self, inode: int, name: bytes, ctx: Any) -> None:
        """Of ours a copy may have some, from another mount: they are taken, and not kept."""
        self._metrics.fuse_other += 1
        if not name.startswith(OURS):
            raise pyfuse3.FUSEError(errno.EOPNOTSUPP)

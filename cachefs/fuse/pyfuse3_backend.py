"""The pyfuse3 backend: libfuse speaks the kernel's protocol. It runs everywhere, also for plain users, without passthrough.

A handler calls `Operations` and turns the answer into pyfuse3's structures. An answer that is known at once is returned
without an await, so it needs neither a deadline nor the scheduler. libfuse does not forward interrupts, so a process that
waits in close(2) waits until the upload has succeeded or failed.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import pyfuse3

from cachefs.base.errors import MountError
from cachefs.base.metrics import Metrics
from cachefs.fs import Attributes, Backing, Entry, FileSystem, Space
from cachefs.fs.dirty_files import Opened
from cachefs.fs.filesystem import Created
from cachefs.fuse.connection import abort, device_at, device_of, end, mount_options
from cachefs.fuse.operations import AttributesReply, Errno, LookupReply, Operations, Pending, Waiting

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

MOST_TASKS = 1 << 20
"""Bound of pyfuse3's tasks, one for each request; with so many it reads no further request. It is out of reach, so that
`Admission` is the bound. Derived: with 16 KiB each, more than a quarter of any machine's memory."""

READ_S = 0.25
"""How long a read of the kernel's requests may block. Guessed: programs do not notice such a pause, and four signals a
second cost next to nothing."""


class Pyfuse3Backend(pyfuse3.Operations):
    name = "pyfuse3"
    max_background = 0

    enable_writeback_cache = False
    supports_dot_lookup = False

    def __init__(
        self, fs: FileSystem, metrics: Metrics, deadline_s: float, *, writable: bool = False
    ) -> None:
        super().__init__()
        self.operations = Operations(fs, metrics, deadline_s, writable=writable, device=lambda: self._device)
        self._metrics = metrics
        self._writable = writable
        self._ready: Callable[[], None] = lambda: None
        self._mountpoint: Path | None = None  # set if this backend has to unmount
        self._device = ""  # "major:minor" of the connection, as long as it lives
        self._directory_openers: dict[int, int] = {}  # handle of an open directory → thread that opened it

    # -- the backend ---------------------------------------------------------------------------------

    def mount(self, mountpoint: Path, name: str, flags: Sequence[str]) -> None:
        self._begin(str(mountpoint), mount_options(name, flags, writable=self._writable))
        self._mountpoint = mountpoint
        self._device = device_at(mountpoint)

    def take(self, fd: int, name: str) -> None:
        """Serve a descriptor that another process has mounted, and will unmount. Raises `MountError`."""
        self._device = device_of(fd)
        self._begin(f"/dev/fd/{fd}", [f"fsname={name}"])

    def _begin(self, mountpoint: str, options: Sequence[str]) -> None:
        try:
            pyfuse3.init(self, mountpoint, {*pyfuse3.default_options, *options})
        except RuntimeError as exc:
            raise MountError(str(exc)) from exc

    async def serve(self, ready: Callable[[], None]) -> None:
        self._ready = ready
        # pyfuse3 polls for a request and then reads it. If the calling process is killed in between, the read blocks, and
        # the whole daemon waits for another request. The timer's signal ends the read.
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, READ_S, READ_S)
        try:
            await pyfuse3.main(min_tasks=1, max_tasks=MOST_TASKS)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._device = ""

    def init(self) -> None:
        self._ready()

    def pause(self) -> None:
        raise NotImplementedError("no holder keeps this connection")

    def close(self, *, unmount: bool = True) -> None:
        if self._device:
            # First, because a running notification could block libfuse, which does not unmount an aborted connection.
            if self._mountpoint is not None and unmount:
                end(self._mountpoint, self._device)
            else:
                abort(self._device)
        pyfuse3.close(unmount=unmount)

    def register(self, backing: Backing) -> None:
        raise OSError(errno.EOPNOTSUPP, "pyfuse3 cannot")

    def retire(self, backing: Backing) -> None:
        return

    def invalidate(self, inode: int, parent: int, name: bytes) -> None:
        try:
            if inode:
                pyfuse3.invalidate_inode(inode, attr_only=False)
        except OSError as exc:
            log.debug("invalidate inode: %s", exc)  # ENOENT: the kernel does not know it
        try:
            if name:
                pyfuse3.invalidate_entry(parent, name)
        except OSError as exc:
            log.debug("invalidate entry: %s", exc)

    async def _answer(
        self, reply: Callable[[T], R], operation: Callable[[*Ts], T | Pending[T]], *arguments: *Ts
    ) -> R:
        """Call the operation and return `reply` of its answer. Every failure becomes a FUSEError, because pyfuse3 lets any
        other exception end the daemon."""
        try:
            found = operation(*arguments)
            if isinstance(found, Pending):
                found = await Waiting(found, self.operations).answer()
            return reply(found)
        except Exception as exc:
            raise pyfuse3.FUSEError(self.operations.errno_of(operation.__name__, exc)) from exc

    # -- names and attributes ----------------------------------------------------------------------

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        return await self._answer(_looked_up, self.operations.lookup, ctx.pid, parent_inode, name)

    async def getattr(self, inode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        return await self._answer(_entry, self.operations.getattr, ctx.pid, inode)

    async def setattr(
        self, inode: int, attr: pyfuse3.EntryAttributes, fields: Any, fh: int | None, ctx: Any
    ) -> pyfuse3.EntryAttributes:
        def setattr() -> Pending[AttributesReply]:
            return self.operations.setattr(
                ctx.pid,
                inode,
                size=attr.st_size if fields.update_size else None,
                mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
                uid=attr.st_uid if fields.update_uid else None,
                gid=attr.st_gid if fields.update_gid else None,
                atime_ns=attr.st_atime_ns if fields.update_atime else None,
                mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
                clear_set_ids=False,  # here the kernel clears the bits itself, by a mode without them
                fh=fh,
            )

        return await self._answer(_entry, setattr)

    async def forget(self, inode_list: Any) -> None:
        return  # no state is kept for the inodes that the kernel knows

    async def statfs(self, ctx: Any) -> pyfuse3.StatvfsData:
        return await self._answer(_statvfs, self.operations.statfs)

    async def access(self, inode: int, mode: int, ctx: Any) -> bool:
        return True  # the kernel checks the mode bits (default_permissions)

    async def readlink(self, inode: int, ctx: Any) -> bytes:
        return await self._answer(_unchanged, self.operations.readlink)

    async def getxattr(self, inode: int, name: bytes, ctx: Any) -> bytes:
        return await self._answer(_unchanged, self.operations.getxattr, ctx.pid, inode, name, ctx.uid)

    async def listxattr(self, inode: int, ctx: Any) -> list[bytes]:
        return self.operations.listxattr()

    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: Any) -> None:
        await self._answer(_done, self.operations.setxattr, name)

    async def removexattr(self, inode: int, name: bytes, ctx: Any) -> None:
        await self._answer(_done, self.operations.setxattr, name)

    # -- directories -------------------------------------------------------------------------------

    async def opendir(self, inode: int, ctx: Any) -> int:
        dh = await self._answer(_unchanged, self.operations.opendir, inode)
        self._directory_openers[dh] = ctx.pid
        return dh

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        def reply(entries: list[Entry]) -> None:
            for entry in entries:
                shown = entry_of(entry.attributes, entry.ttl)
                if not pyfuse3.readdir_reply(token, entry.name, shown, entry.next_offset):
                    break

        await self._answer(reply, self.operations.readdir, self._directory_openers.get(fh, 0), fh, start_id)

    async def releasedir(self, fh: int) -> None:
        self._directory_openers.pop(fh, None)
        try:
            self.operations.releasedir(fh)
        except Exception:
            log.exception("releasedir")  # not raised, because the kernel ignores the answer to a release

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        return

    # -- files -------------------------------------------------------------------------------------

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        # The kernel does not mark opens that empty a file, and capabilities are unknown here. So root alone keeps the bits.
        clear_set_ids = bool(ctx.uid) and bool(flags & os.O_TRUNC)
        return await self._answer(_file, self.operations.open, ctx.pid, inode, flags, clear_set_ids)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Any
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        create = self.operations.create
        return await self._answer(
            _created, create, ctx.pid, parent_inode, name, flags, mode, ctx.uid, ctx.gid
        )

    async def read(self, fh: int, off: int, size: int) -> Any:
        return await self._answer(_unchanged, self.operations.read, 0, fh, off, size)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        process = self.operations.writers.process(fh)
        return await self._answer(_unchanged, self.operations.write, process, fh, off, buf, len(buf), False)

    async def flush(self, fh: int) -> None:
        writers = self.operations.writers
        if self._writable and fh not in writers:
            # A close of a reader: pyfuse3 cannot tell the kernel that these need no FLUSH.
            self._metrics.fuse_other += 1
            return
        await self._answer(_done, self.operations.flush, writers.process(fh), fh)

    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._answer(_done, self.operations.fsync, self.operations.writers.process(fh), fh)

    async def release(self, fh: int) -> None:
        self._metrics.fuse_release += 1
        try:
            self.operations.drop(fh)
        except Exception:
            log.exception("release")

    # -- changes of names --------------------------------------------------------------------------

    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: Any
    ) -> pyfuse3.EntryAttributes:
        mknod = self.operations.mknod
        return await self._answer(_entry, mknod, ctx.pid, parent_inode, name, mode, ctx.uid, ctx.gid)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        mkdir = self.operations.mkdir
        return await self._answer(_entry, mkdir, ctx.pid, parent_inode, name, mode, ctx.uid, ctx.gid)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        await self._answer(_done, self.operations.unlink, ctx.pid, parent_inode, name)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        await self._answer(_done, self.operations.rmdir, ctx.pid, parent_inode, name)

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: Any,
    ) -> None:
        rename = self.operations.rename
        await self._answer(
            _done, rename, ctx.pid, parent_inode_old, name_old, parent_inode_new, name_new, flags
        )

    async def _link(self, *_: Any, **__: Any) -> NoReturn:
        await self._answer(_done, self.operations.link)
        raise AssertionError("there are no links")

    symlink = link = _link


# -- answers as pyfuse3's structures ---------------------------------------------------------------


def _unchanged(found: T) -> T:
    return found


def _done(_: None) -> None:
    return


def entry_of(attributes: Attributes, ttl: float) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = attributes.ino
    entry.st_mode = attributes.mode
    entry.st_nlink = attributes.nlink
    entry.st_size = attributes.size
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_blksize = 1 << 20 if stat.S_ISREG(attributes.mode) else 4096
    entry.st_blocks = -(-attributes.size // 512)
    entry.st_atime_ns = attributes.atime_ns
    entry.st_mtime_ns = attributes.mtime_ns
    entry.st_ctime_ns = attributes.ctime_ns
    entry.entry_timeout = entry.attr_timeout = ttl
    return entry


def _entry(found: AttributesReply) -> pyfuse3.EntryAttributes:
    return entry_of(*found)


def _looked_up(found: LookupReply) -> pyfuse3.EntryAttributes:
    attributes, ttl = found
    if attributes is not None:
        return entry_of(attributes, ttl)
    if not ttl:
        raise Errno(errno.ENOENT)
    negative = pyfuse3.EntryAttributes()
    negative.st_ino = 0
    negative.entry_timeout = ttl
    return negative


def _file(opened: Opened) -> pyfuse3.FileInfo:
    return pyfuse3.FileInfo(fh=opened[0], keep_cache=True)


def _created(made: Created) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
    attributes, ttl, opened = made
    return _file(opened), entry_of(attributes, ttl)


def _statvfs(space: Space) -> pyfuse3.StatvfsData:
    data = pyfuse3.StatvfsData()
    data.f_bsize = data.f_frsize = space.block_size
    data.f_blocks = space.blocks
    data.f_bfree = data.f_bavail = space.blocks_free
    data.f_files = space.files + space.files_free
    data.f_ffree = data.f_favail = space.files_free
    data.f_namemax = space.name_max
    return data

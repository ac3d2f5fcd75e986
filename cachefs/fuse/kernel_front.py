"""The kernel protocol's handlers over `FileSystem`, for whom libfuse is too much.

What is known is answered at once, what has to wait in a task (`session.py`). A version that is whole in the cache is lent
to the kernel at open (passthrough): no read of it is ever seen here.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError, ObjectChanged
from cachefs.fs import Attributes, Backing, Entry, FileSystem
from cachefs.fuse import protocol
from cachefs.fuse.admission import Admission
from cachefs.fuse.device import MAX_BACKGROUND, Device, Negotiated
from cachefs.fuse.errno_table import OURS, errno_of_foreign
from cachefs.fuse.kernel_writing import WRITING, WritingHandlers
from cachefs.fuse.packing import NO_ATTRIBUTES, attr, dirent, direntplus, entry_of, name_of, signed
from cachefs.fuse.protocol import Op, Opened
from cachefs.fuse.session import Handler, Session
from cachefs.metrics import Metrics

log = logging.getLogger(__name__)

IMPLICIT_HANDLES = 1024
"""Files that are read without having been opened (`--zero-open`): handles kept for them. Guessed."""

_READ_ONLY = frozenset(
    {Op.SETATTR, Op.SYMLINK, Op.MKNOD, Op.MKDIR, Op.UNLINK, Op.RMDIR, Op.RENAME, Op.LINK, Op.WRITE, Op.CREATE}
    | {Op.SETXATTR, Op.REMOVEXATTR, Op.FALLOCATE, Op.RENAME2, Op.COPY_FILE_RANGE, Op.TMPFILE}
)

_HEADER = protocol.IN_HEADER.size
_REPLY = protocol.OUT_HEADER.size
_CACHED = int(Opened.KEEP_CACHE | Opened.NOFLUSH)
_UNCACHED = int(Opened.NOFLUSH)
_LENT = int(Opened.PASSTHROUGH | Opened.NOFLUSH)


class _Implicit:
    """A handle of a file that is read without having been opened. `readers` are waiting for bytes of it; `ended` says that
    it is to be released."""

    __slots__ = ("ended", "fh", "readers")

    def __init__(self, fh: int) -> None:
        self.fh = fh
        self.readers = 0
        self.ended = False


class KernelFront:
    """`deadline_s` bounds every operation that has to wait. `zero_open` has the kernel open files without asking, and
    `keep_listings` keep what it has read of a directory: both only where nothing ever changes. `writable` is how the
    connection was made."""

    name = "kernel"
    max_background = MAX_BACKGROUND

    def __init__(
        self,
        fs: FileSystem,
        metrics: Metrics,
        deadline_s: float,
        on_ready: Callable[[], None],
        device: Device,
        agreed: Negotiated,
        *,
        zero_open: bool = False,
        keep_listings: bool = False,
        writable: bool = False,
        admission: Admission | None = None,
    ) -> None:
        self.agreed = agreed
        self._fs = fs
        self._metrics = metrics
        self._on_ready = on_ready
        self._device = device
        self._write = device.write
        self._zero_open = zero_open
        self._directory_flags = int(Opened.KEEP_CACHE | Opened.CACHE_DIR) if keep_listings else 0
        self._implicit: OrderedDict[int, _Implicit] = OrderedDict()
        self._page = 32  # directory entries that fitted the kernel's last buffer
        handlers: dict[int, Handler] = {
            Op.LOOKUP: self._lookup,
            Op.GETATTR: self._getattr,
            Op.STATFS: self._statfs,
            Op.OPEN: self._open,
            Op.READ: self._read,
            Op.RELEASE: self._release,
            Op.OPENDIR: self._opendir,
            Op.READDIR: self._readdir,
            Op.READDIRPLUS: self._readdirplus,
            Op.RELEASEDIR: self._releasedir,
            Op.GETXATTR: self._getxattr,
            Op.LISTXATTR: self._listxattr,
            Op.INTERRUPT: self._interrupt,
            Op.FORGET: self._forget,
            Op.BATCH_FORGET: self._forget,
            Op.FSYNC: self._nothing,
            Op.FSYNCDIR: self._nothing,
            Op.ACCESS: self._nothing,  # the kernel checks the mode bits (default_permissions)
            Op.DESTROY: self._nothing,
            Op.READLINK: self._not_a_link,
            Op.IOCTL: self._no_terminal,
            **dict.fromkeys(_READ_ONLY, self._read_only),
        }
        self._writing = WritingHandlers(fs, metrics, device) if writable else None
        if self._writing is not None:
            handlers |= self._writing.handlers
        self._session = Session(device, handlers, metrics, deadline_s, admission or Admission())
        if self._writing is not None:
            self._writing.session = self._session

    # -- the front ---------------------------------------------------------------------------------

    def mount(self, mountpoint: Path, name: str, *, allow_other: bool) -> None:
        """The mount is made already: attach it."""
        self._device.attach(mountpoint)

    async def serve(self) -> None:
        """Answer the kernel until the mount is gone, or this is cancelled."""
        self._on_ready()
        await self._session.serve()

    def close(self, *, unmount: bool = True) -> None:
        self._device.close(unmount=unmount)

    def lend(self, backing: Backing) -> None:
        backing.registered(self._device.lend(backing.fd))

    def retire(self, backing: Backing) -> None:
        if backing.id:
            self._device.take_back(backing.id)

    def invalidate(self, inode: int, parent: int, name: bytes) -> None:
        try:
            if inode:
                self._device.notify(
                    protocol.NOTIFY_INVAL_INODE, protocol.INVAL_INODE.pack(signed(inode), 0, 0)
                )
            if name:
                body = protocol.INVAL_ENTRY.pack(parent, len(name), 0) + name + b"\0"
                self._device.notify(protocol.NOTIFY_INVAL_ENTRY, body)
        except OSError as exc:
            log.debug("invalidate: %s", exc)

    # -- names and attributes ----------------------------------------------------------------------

    def _lookup(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_lookup += 1
        name = name_of(body)
        found = self._fs.lookup_now(nodeid, name)
        if found is None:
            self._session.wait(unique, Op.LOOKUP, lambda: self._fs.lookup(nodeid, name), self._found)
        else:
            self._found(unique, found)

    def _found(self, unique: int, found: tuple[Attributes | None, float]) -> None:
        attributes, ttl = found
        if attributes is not None:
            self._write(
                protocol.ENTRY_REPLY.pack(protocol.ENTRY_REPLY.size, 0, unique, *entry_of(attributes, ttl))
            )
        elif ttl:
            whole = int(ttl)
            self._write(
                protocol.ENTRY_REPLY.pack(
                    *(protocol.ENTRY_REPLY.size, 0, unique, 0, 0, whole, 0, int((ttl - whole) * 1e9), 0),
                    *NO_ATTRIBUTES,
                )
            )
        else:
            self._session.error(unique, errno.ENOENT)

    def _getattr(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_getattr += 1
        found = self._fs.attributes_now(nodeid)
        if found is None:
            self._session.wait(unique, Op.GETATTR, lambda: self._fs.getattr(nodeid), self._attributes)
        else:
            self._attributes(unique, found)

    def _attributes(self, unique: int, found: tuple[Attributes, float]) -> None:
        attributes, ttl = found
        whole = int(ttl)
        self._write(
            protocol.ATTR_REPLY.pack(
                *(protocol.ATTR_REPLY.size, 0, unique, whole, int((ttl - whole) * 1e9), 0), *attr(attributes)
            )
        )

    def _statfs(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_other += 1
        shown = self._fs.statfs()
        self._write(
            protocol.STATFS_REPLY.pack(
                *(protocol.STATFS_REPLY.size, 0, unique, shown.blocks, shown.blocks_free, shown.blocks_free),
                *(shown.files + shown.files_free, shown.files_free),
                *(shown.block_size, shown.name_max, shown.block_size, 0),
            )
        )

    # -- files -------------------------------------------------------------------------------------

    def _open(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_open += 1
        flags, _ = protocol.OPEN_IN.unpack_from(body)
        if self._zero_open:
            self._session.error(unique, errno.ENOSYS)  # said once, no OPEN and no RELEASE comes any more
            return
        if flags & WRITING and self._writing is not None:
            self._writing.open(unique, nodeid, pid, flags)
            return
        opened = self._fs.open_now(nodeid, flags, pid)
        if opened is None:
            self._session.wait(unique, Op.OPEN, lambda: self._fs.open(nodeid, flags, pid), self._opened)
        else:
            self._opened(unique, opened)

    def _opened(self, unique: int, opened: tuple[int, bool, int]) -> None:
        fh, keep, backing = opened
        if backing:
            self._metrics.passthrough_opens += 1
        flags = _LENT if backing else _CACHED if keep else _UNCACHED
        told = False
        try:
            told = self._write(
                protocol.OPEN_REPLY.pack(protocol.OPEN_REPLY.size, 0, unique, fh, flags, backing)
            )
        finally:
            if not told:
                self._fs.release(fh)

    def _read(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_read += 1
        fh, offset, size, *_ = protocol.READ_IN.unpack_from(body)
        if self._zero_open:
            self._read_implicit(unique, nodeid, pid, offset, size)
            return
        data = self._fs.read_now(fh, offset, size)
        if data is None:
            self._session.wait(unique, Op.READ, lambda: self._fs.read(fh, offset, size), self._data)
        else:
            self._data(unique, data)

    def _data(self, unique: int, data: bytes | bytearray | memoryview) -> None:
        self._metrics.fuse_read_bytes += len(data)
        self._write(protocol.OUT_HEADER.pack(_REPLY + len(data), 0, unique), data)

    def _read_implicit(self, unique: int, nodeid: int, pid: int, offset: int, size: int) -> None:
        handle = self._implicit.get(nodeid)
        data = None
        if handle is not None:
            self._implicit.move_to_end(nodeid)
            try:
                data = self._fs.read_now(handle.fh, offset, size)
            except CachefsError as exc:
                self._end(nodeid, handle, exc)
                raise
        if data is None:
            self._session.wait(
                unique, Op.READ, lambda: self._read_unopened(nodeid, pid, offset, size), self._data
            )
        else:
            self._data(unique, data)

    async def _read_unopened(self, nodeid: int, pid: int, offset: int, size: int) -> Any:
        handle = self._implicit.get(nodeid)
        if handle is None:
            fh, _, _ = await self._fs.open(nodeid, os.O_RDONLY, pid)
            handle = self._implicit.get(nodeid)
            if handle is not None:  # somebody else was faster
                self._fs.release(fh)
            else:
                handle = self._implicit[nodeid] = _Implicit(fh)
                if len(self._implicit) > IMPLICIT_HANDLES:
                    self._end(*next(iter(self._implicit.items())))
        handle.readers += 1
        try:
            return await self._fs.read(handle.fh, offset, size)
        except CachefsError as exc:
            self._end(nodeid, handle, exc)
            raise
        finally:
            handle.readers -= 1
            if handle.ended and not handle.readers:
                self._fs.release(handle.fh)

    def _end(self, nodeid: int, handle: _Implicit, why: CachefsError | None = None) -> None:
        """The next read opens it anew, in whatever version there is then. The last reader releases it."""
        if self._implicit.get(nodeid) is handle:
            del self._implicit[nodeid]
        if handle.ended:
            return
        handle.ended = True
        if not handle.readers:
            self._fs.release(handle.fh)
        if isinstance(why, ObjectChanged):
            self._fs.on_invalidate(nodeid, 0, b"")  # no open drops the pages

    def _release(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_release += 1
        fh, *_ = protocol.RELEASE_IN.unpack_from(body)
        if self._writing is not None:
            self._writing.released(fh)
        try:
            self._session.error(unique, 0)
        finally:
            self._fs.release(fh)

    # -- directories -------------------------------------------------------------------------------

    def _opendir(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_opendir += 1
        self._session.wait(unique, Op.OPENDIR, lambda: self._fs.opendir(nodeid), self._opened_directory)

    def _opened_directory(self, unique: int, dh: int) -> None:
        flags = 0 if self._fs.refreshed else self._directory_flags
        reply = protocol.OPEN_REPLY.pack(protocol.OPEN_REPLY.size, 0, unique, dh, flags, 0)
        told = False
        try:
            told = self._write(reply)
        finally:
            if not told:
                self._fs.releasedir(dh)

    def _readdir(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._list(unique, Op.READDIR, body, dirent)

    def _readdirplus(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._list(unique, Op.READDIRPLUS, body, direntplus)

    def _list(self, unique: int, opcode: int, body: memoryview, pack: Callable[[Entry], bytes]) -> None:
        self._metrics.fuse_readdir += 1
        dh, offset, size, *_ = protocol.READ_IN.unpack_from(body)

        def reply(unique: int, entries: list[Entry]) -> None:
            fitting: list[bytes] = []
            room = size
            for entry in entries:
                packed = pack(entry)
                room -= len(packed)
                if room < 0:
                    break
                fitting.append(packed)
            if entries and not fitting:
                self._session.error(unique, errno.EINVAL)  # nothing would say that this is the end
                return
            # Ask for about as many as the kernel's buffer took the last time.
            self._page = max(8, len(fitting)) if room < 0 else min(1024, self._page + 16)
            data = b"".join(fitting)
            self._write(protocol.OUT_HEADER.pack(_REPLY + len(data), 0, unique), data)

        self._session.wait(unique, opcode, lambda: self._fs.readdir(dh, offset, self._page + 4), reply)

    def _releasedir(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        dh, *_ = protocol.RELEASE_IN.unpack_from(body)
        try:
            self._session.error(unique, 0)
        finally:
            self._fs.releasedir(dh)

    # -- extended attributes -----------------------------------------------------------------------

    def _getxattr(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_other += 1
        size, _ = protocol.GETXATTR_IN.unpack_from(body)
        name = name_of(body[protocol.GETXATTR_IN.size :])
        if name.startswith(OURS):
            uid, _ = self._session.user
            self._session.wait(
                *(unique, Op.GETXATTR, lambda: self._fs.getxattr(nodeid, name, uid)),
                lambda unique, value: self._value(unique, value, size),
            )
        else:
            self._session.error(unique, errno_of_foreign(name))

    def _listxattr(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_other += 1
        size, _ = protocol.GETXATTR_IN.unpack_from(body)
        self._value(unique, b"", size)

    def _value(self, unique: int, value: bytes, size: int) -> None:
        if not size:
            reply = protocol.XATTR_SIZE_REPLY
            self._write(reply.pack(reply.size, 0, unique, len(value), 0))
        elif len(value) > size:
            self._session.error(unique, errno.ERANGE)
        else:
            self._write(protocol.OUT_HEADER.pack(_REPLY + len(value), 0, unique), value)

    # -- the rest ----------------------------------------------------------------------------------

    def _interrupt(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_other += 1
        self._session.interrupt(*protocol.INTERRUPT_IN.unpack_from(body))

    def _forget(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        """Nothing is kept per inode the kernel knows."""

    def _nothing(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_other += 1
        self._session.error(unique, 0)

    def _not_a_link(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_other += 1
        self._session.error(unique, errno.EINVAL)

    def _no_terminal(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        """Python asks of every file that it opens whether it is one."""
        self._metrics.fuse_other += 1
        self._session.error(unique, errno.ENOTTY)

    def _read_only(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_other += 1
        self._session.error(unique, errno.EROFS)

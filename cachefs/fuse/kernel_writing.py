"""The kernel protocol's handlers of a mount that can be written.

What changes something is carried out to its end once it has begun, whoever gives up waiting (`Session.change`). The kernel
has the names of one directory changed one after the other, but takes a change that was given up for done: so they have their
turns here, too. FLUSH and FSYNC wait as long as the file is on its way; a signal that ends the one who waits ends the wait
and not the upload.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import trio

from cachefs.fs import Attributes
from cachefs.fuse import protocol
from cachefs.fuse.closing import Writers
from cachefs.fuse.device import Device
from cachefs.fuse.errno_table import OURS
from cachefs.fuse.packing import attr, entry_of, name_of, names_of
from cachefs.fuse.protocol import Op, Setattr
from cachefs.fuse.protocol import Opened as Flags
from cachefs.fuse.session import Handler, Malformed, Session
from cachefs.metrics import Metrics

T = TypeVar("T")

Opened = tuple[int, bool, int]

WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
"""Flags of an open that may change the file."""

COPIED = 64 << 10
"""Writes up to this are copied out of the request's buffer, larger ones take the buffer along. Measured: 1 µs for this one,
24 to 100 µs for 1 MiB."""

MOST_KEPT = 32
"""Buffers that writes may take along, of the largest request each. Beyond them all writes are copied, so that one holds what
its bytes take. Guessed: 32 writers at once."""

NEW_S = 0.05
"""For so long, in seconds, the attributes of a file hold that was just created: otherwise the kernel asks for them before it
lets open(2) return. What changes them comes by the kernel itself. Guessed: as long as the rest of open(2) may take."""


class WritingHandlers:
    """`handlers` belong into the front's table, and `open` and `release` are asked by its own."""

    def __init__(self, fs: Any, metrics: Metrics, device: Device) -> None:
        self.session: Session  # set by the front, whose session wants the handlers first
        self._fs = fs
        self._metrics = metrics
        self._device = device
        self._writers = Writers(lambda: device.number)
        self._turns: dict[int, tuple[trio.Lock, int]] = {}  # by directory: whose turn it is, how many want it
        self.handlers: dict[int, Handler] = {
            Op.CREATE: self._create,
            Op.MKNOD: self._mknod,
            Op.MKDIR: self._mkdir,
            Op.UNLINK: self._unlink,
            Op.RMDIR: self._rmdir,
            Op.RENAME: self._rename,
            Op.RENAME2: self._rename2,
            Op.SETATTR: self._setattr,
            Op.WRITE: self._write,
            Op.FALLOCATE: self._fallocate,
            Op.FLUSH: self._flush,
            Op.FSYNC: self._fsync,
            **dict.fromkeys((Op.SYMLINK, Op.LINK), self._not_permitted),
            # Said once: the kernel copies by reading and writing, and asks no more for what there is not.
            **dict.fromkeys((Op.COPY_FILE_RANGE, Op.TMPFILE), self._unknown),
            Op.SETXATTR: self._setxattr,
            Op.REMOVEXATTR: self._removexattr,
        }

    # -- handles -----------------------------------------------------------------------------------

    def open(self, unique: int, nodeid: int, pid: int, flags: int) -> None:
        """OPEN with flags that may change the file."""
        self.session.change(
            *(unique, Op.OPEN, lambda: self._fs.open(nodeid, flags, pid)),
            partial(self._opened, nodeid, pid),
        )

    def _opened(self, inode: int, pid: int, unique: int, opened: Opened) -> None:
        fh, keep, backing = opened
        flags = self._flags(keep, backing)
        reply = protocol.OPEN_REPLY.pack(protocol.OPEN_REPLY.size, 0, unique, fh, flags, backing)
        self._tell(reply, fh, inode, pid)

    def _create(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_create += 1
        flags, mode, *_ = protocol.CREATE_IN.unpack_from(body)
        name = name_of(body[protocol.CREATE_IN.size :])
        uid, gid = self.session.user
        self._change_names(
            *(
                unique,
                Op.CREATE,
                (nodeid,),
                lambda: self._fs.create(nodeid, name, flags, mode, pid, uid, gid),
            ),
            partial(self._created, pid),
        )

    def _created(self, pid: int, unique: int, made: tuple[Attributes, float, Opened]) -> None:
        attributes, ttl, (fh, keep, backing) = made
        flags = self._flags(keep, backing)
        least = 0.0 if attributes.size else NEW_S
        reply = protocol.CREATE_REPLY.pack(
            *(protocol.CREATE_REPLY.size, 0, unique, *entry_of(attributes, ttl, least), fh, flags, backing)
        )
        self._tell(reply, fh, attributes.ino, pid)

    def _flags(self, keep: bool, backing: int) -> int:
        if backing:
            self._metrics.passthrough_opens += 1
            return int(Flags.PASSTHROUGH)
        return int(Flags.KEEP_CACHE) if keep else 0

    def _tell(self, reply: bytes, fh: int, inode: int, pid: int) -> None:
        self._writers.opened(fh, inode, pid)
        told = False
        try:
            told = self._device.write(reply)
        finally:
            if not told:
                self.released(fh)
                self._fs.release(fh)

    def released(self, fh: int) -> None:
        """A handle is going, of whichever kind."""
        self._writers.released(fh)

    # -- bytes -------------------------------------------------------------------------------------

    def _write(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_write += 1
        fh, offset, size, *_ = protocol.WRITE_IN.unpack_from(body)
        data = body[protocol.WRITE_IN.size :]
        if len(data) != size:
            raise Malformed(f"a write of {len(data)} bytes that says it has {size}")
        if size <= COPIED or self._device.kept >= MOST_KEPT:
            work = partial(self._fs.write, fh, offset, bytes(data))
            self.session.change(unique, Op.WRITE, work, self._written, data_bytes=size)
        else:
            buffer: Any = data.obj
            work = partial(self._write_kept, fh, offset, data, buffer)
            self.session.change(unique, Op.WRITE, work, self._written, data_bytes=len(buffer))
            self._device.keep()  # not before: the write may have been refused

    async def _write_kept(self, fh: int, offset: int, data: memoryview, kept: bytearray) -> int:
        try:
            written: int = await self._fs.write(fh, offset, data)
            return written
        finally:
            self._device.give_back(kept)

    def _written(self, unique: int, size: int) -> None:
        self._metrics.fuse_write_bytes += size
        self._device.write(protocol.WRITE_REPLY.pack(protocol.WRITE_REPLY.size, 0, unique, size, 0))

    def _flush(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_flush += 1
        fh, *_ = protocol.FLUSH_IN.unpack_from(body)
        self.session.wait(unique, Op.FLUSH, partial(self._close, fh), self._done, patient=True)

    async def _close(self, fh: int) -> None:
        if await self._writers.last(fh):
            await self._fs.flush(fh)

    def _fsync(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_flush += 1
        fh, *_ = protocol.FSYNC_IN.unpack_from(body)
        self.session.wait(unique, Op.FSYNC, lambda: self._fs.fsync(fh), self._done, patient=True)

    def _fallocate(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_change += 1
        fh, offset, length, mode, _ = protocol.FALLOCATE_IN.unpack_from(body)
        self.session.change(
            unique, Op.FALLOCATE, lambda: self._fs.fallocate(fh, mode, offset, length), self._done
        )

    # -- names and attributes ----------------------------------------------------------------------

    def _change_names(
        self,
        unique: int,
        opcode: int,
        directories: tuple[int, ...],
        work: Callable[[], Awaitable[T]],
        reply: Callable[[int, T], object],
    ) -> None:
        self.session.change(unique, opcode, partial(self._in_turn, directories, work), reply)

    async def _in_turn(self, directories: tuple[int, ...], work: Callable[[], Awaitable[T]]) -> T:
        async with AsyncExitStack() as turns:
            for directory in sorted(
                set(directories)
            ):  # in one order, so that nobody waits for another in a circle
                await turns.enter_async_context(self._turn(directory))
            return await work()

    @asynccontextmanager
    async def _turn(self, directory: int) -> AsyncIterator[None]:
        lock, wanted = self._turns.get(directory) or (trio.Lock(), 0)
        self._turns[directory] = lock, wanted + 1
        try:
            async with lock:
                yield
        finally:
            _, wanted = self._turns[directory]
            if wanted == 1:
                del self._turns[directory]
            else:
                self._turns[directory] = lock, wanted - 1

    def _mknod(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_create += 1
        mode, *_ = protocol.MKNOD_IN.unpack_from(body)
        name = name_of(body[protocol.MKNOD_IN.size :])
        if stat.S_ISREG(mode):
            uid, gid = self.session.user
            self._change_names(
                *(unique, Op.MKNOD, (nodeid,), lambda: self._fs.mknod(nodeid, name, mode, pid, uid, gid)),
                self._entered,
            )
        else:
            self.session.error(unique, errno.EPERM)  # pipes, sockets, devices

    def _mkdir(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_change += 1
        mode, _ = protocol.MKDIR_IN.unpack_from(body)
        name = name_of(body[protocol.MKDIR_IN.size :])
        uid, gid = self.session.user
        self._change_names(
            *(unique, Op.MKDIR, (nodeid,), lambda: self._fs.mkdir(nodeid, name, mode, uid, gid)),
            self._entered,
        )

    def _entered(self, unique: int, made: tuple[Attributes, float]) -> None:
        reply = protocol.ENTRY_REPLY
        self._device.write(reply.pack(reply.size, 0, unique, *entry_of(*made)))

    def _unlink(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_change += 1
        name = name_of(body)
        self._change_names(unique, Op.UNLINK, (nodeid,), lambda: self._fs.unlink(nodeid, name), self._done)

    def _rmdir(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_change += 1
        name = name_of(body)
        self._change_names(unique, Op.RMDIR, (nodeid,), lambda: self._fs.rmdir(nodeid, name), self._done)

    def _rename(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        (to,) = protocol.RENAME_IN.unpack_from(body)
        self._move(unique, Op.RENAME, nodeid, to, body[protocol.RENAME_IN.size :], 0)

    def _rename2(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        to, flags, _ = protocol.RENAME2_IN.unpack_from(body)
        self._move(unique, Op.RENAME2, nodeid, to, body[protocol.RENAME2_IN.size :], flags)

    def _move(self, unique: int, opcode: int, nodeid: int, to: int, names: memoryview, flags: int) -> None:
        self._metrics.fuse_change += 1
        old, new = names_of(names)
        self._change_names(
            *(unique, opcode, (nodeid, to), lambda: self._fs.rename(nodeid, old, to, new, flags)), self._done
        )

    def _setattr(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_change += 1
        valid, _, fh, size, _, _, mtime, _, _, mtime_ns, _, mode, _, uid, gid, _ = (
            protocol.SETATTR_IN.unpack_from(body)
        )
        when = time.time_ns() if valid & Setattr.MTIME_NOW else _signed_seconds(mtime) * 10**9 + mtime_ns
        wanted = {
            "size": size if valid & Setattr.SIZE else None,
            "mode": stat.S_IMODE(mode) if valid & Setattr.MODE else None,
            "uid": uid if valid & Setattr.UID else None,
            "gid": gid if valid & Setattr.GID else None,
            "mtime_ns": when if valid & (Setattr.MTIME | Setattr.MTIME_NOW) else None,
            "fh": fh if valid & Setattr.FH else None,
        }
        self.session.change(unique, Op.SETATTR, lambda: self._fs.setattr(nodeid, **wanted), self._set)

    def _set(self, unique: int, found: tuple[Attributes, float]) -> None:
        attributes, ttl = found
        whole = int(ttl)
        reply = protocol.ATTR_REPLY
        self._device.write(
            reply.pack(reply.size, 0, unique, whole, int((ttl - whole) * 1e9), 0, *attr(attributes))
        )

    # -- extended attributes -----------------------------------------------------------------------

    def _setxattr(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        protocol.SETXATTR_IN.unpack_from(body)
        self._removexattr(unique, nodeid, pid, body[protocol.SETXATTR_IN.size :])

    def _removexattr(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        """Of ours a copy may have some, from another mount: they are taken, and not kept."""
        self._metrics.fuse_other += 1
        self.session.error(unique, 0 if name_of(body).startswith(OURS) else errno.EOPNOTSUPP)

    # -- the rest ----------------------------------------------------------------------------------

    def _done(self, unique: int, _: object) -> None:
        self.session.error(unique, 0)

    def _not_permitted(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_other += 1
        self.session.error(unique, errno.EPERM)

    def _unknown(self, unique: int, nodeid: int, pid: int, body: memoryview) -> None:
        self._metrics.fuse_other += 1
        self.session.error(unique, errno.ENOSYS)


def _signed_seconds(seconds: int) -> int:
    """Times before 1970 come as the largest of numbers."""
    return seconds - (1 << 64) if seconds >> 63 else seconds

"""/dev/fuse: making a connection, and reading and writing its messages. Of the requests only INIT is understood here.

A mount is made detached (fsopen, fsmount), negotiated, and tried for passthrough. Only then is it attached to the tree, so a
kernel that lacks something is found out before any process sees a mount.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import struct
from pathlib import Path
from typing import NamedTuple

from cachefs.base.errors import MountError
from cachefs.base.linux import libc, mount_at
from cachefs.fuse import connection, protocol
from cachefs.fuse.connection import CONGESTION, DETACH, FORCE, MAX_BACKGROUND
from cachefs.fuse.protocol import Init

REQUEST_BYTES = 128 << 10
"""Longest request of a mount that cannot be written: an extended attribute of 64 KiB and its name. Derived."""

MAX_WRITE = 1 << 20
"""Largest write: as large as a read (`MAX_PAGES`)."""

MOST_KEPT = 8
"""Buffers (of `MAX_WRITE` and a bit) that writes may keep; further writes are copied. Guessed: writers at the same time."""

MAX_PAGES = 256
"""Largest read: 1 MiB, what `fs.fuse.max_pages_limit` allows by default. Measured: more is not faster."""

HANDSHAKE_S = 5.0
"""How long the kernel may take to send INIT. Guessed: it does so at once."""

WANTED = (
    Init.ASYNC_READ
    | Init.BIG_WRITES
    | Init.DO_READDIRPLUS
    | Init.READDIRPLUS_AUTO
    | Init.NO_OPEN_SUPPORT
    | Init.PARALLEL_DIROPS
    | Init.MAX_PAGES
    | Init.INIT_EXT
    | Init.PASSTHROUGH
    | Init.HAS_RESEND
)

WANTED_TO_WRITE = WANTED | Init.ATOMIC_O_TRUNC | Init.HANDLE_KILLPRIV_V2
"""Without HANDLE_KILLPRIV_V2 the kernel reads an extended attribute (security.capability) before each write. With it, the
filesystem has to clear set-uid and set-gid bits itself: the kernel says at which requests (`Operations.write`, `clear`)."""

# System call numbers, the same on all architectures but Alpha.
_FSOPEN, _FSCONFIG, _FSMOUNT, _MOVE_MOUNT = 430, 431, 432, 429
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_CLOEXEC, _RDONLY, _NOSUID, _NODEV = 1, 1, 2, 4
_FROM_FD, _AT_FDCWD = 4, -100

_READ_AGAIN = (errno.EINTR, errno.ENOENT, errno.ENOMEM)
"""The request was interrupted before it was read, or the kernel had no memory for it and has failed it already."""


class Negotiated(NamedTuple):
    """What both sides can do. `minor` is the protocol version's."""

    minor: int
    flags: Init

    @property
    def passthrough(self) -> bool:
        """Whether the kernel can read backing files by itself."""
        return bool(self.flags & Init.PASSTHROUGH)


def negotiate(request: bytes, stack_depth: int, *, writable: bool = False) -> tuple[bytes, Negotiated | None]:
    """The answer to INIT, and what was agreed; None if the kernel has to send INIT again in version 7. `stack_depth` is the
    number of stacked filesystems that a backing file may lie on. Raises `MountError` for a kernel that is too old."""
    try:
        _, opcode, unique, *_ = protocol.IN_HEADER.unpack_from(request)
        if opcode != protocol.Op.INIT:
            raise MountError(f"the kernel began with request {opcode} instead of INIT")
        at = protocol.IN_HEADER.size
        major, minor, readahead, flags = protocol.INIT_IN.unpack_from(request, at)
        if flags & Init.INIT_EXT:
            at += protocol.INIT_IN.size
            flags |= protocol.INIT_IN_FLAGS2.unpack_from(request, at)[0] << 32
    except struct.error as exc:
        raise MountError(f"the kernel began with a malformed request: {exc}") from exc
    agreed = (WANTED_TO_WRITE if writable else WANTED) & flags
    if major < protocol.MAJOR or (major == protocol.MAJOR and minor < protocol.OLDEST):
        raise MountError(
            f"the kernel speaks FUSE {major}.{minor}, and 7.{protocol.OLDEST} (Linux 5.4) is needed"
        )
    minor = min(minor, protocol.MINOR) if major == protocol.MAJOR else protocol.MINOR
    body = protocol.INIT_OUT.pack(
        *(protocol.MAJOR, minor, readahead, int(agreed) & 0xFFFFFFFF, MAX_BACKGROUND, CONGESTION),
        *(MAX_WRITE if writable else 4096, 1, MAX_PAGES, 0, int(agreed) >> 32),
        *(stack_depth if agreed & Init.PASSTHROUGH else 0, 0),
    )
    reply = protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size + len(body), 0, unique) + body
    return reply, None if major > protocol.MAJOR else Negotiated(minor, agreed)


class Device:
    """One connection. `fd` is a descriptor of /dev/fuse; tests use a sequential packet socket."""

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        self.fd = fd
        self._writable = writable
        self._request_bytes = REQUEST_BYTES + (MAX_WRITE if writable else 0)
        self._incoming = select.poll()
        self._incoming.register(fd, select.POLLIN)
        self.kept = 0  # buffers of requests that are not finished
        self._spare: list[bytearray] = []  # buffers to use again
        self._use(bytearray(self._request_bytes))
        self._mount = -1
        self._attached: Path | None = None
        self.number = ""  # "major:minor" of the mount; "" where the kernel does not report it
        self._gone = False
        self.held = False  # another process keeps the connection for the next daemon

    # -- mounting and unmounting -------------------------------------------------------------------

    @classmethod
    def connect(
        cls, name: str, *, allow_other: bool, stack_depth: int, writable: bool = False
    ) -> tuple[Device, Negotiated]:
        """Make a detached mount and negotiate. Raises OSError or `MountError`."""
        device = cls(os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK), writable=writable)
        try:
            device._make(name, allow_other)
            return device, device._shake_hands(stack_depth)
        except BaseException:
            device.close()
            raise

    @classmethod
    def take(cls, fd: int, *, stack_depth: int, writable: bool = False) -> tuple[Device, Negotiated]:
        """The same over a descriptor that another process has mounted, and will unmount."""
        device = cls(fd, writable=writable)
        device.number = connection.device_of(fd)
        try:
            os.set_blocking(fd, False)
            return device, device._shake_hands(stack_depth)
        except BaseException:
            device.close()
            raise

    @classmethod
    def adopt(cls, fd: int, mountpoint: Path, number: str, *, writable: bool = False) -> Device:
        """The connection of a daemon that has died: it is mounted and negotiated."""
        device = cls(fd, writable=writable)
        device.number, device.held = number, True
        device._attached = mountpoint
        os.set_blocking(fd, False)
        return device

    def _make(self, name: str, allow_other: bool) -> None:
        context = _call(_FSOPEN, b"fuse", _CLOEXEC)
        try:
            for key, value in {
                "source": name,
                "subtype": "cachefs",
                "fd": str(self.fd),
                "rootmode": "40755",
                "user_id": str(os.getuid()),
                "group_id": str(os.getgid()),
            }.items():
                _call(_FSCONFIG, context, _SET_STRING, key.encode(), value.encode(), 0)
            # In a writable superblock each passthrough read invalidates the inode's times, and the next fstat is a
            # GETATTR. Measured: a read-only superblock serves 1.75 times as many small files a second.
            flags = ["default_permissions", *(["allow_other"] if allow_other else [])]
            for flag in flags if self._writable else ["ro", *flags]:
                _call(_FSCONFIG, context, _SET_FLAG, flag.encode(), None, 0)
            _call(_FSCONFIG, context, _CMD_CREATE, None, None, 0)
            attributes = _NOSUID | _NODEV | (0 if self._writable else _RDONLY)
            self._mount = _call(_FSMOUNT, context, _CLOEXEC, attributes)
        finally:
            os.close(context)

    def _shake_hands(self, stack_depth: int) -> Negotiated:
        asked = select.poll()
        asked.register(self.fd, select.POLLIN)
        while True:
            if not asked.poll(HANDSHAKE_S * 1e3):
                raise MountError("the kernel did not begin to speak")
            request = self.read()
            if request is None:
                raise MountError("the kernel ended the connection before it began")
            if not request:
                continue
            reply, agreed = negotiate(bytes(request), stack_depth, writable=self._writable)
            os.write(self.fd, reply)
            if agreed is not None:
                return agreed

    def attach(self, mountpoint: Path) -> None:
        """Make the mount visible at `mountpoint`."""
        _call(_MOVE_MOUNT, self._mount, b"", _AT_FDCWD, os.fsencode(mountpoint), _FROM_FD)
        self._attached = mountpoint
        os.close(self._mount)  # it would keep the mount busy
        self._mount = -1
        mount = mount_at(mountpoint)  # fstat would send a request that this thread cannot answer now
        self.number = mount.device if mount is not None else ""

    def close(self, *, unmount: bool = True) -> None:
        """Unmount if attached, even while in use, and end the connection; requests that wait fail with ECONNABORTED. Without
        `unmount` the dead mount stays where it is; if another process holds the connection, it is not dead."""
        if self.held and not unmount:
            fd, self.fd = self.fd, -1
            os.close(fd)
            return
        mountpoint, self._attached = self._attached, None
        if mountpoint is not None and unmount:
            mount = mount_at(mountpoint)
            ours = mount is not None and mount.device == self.number
            if self._ended():
                # Another mount may have this number by now. A dead one is ours: it was aborted.
                if ours and _is_dead(mountpoint):
                    connection.unmount(mountpoint, DETACH)
            elif ours or not self.number:
                # By force: a notification may be waiting for a lock whose holder waits for an answer, and closing a
                # descriptor that a thread is writing to does not end the connection.
                connection.unmount(mountpoint, FORCE | DETACH)
            else:
                connection.abort(self.number)  # unmounted lazily, and still in use
        elif self.number and self.fd >= 0 and not self._ended():
            connection.abort(
                self.number
            )  # another process may have a copy of the descriptor, and not read from it
        fds, self._mount, self.fd = (self._mount, self.fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _ended(self) -> bool:
        """Whether the kernel has ended the connection, whether or not `read` has returned None."""
        asked = select.poll()
        asked.register(self.fd, 0)
        return self._gone or bool(asked.poll(0))

    # -- messages ----------------------------------------------------------------------------------

    def read(self) -> memoryview | None:
        """The next request, valid until the next call. Empty when none waits, None when the mount is gone."""
        while True:
            try:
                return self._view[: os.readv(self.fd, self._buffers)]
            except BlockingIOError:
                return self._view[:0]
            except OSError as exc:
                if exc.errno in (errno.ENODEV, errno.ECONNABORTED):
                    self._gone = True
                    return None
                if exc.errno not in _READ_AGAIN:
                    raise

    def wait(self) -> bool:
        """Sleep until a request has come. False after a millisecond without one: all of this thread waits meanwhile."""
        return bool(self._incoming.poll(1))

    def keep(self) -> bytearray:
        """Keep the last request valid until the returned buffer is given back. Cheaper than a copy, because buffers are used
        again and their pages are mapped already."""
        kept = self._buffer
        self.kept += 1
        self._use(self._spare.pop() if self._spare else bytearray(self._request_bytes))
        return kept

    def give_back(self, kept: bytearray) -> None:
        self.kept -= 1
        self._spare.append(kept)

    def _use(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._buffers = [buffer]

    def write(self, *parts: bytes | bytearray | memoryview) -> bool:
        """Send a reply. False when the request was given up, or the mount is gone."""
        try:
            if len(parts) == 1:
                os.write(self.fd, parts[0])
            else:
                os.writev(self.fd, parts)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED, errno.ENOTCONN):
                return False
            raise
        return True

    def notify(self, code: int, body: bytes) -> None:
        """Send a notification. The kernel may wait for readers of the inode meanwhile: from a worker thread only."""
        self.write(protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size + len(body), code, 0) + body)

    # -- backing files -----------------------------------------------------------------------------

    def register(self, fd: int) -> int:
        """Register a backing file. Returns its backing id (from 1 up), which holds the file until `unregister`. Raises
        OSError when the kernel refuses it."""
        number: int = fcntl.ioctl(
            self.fd, protocol.BACKING_OPEN, bytearray(protocol.BACKING_MAP.pack(fd, 0, 0)), True
        )
        return number

    def unregister(self, number: int) -> None:
        if self.fd < 0:
            return  # the connection was closed, and all its backing ids with it
        try:
            fcntl.ioctl(self.fd, protocol.BACKING_CLOSE, struct.pack("=I", number))
        except OSError:
            pass  # the connection has ended, and all its backing ids with it


def _is_dead(mountpoint: Path) -> bool:
    try:
        os.statvfs(mountpoint)  # the kernel never answers STATFS from a cache
    except OSError as exc:
        return exc.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def _call(number: int, *arguments: int | bytes | None) -> int:
    done: int = libc.syscall(
        ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    )
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return done

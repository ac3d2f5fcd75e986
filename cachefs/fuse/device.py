"""/dev/fuse: making a connection, and what passes over it. No request is understood here but the first (INIT).

The mount is made detached (fsopen, fsmount), shakes hands, and tries what it was made for; only then is it attached to the
tree. So a kernel that cannot do it is found out before anybody sees a mount.
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

from cachefs.errors import MountError
from cachefs.fuse import passed, protocol
from cachefs.fuse.protocol import Init
from cachefs.mountinfo import mount_at

REQUEST_BYTES = 128 << 10
"""Longest request of a mount that cannot be written: an extended attribute of 64 KiB and its name. Derived."""

MAX_WRITE = 1 << 20
"""Largest write: as large as a read (`MAX_PAGES`)."""

BUFFERS_KEPT = 8
"""Buffers of requests (`MAX_WRITE` and a bit) that wait for the next write. Guessed: writers that write at once."""

MAX_BACKGROUND, CONGESTION = 128, 96
"""Read-aheads in flight; above the second the kernel sends no more. Guessed, and three quarters as the kernel does."""

MAX_PAGES = 256
"""Largest read: 1 MiB, what `fs.fuse.max_pages_limit` allows by default. Measured: more is not faster."""

HANDSHAKE_S = 5.0
"""Guessed: the kernel sends INIT at once."""

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
)

WANTED_TO_WRITE = WANTED | Init.ATOMIC_O_TRUNC | Init.HANDLE_KILLPRIV_V2
"""Without the second the kernel asks for an extended attribute (security.capability) at each write. That programs lose their
set-uid bit is as good as done: the mount does not know set-uid."""

_FSOPEN, _FSCONFIG, _FSMOUNT, _MOVE_MOUNT = (
    430,
    431,
    432,
    429,
)  # the same wherever Python and FUSE are likely to be met
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_CLOEXEC, _RDONLY, _NOSUID, _NODEV = 1, 1, 2, 4
_FROM_FD, _AT_FDCWD = 4, -100
_MNT_FORCE, _MNT_DETACH = 1, 2

_ASK_AGAIN = (errno.EINTR, errno.ENOENT, errno.ENOMEM)
"""A request was interrupted before we had it, or the kernel had no memory for it and has failed it already."""

_libc = ctypes.CDLL(None, use_errno=True)


class Negotiated(NamedTuple):
    """What both sides can do. `minor` is the protocol's; `passthrough` whether files can be lent."""

    minor: int
    flags: Init

    @property
    def passthrough(self) -> bool:
        return bool(self.flags & Init.PASSTHROUGH)


def negotiate(request: bytes, stack_depth: int, *, writable: bool = False) -> tuple[bytes, Negotiated | None]:
    """The answer to INIT, and what was agreed; nothing was when the kernel is to ask again in our version (7). Raises
    `MountError` for a kernel that is too old. `stack_depth` is how many filesystems a lent file may lie on."""
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
    """One connection. `fd` is its end of it; tests give a socket that keeps records apart."""

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        self.fd = fd
        self._writable = writable
        self._request_bytes = REQUEST_BYTES + (MAX_WRITE if writable else 0)
        self.kept = 0  # buffers that requests are in which are not finished
        self._spare: list[bytearray] = []
        self._use(bytearray(self._request_bytes))
        self._mount = -1
        self._attached: Path | None = None
        self.number = ""  # major:minor of the mount; "" where the kernel does not say
        self._gone = False

    # -- coming and going --------------------------------------------------------------------------

    @classmethod
    def connect(
        cls, name: str, *, allow_other: bool, stack_depth: int, writable: bool = False
    ) -> tuple[Device, Negotiated]:
        """A detached mount whose handshake is done. OSError or `MountError` where that cannot be."""
        device = cls(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK), writable=writable)
        try:
            device._make(name, allow_other)
            return device, device._shake_hands(stack_depth)
        except BaseException:
            device.close()
            raise

    @classmethod
    def take(cls, fd: int, *, stack_depth: int, writable: bool = False) -> tuple[Device, Negotiated]:
        """The same over a descriptor that somebody else has mounted, and will unmount."""
        device = cls(fd, writable=writable)
        device.number = passed.connection(fd)
        try:
            os.set_blocking(fd, False)
            return device, device._shake_hands(stack_depth)
        except BaseException:
            device.close()
            raise

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
            # Read-only is really meant: a superblock that could be written has each read through a lent file forget the
            # inode's times, and each fstat then asks us. Measured: 1.75 times as many small files a second.
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
        """From here on everybody sees it."""
        _call(_MOVE_MOUNT, self._mount, b"", _AT_FDCWD, os.fsencode(mountpoint), _FROM_FD)
        self._attached = mountpoint
        os.close(self._mount)  # a descriptor of a mount is a user of it, too
        self._mount = -1
        mount = mount_at(mountpoint)  # fstat would ask us, who are here
        self.number = mount.device if mount is not None else ""

    def close(self, *, unmount: bool = True) -> None:
        """Unmount what was attached, also while it is in use, and end the connection; requests that wait get ECONNABORTED.
        Without `unmount` the dead mount stays where it is."""
        mountpoint, self._attached = self._attached, None
        if mountpoint is not None and unmount:
            mount = mount_at(mountpoint)
            ours = mount is not None and mount.device == self.number
            if self._ended():
                # Its number may be another mount's by now. One that is dead is ours: it was aborted, and is in the way.
                if ours and _is_dead(mountpoint):
                    _libc.umount2(os.fsencode(mountpoint), _MNT_DETACH)
            elif ours or not self.number:
                # By force: a notification of ours may wait for a lock whose holder waits for us, and a descriptor that
                # a thread is writing to does not end the connection when it is closed.
                _libc.umount2(os.fsencode(mountpoint), _MNT_FORCE | _MNT_DETACH)
            else:
                abort(self.number)  # unmounted lazily, and still in use
        elif self.number and self.fd >= 0 and not self._ended():
            abort(self.number)  # a copy of the descriptor may be left somewhere, and nobody reads from it
        fds, self._mount, self.fd = (self._mount, self.fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _ended(self) -> bool:
        """Whether the kernel has ended the connection, read of already or not."""
        asked = select.poll()
        asked.register(self.fd, 0)
        return self._gone or bool(asked.poll(0))

    # -- what passes -------------------------------------------------------------------------------

    def read(self) -> memoryview | None:
        """The next request, valid until the next call; empty when none waits, None when the mount is gone."""
        while True:
            try:
                return self._view[: os.readv(self.fd, self._buffers)]
            except BlockingIOError:
                return self._view[:0]
            except OSError as exc:
                if exc.errno in (errno.ENODEV, errno.ECONNABORTED):
                    self._gone = True
                    return None
                if exc.errno not in _ASK_AGAIN:
                    raise

    def keep(self) -> bytearray:
        """The request that was read last stays valid until what this returns is given back. Cheaper than a copy: the pages
        of a buffer that is used again are there already."""
        kept = self._buffer
        self.kept += 1
        self._use(self._spare.pop() if self._spare else bytearray(self._request_bytes))
        return kept

    def give_back(self, kept: bytearray) -> None:
        self.kept -= 1
        if len(self._spare) < BUFFERS_KEPT:
            self._spare.append(kept)

    def _use(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._buffers = [buffer]

    def write(self, *parts: bytes | bytearray | memoryview) -> bool:
        """A reply. False when nobody waits for it any more."""
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
        """Tell the kernel something. It may have to wait for readers of the inode: from a worker thread only."""
        self.write(protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size + len(body), code, 0) + body)

    # -- files the kernel reads by itself ----------------------------------------------------------

    def lend(self, fd: int) -> int:
        """The kernel's number (from 1 up) for a file, which it holds until `take_back`. OSError when it does not want
        it."""
        number: int = fcntl.ioctl(
            self.fd, protocol.BACKING_OPEN, bytearray(protocol.BACKING_MAP.pack(fd, 0, 0)), True
        )
        return number

    def take_back(self, number: int) -> None:
        if self.fd < 0:
            return  # it was closed, and all its numbers went with it
        try:
            fcntl.ioctl(self.fd, protocol.BACKING_CLOSE, struct.pack("=I", number))
        except OSError:
            pass  # the connection is gone, and all its numbers with it


def abort(number: str) -> None:
    """End the connection "major:minor", whoever waits for it. Only while it lives: numbers are given again."""
    try:
        Path("/sys/fs/fuse/connections", number.partition(":")[2], "abort").write_text("1\n")
    except OSError:
        pass  # nobody uses it any more


def end(mountpoint: Path, number: str) -> None:
    """End the connection "major:minor", and unmount it if it is still mounted there: both at once, which only root may."""
    mount = mount_at(mountpoint)
    if mount is None or mount.device != number:
        abort(number)
    else:
        _libc.umount2(os.fsencode(mountpoint), _MNT_FORCE | _MNT_DETACH)


def _is_dead(mountpoint: Path) -> bool:
    try:
        os.statvfs(mountpoint)  # which the kernel never answers by itself
    except OSError as exc:
        return exc.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def _call(number: int, *arguments: int | bytes | None) -> int:
    done: int = _libc.syscall(
        ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    )
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return done

"""The native backend: it speaks the kernel's protocol without libfuse, and can register backing files (passthrough).

The loop reads one request after the other. A handler unpacks it, calls `Operations`, and packs the answer. An answer that
is not known yet is found in a task, and the loop goes on. While requests follow each other closely, the loop polls for the
next one instead of sleeping, and lets other tasks run in between.

`Device` is /dev/fuse: it makes a connection, and reads and writes its messages. A mount is made detached (fsopen,
fsmount), negotiated, and tried for passthrough. It is attached to the tree only after that, so that the lack of a kernel
feature is known before any process sees the mount.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import stat
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import trio

from cachefs.base.errors import MountError
from cachefs.base.linux import MNT_DETACH, is_dead, probe, syscall
from cachefs.base.metrics import Metrics
from cachefs.base.tasks import contained
from cachefs.fs import Backing, Entry, FileSystem
from cachefs.fs.dirty_files import Opened
from cachefs.fs.filesystem import Created
from cachefs.fs.freshness import BURST_S
from cachefs.fs.reader import Buffer
from cachefs.fuse import callers, connection, protocol
from cachefs.fuse.connection import CONGESTION, MAX_BACKGROUND, MOUNTING_S
from cachefs.fuse.handover import LOOK_S
from cachefs.fuse.holder import has_ended
from cachefs.fuse.notifier import Notifier
from cachefs.fuse.operations import (
    CHANGE_FLAGS,
    WRITE_FLAGS,
    AttributesReply,
    LookupReply,
    Operations,
    Pending,
    Rule,
    Waiting,
)
from cachefs.fuse.protocol import RESENT, Init, Malformed, Op, OpenFlags, Setattr, duration, entry, name_of
from cachefs.fuse.records import Records

log = logging.getLogger(__name__)

# -- /dev/fuse -------------------------------------------------------------------------------------

REQUEST_BYTES = 128 << 10
"""Buffer size for the requests of a read-only mount. Derived: the longest is an extended attribute of 64 KiB and its
name."""

MAX_WRITE = 1 << 20
"""Largest write: as large as a read (`MAX_PAGES`)."""

MOST_DETACHED = 8
"""Buffers (of `MAX_WRITE` and a bit) that unfinished writes may use; further writes are copied. A bound of memory:
8 MiB."""

MAX_PAGES = 256
"""Largest read, in pages: 1 MiB, the default of `fs.fuse.max_pages_limit`. Measured: more is not faster."""

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
filesystem has to clear set-uid and set-gid bits itself, at the requests that the kernel marks (`clear_set_ids` of
`Operations.write`)."""

# System call numbers, the same on all architectures but Alpha.
_FSOPEN, _FSCONFIG, _FSMOUNT, _MOVE_MOUNT = 430, 431, 432, 429
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_CLOEXEC, _RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 1, 2, 4, 8
_FROM_FD, _AT_FDCWD = 4, -100

_READ_AGAIN = (errno.EINTR, errno.ENOENT, errno.ENOMEM)
"""Errors of a read after which the next request can be read: a signal has interrupted the read (EINTR), the request was
interrupted before it was read (ENOENT), or the kernel had no memory for it and has failed it (ENOMEM)."""


class Negotiated(NamedTuple):
    """The protocol's minor version and the capabilities that both sides have."""

    minor: int
    flags: Init

    @property
    def passthrough(self) -> bool:
        """True if the kernel can read backing files by itself."""
        return bool(self.flags & Init.PASSTHROUGH)


def negotiate(request: bytes, stack_depth: int, *, writable: bool = False) -> tuple[bytes, Negotiated | None]:
    """(reply to INIT, what was negotiated); None if the kernel has to send INIT again in version 7. `stack_depth` is the
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
        protocol.MAJOR,
        minor,
        readahead,
        int(agreed) & 0xFFFFFFFF,
        MAX_BACKGROUND,
        CONGESTION,
        MAX_WRITE if writable else 4096,
        1,
        MAX_PAGES,
        0,
        int(agreed) >> 32,
        stack_depth if agreed & Init.PASSTHROUGH else 0,
        0,
    )
    reply = protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size + len(body), 0, unique) + body
    return reply, None if major > protocol.MAJOR else Negotiated(minor, agreed)


class Device:
    """One connection to the kernel. `fd` is a descriptor of /dev/fuse; tests use a sequential packet socket."""

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        self.fd = fd
        self._writable = writable
        self._request_bytes = REQUEST_BYTES + (MAX_WRITE if writable else 0)
        self._incoming = select.poll()
        self._incoming.register(fd, select.POLLIN)
        self.detached = 0  # number of buffers that unfinished writes use
        self._spare: list[bytearray] = []  # buffers to use again
        self._use(bytearray(self._request_bytes))
        self._mount = -1
        self._attached: Path | None = None
        self.number = ""  # "major:minor" of the mount; "" where the kernel does not report it
        self._disconnected = False
        self.outlives_daemon = False  # True if the holder keeps the connection for the next daemon
        self._notifier: Notifier | None = None

    # -- mounting and unmounting -------------------------------------------------------------------

    @classmethod
    def connect(
        cls, name: str, flags: Sequence[str], *, stack_depth: int, writable: bool = False
    ) -> tuple[Device, Negotiated]:
        """Make a detached mount and negotiate. Raises OSError or `MountError`."""
        device = cls(os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK), writable=writable)
        try:
            device._make(name, flags)
            return device, device._negotiate(stack_depth)
        except BaseException:
            device.close()
            raise

    @classmethod
    def connect_with_help(
        cls, mountpoint: Path, name: str, flags: Sequence[str], *, writable: bool = False
    ) -> tuple[Device, Negotiated]:
        """Mount with fusermount3, for a user without rights, and negotiate. The mount is visible at once."""
        fd = connection.mount_with_help(mountpoint, connection.mount_options(name, flags, writable=writable))
        return cls.take(fd, stack_depth=1, writable=writable, mountpoint=mountpoint)

    @classmethod
    def take(
        cls, fd: int, *, stack_depth: int, writable: bool = False, mountpoint: Path | None = None
    ) -> tuple[Device, Negotiated]:
        """Negotiate over a mounted descriptor: mounted by another process, which will unmount it, or at `mountpoint`."""
        device = cls(fd, writable=writable)
        if mountpoint is None:
            device.number = connection.device_of(fd)
        else:
            device._set_mountpoint(mountpoint)
        try:
            os.set_blocking(fd, False)
            return device, device._negotiate(stack_depth)
        except BaseException:
            device.close()
            raise

    @classmethod
    def adopt(cls, fd: int, mountpoint: Path, number: str, *, writable: bool = False) -> Device:
        """Take over the connection of an ended daemon, which is mounted and negotiated."""
        device = cls(fd, writable=writable)
        device.number, device.outlives_daemon = number, True
        device._attached = mountpoint
        os.set_blocking(fd, False)
        return device

    def _make(self, name: str, flags: Sequence[str]) -> None:
        context = syscall(_FSOPEN, b"fuse", _CLOEXEC)
        try:
            for key, value in {
                "source": name,
                "subtype": "cachefs",
                "fd": str(self.fd),
                "rootmode": "40755",
                "user_id": str(os.getuid()),
                "group_id": str(os.getgid()),
            }.items():
                syscall(_FSCONFIG, context, _SET_STRING, key.encode(), value.encode(), 0)
            # In a writable superblock each passthrough read invalidates the inode's times, and the next fstat is a
            # GETATTR. Measured: a read-only superblock serves 1.75 times as many small files a second.
            own = ["default_permissions"] if self._writable else ["ro", "default_permissions"]
            for flag in [*own, *(flag for flag in flags if flag != "noexec")]:
                syscall(_FSCONFIG, context, _SET_FLAG, flag.encode(), None, 0)
            syscall(_FSCONFIG, context, _CMD_CREATE, None, None, 0)
            attributes = _NOSUID | _NODEV | (0 if self._writable else _RDONLY) | _NOEXEC * ("noexec" in flags)
            self._mount = syscall(_FSMOUNT, context, _CLOEXEC, attributes)
        finally:
            os.close(context)

    def _negotiate(self, stack_depth: int) -> Negotiated:
        while True:
            if not self._incoming.poll(MOUNTING_S * 1e3):
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
        syscall(_MOVE_MOUNT, self._mount, b"", _AT_FDCWD, os.fsencode(mountpoint), _FROM_FD)
        os.close(self._mount)  # an open descriptor would keep the mount busy
        self._mount = -1
        self._set_mountpoint(mountpoint)

    def _set_mountpoint(self, mountpoint: Path) -> None:
        self._attached = mountpoint
        self.number = connection.device_at(mountpoint)

    def close(self, *, unmount: bool = True) -> None:
        """Unmount if attached, even while in use, and end the connection; waiting requests fail with ECONNABORTED. Without
        `unmount` the mount stays: alive if the holder keeps the connection, else dead."""
        if self._notifier is not None:
            self._notifier.close()
        if self.outlives_daemon and not unmount:
            fd, self.fd = self.fd, -1
            os.close(fd)
            return
        mountpoint, self._attached = self._attached, None
        if mountpoint is not None and unmount:
            if not self._ended():
                connection.end(mountpoint, self.number)
            # Another mount may have this device number by now. If the mount is dead, it is ours.
            elif connection.device_at(mountpoint) == self.number and is_dead(probe(mountpoint)):
                connection.unmount(mountpoint, MNT_DETACH)
        elif self.number and self.fd >= 0 and not self._ended():
            # Another process may have a copy of the descriptor, and not read from it.
            connection.abort(self.number)
        fds, self._mount, self.fd = (self._mount, self.fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _ended(self) -> bool:
        """True if the kernel has ended the connection, even if `read` has not returned None yet."""
        return self._disconnected or has_ended(self.fd)

    # -- messages ----------------------------------------------------------------------------------

    def read(self) -> memoryview | None:
        """The next request, valid until the next call; empty if none waits, None if the mount is gone."""
        while True:
            try:
                return self._view[: os.readv(self.fd, self._buffers)]
            except BlockingIOError:
                return self._view[:0]
            except OSError as exc:
                if exc.errno in (errno.ENODEV, errno.ECONNABORTED):
                    self._disconnected = True
                    return None
                if exc.errno not in _READ_AGAIN:
                    raise

    def wait(self) -> bool:
        """Block this thread until a request has come. False after a millisecond without one."""
        return bool(self._incoming.poll(1))

    def detach_buffer(self) -> bytearray:
        """Keep the last request valid until the returned buffer is recycled. Cheaper than a copy, because buffers are reused
        and their pages are mapped already."""
        detached = self._buffer
        self.detached += 1
        self._use(self._spare.pop() if self._spare else bytearray(self._request_bytes))
        return detached

    def recycle(self, buffer: bytearray) -> None:
        self.detached -= 1
        self._spare.append(buffer)

    def _use(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._buffers = [buffer]

    def write(self, head: bytes, body: Buffer = b"") -> bool:
        """Send a reply. False if the kernel has given the request up, or the mount is gone."""
        try:
            if body:
                os.writev(self.fd, (head, body))
            else:
                os.write(self.fd, head)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED, errno.ENOTCONN):
                return False
            raise
        return True

    def notify(self, code: int, body: bytes) -> None:
        """Send a notification. A failure is ignored: ENOENT, the kernel does not know the inode. For worker threads only,
        because the kernel may make the sender wait for readers of the inode."""
        message = protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size + len(body), code, 0) + body
        try:
            if self._notifier is None:
                self.write(message)
            else:
                self._notifier.send(message)
        except OSError as exc:
            log.debug("notification %d: %s", code, exc)

    def start_notifier(self) -> None:
        """Send notifications through another process from now on, so that no thread of this one waits in the kernel."""
        self._notifier = Notifier(self.fd)

    def repeat_requests(self) -> None:
        """Have the kernel repeat the requests that the previous daemon has not answered, and look up each name again."""
        self.notify(protocol.NOTIFY_INC_EPOCH, b"")  # kernels before Linux 6.16 do not know it
        self.notify(protocol.NOTIFY_RESEND, b"")
        self.start_notifier()

    # -- backing files -----------------------------------------------------------------------------

    def register(self, fd: int) -> int:
        """Register a backing file. Returns its backing id (1 or more); the kernel holds the file until `unregister`. Raises
        OSError if the kernel refuses it."""
        file = bytearray(protocol.BACKING_MAP.pack(fd, 0, 0))
        return fcntl.ioctl(self.fd, protocol.BACKING_OPEN, file, True)  # type: ignore[no-any-return]

    def unregister(self, number: int) -> None:
        if self.fd < 0:
            return  # the connection was closed, and all its backing ids with it
        try:
            fcntl.ioctl(self.fd, protocol.BACKING_CLOSE, struct.pack("=I", number))
        except OSError:
            pass  # the connection has ended, and all its backing ids with it


# -- the backend -----------------------------------------------------------------------------------

T = TypeVar("T")

Handler = Callable[[int, int, int, memoryview], None]
"""Called with (unique, inode, thread, arguments). The arguments are valid until it returns."""

AT_ONCE = 16
"""Requests that are answered without reading the clock. Derived: a tenth of `SLICE_S`, at 6 µs each."""

PARALLEL_OPENS = 64
"""After two successive opens by different threads, so many further opens count as coming from several threads. Meanwhile
the loop sleeps instead of polling. Measured on a busy machine, with 8 readers: half the processor time a message, twice as
many files a second."""

BURST_GAP_S, POLL_S = 100e-6, 60e-6
"""While the time between requests is below `BURST_GAP_S`, the loop polls for `POLL_S` before it sleeps. Measured: waking a
thread that sleeps on another processor takes 20 to 40 µs, as long as the rest of a small file's open."""

SLICE_S = 1e-3
"""Longest time that other tasks wait while requests come in a stream. Guessed: shorter than the round trips that they wait
for."""

FINISH_S = 2.0
"""How long a hand-over of the mount, during which all programs wait, waits for running requests. Guessed: changes of names
and uploads of small files end in that time. The kernel repeats longer ones to the next daemon."""

COPIED = 64 << 10
"""Writes up to this size are copied out of the request's buffer, larger ones keep the buffer. Measured: a copy of this size
takes 1 µs, of 1 MiB 24 to 100 µs."""

_HEADER = protocol.IN_HEADER.size
_unpack_header, _pack_header = protocol.IN_HEADER_USED.unpack_from, protocol.OUT_HEADER.pack
_unpack_open, _unpack_handle = protocol.OPEN_IN.unpack_from, protocol.RELEASE_IN_USED.unpack_from
_REPLY = protocol.OUT_HEADER.size
_KEEP_CACHE, _PASSTHROUGH, _NOFLUSH = OpenFlags.KEEP_CACHE, OpenFlags.PASSTHROUGH, OpenFlags.NOFLUSH
_OPEN = protocol.OPEN_REPLY
_pack_open, _OPEN_BYTES = _OPEN.pack, _OPEN.size
_BACKING_FLAGS, _PAGES_FLAGS = _PASSTHROUGH | _NOFLUSH, _KEEP_CACHE | _NOFLUSH
_NO_REPLY = (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT)


class Then(Enum):
    """What the loop does after a burst of requests."""

    GO_ON = auto()
    """Other tasks run, and the loop looks for further requests at once."""
    SLEEP = auto()
    """It sleeps until a request comes."""
    END = auto()
    """The mount is gone."""


def _with_end(pending: Pending[T], end: Callable[[], None]) -> Pending[T]:
    """`pending`, with a call of `end` after its work, also if that fails."""

    async def work() -> T:
        try:
            return await pending.work()
        finally:
            end()

    return replace(pending, work=work)


class NativeBackend:
    """Serves one `FileSystem` over one `Device`. With `zero_open` the kernel opens files without a request, which is correct
    only if no object ever changes. With `keep_listings` it keeps what it has read of a directory, while that is fresh.
    `writable` is how the connection was made. With `direct_writers`, a handle that is opened for writing reads and writes
    through the daemon even if its file is in passthrough. `records` are the records for the next daemon, if there is a
    holder."""

    name = "native"
    max_background = MAX_BACKGROUND
    direct = True
    """True if known files are opened from the table. A test compares that all answers are the same without it."""

    def __init__(
        self,
        fs: FileSystem,
        metrics: Metrics,
        deadline_s: float,
        device: Device,
        agreed: Negotiated,
        *,
        zero_open: bool = False,
        keep_listings: bool = False,
        writable: bool = False,
        direct_writers: bool = False,
        records: Records | None = None,
    ) -> None:
        self.agreed = agreed
        self.operations = Operations(fs, metrics, deadline_s, writable=writable, device=lambda: device.number)
        self._fs = fs
        self._metrics = metrics
        self._device = device
        self._write = device.write
        self._on_second_walk = self.operations.walks.threads
        self._zero_open = zero_open
        self._records = records
        self._keep_listings = keep_listings
        self._writer_flags = OpenFlags.DIRECT_IO if direct_writers else 0
        self._uid = self._gid = 0  # the caller of the request that is being handled
        self._reading = trio.CancelScope()
        self._waiting: dict[int, Waiting[Any]] = {}  # by unique
        # Unique of waiting requests whose process got a signal that did not end it.
        self._signalled: set[int] = set()
        # With one processor, polling for the next request would keep its sender from running.
        self._may_poll = len(os.sched_getaffinity(0)) > 1
        self._last_opener = 0  # the thread of the last open
        self._parallel_opens_left = 0  # above 0: several threads are opening files
        self._gap_s = 1.0  # moving average of the time between an answer and the next request
        self._answered_at = 0.0
        self._handlers: dict[int, Handler] = {
            Op.LOOKUP: self._lookup,
            Op.GETATTR: self._getattr,
            Op.STATFS: self._statfs,
            Op.OPEN: self._refuse_open if zero_open else self._open_known if self.direct else self._open,
            Op.READ: self._read,
            Op.RELEASE: self._release,
            Op.OPENDIR: self._opendir,
            Op.READDIR: partial(self._readdir, protocol.dirent),
            Op.READDIRPLUS: partial(self._readdir, protocol.direntplus),
            Op.RELEASEDIR: self._releasedir,
            Op.GETXATTR: self._getxattr,
            Op.LISTXATTR: self._listxattr,
            Op.INTERRUPT: self._interrupt,
            # No state is kept for the inodes that the kernel knows, and there is no reply.
            Op.FORGET: lambda *_: None,
            Op.BATCH_FORGET: lambda *_: None,
            Op.FSYNCDIR: self._reply_errno,
            Op.ACCESS: self._reply_errno,  # the kernel checks the mode bits (default_permissions)
            Op.DESTROY: self._reply_errno,
            Op.READLINK: lambda *_: self.operations.readlink(),
            # Python sends an ioctl for each file that it opens, to check whether it is a terminal.
            Op.IOCTL: partial(self._reply_errno, number=errno.ENOTTY),
            Op.CREATE: self._create,
            Op.MKNOD: partial(self._make, protocol.MKNOD_IN, self.operations.mknod),
            Op.MKDIR: partial(self._make, protocol.MKDIR_IN, self.operations.mkdir),
            Op.UNLINK: partial(self._remove, self.operations.unlink),
            Op.RMDIR: partial(self._remove, self.operations.rmdir),
            Op.RENAME: partial(self._rename, protocol.RENAME_IN),
            Op.RENAME2: partial(self._rename, protocol.RENAME2_IN),
            Op.SETATTR: self._setattr,
            Op.WRITE: self._write_file,
            Op.FALLOCATE: self._fallocate,
            Op.FLUSH: self._flush,
            Op.FSYNC: self._fsync,
            Op.SYMLINK: lambda *_: self.operations.link(),
            Op.LINK: lambda *_: self.operations.link(),
            Op.SETXATTR: self._setxattr,
            Op.REMOVEXATTR: self._removexattr,
        }

    # -- the backend ---------------------------------------------------------------------------------

    def mount(self, mountpoint: Path, name: str, flags: Sequence[str]) -> None:
        """Attach the mount that the device has made, unless it was taken over and is attached already."""
        if not self._device.outlives_daemon:
            self._device.attach(mountpoint)
            if self._records is not None and self.agreed.flags & Init.HAS_RESEND:
                # The next daemon can answer what this one leaves only if the kernel can repeat it.
                self._records.handover.hold(self._device.fd, mountpoint, self._device.number, *self.agreed)
                self._device.outlives_daemon = True
                self._device.start_notifier()

    async def serve(self, ready: Callable[[], None]) -> None:
        if self._records is not None and self._records.handover.taking_over:
            for number in self._records.take_over(self.operations.writers):
                self._unregister(number)
            self._device.repeat_requests()
            self.operations.took_over()
            self._records.handover.answering()
        # Bound methods of the table of known files, so that an open costs one call less.
        self._open_from_table, self._close_known = self._fs.open_known, self._fs.close_known
        ready()
        async with trio.open_nursery() as self._nursery:
            with self._reading:
                then = Then.SLEEP
                while then is not Then.END:
                    await trio.lowlevel.wait_readable(self._device.fd)
                    while (then := self._serve_burst()) is Then.GO_ON:
                        await trio.lowlevel.checkpoint()
            if self._reading.cancelled_caught:
                with trio.move_on_after(FINISH_S):
                    while self._waiting:  # noqa: ASYNC110 (rare)
                        await trio.sleep(LOOK_S)
            self._nursery.cancel_scope.cancel()

    def pause(self) -> None:
        """Read no more requests. `serve` returns once those that were read are answered, or after `FINISH_S`. The kernel
        repeats the unanswered ones to the next daemon."""
        self._reading.cancel()

    def close(self, *, unmount: bool = True) -> None:
        self._device.close(unmount=unmount)

    def register(self, backing: Backing) -> None:
        backing.registered(self._device.register(backing.fd))
        if self._records is not None:
            self._records.registered(backing.id)

    def retire(self, backing: Backing) -> None:
        if backing.id:
            self._unregister(backing.id)

    def _unregister(self, backing_id: int) -> None:
        self._device.unregister(backing_id)
        if self._records is not None:
            self._records.unregistered(backing_id)

    def invalidate(self, inode: int, parent: int, name: bytes) -> None:
        if inode:
            body = protocol.INVAL_INODE.pack(protocol.signed(inode), 0, 0)
            self._device.notify(protocol.NOTIFY_INVAL_INODE, body)
        if name:
            body = protocol.INVAL_ENTRY.pack(parent, len(name), 0) + name + b"\0"
            self._device.notify(protocol.NOTIFY_INVAL_ENTRY, body)

    # -- the loop ------------------------------------------------------------------------------------

    def _serve_burst(self) -> Then:
        """Answer the requests that have come, and poll for further ones while they follow each other closely."""
        clock, read, handle = time.perf_counter, self._device.read, self.handle
        slice_ends = clock() + SLICE_S
        while True:
            request = read()
            if request is None:
                return Then.END
            now = clock()
            if request:
                self._gap_s += (min(now - self._answered_at, 1e-3) - self._gap_s) / 8
                handle(request)
                for _ in range(AT_ONCE):
                    if not (request := read()):
                        break
                    handle(request)
                self._answered_at = now = clock()
            elif self._waiting or not self._may_poll:
                return Then.SLEEP  # the tasks that find the answers need this thread
            elif self._parallel_opens_left > 0:
                # Several threads open files and need the processor: sleep in poll(2), a millisecond at most.
                if self._gap_s > SLICE_S / 2 or not self._device.wait():
                    return Then.SLEEP
            elif self._gap_s > BURST_GAP_S or now - self._answered_at > POLL_S:
                return Then.SLEEP
            if now > slice_ends:
                return Then.GO_ON

    def handle(self, request: memoryview) -> None:
        """Answer one request, now or in a task. Never raises, even for malformed bytes."""
        try:
            length, opcode, unique, inode, self._uid, self._gid, thread = _unpack_header(request)
        except struct.error:
            log.warning("a request of %d bytes: ignored", len(request))
            return
        handler = self._handlers.get(opcode)
        try:
            if length != len(request):
                self._fail(unique, opcode, Malformed(f"{len(request)} bytes that say they are {length}"))
            elif handler is None:
                self._reply_errno(unique, number=errno.ENOSYS)
            else:
                handler(unique, inode, thread, request[_HEADER:])
        except Exception as exc:
            self._fail(unique, opcode, exc)

    def _answer(self, unique: int, found: T | Pending[T], reply: Callable[[int, T], object]) -> None:
        """Reply with `found`: now, or when its work is done."""
        if isinstance(found, Pending):
            self._begin(unique, found, reply)
        else:
            reply(unique, found)

    def _begin(self, unique: int, pending: Pending[T], reply: Callable[[int, T], object]) -> None:
        """Start a task that does the work and replies. Raises `Refused`."""
        waiting = Waiting(pending, self.operations)
        self._waiting[unique] = waiting
        contained(self._nursery, "a request", self._finish, unique, waiting, reply)

    async def _finish(self, unique: int, waiting: Waiting[T], reply: Callable[[int, T], object]) -> None:
        try:
            # There is no checkpoint between answer and reply, so a handle is either reported to the kernel or released.
            reply(unique, await waiting.answer())
        except Exception as exc:
            if waiting.interrupted and waiting.request.rule is Rule.RUN_TO_END:
                log.debug("%s, after its process got EINTR: %s", waiting.request.name, exc)
            else:
                self._fail(unique, waiting.request.name, exc)
        finally:
            self._waiting.pop(unique, None)

    def _fail(self, unique: int, request: int | str, exc: Exception) -> None:
        """Reply with an errno. Never raises. `request` is an opcode or a name."""
        if isinstance(exc, struct.error | Malformed):
            log.warning("a malformed request (%s): %s", request, exc)
            number = errno.EINVAL
        else:
            name = Op(request).name.lower() if request in self._handlers else str(request)
            number = self.operations.errno_of(name, exc)
        if request in _NO_REPLY:
            return
        try:
            self._done(unique, number)
        except OSError as failure:
            log.warning("the kernel does not take an answer: %s", failure)

    # -- signals -----------------------------------------------------------------------------------

    def _interrupt(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        """Handle a signal for the calling process of a request. The kernel reports it after the request, so a request that
        is not waiting has been answered."""
        self._metrics.fuse_other += 1
        (interrupted,) = protocol.INTERRUPT_IN.unpack_from(body)
        if interrupted in self._waiting and not self._give_up(interrupted):
            if not self._signalled:
                contained(self._nursery, "interrupt", self._watch_signals)
            self._signalled.add(interrupted)

    async def _watch_signals(self) -> None:
        """Poll for further signals, as long as requests wait whose process got a signal that did not end it: the kernel
        reports only the first signal, and a later one may end the process."""
        while self._signalled:
            await trio.sleep(LOOK_S)
            self._signalled = {u for u in self._signalled if u in self._waiting and not self._give_up(u)}

    def _give_up(self, unique: int) -> bool:
        """Interrupt the request if a signal ends its process. True if it is interrupted."""
        waiting = self._waiting[unique]
        if waiting.request.rule is Rule.RUN_TO_END and not waiting.begun:
            # After the reply the kernel sends the next change of the same directory, and only a change that has begun goes
            # before that one.
            return False
        if not waiting.interrupted and callers.is_ending(waiting.thread) and waiting.interrupt():
            self._done(unique, errno.EINTR)
        return waiting.interrupted

    # -- replies -----------------------------------------------------------------------------------

    def _send(self, structure: struct.Struct, unique: int, *fields: int) -> bool:
        return self._write(structure.pack(structure.size, 0, unique, *fields))

    def _data(self, unique: int, data: Buffer) -> None:
        self._write(protocol.OUT_HEADER.pack(_REPLY + len(data), 0, unique), data)

    def _done(self, unique: int, number: int | None = 0) -> None:
        """Reply with an errno; 0 or None is success."""
        self._write(protocol.OUT_HEADER.pack(_REPLY, -(number or 0), unique))

    def _lookup_reply(self, unique: int, found: LookupReply) -> None:
        attributes, ttl = found
        if attributes is not None:
            reply = protocol.ENTRY_REPLY
            self._write(reply.pack(reply.size, 0, unique, *entry(attributes, ttl)))
        elif ttl:
            seconds, nanoseconds = duration(ttl)
            no_entry = (0, 0, seconds, 0, nanoseconds, 0)
            self._send(protocol.ENTRY_REPLY, unique, *no_entry, *protocol.NO_ATTRIBUTES)
        else:
            self._done(unique, errno.ENOENT)

    def _attributes_reply(self, unique: int, found: AttributesReply) -> None:
        attributes, ttl = found
        self._send(protocol.ATTR_REPLY, unique, *duration(ttl), 0, *protocol.attr(attributes))

    def _open_reply(self, unique: int, opened: Opened, flags: int = _NOFLUSH) -> None:
        self._reply_with_handle(protocol.OPEN_REPLY, unique, (), opened, flags)

    def _open_to_write_reply(self, unique: int, opened: Opened) -> None:
        self._open_reply(unique, opened, self._writer_flags if opened[1] else 0)

    def _create_reply(self, unique: int, made: Created) -> None:
        attributes, ttl, opened = made
        # With 0 the kernel would send a GETATTR before open(2) returns. Changes in `BURST_S` come through the same kernel.
        fields = entry(attributes, ttl, least=0.0 if attributes.size else BURST_S)
        self._reply_with_handle(
            protocol.CREATE_REPLY, unique, fields, opened, self._writer_flags if opened[1] else 0
        )

    def _reply_with_handle(
        self, reply: struct.Struct, unique: int, fields: tuple[int, ...], opened: Opened, flags: int
    ) -> None:
        """Reply with `fields` and a handle. Release the handle if the kernel does not take the reply."""
        fh, backing = opened
        if backing:
            self._metrics.passthrough_opens += 1
            flags |= _PASSTHROUGH
        else:
            flags |= _KEEP_CACHE
        taken = False
        try:
            if self._records is not None:
                self._records.opened(fh, unique, backing, self.operations.writers.process(fh))
            taken = self._write(reply.pack(reply.size, 0, unique, *fields, fh, flags, backing))
        finally:
            if not taken:
                self._drop(fh)

    def _drop(self, fh: int) -> None:
        """Release a handle that the kernel has not taken."""
        if self._records is not None:
            self._records.released(fh)
        self.operations.drop(fh)

    def _entry_reply(self, unique: int, made: AttributesReply) -> None:
        self._send(protocol.ENTRY_REPLY, unique, *entry(*made))

    # -- names and attributes ----------------------------------------------------------------------

    def _lookup(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        self._answer(unique, self.operations.lookup(thread, inode, name_of(body)), self._lookup_reply)

    def _getattr(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        self._answer(unique, self.operations.getattr(thread, inode), self._attributes_reply)

    def _setattr(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        valid, _, fh, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = (
            protocol.SETATTR_IN.unpack_from(body)
        )
        now_ns = time.time_ns()
        atime_ns = now_ns if valid & Setattr.ATIME_NOW else protocol.signed(atime) * 10**9 + atime_ns
        mtime_ns = now_ns if valid & Setattr.MTIME_NOW else protocol.signed(mtime) * 10**9 + mtime_ns
        pending = self.operations.setattr(
            thread,
            inode,
            size=size if valid & Setattr.SIZE else None,
            mode=stat.S_IMODE(mode) if valid & Setattr.MODE else None,
            uid=uid if valid & Setattr.UID else None,
            gid=gid if valid & Setattr.GID else None,
            atime_ns=atime_ns if valid & (Setattr.ATIME | Setattr.ATIME_NOW) else None,
            mtime_ns=mtime_ns if valid & (Setattr.MTIME | Setattr.MTIME_NOW) else None,
            clear_set_ids=bool(valid & Setattr.KILL_SUIDGID),
            fh=fh if valid & Setattr.FH else None,
        )
        self._begin(unique, pending, self._attributes_reply)

    def _statfs(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        space = self.operations.statfs()
        self._send(
            protocol.STATFS_REPLY,
            unique,
            space.blocks,
            space.blocks_free,
            space.blocks_free,
            space.files + space.files_free,
            space.files_free,
            space.block_size,
            space.name_max,
            space.block_size,
            0,
        )

    def _getxattr(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        size, _ = protocol.GETXATTR_IN.unpack_from(body)
        name = name_of(body[protocol.GETXATTR_IN.size :])
        pending = self.operations.getxattr(thread, inode, name, self._uid)
        self._begin(unique, pending, partial(self._xattr_value, size))

    def _listxattr(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        size, _ = protocol.GETXATTR_IN.unpack_from(body)
        self._xattr_value(size, unique, b"".join(name + b"\0" for name in self.operations.listxattr()))

    def _xattr_value(self, size: int, unique: int, value: bytes) -> None:
        """Reply with the value, with its length if `size` is 0, or with ERANGE if it does not fit into `size` bytes."""
        if not size:
            self._send(protocol.XATTR_SIZE_REPLY, unique, len(value), 0)
        elif len(value) > size:
            self._done(unique, errno.ERANGE)
        else:
            self._data(unique, value)

    def _setxattr(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        protocol.SETXATTR_IN.unpack_from(body)
        self._removexattr(unique, inode, thread, body[protocol.SETXATTR_IN.size :])

    def _removexattr(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        self.operations.setxattr(name_of(body))
        self._done(unique)

    # -- files -------------------------------------------------------------------------------------

    def _refuse_open(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        """Answer ENOSYS, after which the kernel sends no more OPEN and RELEASE (`--zero-open`)."""
        self._metrics.fuse_open += 1
        self._done(unique, errno.ENOSYS)

    def _open_known(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        """Answer an OPEN from the table of known files (`OpenFiles`), or as `_open` does if the file is not known."""
        if thread == self._last_opener:
            self._parallel_opens_left -= 1
        else:
            self._last_opener, self._parallel_opens_left = thread, PARALLEL_OPENS
        flags, _ = _unpack_open(body)
        if flags & CHANGE_FLAGS or unique & RESENT or (known := self._open_from_table(inode, thread)) is None:
            self._open(unique, inode, thread, body)
            return
        fh, handle, records = known.fh, known.handle, self._records
        backing = handle.backing
        if backing is None:
            flags, backing_id = _PAGES_FLAGS, 0
        else:
            flags, backing_id = _BACKING_FLAGS, backing.id
            self._metrics.passthrough_opens += 1
        self._metrics.fuse_open += 1
        taken = False
        try:
            if records is not None and not records.reopened(fh, unique, handle.description, handle.record):
                records.opened(fh, unique, backing_id)
            taken = self._write(_pack_open(_OPEN_BYTES, 0, unique, fh, flags, backing_id))
        finally:
            if not taken:
                self._drop(fh)
        if self._on_second_walk:
            self.operations.walks.end(thread)

    def _open(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        flags, more = _unpack_open(body)
        repeated = bool(unique & RESENT) and self._records is not None
        if repeated and not flags & WRITE_FLAGS:
            self._release_unanswered(unique)
        # The kernel marks opens that empty the file. Writes in passthrough are not seen here, so opens for writing count.
        clear_set_ids = bool(more & protocol.OPEN_KILL_SUIDGID or (flags & WRITE_FLAGS and self._uid))
        opened = self.operations.open(thread, inode, flags, clear_set_ids)
        if repeated and flags & WRITE_FLAGS and isinstance(opened, Pending):
            opened = _with_end(opened, partial(self._release_unanswered, unique))
        if isinstance(opened, Pending):
            self._begin(
                unique, opened, self._open_to_write_reply if flags & WRITE_FLAGS else self._open_reply
            )
        else:
            self._open_reply(unique, opened)

    def _create(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        flags, mode, *_ = protocol.CREATE_IN.unpack_from(body)
        name = name_of(body[protocol.CREATE_IN.size :])
        if not unique & RESENT:
            made = self.operations.create(thread, inode, name, flags, mode, self._uid, self._gid)
            self._answer(unique, made, self._create_reply)
            return
        flags &= ~os.O_EXCL  # the previous daemon may have created the file for this request
        pending = self.operations.create_in_task(thread, inode, name, flags, mode, self._uid, self._gid)
        if self._records is not None:
            pending = _with_end(pending, partial(self._release_unanswered, unique))
        self._begin(unique, pending, self._create_reply)

    def _release_unanswered(self, unique: int) -> None:
        """Release the handle that the previous daemon made for an OPEN that the kernel repeats."""
        assert self._records is not None
        self.operations.writers.released(self._records.release_unanswered(unique))

    def _read(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        fh, offset, size, *_ = protocol.READ_IN.unpack_from(body)
        if self._zero_open:
            found = self.operations.read_unopened(thread, inode, offset, size)
        else:
            found = self.operations.read(thread, fh, offset, size)
        if isinstance(found, Pending):
            self._begin(unique, found, self._data)
        else:
            self._data(unique, found)

    def _write_file(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        fh, offset, size, write_flags, *_ = protocol.WRITE_IN.unpack_from(body)
        clear_set_ids = bool(write_flags & protocol.WRITE_KILL_SUIDGID)
        data = body[protocol.WRITE_IN.size :]
        if len(data) != size:
            raise Malformed(f"a write of {len(data)} bytes that says it has {size}")
        if size <= COPIED or self._device.detached >= MOST_DETACHED:
            self._answer(
                unique,
                self.operations.write(thread, fh, offset, bytes(data), size, clear_set_ids),
                self._write_reply,
            )
            return
        buffer = data.obj
        assert isinstance(buffer, bytearray)
        pending = self.operations.write(thread, fh, offset, data, len(buffer), clear_set_ids)
        if not isinstance(pending, Pending):
            self._write_reply(unique, pending)
            return
        pending = _with_end(pending, partial(self._device.recycle, buffer))
        self._begin(unique, pending, self._write_reply)
        self._device.detach_buffer()  # not earlier, because `_begin` may refuse the write

    def _write_reply(self, unique: int, size: int) -> None:
        self._send(protocol.WRITE_REPLY, unique, size, 0)

    def _fallocate(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        fh, offset, length, mode, _ = protocol.FALLOCATE_IN.unpack_from(body)
        self._begin(unique, self.operations.fallocate(thread, fh, mode, offset, length), self._done)

    def _flush(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        fh, *_ = protocol.FLUSH_IN.unpack_from(body)
        self._begin(unique, self.operations.flush(thread, fh), self._done)

    def _fsync(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        fh, *_ = protocol.FSYNC_IN.unpack_from(body)
        self._answer(unique, self.operations.fsync(thread, fh), self._done)

    def _release(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        (fh,) = _unpack_handle(body)
        if self._records is not None:
            # Before the reply: if the daemon were killed between the two, the record would stay for ever.
            self._records.released(fh)
        try:
            # The reply is sent before the handle is closed, so that the calling process does not wait for that.
            self._write(_pack_header(_REPLY, 0, unique))
        finally:
            self._metrics.fuse_release += 1
            if not self._close_known(fh):
                self.operations.drop(fh)

    # -- directories -------------------------------------------------------------------------------

    def _opendir(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        dh = self.operations.opendir(inode)
        flags, taken = 0, False
        if self._keep_listings:
            flags = OpenFlags.CACHE_DIR | (_KEEP_CACHE if self._fs.listing_kept(dh) else 0)
        try:
            taken = self._send(_OPEN, unique, dh, flags, 0)
        finally:
            if not taken:
                self._fs.listing_lost(dh)
                self.operations.releasedir(dh)

    def _readdir(
        self, pack: Callable[[Entry], bytes], unique: int, inode: int, thread: int, body: memoryview
    ) -> None:
        dh, offset, size, *_ = protocol.READ_IN.unpack_from(body)
        if self._records is not None:
            self._fs.reopen_directory(dh, inode)
        plain = pack is protocol.dirent
        least = (protocol.DIRENT if plain else protocol.DIRENTPLUS).size + 8
        pending = self.operations.readdir(thread, dh, offset, size // least + 1)
        if plain:
            # A listing without attributes is not kept: a program that needs them would send a request for each name.
            self._fs.listing_lost(dh)
        self._begin(unique, pending, partial(self._readdir_reply, pack, size))

    def _readdir_reply(
        self, pack: Callable[[Entry], bytes], size: int, unique: int, entries: list[Entry]
    ) -> None:
        fitting: list[bytes] = []
        for shown in entries:
            packed = pack(shown)
            size -= len(packed)
            if size < 0:
                break
            fitting.append(packed)
        if entries and not fitting:
            self._done(unique, errno.EINVAL)  # an empty reply would mean the end of the directory
            return
        self._data(unique, b"".join(fitting))

    def _releasedir(self, unique: int, inode: int, thread: int, body: memoryview) -> None:
        dh, *_ = protocol.RELEASE_IN.unpack_from(body)
        try:
            self._done(unique)
        finally:
            self.operations.releasedir(dh)

    # -- changes of names --------------------------------------------------------------------------

    def _make(
        self,
        arguments: struct.Struct,
        make: Callable[..., Pending[AttributesReply]],
        unique: int,
        inode: int,
        thread: int,
        body: memoryview,
    ) -> None:
        mode, *_ = arguments.unpack_from(body)
        name = name_of(body[arguments.size :])
        pending = make(thread, inode, name, mode, self._uid, self._gid, resent=bool(unique & RESENT))
        self._begin(unique, pending, self._entry_reply)

    def _remove(
        self,
        remove: Callable[[int, int, bytes], Pending[None]],
        unique: int,
        inode: int,
        thread: int,
        body: memoryview,
    ) -> None:
        pending = remove(thread, inode, name_of(body))
        if unique & RESENT:
            pending = self.operations.tolerate_removed(pending)
        self._begin(unique, pending, self._done)

    def _rename(
        self, arguments: struct.Struct, unique: int, inode: int, thread: int, body: memoryview
    ) -> None:
        to, *flags = arguments.unpack_from(body)  # RENAME has no flags
        old, new = protocol.names_of(body[arguments.size :])
        resent = bool(unique & RESENT)
        pending = self.operations.rename(thread, inode, old, to, new, flags[0] if flags else 0, resent=resent)
        if resent:
            pending = self.operations.tolerate_removed(pending, (to, new))
        self._begin(unique, pending, self._done)

    # -- the rest ----------------------------------------------------------------------------------

    def _reply_errno(self, unique: int, *_: object, number: int = 0) -> None:
        """Reply to a request that needs no work: success, or always the same errno."""
        self._metrics.fuse_other += 1
        self._done(unique, number)

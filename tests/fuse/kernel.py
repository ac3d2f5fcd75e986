"""The kernel's end of a connection, in Python: a socket that keeps records apart stands for /dev/fuse."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import trio
import trio.testing

from cachefs.base.behind import WriteBehind
from cachefs.base.database import Database
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.fs import FORMAT, TABLES, FileSystem, Volume
from cachefs.fuse import protocol
from cachefs.fuse.native_backend import WANTED, Device, NativeBackend, Negotiated
from cachefs.fuse.protocol import Op
from tests.fs.bucket import Bucket, Bytes
from tests.fs.mount import Clock, options_of

ROOT = 1
PID = 4711
DEADLINE_S = 20.0
SEND_BUFFER = 4 << 20
SO_SNDBUFFORCE = 32  # beyond what an ordinary user may have


class Reply(NamedTuple):
    """`error` is the errno, 0 for none."""

    length: int
    error: int
    unique: int
    body: bytes


class Line(Device):
    """A device without ioctls. Replies to the requests in `deaf` are not taken, nor, where it `forgets`, second replies;
    those to requests in `broken` fail; `gone` is an unmount."""

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        super().__init__(fd, writable=writable)
        self.deaf: set[int] = set()
        self.forgets = writable
        self.broken: set[int] = set()
        self.gone = False
        self.passthrough: dict[int, int] = {}
        self.unregistered: list[int] = []

    def read(self) -> memoryview | None:
        return None if self.gone else super().read()

    def write(self, *parts: bytes | bytearray | memoryview) -> bool:
        _, error, unique = protocol.OUT_HEADER.unpack_from(parts[0])
        if unique in self.deaf:
            return False
        if unique in self.broken and not error:
            raise OSError(errno.ENOMEM, "no memory for this")
        if self.forgets and unique:
            self.deaf.add(unique)
        return super().write(*parts)

    def register(self, fd: int) -> int:
        self.passthrough[len(self.passthrough) + 1] = fd
        return len(self.passthrough)

    def unregister(self, number: int) -> None:
        self.unregistered.append(number)


class BackingFile:
    """A `Backing`."""

    def __init__(self, cache: FakeCache, key: str) -> None:
        self._cache, self._key = cache, key
        self.id = 0
        self.fd = 99
        self.users = 1

    def registered(self, backing_id: int) -> None:
        self.id, self.fd = backing_id, -1

    def reuse(self) -> bool:
        known = self._cache.backings.get(self._key) is self and self._key in self._cache.whole
        if known and self.id and not self.users:
            self.users = 1
            self._cache.reused += 1
            return True
        return False


class WholeVersion:
    """A `Reusable`: it is warm, and has no backing file."""

    blocks = 1

    def __init__(self, cache: FakeCache, opened: ObjectId) -> None:
        self._cache, self._opened = cache, opened

    def reuse(self) -> bool:
        if self._opened in self._cache.warm and self._opened.key not in self._cache.whole:
            self._cache.reused += 1
            return True
        return False


class FakeCache(Bytes):
    """A `Reader`: reads of the keys in `held` wait for their event, objects in `whole` have a backing file."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.passthrough = False
        self.held: dict[str, trio.Event] = {}
        self.whole: set[str] = set()
        self.backings: dict[str, BackingFile] = {}
        self.reused = 0  # how often a file was opened without a look at names
        self.reading = 0
        self.closed_while_read: list[str] = []
        self._busy: list[ObjectId] = []

    def hold(self, key: str) -> trio.Event:
        return self.held.setdefault(key, trio.Event())

    def read_now(self, opened: ObjectId, offset: int, size: int, pid: int) -> bytes | None:
        return None if opened.key in self.held else super().read_now(opened, offset, size, pid)

    async def read(self, opened: ObjectId, offset: int, size: int, pid: int) -> bytes:
        self.reading += 1
        self._busy.append(opened)
        try:
            if opened.key in self.held:
                await self.held[opened.key].wait()
            return await super().read(opened, offset, size, pid)
        finally:
            self._busy.remove(opened)
            self.reading -= 1

    def close(self, opened: ObjectId, unread_blocks: int | None = 0) -> None:
        super().close(opened)
        if opened in self._busy:
            self.closed_while_read.append(opened.key)

    def open_backing(self, opened: ObjectId) -> BackingFile | None:
        if opened.key not in self.whole:
            return None
        if opened.key in self.backings:
            self.backings[opened.key].users += 1
        else:
            self.backings[opened.key] = BackingFile(self, opened.key)
        return self.backings[opened.key]

    def reusable(self, opened: ObjectId) -> WholeVersion | None:
        return WholeVersion(self, opened) if opened in self.warm and opened.key not in self.whole else None

    def reopen_backing(self, backing: BackingFile) -> None:
        backing.users += 1

    def release_backing(self, backing: BackingFile) -> None:
        backing.users -= 1


def request(opcode: int, unique: int, nodeid: int, body: bytes = b"", length: int | None = None) -> bytes:
    whole = protocol.IN_HEADER.size + len(body)
    header = protocol.IN_HEADER.pack(
        whole if length is None else length, opcode, unique, nodeid, 1000, 1000, PID, 0, 0
    )
    return header + body


def read_in(fh: int, offset: int = 0, size: int = 4096) -> bytes:
    return protocol.READ_IN.pack(fh, offset, size, 0, 0, 0, 0)


def release_in(fh: int) -> bytes:
    return protocol.RELEASE_IN.pack(fh, 0, 0, 0)


OPEN_READ = protocol.OPEN_IN.pack(os.O_RDONLY, 0)


class Kernel:
    """Sends requests, and keeps the replies."""

    def __init__(
        self, end: socket.socket, line: Line, fs: FileSystem, cache: FakeCache, metrics: Metrics
    ) -> None:
        self.line = line
        self.fs = fs
        self.cache = cache
        self.metrics = metrics
        self.backend: NativeBackend
        self.replies: dict[int, list[Reply]] = {}
        self._end = end
        self._unique = 1 << 20

    def send(self, opcode: int, nodeid: int = ROOT, body: bytes = b"", unique: int | None = None) -> int:
        if unique is None:
            self._unique += 2
            unique = self._unique
        self.send_raw(request(opcode, unique, nodeid, body))
        return unique

    def send_raw(self, record: bytes) -> None:
        self._end.send(record)

    def drain(self) -> None:
        """Take the replies that have been sent up to now."""
        while True:
            try:
                record = self._end.recv(SEND_BUFFER)
            except BlockingIOError:
                return
            length, error, unique = protocol.OUT_HEADER.unpack_from(record)
            assert length == len(record), "a reply of another length than it says"
            assert -4096 < error <= 0
            assert not error or length == protocol.OUT_HEADER.size, "an errno with a body"
            self.replies.setdefault(unique, []).append(
                Reply(length, -error, unique, record[protocol.OUT_HEADER.size :])
            )

    async def reply(self, unique: int) -> Reply:
        """The reply to a request, however long it takes (by the clock that jumps)."""
        with trio.fail_after(1000):
            while True:
                self.drain()
                if unique in self.replies:
                    (found,) = self.replies[unique]
                    return found
                await trio.lowlevel.wait_readable(self._end)

    async def ask(self, opcode: int, nodeid: int = ROOT, body: bytes = b"") -> Reply:
        return await self.reply(self.send(opcode, nodeid, body))

    async def idle(self) -> None:
        """Wait until the backend has done all that it can without the clock."""
        await trio.testing.wait_all_tasks_blocked()
        self.drain()

    # -- what programs do --------------------------------------------------------------------------

    async def ino(self, path: str) -> int:
        found = ROOT
        for name in path.split("/"):
            reply = await self.ask(Op.LOOKUP, found, name.encode() + b"\0")
            assert not reply.error, reply
            found = int.from_bytes(reply.body[:8], "little")
            assert found
        return found

    async def open(self, ino: int) -> int:
        reply = await self.ask(Op.OPEN, ino, OPEN_READ)
        assert not reply.error, reply
        return opened(reply)[0]

    async def opendir(self, ino: int = ROOT) -> int:
        reply = await self.ask(Op.OPENDIR, ino, OPEN_READ)
        assert not reply.error, reply
        return opened(reply)[0]

    @property
    def counts(self) -> tuple[int, int]:
        """Open files and directories."""
        status = self.fs.status()
        return status["open_files"], status["open_directories"]


def opened(reply: Reply) -> tuple[int, int, int]:
    """(handle, flags, backing)"""
    found: tuple[int, int, int] = protocol.OPEN_REPLY.unpack(b"\0" * 16 + reply.body)[3:]
    return found


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The kernel's end of a connection and the daemon's, which keep records apart."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
        end.setsockopt(
            socket.SOL_SOCKET, SO_SNDBUFFORCE if os.geteuid() == 0 else socket.SO_SNDBUF, SEND_BUFFER
        )
    return ends


@asynccontextmanager
async def kernel(
    bucket: Bucket,
    *,
    zero_open: bool = False,
    keep_listings: bool = False,
    flags: int = int(WANTED),
    on_ready: Callable[[], None] = lambda: None,
    writes_to: Any = None,
    writer: Any = None,
    **options: Any,
) -> AsyncIterator[Kernel]:
    """A backend that is being served, over a filesystem over a bucket, which can be written with a `writer`. `writes_to`
    takes its place, and can be written."""
    writable = writer is not None or writes_to is not None
    near, far = socket_pair()
    line = Line(far.detach(), writable=writable)
    origin: Any = bucket
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        database = WriteBehind(Database(Path(place), TABLES, version=FORMAT, fsync=False))
        metrics = Metrics()
        cache = FakeCache(bucket)
        shape, ttls = options_of(**options)
        fs = FileSystem(
            [Volume("", origin, ttls)],
            database,
            cache,
            shape,
            metrics,
            Clock(),
            writer=writer,
        )
        asking = Kernel(near, line, fs, cache, metrics)
        agreed = Negotiated(protocol.MINOR, protocol.Init(flags))
        asking.backend = NativeBackend(
            writes_to or fs,
            metrics,
            DEADLINE_S,
            line,
            agreed,
            zero_open=zero_open,
            keep_listings=keep_listings,
            writable=writable,
        )

        def register(backing: Any) -> bool:
            asking.backend.register(backing)
            return True

        fs.enable_passthrough(register)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(asking.backend.serve, on_ready)
                yield asking
                nursery.cancel_scope.cancel()
        finally:
            asking.backend.close()
            near.close()
            await fs.aclose()
            database.close()

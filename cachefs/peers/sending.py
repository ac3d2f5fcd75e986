"""The server's end of a connection, with and without TLS: bytes in, bytes and ranges of files out.

Without TLS a file's bytes never come into this process: `sendfile` moves them from the page cache to the socket. A worker
thread sends a long run, because it may have to wait for a disk, and because at gigabytes a second the event loop would only
be woken for the next part. The trio task waits for a client that takes nothing, so such clients hold no thread. TLS has to
read the bytes; a little block in memory is read, too, so that head, block and check are one call (measured: a tenth less of
the processors for 100 KB).
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import trio

from cachefs.peers.wire import Piece

SLICE = 1 << 20
"""Bytes of one `sendfile`. Derived: about 0.2 ms of copying."""

LITTLE = 128 << 10
"""Bytes of a block in memory that are read, and sent together with what follows. Derived: 10 µs of copying, as long as the
calls that it saves."""

PATIENCE_S = 0.02
"""How long a thread waits for a client to take more: several round trips within a cluster."""

TURN_S = 0.1
"""How long a thread sends before the deadlines are looked at again: a fraction of `Limits.stall_s`."""

TLS_SLICE = 256 << 10
"""Read and encrypted at a time: about 0.2 ms."""

READ_BYTES = 16 << 10


class Gone(Exception):
    """The connection is lost, or the reply cannot be completed: the connection is closed."""


class Threads(NamedTuple):
    """Threads for bytes in memory, and for bytes on a disk, which may hang."""

    memory: trio.CapacityLimiter
    disk: trio.CapacityLimiter


class Wire(Protocol):
    """One accepted connection. Every method raises `Gone` when the connection is lost."""

    file_bytes: int
    """Bytes of pieces sent so far."""

    async def begin(self) -> None:
        """Set up TLS, if it is used. Called first."""

    async def receive(self) -> bytes:
        """Some bytes; b"" when the client has closed its side."""

    async def send(self, data: bytes, *, more: bool) -> None:
        """Send all of `data`. With `more`, a run follows at once and may go with it."""

    async def send_run(self, run: Sequence[Piece | bytes], progressed: Callable[[], None]) -> None:
        """Send all of these pieces and bytes. Calls `progressed` when the client has taken some, if it has to wait."""

    async def hung_up(self) -> None:
        """Return when the client closes the connection; never if it sends something instead."""

    def close(self) -> None: ...


class _Range:
    """The unsent rest of a piece."""

    __slots__ = ("at", "fd", "left")

    def __init__(self, piece: Piece) -> None:
        self.fd, self.at, self.left = piece.fd, piece.offset, piece.length


class PlainWire:
    """Over a non-blocking socket, which it takes over. Calls that succeed at once have no checkpoint (trio's own sockets
    have one in every call, which doubles what a small reply costs); waiting for the next request is checkpoint enough."""

    def __init__(self, sock: socket.socket, threads: Threads) -> None:
        self.file_bytes = 0
        self._socket = sock
        self._threads = threads
        self._out: deque[_Range | bytes] = deque()

    async def begin(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive(self) -> bytes:
        await trio.lowlevel.wait_readable(self._socket)
        try:
            return self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return await self.receive()
        except OSError as exc:
            raise Gone from exc

    async def send(self, data: bytes, *, more: bool) -> None:
        self._out.append(data)
        if not more:
            await self._flush(_nothing, None)

    async def send_run(self, run: Sequence[Piece | bytes], progressed: Callable[[], None]) -> None:
        thread: trio.CapacityLimiter | None = None
        for item in run:
            if not isinstance(item, Piece):
                self._out.append(item)
            elif item.in_ram and item.length <= LITTLE:
                self._out.append(self._read(item))
            else:
                self._out.append(_Range(item))
                if not item.in_ram:
                    thread = self._threads.disk
                elif thread is None:
                    thread = self._threads.memory
        await self._flush(progressed, thread)

    def _read(self, piece: Piece) -> bytes:
        try:
            data = os.pread(piece.fd, piece.length, piece.offset)
        except OSError as exc:
            raise Gone from exc
        if len(data) < piece.length:
            raise Gone("the file is shorter than it should be")
        self.file_bytes += piece.length
        return data

    async def _flush(self, progressed: Callable[[], None], thread: trio.CapacityLimiter | None) -> None:
        while True:
            if thread is not None:
                # Not abandoned on cancellation: the thread uses the descriptors.
                sent = await trio.to_thread.run_sync(self._push, PATIENCE_S, limiter=thread)
            else:
                sent = self._push(0.0)
            if not self._out:
                return
            if sent:
                progressed()
            await trio.lowlevel.wait_writable(self._socket)

    def _push(self, patience_s: float) -> int:
        """Send until everything is sent, the client has taken nothing for `patience_s`, or `TURN_S` have passed. In any
        thread. Returns how many bytes the client has taken."""
        sent, until = 0, time.monotonic() + TURN_S
        while self._out:
            try:
                sent += self._push_some(self._out[0])
            except BlockingIOError:
                if not patience_s or not self._writable(patience_s):
                    break
            except OSError as exc:
                raise Gone from exc
            if time.monotonic() > until:
                break
        return sent

    def _push_some(self, first: _Range | bytes) -> int:
        out = self._out
        if isinstance(first, _Range):
            sent = os.sendfile(self._socket.fileno(), first.fd, first.at, min(first.left, SLICE))
            if not sent:
                raise Gone("the file is shorter than it should be")
            first.at += sent
            first.left -= sent
            self.file_bytes += sent
            if not first.left:
                out.popleft()
            return sent
        held: list[bytes] = []
        for item in out:
            if isinstance(item, _Range):
                break
            held.append(item)
        left = sent = self._socket.sendmsg(held, (), socket.MSG_MORE if len(held) < len(out) else 0)
        for data in held:
            if left < len(data):
                out[0] = data[left:]
                break
            left -= len(data)
            out.popleft()
        return sent

    def _writable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))

    async def hung_up(self) -> None:
        await _closed_by_peer(self._socket)

    def close(self) -> None:
        self._socket.close()


class TlsWire:
    """`Wire` with TLS."""

    def __init__(self, sock: socket.socket, threads: Threads, context: ssl.SSLContext) -> None:
        self.file_bytes = 0
        self._socket = sock
        transport = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._stream = trio.SSLStream(transport, context, server_side=True, https_compatible=True)
        self._threads = threads

    async def begin(self) -> None:
        try:
            await self._stream.do_handshake()
        except (trio.BrokenResourceError, ssl.SSLError) as exc:
            raise Gone from exc

    async def receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(READ_BYTES))
        except (trio.BrokenResourceError, ssl.SSLError) as exc:
            raise Gone from exc

    async def send(self, data: bytes, *, more: bool) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, ssl.SSLError) as exc:
            raise Gone from exc

    async def send_run(self, run: Sequence[Piece | bytes], progressed: Callable[[], None]) -> None:
        for item in run:
            if isinstance(item, Piece):
                await self._send_file(item, progressed)
            else:
                await self.send(item, more=True)

    async def _send_file(self, piece: Piece, progressed: Callable[[], None]) -> None:
        fd, offset, left, in_ram, _ = piece
        while left:
            count = min(left, TLS_SLICE)
            try:
                if in_ram:
                    data = os.pread(fd, count, offset)
                else:
                    data = await trio.to_thread.run_sync(
                        os.pread, fd, count, offset, limiter=self._threads.disk
                    )
            except OSError as exc:
                raise Gone from exc
            if not data:
                raise Gone("the file is shorter than it should be")
            await self.send(data, more=True)
            offset += len(data)
            left -= len(data)
            self.file_bytes += len(data)
            progressed()

    async def hung_up(self) -> None:
        await _closed_by_peer(self._socket)

    def close(self) -> None:
        self._socket.close()  # without TLS's goodbye: a reply has a length


def _nothing() -> None:
    """For a reply that has one deadline."""


async def _closed_by_peer(sock: socket.socket) -> None:
    await trio.lowlevel.wait_readable(sock)
    try:
        said = sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return await _closed_by_peer(sock)
    except OSError:
        return
    if said:  # the next request, ahead of its time: whether the client is there shows when it is read
        await trio.sleep_forever()

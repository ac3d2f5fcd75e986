"""The server's end of a connection, with and without TLS: bytes in, bytes out, and pieces of files out.

Without TLS a file's bytes never come into this process: `sendfile` moves them from the page cache to the socket, from a
tmpfs on the trio thread, from a disk in a worker thread, because there it may wait. TLS has to read them; and a little block
in memory is read, too, so that head, block and check are one call (measured: a tenth less of the processors for 100 KB).
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

import trio

from cachefs.peers.protocol import Piece

SLICE = 1 << 20
"""Bytes of one `sendfile` before other tasks have a turn. Derived: about 0.2 ms of copying."""

LITTLE = 128 << 10
"""Bytes of a block in memory that are read, and held back until more or the end comes. Derived: 10 µs of copying, as long as
the calls take that it saves."""

TLS_SLICE = 256 << 10
"""Read and encrypted at a time: about 0.2 ms, too."""

READ_BYTES = 16 << 10


class Gone(Exception):
    """The other side is gone, or the file is not what it was said to be: nothing more can be said here."""


class Wire(Protocol):
    """One accepted connection. Every method raises `Gone` when the connection is lost."""

    async def begin(self) -> None:
        """Before anything else."""

    async def receive(self) -> bytes:
        """Some bytes, b"" when the client has finished."""

    async def send(self, data: bytes, *, more: bool) -> None:
        """All of them. `more`: further bytes follow at once, so a packet need not be filled by these alone."""

    async def send_file(self, piece: Piece, progressed: Callable[[], None]) -> None:
        """All of a piece; `progressed` is called when some of it was taken, if that took more than a moment."""

    async def hung_up(self) -> None:
        """Returns when the client closes the connection; never if it says something instead."""

    def close(self) -> None: ...


class PlainWire:
    """Over a socket that does not block, owned from here on. What can be done at once is done without giving up the turn
    (trio's own sockets do so at every call, which doubles what a small reply costs); waiting for the next request is turn
    enough for the others."""

    def __init__(self, sock: socket.socket, disk: trio.CapacityLimiter) -> None:
        self._socket = sock
        self._disk = disk
        self._held: list[bytes] = []  # to be sent with what follows
        self._held_bytes = 0

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
        self._held.append(data)
        self._held_bytes += len(data)
        if not more or self._held_bytes > LITTLE:
            await self._flush(socket.MSG_MORE if more else 0)

    async def _flush(self, flags: int) -> None:
        while self._held_bytes:
            try:
                sent = self._socket.sendmsg(self._held, (), flags)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
                continue
            except OSError as exc:
                raise Gone from exc
            self._held_bytes -= sent
            if self._held_bytes:  # seldom
                self._held = [b"".join(self._held)[sent:]]
        self._held.clear()

    async def send_file(self, piece: Piece, progressed: Callable[[], None]) -> None:
        fd, offset, left, in_ram, _ = piece
        if in_ram and left <= LITTLE:
            try:
                data = os.pread(fd, left, offset)
            except OSError as exc:
                raise Gone from exc
            if len(data) < left:
                raise Gone("the file is shorter than it should be")
            await self.send(data, more=True)
            return
        await self._flush(socket.MSG_MORE)
        out = self._socket.fileno()
        while left:
            count = min(left, SLICE)
            try:
                if in_ram:
                    sent = os.sendfile(out, fd, offset, count)
                else:
                    # Not abandoned on cancellation: both descriptors must stay what they are. The socket never
                    # blocks, so only the disk can.
                    sent = await trio.to_thread.run_sync(
                        os.sendfile, out, fd, offset, count, limiter=self._disk
                    )
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
                continue
            except OSError as exc:
                raise Gone from exc
            if not sent:
                raise Gone("the file is shorter than it should be")
            offset += sent
            left -= sent
            progressed()
            if left and in_ram:
                await trio.lowlevel.checkpoint()

    async def hung_up(self) -> None:
        await _closed_by_peer(self._socket)

    def close(self) -> None:
        self._socket.close()


class TlsWire:
    """The same through TLS."""

    def __init__(self, sock: socket.socket, disk: trio.CapacityLimiter, context: ssl.SSLContext) -> None:
        self._socket = sock
        transport = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._stream = trio.SSLStream(transport, context, server_side=True, https_compatible=True)
        self._disk = disk

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

    async def send_file(self, piece: Piece, progressed: Callable[[], None]) -> None:
        fd, offset, left, in_ram, _ = piece
        while left:
            count = min(left, TLS_SLICE)
            try:
                if in_ram:
                    data = os.pread(fd, count, offset)
                else:
                    data = await trio.to_thread.run_sync(os.pread, fd, count, offset, limiter=self._disk)
            except OSError as exc:
                raise Gone from exc
            if not data:
                raise Gone("the file is shorter than it should be")
            await self.send(data, more=True)
            offset += len(data)
            left -= len(data)
            progressed()

    async def hung_up(self) -> None:
        await _closed_by_peer(self._socket)

    def close(self) -> None:
        self._socket.close()  # without TLS's goodbye: lengths say what is whole


async def _closed_by_peer(sock: socket.socket) -> None:
    await trio.lowlevel.wait_readable(sock)
    try:
        said = sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return await _closed_by_peer(sock)
    except OSError:
        return
    if (
        said
    ):  # a request ahead of its time: it waits, and so does the answer to whether the client is still there
        await trio.sleep_forever()

"""The server of blocks for the other nodes.

Each connection has a task, which answers one request at a time. `Shares` decides which bytes are served, and from where.
This module bounds what any client can use. With a key, nothing is looked up before the request's MAC was checked.

Without TLS a file's bytes never come into this process: `sendfile` moves them from the page cache to the socket. A worker
thread sends a long run of bytes, because it may have to wait for a disk, and because at gigabytes a second the event loop
would do nothing else. While a client takes nothing, the trio task waits for the client, so such clients occupy no thread. A
small block in memory is read, so that one call sends head, block and check (measured: a tenth less processor time for 100
KB)."""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import trio

from cachefs.base.errors import CachefsError, ObjectChanged
from cachefs.base.http1 import NotHttp, Request, parse_request, spell_reply
from cachefs.base.listening import Listener
from cachefs.base.metrics import Metrics
from cachefs.base.tasks import containing, in_thread
from cachefs.peers.auth import Macs, Unauthorized, Verifier
from cachefs.peers.health import PeerTable
from cachefs.peers.wire import (
    BLOCKS,
    CHECKSUM,
    HANDSHAKE,
    HAVE,
    MAC,
    MAX_HAVE_BLOCKS,
    PREFETCH,
    WORKING,
    WORKING_EVERY_S,
    BlockRequest,
    Busy,
    Handshake,
    Malformed,
    NotShared,
    Served,
    ServedBlock,
    Shares,
    pack_bitmap,
    parse_query,
)

log = logging.getLogger(__name__)

SLICE = 1 << 20
"""Bytes of one `sendfile` call. Derived: about 0.2 ms of copying."""

LITTLE = 128 << 10
"""A block in memory of up to so many bytes is read, and sent together with the bytes after it. Derived: copying takes 10
µs, as long as the calls that it saves."""

PATIENCE_S = 0.02
"""How long a thread waits for a client to take more bytes: several round trips within a cluster."""

SEND_S = 0.1
"""How long a thread sends before the task checks the deadlines again: a fraction of `STALL_S`."""

TLS_SLICE = 256 << 10
"""Bytes that are read and encrypted at once: about 0.2 ms."""

READ_BYTES = 16 << 10

# What any client may use. A node needs far less. Several daemons of one machine count as one host.
CONNECTIONS, CONNECTIONS_PER_HOST = 1024, 128
IN_FLIGHT, IN_FLIGHT_PER_HOST = 256, 64
HEAD_S = 5.0
"""From the first byte of a request's head to the last; also for a TLS handshake."""
FIRST_S = 5.0
"""For the first request with a valid signature to begin."""
IDLE_S = 60.0
"""For an unused connection between requests; our clients close theirs sooner (`client.IDLE_S`)."""
STALL_S = 10.0
"""The longest time in which a client takes no byte of a reply."""
REPLY_S = 120.0
"""For a whole reply: a client that takes it byte by byte must not pin an extent for ever."""
THREADS = 8
"""Threads for bytes in memory, and as many for bytes on a disk."""


class Gone(Exception):
    """The reply cannot be completed, so the connection must be closed. With an argument, that is logged."""


LOST = (OSError, trio.BrokenResourceError)
"""A connection that is lost, or a worker thread that cannot be started (`ssl.SSLError` is an OSError)."""

Item: TypeAlias = ServedBlock | bytes
"""What is sent: a block, as a range of a file, or bytes."""

Progressed: TypeAlias = Callable[[], None]


class Threads(NamedTuple):
    """Limits for threads that send bytes in memory, and for those that send bytes on a disk, which may hang."""

    memory: trio.CapacityLimiter
    disk: trio.CapacityLimiter


class Wire(ABC):
    """One accepted connection over a non-blocking socket, which the caller closes. Every method may raise `LOST`, and `Gone`
    if a file is shorter than it should be."""

    def __init__(self, sock: socket.socket, threads: Threads) -> None:
        self.file_bytes = 0
        """Bytes of blocks that were sent so far."""
        self._socket = sock
        self._threads = threads

    async def begin(self) -> None:
        """Set up TLS, if it is used. Called before the other methods."""
        await trio.lowlevel.checkpoint()

    @abstractmethod
    async def receive(self) -> bytes:
        """Receive some bytes; b"" if the client has closed its side."""

    @abstractmethod
    async def send(self, run: Iterable[Item], progressed: Progressed = lambda: None) -> None:
        """Send all of these. Calls `progressed` whenever it must wait and the client has taken some bytes."""

    async def hung_up(self) -> None:
        """Return when the client closes the connection; never return if it sends something instead."""
        await trio.lowlevel.wait_readable(self._socket)
        try:
            early = self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return await self.hung_up()
        except OSError:
            return
        if early:  # bytes of the next request: reading it will show whether the client is still there
            await trio.sleep_forever()


class PlainWire(Wire):
    """Without TLS. Calls that succeed at once have no checkpoint: trio's own sockets have one in every call, which doubles
    what a small reply costs. Waiting for the next request is a checkpoint."""

    def __init__(self, sock: socket.socket, threads: Threads) -> None:
        super().__init__(sock, threads)
        self._out: deque[Item] = deque()  # the first may be the rest of one

    async def receive(self) -> bytes:
        await trio.lowlevel.wait_readable(self._socket)
        try:
            return self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return await self.receive()

    async def send(self, run: Iterable[Item], progressed: Progressed = lambda: None) -> None:
        thread: trio.CapacityLimiter | None = None
        for item in run:
            if isinstance(item, ServedBlock) and item.in_ram and item.length <= LITTLE:
                item = self._read(item)
            elif isinstance(item, ServedBlock):
                thread = (thread or self._threads.memory) if item.in_ram else self._threads.disk
            self._out.append(item)
        while True:
            if thread is not None:
                # Not abandoned on cancellation: the thread uses the descriptors.
                sent = await in_thread(partial(self._push, PATIENCE_S), limiter=thread)
            else:
                sent = self._push(0.0)
            if not self._out:
                return
            if sent:
                progressed()
            await trio.lowlevel.wait_writable(self._socket)

    def _read(self, block: ServedBlock) -> bytes:
        data = os.pread(block.fd, block.length, block.offset)
        if len(data) < block.length:
            raise Gone("the file is shorter than it should be")
        self.file_bytes += block.length
        return data

    def _push(self, patience_s: float) -> int:
        """Send until everything is sent, the client has taken nothing for `patience_s`, or `SEND_S` have passed. In any
        thread. Returns how many bytes the client has taken."""
        sent, until = 0, time.monotonic() + SEND_S
        while self._out:
            try:
                sent += self._push_some(self._out[0])
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                if not patience_s or not poll.poll(patience_s * 1000):
                    break
            if time.monotonic() > until:
                break
        return sent

    def _push_some(self, first: Item) -> int:
        out = self._out
        if isinstance(first, ServedBlock):
            sent = os.sendfile(self._socket.fileno(), first.fd, first.offset, min(first.length, SLICE))
            if not sent:
                raise Gone("the file is shorter than it should be")
            self.file_bytes += sent
            if sent < first.length:
                out[0] = first._replace(offset=first.offset + sent, length=first.length - sent)
            else:
                out.popleft()
            return sent
        parts: list[bytes] = []
        for item in out:
            if isinstance(item, ServedBlock):
                break
            parts.append(item)
        left = sent = self._socket.sendmsg(parts, (), socket.MSG_MORE if len(parts) < len(out) else 0)
        for data in parts:
            if left < len(data):
                out[0] = data[left:]
                break
            left -= len(data)
            out.popleft()
        return sent


class TlsWire(Wire):
    """With TLS."""

    def __init__(self, sock: socket.socket, threads: Threads, context: ssl.SSLContext) -> None:
        super().__init__(sock, threads)
        transport = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._stream = trio.SSLStream(transport, context, server_side=True, https_compatible=True)

    async def begin(self) -> None:
        await self._stream.do_handshake()

    async def receive(self) -> bytes:
        return bytes(await self._stream.receive_some(READ_BYTES))

    async def send(self, run: Iterable[Item], progressed: Progressed = lambda: None) -> None:
        for item in run:
            if isinstance(item, ServedBlock):
                await self._send_file(item, progressed)
            else:
                await self._stream.send_all(item)

    async def _send_file(self, block: ServedBlock, progressed: Progressed) -> None:
        at, stop = block.offset, block.offset + block.length
        while at < stop:
            read = partial(os.pread, block.fd, min(stop - at, TLS_SLICE), at)
            data = read() if block.in_ram else await in_thread(read, limiter=self._threads.disk)
            if not data:
                raise Gone("the file is shorter than it should be")
            await self._stream.send_all(data)
            at += len(data)
            self.file_bytes += len(data)
            progressed()


class _Refusal(Exception):
    """A reply with a status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(eq=False, repr=False)
class Server:
    """Serves on listening sockets. `handshake` is called with the client's host for each handshake request. `names` are the
    Host values of this node: a request that is signed for another one is refused. Empty means that they are not known yet,
    and any Host is accepted."""

    shares: Shares
    handshake: Callable[[str], Handshake]
    block_size: int
    verifier: Verifier | None = None
    tls: ssl.SSLContext | None = None
    stats: PeerTable = field(default_factory=PeerTable)
    metrics: Metrics = field(default_factory=Metrics)
    names: Collection[str] = ()

    def __post_init__(self) -> None:
        self._connections = _Admitted(CONNECTIONS, CONNECTIONS_PER_HOST)
        self.in_flight = _Admitted(IN_FLIGHT, IN_FLIGHT_PER_HOST)
        self._threads = Threads(trio.CapacityLimiter(THREADS), trio.CapacityLimiter(THREADS))
        self.leaving = False

    async def serve(
        self, listeners: Sequence[trio.SocketListener], *, task_status: Any = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled; then close the listeners."""
        await trio.serve_listeners(
            containing("serving a peer", self._accepted),
            [Listener(listener, "peers") for listener in listeners],
            task_status=task_status,
        )

    async def drained(self) -> None:
        """Turn new requests away, and return when none is in flight."""
        self.leaving = True
        while self.in_flight.total:  # noqa: ASYNC110 - at a stop, and not for long
            await trio.sleep(0.02)

    async def _accepted(self, stream: trio.SocketStream) -> None:
        # Closed without TLS's close_notify, which is not needed: a reply has a length.
        with socket.socket(fileno=stream.socket.detach()) as sock:
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                host = str(sock.getpeername()[0])
            except OSError:  # the client has gone
                return
            if not self._connections.enter(host):
                return
            try:
                wire = TlsWire(sock, self._threads, self.tls) if self.tls else PlainWire(sock, self._threads)
                with trio.move_on_after(HEAD_S) as handshake_scope:
                    await wire.begin()
                if not handshake_scope.cancelled_caught:
                    await _Conversation(self, wire, host).run()
            except LOST as exc:
                log.debug("the connection of peer %s is lost: %s", host, exc)
            except Gone as exc:
                if exc.args:
                    log.warning("reply to peer %s broken off: %s", host, exc)
            finally:
                self._connections.leave(host)


@dataclass(eq=False)
class _Admitted:
    """A number of connections or requests, with a limit in all and for each host."""

    most: int
    most_of_host: int
    total: int = 0
    of_host: Counter[str] = field(default_factory=Counter)

    def enter(self, host: str) -> bool:
        """Count one more, until `leave`. False if a limit is reached."""
        if self.of_host[host] >= self.most_of_host or self.total >= self.most:
            return False
        self.total += 1
        self.of_host[host] += 1
        return True

    def leave(self, host: str) -> None:
        self.total -= 1
        self.of_host[host] -= 1
        if not self.of_host[host]:
            del self.of_host[host]


@dataclass(eq=False)
class _Conversation:
    """Requests and replies on one connection. Every wait has a deadline, which ends the conversation. One scope has them
    all, one after the other: a scope for each would add a tenth to the cost of a small request."""

    _server: Server
    _wire: Wire
    _host: str
    _early: bytes = b""  # bytes of the next request that were received with the last one
    _authenticated: bool = False  # True once a request was authentic
    _is_last: bool = False  # True if no request follows the present one
    _scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    _streaming: bool = False
    _macs: Macs | None = None

    async def run(self) -> None:
        """Serve until either side ends the conversation. Raises `LOST`, `Gone`."""
        with self._scope:
            while not self._is_last:
                self._macs = None
                try:
                    request = await self._next_request()
                    if request is None:
                        return
                    await self._answer(request)
                except _Refusal as exc:
                    self._streaming = False
                    self._server.metrics.peer_turned_away += 1
                    await self._reply(exc.status, str(exc).encode("utf-8", "replace")[:512])
        if self._scope.cancelled_caught and self._streaming:
            raise Gone("it is not done in time, or the client does not take it")

    def _within(self, seconds: float) -> None:
        """Set the deadline of the waits that follow."""
        self._scope.deadline = trio.current_time() + seconds

    async def _next_request(self) -> Request | None:
        """Receive a request. None if the client closes the connection. Raises `_Refusal`, `LOST`."""
        data = self._early
        self._is_last = True  # until a whole request was read
        try:
            self._within(IDLE_S if self._authenticated else FIRST_S)
            data = data or await self._wire.receive()
            request = parse_request(data)
            if request is None:
                self._within(HEAD_S)
                while data and request is None:
                    more = await self._wire.receive()
                    data = data + more if more else b""
                    request = parse_request(data)
        except NotHttp as exc:
            raise _Refusal(exc.status, str(exc)) from exc
        if request is None:
            return None
        if request.body:
            raise _Refusal(400, "requests have no body here")
        self._early, self._is_last = data[request.stop :], request.last
        return request

    async def _answer(self, request: Request) -> None:
        server = self._server
        if request.method != "GET":
            self._is_last = True  # a HEAD expects no body
            raise _Refusal(405, "only GET")
        self._authenticate(request)
        path, _, query = request.target.partition("?")
        try:
            if path == HANDSHAKE:
                await self._reply(200, server.handshake(self._host).pack())
                return
            if path not in (BLOCKS, PREFETCH, HAVE):
                raise _Refusal(400, "no such request")
            wanted = parse_query(query, server.block_size)
        except Malformed as exc:
            raise _Refusal(400, str(exc)) from None
        if server.leaving or not server.in_flight.enter(self._host):
            raise _Refusal(503, "leaving" if server.leaving else "too many requests at once")
        try:
            if path == HAVE:
                await self._have(wanted)
            else:
                await self._blocks(wanted, prefetch=path == PREFETCH)
        except NotShared as exc:
            raise _Refusal(404, str(exc)) from None
        except ObjectChanged as exc:
            raise _Refusal(412, str(exc)) from None
        except Busy as exc:
            raise _Refusal(503, str(exc)) from None
        finally:
            server.in_flight.leave(self._host)

    def _authenticate(self, request: Request) -> None:
        verifier, names = self._server.verifier, self._server.names
        host = request.headers.get("host", "")
        if verifier is None:
            self._authenticated = True
            return
        try:
            self._macs = verifier.verify(request.target, host, request.headers.get("authorization", ""))
        except Unauthorized as exc:
            raise _Refusal(401, str(exc)) from None
        self._authenticated = True
        if names and host not in names and request.target != HANDSHAKE:
            here = ", ".join(sorted(names))
            raise _Refusal(
                421, f"meant for another node: this one is {here} (do all nodes have the same --peers?)"
            )

    async def _have(self, wanted: BlockRequest) -> None:
        if wanted.stop_block - wanted.start_block > MAX_HAVE_BLOCKS:
            raise _Refusal(400, "too many blocks in one request")
        self._within(REPLY_S)
        cached = await self._server.shares.have(wanted)
        await self._reply(200, pack_bitmap(cached))

    async def _blocks(self, wanted: BlockRequest, *, prefetch: bool) -> None:
        if not wanted.within_extent():
            raise _Refusal(400, "more than one extent")
        served = await self._server.shares.open(wanted, self._host, background=prefetch)
        try:
            if prefetch:
                await self._all_arrived(wanted, served)
                await self._reply(200, b"")
            else:
                await self._stream(wanted, served)
        finally:
            served.close()

    async def _all_arrived(self, wanted: BlockRequest, served: Served) -> None:
        self._within(REPLY_S)
        for _ in range(wanted.start_block, wanted.stop_block):
            if served.take() is None:
                await self._arrived(served, working=True)

    async def _stream(self, wanted: BlockRequest, served: Served) -> None:
        """Send head and body. A failure before the first block becomes a status; after it, it breaks off the reply."""
        wire, metrics = self._wire, self._server.metrics
        length = wanted.body_length(self._macs is not None)
        until = trio.current_time() + REPLY_S

        def progressed() -> None:
            self._scope.deadline = min(trio.current_time() + STALL_S, until)

        self._streaming = True
        found = served.take()
        if found is None:
            self._scope.deadline = until
            found = await self._arrived(served, working=True)
        progressed()
        run: list[Item] = [self._head(200, length, b"")]
        block, before = wanted.start_block, wire.file_bytes
        try:
            while True:
                while found is not None:
                    run += (found, self._check(block, found.checksum))
                    block += 1
                    found = served.take() if block < wanted.stop_block else None
                await wire.send(run, progressed)
                if block == wanted.stop_block:
                    break
                run = []
                self._scope.deadline = until  # the reply waits for bytes now, not for the client
                try:
                    found = await self._arrived(served, working=False)
                except (NotShared, ObjectChanged, Busy) as exc:
                    raise Gone(f"the rest cannot be read: {exc}") from exc
                progressed()
        finally:
            sent = wire.file_bytes - before
            self._server.stats.of(self._host).bytes_out += sent
            metrics.peer_bytes_out += sent
        self._streaming = False
        metrics.peer_served += 1

    async def _arrived(self, served: Served, *, working: bool) -> ServedBlock:
        """Wait for the next block. Raises `Gone` if the client closes the connection. Before the head (`working`) the
        client gets signs of life. Within the body, a pause of `WORKING_EVERY_S` breaks off the reply."""

        async def watch() -> None:
            await self._wire.hung_up()
            watched.cancel_scope.cancel()

        found: ServedBlock | None = None
        failure: Exception | None = None
        async with trio.open_nursery() as watched:
            watched.start_soon(watch)
            try:
                while found is None and failure is None:
                    if working:
                        await self._wire.send([WORKING])
                    with trio.move_on_after(WORKING_EVERY_S) as pause:
                        await served.wait()
                    found = served.take()
                    if found is None and pause.cancelled_caught and not working:
                        failure = Gone()  # the client requests the rest again, and gets signs of life
            except (CachefsError, *LOST) as exc:  # raised below, without the nursery's exception group
                failure = exc
            watched.cancel_scope.cancel()
        if found is None:
            raise failure or Gone
        return found

    def _check(self, block: int, checksum: int) -> bytes:
        packed = CHECKSUM.pack(checksum)
        return packed if self._macs is None else packed + self._macs.block(block, packed)

    async def _reply(self, status: int, body: bytes) -> None:
        self._within(STALL_S)
        await self._wire.send([self._head(status, len(body), body) + body])

    def _head(self, status: int, length: int, body: bytes) -> bytes:
        headers = {"Content-Length": str(length)}
        if self._macs is not None:
            headers[MAC] = self._macs.reply(status, length, body)
        if self._is_last:
            headers["Connection"] = "close"
        return spell_reply(status, headers)

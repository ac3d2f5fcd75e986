"""Requests to the other nodes.

Connections are kept and reused, a bounded number to each peer. Nothing is retried here, except on a connection that had died
while it was idle: the caller decides what to do without the peer.

A request, the head of its reply and a body of up to `LITTLE` bytes need no thread (measured: twice as many requests of 100
KB a second as with threads). A worker thread receives a longer body (measured: twice as fast with eight at once). It waits
in the kernel, because each call and poll of a non-blocking socket competes for the interpreter's lock."""

from __future__ import annotations

import hmac
import ipaddress
import math
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import trio
import xxhash

from cachefs.base.http1 import NotHttp, Reply, parse_reply, spell_request
from cachefs.base.listening import is_loopback
from cachefs.base.metrics import Metrics
from cachefs.base.tasks import Stoppable, in_thread
from cachefs.peers.auth import Macs, Signer
from cachefs.peers.health import LOOK_EVERY_S, Pace, PeerTable
from cachefs.peers.wire import (
    BLOCKS,
    CHECKSUM,
    HANDSHAKE,
    HAVE,
    KIND_OF,
    MAC,
    MAX_SMALL_BODY,
    PREFETCH,
    WORKING,
    Address,
    BlockRequest,
    Handshake,
    Malformed,
    PeerFailed,
    Sink,
    check_bytes,
    parse_bitmap,
)

READ_BYTES = 16 << 10
"""Most bytes received at once with a head. Bytes of the body that come with it are copied once more."""

WAKE_BYTES = 256 << 10
"""The kernel wakes a thread that receives a block only when so many more bytes are there. Measured, of the time that an
extent costs both sides: 256 or 512 KiB save a sixth, 64 KiB a twelfth, compared with a wake-up for any byte."""

THREADS = 64
"""Long bodies that are received at once, from all peers; each holds a buffer of one block."""

LITTLE = 256 << 10
"""Bytes of the longest body that needs no thread. Derived: about 0.1 ms, as long as handing it to a thread."""

SPARE_BUFFERS = 16
"""Buffers of each size that are kept between requests."""

_TIMEVAL = struct.Struct("@ll")
_BYTES_RECEIVED = struct.Struct("@128xQ")
"""Reads the field tcpi_bytes_received of `struct tcp_info` (linux/tcp.h)."""

T = TypeVar("T")


class Deadlines(NamedTuple):
    """Deadlines of one request, in seconds since it began: for the first sign of life; for the head of the reply, while
    signs of life continue; and for everything."""

    first_s: float
    working_s: float
    total_s: float


@dataclass(eq=False, repr=False)
class Connection:
    """A connection to one peer, over a connected, non-blocking socket. Call `shake_hands` first. All methods that read or
    write raise only `PeerFailed`."""

    _socket: socket.socket
    address: Address
    _tls: ssl.SSLContext | None = None
    used: bool = False  # True once a whole reply was received on it
    # Bytes of the body that were received with the head.
    _early: memoryview = field(default_factory=lambda: memoryview(b""))
    _thread_has_it: bool = False  # a worker thread uses the socket
    _silence_s: float = 0.0  # how long that thread waits for a byte
    _unwanted: bool = False  # `close` was called

    async def shake_hands(self, deadline_s: float) -> None:
        """Set up TLS, if it is used."""
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                return
            secure = self._socket = self._tls.wrap_socket(
                self._socket, do_handshake_on_connect=False, suppress_ragged_eofs=False
            )
            with trio.move_on_after(deadline_s):
                while True:
                    try:
                        return secure.do_handshake()
                    except ssl.SSLWantReadError:
                        await trio.lowlevel.wait_readable(secure)
                    except ssl.SSLWantWriteError:
                        await trio.lowlevel.wait_writable(secure)
        except OSError as exc:
            raise self._lost(exc, trusted=False) from exc
        raise self.silent()

    async def ask(self, target: str, authorization: str | None, deadlines: Deadlines) -> tuple[Reply, float]:
        """Send a request. Returns (reply's head, seconds to the first sign of life). Signs of life renew the deadline."""
        headers = {"Host": str(self.address)}
        if authorization is not None:
            headers["Authorization"] = authorization
        begun, first_s = trio.current_time(), math.inf
        deadline_s, working_s, _ = deadlines
        with trio.move_on_after(deadline_s) as scope:
            try:
                await self._send(spell_request(target, headers))
                await trio.lowlevel.wait_readable(self._socket)
                received = b""
                while True:
                    while received.startswith(WORKING) or (
                        (reply := parse_reply(received)) is not None and reply.status < 200
                    ):
                        received = received[received.index(b"\r\n\r\n") + 4 :]
                        now = trio.current_time()
                        first_s = min(first_s, now - begun)
                        scope.deadline = min(
                            now + max(SILENCE_S, deadline_s), begun + max(working_s, deadline_s)
                        )
                        await trio.lowlevel.checkpoint()  # many signs of life must not hold up other tasks
                    if reply is not None:
                        self._early = memoryview(received)[reply.stop :]
                        return reply, min(first_s, trio.current_time() - begun)
                    try:
                        more = self._socket.recv(READ_BYTES)
                    except (BlockingIOError, ssl.SSLWantReadError):
                        await trio.lowlevel.wait_readable(self._socket)
                        continue
                    if not more:
                        raise PeerFailed("reset", f"{self.address} hung up")
                    received += more
            except NotHttp as exc:
                raise PeerFailed("refused", f"{self.address} does not speak this protocol") from exc
            except OSError as exc:
                raise self._lost(exc, trusted=False) from exc
        raise self.silent()

    async def _send(self, request: bytes) -> None:
        while request:
            try:
                request = request[self._socket.send(request) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                await trio.lowlevel.wait_writable(self._socket)
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(self._socket)

    def read_into(self, view: memoryview) -> Iterator[None]:
        """Fill `view` with the next bytes of the body. Yields when the caller must wait until the socket can be read."""
        at = self._take_early(view)
        while at < len(view):
            try:
                count = self._socket.recv_into(view[at:])
            except (BlockingIOError, ssl.SSLWantReadError):
                yield
                continue
            except OSError as exc:
                raise self._lost(exc) from exc
            if not count:
                raise self._broken_off()
            at += count

    def fill(self, view: memoryview) -> None:
        """As `read_into`, for a worker thread, between `give_to_thread` and `thread_ended`. Raises `PeerFailed` if no byte
        came for `silence_s` (see `give_to_thread`); it may take up to twice that."""
        if self._tls is not None:
            for _ in self.read_into(view):
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                if not poll.poll(self._silence_s * 1000):
                    raise self.silent()
            return
        at, woken_until = self._take_early(view), len(view) - WAKE_BYTES
        if at < woken_until:
            # The kernel must never wait for more bytes than are still to come: `WAKE_BYTES` more follow these bytes.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, WAKE_BYTES)
            at = self._receive(view, at, woken_until)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._receive(view, at, len(view))

    def _receive(self, view: memoryview, at: int, stop: int) -> int:
        """Fill [at, stop) of `view` from a blocking socket. Returns `stop`."""
        while at < stop:
            try:
                count = self._socket.recv_into(view[at:stop], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise self.silent() from None
            except OSError as exc:
                raise self._lost(exc) from exc
            if not count:
                raise self._broken_off()
            at += count
        return at

    def _broken_off(self) -> PeerFailed:
        return PeerFailed("reset", f"{self.address} hung up within its reply")

    def _take_early(self, view: memoryview) -> int:
        early = self._early[: len(view)]
        view[: len(early)] = early
        self._early = self._early[len(early) :]
        return len(early)

    def fileno(self) -> int:
        return self._socket.fileno()

    def silent(self) -> PeerFailed:
        return PeerFailed("timeout", f"{self.address} was silent for too long")

    def slow(self) -> PeerFailed:
        return PeerFailed("slow", f"{self.address} sends much more slowly than the origin")

    def received(self) -> int:
        """Bytes that the kernel has received on this connection so far, including unread ones."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        count: int = _BYTES_RECEIVED.unpack(info)[0]
        return count

    def quiet(self) -> bool:
        """True if another request may be sent: neither bytes nor an end of the stream came after the last body."""
        if self._early or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            return False
        try:
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK)  # the socket below TLS
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def give_to_thread(self, silence_s: float) -> None:
        """Give the connection to a worker thread. It calls `fill`, which waits `silence_s` for a byte, and at last
        `thread_ended`."""
        self._thread_has_it = True
        self._silence_s = silence_s
        if self._tls is None:  # with TLS, `fill` polls
            silence = _TIMEVAL.pack(*divmod(int(silence_s * 1e6), 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)
            self._socket.setblocking(True)

    def thread_ended(self) -> None:
        """End the worker thread's use; the thread calls it last."""
        self._socket.setblocking(False)
        # The flag is cleared before the other one is read, so either this call or `close` closes the socket.
        self._thread_has_it = False
        if self._unwanted:
            self._socket.close()

    def close(self) -> None:
        """Close the socket. While a worker thread has it, only shut it down: the thread then ends at once, and
        `thread_ended` closes the socket. A descriptor that is closed while a thread waits on it may be reused for another
        file."""
        self._unwanted = True
        if self._thread_has_it:
            with suppress(OSError):  # not by TLS's shutdown, which would change TLS's state
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        else:
            self._socket.close()

    def _lost(self, exc: OSError, *, trusted: bool = True) -> PeerFailed:
        if isinstance(exc, ssl.SSLError) and not trusted and not isinstance(exc, ssl.SSLEOFError):
            # This also happens while the head is awaited: in TLS 1.3 a server checks our certificate after the handshake.
            return PeerFailed("refused", f"{self.address}: TLS: {exc.reason or exc}")
        return PeerFailed("reset", f"{self.address}: {exc.strerror or exc}")


class Delivery(Stoppable):
    """A sink that can be closed while another thread writes to it."""

    def __init__(self, sink: Sink) -> None:
        self.bytes = 0
        self.error: Exception | None = None
        """What the sink raised."""
        self._sink = sink
        self._wrote_s = 0.0
        self._since: float | None = None  # when the present write began

    def write(self, data: memoryview, checksum: int) -> bool:
        """Write a block to the sink. False if the transfer should stop."""
        self._busy = True
        self._since = since = time.monotonic()
        try:
            if self._closed:
                return False
            self._sink.write_block(data, checksum)
            self.bytes += len(data)
        except Exception as exc:
            self.error = exc
            return False
        finally:
            self._since = None
            self._wrote_s += time.monotonic() - since
            self._busy = False
        return True

    def in_sink_s(self) -> float:
        """Seconds spent in the sink so far, which do not count as the peer's time."""
        since = self._since
        return self._wrote_s + (time.monotonic() - since if since is not None else 0.0)


class _Body(NamedTuple):
    """The body of a blocks reply: its connection, its request and its MACs, and the sink for the blocks."""

    connection: Connection
    request: BlockRequest
    macs: Macs | None
    delivery: Delivery


class Receiver:
    """Receives the blocks of all requests of one client, with a bounded number of threads and spare buffers."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(THREADS)
        self._buffers: deque[bytearray] = deque(maxlen=SPARE_BUFFERS)
        self._little: deque[bytearray] = deque(maxlen=SPARE_BUFFERS)

    async def blocks(
        self,
        connection: Connection,
        head: Reply,
        macs: Macs | None,
        *,
        request: BlockRequest,
        delivery: Delivery,
        silence_s: float,
        sink_waits: bool,
        pace: Pace,
    ) -> None:
        """Deliver the body of a blocks reply. As for `Client.read`, the sink is not called afterwards."""
        check_mac(connection, head, macs, b"")
        body = _Body(connection, request, macs, delivery)
        if head.length != request.body_length(macs is not None):
            raise PeerFailed("corrupt", f"{connection.address}: a reply of {head.length} bytes")
        if request.stop - request.start > LITTLE:
            await self._in_thread(body, silence_s, pace)
        else:
            await self._on_trio_thread(body, silence_s, sink_waits, pace)
        if delivery.error is not None:
            raise delivery.error

    async def _on_trio_thread(self, body: _Body, silence_s: float, sink_waits: bool, pace: Pace) -> None:
        connection, request, macs, delivery = body
        left_s = min(pace.allowed_s(request.stop - request.start), pace.patience_s)
        buffer = _buffer(self._little, LITTLE + check_bytes(signed=True))
        try:
            view, check = memoryview(buffer), check_bytes(macs is not None)
            for index in range(request.start_block, request.stop_block):
                received = view[: request.length(index) + check]
                for _ in connection.read_into(received):
                    since = trio.current_time()
                    with trio.move_on_after(min(silence_s, left_s)) as scope:
                        await trio.lowlevel.wait_readable(connection.fileno())
                    left_s -= trio.current_time() - since
                    if scope.cancelled_caught:
                        raise connection.silent() if left_s > 0 else connection.slow()
                block = checked(connection, index, received, macs)
                if not sink_waits:
                    delivery.write(*block)
                else:
                    await _in_thread(connection, partial(delivery.write, *block), self._threads)
                if delivery.error is not None:
                    return
        finally:
            await delivery.close()
            self._little.append(buffer)

    async def _in_thread(self, body: _Body, silence_s: float, pace: Pace) -> None:
        connection, request, macs, delivery = body
        size, slow = request.stop - request.start, False

        async def watch(scope: trio.CancelScope) -> None:
            nonlocal slow
            before, complete, complete_s = connection.received(), 0, 0.0
            while claim:  # noqa: ASYNC110 - the thread that it waits for sets no event
                await trio.sleep(LOOK_EVERY_S)
            begun = trio.current_time()
            while not slow:
                await trio.sleep(LOOK_EVERY_S)
                elapsed_s = trio.current_time() - begun - delivery.in_sink_s()
                if delivery.bytes != complete:
                    complete, complete_s = delivery.bytes, elapsed_s
                received = max(complete, connection.received() - before)
                slow = pace.too_slow(size, received, elapsed_s, elapsed_s - complete_s)
            scope.cancel()

        # The thread pops `claim` when it begins. If it never began, the `finally` below pops it and takes the connection
        # back.
        claim = [connection]

        def receive() -> None:
            try:
                claim.pop()
            except IndexError:
                return
            try:
                buffer = _buffer(self._buffers, request.block_size + check_bytes(signed=True))
                view, check = memoryview(buffer), check_bytes(macs is not None)
                for block in range(request.start_block, request.stop_block):
                    received = view[: request.length(block) + check]
                    connection.fill(received)
                    if not delivery.write(*checked(connection, block, received, macs)):
                        return
                self._buffers.append(buffer)  # after a failure the buffer is dropped
            finally:
                connection.thread_ended()

        connection.give_to_thread(silence_s)
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, nursery.cancel_scope)
                try:
                    await _in_thread(connection, receive, self._threads)
                except Exception as exc:
                    failure = exc  # raised below, without the nursery's exception group
                nursery.cancel_scope.cancel()
        finally:
            try:
                claim.pop().thread_ended()
            except IndexError:
                pass
            await delivery.close()
        if failure is not None:
            raise failure
        if slow:
            raise connection.slow()


async def _in_thread(
    connection: Connection, call: Callable[[], object], limiter: trio.CapacityLimiter
) -> None:
    """Call `call`, which raises no OSError, in a worker thread, and abandon it on cancellation. Raises `PeerFailed` if no
    thread can be started: the caller goes on without the peer."""
    try:
        await in_thread(call, limiter=limiter, abandon_on_cancel=True)
    except OSError as exc:
        raise PeerFailed("busy", f"{connection.address}: {exc.strerror}") from exc


def _buffer(spare: deque[bytearray], size: int) -> bytearray:
    """A spare buffer, or a new one. Any thread may call this."""
    try:
        buffer = spare.pop()
    except IndexError:
        return bytearray(size)
    return buffer if len(buffer) >= size else bytearray(size)


def checked(
    connection: Connection, block: int, received: memoryview, macs: Macs | None
) -> tuple[memoryview, int]:
    """The block in `received`, which the block's check follows, and its checksum. Raises `PeerFailed` for a wrong check."""
    length = len(received) - check_bytes(macs is not None)
    data, check = received[:length], bytes(received[length:])
    checksum = xxhash.xxh3_64_intdigest(data)
    packed = CHECKSUM.pack(checksum)
    if check[: CHECKSUM.size] != packed:
        raise PeerFailed("corrupt", f"{connection.address}: block {block} does not match its checksum")
    if macs is not None and not hmac.compare_digest(macs.block(block, packed), check[CHECKSUM.size :]):
        raise PeerFailed("corrupt", f"{connection.address}: block {block} is not signed with our key")
    return data, checksum


async def small_body(connection: Connection, head: Reply, macs: Macs | None, deadline_s: float) -> bytes:
    """The body of a reply without blocks, if its MAC is right. The refusal of a request that is not accepted has none."""
    if head.length > MAX_SMALL_BODY:
        raise PeerFailed("corrupt", f"{connection.address}: a reply of {head.length} bytes")
    body = bytearray(head.length)
    with trio.move_on_after(deadline_s) as scope:
        for _ in connection.read_into(memoryview(body)):
            await trio.lowlevel.wait_readable(connection.fileno())
    if scope.cancelled_caught:
        raise connection.silent()
    if head.status not in (400, 401, 431):
        check_mac(connection, head, macs, bytes(body))
    return bytes(body)


def check_mac(connection: Connection, head: Reply, macs: Macs | None, body: bytes) -> None:
    """Raise `PeerFailed` unless the head has the right MAC for this reply."""
    if macs is None:
        return
    mac = macs.reply(head.status, head.length, body)
    if not hmac.compare_digest(mac.encode(), head.headers.get(MAC.lower(), "").encode()):
        raise PeerFailed("refused", f"{connection.address}: the reply is not signed with our key")


RESOLVERS = 4
"""Threads of one `Resolver`, all of which may hang. They do not count among the daemon's other threads."""


class Resolver:
    """The system's resolver, in worker threads. A hanging one is abandoned; when `RESOLVERS` hang, further calls wait."""

    def __init__(self, getaddrinfo: Callable[..., list[Any]] = socket.getaddrinfo) -> None:
        self._getaddrinfo = getaddrinfo
        self.threads = trio.CapacityLimiter(RESOLVERS)

    async def __call__(self, name: str, port: int) -> list[str]:
        """The IP addresses of a name, the preferred one first. Raises OSError. The caller sets a deadline."""
        resolve = partial(self._getaddrinfo, name, port, type=socket.SOCK_STREAM)
        try:
            found = await in_thread(resolve, limiter=self.threads, abandon_on_cancel=True)
        except ValueError as exc:
            raise OSError(f"not a host name: {name}") from exc
        return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


Receive: TypeAlias = Callable[[Connection, Reply, Macs | None], Awaitable[T]]

CONNECT_S = 0.25
"""Seconds that connecting may take. Within a cluster it takes a millisecond. The kernel sends a lost SYN again after a
second, which is too late for a reader."""

TOTAL_S = 60.0
"""Seconds for a whole request, besides the time for its bytes: a slow origin may need so long for the first one."""

SILENCE_S = 3.0
"""The longest silence after the first sign of life. Derived: three times `wire.WORKING_EVERY_S`."""

CONNECTIONS_PER_PEER = 16
"""Requests to one peer at once. With one extent each, they fill a 100 Gbit/s link."""

IDLE_S = 30.0
"""How long an unused connection is kept. Derived: half of what a server allows (`server.IDLE_S`)."""

ANY_PACE = Pace()
"""The pace for a caller that does not know its origin's rate."""

MAX_IDLE = 256
"""Unused connections that are kept, to all peers: those to a thousand peers would use up the descriptors."""


class _Stale(Exception):
    """A kept connection was closed before a byte of the reply came."""


class _Peer:
    """Connections to one address."""

    def __init__(self) -> None:
        self.slots = trio.Semaphore(CONNECTIONS_PER_PEER)
        self.ips: list[str] = []  # its IP addresses; empty before the lookup, and after a failure
        # False also once a connection was lost: the name may have another address then, and another node the known one.
        self.looked_up = False
        self.idle: deque[tuple[float, Connection]] = deque()  # (time of last use, connection), oldest first

    def in_use(self) -> bool:
        return bool(self.idle) or self.slots.value < CONNECTIONS_PER_PEER

    def take(self, now: float) -> Connection | None:
        """The most recently used connection that is still usable; None if there is none. Closes those that are not."""
        while self.idle:
            too_old = now - self.idle[0][0] >= IDLE_S  # the oldest first: later requests may not need as many
            _, connection = self.idle.popleft() if too_old else self.idle.pop()
            if not too_old and connection.quiet():
                return connection
            connection.close()
            self.looked_up = False
        return None

    def drop_idle(self) -> None:
        self.looked_up = False
        while self.idle:
            self.idle.pop()[1].close()


@dataclass(eq=False, repr=False)
class Client:
    """Connections to any number of peers. All methods raise only `PeerFailed`, and what a sink raised."""

    signer: Signer | None = None
    tls: ssl.SSLContext | None = None
    stats: PeerTable = field(default_factory=PeerTable)
    metrics: Metrics = field(default_factory=Metrics)
    getaddrinfo: InitVar[Callable[..., list[Any]]] = socket.getaddrinfo

    def __post_init__(self, getaddrinfo: Callable[..., list[Any]]) -> None:
        self._resolve = Resolver(getaddrinfo)
        self._peers: dict[Address, _Peer] = {}
        self._receiver = Receiver()

    async def read(
        self,
        address: Address,
        request: BlockRequest,
        sink: Sink,
        *,
        deadline_s: float,
        working_s: float = TOTAL_S,
        sink_waits: bool = True,
        pace: Pace = ANY_PACE,
    ) -> float:
        """Deliver all bytes of `request` to `sink.write_block`, in order, in whole and checked blocks. Returns the seconds
        from the request to the first sign of life, which must come within `deadline_s`. The reply may take `working_s`, if
        the peer keeps sending signs of life. After its head, silence may last `SILENCE_S`, and the bytes may come as slowly
        as `pace` allows.

        Once this has returned or raised, the sink is not and will not be called. What the sink raises is raised unchanged.
        With `sink_waits=False` the sink never waits for a disk, and small bodies are written on the trio thread."""
        delivery = Delivery(sink)
        receive = partial(
            self._receiver.blocks,
            request=request,
            delivery=delivery,
            silence_s=max(SILENCE_S, deadline_s),
            sink_waits=sink_waits,
            pace=pace,
        )
        total_s = TOTAL_S + pace.allowed_s(request.stop - request.start)
        try:
            deadlines = Deadlines(deadline_s, working_s, total_s)
            head_s, _ = await self._ask(address, BLOCKS, request, receive, deadlines)
        except PeerFailed as exc:
            exc.delivered = delivery.bytes
            raise
        finally:
            self.stats.of(str(address)).bytes_in += delivery.bytes
            self.metrics.peer_bytes_in += delivery.bytes
        return head_s

    async def prefetch(
        self, address: Address, request: BlockRequest, *, deadline_s: float = 2.0, working_s: float = TOTAL_S
    ) -> float:
        """Have the peer fetch these blocks, within `working_s`. Returns the seconds to the first sign of life."""
        first_s, _ = await self._ask_small(address, PREFETCH, request, bytes, deadline_s, working_s)
        return first_s

    async def handshake(self, address: Address, *, deadline_s: float = 2.0) -> Handshake:
        """The handshake of the node at this address."""
        _, found = await self._ask_small(address, HANDSHAKE, None, Handshake.parse, deadline_s)
        return found

    async def have(self, address: Address, request: BlockRequest, *, deadline_s: float = 2.0) -> list[bool]:
        """For each of at most `wire.MAX_HAVE_BLOCKS` blocks, in any extents, True if the peer has it."""
        parse = partial(parse_bitmap, count=request.stop_block - request.start_block)
        _, cached = await self._ask_small(address, HAVE, request, parse, deadline_s)
        return cached

    def host_of(self, address: Address) -> str:
        """The IP address of a peer, as last resolved; its name if it was not resolved yet."""
        peer = self._peers.get(address)
        return peer.ips[0] if peer is not None and peer.ips else address.host

    def forget(self, address: Address) -> None:
        """Close the connections of a member that left."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.drop_idle()
        if self.signer is not None:
            self.signer.forget(str(address))

    def close(self) -> None:
        """Close idle connections. Requests in flight end with their tasks."""
        for peer in self._peers.values():
            peer.drop_idle()
        self._peers.clear()

    async def _ask_small(
        self,
        address: Address,
        path: str,
        request: BlockRequest | None,
        parse: Callable[[bytes], T],
        deadline_s: float,
        working_s: float = 0.0,
    ) -> tuple[float, T]:
        """As `_ask`, for a small body: the result is what `parse` makes of it. `parse` may raise `Malformed`."""

        async def receive(connection: Connection, head: Reply, macs: Macs | None) -> T:
            return parse(await small_body(connection, head, macs, deadline_s))

        deadlines = Deadlines(deadline_s, working_s, working_s + 2 * deadline_s)
        return await self._ask(address, path, request, receive, deadlines)

    async def _ask(
        self,
        address: Address,
        path: str,
        request: BlockRequest | None,
        receive: Receive[T],
        deadlines: Deadlines,
    ) -> tuple[float, T]:
        """Send a request. Returns (seconds to the first sign of life, result of `receive`) for a reply with status 200."""
        stats = self.stats.of(str(address))
        if request is not None:
            stats.requests += 1
            self.metrics.peer_requests += 1
        peer = self._peers.setdefault(address, _Peer())
        try:
            target = path if request is None else request.target(path)
            with trio.move_on_after(deadlines.total_s):
                async with peer.slots:
                    kept = peer.take(trio.current_time())
                    if kept is not None:
                        try:
                            return await self._exchange(kept, peer, target, receive, deadlines)
                        except _Stale:
                            peer.drop_idle()  # the other idle connections have probably died, too
                    fresh = await self._connect(address, peer, deadlines.first_s)
                    return await self._exchange(fresh, peer, target, receive, deadlines)
            failed = PeerFailed("timeout", f"{address} did not deliver within {deadlines.total_s:g} s")
        except PeerFailed as exc:
            failed = exc
        except Malformed as exc:  # a malformed reply, or a name that is too long for a request
            failed = PeerFailed("refused", f"{address}: {exc}")
        finally:
            if not peer.in_use() and self._peers.get(address) is peer:
                del self._peers[address]
        if request is not None:  # a failed handshake does not count: the node may not have started yet
            stats.failures[failed.kind] += 1
            self.metrics.peer_failures += 1
        raise failed

    async def _exchange(
        self, connection: Connection, peer: _Peer, target: str, receive: Receive[T], deadlines: Deadlines
    ) -> tuple[float, T]:
        """As `_ask`, on this connection. It is kept if the reply was received to its end, and closed otherwise."""
        address = connection.address
        authorization, macs = self.signer.sign(target, str(address)) if self.signer else (None, None)
        whole = False
        head: Reply | None = None
        try:
            try:
                head, head_s = await connection.ask(target, authorization, deadlines)
            except PeerFailed as exc:
                if exc.kind == "reset" and connection.used:
                    raise _Stale from exc
                raise
            stats = self.stats.of(str(address))
            stats.answered += 1
            stats.first_byte_s += head_s
            if head.status == 200:
                result = await receive(connection, head, macs)
                whole = True
                return head_s, result
            text = (await small_body(connection, head, macs, deadlines.first_s)).decode("utf-8", "replace")
            whole = True
            message = "".join(char for char in text if char.isprintable())
            raise PeerFailed(
                KIND_OF.get(head.status, "refused"), f"{address}: {message[:200] or head.status}"
            )
        finally:
            if whole and head is not None and not head.last:
                connection.used = True
                self._keep(address, peer, connection)
            else:
                connection.close()

    async def _connect(self, address: Address, peer: _Peer, deadline_s: float) -> Connection:
        try:
            with trio.fail_after(CONNECT_S):
                if not peer.looked_up:
                    peer.ips = await self._addresses_of(address, peer.ips)
                    peer.looked_up = True
                sock = await self._reach(address, peer)
        except (OSError, trio.TooSlowError) as exc:
            peer.ips, peer.looked_up = [], False
            silent = isinstance(exc, trio.TooSlowError)
            reason = "no answer" if silent else getattr(exc, "strerror", None) or exc
            raise PeerFailed("connect", f"{address}: {reason}") from exc
        plain = socket.socket(fileno=sock.detach())
        plain.setblocking(False)
        connection = Connection(plain, address, self.tls)
        try:
            await connection.shake_hands(deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _addresses_of(self, address: Address, known: list[str]) -> list[str]:
        """The IP addresses of a peer; those `known` if its name cannot be looked up now."""
        try:
            return [str(ipaddress.ip_address(address.host))]
        except ValueError:
            pass
        with trio.move_on_after(CONNECT_S / 2 if known else CONNECT_S):
            try:
                return await self._resolve(*address)
            except OSError:
                if not known:
                    raise
        return known

    async def _reach(self, address: Address, peer: _Peer) -> trio.socket.SocketType:
        """Connect to the first of the peer's IP addresses that accepts. Later requests use that address alone."""
        failure: Exception = OSError("it has no address")
        ips = peer.ips  # other requests may replace it meanwhile
        for ip in ips:
            if self.signer is None and self.tls is None and not is_loopback(ip):
                raise PeerFailed(
                    "refused", f"{address}: without a key or certificates, only this machine is trusted"
                )
            family = trio.socket.AF_INET6 if ":" in ip else trio.socket.AF_INET
            sock = trio.socket.socket(family, trio.socket.SOCK_STREAM)
            try:
                with trio.fail_after(CONNECT_S / len(ips)):  # one may be silent
                    await sock.connect((ip, address.port))
            except (OSError, trio.TooSlowError) as exc:
                sock.close()
                failure = exc
            except BaseException:
                sock.close()
                raise
            else:
                peer.ips = [ip]
                return sock
        raise failure

    def _keep(self, address: Address, peer: _Peer, connection: Connection) -> None:
        if self._peers.get(address) is not peer:  # the member has left meanwhile
            connection.close()
            return
        peer.idle.append((trio.current_time(), connection))
        if sum(len(other.idle) for other in self._peers.values()) > MAX_IDLE:
            oldest = min((other for other in self._peers.values() if other.idle), key=lambda p: p.idle[0][0])
            oldest.idle.popleft()[1].close()

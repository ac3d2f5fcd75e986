"""Asking the other nodes.

A block is received into a buffer, checked, and only then written to the sink, so that what a sink was given is right. The
request and the head of the reply are the trio task's. So is a little body: receiving 100 KB costs less than the hop to a
worker thread (measured: twice as many a second). Longer ones are a thread's, from the second byte to the last: at
gigabytes a second the event loop would do nothing but copy (measured: twice as fast with eight at once).

When a deadline strikes or the task is cancelled, the connection is shut down under the thread, which ends at once, and the
sink is not called any more when the task goes on. Nothing is repeated here but for a connection that had died while it was
idle: what to do without the peer is for the caller to decide.
"""

from __future__ import annotations

import hmac
import socket as _socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeAlias, TypeVar

import trio
import xxhash

from cachefs.metrics import Metrics
from cachefs.peers.auth import Signer
from cachefs.peers.connection import READ, Connection, Head, Steps
from cachefs.peers.protocol import PeerFailed, Sink
from cachefs.peers.stats import PeerTable
from cachefs.peers.wire import (
    BLOCKS,
    CHECKSUM,
    HAVE,
    HELLO,
    MAX_SMALL_BODY,
    SEAL_BYTES,
    Address,
    BlockRequest,
    Hello,
    Malformed,
    parse_bitmap,
)

T = TypeVar("T")
Receive: TypeAlias = Callable[[Connection, Head, bytes | None], Awaitable[T]]

CONNECT_S = 0.25
"""Borrowed: within a cluster a handshake takes a millisecond; a lost SYN is sent again after a second, which is too late."""

TOTAL_S = 60.0
"""For a whole request: an extent at 280 KB/s. Guessed."""

CONNECTIONS_PER_PEER = 8
"""Requests to one peer at once. Guessed: an extent each fills a 100 Gbit/s link."""

THREADS = 64
"""Long bodies received at once; each holds a buffer of one block."""

LITTLE = 256 << 10
"""Bytes of a body that the trio task receives itself. Derived: about 0.1 ms, as long as the hop to a thread takes."""

SPARE_BUFFERS = 16
"""Kept between requests."""

IDLE_S = 30.0
"""How long a connection is kept unused. Derived: half of what a server allows (`Limits.idle_s`)."""

MAX_IDLE = 256
"""Connections kept unused, to all peers: descriptors are what a thousand peers would use up."""


class _Stale(Exception):
    """A kept connection was dead before it said anything."""


class _Peer:
    """What is kept of one address."""

    def __init__(self) -> None:
        self.room = trio.Semaphore(CONNECTIONS_PER_PEER)
        self.where: tuple[int, tuple[object, ...]] | None = None  # resolved; None before, and after it failed
        self.idle: deque[tuple[float, Connection]] = deque()  # by when they were used last

    def take(self, now: float) -> Connection | None:
        """The connection used last, if it was not too long ago."""
        while self.idle:
            since, connection = self.idle.pop()
            if now - since < IDLE_S:
                return connection
            connection.close()
        return None

    def drop_idle(self) -> None:
        while self.idle:
            self.idle.pop()[1].close()


class _Delivery:
    """A sink, behind a fence. Touched by whoever writes (a worker thread, or the trio task) and by the task (`close`).

    The flags need no lock: each has one writer. `_writing` is raised *before* `_closed` is looked at, and `_closed` set
    before `_writing` is looked at, so one of the two sides sees the other."""

    def __init__(self, sink: Sink) -> None:
        self.bytes = 0
        self.error: Exception | None = None
        """What the sink raised."""
        self._sink = sink
        self._writing = False
        self._closed = False

    def write(self, data: memoryview) -> bool:
        """False when there is no use in going on."""
        self._writing = True
        try:
            if self._closed:
                return False
            self._sink.write(data)
            self.bytes += len(data)
        except Exception as exc:
            self.error = exc
            return False
        finally:
            self._writing = False
        return True

    async def close(self) -> None:
        """The sink is not called after this. A write that runs now is waited for."""
        self._closed = True
        while self._writing:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.001)


class Client:
    """Connections to any number of peers. All methods raise only `PeerFailed`, and what a sink raised."""

    def __init__(
        self,
        *,
        signer: Signer | None = None,
        tls: ssl.SSLContext | None = None,
        stats: PeerTable | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._signer = signer
        self._tls = tls
        self._stats = stats or PeerTable()
        self._metrics = metrics or Metrics()
        self._peers: dict[Address, _Peer] = {}
        self._threads = trio.CapacityLimiter(THREADS)
        self._buffers: deque[bytearray] = deque(maxlen=SPARE_BUFFERS)

    async def read(
        self,
        address: Address,
        request: BlockRequest,
        sink: Sink,
        *,
        connect_s: float = CONNECT_S,
        deadline_s: float,
        total_s: float = TOTAL_S,
        sink_waits: bool = True,
    ) -> float:
        """Deliver all bytes of `request` to `sink.write`, in order, a whole and checked block at a time. Returns the
        seconds from asking to the reply's head (what latency is judged by). `deadline_s` is for that head, and for
        any silence after it.

        Once this has returned or raised, the sink is not and will not be called. What the sink raises is raised
        unchanged. `sink_waits=False` says that its `write` never waits for a disk: then little is written on the trio
        thread."""
        self._metrics.peer_requests += 1
        delivery = _Delivery(sink)

        async def receive(connection: Connection, head: Head, nonce: bytes | None) -> None:
            self._check_seal(address, head, nonce, b"")
            if head.length != request.body_length(nonce is not None):
                raise PeerFailed("corrupt", f"{address}: a reply of {head.length} bytes")
            try:
                await self._blocks(connection, address, request, nonce, delivery, deadline_s, sink_waits)
            finally:
                self._stats.of(str(address)).bytes_in += delivery.bytes
                self._metrics.peer_bytes_in += delivery.bytes
            if delivery.error is not None:
                raise delivery.error

        try:
            head_s, _ = await self._ask(address, BLOCKS, request, receive, connect_s, deadline_s, total_s)
        except PeerFailed as exc:
            exc.delivered = delivery.bytes
            raise
        return head_s

    async def hello(
        self, address: Address, *, connect_s: float = CONNECT_S, deadline_s: float = 2.0
    ) -> Hello:
        """Who listens there."""

        async def receive(connection: Connection, head: Head, nonce: bytes | None) -> Hello:
            return Hello.parse(await self._small_body(connection, address, head, nonce, deadline_s))

        _, said = await self._ask(address, HELLO, None, receive, connect_s, deadline_s, 2 * deadline_s)
        return said

    async def have(
        self,
        address: Address,
        request: BlockRequest,
        *,
        connect_s: float = CONNECT_S,
        deadline_s: float = 2.0,
    ) -> list[bool]:
        """Of each block of the request whether the peer holds it (at most `wire.MAX_HAVE_BLOCKS`, over any extents)."""

        async def receive(connection: Connection, head: Head, nonce: bytes | None) -> list[bool]:
            body = await self._small_body(connection, address, head, nonce, deadline_s)
            return parse_bitmap(body, request.stop_block - request.start_block)

        _, held = await self._ask(address, HAVE, request, receive, connect_s, deadline_s, 2 * deadline_s)
        return held

    def forget(self, address: Address) -> None:
        """A member that left: its connections and counters go."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.drop_idle()
        self._stats.forget(str(address))

    def close(self) -> None:
        """Close what is idle. Requests under way are their tasks' to cancel."""
        for peer in self._peers.values():
            peer.drop_idle()
        self._peers.clear()

    # One request.

    async def _ask(
        self,
        address: Address,
        path: str,
        request: BlockRequest | None,
        receive: Receive[T],
        connect_s: float,
        deadline_s: float,
        total_s: float,
    ) -> tuple[float, T]:
        """(seconds to the head, what `receive` makes of the body) of a reply with status 200."""
        stats = self._stats.of(str(address))
        stats.requests += 1
        try:
            target = path if request is None else request.target(path)
            peer = self._peers.setdefault(address, _Peer())
            with trio.move_on_after(total_s):
                async with peer.room:
                    kept = peer.take(trio.current_time())
                    if kept is not None:
                        try:
                            return await self._exchange(kept, address, peer, target, receive, deadline_s)
                        except _Stale:
                            peer.drop_idle()  # it died while it was idle, and the others probably with it
                    fresh = await self._connect(address, peer, connect_s, deadline_s)
                    return await self._exchange(fresh, address, peer, target, receive, deadline_s)
            failed = PeerFailed("timeout", f"{address} did not deliver within {total_s:g} s")
        except PeerFailed as exc:
            failed = exc
        except Malformed as exc:  # what it said, or what we would have had to say
            failed = PeerFailed("refused", f"{address}: {exc}")
        stats.failures[failed.kind] += 1
        self._metrics.peer_failures += 1
        raise failed

    async def _exchange(
        self,
        connection: Connection,
        address: Address,
        peer: _Peer,
        target: str,
        receive: Receive[T],
        deadline_s: float,
    ) -> tuple[float, T]:
        """Owns the connection: it is kept when the reply was received to its end, and closed otherwise."""
        signed = self._signer.sign("GET", target, str(address)) if self._signer else None
        nonce = signed.nonce if signed else None
        whole = False
        head: Head | None = None
        begun = trio.current_time()
        try:
            try:
                head = await self._drive(
                    connection, connection.ask(target, signed.authorization if signed else None), deadline_s
                )
            except PeerFailed as exc:
                if exc.kind == "reset" and connection.used:
                    raise _Stale from exc
                raise
            head_s = trio.current_time() - begun
            stats = self._stats.of(str(address))
            stats.answered += 1
            stats.first_byte_s += head_s
            if head.status == 200:
                result = await receive(connection, head, nonce)
                whole = True
                return head_s, result
            text = (await self._small_body(connection, address, head, nonce, deadline_s)).decode(
                "utf-8", "replace"
            )
            whole = True
            said = "".join(char for char in text if char.isprintable())
            raise head.failure(f"{address}: {said or head.status}")
        finally:
            if whole and head is not None and not head.close and connection.clean():
                connection.used = True
                self._keep(address, peer, connection)
            else:
                connection.close()

    async def _connect(
        self, address: Address, peer: _Peer, connect_s: float, deadline_s: float
    ) -> Connection:
        try:
            with trio.fail_after(connect_s):
                if peer.where is None:
                    found = await trio.socket.getaddrinfo(
                        address.host, address.port, type=trio.socket.SOCK_STREAM
                    )
                    peer.where = (found[0][0], found[0][4])
                family, where = peer.where
                sock = trio.socket.socket(family, trio.socket.SOCK_STREAM)
                try:
                    await sock.connect(where)
                except BaseException:
                    sock.close()
                    raise
        except (OSError, UnicodeError, trio.TooSlowError) as exc:
            peer.where = None  # perhaps the name has another address now
            said = (
                "no answer" if isinstance(exc, trio.TooSlowError) else getattr(exc, "strerror", None) or exc
            )
            raise PeerFailed("connect", f"{address}: {said}") from exc
        plain = _socket.socket(fileno=sock.detach())
        plain.setblocking(False)
        connection = Connection(plain, address, self._tls)
        try:
            await self._drive(connection, connection.shake_hands(), deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _drive(self, connection: Connection, steps: Steps[T], deadline_s: float) -> T:
        """To the end, which must come within the deadline."""
        with trio.move_on_after(deadline_s):
            while True:
                try:
                    step = next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
                await _ready(connection, step)
        raise connection.silent()

    # Bodies.

    async def _blocks(
        self,
        connection: Connection,
        address: Address,
        request: BlockRequest,
        nonce: bytes | None,
        delivery: _Delivery,
        silence_s: float,
        sink_waits: bool,
    ) -> None:
        """Little on the trio thread, much in a worker thread."""
        buffer = self._buffer(request.block_size + CHECKSUM.size + SEAL_BYTES)
        steps = self._checked(connection, address, request, nonce, memoryview(buffer))
        if request.stop - request.start > LITTLE:
            connection.lend()
            claim = [buffer]  # taken by the thread when it begins, or below when it never did
            try:
                await trio.to_thread.run_sync(
                    self._receive_in_thread,
                    connection,
                    steps,
                    delivery,
                    silence_s,
                    claim,
                    abandon_on_cancel=True,
                    limiter=self._threads,
                )
            finally:
                try:
                    claim.pop()
                except IndexError:
                    pass
                else:
                    connection.give_back()
                await delivery.close()
            return
        try:
            for step in steps:
                if isinstance(step, int):
                    with trio.move_on_after(silence_s) as scope:
                        await _ready(connection, step)
                    if scope.cancelled_caught:
                        raise connection.silent()
                elif not sink_waits:
                    delivery.write(step)
                else:
                    await trio.to_thread.run_sync(
                        delivery.write, step, abandon_on_cancel=True, limiter=self._threads
                    )
                if delivery.error is not None:
                    break
        finally:
            await delivery.close()
            self._buffers.append(buffer)

    def _receive_in_thread(
        self,
        connection: Connection,
        steps: Iterator[int | memoryview],
        delivery: _Delivery,
        silence_s: float,
        claim: list[bytearray],
    ) -> None:
        try:
            buffer = claim.pop()
        except IndexError:
            return
        try:
            for step in steps:
                if isinstance(step, int):
                    connection.wait(step, silence_s)
                elif not delivery.write(step):
                    return
        finally:
            self._buffers.append(buffer)
            connection.give_back()

    def _checked(
        self,
        connection: Connection,
        address: Address,
        request: BlockRequest,
        nonce: bytes | None,
        view: memoryview,
    ) -> Iterator[int | memoryview]:
        """Steps of receiving, and each block once it is whole and right; it is valid until the next step."""
        check = CHECKSUM.size + (SEAL_BYTES if nonce is not None else 0)
        for block in range(request.start_block, request.stop_block):
            length = request.length(block)
            yield from connection.read_into(view[: length + check])
            data, said = view[:length], bytes(view[length : length + check])
            checksum = CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))
            if said[: CHECKSUM.size] != checksum:
                raise PeerFailed("corrupt", f"{address}: block {block} does not match its checksum")
            if nonce is not None and self._signer is not None:
                seal = self._signer.key.seal_block(nonce, block, checksum)
                if not hmac.compare_digest(seal, said[CHECKSUM.size :]):
                    raise PeerFailed("corrupt", f"{address}: block {block} is not signed with our key")
            yield data

    async def _small_body(
        self, connection: Connection, address: Address, head: Head, nonce: bytes | None, deadline_s: float
    ) -> bytes:
        """Of a reply that is not blocks, its seal checked. Without one, a peer may only refuse: it cannot seal what it
        says to somebody whose request it does not believe."""
        if head.length > MAX_SMALL_BODY:
            raise PeerFailed("corrupt", f"{address}: a reply of {head.length} bytes")
        body = bytearray(head.length)
        await self._drive(connection, connection.read_into(memoryview(body)), deadline_s)
        if head.status not in (400, 401, 431):
            self._check_seal(address, head, nonce, bytes(body))
        return bytes(body)

    def _check_seal(self, address: Address, head: Head, nonce: bytes | None, body: bytes) -> None:
        if nonce is None or self._signer is None:
            return
        seal = self._signer.key.seal_reply(nonce, head.status, head.length, body)
        if not hmac.compare_digest(seal.encode(), head.seal.encode()):
            raise PeerFailed("refused", f"{address}: the reply is not signed with our key")

    def _buffer(self, size: int) -> bytearray:
        buffer = self._buffers.pop() if self._buffers else bytearray(size)
        return buffer if len(buffer) >= size else bytearray(size)

    def _keep(self, address: Address, peer: _Peer, connection: Connection) -> None:
        if self._peers.get(address) is not peer:  # forgotten meanwhile
            connection.close()
            return
        peer.idle.append((trio.current_time(), connection))
        if sum(len(other.idle) for other in self._peers.values()) > MAX_IDLE:
            oldest = min((other for other in self._peers.values() if other.idle), key=lambda p: p.idle[0][0])
            oldest.idle.popleft()[1].close()


async def _ready(connection: Connection, step: int) -> None:
    if step == READ:
        await trio.lowlevel.wait_readable(connection.fileno())
    else:
        await trio.lowlevel.wait_writable(connection.fileno())

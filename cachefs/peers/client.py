"""Requests to the other nodes.

Connections are kept and reused, a bounded number to each peer. When a deadline strikes or the task is cancelled, the
connection is shut down under a thread that receives from it, the thread ends at once, and the sink is not called any more
when the task continues. Nothing is retried here except on a connection that had died while it was idle: the caller decides
what to do without the peer.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import trio

from cachefs.base.http1 import Reply
from cachefs.base.metrics import Metrics
from cachefs.peers.auth import Macs, Signer, is_loopback
from cachefs.peers.connection import ALIVE, Connection, Delivery, Receiver, Steps, drive, ready, small_body
from cachefs.peers.health import Pace, PeerTable
from cachefs.peers.wire import (
    BLOCKS,
    BRING,
    HANDSHAKE,
    HAVE,
    KIND_OF,
    Address,
    BlockRequest,
    Handshake,
    Malformed,
    PeerFailed,
    Sink,
    parse_bitmap,
)

T = TypeVar("T")
Receive: TypeAlias = Callable[[Connection, Reply, Macs | None], Awaitable[T]]

CONNECT_S = 0.25
"""Borrowed: within a cluster a handshake takes a millisecond; a lost SYN is sent again after a second, which is too late."""

TOTAL_S = 60.0
"""For a whole request, without the time that its bytes may take: as long as a slow origin may need for the first of them."""

SILENCE_S = 3.0
"""After the first sign of life. Derived: three times `wire.WORKING_EVERY_S`."""

CONNECTIONS_PER_PEER = 16
"""Requests to one peer at once: with an extent each they fill a 100 Gbit/s link."""

IDLE_S = 30.0
"""How long a connection is kept unused. Derived: half of what a server allows (`Limits.idle_s`)."""

RESOLVERS = 4
"""Threads that may hang in a resolver, apart from the daemon's others; a request that gets none in time fails."""

ANY_PACE = Pace()
"""For a caller that does not know its origin."""

MAX_IDLE = 256
"""Connections kept unused, to all peers: a thousand peers would use up the descriptors."""


class Deadlines(NamedTuple):
    """In seconds: for the first sign of life, for the head of the reply while more of them come, for everything."""

    first_s: float
    working_s: float
    total_s: float


class _Stale(Exception):
    """A kept connection was closed before a byte of the reply."""


class _Peer:
    """Connections to one address."""

    def __init__(self) -> None:
        self.room = trio.Semaphore(CONNECTIONS_PER_PEER)
        self.where: list[str] = []  # its IP addresses; none before the lookup, and after a failure
        self.idle: deque[tuple[float, Connection]] = deque()  # by time of last use

    async def enter(self) -> None:
        """Wait for room; if there is some, without a checkpoint."""
        try:
            self.room.acquire_nowait()
        except trio.WouldBlock:
            await self.room.acquire()

    def in_use(self) -> bool:
        return bool(self.idle) or self.room.value < CONNECTIONS_PER_PEER

    def take(self, now: float) -> Connection | None:
        """The connection used last, if it is still usable."""
        while self.idle:
            since, connection = self.idle.pop()
            if now - since < IDLE_S and connection.quiet():
                return connection
            connection.close()
        return None

    def drop_idle(self) -> None:
        while self.idle:
            self.idle.pop()[1].close()


class Client:
    """Connections to any number of peers. All methods raise only `PeerFailed`, and what a sink raised."""

    def __init__(
        self,
        *,
        signer: Signer | None = None,
        tls: ssl.SSLContext | None = None,
        stats: PeerTable | None = None,
        metrics: Metrics | None = None,
        getaddrinfo: Callable[..., list[Any]] = socket.getaddrinfo,
    ) -> None:
        self._signer = signer
        self._tls = tls
        self._getaddrinfo = getaddrinfo
        self._resolvers = trio.CapacityLimiter(RESOLVERS)
        self._stats = stats or PeerTable()
        self._metrics = metrics or Metrics()
        self._peers: dict[Address, _Peer] = {}
        self._idle_at_most = 0
        self._receiver = Receiver()

    async def read(
        self,
        address: Address,
        request: BlockRequest,
        sink: Sink,
        *,
        deadline_s: float,
        working_s: float = TOTAL_S,
        total_s: float | None = None,
        sink_waits: bool = True,
        pace: Pace = ANY_PACE,
    ) -> float:
        """Deliver all bytes of `request` to `sink.write_block`, in order, a whole and checked block at a time. Returns the
        seconds from the request to the first sign of life, which must come within `deadline_s`. The reply may take
        `working_s`, if the peer keeps sending signs of life; after it, silence may last `SILENCE_S`, and the bytes may come
        as slowly as `pace` allows.

        Once this has returned or raised, the sink is not and will not be called. What the sink raises is raised unchanged.
        With `sink_waits=False` the sink never waits for a disk, and small bodies are written on the trio thread."""
        delivery = Delivery(sink)

        async def receive(connection: Connection, head: Reply, macs: Macs | None) -> None:
            await self._receiver.blocks(
                *(connection, head, request, macs, delivery),
                silence_s=max(SILENCE_S, deadline_s),
                sink_waits=sink_waits,
                pace=pace,
            )

        if total_s is None:
            total_s = TOTAL_S + pace.allowed_s(request.stop - request.start)
        try:
            deadlines = Deadlines(deadline_s, working_s, total_s)
            head_s, _ = await self._ask(address, BLOCKS, request, receive, deadlines)
        except PeerFailed as exc:
            exc.delivered = delivery.bytes
            raise
        finally:
            self._stats.of(str(address)).bytes_in += delivery.bytes
            self._metrics.peer_bytes_in += delivery.bytes
        return head_s

    async def bring(
        self, address: Address, request: BlockRequest, *, deadline_s: float = 2.0, working_s: float = TOTAL_S
    ) -> float:
        """Have the peer fetch the blocks of `request`, for which it may take `working_s`. Returns the seconds to the first
        sign of life."""

        async def receive(connection: Connection, head: Reply, macs: Macs | None) -> None:
            await small_body(connection, head, macs, deadline_s)

        deadlines = Deadlines(deadline_s, working_s, working_s + 2 * deadline_s)
        head_s, _ = await self._ask(address, BRING, request, receive, deadlines)
        return head_s

    async def handshake(self, address: Address, *, deadline_s: float = 2.0) -> Handshake:
        """The handshake of the node at this address."""

        async def receive(connection: Connection, head: Reply, macs: Macs | None) -> Handshake:
            return Handshake.parse(await small_body(connection, head, macs, deadline_s))

        deadlines = Deadlines(deadline_s, 0.0, 2 * deadline_s)
        _, said = await self._ask(address, HANDSHAKE, None, receive, deadlines)
        return said

    async def have(self, address: Address, request: BlockRequest, *, deadline_s: float = 2.0) -> list[bool]:
        """For each block of the request (at most `wire.MAX_HAVE_BLOCKS`, over any extents), whether the peer holds it."""

        async def receive(connection: Connection, head: Reply, macs: Macs | None) -> list[bool]:
            body = await small_body(connection, head, macs, deadline_s)
            return parse_bitmap(body, request.stop_block - request.start_block)

        deadlines = Deadlines(deadline_s, 0.0, 2 * deadline_s)
        _, held = await self._ask(address, HAVE, request, receive, deadlines)
        return held

    def host_of(self, address: Address) -> str:
        """The IP address behind it, as last resolved; its name before that."""
        peer = self._peers.get(address)
        return peer.where[0] if peer is not None and peer.where else address.host

    def forget(self, address: Address) -> None:
        """A member left: close its connections, drop its counters."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.drop_idle()
        self._stats.forget(str(address))
        if self._signer is not None:
            self._signer.forget(str(address))

    def close(self) -> None:
        """Close idle connections. Requests in flight end with their tasks."""
        for peer in self._peers.values():
            peer.drop_idle()
        self._peers.clear()

    async def _ask(
        self,
        address: Address,
        path: str,
        request: BlockRequest | None,
        receive: Receive[T],
        deadlines: Deadlines,
    ) -> tuple[float, T]:
        """(seconds to the first sign of life, result of `receive`) of a reply with status 200."""
        stats = self._stats.of(str(address))
        if request is not None:
            stats.requests += 1
            self._metrics.peer_requests += 1
        peer = self._peers.setdefault(address, _Peer())
        try:
            target = path if request is None else request.target(path)
            with trio.move_on_after(deadlines.total_s):
                await peer.enter()
                try:
                    kept = peer.take(trio.current_time())
                    if kept is not None:
                        try:
                            return await self._exchange(kept, peer, target, receive, deadlines)
                        except _Stale:
                            peer.drop_idle()  # the other idle ones have probably died with it
                    fresh = await self._connect(address, peer, deadlines.first_s)
                    return await self._exchange(fresh, peer, target, receive, deadlines)
                finally:
                    peer.room.release()
            failed = PeerFailed("timeout", f"{address} did not deliver within {deadlines.total_s:g} s")
        except PeerFailed as exc:
            failed = exc
        except Malformed as exc:  # the reply, or a name that is too long for a request
            failed = PeerFailed("refused", f"{address}: {exc}")
        finally:
            if not peer.in_use() and self._peers.get(address) is peer:
                del self._peers[address]
        if request is not None:  # not for a handshake: the node may not have started yet
            stats.failures[failed.kind] += 1
            self._metrics.peer_failures += 1
        raise failed

    async def _exchange(
        self,
        connection: Connection,
        peer: _Peer,
        target: str,
        receive: Receive[T],
        deadlines: Deadlines,
    ) -> tuple[float, T]:
        """Takes over the connection: it is kept when the reply was received to its end, and closed otherwise."""
        address = connection.address
        signed = self._signer.sign("GET", target, str(address)) if self._signer else None
        macs = signed.macs if signed else None
        whole = False
        head: Reply | None = None
        try:
            try:
                steps = connection.ask(target, signed.authorization if signed else None)
                head, head_s = await _head(connection, steps, deadlines)
            except PeerFailed as exc:
                if exc.kind == "reset" and connection.used:
                    raise _Stale from exc
                raise
            stats = self._stats.of(str(address))
            stats.answered += 1
            stats.first_byte_s += head_s
            if head.status == 200:
                result = await receive(connection, head, macs)
                whole = True
                return head_s, result
            text = (await small_body(connection, head, macs, deadlines.first_s)).decode("utf-8", "replace")
            whole = True
            said = "".join(char for char in text if char.isprintable())
            raise PeerFailed(KIND_OF.get(head.status, "refused"), f"{address}: {said[:200] or head.status}")
        finally:
            if whole and head is not None and not head.last:
                connection.used = True
                self._keep(address, peer, connection)
            else:
                connection.close()

    async def _connect(self, address: Address, peer: _Peer, deadline_s: float) -> Connection:
        try:
            with trio.fail_after(CONNECT_S):
                peer.where = peer.where or await self._resolve(address.host)
                sock = await self._reach(address, peer)
        except (OSError, UnicodeError, trio.TooSlowError) as exc:
            peer.where = []  # the name may have another address now
            said = (
                "no answer" if isinstance(exc, trio.TooSlowError) else getattr(exc, "strerror", None) or exc
            )
            raise PeerFailed("connect", f"{address}: {said}") from exc
        plain = socket.socket(fileno=sock.detach())
        plain.setblocking(False)
        connection = Connection(plain, address, self._tls)
        try:
            await drive(connection, connection.shake_hands(), deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _resolve(self, host: str) -> list[str]:
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            ask = partial(self._getaddrinfo, host, None, type=socket.SOCK_STREAM)
        found = await trio.to_thread.run_sync(ask, limiter=self._resolvers, abandon_on_cancel=True)
        return list(dict.fromkeys(str(where[0]) for *_, where in found))

    async def _reach(self, address: Address, peer: _Peer) -> trio.socket.SocketType:
        """A connection to the first of its IP addresses that accepts one; later requests use that address alone."""
        failure = OSError("it has no address")
        for ip in peer.where:
            if self._signer is None and self._tls is None and not is_loopback(ip):
                raise PeerFailed(
                    "refused", f"{address}: without a key or certificates, only this machine is trusted"
                )
            family = trio.socket.AF_INET6 if ":" in ip else trio.socket.AF_INET
            sock = trio.socket.socket(family, trio.socket.SOCK_STREAM)
            try:
                await sock.connect((ip, address.port))
            except OSError as exc:
                sock.close()
                failure = exc
            except BaseException:
                sock.close()
                raise
            else:
                peer.where = [ip]
                return sock
        raise failure

    def _keep(self, address: Address, peer: _Peer, connection: Connection) -> None:
        if self._peers.get(address) is not peer:  # the member has left meanwhile
            connection.close()
            return
        peer.idle.append((trio.current_time(), connection))
        self._idle_at_most += 1  # counted only when it may be too many
        if self._idle_at_most <= MAX_IDLE:
            return
        self._idle_at_most = sum(len(other.idle) for other in self._peers.values())
        if self._idle_at_most > MAX_IDLE:
            self._idle_at_most -= 1
            oldest = min((other for other in self._peers.values() if other.idle), key=lambda p: p.idle[0][0])
            oldest.idle.popleft()[1].close()


async def _head(connection: Connection, steps: Steps[Reply], deadlines: Deadlines) -> tuple[Reply, float]:
    """(head of the reply, seconds to the first sign of life). Each sign of life renews the deadline, up to `working_s`."""
    deadline_s, working_s, _ = deadlines
    begun = trio.current_time()
    first_s: float | None = None
    with trio.move_on_after(deadline_s) as scope:
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                head: Reply = end.value
                return head, trio.current_time() - begun if first_s is None else first_s
            if step != ALIVE:
                await ready(connection, step)
                continue
            now = trio.current_time()
            first_s = now - begun if first_s is None else first_s
            scope.deadline = min(now + max(SILENCE_S, deadline_s), begun + max(working_s, deadline_s))
            await trio.lowlevel.checkpoint()  # a peer could send any number of them
    raise connection.silent()

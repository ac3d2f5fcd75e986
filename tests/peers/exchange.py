"""A server with plan stores of bytes behind it, a peer that follows a script, and sinks: for the tests of the exchange."""

from __future__ import annotations

import functools
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing
import xxhash

from cachefs.base.errors import CachefsError
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId, block_count
from cachefs.peers.auth import Key, Verifier
from cachefs.peers.health import PeerTable
from cachefs.peers.server import Server
from cachefs.peers.wire import VERSION, Address, BlockRequest, Handshake, NotShared, ServedBlock

MIB = 1 << 20
KIB = 1 << 10
KEY = Key(b"thirty-two bytes that both know!")
HANDSHAKE = Handshake("node-1", VERSION, "group", "sources", 1.5)


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            with trio.fail_after(30):
                await test(*args, **kwargs)

        trio.run(main)

    return run


def in_jumping_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """On a clock that jumps when nobody has anything to do. Not with worker threads, of which it does not know."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            with trio.fail_after(3600):
                await test(*args, **kwargs)

        # A threshold, because the kernel may take a moment to carry bytes from one socket to the other.
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.02))

    return run


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - of another thread or the kernel, which set no events
        await trio.sleep(0.001)


class PlanStore:
    """Objects in files of memory. What it is told to raise it raises (`failure_in_body`: when it has to wait);
    blocks from `held_back` on come when `more` is set."""

    def __init__(self, *, in_ram: bool = True) -> None:
        self.in_ram = in_ram
        self.failure: CachefsError | None = None
        self.failure_in_body: CachefsError | None = None
        self.held_back: int | None = None
        self.more = trio.Event()
        self.waited_for = trio.Event()
        self.shift = 0  # added to each checksum
        self.opened = 0
        self.closed = 0
        self.cancelled = 0
        self.files: dict[ObjectId, tuple[int, list[int]]] = {}
        self.block_size = MIB

    def put(self, data: bytes, key: str = "key") -> ObjectId:
        version = ObjectId("s3://bucket", key, '"etag"', len(data))
        fd = os.memfd_create("blocks")
        os.write(fd, data)
        size = self.block_size
        sums = [xxhash.xxh3_64_intdigest(data[at : at + size]) for at in range(0, len(data), size)]
        self.files[version] = fd, sums
        return version

    async def open(self, request: BlockRequest, peer: str, *, background: bool = False) -> _Served:
        await trio.lowlevel.checkpoint()
        if self.failure is not None:
            raise self.failure
        if request.object not in self.files:
            raise NotShared("not here")
        self.opened += 1
        return _Served(self, request)

    async def have(self, request: BlockRequest) -> list[bool]:
        if request.object not in self.files:
            raise NotShared("not here")
        return [block % 3 == 0 for block in range(request.start_block, request.stop_block)]


class _Served:
    def __init__(self, plan_store: PlanStore, request: BlockRequest) -> None:
        self._plan_store = plan_store
        self._request, self._next = request, request.start_block

    def take(self) -> ServedBlock | None:
        plan_store, block = self._plan_store, self._next
        held = plan_store.held_back
        if held is not None and block >= held and not plan_store.more.is_set():
            return None
        self._next += 1
        fd, sums = plan_store.files[self._request.object]
        start, length = block * self._request.block_size, self._request.length(block)
        return ServedBlock(fd, start, length, plan_store.in_ram, sums[block] ^ plan_store.shift)

    async def wait(self) -> None:
        self._plan_store.waited_for.set()
        if self._plan_store.failure_in_body is not None:
            await trio.lowlevel.checkpoint()
            raise self._plan_store.failure_in_body
        try:
            await self._plan_store.more.wait()
        except trio.Cancelled:
            self._plan_store.cancelled += 1
            raise

    def close(self) -> None:
        self._plan_store.closed += 1


def asking(version: ObjectId, start: int = 0, stop: int | None = None, block_size: int = MIB) -> BlockRequest:
    return BlockRequest(version, start, stop or block_count(version.size, block_size), block_size)


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write_block(self, data: memoryview, checksum: int) -> None:
        self.parts.append(bytes(data))

    @property
    def data(self) -> bytes:
        return b"".join(self.parts)


@asynccontextmanager
async def serving(
    plan_store: PlanStore,
    *,
    verifier: Verifier | None = None,
    tls: ssl.SSLContext | None = None,
    names: frozenset[str] = frozenset(),
    send_buffer: int = 0,
    stats: PeerTable | None = None,
) -> AsyncIterator[tuple[Address, Metrics]]:
    """A server on a port of its own, and what it counts. No task of it is left, and every answer was closed."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    if send_buffer:
        listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    counted = Metrics()
    server = Server(
        plan_store,
        lambda host: HANDSHAKE,
        block_size=plan_store.block_size,
        verifier=verifier,
        tls=tls,
        stats=stats or PeerTable(),
        metrics=counted,
    )
    server.names = names
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(server.serve, [listener]))
        yield Address("127.0.0.1", listener.socket.getsockname()[1]), counted
        nursery.cancel_scope.cancel()
    assert plan_store.opened == plan_store.closed


@asynccontextmanager
async def scripted(script: Callable[[trio.SocketStream, bytes], Awaitable[None]]) -> AsyncIterator[Address]:
    """A peer that reads one head of a request and then does what the script says, for each connection."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def answer(stream: trio.SocketStream) -> None:
        head = b""
        try:
            async with stream:
                while not head.endswith(b"\r\n\r\n"):
                    received = await stream.receive_some()
                    if not received:
                        return
                    head += received
                await script(stream, head)
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(trio.serve_listeners, answer, [listener]))
        yield Address("127.0.0.1", listener.socket.getsockname()[1])
        nursery.cancel_scope.cancel()

"""The transfer from one daemon's cache to another, without tiers: two processes on this machine, over loopback.

The server's bytes lie in memory. The client checks the bytes and drops them; what a tier costs is measured elsewhere.
For comparison, the cheapest programs move the same bytes: for extents a loop of `sendfile` and `recv_into` for each
connection, for small objects the plain keep-alive GETs of Python's own HTTP client from such a loop. The loopback has no
network's limits, so the processors, which both sides share, decide the rates.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import trio
import xxhash

from bench.harness import Result, interleave, scenario
from bench.workspace import Workspace
from cachefs.base.names import ObjectId
from cachefs.peers.auth import Key, Signer, Verifier
from cachefs.peers.client import Client
from cachefs.peers.server import Server
from cachefs.peers.wire import VERSION, Address, BlockRequest, Handshake, ServedBlock

MIB = 1 << 20
AT_ONCE = 4
KEY = Key(b"known to both of the processes")
PLAIN, HTTP, SOCKETS, OWN, KEYED = "sendfile loop", "http.client", "sockets", "cachefs", "cachefs, keyed"


# -- the serving process ---------------------------------------------------------------------------


class _MemoryShares:
    """`cachefs.peers.wire.Shares` with one object in memory, of which it has all blocks."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("blocks")
        self.sums = []
        for start in range(0, size, MIB):
            block = os.urandom(min(MIB, size - start))
            os.write(self.fd, block)
            self.sums.append(xxhash.xxh3_64_intdigest(block))

    async def open(self, request: BlockRequest, peer: str, *, background: bool = False) -> _Served:
        return _Served(self, request)

    async def have(self, request: BlockRequest) -> list[bool]:
        return [True] * (request.stop_block - request.start_block)


class _Served:
    def __init__(self, shares: _MemoryShares, request: BlockRequest) -> None:
        self._shares, self._request, self._next = shares, request, request.start_block

    def take(self) -> ServedBlock:
        block = self._next
        self._next += 1
        length = self._request.length(block)
        return ServedBlock(self._shares.fd, block * MIB, length, True, self._shares.sums[block])

    async def wait(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def _serve(size: int, keyed: bool) -> None:
    async def main() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        print(listener.socket.getsockname()[1], flush=True)
        handshake = Handshake("bench", VERSION, "", "", 1.0)
        verifier = Verifier(KEY) if keyed else None
        await Server(_MemoryShares(size), lambda _: handshake, block_size=MIB, verifier=verifier).serve(
            [listener]
        )

    trio.run(main)


def _serve_plainly(size: int, host: str) -> None:
    """A server with a thread for each connection; it answers all requests with the object."""
    shares = _MemoryShares(size)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size

    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(64 << 10):
            connection.send(head, socket.MSG_MORE)
            offset = 0
            while offset < size:
                offset += os.sendfile(connection.fileno(), shares.fd, offset, min(MIB, size - offset))

    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()


@contextmanager
def server(kind: str, size: int, host: str = "127.0.0.1") -> Iterator[Address]:
    """A server process of a kind ("plain", "own" or "keyed") with an object of that size; only a plain one has its own
    address."""
    command = [sys.executable, "-m", "bench.peers", kind, str(size), host]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
    ) as process:
        try:
            assert process.stdout is not None
            yield Address(host, int(process.stdout.readline()))
        finally:
            process.kill()


# -- the asking process ----------------------------------------------------------------------------


class _Dropped:
    def write_block(self, data: memoryview, checksum: int) -> None:
        pass


def _ours(address: Address, size: int, count: int, keyed: bool) -> float:
    """Objects a second."""

    async def main() -> float:
        client = Client(signer=Signer(KEY) if keyed else None)
        version = ObjectId("s3://bucket", "data/train/0001.tar", '"0123456789abcdef"', size)
        request = BlockRequest(version, 0, -(-size // MIB), MIB)

        async def ask(times: int) -> None:
            for _ in range(times):
                await client.read(address, request, _Dropped(), deadline_s=5, sink_waits=False)

        await ask(2)
        begun = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(ask, count // AT_ONCE)
        took = time.perf_counter() - begun
        client.close()
        return count // AT_ONCE * AT_ONCE / took

    return trio.run(main)


def _threads(count: int, work: Callable[[int], None]) -> float:
    """Objects a second, when each of `AT_ONCE` threads fetches a part of them."""
    threads = [threading.Thread(target=work, args=(count // AT_ONCE,)) for _ in range(AT_ONCE)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count // AT_ONCE * AT_ONCE / (time.perf_counter() - begun)


def over_sockets(address: Address, size: int, count: int, keep: Path | None = None) -> float:
    """Objects a second from a plain server. `keep` is a directory: each object is written to a file there, and read once."""

    def fetch(times: int) -> None:
        view = memoryview(bytearray(MIB))
        kept = [_file_in(keep, size) for _ in range(times)] if keep else []
        with socket.create_connection(address) as connection:
            for number in range(times):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                got = connection.recv_into(view)
                got -= bytes(view[:200]).index(b"\r\n\r\n") + 4
                while got < size:
                    received = connection.recv_into(view)
                    if kept:
                        os.pwrite(kept[number], view[:received], got)
                    got += received
                if kept:
                    while os.readv(kept[number], [view]):
                        pass
        for fd in kept:
            os.close(fd)

    return _threads(count, fetch)


def _file_in(place: Path, size: int) -> int:
    fd = os.open(place, os.O_TMPFILE | os.O_RDWR)
    os.truncate(fd, size)  # as a tier does: so its pages can be huge
    return fd


def over_http(address: Address, size: int, count: int) -> float:
    """Objects a second from a plain server, with Python's own client."""

    def fetch(times: int) -> None:
        connection = http.client.HTTPConnection(*address)
        for _ in range(times):
            connection.request("GET", "/")
            assert len(connection.getresponse().read()) == size
        connection.close()

    return _threads(count, fetch)


@scenario("peer-wire", rounds=7)
def peer_wire(work: Workspace, rounds: int) -> Result:
    """Extents and small objects from another daemon on this machine."""
    result = Result()
    extents, small = (64, 2000) if work.scale.drops else (8, 40)
    with ExitStack() as stack:
        for size, count, what in (
            (16 * MIB, extents, "extents of 16 MiB"),
            (100_000, small, "objects of 100 KB"),
        ):
            plain = stack.enter_context(server("plain", size))
            own = stack.enter_context(server("own", size))
            keyed = stack.enter_context(server("keyed", size))
            large = size > MIB
            contenders: dict[str, Callable[[], float]] = {
                PLAIN if large else SOCKETS: lambda p=plain, s=size, n=count: over_sockets(p, s, n),  # type: ignore[misc]
                OWN: lambda p=own, s=size, n=count: _ours(p, s, n, False),  # type: ignore[misc]
                KEYED: lambda p=keyed, s=size, n=count: _ours(p, s, n, True),  # type: ignore[misc]
            }
            if not large:
                contenders[HTTP] = lambda p=plain, s=size, n=count: over_http(p, s, n)  # type: ignore[misc]
            series = interleave(rounds, contenders, result, what=what, unit="1/s")
            base, target = (PLAIN, 0.8) if large else (HTTP, 0.6)
            result.demand(f"{what}, {AT_ONCE} at once / {base}", series.ratio(OWN, base), "≥", target)
            result.note(f"{what}: with a key / without {series.ratio(KEYED, OWN):.2f}")
    return result


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        _serve_plainly(int(sys.argv[2]), sys.argv[3])
    else:
        _serve(int(sys.argv[2]), sys.argv[1] == "keyed")

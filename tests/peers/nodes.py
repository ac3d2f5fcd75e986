"""Several nodes in one trio program: each with a store, a ladder, a server on loopback and a client, in front of one
scripted origin. Membership is told by the test."""

from __future__ import annotations

import functools
import random
import shutil
import warnings
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.fetch import Fetcher
from cachefs.fetch.serving import Serving
from cachefs.fetch.upstream import Upstream
from cachefs.peers.client import Client
from cachefs.peers.cluster import Cluster
from cachefs.peers.health import PeerTable
from cachefs.peers.membership import Membership, Sighting
from cachefs.peers.server import Server
from cachefs.peers.wire import VERSION, Address, Handshake
from cachefs.store import open_store
from tests.fetch.scripted import SOURCE, ScriptedOrigin
from tests.store.lab import BLOCK, MIB, Lab, until

SIZES: dict[str, Any] = {"ssd": 64 * MIB, "ram": 0}


class Told:
    """A source that is never polled: `Nodes.introduce` reports the members."""

    trouble = ""

    async def present(self) -> None:
        return None

    def handshake_requested(self, host: str) -> None: ...

    async def leave(self) -> None: ...


class Node(Lab):
    """A `Lab` with neighbours."""

    cluster: Cluster
    client: Client
    address: Address
    handshake: Handshake
    serving: Serving

    def start(self, nursery: trio.Nursery, listener: trio.SocketListener, server: Server) -> None:
        self._nursery, self._listener, self._server = nursery, listener, server
        self._scope = trio.CancelScope()

    async def serve(self) -> None:
        async def run() -> None:
            with self._scope:
                await self._server.serve([self._listener])

        self._nursery.start_soon(run)

    def die(self) -> None:
        """Its socket closes, and so do all connections to it."""
        self._scope.cancel()

    def hang(self) -> None:
        """It takes requests, and says nothing."""

        async def open_never(*_: object, **__: object) -> Any:
            await trio.sleep_forever()

        self.serving.open = open_never  # type: ignore[method-assign]

    def owns(self, object_id: ObjectId, extent: int = 0) -> bool:
        return self.cluster.keeps(object_id.digest, extent)


class Nodes(list[Node]):
    origin: ScriptedOrigin

    def owner(self, object_id: ObjectId, extent: int = 0) -> Node:
        (name,) = self[0].cluster.membership.ring.owners(object_id.digest, extent)
        return next(node for node in self if node.handshake.node == name)

    def others(self, object_id: ObjectId, extent: int = 0) -> list[Node]:
        owner = self.owner(object_id, extent)
        return [node for node in self if node is not owner]

    def put_owned_by(self, node: Node, key: str, data: bytes) -> ObjectId:
        """An object whose first extent this node owns."""
        for number in range(1000):
            object_id = self.origin.put(f"{key}{number}", data)
            if self.owner(object_id) is node:
                return object_id
            del self.origin.objects[object_id.key]
        raise AssertionError("nobody owns anything")

    def introduce(self, to: Iterable[Node] | None = None, members: Iterable[Node] | None = None) -> None:
        """Tell nodes (all) who is there (all)."""
        sightings = [Sighting(node.address, node.handshake) for node in members or self]
        for node in to or self:
            node.cluster.membership._report(sightings)

    async def quiet(self) -> None:
        await until(lambda: not any(node.fetcher.in_flight_fetches for node in self), 30.0)

    def check_accounts(self) -> None:
        for node in self:
            node.check_accounts()


@asynccontextmanager
async def nodes(
    place: Path,
    count: int = 3,
    *,
    replicas: int = 1,
    sizes: dict[str, Any] = SIZES,
    block: int = BLOCK,
    **more: Any,
) -> AsyncIterator[Nodes]:
    """They know each other. `more`: of each `Fetcher` (readahead, part_bytes), the store's loop (background), how long
    readers wait (deadline_s)."""
    origin = ScriptedOrigin()
    origin.source, origin.prefix = SOURCE, ""  # type: ignore[attr-defined]
    found = Nodes()
    found.origin = origin
    try:
        async with trio.open_nursery() as nursery:
            for number in range(count):
                found.append(await _node(nursery, place, number, origin, replicas, sizes, block, **more))
            found.introduce()
            try:
                yield found
            finally:
                nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            for node in found:
                node.client.close()
                await node.aclose()
                for path in node.opened.temporary:
                    shutil.rmtree(path, ignore_errors=True)


async def _node(
    nursery: trio.Nursery,
    place: Path,
    number: int,
    origin: ScriptedOrigin,
    replicas: int,
    sizes: dict[str, Any],
    block: int,
    *,
    readahead: int = 0,
    part_bytes: int = 8 * MIB,
    background: bool = False,
    deadline_s: float = 90.0,
) -> Node:
    metrics, stats, rng = Metrics(), PeerTable(), random.Random(number)
    opened = open_store(
        place.with_name(f"cache{number}"), sizes["ssd"], sizes["ram"], 0, block, "first", metrics, "auto"
    )
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = Address("127.0.0.1", listener.socket.getsockname()[1])
    handshake = Handshake(f"node-{number}", VERSION, "group", "sources", 1.0)
    client = Client(stats=stats, metrics=metrics)
    membership = Membership(Told(), handshake)
    cluster = Cluster(
        membership, client, stats, rng, block_size=block, replicas=replicas, deadline_s=deadline_s
    )
    upstream = Upstream(metrics, block, cluster)
    fetcher = Fetcher(
        opened.store, nursery, metrics, max_readahead=readahead, part_bytes=part_bytes, upstream=upstream
    )
    node = Node(opened, fetcher, origin, metrics)
    node.cluster, node.client, node.address, node.handshake = cluster, client, address, handshake
    node.serving = Serving(opened.store, fetcher, cluster, [origin])  # type: ignore[list-item]
    server = Server(node.serving, lambda host: handshake, block_size=block, stats=stats, metrics=metrics)
    node.start(nursery, listener, server)
    await node.serve()
    if background:
        nursery.start_soon(opened.store.run)
    return node


def in_time(rate: float) -> Any:
    """An async test whose clock runs `rate` times as fast as the wall's: for deadlines, with worker threads."""

    def wrap(test: Any) -> Any:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            async def main() -> None:
                with trio.fail_after(30 * rate):
                    await test(*args, **kwargs)

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", trio.TrioDeprecationWarning)
                trio.run(main, clock=trio.testing.MockClock(rate=rate), strict_exception_groups=False)

        return pytest.mark.alone(run)

    return wrap

"""The rung of the ladder between this node's store and the origin: the node that owns the extent, or its heir.

A peer delivers whole, checked blocks into the same fill that the origin would write to, so whatever goes wrong with it, the
next one, and at last the origin, goes on where it stopped. A reply that breaks off after some blocks is asked for anew: an
owner that has to wait for the store itself breaks off rather than be silent.

Demand goes before what nobody waits for here, too: to each peer there is a gate like the one in front of the store.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import trio

from cachefs.errors import CachefsError, OriginFailed
from cachefs.metrics import Metrics
from cachefs.names import BLOCKS_PER_EXTENT, ObjectId
from cachefs.origin.gate import Gate, Turn
from cachefs.origin.limiter import Concurrency
from cachefs.peers.client import CONNECTIONS_PER_PEER
from cachefs.peers.cluster import Asked, Cluster
from cachefs.peers.protocol import PeerFailed
from cachefs.store import Fill

log = logging.getLogger(__name__)

ASKED_AT_ONCE = 8
"""Extents of one file that owners are asked to bring. As `fetcher.PARTS_AT_ONCE`."""


class Upstream:
    """The peers as the ladder sees them; without a cluster, nobody. On the trio thread only."""

    def __init__(self, metrics: Metrics, cluster: Cluster | None = None) -> None:
        self.cluster = cluster
        self._metrics = metrics
        self._gates: dict[str, Gate] = {}

    def keeps(self, object_id: ObjectId, block: int) -> bool:
        """Whether this node keeps what it has of the block's extent, rather than another one."""
        return self.cluster is None or self.cluster.keeps(object_id.digest, block // BLOCKS_PER_EXTENT)

    def asks(self, object_id: ObjectId, block: int) -> bool:
        """Whether another node is the owner of the block's extent."""
        extent = block // BLOCKS_PER_EXTENT
        return self.cluster is not None and self.cluster.owner(object_id.digest, extent) is not None

    async def read(self, object_id: ObjectId, fill: Fill, turn: Turn) -> None:
        """As much of the fill as peers deliver; what is missing then is the origin's. Raises what the fill raises."""
        if self.cluster is None:
            return
        asked_any = False
        for asked in self.cluster.candidates(object_id.digest, fill.start_block // BLOCKS_PER_EXTENT):
            asked_any = True
            while await self._some(asked, object_id, fill, turn):
                if fill.landed == fill.stop:
                    return
        self._asked(object_id, fill, "store")
        if asked_any:
            self._metrics.peer_misses += fill.stop_block - fill.landed // fill.block_size

    async def _some(self, asked: Asked, object_id: ObjectId, fill: Fill, turn: Turn) -> bool:
        """Ask once. Whether to go on with this one: it delivered something and did not fail."""
        assert self.cluster is not None
        name, before = asked.member.name, fill.landed
        since = trio.current_time()
        patience_s = math.inf if turn.background else self.cluster.patience_s
        async with self._place(name, turn, patience_s) as admitted:
            if not admitted or self.cluster.failed_since(asked, since):
                return False  # the second: others have learnt that while this one waited
            try:
                await self.cluster.read(asked, object_id, before, fill.stop, fill, sink_waits=fill.waits)
            except PeerFailed as exc:
                self._asked(object_id, fill, f"{name}: {exc.kind}")
                log.debug("a peer did not deliver %s from %d on: %s", object_id.key, before, exc)
                return exc.kind == "reset" and exc.delivered > 0
            else:
                self._asked(object_id, fill, name)
                return True
            finally:
                self._metrics.peer_hits += -(-(fill.landed - before) // fill.block_size)

    def _asked(self, object_id: ObjectId, fill: Fill, way: str) -> None:
        self._metrics.ledger.misses.asked(object_id.digest, fill.start_block // BLOCKS_PER_EXTENT, way)

    async def bring(self, object_id: ObjectId, parts: Iterable[tuple[int, int]], extent_bytes: int) -> None:
        """Have the owners of these parts, [start, stop) of one extent each, fetch and keep them. Raises `OriginFailed` when
        one does not."""
        cluster = self.cluster
        assert cluster is not None
        waiting = iter(parts)
        failures: list[CachefsError] = []

        async def ask() -> None:
            for start, stop in waiting:
                member = cluster.owner(object_id.digest, start // extent_bytes)
                if member is None or failures:
                    continue
                turn = Turn(background=True)
                try:
                    async with self._place(member.name, turn):
                        await cluster.bring(member, object_id, start, stop)
                except PeerFailed as exc:
                    failures.append(exc)

        async with trio.open_nursery() as nursery:
            for _ in range(ASKED_AT_ONCE):
                nursery.start_soon(ask)
        if failures:
            raise OriginFailed(f"its owner does not bring it: {failures[0]}") from failures[0]

    @asynccontextmanager
    async def _place(self, name: str, turn: Turn, patience_s: float = math.inf) -> AsyncIterator[bool]:
        """Whether there was one in time; it is given back at the end."""
        gate = self._gates.get(name)
        if gate is None:
            gate = self._gates[name] = Gate(Concurrency(CONNECTIONS_PER_PEER))
        with trio.move_on_after(patience_s) as waiting:
            await gate.enter(turn)
        if waiting.cancelled_caught:
            yield False
            return
        try:
            yield True
        finally:
            gate.leave(turn)
            if not gate.in_flight and not len(gate.line):
                self._gates.pop(name, None)

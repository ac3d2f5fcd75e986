"""Reading from peers: from the node that owns the extent, or its successor, before the origin is asked.

A peer delivers whole, verified blocks into the same cache write that the origin writes to. If it fails, the next peer, and
at last the origin, goes on where it stopped. If a reply breaks off after some blocks, the same peer is asked again, because
an owner that has to wait for the origin breaks its reply off. Each peer has an admission gate like the origin's."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import NamedTuple, Protocol

import trio

from cachefs.base.errors import CachefsError
from cachefs.base.metrics import Metrics
from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId
from cachefs.base.tasks import contained, in_thread
from cachefs.origin import Origin, each
from cachefs.origin.attempts import Concurrency, Gate, Ticket
from cachefs.origin.protocol import MD5_ETAG
from cachefs.peers.client import CONNECTIONS_PER_PEER
from cachefs.peers.cluster import Candidate, Cluster
from cachefs.peers.wire import PeerFailed
from cachefs.store import CachedObject, CacheWrite, Store

log = logging.getLogger(__name__)

EXTENTS_AT_ONCE = 8
"""Most extents of one file that owners are asked to fetch at a time. As `fetcher.PARTS_AT_ONCE`."""

WHOLE_BYTES = 4 << 20
"""Objects up to this size are fetched in one GET, however little of them is read, because a round trip costs more than the
bytes (at 20 ms and 200 MB/s they cost the same at 4 MB). Derived."""

FetchHere = Callable[[int, int], Awaitable[None]]
"""(start, stop): fetches these bytes of a file on this node."""


class KeptRange(NamedTuple):
    """The bytes [start, stop) of a file: one or more extents, all of which this node keeps, or none."""

    start: int
    stop: int
    kept: bool


class Upstream:
    """Reads from peers; without a cluster there are none. On the trio thread only."""

    def __init__(self, metrics: Metrics, block_size: int, cluster: Cluster | None = None) -> None:
        self.cluster = cluster
        self._block_size = block_size
        self._extent_bytes = BLOCKS_PER_EXTENT * block_size
        self.comparing: Comparing | None = None
        self._metrics = metrics
        self._gates: dict[str, Gate] = {}

    def keeps(self, object_id: ObjectId, block: int) -> bool:
        """True if this node keeps the block's extent, as an owner or because there is no cluster."""
        return self.cluster is None or self.cluster.keeps(object_id.digest, block // BLOCKS_PER_EXTENT)

    def is_remote_owned(self, object_id: ObjectId, block: int) -> bool:
        """True if another node owns the block's extent."""
        extent = block // BLOCKS_PER_EXTENT
        return self.cluster is not None and self.cluster.owner(object_id.digest, extent) is not None

    async def read(
        self, object_id: ObjectId, origin: Origin, cache_write: CacheWrite, ticket: Ticket
    ) -> None:
        """Have peers deliver as much of the cache write as they can. Raises what the cache write raises."""
        assert self.cluster is not None
        asked_any, extent = False, cache_write.start_block // BLOCKS_PER_EXTENT
        for candidate in self.cluster.candidates(object_id.digest, extent):
            asked_any = True
            more = True
            while more:
                before = cache_write.written
                more = await self._read_once(candidate, object_id, cache_write, ticket, origin.transfer_rate)
                if self.comparing is not None:
                    await self.comparing.received(candidate, origin, object_id, cache_write, before)
                if cache_write.written == cache_write.stop:
                    # The request may have failed all the same: its deadline may pass while the last block is written.
                    return
        self._note_asked(object_id, cache_write, "origin")
        if asked_any:
            written_blocks = cache_write.written // cache_write.block_size
            self._metrics.peer_misses += cache_write.stop_block - written_blocks

    async def _read_once(
        self,
        candidate: Candidate,
        object_id: ObjectId,
        cache_write: CacheWrite,
        ticket: Ticket,
        origin_rate: float,
    ) -> bool:
        """Send one request to a peer. True if it did not fail, or its reply broke off after some blocks: ask it again."""
        assert self.cluster is not None
        name, before = candidate.member.name, cache_write.written
        since = trio.current_time()
        patience_s = math.inf if ticket.background else self.cluster.patience_s
        async with self._admitted(name, ticket, patience_s) as admitted:
            if not admitted or self.cluster.failed_since(candidate, since):
                return False  # no place in time, or the peer failed for another fetch during the wait
            try:
                await self.cluster.read(
                    candidate,
                    object_id,
                    before,
                    cache_write.stop,
                    cache_write,
                    sink_waits=cache_write.waits,
                    origin_rate=origin_rate,
                    others=sum(gate.in_flight for other, gate in self._gates.items() if other != name),
                )
            except PeerFailed as exc:
                self._note_asked(object_id, cache_write, f"{candidate.member}: {exc.kind}")
                log.debug("a peer did not deliver %s from %d on: %s", object_id.key, before, exc)
                return exc.kind == "reset" and exc.delivered > 0
            else:
                self._note_asked(object_id, cache_write, str(candidate.member))
                return True
            finally:
                self._metrics.peer_hits += -(-(cache_write.written - before) // cache_write.block_size)

    def _note_asked(self, object_id: ObjectId, cache_write: CacheWrite, source: str) -> None:
        extent = cache_write.start_block // BLOCKS_PER_EXTENT
        self._metrics.ledger.misses.asked(object_id.digest, extent, source)

    def kept_here(self, object_id: ObjectId, start: int, stop: int) -> Iterator[KeptRange]:
        """Cut [start, stop) at extents into pieces that this node keeps or does not keep."""
        while start < stop:
            kept, end = self.keeps(object_id, start // self._block_size), start
            while end < stop and self.keeps(object_id, end // self._block_size) == kept:
                end = min(stop, (end // self._extent_bytes + 1) * self._extent_bytes)
            yield KeptRange(start, end, kept)
            start = end

    async def prefetch(self, object_id: ObjectId, start: int, stop: int, fetch_here: FetchHere) -> int:
        """Have the nodes that keep the extents of [start, stop) fetch them: for each extent as many nodes as there are
        replicas, in the ring's order, without those that fail. `fetch_here` is awaited for extents that this node keeps, and
        for those that no node fetches. Returns the bytes that only other nodes fetched. Raises what `fetch_here` raises."""
        extent_bytes = self._extent_bytes
        cuts = [start, *range((start // extent_bytes + 1) * extent_bytes, stop, extent_bytes), stop]
        cluster, waiting = self.cluster, itertools.pairwise(cuts)
        if cluster is None:
            for start, stop in waiting:
                await fetch_here(start, stop)
            return 0
        elsewhere = 0

        async def fetch(extent: tuple[int, int]) -> None:
            nonlocal elsewhere
            fetched_here = await self._fetch_extent(cluster, object_id, *extent, fetch_here)
            elsewhere += 0 if fetched_here else extent[1] - extent[0]

        await each(fetch, waiting, EXTENTS_AT_ONCE, abort=False)
        return elsewhere

    async def _fetch_extent(
        self, cluster: Cluster, object_id: ObjectId, start: int, stop: int, fetch_here: FetchHere
    ) -> bool:
        """Have one extent fetched on its nodes. True if this node has fetched it, too."""
        copies, fetched_here = 0, False
        for candidate in cluster.keepers(object_id.digest, start // self._extent_bytes):
            name = candidate.member.name
            if name in cluster.membership.own:
                await fetch_here(start, stop)
                fetched_here = True
            else:
                try:
                    async with self._admitted(name, Ticket(background=True)):
                        await cluster.prefetch(candidate, object_id, start, stop)
                except PeerFailed as exc:
                    log.debug("a peer does not fetch %s from %d on: %s", object_id.key, start, exc)
                    continue
            copies += 1
            if copies == cluster.replicas:
                break
        if not copies:
            await fetch_here(start, stop)
        return fetched_here or not copies

    async def probe(self) -> list[str]:
        """Probe every member. Returns the addresses of those that do not answer."""
        return await self.cluster.probe() if self.cluster is not None else []

    @asynccontextmanager
    async def _admitted(self, name: str, ticket: Ticket, patience_s: float = math.inf) -> AsyncIterator[bool]:
        """Enter the peer's gate within `patience_s`. Yields False if there was no place in time."""
        gate = self._gates.get(name)
        if gate is None:
            gate = self._gates[name] = Gate(Concurrency(CONNECTIONS_PER_PEER))
        with trio.move_on_after(patience_s) as waiting:
            await gate.enter(ticket)
        if waiting.cancelled_caught:
            yield False
            return
        try:
            yield True
        finally:
            gate.leave(ticket)
            if not gate.in_flight and not len(gate.queue):
                self._gates.pop(name, None)


# Comparing what peers sent with the origin: a sample, in the background, within a budget.
#
# A node with the cluster's key signs all bytes that it sends, right or wrong. Two samples find a node that sends wrong
# bytes, because of broken memory or an intruder:
#
# - Of objects up to `WHOLE_BYTES` that came whole from a peer and whose etag is an MD5, one in `HASHED_SHARE` is hashed.
#   This costs no request.
# - Of all other blocks, about one in `SHARE` is read from the origin, too.
#
# If the origin returns other bytes twice, the peer is not asked again until it or this node restarts, and the cached blocks
# of that object are dropped. Blocks of other objects that it sent, and that were not compared, stay.

SHARE = 256
"""Of the bytes that come from peers, one part in so many is read from the origin, too. Derived: four nodes that read a whole
dataset then read at most 1.004 times its bytes from the origin."""

HASHED_SHARE = 8
"""Of these objects, one in so many is hashed. Guessed: hashing takes as long as receiving the bytes."""


class Sampler:
    """Decides which blocks to compare. It draws random numbers, so that a peer cannot predict the samples."""

    def __init__(self, block_size: int, share: int = SHARE, rng: random.Random | None = None) -> None:
        self.rng = rng or random.SystemRandom()
        self._share = share
        self._bytes_to_go = self.rng.uniform(1.0, 1.25) * share * block_size  # until the next sample

    def take(self, start: int, stop: int, block_size: int) -> tuple[int, int] | None:
        """(offset, length) of the block to compare, among the bytes [start, stop) that have just come; None for none."""
        self._bytes_to_go -= stop - start
        if self._bytes_to_go > 0 or stop <= start:
            return None
        offset = self.rng.randrange(start, stop, block_size)
        length = min(block_size, stop - offset)
        self._bytes_to_go = self.rng.uniform(0.85, 1.25) * self._share * length
        return offset, length


class Transfer(Protocol):
    """A fetch in flight."""

    async def ended(self) -> None:
        """Return when it is over."""


@dataclass(eq=False)
class Comparing:
    """Compares samples of what peers deliver with the origin, one at a time. On the trio thread only. `on_lie` is called
    with an object of which a peer sent wrong bytes."""

    _store: Store
    _transfers_of: Callable[[CachedObject], Mapping[int, Transfer]]
    _cluster: Cluster
    _nursery: trio.Nursery
    _metrics: Metrics
    on_lie: Callable[[Origin, ObjectId], Awaitable[object]] | None = None
    _busy: bool = False
    _not_md5_sources: set[str] = field(default_factory=set)  # whose etags look like an MD5 but are none

    def __post_init__(self) -> None:
        self.sampler = Sampler(self._store.block_size)

    async def received(
        self, candidate: Candidate, origin: Origin, object_id: ObjectId, cache_write: CacheWrite, start: int
    ) -> None:
        """Decide on a sample of the bytes [start, cache_write.written) that a peer has delivered. A task compares it."""
        wanted = self.sampler.take(start, cache_write.written, cache_write.block_size)
        md5 = ""
        if start == 0 and cache_write.written == object_id.size <= WHOLE_BYTES:
            found = MD5_ETAG.fullmatch(object_id.etag) if origin.source not in self._not_md5_sources else None
            if found and not self.sampler.rng.randrange(HASHED_SHARE):
                wanted, md5 = (0, cache_write.written), found[1]
        if wanted is None or self._busy:
            return
        self._busy = True
        try:
            data = await in_thread(partial(cache_write.peek, *wanted))
        except BaseException as exc:
            self._busy = False
            if isinstance(exc, OSError):
                return  # the tier reports its own errors, or no thread can be started
            raise
        compare = partial(self._compare, candidate, origin, object_id, wanted[0], data, md5)
        contained(self._nursery, "comparing a peer's bytes with the origin", compare)

    async def _compare(
        self, candidate: Candidate, origin: Origin, object_id: ObjectId, offset: int, data: bytes, md5: str
    ) -> None:
        try:
            self._metrics.peer_compared += 1
            if md5 and await in_thread(partial(_md5, data)) == md5:
                return
            real = await self._read(origin, object_id, offset, len(data))
            if real == data:
                if md5:
                    self._not_md5_sources.add(origin.source)
                    log.info("%s: its etags are no MD5, and say nothing of the bytes", origin.source)
            elif real == await self._read(origin, object_id, offset, len(data)):
                await self._drop_wrong(candidate, origin, object_id, offset)
        except (CachefsError, OSError) as exc:  # OSError: no thread can be started
            log.debug("what %s sent of %s is not compared: %s", candidate.member, object_id.key, exc)
        finally:
            self._busy = False

    async def _read(self, origin: Origin, object_id: ObjectId, offset: int, length: int) -> bytes:
        """The origin's bytes at this place."""
        sink, stop = BytesIO(), offset + length
        whole = offset == 0 and length == object_id.size
        try:
            await origin.read(
                object_id.key, object_id.etag, offset, stop, sink, whole=whole, ticket=Ticket(background=True)
            )
        finally:
            self._metrics.discarded_bytes += sink.tell()
        return sink.getvalue()

    async def _drop_wrong(
        self, candidate: Candidate, origin: Origin, object_id: ObjectId, offset: int
    ) -> None:
        self._metrics.peer_lies += 1
        self._cluster.lied(candidate.member)
        log.warning(
            "peer %s sent other bytes of %s (at %d) than the origin has: it is not asked any more, and the cached object is "
            "dropped; cachefs evict drops what else may have come from it",
            candidate.member,
            origin.name(object_id.key),
            offset,
        )
        obj = self._store.object(object_id)
        with obj.held():
            # These may still write blocks from that peer. Those that readers begin later do not ask it.
            in_flight = list(dict.fromkeys(self._transfers_of(obj).values()))
            self._store.unpin(obj)
            self._store.evict(obj)
            for fetch in in_flight:
                await fetch.ended()
                self._store.unpin(obj)
                self._store.evict(obj)
        if self.on_lie is not None:
            await self.on_lie(origin, object_id)


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()

"""Comparing what peers sent with the origin: a sample, in the background, within a budget.

A node that has the cluster's key signs what it sends, right or wrong, so a signature says where bytes came from and not
that they are the origin's. Two samples find a node that sends other bytes, because its memory is broken or it was taken
over:

- of small objects that came whole from a peer and whose etag is an MD5, one in `WHOLES` is hashed: that costs the origin
  nothing;
- of all else a block in about `SHARE` is read from the origin, too.

A peer whose bytes differ from what the origin gives twice is asked for nothing until it or this node starts again, and what
is cached of that object is dropped. What it sent of others, and was not compared, stays.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
from collections.abc import Awaitable, Callable

import trio

from cachefs.base.errors import CachefsError
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.base.tasks import contained
from cachefs.fetch.in_flight import Transfers
from cachefs.origin import Origin, Ticket
from cachefs.peers.cluster import Asked, Cluster
from cachefs.store import Fill, Store

log = logging.getLogger(__name__)

SHARE = 256
"""Of the bytes that come from peers, one part in so many is read from the origin again. Derived: so four nodes that read all
of a dataset take at most 1.004 of it from the origin."""

WHOLES = 8
"""Of whole objects with an MD5, one in so many is hashed. Guessed: MD5 takes as long as receiving the bytes does."""

WHOLE_BYTES = 4 << 20
"""The largest object that is hashed. As `fetcher.WHOLE_BYTES`: what is fetched in one piece."""

MD5 = re.compile(r'"?([0-9a-f]{32})"?')
"""The etag of an object that S3 was given in one piece, without a key of its own."""


class Sampler:
    """Decides when to compare next. Pure but for the random numbers: without them a peer would know when to be honest."""

    def __init__(self, block_size: int, share: int = SHARE, rng: random.Random | None = None) -> None:
        self.rng = rng or random.SystemRandom()
        self._share = share
        self._bytes_to_go = self.rng.uniform(1.0, 1.25) * share * block_size

    def take(self, start: int, stop: int, block_size: int) -> tuple[int, int] | None:
        """The block of [start, stop), which has just come, that is to be compared, if any: (offset, length)."""
        self._bytes_to_go -= stop - start
        if self._bytes_to_go > 0 or stop <= start:
            return None
        offset = self.rng.randrange(start, stop, block_size)
        length = min(block_size, stop - offset)
        self._bytes_to_go = self.rng.uniform(0.85, 1.25) * self._share * length
        return offset, length


class Comparing:
    """Watches what peers deliver. One comparison at a time. On the trio thread only. `on_lie` is called with an object of
    which a peer sent wrong bytes."""

    def __init__(
        self,
        store: Store,
        transfers: Transfers,
        cluster: Cluster,
        nursery: trio.Nursery,
        metrics: Metrics,
    ) -> None:
        self.sampler = Sampler(store.block_size)
        self.wholes = WHOLES
        self.on_lie: Callable[[Origin, ObjectId], Awaitable[object]] | None = None
        self._store = store
        self._transfers = transfers
        self._cluster = cluster
        self._nursery = nursery
        self._metrics = metrics
        self._busy = False
        self._other_etags: set[str] = set()  # sources whose etags look like MD5 and are not

    async def received(
        self, asked: Asked, origin: Origin, object_id: ObjectId, fill: Fill, start: int
    ) -> None:
        """A peer has delivered bytes [start, fill.landed) of an open fill."""
        wanted = self.sampler.take(start, fill.landed, fill.block_size)
        md5 = ""
        if start == 0 and fill.landed == object_id.size <= WHOLE_BYTES:
            found = MD5.fullmatch(object_id.etag)
            if (
                found
                and origin.source not in self._other_etags
                and not self.sampler.rng.randrange(self.wholes)
            ):
                wanted, md5 = (0, fill.landed), found[1]
        if wanted is None or self._busy:
            return
        self._busy = True
        try:
            data = await trio.to_thread.run_sync(fill.look, *wanted)
        except BaseException as exc:
            self._busy = False
            if isinstance(exc, OSError):
                return  # the tier tells of its troubles itself
            raise
        contained(
            self._nursery,
            "comparing a peer's bytes with the origin",
            self._compare,
            *(asked, origin, object_id, wanted[0], data, md5),
        )

    async def _compare(
        self, asked: Asked, origin: Origin, object_id: ObjectId, offset: int, data: bytes, md5: str
    ) -> None:
        try:
            self._metrics.peer_compared += 1
            if md5 and await trio.to_thread.run_sync(_md5, data) == md5:
                return
            real = await self._read(origin, object_id, offset, len(data))
            if real == data:
                if md5:
                    self._other_etags.add(origin.source)
                    log.info("%s: its etags are no MD5, and say nothing of the bytes", origin.source)
            elif real == await self._read(origin, object_id, offset, len(data)):
                await self._lied(asked, origin, object_id, offset)
        except CachefsError as exc:
            log.debug("what %s sent of %s is not compared: %s", asked.member, object_id.key, exc)
        finally:
            self._busy = False

    async def _read(self, origin: Origin, object_id: ObjectId, offset: int, length: int) -> bytes:
        """What the origin has there."""
        sink, stop = _Kept(), offset + length
        whole = offset == 0 and length == object_id.size
        try:
            await origin.read(
                object_id.key, object_id.etag, offset, stop, sink, whole=whole, turn=Ticket(background=True)
            )
        finally:
            self._metrics.discarded_bytes += len(sink.data)
        return bytes(sink.data)

    async def _lied(self, asked: Asked, origin: Origin, object_id: ObjectId, offset: int) -> None:
        self._metrics.peer_lies += 1
        self._cluster.lied(asked.member)
        log.warning(
            "peer %s sent other bytes of %s (at %d) than the origin has: it is not asked any more, and the cached object is "
            "dropped; cachefs evict drops what else may have come from it",
            *(asked.member, origin.name(object_id.key), offset),
        )
        obj = self._store.object(object_id)
        with obj.held():
            while True:
                self._store.unpin(obj)
                self._store.evict(obj)
                under_way = next(iter(self._transfers.of(obj).values()), None)
                if under_way is None:
                    break
                await under_way.ended()  # it may bring more from there
        if self.on_lie is not None:
            await self.on_lie(origin, object_id)


class _Kept:
    """A sink in memory, for one block."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: memoryview | bytes) -> None:
        self.data += data


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()

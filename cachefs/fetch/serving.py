"""Serving peers: blocks that are cached here, and blocks of this node's own extents that it fetches for them.

A request names a version and some of its blocks. Only mounted objects are served: the source must be mounted, and the key
must be below the mounted prefix. A missing block is fetched only if this node should fetch it (as the owner, or as the
successor of dead owners). It is fetched as demand and from the origin: no third node is asked for a peer that reads. Blocks
are served one by one as they are written, as ranges of the tiers' files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from cachefs.base.errors import CachefsError, NoRoom, ObjectChanged
from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId
from cachefs.fetch.fetcher import ATTEMPTS, Fetcher, InFlightFetch
from cachefs.origin import Origin
from cachefs.peers.cluster import Cluster
from cachefs.peers.wire import BlockRequest, Busy, NotShared, ServedBlock
from cachefs.store import PinnedBlock, Store

LOOKUPS_AT_ONCE = 1024
"""Blocks that are looked up before other tasks get a turn: about 1 ms."""


@dataclass(eq=False)
class Serving:
    """`cachefs.peers.wire.Shares` over the store and the fetcher of this node."""

    store: Store
    fetcher: Fetcher
    cluster: Cluster
    _origins: Sequence[Origin]

    async def open(self, request: BlockRequest, peer: str, *, background: bool = False) -> Reply:
        reply = Reply(self, self._origin_of(request.object), request, peer, background)
        try:
            reply.begin()
        except BaseException:
            reply.close()
            raise
        return reply

    async def have(self, request: BlockRequest) -> list[bool]:
        self._origin_of(request.object)
        found: list[bool] = []
        for block in range(request.start_block, request.stop_block):
            if len(found) % LOOKUPS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
                obj = self.store.peek(request.object)
            found.append(self.store.has(obj, block))
        return found

    def _origin_of(self, version: ObjectId) -> Origin:
        for origin in self._origins:
            if origin.source == version.source and version.key.startswith(origin.prefix):
                if any(part in ("", ".", "..") for part in version.key.split("/")):
                    break  # no mount shows such a key, and some origins would resolve it to another
                return origin
        raise NotShared("this node does not show that object")


class Reply:
    """`cachefs.peers.wire.Served`: the requested blocks, in order. They are pinned from when each is ready until `close`."""

    def __init__(
        self, serving: Serving, origin: Origin, request: BlockRequest, peer: str, background: bool
    ) -> None:
        self._serving, self._store, self._origin = serving, serving.store, origin
        self._request, self._peer, self._background = request, peer, background
        self._object = serving.store.object(request.object)
        self._object.hold()
        self._next = request.start_block
        self._ready: PinnedBlock | None = None  # the next block, once it can be taken
        self._pinned: list[PinnedBlock] = []

    def begin(self) -> None:
        """Begin to fetch all missing blocks. Raises `NotShared`, `Busy`."""
        request, serving, blocks = self._request, self._serving, range(self._next, self._request.stop_block)
        if all(self._store.has(self._object, block) for block in blocks):
            return
        extent = request.start_block // BLOCKS_PER_EXTENT
        if not serving.cluster.may_fetch(request.object.digest, extent, request.rank):
            raise NotShared("not here, and another node's to fetch")
        serving.fetcher.fetch_for_peer(
            self._origin, self._object, blocks, requester=self._peer, background=self._background
        )

    def take(self) -> ServedBlock | None:
        if not self._pin_next():
            return None
        block, self._ready = self._ready, None
        assert block is not None
        self._next += 1
        return ServedBlock(block.fd, block.offset, block.length, block.in_ram, block.checksum)

    def _pin_next(self, *, checked: bool = False) -> bool:
        """Pin the next block, unless it is pinned already. True if it can be taken."""
        if self._ready is None:
            self._ready = self._store.pin_block(
                self._object, self._next, checked=checked, requester=self._peer
            )
            if self._ready is not None:
                self._pinned.append(self._ready)
        return self._ready is not None

    async def wait(self) -> None:
        block, start = self._next, self._next * self._request.block_size
        length = self._request.length(block)
        for _ in range(ATTEMPTS):
            if self._store.has(self._object, block):
                # It is cached, but not verified yet, or it is in no tier's file. Reading it changes that.
                if await self._store.read(self._object, start, length, count=False) is None:
                    continue
                if self._pin_next(checked=True):
                    return
                raise Busy("no tier takes it now")
            fetch = self._serving.fetcher.transfers.of(self._object).get(block)
            if fetch is None or not fetch.may_serve(background=self._background):
                self.begin()
                continue
            if not self._background:
                fetch.join((block,))
            await fetch.written(start + length)
            fetch.wake()
            if not self._store.has(self._object, block):
                _raise_failure(fetch)
            elif self._pin_next():
                return
        raise Busy("its blocks vanish as fast as they come")

    def close(self) -> None:
        for block in self._pinned:
            self._store.unpin_block(self._object, block)
        self._pinned.clear()
        self._object.release()


def _raise_failure(fetch: InFlightFetch) -> None:
    """Raise the error of a fetch, if it has one, as an error of the peer protocol."""
    error = fetch.error
    if isinstance(error, ObjectChanged):
        raise error
    if isinstance(error, NoRoom):
        raise Busy(str(error))
    if error is not None:
        reason = str(error) if isinstance(error, CachefsError) else type(error).__name__
        raise NotShared(f"the origin does not give it: {reason}")

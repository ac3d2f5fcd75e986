"""Finds how much of a path each node has cached: asks all members, and looks into this node's own cache."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from itertools import compress, count
from typing import Any

import trio

from cachefs.base.errors import CachefsError, ConfigError
from cachefs.base.names import ObjectId, block_length
from cachefs.fetch import Fetcher
from cachefs.fs.tree_queries import TreeQueries
from cachefs.peers.cluster import Cluster
from cachefs.peers.membership import Member
from cachefs.peers.wire import MAX_HAVE_BLOCKS, PeerFailed

AT_ONCE = 8
"""Files that peers are asked about at a time. Derived: half of the connections to one peer (`CONNECTIONS_PER_PEER`)."""

DEADLINE_S = 50.0
"""Deadline for all files. Derived: the command waits 60 s for the answer."""

THIS_NODE = "this node"
"""The name of this node if it has no address."""


@dataclass(eq=False, repr=False)
class Locator:
    """Answers `locate`. `cluster` is None on a mount without peers: then the answer has this node alone."""

    _tree_queries: TreeQueries
    _fetcher: Fetcher
    _cluster: Cluster | None
    _block_size: int

    async def locate(self, path: str = "") -> dict[str, Any]:
        """How many files are at and below `path` (relative to the mount), their bytes, how many each node has cached,
        and which nodes did not answer. Raises `NotFound`, and `ConfigError` after `DEADLINE_S`."""
        silent: dict[str, str] = {}
        files = size = 0
        this_node, others = THIS_NODE, list[Member]()
        if self._cluster is not None:
            this_node = min(map(str, self._cluster.membership.own_addresses), default=THIS_NODE)
            others = self._cluster.others()
        held = dict.fromkeys([this_node, *map(str, others)], 0)
        slots = trio.CapacityLimiter(AT_ONCE)

        async def ask_members(version: ObjectId) -> None:
            async with slots, trio.open_nursery() as requests:
                for member in others:
                    if str(member) not in silent:
                        requests.start_soon(self._ask, member, version, held, silent)

        failure: CachefsError | None = None
        with trio.move_on_after(DEADLINE_S) as scope:
            async with trio.open_nursery() as nursery:
                try:
                    async with aclosing(self._tree_queries.walk(path)) as found:
                        async for _, _, version in found:
                            files += 1
                            size += version.size
                            held[this_node] += self._fetcher.cached_bytes(version)
                            async with slots:  # waits for a free one, so that the number of tasks is bounded
                                nursery.start_soon(ask_members, version)
                except CachefsError as exc:  # raised below, because the nursery would make a group of it
                    failure = exc
                    nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if scope.cancelled_caught:
            raise ConfigError(
                f"{path or 'the mount'} has too many files to ask about: name a directory in it"
            )
        return {"files": files, "bytes": size, "nodes": held, "unreachable": silent}

    async def _ask(
        self, member: Member, version: ObjectId, held: dict[str, int], silent: dict[str, str]
    ) -> None:
        assert self._cluster is not None
        size = self._block_size
        step = MAX_HAVE_BLOCKS * size
        try:
            for start in range(0, version.size, step):
                stop = min(version.size, start + step)
                answer = await self._cluster.have(member, version, start, stop)
                cached = compress(count(start // size), answer)
                held[str(member)] += sum(block_length(block, version.size, size) for block in cached)
        except PeerFailed as exc:
            if exc.kind != "not_here":
                silent[str(member)] = str(exc)

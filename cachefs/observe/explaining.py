"""Why a file is read as it is: where its extents are, whose they are, and why they were missed the last time.

Also what else a daemon is asked about itself: everything it knows for those who look at it live, how far its origins
are, and how much it logs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import trio

from cachefs.base import logs
from cachefs.base.errors import CachefsError, ConfigError, NotFound
from cachefs.base.metrics import Metrics
from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId, block_count
from cachefs.fs.tree_queries import TreeQueries
from cachefs.observe.watch import shown
from cachefs.origin import Origin
from cachefs.peers.cluster import Cluster
from cachefs.store import Store

log = logging.getLogger(__name__)

EXTENTS_SHOWN = 4096
"""Extents in one answer. Derived: 64 GiB of a file at the default block size, in a reply of 1 MiB."""

PROBES = 3
"""Requests that a round trip is the least of."""

LEVELS = ("debug", "info", "warning", "error")


class Explainer:
    """`status` is what `cachefs status` shows. `cluster` is None on a mount without peers."""

    def __init__(
        self,
        tree_queries: TreeQueries,
        store: Store,
        cluster: Cluster | None,
        origins: Sequence[Origin],
        metrics: Metrics,
        status: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        self._tree_queries = tree_queries
        self._store = store
        self._cluster = cluster
        self._origins = origins
        self._metrics = metrics
        self._status = status

    def verbs(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        """For the control socket."""
        return {
            "explain": self.explain,
            "watch": self.watch,
            "probe": self.probe,
            "log_level": self.log_level,
        }

    async def watch(self) -> dict[str, Any]:
        """Status and ledger."""
        return {**await self._status(), **shown(self._metrics)}

    async def explain(self, path: str) -> dict[str, Any]:
        """All that is known here of the file at `path` (relative to the mount). Raises `NotFound`, `IsADirectory` and what a
        lookup raises."""
        found = await self._tree_queries.resolve(path)
        if found is None:
            raise NotFound(f"no such file: {path}")
        _, version = found
        store, size = self._store, self._store.block_size
        blocks = block_count(version.size, size)
        extents = -(-blocks // BLOCKS_PER_EXTENT)
        layout = store.layout(version)
        return {
            "path": path,
            "source": version.source,
            "key": version.key,
            "etag": version.etag,
            "size": version.size,
            "dataset": store.datasets.name(store.datasets(version)),
            "block_size": size,
            "blocks": blocks,
            "cached_bytes": store.cached_bytes(version),
            "passthrough_on": _whole_and_verified(layout, blocks) if store.passthrough else "",
            "extents": self._extents(version, layout, min(extents, EXTENTS_SHOWN)),
            "left_out": max(0, extents - EXTENTS_SHOWN),
        }

    def _extents(self, version: ObjectId, layout: list[dict[str, Any]], extents: int) -> list[dict[str, Any]]:
        size = self._store.block_size
        missed = dict(self._metrics.ledger.misses.last(version.digest, extents))
        copies: dict[int, list[dict[str, Any]]] = {}
        for copy in layout:
            copies.setdefault(copy["extent"], []).append(copy)
        rows = []
        for extent in range(extents):
            first = extent * BLOCKS_PER_EXTENT
            last = min(first + BLOCKS_PER_EXTENT, block_count(version.size, size))
            miss = missed.get(extent)
            rows.append(
                {
                    "extent": extent,
                    "offset": first * size,
                    "blocks": last - first,
                    "tiers": copies.get(extent, []),
                    "on_its_way": max((copy["arriving"] for copy in copies.get(extent, [])), default=0),
                    "owner": self._owner(version, extent),
                    "last_miss": None
                    if miss is None
                    else {"at": miss.at, "reason": miss.reason, "asked": miss.asked},
                }
            )
        return rows

    def _owner(self, version: ObjectId, extent: int) -> str:
        """Which other node keeps it; "": this one."""
        if self._cluster is None:
            return ""
        owner = self._cluster.owner(version.digest, extent)
        return str(owner) if owner is not None else ""

    async def probe(self) -> list[dict[str, Any]]:
        """How long one small request to each origin takes, in seconds, or why it fails."""
        return [await self._probe(origin) for origin in self._origins]

    async def _probe(self, origin: Origin) -> dict[str, Any]:
        best = float("inf")
        try:
            with trio.fail_after(15):
                for _ in range(PROBES):
                    since = time.perf_counter()
                    await origin.check()
                    best = min(best, time.perf_counter() - since)
        except (CachefsError, trio.TooSlowError) as exc:
            return {"source": origin.source, "error": str(exc) or "no answer within 15 s"}
        return {"source": origin.source, "seconds": best}

    async def log_level(self, level: str) -> str:
        """How much is logged from now on."""
        if level not in LEVELS:
            raise ConfigError(f"no such level: {level}: one of {', '.join(LEVELS)}")
        logs.set_level(level)
        log.warning("logging at %s from now on, as asked", level)
        return level


def _whole_and_verified(layout: Sequence[Mapping[str, Any]], blocks: int) -> str:
    """The tier that has all of a version, each block checked: what the kernel may read by itself. "" when none has."""
    for tier in dict.fromkeys(copy["tier"] for copy in layout):
        if sum(copy["verified"] for copy in layout if copy["tier"] == tier) == blocks:
            return str(tier)
    return ""

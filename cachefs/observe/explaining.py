"""Verbs of the control socket that explain what the daemon does: `explain` (where a file's extents are, which node owns
them, why they were missed last), `probe` (round trips to the origins), `log_level`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import trio

from cachefs.base import logs
from cachefs.base.errors import CachefsError, ConfigError, NotFound
from cachefs.base.metrics import Metrics
from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId, block_count
from cachefs.fs.tree_queries import TreeQueries
from cachefs.origin import Origin
from cachefs.peers.cluster import Cluster
from cachefs.store import Store
from cachefs.store.tier import NAMES, RAM

log = logging.getLogger(__name__)

EXTENTS_SHOWN = 4096
"""Most extents in one reply. Derived: 64 GiB of a file at the default block size, in 1 MiB."""

PROBES = 2
"""Requests of one measurement, of which the fastest counts. Derived: the first may have to open a connection."""

PROBED_WITHIN_S = 15.0
"""Their deadline. Guessed: an origin that takes 5 s and more a request is as good as silent."""

LEVELS = ("debug", "info", "warning", "error")


@dataclass(eq=False, repr=False)
class Explainer:
    """Answers these verbs. `cluster` is None on a mount without peers; `writable`: files can be written through it."""

    tree_queries: TreeQueries
    store: Store
    cluster: Cluster | None
    origins: Sequence[Origin]
    metrics: Metrics
    writable: bool = False

    async def explain(self, path: str) -> dict[str, Any]:
        """What this node knows of the file at `path` (relative to the mount). Raises the errors of a lookup."""
        found = await self.tree_queries.resolve(path)
        if found is None:
            raise NotFound(f"no such file: {path}")
        origin, version = found
        store, size = self.store, self.store.block_size
        blocks = block_count(version.size, size)
        extents = -(-blocks // BLOCKS_PER_EXTENT)
        layout = store.layout(version)
        # As `Fetcher.open_backing` decides: a file in memory cannot become the staging file of a writer.
        on_disk = self.writable and origin.can_write
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
            "passthrough_on": _whole_and_verified(layout, blocks, on_disk) if store.passthrough else "",
            "extents": self._extents(version, layout, min(extents, EXTENTS_SHOWN)),
            "left_out": max(0, extents - EXTENTS_SHOWN),
        }

    def _extents(self, version: ObjectId, layout: list[dict[str, Any]], extents: int) -> list[dict[str, Any]]:
        size = self.store.block_size
        misses = self.metrics.ledger.misses.last(version.digest, extents)
        missed = {extent: asdict(miss) for extent, miss in misses}
        copies: dict[int, list[dict[str, Any]]] = {}
        for copy in layout:
            copies.setdefault(copy["extent"], []).append(copy)
        rows = []
        for extent in range(extents):
            first = extent * BLOCKS_PER_EXTENT
            last = min(first + BLOCKS_PER_EXTENT, block_count(version.size, size))
            here = copies.get(extent, [])
            row = {
                "extent": extent,
                "offset": first * size,
                "blocks": last - first,
                "tiers": here,
                "on_its_way": max((copy["in_progress"] for copy in here), default=0),
                "owner": self._owner(version, extent),
                "last_miss": missed.get(extent),
            }
            rows.append(row)
        return rows

    def _owner(self, version: ObjectId, extent: int) -> str:
        """The node that owns the extent; "" if it is this one."""
        owner = None if self.cluster is None else self.cluster.owner(version.digest, extent)
        return str(owner) if owner is not None else ""

    async def probe(self) -> list[dict[str, Any]]:
        """The duration of a small request to each origin, in seconds, or its error."""
        return [await self._probe(origin) for origin in self.origins]

    async def _probe(self, origin: Origin) -> dict[str, Any]:
        best = float("inf")
        try:
            with trio.fail_after(PROBED_WITHIN_S):
                for _ in range(PROBES):
                    since = time.perf_counter()
                    await origin.check()
                    best = min(best, time.perf_counter() - since)
        except (CachefsError, trio.TooSlowError) as exc:
            return {"source": origin.source, "error": str(exc) or f"no answer within {PROBED_WITHIN_S:g} s"}
        return {"source": origin.source, "seconds": best}

    async def log_level(self, level: str) -> str:
        """Set the level of the log."""
        if level not in LEVELS:
            raise ConfigError(f"no such level: {level}: one of {', '.join(LEVELS)}")
        logs.set_level(level)
        log.warning("logging at %s from now on, as asked", level)
        return level


def _whole_and_verified(layout: Sequence[Mapping[str, Any]], blocks: int, on_disk: bool) -> str:
    """The tier that has all blocks of a version, verified, so that the kernel may read them by itself; "" if none has.
    `on_disk`: the RAM tier does not count."""
    verified = Counter[str]()
    for copy in layout:
        verified[copy["tier"]] += copy["verified"]
    if on_disk:
        del verified[NAMES[RAM]]
    return next((tier for tier, count in verified.items() if count == blocks), "")

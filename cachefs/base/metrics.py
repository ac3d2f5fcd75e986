"""The table of all metrics: name, unit, meaning.

A counter is a plain integer attribute, so that counting costs one attribute access on the hot path. Only the trio thread
changes counters. Values that a scrape reads elsewhere (how full a tier is, what waits) have rows in `SERIES`. Accounts by
name are in the `ledger`, which every room gets with the counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from cachefs.base.ledger import ORIGIN_REQUESTS, REASONS, Ledger


def _counter(unit: str, meaning: str) -> Any:
    return field(default=0, metadata={"unit": unit, "meaning": meaning})


class Family(NamedTuple):
    """A Prometheus counter of several counters that differ in a label. `counters` maps the label's value to the counter."""

    meaning: str
    label: str
    counters: Mapping[str, str]


def _named(pattern: str, values: str) -> dict[str, str]:
    return {value: pattern.format(value) for value in values.split()}


FAMILIES = {
    "fuse_requests": Family(
        "FUSE messages",
        "operation",
        _named("fuse_{}", "lookup getattr open read release create write flush change opendir readdir other"),
    ),
    "fuse_bytes": Family(
        "bytes of the kernel's reads and writes", "direction", _named("fuse_{}_bytes", "read write")
    ),
    "origin_requests": Family(
        "requests sent to the origin, repetitions included",
        "request",
        _named("origin_{}", " ".join(ORIGIN_REQUESTS)),
    ),
    "origin_bytes": Family(
        "body bytes from (in) and to (out) the origin",
        "direction",
        {"in": "origin_bytes", "out": "origin_bytes_sent"},
    ),
    "cache_hits": Family(
        "blocks that were cached when a reader needed them; heap: in memory, because no tier could take them",
        "tier",
        _named("{}_hits", "ram ssd heap"),
    ),
    "cache_misses": Family(
        "blocks that a reader had to wait for", "reason", _named("misses_{}", " ".join(REASONS))
    ),
    "cache_blocks": Family(
        "blocks written to a tier, served without being cached, evicted, spilled, promoted",
        "event",
        _named("{}_blocks", "admitted bypassed evicted spilled promoted"),
    ),
    "cache_bytes": Family(
        "bytes from the origin or other nodes: written to a tier, served without being cached, or discarded",
        "event",
        _named("{}_bytes", "admitted bypassed discarded"),
    ),
}
NOT_EXPORTED = {"misses"}
"""Counters that are the sum of a family."""


class Counter(NamedTuple):
    """A row of the table: `name` is the attribute of `Metrics`, `family` Prometheus' name ("": not exported)."""

    name: str
    unit: str
    meaning: str
    family: str
    labels: dict[str, str]


@dataclass(slots=True)
class Metrics:
    """What the daemon has counted since it started."""

    # FUSE messages.
    fuse_lookup: int = _counter("requests", "names the kernel asked for")
    fuse_getattr: int = _counter("requests", "attributes the kernel asked for")
    fuse_open: int = _counter("requests", "files opened")
    passthrough_opens: int = _counter("requests", "files opened for the kernel to read by itself")
    passthrough_blocks: int = _counter(
        "blocks", "blocks of those files: each open counts with the size of its file"
    )
    page_cache_blocks: int = _counter(
        "blocks",
        "blocks of other cached files that were opened and closed without a READ: the kernel's page cache has answered",
    )
    fuse_read: int = _counter("requests", "reads the kernel could not answer from its page cache")
    fuse_read_bytes: int = _counter("bytes", "bytes returned to those reads")
    fuse_release: int = _counter("requests", "files closed for the last time")
    fuse_create: int = _counter("requests", "files created")
    fuse_write: int = _counter("requests", "writes to files")
    fuse_write_bytes: int = _counter("bytes", "bytes of those writes")
    fuse_flush: int = _counter("requests", "closes and fsyncs of files that are open for writing")
    fuse_change: int = _counter("requests", "names made, moved and removed, and attributes set")
    fuse_opendir: int = _counter("requests", "directories opened")
    fuse_readdir: int = _counter("requests", "directory pages read")
    fuse_other: int = _counter("requests", "every other FUSE request")
    fuse_errors: int = _counter(
        "requests", "requests answered with an errno that is not an expected ENOENT/ENODATA"
    )
    # The origin.
    origin_get: int = _counter("requests", "ranged or whole GETs sent")
    origin_head: int = _counter("requests", "HEADs sent")
    origin_list: int = _counter("requests", "LIST pages requested")
    origin_bytes: int = _counter("bytes", "body bytes received from the origin")
    origin_put: int = _counter("requests", "objects put whole")
    origin_put_part: int = _counter("requests", "parts of multipart uploads sent, or copied at the origin")
    origin_upload: int = _counter("requests", "multipart uploads begun, completed, aborted, listed")
    origin_copy: int = _counter("requests", "objects copied at the origin in one request")
    origin_delete: int = _counter("requests", "deletions, of one object or a thousand")
    origin_bytes_sent: int = _counter("bytes", "body bytes sent to the origin, repetitions included")
    origin_retries: int = _counter("requests", "attempts repeated after a transient failure")
    origin_throttled: int = _counter("replies", "503/429 replies")
    origin_errors: int = _counter("requests", "requests that failed for good")
    origin_outages: int = _counter("events", "times that an origin was found not to answer at all")
    origin_refused: int = _counter("requests", "requests not sent because their origin did not answer")
    # What is written here.
    uploaded_files: int = _counter("files", "files whose new content reached the origin")
    upload_failures: int = _counter("attempts", "uploads of files that failed and are tried again")
    # Other nodes.
    peer_requests: int = _counter(
        "requests", "requests to other nodes for blocks, for which blocks they have, or to fetch some"
    )
    peer_bytes_in: int = _counter("bytes", "bytes of blocks received from other nodes, checked")
    peer_failures: int = _counter("requests", "requests to other nodes that failed or were refused")
    peer_hits: int = _counter("blocks", "blocks that came from another node instead of the origin")
    peer_misses: int = _counter("blocks", "blocks requested from other nodes that then came from the origin")
    peer_compared: int = _counter(
        "blocks", "blocks from other nodes that were compared with the origin or its MD5"
    )
    peer_lies: int = _counter("blocks", "of these, blocks that differed from the origin's")
    peer_served: int = _counter("requests", "blocks served to other nodes")
    peer_bytes_out: int = _counter("bytes", "bytes of blocks sent to other nodes")
    peer_turned_away: int = _counter("requests", "requests of other nodes that this node refused")
    # The cache.
    ram_hits: int = _counter("blocks", "blocks read from the RAM tier")
    ssd_hits: int = _counter("blocks", "blocks read from the SSD tier")
    heap_hits: int = _counter("blocks", "blocks read from memory because no tier could take them")
    misses: int = _counter("blocks", "blocks a reader had to wait for, for one of these reasons")
    misses_cold: int = _counter("blocks", "never cached, as far as is remembered")
    misses_evicted: int = _counter("blocks", "evicted before they were read again")
    misses_changed: int = _counter("blocks", "of files of which an older version was cached")
    misses_damaged: int = _counter("blocks", "dropped because their checksum or their disk failed")
    misses_not_admitted: int = _counter("blocks", "not cached the last time because no tier could take them")
    misses_prefetch_in_flight: int = _counter("blocks", "whose prefetch was in flight")
    prefetched: int = _counter("blocks", "blocks prefetched")
    prefetched_late: int = _counter("blocks", "prefetched blocks that a reader had to wait for")
    admitted_blocks: int = _counter("blocks", "blocks written to a tier")
    bypassed_blocks: int = _counter(
        "blocks", "blocks served without being cached because no tier could take them"
    )
    admitted_bytes: int = _counter("bytes", "of what the origin or other nodes sent: written to a tier")
    bypassed_bytes: int = _counter("bytes", "of that: served without being cached")
    discarded_bytes: int = _counter(
        "bytes", "of that: parts of blocks whose transfer ended before they were whole"
    )
    evicted_blocks: int = _counter("blocks", "blocks evicted for space")
    spilled_blocks: int = _counter("blocks", "blocks moved from RAM to SSD")
    promoted_blocks: int = _counter("blocks", "blocks copied from SSD to RAM on re-use")
    prepared_versions: int = _counter(
        "versions", "cached versions gathered or verified so that the kernel can read their file by itself"
    )
    adopted_versions: int = _counter(
        "versions", "files written here that became cached versions as they were"
    )
    checksum_failures: int = _counter("blocks", "cached blocks dropped because their checksum did not match")
    tier_errors: int = _counter("errors", "I/O errors on a cache tier (each costs a refetch, never data)")
    # Prefetched files. Readahead within a file counts in blocks, above.
    prefetch_files: int = _counter("files", "files prefetched by directory, shard or plan")
    prefetch_used_files: int = _counter("files", "of those, opened later")
    prefetch_errors: int = _counter("errors", "files whose prefetch failed")
    # The tree.
    stale_answers: int = _counter("answers", "names used beyond their TTL because the origin did not answer")
    negative_hits: int = _counter("lookups", "missing names answered without a request")
    objects_changed: int = _counter("events", "open files whose object was replaced at the origin (ESTALE)")
    hidden_names: int = _counter("names", "keys that no path can name, left out of listings")

    ledger: Ledger = field(default_factory=Ledger)
    """Requests, waits and misses by name."""

    def as_dict(self) -> dict[str, int]:
        """Name of each counter → value, in the order of the table."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.metadata}

    @classmethod
    def table(cls) -> list[Counter]:
        """The rows of all counters, for documentation and exporters."""
        labelled = {
            counter: (name, {family.label: value})
            for name, family in FAMILIES.items()
            for value, counter in family.counters.items()
        }
        labelled |= {name: ("", {}) for name in NOT_EXPORTED}
        return [
            Counter(f.name, f.metadata["unit"], f.metadata["meaning"], *labelled.get(f.name, (f.name, {})))
            for f in fields(cls)
            if f.metadata
        ]


def hit_ratios(counted: Mapping[str, int]) -> tuple[float | None, float | None]:
    """(share of all blocks that were cached, the same of blocks read through the daemon); None if there are no blocks.

    The daemon does not see the kernel's reads of passthrough files and from its page cache. So an open of such a file counts
    as a read of all its blocks."""
    hits = sum(counted.get(f"{tier}_hits", 0) for tier in ("ram", "ssd", "heap"))
    misses = counted.get("misses", 0)
    unseen = counted.get("passthrough_blocks", 0) + counted.get("page_cache_blocks", 0)
    blocks = hits + unseen + misses
    overall = (hits + unseen) / blocks if blocks else None
    return overall, hits / (hits + misses) if hits + misses else None


class Series(NamedTuple):
    """A value that is read at scrape time. `kind` is Prometheus' type: gauge, counter or histogram."""

    name: str
    kind: str
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()


SERIES = (
    Series("info", "gauge", "", "always 1: which daemon this is", ("version", "fuse", "mountpoint")),
    Series("up_seconds", "gauge", "seconds", "since the daemon started"),
    Series("ready", "gauge", "", "1 once the mount answers, 0 before and while it stops"),
    Series(
        "loop_pause_seconds_max",
        "gauge",
        "seconds",
        "longest pause of the event loop, within 0.1 s: of the last minute, or since the start",
        ("over",),
    ),
    Series("restarts", "counter", "restarts", "times that a new daemon took over the mount"),
    Series(
        "restart_pause_seconds_max",
        "gauge",
        "seconds",
        "longest time from the end of a daemon until the next one answered",
    ),
    Series("memory_bytes", "gauge", "bytes", "resident memory of the daemon, the RAM tier not included"),
    Series("open_files", "gauge", "files", "open through the mount"),
    Series("names", "gauge", "names", "known names of files and directories"),
    Series("warnings", "gauge", "warnings", "what cachefs status warns of"),
    Series("tier_used_bytes", "gauge", "bytes", "what a tier holds", ("tier",)),
    Series("tier_limit_bytes", "gauge", "bytes", "what a tier may hold now", ("tier",)),
    Series("tier_blocks", "gauge", "blocks", "blocks in a tier", ("tier",)),
    Series("pinned_bytes", "gauge", "bytes", "what is pinned"),
    Series(
        "origin_concurrency",
        "gauge",
        "requests",
        "requests that may be in flight to an origin now",
        ("source",),
    ),
    Series("origin_in_flight", "gauge", "requests", "requests in flight, by class", ("source", "class")),
    Series(
        "origin_waiting", "gauge", "requests", "requests that wait for a slot, by class", ("source", "class")
    ),
    Series("origin_out", "gauge", "", "1 while an origin does not answer at all", ("source",)),
    Series("origin_throughput_bytes", "gauge", "bytes a second", "what an origin sends now", ("source",)),
    Series("prefetch_in_flight", "gauge", "files", "files being prefetched"),
    Series("prefetch_unused_bytes", "gauge", "bytes", "prefetched and not opened yet"),
    Series("uploads_pending", "gauge", "files", "written here and not at the origin yet"),
    Series("uploads_pending_bytes", "gauge", "bytes", "the bytes of those"),
    Series("peer_members", "gauge", "nodes", "other members of the group, by state", ("state",)),
    Series("peer_bytes", "counter", "bytes", "blocks from (in) and to (out) a peer", ("peer", "direction")),
    Series("peer_latency_seconds", "gauge", "seconds", "mean time until a peer's reply begins", ("peer",)),
    Series("jobs_running", "gauge", "jobs", "cachefs warm, pin, … that run"),
    Series("dataset_requests", "counter", "requests", "requests to the origin", ("dataset", "request")),
    Series(
        "dataset_bytes",
        "counter",
        "bytes",
        "bytes from (in) and to (out) the origin",
        ("dataset", "direction"),
    ),
    Series("waiting", "gauge", "requests", "requests of programs that wait now"),
    Series("blocked_seconds", "counter", "seconds", "time in which at least one request waited"),
    Series(
        "waited_seconds",
        "counter",
        "seconds",
        "sum of the times that requests waited, by what for: reads for origin, peer or disk, others for names or writes",
        ("on",),
    ),
    Series(
        "read_wait_seconds", "histogram", "seconds", "how long reads took that could not be answered at once"
    ),
    Series(
        "open_wait_seconds", "histogram", "seconds", "how long opens took that could not be answered at once"
    ),
    Series(
        "origin_seconds",
        "histogram",
        "seconds",
        "how long requests to the origin took, one attempt each",
        ("request",),
    ),
    Series(
        "upload_seconds",
        "histogram",
        "seconds",
        "how long files took to upload, by the attempt that succeeded",
    ),
)
"""Names are without the prefix `cachefs_`."""

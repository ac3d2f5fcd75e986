"""The metrics in Prometheus' text format: counters, and series, whose values come from the status and the ledger."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from cachefs.base.ledger import BUCKETS_S, Histogram
from cachefs.base.metrics import FAMILIES, SERIES, Metrics

PREFIX = "cachefs_"
CONTENT_TYPE = CONTENT_TYPE_LATEST

Sample = tuple[tuple[str, ...], float]
"""(values of the row's labels, in their order; the number)."""


def expose(metrics: Metrics, status: Mapping[str, Any]) -> bytes:
    """All metrics as text. A row whose value is not in `status`, such as peers of a mount without any, has no samples."""
    text: bytes = generate_latest(_Families(metrics, status))
    return text


class _Families(Collector):
    def __init__(self, metrics: Metrics, status: Mapping[str, Any]) -> None:
        self._metrics, self._status = metrics, status

    def collect(self) -> Iterator[Metric]:
        yield from _counters(self._metrics)
        yield from _series(self._metrics, self._status)


def _counters(metrics: Metrics) -> Iterator[Metric]:
    families: dict[str, CounterMetricFamily] = {}
    for row in metrics.table():
        if row.family and row.family not in families:
            meaning = FAMILIES[row.family].meaning if row.family in FAMILIES else row.meaning
            help = f"{meaning} ({row.unit})"
            families[row.family] = CounterMetricFamily(PREFIX + row.family, help, labels=list(row.labels))
        if row.family:
            families[row.family].add_metric(list(row.labels.values()), getattr(metrics, row.name))
    yield from families.values()


def _series(metrics: Metrics, status: Mapping[str, Any]) -> Iterator[Metric]:
    values = dict(_values(metrics, status))
    for row in SERIES:
        help = f"{row.meaning} ({row.unit})" if row.unit else row.meaning
        if row.kind == "histogram":
            durations = HistogramMetricFamily(PREFIX + row.name, help, labels=row.labels)
            bounds = [*map(str, BUCKETS_S), "+Inf"]
            for labels, histogram in _histograms(metrics)[row.name].items():
                buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
                durations.add_metric(labels, buckets, sum_value=histogram.sum_s)
            yield durations
            continue
        family = GaugeMetricFamily if row.kind == "gauge" else CounterMetricFamily
        metric = family(PREFIX + row.name, help, labels=row.labels)
        for labels, value in values.get(row.name, ()):
            # Keys need not be UTF-8; labels must be.
            metric.add_metric([text.encode("utf-8", "replace").decode() for text in labels], value)
        yield metric


def _histograms(metrics: Metrics) -> dict[str, dict[tuple[str, ...], Histogram]]:
    """Name of the row → values of its labels → durations."""
    ledger = metrics.ledger
    return {
        "read_wait_seconds": {(): ledger.waits.read_seconds},
        "open_wait_seconds": {(): ledger.waits.open_seconds},
        "origin_seconds": {(kind,): histogram for kind, histogram in ledger.origin_seconds.items()},
        "upload_seconds": {(): ledger.upload_seconds},
    }


def _values(metrics: Metrics, status: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Sample]]]:
    """(name of a row, its samples)."""

    def single(value: float | None) -> list[Sample]:
        return [] if value is None else [((), value)]

    yield "info", [(tuple(str(status.get(key, "")) for key in ("version", "fuse", "mountpoint")), 1)]
    yield "up_seconds", single(time.time() - float(status.get("started", time.time())))
    yield "warnings", single(len(status.get("warnings") or ()))
    yield "jobs_running", single(sum(job.get("state") == "running" for job in status.get("jobs") or ()))
    for name in ("ready", "memory_bytes", "open_files", "names", "pinned_bytes"):
        yield name, single(status.get(name))
    holder, prefetch, uploads = (status.get(part) or {} for part in ("holder", "prefetch", "uploads"))
    yield "restarts", single(holder.get("restarts"))
    yield "restart_pause_seconds_max", single(holder.get("longest_pause_s"))
    yield "loop_pause_seconds_max", [((over,), s) for over, s in (status.get("loop_pause_s") or {}).items()]
    for name, key in (("used_bytes", "used_bytes"), ("limit_bytes", "cap_bytes"), ("blocks", "blocks")):
        yield f"tier_{name}", [((tier["name"],), tier[key]) for tier in status.get("tiers") or ()]
    yield from _origins([source["origin"] for source in status.get("sources") or ()])
    yield "prefetch_in_flight", single(prefetch.get("in_flight"))
    yield "prefetch_unused_bytes", single(prefetch.get("unused_bytes"))
    yield "uploads_pending", single(uploads.get("pending"))
    yield "uploads_pending_bytes", single(uploads.get("pending_bytes"))
    if status.get("peers") is not None:
        yield from _peers(status["peers"])
    yield from _ledger(metrics)


def _origins(origins: list[Mapping[str, Any]]) -> Iterator[tuple[str, Iterable[Sample]]]:
    # Two sources may be two prefixes of one bucket, with equal labels: their values are added.
    def summed(values: Iterable[Sample]) -> list[Sample]:
        total: Counter[tuple[str, ...]] = Counter()
        for labels, value in values:
            total[labels] += value  # type: ignore[assignment]
        return list(total.items())

    yield "origin_concurrency", summed(((o["source"],), o["concurrency"]) for o in origins)
    yield "origin_out", {(o["source"],): int(o["out_s"] is not None) for o in origins}.items()
    yield "origin_throughput_bytes", summed(((o["source"],), o["throughput"]) for o in origins)
    in_flight: list[Sample] = []
    waiting: list[Sample] = []
    for o in origins:
        demand, background = (o["source"], "demand"), (o["source"], "background")
        in_flight.append((demand, o["in_flight"] - o["background_in_flight"]))
        in_flight.append((background, o["background_in_flight"]))
        waiting += [(demand, o["demand_waiting"]), (background, o["background_waiting"])]
    yield "origin_in_flight", summed(in_flight)
    yield "origin_waiting", summed(waiting)


def _peers(peers: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Sample]]]:
    others = [member for member in peers["members"] if not member["here"]]
    states = Counter({"healthy": 0, "suspect": 0, "dead": 0, "unknown": 0, "incompatible": 0})
    states.update(member["state"] for member in others)
    states.update(
        "unknown" if other["state"] == "unknown" else "incompatible" for other in peers["incompatible"]
    )
    yield "peer_members", [((state,), count) for state, count in states.items()]
    yield "peer_bytes", [((m["name"], way), m[f"bytes_{way}"]) for m in others for way in ("in", "out")]
    yield "peer_latency_seconds", [((m["name"],), m["latency_s"]) for m in others]


def _ledger(metrics: Metrics) -> Iterator[tuple[str, Iterable[Sample]]]:
    ledger = metrics.ledger
    ways = {"origin_bytes": "in", "origin_bytes_sent": "out"}
    rows = [(name, *item) for name, account in ledger.datasets.items() for item in account.items()]
    requests = [(name, kind.removeprefix("origin_"), count) for name, kind, count in rows if kind not in ways]
    yield "dataset_requests", [((name, kind), count) for name, kind, count in requests]
    yield "dataset_bytes", [((name, ways[kind]), count) for name, kind, count in rows if kind in ways]
    totals = ledger.waits.totals()
    yield "waiting", [((), totals["waiting"])]
    yield "blocked_seconds", [((), totals["blocked_s"])]
    yield "waited_seconds", [((on,), seconds) for on, seconds in totals["waited_s"].items()]

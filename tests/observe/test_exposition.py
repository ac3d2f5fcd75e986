"""The metrics table as Prometheus gets it, and what is built on its names: the dashboard, the documentation."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cachefs.base.ledger import ORIGIN_REQUESTS, REASONS
from cachefs.base.metrics import FAMILIES, SERIES, Metrics, hit_ratios
from cachefs.base.names import ObjectId
from cachefs.observe.exposition import PREFIX, expose

DOCS = Path(__file__).parents[2] / "docs"


def origin(source: str = "s3://b", in_flight: int = 5) -> dict[str, Any]:
    return {
        **{"source": source, "concurrency": 64, "in_flight": in_flight, "background_in_flight": 2},
        **{
            "demand_waiting": 1,
            "background_waiting": 7,
            "throughput": 1000,
            "last_error": "",
            "limited_by": "",
            "out_s": None,
        },
    }


def member(name: str, here: bool = False) -> dict[str, Any]:
    return {
        **{"name": name, "here": here, "share": 0.5, "state": "healthy", "bytes_in": 3, "bytes_out": 4},
        **{"requests": 5, "failures": {"timeout": 2}, "latency_s": 0.25},
    }


STATUS: dict[str, Any] = {
    **{"version": "0.1", "fuse": "native", "mountpoint": "/mnt", "started": time.time() - 10, "pid": 7},
    **{"memory_bytes": 1 << 20, "open_files": 3, "names": 9, "pinned_bytes": 0, "ready": 1},
    "warnings": ["one"],
    "loop_pause_s": {"minute": 0.25, "run": 1.5},
    "tiers": [
        {"name": "ram", "used_bytes": 1, "cap_bytes": 2, "blocks": 3, "state": "normal", "path": "/ram"},
        {"name": "ssd", "used_bytes": 10, "cap_bytes": 20, "blocks": 30, "state": "normal", "path": "/ssd"},
    ],
    "sources": [
        {"name": "a", "url": "s3://b/a", "origin": origin()},
        {"name": "c", "url": "s3://b/c", "origin": origin()},
    ],
    "prefetch": {"in_flight": 1, "unused_bytes": 2, "paused": "", "plans": []},
    "uploads": {"pending": 1, "pending_bytes": 5, "failed": 0, "last_error": ""},
    "peers": {
        "members": [member("here:1", True), member("there:1")],
        "incompatible": [
            {"name": "b:1", "state": "other sources", "why": "shows other stores", "wrong": True},
            {"name": "c:1", "state": "unknown", "why": "has not answered yet", "wrong": False},
        ],
    },
    "jobs": [{"id": 1, "action": "warm", "files": 2, "done_files": 1, "done_bytes": 5, "state": "running"}],
    "eviction": {"policy": "auto", "datasets": []},
    "holder": {"restarts": 2, "longest_pause_s": 0.5},
}


def samples(metrics: Metrics, status: dict[str, Any]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(expose(metrics, status).decode())
        for sample in family.samples
    }


def counted() -> Metrics:
    metrics = Metrics()
    for number, row in enumerate(metrics.table()):
        setattr(metrics, row.name, number)
    account = metrics.ledger.account("", "train/1")
    account.update({"origin_get": 3, "origin_list": 1, "origin_bytes": 500, "origin_bytes_sent": 6})
    return metrics


def exposed_names() -> set[str]:
    """Every name that a sample can have: what dashboards and alerts may ask for."""
    names = {f"{PREFIX}{row.family}_total" for row in Metrics.table() if row.family}
    for row in SERIES:
        endings = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
        names |= {f"{PREFIX}{row.name}{ending}" for ending in endings[row.kind]}
    return names


def test_every_row_of_the_table_is_shown_with_its_value() -> None:
    metrics = counted()
    found = samples(metrics, STATUS)
    assert {name for name, _ in found} == exposed_names()
    for row in metrics.table():
        if row.family:
            assert found[f"cachefs_{row.family}_total", frozenset(row.labels.items())] == getattr(
                metrics, row.name
            )
    assert found["cachefs_cache_hits_total", frozenset({("tier", "ram")})] == metrics.ram_hits
    assert found["cachefs_cache_misses_total", frozenset({("reason", "evicted")})] == metrics.misses_evicted
    assert ("cachefs_cache_misses_total", frozenset()) not in found  # a sum over the label gives it


def test_labels() -> None:
    found = samples(counted(), STATUS)

    def value(name: str, **labels: str) -> float:
        return found[f"cachefs_{name}", frozenset(labels.items())]

    assert value("tier_used_bytes", tier="ssd") == 10
    assert value("tier_limit_bytes", tier="ram") == 2
    # Both sources are the same store.
    assert value("origin_in_flight", **{"source": "s3://b", "class": "demand"}) == 6
    assert value("origin_waiting", **{"source": "s3://b", "class": "background"}) == 14
    assert value("peer_bytes_total", peer="there:1", direction="out") == 4
    assert value("peer_members", state="healthy") == 1
    assert value("peer_members", state="dead") == 0
    assert value("loop_pause_seconds_max", over="minute") == 0.25
    assert value("loop_pause_seconds_max", over="run") == 1.5
    assert value("dataset_requests_total", dataset="train", request="get") == 3
    assert value("dataset_bytes_total", dataset="train", direction="in") == 500
    assert value("info", version="0.1", fuse="native", mountpoint="/mnt") == 1
    assert 9 < value("up_seconds") < 3600


def test_a_mount_without_peers_prefetch_and_uploads() -> None:
    status = {**STATUS, "peers": None, "prefetch": None, "uploads": None, "tiers": [], "jobs": []}
    names = {name for name, _ in samples(Metrics(), status)}
    assert exposed_names() - names >= {
        "cachefs_peer_members",
        "cachefs_uploads_pending",
        "cachefs_tier_blocks",
    }
    assert names <= exposed_names()


def test_names_that_are_no_text() -> None:
    metrics = Metrics()
    metrics.ledger.account("", 'a"\n\udce9/x')["origin_get"] += 1
    [labels] = [
        dict(labels) for name, labels in samples(metrics, STATUS) if name == "cachefs_dataset_requests_total"
    ]
    assert labels["dataset"] == 'a"\n?'


def test_waits_are_a_histogram() -> None:
    metrics = Metrics()
    now = 0.0
    metrics.ledger.waits.clock = lambda: now
    for seconds in (0.0005, 0.02, 0.02, 100):
        wait = metrics.ledger.waits.begin(0, ObjectId("s", "k", "e", 1), 0)
        now += seconds
        wait.end(1)
    found = samples(metrics, STATUS)

    def bucket(le: str) -> float:
        return found["cachefs_read_wait_seconds_bucket", frozenset({("le", le)})]

    assert [bucket(le) for le in ("0.001", "0.01", "0.025", "60.0", "+Inf")] == [1, 1, 3, 3, 4]
    assert found["cachefs_read_wait_seconds_sum", frozenset()] == pytest.approx(100.0405)
    assert found["cachefs_blocked_seconds_total", frozenset()] == pytest.approx(100.0405)


def test_durations_are_histograms() -> None:
    metrics, now = Metrics(), 0.0
    metrics.ledger.waits.clock = lambda: now
    for request in ("open", "lookup"):
        call = metrics.ledger.waits.call(0, "names", request)
        now += 0.2
        call.end()
    metrics.ledger.origin_seconds["put_part"].add(0.3)
    metrics.ledger.upload_seconds.add(100)
    found = samples(metrics, STATUS)
    assert found["cachefs_open_wait_seconds_count", frozenset()] == 1
    assert found["cachefs_open_wait_seconds_sum", frozenset()] == pytest.approx(0.2)
    part = ("request", "put_part")
    assert found["cachefs_origin_seconds_bucket", frozenset({part, ("le", "0.25")})] == 0
    assert found["cachefs_origin_seconds_bucket", frozenset({part, ("le", "0.5")})] == 1
    assert found["cachefs_origin_seconds_count", frozenset({("request", "get")})] == 0
    assert found["cachefs_upload_seconds_bucket", frozenset({("le", "60.0")})] == 0
    assert found["cachefs_upload_seconds_bucket", frozenset({("le", "+Inf")})] == 1


def test_a_warm_mount_has_a_good_hit_ratio() -> None:
    """Its reads are the kernel's: the daemon sees the opens, and the few misses of the time before."""
    metrics = Metrics()
    assert hit_ratios(metrics.as_dict()) == (None, None)
    metrics.misses, metrics.ram_hits = 10, 5
    assert hit_ratios(metrics.as_dict()) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    metrics.passthrough_blocks = 985
    assert hit_ratios(metrics.as_dict()) == (0.99, pytest.approx(1 / 3))
    metrics.passthrough_blocks, metrics.page_cache_blocks = 0, 985
    assert hit_ratios(metrics.as_dict()) == (0.99, pytest.approx(1 / 3))
    metrics.misses = metrics.ram_hits = 0
    assert hit_ratios(metrics.as_dict()) == (1.0, None)


def test_the_table_speaks_of_everything_once() -> None:
    table = Metrics.table()
    names = [row.name for row in table] + [row.name for row in SERIES]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
    assert all(row.meaning and row.unit for row in table)
    exported = [(row.family, *row.labels.items()) for row in table if row.family]
    assert len(exported) == len(set(exported))
    for family in {row.family for row in table}:  # one kind of label each, or a sum over it means nothing
        assert len({(row.unit, *row.labels) for row in table if row.family == family}) == 1
    assert set(FAMILIES) <= {row.family for row in table}
    assert {row.labels["request"] for row in table if row.family == "origin_requests"} == set(ORIGIN_REQUESTS)
    assert all(row.kind in ("gauge", "counter", "histogram") and row.meaning for row in SERIES)
    assert {f"misses_{reason}" for reason in REASONS} == {n for n in names if n.startswith("misses_")}


def test_the_dashboard_asks_for_what_there_is() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    names = exposed_names()
    labels = {
        "le",
        "instance",
        "job",
        *(label for row in (*SERIES, *Metrics.table()) for label in row.labels),
    }
    asked: set[str] = set()
    for query in queries:
        found = set(re.findall(r"\bcachefs_\w+", query))
        assert found and found <= names, query
        asked |= found
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            assert set(re.split(r",\s*", grouped)) <= labels, query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    assert len(asked) > 35
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in dashboard["panels"]]
    for x, y, w, h in places:  # no two lie over one another
        assert x + w <= 24
        assert sum(x < b + d and b < x + w and y < c + e and c < y + h for b, c, d, e in places) == 1

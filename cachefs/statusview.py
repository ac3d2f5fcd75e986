"""A daemon's status for people: a few aligned lines, plain when the output is not a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cachefs.units import about_bytes as size
from cachefs.units import about_files, printable

NAMED = 2
"""Failures of a job that has ended."""

DATASETS = 6
"""Named in one line."""


def show(statuses: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print one block for each status; keys that are missing are left out."""
    console = console or Console(highlight=False)
    for number, status in enumerate(statuses):
        if number:
            console.print()
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in lines(status):
            if console.is_terminal:
                table.add_row(Text(name), Text(printable(value)))
            else:  # one line each, however long: for grep
                console.out(f"{name:<10}  {printable(value)}", highlight=False)
        if console.is_terminal:
            console.print(table)


def lines(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, value) in the order they are shown."""
    yield "mountpoint", str(status.get("mountpoint", "?"))
    for source in status.get("sources") or []:
        name = f"{source['name']}: " if source.get("name") else ""
        yield (
            "source",
            f"{name}{source.get('url', '?')}  {_pairs(source.get('client'), source.get('origin'))}".rstrip(),
        )
    yield "daemon", ", ".join(_daemon(status))
    for tier in status.get("tiers") or []:
        yield str(tier.get("name", "tier")), _tier(tier)
    yield from _counts(status.get("metrics") or {})
    yield from _writing(status.get("uploads") or {}, status.get("metrics") or {})
    yield from _eviction(status.get("eviction") or {}, int(status.get("pinned_bytes", 0)))
    yield from _prefetch(status.get("prefetch") or {}, status.get("metrics") or {})
    yield from _peers(status.get("peers") or {}, status.get("metrics") or {})
    for job in status.get("jobs") or []:
        yield f"job {job['id']}", _job(job)
    if "front" in status and "front_reason" in status:
        yield "front", f"{status['front']}: {status['front_reason']}"
    if "read_only" in status:
        yield "mode", _mode(status)
    if status.get("endpoint"):
        yield "metrics", f"http://{status['endpoint']}/"
    for line in status.get("tuning") or []:
        yield "tuning", str(line)
    for line in status.get("warnings") or []:
        yield "warning", str(line)


def _daemon(status: Mapping[str, Any]) -> Iterator[str]:
    if "pid" in status:
        yield f"pid {status['pid']}"
    if "started" in status:
        yield f"up {duration(time.time() - float(status['started']))}"
    if "version" in status:
        yield f"version {status['version']}"
    if "front" in status:
        yield f"{status['front']} front"
    if "memory_bytes" in status:
        yield f"{size(status['memory_bytes'])} resident"
    if "inodes" in status:
        yield f"{status['inodes']:,} inodes"


def _tier(tier: Mapping[str, Any]) -> str:
    used, cap = int(tier.get("used_bytes", 0)), int(tier.get("cap_bytes", 0))
    share = f" ({100 * used / cap:.0f} %)" if cap else ""
    state = f", {tier['state']}" if tier.get("state") else ""
    blocks = f"{int(tier.get('blocks', 0)):,} blocks"
    return f"{size(used)} of {size(cap)}{share}, {blocks}{state}  {tier.get('path', '')}".rstrip()


def _counts(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def count(name: str) -> int:
        return int(metrics.get(name, 0))

    if not metrics:
        return
    hits, misses = count("ram_hits") + count("ssd_hits"), count("misses")
    if hits + misses:
        yield (
            "hits",
            (
                f"{100 * hits / (hits + misses):.1f} % of {hits + misses:,} blocks "
                f"({count('ram_hits'):,} RAM, {count('ssd_hits'):,} SSD, {misses:,} waited for)"
            ),
        )
    yield (
        "origin",
        (
            f"{count('origin_get'):,} GET, {count('origin_head'):,} HEAD, {count('origin_list'):,} LIST, "
            f"{size(count('origin_bytes'))} received"
        ),
    )
    trouble = {
        "origin_retries": "retries",
        "origin_throttled": "throttled",
        "origin_errors": "failed requests",
        "checksum_failures": "checksum failures",
        "tier_errors": "tier errors",
        "fuse_errors": "failed operations",
    }
    met = [f"{count(name):,} {words}" for name, words in trouble.items() if count(name)]
    if met:
        yield "trouble", ", ".join(met)
    yield (
        "readers",
        (
            f"{count('fuse_open'):,} opens, {count('fuse_read'):,} reads, {size(count('fuse_read_bytes'))} returned"
        ),
    )


def _mode(status: Mapping[str, Any]) -> str:
    if status["read_only"]:
        return "read-only"
    uploads = status.get("uploads") or {}
    return "writable, " + (
        "here first (--writeback)" if uploads.get("writeback") else "to the store at close and fsync"
    )


def _writing(uploads: Mapping[str, Any], metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def count(name: str) -> int:
        return int(metrics.get(name, 0))

    if not uploads:
        return
    if count("fuse_write") or count("origin_bytes_sent"):
        yield (
            "written",
            (
                f"{size(count('fuse_write_bytes'))} through the daemon, {size(count('origin_bytes_sent'))} sent in "
                f"{count('origin_put'):,} PUT, {count('origin_put_part'):,} parts; "
                f"{count('origin_copy'):,} COPY, {count('origin_delete'):,} DELETE"
            ),
        )
    if uploads.get("pending"):
        failed = uploads.get("failed")
        trouble = f", {failed:,} of them failed: {uploads.get('last_error')}" if failed else ""
        yield (
            "uploading",
            (
                f"{about_files(uploads['pending'])}, {size(uploads['pending_bytes'])}, for "
                f"{duration(uploads.get('oldest_s', 0))}{trouble}"
            ),
        )


def _peers(peers: Mapping[str, Any], metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    members = peers.get("members")
    if members is None:
        return
    others = [member for member in members if not member["here"]]
    states = {state: sum(member["state"] == state for member in others) for state in ("suspect", "dead")}
    apart = Counter(other["state"] for other in peers.get("apart", ()))
    trouble = "".join(f", {number} {state}" for state, number in {**states, **apart}.items() if number)
    listens = f", listening on {peers['listen']}" if peers.get("listen") else ", giving nothing"
    yield (
        "peers",
        f"{len(others)} others in group {peers.get('group')}{trouble}{listens}, from {peers.get('from')}",
    )
    yield (
        "shared",
        (
            f"{size(metrics.get('peer_bytes_in', 0))} from others, {size(metrics.get('peer_bytes_out', 0))} to them; "
            f"{metrics.get('peer_misses', 0):,} blocks they did not give"
        ),
    )


def _job(job: Mapping[str, Any]) -> str:
    if job.get("state", "running") != "running":
        return _ended(job)
    so_far = "" if job["walked"] else " so far"
    failed = f", {job['failed']:,} failed" if job["failed"] else ""
    return (
        f"{job['action']}: {job['done_files']:,} of {job['files']:,} files, {size(job['done_bytes'])} of "
        f"{size(job['bytes'])}{so_far}, for {duration(job['seconds'])}{failed}"
    )


def _ended(job: Mapping[str, Any]) -> str:
    failures = [job["error"]] if job.get("error") else list(job.get("failures") or [])
    failed = f", {job['failed']:,} failed" if job["failed"] else ""
    why = f": {'; '.join(failures[:NAMED])}" if failures else ""
    return (
        f"{job['action']}: {job['state']} {duration(time.time() - job['ended'])} ago, {job['done_files']:,} of "
        f"{job['files']:,} files{failed}{why}"
    )


def _eviction(eviction: Mapping[str, Any], pinned: int) -> Iterator[tuple[str, str]]:
    """The policy and how each dataset in use is taken; the epochs of those that have some; what is pinned."""
    if eviction.get("policy"):
        modes = [
            f"{dataset.get('name') or '/'} by {'epochs' if dataset.get('mode') == 'epoch' else 'last use'}"
            for dataset in eviction.get("datasets") or []
        ]
        more = [f"{len(modes) - DATASETS} more"] if len(modes) > DATASETS else []
        named = f": {', '.join(modes[:DATASETS] + more)}" if modes else ""
        yield "eviction", f"{eviction['policy']}{named}"
    shown = [d for d in eviction.get("datasets") or [] if d.get("mode") == "epoch" and d.get("epoch", 1) > 1]
    for dataset in shown[:3]:
        ratio = (
            dataset.get("hit_ratio")
            if dataset.get("hit_ratio") is not None
            else dataset.get("last_hit_ratio")
        )
        hits = f", {100 * ratio:.0f} % cached" if ratio is not None else ""
        yield (
            "epochs",
            (
                f"{dataset.get('name') or '/'}: epoch {dataset['epoch']}, {100 * dataset.get('used_share', 0):.0f} % of "
                f"{size(dataset.get('footprint_bytes', 0))} read{hits}"
            ),
        )
    if pinned:
        yield "pinned", size(pinned)


def _prefetch(prefetch: Mapping[str, Any], metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    fetched, used = int(metrics.get("prefetch_files", 0)), int(metrics.get("prefetch_used_files", 0))
    if prefetch and (fetched or prefetch.get("in_flight")):
        paused = f", pausing: {prefetch['paused']}" if prefetch.get("paused") else ""
        yield (
            "prefetch",
            f"{fetched:,} files fetched ahead, {used:,} used, {size(prefetch.get('unused_bytes', 0))} waiting{paused}",
        )
    for plan in prefetch.get("plans") or []:
        epoch = (
            "no order yet" if plan["epoch"] is None else f"epoch {plan['epoch']}, file {plan['position']:,}"
        )
        yield "plan", f"{plan['name']}: {epoch} of {plan['files']:,}, {plan['ahead']:,} ahead"


def _pairs(client: object, origin: object) -> str:
    shown = [f"client {client}"] if client else []
    if isinstance(origin, Mapping):
        shown += _origin(origin)
    return "(" + ", ".join(shown) + ")" if shown else ""


def _origin(origin: Mapping[str, Any]) -> Iterator[str]:
    """What a store is doing, and what is in its way."""
    if origin.get("out_s") is not None:
        yield f"no answer for {duration(origin['out_s'])}: {origin['on_outage']}"
    if "concurrency" in origin:
        reason = origin.get("limited_by")
        limited = f" of {origin.get('concurrency_max', '?')} ({reason})" if reason else ""
        yield f"concurrency {origin['concurrency']}{limited}"
    if origin.get("in_flight"):
        background = int(origin.get("background_in_flight", 0))
        yield f"{origin['in_flight']} in flight" + (
            f" ({background} in the background)" if background else ""
        )
    if origin.get("throughput"):
        limit = origin.get("download_limit")
        yield f"{size(origin['throughput'])}/s" + (f" of at most {size(limit)}/s" if limit else "")
    if origin.get("upload_throughput"):
        yield f"{size(origin['upload_throughput'])}/s sent"
    if origin.get("demand_waiting"):
        yield f"{origin['demand_waiting']} waiting for a slot"
    if origin.get("prefix"):
        yield f"prefix {origin['prefix']}"
    if origin.get("last_error"):
        yield f"last error: {origin['last_error']}"


def duration(seconds: float) -> str:
    """The two largest of days, hours, minutes, seconds."""
    minutes, s = divmod(int(max(seconds, 0)), 60)
    hours, m = divmod(minutes, 60)
    d, h = divmod(hours, 24)
    parts = [f"{value}{unit}" for value, unit in ((d, "d"), (h, "h"), (m, "m"), (s, "s")) if value]
    return " ".join(parts[:2]) or "0s"

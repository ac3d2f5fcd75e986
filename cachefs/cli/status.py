"""The verbs about a whole mount: status, upgrade, refresh, peers, doctor, logs, log-level."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import click

from cachefs.base.errors import MountError
from cachefs.base.linux import mount_at
from cachefs.base.metrics import hit_ratios
from cachefs.base.units import about_bytes, about_files
from cachefs.cli import show
from cachefs.cli.places import Place, mountpoint, resolve_mount
from cachefs.cli.show import as_json, note, say
from cachefs.config.config import LOG_NAME
from cachefs.daemon import asking
from cachefs.daemon.mounting import canonical

FAILURES_NAMED = 2
"""Most failures in the line of a job that has ended."""

DATASETS_NAMED = 6
"""Most datasets in a line."""

FOLLOW_EVERY_S = 1.0
"""Seconds between two reads of the log that `logs -f` follows. Borrowed from tail(1), `--sleep-interval`."""

MARKS = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "problem": ("PROBLEM", "red")}


@click.command(short_help="The state of mounts.")
@mountpoint
@as_json("All values of the daemon; a list without MOUNTPOINT.")
def status(mountpoint: Path | None, as_json: bool) -> None:
    """Show the state, the cache and the requests of the mount at MOUNTPOINT, or of all mounts of this user.

    Of a mount that does not answer, or whose daemon has died, there is its mountpoint and a warning."""
    if mountpoint is not None:
        found = [asking.status_of(mountpoint)]
    else:
        found = asking.all_statuses()
        found += asking.dead_mounts(found)
    if as_json:
        show.data(found if mountpoint is None else found[0])
        return
    for number, one in enumerate(found):
        if number:
            say("")
        show.pairs(lines(one))
    if mountpoint is None:
        from cachefs.observe import doctor

        if not found:
            say("no cachefs mounts")
        for left in doctor.memory_left():
            say(f"{left.subject}: {left.found}: {left.todo}")


@click.command(short_help="Forget cached names and attributes.")
@click.argument("path", type=Place())
def refresh(path: Path) -> None:
    """Forget the cached names and attributes at PATH and below, so that their next use sends a request to the origin.

    Cached blocks of versions that have not changed stay cached.
    """
    mountpoint, relative = asking.mount_of(path)
    asking.ask(mountpoint, "refresh", 60.0, path=relative)
    note(f"{canonical(path)}: looking again")


@click.command(short_help="Replace a mount's daemon by the installed version.")
@click.argument("mountpoint", type=Place())
@as_json("The two versions, and how long programs waited.")
def upgrade(mountpoint: Path, as_json: bool) -> None:
    """Replace the daemon of MOUNTPOINT by the version that is installed now. Not for a mount with --no-restart.

    Open files stay open: programs wait for a moment and get no error. If the installed version does not start, or cannot
    take over the open files, the command says so, and nothing changes.
    """
    before, after = asking.upgrade(canonical(mountpoint))
    if as_json:
        show.data({"from": before["version"], "to": after["version"], "pause_s": after["holder"]["pause_s"]})
        return
    change = f"version {before['version']} → {after['version']}"
    note(f"{canonical(mountpoint)}: {change}, programs waited for {after['holder']['pause_s']:.2f} s")


def lines(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines of `status`, as (label, value)."""
    yield "mountpoint", str(status.get("mountpoint", "?"))
    for source in status.get("sources") or []:
        name = f"{source['name']}: " if source.get("name") else ""
        shown = [f"client {source['client']}"] if source.get("client") else []
        shown += _origin(source.get("origin") or {})
        more = f"  ({', '.join(shown)})" if shown else ""
        yield "source", f"{name}{source.get('url', '?')}{more}"
    yield "daemon", ", ".join(_daemon(status))
    for tier in status.get("tiers") or []:
        yield str(tier.get("name", "tier")), _tier(tier)
    metrics = Counter[str](status.get("metrics") or {})
    if metrics:
        yield from _counts(metrics)
    yield from _writing(status.get("uploads") or {}, metrics)
    yield from _eviction(status.get("eviction") or {}, int(status.get("pinned_bytes", 0)))
    yield from _prefetch(status.get("prefetch") or {}, metrics)
    yield from _peers(status.get("peers") or {}, metrics)
    for job in status.get("jobs") or []:
        yield f"job {job['id']}", _job(job)
    if "fuse" in status and "fuse_reason" in status:
        yield "fuse", f"{status['fuse']}: {status['fuse_reason']}"
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
        yield f"up {show.duration(time.time() - float(status['started']))}"
    if "version" in status:
        yield f"version {status['version']}"
    if "fuse" in status:
        yield f"{status['fuse']} backend"
    if "memory_bytes" in status:
        yield f"{about_bytes(status['memory_bytes'])} resident"
    if "inodes" in status:
        yield f"{status['inodes']:,} inodes"
    if "loop_pause_s" in status:
        paused = (f"{status['loop_pause_s'][over]:.2f} s" for over in ("minute", "run"))
        yield "longest pause {} ({} since the start)".format(*paused)
    if holder := status.get("holder"):
        count, kept = holder["restarts"], "" if holder["pid"] else " (its holder has died)"
        upgrades = f"{holder['handed_over']} by upgrade, " if holder["handed_over"] else ""
        pause = f" ({upgrades}longest pause {holder['longest_pause_s']:.1f} s)" if count else ""
        yield f"{count} restart{'' if count == 1 else 's'}{pause}{kept}"


def _tier(tier: Mapping[str, Any]) -> str:
    used, cap = int(tier.get("used_bytes", 0)), int(tier.get("cap_bytes", 0))
    share = f" ({100 * used / cap:.0f} %)" if cap else ""
    state = f", {tier['state']}" if tier.get("state") else ""
    bytes_used = f"{about_bytes(used)} of {about_bytes(cap)}{share}"
    return f"{bytes_used}, {int(tier.get('blocks', 0)):,} blocks{state}  {tier.get('path', '')}".rstrip()


def _counts(metrics: Counter[str]) -> Iterator[tuple[str, str]]:
    overall, through_daemon = hit_ratios(metrics)
    if overall is not None:
        names = {
            "passthrough_blocks": "in passthrough",
            "page_cache_blocks": "in the page cache",
            "ram_hits": "RAM",
            "ssd_hits": "SSD",
            "misses": "waited for",
        }
        parts = [f"{metrics[name]:,} {words}" for name, words in names.items() if metrics[name]]
        total = sum(metrics[name] for name in (*names, "heap_hits"))
        daemon = ""
        if through_daemon is not None and (metrics["passthrough_blocks"] or metrics["page_cache_blocks"]):
            daemon = f"; {100 * through_daemon:.1f} % of those read through the daemon"
        yield "hits", f"{100 * overall:.1f} % of {total:,} blocks ({', '.join(parts)}){daemon}"
    requests = ", ".join(f"{metrics[f'origin_{kind}']:,} {kind.upper()}" for kind in ("get", "head", "list"))
    yield "origin", f"{requests}, {about_bytes(metrics['origin_bytes'])} received"
    trouble = {
        "origin_retries": "retries",
        "origin_throttled": "throttled",
        "origin_errors": "failed requests",
        "checksum_failures": "checksum failures",
        "tier_errors": "tier errors",
        "fuse_errors": "failed operations",
    }
    counts = [f"{metrics[name]:,} {words}" for name, words in trouble.items() if metrics[name]]
    if counts:
        yield "trouble", ", ".join(counts)
    messages = f"{metrics['fuse_open']:,} opens, {metrics['fuse_read']:,} reads"
    yield "readers", f"{messages}, {about_bytes(metrics['fuse_read_bytes'])} returned"


def _mode(status: Mapping[str, Any]) -> str:
    if status["read_only"]:
        return "read-only"
    writeback = (status.get("uploads") or {}).get("writeback")
    return f"writable, {'here first (--writeback)' if writeback else 'to the origin at close and fsync'}"


def _writing(uploads: Mapping[str, Any], metrics: Counter[str]) -> Iterator[tuple[str, str]]:
    if not uploads:
        return
    if metrics["fuse_write"] or metrics["origin_bytes_sent"]:
        written, sent = about_bytes(metrics["fuse_write_bytes"]), about_bytes(metrics["origin_bytes_sent"])
        puts = f"{metrics['origin_put']:,} PUT, {metrics['origin_put_part']:,} parts"
        others = f"{metrics['origin_copy']:,} COPY, {metrics['origin_delete']:,} DELETE"
        yield "written", f"{written} through the daemon, {sent} sent in {puts}; {others}"
    if uploads.get("pending"):
        failed = uploads.get("failed")
        trouble = f", {failed:,} of them failed: {uploads.get('last_error')}" if failed else ""
        pending = f"{about_files(uploads['pending'])}, {about_bytes(uploads['pending_bytes'])}"
        yield "uploading", f"{pending}, for {show.duration(uploads.get('oldest_s', 0))}{trouble}"


def _peers(peers: Mapping[str, Any], metrics: Counter[str]) -> Iterator[tuple[str, str]]:
    members = peers.get("members")
    if members is None:
        return
    others = [member for member in members if not member["here"]]
    states = {state: sum(member["state"] == state for member in others) for state in ("suspect", "dead")}
    incompatible = Counter(other["state"] for other in peers.get("incompatible", ()))
    trouble = "".join(f", {number} {state}" for state, number in {**states, **incompatible}.items() if number)
    listens = f", listening on {peers['listen']}" if peers.get("listen") else ", giving nothing"
    group = f"{len(others)} others in group {peers.get('group')}{trouble}"
    yield "peers", f"{group}{listens}, from {peers.get('from')}"
    moved = f"{about_bytes(metrics['peer_bytes_in'])} from others, {about_bytes(metrics['peer_bytes_out'])} to them"
    yield "shared", f"{moved}; {metrics['peer_misses']:,} blocks they did not give"


def _job(job: Mapping[str, Any]) -> str:
    files = f"{job['done_files']:,} of {job['files']:,} files"
    failed = f", {job['failed']:,} failed" if job["failed"] else ""
    if job.get("state", "running") == "running":
        size = f"{about_bytes(job['done_bytes'])} of {about_bytes(job['bytes'])}{'' if job['walked'] else ' so far'}"
        return f"{job['action']}: {files}, {size}, for {show.duration(job['seconds'])}{failed}"
    failures = [job["error"]] if job.get("error") else list(job.get("failures") or [])
    why = f": {'; '.join(failures[:FAILURES_NAMED])}" if failures else ""
    ago = show.duration(time.time() - job["ended"])
    return f"{job['action']}: {job['state']} {ago} ago, {files}{failed}{why}"


def _eviction(eviction: Mapping[str, Any], pinned: int) -> Iterator[tuple[str, str]]:
    """The policy and the mode of each dataset, the epochs of datasets that are read in epochs, and the pinned bytes."""
    if eviction.get("policy"):
        modes = [
            f"{dataset.get('name') or '/'} by {'epochs' if dataset.get('mode') == 'epoch' else 'last use'}"
            for dataset in eviction.get("datasets") or []
        ]
        more = [f"{len(modes) - DATASETS_NAMED} more"] if len(modes) > DATASETS_NAMED else []
        named = f": {', '.join(modes[:DATASETS_NAMED] + more)}" if modes else ""
        yield "eviction", f"{eviction['policy']}{named}"
    shown = [d for d in eviction.get("datasets") or [] if d.get("mode") == "epoch" and d.get("epoch", 1) > 1]
    for dataset in shown[:3]:
        ratio = dataset.get("hit_ratio")
        if ratio is None:
            ratio = dataset.get("last_hit_ratio")
        hits = f", {100 * ratio:.0f} % cached" if ratio is not None else ""
        size = about_bytes(dataset.get("footprint_bytes", 0))
        read = f"{100 * dataset.get('used_share', 0):.0f} % of {size} read{hits}"
        yield "epochs", f"{dataset.get('name') or '/'}: epoch {dataset['epoch']}, {read}"
    if pinned:
        yield "pinned", about_bytes(pinned)


def _prefetch(prefetch: Mapping[str, Any], metrics: Counter[str]) -> Iterator[tuple[str, str]]:
    fetched, used = metrics["prefetch_files"], metrics["prefetch_used_files"]
    if prefetch and (fetched or prefetch.get("in_flight")):
        paused = f", pausing: {prefetch['paused']}" if prefetch.get("paused") else ""
        unused = about_bytes(prefetch.get("unused_bytes", 0))
        yield "prefetch", f"{fetched:,} files prefetched, {used:,} used, {unused} waiting{paused}"
    for plan in prefetch.get("plans") or []:
        begun = plan["epoch"] is not None
        at = f"epoch {plan['epoch']}, file {plan['position']:,}" if begun else "no order yet"
        yield "plan", f"{plan['name']}: {at} of {plan['files']:,}, {plan['ahead']:,} ahead"


def _origin(origin: Mapping[str, Any]) -> Iterator[str]:
    """The state of an origin's requests, and their limits."""
    if origin.get("out_s") is not None:
        yield f"no answer for {show.duration(origin['out_s'])}: {origin['on_outage']}"
    if "concurrency" in origin:
        reason = origin.get("limited_by")
        limited = f" of {origin.get('concurrency_max', '?')} ({reason})" if reason else ""
        yield f"concurrency {origin['concurrency']}{limited}"
    if origin.get("in_flight"):
        background = origin.get("background_in_flight")
        yield f"{origin['in_flight']} in flight{f' ({background} in the background)' if background else ''}"
    if origin.get("throughput"):
        limit = origin.get("download_limit")
        yield f"{about_bytes(origin['throughput'])}/s{f' of at most {about_bytes(limit)}/s' if limit else ''}"
    if origin.get("upload_throughput"):
        yield f"{about_bytes(origin['upload_throughput'])}/s sent"
    if origin.get("demand_waiting"):
        yield f"{origin['demand_waiting']} waiting for a slot"
    if origin.get("prefix"):
        yield f"prefix {origin['prefix']}"
    if origin.get("last_error"):
        yield f"last error: {origin['last_error']}"


PEER_HEADS = ("MEMBER", "ID", "#SHARE", "STATE", "#IN", "#OUT", "#LATENCY", "FAILURES")


@click.command(short_help="The nodes that share their cache with a mount.")
@mountpoint
@as_json("All data as JSON.")
def peers(mountpoint: Path | None, as_json: bool) -> None:
    """Show the members that the mount at MOUNTPOINT (the only one, if left out) shares its cache with.

    IN are the bytes received from each, OUT the bytes sent, LATENCY the time until replies began. Bytes that daemons of one
    machine received count for all of them. A node has the same ID, and so the same share, under any address.

    Below the members are the listed nodes that share nothing, and why.
    """
    status = _status(mountpoint)
    found = status.get("peers")
    if found is None:
        raise MountError(f"{status['mountpoint']} does not share its cache: mount it with --peers")
    if as_json:
        show.data(found)
        return
    rows = [
        (
            ", ".join(member["addresses"]),
            member["id"][:8],
            f"{100 * member['share']:.1f} %",
            "this node" if member["here"] else member["state"],
            about_bytes(member["bytes_in"]),
            about_bytes(member["bytes_out"]),
            f"{1000 * member['latency_s']:.1f} ms",
            ", ".join(f"{count:,} {kind}" for kind, count in member["failures"].items()) or "-",
        )
        for member in found["members"]
    ]
    rows += [(other["name"], "-", "-", other["state"], "-", "-", "-", "-") for other in found["incompatible"]]
    if found["trouble"]:
        say(f"cachefs: {found['trouble']}", err=True)
    elif not rows:
        say("cachefs: no node is known yet, not even this one", err=True)
    for other in found["incompatible"]:
        if other["wrong"]:
            say(f"cachefs: {other['name']} {other['why']}", err=True)
    say(*show.table(PEER_HEADS, rows))


def _status(mountpoint: Path | None) -> Mapping[str, Any]:
    if mountpoint is not None:
        return asking.status_of(mountpoint)
    sharing = [status for status in asking.all_statuses() if status.get("peers")]
    if len(sharing) != 1:
        raise MountError(f"{len(sharing) or 'no'} mounts share with others: name one")
    return sharing[0]


@click.command(short_help="Find what is wrong or slow.")
@mountpoint
@click.option("--cache-dir", type=Place(), help="Check this planned cache directory, before any mount.")
@click.option("--no-speed", is_flag=True, help="Write nothing: do not measure the cache's disk.")
@as_json("A list of objects: level, subject, found, todo.")
def doctor(mountpoint: Path | None, cache_dir: Path | None, no_speed: bool, as_json: bool) -> int:
    """Check this machine and the mount at MOUNTPOINT (all of them, if left out): kernel, rights, limits, the cache's disk,
    the origins, the peers. Exits with 1 if there is a problem.

    The output has no secrets and can be shown to others. The disk's speed is measured with 64 MiB.
    """
    from cachefs.observe import doctor

    findings = [*doctor.examine(mountpoint, cache_dir, measure=not no_speed)]
    if as_json:
        show.data([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            mark, color = MARKS[finding.level]
            show.marked(mark, color, f"{finding.subject}: {finding.found}")
            if finding.todo:
                say(f"         → {finding.todo}")
    return int(any(finding.level == "problem" for finding in findings))


@click.command("log-level", short_help="Change how much a mount logs.")
@click.argument("level", type=click.Choice(["debug", "info", "warning", "error"]))
@mountpoint
def log_level(level: str, mountpoint: Path | None) -> None:
    """Set the level of MOUNTPOINT's log to LEVEL, until the mount ends or the level is set again."""
    mount = resolve_mount(mountpoint)
    asking.ask(mount, "log_level", level=level)
    note(f"{mount}: logs at {level}")


@click.command(short_help="Print the log of a mount.")
@click.argument("place", required=False, type=Place(), metavar="[MOUNTPOINT]")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines as they are logged.")
@click.option(
    "-n", "--lines", "last", type=click.IntRange(0), help="Only the last N lines.  [all]", metavar="N"
)
@as_json("An object a line: time, level, logger, message, as far as the line has them.")
def logs(place: Path | None, follow: bool, last: int | None, as_json: bool) -> None:
    """Print the log file of the mount at MOUNTPOINT, or of a daemon that has died, by its cache directory.

    The log is rotated at 10 MiB; older lines are in cachefs.log.1 to .3 beside it.
    """
    from cachefs.base.logs import entry_of

    path = _log_of(place)

    def show_line(line: str) -> None:
        line = line.rstrip("\n")
        if as_json:
            show.data(entry_of(line), line=True)
        else:
            say(line)

    if os.path.exists(path) and not os.path.isfile(path):
        # Opening a pipe may wait, and reading it takes the lines away from its reader.
        raise MountError(f"the log {path} is a pipe or a device: what was written to it cannot be read again")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in deque(file, maxlen=last):
                show_line(line)
            if follow:
                _follow(path, file, show_line)
    except OSError as exc:
        if show.is_of_output(exc):
            raise
        raise MountError(f"cannot read the log {path}: {exc.strerror}") from exc


def _log_of(place: Path | None) -> Path:
    if place is not None and mount_at(canonical(place)) is None and os.path.isfile(place / LOG_NAME):
        return place / LOG_NAME
    mount = resolve_mount(place)
    try:
        path = asking.ask(mount, "status").get("log_file")
    except MountError as exc:
        raise MountError(f"{exc}; cachefs logs CACHE_DIR prints what a daemon has logged there") from exc
    if not path:
        raise MountError(f"{mount} logs to the stderr of its daemon: ask its service manager (journalctl -u)")
    return Path(path)


def _follow(path: Path, file: IO[str], show_line: Callable[[str], None]) -> None:
    """Show new lines until Ctrl-C, also after a rotation."""
    try:
        while True:
            while line := file.readline():
                show_line(line)
            if os.path.exists(path) and os.stat(path).st_ino != os.fstat(file.fileno()).st_ino:
                file.close()
                file = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115 (closed at the next one)
            else:
                time.sleep(FOLLOW_EVERY_S)
    except KeyboardInterrupt:
        return


COMMANDS = (status, upgrade, refresh, peers, doctor, logs, log_level)

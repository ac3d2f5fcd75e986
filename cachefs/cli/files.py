"""The verbs about files: info, why, ls, du, locate.

`ls` and `du` read the mount's extended attributes, so they also work where the daemon's socket is not visible, as in a
container.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import click

from cachefs.base import client
from cachefs.base.errors import ConfigError, MountError
from cachefs.base.ledger import REASONS
from cachefs.base.units import about_bytes, about_share
from cachefs.cli import show
from cachefs.cli.places import Place
from cachefs.cli.show import as_json, say
from cachefs.daemon import asking

EXTENTS_LISTED = 64
"""Most rows of `why`; --json has all."""

CACHED = "user.cachefs.cached"


@click.command("ls", short_help="Show how much of each file is cached.")
@click.argument("path", type=Place())
@as_json("A list of objects: path, size, cached.")
def list_cached(path: Path, as_json: bool) -> None:
    """Show size, cached bytes and share of the file PATH, or of each file in the directory PATH."""
    # Refuses a path outside of a mount, where reading the attribute would raise an unclear errno.
    asking.mount_of(path)
    try:
        known = _measure(path)
        rows = [(str(path), path, known)]
        if known is None:
            entries = sorted(path.iterdir())
            rows = [(entry.name, entry, _measure(entry, may_be_missing=True)) for entry in entries]
    except OSError as exc:
        raise _failure(path, exc) from exc
    if as_json:
        show.data([{"path": str(entry), **known._asdict()} for _, entry, known in rows if known])
        return
    for name, _, known in rows:
        say(_row(known, name) if known else f"{'-':>10} {'-':>10} {'-':>7}  {name}/")


@click.command("du", short_help="Add up how much of a directory is cached.")
@click.argument("path", type=Place())
@click.option("-d", "--max-depth", type=click.IntRange(0), help="Show directories down to this depth.")
@click.option("-s", "--summarize", is_flag=True, help="Show the total alone.")
@as_json("A list of objects: path, files, size, cached.")
def add_up(path: Path, max_depth: int | None, summarize: bool, as_json: bool) -> None:
    """Add up size and cached bytes of the files below PATH, directory by directory, the total last."""
    if summarize and max_depth is not None:
        raise ConfigError("--summarize shows the total alone, so it excludes --max-depth")
    asking.mount_of(path)  # as in `ls`
    found: list[dict[str, Any]] = []
    deepest = 0 if summarize else max_depth

    def visit(path: Path, depth: int) -> tuple[int, _Measured]:
        """Returns (number of files, their bytes)."""
        known, files = _measure(path, may_be_missing=depth > 0), 1
        if known is None:
            below = [visit(entry, depth + 1) for entry in sorted(path.iterdir())]
            files = sum(count for count, _ in below)
            known = _Measured(sum(each.size for _, each in below), sum(each.cached for _, each in below))
        elif depth:
            return files, known
        if deepest is None or depth <= deepest:
            found.append({"path": str(path), "files": files, **known._asdict()})
            if not as_json:
                say(_row(known, str(path)))
        return files, known

    try:
        visit(path, 0)
    except OSError as exc:
        if show.is_of_output(exc):
            raise
        raise _failure(path, exc) from exc
    if as_json:
        show.data(found)


def _failure(path: Path, exc: OSError) -> MountError:
    if exc.errno == errno.ENOTCONN:
        asking.ask(asking.mount_of(path)[0], "status")  # raises what to do, if the daemon has died
    return MountError(f"{exc.filename or path}: {exc.strerror}")


class _Measured(NamedTuple):
    """Bytes of files, and those of them that are cached."""

    size: int
    cached: int


def _measure(path: Path, *, may_be_missing: bool = False) -> _Measured | None:
    """The bytes of a file; None for a directory, zeros for a missing file that `may_be_missing`."""
    try:
        stats = path.stat()
        is_directory = stat.S_ISDIR(stats.st_mode)
        return None if is_directory else _Measured(stats.st_size, int(os.getxattr(path, CACHED)))
    except FileNotFoundError:
        if not may_be_missing:
            raise
        return _Measured(0, 0)


def _row(known: _Measured, name: str) -> str:
    share = about_share(known.cached, known.size)
    return f"{about_bytes(known.cached):>10} {about_bytes(known.size):>10} {share:>7}  {name}"


@click.command(short_help="Which nodes have cached files.")
@click.argument("paths", nargs=-1, required=True, metavar="PATH…", type=Place())
@as_json("A list of objects: path, files, bytes, nodes, unreachable.")
def locate(paths: tuple[Path, ...], as_json: bool) -> None:
    """Show how many bytes of the files at and below each PATH each node has cached."""
    answers = []
    for path in paths:
        mountpoint, relative = asking.mount_of(path)
        answers.append({"path": str(path), **asking.ask(mountpoint, "locate", 60.0, path=relative)})
    if as_json:
        show.data(answers)
        return
    rows = []
    for answer in answers:
        size = answer["bytes"]
        for node, cached in sorted(answer["nodes"].items()):
            held, share = about_bytes(cached), about_share(cached, size)
            if node in answer["unreachable"]:
                held = share = "?"
            rows.append((held, about_bytes(size), share, node, answer["path"]))
    say(*show.table(("#HELD", "#SIZE", "#SHARE", "NODE", "PATH"), rows))
    silent = {node: why for answer in answers for node, why in answer["unreachable"].items()}
    for why in silent.values():
        say(f"cachefs: {why}", err=True)


# -- why -------------------------------------------------------------------------------------------


def _explanation(path: Path) -> dict[str, Any] | None:
    """The daemon's answer to `explain`; None for a directory."""
    mountpoint, relative = asking.mount_of(path)
    try:
        known: dict[str, Any] = asking.ask(mountpoint, "explain", 60.0, path=relative)
    except client.ControlError as exc:
        if "is a directory" in str(exc) or not relative:
            return None
        raise
    return known


@click.command(short_help="Object, size and cached bytes of a file or directory.")
@click.argument("path", type=Place())
@as_json()
def info(path: Path, as_json: bool) -> None:
    """Show which object the file PATH is, and how much of it is cached. For a directory, show the sums of its files."""
    known = _explanation(path)
    if known is None:
        mountpoint, relative = asking.mount_of(path)
        located = asking.ask(mountpoint, "locate", 60.0, path=relative)
        known = {"path": relative, **located}
        lines = [
            ("path", f"{mountpoint / relative}/"),
            ("files", f"{located['files']:,}"),
            ("size", about_bytes(located["bytes"])),
            *((f"on {node}", _of(part, located["bytes"])) for node, part in sorted(located["nodes"].items())),
        ]
    else:
        copies = [copy for row in known.pop("extents") for copy in row["tiers"]]
        known["pinned"] = any(copy["pinned"] for copy in copies)
        tiers = known["tiers"] = Counter[str]()
        for copy in copies:
            tiers[copy["tier"]] += copy["blocks"]
        reader = f"the kernel, from {known['passthrough_on']}" if known["passthrough_on"] else "the daemon"
        lines = [
            ("path", str(path)),
            ("object", f"{known['source']}/{known['key']}"),
            ("version", known["etag"]),
            ("size", f"{known['size']:,} bytes in {known['blocks']:,} blocks"),
            ("dataset", known["dataset"] or "/"),
            ("cached", _of(known["cached_bytes"], known["size"])),
            *((f"on {tier}", f"{count:,} blocks") for tier, count in tiers.items()),
            ("pinned", "yes" if known["pinned"] else "no"),
            ("read by", reader),
        ]
    if as_json:
        show.data(known)
        return
    show.pairs(lines)


def _of(part: int, whole: int) -> str:
    return f"{about_bytes(part)} of {about_bytes(whole)} ({about_share(part, whole)})"


@click.command(short_help="Why a file is as fast or slow as it is.")
@click.argument("path", type=Place())
@as_json("All extents as JSON.")
def why(path: Path, as_json: bool) -> None:
    """Show where each part of the file PATH is, and why it was not cached when it was last read.

    A part is an extent of 16 blocks. The daemon remembers the reasons of some thousand extents.
    """
    known = _explanation(path)
    if known is None:
        raise MountError(f"{path} is a directory: name a file, or ask cachefs info")
    if as_json:
        show.data(known)
        return
    for line in explain(known, time.time()):
        say(line)


def explain(known: Mapping[str, Any], now: float) -> Iterator[str]:
    """The lines of `why`: the file, then its extents. Adjacent extents with equal text share a line."""
    yield f"{known['key']}: {_of(known['cached_bytes'], known['size'])} here"
    if known["passthrough_on"]:
        yield f"whole and verified on {known['passthrough_on']}: the kernel reads it by itself from the next open on"
    elif known["cached_bytes"] >= known["size"] > 0:
        yield (
            "whole, but in several tiers, not verified yet, or only in memory where the origin can be written: it is read "
            "through the daemon"
        )
    texts = ((_extent(row, now), row["extent"]) for row in known["extents"])
    runs = [(text, [number for _, number in run]) for text, run in groupby(texts, itemgetter(0))]
    for text, numbers in runs[:EXTENTS_LISTED]:
        first, last = numbers[0], numbers[-1]
        number = f"extent {first}" if first == last else f"extents {first}-{last}"
        yield f"{number:<16}  {text}"
    left = len(runs) - EXTENTS_LISTED
    if left > 0 or known["left_out"]:
        yield f"… and {max(left, 0) + known['left_out']:,} more: --json has them"
    reasons = {row["last_miss"]["reason"] for row in known["extents"] if row["last_miss"]}
    for reason in REASONS:
        if reason in reasons:
            yield f"{reason}: {REASONS[reason]}"


def _extent(row: Mapping[str, Any], now: float) -> str:
    parts = []
    for copy in row["tiers"]:
        if copy["blocks"]:
            more = [key.replace("_", "-") for key in ("pinned", "remote_owned") if copy[key]]
            if copy["verified"] < copy["blocks"]:
                more.append("not verified yet")
            count = "" if copy["blocks"] == row["blocks"] else f" {copy['blocks']} of {row['blocks']} blocks"
            parts.append(f"{copy['tier']}{count}{' (' + ', '.join(more) + ')' if more else ''}")
    if row["on_its_way"]:
        parts.append(f"{row['on_its_way']} blocks in flight")
    if not parts:
        parts.append("not here")
    if row["owner"]:
        parts.append(f"owned by {row['owner']}")
    miss = row["last_miss"]
    if miss:
        asked = f", asked {', then '.join(miss['asked'])}" if miss["asked"] else ""
        parts.append(f"missed {_ago(now - miss['at'])} ago: {miss['reason']}{asked}")
    return "; ".join(parts)


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


COMMANDS = (list_cached, add_up, info, why, locate)

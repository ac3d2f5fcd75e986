"""The verbs that explain: info, why, doctor, log-level, completion."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from cachefs.cli_look import Place, mount_meant
from cachefs.cli_say import say
from cachefs.errors import ConfigError, MountError
from cachefs.ledger import REASONS
from cachefs.units import about_bytes, about_share, printable

EXTENTS_LISTED = 64
"""Rows of `why`, without --json."""


def _explained(path: Path) -> dict[str, Any] | None:
    """What the daemon knows of a file; None for a directory."""
    from cachefs import asking, control

    mountpoint, relative = asking.mount_of(path)
    try:
        known: dict[str, Any] = asking.ask(mountpoint, "explain", 60.0, path=relative)
    except control.ControlError as exc:
        if "is a directory" in str(exc) or not relative:
            return None
        raise
    return known


@click.command(short_help="What is known of a file or directory.")
@click.argument("path", type=Place())
@click.option("--json", "as_json", is_flag=True, help="The same, as JSON.")
def info(path: Path, as_json: bool) -> None:
    """Show which object PATH is, and how much of it is cached; of a directory, all below it."""
    from cachefs import asking

    known = _explained(path)
    if known is None:
        mountpoint, relative = asking.mount_of(path)
        held = asking.ask(mountpoint, "locate", 60.0, path=relative)
        known = {"path": relative, **held}
        lines = [
            ("path", f"{mountpoint / relative}/"),
            ("files", f"{held['files']:,}"),
            ("size", about_bytes(held["bytes"])),
            *((f"on {node}", _of(count, held["bytes"])) for node, count in sorted(held["nodes"].items())),
        ]
    else:
        extents = known.pop("extents")
        known["pinned"] = any(copy["pinned"] for row in extents for copy in row["tiers"])
        tiers: dict[str, int] = {}
        for row in extents:
            for copy in row["tiers"]:
                tiers[copy["tier"]] = tiers.get(copy["tier"], 0) + copy["blocks"]
        known["tiers"] = tiers
        lines = [
            ("path", str(path)),
            ("object", f"{known['source']}/{known['key']}"),
            ("version", known["etag"]),
            ("size", f"{known['size']:,} bytes in {known['blocks']:,} blocks"),
            ("dataset", known["dataset"] or "/"),
            ("cached", _of(known["cached_bytes"], known["size"])),
            *((f"on {tier}", f"{count:,} blocks") for tier, count in tiers.items()),
            ("pinned", "yes" if known["pinned"] else "no"),
            ("read by", f"the kernel, from {known['lendable_on']}" if known["lendable_on"] else "the daemon"),
        ]
    if as_json:
        click.echo(json.dumps(known, indent=2))
        return
    for name, value in lines:
        say(f"{name:<10}  {printable(value)}")


def _of(part: int, whole: int) -> str:
    return f"{about_bytes(part)} of {about_bytes(whole)} ({about_share(part, whole)})"


@click.command(short_help="Why a file is as fast or slow as it is.")
@click.argument("path", type=Place())
@click.option("--json", "as_json", is_flag=True, help="Of every extent, as JSON.")
def why(path: Path, as_json: bool) -> None:
    """Show where each part of the file PATH is, and why it was not here the last time that somebody wanted it.

    A part is an extent of 16 blocks. Reasons are remembered for some thousand extents, since the mount began.
    """
    known = _explained(path)
    if known is None:
        raise MountError(f"{path} is a directory: name a file, or ask cachefs info")
    if as_json:
        click.echo(json.dumps(known, indent=2))
        return
    for line in explain(known, time.time()):
        say(printable(line))


def explain(known: Mapping[str, Any], now: float) -> Iterator[str]:
    """The answer in words: the whole, then each extent, those that are alike in one line."""
    yield f"{known['key']}: {_of(known['cached_bytes'], known['size'])} here"
    if known["lendable_on"]:
        yield f"whole and verified on {known['lendable_on']}: the kernel reads it by itself from the next open on"
    elif known["cached_bytes"] >= known["size"] > 0:
        yield "whole, but over several tiers or not verified yet: it is read through the daemon"
    runs: list[tuple[int, int, str]] = []
    for row in known["extents"]:
        said = _extent(row, now)
        if runs and runs[-1][2] == said:
            runs[-1] = runs[-1][0], row["extent"], said
        else:
            runs.append((row["extent"], row["extent"], said))
    for first, last, said in runs[:EXTENTS_LISTED]:
        number = f"extent {first}" if first == last else f"extents {first}-{last}"
        yield f"{number:<16}  {said}"
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
            more = [word for word in ("pinned", "borrowed") if copy[word]]
            if copy["verified"] < copy["blocks"]:
                more.append("not verified yet")
            some = "" if copy["blocks"] == row["blocks"] else f" {copy['blocks']} of {row['blocks']} blocks"
            parts.append(f"{copy['tier']}{some}{' (' + ', '.join(more) + ')' if more else ''}")
    if row["on_its_way"]:
        parts.append(f"{row['on_its_way']} blocks on their way")
    if not parts:
        parts.append("not here")
    if row["owner"]:
        parts.append(f"kept by {row['owner']}")
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


@click.command(short_help="Look for what is wrong or slow.")
@click.argument("mountpoint", required=False, type=Place())
@click.option("--cache-dir", type=Place(), help="Where a cache is to be, before any mount.")
@click.option("--no-speed", is_flag=True, help="Write nothing: leave the speed of the cache's disk alone.")
@click.option("--json", "as_json", is_flag=True, help="A list of objects: level, subject, found, todo.")
def doctor(mountpoint: Path | None, cache_dir: Path | None, no_speed: bool, as_json: bool) -> int:
    """Look at this machine and at the mount at MOUNTPOINT (at all of them, if left out): kernel, rights, limits, the
    cache's disk, the stores, the peers. Exit 1 when something is wrong.

    What it prints can be shown to others: it has no secrets. The disk's speed is measured with 64 MiB.
    """
    from cachefs import doctor

    findings = [*doctor.examine(mountpoint, cache_dir, measure=not no_speed)]
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            mark = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[finding.level]
            say(f"{mark}  {finding.subject}: {printable(finding.found)}")
            if finding.todo:
                say(f"         → {printable(finding.todo)}")
    return int(any(finding.level == "problem" for finding in findings))


@click.command("log-level", short_help="Change how much a mount logs.")
@click.argument("level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.argument("mountpoint", required=False, type=Place())
def log_level(level: str, mountpoint: Path | None) -> None:
    """Have the mount at MOUNTPOINT log at LEVEL from now on, until it ends or is told otherwise."""
    from cachefs import asking

    mount = mount_meant(mountpoint)
    asking.ask(mount, "log_level", level=level)
    say(f"{mount}: logs at {level}", err=True)


@click.command(short_help="Complete cachefs commands in a shell.")
@click.argument("shell", required=False, type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print what a shell has to read for completing cachefs commands: SHELL is that of $SHELL, if left out.

    \b
    bash:  cachefs completion bash > ~/.local/share/bash-completion/completions/cachefs
    zsh:   cachefs completion zsh > ~/.zfunc/_cachefs      (with fpath+=~/.zfunc before compinit)
    fish:  cachefs completion fish > ~/.config/fish/completions/cachefs.fish
    """
    from click.shell_completion import get_completion_class

    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    kind = get_completion_class(name)
    if kind is None:
        raise ConfigError(f"no completion for {name or 'this shell'}: name bash, zsh or fish")
    root = ctx.find_root().command
    click.echo(kind(root, {}, "cachefs", "_CACHEFS_COMPLETE").source())


COMMANDS = (info, why, doctor, log_level, completion)

"""The verbs `peers` and `locate`: who shares with a mount, and who holds what."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from cachefs.cli_look import Place
from cachefs.cli_say import say
from cachefs.errors import MountError
from cachefs.units import about_bytes, about_share, printable


@click.command(short_help="Who shares with a mount.")
@click.argument("mountpoint", required=False, type=Place())
@click.option("--json", "as_json", is_flag=True, help="Everything that is known of them.")
def peers(mountpoint: Path | None, as_json: bool) -> None:
    """Show the members that the mount at MOUNTPOINT (the only one, if left out) shares its cache with.

    IN is what it got from each, OUT what it gave, LATENCY how long answers took to begin. What daemons of one
    machine took is counted for all of them. A node keeps its ID, and with it its share, under any address.

    Below the members are those that are listed and share nothing, and why.
    """
    status = _status(mountpoint)
    found = status.get("peers")
    if found is None:
        raise MountError(f"{status['mountpoint']} shares with nobody: mount it with --peers")
    if as_json:
        click.echo(json.dumps(found, indent=2))
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
    rows += [(other["name"], "-", "-", other["state"], "-", "-", "-", "-") for other in found["apart"]]
    if found["trouble"]:
        say(f"cachefs: {printable(found['trouble'])}", err=True)
    elif not rows:
        say("cachefs: no node is known yet, not even this one", err=True)
    for other in found["apart"]:
        if other["wrong"]:
            say(f"cachefs: {other['name']} {printable(other['why'])}", err=True)
    _table(("MEMBER", "ID", "SHARE", "STATE", "IN", "OUT", "LATENCY", "FAILURES"), rows)


@click.command(short_help="Which nodes hold files.")
@click.argument("paths", nargs=-1, required=True, metavar="PATH…", type=Place())
@click.option(
    "--json", "as_json", is_flag=True, help="A list of objects: path, files, bytes, nodes, unreachable."
)
def locate(paths: tuple[Path, ...], as_json: bool) -> None:
    """Show how many bytes of the files at and below each PATH which node holds."""
    from cachefs import asking

    answers = []
    for path in paths:
        mountpoint, relative = asking.mount_of(path)
        answers.append({"path": str(path), **asking.ask(mountpoint, "locate", 60.0, path=relative)})
    if as_json:
        click.echo(json.dumps(answers, indent=2))
        return
    rows = []
    for answer in answers:
        for node, held in sorted(answer["nodes"].items()):
            lost = node in answer["unreachable"]
            rows.append(
                (
                    *("?" if lost else about_bytes(held), about_bytes(answer["bytes"])),
                    *("?" if lost else about_share(held, answer["bytes"]), node, printable(answer["path"])),
                )
            )
    _table(("HELD", "SIZE", "SHARE", "NODE", "PATH"), rows)
    silent = {node: why for answer in answers for node, why in answer["unreachable"].items()}
    for why in silent.values():
        say(f"cachefs: {printable(why)}", err=True)


def _status(mountpoint: Path | None) -> Mapping[str, Any]:
    from cachefs import asking

    if mountpoint is not None:
        return asking.status_of(mountpoint)
    sharing = [status for status in asking.all_statuses() if status.get("peers")]
    if len(sharing) != 1:
        raise MountError(f"{len(sharing) or 'no'} mounts share with others: name one")
    return sharing[0]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as they have to be."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        say("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


COMMANDS = (peers, locate)

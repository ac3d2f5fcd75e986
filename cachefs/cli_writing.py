"""The verbs that have to do with writing: flush, recover."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cachefs.cli_look import Place
from cachefs.cli_say import say
from cachefs.errors import ConfigError, MountError, OriginFailed
from cachefs.units import FOREVER, about_bytes, about_files, parse_duration, printable

if TYPE_CHECKING:
    from cachefs.upload.orphans import Orphan


@click.command(short_help="Wait until what was written is in the store.")
@click.argument("path", required=False, type=Place())
@click.option("--timeout", metavar="TIME", help="Give up after this long: 60s, 5m.  [forever]")
def flush(path: Path | None, timeout: str | None) -> None:
    """Upload what was written at and below PATH (below every mount of this user, if left out) now, and wait for it.

    Exits with 1 and says why when some of it does not reach the store; that is tried again all the same.
    """
    from cachefs import asking

    try:
        deadline_s = FOREVER if timeout is None else parse_duration(timeout)
    except ValueError as exc:
        raise ConfigError(f"--timeout: {timeout!r} is {exc}") from None
    if path is not None:
        wanted = [asking.mount_of(path)]
        _must_exist(path)
    else:
        writing = (s for s in asking.all_statuses() if s.get("uploads") or s.get("unsent"))
        wanted = [(Path(s["mountpoint"]), "") for s in writing]
    for mountpoint, relative in wanted:
        left = asking.flush(mountpoint, relative, deadline_s, show_left)
        if left["files"]:
            raise OriginFailed(f"{mountpoint}: {asking.describe(left)}")
        say(f"{printable(str(path or mountpoint))}: all of it is in the store", err=True)


def _must_exist(path: Path) -> None:
    """What was misspelt is not in the store. Where nobody can say, the daemon tells."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise MountError(f"{path}: no such file or directory") from None
    except OSError:
        pass


def show_left(left: Mapping[str, Any]) -> None:
    """For who watches a terminal."""
    if sys.stderr.isatty():
        line = f"{about_files(left['files'])}, {about_bytes(left['bytes'])} to go "
        click.echo(f"\r\033[K{line}", nl=False, err=True)


@click.command(short_help="Find what was written and no journal accounts for.")
@click.argument("place", type=Place())
@click.option(
    "--to", metavar="DIR", type=Place(), help="Copy the files there: a mount uploads them under their names."
)
@click.option("--remove", is_flag=True, help="Do not keep what was copied.")
def recover(place: Path, to: Path | None, remove: bool) -> None:
    """List the files of the cache directory (or mount) PLACE whose journal was lost, or copy them to where they belong.

    A mount keeps such files aside instead of removing them. Nothing that exists is replaced. Exits with 1 when a file
    could not be copied.
    """
    from cachefs import recovering
    from cachefs.upload import orphans

    if remove and to is None:
        raise ConfigError("--remove goes with --to")
    state_dir = recovering.state_dir_of(place)
    with orphans.unused(state_dir) as unused:
        found = orphans.found(state_dir, waiting=unused)
        if not found:
            say(f"{printable(str(state_dir))}: nothing is kept aside", err=True)
        if to is None:
            for orphan in found:
                say(_row(orphan, recovering.name_of(orphan)))
            return
        failed = 0
        for orphan, copied, why in recovering.copy(found, recovering.Target(to), remove=remove):
            name = printable(recovering.name_of(orphan))
            failed += bool(why)
            say(f"{name}: {printable(why)}" if why else f"{name} → {printable(str(copied))}", err=bool(why))
    if failed:
        raise OriginFailed(
            f"{about_files(failed)} could not be copied, and {'are' if failed > 1 else 'is'} kept"
        )


def _row(orphan: Orphan, name: str) -> str:
    when = datetime.fromtimestamp(orphan.mtime_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    state = "the next mount decides" if orphan.waiting else f"in {orphan.path.parent.name}"
    return f"{about_bytes(orphan.size):>10}  {when}  {printable(name)}  ({state})"


COMMANDS = (flush, recover)

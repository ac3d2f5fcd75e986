"""The verb that has to do with writing: flush."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from cachefs.cli_look import Place
from cachefs.cli_say import say
from cachefs.errors import ConfigError, MountError, OriginFailed
from cachefs.units import FOREVER, about_bytes, about_files, parse_duration, printable


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


COMMANDS = (flush,)

"""The verbs about written files: flush, recover."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cachefs.base.errors import CacheUnusable, ConfigError, MountError, OriginFailed
from cachefs.base.units import FOREVER, about_bytes, about_files, printable
from cachefs.cli import show
from cachefs.cli.places import Place, parse_seconds
from cachefs.cli.show import as_json, note, say
from cachefs.daemon import asking

if TYPE_CHECKING:
    from cachefs.upload.orphans import Orphan


@click.command(short_help="Wait until written files are at the origin.")
@click.argument("path", required=False, type=Place())
@click.option("--timeout", metavar="TIME", help="Give up after this long: 60s, 5m.  [forever]")
@as_json("A list of objects: mountpoint, and what is left: files, bytes, failures.")
def flush(path: Path | None, timeout: str | None, as_json: bool) -> None:
    """Upload the written files at and below PATH now, and wait for it. Without PATH, of all mounts of this user.

    Exits with 1 and says why when a file could not be uploaded; the daemon goes on trying.
    """
    deadline_s = FOREVER if timeout is None else parse_seconds(timeout, "--timeout")
    if path is not None:
        wanted = [asking.mount_of(path)]
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise MountError(f"{path}: no such file or directory") from None
        except OSError:
            pass  # the daemon reports it
    else:
        writing = (s for s in asking.all_statuses() if s.get("uploads") or s.get("unsent"))
        wanted = [(Path(s["mountpoint"]), "") for s in writing]
    answers = []
    for mountpoint, relative in wanted:
        left = asking.flush(mountpoint, relative, deadline_s, upload_progress())
        answers.append({"mountpoint": str(mountpoint), **left})
        if left["files"]:
            break
        note(f"{path or mountpoint}: all files are at the origin")
    if as_json:
        show.data(answers)
    if answers and answers[-1]["files"]:
        raise OriginFailed(f"{answers[-1]['mountpoint']}: {asking.describe(answers[-1])}")


def upload_progress() -> Callable[[Mapping[str, Any]], None]:
    """A function that shows what is left to upload: once why it is left, and on a terminal also how much."""
    told = False

    def show_left(left: Mapping[str, Any]) -> None:
        nonlocal told
        if left["failures"] and not told:
            told = True
            note(f"waiting: {asking.describe(left)}")
        if sys.stderr.isatty() and not show.is_quiet():
            show.raw(f"\r\033[K{about_files(left['files'])}, {about_bytes(left['bytes'])} to go ", err=True)

    return show_left


@click.command(short_help="Recover written files whose journal was lost.")
@click.argument("place", type=Place())
@click.option(
    "--to", metavar="DIR", type=Place(), help="Copy the files to DIR: a mount uploads them under their names."
)
@click.option("--remove", is_flag=True, help="Remove the files that were copied.")
@as_json("A list of objects: name, size, mtime, waiting; with --to also copied, error.")
def recover(place: Path, to: Path | None, remove: bool, as_json: bool) -> None:
    """List the written files in the cache directory (or mount) PLACE whose journal was lost, or copy them.

    A mount moves such files to a directory of their own instead of removing them. While no daemon uses PLACE, the files that
    wait for the next mount are listed and copied, too. No existing file is replaced. Exits with 1 if a file could not be
    copied.
    """
    from cachefs.daemon import recovering
    from cachefs.upload import orphans

    if remove and to is None:
        raise ConfigError("--remove needs --to")
    state_dir = recovering.state_dir_of(place)
    with orphans.unused(state_dir) as unused:
        found = orphans.found(state_dir, waiting=unused)
        try:
            found = recovering.with_contents(found, state_dir) if unused else found
        except CacheUnusable as exc:
            say(str(exc), err=True)
        if not found:
            note(f"{state_dir}: no such files")
        outcomes: Iterable[recovering.Outcome] = ((orphan, None, "") for orphan in found)
        if to is not None:
            outcomes = recovering.copy(found, recovering.Target(to), remove=remove)
        failed, rows = 0, []
        for orphan, copied, why in outcomes:
            name = f"{orphan.source}/{orphan.key}" if orphan.key else orphan.path.name
            failed += bool(why)
            if as_json:
                mtime = orphan.mtime_ns / 1e9
                row = {"name": name, "size": orphan.size, "mtime": mtime, "waiting": orphan.waiting}
                rows.append({**row, "copied": copied and str(copied), "error": why})
            elif to is None:
                say(_row(orphan, name))
            else:
                say(f"{name}: {why}" if why else f"{name} → {copied}", err=bool(why))
    if as_json:
        show.data(rows)
    if failed:
        raise OriginFailed(
            f"{about_files(failed)} could not be copied, and {'are' if failed > 1 else 'is'} kept"
        )


def _row(orphan: Orphan, name: str) -> str:
    when = datetime.fromtimestamp(orphan.mtime_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    state = "waits for the next mount" if orphan.waiting else f"in {orphan.path.parent.name}"
    if orphan.content is not None:
        state = "in the journal: the next mount uploads it"
    return f"{about_bytes(orphan.size):>10}  {when}  {printable(name)}  ({state})"


COMMANDS = (flush, recover)

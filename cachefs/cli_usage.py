"""The verbs `ls` and `du`: how much of files and directories is cached, read off the mount itself.

So they work wherever the mount is seen, in a container, too, without the daemon's socket.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from cachefs.cli_look import Place
from cachefs.cli_say import say
from cachefs.errors import MountError
from cachefs.units import about_bytes, about_share, printable

CACHED = "user.cachefs.cached"

shown = click.argument("path", type=Place())
only_cached = click.option("--cached", is_flag=True, help="Accepted: it is what this shows.")


@click.command("ls", short_help="Show how much of each file is cached.")
@shown
@only_cached
@click.option("--json", "as_json", is_flag=True, help="A list of objects: path, size, cached.")
def list_cached(path: Path, cached: bool, as_json: bool) -> None:
    """Show size, cached bytes and share of the file PATH, or of each file in the directory PATH."""
    _below_a_mount(path)
    try:
        entries = sorted(os.scandir(path), key=lambda e: e.name) if path.is_dir() else [_Plain(path)]
        rows = [(*_held(entry), entry) for entry in entries]
    except OSError as exc:
        raise MountError(f"{exc.filename or path}: {exc.strerror}") from exc
    if as_json:
        files = [{"path": e.path, "size": size, "cached": held} for size, held, e in rows if not e.is_dir()]
        click.echo(json.dumps(files, indent=2))
        return
    for size, held, entry in rows:
        if entry.is_dir():
            say(f"{'-':>10} {'-':>10} {'-':>7}  {printable(entry.name)}/")
        else:
            say(_row(size, held, entry.name))


@click.command("du", short_help="Add up how much of a directory is cached.")
@shown
@only_cached
@click.option("-d", "--max-depth", type=click.IntRange(0), help="Show directories down to this depth.")
@click.option("-s", "--summarize", is_flag=True, help="Show the total alone.")
@click.option("--json", "as_json", is_flag=True, help="A list of objects: path, files, size, cached.")
def add_up(path: Path, cached: bool, max_depth: int | None, summarize: bool, as_json: bool) -> None:
    """Add up size and cached bytes of the files below PATH, directory by directory, the total last."""
    _below_a_mount(path)
    found: list[dict[str, Any]] = []
    deepest = 0 if summarize else max_depth

    def visit(directory: Any, depth: int) -> tuple[int, int, int]:
        files = size = held = 0
        if not directory.is_dir():
            files, (size, held) = 1, _held(directory)
        else:
            for entry in sorted(os.scandir(directory.path), key=lambda e: e.name):
                more = visit(entry, depth + 1) if entry.is_dir() else (1, *_held(entry))
                files, size, held = files + more[0], size + more[1], held + more[2]
        if deepest is None or depth <= deepest:
            row = {"path": directory.path, "files": files, "size": size, "cached": held}
            if as_json:
                found.append(row)
            else:
                say(_row(size, held, directory.path))
        return files, size, held

    try:
        visit(_Plain(path), 0)
    except OSError as exc:
        raise MountError(f"{exc.filename or path}: {exc.strerror}") from exc
    if as_json:
        click.echo(json.dumps(found, indent=2))


class _Plain:
    """A path that looks like an entry of a directory."""

    def __init__(self, path: Path) -> None:
        self.path = self.name = str(path)
        self._path = path

    def is_dir(self) -> bool:
        return self._path.is_dir()

    def stat(self) -> os.stat_result:
        return self._path.stat()


def _held(entry: Any) -> tuple[int, int]:
    """Size and cached bytes; nothing of either for a directory, and for a file that has just gone."""
    if entry.is_dir():
        return 0, 0
    try:
        return entry.stat().st_size, int(os.getxattr(entry.path, CACHED))
    except FileNotFoundError:
        if isinstance(entry, _Plain):
            raise
        return 0, 0


def _below_a_mount(path: Path) -> None:
    """The attribute would say so, too, but in the words of an errno."""
    from cachefs import asking

    asking.mount_of(path)


def _row(size: int, held: int, name: str) -> str:
    return f"{about_bytes(held):>10} {about_bytes(size):>10} {about_share(held, size):>7}  {printable(name)}"


COMMANDS = (list_cached, add_up)

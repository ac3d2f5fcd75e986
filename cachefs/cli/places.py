"""Arguments of verbs: mounts, paths, lists and recordings, as paths relative to their mounts; and times.

A list has one path a line, absolute, or relative to the path that is given with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from cachefs.base.errors import ConfigError, MountError
from cachefs.base.linux import Finder
from cachefs.base.units import parse_duration
from cachefs.daemon import asking
from cachefs.daemon.mounting import canonical

MOUNTS_NAMED = 8
"""Most mounts in an error message."""


class Place(click.Path):
    """The type of a path. click.Path would call stat while it parses the arguments, which may hang below a mount."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not value:
            self.fail("an empty path: is a variable not set?", param, ctx)
        return Path(value)


class PathText(click.Path):
    """The type of a text that shells complete as a path. It may be something else: a URL, or - for standard input."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)


# -T as in tar: -f means --foreground or --follow in all verbs.
list_option = click.option(
    "-T",
    "--files-from",
    "list_file",
    metavar="LIST",
    type=PathText(),
    help="Paths, one a line; - reads standard input.",
)
mountpoint = click.argument("mountpoint", required=False, type=Place())


def resolve_mount(mountpoint: Path | None) -> Path:
    """The given mount, or the only one of this user. Raises `MountError` if there is none or several."""
    if mountpoint is not None:
        return canonical(mountpoint)
    found = asking.all_statuses()
    if len(found) != 1:
        names = ", ".join(str(status["mountpoint"]) for status in found[:MOUNTS_NAMED])
        raise MountError(f"{len(found)} cachefs mounts: name one: {names}" if found else "no cachefs mounts")
    return Path(found[0]["mountpoint"])


def parse_seconds(text: str, option: str) -> float:
    """The value of an option that is a time. Raises `ConfigError`."""
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise ConfigError(f"{option}: {text!r} is {exc}") from None


def paths_by_mount(paths: Sequence[Path], list_file: str | None) -> dict[Path, list[str]]:
    """Mount → paths relative to it. With a list, `paths` has at most one path, to which relative lines refer."""
    if list_file is None:
        if not paths:
            raise ConfigError("no PATH: give files or directories below a mount, or a list of them with -T")
        wanted: dict[Path, list[str]] = {}
        for path in paths:
            mountpoint, relative = asking.mount_of(path)
            wanted.setdefault(mountpoint, []).append(relative)
    else:
        wanted = paths_in_list(list_file, single_path(paths, "-T") if paths else None)
    return {mountpoint: _outermost(relatives) for mountpoint, relatives in wanted.items()}


def _outermost(paths: Sequence[str]) -> list[str]:
    """The paths that lie below no other one, each once, because `find` without ``-type f`` prints directories, too."""
    given = dict.fromkeys(paths)
    if given.keys() & {"", "."}:
        return [""]
    return [path for path in given if not any(above in given for above in _above(path))]


def _above(path: str) -> Iterator[str]:
    """The directories that a relative path is in."""
    end = path.rfind("/")
    while end > 0:
        yield path[:end]
        end = path.rfind("/", 0, end)


def single_path(paths: Sequence[Path], option: str) -> Path:
    """The only path. Raises `ConfigError`."""
    if len(paths) != 1:
        raise ConfigError(
            f"{option} takes one PATH: the mount, or a directory of it, that its paths are below"
        )
    return paths[0]


def paths_in_list(list_file: str, base: Path | None) -> dict[Path, list[str]]:
    """Mount → paths relative to it, of the lines of a list. Relative lines are relative to `base`. Raises `ConfigError`."""
    start = None if base is None else asking.mount_of(base)
    finder = Finder()
    wanted: dict[Path, list[str]] = {}
    for number, line in enumerate(_lines(list_file), 1):
        if not line:
            continue
        if line.startswith("/"):
            found = finder.find(line)
            if found is None:
                raise ConfigError(f"{list_file}, line {number}: {line} is not below a cachefs mount")
            mountpoint, relative = Path(found[0]), found[1]
        elif start is not None:
            mountpoint, relative = start[0], _join(start[1], line)
        else:
            raise ConfigError(f"{list_file}, line {number}: a relative path: say below which mount, as PATH")
        wanted.setdefault(mountpoint, []).append(relative)
    if not wanted:
        raise ConfigError(f"{list_file} has no paths")
    return wanted


def parts_in_recording(file: str, base: Path) -> dict[Path, list[Any]]:
    """Mount → the parts in a recording, in its order, each once: the path of a whole file, or [path, offset, length]."""
    from cachefs.daemon.recording import parsed

    mountpoint, above = asking.mount_of(base)
    touched: dict[Any, None] = {}
    for number, line in enumerate(_lines(file), 1):
        try:
            name, size, offset, length = parsed(line)
        except ValueError as exc:
            raise ConfigError(f"{file}, line {number}: not a line of cachefs record ({exc})") from None
        path = _join(above, name)
        if length >= size:
            touched[path] = None
        elif length > 0:
            touched[path, offset, length] = None
    return {mountpoint: [list(item) if isinstance(item, tuple) else item for item in touched]}


def _lines(file: str) -> Iterator[str]:
    try:
        with click.open_file(file, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                yield line.rstrip("\r\n")
    except OSError as exc:
        raise ConfigError(f"{file}: {exc.strerror}") from exc


def _join(above: str, relative: str) -> str:
    return os.path.normpath(f"{above}/{relative}".lstrip("/"))

"""Output of the verbs: lines, labelled values, tables, JSON, and the progress of jobs.

All verbs print through this module. It escapes all text, because names of files may contain control characters. It also
has the options that all verbs share: ``-q``, ``-v`` and ``--color``.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import click

from cachefs.base.units import about_bytes, printable

QUIET = "cachefs.quiet"

LINE_EVERY_S = 10.0
"""Seconds between progress lines of a job without a terminal. Guessed: a warm-up of hours prints some thousand lines."""

Row = Sequence[str]
F = TypeVar("F", bound=Callable[..., Any])


def _quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[QUIET] = True  # `meta` is shared with the parent contexts


def _verbose(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from cachefs.base import logs

        logs.setup("debug", "text")


def _color(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value not in (None, "auto"):
        ctx.color = value == "always"
    elif ctx.color is None and os.environ.get("NO_COLOR"):
        ctx.color = False


_option = partial(click.Option, expose_value=False)
_colors = click.Choice(["auto", "always", "never"])
_color_help = "Whether to use colors.  [auto: on a terminal, unless NO_COLOR is set]"

COMMON_OPTIONS = (
    _option(["-q", "--quiet"], is_flag=True, callback=_quiet, help="Print only results and errors."),
    _option(
        ["-v", "--verbose"],
        is_flag=True,
        callback=_verbose,
        help="Print what this command does, and tracebacks of errors.",
    ),
    _option(["--color"], type=_colors, callback=_color, help=_color_help),
)
"""Options of all verbs."""


def as_json(help: str = "The same as JSON.") -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help=help)


def is_quiet() -> bool:
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(QUIET))


def is_of_output(exc: OSError) -> bool:
    """True for a failure to print, which no reading has: `main` says it."""
    return exc.errno in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)


def say(*lines: str, err: bool = False) -> None:
    """Print lines: on stdout, or with `err` on stderr."""
    click.echo("\n".join(map(printable, lines)), err=err)


def note(text: str) -> None:
    """Print a message on stderr, unless ``--quiet`` was given."""
    if not is_quiet():
        say(text, err=True)


def data(value: Any, *, line: bool = False) -> None:
    """Print JSON; with `line` on one line, for a series of objects."""
    click.echo(json.dumps(value, indent=None if line else 2))


def raw(text: str, *, err: bool = False) -> None:
    """Print text without escaping it, for a shell or a terminal to interpret."""
    click.echo(text, nl=False, err=err)


def pairs(values: Iterable[tuple[str, str]]) -> None:
    """Print a label and a value on each line. Lines are not wrapped, so that grep finds values."""
    lines = list(values)
    width = max([10, *(len(name) for name, _ in lines)])
    for name, value in lines:
        click.echo(click.style(f"{name:<{width}}", bold=True) + "  " + printable(value))


def marked(mark: str, color: str, text: str) -> None:
    """Print a line that begins with a colored word."""
    click.echo(f"{click.style(mark, fg=color)}  {printable(text)}")


def table(heads: Row, rows: Iterable[Row]) -> list[str]:
    """The lines of a table. A ``#`` before a head aligns its column to the right."""
    cells = [[head.lstrip("#") for head in heads], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if head[:1] == "#" else cell.ljust(width)
            for head, cell, width in zip(heads, row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]


def rate(count: float, seconds: float) -> str:
    return about_bytes(count / seconds) + "/s" if count else "-"


def share(part: float, whole: float) -> str:
    return f"{100 * min(part / whole, 1):.0f} %" if whole else "-"


def duration(seconds: float) -> str:
    """A duration in its two largest units, of days, hours, minutes and seconds."""
    minutes, s = divmod(int(max(seconds, 0)), 60)
    hours, m = divmod(minutes, 60)
    d, h = divmod(hours, 24)
    parts = [f"{value}{unit}" for value, unit in ((d, "d"), (h, "h"), (m, "m"), (s, "s")) if value]
    return " ".join(parts[:2]) or "0s"


# -- screens ---------------------------------------------------------------------------------------


def screens(frames: Iterable[Iterable[str]]) -> None:
    """Show frames: on a terminal each replaces the one before, elsewhere it follows."""
    if not sys.stdout.isatty():
        for frame in frames:
            say(*frame)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), auto_refresh=False, screen=True) as live:
        for frame in frames:
            text = "\n".join(printable(line) for line in frame)
            live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)


# -- jobs ------------------------------------------------------------------------------------------


def progress(statuses: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Show the progress of a job by its statuses. Returns the last one."""
    shown = statuses
    if not is_quiet():
        shown = _bar(statuses) if sys.stderr.isatty() else _lines(statuses)
    return dict(deque(shown, maxlen=1).pop())


def _bar(statuses: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    from rich import progress as parts
    from rich.console import Console

    color = click.get_current_context().color
    console = Console(stderr=True, highlight=False, no_color=True if color is False else None)
    columns = (
        parts.TextColumn("{task.description}"),
        parts.BarColumn(),
        parts.DownloadColumn(binary_units=True),
        parts.TransferSpeedColumn(),
        parts.TimeRemainingColumn(),
    )
    with parts.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        for status in statuses:
            total = status["bytes"] if status["walked"] else None
            bar.update(task, description=_files(status), completed=status["done_bytes"], total=total)
            yield status


def _lines(statuses: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    printed, before = time.monotonic(), 0
    for status in statuses:
        now = time.monotonic()
        if now - printed >= LINE_EVERY_S:
            per_s = (status["done_bytes"] - before) / (now - printed)
            printed, before = now, status["done_bytes"]
            say(f"cachefs: {job_line(status, per_s)}", err=True)
        yield status


def job_line(status: Mapping[str, Any], per_s: float) -> str:
    """The progress line of a job; `per_s` is in bytes a second."""
    of = "" if status["walked"] else " so far"
    left = status["bytes"] - status["done_bytes"]
    time_left = f", {duration(left / per_s)} left" if status["walked"] and per_s > 0 else ""
    return (
        f"{_files(status)}, {about_bytes(status['done_bytes'])} of {about_bytes(status['bytes'])}{of}, "
        f"{about_bytes(per_s)}/s{time_left}"
    )


def _files(status: Mapping[str, Any]) -> str:
    return f"{status['done_files']:,} of {status['files']:,}{'' if status['walked'] else '+'} files"

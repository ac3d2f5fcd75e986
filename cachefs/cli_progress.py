"""How far a job is, for whoever waits for it: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cachefs.statusview import duration
from cachefs.units import about_bytes

LINE_EVERY_S = 10.0
"""Between lines of a log that nobody watches. Guessed."""


def show(statuses: Iterable[Mapping[str, Any]], console: Console | None = None) -> dict[str, Any]:
    """Show each status of a job as it comes; returns the last one."""
    console = console or Console(stderr=True, highlight=False)
    shown = _bar(statuses, console) if console.is_terminal else _lines(statuses, console)
    return dict(deque(shown, maxlen=1).pop())


def _bar(statuses: Iterable[Mapping[str, Any]], console: Console) -> Iterator[Mapping[str, Any]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        for status in statuses:
            progress.update(
                task,
                description=_files(status),
                completed=status["done_bytes"],
                total=status["bytes"] if status["walked"] else None,
            )
            yield status


def _lines(statuses: Iterable[Mapping[str, Any]], console: Console) -> Iterator[Mapping[str, Any]]:
    said, before = time.monotonic(), 0
    for status in statuses:
        now = time.monotonic()
        if now - said >= LINE_EVERY_S:
            rate = (status["done_bytes"] - before) / (now - said)
            said, before = now, status["done_bytes"]
            console.out(f"cachefs: {line(status, rate)}", highlight=False)
        yield status


def line(status: Mapping[str, Any], rate: float) -> str:
    """One line about a job that runs; `rate` in bytes a second."""
    of = "" if status["walked"] else " so far"
    left = status["bytes"] - status["done_bytes"]
    time_left = f", {duration(left / rate)} left" if status["walked"] and rate > 0 else ""
    return (
        f"{_files(status)}, {about_bytes(status['done_bytes'])} of {about_bytes(status['bytes'])}{of}, "
        f"{about_bytes(rate)}/s{time_left}"
    )


def _files(status: Mapping[str, Any]) -> str:
    return f"{status['done_files']:,} of {status['files']:,}{'' if status['walked'] else '+'} files"

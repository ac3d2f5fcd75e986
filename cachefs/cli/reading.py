"""The verbs `hint` and `record`: what will be read, and what was."""

from __future__ import annotations

import signal
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import IO

import click

from cachefs.base.errors import ConfigError, NotFound
from cachefs.cli.places import Place, below, listed, seconds_of
from cachefs.cli.show import note

DRAIN_EVERY_S = 0.5

PLAN = "hint"
"""The plan when none is named. Training jobs have plans of other names."""


@click.command(short_help="Tell a mount what will be read next.")
@click.argument("mountpoint", type=Place())
@listed
@click.option("--plan", default=PLAN, help=f"The name of the list, for several at a time.  [{PLAN}]")
@click.option("--epoch", type=click.IntRange(0), default=0, help="Which round over the files this is.  [0]")
@click.option("--drop", is_flag=True, help="Forget the plan.")
def hint(mountpoint: Path, list_file: str | None, plan: str, epoch: int, drop: bool) -> None:
    """Tell the mount at MOUNTPOINT that the files of LIST will be read next, in this order.

    The daemon prefetches them and follows the position of the readers. A list for the next --epoch
    may be given while the current one is read. In Python, cachefs.hints does this for a DataLoader.
    """
    from cachefs import hints
    from cachefs.daemon import asking

    mount, _ = asking.mount_of(mountpoint)
    if drop:
        if not hints.drop(mount, plan):
            raise NotFound(f"no plan {plan} on {mount}: cachefs status names those there are")
        note(f"plan {plan} is forgotten")
        return
    if list_file is None:
        raise ConfigError("no LIST: give the paths with -T, one a line")
    wanted = below(list_file, mountpoint)
    if list(wanted) != [mount]:
        raise ConfigError(f"{list_file} has paths that are not below {mount}")
    hints.send_files(mount, plan, wanted[mount])
    order = array("I", range(len(wanted[mount])))
    hints.send_order(mount, plan, epoch, order, hints.digest(wanted[mount]))
    note(f"plan {plan}, epoch {epoch}: {len(wanted[mount]):,} files")


@click.command(short_help="Record what is opened and read.")
@click.argument("mountpoint", type=Place())
@click.option("-o", "--output", metavar="FILE", required=True, help="Where to; - is standard output.")
@click.option(
    "--for", "how_long", metavar="TIME", help="End after this time, like 5m; without it with Ctrl-C."
)
def record(mountpoint: Path, output: str, how_long: str | None) -> None:
    """Record which files of the mount at MOUNTPOINT are opened, and which parts of large ones are read.

    One JSON object a line: t (seconds since the start), path, size, offset, length, pid. An open has the
    whole file's length; that of a large file which is read through the daemon has length 0, and lines
    for what is read of it follow. cachefs warm --profile fetches what a recording has touched, cachefs
    simulate says what cache it would need. What the kernel answers from its page cache is not seen.
    """
    from cachefs.daemon import asking

    mount, _ = asking.mount_of(mountpoint)
    until = float("inf") if how_long is None else time.monotonic() + seconds_of(how_long, "--for")
    enough = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: enough.set())
    recording = asking.ask(mount, "record_start")  # before FILE is emptied: this may be refused
    try:
        with _opened(output) as file:
            lines, lost = _record(mount, recording, file, until, enough)
    except BaseException:
        asking.ask(mount, "record_stop", recording=recording)
        raise
    more = f", {lost:,} more were lost: they came faster than they were taken" if lost else ""
    note(f"{lines:,} lines{more}")


def _opened(output: str) -> IO[str]:
    try:
        return sys.stdout if output == "-" else open(output, "w", encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{output}: {exc.strerror}") from exc


def _record(
    mount: Path, recording: int, file: IO[str], until: float, enough: threading.Event
) -> tuple[int, int]:
    """Write lines until `until` or until `enough` is set. Returns how many lines, and how many were lost."""
    from cachefs.daemon import asking

    count = lost = 0

    def drain() -> None:
        nonlocal count, lost
        while lines := (drained := asking.ask(mount, "record_drain", 60.0, recording=recording))["lines"]:
            file.writelines(line + "\n" for line in lines)
            count, lost = count + len(lines), lost + drained["dropped"]
        file.flush()

    while (left := until - time.monotonic()) > 0 and not enough.wait(min(left, DRAIN_EVERY_S)):
        drain()
    asking.ask(mount, "record_stop", recording=recording)
    drain()
    return count, lost


COMMANDS = (hint, record)

"""The verbs that look at a mount while it works: stats, top, stall, ledger.

Each asks the daemon for what it knows (`watch`) and shows what changed between two answers.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from cachefs.cli_say import say
from cachefs.errors import ConfigError, MountError
from cachefs.units import about_bytes, parse_duration, printable

HEADS_EVERY = 20

NAMED = 8
"""Mounts that are named when one has to be. Guessed."""

PIPED_COLUMNS = 240
"""Of a line of `top` that nobody's terminal breaks. Guessed."""


class Place(click.Path):
    """A path that nobody looks at yet: click's own asks for it, and what it is below may hang."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(value)


mountpoint = click.argument("mountpoint", required=False, type=Place())
every = click.option("-i", "--interval", default="1s", metavar="TIME", help="Between two looks.  [1s]")
times = click.option("-n", "--count", type=click.IntRange(1), help="End after so many.  [until Ctrl-C]")

Known = Mapping[str, Any]


def mount_meant(mountpoint: Path | None) -> Path:
    """The mount that is named, or the only one of this user."""
    from cachefs import asking
    from cachefs.mounting import canonical

    if mountpoint is not None:
        return canonical(mountpoint)
    found = asking.all_statuses()
    if len(found) != 1:
        some = ", ".join(str(status["mountpoint"]) for status in found[:NAMED])
        raise MountError(f"{len(found)} cachefs mounts: name one: {some}" if found else "no cachefs mounts")
    return Path(found[0]["mountpoint"])


def _seconds(text: str, option: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as exc:
        raise ConfigError(f"{option}: {text!r} is {exc}") from None
    if not 0.05 <= seconds <= 86400:
        raise ConfigError(f"{option}: {text!r} is not between 50ms and 1d")
    return seconds


def _looks(mountpoint: Path, interval_s: float, count: int | None) -> Iterator[tuple[Known, Known, float]]:
    """(before, after, seconds between them), until Ctrl-C. Raises when the daemon goes."""
    from cachefs import asking

    before, at = asking.ask(mountpoint, "watch"), time.monotonic()
    try:
        for _ in itertools.count() if count is None else range(count):
            time.sleep(max(0.0, at + interval_s - time.monotonic()))
            after, now = asking.ask(mountpoint, "watch"), time.monotonic()
            yield before, after, now - at
            before, at = after, now
    except KeyboardInterrupt:
        return


# -- stats -----------------------------------------------------------------------------------------


@click.command(short_help="What a mount does, a line a second.")
@mountpoint
@every
@times
@click.option("--json", "as_json", is_flag=True, help="Each line an object: what every counter grew by.")
def stats(mountpoint: Path | None, interval: str, count: int | None, as_json: bool) -> None:
    """Print what the mount at MOUNTPOINT did in the last second, every second.

    \b
    HIT      of the blocks read through the daemon, how many were here
    READS    to readers, through the daemon; OPENS, and how many of them the kernel reads by itself (LENT)
    STORE    received from the store, in GETs; PEERS the same from other nodes; SENT to the store
    WAIT     the part of the time in which at least one request of a program waited; NOW how many wait now
    """
    seconds = _seconds(interval, "--interval")
    for number, (before, after, passed) in enumerate(_looks(mount_meant(mountpoint), seconds, count)):
        grown = {name: value - before["metrics"].get(name, 0) for name, value in after["metrics"].items()}
        blocked_s = after["reads"]["blocked_s"] - before["reads"]["blocked_s"]
        if as_json:
            line = {
                "time": round(time.time(), 3),
                "seconds": round(passed, 3),
                "blocked_s": round(blocked_s, 6),
            }
            click.echo(json.dumps({**line, **grown}))
            continue
        if number % HEADS_EVERY == 0:
            say(
                f"{'HIT':>6} {'READS':>10} {'OPENS':>7} {'LENT':>6} {'STORE':>10} {'GET':>6} {'PEERS':>10} {'SENT':>10} "
                f"{'EVICTED':>7} {'WAIT':>6} {'NOW':>4}"
            )
        hits = sum(grown[f"{tier}_hits"] for tier in ("ram", "ssd", "heap"))
        say(
            f"{_share(hits, hits + grown['misses']):>6} {_rate(grown['fuse_read_bytes'], passed):>10} "
            f"{grown['fuse_open'] / passed:>7,.0f} {_share(grown['passthrough_opens'], grown['fuse_open']):>6} "
            f"{_rate(grown['origin_bytes'], passed):>10} {grown['origin_get'] / passed:>6,.0f} "
            f"{_rate(grown['peer_bytes_in'], passed):>10} {_rate(grown['origin_bytes_sent'], passed):>10} "
            f"{grown['evicted_blocks']:>7,} {_share(blocked_s, passed):>6} {after['reads']['waiting']:>4}"
        )


def _rate(count: float, seconds: float) -> str:
    return about_bytes(count / seconds) + "/s" if count else "-"


def _share(part: float, whole: float) -> str:
    return f"{100 * min(part / whole, 1):.0f} %" if whole else "-"


# -- top -------------------------------------------------------------------------------------------


@click.command(short_help="Which processes and datasets keep a mount busy.")
@mountpoint
@click.option("-i", "--interval", default="2s", metavar="TIME", help="Between two looks.  [2s]")
@times
@click.option("--by", type=click.Choice(["process", "dataset"]), help="Only these.  [both]")
def top(mountpoint: Path | None, interval: str, count: int | None, by: str | None) -> None:
    """Show, live, which processes wait for the mount at MOUNTPOINT and what for, and what is asked for which dataset.

    A process is seen when something that it does has to wait: a read, a listing, a close. What the kernel or the cache
    answers at once costs nothing, and is not seen either.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    looks = _looks(mount_meant(mountpoint), _seconds(interval, "--interval"), count)

    def frame(before: Known, after: Known, passed: float) -> Group:
        parts: list[Any] = [Text(_summary(before, after, passed))]
        if by != "dataset":
            parts += [Text(""), _table(PROCESS_HEADS, _process_rows(before, after, passed))]
        if by != "process":
            parts += [Text(""), _table(DATASET_HEADS, _dataset_rows(before, after, passed))]
        return Group(*parts)

    if not console.is_terminal:
        for before, after, passed in looks:
            console.print(frame(before, after, passed), soft_wrap=True)
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for before, after, passed in looks:
            live.update(frame(before, after, passed), refresh=True)


PROCESS_HEADS = ("PROCESS", "#PID", "#BLOCKED", "#READS/s", "#OTHERS/s", "#GET/s", "#FROM STORE", "WAITS FOR")
DATASET_HEADS = ("DATASET", "#GET/s", "#LIST/s", "#HEAD/s", "#PUT/s", "#FROM STORE", "#TO STORE")


def _summary(before: Known, after: Known, passed: float) -> str:
    blocked = _share(after["reads"]["blocked_s"] - before["reads"]["blocked_s"], passed)
    return (
        f"{after['mountpoint']}: {after['reads']['waiting']} requests wait now; somebody waited {blocked} of the last "
        f"{passed:.0f} s"
    )


def _process_rows(before: Known, after: Known, passed: float) -> list[tuple[str, ...]]:
    earlier = {(row["pid"], row["name"]): row for row in before["processes"]}
    waiting: dict[int, str] = {}
    for wait in after["waiting"]:
        what = " ".join(part for part in (wait["request"], printable(wait["key"])) if part)
        waiting.setdefault(wait["pid"], f"{wait['on']}: {what} ({wait['seconds']:.1f} s)")
    rows = []
    for row in after["processes"]:
        old = earlier.get((row["pid"], row["name"]), {})
        blocked_s = row["blocked_s"] - old.get("blocked_s", 0.0)
        reads, calls = (row[name] - old.get(name, 0) for name in ("reads", "calls"))
        if not (reads or calls or blocked_s > 0):
            continue
        asked = _grown(row["requests"], old.get("requests", {}))
        rows.append(
            (
                blocked_s,
                (
                    *(
                        printable(row["name"]),
                        str(row["pid"]) if row["pid"] > 0 else "",
                        _share(blocked_s, passed),
                    ),
                    *(f"{reads / passed:,.0f}", f"{calls / passed:,.0f}"),
                    *(
                        f"{asked.get('origin_get', 0) / passed:,.0f}",
                        _rate(asked.get("origin_bytes", 0), passed),
                    ),
                    waiting.get(row["pid"], ""),
                ),
            )
        )
    return [cells for _, cells in sorted(rows, key=lambda row: -row[0])]


def _dataset_rows(before: Known, after: Known, passed: float) -> list[tuple[str, ...]]:
    rows = []
    for name, account in after["datasets"].items():
        grown = _grown(account, before["datasets"].get(name, {}))
        if not any(grown.values()):
            continue
        requests = (
            grown.get("origin_get", 0),
            grown.get("origin_list", 0),
            grown.get("origin_head", 0),
            grown.get("origin_put", 0) + grown.get("origin_put_part", 0),
        )
        received, sent = grown.get("origin_bytes", 0), grown.get("origin_bytes_sent", 0)
        cells = (printable(name) or "/", *(f"{number / passed:,.0f}" for number in requests))
        rows.append((sum(requests), (*cells, _rate(received, passed), _rate(sent, passed))))
    return [cells for _, cells in sorted(rows, key=lambda row: -row[0])]


def _grown(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items()}


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(
            head.lstrip("#"), justify="right" if head[0] == "#" else "left", no_wrap=head[0] == "#"
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


# -- stall -----------------------------------------------------------------------------------------


@click.command(short_help="How long processes have waited for data, as JSON.")
@mountpoint
@click.option("--for", "how_long", metavar="TIME", help="In the next TIME.  [since each was first seen]")
@click.option("--pid", type=click.IntRange(1), help="Only this process and what it has started.")
def stall(mountpoint: Path | None, how_long: str | None, pid: int | None) -> None:
    """Print how long each process waited for the mount at MOUNTPOINT, and on what, as JSON.

    blocked_s are seconds in which at least one request of the process waited, blocked_share the part of its time
    (seconds) that this was. waited_s are seconds added up over its requests, by what for: its reads for the store, a
    peer or this node's disk, everything else for names (looking up, listing, opening, renaming) or writes (write, close,
    fsync, until it is where it has to be). What the kernel answers by itself is not in it. So a training loop can log
    "waited 38 % on data":

    \b
    cachefs stall --pid $TRAINER --for 60s /mnt/data | jq .processes[].blocked_share
    """
    from cachefs import asking

    mount = mount_meant(mountpoint)
    if how_long is None:
        before, after = None, asking.ask(mount, "watch")
    else:
        before, after, _ = next(_looks(mount, _seconds(how_long, "--for"), 1))
    click.echo(json.dumps(stalled(before, after, None if pid is None else family(pid)), indent=2))


def stalled(before: Known | None, after: Known, pids: set[int] | None = None) -> dict[str, Any]:
    """Who waited, the longest first; between two looks, or since each was first seen."""
    earlier = {(row["pid"], row["name"]): row for row in before["processes"]} if before else {}
    passed = after["reads"]["seen_s"] - before["reads"]["seen_s"] if before else None

    def row_of(row: Known, old: Known) -> dict[str, Any]:
        seconds = passed if passed is not None else row["seen_s"]
        blocked_s = row["blocked_s"] - old.get("blocked_s", 0.0)
        waited = {on: s - old.get("waited_s", {}).get(on, 0.0) for on, s in row["waited_s"].items()}
        return {
            **{"pid": row["pid"], "parent": row["parent"], "name": row["name"], "seconds": round(seconds, 3)},
            **{
                "blocked_s": round(blocked_s, 6),
                "blocked_share": round(blocked_s / seconds, 4) if seconds else 0.0,
            },
            "waited_s": {on: round(s, 6) for on, s in waited.items()},
            **{name: row[name] - old.get(name, 0) for name in ("reads", "bytes", "calls")},
            "waiting": row["waiting"],
        }

    rows = [row_of(row, earlier.get((row["pid"], row["name"]), {})) for row in after["processes"]]
    if pids is not None:
        rows = [row for row in rows if row["pid"] in pids]
    whole = row_of(after["reads"], before["reads"] if before else {})
    return {
        "mountpoint": after["mountpoint"],
        **{
            name: whole[name]
            for name in ("seconds", "blocked_s", "blocked_share", "waited_s", "reads", "bytes", "calls")
        },
        "processes": sorted(rows, key=lambda row: -row["blocked_s"]),
        "waiting": [wait for wait in after["waiting"] if pids is None or wait["pid"] in pids],
    }


def family(pid: int) -> set[int]:
    """A process and all that descend from it now."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    found, before = {pid}, 0
    while len(found) > before:
        before = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


# -- ledger ----------------------------------------------------------------------------------------

KINDS = ("get", "list", "head", "put", "put_part", "upload", "copy", "delete")


@click.command(short_help="What was asked of the store, and what it cost.")
@mountpoint
@click.option(
    "--prices", type=click.Path(path_type=Path), help="TOML file with what requests and bytes cost."
)
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
def ledger(mountpoint: Path | None, prices: Path | None, as_json: bool) -> None:
    """Show the requests and bytes that the mount at MOUNTPOINT exchanged with its stores, by dataset, since it began.

    --json has the same by process, without what was fetched ahead. A price list looks like this; what it leaves out is free:

    \b
    currency = "USD"
    [requests]            # for a thousand of them
    get = 0.0004
    list = 0.005
    [bytes]               # for 10^9 of them: "in" is from the store to here
    in = 0.09
    """
    from cachefs import asking

    known = asking.ask(mount_meant(mountpoint), "watch")
    price = Prices.read(prices) if prices is not None else None
    datasets = [_entry(name or "/", account, price) for name, account in known["datasets"].items()]
    processes = [
        {**_entry(row["name"], row["requests"], price), "pid": row["pid"]}
        for row in known["processes"]
        if row["requests"]
    ]
    total = _entry("all", known["metrics"], price)
    since_s = time.time() - float(known["started"])
    if as_json:
        answer = {"since_s": round(since_s, 1), "total": total, "datasets": datasets, "processes": processes}
        click.echo(json.dumps({**answer, "currency": price.currency if price else None}, indent=2))
        return
    shown = [kind for kind in KINDS if total["requests"].get(kind)]
    heads = ["DATASET", *(f"#{kind.upper().replace('_', ' ')}" for kind in shown), "#FROM STORE", "#TO STORE"]
    if price:
        heads.append(f"#{price.currency}")
    ordered = sorted(datasets, key=lambda entry: (-entry.get("cost", 0), -sum(entry["requests"].values())))
    rows = [
        (
            printable(entry["name"]),
            *(f"{entry['requests'].get(kind, 0):,}" for kind in shown),
            *(about_bytes(entry["bytes_in"]), about_bytes(entry["bytes_out"])),
            *([f"{entry['cost']:,.4f}"] if price else []),
        )
        for entry in [*ordered, total]
    ]
    from rich.console import Console

    Console(highlight=False).print(_table(heads, rows), soft_wrap=True)


def _entry(name: str, account: Mapping[str, int], price: Prices | None) -> dict[str, Any]:
    requests = {kind: account[f"origin_{kind}"] for kind in KINDS if account.get(f"origin_{kind}")}
    entry: dict[str, Any] = {
        **{"name": name, "requests": requests},
        **{"bytes_in": account.get("origin_bytes", 0), "bytes_out": account.get("origin_bytes_sent", 0)},
    }
    if price is not None:
        entry["cost"] = price.cost(requests, entry["bytes_in"], entry["bytes_out"])
    return entry


class Prices:
    """What a thousand requests of each kind and 10⁹ bytes each way cost."""

    def __init__(self, currency: str, requests: Mapping[str, float], moved: Mapping[str, float]) -> None:
        self.currency = currency
        self._requests = requests
        self._moved = moved

    @classmethod
    def read(cls, path: Path) -> Prices:
        """Raises `ConfigError` for what is no price list."""
        try:
            table = tomllib.loads(path.read_text())
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{path}: {getattr(exc, 'strerror', None) or exc}") from exc
        requests, moved = table.get("requests", {}), table.get("bytes", {})
        strange = (table.keys() - {"currency", "requests", "bytes"}) | (moved.keys() - {"in", "out"})
        strange |= requests.keys() - set(KINDS)
        if strange:
            raise ConfigError(
                f"{path}: {', '.join(sorted(strange))}: not in a price list, which has currency, [requests] with "
                f"{', '.join(KINDS)}, and [bytes] with in, out"
            )
        wrong = [name for name, value in {**requests, **moved}.items() if not isinstance(value, int | float)]
        if wrong:
            raise ConfigError(f"{path}: {', '.join(wrong)}: a price is a number")
        return cls(str(table.get("currency", "cost")), requests, moved)

    def cost(self, requests: Mapping[str, int], bytes_in: int, bytes_out: int) -> float:
        asked = sum(self._requests.get(kind, 0.0) * count / 1000 for kind, count in requests.items())
        return asked + (self._moved.get("in", 0.0) * bytes_in + self._moved.get("out", 0.0) * bytes_out) / 1e9


COMMANDS = (stats, top, stall, ledger)

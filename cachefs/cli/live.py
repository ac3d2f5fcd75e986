"""The verbs that monitor a mount: stats, top, ledger.

Each requests the daemon's counters and ledger (verb `watch`). `stats` and `top` show the difference of two answers.
"""

from __future__ import annotations

import itertools
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import click

from cachefs.base.errors import ConfigError
from cachefs.base.ledger import ORIGIN_REQUESTS
from cachefs.base.linux import descendants
from cachefs.base.metrics import hit_ratios
from cachefs.base.units import about_bytes
from cachefs.cli import show
from cachefs.cli.places import mountpoint, parse_seconds, resolve_mount
from cachefs.cli.show import as_json, rate, say, share
from cachefs.daemon import asking

HEADS_EVERY = 20
"""Lines of `stats` between two headings."""

interval_option = click.option(
    "-i", "--interval", metavar="TIME", help="Time between two lines or screens.  [1s; top: 2s]"
)
count_option = click.option(
    "-n", "--count", type=click.IntRange(1), help="End after this many.  [until Ctrl-C]"
)

Answer = Mapping[str, Any]

Sample = tuple[Answer, Answer, float]
"""(before, after, seconds between them)."""


def _samples(mountpoint: Path, interval: str, count: int | None) -> Iterator[Sample]:
    """Samples until Ctrl-C. Raises `ControlError` or `MountError` when the daemon ends."""
    interval_s = parse_seconds(interval, "--interval")
    if not 0.05 <= interval_s <= 86400:
        raise ConfigError(f"--interval: {interval!r} is not between 50ms and 1d")
    try:
        yield from itertools.islice(_differences(mountpoint, interval_s), count)
    except KeyboardInterrupt:
        return


def _differences(mountpoint: Path, interval_s: float) -> Iterator[Sample]:
    before, at = asking.ask(mountpoint, "watch"), time.monotonic()
    while True:
        time.sleep(max(0.0, at + interval_s - time.monotonic()))
        after, now = asking.ask(mountpoint, "watch"), time.monotonic()
        if after["started"] == before["started"]:  # else another daemon has begun to count
            yield before, after, now - at
        before, at = after, now


def _grown(now: Mapping[str, int], before: Mapping[str, int]) -> Counter[str]:
    return Counter({name: count - before.get(name, 0) for name, count in now.items()})


# -- stats -----------------------------------------------------------------------------------------

LINE = "{:>6} {:>6} {:>10} {:>7} {:>6} {:>10} {:>6} {:>10} {:>10} {:>7} {:>6} {:>4}"
HEADS = LINE.format(
    "HIT", "DAEMON", "READS", "OPENS", "PASS", "ORIGIN", "GET", "PEERS", "SENT", "EVICTED", "WAIT", "NOW"
)


@click.command(short_help="Activity of a mount, a line a second.")
@mountpoint
@interval_option
@count_option
@as_json("An object a line: by how much each counter grew.")
def stats(mountpoint: Path | None, interval: str | None, count: int | None, as_json: bool) -> None:
    """Print what the mount at MOUNTPOINT did in the last second, every second.

    \b
    HIT      share of the requested blocks that were cached; a file that is opened in passthrough, or read from
             the page cache alone, counts with its size
    DAEMON   the same of the blocks that were read through the daemon
    READS    bytes to readers through the daemon; OPENS, and the share of them in passthrough (PASS)
    ORIGIN   bytes from the origin, in GET requests; PEERS: from other nodes; SENT: to the origin
    WAIT     share of the time in which at least one request of a program waited; NOW: requests that wait now
    """
    samples = _samples(resolve_mount(mountpoint), interval or "1s", count)
    for number, (before, after, seconds) in enumerate(samples):
        grown = _grown(after["metrics"], before["metrics"])
        blocked_s = after["reads"]["blocked_s"] - before["reads"]["blocked_s"]
        if as_json:
            times = {
                "time": round(time.time(), 3),
                "seconds": round(seconds, 3),
                "blocked_s": round(blocked_s, 6),
                "waiting": after["reads"]["waiting"],
                "loop_pause_s": after["loop_pause_s"],
            }
            show.data(times | grown, line=True)
            continue
        if number % HEADS_EVERY == 0:
            say(HEADS)
        line = LINE.format(
            *("-" if ratio is None else share(ratio, 1) for ratio in hit_ratios(grown)),
            rate(grown["fuse_read_bytes"], seconds),
            f"{grown['fuse_open'] / seconds:,.0f}",
            share(grown["passthrough_opens"], grown["fuse_open"]),
            rate(grown["origin_bytes"], seconds),
            f"{grown['origin_get'] / seconds:,.0f}",
            rate(grown["peer_bytes_in"], seconds),
            rate(grown["origin_bytes_sent"], seconds),
            f"{grown['evicted_blocks']:,}",
            share(blocked_s, seconds),
            after["reads"]["waiting"],
        )
        say(line)


# -- top -------------------------------------------------------------------------------------------


@click.command(short_help="Which processes and datasets keep a mount busy.")
@mountpoint
@interval_option
@count_option
@click.option("--by", type=click.Choice(["process", "dataset"]), help="Show only these rows.  [both]")
@click.option("--pid", type=click.IntRange(1), help="Only this process and its descendants.")
@click.option("--total", is_flag=True, help="Sums since each process was first seen, once; needs --json.")
@as_json("An object a line: which process waited how long, and for what.")
def top(
    mountpoint: Path | None,
    interval: str | None,
    count: int | None,
    by: str | None,
    pid: int | None,
    total: bool,
    as_json: bool,
) -> None:
    """Show which processes wait for the mount at MOUNTPOINT and for what, and which requests each dataset causes.

    A process appears once one of its requests has to wait: a read, a listing, a close. Requests that the kernel or the
    cache answers at once are not counted.

    In JSON, blocked_s are the seconds in which at least one request of the process waited, and blocked_share is their share
    of the time (seconds). waited_s has the waits of its requests, added up by cause: reads wait for the origin, a peer or
    this node's disk, other requests for names (lookup, listing, open, rename) or writes (write, close, fsync). A
    training loop can thus log "waited 38 % on data":

    \b
    cachefs top --json -i 60s -n 1 --pid $TRAINER /mnt/data | jq .processes[].blocked_share
    """
    if total and (not as_json or interval or count):
        raise ConfigError("--total needs --json, and goes without --interval and --count")
    if by and as_json:
        raise ConfigError("--by chooses rows of the table: leave out --by or --json")
    mount, pids = resolve_mount(mountpoint), None if pid is None else descendants(pid)
    if total:
        show.data(process_waits(None, asking.ask(mount, "watch"), pids))
        return
    samples = _samples(mount, interval or "2s", count)
    if as_json:
        for before, after, _ in samples:
            show.data(process_waits(before, after, pids), line=True)
        return
    show.screens(_frame(before, after, seconds, by, pids) for before, after, seconds in samples)


PROCESS_HEADS = (
    "PROCESS",
    "#PID",
    "#BLOCKED",
    "#READS/s",
    "#OTHERS/s",
    "#GET/s",
    "#FROM ORIGIN",
    "WAITS FOR",
)
DATASET_HEADS = ("DATASET", "#GET/s", "#LIST/s", "#HEAD/s", "#PUT/s", "#FROM ORIGIN", "#TO ORIGIN")


def _frame(
    before: Answer, after: Answer, seconds: float, by: str | None, pids: set[int] | None
) -> Iterator[str]:
    blocked = share(after["reads"]["blocked_s"] - before["reads"]["blocked_s"], seconds)
    yield (
        f"{after['mountpoint']}: {after['reads']['waiting']} requests wait now; programs waited {blocked} of the last "
        f"{seconds:.0f} s"
    )
    if by != "dataset":
        yield ""
        yield from show.table(PROCESS_HEADS, _process_rows(before, after, seconds, pids))
    if by != "process":
        yield ""
        yield from show.table(DATASET_HEADS, _dataset_rows(before, after, seconds))


def _process_rows(
    before: Answer, after: Answer, seconds: float, pids: set[int] | None
) -> list[tuple[str, ...]]:
    waiting: dict[int, str] = {}
    for wait in after["waiting"]:
        request = " ".join(part for part in (wait["request"], wait["key"]) if part)
        waiting.setdefault(wait["pid"], f"{wait['on']}: {request} ({wait['seconds']:.1f} s)")
    return [
        (
            row["name"],
            str(row["pid"]) if row["pid"] > 0 else "",
            share(row["blocked_s"], seconds),
            f"{row['reads'] / seconds:,.0f}",
            f"{row['calls'] / seconds:,.0f}",
            f"{row['requests']['origin_get'] / seconds:,.0f}",
            rate(row["requests"]["origin_bytes"], seconds),
            waiting.get(row["pid"], ""),
        )
        for row in process_waits(before, after, pids)["processes"]
        if row["reads"] or row["calls"] or row["blocked_s"] > 0
    ]


def _dataset_rows(before: Answer, after: Answer, seconds: float) -> list[tuple[str, ...]]:
    rows = []
    for name, account in after["datasets"].items():
        grown = _grown(account, before["datasets"].get(name, {}))
        if not any(grown.values()):
            continue
        puts = grown["origin_put"] + grown["origin_put_part"]
        requests = (grown["origin_get"], grown["origin_list"], grown["origin_head"], puts)
        cells = (name or "/", *(f"{number / seconds:,.0f}" for number in requests))
        moved = (rate(grown[counter], seconds) for counter in ("origin_bytes", "origin_bytes_sent"))
        rows.append((sum(requests), (*cells, *moved)))
    return [cells for _, cells in sorted(rows, key=lambda row: -row[0])]


def process_waits(before: Answer | None, after: Answer, pids: set[int] | None = None) -> dict[str, Any]:
    """How long each process waited between two samples (`before` None: since it was first seen), the longest first."""
    earlier = {(row["pid"], row["name"]): row for row in before["processes"]} if before else {}
    between_s = after["reads"]["seen_s"] - before["reads"]["seen_s"] if before else None

    def row_of(row: Answer, old: Answer) -> dict[str, Any]:
        seconds = row["seen_s"] if between_s is None else between_s
        blocked_s = row["blocked_s"] - old.get("blocked_s", 0.0)
        before_s = old.get("waited_s", {})
        return {
            "seconds": round(seconds, 3),
            "blocked_s": round(blocked_s, 6),
            "blocked_share": round(blocked_s / seconds, 4) if seconds else 0.0,
            "waited_s": {on: round(s - before_s.get(on, 0.0), 6) for on, s in row["waited_s"].items()},
            **{name: row[name] - old.get(name, 0) for name in ("reads", "bytes", "calls")},
        }

    processes = []
    for row in after["processes"]:
        if pids is None or row["pid"] in pids:
            old = earlier.get((row["pid"], row["name"]), {})
            known = {name: row[name] for name in ("pid", "parent", "name", "waiting")}
            requests = _grown(row["requests"], old.get("requests", {}))
            processes.append({**known, **row_of(row, old), "requests": requests})
    return {
        "mountpoint": after["mountpoint"],
        **row_of(after["reads"], before["reads"] if before else {}),
        "processes": sorted(processes, key=lambda row: -row["blocked_s"]),
        "waiting": [wait for wait in after["waiting"] if pids is None or wait["pid"] in pids],
    }


# -- ledger ----------------------------------------------------------------------------------------


@click.command(short_help="Requests to the origin, and their cost.")
@mountpoint
@click.option(
    "--prices", type=click.Path(path_type=Path), help="TOML file with the prices of requests and bytes."
)
@as_json("The same as JSON, also by process.")
def ledger(mountpoint: Path | None, prices: Path | None, as_json: bool) -> None:
    """Show the requests and bytes that the mount at MOUNTPOINT exchanged with its origins since it began, by dataset.

    --json has the same by process, without prefetched files. An example of a price list; what it does not list is free:

    \b
    currency = "USD"
    [requests]            # for a thousand of them
    get = 0.0004
    list = 0.005
    [bytes]               # for 10^9 of them: "in" is from the origin
    in = 0.09
    """
    known = asking.ask(resolve_mount(mountpoint), "watch")
    price = Prices.read(prices) if prices is not None else None
    datasets = [_entry(name or "/", account, price) for name, account in known["datasets"].items()]
    total = _entry("all", known["metrics"], price)
    if as_json:
        processes = [
            {**_entry(row["name"], row["requests"], price), "pid": row["pid"]}
            for row in known["processes"]
            if row["requests"]
        ]
        answer = {
            "since_s": round(time.time() - float(known["started"]), 1),
            "total": total,
            "datasets": datasets,
            "processes": processes,
            "currency": price.currency if price else None,
        }
        show.data(answer)
        return
    shown = [kind for kind in ORIGIN_REQUESTS if total["requests"].get(kind)]
    counts = [f"#{kind.upper().replace('_', ' ')}" for kind in shown]
    heads = ["DATASET", *counts, "#FROM ORIGIN", "#TO ORIGIN", *([f"#{price.currency}"] if price else [])]
    ordered = sorted(datasets, key=lambda entry: (-entry.get("cost", 0), -sum(entry["requests"].values())))
    rows = [
        (
            entry["name"],
            *(f"{entry['requests'].get(kind, 0):,}" for kind in shown),
            about_bytes(entry["bytes_in"]),
            about_bytes(entry["bytes_out"]),
            *([f"{entry['cost']:,.4f}"] if price else []),
        )
        for entry in [*ordered, total]
    ]
    say(*show.table(heads, rows))


def _entry(name: str, account: Mapping[str, int], price: Prices | None) -> dict[str, Any]:
    requests = {kind: account[f"origin_{kind}"] for kind in ORIGIN_REQUESTS if account.get(f"origin_{kind}")}
    bytes_in, bytes_out = account.get("origin_bytes", 0), account.get("origin_bytes_sent", 0)
    entry: dict[str, Any] = {"name": name, "requests": requests, "bytes_in": bytes_in, "bytes_out": bytes_out}
    if price is not None:
        entry["cost"] = price.cost(requests, bytes_in, bytes_out)
    return entry


@dataclass(frozen=True)
class Prices:
    """The prices of a thousand requests of each kind, and of 10⁹ bytes in each direction ("in", "out")."""

    currency: str
    requests: Mapping[str, float]
    bytes: Mapping[str, float]

    @classmethod
    def read(cls, path: Path) -> Prices:
        """Read a price list. Raises `ConfigError`."""
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{path}: {getattr(exc, 'strerror', None) or exc}") from exc
        requests, moved = table.get("requests", {}), table.get("bytes", {})
        if not isinstance(requests, dict) or not isinstance(moved, dict):
            raise ConfigError(
                f"{path}: requests and bytes are sections: write [requests] and get = … below it"
            )
        unknown = (table.keys() - {"currency", "requests", "bytes"}) | (moved.keys() - {"in", "out"})
        unknown |= requests.keys() - set(ORIGIN_REQUESTS)
        if unknown:
            raise ConfigError(
                f"{path}: {', '.join(sorted(unknown))}: not in a price list, which has currency, [requests] with "
                f"{', '.join(ORIGIN_REQUESTS)}, and [bytes] with in, out"
            )
        prices = {**requests, **moved}
        wrong = [
            name for name, price in prices.items() if type(price) not in (int, float) or not 0 <= price < inf
        ]
        if wrong:
            raise ConfigError(f"{path}: {', '.join(wrong)}: a price is a number from 0 up")
        return cls(str(table.get("currency", "cost")), requests, moved)

    def cost(self, requests: Mapping[str, int], bytes_in: int, bytes_out: int) -> float:
        costs = sum(self.requests.get(kind, 0.0) * count / 1000 for kind, count in requests.items())
        return costs + (self.bytes.get("in", 0.0) * bytes_in + self.bytes.get("out", 0.0) * bytes_out) / 1e9


COMMANDS = (stats, top, ledger)

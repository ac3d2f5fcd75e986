"""The verbs about caching: warm, evict, pin, unpin; hint, record, simulate.

The first four start a job in the daemon (`cachefs.daemon.warming`), show its progress and print a summary. `hint` tells the
daemon what will be read, `record` writes down what is read, `simulate` computes the hit ratios of caches for a recording.
"""

from __future__ import annotations

import signal
import threading
import time
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import click

from cachefs import hints
from cachefs.base.errors import ConfigError, MountError, NotFound
from cachefs.base.units import about_bytes, about_share, format_bytes, parse_capacity
from cachefs.cli import places, show
from cachefs.cli.places import PathText, Place, list_option, paths_by_mount
from cachefs.cli.show import as_json, note, say
from cachefs.config.config import Eviction
from cachefs.daemon import asking

FAILURES_NAMED = 3
"""Most failures in an error message."""

paths = click.argument("paths", nargs=-1, metavar="PATH…", type=Place())
parallel_option = click.option(
    "-p", "--parallel", type=click.IntRange(1), help="Files at a time.  [--concurrency]"
)


@click.command(short_help="Fetch files into the cache.")
@paths
@list_option
@parallel_option
@click.option(
    "--check", is_flag=True, help="Fetch nothing: print how much is cached; exit 1 if not all of it."
)
@click.option(
    "--background",
    is_flag=True,
    help="Return at once; cachefs status shows the progress. The job ends with its daemon, also if another one goes on: "
    "give the command again then.",
)
@click.option("--stop", is_flag=True, help="End the jobs of PATH's mount.")
@click.option(
    "--profile",
    metavar="FILE",
    type=PathText(),
    help="Fetch the ranges that cachefs record has written to FILE.",
)
@click.option("--cluster", is_flag=True, help="Tell the other nodes to fetch their shares, too.")
@as_json("The result as JSON.")
def warm(
    paths: tuple[Path, ...],
    list_file: str | None,
    parallel: int | None,
    check: bool,
    background: bool,
    stop: bool,
    profile: str | None,
    cluster: bool,
    as_json: bool,
) -> int:
    """Fetch the files at and below PATH, so that reading them later sends no request to the origin.

    Cached files are skipped, so a second run goes on where the first one ended. Ctrl-C ends it; fetched files stay cached.
    With --peers, each node fetches its own share: run it on all nodes, or with --cluster on one. Requests of readers have
    priority. A job that needs more than the cache can hold is refused, so none evicts what it has fetched.

    \b
    A directory:             cachefs warm /mnt/data/train
    A list of paths:         cachefs warm -T list.txt
    Relative to a mount:     find … | cachefs warm -T - /mnt/data
    Is it all there:         cachefs warm --check /mnt/data/train
    As the last run read:    cachefs warm --profile run.jsonl /mnt/data
    """
    if stop:
        if list_file is not None or parallel or check or background or profile or cluster:
            raise ConfigError("--stop ends the jobs of PATH's mount, and goes without other options")
        if not paths:
            raise ConfigError("no PATH: give the mount")
        mounts = dict.fromkeys(asking.mount_of(path)[0] for path in paths)
        count = sum(asking.ask(mountpoint, "warm_stop", job=None) for mountpoint in mounts)
        if as_json:
            show.data({"ended": count})
        note(f"{count} jobs ended")
        return 0
    if profile and list_file is not None:
        raise ConfigError("--profile and -T are two lists of what to fetch: give one of them")
    wanted: Mapping[Path, Iterable[Any]]
    if profile:
        wanted = places.parts_in_recording(profile, places.single_path(paths, "--profile"))
    else:
        wanted = paths_by_mount(paths, list_file)
    how: dict[str, Any] = {"at_once": parallel or 0, "vanish": bool(profile), "cluster": cluster}
    if background:
        if check:
            raise ConfigError("--background returns before anything is known, so it excludes --check")
        started = []
        for mountpoint, items in wanted.items():
            with asking.job(mountpoint, "warm", items, **how) as number:
                started.append({"job": number, "mountpoint": str(mountpoint)})
        if as_json:
            show.data(started)
        else:
            say(*(f"job {job['job']} on {job['mountpoint']}" for job in started))
        return 0
    done = _jobs("check" if check else "warm", wanted, as_json, **how)
    if check:
        whole = done["cached_bytes"] >= done["bytes"] and done["cached_files"] >= done["files"]
        if not as_json:
            say(
                f"{done['cached_files']:,} of {done['files']:,} files are cached whole, "
                f"{about_bytes(done['cached_bytes'])} of {about_bytes(done['bytes'])} "
                f"({about_share(done['cached_bytes'], done['bytes'])})"
            )
        return 0 if whole else 1
    for node in done["silent"]:
        say(f"cachefs: {node} does not answer: others keep its share meanwhile", err=True)
    if done["vanished"] and not done["files"]:
        raise MountError(
            f"nothing that {profile} names ({done['vanished']:,} files or parts) is below {paths[0]}: was another "
            "directory recorded?"
        )
    vanished = f"; {done['vanished']:,} are not there any more" if done["vanished"] else ""
    elsewhere = ""
    if done["elsewhere_bytes"]:
        state = "were fetched by other nodes" if cluster else "are for other nodes to fetch (--cluster)"
        elsewhere = f"; {about_bytes(done['elsewhere_bytes'])} {state}"
    note(
        f"{done['done_files']:,} files, {about_bytes(done['done_bytes'])}: {about_bytes(done['fetched_bytes'])} fetched "
        f"in {done['seconds']:.1f} s{elsewhere}, the rest was cached{vanished}"
    )
    return 0


@click.command(short_help="Drop files from the cache.")
@paths
@list_option
@as_json("The result as JSON.")
def evict(paths: tuple[Path, ...], list_file: str | None, as_json: bool) -> None:
    """Drop the cached blocks of the files at and below PATH. Pinned files stay.

    An open file is dropped when it is closed. A later read fetches the files again.
    """
    done = _jobs("evict", paths_by_mount(paths, list_file), as_json)
    staying = f"; {done['kept_files']:,} files stay, pinned or in use" if done["kept_files"] else ""
    note(f"freed {about_bytes(done['freed_bytes'])} of {done['done_files']:,} files{staying}")


@click.command(short_help="Fetch files and never evict them.")
@paths
@list_option
@parallel_option
@as_json("The result as JSON.")
def pin(paths: tuple[Path, ...], list_file: str | None, parallel: int | None, as_json: bool) -> None:
    """Fetch the files at and below PATH, and never evict them until cachefs unpin.

    Pins survive restarts. A pin holds for the present version of a file: if the file is replaced at the origin, the
    new version is not pinned. The mount's --pin-budget limits the sum of all pins.
    """
    done = _jobs("pin", paths_by_mount(paths, list_file), as_json, at_once=parallel or 0)
    note(
        f"pinned {done['done_files']:,} files, {about_bytes(done['done_bytes'])} "
        f"({about_bytes(done['fetched_bytes'])} fetched)"
    )


@click.command(short_help="Allow pinned files to be evicted.")
@paths
@list_option
@as_json("The result as JSON.")
def unpin(paths: tuple[Path, ...], list_file: str | None, as_json: bool) -> None:
    """Allow the files at and below PATH to be evicted again. They stay cached until their space is needed.

    With the mountpoint as PATH, all pins end, those of versions that were replaced or removed at the origin, too.
    """
    done = _jobs("unpin", paths_by_mount(paths, list_file), as_json)
    note(f"no pin is left on {done['done_files']:,} files")


def _jobs(action: str, wanted: Mapping[Path, Iterable[Any]], as_json: bool, **how: Any) -> dict[str, Any]:
    """Run a job on each mount in turn (`how`: see `asking.job`). Returns the sums of their results. Raises if any failed."""
    ended: list[dict[str, Any]] = []
    for mountpoint, items in wanted.items():
        with asking.job(mountpoint, action, items, **how) as number:
            ended.append(show.progress(asking.follow_job(mountpoint, number)))
    counts = [name for name, value in ended[0].items() if type(value) in (int, float)]
    total: dict[str, Any] = {name: sum(job[name] for job in ended) for name in counts}
    total["silent"] = sorted({node for job in ended for node in job["silent"]})
    if as_json:
        show.data(ended if len(ended) > 1 else ended[0])
    for done in ended:
        if done["error"]:
            raise MountError(done["error"])
        if done["state"] == "stopped":
            raise MountError(f"job {done['id']} was stopped after {done['done_files']:,} files")
    if total["failed"]:
        failures = [failure for job in ended for failure in job["failures"]]
        more = ", …" if total["failed"] > FAILURES_NAMED else ""
        raise MountError(f"{total['failed']:,} paths failed: {'; '.join(failures[:FAILURES_NAMED])}{more}")
    return total


DRAIN_EVERY_S = 0.5
"""Seconds between two requests for the lines of a recording, of which the daemon holds a bounded number."""

PLAN = "hint"
"""The default name of a plan. Training jobs have plans of other names."""


@click.command(short_help="Tell a mount what will be read next.")
@click.argument("mountpoint", type=Place())
@list_option
@click.option("--plan", default=PLAN, help=f"Name of the plan; a mount may have several.  [{PLAN}]")
@click.option("--epoch", type=click.IntRange(0), default=0, help="The number of the epoch.  [0]")
@click.option("--drop", is_flag=True, help="Forget the plan.")
def hint(mountpoint: Path, list_file: str | None, plan: str, epoch: int, drop: bool) -> None:
    """Tell the mount at MOUNTPOINT that the files of LIST will be read next, in this order.

    The daemon prefetches them, some files before the readers' position. The list of the next --epoch may be given while the
    present one is read. In Python, cachefs.hints does this for a DataLoader.
    """
    if drop and list_file is not None:
        raise ConfigError("--drop forgets a plan, and -T gives it files: leave one of them out")
    mount, _ = asking.mount_of(mountpoint)
    if drop:
        if not hints.drop(mount, plan):
            raise NotFound(f"no plan {plan} on {mount}: cachefs status names those there are")
        note(f"plan {plan} is forgotten")
        return
    if list_file is None:
        raise ConfigError("no LIST: give the paths with -T, one a line")
    wanted = places.paths_in_list(list_file, mountpoint)
    if list(wanted) != [mount]:
        raise ConfigError(f"{list_file} has paths that are not below {mount}")
    hints.send_files(mount, plan, wanted[mount])
    order = array("I", range(len(wanted[mount])))
    hints.send_order(mount, plan, epoch, order, hints.digest(wanted[mount]))
    note(f"plan {plan}, epoch {epoch}: {len(wanted[mount]):,} files")


@click.command(short_help="Record what is opened and read.")
@click.argument("mountpoint", type=Place())
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=PathText(),
    required=True,
    help="The file to write; - is standard output.",
)
@click.option("--for", "how_long", metavar="TIME", help="End after this time, like 5m.  [until Ctrl-C]")
def record(mountpoint: Path, output: str, how_long: str | None) -> None:
    """Record which files of the mount at MOUNTPOINT are opened, and which parts of large ones are read.

    One JSON object a line: t (seconds since the start), path, size, offset, length, pid. The line of an
    open has the length of the whole file. For a large file that is read through the daemon, it has length
    0, and lines for its reads follow. cachefs warm --profile fetches what was read, cachefs simulate computes
    what cache it needs. Reads that the kernel answers from its page cache are not recorded.
    """
    mount, _ = asking.mount_of(mountpoint)
    until = float("inf") if how_long is None else time.monotonic() + places.parse_seconds(how_long, "--for")
    enough = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: enough.set())
    recording = asking.ask(mount, "record_start")  # before FILE is truncated, because the daemon may refuse
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
        return click.open_file(output, "w", encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{output}: {exc.strerror}") from exc


def _record(
    mount: Path, recording: int, file: IO[str], until: float, enough: threading.Event
) -> tuple[int, int]:
    """Write lines until the time `until` or until `enough` is set. Returns (lines written, lines lost)."""
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


POLICIES: tuple[Eviction, ...] = ("lru", "epoch", "auto")
SHAPES = (
    "shuffled-files",
    "shuffled-shards",
    "scan",
    "zipf",
    "uniform",
    "opened-twice",
    "validated",
    "takeover",
    "turns",
    "two-jobs",
)
SHOWN = 8
"""Most epochs in a line: the first ones and the last."""


@click.command(short_help="Compute how much cache is enough, from a trace.")
@click.option(
    "--trace", metavar="FILE", type=click.Path(path_type=Path), help="A recording of cachefs record."
)
@click.option("--shape", type=click.Choice(SHAPES), help="A synthetic trace instead: an order of reading.")
@click.option("--cache-size", required=True, metavar="SIZE,…", help="One size or several: 100G,200G.")
@click.option(
    "--policy", type=click.Choice([*POLICIES, "all"]), default="all", help="Policy of eviction.  [all]"
)
@click.option("--block-size", metavar="SIZE", default="1M", help="Block size of the mount.  [1M]")
@click.option("--dataset-size", metavar="SIZE", help="Size of a shape's dataset.  [10G]")
@click.option("--file-size", metavar="SIZE", help="Size of a shape's files.  [64M for shards, else 1M]")
@click.option("--epochs", type=click.IntRange(1, 1000), help="Epochs of a shape.  [5]")
@click.option("--seed", type=int, help="Seed of a shape.  [0]")
@as_json()
def simulate(
    trace: Path | None,
    shape: str | None,
    cache_size: str,
    policy: str,
    block_size: str,
    dataset_size: str | None,
    file_size: str | None,
    epochs: int | None,
    seed: int | None,
    as_json: bool,
) -> None:
    """Compute the hit ratio of each epoch and the bytes from the origin, for each cache size.

    \b
    cachefs record /mnt/data -o trace.jsonl --for 2h
    cachefs simulate --trace trace.jsonl --cache-size 500G,1T,2T
    cachefs simulate --shape shuffled-files --dataset-size 1T --cache-size 500G

    Nothing is mounted or fetched. RAM and SSD are one tier. Prefetch is not simulated.
    """
    from cachefs.observe import simulate as simulation

    if (trace is None) == (shape is None):
        raise ConfigError("give it either --trace FILE or --shape NAME")
    sizes = [_bytes(text, "cache-size") for text in cache_size.split(",")]
    blocks = _bytes(block_size, "block-size")
    if blocks < 4096:
        raise ConfigError(f"--block-size {block_size!r} is smaller than 4K")
    if trace is not None:
        if any(of_shape is not None for of_shape in (dataset_size, file_size, epochs, seed)):
            raise ConfigError(
                "--dataset-size, --file-size, --epochs and --seed are of a --shape, not of a trace"
            )
        played = simulation.load(trace)
    else:
        assert shape is not None
        each = _bytes(file_size or format_bytes(simulation.FILE_BYTES.get(shape, 1 << 20)), "file-size")
        whole = _bytes(dataset_size or "10G", "dataset-size")
        if whole // each > simulation.MOST_FILES:
            raise ConfigError(
                f"a shape of more than {simulation.MOST_FILES:,} files: give it a larger --file-size"
            )
        played = simulation.shape(shape, whole, each, epochs or 5, seed or 0)
    policies = POLICIES if policy == "all" else [p for p in POLICIES if p == policy]
    results = [simulation.simulate(played, size, p, blocks) for size in sizes for p in policies]
    if as_json:
        show.data([result.as_dict() for result in results])
    else:
        say(*_table(results))


def _bytes(text: str, option: str) -> int:
    try:
        count = parse_capacity(text)
    except ValueError as exc:
        raise ConfigError(f"--{option} {text!r} is {exc}") from None
    if not count:
        raise ConfigError(f"--{option} {text!r} is nothing")
    return count


def _table(results: list[Any]) -> list[str]:
    epochs = sorted(results[0].asked)
    shown = epochs if len(epochs) <= SHOWN else [*epochs[: SHOWN - 1], epochs[-1]]
    heads = ["#cache", "#policy", *(f"#epoch {epoch}" for epoch in shown), "#from the origin"]
    rows = []
    for result in results:
        ratios = [f"{100 * result.ratio(epoch):.1f} %" for epoch in shown]
        rows.append(
            [about_bytes(result.cache_bytes), result.policy, *ratios, about_bytes(result.store_bytes)]
        )
    return show.table(heads, rows)


COMMANDS = (warm, evict, pin, unpin, hint, record, simulate)

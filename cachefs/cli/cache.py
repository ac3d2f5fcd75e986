"""The verbs that change what is cached: warm, evict, pin, unpin.

Each is a job in the daemon (`cachefs.daemon.warming`). The verb starts it, shows its progress and sums it up in a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from cachefs.base.errors import ConfigError, MountError
from cachefs.base.units import about_bytes, about_share
from cachefs.cli import show
from cachefs.cli.places import Place, listed, mounts_of, only, profiled, wanted_of
from cachefs.cli.show import as_json, note, say

NAMED = 3
"""Failures named in one line."""

paths = click.argument("paths", nargs=-1, metavar="PATH…", type=Place())
at_once = click.option("-p", "--parallel", type=click.IntRange(1), help="Files at a time.  [--concurrency]")


@click.command(short_help="Fetch files into the cache.")
@paths
@listed
@at_once
@click.option("--check", is_flag=True, help="Fetch nothing: say how much is cached; exit 1 if not all of it.")
@click.option("--background", is_flag=True, help="Return at once; cachefs status shows how far it is.")
@click.option("--stop", is_flag=True, help="End what runs in the background below PATH's mount.")
@click.option("--profile", metavar="FILE", help="Fetch what a recording of cachefs record has touched.")
@click.option("--cluster", is_flag=True, help="Have the other nodes fetch their share, too.")
@as_json("What became of it, as JSON.")
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

    Files that are cached are skipped, so a second run goes on where the first one ended; Ctrl-C ends it, and
    what was fetched stays. With --peers, each node fetches its own share: run it on all nodes, or with --cluster on one.
    Requests of readers go first. A job never evicts what it has fetched: it is refused when it needs more than the cache
    holds.

    \b
    A directory:             cachefs warm /mnt/data/train
    A list of paths:         cachefs warm -T list.txt
    Relative to a mount:     find … | cachefs warm -T - /mnt/data
    Is it all there:         cachefs warm --check /mnt/data/train
    As the last run read:    cachefs warm --profile run.jsonl /mnt/data
    """
    from cachefs.daemon import asking

    if stop:
        count = sum(asking.stop_jobs(mountpoint) for mountpoint in mounts_of(paths))
        note(f"{count} jobs ended")
        return 0
    if profile and list_file is not None:
        raise ConfigError("--profile and -T are two lists of what to fetch: give one of them")
    wanted: Mapping[Path, Iterable[Any]]
    wanted = profiled(profile, only(paths, "--profile")) if profile else wanted_of(paths, list_file)
    if background:
        if check:
            raise ConfigError("--background returns before anything is known, so it does not go with --check")
        begun = []
        for mountpoint, items in wanted.items():
            running = asking.job(
                mountpoint, "warm", items, at_once=parallel or 0, vanish=bool(profile), cluster=cluster
            )
            with running as number:
                begun.append({"job": number, "mountpoint": str(mountpoint)})
        if as_json:
            show.data(begun)
        for job in () if as_json else begun:
            say(f"job {job['job']} on {job['mountpoint']}")
        return 0
    action = "check" if check else "warm"
    done = _jobs(action, wanted, parallel, vanish=bool(profile), cluster=cluster, as_json=as_json)
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
    gone = f"; {done['vanished']:,} are not there any more" if done["vanished"] else ""
    elsewhere = ""
    if done["elsewhere_bytes"]:
        way = "have been brought to other nodes" if cluster else "are for other nodes to fetch (--cluster)"
        elsewhere = f"; {about_bytes(done['elsewhere_bytes'])} {way}"
    note(
        f"{done['done_files']:,} files, {about_bytes(done['done_bytes'])}: {about_bytes(done['fetched_bytes'])} fetched "
        f"in {done['seconds']:.1f} s{elsewhere}, the rest was here{gone}"
    )
    return 0


@click.command(short_help="Drop files from the cache.")
@paths
@listed
@as_json("What became of it, as JSON.")
def evict(paths: tuple[Path, ...], list_file: str | None, as_json: bool) -> None:
    """Drop what is cached of the files at and below PATH. Pinned files stay.

    An open file is dropped when it is closed. Reading the files later fetches them again.
    """
    done = _jobs("evict", wanted_of(paths, list_file), as_json=as_json)
    kept = f"; {done['kept_files']:,} files stay, pinned or in use" if done["kept_files"] else ""
    note(f"freed {about_bytes(done['freed_bytes'])} of {done['done_files']:,} files{kept}")


@click.command(short_help="Fetch files and never evict them.")
@paths
@listed
@at_once
@as_json("What became of it, as JSON.")
def pin(paths: tuple[Path, ...], list_file: str | None, parallel: int | None, as_json: bool) -> None:
    """Fetch the files at and below PATH, and keep them until cachefs unpin: they are never evicted.

    Pins survive restarts. A pin is of the present version of a file: a file that is replaced at the origin is not
    pinned. All pins together are bounded by the mount's --pin-budget.
    """
    done = _jobs("pin", wanted_of(paths, list_file), parallel, as_json=as_json)
    note(
        f"pinned {done['done_files']:,} files, {about_bytes(done['done_bytes'])} "
        f"({about_bytes(done['fetched_bytes'])} fetched)"
    )


@click.command(short_help="Allow pinned files to be evicted.")
@paths
@listed
@as_json("What became of it, as JSON.")
def unpin(paths: tuple[Path, ...], list_file: str | None, as_json: bool) -> None:
    """Allow the files at and below PATH to be evicted again. They stay cached until their space is needed."""
    done = _jobs("unpin", wanted_of(paths, list_file), as_json=as_json)
    note(f"unpinned {done['done_files']:,} files")


def _jobs(
    action: str,
    wanted: Mapping[Path, Iterable[Any]],
    at_once: int | None = None,
    *,
    vanish: bool = False,
    cluster: bool = False,
    as_json: bool = False,
) -> dict[str, Any]:
    """Run a job on each mount, one after the other. What became of them, added up. Raises when files failed."""
    from cachefs.daemon import asking

    ended: list[dict[str, Any]] = []
    for mountpoint, items in wanted.items():
        job = asking.job(mountpoint, action, items, at_once=at_once or 0, vanish=vanish, cluster=cluster)
        with job as number:
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
        more = ", …" if total["failed"] > NAMED else ""
        raise MountError(f"{total['failed']:,} paths failed: {'; '.join(failures[:NAMED])}{more}")
    return total


COMMANDS = (warm, evict, pin, unpin)

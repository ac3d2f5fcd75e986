"""The verbs that change what is cached: warm, evict, pin, unpin.

Each is a job in the daemon (`cachefs.warming`), which goes on however slow its watcher is; here it is started, watched and
summed up in a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from cachefs.cli_lists import listed, mounts_of, only, profiled, wanted_of
from cachefs.cli_look import Place
from cachefs.cli_say import say
from cachefs.errors import ConfigError, MountError
from cachefs.units import about_bytes, about_share

ALIASES = {"warmup": "warm", "load": "warm", "prefetch": "warm", "free": "evict"}
"""Names under which other tools have these verbs."""

NAMED = 3
"""Failures named in one line."""

paths = click.argument("paths", nargs=-1, metavar="PATH…", type=Place())
at_once = click.option("-p", "--parallel", type=click.IntRange(1), help="Files at a time.  [--concurrency]")
as_json = click.option("--json", "as_json", is_flag=True, help="What became of it, as JSON.")


# -- jobs ------------------------------------------------------------------------------------------


@click.command(short_help="Fetch files into the cache.")
@paths
@listed
@at_once
@click.option("--check", is_flag=True, help="Fetch nothing: say how much is cached; exit 1 if not all of it.")
@click.option("--background", is_flag=True, help="Return at once; cachefs status shows how far it is.")
@click.option("--stop", is_flag=True, help="End what runs in the background below PATH's mount.")
@click.option("--profile", metavar="FILE", help="Fetch what a recording of cachefs record has touched.")
@click.option("--cluster", is_flag=True, help="Have the other nodes fetch their share, too.")
@as_json
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
    """Fetch the files at and below PATH, so that reading them later asks the store for nothing.

    What is cached already is passed by, so that running it again goes on where it ended; Ctrl-C ends it, and
    what has come stays. With --peers, each node fetches what it keeps: run it on all, or with --cluster on one.
    Readers overtake it. It never displaces what it has brought: more than the cache
    holds is refused in one line.

    \b
    A directory:             cachefs warm /mnt/data/train
    A list of paths:         cachefs warm -f list.txt
    Relative to a mount:     find … | cachefs warm -f - /mnt/data
    Is it all there:         cachefs warm --check /mnt/data/train
    As the last run read:    cachefs warm --profile run.jsonl /mnt/data
    """
    from cachefs import asking

    if stop:
        count = sum(asking.stop_jobs(mountpoint) for mountpoint in mounts_of(paths))
        say(f"{count} jobs ended", err=True)
        return 0
    if profile and list_file is not None:
        raise ConfigError("--profile and -f are two lists of what to fetch: give one of them")
    wanted: Mapping[Path, Iterable[Any]]
    wanted = profiled(profile, only(paths, "--profile")) if profile else wanted_of(paths, list_file)
    if background:
        if check or as_json:
            raise ConfigError("--background shows nothing, so it goes neither with --check nor with --json")
        for mountpoint, items in wanted.items():
            job = asking.job(
                *(mountpoint, "warm", items), at_once=parallel or 0, vanish=bool(profile), cluster=cluster
            )
            with job as number:
                say(f"job {number} on {mountpoint}")
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
    say(
        f"{done['done_files']:,} files, {about_bytes(done['done_bytes'])}: {about_bytes(done['fetched_bytes'])} fetched "
        f"in {done['seconds']:.1f} s{elsewhere}, the rest was here{gone}",
        err=True,
    )
    return 0


@click.command(short_help="Drop files from the cache.")
@paths
@listed
@as_json
def evict(paths: tuple[Path, ...], list_file: str | None, as_json: bool) -> None:
    """Drop what is cached of the files at and below PATH. Pinned files stay.

    What somebody has open goes when it is closed. Reading the files later fetches them again.
    """
    done = _jobs("evict", wanted_of(paths, list_file), as_json=as_json)
    kept = f"; {done['kept_files']:,} files stay, pinned or in use" if done["kept_files"] else ""
    say(f"freed {about_bytes(done['freed_bytes'])} of {done['done_files']:,} files{kept}", err=True)


@click.command(short_help="Keep files in the cache whatever happens.")
@paths
@listed
@at_once
@as_json
def pin(paths: tuple[Path, ...], list_file: str | None, parallel: int | None, as_json: bool) -> None:
    """Fetch the files at and below PATH, and keep them until cachefs unpin: nothing displaces them.

    Pins hold over restarts, and for the versions that are there now: a file that is replaced in the store is
    another. All pins together are bounded by the mount's --pin-budget.
    """
    done = _jobs("pin", wanted_of(paths, list_file), parallel, as_json=as_json)
    say(
        f"pinned {done['done_files']:,} files, {about_bytes(done['done_bytes'])} "
        f"({about_bytes(done['fetched_bytes'])} fetched)",
        err=True,
    )


@click.command(short_help="Let pinned files go like all others.")
@paths
@listed
@as_json
def unpin(paths: tuple[Path, ...], list_file: str | None, as_json: bool) -> None:
    """Let the files at and below PATH go like all others. They stay cached as long as there is room."""
    done = _jobs("unpin", wanted_of(paths, list_file), as_json=as_json)
    say(f"unpinned {done['done_files']:,} files", err=True)


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
    from cachefs import asking, cli_progress

    ended: list[dict[str, Any]] = []
    for mountpoint, items in wanted.items():
        job = asking.job(mountpoint, action, items, at_once=at_once or 0, vanish=vanish, cluster=cluster)
        with job as number:
            ended.append(cli_progress.show(asking.follow_job(mountpoint, number)))
    total = {name: sum(job[name] for job in ended) for name in ended[0] if name in _ADDED}
    total["silent"] = sorted({node for job in ended for node in job["silent"]})
    if as_json:
        click.echo(json.dumps(ended if len(ended) > 1 else ended[0], indent=2))
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


_ADDED = {
    *("files", "bytes", "done_files", "done_bytes", "cached_files", "cached_bytes", "fetched_bytes"),
    "elsewhere_bytes",
    *("freed_bytes", "kept_files", "vanished", "failed", "seconds"),
}


COMMANDS = (warm, evict, pin, unpin)

"""Names: the requests and the memory of listings."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

from bench.harness import Result, Series, scenario
from bench.mounts import OTHERS, Cachefs, Mount, Unavailable
from bench.workspace import Traffic, Workspace

LS_LIMIT_S = 20.0


def ls_l(path: Path) -> float:
    """Seconds of `ls -l`. Raises TimeoutExpired."""
    begun = time.perf_counter()
    env = {**os.environ, "LC_ALL": "C"}
    subprocess.run(
        ["ls", "-l", str(path)], stdout=subprocess.DEVNULL, check=True, timeout=LS_LIMIT_S, env=env
    )
    return time.perf_counter() - begun


@scenario("ls")
def ls(work: Workspace, rounds: int) -> Result:
    """`ls -l` of a directory that is not cached, and once more."""
    result = Result()
    count = work.scale.names
    work.lab.synthesize("names", "", count, 1000)
    first, second = Series("first ls -l", "s", {}), Series("second ls -l", "s", {})
    result.series += [first, second]
    kinds: list[Callable[[], Mount]] = [lambda: Cachefs(work.disk, work.lab, "names")]
    if work.scale.others:
        kinds += [lambda kind=kind: kind(work.disk, work.lab, "names") for kind in OTHERS]  # type: ignore[misc]
    seen: dict[str, list[Traffic]] = {}
    for make in kinds:
        with ExitStack() as stack:
            try:
                mount = stack.enter_context(make())
            except Unavailable as exc:
                result.note(str(exc))
                continue
            seen[mount.name] = []
            for series in (first, second):
                counting = mount.counting() if isinstance(mount, Cachefs) else nullcontext({})
                with work.traffic() as traffic, counting as counted:
                    try:
                        series.values[mount.name] = [ls_l(mount.path)]
                    except subprocess.TimeoutExpired:
                        result.note(f"{mount.name}: ls -l was not done within {LS_LIMIT_S:.0f} s")
                seen[mount.name].append(traffic)
                messages = {kind: n for kind, n in counted.items() if n and kind.startswith("fuse_")}
                if messages:
                    result.note(f"{mount.name}, {series.what}: {messages}")
    for name, (one, two) in seen.items():
        result.note(
            f"{name}: LIST {one.list}, HEAD {one.head}, GET {one.get}; "
            f"second LIST {two.list}, HEAD {two.head}, GET {two.get}"
        )
    cold, again = seen["cachefs"]
    pages = -(-count // 1000)
    result.demand(f"cold ls -l of {count:,} names: LIST", cold.list, "=", pages)
    result.demand(f"cold ls -l of {count:,} names: HEAD", cold.head, "=", 0)
    result.demand("second ls -l: LIST", again.list, "=", 0)
    result.demand("second ls -l: HEAD", again.head, "=", 0)
    return result


@scenario("memory-million")
def memory_million(work: Workspace, rounds: int) -> Result:
    """The daemon's memory after a million names have been listed."""
    result = Result()
    count = work.scale.many_names
    folders = 10
    for folder in range(folders):
        work.lab.synthesize("million", f"folder-{folder:02d}/", count // folders, 1000)
    with Cachefs(work.disk, work.lab, "million", "--metadata-ttl", "1h") as mount:
        before = mount.memory()
        begun = time.perf_counter()
        with work.traffic() as seen:
            listed = sum(1 for folder in mount.path.iterdir() for _ in os.scandir(folder))
        seconds = time.perf_counter() - begun
        memory = mount.memory()
    result.series.append(
        Series(
            "resident memory",
            "MB",
            {
                "before": [before.total / 1e6],
                "after": [memory.total / 1e6],
                "RssAnon": [memory.private / 1e6],
                "RssFile": [memory.files / 1e6],
            },
        )
    )
    result.note(f"{listed:,} names listed in {seconds:.1f} s with {seen.list} LISTs and {seen.head} HEADs")
    if listed != count:
        result.note(f"there are {count:,} names")
    result.demand(f"resident memory with {count:,} names listed, MB", memory.total / 1e6, "≤", 200)
    return result

"""The most frequent requests to a warm mount: opening small files that the kernel or the cache holds, and listing a
directory again.

`null server` is `bench.nullserver`: the least that one Python thread can take for the same requests.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from bench import readers
from bench.harness import Result, Series, interleave, number, scenario
from bench.mounts import OWN, Cachefs, Mount, NullServer
from bench.passthrough import kernel, settle
from bench.tree import ls_l
from bench.workspace import Workspace

WRITABLE = "cachefs (writable)"
NULL_SERVER, NULL_PASSTHROUGH = "null server", "null server, passthrough"
MANY = 8


def _os_open(paths: Sequence[str]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.read(fd, readers.BUFFER)
        os.close(fd)


def _python_open(paths: Sequence[str]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            file.read()


WAYS: Mapping[str, Callable[[Sequence[str]], None]] = {"os.open": _os_open, "open()": _python_open}


@scenario("open-close", rounds=5)
def open_close(work: Workspace, rounds: int) -> Result:
    """Warm small files, opened, read and closed by one process and by eight, beside a minimal server."""
    result = Result()
    tree, keys = work.small("open-close")
    # Long enough that what starts late does not count: the files of ext4 are read four times as often.
    turns = 10 if len(keys) >= 1000 else 1
    with ExitStack() as stack:
        mounts: dict[str, Mount] = {}
        made: tuple[Mount, ...] = (
            kernel(work, "open-close"),
            kernel(work, "open-close", "-o", "rw", name=WRITABLE),
            NullServer(work.disk, work.lab, "open-close", work.on_disk(tree), name=NULL_SERVER),
            NullServer(
                work.disk,
                work.lab,
                "open-close",
                work.on_disk(tree),
                "--passthrough",
                name=NULL_PASSTHROUGH,
            ),
        )
        for mount in made:
            mounts[mount.name] = stack.enter_context(mount)
        roots = {"ext4": work.on_disk(tree)} | {name: mount.path for name, mount in mounts.items()}
        paths = {name: [f"{root}/{key}" for key in keys] for name, root in roots.items()}
        for name, mine in paths.items():
            readers.small(mine)
            if isinstance(own := mounts.get(name), Cachefs):
                settle(own, functools.partial(readers.small, mine))
        for way, read in WAYS.items():
            for count in (1, MANY):
                _measure(result, rounds, way, read, count, paths, mounts, turns)
    return result


def _measure(
    result: Result,
    rounds: int,
    way: str,
    read: Callable[[Sequence[str]], None],
    count: int,
    paths: Mapping[str, list[str]],
    mounts: Mapping[str, Mount],
    turns: int,
) -> None:
    spent: dict[str, list[float]] = {name: [] for name in mounts}
    sent: dict[str, float] = {}

    def files_per_s(name: str) -> float:
        mine = paths[name] * (turns if name in mounts else 4 * turns)
        parts = [functools.partial(read, mine[n::count]) for n in range(count)]
        if (mount := mounts.get(name)) is None:
            return len(mine) / readers.together(parts)
        before = mount.cpu_s()
        if isinstance(mount, Cachefs):
            with mount.counting() as counted:
                seconds = readers.together(parts)
            messages = sum(value for key, value in counted.items() if _is_message(key))
        else:
            seconds = readers.together(parts)
            messages = len(mine) * (3 if read is _python_open else 2)
        spent[name].append(1e6 * (mount.cpu_s() - before) / max(1, messages))
        sent[name] = messages / len(mine)
        return len(mine) / seconds

    shown = f"{way}, {count} reader{'s' if count > 1 else ''}"
    contenders = {name: functools.partial(files_per_s, name) for name in paths}
    series = interleave(rounds, contenders, result, what=f"warm small files, {shown}", unit="files/s")
    cost = Series(f"daemon CPU, {shown}", "µs a message", spent)
    result.series.append(cost)
    shares = ", ".join(f"{name} {number(series.ratio(name, 'ext4'))}" for name in mounts)
    result.note(f"{shown}: rate / ext4: {shares}; messages a file: {_words(sent)}")
    if read is _os_open:
        least = 0.35 if count == 1 else 0.55
        result.demand(f"{shown}: rate / ext4", series.ratio(OWN, "ext4"), "≥", least)
        result.demand(f"{shown}: daemon CPU, µs a message", cost.medians()[OWN], "≤", 8)


def _is_message(key: str) -> bool:
    return key.startswith("fuse_") and not key.endswith("_bytes") and not key.startswith("fuse_errors")


def _words(counted: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(round(value, 2))}" for name, value in counted.items())


@scenario("list-again", rounds=5)
def list_again(work: Workspace, rounds: int) -> Result:
    """`ls -l` of a directory, for the first time and again, beside a minimal server."""
    result = Result()
    count = work.scale.names
    work.lab.synthesize("list-again", "", count, 1000)
    tree = work.disk / "ext4" / "list-again"
    tree.mkdir(parents=True)
    for index in range(count):
        (tree / f"{index:08d}.bin").touch()
    first, spent = Series("list-again, first", "s", {}), Series("list-again, second: daemon CPU", "s", {})
    again: dict[str, list[float]] = {"ext4": []}
    read_again = 0

    def list_once(name: str, mount: Mount) -> None:
        first.values.setdefault(name, []).append(ls_l(mount.path))

    def list_more(name: str, mount: Mount) -> None:
        before = mount.cpu_s()
        again.setdefault(name, []).append(ls_l(mount.path))
        spent.values.setdefault(name, []).append(mount.cpu_s() - before)

    for _ in range(rounds):
        again["ext4"].append(ls_l(tree))
        for name, mount in (
            (OWN, kernel(work, "list-again")),
            (WRITABLE, kernel(work, "list-again", "-o", "rw")),
            (NULL_SERVER, NullServer(work.disk, work.lab, "list-again", tree, name=NULL_SERVER)),
        ):
            with mount:
                if not isinstance(mount, Cachefs):
                    list_once(name, mount)
                    list_more(name, mount)
                    continue
                with work.traffic() as traffic, mount.counting() as cold:
                    list_once(name, mount)
                with mount.counting() as warm:
                    list_more(name, mount)
                read_again = max(read_again, warm["fuse_readdir"])
                said = f"{name}: LIST {traffic.list}, HEAD {traffic.head}, READDIRPLUS {cold['fuse_readdir']}"
                if said not in result.notes:
                    result.note(said)
    second = Series("list-again, second", "s", again)
    result.series += [first, second, spent]
    result.demand(f"second ls -l of {count:,} names: READDIRPLUS messages", read_again, "=", 0)
    result.demand(f"cold ls -l of {count:,} names, s", first.medians()[OWN], "≤", 0.2)
    result.demand(f"second ls -l of {count:,} names, s", second.medians()[OWN], "≤", 0.03)
    return result

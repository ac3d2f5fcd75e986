"""Requests that the daemon must answer itself: their rate with each backend."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench import readers
from bench.harness import Result, Series, interleave, number, scenario
from bench.mounts import NULL, OWN, PYFUSE3, Cachefs, Mount, Null
from bench.passthrough import kernel, pyfuse3
from bench.workspace import Workspace

REQUESTS = 10_000
READERS = 4
HOLE = 1 << 30
"""Bytes of the file of `backend-requests` that are never read, even by readahead, so that it is never in passthrough."""


@scenario("backend-requests", rounds=5)
def backend_requests(work: Workspace, rounds: int) -> Result:
    """Requests that the daemon must answer itself: 4 KiB READs of a file that is not complete, and GETATTRs."""
    result = Result()
    size = work.scale.warm
    tree = work.big("requests", size)
    os.truncate(tree / "0.bin", size + HOLE)
    work.lab.serve("requests", tree)  # the store knows a file by the size it had
    pages = [number * readers.PAGE for number in range(size // readers.PAGE)]
    count = min(REQUESTS, len(pages))
    dice = random.Random("backend-requests")
    with ExitStack() as stack:
        mounts: dict[str, Mount] = {}
        options = ("--metadata-ttl", "1h")
        for mount in (
            kernel(work, "requests", *options),
            pyfuse3(work, "requests", *options),
            Null(work.disk, work.lab, "requests", tree),
        ):
            mounts[mount.name] = stack.enter_context(mount)
        paths = {name: mount.path / "0.bin" for name, mount in mounts.items()}
        for path in paths.values():
            _read_part(path, size)
        work.quiet()
        cost = Series("daemon-served READs: daemon CPU", "µs each", {name: [] for name in mounts})

        def served(name: str, counter: str, sent: int, measure: Callable[[], float]) -> tuple[float, float]:
            """(requests a second, CPU seconds a request). The daemon counts the requests; the null filesystem counts
            none."""
            mount = mounts[name]
            if not isinstance(mount, Cachefs):
                before = mount.cpu_s()
                seconds = measure()
                return sent / seconds, (mount.cpu_s() - before) / sent
            with mount.counting() as counted:
                before = mount.cpu_s()
                seconds = measure()
                spent = mount.cpu_s() - before
            if not 0.9 * sent <= counted[counter] <= 1.1 * sent:
                result.note(f"{name}: {counted[counter]:,} {counter} for {sent:,} calls")
            return counted[counter] / seconds, spent / max(1, counted[counter])

        def preads(name: str, processes: int) -> Callable[[], float]:
            def measure() -> float:
                offsets = dice.sample(pages, count)
                _forget(paths[name])
                parts = [
                    functools.partial(_scattered, paths[name], offsets[n::processes])
                    for n in range(processes)
                ]
                rate, spent = served(name, "fuse_read", count, lambda: readers.together(parts))
                if processes > 1:
                    cost.values[name].append(1e6 * spent)
                return rate

            return measure

        def getattrs(name: str) -> Callable[[], float]:
            return lambda: served(
                name, "fuse_getattr", count, lambda: readers.attributes(paths[name], count)
            )[0]

        one, many = (
            interleave(
                rounds,
                {name: preads(name, processes) for name in mounts},
                result,
                what=f"daemon-served 4 KiB READs, {words}",
                unit="1/s",
            )
            for processes, words in ((1, "one reader"), (READERS, f"{READERS} readers"))
        )
        what = "daemon-served GETATTRs, one caller"
        stats = interleave(rounds, {name: getattrs(name) for name in mounts}, result, what=what, unit="1/s")
    result.series.append(cost)
    for series in (one, many, stats):
        result.note(f"{series.what}: {OWN} / null filesystem {number(series.ratio(OWN, NULL))}")
    result.demand("READs a second, one reader: native backend / pyfuse3", one.ratio(OWN, PYFUSE3), "≥", 1.4)
    result.demand(
        f"READs a second, {READERS} readers: native backend / pyfuse3", many.ratio(OWN, PYFUSE3), "≥", 1.4
    )
    return result


def _read_part(path: Path, size: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    for offset in range(0, size, readers.BUFFER):
        os.pread(fd, readers.BUFFER, offset)
    os.close(fd)


def _forget(path: Path) -> None:
    """Make the kernel drop its pages and attributes of this file."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _scattered(path: Path, offsets: list[int]) -> None:
    """A process that reads pages one by one."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    readers.scattered(fd, offsets)
    os.close(fd)

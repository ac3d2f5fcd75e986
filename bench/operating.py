"""What it costs to look at a mount, and what programs see while its store does not answer.

On a machine that others use, rates differ by more than the hundredth that looking may cost. So what a scrape takes is
measured by itself, in the processor time of the daemon, where it can be told; the rates beside it are only shown.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from bench import readers
from bench.harness import Result, Series, interleave, scenario
from bench.lab.client import LabStore
from bench.mounts import Cachefs
from bench.workspace import Workspace

SCRAPE_S, PAGE_S = 1.0, 2.0
"""Seconds between two requests for `/metrics`, and between those of an open page (`EVERY_MS` in page.html)."""

LOOKS = 100
"""Replies over which the processor time of a reply is averaged."""

_LOOKER = """
import sys, time
from urllib.request import ProxyHandler, build_opener
base, scrape_s, page_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
ask = lambda path: build_opener(ProxyHandler({})).open(base + path).read()
ask("/"), ask("/history.json"), print(flush=True)
due = {"/metrics": 0.0, "/status.json": 0.0}
while True:
    for path, every in (("/metrics", scrape_s), ("/status.json", page_s)):
        if time.monotonic() >= due[path]:
            ask(path)
            due[path] = time.monotonic() + every
    time.sleep(0.05)
"""


@contextmanager
def _looked_at(mount: Cachefs) -> Iterator[None]:
    """A scraper and an open page, in a process of their own."""
    arguments = (_endpoint(mount), str(SCRAPE_S), str(PAGE_S))
    looker = subprocess.Popen([sys.executable, "-c", _LOOKER, *arguments], stdout=subprocess.PIPE)
    try:
        assert looker.stdout is not None
        looker.stdout.readline()  # the page is open
        yield
    finally:
        looker.kill()
        looker.communicate()


def _endpoint(mount: Cachefs) -> str:
    return f"http://{mount.status()['endpoint']}"


@scenario("watching", rounds=9)
def watching(work: Workspace, rounds: int) -> Result:
    """Warm small files: without metrics, with metrics that no client requests, and scraped with an open page."""
    result = Result()
    _, keys = work.small("watching")
    with ExitStack() as stack:
        plain = stack.enter_context(Cachefs(work.disk, work.lab, "watching", name="without"))
        seen = stack.enter_context(
            Cachefs(work.disk, work.lab, "watching", "--metrics", "127.0.0.1:0", name="watched")
        )
        cpu = Series("processor time of the daemon, µs a file", "µs", {})
        paths = {mount.name: [f"{mount.path}/{key}" for key in keys] for mount in (plain, seen)}
        for mine in paths.values():
            for _ in range(2):
                readers.small(mine)

        def turn(name: str, mount: Cachefs) -> float:
            """Read for a while. Returns files a second."""
            begun, spent, files = time.perf_counter(), mount.cpu_s(), 0
            while time.perf_counter() - begun < work.scale.limit_s:
                files += readers.small(paths[mount.name]).files
            seconds = time.perf_counter() - begun
            cpu.values.setdefault(name, []).append(1e6 * (mount.cpu_s() - spent) / files)
            return files / seconds

        def watched() -> float:
            with _looked_at(seen):
                return turn("watched", seen)

        contenders = {
            "without": lambda: turn("without", plain),
            "unwatched": lambda: turn("unwatched", seen),
            "watched": watched,
        }
        series = interleave(rounds, contenders, result, what="warm small files", unit="files/s")
        result.series.append(cpu)
        cost = {path: _cost_s(seen, path) for path in ("/metrics", "/status.json")}
    result.note(", ".join(f"{path}: {1e3 * spent:.2f} ms of the daemon" for path, spent in cost.items()))
    share = cost["/metrics"] / SCRAPE_S + cost["/status.json"] / PAGE_S
    result.demand("scraped with the page open: processor time", 100 * share, "≤", 1.0, " % of a processor")
    for other in ("unwatched", "without"):
        rate, spent = series.ratio("watched", other), cpu.ratio("watched", other)
        result.note(f"watched / {other}: {rate:.3f} of the rate, {spent:.3f} of the processor time a file")
    return result


def _cost_s(mount: Cachefs, path: str) -> float:
    """Processor time of the daemon for one reply, less its time at rest."""
    opener, where = build_opener(ProxyHandler({})), _endpoint(mount) + path
    opener.open(where).read()
    spent, begun = mount.cpu_s(), time.perf_counter()
    for _ in range(LOOKS):
        opener.open(where).read()
    spent, seconds = mount.cpu_s() - spent, time.perf_counter() - begun
    idle = mount.cpu_s()
    time.sleep(seconds)
    return (spent - (mount.cpu_s() - idle)) / LOOKS


# -- a store that does not answer ------------------------------------------------------------------

READERS = 4
"""The number of processes that read cached files, and of those that read others."""

CACHED, TIMEOUT_S = 40, 60.0
"""Cached files; the mount's `--timeout`, which is the default."""

_READER = """
import json, os, sys, time
paths, until = sys.argv[2:], time.monotonic() + float(sys.argv[1])
told, longest = {}, 0.0
while time.monotonic() < until:
    for path in paths:
        began = time.monotonic()
        try:
            with open(path, "rb", buffering=0) as file:
                said = 0 if len(file.read()) == os.fstat(file.fileno()).st_size else "short"
        except OSError as exc:
            said = exc.errno
        told[said] = told.get(said, 0) + 1
        longest = max(longest, time.monotonic() - began)
    time.sleep(0.05)
print(json.dumps([told, longest]))
"""


@scenario("outage")
def outage(work: Workspace, rounds: int) -> Result:
    """The store is stopped (SIGSTOP) for a minute under programs that read cached files, and others"""
    result = Result()
    cached = work.files("outage", ["cached"], CACHED, work.scale.small_size)
    cold = [f"cold/{number}" for number in range(READERS)]
    for key in cold:
        work.lab.put("outage-cold", key, bytes(work.scale.small_size))
    with ExitStack() as stack:
        options = ("--metadata-ttl", "5s", "--prefetch", "off")
        warm = stack.enter_context(Cachefs(work.disk, work.lab, "outage", *options))
        other = stack.enter_context(Cachefs(work.disk, work.lab, "outage-cold", *options))
        for key in cached:
            (warm.path / key).read_bytes()
        os.listdir(other.path / "cold")
        with _stopped(work.lab):
            last_s = work.scale.out_s
            of_cached = [_reading(last_s, [warm.path / key for key in cached]) for _ in range(READERS)]
            of_cold = [_reading(last_s, [other.path / key]) for key in cold]
            longest_d, until = 0, time.monotonic() + last_s
            while time.monotonic() < until:
                longest_d = max(longest_d, _uninterruptible([*of_cached, *of_cold]))
                time.sleep(0.5)
            told_cached, told_cold = _outcome(of_cached), _outcome(of_cold)
            left = _uninterruptible([*of_cached, *of_cold])
        began = time.monotonic()
        while not _reads(other.path / cold[0]) and time.monotonic() - began < 30:
            time.sleep(0.05)
        back_s = time.monotonic() - began
    failed = sum(count for said, count in told_cached[0].items() if said != "0")
    result.demand("cached files: reads that failed", failed, "=", 0)
    result.demand("uncached files: longest time until an errno", told_cold[1], "≤", TIMEOUT_S, " s")
    others = sum(count for said, count in told_cold[0].items() if said != str(errno.EIO))
    result.demand("uncached files: anything but EIO", others, "=", 0)
    result.demand("processes in D state afterwards", left, "=", 0)
    result.demand("until an uncached file is read again", back_s, "≤", 5.0, " s")
    result.note(
        f"{told_cached[0].get('0', 0):,} reads of cached files, the longest {1000 * told_cached[1]:.0f} ms; "
        f"{told_cold[0].get(str(errno.EIO), 0):,} times EIO; at most {longest_d} processes in D at a time"
    )
    return result


@contextmanager
def _stopped(lab: LabStore) -> Iterator[None]:
    os.kill(lab.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(lab.pid, signal.SIGCONT)


def _reading(seconds: float, paths: Sequence[Path]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _READER, str(seconds), *map(str, paths)], stdout=subprocess.PIPE
    )


def _outcome(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[Counter[str], float]:
    """(how often each errno was returned ("0": none), the longest time of one open and read)."""
    told: Counter[str] = Counter()
    longest = 0.0
    for process in processes:
        out, _ = process.communicate(timeout=TIMEOUT_S + 30)
        mine, took = json.loads(out)
        told.update(mine)
        longest = max(longest, took)
    return told, longest


def _uninterruptible(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """How many processes wait uninterruptibly."""
    found = 0
    for process in processes:
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
        except OSError:
            continue
        found += stat[stat.rindex(")") + 2] == "D"
    return found


def _reads(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False

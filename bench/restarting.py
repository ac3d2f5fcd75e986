"""What programs notice when a daemon is killed or upgraded, and the cost of records of open files."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from statistics import median

from bench import readers
from bench.change import crowd
from bench.harness import Result, Series, interleave, scenario
from bench.mounts import Cachefs
from bench.workspace import Workspace
from cachefs.fuse.holder import SHORT_LIFE_S

KILLS, UPGRADES = 10, 10

LIFE_S = SHORT_LIFE_S + 1
"""Seconds from a takeover to the next kill. Derived: a daemon that lives so long is no part of a crash loop, and the next
one stands by."""

ROOM = ("--cache-size", "100G", "--keep-free", "0")
"""Options of a cache with space for the blocks of `Scale.blocks`, which are in the index alone."""

PROBE_S = 0.005
"""Seconds between two opens of the prober."""


class _Prober:
    """Opens and reads files, compares their bytes, and records the longest time of one since the last query."""

    def __init__(self, paths: list[str], contents: list[bytes]) -> None:
        self.longest_s = 0.0
        self.wrong = self.opened = 0
        self._paths = paths
        self._contents = contents
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Prober:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        dice = random.Random(1)
        while not self._ended.wait(PROBE_S):
            number = dice.randrange(len(self._paths))
            begun = time.perf_counter()
            try:
                with open(self._paths[number], "rb") as file:
                    self.wrong += file.read() != self._contents[number]
            except OSError:
                self.wrong += 1
            self.opened += 1
            self.longest_s = max(self.longest_s, time.perf_counter() - begun)


@scenario("restart-unnoticed", rounds=9)
def restart_unnoticed(work: Workspace, rounds: int) -> Result:
    """The daemon is killed, and upgraded, under readers: their pauses; small files with and without records of open
    files."""
    result = Result()
    tree, keys = work.small("restarting")
    with ExitStack() as stack:
        plain = stack.enter_context(
            Cachefs(work.disk, work.lab, "restarting", *ROOM, "--no-restart", name="without")
        )
        kept = stack.enter_context(Cachefs(work.disk, work.lab, "restarting", *ROOM, name="with"))
        cpu = Series("processor time of the daemon, µs a file", "µs", {})
        paths = {mount.name: [f"{mount.path}/{key}" for key in keys] for mount in (plain, kept)}
        for mine in paths.values():
            for _ in range(2):
                readers.small(mine)

        def turn(mount: Cachefs) -> float:
            """Read for a while. Returns files a second."""
            begun, spent, files = time.perf_counter(), mount.cpu_s(), 0
            while time.perf_counter() - begun < work.scale.limit_s:
                files += readers.small(paths[mount.name]).files
            seconds = time.perf_counter() - begun
            cpu.values.setdefault(mount.name, []).append(1e6 * (mount.cpu_s() - spent) / files)
            return files / seconds

        contenders = {"without": lambda: turn(plain), "with": lambda: turn(kept)}
        series = interleave(rounds, contenders, result, what="warm small files", unit="files/s")
        result.series.append(cpu)

        kept.stop()
        crowd(kept, work.scale.blocks)
        kept.start()
        some = keys[:200]
        pauses, upgrades = [], []
        probed = [f"{kept.path}/{key}" for key in some]
        with _Prober(probed, [(tree / key).read_bytes() for key in some]) as prober:
            for number in range(KILLS):
                time.sleep(LIFE_S)
                prober.longest_s = 0.0
                os.kill(kept.status()["pid"], signal.SIGKILL)
                _wait(kept, number + 1)
                time.sleep(0.5)
                pauses.append(prober.longest_s)
            for _ in range(UPGRADES):
                prober.longest_s = 0.0
                said = kept.command("upgrade", str(kept.path))
                if said.returncode:
                    raise RuntimeError(f"cachefs upgrade: {said.stderr.strip()}")
                time.sleep(0.5)
                upgrades.append(prober.longest_s)
    told = Series("pause of a reader", "s", {"killed": pauses, "upgraded": upgrades})
    result.series.append(told)
    for name, values in told.values.items():
        ordered = sorted(values)
        p99 = ordered[min(round(0.99 * len(ordered)), len(ordered) - 1)]
        result.note(f"{name}: median {median(ordered):.2f} s, p99 {p99:.2f} s, worst {ordered[-1]:.2f} s")
    result.note(f"with {work.scale.blocks:,} blocks in the index")
    result.demand("median pause of a reader", median(pauses), "≤", 1.0, " s")
    result.demand("longest pause of a reader", max(pauses), "≤", 2.0, " s")
    result.demand("median pause of a reader, cachefs upgrade", median(upgrades), "≤", 1.0, " s")
    result.demand("longest pause of a reader, cachefs upgrade", max(upgrades), "≤", 2.0, " s")
    result.demand(f"reads that failed or were wrong, of {prober.opened}", prober.wrong, "=", 0)
    result.demand("warm small files, with / without", series.ratio("with", "without"), "≥", 0.97)
    result.note(f"processor time a file, with / without: {cpu.ratio('with', 'without'):.3f}")
    costs = cpu.medians()
    result.demand(
        "processor time of a record", costs["with"] - costs["without"], "≤", 5.0, " µs an open and close"
    )
    return result


def _wait(mount: Cachefs, restarts: int) -> None:
    """Wait until a daemon that has taken over answers."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            if mount.status()["holder"]["restarts"] >= restarts:
                return
        except Exception:
            time.sleep(0.02)
    raise RuntimeError("the daemon is not started again")

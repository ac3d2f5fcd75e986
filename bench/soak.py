"""Leaks: what a daemon holds must not grow with the number of operations.

Threads open, read, write, list, rename and remove on a mount whose cache is a fraction of the data. In some rounds the store
has faults. After each of twenty rounds the daemon is sampled at rest. A count that does not grow from the sixth round on
will not grow later; a descriptor that leaks once in a thousand opens is seen.

What has a bound is brought to it first, by reading more files than any table has rows: the bookkeeping of 8,192 versions
(about 1 KiB each) and what is remembered of 16,384 extents would otherwise grow for 70,000 operations, and look like a leak.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb

from bench import readers
from bench.harness import Result, scenario
from bench.lab.client import LabStore
from bench.lab.dataset import content
from bench.mounts import Cachefs
from bench.workspace import Workspace

ROUNDS, WARM_UP = 20, 6
THREADS = 4
FILES, LARGE, WRITTEN = 400, 8, 30
"""Small files, large files, and names that each thread writes."""

SIZES = (3_000, 20_000, 120_000)
LARGE_SIZE = 3 << 20
"""Bytes of the files: 43 MB in all, more than the cache."""

BOUNDED, BOUNDED_SIZE, BOUNDED_IN = 17_000, 100, 17
"""Files that are read once before the first sample, and their directories. Derived: more than `ledger.REMEMBERED`, the
largest of the tables that grow with versions."""

GROWTH = {
    "anonymous memory": 12 << 20,
    "descriptors": 8.0,
    "tasks": 3.0,
    "threads": 6.0,
    "database readers": 3.0,
    "passthrough files": 8.0,
    "shared memory files": 3.0,
}
"""By how much each may have grown at the end, along a straight line through the samples after the warm-up. Of what is
itself a cache (passthrough files), a tenth of its mean is allowed, too. Guessed: above the noise that was seen, far below a
leak in one of a hundred operations."""

SPELLS: Sequence[Sequence[Mapping[str, Any]]] = (
    (),
    ({"action": "503", "count": 12}, {"action": "reset", "count": 8, "after": 5000}),
    (),
    ({"action": "truncate", "count": 8, "after": 3000}, {"action": "500", "kind": "put", "count": 6}),
    ({"action": "lost-reply", "kind": "put", "count": 3}, {"action": "garbage", "count": 4}),
)
"""The faults of the store, by round."""

STOPPED_EVERY, STOPPED_S = 5, 7.0
"""Rounds in which the store does not answer for a while."""

TOLD = (errno.EIO, errno.ESTALE)
"""Errors that programs may get while the store has faults."""


@dataclass
class Tally:
    done: int = 0
    told: int = 0
    wrong: list[str] = field(default_factory=list)


class Soak:
    """Run the soak on a writable mount of a bucket that `fill` has filled."""

    def __init__(
        self,
        path: Path,
        cache: Path,
        pid: int,
        lab: LabStore,
        bucket: str,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._path, self._cache, self._pid, self._lab, self._status = path, cache, pid, lab, status
        self._bucket = bucket
        self.samples: list[dict[str, float]] = []
        self.tally = Tally()
        self._workers = [_Worker(number, path, self.tally) for number in range(THREADS)]

    def fill_tables(self) -> None:
        """Read a file for each row that any table may have, so that none of them grows any more."""
        for number in range(BOUNDED_IN):
            self._lab.synthesize(self._bucket, f"bounded/{number:02d}/", BOUNDED // BOUNDED_IN, BOUNDED_SIZE)
        files = [place for place in (self._path / "bounded").rglob("*") if place.is_file()]
        readers.share(files, THREADS, lambda place: len(place.read_bytes()))
        self._rest()

    def run(self, operations: int, rounds: int = ROUNDS, *, stops: bool = True) -> None:
        """So many operations, and a sample for each round; without `stops`, the store always answers."""
        for number in range(rounds):
            stopped = stops and number % STOPPED_EVERY == 2
            for fault in SPELLS[number % len(SPELLS)]:
                self._lab.fault(**fault)
            for worker in self._workers:
                worker.unwell = bool(SPELLS[number % len(SPELLS)]) or stopped
            count = operations // rounds // THREADS
            threads = [threading.Thread(target=worker.work, args=(count,)) for worker in self._workers]
            for thread in threads:
                thread.start()
            if stopped:
                time.sleep(0.2)
                os.kill(self._lab.pid, signal.SIGSTOP)
                time.sleep(STOPPED_S)
                os.kill(self._lab.pid, signal.SIGCONT)
            for thread in threads:
                thread.join()
            self._lab.clear_faults()
            self._rest()
            self.samples.append(self._sample())

    def _rest(self) -> None:
        """Wait until no file is open, in flight or waiting for its upload."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            status = self._status()
            origin = status["sources"][0]["origin"]
            busy = status["open_files"] or status["listings"] or (status["uploads"] or {}).get("pending")
            if not (busy or origin["in_flight"] or origin["out_s"] is not None):
                break
            time.sleep(0.05)
        time.sleep(0.3)  # what was released a moment ago is closed by then

    def _sample(self) -> dict[str, float]:
        status, place = self._status(), Path(f"/proc/{self._pid}")
        of_process = dict(
            line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line
        )
        return {
            "anonymous memory": int(of_process["RssAnon"].split()[0]) * 1024,
            "descriptors": len(os.listdir(place / "fd")),
            "threads": int(of_process["Threads"]),
            "tasks": status["tasks"],
            "passthrough files": sum(tier["passthrough_files"] for tier in status["tiers"]),
            "database readers": sum(map(_readers, self._cache.glob("*/data.mdb"))),
            "shared memory files": len(os.listdir("/dev/shm")),
        }


def growth(samples: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Metric → (its growth from the warm-up to the end, along a straight line; the allowed growth)."""
    found = {}
    for name, allowed in GROWTH.items():
        values = [sample[name] for sample in samples[WARM_UP:]]
        mean, middle = sum(values) / len(values), (len(values) - 1) / 2
        rise = sum((i - middle) * (v - mean) for i, v in enumerate(values))
        slope = rise / sum((i - middle) ** 2 for i in range(len(values)))
        most = max(allowed, mean / 10) if name == "passthrough files" else allowed
        found[name] = (slope * (len(values) - 1), most)
    return found


def _readers(data: Path) -> int:
    """Slots of the reader table that were ever used: one for each concurrent reader, and each that leaked."""
    with lmdb.open(str(data.parent), readonly=True, create=False) as env:
        return int(env.info()["num_readers"])


class _Worker:
    """The operations of one thread, which alone writes below its directory."""

    def __init__(self, number: int, path: Path, tally: Tally) -> None:
        self._rng = random.Random(number)
        self._path, self._own = path, path / f"own{number}"
        self._tally = tally
        self._written: dict[str, bytes] = {}
        self.unwell = False

    def work(self, count: int) -> None:
        choices = (
            (self._read, 60),
            (self._part, 10),
            (self._write, 10),
            (self._back, 8),
            (self._list, 4),
            (self._missing, 3),
            (self._rename, 3),
            (self._remove, 3),
            (self._again, 1),
        )
        acts = [act for act, weight in choices for _ in range(weight)]
        for _ in range(count):
            try:
                self._rng.choice(acts)()
            except OSError as exc:
                self._tally.told += 1
                if exc.errno not in TOLD or not self.unwell:
                    self._tally.wrong.append(f"{exc}")
            self._tally.done += 1

    def _is(self, right: object, what: str) -> None:
        if not right:
            self._tally.wrong.append(what)

    def _read(self) -> None:
        number = min(int(self._rng.paretovariate(0.5)), FILES) - 1 if self._rng.random() < 0.5 else None
        key = small(self._rng.randrange(FILES) if number is None else number)
        self._is((self._path / key).read_bytes() == _content(key), f"{key} has other bytes")

    def _part(self) -> None:
        key = f"large/{self._rng.randrange(LARGE)}"
        offset = self._rng.randrange(LARGE_SIZE)
        with open(self._path / key, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), 70_000, offset)
        self._is(_content(key)[offset : offset + 70_000].startswith(data) and data, f"{key} has other bytes")

    def _write(self) -> None:
        name = f"{self._rng.randrange(WRITTEN)}"
        data = self._rng.randbytes(self._rng.choice((10, 5_000, 300_000)))
        self._written.pop(name, None)
        self._own.mkdir(exist_ok=True)
        (self._own / name).write_bytes(data)
        self._written[name] = data

    def _back(self) -> None:
        if self._written:
            name = self._rng.choice(list(self._written))
            self._is((self._own / name).read_bytes() == self._written[name], f"own {name} has other bytes")

    def _list(self) -> None:
        where = self._rng.choice(("", "d0", "d1", "large"))
        self._is(os.listdir(self._path / where), f"{where} is empty")

    def _missing(self) -> None:
        self._is(not (self._path / f"d0/no{self._rng.randrange(50)}").exists(), "what is not there is there")

    def _rename(self) -> None:
        if self._written:
            name, to = self._rng.choice(list(self._written)), f"{self._rng.randrange(WRITTEN)}"
            data = self._written.pop(name)
            self._written.pop(to, None)
            (self._own / name).rename(self._own / to)
            self._written[to] = data

    def _remove(self) -> None:
        if self._written:
            name = self._rng.choice(list(self._written))
            del self._written[name]
            (self._own / name).unlink()

    def _again(self) -> None:
        os.getxattr(self._path / "d0", "user.cachefs.refresh")


def small(number: int) -> str:
    return f"d{number % 2}/f{number:03d}"


_contents: dict[str, bytes] = {}


def _content(key: str) -> bytes:
    return _contents[key]


def fill(lab: LabStore, bucket: str) -> None:
    """Put the data into the bucket."""
    for number in range(FILES):
        _contents[small(number)] = content(small(number), SIZES[number % len(SIZES)])
    for number in range(LARGE):
        _contents[f"large/{number}"] = content(f"large/{number}", LARGE_SIZE)
    lab.bucket(bucket)
    for key, data in _contents.items():
        lab.put(bucket, key, data)


OPTIONS = (
    "--cache-size",
    "16M",
    "--ram",
    "4M",
    "--keep-free",
    "64M",
    "--metadata-ttl",
    "2s",
    "--timeout",
    "9s",
)
"""Options with which all data is evicted, forgotten and fetched again throughout."""


@scenario("soak", rounds=ROUNDS)
def soak(work: Workspace, rounds: int) -> Result:
    """What the daemon holds after tens of thousands of operations on a small cache, with faults of the store in between"""
    result = Result()
    fill(work.lab, "soak")
    with Cachefs(work.disk, work.lab, "soak", "-o", "rw", *OPTIONS) as mount:
        run = Soak(mount.path, mount.cache, mount.status()["pid"], work.lab, "soak", mount.status)
        run.fill_tables()
        run.run(work.scale.soak_operations, rounds)
        counted = mount.metrics()
    for name, (grown, most) in growth(run.samples).items():
        unit = " MB" if name == "anonymous memory" else ""
        scale = 1e6 if unit else 1
        result.demand(f"growth of {name}", grown / scale, "≤", most / scale, unit)
    result.demand("wrong answers", len(run.tally.wrong), "=", 0)
    result.note(f"{run.tally.done:,} operations, {run.tally.told:,} of them were told EIO or ESTALE")
    names = (
        "passthrough_opens",
        "fuse_read",
        "fuse_write",
        "fuse_change",
        "origin_get",
        "origin_put",
        "evicted_blocks",
    )
    result.note(
        ", ".join(f"{name} {counted[name]:,}" for name in (*names, "origin_retries", "origin_outages"))
    )
    for name in GROWTH:
        values = [sample[name] for sample in run.samples]
        scale = 1e6 if name == "anonymous memory" else 1
        result.note(f"{name}: " + " ".join(f"{value / scale:.0f}" for value in values))
    result.notes += run.tally.wrong[:5]
    return result

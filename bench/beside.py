"""Side by side: cold reads and writes of cachefs and of every other mount of its kind that is installed here.

All use the same store and the same reader (`bench/reader.c`), on fresh mounts with empty caches, in turns. The store is also
measured unshaped: then no latency hides what a program itself takes. A row has a rate and the processor time of the
program's processes. The baseline of writes is ext4, that of reads the raw client.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench import readers, writing
from bench.harness import Result, Series, interleave, scenario
from bench.mounts import (
    OWN,
    Cachefs,
    Geesefs,
    Juicefs,
    Mount,
    MountS3,
    MountS3Writing,
    Rclone,
    RcloneWriting,
    S3fs,
    S3fsWriting,
)
from bench.profiling import threads_of
from bench.raw import RawClient, RawWriter
from bench.workspace import SpareMemory, Workspace

RAW, EXT4 = "raw client", "ext4"
ALL_IN_FLIGHT = 64
FIRST = 4096
SMALL_SAVED = 100_000

Make = Callable[[], Mount]


@dataclass
class Row:
    """One figure of all contenders; `costs` has their processor time in the same rounds."""

    rates: Series
    costs: dict[str, list[float]] = field(default_factory=dict)

    def cost(self, name: str, value: float) -> None:
        self.costs.setdefault(name, []).append(value)


def read(work: Workspace, paths: Sequence[Path], threads: int = 1, most: int = 0) -> readers.Reading:
    """Read the first `most` bytes of each file (0: all)."""
    command = [str(work.reader()), str(threads), str(most)]
    names = "".join(f"{path}\n" for path in paths)
    said = subprocess.run(command, input=names, capture_output=True, text=True, timeout=120)
    if said.returncode:
        raise OSError(said.stderr.strip())
    seconds, total = said.stdout.split()
    return readers.Reading(int(total), len(paths), float(seconds))


class Beside:
    """The rows, in the order of the measurements."""

    def __init__(self, work: Workspace, rounds: int) -> None:
        self.work = work
        self.rounds = rounds
        self.result = Result()
        self.missing: set[str] = set()
        self.main_ms: list[float] = []
        scale = work.scale
        kept = max(scale.beside_large, scale.beside_saved, scale.small_files * scale.small_size)
        self.memory = SpareMemory(3 * kept)

    def readers_of(self, bucket: str, tree: Path) -> dict[str, Make]:
        work = self.work
        own = partial(Cachefs, work.disk, work.lab, bucket)
        if not work.scale.others:
            return {OWN: own}
        kinds = {
            kind.name: partial(kind, work.disk, work.lab, bucket) for kind in (S3fs, Rclone, MountS3, Geesefs)
        }
        return {OWN: own, **kinds, Juicefs.name: partial(Juicefs, work.disk, work.lab, bucket, tree)}

    def writers(self) -> dict[str, Make]:
        work, bucket = self.work, "beside-saved"
        work.lab.bucket(bucket)
        own = partial(Cachefs, work.disk, work.lab, bucket, "-o", "rw")
        if not work.scale.others:
            return {OWN: own}
        kinds = (S3fsWriting, RcloneWriting, MountS3Writing, Geesefs, Juicefs)
        return {OWN: own, **{kind.name: partial(kind, work.disk, work.lab, bucket) for kind in kinds}}

    def shape(self, shaped: bool) -> AbstractContextManager[None]:
        return self.work.shaped() if shaped else nullcontext()

    def row(
        self,
        what: str,
        unit: str,
        shaped: bool,
        makes: dict[str, Make],
        measure: Callable[[Mount], float],
        others: dict[str, Callable[[], float]],
        *,
        each: int = 1,
    ) -> Row:
        """Measure each contender with a fresh mount. Its processor time is divided by `each`, in ms if there are several.
        Memory is prepared before each: on a machine whose host provides it at the first access, that costs 2 s a GiB."""
        named = f"{what}, {'20 ms and 200 MB/s' if shaped else 'store unshaped'}"
        row = Row(Series(named, unit, {}))

        def mounted(name: str, make: Make) -> float:
            with make() as mount:
                before = mount.all_cpu_s()
                mains = threads_of(mount.pid)[mount.pid][1]
                with self.memory.free():
                    value = measure(mount)
                factor = 1e3 / each if each > 1 else 1.0
                row.cost(name, factor * (mount.all_cpu_s() - before))
                if name == OWN and each > 1 and not shaped:
                    self.main_ms.append(factor * (threads_of(mount.pid)[mount.pid][1] - mains))
            return value

        there = {name: make for name, make in makes.items() if name not in self.missing}
        contenders = {**others, **{name: partial(mounted, name, make) for name, make in there.items()}}
        with self.shape(shaped):
            row.rates = interleave(self.rounds, contenders, self.result, what=named, unit=unit)
        self.missing |= contenders.keys() - row.rates.values.keys()
        cost = "ms a file" if each > 1 else "s"
        self.result.series.append(Series(f"{named}: processor time", cost, row.costs))
        return row


@scenario("side-by-side", rounds=1)
def side_by_side(work: Workspace, rounds: int) -> Result:
    """Reads of files that are not cached, and writes, beside every mount of its kind that is installed here."""
    beside = Beside(work, rounds)
    with beside.memory:
        for shaped in (False, True):
            _small(beside, shaped)
            _large(beside, shaped)
            _first(beside, shaped)
            _saved(beside, shaped)
        _made(beside)
    return beside.result


def _small(beside: Beside, shaped: bool) -> None:
    work, result = beside.work, beside.result
    tree, keys = work.small("beside-small")
    raw = RawClient(work.lab, "beside-small")
    for threads in (8, 32):
        row = beside.row(
            f"cold small files, {threads} readers",
            "files/s",
            shaped,
            beside.readers_of("beside-small", tree),
            lambda mount, threads=threads: (
                read(work, [mount.path / key for key in keys], threads).files_per_s
            ),
            {RAW: lambda: raw.small(keys, ALL_IN_FLIGHT).files_per_s},
            each=len(keys),
        )
        what = row.rates.what
        if shaped:
            result.demand(f"{what}: rate", row.rates.medians()[OWN], "≥", 1700, " files/s")
            continue
        result.demand(f"{what}: rate / {RAW}", row.rates.ratio(OWN, RAW), "≥", 0.55)
        if Rclone.name in row.rates.values:
            result.demand(f"{what}: rate / {Rclone.name}", row.rates.ratio(OWN, Rclone.name), "≥", 2.7)
        result.demand(f"{what}: processor time a file", _median(row.costs[OWN]), "≤", 0.40, " ms")
        result.demand(f"{what}: main thread a file", _median(beside.main_ms), "≤", 0.15, " ms")
        beside.main_ms.clear()


def _large(beside: Beside, shaped: bool) -> None:
    work, result = beside.work, beside.result
    size = work.scale.beside_large
    tree = work.big("beside-large", size)
    raw = RawClient(work.lab, "beside-large")
    row = beside.row(
        "cold sequential",
        "MB/s",
        shaped,
        beside.readers_of("beside-large", tree),
        lambda mount: read(work, [mount.path / "0.bin"]).mb_per_s,
        {RAW: lambda: raw.sequential("0.bin", size).mb_per_s},
    )
    if not shaped:
        if S3fs.name in row.rates.values:
            rate = row.rates.ratio(OWN, S3fs.name)
            result.demand(f"{row.rates.what}: rate / {S3fs.name}", rate, "≥", 1.3)
        cost = _median(row.costs[OWN]) * (512 << 20) / size
        result.demand(f"{row.rates.what}: processor time for 512 MiB", cost, "≤", 0.75, " s")


def _first(beside: Beside, shaped: bool) -> None:
    """The first 4 KiB of a file in a directory, on a fresh mount."""
    work, result = beside.work, beside.result
    keys = work.files("beside-first", ["large"], 1, 64 << 20)
    raw = RawClient(work.lab, "beside-first")
    raw.first_byte(keys[0], FIRST)  # connects

    def first(mount: Mount) -> float:
        time.sleep(0.3)  # a reader comes after the mount, not with it
        return 1e3 * read(work, [mount.path / keys[0]], 1, FIRST).seconds

    row = beside.row(
        "first 4 KiB of a fresh mount",
        "ms",
        shaped,
        beside.readers_of("beside-first", work.tree("beside-first")),
        first,
        {RAW: lambda: 1e3 * raw.first_byte(keys[0], FIRST)},
    )
    if shaped:
        result.demand(f"{row.rates.what}: in round trips", row.rates.ratio(OWN, RAW), "≤", 2.2)
    else:
        result.demand(f"{row.rates.what}: time", row.rates.medians()[OWN], "≤", 7, " ms")


def _saved(beside: Beside, shaped: bool) -> None:
    """A large file that is in the store when close returns."""
    work, result = beside.work, beside.result
    size = work.scale.beside_saved
    writers = beside.writers()
    raw = RawWriter(work.lab, "beside-saved")
    row = beside.row(
        "large file saved",
        "MB/s",
        shaped,
        writers,
        lambda mount: writing.save(mount.path / "model.bin", size),
        {
            RAW: lambda: raw.large("raw.bin", size, writing.content).mb_per_s,
            EXT4: lambda: writing.save(work.disk / "model.bin", size, sync=True),
        },
    )
    if shaped:
        result.demand(f"{row.rates.what}: rate", row.rates.medians()[OWN], "≥", 190, " MB/s")
    elif S3fs.name in row.rates.values:
        result.demand(f"{row.rates.what}: rate / {S3fs.name}", row.rates.ratio(OWN, S3fs.name), "≥", 1.7)


def _made(beside: Beside) -> None:
    """Small files created one after another, each in the store when its close returns."""
    work, result = beside.work, beside.result
    count = work.scale.beside_made
    data = os.urandom(SMALL_SAVED)

    def make(folder: Path) -> float:
        folder.mkdir(exist_ok=True)
        begun = time.perf_counter()
        for number in range(count):
            fd = os.open(folder / f"{number}.bin", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.write(fd, data)
            if folder.is_relative_to(work.disk / EXT4):
                os.fsync(fd)
            os.close(fd)
        return count / (time.perf_counter() - begun)

    (work.disk / EXT4).mkdir(exist_ok=True)
    raw = RawWriter(work.lab, "beside-saved")
    keys = [f"raw/{number}.bin" for number in range(count)]
    row = beside.row(
        "small files saved, one after another",
        "files/s",
        False,
        beside.writers(),
        lambda mount: make(mount.path / f"made-{mount.pid}"),
        {
            RAW: lambda: raw.small(keys, lambda _: data, 1).files_per_s,
            EXT4: lambda: make(work.disk / EXT4 / "made"),
        },
        each=count,
    )
    beside.main_ms.clear()
    if S3fs.name in row.rates.values:
        result.demand(f"{row.rates.what}: rate / {S3fs.name}", row.rates.ratio(OWN, S3fs.name), "≥", 1.3)
    result.demand(f"{row.rates.what}: processor time a file", _median(row.costs[OWN]), "≤", 1.4, " ms")


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]

"""Data sets read epoch after epoch, as training reads them: what stays until it is asked for again.

Four loader workers open whole files, in a new order each time or in the same. Hits are counted by the store: one less what
it sent in an epoch, as a share of the data set. What was read is dropped from the kernel's page cache at once, so that no
hit is the kernel's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from bench import readers, training
from bench.harness import Result, Series, interleave, number, scenario
from bench.mounts import OTHERS, OWN, Cachefs, Foreground, Unavailable
from bench.workspace import Workspace

WORKERS = 4
BATCH = 32
BANDWIDTH = 100e6
"""The rate of a bucket's part of the store, unless a scenario has another one."""

SLOW_BANDWIDTH = 20e6
HINTED = "cachefs, hints"
LRU, TWO_TIERS, ALONE = "cachefs --eviction lru", "cachefs, RAM and SSD", "cachefs --prefetch off"
FILES, SHARDS = "epoch-files", "epoch-shards"
"""Buckets of small files in one directory, and of large ones."""

PAGE = 4096


def whole_once(path: str) -> int:
    """Read a file from its beginning to its end, and drop its pages."""
    buffer = bytearray(readers.BUFFER)
    total = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while count := os.readv(fd, [buffer]):
            total += count
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return total


def loop(
    batch: int = BATCH, *, shuffle: bool = True, hints: bool = False, limit_s: float = readers.FOREVER
) -> training.Loop:
    """Workers without decoding, and an accelerator without a step time."""
    shape = replace(training.SHAPES["resnet50"], decode_ms_per_mb=0.0, read=whole_once)
    return training.Loop(shape, WORKERS, batch, 0.0, shuffle=shuffle, hints=hints, limit_s=limit_s)


def below(root: Path, keys: Sequence[str]) -> list[str]:
    return [f"{root}/{key}" for key in keys]


def files(work: Workspace) -> list[str]:
    return work.files(FILES, ["train"], work.scale.epoch_files, work.scale.epoch_size)


def shards(work: Workspace) -> list[str]:
    work.big(SHARDS, work.scale.shard, work.scale.shards)
    return [f"{number}.bin" for number in range(work.scale.shards)]


# -- epochs beyond the cache -----------------------------------------------------------------------

EPOCHS = 4
SETTLED = 2
"""Epochs without a demand: the first has no hits, and in the second the cache detects epochs."""


def _half(count: int, size: int) -> int:
    """Half of the files' size, in whole pages."""
    return count * -(-size // PAGE) * PAGE // 2


def _hits(
    work: Workspace, mount: Cachefs, reading: training.Loop, keys: Sequence[str], size: int
) -> list[float]:
    """The hit ratio of each of `EPOCHS` epochs."""
    total = len(keys) * size
    ratios = []
    with closing(reading.epochs(below(mount.path, keys), EPOCHS)) as epochs:
        for _ in range(EPOCHS):
            with work.traffic() as seen:
                epoch = next(epochs)
                mount.quiet()
            if epoch.bytes != total:
                raise RuntimeError(f"{epoch.bytes:,} bytes were read instead of {total:,}")
            ratios.append(1 - seen.bytes / total)
    return ratios


@scenario("epoch-hits")
def epoch_hits(work: Workspace, rounds: int) -> Result:
    """A data set twice as large as the cache: the hit ratio from the third epoch on."""
    result = Result()
    scale = work.scale
    small = work.files("epoch-hits", ["train"], scale.epoch_files // 2, scale.epoch_size), scale.epoch_size
    large = shards(work), scale.shard
    ways = (
        ("shuffled files", "epoch-hits", small, True, (OWN, LRU, TWO_TIERS, ALONE)),
        ("shuffled shards", SHARDS, large, True, (OWN, LRU)),
        ("repeated scan", "epoch-hits", small, False, (OWN, LRU)),
    )
    for what, bucket, (keys, size), shuffle, names in ways:
        half = _half(len(keys), size)
        kinds = {
            OWN: ("--cache-size", f"{half}B", "--ram", "0"),
            LRU: ("--cache-size", f"{half}B", "--ram", "0", "--eviction", "lru"),
            TWO_TIERS: ("--cache-size", f"{half // 2}B", "--ram", f"{half // 2}B"),
            ALONE: ("--cache-size", f"{half}B", "--ram", "0", "--prefetch", "off"),
        }
        series = Series(f"{what}, cache = 1/2: hit ratio from epoch 3 on", "share", {})
        for name in names:
            reading = loop(1 if bucket == SHARDS else BATCH, shuffle=shuffle)
            with Cachefs(work.disk, work.lab, bucket, "--keep-free", "0", *kinds[name]) as mount:
                ratios = _hits(work, mount, reading, keys, size)
            series.values[name] = ratios[SETTLED:]
            result.note(f"{what}, {name}: hits by epoch {', '.join(map(number, ratios))}")
        result.series.append(series)
        result.demand(f"{what}, cache = 1/2: hit ratio from epoch 3 on", fmean(series.values[OWN]), "≥", 0.48)
    return result


@scenario("epoch-turnover")
def epoch_turnover(work: Workspace, rounds: int) -> Result:
    """A second data set replaces the first; each is twice as large as the cache."""
    result = Result()
    size, count = work.scale.epoch_size, work.scale.epoch_files // 2
    keys = work.files("epoch-turnover", ["first", "second"], 2 * count, size)
    options = ("--cache-size", f"{_half(count, size)}B", "--ram", "0", "--keep-free", "0")
    with Cachefs(work.disk, work.lab, "epoch-turnover", *options) as mount:
        for folder in ("first", "second"):
            of = [key for key in keys if key.startswith(folder)]
            ratios = _hits(work, mount, loop(), of, size)
            result.note(f"{folder} data set: hits by epoch {', '.join(map(number, ratios))}")
            result.series.append(
                Series(f"turnover, {folder} data set: hit ratio by epoch", "share", {OWN: ratios})
            )
    result.demand(
        "a second data set takes over: its hit ratio by its third epoch", max(ratios[1:3]), "≥", 0.45
    )
    return result


@scenario("epoch-again", rounds=3)
def epoch_again(work: Workspace, rounds: int) -> Result:
    """The second epoch beside the first, with a slow store, of a data set that fits."""
    result = Result()
    _, keys = work.small("epoch-again")
    series = Series(
        "epochs, 4 workers, 20 ms and 20 MB/s", "files/s", {"first epoch": [], "second epoch": []}
    )
    with work.shaped(SLOW_BANDWIDTH):
        for _ in range(rounds):
            with Cachefs(work.disk, work.lab, "epoch-again") as mount:
                for name, epoch in zip(series.values, loop().epochs(below(mount.path, keys), 2), strict=True):
                    series.values[name].append(epoch.samples_per_s)
    result.series.append(series)
    result.demand("second epoch / first, slow store", series.ratio("second epoch", "first epoch"), "≥", 10)
    return result


# -- the accelerator -------------------------------------------------------------------------------

LOADERS = 2
"""Workers: one for each processor, so that the accelerator waits for the filesystem and not for a processor."""

TRAINED = 5
VOLUMES = 16
BUSY = 0.95


@scenario("training-cold", rounds=2)
def training_cold(work: Workspace, rounds: int) -> Result:
    """The training loop from its first epoch on, without a cache: how busy the accelerator is, beside ext4."""
    result = Result()
    scale = work.scale
    work.files("training-records", ["train"], scale.records, scale.record)
    trees = {
        "resnet50": ("epoch-images", work.small("epoch-images")[0]),
        "unet3d": ("epoch-volumes", work.big("epoch-volumes", scale.warm // 16, VOLUMES)),
        "cosmoflow": ("training-records", work.tree("training-records")),
    }
    for shape, (bucket, tree) in trees.items():
        _train(work, shape, bucket, work.on_disk(tree), rounds, result)
    return result


def _train(work: Workspace, shape: str, bucket: str, ext4: Path, rounds: int, result: Result) -> None:
    options: tuple[str | float, ...] = ("--workers", LOADERS, "--decode-ms-per-mb", 0)
    step_ms = training.step_ms_at_least(BUSY, ext4, *options, shape=shape)
    options = ("--shape", shape, *options, "--step-ms", step_ms, "--epochs", TRAINED)
    first: dict[str, list[float]] = {}

    def busy(name: str, root: Path, *more: str) -> float:
        epochs = [100 * e["utilisation"] for e in training.apart(root, *options, *more)["epochs"]]
        first.setdefault(name, []).append(epochs[0])
        return fmean(epochs[1:])

    def cachefs(name: str, *more: str) -> float:
        with work.shaped(BANDWIDTH), Cachefs(work.disk, work.lab, bucket) as mount:
            return busy(name, mount.path, *more)

    def other(kind: type[Foreground]) -> float:
        with kind(work.disk, work.lab, bucket) as mount:
            # Unshaped: how it fares in a first epoch says `epoch-cold`.
            for path in training.files(mount.path):
                whole_once(path)
            with work.shaped(BANDWIDTH):
                return busy(kind.name, mount.path)

    contenders: dict[str, Callable[[], float]] = {
        "ext4": functools.partial(busy, "ext4", ext4),
        OWN: functools.partial(cachefs, OWN),
        HINTED: functools.partial(cachefs, HINTED, "--hints"),
    }
    what = f"accelerator busy, {shape}, epochs 2 and on"
    series = interleave(rounds, contenders, result, what=what, unit="%")
    if work.scale.others:
        try:
            series.values[OTHERS[0].name] = [other(OTHERS[0])]
        except Unavailable as exc:
            result.note(str(exc))
    shown = ", ".join(f"{name} {fmean(of):.0f} %" for name, of in first.items())
    result.note(f"{shape}: steps of {step_ms:.2f} ms; in its first epoch: {shown}")
    pairs = zip(series.values["ext4"], series.values[OWN], strict=True)
    result.demand(f"{what}: points below ext4", median(theirs - mine for theirs, mine in pairs), "≤", 3)

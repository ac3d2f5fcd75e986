"""Prefetch: a dataset is read for the first time by loader workers (shuffled files, strides over shards, or a few files of
many), or fetched beforehand by a command.

The raw client keeps `RAW_IN_FLIGHT` requests in flight. It knows every key from the start, so it is the upper bound of what
prefetch can reach.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Sequence

from bench import readers, training
from bench.epochs import BANDWIDTH, FILES, HINTED, SHARDS, below, files, loop, shards, whole_once
from bench.harness import Result, Series, interleave, number, scenario
from bench.mounts import OTHERS, OWN, Cachefs, Foreground
from bench.raw import RawClient
from bench.workspace import SpareMemory, Workspace

WORKERS = 4
RAW_IN_FLIGHT = 64
SHARDS_BANDWIDTH = 200e6
PART = 8 << 20
"""Bytes of the raw client's ranges, as the largest ones of cachefs."""

RAW, BY_CLASS = "raw client", "cachefs, ten directories"
CLASSES = "epoch-classes"
BLOCK = 1 << 20


@scenario("epoch-cold", rounds=3)
def epoch_cold(work: Workspace, rounds: int) -> Result:
    """A first epoch over shuffled small files, by four loader workers: with hints, and without."""
    result = Result()
    scale = work.scale
    keys = files(work)
    classes = [f"class_{n}" for n in range(10)]
    by_class = work.files(CLASSES, classes, scale.epoch_files, scale.epoch_size)
    raw = RawClient(work.lab, FILES)
    same_order = [keys[index] for index in training.Shuffled(len(keys))]
    gets: dict[str, list[float]] = {}

    def cachefs(name: str, bucket: str, of: Sequence[str], hints: bool) -> float:
        with Cachefs(work.disk, work.lab, bucket) as mount, work.traffic() as seen:
            (epoch,) = loop(hints=hints).epochs(below(mount.path, of), 1)
            mount.quiet()
        if epoch.bytes != len(of) * scale.epoch_size:
            result.note(f"{name}: {epoch.bytes:,} bytes were read")
        gets.setdefault(name, []).append(seen.get / len(of))
        return epoch.samples_per_s

    def other(kind: type[Foreground]) -> float:
        with kind(work.disk, work.lab, FILES) as mount:
            (epoch,) = loop(batch=4, limit_s=scale.limit_s).epochs(below(mount.path, keys), 1)
            return epoch.samples_per_s

    contenders: dict[str, Callable[[], float]] = {
        RAW: lambda: raw.small(same_order, RAW_IN_FLIGHT).files_per_s,
        OWN: functools.partial(cachefs, OWN, FILES, keys, False),
        HINTED: functools.partial(cachefs, HINTED, FILES, keys, True),
        BY_CLASS: functools.partial(cachefs, BY_CLASS, CLASSES, by_class, False),
    }
    with work.shaped(BANDWIDTH):
        what = "cold epoch of small files, 4 workers, 20 ms and 100 MB/s"
        series = interleave(rounds, contenders, result, what=what, unit="files/s")
        if scale.others:
            kinds = {kind.name: functools.partial(other, kind) for kind in OTHERS[:2]}
            peers = interleave(1, kinds, result, what="", unit="")
            result.series.remove(peers)
            series.values.update(peers.values)
    result.note(f"ten directories: rate / raw client {number(series.ratio(BY_CLASS, RAW))}")
    result.demand("cold epoch, no hint: rate / raw client, 64 in flight", series.ratio(OWN, RAW), "≥", 0.8)
    result.demand("cold epoch, hints: rate / raw client, 64 in flight", series.ratio(HINTED, RAW), "≥", 0.9)
    for kind in OTHERS[:2]:
        if kind.name in series.values:
            ratio = series.ratio(OWN, kind.name)
            result.demand(f"cold epoch, no hint: rate / {kind.name}", ratio, "≥", 4)
    most = max(value for values in gets.values() for value in values)
    result.demand("cold epoch: GETs a file", most, "=", 1)
    return result


@scenario("epoch-few", rounds=3)
def epoch_few(work: Workspace, rounds: int) -> Result:
    """A random twentieth of a directory is read: how much else is fetched."""
    result = Result()
    size = work.scale.epoch_size
    keys = files(work)
    wasted = []
    with work.shaped(BANDWIDTH):
        for turn in range(rounds):
            wanted = random.Random(f"few {turn}").sample(keys, max(1, len(keys) // 20))
            with Cachefs(work.disk, work.lab, FILES) as mount, work.traffic() as seen:
                list(loop(batch=8).epochs(below(mount.path, wanted), 1))
                mount.quiet()
            wasted.append(100 * (seen.bytes - len(wanted) * size) / (len(keys) * size))
    result.series.append(Series("a twentieth wanted: share fetched for nothing", "%", {OWN: wasted}))
    what = "a twentieth of a directory wanted: wasted bytes / directory"
    result.demand(what, max(wasted), "≤", 10, " %")
    return result


def _stream(paths: Sequence[str], size: int) -> None:
    """The files of one worker."""
    for path in paths:
        if (got := whole_once(path)) != size:
            raise OSError(f"{path}: {got} bytes of {size}")


@scenario("shards-cold", rounds=3)
def shards_cold(work: Workspace, rounds: int) -> Result:
    """Four workers stride over large shards that are not cached, each from its beginning to its end."""
    result = Result()
    size = work.scale.shard
    keys = shards(work)
    total = len(keys) * size
    raw = RawClient(work.lab, SHARDS)
    asked: list[float] = []

    def cachefs() -> float:
        with Cachefs(work.disk, work.lab, SHARDS) as mount, spare.free():
            paths = below(mount.path, keys)
            with work.traffic() as seen:
                parts = [functools.partial(_stream, paths[n::WORKERS], size) for n in range(WORKERS)]
                seconds = readers.together(parts)
            asked.append(seen.bytes / total)
            return total / seconds / 1e6

    contenders = {
        RAW: lambda: raw.ranges(keys, size, PART, RAW_IN_FLIGHT).mb_per_s,
        OWN: cachefs,
    }
    with work.shaped(SHARDS_BANDWIDTH), SpareMemory(total + (64 << 20)) as spare:
        what = "cold shards, 4 workers, 20 ms and 200 MB/s"
        series = interleave(rounds, contenders, result, what=what, unit="MB/s")
    result.demand("cold shards: rate / raw client, 64 in flight", series.ratio(OWN, RAW), "≥", 0.9)
    result.demand("cold shards: bytes from the store / size", max(asked), "=", 1)
    return result


RANDOM_READ = 128 << 10
READS = 200
LARGE = 1 << 30


@scenario("random-in-large")
def random_in_large(work: Workspace, rounds: int) -> Result:
    """Random reads of 128 KiB in one large file that is not cached, aligned and not: only their blocks may be fetched."""
    result = Result()
    tree = work.big("random", BLOCK)
    os.truncate(tree / "0.bin", LARGE)  # a hole takes no memory, and is fetched as any other data
    work.lab.serve("random", tree)
    dice = random.Random("random-in-large")
    # Never one right behind another: the kernel would read ahead there.
    places = [3 * RANDOM_READ * slot for slot in dice.sample(range(LARGE // RANDOM_READ // 3), READS)]
    ways = {
        "aligned": places,
        "unaligned": [place + dice.randrange(1, RANDOM_READ) for place in places],
    }
    for way, offsets in ways.items():
        with Cachefs(work.disk, work.lab, "random") as mount, work.traffic() as seen:
            fd = os.open(mount.path / "0.bin", os.O_RDONLY)
            got = sum(len(os.pread(fd, RANDOM_READ, offset)) for offset in offsets)
            os.close(fd)
            mount.quiet()
        spans = [range(at // BLOCK, (at + RANDOM_READ - 1) // BLOCK + 1) for at in offsets]
        touched = len(set(itertools.chain.from_iterable(spans)))
        if got != READS * RANDOM_READ:
            result.note(f"{way}: {got:,} bytes were read")
        if way == "aligned":
            result.demand("random 128 KiB, aligned: bytes fetched / bytes read", seen.bytes / got, "≤", 8)
        else:
            result.note(f"{way}: bytes fetched / bytes read {number(seen.bytes / got)}")
        what = f"random 128 KiB, {way}: blocks fetched / blocks touched"
        result.demand(what, seen.bytes / BLOCK / touched, "=", 1)
    return result


@scenario("warm-up", rounds=2)
def warm_up(work: Workspace, rounds: int) -> Result:
    """`cachefs warm` of a data set, small files and shards, beside a plain download of it."""
    result = Result()
    size, count = work.scale.shard, work.scale.shards // 2
    small, large = files(work), shards(work)[:count]
    _warm_beside(
        functools.partial(RawClient(work.lab, FILES).small, small, RAW_IN_FLIGHT),
        (work, FILES, ["train"], len(small) * work.scale.epoch_size),
        "small files",
        rounds,
        result,
    )
    _warm_beside(
        functools.partial(RawClient(work.lab, SHARDS).ranges, large, size, PART, RAW_IN_FLIGHT),
        (work, SHARDS, large, count * size),
        "shards",
        rounds,
        result,
    )
    return result


def _warm_beside(
    download: Callable[[], readers.Reading],
    what: tuple[Workspace, str, Sequence[str], int],
    kind: str,
    rounds: int,
    result: Result,
) -> None:
    """The demand is on the job's own time. The command's time, with the start of an interpreter, is only shown."""
    work, bucket, names, total = what
    asked: list[float] = []
    commands: list[float] = []

    def warm() -> float:
        with Cachefs(work.disk, work.lab, bucket) as mount:
            with work.traffic() as seen:
                begun = time.perf_counter()
                said = mount.command("warm", "--json", *below(mount.path, names))
                commands.append(total / (time.perf_counter() - begun) / 1e6)
            if said.returncode:
                raise RuntimeError(f"cachefs warm: {said.stderr.strip()}")
            asked.append(seen.bytes / total)
            return total / float(json.loads(said.stdout)["seconds"]) / 1e6

    with work.shaped(BANDWIDTH):
        contenders = {RAW: lambda: download().mb_per_s, OWN: warm}
        name = f"cachefs warm, {kind}, 20 ms and 100 MB/s"
        series = interleave(rounds, contenders, result, what=name, unit="MB/s")
    series.values["the whole command"] = commands
    ratio = series.ratio(OWN, RAW)
    result.demand(f"cachefs warm, {kind}: rate / raw client, 64 in flight", ratio, "≥", 0.9)
    result.demand(f"cachefs warm, {kind}: bytes from the store / size", max(asked), "=", 1)

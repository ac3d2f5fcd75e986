"""Passthrough, in the native backend: the kernel reads files of a tier by itself.

A file that is wholly cached and verified is opened in *passthrough*: the reply to its OPEN names the tier's own file, and
reads and mappings never reach the daemon. Each mount is brought to that state first: its files are read, closed, and opened
until a read of pages that the kernel has dropped costs no READ. `cachefs` means the native backend with `--ram 0` here, so
that its passthrough files lie on the same ext4 as the baseline; its RAM tier and the pyfuse3 backend are measured beside it.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from bench import readers, training
from bench.harness import Result, Series, interleave, number, scenario
from bench.mounts import OWN, PYFUSE3, Cachefs, Unavailable, backend
from bench.workspace import Workspace, drop_caches

RAM_TIER = "cachefs (RAM tier)"
TIER_FILE = "the tier's own file"
ZERO_OPEN = "cachefs --zero-open"

AGAIN = 5
"""Reads in one turn, as in `bench.warm`."""

REGISTER_S = 20.0
"""Deadline until a file is in passthrough: it is gathered from two tiers in the background. Guessed: many times what it
takes."""


def kernel(work: Workspace, bucket: str, *options: str, name: str = OWN) -> Cachefs:
    return Cachefs(work.disk, work.lab, bucket, *backend("native"), *options, name=name)


def pyfuse3(work: Workspace, bucket: str, *options: str) -> Cachefs:
    return Cachefs(work.disk, work.lab, bucket, *backend("pyfuse3"), *options, name=PYFUSE3)


def _mounts(stack: ExitStack, work: Workspace, bucket: str) -> dict[str, Cachefs]:
    """The contender that is judged, and the others."""
    mounts = [kernel(work, bucket, "--ram", "0")]
    if work.scale.others:
        mounts += [kernel(work, bucket, name=RAM_TIER), pyfuse3(work, bucket, "--ram", "0")]
    return {mount.name: stack.enter_context(mount) for mount in mounts}


def _drop(work: Workspace) -> None:
    if work.scale.drops:
        drop_caches()


# -- passthrough -----------------------------------------------------------------------------------


def _passthrough(mount: Cachefs, path: Path) -> bool:
    """Whether a read of this file, without the kernel's pages, sends no request to the daemon."""
    size = path.stat().st_size
    with mount.counting() as counted:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for offset in (0, size // 2, size - 1):
            os.pread(fd, readers.PAGE, offset)
        os.close(fd)
    return counted["fuse_read"] == 0


def _register_backing(mount: Cachefs, paths: list[Path], result: Result) -> None:
    """Read files, and wait until they are in passthrough. A file that is not, after the deadline, stays in the figures,
    with a note."""
    for path in paths:
        readers.sequential(path)
    until = time.monotonic() + REGISTER_S
    for path in paths:
        while not _passthrough(mount, path):
            if time.monotonic() > until:
                result.note(f"{mount.name}: {path.name} was not in passthrough within {REGISTER_S:.0f} s")
                return
            time.sleep(0.1)


def _register_all(mounts: Mapping[str, Cachefs], names: list[str], result: Result) -> None:
    """The files of that name in each mount. Those of pyfuse3 are only read."""
    for mount in mounts.values():
        paths = [mount.path / name for name in names]
        if mount.name == PYFUSE3:
            for path in paths:
                readers.sequential(path)
        else:
            _register_backing(mount, paths, result)


def _tier_file(mount: Cachefs, name: str) -> Path:
    """The cache's file of the object of this name, found by its first bytes."""
    head = f"{name} 0".encode().ljust(64)
    for path in (mount.cache / "objects").rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(head)) == head:
                    return path
    raise Unavailable(f"{TIER_FILE}: {name} is not there as one")


class _Cpu:
    """The daemons' processor time for the bytes that each contender reads."""

    def __init__(self, mounts: Mapping[str, Cachefs]) -> None:
        self._mounts = mounts
        self._spent = dict.fromkeys(mounts, 0.0)
        self._bytes = dict.fromkeys(mounts, 0)

    def reading(self, name: str, read: Callable[[], readers.Reading]) -> readers.Reading:
        """Read; for a mount, record what its daemon does meanwhile."""
        mount = self._mounts.get(name)
        if mount is None:
            return read()
        before = mount.cpu_s()
        done = read()
        self._spent[name] += mount.cpu_s() - before
        self._bytes[name] += done.bytes
        return done

    def per_gb(self, what: str, result: Result) -> Series:
        values = {name: [self._spent[name] / (self._bytes[name] / 1e9)] for name in self._mounts}
        series = Series(what, "s/GB", values)
        result.series.append(series)
        return series


# -- large files -----------------------------------------------------------------------------------


@scenario("pass-tier", rounds=24)
def pass_tier(work: Workspace, rounds: int) -> Result:
    """A passthrough file without pages in memory: all contenders read it from the disk."""
    result = Result()
    # More than one file: where the disk happens to have put it matters, and stays as it is.
    count = min(rounds, 4)
    tree = work.big("pass-tier", work.scale.warm, count)
    with ExitStack() as stack:
        mounts = _mounts(stack, work, "pass-tier")
        names = [f"{number}.bin" for number in range(count)]
        _register_all(mounts, names, result)
        files = {"ext4": [work.on_disk(tree) / name for name in names]}
        files |= {mount.name: [mount.path / name for name in names] for mount in mounts.values()}
        files[TIER_FILE] = [_tier_file(mounts[OWN], name) for name in names]
        cpu = _Cpu(mounts)

        def cold(name: str) -> Callable[[], float]:
            turns = iter(range(rounds))

            def measure() -> float:
                # One reading a turn and many turns: a shared disk is slow for moments, not for minutes.
                path = files[name][next(turns) % count]
                _drop(work)
                return cpu.reading(name, lambda: readers.sequential(path, work.scale.limit_s)).mb_per_s

            return measure

        with mounts[OWN].counting() as counted:
            what = "passthrough file, sequential, kernel cache dropped"
            series = interleave(rounds, {name: cold(name) for name in files}, result, what=what, unit="MB/s")
    spent = cpu.per_gb("passthrough file, kernel cache dropped: daemon CPU", result)
    own = series.ratio(OWN, TIER_FILE)
    result.note(f"sequential, kernel cache dropped: {OWN} / {TIER_FILE} {number(own)}")
    if work.scale.drops:
        result.demand("on a tier, kernel cache dropped: rate / ext4", series.ratio(OWN, "ext4"), "≥", 0.95)
    result.demand("on a tier, kernel cache dropped: daemon CPU s/GB", spent.medians()[OWN], "≤", 0.02)
    result.demand("on a tier, kernel cache dropped: READ messages", counted["fuse_read"], "=", 0)
    return result


@scenario("pass-seq", rounds=5)
def pass_seq(work: Workspace, rounds: int) -> Result:
    """A passthrough file with pages in memory, read again."""
    result = Result()
    tree = work.big("pass-seq", work.scale.warm // 2, rounds)
    with ExitStack() as stack:
        mounts = _mounts(stack, work, "pass-seq")
        names = [f"{number}.bin" for number in range(rounds)]
        _register_all(mounts, names, result)
        roots = {"ext4": work.on_disk(tree)} | {mount.name: mount.path for mount in mounts.values()}
        cpu = _Cpu(mounts)

        def again(name: str, root: Path) -> Callable[[], float]:
            files = iter(names)  # another file each turn, as in `bench.warm`

            def measure() -> float:
                path = root / next(files)
                # Pages that were written are of another size than pages that were read: read them, on either side.
                _drop(work)
                readers.sequential(path)
                seen = [
                    cpu.reading(name, lambda: readers.sequential(path, work.scale.limit_s))
                    for _ in range(AGAIN)
                ]
                return sum(r.bytes for r in seen) / sum(r.seconds for r in seen) / 1e6

            return measure

        contenders = {name: again(name, root) for name, root in roots.items()}
        with mounts[OWN].counting() as counted:
            series = interleave(
                rounds, contenders, result, what="passthrough file, warm sequential", unit="MB/s"
            )
    spent = cpu.per_gb("passthrough file, warm sequential: daemon CPU", result)
    result.demand("warm sequential: rate / ext4", series.ratio(OWN, "ext4"), "≥", 0.95)
    result.demand("warm sequential: daemon CPU s/GB", spent.medians()[OWN], "≤", 0.02)
    result.demand(
        "complete file, dropped by the kernel and warm: READ messages", counted["fuse_read"], "=", 0
    )
    return result


PREADS = 200_000
TOUCHED = 3
"""Mappings in one turn; each page of them is read once."""


@scenario("pass-random", rounds=5)
def pass_random(work: Workspace, rounds: int) -> Result:
    """A passthrough file with pages in memory: random 4 KiB reads, by pread and by mapping it."""
    result = Result()
    size = work.scale.warm
    tree = work.big("pass-random", size, 1)
    pages = [number * readers.PAGE for number in range(size // readers.PAGE)]
    dice = random.Random("pass-random")
    offsets = dice.choices(pages, k=min(PREADS, 8 * len(pages)))
    dice.shuffle(pages)
    with ExitStack() as stack:
        mounts = _mounts(stack, work, "pass-random")
        _register_all(mounts, ["0.bin"], result)
        paths = {"ext4": work.on_disk(tree) / "0.bin"}
        paths |= {mount.name: mount.path / "0.bin" for mount in mounts.values()}
        _drop(work)
        for path in paths.values():
            readers.sequential(path)

        def preads(path: Path) -> float:
            fd = os.open(path, os.O_RDONLY)
            try:
                return len(offsets) / readers.scattered(fd, offsets)
            finally:
                os.close(fd)

        def touches(path: Path) -> float:
            return TOUCHED * len(pages) / sum(readers.touched(path, pages) for _ in range(TOUCHED))

        series = {}
        with mounts[OWN].counting() as counted:
            for what, measure in (("4 KiB preads", preads), ("mmap touches", touches)):
                contenders = {name: functools.partial(measure, path) for name, path in paths.items()}
                series[what] = interleave(
                    rounds, contenders, result, what=f"passthrough file, random {what}", unit="1/s"
                )
    result.demand("random 4 KiB pread: rate / ext4", series["4 KiB preads"].ratio(OWN, "ext4"), "≥", 0.95)
    result.demand("mmap, random touch: rate / ext4", series["mmap touches"].ratio(OWN, "ext4"), "≥", 0.85)
    result.demand("random and mapped reads: READ messages", counted["fuse_read"], "=", 0)
    return result


# -- small files -----------------------------------------------------------------------------------


def settle(mount: Cachefs, read: Callable[[], object]) -> dict[str, int]:
    """Read files until that sends no READ and no further open comes into passthrough. Returns the last pass's requests."""
    until = time.monotonic() + REGISTER_S / 4
    while True:
        with mount.counting() as counted:
            read()
        passthrough = mount.name == PYFUSE3 or counted.get("passthrough_opens", 0) >= counted["fuse_open"]
        if (passthrough and not counted["fuse_read"]) or time.monotonic() > until:
            return counted
        time.sleep(0.1)


@scenario("pass-small", rounds=7)
def pass_small(work: Workspace, rounds: int) -> Result:
    """Small files that were read before: open, read, close, with OPEN messages and without."""
    result = Result()
    scale = work.scale
    tree, keys = work.small("pass-small")
    with ExitStack() as stack:
        mounts = _mounts(stack, work, "pass-small")
        options = ("--ram", "0", "--consistency", "immutable", "--zero-open")
        mounts[ZERO_OPEN] = stack.enter_context(kernel(work, "pass-small", *options, name=ZERO_OPEN))
        roots = {"ext4": work.on_disk(tree)} | {mount.name: mount.path for mount in mounts.values()}
        paths = {name: [f"{root}/{key}" for key in keys] for name, root in roots.items()}
        asked = {}
        for name, mine in paths.items():
            readers.small(mine)
            if name in mounts:
                asked[name] = settle(mounts[name], functools.partial(readers.small, mine))
        cpu = _Cpu(mounts)

        def again(name: str, mine: list[str]) -> Callable[[], float]:
            return lambda: cpu.reading(name, lambda: readers.small(mine, scale.limit_s)).files_per_s

        def by_open(mine: list[str]) -> Callable[[], float]:
            return lambda: readers.small_files(mine, scale.limit_s).files_per_s

        contenders = {name: again(name, mine) for name, mine in paths.items()}
        what = "warm small files, open+read+close, either backend"
        series = interleave(rounds, contenders, result, what=what, unit="files/s")
        cpu.per_gb("warm small files: daemon CPU", result)
        contenders = {name: by_open(mine) for name, mine in paths.items()}
        what = "warm small files, Python's open(), either backend"
        opened = interleave(rounds, contenders, result, what=what, unit="files/s")
    shares = ", ".join(f"{name} {number(opened.ratio(name, 'ext4'))}" for name in mounts)
    result.note(f"Python's open(): rate / ext4: {shares}")
    for name, counted in asked.items():
        sent = {key: value for key, value in counted.items() if key.startswith("fuse_") and value}
        messages = ", ".join(
            f"{key[5:]} {number(value / len(keys))}" for key, value in sent.items() if key[-5:] != "bytes"
        )
        passthrough = counted.get("passthrough_opens", 0) / len(keys)
        result.note(f"{name}: messages a file: {messages or 'none'}; in passthrough {number(passthrough)}")
    reads = sum(asked[name]["fuse_read"] for name in (OWN, ZERO_OPEN))
    result.demand("warm small files: rate / ext4", series.ratio(OWN, "ext4"), "≥", 0.35)
    result.demand("warm small files, --zero-open: rate / ext4", series.ratio(ZERO_OPEN, "ext4"), "≥", 0.55)
    result.demand("warm small files, with --zero-open and without: READ messages", reads, "=", 0)
    return result


# -- training --------------------------------------------------------------------------------------

WORKERS = 2
EPOCHS = 2
"""Measured epochs in a turn: few, so that other work of the machine affects all contenders."""
VOLUMES = 32


@scenario("training", rounds=9)
def training_loop(work: Workspace, rounds: int) -> Result:
    """`bench.training` on a warm mount and on ext4: what the mount adds to the time of an epoch.

    First at the pace of MLPerf Storage, where one accelerator sets it and nothing is decoded. Then the worst case: loaders
    that decode on every processor there is, and a step so short that they set the pace (the accelerator is busy for about
    90 % of the time on ext4), so that whatever a mount takes is missing."""
    result = Result()
    images, volumes = "training-images", "training-volumes"
    trees = {images: work.small(images)[0], volumes: work.big(volumes, work.scale.warm // 16, VOLUMES)}
    for bucket, tree in trees.items():
        with ExitStack() as stack:
            mounts = [kernel(work, bucket)]
            if work.scale.others:
                mounts.append(pyfuse3(work, bucket))
            roots = {"ext4": work.on_disk(tree)}
            roots |= {mount.name: stack.enter_context(mount).path for mount in mounts}
            for root in roots.values():
                for path in training.files(root):
                    readers.sequential(Path(path))
            shape = "resnet50" if bucket == images else "unet3d"
            for pace in (MLPERF, WORST):
                series = _epochs(shape, pace, roots, rounds, result)
                tax = 100 * (1 - series.ratio(OWN, "ext4"))
                result.demand(f"training loop, {shape} {pace}, warm: FUSE tax", tax, "≤", 3, " %")
    return result


MLPERF, WORST = "at MLPerf's pace", "as fast as its loaders"


def _epochs(shape: str, pace: str, roots: Mapping[str, Path], rounds: int, result: Result) -> Series:
    """Run the loop on each contender in turn."""
    what = f"{shape} {pace}"
    options: tuple[str | float, ...] = ("--shape", shape, "--workers", WORKERS)
    if pace == MLPERF:
        options = (*options, "--decode-ms-per-mb", 0)
        step_ms = training.SHAPES[shape].step_ms
    else:
        step_ms = training.step_ms_for(roots["ext4"], *options, "--epochs", 2 * EPOCHS)
    busy: dict[str, list[float]] = {name: [] for name in roots}

    def samples_per_s(name: str, root: Path) -> float:
        # All contenders get the same orders. The first epoch is not measured: it opens what has just been completed.
        chosen = ("--step-ms", step_ms, "--epochs", EPOCHS + 1, "--seed", len(busy[name]))
        measured = training.apart(root, *options, *chosen)["epochs"][1:]
        busy[name].append(sum(epoch["utilisation"] for epoch in measured) / EPOCHS)
        return float(sum(e["samples"] for e in measured) / sum(e["seconds"] for e in measured))

    contenders = {name: functools.partial(samples_per_s, name, root) for name, root in roots.items()}
    name = f"training loop, {what}, warm"
    series = interleave(rounds, contenders, result, what=name, unit="samples/s")
    shares = ", ".join(f"{name} {sum(of) / len(of):.0%}" for name, of in busy.items())
    result.note(f"{what}: steps of {step_ms:.2f} ms, accelerator busy: {shares}")
    return series

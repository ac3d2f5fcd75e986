"""A training loop as a filesystem sees it, on any directory:

    python -m bench.training DIR [--shape resnet50|unet3d|cosmoflow] [--workers 2] [--epochs 2] [--batch N] [--step-ms X]
                             [--hints] [--json]

Worker processes read samples in an order that is new in each epoch and spend CPU on them as decoding would; the parent
takes batches in order, keeps a bounded number of them ahead (as a PyTorch DataLoader does with `prefetch_factor=2` and
persistent workers), and sleeps for the time of a step: the accelerator. The first batch of an epoch is waited for.

What it says of a filesystem depends on the step. A step much longer than loading hides every filesystem: the loop
sleeps. So `step_ms_for` takes a step a tenth shorter than what the loader needs for a batch on the fastest place at hand
(ext4): the accelerator is busy for about 90 % of the time there, which is the least that MLPerf Storage accepts, and
whatever a mount adds to the loading of a sample makes the epoch longer.

With `--hints` the order of each epoch is announced as a user would do it, by `cachefs.hints.HintedSampler`; where DIR is no
cachefs mount, that is one warning and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

AHEAD = 2
"""Batches that a worker gets before it has returned one: PyTorch's default."""

UTILISATION = 0.9
"""Utilisation of the accelerator on the fastest place: the least that MLPerf Storage accepts."""

_CHUNK = 1 << 20
_REPOSITORY = Path(__file__).resolve().parents[1]


def _whole(path: str) -> int:
    """A small file in one piece, as a loader of images does."""
    with open(path, "rb", buffering=0) as file:
        return len(file.readall())


def _streamed(path: str) -> int:
    """A large file from its beginning, a MiB at a time."""
    buffer = bytearray(_CHUNK)
    total = 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return total


@dataclass(frozen=True)
class Shape:
    """How a workload reads its samples. Each sample is one file."""

    name: str
    batch: int
    step_ms: float
    decode_ms_per_mb: float
    read: Callable[[str], int]


SHAPES = {
    shape.name: shape
    for shape in (
        # Steps: MLPerf Storage, one H100 (batches of 400 in 224 ms, of 7 in 323 ms, of 1 in 3.5 ms), for the batch given
        # here. Decoding, measured: Pillow takes 2.1 ms to decode, crop and flip a JPEG of 127 KB; guessed: the checksum of
        # a volume or a record is taken.
        Shape("resnet50", batch=32, step_ms=18.0, decode_ms_per_mb=17.0, read=_whole),
        Shape("unet3d", batch=2, step_ms=92.0, decode_ms_per_mb=0.5, read=_streamed),
        Shape("cosmoflow", batch=1, step_ms=3.5, decode_ms_per_mb=0.5, read=_streamed),
    )
}


@dataclass(frozen=True)
class Epoch:
    """One pass over all samples. `utilisation` is the accelerator's busy share of it."""

    samples: int
    bytes: int
    seconds: float
    samples_per_s: float
    utilisation: float


class Sampler(Protocol):
    """The policy of an epoch's order."""

    def set_epoch(self, epoch: int) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...


class Shuffled:
    """A new order in each epoch, the same for all ranks with the seed (as PyTorch's `DistributedSampler`)."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.epoch = 0
        self._count = count
        self._seed = seed

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._count))
        random.Random(f"{self._seed} {self.epoch}").shuffle(order)
        return iter(order)


class Listed(Shuffled):
    """The order of the list in each epoch: a scan."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))


@dataclass(frozen=True)
class Loop:
    """A run: a shape and its options. An epoch ends early after `limit_s` seconds."""

    shape: Shape
    workers: int
    batch: int
    step_s: float
    seed: int = 0
    shuffle: bool = True
    hints: bool = False
    limit_s: float = float("inf")

    def epochs(self, paths: Sequence[str], count: int) -> Generator[Epoch, None, None]:
        """Run so many epochs, one after another, with the same workers."""
        kind = Shuffled if self.shuffle else Listed
        sampler: Sampler = kind(len(paths), self.seed)
        if self.hints:
            from cachefs.hints import HintedSampler  # the loop itself needs nothing of cachefs

            sampler = HintedSampler(sampler, paths)
        with _started(self.workers, self.shape, paths) as workers:
            for number in range(count):
                sampler.set_epoch(number)
                yield self._epoch(workers, sampler)

    def _epoch(self, workers: Sequence[Connection], order: Iterable[int]) -> Epoch:
        begun = time.perf_counter()
        until = begun + self.limit_s
        batches = _batches(iter(order), self.batch)
        # Each worker answers in the order it was asked, so asking them in turn is all it takes to get batches in order.
        asked: deque[tuple[Connection, int]] = deque()
        turns = zip(itertools.cycle(workers), batches, strict=False)

        def ask(count: int) -> None:
            for worker, batch in itertools.islice(turns, count):
                worker.send(batch)
                asked.append((worker, len(batch)))

        samples = steps = total = 0
        ask(AHEAD * len(workers))
        while asked:
            worker, count = asked.popleft()
            total += _answer(worker)
            samples += count
            steps += 1
            if time.perf_counter() < until:
                ask(1)
            time.sleep(self.step_s)
        seconds = time.perf_counter() - begun
        return Epoch(samples, total, seconds, samples / seconds, min(1.0, steps * self.step_s / seconds))


def _batches(order: Iterator[int], size: int) -> Iterator[list[int]]:
    while batch := list(itertools.islice(order, size)):
        yield batch


def _answer(worker: Connection) -> int:
    try:
        said = worker.recv()
    except EOFError:
        raise RuntimeError("a worker ended: its stderr says why") from None
    if isinstance(said, str):
        raise OSError(said)
    return int(said)


@contextmanager
def _started(count: int, shape: Shape, paths: Sequence[str]) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("fork")
    ours: list[Connection] = []
    processes = []
    try:
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, shape, paths, [*ours, mine]), daemon=True)
            process.start()
            theirs.close()
            ours.append(mine)
            processes.append(process)
        yield ours
    finally:
        for connection in ours:
            connection.close()
        for process in processes:
            process.join(10)
            process.kill()
            process.join()


def _work(tasks: Connection, shape: Shape, paths: Sequence[str], inherited: Sequence[Connection]) -> None:
    """The worker process: gets indices, returns bytes read or an error, until the parent closes the pipe."""
    for connection in inherited:  # a parent's end held here would keep its worker from ever seeing it closed
        connection.close()
    while True:
        try:
            batch = tasks.recv()
            total = 0
            for index in batch:
                size = shape.read(paths[index])
                _decode(size * shape.decode_ms_per_mb / 1e9)
                total += size
            tasks.send(total)
        except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
            return
        except OSError as exc:
            tasks.send(str(exc))


def _decode(seconds: float) -> None:
    """Use so much CPU time of this thread, which takes longer if another process takes the core."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def files(root: Path) -> list[str]:
    """All files below the directory, in the order of their names."""
    found = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    return sorted(found)


def apart(root: Path, *options: str | float) -> dict[str, Any]:
    """Run this program on a directory in a process of its own. Returns its JSON output."""
    command = [sys.executable, "-m", "bench.training", str(root), "--json", *map(str, options)]
    said = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=600)
    if said.returncode:
        raise RuntimeError(f"the training loop failed: {said.stderr.strip()[-500:]}")
    report: dict[str, Any] = json.loads(said.stdout)
    return report


def step_ms_at_least(share: float, root: Path, *options: str | float, shape: str) -> float:
    """The shape's own step, or that much longer that the accelerator is busy for this share of the time here."""
    step_ms = SHAPES[shape].step_ms
    for _ in range(8):
        epochs = apart(root, "--shape", shape, *options, "--step-ms", step_ms)["epochs"]
        if max(epoch["utilisation"] for epoch in epochs) >= share:
            break
        step_ms *= 1.25
    return step_ms


def step_ms_for(root: Path, *options: str | float) -> float:
    """The step with which the accelerator is busy for `UTILISATION` of the time here, with these options."""
    report = apart(root, *options, "--step-ms", 0)
    best = max(report["epochs"], key=_rate)
    step_ms = UTILISATION * 1e3 * best["seconds"] / -(-best["samples"] // report["batch"])
    # The first batch and the last step have nothing beside them: further guesses come closer.
    for _ in range(2):
        best = max(apart(root, *options, "--step-ms", step_ms)["epochs"], key=_rate)
        step_ms *= UTILISATION / best["utilisation"]
    return float(step_ms)


def _rate(epoch: dict[str, Any]) -> float:
    return float(epoch["samples_per_s"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description="A training loop's reads.")
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("--shape", choices=SHAPES, default="resnet50")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, help="samples a step; as the shape has it")
    parser.add_argument("--step-ms", type=float, help="how long the accelerator takes; as the shape has it")
    parser.add_argument(
        "--decode-ms-per-mb", type=float, help="CPU spent on what was read; as the shape has it"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the orders")
    parser.add_argument("--hints", action="store_true", help="announce the orders to the daemon of the mount")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.decode_ms_per_mb is not None:
        shape = replace(shape, decode_ms_per_mb=options.decode_ms_per_mb)
    batch = options.batch or shape.batch
    step_ms = shape.step_ms if options.step_ms is None else options.step_ms
    paths = files(options.root)
    if not paths:
        parser.error(f"{options.root} holds no files")
    loop = Loop(shape, max(1, options.workers), batch, step_ms / 1e3, options.seed, hints=options.hints)
    epochs = []
    for epoch in loop.epochs(paths, options.epochs):
        epochs.append(epoch)
        if not options.json:
            print(
                f"epoch {len(epochs)}: {epoch.samples_per_s:,.1f} samples/s, {epoch.bytes / 1e6:,.0f} MB in "
                f"{epoch.seconds:.2f} s, accelerator busy {epoch.utilisation:.1%}",
                flush=True,
            )
    if options.json:
        report = {"shape": shape.name, "workers": loop.workers, "batch": batch, "step_ms": step_ms}
        print(json.dumps({**report, "epochs": [asdict(epoch) for epoch in epochs]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

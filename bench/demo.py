"""The main job on this machine alone: a training loop reads plain paths, and every byte is compared.

An embedded S3 server shows a generated dataset (class folders of small files, and a few large shards); the
real command mounts it; a PyTorch DataLoader with worker processes (a pool of readers of the same shape where
torch is missing) walks the mount and reads everything twice in random order. Workers hash what they read; the
hashes were taken when the files were made, before they entered the store. Nothing is left behind, however it
ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from bench.lab.client import LabStore
from bench.lab.dataset import Manifest, make_image_folder, make_shards

Sample = tuple[int, int, str]
"""(index, bytes read, their xxh3); bytes are -1 with the reason in place of the hash if reading failed."""

console = Console(highlight=False, soft_wrap=True)


class Files:
    """A map-style dataset over plain paths, without any knowledge of cachefs or torch."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self.root, self.names = root, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Sample:
        digest, size = xxhash.xxh3_64(), 0
        try:
            with open(self.root / self.names[index], "rb", buffering=0) as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
                    size += len(chunk)
        except OSError as exc:
            return index, -1, str(exc)
        return index, size, digest.hexdigest()


@dataclass(frozen=True)
class Epoch:
    """The result of one pass over the dataset."""

    name: str
    seconds: float
    files: int
    bytes: int
    wrong: list[str]
    requests: dict[str, int]
    origin_bytes: int


def have_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def deaf_to_interrupts(*_: object) -> None:
    """Ignore Ctrl-C in a worker, which the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def read_all(files: Files, workers: int, seed: int) -> Generator[list[Sample], None, None]:
    """Every file once, in random order, in batches, by worker processes."""
    if have_torch():
        # Torch works without NumPy, but warns of it when it is imported.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import torch
        from torch.utils.data import DataLoader

        yield from DataLoader(
            files,  # type: ignore[arg-type]
            batch_size=16,
            shuffle=True,
            num_workers=workers,
            collate_fn=list,
            worker_init_fn=deaf_to_interrupts,
            generator=torch.Generator().manual_seed(seed),
        )
    else:
        order = list(range(len(files)))
        random.Random(seed).shuffle(order)
        context = multiprocessing.get_context("spawn")
        with context.Pool(workers, initializer=deaf_to_interrupts) as pool:
            for sample in pool.imap_unordered(files.__getitem__, order, chunksize=8):
                yield [sample]


def run_epoch(name: str, files: Files, manifest: Manifest, workers: int, seed: int, lab: LabStore) -> Epoch:
    """Read all files and compare them with the manifest."""
    lab.reset()
    wrong: list[str] = []
    count = total = 0
    began = time.monotonic()
    expected = sum(size for size, _ in manifest.values())
    # Closed here and now: an interrupted epoch's workers must not hold the mount.
    with progress(name, expected) as advance, closing(read_all(files, workers, seed)) as batches:
        for batch in batches:
            for index, size, digest in batch:
                name_of_file = files.names[index]
                if (size, digest) != manifest.get(name_of_file):
                    wrong.append(f"{name_of_file}: {digest if size < 0 else 'differs'}")
                count += 1
                total += max(size, 0)
                advance(max(size, 0))
    seconds = time.monotonic() - began
    counters = lab.counters()
    requests = {kind: int(number) for kind, number in counters["requests"].items() if number}
    return Epoch(name, seconds, count, total, wrong, requests, sum(counters["bytes_sent"].values()))


@contextmanager
def progress(name: str, total: float) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(name, total=total)
        yield lambda count: bars.advance(task, count)


def make_dataset(root: Path, options: argparse.Namespace) -> Manifest:
    """Relative path → (size, xxh3 hex) of all files that were made below `root`."""
    with console.status("making the dataset"):
        images = make_image_folder(root / "train", options.classes, options.per_class, options.seed)
        shards = make_shards(root / "shards", options.shards, options.shard_size << 20, options.seed)
    return {f"train/{name}": entry for name, entry in images.items()} | {
        f"shards/{name}": entry for name, entry in shards.items()
    }


def cachefs(*arguments: object, environ: dict[str, str] | None = None) -> str:
    """Run the real command. Raises with its message if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "cachefs", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **(environ or {})},
        start_new_session=True,  # Ctrl-C is not for it
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip() or f"cachefs {arguments[0]} failed")
    return done.stdout


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda got, _: came.append(got))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for got in came[:1]:
        signal.raise_signal(got)


@contextmanager
def mounted(lab: LabStore, place: Path) -> Iterator[Path]:
    """The bucket as files, by the real command; unmounted at the end, and its cache removed."""
    mountpoint = place / "mnt"
    mountpoint.mkdir()
    options = ["--cache-dir", place / "cache", "--consistency", "immutable", "--read-only"]
    tiers: list[str] = []
    try:
        with uninterrupted():  # half a mount could not be taken away
            cachefs("mount", *options, "s3://demo", mountpoint, environ=lab.env)
            tiers = [tier["path"] for tier in json.loads(cachefs("status", "--json", mountpoint))["tiers"]]
        yield mountpoint
    finally:
        if os.path.ismount(mountpoint):
            try:
                cachefs("umount", mountpoint)
            except SystemExit:  # a reader that was interrupted may still hold it for a moment
                cachefs("umount", "--lazy", mountpoint)
        for tier in tiers:
            shutil.rmtree(tier, ignore_errors=True)


def names_below(root: Path) -> list[str]:
    """The files below a directory, found as a dataset class finds its samples."""
    found = []
    for directory, _, names in os.walk(root, onerror=_raise):
        found += [os.path.relpath(os.path.join(directory, name), root) for name in names]
    return sorted(found)


def _raise(exc: OSError) -> None:
    raise exc


def run(options: argparse.Namespace) -> int:
    """Run the demo. Returns 1 if any byte differs."""
    with ExitStack() as stack:
        place = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="cachefs-demo-", dir=options.dir))
        )
        manifest = make_dataset(place / "data", options)
        size = sum(entry[0] for entry in manifest.values())
        console.print(
            f"dataset: {len(manifest):,} files, {size / 1e6:,.0f} MB, in an S3 server on this machine"
        )

        lab = stack.enter_context(
            LabStore(
                place / "store",
                serve={"demo": place / "data"},
                latency_ms=options.latency_ms,
                bandwidth=options.bandwidth * 1e6,
            )
        )
        mountpoint = stack.enter_context(mounted(lab, place))
        for number in (signal.SIGINT, signal.SIGTERM):  # nothing interrupts what takes everything away
            stack.callback(signal.signal, number, signal.SIG_IGN)
        lab.reset()
        names = names_below(mountpoint)
        listed = {kind: int(number) for kind, number in lab.counters()["requests"].items() if number}
        console.print(f"listed:  {len(names):,} files with {requests_line(listed)}")
        reader = "PyTorch DataLoader" if have_torch() else "pool of readers (torch is not installed)"
        console.print(
            f"reading: {reader}, {options.workers} worker processes, random order, every byte compared"
        )
        files = Files(mountpoint, names)
        epochs = [
            run_epoch(name, files, manifest, options.workers, options.seed + number, lab)
            for number, name in enumerate(("epoch 1 (cold)", "epoch 2 (warm)"))
        ]
        report(epochs)
        return verdict(epochs, names, manifest)


def requests_line(requests: dict[str, int]) -> str:
    return (
        ", ".join(f"{number:,} {kind.upper()}" for kind, number in sorted(requests.items())) or "no requests"
    )


def report(epochs: Iterable[Epoch]) -> None:
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    for column in ("", "seconds", "MB/s", "files/s", "hit ratio", "requests"):
        table.add_column(column, justify="left" if column in ("", "requests") else "right", no_wrap=True)
    for epoch in epochs:
        hits = max(1 - epoch.origin_bytes / epoch.bytes, 0) if epoch.bytes else 0
        table.add_row(
            epoch.name,
            f"{epoch.seconds:.1f}",
            f"{epoch.bytes / epoch.seconds / 1e6:,.0f}",
            f"{epoch.files / epoch.seconds:,.0f}",
            f"{100 * hits:.1f} %",
            requests_line(epoch.requests),
        )
    console.print(table)
    console.print("hit ratio: the share of the bytes read that did not come from the store", style="dim")


def verdict(epochs: list[Epoch], names: list[str], manifest: Manifest) -> int:
    wrong = [line for epoch in epochs for line in epoch.wrong]
    wrong += [f"{name}: not listed" for name in sorted(manifest.keys() - set(names))]
    if not wrong:
        console.print(
            f"all {sum(epoch.bytes for epoch in epochs) / 1e6:,.0f} MB read are identical to the source"
        )
        return 0
    for line in wrong[:10]:
        console.print(f"  {line}")
    console.print(f"{len(wrong):,} files are not what the source has", style="bold red")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--classes", type=int, default=30, help="class folders")
    parser.add_argument("--per-class", type=int, default=100, help="files of 50 to 200 KB in each")
    parser.add_argument("--shards", type=int, default=4, help="large files")
    parser.add_argument("--shard-size", type=int, default=64, metavar="MIB", help="size of each")
    parser.add_argument("--workers", type=int, default=max(2, min(cores, 8)), help="reading processes")
    parser.add_argument("--latency-ms", type=float, default=0, help="what the store adds to every request")
    parser.add_argument(
        "--bandwidth", type=float, default=0, metavar="MB/S", help="what the store sends; 0 is all it can"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the dataset and of the order")
    parser.add_argument(
        "--dir", type=Path, help="where to work, in a directory that is removed (default: temporary)"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(options)
    except KeyboardInterrupt:
        console.print("interrupted: everything is taken away again")
        return 130


if __name__ == "__main__":
    sys.exit(main())

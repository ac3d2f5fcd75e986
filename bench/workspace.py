"""The workspace of a run: directories, data and the lab store, all removed afterwards.

The store's data lies in memory if there is space, because the store stands for another machine, whose reads must not load
this disk. Caches and the files of the ext4 baseline lie on the disk. Data is made once, when a scenario first asks for it.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.lab.client import LabStore

SHM = Path("/dev/shm")
LATENCY_MS, BANDWIDTH = 20, 200e6
"""The shape of the store: an object store in the same region."""


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    cold: int = 1 << 30
    warm: int = 256 << 20
    shared: int = 256 << 20
    beside_large: int = 512 << 20
    beside_saved: int = 256 << 20
    beside_made: int = 300
    small_files: int = 1000
    small_size: int = 100_000
    saved: int = 1 << 30
    saved_long: int = 4 << 30
    saved_files: int = 1000
    saved_size: int = 10_000
    created: int = 1000
    names: int = 10_000
    first_bytes: int = 12
    epoch_files: int = 4000
    epoch_size: int = 100_000
    shards: int = 32
    shard: int = 32 << 20
    records: int = 64
    record: int = 2_828_486
    """The mean of CosmoFlow's files in MLPerf Storage."""
    blocks: int = 1_000_000
    many_names: int = 1_000_000
    soak_operations: int = 40_000
    out_s: float = 60.0
    """Seconds for which a store does not answer."""
    others: bool = True
    """Whether other mounts are measured beside cachefs."""
    drops: bool = True
    """Whether the kernel's page cache, which all processes share, may be dropped."""
    limit_s: float = 3.0
    """Seconds for which a reader stays with a file: its rate is known after that."""


TINY = Scale(
    cold=24 << 20,
    warm=8 << 20,
    shared=24 << 20,
    beside_large=24 << 20,
    beside_saved=24 << 20,
    beside_made=10,
    small_files=50,
    small_size=20_000,
    saved=40 << 20,
    saved_long=96 << 20,
    saved_files=40,
    saved_size=10_000,
    created=20,
    names=2500,
    first_bytes=2,
    epoch_files=200,
    epoch_size=20_000,
    shards=8,
    shard=8 << 20,
    records=8,
    record=300_000,
    blocks=2000,
    many_names=20_000,
    soak_operations=4_000,
    out_s=8.0,
    others=False,
    drops=False,
)
"""For tests: counts are exact at any scale."""


@dataclass
class Traffic:
    """What the store was asked for. `made` are the objects that bytes were sent for, in one request or in `parts`;
    `received`, these bytes; `unfinished`, uploads in parts that were begun and neither completed nor aborted."""

    get: int = 0
    head: int = 0
    list: int = 0
    bytes: int = 0
    made: int = 0
    copied: int = 0
    deleted: int = 0
    parts: int = 0
    received: int = 0
    unfinished: int = 0


class Workspace:
    """Enter it in a thread that stays: the store ends with that thread."""

    def __init__(self, scale: Scale = Scale()) -> None:
        self.scale = scale

    def __enter__(self) -> Self:
        self.disk = Path(tempfile.mkdtemp(prefix="cachefs-bench-"))
        scale = self.scale
        need = 2 * (scale.cold + scale.warm + scale.epoch_files * scale.epoch_size)
        need += scale.shards * scale.shard + 2 * scale.saved_long
        roomy = SHM.is_dir() and shutil.disk_usage(SHM).free > need
        self._memory = Path(tempfile.mkdtemp(prefix="cachefs-bench-", dir=SHM if roomy else self.disk))
        self._trees = self._memory / "trees"
        self._trees.mkdir()
        self.lab = LabStore(self._memory / "store").__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lab.__exit__(None, None, None)
        shutil.rmtree(self._memory, ignore_errors=True)
        shutil.rmtree(self.disk, ignore_errors=True)

    # -- data --------------------------------------------------------------------------------------

    def big(self, bucket: str, size: int, count: int = 1) -> Path:
        """A bucket of files `0.bin` and on, one tree for each bucket; returns the tree that the store serves."""
        tree = self._trees / bucket
        if not tree.exists():
            tree.mkdir()
            for number in range(count):
                fill(tree / f"{number}.bin", size)
        self.lab.serve(bucket, tree)
        return tree

    def small(self, bucket: str) -> tuple[Path, list[str]]:
        """A bucket of small files in ten folders: (tree, the keys in random order)."""
        tree = self._trees / "small"
        scale = self.scale
        keys = [f"class_{n % 10:02d}/{n:06d}.jpg" for n in range(scale.small_files)]
        if not tree.exists():
            for key in keys:
                (tree / key).parent.mkdir(parents=True, exist_ok=True)
                fill(tree / key, scale.small_size)
        self.lab.serve(bucket, tree)
        random.Random(bucket).shuffle(keys)
        return tree, keys

    def files(self, bucket: str, folders: Sequence[str], count: int, size: int) -> list[str]:
        """A bucket of that many files, spread over the folders; their keys in the store's order."""
        tree = self._trees / bucket
        keys = sorted(f"{folders[n % len(folders)]}/{n:06d}.bin" for n in range(count))
        if not tree.exists():
            for folder in folders:
                (tree / folder).mkdir(parents=True)
            for key in keys:
                fill(tree / key, size)
        self.lab.serve(bucket, tree)
        return keys

    def tree(self, bucket: str) -> Path:
        """The tree of a bucket that was made here."""
        return self._trees / bucket

    def changed(self, key: str) -> bytes:
        """The content of a small file after the store has replaced it."""
        inverse = bytes(255 - value for value in range(256))
        return (self._trees / "small" / key).read_bytes().translate(inverse)

    def on_disk(self, tree: Path) -> Path:
        """A copy of that tree on the disk: the ext4 baseline."""
        copy = self.disk / "ext4" / tree.name
        if not copy.exists():
            shutil.copytree(tree, copy)
        return copy

    def reader(self) -> Path:
        """`bench/reader.c`, compiled."""
        program = self.disk / "reader"
        if not program.exists():
            source = Path(__file__).with_name("reader.c")
            subprocess.run(["cc", "-O2", "-pthread", "-o", program, source], check=True)
        return program

    # -- the store ---------------------------------------------------------------------------------

    @contextmanager
    def shaped(self, bandwidth: float = BANDWIDTH) -> Iterator[None]:
        """Give the store the latency and bandwidth of a real one in this block."""
        self.lab.shape(latency_ms=LATENCY_MS, bandwidth=bandwidth)
        try:
            yield
        finally:
            self.lab.shape(latency_ms=0, bandwidth=0)

    @contextmanager
    def traffic(self) -> Iterator[Traffic]:
        """The requests of this block, known at its end."""
        self.quiet()
        self.lab.reset()
        seen = Traffic()
        yield seen
        self.quiet()
        counters = self.lab.counters()
        requests = counters["requests"]
        seen.get, seen.head, seen.list = (requests.get(kind, 0) for kind in ("get", "head", "list"))
        seen.bytes = counters["bytes_sent"].get("get", 0)
        seen.made = requests.get("put", 0) + requests.get("complete_upload", 0)
        seen.copied, seen.parts = requests.get("copy", 0), requests.get("upload_part", 0)
        seen.deleted = requests.get("delete", 0) + requests.get("delete_many", 0)
        seen.received = sum(counters["bytes_received"].get(kind, 0) for kind in ("put", "upload_part"))
        ended = requests.get("complete_upload", 0) + requests.get("abort_upload", 0)
        seen.unfinished = requests.get("create_upload", 0) - ended

    def quiet(self) -> None:
        """Wait until no request has come for a moment: readahead may still be in flight."""
        before = -1
        until = time.monotonic() + 30
        while time.monotonic() < until:
            counters = self.lab.counters()
            now = sum(counters["requests"].values()) if not counters["in_flight"] else -1
            if now == before >= 0:
                return
            before = now
            time.sleep(0.03)


def fill(path: Path, size: int) -> None:
    """Make a file of bytes that do not compress, without two equal MiB."""
    pool = _pool()
    with path.open("wb") as file:
        for number in range(0, size, len(pool)):
            head = f"{path.name} {number}".encode().ljust(64)
            file.write(head[: size - number])
            file.write(pool[len(head) : size - number])


_POOL: list[bytes] = []


def _pool() -> bytes:
    if not _POOL:
        _POOL.append(random.Random(0).randbytes(1 << 20))
    return _POOL[0]


class SpareMemory:
    """Allocate memory until it is needed, and free it then. A virtual machine may have returned free memory to its host;
    the first use of each page then costs more than what is measured here, and only programs that store bytes pay for it."""

    def __init__(self, size: int) -> None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._size = min(size, free // 2)
        self._held: mmap.mmap | None = None

    def __enter__(self) -> Self:
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give()

    @contextmanager
    def free(self) -> Iterator[None]:
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self._held = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Measured: a tier of huge pages takes those that were just given back; of small ones, that lie all over, it gets
        # others as often as not.
        self._held.madvise(mmap.MADV_HUGEPAGE)
        page = b"x" * (2 << 20)
        for at in range(0, self._size, len(page)):
            self._held[at : at + len(page)] = page[: self._size - at]

    def _give(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


class Processors:
    """Utilisation of all processors in this block: above nine tenths, no result can be faster than its processor time."""

    busy = 0.0
    """A share of 1, of all processes of the machine."""

    def __enter__(self) -> Self:
        self._used, self._all = _processor_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        used, total = _processor_time()
        self.busy = (used - self._used) / max(1, total - self._all)


def _processor_time() -> tuple[int, int]:
    """(used, total) ticks since the start of the machine."""
    with open("/proc/stat") as file:
        user, nice, system, idle, iowait, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    used = user + nice + system + irq + softirq + steal
    return used, used + idle + iowait


def can_drop_caches() -> bool:
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


def drop_caches() -> None:
    """Make the kernel drop all cached pages, FUSE's included. Needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1\n")

"""Reading, the same way everywhere: one loop for big files, one for small ones, so that only the mount differs.

Big files are read into one buffer that is used again, a MiB a call: nothing is allocated and the interpreter is away
while the kernel copies. Small files are `os.open`, `os.read`, `os.close` and nothing else. Both may be given a limit in
seconds, after which they stop and say how far they came: a slow mount is measured without being waited for.

    python -m bench.readers FILE AT

reads one file from the moment AT (seconds of the monotonic clock) on: how processes of their own are made to read together.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

BUFFER = 1 << 20
PAGE = 4096
FOREVER = float("inf")
_AT_FDCWD, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS = -100, 0x2000, 0x7FF


@dataclass(frozen=True)
class Reading:
    """Bytes read, and seconds."""

    bytes: int
    files: int
    seconds: float

    @property
    def mb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e6

    @property
    def files_per_s(self) -> float:
        return self.files / self.seconds


def sequential(path: Path, limit_s: float = FOREVER) -> Reading:
    """Read the whole file from its beginning."""
    buffers = [bytearray(BUFFER)]
    total = 0
    begun = time.perf_counter()
    until = begun + limit_s
    fd = os.open(path, os.O_RDONLY)
    try:
        while count := os.readv(fd, buffers):
            total += count
            if time.perf_counter() > until:
                break
    finally:
        os.close(fd)
    return Reading(total, 1, time.perf_counter() - begun)


def first_byte(path: Path) -> float:
    """Seconds until the first byte of the file is read."""
    begun = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    try:
        os.pread(fd, 1, 0)
        return time.perf_counter() - begun
    finally:
        os.close(fd)


def scattered(fd: int, offsets: Sequence[int]) -> float:
    """Seconds of 4 KiB reads at each of these offsets. The loop is in C, so that it adds little."""
    begun = time.perf_counter()
    deque(map(os.pread, itertools.repeat(fd), itertools.repeat(PAGE), offsets), maxlen=0)
    return time.perf_counter() - begun


def touched(path: Path, offsets: Sequence[int]) -> float:
    """Seconds of a new mapping of the file and of reading one byte at each of these offsets."""
    fd = os.open(path, os.O_RDONLY)
    try:
        begun = time.perf_counter()
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)
            deque(map(mapped.__getitem__, offsets), maxlen=0)
            return time.perf_counter() - begun
    finally:
        os.close(fd)


def attributes(path: Path, count: int) -> float:
    """Seconds of so many requests for a file's attributes, none of which the kernel's cache answers."""
    statx = ctypes.CDLL(None, use_errno=True).statx
    name, about = os.fsencode(path), ctypes.create_string_buffer(256)
    begun = time.perf_counter()
    for _ in range(count):
        if statx(_AT_FDCWD, name, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, about):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return time.perf_counter() - begun


def small(paths: Sequence[str], limit_s: float = FOREVER) -> Reading:
    """Read files that fit one read, one after another: open, read, close."""
    total = files = 0
    begun = time.perf_counter()
    until = begun + limit_s
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        total += len(os.read(fd, BUFFER))
        os.close(fd)
        files += 1
        if not files & 15 and time.perf_counter() > until:
            break
    return Reading(total, files, time.perf_counter() - begun)


def small_files(paths: Sequence[str], limit_s: float = FOREVER) -> Reading:
    """The same by Python's own `open`, as PIL, NumPy and torch do it: it also asks whether a file is a terminal."""
    total = files = 0
    begun = time.perf_counter()
    until = begun + limit_s
    for path in paths:
        with open(path, "rb") as file:
            total += len(file.read())
        files += 1
        if not files & 15 and time.perf_counter() > until:
            break
    return Reading(total, files, time.perf_counter() - begun)


T = TypeVar("T")


def share(paths: Sequence[T], readers: int, read: Callable[[T], int], limit_s: float = FOREVER) -> Reading:
    """Let so many threads take the next path and `read` it, which returns the number of bytes."""
    queue = iter(paths)
    lock = threading.Lock()
    sizes: list[list[int]] = [[] for _ in range(readers)]
    failures: list[BaseException] = []
    begun = time.perf_counter()
    until = begun + limit_s

    def work(mine: list[int]) -> None:
        try:
            while time.perf_counter() < until:
                with lock:
                    path = next(queue, None)
                if path is None:
                    return
                mine.append(read(path))
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return Reading(sum(map(sum, sizes)), sum(map(len, sizes)), time.perf_counter() - begun)


def read_one(path: str) -> int:
    """Read one small file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return len(os.read(fd, BUFFER))
    finally:
        os.close(fd)


def processes(path: Path, count: int) -> list[int]:
    """Let so many processes read the file at the same time. Returns the bytes that each got."""
    at = time.monotonic() + 0.2 + 0.05 * count
    command = [sys.executable, "-m", "bench.readers", str(path), str(at)]
    where = Path(__file__).resolve().parents[1]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=where) for _ in range(count)]
    try:
        return [int(child.communicate(timeout=120)[0] or 0) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def together(parts: Sequence[Callable[[], object]]) -> float:
    """Seconds until all parts are done, each in a process, from the time when all processes have started."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(parts) + 1, timeout=120)

    def run(part: Callable[[], object]) -> None:
        barrier.wait()
        try:
            part()
        except BaseException:
            barrier.abort()
            raise
        barrier.wait()

    children = [context.Process(target=run, args=(part,), daemon=True) for part in parts]
    try:
        for child in children:
            child.start()
        barrier.wait()
        begun = time.perf_counter()
        barrier.wait()
        return time.perf_counter() - begun
    finally:
        for child in children:
            child.kill()
            child.join()


def main() -> None:
    path, at = Path(sys.argv[1]), float(sys.argv[2])
    time.sleep(max(0.0, at - time.monotonic()))
    print(sequential(path).bytes)


if __name__ == "__main__":
    main()

"""Reading, the same way everywhere: one loop for big files, one for small ones, so that only the mount differs.

Big files are read into one buffer that is used again, a MiB a call: nothing is allocated and the interpreter is away
while the kernel copies. Small files are `os.open`, `os.read`, `os.close` and nothing else. Both may be given a limit in
seconds, after which they stop and say how far they came: a slow mount is measured without being waited for.

    python -m bench.readers FILE AT

reads one file from the moment AT (seconds of the monotonic clock) on: how processes of their own are made to read together.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BUFFER = 1 << 20
FOREVER = float("inf")


@dataclass(frozen=True)
class Reading:
    """What was read, and how long it took."""

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
    """The whole file, from its beginning."""
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
    """Seconds until the first byte of the file is there."""
    begun = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    try:
        os.pread(fd, 1, 0)
        return time.perf_counter() - begun
    finally:
        os.close(fd)


def small(paths: Sequence[str], limit_s: float = FOREVER) -> Reading:
    """Files that fit one read, opened, read and closed one after another."""
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


def share(
    paths: Sequence[str], readers: int, read: Callable[[str], int], limit_s: float = FOREVER
) -> Reading:
    """Let that many threads take the next path and `read` it (which returns how many bytes that was)."""
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
    """One small file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return len(os.read(fd, BUFFER))
    finally:
        os.close(fd)


def processes(path: Path, count: int) -> list[int]:
    """That many processes read the file at the same time; the bytes each of them got."""
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


def main() -> None:
    path, at = Path(sys.argv[1]), float(sys.argv[2])
    time.sleep(max(0.0, at - time.monotonic()))
    print(sequential(path).bytes)


if __name__ == "__main__":
    main()

"""Experiments that chose the value of a constant. Each prints what other values would cost.

    python -m bench.choosing rows|reads|streams [--place DIR]

`rows`: the processor time of the thread that commits rows of names, by how long it gathers them (`base/behind.py`), while
files are saved one after another. `reads`: what a disk gives to 64 readers, by how many read at a time (`store/tier.py`).
`streams`: the processor time of a read at random, by how many streams of its object are remembered (`fetch/readahead.py`).
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median

import trio

from cachefs.base import behind
from cachefs.base.database import Database
from cachefs.fetch import readahead
from cachefs.store import tier

ROUNDS = 5
SAVE_S = 0.006
"""Seconds from one small file to the next. Measured by `scripts/bench create-small`."""

FILES, FILE_BYTES = 64, 16 << 20
MIB = 1 << 20


def rows(place: Path) -> None:
    """A save writes four rows of 100 bytes as the file is made, and two when the origin has it."""
    for gather_s in (0.0, 0.005, 0.01, 0.02, 0.04, 0.1):
        shares = []
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory(dir=place) as directory:
                shares.append(_share_of_commits(Path(directory), gather_s))
        print(f"rows gathered for {gather_s * 1e3:3.0f} ms: commits take {median(shares):.1%} of a processor")


def _share_of_commits(directory: Path, gather_s: float) -> float:
    behind.GATHER_S = gather_s
    database = behind.WriteBehind(Database(directory, ("names",), version="v", fsync=False))
    (thread,) = (one for one in threading.enumerate() if one.name == "names")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    begun, used = time.monotonic(), time.clock_gettime(clock)
    for number in range(round(2.0 / SAVE_S)):
        names = [f"{number}/{part}".encode() for part in range(4)]
        database.write([("names", name, bytes(100)) for name in names])
        time.sleep(max(0.0, begun + (number + 0.5) * SAVE_S - time.monotonic()))
        database.write([("names", name, bytes(100)) for name in names[:2]])
        time.sleep(max(0.0, begun + (number + 1) * SAVE_S - time.monotonic()))
    share = (time.clock_gettime(clock) - used) / (time.monotonic() - begun)
    database.close()
    return share


def reads(place: Path) -> None:
    """Reads of a kernel's readahead and of a block, at random, past the page cache."""
    with tempfile.TemporaryDirectory(dir=place) as directory:
        for number in range(FILES):
            (Path(directory) / f"{number}").write_bytes(os.urandom(FILE_BYTES))
        os.sync()
        for length in (128 << 10, MIB):
            for threads in (2, 4, 8, 16, 32):
                found = [trio.run(_read, Path(directory), threads, length) for _ in range(ROUNDS)]
                print(f"reads of {length >> 10:4} KiB, {threads:2} at a time: {median(found):5.0f} MB/s")


async def _read(directory: Path, threads: int, length: int, seconds: float = 2.0) -> float:
    """MB/s."""
    tier.READ_THREADS = threads
    disk = tier.Disk("bench", directory)
    fds = [os.open(directory / f"{number}", os.O_RDONLY) for number in range(FILES)]
    for fd in fds:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    left = [(fd, at) for fd in fds for at in range(0, FILE_BYTES, length)]
    random.shuffle(left)
    begun, done = time.monotonic(), 0

    async def reader() -> None:
        nonlocal done
        while left and time.monotonic() < begun + seconds:
            fd, at = left.pop()
            done += len(await disk.run(partial(os.pread, fd, length, at), lambda _: None))

    async with trio.open_nursery() as nursery:
        for _ in range(64):
            nursery.start_soon(reader)
    took_s = time.monotonic() - begun
    for fd in fds:
        os.close(fd)
    return done / took_s / 1e6


def streams(place: Path) -> None:
    """Of an object of 1 TiB, so that hardly any read is near an earlier one."""
    for count in (16, 32, 64, 128, 256):
        readahead.STREAMS = count
        found = []
        for _ in range(ROUNDS):
            policy, dice = readahead.Readahead(1 << 40, MIB, 64), random.Random(1)
            offsets = [dice.randrange(1 << 20) * MIB for _ in range(20_000)]
            begun = time.process_time()
            for at in offsets:
                policy.observe(1, at, 4096)
            found.append((time.process_time() - begun) / len(offsets) * 1e6)
        print(f"{count:3} streams: {median(found):4.1f} µs for a read at random")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.choosing", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("rows", "reads", "streams"))
    parser.add_argument("--place", type=Path, default=Path("."), help="a directory on the disk to measure")
    given = parser.parse_args()
    {"rows": rows, "reads": reads, "streams": streams}[given.what](given.place)


if __name__ == "__main__":
    main()

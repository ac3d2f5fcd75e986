"""One process replaces a file by rename, again and again; others open it, look at it, read it whole and map it.

On a local disk nothing of this fails: a descriptor and a mapping are of the file that was opened, whatever its name shows.
"""

from __future__ import annotations

import collections
import errno
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

SIZES = (32, 3200, 131072)

Seen = dict[str, int]
"""Operation, and how it ended → how often."""


def write(path: Path, until: float, seen: collections.Counter[str]) -> None:
    """Each version is one line of 32 bytes, as often as its size takes."""
    number = 0
    while time.monotonic() < until:
        number += 1
        line = f"{number:031d}\n".encode()
        try:
            temporary = path.with_name("temporary")
            temporary.write_bytes(line * (SIZES[number % len(SIZES)] // 32))
            os.rename(temporary, path)
            seen["replace ok"] += 1
        except OSError as exc:
            seen[f"replace {name_of(exc)}"] += 1


def read(path: Path, until: float, seen: collections.Counter[str]) -> None:
    while time.monotonic() < until:
        step = "open"
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                step = "fstat"
                size = os.fstat(fd).st_size
                step = "read"
                data = os.pread(fd, 1 << 20, 0)
                if len(data) != size or not whole(data):
                    seen["read torn"] += 1
                step = "fstat again"
                if os.fstat(fd).st_size != size:
                    seen["fstat torn"] += 1
                    continue
                step = "map"
                with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
                    if bytes(mapped) != data:
                        seen["map torn"] += 1
            finally:
                os.close(fd)
            seen["read ok"] += 1
        except OSError as exc:
            seen[f"{step} {name_of(exc)}"] += 1


def whole(data: bytes) -> bool:
    return len(data) in SIZES and data == data[:32] * (len(data) // 32)


def name_of(exc: OSError) -> str:
    return errno.errorcode.get(exc.errno or 0, str(exc.errno))


def replace(path: Path, seconds: float, readers: int = 2) -> Seen:
    """What the writer and all readers have seen. A process that a signal has ended (a mapping that lost its pages) is
    counted as one."""
    path.write_bytes(b"0" * 31 + b"\n")
    context = multiprocessing.get_context("fork")
    sent: multiprocessing.SimpleQueue[Seen] = context.SimpleQueue()
    until = time.monotonic() + seconds

    def one(work: Callable[[Path, float, collections.Counter[str]], None]) -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        seen: collections.Counter[str] = collections.Counter()
        work(path, until, seen)
        sent.put(dict(seen))

    running = [context.Process(target=one, args=(work,)) for work in (write, *[read] * readers)]
    for process in running:
        process.start()
    total: collections.Counter[str] = collections.Counter()
    for process in running:
        process.join(seconds + 60)
        if process.exitcode:
            total[f"ended by {process.exitcode}"] += 1
        else:
            total.update(sent.get())
    return dict(total)

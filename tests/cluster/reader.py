"""A reader on its own: python -m tests.cluster.reader, with a job as JSON on stdin.

It reads whole files, each in the order given, and compares every byte with what belongs there. What went wrong is said, not
raised: the next file may fare better, and the test wants to know how many did not. It hangs alone when a mount hangs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

CHUNK = 1 << 20


class File(NamedTuple):
    """`digest` is the xxh3-64 of all its bytes, in hexadecimal."""

    name: str
    size: int
    digest: str


def read(root: str, files: Iterable[File]) -> dict[str, object]:
    """Read each; its pages are dropped, so that the next reading reaches the daemon."""
    buffer = memoryview(bytearray(CHUNK))
    errors, wrong, total = [], [], 0
    begun = time.monotonic()
    for file in files:
        told = xxhash.xxh3_64()
        try:
            fd = os.open(f"{root}/{file.name}", os.O_RDONLY)
            try:
                while count := os.readv(fd, [buffer]):
                    told.update(buffer[:count])
                    total += count
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        except OSError as exc:
            errors.append(f"{file.name}: {exc.strerror}")
            continue
        if told.hexdigest() != file.digest:
            wrong.append(file.name)
    return {"bytes": total, "errors": errors, "wrong": wrong, "seconds": time.monotonic() - begun}


if __name__ == "__main__":
    job = json.load(sys.stdin)
    print(json.dumps(read(job["root"], [File(*file) for file in job["files"]])))

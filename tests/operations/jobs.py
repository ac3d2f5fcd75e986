"""A job that tries again, and what it finds to read."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.lab.client import LabStore
from bench.lab.dataset import content

BUCKET, WORK = "data", "held"
"""What `reader.py` reads, and what `worker.py` also writes to."""

FILES = {f"file-{number}": content(f"operations/{number}", 300_000 + number) for number in range(8)}
BIG = {"big": content("operations/big", 24 << 20)}
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}

OUTAGE_S = 3.0
"""How long a job that tries again may have nothing to read when the daemon dies. Promised in docs/how-to/containers.md."""


def fill(store: LabStore) -> LabStore:
    store.bucket(BUCKET)
    store.bucket(WORK)
    for name, data in {**FILES, **BIG}.items():
        store.put(BUCKET, name, data)
        if name in FILES:
            store.put(WORK, name, data)
    return store


@contextmanager
def no_job_notices(process: subprocess.Popen[str]) -> Iterator[None]:
    """A `worker.py` reads and writes meanwhile, and no call of it fails."""
    begin(process)
    yield
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    said = json.loads(out.splitlines()[-1])
    print(said)
    assert said["errors"] == []
    assert all(said["rounds"].values())


@dataclass
class Said:
    """What a reader counted: see `reader.py`."""

    reads: int
    longest_s: float
    wrong: int
    errors: dict[str, int]


def begin(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """Give a `reader.py` its work; returns when it reads."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(DIGESTS) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "reading\n"
    return process


def end(process: subprocess.Popen[str]) -> Said:
    """Have it stop, and say."""
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    return Said(**json.loads(out.splitlines()[-1]))

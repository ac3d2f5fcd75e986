"""One process replaces a file by rename again and again, others read it, and the daemon is killed again and again: also
while it takes the mount over. A daemon is a fork (`tests.fuse.deaths`), so it dies several times a second.

The long series, with so many kills for each way of writing: `CACHEFS_KILLS=2000 pytest --timeout=0 -o faulthandler_timeout=0
tests/mount/test_replacing.py`."""

from __future__ import annotations

import collections
import errno
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LEVEL
from tests.fuse.deaths import ANSWERS_S, Daemons
from tests.mount.conftest import ONE_BACKEND, why_no_native_backend
from tests.mount.mounts import eventually, mounts_at, run
from tests.mount.replacing import SIZES

pytestmark = ONE_BACKEND

KILLS = int(os.environ.get("CACHEFS_KILLS", "0")) or (10 if LEVEL == "short" else 30)
SEED = int(os.environ.get("CACHEFS_KILLS_SEED", "1"))
READERS = 2
LONGEST_LIFE_S = 0.3
"""A daemon lives for less. Guessed: a replacement takes some milliseconds, and an upload follows it by 50."""

MODES: dict[str, dict[str, Any]] = {"durable": {}, "writeback": {"writeback": True, "upload_delay": "50ms"}}

Seen = collections.Counter[str]


def version(number: int) -> bytes:
    """One line of 32 bytes, as often as its size takes."""
    return f"{number:031d}\n".encode() * (SIZES[number % len(SIZES)] // 32)


def write(path: Path, last: Synchronized[int], over: Synchronized[int], seen: Seen) -> None:
    number = 0
    while not over.value:
        number += 1
        temporary = path.with_name("temporary")
        temporary.write_bytes(version(number))
        os.rename(temporary, path)
        last.value = number
        seen["replaced"] += 1


def read(path: Path, last: Synchronized[int], over: Synchronized[int], seen: Seen) -> None:
    """Each version is read whole, and none that is older than the last one that was there before."""
    while not over.value:
        least = last.value
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                size, data = os.fstat(fd).st_size, os.pread(fd, 1 << 20, 0)
                again = os.pread(fd, 1 << 20, 0)
            finally:
                os.close(fd)
        except OSError as exc:
            # What was cached of a replaced file may be forgotten with its daemon.
            if exc.errno != errno.ESTALE:
                raise
            seen["stale"] += 1
            continue
        if not data:
            seen[f"empty: 0 bytes of {size}, then {len(again)}"] += 1
        elif data != version(number := int(data[:31])) or size != len(data) or again != data:
            seen[f"torn: {len(data)} bytes of {size}, then {len(again)}, begins with {data[:31]!r}"] += 1
        elif number < least:
            seen[f"version {number} after {least}"] += 1
        else:
            seen["read"] += 1


@pytest.fixture(params=list(MODES))
def daemons(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemons]:
    if reason := why_no_native_backend():
        pytest.skip(reason)
    daemons = Daemons(tmp_path, ram="16M", timeout=20, **MODES[request.param])
    yield daemons
    daemons.close()
    if mounts_at(tmp_path / "mnt"):
        run(["umount", "-l", tmp_path / "mnt"])


def test_a_file_that_is_replaced_is_always_whole_and_never_an_older_one(
    daemons: Daemons, tmp_path: Path
) -> None:
    daemons.start()
    eventually(lambda: mounts_at(tmp_path / "mnt"), "the mount")
    directory = tmp_path / "mnt/d"
    directory.mkdir()
    path = directory / "stable"
    path.write_bytes(version(0))
    context = multiprocessing.get_context("fork")
    last, over = context.Value("q", 0), context.Value("b", 0)
    sent: multiprocessing.SimpleQueue[Seen] = context.SimpleQueue()

    def one(work: Any) -> None:
        seen = Seen()
        try:
            work(path, last, over, seen)
        except OSError as exc:
            seen[f"{work.__name__}: {exc}"] += 1
        sent.put(seen)

    programs = [context.Process(target=one, args=(work,)) for work in (write, *[read] * READERS)]
    for program in programs:
        program.start()
    chance = random.Random(SEED)
    try:
        for number in range(KILLS):
            if number % 8 and daemons.deaths:  # else it may die while it takes over
                eventually(daemons.answers, "the next daemon answers", ANSWERS_S)
            time.sleep(LONGEST_LIFE_S * chance.random() ** 2)
            daemons.kill()
    finally:
        over.value = 1
    seen = Seen()
    for _ in programs:
        seen.update(sent.get())
    for program in programs:
        program.join()
    print(dict(seen))
    assert set(seen) <= {"replaced", "read", "stale"}
    assert seen["replaced"] > 1 and seen["read"] > 1
    assert path.read_bytes() == version(last.value)
    origin = tmp_path / "origin/d/stable"
    # With --writeback no daemon may have lived long enough for an upload yet.
    eventually(
        lambda: origin.exists() and origin.read_bytes() == version(last.value),
        "the origin has the last version",
    )
    log = daemons.log()
    assert " ERROR " not in log and "Traceback" not in log

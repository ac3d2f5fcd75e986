"""kill -9 while the cache is being filled: afterwards every byte is right, and most of it needs no second GET."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from bench.lab.client import LabStore
from tests.conftest import LEVEL
from tests.mount.conftest import BOTH_BACKENDS, ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import alive, eventually, mounts_at, run

pytestmark = ONE_BACKEND

MIB = 1 << 20
ROUNDS = 1 if LEVEL == "short" else 5

READER = """
import os, random, sys
root, seed = sys.argv[1], int(sys.argv[2])
dice = random.Random(seed)
names = [name for name in os.listdir(root)]
print("ready", flush=True)
try:
    while True:
        with open(os.path.join(root, dice.choice(names)), "rb", buffering=0) as file:
            if dice.random() < 0.5:
                while file.read(1 << 18):
                    pass
            else:
                size = os.fstat(file.fileno()).st_size
                for _ in range(5):
                    os.pread(file.fileno(), 70000, dice.randrange(size))
except OSError as exc:
    print(exc.errno)
"""


def readers_of(place, count: int) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen([sys.executable, "-c", READER, place, str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in range(count)
    ]


@pytest.mark.long
def test_after_kills_during_fills_every_byte_is_right(
    mounted: Mounted, bucket: Bucket, lab: LabStore
) -> None:
    for number in range(6):
        bucket.put(f"big-{number}", 6 * MIB + number)
    for number in range(30):
        bucket.put(f"small-{number:02}", 90_000 + number)
    total = sum(map(len, bucket.objects.values()))
    mount = mounted(bucket, ram="8M")
    dice = random.Random(5)
    for _ in range(ROUNDS):
        lab.shape(bandwidth=40 * MIB)
        readers = readers_of(mount.path, 4)
        for reader in readers:
            assert reader.stdout and reader.stdout.readline() == "ready\n"
        time.sleep(dice.uniform(0.1, 0.5))
        mount.kill()
        for reader in readers:
            said, _ = reader.communicate(timeout=20)
            assert int(said) in (103, 107), said
        mount.start()
        assert len(mounts_at(mount.path)) == 1
    # The index is a second behind at most: what was filled before that survives the next kill.
    lab.shape(bandwidth=0)
    for data in ((mount.path / key).read_bytes() for key in bucket.objects):
        assert data
    time.sleep(1.5)
    mount.kill()
    mount.start()
    lab.reset()
    for key, data in bucket.objects.items():
        assert (mount.path / key).read_bytes() == data, key
    again = sum(lab.counters()["bytes_sent"].values())
    assert again < total / 2, f"{again} of {total} bytes were fetched again"


def test_a_kill_right_after_the_mount_is_no_problem(mounted: Mounted, bucket: Bucket) -> None:
    data = bucket.put("file", 3 * MIB)
    mount = mounted(bucket, start=False)
    for _ in range(3):
        mount.start()
        mount.kill()
    mount.start()
    assert (mount.path / "file").read_bytes() == data


def test_a_kill_while_starting_leaves_a_place_to_start_again(mounted: Mounted, bucket: Bucket) -> None:
    data = bucket.put("file", 3 * MIB)
    mount = mounted(bucket, start=False)
    for delay in (0.15, 0.3, 0.45):
        process = subprocess.Popen(
            [sys.executable, "-m", "cachefs", *mount.arguments(foreground=True, log_file=None)],
            env=mount.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(delay)
        process.kill()
        process.wait()
    mount.allowed.append("took away a dead mount")
    mount.start()
    assert len(mounts_at(mount.path)) == 1
    assert (mount.path / "file").read_bytes() == data


@BOTH_BACKENDS
def test_damage_in_the_cache_is_never_read(mounted: Mounted, bucket: Bucket) -> None:
    """Every cache file has a byte flipped while the daemon is away."""
    for number in range(5):
        bucket.put(f"file-{number}", MIB + number)
    mount = mounted(bucket)
    for key in bucket.objects:
        (mount.path / key).read_bytes()
    mount.stop()
    damaged = 0
    for path in (mount.cache / "objects").rglob("*"):
        if path.is_file():
            with open(path, "r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
            damaged += 1
    assert damaged == 5
    mount.start()
    mount.allowed.append("checksum")
    for key, data in bucket.objects.items():
        assert (mount.path / key).read_bytes() == data
    assert mount.metrics()["checksum_failures"] == 5


def test_a_damaged_index_costs_the_cache_and_not_the_mount(mounted: Mounted, bucket: Bucket) -> None:
    data = bucket.put("file", 2 * MIB)
    mount = mounted(bucket)
    (mount.path / "file").read_bytes()
    for spoil in (
        "truncate -s 5000",
        "truncate -s 0",
        "dd conv=notrunc bs=4096 count=20 if=/dev/urandom of=",
    ):
        mount.stop()
        for name in ("index", "names"):
            for file in (mount.cache / name).rglob("data.mdb"):
                command = f"{spoil}{file}" if spoil.endswith("=") else f"{spoil} {file}"
                assert run(["sh", "-c", command]).returncode == 0
        mount.allowed += ["index was damaged", "dropping the database"]
        mount.start()
        assert (mount.path / "file").read_bytes() == data


def test_a_terminated_daemon_in_the_middle_of_fills_restarts_warm(
    mounted: Mounted, bucket: Bucket, lab: LabStore
) -> None:
    data = bucket.put("file", 16 * MIB)
    mount = mounted(bucket)
    lab.shape(bandwidth=16 * MIB)
    readers = readers_of(mount.path, 1)
    time.sleep(0.9)
    os.kill(mount.pid, signal.SIGTERM)
    for reader in readers:
        reader.communicate(timeout=20)
    eventually(lambda: not alive(mount.pid), "the daemon has ended")
    lab.shape(bandwidth=0)
    lab.reset()
    mount.start()
    assert (mount.path / "file").read_bytes() == data
    assert sum(lab.counters()["bytes_sent"].values()) < len(data)

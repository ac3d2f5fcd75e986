"""The daemon's own memory has a bound, whatever goes through it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, in_python, succeed

MIB = 1 << 20
GIB = 1 << 30


def own_memory(mount: Mount) -> int:
    """Bytes of the daemon that are nobody else's: neither libraries nor the RAM tier's tmpfs."""
    lines = Path(f"/proc/{mount.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.long
@ONE_BACKEND
def test_a_gibibyte_goes_through_sixty_four_mebibytes(
    mounted: Mounted, bucket: Bucket, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("one", "two"):
        with open(tree / name, "wb") as file:
            os.truncate(file.fileno(), GIB // 2)
            file.write(name.encode())
    bucket.store.serve(bucket.name, tree)
    mount = mounted(bucket, ram="64M", cache_size="256M", timeout=30)
    before = own_memory(mount)
    code = "import sys, hashlib; print(hashlib.file_digest(open(sys.argv[1], 'rb'), 'sha256').hexdigest())"
    for name in ("one", "two"):
        with open(tree / name, "rb") as file:
            expected = hashlib.file_digest(file, "sha256").hexdigest()
        assert in_python(code, mount.path / name, timeout=80).strip() == expected
    grown = own_memory(mount) - before
    assert grown < 100 * MIB, f"{grown / MIB:.0f} MiB"
    tiers = {tier["name"]: tier for tier in mount.status()["tiers"]}
    assert tiers["ram"]["used_bytes"] <= 64 * MIB
    assert tiers["ssd"]["used_bytes"] <= 256 * MIB
    assert mount.metrics()["origin_bytes"] == GIB


def test_names_cost_disk_and_not_memory(mounted: Mounted, bucket: Bucket) -> None:
    bucket.store.synthesize(bucket.name, "many/", 20_000, 10)
    mount = mounted(bucket)
    os.listdir(mount.path)
    before = own_memory(mount)
    listed = succeed(["ls", "-f", mount.path / "many"]).split()
    assert len(listed) >= 20_000
    assert own_memory(mount) - before < 20 * MIB


def test_descriptors_are_given_back(mounted: Mounted, bucket: Bucket) -> None:
    for number in range(200):
        bucket.put(f"d/{number}", 5000)
    mount = mounted(bucket)
    (mount.path / "d/0").read_bytes()
    before = len(os.listdir(f"/proc/{mount.pid}/fd"))
    for number in range(200):
        (mount.path / f"d/{number}").read_bytes()
    mount.settled()
    assert len(os.listdir(f"/proc/{mount.pid}/fd")) <= before + 70
    assert mount.status()["open_files"] == 0


def test_many_handles_of_one_process(mounted: Mounted, bucket: Bucket) -> None:
    data = bucket.put("file", 50_000)
    mount = mounted(bucket)
    descriptors = [os.open(mount.path / "file", os.O_RDONLY) for _ in range(500)]
    try:
        assert mount.status()["open_files"] == 500
        assert os.pread(descriptors[499], 100_000, 0) == data
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    mount.settled()
    assert mount.status()["open_files"] == 0

"""The cache's disk hangs: what is written does not return (frozen), nor what is read (suspended), and no signal ends it. The
mount goes on without it.

Here names and files are read; `test_frozen_writes` is about what is written.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time

import pytest

from bench.lab.client import LabStore
from tests.mount import forked
from tests.mount.conftest import BOTH_BACKENDS, Bucket, Mounted
from tests.mount.frozen import Disk
from tests.mount.mounts import alive, eventually, in_python, mounts_at, succeed
from tests.mount.suspended import SuspendedDisk

pytestmark = [pytest.mark.root, BOTH_BACKENDS]

MIB = 1 << 20

CACHED = [f"cached{number:02d}" for number in range(12)]
"""More than the threads that read one disk."""

READ = "import hashlib, sys; print(hashlib.md5(open(sys.argv[1], 'rb').read()).hexdigest())"


@pytest.mark.long
def test_a_mount_goes_on_and_ends_without_its_disk(
    disk: Disk, mounted: Mounted, bucket: Bucket, lab: LabStore
) -> None:
    for name in ("cached", "uncached", "other"):
        bucket.put(name, 3 * MIB)
    bucket.put("never/seen", 1000)
    # The log lies there, too, as it does by default.
    mount = mounted(
        bucket,
        **{"cache_dir": disk.path / "cache", "log_file": disk.path / "log"},
        **{"ram": "0", "timeout": 30, "cache_size": "128M"},
    )
    (mount.path / "cached").read_bytes()
    assert len(list(mount.path.iterdir())) == 4
    try:
        disk.freeze()
        reader = subprocess.Popen(["md5sum", mount.path / "uncached"], stdout=subprocess.PIPE, text=True)
        try:
            # Meanwhile names are shown, before and after the disk is known to hang.
            eventually(lambda: mount.metrics()["origin_get"] >= 2, "the read has begun", 60)
            succeed(["stat", mount.path / "other"])
            assert len(succeed(["ls", mount.path]).split()) == 4
            printed, _ = reader.communicate(timeout=60)
        finally:
            if reader.poll() is None:
                reader.kill()
        assert printed.split()[0] == hashlib.md5(bucket.objects["uncached"]).hexdigest()
        (tier,) = mount.ask("status")["tiers"]
        assert tier["state"] == "down"
        for name in ("other", "cached"):  # by now at once
            began = time.monotonic()
            found = in_python(READ, mount.path / name).strip()
            assert found == hashlib.md5(bucket.objects[name]).hexdigest()
            assert time.monotonic() - began < 30
        assert succeed(["ls", mount.path / "never"]).split() == ["seen"]
        assert (mount.path / "never/seen").read_bytes() == bucket.objects["never/seen"]
        os.kill(mount.pid, signal.SIGTERM)
        eventually(lambda: not mounts_at(mount.path), "the mount is gone", 60)
    finally:
        disk.thaw()
    mount.killed = True
    eventually(lambda: not alive(mount.pid), "the daemon ends once its disk answers", 60)


def test_a_stop_needs_no_disk(disk: Disk, mounted: Mounted, bucket: Bucket) -> None:
    """It ends before the disk is known to hang, with rows to be written to it."""
    bucket.put("first", 3 * MIB)
    mount = mounted(
        bucket,
        **{"cache_dir": disk.path / "cache", "log_file": disk.path / "log", "cache_size": "128M"},
        **{"read_only": False, "flush_deadline": 5},
    )
    try:
        (mount.path / "first").read_bytes()
        disk.freeze()
        os.kill(mount.pid, signal.SIGTERM)
        eventually(lambda: not mounts_at(mount.path), "the mount is gone", 60)
    finally:
        disk.thaw()
    mount.killed = True
    eventually(lambda: not alive(mount.pid), "the daemon ends once its disk answers", 60)


@pytest.mark.long
def test_a_disk_that_answers_again_is_used_again(disk: Disk, mounted: Mounted, bucket: Bucket) -> None:
    data = bucket.put("first", 3 * MIB)
    bucket.put("second", 3 * MIB)
    mount = mounted(bucket, cache_dir=disk.path / "cache", ram="0", timeout=30, cache_size="128M")
    mount.allowed += ["is down", "answers again", "does not answer; going on"]
    (mount.path / "first").stat()
    try:
        disk.freeze()
        assert (mount.path / "first").read_bytes() == data
        assert mount.ask("status")["tiers"][0]["state"] == "down"
    finally:
        disk.thaw()
    eventually(lambda: mount.ask("status")["tiers"][0]["state"] == "normal", "the disk answers", 60)
    mount.drop_kernel_pages()
    blocks = mount.ask("status")["tiers"][0]["blocks"]
    assert (mount.path / "second").read_bytes() == bucket.objects["second"]
    eventually(lambda: mount.ask("status")["tiers"][0]["blocks"] == blocks + 3, "it is cached", 30)


@pytest.mark.long
@pytest.mark.parametrize("disk", [SuspendedDisk], indirect=True, ids=["suspended"])
def test_cached_files_that_cannot_be_read_come_from_the_origin(
    disk: SuspendedDisk, mounted: Mounted, bucket: Bucket
) -> None:
    """Each is opened for the first time since the start, so nothing of it is in the kernel's memory."""
    for name in CACHED:
        bucket.put(f"files/{name}", 3 * MIB)
    bucket.put("never/seen", 1000)

    def digest(name: str) -> str:
        return hashlib.md5(bucket.objects[name]).hexdigest()

    mount = mounted(
        bucket,
        **{"cache_dir": disk.path / "cache", "log_file": disk.path / "log", "cache_size": "128M"},
        **{"ram": 0, "timeout": 30, "flush_deadline": 5, "prefetch": "off", "read_only": False},
    )
    for name in CACHED:
        (mount.path / "files" / name).read_bytes()
    mount.stop()
    disk.forget()
    mount.start()
    assert mount.ask("status")["tiers"][0]["blocks"] == 36
    readers: list[subprocess.Popen[str]] = []
    try:
        disk.freeze()
        readers = [
            forked.Popen(
                [sys.executable, "-c", READ, str(mount.path / "files" / name)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in CACHED
        ]
        for _ in range(5):
            assert len(succeed(["ls", "-l", mount.path / "files"], timeout=10).splitlines()) == 13
            succeed(["stat", "-f", mount.path], timeout=10)
            assert in_python(READ, mount.path / "never/seen", timeout=20).strip() == digest("never/seen")
            time.sleep(0.5)
        for name, reader in zip(CACHED, readers, strict=True):
            printed, _ = reader.communicate(timeout=60)
            assert printed.strip() == digest(f"files/{name}")
        status = mount.ask("status")
        assert status["tiers"][0]["state"] == "down"
        assert status["loop_pause_s"]["run"] < 3
        os.kill(mount.pid, signal.SIGTERM)
        eventually(lambda: not mounts_at(mount.path), "the mount is gone", 60)
    finally:
        disk.thaw()
        for reader in readers:
            reader.kill()
            reader.communicate(timeout=30)
    mount.killed = True
    eventually(lambda: not alive(mount.pid), "the daemon ends once its disk answers", 60)


@pytest.mark.long
@pytest.mark.parametrize("disk", [SuspendedDisk], indirect=True, ids=["suspended"])
def test_a_full_cache_needs_no_disk_to_evict(disk: SuspendedDisk, mounted: Mounted, bucket: Bucket) -> None:
    """What is evicted is known to the index alone: the file system would have to read its directories."""
    for number in range(50):
        bucket.put(f"files/{number:02d}", MIB)
    bucket.put("large", 8 * MIB)
    mount = mounted(
        bucket,
        **{"cache_dir": disk.path / "cache", "log_file": disk.path / "log", "cache_size": "48M"},
        **{"ram": 0, "timeout": 30, "prefetch": "off"},
    )
    mount.allowed += ["is down", "answers again", "does not answer; going on"]
    for number in range(50):
        (mount.path / f"files/{number:02d}").read_bytes()
    mount.stop()
    disk.forget()
    mount.start()
    (mount.path / "large").stat()
    try:
        disk.freeze()
        assert (
            in_python(READ, mount.path / "large").strip() == hashlib.md5(bucket.objects["large"]).hexdigest()
        )
        status = mount.ask("status")
    finally:
        disk.thaw()
    assert status["loop_pause_s"]["run"] < 3
    assert status["tiers"][0]["state"] == "down"

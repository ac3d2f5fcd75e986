"""Caches that are too small, full, read-only or gone: slower, never wrong, and no errno for a reader."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import BOTH_BACKENDS, ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, in_python, run, succeed

pytestmark = ONE_BACKEND

MIB = 1 << 20

CONCURRENT = """
import mmap, os, random, sys, threading
from bench.lab.dataset import content
root, count, size, threads, reads = sys.argv[1], *map(int, sys.argv[2:6])
seed_of = sys.argv[6]
wrong = []
def work(number):
    dice = random.Random(number)
    buffer = mmap.mmap(-1, 1 << 18)
    try:
        for _ in range(reads):
            which = dice.randrange(count)
            at = dice.randrange(size // 4096) * 4096
            fd = os.open(f"{root}/f{which}", os.O_RDONLY | os.O_DIRECT)
            got = os.preadv(fd, [buffer], at)
            os.close(fd)
            if buffer[:got] != content(seed_of.format(which), got, at) or got != min(1 << 18, size - at):
                wrong.append((which, at, got, "bytes"))
    except OSError as exc:
        wrong.append(str(exc))
workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
for worker in workers: worker.start()
for worker in workers: worker.join()
print(len(wrong), wrong[:5])
"""

REPOSITORY = Path(__file__).resolve().parents[2]


def read_at_random(mount: Mount, bucket: Bucket, count: int, size: int, threads: int, reads: int) -> None:
    """Many threads, direct reads, every byte compared."""
    said = in_python(
        CONCURRENT,
        mount.path,
        count,
        size,
        threads,
        reads,
        f"{bucket.name}/f{{}}/1",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=80,
    )
    assert said == "0 []\n", said


def fill(bucket: Bucket, count: int, size: int) -> None:
    for number in range(count):
        bucket.put(f"f{number}", size)


def allocated(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                total += path.stat().st_blocks * 512
        except OSError:
            pass
    return total


def compare_all(mount: Mount, bucket: Bucket) -> None:
    for key, data in bucket.objects.items():
        assert (mount.path / key).read_bytes() == data, key


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A function: a tmpfs of a size, as a disk of its own. Needs root."""
    made: list[Path] = []

    def make(size: str) -> Path:
        place = tmp_path / f"disk{len(made)}"
        place.mkdir()
        succeed(["mount", "-t", "tmpfs", "-o", f"size={size}", "small-disk", place])
        made.append(place)
        return place

    yield make
    for place in made:
        succeed(["umount", "-l", place])


def test_a_full_origin(mounted: Mounted, small_disk: Callable[[str], Path]) -> None:
    """A close says ENOSPC as on a local disk. The removal of what did not fit makes room, for its parts lie there. (A file
    needs twice its size while its parts are put together.)"""
    (disk := small_disk("64M")).chmod(0o755)
    (disk / "data").mkdir()
    mount = mounted(f"file://{disk}/data", read_only=None)
    mount.allowed.append(".*No space left on device")
    with pytest.raises(OSError, match="No space left") as too_much:
        (mount.path / "large").write_bytes(b"x" * (60 << 20))
    assert too_much.value.errno == errno.ENOSPC
    (mount.path / "large").unlink()
    (mount.path / "small").write_bytes(b"x" * (24 << 20))
    assert (disk / "data" / "small").stat().st_size == 24 << 20


def test_a_file_that_no_part_of_the_origins_disk_could_hold(
    mounted: Mounted, small_disk: Callable[[str], Path]
) -> None:
    """A sparse file is sent with its zeros: one larger than the whole disk would fill it with parts, and never be there."""
    (disk := small_disk("64M")).chmod(0o755)
    (disk / "data").mkdir()
    mount = mounted(f"file://{disk}/data", read_only=None)
    with (mount.path / "sparse").open("wb") as file:
        for size in (1 << 62, (64 << 20) + 1):
            with pytest.raises(OSError, match="File too large"):
                file.truncate(size)
        file.truncate(10 << 20)
    assert (disk / "data" / "sparse").stat().st_size == 10 << 20
    assert os.statvfs(disk).f_bfree * 4096 >= 50 << 20


@pytest.mark.long
@BOTH_BACKENDS
def test_a_hundred_readers_over_a_cache_of_a_twentieth(mounted: Mounted, bucket: Bucket) -> None:
    count, size = 16, 5 * MIB
    fill(bucket, count, size)
    mount = mounted(bucket, ram="2M", cache_size="2M", timeout=30)
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.05):
            most = max(most, allocated(mount.cache / "objects") + allocated(mount.memory / "objects"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        read_at_random(mount, bucket, count, size, threads=100, reads=4)
    finally:
        done.set()
        watcher.join()
    assert most <= 4 * MIB + 64 * MIB  # what is in flight may come on top
    time.sleep(0.5)
    for tier in mount.status()["tiers"]:
        assert tier["used_bytes"] <= tier["cap_bytes"], tier
    left = allocated(mount.cache / "objects") + allocated(mount.memory / "objects")
    assert left <= 4 * MIB + 128 * 1024, left
    assert mount.metrics()["fuse_errors"] == 0


@BOTH_BACKENDS
def test_a_tiny_cache_counts_what_it_holds(mounted: Mounted, bucket: Bucket) -> None:
    fill(bucket, 30, 300_000)
    mount = mounted(bucket, ram="1M", cache_size="3M", block_size="64K")
    compare_all(mount, bucket)
    mount.drop_kernel_pages()
    compare_all(mount, bucket)
    for tier in mount.status()["tiers"]:
        assert tier["used_bytes"] <= tier["cap_bytes"], tier
    assert allocated(mount.cache / "objects") <= 3 * MIB + 64 * 1024


@pytest.mark.parametrize(
    "options", [{"ram": "0", "cache_size": "0"}, {"ram": "0"}, {"cache_size": "0"}], ids=str
)
def test_tiers_can_be_left_out(mounted: Mounted, bucket: Bucket, options: dict[str, str]) -> None:
    fill(bucket, 3, 6 * MIB)
    mount = mounted(bucket, **options)
    mount.allowed.append("no tier at all")
    compare_all(mount, bucket)
    read_at_random(mount, bucket, 3, 6 * MIB, threads=8, reads=5)
    mount.stop()
    shutil.rmtree(mount.memory, ignore_errors=True)


@pytest.mark.root
class TestDisks:
    @pytest.mark.long
    def test_a_disk_of_a_quarter_of_the_data(
        self, mounted: Mounted, bucket: Bucket, small_disk: Callable[[str], Path]
    ) -> None:
        disk = small_disk("32M")
        fill(bucket, 16, 8 * MIB)
        mount = mounted(bucket, cache_dir=disk / "cache", ram="8M", cache_size="100M", keep_free="4M")
        mount.allowed.append("cache tier ssd")
        compare_all(mount, bucket)
        assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize >= 2 * MIB
        mount.drop_kernel_pages()
        compare_all(mount, bucket)
        mount.stop()

    def test_a_disk_that_others_fill(
        self, mounted: Mounted, bucket: Bucket, small_disk: Callable[[str], Path]
    ) -> None:
        disk = small_disk("32M")
        fill(bucket, 8, 6 * MIB)
        mount = mounted(bucket, cache_dir=disk / "cache", ram="4M", cache_size="20M", keep_free="1M")
        mount.allowed += ["cache tier ssd", "cannot write the cache index", "index can be written again"]
        mount.allowed.append("names: .*No space left on device; going on in")  # what is written behind
        reader = subprocess.Popen(
            ["sh", "-c", 'for i in 1 2; do cat "$0"/f* | md5sum; done', mount.path], stdout=subprocess.PIPE
        )
        time.sleep(0.1)
        filled = run(["dd", "if=/dev/zero", f"of={disk}/others", "bs=1M", "count=40", "status=none"])
        assert "No space left" in filled.stderr  # asked the disk itself, the mount may have made room again
        reader.communicate(timeout=60)
        assert reader.returncode == 0
        mount.drop_kernel_pages()
        compare_all(mount, bucket)
        assert mount.metrics()["fuse_errors"] == 0
        (disk / "others").unlink()
        mount.drop_kernel_pages()
        compare_all(mount, bucket)
        mount.stop()

    def test_a_disk_that_is_full_from_the_start(
        self, mounted: Mounted, bucket: Bucket, small_disk: Callable[[str], Path]
    ) -> None:
        disk = small_disk("4M")
        run(["dd", "if=/dev/zero", f"of={disk}/others", "bs=64k", "count=100", "status=none"])
        fill(bucket, 3, 3 * MIB)
        mount = mounted(bucket, cache_dir=disk / "cache", ram="4M", cache_size="20M", keep_free="1M")
        mount.allowed.append("WARNING")
        compare_all(mount, bucket)
        assert mount.status()["warnings"]
        mount.stop()

    def test_a_read_only_cache_directory(
        self, mounted: Mounted, bucket: Bucket, small_disk: Callable[[str], Path]
    ) -> None:
        disk = small_disk("8M")
        succeed(["mount", "-o", "remount,ro", disk])
        fill(bucket, 3, 3 * MIB)
        mount = mounted(bucket, cache_dir=disk / "cache")
        mount.allowed.append("WARNING daemon.daemon: ")
        compare_all(mount, bucket)
        assert any("ead-only" in line for line in mount.status()["warnings"]), mount.status()["warnings"]
        mount.stop()

    def test_a_cache_directory_that_becomes_read_only(
        self, mounted: Mounted, bucket: Bucket, small_disk: Callable[[str], Path]
    ) -> None:
        disk = small_disk("64M")
        fill(bucket, 6, 3 * MIB)
        mount = mounted(bucket, cache_dir=disk / "cache", ram="4M", keep_free="1M")
        mount.allowed += [
            "cache tier ssd",
            "cannot write the cache index",
            "close the database",
            "was removed while",
        ]
        (mount.path / "f0").read_bytes()
        succeed(["umount", "-l", disk])  # as a disk that is pulled: open files live on, new ones go elsewhere
        succeed(["mount", "-t", "tmpfs", "-o", "ro,size=1M", "small-disk", disk])
        compare_all(mount, bucket)
        mount.drop_kernel_pages()
        compare_all(mount, bucket)
        mount.stop()


def test_a_cache_directory_that_vanishes_while_it_is_read(mounted: Mounted, bucket: Bucket) -> None:
    fill(bucket, 10, 4 * MIB)
    mount = mounted(bucket, ram="4M")
    mount.allowed += [
        "cache tier ssd",
        "cannot write the cache index",
        "close the database",
        "was removed while",
    ]
    reader = subprocess.Popen(
        [sys.executable, "-c", READ_ALL, mount.path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(5):
        time.sleep(0.1)
        shutil.rmtree(mount.cache, ignore_errors=True)
    _, err = reader.communicate(timeout=60)
    assert reader.returncode == 0, err
    mount.drop_kernel_pages()
    compare_all(mount, bucket)
    assert mount.metrics()["fuse_errors"] == 0
    mount.stop()
    mount.start()
    compare_all(mount, bucket)


READ_ALL = """
import os, sys
for _ in range(4):
    for name in os.listdir(sys.argv[1]):
        with open(f"{sys.argv[1]}/{name}", "rb", buffering=0) as file:
            while file.read(1 << 17):
                pass
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
"""


def test_cache_files_that_are_truncated_under_the_daemon(mounted: Mounted, bucket: Bucket) -> None:
    """An administrator's mistake: bytes that are gone are fetched again, not read as zeros."""
    fill(bucket, 4, 3 * MIB)
    mount = mounted(bucket, ram="0", verify="full")
    compare_all(mount, bucket)
    for path in (mount.cache / "objects").rglob("*"):
        if path.is_file():
            os.truncate(path, 100)
    mount.allowed += ["checksum", "cache tier ssd"]
    mount.drop_kernel_pages()
    compare_all(mount, bucket)

"""What `cachefs flush` and `umount --flush` may say: that all is in the store only where that is known."""

from __future__ import annotations

import errno
import os

import pytest

from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount
from tests.mount.written import keys, stored

pytestmark = ONE_BACKEND


@pytest.fixture
def left(mounted: Mounted, bucket: Bucket) -> Mount:
    """A mount whose daemon has died with three files unsent."""
    mount = mounted(bucket, read_only=False, writeback=True, upload_delay="1h")
    mount.allowed.append("an earlier mount|not at the origin|--writeback has no effect")
    (mount.path / "d").mkdir()
    for number in range(3):
        (mount.path / f"d/{number}").write_bytes(b"kept")
    mount.kill()
    return mount


def says_that_they_are_left(mount: Mount) -> None:
    assert any("3 files (12 B)" in line for line in mount.status()["warnings"])
    for words in (("flush", mount.path), ("flush",), ("umount", "--flush", mount.path)):
        done = mount.cli(*words)
        assert done.returncode == 1 and "3 files (12 B) are not at the origin" in done.stderr, (words, done)
    done = mount.umount()
    assert done.returncode == 0 and "3 files (12 B) are not at the origin" in done.stderr


def test_a_path_that_does_not_exist(mounted: Mounted, bucket: Bucket) -> None:
    mount = mounted(bucket, read_only=False, writeback=True, upload_delay="1h")
    (mount.path / "file").write_bytes(b"x")
    for name in ("flie", "file/below"):
        done = mount.cli("flush", mount.path / name)
        assert done.returncode == 1 and "no such file" in done.stderr
    assert keys(bucket) == []
    done = mount.cli("flush", mount.path / "file")
    assert done.returncode == 0 and keys(bucket) == ["file"]


@pytest.mark.alone  # `cachefs flush` is of every mount of this machine
def test_a_mount_that_can_only_be_read(left: Mount, bucket: Bucket) -> None:
    left.start(read_only=True)
    assert left.cli("flush", left.path / "d").returncode == 1
    says_that_they_are_left(left)
    left.start()
    assert left.cli("flush", left.path).returncode == 0
    assert stored(bucket, "d/2") == b"kept" and left.status()["unsent"] == 0
    left.stop()
    left.start(read_only=True)
    assert left.status()["unsent"] == 0 and left.cli("flush", left.path).returncode == 0


@pytest.mark.alone  # `cachefs flush` is of every mount of this machine
def test_a_mount_of_another_source(left: Mount, bucket: Bucket, mounted: Mounted) -> None:
    other = type(bucket)(bucket.store)
    mount = mounted(other.url, read_only=False, cache_dir=left.cache)
    mount.allowed.append("an earlier mount")
    assert bucket.url in " ".join(mount.status()["warnings"])
    (mount.path / "own").write_bytes(b"x")
    assert mount.cli("flush", mount.path / "own").returncode == 0
    says_that_they_are_left(mount)
    left.start()
    assert left.cli("flush", left.path).returncode == 0
    assert stored(bucket, "d/2") == b"kept"


def test_what_flush_was_told_is_told_to_the_writer(mounted: Mounted, bucket: Bucket) -> None:
    mount = mounted(bucket, read_only=False, writeback=True, upload_delay="1h", fuse="pyfuse3")
    mount.allowed.append("denied|Denied|not at the origin|trying again|failed")
    bucket.store.fault("403", kind="put")
    with (mount.path / "f").open("wb", buffering=0) as file:
        file.write(b"x")
        os.fsync(file.fileno())
        assert mount.cli("flush", mount.path / "f").returncode == 1
        with pytest.raises(OSError) as caught:
            os.fsync(file.fileno())
        assert caught.value.errno == errno.EACCES
        os.fsync(file.fileno())
    bucket.store.clear_faults()
    assert mount.cli("flush", mount.path / "f").returncode == 0


@pytest.mark.root
@pytest.mark.backends("native")
def test_a_file_that_its_writer_keeps_open_is_named(mounted: Mounted, bucket: Bucket) -> None:
    """It is written past the daemon, so it is uploaded when it is closed: `flush` waits for that, and says so."""
    mount = mounted(bucket, read_only=False, writeback=True)
    with (mount.path / "log").open("wb", buffering=0) as file:
        file.write(b"x")
        os.fsync(file.fileno())
        done = mount.cli("flush", "--timeout", "2s", mount.path)
        assert done.returncode == 1
        assert [line.partition(": ")[0] for line in done.stderr.splitlines()] == ["waiting", "cachefs"]
        assert done.stderr.count("log: a program has it open for writing") == 2
    assert mount.cli("flush", mount.path).returncode == 0 and stored(bucket, "log") == b"x"


def test_what_has_no_effect_is_said_or_refused(mounted: Mounted, bucket: Bucket) -> None:
    mount = mounted(bucket, read_only=True, writeback=True)
    mount.allowed.append("--writeback has no effect")
    assert any("--writeback has no effect" in line for line in mount.status()["warnings"])
    other = mounted(bucket, start=False, zero_open=True, consistency="immutable", writeback=True)
    done = other.try_start()
    assert done.returncode == 2 and "--writeback" in done.stderr

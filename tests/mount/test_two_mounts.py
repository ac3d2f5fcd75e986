"""Two mounts on one machine that one process writes to at once: what it is told is of the file that it closes."""

from __future__ import annotations

import errno
import os

from bench.lab.client import LabStore
from tests.mount.conftest import Bucket, Mounted
from tests.mount.test_writing import DENIED, refused
from tests.mount.written import keys, stored


def test_who_writes_the_same_path_on_two_mounts_hears_of_each(lab: LabStore, mounted: Mounted) -> None:
    """Inode numbers are hashes of paths: both files have the same."""
    one, other = Bucket(lab), Bucket(lab)
    mounts = [mounted(bucket.url, read_only=False) for bucket in (one, other)]
    mounts[0].allowed.append(DENIED)
    fds = [os.open(mount.path / "x", os.O_WRONLY | os.O_CREAT) for mount in mounts]
    assert os.fstat(fds[0]).st_ino == os.fstat(fds[1]).st_ino
    for fd in fds:
        os.write(fd, b"bytes")
    lab.fault("403", kind="put", key="x")
    with refused(errno.EACCES):
        os.close(fds[0])
    lab.clear_faults()
    duplicate = os.dup(fds[1])
    os.close(duplicate)
    assert keys(other) == []  # a duplicate of the same file is one, as ever
    os.close(fds[1])
    assert stored(other, "x") == b"bytes"
    assert mounts[0].cli("flush", mounts[0].path).returncode == 0
    assert stored(one, "x") == b"bytes"

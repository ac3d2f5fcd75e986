"""Two mounts that are written to at once: of two buckets by one process, and of one bucket as two nodes have it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.lab.client import LabStore
from cachefs.fs.freshness import BURST_S
from tests.mount.conftest import Bucket, Mounted
from tests.mount.mounts import eventually, succeed
from tests.mount.test_writing import DENIED, refused
from tests.mount.test_writing_errnos import NOREPLACE, renameat2
from tests.mount.written import keys, stored


def test_who_writes_the_same_path_on_two_mounts_hears_of_each(
    lab: LabStore, mounted: Mounted, bucket: Bucket
) -> None:
    """A failed upload of one mount is not told to the writer on the other."""
    one, other = bucket, type(bucket)(lab)
    mounts = [mounted(source, read_only=False) for source in (one, other)]
    mounts[0].allowed.append(DENIED)
    fds = [os.open(mount.path / "x", os.O_WRONLY | os.O_CREAT) for mount in mounts]
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


class TestNamesThatAnotherNodeTook:
    """Two nodes mount one bucket; each has looked for a name before the other made it, and believes it missing."""

    @pytest.fixture
    def nodes(self, mounted: Mounted, bucket: Bucket) -> tuple[Path, Path]:
        bucket.put("d/f", b"first")
        one, other = (mounted(bucket, read_only=False, negative_ttl="1h").path / "d" for _ in range(2))
        for place in (one, other):
            assert os.listdir(place) == ["f"]
            assert not (place / "new").exists()
        time.sleep(2 * BURST_S)  # what was learnt just now is cached
        (one / "new").write_bytes(b"theirs\n")
        assert not (other / "new").exists()
        return one, other

    @pytest.mark.parametrize(
        "take",
        [
            lambda new: new.open("x"),
            lambda new: new.mkdir(),
            lambda new: renameat2(new.parent / "f", new, NOREPLACE),
        ],
        ids=["O_EXCL", "mkdir", "RENAME_NOREPLACE"],
    )
    def test_are_refused_to_who_wants_them_new(
        self, nodes: tuple[Path, Path], take: Callable[[Path], object]
    ) -> None:
        one, other = nodes
        with refused(errno.EEXIST):
            take(other / "new")
        eventually((other / "new").exists, "the name that is there is seen")
        assert (one / "new").read_bytes() == (other / "new").read_bytes() == b"theirs\n"
        assert (other / "f").read_bytes() == b"first"

    def test_are_added_to_by_who_appends(self, nodes: tuple[Path, Path], bucket: Bucket) -> None:
        with (nodes[1] / "new").open("a") as file:
            file.write("ours\n")
        assert stored(bucket, "d/new") == b"theirs\nours\n"

    def test_are_not_emptied_by_touch(self, nodes: tuple[Path, Path], bucket: Bucket) -> None:
        succeed(["touch", nodes[1] / "new"])
        assert stored(bucket, "d/new") == b"theirs\n"

    def test_are_replaced_by_who_writes_them_anew_and_nothing_is_asked(
        self, mounted: Mounted, nodes: tuple[Path, Path], bucket: Bucket
    ) -> None:
        bucket.store.reset()
        (nodes[1] / "new").write_bytes(b"ours\n")
        assert [r["kind"] for r in bucket.store.requests() if r["bucket"] == bucket.name] == ["put"]
        assert stored(bucket, "d/new") == b"ours\n"

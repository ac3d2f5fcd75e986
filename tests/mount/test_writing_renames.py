"""Renaming what is written, on a real mount: what is left at the store, and what others see of it."""

from __future__ import annotations

import os
import re
import urllib.request

import pytest

from bench.lab.client import LabStore
from bench.lab.dataset import content
from tests.mount.conftest import ONE_FRONT, Bucket, Mounted
from tests.mount.written import keys, stored

MIB = 1 << 20

pytestmark = ONE_FRONT


def uploads_left(bucket: Bucket) -> list[str]:
    """Keys of uploads in parts that were neither completed nor aborted, those that hold nothing included."""
    with urllib.request.urlopen(f"{bucket.store.endpoint}/{bucket.name}?uploads") as reply:
        return re.findall(r"<Key>(.*?)</Key>", reply.read().decode())


def requests(lab: LabStore) -> dict[str, int]:
    counted: dict[str, int] = lab.counters()["requests"]
    return counted


class TestUploadsInParts:
    """Each that was begun is completed or aborted, also when the file is renamed just then."""

    def test_a_file_that_is_saved_beside_and_renamed_over(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket, read_only=False)
        data = content("saved", 20 * MIB)
        bucket.store.shape(latency_ms=5)
        for _ in range(10):
            (mount.path / "f.tmp").write_bytes(data)
            os.replace(mount.path / "f.tmp", mount.path / "f")
        assert stored(bucket, "f") == data and keys(bucket) == ["f"]
        mount.settled()
        seen = requests(bucket.store)
        assert seen["create_upload"] == seen["complete_upload"] == 10 and seen["upload_part"] == 30
        assert uploads_left(bucket) == []

    def test_renamed_while_it_is_open_and_synced(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket, read_only=False)
        data = content("synced", 64 * MIB)
        with (mount.path / "f.tmp").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(mount.path / "f.tmp", mount.path / "f")
        assert stored(bucket, "f") == data and keys(bucket) == ["f"]
        mount.settled()
        assert requests(bucket.store)["create_upload"] == 1 and uploads_left(bucket) == []
        assert bucket.store.counters()["bytes_received"]["upload_part"] == len(data)

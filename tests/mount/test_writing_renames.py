"""Renaming what is written, on a real mount: what is left at the store, and what others see of it."""

from __future__ import annotations

import errno
import os
import re
import time
import urllib.request
from pathlib import Path

import pytest

from bench.lab.client import LabStore
from bench.lab.dataset import content
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount
from tests.mount.written import keys, stored

MIB = 1 << 20

pytestmark = ONE_BACKEND


def uploads_left(bucket: Bucket) -> list[str]:
    """Keys of uploads in parts that were neither completed nor aborted, those that hold nothing included."""
    with urllib.request.urlopen(f"{bucket.store.endpoint}/{bucket.name}?uploads") as reply:
        return re.findall(r"<Key>(.*?)</Key>", reply.read().decode())


def requests(lab: LabStore) -> dict[str, int]:
    counted: dict[str, int] = lab.counters()["requests"]
    return counted


class TestUploadsInParts:
    """Each that was begun is completed or aborted, also when the file is renamed just then."""

    @pytest.mark.long
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


def deleted(bucket: Bucket) -> list[str]:
    return [r["key"] for r in bucket.store.requests() if r["kind"] == "delete"]


class TestNeverNeither:
    """The old name does not go before the new one is there."""

    def failed(self, mounted: Mounted, bucket: Bucket) -> Mount:
        """A mount whose `f` is newer than the store's, because that refuses to be written."""
        mount = mounted(bucket, read_only=False, timeout=2)
        mount.allowed.append("trying again|InternalError|answered 500|failed|not at the origin")
        bucket.put("f", b"v1")
        assert (mount.path / "f").read_bytes() == b"v1"
        bucket.store.fault("500", kind="put")
        with pytest.raises(OSError, match="Input/output"):
            (mount.path / "f").write_bytes(b"v2")
        return mount

    @pytest.mark.long
    def test_a_file_that_could_not_be_uploaded(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = self.failed(mounted, bucket)
        bucket.store.reset()
        with pytest.raises(OSError, match="Input/output"):
            (mount.path / "f").rename(mount.path / "g")
        assert stored(bucket, "f") == b"v1" and keys(bucket) == ["f"] and deleted(bucket) == []
        assert os.listdir(mount.path) == ["f"] and (mount.path / "f").read_bytes() == b"v2"
        bucket.store.clear_faults()
        (mount.path / "f").rename(mount.path / "g")
        assert keys(bucket) == ["g"] and stored(bucket, "g") == b"v2"
        assert os.listdir(mount.path) == ["g"] and (mount.path / "g").read_bytes() == b"v2"

    def test_a_file_of_which_half_a_change_is_here(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket, read_only=False)
        bucket.put("f", b"v1")
        with (mount.path / "f").open("r+b", buffering=0) as file:
            file.write(b"half")
            (mount.path / "f").rename(mount.path / "g")
            assert stored(bucket, "g") == b"v1" and keys(bucket) == ["g"]
            file.write(b", whole")
        assert stored(bucket, "g") == b"half, whole" and keys(bucket) == ["g"]

    def test_with_writeback(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket, read_only=False, writeback=True, upload_delay="10s")
        bucket.put("f", b"v1")
        (mount.path / "f").write_bytes(b"v2")
        bucket.store.reset()
        (mount.path / "f").rename(mount.path / "g")
        asked = [r["kind"] for r in bucket.store.requests() if r["kind"] in ("put", "delete")]
        assert asked == ["put", "delete"] and stored(bucket, "g") == b"v2" and keys(bucket) == ["g"]


class TestDirectories:
    def test_a_copy_that_fails_leaves_nothing(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket, read_only=False)
        mount.allowed.append("denied|403|AccessDenied")
        names = [f"f{number}" for number in range(5)]
        for name in names:
            bucket.put(f"cl/{name}", name.encode() * 1000)
        bucket.store.shape(latency_ms=10)
        with (mount.path / "cl/f3").open("ab") as open_one:
            open_one.write(b"more")
            open_one.flush()
            bucket.store.fault("403", kind="copy", key="cl2/f1")
            with pytest.raises(PermissionError):
                (mount.path / "cl").rename(mount.path / "cl2")
            time.sleep(0.2)
            assert keys(bucket) == [f"cl/{name}" for name in names]
            assert sorted(os.listdir(mount.path / "cl")) == names and os.listdir(mount.path) == ["cl"]
            bucket.store.clear_faults()
            (mount.path / "cl").rename(mount.path / "cl2")
        assert keys(bucket) == [f"cl2/{name}" for name in names]
        assert stored(bucket, "cl2/f3") == b"f3" * 1000 + b"more" == (mount.path / "cl2/f3").read_bytes()

    def test_what_was_written_below_comes_back_too(self, mounted: Mounted, bucket: Bucket) -> None:
        """One of its open files moved, another could not."""
        mount = mounted(bucket, read_only=False)
        mount.allowed.append("denied|403|AccessDenied")
        names = [f"f{number}" for number in range(4)]
        for name in names:
            bucket.put(f"cl/{name}", name.encode() * 1000)
        files = [(mount.path / "cl" / name).open("ab", buffering=0) for name in names]
        for file in files:
            file.write(b"more")
        bucket.store.fault("403", kind="copy", key="cl2/f2")
        with pytest.raises(PermissionError):
            (mount.path / "cl").rename(mount.path / "cl2")
        bucket.store.clear_faults()
        assert keys(bucket) == [f"cl/{name}" for name in names] and os.listdir(mount.path) == ["cl"]
        for file in files:
            file.close()
        for name in names:
            wanted = name.encode() * 1000 + b"more"
            assert stored(bucket, f"cl/{name}") == wanted == (mount.path / "cl" / name).read_bytes()

    def test_over_what_another_node_has_put_there(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket, read_only=False)
        bucket.put("cl/f", b"mine")
        assert os.listdir(mount.path) == ["cl"] and not (mount.path / "cl2").exists()
        bucket.put("cl2/g", b"theirs")
        with pytest.raises(OSError) as caught:
            (mount.path / "cl").rename(mount.path / "cl2")
        assert caught.value.errno == errno.ENOTEMPTY
        assert keys(bucket) == ["cl/f", "cl2/g"]


class TestLongKeys:
    def test_what_no_key_can_be_is_refused_before_anything_is_done(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        """S3 takes 1,024 bytes. With `--writeback` nobody would hear of it later."""
        mount = mounted(bucket, read_only=False, writeback=True)
        deep = mount.path / "/".join(["d" * 250] * 4)  # 1,003 bytes
        os.makedirs(deep)
        fits, too_long = "f" * 20, "f" * 21
        (deep / fits).write_bytes(b"fits")
        (mount.path / "short").mkdir()
        (mount.path / "short" / too_long).write_bytes(b"x")
        assert mount.cli("flush", mount.path).returncode == 0
        before = keys(bucket)
        for call in (
            lambda: (deep / too_long).write_bytes(b""),
            lambda: (deep / fits).rename(deep / too_long),
            lambda: (deep / ("g" * 21)).mkdir(),
            lambda: (mount.path / "short").rename(deep / "s"),
        ):
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno == errno.ENAMETOOLONG
        assert mount.cli("flush", mount.path).returncode == 0 and keys(bucket) == before
        (deep / ("g" * 19)).mkdir()
        assert (deep / fits).read_bytes() == b"fits"


class TestConflicts:
    """`--on-conflict fail`: ways out of it that lose neither theirs nor ours."""

    @pytest.fixture
    def mount(self, mounted: Mounted, bucket: Bucket) -> Mount:
        """Its `f` was refused, first by an outage and then because another node had put it."""
        mount = mounted(bucket, read_only=False, on_conflict="fail", timeout=2)
        mount.allowed.append(
            "trying again|InternalError|answered 500|failed|not at the origin|another version"
        )
        bucket.put("f", b"v1")
        fd = os.open(mount.path / "f", os.O_RDWR)
        os.write(fd, b"mine")
        bucket.store.fault("500", kind="put")
        with pytest.raises(OSError, match="Input/output"):
            os.fsync(fd)
        bucket.store.clear_faults()
        bucket.put("f", b"theirs")
        with pytest.raises(OSError) as caught:
            os.close(fd)
        assert caught.value.errno == errno.ESTALE
        bucket.store.reset()
        return mount

    @pytest.mark.long
    def test_moved_aside(self, mount: Mount, bucket: Bucket) -> None:
        (mount.path / "f").rename(mount.path / "f.mine")
        until = time.monotonic() + 5
        while keys(bucket) != ["f", "f.mine"] and time.monotonic() < until:
            time.sleep(0.05)
        assert stored(bucket, "f.mine") == b"mine" and stored(bucket, "f") == b"theirs"
        assert deleted(bucket) == []
        mount.refresh()
        assert shown(mount.path) == {"f": b"theirs", "f.mine": b"mine"}
        (mount.path / "f").write_bytes(b"agreed")
        assert stored(bucket, "f") == b"agreed"

    @pytest.mark.long
    def test_removed(self, mount: Mount, bucket: Bucket) -> None:
        (mount.path / "f").unlink()
        assert stored(bucket, "f") == b"theirs" and deleted(bucket) == []
        assert shown(mount.path) == {"f": b"theirs"}
        (mount.path / "f").write_bytes(b"agreed")
        assert stored(bucket, "f") == b"agreed"
        assert mount.umount("--flush").returncode == 0


def test_a_new_file_of_an_old_name_is_not_the_renamed_one(mounted: Mounted, bucket: Bucket) -> None:
    """Another process reads the directory meanwhile, which brings names and inodes into the kernel's caches."""
    names = [f"{number:03}" for number in range(400)]
    moved = names[150:300]
    for name in names:
        bucket.put(name, name.encode())
    mount = mounted(bucket, read_only=False)
    with os.scandir(mount.path) as reader:
        read = [next(reader).name]
        for name in moved:
            os.rename(mount.path / name, mount.path / f"old-{name}")
        read += [entry.name for entry in reader]
    assert set(names[:150]) <= set(read) <= {*names, *(f"old-{name}" for name in names)}
    for name in moved[::10]:
        (mount.path / name).write_bytes(b"new")
    for name in moved:
        assert (mount.path / f"old-{name}").read_bytes() == name.encode()
    assert {name for name in keys(bucket) if stored(bucket, name) == b"new"} == set(moved[::10])
    assert set(os.listdir(mount.path)) == set(keys(bucket))


def shown(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


class TestAStoreThatCopiesWhateverTheCondition:
    """As Ceph's RADOS Gateway does."""

    def test_another_clients_overwrite_is_not_mixed_with_what_is_cached(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        bucket.store.quirks("ceph")
        try:
            bucket.put("a", 6 * MIB)
            mount = mounted(bucket, read_only=False)
            with (mount.path / "a").open("rb") as file:
                file.read(MIB)
            assert os.listdir(mount.path) == ["a"]  # so that nothing is looked up at the rename
            theirs = bucket.put("a", 6 * MIB, version=2)
            with pytest.raises(OSError) as failed:
                os.rename(mount.path / "a", mount.path / "a2")
            assert failed.value.errno == errno.ESTALE
            assert keys(bucket) == ["a"] and stored(bucket, "a") == theirs
            mount.refresh()
            os.rename(mount.path / "a", mount.path / "a2")
            assert (mount.path / "a2").read_bytes() == theirs and keys(bucket) == ["a2"]
        finally:
            bucket.store.quirks()

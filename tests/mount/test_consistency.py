"""Objects that change behind the mount: new bytes when promised, old bytes or ESTALE before, never a mix."""

from __future__ import annotations

import errno
import faulthandler
import mmap
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.lab.client import LabStore
from cachefs.fs.freshness import BURST_S
from tests.conftest import LEVEL
from tests.mount.conftest import Bucket, Mounted
from tests.mount.mounts import COMMAND, eventually, in_python, run, succeed

MIB = 1 << 20
READ = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"


def refresh_by_attribute(path: Path) -> None:
    os.getxattr(path, "user.cachefs.refresh")


def refresh_by_command(path: Path) -> None:
    done = run([*COMMAND, "refresh", path])
    assert done.returncode == 0, done.stderr


WAYS = pytest.mark.parametrize(
    "refresh",
    [
        pytest.param(refresh_by_attribute, id="getfattr"),
        pytest.param(refresh_by_command, id="command", marks=pytest.mark.long),
    ],
)


class TestRefresh:
    @WAYS
    def test_an_overwritten_object_is_seen_at_once(self, mounted: Mounted, bucket: Bucket, refresh) -> None:
        old = bucket.put("d/file", 300_000)
        path = mounted(bucket, consistency="immutable").path / "d/file"
        assert path.read_bytes() == old
        new = bucket.put("d/file", 310_000, version=2)
        assert path.read_bytes() == old
        refresh(path)
        assert path.read_bytes() == new
        assert path.stat().st_size == len(new)

    @WAYS
    @pytest.mark.parametrize("below", ["", "d"])
    def test_of_a_directory_means_all_below(
        self, mounted: Mounted, bucket: Bucket, refresh, below: str
    ) -> None:
        for key in ("d/file", "d/e/file", "d/e/gone"):
            bucket.put(key, 1000)
        mount = mounted(bucket, consistency="immutable")
        for key, data in bucket.objects.items():
            assert (mount.path / key).read_bytes() == data
        assert not (mount.path / "d/e/new").exists()
        for key in ("d/file", "d/e/file", "d/e/new"):
            bucket.put(key, 1000, version=2)
        bucket.delete("d/e/gone")
        refresh(mount.path / below)
        for key, data in bucket.objects.items():
            assert (mount.path / key).read_bytes() == data
        assert sorted(os.listdir(mount.path / "d/e")) == ["file", "new"]
        assert not (mount.path / "d/e/gone").exists()

    @WAYS
    @pytest.mark.parametrize("names", [pytest.param(1, marks=pytest.mark.long), 1500])
    def test_is_done_when_it_returns(self, mounted: Mounted, bucket: Bucket, refresh, names: int) -> None:
        bucket.store.synthesize(bucket.name, "d/", names, 10)
        keys = [f"d/name-{number:07d}.bin" for number in range(names - 1, -1, -max(1, names // 20))]
        mount = mounted(bucket, consistency="immutable")
        place = mount.path / "d" if names > 1 else mount.path / keys[0]
        for round_ in range(1, 4):
            assert sum(entry.stat().st_size for entry in os.scandir(mount.path / "d"))
            for key in keys:
                (mount.path / key).stat()
                bucket.put(key, 10 + round_, version=round_)
            refresh(place)
            for key in keys:
                assert (mount.path / key).stat().st_size == 10 + round_

    def test_from_many_sides_at_once_ends_for_all(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.store.synthesize(bucket.name, "d/", 3000, 10)
        mount = mounted(bucket)
        assert len(os.listdir(mount.path / "d")) == 3000
        began = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(refresh_by_attribute, [mount.path / "d"] * 4))
        assert time.monotonic() - began < 20

    def test_of_a_file_leaves_its_directory_listable(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("d/file", 1000)
        bucket.put("d/other", 1000)
        mount = mounted(bucket)
        assert sorted(os.listdir(mount.path / "d")) == ["file", "other"]
        refresh_by_attribute(mount.path / "d/file")
        assert sorted(os.listdir(mount.path / "d")) == ["file", "other"]
        with os.scandir(mount.path / "d") as entries:
            assert {entry.name: entry.stat().st_size for entry in entries} == {"file": 1000, "other": 1000}

    def test_of_a_missing_name_finds_it_when_it_has_come(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("d/file", 1000)
        path = mounted(bucket, consistency="immutable").path / "d/new"
        assert not path.exists()
        data = bucket.put("d/new", 1000)
        assert not path.exists()
        refresh_by_command(path)
        assert path.read_bytes() == data

    @WAYS
    @pytest.mark.parametrize("consistency", ["default", "immutable"])
    def test_shows_a_name_that_was_asked_for_before_it_came(
        self, mounted: Mounted, bucket: Bucket, refresh, consistency: str
    ) -> None:
        """Of the directory, and of one above it: whatever the kernel believes missing."""
        bucket.put("d/e/file", 1000)
        mount = mounted(bucket, consistency=consistency, negative_ttl="1h")
        for number, (place, new) in enumerate(
            (("", "new"), ("d", "d/new"), ("", "d/e/new"), ("d/e", "d/e/newer"))
        ):
            path = mount.path / new
            assert not path.exists()
            data = bucket.put(new, 1000 + number)
            with mount.counting() as grown:
                assert not path.exists()  # nobody asked to look again
            assert "fuse_lookup" not in grown
            refresh(mount.path / place)
            assert path.read_bytes() == data

    def test_keeps_cached_bytes_that_are_still_right(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 200_000)
        mount = mounted(bucket)
        path = mount.path / "file"
        path.read_bytes()
        with mount.counting() as grown:
            refresh_by_attribute(path)
            assert path.read_bytes() == data
        assert "origin_get" not in grown

    @pytest.mark.parametrize("place", ["", "d", "d/file"])
    def test_is_what_getfattr_says_of_anything_below(
        self, mounted: Mounted, bucket: Bucket, place: str
    ) -> None:
        bucket.put("d/file", 1000)
        mount = mounted(bucket, consistency="immutable")
        path = mount.path / "d/file"
        path.read_bytes()
        new = bucket.put("d/file", 1001, version=2)
        said = succeed(["getfattr", "-n", "user.cachefs.refresh", mount.path / place])
        assert 'user.cachefs.refresh="looking again"' in said
        assert path.read_bytes() == new
        with pytest.raises(OSError) as caught:
            os.setxattr(mount.path / place, "user.cachefs.refresh", b"1")
        assert caught.value.errno == errno.EROFS

    def test_is_nothing_that_copies_and_listings_of_attributes_do(
        self, mounted: Mounted, bucket: Bucket, tmp_path: Path
    ) -> None:
        old = bucket.put("d/file", 1000)
        mount = mounted(bucket, consistency="immutable")
        path = mount.path / "d/file"
        assert path.read_bytes() == old
        bucket.put("d/file", 1001, version=2)
        bucket.put("d/new", 10)
        for place in (mount.path, mount.path / "d", path):
            assert "user.cachefs.refresh" not in os.listxattr(place)
            assert "refresh" not in succeed(["getfattr", "-d", "-m", "-", place])
        succeed(["cp", "-a", mount.path / "d", tmp_path / "copy"])
        assert (tmp_path / "copy/file").read_bytes() == path.read_bytes() == old
        assert os.listdir(mount.path / "d") == ["file"]

    def test_outside_of_a_mount_is_refused_in_one_line(self, tmp_path: Path) -> None:
        done = run([*COMMAND, "refresh", tmp_path])
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "not below a cachefs mount" in done.stderr


class TestPresets:
    def test_strict_sees_every_change_at_the_next_open(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("file", 300_000)
        path = mounted(bucket, consistency="strict").path / "file"
        for version in range(1, 6):
            data = bucket.put("file", 300_000 + 10 * version, version=version)
            with open(path, "rb") as file:
                assert file.read() == data
                assert os.fstat(file.fileno()).st_size == len(data)

    def test_strict_sees_a_change_of_the_same_size(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        data = bucket.put("file", 300_000)
        path = mounted(bucket, consistency="strict").path / "file"
        assert path.read_bytes() == data
        lab.replace(bucket.name, "file")
        assert path.read_bytes() == bytes(255 - b for b in data)

    def test_strict_sees_names_come_and_go(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("d/a", 10)
        place = mounted(bucket, consistency="strict").path
        assert os.listdir(place / "d") == ["a"]
        assert not (place / "d/b").exists()
        bucket.put("d/b", 10)
        assert (place / "d/b").exists()
        assert sorted(os.listdir(place / "d")) == ["a", "b"]
        bucket.delete("d/a")
        assert os.listdir(place / "d") == ["b"]
        with pytest.raises(FileNotFoundError):
            (place / "d/a").read_bytes()
        assert not (place / "d/a").exists()

    def test_strict_rereads_known_files_with_one_head_each(self, mounted: Mounted, bucket: Bucket) -> None:
        for i in range(50):
            bucket.put(f"a/b/{i}", 10_000)
        mount = mounted(bucket, consistency="strict")
        for i in range(50):
            (mount.path / f"a/b/{i}").read_bytes()
        time.sleep(0.2)
        with mount.counting() as grown:
            for i in range(50):
                assert (mount.path / f"a/b/{i}").read_bytes() == bucket.objects[f"a/b/{i}"]
        assert 50 <= grown["origin_head"] <= 55, grown
        assert grown.get("origin_list", 0) <= 5, grown
        assert "origin_get" not in grown

    def test_default_sees_a_change_after_its_ttl(self, mounted: Mounted, bucket: Bucket) -> None:
        old = bucket.put("file", 300_000)
        path = mounted(bucket, metadata_ttl=1, negative_ttl=1).path / "file"
        assert path.read_bytes() == old
        new = bucket.put("file", 200_000, version=2)
        eventually(lambda: path.read_bytes() == new, "the new bytes", 4)

    def test_default_sees_new_and_deleted_names_after_their_ttl(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        bucket.put("d/a", 10)
        place = mounted(bucket, metadata_ttl=1, negative_ttl=1).path / "d"
        assert os.listdir(place) == ["a"]
        assert not (place / "b").exists()
        bucket.put("d/b", 10)
        bucket.delete("d/a")
        eventually(lambda: (place / "b").exists(), "the new name", 4)
        eventually(lambda: not (place / "a").exists(), "no old name", 4)
        assert os.listdir(place) == ["b"]

    def test_default_asks_nothing_within_its_ttl(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("d/a", 10)
        mount = mounted(bucket)
        (mount.path / "d/a").read_bytes()
        with mount.counting() as grown:
            for _ in range(5):
                (mount.path / "d/a").read_bytes()
        assert not {name for name in grown if name.startswith("origin_")}

    def test_immutable_never_asks_again(self, mounted: Mounted, bucket: Bucket) -> None:
        old = bucket.put("d/a", 10)
        mount = mounted(bucket, consistency="immutable")
        assert os.listdir(mount.path / "d") == ["a"]
        assert (mount.path / "d/a").read_bytes() == old
        bucket.put("d/a", 10, version=2)
        bucket.put("d/b", 10)
        mount.stop()
        mount.start()
        with mount.counting() as grown:
            assert (mount.path / "d/a").read_bytes() == old
            assert os.listdir(mount.path / "d") == ["a"]
        assert not {name for name in grown if name.startswith("origin_")}


def versions_in(data: bytes, old: bytes, new: bytes) -> set[str]:
    """Which versions the pages of `data` (from the start of the object) are of."""
    found = set()
    for at in range(0, len(data), 4096):
        page = data[at : at + 4096]
        found.add(
            "old" if page == old[at : at + 4096] else "new" if page == new[at : at + 4096] else "neither"
        )
    return found


class TestAnOpenHandle:
    SIZE = 24 * MIB

    def test_gets_estale_for_what_is_not_cached(self, mounted: Mounted, bucket: Bucket) -> None:
        old = bucket.put("file", self.SIZE)
        mount = mounted(bucket, max_readahead="1M")
        with open(mount.path / "file", "rb", buffering=0) as file:
            assert os.pread(file.fileno(), 1000, 0) == old[:1000]
            new = bucket.put("file", self.SIZE, version=2)
            with pytest.raises(OSError) as caught:
                os.pread(file.fileno(), 1000, 20 * MIB)
            assert caught.value.errno == errno.ESTALE
        mount.allowed.append("was replaced")
        # The change is known now: no TTL has to pass.
        assert (mount.path / "file").read_bytes() == new
        assert mount.metrics()["objects_changed"] == 1

    def test_is_not_given_the_bytes_of_another_reader(self, mounted: Mounted, bucket: Bucket) -> None:
        """Pages belong to the inode: what a new reader has read must not show up in the old one's hands."""
        old = bucket.put("file", self.SIZE)
        mount = mounted(bucket, max_readahead="1M")
        with open(mount.path / "file", "rb", buffering=0) as file:
            got = os.pread(file.fileno(), 4096, 0)
            new = bucket.put("file", self.SIZE, version=2)
            mount.refresh(mount.path / "file")
            assert (mount.path / "file").read_bytes() == new
            stale = 0
            for at in range(4096, self.SIZE, 4 * MIB):
                try:
                    data = os.pread(file.fileno(), 4096, at)
                except OSError as exc:
                    assert exc.errno == errno.ESTALE
                    stale += 1
                    continue
                got += data
                assert data == old[at : at + 4096], f"another version at {at}"
            assert stale
        assert old.startswith(got[:4096])
        with open(mount.path / "file", "rb") as file:
            assert file.read() == new

    @pytest.mark.parametrize("consistency", [pytest.param("default", marks=pytest.mark.long), "strict"])
    def test_three_versions_are_open_at_once(
        self, mounted: Mounted, bucket: Bucket, consistency: str
    ) -> None:
        mount = mounted(bucket, consistency=consistency, max_readahead="1M")
        path = mount.path / "file"
        opened: list[tuple[int, bytes]] = []
        for version, size in enumerate((self.SIZE, self.SIZE - 5 * MIB, self.SIZE + 5 * MIB, self.SIZE)):
            data = bucket.put("file", size, version=version)
            if consistency == "default":
                mount.refresh(path)
            fd = os.open(path, os.O_RDONLY)
            opened.append((fd, data))
            assert os.fstat(fd).st_size == path.stat().st_size == size
            assert os.pread(fd, 4096, 0) == data[:4096]
            assert path.read_bytes() == data
        assert len({os.fstat(opened[-1][0]).st_ino, path.stat().st_ino}) == 1
        for fd, data in opened[:-1]:
            for at in range(0, self.SIZE, 3 * MIB + 4096):
                try:
                    got = os.pread(fd, 4096, at)
                except OSError as exc:
                    assert exc.errno == errno.ESTALE
                else:
                    # Nothing at all is what is behind the end of a version, and not a byte earlier.
                    assert got == data[at : at + 4096]
        for fd, _ in opened:
            os.close(fd)
        newest = opened[-1][1]
        assert path.read_bytes() == newest
        eventually(lambda: mount.metrics()["fuse_release"] == mount.metrics()["fuse_open"], "all closed")
        mount.refresh(path)
        assert path.stat().st_ino < 1 << 63, "its own number again"
        assert path.read_bytes() == newest

    def test_does_not_keep_an_executable_or_a_listing_from_the_new_version(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        bucket.put("d/run", b"#!/bin/sh\necho old\n")
        mount = mounted(bucket, file_mode="555")
        path = mount.path / "d/run"
        with open(path, "rb", buffering=0) as file:
            assert file.read(5) == b"#!/bi"
            bucket.put("d/run", b"#!/bin/sh\necho the new\n")
            mount.refresh(mount.path)
            assert run([path]).stdout == "the new\n"
            with os.scandir(mount.path / "d") as entries:
                assert [entry.stat().st_size for entry in entries] == [23]
            assert os.getxattr(path, "user.cachefs.etag")
            os.getxattr(path, "user.cachefs.refresh")
            assert path.read_bytes().endswith(b"echo the new\n")

    def test_a_sequential_reader_gets_one_version_or_estale(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        old = bucket.put("file", self.SIZE)
        mount = mounted(bucket, consistency="strict")
        lab.shape(bandwidth=60 * MIB)
        lab.fault("etag", key="file", count=1, after=2 * MIB)
        got = b""
        with open(mount.path / "file", "rb", buffering=0) as file:
            try:
                while chunk := file.read(65536):
                    got += chunk
            except OSError as exc:
                assert exc.errno == errno.ESTALE
        assert old.startswith(got)
        lab.shape(bandwidth=0)
        changed = bytes(255 - b for b in old)
        assert (mount.path / "file").read_bytes() == changed

    def test_of_a_deleted_object_gets_old_bytes_or_estale(self, mounted: Mounted, bucket: Bucket) -> None:
        old = bucket.put("file", self.SIZE)
        mount = mounted(bucket, max_readahead="1M")
        with open(mount.path / "file", "rb", buffering=0) as file:
            assert os.pread(file.fileno(), 1000, 0) == old[:1000]
            bucket.delete("file")
            with pytest.raises(OSError) as caught:
                os.pread(file.fileno(), 1000, 20 * MIB)
            assert caught.value.errno == errno.ESTALE
            with pytest.raises(FileNotFoundError):
                (mount.path / "file").read_bytes()
            with pytest.raises(FileNotFoundError):
                (mount.path / "file").stat()
        with pytest.raises(FileNotFoundError):
            (mount.path / "file").read_bytes()

    def test_a_reader_of_cached_bytes_is_not_disturbed(self, mounted: Mounted, bucket: Bucket) -> None:
        old = bucket.put("file", 3 * MIB)
        mount = mounted(bucket)
        with open(mount.path / "file", "rb") as file:
            assert file.read() == old
            bucket.put("file", 3 * MIB, version=2)
            file.seek(0)
            assert file.read() == old


class TestMappings:
    def test_strict_shows_no_stale_page_after_reopening(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        data = bucket.put("file", 2 * MIB)
        path = mounted(bucket, consistency="strict").path / "file"
        for _ in range(4):
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == data
            lab.replace(bucket.name, "file")
            data = bytes(255 - b for b in data)

    def test_a_mapping_that_is_held_does_not_keep_others_from_new_bytes(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        old = bucket.put("file", 2 * MIB)
        path = mounted(bucket, consistency="strict").path / "file"
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:MIB] == old[:MIB]
            new = bucket.put("file", 2 * MIB, version=2)
            assert path.read_bytes() == new
            # What was mapped stays what it was.
            assert mapped[:MIB] == old[:MIB]
            with open(path, "rb") as other, mmap.mmap(other.fileno(), 0, prot=mmap.PROT_READ) as again:
                assert again[:] == new
            assert mapped[:MIB] == old[:MIB]

    def test_pages_of_a_mapping_that_were_never_read_are_no_bytes_of_another_version(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        old = bucket.put("file", 24 * MIB)
        mount = mounted(bucket, consistency="strict", max_readahead="1M")
        path = mount.path / "file"
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:4096] == old[:4096]
            new = bucket.put("file", 24 * MIB, version=2)
            assert path.read_bytes() == new
            assert mapped[:4096] == old[:4096]
            child = os.fork()
            if not child:
                faulthandler.disable()
                # The kernel has to ask, and the answer is ESTALE: a mapping hears of it by SIGBUS.
                os._exit(0 if mapped[20 * MIB] == old[20 * MIB] else 1)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status in (0, -signal.SIGBUS)

    def test_a_file_that_shrank_shows_no_bytes_behind_its_end(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("file", 2 * MIB)
        path = mounted(bucket, consistency="strict").path / "file"
        path.read_bytes()
        for size in (MIB, 12345, 0, 3 * MIB):
            new = bucket.put("file", size, version=size)
            assert path.read_bytes() == new
            assert path.stat().st_size == size


class TestFilesBecomeDirectories:
    def test_and_back(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("x", 100)
        place = mounted(bucket, consistency="strict").path
        assert (place / "x").read_bytes() == data
        bucket.delete("x")
        inner = bucket.put("x/y", 100)
        time.sleep(BURST_S)
        assert (place / "x/y").read_bytes() == inner
        assert os.listdir(place / "x") == ["y"]
        bucket.delete("x/y")
        data = bucket.put("x", 200, version=2)
        time.sleep(BURST_S)
        assert (place / "x").read_bytes() == data


@pytest.mark.long
def test_many_readers_of_an_object_that_keeps_changing_each_see_one_version(
    mounted: Mounted, bucket: Bucket, lab: LabStore
) -> None:
    """Each reader reads the file whole, again and again, while it is overwritten: a version, or ESTALE."""
    data = bucket.put("file", 5 * MIB)
    other = bytes(255 - b for b in data)
    mount = mounted(bucket, consistency="strict")
    code = f"""
import sys, time, errno
path, until, size = sys.argv[1], time.monotonic() + {1.5 if LEVEL == "short" else 3}, {len(data)}
first = {{ {data[0]}: 0, {other[0]}: 1 }}
good = stale = 0
import hashlib
known = {{ {hash_of(data)!r}, {hash_of(other)!r} }}
while time.monotonic() < until:
    try:
        with open(path, "rb", buffering=0) as file:
            got = b""
            while chunk := file.read(262144):
                got += chunk
        assert hashlib.md5(got).hexdigest() in known, "a mix"
        good += 1
    except OSError as exc:
        assert exc.errno == errno.ESTALE, exc
        stale += 1
print(good, stale)
"""
    import subprocess
    import sys

    readers = [
        subprocess.Popen(
            [sys.executable, "-c", code, mount.path / "file"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    while readers[0].poll() is None:
        lab.replace(bucket.name, "file")
        time.sleep(0.1)
    results = [reader.communicate(timeout=20) for reader in readers]
    assert all(reader.returncode == 0 for reader in readers), results
    assert all(int(out.split()[0]) > 0 for out, _ in results), results
    assert in_python(READ, mount.path / "file", text=False) in (data, other)


def hash_of(data: bytes) -> str:
    import hashlib

    return hashlib.md5(data).hexdigest()

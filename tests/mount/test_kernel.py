"""What the kernel answers without us: counts of FUSE messages, not times.

On the native backend a file that is whole in the cache is read by the kernel itself, whatever is in the page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lab.client import LabStore
from tests.mount.conftest import Bucket, Mounted
from tests.mount.mounts import Mount, in_python, run, succeed

MIB = 1 << 20
SMALL = 20
NAMES = 5000


@pytest.fixture(scope="module")
def shared(module_mounted: Mounted, module_bucket: Bucket) -> Iterator[Mount]:
    """One mount for tests that only read. `big` is 9 MiB and a bit."""
    module_bucket.put("big", 9 * MIB + 4321)
    for number in range(SMALL):
        module_bucket.put(f"small/{number:02}.bin", 60_000 + number)
    module_bucket.put("deep/er/still/file", 10)
    module_bucket.put("empty", 0)
    module_bucket.store.synthesize(module_bucket.name, "many/", NAMES, 10)
    yield module_mounted(module_bucket)


@pytest.fixture
def objects(module_bucket: Bucket) -> dict[str, bytes]:
    return module_bucket.objects


def once_each(backend: str, files: int, blocks: int | None = None) -> dict[str, int]:
    """What so many warm files cost: an OPEN and a RELEASE each, on the native backend without any READ to come. `blocks`
    they have, if not one each."""
    cost = {"fuse_open": files, "fuse_release": files}
    passthrough = {"passthrough_opens": files, "passthrough_blocks": blocks or files}
    return cost | (passthrough if backend == "native" else {"page_cache_blocks": blocks or files})


def fresh_pages(mount: Mount, path: Path) -> None:
    """Forget the kernel's pages of one file."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mount.settled()


class TestMessages:
    def test_a_warm_file_is_read_again_without_a_read_message(
        self, shared: Mount, objects: dict[str, bytes], backend: str
    ) -> None:
        path = shared.path / "big"
        for _ in range(2):
            assert path.read_bytes() == objects["big"]
            shared.settled()
        with shared.counting() as grown, open(path, "rb", buffering=0) as file:
            assert file.read() == objects["big"]
        assert grown == once_each(backend, 1, blocks=10)

    def test_python_asks_whether_a_file_is_a_terminal(self, shared: Mount, backend: str) -> None:
        """One IOCTL that libfuse answers by itself."""
        path = shared.path / "small/03.bin"
        for _ in range(2):
            path.read_bytes()
            shared.settled()
        with shared.counting() as grown:
            path.read_bytes()
        assert grown == once_each(backend, 1) | ({"fuse_other": 1} if backend == "native" else {})

    def test_a_whole_file_is_read_without_a_read_message_when_the_kernel_has_no_page_of_it(
        self, shared: Mount, objects: dict[str, bytes], backend: str
    ) -> None:
        path = shared.path / "small/04.bin"
        for _ in range(2):
            path.read_bytes()
            fresh_pages(shared, path)
        with shared.counting() as grown, open(path, "rb", buffering=0) as file:
            assert file.read() == objects["small/04.bin"]
        if backend == "native":
            assert grown == once_each(backend, 1)
        else:
            assert grown["fuse_read"] == 1
            assert grown["fuse_read_bytes"] == len(objects["small/04.bin"])
        assert not {name for name in grown if name.startswith("origin_")}

    def test_a_warm_small_file_costs_one_open_and_one_release(
        self, shared: Mount, objects: dict[str, bytes], backend: str
    ) -> None:
        paths = [shared.path / f"small/{n:02}.bin" for n in range(SMALL)]
        for path in paths:
            path.read_bytes()
        shared.settled()
        with shared.counting() as grown:
            for number, path in enumerate(paths):
                descriptor = os.open(path, os.O_RDONLY)
                assert os.read(descriptor, MIB) == objects[f"small/{number:02}.bin"]
                os.close(descriptor)
        assert grown == once_each(backend, SMALL)

    def test_duplicated_descriptors_send_no_flush(self, shared: Mount, backend: str) -> None:
        path = shared.path / "small/00.bin"
        path.read_bytes()
        shared.settled()
        with shared.counting() as grown:
            succeed(["sh", "-c", 'for i in 1 2 3; do cat <&3 >/dev/null; done 3< "$0"', path])
        assert grown == once_each(backend, 1)

    def test_stat_after_a_listing_asks_nothing(self, shared: Mount) -> None:
        names = os.listdir(shared.path / "small")
        with shared.counting() as grown:
            for name in names:
                os.stat(shared.path / "small" / name)
        assert len(names) == SMALL
        assert grown == {}

    def test_a_second_long_listing_asks_the_store_nothing(self, shared: Mount) -> None:
        first = succeed(["ls", "-lR", shared.path / "small"])
        with shared.counting() as grown:
            assert succeed(["ls", "-lR", shared.path / "small"]) == first
        assert not {name for name in grown if name.startswith("origin_")}
        assert "fuse_lookup" not in grown
        assert grown.get("fuse_getattr", 0) <= 1  # the directory's, for its access time

    def test_a_missing_name_is_asked_for_once(self, shared: Mount) -> None:
        path = shared.path / "small" / "missing"
        assert not path.exists()
        with shared.counting() as grown:
            assert not path.exists()
        assert grown == {}

    def test_a_missing_name_in_a_listed_directory_costs_no_request(self, shared: Mount) -> None:
        os.listdir(shared.path / "small")
        with shared.counting() as grown:
            for number in range(10):
                assert not (shared.path / f"small/none-{number}").exists()
        assert grown.pop("fuse_lookup") == 10
        assert grown.pop("negative_hits") == 10
        assert grown == {}

    def test_an_open_for_reading_costs_the_store_nothing_after_a_listing(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        for number in range(5):
            bucket.put(f"d/{number}", 1000)
        mount = mounted(bucket)
        os.listdir(mount.path / "d")
        with mount.counting() as grown:
            for number in range(5):
                (mount.path / f"d/{number}").read_bytes()
        assert grown["origin_get"] == 5
        assert not {"origin_list", "origin_head", "fuse_lookup", "fuse_getattr"} & set(grown)

    @pytest.mark.root
    def test_sequential_reads_come_in_requests_of_a_mebibyte(
        self, mounted: Mounted, lab: LabStore, bucket: Bucket
    ) -> None:
        data = bucket.put("big", 32 * MIB)
        mount = mounted(bucket)
        assert mount.status()["tuning"][0] == "read_ahead_kb raised to 1024"
        with mount.counting() as grown:
            assert in_python(HASH, mount.path / "big") == digest(data)
        assert grown["fuse_read"] <= 32 + 4  # the first ones are smaller: the kernel's window opens
        assert grown["origin_bytes"] == len(data)
        assert sum(lab.counters()["bytes_sent"].values()) < len(data) + 100_000

    def test_ten_processes_reading_one_cold_object_cost_as_much_as_one(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        data = bucket.put("big", 12 * MIB)
        mount = mounted(bucket)
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", HASH, mount.path / "big"], stdout=subprocess.PIPE, text=True
            )
            for _ in range(10)
        ]
        assert {reader.communicate(timeout=60)[0] for reader in readers} == {digest(data)}
        assert mount.settled()["origin_bytes"] == len(data)


HASH = "import sys, hashlib; print(hashlib.file_digest(open(sys.argv[1], 'rb'), 'md5').hexdigest(), end='')"


def digest(data: bytes) -> str:
    import hashlib

    return hashlib.md5(data).hexdigest()


class TestWaysOfReading:
    @pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
    def test_mapped_pages_touched_at_random_are_right(
        self, shared: Mount, objects: dict[str, bytes], flags: int
    ) -> None:
        data = objects["big"]
        fresh_pages(shared, shared.path / "big")
        with (
            open(shared.path / "big", "rb") as file,
            mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as mapped,
        ):
            dice = random.Random(1)
            for _ in range(300):
                at = dice.randrange(len(data))
                assert mapped[at : at + 64] == data[at : at + 64]
            assert mapped[-1] == data[-1]

    def test_a_private_writable_mapping_changes_nobody_elses_bytes(
        self, shared: Mount, objects: dict[str, bytes]
    ) -> None:
        path = shared.path / "small/01.bin"
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as m,
        ):
            m[:4] = b"mine"
            assert m[:4] == b"mine"
        assert path.read_bytes() == objects["small/01.bin"]

    def test_a_mapping_outlives_its_descriptor(self, shared: Mount, objects: dict[str, bytes]) -> None:
        fresh_pages(shared, shared.path / "big")
        with open(shared.path / "big", "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert mapped[:] == objects["big"]
        mapped.close()

    def test_sendfile(self, shared: Mount, objects: dict[str, bytes], tmp_path: Path) -> None:
        with open(shared.path / "big", "rb") as source, open(tmp_path / "copy", "wb") as target:
            while os.sendfile(target.fileno(), source.fileno(), None, 4 * MIB):
                pass
        assert (tmp_path / "copy").read_bytes() == objects["big"]

    def test_copy_file_range(self, shared: Mount, objects: dict[str, bytes], tmp_path: Path) -> None:
        with open(shared.path / "big", "rb") as source, open(tmp_path / "copy", "wb") as target:
            try:
                while os.copy_file_range(source.fileno(), target.fileno(), 4 * MIB):
                    pass
            except OSError as exc:
                # Across filesystems the kernel says EXDEV, and every caller falls back to reading.
                assert exc.errno == 18
                assert target.tell() == 0
                return
        assert (tmp_path / "copy").read_bytes() == objects["big"]

    def test_splice(self, shared: Mount, objects: dict[str, bytes]) -> None:
        receive, send = os.pipe()
        got = b""
        with open(shared.path / "small/02.bin", "rb") as source:
            while moved := os.splice(source.fileno(), send, 32768):
                got += os.read(receive, moved)
        os.close(receive)
        os.close(send)
        assert got == objects["small/02.bin"]

    def test_direct_io(self, shared: Mount, objects: dict[str, bytes]) -> None:
        descriptor = os.open(shared.path / "big", os.O_RDONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, MIB)
        try:
            for at in (0, 3 * MIB, 9 * MIB):
                got = os.preadv(descriptor, [buffer], at)
                assert buffer[:got] == objects["big"][at : at + MIB]
        finally:
            os.close(descriptor)
        assert got == 4321

    def test_reads_at_and_beyond_the_end(self, shared: Mount, objects: dict[str, bytes]) -> None:
        size = len(objects["big"])
        with open(shared.path / "big", "rb", buffering=0) as file:
            assert os.pread(file.fileno(), 100, size - 10) == objects["big"][-10:]
            assert os.pread(file.fileno(), 100, size) == b""
            assert os.pread(file.fileno(), 100, size + 10 * MIB) == b""

    def test_seeking(self, shared: Mount, objects: dict[str, bytes]) -> None:
        size = len(objects["big"])
        with open(shared.path / "big", "rb") as file:
            assert os.lseek(file.fileno(), 0, os.SEEK_END) == size
            assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
            assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == size
            with pytest.raises(OSError) as caught:
                os.lseek(file.fileno(), size, os.SEEK_DATA)
            assert caught.value.errno == 6  # ENXIO: there is no data behind the end

    def test_an_empty_file(self, shared: Mount) -> None:
        with shared.counting() as grown:
            assert (shared.path / "empty").read_bytes() == b""
        assert "origin_get" not in grown

    def test_a_file_is_read_in_any_portion(self, shared: Mount, objects: dict[str, bytes]) -> None:
        dice = random.Random(2)
        data = objects["big"]
        fresh_pages(shared, shared.path / "big")
        with open(shared.path / "big", "rb", buffering=0) as file:
            for _ in range(60):
                at, length = dice.randrange(len(data)), dice.choice([1, 511, 4096, 70_000, 3 * MIB])
                assert os.pread(file.fileno(), length, at) == data[at : at + length]


class TestDirectories:
    def test_five_thousand_names_are_listed_once_each(self, shared: Mount) -> None:
        names = os.listdir(shared.path / "many")
        assert len(names) == NAMES
        assert set(names) == {f"name-{n:07}.bin" for n in range(NAMES)}

    def test_find_and_ls_agree_with_the_store(self, shared: Mount, objects: dict[str, bytes]) -> None:
        found = succeed(["find", shared.path, "-type", "f", "-printf", "%P %s\\n"]).splitlines()
        expected = {f"{key} {len(data)}" for key, data in objects.items()}
        expected |= {f"many/name-{n:07}.bin 10" for n in range(NAMES)}
        assert set(found) == expected
        assert len(found) == len(expected)
        assert len(succeed(["ls", "-lR", shared.path]).splitlines()) > NAMES

    def test_positions_in_a_directory_stay_valid(self, shared: Mount) -> None:
        """telldir, seekdir and rewinddir, as Samba and NFS servers use them."""
        libc = ctypes.CDLL(None, use_errno=True)
        for function in (libc.opendir, libc.readdir):
            function.restype = ctypes.c_void_p
        libc.telldir.restype = ctypes.c_long
        libc.telldir.argtypes = libc.readdir.argtypes = [ctypes.c_void_p]
        libc.closedir.argtypes = libc.rewinddir.argtypes = [ctypes.c_void_p]
        libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]

        def read() -> bytes | None:
            entry = libc.readdir(stream)
            # struct dirent: ino, off, reclen, type, name
            return ctypes.string_at(entry + 19) if entry else None

        stream = libc.opendir(os.fsencode(shared.path / "many"))
        assert stream
        try:
            positions, names = [], []
            while True:
                positions.append(libc.telldir(stream))
                name = read()
                if name is None:
                    break
                names.append(name)
            assert len(names) == len(set(names)) == NAMES
            for at in (0, 1, 2, 999, 1000, 1001, 4321, NAMES - 1):
                libc.seekdir(stream, positions[at])
                assert read() == names[at]
                if at + 1 < len(names):
                    assert read() == names[at + 1]
            libc.seekdir(stream, positions[-1])
            assert read() is None
            libc.rewinddir(stream)
            again = [read() for _ in names]
            assert again == names
            assert read() is None
        finally:
            libc.closedir(stream)

    def test_dot_and_dot_dot_lead_where_they_should(self, shared: Mount) -> None:
        """Listings leave them out, paths do not."""
        assert os.stat(shared.path / "deep/er/.").st_ino == os.stat(shared.path / "deep/er").st_ino
        assert os.stat(shared.path / "deep/er/..").st_ino == os.stat(shared.path / "deep").st_ino
        assert os.path.samefile(shared.path / "..", shared.place)

    def test_directories_look_like_directories(self, shared: Mount) -> None:
        shown = os.stat(shared.path / "deep")
        assert shown.st_nlink >= 1
        assert shown.st_mode == 0o40755
        assert os.stat(shared.path / "big").st_mode == 0o100644
        assert os.stat(shared.path).st_ino == 1

    def test_inode_numbers_survive_a_restart(self, mounted: Mounted, bucket: Bucket) -> None:
        for key in ("a", "d/b", "d/e/c"):
            bucket.put(key, 10)
        mount = mounted(bucket)
        listing = ["find", mount.path, "-printf", "%i %P\\n"]
        before = succeed(listing)
        mount.stop()
        mount.start()
        assert succeed(listing) == before

    def test_a_walk_while_others_walk_sees_everything(self, shared: Mount) -> None:
        walks = [
            subprocess.Popen(["find", shared.path, "-type", "f"], stdout=subprocess.PIPE) for _ in range(4)
        ]
        assert len({len(walk.communicate(timeout=60)[0].splitlines()) for walk in walks}) == 1

    def test_du_and_df_show_something_sensible(self, shared: Mount, objects: dict[str, bytes]) -> None:
        assert int(succeed(["du", "-sb", "--apparent-size", shared.path / "small"]).split()[0]) >= sum(
            len(data) for key, data in objects.items() if key.startswith("small/")
        )
        space = os.statvfs(shared.path)
        assert space.f_namemax == 255
        assert space.f_blocks * space.f_frsize > 1 << 40
        assert space.f_blocks >= space.f_bfree >= 0
        assert "bucket-" in succeed(["df", shared.path])

    def test_names_that_are_too_long_are_refused(self, shared: Mount) -> None:
        with pytest.raises(OSError) as caught:
            os.stat(shared.path / ("x" * 256))
        assert caught.value.errno == 36
        assert not (shared.path / ("x" * 255)).exists()

    def test_a_file_is_no_directory(self, shared: Mount) -> None:
        with pytest.raises(NotADirectoryError):
            os.listdir(shared.path / "big")
        with pytest.raises(NotADirectoryError):
            os.stat(shared.path / "big/x")
        with pytest.raises(IsADirectoryError):
            (shared.path / "deep").read_bytes()

    def test_ls_finds_nothing_to_complain_about(self, shared: Mount) -> None:
        done = run(["ls", "-laR", "--time-style=full-iso", shared.path / "small"])
        assert (done.returncode, done.stderr) == (0, "")


# -- listings --------------------------------------------------------------------------------------


def names(path: Path) -> set[str]:
    return set(os.listdir(path))


@pytest.mark.parametrize("read_only", [False, True], ids=["writable", "read-only"])
def test_a_listing_again_is_no_request_and_what_changed_is_seen(
    read_only: bool, mounted: Mounted, bucket: Bucket, backend: str
) -> None:
    """With attributes, as `ls -l` lists. Also what other clients change, once it is refreshed; half a listing is none."""
    bucket.store.synthesize(bucket.name, "d/", 500, 10)
    here = {f"name-{number:07}.bin" for number in range(500)}
    first, second, third, fourth, fifth, *_ = sorted(here)
    mount = mounted(bucket, read_only=read_only)
    place = mount.path / "d"

    def unread() -> None:
        with os.scandir(place) as entries:
            next(entries)

    def look() -> set[str]:
        with os.scandir(place) as entries:
            return {entry.name for entry in entries if entry.stat().st_size == 10}

    def look_twice() -> None:
        assert look() == here
        with mount.counting() as grown:
            assert look() == here
            assert names(place) == here
        if backend == "native":
            assert not grown.keys() & {"fuse_readdir", "fuse_lookup"}, grown

    look_twice()
    unread()
    look_twice()
    bucket.put("d/another", 10)
    bucket.store.delete(bucket.name, f"d/{first}")
    unread()
    mount.refresh(place)
    here = here - {first} | {"another"}
    unread()
    look_twice()
    if read_only:
        return
    (place / "made").write_bytes(b"0123456789")
    here.add("made")
    look_twice()
    (place / second).unlink()
    here.remove(second)
    look_twice()
    (place / third).rename(place / "moved")
    here = here - {third} | {"moved"}
    look_twice()
    (place / fourth).rename(mount.path / fourth)
    here.remove(fourth)
    look_twice()
    place.rename(mount.path / "e")
    place = mount.path / "e"
    look_twice()
    (mount.path / "d").mkdir()
    assert not names(mount.path / "d")
    (place / fifth).rename(mount.path / "d" / fifth)
    assert names(mount.path / "d") == {fifth}
    here.remove(fifth)
    look_twice()

"""Files that the kernel reads by itself (FUSE passthrough): no READ for them, and every byte right whatever becomes of the
cache file behind them."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import hashlib
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.lab.client import LabStore
from tests.conftest import LEVEL
from tests.mount.conftest import Bucket, Mounted
from tests.mount.mounts import Mount, alive, eventually, in_python, mounts_at, run, state_of, succeed

pytestmark = [pytest.mark.root, pytest.mark.backends("native")]

MIB = 1 << 20
REPOSITORY = Path(__file__).resolve().parents[2]
BIG = 20 * MIB + 4321
SIZES = [0, 1, 4095, 4096]
SIZES += [size + more for size in (MIB, 16 * MIB) for more in (-1, 0, 1)]

DIGEST = "import sys, hashlib; print(hashlib.file_digest(open(sys.argv[1], 'rb'), 'md5').hexdigest(), end='')"


def digest(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def becomes_passthrough(mount: Mount, *paths: Path) -> None:
    """Wait until each is opened for the kernel to read by itself."""

    def passthrough(path: Path) -> bool:
        before = mount.metrics()["passthrough_opens"]
        os.close(os.open(path, os.O_RDONLY))
        return mount.metrics()["passthrough_opens"] > before

    for path in paths:
        eventually(lambda path=path: passthrough(path), f"{path.name} is in passthrough")  # type: ignore[misc]
    mount.settled()


def drop_all_pages(mount: Mount) -> None:
    """Of the mount and of the cache's files: what is read then comes from the tier."""
    mount.drop_kernel_pages()
    for path in [*cache_files(mount), *mount.memory.rglob("*")]:
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cache_files(mount: Mount) -> list[Path]:
    return [path for path in (mount.cache / "objects").rglob("*") if path.is_file()]


def flip(path: Path, at: int) -> None:
    """A bit of a cache file, as a bad disk does it."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))


def read_everything(mount: Mount, bucket: Bucket, *, but: str = "") -> None:
    for key, data in bucket.objects.items():
        if key != but:
            assert (mount.path / key).read_bytes() == data, key


class Mapping:
    """Of a whole file, kept after its descriptor is closed: Python's own keeps a descriptor, too."""

    def __init__(self, path: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self.size = os.fstat(descriptor).st_size
            self._at = self._libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
            assert self._at not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        finally:
            os.close(descriptor)

    def bytes(self) -> bytes:
        """What is there now: pages that were touched before are asked for again."""
        self._libc.madvise(self._at, self.size, mmap.MADV_DONTNEED)
        return ctypes.string_at(self._at, self.size)

    def refuses_writing(self) -> bool:
        self._libc.mprotect.argtypes = self._libc.madvise.argtypes
        done: int = self._libc.mprotect(self._at, self.size, mmap.PROT_READ | mmap.PROT_WRITE)
        return done == -1 and ctypes.get_errno() == errno.EACCES

    def __enter__(self) -> Mapping:
        return self

    def __exit__(self, *_: object) -> None:
        self._libc.munmap(self._at, self.size)


# -- ways of reading -------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _at_random(path: Path) -> bytes:
    got = bytearray(path.stat().st_size)
    places = list(range(0, len(got), 70_001))
    random.Random(1).shuffle(places)
    with open(path, "rb", buffering=0) as file:
        for at in places:
            data = os.pread(file.fileno(), 70_001, at)
            got[at : at + len(data)] = data
    return bytes(got)


def _mapped(flags: int, prot: int = mmap.PROT_READ) -> Callable[[Path], bytes]:
    def read(path: Path) -> bytes:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, flags=flags, prot=prot) as mapped:
            return mapped[:]

    return read


def _mapped_after_close(path: Path) -> bytes:
    with Mapping(path) as mapping:
        return mapping.bytes()


def _splice(path: Path) -> bytes:
    receive, send = os.pipe()
    got = bytearray()
    try:
        with open(path, "rb", buffering=0) as file:
            while moved := os.splice(file.fileno(), send, 65536):
                while moved:
                    part = os.read(receive, moved)
                    got += part
                    moved -= len(part)
    finally:
        os.close(receive)
        os.close(send)
    return bytes(got)


def _direct(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, MIB)
    got = bytearray()
    try:
        while count := os.preadv(descriptor, [buffer], len(got)):
            got += buffer[:count]
    finally:
        os.close(descriptor)
    return bytes(got)


def _backwards(path: Path) -> bytes:
    parts = []
    with open(path, "rb", buffering=0) as file:
        end = os.lseek(file.fileno(), 0, os.SEEK_END)
        while end:
            begin = max(0, end - 300_000)
            os.lseek(file.fileno(), begin, os.SEEK_SET)
            parts.append(file.read(end - begin))
            end = begin
    return b"".join(reversed(parts))


def _with(copy: Callable[[Path, Path], object]) -> Callable[[Path], bytes]:
    """What a copy of it holds."""

    def read(path: Path) -> bytes:
        target = Path(f"/tmp/copy-{os.getpid()}")
        try:
            copy(path, target)
            return target.read_bytes()
        finally:
            target.unlink()

    return read


def _sendfile(path: Path, target: Path) -> None:
    with open(path, "rb", buffering=0) as source, open(target, "wb", buffering=0) as sink:
        while os.sendfile(sink.fileno(), source.fileno(), None, 4 * MIB):
            pass


WAYS: dict[str, Callable[[Path], bytes]] = {
    "read": _read,
    "at random": _at_random,
    "backwards": _backwards,
    "O_DIRECT": _direct,
    "mapped shared": _mapped(mmap.MAP_SHARED),
    "mapped private": _mapped(mmap.MAP_PRIVATE),
    "mapped to run": _mapped(mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC),
    "mapped, then closed": _mapped_after_close,
    "splice": _splice,
    "sendfile": _with(_sendfile),
    "cp": _with(lambda path, target: succeed(["cp", path, target])),
    "cp --reflink": _with(lambda path, target: succeed(["cp", "--reflink=auto", path, target])),
    "tail": lambda path: succeed(["tail", "-c", "+1", path], text=False),  # type: ignore[return-value]
    "dd": lambda path: succeed(["dd", f"if={path}", "bs=77777", "status=none"], text=False),  # type: ignore[return-value]
}


@pytest.fixture(scope="module")
def objects(module_bucket: Bucket) -> dict[str, bytes]:
    for size in SIZES:
        module_bucket.put(f"size-{size}", size)
    module_bucket.put("big", BIG)
    holes = bytearray(40 * MIB + 17)
    for at in (0, 3 * MIB - 5, 16 * MIB - 3, 33 * MIB, len(holes) - 9):
        holes[at : at + 9] = b"not a nul"
    module_bucket.put("sparse", bytes(holes))
    return module_bucket.objects


@pytest.fixture(scope="module", params=[pytest.param("ram", marks=pytest.mark.long), "ssd"])
def whole(
    request: pytest.FixtureRequest,
    module_mounted: Mounted,
    module_bucket: Bucket,
    objects: dict[str, bytes],
) -> Iterator[Mount]:
    """A mount on which every file is whole, in RAM or on SSD."""
    mount = module_mounted(module_bucket, ram={"ram": "512M", "ssd": "0"}[request.param], timeout=30)
    read_everything(mount, module_bucket)
    becomes_passthrough(mount, *(mount.path / key for key, data in objects.items() if data))
    used = {tier["name"]: tier["used_bytes"] for tier in mount.status()["tiers"]}
    assert used[request.param] >= sum(map(len, objects.values()))
    yield mount


class TestWholeFiles:
    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
    def test_are_read_without_the_daemon(
        self, whole: Mount, objects: dict[str, bytes], way: Callable[[Path], bytes]
    ) -> None:
        mount = whole
        drop_all_pages(mount)
        with mount.counting() as grown:
            assert way(mount.path / "big") == objects["big"]
        assert grown.pop("passthrough_opens") == grown.pop("fuse_open") == grown.pop("fuse_release") == 1
        grown.pop("fuse_other", None)  # Python and cp ask what kind of file it is
        grown.pop("fuse_getattr", None)
        assert grown.pop("passthrough_blocks") == -(-len(objects["big"]) // MIB)
        assert grown == {}

    def test_of_every_size(self, whole: Mount, objects: dict[str, bytes]) -> None:
        mount = whole
        drop_all_pages(mount)
        with mount.counting() as grown:
            for key, data in objects.items():
                assert (mount.path / key).read_bytes() == data, key
        assert "fuse_read" not in grown
        assert grown["passthrough_opens"] == sum(bool(data) for data in objects.values())
        assert not {name for name in grown if name.startswith("origin_")}

    def test_show_their_length_and_no_hole(self, whole: Mount, objects: dict[str, bytes]) -> None:
        mount = whole
        for key, data in objects.items():
            with open(mount.path / key, "rb", buffering=0) as file:
                fd, size = file.fileno(), len(data)
                assert os.fstat(fd).st_size == os.lseek(fd, 0, os.SEEK_END) == size
                assert os.pread(fd, 100, size) == os.pread(fd, 100, size + 10 * MIB) == b""
                assert os.pread(fd, 100, max(0, size - 10)) == data[-10:]
                if size:
                    assert os.lseek(fd, 0, os.SEEK_DATA) == 0
                    assert os.lseek(fd, 0, os.SEEK_HOLE) == size
                for whence in (os.SEEK_DATA, os.SEEK_HOLE):
                    with pytest.raises(OSError) as caught:
                        os.lseek(fd, size, whence)
                    assert caught.value.errno == errno.ENXIO

    def test_cannot_be_written_through_any_handle(self, whole: Mount, objects: dict[str, bytes]) -> None:
        mount = whole
        path = mount.path / "big"
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC):
            with pytest.raises(OSError) as caught:
                os.open(path, flags)
            assert caught.value.errno == errno.EROFS
        with open(path, "rb", buffering=0) as file:
            for write in (
                lambda: os.write(file.fileno(), b"x"),
                lambda: os.ftruncate(file.fileno(), 0),
                lambda: os.posix_fallocate(file.fileno(), 0, 10),
                lambda: os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR),
                lambda: mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE),
            ):
                with pytest.raises(OSError):
                    write()
        with Mapping(path) as mapping:
            assert mapping.refuses_writing()
        assert path.read_bytes() == objects["big"]

    def test_opened_by_many_at_once_share_one_file(self, whole: Mount, objects: dict[str, bytes]) -> None:
        mount = whole
        path = mount.path / "big"
        before = len(os.listdir(f"/proc/{mount.pid}/fd"))
        with mount.counting() as grown:
            readers = [
                subprocess.Popen([sys.executable, "-c", MANY, path], stdout=subprocess.PIPE, text=True)
                for _ in range(4)
            ]
            said = [reader.communicate(timeout=60)[0] for reader in readers]
        assert set(said) == {digest(objects["big"])}
        assert grown["passthrough_opens"] == grown["fuse_open"] == grown["fuse_release"] == 4 * 50
        assert "fuse_read" not in grown
        assert len(os.listdir(f"/proc/{mount.pid}/fd")) <= before + 2
        assert mount.status()["open_files"] == 0


MANY = """
import hashlib, sys
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(50) as threads:
    files = list(threads.map(lambda _: open(sys.argv[1], "rb", buffering=0), range(50)))
    some = threads.map(lambda file: hashlib.file_digest(file, "md5").hexdigest(), files[:3])
    print(*set(some), sep="", end="")
    for file in files: file.close()
"""


def test_a_file_that_lies_in_ram_and_on_ssd_is_gathered_and_then_read_without_the_daemon(
    mounted: Mounted, bucket: Bucket
) -> None:
    data = bucket.put("big", BIG)
    mount = mounted(bucket, ram="18M")
    path = mount.path / "big"
    with open(path, "rb") as file:
        assert file.read() == data
        tiers = {tier["name"]: tier["used_bytes"] for tier in mount.status()["tiers"]}
        assert all(tiers.values()), tiers
    becomes_passthrough(mount, path)
    assert mount.metrics()["prepared_versions"] == 1
    drop_all_pages(mount)
    with mount.counting() as grown:
        assert path.read_bytes() == _at_random(path) == _mapped_after_close(path) == data
    assert not {"fuse_read", "origin_get"} & set(grown)
    assert grown["passthrough_opens"] == 3


class TestStatus:
    def test_says_which_backend_serves_and_why(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("file", 10)
        for asked, why in (
            ("auto", "the kernel reads whole cached files by itself"),
            ("native", "the kernel reads whole cached files by itself"),
            ("pyfuse3", "as asked"),
        ):
            mount = mounted(bucket, fuse=asked)
            status = mount.status()
            expected = "native" if asked == "auto" else asked
            assert (status["fuse"], status["fuse_reason"]) == (expected, why)
            assert f"backend: {expected} ({why})" in mount.log()
            text = mount.cli("status", mount.path).stdout
            assert f"fuse        {expected}: {why}\n" in text and f"{expected} backend" in text
            assert "ro" in mounts_at(mount.path)[0].options
            assert os.statvfs(mount.path).f_flag & os.ST_RDONLY


class TestPartialFiles:
    def test_go_through_the_daemon_until_they_are_whole(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 12 * MIB + 5)
        mount = mounted(bucket, max_readahead="1M")
        path = mount.path / "file"
        with open(path, "rb", buffering=0) as early:
            assert os.pread(early.fileno(), 4096, 0) == data[:4096]
            assert in_python(DIGEST, path) == digest(data)
            # All handles of one inode are served in one way: as the first.
            with mount.counting() as grown, open(path, "rb") as beside:
                assert beside.read() == data
            assert "passthrough_opens" not in grown
            mount.drop_kernel_pages()
            with mount.counting() as grown:
                for at in range(12 * MIB, -1, -3 * MIB):
                    assert os.pread(early.fileno(), 70_000, at) == data[at : at + 70_000]
            assert grown["fuse_read"] >= 4
        assert mount.metrics()["passthrough_opens"] == 0
        becomes_passthrough(mount, path)
        with mount.counting() as grown:
            assert path.read_bytes() == data
        assert grown["passthrough_opens"] == 1 and "fuse_read" not in grown

    @pytest.mark.long
    def test_opened_while_they_are_fetched_are_right_whoever_reads(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        """Opens, reads and closes all along the download: from the first byte to the kernel's own reading."""
        data = bucket.put("file", 12 * MIB)
        mount = mounted(bucket)
        lab.shape(bandwidth=8 * MIB)
        dice = random.Random(3)

        def work(until: float) -> int:
            opens = 0
            while time.monotonic() < until:
                with open(mount.path / "file", "rb", buffering=0) as file:
                    opens += 1
                    at = dice.randrange(len(data) - 50_000)
                    assert os.pread(file.fileno(), 50_000, at) == data[at : at + 50_000]
            return opens

        with ThreadPoolExecutor(8) as threads:
            until = time.monotonic() + 2.5
            workers = [threads.submit(work, until) for _ in range(8)]
            assert (mount.path / "file").read_bytes() == data
            assert all(worker.result() for worker in workers)
        becomes_passthrough(mount, mount.path / "file")
        assert (mount.path / "file").read_bytes() == data
        assert mount.settled()["origin_bytes"] == len(data)


@pytest.fixture(params=[pytest.param("ram", marks=pytest.mark.long), "ssd"])
def tiny(request: pytest.FixtureRequest, mounted: Mounted, bucket: Bucket) -> Mount:
    """A cache with room for a third of what goes through it, and `f0`, in passthrough from one of its tiers. Prefetch would
    bring it back whenever the other files of its directory are read."""
    for number in range(30):
        bucket.put(f"f{number}", MIB - 1000 * number)
    sizes = {"ram": "4M", "cache_size": "6M"} if request.param == "ram" else {"ram": "0", "cache_size": "10M"}
    mount = mounted(bucket, prefetch="off", **sizes)
    assert (mount.path / "f0").read_bytes() == bucket.objects["f0"]
    becomes_passthrough(mount, mount.path / "f0")
    return mount


class TestEviction:
    """The cache file goes, and whoever has it open or mapped keeps every byte of it."""

    def test_spares_what_is_open(self, tiny: Mount, bucket: Bucket) -> None:
        data = bucket.objects["f0"]
        with open(tiny.path / "f0", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            for _ in range(2):
                read_everything(tiny, bucket, but="f0")
                drop_all_pages(tiny)
            with tiny.counting() as grown:
                assert mapped[:] == data
                assert file.read() == data
            # The daemon may still be moving other files' blocks.
            assert grown.keys() <= {"spilled_blocks", "evicted_blocks"}
            assert tiny.metrics()["evicted_blocks"] > 0
        read_everything(tiny, bucket)

    def test_leaves_a_mapping_whose_file_was_closed_as_it_was(self, tiny: Mount, bucket: Bucket) -> None:
        with Mapping(tiny.path / "f0") as mapping:
            tiny.settled()
            assert tiny.status()["open_files"] == 0
            eventually(lambda: _squeezed_out(tiny, bucket), "f0 was evicted", 20)
            drop_all_pages(tiny)
            assert mapping.bytes() == bucket.objects["f0"]
            # Fetched anew it is another file, under the same name.
            assert (tiny.path / "f0").read_bytes() == bucket.objects["f0"]
            read_everything(tiny, bucket, but="f0")
            assert mapping.bytes() == bucket.objects["f0"]

    def test_after_a_restart_leaves_mappings_as_they_were(self, tiny: Mount, bucket: Bucket) -> None:
        with Mapping(tiny.path / "f0") as mapping:
            tiny.settled()
            os.kill(tiny.pid, signal.SIGTERM)
            eventually(lambda: not alive(tiny.pid), "the daemon has ended")
            assert mapping.bytes() == bucket.objects["f0"]
            tiny.start()
            assert mapping.bytes() == bucket.objects["f0"]
            eventually(lambda: _squeezed_out(tiny, bucket), "f0 was evicted", 20)
            assert mapping.bytes() == bucket.objects["f0"]
            read_everything(tiny, bucket)
            assert mapping.bytes() == bucket.objects["f0"]

    def test_a_mapping_keeps_a_mount_busy_and_lazily_it_is_right_to_its_end(
        self, tiny: Mount, bucket: Bucket
    ) -> None:
        with Mapping(tiny.path / "f0") as mapping:
            tiny.settled()
            done = tiny.umount()
            assert done.returncode == 1
            assert f"(pid {os.getpid()})" in done.stderr and done.stderr.count("\n") == 1
            assert tiny.umount("--lazy").returncode == 0
            assert not mounts_at(tiny.path)
            assert mapping.bytes() == bucket.objects["f0"]
            assert alive(tiny.pid)
        eventually(lambda: not alive(tiny.pid), "the daemon has ended with its last user")
        tiny.start()
        read_everything(tiny, bucket)

    def test_after_a_crash_leaves_mappings_as_they_were(self, tiny: Mount, bucket: Bucket) -> None:
        with Mapping(tiny.path / "f0") as mapping:
            for _ in range(2):
                tiny.kill()
                assert mapping.bytes() == bucket.objects["f0"]
                tiny.start()  # and looks through its files
                eventually(lambda: _squeezed_out(tiny, bucket), "f0 was evicted", 20)
                assert mapping.bytes() == bucket.objects["f0"]
                (tiny.path / "f0").read_bytes()
                becomes_passthrough(tiny, tiny.path / "f0")
            read_everything(tiny, bucket)
            assert mapping.bytes() == bucket.objects["f0"]
        for tier in tiny.status()["tiers"]:
            assert tier["used_bytes"] <= tier["cap_bytes"], tier


def _squeezed_out(mount: Mount, bucket: Bucket) -> bool:
    read_everything(mount, bucket, but="f0")
    return os.getxattr(mount.path / "f0", "user.cachefs.cached") == b"0"


class TestDamage:
    @pytest.fixture
    def damaged(self, mounted: Mounted, bucket: Bucket) -> Mount:
        """A bit of the only cache file is wrong since the last stop; it was open in passthrough, so it is immutable."""
        data = bucket.put("file", 5 * MIB + 7)
        mount = mounted(bucket, ram="0")
        assert (mount.path / "file").read_bytes() == data
        becomes_passthrough(mount, mount.path / "file")
        mount.stop()
        (place,) = cache_files(mount)
        assert place.stat().st_mode & 0o777 == 0o400
        flip(place, 3 * MIB + 9)
        mount.allowed.append("checksum")
        return mount

    def test_is_not_read_by_the_first_who_opens(self, damaged: Mount, bucket: Bucket) -> None:
        damaged.start()
        path = damaged.path / "file"
        with Mapping(path) as mapping, open(path, "rb") as file:
            assert mapping.bytes() == file.read() == bucket.objects["file"]
        # An immutable file goes as a whole, once no process has it open; then it is fetched again.
        damaged.settled()
        drop_all_pages(damaged)
        assert path.read_bytes() == bucket.objects["file"]
        becomes_passthrough(damaged, path)
        assert path.read_bytes() == bucket.objects["file"]
        assert damaged.metrics()["checksum_failures"] == 1

    def test_is_found_without_a_reader_before_anything_is_passthrough(
        self, damaged: Mount, bucket: Bucket
    ) -> None:
        """A reader of other blocks has the file verified; what is opened in passthrough afterwards is right."""
        damaged.start()
        path = damaged.path / "file"
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            assert file.read(4096) == bucket.objects["file"][:4096]
        eventually(lambda: damaged.metrics()["checksum_failures"] == 1, "the damage is found")
        os.close(os.open(path, os.O_RDONLY))
        assert damaged.settled()["passthrough_opens"] == 0
        assert path.read_bytes() == bucket.objects["file"]
        becomes_passthrough(damaged, path)
        assert path.read_bytes() == bucket.objects["file"]

    def test_is_never_passthrough_where_each_read_is_checked(self, damaged: Mount, bucket: Bucket) -> None:
        damaged.start(verify="full")
        for _ in range(3):
            assert (damaged.path / "file").read_bytes() == bucket.objects["file"]
            damaged.drop_kernel_pages()
        counted = damaged.settled()
        assert counted["checksum_failures"] == 1
        assert counted["passthrough_opens"] == 0
        assert counted["fuse_read"] > 0

    def test_that_comes_while_each_read_is_checked_is_found(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 2 * MIB)
        mount = mounted(bucket, ram="0", verify="full")
        mount.allowed.append("checksum")
        assert (mount.path / "file").read_bytes() == data
        mount.settled()
        (place,) = cache_files(mount)
        flip(place, MIB + 1)
        mount.drop_kernel_pages()
        assert (mount.path / "file").read_bytes() == data
        assert mount.metrics()["checksum_failures"] == 1


class TestChanges:
    @pytest.mark.parametrize("consistency", [pytest.param("default", marks=pytest.mark.long), "strict"])
    def test_an_open_file_is_its_version_to_the_end(
        self, mounted: Mounted, bucket: Bucket, consistency: str
    ) -> None:
        old = bucket.put("d/file", 5 * MIB)
        mount = mounted(bucket, consistency=consistency)
        path = mount.path / "d/file"
        assert path.read_bytes() == old
        becomes_passthrough(mount, path)
        with open(path, "rb", buffering=0) as file, Mapping(path) as mapping:
            assert file.read(MIB) == old[:MIB]
            for version, size in ((2, 5 * MIB), (3, MIB + 1), (4, 7 * MIB)):
                new = bucket.put("d/file", size, version=version)
                if consistency == "default":
                    mount.refresh(path)
                assert in_python(DIGEST, path) == digest(new)
                assert path.read_bytes() == new
                assert path.stat().st_size == size
                assert mapping.bytes() == old
                assert os.pread(file.fileno(), 2 * MIB, 2 * MIB) == old[2 * MIB : 4 * MIB]
            assert file.read() == old[MIB:]
            becomes_passthrough(mount, path)
            assert path.read_bytes() == new
            assert mapping.bytes() == old
        assert path.read_bytes() == new
        eventually(lambda: mount.status()["open_files"] == 0, "all closed")
        mount.refresh(path)
        assert path.stat().st_ino < 1 << 63, "its own number again"
        assert in_python(DIGEST, path) == digest(new)

    @pytest.mark.parametrize("consistency", [pytest.param("default", marks=pytest.mark.long), "strict"])
    def test_a_deleted_object_is_read_to_its_end_and_has_no_name(
        self, mounted: Mounted, bucket: Bucket, consistency: str
    ) -> None:
        old = bucket.put("d/file", 5 * MIB)
        bucket.put("d/other", 10)
        mount = mounted(bucket, consistency=consistency)
        path = mount.path / "d/file"
        assert path.read_bytes() == old
        becomes_passthrough(mount, path)
        with open(path, "rb", buffering=0) as file, Mapping(path) as mapping:
            bucket.delete("d/file")
            if consistency == "default":
                mount.refresh(path)
            assert run(["cat", path]).returncode == 1
            assert not path.exists()
            assert os.listdir(mount.path / "d") == ["other"]
            assert file.read() == mapping.bytes() == old
            again = bucket.put("d/file", 4 * MIB, version=2)
            if consistency == "default":
                mount.refresh(path)
            assert in_python(DIGEST, path) == digest(again)
            assert mapping.bytes() == old

    def test_versions_that_alternate_under_readers_never_mix(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        """Warm versions, so that each open is a passthrough open: whole reads and mappings are of one of the two."""
        one = bucket.put("file", 3 * MIB)
        known = {digest(one), digest(bytes(255 - b for b in one))}
        mount = mounted(bucket, consistency="strict")
        mount.allowed.append("INFO")
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", SEEN, mount.path / "file", "1.5" if LEVEL == "short" else "3"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        while readers[0].poll() is None:
            lab.replace(bucket.name, "file")
            time.sleep(0.15)
        seen = {line for reader in readers for line in reader.communicate(timeout=20)[0].split()}
        assert seen == known
        assert mount.metrics()["passthrough_opens"] > 0


SEEN = """
import errno, hashlib, mmap, sys, time
until = time.monotonic() + float(sys.argv[2])
seen = set()
while time.monotonic() < until:
    try:
        with open(sys.argv[1], "rb", buffering=0) as file:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                for _ in range(3):
                    file.seek(0)
                    whole = b""
                    while part := file.read(1 << 18):
                        whole += part
                    seen.add(hashlib.md5(whole).hexdigest())
    except OSError as exc:
        assert exc.errno == errno.ESTALE, exc
print(*seen)
"""


READ_AT = """
import mmap, os, signal, sys
path, at, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if how == "plain":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
file = os.open(path, os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0))
buffer = mmap.mmap(-1, 4096)
print("open", flush=True)
count = os.preadv(file, [buffer], at)
sys.stdout.buffer.write(buffer[:count])
"""


def reader_at(path: Path, at: int, how: str) -> subprocess.Popen[bytes]:
    reader = subprocess.Popen(
        [sys.executable, "-c", READ_AT, path, str(at), how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert reader.stdout is not None and reader.stdout.readline() == b"open\n"
    return reader


class TestSignals:
    """To wait for a page, the kernel lets only signals interrupt that end the process; a direct read any signal."""

    @pytest.mark.parametrize(
        ("how", "number"),
        [("plain", signal.SIGINT), ("plain", signal.SIGKILL), ("direct", signal.SIGINT)],
        ids=["plain-SIGINT", "plain-SIGKILL", "direct-handled"],
    )
    def test_end_a_read_that_hangs_and_no_other(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore, how: str, number: int
    ) -> None:
        data = bucket.put("file", 8 * MIB)
        mount = mounted(bucket, timeout=60)
        (mount.path / "file").stat()
        rule = lab.fault("hang", key="file")
        readers = [reader_at(mount.path / "file", 4 * MIB, how) for _ in range(3)]
        eventually(lambda: lab.faults_fired()[rule], "the store hangs")
        for reader in readers:
            eventually(lambda pid=reader.pid: state_of(pid) in "SD", "it waits")  # type: ignore[misc]
        began = time.monotonic()
        readers[1].send_signal(number)
        readers[1].communicate(timeout=10)
        assert time.monotonic() - began < 1
        # Python makes of a signal that it handles an exception, and exits as if killed by it.
        assert readers[1].returncode == -number
        assert readers[0].poll() is None and readers[2].poll() is None
        lab.clear_faults()
        for reader in (readers[0], readers[2]):
            assert reader.communicate(timeout=10)[0] == data[4 * MIB : 4 * MIB + 4096]
        assert (mount.path / "file").read_bytes() == data

    def test_end_a_stat_and_an_open_that_hang(self, mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
        data = bucket.put("d/file", 1000)
        mount = mounted(bucket, timeout=60, consistency="strict")
        for kind in ("head", "list"):
            lab.fault("hang", kind=kind)
        for command in (
            ["stat", mount.path / "d/file"],
            ["cat", mount.path / "d/file"],
            ["ls", mount.path / "d"],
        ):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            before = time.monotonic()
            time.sleep(0.4)
            assert process.poll() is None, command
            process.send_signal(signal.SIGINT)
            process.wait(timeout=10)
            assert time.monotonic() - before < 1.4, command
        lab.clear_faults()
        assert (mount.path / "d/file").read_bytes() == data

    def test_that_end_nobody_make_no_file_missing(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        """A timer goes off while the store is asked: to a program that asks whether a file exists, EINTR would be "no"."""
        bucket.put("d/file", 1000)
        mount = mounted(bucket, timeout=60, consistency="strict")
        program = (
            "import os, signal, sys\n"
            "signal.signal(signal.SIGALRM, lambda *_: None)\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)\n"
            "assert os.path.exists(sys.argv[1])\n"
            "assert os.stat(sys.argv[1]).st_size == 1000\n"
            "assert os.listdir(os.path.dirname(sys.argv[1])) == ['file']\n"
            "assert len(open(sys.argv[1], 'rb').read()) == 1000\n"
            "signal.setitimer(signal.ITIMER_REAL, 0)\n"  # an interpreter that ends lets go of its handlers first
        )
        lab.shape(latency_ms=150)  # three signals in each request
        done = run([sys.executable, "-c", program, mount.path / "d/file"])
        lab.shape(latency_ms=0)
        assert done.returncode == 0, done.stderr


class TestZeroOpen:
    def test_opens_files_without_asking(self, mounted: Mounted, bucket: Bucket) -> None:
        for number in range(20):
            bucket.put(f"d/{number}", 5000 + number)
        bucket.put("big", 9 * MIB + 1)
        bucket.put("empty", 0)
        mount = mounted(bucket, zero_open=True, consistency="immutable")
        assert mount.status()["fuse_reason"] == "no file is opened, so none is read by the kernel itself"
        read_everything(mount, bucket)
        assert mount.metrics()["fuse_open"] == 1
        with mount.counting() as grown:
            for key, data in bucket.objects.items():
                descriptor = os.open(mount.path / key, os.O_RDONLY)
                assert os.read(descriptor, 10 * MIB) == data
                os.close(descriptor)
        assert grown == {}
        mount.drop_kernel_pages()
        with mount.counting() as grown:
            read_everything(mount, bucket)
        assert grown["fuse_read"] >= 21
        assert not {"fuse_open", "fuse_release"} & set(grown)

    def test_shows_what_changed_after_a_refresh(self, mounted: Mounted, bucket: Bucket) -> None:
        old = bucket.put("d/file", 300_000)
        mount = mounted(bucket, zero_open=True, consistency="immutable")
        path = mount.path / "d/file"
        assert path.read_bytes() == old
        for version in range(2, 6):
            new = bucket.put("d/file", 300_000 + version % 3, version=version)
            assert path.read_bytes() == old
            assert os.getxattr(path, "user.cachefs.refresh") == b"looking again"
            eventually(lambda new=new: path.read_bytes() == new, "the new bytes")  # type: ignore[misc]
            assert in_python(DIGEST, path) == digest(new)
            old = new
        bucket.delete("d/file")
        os.getxattr(path, "user.cachefs.refresh")
        eventually(lambda: not path.exists(), "it has no name any more")

    @pytest.mark.long
    def test_more_files_than_handles_are_kept_for(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.store.synthesize(bucket.name, "many/", 1200, 100)
        mount = mounted(bucket, zero_open=True, consistency="immutable")
        said = succeed(["sh", "-c", 'cat "$0"/many/* | md5sum; cat "$0"/many/* | md5sum', mount.path])
        assert len(set(said.splitlines())) == 1
        assert mount.status()["open_files"] <= 1024

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({}, "--zero-open opens files without looking whether they changed"),
            ({"consistency": "strict"}, "add --consistency immutable"),
            ({"consistency": "immutable", "fuse": "pyfuse3"}, "--zero-open needs --fuse native or auto"),
        ],
        ids=str,
    )
    def test_is_refused_where_it_would_be_wrong(
        self, mounted: Mounted, bucket: Bucket, options: dict[str, str], said: str
    ) -> None:
        done = mounted(bucket, start=False, zero_open=True, **options).try_start()
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr and done.stderr.count("\n") == 1


class TestStackedCaches:
    @pytest.fixture
    def overlay(self, tmp_path: Path) -> Iterator[Callable[[int], Path]]:
        """A function: how many overlays on top of each other → a directory there, as a container's."""
        made: list[Path] = []

        def make(depth: int) -> Path:
            base = tmp_path / "base"
            base.mkdir()
            succeed(["mount", "-t", "tmpfs", "none", base])
            made.append(base)
            lower = base / "lower"
            lower.mkdir()
            for number in range(depth):
                parts = [base / f"{name}{number}" for name in ("upper", "work", "merged")]
                for part in parts:
                    part.mkdir()
                options = f"lowerdir={lower},upperdir={parts[0]},workdir={parts[1]}"
                done = run(["mount", "-t", "overlay", "none", "-o", options, parts[2]])
                if done.returncode:
                    pytest.skip(f"no overlayfs here: {done.stderr}")
                made.append(parts[2])
                lower = parts[2]
            return lower

        yield make
        for place in reversed(made):
            succeed(["umount", "-l", place])

    def test_on_an_overlay_are_passthrough_too(
        self, mounted: Mounted, bucket: Bucket, overlay: Callable[[int], Path]
    ) -> None:
        data = bucket.put("file", 3 * MIB + 1)
        mount = mounted(bucket, fuse="auto", ram="0", cache_dir=overlay(1) / "cache")
        assert mount.status()["fuse"] == "native"
        assert (mount.path / "file").read_bytes() == data
        becomes_passthrough(mount, mount.path / "file")
        with mount.counting() as grown:
            assert (mount.path / "file").read_bytes() == data
            with Mapping(mount.path / "file") as mapping:
                assert mapping.bytes() == data
        assert "fuse_read" not in grown
        mount.stop()

    def test_that_the_kernel_does_not_take_are_read_as_ever(
        self, mounted: Mounted, bucket: Bucket, overlay: Callable[[int], Path]
    ) -> None:
        data = bucket.put("file", 3 * MIB + 1)
        place = overlay(2)
        refused = "files of the ssd tier are read through the daemon: it lies on stacked filesystems"
        mount = mounted(bucket, fuse="auto", ram="0", cache_dir=place / "cache")
        mount.allowed.append(refused)
        assert mount.status()["fuse"] == "native"
        for _ in range(2):
            assert (mount.path / "file").read_bytes() == data
            mount.drop_kernel_pages()
        mount.stop()
        # With a RAM tier in passthrough, only the disk's files go through the daemon.
        mount = mounted(bucket, fuse="auto", cache_dir=place / "other")
        mount.allowed.append(refused)
        assert mount.status()["fuse"] == "native"
        assert (mount.path / "file").read_bytes() == data
        becomes_passthrough(mount, mount.path / "file")
        assert (mount.path / "file").read_bytes() == data
        mount.stop()


class TestAKilledDaemon:
    def test_leaves_its_readers_right_bytes_or_an_errno(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 5 * MIB)
        mount = mounted(bucket, ram="0")
        path = mount.path / "file"
        assert path.read_bytes() == data
        becomes_passthrough(mount, path)
        descriptors = []
        try:
            with Mapping(path) as mapping:
                for _ in range(2):
                    descriptors.append(os.open(path, os.O_RDONLY))
                    mount.kill()
                    for descriptor in descriptors:
                        try:
                            assert os.pread(descriptor, 6 * MIB, 0) == data
                        except OSError as exc:
                            assert exc.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
                    assert mapping.bytes() == data
                    mount.start()
                    assert len(mounts_at(mount.path)) == 1
                    assert path.read_bytes() == data
                    becomes_passthrough(mount, path)
                    with mount.counting() as grown:
                        assert path.read_bytes() == data
                    assert "fuse_read" not in grown
                    assert "origin_get" not in grown
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


class TestPrograms:
    def test_run_from_the_mount(self, mounted: Mounted, bucket: Bucket) -> None:
        program = shutil.which("echo")
        assert program
        bucket.put("bin/echo", Path(program).read_bytes())
        bucket.put("bin/script", b"#!/bin/sh\nexec ${0%script}echo from a script\n")
        mount = mounted(bucket, file_mode="555")
        for _ in range(3):
            assert run([mount.path / "bin/echo", "hello"]).stdout == "hello\n"
            assert run([mount.path / "bin/script"]).stdout == "from a script\n"
            becomes_passthrough(mount, mount.path / "bin/echo")

    def test_load_libraries_from_the_mount(self, mounted: Mounted, bucket: Bucket) -> None:
        name = ctypes.util.find_library("m")
        assert name
        (library,) = {
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.endswith(f"/{name}")
        } or {in_python(WHERE, name).strip()}
        bucket.put("lib/mine.so", Path(library).read_bytes())
        mount = mounted(bucket)
        for _ in range(3):
            assert in_python(COSINE, mount.path / "lib/mine.so").strip() == "1.0"
            becomes_passthrough(mount, mount.path / "lib/mine.so")
        with mount.counting() as grown:
            assert in_python(COSINE, mount.path / "lib/mine.so").strip() == "1.0"
        assert "fuse_read" not in grown


WHERE = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
print(next(line.split()[-1] for line in open("/proc/self/maps") if line.strip().endswith("/" + sys.argv[1])))
"""

COSINE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
assert any(line.strip().endswith(sys.argv[1]) for line in open("/proc/self/maps"))
library.cos.restype = ctypes.c_double
print(library.cos(ctypes.c_double(0)))
"""


CROWD = """
import mmap, os, random, sys, threading, time
from bench.lab.dataset import content
root, seed, seconds, threads, count = sys.argv[1], sys.argv[2], float(sys.argv[3]), *map(int, sys.argv[4:6])
wrong, until, done = [], time.monotonic() + seconds, 0
sizes = [4000 + 977 * n for n in range(count)]
expected = [content(seed.format(n), sizes[n]) for n in range(count)]
def work(number):
    global done
    dice = random.Random(number * 1000 + os.getpid())
    while time.monotonic() < until:
        which = dice.randrange(count)
        data = expected[which]
        try:
            file = os.open(f"{root}/f{which}", os.O_RDONLY)
            if dice.random() < 0.25:
                with mmap.mmap(file, 0, prot=mmap.PROT_READ) as mapped:
                    os.close(file)
                    got, want = mapped[:], data
            else:
                at = dice.choice([0, dice.randrange(len(data))])
                got, want = os.pread(file, len(data), at), data[at:]
                if dice.random() < 0.1:
                    time.sleep(dice.random() / 20)
                os.close(file)
            if got != want:
                wrong.append((which, len(got), len(want)))
        except OSError as exc:
            wrong.append((which, str(exc)))
        done += 1
workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
for worker in workers: worker.start()
for worker in workers: worker.join()
print(done > threads, len(wrong), wrong[:5])
"""


@pytest.mark.long
def test_a_crowd_over_a_cache_that_is_too_small(mounted: Mounted, bucket: Bucket) -> None:
    """Two hundred threads of four processes open, read, map and close, while what they have open is evicted."""
    count = 120
    for number in range(count):
        bucket.put(f"f{number}", 4000 + 977 * number)
    mount = mounted(bucket, ram="2M", cache_size="3M", block_size="64K", timeout=30)
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", CROWD, mount.path, f"{bucket.name}/f{{}}/1", "8", "50", str(count)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    said = [process.communicate(timeout=60)[0] for process in crowd]
    assert said == ["True 0 []\n"] * 4
    eventually(lambda: mount.status()["open_files"] == 0, "all files are closed")
    counted = mount.settled()
    assert counted["fuse_errors"] == 0
    assert counted["fuse_open"] == counted["fuse_release"]
    assert counted["passthrough_opens"] > 0
    assert counted["evicted_blocks"] > 0
    for tier in mount.status()["tiers"]:
        assert tier["used_bytes"] <= tier["cap_bytes"], tier
    assert sum(path.stat().st_blocks * 512 for path in cache_files(mount)) <= 3 * MIB + 256 * 1024
    read_everything(mount, bucket)
    mount.stop()

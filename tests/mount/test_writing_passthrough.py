"""With --writeback, what is written goes from the kernel to the staging file, and the daemon sees none of it: then it has to
find out by itself what there is to promise, to show and to upload."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.lab.dataset import content
from tests.mount.conftest import Bucket, Mounted
from tests.mount.mounts import Mount, eventually
from tests.mount.written import keys, stored

pytestmark = pytest.mark.backends("native")

MIB = 1 << 20

Writable = Callable[..., Mount]


@pytest.fixture
def writable(mounted: Mounted, bucket: Bucket) -> Writable:
    def make(**options: Any) -> Mount:
        return mounted(bucket, **{"read_only": False, "writeback": True, "upload_delay": "50ms", **options})

    return make


@pytest.fixture
def mount(writable: Writable) -> Mount:
    return writable()


@contextmanager
def without_writes(mount: Mount) -> Iterator[dict[str, int]]:
    with mount.counting() as counts:
        yield counts
    assert "fuse_write" not in counts and counts["passthrough_opens"]


def flushed(mount: Mount) -> None:
    done = mount.cli("flush", mount.path)
    assert done.returncode == 0, done.stderr


def opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    return os.open(path, flags, 0o644)


class LateMapping:
    """A file mapped to be written, kept after its descriptor is closed (Python's own keeps one)."""

    def __init__(self, path: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        fd = os.open(path, os.O_RDWR)
        self.size = os.fstat(fd).st_size
        self._at = self._libc.mmap(None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        os.close(fd)

    def write(self, at: int, data: bytes) -> None:
        ctypes.memmove(self._at + at, data, len(data))

    def close(self) -> None:
        self._libc.munmap(self._at, self.size)


class TestContent:
    @pytest.mark.parametrize("size", [0, 1, 1_000_001, 20 * MIB + 5])
    def test_saved_without_a_write_and_read_back_without_a_request(
        self, mount: Mount, bucket: Bucket, size: int
    ) -> None:
        data = content("saved", size)
        with without_writes(mount):
            with (mount.path / "f").open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                assert os.fstat(file.fileno()).st_size == size
            assert (mount.path / "f").read_bytes() == data
        flushed(mount)
        assert stored(bucket, "f") == data
        with mount.counting() as counts:
            mount.drop_kernel_pages()
            assert (mount.path / "f").read_bytes() == data
        assert "origin_get" not in counts

    def test_read_back_while_it_is_written(self, mount: Mount, bucket: Bucket) -> None:
        with without_writes(mount):
            writer = opened(mount.path / "f")
            reader = opened(mount.path / "f", os.O_RDONLY)
            for number in range(10):
                os.write(writer, b"%d" % number * 1000)
                assert os.fstat(reader).st_size == (mount.path / "f").stat().st_size == 1000 * (number + 1)
                assert os.pread(reader, 1000, 1000 * number) == b"%d" % number * 1000
            os.close(writer)
            assert os.pread(reader, 5, 9000) == b"99999"
        flushed(mount)
        assert stored(bucket, "f")[-1000:] == b"9" * 1000, "a reader does not keep it from the store"
        assert os.pread(reader, 5, 0) == b"00000"
        os.close(reader)

    def test_several_writers_append(self, mount: Mount, bucket: Bucket) -> None:
        code = "import os, sys; fd = os.open('f', os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)\n"
        code += "for n in range(200): os.write(fd, (sys.argv[1] * 99 + '\\n').encode())"
        with without_writes(mount):
            (mount.path / "f").touch()
            first = opened(mount.path / "f", os.O_WRONLY | os.O_TRUNC)
            writers = [subprocess.Popen([sys.executable, "-c", code, w], cwd=mount.path) for w in "abc"]
            assert [writer.wait() for writer in writers] == [0, 0, 0]
            os.close(first)
        flushed(mount)
        lines = stored(bucket, "f").decode().splitlines()
        assert sorted(lines) == sorted(["a" * 99, "b" * 99, "c" * 99] * 200)

    def test_mapped(self, mount: Mount, bucket: Bucket) -> None:
        with without_writes(mount):
            fd = opened(mount.path / "f")
            os.ftruncate(fd, 3 * MIB)
            with mmap.mmap(fd, 3 * MIB) as mapping:
                mapping[MIB : MIB + 6] = b"mapped"
                mapping.flush()
                mapping[2 * MIB :] = content("m", MIB)
            os.close(fd)
        flushed(mount)
        assert stored(bucket, "f") == bytes(MIB) + b"mapped".ljust(MIB, b"\0") + content("m", MIB)

    def test_a_mapping_outlives_its_close(self, mount: Mount, bucket: Bucket) -> None:
        """Nothing says that it is gone but the kernel, when it is asked."""
        data = bytearray(content("late", 2 * MIB))
        keep = opened(mount.path / "f")
        os.write(keep, data)
        mapping = LateMapping(mount.path / "f")
        os.close(keep)
        mapping.write(0, b"late")
        time.sleep(0.6)
        assert keys(bucket) == [], "it is still being written"
        mapping.write(MIB, b"later")
        data[:4], data[MIB : MIB + 5] = b"late", b"later"
        mapping.close()
        flushed(mount)
        assert stored(bucket, "f") == data
        mount.drop_kernel_pages()
        assert (mount.path / "f").read_bytes() == data
        assert mount.metrics()["checksum_failures"] == 0

    def test_cut_and_grown(self, mount: Mount, bucket: Bucket) -> None:
        with without_writes(mount):
            fd = opened(mount.path / "f")
            os.write(fd, b"0123456789")
            os.ftruncate(fd, 4)
            os.truncate(mount.path / "f", 6)
            os.pwrite(fd, b"x", 8)
            assert os.pread(fd, 99, 0) == b"0123\0\0\0\0x"
            os.posix_fallocate(fd, 0, 12)
            assert os.fstat(fd).st_size == 12
            again = opened(mount.path / "f", os.O_WRONLY | os.O_TRUNC)
            assert os.fstat(fd).st_size == 0
            os.write(again, b"again")
            os.close(again)
            os.close(fd)
        flushed(mount)
        assert stored(bucket, "f") == b"again"

    def test_times(self, mount: Mount) -> None:
        path = mount.path / "f"
        fd = opened(path)
        os.write(fd, b"1")
        os.utime(path, ns=(10**18, 10**18))
        assert path.stat().st_mtime_ns == 10**18
        time.sleep(0.02)
        os.write(fd, b"2")
        assert abs(path.stat().st_mtime - time.time()) < 60, "writing moves it on"
        os.utime(path, ns=(10**18, 10**18))
        os.close(fd)
        assert path.stat().st_mtime_ns == 10**18
        flushed(mount)
        assert path.stat().st_mtime_ns == 10**18

    def test_like_a_local_file(self, mount: Mount, bucket: Bucket, tmp_path: Path) -> None:
        """The same at random, by several handles that come and go, here and on the disk."""
        rng = random.Random(7)
        pairs: list[tuple[int, int]] = []
        roots = (mount.path, tmp_path)

        def open_both(flags: int) -> None:
            here, there = (opened(root / "f", flags) for root in roots)
            pairs.append((here, there))

        open_both(os.O_RDWR | os.O_CREAT)
        for _ in range(400):
            pair = rng.choice(pairs)
            action = rng.choice(
                ["write", "write", "write", "read", "cut", "sync", "stat", "open", "close", "all"]
            )
            if action == "write":
                at, data = rng.randrange(300_000), rng.randbytes(rng.choice([1, 100, 70_000]))
                for fd in pair:
                    os.pwrite(fd, data, at)
            elif action == "read":
                at = rng.randrange(300_000)
                assert os.pread(pair[0], 50_000, at) == os.pread(pair[1], 50_000, at)
            elif action == "cut":
                size = rng.randrange(300_000)
                for fd in pair:
                    os.ftruncate(fd, size)
            elif action == "sync":
                os.fsync(pair[0])
            elif action == "stat":
                assert (mount.path / "f").stat().st_size == (tmp_path / "f").stat().st_size
            elif action == "open" and len(pairs) < 6:
                open_both(os.O_RDWR | rng.choice([0, 0, 0, os.O_TRUNC]))
            elif action == "close" or (action == "all" and rng.random() < 0.5):
                for one in [pair] if action == "close" else list(pairs):
                    pairs.remove(one)
                    for fd in one:
                        os.close(fd)
                if not pairs:
                    if rng.random() < 0.5:
                        flushed(mount)
                        assert stored(bucket, "f") == (tmp_path / "f").read_bytes()
                    open_both(os.O_RDWR)
        for fds in pairs:
            for fd in fds:
                os.close(fd)
        flushed(mount)
        assert stored(bucket, "f") == (tmp_path / "f").read_bytes() == (mount.path / "f").read_bytes()


class TestNames:
    def test_renamed_while_it_is_written_and_after(self, mount: Mount, bucket: Bucket) -> None:
        with without_writes(mount) as counts:
            fd = opened(mount.path / "f.tmp")
            os.write(fd, b"before ")
            os.rename(mount.path / "f.tmp", mount.path / "g.tmp")
            os.write(fd, b"after")
            assert (mount.path / "g.tmp").stat().st_size == 12
            os.close(fd)
            os.rename(mount.path / "g.tmp", mount.path / "f")
            flushed(mount)
        assert stored(bucket, "f") == b"before after"
        assert keys(bucket) == ["f"]
        assert "origin_copy" not in counts

    def test_replaced_and_removed_while_it_is_written(self, mount: Mount, bucket: Bucket) -> None:
        old = opened(mount.path / "f")
        os.write(old, b"old")
        (mount.path / "tmp").write_bytes(b"new")
        os.rename(mount.path / "tmp", mount.path / "f")
        os.write(old, b" still")
        assert os.pread(old, 99, 0) == b"old still"
        gone = opened(mount.path / "gone")
        os.write(gone, b"gone")
        os.unlink(mount.path / "gone")
        os.write(gone, b" too")
        assert os.fstat(gone).st_size == 8 and os.fstat(gone).st_nlink == 0
        os.fsync(gone)
        for fd in (old, gone):
            os.close(fd)
        flushed(mount)
        assert keys(bucket) == ["f"]
        assert stored(bucket, "f") == b"new"
        eventually(lambda: not os.listdir(mount.cache / "staging"), "nothing is left")


class TestBesideOthers:
    def test_a_reader_who_came_before_is_served_by_the_daemon_and_so_are_writers(
        self, mount: Mount, bucket: Bucket
    ) -> None:
        (mount.path / "f").write_bytes(b"first")
        reader = opened(mount.path / "f", os.O_RDONLY)
        assert os.read(reader, 99) == b"first"
        writer = opened(mount.path / "f", os.O_WRONLY | os.O_TRUNC)
        os.write(writer, b"second")
        assert os.pread(reader, 99, 0) == b"second"
        os.close(writer)
        os.close(reader)
        flushed(mount)
        assert stored(bucket, "f") == b"second"

    def test_a_file_of_the_cache_that_is_open_and_emptied(self, mount: Mount, bucket: Bucket) -> None:
        """The kernel has the version's own file: it leaves the cache, and is emptied as on a local disk."""
        data = content("old", 3 * MIB)
        (mount.path / "f").write_bytes(data)
        flushed(mount)
        eventually(lambda: mount.metrics().get("adopted_versions"), "the cache has it")
        reader = opened(mount.path / "f", os.O_RDONLY)
        with without_writes(mount):
            (mount.path / "f").write_bytes(b"new")
        assert os.pread(reader, 4 * MIB, 0) == b"new"
        os.close(reader)
        assert (mount.path / "f").read_bytes() == b"new"
        flushed(mount)
        assert stored(bucket, "f") == b"new"

    @pytest.mark.parametrize("writeback", [True, False])
    def test_renamed_and_then_changed_while_its_reader_stays(
        self, writable: Writable, bucket: Bucket, writeback: bool
    ) -> None:
        """The copy at the origin is the same file here, and its reader has that: the name keeps its inode."""
        # Without a RAM tier, so that the file lies on SSD: what lies in RAM is read through the daemon on this mount.
        mount = writable(writeback=writeback, upload_delay="50ms" if writeback else None, ram="0")
        (mount.path / "f").write_bytes(b"first")
        flushed(mount)
        eventually(lambda: mount.metrics().get("adopted_versions"), "the cache has it")
        with mount.counting() as counts:
            reader = opened(mount.path / "f", os.O_RDONLY)
        assert counts["passthrough_opens"] == 1
        os.rename(mount.path / "f", mount.path / "g")
        with (mount.path / "g").open("ab") as writer:
            writer.write(b" second")
        assert os.fstat(reader).st_ino == (mount.path / "g").stat().st_ino
        assert os.pread(reader, 99, 0) == b"first second"
        os.close(reader)
        flushed(mount)
        assert stored(bucket, "g") == b"first second" and keys(bucket) == ["g"]

    def test_changed_again_while_its_readers_stay(self, mount: Mount, bucket: Bucket) -> None:
        """All who have it open share the staging file, which the store has by now."""
        writer = opened(mount.path / "f")
        reader = opened(mount.path / "f", os.O_RDONLY)
        os.write(writer, b"first")
        os.close(writer)
        flushed(mount)
        assert stored(bucket, "f") == b"first"
        with without_writes(mount):
            again = opened(mount.path / "f", os.O_RDWR)
            os.pwrite(again, b"again", 0)
            assert os.pread(reader, 99, 0) == b"again"
            os.close(again)
        flushed(mount)
        assert stored(bucket, "f") == b"again"
        nothing = opened(mount.path / "f", os.O_RDWR)
        os.close(nothing)
        os.close(reader)
        flushed(mount)
        assert (mount.path / "f").read_bytes() == b"again"

    @pytest.mark.parametrize("size", [MIB, 20 * MIB])
    def test_opened_again_while_it_is_uploaded(self, mount: Mount, bucket: Bucket, size: int) -> None:
        """A PUT whose outcome is open is waited for; parts that nobody waits for are broken off."""
        if size > MIB:
            rule = bucket.store.fault("hang", kind="upload_part", key="f")
        else:
            rule = bucket.store.fault("hang", kind="put", key="f", count=1, seconds=1)
        data = bytearray(content("first", size))
        (mount.path / "f").write_bytes(data)
        eventually(lambda: bucket.store.faults_fired().get(rule), "its upload has begun")
        fd = opened(mount.path / "f", os.O_RDWR)
        data[:7] = b"changed"
        os.pwrite(fd, b"changed", 0)
        os.close(fd)
        bucket.store.clear_faults()
        flushed(mount)
        assert stored(bucket, "f") == data
        mount.drop_kernel_pages()
        assert (mount.path / "f").read_bytes() == data

    def test_what_the_cache_has_is_not_written_any_more(self, mount: Mount, bucket: Bucket) -> None:
        for number in range(5):
            data = content(f"{number}", 2 * MIB)
            with (mount.path / "f").open("r+b" if number else "wb") as file:
                file.write(data)
            assert (mount.path / "f").read_bytes() == data
            flushed(mount)
            assert stored(bucket, "f") == data
        mount.drop_kernel_pages()
        assert (mount.path / "f").read_bytes() == data
        assert mount.metrics()["checksum_failures"] == 0


class TestKilled:
    def test_what_was_synced_is_found(self, writable: Writable, bucket: Bucket) -> None:
        mount = writable(upload_delay="1h")
        data = content("synced", 20 * MIB)
        fds = [opened(mount.path / name) for name in ("synced", "not")]
        for fd in fds:
            os.write(fd, data)
        os.fsync(fds[0])
        mount.kill()
        for fd in fds:
            with pytest.raises(OSError):
                os.close(fd)
        mount.start()
        assert os.listdir(mount.path) == ["synced"]
        assert (mount.path / "synced").read_bytes() == data
        flushed(mount)
        assert stored(bucket, "synced") == data

    def test_who_outlives_the_daemon_is_waited_for(self, writable: Writable, bucket: Bucket) -> None:
        """He goes on writing, of which no daemon hears, and only half of it must not be uploaded."""
        mount = writable()
        code = (
            "import os, sys\n"
            "fd = os.open('f', os.O_RDWR | os.O_CREAT, 0o644)\n"
            "os.write(fd, b'synced ')\n"
            "os.fsync(fd)\n"
            "print('synced', flush=True)\n"
            "sys.stdin.readline()\n"
            "os.write(fd, b'and more')\n"
        )
        writer = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=mount.path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None and writer.stdout.readline() == "synced\n"
        mount.kill()
        mount.start()
        time.sleep(0.6)
        assert keys(bucket) == []
        writer.communicate("\n")
        flushed(mount)
        assert stored(bucket, "f") == b"synced and more"

    def test_a_stop_while_it_is_written(self, writable: Writable, bucket: Bucket) -> None:
        mount = writable(flush_deadline=1)
        mount.allowed += ["not at the origin", "given up"]
        fd = opened(mount.path / "f")
        os.write(fd, b"synced")
        os.fsync(fd)
        os.kill(mount.pid, signal.SIGTERM)
        eventually(lambda: "stopped (" in mount.log(), "it ends")
        os.write(fd, b" and more")
        with pytest.raises(OSError):
            os.close(fd)
        mount.start()
        flushed(mount)
        assert stored(bucket, "f") == b"synced and more"

"""Writing through a real mount: what programs see of it, and what is at the store afterwards, as another client reads it."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.lab.dataset import content
from tests.conftest import LEVEL
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, eventually, in_python, run, succeed
from tests.mount.written import keys, stored

MIB = 1 << 20

Writable = Callable[..., Mount]


@pytest.fixture
def writable(mounted: Mounted) -> Writable:
    """A mount of one's own that can be written."""

    def make(source: Bucket | str, **options: Any) -> Mount:
        return mounted(source, **{"read_only": False, **options})

    return make


@pytest.fixture(scope="module")
def shared(module_mounted: Mounted, module_bucket: Bucket) -> Iterator[Mount]:
    yield module_mounted(module_bucket, read_only=False)


_numbers = itertools.count(1)


class Place:
    """A directory of one's own on the shared mount."""

    def __init__(self, mount: Mount, bucket: Bucket) -> None:
        self.mount, self.bucket = mount, bucket
        self.name = f"place-{next(_numbers)}"
        self.path = mount.path / self.name
        self.path.mkdir()

    def stored(self, name: str) -> bytes:
        return stored(self.bucket, f"{self.name}/{name}")

    def names(self) -> list[str]:
        """What is at the store below it, without its own marker."""
        found = keys(self.bucket, f"{self.name}/")
        return [key.removeprefix(f"{self.name}/") for key in found if key != f"{self.name}/"]


@pytest.fixture
def place(shared: Mount, module_bucket: Bucket) -> Place:
    return Place(shared, module_bucket)


def refused(number: int) -> Any:
    """A context in which an OSError of this number is raised."""
    return pytest.raises(OSError, check=lambda exc: exc.errno == number)


class TestContent:
    def test_a_small_file_is_one_request(self, place: Place) -> None:
        with place.mount.counting() as counts:
            (place.path / "f").write_bytes(b"bytes")
        assert place.stored("f") == b"bytes"
        assert counts["origin_put"] == 1
        assert not {"origin_upload", "origin_put_part", "origin_delete", "origin_copy"} & counts.keys()
        assert (place.path / "f").read_bytes() == b"bytes"

    def test_what_a_small_file_takes(self, place: Place, backend: str) -> None:
        """One request, and of messages none that the kernel does not insist on."""
        (place.path / "first").write_bytes(b"x")
        with place.mount.counting() as grown:
            for number in range(20):
                (place.path / f"{number}").write_bytes(b"x" * 10_000)
        took = {name: count / 20 for name, count in grown.items() if count >= 20 or name.startswith("origin")}
        assert {name: took[name] for name in took if name.startswith("origin")} == {
            "origin_put": 1,
            "origin_bytes_sent": 10_000,
        }
        once = {"fuse_lookup", "fuse_create", "fuse_write", "fuse_flush", "fuse_release"}
        assert {name: took[name] for name in once} == dict.fromkeys(once, 1)
        if backend == "native":
            # The directory's, which is another one with each name.
            assert took["fuse_getattr"] == 1

    def test_a_large_file_goes_in_parts_and_is_read_back_from_here(self, place: Place) -> None:
        data = content("large", 20 * MIB + 17)
        with place.mount.counting() as counts:
            (place.path / "f").write_bytes(data)
        assert counts["origin_put_part"] == 3
        assert counts["fuse_write_bytes"] == len(data)
        assert place.stored("f") == data
        place.mount.drop_kernel_pages()
        with place.mount.counting() as counts:
            assert (place.path / "f").read_bytes() == data
        assert "origin_get" not in counts

    def test_empty_files(self, place: Place) -> None:
        (place.path / "f").touch()
        assert place.stored("f") == b""
        assert os.stat(place.path / "f").st_size == 0

    def test_appending(self, place: Place) -> None:
        path = place.path / "f"
        for number in range(3):
            with path.open("ab") as file:
                file.write(b"%d" % number * 1000)
        assert place.stored("f") == b"0" * 1000 + b"1" * 1000 + b"2" * 1000
        one, two = (os.open(path, os.O_WRONLY | os.O_APPEND) for _ in range(2))
        for fd in (one, two, one):
            os.write(fd, b"x")
        os.close(one)
        os.close(two)
        assert place.stored("f")[-4:] == b"2xxx"

    def test_written_at_random_and_read_meanwhile(self, place: Place) -> None:
        rng, expected = random.Random(5), bytearray()
        with (place.path / "f").open("w+b", buffering=0) as file:
            for step in range(150):
                offset, size = rng.randrange(4 * MIB), rng.choice((1, 100, 4096, 70_000, 300_000))
                data = bytes([step & 255]) * size
                expected.extend(bytes(max(0, offset - len(expected))))
                expected[offset : offset + size] = data
                file.seek(offset)
                assert file.write(data) == size
                if step % 10 == 0:
                    to = rng.randrange(len(expected))
                    file.truncate(to)
                    del expected[to:]
                where = rng.randrange(len(expected) + 1)
                file.seek(where)
                assert file.read(50_000) == expected[where : where + 50_000]
                assert os.fstat(file.fileno()).st_size == len(expected)
        assert place.stored("f") == expected
        assert (place.path / "f").read_bytes() == expected

    def test_changing_what_is_in_the_store(self, place: Place) -> None:
        data = bytearray(content("there", 3 * MIB))
        place.bucket.put(f"{place.name}/f", bytes(data))
        place.mount.refresh(place.path)
        with (place.path / "f").open("r+b") as file:
            file.seek(1_000_000)
            file.write(b"changed")
            data[1_000_000:1_000_007] = b"changed"
        assert place.stored("f") == data
        assert (place.path / "f").read_bytes() == data

    @pytest.mark.parametrize("size", [0, 1, 999_999, 1_000_001, 3_000_000])
    def test_truncating(self, place: Place, size: int) -> None:
        data = content("there", 1_000_000)
        (place.path / "f").write_bytes(data)
        os.truncate(place.path / "f", size)
        assert os.stat(place.path / "f").st_size == size
        assert place.stored("f") == data[:size].ljust(size, b"\0")

    def test_truncating_at_open(self, place: Place) -> None:
        (place.path / "f").write_bytes(b"long before")
        (place.path / "f").write_bytes(b"now")
        assert place.stored("f") == b"now"
        os.close(os.open(place.path / "f", os.O_WRONLY | os.O_TRUNC))
        assert place.stored("f") == b""

    def test_opening_to_write_and_not_writing_uploads_nothing(self, place: Place) -> None:
        (place.path / "f").write_bytes(b"there")
        with place.mount.counting() as counts:
            os.close(os.open(place.path / "f", os.O_RDWR))
        assert not {"origin_put", "origin_get"} & counts.keys()

    def test_mapped(self, place: Place) -> None:
        with (place.path / "f").open("w+b") as file:
            file.truncate(2 * MIB)
            with mmap.mmap(file.fileno(), 0) as mapped:
                mapped[5:10] = b"first"
                mapped.flush()
                mapped[MIB : MIB + 6] = b"second"
        expected = bytearray(2 * MIB)
        expected[5:10], expected[MIB : MIB + 6] = b"first", b"second"
        assert (place.path / "f").read_bytes() == expected
        eventually(lambda: place.stored("f") == expected, "what was written to the mapping is in the store")

    def test_sparse(self, place: Place) -> None:
        with (place.path / "f").open("wb") as file:
            file.seek(10 * MIB)
            file.write(b"end")
        assert place.stored("f") == bytes(10 * MIB) + b"end"

    def test_fsync_in_the_middle(self, place: Place) -> None:
        with (place.path / "f").open("wb", buffering=0) as file:
            file.write(b"first")
            os.fsync(file.fileno())
            assert place.stored("f") == b"first"
            file.write(b", second")
        assert place.stored("f") == b"first, second"

    def test_copying_in_the_kernel_is_not_wrong(self, place: Place) -> None:
        data = content("copied", 2 * MIB)
        (place.path / "a").write_bytes(data)
        with (place.path / "a").open("rb") as source, (place.path / "b").open("wb") as target:
            left = len(data)
            while left and (done := os.copy_file_range(source.fileno(), target.fileno(), left)):
                left -= done
        with (place.path / "a").open("rb") as source, (place.path / "c").open("wb") as target:
            at = 0
            while done := os.sendfile(target.fileno(), source.fileno(), at, MIB):
                at += done
        assert place.stored("b") == place.stored("c") == data

    def test_allocating(self, place: Place, backend: str) -> None:
        with (place.path / "f").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 100_000)  # where FUSE is told of it or not: libc writes then
            assert os.fstat(file.fileno()).st_size == 100_000
        assert place.stored("f") == bytes(100_000)

    def test_direct_io(self, place: Place) -> None:
        data = content("direct", 4 * MIB)
        (place.path / "f").touch()
        fd = os.open(place.path / "f", os.O_WRONLY | os.O_DIRECT)
        with mmap.mmap(-1, MIB) as buffer:  # aligned
            for at in range(0, len(data), MIB):
                buffer[:] = data[at : at + MIB]
                assert os.write(fd, buffer) == MIB
        os.close(fd)
        assert place.stored("f") == data


class TestVersions:
    def test_an_overwritten_file_that_the_kernel_reads_by_itself(self, place: Place) -> None:
        before, after = content("one", 300_000), content("two", 300_000)
        (place.path / "f").write_bytes(before)
        for _ in range(3):
            assert (place.path / "f").read_bytes() == before
        for _ in range(2):
            (place.path / "f").write_bytes(after)
            assert (place.path / "f").read_bytes() == after
            before, after = after, before

    def test_a_reader_who_stays_and_a_writer_who_comes(self, place: Place) -> None:
        (place.path / "f").write_bytes(b"before")
        with (place.path / "f").open("rb", buffering=0) as reader:
            assert reader.read(3) == b"bef"
            (place.path / "f").write_bytes(b"after!")
            with (place.path / "f").open("rb") as another:
                assert another.read() == b"after!"
        assert (place.path / "f").read_bytes() == b"after!"

    def test_what_is_written_is_seen_before_it_is_closed(self, place: Place) -> None:
        with (place.path / "f").open("wb", buffering=0) as file:
            file.write(b"so far")
            assert (place.path / "f").read_bytes() == b"so far"
            assert os.stat(place.path / "f").st_size == 6
            assert os.listdir(place.path) == ["f"]
            assert place.names() == []

    def test_another_node_sees_it(self, place: Place, mounted: Mounted) -> None:
        other = mounted(place.bucket, consistency="strict")
        (place.path / "f").write_bytes(b"one")
        assert (other.path / place.name / "f").read_bytes() == b"one"
        (place.path / "f").write_bytes(b"two!")
        assert (other.path / place.name / "f").read_bytes() == b"two!"
        (place.path / "f").unlink()
        eventually(lambda: not (other.path / place.name / "f").exists(), "a walk is over")


class TestNames:
    def test_exclusively(self, place: Place) -> None:
        with (place.path / "f").open("xb") as file:
            file.write(b"mine")
        with refused(errno.EEXIST):
            (place.path / "f").open("xb")
        assert place.stored("f") == b"mine"

    def test_where_there_is_no_directory(self, place: Place) -> None:
        with refused(errno.ENOENT):
            (place.path / "none" / "f").open("wb")
        (place.path / "f").touch()
        with refused(errno.ENOTDIR):
            (place.path / "f" / "g").open("wb")
        with refused(errno.EISDIR):
            place.path.open("wb")

    def test_renaming(self, place: Place) -> None:
        (place.path / "first").write_bytes(b"content")
        # The first copy finds out which conditions the store honours.
        os.rename(place.path / "first", place.path / "a")
        with place.mount.counting() as counts:
            os.rename(place.path / "a", place.path / "b")
        assert place.names() == ["b"]
        assert place.stored("b") == (place.path / "b").read_bytes() == b"content"
        assert not (place.path / "a").exists()
        assert (counts["origin_copy"], counts["origin_delete"]) == (1, 1)

    def test_renaming_over(self, place: Place) -> None:
        for name in "ab":
            (place.path / name).write_bytes(name.encode() * 100)
        os.replace(place.path / "a", place.path / "b")
        assert place.names() == ["b"]
        assert place.stored("b") == (place.path / "b").read_bytes() == b"a" * 100

    def test_written_beside_and_renamed_over(self, place: Place) -> None:
        for version in range(3):
            data = content(f"version {version}", 100_000)
            with (place.path / "f.tmp").open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(place.path / "f.tmp", place.path / "f")
            assert place.stored("f") == (place.path / "f").read_bytes() == data
            assert place.names() == ["f"]

    def test_what_was_renamed_is_read_back_from_here(self, place: Place) -> None:
        data = content("checkpoint", 3 * MIB + 1)
        (place.path / "old").mkdir()
        for _ in range(2):
            (place.path / "old/f.tmp").write_bytes(data)
            os.replace(place.path / "old/f.tmp", place.path / "old/f")
        os.rename(place.path / "old", place.path / "new")
        place.mount.drop_kernel_pages()
        with place.mount.counting() as counts:
            assert (place.path / "new/f").read_bytes() == data
        assert "origin_get" not in counts
        assert place.stored("new/f") == data

    def test_renaming_while_it_is_open(self, place: Place) -> None:
        with (place.path / "a").open("wb", buffering=0) as file:
            file.write(b"one")
            os.rename(place.path / "a", place.path / "b")
            file.write(b" two")
            assert (place.path / "b").read_bytes() == b"one two"
        assert place.names() == ["b"]
        assert place.stored("b") == b"one two"

    def test_renaming_directories(self, place: Place) -> None:
        (place.path / "old/deep").mkdir(parents=True)
        for name in ("old/a", "old/deep/b"):
            (place.path / name).write_bytes(name.encode())
        os.rename(place.path / "old", place.path / "new")
        assert sorted(os.listdir(place.path)) == ["new"]
        assert (place.path / "new/deep/b").read_bytes() == b"old/deep/b"
        assert [key for key in place.names() if not key.endswith("/")] == ["new/a", "new/deep/b"]
        assert not [key for key in place.names() if key.startswith("old")]

    def test_renames_that_are_refused(self, place: Place) -> None:
        (place.path / "d/e").mkdir(parents=True)
        (place.path / "full").mkdir()
        (place.path / "full/f").touch()
        (place.path / "f").touch()
        for old, new, number in (
            ("none", "x", errno.ENOENT),
            ("d", "d/e/x", errno.EINVAL),
            ("d", "full", errno.ENOTEMPTY),
            ("d", "f", errno.ENOTDIR),
            ("f", "d", errno.EISDIR),
        ):
            with refused(number):
                os.rename(place.path / old, place.path / new)

    def test_removing(self, place: Place) -> None:
        (place.path / "f").write_bytes(b"x")
        with place.mount.counting() as counts:
            (place.path / "f").unlink()
        assert counts["origin_delete"] == 1
        assert place.names() == []
        assert os.listdir(place.path) == []
        with refused(errno.ENOENT):
            (place.path / "f").unlink()

    def test_removing_what_is_open(self, place: Place) -> None:
        with (place.path / "f").open("w+b", buffering=0) as file:
            file.write(b"nobody will see this")
            (place.path / "f").unlink()
            file.seek(0)
            assert file.read() == b"nobody will see this"
            file.write(b" nor this")
        assert place.names() == []
        assert not (place.path / "f").exists()

    def test_directories(self, place: Place) -> None:
        (place.path / "d").mkdir()
        assert place.names() == ["d/"]
        assert (place.path / "d").is_dir()
        with refused(errno.EEXIST):
            (place.path / "d").mkdir()
        (place.path / "d/f").touch()
        with refused(errno.ENOTEMPTY):
            (place.path / "d").rmdir()
        (place.path / "d/f").unlink()
        assert os.listdir(place.path / "d") == []
        (place.path / "d").rmdir()
        assert os.listdir(place.path) == []
        assert place.names() == []
        with refused(errno.ENOENT):
            (place.path / "d").rmdir()

    def test_a_directory_that_becomes_empty_stays(self, place: Place) -> None:
        place.bucket.put(f"{place.name}/d/f", b"x")  # without a marker
        place.mount.refresh(place.path)
        (place.path / "d/f").unlink()
        assert os.listdir(place.path / "d") == []
        (place.path / "d/g").write_bytes(b"y")
        assert place.stored("d/g") == b"y"

    def test_trees(self, place: Place) -> None:
        for number in range(40):
            path = place.path / f"t/{number % 4}/{number % 3}"
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{number}").write_bytes(b"%d" % number)
        found = sorted(path.name for path in (place.path / "t").rglob("*") if path.is_file())
        assert found == sorted(str(number) for number in range(40))
        succeed(["rm", "-r", place.path / "t"])
        assert os.listdir(place.path) == []
        assert place.names() == []

    def test_strange_names(self, place: Place) -> None:
        for name in ("with space", "ümlaut", "a%2fb", "quote'\"", "\t", "-rf", "x" * 255):
            (place.path / name).write_bytes(name.encode())
            assert (place.path / name).read_bytes() == name.encode()
            assert place.stored(name) == name.encode()
        with refused(errno.ENAMETOOLONG):
            (place.path / ("x" * 256)).touch()
        with pytest.raises(OSError):
            os.open(os.fsencode(place.path) + b"/\xff\xfe", os.O_WRONLY | os.O_CREAT)
        assert len(os.listdir(place.path)) == len(place.names()) == 7


class TestAttributes:
    def test_modes_owners_and_times_are_kept(self, place: Place) -> None:
        path = place.path / "f"
        path.write_bytes(b"x")
        path.chmod(0o640)
        os.utime(path, ns=(1_500_000_000_123_456_789, 1_500_000_000_123_456_789))
        if os.getuid() == 0:
            os.chown(path, 12, 34)
        shown = path.stat()
        assert stat.S_IMODE(shown.st_mode) == 0o640
        assert shown.st_mtime_ns == 1_500_000_000_123_456_789
        if os.getuid() == 0:
            assert (shown.st_uid, shown.st_gid) == (12, 34)
        assert place.stored("f") == b"x"

    def test_a_mode_given_at_creation(self, place: Place) -> None:
        os.close(os.open(place.path / "f", os.O_WRONLY | os.O_CREAT, 0o700))
        assert stat.S_IMODE((place.path / "f").stat().st_mode) == 0o700

    def test_times_move_with_writes(self, place: Place) -> None:
        path = place.path / "f"
        path.write_bytes(b"x")
        os.utime(path, (1, 1))
        path.write_bytes(b"y")
        assert abs(path.stat().st_mtime - time.time()) < 100

    def test_touching_uploads_nothing(self, place: Place) -> None:
        (place.path / "f").write_bytes(b"x")
        with place.mount.counting() as counts:
            (place.path / "f").touch()
            (place.path / "f").chmod(0o600)
        assert not {"origin_put", "origin_copy"} & counts.keys()

    def test_what_there_is_not(self, place: Place) -> None:
        (place.path / "f").touch()
        with refused(errno.EPERM):
            os.symlink("f", place.path / "l")
        with refused(errno.EPERM):
            os.link(place.path / "f", place.path / "l")
        with refused(errno.EPERM):
            os.mkfifo(place.path / "l")
        with refused(errno.EOPNOTSUPP):
            os.setxattr(place.path / "f", "user.mine", b"x")
        assert os.listdir(place.path) == ["f"]


class TestCloses:
    """Which of them is the last."""

    def test_a_shells_redirection_is_one_upload(self, place: Place) -> None:
        with place.mount.counting() as counts:
            succeed(["sh", "-c", "echo one > f; { echo two; sh -c 'echo three'; } > g"], cwd=place.path)
        assert (place.stored("f"), place.stored("g")) == (b"one\n", b"two\nthree\n")
        assert counts["origin_put"] == 2

    def test_nothing_is_seen_of_a_file_while_its_writer_starts_processes(self, place: Place) -> None:
        with (place.path / "f").open("wb", buffering=0) as file:
            file.write(b"half")
            subprocess.run(["true"], check=True)
            subprocess.run(["true"], check=True, pass_fds=(file.fileno(),))
            if (pid := os.fork()) == 0:
                os._exit(0)
            os.waitpid(pid, 0)
            assert place.names() == []
            file.write(b" and half")
        assert place.stored("f") == b"half and half"

    def test_what_a_child_has_written_is_there_when_its_parent_has_closed(self, place: Place) -> None:
        with (place.path / "f").open("wb") as file:
            subprocess.run(["echo", "from a child"], stdout=file, check=True)
        assert place.stored("f") == b"from a child\n"

    def test_a_pipeline(self, place: Place) -> None:
        succeed(["sh", "-c", "seq 100000 | sort -rn | tee all | head -n 3 > some"], cwd=place.path)
        assert place.stored("some") == b"100000\n99999\n99998\n"
        assert place.stored("all") == place.mount.path.joinpath(place.name, "all").read_bytes()


DENIED = r"(access|Access|denied|Denied|not at the origin|trying again|failed)"


class TestFailures:
    def test_a_close_says_what_the_store_says(self, writable: Writable, bucket: Bucket) -> None:
        mount = writable(bucket, timeout=3)
        mount.allowed.append(DENIED)
        bucket.store.fault("403", kind="put")
        file = (mount.path / "f").open("wb", buffering=0)
        file.write(b"kept")
        with refused(errno.EACCES):
            file.close()
        status = mount.status()["uploads"]
        assert (status["pending"], status["failed"]) == (1, 1)
        assert (mount.path / "f").read_bytes() == b"kept"  # nothing is lost
        refusal = mount.cli("flush", mount.path)
        assert refusal.returncode == 1
        assert "1 file " in refusal.stderr
        bucket.store.clear_faults()
        done = mount.cli("flush", mount.path)
        assert done.returncode == 0, done.stderr
        assert stored(bucket, "f") == b"kept"

    @ONE_BACKEND
    def test_fsync_says_it_too(self, writable: Writable, bucket: Bucket) -> None:
        mount = writable(bucket, timeout=3)
        mount.allowed.append(DENIED)
        bucket.store.fault("403", kind="put", count=1)
        with (mount.path / "f").open("wb", buffering=0) as file:
            file.write(b"kept")
            with refused(errno.EACCES):
                os.fsync(file.fileno())
            os.fsync(file.fileno())
            assert stored(bucket, "f") == b"kept"

    @ONE_BACKEND
    @pytest.mark.parametrize(
        "action",
        ["503", *(pytest.param(action, marks=pytest.mark.long) for action in ("500", "reset")), "lost-reply"],
    )
    def test_a_store_that_stumbles_is_not_seen(self, writable: Writable, bucket: Bucket, action: str) -> None:
        mount = writable(bucket)
        bucket.store.fault(action, kind="put*", count=2)
        bucket.store.fault(action, kind="complete*", count=1)
        for name, size in (("small", 1000), ("large", 20 * MIB)):
            (mount.path / name).write_bytes(content(name, size))
            assert stored(bucket, name) == content(name, size)

    @ONE_BACKEND
    def test_without_a_cache_directory_nothing_that_a_close_refused_is_lost(
        self, writable: Writable, bucket: Bucket
    ) -> None:
        lasting = writable(bucket, start=False, cache_dir="/proc/none", writeback=True)
        lasting.allowed.append("/proc/none")
        assert "--writeback needs a cache directory" in lasting.try_start().stderr
        mount = writable(bucket, cache_dir="/proc/none", flush_deadline=1)
        mount.allowed += [DENIED, "/proc/none", "do not tell who writes them"]  # its state is in memory
        bucket.store.fault("403", kind="put")
        file = (mount.path / "f").open("wb", buffering=0)
        file.write(b"kept")
        with refused(errno.EACCES):
            file.close()
        assert "1 file (4 B) is not at the origin" in mount.umount().stderr
        bucket.store.clear_faults()
        mount.start()
        assert (mount.path / "f").read_bytes() == b"kept"
        mount.stop()
        assert stored(bucket, "f") == b"kept"

    def test_a_store_that_can_only_be_read(self, writable: Writable, bucket: Bucket) -> None:
        bucket.put("f", b"x")
        mount = writable(f"{bucket.store.endpoint}/{bucket.name}/", start=False)
        mount.allowed.append("can only be read|no index page")
        mount.start()
        assert "can only be read" in mount.log()
        assert mount.status()["read_only"]
        with refused(errno.EROFS):
            (mount.path / "new").touch()

    @ONE_BACKEND
    def test_a_writer_who_is_killed_does_not_wait_for_the_store(
        self, writable: Writable, bucket: Bucket
    ) -> None:
        mount = writable(bucket, timeout=30)
        bucket.store.fault("hang", kind="put", count=1)
        code = "import sys; f = open(sys.argv[1], 'wb', buffering=0); f.write(b'kept'); f.close()"
        writer = subprocess.Popen([sys.executable, "-c", code, mount.path / "f"])
        eventually(lambda: mount.status()["uploads"]["uploading"], "it is on its way")
        writer.send_signal(signal.SIGKILL)
        assert writer.wait(10) == -signal.SIGKILL
        bucket.store.clear_faults()
        eventually(lambda: keys(bucket) == ["f"], "it is in the store all the same", 20)
        assert stored(bucket, "f") == b"kept"


class TestReadOnly:
    def test_asked_for(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("f", b"x")
        mount = mounted(bucket)
        with refused(errno.EROFS):
            (mount.path / "f").write_bytes(b"y")
        assert mount.status()["uploads"] is None
        assert mount.cli("flush", mount.path).returncode == 0


class TestWriteback:
    def test_it_is_here_at_once_and_there_later(self, writable: Writable, bucket: Bucket) -> None:
        mount = writable(bucket, writeback=True, upload_delay="30s")
        (mount.path / "f").write_bytes(b"content")
        assert keys(bucket) == []
        assert (mount.path / "f").read_bytes() == b"content"
        status = mount.status()["uploads"]
        assert (status["pending"], status["pending_bytes"]) == (1, 7)
        shown = mount.cli("status", mount.path).stdout
        assert "uploading" in shown and "1 file," in shown
        done = mount.cli("flush", mount.path / "f")
        assert done.returncode == 0, done.stderr
        assert stored(bucket, "f") == b"content"
        assert mount.status()["uploads"]["pending"] == 0

    @ONE_BACKEND
    def test_only_what_is_below_a_path(self, writable: Writable, bucket: Bucket) -> None:
        mount = writable(bucket, writeback=True, upload_delay="30s")
        for name in ("a", "b"):
            (mount.path / name).mkdir()
            (mount.path / name / "f").write_bytes(name.encode())
        mount.cli("flush", mount.path / "b")
        assert [key for key in keys(bucket) if not key.endswith("/")] == ["b/f"]

    @ONE_BACKEND
    def test_temporary_files_are_never_uploaded(self, writable: Writable, bucket: Bucket) -> None:
        mount = writable(bucket, writeback=True, upload_delay="30s")
        with mount.counting() as counts:
            for version in range(3):
                (mount.path / "f.tmp").write_bytes(content(f"{version}", 50_000))
                os.replace(mount.path / "f.tmp", mount.path / "f")
            (mount.path / "gone").write_bytes(b"x")
            (mount.path / "gone").unlink()
            mount.cli("flush", mount.path)
        assert counts["origin_put"] == 1
        assert "origin_copy" not in counts
        assert stored(bucket, "f") == content("2", 50_000)
        assert keys(bucket) == ["f"]

    def test_unmounting_waits_for_it(self, writable: Writable, bucket: Bucket) -> None:
        mount = writable(bucket, writeback=True, upload_delay="1h")
        for number in range(5):
            (mount.path / f"{number}").write_bytes(b"%d" % number)
        assert keys(bucket) == []
        mount.stop()
        assert keys(bucket) == [f"{number}" for number in range(5)]

    @pytest.mark.long
    @ONE_BACKEND
    def test_a_signal_waits_for_it_and_a_second_one_does_not(
        self, writable: Writable, bucket: Bucket
    ) -> None:
        mount = writable(bucket, writeback=True, upload_delay="1h")
        mount.allowed.append("not at the origin")
        (mount.path / "f").write_bytes(b"kept")
        bucket.store.fault("hang", kind="put")
        os.kill(mount.pid, signal.SIGTERM)
        eventually(lambda: "uploading 1 file " in mount.log(), "it waits")
        os.kill(mount.pid, signal.SIGTERM)
        eventually(lambda: "stopped (" in mount.log(), "it ends")
        bucket.store.clear_faults()
        mount.start()
        assert (mount.path / "f").read_bytes() == b"kept"
        mount.stop()
        assert stored(bucket, "f") == b"kept"

    @pytest.mark.long
    @ONE_BACKEND
    def test_unmounting_that_must_not_leave_anything(self, writable: Writable, bucket: Bucket) -> None:
        mount = writable(bucket, writeback=True, upload_delay="1h", flush_deadline=2, timeout=2)
        mount.allowed.append(DENIED)
        (mount.path / "f").write_bytes(b"kept")
        bucket.store.fault("hang", kind="put")
        hung = mount.umount()
        assert hung.returncode == 0, hung.stderr
        assert "1 file (4 B) is not at the origin" in hung.stderr
        bucket.store.clear_faults()
        bucket.store.fault("403", kind="put")
        mount.start()
        refusal = mount.umount("--flush")
        assert refusal.returncode == 1
        assert "is not unmounted: 1 file (4 B) is not at the origin" in refusal.stderr
        left = mount.umount()
        assert left.returncode == 0
        assert "1 file (4 B) is not at the origin" in left.stderr
        bucket.store.clear_faults()
        mount.start()
        done = mount.umount("--flush")
        assert done.returncode == 0, done.stderr
        assert stored(bucket, "f") == b"kept"

    @ONE_BACKEND
    def test_a_read_only_mount_says_that_something_waits(self, writable: Writable, bucket: Bucket) -> None:
        mount = writable(bucket, writeback=True, upload_delay="1h")
        mount.allowed += ["mount it without --read-only", "not at the origin", "--writeback has no effect"]
        (mount.path / "f").write_bytes(b"kept")
        mount.kill()
        mount.start(read_only=True)
        assert any("without --read-only" in line for line in mount.status()["warnings"])
        mount.stop()
        mount.start()
        mount.stop()
        assert stored(bucket, "f") == b"kept"


class TestKilled:
    def test_what_was_acknowledged_comes_back(self, writable: Writable, bucket: Bucket) -> None:
        mount = writable(bucket, writeback=True, upload_delay="1h")
        large = content("large", 20 * MIB)
        (mount.path / "d").mkdir()
        for name, data in (("small", b"s"), ("d/large", large), ("empty", b"")):
            (mount.path / name).write_bytes(data)
        file = (mount.path / "synced").open("wb", buffering=0)
        file.write(b"synced")
        os.fsync(file.fileno())
        unfinished = (mount.path / "unfinished").open("wb", buffering=0)
        unfinished.write(b"half")
        mount.kill()
        for gone in (file, unfinished):
            with pytest.raises(OSError):
                gone.close()
        assert [key for key in keys(bucket) if not key.endswith("/")] == []
        mount.start()
        assert (mount.path / "d/large").read_bytes() == large
        assert (mount.path / "small").read_bytes() == b"s"
        assert not (mount.path / "unfinished").exists()
        done = mount.cli("flush", mount.path)
        assert done.returncode == 0, done.stderr
        found = [key for key in keys(bucket) if not key.endswith("/")]
        assert found == ["d/large", "empty", "small", "synced"]
        assert stored(bucket, "d/large") == large
        assert stored(bucket, "synced") == b"synced"

    @ONE_BACKEND
    def test_durably_what_was_closed_is_there_and_the_rest_is_not(
        self, writable: Writable, bucket: Bucket
    ) -> None:
        mount = writable(bucket)
        (mount.path / "closed").write_bytes(b"closed")
        unfinished = (mount.path / "unfinished").open("wb", buffering=0)
        unfinished.write(content("half", 20 * MIB))
        mount.kill()
        with pytest.raises(OSError):
            unfinished.close()
        assert keys(bucket) == ["closed"]
        mount.start()
        assert os.listdir(mount.path) == ["closed"]
        assert (mount.path / "closed").read_bytes() == b"closed"

    @ONE_BACKEND
    def test_at_any_moment(self, writable: Writable, bucket: Bucket) -> None:
        """Files one after the other, each closed before the next: what was closed is found after every kill."""
        mount = writable(bucket, writeback=True, upload_delay="50ms")
        code = (
            "import os, sys\n"
            "for number in range(10**6):\n"
            "    name = f'{sys.argv[1]}-{number}'\n"
            "    with open('tmp', 'wb') as f: f.write(name.encode() * 1000)\n"
            "    os.rename('tmp', name)\n"
            "    print(name, flush=True)\n"
        )
        written: list[str] = []
        for round_ in range(2 if LEVEL == "short" else 3):
            writer = subprocess.Popen(
                [sys.executable, "-c", code, f"{round_}"],
                cwd=mount.path,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert writer.stdout is not None
            seen = [writer.stdout.readline().strip() for _ in range(10 + 7 * round_)]
            mount.kill()
            seen += writer.stdout.read().split()
            writer.wait(20)
            written += seen
            mount.start()
            for name in written:
                assert (mount.path / name).read_bytes() == name.encode() * 1000
        mount.stop()
        assert set(written) <= set(keys(bucket))
        for name in written:
            assert stored(bucket, name) == name.encode() * 1000


def test_many_at_once(place: Place) -> None:
    code = (
        "import sys, threading, pathlib\n"
        "def work(n):\n"
        "    for m in range(20): pathlib.Path(f'{n}-{m}').write_bytes(b'%d' % (n * m) * 3000)\n"
        "threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    in_python(code, cwd=place.path)
    assert len(os.listdir(place.path)) == len(place.names()) == 160
    for n, m in ((0, 0), (3, 7), (7, 19)):
        assert place.stored(f"{n}-{m}") == b"%d" % (n * m) * 3000


@pytest.mark.root
def test_other_users_may_do_what_the_modes_say(writable: Writable, bucket: Bucket, tmp_path: Path) -> None:
    mount = writable(bucket, allow_other=True, file_mode="644", dir_mode="755")
    for above in (mount.path, *mount.path.parents):
        if above.stat().st_uid == 0 and not above.stat().st_mode & 1:
            above.chmod(above.stat().st_mode | 0o11)
        if above == Path("/tmp"):
            break
    (mount.path / "f").write_bytes(b"x")
    (mount.path / "open").mkdir()
    (mount.path / "open").chmod(0o777)
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c"]
    assert run([*as_nobody, f"echo y > {mount.path}/f"]).returncode != 0
    assert run([*as_nobody, f"echo y > {mount.path}/new"]).returncode != 0
    done = run([*as_nobody, f"echo y > {mount.path}/open/new && cat {mount.path}/open/new"])
    assert (done.returncode, done.stdout) == (0, "y\n"), done.stderr
    assert (mount.path / "open/new").stat().st_uid == 65534
    assert (mount.path / "f").read_bytes() == b"x"

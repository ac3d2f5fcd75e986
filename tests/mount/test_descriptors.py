"""All descriptors of one file on one node show one content, whichever was opened first: a reader that was there before the
writer, in the same process and in another, sees what a local disk would show it, and their locks meet."""

from __future__ import annotations

import fcntl
import mmap
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import duckdb
import lmdb
import pytest

from bench.lab.dataset import content
from tests.mount import forked
from tests.mount.conftest import Bucket, Mounted
from tests.mount.mounts import Mount, eventually, in_python
from tests.mount.test_writing_passthrough import LateMapping
from tests.mount.written import stored

MIB = 1 << 20
SIZE = 3 * MIB + 5


@pytest.fixture(params=["durable", pytest.param("writeback", marks=pytest.mark.long)])
def mount(request: pytest.FixtureRequest, mounted: Mounted, bucket: Bucket) -> Mount:
    """Without RAM, so that a file that was read is whole on disk, and opened in passthrough where there is that."""
    return mounted(
        bucket, read_only=False, ram=0, writeback=request.param == "writeback", upload_delay="50ms"
    )


def settle(mount: Mount, backend: str, *names: str) -> None:
    """Have the files whole in the cache: the next open is in passthrough, where the backend has that."""
    for name in names:
        (mount.path / name).read_bytes()
    if backend == "native":
        eventually(lambda: all(_in_passthrough(mount, name) for name in names), "they are whole")


def _in_passthrough(mount: Mount, name: str) -> bool:
    before = mount.metrics()["passthrough_opens"]
    os.close(os.open(mount.path / name, os.O_RDONLY))
    return mount.metrics()["passthrough_opens"] > before


def flushed(mount: Mount) -> None:
    done = mount.cli("flush", mount.path)
    assert done.returncode == 0, done.stderr


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"appended")


def patch(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, b"patched", 4096 - 3)
    os.close(fd)


def patch_mapped(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[4096 - 3 : 4096 + 3] = b"mapped"


def truncate(path: Path) -> None:
    os.truncate(path, 5000)


def ftruncate(path: Path) -> None:
    with path.open("r+b") as file:
        os.ftruncate(file.fileno(), 5001)


def lengthen(path: Path) -> None:
    os.truncate(path, SIZE + 4096)


def empty_and_write(path: Path) -> None:
    with path.open("wb") as file:
        file.write(content("new", 6000))


CHANGES = [append, patch, patch_mapped, truncate, ftruncate, lengthen, empty_and_write]


def by_this_process(change: Callable[[Path], None], path: Path) -> None:
    change(path)


def by_another(change: Callable[[Path], None], path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.mount import test_descriptors\n"
    code += "getattr(test_descriptors, sys.argv[1])(Path(sys.argv[2]))"
    in_python(code, change.__name__, path, cwd=Path(__file__).parents[2])


class TestAReaderThatWasThereBefore:
    @pytest.mark.parametrize("writer", [by_this_process, pytest.param(by_another, marks=pytest.mark.long)])
    @pytest.mark.parametrize("change", CHANGES)
    def test_sees_the_change(
        self,
        mount: Mount,
        bucket: Bucket,
        backend: str,
        tmp_path: Path,
        change: Callable[[Path], None],
        writer: Callable[[Callable[[Path], None], Path], None],
    ) -> None:
        path, there = mount.path / "f", tmp_path / "f"
        there.write_bytes(bucket.put("f", SIZE))
        settle(mount, backend, "f")
        reader = os.open(path, os.O_RDONLY)
        number = os.fstat(reader).st_ino
        with mmap.mmap(reader, 0, access=mmap.ACCESS_READ) as mapping:
            assert mapping[:] == there.read_bytes()
            writer(change, path)
            change(there)
            wanted = there.read_bytes()
            found = os.fstat(reader)
            assert (found.st_size, found.st_ino) == (len(wanted), number)
            assert os.stat(path).st_ino == number
            assert os.pread(reader, SIZE + MIB, 0) == wanted
            assert os.read(reader, SIZE + MIB) == wanted
            assert mapping[: min(SIZE, len(wanted))] == wanted[:SIZE]
            assert path.read_bytes() == wanted
        flushed(mount)
        assert stored(bucket, "f") == wanted
        assert os.pread(reader, SIZE + MIB, 0) == wanted
        os.close(reader)
        eventually(lambda: path.read_bytes() == wanted, "it is settled")
        mount.drop_kernel_pages()
        assert path.read_bytes() == wanted
        assert mount.metrics()["checksum_failures"] == 0

    def test_sees_the_next_change_too_and_so_does_who_came_between(
        self, mount: Mount, bucket: Bucket, backend: str
    ) -> None:
        data = bytearray(bucket.put("f", SIZE))
        path = mount.path / "f"
        settle(mount, backend, "f")
        readers = [os.open(path, os.O_RDONLY)]
        for number in range(4):
            data[number * MIB : number * MIB + 6] = b"%06d" % number
            with path.open("r+b") as file:
                file.seek(number * MIB)
                file.write(b"%06d" % number)
                readers.append(os.open(path, os.O_RDONLY))
                file.flush()
                assert {os.pread(reader, SIZE + MIB, 0) for reader in readers} == {bytes(data)}
            if number % 2:
                flushed(mount)
                assert stored(bucket, "f") == data
        assert len({os.fstat(reader).st_ino for reader in readers}) == 1
        assert path.stat().st_ino == os.fstat(readers[0]).st_ino
        for reader in readers:
            assert os.pread(reader, SIZE + MIB, 0) == data
            os.close(reader)
        assert path.read_bytes() == data

    def test_follows_a_log(self, mount: Mount, bucket: Bucket, backend: str) -> None:
        """As tail -f does it: what is behind the position is read when the size grows."""
        bucket.put("log", b"first\n")
        path = mount.path / "log"
        settle(mount, backend, "log")
        with path.open("rb") as reader:
            assert reader.read() == b"first\n"
            with path.open("ab") as writer:
                for number in range(5):
                    writer.write(b"%d\n" % number)
                    writer.flush()
                    assert os.fstat(reader.fileno()).st_size == reader.tell() + 2
                    assert reader.read() == b"%d\n" % number
            by_another(append, path)
            assert reader.read() == b"appended"
        flushed(mount)
        assert stored(bucket, "log") == path.read_bytes() == b"first\n0\n1\n2\n3\n4\nappended"

    def test_sees_what_is_mapped_and_outlives_its_close(
        self, mount: Mount, bucket: Bucket, backend: str
    ) -> None:
        """Stores into a mapping reach the readers at once, and the store when it is closed, or after."""
        data = bytearray(bucket.put("f", SIZE))
        path = mount.path / "f"
        settle(mount, backend, "f")
        reader = os.open(path, os.O_RDONLY)
        mapping = LateMapping(path)
        for number in range(3):
            mapping.write(number * MIB, b"%06d" % number)
            data[number * MIB : number * MIB + 6] = b"%06d" % number
            assert os.pread(reader, SIZE, 0) == data
        os.close(reader)
        mapping.write(5, b"late")
        data[5:9] = b"late"
        mapping.close()
        eventually(lambda: flushed(mount) or stored(bucket, "f") == data, "the store has it")
        mount.drop_kernel_pages()
        assert path.read_bytes() == data
        assert mount.metrics()["checksum_failures"] == 0


class TestLocks:
    """A lock belongs to the inode, so it is the inode that all descriptors must share."""

    def test_of_flock_meet(self, mount: Mount, bucket: Bucket, backend: str) -> None:
        bucket.put("f", SIZE)
        settle(mount, backend, "f")
        reader = os.open(mount.path / "f", os.O_RDONLY)
        fcntl.flock(reader, fcntl.LOCK_EX)
        writer = os.open(mount.path / "f", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        code = "import fcntl, sys\ntry: fcntl.flock(open(sys.argv[1], sys.argv[2]), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        code += "except BlockingIOError: print('locked', end='')"
        assert in_python(code, mount.path / "f", "r+b") == "locked"
        os.pwrite(writer, b"x", 0)
        assert in_python(code, mount.path / "f", "rb") == "locked"
        os.close(reader)
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(writer)

    def test_of_fcntl_meet(self, mount: Mount, bucket: Bucket, backend: str) -> None:
        bucket.put("f", SIZE)
        settle(mount, backend, "f")
        reader = os.open(mount.path / "f", os.O_RDONLY)
        fcntl.lockf(reader, fcntl.LOCK_SH, 10, 100)
        code = "import fcntl, sys\nwith open(sys.argv[1], 'r+b') as file:\n"
        code += "    for at in (90, 105):\n        try: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, at)\n"
        code += "        except BlockingIOError: print(at, end='')\n    file.write(b'x')"
        assert in_python(code, mount.path / "f") == "105"
        assert os.pread(reader, 1, 0) == b"x"
        os.close(reader)


class TestDatabases:
    @pytest.mark.parametrize("journal", ["delete", "wal"])
    def test_sqlite_with_a_reader_that_came_first(
        self, mount: Mount, bucket: Bucket, backend: str, tmp_path: Path, journal: str
    ) -> None:
        bucket.put("db", _sqlite(tmp_path / "db"))
        settle(mount, backend, "db")
        path = mount.path / "db"
        reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        assert reader.execute("select count(*) from t").fetchone() == (1,)
        code = "import sqlite3, sys\ndb = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        code += "db.execute('pragma journal_mode=' + sys.argv[2])\n"
        code += "for n in range(50): db.execute('insert into t values (?)', (n,))\n"
        code += "print(db.execute('select count(*) from t').fetchone()[0], end='')\n"
        code += "sys.stdout.flush(); sys.stdin.read()"
        with _running(code, path, journal) as writer:
            assert writer.stdout is not None
            assert writer.stdout.read(2) == "51"
            assert reader.execute("select count(*) from t").fetchone() == (51,)
            assert reader.execute("pragma integrity_check").fetchone() == ("ok",)
            reader.execute("begin")
            assert reader.execute("select sum(x) from t").fetchone() == (1225,)
            other = sqlite3.connect(path, isolation_level=None, timeout=0)
            if journal == "delete":  # its reader holds the shared lock, and a writer gets no exclusive one
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    other.execute("insert into t values (1)")
                reader.execute("commit")
            other.execute("insert into t values (1)")
            other.close()
            if journal == "wal":
                assert reader.execute("select sum(x) from t").fetchone() == (1225,)
                reader.execute("commit")
            assert reader.execute("select sum(x) from t").fetchone() == (1226,)
        reader.close()
        flushed(mount)
        with closing(sqlite3.connect(path)) as again:
            assert again.execute("select count(*) from t").fetchone() == (52,)
            assert again.execute("pragma integrity_check").fetchone() == ("ok",)

    def test_lmdb_with_a_reader_that_came_first(
        self, mount: Mount, bucket: Bucket, backend: str, tmp_path: Path
    ) -> None:
        with lmdb.open(str(tmp_path / "db"), map_size=MIB) as made, made.begin(write=True) as txn:
            txn.put(b"n", b"0")
        bucket.put("db/data.mdb", (tmp_path / "db" / "data.mdb").read_bytes())
        settle(mount, backend, "db/data.mdb")
        with lmdb.open(str(mount.path / "db"), map_size=MIB, readonly=True) as reader:
            with reader.begin() as txn:
                assert txn.get(b"n") == b"0"
            code = "import lmdb, sys\nwith lmdb.open(sys.argv[1], map_size=1 << 20) as db:\n"
            code += "    for n in range(1, 31):\n        with db.begin(write=True) as txn: txn.put(b'n', b'%d' % n)"
            in_python(code, mount.path / "db")
            with reader.begin() as txn:
                assert (txn.get(b"n"), txn.id()) == (b"30", 31)
        flushed(mount)

    def test_duckdb_opened_twice(self, mount: Mount, bucket: Bucket, backend: str, tmp_path: Path) -> None:
        """A second process is refused while one writes, and a writer while one reads, as on a local disk."""
        local = tmp_path / "db"
        with duckdb.connect(local) as made:
            made.execute("create table t as select range as x from range(100000)")
        bucket.put("db", local.read_bytes())
        settle(mount, backend, "db")
        expected = _duckdb_opened_twice(local)
        assert expected[2].startswith("IO Error: Could not set lock on file") and expected[-1] == "100003"
        assert _duckdb_opened_twice(mount.path / "db") == expected
        flushed(mount)
        (again := tmp_path / "again").write_bytes(stored(bucket, "db"))
        with duckdb.connect(again, read_only=True) as db:
            assert db.execute("select count(*) from t").fetchone() == (100003,)


def _duckdb_opened_twice(path: Path) -> list[str]:
    """What each of several programs saw of one database, beside a reader and beside a writer."""
    code = """
import duckdb, sys
path, writes = sys.argv[1:]
try:
    with duckdb.connect(path, read_only=not writes) as db:
        if writes: db.execute("insert into t select max(x) + 1 from t")
        print(db.execute("select count(*) from t").fetchone()[0], end="")
except duckdb.IOException as exc:
    print(str(exc).split('"')[0], end="")
"""
    reader, writer = (path, ""), (path, "yes")
    seen: list[str] = []

    def beside(db: duckdb.DuckDBPyConnection) -> None:
        seen.extend(in_python(code, *program) for program in (reader, reader, writer))
        seen.append(str(db.execute("select count(*) from t").fetchone()))

    with duckdb.connect(path, read_only=True) as db:
        assert db.execute("select max(x) from t").fetchone() == (99999,)
        beside(db)
    seen.append(in_python(code, *writer))
    with duckdb.connect(path) as db:
        db.execute("insert into t select max(x) + 1 from t")
        beside(db)
    seen += [in_python(code, *writer), in_python(code, *reader)]
    return seen


def _sqlite(path: Path) -> bytes:
    with sqlite3.connect(path) as db:
        db.execute("create table t (x)")
        db.execute("insert into t values (0)")
    db.close()
    return path.read_bytes()


@contextmanager
def _running(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python program that ends when this does."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        with suppress(OSError):
            process.kill()
        process.wait(30)


class TestWhatItCosts:
    def test_nothing_where_nothing_is_written(self, mount: Mount, bucket: Bucket, backend: str) -> None:
        """Files of a mount that can be written are read without the daemon, as on one that cannot."""
        data = {f"d/{number}": bucket.put(f"d/{number}", MIB + number) for number in range(5)}
        settle(mount, backend, *data)
        (mount.path / "d" / "new").write_bytes(b"new")
        with mount.counting() as counts:
            for name, wanted in data.items():
                fd = os.open(mount.path / name, os.O_RDONLY)
                if backend == "native":
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                assert os.pread(fd, 2 * MIB, 0) == wanted
                os.close(fd)
        assert "fuse_read" not in counts
        assert counts.get("passthrough_opens", 0) == (5 if backend == "native" else 0)
        flushed(mount)

    def test_no_upload_and_no_fetch_where_nothing_is_changed(
        self, mount: Mount, bucket: Bucket, backend: str
    ) -> None:
        data = bucket.put("f", SIZE)
        path = mount.path / "f"
        settle(mount, backend, "f")
        before = path.stat()
        reader = os.open(path, os.O_RDONLY)
        with mount.counting() as counts:
            for _ in range(3):
                os.close(os.open(path, os.O_RDWR))
            assert os.pread(reader, SIZE, 0) == data
            os.close(reader)
            after = path.stat()
            flushed(mount)
            assert path.read_bytes() == data
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
        assert not {"origin_put", "origin_get", "uploaded_files"} & counts.keys()

    def test_files_in_memory_are_read_through_the_page_cache(
        self, mounted: Mounted, bucket: Bucket, backend: str
    ) -> None:
        """A file in memory cannot become a staging file."""
        mount = mounted(bucket, read_only=False)
        data = bucket.put("f", MIB)
        path = mount.path / "f"
        assert path.read_bytes() == data
        with mount.counting() as counts:
            reader = os.open(path, os.O_RDONLY)
            assert os.pread(reader, MIB, 0) == data
        assert not {"fuse_read", "passthrough_opens"} & counts.keys()
        append(path)
        assert os.pread(reader, 2 * MIB, 0) == data + b"appended"
        os.close(reader)
        flushed(mount)


class TestSources:
    def test_a_directory_of_this_machine(self, mounted: Mounted, backend: str, tmp_path: Path) -> None:
        (tmp_path / "source").mkdir()
        there = tmp_path / "source" / "f"
        there.write_bytes(content("f", MIB))
        mount = mounted(f"file://{there.parent}", read_only=False, ram=0)
        settle(mount, backend, "f")
        path = mount.path / "f"
        with path.open("rb") as reader:
            fcntl.flock(reader, fcntl.LOCK_EX)
            for change in (append, patch, truncate, empty_and_write):
                change(path)
                assert os.pread(reader.fileno(), 2 * MIB, 0) == there.read_bytes()
                assert os.fstat(reader.fileno()).st_size == there.stat().st_size
            with path.open("r+b") as writer, pytest.raises(BlockingIOError):
                fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert path.read_bytes() == content("new", 6000)


class TestKilled:
    def test_a_change_that_was_not_closed_is_no_change(
        self, mount: Mount, bucket: Bucket, backend: str
    ) -> None:
        """The cache has given the file away: it is fetched again, and never what was half written into it."""
        data = bucket.put("f", SIZE)
        path = mount.path / "f"
        settle(mount, backend, "f")
        reader, writer = os.open(path, os.O_RDONLY), os.open(path, os.O_RDWR)
        os.pwrite(writer, b"half", 0)
        assert os.pread(reader, 4, 0) == b"half"
        mount.kill()
        if backend == "native":
            assert os.pread(reader, SIZE, 0) == b"half" + data[4:], "the kernel has it"
        for fd in (reader, writer):
            with suppress(OSError):
                os.close(fd)
        mount.start()
        assert path.read_bytes() == data == stored(bucket, "f")
        assert mount.metrics()["checksum_failures"] == 0
        assert not os.listdir(mount.cache / "staging")

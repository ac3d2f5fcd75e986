"""The only file that opens LMDB: rows come back as written, damage is never taken for data, nobody shares a directory."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import lmdb
import pytest

from cachefs.base import database, durable
from cachefs.base.database import Database, read_mark
from cachefs.base.errors import CacheInUse, CacheUnusable, NoRoom
from cachefs.config.config import Config
from cachefs.fs.tree import FORMAT as TREE
from cachefs.upload.journal import FORMAT as JOURNAL
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("descriptors")

TABLES = ["a", "b"]

LEAF = 2
"""The flag of LMDB's pages that hold rows. Flags are at byte 10 of a page, the end of its free space at 14."""


def opened(path: Path, version: str = "v1", fsync: bool = True) -> Database:
    return Database(path, TABLES, version=version, fsync=fsync)


def child(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    head = "import os, sys, signal\nfrom pathlib import Path\nfrom cachefs.base.database import Database\n"
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script), *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


KILLED = """
    db = Database(Path(sys.argv[1]), ["a", "b"], version="v1", fsync=sys.argv[2] == "fsync")
    for n in range(50):
        db.write([("a", b"%03d" % n, b"value %d" % n), ("b", b"%03d" % n, b"x" * 3000)])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_commit_beside_a_look_at_the_file_is_no_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread makes the file longer between the look at its length and the comparison."""
    db = opened(tmp_path / "db")
    db.write([("a", b"k", b"v")])
    length, committed = database._Environment.length, threading.Event()

    def beside(self: Any) -> int:
        found = length(self)
        if not committed.is_set():
            committed.set()
            rows = [("a", b"%06d" % number, bytes(1000)) for number in range(2000)]
            thread = threading.Thread(target=db.write, args=(rows,))
            thread.start()
            thread.join()
            assert length(self) > found
        return found

    monkeypatch.setattr(database._Environment, "length", beside)
    assert db.get("a", b"k") == b"v"
    db.close()


def test_rows_come_back_in_key_order(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    keys = [b"b", b"a", b"\xff", b"\x00", b"ab", b"a\x00"]
    db.write([("a", k, b"v" + k) for k in keys])
    assert [k for k, _ in db.scan("a")] == sorted(keys)
    assert db.scan("a", b"a", b"b") == [(k, b"v" + k) for k in (b"a", b"a\x00", b"ab")]
    assert db.scan("a", b"a", limit=1) == [(b"a", b"va")]
    assert db.scan("a", limit=0) == []
    assert db.scan("a", b"zzz\xff") == [(b"\xff", b"v\xff")]
    assert db.scan("a", b"\xff\xff") == []
    assert db.get_many("a", [b"a", b"missing", b"b"]) == [b"va", None, b"vb"]
    assert db.get("b", b"a") is None
    assert (db.count("a"), db.count("b")) == (6, 0)
    db.close()


def test_a_range_is_deleted_before_the_puts_of_the_same_write(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    db.write([("a", b"%02d" % n, b"old") for n in range(20)])
    db.write(
        [("a", b"07", b"new"), ("a", b"03", None), ("a", b"missing", None)], ranges=[("a", b"05", b"15")]
    )
    assert db.scan("a") == [
        (b"%02d" % n, b"new" if n == 7 else b"old") for n in (0, 1, 2, 4, 7, *range(15, 20))
    ]
    db.write([], ranges=[("a", b"15", b"\xff"), ("b", b"", b"\xff")])
    assert db.count("a") == 5
    db.close()


def test_a_failed_write_leaves_nothing_of_itself(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    with pytest.raises(CacheUnusable):
        db.write([("a", b"good", b"1"), ("a", b"x" * 600, b"too long a key")])
    assert db.count("a") == 0
    db.write([("a", b"good", b"2")])
    assert db.get("a", b"good") == b"2"
    db.close()


@pytest.mark.parametrize("fsync", [True, False])
def test_a_clean_close_is_believed(tmp_path: Path, fsync: bool) -> None:
    db = opened(tmp_path / "db", fsync=fsync)
    assert (db.was_clean, db.dropped) == (False, None)
    db.write([("a", b"k", b"v")])
    db.close()
    db.close()
    again = opened(tmp_path / "db", fsync=fsync)
    assert (again.was_clean, again.dropped) == (True, None)
    assert again.get("a", b"k") == b"v"
    again.close()


@pytest.mark.parametrize("fsync", ["fsync", "no"])
def test_rows_survive_a_kill_but_it_is_not_clean(tmp_path: Path, fsync: str) -> None:
    assert child(KILLED, str(tmp_path / "db"), fsync).returncode == -9
    db = opened(tmp_path / "db", fsync=fsync == "fsync")
    assert (db.was_clean, db.dropped) == (False, None)
    assert db.count("a") == 50
    db.close()


@pytest.mark.parametrize("fsync", ["fsync", "no"])
def test_what_a_killed_process_left_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: str
) -> None:
    """Where it is known that nothing else ended it. After a reboot that knowledge is worth nothing."""
    rewritten: list[Path] = []

    def rewrite(path: Path, *rest: object) -> str | None:
        rewritten.append(path)
        return real(path, *rest)

    real = database._rewrite
    monkeypatch.setattr(database, "_rewrite", rewrite)
    path = tmp_path / "db"
    assert child(KILLED, str(path), fsync).returncode == -9
    synced = fsync == "fsync"
    db = Database(path, TABLES, version="v1", fsync=synced, killed=True)
    assert (db.was_clean, db.dropped, db.count("a"), rewritten) == (False, None, 50, [])
    db.write([("a", b"k", b"v")])
    db.close()

    assert child(KILLED, str(path), fsync).returncode == -9
    monkeypatch.setattr(database, "boot_id", lambda: "another boot")
    db = Database(path, TABLES, version="v1", fsync=synced, killed=True)
    assert (db.dropped is None, rewritten) == (synced, [path] if synced else [])
    db.close()


def test_after_a_kill_no_page_of_the_old_file_is_written_to(tmp_path: Path) -> None:
    """A page may be damaged where no reader looks: here, each says that its free space lies where its rows are."""
    path = tmp_path / "db"
    child(KILLED, str(path), "fsync")
    (path / "fresh").mkdir()
    (path / "fresh" / "data.mdb").write_bytes(b"left by a rewrite that was killed, too")
    raw = bytearray((path / "data.mdb").read_bytes())
    for page in range(2 * 4096, len(raw), 4096):
        if raw[page + 10] == LEAF:
            raw[page + 14 : page + 16] = (4096).to_bytes(2, "little")
    (path / "data.mdb").write_bytes(raw)
    done = child(
        """
        db = Database(Path(sys.argv[1]), ["a", "b"], version="v1", fsync=True)
        db.write([("a", b"%03d and more" % n, b"new") for n in range(50)])
        assert db.get_many("a", [b"%03d" % n for n in range(50)]) == [b"value %d" % n for n in range(50)]
        assert db.dropped is None and db.count("a") == 100
        """,
        str(path),
    )
    assert done.returncode == 0, done.stderr[-1500:]
    assert not (path / "fresh").exists()


def test_without_fsync_a_reboot_after_a_kill_drops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(KILLED, str(tmp_path / "db"), "no")
    monkeypatch.setattr(database, "boot_id", lambda: "another boot")
    db = opened(tmp_path / "db", fsync=False)
    assert db.dropped
    assert db.count("a") == 0
    db.close()
    again = opened(tmp_path / "db", fsync=False)
    assert again.was_clean
    again.close()


def test_another_version_is_dropped(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    db.write([("a", b"k", b"v")])
    db.close()
    other = opened(tmp_path / "db", version="v2")
    assert other.dropped and "v1" in other.dropped and "v2" in other.dropped
    assert other.get("a", b"k") is None
    other.close()


@pytest.mark.parametrize("stop", ["clean", "killed"])
@pytest.mark.parametrize(
    "cut",
    [
        0,
        1,
        pytest.param(4095, marks=pytest.mark.long),
        4096,
        pytest.param(20_000, marks=pytest.mark.long),
        -1,
        pytest.param(-4096, marks=pytest.mark.long),
    ],
)
def test_a_cut_file_is_dropped_not_believed_and_not_fatal(tmp_path: Path, stop: str, cut: int) -> None:
    path = tmp_path / "db"
    if stop == "killed":
        child(KILLED, str(path), "fsync")
    else:
        db = opened(path)
        db.write([("a", b"%03d" % n, b"x" * 3000) for n in range(50)])
        db.close()
    size = (path / "data.mdb").stat().st_size
    os.truncate(path / "data.mdb", cut if cut >= 0 else size + cut)
    done = child(
        """
        db = Database(Path(sys.argv[1]), ["a", "b"], version="v1", fsync=True)
        for n in range(60):
            assert db.get("a", b"%03d" % n) in (None, b"value %d" % n, b"x" * 3000)
            db.write([("b", b"%03d" % n, b"y" * 5000)])
        print(db.dropped)
        db.close()
        """,
        str(path),
    )
    assert done.returncode == 0, done.stderr[-1500:]
    if cut != -1 and cut:  # an empty file is a new one; the last page may be free
        assert stop == "killed" or "None" not in done.stdout


RUBBISH = [
    None,
    b"",
    b"\0" * 60,
    b"\xff\xfe\x00 not text",
    b"v1",
    b"v1\nclos",
    b"v1\nclosed \n",
    b"v1\nopen\n",
]


@pytest.mark.parametrize("mark", RUBBISH)
@pytest.mark.parametrize("precious", [True, False])
def test_a_mark_that_cannot_be_read_says_unclean_not_damaged(
    tmp_path: Path, mark: bytes | None, precious: bool
) -> None:
    """What a power cut leaves of a mark. The rows are read, whatever it says."""
    db = Database(tmp_path / "db", TABLES, version="v1", fsync=True, precious=precious)
    db.write([("a", b"k", b"v")])
    db.close()
    (tmp_path / "db" / "version").unlink()
    if mark is not None:
        (tmp_path / "db" / "version").write_bytes(mark)
    db = Database(tmp_path / "db", TABLES, version="v1", fsync=True, precious=precious)
    assert (db.was_clean, db.dropped, db.get("a", b"k")) == (False, None, b"v")
    db.close()
    db = Database(tmp_path / "db", TABLES, version="v1", fsync=True, precious=precious)
    assert (db.was_clean, db.get("a", b"k")) == (True, b"v")
    db.close()


@pytest.mark.parametrize("mark", [m for m in RUBBISH if m is None or not m.startswith(b"v1")])
def test_without_fsync_what_has_no_mark_is_dropped(tmp_path: Path, mark: bytes | None) -> None:
    db = opened(tmp_path / "db", fsync=False)
    db.write([("a", b"k", b"v")])
    db.close()
    (tmp_path / "db" / "version").unlink()
    if mark is not None:
        (tmp_path / "db" / "version").write_bytes(mark)
    db = opened(tmp_path / "db", fsync=False)
    assert db.dropped and db.count("a") == 0
    db.close()


def test_two_owners_are_refused_and_the_second_is_told_who_the_first_is(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    with pytest.raises(CacheInUse, match=rf"pid {os.getpid()}"):
        opened(tmp_path / "db")
    done = child("Database(Path(sys.argv[1]), ['a'], version='v1', fsync=True)", str(tmp_path / "db"))
    assert "CacheInUse" in done.stderr
    db.write([("a", b"k", b"v")])
    db.close()
    again = opened(tmp_path / "db")
    assert again.get("a", b"k") == b"v"
    again.close()


def test_the_lock_names_its_owner_and_the_mark_this_boot(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.mkdir()
    (path / "lock.pid").write_bytes(b"9" * 20)
    db = opened(path)
    assert (path / "lock.pid").read_text() == f"{os.getpid()}\n"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert read_mark(path) == ("v1", f"open {boot}")
    db.close()


def test_an_owner_that_has_not_said_who_it_is_is_unknown(tmp_path: Path) -> None:
    """On a full disk it cannot."""
    db = opened(tmp_path / "db")
    os.truncate(tmp_path / "db" / "lock.pid", 0)
    with pytest.raises(CacheInUse, match="pid unknown"):
        opened(tmp_path / "db")
    db.close()


def test_a_refused_owner_leaks_no_descriptor(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(CacheInUse):
            opened(tmp_path / "db")
    (tmp_path / "file").write_bytes(b"")
    for _ in range(5):
        with pytest.raises(CacheUnusable):
            opened(tmp_path / "file" / "db")
    assert len(os.listdir("/proc/self/fd")) == before
    db.close()


@pytest.mark.parametrize(
    "failing", ["durable.put", "durable.write", "os.chmod", "os.fchmod", "fcntl.flock", "lmdb.open"]
)
@pytest.mark.parametrize("there", [False, True])
def test_an_opening_that_fails_leaves_nothing_open_and_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, there: bool
) -> None:
    """A new database is made beside its place, and is put there whole."""
    path = tmp_path / "db"
    if there:
        db = opened(path)
        db.write([("a", b"k", b"v")])
        db.close()
    before = len(os.listdir("/proc/self/fd"))
    module, name = failing.split(".")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr({"durable": durable, "os": os, "fcntl": fcntl, "lmdb": lmdb}[module], name, fail)
        if there and failing == "durable.put":
            opened(path).close()  # there is nothing to be made
        else:
            for _ in range(2):
                with pytest.raises(CacheUnusable, match=str(path)):
                    opened(path)
        assert (path / "data.mdb").exists() is there
    assert len(os.listdir("/proc/self/fd")) == before
    db = opened(path)
    assert db.dropped is None and db.get("a", b"k") == (b"v" if there else None)
    assert sorted(os.listdir(path)) == ["data.mdb", "lock.pid", "version"]
    db.close()


def test_a_database_that_lmdb_refuses_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its mark says that it was closed."""
    path = tmp_path / "db"
    db = opened(path)
    db.write([("a", b"k", b"v")])
    db.close()
    (path / "data.mdb").write_bytes(b"no database" * 1000)
    durable.write(path / "version", f"v1\nclosed {database._file_hash(path / 'data.mdb')}\n")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CacheUnusable, match="move the directory away"):
        Database(path, TABLES, version="v1", fsync=True, precious=True)
    assert len(os.listdir("/proc/self/fd")) == before
    durable.write(path / "version", f"v1\nclosed {database._file_hash(path / 'data.mdb')}\n")
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(durable, "put", fail)
        with pytest.raises(CacheUnusable):
            opened(path)
        assert not (path / "data.mdb").exists(), "the new one is put there whole, or not at all"
    db = opened(path)
    assert db.dropped is None and db.count("a") == 0
    db.write([("a", b"k", b"w")])
    db.close()
    (path / "data.mdb").write_bytes(b"no database" * 1000)
    durable.write(path / "version", f"v1\nclosed {database._file_hash(path / 'data.mdb')}\n")
    db = opened(path)
    assert db.dropped and db.count("a") == 0
    db.write([("a", b"k", b"x")])
    db.close()
    db = opened(path)
    assert db.was_clean and db.get("a", b"k") == b"x"
    db.close()


def test_unusable_places_are_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "db", Path("/proc/nothing")):
        with pytest.raises(CacheUnusable, match=str(place)):
            opened(place)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk]).returncode:
        pytest.skip("mounts a small tmpfs")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill_up(disk: Path) -> None:
    with open(disk / "other", "wb", buffering=0) as other, pytest.raises(OSError) as full:
        while True:
            other.write(b"x" * 4096)
    assert full.value.errno == errno.ENOSPC


def test_a_full_disk_is_no_room_and_loses_nothing(small_disk: Path) -> None:
    db = opened(small_disk / "db")
    db.write([("a", b"k", b"v")])
    fill_up(small_disk)
    with pytest.raises(NoRoom):
        for n in range(100):
            db.write([("a", b"%d" % n, b"y" * 4000)])
    assert db.get("a", b"k") == b"v"
    os.unlink(small_disk / "other")
    db.write([("a", b"after", b"v")])
    db.close()
    again = opened(small_disk / "db")
    assert again.was_clean
    assert again.get("a", b"after") == b"v"
    again.close()


@pytest.mark.parametrize("precious", [False, True])
def test_after_a_kill_a_full_disk_leaves_the_database_as_it_is(
    small_disk: Path, caplog: pytest.LogCaptureFixture, precious: bool
) -> None:
    """There is no room for a copy."""
    child(KILLED, str(small_disk / "db"), "fsync")
    fill_up(small_disk)
    before = len(os.listdir("/proc/self/fd"))
    db = Database(small_disk / "db", TABLES, version="v1", fsync=True, precious=precious)
    assert "no room" in caplog.text and db.dropped is None and not db.was_clean
    assert db.count("a") == 50 and db.get("b", b"049") == b"x" * 3000
    os.unlink(small_disk / "other")
    db.write([("a", b"k", b"v")])
    db.close()
    db = Database(small_disk / "db", TABLES, version="v1", fsync=True, precious=precious)
    assert db.was_clean and db.get("a", b"k") == b"v"
    db.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_takes_the_marks_of_a_database(small_disk: Path) -> None:
    opened(small_disk / "db").close()
    fill_up(small_disk)
    for _ in range(2):
        db = opened(small_disk / "db")
        assert db.was_clean and read_mark(small_disk / "db")[1].startswith("open ")
        db.close()
        assert read_mark(small_disk / "db")[1].startswith("closed ")


def test_a_damaged_database_on_a_full_disk_is_not_used(small_disk: Path) -> None:
    child(KILLED, str(small_disk / "db"), "fsync")
    fill_up(small_disk)
    data = small_disk / "db" / "data.mdb"
    with data.open("r+b") as file:
        for page in range(2, data.stat().st_size // 4096):
            file.seek(4096 * page)
            file.write(b"\xff" * 4096)
    with pytest.raises(CacheUnusable, match="cannot be read"):
        Database(small_disk / "db", TABLES, version="v1", fsync=True, precious=True)


def test_a_small_address_space_costs_map_size_not_the_database(tmp_path: Path) -> None:
    done = child(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        db = Database(Path(sys.argv[1]), ["a"], version="v1", fsync=True)
        db.write([("a", b"k", b"v")])
        print(db.get("a", b"k"))
        db.close()
        """,
        str(tmp_path / "db"),
    )
    assert done.stdout == "b'v'\n", done.stderr[-1500:]


def test_without_address_space_it_is_unusable(tmp_path: Path) -> None:
    done = child(
        """
        import resource
        from cachefs.base.errors import CacheUnusable
        resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
        try:
            Database(Path(sys.argv[1]), ["a"], version="v1", fsync=True)
        except CacheUnusable as exc:
            print("unusable")
        """,
        str(tmp_path / "db"),
    )
    assert done.stdout == "unusable\n", done.stderr[-1500:]


def mapped_bytes(path: Path) -> int:
    """Of the data file, in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        int(next(line for line in lines if line.startswith("Rss:")).split()[1]) << 10
        for line in lines
        if line.endswith(str(path / "data.mdb"))
    )


def test_pages_that_reads_have_mapped_are_given_back_above_a_bound(tmp_path: Path) -> None:
    db = opened(tmp_path / "db", fsync=False)
    db.write([("a", b"%06d" % n, bytes(4000)) for n in range(5000)])
    assert len(db.scan("a")) == 5000
    mapped = mapped_bytes(tmp_path / "db")
    assert mapped > 16 << 20
    for above in (1 << 40, mapped + (1 << 20), mapped):
        db.release_memory(above)
        assert mapped_bytes(tmp_path / "db") == mapped
    db.release_memory(mapped - (1 << 20))
    assert mapped_bytes(tmp_path / "db") < 1 << 20
    assert len(db.scan("a")) == 5000
    db.close()


def test_writing_after_close_is_harmless(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    db.close()
    db.write([("a", b"k", b"v")])


def test_a_directory_removed_while_open_does_not_keep_it_from_closing(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    db.write([("a", b"k", b"v")])
    shutil.rmtree(tmp_path / "db")
    db.write([("a", b"l", b"v")])
    assert db.get("a", b"k") == b"v"
    db.close()


# -- power cuts --------------------------------------------------------------------------------------

Content = dict[str, bytes]
"""Files of a directory by their path."""


class Disk:
    """Records what a power cut would leave of a directory before each system call that changes names or syncs.

    Three states each: only what was synced; all that was done; all names, but of the files only what was synced. What a file
    system leaves is one of these or lies between. Files stay open, so that no inode number comes twice."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.rows: dict[bytes, bytes] = {}  # acknowledged
        self.states: dict[tuple[tuple[str, bytes], ...], dict[bytes, bytes]] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._synced: dict[int, bytes] = {}
        self._open: dict[int, int] = {}
        for name in ("fsync", "rename", "unlink", "mkdir", "rmdir"):
            patch.setattr(os, name, self._recorded(getattr(os, name), name))
        opening = lmdb.open
        patch.setattr(lmdb, "open", lambda path, **how: Synced(opening(path, **how), self, Path(path), how))

    def _recorded(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def instead(*args: Any, **named: Any) -> Any:
            self.look()
            result = call(*args, **named)
            if name == "fsync":
                self.synced(Path(os.readlink(f"/proc/self/fd/{args[0]}")))
            return result

        return instead

    def synced(self, path: Path) -> None:
        ino = path.stat().st_ino
        if path.is_dir():
            self._names[ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._synced[ino] = path.read_bytes()

    def look(self) -> None:
        done, names = Content(), Content()
        for path in self.root.rglob("*"):
            if path.name in ("lock.pid", "lock.mdb"):
                continue
            ino = path.stat().st_ino
            if ino not in self._open:
                self._open[ino] = os.open(path, os.O_RDONLY)
            if path.is_file():
                name = str(path.relative_to(self.root))
                done[name], names[name] = path.read_bytes(), self._synced.get(ino, b"")
        for state in (done, names, self.least()):
            self.states[tuple(sorted(state.items()))] = dict(self.rows)

    def least(self) -> Content:
        """What is there after a power cut now, at the least."""
        return self._least(self.root.stat().st_ino, "")

    def _least(self, directory: int, prefix: str) -> Content:
        found = Content()
        for name, ino in self._names.get(directory, {}).items():
            if ino not in self._open:
                continue
            if stat.S_ISDIR(os.fstat(self._open[ino]).st_mode):
                found |= self._least(ino, f"{prefix}{name}/")
            else:
                found[prefix + name] = self._synced.get(ino, b"")
        return found

    def close(self) -> None:
        self.look()
        for fd in self._open.values():
            os.close(fd)


class Synced:
    """An LMDB environment that tells the disk when it syncs."""

    def __init__(self, env: Any, disk: Disk, path: Path, how: dict[str, Any]) -> None:
        self._env, self._disk, self._path = env, disk, path
        self._syncs = how.get("sync", True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def sync(self, force: bool) -> None:
        self._env.sync(force)
        if force or self._syncs:
            self._disk.synced(self._path / "data.mdb")


@pytest.mark.long
@pytest.mark.parametrize(("fsync", "precious"), [(True, True), (False, False)], ids=["journal", "names"])
def test_a_power_cut_at_any_moment_leaves_a_database_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool, precious: bool
) -> None:
    """Twice opened and closed, and once opened after it was not: what was acknowledged is there after a cut at each step."""
    root = tmp_path / "disk"
    root.mkdir()

    def use(place: Path) -> Database:
        return Database(place / "db", TABLES, version="v1", fsync=fsync, precious=precious)

    with monkeypatch.context() as patch:
        disk = Disk(root, patch)
        for clean in (True, False, True):
            db = use(root)
            for _ in range(3):
                row = (b"%d" % len(disk.rows), b"value %d" % len(disk.rows))
                db.write([("a", *row)])
                if fsync:  # LMDB has synced it
                    disk.synced(root / "db" / "data.mdb")
                disk.rows[row[0]] = row[1]
                disk.look()
            db.close(clean=clean)
        left = disk.least()
        disk.close()
    assert len(disk.states) > 20
    assert left == {name: (root / name).read_bytes() for name in ("db/version", "db/data.mdb")}
    monkeypatch.setattr(database, "boot_id", lambda: "another boot")
    for number, (state, rows) in enumerate(disk.states.items()):
        place = tmp_path / str(number)
        for name, data in state:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)
        db = use(place)
        found = dict(db.scan("a"))
        if fsync:
            assert db.dropped is None and rows.items() <= found.items(), [name for name, _ in state]
        assert all(value == b"value " + key for key, value in found.items())
        db.write([("a", b"later", b"value later")])
        db.close()
        db = use(place)
        assert db.was_clean and db.get("a", b"later") == b"value later"
        db.close()


def test_a_state_file_is_whole_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(root, patch)
        durable.write(root / "mark", "old")
        before = set(disk.states)
        durable.write(root / "mark", "new")
        assert disk.least() == {"mark": b"new"}
        disk.close()
    assert {dict(state).get("mark") for state in set(disk.states) - before} == {b"old", b"new"}


def test_a_failed_write_leaves_the_old_state_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable.write(tmp_path / "mark", "old")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    for call in ("write", "fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(OSError):
                durable.write(tmp_path / "mark", "new")
        assert [path.name for path in tmp_path.iterdir()] == ["mark"]
        assert (tmp_path / "mark").read_text() == "old"


def test_a_new_directory_is_synced_with_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    durable.make_directory(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]


# -- the rewrite -------------------------------------------------------------------------------------


def test_deadlines_end_before_those_of_their_callers() -> None:
    """A start of the unit, and a request that waits for another thread's transaction."""
    unit = (Path(database.__file__).parents[2] / "systemd" / "cachefs@.service").read_text()
    (start_s,) = re.findall(r"^TimeoutStartSec=(\d+)$", unit, re.M)
    (timeout_s,) = (field.default for field in fields(Config) if field.name == "timeout")
    assert start_s == "90" and 2 * int(start_s) == 3 * database.REWRITE_S
    assert timeout_s == 2 * database.WAIT_S


@pytest.mark.long
def test_a_rewrite_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a page that leads LMDB in a circle."""
    child(KILLED, str(tmp_path / "db"), "fsync")
    hangs = tmp_path / "python"
    hangs.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec sleep 600\n")
    hangs.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hangs))
    monkeypatch.setattr(database, "REWRITE_S", 2.0)
    with pytest.raises(CacheUnusable, match="takes more than 2 s"):
        Database(tmp_path / "db", TABLES, version="v1", fsync=True, precious=True)
    pid = int((tmp_path / "pid").read_text())
    with suppress(ChildProcessError):  # another test's Popen may have reaped it
        os.waitpid(pid, 0)
    assert not os.path.exists(f"/proc/{pid}")
    monkeypatch.undo()
    db = Database(tmp_path / "db", TABLES, version="v1", fsync=True, precious=True)
    assert db.count("a") == 50
    db.close()


def test_nothing_is_started_where_nothing_is_to_be_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("started a process")

    monkeypatch.setattr(subprocess, "Popen", never)
    monkeypatch.setattr(os, "fork", never)
    for _ in range(2):
        db = opened(tmp_path / "db")
        db.write([("a", b"k", b"v")])
        db.close()
    (tmp_path / "db" / "data.mdb").unlink()
    opened(tmp_path / "db").close()


def test_a_rewrite_needs_no_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(KILLED, str(tmp_path / "db"), "fsync")
    monkeypatch.delattr(os, "fork")
    db = opened(tmp_path / "db")
    assert db.count("a") == 50
    db.close()


# -- failing writes ----------------------------------------------------------------------------------


def break_meta(path: Path) -> None:
    """LMDB's descriptor for the meta page is the one with O_DSYNC: from now on, its disk is full."""
    full = os.open("/dev/full", os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        try:
            there = os.readlink(f"/proc/self/fd/{name}") == str(path / "data.mdb")
            flags = int(Path(f"/proc/self/fdinfo/{name}").read_text().split("flags:")[1].split()[0], 8)
        except OSError:
            continue  # that of the listing
        if there and flags & os.O_DSYNC:
            os.dup2(full, int(name))
    os.close(full)


def test_a_failed_write_of_the_meta_page_is_not_felt(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    fds = len(os.listdir("/proc/self/fd"))
    for n in range(5):
        db.write([("a", b"before %d" % n, b"v")])
        break_meta(tmp_path / "db")
        db.write([("a", b"at %d" % n, b"v")], ranges=[("b", b"", b"z")])
        assert db.count("a") == 2 * n + 2
    assert len(os.listdir("/proc/self/fd")) == fds
    db.close()
    db = opened(tmp_path / "db")
    assert db.was_clean and db.count("a") == 10
    db.close()


def test_readers_come_through_while_it_is_opened_again(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    db.write([("a", b"%d" % n, b"v") for n in range(1000)])
    stop, failures = threading.Event(), list[BaseException]()
    seen = [0]

    def read() -> None:
        try:
            while not stop.is_set():
                assert db.get("a", b"7") == b"v" and len(db.scan("a", limit=100)) == 100
                seen[0] += 1
        except BaseException as exc:
            failures.append(exc)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for n in range(15):
        break_meta(tmp_path / "db")
        db.write([("b", b"%d" % n, b"v")])
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures and seen[0]
    assert db.count("b") == 15
    db.close()


def test_while_it_cannot_be_opened_again_calls_fail_and_then_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = opened(tmp_path / "db")
    db.write([("a", b"k", b"v")])

    def refused(*_: object, **__: object) -> None:
        raise lmdb.Error("no")

    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", refused)
        break_meta(tmp_path / "db")
        for _ in range(2):
            with pytest.raises(CacheUnusable):
                db.write([("a", b"l", b"v")])
            with pytest.raises(CacheUnusable):
                db.get("a", b"k")
    assert db.get("a", b"k") == b"v"
    db.write([("a", b"l", b"v")])
    assert db.count("a") == 2
    db.close()


class Patient:
    """The clock of `database`: who waits there lets the reader end, if there is `reader`."""

    def __init__(self, ends: threading.Event | None) -> None:
        self.monotonic = time.monotonic
        self._ends = ends

    def sleep(self, seconds: float) -> None:
        if self._ends is not None:
            self._ends.set()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[tuple[Database, threading.Event]]:
    """A database with a thread that reads it until the event."""
    db, begun, end = opened(tmp_path / "db"), threading.Event(), threading.Event()
    db.write([("a", b"k", b"v")])

    def take(*_: Any) -> None:
        begun.set()
        end.wait(30)

    thread = threading.Thread(target=db._read, args=("a", take))
    thread.start()
    assert begun.wait(30)
    yield db, end
    end.set()
    thread.join()
    db.close()


def test_a_reader_is_waited_for_before_the_file_is_closed_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: tuple[Database, threading.Event]
) -> None:
    db, end = reader
    monkeypatch.setattr(database, "time", Patient(end))
    break_meta(tmp_path / "db")
    db.write([("a", b"l", b"v")])
    assert end.is_set() and db.count("a") == 2


def test_a_reader_that_does_not_end_keeps_the_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: tuple[Database, threading.Event]
) -> None:
    db, end = reader
    monkeypatch.setattr(database, "time", Patient(None))
    monkeypatch.setattr(database, "WAIT_S", 0.05)
    before, left = len(os.listdir("/proc/self/fd")), db._opened
    assert left is not None
    break_meta(tmp_path / "db")
    for _ in range(2):
        with pytest.raises(CacheUnusable, match="a reader does not end"):
            db.write([("a", b"l", b"v")])
    db.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1, "the lock alone is given back"
    end.set()
    assert db._readers_left()
    left.close()
    db = opened(tmp_path / "db")
    assert not db.was_clean and db.get("a", b"k") == b"v"
    db.close()


def test_what_goes_on_in_the_refuge_is_closed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    db = Database(tmp_path / "db", TABLES, version="v1", fsync=True, refuge=tmp_path / "refuge")
    db.write([("a", b"k", b"here")])
    with monkeypatch.context() as patched:
        writing = db._write
        failures = iter([NoRoom("full")])

        def full(*rows: Any) -> None:
            for failure in failures:
                raise failure
            writing(*rows)

        patched.setattr(db, "_write", full)
        db.write([("a", b"k", b"there")])
        failures = iter([NoRoom("full again")])
        with pytest.raises(NoRoom):  # there is one refuge only
            db.write([("a", b"k", b"nowhere")])
    assert db.get("a", b"k") == b"there"
    db.close()
    assert len(os.listdir("/proc/self/fd")) == before
    db = opened(tmp_path / "db")
    assert not db.was_clean and db.dropped is None and db.get("a", b"k") == b"here"
    db.close()


def test_a_database_that_cannot_be_opened_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path / "db").close()
    chmod = os.chmod

    def refused(path: Any, *more: Any, **how: Any) -> None:
        if str(path).endswith("data.mdb"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        chmod(path, *more, **how)

    with monkeypatch.context() as patched:
        patched.setattr(os, "chmod", refused)
        with pytest.raises(CacheUnusable) as caught:
            opened(tmp_path / "db")
    files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert not [file for file in files if file.startswith(str(tmp_path))], caught.value
    opened(tmp_path / "db").close()


def test_a_refuge_that_was_cut_short_is_not_renewed(tmp_path: Path) -> None:
    """The file on the disk has older rows: it stays."""
    done = child(
        """
        from cachefs.base.errors import CacheUnusable, NoRoom
        path = Path(sys.argv[1])
        db = Database(path / "db", ["a", "b"], version="v1", fsync=False, refuge=path / "refuge")
        db.write([("a", b"k", b"here")])
        writing, failures = db._write, [NoRoom("full")]

        def full(*rows):
            if failures:
                raise failures.pop()
            writing(*rows)

        db._write = full
        db.write([("a", b"k", b"there")])
        os.truncate(path / "refuge" / "data.mdb", 4096)
        assert not db.renew()
        try:
            db.get("a", b"k")
            raise AssertionError("not noticed")
        except CacheUnusable:
            pass
        db.close()
        """,
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-1500:]
    db = opened(tmp_path / "db")
    assert db.dropped is None and db.get("a", b"k") == b"here"
    db.close()


def test_a_rewrite_ends_without_the_process_that_wants_it(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    db.write([("a", b"k", b"v")])
    db.close()
    (tmp_path / "db" / "fresh").mkdir()
    command = [sys.executable, "-m", "cachefs.base.database", "1", str(tmp_path / "db"), "1", *TABLES]
    assert subprocess.run(command, cwd=ROOT).returncode == 1
    assert os.listdir(tmp_path / "db" / "fresh") == []


INJECTED = """
    from cachefs.base.errors import CachefsError
    fsync, place = sys.argv[2] == "fsync", Path(sys.argv[1])
    refuge = None if fsync else place.with_name("refuge")
    db = Database(place, ["a", "b"], version="v1", fsync=fsync, refuge=refuge)
    known, failed = {}, 0
    Path(sys.argv[3]).write_text("")  # from here on, writes fail
    for n in range(150):
        key, value = b"%03d" % (n % 60), b"%d" % n * 400
        try:
            db.write([("a", key, value)], [("b", b"", b"z")])
            known[key] = value
        except CachefsError:
            failed += 1
        assert dict(db.scan("a")) == known, n
        assert db.get_many("a", known) == list(known.values())
    assert len(known) > 10, len(known)
    db.close()
    if fsync:
        db = Database(place, ["a", "b"], version="v1", fsync=fsync)
        assert dict(db.scan("a")) == known
        db.close()
    print("failed", failed, "left", refuge is not None and refuge.exists())
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="apt-get install strace")
@pytest.mark.parametrize("fsync", ["fsync", pytest.param("no", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "fault", ["EIO:when=40+9", "ENOSPC:when=41+9", "EIO:when=50..60", "ENOSPC:when=45+2", "EIO:when=60+"]
)
def test_after_failed_writes_all_that_was_acknowledged_is_readable(
    tmp_path: Path, fsync: str, fault: str
) -> None:
    """Of data pages and of meta pages, once, in a row, and from some moment on."""
    head = "import os, sys\nfrom pathlib import Path\nfrom cachefs.base.database import Database\n"
    program = [
        sys.executable,
        "-c",
        head + textwrap.dedent(INJECTED),
        str(tmp_path / "db"),
        fsync,
        str(tmp_path / "x"),
    ]
    inject = ["strace", "-f", "-qq", "-o", str(tmp_path / "calls"), "-e", "trace=pwrite64,pwritev"]
    inject += ["-e", f"inject=pwrite64,pwritev:error={fault}"]
    done = subprocess.run([*inject, *program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "INJECTED" in (tmp_path / "calls").read_text()
    print(done.stdout)


# -- files that are cut, modes, memory ---------------------------------------------------------------


@pytest.mark.parametrize("precious", [True, False])
@pytest.mark.parametrize("left", [0, 4096, pytest.param(8192, marks=pytest.mark.long), -1])
def test_a_file_that_is_cut_while_it_is_open_is_an_error_not_a_signal(
    tmp_path: Path, precious: bool, left: int
) -> None:
    done = child(
        """
        from cachefs.base.errors import CacheUnusable
        path, precious = Path(sys.argv[1]), sys.argv[2] == "True"
        db = Database(path, ["a", "b"], version="v1", fsync=True, precious=precious, refuge=path / "refuge")
        for n in range(50):
            db.write([("a", b"%03d" % n, b"x" * 3000)])
        left = int(sys.argv[3])
        os.truncate(path / "data.mdb", left % os.path.getsize(path / "data.mdb"))
        calls = [
            lambda: db.get("a", b"007"), lambda: db.get_many("a", [b"007"]), lambda: db.scan("a"), lambda: db.count("a"),
            lambda: db.write([("a", b"k", b"v")]),
        ]
        for call in calls:
            try:
                call()
                raise AssertionError("not noticed")
            except CacheUnusable as exc:
                assert "cut short" in str(exc)
        db.close()
        """,
        str(tmp_path / "db"),
        str(precious),
        str(left),
    )
    assert done.returncode == 0, done.stderr[-1500:]
    assert not read_mark(tmp_path / "db")[1].startswith("closed")
    if precious:
        with pytest.raises(CacheUnusable):
            Database(tmp_path / "db", TABLES, version="v1", fsync=True, precious=True)
    else:
        db = opened(tmp_path / "db")
        assert db.dropped and db.count("a") == 0
        db.close()


@pytest.mark.parametrize("left", [0, 4096, 8192])
def test_a_file_that_was_cut_begins_anew(tmp_path: Path, left: int) -> None:
    done = child(
        """
        from cachefs.base import database
        from cachefs.base.errors import CacheUnusable
        path, left = Path(sys.argv[1]), int(sys.argv[2])
        db = Database(path, ["a", "b"], version="v1", fsync=False)
        called = []
        db.on_cut_short = lambda: called.append(db)
        before = len(os.listdir("/proc/self/fd"))
        assert not db.renew()
        for n in range(50):
            db.write([("a", b"%03d" % n, b"x" * 3000)])
        assert not db.renew() and db.count("a") == 50 and not called
        os.truncate(path / "data.mdb", left)
        for call in (lambda: db.get("a", b"007"), lambda: db.write([("a", b"k", b"v")])):
            called.clear()
            try:
                call()
                raise AssertionError("not noticed")
            except CacheUnusable:
                assert called
        database.WAIT_S, wait = 0.0, database.WAIT_S
        db._reading.append(None)  # a reader that does not end
        left_alone = db._opened
        try:
            db.renew()
            raise AssertionError("its pages are unmapped under a reader")
        except CacheUnusable as exc:
            assert "a reader does not end" in str(exc) and db._opened is left_alone
        db._reading.pop()
        database.WAIT_S = wait
        readers_left = db._readers_left
        db._readers_left = lambda: db._opened is None and readers_left()  # no other reader begins meanwhile
        assert db.renew() and not db.renew()
        assert len(os.listdir("/proc/self/fd")) == before
        assert db.scan("a") == [] and db.count("b") == 0
        db.write([("b", b"k", b"v")])
        db.close()
        """,
        str(tmp_path / "db"),
        str(left),
    )
    assert done.returncode == 0, done.stderr[-1500:]
    again = Database(tmp_path / "db", ["a", "b"], version="v1", fsync=False)
    assert again.was_clean and again.scan("b") == [(b"k", b"v")]
    again.close()


class Damaged:
    """Stands in for an environment whose page holds keys out of order."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys
        self.env, self.tables, self.committed = self, {"a": None}, 0

    def length(self) -> int:
        return 0

    @contextmanager
    def begin(self, **_: object) -> Iterator[Damaged]:
        yield self

    cursor = begin

    def set_range(self, start: bytes) -> bool:
        self.keys = [key for key in self.keys if key >= start or key == b"0"]
        return bool(self.keys)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter([(key, b"v") for key in self.keys])


@pytest.mark.parametrize(
    "keys, start, stop, limit, found",
    [
        ([b"3", b"4", b"0", b"5"], b"2", None, None, [b"3", b"4"]),
        ([b"3", b"4", b"5"], b"2", None, None, [b"3", b"4", b"5"]),
        ([b"3", b"4", b"5"], b"3", b"5", None, [b"3", b"4"]),
        ([b"3", b"4", b"5"], b"3", None, 2, [b"3", b"4"]),
        ([b"3", b"4", b"5"], b"3", b"9", 0, []),
        ([b"1"], b"3", None, None, []),
    ],
)
def test_a_scan_is_never_led_back(
    tmp_path: Path, keys: list[bytes], start: bytes, stop: bytes | None, limit: int | None, found: list[bytes]
) -> None:
    db = opened(tmp_path / "db")
    whole: Any = db._opened
    db._opened = Damaged(keys)  # type: ignore[assignment]
    try:
        assert [key for key, _ in db.scan("a", start, stop, limit)] == found
    finally:
        db._opened = whole
        db.close()


def test_why_a_precious_one_is_refused_is_said_as_it_is(tmp_path: Path) -> None:
    opened(tmp_path / "db").close()
    for _ in range(2):
        with pytest.raises(CacheUnusable, match=r"^the database in .* cannot be read"):
            Database(tmp_path / "db", TABLES, version="v2", fsync=True, precious=True)
    again = opened(tmp_path / "db")
    assert again.dropped is None and again.was_clean
    again.close()


@pytest.mark.parametrize("panics, told", [(0, False), (1, False), (2, True)])
def test_an_environment_that_is_useless_twice_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, panics: int, told: bool
) -> None:
    db, left, opened_again = opened(tmp_path / "db"), [panics], list[int]()
    db.write([("a", b"k", b"v")])

    def take(*_: Any) -> str:
        if left[0]:
            left[0] -= 1
            raise lmdb.PanicError("useless")
        return "read"

    monkeypatch.setattr(db, "_reopen", lambda: opened_again.append(1))
    if told:
        with pytest.raises(CacheUnusable, match="cannot be read"):
            db._read("a", take)
    else:
        assert db._read("a", take) == "read"
    assert len(opened_again) == min(panics, 1) and not db._reading and not db._write_lock.locked()
    db.close()


def test_nothing_that_was_in_memory_reaches_the_disk(tmp_path: Path) -> None:
    done = child(
        """
        db = Database(Path(sys.argv[1]), ["a", "b"], version="v1", fsync=True)
        secrets = [bytearray(b"Authorization: secret!" * 180) for _ in range(4000)]
        del secrets[::2]
        for n in range(200):
            db.write([("a", b"%03d" % (n + m), b"v" * n) for m in range(100)])
        db.close()
        """,
        str(tmp_path / "db"),
    )
    assert done.returncode == 0, done.stderr[-1500:]
    assert b"Authorization" not in (tmp_path / "db" / "data.mdb").read_bytes()


def test_files_and_directories_are_for_their_owner_whatever_was_there(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        opened(tmp_path / "db").close()
        before = os.stat(tmp_path / "db" / "data.mdb").st_mode
        for path in (tmp_path / "db").iterdir():
            path.chmod(0o666)
        (tmp_path / "db").chmod(0o777)
        db = opened(tmp_path / "db")
    finally:
        os.umask(umask)
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in (tmp_path / "db").iterdir()}
    assert modes == {"data.mdb": 0o600, "version": 0o600, "lock.pid": 0o600}
    assert stat.S_IMODE(before) == 0o600
    assert stat.S_IMODE((tmp_path / "db").stat().st_mode) == 0o700
    db.close()


# -- a disk that hangs -------------------------------------------------------------------------------


@pytest.fixture
def loop_disk(tmp_path: Path) -> Iterator[Path]:
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    made = shutil.which("mkfs.ext4", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    if os.getuid() or made is None:
        pytest.skip("mounts an image")
    subprocess.run([made, "-q", "-F", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, disk], capture_output=True).returncode:
        pytest.skip("mounts an image")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


FIFREEZE, FITHAW = 0xC0045877, 0xC0045878


def test_a_disk_that_hangs_does_not_stop_the_interpreter(loop_disk: Path) -> None:
    """Readers find the rows that are in memory, and all threads run."""
    import fcntl

    program = """
        import threading
        db = Database(Path(sys.argv[1]), ["a"], version="v1", fsync=True)
        db.write([("a", b"k", b"v")])
        db.get("a", b"k")
        print("open", flush=True)
        sys.stdin.readline()
        found = []
        reader = threading.Thread(target=lambda: [found.append(db.get("a", b"k")) for _ in range(100)], daemon=True)
        reader.start()
        reader.join(20)
        print(len(found), flush=True)
        sys.stdin.readline()
        db.close()
    """
    head = "import sys\nfrom pathlib import Path\nfrom cachefs.base.database import Database\n"
    process = subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(program), str(loop_disk / "db")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None and process.stdout is not None
    frozen = os.open(loop_disk, os.O_RDONLY)
    watchdog = threading.Timer(40, fcntl.ioctl, (frozen, FITHAW, 0))  # the old code stands still for good
    try:
        assert process.stdout.readline() == "open\n"
        fcntl.ioctl(frozen, FIFREEZE, 0)
        watchdog.start()
        process.stdin.write("\n")
        said = process.stdout.readline()
        held_up = not watchdog.is_alive()
    finally:
        watchdog.cancel()
        watchdog.join()
        try:
            fcntl.ioctl(frozen, FITHAW, 0)
        except OSError:
            pass  # it was not frozen, or is not any more
        os.close(frozen)
        process.communicate("\n", timeout=60)
    assert said == "100\n" and not held_up
    assert process.returncode == 0


@pytest.mark.parametrize("version", [TREE, JOURNAL, "index 7"])
def test_what_was_closed_is_found_again_under_every_format(tmp_path: Path, version: str) -> None:
    with_row = Database(tmp_path / "db", ("t",), version=version, fsync=False)
    with_row.write([("t", b"key", b"value")])
    with_row.close()
    again = Database(tmp_path / "db", ("t",), version=version, fsync=False)
    try:
        assert (again.was_clean, again.dropped, again.get("t", b"key")) == (True, None, b"value")
    finally:
        again.close()


def test_a_writer_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk hangs. Others are told so, and a stop goes on."""
    db = opened(tmp_path / "db")
    db.write([("a", b"k", b"v")])
    fds, left = len(os.listdir("/proc/self/fd")), db._opened
    assert left is not None
    monkeypatch.setattr(database, "WAIT_S", 0.02)
    db._write_lock.acquire()
    with pytest.raises(CacheUnusable, match="does not answer"):
        db.write([("a", b"l", b"v")])
    assert db.get("a", b"k") == b"v", "readers do not wait for it"
    db.close()
    assert len(os.listdir("/proc/self/fd")) == fds - 1, "the lock is given back"
    db._write_lock.release()
    left.close()
    again = opened(tmp_path / "db")
    assert not again.was_clean and dict(again.scan("a")) == {b"k": b"v"}
    again.close()


def test_what_is_closed_stays_closed(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    db.write([("a", b"k", b"v")])
    db.close()
    fds = len(os.listdir("/proc/self/fd"))
    for call in (lambda: db.get("a", b"k"), lambda: db.scan("a"), lambda: db.count("a")):
        with pytest.raises(CacheUnusable, match="closed"):
            call()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_what_it_was_made_in_may_be_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that has become read-only in this very moment."""
    rmdir = os.rmdir

    def refused(path: Any, **where: Any) -> None:
        if str(path).endswith("fresh"):
            raise OSError(errno.EROFS, "no")
        rmdir(path, **where)

    monkeypatch.setattr(os, "rmdir", refused)
    db = opened(tmp_path / "db")
    db.write([("a", b"k", b"v")])
    assert db.get("a", b"k") == b"v"
    db.close()


@pytest.mark.parametrize("fsync", [True, False])
def test_commits_are_synced_as_was_asked_wherever_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    """Opened, opened again after a failed write, and both in the refuge, which is in memory."""
    opening, how = lmdb.open, []

    def noted(path: str, **options: Any) -> Any:
        how.append((Path(path).name, options["sync"]))
        return opening(path, **options)

    opened(tmp_path / "db", fsync=fsync).close()
    monkeypatch.setattr(lmdb, "open", noted)
    db = Database(tmp_path / "db", TABLES, version="v1", fsync=fsync, refuge=tmp_path / "refuge")
    with db._exclusive():
        db._reopen()
    db.write([("a", b"k", b"v")])
    assert how == [("db", fsync)] * 2
    with db._exclusive():
        assert db._flee(CacheUnusable("its disk fails"))
        db._reopen()
    db.write([("a", b"l", b"v")])
    assert how == [("db", fsync)] * 2 + [("refuge", False)] * 2
    assert dict(db.scan("a")) == {b"k": b"v", b"l": b"v"}
    db.close()


# -- the copy of a file that was not closed ------------------------------------------------------------


def left_open(path: Path, rows: int) -> tuple[int, int]:
    """A database that was not closed; its page size, and the number of its last page."""
    db = opened(path)
    db.write([("a", b"k%03d" % n, b"v%03d" % n * 50) for n in range(rows)])
    db.write([("b", b"k%03d" % n, b"w%03d" % n) for n in range(rows)])
    db.close(clean=False)
    env = lmdb.open(str(path), readonly=True, lock=False, max_dbs=3)
    found = env.stat()["psize"], env.info()["last_pgno"]
    env.close()
    return found


def test_a_database_is_clean_if_its_owner_says_so(tmp_path: Path) -> None:
    for clean in (True, False):
        db = opened(tmp_path / str(clean))
        db.write([("a", b"k", b"v")])
        db.close(clean=clean)
        db = opened(tmp_path / str(clean))
        assert db.was_clean is clean and db.get("a", b"k") == b"v"
        db.close()


def copied(path: Path) -> list[dict[bytes, bytes]]:
    fresh = path.with_name("fresh copy")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    database._copy_rows(path, fresh, TABLES)
    env = lmdb.open(str(fresh), readonly=True, lock=False, max_dbs=3)
    try:
        found = []
        for name in TABLES:
            with env.begin(db=env.open_db(name.encode(), create=False)) as txn, txn.cursor() as cursor:
                found.append(dict(cursor))
        return found
    finally:
        env.close()


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 6, 7])
def test_all_rows_are_copied_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(database, "BATCH_ROWS", 3)
    left_open(tmp_path / "db", rows)
    assert copied(tmp_path / "db") == [
        {b"k%03d" % n: b"v%03d" % n * 50 for n in range(rows)},
        {b"k%03d" % n: b"w%03d" % n for n in range(rows)},
    ]


@pytest.mark.parametrize(
    ("pages", "more", "whole"), [(0, 1, False), (0, -1, False), (1, 0, True), (1, 1, True), (2, 0, True)]
)
def test_a_file_that_ends_within_a_page_is_cut(tmp_path: Path, pages: int, more: int, whole: bool) -> None:
    """`pages` behind the beginning of the last one, and some bytes."""
    page, last = left_open(tmp_path / "db", 40)
    os.truncate(tmp_path / "db" / "data.mdb", (last + pages) * page + more % page)
    if whole:
        assert [len(rows) for rows in copied(tmp_path / "db")] == [40, 40]
    else:
        with pytest.raises(lmdb.CorruptedError, match="cut short"):
            copied(tmp_path / "db")


def test_a_file_with_keys_out_of_order_or_without_a_table_is_damaged(tmp_path: Path) -> None:
    left_open(tmp_path / "db", 40)
    data = tmp_path / "db" / "data.mdb"
    raw = data.read_bytes()
    data.write_bytes(raw.replace(b"k020v020", b"k000v020"))
    with pytest.raises(lmdb.CorruptedError, match="order"):
        copied(tmp_path / "db")
    data.write_bytes(raw)
    assert len(copied(tmp_path / "db")[0]) == 40
    with pytest.raises(lmdb.NotFoundError):
        database._copy_rows(tmp_path / "db", tmp_path / "fresh copy", [*TABLES, "c"])


def test_the_lock_file_is_in_memory_and_all_there_before_it_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is full, touching a page of a sparse one would be a SIGBUS."""
    opening, seen = lmdb.open, []

    def looked(path: str, **options: Any) -> Any:
        if options.get("lock", True):
            lock = os.stat(f"{path}/lock.mdb")
            seen.append((lock.st_dev != os.stat(path).st_dev, lock.st_blocks * 512 >= database.LOCK_BYTES))
        return opening(path, **options)

    monkeypatch.setattr(lmdb, "open", looked)
    opened(tmp_path / "db").close()
    assert seen == [(True, True)] * 2, "the new one, and the one that is used"
    assert not (tmp_path / "db" / "lock.mdb").is_symlink()


def test_where_it_cannot_be_opened_again_there_is_nothing_to_take_to_the_refuge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refuge stays for later."""
    db = Database(tmp_path / "db", TABLES, version="v1", fsync=True, refuge=tmp_path / "refuge")
    db.write([("a", b"k", b"v")])

    def refused(*_: object, **__: object) -> None:
        raise lmdb.Error("no")

    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", refused)
        break_meta(tmp_path / "db")
        with pytest.raises(CacheUnusable):
            db.write([("a", b"l", b"v")])
        with db._exclusive():
            assert not db._flee(CacheUnusable("its disk fails"))
        assert not db.renew(), "no file is known to be cut short"
        assert not (tmp_path / "refuge").exists()
    assert db.get("a", b"k") == b"v"
    with db._exclusive():
        assert db._flee(CacheUnusable("its disk fails"))
    db.write([("a", b"l", b"v")])
    assert (tmp_path / "refuge").exists() and dict(db.scan("a")) == {b"k": b"v", b"l": b"v"}
    db.close()


def test_a_disk_that_fails_twice_is_left_with_all_that_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure makes the environment useless, which is then opened again: else nothing could be copied."""
    db = Database(tmp_path / "db", TABLES, version="v1", fsync=True, refuge=tmp_path / "refuge")
    db.write([("a", b"k", b"v")])
    opening, count = Database._open, [0]

    def broken(self: Database) -> Any:
        found = opening(self)
        count[0] += 1
        if count[0] == 1:
            break_meta(tmp_path / "db")
        return found

    monkeypatch.setattr(Database, "_open", broken)
    break_meta(tmp_path / "db")
    db.write([("a", b"l", b"v")])
    assert count == [2] and (tmp_path / "refuge").exists()
    assert dict(db.scan("a")) == {b"k": b"v", b"l": b"v"}
    db.close()


def test_an_environment_whose_file_cannot_be_opened_closes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path / "db").close()
    before, opening = sorted(os.listdir("/proc/self/fd")), os.open

    def refused(path: Any, *rest: Any, **where: Any) -> int:
        if str(path).endswith("data.mdb"):
            raise OSError(errno.EMFILE, "Too many open files")
        return opening(path, *rest, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with pytest.raises(OSError, match="Too many"):
            database._Environment(tmp_path / "db", TABLES, fsync=True)
    assert sorted(os.listdir("/proc/self/fd")) == before
    os.fstat(0)


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    """Another user may have put it there, if the directory was ever open to others."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o644)
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "lock.pid").symlink_to(victim)
    with pytest.raises(CacheUnusable, match="cannot use"):
        opened(tmp_path / "db")
    assert victim.read_text() == "mine" and victim.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("there", [False, True])
def test_a_link_in_the_place_of_the_data_is_not_followed(tmp_path: Path, there: bool) -> None:
    db = opened(tmp_path / "db")
    db.write([("a", b"k", b"v")])
    db.close()
    data, elsewhere = tmp_path / "db" / "data.mdb", tmp_path / "elsewhere"
    data.rename(elsewhere)
    before = elsewhere.read_bytes()
    if not there:
        elsewhere.unlink()
    data.symlink_to(elsewhere)
    db = opened(tmp_path / "db")
    assert db.dropped == "its file is a link" and not data.is_symlink() and db.count("a") == 0
    db.write([("a", b"l", b"v")])
    db.close()
    assert elsewhere.read_bytes() == before if there else not elsewhere.exists()

"""The only file that opens LMDB: rows come back as written, damage is never believed, nobody shares a directory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs import database
from cachefs.database import Database
from cachefs.errors import CacheInUse, CacheUnusable, NoRoom
from tests.conftest import ROOT

TABLES = ["a", "b"]

LEAF = 2
"""The flag of LMDB's pages that hold rows. Flags are at byte 10 of a page, the end of its free space at 14."""


def opened(path: Path, version: str = "v1", fsync: bool = True) -> Database:
    return Database(path, TABLES, version=version, fsync=fsync)


def child(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    head = "import os, sys, signal\nfrom pathlib import Path\nfrom cachefs.database import Database\n"
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


def test_last_finds_the_greatest_key_below(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    assert db.last("a") is None
    assert db.last("a", b"m") is None
    db.write([("a", k, b"") for k in (b"b", b"d", b"f")])
    assert [db.last("a", before) and db.last("a", before)[0] for before in (b"a", b"b", b"c", b"d", b"z", None)] == [
        None, None, b"b", b"b", b"f", b"f",
    ]  # fmt: skip
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
    monkeypatch.setattr(database, "_boot_id", lambda: "another boot")
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
@pytest.mark.parametrize("cut", [0, 1, 4095, 4096, 20_000, -1, -4096])
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


def test_after_a_kill_a_full_disk_is_a_drop_and_a_working_database(small_disk: Path) -> None:
    child(KILLED, str(small_disk / "db"), "fsync")
    fill_up(small_disk)
    db = opened(small_disk / "db")
    assert db.dropped and "no room" in db.dropped
    db.write([("a", b"k", b"v")])
    assert (db.count("a"), db.get("a", b"k")) == (1, b"v")
    db.close()


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


def test_writing_after_close_is_harmless(tmp_path: Path) -> None:
    db = opened(tmp_path / "db")
    db.close()
    db.write([("a", b"k", b"v")])
    db.sync()


def test_a_directory_removed_while_open_does_not_keep_it_from_closing(tmp_path: Path) -> None:
    import shutil

    db = opened(tmp_path / "db")
    db.write([("a", b"k", b"v")])
    shutil.rmtree(tmp_path / "db")
    db.write([("a", b"l", b"v")])
    assert db.get("a", b"k") == b"v"
    db.close()

"""RAM tiers of daemons that were killed: taken away by the next start of any other when no start will use them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.store import ram, remove_orphans
from tests.conftest import ROOT
from tests.store.lab import MIB

CODE = """
import sys, time
from pathlib import Path
from cachefs.store import ram
place = Path(sys.argv[1])
where = ram.provide(place, 1 << 20).path
claim = ram.claim(where, place)
(where / "objects").mkdir()
(where / "objects" / "x").write_bytes(bytes(1000))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """The cache directory of a process that was killed while it had a RAM tier."""
    place = tmp_path / "killed"
    place.mkdir()
    child = subprocess.Popen([sys.executable, "-c", CODE, place], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        remove_orphans()
        assert (ram.ram_directory(place) / "objects" / "x").exists()  # it is alive
        child.send_signal(signal.SIGKILL)
        child.wait(30)
        yield place
    finally:
        child.kill()
        child.communicate()
        ram.remove_ram(place)


def paths() -> list[Path]:
    return [left.path for left in remove_orphans()]


def test_memory_that_a_start_will_use_is_left_and_told_of(killed: Path) -> None:
    where = ram.ram_directory(killed)
    assert where in paths()
    assert (where / "objects" / "x").exists()
    place = ram.provide(killed, 1 << 20)  # that start
    claim = ram.claim(place.path, killed)
    try:
        assert place.path == where and where not in paths()
    finally:
        os.close(claim)


def test_memory_whose_cache_directory_is_gone_is_taken_away(killed: Path) -> None:
    where = ram.ram_directory(killed)
    killed.rmdir()
    assert where not in paths()
    assert not (where / "objects").exists() and not os.path.ismount(where)


def test_what_says_nothing_or_nonsense_is_left_alone(killed: Path) -> None:
    where = ram.ram_directory(killed)
    killed.rmdir()
    for text in ("", "{", "[]", '{"cache_dir": 5, "pid": 1}'):
        (where / ram.OWNER).write_text(text)
        assert where not in paths()
    (where / ram.OWNER).unlink()
    assert where not in paths() and (where / "objects" / "x").exists()


DATABASES = """
import sys, time
from pathlib import Path
from cachefs.base.database import Database
for place in sys.argv[1:]:
    Path(place).parent.mkdir(exist_ok=True)
    Database(Path(place), ("a",), version=b"1", fsync=False)
print("ready", flush=True)
time.sleep(600)
"""


def test_databases_of_a_killed_daemon_are_taken_away_from_shared_memory() -> None:
    """They are there while the cache's disk is full or fails; a stop removes them."""
    names, state = (ram.SHM / f"cachefs-{os.getuid()}-{end}" for end in ("names-0123456789abcdef", "test"))
    command = [sys.executable, "-c", DATABASES, names, state / "index"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        remove_orphans()
        assert names.exists() and state.exists()
        child.kill()
        child.wait(30)
        (state / ram.OWNER).touch()
        remove_orphans()
        assert not names.exists() and state.exists(), "one is a RAM tier, which is asked by its owner's file"
        (state / ram.OWNER).unlink()
        (state / "staging").mkdir()
        (state / "staging" / "f").touch()
        remove_orphans()
        assert state.exists(), "it has a file that is not at the origin"
        (state / "staging" / "f").unlink()
        remove_orphans()
        assert not state.exists()
    finally:
        child.kill()
        child.communicate()
        for place in (names, state):
            shutil.rmtree(place, ignore_errors=True)


FLED = """
import sys, time
from pathlib import Path
from cachefs.base.database import Database
from cachefs.base.errors import NoRoom
place, refuge = map(Path, sys.argv[1:])
database = Database(place, ("a",), version="1", fsync=False, refuge=refuge)
def fail(*rows):
    database._write = write
    raise NoRoom("full")
write, database._write = database._write, fail
database.write([("a", b"k", b"v")])
print("ready", flush=True)
time.sleep(600)
"""


def test_a_database_that_fled_to_shared_memory_goes_after_its_daemon(tmp_path: Path) -> None:
    """Its disk failed while it was in use, and a kill left it in memory."""
    refuge = ram.SHM / f"cachefs-{os.getuid()}-names-fedcba9876543210"
    child = subprocess.Popen(
        [sys.executable, "-c", FLED, tmp_path / "db", refuge], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        remove_orphans()
        assert (refuge / "data.mdb").exists(), "its daemon is alive"
        child.kill()
        child.wait(30)
        remove_orphans()
        assert not refuge.exists()
    finally:
        child.kill()
        child.communicate()
        shutil.rmtree(refuge, ignore_errors=True)


@pytest.mark.parametrize("name", [ram.OWNER, "lock.pid", "a/lock.pid"])
def test_a_link_in_the_place_of_an_owner_or_a_lock_says_nothing(tmp_path: Path, name: str) -> None:
    """Any user can make a name in /dev/shm."""
    place = ram.SHM / f"cachefs-{os.getuid()}-0123456789ab"
    said = tmp_path / "said"
    said.write_text(json.dumps({"cache_dir": str(tmp_path / "gone"), "pid": 1, "started": 0}))
    try:
        (place / name).parent.mkdir(parents=True)
        (place / name).symlink_to(said)
        remove_orphans()
        assert (place / name).is_symlink() and said.exists()
        if name == ram.OWNER:
            with pytest.raises(OSError):
                ram.claim(place, tmp_path)
            assert said.read_text().startswith("{")
        (place / name).unlink()
        said.rename(tmp_path / "again")
        shutil.copy(tmp_path / "again", place / name)
        remove_orphans()
        assert not (place / name).exists()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def test_a_link_to_a_tier_is_not_taken_away(tmp_path: Path) -> None:
    (tmp_path / "tier" / "objects").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "tier")
    ram.take_away(tmp_path / "link")
    assert (tmp_path / "tier" / "objects").is_dir() and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("held", ["lock.pid", "a/lock.pid", "b/lock.pid"])
def test_one_of_several_databases_that_is_in_use_keeps_all(held: str) -> None:
    place = ram.SHM / f"cachefs-{os.getuid()}-test-several"
    try:
        for name in ("lock.pid", "a/lock.pid", "b/lock.pid"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).touch()
        fd = os.open(place / held, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        before = len(os.listdir("/proc/self/fd"))
        remove_orphans()
        assert len(list(place.rglob("lock.pid"))) == 3 and len(os.listdir("/proc/self/fd")) == before
        os.close(fd)
        remove_orphans()
        assert not place.exists()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def test_what_belongs_to_another_user_or_is_a_link_is_left_alone(tmp_path: Path) -> None:
    link, folder = (ram.SHM / f"cachefs-{os.getuid()}-{end}" for end in ("test-link", "test-folder"))
    (tmp_path / "lock.pid").touch()
    folder.mkdir()
    (folder / "lock.pid").touch()
    link.symlink_to(tmp_path)
    try:
        if os.getuid() == 0:
            os.chown(folder, 65534, 65534)
            remove_orphans()
            assert (folder / "lock.pid").exists()
            os.chown(folder, 0, 0)
        remove_orphans()
        assert (tmp_path / "lock.pid").exists() and link.is_symlink() and not folder.exists()
    finally:
        link.unlink()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_tier_has_one_daemon(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "LOOK_S", 0.05)
    where = ram.provide(killed, MIB).path
    claim = ram.claim(where, killed)
    before = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(OSError):
            ram.claim(where, killed)
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(claim)


def test_a_look_at_a_tier_does_not_take_it_from_the_daemon_that_begins(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start, or `doctor`, holds its lock for a moment."""
    where = ram.provide(killed, MIB).path
    looking = os.open(where / ram.OWNER, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_EX)
    waits: list[float] = []

    def has_looked(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            os.close(looking)

    monkeypatch.setattr(ram.time, "sleep", has_looked)
    os.close(ram.claim(where, killed))
    assert len(waits) == 3

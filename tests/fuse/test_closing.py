"""Which close is the last one, asked of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from cachefs.fuse import callers
from cachefs.fuse.callers import Writers
from tests import threads

HANDLE = 9
RUN_SYNC = trio.to_thread.run_sync


def last(writers: Writers, fh: int = HANDLE) -> bool:
    return trio.run(writers.closed_last, fh)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A descriptor that writes, and its inode."""
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    yield fd, os.fstat(fd).st_ino
    try:
        os.close(fd)
    except OSError:
        pass


def test_a_duplicate_is_left(file: tuple[int, int]) -> None:
    """As a shell's `command > file` has it."""
    fd, inode = file
    writers = Writers()
    writers.opened(HANDLE, inode, os.getpid())
    other = os.dup(fd)
    os.close(fd)
    assert not last(writers)
    os.close(other)
    assert last(writers)


def test_a_mount_may_lie_below_dev() -> None:
    """As in /dev/shm, where every user may make a directory."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        writers = Writers()
        writers.opened(HANDLE, os.fstat(file.fileno()).st_ino, os.getpid())
        assert not last(writers)


def test_a_reader_does_not_count(file: tuple[int, int], tmp_path: Path) -> None:
    fd, inode = file
    writers = Writers()
    writers.opened(HANDLE, inode, os.getpid())
    with open(tmp_path / "file", "rb"):
        os.close(fd)
        assert last(writers)


def test_another_file_does_not_count(file: tuple[int, int], tmp_path: Path) -> None:
    fd, inode = file
    writers = Writers()
    writers.opened(HANDLE, inode, os.getpid())
    with open(tmp_path / "other", "wb"):
        assert not last(writers)
        os.close(fd)
        assert last(writers)


def test_a_file_of_another_file_system_with_the_same_number_does_not_count(
    file: tuple[int, int],
) -> None:
    """Numbers are hashes of paths: two mounts give the same one to the same path."""
    fd, inode = file
    here = os.fstat(fd).st_dev
    table = Path("/proc/self/mountinfo").read_text().splitlines()
    shown = f"{os.major(here)}:{os.minor(here)}"
    if shown not in {line.split()[2] for line in table}:
        pytest.skip("this file system has a device of its own for each volume")
    for device, expected in ((shown, False), ("999:9", True), ("", False)):
        writers = Writers(lambda device=device: device)  # type: ignore[misc]
        writers.opened(HANDLE, inode, os.getpid())
        assert last(writers) is expected


def test_a_file_that_is_open_twice_is_brought_to_the_store_at_every_close(
    file: tuple[int, int],
) -> None:
    _, inode = file
    writers = Writers()
    writers.opened(HANDLE, inode, os.getpid())
    writers.opened(HANDLE + 1, inode, os.getpid())
    assert last(writers)
    assert last(writers, HANDLE + 1)
    writers.released(HANDLE + 1)
    assert not last(writers)


def test_a_child_that_has_it_too_does_not_count_once_its_parent_has_closed(
    file: tuple[int, int],
) -> None:
    fd, inode = file
    writers = Writers()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(fd,))
    try:
        writers.opened(HANDLE, inode, os.getpid())
        assert not last(writers)  # whichever of them closes: the process that opened it still has it
        os.close(fd)
        assert last(writers)
    finally:
        child.communicate(b"\n")


def test_a_process_that_has_ended_has_closed(file: tuple[int, int]) -> None:
    _, inode = file
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    writers = Writers()
    writers.opened(HANDLE, inode, child.pid)
    child.communicate(b"\n")
    assert last(writers)


def test_the_thread_that_opened_it_may_end_before_its_process(file: tuple[int, int]) -> None:
    fd, inode = file
    writers = Writers()
    thread = threading.Thread(target=lambda: writers.opened(HANDLE, inode, threading.get_native_id()))
    thread.start()
    thread.join()
    assert not last(writers)
    os.close(fd)
    assert last(writers)


def test_a_process_that_cannot_be_seen_has_closed(file: tuple[int, int]) -> None:
    _, inode = file
    for unseen in (0, 4_194_304 * 4):  # of another PID namespace; beyond the largest there is
        writers = Writers()
        writers.opened(HANDLE, inode, unseen)
        assert last(writers)


def test_handles_come_and_go() -> None:
    writers = Writers()
    writers.released(1)
    assert last(writers, 1)
    assert 1 not in writers
    writers.opened(1, 5, os.getpid())
    assert 1 in writers
    writers.released(1)
    writers.released(1)
    assert 1 not in writers
    assert last(writers, 1)


def test_the_process_is_examined_beside_the_loop(
    file: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real threads: while one looks, the loop goes on."""
    _, inode = file
    went_on = threading.Event()
    threads.replace(monkeypatch, RUN_SYNC)
    monkeypatch.setattr(callers, "_has_open", lambda *_: went_on.wait(30))
    monkeypatch.setattr(callers, "AT_ONCE", 0)

    writers = Writers()
    writers.opened(HANDLE, inode, os.getpid())

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writers.closed_last, HANDLE)
            await trio.lowlevel.checkpoint()
            went_on.set()

    trio.run(main)


@pytest.mark.parametrize("event", ["released", "opened"])
def test_what_happens_during_the_look_counts(
    file: tuple[int, int], monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """The handle is released, or the file is opened once more: then the answer is that it was the last."""
    _, inode = file
    writers = Writers()
    writers.opened(HANDLE, inode, os.getpid())

    def look(*_: object) -> bool:
        if event == "released":
            writers.released(HANDLE)
        else:
            writers.opened(HANDLE + 1, inode, os.getpid())
        return True

    monkeypatch.setattr(callers, "_has_open", look)
    assert last(writers)


def test_only_so_many_descriptors_are_looked_at(
    file: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest; a process with more has closed its file as far as is known."""
    fd, inode = file
    writers = Writers()
    writers.opened(HANDLE, inode, os.getpid())
    monkeypatch.setattr(callers, "MAX_DESCRIPTORS", 50)
    looked: list[str] = []
    readlink = os.readlink
    monkeypatch.setattr(callers.os, "readlink", lambda path: looked.append(path) or readlink(path))
    others = [os.dup(0) for _ in range(100)]
    try:
        assert last(writers)
        assert len(looked) == 50
        late = os.dup(fd)
        try:
            assert not last(writers)
        finally:
            os.close(late)
    finally:
        for other in others:
            os.close(other)


def test_the_look_ends_in_time(file: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    _, inode = file
    writers = Writers()
    writers.opened(HANDLE, inode, os.getpid())
    looked: list[str] = []
    readlink = os.readlink
    monkeypatch.setattr(callers.os, "readlink", lambda path: looked.append(path) or readlink(path))
    monkeypatch.setattr(callers, "EXAMINE_S", -1.0)
    assert last(writers)
    assert not looked

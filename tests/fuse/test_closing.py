"""Which close is the last one, asked of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.fuse.closing import Writers

HANDLE = 9


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
    assert not writers.last(HANDLE)
    os.close(other)
    assert writers.last(HANDLE)


def test_a_reader_does_not_count(file: tuple[int, int], tmp_path: Path) -> None:
    fd, inode = file
    writers = Writers()
    writers.opened(HANDLE, inode, os.getpid())
    with open(tmp_path / "file", "rb"):
        os.close(fd)
        assert writers.last(HANDLE)


def test_another_file_does_not_count(file: tuple[int, int], tmp_path: Path) -> None:
    fd, inode = file
    writers = Writers()
    writers.opened(HANDLE, inode, os.getpid())
    with open(tmp_path / "other", "wb"):
        assert not writers.last(HANDLE)
        os.close(fd)
        assert writers.last(HANDLE)


def test_a_file_of_another_file_system_with_the_same_number_does_not_count(file: tuple[int, int]) -> None:
    """Numbers are hashes of paths: two mounts give the same one to the same path."""
    fd, inode = file
    here = os.fstat(fd).st_dev
    table = Path("/proc/self/mountinfo").read_text().splitlines()
    shown = f"{os.major(here)}:{os.minor(here)}"
    if shown not in {line.split()[2] for line in table}:
        pytest.skip("this file system has a device of its own for each volume")
    for device, last in ((shown, False), ("999:9", True), ("", False)):
        writers = Writers(lambda device=device: device)  # type: ignore[misc]
        writers.opened(HANDLE, inode, os.getpid())
        assert writers.last(HANDLE) is last


def test_a_file_that_is_open_twice_is_brought_to_the_store_at_every_close(file: tuple[int, int]) -> None:
    _, inode = file
    writers = Writers()
    writers.opened(HANDLE, inode, os.getpid())
    writers.opened(HANDLE + 1, inode, os.getpid())
    assert writers.last(HANDLE)
    assert writers.last(HANDLE + 1)
    writers.released(HANDLE + 1)
    assert not writers.last(HANDLE)


def test_a_child_that_has_it_too_does_not_count_once_its_parent_has_closed(file: tuple[int, int]) -> None:
    fd, inode = file
    writers = Writers()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(fd,))
    try:
        writers.opened(HANDLE, inode, os.getpid())
        assert not writers.last(HANDLE)  # whichever of them closes: the one who opened it has it still
        os.close(fd)
        assert writers.last(HANDLE)
    finally:
        child.communicate(b"\n")


def test_a_process_that_has_ended_has_closed(file: tuple[int, int]) -> None:
    _, inode = file
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    writers = Writers()
    writers.opened(HANDLE, inode, child.pid)
    child.communicate(b"\n")
    assert writers.last(HANDLE)


def test_the_thread_that_opened_it_may_end_before_its_process(file: tuple[int, int]) -> None:
    fd, inode = file
    writers = Writers()
    thread = threading.Thread(target=lambda: writers.opened(HANDLE, inode, threading.get_native_id()))
    thread.start()
    thread.join()
    assert not writers.last(HANDLE)
    os.close(fd)
    assert writers.last(HANDLE)


def test_who_cannot_be_seen_has_closed(file: tuple[int, int]) -> None:
    _, inode = file
    for unseen in (0, 4_194_304 * 4):  # of another PID namespace; beyond the largest there is
        writers = Writers()
        writers.opened(HANDLE, inode, unseen)
        assert writers.last(HANDLE)


def test_handles_come_and_go() -> None:
    writers = Writers()
    writers.released(1)
    assert writers.last(1)
    assert 1 not in writers
    writers.opened(1, 5, os.getpid())
    assert 1 in writers
    writers.released(1)
    writers.released(1)
    assert 1 not in writers
    assert writers.last(1)

"""Giving bytes back to a tier's disk: one thread, in the order in which files were dropped.

Removing a large file, or punching holes into it, takes the file system seconds, and longer on a disk that hangs. So the trio
thread only says what is to go. Until a file's jobs are done, its bytes are counted as `going_bytes`, and a thread that
writes the same version again waits for that (`settle`).

A file that the kernel has been given (`sealed`) is only ever unlinked, for a process may have it mapped. Any other is cut
short in slices, so that no single call holds the file system's journal for long.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachefs.store.disk import Disk

log = logging.getLogger(__name__)

SLICE_BYTES = 64 << 20
"""What one call frees. Measured on ext4: 1,000 extents of 64 KiB in 64 MiB go in 2 ms."""

IDLE_S = 1.0
"""How long the thread waits for more before it ends. Guessed."""

_PUNCH = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class _Job:
    """`ranges` are punched out; without any, the file goes."""

    digest: bytes
    path: str
    ranges: Sequence[tuple[int, int]]
    count: int


class Disposal:
    """What is to go from one tier. `failed` hears of what the file system refuses, in the thread."""

    def __init__(self, disk: Disk, failed: Callable[[OSError], None]) -> None:
        self.going_bytes = self.going_files = 0
        self._disk = disk
        self._failed = failed
        self._jobs: deque[_Job] = deque()
        self._pending: Counter[bytes] = Counter()
        self._changed = threading.Condition()
        self._running = False

    def unlink(self, digest: bytes, path: str, count: int) -> None:
        """The version's file goes, with the `count` bytes that it takes."""
        self._add(_Job(digest, path, (), count))

    def punch(self, digest: bytes, path: str, ranges: Sequence[tuple[int, int]], count: int) -> None:
        """Ranges of it go."""
        self._add(_Job(digest, path, ranges, count))

    def pending(self, digest: bytes) -> bool:
        """Whether anything of the version is still to go."""
        return digest in self._pending

    def settle(self, digest: bytes) -> None:
        """Return when nothing of it is. Blocking. OSError when the disk is down, and that may take for ever."""
        with self._changed:
            while not self._changed.wait_for(lambda: digest not in self._pending, IDLE_S):
                if self._disk.down:
                    raise TimeoutError(errno.ETIMEDOUT, "what was there before cannot be removed")

    def idle(self, seconds: float) -> bool:
        """Wait until all is done, at most so long; whether it is. Blocking."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, seconds)

    # -- the thread --------------------------------------------------------------------------------

    def _add(self, job: _Job) -> None:
        with self._changed:
            self.going_bytes += job.count
            self.going_files += not job.ranges
            self._jobs.append(job)
            self._pending[job.digest] += 1
            begin = not self._running
            self._running = True
            self._changed.notify_all()
        if begin:
            self._begin()

    def _begin(self) -> None:
        threading.Thread(target=self._work, args=(IDLE_S,), name="disposal", daemon=True).start()

    def _work(self, idle_s: float) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._jobs, idle_s):
                    self._running = False
                    return
                job = self._jobs.popleft()
            try:
                if job.ranges:
                    _punch(job.path, job.ranges)
                else:
                    _remove(job.path)
            except FileNotFoundError:
                pass
            except OSError as exc:
                self._failed(exc)
            with self._changed:
                self.going_bytes -= job.count
                self.going_files -= not job.ranges
                self._pending[job.digest] -= 1
                if not self._pending[job.digest]:
                    del self._pending[job.digest]
                self._changed.notify_all()


def _remove(path: str) -> None:
    """The name first, then what lies there, from the end on."""
    size = os.lstat(path).st_blocks * 512
    if size <= SLICE_BYTES:
        os.unlink(path)
        return
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        os.unlink(path)
        at = found.st_size
        while at > 0 and stat.S_IMODE(found.st_mode) & 0o222:
            at = max(0, at - SLICE_BYTES)
            os.ftruncate(fd, at)
    finally:
        os.close(fd)


def _punch(path: str, ranges: Sequence[tuple[int, int]]) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for start, length in ranges:
            for at in range(start, start + length, SLICE_BYTES):
                some = min(SLICE_BYTES, start + length - at)
                _libc.fallocate(fd, _PUNCH, ctypes.c_long(at), ctypes.c_long(some))
    finally:
        os.close(fd)

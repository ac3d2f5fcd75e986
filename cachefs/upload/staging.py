"""Staging files: what was written here and the store does not have yet, as plain files beside the cache.

Bytes are moved in worker threads, because the kernel makes who writes faster than the disk wait. A file is open as
long as somebody uses it; thousands may wait for their upload with none open.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from cachefs.errors import CachefsError, CacheUnusable, NoRoom

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

THREADS = 16
"""Reads and writes of staging files at a time; more only lengthen the disk's queue. Guessed."""

COPIED = 64 << 20
"""Bytes of one call when a file is copied. Guessed: short enough to be cancelled between two."""

FULL = (errno.ENOSPC, errno.EDQUOT)


class StagingFile:
    """One file. Raises `NoRoom` when the disk is full, `CacheUnusable` when it fails."""

    def __init__(self, path: Path, threads: trio.CapacityLimiter) -> None:
        self.path = path
        self._threads = threads
        self._fd = -1
        self._users = 0

    def create(self) -> None:
        """Make it, empty, with one user. Blocking."""
        with self._translated():
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._users = 1

    @contextmanager
    def used(self) -> Iterator[int]:
        """The descriptor, open until this ends."""
        self.take()
        try:
            yield self._fd
        finally:
            self.give_back()

    def take(self) -> None:
        """One user more."""
        if self._fd < 0:
            with self._translated():
                self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._users += 1

    def give_back(self) -> None:
        self._users -= 1
        if not self._users:
            os.close(self._fd)
            self._fd = -1

    @property
    def fd(self) -> int:
        """The descriptor, for who is a user."""
        return self._fd

    def remove(self) -> None:
        """The name goes; who uses the file keeps it."""
        self.path.unlink(missing_ok=True)

    def read_now(self, offset: int, size: int) -> Buffer | None:
        """The bytes, if that takes no waiting."""
        data = bytearray(size)
        try:
            if os.preadv(self._fd, [data], offset, os.RWF_NOWAIT) != size:
                return None
        except OSError:
            return None
        return data

    async def read(self, offset: int, size: int) -> bytes:
        with self.used() as fd, self._translated():
            return await self._in_thread(lambda: os.pread(fd, size, offset))

    async def write(self, offset: int, data: Buffer) -> None:
        """All of it, or an error after any part of it."""
        with self.used() as fd, self._translated():
            await self._in_thread(lambda: _write(fd, offset, data))

    async def truncate(self, size: int) -> None:
        with self.used() as fd, self._translated():
            await self._in_thread(lambda: os.ftruncate(fd, size))

    async def allocate(self, offset: int, length: int) -> None:
        with self.used() as fd, self._translated():
            await self._in_thread(lambda: os.posix_fallocate(fd, offset, length))

    async def sync(self) -> None:
        """The bytes are on the disk. Its name may not be: `sync_names`."""
        with self.used() as fd, self._translated():
            await self._in_thread(lambda: os.fdatasync(fd))

    async def copy_to(self, other: StagingFile, size: int) -> None:
        """The first `size` bytes, without their coming through here."""
        with self.used() as source, other.used() as sink, self._translated():
            at = 0
            while at < size:
                at += await self._in_thread(partial(_copy, source, sink, at, min(COPIED, size - at)))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, limiter=self._threads)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise translated(exc, self.path.parent) from exc


def prepare(directory: Path) -> None:
    """Make the directory, for nobody else to look into. Raises `CacheUnusable`."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            raise CacheUnusable(f"{directory} belongs to another user")
    except OSError as exc:
        raise CacheUnusable(f"cannot keep what is written in {directory}: {exc.strerror}") from exc


def sync_names(directory: Path) -> None:
    """All files of a staging directory are found there after a power cut. Blocking. Raises `CacheUnusable`."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        raise translated(exc, directory) from exc


def translated(exc: OSError, directory: Path) -> CachefsError:
    """What a failing disk is to who writes."""
    if exc.errno in FULL:
        return NoRoom(f"the disk of {directory} is full")
    return CacheUnusable(f"cannot keep what is written in {directory}: {exc.strerror}")


def _write(fd: int, offset: int, data: Buffer) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _copy(source: int, sink: int, at: int, count: int) -> int:
    done = os.copy_file_range(source, sink, count, at, at)
    if not done:
        raise OSError(errno.EIO, "a staging file is shorter than it was")
    return done

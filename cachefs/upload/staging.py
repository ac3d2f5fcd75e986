"""Staging files: the bytes that programs have written and the origin does not have yet, as plain files beside the cache.

Reads and writes of these files run in worker threads, because the kernel blocks a write while the disk is behind. A file is
open only while it is in use, so thousands can wait for their uploads without a descriptor.

A small file may lie in memory, and so may the end of a larger one that is written in small pieces: that saves calls in
worker threads. Bytes in memory are *spilled*, which means written to the disk, when they become too many, and before a step
that needs the file on the disk: a sync, an upload in parts, a copy, passthrough. A small file whose content is in the
journal needs no sync: it stays in memory unchanged, and is spilled before its next change (`promise`)."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import mmap
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import uuid4

import trio

from cachefs.base import ownership
from cachefs.base.durable import sync_directory
from cachefs.base.errors import CachefsError, CacheUnusable, NoRoom, TooLarge
from cachefs.base.linux import HANGS_AFTER_S
from cachefs.base.shared_memory import TAIL_BYTES, SharedMemory, Tail
from cachefs.base.tasks import Lock, Outcome, in_thread, in_thread_at_last
from cachefs.origin import FileRange, InMemory, Source

log = logging.getLogger(__name__)

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

Mark = Callable[[Path], object]
"""Marks a staging file as acknowledged, and records its source, key and mtime in an attribute (`orphans.mark`). Blocking."""

THREADS = 16
"""Concurrent calls on the disk of the staging files; more would only lengthen the disk's queue. Guessed."""

LOOK_S = 0.25
"""Seconds between two checks for a change that no event reports: of the free space on the disk, of a process that writes a
file through a mapping after its close, of a name that still shows a dirty file. Guessed."""

HELD = 256 << 10
"""Most bytes of a file, or of its end, that stay in memory. Derived: copying and hashing them takes 0.2 ms, as long as one
call in a worker thread, which this saves."""
assert HELD == TAIL_BYTES

SMALL = HELD // 4
"""Most bytes of a write at the end of a file on the disk that is put in memory. Derived: at least four such writes share a
call in a worker thread."""

HELD_ALTOGETHER = 96 << 20
"""Most bytes of all files in memory. A bound of memory: files that wait for their upload, as many as the journal has room
for (`journal.CONTENTS_BYTES`), and 128 files of `HELD` bytes that are open or being sent."""

LONG_AGO_NS = 10**9
"""The mtime of a file that no process has written since it went into passthrough. The present time could not show that:
clocks of file systems tick in milliseconds or seconds, so the next write could get the same time."""

ACKNOWLEDGED, NO = "user.cachefs.acknowledged", b"0"
"""The extended attribute that marks a staging file (`orphans.py`), and its value for a new file, "not acknowledged"."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that is full: its own space, or the quota of this user."""


class Shape(NamedTuple):
    """Size and mtime of a staging file. If two shapes of a file differ, a process has written it in between."""

    size: int
    mtime_ns: int


class StagingDisk:
    """The directory of the staging files, the worker threads for calls on its disk, and the bytes of memory that files may
    still take (`memory_left`). With `shared` memory, the bytes in memory outlive this process.

    A frozen disk blocks each call that changes it, and also the last close of a removed file. So while a mount is served,
    such calls run in worker threads, with two exceptions: `StagingFile.prepare_passthrough` for a file that its users share
    (`DirtyFile.share`), and `Uploads.take`."""

    def __init__(
        self, directory: Path, memory: int = HELD_ALTOGETHER, shared: SharedMemory | None = None
    ) -> None:
        """Make the directory, accessible to its owner alone. Files may take `memory` bytes. Raises `CacheUnusable`."""
        try:
            ownership.claim(directory, whole=True)
            self._device = directory.stat().st_dev
        except OSError as exc:
            raise CacheUnusable(f"cannot keep what is written in {directory}: {exc.strerror}") from exc
        self.directory = directory
        self.memory_left = memory
        self.shared = shared
        self._limiter = trio.CapacityLimiter(THREADS)
        self._later_calls = 0  # calls of `later` that have not ended
        self._making: dict[object, float] = {}  # for each running call of `make`, the time when it began
        self._later_ended = trio.lowlevel.ParkingLot()  # woken whenever a call of `later` ends
        self.unlinked: set[Path] = set()  # removed by `StagingFile.unlink`, until `StagingFile.remove`

    def tail(self, name: str, start: int, data: bytes = b"") -> bytearray | Tail | None:
        """Memory for the bytes of a file from the offset `start` on, which are `data` so far. None if shared memory has no
        place for one more file, whose bytes are then written to the disk at once."""
        return bytearray(data) if self.shared is None else self.shared.tails.make(name, start, data)

    @property
    def outlives(self) -> bool:
        """True if open files are to outlive this process, also those whose names are removed."""
        return self.shared is not None

    @property
    def busy(self) -> int:
        """How many calls run. A call of `later` counts until it has ended, and twice while it runs in a thread."""
        return self._limiter.borrowed_tokens + self._later_calls

    async def run(self, call: Callable[[], T]) -> T:
        """Call `call` in a worker thread; returns its result, or raises its error."""
        return await in_thread(call, limiter=self._limiter)

    @property
    def hangs(self) -> bool:
        """True if a call of `make` has been running for more than `HANGS_AFTER_S`: the disk does not answer."""
        return min(list(self._making.values()), default=math.inf) < time.monotonic() - HANGS_AFTER_S

    async def make(
        self, path: Path, data: bytes, *, for_passthrough: bool = False, mark: Mark | None = None
    ) -> int:
        """`_written_file`, in a worker thread. If the directory was removed from outside, it is made again. Raises
        OSError."""
        write = partial(_written_file, path, data, for_passthrough=for_passthrough, mark=mark)

        def timed() -> int:
            call = object()
            self._making[call] = time.monotonic()
            try:
                return write()
            except FileNotFoundError:
                self._recreate_directory()
                return write()
            finally:
                del self._making[call]

        return await self.run(timed)

    def _recreate_directory(self) -> None:
        """Make the directory again, which was removed from outside. Blocking. Raises OSError (ENODEV) if its disk is not
        mounted any more: files would go to the disk below the mount point, whose space cachefs does not manage."""
        if nearest_existing(self.directory).stat().st_dev != self._device:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        ownership.claim(self.directory, whole=True)

    def later(self, call: Callable[[], object]) -> None:
        """Begin a call in a worker thread that no caller waits for. Its OSError is logged."""
        self._later_calls += 1
        trio.lowlevel.spawn_system_task(self._run_later, call)

    async def _run_later(self, call: Callable[[], object]) -> None:
        try:
            await in_thread_at_last(call, limiter=self._limiter)
        except OSError as exc:
            log.warning("cannot remove what was written here: %s", exc)
        finally:
            self._later_calls -= 1
            self._later_ended.unpark_all()

    async def quiet(self) -> None:
        """Wait until all calls of `later` have ended."""
        while self._later_calls:
            await self._later_ended.park()


class Lost(CacheUnusable):
    """A staging file was removed from outside, by a user or another program."""


class StagingFile:
    """One staging file. A `new` one is empty and has no file on the disk yet. Otherwise the file exists, and `fd`, if given,
    is a descriptor of it for reading only. Methods raise `NoRoom` if the disk is full, `TooLarge` if it takes no file of
    that size, and `CacheUnusable` if it fails.

    A *user* needs the file open: `take` adds one, `give_back` removes one. While the file is `in_passthrough`, processes
    write it through the kernel, and this daemon has it open for reading only; `has_writer` tells whether one still can.

    After a failed fsync, or after a failed close of bytes that were not synced, the file is *spoiled*: `sync`, `content` and
    `check` raise `CacheUnusable` until it was emptied. The kernel marks the pages that it could not write as clean, and the
    next fsync succeeds; so the disk may hold other bytes than were written, anywhere in the file."""

    def __init__(self, disk: StagingDisk, name: str, *, new: bool = False, fd: int = -1) -> None:
        self.path = disk.directory / name
        self._disk = disk
        self.in_passthrough = False
        self._fd = fd
        self._writes = fd < 0  # True if the descriptor, or the next one, is open for writing
        self._users = 0
        self._made = not new  # True if there is a file on the disk
        self._start = 0  # the offset where the file on the disk ends and the bytes in memory begin
        # The bytes from `_start` on, until they are spilled (None: no bytes are in memory). They may change while there is
        # no `_mark`. If they are `bytes`, the journal has them, too.
        self._held: bytearray | Tail | bytes | None = disk.tail(name, 0) if new else None
        self._mark: Mark | None = None
        self._spilling = Lock()
        self.removed = False  # True if its name is removed, or will be removed with its last user
        self.spoiled = False
        # Identifies the last change on the disk; None once a sync has covered it.
        self._unsynced: object | None = None
        # Where the file ends, if the disk has bytes of a failed write behind its end.
        self._cut_at: int | None = None

    def used(self) -> StagingFile:
        """Add a user while the block runs."""
        return self

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def take(self) -> None:
        """Add a user. The first one opens the file, if it is on the disk."""
        if self._fd < 0 and self._made:
            with self._translated():
                self._fd, self._writes = self._open()
        self._users += 1

    def _open(self) -> tuple[int, bool]:
        """Open the file; returns its descriptor, and True if that is open for writing."""
        flags = os.O_NOFOLLOW
        if not self.in_passthrough:
            try:
                return os.open(self.path, os.O_RDWR | flags), True
            except OSError as exc:
                if exc.errno != errno.EROFS:
                    raise  # otherwise the disk became read-only after an error, and the file can be read and sent
        return os.open(self.path, os.O_RDONLY | flags), False

    def give_back(self) -> None:
        """Remove a user. The last one closes the file. If the name is removed, the memory and the file are freed then."""
        self._users -= 1
        if self._users:
            return
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            if self.removed:
                self._disk.later(partial(os.close, fd))
            else:
                self._close(fd)
        if self.removed:
            self._release_memory()
            if self._disk.outlives and self._made:
                self._unlink()

    @property
    def fd(self) -> int:
        """The descriptor. The caller is a user, and the file is on the disk."""
        assert self._made
        return self._fd

    @property
    def in_memory(self) -> bool:
        """True if the whole file lies in memory. Then there is no file on the disk."""
        return self._held is not None and not self._start

    @property
    def held(self) -> bytes | None:
        """The content, if the whole file lies in memory; else None."""
        return bytes(self._held) if self._held is not None and not self._start else None

    @property
    def ends_in_memory(self) -> bool:
        """True if the whole file, or its end, lies in memory: then `write_now` may succeed."""
        return self._held is not None

    async def source(self, size: int) -> Source:
        """The first `size` bytes, for a user that sends them. A small file is read into memory if that does not wait for the
        disk; otherwise they are sent from the file, which is spilled first."""
        data = self.read_now(0, size) if size <= HELD else None
        if data is not None:
            return InMemory(bytes(data))
        await self.spill()
        return FileRange(self._fd)

    async def spill(self, *, for_passthrough: bool = False) -> None:
        """Write the bytes in memory to the disk, so that the whole file is there. The caller is a user. For
        `for_passthrough`, if this makes the file, see `_written_file`. After an error the bytes are still in memory."""
        async with self._spilling:
            if self._held is None and self._made:
                return
            data = bytes(self._held or b"")
            self._unsynced = object()
            with self._translated():
                if self._made:
                    with self._writable_fd() as fd:
                        await self._disk.run(lambda: self._spill_to(fd, data))
                else:
                    self._fd = await self._disk.make(
                        self.path, data, for_passthrough=for_passthrough, mark=self._mark
                    )
                    self._writes = not for_passthrough
            self._release_memory()
            self._mark = None
            if not self._made:
                self._made = True
                if self.removed and not self._disk.outlives:  # `remove` had no name to remove
                    self._unlink()

    async def try_spill(self, *, for_passthrough: bool = False) -> bool:
        """As `spill`, but do not wait for a disk that hangs. False if the disk has not answered within `HANGS_AFTER_S`: the
        spill continues. False at once, and nothing is spilled, if the disk is known to hang."""
        if self._held is None or self._disk.hangs:
            return self._held is None
        spilled = Outcome[None]()

        async def spill() -> None:
            try:
                with self.used():
                    await self.spill(for_passthrough=for_passthrough)
            except Exception as exc:
                spilled.failure = exc
            spilled.end()

        trio.lowlevel.spawn_system_task(spill)
        with trio.move_on_after(HANGS_AFTER_S):
            await spilled.wait()
        return self._held is None

    def _unlink(self) -> None:
        """Begin to remove the name, in a worker thread."""
        self._disk.later(partial(self.path.unlink, missing_ok=True))

    def _release_memory(self) -> None:
        """Free the memory, and forget the bytes in it."""
        self._disk.memory_left += len(self._held or b"")
        if isinstance(self._held, Tail):
            self._held.release()
        self._held = None

    def _reserve_memory(self, size: int) -> bytearray | Tail | None:
        """Reserve memory for a file that is to have `size` bytes; returns its bytes in memory, which the caller changes.
        None, and nothing is reserved, if the change has to be made on the disk."""
        held, size = self._held, size - self._start
        # What is written after a promise must survive a kill, as on a local file system. So it is written to the disk.
        if held is None or isinstance(held, bytes) or self._mark is not None:
            return None
        if not 0 <= size <= HELD or self._spilling.locked():
            return None
        growth = size - len(held)
        if growth > self._disk.memory_left:
            return None
        self._disk.memory_left -= growth
        return held

    @contextmanager
    def _writable_fd(self) -> Iterator[int]:
        """A descriptor that is open for writing, while the block runs."""
        with self.used():
            if self._writes:
                yield self._fd
                return
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR)
            try:
                yield fd
            finally:
                self._close(fd)

    def _close(self, fd: int) -> None:
        try:
            os.close(fd)
        except OSError as exc:
            # The descriptor is closed despite the error. A network file system reports here, and only once, that it could
            # not store bytes that were not synced.
            log.info("%s: %s", self.path, exc.strerror)
            self.spoiled |= self._unsynced is not None

    # -- passthrough, for its users ----------------------------------------------------------------

    def reader(self) -> int:
        """Open the file once more, for reading; the caller closes the descriptor."""
        with self._translated():
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY)

    async def open_backing(self) -> Shape | None:
        """Prepare the file for passthrough: all of it is on the disk, and processes may write it from now on. Returns its
        shape, which holds until one does. None if the disk does not answer within `HANGS_AFTER_S`."""
        made = self._made
        if not await self.try_spill(for_passthrough=True):
            return None
        if made or self._writes:
            return await self._disk.run(self.prepare_passthrough)
        self.in_passthrough = True
        return self.shape()

    def prepare_passthrough(self) -> Shape:
        """As `open_backing`, for a file that is on the disk. Called again, it resets the mtime. Blocking."""
        with self._translated():
            if self._cut_at is not None and not self.in_passthrough:  # else a process may have written there
                # Not `_writable_fd`, which counts users: this runs in a thread.
                fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR)
                try:
                    self._cut_off(fd)
                finally:
                    os.close(fd)
            _make_read_only(self._fd)
            self._writes = False
        self.in_passthrough = True
        return self.shape()

    def shape(self) -> Shape:
        """The present size and mtime of the file on the disk."""
        with self._translated():
            status = os.fstat(self._fd) if self._fd >= 0 else os.stat(self.path)
        return Shape(status.st_size, status.st_mtime_ns)

    def has_writer(self) -> bool:
        """True if a process has it open, or mapped, for writing. False if the file system has no leases."""
        with self.used():
            return _has_writer(self._fd)

    # -- content -----------------------------------------------------------------------------------

    def remove(self) -> None:
        """Begin to remove the name, in a worker thread; users can still use the file. If they are to outlive this process,
        the name is removed with the last one. If the disk refuses, the next start removes it."""
        self.removed = True
        if self.path in self._disk.unlinked:
            self._disk.unlinked.remove(self.path)
        elif self.can_unlink:
            self._unlink()
        if not self._users:
            self._release_memory()

    @property
    def can_unlink(self) -> bool:
        """True if it has a name on the disk, which no user needs."""
        return self._made and not (self._users and self._disk.outlives)

    def unlink(self) -> None:
        """Remove the name. Blocking. The caller calls `remove` next, which tries again if the disk refuses here."""
        try:
            os.unlink(self.path)
        except OSError as exc:
            log.debug("%s: %s", self.path, exc.strerror)
        else:
            self._disk.unlinked.add(self.path)

    def read_now(self, offset: int, size: int) -> Buffer | None:
        """The bytes, if they can be read without waiting for the disk; else None."""
        if self._held is not None and offset >= self._start:
            return self._read_memory(offset, size)
        if self._held is not None and offset + size > self._start:
            return None
        data = bytearray(size)
        try:
            if os.preadv(self._fd, [data], offset, os.RWF_NOWAIT) != size:
                return None
        except OSError:
            return None
        return data

    async def read(self, offset: int, size: int) -> bytes:
        """The bytes; fewer than `size` at the end of the file."""
        if self._held is not None and offset >= self._start:
            return self._read_memory(offset, size)
        end = b""
        if self._held is not None and offset + size > self._start:
            # The end is not spilled first, because a full disk must not fail a read.
            end = self._read_memory(self._start, offset + size - self._start)
            size = self._start - offset
        with self.used(), self._translated():
            return await self._disk.run(lambda: os.pread(self._fd, size, offset)) + end

    def _read_memory(self, offset: int, size: int) -> bytes:
        """Bytes from memory; `offset` is in the file."""
        assert self._held is not None
        at = offset - self._start
        held = self._held.view() if isinstance(self._held, Tail) else memoryview(self._held)
        return bytes(held[at : at + size])

    async def write(self, offset: int, data: Buffer, *, appends: bool = False) -> None:
        """Write all of `data`. After an error, any of the bytes before the file's end may have been written, and the end is
        where it was. `appends`: a small write at the file's end, which is `offset`, may be put in memory."""
        if self.write_now(offset, data):
            return
        # Not an empty file on the disk: all of it would lie in memory, and after a kill the file that is there would count.
        if appends and offset and len(data) <= SMALL and self._disk.memory_left >= HELD:
            with self.used():
                await self.spill()
            if self._held is None:
                self._start, self._held = offset, self._disk.tail(self.path.name, offset)
                if self.write_now(offset, data):
                    return
        await self._change_on_disk(lambda fd: self._grow(fd, lambda: _write(fd, offset, data)))

    def write_now(self, offset: int, data: Buffer) -> bool:
        """Write in memory. False, and nothing is written, if the bytes have to be written to the disk."""
        at, end = offset - self._start, offset + len(data)
        if at < 0 or (held := self._reserve_memory(max(self._start + len(self._held or b""), end))) is None:
            return False
        if at > len(held):
            held.extend(bytes(at - len(held)))  # a gap between the end and the write reads as zeros
        held[at : at + len(data)] = data
        return True

    async def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes; new bytes are zeros. A spoiled file that is emptied is sound again."""
        if self._made and size <= self._start:
            async with self._spilling:  # held, so that nothing is written in memory meanwhile
                # The bytes in memory are not spilled first, because they may not fit on the disk. They are freed after the
                # cut, which may fail.
                await self._change_on_disk(lambda fd: os.ftruncate(fd, size), spills=False)
                self._release_memory()
        elif (held := self._reserve_memory(size)) is not None:
            size -= self._start
            held.extend(bytes(max(0, size - len(held))))
            del held[size:]
            return
        else:
            await self._change_on_disk(lambda fd: os.ftruncate(fd, size))
        self.spoiled &= size > 0

    async def allocate(self, offset: int, length: int) -> None:
        """Allocate disk space for [offset, offset + length), and extend the file with zeros to its end."""

        def allocated(fd: int) -> None:
            os.posix_fallocate(fd, offset, length)

        # A process that writes in passthrough may have moved the end meanwhile. So after a failure the file is not cut to
        # its old length: as on a local disk, the zeros stay.
        others = self.in_passthrough
        await self._change_on_disk(allocated if others else lambda fd: self._grow(fd, lambda: allocated(fd)))

    async def sync(self) -> None:
        """Sync the bytes to the disk. A power cut may still lose the file's name; see `sync_names`."""
        self.check()
        with self.used(), self._translated():
            await self.spill()
            if self._cut_at is not None:
                with self._writable_fd() as fd:
                    await self._disk.run(lambda: self._cut_off(fd))
            covered = self._unsynced
            try:
                await self._disk.run(lambda: os.fdatasync(self._fd))
            except OSError:
                self.spoiled = True
                raise
            if self._unsynced is covered:
                self._unsynced = None

    async def content(self, size: int) -> bytes | None:
        """The content, which has `size` bytes; None if reading it would wait for the disk, or if the disk has bytes of a
        failed write behind its end. Afterwards the file lies in memory or on the disk as a whole."""
        self.check()
        with self.used(), self._translated():
            data = self.read_now(0, size)
            if not self.in_memory:
                await self.spill()
            return None if data is None or self._cut_at is not None else bytes(data)

    async def promise(self, mark: Mark, *, stays: bool) -> None:
        """Prepare for an acknowledgement, for which the journal gets the content. If that `stays` in memory, it does not
        change there: the next change spills it first, and `mark` is called for the new file. Otherwise it is spilled now."""
        if not stays or self._spilling.locked():
            with self.used():
                await self.spill()
        if self.in_memory:
            self._mark = mark

    def promised(self, content: bytes) -> None:
        """Note that the journal has `content`, which is all of the file."""
        if self._mark is not None and self._held is not None:
            if isinstance(self._held, Tail):
                self._held.release()  # the next daemon reads it from the journal
            self._held = content

    def outlive_row(self) -> bool:
        """Before the journal loses its content: move bytes that it alone has to memory that outlives this process. False if
        no such memory is left: then they are to be spilled."""
        if isinstance(self._held, bytes) and self._disk.outlives:
            tail = self._disk.tail(self.path.name, self._start, self._held)
            if tail is None:
                return False
            self._held = tail
        return True

    def found_in_memory(self, held: bytes | Tail, mark: Mark | None) -> None:
        """Note that there is no file on the disk, and that `held` is all of it. For `mark` see `promise`; None if it is
        not acknowledged."""
        self._disk.memory_left -= len(held)
        self._held, self._mark, self._made = held, mark, False

    def unmark(self) -> None:
        """Note that the file is not acknowledged, or not any more."""
        self._mark = None

    async def restore(self, data: bytes) -> None:
        """Write `data` at the beginning of the file again, because the disk may have lost it. Later bytes stay."""
        await self._change_on_disk(lambda fd: _write(fd, 0, data))

    def check_name(self) -> None:
        """Raise `Lost` if its name was removed from outside: its users still have the file, but the next daemon could not
        find it."""
        if self._made and not self.removed:
            with self._translated():
                os.stat(self.path, follow_symlinks=False)

    def check(self) -> None:
        """Raise `CacheUnusable` if the file is spoiled: it may hold other bytes than were written."""
        if self.spoiled:
            raise CacheUnusable(
                f"the disk of {self.path.parent} failed to keep what was written: empty the file, and write it again"
            )

    async def copied(self, size: int) -> StagingFile:
        """A new staging file with the first `size` bytes, copied in the kernel. Both files are spilled."""
        other = StagingFile(self._disk, uuid4().hex, new=True)
        try:
            with self.used(), other.used(), self._translated():
                await self.spill()
                await other.spill()
                await self._disk.run(partial(_copy, self._fd, other._fd, size))
        except BaseException:
            other.remove()
            raise
        return other

    async def _change_on_disk(self, change: Callable[[int], object], *, spills: bool = True) -> None:
        """Call `change` in a worker thread with a descriptor that is open for writing. With `spills`, the bytes in memory
        are spilled first."""

        def changed(fd: int) -> None:
            self._cut_off(fd)
            change(fd)

        with self.used(), self._translated():
            if spills:
                await self.spill()
            self._unsynced = object()
            with self._writable_fd() as fd:
                await self._disk.run(lambda: changed(fd))

    def _grow(self, fd: int, change: Callable[[], object]) -> None:
        """Make a change that may move the file's end; if it fails, cut the file to where the end was. Blocking."""
        end = os.fstat(fd).st_size
        try:
            change()
        except OSError:
            self._cut_at = end
            with suppress(OSError):  # the next change on the disk cuts it then
                self._cut_off(fd)
            raise

    def _spill_to(self, fd: int, data: bytes) -> None:
        self._cut_off(fd)
        self._grow(fd, lambda: _write(fd, self._start, data))

    def _cut_off(self, fd: int) -> None:
        """Cut off the bytes that a failed write has left behind the file's end. A file that grows later would show them in
        place of zeros. Blocking."""
        if self._cut_at is not None:
            os.ftruncate(fd, self._cut_at)
            self._cut_at = None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise an OSError of the block as `Lost`, or as the error that `translated` returns."""
        try:
            yield
        except OSError as exc:
            if exc.errno == errno.ENOENT and self._made and not self.removed:
                raise Lost(f"{self.path} was removed from outside: what was written to it is lost") from exc
            raise translated(exc, self.path.parent) from exc


def nearest_existing(directory: Path) -> Path:
    """The directory if it exists, else the nearest one above it that does."""
    return next(place for place in (directory, *directory.parents) if place.exists())


def sync_names(directory: Path) -> None:
    """Sync a staging directory, so that its files are found there after a power cut. Blocking. Raises `NoRoom`,
    `CacheUnusable`."""
    try:
        sync_directory(directory)
    except OSError as exc:
        raise translated(exc, directory) from exc


def sync_bytes(path: Path) -> bool:
    """Sync a file's bytes to the disk. Blocking. False if there is no such file, or if the disk fails."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def remove(path: Path) -> None:
    """Remove a file, if it exists. Blocking. Raises `CacheUnusable`."""
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        raise translated(exc, path.parent) from exc


def make_acknowledged(path: Path, data: bytes, mark: Mark) -> None:
    """Make an acknowledged file that holds `data`, on the disk. Blocking. Raises `NoRoom`, `CacheUnusable`."""
    try:
        os.close(_written_file(path, data, mark=mark, synced=True))
    except OSError as exc:
        raise translated(exc, path.parent) from exc


def can_lease(directory: Path) -> bool:
    """True if the kernel refuses a lease on a file of this directory that is open for writing. Blocking."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
            try:
                return _has_writer(fd)
            finally:
                os.close(fd)
    except OSError:
        return False


def tells_of_mappings(directory: Path) -> bool:
    """True if a write through a mapping changes the mtime of a file in this directory, also after a sync. On a tmpfs it does
    not: nothing is written back there, so a page that was written stays writable, and the kernel sees no further write to
    it. Blocking."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(mmap.PAGESIZE))
            file.flush()
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapping:
                mapping[0] = 1
                os.fsync(file.fileno())
                os.utime(file.fileno(), ns=(LONG_AGO_NS, LONG_AGO_NS))
                mapping[0] = 2
            return os.fstat(file.fileno()).st_mtime_ns != LONG_AGO_NS
    except OSError:
        return False


def _has_writer(fd: int) -> bool:
    """True if the kernel refuses a read lease on a file, because a process has it open for writing. A lease that is granted
    is released at once. False if the file system has no leases."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default; SIGIO would end the process
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as exc:
        return exc.errno == errno.EAGAIN
    return False


def translated(exc: OSError, directory: Path) -> CachefsError:
    """The error that a writer gets for a failed call on the disk of `directory`."""
    if exc.errno in FULL:
        return NoRoom(f"the disk of {directory} is full")
    if exc.errno == errno.EFBIG:
        return TooLarge(f"the disk of {directory} takes no file of this size")
    return CacheUnusable(f"cannot keep what is written in {directory}: {exc.strerror}")


def mark_new(path: Path) -> None:
    """Mark a new staging file as not acknowledged. Blocking. A file system without extended attributes takes no mark."""
    with suppress(OSError):
        os.setxattr(path, ACKNOWLEDGED, NO, follow_symlinks=False)


def _make_read_only(fd: int) -> None:
    """Reopen a descriptor for reading only, under its number, and set the file's mtime to `LONG_AGO_NS`. Blocking."""
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.dup2(reader, fd, inheritable=False)
    os.close(reader)
    os.utime(fd, ns=(LONG_AGO_NS, LONG_AGO_NS))


def _written_file(
    path: Path, data: bytes, *, for_passthrough: bool = False, mark: Mark | None = None, synced: bool = False
) -> int:
    """Make a file that holds `data`; returns its descriptor. After an error there is no file. `for_passthrough`: see
    `_make_read_only`. With a `mark`, `data` was acknowledged: then the file appears whole, by a rename, because the next
    start prefers a file that exists to the journal's copy. `synced`: its bytes are on the disk before. Blocking. Raises
    OSError."""
    # If a kill leaves the unfinished file there, the next start removes it, or keeps it aside if the file system takes no
    # mark (`orphans.py`).
    place = path if mark is None else path.with_name(f"{path.name}.0")
    fd = os.open(place, os.O_RDWR | os.O_CREAT | (os.O_EXCL if mark is None else os.O_TRUNC), 0o600)
    mark_new(place)
    try:
        _write(fd, 0, data)
        if for_passthrough:
            _make_read_only(fd)
        if synced:
            os.fdatasync(fd)
        if mark is not None:
            place.rename(path)
            mark(path)
    except OSError:
        with suppress(OSError):
            os.close(fd)
        with suppress(OSError):
            place.unlink()
        raise
    return fd


def spill_tail(path: Path, tail: Tail, mtime_ns: int, mark: Mark) -> None:
    """Write the end of a staging file, which a daemon that has died had in memory, to the disk, and set its mtime. For
    `mark`, if the file is made, see `_written_file`. Blocking. Raises OSError."""
    if not tail.start and not path.exists():
        os.close(_written_file(path, bytes(tail), mark=mark))
        os.utime(path, ns=(mtime_ns, mtime_ns))
        return
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size >= tail.start:  # otherwise the daemon died in `truncate`, behind the cut
            _write(fd, tail.start, bytes(tail))
            os.ftruncate(fd, tail.start + len(tail))
        os.utime(fd, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(fd)


def _write(fd: int, offset: int, data: Buffer) -> None:
    """Write all of `data`, in as many calls as that takes. Blocking."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _copy(source: int, sink: int, size: int) -> None:
    """Copy the first `size` bytes between two descriptors. Blocking."""
    at = 0
    while at < size:
        done = os.copy_file_range(source, sink, size - at, at, at)
        if not done:
            raise OSError(errno.EIO, "a staging file is shorter than it was")
        at += done

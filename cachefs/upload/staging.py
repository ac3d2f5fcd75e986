"""Staging files: what was written here and the origin does not have yet, as plain files beside the cache.

Bytes are moved in worker threads, because the kernel has a writer wait that is faster than the disk. A file is open as
long as it is in use; thousands may wait for their upload with none open.

A small one may lie in memory: written, sent and closed, it has cost no thread a turn. So may the end of a larger one that is
written in small pieces: they cost a thread one turn together. What lies in memory is *spilled* on the disk when it grows,
when it is to survive this process, and when it is sent in parts. A small one that the journal has a copy of survives without
that: it stays in memory as it is, and is spilled before it is changed (`promise`)."""

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

import trio

from cachefs.base import ownership
from cachefs.base.errors import CachefsError, CacheUnusable, NoRoom, TooLarge
from cachefs.base.linux import HANGS_AFTER_S
from cachefs.base.shared_memory import TAIL_BYTES, SharedMemory, Tail
from cachefs.base.tasks import Outcome, in_thread, in_thread_at_last, taken
from cachefs.origin import FileRange, InMemory, Source

log = logging.getLogger(__name__)

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

Mark = Callable[[Path], object]
"""Sets the attributes of a staging file that say that it was acknowledged, and as what (`orphans.mark`). Blocking."""

THREADS = 16
"""Reads and writes of staging files at a time; more only lengthen the disk's queue. Guessed."""

LOOK_S = 0.25
"""How often is looked for what no event tells: room on the disk, a process that still writes a file through a mapping after
its close, a name that still shows a file. Guessed."""

HELD = 256 << 10
"""The largest file, or end of one, that stays in memory. Derived: its copies and digests take 0.2 ms altogether, as long as
each turn of a thread that they save."""
assert HELD == TAIL_BYTES

SMALL = HELD // 4
"""The largest write that a file's end waits in memory for. Derived: at least four of them share a turn of a thread."""

HELD_ALTOGETHER = 96 << 20
"""By all files. A bound of memory: as much as the journal takes of those that wait for their upload
(`journal.CONTENTS_BYTES`), and a hundred of the largest that are open or on their way."""

LONG_AGO_NS = 10**9
"""The time of a file that was not written since it went into passthrough. Clocks of file systems tick in milliseconds, or
seconds, so that a time of now could be that of the next write, too."""

ACKNOWLEDGED, NO = "user.cachefs.acknowledged", b"0"
"""The mark of a staging file (`orphans.py`), and what a new one says."""

FULL = (errno.ENOSPC, errno.EDQUOT)


class Shape(NamedTuple):
    """What tells a file that was written from one that was not."""

    size: int
    mtime_ns: int


class StagingDisk:
    """The directory of the staging files, worker threads for calls on its disk, and what is left of the memory for small
    files (`memory_left`). A disk that is frozen holds up any call that changes it, also the last close of a file that was
    removed: none is made on the loop. With `shared` memory, what lies in memory outlives this
    process."""

    def __init__(
        self, directory: Path, memory: int = HELD_ALTOGETHER, shared: SharedMemory | None = None
    ) -> None:
        """Makes the directory, readable by its owner alone. Raises `CacheUnusable`."""
        try:
            ownership.claim(directory, whole=True)
            self._device = directory.stat().st_dev
        except OSError as exc:
            raise CacheUnusable(f"cannot keep what is written in {directory}: {exc.strerror}") from exc
        self.directory = directory
        self.memory_left = memory
        self.shared = shared
        self._limiter = trio.CapacityLimiter(THREADS)
        self._begun = 0
        self._new: dict[object, float] = {}  # when the files under way were begun to be made
        self._quiet = trio.lowlevel.ParkingLot()
        self.unlinked: set[Path] = set()  # names that a thread has removed before `StagingFile.remove`

    def tail(self, name: str, start: int, data: bytes = b"") -> bytearray | Tail | None:
        """Memory with the bytes of a file from `start` on, which are `data` so far; None: they go to the disk at once."""
        return bytearray(data) if self.shared is None else self.shared.tails.make(name, start, data)

    @property
    def outlives(self) -> bool:
        """Whether files that are open are to outlive this process, also those whose names are gone."""
        return self.shared is not None

    @property
    def busy(self) -> int:
        """Calls under way, and those that were begun `later`."""
        return self._limiter.borrowed_tokens + self._begun

    async def run(self, call: Callable[[], T]) -> T:
        """What `call` returns, or raises."""
        return await in_thread(call, limiter=self._limiter)

    @property
    def hangs(self) -> bool:
        """Whether a small file takes too long to be made: the disk does not answer."""
        return min(list(self._new.values()), default=math.inf) < time.monotonic() - HANGS_AFTER_S

    async def make(self, path: Path, data: bytes, *, shared: bool = False, mark: Mark | None = None) -> int:
        """A new file that holds `data`: a descriptor; if it is `shared`, for reading only, as `_share` leaves it. For `mark`
        see `_written_file`."""

        def timed() -> int:
            call = object()
            self._new[call] = time.monotonic()
            try:
                return _written_file(path, data, shared=shared, mark=mark)
            except FileNotFoundError:
                self._make_again()
                return _written_file(path, data, shared=shared, mark=mark)
            finally:
                del self._new[call]

        return await self.run(timed)

    def _make_again(self) -> None:
        """In a thread: the directory was removed from outside. OSError where its disk is not there: what is below has no
        reserve of ours."""
        if existing(self.directory).stat().st_dev != self._device:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        ownership.claim(self.directory, whole=True)

    def later(self, call: Callable[[], object]) -> None:
        """Make a call that no caller waits for. Its OSError is logged."""
        self._begun += 1
        trio.lowlevel.spawn_system_task(self._carry_out, call)

    async def _carry_out(self, call: Callable[[], object]) -> None:
        try:
            await in_thread_at_last(call, abandon_on_cancel=True, limiter=self._limiter)
        except OSError as exc:
            log.warning("cannot remove what was written here: %s", exc)
        finally:
            self._begun -= 1
            self._quiet.unpark_all()

    async def quiet(self) -> None:
        """Return when what was begun `later` is done."""
        while self._begun:
            await self._quiet.park()


class Lost(CacheUnusable):
    """A staging file is gone that was not removed here."""


class StagingFile:
    """One file: a `new` one, empty, else the one that lies there, of which `fd` is a descriptor for reading only. Raises
    `NoRoom` when the disk is full, `CacheUnusable` when it fails. One that is `in_passthrough` is written by others, and
    open for reading only here: then `written` says whether they still are at it.

    After a failed fsync, or a failed close of what was not synced, it is *spoiled*: `sync` and `check` raise `CacheUnusable`
    until it was emptied. The kernel marks the pages that it could not write as clean, and the next fsync answers 0; so the
    disk may hold other bytes than were written, anywhere in the file."""

    def __init__(self, disk: StagingDisk, name: str, *, new: bool = False, fd: int = -1) -> None:
        self.path = disk.directory / name
        self._disk = disk
        self.in_passthrough = False
        self._fd = fd
        self._writes = fd < 0  # what the descriptor is for
        self._users = 0
        self._made = not new  # there is a file
        self._start = 0  # where the file on the disk ends, if there is more in memory
        # The bytes from `_start` on, in memory until they are spilled. They may change as long as there is no mark. If they
        # are `bytes`, the journal has them, too.
        self._held: bytearray | Tail | bytes | None = disk.tail(name, 0) if new else None
        self._mark: Mark | None = None
        self._spilling = trio.Lock()
        self._removed = False
        self.spoiled = False
        self._unsynced: object | None = None  # the last change on the disk, if no sync has covered it
        # Where the file ends, if the disk has bytes of a failed write behind that.
        self._cut_at: int | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """There is a user more until this ends."""
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def take(self) -> None:
        """One user more."""
        if self._fd < 0 and self._made:
            with self._translated():
                self._fd, self._writes = self._open()
        self._users += 1

    def _open(self) -> tuple[int, bool]:
        """A descriptor, and whether it may be written to."""
        flags = os.O_NOFOLLOW
        if not self.in_passthrough:
            try:
                return os.open(self.path, os.O_RDWR | flags), True
            except OSError as exc:
                if exc.errno != errno.EROFS:
                    raise  # else it became read-only after an error: what is there can be read and sent
        return os.open(self.path, os.O_RDONLY | flags), False

    def give_back(self) -> None:
        self._users -= 1
        if self._users:
            return
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            if self._removed:
                self._disk.later(partial(os.close, fd))
            else:
                self._close(fd)
        if self._removed:
            self._let_go()
            if self._disk.outlives and self._made:
                self._unlink()

    @property
    def fd(self) -> int:
        """The descriptor, for a user of one that was spilled."""
        assert self._made
        return self._fd

    @property
    def in_memory(self) -> bool:
        """True if all of it lies in memory. Then there is no file."""
        return self._held is not None and not self._start

    @property
    def held(self) -> bytes | None:
        """All of it, if it lies in memory."""
        return bytes(self._held) if self._held is not None and not self._start else None

    @property
    def removed(self) -> bool:
        """Whether its name is gone, or goes with its last user."""
        return self._removed

    @property
    def ends_in_memory(self) -> bool:
        """True if all of it, or its end, lies in memory: then `write_now` may take more."""
        return self._held is not None

    async def source(self, size: int) -> Source:
        """The first `size` bytes, for a user that sends them: from memory if that takes no waiting."""
        data = self.read_now(0, size) if size <= HELD else None
        if data is not None:
            return InMemory(bytes(data))
        await self.spill()
        return FileRange(self._fd)

    async def spill(self, *, shared: bool = False) -> None:
        """Have all of it in a file. The caller is a user. `shared`: a file that is made is left as `shared` leaves it."""
        async with taken(self._spilling):
            if self._held is None and self._made:
                return
            data = bytes(self._held or b"")
            self._unsynced = object()
            with self._translated():
                if self._made:
                    with self._written_to() as fd:
                        await self._disk.run(lambda: self._spill_to(fd, data))
                else:
                    self._fd = await self._disk.make(self.path, data, shared=shared, mark=self._mark)
                    self._writes = not shared
            self._let_go()
            self._mark = None
            if not self._made:
                self._made = True
                if self._removed and not self._disk.outlives:  # meanwhile, or before
                    self._unlink()

    async def try_spill(self, *, shared: bool = False) -> bool:
        """Move what lies in memory to the disk (see `spill`); the caller is a user. False when the disk does not answer
        within `HANGS_AFTER_S`: the move goes on. Raises `NoRoom`, `CacheUnusable`."""
        if self._held is None or self._disk.hangs:
            return self._held is None
        spilled = Outcome[None]()

        async def spill() -> None:
            try:
                with self.used():
                    await self.spill(shared=shared)
            except Exception as exc:
                spilled.failure = exc
            spilled.end()

        trio.lowlevel.spawn_system_task(spill)
        with trio.move_on_after(HANGS_AFTER_S):
            await spilled.wait()
        return self._held is None

    def _unlink(self) -> None:
        self._disk.later(partial(self.path.unlink, missing_ok=True))

    def _let_go(self) -> None:
        self._disk.memory_left += len(self._held or b"")
        if isinstance(self._held, Tail):
            self._held.release()
        self._held = None

    def _keep(self, size: int) -> bytearray | Tail | None:
        """What is in memory, of a file that is to have `size` bytes, now accounted for; None: it has to be spilled, or
        was."""
        held, size = self._held, size - self._start
        # A kill leaves all that is written after a promise, as on a local file system: it goes to the disk.
        if held is None or isinstance(held, bytes) or self._mark is not None:
            return None
        if not 0 <= size <= HELD or self._spilling.locked():
            return None
        more = size - len(held)
        if more > self._disk.memory_left:
            return None
        self._disk.memory_left -= more
        return held

    @contextmanager
    def _written_to(self) -> Iterator[int]:
        """A descriptor to write to, until this ends."""
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
            # It is closed all the same. A network file system says here, and only once, that it could not keep what was
            # not synced.
            log.info("%s: %s", self.path, exc.strerror)
            self.spoiled |= self._unsynced is not None

    # -- passthrough, for its users ----------------------------------------------------------------

    def reader(self) -> int:
        """A descriptor of one's own, for reading."""
        with self._translated():
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY)

    async def open_backing(self) -> Shape | None:
        """All of it is in a file, which others write from now on. Returns what that is like until one does; None when the
        disk does not answer within `HANGS_AFTER_S`. A file that is made for this costs one turn of a thread."""
        made = self._made
        if not await self.try_spill(shared=True):
            return None
        if made or self._writes:
            return await self._disk.run(self.shared)
        self.in_passthrough = True
        return self.shape()

    def shared(self) -> Shape:
        """The same, blocking."""
        with self._translated():
            if self._writes:
                self._cut_off(self._fd)
            _share(self._fd)
            self._writes = False
        self.in_passthrough = True
        return self.shape()

    def shape(self) -> Shape:
        with self._translated():
            status = os.fstat(self._fd) if self._fd >= 0 else os.stat(self.path)
        return Shape(status.st_size, status.st_mtime_ns)

    def written(self) -> bool:
        """True if a process has it open, or mapped, for writing."""
        with self.used():
            return not _leased(self._fd, otherwise=True)

    # -- content -----------------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove the name, in a thread; users keep the file. Where the disk refuses, the next start removes it. Where the
        file is to outlive this process, its name goes with its last user."""
        self._removed = True
        if self.path in self._disk.unlinked:
            self._disk.unlinked.remove(self.path)
        elif self.can_unlink:
            self._unlink()
        if not self._users:
            self._let_go()

    @property
    def can_unlink(self) -> bool:
        """Whether it has a name that need not stay for its users."""
        return self._made and not (self._users and self._disk.outlives)

    def unlink(self) -> None:
        """In a thread: remove the name before `remove`, which is called next. Where the disk refuses, that tries again."""
        try:
            os.unlink(self.path)
        except OSError as exc:
            log.debug("%s: %s", self.path, exc.strerror)
        else:
            self._disk.unlinked.add(self.path)

    def read_now(self, offset: int, size: int) -> Buffer | None:
        """The bytes, if that takes no waiting."""
        if self._held is not None and offset >= self._start:
            return self._in_memory(offset, size)
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
        if self._held is not None and offset >= self._start:
            return self._in_memory(offset, size)
        end = b""
        if self._held is not None and offset + size > self._start:
            # It is not spilled first: a full disk keeps no reader from it.
            end = self._in_memory(self._start, offset + size - self._start)
            size = self._start - offset
        with self.used(), self._translated():
            return await self._disk.run(lambda: os.pread(self._fd, size, offset)) + end

    def _in_memory(self, offset: int, size: int) -> bytes:
        assert self._held is not None
        at = offset - self._start
        held = self._held.view() if isinstance(self._held, Tail) else memoryview(self._held)
        return bytes(held[at : at + size])

    async def write(self, offset: int, data: Buffer, *, appends: bool = False) -> None:
        """All of it, or an error after any part of it that lies before the file's end: this is then where it was. `appends`
        says that it begins where the file ends, and that no process has the file by itself."""
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
        await self._on_disk(lambda fd: self._grow(fd, lambda: _write(fd, offset, data)))

    def write_now(self, offset: int, data: Buffer) -> bool:
        """Write it in memory, if it belongs there and there is room; False: nothing has happened."""
        at, end = offset - self._start, offset + len(data)
        if at < 0 or (held := self._keep(max(self._start + len(self._held or b""), end))) is None:
            return False
        if at > len(held):
            held.extend(bytes(at - len(held)))  # a gap is zeros
        held[at : at + len(data)] = data
        return True

    async def truncate(self, size: int) -> None:
        if self._made and size <= self._start:
            async with self._spilling:  # meanwhile nothing is written in memory
                # What is cut off needs no room on the disk first. It is dropped once it is cut: that may fail.
                await self._on_disk(lambda fd: os.ftruncate(fd, size), spills=False)
                self._let_go()
        elif (held := self._keep(size)) is not None:
            size -= self._start
            held.extend(bytes(max(0, size - len(held))))
            del held[size:]
            return
        else:
            await self._on_disk(lambda fd: os.ftruncate(fd, size))
        self.spoiled &= size > 0

    async def allocate(self, offset: int, length: int) -> None:
        def allocated(fd: int) -> None:
            os.posix_fallocate(fd, offset, length)

        # A process that writes it by itself may have moved its end meanwhile: as on a local disk, zeros stay there.
        others = self.in_passthrough
        await self._on_disk(allocated if others else lambda fd: self._grow(fd, lambda: allocated(fd)))

    async def sync(self) -> None:
        """The bytes are on the disk. Its name may not be: `sync_names`."""
        self.check()
        with self.used(), self._translated():
            await self.spill()
            if self._cut_at is not None:
                with self._written_to() as fd:
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
        """Its first `size` bytes: all of it in memory, or also in a file. None if they are not at hand."""
        self.check()
        with self.used(), self._translated():
            data = self.read_now(0, size)
            if not self.in_memory:
                await self.spill()
            return None if data is None or self._cut_at is not None else bytes(data)

    async def promise(self, mark: Mark, *, stays: bool) -> None:
        """Prepare for an acknowledgement. If the content `stays` in memory, it is not changed there any more: the next
        change spills it first, and `mark` then sets the attributes of the new file. Otherwise it is spilled now."""
        if not stays or self._spilling.locked():
            with self.used():
                await self.spill()
        if self.in_memory:
            self._mark = mark

    def promised(self, content: bytes) -> None:
        """Note that the journal has `content`, which is all of the file."""
        if self._mark is not None and self._held is not None:
            if isinstance(self._held, Tail):
                self._held.release()  # the next daemon has it from the journal
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

    def unmark(self) -> None:
        """Note that the file is not acknowledged any more, or was not at all."""
        self._mark = None

    async def restore(self, data: bytes) -> None:
        """It begins with these bytes, whatever the disk has made of them. What was appended meanwhile stays."""
        await self._on_disk(lambda fd: _write(fd, 0, data))

    def check_name(self) -> None:
        """Raises `Lost` if its name was removed from outside: users still have the file, and no other start finds it."""
        if self._made and not self._removed:
            with self._translated():
                os.stat(self.path, follow_symlinks=False)

    def resumed(self, *, spoiled: bool, removed: bool) -> None:
        """Of an earlier run: a failed fsync was seen, it is only there for its users."""
        self.spoiled, self._removed = spoiled, removed

    def check(self) -> None:
        """Raises `CacheUnusable` if the file may hold other bytes than were written."""
        if self.spoiled:
            raise CacheUnusable(
                f"the disk of {self.path.parent} failed to keep what was written: empty the file, and write it again"
            )

    async def copy_to(self, other: StagingFile, size: int) -> None:
        """The first `size` bytes, without their coming through here."""
        with self.used(), other.used(), self._translated():
            await self.spill()
            await other.spill()
            await self._disk.run(partial(_copy, self._fd, other._fd, size))

    async def _on_disk(self, change: Callable[[int], object], *, spills: bool = True) -> None:
        def changed(fd: int) -> None:
            self._cut_off(fd)
            change(fd)

        with self.used(), self._translated():
            if spills:
                await self.spill()
            self._unsynced = object()
            with self._written_to() as fd:
                await self._disk.run(lambda: changed(fd))

    def _grow(self, fd: int, change: Callable[[], object]) -> None:
        """In a thread: a change that may move the file's end; one that fails does not."""
        end = os.fstat(fd).st_size
        try:
            change()
        except OSError:
            self._cut_at = end
            with suppress(OSError):  # else the next call does it
                self._cut_off(fd)
            raise

    def _spill_to(self, fd: int, data: bytes) -> None:
        self._cut_off(fd)
        self._grow(fd, lambda: _write(fd, self._start, data))

    def _cut_off(self, fd: int) -> None:
        """In a thread: the disk has nothing behind the end. A file that grows later would show it in place of zeros."""
        if self._cut_at is not None:
            os.ftruncate(fd, self._cut_at)
            self._cut_at = None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            if exc.errno == errno.ENOENT and self._made and not self._removed:
                raise Lost(f"{self.path} was removed from outside: what was written to it is lost") from exc
            raise translated(exc, self.path.parent) from exc


def existing(directory: Path) -> Path:
    """A directory, or what is left above it."""
    return next(place for place in (directory, *directory.parents) if place.exists())


def sync_names(directory: Path) -> None:
    """All files of a staging directory are found there after a power cut. Blocking. Raises `CacheUnusable`."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        raise translated(exc, directory) from exc


def sync_bytes(path: Path) -> bool:
    """A file's bytes are on the disk. Blocking. False if the disk fails."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def rewrite(path: Path, data: bytes) -> None:
    """The file holds these bytes alone, and they are on the disk. One that is new appears whole. Blocking. Raises `NoRoom`,
    `CacheUnusable`."""
    # One that is there is written where it lies: a process that has outlived its daemon may go on writing it.
    place = path if path.exists() else _unfinished(path)
    try:
        fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if place != path:
                begin(place)
            os.ftruncate(fd, len(data))
            _write(fd, 0, data)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if place != path:
            place.rename(path)
    except OSError as exc:
        raise translated(exc, path.parent) from exc


def touch(directory: Path) -> None:
    """Change something on a disk. Blocking. Errors are left to the caller's next change."""
    with suppress(OSError):
        os.utime(directory)


def can_lease(directory: Path) -> bool:
    """Whether the kernel says of files there if they are open for writing."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
            try:
                refused = not _leased(fd, otherwise=True)
            finally:
                os.close(fd)
            return refused
    except OSError:
        return False


def tells_of_mappings(directory: Path) -> bool:
    """Whether a store into a mapping moves the time of a file there, also after a sync: on a tmpfs nothing is written back,
    so a page that was stored to stays writable."""
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


def _leased(fd: int, *, otherwise: bool) -> bool:
    """Whether the kernel grants a lease, given back at once; `otherwise` where it knows none."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # which is ignored; SIGIO would end the process
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as exc:
        return otherwise if exc.errno != errno.EAGAIN else False
    return True


def translated(exc: OSError, directory: Path) -> CachefsError:
    """The error that a writer is told of a failing disk."""
    if exc.errno in FULL:
        return NoRoom(f"the disk of {directory} is full")
    if exc.errno == errno.EFBIG:
        return TooLarge(f"the disk of {directory} takes no file of this size")
    return CacheUnusable(f"cannot keep what is written in {directory}: {exc.strerror}")


def begin(path: Path) -> None:
    """It is a staging file now, and nothing of it was acknowledged. Blocking; a disk without attributes takes no mark."""
    with suppress(OSError):
        os.setxattr(path, ACKNOWLEDGED, NO, follow_symlinks=False)


def _share(fd: int) -> None:
    """The file is open for reading only here, and has the time of one that no process has written. Blocking."""
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.dup2(reader, fd, inheritable=False)
    os.close(reader)
    os.utime(fd, ns=(LONG_AGO_NS, LONG_AGO_NS))


def _unfinished(path: Path) -> Path:
    """The name of a file that is being made and shall appear whole. The next start removes what a kill leaves of it."""
    return path.with_name(f"{path.name}.0")


def _written_file(path: Path, data: bytes, *, shared: bool = False, mark: Mark | None = None) -> int:
    """A new file that holds `data`, open; on an error there is none. With a `mark`, `data` was acknowledged: the file
    appears whole, because a file that is there counts more than the journal's copy."""
    place = path if mark is None else _unfinished(path)
    fd = os.open(place, os.O_RDWR | os.O_CREAT | (os.O_EXCL if mark is None else os.O_TRUNC), 0o600)
    begin(place)
    try:
        _write(fd, 0, data)
        if shared:
            _share(fd)
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


def spill_tail(directory: Path, tail: Tail, mtime_ns: int) -> None:
    """Bring to the disk what a daemon that has died had in memory of a file. Blocking. Raises OSError; FileNotFoundError if
    the file was removed from outside."""
    path = directory / tail.name
    made = os.O_CREAT if not tail.start else 0
    is_new = bool(made) and not path.exists()
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | made, 0o600)
    if is_new:
        begin(path)
    try:
        if os.fstat(fd).st_size < tail.start:
            raise FileNotFoundError(errno.ENOENT, "the file is shorter than it was")
        _write(fd, tail.start, bytes(tail))
        os.ftruncate(fd, tail.start + len(tail))
        os.utime(fd, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(fd)


def _write(fd: int, offset: int, data: Buffer) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _copy(source: int, sink: int, size: int) -> None:
    at = 0
    while at < size:
        done = os.copy_file_range(source, sink, size - at, at, at)
        if not done:
            raise OSError(errno.EIO, "a staging file is shorter than it was")
        at += done

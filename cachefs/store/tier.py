"""A tier: one directory that holds object versions as sparse files, with its space accounting and its health.

`used_bytes` counts allocated bytes (block lengths rounded up to the page), as the cap and the disk do. It is raised when
space is reserved, before the bytes are written, so it never passes the limit. `unlisted_bytes` is the part of it that no
index row would account for after a crash: bytes that are being written or removed. `remote_owned_bytes` is the part in
extents that other nodes own.

Health: after an I/O error the tier takes no cache writes for `RETRY_S`. Reads go on, and a read that fails is a miss.
Three errors without a successful write between them make the tier *down* in `status`. A full disk is no failure: it
lowers the limit to what is used.

**The disk** may hang instead of failing: a call on it does not return, and no signal ends it. So each call that may wait
for the disk runs in a worker thread and is recorded while it runs (`busy`). A call that takes too long takes the disk
*down*: its readers get an error at once, and no new call begins, until a probe in a thread of its own has returned.

Removing a large file, or punching holes into it, takes the file system seconds. So the trio thread only queues the
removal, and one thread (`Disposal`) carries out the queue in its order. Until the jobs of a file are done, its bytes are
counted as `going_bytes`, and a thread that writes the same version again waits for them (`Disposal.wait_for`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import stat
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import trio
import xxhash
from outcome import Error, Outcome, Value

from cachefs.base import ownership
from cachefs.base.errors import CacheUnusable
from cachefs.base.linux import HANGS_AFTER_S, LOOK_EVERY_S, cached_lstat, libc, punch
from cachefs.base.tasks import RETRY_S, in_thread_at_last, start_in_thread
from cachefs.store.ram import take_away

log = logging.getLogger(__name__)

T = TypeVar("T")

# -- the disk: whether it answers, and giving bytes back to it -------------------------------------

AT_ONCE_S = 0.5
"""How long the trio thread itself waits for a disk. Guessed: far longer than a disk needs to look up a name."""

READ_THREADS = 8
"""Concurrent reads of one disk. Measured on a slow virtual disk (`python -m bench.choosing reads`): of 128 KiB each, 8 at a
time get 8 MB/s, half as many 7, twice as many 10; of 1 MiB each, 18, 17 and 19. More would lengthen its queue."""

SLICE_BYTES = 64 << 20
"""Bytes that one call frees at most. Measured on ext4: freeing 64 MiB in 1,000 extents of 64 KiB takes 2 ms."""


class Disk:
    """The disk that `path` lies on: its running calls, and whether it is down. `name` is the tier's, for the log."""

    def __init__(self, name: str, path: Path) -> None:
        self.down = False
        self.on_down: list[Callable[[], object]] = []
        self._name = name
        self._path = path
        self._calls: dict[object, float] = {}
        self._readers: set[trio.CancelScope] = set()
        self._threads = trio.CapacityLimiter(READ_THREADS)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Record a call on the disk while it runs. Used in the thread that makes the call."""
        call = object()
        self._calls[call] = time.monotonic()
        try:
            yield
        finally:
            del self._calls[call]

    # -- calls that have a reader ------------------------------------------------------------------

    async def run(self, call: Callable[[], T], finish: Callable[[T | None], None]) -> T:
        """Run `call` in a worker thread; return or raise what it does. OSError(ETIMEDOUT) if the disk is or goes down.

        `finish` is called once in any case, with the result or None, and only when the call has ended, which may be long
        after this has raised, or will not be made: the call uses its descriptors until then."""
        if self.down:
            finish(None)
            raise self._hangs()
        ended, slot = trio.Event(), object()
        result: Outcome[T] | None = None

        def recorded() -> T:
            with self.busy():
                return call()

        def end(found: Outcome[T]) -> None:
            nonlocal result
            result = found
            self._threads.release_on_behalf_of(slot)
            finish(found.value if isinstance(found, Value) else None)
            ended.set()

        with trio.CancelScope() as scope:
            self._readers.add(scope)
            try:
                try:
                    self._threads.acquire_on_behalf_of_nowait(slot)
                except trio.WouldBlock:
                    try:
                        await self._threads.acquire_on_behalf_of(slot)
                    except trio.Cancelled:
                        finish(None)
                        raise
                try:
                    start_in_thread(recorded, end)
                except OSError as exc:
                    end(Error(exc))
                await ended.wait()
            finally:
                self._readers.discard(scope)
        if result is None:
            raise self._hangs()
        return result.unwrap()

    def _hangs(self) -> OSError:
        return TimeoutError(errno.ETIMEDOUT, f"the disk of {self._path} does not answer")

    def at_once(self, call: Callable[[], T]) -> T | None:
        """Run a short `call` in a thread while the trio thread blocks; return or raise what it does. None if the disk is
        down, if this call or another running one takes longer than `AT_ONCE_S`, or if no thread can be started."""
        since = min(list(self._calls.values()), default=None)
        if self.down or (since is not None and time.monotonic() - since > AT_ONCE_S):
            return None

        def recorded() -> T:
            with self.busy():
                return call()

        answer: SimpleQueue[Outcome[T]] = SimpleQueue()
        try:
            trio.lowlevel.start_thread_soon(recorded, answer.put)
        except RuntimeError:  # the system starts no more threads
            return None
        try:
            return answer.get(timeout=AT_ONCE_S).unwrap()
        except Empty:
            return None

    # -- the state ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Take the disk down if a call on it has run for longer than `HANGS_AFTER_S`."""
        since = min(list(self._calls.values()), default=None)
        if not self.down and since is not None and time.monotonic() - since > HANGS_AFTER_S:
            self.goes_down()

    def goes_down(self) -> None:
        self.down = True
        log.warning(
            "cache tier %s (%s) is down: its disk has not answered for %.0f s; reads go to the origin",
            self._name,
            self._path,
            HANGS_AFTER_S,
        )
        for scope in list(self._readers):
            scope.cancel()
        for callback in self.on_down:
            callback()
        trio.lowlevel.spawn_system_task(self._probe)

    async def _probe(self) -> None:
        """Take the disk up again when a call of its own has returned."""
        probe, limiter = partial(_write_and_remove, self._path / "probe"), trio.CapacityLimiter(1)
        await in_thread_at_last(probe, limiter=limiter)
        self.down = False
        log.warning("cache tier %s (%s) answers again", self._name, self._path)


def _write_and_remove(path: Path) -> None:
    """Write a new file out to the disk and read it back; returns when the disk has answered. Errors are ignored: the tier's
    next write meets them."""
    try:
        path.unlink(missing_ok=True)  # syncing a file that exists already may not need the disk
        fd = ownership.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            # ENOSPC comes from memory; the fsync below still writes the inode to the disk.
            with suppress(OSError):
                os.pwrite(fd, b"probe", 0)
            os.fsync(fd)
            # Otherwise the page cache would answer the read.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.pread(fd, PAGE, 0)
        finally:
            os.close(fd)
        path.unlink()
    except OSError as exc:
        log.debug("probing %s: %s", path, exc)


@dataclass
class _Job:
    """Holes to punch into a file, or with no `ranges` a file to remove. `count` bytes of disk space become free."""

    digest: bytes
    path: str
    ranges: Sequence[tuple[int, int]]
    count: int


class Disposal:
    """The removals of one tier: a queue, and the thread that carries it out. A removal that fails calls `failed` with its
    OSError, in that thread.

    An immutable file is only unlinked, because a process may have it mapped. Any other large file is truncated in slices, so
    that no single call holds the file system's journal for long."""

    def __init__(self, disk: Disk, failed: Callable[[OSError], None]) -> None:
        self.going_bytes = self.going_files = 0
        self._disk = disk
        self._failed = failed
        self._jobs: deque[_Job] = deque()
        self._pending: Counter[bytes] = Counter()
        self._changed = threading.Condition()
        self._running = False
        self._left = False  # a removal has failed, so its bytes are on the disk and in no row

    def remove(self, digest: bytes, path: str, ranges: Sequence[tuple[int, int]], count: int) -> None:
        """Queue the removal of `ranges` of the version's file, or of the file if there are none. They take `count` bytes."""
        with self._changed:
            self.going_bytes += count
            self.going_files += not ranges
            self._jobs.append(_Job(digest, path, ranges, count))
            self._pending[digest] += 1
            self._run()
            self._changed.notify_all()

    def pending(self, digest: bytes) -> bool:
        """True if a removal of the version is not done yet."""
        return digest in self._pending

    def wait_for(self, digest: bytes) -> None:
        """Wait until all removals of the version are done. Blocking. OSError(ETIMEDOUT) if the disk is down."""
        with self._changed:
            while not self._changed.wait_for(lambda: digest not in self._pending, LOOK_EVERY_S):
                if self._disk.down:
                    raise TimeoutError(errno.ETIMEDOUT, "what was there before cannot be removed")
                self._run()

    def idle(self, seconds: float) -> bool:
        """Wait at most `seconds` until all removals are done. True if all were, without an error. Blocking."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, seconds) and not self._left

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        """Start the thread if it is not running. If that fails, the next job or a waiting `wait_for` tries again."""
        if not self._running:
            self._running = True
            try:
                self._begin()
            except RuntimeError:
                self._running = False

    def _begin(self) -> None:
        threading.Thread(target=self._work, args=(LOOK_EVERY_S,), name="disposal", daemon=True).start()

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
                self._left = True
                self._failed(exc)
            with self._changed:
                self.going_bytes -= job.count
                self.going_files -= not job.ranges
                self._pending[job.digest] -= 1
                if not self._pending[job.digest]:
                    del self._pending[job.digest]
                self._changed.notify_all()


def _remove(path: str) -> None:
    """Unlink a file; truncate a large one from its end in slices after that, unless it is immutable or has another name."""
    found = os.lstat(path)
    # An immutable file is not opened for writing, which only root may do.
    if found.st_blocks * 512 <= SLICE_BYTES or is_immutable(found):
        os.unlink(path)
        return
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        os.unlink(path)
        found = os.fstat(fd)
        # Another name: `recast` linked the file to a version, and `take_out` may have made it a staging file since.
        at = 0 if found.st_nlink or is_immutable(found) else found.st_size
        while at > 0:
            at = max(0, at - SLICE_BYTES)
            os.ftruncate(fd, at)
    finally:
        os.close(fd)


def _punch(path: str, ranges: Sequence[tuple[int, int]]) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        for start, length in ranges:
            for at in range(start, start + length, SLICE_BYTES):
                punch(fd, at, min(SLICE_BYTES, start + length - at))
    finally:
        os.close(fd)


# -- the tier --------------------------------------------------------------------------------------

PAGE = 4096
"""Allocation unit of ext4, xfs and tmpfs as they are commonly made."""

HUGE_PAGE = 2 << 20
"""A huge page of x86 and most other processors. A smaller file has none."""

FREE_SPACE_EVERY_S = 0.5
"""How old a reading of the disk's free space may be. Derived: 0.5 s at 2 GB/s of other writers is 1 GB, far less than
the default reserve of 10 % of a cache disk."""

FREE_MEMORY_EVERY_S = 0.02
"""The same for a tmpfs, which answers from memory. Derived: huge pages can take twice the counted bytes, so at 1 GB/s the
reading is 20 MB behind, much less than the tenth that spilling keeps free."""

IMMUTABLE = 0o400
"""Mode of a file that was opened in passthrough or adopted: neither this daemon nor the next changes its bytes. The file
itself records it, because a mapping of the file may outlive the daemon, and the index may lag behind."""

GOING_BYTES, GOING_SHARE, GOING_FILES = 64 << 20, 16, 64
"""Bytes, share of the cap (one of 16) and files that may wait for removal without being counted as used: dropping a few
files makes room at once. The larger of the two amounts of bytes counts. Guessed: the disk keeps more than that free."""

RAM, SSD = 0, 1
"""Tier numbers, fastest first. Index rows hold them, so their meaning never changes."""

NAMES = ("ram", "ssd")
"""The tiers' names for users, by number."""

_WRITING = os.O_RDWR | os.O_NOFOLLOW
# FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_NOATIME_FL
_GETFLAGS, _SETFLAGS, _NOATIME = 0x80086601, 0x40086602, 0x80


def allocated(length: int) -> int:
    """Disk bytes that `length` bytes take: whole pages."""
    return -(-length // PAGE) * PAGE


def _identity(path: Path) -> tuple[int, int] | None:
    """(device, inode) of what is at `path` now, or None."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_immutable(status: os.stat_result) -> bool:
    return stat.S_IMODE(status.st_mode) & 0o222 == 0


def checksums(fd: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """xxh3_64 of each (offset, length) range of a file. OSError if the file is too short."""
    buffer = memoryview(bytearray(max(length for _, length in ranges)))
    found = []
    for start, length in ranges:
        if os.preadv(fd, [buffer[:length]], start) != length:
            raise OSError(errno.EIO, "short read")
        found.append(xxhash.xxh3_64_intdigest(buffer[:length]))
    return found


def next_data(fd: int, start: int) -> int:
    """Offset of the first byte of data at or after `start` in a file with holes; `sys.maxsize` if there is none."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as exc:
        if exc.errno == errno.ENXIO:
            return sys.maxsize
        raise


class Tier:
    """One directory. `number` is `RAM` or `SSD`. `blocking`: a read may wait for a device, as on a disk and not on tmpfs.
    `passthrough`: the kernel accepts its files as backing files. Times are of `clock`, in seconds."""

    def __init__(
        self, number: int, path: Path, cap_bytes: int, *, keep_free_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.number = number
        self.name = NAMES[number]
        self.path = path
        self.cap_bytes = cap_bytes
        self.blocking = number == SSD
        self.passthrough = True
        self.registered = 0  # backing files that the kernel may have now, including idle ones
        self.used_bytes = 0
        self.unlisted_bytes = 0
        self.pinned_bytes = 0
        self.remote_owned_bytes = 0
        self.blocks = 0
        self.reads_now = True  # False once the file system has refused RWF_NOWAIT
        self.errors_in_a_row = 0
        self.last_error = ""
        self._keep_free_bytes = keep_free_bytes
        self._clock = clock
        self._retry_at = 0.0
        self._free_bytes = 0
        # Files that may be made before the disk's free inodes fall below the share kept free.
        self._free_files = math.inf
        self._free_read_again_at = -1e9
        self._used_at_reading = 0
        self.disk = Disk(self.name, path)
        self.disposal = Disposal(self.disk, self.failed)
        self._identity: tuple[int, int] | None = None
        self._removed = False
        self._mounted = os.path.ismount(path)
        self._keeps_atime: bool | None = None  # None: not known yet
        self._objects = os.fspath(path / "objects")
        try:
            (path / "objects").mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = path / "probe"
            probe.touch(mode=0o600)
            probe.unlink()
            self._identity = _identity(path)
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                self.full()  # cached blocks can still be read
                return
            raise CacheUnusable(f"cannot write to the cache directory {path}: {exc.strerror}") from exc

    # -- limits and health -------------------------------------------------------------------------

    def limit_bytes(self, already_there: int = 0) -> int:
        """How many bytes the tier may use now: the cap, or less if the disk has too little free space. `already_there` are
        bytes that lie on the disk already and are about to become the tier's."""
        if self._clock() >= self._free_read_again_at:
            self._read_free()
        # Bytes that this tier took since the reading came out of the same free space.
        room = self._used_at_reading + already_there + self._free_bytes - self._keep_free_bytes
        return max(0, min(self.cap_bytes, room))

    def spare_bytes(self) -> int:
        """Free bytes of the disk now, with those of files that are about to be removed, minus those that are kept free. May
        be negative."""
        self._read_free()
        return self._free_bytes + self.disposal.going_bytes - self._keep_free_bytes

    @property
    def takes_files(self) -> bool:
        """True if the disk has an inode for one more file. The share of inodes kept free is that of its bytes."""
        if self._clock() >= self._free_read_again_at:
            self._read_free()
        return self._free_files - max(0, self.disposal.going_files - GOING_FILES) >= 1

    def _read_free(self) -> None:
        every = FREE_SPACE_EVERY_S if self.blocking else FREE_MEMORY_EVERY_S
        self._free_read_again_at = self._clock() + every
        if not self._removed and self._identity not in (None, _identity(self.path)):
            self._removed = True
            log.warning(
                "%s was removed while it is in use: reads go on from the origin; what is cached there from now on is lost "
                "when the mount ends, and what was written here and not sent is lost now: mount again",
                self.path,
            )
        try:
            stats = os.statvfs(self.path)
            self._free_bytes = stats.f_bavail * stats.f_frsize
            self._free_files = math.inf
            if stats.f_files:  # 0 where the file system makes inodes as it needs them (btrfs)
                share = self._keep_free_bytes / max(1, stats.f_blocks * stats.f_frsize)
                kept_free = math.ceil(share * stats.f_files)
                self._free_files = stats.f_favail + self.disposal.going_files - kept_free
        except OSError as exc:
            self.failed(exc)  # and go on with the last reading
        self._used_at_reading = self.used_bytes + self.disposal.going_bytes

    def full(self, unwritten: int = 0) -> None:
        """The disk returned ENOSPC: the limit is what is used now, without the `unwritten` bytes that the failed write had
        reserved, until the next reading of its free space."""
        self._free_read_again_at = self._clock() + FREE_SPACE_EVERY_S
        self._free_bytes = self._keep_free_bytes
        self._used_at_reading = self.used_bytes + self.disposal.going_bytes - unwritten

    def writable(self) -> bool:
        """True if the tier takes cache writes now."""
        return not self.disk.down and (self.errors_in_a_row == 0 or self._clock() >= self._retry_at)

    @property
    def state(self) -> str:
        if self.disk.down:
            return "down"
        if self._removed:
            return "removed"
        if self.errors_in_a_row == 0:
            return "normal"
        return "unstable" if self.errors_in_a_row < 3 else "down"

    def failed(self, exc: OSError, unwritten: int = 0) -> None:
        """Record an I/O error of this tier. It takes no writes for `RETRY_S`. For `unwritten` see `full`."""
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            self.full(unwritten)
            return
        if exc.errno == errno.ENOENT:
            return  # another program removed a file: its blocks are a miss, and the tier is well
        before = self.state
        self.errors_in_a_row += 1
        self.last_error = os.strerror(exc.errno or 0)
        self._retry_at = self._clock() + RETRY_S
        if self.state != before:
            log.warning("cache tier %s (%s) is %s: %s", self.name, self.path, self.state, self.last_error)

    def worked(self) -> None:
        """Record a successful write: the tier is well again."""
        if self.errors_in_a_row:
            log.warning("cache tier %s (%s) works again", self.name, self.path)
            self.errors_in_a_row = 0

    @property
    def own_bytes(self) -> int:
        """Used bytes of this node's own extents: those that no other node owns."""
        return self.used_bytes - self.remote_owned_bytes

    def counted_bytes(self) -> int:
        """Bytes to compare with the limit before a write: used ones, and those waiting for removal beyond an allowance."""
        removing = self.disposal.going_bytes
        allowance = max(GOING_BYTES, self.cap_bytes // GOING_SHARE) if removing else 0
        return self.used_bytes + max(0, removing - allowance)

    # -- accounting --------------------------------------------------------------------------------

    def reserve(self, count: int, already_there: int = 0) -> None:
        """Count `count` bytes as used before they are written. `already_there` of them lie on the disk already, so they take
        no free space."""
        self.used_bytes += count
        self.unlisted_bytes += count
        self._used_at_reading += already_there

    def freed(self, count: int) -> None:
        """Unlisted bytes are freed: they are no longer used."""
        self.used_bytes -= count
        self.unlisted_bytes -= count

    # -- files -------------------------------------------------------------------------------------

    def file_path(self, digest: bytes) -> Path:
        """The path of the version `digest`. There are 256 directories, so a million files are 4,000 in each."""
        return Path(self._file(digest))

    def _file(self, digest: bytes) -> str:
        # A str, not a Path: the fetch of a small file calls this five times, and making a Path takes 4 µs.
        name = digest.hex()
        return f"{self._objects}/{name[:2]}/{name[2:]}"

    def open_file(self, digest: bytes) -> int:
        """Open the version's file; returns the descriptor. It is read-only if the file is immutable and this process is not
        root's. OSError(ENOENT) if there is no file."""
        path = self._file(digest)
        try:
            return os.open(path, _WRITING)
        except OSError as exc:
            if exc.errno not in (errno.EACCES, errno.EROFS):
                raise
            # The file is immutable, or its file system was remounted read-only after an error.
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)

    def new_file(self, digest: bytes, size: int) -> int | None:
        """Create the version's file, for `size` bytes; returns the descriptor, or None if the file exists."""
        path, flags = self._file(digest), _WRITING | os.O_CREAT | os.O_EXCL
        try:
            try:
                fd = os.open(path, flags, 0o600)
            except FileNotFoundError:
                self._make_folder(path)
                fd = os.open(path, flags, 0o600)
        except FileExistsError:
            return None
        self._free_files -= 1
        if not self.blocking and size > HUGE_PAGE:
            # A tmpfs uses huge pages only below the end of the file. Measured, writing 16 MiB in order: 0.05 s a GiB with
            # this call, 0.4 to 2.5 s without.
            try:
                os.ftruncate(fd, size)
            except OSError:  # as with a limit on the size of files
                os.close(fd)
                raise
        return fd

    def open_for_writing(
        self, digest: bytes, size: int, *, known: bool, is_its_file: Callable[[int], bool] = lambda fd: True
    ) -> int:
        """Open the version's file to write blocks into it; returns the descriptor. Unless it is `known` to exist, it may be
        created, for `size` bytes. Blocking: waits for its pending removals, too. OSError(ENOENT) if it does not exist, or
        `is_its_file` is False for it; OSError(EROFS) if it is immutable."""
        self.disposal.wait_for(digest)
        with self.disk.busy():
            fd = None if known else self.new_file(digest, size)
            made = fd is not None
            if fd is None:
                fd = self.open_file(digest)
            try:
                if not made and is_immutable(os.fstat(fd)):
                    raise OSError(errno.EROFS, "immutable")  # noqa: TRY301 - as of a call
                if is_its_file(fd):
                    return fd
                if made:
                    # Another program has removed the file that other cache writes have opened. Their blocks would read as
                    # zeros in this one.
                    os.unlink(self._file(digest))
                    self._free_files += 1
                raise FileNotFoundError(errno.ENOENT, "its file was removed")
            except OSError:
                os.close(fd)
                raise

    def _make_folder(self, path: str) -> None:
        """Make the directories of a file's path that are missing."""
        if self._mounted and not os.path.ismount(self.path):
            # The tmpfs is gone; what lies below it has no cap.
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        for folder in (self.path, self._objects, os.path.dirname(path)):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                continue
            self._free_files -= 1

    def move_in(self, file: Path, digest: bytes) -> bool:
        """Rename `file`, on the same file system, to the version's file, replacing any, and make it immutable. False if the
        file system keeps no modes; then, and after an OSError, the file is at its old path."""
        path = self._file(digest)
        try:
            os.rename(file, path)
        except FileNotFoundError:
            self._make_folder(path)
            os.rename(file, path)
        try:
            os.chmod(path, IMMUTABLE)
            if is_immutable(os.lstat(path)):
                return True
        except OSError as exc:
            log.debug("the %s tier keeps no modes: %s", self.name, exc)
        os.rename(path, file)
        return False

    def put(self, digest: bytes, data: bytes) -> bool:
        """Create the version's file with the content `data`, immutable. False if there is one already, or the file system
        keeps no modes; then, and after an OSError, no new file is left."""
        fd = self.new_file(digest, len(data))
        if fd is None:
            return False
        kept = False
        try:
            view, at = memoryview(data), 0
            while at < len(data):
                at += os.pwrite(fd, view[at:], at)
            os.fchmod(fd, IMMUTABLE)
            kept = is_immutable(os.fstat(fd))
            return kept
        finally:
            os.close(fd)
            if not kept:
                os.unlink(self._file(digest))

    def move_out(self, digest: bytes, path: Path) -> int:
        """Rename the version's file to `path`, on the same file system, and make it writable. Returns a read-only
        descriptor. After an OSError the file is at its old path."""
        fd = os.open(self._file(digest), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.rename(self._file(digest), path)
            try:
                os.fchmod(fd, 0o600)
            except OSError:
                os.rename(path, self._file(digest))
                raise
        except OSError:
            os.close(fd)
            raise
        return fd

    def link(self, digest: bytes, other: bytes) -> bool:
        """Hard-link the file of the version `digest` to that of `other`. Returns True. OSError if `other` has a file."""
        path = self._file(other)
        self._make_folder(path)
        os.link(self._file(digest), path)
        return True

    def make_immutable(
        self, digest: bytes, size: int, is_its_file: Callable[[int], bool] = lambda fd: True
    ) -> int:
        """Make the version's file immutable; returns a read-only descriptor to register with the kernel. OSError if the file
        system keeps no modes, if the file has not the object's `size`, or if `is_its_file` is False for it."""
        fd = os.open(self._file(digest), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            if found.st_size != size or not is_its_file(fd):
                raise OSError(errno.EINVAL, "its file is another one or has another size")  # noqa: TRY301 - as of a call
            if not is_immutable(found):
                os.fchmod(fd, IMMUTABLE)
                if not is_immutable(os.fstat(fd)):
                    raise OSError(errno.EINVAL, "its file system keeps no modes")  # noqa: TRY301 - as of a call
            if self._keeps_atime is None:
                self._keeps_atime = not os.fstatvfs(fd).f_flag & os.ST_NOATIME
            if self._keeps_atime:  # our own tmpfs is mounted with noatime
                _set_noatime(fd)
        except OSError:
            os.close(fd)
            raise
        return fd

    def immutable(self, digest: bytes) -> bool | None:
        """True if the version's file is immutable (opened in passthrough once, or adopted). None if the disk does not answer
        at once."""
        if self.disposal.pending(digest):
            return False  # it is being removed, or punched, and an immutable file is never punched
        path = self._file(digest)
        try:
            found = cached_lstat(path) if self.blocking else os.lstat(path)
            found = found or self.disk.at_once(partial(os.lstat, path))
            return None if found is None else is_immutable(found)
        except OSError:
            return False

    def unlink(self, digest: bytes, count: int = 0) -> None:
        """Remove the version's file of `count` bytes: from memory at once, from a disk through the disposal queue."""
        if self.blocking:
            self.disposal.remove(digest, self._file(digest), (), count)
            self._free_files += 1
            return
        try:
            os.unlink(self._file(digest))
            self._free_files += 1
        except OSError as exc:
            self.failed(exc)

    def punch(self, digest: bytes, ranges: list[tuple[int, int]], count: int) -> None:
        """Punch (offset, length) ranges of the version's file, which take `count` bytes: at once in memory, through the
        disposal queue on a disk."""
        if self.blocking:
            self.disposal.remove(digest, self._file(digest), ranges, count)
            return
        try:
            _punch(self._file(digest), ranges)
        except OSError as exc:
            self.failed(exc)

    def remove(self) -> None:
        """Remove all files of the tier, and its directory if it is empty then. Blocking."""
        take_away(self.path)

    def sync(self) -> bool:
        """Write all files of the tier to the device (syncfs). False if that failed. Blocking."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            done: int = libc.syncfs(fd)
            return done == 0
        finally:
            os.close(fd)


class NoTier(Tier):
    """Stands for the tier of a file that the kernel has from an earlier daemon, in a store without tiers. It has none."""

    def __init__(self) -> None:
        self.number, self.name = SSD, NAMES[SSD]
        self.blocking, self.passthrough, self.registered = True, False, 0
        self.disk = Disk(self.name, Path(os.devnull))


def _set_noatime(fd: int) -> None:
    """Turn off access times of a cache file. Measured: the kernel then answers 6 % more small reads a second."""
    flags = bytearray(8)
    try:
        fcntl.ioctl(fd, _GETFLAGS, flags)
        number = int.from_bytes(flags[:4], sys.byteorder)
        if number & _NOATIME:
            return
        fcntl.ioctl(fd, _SETFLAGS, (number | _NOATIME).to_bytes(8, sys.byteorder))
    except OSError:
        pass  # not every file system has such a flag

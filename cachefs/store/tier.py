"""A tier: one directory that holds object versions as sparse files, and knows what it may take.

`used_bytes` counts allocated bytes (block lengths rounded up to the page), because that is what the cap and the disk
count. It is raised when room is reserved, so an overshoot is impossible, not merely bounded. `unlisted_bytes` is the
part of it that no index row will account for after a crash: on its way in, or on its way out. `remote_owned_bytes` is
the part of extents that other nodes own.

Health: after an I/O error nothing new is written for a while, then cache writes are tried again; reads go on, each failing
one is a miss. Three errors without a success between them make it *down* in `status`. A full disk is no failure: it lowers
the limit to what is used.

**Its disk** may hang instead of failing: a call on it does not return, and no signal ends it. So what may wait for it
runs in worker threads. Each such call is noted while it lasts (`busy`); one that lasts too long takes the disk *down*.
Then its readers are turned away at once, and nothing new is begun there, until a probe in a thread of its own has come
back. `goes_down` and `goes_up` are the only two transitions.

Removing a large file, or punching holes into it, takes the file system seconds, and longer on a disk that hangs. So the
trio thread only says what is to go, and one thread (`Disposal`) removes it in the order in which it was dropped. Until
a file's jobs are done, its bytes are counted as `going_bytes`, and a thread that writes the same version again waits
for that (`settle`).
"""

from __future__ import annotations

import ctypes
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
from cachefs.base.linux import HANGS_AFTER_S, cached_lstat, libc
from cachefs.base.tasks import in_thread_at_last, start_in_thread
from cachefs.store.ram import take_away

log = logging.getLogger(__name__)

T = TypeVar("T")

# -- the disk: whether it answers, and giving bytes back to it -------------------------------------

AT_ONCE_S = 0.5
"""How long the trio thread itself waits for a disk. Guessed: far longer than a disk takes to look up a name."""

LOOK_EVERY_S = 0.5
"""How often calls under way are looked at, by those that wait for one, too; and how long the thread that removes files
waits for more before it ends. Derived: a tenth of `HANGS_AFTER_S`."""

READ_THREADS = 8
"""Reads of one disk at a time; more only lengthen its queue. Guessed."""

SLICE_BYTES = 64 << 20
"""What one call frees. Measured on ext4: 1,000 extents of 64 KiB in 64 MiB go in 2 ms."""

PUNCH = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FLPUNCH_HOLE


class Disk:
    """The disk that `path` lies on. `name` is the tier's. The clock is the machine's, for threads note calls, too."""

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
        """Around a call on the disk, in the thread that makes it."""
        call = object()
        self._calls[call] = time.monotonic()
        try:
            yield
        finally:
            del self._calls[call]

    # -- calls that have a reader ------------------------------------------------------------------

    async def run(self, call: Callable[[], T], finish: Callable[[T | None], None]) -> T:
        """What `call` gives, or raises, in a thread. OSError(ETIMEDOUT) when the disk is down, or goes down meanwhile.

        `finish` is called once in any case, when the call has ended and not before: its descriptors are in use until then,
        however long that takes."""
        if self.down:
            finish(None)
            raise self._hangs()
        ended, slot = trio.Event(), object()
        result: Outcome[T] | None = None

        def noted() -> T:
            if self.down:
                raise self._hangs()  # it waited for a thread until now
            with self.busy():
                return call()

        def start() -> None:
            try:
                start_in_thread(noted, end)
            except OSError as exc:
                end(Error(exc))

        def end(found: Outcome[T]) -> None:
            nonlocal result
            result = found
            self._threads.release_on_behalf_of(slot)
            finish(found.value if isinstance(found, Value) else None)
            ended.set()

        async def start_in_turn() -> None:
            await self._threads.acquire_on_behalf_of(slot)
            start()

        try:
            self._threads.acquire_on_behalf_of_nowait(slot)
        except trio.WouldBlock:
            trio.lowlevel.spawn_system_task(start_in_turn)
        else:
            start()
        with trio.CancelScope() as scope:
            self._readers.add(scope)
            try:
                await ended.wait()
            finally:
                self._readers.discard(scope)
        if result is None:
            raise self._hangs()
        return result.unwrap()

    def _hangs(self) -> OSError:
        return TimeoutError(errno.ETIMEDOUT, f"the disk of {self._path} does not answer")

    def at_once(self, call: Callable[[], T]) -> T | None:
        """What a short `call` in a thread returns, or raises, for the trio thread, which waits for it. None if that takes
        longer than `AT_ONCE_S`, or another call does already."""
        since = min(list(self._calls.values()), default=None)
        if self.down or (since is not None and time.monotonic() - since > AT_ONCE_S):
            return None

        def noted() -> T:
            with self.busy():
                return call()

        answer: SimpleQueue[Outcome[T]] = SimpleQueue()
        try:
            trio.lowlevel.start_thread_soon(noted, answer.put)
        except RuntimeError:  # no thread can be started
            return None
        try:
            return answer.get(timeout=AT_ONCE_S).unwrap()
        except Empty:
            return None

    # -- the state ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Take the disk down if a call on it lasts too long."""
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
        for hear in self.on_down:
            hear()
        trio.lowlevel.spawn_system_task(self._probe)

    def goes_up(self) -> None:
        self.down = False
        log.warning("cache tier %s (%s) answers again", self._name, self._path)

    async def _probe(self) -> None:
        probe, limiter = partial(_write_and_remove, self._path / "probe"), trio.CapacityLimiter(1)
        await in_thread_at_last(probe, abandon_on_cancel=True, limiter=limiter)
        self.goes_up()


def _write_and_remove(path: Path) -> None:
    """Return when the disk has answered: a new file was written out to it, and read back. Errors are ignored: the tier meets
    them at its next write."""
    try:
        path.unlink(missing_ok=True)  # to write an old one out may need no disk
        fd = ownership.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            with suppress(OSError):  # a full disk says so without being asked; then the file is an inode
                os.pwrite(fd, b"probe", 0)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache would answer
            os.pread(fd, PAGE, 0)
        finally:
            os.close(fd)
        path.unlink()
    except OSError as exc:
        log.debug("probing %s: %s", path, exc)


@dataclass
class _Job:
    """`ranges` are punched out; without any, the file goes."""

    digest: bytes
    path: str
    ranges: Sequence[tuple[int, int]]
    count: int


class Disposal:
    """What is to go from one tier. `failed` is called with what the file system refuses, in the thread.

    A file that was opened in passthrough (immutable) is only ever unlinked, for a process may have it mapped. Any other
    is cut short in slices, so that no single call holds the file system's journal for long."""

    def __init__(self, disk: Disk, failed: Callable[[OSError], None]) -> None:
        self.going_bytes = self.going_files = 0
        self._disk = disk
        self._failed = failed
        self._jobs: deque[_Job] = deque()
        self._pending: Counter[bytes] = Counter()
        self._changed = threading.Condition()
        self._running = False

    def remove(self, digest: bytes, path: str, ranges: Sequence[tuple[int, int]], count: int) -> None:
        """Ranges of the version's file go, or all of it if there are none, with the `count` bytes that they take."""
        with self._changed:
            self.going_bytes += count
            self.going_files += not ranges
            self._jobs.append(_Job(digest, path, ranges, count))
            self._pending[digest] += 1
            self._run()
            self._changed.notify_all()

    def pending(self, digest: bytes) -> bool:
        """True if anything of the version is still to go."""
        return digest in self._pending

    def settle(self, digest: bytes) -> None:
        """Return when nothing of the version is still to go. Blocking. OSError(ETIMEDOUT) if the disk is down."""
        with self._changed:
            while not self._changed.wait_for(lambda: digest not in self._pending, LOOK_EVERY_S):
                if self._disk.down:
                    raise TimeoutError(errno.ETIMEDOUT, "what was there before cannot be removed")
                self._run()

    def idle(self, seconds: float) -> bool:
        """Wait until all is done, at most so long. True if it is. Blocking."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, seconds)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        """Have the thread. Where none can be started, the next job or a caller that waits tries again."""
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
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
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
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        for start, length in ranges:
            for at in range(start, start + length, SLICE_BYTES):
                some = min(SLICE_BYTES, start + length - at)
                libc.fallocate(fd, PUNCH, ctypes.c_long(at), ctypes.c_long(some))
    finally:
        os.close(fd)


# -- the tier --------------------------------------------------------------------------------------

PAGE = 4096
"""Allocation unit of ext4, xfs and tmpfs as they are commonly made."""

HUGE_PAGE = 2 << 20
"""Of x86 and of most others. Smaller files have none."""

RETRY_AFTER_S = 30.0
"""How long a failing tier is left alone before a write probes it again. Guessed."""

FREE_SPACE_EVERY_S = 0.5
"""How old a reading of the disk's free space may be. Derived: 0.5 s at 2 GB/s of other writers is 1 GB, far less than
the default reserve of 10 % of a cache disk."""

FREE_MEMORY_EVERY_S = 0.02
"""The same of a tmpfs, which answers from memory. Derived: a huge page can take twice what is counted, so at 1 GB/s it is
20 MB, much less than the tenth that spilling keeps free."""

IMMUTABLE = 0o400
"""Mode of a file that was opened in passthrough: its bytes never change any more, under this daemon and the next. The file
itself records it, because a mapping of it may outlive the daemon, and the index may lag behind."""

GOING_BYTES, GOING_SHARE, GOING_FILES = 64 << 20, 16, 64
"""So much of a tier, or this part of it, may be on its way out without being counted as used: dropping a few files makes
room at once. Guessed; the disk keeps more free."""

RAM, SSD = 0, 1
"""Tier numbers, fastest first. They tag index rows, so they never change their meaning."""

_WRITING = os.O_RDWR | os.O_NOFOLLOW
# FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_NOATIME_FL
_GETFLAGS, _SETFLAGS, _NOATIME = 0x80086601, 0x40086602, 0x80


def allocated(length: int) -> int:
    """Disk bytes that `length` bytes take."""
    return -(-length // PAGE) * PAGE


def _identity(path: Path) -> tuple[int, int] | None:
    """Of the directory that is there now; None when there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_immutable(status: os.stat_result) -> bool:
    return stat.S_IMODE(status.st_mode) & 0o222 == 0


def checksums(fd: int, ranges: Sequence[tuple[int, int]], how: int = 0) -> list[int]:
    """xxh3_64 of each range (offset, length) of a file, read as `how` (RWF_*) says. OSError when the file ends before."""
    buffer = memoryview(bytearray(max(length for _, length in ranges)))
    found = []
    for start, length in ranges:
        if os.preadv(fd, [buffer[:length]], start, how) != length:
            raise OSError(errno.EIO, "short read")
        found.append(xxhash.xxh3_64_intdigest(buffer[:length]))
    return found


class Tier:
    """One directory. `number` is `RAM` or `SSD`; `blocking` says that reading can wait for a device (true of a disk, not of
    tmpfs), `passthrough` that the kernel takes its files."""

    def __init__(
        self,
        number: int,
        name: str,
        path: Path,
        cap_bytes: int,
        *,
        blocking: bool,
        keep_free_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.number = number
        self.name = name
        self.path = path
        self.cap_bytes = cap_bytes
        self.blocking = blocking
        self.passthrough = True
        self.registered = 0  # files that the kernel may have now, idle ones among them
        self.used_bytes = 0
        self.unlisted_bytes = 0
        self.pinned_bytes = 0
        self.remote_owned_bytes = 0
        self.blocks = 0
        self.reads_now = True  # until the file system says that it cannot read without waiting
        self.errors_in_a_row = 0
        self.last_error = ""
        self._keep_free_bytes = keep_free_bytes
        self._clock = clock
        self._retry_at = 0.0
        self._free_bytes = 0
        self._free_files = math.inf  # that may be made before the disk has less than its share of inodes free
        self._free_read_again_at = -1e9
        self._used_at_reading = 0
        self.disk = Disk(name, path)
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
                self.full()  # what is there can still be read
                return
            raise CacheUnusable(f"cannot write to the cache directory {path}: {exc.strerror}") from exc

    # -- what it may take --------------------------------------------------------------------------

    def limit_bytes(self, here: int = 0) -> int:
        """The cap now: what was asked for, or less when the disk has less to give. `here` are bytes that lie on its disk
        already and are about to be the tier's."""
        if self._clock() >= self._free_read_again_at:
            self._read_free()
        # What this tier took since the reading came out of the same free space.
        room = self._used_at_reading + here + self._free_bytes - self._keep_free_bytes
        return max(0, min(self.cap_bytes, room))

    def spare_bytes(self) -> int:
        """Bytes that the disk has now beyond what is kept free; below 0 if it has less."""
        self._read_free()
        return self._free_bytes - self._keep_free_bytes

    @property
    def takes_files(self) -> bool:
        """True if the disk has an inode for one more file. The same part of its inodes stays free as of its bytes."""
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
            if stats.f_files:  # else the file system makes inodes as it needs them (btrfs)
                share = self._keep_free_bytes / max(1, stats.f_blocks * stats.f_frsize)
                kept_free = math.ceil(share * stats.f_files)
                self._free_files = stats.f_favail + self.disposal.going_files - kept_free
        except OSError as exc:
            self.failed(exc)  # and go on with the last reading
        self._used_at_reading = self.used_bytes + self.disposal.going_bytes

    def full(self) -> None:
        """The disk said ENOSPC: the limit is what is used now, until the next reading."""
        self._free_read_again_at = self._clock() + FREE_SPACE_EVERY_S
        self._free_bytes = self._keep_free_bytes
        self._used_at_reading = self.used_bytes + self.disposal.going_bytes

    def writable(self) -> bool:
        """True if new blocks may be offered to it now."""
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

    def failed(self, exc: OSError) -> None:
        """An I/O error happened on this tier."""
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            self.full()
            return
        if exc.errno == errno.ENOENT:
            return  # a file vanished: its blocks are a miss, the tier does not fail
        before = self.state
        self.errors_in_a_row += 1
        self.last_error = f"{os.strerror(exc.errno or 0)}"
        self._retry_at = self._clock() + RETRY_AFTER_S
        if self.state != before:
            log.warning("cache tier %s (%s) is %s: %s", self.name, self.path, self.state, self.last_error)

    def worked(self) -> None:
        """A write succeeded."""
        if self.errors_in_a_row:
            log.warning("cache tier %s (%s) works again", self.name, self.path)
            self.errors_in_a_row = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of this node's own copies."""
        return self.used_bytes - self.remote_owned_bytes

    def counted_bytes(self) -> int:
        """Bytes that count as used when blocks are to come: with those on their way out, beyond the first of them."""
        going = self.disposal.going_bytes
        free = max(GOING_BYTES, self.cap_bytes // GOING_SHARE) if going else 0
        return self.used_bytes + max(0, going - free)

    # -- accounting --------------------------------------------------------------------------------

    def reserve(self, count: int, here: int = 0) -> None:
        """Bytes will come. The disk has `here` of them already: these come out of no free space."""
        self.used_bytes += count
        self.unlisted_bytes += count
        self._used_at_reading += here

    def committed(self, count: int) -> None:
        """Reserved bytes have come: a row speaks of them."""
        self.unlisted_bytes -= count

    def forgot(self, count: int) -> None:
        """No row speaks of these bytes any more, but they are still there."""
        self.unlisted_bytes += count

    def freed(self, count: int) -> None:
        """Unlisted bytes are gone."""
        self.used_bytes -= count
        self.unlisted_bytes -= count

    # -- files -------------------------------------------------------------------------------------

    def file_path(self, digest: bytes) -> Path:
        """Where the version `digest` lies. 256 directories keep a million files at 4,000 each."""
        return Path(self._file(digest))

    def _file(self, digest: bytes) -> str:
        # As text: a small file's fetch comes here five times, and each Path takes 4 µs to put together.
        name = digest.hex()
        return f"{self._objects}/{name[:2]}/{name[2:]}"

    def open_file(self, digest: bytes) -> int:
        """A descriptor of the version's file, for reading only if it is immutable and we are not root. OSError(ENOENT) when
        it is not there."""
        path = self._file(digest)
        try:
            return os.open(path, _WRITING)
        except OSError as exc:
            if exc.errno not in (errno.EACCES, errno.EROFS):
                raise
            # It is immutable, or its file system was remounted read-only after an error.
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)

    def new_file(self, digest: bytes, size: int) -> int | None:
        """A descriptor of the version's file, made here, for `size` bytes; None when there is one already."""
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
            # A tmpfs has huge pages only below the end of the file. Measured: writing 16 MiB in their order then takes
            # 0.05 s a GiB, without it 0.4 to 2.5.
            os.ftruncate(fd, size)
        return fd

    def open_for_writing(self, digest: bytes, size: int, *, known: bool) -> int:
        """A descriptor of the version's file, of `size` bytes, to write blocks into it; `known` when it must be there
        already. Blocking, and waits for what is still to go of it. OSError(ENOENT) when it is not there, OSError(EROFS) when
        it is immutable."""
        self.disposal.settle(digest)
        with self.disk.busy():
            fd = None if known else self.new_file(digest, size)
            if fd is not None:
                return fd
            fd = self.open_file(digest)
            try:
                if is_immutable(os.fstat(fd)):
                    raise OSError(errno.EROFS, "immutable")  # noqa: TRY301 - as of a call
            except OSError:
                os.close(fd)
                raise
            return fd

    def _make_folder(self, path: str) -> None:
        """For a file that is to come."""
        if self._mounted and not os.path.ismount(self.path):
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))  # what is below has no cap of ours
        for folder in (self.path, self._objects, os.path.dirname(path)):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                continue
            self._free_files -= 1

    def take(self, file: Path, digest: bytes) -> bool:
        """A file of the same file system becomes the version's, immutable, in place of any other. False where the file
        system keeps no modes; then, and when it raises OSError, it is where it was."""
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
        """A file that holds `data` becomes the version's, immutable. False where there is one already, or the file system
        keeps no modes; then, and when this raises OSError, nothing is left of it."""
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

    def give(self, digest: bytes, path: Path) -> int:
        """The version's file goes to `path`, on the same file system, and may be written there. Returns a descriptor, for
        reading only. When this raises OSError, the file is where it was."""
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
        """The file of a version gets a second name, that of another: True. OSError where that one has a file already."""
        path = self._file(other)
        self._make_folder(path)
        os.link(self._file(digest), path)
        return True

    def make_immutable(self, digest: bytes, size: int) -> int:
        """A descriptor, for the kernel, of the version's file, which is not written any more from here on. OSError when that
        cannot be promised, or when it has not the size that the kernel will be told."""
        fd = os.open(self._file(digest), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            if found.st_size == size:
                if not is_immutable(found):
                    os.fchmod(fd, IMMUTABLE)
                if is_immutable(os.fstat(fd)):
                    if self._keeps_atime is None:
                        self._keeps_atime = not os.fstatvfs(fd).f_flag & os.ST_NOATIME
                    if self._keeps_atime:  # a memory tier is mounted so that it keeps none
                        _set_noatime(fd)
                    return fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        raise OSError(errno.EINVAL, "its file has another size, or its file system keeps no modes")

    def immutable(self, digest: bytes) -> bool:
        """True if the version's file was ever opened in passthrough, or adopted; or its disk does not tell, for then nothing
        must be written to it, either."""
        if self.disposal.pending(digest):
            return False  # it goes; or it is being punched, which no immutable one ever is
        path = self._file(digest)
        try:
            found = cached_lstat(path) if self.blocking else os.lstat(path)
            found = found or self.disk.at_once(partial(os.lstat, path))
            return found is None or is_immutable(found)
        except OSError:
            return False

    def unlink(self, digest: bytes, count: int = 0) -> None:
        """Its file goes, with the bytes that it takes: at once from memory, soon from a disk."""
        if self.blocking:
            self.disposal.remove(digest, self._file(digest), (), count)
            self._free_files += 1
            return
        try:
            os.unlink(self._file(digest))
            self._free_files += 1
        except FileNotFoundError:
            pass
        except OSError as exc:
            self.failed(exc)

    def dispose_of(self, digest: bytes, ranges: list[tuple[int, int]], count: int) -> None:
        """Byte ranges of its file go soon, with so many bytes."""
        self.disposal.remove(digest, self._file(digest), ranges, count)

    def remove(self) -> None:
        """Give up the whole tier: its files go, and its directory if nothing else lies there. Blocking."""
        take_away(self.path)

    def sync(self) -> bool:
        """Wait until all its files are on the device; False if that failed. Blocking."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            done: int = libc.syncfs(fd)
            return done == 0
        finally:
            os.close(fd)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """Give the bytes back to the file system; False where it cannot do that."""
        done: int = libc.fallocate(fd, PUNCH, ctypes.c_long(offset), ctypes.c_long(length))
        return done == 0


def _set_noatime(fd: int) -> None:
    """Keep no access times of a cache file. Measured: the kernel then answers 6 % more small reads a second."""
    flags = bytearray(8)
    try:
        fcntl.ioctl(fd, _GETFLAGS, flags)
        number = int.from_bytes(flags[:4], sys.byteorder)
        if number & _NOATIME:
            return
        fcntl.ioctl(fd, _SETFLAGS, (number | _NOATIME).to_bytes(8, sys.byteorder))
    except OSError:
        pass  # not every file system has such a flag

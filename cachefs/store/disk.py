"""The disk under a tier: whether it answers, and giving bytes back to it.

A disk may hang instead of failing: a call on it does not return, and no signal ends it. So what may wait for it runs in
worker threads. Each such call is noted while it lasts (`busy`); one that lasts too long takes the disk *down*. Then its
readers are turned away at once, and nothing new is begun there, until a probe in a thread of its own has come back.
`goes_down` and `goes_up` are the only two transitions.

Removing a large file, or punching holes into it, takes the file system seconds, and longer on a disk that hangs. So the
trio thread only says what is to go, and one thread (`Disposal`) removes it in the order in which it was dropped. Until a
file's jobs are done, its bytes are counted as `going_bytes`, and a thread that writes the same version again waits for
that (`settle`).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import trio
from outcome import Outcome

from cachefs.base.linux import libc
from cachefs.base.tasks import in_thread, in_thread_at_last

log = logging.getLogger(__name__)

T = TypeVar("T")

HANGS_AFTER_S = 5.0
"""A call that lasts longer hangs. Guessed: disks retry a bad sector for a second or two, and a reader has 30 s."""

AT_ONCE_S = 0.5
"""How long the trio thread itself waits for a disk. Guessed: far longer than a disk takes to look up a name."""

LOOK_EVERY_S = 0.5
"""How often calls under way are looked at. Derived: a tenth of that."""

READ_THREADS = 8
"""Reads of one disk at a time; more only lengthen its queue. Guessed."""

SLICE_BYTES = 64 << 20
"""What one call frees. Measured on ext4: 1,000 extents of 64 KiB in 64 MiB go in 2 ms."""

IDLE_S = 1.0
"""How long the thread waits for more before it ends. Guessed."""

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
        ended = trio.Event()
        result: T | None = None
        failure: Exception | None = None

        def noted() -> T:
            if self.down:
                raise self._hangs()  # it waited for a thread until now
            with self.busy():
                return call()

        async def carry_out() -> None:
            nonlocal result, failure
            try:
                result = await in_thread(noted, abandon_on_cancel=True, limiter=self._threads)
            except Exception as exc:
                failure = exc
            finish(result)
            ended.set()

        trio.lowlevel.spawn_system_task(carry_out)
        with trio.CancelScope() as scope:
            self._readers.add(scope)
            try:
                await ended.wait()
            finally:
                self._readers.discard(scope)
        if not ended.is_set():
            raise self._hangs()
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]

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
            *(self._name, self._path, HANGS_AFTER_S),
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
    """Return when the disk has answered. Errors are ignored: the tier meets them at its next write."""
    try:
        with open(path, "wb") as file:
            file.write(b"probe")
            os.fsync(file.fileno())
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
            while not self._changed.wait_for(lambda: digest not in self._pending, IDLE_S):
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

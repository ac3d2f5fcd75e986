"""The kernel's requests, implemented over `FileSystem`: one method for each, used by both backends.

A method returns the answer if it is known at once, else a `Pending` with the work that finds it. A backend unpacks a
request, calls the method, and packs the answer. `Waiting` applies the rules of a request that waits (memory, deadline,
ledger), and `Operations.errno_of` maps every exception.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import trio

from cachefs.base.errors import NotFound, ObjectChanged
from cachefs.base.ledger import NAMES, WRITES, Wait, current_call
from cachefs.base.linux import HANGS_AFTER_S, memory_limit
from cachefs.base.logs import Repeats
from cachefs.base.metrics import Metrics
from cachefs.fs import Attributes, Entry, FileSystem, Space
from cachefs.fs.dirty_files import Opened
from cachefs.fs.filesystem import Created
from cachefs.fs.reader import Buffer
from cachefs.fuse.callers import Writers
from cachefs.fuse.errno_table import OURS, errno_of_foreign, tell
from cachefs.fuse.walks import WalksAgain
from cachefs.fuse.zero_open import UnopenedFiles

T = TypeVar("T")

Shown = tuple[Attributes, float]
"""Attributes, and for how many seconds the kernel may keep them."""

Looked = tuple[Attributes | None, float]
"""The same for a looked-up name; the attributes are None if there is no such name, which the kernel may keep as long."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
"""Flags of an open that may change the file."""

CHANGING = WRITING | os.O_CREAT | os.O_APPEND
"""Flags of an open that is not just for reading."""

SHARE = 4
"""Waiting requests may hold one part of so many of the process's memory limit. Borrowed from the RAM tier's default."""

REQUEST_BYTES = 16 << 10
"""Memory of a waiting request besides its data. Measured: 9 to 14 KiB for the task, its scope and its closures."""

MOST_ENTRIES = 256
"""Directory entries that the kernel's buffer takes. Derived: readdir(3) asks for 32 KiB, and an entry with its attributes
has 160 bytes or more, so it takes 204."""


class Errno(Exception):
    """An errno as a regular answer: it is neither logged nor counted as a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.number = number


class Refused(MemoryError):
    """There is no memory for another waiting request."""


# -- requests that wait ----------------------------------------------------------------------------


class Rule(Enum):
    """What may end the work of a request early. For a WHOLE request a signal ends the wait of the calling process, but not
    the work, which is bounded by the deadlines of its requests to the origin."""

    TIMED = auto()  # the deadline, or a signal that ends the calling process
    PATIENT = auto()  # only a signal that ends the calling process
    WHOLE = auto()  # nothing


class Request(NamedTuple):
    """A kind of request. `on` is the reason for its wait in the ledger (None for reads, which the reader enters there),
    `shown` its name there. `always`: it is admitted without memory, too, like stat(2) and the requests that report whether a
    file was uploaded."""

    name: str
    on: str | None = NAMES
    rule: Rule = Rule.TIMED
    always: bool = False
    shown: str = ""


LOOKUP, OPEN, READDIR, GETXATTR = map(Request, ("lookup", "open", "readdir", "getxattr"))
GETATTR = Request("getattr", always=True)
READ = Request("read", None)
OPEN_TO_WRITE, CREATE, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, SETATTR = (
    Request(name, rule=Rule.WHOLE)
    for name in ("open", "create", "mknod", "mkdir", "unlink", "rmdir", "rename", "setattr")
)
WRITE, FALLOCATE = Request("write", WRITES, Rule.WHOLE), Request("fallocate", WRITES, Rule.WHOLE)
FLUSH = Request("flush", WRITES, Rule.PATIENT, always=True, shown="close")
FSYNC = Request("fsync", WRITES, Rule.PATIENT, always=True)


@dataclass(slots=True)
class Pending(Generic[T]):
    """An answer that is not known yet: `work` finds it. `thread` made the request (0: unknown). `data_bytes` is the memory
    that `work` holds."""

    request: Request
    thread: int
    work: Callable[[], Awaitable[T]]
    data_bytes: int = 0


class Admission:
    """Bounds the memory of waiting requests; `held_bytes` is what they hold now.

    The backend never stops reading requests, so that writes of one program that wait for an upload do not delay other
    programs. Beyond the bound, a request that would have to wait is answered with ENOMEM instead."""

    def __init__(self) -> None:
        self.limit_bytes = memory_limit() // SHARE
        self.held_bytes = 0

    def take(self, count: int, *, always: bool) -> None:
        """Count `count` bytes as held. Raises `Refused` beyond the bound, unless `always`."""
        if not always and self.held_bytes + count > self.limit_bytes:
            raise Refused(f"requests that wait hold {self.held_bytes >> 20} MiB already")
        self.held_bytes += count


class Waiting(Generic[T]):
    """A waiting request: its memory is counted, and it is in the ledger. `answer` has to be awaited once. Raises `Refused`
    if there is no memory for it."""

    __slots__ = ("_admission", "_call", "_held_bytes", "_scope", "_work", "interrupted", "request", "thread")

    def __init__(self, pending: Pending[T], operations: Operations) -> None:
        self.request = request = pending.request
        self.thread = pending.thread
        self.interrupted = False
        self._work = pending.work
        self._held_bytes = REQUEST_BYTES + pending.data_bytes
        self._admission = operations.admission
        self._admission.take(self._held_bytes, always=request.always)
        self._call: Wait | None = None
        if request.on is not None:
            waits = operations.metrics.ledger.waits
            self._call = waits.call(pending.thread, request.on, request.shown or request.name)
        self._scope = None
        if request.rule is not Rule.WHOLE:
            self._scope = trio.CancelScope()
            if request.rule is Rule.TIMED:
                self._scope.deadline = trio.current_time() + operations.deadline_s

    async def answer(self) -> T:
        """Do the work. Raises what it raises, `TooSlowError`, or `Errno` (EINTR). There is no checkpoint after the work, so
        a handle that was opened is always returned."""
        token = current_call.set(self._call)
        try:
            if self._scope is None:
                return await self._work()
            with self._scope:
                return await self._work()
            raise Errno(errno.EINTR) if self.interrupted else trio.TooSlowError
        finally:
            current_call.reset(token)
            self._leave_ledger()
            self._admission.held_bytes -= self._held_bytes

    def interrupt(self) -> bool:
        """Stop the work, unless it is WHOLE, because a signal ends the calling process. True if the work goes on."""
        self.interrupted = True
        self._leave_ledger()
        if self._scope is not None:
            self._scope.cancel()
        return self._scope is None

    def _leave_ledger(self) -> None:
        if self._call is not None:
            self._call.end()


# -- the requests ----------------------------------------------------------------------------------


class Operations:
    """The requests of one mount. `deadline_s` bounds every wait that is `Rule.TIMED`. `device` returns the "major:minor" of
    the mount, "" if it is not known."""

    def __init__(
        self,
        fs: FileSystem,
        metrics: Metrics,
        deadline_s: float,
        *,
        writable: bool = False,
        device: Callable[[], str] = lambda: "",
    ) -> None:
        self.deadline_s = deadline_s + HANGS_AFTER_S  # the cache disk may take so long beside the origin
        self.admission = Admission()
        self.writers = Writers(device)
        self.unopened = UnopenedFiles(fs)
        self.walks = WalksAgain(fs, self.deadline_s)
        self.metrics = metrics
        self._fs = fs
        self._writable = writable
        self._repeats = Repeats()
        self._turns: dict[int, trio.Lock] = {}  # by directory

    def took_over(self) -> None:
        """Go on with the mount of a daemon that has died. Only if names can be changed here may it have answered ESTALE to
        programs whose second walk is still to come: on a read-only mount, looking names up must not open files."""
        if self._writable:
            self.walks.took_over()

    def errno_of(self, request: str, exc: Exception) -> int:
        """The errno that answers a request which raised `exc`, of any type. Failures are logged and counted."""
        if isinstance(exc, Errno):
            return exc.number
        return tell(request, exc, self.metrics, self.deadline_s, self._repeats)

    # -- names and attributes ----------------------------------------------------------------------

    def lookup(self, thread: int, parent: int, name: bytes) -> Looked | Pending[Looked]:
        self.metrics.fuse_lookup += 1
        if (self.walks.threads or self.walks.unsure) and self.walks.again(thread):
            return Pending(LOOKUP, thread, partial(self.walks.lookup, thread, parent, name))
        found = self._fs.lookup_now(parent, name)
        if found is None:
            return Pending(LOOKUP, thread, partial(self._fs.lookup, parent, name))
        return found

    def getattr(self, thread: int, inode: int) -> Shown | Pending[Shown]:
        self.metrics.fuse_getattr += 1
        try:
            found = self._fs.attributes_now(inode)
        except ObjectChanged:
            self.walks.begin(thread)
            raise
        if found is None:
            return Pending(GETATTR, thread, partial(self._known, thread, partial(self._fs.getattr, inode)))
        return found

    def statfs(self) -> Space:
        self.metrics.fuse_other += 1
        return self._fs.statfs()

    def getxattr(self, thread: int, inode: int, name: bytes, uid: int) -> Pending[bytes]:
        self.metrics.fuse_other += 1
        if not name.startswith(OURS):
            raise Errno(errno_of_foreign(name))
        return Pending(GETXATTR, thread, partial(self._fs.getxattr, inode, name, uid))

    def listxattr(self) -> list[bytes]:
        """An empty list: our attributes are not listed, because copying programs would copy them."""
        self.metrics.fuse_other += 1
        return []

    def readlink(self) -> bytes:
        self.metrics.fuse_other += 1
        raise Errno(errno.EINVAL)  # there are no symbolic links

    # -- directories -------------------------------------------------------------------------------

    def opendir(self, inode: int) -> int:
        self.metrics.fuse_opendir += 1
        return self._fs.opendir(inode)

    def readdir(self, thread: int, dh: int, offset: int, most: int = MOST_ENTRIES) -> Pending[list[Entry]]:
        """At most as many entries as the kernel's buffer takes, if the backend knows that number."""
        self.metrics.fuse_readdir += 1
        return Pending(READDIR, thread, partial(self._fs.readdir, dh, offset, most))

    def releasedir(self, dh: int) -> None:
        self._fs.releasedir(dh)

    # -- files -------------------------------------------------------------------------------------

    def open(self, thread: int, inode: int, flags: int, clear: bool = False) -> Opened | Pending[Opened]:
        """Open a file. `clear`: set-uid and set-gid bits are cleared if the file is emptied, or written in passthrough."""
        self.metrics.fuse_open += 1
        if flags & WRITING and self._writable:
            return Pending(OPEN_TO_WRITE, thread, partial(self._open_to_write, thread, inode, flags, clear))
        try:
            opened = self._fs.open_now(inode, flags, thread)
        except ObjectChanged:
            self.walks.begin(thread)
            raise
        if opened is None:
            work = partial(self._fs.open, inode, flags, thread)
            return Pending(OPEN, thread, partial(self._walked_to, thread, work))
        if self.walks.threads:
            self.walks.end(thread)
        return opened

    async def _known(self, thread: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work on a file that the kernel has looked up. After `ObjectChanged` the kernel walks the path again."""
        try:
            return await work()
        except ObjectChanged:
            self.walks.begin(thread)
            raise

    async def _walked_to(self, thread: int, work: Callable[[], Awaitable[T]]) -> T:
        """`_known` for the request that the kernel has walked the path for: it ends a second walk."""
        answer = await self._known(thread, work)
        if self.walks.threads:
            self.walks.end(thread)
        return answer

    async def _open_to_write(self, thread: int, inode: int, flags: int, clear: bool) -> Opened:
        opened = await self._walked_to(thread, partial(self._fs.open, inode, flags, thread))
        self.writers.opened(opened[0], inode, thread)
        if clear:
            self._fs.clear_set_ids(opened[0], later=not flags & os.O_TRUNC)
        return opened

    def read(self, thread: int, fh: int, offset: int, size: int) -> Buffer | Pending[Buffer]:
        self.metrics.fuse_read += 1
        data = self._fs.read_now(fh, offset, size)
        if data is None:
            return Pending(READ, thread, partial(self._count_bytes, self._fs.read, fh, offset, size))
        self.metrics.fuse_read_bytes += len(data)
        return data

    def read_unopened(self, thread: int, inode: int, offset: int, size: int) -> Buffer | Pending[Buffer]:
        """`read` for a file that the kernel has not opened (`--zero-open`)."""
        self.metrics.fuse_read += 1
        data = self.unopened.read_now(inode, offset, size)
        if data is None:
            read = partial(self.unopened.read, thread)
            return Pending(READ, thread, partial(self._count_bytes, read, inode, offset, size))
        self.metrics.fuse_read_bytes += len(data)
        return data

    async def _count_bytes(
        self, read: Callable[[int, int, int], Awaitable[Buffer]], file: int, offset: int, size: int
    ) -> Buffer:
        data = await read(file, offset, size)
        self.metrics.fuse_read_bytes += len(data)
        return data

    def release(self, fh: int) -> None:
        self.metrics.fuse_release += 1
        self.drop(fh)

    def drop(self, fh: int) -> None:
        """Release a handle that the kernel does not have."""
        if self._writable:
            self.writers.released(fh)
        self._fs.release(fh)

    # -- changes -----------------------------------------------------------------------------------

    def _changing(self) -> None:
        """Raise `Errno` (EROFS) on a read-only mount."""
        if not self._writable:
            self.metrics.fuse_other += 1
            raise Errno(errno.EROFS)

    def create(
        self, thread: int, parent: int, name: bytes, flags: int, mode: int, uid: int, gid: int
    ) -> Pending[Created]:
        work = partial(self._create, thread, parent, name, flags, mode, uid, gid)
        return self._in_turn(CREATE, thread, work, parent)

    async def _create(
        self, thread: int, parent: int, name: bytes, flags: int, mode: int, uid: int, gid: int
    ) -> Created:
        work = partial(self._fs.create, parent, name, flags, mode, thread, uid, gid)
        made = await self._walked_to(thread, work)
        attributes, _, opened = made
        self.writers.opened(opened[0], attributes.ino, thread)
        return made

    def mknod(
        self, thread: int, parent: int, name: bytes, mode: int, uid: int, gid: int, *, again: bool = False
    ) -> Pending[Shown]:
        """`again`: the kernel repeats the request."""
        work = partial(self._fs.mknod, parent, name, mode, thread, uid, gid, again=again)
        return self._in_turn(MKNOD, thread, work, parent)

    def mkdir(
        self, thread: int, parent: int, name: bytes, mode: int, uid: int, gid: int, *, again: bool = False
    ) -> Pending[Shown]:
        """For `again` see `mknod`."""
        work = partial(self._fs.mkdir, parent, name, mode, uid, gid, again=again)
        return self._in_turn(MKDIR, thread, work, parent)

    def unlink(self, thread: int, parent: int, name: bytes) -> Pending[None]:
        return self._in_turn(UNLINK, thread, partial(self._fs.unlink, parent, name), parent)

    def rmdir(self, thread: int, parent: int, name: bytes) -> Pending[None]:
        return self._in_turn(RMDIR, thread, partial(self._fs.rmdir, parent, name), parent)

    def rename(
        self,
        thread: int,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int,
        *,
        again: bool = False,
    ) -> Pending[None]:
        """For `again` see `mknod`."""
        work = partial(self._fs.rename, parent, name, new_parent, new_name, flags, again=again)
        return self._in_turn(RENAME, thread, work, parent, new_parent)

    def gone_again(self, pending: Pending[None], left: tuple[int, bytes] | None = None) -> Pending[None]:
        """UNLINK, RMDIR or RENAME that the kernel repeats: if the previous daemon has removed the name, that is success.
        `left` is the (parent, name) that must exist afterwards (None: none)."""

        async def work() -> None:
            try:
                await pending.work()
            except NotFound:
                if left is not None and (await self._fs.lookup(*left))[0] is None:
                    raise

        return replace(pending, work=work)

    def setattr(self, thread: int, inode: int, **changes: Any) -> Pending[Shown]:
        """For `changes` see `FileSystem.setattr`; a mode has permission bits alone."""
        self._changing()
        self.metrics.fuse_change += 1
        work = partial(self._fs.setattr, inode, **changes)
        return Pending(SETATTR, thread, partial(self._walked_to, thread, work))

    def write(
        self, thread: int, fh: int, offset: int, data: Buffer, held_bytes: int, clear: bool
    ) -> int | Pending[int]:
        """Write to a file; the answer is the number of bytes written. `held_bytes` is the size of the buffer that `data`
        lies in. `clear`: clear set-uid and set-gid bits."""
        self._changing()
        self.metrics.fuse_write += 1
        size = self._fs.write_now(fh, offset, data)
        if size is None:
            return Pending(WRITE, thread, partial(self._write, fh, offset, data, clear), held_bytes)
        return self._wrote(fh, size, clear)

    async def _write(self, fh: int, offset: int, data: Buffer, clear: bool) -> int:
        return self._wrote(fh, await self._fs.write(fh, offset, data), clear)

    def _wrote(self, fh: int, size: int, clear: bool) -> int:
        if clear:
            self._fs.clear_set_ids(fh)
        self.metrics.fuse_write_bytes += size
        return size

    def fallocate(self, thread: int, fh: int, mode: int, offset: int, length: int) -> Pending[None]:
        self._changing()
        self.metrics.fuse_change += 1
        return Pending(FALLOCATE, thread, partial(self._fs.fallocate, fh, mode, offset, length))

    def flush(self, thread: int, fh: int) -> Pending[None]:
        """Handle the close of a descriptor. The last one of a handle has the file uploaded."""
        if not self._writable:
            # After ENOSYS the kernel sends no more FLUSH for the mount. A read-only mount has no upload errors to report.
            raise Errno(errno.ENOSYS)
        self.metrics.fuse_flush += 1
        return Pending(FLUSH, thread, partial(self._flush, fh))

    async def _flush(self, fh: int) -> None:
        if await self.writers.last(fh):
            await self._fs.flush(fh)

    def fsync(self, thread: int, fh: int) -> Pending[None] | None:
        """Upload a file. None on a read-only mount, where there is nothing to do."""
        if not self._writable:
            self.metrics.fuse_other += 1
            return None
        self.metrics.fuse_flush += 1
        return Pending(FSYNC, thread, partial(self._fs.fsync, fh))

    def link(self) -> None:
        """Refuse hard and symbolic links (EPERM)."""
        self._changing()
        self.metrics.fuse_other += 1
        raise Errno(errno.EPERM)

    def setxattr(self, name: bytes) -> None:
        """Ignore an attribute of ours, because a copy from another mount may carry some. Used for removing one, too."""
        self._changing()
        self.metrics.fuse_other += 1
        if not name.startswith(OURS):
            raise Errno(errno.EOPNOTSUPP)

    # -- turns -------------------------------------------------------------------------------------

    def _in_turn(
        self, request: Request, thread: int, work: Callable[[], Awaitable[T]], *directories: int
    ) -> Pending[T]:
        """A `Pending` that does `work`, which changes names in these directories, when no other such change is running. The
        kernel sends the changes of a directory one by one, but sends the next after an interrupted one whose work goes
        on."""
        self._changing()
        if request is CREATE or request is MKNOD:
            self.metrics.fuse_create += 1
        else:
            self.metrics.fuse_change += 1
        # Locks are always taken in this order, so that no two requests wait for each other.
        return Pending(request, thread, partial(self._take_turn, work, sorted(set(directories))))

    async def _take_turn(self, work: Callable[[], Awaitable[T]], directories: Sequence[int]) -> T:
        if not directories:
            return await work()
        directory, *others = directories
        lock = self._turns.setdefault(directory, trio.Lock())
        if lock.locked():
            await lock.acquire()
        else:
            lock.acquire_nowait()
        try:
            return await self._take_turn(work, others)
        finally:
            if not lock.statistics().tasks_waiting:
                del self._turns[directory]
            lock.release()

"""The kernel's requests, implemented over `FileSystem`: one method for each, used by both backends.

A method returns the answer if it is known at once, else a `Pending` with the work that finds it. A backend unpacks a
request, calls the method, and packs the answer. `Waiting` applies the rules of a request that waits (memory, deadline,
ledger), and `Operations.errno_of` maps every exception.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import trio

from cachefs.base.errors import NotFound, ObjectChanged
from cachefs.base.ledger import NAMES, WRITES, Wait, current_call
from cachefs.base.linux import HANGS_AFTER_S, memory_limit
from cachefs.base.logs import Repeats
from cachefs.base.metrics import Metrics
from cachefs.base.tasks import Lock
from cachefs.fs import Attributes, Entry, FileSystem, Space
from cachefs.fs.dirty_files import Opened
from cachefs.fs.filesystem import Created
from cachefs.fs.reader import Buffer
from cachefs.fuse.callers import Writers
from cachefs.fuse.errno_table import XATTR_PREFIX, errno_of_foreign_xattr, report_failure
from cachefs.fuse.walks import SecondWalks
from cachefs.fuse.zero_open import UnopenedFiles

T = TypeVar("T")

AttributesReply = tuple[Attributes, float]
"""(attributes, ttl): the kernel may keep them for `ttl` seconds."""

LookupReply = tuple[Attributes | None, float]
"""(attributes or None, ttl) for a looked-up name. None: there is no such name, and the kernel may keep that for `ttl`
seconds."""

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
"""Flags of an open that may change the file."""

CHANGE_FLAGS = WRITE_FLAGS | os.O_CREAT | os.O_APPEND
"""Flags of an open that is not just for reading."""

MEMORY_SHARE = 4
"""Waiting requests may hold the process's memory limit divided by this. Borrowed from the RAM tier's default."""

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
    """What may end the work of a request early."""

    DEADLINE = auto()  # the deadline, or a signal that ends the calling process
    KILLABLE = auto()  # only a signal that ends the calling process
    RUN_TO_END = auto()
    """Nothing. A signal ends the wait of the calling process, but the work goes on. It is bounded by the deadlines of its
    requests to the origin."""


class Request(NamedTuple):
    """A kind of request. `waits_on` is the reason for its wait in the ledger (None for reads, which the reader enters
    there), `ledger_name` its name there if it differs. `always_admitted`: it is admitted without memory, too, like stat(2)
    and the requests that report whether a file was uploaded."""

    name: str
    waits_on: str | None = NAMES
    rule: Rule = Rule.DEADLINE
    always_admitted: bool = False
    ledger_name: str = ""


LOOKUP, OPEN, READDIR, GETXATTR = map(Request, ("lookup", "open", "readdir", "getxattr"))
GETATTR = Request("getattr", always_admitted=True)
READ = Request("read", None)
OPEN_TO_WRITE, CREATE, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, SETATTR = (
    Request(name, rule=Rule.RUN_TO_END)
    for name in ("open", "create", "mknod", "mkdir", "unlink", "rmdir", "rename", "setattr")
)
WRITE, FALLOCATE = Request("write", WRITES, Rule.RUN_TO_END), Request("fallocate", WRITES, Rule.RUN_TO_END)
FLUSH = Request("flush", WRITES, Rule.KILLABLE, always_admitted=True, ledger_name="close")
FSYNC = Request("fsync", WRITES, Rule.KILLABLE, always_admitted=True)


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
        self.limit_bytes = memory_limit() // MEMORY_SHARE
        self.held_bytes = 0

    def take(self, count: int, *, always: bool) -> None:
        """Count `count` bytes as held. Raises `Refused` beyond the bound, unless `always`."""
        if not always and self.held_bytes + count > self.limit_bytes:
            raise Refused(f"requests that wait hold {self.held_bytes >> 20} MiB already")
        self.held_bytes += count


class Waiting(Generic[T]):
    """A waiting request: its memory is counted, and it is in the ledger. `answer` has to be awaited once; `begun` is True
    from then on. Raises `Refused` if there is no memory for it."""

    def __init__(self, pending: Pending[T], operations: Operations) -> None:
        self.request = request = pending.request
        self.thread = pending.thread
        self.begun = self.interrupted = False
        self._work = pending.work
        self._held_bytes = REQUEST_BYTES + pending.data_bytes
        self._admission = operations.admission
        self._admission.take(self._held_bytes, always=request.always_admitted)
        self._call: Wait | None = None
        if request.waits_on is not None:
            waits = operations.metrics.ledger.waits
            self._call = waits.call(pending.thread, request.waits_on, request.ledger_name or request.name)
        self._scope = None
        if request.rule is not Rule.RUN_TO_END:
            self._scope = trio.CancelScope()
            if request.rule is Rule.DEADLINE:
                self._scope.deadline = trio.current_time() + operations.deadline_s

    async def answer(self) -> T:
        """Do the work. Raises what it raises, `TooSlowError`, or `Errno` (EINTR). There is no checkpoint after the work, so
        a handle that was opened is always returned."""
        token = current_call.set(self._call)
        self.begun = True
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
        """Stop the work, unless it is RUN_TO_END, because a signal ends the calling process. True if the work goes on."""
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
    """The requests of one mount. `deadline_s` bounds every wait that is `Rule.DEADLINE`. `device` returns the "major:minor"
    of the mount, "" if it is not known."""

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
        self.walks = SecondWalks(fs, self.deadline_s)
        self.metrics = metrics
        self._fs = fs
        self._writable = writable
        self._repeats = Repeats()
        self._directory_locks: dict[int, Lock] = {}  # by directory
        self._changing = Counter[int]()  # how many changes of its file run, by handle
        self._released: set[int] = set()  # those of these handles that the kernel has released

    def took_over(self) -> None:
        """Go on with the mount of a daemon that has died. If it has answered ESTALE to a program, the second walk is still
        to come. It can have done so on a writable mount only; on a read-only one, looking names up must not open files."""
        if self._writable:
            self.walks.took_over()

    def errno_of(self, request: str, exc: Exception) -> int:
        """The errno that answers a request which raised `exc`, of any type. Failures are logged and counted."""
        if isinstance(exc, Errno):
            return exc.number
        return report_failure(request, exc, self.metrics, self.deadline_s, self._repeats)

    # -- names and attributes ----------------------------------------------------------------------

    def lookup(self, thread: int, parent: int, name: bytes) -> LookupReply | Pending[LookupReply]:
        self.metrics.fuse_lookup += 1
        if (self.walks.threads or self.walks.assume_second) and self.walks.is_second(thread):
            return Pending(LOOKUP, thread, partial(self.walks.lookup, thread, parent, name))
        found = self._fs.lookup_now(parent, name)
        if found is None:
            return Pending(LOOKUP, thread, partial(self._fs.lookup, parent, name))
        return found

    def getattr(self, thread: int, inode: int) -> AttributesReply | Pending[AttributesReply]:
        self.metrics.fuse_getattr += 1
        try:
            found = self._fs.attributes_now(inode)
        except ObjectChanged:
            self.walks.begin(thread)
            raise
        if found is None:
            return Pending(
                GETATTR, thread, partial(self._begin_walk_on_change, thread, partial(self._fs.getattr, inode))
            )
        return found

    def statfs(self) -> Space:
        self.metrics.fuse_other += 1
        return self._fs.statfs()

    def getxattr(self, thread: int, inode: int, name: bytes, uid: int) -> Pending[bytes]:
        self.metrics.fuse_other += 1
        if not name.startswith(XATTR_PREFIX):
            raise Errno(errno_of_foreign_xattr(name))
        return Pending(GETXATTR, thread, partial(self._fs.getxattr, inode, name, uid))

    def listxattr(self) -> list[bytes]:
        """An empty list: our attributes are not listed, because copying programs would copy them."""
        self.metrics.fuse_other += 1
        return []

    def readlink(self) -> NoReturn:
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

    def open(
        self, thread: int, inode: int, flags: int, clear_set_ids: bool = False
    ) -> Opened | Pending[Opened]:
        """Open a file. `clear_set_ids`: set-uid and set-gid bits are cleared if it is emptied, or written in passthrough."""
        self.metrics.fuse_open += 1
        if flags & WRITE_FLAGS and self._writable:
            return Pending(
                OPEN_TO_WRITE, thread, partial(self._open_to_write, thread, inode, flags, clear_set_ids)
            )
        try:
            opened = self._fs.open_now(inode, flags, thread)
        except ObjectChanged:
            self.walks.begin(thread)
            raise
        if opened is None:
            work = partial(self._fs.open, inode, flags, thread)
            return Pending(OPEN, thread, partial(self._end_walk_after, thread, work))
        if self.walks.threads:
            self.walks.end(thread)
        return opened

    async def _begin_walk_on_change(self, thread: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work on a file that the kernel has looked up. If it raises `ObjectChanged`, the kernel walks the path
        again."""
        try:
            return await work()
        except ObjectChanged:
            self.walks.begin(thread)
            raise

    async def _end_walk_after(self, thread: int, work: Callable[[], Awaitable[T]]) -> T:
        """`_begin_walk_on_change` for the request for which the kernel has walked the path: its success ends a second
        walk."""
        answer = await self._begin_walk_on_change(thread, work)
        if self.walks.threads:
            self.walks.end(thread)
        return answer

    async def _open_to_write(self, thread: int, inode: int, flags: int, clear_set_ids: bool) -> Opened:
        opened = await self._end_walk_after(thread, partial(self._fs.open, inode, flags, thread))
        self.writers.opened(opened[0], inode, thread)
        if clear_set_ids:
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

    def drop(self, fh: int) -> None:
        """Release a handle that the kernel does not have, or has released. If a change of its file runs, the end of the
        change does this."""
        if fh in self._changing:
            self._released.add(fh)
            return
        if self._writable:
            self.writers.released(fh)
        self._fs.release(fh)

    # -- changes -----------------------------------------------------------------------------------

    async def _change(self, fh: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work`, which changes the file of a handle. If a signal ends the calling process, the kernel releases the
        handle before the work ends; the file would then not be uploaded after the change."""
        self._changing[fh] += 1
        try:
            return await work()
        finally:
            self._changing[fh] -= 1
            if not self._changing[fh]:
                del self._changing[fh]
                if fh in self._released:
                    self._released.remove(fh)
                    self.drop(fh)

    def _require_writable(self) -> None:
        """Raise `Errno` (EROFS) on a read-only mount."""
        if not self._writable:
            self.metrics.fuse_other += 1
            raise Errno(errno.EROFS)

    def create(
        self, thread: int, parent: int, name: bytes, flags: int, mode: int, uid: int, gid: int
    ) -> Created | Pending[Created]:
        self._require_writable()
        if parent not in self._directory_locks:
            made = self._fs.create_now(parent, name, flags, mode, thread, uid, gid)
            if made is not None:
                self.metrics.fuse_create += 1
                return self._created(thread, made)
        return self.create_in_task(thread, parent, name, flags, mode, uid, gid)

    def create_in_task(
        self, thread: int, parent: int, name: bytes, flags: int, mode: int, uid: int, gid: int
    ) -> Pending[Created]:
        create = partial(self._fs.create, parent, name, flags, mode, thread, uid, gid)

        async def work() -> Created:
            return self._created(thread, await self._begin_walk_on_change(thread, create))

        return self._serialized(CREATE, thread, work, parent)

    def _created(self, thread: int, made: Created) -> Created:
        attributes, _, opened = made
        self.writers.opened(opened[0], attributes.ino, thread)
        if self.walks.threads:
            self.walks.end(thread)
        return made

    def mknod(
        self, thread: int, parent: int, name: bytes, mode: int, uid: int, gid: int, *, resent: bool = False
    ) -> Pending[AttributesReply]:
        """`resent`: the kernel repeats the request, so the previous daemon may have carried it out."""
        work = partial(self._fs.mknod, parent, name, mode, thread, uid, gid, again=resent)
        return self._serialized(MKNOD, thread, work, parent)

    def mkdir(
        self, thread: int, parent: int, name: bytes, mode: int, uid: int, gid: int, *, resent: bool = False
    ) -> Pending[AttributesReply]:
        """For `resent` see `mknod`."""
        work = partial(self._fs.mkdir, parent, name, mode, uid, gid, again=resent)
        return self._serialized(MKDIR, thread, work, parent)

    def unlink(self, thread: int, parent: int, name: bytes) -> Pending[None]:
        return self._serialized(UNLINK, thread, partial(self._fs.unlink, parent, name), parent)

    def rmdir(self, thread: int, parent: int, name: bytes) -> Pending[None]:
        return self._serialized(RMDIR, thread, partial(self._fs.rmdir, parent, name), parent)

    def rename(
        self,
        thread: int,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int,
        *,
        resent: bool = False,
    ) -> Pending[None]:
        """For `resent` see `mknod`."""
        work = partial(self._fs.rename, parent, name, new_parent, new_name, flags, again=resent)
        return self._serialized(RENAME, thread, work, parent, new_parent)

    def tolerate_removed(
        self, pending: Pending[None], new_name: tuple[int, bytes] | None = None
    ) -> Pending[None]:
        """`pending` for an UNLINK, RMDIR or RENAME that the kernel repeats: it succeeds, too, if the previous daemon has
        removed the name. `new_name` is the (parent, name) that must exist after a RENAME."""

        async def work() -> None:
            try:
                await pending.work()
            except NotFound:
                if new_name is not None and (await self._fs.lookup(*new_name))[0] is None:
                    raise

        return replace(pending, work=work)

    def setattr(self, thread: int, inode: int, **changes: Any) -> Pending[AttributesReply]:
        """For `changes` see `FileSystem.setattr`; a mode has permission bits alone."""
        self._require_writable()
        self.metrics.fuse_change += 1
        work: Callable[[], Awaitable[AttributesReply]] = partial(self._fs.setattr, inode, **changes)
        if (fh := changes.get("fh")) is not None:
            work = partial(self._change, fh, work)
        return Pending(SETATTR, thread, partial(self._end_walk_after, thread, work))

    def write(
        self, thread: int, fh: int, offset: int, data: Buffer, held_bytes: int, clear_set_ids: bool
    ) -> int | Pending[int]:
        """Write to a file; the answer is the number of bytes written. `held_bytes` is the size of the buffer that `data`
        lies in. `clear_set_ids`: clear set-uid and set-gid bits."""
        self._require_writable()
        self.metrics.fuse_write += 1
        size = self._fs.write_now(fh, offset, data)
        if size is None:
            write = partial(self._change, fh, partial(self._write, fh, offset, data, clear_set_ids))
            return Pending(WRITE, thread, write, held_bytes)
        return self._wrote(fh, size, clear_set_ids)

    async def _write(self, fh: int, offset: int, data: Buffer, clear_set_ids: bool) -> int:
        return self._wrote(fh, await self._fs.write(fh, offset, data), clear_set_ids)

    def _wrote(self, fh: int, size: int, clear_set_ids: bool) -> int:
        if clear_set_ids:
            self._fs.clear_set_ids(fh)
        self.metrics.fuse_write_bytes += size
        return size

    def fallocate(self, thread: int, fh: int, mode: int, offset: int, length: int) -> Pending[None]:
        self._require_writable()
        self.metrics.fuse_change += 1
        allocate = partial(self._fs.fallocate, fh, mode, offset, length)
        return Pending(FALLOCATE, thread, partial(self._change, fh, allocate))

    def flush(self, thread: int, fh: int) -> Pending[None]:
        """Handle the close of a descriptor. The last one of a handle has the file uploaded."""
        if not self._writable:
            # After ENOSYS the kernel sends no more FLUSH for the mount. A read-only mount has no upload errors to report.
            raise Errno(errno.ENOSYS)
        self.metrics.fuse_flush += 1
        return Pending(FLUSH, thread, partial(self._flush, fh))

    async def _flush(self, fh: int) -> None:
        if await self.writers.closed_last(fh):
            await self._fs.flush(fh)

    def fsync(self, thread: int, fh: int) -> Pending[None] | None:
        """Upload a file. None on a read-only mount, where there is nothing to do."""
        if not self._writable:
            self.metrics.fuse_other += 1
            return None
        self.metrics.fuse_flush += 1
        return Pending(FSYNC, thread, partial(self._fs.fsync, fh))

    def link(self) -> NoReturn:
        """Refuse hard and symbolic links (EPERM)."""
        self._require_writable()
        self.metrics.fuse_other += 1
        raise Errno(errno.EPERM)

    def setxattr(self, name: bytes) -> None:
        """Ignore an attribute of ours, because a copy from another mount may carry some. Used for removing one, too."""
        self._require_writable()
        self.metrics.fuse_other += 1
        if not name.startswith(XATTR_PREFIX):
            raise Errno(errno.EOPNOTSUPP)

    # -- one change of a directory at a time -------------------------------------------------------

    def _serialized(
        self, request: Request, thread: int, work: Callable[[], Awaitable[T]], *directories: int
    ) -> Pending[T]:
        """A `Pending` that does `work`, which changes names in these directories, when no other such change is running. The
        kernel sends the changes of a directory one by one. But if a signal interrupts one, the kernel sends the next while
        the work of the first goes on."""
        self._require_writable()
        if request is CREATE or request is MKNOD:
            self.metrics.fuse_create += 1
        else:
            self.metrics.fuse_change += 1
        # Locks are always taken in this order, so that no two requests wait for each other.
        return Pending(request, thread, partial(self._with_locks, work, sorted(set(directories))))

    async def _with_locks(self, work: Callable[[], Awaitable[T]], directories: Sequence[int]) -> T:
        directory, *others = directories
        lock = self._directory_locks.setdefault(directory, Lock())
        await lock.acquire()
        try:
            return await (self._with_locks(work, others) if others else work())
        finally:
            if not lock.waited_for:
                del self._directory_locks[directory]
            lock.release()

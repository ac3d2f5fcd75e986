"""What each request of the kernel does, over `FileSystem`: one method a request, the same for both backends.

A method returns the answer where it is known at once, and otherwise a `Pending`: the work that finds it. A backend unpacks
a request, calls the method, and packs the answer. `Operations.begin` applies the rules of a request that waits (memory,
deadline, ledger), and `Operations.errno_of` maps every exception.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import trio

from cachefs.base.errors import AlreadyExists, NotFound, ObjectChanged
from cachefs.base.ledger import NAMES, WRITES, Wait, current_call
from cachefs.base.linux import HANGS_AFTER_S, memory_limit
from cachefs.base.logs import Repeats
from cachefs.base.metrics import Metrics
from cachefs.fs import Attributes, Entry, FileSystem, Space
from cachefs.fs.filesystem import Created, Opened
from cachefs.fs.reader import Buffer
from cachefs.fuse.callers import Writers
from cachefs.fuse.errno_table import OURS, errno_of_foreign, tell
from cachefs.fuse.walks import WalksAgain
from cachefs.fuse.zero_open import UnopenedFiles

T = TypeVar("T")

Shown = tuple[Attributes, float]
"""Attributes, and for how many seconds the kernel may keep them."""

Looked = tuple[Attributes | None, float]
"""The same for a name. None means that there is no such name, and the kernel may keep that as long."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
"""Flags of an open that may change the file."""

CHANGING = WRITING | os.O_CREAT | os.O_APPEND
"""And those that say so of a file that it does not change."""

SHARE = 4
"""Requests that wait may hold this part of the memory that the process may have. Borrowed from the RAM tier's default."""

REQUEST_BYTES = 16 << 10
"""What a request that waits takes beside its data. Measured: 9 to 14 KiB for the task, its scope and its closures."""

FIRST_PAGE, SMALLEST_PAGE, LARGEST_PAGE = 32, 8, 1024
"""Directory entries that are asked of the filesystem at a time. The kernel's buffer takes about 25 (4 KiB, READDIRPLUS) to
1,000 (128 KiB); the page follows what the last buffer took."""


class Errno(Exception):
    """The answer is this errno. It is no failure: it is neither logged nor counted as one."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.number = number


class Refused(MemoryError):
    """There is no memory for one more request that waits."""


# -- requests that wait ----------------------------------------------------------------------------


class Rule(Enum):
    """What ends the work of a request before it is done. A signal ends the wait of a WHOLE one, too, but not its work; what
    bounds that are the deadlines of its requests to the origin."""

    TIMED = auto()  # the deadline, or a signal that ends the calling process
    PATIENT = auto()  # such a signal
    WHOLE = auto()  # nothing


class Request(NamedTuple):
    """A kind of request. `on` is what the ledger says it waits for (None: it is a read, which the reader enters), and
    `shown` its name there. A request is admitted `always` if it must work without memory: stat(2), and the requests that
    report whether a file was uploaded."""

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
    """The answer is not known yet: `work` finds it. `thread` made the request (0: unknown). `data_bytes` is what `work`
    holds."""

    request: Request
    thread: int
    work: Callable[[], Awaitable[T]]
    data_bytes: int = 0


class Admission:
    """Bounds the memory of requests that wait; `held_bytes` is what they hold now.

    Requests are always read from the kernel, so that writes of one program that wait for an upload do not hold up the
    requests of others. Beyond the bound, a request that would have to wait is answered with ENOMEM instead."""

    def __init__(self) -> None:
        self.limit_bytes = memory_limit() // SHARE
        self.held_bytes = 0

    def take(self, count: int, *, always: bool) -> None:
        """Raises `Refused`, unless `always`."""
        if not always and self.held_bytes + count > self.limit_bytes:
            raise Refused(f"requests that wait hold {self.held_bytes >> 20} MiB already")
        self.held_bytes += count


class Waiting(Generic[T]):
    """A request under way: its memory is accounted for, and the ledger knows it. `answer` has to be awaited once. Raises
    `Refused` if it may not wait."""

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
        """Carry the work out. Raises what it raises, `TooSlowError`, or `Errno` (EINTR). Once the work is done there is no
        checkpoint any more, so a handle that was opened is always returned."""
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
        """A signal ends the calling process. Stop the work, unless it has to be carried out; return whether it goes on."""
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
    """`deadline_s` bounds every wait that is `Rule.TIMED`. `device` returns the "major:minor" of the mount, "" where it is
    not known."""

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
        self.walks = WalksAgain(fs)
        self.metrics = metrics
        self._fs = fs
        self._writable = writable
        self._repeats = Repeats()
        self._turns: dict[int, trio.Lock] = {}  # by directory
        self._page = FIRST_PAGE

    def errno_of(self, request: str, exc: Exception) -> int:
        """The errno that answers a request which raised this. Total. Failures are logged and counted."""
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
        """The attributes of ours are not listed: a copy would take them along."""
        self.metrics.fuse_other += 1
        return []

    def readlink(self) -> bytes:
        self.metrics.fuse_other += 1
        raise Errno(errno.EINVAL)  # there are no symbolic links

    # -- directories -------------------------------------------------------------------------------

    def opendir(self, inode: int) -> int:
        self.metrics.fuse_opendir += 1
        return self._fs.opendir(inode)

    def readdir(self, thread: int, dh: int, offset: int, most: int = 0) -> Pending[list[Entry]]:
        """At least as many entries as the buffer takes, if there are. `most` is how many it takes; a backend that does not
        know (0) is given a few more than the last buffer took, and says how many this one took (`listed`)."""
        self.metrics.fuse_readdir += 1
        return Pending(READDIR, thread, partial(self._fs.readdir, dh, offset, most or self._page + 4))

    def listed(self, count: int, fitted: int) -> None:
        """Of `count` entries the kernel's buffer took `fitted`."""
        full = fitted < count
        self._page = max(SMALLEST_PAGE, fitted) if full else min(LARGEST_PAGE, self._page + 16)

    def releasedir(self, dh: int) -> None:
        self._fs.releasedir(dh)

    # -- files -------------------------------------------------------------------------------------

    def open(self, thread: int, inode: int, flags: int, clear: bool = False) -> Opened | Pending[Opened]:
        """`clear`: set-uid and set-gid bits go if the file is emptied, or written in passthrough."""
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
        """The answer about a file that the kernel has looked up. It walks the path again where that is another by now."""
        try:
            return await work()
        except ObjectChanged:
            self.walks.begin(thread)
            raise

    async def _walked_to(self, thread: int, work: Callable[[], Awaitable[T]]) -> T:
        """The same where this was what the kernel walked for, and no question on its way."""
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
        """The same for a file that the kernel did not open (`--zero-open`)."""
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
        """Release a handle that the kernel never heard of."""
        if self._writable:
            self.writers.released(fh)
        self._fs.release(fh)

    # -- changes -----------------------------------------------------------------------------------

    def _changing(self) -> None:
        """Raise `Errno` (EROFS) on a mount that cannot be written."""
        if not self._writable:
            self.metrics.fuse_other += 1
            raise Errno(errno.EROFS)

    def create(
        self, thread: int, parent: int, name: bytes, flags: int, mode: int, uid: int, gid: int
    ) -> Pending[Created]:
        self._changing()
        self.metrics.fuse_create += 1
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

    def mknod(self, thread: int, parent: int, name: bytes, mode: int, uid: int, gid: int) -> Pending[Shown]:
        self._changing()
        self.metrics.fuse_create += 1
        if not stat.S_ISREG(mode):
            raise Errno(errno.EPERM)  # pipes, sockets, devices
        work = partial(self._fs.mknod, parent, name, mode, thread, uid, gid)
        return self._in_turn(MKNOD, thread, work, parent)

    def mkdir(self, thread: int, parent: int, name: bytes, mode: int, uid: int, gid: int) -> Pending[Shown]:
        self._changing()
        self.metrics.fuse_change += 1
        return self._in_turn(MKDIR, thread, partial(self._fs.mkdir, parent, name, mode, uid, gid), parent)

    def unlink(self, thread: int, parent: int, name: bytes) -> Pending[None]:
        self._changing()
        self.metrics.fuse_change += 1
        return self._in_turn(UNLINK, thread, partial(self._fs.unlink, parent, name), parent)

    def rmdir(self, thread: int, parent: int, name: bytes) -> Pending[None]:
        self._changing()
        self.metrics.fuse_change += 1
        return self._in_turn(RMDIR, thread, partial(self._fs.rmdir, parent, name), parent)

    def rename(
        self, thread: int, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> Pending[None]:
        self._changing()
        self.metrics.fuse_change += 1
        work = partial(self._fs.rename, parent, name, new_parent, new_name, flags)
        return self._in_turn(RENAME, thread, work, parent, new_parent)

    def made_again(self, pending: Pending[Shown], parent: int, name: bytes) -> Pending[Shown]:
        """MKDIR or MKNOD, repeated by the kernel: a daemon that has died may have made the name, and that is the answer."""

        async def work() -> Shown:
            try:
                return await pending.work()
            except AlreadyExists:
                return await self._found(parent, name)

        return replace(pending, work=work)

    def gone_again(self, pending: Pending[None], left: tuple[int, bytes] | None = None) -> Pending[None]:
        """UNLINK, RMDIR or RENAME, repeated by the kernel: a daemon that has died may have removed the name. `left` is the
        parent and the name that is there after that (None: there is none)."""

        async def work() -> None:
            try:
                await pending.work()
            except NotFound:
                if left is not None:
                    await self._found(*left)

        return replace(pending, work=work)

    async def _found(self, parent: int, name: bytes) -> Shown:
        """Raises `NotFound`."""
        attributes, ttl = await self._fs.lookup(parent, name)
        if attributes is None:
            raise NotFound("the name is not there")
        return attributes, ttl

    def setattr(
        self,
        thread: int,
        inode: int,
        *,
        size: int | None,
        mode: int | None,
        uid: int | None,
        gid: int | None,
        atime_ns: int | None,
        mtime_ns: int | None,
        fh: int | None,
        clear: bool,
    ) -> Pending[Shown]:
        """Set what is not None. Of `mode` the permission bits count. `clear`: set-uid and set-gid bits go."""
        self._changing()
        self.metrics.fuse_change += 1
        mode = None if mode is None else stat.S_IMODE(mode)
        times = {"atime_ns": atime_ns, "mtime_ns": mtime_ns}
        wanted = {"size": size, "mode": mode, "uid": uid, "gid": gid, **times, "fh": fh}
        work = partial(self._fs.setattr, inode, **wanted, clear=clear)
        return Pending(SETATTR, thread, partial(self._walked_to, thread, work))

    def write(
        self, thread: int, fh: int, offset: int, data: Buffer, held_bytes: int, clear: bool
    ) -> int | Pending[int]:
        """The number of bytes written. `held_bytes` is the size of the buffer that `data` lies in. `clear`: set-uid and
        set-gid bits go."""
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
        """A descriptor is closed. Only the last one has the file uploaded."""
        if not self._writable:
            # Answered once, this stops the kernel from sending FLUSH at all; a read-only mount has nothing to report.
            raise Errno(errno.ENOSYS)
        self.metrics.fuse_flush += 1
        return Pending(FLUSH, thread, partial(self._flush, fh))

    async def _flush(self, fh: int) -> None:
        if await self.writers.last(fh):
            await self._fs.flush(fh)

    def fsync(self, thread: int, fh: int) -> Pending[None] | None:
        """None on a mount that cannot be written: there is nothing to do."""
        if not self._writable:
            self.metrics.fuse_other += 1
            return None
        self.metrics.fuse_flush += 1
        return Pending(FSYNC, thread, partial(self._fs.fsync, fh))

    def link(self) -> None:
        """Links of either kind: there are none."""
        self._changing()
        self.metrics.fuse_other += 1
        raise Errno(errno.EPERM)

    def setxattr(self, name: bytes) -> None:
        """Accept an attribute of ours and drop it: a copy from another mount may carry some. Removing one is the same."""
        self._changing()
        self.metrics.fuse_other += 1
        if not name.startswith(OURS):
            raise Errno(errno.EOPNOTSUPP)

    # -- turns -------------------------------------------------------------------------------------

    def _in_turn(
        self, request: Request, thread: int, work: Callable[[], Awaitable[T]], *directories: int
    ) -> Pending[T]:
        """`work` changes names in these directories. The kernel sends such changes of a directory one after the other, but
        takes one that was interrupted for done while it is still carried out here. So they wait for each other here, too."""
        # Always in this order, so no two wait for each other.
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

"""pyfuse3's handlers over `FileSystem`.

Warm requests never await: they ask the `*_now` form first, so neither a deadline nor the scheduler costs them anything.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pyfuse3
import trio

from cachefs.errors import MountError
from cachefs.fs import Attributes, Backing, FileSystem
from cachefs.fuse import passed
from cachefs.fuse.admission import Admission
from cachefs.fuse.device import abort, end
from cachefs.fuse.errno_table import GRACE_S, OURS, errno_of_foreign, tell
from cachefs.ledger import NAMES, Call
from cachefs.logs import Repeats
from cachefs.metrics import Metrics
from cachefs.mountinfo import mount_at

log = logging.getLogger(__name__)

MOST_TASKS = 1 << 20
"""pyfuse3 gives each request a task, and reads the next one only if it may have one more. So there is always one more, and
`Admission` bounds what waits. Derived: with 16 KiB each, more than any machine's quarter of memory admits."""


class Pyfuse3Base(pyfuse3.Operations):
    """What both kinds of mount have in common. `deadline_s` bounds every operation that has to wait."""

    name = "pyfuse3"
    max_background = 0
    mount_options: frozenset[str] = frozenset()

    enable_writeback_cache = False
    supports_dot_lookup = False

    def __init__(
        self,
        fs: FileSystem,
        metrics: Metrics,
        deadline_s: float,
        on_ready: Callable[[], None],
        admission: Admission | None = None,
    ) -> None:
        super().__init__()
        self._fs = fs
        self._metrics = metrics
        self._repeats = Repeats()
        self._deadline_s = deadline_s + GRACE_S
        self._on_ready = on_ready
        self._admission = admission or Admission()
        self._mountpoint: Path | None = None  # what is to be unmounted
        self._number = ""  # major:minor of the connection, as long as it lives
        self._page = 32  # directory entries that fitted the kernel's last buffer
        self._listing: dict[int, int] = {}  # open directories: which thread opened them

    # -- the front ---------------------------------------------------------------------------------

    def mount(self, mountpoint: Path, name: str, *, allow_other: bool) -> None:
        """Mount; the kernel's questions are answered once `serve` runs. Raises `MountError`."""
        options = set(pyfuse3.default_options)
        options |= {f"fsname={name}", "subtype=cachefs", "default_permissions", *self.mount_options}
        if allow_other:
            options.add("allow_other")
        self._begin(str(mountpoint), options)
        self._mountpoint = mountpoint
        mount = mount_at(mountpoint)
        self._number = mount.device if mount is not None else ""

    def take(self, fd: int, name: str) -> None:
        """The same over a descriptor that somebody else has mounted, and will unmount. Raises `MountError`."""
        self._number = passed.connection(fd)
        self._begin(f"/dev/fd/{fd}", {*pyfuse3.default_options, f"fsname={name}"})

    def _begin(self, place: str, options: set[str]) -> None:
        try:
            pyfuse3.init(self, place, options)
        except RuntimeError as exc:
            raise MountError(str(exc)) from exc

    def init(self) -> None:
        self._on_ready()

    async def serve(self) -> None:
        await pyfuse3.main(min_tasks=1, max_tasks=MOST_TASKS)
        self._number = ""

    def close(self, *, unmount: bool = True) -> None:
        if self._number:
            # See Device.close: else a notification under way can keep all of it from ending. What is aborted before it is
            # unmounted, libfuse would leave where it is.
            if self._mountpoint is not None and unmount:
                end(self._mountpoint, self._number)
            else:
                abort(self._number)
        pyfuse3.close(unmount=unmount)

    def lend(self, backing: Backing) -> None:
        raise OSError(errno.EOPNOTSUPP, "pyfuse3 cannot")

    def retire(self, backing: Backing) -> None:
        return

    def invalidate(self, inode: int, parent: int, name: bytes) -> None:
        try:
            if inode:
                pyfuse3.invalidate_inode(inode, attr_only=False)
        except OSError as exc:
            log.debug("invalidate inode: %s", exc)  # ENOENT: the kernel does not know it
        try:
            if name:
                pyfuse3.invalidate_entry(parent, name)
        except OSError as exc:
            log.debug("invalidate entry: %s", exc)

    # -- names and attributes ----------------------------------------------------------------------

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        self._metrics.fuse_lookup += 1
        try:
            found = self._fs.lookup_now(parent_inode, name)
            if found is None:
                with self._waits(ctx.pid, "lookup"):
                    found = await self._fs.lookup(parent_inode, name)
            attributes, ttl = found
            if attributes is not None:
                return entry_of(attributes, ttl)
        except Exception as exc:
            self._fail("lookup", exc)
        if not ttl:
            raise pyfuse3.FUSEError(errno.ENOENT)
        negative = pyfuse3.EntryAttributes()
        negative.st_ino = 0
        negative.entry_timeout = ttl
        return negative

    async def getattr(self, inode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        self._metrics.fuse_getattr += 1
        try:
            found = self._fs.attributes_now(inode)
            if found is None:
                with self._waits(ctx.pid, "getattr"):
                    found = await self._fs.getattr(inode)
            return entry_of(*found)
        except Exception as exc:
            self._fail("getattr", exc)

    async def forget(self, inode_list: Any) -> None:
        return  # nothing is kept per inode the kernel knows

    async def statfs(self, ctx: Any) -> pyfuse3.StatvfsData:
        self._metrics.fuse_other += 1
        try:
            shown = self._fs.statfs()
        except Exception as exc:
            self._fail("statfs", exc)
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = shown.block_size
        data.f_blocks = shown.blocks
        data.f_bfree = data.f_bavail = shown.blocks_free
        data.f_files = shown.files + shown.files_free
        data.f_ffree = data.f_favail = shown.files_free
        data.f_namemax = shown.name_max
        return data

    # -- directories -------------------------------------------------------------------------------

    async def opendir(self, inode: int, ctx: Any) -> int:
        self._metrics.fuse_opendir += 1
        try:
            with self._waits(ctx.pid, "opendir"):
                dh = await self._fs.opendir(inode)
        except Exception as exc:
            self._fail("opendir", exc)
        self._listing[dh] = ctx.pid
        return dh

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        self._metrics.fuse_readdir += 1
        try:
            with self._waits(self._listing.get(fh, 0), "readdir"):
                entries = await self._fs.readdir(fh, start_id, self._page + 4)
            fitted = 0
            for entry in entries:
                shown = entry_of(entry.attributes, entry.ttl)
                if not pyfuse3.readdir_reply(token, entry.name, shown, entry.next_offset):
                    break
                fitted += 1
        except Exception as exc:
            self._fail("readdir", exc)
        # Ask for about as many as the kernel's buffer took the last time.
        self._page = max(8, fitted) if fitted < len(entries) else min(1024, self._page + 16)

    async def releasedir(self, fh: int) -> None:
        self._listing.pop(fh, None)
        try:
            self._fs.releasedir(fh)
        except Exception:
            log.exception("releasedir")  # the kernel does not listen to what release says

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        return

    # -- files -------------------------------------------------------------------------------------

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        self._metrics.fuse_open += 1
        try:
            opened = self._fs.open_now(inode, flags, ctx.pid)
            if opened is None:
                with self._waits(ctx.pid, "open"):
                    opened = await self._fs.open(inode, flags, ctx.pid)
        except Exception as exc:
            self._fail("open", exc)
        return pyfuse3.FileInfo(fh=opened[0], keep_cache=opened[1])

    async def read(self, fh: int, off: int, size: int) -> Any:
        metrics = self._metrics
        metrics.fuse_read += 1
        try:
            data = self._fs.read_now(fh, off, size)
            if data is None:
                with self._admission.holds(), trio.fail_after(self._deadline_s):
                    data = await self._fs.read(fh, off, size)
        except Exception as exc:
            self._fail("read", exc)
        metrics.fuse_read_bytes += len(data)
        return data

    async def release(self, fh: int) -> None:
        self._metrics.fuse_release += 1
        try:
            self._fs.release(fh)
        except Exception:
            log.exception("release")

    # -- extended attributes -----------------------------------------------------------------------

    async def getxattr(self, inode: int, name: bytes, ctx: Any) -> bytes:
        self._metrics.fuse_other += 1
        if not name.startswith(OURS):
            raise pyfuse3.FUSEError(errno_of_foreign(name))
        try:
            with self._waits(ctx.pid, "getxattr"):
                return await self._fs.getxattr(inode, name, ctx.uid)
        except Exception as exc:
            self._fail("getxattr", exc)

    async def listxattr(self, inode: int, ctx: Any) -> list[bytes]:
        self._metrics.fuse_other += 1
        return []

    async def access(self, inode: int, mode: int, ctx: Any) -> bool:
        return True  # the kernel checks the mode bits (default_permissions)

    async def readlink(self, inode: int, ctx: Any) -> bytes:
        raise pyfuse3.FUSEError(errno.EINVAL)  # there are no symbolic links

    @contextmanager
    def _waits(self, thread: int, request: str) -> Iterator[None]:
        """Around what cannot be answered at once, and is no read. stat(2) is always admitted."""
        admitted = nullcontext() if request == "getattr" else self._admission.holds()
        with admitted, self._called(thread, NAMES, request), trio.fail_after(self._deadline_s):
            yield

    def _called(self, thread: int, on: str, request: str) -> Call:
        return self._metrics.ledger.waits.call(thread, on, request)

    def _fail(self, operation: str, exc: Exception) -> NoReturn:
        if isinstance(exc, pyfuse3.FUSEError):
            raise exc
        raise pyfuse3.FUSEError(tell(operation, exc, self._metrics, self._deadline_s, self._repeats)) from exc


class Pyfuse3Front(Pyfuse3Base):
    """A mount that cannot be written: the kernel refuses all of this by itself."""

    mount_options = frozenset({"ro"})

    async def flush(self, fh: int) -> None:
        # Answered once, this stops the kernel from sending FLUSH at all; a read-only mount has nothing to report.
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def fsync(self, fh: int, datasync: bool) -> None:
        return

    async def _read_only(self, *_: Any, **__: Any) -> NoReturn:
        self._metrics.fuse_other += 1
        raise pyfuse3.FUSEError(errno.EROFS)

    setattr = mknod = mkdir = unlink = rmdir = symlink = rename = link = create = write = setxattr = (
        removexattr
    ) = _read_only


def entry_of(attributes: Attributes, ttl: float) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = attributes.ino
    entry.st_mode = attributes.mode
    entry.st_nlink = attributes.nlink
    entry.st_size = attributes.size
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_blksize = 1 << 20 if stat.S_ISREG(attributes.mode) else 4096
    entry.st_blocks = -(-attributes.size // 512)
    entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = attributes.mtime_ns
    entry.entry_timeout = entry.attr_timeout = ttl
    return entry

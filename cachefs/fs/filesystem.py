"""The filesystem as a FUSE backend calls it.

The methods `*_now` are synchronous: they return None when the answer needs a wait, and the caller then awaits the method
without the suffix. `FileSystem` delegates names to `lookup`, directories to `directories`, bytes to the `Reader`, and
changes to `writing`. On a read-only mount, changes raise `ReadOnly`.

No state is kept for inodes because the kernel knows them: the tables lead from an inode number to its name, however long ago
the number was given out. So a FORGET needs no work, and nothing can leak.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from cachefs.base.behind import WriteBehind
from cachefs.base.errors import CachefsError, IsADirectory, NotFound, NotPermitted, ObjectChanged, ReadOnly
from cachefs.base.metrics import Metrics
from cachefs.base.shared_memory import Times
from cachefs.fs import xattrs
from cachefs.fs.attributes import FOREVER, FREE_NAMES, Attributes, Entry, Options, Space
from cachefs.fs.directories import DirectoryHandle, DirectoryReader
from cachefs.fs.dirty_files import Opened
from cachefs.fs.files import (
    DIRTY_FILE,
    FileHandle,
    Former,
    Known,
    OpenFiles,
    OpenHook,
    PassthroughHook,
)
from cachefs.fs.freshness import Freshness
from cachefs.fs.inodes import ROOT
from cachefs.fs.keys import MAX_NAME, name_in
from cachefs.fs.listing import Lister
from cachefs.fs.lookup import Looker
from cachefs.fs.overrides import without_set_ids
from cachefs.fs.reader import Buffer, Reader
from cachefs.fs.refreshing import Refreshing
from cachefs.fs.rows import NO_ROW, Row
from cachefs.fs.tree import Directory, Found, Present, Tree, Volume, clock_of
from cachefs.fs.tree_queries import TreeQueries, object_of
from cachefs.fs.writing import Writing
from cachefs.fs.xattrs import NoAttribute
from cachefs.origin import Origin

if TYPE_CHECKING:
    from cachefs.upload import DirtyFile, Uploads

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT | os.O_APPEND

DAEMON_BITS = 40
"""Handles that a daemon may give out in its life, as a power of two: at 100,000 a second enough for four months."""

InvalidateHook = Callable[[int, int, bytes], None]
"""(ino, parent, name): tells the kernel to drop its pages of this inode (0: of none) and its entry of this name (b"": of
none)."""

Created = tuple[Attributes, float, Opened]
"""Attributes of a new file, for how many seconds the kernel may keep them, and how it was opened."""


class FileSystem:
    """The tree below one mount point. Runs in one trio thread. `clock` returns seconds since the epoch, for the age of
    answers and for times that are shown; without it, a `SteadyClock` dates answers, and shown times are by the wall clock.
    `times` are the modification times of directories, where they outlive this process."""

    def __init__(
        self,
        volumes: Sequence[Volume],
        database: WriteBehind,
        reader: Reader,
        options: Options,
        metrics: Metrics,
        clock: Callable[[], float] | None = None,
        writer: Uploads | None = None,
        times: Times | None = None,
    ) -> None:
        self.on_invalidate: InvalidateHook = lambda ino, parent, name: None
        # Waits until all notifications so far are sent to the kernel.
        self.notified: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self._options = options
        self._metrics = metrics
        wall = clock or time.time
        self._tree = tree = Tree(database, volumes, clock or clock_of(database))
        self._freshness = freshness = Freshness(tree)
        self._lister = lister = Lister(tree, freshness, metrics, self._changed)
        self._looker = looker = Looker(tree, freshness, lister, metrics)
        self._directories = DirectoryReader(tree, freshness, lister, self._shape)
        self._files = files = OpenFiles(reader, self._of_handle, tree.clock, wall)
        self.handles = files.handles
        self.tree_queries = TreeQueries(tree, freshness, looker, self._directories)
        self._refreshing = Refreshing(
            tree, freshness, lister, files.forget_warm, self._tell, lambda: self.notified()
        )
        self._writing: Writing | None = None
        # Closes a handle. Never raises, never waits. The release of the last writer begins the upload, if no flush did.
        self.release: Callable[[int], object] = files.release
        if writer is not None:
            times = times or Times()
            self._writing = Writing(tree, freshness, looker, lister, files, writer, options, wall, times)
            self.release = self._writing.dirty_files.release

    @property
    def origins(self) -> list[Origin]:
        return [top.origin for top in self._tree.tops() if top.origin is not None]

    def list_tops(self, absent: Container[Origin] = ()) -> None:
        """Begin to list the first page of each mounted origin, so that the first reader need not wait for it. Leaves out
        origins that are `absent`, cannot be listed or have a TTL of 0, and those with a fresh listing."""
        self._lister.list_tops(absent)

    def renew_names(self) -> None:
        """Learn all names again whenever their database is found cut short. Call it on the trio thread."""
        token = trio.lowlevel.current_trio_token()

        def renew() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._refreshing.renew, idempotent=True)

        self._tree.database.stored.on_cut_short = renew

    def enable_passthrough(self, kernel: PassthroughHook) -> None:
        """Open whole files in passthrough from now on. `kernel` registers a backing file with the kernel, and returns
        whether the kernel took it."""
        self._files.on_passthrough = kernel
        self._files.reader.passthrough, self._files.reader.written = True, self._writing is not None

    def watch_opens(
        self, hook: OpenHook | None, awaited: Container[bytes] = frozenset()
    ) -> tuple[OpenHook | None, Container[bytes]]:
        """Call `hook` for each open from now on, except for small files that are wholly cached: of these, only where the
        digest is in `awaited` (`EVERY_FILE`: for all). After adding to `awaited`, call `forget_known`, or files opened
        before are not reported. There is one hook at a time. Returns the previous hook and its `awaited`."""
        before = self._files.on_open, self._files.awaited
        self._files.on_open, self._files.awaited = hook, awaited
        self._files.forget_known()
        return before

    def read_through(self, reader: Reader) -> Reader:
        """Read bytes through `reader` from now on: a wrapper of the current reader, or that reader again. Returns the
        previous one."""
        before, self._files.reader = self._files.reader, reader
        return before

    async def recover(self) -> None:
        """Show the dirty files of an earlier daemon, and finish the renames that it began. Call it before the mount and
        after the recovery of `Uploads`."""
        if self._writing is not None:
            await self._writing.recover()
        self._tree.forget_local()

    # -- after another daemon ----------------------------------------------------------------------

    def follow(self, count: int) -> None:
        """Go on where `count` daemons have died: new handles get numbers that none of them gave out."""
        first = count << DAEMON_BITS
        self._files.follow(first)
        self._directories.handles.follow(first)

    def restore(self, former: Former) -> bool:
        """Restore a handle that an earlier daemon opened. False if it wrote, or read what was being written, and those bytes
        are lost: its requests then fail."""
        place = None if self._writing is None else self._tree.present(former.ino)
        try:
            if self._writing is not None:
                if self._writing.dirty_files.resume(former):
                    return True
                if not former.unsaved:
                    # Pages of lost writes must not mix with pages of the version that is there now.
                    self.on_invalidate(former.ino, 0, b"")
                if place is not None and not former.writes and self._restore_present(former, place):
                    return True
        except (ObjectChanged, NotFound):
            if not former.unsaved:
                raise
        if former.unsaved:
            self.handles.unsaved[former.fh] = former.object.key
            return False
        self._files.restore(former)
        if self._writing is not None and place is None:
            self._files.lose_name(former.ino, removed=True)
        return True

    def _restore_present(self, former: Former, place: Present) -> bool:
        """Restore a handle with the version that its inode has now, which may be a dirty file. False if it is not known."""
        directory, mark, row = place
        # A cache file that is read in passthrough has the content of its inode, also if its object was renamed meanwhile.
        backing_id = 0 if former.unsaved else former.backing_id
        version = object_of(directory, mark, row)
        opened = None if backing_id else self._write.dirty_files.open_version(directory, mark, version, 0)
        if opened is not None:
            self._files.renumber(opened[0], former.fh)
        elif row.known:
            present = former._replace(object=version, mtime_ns=row.mtime_ns, backing_id=backing_id)
            self._files.restore(present)
        else:
            return False
        return True

    def reopen_directory(self, dh: int, ino: int) -> None:
        """Make a directory handle of an earlier daemon usable. The reader's next offset says where it is."""
        if self._directories.handles.are_before(dh):
            directory = self._tree.directory(ino)
            self._directories.handles.restore(dh, DirectoryHandle(ino, directory))
            directory.kernel = None  # nothing is known of the listing on which the reader began

    # -- names and attributes ----------------------------------------------------------------------

    def attributes_now(self, ino: int) -> tuple[Attributes, float] | None:
        """Attributes, and for how many seconds the kernel may keep them. An open file always has some. Raises
        `ObjectChanged` if the name of `ino` leads to another inode now."""
        if ino == ROOT:
            return self._shape(ROOT, True, NO_ROW), FOREVER
        if (nameless := self._nameless(ino)) is not None:
            return nameless
        warm = self._files.warm.get(ino)
        try:
            if warm is not None and warm[0] > self._tree.clock():
                return self._known(ino, warm[4])
            directory, mark = self._tree.locate(ino)
            name = name_in(mark)
            found = self._looker.now(directory, name)
            if found is None and directory.ttls.strict:
                found = self._freshness.recent(directory, name) or self._opened(directory, name, ino)
            return None if found is None else self._known(ino, found)
        except (NotFound, ObjectChanged):
            return self._of_open(ino)

    def _nameless(self, ino: int) -> tuple[Attributes, float] | None:
        """As `attributes_now` for an open inode without a name; None for any other inode."""
        if self._writing is not None and (orphan := self._writing.orphan(ino)) is not None:
            return orphan
        shown = self._files.nameless.get(ino)
        return None if shown is None else (shown, 0.0)

    def _of_open(self, ino: int) -> tuple[Attributes, float]:
        """Attributes of an open inode whose name was just found to lead elsewhere. Raises the exception that is being
        handled if the inode is not open."""
        if self._files.is_open(ino):
            self._files.lose_name(ino)
            return self._files.nameless[ino], 0.0
        if ino in self._files.removed_directories:
            return self._files.removed_directories[ino][1], 0.0
        for handle in self._directories.handles.values():
            if handle.ino == ino and handle.attributes is not None:
                return replace(handle.attributes, nlink=0), 0.0
        raise

    def _of_handle(self, handle: FileHandle) -> Attributes:
        """Attributes of an open file, by the version that was opened."""
        if self._writing is not None:
            return self._writing.of_handle(handle)
        return self._options.shape(handle.ino, False, handle.object.size, handle.mtime_ns, {})

    def _opened(self, directory: Directory, name: bytes, ino: int) -> Found | None:
        """The row of an open file, whatever its age: the next lookup of its name asks the origin. None if it is not open."""
        row = self._tree.row(directory, name) if self._files.is_open(ino) else None
        if row is None or not row.known or row.ino != ino or self._freshness.is_doubted(ino):
            return None
        return Found(ino, False, row, self._tree.clock())

    async def getattr(self, ino: int) -> tuple[Attributes, float]:
        """As `attributes_now`, with a lookup where necessary."""
        try:
            while (known := self.attributes_now(ino)) is None:
                directory, mark = place = self._tree.locate(ino)
                found = await self._looker.look(directory, name_in(mark))
                if self._nameless(ino) is None and self._tree.locate(ino) == place:
                    return self._known(ino, found)
                # Otherwise it was renamed or removed during the lookup: start again.
        except (NotFound, ObjectChanged):
            return self._of_open(ino)
        return known

    def lookup_now(self, parent: int, name: bytes) -> tuple[Attributes | None, float] | None:
        """Attributes (None if there is no such name), and for how many seconds the kernel may keep the answer. Returns None
        if the origin has to be asked."""
        if parent in self._files.removed_directories:
            return None, 0.0  # the directory was removed here, and a process is still in it
        directory = self._tree.directory(parent)
        found = self._looker.now(directory, name)
        if directory.ttls.strict:
            # A listing that has just shown a file is enough for the lookup. The open that follows asks the origin, because
            # answers from an earlier path walk are too old for it.
            if found is None:
                found = self._freshness.recent(directory, name, answers=False)
            if isinstance(found, Found) and not found.is_dir:
                self._freshness.end_burst(found.ino)
        if found is None:
            return None
        if not isinstance(found, Found):
            self._metrics.negative_hits += 1
        return self._answer(found, directory, name)

    async def lookup(self, parent: int, name: bytes) -> tuple[Attributes | None, float]:
        """As `lookup_now`, with a request where necessary. Raises if the origin fails, because a failure does not mean that
        the name is missing."""
        found = self.lookup_now(parent, name)
        if found is not None:
            return found
        at = self._tree.directory(parent)
        return self._answer(await self._looker.look(at, name, share=not at.ttls.strict), at, name)

    def _known(self, ino: int, found: Found | float) -> tuple[Attributes, float]:
        """The reply to a GETATTR, from an answer about the inode's name."""
        found = self._check(ino, found)
        return self._shape(ino, found.is_dir, found.row), self._seconds_until(found.until)

    def _answer(self, found: Found | float, at: Directory, name: bytes) -> tuple[Attributes | None, float]:
        """The reply to a LOOKUP, from an answer about the name."""
        if isinstance(found, Found):
            if self._writing is None and not (found.is_dir or at.ttls.revalidate):
                # The open comes next and can skip the lookup. Not on a writable mount, where the name may change until then.
                self._files.keep_walked(found.ino, (at, name, found))
            return self._shape(found.ino, found.is_dir, found.row), self._seconds_until(found.until)
        return None, self._refreshing.absent(at, name, max(0.0, min(found, FOREVER)))

    def _seconds_until(self, until: float) -> float:
        return max(0.0, min(until - self._tree.clock(), FOREVER))

    def _check(self, ino: int, found: Found | float) -> Found:
        """Return `found` if it is the inode `ino`, else raise `ObjectChanged`."""
        if not isinstance(found, Found) or found.ino != ino:
            raise ObjectChanged(f"inode {ino} was removed or replaced")
        return found

    def _shape(self, ino: int, is_dir: bool, row: Row) -> Attributes:
        """The attributes that a name shows."""
        if self._writing is not None:
            return self._writing.shape(ino, is_dir, row)
        return self._options.shape(ino, is_dir, row.size, row.mtime_ns, {})

    # -- directories -------------------------------------------------------------------------------

    def opendir(self, ino: int) -> int:
        removed = self._files.removed_directories.get(ino)
        directory = self._tree.directory(ino) if removed is None else removed[0]
        found = self.attributes_now(ino)
        handle = DirectoryHandle(ino, directory, None if found is None else found[0])
        return self._directories.handles.add(handle)

    async def readdir(self, dh: int, offset: int, limit: int) -> list[Entry]:
        """At most `limit` entries behind `offset`, in the origin's order, without "." and ".."; none at the end. Raises
        when the listing fails, rather than end early; `NotFound` when the directory was removed."""
        handle = self._directories.handles.get(dh)
        if handle is None:
            raise NotFound(f"no directory handle {dh}")
        if self._tree.known(handle.ino) is not handle.directory:
            raise NotFound(f"directory {handle.ino} was removed")
        return await self._directories.read(handle, offset, limit)

    def listing_kept(self, dh: int) -> bool:
        """True if the kernel may keep its cached listing of the directory for the reader of this handle. The reply to the
        OPENDIR must say to keep it or to drop it. Call `listing_lost` if that reply cannot be sent."""
        return self._directories.kept(dh)

    def listing_lost(self, dh: int) -> None:
        """Have the kernel drop its cached listing at the next OPENDIR."""
        if (handle := self._directories.handles.get(dh)) is not None:
            handle.directory.kernel = None

    def releasedir(self, dh: int) -> None:
        self._directories.handles.remove(dh)

    # -- files -------------------------------------------------------------------------------------

    @property
    def open_known(self) -> Callable[[int, int], Known | None]:
        """(ino, pid): opens a known file (see `KnownFiles`) for reading. It returns None if `open_now` has to do it."""
        return self._files.reopen

    @property
    def close_known(self) -> Callable[[int], bool]:
        """(fh): releases a handle from `open_known`. It returns False if `release` has to do it."""
        return self._files.close

    def forget_known(self) -> None:
        """Forget the known files, so that the hook is called for the next open of each, if it is awaited."""
        self._files.forget_known()

    def open_now(self, ino: int, flags: int, pid: int, *, patient: bool = True) -> Opened | None:
        """Open a file. Returns None if `open` has to be awaited. Unless `patient`, a file that is about to be cached is
        opened as it is. Raises `ObjectChanged` if the name leads to another inode now."""
        if flags & _WRITING:
            if self._writing is None:
                raise ReadOnly("the mount is read-only")
            return None
        if ino == ROOT:
            raise IsADirectory("the root is a directory")
        warm = self._files.warm.get(ino)
        if warm is not None and warm[0] > self._tree.clock():
            if patient and self._files.decides(ino) and self._files.reader.soon_cached(warm[2]):
                return None
            return self._files.open(ino, warm[1], warm[2], warm[3], pid)
        walked = self._files.walked.get(ino)
        if walked is not None and walked[2].until > self._tree.clock():
            return self._open(walked[0], walked[1], ino, walked[2], pid, patient=patient)
        if ino in self._files.nameless and (again := self._open_again(ino, pid)) is not None:
            return again
        directory, mark = self._tree.locate(ino)
        if self._writing is not None and self._writing.is_going(directory, mark):
            return None
        found: Found | float | None = None
        if not directory.ttls.revalidate:
            found = self._looker.now(directory, name_in(mark))
        elif directory.ttls.strict:  # the path walk of this open may have just asked for the object
            found = self._freshness.recent(directory, name_in(mark), listings=False)
        return None if found is None else self._open(directory, mark, ino, found, pid, patient=patient)

    def _open_again(self, ino: int, pid: int) -> Opened | None:
        """Open one more handle of a nameless file, which was looked up earlier or is opened through a descriptor. None if
        not all of its bytes are available; then the name is looked up again."""
        handle = self._files.under(ino)[0]
        if self._files.nameless[ino].nlink:
            return None  # the origin has another version, which the name shows
        if handle.size == DIRTY_FILE:
            assert self._writing is not None
            return self._writing.dirty_files.open_again(handle, pid)
        if self._files.reader.cached_bytes(handle.object) < handle.size:
            return None
        return self._files.open(ino, handle.origin, handle.object, handle.mtime_ns, pid)

    async def open(self, ino: int, flags: int, pid: int) -> Opened:
        if not flags & _WRITING and self._files.decides(ino):
            obj = self.tree_queries.version(ino)
            if obj is not None and self._files.reader.soon_cached(obj):
                # The lookup may then find another version.
                await self._files.reader.wait_until_cached(obj, pid)
        if self._writing is None or ino == ROOT or ino in self._files.nameless:
            return await self._open_late(ino, flags, pid)
        claims = flags & _WRITING or self._writing.is_going(*self._tree.locate(ino))
        return await (self._open_claimed if claims else self._open_late)(ino, flags, pid)

    async def _open_claimed(self, ino: int, flags: int, pid: int) -> Opened:
        """Open a file while no other change of its name runs. If one runs now, the file is what the name leads to then."""
        change, nameless = partial(self._open_late, ino, flags, pid), self._files.nameless
        return await self._write.locks.changing(
            lambda: [] if ino in nameless else [self._write.place_of(ino)], change
        )

    async def _open_late(self, ino: int, flags: int, pid: int, *claimed: object) -> Opened:
        opened = self.open_now(ino, flags, pid, patient=False)
        if opened is not None:
            return opened
        if self._writing is not None and flags & _WRITING and self._files.removed(ino):
            return await self._writing.dirty_files.open_nameless(ino, flags, pid)
        directory, mark = self._tree.locate(ino)
        name = name_in(mark)
        if directory.ttls.revalidate and not mark.endswith(b"/"):
            found = await self._looker.ask(directory, name, share=False)
        else:
            found = await self._looker.look(directory, name)
        if flags & _WRITING and self._writing is not None:
            return await self._writing.dirty_files.open(directory, mark, self._check(ino, found), flags, pid)
        if self._writing is not None and not claimed and self._writing.is_going(directory, mark):
            return await self._open_claimed(ino, flags, pid)  # its removal began during the lookup
        opened = self._open(directory, mark, ino, found, pid)
        assert opened is not None  # it is not patient
        return opened

    def _open(
        self,
        directory: Directory,
        mark: bytes,
        ino: int,
        found: Found | float,
        pid: int,
        *,
        patient: bool = False,
    ) -> Opened | None:
        found = self._check(ino, found)
        if found.is_dir:
            raise IsADirectory(f"{directory.prefix}{mark.decode()} is a directory")
        assert directory.origin is not None
        obj = object_of(directory, mark, found.row)
        if self._writing is not None:
            written = self._writing.dirty_files.open_version(directory, mark, obj, pid)
            if written is not None:
                return written
        mtime_ns = found.row.mtime_ns
        others = self._files.under(ino)
        if others and others[0].size == DIRTY_FILE and others[0].object == obj:
            assert self._writing is not None  # uploaded, and a process may still write it through a mapping
            return self._writing.dirty_files.open_again(others[0], pid)
        if patient and not others and self._files.on_passthrough and self._files.reader.soon_cached(obj):
            return None
        opened = self._files.open(ino, directory.origin, obj, mtime_ns, pid)
        if not directory.ttls.revalidate:
            self._files.keep_warm(ino, (found.until, directory.origin, obj, mtime_ns, found))
        return opened

    def read_now(self, fh: int, offset: int, size: int) -> Buffer | None:
        """The bytes, clipped to the object; None if `read` has to be awaited."""
        handle = self.handles[fh]
        count = min(size, handle.size - offset)
        if count <= 0:
            return b"" if handle.size != DIRTY_FILE else self._dirty_file(handle).read_now(offset, size)
        try:
            return self._files.reader.read_now(handle.opened, offset, count, handle.pid)
        except (ObjectChanged, NotFound) as exc:
            raise self._lost(handle) from exc

    async def read(self, fh: int, offset: int, size: int) -> Buffer:
        """The bytes, clipped to the object. Raises `ObjectChanged` if they are not cached, and the origin has not this
        version any more."""
        handle = self.handles[fh]
        count = min(size, handle.size - offset)
        if count <= 0:
            return b"" if handle.size != DIRTY_FILE else await self._dirty_file(handle).read(offset, size)
        version = handle.object
        try:
            return await self._files.reader.read(handle.opened, offset, count, handle.pid)
        except (ObjectChanged, NotFound) as exc:
            if handle.object is not version:  # it was renamed or changed here during the read
                return await self.read(fh, offset, size)
            raise self._lost(handle) from exc

    def _dirty_file(self, handle: FileHandle) -> DirtyFile:
        assert handle.node is not None and handle.node.dirty_file is not None
        return handle.node.dirty_file

    def _lost(self, handle: FileHandle) -> ObjectChanged:
        """Note that the origin has no longer the version that a handle reads. The next lookup of its name asks the origin.
        Returns the error for the reader."""
        if not handle.lost:
            handle.lost = True
            self._metrics.objects_changed += 1
            if handle.ino not in self._files.nameless:
                self._files.forget_warm()
                self._freshness.doubt(handle.ino)
                with suppress(CachefsError):
                    directory, mark = self._tree.locate(handle.ino)
                    self._tell(directory, handle.ino, name_in(mark))
        return ObjectChanged(f"{handle.object.key} was replaced or removed while it was open")

    @property
    def _write(self) -> Writing:
        if self._writing is None:
            raise ReadOnly("the mount is read-only")
        return self._writing

    # -- changing files ----------------------------------------------------------------------------

    async def create(
        self, parent: int, name: bytes, flags: int, mode: int, pid: int, uid: int, gid: int
    ) -> Created:
        """Create a file and open it; without O_EXCL, open the one that exists. Raises `AlreadyExists`."""
        if (made := self.create_now(parent, name, flags, mode, pid, uid, gid)) is not None:
            return made
        create = partial(self._write.create, flags=flags, mode=mode, pid=pid, uid=uid, gid=gid)
        ino, opened = await self._claimed((parent, name), create)
        try:
            attributes, ttl = await self.getattr(ino)
        except BaseException:
            self._write.dirty_files.release(opened[0])
            raise
        return attributes, ttl, opened

    def create_now(
        self, parent: int, name: bytes, flags: int, mode: int, pid: int, uid: int, gid: int
    ) -> Created | None:
        """`create` of a file that is missing, if that needs no wait; otherwise None, and nothing has happened."""
        directory = self._tree.known(parent)
        if directory is None:
            return None
        made = self._write.create_now(directory, name, flags, mode, pid, uid, gid)
        return made and (made[0], 0.0, made[1])  # 0 seconds, as `getattr` says while a file is written

    async def mknod(
        self, parent: int, name: bytes, mode: int, pid: int, uid: int, gid: int, *, again: bool = False
    ) -> tuple[Attributes, float]:
        """Make an empty file at the origin. Raises `NotPermitted` for anything but a regular file. For `again` see
        `mkdir`."""
        make = partial(self._write.mknod, mode=mode, pid=pid, uid=uid, gid=gid, again=again)
        return await self.getattr(await self._claimed((parent, name), make))

    async def write(self, fh: int, offset: int, data: Buffer) -> int:
        """Write all of `data`, which must not change until this returns. Raises `BadHandle`, `NoRoom`, `TooLarge`,
        `ObjectChanged`. The kernel computes the offset for O_APPEND: it knows the size, because no other node writes the
        dirty file."""
        return await self._write.dirty_files.write(fh, offset, data)

    def write_now(self, fh: int, offset: int, data: Buffer) -> int | None:
        """`write` if that needs no wait; otherwise None, and nothing was written."""
        return None if self._writing is None else self._writing.dirty_files.write_now(fh, offset, data)

    def clear_set_ids(self, fh: int, *, later: bool = False) -> None:
        """Clear the set-uid and set-gid bits of a file that an unprivileged process changed or, with `later`, may change."""
        self._write.clear_set_ids(fh, later)

    async def flush(self, fh: int) -> None:
        """Wait until what close(2) promises holds, or raise the upload's error. Returns at once for handles that only
        read."""
        if self._writing is not None:
            await self._writing.dirty_files.flush(fh)

    async def fsync(self, fh: int) -> None:
        if self._writing is not None:
            await self._writing.dirty_files.fsync(fh)

    async def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        """Allocate space; only mode 0 is supported. Raises `Unsupported`, and what `write` raises."""
        await self._write.dirty_files.allocate(fh, mode, offset, length)

    async def setattr(
        self,
        ino: int,
        *,
        size: int | None = None,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        fh: int | None = None,
        clear_set_ids: bool = False,
    ) -> tuple[Attributes, float]:
        """Set the attributes that are not None. A new size changes the content; the others are kept on this node alone. A
        new owner clears the set-uid and set-gid bits of a file, and so does `clear_set_ids`."""
        writing = self._write
        if size is not None:
            nameless = await writing.truncate(ino, size, fh)
            if nameless is not None and not self._files.is_open(ino):
                return nameless  # it is gone, and an error would have the kernel change the file that has its name now
        if uid is not None or gid is not None or clear_set_ids:
            shown, _ = await self.getattr(ino)
            wanted = shown.mode if mode is None else stat.S_IFMT(shown.mode) | mode
            if (clean := without_set_ids(wanted)) != wanted:
                mode = stat.S_IMODE(clean)
        given = {"mode": mode, "uid": uid, "gid": gid, "atime_ns": atime_ns, "mtime_ns": mtime_ns}
        changes = {name: value for name, value in given.items() if value is not None}
        stored = bool(changes) and writing.keep(ino, changes)
        shown_now = self.attributes_now(ino)  # before the await, during which the name may go to another file
        if stored:
            await writing.overrides.written()
        return shown_now or await self.getattr(ino)

    # -- changing names ----------------------------------------------------------------------------

    async def mkdir(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int, *, again: bool = False
    ) -> tuple[Attributes, float]:
        """Make a directory, with a marker at the origin so that other nodes see it. Raises `AlreadyExists`, except `again`:
        the previous daemon may have made it for the same request."""
        make = partial(self._write.mkdir, mode=mode, uid=uid, gid=gid, again=again)
        found: Found = await self._claimed((parent, name), make)
        return self._shape(found.ino, True, found.row), self._seconds_until(found.until)

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file. Open handles go on with the dirty file or with cached bytes. Raises `NotFound`, `IsADirectory`."""
        await self._claimed((parent, name), self._write.names.unlink)

    async def rmdir(self, parent: int, name: bytes) -> None:
        """Remove a directory. Raises `NotFound`, `NotADirectory`, and `NotEmpty` by a fresh listing."""
        await self._claimed((parent, name), self._write.names.rmdir, trees=True)

    async def rename(
        self, parent: int, name: bytes, newparent: int, newname: bytes, flags: int, *, again: bool = False
    ) -> None:
        """Rename a file or directory. It replaces a file, or an empty directory by a directory. Of the `flags` of renameat2,
        only RENAME_NOREPLACE is supported; `again`: it may replace the copy that the previous daemon has made for the same
        request. Raises `CrossDevice` between two sources."""
        rename = partial(self._write.names.rename, flags=flags, again=again)
        await self._claimed((parent, name), (newparent, newname), rename, trees=True)

    async def _claimed(self, *arguments: Any, trees: bool = False) -> Any:
        """Call the last argument, a change, with its names claimed. The others are the names: (inode of the directory,
        name). With `trees`, what is below the names is claimed, too."""
        *names, change = arguments
        return await self._write.locks.changing(
            lambda: [(self._tree.directory(parent), name) for parent, name in names], change, trees=trees
        )

    # -- extended attributes -----------------------------------------------------------------------

    async def getxattr(self, ino: int, name: bytes, uid: int = 0) -> bytes:
        """The value of an attribute, as text. Reading `user.cachefs.refresh` requests a refresh: on a read-only mount, a
        container has no other way to ask for one. Only root and the owner of the files may, because each costs a LIST. `uid`
        is the user of the process. Raises `NoAttribute`, `NotPermitted`."""
        if name == xattrs.REFRESH:
            if uid not in (0, self._options.uid):
                raise NotPermitted("only the owner of the mount and root refresh it")
            if ino == ROOT:
                await self._refreshing.directory(self._tree.root)
            else:
                await self._refreshing.name(*self._tree.locate(ino), ino)
            await self.notified()
            return b"looking again"
        if ino in self._files.nameless and name in xattrs.OF_FILES:
            return xattrs.of_file(self._files.under(ino)[0].object, self._files.reader, name)
        directory, mark = (self._tree.root, b"/") if ino == ROOT else self._tree.locate(ino)
        is_dir = mark.endswith(b"/")
        if name not in (xattrs.OF_DIRECTORIES if is_dir else xattrs.OF_FILES):
            raise NoAttribute(f"no attribute {name.decode(errors='replace')}")
        if is_dir:
            directory = self._tree.directory(ino)
            return xattrs.of_directory(directory, self._freshness.whole(directory), name)
        found = await self._looker.look(directory, name_in(mark))
        found = self._check(ino, found)
        if found.is_dir:
            raise NotFound(f"inode {ino} is gone")
        return xattrs.of_file(object_of(directory, mark, found.row), self._files.reader, name)

    # -- refreshing --------------------------------------------------------------------------------

    async def refresh(self, path: str = "") -> None:
        """Have `path` (relative to the mount) and everything below it asked for again at the next use. Makes no request.
        When this returns, the kernel has dropped its entries."""
        await self._refreshing.path(path)
        await self.notified()

    def _changed(self, directory: Directory, ino: int, name: bytes) -> None:
        """Note that the origin has another file under a name, or none. Until now it led to the inode `ino` (0: to none)."""
        self._files.forget_warm()
        self._files.lose_name(ino)
        if self._writing is not None:
            self._writing.overrides.put(ino, {})
        self._tell(directory, ino, name)

    def _tell(self, directory: Directory, ino: int, name: bytes) -> None:
        """Have the kernel look a name up again. It keeps the pages of an open inode, which are of the version that is
        open."""
        self.on_invalidate(0 if self._files.is_open(ino) else ino, directory.ino, name)

    # -- the whole ---------------------------------------------------------------------------------

    def statfs(self) -> Space:
        """The figures for df. An object store has no size, so a pebibyte is shown, all of it free."""
        free = 0 if self._writing is None else FREE_NAMES
        return Space(4096, 1 << 38, 1 << 38, self._tree.database.stored.count("inodes"), free, MAX_NAME)

    def status(self) -> dict[str, Any]:
        """For `cachefs status`: plain values."""
        return {
            "names": self._tree.database.stored.count("names"),
            "open_files": len(self._files),
            "open_directories": len(self._directories.handles),
            "listings": self._lister.active(),
        }

    async def aclose(self, *, unmounted: bool = False, handed_over: bool = False) -> None:
        """Stop the listings, and close open handles unless they are `handed_over` to another daemon. `unmounted`: no process
        has a file open, though the kernel's last RELEASE messages may not have come. Then what was written is
        kept; otherwise what processes were writing is given up."""
        for fh, handle in {} if handed_over else dict(self.handles).items():
            if unmounted or not handle.writes:
                self.release(fh)
            else:
                self._files.release(fh)
        await self._lister.aclose()
        self._directories.handles.clear()

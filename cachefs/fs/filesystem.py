"""The filesystem as a FUSE backend calls it.

`*_now` are the synchronous forms of what is usually known: they return None (or leave a read to `read`) when one would
have to wait. Everything else is delegation: names to `lookup`, directories to `directories`, bytes to the `Reader`, and
changes to `writing`; where nothing can be written, these raise `ReadOnly`.

Nothing is kept per inode the kernel knows: an inode number leads to its name through the tables, however long ago it was
given out. So there is nothing to do when the kernel forgets one, and nothing can leak.
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
from cachefs.base.errors import (
    CachefsError,
    IsADirectory,
    NotFound,
    NotPermitted,
    ObjectChanged,
    ReadOnly,
)
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.base.shared_memory import Times
from cachefs.fs import xattrs
from cachefs.fs.attributes import DIRECTORY_SIZE, FOREVER, FREE_NAMES, Attributes, Entry, Options, Space
from cachefs.fs.directories import DirectoryHandle, DirectoryReader
from cachefs.fs.files import (
    DIRTY_FILE,
    FileHandle,
    Former,
    Handles,
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
from cachefs.fs.rows import NO_ROW, PINNED, Row
from cachefs.fs.tree import Directory, Found, Tree, Volume, clock_of
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
"""(ino, parent, name): whatever the kernel keeps of this inode (0: of none) and this name (b"": of none) is out of date."""

Opened = tuple[int, int]
"""A handle; the kernel's number of the file of the cache to read by itself (0: none, and then reads are ours). It may keep
the pages that it has of this inode."""

Created = tuple[Attributes, float, Opened]
"""Attributes of a new file, for how many seconds the kernel may keep them, and how it was opened."""


class FileSystem:
    """The tree below one mount point. Runs in one trio thread. `clock` is seconds since the epoch, also for times that are
    shown; without one, these are by the wall clock, and how old answers are is by a `SteadyClock`. `times` are those of
    directories, where they outlive this process."""

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
        self.told: Callable[[], Awaitable[None]] = (
            trio.lowlevel.checkpoint
        )  # waits until the kernel was told everything that it had to be told so far
        self._options = options
        self._metrics = metrics
        wall = clock or time.time
        self._reader = reader
        self._tree = Tree(database, volumes, clock or clock_of(database), options.ttls)
        self._freshness = Freshness(self._tree)
        self._lister = Lister(self._tree, self._freshness, metrics, self._changed)
        self._looker = Looker(self._tree, self._freshness, self._lister, metrics)
        self._directories = DirectoryReader(self._tree, self._freshness, self._lister, self._shape)
        self._files = OpenFiles(reader, self._of_handle, self._tree.clock, wall)
        self.tree_queries = TreeQueries(self._tree, self._freshness, self._looker, self._directories)
        known = (self._tree, self._freshness, self._lister)
        self._refreshing = Refreshing(*known, self._files.forget_warm, self._tell, lambda: self.told())
        self._writing: Writing | None = None
        if writer is not None:
            parts = (self._tree, self._freshness, self._looker, self._lister, self._files)
            self._writing = Writing(*parts, writer, options, wall, times or Times())

    @property
    def origins(self) -> list[Origin]:
        return [top.origin for top in self._tree.tops() if top.origin is not None]

    def list_tops(self, absent: Container[Origin] = ()) -> None:
        """Begin to list what is mounted, a page of it, where names may be used for a while: the first reader need not wait
        for that. Not where a listing is fresh, nor of origins that are `absent`."""
        self._lister.list_tops(absent)

    def renew_names(self) -> None:
        """From now on, names whose database is cut short are learnt again. Call it on the trio thread."""
        token = trio.lowlevel.current_trio_token()

        def renew() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._refreshing.renew, idempotent=True)

        self._tree.database.when_cut_short(renew)

    def enable_passthrough(self, kernel: PassthroughHook) -> None:
        """From now on the kernel reads whole files by itself. `kernel` tells it of one, and answers whether it took it."""
        self._files.on_passthrough = kernel
        self._reader.passthrough, self._reader.written = True, self._writing is not None

    def watch_opens(
        self, hook: OpenHook | None, awaited: Container[bytes] = frozenset()
    ) -> tuple[OpenHook | None, Container[bytes]]:
        """From now on `hook` hears of every open but those of small files that are whole here, which are the fast path; of
        these, of those whose digest is in `awaited` (`EVERY_FILE`: of all). Where more are awaited that may have been opened
        before, call `forget_known`. One hook at a time: returns the one before."""
        before = self._files.on_open, self._files.awaited
        self._files.on_open, self._files.awaited = hook, awaited
        self._files.forget_known()
        return before

    def read_through(self, reader: Reader) -> Reader:
        """From now on bytes come from `reader`, which stands before (or again behind) the one returned."""
        before, self._reader = self._reader, reader
        self._files.read_through(reader)
        return before

    async def recover(self) -> None:
        """Show what an earlier daemon did not bring to the origin, and finish what it began there. Before the mount, and
        behind the writer's own recovery."""
        if self._writing is not None:
            await self._writing.recover()

    # -- after another daemon ----------------------------------------------------------------------

    def follow(self, count: int) -> None:
        """Go on where `count` daemons before have died."""
        first = count << DAEMON_BITS
        self._files.follow(first)
        self._directories.handles.follow(first)

    @property
    def handles(self) -> Handles:
        """The open files, by number."""
        return self._files.handles

    def restore(self, was: Former) -> bool:
        """Go on with a handle that an earlier daemon has opened; False: it wrote, or read what was written, and what was not
        synced of that is lost, so it fails."""
        try:
            if self._writing is not None:
                if self._writing.dirty_files.resume(was):
                    return True
                if not was.unsaved:
                    # Pages of what was written, and is lost, must not be read with those of the version that is there.
                    self.on_invalidate(was.ino, 0, b"")
                if not (was.writes or (was.backing_id and not was.unsaved)) and self._restore_present(was):
                    return True
        except (ObjectChanged, NotFound):
            if not was.unsaved:
                raise
        if was.unsaved:
            self._files.handles.unsaved[was.fh] = was.object.key
            return False
        self._files.restore(was)
        return True

    def _restore_present(self, was: Former) -> bool:
        """A handle that reads what its inode is now, which may be what was written here; False if that is not known."""
        try:
            directory, mark = self._tree.locate(was.ino)
        except ObjectChanged:
            return False
        row = self._tree.row(directory, mark)
        if row is None or row.ino != was.ino:
            return False
        opened = self._write.open_reader(directory, mark, row, 0)
        if opened is not None:
            self._files.renumber(opened[0], was.fh)
        elif row.known and directory.origin is not None:
            version = object_of(directory, mark, row)
            self._files.restore(was._replace(object=version, mtime_ns=row.mtime_ns, backing_id=0))
        else:
            return False
        return True

    def reopen_directory(self, dh: int, ino: int) -> None:
        """A reader goes on with a handle. An earlier daemon may have opened it: the reader's place says where it is."""
        if self._directories.handles.are_before(dh):
            directory = self._tree.directory(ino)
            self._directories.handles[dh] = DirectoryHandle(ino, directory)
            directory.kernel = None  # the reader began on a listing that nothing is known of

    # -- names and attributes ----------------------------------------------------------------------

    def attributes_now(self, ino: int) -> tuple[Attributes, float] | None:
        """Attributes and for how many seconds they hold. An open file always has some. Raises `ObjectChanged`
        when the name of `ino` leads to another inode by now."""
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
        """Attributes of an open inode without a name, and for how many seconds they hold; None of any other."""
        if self._writing is not None and (orphan := self._writing.orphan(ino)) is not None:
            return orphan
        shown = self._files.nameless.get(ino)
        return None if shown is None else (shown, 0.0)

    def _of_open(self, ino: int) -> tuple[Attributes, float]:
        """Attributes of an open inode whose name was just found to lead elsewhere. Reraises the present exception if the
        inode is not open."""
        if self._files.is_open(ino):
            self._files.lose_name(ino)
            return self._files.nameless[ino], 0.0
        if ino in self._files.gone:
            return self._files.gone[ino][1], 0.0
        for handle in self._directories.handles.values():
            if handle.ino == ino and handle.attributes is not None:
                return replace(handle.attributes, nlink=0), 0.0
        raise

    def _of_handle(self, handle: FileHandle) -> Attributes:
        """Attributes of an open file, by the version that was opened."""
        if self._writing is not None:
            return self._writing.of_handle(handle)
        row = NO_ROW._replace(size=handle.object.size, mtime_ns=handle.mtime_ns)
        return self._attributes(handle.ino, False, row)

    def _opened(self, directory: Directory, name: bytes, ino: int) -> Found | None:
        """The row of an open file, used whatever its age: the next lookup of its name asks the origin. None if it is not
        open."""
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
                    return self._known(ino, found)  # else it was renamed or removed meanwhile
        except (NotFound, ObjectChanged):
            return self._of_open(ino)
        return known

    def lookup_now(self, parent: int, name: bytes) -> tuple[Attributes | None, float] | None:
        """Attributes and for how many seconds they hold; no attributes when there is no such name."""
        if parent in self._files.gone:
            return None, 0.0  # it was removed here, and a process is in it
        directory = self._tree.directory(parent)
        found = self._looker.now(directory, name)
        if directory.ttls.strict:
            # A listing that has just shown a file will do, but then its open has to ask: what the last walk was told is old.
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
        """As `lookup_now`, with a request where necessary. Raises if the origin fails: a failure is no absence."""
        found = self.lookup_now(parent, name)
        if found is not None:
            return found
        at = self._tree.directory(parent)
        return self._answer(await self._looker.look(at, name, share=not at.ttls.strict), at, name)

    def _known(self, ino: int, found: Found | float) -> tuple[Attributes, float]:
        found = self._check(ino, found)
        return self._shape(ino, found.is_dir, found.row), self._seconds_until(found.until)

    def _answer(self, found: Found | float, at: Directory, name: bytes) -> tuple[Attributes | None, float]:
        if isinstance(found, Found):
            if self._writing is None and not (found.is_dir or at.ttls.revalidate):
                # Its open comes next. Not where names change here: a name may be on its way out by then.
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
        """What is shown of a name."""
        if row.generation == PINNED and self._writing is not None:
            return self._writing.attributes(row)
        return self._attributes(ino, is_dir, row)

    def _attributes(self, ino: int, is_dir: bool, row: Row) -> Attributes:
        if self._writing is not None:
            return self._writing.shape(ino, is_dir, row)
        options = self._options
        if is_dir:
            mode, links, size = stat.S_IFDIR | options.dir_mode, 2, DIRECTORY_SIZE
        else:
            mode, links, size = stat.S_IFREG | options.file_mode, 1, row.size
        time_ns = row.mtime_ns
        return Attributes(ino, mode, links, size, time_ns, options.uid, options.gid, time_ns, time_ns)

    # -- directories -------------------------------------------------------------------------------

    def opendir(self, ino: int) -> int:
        gone = self._files.gone.get(ino)
        directory = self._tree.directory(ino) if gone is None else gone[0]
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
        """Whether the kernel may keep what it has read of the directory until now, for the reader of this handle. The answer
        to the open has to say so, or else to drop it. Call `listing_lost` if the answer cannot be given."""
        return self._directories.kept(dh)

    def listing_lost(self, dh: int) -> None:
        """The next reader is not to have what the kernel has of the directory, or it was not told to drop that."""
        if (handle := self._directories.handles.get(dh)) is not None:
            handle.directory.kernel = None

    def releasedir(self, dh: int) -> None:
        self._directories.handles.pop(dh, None)

    # -- files -------------------------------------------------------------------------------------

    def open_now(self, ino: int, flags: int, pid: int) -> Opened | None:
        """See `Opened`. Raises `ObjectChanged` when the name leads to another inode by now."""
        return self._open_now(ino, flags, pid, patient=True)

    @property
    def open_known(self) -> Callable[[int, int], Known | None]:
        """(ino, pid): `open_now`, for reading, of a known file (see `KnownFiles`). None: `open_now` knows."""
        return self._files.reopen

    @property
    def close_known(self) -> Callable[[int], bool]:
        """(fh): `release` of a handle from `open_known`. False: `release` knows."""
        return self._files.close

    def forget_known(self) -> None:
        """From now on no file is known: the hook hears of the next open of each, if it is awaited."""
        self._files.forget_known()

    def _open_now(self, ino: int, flags: int, pid: int, *, patient: bool = False) -> Opened | None:
        """`patient`: None, too, for a file that an open waits a moment for."""
        if flags & _WRITING:
            if self._writing is None:
                raise ReadOnly("the mount is read-only")
            return None
        if ino == ROOT:
            raise IsADirectory("the root is a directory")
        warm = self._files.warm.get(ino)
        if warm is not None and warm[0] > self._tree.clock():
            if patient and self._waits_for(ino, warm[2]):
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
        elif directory.ttls.strict:  # the walk that led here may have just asked for this very object
            found = self._freshness.recent(directory, name_in(mark), listings=False)
        return None if found is None else self._open(directory, mark, ino, found, pid, patient=patient)

    def _open_again(self, ino: int, pid: int) -> Opened | None:
        """One more handle of an open file that has no name any more: it was looked up before, or is opened through a
        descriptor. None where not all of its bytes can be had; then the name is looked up again."""
        handle = self._files.under(ino)[0]
        if self._files.nameless[ino].nlink:
            return None  # the origin has another version: names show that
        if handle.size == DIRTY_FILE:
            assert self._writing is not None
            return self._writing.dirty_files.open_again(handle, pid)
        if self._reader.cached_bytes(handle.object) < handle.size:
            return None
        return self._files.open(ino, handle.origin, handle.object, handle.mtime_ns, pid)

    async def open(self, ino: int, flags: int, pid: int) -> Opened:
        if (soon_cached := self._soon_cached(ino, flags)) is not None:
            await self._reader.wait_until_cached(soon_cached, pid)
        if self._writing is None or ino == ROOT or ino in self._files.nameless:
            return await self._open_late(ino, flags, pid)
        if not flags & _WRITING and not self._writing.is_going(*self._tree.locate(ino)):
            return await self._open_late(ino, flags, pid)
        return await self._open_claimed(ino, flags, pid)

    async def _open_claimed(self, ino: int, flags: int, pid: int) -> Opened:
        """Open a name that is being removed or replaced, once that change has ended: what is there then, if anything."""
        change = partial(self._open_late, ino, flags, pid)
        return await self._write.claimed(lambda: self._places_of(ino), change)

    def _places_of(self, ino: int) -> list[tuple[Directory, bytes]]:
        """The name of a file; none once what is open has lost it."""
        if ino in self._files.nameless:
            return []
        directory, mark = self._tree.locate(ino)
        return [(directory, name_in(mark))]

    async def _open_late(self, ino: int, flags: int, pid: int, *claimed: object) -> Opened:
        opened = self._open_now(ino, flags, pid)
        if opened is not None:
            return opened
        if self._writing is not None and flags & _WRITING and self._files.removed(ino):
            return await self._writing.open_nameless(ino, flags, pid)
        directory, mark = self._tree.locate(ino)
        name = name_in(mark)
        if directory.ttls.revalidate and not mark.endswith(b"/"):
            found = await self._looker.ask(directory, name, share=False)
        else:
            found = await self._looker.look(directory, name)
        if flags & _WRITING and self._writing is not None:
            return await self._writing.open(directory, mark, self._check(ino, found), flags, pid)
        if self._writing is not None and not claimed and self._writing.is_going(directory, mark):
            return await self._open_claimed(ino, flags, pid)  # it began to go meanwhile
        opened = self._open(directory, mark, ino, found, pid)
        assert opened is not None  # it is not patient
        return opened

    def _soon_cached(self, ino: int, flags: int) -> ObjectId | None:
        """What an open should wait a moment for: the version that it will open, if no other is found meanwhile."""
        if flags & _WRITING or not self._files.decides(ino):
            return None
        warm = self._files.warm.get(ino)
        obj = warm[2] if warm is not None else self.tree_queries.version(ino)
        return obj if obj is not None and self._reader.soon_cached(obj) else None

    def _waits_for(self, ino: int, obj: ObjectId) -> bool:
        """Whether an open of this version should wait a moment for it."""
        return self._files.decides(ino) and self._reader.soon_cached(obj)

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
        if self._writing is not None:
            written = self._writing.open_reader(directory, mark, found.row, pid)
            if written is not None:
                return written
        obj = object_of(directory, mark, found.row)
        mtime_ns = found.row.mtime_ns
        others = self._files.under(ino)
        if others and others[0].size == DIRTY_FILE and others[0].object == obj:
            assert self._writing is not None  # stored, and perhaps still written through a mapping
            return self._writing.dirty_files.open_again(others[0], pid)
        if patient and self._waits_for(ino, obj):
            return None
        opened = self._files.open(ino, directory.origin, obj, mtime_ns, pid)
        if not directory.ttls.revalidate:
            self._files.keep_warm(ino, (found.until, directory.origin, obj, mtime_ns, found))
        return opened

    def read_now(self, fh: int, offset: int, size: int) -> Buffer | None:
        """Bytes, clipped to the object; None when `read` has to be awaited."""
        handle = self._files.handles[fh]
        count = min(size, handle.size - offset)
        if count <= 0:
            return b"" if handle.size != DIRTY_FILE else self._dirty_file(handle).read_now(offset, size)
        try:
            return self._reader.read_now(handle.opened, offset, count, handle.pid)
        except (ObjectChanged, NotFound) as exc:
            raise self._lost(handle) from exc

    async def read(self, fh: int, offset: int, size: int) -> Buffer:
        """Bytes, clipped to the object. `ObjectChanged` for what is not cached of a version that the origin has no more."""
        handle = self._files.handles[fh]
        count = min(size, handle.size - offset)
        if count <= 0:
            return b"" if handle.size != DIRTY_FILE else await self._dirty_file(handle).read(offset, size)
        version = handle.object
        try:
            return await self._reader.read(handle.opened, offset, count, handle.pid)
        except (ObjectChanged, NotFound) as exc:
            if handle.object is not version:  # it was renamed or changed here meanwhile
                return await self.read(fh, offset, size)
            raise self._lost(handle) from exc

    def _dirty_file(self, handle: FileHandle) -> DirtyFile:
        assert handle.node is not None and handle.node.dirty_file is not None
        return handle.node.dirty_file

    def release(self, fh: int) -> None:
        """Close a handle. Never raises, never waits. The last writer's begins the upload, if nothing else did."""
        if self._writing is None:
            self._files.release(fh)
        else:
            self._writing.dirty_files.release(fh)

    def _lost(self, handle: FileHandle) -> ObjectChanged:
        """Note that the origin no longer has the version a handle reads. What is known of its name is not used until a
        lookup."""
        if not handle.lost:
            handle.lost = True
            self._metrics.objects_changed += 1
            if handle.ino not in self._files.nameless:
                self._files.forget_warm()
                self._freshness.doubt(handle.ino)
                self._invalidate(handle.ino)
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
        """A new file and a handle of it; without O_EXCL the one that is there will do. Raises `AlreadyExists`."""
        writing = self._write

        async def create(directory: Directory, name: bytes) -> tuple[int, Opened]:
            return await writing.create(directory, name, flags, mode, pid, uid, gid)

        ino, opened = await self._claimed((parent, name), create)
        try:
            attributes, ttl = await self.getattr(ino)
        except BaseException:
            writing.dirty_files.release(opened[0])
            raise
        return attributes, ttl, opened

    async def mknod(
        self, parent: int, name: bytes, mode: int, pid: int, uid: int, gid: int
    ) -> tuple[Attributes, float]:
        """A new, empty file at the origin. `NotPermitted` for anything but a regular file."""
        make = partial(self._write.mknod, mode=mode, pid=pid, uid=uid, gid=gid)
        return await self.getattr(await self._claimed((parent, name), make))

    async def write(self, fh: int, offset: int, data: Buffer) -> int:
        """All of it, or an error: `BadHandle`, `NoRoom`, `TooLarge`, `ObjectChanged`. `data` must not change until this
        returns. Where O_APPEND writes to is what the kernel says: it knows the size, and no other node writes here."""
        return await self._write.dirty_files.write(fh, offset, data)

    def write_now(self, fh: int, offset: int, data: Buffer) -> int | None:
        """The same if that takes no waiting; None: nothing has happened."""
        return None if self._writing is None else self._writing.dirty_files.write_now(fh, offset, data)

    def clear_set_ids(self, fh: int, *, later: bool = False) -> None:
        """Clear set-uid and set-gid bits of a file that an unprivileged process changed, or, with `later`, may change."""
        self._write.clear_set_ids(fh, later)

    async def flush(self, fh: int) -> None:
        """Wait for what close(2) promises, and raise its error. Returns at once for handles that only read."""
        if self._writing is not None:
            await self._writing.dirty_files.flush(fh)

    async def fsync(self, fh: int) -> None:
        if self._writing is not None:
            await self._writing.dirty_files.fsync(fh)

    async def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        """Only mode 0. Raises `Unsupported`, and what `write` does."""
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
        clear: bool = False,
    ) -> tuple[Attributes, float]:
        """Change what is not None. A new size is new content; the rest is kept on this node. A new owner takes the set-uid
        and set-gid bits of a file away, and so does `clear`."""
        writing = self._write
        if size is not None:
            await writing.truncate(ino, size, fh)
        if uid is not None or gid is not None or clear:
            shown, _ = await self.getattr(ino)
            wanted = shown.mode if mode is None else stat.S_IFMT(shown.mode) | mode
            if (clean := without_set_ids(wanted)) != wanted:
                mode = stat.S_IMODE(clean)
        given = {"mode": mode, "uid": uid, "gid": gid, "atime_ns": atime_ns, "mtime_ns": mtime_ns}
        news = {name: value for name, value in given.items() if value is not None}
        kept = bool(news) and writing.keep(ino, news)
        shown_now = self.attributes_now(ino)  # in the same step: the name may go to another file meanwhile
        if kept:
            await writing.overrides_committed()
        return shown_now or await self.getattr(ino)

    # -- changing names ----------------------------------------------------------------------------

    async def mkdir(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int
    ) -> tuple[Attributes, float]:
        """A marker at the origin, so that all see it. Raises `AlreadyExists`."""
        make = partial(self._write.mkdir, mode=mode, uid=uid, gid=gid)
        found: Found = await self._claimed((parent, name), make)
        return self._shape(found.ino, True, found.row), self._seconds_until(found.until)

    async def unlink(self, parent: int, name: bytes) -> None:
        """Open handles go on with what was written here, or with what is cached. Raises `NotFound`, `IsADirectory`."""
        await self._claimed((parent, name), self._write.names.unlink)

    async def rmdir(self, parent: int, name: bytes) -> None:
        """Raises `NotFound`, `NotADirectory`, `NotEmpty` (by a fresh listing)."""
        await self._claimed((parent, name), self._write.names.rmdir, trees=True)

    async def rename(self, parent: int, name: bytes, newparent: int, newname: bytes, flags: int) -> None:
        """Replaces a file, or an empty directory by a directory. `flags` as in renameat2: of them, RENAME_NOREPLACE is
        known. Raises `CrossDevice` between two sources."""
        rename = partial(self._write.names.rename, flags=flags)
        await self._claimed((parent, name), (newparent, newname), rename, trees=True)

    async def _claimed(self, *arguments: Any, trees: bool = False) -> Any:
        """Make a change (the last argument) at names, given as (number of the directory, name)."""
        *names, change = arguments
        return await self._write.claimed(
            lambda: [(self._tree.directory(parent), name) for parent, name in names], change, trees=trees
        )

    # -- extended attributes -----------------------------------------------------------------------

    async def getxattr(self, ino: int, name: bytes, uid: int = 0) -> bytes:
        """The value as text. Raises `NoAttribute`. Reading `user.cachefs.refresh` says "look again": nothing else can be
        asked of a mount that cannot be written, from inside a container that has nothing but the mount. Only root and the
        owner of the files may: each time it costs a LIST. `uid` is the user of the process. Raises `NotPermitted`."""
        if name == xattrs.REFRESH:
            if uid not in (0, self._options.uid):
                raise NotPermitted("only the owner of the mount and root refresh it")
            if ino == ROOT:
                await self._refreshing.directory(self._tree.root)
            else:
                directory, mark = self._tree.locate(ino)
                await self._refreshing.name(directory, mark, ino)
            await self.told()
            return b"looking again"
        if ino in self._files.nameless and name in xattrs.OF_FILES:
            return xattrs.of_file(self._files.under(ino)[0].object, self._reader, name)
        is_dir = ino == ROOT or self._tree.locate(ino)[1].endswith(b"/")
        if name not in (xattrs.OF_DIRECTORIES if is_dir else xattrs.OF_FILES):
            raise NoAttribute(f"no attribute {name.decode(errors='replace')}")
        if is_dir:
            directory = self._tree.directory(ino)
            return xattrs.of_directory(directory, self._freshness.whole(directory), name)
        directory, mark = self._tree.locate(ino)
        found = await self._looker.look(directory, name_in(mark))
        found = self._check(ino, found)
        if found.is_dir:
            raise NotFound(f"inode {ino} is gone")
        return xattrs.of_file(object_of(directory, mark, found.row), self._reader, name)

    # -- looking again -----------------------------------------------------------------------------

    async def refresh(self, path: str = "") -> None:
        """Look again at `path` (relative to the mount) and everything below, at the next use. Makes no request; the kernel
        knows when this returns."""
        await self._refreshing.path(path)
        await self.told()

    def _changed(self, directory: Directory, ino: int, name: bytes) -> None:
        """The origin has something else under a name now, or nothing: it led to this inode (0: to none) until now."""
        self._files.forget_warm()
        self._files.lose_name(ino)
        if self._writing is not None:
            self._writing.forget_inode(ino)
        self._tell(directory, ino, name)

    def _invalidate(self, ino: int) -> None:
        try:
            directory, mark = self._tree.locate(ino)
        except CachefsError:
            return
        self._tell(directory, ino, name_in(mark))

    def _tell(self, directory: Directory, ino: int, name: bytes) -> None:
        """The kernel is to look at a name again. Pages of a number that is open are of the version that is open: their
        readers may keep them."""
        self.on_invalidate(0 if self._files.is_open(ino) else ino, directory.ino, name)

    # -- the whole ---------------------------------------------------------------------------------

    def statfs(self) -> Space:
        """An object store has no size: a pebibyte, so that df shows a use of about nothing, and as many names to come."""
        free = 0 if self._writing is None else FREE_NAMES
        return Space(4096, 1 << 38, 1 << 38, self._tree.database.count("inodes"), free, MAX_NAME)

    def status(self) -> dict[str, Any]:
        """For `cachefs status`: plain values."""
        return {
            "names": self._tree.database.count("names"),
            "open_files": len(self._files),
            "open_directories": len(self._directories.handles),
            "listings": self._lister.active(),
        }

    async def aclose(self, *, unmounted: bool = False, handed_over: bool = False) -> None:
        """Stop listing and close what is still open, unless another daemon goes on with it. `unmounted`: no process has
        anything open, though the kernel's last messages may not have come; what is written is kept then. Otherwise what
        processes were writing is given up."""
        for fh, handle in {} if handed_over else dict(self._files.handles).items():
            if unmounted or not handle.writes:
                self.release(fh)
            else:
                self._files.release(fh)
        await self._lister.aclose()
        self._directories.handles.clear()

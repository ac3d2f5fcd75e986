"""Open files: the handles of each inode.

The kernel caches pages per inode, not per handle, and answers reads from them without asking. An inode is one version of a
file and, from the first change here on, its dirty file (`cachefs.fs.local_changes`); all handles change to that together. So
the pages that the kernel has of an inode are right as long as the inode exists.

The kernel requires that all open handles of an inode are read in one way: either through its page cache, or from one backing
file (`Backing`) that all of them share. The first open decides. If readers have a cache file in passthrough when a process
opens it for writing, that cache file becomes the dirty file. While others still use the cache file, the name gets another
inode first (`DirtyFiles.open`).

An open inode that no name leads to any more is *nameless*: it was removed, another file was moved over it, or the origin has
another version. It keeps the attributes of that moment until its last handle is closed (`OpenFiles.nameless`). Its handles
can read as long as the bytes are available.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cachefs.base.errors import CacheUnusable, NotFound, ObjectChanged
from cachefs.base.tasks import Lock
from cachefs.fs.rows import NO_ROW
from cachefs.fs.tree import KEPT_DIRECTORIES, Found

if TYPE_CHECKING:
    from cachefs.base.names import ObjectId
    from cachefs.fs.attributes import Attributes
    from cachefs.fs.reader import Backing, Reader, Reusable
    from cachefs.fs.rows import Row
    from cachefs.fs.tree import Directory
    from cachefs.origin import Origin
    from cachefs.upload import DirtyFile

WARM_OPENS = 16_384
"""Recently opened files that are remembered, under 1 KiB each. Measured: an open from here takes 2 µs, by the tables 9."""

WALKED = 1_024
"""Recently looked up files that are remembered for their open, about 500 bytes each. A bound of memory: 0.5 MB.
A walk that opens nothing, as `find` does, displaces them all."""

KNOWN_FILES = 16_384
"""Closed files that can be opened again from the table, about 500 bytes each. If it is full, it is emptied, and the next
open of each file goes the general way."""

LARGE = 4 << 20
"""Opens of larger files are always reported, because the report is cheap beside them. Borrowed: the size that is fetched in
one GET (`fetcher.WHOLE_BYTES`)."""

Warm = tuple[float, "Origin", "ObjectId", int, "Found"]
"""(time until which it is fresh, origin, version, mtime_ns, lookup of its name) of an opened file."""

Walked = tuple["Directory", bytes, "Found"]
"""(directory, mark, lookup of its name) of a file."""

PassthroughHook = Callable[[Any], bool]
"""Registers a backing file with the kernel. Returns True if the kernel took it."""

OpenHook = Callable[[int, int, "Origin", "ObjectId", bool], None]
"""(ino, pid, origin, object, passthrough): called when a file was opened, in passthrough or not. Never raises."""


class _EveryFile:
    def __contains__(self, digest: object) -> bool:
        return True


EVERY_FILE: Container[bytes] = _EveryFile()


DIRTY_FILE = -1
"""The size of a handle that reads a dirty file. Each of its reads then looks like one behind the end, so other reads need no
check of their own."""


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A file that is open for writing or not uploaded yet. `ino` is its inode, 0 until it has one. `stored`: the origin may
    have an object under its name. `removed`: it has no name any more, only handles. `moving`: a rename is under way.
    `settled`: its dirty file must not be opened any more, because the content is in the cache or at the origin.
    `clears`: a process without the right to keep set-uid and set-gid bits may write it in passthrough."""

    directory: Directory
    name: bytes
    ino: int
    stored: bool
    dirty_file: DirtyFile | None = None
    row: Row = NO_ROW
    pending: bool = False
    removed: bool = False
    settled: bool = True
    moving: bool = False
    clears: bool = False
    writers: int = 0
    attrs: dict[str, Any] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    @property
    def origin(self) -> Origin:
        assert self.directory.origin is not None
        return self.directory.origin

    @property
    def key(self) -> str:
        return self.directory.prefix + self.name.decode()

    def found(self, now: float) -> Found:
        return Found(self.ino, False, self.row, now)


@dataclass(slots=True, eq=False, repr=False)
class FileHandle:
    """One open file. `mtime_ns` is the time of its version. `backing` is its file in passthrough, else None. `node` is set
    if it is open for writing, or reads a dirty file. `flushed`: a descriptor of it was closed, and perhaps no other close
    follows. `description` is the record of it for the next daemon (b"": not made yet) and `record` its place (0: none), both
    for `cachefs.fuse.records`. `lost`: the origin was found not to have its version any more."""

    ino: int
    origin: Origin
    object: ObjectId
    mtime_ns: int
    opened: Any
    pid: int
    backing: Backing | None
    size: int
    description: bytes = b""
    record: int = 0
    node: Node | None = None
    writes: bool = False
    flushed: bool = False
    lost: bool = False
    former: tuple[Any, ...] = ()  # reader handles for its former keys


class Former(NamedTuple):
    """A handle that an earlier daemon gave out. `unsaved`: it was open for writing (`writes`), or read a dirty file."""

    fh: int
    ino: int
    origin: Origin
    object: ObjectId
    mtime_ns: int
    backing_id: int
    writes: bool
    unsaved: bool


class Handles(dict[int, FileHandle]):
    """The open files, by number. An unknown number raises `NotFound`, or `ObjectChanged` if earlier daemons gave out numbers
    (`follow`). `unsaved` has lost handles that wrote, or read a dirty file: number → key."""

    follow = False

    def __init__(self) -> None:
        self.unsaved: dict[int, str] = {}

    def __missing__(self, fh: int) -> FileHandle:
        if (key := self.unsaved.get(fh)) is not None:
            raise CacheUnusable(f"{key} was being written when its daemon died: what was not synced is lost")
        if self.follow:
            raise ObjectChanged(f"the daemon that opened handle {fh} has died")
        raise NotFound(f"no file handle {fh}")


@dataclass(slots=True, eq=False, repr=False)
class Known:
    """A known file. `handle` serves each of its opens, and has another number `fh` each time. The lookup of its name is
    fresh `until` then. `cached` opens its version again."""

    handle: FileHandle
    until: float
    cached: Reusable
    fh: int = 0


@dataclass(slots=True, eq=False, repr=False)
class KnownFiles:
    """The table from which `OpenFiles.reopen` opens a file in a few steps: small files that are wholly cached, and have not
    changed since their last open. `OpenFiles._remember` alone enters files. A change of any name, another open of the inode,
    and an open for writing remove them. The open itself checks that the file is still cached (`Reusable.reuse`). `closed`
    has files by inode, `open` by handle."""

    clock: Callable[[], float]
    closed: dict[int, Known] = field(default_factory=dict)
    open: dict[int, Known] = field(default_factory=dict)


class OpenFiles:
    """All open files. `shape` returns the attributes of an open file, by one of its handles. `clock` is the tree's, for
    freshness. `wall` returns seconds since the epoch, for times that are shown."""

    def __init__(
        self,
        reader: Reader,
        shape: Callable[[FileHandle], Attributes],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.on_passthrough: PassthroughHook | None = None
        # The hook for opens, and the digests of small files in passthrough for whose opens it is called, too.
        self.on_open: OpenHook | None = None
        self.awaited: Container[bytes] = frozenset()
        # The recently opened files, by inode. Any change of a name drops them all.
        self.warm: dict[int, Warm] = {}
        # The recently looked up files, for the opens that follow. Dropped with `warm`.
        self.walked: dict[int, Walked] = {}
        # Of open inodes only; nlink is 0 if the name was removed here.
        self.nameless: dict[int, Attributes] = {}
        # Directories that were removed here, and the attributes that they show, by inode.
        self.removed_directories: dict[int, tuple[Directory, Attributes]] = {}
        self.reader = reader
        self._shape = shape
        self._wall = wall
        self._next = 1
        self.handles = Handles()
        self._by_ino: dict[int, list[FileHandle]] = {}
        self._known = KnownFiles(clock)
        self._withheld: set[int] = set()  # not to be opened in passthrough: a process is about to write them

    def __len__(self) -> int:
        return len(self.handles)

    # -- inodes ------------------------------------------------------------------------------------

    def keep_warm(self, ino: int, warm: Warm) -> None:
        if len(self.warm) >= WARM_OPENS:
            self.warm.clear()
        self.warm[ino] = warm
        self.walked.pop(ino, None)

    def keep_walked(self, ino: int, walked: Walked) -> None:
        if len(self.walked) >= WALKED:
            self.walked.clear()
        self.walked[ino] = walked

    def forget_warm(self) -> None:
        """Forget the recently opened and looked up files, because a name has changed."""
        self.warm.clear()
        self.walked.clear()
        self.forget_known()

    def lose_name(self, ino: int, *, removed: bool = False) -> None:
        """Make an open inode nameless: the origin has another version under its name, or the name was `removed` here."""
        handles = self._by_ino.get(ino)
        if handles is None:
            return
        shown = self.nameless.get(ino) or self._shape(handles[0])
        if removed:
            shown = replace(shown, nlink=0, ctime_ns=round(self._wall() * 1e9))
        self.nameless[ino] = shown

    def removed(self, ino: int) -> bool:
        """True if the inode is open and its name was removed here."""
        return ino in self.nameless and not self.nameless[ino].nlink

    def directory_removed(self, directory: Directory, shown: Attributes) -> None:
        """Note that a directory was removed here. Processes that are in it are shown the attributes `shown`."""
        self.removed_directories[shown.ino] = directory, shown
        if len(self.removed_directories) > KEPT_DIRECTORIES:
            del self.removed_directories[next(iter(self.removed_directories))]

    def withhold(self, ino: int) -> None:
        """Keep an inode from being opened in passthrough until its last handle is closed."""
        self._withheld.add(ino)
        self._known.closed.pop(ino, None)

    def under(self, ino: int) -> list[FileHandle]:
        """The open handles of an inode."""
        return list(self._by_ino.get(ino, ()))

    def is_open(self, ino: int) -> bool:
        """True if the inode has open handles."""
        return ino in self._by_ino

    # -- handles -----------------------------------------------------------------------------------

    def open(
        self, ino: int, origin: Origin, obj: ObjectId, mtime_ns: int, pid: int, *, writes: bool = False
    ) -> tuple[int, int]:
        """Open a version. Returns the handle, and the backing id (0: no passthrough). A handle that `writes` is not opened
        in passthrough. Raises `ObjectChanged` if the open handles of this inode have another version, or are in passthrough
        and this one `writes`."""
        others = self._by_ino.get(ino)
        if others is not None and others[0].object is not obj and others[0].object != obj:
            raise ObjectChanged(f"{obj.key} is open in another version: look it up again")
        if writes and others is not None and others[0].backing is not None:
            raise ObjectChanged(f"{obj.key} is read in passthrough: look it up again to write it")
        opened = self.reader.open(origin, obj)
        backing = None
        if others is not None:
            if (backing := others[0].backing) is not None:
                self.reader.reopen_backing(backing)
        elif self.on_passthrough is not None and not writes and ino not in self._withheld:
            backing = self.reader.open_backing(opened)
            if backing is not None and not backing.id and not self.on_passthrough(backing):
                self.reader.release_backing(backing)
                backing = None
        fh = self._add(FileHandle(ino, origin, obj, mtime_ns, opened, pid, backing, obj.size), others)
        if self.on_open is not None and (backing is None or obj.size > LARGE or obj.digest in self.awaited):
            self.on_open(ino, pid, origin, obj, backing is not None)
        return fh, 0 if backing is None else backing.id

    def reopen(self, ino: int, pid: int) -> Known | None:
        """`open` for a known file. None if it is not known, and `open` has to do it."""
        table = self._known
        known = table.closed.pop(ino, None)
        if known is None or known.until <= table.clock() or not known.cached.reuse():
            return None
        handle = known.handle
        if handle.backing is None:
            handle.opened = self.reader.open(handle.origin, handle.object)
        handle.pid = pid
        self._by_ino[ino] = [handle]
        known.fh = fh = self._next
        self._next = fh + 1
        self.handles[fh] = handle
        table.open[fh] = known
        return known

    def close(self, fh: int) -> bool:
        """`release` for a handle from `reopen`, after which its file is known again. False if a name has changed since,
        or the inode has other handles, and `release` has to do it."""
        known = self._known.open.pop(fh, None)
        if known is None or self.nameless or self._withheld:
            return False
        handle = known.handle
        ino = handle.ino
        if len(self._by_ino[ino]) > 1:
            return False
        del self.handles[fh], self._by_ino[ino]
        if handle.backing is None:
            self.reader.close(handle.opened, known.cached.blocks)
        else:
            self.reader.release_backing(handle.backing)
        self._known.closed[ino] = known
        return True

    def forget_known(self) -> None:
        """Forget the known files. The next open of each goes the general way, and so do all opens of files in `awaited`."""
        self._known.closed.clear()
        self._known.open.clear()

    def _remember(self, ino: int, handle: FileHandle) -> None:
        """Enter a file whose last handle was just closed into the table of known files, if it qualifies."""
        warm = self.warm.get(ino)
        if warm is None or warm[2] is not handle.object:
            return
        if handle.size > LARGE or handle.lost or handle.node is not None or handle.former:
            return
        if self.on_open is not None and handle.object.digest in self.awaited:
            return
        cached = handle.backing or self.reader.reusable(handle.opened)
        if cached is None:
            return
        if len(self._known.closed) >= KNOWN_FILES:
            self._known.closed.clear()
        self._known.closed[ino] = Known(handle, warm[0], cached)

    # -- after another daemon ----------------------------------------------------------------------

    def follow(self, first: int) -> None:
        """Go on where another daemon died: handles have numbers from `first` on, so none is given twice."""
        self._next, self.handles.follow = first, True

    def restore(self, former: Former) -> None:
        """Make a handle that the previous daemon had given out."""
        opened = self.reader.open(former.origin, former.object)
        backing = self.reader.restore_backing(opened, former.backing_id) if former.backing_id else None
        ino, obj = former.ino, former.object
        handle = FileHandle(ino, former.origin, obj, former.mtime_ns, opened, 0, backing, obj.size)
        self._by_ino.setdefault(ino, []).append(handle)
        self.handles[former.fh] = handle

    def renumber(self, number: int, fh: int) -> None:
        """Give a handle that was just opened the number `fh`, which the previous daemon had given out."""
        self.handles[fh] = self.handles.pop(number)

    def decides(self, ino: int) -> bool:
        """True if the next open of the inode decides whether the file is read in passthrough."""
        return self.on_passthrough is not None and ino not in self._by_ino

    def open_dirty_file(self, ino: int, origin: Origin, version: ObjectId, pid: int) -> tuple[int, int]:
        """Open a handle that reads a dirty file. `LocalChanges` attaches it."""
        others = self._by_ino.get(ino)
        if others is not None and others[0].object != version:
            raise ObjectChanged(f"{version.key} is open in an older version: look it up again")
        backing = None if others is None else self.backing_of(others)
        fh = self._add(FileHandle(ino, origin, version, 0, None, pid, backing, version.size), others)
        return fh, 0 if backing is None else backing.id

    @staticmethod
    def backing_of(handles: list[FileHandle]) -> Backing | None:
        """The backing file that these handles share; None without one."""
        return next((handle.backing for handle in handles if handle.backing is not None), None)

    def _add(self, handle: FileHandle, others: list[FileHandle] | None) -> int:
        if others is None:
            self._by_ino[handle.ino] = [handle]
            self._known.closed.pop(handle.ino, None)
        else:
            others.append(handle)
        fh = self._next
        self._next = fh + 1
        self.handles[fh] = handle
        return fh

    def switch(self, ino: int, version: ObjectId, mtime_ns: int, reopen: Origin | None = None) -> None:
        """Give the handles of an inode another version. With `reopen`, handles that read through the daemon open the same
        content there, under its new key."""
        for handle in self._by_ino.get(ino, ()):
            handle.object, handle.mtime_ns, handle.description = version, mtime_ns, b""
            if reopen is not None and handle.backing is None and handle.size != DIRTY_FILE:
                handle.former = (*handle.former, handle.opened)
                handle.opened = self.reader.open(reopen, version)

    def release(self, fh: int) -> FileHandle | None:
        """Close a handle. Returns it, or None for an unknown number."""
        handle = self.handles.pop(fh, None)
        if handle is None:
            self.handles.unsaved.pop(fh, None)
            return None
        self._known.open.pop(fh, None)
        ino = handle.ino
        handles = self._by_ino[ino]
        if len(handles) > 1:
            handles.remove(handle)
        else:
            del self._by_ino[ino]
            if self.nameless or self._withheld:
                self.nameless.pop(ino, None)
                self._withheld.discard(ino)
        if handle.backing is not None and handle.size != DIRTY_FILE:
            self.reader.release_backing(handle.backing)
        if handle.opened is not None:
            seen = handle.backing is None and handle.node is None  # reads came through this daemon
            self.reader.close(handle.opened, None if seen else 0)
            if ino not in self._by_ino:
                self._remember(ino, handle)
        for opened in handle.former:
            self.reader.close(opened)
        return handle

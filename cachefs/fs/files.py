"""Open files: handles, by the inode that they are of.

The kernel keeps pages per inode, not per handle, and gives them out without asking. An inode is one version of a file, or
what is written here from its first change on (`cachefs.fs.local_changes`): all its handles turn to that together. So what
the kernel keeps under a number is right as long as the number lives.

Another law is the kernel's own: all handles that are open under one number are served in one way, either from its page
cache or from a backing file of ours (`Backing`; all of them share that one). So the first handle decides. For readers that
have a file of the cache in passthrough, that very file becomes the dirty file. While others use it, too, the name goes to
another inode before a process may write it (`DirtyFiles.open`).

An open inode that no name leads to any more is *nameless*: it was removed, another file was moved over it, or the origin has
another version. It keeps the attributes that it had then until its last handle is closed (`OpenFiles.nameless`), and its
handles read on, as long as the bytes can be had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cachefs.base.errors import CacheUnusable, NotFound, ObjectChanged
from cachefs.fs.tree import KEPT_DIRECTORIES

if TYPE_CHECKING:
    from cachefs.base.names import ObjectId
    from cachefs.fs.attributes import Attributes
    from cachefs.fs.local_changes import Node
    from cachefs.fs.reader import Backing, Reader, Reusable
    from cachefs.fs.tree import Directory, Found
    from cachefs.origin import Origin

WARM_OPENS = 16_384
"""Lately opened files remembered, under 1 KiB each. Measured: an open from here costs 2 µs, through the tables 9."""

WALKED = 1_024
"""Lately looked up files remembered until they are opened, about 500 bytes each. A bound of memory: 0.5 MB.
A walk that only looks, as of find, goes through it."""

KNOWN_FILES = 16_384
"""Closed files that may be opened again from the table, about 500 bytes each. Beyond it all go the general way once."""

LARGE = 4 << 20
"""Opens of larger files are always reported: each costs more than the report. Borrowed from what is fetched in one GET."""

Warm = tuple[float, "Origin", "ObjectId", int, "Found"]
"""Until when it is fresh; origin, version and mtime_ns of a file; what its name led to."""

Walked = tuple["Directory", bytes, "Found"]
"""A file's directory and mark, and what its name led to."""

PassthroughHook = Callable[[Any], bool]
"""Tells the kernel of a file that it may read by itself; whether it took it."""

OpenHook = Callable[[int, int, "Origin", "ObjectId", bool], None]
"""(ino, pid, origin, object, passthrough): a file was opened; passthrough says that the kernel reads it itself. Never
raises."""


class _EveryFile:
    def __contains__(self, digest: object) -> bool:
        return True


EVERY_FILE: Container[bytes] = _EveryFile()


DIRTY_FILE = -1
"""The size of a handle that reads a dirty file: so every read of it looks like one behind the end, and others pay
nothing."""


@dataclass(slots=True, eq=False, repr=False)
class FileHandle:
    """`ino` is the inode. `mtime_ns` is the time of its version. `backing` is what the kernel reads it from by itself, if it
    does. `node` is there when it is open for writing, or reads what is written; `flushed` when a descriptor of it was
    closed, so that no later close need follow. `description` is what the next daemon is told of it (b"": not made yet), and
    `record` where that is (0: nowhere), both for `cachefs.fuse.records`. `lost`: its version was found to be gone from the
    origin."""

    ino: int
    origin: Origin
    object: ObjectId
    mtime_ns: int
    opened: Any
    pid: int
    backing: Backing | None
    description: bytes = b""
    record: int = 0
    node: Node | None = None
    writes: bool = False
    flushed: bool = False
    lost: bool = False
    former: tuple[Any, ...] = ()  # what it read under names its file does not have any more
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.object.size


class Former(NamedTuple):
    """A handle of a daemon that has died, and what it was opened of. `unsaved`: to write it (`writes`), or to read what was
    written."""

    fh: int
    ino: int
    origin: Origin
    object: ObjectId
    mtime_ns: int
    backing_id: int
    writes: bool
    unsaved: bool


class Handles(dict[int, FileHandle]):
    """By number. Of an unknown one: `NotFound`, or `ObjectChanged` where they `follow` those of daemons that died. `unsaved`
    are those that had been opened to write, or to read what was written: number → key."""

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
    """A known file: the handle that it is opened with each time, until when what its name led to is fresh, how it is cached,
    and the number that its handle has, which is another one each time."""

    handle: FileHandle
    until: float
    cached: Reusable
    fh: int = 0


class KnownFiles:
    """The table from which `OpenFiles.reopen` opens a file in a few steps: small files that are whole here, and that nothing
    has changed since they were opened. `OpenFiles._remember` alone decides which. News of any name, another open under the
    number, and a process that is about to write it take a file out; what has become of the cached file is asked at the open
    (`Reusable.reuse`). `closed` ones are there by inode, `open` ones by handle."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.closed: dict[int, Known] = {}
        self.open: dict[int, Known] = {}

    def forget(self) -> None:
        self.closed.clear()
        self.open.clear()


class OpenFiles:
    """`shape` returns what is shown of an open file, by a handle of it. `clock` is that of `Warm`, and `wall` is seconds
    since the epoch, for times that are shown."""

    def __init__(
        self,
        reader: Reader,
        shape: Callable[[FileHandle], Attributes],
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.on_passthrough: PassthroughHook | None = None
        # The hook that hears of opens; and the digests of small files in passthrough, the fast path, whose opens are worth a
        # call.
        self.on_open: OpenHook | None = None
        self.awaited: Container[bytes] = frozenset()
        # What lately opened files are, and until when that is fresh. Dropped whole on any news.
        self.warm: dict[int, Warm] = {}
        # What lookups have just found, for the opens that they were made for. Dropped with it.
        self.walked: dict[int, Walked] = {}
        self.nameless: dict[
            int, Attributes
        ] = {}  # of open ones only; without links if the name was removed here
        # Directories that were removed here and what is shown of them, by the number that processes have.
        self.gone: dict[int, tuple[Directory, Attributes]] = {}
        self._reader = reader
        self._shape = shape
        self._wall = wall
        self._next = 1
        self.handles = Handles()
        self._by_ino: dict[int, list[FileHandle]] = {}
        self._known = KnownFiles(clock)
        self._withheld: set[int] = set()  # not to be read in passthrough: a process is about to write them

    def __len__(self) -> int:
        return len(self.handles)

    def read_through(self, reader: Reader) -> None:
        self._reader = reader

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
        """Forget what lately opened files are, because a name has changed."""
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
        self.gone[shown.ino] = directory, shown
        if len(self.gone) > KEPT_DIRECTORIES:
            del self.gone[next(iter(self.gone))]

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
        """A handle, and the kernel's number of the file it is to read instead of asking (0: none). What is opened for
        writing is not read in passthrough. Raises `ObjectChanged` where what is open under this number is not served so."""
        others = self._by_ino.get(ino)
        if others is not None and others[0].object is not obj and others[0].object != obj:
            raise ObjectChanged(f"{obj.key} is open in another version: look it up again")
        if writes and others is not None and others[0].backing is not None:
            raise ObjectChanged(f"{obj.key} is read in passthrough: look it up again to write it")
        opened = self._reader.open(origin, obj)
        backing = None
        if others is not None:
            backing = self._reopen_backing(others[0])
        elif self.on_passthrough is not None and not writes and ino not in self._withheld:
            backing = self._open_backing(opened)
        fh = self._add(FileHandle(ino, origin, obj, mtime_ns, opened, pid, backing), others)
        if self.on_open is not None and (backing is None or obj.size > LARGE or obj.digest in self.awaited):
            self.on_open(ino, pid, origin, obj, backing is not None)
        return fh, 0 if backing is None else backing.id

    def reopen(self, ino: int, pid: int) -> Known | None:
        """`open` for a known file. None: nothing has happened, and `open` knows."""
        table = self._known
        known = table.closed.pop(ino, None)
        if known is None or known.until <= table.clock() or not known.cached.reuse():
            return None
        handle = known.handle
        if handle.backing is None:
            handle.opened = self._reader.open(handle.origin, handle.object)
        handle.pid = pid
        self._by_ino[ino] = [handle]
        known.fh = fh = self._next
        self._next = fh + 1
        self.handles[fh] = handle
        table.open[fh] = known
        return known

    def close(self, fh: int) -> bool:
        """`release` for a handle from `reopen`, if nothing has happened since: its file is known again. False: `release`
        knows."""
        known = self._known.open.pop(fh, None)
        if known is None or self.nameless or self._withheld:
            return False
        handle = known.handle
        ino = handle.ino
        if len(self._by_ino[ino]) > 1:
            return False
        del self.handles[fh], self._by_ino[ino]
        if handle.backing is None:
            self._reader.close(handle.opened, known.cached.blocks)
        else:
            self._reader.release_backing(handle.backing)
        self._known.closed[ino] = known
        return True

    def forget_known(self) -> None:
        """Forget the known files. The next open of each goes the general way; so do all opens of those that are
        `awaited`."""
        self._known.forget()

    def _settled(self, handle: FileHandle) -> Reusable | None:
        """The cached file to open again without passthrough, of a file that was just closed; None if it may go into
        passthrough."""
        if handle.size > LARGE or handle.ino in self._withheld or handle.node is not None:
            return None
        return self._reader.settled(handle.opened)

    def _remember(self, ino: int, handle: FileHandle, cached: Reusable | None) -> None:
        """Enter a file into the table of known files, if it qualifies: its last handle was closed, and it is cached as
        `cached`."""
        warm = self.warm.get(ino)
        if warm is None or warm[2] is not handle.object or cached is None:
            return
        if handle.size > LARGE or handle.lost or handle.node is not None or handle.former:
            return
        if self.on_open is not None and handle.object.digest in self.awaited:
            return
        if len(self._known.closed) >= KNOWN_FILES:
            self._known.closed.clear()
        self._known.closed[ino] = Known(handle, warm[0], cached)

    # -- after another daemon ----------------------------------------------------------------------

    def follow(self, first: int) -> None:
        """Go on where another daemon died: handles have numbers from `first` on, so none is given twice."""
        self._next, self.handles.follow = first, True

    def restore(self, was: Former) -> None:
        """Make a handle that the previous daemon had given out."""
        opened = self._reader.open(was.origin, was.object)
        backing = self._reader.restore_backing(opened, was.backing_id) if was.backing_id else None
        handle = FileHandle(was.ino, was.origin, was.object, was.mtime_ns, opened, 0, backing)
        self._by_ino.setdefault(was.ino, []).append(handle)
        self.handles[was.fh] = handle

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
        fh = self._add(FileHandle(ino, origin, version, 0, None, pid, backing), others)
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

    def turn(self, ino: int, version: ObjectId, mtime_ns: int, reopen: Origin | None = None) -> None:
        """Give the handles of an inode another version. With `reopen`, handles that read through the daemon open the same
        content there, under its new key."""
        for handle in self._by_ino.get(ino, ()):
            handle.object, handle.mtime_ns, handle.description = version, mtime_ns, b""
            if reopen is not None and handle.backing is None and handle.size != DIRTY_FILE:
                handle.former = (*handle.former, handle.opened)
                handle.opened = self._reader.open(reopen, version)

    def _open_backing(self, opened: Any) -> Backing | None:
        backing = self._reader.open_backing(opened)
        if backing is None or backing.id:
            return backing
        assert self.on_passthrough is not None
        if self.on_passthrough(backing):
            return backing
        self._reader.release_backing(backing)
        return None

    def _reopen_backing(self, other: FileHandle) -> Backing | None:
        if other.backing is not None:
            self._reader.reopen_backing(other.backing)
        return other.backing

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
            self._reader.release_backing(handle.backing)
        if handle.opened is not None:
            seen = handle.backing is None and handle.node is None  # by this daemon, READ by READ
            self._reader.close(handle.opened, None if seen else 0)
            if ino not in self._by_ino:
                self._remember(ino, handle, handle.backing or self._settled(handle))
        for opened in handle.former:
            self._reader.close(opened)
        return handle

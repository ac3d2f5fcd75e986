"""Open files: handles, and what makes two versions of one object never meet in the kernel's page cache.

The kernel keeps pages per inode number, not per handle, and gives them out without asking. So the law is: all handles
that are open under one number are of one version. While a number is held by readers of an older version, the current one
is shown under another number, an *alias*, made for that version alone. When the readers of the old version are gone, the
name is shown under its own number again, and the first open tells the kernel to drop the pages it has of it.

Another law is the kernel's own: all handles that are open under one number are served in one way, either from its page
cache or from a backing file of ours (`Backing`; all of them share that one). So the first handle decides.

What is written here is a version, too, from its first change to the moment when the store has it
(`cachefs.fs.local_changes`): all handles under the number turn to it together. For readers that have a file of the cache
in passthrough, that very file becomes the dirty file. While others use it, too, a process that wants to write gets an alias.

A file that was moved keeps its number as long as the mount lives, since the kernel goes on using it: the number of its new
path is shown as that one.

A number that is open and that no name shows any more is *parted* from its name: the name was removed, another file was
moved over it, or the origin has another version. It keeps the attributes that it had then until its last handle is closed
(`OpenFiles.parted`), and its handles read on, as long as the bytes can be had.

An alias leads back to its file through a table in memory. What falls out of that table without being open, and a number that
is not open and stands for another version than the current one, is answered with `ObjectChanged`: ESTALE makes the kernel
walk the path again, asking for each name, and then it finds the number that is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cachefs.base.errors import NotFound, ObjectChanged
from cachefs.fs.inodes import FIRST_ALIAS, alias_of, next_alias

if TYPE_CHECKING:
    from cachefs.base.names import ObjectId
    from cachefs.fs.attributes import Attributes
    from cachefs.fs.local_changes import Node
    from cachefs.fs.reader import Backing, Reader
    from cachefs.fs.tree import Directory
    from cachefs.origin import Origin

CHANGES_REMEMBERED = 65_536
"""Inodes known to have changed and not opened since, about 70 bytes each. Guessed; beyond it the oldest rely on the
invalidation that was sent to the kernel when the change was seen."""

SETTLED_S = 1.0
"""The kernel drops pages after it has our answer to an open. Who opens beside that must not be told to keep them, for as
long as the first may take to run. Guessed."""

NOT_OPENED = float("inf")

ALIASES_REMEMBERED = 16_384
"""Aliases, about 300 bytes each. Guessed: more than the files that change while they are open. Beyond it the oldest are
looked up again."""


CLOSED_REMEMBERED = 16_384
"""Closed files in passthrough whose handles are kept, about 500 bytes each. Beyond it all go the general way once."""

INODES_SURE = 262_144
"""Inodes opened since another daemon died, about 70 bytes each. Guessed; beyond it all are as if they were not."""

NUMBERS_KEPT = 16_384
"""Moved files that keep their numbers, about 200 bytes each. Guessed; beyond it the oldest are looked up again."""

DIRECTORIES_KEPT = 1_024
"""Removed directories that processes may still be in, about 500 bytes each. Guessed; beyond it the oldest answer ESTALE."""

NOWHERE = 0
"""Where a number leads that was kept for a file which is gone. No path has it."""

LARGE = 4 << 20
"""Opens of larger files are always reported: each costs more than the report. Borrowed from what is fetched in one GET."""

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


class FileHandle:
    """`ino` is the number it was opened under, `stable` that of its path; they differ under an alias. `mtime_ns` is the time
    of its version. `backing` is what the kernel reads it from by itself, if it does. `node` is there when it is open for
    writing, or reads what is written; `flushed` when a descriptor of it was closed, so that no later close need follow.
    `record` is what a holder keeps of it for the next daemon (b"": not made yet).
    `superseded`: another version is the current one."""

    __slots__ = (
        "backing",
        "counted",
        "flushed",
        "former",
        "ino",
        "mtime_ns",
        "node",
        "object",
        "opened",
        "origin",
        "pid",
        "record",
        "size",
        "stable",
        "superseded",
        "writes",
    )

    def __init__(
        self,
        ino: int,
        stable: int,
        origin: Origin,
        obj: ObjectId,
        mtime_ns: int,
        opened: Any,
        pid: int,
        backing: Backing | None,
    ) -> None:
        self.ino = ino
        self.stable = stable
        self.origin = origin
        self.object = obj
        self.mtime_ns = mtime_ns
        self.size = obj.size
        self.opened = opened
        self.pid = pid
        self.backing = backing
        self.superseded = False
        self.counted = False
        self.record = b""
        self.node: Node | None = None
        self.writes = self.flushed = False
        self.former: tuple[Any, ...] = ()  # what it read under names its file does not have any more

    def can_reopen(self) -> bool:
        """Whether this handle of a file in passthrough, now closed, may be given out again (`OpenFiles.reopen`)."""
        return (
            self.ino < FIRST_ALIAS
            and self.size <= LARGE
            and not self.superseded
            and self.node is None
            and not self.former
        )


class OpenFiles:
    """`shape` returns what is shown of an open file, by a handle of it. `wall` is seconds since the epoch, for times that
    are shown."""

    def __init__(
        self,
        reader: Reader,
        clock: Callable[[], float],
        moved: dict[int, int],
        shape: Callable[[FileHandle], Attributes],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.on_passthrough: PassthroughHook | None = None
        # The hook that hears of opens; and the digests of small files in passthrough, the fast path, whose opens are worth a
        # call.
        self.on_open: OpenHook | None = None
        self.awaited: Container[bytes] = frozenset()
        self.unopened = False  # the kernel opens files without asking, so no open makes it drop what it has
        self.parted: dict[int, Attributes] = {}  # by number; of open ones only
        # Directories that were removed here and what is shown of them, by the number that processes have.
        self.gone: dict[int, tuple[Directory, Attributes]] = {}
        self._reader = reader
        self._clock = clock
        self._shape = shape
        self._wall = wall
        self._next = 1
        self._handles: dict[int, FileHandle] = {}
        self._by_ino: dict[int, list[FileHandle]] = {}
        self._closed: dict[int, FileHandle] = {}  # by number: see `reopen`
        self._under_alias: dict[int, list[FileHandle]] = {}  # by the number of the path
        self._aliases: dict[int, tuple[int, str, int]] = {}  # alias → (number of the path, etag, size)
        self._changed: dict[int, float] = {}  # until when an open makes the kernel drop its pages
        self._moved = moved  # number that the kernel uses → number of the path
        self._owns: dict[int, int] = {}  # the other way round
        self._apart: set[int] = set()  # open, and shown no more: in passthrough, or removed
        self._surely: set[int] | None = None  # see `follow`

    def __len__(self) -> int:
        return len(self._handles)

    def read_through(self, reader: Reader) -> None:
        self._reader = reader

    # -- numbers -----------------------------------------------------------------------------------

    def stable(self, ino: int) -> int:
        """The number of the path that is shown as `ino`. Raises `ObjectChanged` for an alias that is forgotten."""
        if ino < FIRST_ALIAS:
            return self._moved.get(ino, ino)
        if (alias := self._aliases.get(ino)) is not None:
            return alias[0]
        if (others := self._by_ino.get(ino)) is not None:
            return others[0].stable
        raise ObjectChanged(f"alias {ino} is forgotten")

    def own(self, stable: int) -> int:
        """The number that a path has in this mount, but for aliases."""
        return self._owns.get(stable, stable)

    def shown(self, stable: int, etag: str, size: int) -> int:
        """The number under which this version of a file is shown."""
        own = self._owns.get(stable, stable)
        if not (self.unopened and own in self._changed):
            others = self._by_ino.get(own)
            if others is None:
                if stable not in self._under_alias:
                    return own
                # Only a reader of a dirty file leads to it.
                dirty_file = self._open_alias(stable, etag, size)
                return dirty_file.ino if dirty_file is not None and dirty_file.size == DIRTY_FILE else own
            held = others[0].object
            if held.etag == etag and held.size == size and own not in self._apart:
                return own
        if (open_alias := self._open_alias(stable, etag, size)) is not None:
            return open_alias.ino
        wanted = (stable, etag, size)
        alias = alias_of(*wanted)
        while (found := self._aliases.get(alias)) is not None and (found != wanted or alias in self._apart):
            alias = next_alias(alias)
        if found is None:
            self._aliases[alias] = wanted
            if len(self._aliases) > ALIASES_REMEMBERED:
                del self._aliases[next(iter(self._aliases))]
        return alias

    def _open_alias(self, stable: int, etag: str, size: int) -> FileHandle | None:
        """A handle of this version under an alias."""
        for handle in self._under_alias.get(stable, ()):
            if (handle.object.etag, handle.object.size) == (etag, size) and handle.ino not in self._apart:
                return handle
        return None

    def fits(self, ino: int, etag: str, size: int) -> bool:
        """Whether `ino` may stand for this version of its file."""
        if ino >= FIRST_ALIAS:
            return self._aliases.get(ino, (0, "", -1))[1:] == (etag, size)
        if (self.unopened and ino in self._changed) or ino in self._owns:
            return False
        others = self._by_ino.get(ino)
        return others is None or (others[0].object.etag, others[0].object.size) == (etag, size)

    def moved(self, stable: int, to: int) -> None:
        """The file (or directory) of one path is at another now, and keeps its number."""
        own = self._owns.pop(stable, stable)
        self.removed(to)
        self._moved.pop(own, None)
        aside = self._under_alias.pop(stable, [])
        for handle in (*self._by_ino.get(own, ()), *aside):
            handle.stable = to
            if handle.ino in self._aliases:
                self._aliases[handle.ino] = (to, *self._aliases[handle.ino][1:])
        if aside:
            self._under_alias.setdefault(to, []).extend(aside)
        if own != to:
            self._moved[own], self._owns[to] = to, own
            self._forget_numbers()

    def directory_moved(self, stable: int, to: int) -> None:
        """The same of a directory. No other one gets the number of the old path: the numbers of files in it come from that,
        and the kernel may have pages under them."""
        self.moved(stable, to)
        self._moved.setdefault(stable, NOWHERE)
        self._forget_numbers()

    def _forget_numbers(self) -> None:
        while len(self._moved) > NUMBERS_KEPT:
            oldest = next(iter(self._moved))
            self.gone.pop(oldest, None)
            if self._owns.pop(self._moved.pop(oldest), None) is not None:
                self.note_change(oldest)

    def removed(self, stable: int) -> None:
        """Nothing is at this path any more: whatever comes there has another number than the kernel knew."""
        own = self._owns.pop(stable, None)
        if own is not None:
            self._moved[own] = NOWHERE
            self._lose_name(own)
        elif stable in self._by_ino and stable not in self._moved:
            self._lose_name(stable)
        for ino in {handle.ino for handle in self._under_alias.get(stable, ())}:
            self._lose_name(ino)

    def directory_removed(self, directory: Directory, shown: Attributes) -> None:
        """A directory is gone here, and is `shown` so to processes that are in it. A new one has another number: the kernel
        makes nothing below a number that was removed."""
        self.gone[shown.ino], self._moved[shown.ino] = (directory, shown), NOWHERE
        if len(self.gone) > DIRECTORIES_KEPT:
            oldest = next(iter(self.gone))
            del self.gone[oldest]
            self._moved.pop(oldest, None)

    def _lose_name(self, ino: int) -> None:
        """Whatever comes to the name is shown under another number, even with the same content."""
        if ino in self._by_ino:
            self._apart.add(ino)
            self.part(ino)
            self.parted[ino] = replace(self.parted[ino], nlink=0, ctime_ns=round(self._wall() * 1e9))

    def part(self, ino: int) -> Attributes:
        """No name shows this open number any more. Returns what is shown of it from now on."""
        found = self.parted.get(ino)
        if found is None:
            found = self.parted[ino] = self._shape(self._by_ino[ino][0])
        return found

    def nameless(self, ino: int) -> bool:
        """Whether it is open, and its file has lost its name here."""
        return ino in self.parted and not self.parted[ino].nlink

    def paths(self) -> set[int]:
        """The numbers of the paths of all files that are open, or that keep a number."""
        return {*self._owns, *(handle.stable for handle in self._handles.values())}

    def under(self, ino: int) -> list[FileHandle]:
        """The handles that are open under this number."""
        return list(self._by_ino.get(ino, ()))

    def held(self, ino: int) -> bool:
        """Whether handles are open under this very number: then its pages are of their version, and right."""
        return ino in self._by_ino

    def live(self, ino: int) -> bool:
        """Whether a handle is open under this very number that nothing is known against."""
        others = self._by_ino.get(ino)
        return others is not None and not others[0].superseded

    # -- handles -----------------------------------------------------------------------------------

    def open(
        self, ino: int, origin: Origin, obj: ObjectId, mtime_ns: int, pid: int, *, writes: bool = False
    ) -> tuple[int, bool, int]:
        """A handle, whether pages the kernel has of this inode are of this version, and the kernel's number of the file it
        is to read instead of asking (0: none). What is opened for writing is not read in passthrough.

        Pages cannot be older than the mount, and every change since is noted, so "not noted" means they are. Raises
        `ObjectChanged` when handles of another version are open under this number."""
        others = self._by_ino.get(ino)
        if others is not None and others[0].object is not obj and others[0].object != obj:
            self.note_change(ino)
            raise ObjectChanged(f"{obj.key} is open in an older version: look it up again")
        if writes and others is not None and others[0].backing is not None:
            self._apart.add(ino)
            raise ObjectChanged(f"{obj.key} is read in passthrough: look it up again to write it")
        if self._surely is not None and ino not in self._surely:
            self._make_sure(ino)
        keep = not self._changed or self._keep(ino)
        opened = self._reader.open(origin, obj)
        backing = None
        if others is not None:
            backing = self._reopen_backing(others[0])
        elif self.on_passthrough is not None and not writes and not (self._apart and self._is_apart(ino)):
            backing = self._open_backing(opened)
        stable = self.stable(ino) if self._moved or ino >= FIRST_ALIAS else ino
        fh = self._add(FileHandle(ino, stable, origin, obj, mtime_ns, opened, pid, backing), others)
        if self.on_open is not None and (backing is None or obj.size > LARGE or obj.digest in self.awaited):
            self.on_open(ino, pid, origin, obj, backing is not None)
        return fh, keep, 0 if backing is None else backing.id

    def reopen(self, ino: int, obj: ObjectId, pid: int) -> tuple[int, Backing] | None:
        """`open` for a file that was closed in passthrough and is open nowhere, in as few steps as that takes: a handle and
        the backing file, whose use the caller notes (`Reader.note_use`). None: `open` knows."""
        handle = self._closed.get(ino)
        if (
            handle is None
            or handle.object is not obj
            or ino in self._by_ino
            or (self._changed and ino in self._changed)
            or (self._apart and self._is_apart(ino))
            or (self.on_open is not None and obj.digest in self.awaited)
        ):
            return None
        backing = handle.backing
        if backing is None or not backing.reuse():
            del self._closed[ino]
            return None
        if self._moved:
            handle.stable = self._moved.get(ino, ino)
        handle.pid = pid
        self._by_ino[ino] = [handle]
        fh = self._next
        self._next = fh + 1
        self._handles[fh] = handle
        return fh, backing

    # -- after another daemon ----------------------------------------------------------------------

    def follow(self, first: int) -> None:
        """Go on where another daemon died: handles have numbers from `first` on, so none is given twice. Which pages of the
        kernel are out of date died with it, so the first open of each inode makes the kernel drop them."""
        self._next = first
        self._surely = set()

    def restore(
        self,
        fh: int,
        ino: int,
        stable: int,
        origin: Origin,
        obj: ObjectId,
        mtime_ns: int,
        backing_id: int,
    ) -> None:
        """A handle of the daemon before. Its pages are of its version."""
        opened = self._reader.open(origin, obj)
        backing = self._reader.restore_backing(opened, backing_id) if backing_id else None
        handle = FileHandle(ino, stable, origin, obj, mtime_ns, opened, 0, backing)
        if ino >= FIRST_ALIAS:
            self._aliases[ino] = (stable, obj.etag, obj.size)
            self._under_alias.setdefault(stable, []).append(handle)
        self._by_ino.setdefault(ino, []).append(handle)
        self._handles[fh] = handle
        if self._surely is not None:
            self._surely.add(ino)

    def _make_sure(self, ino: int) -> None:
        assert self._surely is not None
        if len(self._surely) >= INODES_SURE:
            self._surely.clear()
        self._surely.add(ino)
        self.note_change(ino)

    def decides(self, ino: int) -> bool:
        """Whether the next open under this number decides how the file is read, and may decide that the kernel does."""
        return self.on_passthrough is not None and ino not in self._by_ino

    def _is_apart(self, ino: int) -> bool:
        return self.own(self.stable(ino)) in self._apart

    def open_dirty_file(self, ino: int, origin: Origin, version: ObjectId, pid: int) -> tuple[int, bool, int]:
        """A handle of what is being written here, which `LocalChanges` attaches."""
        others = self._by_ino.get(ino)
        if others is not None and others[0].object != version:
            raise ObjectChanged(f"{version.key} is open in an older version: look it up again")
        keep = self._keep(ino)
        backing = None if others is None else self.backing_of(others)
        handle = FileHandle(ino, self.stable(ino), origin, version, 0, None, pid, backing)
        fh = self._add(handle, others)
        return fh, keep, 0 if backing is None else backing.id

    @staticmethod
    def backing_of(handles: list[FileHandle]) -> Backing | None:
        """The file that the kernel has for these."""
        return next((handle.backing for handle in handles if handle.backing is not None), None)

    def _keep(self, ino: int) -> bool:
        """Whether pages that the kernel has under this number are of the version that is current now."""
        if not self._changed or self.unopened or (until := self._changed.get(ino)) is None:
            return True
        now = self._clock()
        if until == NOT_OPENED:
            self._changed[ino] = now + SETTLED_S
        elif now > until:
            del self._changed[ino]
        return now > until

    def _add(self, handle: FileHandle, others: list[FileHandle] | None) -> int:
        if others is None:
            self._by_ino[handle.ino] = [handle]
        else:
            others.append(handle)
        if handle.ino >= FIRST_ALIAS:
            obj = handle.object
            if handle.ino not in self.parted:  # or its name shows another file by now
                self.supersede(handle.stable, obj.etag, obj.size)
                self.note_change(handle.stable)
            self._under_alias.setdefault(handle.stable, []).append(handle)
        fh = self._next
        self._next = fh + 1
        self._handles[fh] = handle
        return fh

    def turn(self, ino: int, version: ObjectId, mtime_ns: int, reopen: Origin | None = None) -> None:
        """The handles under this number are of another version from now on, and so is the alias, if it is one. Those that
        read by themselves read on from the same content under its new name at `reopen`."""
        if ino in self._aliases:
            self._aliases[ino] = (self._aliases[ino][0], version.etag, version.size)
        for handle in self._by_ino.get(ino, ()):
            handle.object, handle.mtime_ns = version, mtime_ns
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

    def get(self, fh: int) -> FileHandle:
        try:
            return self._handles[fh]
        except KeyError:
            if self._surely is not None:
                raise ObjectChanged(f"the daemon that opened handle {fh} has died") from None
            raise NotFound(f"no file handle {fh}") from None

    def supersede(self, stable: int, etag: str, size: int) -> None:
        """This is the current version of a file: numbers that are open in others part from the name."""
        for handles in (self._by_ino.get(self.own(stable), ()), self._under_alias.get(stable, ())):
            for handle in handles:
                if handle.ino in self._apart or (handle.node is not None and handle.node.removed):
                    continue  # what has no name any more is no version of one
                handle.superseded = handle.object.etag != etag or handle.object.size != size
                if handle.superseded:
                    self.part(handle.ino)
                else:
                    self.parted.pop(handle.ino, None)

    def note_change(self, ino: int) -> None:
        """The kernel may have pages of an older version."""
        ino = self.own(ino)
        self._changed.pop(ino, None)
        self._changed[ino] = NOT_OPENED
        if len(self._changed) > CHANGES_REMEMBERED:
            del self._changed[next(iter(self._changed))]

    def release(self, fh: int) -> FileHandle | None:
        """The handle that this was, if it was one."""
        handle = self._handles.pop(fh, None)
        if handle is None:
            return None
        ino = handle.ino
        _remove(self._by_ino, ino, handle)
        if ino >= FIRST_ALIAS:
            _remove(self._under_alias, handle.stable, handle)
        if handle.backing is not None and handle.size != DIRTY_FILE:
            self._reader.release_backing(handle.backing)
            if self._closed.get(ino) is not handle and handle.can_reopen():
                if len(self._closed) >= CLOSED_REMEMBERED:
                    self._closed.clear()
                self._closed[ino] = handle
        if handle.opened is not None:
            self._reader.close(handle.opened)
        for opened in handle.former:
            self._reader.close(opened)
        if (self._apart or self.parted) and ino not in self._by_ino:
            self._apart.discard(ino)
            self.parted.pop(ino, None)
        return handle

    def handles(self) -> dict[int, FileHandle]:
        return dict(self._handles)


def _remove(table: dict[int, list[FileHandle]], key: int, handle: FileHandle) -> None:
    handles = table[key]
    if len(handles) == 1:
        del table[key]
    else:
        handles.remove(handle)

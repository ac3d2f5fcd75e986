"""Reading directories: streamed from the tree while the listing lands.

A cookie is the lower part of the inode number of the name it stands behind: it needs no memory, holds for every handle
and after a restart, and can be sought to. A handle that began on a complete listing reads what is there, whatever is
listed again meanwhile; one that began on a running listing gives out a name once it is decided and waits for the next page
when it has caught up. It never ends before the listing did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cachefs.base.errors import OriginFailed, Unreachable, Unsupported
from cachefs.base.ledger import about
from cachefs.fs.attributes import FOREVER, Attributes, Entry
from cachefs.fs.inodes import LOW_MASK
from cachefs.fs.keys import mark_of_directory, name_in
from cachefs.fs.listing import AHEAD
from cachefs.fs.tree import Directory, inode_of

if TYPE_CHECKING:
    from cachefs.fs.freshness import Freshness
    from cachefs.fs.listing import Lister
    from cachefs.fs.rows import Row
    from cachefs.fs.tree import Tree

CHUNK = 256
"""Names read from the tree at a time. Guessed: several of the kernel's buffers, well under a millisecond."""

Shape = Callable[[int, bool, "Row"], Attributes]
"""(ino, is_dir, row) → attributes."""


class DirectoryHandle:
    """One open directory: `directory` is what its number `ino` leads to now. `attributes` are those it was opened with, if
    they were known. `generation` is the oldest listing whose rows it shows; 0 until it has begun."""

    __slots__ = ("attributes", "chunk", "directory", "generation", "ino", "last", "places")

    def __init__(self, ino: int, directory: Directory, attributes: Attributes | None = None) -> None:
        self.ino = ino
        self.attributes = attributes
        self.directory = directory
        self.generation = 0
        self.chunk: list[Entry] = []
        self.places: dict[int, int] = {}  # cookie → index in the chunk of what comes behind it
        self.last = b""  # the mark the chunk ends with


class DirectoryReader:
    def __init__(
        self, tree: Tree, freshness: Freshness, lister: Lister, clock: Callable[[], float], shape: Shape
    ) -> None:
        self._tree = tree
        self._freshness = freshness
        self._lister = lister
        self._clock = clock
        self._shape = shape

    async def read(self, handle: DirectoryHandle, offset: int, limit: int) -> list[Entry]:
        """At most `limit` entries behind the cookie `offset` (0: from the beginning); none at the end."""
        about(handle.directory.prefix)
        if offset and (place := handle.places.get(offset)) is not None:
            if not handle.generation:
                # Its directory was renamed: what comes behind this name is listed again.
                entry = handle.chunk[place - 1]
                handle.last = mark_of_directory(entry.name) if entry.attributes.is_dir else entry.name
            elif place < len(handle.chunk):
                return handle.chunk[place : place + limit]
            after = handle.last
        elif offset:
            mark = self._tree.mark_at(handle.directory, offset)
            if mark is None:
                raise OriginFailed("the directory changed while it was read: the place to go on from is gone")
            after = mark
        else:
            handle.generation = 0
            after = b""
        directory = handle.directory
        if not handle.generation:
            handle.generation = self._begin(directory)
        try:
            more = await self._fill(handle, after)
        except Unreachable:
            if (
                after
                or not directory.complete
                or directory.origin is None
                or not directory.origin.serves_stale
            ):
                raise
            handle.generation = directory.complete  # nothing of the new listing was shown yet
            more = await self._fill(handle, after)
        return handle.chunk[:limit] if more else []

    def _begin(self, directory: Directory) -> int:
        """The generation that a reader which begins now may use; its listing is under way if it is not complete."""
        now = self._clock()
        horizon = self._freshness.horizon(directory, now, now)
        whole = self._freshness.whole(directory)
        if whole is not None and whole[1] >= horizon and not directory.early:
            return whole[0]
        if directory.complete and directory.origin is not None and directory.origin.serves_stale:
            return directory.complete
        if directory.origin is None or not directory.origin.can_list:
            raise Unsupported("this store cannot be listed: open its files by their full names")
        return self._lister.demand(directory, horizon).generation

    async def _fill(self, handle: DirectoryHandle, after: bytes) -> bool:
        """Read the next chunk behind the mark `after`, waiting for pages. False at the end."""
        directory = handle.directory
        while True:
            rows = self._tree.scan(directory, after, CHUNK)
            waiting = handle.generation > directory.complete
            listing = None
            if waiting:
                listing = self._lister.demand(directory, float("-inf"))
                self._lister.allow(directory, listing, AHEAD)
                decided = 0
                while decided < len(rows) and listing.has_passed(rows[decided][0]):
                    decided += 1
                del rows[decided:]
            entries = self._entries(handle, rows)
            if entries:
                handle.chunk, handle.last = entries, rows[-1][0]
                handle.places = {entry.next_offset: index for index, entry in enumerate(entries, 1)}
                return True
            if rows:
                after = rows[-1][0]
            elif listing is None:
                return False
            else:
                await listing.turn.wait()

    def _entries(self, handle: DirectoryHandle, rows: list[tuple[bytes, Row]]) -> list[Entry]:
        directory, generation = handle.directory, handle.generation
        rows = [(mark, row) for mark, row in rows if row.generation >= generation]
        files = [mark for mark, _ in rows if not mark.endswith(b"/")]
        as_directories = self._tree.as_directories(directory, files)
        hidden = {
            f
            for f, dir_row in zip(files, as_directories, strict=True)
            if dir_row and dir_row.generation >= generation
        }
        now = self._clock()
        entries: list[Entry] = []
        for mark, row in rows:
            if mark in hidden:
                continue
            name = name_in(mark)
            ino = inode_of(directory, name, row)
            ttl = 0.0
            if row.known and not self._freshness.is_doubted(ino):
                cover = self._freshness.coverage(directory, name)
                if cover is not None and row.generation >= cover[0]:
                    ttl = max(0.0, min(cover[1] + directory.ttls.ttl - now, FOREVER))
            attributes = self._shape(ino, mark.endswith(b"/"), row)
            entries.append(Entry(name, attributes, ino & LOW_MASK, ttl))
        return entries

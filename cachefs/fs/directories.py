"""Reading directories: entries come from the tree, while the listing may still be under way.

The cookie of an entry is the inode of its name. So a cookie needs no memory, is valid in each handle and after a restart,
and a reader can seek to it. A handle that began on a complete listing reads its rows, even if the directory is listed again
meanwhile. A handle that began on a listing under way returns a name once a page has decided it, and waits for the next page
when it has returned all. It never ends before the listing. Names that this node adds behind its beginning are left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cachefs.base.errors import OriginFailed, Unreachable, Unsupported
from cachefs.base.ledger import about
from cachefs.fs.attributes import FOREVER, Attributes, Entry
from cachefs.fs.keys import name_in
from cachefs.fs.listing import AHEAD
from cachefs.fs.tree import Directory, KernelListing

if TYPE_CHECKING:
    from cachefs.fs.freshness import Freshness
    from cachefs.fs.listing import Lister
    from cachefs.fs.rows import Row
    from cachefs.fs.tree import Listing, Tree

CHUNK = 256
"""Names read from the tree before other tasks have a turn. Measured: 0.3 ms."""

_SLASH = ord("/")

Shape = Callable[[int, bool, "Row"], Attributes]
"""(ino, is_dir, row) → attributes."""


@dataclass(slots=True, eq=False, repr=False)
class DirectoryHandle:
    """One open directory. `attributes` are those at its open, None if they were not known. `generation` is the oldest
    listing whose rows it shows, 0 before the first read. `version` and `renewals` are the directory's and the tree's at that
    read."""

    ino: int
    directory: Directory
    attributes: Attributes | None = None
    generation: int = 0
    version: int = 0
    renewals: int = 0
    # Cookie → mark, of the last entries that it gave and of the one before them: their names may be gone when the reader
    # goes on behind them. No entry is kept for the next read: the kernel would enter a name that was renamed or written
    # since into its caches as it was.
    places: dict[int, bytes] = field(default_factory=dict)


class OpenDirectories(dict[int, DirectoryHandle]):
    """The open directories, by handle."""

    def __init__(self) -> None:
        self.follow(1)

    def follow(self, first: int) -> None:
        """Go on where another daemon died: number new handles from `first` on."""
        self._first = self._next = first

    def are_before(self, number: int) -> bool:
        """True if an earlier daemon gave out this number, and its handle was not restored."""
        return number < self._first and number not in self

    def add(self, handle: DirectoryHandle) -> int:
        number = self._next
        self._next += 1
        self.restore(number, handle)
        return number

    def restore(self, number: int, handle: DirectoryHandle) -> None:
        """Add a handle under the number that an earlier daemon gave it."""
        self[number] = handle
        handle.directory.names.opened()

    def remove(self, number: int) -> None:
        """Remove a handle, if it is there."""
        if (handle := self.pop(number, None)) is not None:
            handle.directory.names.closed()


@dataclass(eq=False, repr=False)
class DirectoryReader:
    _tree: Tree
    _freshness: Freshness
    _lister: Lister
    _shape: Shape
    handles: OpenDirectories = field(default_factory=OpenDirectories)

    async def read(self, handle: DirectoryHandle, offset: int, limit: int) -> list[Entry]:
        """At most `limit` entries behind the cookie `offset` (0: from the beginning); none at the end. Begins again if an
        earlier daemon has given out the cookie, and its name is gone. Raises `OriginFailed` if another cookie's place is
        lost."""
        about(handle.directory.prefix)
        if offset and handle.renewals != self._tree.renewals:
            raise OriginFailed("the names that were known are lost: the directory is to be read again")
        directory, mark = handle.directory, handle.places.get(offset)
        if not offset:
            handle.generation, mark = 0, None
        elif mark is None and (mark := self._tree.mark_at(directory, offset)) is None and handle.generation:
            raise OriginFailed("the directory changed while it was read: the place to go on from is gone")
        # A reader that began with an earlier daemon may have removed the last name that it was given, as `rm -r` does.
        # Nothing tells where that name was. Names that come twice are better than names that are left out.
        after = mark or b""
        handle.places = {offset: after}
        if not handle.generation:
            handle.generation, handle.version = self._begin(directory), directory.names.version
            handle.renewals = self._tree.renewals
            kernel = directory.kernel
            if kernel is not None and not offset:
                if not kernel.generation:
                    kernel.generation = handle.generation
                elif kernel.generation != handle.generation:
                    directory.kernel = None
        try:
            return await self._next(handle, after, limit)
        except Unreachable:
            if (
                after
                or not directory.listed.complete
                or directory.origin is None
                or not directory.origin.serves_stale
            ):
                raise
            handle.generation = directory.listed.complete  # no entry of the new listing was returned yet
            return await self._next(handle, after, limit)

    def kept(self, number: int) -> bool:
        """True if the kernel may keep its cached listing for the reader of this handle; otherwise it drops the listing now.
        It may keep the listing while that is complete and fresh, and no name has come or gone. Its entries' attributes are
        valid for the same time."""
        handle = self.handles[number]
        directory, kernel = handle.directory, handle.directory.kernel
        fresh, version = self._fresh(directory, self._freshness.horizon(directory)), directory.names.version
        if (
            fresh
            and kernel
            and (kernel.ino, kernel.version, kernel.generation) == (handle.ino, version, fresh)
        ):
            return True
        # The kernel also caches what readers that began earlier go on to read.
        began = (
            other for other in self.handles.values() if other.directory is directory and other.generation
        )
        mixed = any((other.generation, other.version) != (fresh, version) for other in began)
        directory.kernel = None if mixed else KernelListing(handle.ino, version)
        return False

    def _fresh(self, directory: Directory, horizon: float) -> int:
        """The generation of the last listing, if it is complete, not older than `horizon` and not `early`; 0 if not."""
        whole = self._freshness.whole(directory)
        return whole[0] if whole is not None and whole[1] >= horizon and not directory.listed.early else 0

    def _begin(self, directory: Directory) -> int:
        """The generation for a reader that begins now: a complete listing, or one that is then under way."""
        horizon = self._freshness.horizon(directory)
        if fresh := self._fresh(directory, horizon):
            return fresh
        if directory.listed.complete and directory.origin is not None and directory.origin.serves_stale:
            return directory.listed.complete
        if directory.origin is None or not directory.origin.can_list:
            raise Unsupported("this origin cannot be listed: open its files by their full names")
        listing = self._lister.demand(directory, horizon)
        directory.listed.early = False  # this reader reads the listing as it comes, so it is not early for it
        return listing.generation

    async def _next(self, handle: DirectoryHandle, after: bytes, limit: int) -> list[Entry]:
        """At most `limit` entries behind the mark `after`, waiting for a page if need be; none at the end."""
        directory = handle.directory
        while True:
            rows = self._tree.scan(directory, after, min(limit, CHUNK))
            waiting = handle.generation > directory.listed.complete
            listing = None
            if waiting:
                listing = self._lister.demand(directory, float("-inf"))
                self._lister.allow(directory, listing, AHEAD)
                rows = listing.passed(rows)
            entries = self._entries(handle, rows, listing)
            if entries:
                handle.places |= {row.ino: mark for mark, row in rows}
                return entries
            if rows:
                after = rows[-1][0]
            elif listing is None:
                return []
            else:
                await listing.next_page.wait()

    def _entries(
        self, handle: DirectoryHandle, rows: list[tuple[bytes, Row]], listing: Listing | None
    ) -> list[Entry]:
        """The entries for these rows. If `listing` is under way, it has decided all their names."""
        directory = handle.directory
        rows = self._tree.shown(directory, rows, handle.generation)
        if added := directory.names.added:
            rows = [one for one in rows if added.get(name_in(one[0]), 0) <= handle.version]
        if self._freshness.hidden:
            rows = [one for one in rows if not self._freshness.is_hidden(directory, name_in(one[0]))]
        now, shape, freshness = self._tree.clock(), self._shape, self._freshness
        # One listing decides all names, unless another is under way.
        same = directory.listing is listing
        cover = freshness.coverage(directory, name_in(rows[0][0])) if same and rows else None
        entries: list[Entry] = []
        for mark, row in rows:
            is_dir = mark[-1] == _SLASH
            name = mark[:-1] if is_dir else mark
            ino = row.ino
            ttl = 0.0
            if row.known and not freshness.is_doubted(ino):
                if not same:
                    cover = freshness.coverage(directory, name)
                if cover is not None and row.generation >= cover[0]:
                    ttl = max(0.0, min(cover[1] + directory.ttls.ttl - now, FOREVER))
            entries.append(Entry(name, shape(ino, is_dir, row), ino, ttl))
        return entries

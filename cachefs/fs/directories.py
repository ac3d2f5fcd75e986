"""Reading directories: streamed from the tree while the listing comes in.

A cookie is the inode number of the name it stands behind: it needs no memory, holds for every handle and after a restart,
and can be sought to. A handle that began on a complete listing reads what is there, whatever is
listed again meanwhile; one that began on a running listing gives out a name once it is decided and waits for the next page
when it has caught up. It never ends before the listing did.
"""

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
    from cachefs.fs.listing import Lister, Listing
    from cachefs.fs.rows import Row
    from cachefs.fs.tree import Tree

CHUNK = 256
"""Names read from the tree before other tasks have a turn. Measured: 0.3 ms."""

_SLASH = ord("/")

Shape = Callable[[int, bool, "Row"], Attributes]
"""(ino, is_dir, row) → attributes."""


@dataclass(slots=True, eq=False, repr=False)
class DirectoryHandle:
    """One open directory. `attributes` are those it was opened with, if they were known. `generation` is the oldest listing
    whose rows it shows, 0 until it has begun; `version` is the directory's then."""

    ino: int
    directory: Directory
    attributes: Attributes | None = None
    generation: int = 0
    version: int = 0
    renewals: int = 0
    chunk: list[Entry] = field(default_factory=list)
    places: dict[int, int] = field(
        default_factory=dict
    )  # cookie → index in the chunk of what comes behind it
    last: bytes = b""  # the mark the chunk ends with


class OpenDirectories(dict[int, DirectoryHandle]):
    """By number."""

    def __init__(self) -> None:
        self.follow(1)

    def follow(self, first: int) -> None:
        """Go on where another daemon died: handles have numbers from `first` on."""
        self._first = self._next = first

    def are_before(self, number: int) -> bool:
        """Whether another daemon has given this number, and none has gone on with it."""
        return number < self._first and number not in self

    def add(self, handle: DirectoryHandle) -> int:
        number = self._next
        self._next += 1
        self[number] = handle
        return number


class DirectoryReader:
    def __init__(self, tree: Tree, freshness: Freshness, lister: Lister, shape: Shape) -> None:
        self._tree = tree
        self._freshness = freshness
        self._lister = lister
        self._shape = shape
        self.handles = OpenDirectories()

    async def read(self, handle: DirectoryHandle, offset: int, limit: int) -> list[Entry]:
        """At most `limit` entries behind the cookie `offset` (0: from the beginning); none at the end."""
        about(handle.directory.prefix)
        if offset and handle.renewals != self._tree.renewals:
            raise OriginFailed("the names that were known are lost: the directory is to be read again")
        rest: list[Entry] = []
        if offset and (place := handle.places.get(offset)) is not None:
            if len(rest := handle.chunk[place:]) >= limit:
                return rest[:limit]
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
            handle.generation, handle.version = self._begin(directory), directory.version
            handle.renewals = self._tree.renewals
            kernel = directory.kernel
            if kernel is not None and not offset:
                if not kernel.generation:
                    kernel.generation = handle.generation
                elif kernel.generation != handle.generation:
                    directory.kernel = None
        try:
            more = await self._fill(handle, after, rest)
        except Unreachable:
            if rest:
                return rest
            if (
                after
                or not directory.listed.complete
                or directory.origin is None
                or not directory.origin.serves_stale
            ):
                raise
            handle.generation = directory.listed.complete  # nothing of the new listing was shown yet
            more = await self._fill(handle, after, rest)
        return handle.chunk[:limit] if more else rest

    def kept(self, number: int) -> bool:
        """Whether the kernel may keep the listing that it has, for the reader behind this handle; otherwise it drops it
        now. It may while the listing is complete and fresh, which is as long as the attributes of its names that it has,
        too, and no name has come or gone."""
        handle = self.handles[number]
        directory, kernel = handle.directory, handle.directory.kernel
        now = self._tree.clock()
        fresh = self._fresh(directory, self._freshness.horizon(directory, now, now))
        if (
            kernel is not None
            and (kernel.ino, kernel.version) == (handle.ino, directory.version)
            and fresh
            and kernel.generation == fresh
        ):
            return True
        # What a reader has begun before is kept by the kernel as its reading goes on.
        began = (
            other for other in self.handles.values() if other.directory is directory and other.generation
        )
        if any((other.generation, other.version) != (fresh, directory.version) for other in began):
            directory.kernel = None
        else:
            directory.kernel = KernelListing(handle.ino, directory.version)
        return False

    def _fresh(self, directory: Directory, horizon: float) -> int:
        """The generation of the last listing, if it is complete, not older than `horizon` and not `early`; 0 if not."""
        whole = self._freshness.whole(directory)
        return whole[0] if whole is not None and whole[1] >= horizon and not directory.listed.early else 0

    def _begin(self, directory: Directory) -> int:
        """The generation that a reader which begins now may use; its listing is under way if it is not complete."""
        now = self._tree.clock()
        horizon = self._freshness.horizon(directory, now, now)
        if fresh := self._fresh(directory, horizon):
            return fresh
        if directory.listed.complete and directory.origin is not None and directory.origin.serves_stale:
            return directory.listed.complete
        if directory.origin is None or not directory.origin.can_list:
            raise Unsupported("this origin cannot be listed: open its files by their full names")
        listing = self._lister.demand(directory, horizon)
        directory.listed.early = False  # a directory is read as it is listed: what came since is not missed
        return listing.generation

    async def _fill(self, handle: DirectoryHandle, after: bytes, rest: list[Entry]) -> bool:
        """Read the next chunk behind the mark `after`, and put it behind the `rest` of the last one; only where there is
        none, wait for pages. False at the end, and where it would wait."""
        directory = handle.directory
        while True:
            rows = self._tree.scan(directory, after, CHUNK)
            waiting = handle.generation > directory.listed.complete
            listing = None
            if waiting:
                listing = self._lister.demand(directory, float("-inf"))
                self._lister.allow(directory, listing, AHEAD)
                rows = listing.passed(rows)
            entries = self._entries(handle, rows, listing)
            if entries:
                handle.chunk, handle.last = rest + entries, rows[-1][0]
                handle.places = {entry.next_offset: index for index, entry in enumerate(handle.chunk, 1)}
                return True
            if rows:
                after = rows[-1][0]
            elif listing is None or rest:
                return False
            else:
                await listing.turn.wait()

    def _entries(
        self, handle: DirectoryHandle, rows: list[tuple[bytes, Row]], listing: Listing | None
    ) -> list[Entry]:
        """What is shown of these rows, all of which `listing` has decided, if it is under way."""
        directory = handle.directory
        rows = self._tree.shown(directory, rows, handle.generation)
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

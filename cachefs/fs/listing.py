"""Listing a directory, once for all callers.

Each directory has at most one listing under way. It runs in a task of its own, so the cancellation of a reader does not end
it. Each page is written to the tree; then the waiting tasks are woken, and look at the tree again. Demand decides how far a
listing goes: for a reader of the directory it stays some pages ahead; a lookup allows ten pages, and twice as many each time
that it misses. A listing without demand rests, and goes on from there later.

A generation is one listing from its first page to its last. A row has the generation of the last listing that showed it.
After the last page, rows of earlier generations have vanished at the origin; they are swept in bounded transactions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from cachefs.base.database import Put
from cachefs.base.errors import CachefsError, NotFound, OriginFailed
from cachefs.base.metrics import Metrics
from cachefs.fs.freshness import Freshness
from cachefs.fs.keys import mark_of_directory, name_in, read_page
from cachefs.fs.pages import erase, sweep, write_names
from cachefs.fs.rows import encode
from cachefs.fs.tree import Directory, Listing, PageRequest, Tree
from cachefs.origin.protocol import ListPage, ObjectInfo

if TYPE_CHECKING:
    from cachefs.fs.keys import Page
    from cachefs.fs.pages import Lost
    from cachefs.origin import Origin

log = logging.getLogger(__name__)

PAGE = 1000
"""Names of one LIST request: the most that S3 returns."""

AHEAD = 10
"""Pages that are listed ahead of demand. Guessed: a usual directory has up to 10,000 names, and is listed whole."""

FEW = 16
"""Names of a page up to which it is written without a thread. Measured: 9 µs a name; a thread takes 0.2 ms, and longer while
other threads want the interpreter."""

ChangeHook = Callable[[Directory, int, bytes], None]
"""(directory, ino, name): called when the name does not lead to this inode (0: to none) any more."""


@dataclass(eq=False, repr=False)
class Lister:
    """Runs the listings of all directories."""

    _tree: Tree
    _freshness: Freshness
    _metrics: Metrics
    _on_change: ChangeHook
    _running: dict[Listing, trio.CancelScope] = field(default_factory=dict)
    _all_done: trio.Event = field(default_factory=trio.Event)
    _closed: bool = False
    _disordered: set[str] = field(default_factory=set)  # sources that broke the order which they claim
    _tops: list[Directory] = field(default_factory=list)  # held, because `early` is not stored

    def list_tops(self, absent: Container[Origin]) -> None:
        """See `FileSystem.list_tops`."""
        self._tops = self._tree.tops()
        for top in self._tops:
            origin = top.origin
            if origin is None or origin in absent or not origin.can_list or not top.ttls.ttl:
                continue
            horizon = self._freshness.horizon(top)
            whole = self._freshness.whole(top)
            if whole is None or whole[1] < horizon:
                self.allow(top, self.demand(top, horizon), 1)
                top.listed.early = True

    def demand(self, directory: Directory, horizon: float) -> Listing:
        """The listing that is under way, or rests and is not older than `horizon`; otherwise a new one. Call `allow`
        next."""
        listing = directory.listing
        if listing is not None:
            rests = listing.requested_at >= horizon and not directory.listed.early
            if self._freshness.in_force(directory, listing.epoch) and (
                listing in self._running or not listing.pages or rests
            ):
                return listing
            self.cancel(directory)
        directory.listed.early = False
        leftovers = bool(self._tree.scan(directory, b"", 1))
        directory.listing = Listing(directory.listed.next(), self._tree.epoch, leftovers)
        return directory.listing

    def allow(self, directory: Directory, listing: Listing, pages: int) -> None:
        """Let a listing go on for so many pages from where it is, and start its task if it rests."""
        listing.allowed = max(listing.allowed, listing.pages + pages)
        if listing not in self._running and directory.listing is listing:
            if self._closed:
                raise OriginFailed("the filesystem is closing")
            self._running[listing] = trio.CancelScope()
            context = copy_context()  # the listing counts for the request that first needs it
            trio.lowlevel.spawn_system_task(
                self._run, directory, listing, name="cachefs listing", context=context
            )

    def missed(self, directory: Directory, listing: Listing) -> None:
        """Note a lookup of a name that the listing has not passed. Each allows more pages, because many lookups make the
        whole listing worth its requests."""
        self.allow(directory, listing, AHEAD << listing.misses)
        listing.misses += 1

    def cancel(self, directory: Directory) -> None:
        """Stop and forget the listing. Tasks that wait for it look at the tree again."""
        listing, directory.listing = directory.listing, None
        if listing is not None:
            if (scope := self._running.get(listing)) is not None:
                scope.cancel()
            listing.wake()

    async def is_empty(self, directory: Directory) -> None:
        """Record a directory that was just made, with a marker, as listed and empty."""
        self.cancel(directory)
        directory.marked = True
        directory.listed.ended(directory.listed.next(), self._tree.epoch, self._tree.clock())
        await self._write_state(directory)

    def tell(self, directory: Directory, name: bytes) -> None:
        """Have the kernel look a name up again."""
        self._on_change(directory, 0, name)

    async def lost(self, directory: Directory, lost: list[Lost]) -> None:
        """Tell the kernel of names whose rows were removed, and erase the directories among them."""
        for ino, mark in lost:
            self._on_change(directory, ino, name_in(mark))
        for ino, mark in lost:
            if mark.endswith(b"/"):
                await self.erase(ino)

    async def erase(self, ino: int) -> None:
        """Remove the rows of a directory that does not exist any more, and of everything below it."""
        doomed = [ino]
        while doomed:
            ino = doomed.pop()
            alive = self._tree.known(ino)
            if alive is not None:
                self.cancel(alive)
                self._tree.drop(alive)
            more: list[int] | None = []
            while more is not None:
                async with self._tree.writing:
                    more = await trio.to_thread.run_sync(erase, self._tree, ino)
                doomed += more or []

    def active(self) -> int:
        return len(self._running)

    async def aclose(self) -> None:
        self._closed = True
        for scope in self._running.values():
            scope.cancel()
        if self._running:
            await self._all_done.wait()

    async def _run(self, directory: Directory, listing: Listing) -> None:
        failure: CachefsError | None = None
        vanished = False
        with self._running[listing]:
            async with trio.open_nursery() as nursery:
                try:
                    while directory.listing is listing and listing.pages < listing.allowed:
                        vanished = await self._next_page(directory, listing, nursery)
                        listing.failures = 0
                    if vanished:
                        await self._sweep(directory, listing.generation)
                except CachefsError as exc:
                    failure = exc
                except Exception as exc:
                    log.exception("listing %s failed unexpectedly", directory.prefix)
                    failure = OriginFailed(f"listing {directory.prefix!r}: {exc}")
                nursery.cancel_scope.cancel()
        listing.requested = None
        del self._running[listing]
        if self._closed and not self._running:
            self._all_done.set()
        if failure is None and self._closed:
            failure = OriginFailed("the filesystem is closing")
        if failure is not None:
            listing.failures += 1
            listing.allowed = listing.pages
            if listing.failures > 1 and directory.listing is listing:
                directory.listing = None  # the token may be the reason, so the next demand begins again
        listing.wake(failure)

    async def _ask(self, request: PageRequest, origin: Origin, prefix: str) -> None:
        """Request a page, and end `request.page` with it. Never raises."""
        try:
            request.page.value = await origin.list_page(prefix, token=request.token, limit=PAGE)
        except Exception as exc:
            request.page.failure = exc
        finally:
            request.page.end()

    async def _next_page(self, directory: Directory, listing: Listing, nursery: trio.Nursery) -> bool:
        """Fetch and write one page. If the next one is wanted, its request is sent meanwhile. Returns True if the listing
        has ended, and rows of earlier ones must be swept."""
        origin = directory.origin
        assert origin is not None
        request, listing.requested = listing.requested, None
        if request is None:
            request = PageRequest(listing.token, self._tree.clock(), self._tree.changes)
            await self._ask(request, origin, directory.prefix)
        requested_at, changes = request.at, request.changes
        try:
            listed = await request.page.wait()
            assert listed is not None
        except NotFound as exc:
            if directory.is_top:
                raise OriginFailed(f"what is mounted is gone: {exc}") from exc
            listed = ListPage([], [], None)  # an origin with real directories answers so for an absent one
        done = listed.next_token is None
        if not done and listed.next_token == listing.token:
            raise OriginFailed(f"listing {directory.prefix!r}: the origin repeats the same page for ever")
        if not done and directory.listing is listing and listing.pages + 1 < listing.allowed:
            listing.requested = PageRequest(listed.next_token, self._tree.clock(), self._tree.changes)
            nursery.start_soon(self._ask, listing.requested, origin, directory.prefix)
        if listed.unread:
            page = await trio.to_thread.run_sync(read_page, listed, directory.prefix)
        else:
            page = read_page(listed, directory.prefix)
        self._check_order(directory, listing, page, listed)
        async with self._tree.writing:
            if directory.listing is not listing:
                return False
            if page.marker is not None:
                directory.marked = True
            extra = self._marker(directory, page)
            entries = self._to_write(directory, page, changes, first=not listing.pages)
            write = partial(
                write_names, self._tree, directory, entries, listing.generation, [*extra, directory.state()]
            )
            written = write() if len(entries) <= FEW else await trio.to_thread.run_sync(write)
            self._count_hidden(directory, listing, page, written.conflicts)
            self._freshness.note_page(written.inos, requested_at)
            if page.entries:
                self._freshness.note_below(directory)
            listing.token, listing.requested_at = listed.next_token, requested_at
            directory.listed.came = self._tree.clock()
            listing.pages += 1
            if page.last is not None:
                listing.position = max(listing.position or b"", page.last)
            current = directory.listing is listing
            if done and current:
                directory.listed.ended(listing.generation, listing.epoch, requested_at, listing.hidden)
                directory.listing = None
                if listing.position is None and not directory.is_top:
                    self._freshness.doubt(directory.ino)  # it is empty, so it may not exist any more
        await self.lost(directory, written.lost)
        if done and current:
            await self._write_state(directory)
        listing.wake()
        return done and current and listing.leftovers

    async def _write_state(self, directory: Directory) -> None:
        async with self._tree.writing:
            puts = [directory.state(), self._tree.newest(directory.listed.at)]
            self._tree.database.write(puts)

    def _check_order(self, directory: Directory, listing: Listing, page: Page, listed: ListPage) -> None:
        if not listed.ordered or (directory.origin and directory.origin.source in self._disordered):
            listing.ordered = False
        if not listing.ordered or listing.position is None or page.first is None:
            return
        if page.first < listing.position:
            # Readers may have been given entries without some names before these. Only an error tells them so.
            assert directory.origin is not None
            self._disordered.add(directory.origin.source)
            directory.listing = None
            log.warning(
                "%s lists its keys out of order: listings wait for their end", directory.origin.source
            )
            raise OriginFailed(f"listing {directory.prefix!r}: the origin does not keep the order it claims")

    def _to_write(
        self, directory: Directory, page: Page, changes: int, *, first: bool
    ) -> list[tuple[bytes, ObjectInfo | None]]:
        """The entries of a page without names that are pending or hidden here, or were changed here after the page was
        requested. The first page also gets the directories that have pending files below them."""
        pending, tree = self._freshness.pending, self._tree
        if not pending and not self._freshness.hidden and tree.changes == changes:
            return page.entries
        entries = [
            (mark, info)
            for mark, info in page.entries
            if (directory.ino, name := name_in(mark)) not in pending
            and not self._freshness.is_hidden(directory, name)
            and not tree.changed_since(directory, name, changes)
        ]
        if first:
            shown = {mark for mark, _ in entries}
            shown_too = {mark_of_directory(name) for name in self._freshness.pending.names_in(directory)}
            entries += [(mark, None) for mark in sorted(shown_too - shown)]
        return entries

    def _marker(self, directory: Directory, page: Page) -> list[Put]:
        """The change of the directory's row in its parent: it shows the marker's time, which is when it was made."""
        if page.marker is None or directory.parent is None:
            return []
        row = self._tree.row(directory.parent, directory.mark)
        if row is None or row.mtime_ns == page.marker.mtime_ns:
            return []
        changed = encode(row._replace(mtime_ns=page.marker.mtime_ns))
        return [("names", directory.parent.key + directory.mark, changed)]

    def _count_hidden(self, directory: Directory, listing: Listing, page: Page, conflicts: int) -> None:
        count = len(page.hidden) + conflicts
        if not count:
            return
        known = max(directory.listed.hidden, listing.hidden)
        listing.hidden += count
        self._metrics.hidden_names += max(0, listing.hidden - known)
        if not directory.warned:
            directory.warned = True
            example = page.hidden[0] if page.hidden else "a file with the name of a directory"
            log.warning(
                "keys below %r that no path can name are hidden, such as %r", directory.prefix, example
            )

    async def _sweep(self, directory: Directory, generation: int) -> None:
        """Remove the rows that the complete listing `generation` did not show, and everything below them."""
        after: bytes | None = b""
        while after is not None and directory.listed.complete == generation:
            async with self._tree.writing:
                after, removed = await trio.to_thread.run_sync(
                    sweep,
                    self._tree,
                    directory,
                    generation,
                    after,
                    self._freshness.pending.names_in(directory),
                )
            await self.lost(directory, removed)

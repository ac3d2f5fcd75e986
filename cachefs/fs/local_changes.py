"""Changes made on this node that the origin does not show yet: files that are being written, and names that were changed.

A *node* (`cachefs.fs.files.Node`) is one file that a process has open for writing, or whose dirty file was not uploaded
yet. It is *pending* from its first change until its content is uploaded and no process has it open for writing. While a node
is pending, its name shows the dirty file, whatever a listing says. The inode stays the same, and the version is
`DIRTY_FILE_ETAG` with the dirty file's id. Listings and lookups never write pending rows, so this module may write them
without the lock of the tree.

A change made at the origin is recorded here as an answer of the origin would be (`write`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from cachefs.base.errors import CachefsError, ObjectChanged
from cachefs.base.names import ObjectId
from cachefs.fs.files import DIRTY_FILE, Node
from cachefs.fs.inodes import inode_key
from cachefs.fs.keys import mark_of_directory
from cachefs.fs.name_locks import Place
from cachefs.fs.pages import Lost, move, pin, write_answer
from cachefs.fs.rows import NO_ROW, Row, encode
from cachefs.fs.tree import Directory, Tree, is_below, named
from cachefs.origin.protocol import ObjectInfo

if TYPE_CHECKING:
    from cachefs.base.shared_memory import Times
    from cachefs.fs.files import FileHandle, OpenFiles
    from cachefs.fs.freshness import Freshness, PendingNames
    from cachefs.fs.listing import Lister
    from cachefs.fs.overrides import Overrides
    from cachefs.origin import Origin
    from cachefs.upload import DirtyFile, StoredFile, Uploads


DIRTY_FILE_ETAG = "draft "
"""The beginning of a dirty file's version, which stands in place of an etag. No origin has such etags."""


@dataclass(eq=False, repr=False)
class LocalChanges:
    """The nodes, and the changes of names. `times` are the modification times of directories that were changed here."""

    _tree: Tree
    _freshness: Freshness
    _lister: Lister
    _files: OpenFiles
    _overrides: Overrides
    _writer: Uploads
    _wall: Callable[[], float]
    times: Times
    nodes: dict[int, Node] = field(default_factory=dict)  # the open ones, by inode
    _places: dict[tuple[int, bytes], Node] = field(default_factory=dict)  # those with a name, pending or open
    _by_dirty_file: dict[str, Node] = field(default_factory=dict)
    _to_erase: list[int] = field(default_factory=list)  # directories that have lost their names

    @property
    def pending(self) -> PendingNames:
        return self._freshness.pending

    def at(self, directory: Directory, name: bytes) -> Node | None:
        """The node of a name, pending or only open; None if the name has none."""
        return self._places.get((directory.ino, name))

    def named(self, node: Node) -> bool:
        """True if a name shows the node. During its removal the name still does."""
        return not node.removed or self.at(node.directory, node.name) is node

    def of_row(self, row: Row) -> Node:
        """The node that a pending row belongs to."""
        return self._by_dirty_file[row.etag.removeprefix(DIRTY_FILE_ETAG)]

    def of_dirty_file(self, dirty_file: DirtyFile) -> Node | None:
        return self._by_dirty_file.get(dirty_file.id)

    def below(self, directory: Directory) -> list[Node]:
        """The nodes in a directory and in those below it."""
        return [node for node in self._places.values() if is_below(node.directory, directory)]

    # -- the life of a node ------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """Enter a node that is open or pending under its name and, if it is open, under its inode."""
        self._places[node.directory.ino, node.name] = node
        if self._files.is_open(node.ino):
            self.nodes[node.ino] = node

    def give(self, node: Node, dirty_file: DirtyFile) -> None:
        """Give a node its dirty file. The two share one dict of attributes from then on."""
        node.dirty_file, node.attrs, node.settled = dirty_file, dirty_file.attrs, False
        self._by_dirty_file[dirty_file.id] = node
        if not node.removed:
            self.add(node)

    def give_open(self, node: Node, dirty_file: DirtyFile) -> None:
        """Give a node its dirty file, and attach all handles of its inode to it."""
        self.give(node, dirty_file)
        for handle in self._files.under(node.ino):
            self.attach(handle, node)
        self._writer.outlive(dirty_file, node.ino, named=not node.removed)

    def nameless(self, ino: int, origin: Origin, key: str) -> Node:
        """Make a node for a file that is open and has lost its name, which was that of `key`."""
        top = next(top for top in self._tree.tops() if top.origin is origin)
        node = Node(top, key[len(top.prefix) :].encode(), ino, stored=False)
        node.removed = True
        return node

    async def leave_to_readers(self, directory: Directory, name: bytes, ino: int) -> None:
        """Give a name a new inode with the same content, and leave the old inode to its readers. This is done for a writer
        when the readers have a cache file in passthrough that other users, such as peers, still hold."""
        async with self.applying():
            row = self._tree.row(directory, name)
            if row is None or row.ino != ino:
                return
            new = row._replace(ino=self._tree.numbers.next())
            self._tree.database.write([*named(directory, name, new), ("inodes", inode_key(ino), None)])
            self._files.lose_name(ino)
            self._files.withhold(new.ino)
            self._overrides.put(new.ino, self._overrides.get(ino))
            self._overrides.put(ino, {})
            self._freshness.note_answer(directory, name, new.ino, self._tree.clock())
            self._files.forget_warm()

    async def hold(self, node: Node) -> None:
        """Make a node pending: its name shows its dirty file, and all its handles read it. Raises `ObjectChanged` if another
        client has removed its directory."""
        async with self.applying():
            if self._tree.known(node.directory.ino) is not node.directory:
                raise ObjectChanged(f"{node.directory.prefix} was removed")
            for handle in self._files.under(node.ino):  # first, because it may fail
                self.attach(handle, node)
            self._hold(node)
            self._files.nameless.pop(node.ino, None)  # a listing may have just shown another client's version
            assert node.dirty_file is not None
            self._files.switch(node.ino, self.version(node), node.dirty_file.mtime_ns)

    def hold_new(self, node: Node) -> None:
        """`hold` for a new node, which has no handles, in a directory that is in use, while no other task holds the lock of
        the tree. Its name must have no row."""
        with self._tree.database.together():
            self._hold(node, is_new=True)

    def _hold(self, node: Node, *, is_new: bool = False) -> None:
        dirty_file = node.dirty_file
        assert dirty_file is not None
        node.ino = node.ino or self._tree.numbers.next()
        # Before the row: if a kill came in between, the file would get another inode, and lose its attributes.
        self._writer.outlive(dirty_file, node.ino, named=True)
        etag = DIRTY_FILE_ETAG + dirty_file.id
        node.row, lost = pin(
            self._tree, node.directory, node.name, dirty_file.mtime_ns, etag, node.ino, is_new=is_new
        )
        self._lose(lost)
        self._make_pending(node)
        self._files.forget_warm()

    def _make_pending(self, node: Node) -> None:
        node.pending = True
        self.pending.hold(node)
        self.add(node)
        self._tree.note_change(node.directory, node.name)
        if not node.stored:
            self.touch(node.directory)

    def version(self, node: Node) -> ObjectId:
        """The version that a node's handles have: the dirty file while it is pending, then the uploaded object."""
        info = None if node.pending or node.dirty_file is None else node.dirty_file.committed
        etag, size = (node.row.etag, 0) if info is None else (info.etag, info.size)
        return ObjectId(node.origin.source, node.key, etag, size)

    def current(self, directory: Directory, name: bytes, version: ObjectId) -> Node | None:
        """The node whose dirty file has this version of a name; None if there is none, or the cache has adopted it."""
        node = self.at(directory, name)
        return node if node is not None and not node.settled and self.version(node) == version else None

    def attach(self, handle: FileHandle, node: Node) -> None:
        """Make a handle read the node's dirty file. If this raises, the handle is unchanged. Only the first handle of a
        dirty file can fail, because the others share its descriptor."""
        assert node.dirty_file is not None
        if handle.size != DIRTY_FILE:
            self._writer.open(node.dirty_file)
            handle.size = DIRTY_FILE
        self.nodes[node.ino] = handle.node = node

    def committed(self, dirty_file: DirtyFile, info: ObjectInfo) -> None:
        """Note that a dirty file was uploaded as `info`. While a process has it open for writing, it stays pending."""
        node = self._by_dirty_file.get(dirty_file.id)
        if node is not None:
            node.stored = True
            if not node.removed:
                self._settle(node)

    def settling(self, dirty_file: DirtyFile) -> bool:
        """Settle an uploaded file. False if a name still shows the dirty file, as during a rename or a removal, or is about
        to show it: then it must stay."""
        node = self._by_dirty_file.get(dirty_file.id)
        if node is None or not self.named(node):
            return True
        if node.removed:
            return False  # the removal may fail
        if not node.pending:
            # Its first change may be under way, while another handle has committed it.
            return not node.lock.locked()
        self._settle(node)
        return not node.pending

    def settled(self, dirty_file: DirtyFile) -> None:
        """Note that a dirty file must not be opened any more."""
        node = self._by_dirty_file.pop(dirty_file.id, None)
        if node is not None:
            node.settled = True
            self._forget(node)

    def leave(self, handle: FileHandle, node: Node) -> None:
        """Note that a handle of a node was closed."""
        if not self._files.is_open(node.ino) and self.nodes.get(node.ino) is node:
            del self.nodes[node.ino]
        if not node.removed:
            self._settle(node)
        if handle.size == DIRTY_FILE and node.dirty_file is not None:
            self._writer.release(node.dirty_file)
        self._forget(node)

    def _settle(self, node: Node) -> None:
        """End the pending state if the content is uploaded and no process writes: the name shows the uploaded object."""
        dirty_file = node.dirty_file
        if (
            not node.pending
            or node.writers
            or dirty_file is None
            or dirty_file.dirty
            or dirty_file.committed is None
            or node.moving
        ):
            return
        info = dirty_file.committed
        new = Row(node.directory.listed.generation, info.mtime_ns, info.size, info.etag, node.ino)
        key = node.directory.key + node.name
        with self._tree.database.together():
            # With the state of the directory: after a kill, no row may have a generation that the next listing gets.
            self._tree.database.write(
                [("names", key, encode(new)), ("local", key, None), node.directory.state()]
            )
            self._overrides.put(node.ino, node.attrs)
        self._let_go(node)
        self._freshness.note_answer(node.directory, node.name, node.ino, self._tree.clock())
        self._files.switch(node.ino, self.version(node), info.mtime_ns)
        self._forget(node)

    def settled_before(self, directory: Directory, name: bytes, file: StoredFile) -> None:
        """Do what `_settle` does, for a file whose daemon died before it had: its name keeps the inode, and the inode its
        attributes."""
        row = self._tree.row(directory, name)
        if row is not None and (row.etag, row.ino) == (DIRTY_FILE_ETAG + file.id, file.ino):
            new = row._replace(mtime_ns=file.info.mtime_ns, size=file.info.size, etag=file.info.etag)
            with self._tree.database.together():
                self._tree.database.write([("names", directory.key + name, encode(new))])
                self._overrides.put(file.ino, file.attrs)

    @contextmanager
    def moving(self, node: Node) -> Iterator[None]:
        """Mark a node as being renamed. If its upload ends meanwhile, the node settles when the rename is over."""
        node.moving = True
        try:
            yield
        finally:
            node.moving = False
            if not node.removed:
                self._settle(node)
            self._forget(node)

    def _let_go(self, node: Node) -> None:
        """End the pending state of a node."""
        node.pending = False
        self.pending.let_go(node)
        self._tree.note_change(node.directory, node.name)

    def _forget(self, node: Node) -> None:
        """Drop a node that is neither pending nor open, nor has an unsettled dirty file."""
        if node.settled and not node.moving:
            node.dirty_file = None  # a handle that reads the stored version may keep the node
        if node.pending or not (node.settled or node.removed) or node.ino in self.nodes:
            return
        if node.removed and self.named(node):
            return  # the removal is under way, and opens of the name wait for its end
        if self._places.get((node.directory.ino, node.name)) is node:
            del self._places[node.directory.ino, node.name]
        if node.dirty_file is not None:
            self._by_dirty_file.pop(node.dirty_file.id, None)

    async def remove(
        self, node: Node, *, replaced: bool, instead: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Take a node's name away, by awaiting `instead`, which changes the origin. Nothing of the node is uploaded any
        more, and its open handles keep the dirty file. The row of the name stays until the caller writes another one. If
        `instead` raises, the node is unchanged."""
        node.removed = True
        ctime_ns = self.now_ns()
        try:
            if node.dirty_file is not None:
                await self._writer.discard(node.dirty_file, replaced=replaced, instead=instead)
            elif instead is not None:
                await instead()
            node.attrs["ctime_ns"] = ctime_ns
        except BaseException:
            if node.dirty_file is None or not node.dirty_file.discarded:
                node.removed = False
                if node.dirty_file is not None and node.dirty_file.dirty and not node.pending:
                    with suppress(ObjectChanged):
                        await self.hold(node)  # it is sent once more
                self._forget(node)
            else:  # its upload was given up already, so the origin has to be asked what is there
                await self.write(node.directory, node.name, False)
                self.look_again((node.directory, node.name))
            raise

    async def abandon(self, node: Node) -> None:
        """Undo the first change of a node, which has failed: discard its dirty file."""
        dirty_file = node.dirty_file
        assert dirty_file is not None
        del self._by_dirty_file[dirty_file.id]
        node.settled = True
        self._forget(node)
        with trio.CancelScope(shield=True):
            await self._writer.discard(dirty_file, replaced=True)

    async def take_back(self, node: Node) -> None:
        """Undo a create that has failed: remove the node and its name. Nothing of it is uploaded."""
        with trio.CancelScope(shield=True), suppress(CachefsError):
            async with node.lock:
                await self.remove(node, replaced=True)
            await self.write(node.directory, node.name, False)

    def moves(self, place: Place, to: Place, row: Row, left: bytes | None = None) -> None:
        """Move a file to another name with the row `row`. `left` tells the next daemon what to delete under the old name
        (`Tree.left`), if this one dies before it has. The caller is `applying`."""
        node = self._places.get((place[0].ino, place[1]))
        if node is not None and node.ino != row.ino:
            node = None  # it belongs to an inode that has lost this name
        pending = node is not None and node.pending
        if node is not None:
            del self._places[place[0].ino, place[1]]
            if pending:
                node.row = row
                self._let_go(node)
        also = [
            ("local", to[0].key + to[1], b"" if pending else None),
            ("local", place[0].key + place[1], left),
        ]
        lost = move(self._tree, place, to, row, also)
        self._files.nameless.pop(row.ino, None)
        self._give_up(*to)
        if node is not None:
            node.directory, node.name = to
            self.add(node)
            if pending:
                self._make_pending(node)
        self._moved(place, to, row, lost)

    def directory_moves(self, place: Place, to: Place, directory: Directory) -> None:
        """Move a directory, with its contents, to another name. The caller is `applying`."""
        mark, new = mark_of_directory(place[1]), mark_of_directory(to[1])
        row = self._tree.row(place[0], mark)
        if row is None or row.ino != directory.ino:
            # Another client has removed it meanwhile, and its rows are erased.
            row = NO_ROW._replace(ino=directory.ino)
            directory.listed.complete = 0
        row = row._replace(generation=to[0].listed.generation)
        lost = move(self._tree, (place[0], mark), (to[0], new), row)
        for moved in self._tree.replace(directory, to[0], new):
            self._lister.cancel(moved)
        self._tree.database.write([directory.state()])
        self._give_up(*to)
        self._moved(place, to, row, lost)

    def _moved(self, place: Place, to: Place, row: Row, lost: list[Lost]) -> None:
        self._lose(lost)
        for directory, name in (place, to):
            self._tree.note_change(directory, name)
            self.touch(directory)
        now = self._tree.clock()
        self._freshness.note_answer(*place, None, now)
        self._freshness.note_answer(*to, row.ino, now)
        self._files.forget_warm()

    def _lose(self, lost: list[Lost]) -> None:
        """Note inodes that have no name any more. The caller is `applying`, whose end erases the directories among them."""
        for ino, mark in lost:
            self._files.lose_name(ino, removed=True)
            self._overrides.put(ino, {})
            if mark.endswith(b"/"):
                self._to_erase.append(ino)

    def now_ns(self) -> int:
        """The time for a change that is made now, in nanoseconds since the epoch."""
        return round(self._wall() * 1e9)

    def touch(self, directory: Directory) -> None:
        """Set a directory's modification time to now: programs see by it that they must read the directory again."""
        self.times.put(directory.ino, self.now_ns())

    def doubt(self, ino: int, directory: Directory, name: bytes) -> None:
        """Have the next lookup of a name ask the origin, because its inode may be gone there."""
        self._files.forget_warm()
        self._freshness.doubt(ino)
        self._lister.tell(directory, name)

    def look_again(self, *places: Place) -> None:
        """Have names whose change failed asked for again: doubt their directories' listings, drop the kernel's entries."""
        self._freshness.forget_answers()
        for directory, name in places:
            self._lister.cancel(directory)
            directory.listed.doubtful, directory.marked = True, False
            self._lister.tell(directory, name)

    def _give_up(self, directory: Directory, name: bytes) -> None:
        """Take a name away from the removed node that had it, if there is one."""
        node = self._places.get((directory.ino, name))
        if node is not None and node.removed:
            if node.pending:
                self._let_go(node)
            del self._places[directory.ino, name]
            self._forget(node)

    # -- what was done at the origin ------------------------------------------------------------------

    async def write(self, directory: Directory, name: bytes, answer: ObjectInfo | bool) -> int:
        """Record what the origin has under a name now: an object, a directory (True) or nothing (False). Returns the inode,
        0 for nothing."""
        async with self.applying():
            return self.written(directory, name, answer)

    @asynccontextmanager
    async def applying(self) -> AsyncIterator[None]:
        """Hold the lock of the tree for changes of several rows, which are one step for readers of names, and for the next
        daemon after a kill. The block must not await, nor write in a thread. At the end, directories that have lost their
        names are erased."""
        writing = self._tree.writing
        # Shielded, because the change is made. Without a scope if there is no wait, because it costs as much as the change.
        if writing.free:
            writing.acquire_nowait()
        else:
            with trio.CancelScope(shield=True):
                await writing.acquire()
        try:
            with self._tree.database.together():
                yield
        finally:
            writing.release()
        if self._to_erase:
            with trio.CancelScope(shield=True):
                while self._to_erase:
                    await self._lister.erase(self._to_erase.pop())

    def written(self, directory: Directory, name: bytes, answer: ObjectInfo | bool) -> int:
        """`write` for a caller that is `applying`."""
        also = [("local", directory.key + name, None)]
        written = write_answer(self._tree, directory, name, answer, directory.listed.generation, also)
        self._tree.note_change(directory, name)
        self._give_up(directory, name)
        self.touch(directory)
        self._files.forget_warm()
        self._lose(written.lost)
        ino = written.inos[0] if written.inos else None
        self._freshness.note_answer(directory, name, ino, self._tree.clock())
        return ino or 0

    def directory(self, above: Directory, name: bytes) -> Directory:
        """The directory of this name. If the tree has none, it is recorded first. The caller is `applying`."""
        row = self._tree.row(above, mark_of_directory(name))
        return self._tree.directory(self.written(above, name, True) if row is None else row.ino)

    # -- names that are hidden ---------------------------------------------------------------------

    def hide(self, directory: Directory, name: bytes) -> None:
        """Show a name (`EVERY_NAME`: all names of the directory) as missing until `unhide`, whatever the origin has."""
        self._freshness.hidden.add((directory.ino, name))
        self._tree.note_change(directory, name)

    def unhide(self, directory: Directory, name: bytes) -> None:
        self._freshness.hidden.discard((directory.ino, name))
        self._tree.note_change(directory, name)  # answers to earlier requests must not be used

"""What this node knows better than the store: files that are being written here, and names that were changed here.

A *node* is one file that a process has open for writing, or whose dirty file the store does not have yet. It is *held* from
its first change until the origin has it and no process writes it any more: its name shows the dirty file then, whatever a
listing says, as the inode that it was, and in one version of its own, which handles take for an etag. Held rows belong to
the local changes: pages and answers leave them alone, so they may be written without the lock of the tree.

What is done at the store is written down here as an answer of the store would be (`write`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from cachefs.base.errors import CachefsError, ObjectChanged
from cachefs.base.names import ObjectId
from cachefs.fs.files import DIRTY_FILE
from cachefs.fs.inodes import inode_key
from cachefs.fs.keys import mark_of_directory
from cachefs.fs.pages import Lost, move, pin, write_answer
from cachefs.fs.rows import NO_ROW, Row, encode
from cachefs.fs.tree import Directory, Found, Tree, is_below, named
from cachefs.origin.protocol import ObjectInfo

if TYPE_CHECKING:
    from cachefs.base.shared_memory import Times
    from cachefs.fs.files import FileHandle, OpenFiles
    from cachefs.fs.freshness import Freshness, HeldNames
    from cachefs.fs.listing import Lister
    from cachefs.fs.overrides import Overrides
    from cachefs.origin import Origin
    from cachefs.upload import DirtyFile, Uploads


DIRTY_FILE_ETAG = "draft "
"""What the version of a dirty file begins with, in place of an etag; no store's etag is like that."""


Place = tuple[Directory, bytes]
"""The directory and the name of a file."""


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """`ino` is its inode, 0 until it has one. `stored` says that the store may have an object of its name. A node that was
    `removed` has no name any more, only handles; one that is `moving` is about to get another. `settled` says that its
    dirty file is not to be opened any more: the cache has its content, or only the store. `clears`: a process that may
    not keep set-uid and set-gid bits may write it unseen."""

    directory: Directory
    name: bytes
    ino: int
    stored: bool
    dirty_file: DirtyFile | None = None
    row: Row = NO_ROW
    held: bool = False
    removed: bool = False
    settled: bool = True
    moving: bool = False
    clears: bool = False
    writers: int = 0
    attrs: dict[str, Any] = field(default_factory=dict)
    lock: trio.Lock = field(default_factory=trio.Lock)

    @property
    def origin(self) -> Origin:
        assert self.directory.origin is not None
        return self.directory.origin

    @property
    def key(self) -> str:
        return self.directory.prefix + self.name.decode()

    def found(self, now: float) -> Found:
        return Found(self.ino, False, self.row, now)


@dataclass(eq=False, repr=False)
class LocalChanges:
    """`times` are of directories in which something was changed here."""

    _tree: Tree
    _freshness: Freshness
    _lister: Lister
    _files: OpenFiles
    _kept: Overrides
    _writer: Uploads
    _wall: Callable[[], float]
    times: Times
    nodes: dict[int, Node] = field(default_factory=dict)  # by number: those that are open
    _places: dict[tuple[int, bytes], Node] = field(default_factory=dict)  # that have a name, held or open
    _by_dirty_file: dict[str, Node] = field(default_factory=dict)
    _doomed: list[int] = field(default_factory=list)  # directories that have lost their names

    @property
    def held(self) -> HeldNames:
        return self._freshness.held

    def at(self, directory: Directory, name: bytes) -> Node | None:
        """The node of a name, held or only open."""
        return self._places.get((directory.ino, name))

    def named(self, node: Node) -> bool:
        """Whether a name shows it, perhaps until its removal is done."""
        return not node.removed or self.at(node.directory, node.name) is node

    def of_row(self, row: Row) -> Node:
        """The node that a held row belongs to."""
        return self._by_dirty_file[row.etag.removeprefix(DIRTY_FILE_ETAG)]

    def of_dirty_file(self, dirty_file: DirtyFile) -> Node | None:
        return self._by_dirty_file.get(dirty_file.id)

    def below(self, directory: Directory) -> list[Node]:
        """The nodes in a directory and in those below it."""
        return [node for node in self._places.values() if is_below(node.directory, directory)]

    # -- the life of a node ------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """It is open, or held."""
        self._places[node.directory.ino, node.name] = node
        if self._files.held(node.ino):
            self.nodes[node.ino] = node

    def give(self, node: Node, dirty_file: DirtyFile) -> None:
        node.dirty_file, node.attrs, node.settled = dirty_file, dirty_file.attrs, False
        self._by_dirty_file[dirty_file.id] = node
        if not node.removed:
            self.add(node)

    def give_nameless(self, node: Node, dirty_file: DirtyFile) -> None:
        """The same for a node that was removed: all handles under its number read and write the dirty file."""
        self.give(node, dirty_file)
        for handle in self._files.under(node.ino):
            self.attach(handle, node)
        self._writer.outlive(dirty_file, node.ino, named=False)

    def nameless(self, handle: FileHandle, attrs: dict[str, Any]) -> Node:
        """A node for a file that is open and has lost its name."""
        node = self._nameless(handle.ino, handle.origin, handle.object.key)
        node.attrs = attrs
        self.nodes[node.ino] = node
        return node

    def resumed_nameless(self, dirty_file: DirtyFile) -> Node:
        """The same, of a file that handles of the daemon before have open."""
        node = self._nameless(dirty_file.ino, dirty_file.origin, dirty_file.key)
        self.give_nameless(node, dirty_file)
        return node

    def _nameless(self, ino: int, origin: Origin, key: str) -> Node:
        top = next(top for top in self._tree.tops() if top.origin is origin)
        node = Node(top, key[len(top.prefix) :].encode(), ino, stored=False)
        node.removed = True
        return node

    def info(self, directory: Directory, name: bytes, obj: ObjectId) -> ObjectInfo:
        """The store's object that is at a name, as it is known here."""
        row = self._tree.row(directory, name)
        return ObjectInfo(obj.key, obj.size, row.mtime_ns if row is not None else 0, obj.etag)

    def place_of(self, ino: int) -> Place:
        """Where an inode that is a file is. Raises `ObjectChanged`."""
        directory, mark = self._tree.locate(ino)
        row = self._tree.row(directory, mark)
        if row is None or row.ino != ino or mark.endswith(b"/"):
            raise ObjectChanged(f"no name leads to inode {ino}")
        return directory, mark

    def inode_of(self, dirty_file: DirtyFile, directory: Directory, name: bytes) -> int:
        """The inode of a dirty file that comes back at a name: its own, or the one that is written down there; 0 where there
        is none."""
        if not (ino := dirty_file.ino):
            row = self._tree.row(directory, name)
            return 0 if row is None else row.ino
        with suppress(ObjectChanged):
            above, mark = self.place_of(ino)
            if (above, mark) != (directory, name):  # the daemon before has died in a rename
                self._tree.database.write([("names", above.key + mark, None)])
        return ino

    async def leave_to_readers(self, directory: Directory, name: bytes, ino: int) -> None:
        """The readers of an inode keep it, and its name leads to another one with the same content: a process wants to write
        it, and others use the file of the cache, too, that those readers have in passthrough."""
        async with self.applying():
            row = self._tree.row(directory, name)
            if row is None or row.ino != ino:
                return
            new = row._replace(ino=self._tree.numbers.next())
            self._tree.database.write([*named(directory, name, new), ("inodes", inode_key(ino), None)])
            self._files.lose_name(ino)
            self._files.withhold(new.ino)
            self._kept.put(new.ino, self._kept.get(ino))
            self._kept.put(ino, {})
            self._freshness.note_answer(directory, name, new.ino, self._tree.clock())
            self._files.forget_warm()

    def share(self, node: Node, dirty_file: DirtyFile, handles: list[FileHandle]) -> None:
        """What its readers have in passthrough is the dirty file from now on, under the same number."""
        if node.removed:
            self.give_nameless(node, dirty_file)
        else:
            self.give(node, dirty_file)
        for handle in handles:
            self.attach(handle, node)
            handle.backing = dirty_file.backing
        if not node.removed:
            self._writer.outlive(dirty_file, node.ino, named=True)
        self._files.forget_warm()

    async def hold(self, node: Node) -> None:
        """From now on its name shows its dirty file, and all its handles read that. Raises `ObjectChanged` where another
        client has removed its directory."""
        assert node.dirty_file is not None
        async with self.applying():
            if self._tree.known(node.directory.ino) is not node.directory:
                raise ObjectChanged(f"{node.directory.prefix} was removed")
            for handle in self._files.under(node.ino):  # first: it may fail, and then nothing has changed
                self.attach(handle, node)
            etag, mtime_ns = DIRTY_FILE_ETAG + node.dirty_file.id, node.dirty_file.mtime_ns
            node.row, lost = pin(self._tree, node.directory, node.name, mtime_ns, etag, node.ino)
            node.ino = node.row.ino
            self._lose(lost)
            self._files.nameless.pop(node.ino, None)  # another client's version may just have come
            self._held(node)
            self._files.forget_warm()
            self._files.turn(node.ino, self.version(node), node.dirty_file.mtime_ns)
            self._writer.outlive(node.dirty_file, node.ino, named=True)

    def _held(self, node: Node) -> None:
        node.held = True
        self.held.hold(node)
        self.add(node)
        self._tree.note_change(node.directory, node.name)
        if not node.stored:
            self.touch(node.directory)

    def version(self, node: Node) -> ObjectId:
        """What its handles are of: the dirty file while it is held, then what the store made of it."""
        info = None if node.held or node.dirty_file is None else node.dirty_file.committed
        etag, size = (node.row.etag, 0) if info is None else (info.etag, info.size)
        return ObjectId(node.origin.source, node.key, etag, size)

    def fresh(self, directory: Directory, name: bytes, row: Row) -> Node | None:
        """Where to read a version that the store has just got, as long as the cache does not have it."""
        node = self.at(directory, name)
        if (
            node is None
            or node.settled
            or node.dirty_file is None
            or (info := node.dirty_file.committed) is None
        ):
            return None
        return node if (info.etag, info.size) == (row.etag, row.size) else None

    def current(self, directory: Directory, name: bytes, version: ObjectId) -> Node | None:
        """The node whose dirty file has this version of a name."""
        node = self.at(directory, name)
        return node if node is not None and not node.settled and self.version(node) == version else None

    def attach(self, handle: FileHandle, node: Node) -> None:
        """A handle reads the dirty file from now on; when this raises, it does not. Only the first of a dirty file raises:
        the others share its descriptor."""
        assert node.dirty_file is not None
        if handle.size != DIRTY_FILE:
            self._writer.open(node.dirty_file)
            handle.size = DIRTY_FILE
        self.nodes[node.ino] = handle.node = node

    def committed(self, dirty_file: DirtyFile, info: ObjectInfo) -> None:
        """The store has it. Its name stays held while a process writes, which may change it again."""
        node = self._by_dirty_file.get(dirty_file.id)
        if node is not None:
            node.stored = True
            if not node.removed:
                self._settle(node)

    def settling(self, dirty_file: DirtyFile) -> bool:
        """False while a name still shows the dirty file, for it is being renamed."""
        node = self._by_dirty_file.get(dirty_file.id)
        if node is None or node.removed or not node.held:
            return True
        self._settle(node)
        return not node.held

    def settled(self, dirty_file: DirtyFile) -> None:
        """It is not to be opened any more."""
        node = self._by_dirty_file.pop(dirty_file.id, None)
        if node is not None:
            node.settled = True
            self._forget(node)

    def leave(self, handle: FileHandle, node: Node) -> None:
        """One of its handles was closed."""
        if not self._files.held(node.ino) and self.nodes.get(node.ino) is node:
            del self.nodes[node.ino]
        if not node.removed:
            self._settle(node)
        if handle.size == DIRTY_FILE and node.dirty_file is not None:
            self._writer.release(node.dirty_file)
        self._forget(node)

    def _settle(self, node: Node) -> None:
        dirty_file = node.dirty_file
        if (
            not node.held
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
        self._tree.database.write([("names", key, encode(new)), ("local", key, None)])
        self._kept.put(node.ino, node.attrs)
        self._let_go(node)
        self._freshness.note_answer(node.directory, node.name, node.ino, self._tree.clock())
        self._files.turn(node.ino, self.version(node), info.mtime_ns)
        self._forget(node)

    @contextmanager
    def moving(self, node: Node) -> Iterator[None]:
        """Its name changes meanwhile. What the store gets meanwhile is written down at the end."""
        node.moving = True
        try:
            yield
        finally:
            node.moving = False
            if not node.removed:
                self._settle(node)
            self._forget(node)

    def _let_go(self, node: Node) -> None:
        node.held = False
        self.held.let_go(node)
        self._tree.note_change(node.directory, node.name)

    def _forget(self, node: Node) -> None:
        """Drop it if it is not needed any more."""
        if node.settled and not node.moving:
            node.dirty_file = None  # a handle that reads the stored version may keep the node
        if node.held or not (node.settled or node.removed) or node.ino in self.nodes:
            return
        if node.removed and self.named(node):
            return  # its name goes, or stays: opens wait for that
        if self._places.get((node.directory.ino, node.name)) is node:
            del self._places[node.directory.ino, node.name]
        if node.dirty_file is not None:
            self._by_dirty_file.pop(node.dirty_file.id, None)

    async def remove(
        self, node: Node, *, replaced: bool, instead: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Its name goes, by what is done `instead` at the origin: nothing of it is uploaded, and processes that have it
        open go on with it alone. The name itself is there until another answer is written. When `instead` raises, nothing
        has happened."""
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
                self._forget(node)
            else:  # it is given up already: the store says what is there
                await self.write(node.directory, node.name, False)
                self.look_again((node.directory, node.name))
            raise

    async def abandon(self, node: Node) -> None:
        """Its first change has failed: it is as if its dirty file had never been."""
        dirty_file = node.dirty_file
        assert dirty_file is not None
        del self._by_dirty_file[dirty_file.id]
        node.settled = True
        self._forget(node)
        with trio.CancelScope(shield=True):
            await self._writer.discard(dirty_file, replaced=True)

    async def take_back(self, node: Node) -> None:
        """What creates it has failed: its name goes, and nothing of it is uploaded."""
        with trio.CancelScope(shield=True), suppress(CachefsError):
            async with node.lock:
                await self.remove(node, replaced=True)
            await self.write(node.directory, node.name, False)

    def moves(self, place: Place, to: Place, row: Row) -> None:
        """A file has another name, where `row` is what is known of it; while `applying`."""
        node = self._places.get((place[0].ino, place[1]))
        if node is not None and node.ino != row.ino:
            node = None  # of an inode that has lost this name
        held = node is not None and node.held
        if node is not None:
            del self._places[place[0].ino, place[1]]
            if held:
                node.row = row
                self._let_go(node)
        also = [("local", to[0].key + to[1], b"" if held else None), ("local", place[0].key + place[1], None)]
        lost = move(self._tree, place, to, row, also)
        self._files.nameless.pop(row.ino, None)
        self._give_up(*to)
        if node is not None:
            node.directory, node.name = to
            self.add(node)
            if held:
                self._held(node)
        self._moved(place, to, row, lost)

    def directory_moves(self, place: Place, to: Place, directory: Directory) -> None:
        """A directory, with what is in it, has another name; while `applying`."""
        mark, new = mark_of_directory(place[1]), mark_of_directory(to[1])
        row = self._tree.row(place[0], mark)
        if row is None or row.ino != directory.ino:  # another client has removed it meanwhile
            row = NO_ROW._replace(ino=directory.ino)
        row = row._replace(generation=to[0].listed.generation)
        lost = move(self._tree, (place[0], mark), (to[0], new), row)
        for one in self._tree.replace(directory, to[0], new):
            self._lister.cancel(one)
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
        """These have no name any more; while `applying`."""
        for ino, mark in lost:
            self._files.lose_name(ino, removed=True)
            self._kept.put(ino, {})
            if mark.endswith(b"/"):
                self._doomed.append(ino)

    def now_ns(self) -> int:
        """The time that a change shows."""
        return round(self._wall() * 1e9)

    def touch(self, directory: Directory) -> None:
        """Something in it has changed: programs look at its time to know whether to read it again."""
        self.times.put(directory.ino, self.now_ns())

    def doubt(self, ino: int, directory: Directory, name: bytes) -> None:
        """The inode that the name leads to may be gone at the origin."""
        self._files.forget_warm()
        self._freshness.doubt(ino)
        self._lister.tell(directory, name)

    def look_again(self, *places: Place) -> None:
        """A change of these names failed: what was listed around them does not count any more, nor what the kernel has."""
        self._freshness.forget_answers()
        for directory, name in places:
            self._lister.cancel(directory)
            directory.listed.complete, directory.marked = 0, False
            self._lister.tell(directory, name)

    def _give_up(self, directory: Directory, name: bytes) -> None:
        node = self._places.get((directory.ino, name))
        if node is not None and node.removed:
            if node.held:
                self._let_go(node)
            del self._places[directory.ino, name]
            self._forget(node)

    # -- what was done at the store ------------------------------------------------------------------

    async def write(self, directory: Directory, name: bytes, said: ObjectInfo | bool) -> int:
        """There is this object under the name now, a directory (True), or nothing. Returns its number."""
        async with self.applying():
            return self.written(directory, name, said)

    @asynccontextmanager
    async def applying(self) -> AsyncIterator[None]:
        """What is `written` until the end is one step for the readers of names, if its caller does not wait in between.
        Not in a thread: a lookup in between would show a part of it."""
        with trio.CancelScope(shield=True):
            async with self._tree.writing:
                yield
            while self._doomed:
                await self._lister.erase(self._doomed.pop())

    def written(self, directory: Directory, name: bytes, said: ObjectInfo | bool) -> int:
        """Write down what there is under a name from now on, while `applying`. Returns its number."""
        also = [("local", directory.key + name, None)]
        written = write_answer(self._tree, directory, name, said, directory.listed.generation, also)
        self._tree.note_change(directory, name)
        self._give_up(directory, name)
        self.touch(directory)
        self._files.forget_warm()
        self._lose(written.lost)
        ino = written.inos[0] if written.inos else None
        self._freshness.note_answer(directory, name, ino, self._tree.clock())
        return ino or 0

    async def directory(self, above: Directory, name: bytes) -> Directory:
        """The directory of this name, which is written down as one if it is not known as one."""
        async with self.applying():
            return self.below_as(above, name)

    def below_as(self, above: Directory, name: bytes) -> Directory:
        """The same while `applying`."""
        row = self._tree.row(above, mark_of_directory(name))
        return self._tree.directory(self.written(above, name, True) if row is None else row.ino)

    # -- names that are hidden ---------------------------------------------------------------------

    def hide(self, directory: Directory, name: bytes) -> None:
        """The name (`EVERY_NAME`: each in the directory) is missing here until `unhide`, whatever the origin says."""
        self._freshness.hidden.add((directory.ino, name))
        self._tree.note_change(directory, name)

    def unhide(self, directory: Directory, name: bytes) -> None:
        self._freshness.hidden.discard((directory.ino, name))
        self._tree.note_change(directory, name)  # what was asked before counts no more

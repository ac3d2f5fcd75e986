"""Writing the content of files: from the open for writing, or the create, to the end of the upload.

An open for writing sends no request and makes no dirty file, unless it empties the file. The first change makes the dirty
file, from the content of the open version. From then on all handles on this node read the dirty file, under the same inode,
so the pages that the kernel has stay right. `close` and `fsync` wait for what `Uploads.commit` promises. When no process has
the file open for writing, and it is uploaded, its name shows the uploaded object."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from cachefs.base.errors import (
    BadHandle,
    CachefsError,
    Invalid,
    IsADirectory,
    NameTooLong,
    NotFound,
    NotPermitted,
    ObjectChanged,
    ReadOnly,
    TooLarge,
    Unsupported,
)
from cachefs.base.ledger import about
from cachefs.fs.files import Node
from cachefs.fs.keys import MAX_NAME, nameable, text_of
from cachefs.fs.local_changes import DIRTY_FILE_ETAG, LocalChanges
from cachefs.fs.name_locks import NameLocks
from cachefs.fs.overrides import written
from cachefs.fs.reader import Buffer
from cachefs.fs.tree import Directory, Found
from cachefs.fs.tree_queries import object_of
from cachefs.origin.protocol import ObjectInfo

if TYPE_CHECKING:
    from cachefs.base.names import ObjectId
    from cachefs.fs.files import FileHandle, Former, OpenFiles
    from cachefs.fs.overrides import Overrides
    from cachefs.fs.tree import Tree
    from cachefs.origin import Origin
    from cachefs.upload import DirtyFile, Uploads

Opened = tuple[int, int]
"""(handle, backing id). With backing id 0 the file is not in passthrough, and the daemon answers its reads. The kernel may
keep the pages that it has of this inode."""

TAKEN_S = 1.0
"""How long a writer waits for other users of a cache file that readers have in passthrough, such as reads for another node.
Guessed: longer than such a read takes, unless the disk fails."""


@dataclass(eq=False, repr=False)
class DirtyFiles:
    _tree: Tree
    _local_changes: LocalChanges
    _overrides: Overrides
    _files: OpenFiles
    _writer: Uploads
    _locks: NameLocks
    # Files that the previous daemon was writing, by inode.
    _resumed: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._writer.on_committed = self._local_changes.committed
        self._writer.on_settling = self._local_changes.settling
        self._writer.on_settled = self._local_changes.settled

    # -- opening -------------------------------------------------------------------------------------

    async def create(
        self, directory: Directory, name: bytes, attrs: dict[str, Any], pid: int
    ) -> tuple[Node, Opened]:
        """Create an empty file under a free name, and open it for writing. It is uploaded when it is closed."""
        node = Node(directory, name, 0, stored=False, attrs=attrs)
        async with node.lock:
            await self._hold(node, None)
        try:
            return node, await self._to_write(self.open_reader(node, pid), node)
        except BaseException:
            await self._local_changes.take_back(node)
            raise

    def create_now(
        self, directory: Directory, name: bytes, attrs: dict[str, Any], pid: int
    ) -> tuple[Node, Opened] | None:
        """`create` in a directory that is in use, if that needs no wait; None if it does, and nothing has happened."""
        if not self._tree.writing.free or self._tree.find(directory, name) != (None, None):
            return None
        node = Node(directory, name, 0, stored=False, attrs=attrs)
        dirty_file = self._writer.begin_now(node.origin, node.key, self._local_changes.now_ns(), attrs)
        if dirty_file is None:
            return None
        self._local_changes.give(node, dirty_file)
        try:
            self._local_changes.hold_new(node)
            opened = self.open_reader(node, pid)
        except BaseException:
            self._writer.start(f"taking {node.key} back", self._local_changes.take_back, node)
            raise
        self._writes(opened[0], node)
        return node, opened

    async def open(self, directory: Directory, name: bytes, found: Found, flags: int, pid: int) -> Opened:
        """Open the file that was found for writing. The caller has claimed the name. Raises `ObjectChanged` if the kernel
        has to look the name up again, because it has another inode now."""
        if found.is_dir:
            raise IsADirectory(f"{directory.prefix}{name.decode()} is a directory")
        writable(directory)
        self._files.forget_warm()
        ino, obj = found.ino, object_of(directory, name, found.row)
        node = self._local_changes.nodes.get(ino) or self._local_changes.current(directory, name, obj)
        if node is None:
            node = Node(directory, name, ino, stored=True)
            await self._take(node, obj)
            if node.dirty_file is None:
                # After the wait, during which a program may set some.
                node.attrs = self._overrides.get(ino)
                if self._files.backing_of(self._files.under(ino)) is not None:
                    await self._local_changes.leave_to_readers(directory, name, ino)
                    raise ObjectChanged(f"{obj.key} is read in passthrough: look it up again to write it")
        if node.dirty_file is not None:
            opened = self.open_reader(node, pid)
        else:
            opened = self._files.open(ino, node.origin, obj, found.row.mtime_ns, pid, writes=True)
        self._local_changes.add(node)
        empty = partial(self._empty, node, obj) if flags & os.O_TRUNC else None
        return await self._to_write(opened, node, empty)

    async def open_nameless(self, ino: int, flags: int, pid: int) -> Opened:
        """Open a nameless file for writing, which is open already. Raises `ObjectChanged` if its bytes are not available any
        more."""
        node = self._local_changes.nodes.get(ino)
        if node is None:
            shown = self._files.nameless[ino]
            attrs = {"mode": stat.S_IMODE(shown.mode), "uid": shown.uid, "gid": shown.gid}
            node = self._nameless(self._files.under(ino)[0], attrs)
        async with node.lock:
            if node.dirty_file is None and (others := self._files.under(ino)):
                await self._take(node, others[0].object)
            if not (others := self._files.under(ino)):
                raise ObjectChanged(f"{node.key} has no name, and is not open any more")
            obj = others[0].object
            if node.dirty_file is not None:
                opened = self.open_reader(node, pid, obj)
            else:
                opened = self._files.open(ino, node.origin, obj, others[0].mtime_ns, pid, writes=True)
        empty = partial(self.truncate_open, opened[0], 0) if flags & os.O_TRUNC else None
        return await self._to_write(opened, node, empty)

    def open_version(self, directory: Directory, name: bytes, version: ObjectId, pid: int) -> Opened | None:
        """Open a dirty file for reading: one that is pending, or uploaded and not yet adopted by the cache. None if the name
        has no such file."""
        node = self._local_changes.current(directory, name, version)
        return None if node is None else self.open_reader(node, pid)

    def open_again(self, handle: FileHandle, pid: int) -> Opened:
        """Open a dirty file, which is open already, once more for reading, whatever its name shows."""
        assert handle.node is not None
        return self.open_reader(handle.node, pid, handle.object)

    def open_reader(self, node: Node, pid: int, version: ObjectId | None = None) -> Opened:
        """Open a dirty file for reading. Its open handles have `version`; without it, the one that its name shows."""
        version = version or self._local_changes.version(node)
        opened = self._files.open_dirty_file(node.ino, node.origin, version, pid)
        try:
            self._local_changes.attach(self._files.handles[opened[0]], node)
        except BaseException:
            self._files.release(opened[0])
            raise
        return opened

    def release(self, fh: int) -> None:
        """Release a handle. Never raises, never waits."""
        handle = self._files.release(fh)
        if handle is None or (node := handle.node or self._local_changes.nodes.get(handle.ino)) is None:
            return
        if handle.writes:
            node.writers -= 1
            if handle.backing is not None and node.dirty_file is not None:
                self._writer.returned(node.dirty_file)
            node.clears = node.clears and node.writers > 0
        self._local_changes.leave(handle, node)

    def _nameless(self, handle: FileHandle, attrs: dict[str, Any]) -> Node:
        node = self._local_changes.nameless(handle.ino, handle.origin, handle.object.key)
        node.attrs = attrs
        self._local_changes.nodes[node.ino] = node
        return node

    async def _to_write(
        self, opened: Opened, node: Node, empty: Callable[[], Awaitable[None]] | None = None
    ) -> Opened:
        """Make a handle that was just opened one for writing. If this fails, the handle is closed."""
        self._writes(opened[0], node)
        try:
            if empty is not None:
                await empty()
            return await self._opened_in_passthrough(opened[0])
        except BaseException:
            self.release(opened[0])
            raise

    def _writes(self, fh: int, node: Node) -> None:
        handle = self._files.handles[fh]
        handle.node, handle.writes = node, True
        node.writers += 1

    async def _take(self, node: Node, obj: ObjectId) -> None:
        """Make the cache file that readers have in passthrough the dirty file of a node, so that they see what is written.
        This happens at the open, because the daemon does not hear of writes to a mapping. Nothing changes if no reader has
        the file in passthrough, or if others use it for longer than `TAKEN_S`."""
        if not any(handle.backing for handle in self._files.under(node.ino)):
            return
        await self._writer.disk_answers()
        with trio.move_on_after(TAKEN_S):
            while (handles := self._files.under(node.ino)) and (backing := handles[0].backing) is not None:
                row = self._tree.row(node.directory, node.name)
                base = ObjectInfo(obj.key, obj.size, 0 if row is None else row.mtime_ns, obj.etag)
                if not node.removed:
                    # After the wait, during which a program may set some.
                    node.attrs = self._overrides.get(node.ino)
                dirty_file = self._writer.take(node.origin, base, backing, len(handles), node.attrs)
                if dirty_file is not None:
                    self._local_changes.give_open(node, dirty_file)
                    for handle in handles:
                        handle.backing = dirty_file.backing
                    self._files.forget_warm()
                    if node.removed:
                        await self._discard(dirty_file)
                    return
                await trio.sleep(TAKEN_S / 100)

    async def _opened_in_passthrough(self, fh: int) -> Opened:
        """Give a handle the staging file as its backing file, if all handles of the inode can have it. The reply must follow
        without an await."""
        handle = self._files.handles[fh]
        node, handle.backing = handle.node, None
        if node is None or node.dirty_file is None:
            return fh, 0
        try:
            own = await self._writer.open_backing(node.dirty_file)
        except CachefsError:
            own = None  # through the daemon, because an open that fails must not have emptied the file
        others = [other for other in self._files.under(handle.ino) if other is not handle]
        backing = self._files.backing_of(others) if others else own
        if backing is None:
            if own is not None:
                self._writer.returned(node.dirty_file)
            return fh, 0
        if own is None:
            raise ObjectChanged(f"{node.key} is in passthrough for others, and cannot be any more")
        handle.backing = backing
        if not node.pending:
            await self._begin(node, handle, None)  # the daemon does not hear of the first change
        return fh, backing.id

    # -- changing ------------------------------------------------------------------------------------

    async def write(self, fh: int, offset: int, data: Buffer) -> int:
        if not data:
            return 0
        node, dirty_file = await self._dirty_file_of(fh, offset + len(data))
        await dirty_file.write(offset, data)
        written(node.attrs)
        return len(data)

    def write_now(self, fh: int, offset: int, data: Buffer) -> int | None:
        """As `write`, if it need not wait; None if it would have to, and then nothing has happened."""
        handle = self._files.handles[fh]
        node = handle.node
        if node is None or node.dirty_file is None or not handle.writes or not self._is_begun(node):
            return None
        if not node.dirty_file.write_now(offset, data):
            return None
        written(node.attrs)
        return len(data)

    async def allocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        if mode:
            raise Unsupported(f"fallocate mode {mode:#x}: only room behind what is there can be made")
        if offset < 0 or length <= 0:
            raise Invalid(f"nothing to allocate: {length} bytes at {offset}")
        node, dirty_file = await self._dirty_file_of(fh, offset + length)
        size = dirty_file.size
        await dirty_file.allocate(offset, length)
        if dirty_file.size > size:
            written(node.attrs)

    async def truncate(self, directory: Directory, name: bytes, found: Found, size: int) -> None:
        """Truncate a file by its name. If no process has it open for writing, this waits for what a close would wait for.

        The caller has claimed the name."""
        if not found.is_dir and found.row.known and found.row.size == size:
            return
        fh, _ = await self.open(directory, name, found, os.O_WRONLY, 0)
        handle = self._files.handles[fh]
        node = handle.node
        assert node is not None
        try:
            await self.truncate_open(fh, size, claimed=True)
            others = (other for other in self._files.under(handle.ino) if other is not handle)
            if not any(other.writes and not other.flushed for other in others):
                await self._commit(node)
        finally:
            self.release(fh)

    async def truncate_open(self, fh: int, size: int, *, claimed: bool = False) -> None:
        handle = self._files.handles[fh]
        if handle.node is not None and handle.node.dirty_file is None and handle.object.size == size:
            return
        node, dirty_file = await self._dirty_file_of(fh, size, upto=size, claimed=claimed)
        await dirty_file.truncate(size)
        written(node.attrs)

    async def _dirty_file_of(
        self, fh: int, end: int, *, upto: int | None = None, claimed: bool = False
    ) -> tuple[Node, DirtyFile]:
        """The dirty file that a handle writes, up to the offset `end`. If there is none yet, it is begun with the first
        `upto` bytes of the file. `claimed`: the caller has claimed the name."""
        handle = self._files.handles[fh]
        node = handle.node
        if node is None or not handle.writes:
            raise BadHandle("the file is not open for writing")
        if not self._is_begun(node):
            if end > node.origin.limits.largest_object:
                raise TooLarge(f"{node.key}: the origin takes no object of {end} bytes")

            async def begin(*_: object) -> None:
                await self._begin(node, handle, upto)

            await (begin() if claimed else self._locks.changing(lambda: [(node.directory, node.name)], begin))
        assert node.dirty_file is not None
        return node, node.dirty_file

    def _is_begun(self, node: Node) -> bool:
        """True if the first change of a node is done: its name shows its dirty file, or it has a dirty file and no name.
        While a removal is under way the name still counts, because the removal may fail."""
        return node.pending or (node.dirty_file is not None and not self._local_changes.named(node))

    async def _begin(self, node: Node, handle: FileHandle, upto: int | None) -> None:
        """Make the first change of an open file: its name shows a dirty file from now on."""
        async with node.lock:
            if node.pending:
                return
            if node.removed:
                await self._begin_nameless(node, handle, upto)
                return
            if handle.ino in self._files.nameless:
                raise ObjectChanged(f"{node.key} was replaced while it was open")
            self._check_alone(node)
            await self._hold(node, handle.object, upto)

    async def _begin_nameless(self, node: Node, handle: FileHandle, upto: int | None) -> None:
        """Make the first change of a file that has lost its name. Its handles go on with the dirty file, and nothing of it
        is uploaded. Raises `ObjectChanged` where its bytes cannot be had any more."""
        if node.dirty_file is not None:
            return
        dirty_file = await self._begun(node, handle.object, upto)
        try:
            self._local_changes.give_open(node, dirty_file)
        except BaseException:
            await self._local_changes.abandon(node)
            raise
        await self._discard(dirty_file)

    async def _discard(self, dirty_file: DirtyFile) -> None:
        """Have nothing uploaded of the new dirty file of a nameless file. Also if the caller is cancelled, because another
        file may have the name."""
        with trio.CancelScope(shield=True):
            await self._writer.discard(dirty_file, replaced=True)

    def _check_alone(self, node: Node) -> None:
        """Raise `ObjectChanged` if another dirty file has the name: there is one at a time."""
        if self._local_changes.pending.get((node.directory.ino, node.name), node) is not node:
            raise ObjectChanged(f"{node.key} is being written under another number: look it up again")

    async def _empty(self, node: Node, base: ObjectId) -> None:
        async with node.lock:
            self._check_alone(node)
            written(node.attrs)
            if node.dirty_file is not None:
                await node.dirty_file.truncate(0)
            if not node.pending:
                await self._hold(node, base, 0)

    async def _hold(self, node: Node, base: ObjectId | None, upto: int | None = None) -> None:
        """Make a node's name show its dirty file. If it has none, one is begun with the content of `base`."""
        begins = node.dirty_file is None
        if begins:
            self._local_changes.give(node, await self._begun(node, base, upto))
        try:
            await self._local_changes.hold(node)
        except BaseException:
            if begins:
                await self._local_changes.abandon(node)
            raise

    async def _begun(self, node: Node, base: ObjectId | None, upto: int | None) -> DirtyFile:
        try:
            dirty_file: DirtyFile = await self._writer.begin(
                node.origin,
                node.key,
                base=base,
                upto=upto,
                mtime_ns=self._local_changes.now_ns(),
                attrs=node.attrs,
            )
        except NotFound as exc:  # an open file is not missing: its bytes are
            raise ObjectChanged(f"{node.key} was removed while it was open") from exc
        dirty_file.attrs.clear()
        dirty_file.attrs.update(node.attrs)  # with what was set during the await
        return dirty_file

    # -- promising -----------------------------------------------------------------------------------

    async def flush(self, fh: int) -> None:
        """Do what close(2) promises: commit the dirty file of a handle that writes."""
        handle = self._files.handles[fh]
        if handle.writes and handle.node is not None:
            handle.flushed = True
            await self._commit(handle.node)

    async def fsync(self, fh: int) -> None:
        node = self._files.handles[fh].node
        if node is not None:
            await self._commit(node)

    async def _commit(self, node: Node) -> None:
        if node.removed:
            async with node.lock:  # wait for the removal: if it fails, the node keeps its name
                pass
        if node.dirty_file is not None and not node.removed:
            about(node.dirty_file.key)
            try:
                await self._writer.commit(node.dirty_file)
            except CachefsError:
                if not node.removed:
                    raise

    async def recover(self, find: Callable[[Origin, str], Any]) -> None:
        """Show the dirty files of an earlier daemon. `find` returns the directory and the name of a key, and records the
        directory if the tree does not have it."""
        for file in self._writer.stored_before:
            directory, name = await find(file.origin, file.info.key)
            self._local_changes.settled_before(directory, name, file)
        for dirty_file in self._writer.nameless():
            node = self._local_changes.nameless(dirty_file.ino, dirty_file.origin, dirty_file.key)
            self._local_changes.give_open(node, dirty_file)
            self._resumed[dirty_file.ino] = node
        for dirty_file in self._writer.pending():
            if self._local_changes.of_dirty_file(dirty_file) is not None:
                continue
            directory, name = await find(dirty_file.origin, dirty_file.key)
            present = self._tree.present(dirty_file.ino)
            if present is not None and present[:2] != (directory, name):
                # The previous daemon died during a rename. The file keeps its inode. The one that its new name has now is of
                # the file which it has replaced, and processes may have that open.
                self._tree.database.write([("names", present[0].key + present[1], None)])
            node = Node(directory, name, dirty_file.ino, stored=True)
            self._local_changes.give(node, dirty_file)
            await self._local_changes.hold(node)
            if overrides := self._overrides.get(node.ino):  # set after the file was closed
                if overrides.get("ctime_ns", 0) < dirty_file.mtime_ns:
                    written(overrides)
                node.attrs.update(overrides)
            if dirty_file.ino:
                self._resumed[dirty_file.ino] = node

    def resume(self, former: Former) -> bool:
        """Restore a handle of the previous daemon if its inode is being written; False if it is not."""
        node = self._resumed.get(former.ino)
        if node is not None:
            number, _ = self.open_reader(node, 0)
        elif former.writes and not former.object.etag.startswith(DIRTY_FILE_ETAG):
            node, number = self._resume_unchanged(former)
        else:
            return False
        self._files.renumber(number, former.fh)
        if node.removed:
            self._files.lose_name(former.ino, removed=True)
        if former.writes:
            self._writes(former.fh, node)
        if former.backing_id and node.dirty_file is not None:
            backing = self._writer.passthrough.resume(
                node.dirty_file, former.backing_id, writes=former.writes
            )
            self._files.handles[former.fh].backing = backing
        return True

    def _resume_unchanged(self, former: Former) -> tuple[Node, int]:
        """Restore a handle for writing of a file that was not changed yet. If no name leads to the file any more, it is
        nameless."""
        node, present = self._local_changes.nodes.get(former.ino), self._tree.present(former.ino)
        if node is None and present is not None:
            node = Node(*present[:2], former.ino, stored=True)
            node.attrs = self._overrides.get(former.ino)
        # It may have been renamed since, and a copy may have another etag. All handles of an inode have one version, and so
        # does its row, while a name leads to it.
        if others := self._files.under(former.ino):
            obj = others[0].object
        elif present is not None and present[2].known:
            obj = object_of(*present)
        else:
            obj = former.object if node is None else replace(former.object, key=node.key)
        number, _ = self._files.open(former.ino, former.origin, obj, former.mtime_ns, 0, writes=True)
        if node is None:
            self._files.lose_name(former.ino, removed=True)
            node = self._nameless(self._files.handles[number], {})
        elif not node.removed:  # otherwise another file may have its name
            self._local_changes.add(node)
        return node, number


def writable(directory: Directory) -> Origin:
    """The origin of a directory's names. Raises `NotPermitted` where there is none, `ReadOnly` where it cannot be
    written."""
    origin = directory.origin
    if origin is None:
        raise NotPermitted("the list of sources is not a directory of any of them")
    if not origin.can_write:
        raise ReadOnly(f"{origin.source} can only be read")
    return origin


def check_name(directory: Directory, name: bytes) -> None:
    """Check that a key can have this name. Raises `NameTooLong`, `Invalid`, and as `writable`."""
    origin = writable(directory)
    if len(name) > MAX_NAME:
        raise NameTooLong(f"a name of {len(name)} bytes")
    if not nameable(name) or text_of(name) is None:
        raise Invalid("no key can have this name: keys are UTF-8")
    check_key(origin, len(directory.prefix.encode()) + len(name))


def check_key(origin: Origin, size: int) -> None:
    """Check that the origin takes a key of `size` bytes. Raises `NameTooLong`."""
    if size > origin.limits.longest_key:
        raise NameTooLong(f"a key of {size} bytes: {origin.source} takes {origin.limits.longest_key}")

"""Changes of names: mkdir, rmdir, unlink and rename. Each is made at the origin first, then recorded in the tree.

At the origin, a rename copies and deletes each object. On this node, the inode gets another name. A file that was not
uploaded yet is renamed without a request (`Uploads.rename`). Objects are copied before they are deleted, so at every moment
at least one of the two names shows them. To rename a directory, all keys below it are copied, then all are deleted; a note
in the journal lets the next start finish a rename that a crash interrupted. If a copy fails, the others are undone. If a
deletion fails, both names stay, and the caller gets the error. None of this is atomic for other nodes.

The caller has claimed the names (`NameLocks`)."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import trio

from cachefs.base.errors import (
    AlreadyExists,
    CachefsError,
    CrossDevice,
    Invalid,
    IsADirectory,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    ObjectChanged,
    OriginFailed,
)
from cachefs.fs.dirty_files import check_key, check_name, writable
from cachefs.fs.files import Node
from cachefs.fs.freshness import EVERY_NAME
from cachefs.fs.keys import mark_of_directory, name_in, name_of
from cachefs.fs.name_locks import Place
from cachefs.fs.rows import Row, encode
from cachefs.fs.tree import Directory, Found, is_below
from cachefs.fs.tree_queries import object_of
from cachefs.origin import InMemory, each

if TYPE_CHECKING:
    from cachefs.base.names import ObjectId
    from cachefs.fs.attributes import Attributes
    from cachefs.fs.files import OpenFiles
    from cachefs.fs.listing import Lister
    from cachefs.fs.local_changes import LocalChanges
    from cachefs.fs.lookup import Looker
    from cachefs.fs.overrides import Overrides
    from cachefs.fs.tree import Tree
    from cachefs.origin import Origin
    from cachefs.origin.protocol import ObjectInfo
    from cachefs.upload import DirtyFile, Uploads

log = logging.getLogger(__name__)

NOREPLACE = 1
"""RENAME_NOREPLACE of renameat2."""

Find = Callable[["Origin", str], Awaitable[Place]]

Copied = dict[str, tuple["ObjectInfo", "ObjectInfo"]]
"""Original and copy, by the key of the original."""


@dataclass(eq=False, repr=False)
class Changing:
    """Makes the changes. `_shape` (ino, is_dir, row) returns the attributes that are shown of a row."""

    _tree: Tree
    _looker: Looker
    _lister: Lister
    _files: OpenFiles
    _local_changes: LocalChanges
    _overrides: Overrides
    _writer: Uploads
    _shape: Callable[[int, bool, Row], Attributes]
    # Keys of files that the previous daemon was renaming to free names, by (inode of the directory, name) of these.
    _begun: dict[tuple[int, bytes], str] = field(default_factory=dict)

    # -- directories -------------------------------------------------------------------------------

    async def mkdir(self, directory: Directory, name: bytes) -> Found:
        """Make a directory: a marker at the origin. The directory counts as listed and empty. Raises `AlreadyExists`."""
        origin = writable(directory)
        if isinstance(await self._looker.sure(directory, name, below=True), Found):
            raise AlreadyExists(f"{directory.prefix}{name.decode()} is there")
        marker = directory.prefix + name.decode() + "/"
        check_key(origin, len(marker.encode()))
        try:
            await origin.put(marker, InMemory(b""), 0)
        except BaseException:
            self._local_changes.look_again((directory, name))  # the origin may have made it all the same
            raise
        ino = await self._local_changes.write(directory, name, True)
        directory.names.add(name)
        made = self._tree.directory(ino)
        await self._lister.is_empty(made)
        self._local_changes.touch(made)
        return await self._found(directory, name)

    async def rmdir(self, directory: Directory, name: bytes) -> None:
        origin = writable(directory)
        found = await self._found(directory, name)
        if not found.is_dir:
            raise NotADirectory(f"{directory.prefix}{name.decode()} is a file")
        inside = self._tree.directory(found.ino)
        if inside.is_top:
            raise NotPermitted(f"{name.decode()} is a source of the mount")
        await self._must_be_empty(origin, inside)
        await self._mark_last(origin, directory, name)
        with self._in_doubt(found, directory, name):
            await origin.delete(inside.prefix)
        async with self._local_changes.applying():
            self._directory_goes(inside, found)
            self._local_changes.written(directory, name, False)

    def _directory_goes(self, directory: Directory, found: Found) -> None:
        """Keep a directory's attributes for processes that are in it, before it loses its name. The caller is `applying`."""
        self._files.directory_removed(directory, replace(self._shape(found.ino, True, found.row), nlink=0))

    async def _must_be_empty(self, origin: Origin, directory: Directory) -> None:
        """Raise `NotEmpty` if a pending file or, by a fresh listing, a key is below the directory. Hidden keys count."""
        if any(node.pending for node in self._local_changes.below(directory)):
            raise NotEmpty(f"{directory.prefix} has files in it")
        page = await origin.list_page(directory.prefix, limit=2)
        if page.prefixes or any(info.key != directory.prefix for info in page.objects):
            raise NotEmpty(f"{directory.prefix} has something in it")

    # -- files -------------------------------------------------------------------------------------

    async def unlink(self, directory: Directory, name: bytes) -> None:
        origin = writable(directory)
        found = await self._found(directory, name)
        if found.is_dir:
            raise IsADirectory(f"{directory.prefix}{name.decode()} is a directory")
        # Also for a file that was not uploaded: it may have been the reason that no marker was made when the last key went.
        await self._mark_last(origin, directory, name)
        await self._keep_cached(found)
        node = self._node_of((directory, name), found)
        key = directory.prefix + name.decode()
        # A program has the file open for writing, and goes on with it also if this daemon dies behind the deletion.
        is_open = node is not None and node.dirty_file is None
        with self._noted((directory, name), {"removes": key}) if is_open else nullcontext():
            with self._in_doubt(found, directory, name):
                if node is None:
                    await origin.delete(key)
                else:
                    async with node.lock:
                        delete = partial(self._delete_stored, origin, key, node) if node.stored else None
                        await self._local_changes.remove(node, replaced=False, instead=delete)
            await self._local_changes.write(directory, name, False)
        if node is not None and node.dirty_file is not None and node.dirty_file.conflicts:
            with suppress(NotFound):
                await self._local_changes.write(directory, name, await origin.head(key))

    @contextmanager
    def _in_doubt(self, found: Found, directory: Directory, name: bytes) -> Iterator[None]:
        """If the block fails, have the name asked for before it is shown again: the origin may have deleted it."""
        try:
            yield
        except BaseException:
            self._local_changes.doubt(found.ino, directory, name)
            raise

    async def _delete_stored(self, origin: Origin, key: str, node: Node) -> None:
        """Delete a node's object, unless its upload was refused because another client's object is there: that one stays."""
        if node.dirty_file is None or not node.dirty_file.conflicts:
            await origin.delete(key)

    async def _keep_cached(self, found: Found) -> None:
        """Called before a file loses its name. If it is open and unchanged, the cache alone has its bytes then: the next
        daemon must find them."""
        node = self._local_changes.nodes.get(found.ino)
        handles = self._files.under(found.ino)
        if handles and (node is None or not node.pending):
            await self._writer.keep_cached(handles[0].object, None if node is None else node.dirty_file)

    async def _mark_last(self, origin: Origin, directory: Directory, name: bytes) -> None:
        """Give a directory a marker before its last key goes: otherwise it would vanish from under processes that work in
        it, here or on other nodes. Costs one PUT, and nothing if other keys or a marker are known."""
        if directory.is_top or directory.marked:
            return
        rows = self._tree.scan(directory, b"", 2)
        if all(name_in(mark) == name for mark, _ in rows):
            await origin.put(directory.prefix, InMemory(b""), 0)
            directory.marked = True

    async def _found(self, directory: Directory, name: bytes) -> Found:
        """Look a name up. Raises `NotFound`."""
        found = await self._looker.look(directory, name)
        if not isinstance(found, Found):
            raise NotFound(f"no such name in {directory.prefix}")
        return found

    # -- renaming ----------------------------------------------------------------------------------

    async def rename(
        self, directory: Directory, name: bytes, to: Directory, newname: bytes, flags: int, *, again: bool
    ) -> None:
        if flags & ~NOREPLACE:
            raise Invalid(f"renaming with flags {flags:#x}: names cannot be exchanged at an origin")
        if again and self._begun.pop((to.ino, newname), None) == directory.prefix + os.fsdecode(name):
            flags = 0  # a file that is there is the copy of the previous daemon
        origin, target_origin = writable(directory), writable(to)
        check_name(to, newname)
        if origin is not target_origin:
            raise CrossDevice("a rename from one source to another")
        found = await self._found(directory, name)
        answer = await (self._looker.sure if flags & NOREPLACE else self._looker.look)(to, newname)
        target = answer if isinstance(answer, Found) else None
        if target is None:
            pass
        elif flags & NOREPLACE:
            raise AlreadyExists(f"{to.prefix}{newname.decode()} is there")
        elif target.ino == found.ino:
            return
        elif found.is_dir and not target.is_dir:
            raise NotADirectory(f"{to.prefix}{newname.decode()} is a file")
        elif target.is_dir and not found.is_dir:
            raise IsADirectory(f"{to.prefix}{newname.decode()} is a directory")
        if found.is_dir:
            inside = self._tree.directory(found.ino)
            if inside.is_top:
                raise NotPermitted(f"{name.decode()} is a source of the mount")
            if is_below(to, inside):
                raise Invalid("a directory cannot be moved into itself")
            if target is not None:
                await self._must_be_empty(origin, self._tree.directory(target.ino))
        if to is not directory:
            await self._mark_last(origin, directory, name)
        place, new_place = (directory, name), (to, newname)
        if found.is_dir:
            await self._move_directory(place, found, new_place, target)
            return
        copy = {"copy_of": _key(place)[1]}
        with self._noted(new_place, copy) if flags & NOREPLACE else nullcontext():
            await self._move_file(place, found, new_place, target)

    @contextmanager
    def _noted(self, place: Place, change: dict[str, str]) -> Iterator[None]:
        """Tell the next daemon what the block does to the name `place` (`Tree.left`). `change` has one entry: `removes` with
        the key of the name, or `copy_of` with the key of the file that is renamed to it. The name was free before, or that
        of a file that is open and unchanged."""
        key, row = place[0].key + place[1], json.dumps(change).encode()
        self._tree.database.write([("local", key, row)])
        try:
            yield
        finally:
            if self._tree.database.get("local", key) == row:
                self._tree.database.write([("local", key, None)])

    # -- renaming a file -----------------------------------------------------------------------------

    async def _move_file(self, place: Place, found: Found, to: Place, target: Found | None) -> None:
        if target is not None:
            await self._keep_cached(target)
        node = self._node_of(place, found)
        replaced = target and self._node_of(to, target)
        async with AsyncExitStack() as locks:
            for locked in (replaced, node):
                if locked is not None:
                    await locks.enter_async_context(locked.lock)
            found, target = self._current(place, found), target and self._current(to, target)
            # A program has the replaced file open for writing, and goes on with it also if this daemon dies behind the copy.
            if replaced is not None and replaced.dirty_file is None:
                locks.enter_context(self._noted(to, {"copy_of": _key(place)[1]}))
            if node is None or node.dirty_file is None:
                await self._rename_stored(place, found, to, replaced)
            else:
                await self._rename_node(node, node.dirty_file, found, to, target, replaced)

    def _node_of(self, place: Place, found: Found) -> Node | None:
        """The node of the inode that was found. None if the name's node belongs to an earlier inode, whose file another
        client has replaced."""
        node = self._local_changes.at(*place)
        return node if node is not None and node.ino == found.ino else None

    def _current(self, place: Place, found: Found) -> Found:
        """`found` with the row as it is now: the file may have been uploaded since the lookup."""
        row = self._tree.row(*place)
        return found if row is None or row.ino != found.ino else found._replace(row=row)

    async def _rename_stored(self, place: Place, found: Found, to: Place, replaced: Node | None) -> None:
        """Rename a file that no process writes: copy the object, record the new name, delete the old object."""
        origin, key = _key(place)
        info: ObjectInfo | None = None

        async def copy() -> None:
            nonlocal info
            if replaced is not None and replaced.dirty_file is not None:
                await self._writer.copy_comes(replaced.dirty_file, found.row.size)
            info = await origin.copy(key, _key(to)[1], size=found.row.size, etag=found.row.etag)

        await self._replace(to, replaced, copy)
        assert info is not None
        with trio.CancelScope(shield=True):  # because the copy is made, and no row says so yet
            await self._writer.moved(object_of(*place, found.row), info.version(origin.source))
        async with self._local_changes.applying():
            self._moved(place, found.row, to, info)
        await self._delete(origin, key, place, to)

    async def _replace(self, to: Place, replaced: Node | None, work: Callable[[], Awaitable[None]]) -> None:
        """Await `work`, which puts another file in the place `to`, where `replaced` is. If it fails, `replaced` is
        unchanged, and the name is asked for again: the origin may have made the change all the same."""
        try:
            if replaced is None:
                await work()
            else:
                await self._local_changes.remove(replaced, replaced=True, instead=work)
        except ObjectChanged:
            raise  # the origin has not made it: the source has another version
        except BaseException:
            self._local_changes.look_again(to)
            raise

    async def _rename_node(
        self,
        node: Node,
        dirty_file: DirtyFile,
        found: Found,
        to: Place,
        target: Found | None,
        replaced: Node | None,
    ) -> None:
        """Rename a file that a process has open for writing, or that was not uploaded yet. `target` is what the new name
        shows, `replaced` its node."""
        place = node.directory, node.name
        (origin, key), new = _key(place), _key(to)[1]
        overwritten = None if replaced is None else replaced.dirty_file
        # The etag of the object that the origin has under the new name, if it has one.
        base = target.row.etag if target is not None and target.row.known else None
        left = False

        async def rename() -> None:
            nonlocal base, left
            base = base if overwritten is None else overwritten.base
            left = await self._writer.rename(dirty_file, new, base=base, over=overwritten, leaves=leaves)

        async def leaves(older: ObjectInfo) -> None:
            """Note the older version under the old name: if a crash comes now, the next start deletes it, once the new name
            has the file. That is so if the dirty file comes back under it, or the origin has another object there."""
            before = base
            if target is not None and (base is None or overwritten is not None):
                with suppress(NotFound):  # perhaps of an upload whose outcome is unknown
                    before = (await origin.head(new)).etag
            note = uuid4().hex
            stack.push_async_callback(self._remove_note, note)
            row = {
                "source": origin.source,
                "from": key,
                "to": new,
                "versions": [older.etag],
                "before": before,
                "file": dirty_file.id,
            }
            await self._writer.note(note, row)

        async with AsyncExitStack() as stack:
            stack.enter_context(self._local_changes.moving(node))  # first, so that its dirty file is kept
            await self._replace(to, replaced, rename)
            node.stored = left or base is not None or dirty_file.committed is not None
            async with self._local_changes.applying():
                if node.pending:
                    self._move_pending(node, to)
                else:
                    assert dirty_file.committed is not None
                    row = self._tree.row(*place)  # it may have been uploaded since the lookup
                    if row is None or row.ino != node.ino:
                        row = found.row._replace(ino=node.ino)
                    self._moved(place, row, to, dirty_file.committed)
            if left:
                await self._delete(origin, key, place, to)

    async def _remove_note(self, note: str) -> None:
        with trio.CancelScope(shield=True):
            await self._writer.note(note, None)

    def _move_pending(self, node: Node, to: Place) -> None:
        """Give a pending file another name. The caller is `applying`."""
        assert node.dirty_file is not None
        row = node.row._replace(mtime_ns=node.dirty_file.mtime_ns)
        node.attrs["ctime_ns"] = self._local_changes.now_ns()
        self._local_changes.moves((node.directory, node.name), to, row)
        self._files.switch(node.ino, self._local_changes.version(node), row.mtime_ns)
        self._overrides.put(node.ino, node.attrs)

    def _moved(self, place: Place, row: Row, to: Place, info: ObjectInfo) -> None:
        """Record that a file has another name, that its object there is `info`, and that the one under the old name is to be
        deleted. The caller is `applying`, and calls `_delete` then."""
        generation = to[0].listed.generation
        left = json.dumps({"to": info.key, "versions": [row.etag]}).encode()
        self._local_changes.moves(place, to, _row_of(row, info)._replace(generation=generation), left)
        self._switch_to_copy(to[0], row, info, ctime_ns=self._local_changes.now_ns())

    def _switch_to_copy(self, directory: Directory, row: Row, info: ObjectInfo, **changes: int) -> None:
        """Make the readers of a file go on with its copy `info`. The file keeps its attribute overrides and its modification
        time, apart from these `changes`."""
        assert directory.origin is not None
        version = info.version(directory.origin.source)
        self._files.switch(row.ino, version, info.mtime_ns, reopen=directory.origin)
        overrides = self._overrides.get(row.ino)
        mtime_ns = overrides.get("mtime_ns", row.mtime_ns)
        if mtime_ns != info.mtime_ns and (changes or overrides or self._files.is_open(row.ino)):
            changes = {"atime_ns": overrides.get("atime_ns", mtime_ns), "mtime_ns": mtime_ns, **changes}
        if changes:
            self._overrides.put(row.ino, overrides | changes)

    async def _delete(self, origin: Origin, key: str, place: Place, to: Place) -> None:
        """Delete the object under the old name, which is hidden meanwhile because its file has the new name."""
        self._local_changes.hide(*place)
        try:
            await origin.delete(key)
            await self._local_changes.write(*place, False)
        except BaseException:
            self._local_changes.look_again(place, to)
            self._tree.database.write([("local", place[0].key + place[1], None)])  # the old name stays
            raise
        finally:
            self._local_changes.unhide(*place)

    # -- renaming a directory ------------------------------------------------------------------------

    async def _move_directory(self, place: Place, found: Found, to: Place, target: Found | None) -> None:
        """Rename a directory. `target` is the empty directory at `to`, if there is one.

        For processes on this node it is one step: until all objects are copied, the new name shows what it did; then both
        names change at once, and the old one stays hidden while its objects are deleted."""
        origin, source = _key(place)
        prefix, new = source + "/", _key(to)[1] + "/"
        inside = self._tree.directory(found.ino)
        local = {node.key for node in self._local_changes.below(inside) if node.dirty_file is not None}
        objects = [info for info in await keys_below(origin, prefix) if info.key not in local]
        replaced = None if target is None else self._tree.directory(target.ino)
        before = {new} if replaced else {info.key for info in await keys_below(origin, new)}
        if before - {new}:
            raise NotEmpty(f"{new} has something in it by now")
        longest = max((len(key.encode()) for key in (*local, *(info.key for info in objects))), default=0)
        check_key(origin, longest - len(prefix.encode()) + len(new.encode()))
        hidden = (replaced, EVERY_NAME) if replaced is not None else to
        note = uuid4().hex
        await self._writer.note(note, {"source": origin.source, "from": prefix, "to": new})
        copies = _Copies(origin, prefix, new, self._writer.moved)
        sent: list[tuple[Node, bool]] = []
        switched = False
        self._local_changes.hide(*hidden)
        moving = ExitStack()
        try:
            await copies.make(objects)
            await self._send(inside, copies, sent, moving)
            for key in local - {node.key for node, _ in sent}:  # uploaded meanwhile
                with suppress(NotFound):
                    objects.append(await origin.head(key))
                    await copies.make(objects[-1:])
            async with self._local_changes.applying():
                self._local_changes.unhide(*hidden)
                if target is not None and replaced is not None:
                    self._directory_goes(replaced, target)
                self._switch(place, inside, to, copies.made)
                for node, left in sent:
                    self._record_moved_node(node, left)
                self._local_changes.hide(*place)
                switched = True
            moving.close()
            with trio.CancelScope(shield=True):
                keys = [info.key for info in objects]
                keys += [prefix + node.key.removeprefix(new) for node, left in sent if left]
                failed = await origin.delete_many(keys)
        except BaseException:
            with trio.CancelScope(shield=True):
                if switched:
                    self._local_changes.look_again(place, to)
                else:
                    await self._send_back(inside, sent, to)
                    await copies.undo(objects, before)
                await self._writer.note(note, None)
            raise
        finally:
            moving.close()
            self._local_changes.unhide(*hidden)
            self._local_changes.unhide(*place)
        await self._remove_note(note)
        for key, error in failed.items():
            if not isinstance(error, NotFound):
                log.warning("%s was copied to %s and is still there: %s", key, new, error)
                self._local_changes.look_again(place, to)
                raise error

    async def _send(
        self, inside: Directory, copies: _Copies, sent: list[tuple[Node, bool]], moving: ExitStack
    ) -> None:
        """Give the dirty files below a directory their new keys, one by one. Their names stay until `_switch`. Adds each to
        `sent`, with whether the origin has an older version under the old key."""
        for node in self._local_changes.below(inside):
            async with node.lock:
                dirty_file = node.dirty_file
                if node.removed or dirty_file is None or self._tree.row(node.directory, node.name) is None:
                    continue
                moving.enter_context(self._local_changes.moving(node))
                key = copies.to(node.key)
                try:
                    left = await self._writer.rename(dirty_file, key, base=None, upload=False)
                except BaseException:
                    # The origin may have made the copy all the same.
                    with trio.CancelScope(shield=True), suppress(CachefsError):
                        await node.origin.delete(key)
                    raise
                sent.append((node, left))

    async def _send_back(self, inside: Directory, sent: list[tuple[Node, bool]], to: Place) -> None:
        """Give the dirty files in `sent` their old keys again. A file for which the origin refuses this is shown under its
        new name."""
        for node, _ in reversed(sent):
            dirty_file = node.dirty_file
            assert dirty_file is not None
            new_key = dirty_file.key
            try:
                if await self._writer.rename(dirty_file, node.key, base=None, upload=False):
                    await node.origin.delete(new_key)
            except CachefsError as exc:
                log.warning("what was written to %s stays there: %s", new_key, exc)
                if node.pending:
                    async with self._local_changes.applying():
                        moved = self._local_changes.directory(*to)
                        self._move_pending(
                            node, (self._moved_directory(node.directory, inside, moved), node.name)
                        )

    def _switch(self, place: Place, inside: Directory, to: Place, copies: Copied) -> None:
        """Record a directory's new name, and the copies as its contents, in one step. The caller is `applying`."""
        before = inside.prefix
        self._local_changes.directory_moves(place, to, inside)
        self._overrides.put(
            inside.ino, {**self._overrides.get(inside.ino), "ctime_ns": self._local_changes.now_ns()}
        )
        directories: dict[str, Directory | None] = {"": inside}  # by path below it

        def directory_at(path: str) -> Directory | None:
            if path not in directories:
                above, _, name = path.rpartition("/")
                parent, shown = directory_at(above), name_of(name)
                row = self._tree.row(parent, mark_of_directory(shown)) if parent and shown else None
                directories[path] = None if row is None else self._tree.directory(row.ino)
            return directories[path]

        for old, made in copies.values():
            path, _, name = old.key[len(before) :].rpartition("/")
            directory, shown = directory_at(path), name_of(name)
            row = self._tree.row(directory, shown) if directory and shown else None
            if directory and shown and row is not None and (row.etag, row.size) == (old.etag, old.size):
                self._record_copy(directory, shown, row, made)

    def _record_copy(self, directory: Directory, name: bytes, row: Row, info: ObjectInfo) -> None:
        """Record that the object of a file below a renamed directory is `info`. The caller is `applying`."""
        self._tree.database.write([("names", directory.key + name, encode(_row_of(row, info)))])
        self._switch_to_copy(directory, row, info)

    def _record_moved_node(self, node: Node, left: bool) -> None:
        """Update the node of a dirty file below a renamed directory. Its key has changed already. `left`: see `_send`."""
        dirty_file = node.dirty_file
        assert dirty_file is not None
        node.stored = left or dirty_file.committed is not None
        if node.pending:
            self._files.switch(node.ino, self._local_changes.version(node), node.row.mtime_ns)
            return
        row = self._tree.row(node.directory, node.name)
        assert dirty_file.committed is not None
        if row is not None and row.ino == node.ino:
            self._record_copy(node.directory, node.name, row, dirty_file.committed)

    def _moved_directory(self, directory: Directory, inside: Directory, moved: Directory) -> Directory:
        """The directory at the path below `moved` that `directory` has below `inside`. The caller is `applying`."""
        if directory is inside:
            return moved
        assert directory.parent is not None
        above = self._moved_directory(directory.parent, inside, moved)
        return self._local_changes.directory(above, name_in(directory.mark))

    async def recover(self, origins: Sequence[Origin], find: Find) -> None:
        """Finish the renames that were under way when a daemon died. What fails is logged, and tried again at the next
        start. `find` returns the place of a key."""
        for name, row in self._writer.notes().items():
            origin = next((o for o in origins if _is_of(o, row)), None)
            if origin is None:
                continue
            try:
                if "versions" in row:
                    await self._remove_older(origin, row, find)
                else:
                    await self._finish(origin, row["from"], row["to"], find)
                    log.info("finished renaming %s to %s", row["from"], row["to"])
                await self._writer.note(name, None)
            except CachefsError as exc:
                log.warning("renaming %s to %s is still unfinished: %s", row["from"], row["to"], exc)
        for ino, old_name, left in self._tree.left:
            row = json.loads(left)
            try:
                directory = self._tree.directory(ino)
                if "removes" in row:
                    await self._look_for_change(directory, old_name, removes=True)
                elif "copy_of" in row:  # this daemon is asked again, or no program waits for it
                    self._begun[ino, old_name] = row["copy_of"]
                    await self._look_for_change(directory, old_name)
                else:
                    origin, key = _key((directory, old_name))
                    await self._remove_older(origin, {**row, "from": key}, find)
                self._tree.database.write([("local", directory.key + old_name, None)])
            except CachefsError as exc:
                log.warning("a file that was renamed or removed may still have its old name: %s", exc)

    async def _look_for_change(self, directory: Directory, name: bytes, *, removes: bool = False) -> None:
        """If the origin has another object under a name than the tree (`removes`: none), take the name away from the tree's
        inode. So handles that are restored then have lost it here, and not to another client."""
        origin, key = _key((directory, name))
        row = self._tree.row(directory, name)
        if row is None or self._local_changes.at(directory, name) is not None:
            return
        info: ObjectInfo | None = None
        with suppress(NotFound):
            info = await origin.head(key)
        if info is None and removes:
            await self._local_changes.write(directory, name, False)
        elif info is not None and not removes and info.etag != row.etag:
            await self._local_changes.write(directory, name, info)

    async def _remove_older(self, origin: Origin, row: dict[str, Any], find: Find) -> None:
        """Delete the older version of a renamed file under its old name, if the new name has the file here or at the origin.
        `row` is that of a note, or the JSON of `Tree.left` with the old key (`from`)."""
        pending = {one.key: one.id for one in self._writer.pending() if one.origin is origin}
        if row["from"] in pending:
            return  # it was not renamed yet
        made: ObjectInfo | None = None
        try:
            if (back := pending.get(row["to"])) is not None:
                if "file" in row and back != row["file"]:
                    return  # it is the file that was to be replaced, and the renamed one is lost
            elif (made := await origin.head(row["to"])).etag == row.get("before"):
                return  # the origin still has the object that was to be replaced
            older = await origin.head(row["from"])
        except NotFound:
            return
        if older.etag in row["versions"]:
            place, to = await find(origin, row["from"]), await find(origin, row["to"])
            shown = self._tree.row(*place)
            if (
                made is not None
                and made.size == older.size
                and shown is not None
                and shown.etag == older.etag
            ):
                # It is the copy, and the tree does not know of it. Processes may have the file open under its inode.
                async with self._local_changes.applying():
                    self._moved(place, shown, to, made)
            await self._delete(origin, row["from"], place, to)
            log.info("removed the older version of %s, which was renamed to %s", row["from"], row["to"])

    async def _finish(self, origin: Origin, prefix: str, new: str, find: Find) -> None:
        """Finish the rename of a directory from `prefix` to `new`: copy, record the new name, delete."""
        for dirty_file in self._writer.pending():
            if dirty_file.origin is origin and dirty_file.key.startswith(prefix):
                key = new + dirty_file.key.removeprefix(prefix)
                await self._writer.rename(dirty_file, key, base=None, upload=False)
        # The new name was free, so objects below it were copied by this rename, or are newer than it.
        before = {info.key: info for info in await keys_below(origin, new)}
        present = before.keys() | {
            dirty_file.key for dirty_file in self._writer.pending() if dirty_file.origin is origin
        }
        objects = await keys_below(origin, prefix)

        copies = _Copies(origin, prefix, new, self._writer.moved)
        await copies.make([info for info in objects if copies.to(info.key) not in present])
        pairs = copies.made | {
            info.key: (info, before[copies.to(info.key)]) for info in objects if copies.to(info.key) in before
        }
        place, to = await find(origin, prefix[:-1]), await find(origin, new[:-1])
        row = self._tree.row(place[0], mark_of_directory(place[1]))
        if row is not None:  # it had not got its new name before the crash
            async with self._local_changes.applying():
                self._switch(place, self._tree.directory(row.ino), to, pairs)
        for error in (await origin.delete_many([info.key for info in objects])).values():
            raise error


@dataclass(eq=False, repr=False)
class _Copies:
    """Copies the objects below one prefix to another. `made` has those that were copied. `_moved` (old, new) tells the cache
    that the two versions have the same content."""

    _origin: Origin
    _prefix: str
    _new: str
    _moved: Callable[[ObjectId, ObjectId], Awaitable[None]]
    made: Copied = field(default_factory=dict)

    def to(self, key: str) -> str:
        return self._new + key.removeprefix(self._prefix)

    async def make(self, objects: Sequence[ObjectInfo]) -> None:
        """Copy the objects. After a failure no other copy begins, but those under way are awaited, because they would still
        change the origin. Raises the first failure."""
        failed: list[CachefsError] = []

        async def copy(info: ObjectInfo) -> None:
            if failed:
                return
            try:
                made = await self._origin.copy(info.key, self.to(info.key), size=info.size, etag=info.etag)
            except CachefsError as exc:
                failed.append(exc)
                return
            self.made[info.key] = info, made
            await self._tell(info, made)

        await each(copy, objects, self._origin.concurrency)
        if failed:
            raise failed[0]

    async def undo(self, objects: Sequence[ObjectInfo], existing: set[str]) -> None:
        """Delete the copies of all these objects, also where no answer came, except the keys in `existing`, which were there
        before."""
        for info, made in self.made.values():
            await self._tell(made, info)
        keys = [self.to(info.key) for info in objects]
        for key, error in (
            await self._origin.delete_many([key for key in keys if key not in existing])
        ).items():
            log.warning("%s was made by a rename that failed, and cannot be removed: %s", key, error)

    async def _tell(self, old: ObjectInfo, new: ObjectInfo) -> None:
        source = self._origin.source
        await self._moved(old.version(source), new.version(source))


async def keys_below(origin: Origin, prefix: str) -> list[ObjectInfo]:
    """All objects whose keys begin with `prefix`, by fresh listings. Keys that no path can name are included."""
    found: list[ObjectInfo] = []
    prefixes = [prefix]

    async def one(below: str) -> None:
        token: str | None = None
        while True:
            try:
                page = await origin.list_page(below, token=token)
            except NotFound:
                return  # an origin with real directories answers so where nothing is below
            if page.unread:
                page = await trio.to_thread.run_sync(page.read)
            found.extend(page.objects)
            more.extend(page.prefixes)
            if page.next_token is None:
                return
            if page.next_token == token:
                raise OriginFailed(f"listing {below!r}: the origin repeats the same page for ever")
            token = page.next_token

    while prefixes:
        more: list[str] = []
        await each(one, prefixes, origin.concurrency)
        prefixes = more
    return found


def _row_of(row: Row, info: ObjectInfo) -> Row:
    """The row of a file whose object is `info`."""
    return row._replace(mtime_ns=info.mtime_ns, size=info.size, etag=info.etag, known=True)


def _key(place: Place) -> tuple[Origin, str]:
    directory, name = place
    assert directory.origin is not None
    return directory.origin, directory.prefix + name.decode()


def _is_of(origin: Origin, row: dict[str, Any]) -> bool:
    return origin.source == row["source"] and all(
        row[end].startswith(origin.prefix) for end in ("from", "to")
    )

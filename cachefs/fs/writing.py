"""The write side of the filesystem: dirty files, changes of names and attribute overrides, over the local changes.

This module does what needs no file content: it finds the node of an inode, computes the attributes that are shown, and sets
attributes. Callers of `create`, `mknod`, `mkdir`, `unlink`, `rmdir`, `rename` and `open` have claimed the names (`locks`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cachefs.base.errors import AlreadyExists, NotFound, NotPermitted, ObjectChanged
from cachefs.fs.attributes import Attributes
from cachefs.fs.changing import Changing
from cachefs.fs.dirty_files import DirtyFiles, Opened, check_name
from cachefs.fs.files import DIRTY_FILE, Node
from cachefs.fs.inodes import ROOT
from cachefs.fs.keys import name_in
from cachefs.fs.local_changes import LocalChanges
from cachefs.fs.name_locks import NameLocks, Place
from cachefs.fs.overrides import Overrides, without_set_ids, written
from cachefs.fs.rows import PINNED
from cachefs.fs.tree import Directory, Found, Tree

if TYPE_CHECKING:
    from cachefs.base.shared_memory import Times
    from cachefs.fs.attributes import Options
    from cachefs.fs.files import FileHandle, OpenFiles
    from cachefs.fs.freshness import Freshness
    from cachefs.fs.listing import Lister
    from cachefs.fs.lookup import Looker
    from cachefs.fs.rows import Row
    from cachefs.origin import Origin
    from cachefs.upload import DirtyFile, Uploads


@dataclass(eq=False, repr=False)
class Writing:
    """Writes of one mount. `dirty_files` has the operations on handles; `names` has unlink, rmdir and rename. `_wall`
    returns seconds since the epoch, for the times that files and directories show."""

    _tree: Tree
    _freshness: Freshness
    _looker: Looker
    _lister: Lister
    _files: OpenFiles
    _writer: Uploads
    _options: Options
    _wall: Callable[[], float]
    _times: Times

    def __post_init__(self) -> None:
        tree, lister, files, writer = self._tree, self._lister, self._files, self._writer
        self.locks = NameLocks()
        self.overrides = overrides = Overrides(tree.database)
        self._local_changes = local_changes = LocalChanges(
            tree, self._freshness, lister, files, overrides, writer, self._wall, self._times
        )
        self.dirty_files = DirtyFiles(tree, local_changes, overrides, files, writer, self.locks)
        self.names = Changing(tree, self._looker, lister, files, local_changes, overrides, writer, self.shape)
        writer.on_changed = self._changed_unseen

    # -- what is shown -----------------------------------------------------------------------------

    def shape(self, ino: int, is_dir: bool, row: Row) -> Attributes:
        """The attributes that a name shows."""
        if row.generation == PINNED:
            return self._of_node(self._local_changes.of_row(row))
        overrides = self.overrides.get(ino)
        if is_dir and (changed := self._local_changes.times.get(ino)) is not None:
            overrides = {
                **overrides,
                "mtime_ns": changed,
                "ctime_ns": max(changed, overrides.get("ctime_ns", changed)),
            }
        return self._options.shape(ino, is_dir, row.size, row.mtime_ns, overrides)

    def orphan(self, ino: int) -> tuple[Attributes, float] | None:
        """The attributes of a file that is open, has a dirty file and no name, with a TTL of 0; None for other inodes."""
        node = self._local_changes.nodes.get(ino)
        if node is None or not node.removed or node.dirty_file is None:
            return None
        return self._of_node(node), 0.0

    def of_handle(self, handle: FileHandle) -> Attributes:
        """The attributes of an open file, whatever its name shows."""
        if (node := handle.node) is not None and handle.size == DIRTY_FILE:
            (size, mtime_ns), overrides = _content(node), node.attrs
        else:
            size, mtime_ns = handle.object.size, handle.mtime_ns
            overrides = self.overrides.get(handle.ino)
        return self._options.shape(handle.ino, False, size, mtime_ns, overrides)

    def _of_node(self, node: Node) -> Attributes:
        size, mtime_ns = _content(node)
        links = int(self._local_changes.named(node))
        return self._options.shape(node.ino, False, size, mtime_ns, node.attrs, links)

    def _attrs(self, above: Directory, is_dir: bool, mode: int, uid: int, gid: int) -> dict[str, Any]:
        """The attribute overrides of a new file or directory: the values that differ from the mount's defaults. What is made
        in a set-gid directory gets its group, and a directory made there is set-gid, too."""
        options = self._options
        over = self.overrides.get(above.ino)
        if over.get("mode", options.dir_mode) & stat.S_ISGID:
            gid = over.get("gid", options.gid)
            mode |= stat.S_ISGID if is_dir else 0
        shown = {
            "mode": options.dir_mode if is_dir else options.file_mode,
            "uid": options.uid,
            "gid": options.gid,
        }
        wanted = {"mode": stat.S_IMODE(mode), "uid": uid, "gid": gid}
        return {name: value for name, value in wanted.items() if value != shown[name]}

    def clear_set_ids(self, fh: int, later: bool) -> None:
        """Clear the set-uid and set-gid bits, because a process without the right to keep them has changed the open file.
        `later`: it may change the file in passthrough, so they are cleared when a change is seen."""
        node = self._files.handles[fh].node
        if node is not None and later:
            node.clears = True
        elif node is not None and self._clear(node.attrs) and not node.removed:
            self.overrides.put(node.ino, node.attrs)

    def _clear(self, attrs: dict[str, Any]) -> bool:
        """Clear the set-uid and set-gid bits. False if the mode has none of them."""
        mode = attrs.get("mode", self._options.file_mode)
        clean = stat.S_IMODE(without_set_ids(mode | stat.S_IFREG))
        if clean != mode:
            attrs["mode"] = clean
        return bool(clean != mode)

    def _changed_unseen(self, dirty_file: DirtyFile) -> None:
        """Note that a process has written a dirty file in passthrough."""
        written(dirty_file.attrs)
        node = self._local_changes.of_dirty_file(dirty_file)
        if node is not None and node.clears:
            self._clear(dirty_file.attrs)

    def keep(self, ino: int, changes: dict[str, int]) -> bool:
        """Set attributes of an inode (see `Overrides.get`). They hold as long as the inode. Returns True if the caller must
        await `overrides.written`."""
        changes = {**changes, "ctime_ns": self._local_changes.now_ns()}
        if "mode" in changes:
            changes["mode"] = stat.S_IMODE(changes["mode"])
        node = self._local_changes.nodes.get(ino)
        if node is not None and node.dirty_file is not None and (node.pending or node.removed):
            return self._keep_of_node(node, changes)
        if (shown := self._files.nameless.get(ino)) is not None:
            if node is not None:
                node.attrs.update(changes)
            self._files.nameless[ino] = _changed(shown, changes)
            return False
        if (removed := self._files.removed_directories.get(ino)) is not None:
            self._files.removed_directories[ino] = removed[0], _changed(removed[1], changes)
            return False
        mtime_ns = 0
        if ino != ROOT:
            directory, mark = self._tree.locate(ino)
            node = self._local_changes.at(directory, name_in(mark))
            if node is not None and node.ino == ino:
                if node.pending:
                    return self._keep_of_node(node, changes)
                node.attrs.update(changes)  # the node's first change writes `attrs` back
            row = self._tree.row(directory, mark)
            if row is not None:
                mtime_ns = row.mtime_ns
        if (changed := self._local_changes.times.get(ino)) is not None:
            mtime_ns = changed
            changes = {"mtime_ns": mtime_ns, **changes}
        overrides = self.overrides.get(ino)
        self.overrides.put(ino, overrides | _with_atime(overrides, mtime_ns, changes))
        self._local_changes.times.drop(ino)  # last, because a kill before this line must not lose the time
        return True

    def _keep_of_node(self, node: Node, changes: dict[str, int]) -> bool:
        """`keep` for a dirty file. The overrides are stored, too, for the next start: the journal has them only as they were
        when the file was closed."""
        # `_content` looks for changes first: one found later would count as newer than these attributes, and drop them.
        node.attrs.update(_with_atime(node.attrs, _content(node)[1], changes))
        if self._local_changes.named(node):
            self.overrides.put(node.ino, node.attrs)
        return False

    # -- files -------------------------------------------------------------------------------------

    async def create(
        self, directory: Directory, name: bytes, flags: int, mode: int, pid: int, uid: int, gid: int
    ) -> tuple[int, Opened]:
        """Create and open a file, or open the one that exists. Returns its inode and the handle."""
        check_name(directory, name)
        found = await (self._looker.look if _replaces(flags) else self._looker.sure)(directory, name)
        if isinstance(found, Found):
            if flags & os.O_EXCL:
                raise AlreadyExists(f"{directory.prefix}{name.decode()} is there")
            return found.ino, await self.dirty_files.open(directory, name, found, flags | os.O_RDWR, pid)
        attrs = self._attrs(directory, False, mode, uid, gid)
        node, opened = await self.dirty_files.create(directory, name, attrs, pid)
        return node.ino, opened

    def create_now(
        self, directory: Directory, name: bytes, flags: int, mode: int, pid: int, uid: int, gid: int
    ) -> tuple[Attributes, Opened] | None:
        """`create` of a file that is missing, if that needs no wait. Returns its attributes and the handle; None if it needs
        one, or if the file is there, and then nothing has happened."""
        check_name(directory, name)
        if not self.locks.free((directory, name)):
            return None
        found = self._looker.now(directory, name)
        if found is None or isinstance(found, Found):
            return None
        if not _replaces(flags) and not self._freshness.just_absent(directory, name):
            return None
        attrs = self._attrs(directory, False, mode, uid, gid)
        made = self.dirty_files.create_now(directory, name, attrs, pid)
        return made and (self._of_node(made[0]), made[1])

    async def _made(self, directory: Directory, name: bytes, is_dir: bool, again: bool) -> Found:
        """What a MKDIR or MKNOD finds in its place, if the kernel sends it `again`: the previous daemon may have made
        it, and died before its attributes were stored. Raises `AlreadyExists` otherwise."""
        found = await self._looker.look(directory, name)
        if not again or not isinstance(found, Found) or found.is_dir != is_dir:
            raise AlreadyExists(f"{directory.prefix}{name.decode()} is there")
        return found

    async def mknod(
        self, directory: Directory, name: bytes, mode: int, pid: int, uid: int, gid: int, *, again: bool
    ) -> int:
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise NotPermitted("an object store has no devices, sockets or pipes")
        try:
            ino, opened = await self.create(directory, name, os.O_EXCL, mode, pid, uid, gid)
        except AlreadyExists:
            found = await self._made(directory, name, False, again)
            self.overrides.put(found.ino, self._attrs(directory, False, mode, uid, gid))
            return found.ino
        node = self._files.handles[opened[0]].node
        assert node is not None
        try:
            await self.dirty_files.flush(opened[0])
        except BaseException:
            await self._local_changes.take_back(node)
            raise
        finally:
            self.dirty_files.release(opened[0])
        return ino

    async def truncate(self, ino: int, size: int, fh: int | None) -> tuple[Attributes, float] | None:
        """Returns the attributes of an inode without a name afterwards: its last user may have closed it meanwhile."""
        if fh is not None and self._files.handles[fh].writes:
            await self.dirty_files.truncate_open(fh, size)
            return None
        if self._files.removed(ino):
            fh, _ = await self.dirty_files.open_nameless(ino, os.O_WRONLY, 0)
            try:
                await self.dirty_files.truncate_open(fh, size)
                return self.orphan(ino)
            finally:
                self.dirty_files.release(fh)
        try:
            await self.locks.changing(lambda: [self.place_of(ino)], partial(self._truncate, ino, size))
        except ObjectChanged:
            if not self._files.removed(ino):
                raise
            return await self.truncate(ino, size, fh)  # it lost its name during the wait
        return None

    def place_of(self, ino: int) -> Place:
        directory, mark = self._tree.locate(ino)
        return directory, name_in(mark)

    async def _truncate(self, ino: int, size: int, directory: Directory, name: bytes) -> None:
        found = await self._looker.look(directory, name)
        if not isinstance(found, Found) or found.ino != ino:
            raise ObjectChanged(f"inode {ino} was replaced")
        await self.dirty_files.truncate(directory, name, found, size)

    def is_going(self, directory: Directory, mark: bytes) -> bool:
        """True while the name shows a file that is being removed or replaced."""
        node = self._local_changes.at(directory, name_in(mark))
        return node is not None and node.removed

    # -- names -------------------------------------------------------------------------------------

    async def mkdir(
        self, directory: Directory, name: bytes, mode: int, uid: int, gid: int, *, again: bool
    ) -> Found:
        check_name(directory, name)
        try:
            found = await self.names.mkdir(directory, name)
        except AlreadyExists:
            found = await self._made(directory, name, True, again)
        self.overrides.put(found.ino, self._attrs(directory, True, mode, uid, gid))
        return found

    async def recover(self) -> None:
        if not self._tree.database.stored.was_clean:
            # Changes that were under way when an earlier daemon died may have reached the origin, and no row shows them.
            self._tree.database.write(self._tree.refresh(self._tree.root))
        origins = [top.origin for top in self._tree.tops() if top.origin is not None]
        await self.names.recover(origins, self._place)
        await self.dirty_files.recover(self._place)

    async def _place(self, origin: Origin, key: str) -> tuple[Directory, bytes]:
        """The directory and the name of a key. Directories on the way that the tree does not have are recorded."""
        for top in self._tree.tops():
            if top.origin is origin:  # other sources may have the key below their prefix, too
                directory = top
                *above, last = key[len(top.prefix) :].encode().split(b"/")
                async with self._local_changes.applying():
                    for name in above:
                        directory = self._local_changes.directory(directory, name)
                return directory, last
        raise NotFound(f"{key} is not below what is mounted")


def _replaces(flags: int) -> bool:
    """True for a create that replaces whatever is there. Any other must first make sure that the name is free."""
    return bool(flags & os.O_TRUNC and not flags & os.O_EXCL)


def _changed(shown: Attributes, changes: dict[str, int]) -> Attributes:
    """The attributes with these changes, whose mode is without the type."""
    mode = stat.S_IFMT(shown.mode) | changes.get("mode", shown.mode)
    return replace(shown, **{**changes, "mode": mode})


def _with_atime(overrides: dict[str, int], mtime_ns: int, changes: dict[str, int]) -> dict[str, int]:
    """The new attributes. If the modification time is set alone, the access time that was shown until now is kept."""
    if "mtime_ns" not in changes:
        return changes
    return {"atime_ns": overrides.get("atime_ns", mtime_ns), **changes}


def _content(node: Node) -> tuple[int, int]:
    """(size, mtime_ns) of a node's dirty file. Once the node is not pending, the time is that of the uploaded object."""
    dirty_file = node.dirty_file
    assert dirty_file is not None
    dirty_file.look()
    info = None if node.pending else dirty_file.committed
    return dirty_file.size, dirty_file.mtime_ns if info is None else info.mtime_ns

"""Writing, put together: drafts, names, and what is kept of attributes, over one overlay.

What does not ask for a name's content is here: which node an inode number means, what is shown of it, and who may.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cachefs.errors import AlreadyExists, IsADirectory, NotFound, NotPermitted, ObjectChanged
from cachefs.fs.attributes import DIRECTORY_SIZE, Attributes
from cachefs.fs.changing import Changing
from cachefs.fs.drafts import Drafts, Opened, check_name, writable
from cachefs.fs.inodes import ROOT
from cachefs.fs.kept import Kept
from cachefs.fs.keys import name_in
from cachefs.fs.overlay import Node, Overlay
from cachefs.fs.survey import object_of
from cachefs.fs.tree import Directory, Found, Tree

if TYPE_CHECKING:
    from cachefs.fs.attributes import Options
    from cachefs.fs.beliefs import Beliefs
    from cachefs.fs.files import OpenFiles
    from cachefs.fs.listing import Lister
    from cachefs.fs.looking import Looker
    from cachefs.fs.rows import Row
    from cachefs.fs.writer import Writer
    from cachefs.origin import Origin
    from cachefs.origin.protocol import ObjectInfo

__all__ = ["Opened", "Writing"]


class Writing:
    """`forget` drops what the other half knows of lately opened files. The age of answers is by `clock`; the times
    that files and directories show are by `wall`."""

    def __init__(
        self,
        tree: Tree,
        beliefs: Beliefs,
        looker: Looker,
        lister: Lister,
        files: OpenFiles,
        writer: Writer,
        options: Options,
        clock: Callable[[], float],
        wall: Callable[[], float],
        forget: Callable[[], None],
    ) -> None:
        self._tree = tree
        self._looker = looker
        self._files = files
        self._options = options
        self._forget = forget
        self._kept = Kept(tree.database)
        self._overlay = Overlay(tree, beliefs, lister, files, writer, clock, wall)
        self._overlay.on_change = forget
        self._overlay.on_stored = self._stored
        self._drafts = Drafts(self._overlay, self._kept, files, writer, wall)
        self._names = Changing(tree, looker, lister, files, self._overlay, self._kept, writer)
        # For the fast paths: each is one call.
        self.release = self._drafts.release
        self.write = self._drafts.write
        self.flush, self.fsync = self._drafts.flush, self._drafts.fsync
        self.fallocate = self._drafts.allocate
        self.unlink, self.rmdir, self.rename = self._names.unlink, self._names.rmdir, self._names.rename

    # -- what is shown -----------------------------------------------------------------------------

    def shape(self, ino: int, is_dir: bool, row: Row) -> Attributes:
        """Of what the store has; `ino` is the number it is shown under."""
        stable = self._files.stable(ino)
        kept = self._kept.get(stable, row.etag) if self._kept.any else _NOTHING
        if is_dir and (changed := self._overlay.times.get(stable)) is not None:
            kept = {**kept, "mtime_ns": changed}
        return self._shape(ino, is_dir, row.size, row.mtime_ns, kept)

    def attributes(self, row: Row) -> Attributes:
        """Of what is being written: a row of the overlay."""
        return self._of_node(self._overlay.of_row(row))

    def orphan(self, ino: int) -> tuple[Attributes, float] | None:
        """Of what has no name any more, and is still open."""
        node = self._overlay.nodes.get(ino)
        if node is None or not node.removed or node.draft is None:
            return None
        return self._of_node(node), 0.0

    def _of_node(self, node: Node) -> Attributes:
        draft = node.draft
        assert draft is not None
        draft.look()
        return self._shape(
            self._overlay.number(node), False, draft.size, draft.mtime_ns, node.attrs, int(not node.removed)
        )

    def _shape(
        self, ino: int, is_dir: bool, size: int, mtime_ns: int, kept: dict[str, Any], links: int = 1
    ) -> Attributes:
        options = self._options
        mode = kept.get("mode", options.dir_mode if is_dir else options.file_mode)
        return Attributes(
            ino,
            mode | (stat.S_IFDIR if is_dir else stat.S_IFREG),
            2 if is_dir else links,
            DIRECTORY_SIZE if is_dir else size,
            kept.get("mtime_ns", mtime_ns),
            kept.get("uid", options.uid),
            kept.get("gid", options.gid),
        )

    def _attrs(self, is_dir: bool, mode: int, uid: int, gid: int) -> dict[str, Any]:
        """What has to be kept of these: what is not shown anyhow."""
        options = self._options
        shown = {
            "mode": options.dir_mode if is_dir else options.file_mode,
            "uid": options.uid,
            "gid": options.gid,
        }
        wanted = {"mode": stat.S_IMODE(mode), "uid": uid, "gid": gid}
        return {name: value for name, value in wanted.items() if value != shown[name]}

    def _stored(self, node: Node, info: ObjectInfo) -> None:
        """The store has a draft: what was set of it is kept of this version."""
        self._kept.put(node.stable, info.etag, node.attrs)

    async def keep(
        self, ino: int, mode: int | None, uid: int | None, gid: int | None, mtime_ns: int | None
    ) -> None:
        """Set what is not None, for as long as it is this version."""
        given = {
            "mode": None if mode is None else stat.S_IMODE(mode),
            "uid": uid,
            "gid": gid,
            "mtime_ns": mtime_ns,
        }
        news = {name: value for name, value in given.items() if value is not None}
        node = self._overlay.nodes.get(ino)
        if node is not None and (node.held or node.removed):
            if node.draft is not None:
                node.draft.look()  # a later one would take what is set now for older than the change
            node.attrs.update(news)
            return
        stable, etag = ROOT, ""
        if ino != ROOT:
            directory, mark = self._locate(ino)
            node = self._overlay.held.get((directory.number, mark))
            if node is not None:
                node.attrs.update(news)
                return
            row = self._tree.row(directory, mark)
            stable, etag = self._files.stable(ino), "" if row is None else row.etag
        self._kept.put(stable, etag, self._kept.get(stable, etag) | news)
        if mtime_ns is not None:
            self._overlay.times.pop(stable, None)

    def _locate(self, ino: int) -> tuple[Directory, bytes]:
        try:
            return self._tree.locate(self._files.stable(ino))
        except NotFound:
            raise ObjectChanged(f"inode {ino} is gone") from None

    # -- files -------------------------------------------------------------------------------------

    async def create(
        self, directory: Directory, name: bytes, flags: int, mode: int, pid: int, uid: int, gid: int
    ) -> tuple[int, Opened]:
        """The number of a new file, or of the one that is there, and a handle of it."""
        writable(directory)
        check_name(directory, name)
        # Who empties what is there replaces it, whatever it is; others would by mistake.
        replaces = flags & os.O_TRUNC and not flags & os.O_EXCL
        found = await (self._looker.look if replaces else self._looker.sure)(directory, name)
        if isinstance(found, Found):
            if flags & os.O_EXCL:
                raise AlreadyExists(f"{directory.prefix}{name.decode()} is there")
            if found.is_dir:
                raise IsADirectory(f"{directory.prefix}{name.decode()} is a directory")
            ino = self._shown(found)
            return ino, await self.open(directory, name, ino, found, flags | os.O_RDWR, pid)
        node = await self._drafts.create(directory, name, self._attrs(False, mode, uid, gid))
        opened = await self._drafts.open_writer(node, pid)
        return node.ino, opened

    async def mknod(self, directory: Directory, name: bytes, mode: int, pid: int, uid: int, gid: int) -> int:
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise NotPermitted("an object store has no devices, sockets or pipes")
        ino, opened = await self.create(directory, name, os.O_EXCL, mode, pid, uid, gid)
        try:
            await self._drafts.flush(opened[0])
        finally:
            self.release(opened[0])
        return ino

    async def open(
        self, directory: Directory, mark: bytes, ino: int, found: Found, flags: int, pid: int
    ) -> Opened:
        """A handle to write what was found."""
        if found.is_dir:
            raise IsADirectory(f"{directory.prefix}{mark.decode()} is a directory")
        self._forget()
        obj = object_of(directory, mark, found.row)
        return await self._drafts.open(directory, name_in(mark), ino, obj, flags, pid)

    def open_reader(self, directory: Directory, mark: bytes, ino: int, row: Row, pid: int) -> Opened | None:
        """A handle to read what is being written, or was until a moment ago; None where there is no such thing."""
        if not row.known:
            node = self._overlay.held.get((directory.number, mark))
        else:
            node = self._overlay.fresh(directory, mark, row)
        return None if node is None else self._drafts.open_reader(node, ino, pid)

    async def truncate(self, ino: int, size: int, fh: int | None) -> None:
        if fh is not None and self._files.get(fh).writes:
            await self._drafts.truncate_open(fh, size)
            return
        node = self._overlay.nodes.get(ino)
        if node is not None and node.removed and node.draft is not None:
            await node.draft.truncate(size)
            return
        directory, mark = self._locate(ino)
        name = name_in(mark)
        found = await self._looker.look(directory, name)
        if not isinstance(found, Found) or self._shown(found) != ino:
            raise ObjectChanged(f"inode {ino} is another version by now")
        if found.is_dir:
            raise IsADirectory(f"{directory.prefix}{mark.decode()} is a directory")
        self._forget()
        obj = object_of(directory, name, found.row)
        if found.row.known and obj.size == size:
            return
        await self._drafts.truncate(directory, name, ino, obj, size)

    def _shown(self, found: Found) -> int:
        if found.is_dir:
            return self._files.own(found.ino)
        if not found.row.known:
            return self._overlay.number(self._overlay.of_row(found.row))
        return self._files.shown(found.ino, found.row.etag, found.row.size)

    # -- names -------------------------------------------------------------------------------------

    async def mkdir(self, directory: Directory, name: bytes, mode: int, uid: int, gid: int) -> Found:
        writable(directory)
        check_name(directory, name)
        found = await self._names.mkdir(directory, name)
        attrs = self._attrs(True, mode, uid, gid)
        self._kept.put(found.ino, "", attrs)
        return found

    async def recover(self) -> None:
        if not self._tree.database.was_clean:
            # What was under way when an earlier daemon died may have reached the store, and is in no row here.
            self._tree.database.write(self._tree.refresh(self._tree.root))
        await self._names.recover([top.origin for top in self._tree.tops() if top.origin is not None])
        await self._drafts.recover(self._place)

    async def _place(self, origin: Origin, key: str) -> tuple[Directory, bytes]:
        """The directory of a key, written down where it is not known, and its name."""
        for top in self._tree.tops():
            if top.origin is origin:  # others may show the key, too
                directory = top
                *above, last = key[len(top.prefix) :].encode().split(b"/")
                for name in above:
                    directory = await self._overlay.directory(directory, name)
                return directory, last
        raise NotFound(f"{key} is not below what is mounted")


_NOTHING: dict[str, Any] = {}

"""Names that come, go and move: at the store first, then here, as the store's answer would be written.

The caller has claimed the names (`NameLocks`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from cachefs.base.errors import (
    AlreadyExists,
    CrossDevice,
    Invalid,
    IsADirectory,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
)
from cachefs.fs.dirty_files import check_key, check_name, writable
from cachefs.fs.keys import name_in
from cachefs.fs.local_changes import is_below
from cachefs.fs.moving import Find, Moving
from cachefs.fs.tree import Directory, Found
from cachefs.origin import InMemory

if TYPE_CHECKING:
    from cachefs.fs.attributes import Attributes
    from cachefs.fs.files import OpenFiles
    from cachefs.fs.listing import Lister
    from cachefs.fs.local_changes import LocalChanges, Node
    from cachefs.fs.lookup import Looker
    from cachefs.fs.overrides import Overrides
    from cachefs.fs.rows import Row
    from cachefs.fs.tree import Tree
    from cachefs.fs.writer import Writer
    from cachefs.origin import Origin


NOREPLACE = 1
"""RENAME_NOREPLACE of renameat2."""


class Changing:
    def __init__(
        self,
        tree: Tree,
        looker: Looker,
        lister: Lister,
        files: OpenFiles,
        local_changes: LocalChanges,
        kept: Overrides,
        writer: Writer,
        shape: Callable[[int, bool, Row], Attributes],
    ) -> None:
        """`shape` gives what is shown under a number, of a directory or not, of what the origin has."""
        self._tree = tree
        self._looker = looker
        self._lister = lister
        self._local_changes = local_changes
        self._kept = kept
        self._moving = Moving(tree, lister, files, local_changes, kept, writer, shape)

    async def recover(self, origins: Sequence[Origin], find: Find) -> None:
        """Finish the renames that a daemon died in."""
        await self._moving.recover(origins, find)

    # -- directories -------------------------------------------------------------------------------

    async def mkdir(self, directory: Directory, name: bytes) -> Found:
        """The new directory, of which it is known that nothing is in it."""
        origin = writable(directory)
        if isinstance(await self._looker.sure(directory, name, below=True), Found):
            raise AlreadyExists(f"{directory.prefix}{name.decode()} is there")
        marker = directory.prefix + name.decode() + "/"
        check_key(origin, len(marker.encode()))
        await origin.put(marker, InMemory(b""), 0)
        ino = await self._local_changes.is_directory(directory, name)
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
        await origin.delete(inside.prefix)
        async with self._local_changes.applying():
            self._moving.removed((directory, name), found)
        await self._lister.erase(found.ino)

    async def _must_be_empty(self, origin: Origin, directory: Directory) -> None:
        """By what is written here and by the store's own word. Hidden keys count."""
        if self._local_changes.below(directory):
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
        node = self._local_changes.at(directory, name)
        if node is None or node.stored:
            await self._mark_last(origin, directory, name)
        key = directory.prefix + name.decode()
        if node is None:
            await origin.delete(key)
        else:
            async with node.lock:
                delete = partial(self._delete, origin, key, node) if node.stored else None
                await self._local_changes.remove(node, replaced=False, instead=delete)
        await self._local_changes.gone(directory, name)
        self._kept.put(found.ino, "", {})
        if node is not None and node.dirty_file is not None and node.dirty_file.conflicts:
            with suppress(NotFound):
                await self._local_changes.is_file(directory, name, await origin.head(key))

    async def _delete(self, origin: Origin, key: str, node: Node) -> None:
        """What was refused because of another client's object goes alone."""
        if node.dirty_file is None or not node.dirty_file.conflicts:
            await origin.delete(key)

    async def _mark_last(self, origin: Origin, directory: Directory, name: bytes) -> None:
        """A directory that exists by its last key alone gets a marker before that goes: it must not vanish from under
        processes that work in it, here or on other nodes. One PUT, and only then."""
        if directory.is_top or directory.marked:
            return
        rows = self._tree.scan(directory, b"", 2)
        if all(name_in(mark) == name for mark, _ in rows):
            await origin.put(directory.prefix, InMemory(b""), 0)
            directory.marked = True

    async def _found(self, directory: Directory, name: bytes) -> Found:
        found = await self._looker.look(directory, name)
        if not isinstance(found, Found):
            raise NotFound(f"no such name in {directory.prefix}")
        return found

    # -- renaming ----------------------------------------------------------------------------------

    async def rename(
        self, directory: Directory, name: bytes, to: Directory, newname: bytes, flags: int
    ) -> None:
        if flags & ~NOREPLACE:
            raise Invalid(f"renaming with flags {flags:#x}: names cannot be exchanged at an origin")
        origin, check = writable(directory), writable(to)
        check_name(to, newname)
        if origin is not check:
            raise CrossDevice("a rename from one source to another")
        found = await self._found(directory, name)
        seen = await (self._looker.sure if flags & NOREPLACE else self._looker.look)(to, newname)
        there = seen if isinstance(seen, Found) else None
        if there is None:
            pass
        elif flags & NOREPLACE:
            raise AlreadyExists(f"{to.prefix}{newname.decode()} is there")
        elif there.ino == found.ino:
            return
        elif found.is_dir and not there.is_dir:
            raise NotADirectory(f"{to.prefix}{newname.decode()} is a file")
        elif there.is_dir and not found.is_dir:
            raise IsADirectory(f"{to.prefix}{newname.decode()} is a directory")
        if not found.is_dir:
            if to is not directory:
                await self._mark_last(origin, directory, name)
            await self._moving.file((directory, name), found, (to, newname), there)
            return
        inside = self._tree.directory(found.ino)
        if inside.is_top:
            raise NotPermitted(f"{name.decode()} is a source of the mount")
        if is_below(to, inside):
            raise Invalid("a directory cannot be moved into itself")
        if there is not None:
            await self._must_be_empty(origin, self._tree.directory(there.ino))
        if to is not directory:
            await self._mark_last(origin, directory, name)
        await self._moving.directory((directory, name), found, (to, newname), there)

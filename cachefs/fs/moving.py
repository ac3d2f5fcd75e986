"""Renaming: at the store a copy and a deletion for each object, here a name that moves with its number.

What the store does not have yet moves for nothing (`Writer.rename`). What it has is copied before it is deleted, so that at
every moment at least one of both names shows it. A directory is all keys below it: all are copied, then all deleted, and a
note in the journal lets the next start finish what a crash has cut short. A copy that fails undoes the others; a deletion
that fails leaves both names and says so. For other nodes none of this is atomic.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import trio

from cachefs.base.errors import CachefsError, NotEmpty, NotFound
from cachefs.fs.dirty_files import check_key
from cachefs.fs.keys import name_in
from cachefs.fs.local_changes import Node, is_below
from cachefs.fs.tree import Directory, Found, Tree, inode_of
from cachefs.fs.tree_queries import object_of
from cachefs.origin import each

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from cachefs.base.names import ObjectId
    from cachefs.fs.files import OpenFiles
    from cachefs.fs.listing import Lister
    from cachefs.fs.local_changes import LocalChanges
    from cachefs.fs.overrides import Overrides
    from cachefs.fs.writer import Writer
    from cachefs.origin import Origin
    from cachefs.origin.protocol import ObjectInfo

log = logging.getLogger(__name__)

COPIES_AT_ONCE = 32
"""Guessed; the origin's gate bounds what is really under way."""

ROWS = 256
"""Names looked at before others have their turn: about half a millisecond. Guessed."""

Place = tuple[Directory, bytes]

Copied = dict[str, tuple["ObjectInfo", "ObjectInfo"]]
"""Original and copy, by the key of the original."""


class Moving:
    def __init__(
        self,
        tree: Tree,
        lister: Lister,
        files: OpenFiles,
        local_changes: LocalChanges,
        kept: Overrides,
        writer: Writer,
    ) -> None:
        self._tree = tree
        self._lister = lister
        self._files = files
        self._local_changes = local_changes
        self._kept = kept
        self._writer = writer

    # -- a file ------------------------------------------------------------------------------------

    async def file(self, place: Place, found: Found, to: Place, there: Found | None) -> None:
        node = self._local_changes.at(*place)
        replaced = self._local_changes.at(*to)
        base = there.row.etag if there is not None and there.row.known else None
        async with AsyncExitStack() as locks:
            for one in (replaced, node):
                if one is not None:
                    await locks.enter_async_context(one.lock)
            if node is None:
                await self._stored(place, found, to, replaced)
            else:
                await self._node(node, found, to, base, replaced)

    async def _stored(self, place: Place, found: Found, to: Place, replaced: Node | None) -> None:
        """A file that no process writes."""
        origin, key = _key(place)
        info: ObjectInfo | None = None

        async def copy() -> None:
            nonlocal info
            info = await origin.copy(key, _key(to)[1], size=found.row.size, etag=found.row.etag)

        await self._instead(replaced, copy)
        assert info is not None
        await self._writer.moved(object_of(*place, found.row), info.version(origin.source))
        await self._moved(place, found, to, info)
        await self._delete(origin, key, place)

    async def _instead(self, replaced: Node | None, work: Callable[[], Awaitable[None]]) -> None:
        """Put another file in the place of `replaced`, which is not given up before it is there."""
        if replaced is None:
            await work()
        else:
            await self._local_changes.remove(replaced, replaced=True, instead=work)

    async def _node(
        self,
        node: Node,
        found: Found,
        to: Place,
        base: str | None,
        replaced: Node | None = None,
        *,
        upload: bool = True,
    ) -> None:
        """A file that a process has open, or that the origin does not have."""
        place = node.directory, node.name
        origin, key = _key(place)
        if node.dirty_file is None:
            await self._stored(place, found, to, replaced)
            return
        dirty_file, over = node.dirty_file, None if replaced is None else replaced.dirty_file
        left = False

        async def rename() -> None:
            nonlocal base, left
            base = base if over is None else over.base
            left = await self._writer.rename(dirty_file, *_key(to), base=base, over=over, upload=upload)

        with self._local_changes.moving(node):
            try:
                await self._instead(replaced, rename)
            except BaseException:
                self._local_changes.look_again(to[0])  # what was asked for may have come about
                raise
            clean = dirty_file.committed is not None
            node.stored = base is not None or clean or left
            node.beneath = node.stored and not clean
            if node.held:
                await self._local_changes.rehold(node, *to)
            else:
                assert dirty_file.committed is not None
                await self._moved(place, found, to, dirty_file.committed)
                await self._local_changes.gone(*place, moved=True)
            if left:
                try:
                    await self._delete(origin, key, place)
                except BaseException:
                    self._local_changes.look_again(place[0])
                    raise

    async def _moved(self, place: Place, found: Found, to: Place, info: ObjectInfo) -> None:
        """Write down that a version is at another path: under its number, with what was set of it, for its readers."""
        files, stable, row = self._files, found.ino, found.row
        node = self._local_changes.at(*place)
        shown = files.shown(stable, row.etag, row.size) if node is None else node.ino
        numbers = {shown, files.own(stable)} if files.fits(files.own(stable), row.etag, row.size) else {shown}
        ino = await self._local_changes.is_file(*to, info)
        self._local_changes.moved(place, to, stable, ino)
        origin = _key(to)[0]
        for number in numbers:
            files.turn(number, info.version(origin.source), info.mtime_ns, reopen=origin)
        self._kept.put(ino, info.etag, self._kept.get(stable, row.etag))

    async def _delete(self, origin: Origin, key: str, place: Place) -> None:
        await origin.delete(key)
        await self._local_changes.gone(*place, moved=True)

    # -- a directory -------------------------------------------------------------------------------

    async def directory(self, place: Place, found: Found, to: Place, *, known: bool) -> None:
        """`to` is no name, or, `known`, an empty directory."""
        origin, source = _key(place)
        prefix, new = source + "/", _key(to)[1] + "/"
        inside = self._tree.directory(found.ino)
        local = {node.key for node in self._local_changes.below(inside) if node.dirty_file is not None}
        objects = [info for info in await keys_below(origin, prefix) if info.key not in local]
        there = {new} if known else {info.key for info in await keys_below(origin, new)}
        if there - {new}:
            raise NotEmpty(f"{new} has something in it by now")
        longest = max((len(key.encode()) for key in (*local, *(info.key for info in objects))), default=0)
        check_key(origin, longest - len(prefix.encode()) + len(new.encode()))
        note = uuid4().hex
        row = {"source": origin.source, "from": prefix, "to": new}
        await self._writer.note(note, row)
        copies = _Copies(origin, prefix, new, self._writer.moved)
        moved: Directory | None = None
        try:
            await copies.make(objects)
            moved = await self._local_changes.directory(*to)
            self._local_changes.look_again(moved)
            went = await self._nodes(inside, moved, copies.made)
            for key in local - went:
                with suppress(NotFound):
                    objects.append(await origin.head(key))
                    await copies.make(objects[-1:])
        except BaseException:
            with trio.CancelScope(shield=True):
                stays = moved is not None and await self._back(moved, inside, copies.undone)
                await copies.undo(objects, there)
                if not known and not stays:
                    await self._local_changes.gone(*to)
                await self._writer.note(note, None)
            raise
        with trio.CancelScope(shield=True):
            kept = await origin.delete_many([info.key for info in objects])
            await self._directory_moved(place, found, to, moved)
            await self._writer.note(note, None)
        for key, error in kept.items():
            if not isinstance(error, NotFound):
                log.warning("%s was copied to %s and is still there: %s", key, new, error)
                raise error

    async def _nodes(self, inside: Directory, moved: Directory, copies: Copied) -> set[str]:
        """What is written or open below goes along, one by one. Returns the keys that need nothing more: what the store got
        and was closed meanwhile is an object like the others."""
        went: set[str] = set()
        for node in self._local_changes.below(inside):
            key = node.key
            async with node.lock:
                if node.removed:
                    went.add(key)
                    continue
                row = self._tree.row(node.directory, node.name)
                if row is None:
                    continue
                if node.dirty_file is not None:
                    to = await self._there(node.directory, inside, moved), node.name
                    await self._node(node, Found(node.stable, False, row, 0.0), to, None, upload=False)
                    went.add(key)
                elif not await self._goes_along(
                    (node.directory, node.name), node.stable, inside, moved, copies
                ):
                    node.removed = True
        for stable in self._files.paths():
            with suppress(NotFound):
                place = self._tree.locate(stable)
                if is_below(place[0], inside) and self._local_changes.at(*place) is None:
                    await self._goes_along(place, stable, inside, moved, copies)
        return went

    async def _goes_along(
        self, place: Place, stable: int, inside: Directory, moved: Directory, copies: Copied
    ) -> bool:
        """Of a file that is open: its readers go on under the new name, if it was copied in the version that they have."""
        row, copied = self._tree.row(*place), copies.get(_key(place)[1])
        if row is None or copied is None or (row.etag, row.size) != (copied[0].etag, copied[0].size):
            return False
        to = await self._there(place[0], inside, moved), place[1]
        await self._moved(place, Found(stable, False, row, 0.0), to, copied[1])
        return True

    async def _there(self, directory: Directory, inside: Directory, moved: Directory) -> Directory:
        """The directory below `moved` that is what `directory` is below `inside`."""
        for name in _path(directory, inside):
            moved = await self._local_changes.directory(moved, name)
        return moved

    async def _back(self, moved: Directory, inside: Directory, copies: Copied) -> bool:
        """What has gone along comes back, as far as the store lets it. Returns whether something stays."""
        try:
            await self._nodes(moved, inside, copies)
        except CachefsError as exc:
            log.warning("what was written below %s stays there: %s", moved.prefix, exc)
        return any(node.dirty_file is not None for node in self._local_changes.below(moved))

    async def _directory_moved(self, place: Place, found: Found, to: Place, moved: Directory) -> None:
        """The directories below keep their numbers, too: programs may work in them."""
        inside = self._tree.directory(found.ino)
        below = await self._below(inside)
        there = [await self._there(one, inside, moved) for one in below]
        for old, new in zip((inside, *below), (moved, *there), strict=True):
            self._kept.put(new.ino, "", self._kept.get(old.ino, ""))
            self._local_changes.renumbered(old.ino, new.ino)
        await self._local_changes.gone(*place, moved=True)
        for directory in below:
            self._lister.cancel(directory)
            self._tree.drop(directory)
        await self._lister.erase(found.ino)
        self._local_changes.look_again(moved)

    async def _below(self, above: Directory) -> list[Directory]:
        """All directories below that are written down: the kernel may know any of them."""
        found: list[Directory] = []
        todo = [above]
        while todo:
            directory, after = todo.pop(), b""
            while rows := self._tree.scan(directory, after, ROWS):
                for mark, row in rows:
                    if mark.endswith(b"/"):
                        todo.append(self._tree.directory(inode_of(directory, name_in(mark), row)))
                        found.append(todo[-1])
                after = rows[-1][0]
                await trio.lowlevel.checkpoint()
        return found

    async def recover(self, origins: Sequence[Origin]) -> None:
        """Finish the renames of directories that a daemon died in: forward, copies first. No caller is there to be told of
        an error; what fails is tried again at the next start."""
        for name, row in self._writer.notes().items():
            origin = next((o for o in origins if _is_of(o, row)), None)
            if origin is None:
                continue
            try:
                await self._finish(origin, row["from"], row["to"])
                await self._writer.note(name, None)
                log.info("finished renaming %s to %s", row["from"], row["to"])
            except CachefsError as exc:
                log.warning("renaming %s to %s is still unfinished: %s", row["from"], row["to"], exc)

    async def _finish(self, origin: Origin, prefix: str, new: str) -> None:
        for dirty_file in self._writer.pending():
            if dirty_file.origin is origin and dirty_file.key.startswith(prefix):
                key = new + dirty_file.key.removeprefix(prefix)
                await self._writer.rename(dirty_file, origin, key, base=None, upload=False)
        # What is under the new name already is of this rename, or newer: the new name was free.
        there = {info.key for info in await keys_below(origin, new)}
        there |= {dirty_file.key for dirty_file in self._writer.pending() if dirty_file.origin is origin}
        objects = await keys_below(origin, prefix)

        copies = _Copies(origin, prefix, new, self._writer.moved)
        await copies.make([info for info in objects if copies.to(info) not in there])
        for error in (await origin.delete_many([info.key for info in objects])).values():
            raise error


class _Copies:
    """Of objects below one prefix, to where they are to be. `moved` is told that the cache may take one for the other."""

    def __init__(
        self, origin: Origin, prefix: str, new: str, moved: Callable[[ObjectId, ObjectId], Awaitable[None]]
    ) -> None:
        self._origin, self._prefix, self._new, self._moved = origin, prefix, new, moved
        self._made: list[tuple[ObjectInfo, ObjectInfo]] = []

    @property
    def made(self) -> Copied:
        return {info.key: (info, made) for info, made in self._made}

    @property
    def undone(self) -> Copied:
        """As if the copies were the originals."""
        return {made.key: (made, info) for info, made in self._made}

    def to(self, info: ObjectInfo) -> str:
        return self._new + info.key.removeprefix(self._prefix)

    async def make(self, objects: Sequence[ObjectInfo]) -> None:
        """After a failure no other is begun, but what is under way is waited for: it would land unseen."""
        failed: list[CachefsError] = []

        async def copy(info: ObjectInfo) -> None:
            if failed:
                return
            try:
                made = await self._origin.copy(info.key, self.to(info), size=info.size, etag=info.etag)
            except CachefsError as exc:
                failed.append(exc)
                return
            self._made.append((info, made))
            await self._tell(info, made)

        await each(copy, objects, COPIES_AT_ONCE)
        if failed:
            raise failed[0]

    async def undo(self, objects: Sequence[ObjectInfo], but: set[str]) -> None:
        """Of all these nothing is there, whether we were told of it or not, but what was there before."""
        for info, made in self._made:
            await self._tell(made, info)
        keys = [self.to(info) for info in objects]
        for key, error in (await self._origin.delete_many([key for key in keys if key not in but])).items():
            log.warning("%s was made by a rename that failed, and cannot be removed: %s", key, error)

    async def _tell(self, old: ObjectInfo, new: ObjectInfo) -> None:
        source = self._origin.source
        await self._moved(old.version(source), new.version(source))


async def keys_below(origin: Origin, prefix: str) -> list[ObjectInfo]:
    """All objects whose keys begin with `prefix`, those that no path can name included, by fresh listings."""
    found: list[ObjectInfo] = []
    prefixes = [prefix]

    async def one(below: str) -> None:
        token: str | None = None
        while True:
            try:
                page = await origin.list_page(below, token=token)
            except NotFound:
                return  # a store with real directories says it this way
            found.extend(page.objects)
            more.extend(page.prefixes)
            token = page.next_token
            if token is None:
                return

    while prefixes:
        more: list[str] = []
        await each(one, prefixes, COPIES_AT_ONCE)
        prefixes = more
    return found


def _key(place: Place) -> tuple[Origin, str]:
    directory, name = place
    assert directory.origin is not None
    return directory.origin, directory.prefix + name.decode()


def _path(directory: Directory, above: Directory) -> list[bytes]:
    """The names that lead from `above` down to `directory`."""
    names: list[bytes] = []
    while directory is not above:
        names.append(directory.mark[:-1])
        assert directory.parent is not None
        directory = directory.parent
    return names[::-1]


def _is_of(origin: Origin, row: dict[str, Any]) -> bool:
    return origin.source == row["source"] and all(
        row[end].startswith(origin.prefix) for end in ("from", "to")
    )

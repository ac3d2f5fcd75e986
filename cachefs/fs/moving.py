"""Renaming: at the store a copy and a deletion for each object, here a name that moves with its number.

What the store does not have yet moves for nothing (`Writer.rename`). What it has is copied before it is deleted, so that at
every moment at least one of both names shows it. A directory is all keys below it: all are copied, then all deleted, and a
note in the journal lets the next start finish what a crash has cut short. A copy that fails undoes the others; a deletion
that fails leaves both names and says so. For other nodes none of this is atomic.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import trio

from cachefs.base.errors import CachefsError, NotEmpty, NotFound
from cachefs.fs.dirty_files import check_key
from cachefs.fs.freshness import EVERY_NAME
from cachefs.fs.inodes import LOW_BITS
from cachefs.fs.keys import mark_of_directory, name_in
from cachefs.fs.local_changes import Node
from cachefs.fs.tree import Directory, Found, Tree, inode_of
from cachefs.fs.tree_queries import object_of
from cachefs.origin import each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cachefs.base.names import ObjectId
    from cachefs.fs.attributes import Attributes
    from cachefs.fs.files import OpenFiles
    from cachefs.fs.listing import Lister
    from cachefs.fs.local_changes import LocalChanges
    from cachefs.fs.overrides import Overrides
    from cachefs.fs.rows import Row
    from cachefs.fs.writer import DirtyFile, Writer
    from cachefs.origin import Origin
    from cachefs.origin.protocol import ObjectInfo

log = logging.getLogger(__name__)

COPIES_AT_ONCE = 32
"""Guessed; the origin's gate bounds what is really under way."""

ROWS = 256
"""Names looked at before others have their turn: about half a millisecond. Guessed."""

Place = tuple[Directory, bytes]

Find = Callable[["Origin", str], Awaitable[Place]]

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
        shape: Callable[[int, bool, Row], Attributes],
    ) -> None:
        self._tree = tree
        self._shape = shape
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
        async with self._local_changes.applying():
            self._moved(place, found, to, info)
            self._local_changes.written(*place, False, moved=True)
        await self._delete(origin, key, place)
        self._kept.put(found.ino, "", {})

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

        async with AsyncExitStack() as stack:
            stack.enter_context(self._local_changes.moving(node))  # first: its dirty file stays meanwhile
            note = await self._note_older(dirty_file, to)
            if note is not None:
                stack.push_async_callback(self._remove_note, note)
            try:
                await self._instead(replaced, rename)
            except BaseException:
                self._local_changes.look_again(to[0])  # what was asked for may have come about
                raise
            clean = dirty_file.committed is not None
            node.stored = base is not None or clean or left
            node.beneath = node.stored and not clean
            if node.held:
                async with self._local_changes.applying():
                    self._reheld(node, to)
            else:
                assert dirty_file.committed is not None
                row = self._tree.row(*place) or found.row  # it may have been stored since it was found
                async with self._local_changes.applying():
                    self._moved(place, found._replace(row=row), to, dirty_file.committed)
                    self._local_changes.written(*place, False, moved=True)
            if left:
                await self._delete(origin, key, place)
            if not node.held:
                self._kept.put(found.ino, "", {})

    async def _note_older(self, dirty_file: DirtyFile, to: Place) -> str | None:
        """Note for the next start which version goes from the old name, if a crash brings the file back under the new one.

        Without an acknowledged content nothing comes back, and the older version must stay. Returns the note's name."""
        if not (dirty_file.acknowledged and dirty_file.dirty):
            return None
        versions, tokens = dirty_file.known()
        if not versions and not tokens:
            return None
        name = uuid4().hex
        row = {"source": dirty_file.origin.source, "from": dirty_file.key, "to": _key(to)[1]}
        await self._writer.note(name, {**row, "versions": versions, "tokens": tokens})
        return name

    async def _remove_note(self, note: str) -> None:
        with trio.CancelScope(shield=True):
            await self._writer.note(note, None)

    def _reheld(self, node: Node, to: Place) -> None:
        """What is held is shown under another name, with what was set of it; while `applying`."""
        self._kept.put(node.stable, "", {})
        node.attrs["ctime_ns"] = self._local_changes.now_ns()
        self._local_changes.reheld(node, *to)
        self._kept.put(node.stable, node.row.etag, node.attrs)

    def _moved(self, place: Place, found: Found, to: Place, info: ObjectInfo) -> None:
        """Write down that a version is at another path: under its number, with what was set of it, for its readers; while
        `applying`."""
        files, stable, row = self._files, found.ino, found.row
        kept = _of_copy(self._kept.get(stable, row.etag), row.mtime_ns, info)
        node = self._local_changes.at(*place)
        shown = files.shown(stable, row.etag, row.size) if node is None else node.ino
        numbers = {shown, files.own(stable)} if files.fits(files.own(stable), row.etag, row.size) else {shown}
        ino = self._local_changes.written(*to, info)
        self._local_changes.moved(place, to, stable, ino)
        origin = _key(to)[0]
        for number in numbers:
            files.turn(number, info.version(origin.source), info.mtime_ns, reopen=origin)
        self._kept.put(ino, info.etag, {**kept, "ctime_ns": self._local_changes.now_ns()})

    async def _delete(self, origin: Origin, key: str, place: Place) -> None:
        """Nothing shows the old name meanwhile: its file has the new one."""
        self._local_changes.hide(*place)
        try:
            await origin.delete(key)
            await self._local_changes.gone(*place, moved=True)
        except BaseException:
            self._local_changes.look_again(place[0])
            raise
        finally:
            self._local_changes.unhide(*place)

    # -- a directory -------------------------------------------------------------------------------

    def removed(self, place: Place, found: Found) -> None:
        """The name of a directory is gone, while `applying`. Processes may be in it."""
        inside = self._tree.directory(found.ino)
        shown = replace(self._shape(self._files.own(found.ino), True, found.row), nlink=0)
        self._local_changes.written(*place, False)
        self._files.directory_removed(inside, shown)

    async def directory(self, place: Place, found: Found, to: Place, replaced: Found | None) -> None:
        """`to` is no name, or that of the empty directory that is `replaced`.

        It is one step for all processes on this node: the new name stays as it was until all is there, then both names
        change, and the old one is gone while its objects are deleted."""
        origin, source = _key(place)
        prefix, new = source + "/", _key(to)[1] + "/"
        inside = self._tree.directory(found.ino)
        local = {node.key for node in self._local_changes.below(inside) if node.dirty_file is not None}
        objects = [info for info in await keys_below(origin, prefix) if info.key not in local]
        there = {new} if replaced else {info.key for info in await keys_below(origin, new)}
        if there - {new}:
            raise NotEmpty(f"{new} has something in it by now")
        longest = max((len(key.encode()) for key in (*local, *(info.key for info in objects))), default=0)
        check_key(origin, longest - len(prefix.encode()) + len(new.encode()))
        hidden = (await self._local_changes.directory(*to), EVERY_NAME) if replaced else to
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
            for key in local - {node.key for node, _ in sent}:  # it is the origin's alone by now
                with suppress(NotFound):
                    objects.append(await origin.head(key))
                    await copies.make(objects[-1:])
            below = await self._below(inside)
            async with self._local_changes.applying():
                if replaced is not None:
                    self.removed(to, replaced)
                self._switch(place, (inside, *below), to, hidden, sent, copies)
                switched = True
            keys = [info.key for info in objects]
            keys += [prefix + _key_of(node).removeprefix(new) for node, left in sent if left]
            moving.close()
            with trio.CancelScope(shield=True):
                await self._lister.erase(found.ino)
                if replaced is not None:
                    await self._lister.erase(replaced.ino)
                kept = await origin.delete_many(keys)
        except BaseException:
            with trio.CancelScope(shield=True):
                if not switched:
                    stays = await self._send_back(inside, sent, to)
                    await copies.undo(objects, there)
                    if not replaced and not stays:
                        await self._local_changes.gone(*to)
                await self._writer.note(note, None)
            raise
        finally:
            moving.close()
            self._local_changes.unhide(*hidden)
            self._local_changes.unhide(*place)
        await self._remove_note(note)
        for key, error in kept.items():
            if not isinstance(error, NotFound):
                log.warning("%s was copied to %s and is still there: %s", key, new, error)
                raise error

    async def _send(
        self, inside: Directory, copies: _Copies, sent: list[tuple[Node, bool]], moving: ExitStack
    ) -> None:
        """Dirty files go to their new keys, one by one; their names stay until the switch. `sent` is those that went, and
        whether the origin has an older version under the old key."""
        for node in self._local_changes.below(inside):
            async with node.lock:
                dirty_file = node.dirty_file
                if node.removed or dirty_file is None or self._tree.row(node.directory, node.name) is None:
                    continue
                moving.enter_context(self._local_changes.moving(node))
                key = copies.to(node.key)
                left = await self._writer.rename(dirty_file, node.origin, key, base=None, upload=False)
                sent.append((node, left))

    async def _send_back(self, inside: Directory, sent: list[tuple[Node, bool]], to: Place) -> bool:
        """What has gone to its new key comes back, as far as the store lets it. What cannot is shown where it is; returns
        whether anything is."""
        stays = False
        for node, _ in reversed(sent):
            dirty_file, gone = node.dirty_file, _key_of(node)
            assert dirty_file is not None
            try:
                if await self._writer.rename(dirty_file, node.origin, node.key, base=None, upload=False):
                    await node.origin.delete(gone)
            except CachefsError as exc:
                log.warning("what was written to %s stays there: %s", gone, exc)
                stays = True
                if node.held:
                    async with self._local_changes.applying():
                        moved = self._local_changes.below_as(*to)
                        self._reheld(node, (self._there(node.directory, inside, moved), node.name))
        return stays

    def _switch(
        self,
        place: Place,
        directories: Sequence[Directory],
        to: Place,
        hidden: Place,
        sent: Sequence[tuple[Node, bool]],
        copies: _Copies,
    ) -> None:
        """All names change, in one step, while `applying`. `directories` are the one that moves and those below it."""
        local_changes, inside = self._local_changes, directories[0]
        local_changes.unhide(*hidden)
        moved = local_changes.below_as(*to)
        there = {directory.number: self._there(directory, inside, moved) for directory in directories}
        for node, left in sent:
            self._goes_along(node, left, self._there(node.directory, inside, moved))
        for node in local_changes.below(inside):  # open, and never written
            at = node.directory, node.name
            if not self._read_on(at, self._there(node.directory, inside, moved), copies.made):
                node.removed = True
        for stable in self._files.paths():
            if stable >> LOW_BITS in there:
                with suppress(NotFound):
                    at = self._tree.locate(stable)
                    if local_changes.at(*at) is None:
                        self._read_on(at, there[at[0].number], copies.made)
        self._keep(directories, there, copies.made)
        for directory in directories:
            self._files.directory_moved(directory.ino, there[directory.number].ino)
        local_changes.written(*place, False, moved=True)
        local_changes.hide(*place)
        for directory in directories:
            self._lister.cancel(directory)
            self._tree.drop(directory)
        local_changes.look_again(moved)

    def _goes_along(self, node: Node, left: bool, to: Directory) -> None:
        """A dirty file whose key has changed already."""
        place, dirty_file = (node.directory, node.name), node.dirty_file
        assert dirty_file is not None
        clean = dirty_file.committed is not None
        node.stored = clean or left
        node.beneath = node.stored and not clean
        if node.held:
            self._reheld(node, (to, node.name))
            return
        row = self._tree.row(*place)
        assert dirty_file.committed is not None
        if row is not None:
            found = Found(node.stable, False, row, 0.0)
            self._moved(place, found, (to, node.name), dirty_file.committed)
            self._kept.put(found.ino, "", {})
            self._local_changes.written(*place, False, moved=True)

    def _read_on(self, place: Place, to: Directory, copies: Copied) -> bool:
        """Of a file that is open: its readers go on under the new name, if it was copied in the version that they have. The
        old name goes at once: a handle of a file that had it before leads here, too, and must not find it again."""
        row, copied = self._tree.row(*place), copies.get(_key(place)[1])
        if row is None or copied is None or (row.etag, row.size) != (copied[0].etag, copied[0].size):
            return False
        stable = inode_of(*place, row)
        self._moved(place, Found(stable, False, row, 0.0), (to, place[1]), copied[1])
        self._kept.put(stable, "", {})
        self._local_changes.written(*place, False, moved=True)
        return True

    def _keep(self, directories: Sequence[Directory], there: dict[int, Directory], copies: Copied) -> None:
        """What was set of directories, and of the files in them that were copied."""
        changes: dict[int, tuple[str, dict[str, Any]]] = {}
        times = self._local_changes.times
        for directory in directories:
            new = there[directory.number]
            for ino, etag, row in self._kept.within(directory.number):
                with suppress(NotFound):
                    name = self._tree.locate(ino)[1]
                    copied = copies.get(directory.prefix + name.decode())
                    if copied is not None and copied[0].etag == etag:
                        row = _of_copy(row, copied[0].mtime_ns, copied[1])
                        # Its name is written down: the next rename finds it by its number.
                        number = self._local_changes.written(new, name, copied[1])
                        changes |= {ino: ("", {}), number: (copied[1].etag, row)}
            times.pop(new.ino, None)  # nothing in it has changed
            if (changed := times.pop(directory.ino, None)) is not None:
                times[new.ino] = changed
            kept = self._kept.get(directory.ino, "")
            if directory is directories[0]:
                kept["ctime_ns"] = self._local_changes.now_ns()
            changes |= {directory.ino: ("", {}), new.ino: ("", kept)}
        self._kept.put_many(changes)

    def _there(self, directory: Directory, inside: Directory, moved: Directory) -> Directory:
        """The directory below `moved` that is what `directory` is below `inside`; while `applying`."""
        for name in _path(directory, inside):
            moved = self._local_changes.below_as(moved, name)
        return moved

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

    async def recover(self, origins: Sequence[Origin], find: Find) -> None:
        """Finish the renames that a daemon died in: of directories forward, copies first. No caller is there to be told of
        an error; what fails is tried again at the next start. `find` gives the place of a key."""
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

    async def _remove_older(self, origin: Origin, row: dict[str, Any], find: Find) -> None:
        """Remove what a renamed file has left under its old name, if it is under the new one, here or at the origin."""
        there = {dirty_file.key for dirty_file in self._writer.pending() if dirty_file.origin is origin}
        if row["from"] in there:
            return  # it had not moved yet
        try:
            if row["to"] not in there:
                await origin.head(row["to"])
            older, token = await origin.look(row["from"])
        except NotFound:
            return
        if older.etag in row["versions"] or token in row["tokens"]:
            place = await find(origin, row["from"])
            await self._delete(origin, row["from"], place)
            log.info("removed the older version of %s, which was renamed to %s", row["from"], row["to"])

    async def _finish(self, origin: Origin, prefix: str, new: str, find: Find) -> None:
        for dirty_file in self._writer.pending():
            if dirty_file.origin is origin and dirty_file.key.startswith(prefix):
                key = new + dirty_file.key.removeprefix(prefix)
                await self._writer.rename(dirty_file, origin, key, base=None, upload=False)
        # What is under the new name already is of this rename, or newer: the new name was free.
        before = {info.key: info for info in await keys_below(origin, new)}
        there = before.keys() | {
            dirty_file.key for dirty_file in self._writer.pending() if dirty_file.origin is origin
        }
        objects = await keys_below(origin, prefix)

        copies = _Copies(origin, prefix, new, self._writer.moved)
        await copies.make([info for info in objects if copies.to(info.key) not in there])
        both = copies.made | {
            info.key: (info, before[copies.to(info.key)]) for info in objects if copies.to(info.key) in before
        }
        await self._keep_of(await find(origin, prefix[:-1]), await find(origin, new[:-1]), both)
        for error in (await origin.delete_many([info.key for info in objects])).values():
            raise error

    async def _keep_of(self, place: Place, to: Place, copies: Copied) -> None:
        """What was set below a directory, if it did not go along before the crash."""
        if self._tree.row(place[0], mark_of_directory(place[1])) is None:
            return
        inside = await self._local_changes.directory(*place)
        directories = inside, *await self._below(inside)
        async with self._local_changes.applying():
            moved = self._local_changes.below_as(*to)
            there = {one.number: self._there(one, inside, moved) for one in directories}
            self._keep(directories, there, copies)


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

    def to(self, key: str) -> str:
        return self._new + key.removeprefix(self._prefix)

    async def make(self, objects: Sequence[ObjectInfo]) -> None:
        """After a failure no other is begun, but what is under way is waited for: it would land unseen."""
        failed: list[CachefsError] = []

        async def copy(info: ObjectInfo) -> None:
            if failed:
                return
            try:
                made = await self._origin.copy(info.key, self.to(info.key), size=info.size, etag=info.etag)
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
        keys = [self.to(info.key) for info in objects]
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


def _of_copy(kept: dict[str, Any], mtime_ns: int, made: ObjectInfo) -> dict[str, Any]:
    """What is kept of a copy of something that was set so: it shows the time of the original."""
    mtime_ns = kept.get("mtime_ns", mtime_ns)
    return kept if mtime_ns == made.mtime_ns else {"atime_ns": mtime_ns, **kept, "mtime_ns": mtime_ns}


def _key_of(node: Node) -> str:
    """Where the dirty file of a node is at the origin, or goes to."""
    assert node.dirty_file is not None
    return node.dirty_file.key


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

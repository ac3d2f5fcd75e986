"""Queries of the tree for prefetch and warm-up: a file by its path, and the files of its directory.

`known`, `version`, `siblings` and `count_files` read the rows, however old, and make no request. Their callers read
conditionally, so an outdated row costs a refused GET and never a wrong byte. `resolve` and `walk` ask the origin as a lookup
and an `ls -R` do, and record the answers in the tree.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import trio

from cachefs.base.errors import IsADirectory, NotFound, ObjectChanged
from cachefs.base.names import ObjectId
from cachefs.fs.directories import CHUNK, DirectoryHandle
from cachefs.fs.keys import nameable
from cachefs.fs.rows import NO_ROW, Row
from cachefs.fs.tree import Directory, Found

if TYPE_CHECKING:
    from cachefs.fs.directories import DirectoryReader
    from cachefs.fs.freshness import Freshness
    from cachefs.fs.lookup import Looker
    from cachefs.fs.tree import Tree
    from cachefs.origin import Origin


VERSIONS = 4096
"""Versions that are named again without being hashed again, about 400 bytes each: prefetch names the files of a directory
before their opens do. A bound of memory: 1.6 MB."""

_version = lru_cache(VERSIONS)(ObjectId)


class Sibling(NamedTuple):
    """A file of a directory. `mark` is its mark there (`cachefs.fs.keys`)."""

    mark: bytes
    ino: int
    origin: Origin
    object: ObjectId


class WalkedFile(NamedTuple):
    """A file that `walk` met. `path` is relative to the mount."""

    path: str
    origin: Origin
    object: ObjectId


@dataclass(eq=False, repr=False)
class TreeQueries:
    _tree: Tree
    _freshness: Freshness
    _looker: Looker
    _directories: DirectoryReader

    # -- from the rows -----------------------------------------------------------------------------

    def knows(self, origin: Origin) -> bool:
        """True if the tree has any names of an origin."""
        tops = (top for top in self._tree.tops() if top.origin is origin)
        return any(top.listed.complete or self._tree.scan(top, b"", 1) for top in tops)

    def known(self, path: str) -> tuple[Origin, ObjectId] | None:
        """The origin and version of the file at `path`, from the rows; None if they have no such file."""
        directory = self._tree.root
        names = components(path)
        for index, name in enumerate(names):
            if not nameable(name):
                return None
            as_dir, as_file = self._tree.find(directory, name)
            if as_dir is not None:
                directory = self._tree.directory(as_dir.ino)
            elif as_file is not None and as_file.known and directory.origin and index == len(names) - 1:
                return directory.origin, object_of(directory, name, as_file)
            else:
                return None
        return None

    def version(self, ino: int) -> ObjectId | None:
        """The version of the file `ino`, from its row; None if the version is not known, or `ino` is no file."""
        present = self._tree.present(ino)
        if present is None or present[1].endswith(b"/") or not present[2].known:
            return None
        return object_of(*present)

    def siblings(self, ino: int, after: bytes, limit: int) -> tuple[list[Sibling], bytes | None]:
        """The files of the directory that holds the file `ino`, behind the mark `after` (b"": from the beginning), in the
        order of the listing, as far as it has come. Returns them, and the mark to go on from (None at the end). There are at
        most `limit`, and perhaps none although more follow, because each call passes at most `limit` rows."""
        directory, _ = self._tree.locate(ino)
        rows, end = self._known_rows(directory, after, min(limit, CHUNK))
        assert directory.origin is not None or not rows
        return [
            Sibling(mark, row.ino, directory.origin, object_of(directory, mark, row))  # type: ignore[arg-type]
            for mark, row in rows
        ], end

    async def count_files(self, ino: int, largest: int) -> tuple[int, int] | None:
        """(files, bytes) of the files of at most `largest` bytes in the directory that holds the file `ino`; None while its
        listing is not complete. Reads every row, a slice at a time."""
        directory, _ = self._tree.locate(ino)
        whole = self._freshness.whole(directory)
        after: bytes | None = b"" if whole is not None else None
        files = size = 0
        while after is not None:
            rows, after = self._known_rows(directory, after, CHUNK)
            for _, row in rows:
                if row.size <= largest:
                    files += 1
                    size += row.size
            await trio.lowlevel.checkpoint()
        return (files, size) if whole is not None and self._freshness.whole(directory) == whole else None

    def _known_rows(
        self, directory: Directory, after: bytes, limit: int
    ) -> tuple[list[tuple[bytes, Row]], bytes | None]:
        """The files that a listing shows, among the next `limit` rows, and the mark to go on from (None at the end)."""
        whole, listing = self._freshness.whole(directory), directory.listing
        if whole is not None:
            generation, listing = whole[0], None
        elif listing is not None and self._freshness.in_force(directory, listing.epoch):
            generation = listing.generation
        else:
            return [], after
        rows = self._tree.scan(directory, after, limit)
        if listing is not None:
            rows = listing.passed(rows)
            end: bytes | None = rows[-1][0] if rows else after
        else:
            end = rows[-1][0] if len(rows) == limit else None
        shown = self._tree.shown(directory, rows, generation)
        return [(mark, row) for mark, row in shown if row.known and not mark.endswith(b"/")], end

    # -- asking the origin --------------------------------------------------------------------------

    async def resolve(self, path: str) -> tuple[Origin, ObjectId] | None:
        """The origin and version of the file at `path`; None if it does not exist. Raises `IsADirectory`, and what a lookup
        raises."""
        directory, found = await self._find(path)
        if found is None:
            return None
        if found.is_dir:
            raise IsADirectory(f"{path or '/'} is a directory")
        assert directory.origin is not None
        return directory.origin, object_of(directory, components(path)[-1], found.row)

    async def look_again(self, path: str, version: ObjectId) -> tuple[Origin, ObjectId] | None:
        """As `resolve`, for a file of which the origin has not `version` any more."""
        directory, found = await self._find(path)
        if found is None or found.is_dir:
            return None
        if object_of(directory, components(path)[-1], found.row) == version:
            self._freshness.doubt(found.ino)
        return await self.resolve(path)

    async def walk(self, path: str) -> AsyncGenerator[WalkedFile, None]:
        """Yield the file at `path`, or all files below it in the order of the listings. Holds one slice of each directory on
        the way down. Raises `NotFound`, and what reading a directory raises."""
        names = components(path)
        directory, found = await self._find(path)
        if found is None:
            raise NotFound(f"no such path: {path}")
        if not found.is_dir:
            assert directory.origin is not None
            yield WalkedFile(_text(names), directory.origin, object_of(directory, names[-1], found.row))
            return
        async with aclosing(self._below(self._tree.directory(found.ino), names)) as files:
            async for file in files:
                yield file

    async def _find(self, path: str) -> tuple[Directory, Found | None]:
        """The directory that holds the last name of `path`, and the lookup of that name (None: it does not exist)."""
        directory = self._tree.root
        found = Found(directory.ino, True, NO_ROW, 0.0)
        for name in components(path):
            if not found.is_dir:
                return directory, None
            directory = self._tree.directory(found.ino)
            answer = await self._looker.look(directory, name)
            if not isinstance(answer, Found):
                return directory, None
            found = answer
        return directory, found

    async def _below(self, directory: Directory, above: list[bytes]) -> AsyncGenerator[WalkedFile, None]:
        handle = DirectoryHandle(directory.ino, directory)
        offset = 0
        while entries := await self._directories.read(handle, offset, CHUNK):
            for entry in entries:
                path = [*above, entry.name]
                if entry.attributes.is_dir:
                    try:
                        below = self._tree.directory(entry.attributes.ino)
                    except ObjectChanged:
                        continue  # it was removed or replaced while this waited
                    async with aclosing(self._below(below, path)) as files:
                        async for file in files:
                            yield file
                    continue
                row = self._tree.row(directory, entry.name)
                if row is None or not row.known:
                    answer = await self._looker.look(directory, entry.name)
                    row = answer.row if isinstance(answer, Found) and not answer.is_dir else None
                if row is not None and directory.origin is not None:
                    yield WalkedFile(_text(path), directory.origin, object_of(directory, entry.name, row))
            offset = entries[-1].next_offset


def components(path: str) -> list[bytes]:
    """The names on the way to `path`, which is relative to the mount."""
    return [name for name in os.fsencode(path).split(b"/") if name not in (b"", b".")]


def object_of(directory: Directory, mark: bytes, row: Row) -> ObjectId:
    """The version that a file's row has."""
    assert directory.origin is not None
    return _version(directory.origin.source, directory.prefix + mark.decode(), row.etag, row.size)


def _text(names: list[bytes]) -> str:
    return os.fsdecode(b"/".join(names))

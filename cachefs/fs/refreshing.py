"""Refreshes: the answers and listings of a path, and of everything below it, are not used any more.

A refresh makes no request. One number invalidates everything below a directory (`Tree.refresh`). The kernel is told the
names directly in the directory, and then drops everything below them. These are the names that exist, and the names that
the kernel has cached as missing, which only this module remembers.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cachefs.base.errors import CachefsError, NameTooLong, NotFound
from cachefs.fs.freshness import REMEMBERED
from cachefs.fs.keys import MAX_NAME, name_in, nameable
from cachefs.fs.pages import write_pinned
from cachefs.fs.tree import Directory
from cachefs.fs.tree_queries import components

if TYPE_CHECKING:
    from cachefs.fs.freshness import Freshness
    from cachefs.fs.listing import Lister
    from cachefs.fs.tree import Tree

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Refreshing:
    """Makes refreshes. `_forget` drops what is remembered of open files. `_tell` has the kernel drop its entry of a name
    (directory, ino, name), where ino 0 means none. `_notified` waits until these notifications are sent."""

    _tree: Tree
    _freshness: Freshness
    _lister: Lister
    _forget: Callable[[], None]
    _tell: Callable[[Directory, int, bytes], None]
    _notified: Callable[[], Awaitable[None]]
    _absent: dict[tuple[int, bytes], float] = field(default_factory=dict)  # until when the kernel caches it

    def absent(self, directory: Directory, name: bytes, seconds: float) -> float:
        """Note that the kernel is told that a name is missing. Returns for how long it may cache that: `seconds`, or 0 if
        too many such names are remembered."""
        if not seconds:
            return 0.0
        place, now = (directory.ino, name), self._tree.clock()
        self._absent.pop(place, None)
        if len(self._absent) >= REMEMBERED:
            oldest = next(iter(self._absent))
            if self._absent[oldest] > now:
                return 0.0
            del self._absent[oldest]
        self._absent[place] = now + seconds
        return seconds

    async def path(self, path: str) -> None:
        """Refresh a path relative to the mount. Raises `NameTooLong`, and `NotFound` for what cannot be a path."""
        directory = self._tree.root
        names = components(path)
        for index, name in enumerate(names):
            if len(name) > MAX_NAME:
                raise NameTooLong(f"a name of {len(name)} bytes")
            if not nameable(name):
                raise NotFound(f"no such path: {path}")
            as_dir, as_file = self._tree.find(directory, name)
            if as_dir is None or index == len(names) - 1:
                if as_dir is not None:
                    await self.name(directory, name + b"/", as_dir.ino)
                elif as_file is not None:
                    await self.name(directory, name, as_file.ino)
                else:
                    # It has no row. It may be known as missing, by an answer or by the listing of this directory.
                    self._freshness.forget_answers()
                    await self._invalidate(directory)
                    self._tell(directory, 0, name)
                return
            directory = self._tree.directory(as_dir.ino)
        await self.directory(directory)

    async def name(self, directory: Directory, mark: bytes, ino: int) -> None:
        """Refresh the file or directory `ino` that a mark leads to."""
        self._forget()
        if directory.origin is not None:
            self._freshness.doubt(ino)
        if mark.endswith(b"/"):
            await self.directory(self._tree.directory(ino))
        else:
            self._tell(directory, ino, mark)

    async def directory(self, directory: Directory) -> None:
        """Refresh a directory and everything below it."""
        self._freshness.forget_answers()
        await self._invalidate(directory)
        for place in [place for place in self._absent if place[0] == directory.ino]:
            del self._absent[place]
            self._tell(directory, 0, place[1])
        await self._notified()
        after: bytes | None = b""
        while after is not None:
            rows = self._tree.scan(directory, after, 1000)
            for mark, row in rows:
                name = name_in(mark)
                self._tell(directory, row.ino, name)
            after = rows[-1][0] if len(rows) == 1000 else None
            await self._notified()

    def renew(self) -> None:
        """Go on with an empty database, because the one of names was cut short and each read of it fails. Attribute
        overrides (modes, owners, times) are lost, as when a start drops the database. Never raises."""
        try:
            if not self._tree.database.stored.renew():
                return
            self._forget()
            self._freshness.forget_answers()
            for directory in self._tree.in_use():
                self._lister.cancel(directory)
            self._tree.renew()
            for (number, name), pending in self._freshness.pending.items():
                holder = self._tree.known(number)
                if holder is not None:
                    write_pinned(self._tree.database, holder, name, pending.found(0.0).row)
        except CachefsError as exc:
            log.warning("%s", exc)

    async def _invalidate(self, directory: Directory) -> None:
        self._forget()
        self._lister.cancel(directory)
        puts = self._tree.refresh(directory)
        async with self._tree.writing:
            self._tree.database.write(puts)

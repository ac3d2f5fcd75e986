"""Locks on names: no two changes of one name run at a time, and none below a directory that is being moved.

A change claims all names that it will touch in one step, before it reads any of them, so there is no deadlock. Conflicting
claims are granted in the order in which they were made. Readers of names claim nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from cachefs.fs.keys import name_in
from cachefs.fs.tree import Directory

T = TypeVar("T")

Place = tuple[Directory, bytes]
"""The directory and the name of a file or directory."""


class _Claim:
    """A claim of `names`, each (inode of its directory, name). A claim with `trees` also excludes claims below its names,
    even if a name becomes a directory only later."""

    __slots__ = ("directories", "granted", "names", "trees")

    def __init__(self, names: tuple[Place, ...], trees: bool) -> None:
        self.names = {(directory.ino, name) for directory, name in names}
        self.directories = [directory for directory, _ in names]
        self.trees = trees
        self.granted: trio.Event | None = None

    @property
    def above(self) -> set[tuple[int, bytes]]:
        """The names of all directories above. Computed each time, because a rename may change them."""
        names = set()
        for directory in self.directories:
            while directory.parent is not None:
                names.add((directory.parent.ino, name_in(directory.mark)))
                directory = directory.parent
        return names

    def conflicts(self, other: _Claim) -> bool:
        return not (
            self.names.isdisjoint(other.names)
            and (not self.trees or self.names.isdisjoint(other.above))
            and (not other.trees or other.names.isdisjoint(self.above))
        )


class NameLocks:
    def __init__(self) -> None:
        self._held: list[_Claim] = []
        self._waiting: list[_Claim] = []

    def __len__(self) -> int:
        """Claims that are held or waited for."""
        return len(self._held) + len(self._waiting)

    def free(self, *names: Place) -> bool:
        """True if a claim of the names would not wait."""
        return not len(self) or self._is_free(_Claim(names, False))

    def _is_free(self, claim: _Claim) -> bool:
        return not any(claim.conflicts(other) for other in (*self._held, *self._waiting))

    @asynccontextmanager
    async def claimed(self, *names: Place, trees: bool = False) -> AsyncIterator[None]:
        """Hold a claim of the names. Look them up inside the block, because they may have changed during the wait for it."""
        claim = _Claim(names, trees)
        if self._is_free(claim):
            self._held.append(claim)
        else:
            await self._wait(claim)
        try:
            yield
        finally:
            self._held.remove(claim)
            self._grant()

    async def changing(
        self,
        places: Callable[[], Sequence[Place]],
        change: Callable[..., Awaitable[T]],
        *,
        trees: bool = False,
    ) -> T:
        """Await `change` while no other change of its names runs nor, with `trees`, of names below them.

        `places` returns the names. It is called again once they are claimed, because a rename may have moved a file or a
        directory during the wait. `change` is called with the directory and the name of each, as separate arguments."""
        while True:
            names = places()
            async with self.claimed(*names, trees=trees):
                if names == places():
                    return await change(*(part for name in names for part in name))

    async def _wait(self, claim: _Claim) -> None:
        claim.granted = trio.Event()
        self._waiting.append(claim)
        try:
            await claim.granted.wait()
        except trio.Cancelled:
            (self._held if claim in self._held else self._waiting).remove(claim)
            self._grant()
            raise

    def _grant(self) -> None:
        before = list(self._held)
        for claim in list(self._waiting):
            if not any(claim.conflicts(other) for other in before):
                self._waiting.remove(claim)
                self._held.append(claim)
                assert claim.granted is not None
                claim.granted.set()
            before.append(claim)

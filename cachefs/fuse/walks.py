"""Paths that the kernel walks once more, because the file that it had looked up had lost its name before the open or stat.

After ESTALE the kernel asks for each name again, once. Where a name is replaced often, the second open might come too late,
too, and the program would be told ESTALE. So what the second walk finds is held open until the program's open is answered:
an open file can be opened and looked at, whatever becomes of its name. A daemon that continues another one does not know
which threads that one has told, so at first it takes each walk for a second one.

No clock ends a walk: a lookup waits for the origin, and the kernel waits while others change names in the same directory.
"""

from __future__ import annotations

import math
import os

import trio

from cachefs.base.errors import CachefsError, ObjectChanged
from cachefs.base.tasks import run_contained
from cachefs.fs import Attributes, FileSystem

WALKS = 256
"""Threads that walk again at a time. Of more, the one that was told first is forgotten. A bound of the files that
are held open for them."""

ASKED = 8
"""How often names of files are looked up in one walk. Derived: the kernel asks for the last name twice, and again if
another process looks it up at the same time; a name that is replaced before it can be opened is looked up again. This ends
the walks of threads that open nothing (stat)."""

HELD_S = 10.0
"""How long a file is held open at most, if no open comes. Guessed: the kernel sends it within a millisecond, or when it may
change the directory. A file that is held keeps its place on the disk."""


TOLD_BEFORE_S = 1.0
"""For so long after a takeover, a daemon takes each walk for a second one. Derived: the kernel walks again at once, and the
daemon starts with all that waited meanwhile."""


class _Walk:
    """`left` names may still be asked for. What was found is held open until it is `over`."""

    def __init__(self) -> None:
        self.left = ASKED
        self.over = trio.Event()


class WalksAgain:
    """Threads that were told `ObjectChanged` of a file that they had looked up. 0 is all that have no number here."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self.threads: dict[int, _Walk] = {}  # the one that was told last comes last
        self.unsure = False
        self._unsure_until = -math.inf

    def took_over(self) -> None:
        """The daemon before this one has told threads, too."""
        self.unsure, self._unsure_until = True, trio.current_time() + TOLD_BEFORE_S

    def begin(self, thread: int) -> None:
        """It walks again."""
        self.end(thread)
        self.threads.pop(thread, None)
        if len(self.threads) == WALKS:
            del self.threads[next(iter(self.threads))]
        self.threads[thread] = _Walk()

    def again(self, thread: int) -> bool:
        """Whether this is its second walk."""
        walk = self.threads.get(thread)
        self.unsure = self.unsure and trio.current_time() < self._unsure_until
        if self.unsure and walk is None:
            self.begin(thread)
            return True
        return walk is not None and walk.left > 0

    def end(self, thread: int) -> None:
        """It has opened or changed what it walked to."""
        if not thread:
            return  # it may be another thread's walk
        walk = self.threads.pop(thread, None)
        if walk is not None:
            walk.over.set()

    async def lookup(self, thread: int, parent: int, name: bytes) -> tuple[Attributes | None, float]:
        """Look up a name, and hold the file that it shows open."""
        walk = self.threads.get(thread)
        while True:
            found = await self._fs.lookup(parent, name)
            attributes = found[0]
            if walk is None or (attributes is not None and attributes.is_dir):
                return found
            walk.left -= 1
            if attributes is None:
                return found
            try:
                fh, _ = await self._fs.open(attributes.ino, os.O_RDONLY, thread)
            except ObjectChanged:
                if walk.left > 0:
                    continue
                return found
            except CachefsError:
                return found  # the kernel's own open is told
            trio.lowlevel.spawn_system_task(run_contained, "holding a file open", self._hold, fh, walk)
            return found

    async def _hold(self, fh: int, walk: _Walk) -> None:
        try:
            with trio.move_on_after(HELD_S):
                await walk.over.wait()
        finally:
            self._fs.release(fh)

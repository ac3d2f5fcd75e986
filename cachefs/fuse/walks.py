"""Second path walks: the kernel looks names up again if a file was replaced between its lookup and its open or stat.

After ESTALE the kernel looks up each name of the path again, once. If a name is replaced often, the second open might be
too late, too, and the program would get ESTALE. So the file that the second walk finds is held open until the program's
open is answered: an open file can be opened and examined even if its name is replaced. A daemon that takes over does not
know to which threads the previous daemon answered ESTALE, so at first it treats each walk as a second one.

A walk has no deadline, because a lookup waits for the origin, and the kernel waits while other processes change names in the
same directory.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import trio

from cachefs.base.errors import CachefsError, ObjectChanged
from cachefs.base.tasks import run_contained
from cachefs.fs import Attributes, FileSystem

MAX_WALKS = 256
"""Threads whose second walks are remembered; beyond that the oldest is forgotten. Bounds the files held open for them."""

MAX_LOOKUPS = 8
"""Lookups of file names in one walk. Derived: the kernel looks the last name up twice, and again if another process looks it
up at the same time; a name that is replaced before it can be opened is looked up again. The bound ends the walks of threads
that open nothing (stat)."""

ASSUMED_S = 1.0
"""For so long after a takeover, the daemon treats each walk as a second one. Derived: the kernel walks again at once, and
the daemon begins with the requests that waited meanwhile."""


@dataclass(slots=True, eq=False)
class _Walk:
    """A second walk: `lookups_left` more lookups belong to it, and the files found are held open until it is `over`."""

    lookups_left: int = MAX_LOOKUPS
    over: trio.Event = field(default_factory=trio.Event)


class SecondWalks:
    """The second walks, by thread. A thread has one after it got `ObjectChanged` for a file that it had looked up. Thread 0
    stands for all threads whose number is not known here (another PID namespace). A file is held open for at most `held_s`
    if the kernel sends no OPEN: the kernel may wait that long for a change of the directory. A file that is held keeps its
    disk space."""

    def __init__(self, fs: FileSystem, held_s: float) -> None:
        self.held_s = held_s
        self._fs = fs
        self.threads: dict[int, _Walk] = {}  # the latest comes last
        self.assume_second = False
        self._assume_until = -math.inf

    def took_over(self) -> None:
        """Treat each walk as a second one for `ASSUMED_S`: the previous daemon may have answered ESTALE."""
        self.assume_second, self._assume_until = True, trio.current_time() + ASSUMED_S

    def begin(self, thread: int) -> None:
        """Begin a second walk of the thread, which is about to get ESTALE."""
        self.end(thread)
        self.threads.pop(thread, None)
        if len(self.threads) == MAX_WALKS:
            del self.threads[next(iter(self.threads))]
        self.threads[thread] = _Walk()

    def is_second(self, thread: int) -> bool:
        """True if the thread is on its second walk."""
        walk = self.threads.get(thread)
        self.assume_second = self.assume_second and trio.current_time() < self._assume_until
        if self.assume_second and walk is None:
            self.begin(thread)
            return True
        return walk is not None and walk.lookups_left > 0

    def end(self, thread: int) -> None:
        """End the thread's walk: it has opened or changed the file."""
        if not thread:
            return  # the walk of 0 may be another thread's
        walk = self.threads.pop(thread, None)
        if walk is not None:
            walk.over.set()

    async def lookup(self, thread: int, parent: int, name: bytes) -> tuple[Attributes | None, float]:
        """Look up a name on a second walk, and hold the file that it names open."""
        walk = self.threads.get(thread)
        while True:
            found = await self._fs.lookup(parent, name)
            attributes = found[0]
            if walk is None or (attributes is not None and attributes.is_dir):
                return found
            walk.lookups_left -= 1
            if attributes is None:
                return found
            try:
                fh, _ = await self._fs.open(attributes.ino, os.O_RDONLY, thread)
            except ObjectChanged:
                if walk.lookups_left > 0:
                    continue
                return found
            except CachefsError:
                return found  # the program's own open meets the error
            trio.lowlevel.spawn_system_task(run_contained, "holding a file open", self._hold, fh, walk)
            return found

    async def _hold(self, fh: int, walk: _Walk) -> None:
        with trio.move_on_after(self.held_s):
            await walk.over.wait()
        # Not in a `finally`: at the daemon's end this task is cancelled after the filesystem is closed.
        self._fs.release(fh)

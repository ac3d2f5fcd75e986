"""Paths that the kernel walks once more, because the file that it had looked up had lost its name before the open or stat.

After ESTALE the kernel asks for each name again, once. Where a name is replaced often, the second open might come too late,
too, and the program would be told ESTALE. So what the second walk finds is held open for a moment: an open file can be
opened and looked at, whatever becomes of its name.
"""

from __future__ import annotations

import os

import trio

from cachefs.base.errors import CachefsError, ObjectChanged
from cachefs.base.tasks import run_contained
from cachefs.fs import Attributes, FileSystem

WALK_S = 1.0
"""How long a walk takes at most, and how long what it finds is held open. Guessed: the kernel's next request comes within a
millisecond, or when a rename in the same directory is done."""

ATTEMPTS = 8
"""How often a name is looked up that is replaced each time before it can be opened. Guessed."""


class WalksAgain:
    """Threads that were lately told `ObjectChanged` of a file that they had looked up."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self.until: dict[int, float] = {}  # by thread

    def begin(self, thread: int) -> None:
        """It walks again."""
        now = trio.current_time()
        self.until = {other: until for other, until in self.until.items() if until > now}
        self.until[thread] = now + WALK_S

    def again(self, thread: int) -> bool:
        """Whether this is its second walk."""
        return self.until.get(thread, 0.0) > trio.current_time()

    async def lookup(self, thread: int, parent: int, name: bytes) -> tuple[Attributes | None, float]:
        """Look up a name, and hold the file that it shows open."""
        for _ in range(ATTEMPTS):
            found = await self._fs.lookup(parent, name)
            attributes = found[0]
            if attributes is None or attributes.is_dir:
                break
            try:
                fh, _ = await self._fs.open(attributes.ino, os.O_RDONLY, thread)
            except ObjectChanged:
                continue
            except CachefsError:
                break  # the kernel's own open is told
            trio.lowlevel.spawn_system_task(run_contained, "holding a file open", self._hold, fh)
            break
        return found

    async def _hold(self, fh: int) -> None:
        try:
            await trio.sleep(WALK_S)
        finally:
            self._fs.release(fh)

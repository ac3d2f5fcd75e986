"""Staging files that the kernel writes without the daemon: passthrough while a process has them open for writing.

The daemon does not hear of such a write. So nothing of a file in passthrough is sent, its size and time are read from the
file itself (`DirtyFile.look`), and each promise syncs it again. It goes to the origin when its last writer has closed it.

A mapping outlives the close, and a writer outlives the daemon; the daemon hears of neither. But the kernel grants no read
lease on a file that a process has open for writing: so a lease is requested before anything is sent, or given to the cache
(`StagingFile.written`). For this to mean something, a file in passthrough is open for reading only here, and as such handed
to the kernel.

A new file that is likely to be small is not given to the kernel (`NewFiles`): it costs less through the daemon, in memory.

Where a close is an upload (`direct`), writers come through the daemon, except that a file which readers have in passthrough
stays their backing file (`DirtyFile.share`): then it is mapped past the daemon, and read and written through it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import trio

from cachefs.base.errors import CachefsError
from cachefs.base.tasks import taken
from cachefs.store.backing import BackingFile
from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.sending import Parts
from cachefs.upload.staging import HELD, LOOK_S, can_lease, tells_of_mappings

log = logging.getLogger(__name__)

LOOKS, LETS_GO_S = 6, 0.0002
"""Looks at a close whether the kernel has let the file go, and seconds between two. Measured on two processors with a load
of 12: of 1,500 closes of a file that was not changed, 117 were refused a lease at the first look, and 1 at the sixth, 0.1 ms
apart. The loop stands still meanwhile: about a millisecond at most."""


IN_A_ROW, WITHIN_S = 16, 2.0
"""So many new files in a row that are small, begun within so many seconds, let the next one count as small. Derived: a saved
model has fewer small files before a large one; and at eight files a second the turn of a thread that this saves is a
thousandth of the time."""


class NewFiles:
    """The last files that were begun. A program that has made many small ones just now makes another one. Where it does not,
    the large one is written through the daemon, and the next one is not."""

    def __init__(self) -> None:
        # Their parts know their sizes. The files themselves end with their uploads.
        self._last = deque[tuple[float, Parts]](maxlen=IN_A_ROW)

    def begun(self, dirty_file: DirtyFile) -> None:
        self._last.append((trio.current_time(), dirty_file.parts))

    def is_likely_small(self, dirty_file: DirtyFile) -> bool:
        """True if a file that is empty and in memory will be small, by the last ones that were begun."""
        if dirty_file.size or dirty_file.acknowledged or not dirty_file.file.in_memory:
            return False
        if len(self._last) < IN_A_ROW or self._last[0][0] < trio.current_time() - WITHIN_S:
            return False
        return all(parts.size <= HELD for _, parts in self._last)


class Passthrough:
    """`relieve` is called regularly while a file is in passthrough: such writers do not ask for room."""

    def __init__(self, staging: Path, relieve: Callable[[], Awaitable[None]]) -> None:
        self._staging = staging
        self._relieve = relieve
        self.new_files = NewFiles()
        self.possible = False  # as long as the backend or the staging directory's file system cannot do this
        self._direct = self._tells = False
        self._tell: Callable[[BackingFile], None] = lambda backing: None
        self._retire: Callable[[BackingFile], None] = lambda backing: None
        self._writers = 0
        self._begun = trio.Event()

    def to(
        self,
        tell: Callable[[BackingFile], None],
        retire: Callable[[BackingFile], None],
        *,
        direct: bool,
    ) -> None:
        """The backend takes backing files: `tell` registers one with the kernel (OSError: it does not take it), `retire`
        that there will be no more use for it. `direct` says that writers come through the daemon."""
        self._tell, self._retire, self._direct = tell, retire, direct
        self.possible = can_lease(self._staging)
        self._tells = tells_of_mappings(self._staging)
        if not self.possible:
            log.info("%s has no leases: what is written comes through the daemon", self._staging)
        elif direct and not self._tells:
            self.possible = False  # what a mapping writes behind a commit would stay here
            log.info("%s is on a tmpfs, which does not tell what a mapping writes", self._staging)

    async def open_backing(self, dirty_file: DirtyFile) -> BackingFile | None:
        """See `Uploads.open_backing`."""
        if self._direct:
            dirty_file.kernel.writers += dirty_file.kernel.backing is not None
            return dirty_file.kernel.backing
        if not self.possible:
            return None
        async with taken(dirty_file.lock):
            await dirty_file.unsent(-1)
            if not dirty_file.content.is_ours:
                return None  # the file is the cache's
            begun = dirty_file.kernel.in_passthrough
            shape = dirty_file.kernel.shape if begun else await dirty_file.file.open_backing()
            if shape is None:
                return None  # its content comes through here, and waits for the disk
            if dirty_file.kernel.backing is None:
                dirty_file.kernel.backing = self._told(dirty_file)
            if dirty_file.kernel.backing is None:
                dirty_file.file.in_passthrough = begun
                return None
            if not begun:
                dirty_file.begin_passthrough(shape)
            dirty_file.kernel.writers += 1
            self._writers += 1
            self._begun.set()
            return dirty_file.kernel.backing

    def share(self, dirty_file: DirtyFile, backing_id: int) -> None:
        """The kernel has its file already, for readers."""
        dirty_file.kernel.backing = BackingFile(-1)
        dirty_file.kernel.backing.id = backing_id
        if self._direct:
            dirty_file.share()

    def resume(self, dirty_file: DirtyFile, backing_id: int, *, writes: bool) -> BackingFile:
        """A handle of a daemon that has died has its file in passthrough."""
        backing = dirty_file.kernel.backing
        if backing is None:
            backing = dirty_file.kernel.backing = BackingFile(-1)
            backing.id = backing_id
        if writes:
            dirty_file.kernel.writers += 1
            if not self._direct:
                self._writers += 1
                self._begun.set()
        return backing

    def _told(self, dirty_file: DirtyFile) -> BackingFile | None:
        backing = BackingFile(dirty_file.file.reader())
        try:
            self._tell(backing)
        except OSError as exc:
            log.warning(
                "what is written comes through the daemon: the kernel takes no file: %s", exc.strerror
            )
            self.possible = False
            backing.close()
            return None
        return backing

    def returned(self, dirty_file: DirtyFile) -> None:
        """One of its writers has closed it."""
        dirty_file.kernel.writers -= 1
        if self._direct:
            if not dirty_file.kernel.writers and not dirty_file.discarded:
                try:
                    dirty_file.look_for_mappings()
                except CachefsError as exc:
                    log.warning("%s: %s", dirty_file.origin.name(dirty_file.key), exc)
            return
        self._writers -= 1
        if dirty_file.kernel.writers or dirty_file.discarded:
            return
        try:
            reclaimed = _let_go(dirty_file)
        except CachefsError as exc:
            log.warning("%s: %s", dirty_file.origin.name(dirty_file.key), exc)
            reclaimed = False
        if not reclaimed and not dirty_file.dirty:
            dirty_file.suspect_change(shows=self._tells)

    def released(self, dirty_file: DirtyFile) -> None:
        """No process has it open any more."""
        backing, dirty_file.kernel.backing = dirty_file.kernel.backing, None
        if backing is not None:
            self._retire(backing)

    def unmounted(self, dirty_files: Iterable[DirtyFile]) -> None:
        """See `Uploads.unmounted`; of all files."""
        self._writers = 0
        for dirty_file in dirty_files:
            dirty_file.kernel.writers = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._begun.wait()
            while self._writers:
                await self._relieve()
                await trio.sleep(LOOK_S)
            self._begun = trio.Event()


def _let_go(dirty_file: DirtyFile) -> bool:
    """`reclaim` at the close of its last writer.

    The kernel sends RELEASE, and lets its own file go when the closing process returns to its program: until then it refuses
    the lease. This waits, because a program that opens the name next is shown the origin's version of a file that was not
    changed, and what a mapping might still change has to be said before that."""
    for look in range(LOOKS):
        if look:
            time.sleep(LETS_GO_S)
        if dirty_file.reclaim():
            return True
        if dirty_file.dirty:  # it is sent in any case, when it is let go
            break
    return False

"""Passthrough of staging files: the kernel writes them without the daemon while a process has them open for writing.

The daemon does not see such a write. So a file in passthrough is not sent, its size and mtime are read from the file itself
(`DirtyFile.look`), and each commit syncs it again. It is uploaded after its last writer has closed it.

A mapping outlives the close, and a writer outlives the daemon; the daemon sees neither. But the kernel grants no read lease
on a file that a process has open for writing. So a lease is requested before the file is sent, or given to the cache
(`StagingFile.has_writer`). For the lease to tell this, the daemon itself has the file open for reading only, and registers
that descriptor with the kernel.

A new file that is likely to be small is not opened in passthrough (`NewFiles`): written through the daemon, it stays in
memory, which costs less.

If a close is an upload (`direct`), writers write through the daemon. But a file that readers have open in passthrough stays
their backing file (`DirtyFile.share`): then mappings bypass the daemon, and writers read and write through the daemon."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import trio

from cachefs.base.errors import CachefsError
from cachefs.store import BackingFile
from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.sending import Parts
from cachefs.upload.staging import HELD, LOOK_S, can_lease, tells_of_mappings

log = logging.getLogger(__name__)

LOOKS, LETS_GO_S = 6, 0.0002
"""How often a lease is requested at a close, until the kernel has released the file, and the seconds between two requests.
Measured on two processors with a load of 12: of 1,500 closes of an unchanged file, 117 were refused the first lease, and 1
the sixth, 0.1 ms apart. The trio thread is blocked meanwhile, for about a millisecond at most."""

IN_A_ROW, WITHIN_S = 16, 2.0
"""So many new files in a row that are small, begun within so many seconds, let the next one count as small. Derived: a saved
model has fewer small files before a large one; and at eight files a second the turn of a thread that this saves is a
thousandth of the time."""


class NewFiles:
    """The last new files. A program that has just made many small files is expected to make another one. If that one is
    large, it is written through the daemon, and the next new file is not."""

    def __init__(self) -> None:
        # Their parts know their sizes. The files themselves end with their uploads.
        self._last = deque[tuple[float, Parts]](maxlen=IN_A_ROW)

    def begun(self, dirty_file: DirtyFile) -> None:
        self._last.append((trio.current_time(), dirty_file.parts))

    def is_likely_small(self, dirty_file: DirtyFile) -> bool:
        """True if a file that is empty and in memory will be small, by the last ones that were begun."""
        unused = dirty_file.file.in_memory and not (dirty_file.size or dirty_file.acknowledged)
        return unused and self.next_is_likely_small()

    def next_is_likely_small(self) -> bool:
        if len(self._last) < IN_A_ROW or self._last[0][0] < trio.current_time() - WITHIN_S:
            return False
        return max([parts.size for _, parts in self._last]) <= HELD


class Passthrough:
    """The staging files in passthrough. `relieve` is called regularly while there are writers, because their writes are not
    admitted by `StagingRoom`. `direct`: a close is an upload."""

    def __init__(self, staging: Path, relieve: Callable[[], Awaitable[None]], *, direct: bool) -> None:
        self.new_files = NewFiles()
        self._staging = staging
        self._relieve = relieve
        self.possible = False  # True if the backend and the file system of the staging directory can do this
        self._direct = direct
        self._register: Callable[[BackingFile], None] = lambda backing: None
        self._retire: Callable[[BackingFile], None] = lambda backing: None
        self._writers = 0
        self._begun = trio.Event()

    def enable(self, register: Callable[[BackingFile], None], retire: Callable[[BackingFile], None]) -> None:
        """Let the kernel read and write staging files without the daemon. `register` registers a backing file with the
        kernel (OSError if that refuses it), `retire` unregisters it."""
        self._register, self._retire = register, retire
        if not can_lease(self._staging):
            log.info("%s has no leases: what is written comes through the daemon", self._staging)
        # What a mapping writes into a clean file would not be uploaded there.
        elif not tells_of_mappings(self._staging):
            log.info("%s is on a tmpfs, which does not tell what a mapping writes", self._staging)
        else:
            self.possible = True

    @property
    def offered(self) -> bool:
        """True if writers can get a backing file that they do not share with readers."""
        return self.possible and not self._direct

    async def open_backing(self, dirty_file: DirtyFile) -> BackingFile | None:
        """See `Uploads.open_backing`."""
        if self._direct:
            dirty_file.kernel.writers += dirty_file.kernel.backing is not None
            return dirty_file.kernel.backing
        if not self.possible:
            return None
        async with dirty_file.lock:
            await dirty_file.unsent(-1)
            if not dirty_file.content.is_ours:
                return None  # the cache has the file
            begun = dirty_file.kernel.in_passthrough
            shape = dirty_file.kernel.shape if begun else await dirty_file.file.open_backing()
            if shape is None:
                return None  # its content is written through the daemon, and waits for the disk
            if dirty_file.kernel.backing is None:
                dirty_file.kernel.backing = self._registered(dirty_file)
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
        """Note that its file is registered with the kernel already, for readers."""
        self.resume(dirty_file, backing_id, writes=False)
        if self._direct:
            dirty_file.share()

    def resume(self, dirty_file: DirtyFile, backing_id: int, *, writes: bool) -> BackingFile:
        """The backing file of a handle of the previous daemon, registered as `backing_id`: for a writer until `returned`, or
        for a reader."""
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

    def _registered(self, dirty_file: DirtyFile) -> BackingFile | None:
        backing = BackingFile(dirty_file.file.reader())
        try:
            self._register(backing)
        except OSError as exc:
            log.warning(
                "what is written comes through the daemon: the kernel takes no file: %s", exc.strerror
            )
            self.possible = False
            backing.close()
            return None
        return backing

    def returned(self, dirty_file: DirtyFile) -> None:
        """Remove a writer, which has closed the file."""
        dirty_file.kernel.writers -= 1
        if not self._direct:
            self._writers -= 1
        if dirty_file.kernel.writers or dirty_file.discarded:
            return
        reclaimed = False
        try:
            if self._direct:
                dirty_file.look_for_mappings()
            else:
                reclaimed = _reclaim_with_retries(dirty_file)
        except CachefsError as exc:
            log.warning("%s: %s", dirty_file.origin.name(dirty_file.key), exc)
        if not (self._direct or reclaimed or dirty_file.dirty):
            dirty_file.suspect_change()

    def released(self, dirty_file: DirtyFile) -> None:
        """Unregister its file, because no process has it open any more."""
        backing, dirty_file.kernel.backing = dirty_file.kernel.backing, None
        if backing is not None:
            self._retire(backing)

    def unmounted(self, dirty_files: Iterable[DirtyFile]) -> None:
        """Remove the writers of all dirty files; see `Uploads.unmounted`."""
        self._writers = 0
        for dirty_file in dirty_files:
            dirty_file.kernel.writers = 0

    async def run(self) -> None:
        """Call `relieve` while there are writers, until cancelled."""
        while True:
            await self._begun.wait()
            while self._writers:
                await self._relieve()
                await trio.sleep(LOOK_S)
            self._begun = trio.Event()


def _reclaim_with_retries(dirty_file: DirtyFile) -> bool:
    """`reclaim` at the close of its last writer, with retries. True if it is reclaimed.

    The kernel sends RELEASE, and releases its own reference to the file when the closing process returns from the system
    call. Until then it refuses the lease. This waits, because the next open of an unchanged file gets the origin's version,
    and before that it must be known whether a mapping may still change the file."""
    for look in range(LOOKS):
        if look:
            time.sleep(LETS_GO_S)
        if dirty_file.reclaim():
            return True
        if dirty_file.dirty:  # it is uploaded anyway, once the kernel has released it
            break
    return False

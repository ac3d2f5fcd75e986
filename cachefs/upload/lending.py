"""Staging files that are written without us: lent to the kernel while somebody has them open for writing (passthrough).

Nobody tells us of such a write. So nothing of a lent file is sent, what it is like is asked of the file itself
(`Draft.look`), and each promise syncs it anew. It goes to the store when the last of its writers has closed it.

A mapping outlives the close, and a writer the daemon, of which nobody tells us either. But the kernel grants no read lease
on a file that somebody has open for writing: so that is asked before anything is sent, or given to the cache
(`StagingFile.written`). For this to mean something, a lent file is open for reading only here, and as such handed to the
kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from cachefs.errors import CachefsError
from cachefs.store.lent import Lent
from cachefs.upload.draft import Draft
from cachefs.upload.room import LOOK_S
from cachefs.upload.staging import can_lease

log = logging.getLogger(__name__)


class Loan(Lent):
    """A staging file."""

    __slots__ = ()


class Lending:
    """`relieve` is called now and then while something is lent: nobody asks for room who writes by himself."""

    def __init__(self, staging: Path, relieve: Callable[[], Awaitable[None]]) -> None:
        self._staging = staging
        self._relieve = relieve
        self._possible = False
        self._tell: Callable[[Loan], None] = _to_nobody
        self._retire: Callable[[Loan], None] = _to_nobody
        self._writers = 0
        self._begun = trio.Event()

    def to(self, tell: Callable[[Loan], None], retire: Callable[[Loan], None]) -> None:
        """There is somebody to lend to: `tell` tells the kernel of a loan (OSError: it does not take it), `retire` that
        there will be no more use for it."""
        self._tell, self._retire = tell, retire
        self._possible = can_lease(self._staging)
        if not self._possible:
            log.info("%s has no leases: what is written comes through the daemon", self._staging)

    async def lend(self, draft: Draft) -> Loan | None:
        """See `Uploads.lend`."""
        if not self._possible:
            return None
        async with draft.lock:
            await draft.unsent(-1)
            if draft.adopted:
                return None  # the file is the cache's
            if draft.loan is None:
                await draft.file.land()
                draft.loan = self._told(draft)
            if draft.loan is not None:
                draft.begin_lending()
                draft.writers += 1
                self._writers += 1
                self._begun.set()
            return draft.loan

    def _told(self, draft: Draft) -> Loan | None:
        loan = Loan(draft.file.reader())
        try:
            self._tell(loan)
        except OSError as exc:
            log.warning(
                "what is written comes through the daemon: the kernel takes no file: %s", exc.strerror
            )
            self._possible = False
            loan.close()
            return None
        return loan

    def returned(self, draft: Draft) -> None:
        """One of its writers has closed it."""
        draft.writers -= 1
        self._writers -= 1
        if draft.writers or draft.discarded:
            return
        try:
            reclaimed = draft.reclaim()
        except CachefsError as exc:
            log.warning("%s: %s", draft.origin.name(draft.key), exc)
            reclaimed = False
        if not reclaimed and not draft.dirty:
            draft.found_changed()  # it may still be, through a mapping

    def released(self, draft: Draft) -> None:
        """Nobody has it open any more."""
        loan, draft.loan = draft.loan, None
        if loan is not None:
            self._retire(loan)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._begun.wait()
            while self._writers:
                await self._relieve()
                await trio.sleep(LOOK_S)
            self._begun = trio.Event()


def _to_nobody(loan: Loan) -> None:
    pass

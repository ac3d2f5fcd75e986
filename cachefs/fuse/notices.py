"""Telling the kernel what it keeps and should not: in a thread, for the kernel may make whoever tells it wait.

What is to be told is a set in the order it came: ten processes that refresh one directory tell of its names once. Who
refreshes waits until the kernel knows (`told`), so that a look after that is a fresh one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import islice

import trio

log = logging.getLogger(__name__)

Notice = tuple[int, int, bytes]
"""(inode, parent, name), as in `fs.InvalidateHook`."""

MOST_WAITING = 65_536
"""Changes that the kernel has yet to be told of, about 250 bytes each. Beyond it the oldest is left to the kernel's own
TTL; a refresh waits for every thousand, so only changes that listings come across can get there. Guessed."""

AT_ONCE = 64
"""Told by a thread before it comes back: 5 ms (75 µs each, measured)."""

TOLD_WITHIN_S = 5.0
"""How long a refresh waits for a kernel that does not take its notices: it may hold a lock while it waits for the store.
Guessed."""


class Notices:
    """`invalidate` tells the kernel of one change; blocking, called from worker threads."""

    def __init__(self, invalidate: Callable[[int, int, bytes], None]) -> None:
        self._invalidate = invalidate
        self._waiting: dict[Notice, None] = {}
        self._came = trio.Event()
        self._turns = trio.lowlevel.ParkingLot()
        self._taken = self._finished = 0  # changes, since the beginning
        self._idle = trio.Event()
        self._idle.set()
        self._lost = 0

    def tell(self, inode: int, parent: int, name: bytes) -> None:
        """Soon. Never waits."""
        self._waiting[inode, parent, name] = None
        if len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
            if not self._lost:
                log.warning(
                    "more changes than the kernel can be told of: it may show some as they were, for its TTL"
                )
            self._lost += 1
            self._taken += 1
            self._finished += 1
        self._came.set()

    async def told(self) -> None:
        """Until the kernel knows everything that `tell` was given so far."""
        came = self._taken + len(self._waiting)  # first come, first told
        with trio.move_on_after(TOLD_WITHIN_S):
            while self._finished < came:
                await self._turns.park()
        await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Until cancelled; then `quiet` says when the last thread is back."""
        token = trio.lowlevel.current_trio_token()
        while True:
            await self._came.wait()
            batch = list(islice(self._waiting, AT_ONCE))
            for notice in batch:
                del self._waiting[notice]
            if not self._waiting:
                self._came = trio.Event()
            self._taken += len(batch)
            self._idle = idle = trio.Event()
            try:
                await trio.lowlevel.checkpoint_if_cancelled()
            except trio.Cancelled:
                idle.set()
                raise
            await trio.to_thread.run_sync(self._send, batch, token, idle, abandon_on_cancel=True)
            self._finished += len(batch)
            self._turns.unpark_all()

    def _send(self, batch: Iterable[Notice], token: trio.lowlevel.TrioToken, idle: trio.Event) -> None:
        try:
            for notice in batch:
                self._invalidate(*notice)
        finally:
            token.run_sync_soon(idle.set)

    async def quiet(self) -> None:
        """Until no thread is telling anything."""
        await self._idle.wait()

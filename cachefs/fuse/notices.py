"""Notices: the inodes and names that the kernel has to drop from its caches.

A thread sends them, because the kernel may block the sender. They are an ordered set: when ten processes refresh one
directory, each name is sent once. A refresh waits until the kernel has taken its notices (`all_sent`), so that the next
lookup is a fresh one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice

import trio

from cachefs.base.linux import HANGS_AFTER_S
from cachefs.base.tasks import in_thread_at_last

log = logging.getLogger(__name__)

Notice = tuple[int, int, bytes]
"""(inode, parent, name): drop the pages and attributes of this inode (0: none), and this name in `parent` (b"": none)."""

MOST_WAITING = 65_536
"""Most notices in the queue, about 250 bytes each. Beyond that the oldest is dropped, and the kernel keeps that name for
its TTL. A refresh waits after each thousand, so only changes that listings find can be so many. A bound of memory: 16 MB."""

AT_ONCE = 64
"""Notices that a thread sends before it returns, in 5 ms. Measured: 75 µs each."""


class Notices:
    """The queue of notices. `invalidate` sends one; it blocks, and is called in worker threads."""

    def __init__(self, invalidate: Callable[[int, int, bytes], None]) -> None:
        self._invalidate = invalidate
        self._waiting: dict[Notice, None] = {}
        self._queued = trio.Event()
        self._refreshing = trio.lowlevel.ParkingLot()
        # How many notices were taken from the queue, and sent, since the start.
        self._taken = self._finished = 0
        self._idle = trio.Event()
        self._idle.set()
        self._dropped = False

    def tell(self, inode: int, parent: int, name: bytes) -> None:
        """Queue a notice. Never waits."""
        self._waiting[inode, parent, name] = None
        if len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
            if not self._dropped:
                log.warning(
                    "more changes than the kernel can be told of: it may show some as they were, for its TTL"
                )
            self._dropped = True
            self._taken += 1
            self._finished += 1
        self._queued.set()

    async def all_sent(self) -> None:
        """Wait until the kernel has taken all notices so far, at most `HANGS_AFTER_S`: a request may hold a lock in the
        kernel while it waits for the origin."""
        newest = self._taken + len(self._waiting)  # notices are sent in order
        with trio.move_on_after(HANGS_AFTER_S):
            while self._finished < newest:
                await self._refreshing.park()
        await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Send notices until cancelled. A thread may still be sending then; `quiet` waits for it."""
        token = trio.lowlevel.current_trio_token()
        while True:
            await self._queued.wait()
            batch = list(islice(self._waiting, AT_ONCE))
            for notice in batch:
                del self._waiting[notice]
            if not self._waiting:
                self._queued = trio.Event()
            count = len(batch)
            self._taken += count
            self._idle = idle = trio.Event()
            begun = False

            def send(batch: list[Notice] = batch, idle: trio.Event = idle) -> None:
                nonlocal begun
                begun = True
                try:
                    for notice in batch:
                        self._invalidate(*notice)
                finally:
                    token.run_sync_soon(idle.set)

            try:
                await in_thread_at_last(send)
            finally:
                if not begun:
                    batch.clear()  # so that a thread that begins later sends nothing
                    idle.set()
            self._finished += count
            self._refreshing.unpark_all()

    async def quiet(self) -> None:
        """Wait until no thread is sending."""
        await self._idle.wait()

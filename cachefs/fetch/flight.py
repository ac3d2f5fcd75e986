"""One transfer under way, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import trio

from cachefs.errors import CachefsError
from cachefs.fetch.upstream import Upstream
from cachefs.ledger import PEER, STORE, Wait
from cachefs.names import ObjectId
from cachefs.origin import Origin, Turn
from cachefs.store import CachedObject, Fill, Store

_NEVER = 1 << 62


class Flight:
    """Brings the blocks of one fill. `ahead` says that it began before any reader waited; `elsewhere`, that peers are being
    asked; `error` is set when it failed. One that was given up ends with neither its blocks nor an error."""

    def __init__(
        self, store: Store, obj: CachedObject, fill: Fill, token: trio.lowlevel.TrioToken, *, ahead: bool
    ) -> None:
        self.object = obj
        self.fill = fill
        self.ahead = ahead
        self.done = False
        self.elsewhere = False
        self.error: Exception | None = None
        self.waits: list[Wait] = []  # reads that wait for it
        self._began = trio.current_time()
        self._turn = Turn(background=ahead)
        self._scope = trio.CancelScope()
        self._joined: set[int] = set()
        self._store = store
        self._waiters: list[tuple[int, trio.Event]] = []
        fill.on_landed = lambda: token.run_sync_soon(self.wake, idempotent=True)
        for block in range(fill.start_block, fill.stop_block):
            obj.flights[block] = self

    def join(self, blocks: Iterable[int]) -> int:
        """A reader waits for these blocks: from now on it is demand, and overtakes what nobody waits for. Returns how many
        of them were fetched ahead, and are late for the first time."""
        self._turn.promote()
        late = {b for b in blocks if self.ahead and self.fill.start_block <= b < self.fill.stop_block}
        late -= self._joined
        self._joined |= late
        return len(late)

    def left_s(self) -> float:
        """Seconds until it is over, at the pace so far. Before its first byte, as long as it has lasted."""
        so_far, came = trio.current_time() - self._began, self.fill.landed - self.fill.start
        return so_far * (self.fill.stop - self.fill.landed) / came if came else so_far

    def waited_for(self, wait: Wait, thread: int) -> None:
        """By a read of that thread, for which it is from now on, unless it is for another's."""
        self.waits.append(wait)
        wait.now_for(PEER if self.elsewhere else STORE)
        self._turn.thread = self._turn.thread or thread

    def give_up(self) -> None:
        """End it, unless somebody else waits for it."""
        if self._turn.background and not self._waiters:
            self._scope.cancel()

    def break_off(self, error: CachefsError) -> None:
        """Its readers do not wait for it any more, and look for the bytes elsewhere. What of it is in the middle of a write
        ends by itself, however long that takes."""
        self.error = error
        self._leave()
        self._wake_all()
        self._scope.cancel()

    def _leave(self) -> None:
        """No reader joins it from here on."""
        self.done = True
        for block in range(self.fill.start_block, self.fill.stop_block):
            if self.object.flights.get(block) is self:
                del self.object.flights[block]

    def _wake_all(self) -> None:
        for _, event in self._waiters:
            event.set()
        self._waiters.clear()

    async def landed(self, offset: int) -> None:
        """Return when all bytes below `offset` (clipped to this flight) are there, or it is over."""
        target = min(offset, self.fill.stop)
        if not self.done and self.fill.landed < target:
            await self._wait(target)

    async def ended(self) -> None:
        """Return when it is over, and what it brought exists."""
        if not self.done:
            await self._wait(_NEVER)

    async def _wait(self, target: int) -> None:
        event = trio.Event()
        waiter = (target, event)
        self._waiters.append(waiter)
        self.fill.wake_at = min(self.fill.wake_at, target)
        if self.fill.landed >= target:  # the thread may have passed it between the two looks
            self.wake()
        try:
            await event.wait()
        except trio.Cancelled:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def read(self, offset: int, size: int) -> bytes | None:
        """Bytes that this flight has brought, or None: not there yet, not its own, or gone with its end."""
        fill = self.fill
        if (self.done and not fill.kept) or offset < fill.start or offset + size > fill.landed:
            return None
        try:
            data = fill.read(offset, size)
        except OSError:
            return None
        return data if len(data) == size else None

    def wake(self) -> None:
        """Settle what has landed and wake those it was for. Trio thread."""
        if self.done:
            return
        self._store.settle(self.object, self.fill)
        landed = self.fill.landed
        waiting = []
        lowest = _NEVER
        for target, event in self._waiters:
            if target <= landed:
                event.set()
            else:
                waiting.append((target, event))
                lowest = min(lowest, target)
        self._waiters = waiting
        self.fill.wake_at = lowest
        if lowest <= self.fill.landed:
            self.fill.on_landed()  # type: ignore[misc]

    async def run(
        self, upstream: Upstream, origin: Origin, object_id: ObjectId, slots: trio.CapacityLimiter | None
    ) -> None:
        """Transfer, holding one of the slots if there are any; never raises anything but cancellation. `error` says how it
        ended."""
        fill = self.fill
        try:
            with self._scope:
                async with slots or nullcontext():
                    if self.elsewhere:
                        await upstream.read(object_id, fill, self._turn, origin)
                        self.elsewhere = False
                        for wait in self.waits:
                            if wait.on == PEER:
                                wait.now_for(STORE)
                    if fill.landed < fill.stop:
                        await origin.read(
                            *(object_id.key, object_id.etag, fill.landed, fill.stop, fill),
                            whole=fill.landed == 0 and fill.stop == object_id.size,
                            turn=self._turn,
                        )
        except Exception as exc:
            self.error = self.error or exc
        finally:
            self._leave()
            try:
                self._store.end_fill(self.object, fill)
            finally:
                self._wake_all()

"""One transfer under way, and who waits for it."""

from __future__ import annotations

import trio

from cachefs.names import ObjectId
from cachefs.origin import Origin
from cachefs.store import CachedObject, Fill, Store

_NEVER = 1 << 62


class Flight:
    """Brings the blocks of one fill. `error` is set when it ended without all of them."""

    def __init__(
        self, store: Store, obj: CachedObject, fill: Fill, token: trio.lowlevel.TrioToken, *, background: bool
    ) -> None:
        self.object = obj
        self.fill = fill
        self.background = background
        self.done = False
        self.error: Exception | None = None
        self._store = store
        self._waiters: list[tuple[int, trio.Event]] = []
        fill.on_landed = lambda: token.run_sync_soon(self.wake, idempotent=True)
        for block in range(fill.start_block, fill.stop_block):
            obj.flights[block] = self

    async def landed(self, offset: int) -> None:
        """Return when all bytes below `offset` (clipped to this flight) are there, or it is over."""
        target = min(offset, self.fill.stop)
        if self.done or self.fill.landed >= target:
            return
        event = trio.Event()
        self._waiters.append((target, event))
        self.fill.wake_at = min(self.fill.wake_at, target)
        if self.fill.landed >= target:  # the thread may have passed it between the two looks
            self.wake()
        await event.wait()

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

    async def run(self, origin: Origin, object_id: ObjectId) -> None:
        """Transfer; never raises anything but cancellation. `error` says how it ended."""
        fill = self.fill
        whole = fill.start == 0 and fill.stop == object_id.size
        try:
            await origin.read(
                object_id.key,
                object_id.etag,
                fill.start,
                fill.stop,
                fill,
                whole=whole,
                background=self.background,
            )
        except Exception as exc:
            self.error = exc
        finally:
            self.done = True
            for block in range(fill.start_block, fill.stop_block):
                if self.object.flights.get(block) is self:
                    del self.object.flights[block]
            try:
                self._store.end_fill(self.object, fill)
            finally:
                for _, event in self._waiters:
                    event.set()
                self._waiters.clear()

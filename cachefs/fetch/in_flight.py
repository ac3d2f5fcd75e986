"""In-flight fetches: transfers under way, and the readers that wait for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import nullcontext

import trio

from cachefs.base.errors import CachefsError, PermissionDenied, Transient
from cachefs.base.ledger import ORIGIN, PEER, Wait, current_call
from cachefs.base.metrics import Metrics
from cachefs.base.names import BLOCKS_PER_EXTENT, block_count
from cachefs.origin import Origin, Ticket
from cachefs.store import CachedObject, Fill, Store

_NEVER = 1 << 62
_NONE: Mapping[int, InFlightFetch] = {}


AskPeers = Callable[[Fill, Ticket], Awaitable[None]]
"""Has peers deliver as much of a fill as they can; the rest is the origin's."""


class Transfers:
    """All fetches in flight, by version and block: a block belongs to at most one."""

    def __init__(self) -> None:
        self._versions: dict[bytes, dict[int, InFlightFetch]] = {}

    def of(self, obj: CachedObject) -> Mapping[int, InFlightFetch]:
        """Block → the fetch that brings it, of one version."""
        return self._versions.get(obj.id.digest, _NONE)

    def add(self, fetch: InFlightFetch) -> None:
        blocks = self._versions.setdefault(fetch.object.id.digest, {})
        blocks.update(dict.fromkeys(range(fetch.fill.start_block, fetch.fill.stop_block), fetch))

    def discard(self, fetch: InFlightFetch) -> None:
        blocks = self._versions.get(fetch.object.id.digest, {})
        for block in range(fetch.fill.start_block, fetch.fill.stop_block):
            if blocks.get(block) is fetch:
                del blocks[block]
        if not blocks:
            self._versions.pop(fetch.object.id.digest, None)

    def miss_reasons(self, metrics: Metrics, obj: CachedObject, missing: Iterable[int]) -> Counter[str]:
        """Why each of these blocks is not here, in the ledger's words; the ledger remembers them as missed now."""
        in_flight = self.of(obj)
        found: Counter[str] = Counter()
        for block in missing:
            fetch = in_flight.get(block)
            joins, late = fetch is not None, fetch is not None and fetch.ahead
            extent = block // BLOCKS_PER_EXTENT
            found[metrics.ledger.misses.missed(obj.id, extent, joins=joins, late=late)] += 1
        return found


def count_misses(metrics: Metrics, reasons: Counter[str]) -> None:
    """A reader has waited for so many blocks, for these reasons."""
    metrics.misses += reasons.total()
    for reason, blocks in reasons.items():
        name = f"misses_{reason}"
        setattr(metrics, name, getattr(metrics, name) + blocks)


class InFlightFetch:
    """Brings the blocks of one fill, and holds their object until it is over. `ahead` says that it began before any
    reader waited; `elsewhere`, that peers are being asked; `error` is set when it failed. One that was given up ends with
    neither its blocks nor an error."""

    def __init__(
        self,
        store: Store,
        transfers: Transfers,
        obj: CachedObject,
        fill: Fill,
        token: trio.lowlevel.TrioToken,
        *,
        ahead: bool,
    ) -> None:
        self.object = obj
        self.fill = fill
        self.ahead = ahead
        self.done = False
        self.elsewhere = False
        self.error: Exception | None = None
        self.waits: list[Wait] = []  # of reads that wait for it
        self._began = trio.current_time()
        self._ticket = Ticket(background=ahead)
        self._end_early: Callable[[], None] | None = None  # of what transfers now
        self._given_up = False
        self._failed: tuple[CachefsError, float] | None = None  # how and since when that attempt failed
        self._joined: set[int] = set()
        self._store = store
        self._waiters: list[tuple[int, trio.Event]] = []
        fill.on_landed = lambda: token.run_sync_soon(self.wake, idempotent=True)
        self._transfers = transfers
        transfers.add(self)
        obj.hold()

    def join(self, blocks: Iterable[int]) -> int:
        """A reader waits for these blocks: from now on the fetch is demand, and overtakes prefetch. Returns how many of
        them were prefetched, and are late for the first time."""
        self._ticket.promote()
        late = {b for b in blocks if self.ahead and self.fill.start_block <= b < self.fill.stop_block}
        late -= self._joined
        self._joined |= late
        return len(late)

    def left_s(self) -> float:
        """Seconds until it is over, at the pace so far. Before its first byte, as long as it has lasted."""
        so_far, came = trio.current_time() - self._began, self.fill.landed - self.fill.start
        return so_far * (self.fill.stop - self.fill.landed) / came if came else so_far

    def waited_for(self, wait: Wait, thread: int) -> None:
        """A read of `thread` waits for it; its requests count for the first such thread."""
        self.waits.append(wait)
        wait.now_for(PEER if self.elsewhere else ORIGIN)
        self._ticket.thread = self._ticket.thread or thread

    def give_up(self) -> None:
        """End it, unless a reader waits for it."""
        if self._ticket.background and not self._waiters:
            self._cancel()

    def _cancel(self) -> None:
        self._given_up = True
        if self._end_early is not None:
            self._end_early()

    def break_off(self, error: CachefsError) -> None:
        """Its readers stop waiting, and look for the bytes elsewhere. A write under way ends by itself, however long that
        takes."""
        self.error = error
        self._leave()
        self._wake_all()
        self._cancel()

    def _leave(self) -> None:
        """No reader joins it from here on."""
        self.done = True
        self._transfers.discard(self)

    def _wake_all(self) -> None:
        for _, event in self._waiters:
            event.set()
        self._waiters.clear()

    async def landed(self, offset: int) -> None:
        """Return when all bytes below `offset` (clipped to this fetch) have landed, or it is over."""
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
        """Bytes that this fetch has brought; None if they are not there yet, not its own, or it is over."""
        fill = self.fill
        if (self.done and not fill.kept) or offset < fill.start or offset + size > fill.landed:
            return None
        try:
            data = fill.read(offset, size)
        except OSError:
            return None
        return data if len(data) == size else None

    def wake(self) -> None:
        """Settle what has landed and wake the readers that wait for it. Trio thread."""
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

    def begin(self, origin: Origin, over: Callable[[bool], None]) -> bool:
        """Begin the transfer of a whole object without a task, if it has to wait for nothing. When it has ended, `over` is
        told whether `run` must go on with it."""
        fill, object_id = self.fill, self.object.id
        if self.elsewhere or fill.kept or fill.landed or fill.stop != object_id.size:
            return False

        since = time.monotonic()

        def ended(error: Exception | None) -> None:
            self._end_early = None
            repeat = isinstance(error, Transient | PermissionDenied) and not self._given_up
            try:
                if isinstance(error, CachefsError) and repeat:
                    self._failed = error, since
                else:
                    self.error = self.error or (None if self._given_up else error)
                    self._end()
            finally:
                over(repeat)

        key, etag = object_id.key, object_id.etag
        self._end_early = origin.begin(key, etag, object_id.size, fill, self._ticket, ended)
        return self._end_early is not None

    async def run(
        self, origin: Origin, ask_peers: AskPeers | None, slots: trio.CapacityLimiter | None
    ) -> None:
        """Transfer, from peers first if they are to be asked, holding one of the slots if there are any. Raises nothing but
        cancellation; `error` says how it ended."""
        fill, object_id = self.fill, self.object.id
        try:
            with trio.CancelScope() as scope:
                self._end_early = scope.cancel
                if self._given_up:
                    scope.cancel()
                async with slots or nullcontext():
                    if ask_peers is not None:
                        await ask_peers(fill, self._ticket)
                        self.elsewhere = False
                        for wait in self.waits:
                            if wait.on == PEER:
                                wait.now_for(ORIGIN)
                    if fill.landed < fill.stop:
                        await origin.read(
                            *(object_id.key, object_id.etag, fill.landed, fill.stop, fill),
                            whole=fill.landed == 0 and fill.stop == object_id.size,
                            turn=self._ticket,
                            failed=self._failed,
                        )
        except Exception as exc:
            self.error = self.error or exc
        finally:
            self._end()

    def _end(self) -> None:
        self._leave()
        self._end_early = self.fill.on_landed = (
            None  # both lead back here: memory of a circle is given back late
        )
        try:
            self._store.end_fill(self.object, self.fill)
        finally:
            self._wake_all()
            self.object.release()


# Opens that wait a moment, for a file that is about to be whole.
#
# How a file is read is decided when it is opened: by the kernel itself (passthrough), if it is whole here, or through the
# daemon, with a message and two more copies for each part of it. A prefetched file is often opened while the last of it
# comes; its reader is better off if the open returns a moment later. No transfer is begun here, and no open fails here: a
# file that does not come in time is opened as it is.

OPEN_WAITS_S = 0.2
"""How long an open waits at most, and only when the file may be whole by then. A reader of all of it loses nothing,
because it waits for its end in any case; a reader of its first bytes loses no more than a slow answer of an origin takes.
Measured: of 64 files of 16 MiB from another node, opened by four readers as fast as they come, 33 to 46 were opened in
passthrough when opens waited for 0.05 or 0.1 s, and 42 to 53 with 0.2."""


class Arrivals:
    """Watches files that are about to be whole."""

    def __init__(self, store: Store, transfers: Transfers, metrics: Metrics) -> None:
        self._store = store
        self._transfers = transfers
        self._metrics = metrics

    def soon(self, obj: CachedObject) -> bool:
        """True if every block is cached or in flight, at least one is in flight, and all should land in a tier within
        `OPEN_WAITS_S`."""
        in_flight = self._transfers.of(obj)
        return (
            bool(in_flight)
            and all(f.left_s() <= OPEN_WAITS_S and not f.fill.kept for f in set(in_flight.values()))
            and all(block in in_flight or self._store.has(obj, block) for block in self._blocks(obj))
        )

    async def wait(self, obj: CachedObject, pid: int) -> None:
        """Return when its fetches have ended, or after `OPEN_WAITS_S`. The ledger counts it as a read that waits."""
        in_flight: list[InFlightFetch] = list(dict.fromkeys(self._transfers.of(obj).values()))
        absent = [block for block in self._blocks(obj) if not self._store.has(obj, block)]
        why = self._transfers.miss_reasons(self._metrics, obj, absent)
        if (call := current_call.get()) is not None:
            call.end()
        wait, landed = self._metrics.ledger.waits.begin(pid, obj.id, 0), 0
        try:
            with obj.held(), trio.move_on_after(OPEN_WAITS_S):
                for fetch in in_flight:
                    self._metrics.prefetched_late += fetch.join(absent)
                    fetch.waited_for(wait, pid)
                for fetch in in_flight:
                    await fetch.ended()
                if all(self._store.has(obj, block) for block in absent):
                    landed = obj.id.size
                    count_misses(self._metrics, why)  # otherwise its reads will find them missing
        finally:
            wait.end(landed)

    def _blocks(self, obj: CachedObject) -> range:
        return range(block_count(obj.id.size, self._store.block_size))

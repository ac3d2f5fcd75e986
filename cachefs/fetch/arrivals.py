"""Opens that wait a moment, for a file that is about to be whole.

How a file is read is decided when it is opened: by the kernel itself (passthrough), if it is whole here, or through the
daemon, with a message and two more copies for each part of it. A prefetched file is often opened while the last of it
comes; its reader is better off if the open returns a moment later. No transfer is begun here, and no open fails here: a file
that does not come in time is opened as it is.
"""

from __future__ import annotations

import trio

from cachefs.base.ledger import current_call
from cachefs.base.metrics import Metrics
from cachefs.base.names import block_count
from cachefs.fetch.in_flight import InFlightFetch, Transfers, count_misses
from cachefs.store import CachedObject, Store

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
        ledger = self._metrics.ledger
        absent = [block for block in self._blocks(obj) if not self._store.has(obj, block)]
        why = self._transfers.miss_reasons(self._metrics, obj, absent)
        if (call := current_call.get()) is not None:
            call.end()
        wait, landed = ledger.waits.begin(pid, obj.id, 0), 0
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
            ledger.waits.end(wait, landed)

    def _blocks(self, obj: CachedObject) -> range:
        return range(block_count(obj.id.size, self._store.block_size))

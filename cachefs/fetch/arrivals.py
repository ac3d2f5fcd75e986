"""Opens that wait a moment, for a file that is about to be whole.

How a file is read is decided when it is opened: by the kernel itself, if it is whole here and can be lent, or through the
daemon, with a message and two copies more for each part of it. What was fetched ahead is often opened while the last of it
comes; who opens it then is better off a moment later. Nothing is begun here, and no open fails here: a file that
does not come in time is opened as it is.
"""

from __future__ import annotations

import trio

from cachefs.fetch import missing
from cachefs.fetch.flight import Flight
from cachefs.ledger import current_call
from cachefs.metrics import Metrics
from cachefs.names import block_count
from cachefs.store import CachedObject, Store

OPEN_WAITS_S = 0.2
"""How long an open waits at most, and only when the file may be whole by then. Who reads all of it loses nothing, having to
wait for its end in any case; who wants its first bytes only, no more than a slow answer of a store takes. Measured: of 64
files of 16 MiB from another node, opened by four readers as fast as they come, 33 to 46 were lent when opens waited for 0.05
or 0.1 s, and 42 to 53 with 0.2."""


class Arrivals:
    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    def soon(self, obj: CachedObject) -> bool:
        """Whether all of it is here or on its way, and may be here within `OPEN_WAITS_S`, in a tier. Not when it is here."""
        flights = self._flights(obj)
        return (
            bool(flights)
            and all(not flight.fill.kept and flight.left_s() <= OPEN_WAITS_S for flight in flights)
            and all(block in obj.flights or self._store.has(obj, block) for block in self._blocks(obj))
        )

    async def wait(self, obj: CachedObject, pid: int) -> None:
        """Return when it is over, well or not, or has lasted too long. To the ledger it is a read that waits."""
        flights, ledger = self._flights(obj), self._metrics.ledger
        absent = [block for block in self._blocks(obj) if not self._store.has(obj, block)]
        reasons = missing.reasons(self._metrics, obj, absent)
        if (call := current_call.get()) is not None:
            call.end()
        wait, landed = ledger.waits.begin(pid, obj.id, 0), 0
        obj.refs += 1
        try:
            with trio.move_on_after(OPEN_WAITS_S):
                for flight in flights:
                    self._metrics.prefetched_late += flight.join(absent)
                    flight.waited_for(wait, pid)
                for flight in flights:
                    await flight.ended()
                if all(self._store.has(obj, block) for block in absent):
                    landed = obj.id.size
                    missing.count(self._metrics, reasons)  # otherwise its reads will find them missing
        finally:
            ledger.waits.end(wait, landed)
            self._store.release(obj)

    def _blocks(self, obj: CachedObject) -> range:
        return range(block_count(obj.id.size, self._store.block_size))

    @staticmethod
    def _flights(obj: CachedObject) -> list[Flight]:
        return list(dict.fromkeys(obj.flights.values()))

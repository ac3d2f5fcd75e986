"""Blocks that a reader has to wait for: why they are not here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cachefs.fetch.flight import Flight
from cachefs.metrics import Metrics
from cachefs.names import BLOCKS_PER_EXTENT
from cachefs.store import CachedObject


def reasons(metrics: Metrics, obj: CachedObject, missing: Iterable[int]) -> Counter[str]:
    """Why each of these is not here, as the ledger's words say; it remembers them as missed now."""
    found: Counter[str] = Counter()
    for block in missing:
        flight: Flight | None = obj.flights.get(block)
        late = flight is not None and flight.ahead
        extent = block // BLOCKS_PER_EXTENT
        found[metrics.ledger.misses.missed(obj.id, extent, joins=flight is not None, late=late)] += 1
    return found


def count(metrics: Metrics, missed: Counter[str]) -> None:
    """A reader has waited for so many blocks, for these reasons."""
    metrics.misses += missed.total()
    for reason, blocks in missed.items():
        name = f"misses_{reason}"
        setattr(metrics, name, getattr(metrics, name) + blocks)

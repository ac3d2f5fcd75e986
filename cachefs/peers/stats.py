"""Counters per peer, for status and exporters. Changed on the trio thread only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from cachefs.peers.wire import Kind

MAX_PEERS = 2048
"""Rows; the one used least lately goes for a further peer. A bound for memory, not for members: twice the nodes that a ring
is tested with, for addresses come and go with their nodes."""


@dataclass(slots=True)
class PeerStats:
    """One peer since this daemon started: what we asked of it, and what it asked of us."""

    requests: int = 0
    bytes_in: int = 0
    failures: Counter[Kind] = field(default_factory=Counter)
    first_byte_s: float = 0.0
    """Sum over `answered` of the time from sending a request to the reply's head."""
    answered: int = 0
    served: int = 0
    bytes_out: int = 0
    turned_away: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `latency_s` is the mean time to the reply's head, 0 before the first."""
        return {
            "requests": self.requests,
            "bytes_in": self.bytes_in,
            "failures": dict(self.failures),
            "latency_s": self.first_byte_s / self.answered if self.answered else 0.0,
            "served": self.served,
            "bytes_out": self.bytes_out,
            "turned_away": self.turned_away,
        }


class PeerTable:
    """Peer → its counters. Those we ask are named by address, those who ask us by host: their port says nothing."""

    def __init__(self) -> None:
        self._rows: dict[str, PeerStats] = {}

    def of(self, peer: str) -> PeerStats:
        row = self._rows.pop(peer) if peer in self._rows else PeerStats()
        self._rows[peer] = row
        if len(self._rows) > MAX_PEERS:
            del self._rows[next(iter(self._rows))]
        return row

    def forget(self, peer: str) -> None:
        """A member that left."""
        self._rows.pop(peer, None)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return {peer: row.as_dict() for peer, row in self._rows.items()}

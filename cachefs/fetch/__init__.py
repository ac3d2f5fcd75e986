"""Bringing a block here.

Idea: one ladder, read top-down in `fetcher.py`: what the store has, what is already on its way, the origin. There is at
most one transfer per block (single flight); a reader is woken when *its* bytes have landed, not when the transfer ends.
`readahead.py` is pure policy: it is told what was read and says what will be. `Fetcher.bring` is for those who know
better: prefetch and warm-up.

Invariants: a demanded block is fetched whatever the prefetch does, and a transfer that a reader joins is demand from
then on; readahead never waits for anything and gives up silently; a transfer that fails leaves no trace but what had
wholly landed.
"""

from cachefs.fetch.fetcher import Fetcher
from cachefs.fetch.opened import OpenedObject
from cachefs.fetch.readahead import Readahead, footer_at

__all__ = ["Fetcher", "OpenedObject", "Readahead", "footer_at"]

"""Bringing a block here.

Idea: one ladder, read top-down in `fetcher.py`: what the cache store has, what is in flight, the owner's node, the origin.
There is at most one in-flight fetch per block; a reader is woken when *its* bytes are written, not when the fetch ends.
`readahead.py` is pure policy: it is told what was read and says what will be. `Fetcher.prefetch` is for prefetch and
warm-up.

Invariants: a demanded block is fetched whatever the prefetch does, and a transfer that a reader joins is demand from
then on; readahead never waits for anything and gives up silently; a transfer that fails leaves no trace but what had
complete.
"""

from cachefs.fetch.fetcher import Fetcher, OpenedObject
from cachefs.fetch.readahead import Readahead, footer_at

__all__ = ["Fetcher", "OpenedObject", "Readahead", "footer_at"]

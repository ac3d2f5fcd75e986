"""Fetching blocks.

`fetcher.py` is one ladder: the cache store, fetches in flight, the node that owns the extent (`upstream.py`), the origin.
There is at most one in-flight fetch per block. A reader is woken when *its* bytes are written, not when the fetch ends.
`readahead.py` observes each read, and predicts the next ones. `Fetcher.prefetch` is for prefetch and warm-up.

Invariants: a demanded block is fetched whatever prefetch does, and a fetch that a reader joins counts as demand from then
on. Readahead never waits, and gives up silently. A fetch that fails leaves only the blocks that were complete."""

from cachefs.fetch.fetcher import Fetcher
from cachefs.fetch.readahead import footer_at

__all__ = ["Fetcher", "footer_at"]

"""Prefetch beyond the file that is being read: by directory, by shard, or by the plan that a job sent.

Three pure policies watch which files are opened (`directories`, `shards`, `plans`). One executor (`prefetcher`) fetches what
they predict, in the background. It bounds the transfers in flight and the bytes that were fetched and not used yet.

A wrong prediction costs requests and a bounded number of bytes. It never causes a wrong byte or an error, and no reader
waits for prefetch. A prefetched block displaces no block that is worth more: the cache store refuses it, and prefetch
pauses.
"""

from cachefs.prefetch.prefetcher import Prefetcher
from cachefs.prefetch.sources import Paths

__all__ = ["Paths", "Prefetcher"]

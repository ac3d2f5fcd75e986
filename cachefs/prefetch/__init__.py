"""Prefetch beyond the file that is being read: by directory, by shard, by the plan that a job announced.

Three pure policies watch which files are opened (`directories`, `shards`, `plans`), and one executor (`prefetcher`) fetches
what they predict, in the background, within bounds of transfers and of bytes fetched and not used.

A wrong prediction costs requests and a bounded number of bytes, never a wrong byte nor an error to a reader; no reader waits
for anything here; and a prefetched block displaces none that is worth more (the store refuses, and prefetch pauses).
"""

from cachefs.prefetch.prefetcher import Prefetcher
from cachefs.prefetch.sources import Paths

__all__ = ["Paths", "Prefetcher"]

"""Prefetch beyond the file that is being read: by directory, by shard, or by the plan that a job sent.

Three pure policies watch which files are opened (`directories`, `shards`, `plans`). One executor (`prefetcher`) fetches
what they predict, in the background. A wrong prediction costs requests and a bounded number of bytes. It never causes a
wrong byte or an error, and no reader waits for prefetch."""

from cachefs.prefetch.prefetcher import Prefetcher
from cachefs.prefetch.sources import Paths

__all__ = ["Paths", "Prefetcher"]

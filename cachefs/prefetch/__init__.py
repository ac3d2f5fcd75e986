"""Fetching what will be read next, beyond the file that is being read: by directory, by shard, by a hint of the job.

Idea: three pure policies watch which files are opened (`directories`, `shards`, `plans`), and one executor
(`prefetcher`) fetches what they foretell, in the background, within bounds of requests and of bytes fetched and not used.

Invariants: a wrong guess costs requests and a bounded number of bytes, never a wrong byte nor an error to a reader; nothing
here is waited for by a reader; what is fetched displaces nothing that somebody will miss (the store refuses, and then
prefetch pauses).
"""

from cachefs.prefetch.prefetcher import Prefetcher

__all__ = ["Prefetcher"]

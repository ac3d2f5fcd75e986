"""This node's blocks.

Idea: tiers are directories (RAM is tmpfs, SSD is a disk), one sparse file per object version and tier, and an LMDB
index that says which blocks lie there and what they hash to. Blocks are kept and evicted per *extent* of sixteen, least
recently used first; RAM spills down, SSD drops.

Invariants: a block that the index lists and whose checksum matches is served, anything else is a miss; `used_bytes`
never passes a tier's limit, because room is reserved before bytes come; copies with pins are neither moved nor dropped;
a file that was opened in passthrough is never changed, only unlinked.
A crash may lose the last second of bookkeeping, never make a wrong byte readable.

Callers: `fetch` (reading, filling, passthrough), `upload` (files that were written here), `daemon` (opening, closing,
status).
"""

from cachefs.store.backing import Backing, Settled
from cachefs.store.catalog import CachedObject
from cachefs.store.opening import Opened, open_store
from cachefs.store.ram import SHM, remove_orphans
from cachefs.store.scrub import scrub
from cachefs.store.space import CacheWrite, Run, TierWrite, WriteClosed
from cachefs.store.store import Shared, Store
from cachefs.store.tier import Tier

__all__ = [
    "SHM",
    "Backing",
    "CacheWrite",
    "CachedObject",
    "Opened",
    "Run",
    "Settled",
    "Shared",
    "Store",
    "Tier",
    "TierWrite",
    "WriteClosed",
    "open_store",
    "remove_orphans",
    "scrub",
]

"""This node's blocks.

Idea: tiers are directories (RAM is tmpfs, SSD is a disk). A tier has one sparse file per object version, and an LMDB
index records which blocks lie there and their checksums. Blocks are kept and evicted per *extent* of sixteen.

Invariants: only a block that the index lists and whose checksum matches is served, anything else is a miss; `used_bytes`
never passes a tier's limit, because space is reserved before bytes are written; copies with pins are neither moved nor
dropped; a file that was opened in passthrough is never changed, only unlinked.
A crash may lose the last second of bookkeeping, but never makes a wrong byte readable.

Callers: `fetch` (reading, cache writes, passthrough), `upload` (files written on this node), `daemon` (opening, closing,
status).
"""

from cachefs.store.backing import WholeVersion
from cachefs.store.catalog import Backing, BackingFile, CachedObject
from cachefs.store.opening import OpenStore, open_store
from cachefs.store.ram import SHM, remove_orphans
from cachefs.store.scrub import scrub
from cachefs.store.space import CacheWrite, Run, TierWrite, WriteClosed
from cachefs.store.store import PinnedBlock, Store
from cachefs.store.tier import Tier

__all__ = [
    "SHM",
    "Backing",
    "BackingFile",
    "CacheWrite",
    "CachedObject",
    "OpenStore",
    "PinnedBlock",
    "Run",
    "Store",
    "Tier",
    "TierWrite",
    "WholeVersion",
    "WriteClosed",
    "open_store",
    "remove_orphans",
    "scrub",
]

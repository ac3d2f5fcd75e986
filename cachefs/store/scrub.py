"""After an unclean stop: give back what lies on the disk and is in no row.

A crash loses at most the last second of the index, so some files hold blocks that nobody knows. They are never read (no
row, no block), but they take space that the cap does not see. This walk runs beside the mount and never delays it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import trio

from cachefs.store.store import Store

log = logging.getLogger(__name__)


async def scrub(store: Store) -> None:
    """One pass over all tiers."""
    for tier in store.tiers:
        freed = 0
        for number in range(256):
            folder = tier.path / "objects" / f"{number:02x}"
            for name, on_disk in await trio.to_thread.run_sync(_files, folder):
                try:
                    digest = bytes.fromhex(folder.name + name)
                except ValueError:
                    continue  # not ours
                freed += store.room.reclaim(tier, digest, on_disk)
                await trio.lowlevel.checkpoint()
        if freed:
            log.info("the %s tier had %d bytes in no row (unclean stop): freed", tier.name, freed)


def _files(folder: Path) -> list[tuple[str, int]]:
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, entry.stat(follow_symlinks=False).st_blocks * 512) for entry in entries]
    except OSError:
        return []

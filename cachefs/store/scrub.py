"""After an unclean stop: make files and rows agree again.

A crash loses at most the last second of the index. Then some files hold blocks that no row knows: they are never read,
but they take space that the cap does not see. And some rows speak of blocks that were evicted: reading them would be a
miss, but until then they count as space that is not there. This walk runs beside the mount and never delays it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import trio

from cachefs.store.store import Store
from cachefs.store.tier import Tier

log = logging.getLogger(__name__)


async def scrub(store: Store) -> None:
    """One pass over the rows and the files of all tiers."""
    for tier in store.tiers:
        changed = 0
        async for digest, on_disk in _rows_then_files(store, tier):
            changed += abs(await store.room.reclaim(tier, digest, on_disk))
            await trio.lowlevel.checkpoint()
        if changed:
            log.info(
                "%s tier: %d bytes were in no row or no file (unclean stop): put right", tier.name, changed
            )


async def _rows_then_files(store: Store, tier: Tier) -> AsyncIterator[tuple[bytes, int]]:
    """(digest, bytes on disk) of every version that has rows, then of every file without."""
    digests, cursor = store.listed(tier, b"")
    while cursor:
        for digest, on_disk in await trio.to_thread.run_sync(_sizes, tier, digests):
            yield digest, on_disk
        digests, cursor = store.listed(tier, cursor)
    for number in range(256):
        folder = tier.path / "objects" / f"{number:02x}"
        for digest, on_disk in await trio.to_thread.run_sync(_files, folder):
            if not store.lists(tier, digest):
                yield digest, on_disk


def _sizes(tier: Tier, digests: list[bytes]) -> list[tuple[bytes, int]]:
    sizes = []
    for digest in digests:
        try:
            sizes.append((digest, tier.file_path(digest).stat().st_blocks * 512))
        except OSError:
            sizes.append((digest, 0))
    return sizes


def _files(folder: Path) -> list[tuple[bytes, int]]:
    found = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        try:
            found.append((bytes.fromhex(folder.name + name), (folder / name).lstat().st_blocks * 512))
        except (ValueError, OSError):
            continue  # not ours, or evicted meanwhile
    return found

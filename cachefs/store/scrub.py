"""The scrub: makes files and rows agree again after an unclean stop.

A crash loses at most the last second of the index. Then some files hold blocks that are in no row: they are never read,
but they take space that the cap does not count. And some rows list blocks that were evicted: reading them would be a
miss, but until then they are counted without taking space. The scrub runs beside the mount and never delays it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import trio

from cachefs.base.names import BLOCKS_PER_EXTENT
from cachefs.store.catalog import CachedObject
from cachefs.store.store import Store
from cachefs.store.tier import Tier, allocated, next_data

log = logging.getLogger(__name__)


async def scrub(store: Store) -> None:
    """One pass over the rows and the files of all tiers. Until one has ended, the index is not closed as clean."""
    for tier in store.tiers:
        changed = 0
        async for digest, on_disk in _rows_then_files(store, tier):
            changed += abs(await reclaim(store, tier, digest, on_disk))
            await trio.lowlevel.checkpoint()
        if changed:
            log.info(
                "%s tier: %d bytes were in no row or no file (unclean stop): put right", tier.name, changed
            )
    store.catalog.unfinished = False


async def _rows_then_files(store: Store, tier: Tier) -> AsyncIterator[tuple[bytes, int]]:
    """(digest, bytes on disk) of every version that has rows, then of every file without."""
    catalog = store.catalog
    for digests in catalog.listed(tier.number):
        for digest, on_disk in await trio.to_thread.run_sync(_sizes, tier, digests):
            yield digest, on_disk
    objects = tier.path / "objects"
    for folder in await trio.to_thread.run_sync(_names, objects):
        for digest, on_disk in await trio.to_thread.run_sync(_files, objects / folder):
            obj = catalog.idle(digest)
            if obj is not None and not catalog.has_copies(obj, tier.number):
                yield digest, on_disk


def _sizes(tier: Tier, digests: list[bytes]) -> list[tuple[bytes, int]]:
    sizes = []
    for digest in digests:
        try:
            sizes.append((digest, tier.file_path(digest).stat().st_blocks * 512))
        except OSError:
            sizes.append((digest, 0))
    return sizes


def _names(directory: Path) -> list[str]:
    """The names in a directory; none if it is missing or cannot be read."""
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _files(folder: Path) -> list[tuple[bytes, int]]:
    found = []
    for name in _names(folder):
        try:
            found.append((bytes.fromhex(folder.name + name), (folder / name).lstat().st_blocks * 512))
        except (ValueError, OSError):
            continue  # no cache file, or evicted meanwhile
    return found


async def reclaim(store: Store, tier: Tier, digest: bytes, on_disk_bytes: int) -> int:
    """Make a file that takes `on_disk_bytes` and its rows agree. Returns by how many bytes they differed."""
    catalog, space, size = store.catalog, store.space, store.block_size
    obj = catalog.idle(digest)
    if obj is None:
        return 0  # in use
    known = _known(store, tier, obj)
    excess = on_disk_bytes - sum(map(allocated, known.values()))
    if not known:
        space.unlink(obj, tier)
        return excess
    if excess == 0 and max(known) == 0:
        # One block, which is there; with more blocks, a hole and a stray block may add up to no excess.
        return 0
    strays, holes = await trio.to_thread.run_sync(_inspect, tier, digest, size, known)
    still_idle = catalog.idle(digest)
    if still_idle is None or _known(store, tier, still_idle) != known or not (strays or holes):
        return 0  # it was used meanwhile
    obj = catalog.by_digest(digest)
    if obj.is_immutable(tier):
        space.drop_file(obj, tier, "damaged")
        return (len(strays) + len(holes)) * size
    space.punch(obj, tier, [(start, size) for start in strays])
    for copy in catalog.copies(obj, tier.number):
        mine = [start for start, _ in catalog.ranges(copy, copy.bitmap) if start in holes]
        lost = sum(1 << start // size % BLOCKS_PER_EXTENT for start in mine)
        space.drop(obj, copy, lost, "damaged")
    obj.close_files()
    return (len(strays) + len(holes)) * size


def _known(store: Store, tier: Tier, obj: CachedObject) -> dict[int, int]:
    """Offset → length of the blocks that are in rows."""
    catalog = store.catalog
    return dict(r for c in catalog.copies(obj, tier.number) for r in catalog.ranges(c, c.bitmap))


def _inspect(tier: Tier, digest: bytes, block_size: int, known: dict[int, int]) -> tuple[list[int], set[int]]:
    """(offsets of blocks in the file that are not `known`, offsets of known blocks that it lacks in whole or part). For a
    worker thread."""
    try:
        fd = tier.open_file(digest)
    except OSError:
        return [], set(known)
    try:
        size = os.fstat(fd).st_size
        others = (start for start in range(0, size, block_size) if start not in known)
        strays = [start for start in others if next_data(fd, start) < start + block_size]
        return strays, {start for start, length in known.items() if not _is_whole(fd, start, length)}
    except OSError:
        return [], set()
    finally:
        os.close(fd)


def _is_whole(fd: int, start: int, length: int) -> bool:
    """True if the whole range is data. The end of the file counts as a hole."""
    return next_data(fd, start) == start and os.lseek(fd, start, os.SEEK_HOLE) >= start + length

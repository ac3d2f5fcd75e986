"""How long the loop of a store stands still while large files are dropped from it.

Makes a sparse file of many extents as a store's SSD tier has it, then evicts it, or every other part of it, while a task
asks the clock every millisecond. Evicted whole is what was once open in passthrough. The cache is on an ext4 in an image of
its own, so it needs root.

    python -m bench.disposal [--gib 20] [--extents 200000] [--place DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import trio

from cachefs.base.metrics import Metrics
from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId, block_count
from cachefs.store import open_store

GIB, MIB, PAGE = 1 << 30, 1 << 20, 4096


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.disposal", description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, default=20, help="logical size of the file")
    parser.add_argument("--extents", type=int, default=200_000, help="pieces on the disk")
    parser.add_argument("--place", type=Path, help="where the image is made (default: a temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.place) as place:
        print(json.dumps(measure(Path(place), options.gib, options.extents), indent=2))


def measure(place: Path, gib: int, extents: int) -> dict[str, float]:
    """Longest pauses in seconds: while the file is unlinked, and while half of its blocks are punched out."""
    image, disk = place / "image", place / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(extents * 4 * PAGE + 2 * GIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    try:
        return {
            f"{how} s": trio.run(_pause, disk / f"cache-{how}", gib, extents, how)
            for how in ("unlink", "punch")
        }
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


async def _pause(cache: Path, gib: int, extents: int, how: str) -> float:
    opened = open_store(cache, 4 * gib * GIB, 0, 0, MIB, "none", Metrics())
    store = opened.store
    (tier,) = store.tiers
    tier.cap_bytes, tier._keep_free_bytes = 4 * gib * GIB, -4 * gib * GIB
    object_id = ObjectId("bench", "file", "etag", gib * GIB)
    obj = store.object(object_id)
    fd = tier.open_for_writing(object_id.digest, object_id.size, known=False)
    _scatter(fd, gib * GIB, extents)
    os.close(fd)
    blocks = block_count(object_id.size, MIB)
    for extent in range(-(-blocks // BLOCKS_PER_EXTENT)):  # the rows of a file that is all here
        copy = store.catalog.create(obj, tier.number, extent, object_id.size, 0)
        bits = (1 << min(BLOCKS_PER_EXTENT, blocks - extent * BLOCKS_PER_EXTENT)) - 1
        copy.pins += 1
        store.space.reserve(copy, bits)
        store.space.commit(copy, bits, bits)
        store.catalog.touch(copy)
        copy.pins -= 1
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        before = time.perf_counter()
        while True:
            await trio.sleep(0.001)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        await trio.sleep(0.05)
        copies = store.catalog.copies(obj, tier.number)
        if how == "unlink":
            os.truncate(tier.file_path(object_id.digest), object_id.size)
            os.close(tier.make_immutable(object_id.digest, object_id.size))
            copies = copies[:2]
        longest = 0.0
        for copy in copies:
            if copy.extent % 2:
                store.space.drop(obj, copy, copy.bitmap)
                await trio.sleep(0.002)
        while tier.disposal.going_bytes:  # noqa: ASYNC110 - it has no event
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    return round(longest, 4)


def _scatter(fd: int, size: int, extents: int) -> None:
    """Write pages far from each other, from the end on, so that no two of them are in one extent of ext4."""
    step = size // extents // PAGE * PAGE
    for number in reversed(range(extents)):
        os.pwrite(fd, b"x" * PAGE, number * step)
    os.fsync(fd)


if __name__ == "__main__":
    main()

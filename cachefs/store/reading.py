"""The part of a read that waits for a disk: in a worker thread, touching nothing but descriptors."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import xxhash

from cachefs.names import BLOCKS_PER_EXTENT, block_length
from cachefs.store.index import Copy
from cachefs.store.tier import Tier


@dataclass(slots=True)
class Step:
    """A part of a read, for a worker thread: `length` bytes at `at`, in `block` when it must be checked."""

    copy: Copy
    block: int
    at: int
    length: int
    check: bool


def take_steps(
    steps: list[Step], block_size: int, tiers: dict[int, Tier], files: dict[int, int], digest: bytes
) -> list[bytes | OSError | None]:
    """The bytes of each step; None for a checksum that does not match. `files` are descriptors by tier: those below 0 are
    opened here."""
    results: list[bytes | OSError | None] = []
    for step in steps:
        try:
            fd = files[step.copy.tier]
            if fd < 0:
                fd = files[step.copy.tier] = tiers[step.copy.tier].open_file(digest, create=False)
            if not step.check:
                data = os.pread(fd, step.length, step.at)
                results.append(data if len(data) == step.length else OSError(errno.EIO, "short read"))
                continue
            start = step.block * block_size
            length = block_length(step.block, step.copy.object_size, block_size)
            whole = os.pread(fd, length, start)
            if xxhash.xxh3_64_intdigest(whole) == step.copy.checksums[step.block % BLOCKS_PER_EXTENT]:
                results.append(whole if step.length == length else whole[step.at - start :][: step.length])
            else:
                results.append(None)
        except OSError as exc:
            results.append(exc)
    return results

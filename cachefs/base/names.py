"""Names of bytes: versions of objects, blocks and extents. Pure.

An `ObjectId` names one immutable version of one object: source, key, etag and size. What is cached under it never has to be
invalidated, only evicted: a changed object has another name. Blocks and extents are positions in a version.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

BLOCKS_PER_EXTENT = 16
"""Blocks that share an index row and are evicted together: 16 MiB at the default block size. Derived: a row is shorter than
200 bytes, a terabyte of cache has 65,000 rows, and an extent is the largest range of one GET."""


class OnOutage(NamedTuple):
    """What requests do while an origin does not answer at all. `wait_s` is for the mode `wait`, else 0."""

    mode: Literal["serve-stale", "eio", "wait"] = "eio"
    wait_s: float = 0.0

    @property
    def stale(self) -> bool:
        return self.mode == "serve-stale"

    def __str__(self) -> str:
        return f"wait={self.wait_s:g}s" if self.mode == "wait" else self.mode


ERRORS = OnOutage()


@dataclass(frozen=True, slots=True)
class ObjectId:
    """One version of one object.

    `source` names the origin (for example ``s3://bucket`` with its endpoint), `key` is the origin's key, `etag` the origin's
    version tag as in If-Match, `size` is in bytes. `digest` has 16 bytes.
    """

    source: str
    key: str
    etag: str
    size: int
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # blake2b, not xxhash: whoever can name objects must not be able to make two names collide.
        text = "\0".join((self.source, self.key, self.etag, str(self.size)))
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        object.__setattr__(self, "digest", digest)


def blocks_covering(offset: int, length: int, block_size: int) -> range:
    """Indices of the blocks with bytes of [offset, offset + length); empty for length <= 0."""
    if length <= 0:
        return range(0)
    return range(offset // block_size, (offset + length - 1) // block_size + 1)


def block_count(size: int, block_size: int) -> int:
    """How many blocks an object of `size` bytes has."""
    return -(-size // block_size)


def extent_bits(blocks: int, extent: int) -> int:
    """A bit for each block of an extent, the first block's lowest, of an object that has `blocks` blocks."""
    return (1 << min(BLOCKS_PER_EXTENT, blocks - extent * BLOCKS_PER_EXTENT)) - 1


def block_length(index: int, size: int, block_size: int) -> int:
    """Bytes in block `index` of an object of `size` bytes (the last one may be short)."""
    return min(block_size, size - index * block_size)

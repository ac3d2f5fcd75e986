"""The place of last resort: a few blocks in plain memory, for readers that no tier could serve.

Without it, a reader of 128 KiB pieces would fetch each 1 MiB block eight times once the disk is full.
"""

from __future__ import annotations

from collections import OrderedDict

LIMIT_BYTES = 32 << 20
"""Guessed: thirty readers' current blocks."""


class Heap:
    """Blocks by (digest, block), least recently added dropped first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
        self._bytes = 0

    def get(self, digest: bytes, block: int) -> bytes | None:
        return self._blocks.get((digest, block))

    def drop(self, digest: bytes) -> int:
        """Forget a version; how many bytes that were."""
        keys = [key for key in self._blocks if key[0] == digest]
        freed = sum(len(self._blocks.pop(key)) for key in keys)
        self._bytes -= freed
        return freed

    def put(self, digest: bytes, block: int, data: bytes) -> None:
        self._bytes += len(data) - len(self._blocks.pop((digest, block), b""))
        self._blocks[digest, block] = data
        while self._bytes > LIMIT_BYTES and len(self._blocks) > 1:
            _, old = self._blocks.popitem(last=False)
            self._bytes -= len(old)

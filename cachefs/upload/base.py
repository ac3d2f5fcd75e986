"""What a dirty file begins with, read through the cache."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from cachefs.base.names import ObjectId
from cachefs.origin import Origin
from cachefs.upload.staging import Buffer

PIECE = 1 << 20
"""Read at once: a block."""


class Reader(Protocol):
    """What is used of `Fetcher`."""

    def open(self, origin: Origin, object_id: ObjectId) -> Any: ...
    def close(self, opened: Any) -> None: ...
    async def read(self, opened: Any, offset: int, size: int, pid: int) -> Buffer: ...


def through(reader: Reader) -> Callable[[Origin, ObjectId, int, Callable[[Buffer], Awaitable[None]]], Any]:
    """A `Bring` that reads like a program from the beginning on, so that readahead works for it."""

    async def bring(
        origin: Origin, base: ObjectId, count: int, take: Callable[[Buffer], Awaitable[None]]
    ) -> None:
        opened = reader.open(origin, base)
        try:
            for at in range(0, count, PIECE):
                await take(await reader.read(opened, at, min(PIECE, count - at), 0))
        finally:
            reader.close(opened)

    return bring

"""Small things every test of the origin does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from cachefs.origin import ListPage, ObjectInfo, Origin

T = TypeVar("T")


class Collect:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.chunks = 0

    def write(self, data: memoryview | bytes) -> None:
        self.data += data
        self.chunks += 1


def run(origin: Origin, use: Callable[[Origin], Awaitable[T]]) -> T:
    """`use(origin)` under trio, with a limit on its time; the origin is closed afterwards."""

    async def main() -> T:
        with trio.fail_after(30):
            try:
                return await use(origin)
            finally:
                await origin.aclose()

    return trio.run(main)


async def content(origin: Origin, info: ObjectInfo, start: int = 0, stop: int | None = None) -> bytes:
    sink = Collect()
    end = info.size if stop is None else stop
    await origin.read(info.key, info.etag, start, end, sink, whole=(start, end) == (0, info.size))
    return bytes(sink.data)


async def pages(origin: Origin, prefix: str, limit: int = 1000) -> list[ListPage]:
    found: list[ListPage] = []
    token = None
    while True:
        page = await origin.list_page(prefix, token=token, limit=limit)
        found.append(page)
        token = page.next_token
        if token is None:
            return found


async def until(true: Callable[[], bool]) -> None:
    """Wait for something that a thread does and tells nobody."""
    while not true():  # noqa: ASYNC110
        await trio.sleep(0.001)

"""Small things every test of the origin does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import trio

from cachefs.origin import ListPage, ObjectInfo, Origin

T = TypeVar("T")

CLIENTS = ["curl", pytest.param("fsspec", marks=pytest.mark.long)]
"""What faults are shown to. Most of what is done about them lies above the clients; the contracts have both in every run."""

LONG_PAIRS = {
    ("curl", "moto"),
    ("fsspec", "moto"),
    ("curl", "rgw"),
    ("fsspec", "rgw"),
    ("fsspec", "azurite"),
    ("fsspec", "directory"),
}
"""Of a client and a server: where the short run has another server of the vendor, or another client of the server."""


def one_a_vendor(pair: tuple[str, str]) -> Any:
    """A parameter of a contract's fixture."""
    return pytest.param(pair, marks=[pytest.mark.long] if pair in LONG_PAIRS else [])


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
    """Wait for an effect of a thread that signals nothing."""
    while not true():  # noqa: ASYNC110
        await trio.sleep(0.001)

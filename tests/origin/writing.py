"""Small things every test of writing does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.lab.dataset import content as bytes_of
from cachefs.origin import ObjectInfo, Origin
from tests.origin.reading import content

MIB = 1 << 20
LEAST = 5 * MIB
"""The least part that every store takes."""

THREE = bytes_of("three parts", 2 * LEAST + 100_001)
"""As many bytes as are three parts."""


@contextmanager
def file_of(path: Path, data: bytes) -> Iterator[int]:
    """A descriptor of a file of these bytes."""
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


async def as_shown(there: Origin, info: ObjectInfo, data: bytes) -> None:
    """Assert that the object is what a write returned, in a HEAD and in a LIST, and has these bytes."""
    assert info.size == len(data) and info.mtime_ns > 0
    assert await there.head(info.key) == info
    folder = info.key[: info.key.rfind("/") + 1]
    page = await there.list_page(folder)
    assert [found for found in page.objects if found.key == info.key] == [info]
    assert await content(there, info) == data

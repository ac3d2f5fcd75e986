"""Which node holds how much of a path: the bounds of the question. Clusters are asked in tests/mount/test_peers.py."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from cachefs.base.errors import ConfigError
from cachefs.base.names import ObjectId
from cachefs.daemon import locating
from cachefs.daemon.locating import Locator


class World:
    """Seven files, of which each holds half."""

    async def walk(self, path: str) -> AsyncIterator[tuple[str, None, ObjectId]]:
        for number in range(7):
            await trio.lowlevel.checkpoint()
            yield f"f{number}", None, ObjectId("s", f"f{number}", "e", 10)

    def cached_bytes(self, version: ObjectId) -> int:
        return version.size // 2


def test_a_path_of_too_many_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    locator = Locator(world, world, None, 1 << 20)  # type: ignore[arg-type]
    found = trio.run(locator.locate, "d")
    assert (found["files"], found["bytes"], found["nodes"]) == (7, 70, {"this node": 35})
    monkeypatch.setattr(locating, "FILES_AT_MOST", 7)
    assert trio.run(locator.locate, "d") == found
    monkeypatch.setattr(locating, "FILES_AT_MOST", 6)
    with pytest.raises(ConfigError, match="d has too many files"):
        trio.run(locator.locate, "d")

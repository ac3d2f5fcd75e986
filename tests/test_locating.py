"""Which node holds how much of a path: the bounds of the question. Clusters are asked in tests/mount/test_peers.py."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock

from cachefs.base.errors import CachefsError, ConfigError, NotFound, Unreachable
from cachefs.base.names import ObjectId
from cachefs.daemon.locating import DEADLINE_S, Locator


class World:
    """Seven files, half of each cached. A listing gives one in `takes_s`."""

    takes_s = 0.0
    failure: CachefsError | None = None

    async def walk(self, path: str) -> AsyncIterator[tuple[str, None, ObjectId]]:
        for number in range(7):
            await trio.sleep(self.takes_s)
            yield f"f{number}", None, ObjectId("s", f"f{number}", "e", 10)
        if self.failure is not None:
            raise self.failure

    def cached_bytes(self, version: ObjectId) -> int:
        return version.size // 2


def test_a_path_of_too_many_files_is_refused() -> None:
    world = World()
    locator = Locator(world, world, None, 1 << 20)  # type: ignore[arg-type]
    found = trio.run(locator.locate, "d")
    assert (found["files"], found["bytes"], found["nodes"]) == (7, 70, {"this node": 35})
    world.takes_s = DEADLINE_S / 8
    assert trio.run(locator.locate, "d", clock=MockClock(autojump_threshold=0)) == found
    world.takes_s = DEADLINE_S / 6
    with pytest.raises(ConfigError, match="d has too many files"):
        trio.run(locator.locate, "d", clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("failure", [NotFound("no such path: d"), Unreachable("s does not answer")])
def test_a_path_that_cannot_be_listed_fails_with_its_own_error(failure: CachefsError) -> None:
    world = World()
    world.failure = failure
    with pytest.raises(type(failure)):
        trio.run(Locator(world, world, None, 1 << 20).locate, "d")  # type: ignore[arg-type]

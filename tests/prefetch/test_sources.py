"""Where a directory's listing is gone through for files to fetch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cachefs.base.names import ObjectId
from cachefs.fs import Sibling
from cachefs.prefetch.directories import START
from cachefs.prefetch.sources import FORGET_AFTER_S, REMEMBERED, FromDirectories, Paths
from cachefs.store import eviction

NAMES = [b"f%03d" % number for number in range(300)]
INO = 7


class TreeQueries:
    """A listing that has landed; `shown` are the names that it was asked for."""

    def __init__(self, origin: Any) -> None:
        self.shown: list[bytes] = []
        self._origin = origin

    def siblings(self, ino: int, after: bytes, limit: int) -> tuple[list[Sibling], bytes | None]:
        names = [name for name in NAMES if name > after][:limit]
        self.shown += names
        files = [Sibling(name, INO, self._origin, _version(name)) for name in names]
        return files, names[-1] if len(names) == limit else None


class EpochProgress(eviction.EpochProgress):
    """Of one data set, in epoch `number`."""

    number, version, asked = 1, 0, 0

    def __init__(self) -> None:
        pass

    def epoch(self, object_id: ObjectId) -> int:
        self.asked += 1
        return self.number


def _version(name: bytes) -> ObjectId:
    return ObjectId("s3://b", f"d/{name.decode()}", '"1"', 100)


@pytest.mark.parametrize("first", [0, 150, 299])
async def test_a_pass_shows_each_name_once_but_for_the_slice_where_it_began(first: int) -> None:
    origin: Any = SimpleNamespace(prefix="", source="s3://b")
    volume: Any = SimpleNamespace(name="", origin=origin)
    tree_queries = TreeQueries(origin)
    fs: Any = SimpleNamespace(tree_queries=tree_queries)
    offered: list[bytes] = []

    def wanted(obj: ObjectId) -> bool:
        offered.append(obj.key.encode()[2:])
        return False

    source = FromDirectories(fs, Paths([volume]), wanted, lambda versions: None, EpochProgress())
    for _ in range(START):
        source.missed(INO, origin, _version(NAMES[first]), 0.0)
    assert not await source.next(8)
    assert set(offered) == set(NAMES)
    assert len(tree_queries.shown) < len(NAMES) + 64
    before = len(tree_queries.shown)
    # A pass is over until more was missed.
    assert not await source.next(8) and len(tree_queries.shown) == before


def test_directories_are_forgotten_by_time_and_by_number() -> None:
    origin: Any = SimpleNamespace(prefix="", source="s3://b")
    volume: Any = SimpleNamespace(name="", origin=origin)
    fs: Any = None
    source = FromDirectories(fs, Paths([volume]), lambda obj: True, lambda versions: None, EpochProgress())

    def demanded(directory: int, now: float) -> int:
        source.missed(INO, origin, ObjectId("s3://b", f"{directory}/f", '"1"', 100), now)
        return source._walks[str(directory)].policy.demanded

    assert [demanded(1, now) for now in (0.0, FORGET_AFTER_S, 2 * FORGET_AFTER_S + 1)] == [1, 2, 1]
    for directory in range(2, REMEMBERED + 2):
        demanded(directory, 2 * FORGET_AFTER_S + 1)
    assert list(source._walks) == [str(directory) for directory in range(2, REMEMBERED + 2)]


def test_an_epoch_is_asked_for_at_a_hit_only_if_one_may_have_begun() -> None:
    origin: Any = SimpleNamespace(prefix="", source="s3://b")
    volume: Any = SimpleNamespace(name="", origin=origin)
    fs: Any = None
    progress = EpochProgress()
    source = FromDirectories(fs, Paths([volume]), lambda obj: True, lambda versions: None, progress)
    progress.number = 0  # nothing is known of the data set
    source.missed(INO, origin, _version(b"a"), 0.0)
    walk = next(iter(source._walks.values()))
    progress.number = 1  # its first use does not change the version
    for _ in range(3):
        source.hit(walk, _version(b"b"), 0.0)
    assert (walk.policy.epoch, progress.asked, walk.policy.demanded) == (1, 2, 4)
    progress.number, progress.version = 2, 1
    for _ in range(3):
        source.hit(walk, _version(b"b"), 0.0)
    assert (walk.policy.epoch, progress.asked, walk.policy.demanded) == (2, 3, 3)

"""A node with the key that sends bytes which are not the origin's: found by samples, left alone, its bytes dropped."""

from __future__ import annotations

import hashlib
import logging
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.fetch.upstream import SHARE, Comparing, Sampler
from tests.fetch.scripted import SOURCE, content, in_trio
from tests.peers.nodes import Node, Nodes, nodes
from tests.store.lab import BLOCK, KIB, until


class Always(random.Random):
    """Each sample that may be taken is taken."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:  # type: ignore[override]
        return 0 if stop is None else start

    def uniform(self, a: float, b: float) -> float:
        return 0.0


def watch(node: Node) -> list[ObjectId]:
    """Compare all that comes; the objects of which wrong bytes were here."""
    comparing, told = node.fetcher._upstream.comparing, []
    assert comparing is not None

    async def on_lie(origin: Any, object_id: ObjectId) -> None:
        told.append(object_id)

    comparing.sampler, comparing.on_lie = Sampler(BLOCK, rng=Always()), on_lie
    return told


async def poison(cluster: Nodes, node: Node, object_id: ObjectId, data: bytes) -> bytes:
    """What the node has of the object are other bytes, with checksums that match them."""
    wrong = bytes(byte ^ 1 for byte in data)
    cluster.origin.objects[object_id.key] = (object_id.etag, wrong)
    assert await node.read(object_id, 0, len(data)) == wrong
    await cluster.quiet()
    cluster.origin.objects[object_id.key] = (object_id.etag, data)
    cluster.origin.gets.clear()
    return wrong


def put(cluster: Nodes, owner: Node, data: bytes, etag: str = "") -> ObjectId:
    for _ in range(1000):
        made = cluster.origin.put(f"file{cluster.origin._versions}", data)
        object_id = ObjectId(SOURCE, made.key, etag or made.etag, len(data))
        cluster.origin.objects[made.key] = (object_id.etag, data)
        if cluster.owner(object_id) is owner:
            return object_id
    raise AssertionError("it owns nothing")


@in_trio
async def test_a_peer_that_sends_other_bytes_is_found_and_asked_no_more(
    cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with nodes(cache_dir, 2) as cluster:
        reader, liar = cluster
        told = watch(reader)
        data = content("a", 3 * BLOCK)
        first, second = put(cluster, liar, data), put(cluster, liar, data)
        for object_id in (first, second):
            await poison(cluster, liar, object_id, data)
        await reader.read(first, 0, len(data))
        await until(lambda: told == [first], 30)
        assert reader.metrics.peer_lies == 1 and reader.metrics.peer_compared >= 1
        assert await reader.read(first, 0, len(data)) == data
        assert await reader.read(second, 0, len(data)) == data  # of which it has been asked for nothing
        assert {row["state"] for row in reader.cluster.status() if not row["here"]} == {"dead"}
        assert reader.cluster.keeps(second.digest, 0)
        said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len([line for line in said if "sent other bytes" in line and first.key in line]) == 1
        await cluster.quiet()
        cluster.check_accounts()


@in_trio
async def test_an_honest_peer_is_compared_and_stays(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2) as cluster:
        reader, owner = cluster
        watch(reader)
        data = content("a", 5 * BLOCK)
        object_id = put(cluster, owner, data)
        assert await reader.read(object_id, 0, len(data)) == data
        await until(lambda: any(get.background for get in cluster.origin.gets), 30)
        await cluster.quiet()
        assert reader.metrics.peer_lies == 0 and reader.metrics.peer_compared >= 1
        cluster.origin.gets.clear()
        assert await reader.read(object_id, 0, len(data)) == data
        assert cluster.origin.gets == []


@in_trio
async def test_a_whole_object_with_an_md5_is_checked_without_the_origin(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2) as cluster:
        reader, owner = cluster
        told = watch(reader)
        assert reader.fetcher._upstream.comparing is not None
        reader.fetcher._upstream.comparing.sampler._bytes_to_go = 1e12  # no block is read from the origin
        data = content("a", 100 * KIB)
        honest = put(cluster, owner, data, f'"{hashlib.md5(data).hexdigest()}"')
        assert await owner.read(honest, 0, len(data)) == data
        cluster.origin.gets.clear()
        assert await reader.read(honest, 0, len(data)) == data
        await until(lambda: reader.metrics.peer_compared == 1, 30)
        await cluster.quiet()
        assert cluster.origin.gets == [] and not told
        wrong = put(cluster, owner, data[:-1], f'"{hashlib.md5(data[:-1]).hexdigest()}"')
        await poison(cluster, owner, wrong, data[:-1])
        await reader.read(wrong, 0, len(data) - 1)
        await until(lambda: told == [wrong], 30)
        assert await reader.read(wrong, 0, len(data) - 1) == data[:-1]


@in_trio
async def test_of_whole_objects_with_an_md5_one_in_eight_is_hashed() -> None:
    """So hashing takes an eighth of the time that receiving takes."""
    asked = list[int]()
    rng: Any = SimpleNamespace(randrange=lambda stop: asked.append(stop) or 1)
    sampler: Any = SimpleNamespace(take=lambda *_: None, rng=rng)
    comparing = object.__new__(Comparing)
    comparing.sampler, comparing._not_md5_sources, comparing._busy = sampler, set(), False
    version = ObjectId(SOURCE, "a", f'"{"0" * 32}"', 10)
    origin: Any = SimpleNamespace(source=SOURCE)
    cache_write: Any = SimpleNamespace(written=10, block_size=BLOCK)
    await comparing.received(cast(Any, None), origin, version, cache_write, 0)
    assert asked == [8]


@in_trio
async def test_etags_that_only_look_like_md5_say_nothing(cache_dir: Path) -> None:
    """As those of objects that a store encrypts: one GET of the origin tells, and then no more are sent."""
    async with nodes(cache_dir, 2) as cluster:
        reader, owner = cluster
        watch(reader)
        comparing = reader.fetcher._upstream.comparing
        assert comparing is not None
        comparing.sampler._bytes_to_go = 1e12
        for number in range(5):
            data = content(number, 100 * KIB)
            object_id = put(cluster, owner, data, f'"{number:032x}"')
            assert await owner.read(object_id, 0, len(data)) == data
            cluster.origin.gets.clear()
            assert await reader.read(object_id, 0, len(data)) == data
            await cluster.quiet()
            await until(lambda: SOURCE in comparing._not_md5_sources and not comparing._busy, 30)
            assert len(cluster.origin.gets) == (1 if number == 0 else 0)
        assert reader.metrics.peer_lies == 0


@pytest.mark.parametrize("size", [BLOCK, BLOCK // 10])
def test_what_is_compared_is_a_small_part_and_no_peer_knows_which(size: int) -> None:
    places = []
    for seed in range(20):
        sampler, compared = Sampler(BLOCK, rng=random.Random(seed)), 0
        count = 20 * SHARE * BLOCK // size
        for number in range(count):
            found = sampler.take(number * size, (number + 1) * size, BLOCK)
            if found is not None:
                places.append(number)
                compared += found[1]
                assert number * size <= found[0] < found[0] + found[1] <= (number + 1) * size
        assert 0.002 < compared / (count * size) <= 0.005
    assert len(set(places)) > len(places) / 4
    assert min(places) * size >= (SHARE - 1) * BLOCK  # what fits in small tests is not compared


def test_a_block_of_a_long_delivery_is_any_of_it() -> None:
    rng = random.Random(1)
    found = set()
    for _ in range(500):
        sampler = Sampler(BLOCK, share=0, rng=rng)
        taken = sampler.take(4 * BLOCK, 16 * BLOCK + 5, BLOCK)
        assert taken is not None
        found.add(taken)
    assert {offset // BLOCK for offset, _ in found} == set(range(4, 17))
    assert dict(found)[16 * BLOCK] == 5 and dict(found)[4 * BLOCK] == BLOCK


@in_trio
async def test_fetches_that_begin_after_a_lie_do_not_prolong_the_drop() -> None:
    """While programs read the object there is always one, and each turn would evict what came from the origin."""
    evicted: list[ObjectId] = []
    ended: list[int] = []

    class Fetch:
        async def ended(self) -> None:
            assert len(ended) < 10, "it does not come to its end"
            ended.append(len(evicted))

    version = ObjectId(SOURCE, "a", '"1"', 10)
    store: Any = SimpleNamespace(
        block_size=BLOCK,
        object=lambda _: SimpleNamespace(held=nullcontext),
        unpin=lambda _: None,
        evict=lambda _: evicted.append(version),
    )
    cluster: Any = SimpleNamespace(lied=lambda _: None)
    comparing = Comparing(store, lambda _: {0: Fetch(), 1: Fetch()}, cluster, cast(Any, None), Metrics())
    candidate: Any = SimpleNamespace(member="peer")
    await comparing._drop_wrong(candidate, cast(Any, SimpleNamespace(name=str)), version, 0)
    assert ended == [1, 2] and len(evicted) == 3

"""What counters have to do with one another, whatever happens: a counter that nobody counts, or counts twice, shows here."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachefs.base.errors import CachefsError, Transient
from cachefs.base.ledger import REASONS
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId, blocks_covering
from cachefs.origin import Origin
from tests.conftest import examples
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, KIB, Lab, cache_files, flip_bit, running

SIZES = [1, BLOCK, 3 * BLOCK + 17, EXTENT + 5, 5 << 20]
read = st.tuples(
    st.just("read"), st.integers(0, 4), st.floats(0, 1), st.sampled_from([1, 100 * KIB, 1 << 20])
)
step = st.one_of(
    read,
    read,
    read,
    st.tuples(st.just("prefetch"), st.integers(0, 4)),
    st.tuples(st.just("overwrite"), st.integers(0, 4)),
    st.tuples(st.just("damage")),
    st.tuples(st.just("fail"), st.sampled_from([0, 10, BLOCK + 1])),
    st.tuples(st.just("cancel"), st.integers(0, 4)),
)


def check(metrics: Metrics, asked: int, origin_bytes: int) -> None:
    """What holds when nothing is under way; `asked` are the blocks that reads wanted."""
    counted = metrics.as_dict()
    hits = counted["ram_hits"] + counted["ssd_hits"] + counted["heap_hits"]
    assert hits + counted["misses"] == asked
    assert counted["misses"] == sum(counted[f"misses_{reason}"] for reason in REASONS)
    brought = counted["admitted_bytes"] + counted["bypassed_bytes"] + counted["discarded_bytes"]
    assert brought == origin_bytes
    waits = metrics.ledger.waits
    rows, total = waits.processes(), waits.totals()
    assert sum(row["reads"] for row in rows) == total["reads"] == sum(waits.read_seconds.counts)
    assert not waits.waiting()
    assert total["waiting"] == 0


class Doing:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.asked = 0
        self.versions: list[ObjectId] = []
        for key in range(5):
            self.versions.append(self.put(key))

    def put(self, key: int) -> ObjectId:
        return self.lab.origin.put(f"k{key}", content(random.random(), SIZES[key]))

    async def read(self, key: int, where: float, size: int) -> None:
        version = self.versions[key]
        offset = int(where * (version.size - 1))
        size = min(size, version.size - offset)
        got = await self.lab.read(version, offset, size, pid=os.getpid())
        self.asked += len(blocks_covering(offset, len(got), BLOCK))

    async def prefetch(self, key: int) -> None:
        await self.lab.fetcher.prefetch(self.lab.origin, self.versions[key])  # type: ignore[arg-type]

    async def overwrite(self, key: int) -> None:
        self.versions[key] = self.put(key)

    async def damage(self) -> None:
        """A block that was not checked since the start fails when it is."""
        await self.lab.quiet()
        for file in cache_files(*(tier.path for tier in self.lab.store.tiers))[:1]:
            if file.stat().st_size:
                flip_bit(file, random.Random(1))
        for version in self.versions:
            obj = self.lab.store.object(version)
            for tier in self.lab.store.tiers:
                for copy in self.lab.store.catalog.copies(obj, tier.number):
                    copy.verified = 0

    async def fail(self, after: int) -> None:
        self.lab.origin.fail(lambda: Transient("scripted"), after=after)

    async def cancel(self, key: int) -> None:
        with trio.move_on_after(0):
            await self.prefetch(key)


@pytest.mark.parametrize("cache", [{"ssd": 4 * EXTENT}, {"ssd": 3 * EXTENT, "ram": EXTENT}, {"ssd": 0}])
@settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(step, min_size=3, max_size=15))
def test_counters_add_up(
    tmp_path_factory: pytest.TempPathFactory, cache: dict[str, int], steps: list[tuple[Any, ...]]
) -> None:
    place = tmp_path_factory.mktemp("identities")

    @in_trio
    async def go() -> None:
        async with running(place / "cache", **cache, readahead=4 * BLOCK) as lab:
            doing = Doing(lab)
            for name, *how in steps:
                try:
                    await getattr(doing, name)(*how)
                except CachefsError:
                    # Blocks were asked for all the same: which ones, only the counters can say.
                    await lab.quiet()
                    hits = sum(getattr(lab.metrics, f"{tier}_hits") for tier in ("ram", "ssd", "heap"))
                    doing.asked = hits + lab.metrics.misses
                await lab.quiet()
            check(lab.metrics, doing.asked, lab.origin.delivered)

    try:
        go()
    finally:
        from cachefs.store.ram import remove_ram

        remove_ram(place / "cache")


@in_trio
async def test_a_read_of_what_is_partly_here_counts_each_block_once(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=64 << 20) as lab:
        version = lab.origin.put("k", content(1, 5 << 20))
        await lab.read(version, 0, 1)
        before = lab.metrics.misses
        await lab.read(version, 0, 4 * BLOCK)
        assert (before, lab.metrics.misses, lab.metrics.ssd_hits) == (1, 4, 1)
        await lab.read(version, 0, 4 * BLOCK)
        assert (lab.metrics.misses, lab.metrics.ssd_hits) == (4, 5)


@in_trio
async def test_reasons_reach_the_counters(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=2 * EXTENT) as lab:
        first = lab.origin.put("k", content(1, 10 * BLOCK))
        await lab.read(first)
        assert lab.metrics.misses_cold == lab.metrics.misses == 10
        for number in range(3):
            await lab.read(lab.origin.put(f"filler{number}", content(number, EXTENT)))
        await lab.read(first)
        assert lab.metrics.misses_evicted == 10
        await lab.read(lab.origin.put("k", content(2, BLOCK)))
        assert lab.metrics.misses_changed == 1
        [row] = [row for row in lab.metrics.ledger.waits.processes() if row["reads"]]
        assert row["waited_s"]["origin"] > 0


class OneObject:
    """A client that gives one object in pieces."""

    writer = None

    def read(self, key: str, etag: str, start: int, stop: int, whole: bool) -> Any:
        for at in range(start, stop, 7):
            yield b"x" * min(7, stop - at)

    def head(self, key: str) -> Any:
        raise Transient("not now")

    def list_page(self, prefix: str, token: Any, limit: int) -> Any:
        return None

    def renew(self, since: float) -> bool:
        return False

    def close(self) -> None:
        pass


class Sink:
    def write(self, data: Any) -> None:
        pass


@in_trio
async def test_accounts_of_datasets_and_processes_are_the_counters_by_name() -> None:
    from cachefs.origin.attempts import Attempts, Backoff, Ticket

    metrics = Metrics()
    attempts = Attempts(
        OneObject(),  # type: ignore[arg-type]
        source="s3://b",
        prefix="data/",
        metrics=metrics,
        backoff=Backoff(retries=2, first_s=0),
    )
    origin = Origin(attempts)
    ticket = Ticket()
    ticket.thread = os.getpid()
    await origin.read("data/a/1", "e", 0, 100, Sink(), ticket=ticket)
    await origin.read("data/b/1", "e", 0, 50, Sink())
    await origin.list_page("data/a/")
    with pytest.raises(CachefsError):
        await origin.head("data/b/2")
    accounts = metrics.ledger.datasets
    assert accounts["data/a"] == {"origin_get": 1, "origin_bytes": 100, "origin_list": 1}
    assert accounts["data/b"] == {"origin_get": 1, "origin_bytes": 50, "origin_head": 3}
    for name in ("origin_get", "origin_list", "origin_head", "origin_bytes"):
        assert sum(account[name] for account in accounts.values()) == getattr(metrics, name)
    [process] = metrics.ledger.waits.processes()
    assert process["requests"] == {"origin_get": 1, "origin_bytes": 100}

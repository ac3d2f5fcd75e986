"""Opens that wait for a file which is about to be whole: when they do, for how long, and what is counted of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import trio
import trio.testing

from cachefs.base import errors
from cachefs.base.ledger import NAMES, current_call
from cachefs.base.names import ObjectId
from cachefs.fetch.fetcher import OPEN_WAITS_S, soon_whole
from tests.fetch.scripted import Hold, content, in_trio
from tests.store.lab import BLOCK, MIB, Lab, running

NOW, LATE = OPEN_WAITS_S / 2, 2 * OPEN_WAITS_S


class InFlight(NamedTuple):
    left: float
    cache_write: Any

    def left_s(self) -> float:
        return self.left

    def __hash__(self) -> int:
        return id(self)


@pytest.mark.parametrize(
    ("here", "in_flight_fetches", "in_heap", "soon"),
    [
        ({0, 1, 2, 3}, {}, False, False),  # it is whole
        ({0, 1}, {}, False, False),  # nothing comes
        ({0, 1}, {2: NOW, 3: NOW}, False, True),
        ({0, 1}, {2: NOW, 3: LATE}, False, False),
        ({0, 1}, {2: NOW}, False, False),  # nobody brings the last
        (set(), {0: NOW, 1: NOW, 2: NOW, 3: NOW}, False, True),
        ({0, 1}, {2: NOW, 3: NOW}, True, False),  # no tier takes it
    ],
)
def test_soon_is_when_all_of_it_may_be_here_within_the_wait(
    here: set[int], in_flight_fetches: dict[int, float], in_heap: bool, soon: bool
) -> None:
    under_way = {
        block: InFlight(left, SimpleNamespace(in_heap=in_heap)) for block, left in in_flight_fetches.items()
    }
    obj: Any = SimpleNamespace(id=ObjectId("s", "k", "e", 4 * BLOCK - 5))
    store: Any = SimpleNamespace(block_size=BLOCK, has=lambda obj, block: block in here)
    assert soon_whole(store, under_way, obj) == soon  # type: ignore[arg-type]


@asynccontextmanager
async def on_its_way(cache_dir: Path, held_at: int) -> AsyncIterator[tuple[Lab, ObjectId, Hold]]:
    """Four blocks, being fetched ahead of anybody, of which those from `held_at` on do not come yet."""
    async with running(cache_dir) as lab:
        lab.fetcher.passthrough = True
        object_id = lab.origin.put("k", content(1, 4 * BLOCK))
        hold = lab.origin.hold("k", held_at)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_bring, lab, object_id)
            await hold.reached.wait()
            yield lab, object_id, hold
            hold.release.set()
        await lab.quiet()
        assert not lab.store.object(object_id).refs
        lab.check_accounts()


async def _bring(lab: Lab, object_id: ObjectId) -> None:
    try:
        await lab.fetcher.prefetch(lab.origin, object_id)  # type: ignore[arg-type]
    except errors.CachefsError:
        pass


def passthrough(lab: Lab, object_id: ObjectId) -> bool:
    backing = lab.fetcher.open_backing(lab.fetcher.open(lab.origin, object_id))  # type: ignore[arg-type]
    if backing is None:
        return False
    lab.fetcher.release_backing(backing)
    return True


@in_trio
async def test_who_waits_is_passthrough_it_and_was_a_reader_that_came_too_early(cache_dir: Path) -> None:
    async with on_its_way(cache_dir, 2 * BLOCK) as (lab, object_id, hold):
        assert not passthrough(lab, object_id)
        (get,) = lab.origin.gets
        call = lab.metrics.ledger.waits.call(77, NAMES, "open")
        current_call.set(call)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lab.fetcher.wait_until_cached, object_id, 77)
            await trio.testing.wait_all_tasks_blocked()
            assert get.ticket is not None and not get.ticket.background, (
                "it goes before what no reader waits for"
            )
            (waiting,) = lab.metrics.ledger.waits.waiting()
            assert (waiting["request"], waiting["key"], waiting["on"]) == ("read", "k", "origin")
            hold.release.set()
        assert passthrough(lab, object_id)
        assert not lab.fetcher.soon_cached(object_id)
        metrics = lab.metrics
        assert metrics.misses == metrics.misses_prefetch_in_flight == metrics.prefetched_late == 4, (
            "blocks end with their transfer"
        )
        totals = metrics.ledger.waits.totals()
        assert (totals["reads"], totals["calls"], totals["waiting"]) == (1, 1, 0)
        assert not metrics.ledger.waits.waiting()


@in_trio
async def test_a_wait_that_was_for_nothing_ends_and_counts_nothing(cache_dir: Path) -> None:
    async with on_its_way(cache_dir, 2 * BLOCK) as (lab, object_id, hold):
        begun = trio.current_time()
        await lab.fetcher.wait_until_cached(object_id, 1)
        assert trio.current_time() - begun >= OPEN_WAITS_S
        assert not passthrough(lab, object_id) and not lab.metrics.misses
        hold.release.set()
        await lab.read(object_id)
        assert lab.metrics.misses == lab.metrics.misses_prefetch_in_flight == 4, "its reader counts them"


@in_trio
async def test_a_transfer_that_fails_fails_no_open(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        lab.fetcher.passthrough = True
        object_id = lab.origin.put("k", content(1, 4 * BLOCK))
        hold = lab.origin.hold("k", BLOCK)
        lab.origin.fail(lambda: errors.OriginFailed("no"), after=2 * BLOCK)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_bring, lab, object_id)
            await hold.reached.wait()
            nursery.start_soon(lab.fetcher.wait_until_cached, object_id, 1)
            await trio.testing.wait_all_tasks_blocked()
            hold.release.set()
        assert not passthrough(lab, object_id) and not lab.metrics.misses
        assert not lab.metrics.ledger.waits.totals()["waiting"]


@in_trio
async def test_a_signal_ends_a_wait_and_not_the_transfer(cache_dir: Path) -> None:
    async with on_its_way(cache_dir, BLOCK) as (lab, object_id, _):
        with trio.move_on_after(OPEN_WAITS_S / 10):
            await lab.fetcher.wait_until_cached(object_id, 1)
        assert not lab.metrics.ledger.waits.totals()["waiting"]
        assert lab.fetcher.in_flight_fetches == 1


@in_trio
async def test_nobody_waits_where_nothing_is_passthrough_or_its_reads_are_to_be_seen(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=64 * MIB, block=MIB) as lab:
        object_id = lab.origin.put("k", content(1, 5 * MIB))
        hold = lab.origin.hold("k", MIB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_bring, lab, object_id)
            await hold.reached.wait()
            fetch_in_flight = lab.fetcher.transfers.of(lab.store.object(object_id))[4]
            fetch_in_flight.left_s = lambda: 0.0
            assert not lab.fetcher.soon_cached(object_id)
            lab.fetcher.passthrough = True
            assert lab.fetcher.soon_cached(object_id)
            lab.fetcher.watch_reads(lambda *read: None, {object_id.digest})
            assert not lab.fetcher.soon_cached(object_id)
            hold.release.set()


@in_trio
async def test_what_is_left_is_told_by_the_pace_so_far(cache_dir: Path) -> None:
    before = trio.current_time()
    async with on_its_way(cache_dir, 3 * BLOCK) as (lab, object_id, _):
        begun_by = trio.current_time()
        await trio.sleep(0.02)
        fetch_in_flight = lab.fetcher.transfers.of(lab.store.object(object_id))[3]
        assert fetch_in_flight.cache_write.written == 3 * BLOCK
        least, left, most = (
            trio.current_time() - begun_by,
            fetch_in_flight.left_s(),
            trio.current_time() - before,
        )
        assert least / 3 <= left <= most / 3
    async with on_its_way(cache_dir.with_name("other"), 0) as (lab, object_id, _):
        begun_by = trio.current_time()
        await trio.sleep(0.02)
        assert (
            lab.fetcher.transfers.of(lab.store.object(object_id))[3].left_s()
            >= trio.current_time() - begun_by - 0.001
        )

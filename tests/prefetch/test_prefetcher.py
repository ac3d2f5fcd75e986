"""What prefetch costs and saves, in requests: real names, real cache, real transfers, a bucket that counts."""

from __future__ import annotations

import base64
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs import hints
from cachefs.base.errors import ConfigError, OriginFailed, Unreachable
from cachefs.prefetch import Prefetcher, prefetcher
from cachefs.prefetch.plans import FOLLOWED_S, QUIET_S
from cachefs.prefetch.prefetcher import SWEEP_EVERY_S, UNREAD_S
from cachefs.prefetch.shards import AHEAD, MOST_UNREAD
from cachefs.store.eviction import PREFETCHED_S
from tests.prefetch.world import KIB, LARGE_FILE, MIB, Shop, world


def paths(count: int) -> list[str]:
    return [f"d/{i:05d}.jpg" for i in range(count)]


def shuffled(names: Sequence[str], count: int | None = None, seed: int = 1) -> list[str]:
    return random.Random(seed).sample(names, len(names) if count is None else count)


def damage(directory: Path) -> None:
    """One bit of the database."""
    path = directory / "data.mdb"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


async def announce(
    prefetcher: Prefetcher, names: Sequence[str], order: Sequence[int], epoch: int = 0, plan: str = "p"
) -> None:
    step = 700
    for at in range(0, len(names), step):
        await prefetcher.hints.files(plan, list(names[at : at + step]), at, len(names))
    for at in range(0, len(order), step):
        text = base64.b64encode(array("I", order[at : at + step]).tobytes()).decode()
        await prefetcher.hints.order(plan, epoch, text, at, len(order))


@pytest.mark.long
async def test_a_shuffled_epoch_fetches_each_file_once_and_in_time() -> None:
    names = paths(4000)
    shop = Shop(names)
    async with world(shop) as w:
        began = trio.current_time()
        await w.read_all(shuffled(names))
        seconds = trio.current_time() - began
        assert Counter(shop.got) == Counter(names)
        assert w.metrics.prefetch_used_files == w.metrics.prefetch_files > 3000
        assert shop.most_in_flight > 40
        assert seconds < 4000 * 0.02 / 4 / 4  # of virtual time: a quarter of what four workers alone take
        assert not w.prefetcher.awaited.files and not w.prefetcher.awaited.unused_bytes


async def test_a_wanted_twentieth_costs_a_tenth_more() -> None:
    names = paths(4000)
    shop = Shop(names)
    async with world(shop) as w:
        await w.read_all(shuffled(names, 200))
        await w.quiet()
        assert len(shop.got) == len(set(shop.got)) <= 200 + 400
        status = w.prefetcher.status()["directories"][0]
        assert (status["name"], status["files"]) == ("d", 4000)
        assert status["wanted"] == 200 and status["fetched"] - status["used"] <= 400


async def test_two_files_of_a_directory_and_many_directories_fetch_nothing_ahead() -> None:
    names = [f"d{i}/{j}" for i in range(50) for j in range(40)]
    shop = Shop(names)
    async with world(shop) as w:
        await w.read_all([f"d{i}/{j}" for i in range(50) for j in (7, 8)])
        await w.quiet()
        assert len(shop.got) == 100 and not w.metrics.prefetch_files


async def test_what_is_cached_is_fetched_no_second_time() -> None:
    names = paths(300)
    shop = Shop(names)
    async with world(shop) as w:
        await w.read_all(names)
        await w.read_all(shuffled(names))
        await w.quiet()
        assert Counter(shop.got) == Counter(names)


async def test_large_files_beside_small_ones_are_left_to_their_readers() -> None:
    names = paths(50)
    shop = Shop(names)
    shop.put("d/big.tar", LARGE_FILE)
    async with world(shop) as w:
        await w.read_all(names[:20])
        await w.quiet()
        assert "d/big.tar" not in shop.got


@pytest.mark.parametrize("workers", [1, 4])
async def test_the_next_shard_is_fetched_before_it_is_opened(workers: int) -> None:
    names = [f"s/train-{i:03d}.tar" for i in range(24)]
    shop = Shop(names, size=LARGE_FILE)
    async with world(shop) as w:
        missing = 0
        for number, name in enumerate(names):
            missing += name not in shop.got
            await w.read(name, pid=100 + number % workers)
            await trio.sleep(1)
        assert missing <= max(2, workers)
        assert sum(stop - start for _, start, stop in shop.gets) == 24 * LARGE_FILE  # each byte once
        assert w.metrics.prefetch_used_files == w.metrics.prefetch_files >= 20
        assert w.prefetcher.status()["shards"] == workers


async def test_two_shards_ahead_at_most() -> None:
    names = [f"s/{i:03d}" for i in range(30)]
    shop = Shop(names, size=LARGE_FILE)
    async with world(shop) as w:
        for name in names[:5]:
            await w.read(name)
            await trio.sleep(1)
        assert set(shop.got) == set(names[:7])


async def test_looking_at_shards_fetches_nothing_ahead() -> None:
    names = [f"s/{i:03d}.parquet" for i in range(30)]
    shop = Shop(names, size=LARGE_FILE)
    async with world(shop) as w:
        for name in names:
            await w.look(name, LARGE_FILE - 64 * KIB, 64 * KIB)
            await w.look(name, LARGE_FILE // 2, 64 * KIB)
        await w.quiet()
        assert not w.metrics.prefetch_files and len(shop.got) <= 60
        assert sum(stop - start for _, start, stop in shop.gets) <= 60 * MIB


async def test_who_turns_to_looking_wastes_a_few_shards_and_is_not_said_to_use_them() -> None:
    names = [f"s/{i:03d}.parquet" for i in range(60)]
    shop = Shop(names, size=LARGE_FILE)
    async with world(shop) as w:
        for name in names[:12]:
            await w.read(name)
            await trio.sleep(1)
        status = w.prefetcher.status()
        assert (
            status["fetched_bytes"] - status["used_bytes"]
            == w.prefetcher.awaited.unused_bytes
            == 2 * LARGE_FILE
        )
        for name in names[12:]:
            await w.look(name, LARGE_FILE - 64 * KIB, 64 * KIB)
            await trio.sleep(0.1)
        whole = {key for key, start, stop in shop.gets if stop - start > MIB}
        assert len(whole) <= 12 + MOST_UNREAD + AHEAD
        assert w.prefetcher.awaited.unused_bytes > (len(whole) - 12) * (LARGE_FILE - 64 * KIB - 1)
        await trio.sleep(2 * SWEEP_EVERY_S + UNREAD_S)
        assert w.prefetcher.awaited.unused_bytes == 0  # no reader comes for them


async def test_that_all_was_read_in_an_epoch_does_not_vouch_for_the_next() -> None:
    names = [f"s/{i:03d}.parquet" for i in range(40)]
    shop = Shop(names, size=LARGE_FILE)
    async with world(shop) as w:
        for name in names:
            await w.read(name)
            await trio.sleep(1)
        for name in names:
            found = w.fs.tree_queries.known(name)
            assert found is not None
            w.lab.store.evict(w.lab.store.object(found[1]))
        before = w.metrics.prefetch_files
        for number, name in enumerate(names):
            await (w.read(name) if number < 20 else w.look(name, LARGE_FILE - 64 * KIB, 64 * KIB))
            await trio.sleep(1)
        assert 15 < w.metrics.prefetch_files - before <= 20 + MOST_UNREAD + AHEAD


async def test_no_more_is_used_than_was_fetched_ahead() -> None:
    names = [f"s/{i:03d}.tar" for i in range(12)]
    shop = Shop(names, size=LARGE_FILE)
    async with world(shop) as w:
        for name in names:  # each is opened while it is on its way
            await w.read(name)
            status = w.prefetcher.status()
            assert status["used_bytes"] <= status["fetched_bytes"]
        await w.quiet()
        assert w.prefetcher.status()["used_bytes"] > 0
        assert sum(stop - start for _, start, stop in shop.gets) == 12 * LARGE_FILE


@pytest.mark.parametrize("known", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_every_open_of_a_hinted_order_finds_its_file_whole(known: bool) -> None:
    names = [f"c{i % 20:02d}/{i:04d}" for i in range(2000)]
    shop = Shop(names)
    async with world(shop) as w:
        if known:
            await w.read(names[0])
        order = random.Random(1).sample(range(2000), 2000)
        await announce(w.prefetcher, [f"/{name}" for name in names], order)
        await trio.sleep(2)
        misses = w.metrics.misses
        for number in order:
            await w.read(names[number])
        assert w.metrics.misses == misses
        assert Counter(shop.got) == Counter(names)
        assert w.prefetcher.status()["plans"][0]["position"] >= 1990
        assert w.prefetcher.status()["unused_bytes"] == 0


@pytest.mark.long
async def test_ahead_of_a_plan_is_bounded_by_bytes_and_goes_on_with_use() -> None:
    names = paths(2000)
    shop = Shop(names)
    async with world(shop, budget=100_000) as w:
        await announce(w.prefetcher, names, range(2000))
        await w.quiet()
        assert 100 <= len(shop.got) <= 156
        assert w.prefetcher.status()["paused"]
        for number in range(2000):
            await w.read(names[number])
            if number % 20 == 0:
                await trio.sleep(0.05)
                assert w.prefetcher.awaited.unused_bytes <= 100_000 + 56_000
        assert Counter(shop.got) == Counter(names)
        assert w.metrics.misses == 0


async def test_wrong_hints_cost_requests_and_nothing_else() -> None:
    names = paths(200)
    shop = Shop(names)
    async with world(shop) as w:
        await announce(w.prefetcher, [*names[100:], "no/such", "d", "d/\udcff"], range(103))
        await w.read_all(names[:100])
        await w.quiet()
        assert len(shop.got) == len(set(shop.got)) == 200
        assert w.prefetcher.status()["unknown_paths"] >= 1
        assert w.metrics.prefetch_errors <= 2


async def test_an_object_that_changed_or_fails_costs_its_prefetch_alone() -> None:
    names = paths(60)
    shop = Shop(names)
    async with world(shop) as w:
        await w.read(names[0])
        shop.put(names[7], 1000, version=2)
        shop.refuse = lambda key: OriginFailed("down") if key == names[9] else None
        await announce(w.prefetcher, names, range(60))
        await w.quiet()
        assert w.metrics.prefetch_errors == 2
        assert set(shop.got) == set(names)
        shop.refuse = lambda key: None
        await w.read(names[9])


async def test_a_file_that_is_opened_while_its_prefetch_fails_is_no_prefetched_file() -> None:
    names = paths(8)
    shop = Shop(names, latency=1.0)
    async with world(shop) as w:
        shop.refuse = lambda key: OriginFailed("once") if shop.got.count(key) == 1 else None
        await announce(w.prefetcher, names, range(4))
        await trio.sleep(0.5)
        assert shop.most_in_flight == 4
        await w.read_all(names[:4])
        assert (w.metrics.prefetch_errors, w.metrics.prefetch_files, w.metrics.prefetch_used_files) == (
            4,
            0,
            0,
        )
        shop.refuse = lambda key: None
        await announce(w.prefetcher, names, range(4, 8), epoch=1)
        await trio.sleep(1.5)
        await w.read_all(names[4:])
        assert w.metrics.prefetch_files == w.metrics.prefetch_used_files == 4


@pytest.mark.parametrize("listed", [True, False])
async def test_what_an_outage_kept_from_being_fetched_is_fetched_afterwards(listed: bool) -> None:
    names = paths(600)
    shop = Shop(names)
    async with world(shop, slots=16) as w:
        if listed:
            await w.read(names[0])
        shop.refuse = lambda key: Unreachable("no answer")
        await announce(w.prefetcher, names, range(600))
        await trio.sleep(20)
        assert w.prefetcher.status()["paused"] == "no answer" and w.metrics.prefetch_errors >= 20
        shop.refuse = lambda key: None
        shop.gets.clear()
        await w.quiet()
        assert Counter(shop.got) == Counter(names[listed:])


async def test_the_next_epoch_is_fetched_and_entered() -> None:
    names = paths(400)
    shop = Shop(names)
    async with world(shop) as w:
        orders = [random.Random(seed).sample(range(400), 400) for seed in range(2)]
        await announce(w.prefetcher, names[:200], [n for n in orders[0] if n < 200])
        for number in orders[0]:
            if number < 200:
                await w.read(names[number])
        await announce(w.prefetcher, names, orders[1], epoch=1, plan="q")
        await w.quiet()
        assert set(shop.got) == set(names)
        for number in orders[1]:
            await w.read(names[number])
        assert Counter(shop.got) == Counter(names)


async def test_ranks_have_their_turns() -> None:
    names = paths(800)
    shop = Shop(names)
    async with world(shop, slots=8) as w:
        for rank in range(4):
            await announce(w.prefetcher, names, range(rank, 800, 4), plan=f"rank{rank}")
        await trio.sleep(0.2)
        count = Counter(int(key[2:7]) % 4 for key in shop.got)
        assert shop.most_in_flight <= 8 and max(count.values()) - min(count.values()) <= 8


async def test_a_plan_survives_the_daemon(tmp_path: Path) -> None:
    names = paths(1000)
    order = random.Random(3).sample(range(1000), 1000)
    async with world(Shop(names), budget=50_000, plans=tmp_path) as w:
        await announce(w.prefetcher, names, order)
        await announce(w.prefetcher, names, order[::-1], epoch=1)
        await announce(w.prefetcher, names, range(10), plan="other")
        await w.prefetcher.hints.drop("other")
    shop = Shop(names)
    async with world(shop, budget=50_000, plans=tmp_path) as w:
        await w.quiet()
        assert w.prefetcher.status()["plans"][0] | {"ahead": 0} == {
            "name": "p",
            "files": 1000,
            "position": 0,
            "epoch": 0,
            "ahead": 0,
        }
        for number in order[500:520]:
            await w.read(names[number])
        await w.quiet()
        assert {names[n] for n in order[520:560]} <= set(shop.got)
        assert w.prefetcher.status()["plans"][0]["position"] > 510


async def test_damaged_plans_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = paths(50)
    async with world(Shop(names), plans=tmp_path) as w:
        await announce(w.prefetcher, names, range(50))
    damage(tmp_path)
    for plan in ("second", "third"):  # begun afresh, and used again
        async with world(Shop(names), plans=tmp_path) as w:
            await trio.sleep(1)
            assert [known["name"] for known in w.prefetcher.status()["plans"]] == ["second"][
                : plan != "second"
            ]
            await announce(w.prefetcher, names[:20], range(20), plan=plan)
    assert len([r for r in caplog.records if "dropping the database" in r.message]) == 1


async def test_chunks_are_checked() -> None:
    async with world(Shop(paths(3))) as w:
        p = w.prefetcher
        with pytest.raises(ConfigError):
            await p.hints.order("p", 0, "", 0, 0)
        with pytest.raises(ConfigError):
            await p.hints.files("p", ["x"], 5, 10)
        assert await p.hints.files("p", ["a", "b"], 0, 3) == 2
        with pytest.raises(ConfigError):
            await p.hints.files("p", ["c"], 1, 3)
        assert await p.hints.files("p", ["c"], 2, 3) == 3
        for text in ("!", base64.b64encode(b"abc").decode(), base64.b64encode(b"\7\0\0\0").decode()):
            with pytest.raises(ConfigError):
                await p.hints.order("p", 0, text, 0, 3)
        with pytest.raises(ConfigError):
            await p.hints.order("p", 0, "", 0, 1 << 40)
        with pytest.raises(ConfigError):
            await p.hints.files("", [], 0, 0)
        with pytest.raises(ConfigError):
            await p.hints.files("p", [], 0, 1 << 40)


async def test_an_order_for_another_list_is_refused() -> None:
    names, others = paths(30), [f"other/{i}" for i in range(30)]
    async with world(Shop([*names, *others])) as w:
        await announce(w.prefetcher, names, range(30), plan="p")
        text = base64.b64encode(array("I", range(30)).tobytes()).decode()
        with pytest.raises(ConfigError, match="another list"):
            await w.prefetcher.hints.order("p", 1, text, 0, 30, hints.digest(others))
        assert await w.prefetcher.hints.order("p", 1, text, 0, 30, hints.digest(names)) == 30


async def test_what_is_never_opened_is_awaited_through_an_evaluation_and_then_given_up() -> None:
    """A job that begins a quarter of an hour after another one died may fetch as much as it would alone."""
    names = paths(40)
    shop = Shop(names)
    async with world(shop) as w:
        await w.read_all(names[:3], workers=1)
        await w.quiet()
        assert (unused := w.prefetcher.awaited.unused_bytes)
        await trio.sleep(9 * 60)
        assert w.prefetcher.awaited.unused_bytes == unused
        await trio.sleep(6 * 60)
        assert not w.prefetcher.awaited.unused_bytes


async def test_the_plan_of_a_dead_job_is_in_nobodys_way() -> None:
    shop = Shop([f"{d}/{i:04}" for d in "ab" for i in range(400)], size=100_000)
    async with world(shop, budget=8 * MIB) as w:
        planned, others = ([f"{d}/{i:04}" for i in range(400)] for d in "ab")
        await announce(w.prefetcher, planned, range(400))
        await w.quiet()
        fetched, unused = len(shop.gets), w.prefetcher.awaited.unused_bytes
        await trio.sleep(QUIET_S - 10)
        assert w.prefetcher.awaited.unused_bytes == unused > 7 * MIB
        await trio.sleep(PREFETCHED_S + SWEEP_EVERY_S)
        assert not w.prefetcher.awaited.unused_bytes and len(shop.gets) == fetched
        await w.read_all(others[:200], workers=4, think=0.05)
        assert w.metrics.prefetch_used_files > 100
        assert set(shop.got) & set(planned) == set(planned[:fetched])
        await w.read_all(others[200:], workers=4, think=0.05)
        await w.read_all(planned[:20], workers=1)  # it was not dead
        await w.quiet()
        assert len(set(shop.got) & set(planned)) > fetched
        assert w.prefetcher.awaited.everything
        assert not w.fs._files._known.closed
        await trio.sleep(FOLLOWED_S + 2 * SWEEP_EVERY_S)
        assert not w.prefetcher.awaited.everything
        await w.read_all(others[:5], workers=1)
        assert len(w.fs._files._known.closed) == 5, "their next opens are told to no hook"
        await announce(w.prefetcher, planned, range(400)[::-1], epoch=1)
        assert not w.fs._files._known.closed
        await w.quiet()
        assert w.prefetcher.awaited.everything and w.prefetcher.awaited.unused_bytes > 7 * MIB


async def test_files_that_lie_unused_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetcher, "MOST_AWAITED", 100)
    names = paths(400)
    shop = Shop(names)
    async with world(shop, slots=10) as w:
        await announce(w.prefetcher, names, range(400))
        await w.quiet()
        assert len(shop.got) == 100
        await w.read_all(names)
        assert Counter(shop.got) == Counter(names)


@pytest.mark.parametrize("hinted", [pytest.param(True, marks=pytest.mark.long), False])
async def test_a_data_set_of_twice_the_cache_is_fetched_once_an_epoch(hinted: bool) -> None:
    """What is fetched ahead displaces nothing that is still to be read, itself included."""
    names = [f"d/{i:03d}" for i in range(256)]
    shop = Shop(names, size=64 * KIB)
    async with world(shop, ssd=8 * MIB, budget=4 * MIB) as w:
        orders = [random.Random(epoch).sample(range(256), 256) for epoch in range(3)]
        for epoch in range(3):
            misses, gets = w.metrics.misses, len(shop.got)
            if hinted:
                await announce(w.prefetcher, names, orders[epoch], epoch)
            for number in orders[epoch]:
                await w.read(names[number])
                await trio.sleep(0.05)
            assert len(shop.got) - gets <= 256 * 1.02
            assert w.metrics.misses - misses <= (32 if hinted else 160)


async def test_a_full_cache_pauses_prefetch_and_readers_go_on() -> None:
    names = [f"s/{i:03d}" for i in range(12)]
    shop = Shop(names, size=LARGE_FILE)
    async with world(shop, ssd=12 * MIB, budget=64 * MIB) as w:
        await announce(w.prefetcher, names, range(12))
        await w.quiet()
        before = len(shop.gets)
        assert w.prefetcher.status()["paused"] == "no room"
        await trio.sleep(30)
        assert len(shop.gets) <= before + 30  # tried once a second, not in a loop
        for name in names:
            await w.read(name)
            await trio.sleep(2)
        assert w.metrics.prefetch_errors == 0


async def test_files_are_begun_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done once for a group: choosing it, looking for room, and waking the task that begins it."""
    names = paths(1000)
    shop = Shop(names)
    async with world(shop) as w:
        counted: Counter[str] = Counter()

        def count(owner: Any, name: str) -> None:
            real = getattr(owner, name)
            monkeypatch.setattr(
                owner, name, lambda *how, **more: (counted.update([name]), real(*how, **more))[1]
            )

        count(w.prefetcher, "_start_some")
        count(w.lab.fetcher, "prefetch_small")
        count(w.lab.fetcher, "_reserve_all")
        await w.read_all(shuffled(names))
        demanded = len(names) - w.metrics.prefetch_files
        assert 700 < w.metrics.prefetch_files == w.metrics.prefetch_used_files
        assert counted["prefetch_small"] <= w.metrics.prefetch_files / 5
        assert counted["_reserve_all"] <= counted["prefetch_small"] + demanded
        assert counted["_start_some"] <= w.metrics.prefetch_files
        assert shop.most_in_flight > 40


async def test_a_group_ends_where_enough_lies_unused_and_goes_on_from_there() -> None:
    names = paths(300)
    shop = Shop(names)
    async with world(shop, budget=101 * 1000) as w:
        await announce(w.prefetcher, names, range(300))
        await w.quiet()
        assert len(shop.got) == 101 and w.prefetcher.awaited.unused_bytes == 101 * 1000
        await w.read_all(names, workers=1)
        assert Counter(shop.got) == Counter(names) and w.metrics.prefetch_used_files == 300


async def test_files_that_no_listing_has_keep_both_bounds() -> None:
    names = [f"s{i}/a" for i in range(12)]
    shop = Shop(names, size=16 * MIB)
    in_flight: list[int] = []
    async with world(shop, budget=64 * MIB, slots=6) as w:
        shop.refuse = lambda _: in_flight.append(w.prefetcher.status()["in_flight"])
        await announce(w.prefetcher, names, range(12))
        await w.quiet()
        assert max(in_flight) == 6
        assert len(set(shop.got)) == 4 and w.prefetcher.awaited.unused_bytes == 64 * MIB
        await w.look(shop.got[0], 0, 1)
        await w.quiet()
        assert len(set(shop.got)) == 5
        assert sum(stop - start for _, start, stop in shop.gets) == 5 * 16 * MIB


async def test_the_index_is_read_once_for_a_group_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    names = paths(320)
    shop = Shop(names)
    async with world(shop) as w:
        await w.look(names[0], 0, 1)  # lists the directory
        index, loaded = w.lab.store.catalog._index, []
        real = index.load

        def load(keys: Any) -> Any:
            loaded.append(len(keys))
            return real(keys)

        monkeypatch.setattr(index, "load", load)
        await announce(w.prefetcher, names, range(320))
        await w.quiet()
        assert Counter(shop.got) == Counter(names)
        assert len(loaded) <= 320 / w.prefetcher._group + 2


async def test_a_path_that_was_looked_up_is_fetched_and_looked_up_once() -> None:
    names = [f"{i:03d}/f.jpg" for i in range(200)]  # no listing has them: each is looked up
    shop = Shop(names)
    async with world(shop, budget=20 * 1000) as w:
        await announce(w.prefetcher, names, range(200))
        await w.quiet()
        looked_up = sum(shop.counts)
        for name in names:
            await w.read(name)
            await trio.sleep(0.1)
        assert Counter(shop.got) == Counter(names)
        assert looked_up <= 1 + 56 and shop.counts == (1 + len(names), 0)

"""Jobs over many files, with a scripted tree, fetcher and store."""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.errors import ConfigError, NoRoom, NotFound, ObjectChanged, OriginFailed
from cachefs.base.names import ObjectId
from cachefs.cli import show
from cachefs.cli import status as statusview
from cachefs.cli.show import job_line as line
from cachefs.daemon import asking, warming
from cachefs.daemon.warming import Jobs

MIB = 1 << 20


class Pins(set[str]):
    """What is pinned, as the store would have it."""

    budget_bytes = 1 << 40
    refuses = ""

    def check(self, obj: Any) -> None:
        if obj.id.key == self.refuses:
            raise NoRoom(f"{obj.id.key} cannot be pinned")


class World:
    """A tree of `sizes` by path, and a cache of `limit` bytes that takes what it is brought."""

    def __init__(self, sizes: dict[str, int], limit: int = 1 << 40) -> None:
        self.sizes = sizes
        self.tiers = [SimpleNamespace(limit_bytes=lambda: limit)]
        self.pinned_bytes = 0
        self.pages = False  # whether what is pinned is counted as it lies there
        self.held: dict[str, int] = {}
        self.shared: set[str] = set()
        self.asked: list[tuple[str, int, int]] = []
        self.probed = 0
        self.pins = Pins()
        self.calls: list[tuple[str, int, int]] = []
        self.failing: dict[str, Exception] = {}
        self.replaced: dict[str, int] = {}  # by path: the size at the origin, another one than was listed
        self.renewed: list[str] = []
        self.under_way = self.most_under_way = 0
        self.walked = 0
        self.gate = trio.Event()
        self.gate.set()

    async def walk(self, path: str) -> AsyncGenerator[tuple[str, Any, ObjectId], None]:
        found = [p for p in self.sizes if p == path or p.startswith(f"{path}/" if path else "")]
        if not found:
            raise NotFound(f"no such path: {path}")
        for one in found:
            await trio.lowlevel.checkpoint()
            self.walked += 1
            yield one, None, ObjectId("s", one, "e", self.sizes[one])

    async def look_again(self, path: str, version: ObjectId) -> tuple[Any, ObjectId] | None:
        await trio.lowlevel.checkpoint()
        return (None, ObjectId("s", path, "new", self.replaced[path])) if path in self.replaced else None

    def cached_bytes(self, obj: ObjectId) -> int:
        return self.held.get(obj.key, 0)

    def whole(self, obj: Any) -> bool:
        obj = getattr(obj, "id", obj)
        return self.cached_bytes(obj) == obj.size

    def kept_here(self, obj: ObjectId, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Halves of what another node shares."""
        if obj.key in self.shared:
            half = (start + stop) // 2
            yield start, half, True
            yield half, stop, False
        elif start < stop:
            yield start, stop, True

    async def prefetch_everywhere(self, obj: ObjectId, start: int, stop: int, here: Any) -> int:
        elsewhere = 0
        for first, last, kept in self.kept_here(obj, start, stop):
            if kept:
                await here(first, last)
            else:
                self.asked.append((obj.key, first, last))
                elsewhere += last - first
        return elsewhere

    async def probe(self) -> list[str]:
        self.probed += 1
        return ["10.0.0.9:7070"]

    async def prefetch(
        self, origin: Any, obj: ObjectId, start: int, stop: int, *, prefetched: bool, as_own: bool
    ) -> int:
        assert as_own and not prefetched
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await trio.sleep(1)
            await self.gate.wait()
        finally:
            self.under_way -= 1
        if obj.key in self.replaced and obj.etag != "new":
            raise ObjectChanged(f"{obj.key}: the object changed at the origin")
        if obj.key in self.failing:
            raise self.failing[obj.key]
        self.calls.append((obj.key, start, stop))
        self.held[obj.key] = self.held.get(obj.key, 0) + stop - start
        return stop - start

    def object(self, obj: ObjectId) -> Any:
        return SimpleNamespace(id=obj, pinned=obj.key in self.pins)

    def pin(self, obj: Any) -> None:
        size = max(obj.id.size, warming.PAGE) if self.pages else obj.id.size
        self.pinned_bytes += 0 if obj.id.key in self.pins else size
        self.pins.add(obj.id.key)

    def unpin(self, obj: Any) -> None:
        self.pins.discard(obj.id.key)

    def peek(self, obj: ObjectId) -> Any:
        return self.object(obj)

    async def flush(self) -> None:
        self.durable = set(self.pins)

    def renew(self, obj: Any) -> None:
        assert self.whole(obj)
        self.renewed.append(obj.id.key)

    def evict(self, obj: Any) -> int:
        return 0 if obj.id.key in self.pins else self.held.pop(obj.id.key, 0)


def in_trio(function: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0))

    run.__name__ = function.__name__
    return run


async def run(
    world: World, items: list[Any], action: str = "warm", at_once: int = 4, **more: Any
) -> dict[str, Any]:
    """A job from its beginning to its end."""
    async with trio.open_nursery() as nursery:
        jobs = Jobs(world, world, world, nursery, at_once)  # type: ignore[arg-type]
        number = await jobs.start(action, **more)
        await jobs.add(number, items[:2])
        await jobs.add(number, items[2:], complete=True)
    assert [job["state"] for job in jobs.status()] != ["running"]
    return await jobs.status_of(number)


def tree(count: int, size: int = MIB) -> dict[str, int]:
    return {f"d/{n:04}": size for n in range(count)}


@in_trio
async def test_all_comes_once_and_a_second_job_finds_it_there() -> None:
    world = World(tree(50))
    job = await run(world, ["d"])
    assert (job["state"], job["done_files"], job["fetched_bytes"]) == ("done", 50, 50 * MIB)
    assert sorted(world.calls) == [(path, 0, MIB) for path in world.sizes]
    assert world.most_under_way == 4
    again = await run(world, ["d", "d/0007"])
    assert (again["cached_files"], again["fetched_bytes"], len(world.calls)) == (51, 0, 50)
    assert set(world.renewed) == set(world.sizes)


@in_trio
async def test_a_job_that_was_ended_is_gone_on_with() -> None:
    world = World(tree(50))
    async with trio.open_nursery() as nursery:
        jobs = Jobs(world, world, world, nursery, 4)  # type: ignore[arg-type]
        number = await jobs.start()
        await jobs.add(number, ["d"], complete=True)
        await trio.sleep(3.5)
        assert [job["id"] for job in jobs.status()] == [number]
        assert world.walked <= 12 + 4 + 4 + 1  # it walks no further ahead than it must
        assert await jobs.stop() == 1
    assert (await jobs.status_of(number))["state"] == "stopped"
    assert await jobs.add(number, ["d"]) == "stopped"
    assert len(world.calls) == 12
    assert (await run(world, ["d"]))["fetched_bytes"] == 38 * MIB


@in_trio
async def test_parts_and_large_files_come_in_slices() -> None:
    world = World({"large": 600 * MIB, "x": 10})
    job = await run(world, [["large", 300 * MIB, 5], ["large", 599 * MIB, 5 * MIB], ["x", 50, 5]])
    assert sorted(world.calls) == [
        ("large", 300 * MIB, 300 * MIB + 5),
        ("large", 599 * MIB, 600 * MIB),
    ]
    assert (job["bytes"], job["done_files"]) == (5 + MIB, 3)
    world.calls.clear()
    await run(world, ["large"])
    assert world.calls == [
        ("large", start, min(start + 256 * MIB, 600 * MIB)) for start in range(0, 600 * MIB, 256 * MIB)
    ]


@in_trio
async def test_what_other_nodes_keep_is_theirs_to_fetch() -> None:
    world = World(tree(4), limit=3 * MIB + 64 * 1024)
    world.shared = {"d/0001", "d/0003"}
    job = await run(world, ["d"])
    assert job["state"] == "done" and not world.asked
    assert (job["fetched_bytes"], job["elsewhere_bytes"], job["done_bytes"]) == (3 * MIB, MIB, 4 * MIB)
    assert ("d/0001", 0, MIB // 2) in world.calls
    assert (world.probed, job["silent"]) == (1, ["10.0.0.9:7070"])
    world.held["d/0001"] = MIB  # partly remote-owned: other nodes do not look for it here
    job = await run(world, ["d"], cluster=True)
    assert sorted(world.asked) == [("d/0001", MIB // 2, MIB), ("d/0003", MIB // 2, MIB)]
    assert (job["done_bytes"], job["elsewhere_bytes"]) == (4 * MIB, MIB)
    whole = World(tree(4))
    whole.shared = set(whole.sizes)
    assert (await run(whole, ["d"], "pin"))["fetched_bytes"] == 4 * MIB and not whole.asked
    assert not whole.probed


@in_trio
async def test_what_does_not_fit_is_refused_in_one_line() -> None:
    world = World(tree(50), limit=20 * MIB)
    job = await run(world, ["d"])
    assert job["state"] == "failed"
    assert job["error"] == (
        "20 files of 20.0 MiB so far do not fit: the cache holds 20.0 MiB; "
        "give fewer, or mount with a larger --cache-size"
    )
    assert len(world.calls) < 20
    assert (await run(World(tree(50), limit=60 * MIB), ["d"]))["state"] == "done"


@in_trio
async def test_what_others_have_pinned_is_no_room() -> None:
    world = World(tree(20), limit=30 * MIB)
    world.pinned_bytes = 15 * MIB
    assert "the cache holds 15.0 MiB" in (await run(world, ["d"]))["error"]
    own = World(tree(20), limit=30 * MIB)
    assert (await run(own, ["d"], "pin"))["state"] == "done"
    assert own.pins == set(own.sizes)
    assert (await run(own, ["d"], "pin"))["state"] == "done"


@in_trio
async def test_more_than_may_be_pinned_is_not_fetched_and_what_is_pinned_is_said() -> None:
    world = World(tree(40))
    world.pins.budget_bytes, world.pinned_bytes = 20 * MIB, 10 * MIB
    job = await run(world, ["d"], "pin", at_once=2)
    assert job["state"] == "failed"
    assert job["error"].startswith(
        "11 files of 11.0 MiB so far cannot be pinned: all pins together may take 20.0 MiB, of which 10.0 MiB "
        "are in use; give fewer, end all pins with cachefs unpin MOUNTPOINT, or mount with a larger --pin-budget"
    )
    assert len(world.calls) <= 10 and set(world.pins) <= {key for key, *_ in world.calls}
    pinned = (
        f"; {len(world.pins)} files of them are pinned (cachefs unpin lets them go)" if world.pins else ""
    )
    assert job["error"].endswith(f"--pin-budget{pinned}")
    exact = World(tree(40))
    exact.pins.budget_bytes, exact.pins.refuses = 40 * MIB, "d/0007"
    job = await run(exact, ["d"], "pin", at_once=1)
    assert job["error"] == (
        "d/0007 cannot be pinned; 7 files of them are pinned (cachefs unpin lets them go)"
    )
    assert ("d/0007", 0, MIB) not in exact.calls


@in_trio
async def test_small_files_pinned_by_a_job_do_not_count_twice() -> None:
    world = World({f"d/{n:04}": 100 for n in range(500)})
    world.pages = True
    world.pins.budget_bytes = 600 * warming.PAGE
    assert (await run(world, ["d"], "pin"))["state"] == "done"
    world.pins.budget_bytes = 500 * warming.PAGE
    assert (await run(world, ["d"], "pin"))["state"] == "done"


def test_how_a_job_ended_is_logged_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    @in_trio
    async def ends() -> None:
        world = World(tree(20), limit=20 * MIB)
        world.failing = {"d/0003": OriginFailed("no 3")}
        with caplog.at_level("INFO", "cachefs.daemon.warming"):
            await run(world, ["d/0001"])
            await run(world, ["gone", "d/0001", "d/0003"])
            await run(world, ["d"])
        good, some, none = (record for record in caplog.records if "job 1" in record.message)
        assert (good.levelname, good.message) == ("INFO", "job 1 (warm): done, 1 of 1 files")
        assert some.levelname == none.levelname == "WARNING"
        assert (
            some.message
            == "job 1 (warm): done, 1 of 2 files, 2 failed: gone: no such path: gone; d/0003: no 3"
        )
        assert "do not fit: the cache holds 20.0 MiB" in none.message
        async with trio.open_nursery() as nursery:
            jobs = Jobs(world, world, world, nursery, 4)  # type: ignore[arg-type]
            for _ in range(warming.SHOWN + 3):
                await jobs.add(await jobs.start(), ["gone"], complete=True)
            assert len(jobs.status()) == warming.SHOWN + 3  # they run
        assert [job["id"] for job in jobs.status()] == list(range(4, warming.SHOWN + 4))
        text = dict(statusview.lines({"jobs": jobs.status()}))
        assert text["job 4"] == "warm: done 0s ago, 0 of 0 files, 1 failed: gone: no such path: gone"

    ends()


@in_trio
async def test_single_failures_are_counted_and_named() -> None:
    world = World(tree(30))
    world.failing = {f"d/{n:04}": OriginFailed(f"no {n}") for n in range(0, 30, 2)}
    job = await run(world, ["d", "gone", "away"])
    assert (job["state"], job["failed"], job["done_files"]) == ("done", 17, 15)
    assert len(job["failures"]) == warming.FAILURES_NAMED
    assert all(failure.split(": ")[1].startswith("no ") for failure in job["failures"])
    replay = await run(world, ["gone", "d/0001"], vanish=True)
    assert (replay["failed"], replay["vanished"]) == (0, 1)


@pytest.mark.parametrize("action", ["warm", "pin"])
def test_what_was_replaced_since_it_was_listed_is_fetched_as_it_is_now(action: str) -> None:
    @in_trio
    async def runs() -> None:
        world = World(tree(5), limit=8 * MIB)
        world.replaced = {"d/0002": 3 * MIB}
        job = await run(world, ["d", ["d/0002", MIB // 2, MIB // 4]], action)
        assert (job["state"], job["failed"], job["done_files"], job["files"]) == ("done", 0, 6, 6)
        assert job["bytes"] == job["done_bytes"] == 7 * MIB + MIB // 4
        assert sorted(world.calls)[2:4] == [("d/0002", 0, 3 * MIB), ("d/0002", MIB // 2, 3 * MIB // 4)]
        world.replaced["d/0002"] = 9 * MIB
        world.held.clear()
        assert "do not fit" in (await run(world, ["d"], action))["error"]

    runs()


@in_trio
async def test_a_store_that_is_gone_ends_the_job() -> None:
    world = World(tree(5_000))
    world.failing = {path: OriginFailed("unreachable") for path in world.sizes}
    job = await run(world, ["d"])
    assert job["state"] == "failed"
    assert job["error"] == "200 files in a row failed, the last one with: unreachable"
    assert job["failed"] < 210


@in_trio
async def test_a_cache_that_takes_no_more_ends_the_job() -> None:
    world = World(tree(10))
    world.failing = {"d/0005": NoRoom("no tier takes d/0005 now")}
    job = await run(world, ["d"], at_once=1)
    assert (job["state"], job["error"]) == ("failed", "no tier takes d/0005 now (5 files are done)")


@in_trio
async def test_check_unpin_and_evict_fetch_nothing() -> None:
    world = World(tree(10))
    await run(world, ["d/0001", "d/0002", "d/0003"])
    world.calls.clear()
    world.pins.add("d/0003")
    checked = await run(world, ["d"], "check")
    assert (checked["cached_files"], checked["cached_bytes"], checked["bytes"]) == (3, 3 * MIB, 10 * MIB)
    evicted = await run(world, ["d"], "evict")
    assert (evicted["freed_bytes"], evicted["kept_files"]) == (2 * MIB, 1)
    await run(world, ["d"], "unpin")
    assert (await run(world, ["d"], "evict"))["freed_bytes"] == MIB
    assert world.calls == []


@in_trio
async def test_what_a_job_has_pinned_is_durable_when_it_is_done() -> None:
    world = World(tree(10))
    await run(world, ["d/0001", "d/0002", "d/0003"], "pin")
    assert world.durable == {"d/0001", "d/0002", "d/0003"}
    world.failing["d/0005"] = NotFound("it is gone")
    await run(world, ["d/0005", "d/0006"], "pin")
    assert "d/0006" in world.durable
    await run(world, ["d"], "unpin")
    assert world.durable == set()


@in_trio
async def test_a_list_whose_sender_died_ends() -> None:
    world = World(tree(3))
    async with trio.open_nursery() as nursery:
        jobs = Jobs(world, world, world, nursery, 4)  # type: ignore[arg-type]
        number = await jobs.start()
        await jobs.add(number, ["d/0001"])
        await trio.sleep(warming.INPUT_DEADLINE_S - 1)
        await jobs.add(number, ["d/0002"])
        await trio.sleep(warming.INPUT_DEADLINE_S - 1)
        assert len(jobs.status()) == 1
    job = await jobs.status_of(number)
    assert (job["state"], job["error"]) == (
        "failed",
        "the client that began this job has sent no more of its list",
    )
    assert len(world.calls) == 2


@in_trio
async def test_refusals_and_what_is_remembered() -> None:
    world = World(tree(1))
    async with trio.open_nursery() as nursery:
        jobs = Jobs(world, world, world, nursery, 4)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="no such job: 'frob': there are warm, check"):
            await jobs.start("frob")
        with pytest.raises(NotFound, match="no job 7"):
            await jobs.status_of(7)
        for _ in range(warming.ENDED_REMEMBERED + 10):
            number = await jobs.start()
            await jobs.add(number, ["d"], complete=True)
            await trio.sleep(5)
        with pytest.raises(NotFound):
            await jobs.status_of(1)
        assert (await jobs.status_of(number - warming.ENDED_REMEMBERED + 1))["state"] == "done"


def test_a_list_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "LIST_BYTES", 1000)

    async def main() -> None:
        world = World(tree(200))
        world.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            jobs = Jobs(world, world, world, nursery, 4)  # type: ignore[arg-type]
            number = await jobs.start()
            await jobs.add(number, list(world.sizes)[:50])
            await trio.sleep(1)  # taken in hand: what waits is less again
            await jobs.add(number, list(world.sizes)[50:100])
            with pytest.raises(ConfigError, match="the list is too long"):
                await jobs.add(number, list(world.sizes)[100:])
        assert (await jobs.status_of(number))["state"] == "failed"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_line_of_progress() -> None:
    status = {"done_files": 1200, "files": 5000, "done_bytes": 3 << 30, "bytes": 8 << 30, "walked": True}
    assert line(status, 1 << 30) == "1,200 of 5,000 files, 3.0 GiB of 8.0 GiB, 1.0 GiB/s, 5s left"
    assert line({**status, "walked": False}, 0) == "1,200 of 5,000+ files, 3.0 GiB of 8.0 GiB so far, 0 B/s"


def test_a_log_gets_a_line_of_progress_in_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is followed for hours, with a status each second, writes a few thousand lines and no more."""
    now, lines = [0.0], []
    monkeypatch.setattr(show, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(show, "say", lambda text, err: lines.append((now[0], text)))
    status = {"done_files": 1, "files": 1, "bytes": 8 << 30, "walked": True}

    def statuses() -> Iterator[dict[str, Any]]:
        for now[0] in range(1, 101):
            yield {**status, "done_bytes": int(now[0]) << 20}

    assert len(list(show._lines(statuses()))) == 100
    assert [when for when, _ in lines] == list(range(10, 101, 10))
    assert all(" 1.0 MiB/s" in text for _, text in lines)


@pytest.mark.parametrize("verb", ["warm_add", "the rest"])
def test_a_job_whose_sender_is_interrupted_is_ended(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """No other process knows its number, and it would wait for the rest of its list."""
    asked: list[str] = []

    def ask(_mountpoint: Path, what: str, _timeout_s: float = 5.0, **arguments: Any) -> Any:
        asked.append(what)
        if what == verb:
            signal.raise_signal(signal.SIGINT)
        if what == "warm_stop":
            assert arguments == {"job": 7}
        return 7 if what == "warm_start" else 1 if what == "warm_stop" else "running"

    monkeypatch.setattr(asking, "ask", ask)
    with pytest.raises(KeyboardInterrupt), asking.job(Path("/mnt"), "warm", ["a"]):
        signal.raise_signal(signal.SIGINT)
    assert asked[0] == "warm_start" and asked[-1] == "warm_stop"
    assert asked.count("warm_add") == {"warm_add": 1}.get(verb, 2)

"""Bringing blocks before anybody reads them: once, without standing in a reader's way, and without a trace if it is
called off."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base import errors
from cachefs.base.names import ObjectId
from cachefs.origin import Origin
from cachefs.origin.attempts import Attempts
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, KIB, MIB, Lab, cache_files, running, until


@pytest.mark.parametrize("size", [0, 1, BLOCK, 3 * MIB + 5, 40 * MIB + 7])
@in_trio
async def test_a_whole_object_is_brought_once(cache_dir: Path, size: int) -> None:
    async with running(cache_dir, ssd=256 * MIB, block=MIB) as lab:
        data = content(1, size)
        object_id = lab.origin.put("k", data)
        assert lab.fetcher.whole(object_id) == (size == 0)
        assert await lab.fetcher.prefetch(lab.origin, object_id) == size  # type: ignore[arg-type]
        assert lab.fetcher.whole(object_id)
        assert all(g.background for g in lab.origin.gets)
        assert sorted((g.start, g.stop) for g in lab.origin.gets) == [
            (at, min(size, at + 8 * MIB)) for at in range(0, size, 8 * MIB)
        ]
        assert lab.origin.most_in_flight <= 8
        gets = len(lab.origin.gets)
        assert await lab.fetcher.prefetch(lab.origin, object_id) == 0  # type: ignore[arg-type]
        for at in range(0, size, MIB):
            assert await lab.read(object_id, at, min(MIB, size - at)) == data[at : at + MIB]
        assert len(lab.origin.gets) == gets
        assert lab.metrics.prefetched == -(-size // MIB)
        assert lab.store.object(object_id).refs == 0
        lab.check_accounts()


@in_trio
async def test_a_part_of_an_object_is_the_blocks_that_it_touches(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, 80 * BLOCK))
        await lab.read(object_id, 21 * BLOCK, BLOCK)
        brought = await lab.fetcher.prefetch(
            lab.origin,  # type: ignore[arg-type]
            object_id,
            20 * BLOCK + 1,
            23 * BLOCK + 1,
        )
        assert brought == 3 * BLOCK
        assert lab.fetcher.cached_bytes(object_id) == 4 * BLOCK
        assert not lab.fetcher.whole(object_id)
        assert await lab.fetcher.prefetch(lab.origin, object_id, 79 * BLOCK, 1 << 60) == BLOCK  # type: ignore[arg-type]
        assert await lab.fetcher.prefetch(lab.origin, object_id, 90 * BLOCK) == 0  # type: ignore[arg-type]


@in_trio
async def test_two_readers_and_two_brings_of_one_object_cost_one_request_a_part(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=256 * MIB, block=MIB, readahead=16 * MIB) as lab:
        size = 24 * MIB
        data = content(1, size)
        object_id = lab.origin.put("k", data)
        hold = lab.origin.hold("k", 8 * MIB + 5)
        brought: list[int] = []

        async def prefetch() -> None:
            brought.append(await lab.fetcher.prefetch(lab.origin, object_id))  # type: ignore[arg-type]

        async def read(pid: int) -> None:
            handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
            for at in range(0, size, 128 * KIB):
                got = await lab.read_open(handle, at, 128 * KIB, pid)
                assert got == data[at : at + 128 * KIB]
            lab.fetcher.close(handle)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefetch)
            nursery.start_soon(prefetch)
            await hold.reached.wait()
            for pid in range(2):
                nursery.start_soon(read, pid)
            hold.release.set()
        assert sorted((g.start, g.stop) for g in lab.origin.gets) == [
            (at, at + 8 * MIB) for at in range(0, size, 8 * MIB)
        ]
        assert sum(brought) == size


@in_trio
async def test_only_a_reader_makes_it_demand(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data = content(1, 10 * BLOCK)
        object_id = lab.origin.put("k", data)
        hold = lab.origin.hold("k", 5)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(lab.fetcher.prefetch, lab.origin, object_id)
            await hold.reached.wait()
            (get,) = lab.origin.gets
            assert get.ticket is not None and get.ticket.background
            nursery.start_soon(lab.read, object_id, 0, 2 * BLOCK)
            nursery.start_soon(lab.read, object_id, 0, 1)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not get.ticket.background
            hold.release.set()
        assert len(lab.origin.gets) == 1
        assert lab.metrics.prefetched_late == 2, "each block once"


async def bring_and_cancel(lab: Lab, object_id: object, after: trio.Event) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lab.fetcher.prefetch, lab.origin, object_id)
        await after.wait()
        nursery.cancel_scope.cancel()


@in_trio
async def test_called_off_it_leaves_nothing_but_what_landed(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        data = content(1, 6 * EXTENT)
        object_id = lab.origin.put("k", data)
        hold = lab.origin.hold("k", 2 * EXTENT + 2 * BLOCK + 7)
        await bring_and_cancel(lab, object_id, hold.reached)
        await lab.quiet()
        obj = lab.store.object(object_id)
        assert (lab.fetcher.transfers.of(obj), obj.refs, obj.fds) == ({}, 0, {})
        assert all(c.pins == 0 for c in obj.copies.values() if c is not None)
        kept = lab.fetcher.cached_bytes(object_id)
        assert lab.used() == kept < 6 * EXTENT
        lab.check_accounts()
        hold.release.set()
        assert await lab.fetcher.prefetch(lab.origin, object_id) == 6 * EXTENT - kept  # type: ignore[arg-type]
        assert await lab.read(object_id) == data


@in_trio
async def test_called_off_it_goes_on_for_the_reader_who_waits_for_it(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data = content(1, EXTENT)
        object_id = lab.origin.put("k", data)
        hold = lab.origin.hold("k", 2 * BLOCK + 7)
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                assert await lab.read(object_id, 0, 3 * BLOCK) == data[: 3 * BLOCK]

            async def prefetch() -> None:
                assert await lab.fetcher.prefetch(lab.origin, object_id) == 0  # type: ignore[arg-type]

            nursery.start_soon(bring_and_cancel, lab, object_id, called_off := trio.Event())
            await hold.reached.wait()
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked(0.01)
            called_off.set()
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(prefetch)
            await trio.testing.wait_all_tasks_blocked(0.01)
            hold.release.set()
        assert len(lab.origin.gets) == 1


@pytest.mark.parametrize("error", [errors.OriginFailed, errors.ObjectChanged, errors.PermissionDenied])
@in_trio
async def test_a_failure_is_told_and_what_landed_stays(
    cache_dir: Path, error: type[errors.CachefsError]
) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, 20 * EXTENT))
        lab.origin.fail(lambda: error("scripted"), after=3 * BLOCK + 5)
        with pytest.raises(error, match="scripted"):
            await lab.fetcher.prefetch(lab.origin, object_id)  # type: ignore[arg-type]
        await lab.quiet()
        assert len(lab.origin.gets) < 20, "the rest is not asked for any more"
        assert lab.fetcher.cached_bytes(object_id) >= 3 * BLOCK
        lab.check_accounts()


@in_trio
async def test_a_bug_in_a_client_is_told_in_our_words(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, EXTENT))
        lab.origin.fail(lambda: RuntimeError("bug"))
        with pytest.raises(errors.OriginFailed, match="RuntimeError"):
            await lab.fetcher.prefetch(lab.origin, object_id)  # type: ignore[arg-type]


@in_trio
async def test_what_another_failed_to_bring_is_tried_once_more(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, EXTENT))
        lab.origin.fail(lambda: errors.Transient("scripted"), background=False)
        hold = lab.origin.hold("k", 0)
        failed = lab.origin.fail(lambda: errors.Transient("scripted"), after=1)
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                with pytest.raises(errors.Transient):
                    await lab.read(object_id, 0, 1)

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked(0.01)
            failed.times = 0
            nursery.start_soon(lab.fetcher.prefetch, lab.origin, object_id)
            await trio.testing.wait_all_tasks_blocked(0.01)
            hold.release.set()
        assert lab.fetcher.whole(object_id)


@pytest.mark.parametrize("ssd", [0, EXTENT // 2])
@in_trio
async def test_no_room_is_told(cache_dir: Path, ssd: int) -> None:
    async with running(cache_dir, ssd=ssd) as lab:
        object_id = lab.origin.put("k", content(1, EXTENT))
        with pytest.raises(errors.NoRoom):
            await lab.fetcher.prefetch(lab.origin, object_id)  # type: ignore[arg-type]
        assert not lab.origin.gets


@in_trio
async def test_many_objects_have_no_more_parts_under_way_than_the_store_takes(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=512 * MIB) as lab:
        ids = [lab.origin.put(f"k{i}", content(i, 2 * BLOCK)) for i in range(100)]
        holds = [lab.origin.hold(f"k{i}", 1) for i in range(100)]
        async with trio.open_nursery() as nursery:
            for object_id in ids:
                nursery.start_soon(lab.fetcher.prefetch, lab.origin, object_id)
            await until(lambda: sum(hold.reached.is_set() for hold in holds) >= 64, 10)
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert lab.fetcher.in_flight_fetches == 64
            assert lab.used() == 64 * 2 * BLOCK, "what waits has taken no room"
            for hold in holds:
                hold.release.set()
        assert all(lab.fetcher.whole(object_id) for object_id in ids)
        assert len(lab.origin.gets) == 100


class OneAtATime:
    """A store's client whose answers are let go one by one; `asked` is the order in which requests reach it."""

    writer = None

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Semaphore(0)

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        self.asked.append(key)
        self.go.acquire(timeout=10)
        yield bytes(stop - start)

    def close(self) -> None:
        pass


@in_trio
async def test_a_readers_request_goes_out_before_queued_ones_that_nobody_waits_for(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        client = OneAtATime()
        origin = Origin(Attempts(client, source="s:", concurrency=1, metrics=lab.metrics))  # type: ignore[arg-type]
        ids = {key: ObjectId("s:", key, "e", BLOCK) for key in ("first", "b1", "b2", "b3", "demand")}

        async def read(key: str) -> None:
            handle = lab.fetcher.open(origin, ids[key])
            assert len(await lab.read_open(handle, 0, BLOCK)) == BLOCK
            lab.fetcher.close(handle)

        async with trio.open_nursery() as nursery:
            for key in ("first", "b1", "b2", "b3"):
                nursery.start_soon(lab.fetcher.prefetch, origin, ids[key])
                await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(read, "demand")
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(read, "b3")  # joins, and overtakes
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert origin.status()["demand_waiting"] == 2
            client.go.release(5)
        assert client.asked == ["first", "demand", "b3", "b1", "b2"]
        assert lab.metrics.origin_get == 5
        assert lab.metrics.prefetched_late == 1


@in_trio
async def test_a_file_that_vanished_from_the_cache_comes_anew(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, 5 * EXTENT))
        await lab.read(object_id, 0, BLOCK)
        await lab.quiet()
        lab.store.object(object_id).close_file(lab.store.tiers[0].number)
        for path in cache_files(cache_dir):
            path.unlink()
        await lab.fetcher.prefetch(lab.origin, object_id, BLOCK, 3 * BLOCK)  # type: ignore[arg-type]
        assert lab.fetcher.cached_bytes(object_id) == 2 * BLOCK
        lab.check_accounts()


@in_trio
async def test_another_tier_takes_what_a_full_one_does_not(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        real, full = os.pwrite, set[int]()

        def pwrite(fd: int, data: memoryview, offset: int) -> int:
            device = os.fstat(fd).st_dev
            if not full or device in full:
                full.add(device)
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        object_id = lab.origin.put("k", content(1, 2 * BLOCK))
        await lab.fetcher.prefetch(lab.origin, object_id)  # type: ignore[arg-type]
        assert lab.fetcher.whole(object_id)
        full.update(tier.path.stat().st_dev for tier in lab.store.tiers)
        object_id = lab.origin.put("l", content(1, 2 * BLOCK))
        with pytest.raises(errors.NoRoom, match="tier: No space left on device"):
            await lab.fetcher.prefetch(lab.origin, object_id)  # type: ignore[arg-type]
        assert len([get for get in lab.origin.gets if get.key == "l"]) <= 2


@in_trio
async def test_a_small_file_whose_cache_write_cannot_be_ended_gives_its_slot_back(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(cache_dir) as lab:
        end_write, refused = lab.store.end_write, list[bool]()

        def fails_once(*arguments: Any) -> None:
            end_write(*arguments)
            if not refused:
                refused.append(True)
                raise MemoryError

        monkeypatch.setattr(lab.store, "end_write", fails_once)
        ended: list[errors.CachefsError | None] = []
        for key in ("a", "b"):
            object_id = lab.origin.put(key, content(key, 10 * KIB))
            files = [(object_id, lambda _, error: ended.append(error))]
            assert lab.fetcher.prefetch_small(lab.origin, files) == []  # type: ignore[arg-type]
            await until(lambda: lab.fetcher.in_flight_fetches == 0)
        assert [type(error) for error in ended] == [errors.OriginFailed, type(None)]
        assert "transfer of a failed unexpectedly" in caplog.text

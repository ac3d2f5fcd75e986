"""Whole small objects come without a task for each: what a failure, a hang, a mount's end and a caller that gives up do to
them, in results, in requests and in what stays behind. The lab store, the real origin, fetcher and cache store."""

from __future__ import annotations

import errno
import gc
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import trio
import trio.lowlevel

import cachefs
from bench.lab.dataset import content
from cachefs.base.errors import CachefsError, NotFound, ObjectChanged, OriginFailed
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.fetch import Fetcher
from cachefs.origin import InMemory, Origin
from cachefs.origin.http import _Loop, _ThreadLoop
from cachefs.prefetch.prefetcher import AT_ONCE
from cachefs.store import open_store
from tests import threads
from tests.fetch.scripted import in_trio
from tests.origin.servers import Lab
from tests.origin.test_faults import SIZE, TABLE
from tests.store.lab import MIB, until

BODY = content("without", SIZE)
SMALL = BODY[:20_000]

CALLS = 165
"""Calls of this package's functions for each small file that is fetched, at most: what it costs the thread that answers all
readers, in a measure that no machine changes. Those of the HTTP client, about 30, are left out: their number depends on how
many sockets are ready at once. Measured: 158, and 177 with one file in a group."""


class Reading:
    def __init__(self, fetcher: Fetcher, origin: Origin, metrics: Metrics) -> None:
        self.fetcher, self.origin, self.metrics = fetcher, origin, metrics

    async def object(self, key: str = "file") -> ObjectId:
        return (await self.origin.head(key)).version(self.origin.source)

    async def read(self, object_id: ObjectId, size: int = SIZE) -> bytes:
        opened = self.fetcher.open(self.origin, object_id)
        try:
            return bytes(await self.fetcher.read(opened, 0, size, 1))
        finally:
            self.fetcher.close(opened)

    def over(self) -> None:
        """Nothing is under way, and every slot is free."""
        assert not self.fetcher.in_flight_fetches and not self.fetcher._taskless
        assert not self.fetcher.transfers.versions
        attempts = self.origin._attempts
        assert not attempts.gate.in_flight and not attempts.breaker._hanging


@pytest.fixture
def store(lab: Lab) -> Lab:
    lab.put("file", BODY)
    lab.store.reset()
    return lab


@asynccontextmanager
async def reading(store: Lab, cache_dir: Path, **options: Any) -> AsyncIterator[Reading]:
    metrics = Metrics()
    cache = open_store(cache_dir, 64 * MIB, 32 * MIB, 0, MIB, "first", metrics)
    origin = store.origin(metrics=metrics, **{"stall_s": 0.3, **options})
    try:
        async with trio.open_nursery() as nursery:
            yield Reading(Fetcher(cache.store, nursery, metrics, max_readahead=8 * MIB), origin, metrics)
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await cache.store.aclose(0)
            await origin.aclose()


@pytest.mark.parametrize(("action", "arguments", "requests"), TABLE, ids=lambda v: str(v))
def test_faults_that_pass(
    store: Lab, cache_dir: Path, action: str, arguments: dict[str, Any], requests: int
) -> None:
    async def play() -> None:
        async with reading(store, cache_dir) as it:
            object_id = await it.object()
            store.store.fault(action, **arguments)
            brought: list[tuple[int, CachefsError | None]] = []
            assert not it.fetcher.prefetch_small(it.origin, [(object_id, lambda *told: brought.append(told))])
            assert len(it.fetcher._taskless) == 1
            assert await it.read(object_id) == BODY
            await until(lambda: bool(brought), 30)
            assert brought == [(SIZE, None)]
            assert (
                it.metrics.origin_get
                == requests
                == len([request for request in store.store.requests() if request["kind"] == "get"])
            )
            assert it.metrics.origin_retries == requests - 1 and it.metrics.origin_bytes == SIZE
            assert it.metrics.origin_throttled == (arguments["count"] if action in ("503", "429") else 0)
            assert store.store.counters()["bytes_sent"]["get"] <= SIZE * 1.7
            it.over()

    in_trio(play)()


def test_a_small_file_costs_the_trio_thread_few_calls(store: Lab, cache_dir: Path) -> None:
    package, files, calls = str(Path(cachefs.__file__).parent), 30, 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        file = frame.f_code.co_filename
        calls += event == "call" and file.startswith(package) and not file.endswith("origin/http.py")

    async def play() -> None:
        async with reading(store, cache_dir) as it:
            for number in range(files + 1):
                store.put(f"{number}", SMALL)
            objects = [await it.object(f"{number}") for number in range(files + 1)]
            await it.read(objects.pop(), len(SMALL))  # the first of a process sets up more
            brought: list[tuple[int, CachefsError | None]] = []
            sys.setprofile(count)
            try:
                group = [(object_id, lambda *told: brought.append(told)) for object_id in objects]
                for at in range(0, files, AT_ONCE):
                    assert not it.fetcher.prefetch_small(it.origin, group[at : at + AT_ONCE])
                await until(lambda: len(brought) == files, 30)
            finally:
                sys.setprofile(None)
            assert brought == [(len(SMALL), None)] * files
            assert calls / files <= CALLS, calls / files

    in_trio(play)()


def test_small_requests_need_no_thread(store: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_thread(*_: object, **__: object) -> None:
        raise AssertionError("a thread gets a turn")

    async def play() -> None:
        origin = store.origin(metrics=Metrics())
        try:
            # Its thread looks for credentials.
            await origin.put("few/first", InMemory(SMALL), len(SMALL), settle=False)
            threads.replace(monkeypatch, no_thread)
            made = await origin.put("few/small", InMemory(SMALL), len(SMALL), settle=False)
            assert (await origin.head("few/small")).etag == made.etag
            page = await origin.list_page("few/", limit=1)
            rest = await origin.list_page("few/", token=page.next_token)
            assert [info.key for info in page.objects + rest.objects] == ["few/first", "few/small"]
            await origin.delete("few/small")
            await origin.delete("few/small")  # a missing object is no error
        finally:
            monkeypatch.undo()
            await origin.aclose()
        kinds = [request["kind"] for request in store.store.requests()]
        assert kinds == ["put", "put", "head", "list", "list", "delete", "delete"]

    in_trio(play)()


def test_what_has_come_is_no_circle_of_objects(store: Lab, cache_dir: Path) -> None:
    async def play() -> None:
        async with reading(store, cache_dir) as it:
            object_id = await it.object()
            brought: list[tuple[int, CachefsError | None]] = []
            gc.collect()
            gc.disable()
            try:
                assert not it.fetcher.prefetch_small(
                    it.origin, [(object_id, lambda *told: brought.append(told))]
                )
                (fetch,) = it.fetcher._taskless
                left = weakref.ref(fetch), weakref.ref(fetch.cache_write)
                del fetch
                await until(lambda: bool(brought), 30)
                await until(lambda: not any(reference() for reference in left), 5)
            finally:
                gc.enable()

    in_trio(play)()


@pytest.mark.parametrize(
    ("action", "error"), [("404", NotFound), ("wrong-etag", ObjectChanged), ("500", OriginFailed)]
)
def test_faults_that_stay(store: Lab, cache_dir: Path, action: str, error: type[CachefsError]) -> None:
    async def play() -> None:
        async with reading(store, cache_dir) as it:
            object_id = await it.object()
            if action == "404":
                store.remove("file")
            else:
                store.store.fault(action)
            with pytest.raises(error):
                await it.read(object_id)
            it.over()

    in_trio(play)()


def test_refused_credentials_that_are_the_same_again_are_not_tried_twice(
    store: Lab, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with reading(store, cache_dir) as it:
            object_id = await it.object()
            store.store.fault("403", count=1)
            with pytest.raises(CachefsError, match="403"):
                await it.read(object_id)  # they are the same as before
            assert it.metrics.origin_get == 1
            it.over()

    in_trio(play)()


@pytest.mark.parametrize(
    "failure", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")]
)
def test_a_client_that_cannot_begin_is_tried_again(
    store: Lab, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    left = [failure] * 2
    begin = _Loop.__init__

    def fails(*arguments: Any) -> None:
        if left:
            raise left.pop()
        begin(*arguments)

    async def play() -> None:
        async with reading(store, cache_dir) as it:
            object_id = await it.object()
            http: Any = it.origin._client
            loop = http.transport._loops[_ThreadLoop]
            loop.stop()
            await until(lambda: loop.over, 5)
            monkeypatch.setattr(_Loop, "__init__", fails)
            assert await it.read(object_id) == BODY
            assert not left and it.metrics.origin_errors == 0
            await until(lambda: not it.fetcher.in_flight_fetches, 5)
            it.over()

    in_trio(play)()


def test_a_thread_that_cannot_take_a_body_ends_one_attempt(
    store: Lab, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with reading(store, cache_dir, download_limit=1 << 30) as it:
            object_id = await it.object()
            refused = threads.first_fails(monkeypatch)
            assert await it.read(object_id) == BODY
            assert refused and it.metrics.origin_retries == 1
            await until(lambda: not it.fetcher.in_flight_fetches, 5)
            it.over()

    in_trio(play)()


def test_the_end_of_the_mount_ends_them(store: Lab, cache_dir: Path) -> None:
    async def play() -> None:
        async with reading(store, cache_dir, stall_s=20.0) as it:
            object_id = await it.object()
            store.store.fault("hang", count=1)
            brought: list[tuple[int, CachefsError | None]] = []
            assert not it.fetcher.prefetch_small(it.origin, [(object_id, lambda *told: brought.append(told))])
            await until(lambda: it.origin._attempts.gate.in_flight == 1, 5)
            await trio.sleep(0.05)
        it.over()
        assert len(brought) == 1 and brought[0][0] == 0 and brought[0][1] is not None

    in_trio(play)()


def test_a_caller_that_gives_up_ends_its_transfer(store: Lab, cache_dir: Path) -> None:
    async def play() -> None:
        async with reading(store, cache_dir, stall_s=20.0) as it:
            object_id = await it.object()
            store.store.fault("hang", count=1)
            with trio.move_on_after(0.3):
                await it.fetcher.prefetch(it.origin, object_id)
            await until(lambda: not it.fetcher.in_flight_fetches, 5)
            it.over()
            assert it.metrics.origin_errors == it.metrics.origin_retries == 0

    in_trio(play)()


def test_a_reader_makes_it_demand(store: Lab, cache_dir: Path) -> None:
    async def play() -> None:
        async with reading(store, cache_dir, stall_s=20.0) as it:
            object_id, gate = await it.object(), it.origin._attempts.gate
            store.store.fault("hang", count=1)
            assert not it.fetcher.prefetch_small(it.origin, [(object_id, lambda *_: None)])
            assert gate.background_in_flight == 1
            async with trio.open_nursery() as nursery:
                nursery.start_soon(it.read, object_id)
                await until(lambda: gate.background_in_flight == 0, 5)
                assert gate.in_flight == 1 and it.metrics.prefetched_late == 3
                nursery.cancel_scope.cancel()

    in_trio(play)()


def test_a_short_deadline_and_a_limit_take_a_task(store: Lab, cache_dir: Path) -> None:
    async def play() -> None:
        from cachefs.store.ram import remove_ram

        async with reading(store, cache_dir) as it:
            object_id = await it.object()
        for options in ({"deadline_s": 0.2}, {"download_limit": 100 * MIB}):
            remove_ram(cache_dir)
            async with reading(store, cache_dir, **options) as it:
                assert not it.fetcher.prefetch_small(it.origin, [(object_id, lambda *_: None)])
                assert not it.fetcher._taskless
                await until(lambda: not it.fetcher.in_flight_fetches, 30)
                it.over()

    in_trio(play)()

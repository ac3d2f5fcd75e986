"""Notifications: their order, their bounds, and refreshes that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import wraps

import pytest
import trio

from cachefs.fuse import notices
from cachefs.fuse.notices import Notices


@pytest.fixture(autouse=True)
def no_threads() -> None:
    """Threads are what this is about."""


def in_real_time(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """A clock that jumps would not wait for threads."""

    @wraps(test)
    def run() -> None:
        trio.run(test)

    return run


@in_real_time
async def test_a_refresh_goes_on_when_all_notices_before_it_are_sent() -> None:
    told: list[int] = []
    queue = Notices(lambda inode, parent, name: told.append(inode))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run)
        for number in range(1000):
            queue.tell(number, 1, b"")
        await queue.all_sent()
        assert told == list(range(1000))
        nursery.cancel_scope.cancel()
    await queue.quiet()


@in_real_time
async def test_many_wait_side_by_side() -> None:
    told: list[int] = []
    queue = Notices(lambda inode, parent, name: told.append(inode))
    ended: list[int] = []

    async def refresh(number_of: int) -> None:
        for page in range(5):
            for number in range(200):
                queue.tell(number_of * 10_000 + page * 1000 + number, 1, b"")
            await queue.all_sent()
            assert number_of * 10_000 + page * 1000 + 199 in told
        ended.append(number_of)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run)
        async with trio.open_nursery() as readers:
            for number_of in range(8):
                readers.start_soon(refresh, number_of)
        nursery.cancel_scope.cancel()
    assert sorted(ended) == list(range(8))
    assert len(told) == len(set(told)) == 8 * 1000


@in_real_time
async def test_what_is_waiting_already_is_said_once() -> None:
    told: list[tuple[int, int, bytes]] = []
    queue = Notices(lambda *notice: told.append(notice))
    for _ in range(4):
        for name in (b"a", b"b"):
            queue.tell(0, 1, name)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run)
        await queue.all_sent()
        assert told == [(0, 1, b"a"), (0, 1, b"b")]
        queue.tell(0, 1, b"a")
        await queue.all_sent()
        assert told[2:] == [(0, 1, b"a")]
        nursery.cancel_scope.cancel()


def test_a_kernel_that_takes_no_notices_holds_up_no_refresh_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "HANGS_AFTER_S", 0.2)
    trio.run(_a_kernel_that_does_not_listen)


async def _a_kernel_that_does_not_listen() -> None:
    stuck = threading.Event()
    queue = Notices(lambda *_: stuck.wait(60) and None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run)
        queue.tell(1, 1, b"")
        before = trio.current_time()
        await queue.all_sent()
        assert trio.current_time() - before >= 0.2
        nursery.cancel_scope.cancel()
    with trio.move_on_after(0.1) as waiting:
        await queue.quiet()
    assert waiting.cancelled_caught, "a thread is still in there"
    stuck.set()
    await queue.quiet()


@in_real_time
async def test_the_queue_is_bounded_and_no_refresh_waits_for_dropped_notices() -> None:
    told: list[int] = []
    queue = Notices(lambda inode, parent, name: told.append(inode))
    for number in range(notices.MOST_WAITING + 10):
        queue.tell(number, 1, b"")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run)
        await queue.all_sent()
        nursery.cancel_scope.cancel()
    assert told == list(range(10, notices.MOST_WAITING + 10))

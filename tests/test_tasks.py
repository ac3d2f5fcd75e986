"""Tasks whose failure stays with what they are about."""

from __future__ import annotations

import ast
import logging
import threading
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import cachefs
from cachefs.base.errors import CacheUnusable
from cachefs.base.linux import LOOK_EVERY_S
from cachefs.base.tasks import Lock, Outcome, contained, containing, in_thread, in_thread_at_last
from cachefs.upload.staging import StagingDisk, StagingFile

PACKAGE = Path(cachefs.__file__).parent

SERVICES = {
    # What a service is made of: it ends with it, and the composition root starts it again.
    "fetch/fetcher.py": {"prefetch_runs"},
    "fetch/upstream.py": {"work"},
    "peers/client.py": {"watch"},
    "peers/node.py": {"self._membership.run"},
    "peers/server.py": {"watch"},
    "prefetch/prefetcher.py": {"self._sweep_now_and_then"},
    "store/store.py": {"self._moves.run", "self.backing_files.run", "self._watch_disks"},
    "upload/uploads.py": {"self._records.run", "self.passthrough.run"},
}
"""What of a room is started without `contained`: parts of a call that its caller contains, and of a room's own service."""


def test_an_outcome_is_a_value_or_a_failure_of_each_caller_or_neither() -> None:
    async def main() -> None:
        outcomes = [Outcome[int]() for _ in range(3)]
        outcomes[0].value = 7
        outcomes[0].end()
        outcomes[1].end(failure=CacheUnusable("broken"))
        outcomes[2].end()
        assert (await outcomes[0].wait(), await outcomes[2].wait()) == (7, None)
        raised = []
        for _ in range(2):
            with pytest.raises(CacheUnusable, match="broken") as caught:
                await outcomes[1].wait()
            raised.append(caught.value)
        assert raised[0] is not raised[1] and raised[0].__cause__ is raised[1].__cause__

    trio.run(main)


def test_an_exception_is_logged_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    done = []

    async def fail(number: int) -> None:
        if number % 2:
            raise ValueError(f"of {number}")
        await trio.lowlevel.checkpoint()
        done.append(number)

    async def nested() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise KeyError("inside")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                contained(nursery, f"task {number}", fail, number)
            contained(nursery, "nested", nested)

    trio.run(main)
    assert done in ([0, 2], [2, 0])
    assert sorted(r.message for r in caplog.records) == [
        f"{what} failed unexpectedly" for what in ("nested", "task 1", "task 3")
    ]
    assert all(r.levelno == logging.ERROR and r.exc_info for r in caplog.records)


def test_cancellation_passes() -> None:
    async def main() -> None:
        with trio.move_on_after(0.01) as scope:
            async with trio.open_nursery() as nursery:
                contained(nursery, "sleep", trio.sleep_forever)
        assert scope.cancelled_caught

    trio.run(main)


def test_a_handler_of_connections(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(number: int) -> None:
        raise RuntimeError(number)

    trio.run(containing("a connection", handle), 1)
    assert [r.message for r in caplog.records] == ["a connection failed unexpectedly"]


@pytest.mark.parametrize("room", ["upload", "fuse", "fetch", "prefetch", "store", "peers", "observe"])
def test_no_task_of_a_file_can_end_its_nursery(room: str) -> None:
    wrong = []
    for path in (PACKAGE / room).rglob("*.py"):
        allowed = SERVICES.get(str(path.relative_to(PACKAGE)), set())
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if call.func.attr == "start_soon" and ast.unparse(call.args[0]) not in allowed:
                wrong.append(f"{path.relative_to(PACKAGE)}:{call.lineno}")
    assert not wrong, f"start these with tasks.contained: {wrong}"


# Where no thread can be started.


def fails_to_start(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """So many threads of trio do not."""
    begin = trio.lowlevel.start_thread_soon
    left = [True] * times

    def start(*arguments: Any, **named: Any) -> None:
        if left:
            left.pop()
            raise RuntimeError("can't start new thread")
        begin(*arguments, **named)

    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", start)


def test_a_thread_that_cannot_be_started_is_an_errno(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        fails_to_start(monkeypatch, 1)
        limiter = trio.CapacityLimiter(1)
        with pytest.raises(BlockingIOError):
            await in_thread(lambda: 1, limiter=limiter)
        assert await in_thread(lambda: 2, limiter=limiter) == 2 and not limiter.borrowed_tokens
        with pytest.raises(RuntimeError, match="mine"):
            await in_thread(raise_mine)

    def raise_mine() -> None:
        raise RuntimeError("mine")

    trio.run(main)


def test_a_thread_is_tried_for_again_after_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> float:
        began = trio.current_time()
        fails_to_start(monkeypatch, 3)
        assert await in_thread_at_last(lambda: 1) == 1
        return trio.current_time() - began

    took_s = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01))
    assert took_s == pytest.approx(3 * LOOK_EVERY_S, abs=0.25)


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks, and the tasks that begin."""

    def __init__(self) -> None:
        self.taken = self.begun = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.taken += 1

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.begun += 1


def test_a_call_in_a_thread_costs_its_task_one_wait() -> None:
    async def main() -> None:
        limiter, steps = trio.CapacityLimiter(1), Steps()
        told.set("by the task")
        await in_thread(told.get)  # the thread's way back has a task of its own, made once
        trio.lowlevel.add_instrument(steps)
        assert await in_thread(told.get, limiter=limiter) == "by the task"
        trio.lowlevel.remove_instrument(steps)
        assert (steps.taken, steps.begun) == (2, 0), "this task goes on, and the one that hears of threads"

    told: ContextVar[str] = ContextVar("told")
    trio.run(main)


def test_a_lock_that_is_free_costs_no_turn_of_the_loop() -> None:
    async def main() -> None:
        lock, steps, order = Lock(), Steps(), list[str]()
        trio.lowlevel.add_instrument(steps)
        async with lock:
            assert lock.locked() and not steps.taken
        trio.lowlevel.remove_instrument(steps)
        assert not lock.locked()

        async def second() -> None:
            async with lock:
                order.append("second")

        async def third() -> None:
            with trio.move_on_after(0):
                async with lock:
                    order.append("third")

        async with trio.open_nursery() as nursery, lock:
            nursery.start_soon(second)
            nursery.start_soon(third)
            await trio.testing.wait_all_tasks_blocked()
            assert lock.waited_for
            with pytest.raises(trio.WouldBlock):
                lock.acquire_nowait()
            order.append("first")
        assert order == ["first", "second"] and not lock.locked() and not lock.waited_for

        with trio.CancelScope() as scope:
            scope.cancel()
            async with lock:
                order.append("cancelled")
        assert scope.cancelled_caught and len(order) == 2 and not lock.locked()

    trio.run(main)


def test_calls_in_threads_take_turns_at_a_limiter() -> None:
    async def main() -> None:
        limiter, order = trio.CapacityLimiter(1), list[int]()

        async def call(number: int) -> None:
            await in_thread(partial(order.append, number), limiter=limiter)

        async with trio.open_nursery() as nursery:
            limiter.acquire_on_behalf_of_nowait("another")
            for number in range(3):
                nursery.start_soon(call, number)
            await trio.testing.wait_all_tasks_blocked()
            assert not order
            limiter.release_on_behalf_of("another")
        assert sorted(order) == [0, 1, 2] and not limiter.borrowed_tokens

    trio.run(main)


@pytest.mark.parametrize("abandon", [False, True])
def test_a_cancelled_caller_of_a_thread(abandon: bool) -> None:
    """It leaves its call, or waits for it; either way the limiter counts the call until it has ended."""

    async def main() -> None:
        limiter, goes_on = trio.CapacityLimiter(1), threading.Event()
        ended = list[object]()

        async def caller() -> None:
            with trio.CancelScope() as scope:
                scopes.append(scope)
                ended.append(
                    await in_thread(partial(goes_on.wait, 30), limiter=limiter, abandon_on_cancel=abandon)
                )
            ended.append("left")

        scopes = list[trio.CancelScope]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller)
            await trio.testing.wait_all_tasks_blocked()
            scopes[0].cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert ended == (["left"] if abandon else []) and limiter.borrowed_tokens == 1
            goes_on.set()
            await limiter.acquire()
            limiter.release()
        assert ended == (["left"] if abandon else [True, "left"]) and not limiter.borrowed_tokens

    trio.run(main)


def test_a_staging_file_goes_once_a_thread_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr("cachefs.base.tasks.LOOK_EVERY_S", 0.01)
        disk, path = StagingDisk(tmp_path), tmp_path / "one"
        path.touch()
        fails_to_start(monkeypatch, 3)
        disk.later(path.unlink)
        with trio.fail_after(10):
            await disk.quiet()
        assert not path.exists()
        held = StagingFile(disk, "one", new=True)
        await held.write(0, b"hello")
        fails_to_start(monkeypatch, 1)
        with pytest.raises(CacheUnusable, match="no thread"):
            await held.try_spill()
        assert await held.try_spill() and path.read_bytes() == b"hello"

    trio.run(main)

"""Pauses of the event loop: a call that blocks it is seen, with its length; a loop that only works is not."""

from __future__ import annotations

import time

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from cachefs.base.metrics import SERIES
from cachefs.observe.watch import LOOK_EVERY_S, RECENT_S, Pauses


def test_a_call_that_blocks_the_loop_is_seen() -> None:
    pauses = Pauses()

    async def go() -> dict[str, float]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pauses.run)
            await trio.sleep(1.5 * LOOK_EVERY_S)
            time.sleep(0.5)  # noqa: ASYNC251
            await trio.sleep(2 * LOOK_EVERY_S)
            seen = pauses.status()
            nursery.cancel_scope.cancel()
        return seen

    seen = trio.run(go)
    assert seen["run"] == seen["minute"] >= 0.5 - LOOK_EVERY_S


def test_how_exact_they_are_is_what_the_metric_says() -> None:
    (series,) = (series for series in SERIES if series.name == "loop_pause_seconds_max")
    assert f"within {LOOK_EVERY_S:g} s" in series.meaning


def test_none_is_seen_where_there_is_none() -> None:
    pauses = Pauses()

    async def go() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pauses.run)
            await trio.sleep(2 * RECENT_S)
            assert pauses.status() == pytest.approx({"minute": 0.0, "run": 0.0})
            nursery.cancel_scope.cancel()

    trio.run(go, clock=MockClock(autojump_threshold=0))


def test_the_longest_of_the_last_minute_and_of_the_run() -> None:
    pauses, clock = Pauses(), MockClock(autojump_threshold=0)

    async def block(seconds: float) -> float:
        """What is to be seen of a call that takes so long, and begins half way between two looks."""
        await trio.sleep(LOOK_EVERY_S / 2)
        clock.jump(seconds)
        await trio.sleep(LOOK_EVERY_S)
        return seconds - LOOK_EVERY_S / 2

    async def go() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pauses.run)
            await wait_all_tasks_blocked()
            first = await block(3)
            assert pauses.status() == pytest.approx({"minute": first, "run": first})
            await block(1)
            assert pauses.status() == pytest.approx({"minute": first, "run": first})
            await trio.sleep(RECENT_S - 2)
            second = await block(2)
            assert pauses.status() == pytest.approx({"minute": second, "run": first})
            await trio.sleep(RECENT_S + 1)
            assert pauses.status() == pytest.approx({"minute": 0.0, "run": first})
            nursery.cancel_scope.cancel()

    trio.run(go, clock=clock)

"""The composition root, without a mount."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from cachefs.base.tasks import RETRY_S
from cachefs.daemon.daemon import retried


def test_housekeeping_that_fails_is_logged_and_run_again_later(caplog: pytest.LogCaptureFixture) -> None:
    began: list[float] = []

    async def work() -> None:
        began.append(trio.current_time())
        if len(began) < 3:
            raise ValueError("a bug")

    trio.run(retried, work, "sweeping", clock=MockClock(autojump_threshold=0))
    assert [moment - began[0] for moment in began] == [0, RETRY_S, 2 * RETRY_S]
    assert caplog.text.count(f"sweeping failed; trying again in {RETRY_S} s") == 2


@pytest.mark.parametrize("fails_for_s, most", [(600.0, 2 * 10 + 1), (1.0, 2)])
def test_a_failure_costs_two_log_entries_a_minute_and_is_over_within_half_a_minute(
    fails_for_s: float, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> float:
        began = trio.current_time()

        async def work() -> None:
            if trio.current_time() - began < fails_for_s:
                raise ValueError("the disk is full")

        await retried(work, "sweeping")
        return trio.current_time() - began

    took_s = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert took_s <= fails_for_s + 30
    assert len(caplog.records) <= most

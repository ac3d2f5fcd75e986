"""The composition root, without a mount."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from cachefs.daemon.daemon import RETRY_S, retried


def test_housekeeping_that_fails_is_logged_and_run_again_later(caplog: pytest.LogCaptureFixture) -> None:
    began: list[float] = []

    async def work() -> None:
        began.append(trio.current_time())
        if len(began) < 3:
            raise ValueError("a bug")

    trio.run(retried, work, "sweeping", clock=MockClock(autojump_threshold=0))
    assert [moment - began[0] for moment in began] == [0, RETRY_S, 2 * RETRY_S]
    assert caplog.text.count(f"sweeping failed; trying again in {RETRY_S} s") == 2

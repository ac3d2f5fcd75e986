"""Waiting for a turn and being cancelled, in every order: no slot is ever lost."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from cachefs.origin.gate import Gate, Turn
from cachefs.origin.limiter import Concurrency


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("leave_first", [False, True])
def test_cancelled_together_with_those_inside_nobody_keeps_a_slot(
    background: bool, leave_first: bool
) -> None:
    """In one pass of the scheduler somebody leaves and those who would be next are cancelled, which they notice later."""

    async def main() -> None:
        gate = Gate(Concurrency(8))
        go = trio.Event()

        async def request(cancelled: trio.CancelScope | None) -> None:
            turn = Turn(background)
            with cancelled or trio.CancelScope():
                await gate.enter(turn)
                try:
                    await go.wait()
                finally:
                    gate.leave(turn)

        scopes = [trio.CancelScope() for _ in range(40)]
        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(request, scope)
            await trio.testing.wait_all_tasks_blocked()
            assert 0 < gate.in_flight < len(scopes)
            if leave_first:
                go.set()
            for scope in scopes:
                scope.cancel()
            go.set()
        assert gate.in_flight == 0
        assert not len(gate.line)
        with trio.fail_after(1):
            await gate.enter(Turn(background))

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_turn_that_was_called_is_not_lost_to_a_cancellation() -> None:
    async def main() -> None:
        gate = Gate(Concurrency(1))
        first, second = Turn(), Turn()
        await gate.enter(first)
        inside: list[Turn] = []

        async def wait() -> None:
            await gate.enter(second)
            inside.append(second)
            gate.leave(second)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            gate.leave(first)  # second is called: it holds the slot from here on
            nursery.cancel_scope.cancel()
        assert inside == [second]
        assert gate.in_flight == 0

    trio.run(main)

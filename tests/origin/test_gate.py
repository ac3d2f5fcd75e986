"""Waiting for a slot and being cancelled, in every order: no slot is ever lost."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from cachefs.origin.attempts import Concurrency, Gate, Ticket


@pytest.mark.parametrize("background", [False, True])
def test_no_slot_is_kept_when_holders_and_waiters_are_cancelled_together(background: bool) -> None:
    """In one pass of the scheduler a holder leaves, and the next waiters are cancelled and have yet to run."""

    async def request(gate: Gate) -> None:
        ticket = Ticket(background)
        await gate.enter(ticket)
        try:
            await trio.sleep_forever()
        finally:
            gate.leave(ticket)

    async def main() -> None:
        gate = Gate(Concurrency(8))
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for _ in range(40):
                    nursery.start_soon(request, gate)
                await trio.testing.wait_all_tasks_blocked()
                assert 0 < gate.in_flight <= 8
                nursery.cancel_scope.cancel()
            assert gate.in_flight == len(gate.queue) == 0

    trio.run(main)


def test_a_turn_that_was_called_is_not_lost_to_a_cancellation() -> None:
    async def main() -> None:
        gate = Gate(Concurrency(1))
        first, second = Ticket(), Ticket()
        await gate.enter(first)
        inside: list[Ticket] = []

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

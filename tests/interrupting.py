"""An operation is cancelled at one of its steps: between two awaits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio


class Interrupt(trio.abc.Instrument):
    """Cancels what its task does within `scope` at its `at`th step."""

    def __init__(self, at: int) -> None:
        self.scope, self.at, self.steps = trio.CancelScope(), at, 0
        self._task = trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += task is self._task
        if self.steps == self.at:
            self.scope.cancel()


async def interrupted(at: int, call: Callable[[], Awaitable[object]]) -> bool:
    """Whether `call` had as many steps."""
    interrupt = Interrupt(at)
    trio.lowlevel.add_instrument(interrupt)
    try:
        with interrupt.scope:
            await call()
    finally:
        trio.lowlevel.remove_instrument(interrupt)
    return interrupt.steps >= at

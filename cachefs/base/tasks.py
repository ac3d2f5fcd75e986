"""Tasks whose failure stays with what they are about: one file, one request, one connection.

In trio an exception that leaves a task ends its whole nursery, and with it the daemon. That is right for the composition
root's own services, and wrong for a task that serves one file: its callers are told by other means (an event, a reply, a
result), and the other tasks go on. Such a task is started with `contained`.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar, TypeVarTuple

import trio

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""How long a thread is not tried for again, where none can be started. Guessed."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Outcome(Generic[T]):
    """What becomes of something that others wait for: a value, a failure, or neither, where it was broken off."""

    __slots__ = ("_ended", "failure", "value")

    def __init__(self) -> None:
        self._ended = trio.Event()
        self.value: T | None = None
        self.failure: Exception | None = None

    def end(self, *, failure: Exception | None = None) -> None:
        """Wake those who wait."""
        self.failure = failure or self.failure
        self._ended.set()

    async def wait(self) -> T | None:
        """The value, once there is one. Raises the failure: each caller an exception of its own, whose traceback grows."""
        await self._ended.wait()
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args) from self.failure
        return self.value


def contained(nursery: trio.Nursery, what: str, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
    """Start `work` in the nursery. An exception that it raises is logged once, with its traceback, as a failure of `what`,
    and the nursery goes on."""
    nursery.start_soon(run_contained, what, work, *args)


async def run_contained(what: str, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
    """Run `work` here, with the same promise. Cancellation passes."""
    try:
        await work(*args)
    except* Exception as group:
        failures = group.exceptions
        log.exception("%s failed unexpectedly", what, exc_info=failures[0] if len(failures) == 1 else group)


async def in_thread(
    call: Callable[[], T], *, limiter: trio.CapacityLimiter | None = None, abandon_on_cancel: bool = False
) -> T:
    """What `call` returns, or raises, in a worker thread. OSError (EAGAIN) if none can be started, as where a container has
    all the processes that it may have: trio's RuntimeError would be taken for a fault of ours."""
    try:
        return await trio.to_thread.run_sync(call, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
    except RuntimeError as exc:
        if "start new thread" not in str(exc):
            raise
        raise OSError(errno.EAGAIN, "no thread can be started") from exc


async def in_thread_at_last(
    call: Callable[[], T], *, limiter: trio.CapacityLimiter | None = None, abandon_on_cancel: bool = False
) -> T:
    """As `in_thread`; where no thread can be started, it is tried again until one can."""
    while True:
        try:
            return await in_thread(call, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
        except OSError as exc:
            if exc.errno != errno.EAGAIN:
                raise
        await trio.sleep(RETRY_S)


def containing(what: str, handle: Callable[[T], Awaitable[object]]) -> Callable[[T], Awaitable[None]]:
    """`handle` with the same promise, for what starts a task for each connection."""

    async def handled(argument: T) -> None:
        await run_contained(what, handle, argument)

    return handled

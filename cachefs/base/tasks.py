"""Tasks of one file, one request or one connection, whose failure ends nothing else; calls in worker threads; locks.

In trio an exception that leaves a task ends its whole nursery, and with it the daemon. That is right for the composition
root's own services, and wrong for a task that serves one file: its callers get the failure by other means (an event, a
reply, a result), and other tasks must continue. Such a task is started with `contained`.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Generic, TypeVar, TypeVarTuple

import outcome
import trio

from cachefs.base.linux import LOOK_EVERY_S

log = logging.getLogger(__name__)

RETRY_S = 30
"""Seconds until work that failed is tried again where no caller waits for it: housekeeping, cache writes to a disk with
errors. Derived: a permanent failure costs two log entries a minute."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Outcome(Generic[T]):
    """The result that tasks wait for: a value, a failure, or neither if the work was cancelled."""

    __slots__ = ("_ended", "failure", "value")

    def __init__(self) -> None:
        self._ended = trio.Event()
        self.value: T | None = None
        self.failure: Exception | None = None

    def end(self, *, failure: Exception | None = None) -> None:
        """Wake the tasks that wait."""
        self.failure = failure or self.failure
        self._ended.set()

    async def wait(self) -> T | None:
        """Wait for the end and return the value. Raises the failure, a new exception for each caller: tracebacks grow."""
        await self._ended.wait()
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args) from self.failure
        return self.value


def contained(nursery: trio.Nursery, what: str, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
    """Start `work` in the nursery. An exception that it raises is logged once, with its traceback, as a failure of `what`,
    and the nursery goes on."""
    nursery.start_soon(run_contained, what, work, *args)


async def run_contained(what: str, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
    """As `contained`, in this task. `Cancelled` is raised."""
    try:
        await work(*args)
    except* Exception as group:
        failures = group.exceptions
        log.exception("%s failed unexpectedly", what, exc_info=failures[0] if len(failures) == 1 else group)


async def in_thread(
    call: Callable[[], T], *, limiter: trio.CapacityLimiter | None = None, abandon_on_cancel: bool = False
) -> T:
    """Call `call` in a worker thread, with the context of this task; returns its result. OSError (EAGAIN) if no thread can
    be started, as in a container at its limit of processes."""
    return await in_worker(call, limiter=limiter, abandon_on_cancel=abandon_on_cancel)


async def in_worker(
    call: Callable[[], T], *, limiter: trio.CapacityLimiter | None, abandon_on_cancel: bool
) -> T:
    """As `trio.to_thread.run_sync`, for less processor time: a free slot of the limiter costs no checkpoint, the thread
    keeps its name, and `call` cannot call back as this task (`trio.from_thread` needs a token)."""
    await trio.lowlevel.checkpoint_if_cancelled()
    limiter = limiter or trio.to_thread.current_default_thread_limiter()
    slot, task, waiting = object(), trio.lowlevel.current_task(), True
    try:
        limiter.acquire_on_behalf_of_nowait(slot)
    except trio.WouldBlock:
        await limiter.acquire_on_behalf_of(slot)

    def end(result: outcome.Outcome[T]) -> None:
        limiter.release_on_behalf_of(slot)
        if waiting:
            trio.lowlevel.reschedule(task, result)

    def leave(_: object) -> trio.lowlevel.Abort:
        nonlocal waiting
        waiting = not abandon_on_cancel
        return trio.lowlevel.Abort.FAILED if waiting else trio.lowlevel.Abort.SUCCEEDED

    try:
        start_in_thread(call, end)
    except OSError:
        limiter.release_on_behalf_of(slot)
        raise
    return await trio.lowlevel.wait_task_rescheduled(leave)  # type: ignore[no-any-return]


class Stoppable:
    """Calls that one thread makes and a trio task ends. Each flag has one writer, so no lock is needed: the thread sets
    `_busy` *before* it reads `_closed`, and `close` sets `_closed` before it reads `_busy`. One of the two sees the
    other."""

    _busy = _closed = False

    async def close(self) -> None:
        """Let no further call begin, and wait for the one that runs: the caller may reuse its buffer or descriptor next."""
        self._closed = True
        while self._busy:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.001)


def start_in_thread(call: Callable[[], T], end: Callable[[outcome.Outcome[T]], object]) -> None:
    """Call `call` in a worker thread, with this context. The trio thread then calls `end` with its outcome, unless trio has
    ended. Call this on the trio thread. OSError (EAGAIN) if no thread can be started."""
    token, context = trio.lowlevel.current_trio_token(), copy_context()

    def deliver(result: outcome.Outcome[T]) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(end, result)

    try:
        trio.lowlevel.start_thread_soon(partial(context.run, call), deliver)
    except RuntimeError as exc:
        raise OSError(errno.EAGAIN, "no thread can be started") from exc


async def in_thread_at_last(call: Callable[[], T], *, limiter: trio.CapacityLimiter | None = None) -> T:
    """As `in_thread`, but if no thread can be started, retry until one can. A cancelled caller does not wait for the
    thread."""
    while True:
        try:
            return await in_thread(call, limiter=limiter, abandon_on_cancel=True)
        except OSError as exc:
            if exc.errno != errno.EAGAIN:
                raise
        await trio.sleep(LOOK_EVERY_S)


class Lock:
    """As `trio.Lock`, for less processor time: taking a free lock has no checkpoint, in which other tasks would run, and no
    owner is remembered. Waiting tasks get the lock in their order; `waited_for` tells whether there are any."""

    __slots__ = ("_held", "_waiting")

    def __init__(self) -> None:
        self._held = False
        self._waiting: trio.lowlevel.ParkingLot | None = None  # made when the first task waits

    def locked(self) -> bool:
        return self._held

    @property
    def waited_for(self) -> bool:
        return bool(self._waiting)

    def acquire_nowait(self) -> None:
        """Raises `WouldBlock` if the lock is held."""
        if self._held:
            raise trio.WouldBlock
        self._held = True

    async def acquire(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._held:
            self._held = True
            return
        self._waiting = self._waiting or trio.lowlevel.ParkingLot()
        await self._waiting.park()  # `release` leaves the lock to this task

    def release(self) -> None:
        if self._waiting:
            self._waiting.unpark()
        else:
            self._held = False

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()


def containing(what: str, handle: Callable[[T], Awaitable[object]]) -> Callable[[T], Awaitable[None]]:
    """`handle` with exceptions contained, for servers that start a task for each connection."""

    async def handled(argument: T) -> None:
        await run_contained(what, handle, argument)

    return handled

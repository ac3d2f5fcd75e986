"""Tasks whose failure stays with what they are about: one file, one request, one connection.

In trio an exception that leaves a task ends its whole nursery, and with it the daemon. That is right for the composition
root's own services, and wrong for a task that serves one file: its callers are told by other means (an event, a reply, a
result), and the other tasks go on. Such a task is started with `contained`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

import trio

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


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


def containing(what: str, handle: Callable[[T], Awaitable[object]]) -> Callable[[T], Awaitable[None]]:
    """`handle` with the same promise, for what starts a task for each connection."""

    async def handled(argument: T) -> None:
        await run_contained(what, handle, argument)

    return handled

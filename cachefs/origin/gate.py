"""The order of requests: demand (a reader waits) goes before background (prefetching).

A request carries a priority ticket through both queues, the admission gate in front of the origin and the download limit
behind it. A background transfer becomes demand when a reader joins it, and then overtakes in the queue where it waits.
Background is not starved: one background request goes after every few demands.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import trio

from cachefs.origin.limiter import Concurrency

OVERTAKEN_AT_MOST = 4
"""Demand requests that may go before a waiting background request. Guessed: readahead keeps a fifth of a busy store."""


class Ticket:
    """The priority class of one request in all queues; it waits in one at a time. `thread` is the thread id of the read that
    waits for it, 0 for none."""

    __slots__ = ("background", "line", "thread")

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self.thread = 0
        self.line: Line | None = None

    def promote(self) -> None:
        """Make it demand, behind the demands that wait already."""
        if self.background:
            self.background = False
            if self.line is not None:
                self.line.promoted(self)


class Line:
    """A wait queue of two classes, first come first served within each. Callers have deadlines of their own."""

    def __init__(self, on_promoted: Callable[[], None] = lambda: None) -> None:
        self.demand: OrderedDict[Ticket, trio.lowlevel.Task] = OrderedDict()
        self.background: OrderedDict[Ticket, trio.lowlevel.Task] = OrderedDict()
        self._on_promoted = on_promoted
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self.demand) + len(self.background)

    async def wait(self, turn: Ticket) -> None:
        """Return when `call` has taken this ticket. A ticket that was called cannot be cancelled, and a cancelled one
        cannot be called, not even before its task runs: the caller of `call` relies on it."""

        def leave(_: object) -> trio.lowlevel.Abort:
            turn.line = None
            (self.background if turn.background else self.demand).pop(turn)
            return trio.lowlevel.Abort.SUCCEEDED

        (self.background if turn.background else self.demand)[turn] = trio.lowlevel.current_task()
        turn.line = self
        await trio.lowlevel.wait_task_rescheduled(leave)

    def promoted(self, turn: Ticket) -> None:
        self.demand[turn] = self.background.pop(turn)
        self._on_promoted()

    @property
    def starved(self) -> bool:
        """True if a background request waits and enough demands overtook it."""
        return bool(self.background) and self._overtaken >= OVERTAKEN_AT_MOST

    def call(self, *, background: bool) -> Ticket:
        """Let the first of a class go; the class must not be empty."""
        turn, task = (self.background if background else self.demand).popitem(last=False)
        self._overtaken = 0 if background else self._overtaken + 1
        turn.line = None  # a promotion from here on has nothing to overtake
        trio.lowlevel.reschedule(task)
        return turn


class Gate:
    """The admission gate: requests wait here for one of `Concurrency`'s slots."""

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self.line = Line(on_promoted=self._admit)
        self._inside: set[Ticket] = set()

    @property
    def in_flight(self) -> int:
        return len(self._inside)

    @property
    def background_in_flight(self) -> int:
        return sum(turn.background for turn in self._inside)

    async def enter(self, turn: Ticket) -> None:
        """Return with a slot, which the caller releases with `leave`."""
        overtaken = len(self.line.demand) + (len(self.line.background) if turn.background else 0)
        if not overtaken and self.concurrency.admits(self.in_flight, turn.background):
            self._inside.add(turn)
        else:
            await self.line.wait(turn)

    def leave(self, turn: Ticket) -> None:
        """Release a slot, and admit waiting requests (several, when the limit has grown)."""
        self._inside.remove(turn)
        self._admit()

    def _admit(self) -> None:
        line, concurrency = self.line, self.concurrency
        while concurrency.admits(self.in_flight, background=False):
            if line.demand and not line.starved:
                self._inside.add(line.call(background=False))
            elif line.background and (line.starved or concurrency.admits(self.in_flight, background=True)):
                self._inside.add(line.call(background=True))
            else:
                return

"""Who goes next: demand (a reader is waiting) overtakes what is fetched in the background.

A request carries a `Turn` through every queue it comes to: the gate in front of the store, and the download limit behind
it. A transfer that began in the background becomes demand when a reader comes to wait for it, and then it overtakes at
once, wherever it waits. Background is never starved: every few demands one of it goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import trio

from cachefs.origin.limiter import Concurrency

OVERTAKEN_AT_MOST = 4
"""Demand requests that may go before one waiting background request. Guessed: readahead keeps a fifth of a busy store."""


class Turn:
    """One request's class in all queues; it waits in one at a time. `thread` is whose read waits for it, 0: nobody's."""

    __slots__ = ("background", "line", "thread")

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self.thread = 0
        self.line: Line | None = None

    def promote(self) -> None:
        """It is demand from now on, behind the demands that wait already."""
        if self.background:
            self.background = False
            if self.line is not None:
                self.line.promoted(self)


class Line:
    """A queue of two classes, first come first served within each. Who waits has a deadline of its own."""

    def __init__(self, on_promoted: Callable[[], None] = lambda: None) -> None:
        self.demand: OrderedDict[Turn, trio.lowlevel.Task] = OrderedDict()
        self.background: OrderedDict[Turn, trio.lowlevel.Task] = OrderedDict()
        self._on_promoted = on_promoted
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self.demand) + len(self.background)

    async def wait(self, turn: Turn) -> None:
        """Return when `call` named this turn. Called, it cannot be cancelled any more; cancelled, it cannot be called any
        more, not even before its task runs: whoever calls relies on it."""

        def leave(_: object) -> trio.lowlevel.Abort:
            turn.line = None
            (self.background if turn.background else self.demand).pop(turn)
            return trio.lowlevel.Abort.SUCCEEDED

        (self.background if turn.background else self.demand)[turn] = trio.lowlevel.current_task()
        turn.line = self
        await trio.lowlevel.wait_task_rescheduled(leave)

    def promoted(self, turn: Turn) -> None:
        self.demand[turn] = self.background.pop(turn)
        self._on_promoted()

    @property
    def starved(self) -> bool:
        """Whether background has been overtaken often enough."""
        return bool(self.background) and self._overtaken >= OVERTAKEN_AT_MOST

    def call(self, *, background: bool) -> Turn:
        """The first of one class (which is not empty) goes."""
        turn, task = (self.background if background else self.demand).popitem(last=False)
        self._overtaken = 0 if background else self._overtaken + 1
        turn.line = None  # promoted from here on, it has nothing to overtake
        trio.lowlevel.reschedule(task)
        return turn


class Gate:
    """The trio side of `Concurrency`: requests wait here for a slot."""

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self.line = Line(on_promoted=self._admit)
        self._inside: set[Turn] = set()

    @property
    def in_flight(self) -> int:
        return len(self._inside)

    @property
    def background_in_flight(self) -> int:
        return sum(turn.background for turn in self._inside)

    async def enter(self, turn: Turn) -> None:
        """Return holding a slot, which `leave` gives back."""
        overtaken = len(self.line.demand) + (len(self.line.background) if turn.background else 0)
        if not overtaken and self.concurrency.admits(self.in_flight, turn.background):
            self._inside.add(turn)
        else:
            await self.line.wait(turn)

    def leave(self, turn: Turn) -> None:
        """Give a slot back and let in whoever may come now (several, when the limit has grown meanwhile)."""
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

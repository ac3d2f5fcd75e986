"""The state machine of a dirty file: whether the origin has its content, and whether the cache has its staging file. One
method for each transition; docs/explanation/architecture.md has the table.

Besides the state, `name` says whether a name shows the file, or only open handles use it. While the name is `GOING`, a
running transition ends as if it was shown, because it comes back if the origin refuses the removal.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import trio

from cachefs.base.errors import CachefsError
from cachefs.origin import ObjectInfo


class Attempt:
    """One upload of the content of `generation`, which is its first `frozen` bytes. They must not change from `begun` until
    `done`. `waiters` is the number of tasks that wait for the upload."""

    def __init__(self) -> None:
        self.begun, self.done = trio.Event(), trio.Event()
        self.scope = trio.CancelScope()
        self.error: CachefsError | None = None
        self.waiters = 0
        self.frozen = self.generation = -1  # until it has begun


@dataclass(frozen=True, slots=True)
class Stored:
    """The last version that was uploaded, with the content of `generation`. `overtaken`: another client's version has
    replaced it right after the upload, and `info` is that version."""

    generation: int
    info: ObjectInfo
    overtaken: bool = False


class State(enum.Enum):
    """From `SETTLING` on the staging file is not the dirty file's: the cache is adopting it, or has."""

    DIRTY, COMMITTING, CLEAN, SETTLING, ADOPTED = range(5)


class Name(enum.Enum):
    """Whether a name shows the file; it is being removed; or its removal is certain, and the next daemon must know."""

    SHOWN, GOING, GONE = range(3)


class Row(enum.IntEnum):
    """What the journal has of a dirty file: nothing; an upload to abort after a crash; all that restores it then."""

    NONE = 0
    NOTED = 1
    ACKNOWLEDGED = 2


class Content:
    """The state of one dirty file. `generation` counts the changes; `synced` is the last generation that is surely on the
    disk. `attempt` is the running upload, which exists in the state COMMITTING only."""

    def __init__(self) -> None:
        self.state = State.DIRTY
        self.name = Name.SHOWN
        self.row = Row.NONE
        self.stored: Stored | None = None
        self.attempt: Attempt | None = None
        self.generation, self.synced = 0, -1

    @property
    def dirty(self) -> bool:
        """True if the origin does not have the present content."""
        return self.stored is None or self.stored.generation != self.generation

    @property
    def adopted(self) -> bool:
        """True if the staging file belongs to the cache."""
        return self.state is State.ADOPTED

    @property
    def is_ours(self) -> bool:
        """True if the staging file belongs to the dirty file: the cache neither has it nor is adopting it."""
        return self.state not in (State.SETTLING, State.ADOPTED)

    # Transitions.

    def changed(self) -> None:
        """Note a change of the content."""
        assert self.state is not State.ADOPTED
        self.generation += 1
        if self.state is State.CLEAN:
            self.state = State.DIRTY

    def begin(self, attempt: Attempt) -> None:
        """Begin an upload."""
        assert self.state is State.DIRTY
        self.state, self.attempt = State.COMMITTING, attempt

    def stored_as(self, stored: Stored) -> None:
        """Note that the origin has the content of a generation."""
        self.stored = stored
        if self.state in (State.DIRTY, State.CLEAN):
            self._rest()

    def end(self) -> None:
        """End the attempt, which has succeeded or failed."""
        assert self.state is State.COMMITTING
        self.attempt = None
        self._rest()

    def settle(self) -> None:
        """Begin to give the file to the cache."""
        assert self.state is State.CLEAN
        self.state = State.SETTLING

    def settled(self, adopted: bool) -> None:
        """End what `settle` has begun: the cache has `adopted` the file, or has refused it."""
        assert self.state is State.SETTLING
        if adopted:
            self.state = State.ADOPTED
        else:
            self._rest()

    def renewed(self) -> None:
        """Note that the dirty file has a staging file of its own again, with the same content."""
        assert self.state is State.ADOPTED
        self._rest()

    def name_goes(self) -> None:
        """Begin to remove the name."""
        if self.name is Name.SHOWN:
            self.name = Name.GOING

    def name_gone(self) -> None:
        """Note that the name is removed for certain, or that another file has it."""
        self.name = Name.GONE

    def name_stays(self) -> None:
        """Note that the removal has failed."""
        self.name = Name.SHOWN

    def _rest(self) -> None:
        """Set the state after a transition: DIRTY or CLEAN."""
        self.state = State.DIRTY if self.dirty else State.CLEAN

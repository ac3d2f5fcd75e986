"""The states of a dirty file: what it holds, whether the origin or the cache has that, and what is being done with it. One
function for each transition.

| state | its staging file | the origin has | transitions |
|---|---|---|---|
| `DIRTY` | is ours | something else, or nothing | `begin` → `COMMITTING` |
| `COMMITTING` | is ours, and as it is being sent | the same, or what is sent | `end` → `CLEAN`, `DIRTY` |
| `CLEAN` | is ours | what it holds | `changed` → `DIRTY`, `settle` → `SETTLING` |
| `SETTLING` | is being given to the cache | what it held then | `settled` → `ADOPTED`, `CLEAN`, `DIRTY` |
| `ADOPTED` | is the cache's | what it holds | `renewed`, with a copy → `CLEAN` |

Beside it, `removed` says that its name is gone, or goes: its file is its handles' alone. What was under way ends as if the
name were there, because it comes back if the origin refuses its removal. `Row` is what the journal says. A dirty file is
*acknowledged* when its row brings it back after a crash.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import trio

from cachefs.base.errors import CachefsError
from cachefs.origin import ObjectInfo


class Attempt:
    """One upload of what the dirty file held at `generation`: its first `frozen` bytes, which are not to be changed until it
    is `done`."""

    def __init__(self) -> None:
        self.begun, self.done = trio.Event(), trio.Event()
        self.scope = trio.CancelScope()
        self.error: CachefsError | None = None
        self.waiters = 0
        self.frozen = self.generation = -1  # until it has begun


@dataclass(frozen=True, slots=True)
class Stored:
    """The last version that it made: of the content at `generation`. `overtaken`: the origin shows `info`, which is another
    client's, because that came right after it."""

    generation: int
    info: ObjectInfo
    overtaken: bool = False


class State(enum.Enum):
    DIRTY, COMMITTING, CLEAN, SETTLING, ADOPTED = range(5)


class Row(enum.IntEnum):
    """What the journal has: nothing; what is to be cleared away after a crash; what is to come back."""

    NONE = 0
    NOTED = 1
    ACKNOWLEDGED = 2


class Content:
    """`generation` counts the changes; `synced` is the last one that is surely on the disk. `attempt` is the upload that is
    under way: there is one in the state COMMITTING only."""

    def __init__(self) -> None:
        self.state = State.DIRTY
        self.removed = False
        self.row = Row.NONE
        self.stored: Stored | None = None
        self.attempt: Attempt | None = None
        self.generation, self.synced = 0, -1

    @property
    def dirty(self) -> bool:
        """True if it holds something that the origin does not have."""
        return self.stored is None or self.stored.generation != self.generation

    @property
    def adopted(self) -> bool:
        """True if the cache has its file."""
        return self.state is State.ADOPTED

    @property
    def is_ours(self) -> bool:
        """False while the cache is taking its file, and afterwards."""
        return self.state not in (State.SETTLING, State.ADOPTED)

    # Transitions.

    def changed(self) -> None:
        """It holds something else now."""
        assert self.state is not State.ADOPTED
        self.generation += 1
        if self.state is State.CLEAN:
            self.state = State.DIRTY

    def begin(self, attempt: Attempt) -> None:
        assert self.state is State.DIRTY
        self.state, self.attempt = State.COMMITTING, attempt

    def stored_as(self, stored: Stored) -> None:
        """The origin has it as it was at that generation."""
        self.stored = stored
        if self.state in (State.DIRTY, State.CLEAN):
            self._rest()

    def end(self) -> None:
        """The attempt is over, however it went."""
        assert self.state is State.COMMITTING
        self.attempt = None
        self._rest()

    def settle(self) -> None:
        """The cache begins to take the file."""
        assert self.state is State.CLEAN
        self.state = State.SETTLING

    def settled(self, adopted: bool) -> None:
        """The cache has the file, or it is ours still."""
        assert self.state is State.SETTLING
        if adopted:
            self.state = State.ADOPTED
        else:
            self._rest()

    def renewed(self) -> None:
        """It has a file of its own again, with the same content."""
        assert self.state is State.ADOPTED
        self._rest()

    def _rest(self) -> None:
        """Nothing is being done with it: what the origin has decides."""
        self.state = State.DIRTY if self.dirty else State.CLEAN

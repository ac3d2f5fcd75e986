"""The states of a dirty file: what it holds, whether the origin or the cache has that, and what is being done with it. One
function for each transition.

| state | its staging file | the origin has | transitions |
|---|---|---|---|
| `Dirty` | is ours | something else, or nothing | `begin` → `Committing` |
| `Committing` | is ours, and as it is being sent | the same, or what is sent | `end` → `Clean`, `Dirty` |
| `Clean` | is ours | what it holds | `changed` → `Dirty`, `settle` → `Settling` |
| `Settling` | is being given to the cache | what it held then | `settled` → `Adopted`, `Clean`, `Dirty` |
| `Adopted` | is the cache's | what it holds | `renewed`, with a copy → `Clean` |
| `Removed` | is its handles' alone | whatever there is | `restored` → the state before |

Beside it, `Row` is what the journal says. A dirty file is *acknowledged* when its row brings it back after a crash.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

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
        self.frozen = 0
        self.generation = -1


@dataclass(frozen=True, slots=True)
class Stored:
    """The last version that it made: of the content at `generation`. `overtaken`: the origin shows `info`, which is another
    client's, because that came right after it."""

    generation: int
    info: ObjectInfo
    overtaken: bool = False


@dataclass(frozen=True, slots=True)
class Dirty:
    stored: Stored | None


@dataclass(frozen=True, slots=True)
class Committing:
    stored: Stored | None
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Clean:
    stored: Stored


@dataclass(frozen=True, slots=True)
class Settling:
    stored: Stored


@dataclass(frozen=True, slots=True)
class Adopted:
    stored: Stored


Named = Dirty | Committing | Clean | Settling | Adopted


@dataclass(frozen=True, slots=True)
class Removed:
    """Its name is gone, or goes. What was under way ends in `before`."""

    before: Named


class Row(enum.IntEnum):
    """What the journal has: nothing; what is to be cleared away after a crash; what is to come back."""

    NONE = 0
    NOTED = 1
    ACKNOWLEDGED = 2


class Content:
    """`generation` counts the changes; `synced` is the last one that is surely on the disk."""

    def __init__(self) -> None:
        self.state: Named | Removed = Dirty(None)
        self.row = Row.NONE
        self.generation, self.synced = 0, -1

    @property
    def named(self) -> Named:
        """The state, whether the name is there or not."""
        return self.state.before if isinstance(self.state, Removed) else self.state

    @property
    def removed(self) -> bool:
        return isinstance(self.state, Removed)

    @property
    def stored(self) -> Stored | None:
        return self.named.stored

    @property
    def dirty(self) -> bool:
        """True if it holds something that the origin does not have."""
        stored = self.named.stored
        return stored is None or stored.generation != self.generation

    @property
    def attempt(self) -> Attempt | None:
        """The upload that is under way."""
        state = self.named
        return state.attempt if isinstance(state, Committing) else None

    @property
    def adopted(self) -> bool:
        """True if the cache has its file."""
        return isinstance(self.named, Adopted)

    @property
    def is_ours(self) -> bool:
        """False while the cache is taking its file, and afterwards."""
        return not isinstance(self.named, Settling | Adopted)

    # Transitions.

    def changed(self) -> None:
        """It holds something else now."""
        self.generation += 1
        if isinstance(self.named, Clean | Adopted):
            self._rest()

    def begin(self, attempt: Attempt) -> None:
        state = self.named
        assert isinstance(state, Dirty)
        self._go(Committing(state.stored, attempt))

    def stored_as(self, stored: Stored) -> None:
        """The origin has it as it was at that generation."""
        state = self.named
        if isinstance(state, Dirty | Clean):
            self._rest(stored)
        else:
            self._go(replace(state, stored=stored))

    def end(self) -> None:
        """The attempt is over, however it went."""
        assert isinstance(self.named, Committing)
        self._rest()

    def settle(self) -> None:
        """The cache begins to take the file."""
        state = self.named
        assert isinstance(state, Clean)
        self._go(Settling(state.stored))

    def settled(self, adopted: bool) -> None:
        """The cache has the file, or it is ours still."""
        state = self.named
        assert isinstance(state, Settling)
        if adopted:
            self._go(Adopted(state.stored))
        else:
            self._rest()

    def renewed(self) -> None:
        """It has a file of its own again, with the same content."""
        state = self.named
        assert isinstance(state, Adopted)
        self._rest()

    def remove(self) -> None:
        self.state = Removed(self.named)

    def restored(self) -> None:
        """It has its name, after all."""
        self.state = self.named

    def _rest(self, stored: Stored | None = None) -> None:
        """Nothing is being done with it: what the origin has decides."""
        stored = stored or self.named.stored
        self._go(Clean(stored) if stored and stored.generation == self.generation else Dirty(stored))

    def _go(self, state: Named) -> None:
        self.state = Removed(state) if self.removed else state

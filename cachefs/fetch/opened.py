"""One open handle's view of a version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from cachefs.errors import CachefsError
    from cachefs.fetch.readahead import Readahead
    from cachefs.names import ObjectId
    from cachefs.origin import Origin
    from cachefs.store import CachedObject

REPETITION_S = 0.25
"""The kernel repeats a read-ahead that failed as a read of its own, at once. One read of the same handle within this time
gets the same failure: otherwise an application would wait for two deadlines. Guessed; the repetition comes within 1 ms."""


class OpenedObject:
    """What a reader's `open` returns. `cached` is there from the first read on."""

    __slots__ = ("_failed", "cached", "id", "origin", "readahead")

    def __init__(self, origin: Origin, object_id: ObjectId) -> None:
        self.origin = origin
        self.id = object_id
        self.cached: CachedObject | None = None
        self.readahead: Readahead | None = None
        self._failed: tuple[float, CachefsError] | None = None

    def failed(self, error: CachefsError) -> None:
        """Its reader is told of a failure."""
        self._failed = (trio.current_time() + REPETITION_S, error)

    def raise_repeated(self) -> None:
        """Give a failure that has just been told once more, once."""
        if self._failed is not None:
            (until, error), self._failed = self._failed, None
            if trio.current_time() < until:
                raise type(error)(*error.args) from error

"""What a client opens at a vendor's library (a store, a filesystem), kept as long as it shows the credentials in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Opened(Generic[T]):
    """One such object. Libraries remember the credentials they were opened with for minutes or for ever, so it is
    opened anew when `current` says others. They are compared by value: a time says when something was opened, not
    what with. Thread-safe."""

    def __init__(self, open_it: Callable[[], T], current: Callable[[], object]) -> None:
        self._open, self._current = open_it, current
        self._value: T | None = None
        self._shows: object = None
        self._opened_at = float("-inf")
        self._lock = threading.Lock()

    def get(self) -> T:
        # Looked up inside the lock: a thread that looked and was overtaken must not bring the old ones back.
        with self._lock:
            current = self._current()
            if self._value is None or current != self._shows:
                self._value, self._shows = self._open(), current
                self._opened_at = time.monotonic()
            return self._value

    def forget(self, since: float = float("inf")) -> None:
        """Open it anew next time, unless that happened after `since`. Without the lock: one that hangs while it is
        opened must not hold up who closes."""
        if self._opened_at <= since:
            self._value = None

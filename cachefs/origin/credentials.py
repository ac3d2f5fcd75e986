"""What the clients need of a vendor's credentials, and library objects that were opened with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Credentials(Protocol):
    """The credentials of one mount. `current` is a value: two are equal when they authorise the same."""

    def current(self) -> object:
        """The credentials now; `PermissionDenied` when there are none."""

    def renew(self, since: float) -> bool:
        """As `Client.renew`."""

    @property
    def advice(self) -> str:
        """What the user can change when the origin refuses these credentials."""


class NoCredentials:
    """For stores without credentials."""

    advice = "the server wants credentials, and this kind of source has none"

    def current(self) -> object:
        return None

    def renew(self, since: float) -> bool:
        return False


class Opened(Generic[T]):
    """One object of a vendor's library (a store, a filesystem), opened again when the credentials change.

    Libraries keep the credentials that they were opened with for minutes or for ever. Credentials are compared by value: the
    time of opening does not tell which ones were used. Thread-safe."""

    def __init__(self, open_it: Callable[[], T], current: Callable[[], object]) -> None:
        self._open, self._current = open_it, current
        self._value: T | None = None
        self._shows: object = None
        self._opened_at = float("-inf")
        self._lock = threading.Lock()

    def get(self) -> T:
        # The credentials are read inside the lock: a thread that was overtaken must not bring the old ones back.
        with self._lock:
            current = self._current()
            if self._value is None or current != self._shows:
                self._value, self._shows = self._open(), current
                self._opened_at = time.monotonic()
            return self._value

    def forget(self, since: float = float("inf")) -> None:
        """Open it again at the next `get`, unless it was opened after `since`. Takes no lock: an opening that hangs must not
        block `close`."""
        if self._opened_at <= since:
            self._value = None

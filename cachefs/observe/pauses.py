"""How long the event loop has stood still: no request is read and none answered in such a pause."""

from __future__ import annotations

from collections import deque

import trio

LOOK_EVERY_S = 0.1
"""A longer pause is always seen, up to this too short; a shorter one is seen by chance. Guessed: ten looks a second
cost less than a thousandth of a processor."""

RECENT_S = 60.0
"""How long a pause counts as recent. Derived: scrapes come at least once a minute."""


class Pauses:
    """A task that looks at the time, and how much later than it wanted to."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        # (when, how long); each is longer than all after it.
        self._recent: deque[tuple[float, float]] = deque()

    async def run(self) -> None:
        """Look until cancelled."""
        due = trio.current_time()
        while True:
            due += LOOK_EVERY_S
            await trio.sleep_until(due)
            now = trio.current_time()
            self._saw(now, now - due)
            due = now

    def _saw(self, now: float, pause_s: float) -> None:
        self._longest_s = max(self._longest_s, pause_s)
        self._forget(now)
        while self._recent and self._recent[-1][1] <= pause_s:
            self._recent.pop()
        self._recent.append((now, pause_s))

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RECENT_S:
            self._recent.popleft()

    def status(self) -> dict[str, float]:
        """The longest pause of the last minute, and since the start, in seconds."""
        self._forget(trio.current_time())
        return {"minute": self._recent[0][1] if self._recent else 0.0, "run": self._longest_s}

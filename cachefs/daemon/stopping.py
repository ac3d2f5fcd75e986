"""Ends the process when a stop takes too long.

A stop has stages, each with a deadline: the mount is unmounted, written files are uploaded, caches and databases are
closed. A disk that hangs can block each of them, and the event loop itself, in a call that no signal ends. So a thread
watches. After a deadline it unmounts what is still mounted, writes a line, and ends the process at once. The next start then
treats the cache as after a crash.

The thread also begins a stop when a signal stays pending, because the event loop is blocked and does not take it. Further
signals do not end a stop: the caches and databases are closed after the event loop has ended, which received the first one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from cachefs.base.linux import mount_at
from cachefs.fuse.connection import end

log = logging.getLogger(__name__)

STAGE_S = 20.0
"""How long a stage may take in addition to its `seconds`: all together take well under a second, but a disk may be slow."""

LOOK_EVERY_S = 2.0
"""Seconds between two checks, and for the last line: the log may be on the disk that hangs. Derived: a tenth of a stage."""

EXIT_CODE = 70
"""EX_SOFTWARE: a service manager does not take it for a clean stop."""

SIGNALS = {signal.SIGTERM, signal.SIGINT}
HANDLED = SIGNALS | {signal.SIGHUP}


class Stopping:
    """Watches the stages of a stop. `start` starts the thread, `stage` begins each stage, `done` ends the watch."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        pending: Callable[[], bool] = lambda: not SIGNALS.isdisjoint(signal.sigpending()),
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._clock = clock
        self._pending = pending
        self._leave = leave
        self._ended = threading.Event()
        self._until: float | None = None
        self._begun = False
        self._doing = "taking the mount away"
        self._mount: tuple[Path, str] | None = None

    def start(self) -> None:
        """Begin the watch. For the main thread only, because it sets handlers of signals."""
        for number in HANDLED:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._answer)
        threading.Thread(target=self._watch, name="stopping", daemon=True).start()

    def mounted(self, mountpoint: Path) -> None:
        """Remember the mount that is unmounted if the stop has to be forced."""
        mount = mount_at(mountpoint)
        if mount is not None:
            self._mount = mountpoint, mount.device

    def stage(self, doing: str, seconds: float = 0.0) -> None:
        """Begin a stage, which may wait for `seconds` in addition to its own work."""
        self._begun = True
        self._doing = doing
        self._until = self._clock() + STAGE_S + seconds

    def done(self) -> None:
        self._ended.set()
        if self._begun:
            # The interpreter takes handlers away before the process ends.
            for number in HANDLED:
                signal.signal(number, signal.SIG_IGN)

    def _answer(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that the event loop does not receive, because it has not begun or has ended. A start ends with an
        exception, so that what it has opened is closed."""
        if not self._begun:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    # -- the thread --------------------------------------------------------------------------------

    def _watch(self) -> None:
        # `sigpending` returns only signals that this thread blocks.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        while not self._ended.wait(LOOK_EVERY_S):
            self.look()

    def look(self) -> None:
        if self._until is None and self._pending():
            self._doing, self._until = "answering a signal", self._clock() + STAGE_S
        if self._until is not None and self._clock() > self._until:
            self._end()

    def _end(self) -> None:
        line = f"stopped without closing cleanly: {self._doing} took too long (does the cache's disk hang?)"
        if self._mount is not None:
            mountpoint, number = self._mount
            mount = mount_at(mountpoint)
            if mount is not None and mount.device == number:
                end(mountpoint, number)
        writer = threading.Thread(target=_say, args=(line,), daemon=True)
        writer.start()
        writer.join(LOOK_EVERY_S)
        self._leave(EXIT_CODE)


def _say(line: str) -> None:
    log.error(line)
    print(f"cachefs: {line}", file=sys.stderr, flush=True)

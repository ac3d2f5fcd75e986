"""The state of the mount for the service manager: sd_notify(3), a datagram to a socket that the manager names.

READY=1 is sent when the mount answers, WATCHDOG=1 twice in the interval that the manager asks for, and STOPPING=1 before the
stop. WATCHDOG=1 means that the event loop runs this task, and that the mount answers (`Watch.illness`). A daemon that hangs
sends nothing, so the manager ends it and starts it again.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping

import trio

log = logging.getLogger(__name__)


class Notifier:
    """Does nothing without a service manager. Removes the manager's variables from `environ`, so that no child uses them."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        interval = environ.pop("WATCHDOG_USEC", "")
        meant = environ.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
        self.watchdog_s = int(interval) / 1e6 if interval.isdigit() and meant and self._address else 0.0
        """The longest silence after which the manager ends this daemon; 0: there is no watchdog."""

    def say(self, *lines: str) -> None:
        """Send ``NAME=value`` lines. A missing listener is not an error."""
        if not self._address.startswith(("/", "@")):
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
                connection.setblocking(False)
                abstract = self._address[0] == "@"
                connection.connect("\0" + self._address[1:] if abstract else self._address)
                connection.send("\n".join(lines).encode("utf-8", "replace"))
        except OSError as exc:
            log.debug("the service manager was not told %s: %s", lines, exc)

    async def attend(self, illness: Callable[[], Awaitable[str]], status: str) -> None:
        """Send READY=1 with `status`, and then WATCHDOG=1 while the mount answers (`illness` gives "")."""
        self.say("READY=1", f"STATUS={status}")
        while self.watchdog_s:
            # Half of the interval is for the answer, and half is reserve.
            until = trio.current_time() + self.watchdog_s / 2
            with trio.move_on_at(until):
                if reason := await illness():
                    log.warning("the service manager is not told that this daemon lives: %s", reason)
                else:
                    self.say("WATCHDOG=1")
            await trio.sleep_until(until)

    def stopping(self, status: str) -> None:
        """Send STOPPING=1 with `status`: the service manager then waits for this process to end."""
        self.say("STOPPING=1", f"STATUS={status}")

"""Telling the service manager how the mount is: sd_notify(3), which is one datagram to a socket that it names.

READY=1 once the mount answers, WATCHDOG=1 twice in the interval that it asks for, STOPPING=1 before what takes time at the
end. Alive means two things at once: the event loop runs this task, and a question to the mount comes back. The question is
statfs: the kernel never answers it by itself, and the daemon needs no origin for it, so that an origin that hangs is no
reason to be ended. A daemon that is stuck says nothing, and is ended and started again.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping
from functools import partial
from pathlib import Path

import trio

from cachefs.base.tasks import in_thread

log = logging.getLogger(__name__)

PROBE_DEADLINE_S = 5.0
"""How long the mount may take to answer before it is asked again, without a watchdog's interval. Guessed."""


class Notifier:
    """Does nothing without a service manager. Its variables are taken out of `environ`, so that no child takes them for
    its own."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        interval = environ.pop("WATCHDOG_USEC", "")
        meant = environ.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
        self.watchdog_s = int(interval) / 1e6 if interval.isdigit() and meant and self._address else 0.0
        """The longest silence before we are taken for stuck; 0: there is no watchdog."""
        self._asking = trio.CapacityLimiter(1)  # of its own: no library's hanging threads keep it waiting

    def say(self, *lines: str) -> None:
        """Send ``NAME=value`` lines. No listener is no error."""
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

    async def attend(self, mountpoint: Path, shown: str) -> None:
        """Say that it is ready once `mountpoint` answers, then as long as it does that we live. Returns at once
        without a service manager."""
        if not self._address:
            return
        while not await self._answers(mountpoint, PROBE_DEADLINE_S):
            pass
        self.say("READY=1", f"STATUS=shows {shown} at {mountpoint}")
        while self.watchdog_s:
            # Asked and told well within the interval: half of it is for the answer, and half for being late.
            until = trio.current_time() + self.watchdog_s / 2
            if await self._answers(mountpoint, self.watchdog_s / 2):
                self.say("WATCHDOG=1")
            await trio.sleep_until(until)

    def stopping(self, what: str) -> None:
        """From here on the service manager waits for the end."""
        self.say("STOPPING=1", f"STATUS={what}")

    async def _answers(self, mountpoint: Path, deadline_s: float) -> bool:
        with trio.move_on_after(deadline_s):
            try:
                await in_thread(partial(os.statvfs, mountpoint), limiter=self._asking, abandon_on_cancel=True)
            except OSError as exc:
                log.warning("%s does not answer its own daemon: %s", mountpoint, exc.strerror)
                await trio.sleep(deadline_s)
            else:
                return True
        return False

"""A listening socket that outlives a lack of descriptors.

Where a process has all the files open that it may have, accept(2) fails, and the connection waits in the kernel. Then one
descriptor that was kept in reserve is closed for it, so that `cachefs status` gets an answer when something goes wrong.
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress

import trio

from cachefs.base.logs import Repeats

log = logging.getLogger(__name__)

FOR_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""Errors of accept(2) that pass."""

AGAIN_S = 0.1
"""How long a connection waits for the next try. Borrowed from `trio.serve_listeners`."""


class Listener(trio.abc.Listener[trio.SocketStream]):
    """For `trio.serve_listeners`. `what` the connections are for is said in the log."""

    def __init__(self, socket: trio.SocketListener, what: str) -> None:
        self._socket = socket
        self._what = what
        self._repeats = Repeats()
        self._reserve = -1

    async def accept(self) -> trio.SocketStream:
        while True:
            self._open_reserve()
            for use_reserve in (False, True):
                if use_reserve:
                    self._close_reserve()
                try:
                    return await self._socket.accept()
                except OSError as exc:
                    if exc.errno not in FOR_NOW:
                        raise
                    why = exc.strerror
            # Not as trio does it, with ten tracebacks a second.
            if self._repeats.admit(why) is not None:
                log.warning("a connection for %s waits: %s", self._what, why)
            await trio.sleep(AGAIN_S)

    async def aclose(self) -> None:
        self._close_reserve()
        await self._socket.aclose()

    def _open_reserve(self) -> None:
        if self._reserve < 0:
            with suppress(OSError):  # when another connection has ended
                self._reserve = os.open("/dev/null", os.O_RDONLY)

    def _close_reserve(self) -> None:
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

"""A listening socket that survives a lack of descriptors.

If a process has as many files open as it may, accept(2) fails, and the connection waits in the kernel. Then a reserve
descriptor is closed and accept(2) repeated, so that `cachefs status` gets an answer even then.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
from contextlib import suppress

import trio

from cachefs.base.logs import Repeats

log = logging.getLogger(__name__)

FOR_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""Temporary errors of accept(2)."""

AGAIN_S = 0.1
"""Seconds before accept(2) is retried. Borrowed from `trio.serve_listeners`."""


def is_loopback(host: str) -> bool:
    """True if a host, as written in an address, is certainly this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


class Listener(trio.abc.Listener[trio.SocketStream]):
    """For `trio.serve_listeners`. `what` names the purpose of the connections in the log."""

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
            # trio itself would log ten tracebacks a second.
            if self._repeats.admit(why) is not None:
                log.warning("a connection for %s waits: %s", self._what, why)
            await trio.sleep(AGAIN_S)

    async def aclose(self) -> None:
        self._close_reserve()
        await self._socket.aclose()

    def _open_reserve(self) -> None:
        if self._reserve < 0:
            with suppress(OSError):  # tried again at the next accept, when another descriptor may be closed
                self._reserve = os.open("/dev/null", os.O_RDONLY)

    def _close_reserve(self) -> None:
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

"""What outlives the daemon where a holder keeps its connection (`cachefs.fuse.holder`), and how a daemon takes it over.

The holder's memory file has three parts: what the holder says of deaths, what the daemon has agreed with the kernel, and the
table of open files (`cachefs.fuse.handles`).
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import MutableMapping
from pathlib import Path

from cachefs.fuse.handles import HandleTable
from cachefs.fuse.holder import DEATHS, DESCRIPTORS, MOUNTPOINT_AT, MOUNTPOINT_BYTES

log = logging.getLogger(__name__)

_CONNECTION_AT, _CONNECTION = 16, struct.Struct("=IQd32s")  # minor, flags, longest pause, device number
_TABLE_AT = 2 * mmap.PAGESIZE


class Held:
    """One for each daemon that a holder has started."""

    def __init__(self, state_fd: int, socket_fd: int) -> None:
        for passed in (state_fd, socket_fd):
            os.set_inheritable(passed, False)
        self.fd = -1  # the connection of the daemon before
        self.holds = False  # whether the connection outlives this daemon
        self.restarts, self._died_at = 0, 0.0
        self._holder = os.getppid()
        self._socket = socket.socket(fileno=socket_fd)
        if os.fstat(state_fd).st_size < _TABLE_AT:
            os.ftruncate(state_fd, _TABLE_AT)
        self._state = mmap.mmap(state_fd, _TABLE_AT)
        self._state_fd = state_fd

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Held | None:
        """None without a holder. No child inherits anything of it."""
        text = environ.pop(DESCRIPTORS, "")
        try:
            state_fd, socket_fd = map(int, text.split(","))
            return cls(state_fd, socket_fd)
        except (ValueError, OSError):  # none, or a variable that was left in the environment
            return None

    def wait(self) -> None:
        """Return when this daemon is to begin. Ends the process if the holder has ended instead."""
        told, fds, _, _ = socket.recv_fds(self._socket, 16, 1)
        if not told:
            os._exit(0)
        for fd in fds:
            os.set_inheritable(fd, False)
            self.fd, self.holds = fd, True
        self.restarts, self._died_at = DEATHS.unpack_from(self._state)
        self.table = HandleTable(self._state_fd, _TABLE_AT)
        os.close(self._state_fd)

    @property
    def taking_over(self) -> bool:
        """Whether this daemon goes on with the connection of another one."""
        return self.fd >= 0

    @property
    def holder(self) -> int:
        """The process id of the holder, 0 if it has died."""
        return self._holder if self._holder == os.getppid() else 0

    # -- the connection ----------------------------------------------------------------------------

    def hold(self, fd: int, mountpoint: Path, number: str, minor: int, flags: int) -> None:
        """From now on the connection `fd`, made by this daemon, outlives it."""
        path = os.fsencode(mountpoint)
        if len(path) >= MOUNTPOINT_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(mountpoint))
        self._state[MOUNTPOINT_AT : MOUNTPOINT_AT + len(path) + 1] = path + b"\0"
        _CONNECTION.pack_into(self._state, _CONNECTION_AT, minor, flags, 0.0, number.encode())
        socket.send_fds(self._socket, [b"/dev/fuse"], [fd])
        self.holds = True

    def agreed(self) -> tuple[str, int, int]:
        """The mount's device number, protocol minor version and flags."""
        minor, flags, _, number = _CONNECTION.unpack_from(self._state, _CONNECTION_AT)
        return number.rstrip(b"\0").decode(), minor, flags

    def status(self) -> dict[str, int | float]:
        """For `cachefs status`."""
        return {"pid": self.holder, "restarts": self.restarts, "longest_pause_s": self.longest_pause_s}

    # -- pauses ------------------------------------------------------------------------------------

    @property
    def longest_pause_s(self) -> float:
        """From a death until the next daemon answered."""
        pause: float = _CONNECTION.unpack_from(self._state, _CONNECTION_AT)[2]
        return pause

    def answering(self) -> None:
        """This daemon, which has taken over, has begun to answer."""
        minor, flags, longest, number = _CONNECTION.unpack_from(self._state, _CONNECTION_AT)
        pause = time.monotonic() - self._died_at
        log.info("the kernel is answered again after %.2f s", pause)
        _CONNECTION.pack_into(self._state, _CONNECTION_AT, minor, flags, max(longest, pause), number)

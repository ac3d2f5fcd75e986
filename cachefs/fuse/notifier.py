"""A small process that sends notifications to the kernel, for a daemon whose mount outlives it.

To drop a page, the kernel makes the sender wait for the reader that has locked the page, and that reader may wait for the
daemon. A living daemon answers it. But a thread that waits in the kernel cannot be killed: a killed daemon could not end,
would keep its locks, and the next daemon, for which the reader waits, could not begin. So this process waits instead. It
holds only the connection and a socket to the daemon. It ends when the daemon ends, or as soon after that as its wait in the
kernel is over.

It runs as a script of its own (`python -I -S notifier.py FUSE SOCKET`) and imports nothing of cachefs. Each message on the
socket is a notification; the answer is an errno, 0 for success.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from contextlib import suppress

LONGEST = 1 << 16
"""Longest notification, in bytes. Derived: a name has 255 at most."""

_ANSWER_BYTES = 4


class Notifier:
    """Sends notifications through the process, for one thread. Starts it with the first one, and again if it has died."""

    def __init__(self, fuse_fd: int) -> None:
        self._fuse_fd = fuse_fd
        self._socket: socket.socket | None = None

    def send(self, message: bytes) -> None:
        """Send a notification, and block until the kernel has taken it. Raises the kernel's OSError, or that of starting the
        process."""
        number = self._sent(message)
        if number is None:
            number = self._sent(message)
        if number != 0:
            number = number or errno.EPIPE
            raise OSError(number, os.strerror(number))

    def _sent(self, message: bytes) -> int | None:
        """The kernel's errno, 0 for success; None if the process has died."""
        if self._socket is None:
            self._socket = self._start()
        try:
            self._socket.sendall(message)
            if answer := self._socket.recv(_ANSWER_BYTES):
                return int.from_bytes(answer, sys.byteorder)
        except (BrokenPipeError, ConnectionResetError):
            pass
        self.close()
        return None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = self._fuse_fd, theirs.fileno()
            try:
                subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """Have the process end, once it is not waiting in the kernel. Does not wait for its end."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def serve(fuse_fd: int, channel: socket.socket) -> None:
    """Send notifications to the kernel until the daemon has closed its end of the channel, or died."""
    with suppress(ConnectionError):
        while message := channel.recv(LONGEST):
            number = 0
            try:
                os.write(fuse_fd, message)
            except OSError as exc:
                number = exc.errno or errno.EIO
            channel.send(number.to_bytes(_ANSWER_BYTES, sys.byteorder))


if __name__ == "__main__":
    serve(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))

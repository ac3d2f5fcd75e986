"""A small process that sends notifications to the kernel, for a daemon whose mount outlives it.

When a page is to be dropped, the kernel waits for the reader that has locked it, and that reader may wait for the daemon. A
daemon that is alive answers it. But a thread that waits there cannot be killed: a dead daemon could not end, its locks would
stay, and the next daemon, for which the reader waits, could not begin. So another process waits in its place. It has the
connection and a socket, and nothing else of the daemon; it ends with the daemon, or as soon as it can.

It runs as a script of its own (`python -I -S notifier.py FUSE SOCKET`), without anything of cachefs. Each message on the
socket is a notification; the answer is an errno, 0 for none.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from contextlib import suppress

LONGEST = 1 << 16
"""Of a notification, in bytes. Derived: a name has 255 at most."""

_ANSWER_BYTES = 4


class Notifier:
    """For one thread. The process begins with the first notification, and again if it has died."""

    def __init__(self, fuse_fd: int) -> None:
        self._fuse_fd = fuse_fd
        self._socket: socket.socket | None = None

    def send(self, message: bytes) -> None:
        """Blocks until the kernel has taken it. Raises the kernel's OSError, or why the process cannot be started."""
        number = self._sent(message)
        if number is None:
            number = self._sent(message)
        if number != 0:
            number = number or errno.EPIPE
            raise OSError(number, os.strerror(number))

    def _sent(self, message: bytes) -> int | None:
        """The kernel's errno, 0 for none; None if the process has died."""
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
        """The process ends, unless the kernel has it wait. Does not wait for that."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def serve(fuse_fd: int, channel: socket.socket) -> None:
    """Until the daemon has closed its end, or died, with an answer unread or not yet sent."""
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

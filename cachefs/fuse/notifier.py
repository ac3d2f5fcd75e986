"""A small process that sends notifications to the kernel, for a daemon whose mount outlives it (`--restart`).

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

LONGEST = 1 << 16
_ANSWER_BYTES = 4


class Notifier:
    """For one thread. Raises OSError where the process cannot be started."""

    def __init__(self, fuse_fd: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(fuse_fd), str(theirs.fileno())],
                pass_fds=(fuse_fd, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        self._socket = ours

    def send(self, message: bytes) -> None:
        """Blocks until the kernel has taken it. Raises the kernel's OSError; EPIPE once the process has ended."""
        self._socket.sendall(message)
        answer = self._socket.recv(_ANSWER_BYTES)
        number = int.from_bytes(answer, sys.byteorder) if answer else errno.EPIPE
        if number:
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """The process ends, unless the kernel has it wait. Does not wait for that."""
        self._socket.close()


def serve(fuse_fd: int, channel: socket.socket) -> None:
    """Until the daemon has closed its end."""
    while message := channel.recv(LONGEST):
        number = 0
        try:
            os.write(fuse_fd, message)
        except OSError as exc:
            number = exc.errno or errno.EIO
        channel.send(number.to_bytes(_ANSWER_BYTES, sys.byteorder))


if __name__ == "__main__":
    serve(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))

"""The holder: a small process that keeps a mount's connection to the kernel, and starts its daemon again when it dies.

It runs as a script of its own (`python -I -S holder.py DIRECTORY COMMAND…`), without anything of cachefs, so that it stays
small and does next to nothing that can fail. Daemons are its children. Each gets two descriptors (`DESCRIPTORS`): a memory
file for what has to outlive it, whose first bytes are `DEATHS`; and a socket. On this a daemon waits until it is to begin,
is given the descriptor of /dev/fuse if another one had it before, and otherwise passes its own once the kernel has agreed to
repeat requests. From then on another daemon stands by: it has loaded all that it needs, and waits. When the daemon asks for
it (`RENEW`), another one, as it is installed now, takes the place of the one that stands by; when the daemon ends with
`HANDED_OVER`, that one goes on.

Without /dev/fuse there is nothing to hold: then it ends as the daemon did. It also ends when the daemon ended as it was
asked to, when the mount is gone, and when the daemon dies too often; the dead mount stays then, as without a holder.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

DESCRIPTORS = "CACHEFS_HOLDER"
"""The variable with the two descriptors."""

DEATHS = struct.Struct("=QdQ")
"""At the beginning of the memory file: how often another daemon has gone on, when the last one ended (CLOCK_MONOTONIC,
seconds), and how many of them had handed the mount over."""

RENEW = signal.SIGUSR1
"""A daemon sends this signal to have another one loaded in place of the one that stands by."""

HANDED_OVER = 79
"""The exit code of a daemon after which the one that stands by is to go on. None of sysexits.h."""

STANDBY_AT, STANDBY = 80, struct.Struct("=II40s")
"""Where in the memory file the daemon that stands by says what it is: its process id, the number of the state that it
understands (0: it has ended without a word), its version."""

MOUNTPOINT_AT, MOUNTPOINT_BYTES = 128, 4096
"""Where in the memory file the daemon writes its mountpoint, ended by a zero byte."""

LONG_S, MOST_SHORT = 10.0, 10
"""So many daemons, one after the other, that each lived for less than the first are a crash loop. Guessed."""

STAND_BY_S = 2.0
"""How long a daemon has the machine to itself before the next one is loaded. Guessed: it opens its cache then."""

LONGEST_WAIT_S = 60.0
"""How long at most after one that cannot start another is loaded: the wait doubles each time. Guessed: a broken installation
stays broken until a person mends it."""

_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT}
_WAITED_FOR = _FORWARDED | {signal.SIGCHLD, RENEW}
_FROM_TERMINAL = 0x80
"""SI_KERNEL: a terminal has sent it to the daemon, too."""


class Holder:
    def __init__(self, directory: str, command: list[str]) -> None:
        self._directory = directory
        self._command = command
        self._state = os.memfd_create("cachefs-held", 0)
        os.environ.pop("WATCHDOG_PID", None)  # it names this process, and the daemon is meant
        self._fuse = -1
        self._usual = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        self._child, self._socket = self._load()
        self._standby: tuple[int, socket.socket] | None = None
        self._wait_s, self._load_at = STAND_BY_S, 0.0  # for the one that stands by
        self._restarts = self._handed_over = self._short = 0
        self._stopping = self._aborting = False

    def run(self) -> int:
        """Returns the exit code of the last daemon."""
        while True:
            began = time.monotonic()
            with suppress(OSError):  # it has died
                socket.send_fds(self._socket, [b"begin"], [self._fuse] if self._fuse >= 0 else [])
            code = self._wait()
            died = time.monotonic()
            self._take()
            if self._fuse < 0 or code == 0 or self._aborting or self._is_over():
                return code
            if self._stopping:
                return self._take_away(code)
            handed_over = code == HANDED_OVER
            self._short = self._short + 1 if died - began < LONG_S and not handed_over else 0
            if self._short >= MOST_SHORT:
                _say(
                    f"the daemon has died {MOST_SHORT} times within {LONG_S:g} s: it is not started again, and its "
                    "mount stays dead"
                )
                return code
            self._restarts += 1
            self._handed_over += handed_over
            os.pwrite(self._state, DEATHS.pack(self._restarts, died, self._handed_over), 0)
            if not handed_over:
                _say(f"the daemon has died ({_how(code)}): starting it again")
            self._wait_s, self._load_at = STAND_BY_S, 0.0
            self._socket.close()
            (self._child, self._socket), self._standby = self._standby or self._load(), None

    # -- the daemon --------------------------------------------------------------------------------

    def _load(self) -> tuple[int, socket.socket]:
        """A daemon that waits, and the socket on which it does."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        os.environ[DESCRIPTORS] = f"{self._state},{theirs.fileno()}"
        pid = os.fork()
        if not pid:
            try:
                os.chdir(self._directory)
                os.set_inheritable(self._state, True)
                theirs.set_inheritable(True)
                signal.pthread_sigmask(signal.SIG_SETMASK, self._usual)
                os.execv(self._command[0], self._command)
            finally:
                os._exit(127)
        theirs.close()
        os.chdir("/")  # a process that stays keeps no directory busy
        ready = os.environ.pop("CACHEFS_READY_FD", "")
        if ready.isdigit():
            os.close(int(ready))  # only the daemon says whether it is ready, and only once
        return pid, ours

    def _wait(self) -> int:
        """Pass signals on until the daemon has ended. Returns its exit code; 128 and more for a signal."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self._child:
                code = os.waitstatus_to_exitcode(status)
                self._child = 0
                return code if code >= 0 else 128 - code
            if pid:  # as process 1 of a container it gets the orphans of others
                self._forget(pid, status)
            elif (found := signal.sigtimedwait(_WAITED_FOR, STAND_BY_S)) is not None:
                self._heed(found)
            elif self._standby is None and not self._stopping and time.monotonic() >= self._load_at:
                self._stand_by()

    def _stand_by(self) -> None:
        """Load another daemon, if there is a connection to go on with."""
        self._take()
        if self._fuse >= 0:
            self._standby = self._load()

    def _forget(self, pid: int, status: int) -> None:
        """A child has ended; if it was the one that stands by, another is loaded soon, or later if it ended by itself."""
        if self._standby is not None and self._standby[0] == pid:
            self._standby[1].close()
            self._standby = None
            if os.WIFEXITED(status):
                self._load_at = time.monotonic() + self._wait_s
                self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
            said, _, _ = STANDBY.unpack(os.pread(self._state, STANDBY.size, STANDBY_AT))
            if said != pid:
                os.pwrite(self._state, STANDBY.pack(pid, 0, b""), STANDBY_AT)

    def _heed(self, found: signal.struct_siginfo) -> None:
        if found.si_signo == signal.SIGCHLD:
            return
        if found.si_signo == RENEW:
            if found.si_pid == self._child:
                self.end()
                self._stand_by()
            return
        if found.si_signo in (signal.SIGABRT, signal.SIGQUIT):
            self._aborting = True  # a service manager ends what hangs, and starts it again by itself
        if found.si_signo != signal.SIGHUP:
            self._stopping = True
        elif self._standby is not None:
            os.kill(self._standby[0], signal.SIGKILL)  # it has read the configuration as it was
        if self._child and found.si_code != _FROM_TERMINAL:
            os.kill(self._child, found.si_signo)

    def end(self) -> None:
        """Nothing is started any more."""
        if self._standby is not None:
            os.kill(self._standby[0], signal.SIGKILL)
            os.waitpid(self._standby[0], 0)
            self._standby[1].close()
            self._standby = None

    # -- the connection ----------------------------------------------------------------------------

    def _take(self) -> None:
        """Take the connection, if the daemon has passed it."""
        with suppress(OSError):
            _, passed, _, _ = socket.recv_fds(self._socket, 16, 1)
            for fd in passed:
                self._fuse = fd

    def _is_over(self) -> bool:
        """Whether the kernel has ended the connection: its mount is gone."""
        asked = select.poll()
        asked.register(self._fuse, 0)
        return bool(asked.poll(0))

    def _take_away(self, code: int) -> int:
        """Unmount what a daemon that was asked to stop has left, by dying of it."""
        os.close(self._fuse)
        path = os.pread(self._state, MOUNTPOINT_BYTES, MOUNTPOINT_AT).partition(b"\0")[0]
        command = [
            *self._command[: self._command.index("cachefs") + 1],
            "umount",
            "--lazy",
            os.fsdecode(path),
        ]
        pid = os.posix_spawn(command[0], command, os.environ, setsigmask=[])
        os.waitpid(pid, 0)
        return code


def _how(code: int) -> str:
    return f"signal {code - 128}" if code > 128 else f"exit code {code}"


def _say(line: str) -> None:
    with suppress(OSError):
        os.write(2, f"cachefs: {line}\n".encode())


if __name__ == "__main__":
    holder = Holder(sys.argv[1], sys.argv[2:])
    try:
        sys.exit(holder.run())
    finally:
        holder.end()

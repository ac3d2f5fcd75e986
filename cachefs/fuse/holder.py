"""The holder: a small process that keeps a mount's connection to the kernel, and starts its daemon again when it dies.

It runs in an interpreter of its own (`python -I -S -c LAUNCH …/fuse DIRECTORY COMMAND…`) and imports nothing of cachefs, so
that it is small and hardly anything in it can fail. Daemons are its children. Each gets two descriptors (`DESCRIPTORS`): a
memory file for the state that has to outlive it, whose first bytes are `DEATHS`; and a socket. A daemon waits on the socket
until it is to begin. It is given the descriptor of /dev/fuse there if a previous daemon has passed one; otherwise it passes
its own once the kernel has agreed to repeat requests. From then on another daemon, the *standby*, has loaded all modules
and waits. When the daemon sends `RENEW`, another one, of the installed version, replaces the standby. When the daemon ends
with `HANDED_OVER`, or dies, the standby takes over.

Without /dev/fuse the holder has nothing to hold, and ends when the daemon ends. It also ends when the daemon has stopped as
asked, when the mount is gone, and when daemons die too often; then the dead mount stays, as without a holder.

Under systemd a copy of /dev/fuse and of the memory file lies in the unit's file descriptor store. A holder that is killed
leaves them there; systemd starts another one, which finds them and goes on. A holder that ends by itself removes them,
because with a copy left, programs would wait for a daemon that does not come.
"""

from __future__ import annotations

# Modules are chosen by the memory that importing them takes: `socket` takes half a megabyte more than `_socket`; `signal`
# (which imports enum), `contextlib` and `collections.abc` take 0.9 megabytes together.
import _socket
import fcntl
import os
import select
import struct
import sys
import time

TYPE_CHECKING = False  # as in `typing`, which is not imported either
if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
else:
    import _signal as signal

LAUNCH = "import sys; sys.path.append(sys.argv.pop(1)); import holder; holder.main()"
"""The code that the interpreter runs, with the directory of this file as first argument. An import uses the compiled file;
compiling would take a megabyte."""

DESCRIPTORS = "CACHEFS_HOLDER"
"""Name of the environment variable with the two descriptors."""

READY_FD, SAID = "CACHEFS_READY_FD", "said"
"""Name of the environment variable with the descriptor on which a mount in the background says that it is ready, and its
value for the daemons after the first, which run in the background, too, but do not report that they are ready."""

DEATHS = struct.Struct("=QdQ")
"""At the beginning of the memory file: how often another daemon has taken over, when the last one ended (CLOCK_MONOTONIC,
seconds), and how many of them had handed the mount over."""

RENEW = signal.SIGUSR1
"""A daemon sends this signal to have the standby replaced by another one."""

HANDED_OVER = 79
"""The exit code of a daemon that hands its mount over to the standby. sysexits.h does not use it."""

STANDBY_AT, STANDBY = 80, struct.Struct("=II40s")
"""Where in the memory file the standby announces itself: its process id, the format of the state that it knows (0: it ended
without an announcement), its version."""

MOUNTPOINT_AT, MOUNTPOINT_BYTES = 128, 4096
"""Where in the memory file the daemon writes its mountpoint, ended by a zero byte."""

LIVES_AT, LIVES = MOUNTPOINT_AT + MOUNTPOINT_BYTES, struct.Struct("=Qd")
"""Where in the memory file the holder counts: how many daemons in a row were short-lived, and when the present one began
(CLOCK_MONOTONIC, seconds)."""

KILLED_AT, KILLED = LIVES_AT + LIVES.size, struct.Struct("=?")
"""Where in the memory file the holder notes whether the last daemon ended by SIGKILL, so not by a failure of its own."""

_STORED_FUSE, _STORED_MEMORY = "cachefs-fuse", "cachefs-memory"
"""Names of the descriptors in the service manager's store."""

SHORT_LIFE_S, CRASH_LOOP = 10.0, 10
"""`CRASH_LOOP` daemons in a row of which each lived for less than `SHORT_LIFE_S` are a crash loop. Guessed."""

STAND_BY_S = 2.0
"""How long a daemon runs before the standby is loaded, so that it opens its cache undisturbed. Guessed."""

LONGEST_WAIT_S = 60.0
"""Longest wait before another standby is loaded after one that could not start; the wait doubles each time. Guessed: a
broken installation stays broken until a person repairs it."""

_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT}
_WAITED_FOR = _FORWARDED | {signal.SIGCHLD, signal.SIGIO, RENEW}
_FIRST_STORED = 3
"""SD_LISTEN_FDS_START."""
_FROM_TERMINAL = 0x80
"""SI_KERNEL: the terminal has sent the signal, and has sent it to the daemon, too."""


class Holder:
    def __init__(self, directory: str, command: list[str]) -> None:
        self._directory = directory
        self._command = command
        os.environ.pop("WATCHDOG_PID", None)  # it names this process, but the daemon answers the watchdog
        self._fuse, self._state = _connection_in_store() or (-1, os.memfd_create("cachefs-held", 0))
        self._original_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        self._child = 0
        self._socket: _socket.socket
        self._standby: tuple[int, _socket.socket] | None = None  # as returned by `_load`
        self._load_at = 0.0  # when the next standby may be loaded
        self._retry_s = STAND_BY_S  # how long to wait after a standby that could not start
        self._stopping = self._aborting = False

    def run(self) -> int:
        """Run daemons until the mount ends. Returns the exit code of the last one."""
        # If a connection was found, the previous holder was killed, and its daemon with it.
        if self._fuse >= 0 and not self._count_death("with the process that started it"):
            return self._finish(1)
        self._child, self._socket = self._load()
        while True:
            self._activate()
            code = self._wait_for_daemon()
            self._receive_connection()
            if self._fuse < 0 or code == 0 or has_ended(self._fuse):
                return self._finish(code)
            if self._aborting:
                return code  # the service manager starts another holder; without a manager the mount is dead
            if self._stopping:
                return self._unmount_dead(code)
            cause = f"signal {code - 128}" if code > 128 else f"exit code {code}"
            killed = code == 128 + signal.SIGKILL
            if not self._count_death("" if code == HANDED_OVER else cause, killed=killed):
                return self._finish(code)
            self._retry_s, self._load_at = STAND_BY_S, 0.0
            self._socket.close()
            while self._standby is None:
                self._load_standby()
                if (
                    self._standby is None
                    and (found := signal.sigtimedwait(_WAITED_FOR, STAND_BY_S)) is not None
                ):
                    self._handle_signal(found)
                    if self._stopping:
                        return code if self._aborting else self._unmount_dead(code)
            (self._child, self._socket), self._standby = self._standby, None

    def _activate(self) -> None:
        """Tell the child to begin: to take the connection over, or to mount."""
        short = LIVES.unpack(self._read(LIVES_AT, LIVES.size))[0]
        os.pwrite(self._state, LIVES.pack(short, time.monotonic()), LIVES_AT)
        try:
            _send(self._socket, b"begin", [self._fuse] if self._fuse >= 0 else [])
        except OSError:
            pass  # it has died

    def _count_death(self, cause: str, *, killed: bool = False) -> bool:
        """Count a daemon that has ended; `cause` is "" if it has handed over. False if no other is to be started."""
        died = time.monotonic()
        short, began = LIVES.unpack(self._read(LIVES_AT, LIVES.size))
        short = short + 1 if died - began < SHORT_LIFE_S and cause else 0
        if short >= CRASH_LOOP:
            _log_line(
                f"the daemon has died {CRASH_LOOP} times in a row, each time within {SHORT_LIFE_S:g} s of its start: it is "
                "not started again, and its mount stays dead"
            )
            return False
        restarts, _, handed_over = DEATHS.unpack(self._read(0, DEATHS.size))
        os.pwrite(self._state, LIVES.pack(short, began), LIVES_AT)
        os.pwrite(self._state, KILLED.pack(killed), KILLED_AT)
        os.pwrite(self._state, DEATHS.pack(restarts + 1, died, handed_over + (not cause)), 0)
        if cause:
            _log_line(f"the daemon has died ({cause}): starting it again")
        return True

    def _read(self, at: int, size: int) -> bytes:
        return os.pread(self._state, size, at).ljust(size, b"\0")

    def _finish(self, code: int) -> int:
        """Remove the stored descriptors, because no other holder is to take this mount over. Returns `code`."""
        _forget_stored()
        return code

    # -- the daemon --------------------------------------------------------------------------------

    def _load(self) -> tuple[int, _socket.socket]:
        """Start a daemon that waits. Returns its process id, and the socket on which it waits."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        fcntl.fcntl(ours, fcntl.F_SETOWN, os.getpid())
        # SIGIO tells that the daemon passes its connection.
        fcntl.fcntl(ours, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
        os.environ[DESCRIPTORS] = f"{self._state},{theirs.fileno()}"
        pid = os.fork()
        if not pid:
            try:
                os.chdir(self._directory)
                os.set_inheritable(self._state, True)
                os.set_inheritable(theirs.fileno(), True)
                # SIGHUP would end a daemon that does not handle it yet. It waits until `Daemon.main` unblocks it.
                signal.pthread_sigmask(signal.SIG_SETMASK, self._original_mask | {signal.SIGHUP})
                os.execv(self._command[0], self._command)
            finally:
                os._exit(127)
        theirs.close()
        os.chdir("/")  # so that the holder keeps no directory busy
        ready = os.environ.get(READY_FD, "")
        if ready.isdigit():
            os.close(int(ready))  # only the first daemon says whether it is ready
            os.environ[READY_FD] = SAID
        return pid, ours

    def _wait_for_daemon(self) -> int:
        """Forward signals until the daemon has ended. Returns its exit code; for a signal, 128 plus its number."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self._child:
                code = os.waitstatus_to_exitcode(status)
                self._child = 0
                return code if code >= 0 else 128 - code
            if pid:  # the standby; or an orphan, if the holder is process 1 of a container
                self._reap(pid, status)
            elif (found := signal.sigtimedwait(_WAITED_FOR, STAND_BY_S)) is not None:
                self._handle_signal(found)
            elif self._aborting:
                # SIGABRT has left it time to log where it hangs. A stopped process does not react to it.
                os.kill(self._child, signal.SIGKILL)
            elif self._standby is None and not self._stopping and time.monotonic() >= self._load_at:
                self._load_standby()

    def _load_standby(self) -> None:
        """Load a standby, if there is a connection for it to take over. If no process can be started, as in a container at
        its limit of processes, another one is tried later."""
        self._receive_connection()
        if self._fuse >= 0:
            try:
                self._standby = self._load()
            except OSError as exc:
                _log_line(f"no other daemon can be loaded: {exc.strerror}: trying again")
                self._load_later()

    def _load_later(self) -> None:
        self._load_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LONGEST_WAIT_S)

    def _reap(self, pid: int, status: int) -> None:
        """Handle the end of a child that is not the daemon. If it was the standby, another is loaded; if that one exited by
        itself, not before `_retry_s`."""
        if self._standby is not None and self._standby[0] == pid:
            self._standby[1].close()
            self._standby = None
            if os.WIFEXITED(status):
                self._load_later()
            announced, _, _ = STANDBY.unpack(os.pread(self._state, STANDBY.size, STANDBY_AT))
            if announced != pid:
                os.pwrite(self._state, STANDBY.pack(pid, 0, b""), STANDBY_AT)

    def _handle_signal(self, found: signal.struct_siginfo) -> None:
        """Act on a signal to the holder, and forward those that are meant for the daemon."""
        if found.si_signo == signal.SIGCHLD:
            return
        if found.si_signo == signal.SIGIO:
            self._receive_connection()
            return
        if found.si_signo == RENEW:
            if found.si_pid == self._child:
                self.end_standby()
                self._load_standby()
            return
        if found.si_signo in (signal.SIGABRT, signal.SIGQUIT):
            # With this signal the service manager ends a service that hangs, and starts it again.
            self._aborting = True
        if found.si_signo != signal.SIGHUP:
            self._stopping = True
        elif self._standby is not None:
            os.kill(self._standby[0], signal.SIGKILL)  # it has read the old configuration
        if self._child and found.si_code != _FROM_TERMINAL:
            os.kill(self._child, found.si_signo)

    def end_standby(self) -> None:
        if self._standby is not None:
            os.kill(self._standby[0], signal.SIGKILL)
            os.waitpid(self._standby[0], 0)
            self._standby[1].close()
            self._standby = None

    # -- the connection ----------------------------------------------------------------------------

    def _receive_connection(self) -> None:
        """Take the connection, if the daemon has passed it."""
        try:
            _, passed, _, _ = self._socket.recvmsg(16, _socket.CMSG_SPACE(4))
        except OSError:
            return  # it has passed none
        for _, _, number in passed:
            (fd,) = struct.unpack("i", number)
            os.set_inheritable(fd, False)
            self._fuse = fd
            _store(_STORED_MEMORY, self._state)
            _store(_STORED_FUSE, fd)  # last: the memory file alone is discarded by the next holder

    def _unmount_dead(self, code: int) -> int:
        """Unmount the mount of a daemon that died while it was stopping. Returns `code`."""
        self._finish(code)
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


# -- the service manager's store -------------------------------------------------------------------


def stored() -> dict[str, int]:
    """The descriptors, by name, that the service manager has kept of a previous holder and passes to this process."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = enumerate(os.environ.get("LISTEN_FDNAMES", "").split(":"), _FIRST_STORED)
    return {name: fd for fd, name in names if name in (_STORED_FUSE, _STORED_MEMORY)}


def _connection_in_store() -> tuple[int, int] | None:
    """The stored descriptors (/dev/fuse, memory file) of a holder that was killed; None if its connection has ended, too."""
    found = stored()
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    for fd in found.values():
        os.set_inheritable(fd, False)
    fuse, memory = found.get(_STORED_FUSE), found.get(_STORED_MEMORY)
    if fuse is not None and memory is not None and not has_ended(fuse):
        return fuse, memory
    _forget_stored()
    for fd in found.values():
        os.close(fd)
    return None


def has_ended(fuse: int) -> bool:
    """True if the kernel has ended the connection, so that its mount is gone."""
    poller = select.poll()
    poller.register(fuse, 0)
    return bool(poller.poll(0))


def _store(name: str, fd: int) -> None:
    # FDPOLL=0: otherwise systemd polls the descriptor, and the kernel wakes it for each request.
    _notify(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", fd)


def _forget_stored() -> None:
    for name in (_STORED_FUSE, _STORED_MEMORY):
        _notify(f"FDSTOREREMOVE=1\nFDNAME={name}")


def _notify(message: str, *fds: int) -> None:
    """Send a message to the service manager, if there is one: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    manager = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    try:
        manager.connect("\0" + address[1:] if address[0] == "@" else address)
        _send(manager, message.encode(), fds)
    except OSError:
        pass  # a service manager that does not listen is no reason to end
    finally:
        manager.close()


def _send(to: _socket.socket, message: bytes, fds: Sequence[int]) -> None:
    passed = struct.pack(f"{len(fds)}i", *fds)
    to.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, passed)] if fds else [])


def _log_line(line: str) -> None:
    """Write a line of the form that `cachefs.base.logs.TextFormatter` gives to those of a daemon."""
    try:
        if _log and not os.path.samestat(os.stat(_log), os.fstat(2)):
            fd = os.open(_log, os.O_WRONLY | os.O_APPEND)
            os.dup2(fd, 2)
            os.close(fd)
    except OSError:
        pass  # the log is gone
    now = time.time()
    written = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03}Z"
    try:
        os.write(2, f"{written} WARNING fuse.holder: {line}\n".encode())
    except OSError:
        pass  # stderr is closed


def _own_log() -> str:
    """The path of the log if stderr is a mount's own one, which the daemon renames when it is full; else ""."""
    try:
        path = os.readlink("/proc/self/fd/2")
        return path if READY_FD in os.environ and os.path.isfile(path) else ""
    except OSError:
        return ""


_log = _own_log()


def main() -> None:
    holder = Holder(sys.argv[1], sys.argv[2:])
    try:
        sys.exit(holder.run())
    finally:
        holder.end_standby()

"""Whole daemons that are killed, and a test that plays their holder, and the kernel if it wants to.

Each daemon is a fork of this process: it runs `cachefs.daemon.daemon.run`, over a directory as its origin, and goes on with
the connection and the memory of the one before, as behind `cachefs.fuse.holder`. A daemon kills itself (SIGKILL) when it has
read a request with the opcode that the test names, before it does anything else, or at a step of carrying it out, or when it
is about to write the reply to it. That reply is kept aside, for a comparison. The kernel is the real one (`Daemons`), or a
socket (`Deaths`).
"""

from __future__ import annotations

import gc
import mmap
import os
import select
import signal
import socket
import struct
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from cachefs.base import database, logs, shared_memory
from cachefs.base.client import control_path
from cachefs.config import layers
from cachefs.daemon import daemon, mounting
from cachefs.fuse import handover, holder, native_backend, protocol
from cachefs.fuse.native_backend import WANTED_TO_WRITE, Device
from cachefs.fuse.protocol import RESENT, Init, Op
from cachefs.origin.local import LocalClient
from cachefs.store.ram import remove_ram
from cachefs.upload import orphans
from cachefs.upload.staging import StagingFile
from tests.fuse.kernel import ROOT, SEND_BUFFER, Reply, socket_pair

READ, CARRIED_OUT, AMID, BEHIND = 1, 2, 3, 4
"""The moments of a death: a request was read and nothing else; it was carried out, and its reply is lost; in between; in
between or after it was answered."""

DEATHS = {"read": READ, "carried out": CARRIED_OUT}

ANSWERS_S = 30.0
"""How long a daemon may take on a machine that does other things. Guessed."""

_ARMED = struct.Struct("=QQQ")
"""The opcode of the request at which a daemon kills itself, when (`READ` …, 0: never), and for `AMID` and `BEHIND` at which
step."""

_STEPS_AT, _STEPS = 64, struct.Struct("=QQ")
"""At which step of its taking over a daemon kills itself (0: at none), and how many it has made."""

STEPS: list[tuple[Any, str]] = [
    (daemon.cachedir, "open_cache"),
    (daemon.cachedir, "open_names"),
    (database.Database, "write"),
    (shared_memory.RowLog, "clear"),
    (shared_memory.RowLog, "_empty"),
    (shared_memory.FileRecords, "put"),
    (shared_memory.FileRecords, "drop"),
    (shared_memory.FileRecords, "_forget"),
    (shared_memory.Tail, "release"),
    (StagingFile, "spill"),
    (daemon.Uploading, "recover"),
    (daemon.FileSystem, "recover"),
    (daemon.FileSystem, "follow"),
    (daemon.FileSystem, "restore"),
    (handover.HandleTable, "drop"),
    (handover.HandleTable, "unregistered"),
    (Device, "unregister"),
    (Device, "notify"),
    (handover.Handover, "answering"),
]
"""What a daemon calls while it takes over, up to its first answer. It may die before any of these calls."""


STEPS_OF_A_REQUEST: list[tuple[Any, str]] = [
    (database.Database, "write"),
    (shared_memory.RowLog, "append"),
    (shared_memory.FileRecords, "put"),
    (shared_memory.FileRecords, "touch"),
    (shared_memory.FileRecords, "drop"),
    (shared_memory.Tail, "release"),
    (handover.HandleTable, "add"),
    (handover.HandleTable, "drop"),
    (StagingFile, "spill"),
    (StagingFile, "sync"),
    (StagingFile, "remove"),
    (StagingFile, "unlink"),
    (orphans, "describe"),
    (orphans, "acknowledge"),
    (orphans, "mark"),
    (orphans, "forget"),
    (orphans, "disown"),
]
"""What changes something that outlives a daemon. It may die before any of these calls while it carries a request out."""

REQUESTS_TO_THE_ORIGIN = ("put", "copy", "delete", "begin", "put_part", "complete", "abort")
"""The same of the origin's client: a daemon may also die when the origin has carried one out."""


class Daemons:
    """One mount, at `place / "mnt"`. `options` are those of the command, in Python's spelling."""

    def __init__(self, place: Path, **options: Any) -> None:
        self.place, self.origin = place, place / "origin"
        for name in ("origin", "mnt", "cache"):
            (place / name).mkdir()
        self._options = {
            "source": f"file://{self.origin}",
            "mountpoint": place / "mnt",
            "cache_dir": place / "cache",
            "cache_size": "64M",
            "keep_free": "0",
            "ram": "0",
            "restart": True,
            "log_file": place / "daemon.log",
            **options,
        }
        self._armed = mmap.mmap(-1, mmap.PAGESIZE)
        self._lost, self._loses = socket_pair()  # replies that the kernel never got
        self.state = os.memfd_create("held")
        self.deaths = 0
        self.pid = 0
        self._answered = 0
        self._fuse = -1
        daemon.load(mounting.located(layers.load(self._options, (), {})))

    def start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.pwrite(self.state, holder.DEATHS.pack(self.deaths, time.monotonic(), 0), 0)
        os.pwrite(self.state, holder.KILLED.pack(True), holder.KILLED_AT)
        gc.freeze()
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            self._be_a_daemon(theirs)
        gc.unfreeze()
        theirs.close()
        socket.send_fds(ours, [b"begin"], [self._fuse] if self._fuse >= 0 else [])
        if self._fuse < 0:
            ours.settimeout(ANSWERS_S)
            _, (self._fuse,), _, _ = socket.recv_fds(ours, 16, 1)
        ours.close()

    def _be_a_daemon(self, theirs: socket.socket) -> NoReturn:
        code = 1
        try:
            os.environ[holder.DESCRIPTORS] = f"{os.dup(self.state)},{os.dup(theirs.fileno())}"
            theirs.close()
            config = mounting.located(layers.load(self._options, (), {}))
            logs.setup("info", "text", config.log_file)
            kept = handover.Handover.from_environment()
            assert kept is not None
            kept.wait()
            self._lie_in_wait()
            if kept.taking_over:
                self._count_steps()
            code = daemon.run(config, lambda: None, None, kept)
        except BaseException:
            with (self.place / "daemon.log").open("a") as file:
                traceback.print_exc(file=file)
        finally:
            os._exit(code)

    def _lie_in_wait(self) -> None:
        """Have this process kill itself at the moment that the test names."""
        armed, loses, read, write = self._armed, self._loses, Device.read, Device.write
        expected, goes_on = [0], [False]
        left = [0]  # steps to the death, from when the request was read

        def die() -> None:
            _ARMED.pack_into(armed, 0, 0, 0, 0)
            os.kill(os.getpid(), signal.SIGKILL)

        def step(name: str) -> None:
            if left[0]:
                left[0] -= 1
                if not left[0]:
                    (self.place / "step").write_text(name)
                    die()

        def before(function: Any, *, and_after: bool = False) -> Any:
            def stepping(*arguments: Any, **named: Any) -> Any:
                step(f"before {function.__qualname__}")
                result = function(*arguments, **named)
                if and_after:
                    step(f"after {function.__qualname__}")
                return result

            return stepping

        for owner, name in STEPS_OF_A_REQUEST:
            setattr(owner, name, before(getattr(owner, name)))
        for name in REQUESTS_TO_THE_ORIGIN:
            setattr(LocalClient, name, before(getattr(LocalClient, name), and_after=True))

        def reading(device: Device) -> memoryview | None:
            request = read(device)
            if request:
                op, moment, steps = _ARMED.unpack_from(armed)
                _, opcode, unique, *_ = protocol.IN_HEADER.unpack_from(request)
                if moment and opcode == op:
                    if moment == READ:
                        die()
                    expected[0], left[0], goes_on[0] = unique, steps, moment == BEHIND
            return request

        def writing(device: Device, *parts: Any) -> bool:
            _, _, unique = protocol.OUT_HEADER.unpack_from(parts[0])
            if unique and unique == expected[0]:
                if not left[0]:
                    loses.send(b"".join(parts))
                    die()
                expected[0] = 0  # it is answered, with fewer steps
                if not goes_on[0]:
                    left[0] = 0
                _ARMED.pack_into(armed, 0, 0, 0, 0)
            return write(device, *parts)

        Device.read, Device.write = reading, writing  # type: ignore[method-assign]

    def _count_steps(self) -> None:
        """Have this process kill itself at the step that the test names."""
        armed, answering = self._armed, [False]

        def counting(name: str, function: Any) -> Any:
            def step(*arguments: Any, **named: Any) -> Any:
                last, made = _STEPS.unpack_from(armed, _STEPS_AT)
                if not answering[0]:
                    _STEPS.pack_into(armed, _STEPS_AT, last, made + 1)
                    if made + 1 == last:
                        os.kill(os.getpid(), signal.SIGKILL)
                answering[0] |= name == "answering"
                return function(*arguments, **named)

            return step

        _STEPS.pack_into(armed, _STEPS_AT, _STEPS.unpack_from(armed, _STEPS_AT)[0], 0)
        for owner, name in STEPS:
            setattr(owner, name, counting(name, getattr(owner, name)))

    def arm(self, op: int, moment: int, step: int = 0) -> None:
        """The daemon is to die of the next request with this opcode."""
        _ARMED.pack_into(self._armed, 0, op, moment, step)

    def next_daemon(self) -> None:
        """The daemon has died, or is about to: another one goes on."""
        until = time.monotonic() + ANSWERS_S
        pid = status = 0
        while not pid:
            assert time.monotonic() < until, f"the daemon does not die\n{self.log()}"
            time.sleep(0.002)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        self.pid, self._answered = 0, self.log().count("the kernel is answered again")
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, self.log()
        self.deaths += 1
        self.start()

    def die_while_taking_over(self) -> int:
        """The daemon has died, or is about to. The next one dies at its first step of taking over, the one after that at its
        second, and so on, until one makes no further step. Returns how many died."""
        count = 0
        while True:
            count += 1
            _STEPS.pack_into(self._armed, _STEPS_AT, count, 0)
            self.next_daemon()
            until = time.monotonic() + ANSWERS_S
            while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                assert time.monotonic() < until, self.log()
                if self.log().count("the kernel is answered again") == self._answered + 1:
                    _STEPS.pack_into(self._armed, _STEPS_AT, 0, 0)
                    return count - 1
                time.sleep(0.002)

    def answers(self) -> bool:
        """True once the present daemon, which is not the first, answers the kernel."""
        return self.log().count("the kernel is answered again") > self._answered

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.next_daemon()

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        for end in (self._lost, self._loses):
            end.close()
        for fd in (self.state, self._fuse):
            if fd >= 0:
                os.close(fd)
        control_path(self.place / "mnt").unlink(missing_ok=True)
        remove_ram(self.place / "cache")

    def log(self) -> str:
        return (self.place / "daemon.log").read_text()

    def handles(self) -> set[int]:
        """Those that there is a record of."""
        at = handover._TABLE_AT
        used, _ = handover._USED.unpack(os.pread(self.state, handover._USED.size, at))
        words = memoryview(os.pread(self.state, 16 * used, at + handover._HANDLES_AT)).cast("Q")
        return set(words[3::2]) - {0}  # unique and fh; the first place has no record


class Deaths(Daemons):
    """The same where the kernel is this process. The daemon that has made the connection has died already."""

    def __init__(self, place: Path, **options: Any) -> None:
        super().__init__(place, **options)
        self._near, far = socket_pair()
        self._fuse = far.detach()
        self.deaths = 1
        self._unique = 1 << 20
        os.ftruncate(self.state, handover._TABLE_AT)
        flags = int(WANTED_TO_WRITE & ~Init.PASSTHROUGH)
        agreed = handover._CONNECTION.pack(handover.FORMAT, protocol.MINOR, flags, 0.0, b"0:4711")
        os.pwrite(self.state, agreed, handover._CONNECTION_AT)
        self.start()

    def close(self) -> None:
        super().close()
        self._near.close()

    # -- requests ----------------------------------------------------------------------------------

    def send(self, op: int, ino: int, body: bytes, unique: int = 0) -> int:
        if not unique:
            self._unique += 2
            unique = self._unique
        size = protocol.IN_HEADER.size + len(body)
        self._near.send(protocol.IN_HEADER.pack(size, op, unique, ino, 0, 0, os.getpid(), 0, 0) + body)
        return unique

    def reply(self, unique: int) -> Reply:
        return self._take(self._near, unique)

    def _take(self, end: socket.socket, unique: int) -> Reply:
        until = time.monotonic() + ANSWERS_S
        while (reply := self._next(end, unique, 0.1)) is None:
            assert time.monotonic() < until, f"no reply\n{self.log()}"
        return reply

    def _next(self, end: socket.socket, unique: int, wait_s: float) -> Reply | None:
        """The next reply, which must be that to `unique`; None if none comes in time, or a notification."""
        if not select.select([end], [], [], wait_s)[0]:
            return None
        record = end.recv(SEND_BUFFER)
        length, error, number = protocol.OUT_HEADER.unpack_from(record)
        assert length == len(record)
        assert number in (0, unique), "a reply to another request, or a second one"
        return Reply(length, -error, number, record[protocol.OUT_HEADER.size :]) if number else None

    def ask(self, op: int, ino: int = ROOT, body: bytes = b"") -> Reply:
        return self.reply(self.send(op, ino, body))

    def ask_across_a_death(self, moment: int, op: int, ino: int, body: bytes) -> tuple[Reply | None, Reply]:
        """A request whose daemon dies at that moment; the kernel repeats it to the next one. Returns the reply that was
        lost, if there was one, and the one that the program gets."""
        unique = self._unique + 2
        self.arm(op, moment)
        self.send(op, ino, body)
        self.next_daemon()
        lost = self._take(self._lost, unique) if moment == CARRIED_OUT else None
        return lost, self.reply(self.send(op, ino, body, unique | RESENT))

    def ask_dying_at(self, step: int, op: int, ino: int, body: bytes) -> tuple[str, Reply]:
        """A request whose daemon dies at that step of carrying it out, counted from 1; the kernel repeats it to the next
        one. Returns (what the step was; the reply). With fewer steps no daemon dies, and the first is ""."""
        self.arm(op, AMID, step)
        unique = self.send(op, ino, body)
        until = time.monotonic() + ANSWERS_S
        while (reply := self._next(self._near, unique, 0.002)) is None:
            assert time.monotonic() < until, f"no reply\n{self.log()}"
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self.next_daemon()
                return (self.place / "step").read_text(), self.reply(
                    self.send(op, ino, body, unique | RESENT)
                )
        return "", reply

    def die_behind(self, step: int, op: int, ino: int, body: bytes, wait_s: float) -> str:
        """A request whose daemon dies at that step, counted from 1, of carrying it out or of what follows. Returns what the
        step was, once the next daemon has answered; "" if no daemon dies within `wait_s` seconds."""
        self.arm(op, BEHIND, step)
        unique = self.send(op, ino, body)
        reply, until = None, time.monotonic() + wait_s
        while time.monotonic() < until:
            reply = reply or self._next(self._near, unique, 0.002)
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self.next_daemon()
                reply = reply or self.reply(self.send(op, ino, body, unique | RESENT))
                assert not reply.error
                return (self.place / "step").read_text()
            if reply is not None:
                time.sleep(0.002)
        assert reply is not None and not reply.error, self.log()
        self.kill()  # it counts no steps any more
        return ""

    def tell_across_a_death(self, moment: int, op: int, ino: int, body: bytes) -> None:
        """The same for a request that has no reply: the kernel does not repeat it."""
        if moment == READ:
            self.arm(op, READ)
            self.send(op, ino, body)
            self.next_daemon()
        else:
            self.send(op, ino, body)
            assert not self.ask(Op.STATFS).error  # requests are handled in their order
            self.kill()


def handlers() -> set[int]:
    """The opcodes that the backend has a handler for."""
    nothing: Any = None
    device = Device(os.open("/dev/null", os.O_RDONLY))
    try:
        backend = native_backend.NativeBackend(
            nothing, daemon.Metrics(), 1.0, device, native_backend.Negotiated(protocol.MINOR, Init(0))
        )
        return set(backend._handlers)
    finally:
        os.close(device.fd)

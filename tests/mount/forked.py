"""Commands of cachefs by fork: a process that has imported everything once and forks for each, since a new interpreter that
imports it all works longer (0.7 s of processor time) than most tests.

`Popen` is for `python -m cachefs …`, and like `subprocess.Popen` for all else. What is forked has arguments, environment,
directory, descriptors, session and command line of its own, and runs `cachefs.cli.main.main` to the end of the interpreter,
as `python -m cachefs` does. Nothing but the imports has happened before. The daemon that `cachefs mount` starts in the
background comes from the same process. What looks at starting itself runs the command (tests/test_cli.py, bench/demo.py),
and so does everything in `scripts/test --all`."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

COMMAND = [sys.executable, "-m", "cachefs"]
IN_BACKGROUND = [sys.executable, "-P", "-m", "cachefs"]
"""As `cachefs.daemon.background` calls it."""

EXEC = os.environ.get("TEST_LEVEL") == "all"

PRELOADED = (
    "botocore.session",
    "cachefs.cli.main",
    "cachefs.cli.status",
    "cachefs.config.layers",
    "cachefs.base.client",
    "cachefs.daemon.background",
    "cachefs.daemon.daemon",
    "cachefs.daemon.unmounting",
    "cachefs.fuse.pyfuse3_backend",
    "cachefs.observe.doctor",
    "cachefs.origin.local",
    "cachefs.origin.s3",
    "encodings.idna",
)
ROOM = "x" * 16384
"""An argument that does nothing: what is forked writes its command line over it."""

NETWORK = "/proc/thread-self/ns/net"
"""Tests are on several hosts (tests/cluster)."""

HIGH = 512
"""What a forked process is passed lies above, while everything below is closed."""


# --- who starts commands ---------------------------------------------------------------------------


_place = ""
_starting = threading.Lock()


def _listening() -> str:
    """The server's socket; the first call starts it. It ends with this process."""
    global _place
    with _starting:
        if _place:
            return _place
        home = Path(tempfile.mkdtemp(prefix="cf-"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(home / "fork"))
            listener.listen(64)
            server = subprocess.Popen(
                [sys.executable, "-P", __file__, str(listener.fileno()), str(home / "fork"), ROOM],
                stdin=subprocess.PIPE,
                pass_fds=(listener.fileno(),),
                cwd="/",
            )
        _place = str(home / "fork")
        atexit.register(_end, server, home, os.getpid())
        return _place


def _end(server: subprocess.Popen[bytes], home: Path, owner: int) -> None:
    if os.getpid() == owner:
        server.communicate()  # the end of its input
        shutil.rmtree(home, ignore_errors=True)


class Popen(subprocess.Popen[Any]):
    """As `subprocess.Popen`; commands of cachefs are forked."""

    _answers: socket.socket | None = None

    def _execute_child(  # type: ignore[override, misc]
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *others: Any,
    ) -> None:
        words = [os.fsdecode(word) for word in args] if isinstance(args, (list, tuple)) else []
        ours = next((len(way) for way in (COMMAND, IN_BACKGROUND) if words[: len(way)] == way), 0)
        # What an interpreter loads at its start, such as a test's sitecustomize, needs an interpreter that starts.
        if not ours or preexec_fn or EXEC or "PYTHONPATH" in (os.environ if env is None else env):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)  # type: ignore[misc]
            return
        pipes = others[3:9]  # both ends of stdin, stdout, stderr; -1 where it is inherited
        streams = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        asked = {
            "words": words,
            "arguments": words[ours:],
            "environment": dict(os.environ if env is None else env),
            "directory": os.path.abspath(os.fspath(cwd or ".")),
            "session": bool(others[14]),
            "numbers": [0, 1, 2, *pass_fds],
        }
        self._answers = socket.socket(socket.AF_UNIX)
        self._answers.connect(_listening())
        message = json.dumps(asked).encode("utf-8", "surrogateescape")
        network = os.open(NETWORK, os.O_RDONLY)
        socket.send_fds(self._answers, [struct.pack("i", len(message))], [network, *streams, *pass_fds])
        os.close(network)
        self._answers.sendall(message)
        said = self._answers.recv(4, socket.MSG_WAITALL)
        assert len(said) == 4, f"the process that forks commands has ended: {words}"
        (self.pid,) = struct.unpack("i", said)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._answers is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        try:
            said = self._answers.recv(4, socket.MSG_WAITALL if wait_flags == 0 else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0, 0
        assert len(said) == 4, "the process that forks commands has ended"
        self._answers.close()
        return self.pid, struct.unpack("i", said)[0]

    def _internal_poll(self, *given: Any, **more: Any) -> int | None:
        if self._answers is None:
            return super()._internal_poll(*given, **more)  # type: ignore[misc, no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run(command: list[str], timeout: float, *, input: Any = None, **options: Any) -> Any:
    """As `subprocess.run` with `capture_output`."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# --- the process that forks ------------------------------------------------------------------------


def serve(listener: socket.socket) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Fork for each that connects, and tell it how that ended. Returns in what was forked."""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                os._exit(0)
            if key.fileobj is listener:
                answers, _ = listener.accept()
                length, given, _, _ = socket.recv_fds(answers, 4, 64)
                asked = answers.recv(struct.unpack("i", length)[0], socket.MSG_WAITALL)
                pid = os.fork()
                if pid == 0:
                    selector.close()  # now, and not by the collector, when its descriptor's number is another's
                    return answers, json.loads(asked.decode("utf-8", "surrogateescape")), given
                for fd in given:
                    os.close(fd)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))
            else:
                pid, answers = key.data
                _, status = os.waitpid(pid, 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                try:
                    answers.sendall(struct.pack("i", status))
                except OSError:
                    pass  # the process that started it has gone
                answers.close()


def become(answers: socket.socket, asked: dict[str, Any], given: list[int]) -> None:
    """Make this process the one that was asked for."""
    if not os.path.sameopenfile(given[0], own := os.open(NETWORK, os.O_RDONLY)):
        assert ctypes.CDLL(None).setns(given[0], 0) == 0
    os.close(own)
    os.close(given.pop(0))
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in (answers.detach(), *given)]
    os.closerange(0, HIGH)
    for fd, number in zip(above[1:], asked["numbers"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["directory"])
    if asked["session"]:
        os.setsid()
    for name, fd in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        old = getattr(sys, f"__{name}__")
        new = open(  # noqa: SIM115 (it stays open)
            fd, "r" if fd == 0 else "w", encoding=old.encoding, errors=old.errors, closefd=False
        )
        if fd == 2 or (fd == 1 and os.isatty(1)):
            new.reconfigure(line_buffering=True)
        setattr(sys, name, new)
    _name(asked["words"])
    sys.argv = ["cachefs", *asked["arguments"]]
    os.write(above[0], struct.pack("i", os.getpid()))
    os.close(above[0])


def _name(words: list[str]) -> None:
    """The command line that others see."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # 48 and 49 of proc(5)
    line = b"\0".join(os.fsencode(word) for word in words)
    assert len(line) < end - start, f"{len(line)} bytes of arguments: make ROOM larger"
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def main() -> NoReturn:
    global _place
    listener = socket.socket(fileno=int(sys.argv[1]))
    _place = sys.argv[2]
    for name in PRELOADED:
        importlib.import_module(name)
    from cachefs.cli.main import main as run_command
    from cachefs.daemon import background

    gc.collect()
    gc.freeze()
    job = serve(listener)
    listener.detach()
    become(*job)
    background.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=Popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    code = 0
    try:
        run_command()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 0
    # As the interpreter ends, but for taking itself apart: that touches all memory, which is shared until then.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

"""A cachefs as its user has it: the real command, the real kernel, nothing of ours in between."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cachefs.base import client
from cachefs.base.client import control_path
from cachefs.base.linux import Mount as KernelMount
from cachefs.base.linux import mounts
from cachefs.store.ram import ram_directory, remove_ram
from tests.mount import forked
from tests.mount.forked import COMMAND as COMMAND

WATCHDOG_S = 90.0
"""A test that takes this long hangs: its daemons are killed, so that its reads fail and it can say where it was."""

MEMORY_IS_GIVEN_BACK = True
"""Whether every mount that has ended cleanly must have left no memory in use. Not yet: see `TestMemoryAfterwards`."""

bucket_numbers = itertools.count(1)
"""Here, because pytest imports a conftest under a name of its own: two counts would give two buckets the same name."""

NOISE = re.compile(
    r"\b(WARNING|ERROR|CRITICAL)\b|Traceback|^\w*(Error|Warning|Exception)\b|^cachefs: |Exception ignored|never awaited"
)

Completed = subprocess.CompletedProcess[str]


RESTART = os.environ.get("CACHEFS_RESTART", "no")
"""Most tests watch one daemon, and end it. Where they are to have a holder, they say so (`restart=True`)."""


def plain_environment() -> dict[str, str]:
    """This process's environment without whatever leads to a store, a cache or a proxy."""
    led = ("AWS_", "AZURE_", "GOOGLE_", "CACHEFS_", "STORAGE_EMULATOR")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(led) and not name.lower().endswith("_proxy")
    }


def run(command: Sequence[object], *, timeout: float = 60, **options: Any) -> Completed:
    """A command with its output; the test fails if it takes too long."""
    return forked.run(
        [os.fspath(word) if isinstance(word, Path) else str(word) for word in command],
        timeout,
        **{"text": True, "stdin": subprocess.DEVNULL, **options},
    )


def succeed(command: Sequence[object], **options: Any) -> str:
    """What a command says that must succeed."""
    done = run(command, **options)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def in_python(code: str, *arguments: object, **options: Any) -> str:
    """What a Python program of its own prints: a reader whose hanging hurts nobody."""
    return succeed([sys.executable, "-c", code, *arguments], **options)


def mounts_at(path: Path) -> list[KernelMount]:
    return [mount for mount in mounts() if mount.path == str(path)]


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not, unless threads of it have not ended: they keep its files and locks."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX" or threads > 1


def state_of(pid: int) -> str:
    """One letter: R, S, D, Z, …; "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def eventually(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Wait for it; the time is for a machine that has much else to do."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def processes_with(text: str) -> list[int]:
    """Processes that have `text` in their command line."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if text.encode() in (process / "cmdline").read_bytes() and alive(int(process.name)):
                    found.append(int(process.name))
            except OSError:
                pass
    return found


class Mount:
    """One mountpoint with a cache directory of its own, which outlives any number of daemons.

    `allowed` are regular expressions of log lines that are expected to complain. `options` are those of the command,
    in Python's spelling."""

    def __init__(
        self, place: Path, source: str | None, env: Mapping[str, str], options: Mapping[str, Any]
    ) -> None:
        self.place = place
        self.path = place / "mnt"
        self.cache = Path(options.get("cache_dir", place / "cache"))
        self.log_file = place / "daemon.log"
        self.env = {"CACHEFS_RESTART": RESTART, **plain_environment(), **env}
        self.source = source
        self.options: dict[str, Any] = {
            "cache_dir": self.cache,
            "cache_size": "1G",
            "ram": "64M",
            "keep_free": "64M",
            "timeout": 5,
            "read_only": True,  # requests are counted, and a mount that can be written has more of them
            "log_file": self.log_file,
            **options,
        }
        self.allowed: list[str] = []
        self.pids: list[int] = []
        self.killed = False
        self.path.mkdir(parents=True, exist_ok=True)

    def arguments(self, **more: Any) -> list[str]:
        words = ["mount"]
        for name, value in {**self.options, **more}.items():
            if value is None or value is False:
                continue
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words.append(str(value))
        return [*words, *([self.source] if self.source else []), str(self.path)]

    def try_start(self, *, timeout: float = 60, **more: Any) -> Completed:
        """`cachefs mount` in the background; the caller looks at how it went."""
        done = run([*COMMAND, *self.arguments(**more)], env=self.env, timeout=timeout)
        if done.returncode == 0:
            self.killed = False
            self.pids.append(int(self.ask("status")["pid"]))
        return done

    def start(self, **more: Any) -> Mount:
        done = self.try_start(**more)
        assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}\n{self.log()}"
        return self

    @contextmanager
    def in_foreground(self, **more: Any) -> Iterator[subprocess.Popen[str]]:
        """`cachefs mount -f`, once it answers."""
        process = forked.Popen(
            [*COMMAND, *self.arguments(foreground=True, log_file=None, **more)],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pids.append(process.pid)
        try:
            eventually(lambda: mounts_at(self.path) or process.poll() is not None, "the mount", 20)
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            if process.stdout and not process.stdout.closed:
                process.communicate(timeout=20)

    @property
    def memory(self) -> Path:
        """Where its RAM tier is."""
        return ram_directory(self.cache)

    @property
    def pid(self) -> int:
        return self.pids[-1]

    def ask(self, verb: str, **arguments: Any) -> Any:
        return client.request(control_path(self.path), verb, 10.0, **arguments)

    def cli(self, *words: object, timeout: float = 60) -> Completed:
        return run([*COMMAND, *words], env=self.env, timeout=timeout)

    def status(self) -> dict[str, Any]:
        """What the command says."""
        done = self.cli("status", "--json", self.path)
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def metrics(self) -> dict[str, int]:
        counted: dict[str, int] = self.ask("status")["metrics"]
        return counted

    def settled(self) -> dict[str, int]:
        """The counters, once they have stopped moving: the kernel sends RELEASE and read-aheads when it likes."""
        before = self.metrics()
        while True:
            time.sleep(0.06)
            after = self.metrics()
            if after == before:
                return after
            before = after

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Counters by name, filled in at the end with what they grew by; those that did not are not in it."""
        before = self.settled()
        grown: dict[str, int] = {}
        yield grown
        after = self.settled()
        grown.update({name: after[name] - before[name] for name in after if after[name] != before[name]})

    def refresh(self, path: Path | None = None) -> None:
        done = self.cli("refresh", path or self.path)
        assert done.returncode == 0, done.stderr

    def umount(self, *flags: str) -> Completed:
        return self.cli("umount", *flags, self.path)

    def stop(self) -> None:
        done = self.umount()
        assert done.returncode == 0, f"{done.stderr}\n{self.log()}"

    def kill(self) -> None:
        """As the OOM killer does it."""
        self.killed = True
        self.allowed.append("took away a dead mount")
        os.kill(self.pid, signal.SIGKILL)
        eventually(lambda: not alive(self.pid), "the killed daemon is gone")

    def kill_daemon(self) -> None:
        """Kill the daemon that answers now; another one goes on."""
        pid = int(self.ask("status")["pid"])
        assert self.runs_as(pid), f"{pid} is not a daemon of {self.path}"
        os.kill(pid, signal.SIGKILL)

    def runs_as(self, pid: int) -> bool:
        """True if the process is one of this mount: its command line has the cache directory. A process id that was
        remembered may be another process's by now."""
        return pid in processes_with(str(self.cache))

    def kill_all(self) -> None:
        """Kill the daemons that were remembered and still run."""
        for pid in self.pids:
            if self.runs_as(pid):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)

    def drop_kernel_pages(self) -> None:
        """Make the kernel forget the pages of all files that nobody maps, so that reads reach the daemon."""
        for path in self.path.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def log(self) -> str:
        try:
            return self.log_file.read_text(errors="replace")
        except OSError:
            return ""

    def complaints(self) -> list[str]:
        """Entries of the log with a line that `allowed` does not cover, each with its traceback."""

        def unexpected(line: str) -> bool:
            return NOISE.search(line) is not None and not any(re.search(one, line) for one in self.allowed)

        entries = re.split(r"\n(?=\d{4}-\d\d-\d\dT|\{)", self.log().rstrip("\n"))  # text or JSON
        return [entry for entry in entries if any(map(unexpected, entry.splitlines()))]

    def finish(self) -> list[str]:
        """Take everything away; what should not have been there any more, or in the log."""
        wrong = []
        if mounts_at(self.path):
            done = self.umount()
            if done.returncode != 0:
                wrong.append(f"umount failed: {done.stderr.strip()}")
        for pid in self.pids:
            try:
                eventually(lambda pid=pid: not alive(pid), "")  # type: ignore[misc]
            except AssertionError:
                wrong.append(f"daemon {pid} is still there")
                self.kill_all()
                self.killed = True
        layers = mounts_at(self.path)
        if layers:
            wrong.append(f"{len(layers)} mounts left at {self.path}")
            for _ in layers:
                run(["umount", "-l", self.path])
        held = [
            file for file in self.memory.rglob("*") if file.is_file() and file.name not in ("tag", "owner")
        ]
        if held and not self.killed and MEMORY_IS_GIVEN_BACK:
            wrong.append(f"memory is left in use: {held}")
        if not processes_with(str(self.cache)):  # it may be the cache of another mount as well
            remove_ram(self.cache)
        wrong += [f"in the log: {line}" for line in self.complaints()]
        return wrong


class Watchdog:
    """Ends the daemons of mounts that keep a test waiting."""

    def __init__(self, watched: list[Mount]) -> None:
        self._watched = watched
        self._timer = threading.Timer(WATCHDOG_S, self._bite)
        self._timer.daemon = True
        self.bitten = False

    def __enter__(self) -> Watchdog:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _bite(self) -> None:
        self.bitten = True
        for mount in self._watched:
            mount.kill_all()

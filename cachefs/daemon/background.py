"""Mounting in the background: a parent that waits, and the child that becomes the daemon.

The child is a new interpreter with the same arguments, not a fork, so nothing of the parent's threads or descriptors leaks
into the daemon. It writes one line to a pipe: that the mount answers, or why not. When the parent gives up, it ends the
child and unmounts.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cachefs.base import logs, ownership
from cachefs.base.client import runtime_dir, slug
from cachefs.base.errors import CachefsError, ConfigError, MountError
from cachefs.base.linux import is_dead, mount_at, probe
from cachefs.config.config import LOG_NAME, Config
from cachefs.daemon.mounting import detach
from cachefs.fuse import holder
from cachefs.fuse.handover import why_not

READY_FD = holder.READY_FD
FAILED, WRONG = "error: ", "wrong: "
"""How the child's line begins when there is no mount: for any failure, and for bad input, whose exit code is another."""

STOP_DEADLINE_S = 5.0
"""How long the parent waits for a child to end: by itself after it has failed, then after SIGTERM, then after SIGKILL."""


class Ready:
    """The child's end of the pipe, through which it sends one line: that the mount answers, or why it does not."""

    def __init__(self) -> None:
        text = os.environ.pop(READY_FD, "")
        self._fd: int | None = None
        with suppress(ValueError, OSError):  # no number, or a stale variable in the environment
            os.set_inheritable(int(text), False)
            self._fd = int(text)
        # A daemon that follows another one has no pipe, and logs to the same file.
        self.in_background = self._fd is not None or text == holder.SAID

    def ready(self) -> None:
        self._say("ready")

    def failed(self, exc: BaseException) -> None:
        if isinstance(exc, SystemExit):
            return  # a signal has ended this process, which is no reason to show
        reason = str(exc) if isinstance(exc, CachefsError) else f"{type(exc).__name__}: {exc}"
        self._say((WRONG if isinstance(exc, ConfigError) else FAILED) + " ".join(reason.splitlines()))

    def _say(self, line: str) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        with suppress(OSError):  # the parent may have ended, which does not matter to the mount
            os.write(fd, line.encode("utf-8", "backslashreplace") + b"\n")
        os.close(fd)


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command that starts the daemon of ``cachefs mount arguments``."""
    return [sys.executable, "-P", "-m", "cachefs", "mount", "-f", *arguments]


def held_by_holder(command: Sequence[str], directory: str = "") -> list[str]:
    """The command that starts a holder for `command`, in `directory` (by default the present one)."""
    holders = os.path.dirname(holder.__file__)
    return [sys.executable, "-I", "-S", "-c", holder.LAUNCH, holders, directory or os.getcwd(), *command]


def open_log(config: Config) -> tuple[Path, int]:
    """(path, descriptor) of the log, which lies beside the control socket where the cache directory cannot be written."""
    wanted = config.log_file or config.cache_dir / LOG_NAME
    spare = runtime_dir() / f"{slug(str(config.mountpoint).strip('/'), str(config.mountpoint))}.log"
    problem: OSError | None = None
    for path in (wanted, spare):
        try:
            ours = path == spare or path.parent == config.cache_dir
            if ours:
                ownership.claim(path.parent, whole=path == spare)
            return path, logs.open_file(path, ours=ours)
        except OSError as exc:
            problem = problem or exc
    raise MountError(
        f"cannot write the log {wanted}: {problem.strerror if problem else ''}: choose another --log-file"
    )


def start(arguments: Sequence[str], config: Config, *, over_dead: bool = False) -> Path:
    """Run ``cachefs mount -f arguments`` in the background. Returns the path of its log when its mount answers. Else raises
    `MountError`, or `ConfigError` for bad input, and leaves nothing running, but with `over_dead` the dead mount."""
    log_path, log_fd = open_log(config)
    log_start = os.fstat(log_fd).st_size
    read_fd, write_fd = os.pipe()
    try:
        child = subprocess.Popen(
            command_of(arguments) if why_not(config) else held_by_holder(command_of(arguments)),
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            start_new_session=True,
            pass_fds=(write_fd,),
            env={**os.environ, READY_FD: str(write_fd)},
        )
    finally:
        os.close(write_fd)
        os.close(log_fd)
    try:
        _wait_until_ready(child, read_fd, config, log_path, log_start)
    except BaseException:
        _stop(child)
        if not over_dead:
            _unmount(child, config.mountpoint)
        raise
    finally:
        os.close(read_fd)
    child.returncode = 0  # without one, Popen would warn that the child outlives it, as it should
    return log_path


def _wait_until_ready(
    child: subprocess.Popen[bytes], fd: int, config: Config, log_path: Path, log_start: int
) -> None:
    """Wait for the child's line. Unless it is "ready", raises `ConfigError` for bad input, else `MountError`."""
    readable, _, _ = select.select([fd], [], [], config.mount_timeout)
    if not readable:
        raise MountError(
            f"{config.mountpoint} did not answer within {config.mount_timeout:g} s: see {log_path}"
        )
    # The child writes its line with one call; "" means that it ended without one.
    line = os.read(fd, 65536).decode("utf-8", "replace").strip()
    if line != "ready":
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_DEADLINE_S)  # while it closes its cache
        if line.startswith(WRONG):
            raise ConfigError(line.removeprefix(WRONG))
        reason = line.removeprefix(FAILED) or _last_line(log_path, log_start)
        raise MountError(reason or f"the daemon ended before the mount was there: see {log_path}")


def _last_line(path: Path, offset: int) -> str:
    try:
        # Opening a pipe would wait for its writer, and reading it takes the lines away from its reader.
        if not path.is_file():
            return ""
        with open(path, "rb") as file:
            file.seek(offset)
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(STOP_DEADLINE_S)
            break
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    child.poll()


def _unmount(child: subprocess.Popen[bytes], mountpoint: Path) -> None:
    """Unmount what the stopped child has mounted."""
    mount = mount_at(mountpoint)
    if mount is not None and mount.is_cachefs:
        answer = probe(mountpoint, 1.0)
        # The child's mount is dead now, or it hangs with a process that cannot be killed. Any other is the mount of another
        # command that was faster, which may be the reason for this failure.
        if is_dead(answer) or (isinstance(answer, OSError) and _is_running(child.pid)):
            with suppress(OSError):
                detach(mount, lazy=True)


def _is_running(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True

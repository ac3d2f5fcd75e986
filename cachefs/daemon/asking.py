"""Requests to running daemons: which daemon serves a path, and the requests of each CLI verb."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cachefs.base import client
from cachefs.base.client import ask as ask
from cachefs.base.client import control_path, runtime_dir
from cachefs.base.errors import MountError
from cachefs.base.linux import Finder, is_dead, mount_at, mounts, probe
from cachefs.base.units import about_bytes, about_files, printable
from cachefs.config.config import Config
from cachefs.daemon.mounting import canonical

POLL_S = 0.25

UPGRADED_S = 60.0
"""How long the present daemon may take to hand over, and then the next one to answer. The present one waits half of that for
the next one to load, from a disk that may be slow, and answers with an error after that."""

PROBE_S = 1.0
"""A mount that takes longer to answer is not dead: a dead one answers at once. Derived: it must not hold `status` up."""

FLUSH_STEP_S = 1.0
"""How long the daemon waits for uploads before it answers how much is left. Derived: a terminal shows it once a second."""


def status_of(mountpoint: Path) -> dict[str, Any]:
    status: dict[str, Any] = ask(canonical(mountpoint), "status")
    return status


def shows_the_same(config: Config) -> bool:
    """True if a living mount at the mountpoint has the same sources, with whatever options."""
    mount = mount_at(config.mountpoint)
    if mount is None or not mount.is_cachefs:
        return False
    try:
        sources = status_of(config.mountpoint)["sources"]
    except (client.ControlError, MountError):
        return False
    shown = [(source["name"], source["url"]) for source in sources]
    return shown == [(source.name, source.url) for source in config.sources]


def all_statuses() -> list[dict[str, Any]]:
    """The status of every daemon of this user, sorted by mountpoint. Removes sockets without a listener."""
    found: list[dict[str, Any]] = []
    candidates: list[Path] = []
    with suppress(OSError):
        candidates = sorted(runtime_dir().glob("*.sock"))
    for socket in candidates:
        before = _inode(socket)
        try:
            found.append(client.request(socket, "status", 2.0))
        except client.OfAnother:
            continue
        except client.NotRunning:
            if _inode(socket) == before:  # else a daemon that starts has just replaced it
                with suppress(OSError):
                    socket.unlink()
        except client.ControlError as exc:
            known = (m.path for m in mounts() if m.is_cachefs and control_path(Path(m.path)) == socket)
            found.append({"mountpoint": next(known, "?"), "warnings": [str(exc)]})
    return sorted(found, key=lambda status: str(status.get("mountpoint", "")))


def _inode(file: Path) -> int:
    """The inode number of a file, which differs from that of the file that replaces it; 0 if there is none."""
    try:
        return file.lstat().st_ino
    except OSError:
        return 0


def dead_mounts(known: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A mountpoint and a warning for each mount of this user (for root: of any) whose daemon has died, but for `known`."""
    answered = {status.get("mountpoint") for status in known}
    found: list[dict[str, Any]] = []
    for mount in mounts():
        if not mount.is_cachefs or mount.path in answered or os.getuid() not in (0, mount.owner):
            continue
        if is_dead(probe(Path(mount.path), PROBE_S)):
            todo = f"cachefs umount {mount.path}, then mount it again"
            found.append({"mountpoint": mount.path, "warnings": [f"its daemon has died: {todo}"]})
    return found


def mount_of(path: Path) -> tuple[Path, str]:
    """The cachefs mount that `path` is below, and the path relative to it ("": the mount itself). Raises `MountError`."""
    finder = Finder()
    # Below a mount there are no links to resolve. Such a path is not touched, because the mount may hang.
    found = finder.find(os.path.abspath(path)) or finder.find(str(canonical(path)))
    if found is None:
        raise MountError(f"{path} is not below a cachefs mount: cachefs status lists those there are")
    return Path(found[0]), found[1]


def upgrade(mountpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace the daemon of a mount (canonical path) by the installed version. Returns the status before and after. Raises
    `ControlError` if the daemon refuses, with nothing changed; `MountError` if no other daemon answers in time."""
    before: dict[str, Any] = ask(mountpoint, "status")
    ask(mountpoint, "upgrade", UPGRADED_S)
    until = time.monotonic() + UPGRADED_S
    while time.monotonic() < until:
        with suppress(client.ControlError, MountError):
            after: dict[str, Any] = ask(mountpoint, "status")
            if after["pid"] != before["pid"]:
                return before, after
        time.sleep(POLL_S)
    raise MountError(f"the daemon of {mountpoint} has handed over, and no other answers yet: cachefs logs")


def flush(mountpoint: Path, relative: str, deadline_s: float, show: Callable[[Any], None]) -> dict[str, Any]:
    """Wait until everything written at and below a path (relative to its mount) is at the origin, or the origin has refused
    all that is left, or until the deadline. Returns what is left. `show` is called with it about once a second."""
    until = time.monotonic() + deadline_s
    while True:
        step_s = max(min(FLUSH_STEP_S, until - time.monotonic()), 0.0)
        left: dict[str, Any] = ask(mountpoint, "flush", FLUSH_STEP_S + 10.0, path=relative, seconds=step_s)
        if not left["files"] or left["in_vain"] == left["files"] or time.monotonic() >= until:
            return left
        show(left)


def describe(left: Mapping[str, Any]) -> str:
    """One line that says how much is not at the origin, and why, from the result of `flush`."""
    why = "".join(f": {printable(failure['path'])}: {failure['error']}" for failure in left["failures"][:1])
    are = "is" if left["files"] == 1 else "are"
    return f"{about_files(left['files'])} ({about_bytes(left['bytes'])}) {are} not at the origin{why}"


@contextmanager
def job(mountpoint: Path, action: str, items: Iterable[Any], **how: Any) -> Iterator[int]:
    """Begin a job in the daemon (`how`: see `Jobs.start`) and send it all its items; yields its number. The job is stopped
    when that, or the code inside, fails or is interrupted."""
    # A signal before the `try` leaves a job without items, which ends after `warming.INPUT_DEADLINE_S`.
    number: int = ask(mountpoint, "warm_start", action=action, **how)
    try:
        for batch in client.batches(items):
            if ask(mountpoint, "warm_add", 60.0, job=number, items=batch) != "running":
                break  # the job has ended; its status says why
        ask(mountpoint, "warm_add", 60.0, job=number, items=[], complete=True)
        yield number
    except BaseException:
        with suppress(client.ControlError, MountError):
            ask(mountpoint, "warm_stop", job=number)
        raise


def follow_job(mountpoint: Path, number: int) -> Iterator[dict[str, Any]]:
    """The status of a job, four times a second, until it has ended."""
    while True:
        status: dict[str, Any] = ask(mountpoint, "warm_status", 60.0, job=number)
        yield status
        if status["state"] != "running":
            return
        time.sleep(POLL_S)

"""Asking daemons that run: which is meant by a path, where its socket is, what it says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cachefs import control
from cachefs.config import control_path, runtime_dir
from cachefs.errors import MountError
from cachefs.mountinfo import mount_at, mounts
from cachefs.mounting import canonical, is_dead, probe


def sockets(mountpoint: Path) -> Iterator[Path]:
    """Where the daemon of `mountpoint` may listen: at this user's place and, for root, at other users'."""
    own = control_path(mountpoint)
    yield own
    if os.getuid() == 0:
        for pattern in ("run/user/*/cachefs", "tmp/cachefs-*"):
            for directory in sorted(Path("/").glob(pattern)):
                yield directory / own.name


def ask(mountpoint: Path, verb: str, /, timeout_s: float = 5.0, **arguments: Any) -> Any:
    """The answer of the daemon that serves `mountpoint` (canonical). Raises `ControlError`, or `MountError`
    when there is no such mount."""
    for socket in sockets(mountpoint):
        try:
            return control.request(socket, verb, timeout_s, **arguments)
        except control.NotRunning:
            continue
    mount = mount_at(mountpoint)
    if mount is None or not mount.is_cachefs:
        raise MountError(f"{mountpoint} is not a cachefs mount: cachefs status lists those there are")
    if is_dead(probe(mountpoint)):
        raise MountError(
            f"the daemon of {mountpoint} has died: cachefs umount {mountpoint}, then mount it again"
        )
    raise MountError(
        f"the daemon of {mountpoint} does not answer this user: ask as the one who mounted it, or as root"
    )


def status_of(mountpoint: Path) -> dict[str, Any]:
    status: dict[str, Any] = ask(canonical(mountpoint), "status")
    return status


def all_statuses() -> list[dict[str, Any]]:
    """Of every daemon of this user, by mountpoint. Sockets nobody listens at any more are removed."""
    found: list[dict[str, Any]] = []
    try:
        candidates = sorted(runtime_dir().glob("*.sock"))
    except OSError:
        return found
    for socket in candidates:
        try:
            found.append(control.request(socket, "status", 2.0))
        except control.NotRunning:
            _remove(socket)
        except control.ControlError as exc:
            found.append({"mountpoint": "?", "warnings": [str(exc)]})
    return sorted(found, key=lambda status: str(status.get("mountpoint", "")))


def _remove(socket: Path) -> None:
    try:
        socket.unlink()
    except OSError:
        pass


def refresh(path: Path) -> str:
    """Tell the daemon to look again at `path`; one line about it."""
    here = canonical(path)
    above = [here, *here.parents]
    cachefs_mounts = {Path(mount.path) for mount in mounts() if mount.is_cachefs}
    mountpoint = next((place for place in above if place in cachefs_mounts), None)
    if mountpoint is None:
        raise MountError(f"{path} is not below a cachefs mount: cachefs status lists those there are")
    relative = here.relative_to(mountpoint).as_posix()
    ask(mountpoint, "refresh", 60.0, path="" if relative == "." else relative)
    return f"{here}: looking again"

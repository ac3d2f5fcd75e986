"""Unmounting, and waiting for the daemon to end.

After a clean unmount written files are uploaded, the kernel has unmounted, and the daemon has saved its index and ended, so
that the next mount of the same cache can start. A dead or hanging daemon and an origin that does not answer do not prevent
an unmount: files that are not uploaded then stay in the cache directory, and the message says so.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cachefs.base import client
from cachefs.base.client import control_path
from cachefs.base.errors import MountError
from cachefs.base.linux import Mount, elsewhere, is_dead, mount_at, probe
from cachefs.base.units import FOREVER
from cachefs.daemon import asking
from cachefs.daemon.mounting import canonical, detach, holders

Show = Callable[[Any], None]

EXIT_DEADLINE_S = 30.0
"""How long the daemon may take to end after the unmount. Derived: the last stage's `SPILL_DEADLINE_S` and `STAGE_S`."""


def unmount(path: Path, *, lazy: bool = False, flush: bool = False, show: Show = lambda left: None) -> str:
    """Unmount the cachefs at `path`. Returns one line about what was done. With `flush`, unmounts only if the origin has all
    written files. `show` is called now and then with what is left to upload. Raises `MountError`."""
    path = canonical(path)
    mount = mount_at(path)
    if mount is None:
        raise MountError(f"{path} is not mounted")
    if not mount.is_cachefs:
        raise MountError(f"{path} is a mount of type {mount.fstype}, not a cachefs: use umount")
    if mount.owner is not None and os.getuid() not in (0, mount.owner):
        raise MountError(f"{path} is mounted by another user: run this as user {mount.owner}, or as root")
    answer = probe(path)
    if is_dead(answer):
        _detach(mount, lazy=True)
        return f"{path}: its daemon had gone; the dead mount is taken away"
    hangs = isinstance(answer, OSError) and answer.errno == errno.ETIMEDOUT
    if hangs and not lazy:
        raise MountError(f"{path} does not answer: cachefs umount --lazy {path}")
    left = None if hangs or (lazy and not flush) else _wait_for_uploads(path, flush, show)
    daemon = None if hangs or lazy else _daemon(path)
    try:
        _detach(mount, lazy=lazy)
        others = elsewhere(mount)
        if daemon is not None and not others:
            _wait_for_exit(daemon, path)
    finally:
        if daemon is not None:
            os.close(daemon)
    if lazy:
        return f"{path}: detached; its daemon ends when the last user has gone"
    goes_on = f"; its daemon goes on, because {others[0]} is a bind mount of it" if others else ""
    return f"{path}: unmounted{f', but {left}' if left else ''}{goes_on}"


def _wait_for_uploads(path: Path, must: bool, show: Show) -> str | None:
    """Wait for uploads. Returns a line about what is left, or None. With `must`, raises it as a `MountError`."""
    try:
        status = asking.status_of(path)
        uploads = status.get("uploads") or {"pending": 0, "flush_deadline": 0}
        if not uploads["pending"] and not status.get("unsent"):
            return None
        deadline_s = FOREVER if must else float(uploads["flush_deadline"])
        left = asking.flush(path, "", deadline_s, show)
        if left["files"] and not must:
            asking.ask(path, "flush", last=True)  # so that the daemon does not wait again
    except (client.ControlError, MountError) as exc:
        if must:
            raise MountError(f"{path}: the daemon does not say what is not uploaded yet: {exc}") from exc
        return None
    if not left["files"]:
        return None
    if must:
        raise MountError(f"{path} is not unmounted: {asking.describe(left)}")
    if left.get("lost") == left["files"] or not left.get("promised", True):
        return asking.describe(left)
    return f"{asking.describe(left)}; the next mount of this cache that can be written sends it"


def _detach(mount: Mount, *, lazy: bool) -> None:
    path = Path(mount.path)
    try:
        detach(mount, lazy=lazy)
    except OSError as exc:
        if exc.errno == errno.EBUSY:
            users = ", ".join(holders(mount)) or "a process of another user, or another mount below it"
            raise MountError(
                f"{path} is in use by {users}: stop that first, or cachefs umount --lazy {path}"
            ) from exc
        raise MountError(f"{path} cannot be unmounted: {exc.strerror}") from exc


def _daemon(path: Path) -> int | None:
    """A pidfd of the process that ends last (daemon or holder). Unlike a pid, it never refers to another process."""
    try:
        status = client.request(control_path(path), "status", timeout_s=2.0)
        holder = status.get("holder") or status  # the holder ends after its daemon
        return os.pidfd_open(int(holder["pid"]) or int(status["pid"]))
    except (client.ControlError, OSError, KeyError, TypeError, ValueError):
        return None


def _wait_for_exit(pidfd: int, path: Path) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(EXIT_DEADLINE_S * 1000):
        raise MountError(
            f"{path} is unmounted, but its daemon has not ended within {EXIT_DEADLINE_S:.0f} s: another mount namespace "
            "(a container's?) may still have the mount, or see its log"
        )

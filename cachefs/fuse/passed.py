"""A mount that somebody else has made: a descriptor of /dev/fuse, written /dev/fd/N in place of the mountpoint.

Who may mount opens /dev/fuse, mounts it, and starts the daemon with the descriptor; the daemon then needs no rights at all.
It serves, and ends the connection when it stops; whoever mounted takes the mount away. Nothing of the mount may be touched
before it is served: until the daemon has answered the kernel's first question, whoever looks at it waits.
"""

from __future__ import annotations

import os
import re
import select
import stat
from pathlib import Path

from cachefs.errors import MountError
from cachefs.mountinfo import Mount, mounts

_FUSE = os.makedev(10, 229)
"""/dev/fuse, whatever its path: the number is the kernel's."""

_CONNECTION = re.compile(r"^fuse_connection:\s*(\d+)$", re.MULTILINE)


def number(path: Path) -> int | None:
    """The N of a mountpoint /dev/fd/N, which is how libfuse spells it; None for any other path."""
    match = re.fullmatch(r"/dev/fd/([0-9]{1,9})", str(path))
    return int(match[1]) if match else None


def check(fd: int) -> None:
    """Raise `MountError` unless `fd` is mounted and not served yet. From then on no child inherits it: the connection ends
    with its last copy."""
    shown = f"/dev/fd/{fd}"
    try:
        found = os.fstat(fd)
        os.set_inheritable(fd, False)
    except OSError:
        raise MountError(
            f"{shown} is not open: start the daemon with a descriptor of /dev/fuse that is mounted"
        ) from None
    if not stat.S_ISCHR(found.st_mode) or found.st_rdev != _FUSE:
        raise MountError(f"{shown} is not /dev/fuse: pass a descriptor of /dev/fuse that is mounted")
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    events = dict(waiting.poll(0)).get(fd, 0)
    if events & select.POLLERR:
        raise MountError(f"{shown} is not mounted, or not any more: mount it with fd={fd} first")
    if not events & select.POLLIN:  # the kernel asks its first question (INIT) when it mounts, and only then
        raise MountError(f"{shown} has been served by another daemon: mount anew for each")


def connection(fd: int) -> str:
    """The "major:minor" of its mount; "" where the kernel does not say it (6.18 does) or nothing is mounted."""
    try:
        match = _CONNECTION.search(Path(f"/proc/self/fdinfo/{fd}").read_text())
    except OSError:
        return ""
    return f"0:{match[1]}" if match else ""


def mount_of(fd: int) -> Mount | None:
    """Where it is mounted, as far as it is seen from here; of several places the first whole one."""
    device = connection(fd)
    found = [mount for mount in mounts() if mount.device == device]
    return next((mount for mount in found if mount.root == "/"), None)


def remarks(mount: Mount, uid: int) -> list[str]:
    """What whoever mounted it may not have meant; `uid` is the daemon's."""
    owner = next((o.removeprefix("user_id=") for o in mount.options if o.startswith("user_id=")), str(uid))
    if "allow_other" in mount.options:
        if "default_permissions" in mount.options:
            return []
        return [
            f"{mount.path} is mounted without default_permissions: modes and owners of files mean nothing"
        ]
    if owner == str(uid):
        return []
    return [f"{mount.path} is mounted for user {owner} alone: user {uid}, who serves it, cannot look at it"]

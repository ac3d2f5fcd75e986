"""A FUSE connection outside of the protocol: finding it by a descriptor, mounting, tuning and ending it.

A descriptor that another process has mounted is given as /dev/fd/N in place of the mountpoint. That process opens /dev/fuse,
mounts it, and starts the daemon with the descriptor, so the daemon needs no rights. The daemon serves the mount and ends
the connection when it stops; the other process unmounts it. Until the daemon has answered the kernel's first request, each
access to the mount blocks, so no code here accesses the mount before that.

Read-ahead and the number of requests in flight can only be raised by root, in /sys: libfuse cannot. Measured: reads of 1 MiB
instead of 128 KiB make sequential reading two to three times faster.
"""

from __future__ import annotations

import os
import re
import select
import socket
import stat
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cachefs.base.errors import MountError
from cachefs.base.linux import MNT_DETACH, MNT_FORCE, Mount, mount_at, mounts, umount

READ_AHEAD_KB = 1024
"""Read-ahead of the mount. Derived: FUSE's largest request is 256 pages."""

MAX_BACKGROUND, CONGESTION = 128, 96
"""Largest number of read-aheads in flight, and the number above which the kernel calls the mount congested and begins no
more. Guessed; three quarters of it as in the kernel."""


MOUNTING_S = 30.0
"""How long fusermount3, which mounts for users without rights, may take, and the kernel to send its first request (INIT).
Derived: as long as `--mount-timeout` waits by default, since both are a part of the mount."""

_FUSE = os.makedev(10, 229)
"""The device number of /dev/fuse, the same at every path."""

_CONNECTIONS = Path("/sys/fs/fuse/connections")
_CONNECTION = re.compile(r"^fuse_connection:\s*(\d+)$", re.MULTILINE)


# -- descriptors that another process has mounted --------------------------------------------------


def descriptor(path: Path) -> int | None:
    """The N of a mountpoint /dev/fd/N, which is how libfuse spells it; None for any other path."""
    match = re.fullmatch(r"/dev/fd/([0-9]{1,9})", str(path))
    return int(match[1]) if match else None


def check(fd: int) -> None:
    """Raise `MountError` unless `fd` is mounted and not served yet. Children do not inherit it from now on, because the
    connection ends with the last copy of the descriptor."""
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
    if not events & select.POLLIN:  # the kernel sends its first request (INIT) when it mounts, and only then
        raise MountError(f"{shown} has been served by another daemon: mount again for each")


def device_of(fd: int) -> str:
    """The "major:minor" of a descriptor's mount; "" if the kernel does not report it (6.18 does) or nothing is mounted."""
    try:
        match = _CONNECTION.search(Path(f"/proc/self/fdinfo/{fd}").read_text())
    except OSError:
        return ""
    return f"0:{match[1]}" if match else ""


def mount_of(fd: int) -> Mount | None:
    """The mount of a descriptor that this process sees, or None. Of several, the first that shows the whole filesystem."""
    device = device_of(fd)
    return next((mount for mount in mounts() if mount.device == device and mount.root == "/"), None)


def remarks(mount: Mount, uid: int) -> list[str]:
    """Options of a mount that are probably mistakes, one line each; `uid` is the daemon's."""
    if "allow_other" in mount.options:
        if "default_permissions" in mount.options:
            return []
        return [
            f"{mount.path} is mounted without default_permissions: modes and owners of files mean nothing"
        ]
    if mount.owner in (None, uid):
        return []
    return [
        f"{mount.path} is mounted for user {mount.owner} alone: user {uid}, who serves it, cannot look at it"
    ]


# -- mounts at a path ------------------------------------------------------------------------------


def device_at(mountpoint: Path) -> str:
    """The "major:minor" of the topmost mount at a path, "" if there is none. Sends no request to it."""
    mount = mount_at(mountpoint)
    return "" if mount is None else mount.device


def mount_options(name: str, flags: Sequence[str], *, writable: bool) -> list[str]:
    """The options of a mount through fusermount3 or libfuse."""
    return [f"fsname={name}", "subtype=cachefs", "default_permissions", *flags, *["ro"] * (not writable)]


# -- mounts of a user without rights ---------------------------------------------------------------


def fusermount(*arguments: str, passing: socket.socket | None = None) -> None:
    """Run fusermount3, which is set-uid root. It sends a descriptor over `passing`. Raises `MountError` with its message."""
    environ = {**os.environ, "LC_ALL": "C"}
    if passing is not None:
        environ["_FUSE_COMMFD"] = str(passing.fileno())
    fds = () if passing is None else (passing.fileno(),)
    try:
        done = subprocess.run(
            ["fusermount3", *arguments],
            env=environ,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MOUNTING_S,
        )
    except FileNotFoundError as exc:
        raise MountError("fusermount3 is missing: apt-get install fuse3") from exc
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise MountError(f"fusermount3: {exc}") from exc
    if done.returncode != 0:
        raise MountError((done.stderr.strip().splitlines() or ["fusermount3 failed"])[-1])


def mount_with_help(mountpoint: Path, options: Sequence[str]) -> int:
    """Mount through fusermount3, visibly. Returns a descriptor of /dev/fuse. Raises `MountError`."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(MOUNTING_S)
        fusermount("-o", ",".join(options), "--", str(mountpoint), passing=theirs)
        try:
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        except OSError as exc:
            raise MountError(f"fusermount3 has passed no descriptor: {exc}") from exc
    if not fds:
        raise MountError("fusermount3 has passed no descriptor")
    os.set_inheritable(fds[0], False)
    return fds[0]


# -- ending one ------------------------------------------------------------------------------------


def abort(device: str) -> None:
    """End the connection "major:minor"; waiting requests fail. Only for a living connection, because numbers are reused."""
    try:
        (_CONNECTIONS / device.partition(":")[2] / "abort").write_text("1\n")
    except OSError:
        pass  # the connection has ended


def end(mountpoint: Path, device: str) -> None:
    """End the connection "major:minor" ("": not known); if it is still mounted at `mountpoint`, by unmounting it, which for
    root ends it, too."""
    if device and device_at(mountpoint) != device:
        abort(device)  # unmounted lazily, and still in use
    else:
        # By force, because closing does not end the connection while a thread writes to the descriptor: its notification
        # may wait for a lock whose holder waits for an answer.
        unmount(mountpoint, MNT_FORCE | MNT_DETACH)


def unmount(mountpoint: Path, flags: int) -> None:
    """Unmount, if this process may; a failure is ignored. A user without rights can only detach."""
    try:
        umount(mountpoint, flags)
    except OSError:
        if os.geteuid() != 0:
            with suppress(MountError):
                fusermount("-u", "-z", "--", str(mountpoint))


# -- tuning ----------------------------------------------------------------------------------------


def tune(mountpoint: Path, max_background: int = 0) -> list[str]:
    """Raise the kernel's limits of a mount. Returns a line for each setting, for the log and `status`; if one could not be
    raised, its line has the reason and the cost. `max_background` is what the backend has negotiated (0: nothing)."""
    mount = mount_at(mountpoint)
    if mount is None:
        lines = ["kernel tuning: where it is mounted is not seen from here; read_ahead_kb was not raised"]
        return [*lines, f"max_background raised to {max_background}"] if max_background else lines
    reason = _write(Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb"), READ_AHEAD_KB)
    lines = [
        f"read_ahead_kb raised to {READ_AHEAD_KB}"
        if reason is None
        else f"read_ahead_kb not raised ({reason}): sequential reads come in 128 KiB requests, 2-3 times slower"
    ]
    if max_background:
        return [*lines, f"max_background raised to {max_background}"]
    settings = _CONNECTIONS / mount.device.partition(":")[2]
    reason = _write(settings / "max_background", MAX_BACKGROUND) or _write(
        settings / "congestion_threshold", CONGESTION
    )
    lines.append(
        f"max_background raised to {MAX_BACKGROUND}"
        if reason is None
        else f"max_background not raised ({reason}): at most 12 read-aheads are in flight"
    )
    return lines


def _write(path: Path, value: int) -> str | None:
    """Write a number to a file. Returns why that failed, or None."""
    try:
        path.write_text(f"{value}\n")
    except OSError as exc:
        return f"{path}: {exc.strerror}"
    return None

"""Client of a daemon's control socket: where the socket of a mount is, and one JSON line each way.

A request is ``{"verb": "status", …arguments}``; the reply is ``{"ok": true, "result": …}`` or ``{"ok": false,
"error": "one line"}``. The other end is `cachefs.daemon.control`. All calls
block. Standard library and Python 3.9 only: `cachefs.hints` uses this module in training images.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from cachefs.base.errors import CachefsError, MountError
from cachefs.base.linux import Mount, elsewhere, is_dead, mount_at, probe

T = TypeVar("T")

MAX_REQUEST_BYTES = 512 << 10
"""Longest request; long lists are sent in batches. Measured: half as much blocks the daemon's loop for 2 ms."""

BATCH_BYTES = 256 << 10
"""Longest part of a list in one request. Derived: half a request, which leaves room for the other arguments."""

MAX_REPLY_BYTES = 64 << 20
"""Longest reply that is read: root asks daemons of users, who could send without end. A bound of memory:
far more than any verb's."""

_TIMEVAL = struct.Struct("ll")

CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid of the process that listens (SO_PEERCRED)."""

HANDS_OVER = "upgrade"
"""The verb after which the daemon ends. A daemon that hangs up may have done it, so it is not sent to the next daemon."""

_SOCKET_PATH_MAX = 107
"""Derived: sun_path is 108 bytes with its terminating NUL."""


class ControlError(CachefsError):
    """The daemon could not be reached, or it refused the request."""


class NotRunning(ControlError):
    """No daemon listens at that socket."""


class OfAnother(NotRunning):
    """Another user owns the socket or its directory, so no request is sent."""


class HungUp(ControlError):
    """The daemon ended the connection before it answered. It may have died."""


# -- where ------------------------------------------------------------------------------------------


def slug(text: str, unique: str, longest: int = 48) -> str:
    """A readable file name for `text`, which differs if `unique` does."""
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:longest].strip("-.")
    digest = hashlib.blake2b(unique.encode("utf-8", "surrogateescape"), digest_size=5).hexdigest()
    return f"{readable}-{digest}" if readable else digest


def runtime_dir() -> Path:
    """The directory of this user's control sockets."""
    if os.getuid() == 0:
        return Path("/run/cachefs")
    shared = os.environ.get("XDG_RUNTIME_DIR")
    if shared and len(os.fsencode(shared)) <= 40:  # a socket's name must still fit
        return Path(shared) / "cachefs"
    temporary = tempfile.gettempdir()
    return Path(temporary if len(temporary) <= 40 else "/tmp") / f"cachefs-{os.getuid()}"


def control_path(mountpoint: Path) -> Path:
    """The control socket of the daemon that serves `mountpoint` (absolute, links resolved). Makes no system call on it."""
    directory = runtime_dir()
    room = _SOCKET_PATH_MAX - len(os.fsencode(directory)) - len("/-0123456789.sock")
    return directory / f"{slug(str(mountpoint).strip('/'), str(mountpoint), min(room, 48))}.sock"


def sockets(mountpoint: Path) -> Iterator[Path]:
    """Paths at which the daemon of `mountpoint` may listen: this user's and, for root, other users'."""
    own = control_path(mountpoint)
    yield own
    if os.getuid() == 0:
        for pattern in ("run/user/*/cachefs", "tmp/cachefs-*"):
            for directory in sorted(Path("/").glob(pattern)):
                yield directory / own.name


# -- what ------------------------------------------------------------------------------------------


def ask(mountpoint: Path, verb: str, /, timeout_s: float = 5.0, **arguments: Any) -> Any:
    """The result of a verb, from the daemon that serves `mountpoint` (canonical). Raises `ControlError`, or `MountError` if
    there is no such mount."""
    mount = mount_at(mountpoint)
    # mountinfo names the user that mounted it: root connects to that user's daemon, and to no other user's.
    owners = {mount.owner} if mount is not None and mount.is_cachefs and mount.owner is not None else ()

    def answer() -> Any:
        for place in sockets(mountpoint):
            try:
                return request(place, verb, timeout_s, owners=owners, **arguments)
            except NotRunning:
                continue
        raise NotRunning(f"no cachefs answers for {mountpoint}")

    with suppress(NotRunning, *(() if verb == HANDS_OVER else (HungUp,))):
        return answer()
    if mount is None or not mount.is_cachefs:
        raise MountError(f"{mountpoint} is not a cachefs mount: cachefs status lists those there are")
    # After a daemon's death the probe is answered once the next daemon serves the mount, and then that one listens, too.
    if is_dead(probe(mountpoint)):
        raise MountError(
            f"the daemon of {mountpoint} has died: cachefs umount {mountpoint}, then mount it again"
        )
    with suppress(NotRunning):
        return answer()
    raise MountError(_no_answer(mount))


def _no_answer(mount: Mount) -> str:
    """Why the daemon of a living mount cannot be asked, and what to do."""
    for other in elsewhere(mount):
        if any(place.exists() for place in sockets(Path(other))):
            return f"{mount.path} is a bind mount: name {other}, where the daemon has mounted it"
    if os.getuid() == 0:
        return f"the daemon of {mount.path} does not answer here: run this where it runs, such as in its container"
    return f"the daemon of {mount.path} does not answer this user: run this as the user who mounted it, or as root"


def connected(path: Path, timeout_s: float, owners: Collection[int] = ()) -> socket.socket:
    """Connect to a daemon of root, of this user or of one of `owners`. Other users can make directories in /tmp, and sockets
    in them, that look like those of a daemon. Raises `OfAnother`, `NotRunning`, `ControlError`."""
    trusted = {0, os.geteuid(), *owners}
    foreign = OfAnother(f"{path} belongs to another user, who is not asked")
    try:
        directory = path.parent.lstat()
    except OSError as exc:
        raise NotRunning(f"no cachefs answers at {path}") from exc
    if not stat.S_ISDIR(directory.st_mode) or directory.st_uid not in trusted or directory.st_mode & 0o022:
        raise foreign
    with ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        # The kernel waits so long for a place in the queue of a daemon that has many clients. With a timeout of Python's
        # own, connect(2) would fail at once.
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(int(timeout_s * 1e6), 10**6))
        )
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as exc:
            raise NotRunning(f"no cachefs answers at {path}") from exc
        except BlockingIOError as exc:
            raise ControlError(f"the daemon at {path} did not answer within {timeout_s:g} s") from exc
        except OSError as exc:
            raise ControlError(f"cannot ask the daemon at {path}: {exc.strerror or exc}") from exc
        connection.settimeout(timeout_s)
        _, uid, _ = CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )
        if uid not in trusted:
            raise foreign
        undo.pop_all()
    return connection


def request(
    path: Path, verb: str, /, timeout_s: float = 5.0, *, owners: Collection[int] = (), **arguments: Any
) -> Any:
    """Send one request to the daemon at `path`; returns its result. Takes about `timeout_s` at most. Raises `NotRunning` if
    no daemon of root, this user or one of `owners` listens there, `HungUp`, and `ControlError` with the daemon's line if it
    refuses."""
    until = time.monotonic() + timeout_s
    received = bytearray()
    with connected(path, timeout_s, owners) as connection:
        try:
            connection.sendall(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
            while not received.endswith(b"\n") and len(received) < MAX_REPLY_BYTES:
                connection.settimeout(max(until - time.monotonic(), 0.001))
                chunk = connection.recv(256 << 10)
                if not chunk:
                    break
                received += chunk
        except TimeoutError as exc:
            raise ControlError(f"the daemon at {path} did not answer within {timeout_s:g} s") from exc
        except OSError as exc:
            raise HungUp(f"the daemon at {path} hung up: {exc.strerror or exc}") from exc
    try:
        reply = json.loads(received)
        ok = reply["ok"]
    except (ValueError, KeyError, TypeError) as exc:
        raise HungUp(f"the daemon at {path} hung up before it answered") from exc
    if not ok:
        raise ControlError(str(reply.get("error", "refused")))
    return reply.get("result")


def batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Split a list into batches that fit one request each. Items are JSON values. The daemon refuses a longer item."""
    batch: list[T] = []
    room = BATCH_BYTES
    for item in items:
        length = len(json.dumps(item)) + 2
        if length > room and batch:
            yield batch
            batch, room = [], BATCH_BYTES
        batch.append(item)
        room -= length
    if batch:
        yield batch

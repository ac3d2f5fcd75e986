"""Which front serves a mount: the kernel's own protocol where it lets us lend it files, pyfuse3 everywhere else."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from cachefs.config import Config
from cachefs.errors import MountError
from cachefs.fs import Backing, FileSystem
from cachefs.fuse.device import Device, Negotiated
from cachefs.fuse.kernel_front import KernelFront
from cachefs.metrics import Metrics

LISTINGS_KEPT_SINCE = (6, 13)
"""Kernels 6.9 to 6.12 give out listings they should have dropped. Borrowed from the kernel's history."""


class Front(Protocol):
    """Serves one `FileSystem` to the kernel. `max_background` is how many read-aheads it was granted (0: not asked)."""

    name: str
    max_background: int

    def mount(self, mountpoint: Path, name: str, *, allow_other: bool) -> None:
        """From here on it is seen; questions are answered once `serve` runs. Raises `MountError`, OSError."""

    async def serve(self) -> None:
        """Answer the kernel until the mount is gone, or this is cancelled. Calls `on_ready` first."""

    def close(self, *, unmount: bool = True) -> None:
        """Unmount (lazily, if it is still mounted) and end the session; readers still waiting get ENOTCONN. Without
        `unmount` a dead mount stays: all that is done below it fails with ENOTCONN."""

    def lend(self, backing: Backing) -> None:
        """Tell the kernel of a file that it may read by itself. OSError when it does not take it."""

    def retire(self, backing: Backing) -> None:
        """Tell it that there will be no more use for one."""

    def invalidate(self, inode: int, parent: int, name: bytes) -> None:
        """Make the kernel forget what it has of `inode` (0: none), and the name (b"": none). Blocking: from a worker
        thread only."""


class NotHere(Exception):
    """Why the kernel front cannot serve here; its text completes "pyfuse3, because …"."""


class Chosen(NamedTuple):
    """`why` says why it is this front; `refused` why the kernel takes no files from some directories."""

    front: Front
    why: str
    refused: dict[Path, str]
    lends: bool


def choose(
    config: Config,
    title: str,
    places: Sequence[Path],
    fs: FileSystem,
    metrics: Metrics,
    on_ready: Callable[[], None],
    *,
    writable: bool = False,
) -> Chosen:
    """The front that `config.front` asks for, mounted; files of the directories `places` may be lent. `writable`: `fs` has a
    writer. Raises `MountError`."""
    title = _plain(title)
    why = "as asked"
    if config.descriptor is not None and _to_lend(config):
        return _kernel(config, title, places, fs, metrics, on_ready, writable)
    if config.descriptor is None and config.front != "pyfuse3":
        try:
            chosen = _kernel(config, title, places, fs, metrics, on_ready, writable)
        except NotHere as exc:
            if config.front == "kernel":
                raise MountError(f"--front kernel cannot serve here: {exc}: leave the option out") from exc
            why = str(exc)
        else:
            try:
                chosen.front.mount(config.mountpoint, title, allow_other=config.allow_other)
            except OSError as exc:
                chosen.front.close()
                why = f"this mount cannot be attached: {exc.strerror}"
                if config.front == "kernel" or exc.errno not in (errno.EPERM, errno.EACCES):
                    raise MountError(f"cannot mount on {config.mountpoint}: {exc.strerror}") from exc
            else:
                return chosen
    from cachefs.fuse.pyfuse3_front import Pyfuse3Base, Pyfuse3Front
    from cachefs.fuse.pyfuse3_writing import WritablePyfuse3Front

    kind: type[Pyfuse3Base] = WritablePyfuse3Front if writable else Pyfuse3Front
    front = kind(fs, metrics, config.deadline_s + config.on_outage.wait_s, on_ready)
    if config.descriptor is None:
        front.mount(config.mountpoint, title, allow_other=config.allow_other)
        return Chosen(front, why, {}, lends=False)
    front.take(config.descriptor, title)
    if config.front == "auto":
        why = "somebody else has mounted it, and only root may lend files"
    return Chosen(front, why, {}, lends=False)


def _to_lend(config: Config) -> bool:
    """Whether the kernel front is to serve a passed descriptor. It has one handshake, so nothing can be tried before."""
    return config.front == "kernel" or (config.front == "auto" and (os.geteuid() == 0 or config.zero_open))


def _kernel(
    config: Config,
    title: str,
    places: Sequence[Path],
    fs: FileSystem,
    metrics: Metrics,
    on_ready: Callable[[], None],
    writable: bool,
) -> Chosen:
    must_lend = config.front == "auto" and not config.zero_open
    places = () if config.zero_open else places
    if config.descriptor is None:
        device, agreed, refused = connect(
            title, config.allow_other, places, must_lend=must_lend, writable=writable
        )
    else:
        device, agreed, refused = take(config.descriptor, places, writable=writable)
    immutable = config.consistency == "immutable"
    front = KernelFront(
        *(fs, metrics, config.deadline_s + config.on_outage.wait_s, on_ready, device, agreed),
        zero_open=config.zero_open,
        keep_listings=immutable and not writable and keeps_listings(platform.release()),
        writable=writable,
    )
    if config.zero_open:
        return Chosen(front, "no file is opened, so none is read by the kernel itself", {}, lends=False)
    if not places:
        return Chosen(front, "nothing is cached that the kernel may read by itself", {}, lends=False)
    if len(refused) == len(places):
        reason = next(iter(refused.values()))
        return Chosen(front, f"the kernel reads nothing by itself: {reason}", refused, lends=False)
    why = "the kernel reads whole cached files by itself"
    return Chosen(front, why, refused, lends=True)


def connect(
    name: str, allow_other: bool, places: Sequence[Path], *, must_lend: bool, writable: bool = False
) -> tuple[Device, Negotiated, dict[Path, str]]:
    """A connection, what was agreed, and which directories it takes no files from, and why. Raises `NotHere`: with
    `must_lend` also when it takes none of them."""
    if os.geteuid() != 0:
        raise NotHere("only root may speak to the kernel without help")
    refused: dict[Path, OSError] = {}
    # A lent file may itself lie on a stacked filesystem (overlayfs, as in a container without a volume): then the mount
    # counts as stacked twice, and nothing can be stacked on it. So only if need be.
    for depth in (1, 2):
        try:
            device, agreed = Device.connect(
                name, allow_other=allow_other, stack_depth=depth, writable=writable
            )
        except (OSError, MountError) as exc:
            raise NotHere(f"no connection through /dev/fuse: {_reason(exc)}") from exc
        if not agreed.passthrough:
            reason = _too_old(agreed)
            if must_lend:
                device.close()
                raise NotHere(reason)
            return device, agreed, dict.fromkeys(places, reason)
        refused = {place: no for place in places if (no := _try_lending(device, place)) is not None}
        if depth == 2 or not any(exc.errno == errno.ELOOP for exc in refused.values()):
            break
        device.close()
    if must_lend and places and refused.keys() == set(places):
        device.close()
        raise NotHere(f"the kernel takes no file of the cache: {_reason(*refused.values())}")
    return device, agreed, {place: _reason(exc) for place, exc in refused.items()}


def take(
    fd: int, places: Sequence[Path], *, writable: bool = False
) -> tuple[Device, Negotiated, dict[Path, str]]:
    """The same over a descriptor that somebody else has mounted. Raises `MountError`."""
    try:
        # With a depth of two a cache on overlayfs could be lent from, but nothing be stacked on a mount that is not ours.
        device, agreed = Device.take(fd, stack_depth=1, writable=writable)
    except OSError as exc:
        raise MountError(f"/dev/fd/{fd} cannot be served: {exc.strerror}") from exc
    if not agreed.passthrough:
        return device, agreed, dict.fromkeys(places, _too_old(agreed))
    refused = {place: _reason(no) for place in places if (no := _try_lending(device, place)) is not None}
    return device, agreed, refused


def _too_old(agreed: Negotiated) -> str:
    return f"this kernel cannot read files by itself (Linux 6.9 can; FUSE 7.{agreed.minor})"


def _try_lending(device: Device, place: Path) -> OSError | None:
    """Why the kernel takes no files of a tier's directory. Every tier has a file `tag`: a full disk takes no new one."""
    try:
        fd = os.open(place / "tag", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            device.take_back(device.lend(fd))
        finally:
            os.close(fd)
    except OSError as exc:
        return exc
    return None


def _reason(*failures: Exception) -> str:
    if not failures:
        return "there is none that may be lent"
    first = failures[0]
    text = (first.strerror or str(first)) if isinstance(first, OSError) else str(first)
    return {errno.ELOOP: "it lies on stacked filesystems"}.get(getattr(first, "errno", 0) or 0, text)


def keeps_listings(release: str) -> bool:
    """Whether this kernel ("6.18.44-…") is right about the listings it keeps."""
    numbers = [int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit()]
    return tuple(numbers) >= LISTINGS_KEPT_SINCE


def _plain(name: str) -> str:
    """A source as the mount table can show it."""
    return "".join(c if c.isascii() and c.isprintable() and c not in ",\\ " else "_" for c in name)

"""Choosing the backend that serves a mount: native if it gets a connection from the kernel, else pyfuse3."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from cachefs.base import linux
from cachefs.base.errors import MountError
from cachefs.base.metrics import Metrics
from cachefs.config.config import Config
from cachefs.fs import Backing, FileSystem
from cachefs.fuse.handover import Handover
from cachefs.fuse.native_backend import Device, NativeBackend, Negotiated
from cachefs.fuse.operations import Operations
from cachefs.fuse.protocol import Init
from cachefs.fuse.records import Records

LISTINGS_KEPT_SINCE = (6, 13)
"""First kernel that is told to keep listings: 6.9 to 6.12 return listings that they should have dropped. Borrowed from the
kernel's history."""

STACKED = "it lies on stacked filesystems"


class Backend(Protocol):
    """Serves one `FileSystem` to the kernel. `max_background` is the number of read-aheads that was negotiated (0: none)."""

    name: str
    max_background: int
    operations: Operations

    def mount(self, mountpoint: Path, name: str, flags: Sequence[str]) -> None:
        """Make the mount visible. Its requests wait until `serve` runs. Raises `MountError`, OSError."""

    async def serve(self, ready: Callable[[], None]) -> None:
        """Call `ready` when the kernel has connected, then answer it until the mount is gone or this is cancelled."""

    def pause(self) -> None:
        """Have `serve` return once the requests that it has read are answered, because another daemon takes over. Only with
        a holder."""

    def close(self, *, unmount: bool = True) -> None:
        """Unmount (lazily, if it is still mounted) and end the session; requests that wait fail with ENOTCONN. Without
        `unmount` a dead mount stays, where every access fails with ENOTCONN."""

    def register(self, backing: Backing) -> None:
        """Register a backing file with the kernel. Raises OSError when the kernel refuses it."""

    def retire(self, backing: Backing) -> None:
        """Unregister a backing file that will not be opened again."""

    def invalidate(self, inode: int, parent: int, name: bytes) -> None:
        """Make the kernel drop its pages and attributes of `inode` (0: none), and the name (b"": none). Blocking: for worker
        threads only."""


class NotHere(Exception):
    """The native backend cannot serve this mount. The text completes "pyfuse3, because …"."""


class Chosen(NamedTuple):
    """The chosen backend, and `why` it was chosen. `refused`: tier directory → why the kernel accepts no backing files of
    it. `passthrough`: the kernel accepts those of at least one directory."""

    backend: Backend
    why: str
    refused: dict[Path, str]
    passthrough: bool


class Connected(NamedTuple):
    """A negotiated connection; `refused` as in `Chosen`."""

    device: Device
    agreed: Negotiated
    refused: dict[Path, str]


def choose(
    config: Config,
    title: str,
    tier_dirs: Sequence[Path],
    fs: FileSystem,
    metrics: Metrics,
    *,
    writable: bool = False,
    handover: Handover | None = None,
    clear: Callable[[], None] = lambda: None,
) -> Chosen:
    """Choose the backend that `config.fuse` asks for, and mount it. Files of the tier directories `tier_dirs` may become
    backing files. `writable`: `fs` has a writer. `handover` is the state that a holder keeps for the next daemon.
    `clear` frees the mountpoint; it is called last before the mountpoint is used. Raises `MountError`."""
    title = _plain(title)
    why = "as asked"
    if config.descriptor is not None and _serves_descriptor_natively(config):
        return _native(config, title, tier_dirs, fs, metrics, writable)
    if config.descriptor is None and config.fuse != "pyfuse3":
        by_fusermount = os.geteuid() != 0
        if by_fusermount:
            clear()  # this mount is visible at once
        try:
            chosen = _native(config, title, tier_dirs, fs, metrics, writable, handover)
        except NotHere as exc:
            if config.fuse == "native":
                raise MountError(f"--fuse native cannot serve here: {exc}: leave the option out") from exc
            why = str(exc)
        else:
            if by_fusermount:
                return chosen
            clear()
            try:
                chosen.backend.mount(config.mountpoint, title, _flags(config))
            except OSError as exc:
                chosen.backend.close()
                why = f"this mount cannot be attached: {exc.strerror}"
                if config.fuse == "native" or exc.errno not in (errno.EPERM, errno.EACCES):
                    raise MountError(f"cannot mount on {config.mountpoint}: {exc.strerror}") from exc
            else:
                return chosen
    from cachefs.fuse.pyfuse3_backend import Pyfuse3Backend

    backend = Pyfuse3Backend(fs, metrics, _deadline_s(config), writable=writable)
    if config.descriptor is None:
        clear()
        backend.mount(config.mountpoint, title, _flags(config))
        return Chosen(backend, why, {}, passthrough=False)
    backend.take(config.descriptor, title)
    if config.fuse == "auto":
        why = "another process has mounted it, and only root may register backing files"
    return Chosen(backend, why, {}, passthrough=False)


def _deadline_s(config: Config) -> float:
    return config.timeout + config.on_outage.wait_s


def _serves_descriptor_natively(config: Config) -> bool:
    """True if the native backend should serve a passed descriptor. It cannot be tried, because the kernel negotiates
    once."""
    return config.fuse == "native" or (config.fuse == "auto" and (os.geteuid() == 0 or config.zero_open))


def _native(
    config: Config,
    title: str,
    tier_dirs: Sequence[Path],
    fs: FileSystem,
    metrics: Metrics,
    writable: bool,
    handover: Handover | None = None,
) -> Chosen:
    """Connect the native backend. Raises `NotHere`, `MountError`."""
    tier_dirs = () if config.zero_open else tier_dirs
    device, agreed, refused = _connection(config, title, tier_dirs, writable, handover)
    backend = NativeBackend(
        fs,
        metrics,
        _deadline_s(config),
        device,
        agreed,
        zero_open=config.zero_open,
        keep_listings=linux.release() >= LISTINGS_KEPT_SINCE,
        writable=writable,
        direct_writers=not config.writeback,
        records=None if handover is None else Records(fs, handover, fs.origins),
    )
    passthrough = False
    if config.zero_open:
        why = "no file is opened, so none is read by the kernel itself"
    elif not tier_dirs:
        why = "nothing is cached that the kernel may read by itself"
    elif len(refused) == len(tier_dirs):
        why = f"the kernel reads nothing by itself: {next(iter(refused.values()))}"
    else:
        why, passthrough = "the kernel reads whole cached files by itself", True
    return Chosen(backend, why, refused, passthrough)


def _flags(config: Config) -> list[str]:
    """The options of the kernel's mount that have no value."""
    return ["allow_other"] * config.allow_other + ["noexec"] * (not config.exec)


def _connection(
    config: Config, title: str, tier_dirs: Sequence[Path], writable: bool, handover: Handover | None
) -> Connected:
    """The ended daemon's connection, or a new one as this process may make it. Raises `NotHere`, `MountError`."""
    flags = _flags(config)
    if handover is not None and handover.taking_over:
        number, minor, capabilities = handover.agreed()
        device = Device.adopt(handover.fd, config.mountpoint, number, writable=writable)
        agreed = Negotiated(minor, Init(capabilities))
    elif config.descriptor is not None:
        try:
            # Depth 2 would allow a cache on overlayfs, but prevent stacking a filesystem on the other process's mount.
            device, agreed = Device.take(config.descriptor, stack_depth=1, writable=writable)
        except OSError as exc:
            raise MountError(f"/dev/fd/{config.descriptor} cannot be served: {exc.strerror}") from exc
    elif os.geteuid() == 0:
        return connect(title, flags, tier_dirs, writable=writable)
    else:
        try:
            device, agreed = Device.connect_with_help(config.mountpoint, title, flags, writable=writable)
        except (OSError, MountError) as exc:
            raise NotHere(f"no connection through fusermount3: {_reason(exc)}") from exc
        return Connected(device, agreed, dict.fromkeys(tier_dirs, "only root may register backing files"))
    return Connected(device, agreed, _try_passthrough(device, agreed, tier_dirs))


def connect(
    name: str, flags: Sequence[str], tier_dirs: Sequence[Path], *, writable: bool = False
) -> Connected:
    """Connect through a new, detached mount. Raises `NotHere`."""
    # Backing files may lie on a stacked filesystem (overlayfs, in a container without a volume), which needs depth 2. No
    # other filesystem can be stacked on a mount of depth 2, so depth 1 is tried first.
    for depth in (1, 2):
        try:
            device, agreed = Device.connect(name, flags, stack_depth=depth, writable=writable)
        except (OSError, MountError) as exc:
            raise NotHere(f"no connection through /dev/fuse: {_reason(exc)}") from exc
        refused = _try_passthrough(device, agreed, tier_dirs)
        if depth == 2 or STACKED not in refused.values():
            break
        device.close()
    return Connected(device, agreed, refused)


def _try_passthrough(device: Device, agreed: Negotiated, tier_dirs: Sequence[Path]) -> dict[Path, str]:
    """Try to register a file of each tier's directory: the reasons, by directory, for those of which the kernel accepts
    none. The file is the tier's `tag`, because a full disk takes no new file."""
    if not agreed.passthrough:
        old = f"this kernel cannot read files by itself (Linux 6.9 can; FUSE 7.{agreed.minor})"
        return dict.fromkeys(tier_dirs, old)
    refused: dict[Path, str] = {}
    for tier_dir in tier_dirs:
        try:
            fd = os.open(tier_dir / "tag", os.O_RDONLY | os.O_NOFOLLOW)
            try:
                device.unregister(device.register(fd))
            finally:
                os.close(fd)
        except OSError as exc:
            refused[tier_dir] = STACKED if exc.errno == errno.ELOOP else _reason(exc)
    return refused


def _reason(exc: Exception) -> str:
    return (exc.strerror or str(exc)) if isinstance(exc, OSError) else str(exc)


def _plain(name: str) -> str:
    """A source's name, with `_` for characters that the mount table cannot show."""
    return "".join(c if c.isascii() and c.isprintable() and c not in ",\\ " else "_" for c in name)

"""The mountpoint: the checks before mounting, and unmounting.

The kernel and fusermount3 report a refusal as a bare errno. So every reason for one is checked first, and refused with a
line that says what to do. The mount table is read before the path is touched, because a path under a dead or hanging mount
answers with an error or not at all.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from cachefs.base import linux
from cachefs.base.errors import AlreadyMounted, MountError
from cachefs.base.linux import Mount, is_dead, mount_at, probe
from cachefs.config.config import ROWS, Config
from cachefs.fuse import connection

FUSE_DEVICE = Path("/dev/fuse")
FUSE_CONF = Path("/etc/fuse.conf")

LEAST_DESCRIPTORS = 128
"""Descriptors that this process must be allowed to open. Derived: a mount has 40 open before its first request (measured),
and one for each connection to its origin, 64 of them by default."""


def canonical(path: Path) -> Path:
    """The path as the mount table spells it: absolute, links resolved; /dev/fd/N is left as it is. Does not touch a mount
    at `path` itself."""
    if connection.descriptor(path) is not None:
        return path
    lexical = Path(os.path.abspath(path))
    for candidate in (lexical, Path(os.path.realpath(lexical.parent)) / lexical.name):
        if mount_at(candidate) is not None:
            return candidate
    return Path(os.path.realpath(lexical))


def located(config: Config) -> Config:
    """The same configuration with its mountpoint as the mount table spells it. For a passed descriptor that is where the
    descriptor is mounted, if this process sees that mount; it is read-only if it was mounted so."""
    fd = connection.descriptor(config.mountpoint)
    if fd is None:
        return replace(config, mountpoint=canonical(config.mountpoint))
    mount = connection.mount_of(fd)
    if mount is None:
        return replace(config, descriptor=fd)
    read_only = config.read_only or "rw" not in mount.options
    return replace(config, descriptor=fd, mountpoint=Path(mount.path), read_only=read_only)


def check(config: Config) -> list[str]:
    """Check every known reason for which this mount would fail or hang. Returns lines for the log. Raises `MountError`.

    A dead mount at the mountpoint stays until `clear` is called, just before the new mount: programs get an error from it
    meanwhile, and do not write into the bare directory."""
    _check_descriptors()
    passed = config.descriptor
    if passed is not None:
        connection.check(passed)
    elif dead_mount(config) is None:
        clear(config)
    _check_overlap(config)
    check_peers(config)
    if passed is None:
        check_rights(config.allow_other)
        return []
    mount = connection.mount_of(passed)
    return [] if mount is None else connection.remarks(mount, os.geteuid())


def check_log(config: Config) -> None:
    """Refuse, before it is made, a log below the mountpoint, which the daemon would write to itself. Raises `MountError`."""
    log, mountpoint = config.log_file, config.mountpoint
    # First without resolving links, as in `_check_overlap`.
    for resolve in (os.path.abspath, os.path.realpath):
        if log is not None and Path(resolve(log)).is_relative_to(mountpoint):
            option = "--log-file" if "log_file" in config.origins else "--cache-dir"
            raise MountError(f"the log {log} is inside the mountpoint: choose another {option}")


def dead_mount(config: Config) -> Mount | None:
    """The mount at the mountpoint if its daemon has ended; else None."""
    return mount_at(config.mountpoint) if is_dead(probe(config.mountpoint)) else None


def took_away(mount: Mount) -> str:
    """The line for users about a dead mount that was unmounted."""
    return f"took away a dead mount of {mount.source} at {mount.path}"


def _check_descriptors() -> None:
    """Raise `MountError` if the limit of open files is too low: the start would fail later, with an unclear message."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < LEAST_DESCRIPTORS:
        raise MountError(
            f"this process may open {hard} files at once, and a mount needs {LEAST_DESCRIPTORS}: raise the hard limit, "
            "ulimit -Hn or LimitNOFILE"
        )


def existing_above(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    while not os.path.exists(path) and path != path.parent:  # Path.exists raises without permission
        path = path.parent
    return path


def check_rights(allow_other: bool = False) -> None:
    """Raises `MountError` when this process may not mount anything."""
    container = "in a container add --device /dev/fuse --cap-add SYS_ADMIN"
    try:
        os.close(os.open(FUSE_DEVICE, os.O_RDWR))
    except FileNotFoundError:
        raise MountError(f"{FUSE_DEVICE} is missing: modprobe fuse; {container}") from None
    except PermissionError:
        raise MountError(
            f"no permission to open {FUSE_DEVICE}: chmod 666 {FUSE_DEVICE}; {container}"
        ) from None
    except OSError as exc:
        raise MountError(
            f"{FUSE_DEVICE} cannot be opened ({exc.strerror}): modprobe fuse; {container}"
        ) from exc
    if os.getuid() == 0:
        if not linux.has_capability(linux.CAP_SYS_ADMIN):
            raise MountError(
                "this root may not mount: give the container --cap-add SYS_ADMIN --device /dev/fuse"
            )
        return
    if shutil.which("fusermount3") is None:
        raise MountError("fusermount3 is missing: apt-get install fuse3")
    if allow_other and not _user_allow_other():
        raise MountError(
            f"--allow-other needs the line user_allow_other in {FUSE_CONF}: add it, or mount as root"
        )


def clear(config: Config) -> list[str]:
    """Unmount dead mounts at the mountpoint, and check the directory. Returns lines for the log. Raises `MountError`."""
    if config.descriptor is not None:
        return []
    notes = _clear_mountpoint(config.mountpoint)
    # Files below a dead mount are no reason to refuse: programs would then write into that directory, beside them.
    _check_directory(config, nonempty=config.nonempty or bool(notes))
    if os.getuid() != 0 and not os.access(config.mountpoint, os.W_OK):
        raise MountError(
            f"{config.mountpoint} is not writable by this user, who may therefore not mount there: chown it"
        )
    return notes


def check_peers(config: Config) -> None:
    """Check the options about peers and the files that they name. Raises `ConfigError`."""
    if config.peers is not None or any(
        name in config.origins for name, row in ROWS.items() if row.group == "Peers"
    ):
        from cachefs.peers.settings import settings

        settings(config)


def _clear_mountpoint(path: Path) -> list[str]:
    notes: list[str] = []
    for _ in range(32):  # other programs may have stacked several
        mount = mount_at(path)
        if mount is None or not mount.fstype.startswith("fuse"):
            break
        answer = probe(path)
        if is_dead(answer):
            detach(mount, lazy=True)
            notes.append(took_away(mount))
        elif isinstance(answer, OSError) and answer.errno == errno.ETIMEDOUT:
            raise MountError(f"{path} is mounted and does not answer: cachefs umount --lazy {path}")
        elif mount.is_cachefs:
            raise AlreadyMounted(f"{path} already shows {mount.source}: cachefs umount {path} first")
        else:
            break
    return notes


def _check_directory(config: Config, *, nonempty: bool) -> None:
    path = config.mountpoint
    try:
        mode = path.stat().st_mode
        if not stat.S_ISDIR(mode):
            raise MountError(f"{path} is not a directory: give an empty directory to mount on")
        with os.scandir(path) as entries:
            empty = next(entries, None) is None
    except FileNotFoundError:
        raise MountError(f"{path} does not exist: create it: mkdir -p {path}") from None
    except NotADirectoryError:
        raise MountError(f"{path} does not exist, and what is above it is a file") from None
    except OSError as exc:
        raise MountError(f"{path} cannot be used as a mountpoint: {exc.strerror}") from exc
    if not empty and not nonempty:
        raise MountError(
            f"{path} is not empty: mount on an empty directory, or cover what is there with --nonempty"
        )


def _check_overlap(config: Config) -> None:
    mountpoint = config.mountpoint
    # First without resolving links: resolving one below a mount that is not served yet would wait for this process.
    for resolve in (os.path.abspath, os.path.realpath):
        cache_dir = Path(resolve(config.cache_dir))
        if cache_dir.is_relative_to(mountpoint):
            raise MountError(
                f"the cache directory {cache_dir} is inside the mountpoint: choose another --cache-dir"
            )
        if mountpoint.is_relative_to(cache_dir):
            raise MountError(
                f"the mountpoint {mountpoint} is inside the cache directory: choose another --cache-dir"
            )
        for url in (source.url for source in config.sources if source.url.startswith("file://")):
            shown = Path(resolve(url.removeprefix("file://").removeprefix("localhost")))
            if shown.is_relative_to(mountpoint) or mountpoint.is_relative_to(shown):
                raise MountError(
                    f"{mountpoint} and its source {url} contain one another, so the mount would read itself: "
                    "mount somewhere else"
                )
    if (outer := linux.Finder().find(str(config.cache_dir))) is not None:
        raise MountError(
            f"the cache directory {config.cache_dir} is inside the cachefs mount {outer[0]}: choose another --cache-dir"
        )
    above = existing_above(config.cache_dir)
    if not above.is_dir():
        raise MountError(
            f"the cache directory {config.cache_dir} cannot be: {above} is a file: choose another --cache-dir"
        )


def _user_allow_other() -> bool:
    try:
        return any(line.strip() == "user_allow_other" for line in FUSE_CONF.read_text().splitlines())
    except OSError:
        return False


def detach(mount: Mount, *, lazy: bool) -> None:
    """Unmount a mount. Raises `OSError`: ESTALE if another mount is the topmost at its path, EBUSY, EPERM, EINVAL, …"""
    path = Path(mount.path)
    if not mount.same(mount_at(path)):
        raise OSError(errno.ESTALE, "another mount has taken its place", mount.path)
    if os.getuid() == 0:
        linux.umount(path, linux.MNT_DETACH if lazy else 0)
        return
    try:
        connection.fusermount("-u", *(["-z"] if lazy else []), "--", str(path))
    except MountError as exc:
        number = errno.EBUSY if "busy" in str(exc).lower() else errno.EPERM
        raise OSError(number, str(exc), str(path)) from exc


def holders(mount: Mount) -> list[str]:
    """Up to eight processes that have a file open or mapped below a mount, or their working directory there, as ``name (pid
    N)``. Only root sees those of other users. Compares names only, so a hanging mount does not hang it."""

    def users() -> Iterator[str]:
        for process in Path("/proc").glob("[0-9]*"):
            if int(process.name) != os.getpid() and _holds(process, mount):
                with suppress(OSError):
                    yield f"{(process / 'comm').read_text(errors='replace').strip()} (pid {process.name})"

    return list(islice(users(), 8))


def _holds(process: Path, mount: Mount) -> bool:
    below = mount.path.rstrip("/") + "/"
    try:
        links = [process / "cwd", process / "root", *(process / "fd").iterdir()]
    except OSError:
        return False
    for link in links:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target == mount.path or target.startswith(below):
            return True
    try:
        return below in (process / "maps").read_text(errors="replace")
    except OSError:
        return False

"""Where the RAM tier lies: in a tmpfs of its own if the daemon may mount one (as root), else in /dev/shm.

Only a tmpfs of its own can use huge pages, and its size is a cap that the kernel enforces. Both places outlive the daemon:
the next daemon of the same cache directory finds what a killed one has left.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import stat
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachefs.base import linux, ownership
from cachefs.base.errors import CacheUnusable

log = logging.getLogger(__name__)

SHM = Path("/dev/shm")

OWN = Path("/run/cachefs/ram")
"""Directory of the tmpfs mountpoints, one for each cache directory. Only root can write there."""

OWNER = "owner"
"""Name of a file in a RAM tier that names its daemon. The daemon keeps it locked (flock)."""

SLACK_BYTES = 64 << 10
"""How much larger than the cap a tmpfs is. Derived: the tag and the owner file take a page each; names and inodes count as
no pages."""

HUGE = "huge=within_size"
"""Measured, Linux 6.18, against pages of 4 KiB: reading 26 GB/s instead of 6, writing into warm memory 20 instead of 3,
touching mapped pages 22 M/s instead of 2, unlinking 256 MiB in 1 ms instead of 34.

Memory taken per cached byte: 1.0 for files of 100 KB and for a file written in order; 1.5 for half of a file's blocks of
1 MiB, written at random, until the neighbours are written (a page of 2 MiB is taken wherever the file covers it). `always`
takes 14 times the size of a 100 KB file, `advise` does nothing for write(2)."""

HUGE_FROM_BYTES = 512 << 20
"""A smaller tier has small pages. Derived: during transfers huge pages take some tens of MiB more than is counted, which
must fit in the tenth of the tier that spilling keeps free; otherwise a transfer ends early, and the rest of it is fetched
again. Measured, eight readers of single blocks at random in files of 256 MiB: 34 of 2,400 transfers end early with 512 MiB
(a thousandth of the bytes is fetched twice), none with 1 GiB."""

LOOK_S, LOOK_AGAIN_S = 1.0, 0.01
"""How long a starting daemon waits for the lock of its tier, and between two tries. Derived: `remove_orphans` holds it for
some microseconds, or while it removes the tier. A daemon that uses the tier is noticed before, at the index."""

_MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_NOATIME = 0x2, 0x4, 0x20, 0x400


class Place(NamedTuple):
    """A directory for a tier, and how many bytes of its file system the tier leaves free."""

    path: Path
    keep_free_bytes: int


def own_directory(cache_dir: Path) -> Path:
    """The mountpoint of the tmpfs for this cache directory."""
    return OWN / _name(cache_dir)


def shared_directory(cache_dir: Path) -> Path:
    """The directory in /dev/shm for this cache directory."""
    return SHM / _name(cache_dir)


def ram_directory(cache_dir: Path) -> Path:
    """The directory of the RAM tier of a cache directory now, if it has one."""
    own = own_directory(cache_dir)
    return own if os.path.ismount(own) else shared_directory(cache_dir)


def provide(cache_dir: Path, cap_bytes: int) -> Place:
    """Provide the best possible place for the RAM tier, with what an earlier daemon left in it, and remove the other place.
    The caller must own the cache directory. Raises `CacheUnusable`."""
    own, shared = own_directory(cache_dir), shared_directory(cache_dir)
    try:
        how = _own(own, cap_bytes)
        stats = os.statvfs(own)
    except OSError as exc:
        log.info("RAM tier: in %s, no tmpfs of its own: %s", shared, exc.strerror or exc)
        forget(own)
        return _shared(shared)
    log.info("RAM tier: in %s, a tmpfs of its own (%s)", own, how)
    forget(shared)
    # A tmpfs that held too many bytes to be made smaller is larger than the cap by more than the slack.
    return Place(own, max(0, stats.f_blocks * stats.f_frsize - cap_bytes - SLACK_BYTES))


class Left(NamedTuple):
    """A RAM tier whose daemon has ended."""

    path: Path
    cache_dir: Path
    pid: int


def claim(path: Path, cache_dir: Path) -> int:
    """Mark the tier in `path` as in use, so that `remove_orphans` keeps it, as long as the returned descriptor is open.
    OSError if the tier was removed just now, or another daemon has it."""
    fd = os.open(path / OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        _lock(fd)
        if not os.path.samestat(os.fstat(fd), os.stat(path / OWNER)):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # noqa: TRY301 - as of a call
        owner = {"cache_dir": os.path.realpath(cache_dir), "pid": os.getpid(), "started": time.time()}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(owner).encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int) -> None:
    """Take the lock of a tier, waiting `LOOK_S` for a `remove_orphans` that has it. OSError if a daemon has it."""
    until = time.monotonic() + LOOK_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise OSError(errno.EBUSY, "another daemon of this user has it") from None
        time.sleep(LOOK_AGAIN_S)


def remove_orphans() -> list[Left]:
    """Remove the RAM tiers of this user's killed daemons whose cache directory is gone, because no daemon will take them
    over. Returns the other tiers without a daemon. Memory is freed in the background."""
    left: list[Left] = []
    # glob.glob, unlike Path.glob, raises nothing for a directory that this user may not read.
    pattern = f"cachefs-{os.getuid()}-{'[0-9a-f]' * 12}"
    for path in [Path(name) for place in (OWN, SHM) for name in glob.glob(f"{place}/{pattern}")]:
        try:
            fd = os.open(path / OWNER, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue  # a daemon is about to begin there, or it is another user's
        try:
            owner = json.loads(os.pread(fd, 65536, 0))
            found = Left(path, Path(owner["cache_dir"]), int(owner["pid"]))
            used = os.path.exists(found.cache_dir)  # before the lock is taken: a disk may take long to answer
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if used:
                left.append(found)
            else:
                log.info(
                    "%s was left by process %d, and %s is gone: taken away", path, found.pid, found.cache_dir
                )
                take_away(path, later=True)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a daemon has locked the file, or is about to write it
        finally:
            os.close(fd)
    for name in glob.glob(f"{SHM}/cachefs-{os.getuid()}-*"):
        _remove_databases(Path(name))
    return left


def _remove_databases(place: Path) -> None:
    """Remove a directory of databases in shared memory that a killed daemon has left. A directory with staging files, which
    the origin may not have yet, is kept. So is one with an owner file, which is a RAM tier's."""
    if glob.glob(f"{place}/staging*/*"):
        return
    locks = [Path(name) for pattern in ("lock.pid", "*/lock.pid") for name in glob.glob(f"{place}/{pattern}")]
    if not locks or os.path.lexists(place / OWNER):
        return
    held: list[int] = []
    try:
        about = place.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            return  # another user's: any user can create names in /dev/shm
        for lock in locks:
            held.append(os.open(lock, os.O_RDWR | os.O_NOFOLLOW))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(place)
        log.info("%s was left by a daemon that was killed: taken away", place)
    except OSError:
        pass  # a daemon has locked it, or it is another user's
    finally:
        for fd in held:
            os.close(fd)


def remove_ram(cache_dir: Path) -> None:
    """Remove what an ended daemon has left in memory for this cache directory. Blocking."""
    take_away(own_directory(cache_dir))
    shutil.rmtree(shared_directory(cache_dir), ignore_errors=True)  # with an index that found no better place


def take_away(path: Path, *, later: bool = False) -> None:
    """Remove a RAM tier's directory, mounted or not, with its files. Blocking, unless the memory is freed `later`, in a
    thread. A process that has one of the files mapped keeps that file."""
    fd = _detach(path)
    if fd >= 0 and later:
        threading.Thread(target=_delete, args=(fd, path), daemon=True).start()
    elif fd >= 0:
        _delete(fd, path)


def forget(*paths: Path) -> None:
    """`take_away`, but the memory is freed in the background, so that cleaning never delays a mount. A tier that a daemon
    has is left: in another mount namespace a cache directory with the same path may be another directory."""
    for path in paths:
        try:
            fd = os.open(path / OWNER, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            take_away(path, later=True)
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            take_away(path, later=True)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


# -- a tmpfs of its own --------------------------------------------------------------------------------


def _own(path: Path, cap_bytes: int) -> str:
    """Mount a tmpfs, or resize the one that is mounted. Returns its kind of pages, for the log. OSError if it is
    impossible."""
    if os.geteuid() != 0:
        raise PermissionError(errno.EPERM, "only root can mount")
    for folder in (path.parent.parent, path.parent, path):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != 0 or found.st_mode & 0o022:  # true of a symbolic link, too
            raise PermissionError(errno.EPERM, f"others can write to {folder}")
    huge = HUGE if cap_bytes >= HUGE_FROM_BYTES else "huge=never"
    size = f"size={cap_bytes + SLACK_BYTES}"
    flags, options, how = 0, f"mode=0700,{size}", ""
    if os.path.ismount(path):
        flags, options, how = _MS_REMOUNT, size, ", left by an earlier daemon"
    try:
        _mount(path, flags, f"{options},{huge}")
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        # This kernel has no huge pages; or the tmpfs holds more than the new size, and then it keeps its size for now.
        huge = "as the kernel likes"
        try:
            _mount(path, flags, options)
        except OSError:
            if not flags:
                raise
    return huge + how


def _mount(path: Path, flags: int, options: str) -> None:
    # Not noexec: programs may be run from passthrough files.
    flags |= _MS_NOSUID | _MS_NODEV | _MS_NOATIME
    linux.mount("cachefs-ram", path, "tmpfs", flags, options)


def _unmount(path: Path) -> None:
    # Detached, because files of it may be mapped or registered as backing files: the tmpfs ends with the last of them.
    try:
        linux.umount(path, linux.MNT_DETACH | linux.UMOUNT_NOFOLLOW)
    except OSError as exc:
        log.warning("cannot unmount %s: %s", path, exc.strerror)


# -- a directory in /dev/shm ---------------------------------------------------------------------------


def _shared(path: Path) -> Place:
    if not _is_tmpfs(SHM):
        raise CacheUnusable(f"{SHM} is not a tmpfs")
    # Any user can create names in /dev/shm, and a directory of another user may hold that user's bytes.
    ownership.claim(path, whole=True)
    return Place(path, _left_to_others(SHM))


def _left_to_others(place: Path) -> int:
    """Bytes of shared memory that the RAM tier leaves free. A container may have 64 MiB of it, and data loader workers die
    of SIGBUS without."""
    try:
        stats = os.statvfs(place)
    except OSError:
        return 0
    return min(stats.f_blocks * stats.f_frsize // 2, 1 << 30)


def _is_tmpfs(path: Path) -> bool:
    return any(mount.path == str(path) and mount.fstype == "tmpfs" for mount in linux.mounts())


# -- removing ------------------------------------------------------------------------------------------


def _detach(path: Path) -> int:
    """Empty `path`, so that another tier can begin there. Returns a descriptor of the directory that has the tier's files
    now, -1 if there is no directory of this user."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return -1
    if os.fstat(fd).st_uid != os.getuid():
        os.close(fd)
        return -1
    for name in ("tag", OWNER):
        with suppress(OSError):
            os.unlink(name, dir_fd=fd)
    with suppress(OSError):
        os.rename("objects", f"trash-{uuid.uuid4().hex}", src_dir_fd=fd, dst_dir_fd=fd)
    if os.path.ismount(path):
        _unmount(path)
    with suppress(OSError):
        os.rmdir(path)
    return fd


def _delete(fd: int, path: Path) -> None:
    """Delete the files that `_detach` left, and close its descriptor. Closing alone would not free an unmounted tmpfs if
    another mount namespace has a copy of the mount."""
    with suppress(OSError):
        for name in os.listdir(fd):
            if name.startswith("trash-"):
                shutil.rmtree(name, ignore_errors=True, dir_fd=fd)
    os.close(fd)
    with suppress(OSError):  # it was removed, or holds files of another program
        os.rmdir(path)


def _name(cache_dir: Path) -> str:
    """The name of a cache directory's RAM tier: the same for each daemon, so that the next one finds it after kill -9."""
    tag = hashlib.blake2b(os.fsencode(os.path.realpath(cache_dir)), digest_size=6).hexdigest()
    return f"cachefs-{os.getuid()}-{tag}"

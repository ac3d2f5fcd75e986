"""/proc and libc: mounts, memory limits, processes.

Reading `/proc/self/mountinfo` makes no request to a mount, so it works also when the filesystem behind a path hangs or is
dead. Standard library and Python 3.9 only: `cachefs.hints` uses this module in training images.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import posixpath
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

HANGS_AFTER_S = 5.0
"""A call on a disk, a statfs of a mount or a notice to the kernel that lasts longer hangs. A caller that blocks others, by
the lock of a name, say, waits no longer, and a stop leaves to the next start what a disk has not done by then. Promised in
docs/guarantees.md: disks retry a bad sector for a second or two, and a request has 60 s (`--timeout`)."""

LOOK_EVERY_S = HANGS_AFTER_S / 10
"""How often the running calls on a disk are checked, and how long to wait before an operation that the machine refused is
repeated, because nothing reports that it can be done now: starting a thread, committing rows. Derived: a hang is noticed a
tenth late at most."""

CAP_SYS_ADMIN = 21
MNT_FORCE, MNT_DETACH, UMOUNT_NOFOLLOW = 1, 2, 8
"""Flags of umount2(2)."""

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_PR_SET_PDEATHSIG = 1
_MADV_DONTNEED = 4
_PUNCH = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE

_OPENAT2, _AT_FDCWD, _RESOLVE_CACHED = 437, -100, 0x20
_HOW = (ctypes.c_uint64 * 3)(os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, 0, _RESOLVE_CACHED)


def release(text: str | None = None) -> tuple[int, ...]:
    """(major, minor) of the running kernel's version, or of `text` ("6.18.44-…")."""
    numbers = (os.uname().release if text is None else text).split("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. The caller checks that it has not ended
    yet."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def cached_lstat(path: str) -> os.stat_result | None:
    """`os.lstat` without reading the disk; None if the kernel would have to read it, and before Linux 5.12."""
    fd: int = libc.syscall(_OPENAT2, _AT_FDCWD, os.fsencode(path), ctypes.byref(_HOW), ctypes.sizeof(_HOW))
    if fd < 0:
        if ctypes.get_errno() == errno.ENOENT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def boot_id() -> str:
    """The identifier of this boot of the machine. Raises `OSError` without /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# -- calls that `os` does not have -----------------------------------------------------------------


def checked(result: int, path: str | Path | None = None) -> int:
    """The result of a function of libc. Raises `OSError` with errno if it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), None if path is None else str(path))
    return result


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """syscall(2). Raises `OSError`."""
    wide = (ctypes.c_long(given) if isinstance(given, int) else given for given in arguments)
    return checked(libc.syscall(ctypes.c_long(number), *wide))


def mount(source: str, path: str | Path, fstype: str, flags: int = 0, options: str = "") -> None:
    """mount(2). Raises `OSError`."""
    checked(libc.mount(source.encode(), os.fsencode(path), fstype.encode(), flags, options.encode()), path)


def umount(path: str | Path, flags: int = 0) -> None:
    """umount2(2). Raises `OSError`."""
    checked(libc.umount2(os.fsencode(path), flags), path)


def punch(fd: int, offset: int, length: int) -> bool:
    """Punch a hole into an open file. False if the file system cannot do that."""
    done: int = libc.fallocate(fd, _PUNCH, offset, length)
    return done == 0


def unmap_pages(start: int, stop: int) -> None:
    """Give back the memory of the pages at the addresses [start, stop) of this process. Those of a file are read again."""
    libc.madvise(start, stop - start, _MADV_DONTNEED)


# -- mounts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. `number` identifies the mount until it is unmounted, and is then reused; `device` is
    "major:minor"; `root` is the part of the filesystem that is mounted at `path`."""

    device: str
    root: str
    path: str
    fstype: str
    source: str
    options: tuple[str, ...]
    number: int = 0

    @property
    def owner(self) -> int | None:
        """The uid of the user that mounted a FUSE filesystem."""
        found = (option.removeprefix("user_id=") for option in self.options if option.startswith("user_id="))
        uid = next(found, "")
        return int(uid) if uid.isdigit() else None

    def same(self, other: Mount | None) -> bool:
        """True if `other`, read later, is this mount: same number and same description, because numbers are reused."""
        return other is not None and replace(other, options=self.options) == self

    @property
    def is_cachefs(self) -> bool:
        return self.fstype == "fuse.cachefs" or (self.fstype == "fuse" and self.source == "cachefs")


def parse(text: str) -> list[Mount]:
    """The mounts in mountinfo's order: of several on one path, the last one is on top."""
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        before, after = left.split(" "), right.split(" ")
        if not separator or len(before) < 6 or len(after) < 3:
            continue
        mounts.append(
            Mount(
                device=before[2],
                root=unescape(before[3]),
                path=unescape(before[4]),
                fstype=after[0],
                source=unescape(after[1]),
                options=(*before[5].split(","), *after[2].split(",")),
                number=int(before[0]),
            )
        )
    return mounts


def unescape(field: str) -> str:
    """Undo the kernel's octal escapes of space, tab, newline, backslash and #."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def mounts(root: Path = Path("/")) -> list[Mount]:
    """The mounts in this process's namespace; none without /proc."""
    try:
        text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return parse(text)


def mount_at(path: Path) -> Mount | None:
    """The topmost mount whose mountpoint is exactly `path`."""
    return next((mount for mount in reversed(mounts()) if mount.path == str(path)), None)


def elsewhere(mount: Mount) -> list[str]:
    """The other mountpoints of the same filesystem in this process's namespace (bind mounts)."""
    return [other.path for other in mounts() if other.device == mount.device and other.path != mount.path]


class Finder:
    """Finds the cachefs mount that a path lies below, for long lists of paths.

    A path that begins with a mountpoint needs no system call. In any other path, the links in its directory are resolved,
    once for each directory."""

    def __init__(self) -> None:
        found = {mount.path for mount in mounts() if mount.is_cachefs}
        # The longest first, so that of nested mounts the inner one is found.
        self._inside = sorted(((path, path.rstrip("/") + "/") for path in found), key=lambda m: -len(m[1]))
        self._resolved: dict[str, str] = {}

    def find(self, path: str) -> tuple[str, str] | None:
        """(mountpoint, path relative to it); None if the path is below no cachefs mount."""
        if "//" in path or "/." in path:
            path = os.path.normpath(path)
        return self._split(path) or self._split(self._resolve(path))

    def _split(self, path: str) -> tuple[str, str] | None:
        for mountpoint, inside in self._inside:
            if path.startswith(inside):
                return mountpoint, path[len(inside) :]
            if path == mountpoint:
                return mountpoint, ""
        return None

    def _resolve(self, path: str) -> str:
        directory, name = os.path.split(os.path.abspath(path))
        resolved = self._resolved.get(directory)
        if resolved is None:
            resolved = self._resolved[directory] = os.path.realpath(directory)
        return os.path.join(resolved, name)


def probe(path: Path, timeout_s: float = HANGS_AFTER_S) -> os.stat_result | OSError:
    """`os.stat` of a mountpoint, answered by its daemon; the error if it fails, ETIMEDOUT after `timeout_s`."""
    answer: list[os.stat_result | OSError] = []

    def ask() -> None:
        try:
            os.statvfs(path)  # for stat, the kernel's attribute cache would answer in place of a dead daemon
            answer.append(path.stat())
        except OSError as exc:
            answer.append(exc)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answer[0] if answer else OSError(errno.ETIMEDOUT, "did not answer")


def is_dead(answer: os.stat_result | OSError) -> bool:
    """True if the mount's daemon has ended ("Transport endpoint is not connected")."""
    return isinstance(answer, OSError) and answer.errno in (errno.ENOTCONN, errno.ECONNABORTED)


# -- memory ----------------------------------------------------------------------------------------

LIMIT_FILES = {
    "cgroup2": ("memory.max", "memory.high"),  # beyond `high` the kernel throttles, so it counts as a limit
    "cgroup": ("memory.limit_in_bytes",),
}


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process may use: the smallest limit of the machine and of its control groups.

    The OOM killer enforces a container's limit, which may be set on any parent group, under cgroup v1 or v2. A file that
    cannot be read sets no limit. /proc and /sys are read below `root`."""
    return min([_machine_memory(root), *_group_limits(root)])


def _machine_memory(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_limits(root: Path) -> Iterator[int]:
    for fstype, group in _groups(root):
        for mount in mounts(root):
            if mount.fstype != fstype or (fstype == "cgroup" and "memory" not in mount.options):
                continue
            top = root / mount.path.lstrip("/")
            for directory in _upwards(top, group, mount.root):
                yield from _limits_in(directory, LIMIT_FILES[fstype])


def _groups(root: Path) -> list[tuple[str, str]]:
    """(filesystem type, group) of this process, one for each hierarchy that can limit memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        hierarchy, controllers, group = [*line.split(":", 2), "", "", ""][:3]
        if hierarchy == "0" and not controllers:
            groups.append(("cgroup2", group))
        elif "memory" in controllers.split(","):
            groups.append(("cgroup", group))
    return groups


def _upwards(top: Path, group: str, mount_root: str) -> Iterator[Path]:
    """The group's directory and its parents up to `top`. In a container the mount may show only a part of the tree
    (`mount_root`), and the group's name may be the host's, so directories may be missing."""
    relative = posixpath.relpath(group, mount_root) if mount_root not in ("/", "") else group.lstrip("/")
    if relative.startswith(".."):
        relative = ""
    directory = top / relative
    return itertools.takewhile(lambda place: place.is_relative_to(top), (directory, *directory.parents))


def _limits_in(directory: Path, names: tuple[str, ...]) -> Iterator[int]:
    for name in names:
        try:
            limit = int((directory / name).read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
        if limit > 0:
            yield limit


# -- processes -------------------------------------------------------------------------------------


class Identity(NamedTuple):
    """The process of a thread. `started` distinguishes it from an earlier one with the same pid."""

    pid: int
    started: int
    parent: int
    name: str


UNSEEN = Identity(0, 0, 0, "?")
"""The kernel, or a process outside of this PID namespace."""


def identify(thread: int) -> Identity:
    """The process of a thread; `UNSEEN` if /proc does not show it."""
    try:
        lines = Path(f"/proc/{thread}/status").read_text(errors="replace").splitlines()
        pid = next(int(line.split()[1]) for line in lines if line.startswith("Tgid:"))
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        name, after = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        return Identity(pid, int(after[19]), int(after[1]), name)
    except (OSError, ValueError, IndexError, StopIteration):
        return UNSEEN


def descendants(pid: int) -> set[int]:
    """The pids of a process and all its present descendants."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
                parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    found, before = {pid}, 0
    while len(found) > before:
        before = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def resident_bytes(*, of_files: bool = False) -> int:
    """Resident memory of this process; with `of_files`, the part that is backed by files."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[2 if of_files else 1]) * os.sysconf("SC_PAGE_SIZE")


def has_capability(capability: int) -> bool:
    """True if this process has the capability, or if /proc cannot be read."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return True
    return bool(mask >> capability & 1)

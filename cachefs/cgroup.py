"""How much memory this process may use: the smallest limit among the machine and its control groups.

A container's limit is what the OOM killer enforces, and it may sit on any parent group, under cgroup v1 or
v2. All are asked; what cannot be read does not limit.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from pathlib import Path

from cachefs.mountinfo import mounts

LIMIT_FILES = {
    "cgroup2": ("memory.max", "memory.high"),  # beyond `high` the kernel throttles: as good as a limit
    "cgroup": ("memory.limit_in_bytes",),
}


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes this process may use at most. `root` is where /proc and /sys are looked for."""
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
    """The group's directory and its parents up to `top`. In a container the mount may show only a part of the
    tree (`mount_root`), and the group's name may be the host's: what does not exist here is skipped."""
    relative = posixpath.relpath(group, mount_root) if mount_root not in ("/", "") else group.lstrip("/")
    if relative.startswith(".."):
        relative = ""
    directory = top / relative
    while True:
        yield directory
        if directory == top:
            return
        directory = directory.parent


def _limits_in(directory: Path, names: tuple[str, ...]) -> Iterator[int]:
    for name in names:
        try:
            limit = int((directory / name).read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
        if limit > 0:
            yield limit

"""What the kernel says is mounted: `/proc/self/mountinfo`, parsed.

Asking this file never touches a mount, so it answers also when the filesystem behind a path hangs or is dead.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. `number` is the kernel's name of the mount, which it gives again once the mount has gone;
    `device` is "major:minor"; `root` is the part of the filesystem that is mounted here."""

    device: str
    root: str
    path: str
    fstype: str
    source: str
    options: tuple[str, ...]
    number: int = 0

    @property
    def owner(self) -> int | None:
        """The user who mounted a FUSE filesystem."""
        found = (option.removeprefix("user_id=") for option in self.options if option.startswith("user_id="))
        uid = next(found, "")
        return int(uid) if uid.isdigit() else None

    def same(self, other: Mount | None) -> bool:
        """Whether `other`, seen later, is this mount. Numbers alone do not tell, as they are given again."""
        return other is not None and self.identity == other.identity

    @property
    def identity(self) -> tuple[object, ...]:
        return self.number, self.device, self.root, self.path, self.fstype, self.source

    @property
    def is_cachefs(self) -> bool:
        return self.fstype == "fuse.cachefs" or (self.fstype == "fuse" and self.source == "cachefs")


def parse(text: str) -> list[Mount]:
    """Every line, in mount order: of several on one path the last is the one that is seen."""
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
    """All mounts this process sees; none where there is no /proc."""
    try:
        text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return parse(text)


def mount_at(path: Path) -> Mount | None:
    """The topmost mount whose mountpoint is exactly `path`."""
    found = [mount for mount in mounts() if mount.path == str(path)]
    return found[-1] if found else None


class Finder:
    """Which cachefs mount a path lies below, for long lists of paths.

    A path that begins with a mountpoint is found by its text alone; any other has the links above its name resolved,
    once for each directory. No path is touched that lies below a mount already."""

    def __init__(self) -> None:
        found = {mount.path for mount in mounts() if mount.is_cachefs}
        # Of mounts within one another the inner one is meant.
        self._inside = sorted(((path, path.rstrip("/") + "/") for path in found), key=lambda m: -len(m[1]))
        self._resolved: dict[str, str] = {}

    def find(self, path: str) -> tuple[str, str] | None:
        """(mountpoint, path relative to it); None when there is no such mount."""
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

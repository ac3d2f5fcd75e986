"""Small state files that survive a power cut: replaced as a whole, and on the disk when a call returns.

POSIX orders nothing by itself. A file that was renamed without an fsync can be empty after a power cut; a name can be
missing, or an older one be back, until its directory is synced. So a file is written beside its place, synced, renamed,
and then its directory is synced: every prefix of these steps leaves either the old content or the new one. All calls
block, and raise `OSError`.
"""

from __future__ import annotations

import os
from pathlib import Path

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700


def write(path: Path, data: str | bytes) -> None:
    """Replace the content of `path`. On an error the old content stays."""
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.unlink(missing_ok=True)  # an earlier one may have another owner, or be a link
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        try:
            left = memoryview(data.encode() if isinstance(data, str) else data)
            while left:
                left = left[os.write(fd, left) :]
            os.fchmod(fd, PRIVATE_FILE)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def put(fresh: Path, path: Path) -> None:
    """Move a file that is complete to its place, in place of what is there."""
    sync_file(fresh)
    os.rename(fresh, path)
    sync_directory(path.parent)


def remove(*paths: Path) -> None:
    """Remove files of one directory; those that do not exist are left out."""
    for path in paths:
        path.unlink(missing_ok=True)
    sync_directory(paths[0].parent)


def make_directory(path: Path) -> None:
    """Make the directory and its parents, for its owner only. One that exists gets that mode; its parents keep theirs."""
    for directory in reversed([place for place in (path, *path.parents) if not place.exists()]):
        directory.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
        sync_directory(directory.parent)
    path.mkdir(exist_ok=True)  # raises where a file is in its place
    os.chmod(path, PRIVATE_DIRECTORY)


def sync_file(path: Path) -> None:
    _sync(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """The names in it are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

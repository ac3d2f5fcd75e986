"""Small state files that survive a power cut: they are replaced as a whole, and are on the disk when a call returns.

POSIX alone orders no writes. A file that was renamed without an fsync can be empty after a power cut; a new name can be
missing, or a removed one present, until its directory is synced. So a file is written under another name, synced and
renamed, and then its directory is synced: a power cut between any two steps leaves the old content or the new one. All
calls block, and raise `OSError`.
"""

from __future__ import annotations

import os
from pathlib import Path

from cachefs.base.ownership import DIRECTORY_MODE, FILE_MODE


def write(path: Path, data: str | bytes) -> None:
    """Replace the content of `path`. After an error the old content is still there."""
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.unlink(missing_ok=True)  # a file left by a crash may have another owner, or be a link
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            left = memoryview(data.encode() if isinstance(data, str) else data)
            while left:
                left = left[os.write(fd, left) :]
            os.fchmod(fd, FILE_MODE)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def overwrite(path: Path, data: str) -> None:
    """Write the content of an existing file in its place, which takes no space. A power cut may leave a part of it."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data.encode(), 0)
        os.ftruncate(fd, len(data.encode()))
        os.fsync(fd)
    finally:
        os.close(fd)


def put(fresh: Path, path: Path) -> None:
    """Move a complete file to `path`, and replace what is there."""
    _sync(fresh, os.O_RDONLY)
    os.rename(fresh, path)
    sync_directory(path.parent)


def remove(*paths: Path) -> None:
    """Remove files of one directory. Missing ones are ignored."""
    for path in paths:
        path.unlink(missing_ok=True)
    sync_directory(paths[0].parent)


def make_directory(path: Path) -> None:
    """Make the directory and its missing parents, with mode 0700. An existing directory gets it, too; its parents do not."""
    for directory in reversed([place for place in (path, *path.parents) if not place.exists()]):
        directory.mkdir(DIRECTORY_MODE, exist_ok=True)
        sync_directory(directory.parent)
    path.mkdir(exist_ok=True)  # raises if a file is in its place
    os.chmod(path, DIRECTORY_MODE)


def sync_directory(path: Path) -> None:
    """Put the names in the directory on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

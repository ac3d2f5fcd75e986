"""Files of cachefs on disks that other users can write to: directories of mode 0700, files of mode 0600, no links.

Another user's directory may contain links, through which the daemon would write elsewhere, and its owner can replace the
daemon's files. So it is refused, whatever its mode: root does not use a user's directory, nor a user root's. Entries with
names of cachefs are refused, too, if they belong to another user, who may have been able to write there once. The parent
directories are not checked: they may be open to all users, as /tmp is.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from cachefs.base.errors import CacheUnusable

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

OURS = frozenset(
    (
        "objects",
        "index",
        "names",
        "journal",
        "staging",
        "plans",
        "probe",
        "tag",
        "held",
        "node",
        "node.new",
        "lost+found",
    )
)
OURS_BEGIN = ("cachefs.log", "trash-", "staging.", "index.", "names.", "journal.")
"""Names, and beginnings of names, that cachefs makes in a cache directory. A directory with no others is cachefs's own."""

WITHOUT_MODES = (errno.EROFS, errno.EPERM, errno.EOPNOTSUPP)
"""Errors of a filesystem that cannot change a mode."""


class ForeignDirectory(CacheUnusable):
    """Another user owns the directory, or an entry in it that has a name of cachefs."""


def check(path: Path, *, links: bool = True) -> None:
    """Raise `ForeignDirectory` unless `path` is a directory of this user, or missing. Changes nothing. `links`: follow a
    link that root or this user made (systemd's DynamicUser makes one)."""
    try:
        link = path.lstat()
        found = path.stat()
    except OSError:
        return  # missing, or out of reach: creating it or writing there gives the error
    if stat.S_ISLNK(link.st_mode) and not (links and link.st_uid in (0, os.geteuid())):
        raise ForeignDirectory(f"{path} is a link of {_user(link.st_uid)}: choose another directory")
    if stat.S_ISDIR(found.st_mode) and found.st_uid != os.geteuid():
        raise ForeignDirectory(
            f"{path} belongs to {_user(found.st_uid)}, and this is {_user(os.geteuid())}: "
            "choose another directory, or chown it"
        )


def claim(path: Path, *, whole: bool = False) -> None:
    """Create the directory, or use an existing one: afterwards no other user can read the files of cachefs in it. Raises
    `ForeignDirectory`, also for entries of a third user; `OSError` if it cannot be created.

    A directory with no other files gets mode 0700. One with other files (a whole disk) keeps its mode; it is refused if
    other users can write to it, because they could put links in place of the files of cachefs. `whole`: the directory is
    cachefs's own, all entries in it are, whatever their names, and it must not be a link."""
    for missing in reversed([path, *path.parents]):
        if not os.path.lexists(missing):
            missing.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    check(path, links=not whole)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():  # it was replaced after the check
            raise ForeignDirectory(f"{path} belongs to {_user(found.st_uid)}: choose another directory")
        names = os.listdir(fd)
        others_write = bool(found.st_mode & 0o022)
        ours = names if whole else [name for name in names if name in OURS or name.startswith(OURS_BEGIN)]
        other = None if len(ours) == len(names) else next(name for name in names if name not in ours)
        if other is not None and others_write:
            raise ForeignDirectory(
                f"others can write to {path}, and there is {other!r} in it: choose a directory below it"
            )
        for name in ours:
            # Since the listing, a thread may have deleted what an earlier daemon left, or what this one dropped ("trash-…").
            with suppress(FileNotFoundError):
                _take_entry(fd, path, name, others_write)
        if other is None:  # last: a directory that was refused above must be refused again
            _narrow(found.st_mode, DIRECTORY_MODE, partial(os.fchmod, fd))
    finally:
        os.close(fd)


def _take_entry(fd: int, path: Path, name: str, others_write: bool) -> None:
    entry = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if others_write and (stat.S_ISLNK(entry.st_mode) or entry.st_uid != os.geteuid()):
        raise ForeignDirectory(
            f"others can write to {path}, and {name!r} in it is a link or not ours: remove it"
        )
    # Other users may have been able to write here before. Root can replace our files anyway; a third user must not.
    if entry.st_uid not in (0, os.geteuid()):
        raise ForeignDirectory(
            f"{path / name} belongs to {_user(entry.st_uid)}, and this is {_user(os.geteuid())}: chown or remove it"
        )
    plain = stat.S_ISDIR(entry.st_mode) or stat.S_ISREG(entry.st_mode)
    if plain and entry.st_uid == os.geteuid():
        _narrow(entry.st_mode, DIRECTORY_MODE, partial(os.chmod, name, dir_fd=fd))


def open_file(path: Path | str, flags: int) -> int:
    """Open a file of cachefs. With O_CREAT in `flags` it gets mode 0600. `OSError` (ELOOP) if it is a link."""
    fd = os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)
    try:
        if flags & os.O_CREAT:
            _narrow(os.fstat(fd).st_mode, FILE_MODE, partial(os.fchmod, fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(path: Path) -> bytes:
    with open(path, "rb", opener=open_file) as file:
        return file.read()


def _narrow(mode: int, allowed: int, change: Callable[[int], None]) -> None:
    """Remove the permissions that are not in `allowed`, by a call of `change`, if the filesystem has modes."""
    if mode & ~allowed & 0o777:
        try:
            change(stat.S_IMODE(mode) & allowed)
        except OSError as exc:
            if exc.errno not in WITHOUT_MODES:
                raise


def _user(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"

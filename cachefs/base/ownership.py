"""What is ours on disks that others use, too: directories of mode 0700, files of mode 0600, and nothing behind a link.

A directory of another user may hold links that were put there for us to write through, and its owner can replace what we
wrote. So it is refused, whatever its mode: root does not use a user's directory, nor a user root's. The same holds for what
is in it under a name of ours, because others may have been able to write there once. Only the directory itself and what is
below is looked at: above may be a place for everybody, such as /tmp.
"""

from __future__ import annotations

import errno
import os
import stat
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
"""What we make in a cache directory. A directory that has only such is one of ours."""

WITHOUT_MODES = (errno.EROFS, errno.EPERM, errno.EOPNOTSUPP)
"""What a file system says that cannot change a mode."""


class ForeignDirectory(CacheUnusable):
    """A directory that others own, or in which they put a link where a file of ours would be."""


def check(path: Path, *, links: bool = True) -> None:
    """Raises `ForeignDirectory` unless `path` is a directory of this user, or is not there yet. Changes nothing. A link that
    root or this user made is followed with `links`: it says where the directory is (systemd's DynamicUser makes one)."""
    try:
        link = path.lstat()
        found = path.stat()
    except OSError:
        return  # missing, or out of reach: making it or writing there tells more
    if stat.S_ISLNK(link.st_mode) and not (links and link.st_uid in (0, os.geteuid())):
        raise ForeignDirectory(f"{path} is a link of {_user(link.st_uid)}: choose another directory")
    if stat.S_ISDIR(found.st_mode) and found.st_uid != os.geteuid():
        raise ForeignDirectory(
            f"{path} belongs to {_user(found.st_uid)}, and this is {_user(os.geteuid())}: "
            "choose another directory, or chown it"
        )


def claim(path: Path, *, whole: bool = False) -> None:
    """Make the directory, or take the one that is there: afterwards no other user can look into what is ours in it.
    Raises `ForeignDirectory`, also for what a third user left there; `OSError` where it cannot be made.

    One that holds nothing but our files gets mode 0700. One that holds other things, too (a whole disk), keeps its mode,
    unless others can write there: then they could put links in place of our files. `whole`: a
    directory that only we make; all in it is ours, whatever the names, and it is no link."""
    for missing in reversed([path, *path.parents]):
        if not os.path.lexists(missing):
            missing.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    check(path, links=not whole)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():  # it was exchanged since
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
            _take_entry(fd, path, name, others_write)
        if other is None:  # last, so that what was refused is refused again
            _narrow(fd, found.st_mode, DIRECTORY_MODE)
    finally:
        os.close(fd)


def _take_entry(fd: int, path: Path, name: str, others_write: bool) -> None:
    entry = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if others_write and (stat.S_ISLNK(entry.st_mode) or entry.st_uid != os.geteuid()):
        raise ForeignDirectory(
            f"others can write to {path}, and {name!r} in it is a link or not ours: remove it"
        )
    # Others could write here once, or a link led here: root can replace what is ours anyway, a third user must not.
    if entry.st_uid not in (0, os.geteuid()):
        raise ForeignDirectory(
            f"{path / name} belongs to {_user(entry.st_uid)}, and this is {_user(os.geteuid())}: chown or remove it"
        )
    plain = stat.S_ISDIR(entry.st_mode) or stat.S_ISREG(entry.st_mode)
    if plain and entry.st_uid == os.geteuid() and entry.st_mode & 0o077:
        try:
            os.chmod(name, stat.S_IMODE(entry.st_mode) & DIRECTORY_MODE, dir_fd=fd)
        except OSError as exc:
            if exc.errno not in WITHOUT_MODES:
                raise


def open_file(path: Path | str, flags: int) -> int:
    """A descriptor of a file of ours, of mode 0600, made if `flags` say so. `OSError` (ELOOP) where it is a link."""
    fd = os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)
    try:
        if flags & os.O_CREAT:
            _narrow(fd, os.fstat(fd).st_mode, FILE_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(path: Path) -> bytes:
    with open(path, "rb", opener=open_file) as file:
        return file.read()


def _narrow(fd: int, mode: int, allowed: int) -> None:
    """Take away the permissions that `allowed` does not have."""
    if mode & ~allowed & 0o777:
        try:
            os.fchmod(fd, stat.S_IMODE(mode) & allowed)
        except OSError as exc:
            if exc.errno not in WITHOUT_MODES:
                raise


def _user(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"

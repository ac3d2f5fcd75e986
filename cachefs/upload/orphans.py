"""Orphans: staging files that no journal accounts for. They are moved to a directory of their own, and never removed.

A file without a row was never acknowledged, unless it was written under another journal, which was removed or replaced: then
it may be the only copy of a user's data. Only the mark of the file itself distinguishes the two cases. So a start removes a
file without a row only if its mark says that it was never acknowledged, or if it is empty and has no mark. It moves all
others to `staging.orphaned-TIME` beside the staging directory. `cachefs recover` lists these and copies them to where they
belong.

A staging file has two extended attributes. `ACKNOWLEDGED` is the mark. It is `NO` from when the file is made, `YES` once it
is acknowledged, and `NO` again before its row is removed. `OBJECT` has the source, the key and the mtime of its row. It is
set before the row is written, so that a file that is marked `YES` has its name. On a file system without extended
attributes no file loses bytes: all that is left in the staging directory is kept, without names.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from cachefs.base import durable
from cachefs.base.errors import CacheUnusable
from cachefs.upload.staging import ACKNOWLEDGED, NO

log = logging.getLogger(__name__)

OBJECT = "user.cachefs.object"
"""The extended attribute with the fields `_DESCRIBED` of the file's row, as JSON."""
YES = b"1"
"""The value of `ACKNOWLEDGED` for a file that was acknowledged."""

_OURS = re.compile(r"[0-9a-f]{32}(\.[0-9]+)?")
"""Names that the daemon gives to staging files; those that are being made end in ".0"."""
_DESCRIBED = ("source", "key", "mtime_ns")


class Orphan(NamedTuple):
    """An orphan that was moved aside; or, if `waiting`, a file in the staging directory of a cache that no daemon uses,
    which the next mount uploads, removes or moves aside. `size` is in bytes. `source` and `key` are "" if the file does not
    have the attribute `OBJECT`. With a `content`, the journal has the bytes, and what is at `path` does not count."""

    path: Path
    size: int
    mtime_ns: int
    source: str
    key: str
    waiting: bool
    content: bytes | None = None


# -- the attributes of a staging file: blocking, never raises --------------------------------------------


def describe(path: Path, row: Mapping[str, Any]) -> None:
    """Set `OBJECT`, from the file's row in the journal."""
    _put(path, OBJECT, json.dumps({name: row[name] for name in _DESCRIBED}).encode())


def acknowledge(path: Path) -> None:
    """Mark a file as acknowledged, or remove the mark if it cannot be set."""
    if not _put(path, ACKNOWLEDGED, YES):
        _remove(path, ACKNOWLEDGED)  # otherwise the old mark, `NO`, would let a start remove the file


def mark(path: Path, row: Mapping[str, Any]) -> None:
    """Set both attributes of a staging file that is acknowledged."""
    describe(path, row)
    acknowledge(path)


def forget(path: Path) -> None:
    """Mark a file as not acknowledged and remove `OBJECT`, because the origin has its content or its name is removed: the
    next start need not keep it."""
    disown(path)
    _remove(path, OBJECT)


def disown(path: Path) -> None:
    """As `forget`, for a file that is about to be removed: `OBJECT` stays."""
    _put(path, ACKNOWLEDGED, NO)


def never_acknowledged(path: Path) -> bool:
    """True if the file is marked `NO`. A file without a mark may have been acknowledged: the file system takes no
    attributes, or the file was copied to this directory."""
    try:
        return os.getxattr(path, ACKNOWLEDGED, follow_symlinks=False) == NO
    except OSError:
        return False


def _put(path: Path, name: str, value: bytes) -> bool:
    """Set an attribute. False if the file does not exist, or the file system refuses."""
    try:
        os.setxattr(path, name, value, follow_symlinks=False)
    except OSError as exc:
        log.debug("%s does not take an attribute: %s", path, exc.strerror)
        return False
    return True


def _remove(path: Path, name: str) -> None:
    with suppress(OSError):
        os.removexattr(path, name, follow_symlinks=False)


# -- at a start: blocking ------------------------------------------------------------------------------


def is_removable(staging: Path, name: str) -> bool:
    """True if a start may remove a staging file that has no row in the journal. Its name must be one that the daemon gives.
    And either it is marked as not acknowledged, or the daemon died while it made the file, before the first mark and the
    first byte."""
    return bool(_OURS.fullmatch(name)) and (never_acknowledged(staging / name) or _is_blank(staging / name))


def _is_blank(path: Path) -> bool:
    """True if the file is empty and has none of the two attributes."""
    try:
        return not path.lstat().st_size and not {ACKNOWLEDGED, OBJECT} & set(os.listxattr(path))
    except OSError:
        return False


def set_aside(staging: Path, names: Collection[str], why: str) -> None:
    """Move these files, if any, to a new directory beside the staging directory, and log that with the reason `why`. Raises
    `CacheUnusable`."""
    if not names:
        return
    stem = f"{staging.name}.orphaned-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}."
    try:
        place = Path(tempfile.mkdtemp(prefix=stem, dir=staging.parent))
        for name in names:
            (staging / name).rename(place / name)
        for directory in (place, staging, staging.parent):
            durable.sync_directory(directory)
    except OSError as exc:
        raise CacheUnusable(f"cannot keep {staging} aside in {staging.parent}: {exc.strerror}") from exc
    log.warning("%s: %d files of %s are kept in %s", why, len(names), staging, place)


def without_journal(staging: Path, journal: Path) -> None:
    """If there is no journal yet, move all files of the staging directory aside, because they were written under another
    one. Called before the journal is made. Raises `CacheUnusable`."""
    if not (journal / "data.mdb").exists():
        set_aside(staging, _names(staging), f"there is no journal in {journal}")


# -- orphans that were moved aside: blocking -----------------------------------------------------------


def places(state_dir: Path) -> list[Path]:
    """The directories of orphans that were moved aside, the newest first."""
    try:
        return sorted((p for p in state_dir.glob("staging.orphaned-*") if p.is_dir()), reverse=True)
    except OSError:
        return []


def warning(state_dir: Path) -> str:
    """One line for users about the orphans that were moved aside; "" if there are none."""
    count = sum(len(_names(place)) for place in places(state_dir))
    if not count:
        return ""
    files = "1 file" if count == 1 else f"{count} files"
    return (
        f"{files} that no journal accounts for may be the only copy of what was written: cachefs recover {state_dir} "
        "lists them"
    )


def found(state_dir: Path, *, waiting: bool) -> list[Orphan]:
    """All orphans that were moved aside; with `waiting`, also the files in the staging directory. The last changed file
    comes first."""
    files = [_orphan(path / name, waiting=False) for path in places(state_dir) for name in _names(path)]
    staging = state_dir / "staging"
    if waiting:
        files += [_orphan(staging / name, waiting=True) for name in _names(staging)]
    return sorted((file for file in files if file is not None), key=lambda file: -file.mtime_ns)


def remove(orphan: Orphan) -> None:
    """Remove an orphan that was copied elsewhere, and its directory after the last one. Raises OSError."""
    orphan.path.unlink()
    with suppress(OSError):
        orphan.path.parent.rmdir()  # fails while other files are in it


@contextmanager
def unused(state_dir: Path) -> Iterator[bool]:
    """True if no daemon uses the journal; then none can open it while the block runs. True without that promise if the lock
    file cannot be opened, as before the first mount."""
    try:
        fd = os.open(state_dir / "journal" / "lock.pid", os.O_RDWR)
    except OSError:
        yield True  # usually because no daemon has ever used it
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _orphan(path: Path, *, waiting: bool) -> Orphan | None:
    """Describe a file by its attributes; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None  # removed since its directory was listed
    described: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        described = json.loads(os.getxattr(path, OBJECT))
    source, key = str(described.get("source", "")), str(described.get("key", ""))
    return Orphan(
        path, status.st_size, int(described.get("mtime_ns") or status.st_mtime_ns), source, key, waiting
    )


def _names(directory: Path) -> Sequence[str]:
    """The names in a directory, sorted; none if it cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []

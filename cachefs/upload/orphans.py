"""Staging files that no journal accounts for: kept aside, never removed.

The journal says which staging files hold something that was acknowledged. A file that it does not name was never
acknowledged, unless the journal is another one than the file was written under: then it may be the only copy of what a user
wrote. Only the file's own mark tells the two apart, so a file without a mark is kept. Such files are moved to
`staging.orphaned-TIME` beside the staging directory; `cachefs recover` lists them and copies them to where they belong.

Both are extended attributes. `ACKNOWLEDGED` is the mark: `NO` from when the file is made, `YES` from after its row is in the
journal until before that is removed. `OBJECT` is the row, from before it is in the journal, so that the file has its name. A
file system without extended attributes costs names, and no bytes: what is left in its staging directory is kept.
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
YES = b"1"

_OURS = re.compile(r"[0-9a-f]{32}(\.[0-9]+)?")
_DESCRIBED = ("source", "key", "mtime_ns")


class Orphan(NamedTuple):
    """A file that is kept aside, or, with `waiting`, one in the staging directory of a cache that no daemon uses: the next
    mount decides about it. `source` and `key` are "" where the file does not say."""

    path: Path
    size: int
    mtime_ns: int
    source: str
    key: str
    waiting: bool


# -- what a staging file says of itself: blocking, never raises ------------------------------------------


def describe(path: Path, row: Mapping[str, Any]) -> None:
    _put(path, OBJECT, json.dumps({name: row[name] for name in _DESCRIBED}).encode())


def acknowledge(path: Path) -> None:
    if not _put(path, ACKNOWLEDGED, YES):
        _remove(path, ACKNOWLEDGED)  # or the file would say that it was never acknowledged


def mark(path: Path, row: Mapping[str, Any]) -> None:
    """Set both attributes of a staging file whose row is in the journal."""
    describe(path, row)
    acknowledge(path)


def forget(path: Path) -> None:
    """The origin has it, or its name is gone: it need not be kept."""
    disown(path)
    _remove(path, OBJECT)


def disown(path: Path) -> None:
    """The same of a file that is about to be removed."""
    _put(path, ACKNOWLEDGED, NO)


def never_acknowledged(path: Path) -> bool:
    """True if its mark says so. Without a mark it may have been: the disk takes none, or the file was copied here."""
    try:
        return os.getxattr(path, ACKNOWLEDGED, follow_symlinks=False) == NO
    except OSError:
        return False


def _put(path: Path, name: str, value: bytes) -> bool:
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


def accounted(staging: Path, name: str) -> bool:
    """True if a staging file without a row in the journal can be removed: its mark says that it was not acknowledged, or the
    daemon died while it made the file, which has neither a mark nor a byte yet."""
    return bool(_OURS.fullmatch(name)) and (
        never_acknowledged(staging / name) or _says_nothing(staging / name)
    )


def _says_nothing(path: Path) -> bool:
    """True if the file is empty and has none of the two attributes."""
    try:
        return not path.lstat().st_size and not {ACKNOWLEDGED, OBJECT} & set(os.listxattr(path))
    except OSError:
        return False


def set_aside(staging: Path, names: Collection[str], why: str) -> Path | None:
    """Move these files beside the staging directory; returns where they are. Raises `CacheUnusable`."""
    if not names:
        return None
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
    return place


def without_journal(staging: Path, journal: Path) -> Path | None:
    """Before a journal is made where there is none: what lies in the staging directory belongs to another. Raises
    `CacheUnusable`."""
    if (journal / "data.mdb").exists():
        return None
    return set_aside(staging, _names(staging), f"there is no journal in {journal}")


# -- what is kept aside: blocking ----------------------------------------------------------------------


def places(state_dir: Path) -> list[Path]:
    """Where files are kept aside, the latest first."""
    try:
        return sorted((p for p in state_dir.glob("staging.orphaned-*") if p.is_dir()), reverse=True)
    except OSError:
        return []


def warning(state_dir: Path) -> str:
    """One line about what is kept aside; "" when there is nothing."""
    count = sum(len(_names(place)) for place in places(state_dir))
    if not count:
        return ""
    files = "1 file" if count == 1 else f"{count} files"
    return (
        f"{files} that no journal accounts for may be the only copy of what was written: cachefs recover {state_dir} "
        "lists them"
    )


def found(state_dir: Path, *, waiting: bool) -> list[Orphan]:
    """All that is kept aside, the latest change first; with `waiting`, also what lies in the staging directory."""
    files = [_orphan(path / name, waiting=False) for path in places(state_dir) for name in _names(path)]
    staging = state_dir / "staging"
    if waiting:
        files += [_orphan(staging / name, waiting=True) for name in _names(staging)]
    return sorted((file for file in files if file is not None), key=lambda file: -file.mtime_ns)


def remove(orphan: Orphan) -> None:
    """It is somewhere else now. Raises OSError."""
    orphan.path.unlink()
    with suppress(OSError):
        orphan.path.parent.rmdir()  # if it was the last


@contextmanager
def unused(state_dir: Path) -> Iterator[bool]:
    """Whether no daemon uses the journal; none can until this ends."""
    try:
        fd = os.open(state_dir / "journal" / "lock.pid", os.O_RDWR)
    except OSError:
        yield True  # no daemon has ever
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
    try:
        status = path.stat()
    except OSError:
        return None  # just now
    said: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        said = json.loads(os.getxattr(path, OBJECT))
    source, key = str(said.get("source", "")), str(said.get("key", ""))
    return Orphan(path, status.st_size, int(said.get("mtime_ns") or status.st_mtime_ns), source, key, waiting)


def _names(directory: Path) -> Sequence[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []

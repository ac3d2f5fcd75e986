"""`cachefs recover`: lists staging files that no journal accounts for, and copies them. While no daemon uses the cache
directory, it also lists the files that wait for the next mount: staging files, and small files that the journal alone has.

Copied to a mount of the source that they were written for, they get their old names and are uploaded like any other file.
Copied elsewhere, each gets a path made of its source and its key.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cachefs.base.errors import CachefsError, ConfigError, MountError
from cachefs.base.linux import mount_at
from cachefs.daemon import asking
from cachefs.daemon.mounting import canonical
from cachefs.daemon.uploading import staging_of
from cachefs.upload import orphans
from cachefs.upload.orphans import Orphan
from cachefs.upload.recovery import contents_of_unused

UNNAMED = "without-a-name"
"""The directory, below the target, of files without a recorded key."""


def state_dir_of(place: Path) -> Path:
    """The cache directory at `place`, or that of the mount at `place`. Raises `ConfigError`, `MountError`."""
    path = canonical(place)
    mount = mount_at(path)
    if mount is not None and mount.is_cachefs:
        state_dir = asking.status_of(path).get("state_dir")
        if not state_dir:
            raise MountError(
                f"{place}: its daemon does not say where its cache directory is: name that instead"
            )
        return Path(state_dir)
    try:
        found = any((path / name).is_dir() for name in ("journal", "staging", "names"))
    except OSError as exc:
        raise ConfigError(f"{place} cannot be read: {exc.strerror}: run this as its owner") from exc
    if not found and not orphans.places(path):
        raise ConfigError(f"{place} is neither a cache directory nor a cachefs mount")
    return path


def with_contents(found: Sequence[Orphan], state_dir: Path) -> list[Orphan]:
    """Add the files whose bytes the journal has, for a cache directory that no daemon uses; they replace staging files in
    `found` that do not count. The last changed file comes first. Raises `CacheUnusable` if the journal cannot be read."""
    contents = contents_of_unused(state_dir / "journal", staging_of(state_dir))
    by_path = {orphan.path: orphan for orphan in (*found, *contents)}
    return sorted(by_path.values(), key=lambda orphan: -orphan.mtime_ns)


class Target:
    """The directory `to`, below which files are copied; it may be a mount."""

    def __init__(self, to: Path) -> None:
        self.to = to
        mount = mount_at(canonical(to))
        self._sources: Sequence[dict[str, Any]] | None = None
        if mount is not None and mount.is_cachefs:
            self._sources = asking.status_of(to)["sources"]
        elif not to.is_dir():
            raise ConfigError(f"--to: {to} is no directory")

    def place(self, orphan: Orphan) -> Path:
        """The path of a file's copy. Raises `ConfigError` if the file has none in this directory."""
        if self._sources is None:
            if not orphan.key:
                return self.to / UNNAMED / orphan.path.name
            return self._inside(Path(orphan.source.replace("://", "/")) / orphan.key)
        if not orphan.key:
            raise ConfigError("it does not say what it was: copy it to a directory that is no mount")
        whole = f"{orphan.source}/{orphan.key}"
        for source in self._sources:
            above = f"{source['origin']['source']}/{source['origin']['prefix']}"
            if whole.startswith(above):
                return self._inside(Path(source["name"]) / whole.removeprefix(above))
        raise ConfigError(f"{self.to} is no mount of {orphan.source}")

    def _inside(self, relative: Path) -> Path:
        if relative.is_absolute() or ".." in relative.parts:
            raise ConfigError("its name leads elsewhere")
        return self.to / relative


Outcome = tuple[Orphan, Path | None, str]
"""(file, its copy, "") or (file, None, why it was not copied)."""


def copy(found: Sequence[Orphan], target: Target, *, remove: bool) -> Iterator[Outcome]:
    """Copy each file, and replace none. `remove`: remove it once its copy is safe, unless the next mount will upload it."""
    for orphan in found:
        try:
            place = target.place(orphan)
            _copy_one(orphan, place)
            if remove and not orphan.waiting:
                orphans.remove(orphan)
        except FileExistsError as exc:
            yield orphan, None, f"{exc.filename} exists"
        except OSError as exc:
            yield orphan, None, f"{exc.filename or ''}: {exc.strerror}"
        except CachefsError as exc:
            yield orphan, None, str(exc)
        else:
            yield orphan, place, ""


def _copy_one(orphan: Orphan, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "wb", closefd=False) as sink:
            if orphan.content is not None:
                sink.write(orphan.content)
            else:
                with open(orphan.path, "rb") as source:
                    shutil.copyfileobj(source, sink, 1 << 20)
        os.fsync(fd)
    except BaseException:
        os.close(fd)
        place.unlink(missing_ok=True)
        raise
    os.close(fd)  # on a mount, this fails if the upload fails
    os.utime(place, ns=(orphan.mtime_ns, orphan.mtime_ns))

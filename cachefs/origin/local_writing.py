"""Writing to a directory of this machine.

A file appears under its name when it is whole and on disk: it is written beside its place under a hidden name, synced,
renamed, and the directory is synced. Parts of an upload are files of their own, in a hidden directory at the root, and
are put together by the kernel (`copy_file_range`, which shares blocks where the file system can).

Here alone a condition on a version (`if_match`) is not one step with the write: a file that another process replaces
between the comparison and the rename is lost. `if_absent` is one step (a hard link).
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from cachefs.errors import (
    CachefsError,
    Conflict,
    IsADirectory,
    NoSuchUpload,
    NotFound,
    ObjectChanged,
    OriginFailed,
    Unsupported,
)
from cachefs.origin.conditions import HONOURED
from cachefs.origin.protocol import ObjectInfo
from cachefs.origin.writing import LOCAL, Body, Part, Pending, Terms, Written

HIDDEN = ".cachefs-"
"""What names of ours begin with; listings leave them out."""

UPLOADS = f"{HIDDEN}uploads"
STAMP = "user.cachefs-stamp"
COPIED = 64 << 20
"""As much as one call copies; between two of them the others of a slow disk have a turn. Guessed."""


class Tree(Protocol):
    """The client that reads the same directory."""

    root: str

    def head(self, key: str) -> ObjectInfo: ...
    def inside(self, key: str) -> str: ...
    def translated(self, key: str) -> AbstractContextManager[None]: ...


class LocalWriter:
    """The writing half of a directory's client."""

    limits = LOCAL
    conditions = HONOURED

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._uploads = Path(tree.root) / UPLOADS

    def put(self, key: str, body: Body, terms: Terms) -> Written:
        with self._tree.translated(key):
            if key.endswith("/"):
                if body.size:
                    raise Unsupported(f"{key}: a directory holds no bytes")
                return self._make_directory(key)
            return self._write(key, body.chunks(), terms)

    def copy(self, key: str, to: str, etag: str | None) -> Written:
        if key.endswith("/"):  # a directory, whatever has come and gone in it
            with self._tree.translated(key):
                self._tree.head(key)
                return self._make_directory(to)
        with self._tree.translated(key), open(self._tree.inside(key), "rb") as source:
            before = self._tree.head(key)
            if etag not in (None, before.etag):
                raise ObjectChanged(f"{key}: the file changed")
            made = self._place(to, lambda fd: _copy(source.fileno(), fd), Terms())
            if self._tree.head(key) != before:
                raise ObjectChanged(f"{key}: the file changed while it was copied")
            return made

    def delete(self, key: str) -> None:
        with suppress(NotFound), self._tree.translated(key):
            path = self._path(key)
            if not key.endswith("/"):
                os.unlink(path)
            elif not os.listdir(path):  # else other keys keep it there, as they do in a store
                try:
                    (os.unlink if os.path.islink(path) else os.rmdir)(path)
                except OSError as exc:
                    if exc.errno != errno.ENOTEMPTY:
                        raise
            _sync(os.path.dirname(path))

    def delete_many(self, keys: Sequence[str]) -> dict[str, CachefsError]:
        raise Unsupported("files are deleted one by one")

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        with self._tree.translated(key):
            info, stamp = self._tree.head(key), b""
            with suppress(OSError):
                stamp = os.getxattr(self._tree.inside(key), STAMP)
            return info, stamp.decode("ascii", "replace")

    # Multipart uploads.

    def begin(self, key: str, terms: Terms) -> str:
        with self._tree.translated(key):
            name = secrets.token_hex(8)
            while not (self._uploads / name).is_dir():
                with suppress(FileNotFoundError):  # what they are in has just gone with another upload
                    os.makedirs(self._uploads / name)
            (self._uploads / name / "key").write_bytes(os.fsencode(key))
            return name

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str:
        with self._tree.translated(key), self._within(key, upload) as folder:
            fresh = folder / f"{HIDDEN}{secrets.token_hex(8)}"
            with _new_file(str(fresh)) as fd:
                for chunk in body.chunks():
                    _write_all(fd, chunk)
                os.fsync(fd)
            os.replace(fresh, folder / f"{number:06d}")
            return version_of(os.stat(folder / f"{number:06d}"))

    def copy_part(
        self, key: str, upload: str, number: int, source: str, etag: str, start: int, stop: int
    ) -> str:
        raise Unsupported("a file of any size is copied at once")

    def parts(self, key: str, upload: str) -> dict[int, Part]:
        with self._tree.translated(key), self._within(key, upload) as folder:
            found = {}
            for path in folder.iterdir():
                if path.name.isdecimal():
                    about = path.stat()
                    found[int(path.name)] = Part(version_of(about), about.st_size)
            return found

    def complete(self, key: str, upload: str, parts: Mapping[int, str], terms: Terms) -> Written:
        there = self.parts(key, upload)
        for number, etag in parts.items():
            if number not in there or there[number].etag != etag:
                raise OriginFailed(f"{key}: part {number} of the upload is not the one that was sent")

        def assemble(fd: int) -> None:
            with self._within(key, upload) as folder:
                for number in sorted(parts):
                    with open(folder / f"{number:06d}", "rb") as part:
                        _copy(part.fileno(), fd)

        with self._tree.translated(key):
            made = self._place(key, assemble, terms)
            with suppress(OSError):  # the object is there; an abort may clear away what is left
                self._clear(upload)
            return made

    def abort(self, key: str, upload: str) -> None:
        with suppress(NoSuchUpload), self._tree.translated(key), self._within(key, upload):
            self._clear(upload)

    def _clear(self, upload: str) -> None:
        # Under another name no part lands in it any more, one that was given up while it was being written included.
        gone = self._uploads / secrets.token_hex(8)
        os.rename(self._uploads / upload, gone)
        shutil.rmtree(gone)
        with suppress(OSError):
            os.rmdir(self._uploads)  # unless there are others

    def list_uploads(self, prefix: str) -> list[Pending]:
        with self._tree.translated(prefix):
            found = []
            for folder in self._uploads.iterdir() if self._uploads.is_dir() else ():
                with suppress(FileNotFoundError):  # completed meanwhile
                    key = os.fsdecode((folder / "key").read_bytes())
                    if key.startswith(prefix):
                        found.append(Pending(key, folder.name, folder.stat().st_mtime_ns))
            return sorted(found, key=lambda pending: (pending.key, pending.begun_ns))

    @contextmanager
    def _within(self, key: str, upload: str) -> Iterator[Path]:
        """The directory of an upload. What is missing there has gone with it, perhaps just now."""
        folder = self._uploads / upload
        gone = NoSuchUpload(f"{key}: no such upload")
        try:
            if "/" in upload or os.fsdecode((folder / "key").read_bytes()) != key:
                raise gone
            yield folder
        except FileNotFoundError as exc:
            raise gone from exc

    # Files.

    def _write(self, key: str, chunks: Iterable[bytes], terms: Terms) -> Written:
        def fill(fd: int) -> None:
            for chunk in chunks:
                _write_all(fd, chunk)

        return self._place(key, fill, terms)

    def _place(self, key: str, fill: Callable[[int], None], terms: Terms) -> Written:
        """A file of what `fill` writes, under `key` and on disk."""
        path = self._path(key, make=True)
        if os.path.isdir(path):
            raise IsADirectory(f"{key}: is a directory")
        folder = os.path.dirname(path)
        fresh = f"{folder}/{HIDDEN}{secrets.token_hex(8)}"
        with _new_file(fresh) as fd:
            fill(fd)
            if terms.stamp:
                with suppress(OSError):  # a file system without such attributes
                    os.setxattr(fd, STAMP, terms.stamp.encode())
            os.fsync(fd)
            written = os.fstat(fd)
            if terms.if_match is not None and self._etag(key) != terms.if_match:
                raise Conflict(f"{key}: the file changed; nothing was written")
            if terms.if_absent:
                try:
                    os.link(fresh, path)
                except FileExistsError as exc:
                    raise Conflict(f"{key}: there is such a file; nothing was written") from exc
                os.unlink(fresh)
            else:
                os.replace(fresh, path)
            placed = os.fstat(fd)  # linking and renaming set the ctime, which is part of the version
        _sync(folder)
        # Changed in place since: the version that we wrote is gone, and `written` is the name of no other.
        same = (placed.st_mtime_ns, placed.st_size) == (written.st_mtime_ns, written.st_size)
        return Written(version_of(placed if same else written), written.st_mtime_ns)

    def _make_directory(self, key: str) -> Written:
        path = self._path(key, make=True)
        with suppress(FileExistsError):
            os.mkdir(path)
            _sync(os.path.dirname(path))
        about = os.stat(path)
        return Written(version_of(about), about.st_mtime_ns)

    def _etag(self, key: str) -> str:
        try:
            return self._tree.head(key).etag
        except NotFound:
            return ""

    def _path(self, key: str, make: bool = False) -> str:
        """Where a file of that name is or would be. `make`: the directories on its way, too."""
        parts = key.removesuffix("/").split("/")
        if any(part in ("", ".", "..") or "\0" in part or part.startswith(HIDDEN) for part in parts):
            raise Unsupported(f"{key!r} is no name of a file")
        folder = self._tree.root
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            try:
                folder = self._tree.inside(above)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(f"{folder}/{parts[depth - 1]}")
                    _sync(folder)
                folder = self._tree.inside(above)
        return f"{folder}/{parts[-1]}"


@contextmanager
def _new_file(path: str) -> Iterator[int]:
    """A descriptor of a new file, which goes again when something fails."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _copy(source: int, to: int) -> None:
    """All that `source` has from where it stands, to where `to` stands."""
    try:
        while os.copy_file_range(source, to, COPIED):
            pass
    except OSError as exc:
        if exc.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        while data := os.read(source, 1 << 20):
            _write_all(to, data)


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def version_of(about: os.stat_result) -> str:
    """The etag of a file. Programs set mtime back (`touch -r`, `cp -p`, `rsync -t`), but not ctime. The price: whatever else
    sets ctime, such as chmod or a new hard link, makes a new version of the same bytes."""
    return f'"{about.st_ino:x}-{about.st_mtime_ns:x}-{about.st_ctime_ns:x}-{about.st_size:x}"'

"""A directory of this machine as an origin.

Symbolic links are followed if they end inside the root and do not lead back to a directory on their own path. Other links,
and everything that is neither file nor directory, are left out. A directory `d` is the empty object `d/`, its marker, so
empty directories exist, and a listing of all keys below a prefix contains the directories.

A written file appears under its name when it is whole and on disk: it is written beside its place under a hidden name,
synced, renamed, and the directory is synced. A daemon that is killed leaves hidden names behind. They are no keys. Listings
remember those that they meet, and the next save removes the ones that no client can still be writing. Parts of an upload
are files in a hidden directory at the root; the kernel puts them together. A condition on a version (`if_match`) is not one
step with the write: a file that another process replaces between comparison and rename is lost. `if_absent` is one step."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from cachefs.base.durable import sync_directory
from cachefs.base.errors import (
    CachefsError,
    Conflict,
    IsADirectory,
    NameTooLong,
    NoSuchUpload,
    NotFound,
    ObjectChanged,
    OriginFailed,
    OriginFull,
    PermissionDenied,
    Transient,
    Unsupported,
)
from cachefs.origin.protocol import (
    GIB,
    HONOURED,
    UNLIMITED,
    Body,
    Limits,
    ListPage,
    ObjectInfo,
    Part,
    Preconditions,
    Writer,
    Written,
    raise_if_abandoned,
)

LIMITS = Limits(UNLIMITED, 1, UNLIMITED, 1_000_000, UNLIMITED, directories=True, longest_key=UNLIMITED)
"""A file system has limits of its own, and reports them by failing. With `--writeback` a failure comes only after the file
was saved, so two limits are known before: the length of a path, and the size of the disk. A sparse file is sent with its
zeros, and one that can never be whole would fill the disk with its parts."""

PATH_MAX = 4096
"""The longest path of Linux in bytes, with the NUL."""

CHUNK = 1 << 20
HIDDEN = ".cachefs-"
"""How the names begin that this client makes; listings leave them out."""

RANDOM_BYTES = 8
"""Random bytes in such a name."""

KILLED_S = 86_400.0
"""After how long without a change a hidden file was left by a daemon that was killed. Documented in
docs/reference/on-disk-format.md: what is written changes all the time, and clocks of machines differ by hours at most."""

FORGOTTEN_S = 7 * KILLED_S
"""The same for an upload in parts: a program that writes slowly may leave one unchanged for days, and a lost upload is
begun again. Borrowed from the lifecycle rules that buckets usually have."""

MOST_LEFT = 1000
"""Hidden names that are remembered; the next listing meets the others. A bound of memory: 0.3 MB."""

OURS = re.compile(rf"{re.escape(HIDDEN)}[0-9a-f]{{{2 * RANDOM_BYTES}}}")
"""The name of a file that is being written."""

ERRORS: dict[int | None, type[CachefsError]] = {
    errno.ELOOP: NotFound,  # listings leave such a link out
    errno.ENAMETOOLONG: NameTooLong,
    errno.ENOSPC: OriginFull,
    errno.EDQUOT: OriginFull,
    errno.ETIMEDOUT: Transient,
}
"""The error of `base.errors` for an errno; for all others see `LocalClient._translated`."""

UPLOADS = f"{HIDDEN}uploads"
TOKEN = "user.cachefs-stamp"


class LocalClient(Writer):
    """The tree below `root`. Keys are paths relative to it; bytes that are not UTF-8 are surrogates, as in `os`."""

    conditions = HONOURED

    def __init__(self, root: str) -> None:
        if not Path(root).is_dir():
            raise NotFound(f"{root}: no such directory")
        self.root = os.path.realpath(root)
        self.source = f"file://{self.root}"
        longest = PATH_MAX - len(os.fsencode(self.root)) - len(f"/{HIDDEN}") - 2 * RANDOM_BYTES - len("/\0")
        self.limits = replace(LIMITS, longest_key=longest, largest_object=_size_of_disk(self.root))
        self.writer: Writer = self
        self._uploads = Path(self.root) / UPLOADS
        # (prefix, sorted names) of the directory that is being paged through, so that a page does not scan it again.
        self._names: tuple[str, list[str]] = ("", [])
        self._left: set[str] = set()  # hidden names that listings have met

    def list_page(self, prefix: str, token: str | None, limit: int) -> ListPage:
        with self._translated(prefix):
            if prefix and token is None and limit == 1:
                # A lookup asks so whether there is a directory. Its marker comes first, so no name needs to be read.
                return ListPage([self.head(prefix)], [], prefix)
            names = self._sorted_names(prefix, fresh=token is None)
            first = bisect_right(names, os.fsencode(token[len(prefix) :]), key=os.fsencode) if token else 0
            page = names[first : first + limit]
            more = first + limit < len(names)
            objects: list[ObjectInfo] = []
            for name in page:
                if not name.endswith("/"):  # a file, or "" for the directory itself
                    try:
                        objects.append(self.head(prefix + name))
                    except NotFound:
                        continue  # removed since the scan
            return ListPage(
                objects,
                [prefix + name for name in page if name.endswith("/")],
                prefix + page[-1] if more else None,
            )

    def probe(self) -> None:
        """Read the first names of the root. A page of a listing takes all names of a directory to be put in order, which
        takes longer than a probe may, if there are millions or they come over a network."""
        with self._translated(""), os.scandir(self.root) as entries:
            next(entries, None)

    def head(self, key: str) -> ObjectInfo:
        with self._translated(key):
            return _info(key, Path(self._inside(key)).stat())

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        with self._translated(key):
            fd = os.open(self._inside(key), os.O_RDONLY | os.O_NONBLOCK)
            try:
                _info(key, os.fstat(fd))  # a regular file, or not there
                while start < stop:
                    data = os.pread(fd, min(CHUNK, stop - start), start)
                    # A local file changes in place: a chunk counts only if the version is the same after reading it.
                    if _info(key, os.fstat(fd)).etag != etag or not data:
                        raise ObjectChanged(f"{self._name(key)}: the file changed")
                    yield data
                    start += len(data)
            finally:
                os.close(fd)

    def renew(self, since: float) -> bool:
        return False

    def close(self) -> None:
        self._names = ("", [])

    def put(self, key: str, body: Body, preconditions: Preconditions) -> Written:
        with self._translated(key):
            if key.endswith("/"):
                if body.size:
                    raise Unsupported(f"{key}: a directory holds no bytes")
                return self._make_directory(key)
            return self._place(key, lambda file: file.writelines(body.chunks()), preconditions)

    def copy(self, key: str, to: str, etag: str | None) -> Written:
        if key.endswith("/"):  # a directory has no version: its files come and go
            with self._translated(key):
                self.head(key)
                return self._make_directory(to)
        with self._translated(key), open(self._inside(key), "rb") as source:
            before = self.head(key)
            if etag not in (None, before.etag):
                raise ObjectChanged(f"{key}: the file changed")

            def fill(file: BinaryIO) -> None:
                _copy(source, file)
                # Programs see this copy as a rename.
                os.utime(file.fileno(), ns=(before.mtime_ns, before.mtime_ns))

            made = self._place(to, fill, Preconditions())
            if self.head(key) != before:
                raise ObjectChanged(f"{key}: the file changed while it was copied")
            return made

    def delete(self, key: str) -> None:
        with suppress(NotFound), self._translated(key):
            path = self._path(key)
            raise_if_abandoned()
            if not key.endswith("/"):
                os.unlink(path)
            elif all(name.startswith(HIDDEN) for name in os.listdir(path)):
                # As in an object store, a directory with other keys in it stays.
                for name in os.listdir(path):
                    self._met(f"{path}/{name}")
                self._remove_left()
                try:
                    (os.unlink if os.path.islink(path) else os.rmdir)(path)
                except OSError as exc:
                    if exc.errno != errno.ENOTEMPTY:
                        raise
            sync_directory(Path(path).parent)

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        with self._translated(key):
            info, token = self.head(key), b""
            with suppress(OSError):
                token = os.getxattr(self._inside(key), TOKEN)
            return info, token.decode("ascii", "replace")

    # Multipart uploads.

    def begin(self, key: str, preconditions: Preconditions) -> str:
        with self._translated(key):
            name = secrets.token_hex(RANDOM_BYTES)
            while not (self._uploads / name).is_dir():
                with suppress(FileNotFoundError):  # the end of another upload has just removed the parent
                    os.makedirs(self._uploads / name)
            (self._uploads / name / "key").write_bytes(os.fsencode(key))
            return name

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str:
        with self._translated(key), self._within(key, upload) as folder:
            fresh = folder / f"{HIDDEN}{secrets.token_hex(RANDOM_BYTES)}"
            with _new_file(str(fresh)) as file:
                file.writelines(body.chunks())
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, folder / f"{number:06d}")
            return version_of(os.stat(folder / f"{number:06d}"))

    def parts(self, key: str, upload: str) -> dict[int, Part]:
        with self._translated(key), self._within(key, upload) as folder:
            found = {}
            for path in folder.iterdir():
                if path.name.isdecimal():
                    about = path.stat()
                    found[int(path.name)] = Part(version_of(about), about.st_size)
            return found

    def complete(
        self, key: str, upload: str, parts: Mapping[int, str], preconditions: Preconditions
    ) -> Written:
        existing = self.parts(key, upload)
        for number, etag in parts.items():
            if number not in existing or existing[number].etag != etag:
                raise OriginFailed(f"{key}: part {number} of the upload is not the one that was sent")

        def assemble(file: BinaryIO) -> None:
            with self._within(key, upload) as folder:
                for number in sorted(parts):
                    with open(folder / f"{number:06d}", "rb") as part:
                        _copy(part, file)

        with self._translated(key):
            made = self._place(key, assemble, preconditions)
            with suppress(OSError):  # the object exists; an abort may remove the rest
                self._clear(upload)
            return made

    def abort(self, key: str, upload: str) -> None:
        with suppress(NoSuchUpload), self._translated(key), self._within(key, upload):
            self._clear(upload)

    def _clear(self, upload: str) -> None:
        # Renamed first, because an abandoned request may still write a part under the old name.
        discarded = self._uploads / secrets.token_hex(RANDOM_BYTES)
        os.rename(self._uploads / upload, discarded)
        shutil.rmtree(discarded)
        with suppress(OSError):
            os.rmdir(self._uploads)  # unless there are others

    @contextmanager
    def _within(self, key: str, upload: str) -> Iterator[Path]:
        """The directory of an upload. A file that is missing there raises `NoSuchUpload`."""
        folder = self._uploads / upload
        missing = NoSuchUpload(f"{key}: no such upload")
        try:
            if "/" in upload or os.fsdecode((folder / "key").read_bytes()) != key:
                raise missing
            yield folder
        except FileNotFoundError as exc:
            raise missing from exc

    # Paths and files.

    def _name(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _inside(self, key: str) -> str:
        """The real path of a key, which is inside the root."""
        parts = key.removesuffix("/").split("/") if key else []
        if not all(map(_is_name, parts)):
            raise NotFound(f"{self._name(key)}: no such file")
        real = os.path.realpath(os.path.join(self.root, *parts), strict=True)
        if real != self.root and not real.startswith(self.root.rstrip("/") + "/"):
            raise NotFound(f"{self._name(key)}: leads out of {self.root}")
        return real

    def _sorted_names(self, prefix: str, fresh: bool) -> list[str]:
        """The names in a directory, in the order of an origin's keys; those of directories end in a slash. "" is the marker
        of the directory itself, which the root does not have. `fresh` scans a directory again that is paged through."""
        if not fresh and self._names[0] == prefix:
            return self._names[1]
        names = [""] if prefix else []
        with os.scandir(self._inside(prefix)) as entries:
            for entry in entries:
                if entry.name.startswith(HIDDEN):  # a file that is or was being written
                    self._met(entry.path)
                    continue
                if entry.is_symlink():
                    names.extend(self._linked(prefix, entry.name))
                elif entry.is_dir(follow_symlinks=False):
                    names.append(entry.name + "/")
                elif entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
        names.sort(key=os.fsencode)
        self._names = (prefix, names)
        return names

    def _linked(self, prefix: str, name: str) -> list[str]:
        """[the name of a symbolic link, with a slash if it leads to a directory]; [] if the link is left out."""
        try:
            target = self._inside(prefix + name)
            mode = Path(target).stat().st_mode
        except (OSError, NotFound):
            return []
        if stat.S_ISREG(mode):
            return [name]
        slashes = [at for at, letter in enumerate(prefix) if letter == "/"]
        above = {self.root, *(self._inside(prefix[:at]) for at in slashes)}
        return [name + "/"] if stat.S_ISDIR(mode) and target not in above else []

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as exc:
            raise NotFound(f"{self._name(key)}: no such file or directory") from exc
        except PermissionError as exc:
            advice = f"user {os.geteuid()} may not do that; change its mode or owner"
            raise PermissionDenied(f"{self._name(key)}: {advice}") from exc
        except OSError as exc:
            raise ERRORS.get(exc.errno, OriginFailed)(f"{self._name(key)}: {exc.strerror}") from exc

    def _place(self, key: str, fill: Callable[[BinaryIO], None], preconditions: Preconditions) -> Written:
        """Make a file at `key` of the bytes that `fill` writes. On return it is on disk."""
        path = self._path(key, make=True)
        if os.path.isdir(path):
            raise IsADirectory(f"{key}: is a directory")
        folder = os.path.dirname(path)
        fresh = f"{folder}/{HIDDEN}{secrets.token_hex(RANDOM_BYTES)}"
        with _new_file(fresh) as file:
            fill(file)
            file.flush()
            fd = file.fileno()
            if preconditions.token:
                with suppress(OSError):  # a file system without such attributes
                    os.setxattr(fd, TOKEN, preconditions.token.encode())
            os.fsync(fd)
            written = os.fstat(fd)
            raise_if_abandoned()
            if preconditions.if_match is not None and self._etag(key) != preconditions.if_match:
                raise Conflict(f"{key}: the file changed; nothing was written")
            if preconditions.if_absent:
                try:
                    os.link(fresh, path)
                except FileExistsError as exc:
                    raise Conflict(f"{key}: there is such a file; nothing was written") from exc
                os.unlink(fresh)
            else:
                os.replace(fresh, path)
            placed = os.fstat(fd)  # linking and renaming set the ctime, which is part of the version
        sync_directory(Path(folder))
        self._remove_left()
        # If another process has changed the file since, our version is gone; no other version has the etag of `written`.
        same = (placed.st_mtime_ns, placed.st_size) == (written.st_mtime_ns, written.st_size)
        return Written(version_of(placed if same else written), written.st_mtime_ns)

    def _met(self, path: str) -> None:
        """Remember a hidden path, unless its name is not one that this client makes: such a file is a user's."""
        ours = path == str(self._uploads) or OURS.fullmatch(os.path.basename(path))
        if ours and len(self._left) < MOST_LEFT:
            self._left.add(path)

    def _remove_left(self) -> None:
        """Remove the hidden files that killed daemons left and listings met. A file that cannot be removed stays."""
        while self._left:
            with suppress(KeyError, OSError):  # another thread or another client has removed it
                path = self._left.pop()
                if path != str(self._uploads):
                    if _is_older(path, KILLED_S):
                        os.unlink(path)
                    continue
                for upload in os.listdir(path):
                    if _is_older(f"{path}/{upload}", FORGOTTEN_S):
                        self._clear(upload)

    def _make_directory(self, key: str) -> Written:
        path = self._path(key, make=True)
        with suppress(FileExistsError):
            os.mkdir(path)
            sync_directory(Path(path).parent)
        about = os.stat(path)
        return Written(version_of(about), about.st_mtime_ns)

    def _etag(self, key: str) -> str:
        try:
            return self.head(key).etag
        except NotFound:
            return ""

    def _path(self, key: str, make: bool = False) -> str:
        """The path of an existing or new file. `make`: make the directories above it."""
        parts = key.removesuffix("/").split("/")
        if not all(map(_is_name, parts)):
            raise Unsupported(f"{key!r} is no name of a file")
        folder = self.root
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            try:
                folder = self._inside(above)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(f"{folder}/{parts[depth - 1]}")
                    sync_directory(Path(folder))
                folder = self._inside(above)
        return f"{folder}/{parts[-1]}"


def _is_older(path: str, age_s: float) -> bool:
    """True if a file, or the names in a directory, have not changed for so long; by ctime: a copy has its source's mtime."""
    return os.lstat(path).st_ctime + age_s <= time.time()


@contextmanager
def _new_file(path: str) -> Iterator[BinaryIO]:
    """A new file, to be written; an exception in the block removes it."""
    file = open(path, "xb")  # noqa: SIM115 (closed by the block below; if it is there already, it is not ours to remove)
    try:
        with file:
            yield file
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(path)
        raise


def _copy(source: BinaryIO, to: BinaryIO) -> None:
    """Copy from the position of `source` to its end, to the position of `to`."""
    try:
        while os.copy_file_range(source.fileno(), to.fileno(), GIB):
            pass
    except OSError as exc:
        if exc.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        shutil.copyfileobj(source, to, CHUNK)
        to.flush()


def version_of(about: os.stat_result) -> str:
    """The etag of a file. It contains the ctime, because programs set mtime back (`touch -r`, `cp -p`, `rsync -t`), but not
    ctime. The price: chmod, a new hard link and everything else that sets ctime makes a new version of the same bytes."""
    return f'"{about.st_ino:x}-{about.st_mtime_ns:x}-{about.st_ctime_ns:x}-{about.st_size:x}"'


def _size_of_disk(path: str) -> int:
    """Bytes of the file system around `path`; `UNLIMITED` where it does not say."""
    try:
        found = os.statvfs(path)
    except OSError:
        return UNLIMITED
    return found.f_blocks * found.f_frsize or UNLIMITED


def _is_name(part: str) -> bool:
    """True if a part of a key can be the name of a file of the user's."""
    return part not in ("", ".", "..") and "\0" not in part and not part.startswith(HIDDEN)


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    if key.endswith("/") and stat.S_ISDIR(status.st_mode):
        return ObjectInfo(key, 0, status.st_mtime_ns, version_of(status))
    if key.endswith("/") or not stat.S_ISREG(status.st_mode):
        raise NotFound(f"{key}: not a regular file")
    return ObjectInfo(key, status.st_size, status.st_mtime_ns, version_of(status))

"""A directory of this machine as a store.

Not through obstore, although it can: obstore follows symbolic links out of the directory and refuses names
with control characters. `os` calls are all it takes. Symbolic links are followed where they end inside the
root and do not lead back to a directory on their own way; others, and whatever is neither file nor directory,
are not there.

A directory `d` is the empty object `d/`, its marker: so an empty one is there, and who lists what is below a
prefix to copy or delete all of it comes by the directories, too.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from cachefs.errors import NotFound, ObjectChanged, OriginFailed, PermissionDenied, Transient
from cachefs.origin.local_writing import HIDDEN, LocalWriter, version_of
from cachefs.origin.protocol import ListPage, ObjectInfo

CHUNK = 1 << 20


class LocalClient:
    """The tree below `root`. Keys are paths relative to it; bytes that are no UTF-8 are surrogates, as in
    `os`."""

    can_list = True

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self.writer = LocalWriter(self)
        # The sorted names of the directory that is being paged through, so that each page is not a scan.
        self._names: tuple[str, list[str]] = ("", [])

    def list_page(self, prefix: str, token: str | None, start_after: str | None, limit: int) -> ListPage:
        with self.translated(prefix):
            names = self._sorted_names(prefix, fresh=token is None)
            after = token if token is not None else start_after
            first = bisect_right(names, _order(after[len(prefix) :]), key=_order) if after else 0
            page = names[first : first + limit]
            more = first + limit < len(names)
            objects: list[ObjectInfo] = []
            for name in page:
                if not name.endswith("/"):  # a file, or "": the directory itself
                    try:
                        objects.append(self.head(prefix + name))
                    except NotFound:
                        continue  # gone since the scan
            return ListPage(
                objects,
                [prefix + name for name in page if name.endswith("/")],
                prefix + page[-1] if more else None,
            )

    def head(self, key: str) -> ObjectInfo:
        with self.translated(key):
            return _info(key, Path(self.inside(key)).stat())

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        with self.translated(key):
            fd = os.open(self.inside(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                _info(key, os.fstat(fd))  # a regular file, or not there
                while start < stop:
                    data = os.pread(fd, min(CHUNK, stop - start), start)
                    # A local file changes in place; a chunk counts only if the version is the same after
                    # reading it.
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

    def _name(self, key: str) -> str:
        return f"{self.root}/{key}"

    def inside(self, key: str) -> str:
        """The real path of a key, which is inside the root."""
        parts = key.removesuffix("/").split("/") if key else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise NotFound(f"{self._name(key)}: no such file")
        real = os.path.realpath(os.path.join(self.root, *parts), strict=True)
        if real != self.root and not real.startswith(self.root.rstrip("/") + "/"):
            raise NotFound(f"{self._name(key)}: leads out of {self.root}")
        return real

    def _sorted_names(self, prefix: str, fresh: bool) -> list[str]:
        """Names in a directory, directories with a slash behind, in the order of a store's keys; "" is its own marker, which
        the root has not."""
        if not fresh and self._names[0] == prefix:
            return self._names[1]
        names = [""] if prefix else []
        with os.scandir(self.inside(prefix)) as entries:
            for entry in entries:
                if entry.name.startswith(HIDDEN):
                    continue  # a file that is being written
                if entry.is_symlink():
                    names.extend(self._linked(prefix, entry.name))
                elif entry.is_dir(follow_symlinks=False):
                    names.append(entry.name + "/")
                elif entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
        names.sort(key=_order)
        self._names = (prefix, names)
        return names

    def _linked(self, prefix: str, name: str) -> list[str]:
        """The name a symbolic link has in its directory, or nothing when it is not to be seen."""
        try:
            target = self.inside(prefix + name)
            mode = Path(target).stat().st_mode
        except (OSError, NotFound):
            return []
        if stat.S_ISREG(mode):
            return [name]
        way = {self.root}
        parts = prefix.split("/")[:-1]
        for depth in range(len(parts)):
            way.add(self.inside("/".join(parts[: depth + 1])))
        return [name + "/"] if stat.S_ISDIR(mode) and target not in way else []

    @contextmanager
    def translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as exc:
            raise NotFound(f"{self._name(key)}: no such file or directory") from exc
        except PermissionError as exc:
            user = os.geteuid()
            raise PermissionDenied(
                f"{self._name(key)}: user {user} may not do that; change its mode or owner"
            ) from exc
        except TimeoutError as exc:
            raise Transient(f"{self._name(key)}: {exc.strerror}") from exc
        except OSError as exc:
            raise OriginFailed(f"{self._name(key)}: {exc.strerror}") from exc


def local_client(path: str) -> tuple[LocalClient, str]:
    """The client, and its store's identity."""
    if not Path(path).is_dir():
        raise NotFound(f"{path}: no such directory")
    client = LocalClient(path)
    return client, f"file://{client.root}"


def _order(name: str) -> bytes:
    return os.fsencode(name)


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    if key.endswith("/") and stat.S_ISDIR(status.st_mode):
        return ObjectInfo(key, 0, status.st_mtime_ns, version_of(status))
    if key.endswith("/") or not stat.S_ISREG(status.st_mode):
        raise NotFound(f"{key}: not a regular file")
    return ObjectInfo(key, status.st_size, status.st_mtime_ns, version_of(status))

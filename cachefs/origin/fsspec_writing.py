"""Writing through fsspec.

Any filesystem can write a file from its beginning to its end, and that is all which fsspec promises: no conditions, no
parts by number. So `FilesystemWriter` puts a file of any size in one go, piece by piece, and takes no multipart uploads;
a write that breaks off leaves nothing where the filesystem can take back what it has begun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from cachefs.errors import CachefsError, NotFound, ObjectChanged, Unsupported
from cachefs.origin.conditions import HONOURED
from cachefs.origin.protocol import ObjectInfo
from cachefs.origin.writing import WHOLE, Body, Part, Pending, Terms, Written

AT_ONCE = 1 << 20
"""Up to here a file is handed over as one piece of memory, which most filesystems write in one request. Guessed."""


class Filesystem(Protocol):
    """The client that reads through the same filesystem."""

    def head(self, key: str) -> ObjectInfo: ...
    def opened(self) -> Any: ...
    def path(self, key: str) -> str: ...
    def translated(self, exc: BaseException, key: str) -> CachefsError: ...


class FilesystemWriter:
    """The writing half of any filesystem's client."""

    limits = WHOLE
    conditions = HONOURED  # what it is given it compares itself, or refuses

    def __init__(self, client: Filesystem) -> None:
        self._client = client

    def put(self, key: str, body: Body, terms: Terms) -> Written:
        if terms.conditional:
            raise Unsupported(f"{key}: fsspec promises no conditional writes")
        path = self._client.path(key)
        try:
            filesystem = self._client.opened()
            if key.endswith("/") and not body.size:
                filesystem.makedirs(path, exist_ok=True)
                return Written("directory", 0)  # nothing more is known of one
            data = b"".join(body.chunks()) if body.size <= AT_ONCE else None
            try:
                self._write(filesystem, path, body, data)
            except FileNotFoundError:  # where directories have to be there before their files
                filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._write(filesystem, path, body, data)
        except Exception as exc:
            raise self._client.translated(exc, key) from exc
        return Written()

    def copy(self, key: str, to: str, etag: str | None) -> Written:
        if etag is not None and self._client.head(key).etag != etag:
            raise ObjectChanged(f"{key}: the object changed at the store")
        source, target = self._client.path(key), self._client.path(to)
        try:
            filesystem = self._client.opened()
            try:
                filesystem.cp_file(source, target)
            except FileNotFoundError:
                filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
                filesystem.cp_file(source, target)
        except Exception as exc:
            raise self._client.translated(exc, key) from exc
        return Written()

    def delete(self, key: str) -> None:
        try:
            filesystem = self._client.opened()
            if not key.endswith("/"):
                filesystem.rm_file(self._client.path(key))
            else:
                with suppress(OSError):  # other keys keep it there
                    filesystem.rmdir(self._client.path(key).rstrip("/"))
        except Exception as exc:
            error = self._client.translated(exc, key)
            if not isinstance(error, NotFound):
                raise error from exc

    def delete_many(self, keys: Sequence[str]) -> dict[str, CachefsError]:
        raise self._no("deletions of many files")

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        return self._client.head(key), ""

    def begin(self, key: str, terms: Terms) -> str:
        raise self._no("multipart uploads")

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str:
        raise self._no("multipart uploads")

    def copy_part(
        self, key: str, upload: str, number: int, source: str, etag: str, start: int, stop: int
    ) -> str:
        raise self._no("multipart uploads")

    def parts(self, key: str, upload: str) -> dict[int, Part]:
        raise self._no("multipart uploads")

    def complete(self, key: str, upload: str, parts: Mapping[int, str], terms: Terms) -> Written:
        raise self._no("multipart uploads")

    def abort(self, key: str, upload: str) -> None:
        raise self._no("multipart uploads")

    def list_uploads(self, prefix: str) -> list[Pending]:
        raise self._no("multipart uploads")

    @staticmethod
    def _no(what: str) -> Unsupported:
        return Unsupported(f"fsspec knows no {what}")

    @staticmethod
    def _write(filesystem: Any, path: str, body: Body, data: bytes | None) -> None:
        if data is not None:
            filesystem.pipe_file(path, data)
            return
        file = filesystem.open(path, "wb", autocommit=False)
        try:
            for chunk in body.chunks():
                file.write(chunk)
            file.close()
            if hasattr(file, "commit"):
                file.commit()
        except BaseException:
            with suppress(Exception):  # whatever that raises, the first error says more
                file.discard()
            raise

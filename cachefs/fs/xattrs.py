"""Extended attributes under ``user.cachefs.``: the state of a file or directory, as text.

A program can read them by name, but they are not listed: a program that copies a file with all its attributes (cp -a,
rsync -X, tar) would set them on the copy, where they mean nothing. If a copy from another mount sets some here, they are
accepted without an error, and not kept.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cachefs.base.errors import NotFound

if TYPE_CHECKING:
    from cachefs.base.names import ObjectId
    from cachefs.fs.reader import Reader
    from cachefs.fs.tree import Directory

REFRESH = b"user.cachefs.refresh"
ETAG = b"user.cachefs.etag"
CACHED = b"user.cachefs.cached"
KEY = b"user.cachefs.key"
HIDDEN = b"user.cachefs.hidden"
LISTED = b"user.cachefs.listed"

OF_FILES = (ETAG, CACHED, KEY)
OF_DIRECTORIES = (HIDDEN, LISTED, KEY)


class NoAttribute(NotFound):
    """There is no such extended attribute."""


def of_file(obj: ObjectId, reader: Reader, name: bytes) -> bytes:
    if name == ETAG:
        return obj.etag.encode("utf-8", "surrogatepass")
    if name == CACHED:
        return str(reader.cached_bytes(obj)).encode()
    return f"{obj.source}/{obj.key}".encode("utf-8", "surrogatepass")


def of_directory(directory: Directory, whole: tuple[int, float] | None, name: bytes) -> bytes:
    """The value of an attribute of a directory. `whole` is its last complete listing: (generation, time)."""
    if name == HIDDEN:
        listing = directory.listing
        return str(max(directory.listed.hidden, listing.hidden if listing else 0)).encode()
    if name == LISTED:
        if whole is None or whole[1] == float("inf"):
            return b""
        return datetime.fromtimestamp(whole[1], UTC).isoformat(timespec="seconds").encode()
    source = directory.origin.source if directory.origin else ""
    return f"{source}/{directory.prefix}".encode("utf-8", "surrogatepass")

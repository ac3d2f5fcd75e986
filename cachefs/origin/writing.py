"""What writing to a store needs said: its limits, where the bytes come from, what a vendor's client has to offer.

A small object is put in one request. A large one is a *multipart upload*: parts by number, in any order and several at
a time, that become the object when the upload is completed; until then the key shows what it showed before.

A write whose reply was lost is asked for again, and then the store may answer that it cannot be done, because it was. So
whatever must happen once carries a *stamp*, a random word in the object's metadata: an object that shows our stamp is the
one we wrote.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from cachefs.errors import CachefsError, Conflict, NoSuchUpload, NotFound, ObjectChanged
from cachefs.origin.conditions import Conditions
from cachefs.origin.protocol import ObjectInfo

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40

FIRST_PART = 8 * MIB
"""Borrowed: what the vendors' own tools begin with."""

SHARE = 1250
"""A part is this share of what was sent before it. Derived: parts that grow so from 8 MiB on make 9,100 of five tebibytes,
of the 10,000 that S3 takes, and none is above its 5 GiB; the first 10 GiB go in parts of 8 MiB."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a store takes, in bytes. `most_parts` is 0 where there are no multipart uploads; `batch` is how many keys one
    deletion may name, 0 where it is one. `directories`: they are really there, and go only when they are empty.
    `longest_key` is in bytes of UTF-8."""

    largest_put: int
    largest_copy: int
    least_part: int
    largest_part: int
    most_parts: int
    largest_object: int
    batch: int = 0
    directories: bool = False
    longest_key: int = 1024

    def part_size(self, sent: int) -> int:
        """How long the next part shall be when `sent` bytes went before it and nobody knows how many will come: parts
        grow with the object, so that its largest possible size needs no more than `most_parts`."""
        grown = -(-sent // (SHARE * MIB)) * MIB
        return min(max(FIRST_PART, self.least_part, grown), self.largest_part)


S3 = Limits(5 * GIB, 5 * GIB, 5 * MIB, 5 * GIB, 10_000, 5 * TIB, batch=1000)
"""As documented for AWS, where an object may be larger by now; others kept to this. Keys of all three have 1,024 bytes
(Azure: as many characters, so fewer bytes than it might take)."""

GOOGLE = Limits(5 * TIB, 5 * TIB, 5 * MIB, 5 * GIB, 10_000, 5 * TIB)
"""As documented for the XML interface, which copies any size in one request."""

AZURE = Limits(5000 * MIB, 190 * TIB, 1, 4000 * MIB, 50_000, 150 * TIB)
"""As documented for block blobs, except for the largest: 190 TiB would need the largest blocks from the beginning, and
growing ones reach 150."""

LOCAL = Limits(1 << 62, 1 << 62, 1, 1 << 62, 1_000_000, 1 << 62, directories=True, longest_key=1 << 62)
"""A file system has limits of its own, which it tells by failing."""

WHOLE = Limits(1 << 62, 1 << 62, 1, 1 << 62, 0, 1 << 62, directories=True, longest_key=1 << 62)
"""A filesystem of fsspec writes from the beginning to the end, and at once."""


class Source(Protocol):
    """Where the bytes of a write come from. Called from a worker thread, one call at a time for one write; a repeated
    attempt reads them again, so they must not change meanwhile."""

    def read(self, at: int, count: int) -> bytes:
        """Bytes [at, at + count); fewer only at the end."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """What an open file holds from `offset` on. Its owner keeps `fd` open until the write has returned or raised."""

    fd: int
    offset: int = 0

    def read(self, at: int, count: int) -> bytes:
        return os.pread(self.fd, count, self.offset + at)


@dataclass(frozen=True, slots=True)
class InMemory:
    """Bytes at hand."""

    data: bytes

    def read(self, at: int, count: int) -> bytes:
        return self.data[at : at + count]


class Body(Protocol):
    """The bytes of one request on their way, as a client sees them."""

    size: int

    def chunks(self) -> Iterator[bytes]:
        """From the first byte on, paid for and counted."""

    def look(self) -> Iterator[bytes]:
        """The same bytes, to make a digest of."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How an object is written: only over the version `if_match`, only where there is none, under which type and stamp."""

    content_type: str | None = None
    if_match: str | None = None
    if_absent: bool = False
    stamp: str = ""

    @property
    def conditional(self) -> bool:
        return self.if_absent or self.if_match is not None

    def unconditional(self) -> Terms:
        """The same for whatever is there."""
        return Terms(self.content_type, stamp=self.stamp)


@contextmanager
def conflicts(terms: Terms) -> Iterator[None]:
    """Refusals in the words of a conditional write."""
    try:
        yield
    except ObjectChanged as exc:
        raise Conflict(f"{exc}; nothing was written") from exc
    except NotFound as exc:
        if terms.if_match is None:
            raise
        raise Conflict(f"{exc}; nothing was written") from exc


@contextmanager
def of_an_upload() -> Iterator[None]:
    """Refusals of a request that names an upload and no other object: for one that is gone, Ceph's RADOS Gateway says that
    the key does not exist."""
    try:
        yield
    except NotFound as exc:
        raise NoSuchUpload(str(exc)) from exc


@dataclass(frozen=True, slots=True)
class Written:
    """What the reply to a write told of the new version; "" and None for what it did not."""

    etag: str = ""
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part as the store has it. `etag` is what completing wants to hear."""

    etag: str
    size: int


@dataclass(frozen=True, slots=True)
class Pending:
    """A multipart upload that somebody began and nobody has completed."""

    key: str
    id: str
    begun_ns: int

    def state(self) -> dict[str, object]:
        """For `Origin.resume_upload`, to abort it."""
        return {"id": self.id}


class Writer(Protocol):
    """The writing half of a client: blocking, thread-safe, one attempt a call, only `cachefs.errors`.

    `Conflict` when the terms do not hold, `NoSuchUpload` when an upload is gone; the others as for reading."""

    limits: Limits
    conditions: Conditions

    def put(self, key: str, body: Body, terms: Terms) -> Written: ...
    def copy(self, key: str, to: str, etag: str | None) -> Written:
        """`etag`: only this version; `ObjectChanged` when it is another."""

    def delete(self, key: str) -> None:
        """Nothing is there afterwards; nothing there before is fine."""

    def delete_many(self, keys: Sequence[str]) -> dict[str, CachefsError]:
        """At most `limits.batch` at once; those that are still there, and why."""

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        """The object now, and its stamp."""

    def begin(self, key: str, terms: Terms) -> str:
        """The new upload's id."""

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str: ...
    def copy_part(
        self, key: str, upload: str, number: int, source: str, etag: str, start: int, stop: int
    ) -> str: ...
    def parts(self, key: str, upload: str) -> dict[int, Part]: ...
    def complete(self, key: str, upload: str, parts: Mapping[int, str], terms: Terms) -> Written: ...
    def abort(self, key: str, upload: str) -> None:
        """The upload is gone afterwards; gone before is fine."""

    def list_uploads(self, prefix: str) -> list[Pending]: ...

"""The interface between the daemon and an object store: what a vendor's client offers, and its types.

A small object is written by one request. A large one is a *multipart upload*: numbered parts, in any order and several at a
time, that become the object when the upload is completed; until then the key shows its old version.

The reply to a write can get lost. The repeated request may then be refused because the first one succeeded. So a write that
must happen once carries an *idempotency token*, a random word in the object's metadata, by which the daemon knows it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Protocol

from cachefs.base.errors import (
    CachefsError,
    CacheUnusable,
    Conflict,
    NoSuchUpload,
    NotFound,
    ObjectChanged,
    OriginFailed,
    Throttled,
    Transient,
    Unsupported,
)
from cachefs.base.names import ObjectId

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40

FIRST_PART = 8 * MIB
"""Borrowed: the vendors' own tools begin with it."""

SHARE = 1250
"""A part has one part in so many of the bytes before it. Derived: parts that grow so from 8 MiB make 9,100 of 5 TiB (S3
takes 10,000), and none exceeds S3's 5 GiB; the first 10 GiB go in parts of 8 MiB."""

UNLIMITED = 1 << 62

NO_PARTS = "this origin knows no multipart uploads"

STALL_S = 10.0
"""Seconds that an origin, or its token service, may stay silent within a reply. Derived: an outage is found within 5 s, and
its probe takes 5 s at most (`attempts.SILENT_S`); by then a request that waits fails as unreachable, and not as slow."""

PATIENCE = 12
"""Deadlines and silences, as a multiple of the usual, for work that the origin does before it replies (copying, completing
an upload). Borrowed: S3 documents that completing an upload may take several minutes, which is two here."""


@dataclass(slots=True, unsafe_hash=True)
class ObjectInfo:
    """One object as a LIST page or a HEAD shows it. Never changed, but not frozen: frozen dataclasses take three times as
    long to make, and a listing makes one for each name.

    `key` is the origin's full key, with the mount's prefix. `etag` is the value for If-Match, with quotes where the origin
    quotes, or is made of mtime and size. `size` is in bytes, -1 if a listing does not tell it (plain HTTP index pages)."""

    key: str
    size: int
    mtime_ns: int
    etag: str

    def version(self, source: str) -> ObjectId:
        """The name of this version in the cache; `source` is the origin's identity."""
        return ObjectId(source, self.key, self.etag, self.size)


class ByteRange(NamedTuple):
    """The bytes [start, stop) of the version `etag` of an object. `whole`: they are all of it."""

    key: str
    etag: str
    start: int
    stop: int
    whole: bool


MD5_ETAG = re.compile(r'"?([0-9a-f]{32})"?')
"""The etag of an object that S3 or Google got in one request: the MD5 of its bytes, unless it is encrypted with a key."""


def made_up(mtime_ns: int, size: int) -> str:
    """The etag for an object of an origin that has no etags."""
    return f"mtime-{mtime_ns}-{size}"


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a delimited listing, in the origin's order (for S3, GCS and Azure: by UTF-8 bytes of the key).

    `objects` are the keys directly below the prefix, directory markers included; `prefixes` are the common prefixes, each
    ending in "/". `next_token` continues the listing; None on the last page. `ordered`: pages come in byte order, so all
    keys up to the last one of a page are known."""

    objects: list[ObjectInfo]
    prefixes: list[str]
    next_token: str | None
    ordered: bool = True

    @property
    def unread(self) -> bool:
        """True if `read` will parse the reply, which takes milliseconds: a worker thread should call it."""
        return False

    def read(self) -> ListPage:
        """The page, parsed. Raises `OriginFailed`."""
        return self


class UnreadPage(ListPage):
    """An ordered page of which only `next_token` is known, so that the next page can be requested at once. The first use of
    its keys calls `parse`, which makes the page of the reply and may raise `OriginFailed`."""

    def __init__(self, next_token: str, parse: Callable[[], ListPage]) -> None:
        for name, value in ("next_token", next_token), ("ordered", True), ("_parse", parse):
            object.__setattr__(self, name, value)

    @property
    def unread(self) -> bool:
        return "_page" not in vars(self)

    @property
    def objects(self) -> list[ObjectInfo]:
        return self._page.objects

    @property
    def prefixes(self) -> list[str]:
        return self._page.prefixes

    def read(self) -> ListPage:
        return self._page

    @cached_property
    def _page(self) -> ListPage:
        page: ListPage = self._parse()  # type: ignore[attr-defined]
        if page.next_token != self.next_token:
            raise OriginFailed("a page of a listing names two places where the next one begins")
        return page


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an origin, in bytes. `most_parts` is 0 if it has no multipart uploads; `batch` is the number of keys
    that one deletion may name, 0 if it is one. `directories`: directories are real and must be empty to be deleted.
    `longest_key` is in bytes of UTF-8."""

    largest_copy: int
    least_part: int
    largest_part: int
    most_parts: int
    largest_object: int
    batch: int = 0
    directories: bool = False
    longest_key: int = 1024

    def part_size(self, sent: int) -> int:
        """Size of the next part after `sent` bytes, for an object of unknown size. Parts grow with the object, so that the
        largest possible object needs at most `most_parts`."""
        grown = -(-sent // (SHARE * MIB)) * MIB
        return min(max(FIRST_PART, self.least_part, grown), self.largest_part)


class Source(Protocol):
    """The bytes of a write. A worker thread reads them, one call at a time for one write; a repeated attempt reads them
    again, so they must not change until the write has returned."""

    def read(self, at: int, count: int) -> bytes:
        """Bytes [at, at + count); fewer only at the end."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """The bytes of an open file from `offset` on. The caller keeps `fd` open until the write has returned or raised.
    Reading raises `CacheUnusable` if the file's disk fails."""

    fd: int
    offset: int = 0

    def read(self, at: int, count: int) -> bytes:
        at += self.offset
        try:
            data = os.pread(self.fd, count, at)
            if len(data) < count:
                # A read ends before a block that the disk cannot read, and the next one has the error.
                data += os.pread(self.fd, count - len(data), at + len(data))
        except OSError as exc:
            path = os.readlink(f"/proc/self/fd/{self.fd}")
            raise CacheUnusable(f"{path}, which is to be uploaded, cannot be read: {exc.strerror}") from exc
        return data


@dataclass(frozen=True, slots=True)
class InMemory:
    data: bytes

    def read(self, at: int, count: int) -> bytes:
        return self.data[at : at + count]


class Body(Protocol):
    """The body of one request, as a client reads it. `size` is in bytes."""

    size: int

    def chunks(self) -> Iterator[bytes]:
        """The bytes from the first on, counted and paced by the upload limit."""

    def look(self) -> Iterator[bytes]:
        """The same bytes for a digest, without counting and pacing."""


@dataclass(frozen=True, slots=True)
class Preconditions:
    """Conditions of a write: replace only the version `if_match`; write only if there is no object (`if_absent`). `token` is
    the idempotency token of the write ("" for none)."""

    if_match: str | None = None
    if_absent: bool = False
    token: str = ""

    @property
    def conditional(self) -> bool:
        return self.if_absent or self.if_match is not None


@dataclass(frozen=True, slots=True)
class Written:
    """The new version, as far as the reply to a write describes it."""

    etag: str = ""
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part that the origin has. `etag` is the value that `Writer.complete` takes; `size` is in bytes."""

    etag: str
    size: int


class AskedToWait(Throttled):
    """Throttled by a reply that tells for how many `seconds` to wait (Retry-After)."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds


class ConnectionEnded(Transient):
    """A kept connection had ended before a request was sent on it, which is usual: the next attempt need not wait."""


class CompletionInProgress(Transient):
    """Another request is completing the upload. Ceph's RADOS Gateway also answers so for an upload that is gone."""


@contextmanager
def conflicts(preconditions: Preconditions) -> Iterator[None]:
    """Turn the refusal of a conditional write into `Conflict`."""
    try:
        yield
    except ObjectChanged as exc:
        raise Conflict(f"{exc}; nothing was written") from exc
    except NotFound as exc:
        if preconditions.if_match is None:
            raise
        raise Conflict(f"{exc}; nothing was written") from exc


@contextmanager
def of_an_upload() -> Iterator[None]:
    """Turn `NotFound` into `NoSuchUpload`, for a request that names an upload and no other object: Ceph's RADOS Gateway
    answers NoSuchKey for an upload that is gone."""
    try:
        yield
    except NotFound as exc:
        raise NoSuchUpload(str(exc)) from exc


class Sink(Protocol):
    """Takes the bytes of one range. Called outside of the trio thread, in order, one call at a time for one read. A sink
    that may wait, for a disk for instance, has an attribute `waits` that is True: then other reads do not wait for it."""

    def write(self, data: memoryview | bytes) -> object:
        """Take the next bytes of the range. An exception stops the transfer."""


class Taker(Protocol):
    """Takes the bytes of one attempt to read: in order, one call at a time. `waits`: taking them may wait for a disk or a
    limit, so only worker threads may call it; else any thread may."""

    @property
    def waits(self) -> bool: ...
    def take(self, data: memoryview | bytes) -> bool:
        """Take the next bytes. False if no more are wanted."""

    def coming(self) -> None:
        """Bytes have arrived that `take` will be given later. Any thread may call it."""


class Writer(Protocol):
    """Writes to an origin: blocking, thread-safe, one attempt per call. Raises only `cachefs.base.errors`: `Conflict` if a
    precondition does not hold, `NoSuchUpload` if an upload is gone. Methods that `limits` rule out raise `Unsupported`;
    vendors inherit these."""

    limits: Limits
    conditions: Conditions

    def put(self, key: str, body: Body, preconditions: Preconditions) -> Written: ...
    async def put_without_thread(self, key: str, body: Body, preconditions: Preconditions) -> Written | None:
        """As `put`, on the trio thread, for a small body in memory. None if nothing was sent: use `put`."""
        return None

    def copy(self, key: str, to: str, etag: str | None) -> Written:
        """Copy an object. With `etag`, only that version: raises `ObjectChanged` if it is another."""

    def delete(self, key: str) -> None:
        """Delete an object; a missing object is no error."""

    async def delete_without_thread(self, key: str) -> bool | None:
        """As `delete`, on the trio thread. None if nothing was sent: use `delete`."""
        return None

    def delete_many(self, keys: Sequence[str]) -> dict[str, CachefsError]:
        """Delete at most `limits.batch` objects. Returns the keys that remain, each with its error."""
        raise Unsupported("one deletion names one object")

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        """(the current object, its idempotency token or "")."""

    def begin(self, key: str, preconditions: Preconditions) -> str:
        """Begin an upload. Returns its id."""
        raise Unsupported(NO_PARTS)

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str:
        """Send a part. Returns its etag."""
        raise Unsupported(NO_PARTS)

    def copy_part(
        self, key: str, upload: str, number: int, source: str, etag: str, start: int, stop: int
    ) -> str:
        """Copy bytes [start, stop) of the version `etag` of `source`. Returns the etag of the part."""
        raise Unsupported("an object of any size is copied by one request")

    def parts(self, key: str, upload: str) -> dict[int, Part]:
        """The parts that the origin has, by number."""
        raise Unsupported(NO_PARTS)

    def complete(
        self, key: str, upload: str, parts: Mapping[int, str], preconditions: Preconditions
    ) -> Written:
        """Make the object at `key` of `parts` (number → etag)."""
        raise Unsupported(NO_PARTS)

    def abort(self, key: str, upload: str) -> None:
        """Discard an upload; a missing upload is no error."""
        raise Unsupported(NO_PARTS)


class Client(Protocol):
    """One vendor's store: thread-safe, one attempt per call; raises only `cachefs.base.errors`. All calls block.

    A client reads in the calling thread, by `read(*ByteRange)`: that yields chunks, and raises `ObjectChanged` if the object
    is another version, by the etag of the reply (or of a HEAD) if the store has no conditional reads. Or it reads without a
    thread for each request (`HttpClient.fetch`, `begin_fetch`). `source` is the origin's identity (a URL)."""

    source: str

    @property
    def writer(self) -> Writer | None:
        """Writes to the store; None if nothing can be written."""

    def list_page(self, prefix: str, token: str | None, limit: int) -> ListPage:
        """One page of at most `limit` keys and common prefixes below `prefix` ("" or ending in "/"), delimiter "/"."""

    def head(self, key: str) -> ObjectInfo: ...

    def renew(self, since: float) -> bool:
        """Forget cached credentials and read them again (files, environment, metadata service). True if the credentials now
        differ from those in use at `since` (time.monotonic()), so that a refused request is worth repeating at once."""

    def close(self) -> None: ...


# A caller that gives up, at its deadline, leaves its thread behind. That may hang before it has sent anything: in a service
# that gives credentials, or on a disk. A change that it made later would undo what the caller has done since.


@dataclass(slots=True, eq=False)
class BlockingCall:
    """A call of a client in a worker thread. `abandoned`: no caller waits for it any more."""

    abandoned: bool = False


blocking_call: ContextVar[BlockingCall | None] = ContextVar("blocking_call", default=None)
"""The call that the present thread makes."""


def raise_if_abandoned() -> None:
    """For clients, just before they change something. Raises `Transient`, which no caller gets."""
    call = blocking_call.get()
    if call is not None and call.abandoned:
        raise Transient("the caller has given up")


# Which conditions of writes an origin honours. A store that ignores a condition answers as if the condition had held, so its
# success proves nothing. Seen on Ceph's RADOS Gateway 16.2: both kinds of copy ignore `x-amz-copy-source-if-match`,
# completing an upload ignores `If-Match` and `If-None-Match`, and a PUT takes an etag in `If-Match` only without its quotes.
# `Probes` finds out; `Origin` compares the objects itself if a condition is not honoured.


class Condition(StrEnum):
    """A condition on a write or copy, together with the request that carries it."""

    COPY = "copy-source-if-match on CopyObject"
    COPY_PART = "copy-source-if-match on UploadPartCopy"
    PUT_MATCH = "If-Match on PutObject"
    PUT_ABSENT = "If-None-Match on PutObject"
    COMPLETE_MATCH = "If-Match on CompleteMultipartUpload"
    COMPLETE_ABSENT = "If-None-Match on CompleteMultipartUpload"


@dataclass(slots=True)
class Conditions:
    """The conditions that one origin honours. `trusted`: the vendor documents that it honours all of them, so none is
    probed. `bare_etags`: its `If-Match` takes etags without quotes. `seen`: results of probes."""

    trusted: bool = False
    bare_etags: bool = False
    seen: dict[Condition, bool] = field(default_factory=dict)

    def honours(self, condition: Condition) -> bool | None:
        """True if the origin honours the condition; None while it has not been probed."""
        return True if self.trusted else self.seen.get(condition)

    def ignored(self) -> list[str]:
        """Names of the conditions that the origin does not honour."""
        return [condition.value for condition, honoured in self.seen.items() if not honoured]

    def as_sent(self, etag: str) -> str:
        """The etag in the form that this origin's `If-Match` takes."""
        return etag.strip('"') if self.bare_etags else etag


HONOURED = Conditions(trusted=True)
"""The conditions of AWS, Google, Azure and a directory of this machine."""


def of_endpoint(endpoint_url: str | None) -> Conditions:
    """The conditions of an S3 endpoint: AWS documents that it honours all, any other endpoint is probed."""
    host = (endpoint_url or "").partition("://")[2].partition("/")[0].partition(":")[0].lower()
    amazon = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
    return HONOURED if endpoint_url is None or amazon else Conditions()

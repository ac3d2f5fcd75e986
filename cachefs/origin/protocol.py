"""What the rest of the daemon asks of an object store, and what a vendor client has to offer for it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cachefs.errors import Throttled, Transient
from cachefs.names import ObjectId

if TYPE_CHECKING:
    from cachefs.origin.writing import Writer


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as a LIST page or a HEAD shows it.

    `key` is the store's full key (prefix included). `etag` is what If-Match wants, quotes included where the
    store quotes; a store without etags gets one made of mtime and size. `size` is in bytes, -1 when a listing
    does not tell (plain HTTP index pages): then only a HEAD knows. `mtime_ns` is nanoseconds since the epoch.
    """

    key: str
    size: int
    mtime_ns: int
    etag: str

    def version(self, source: str) -> ObjectId:
        """What it is here, as an object of that store."""
        return ObjectId(source, self.key, self.etag, self.size)


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a delimited listing, in the store's order (for S3, GCS and Azure: by UTF-8 bytes of the
    key).

    `objects` are the keys directly below the prefix (directory markers included, exactly as the store has
    them); `prefixes` are the common prefixes, each ending in "/". `next_token` continues; None means this was
    the last page. `ordered` tells whether pages come in byte order, so that a page's last key says what is
    already known.
    """

    objects: list[ObjectInfo]
    prefixes: list[str]
    next_token: str | None
    ordered: bool = True


class AskedToWait(Throttled):
    """Throttled, and the reply said for how long (Retry-After)."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds


class CompletionInProgress(Transient):
    """An upload is being completed already. Ceph's RADOS Gateway says so of one that is gone, too."""


class Sink(Protocol):
    """Where bytes of one range go. Called from a worker thread, in order, never concurrently for one read."""

    def write(self, data: memoryview | bytes) -> None:
        """Take the next bytes of the range. May raise to stop the transfer (the reader is gone)."""


class Lister(Protocol):
    """The listing half of a client, where one library lists and another reads."""

    def list_page(self, prefix: str, token: str | None, start_after: str | None, limit: int) -> ListPage: ...


class Client(Protocol):
    """One vendor's store, blocking and thread-safe; each call is one attempt and raises only
    `cachefs.errors`.

    `NotFound`, `PermissionDenied`, `ObjectChanged`, `Throttled`, `Transient`, `Unsupported` are what callers
    expect.
    """

    can_list: bool

    @property
    def writer(self) -> Writer | None:
        """The half that writes; None where nothing can be written."""

    def list_page(self, prefix: str, token: str | None, start_after: str | None, limit: int) -> ListPage:
        """One page of at most `limit` keys and common prefixes below `prefix` ("" or ending in "/"),
        delimiter "/".

        `start_after`: only names after this full key (best effort: a client that cannot may ignore it)."""

    def head(self, key: str) -> ObjectInfo: ...

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        """Bytes [start, stop) of the version `etag`, in chunks as they arrive. `whole` says the range is the
        whole object, so no Range header is needed. A store whose reply shows another version raises
        `ObjectChanged`; one that cannot do conditional reads compares the etag of the reply (or of a HEAD)
        itself."""

    def renew(self, since: float) -> bool:
        """Forget cached credentials and look again (files, environment, metadata). True when those in use now differ
        from those at `since` (time.monotonic()), so that a request refused then is worth repeating at once."""

    def close(self) -> None: ...

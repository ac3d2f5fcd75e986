"""Bytes through obstore: S3, Azure, Google and plain HTTP behind one library written in Rust.

Its synchronous calls release the interpreter and run in our worker threads. Its own retries are off: a 503
must reach the limiter, and a broken body is resumed where it broke, not started again. What it cannot do is
done elsewhere: listing (see `cachefs.origin.listing`), reading the keys it cannot name (see
`cachefs.origin.signed`), and writing (see `cachefs.origin.http_writing`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import obstore
from obstore import exceptions as failures

from cachefs.errors import CachefsError, NotFound, ObjectChanged, PermissionDenied, Transient, Unsupported
from cachefs.origin.listing.http import CONNECT_S, authorities, quoted, seconds_ns
from cachefs.origin.opened import Opened
from cachefs.origin.protocol import Lister, ListPage, ObjectInfo
from cachefs.origin.replies import one_line, refusal
from cachefs.origin.signed import SignedReader, expressible
from cachefs.origin.writing import Writer

if TYPE_CHECKING:
    from obstore.store import ObjectStore

AT_ONCE = 256 << 10
"""Up to here a range is taken as one buffer, without a copy into Python's bytes; above, it is streamed so that the
first reader can be woken early. Guessed: 256 KiB is 1 ms at 2 Gbit/s."""

CHUNK = 128 << 10
"""The least that one streamed chunk has. Measured over loopback, 16 MiB ranges: 0.25 CPU seconds a GB at 64 and 128
KiB, 0.29 at 256, 0.48 at 1024 (larger ones are put together from smaller by copying)."""


class Credentials(Protocol):
    """What a client needs of a vendor's credentials: to fail clearly before the request does, to tell others
    from the same (`current` is a value), and to look again."""

    def current(self) -> object: ...
    def renew(self, since: float) -> bool: ...
    @property
    def advice(self) -> str: ...


class Nobody:
    """No credentials, for stores that want none."""

    advice = "the server wants credentials, and this kind of source has none"

    def current(self) -> object:
        return None

    def renew(self, since: float) -> bool:
        return False


class ObstoreClient:
    """One store: `lister` lists, `signed` reads the keys that obstore cannot name, `writer` writes, obstore does the rest.
    `conditional` is whether the store honours If-Match; where it does not, the reply's own version is all there is
    to compare."""

    def __init__(
        self,
        open_store: Callable[[], ObjectStore],
        lister: Lister | None,
        *,
        label: str,
        signed: SignedReader | None = None,
        writer: Writer | None = None,
        credentials: Credentials | None = None,
        conditional: bool = True,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.can_list = lister is not None
        self.writer = writer
        self._lister, self._signed, self._label = lister, signed, label
        self._credentials = credentials or Nobody()
        self._conditional = conditional
        self._close = close
        self._store = Opened(open_store, self._credentials.current)

    def list_page(self, prefix: str, token: str | None, start_after: str | None, limit: int) -> ListPage:
        if self._lister is None:
            raise Unsupported(f"{self._label}: this store cannot be listed")
        return self._lister.list_page(prefix, token, start_after, limit)

    def head(self, key: str) -> ObjectInfo:
        if self._signed is not None and not expressible(key):
            return self._signed.head(key)
        try:
            meta = obstore.head(self._store.get(), key)
        except Exception as exc:
            raise self._translated(exc, key) from exc
        return _info(key, meta)

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        if self._signed is not None and not expressible(key):
            yield from self._signed.read(key, etag, start, stop, whole)
            return
        options: dict[str, Any] = {}
        if self._conditional and not _is_made_up(etag) and not etag.startswith("W/"):
            options["if_match"] = etag
        if not whole:
            options["range"] = (start, stop)
        try:
            reply = obstore.get(self._store.get(), key, options=options)  # type: ignore[arg-type]
        except failures.NotSupportedError:
            yield from self._read_without_range(key, etag, start, stop)
            return
        except Exception as exc:
            raise self._translated(exc, key) from exc
        self._same_version(key, etag, reply.meta)
        if reply.range != (start, stop):
            raise Transient(
                f"{self._label}/{key}: asked for bytes {start} to {stop}, the store sent {reply.range}"
            )
        yield from self._body(reply, key, stop - start)

    def renew(self, since: float) -> bool:
        return self._credentials.renew(since)

    def close(self) -> None:
        self._store.forget()
        self._close()

    def _body(
        self, reply: obstore.GetResult, key: str, size: int
    ) -> Generator[memoryview | bytes, None, None]:
        try:
            if size <= AT_ONCE:
                yield memoryview(reply.bytes())
            else:
                yield from reply.stream(min_chunk_size=CHUNK)
        except GeneratorExit:
            raise
        except Exception as exc:
            raise self._translated(exc, key) from exc

    def _read_without_range(
        self, key: str, etag: str, start: int, stop: int
    ) -> Generator[memoryview | bytes, None, None]:
        """Servers that answer a range with the whole (Python's http.server): read over what was not asked
        for."""
        try:
            reply = obstore.get(self._store.get(), key)
        except Exception as exc:
            raise self._translated(exc, key) from exc
        self._same_version(key, etag, reply.meta)
        at = 0
        for chunk in self._body(reply, key, AT_ONCE + 1):
            wanted = memoryview(chunk)[max(0, start - at) : max(0, stop - at)]
            at += len(chunk)
            if wanted:
                yield wanted
            if at >= stop:
                return

    def _same_version(self, key: str, etag: str, meta: Any) -> None:
        # Also where the store should have compared: one that ignores If-Match must not slip another version
        # in.
        if _info(key, meta).etag != etag:
            raise ObjectChanged(f"{self._label}/{key}: the object changed at the store")

    def _translated(self, exc: Exception, key: str) -> CachefsError:
        what = f"{self._label}/{key}"
        text = str(exc)
        if isinstance(exc, CachefsError):
            return exc
        status = re.search(r"status code: (\d{3})", text)
        if status:
            return refusal(int(status[1]), text, what=what, advice=self._credentials.advice)
        if isinstance(exc, FileNotFoundError):
            return NotFound(f"{what}: no such object")
        if isinstance(exc, failures.PreconditionError):
            return ObjectChanged(f"{what}: the object changed at the store")
        if isinstance(exc, failures.PermissionDeniedError | failures.UnauthenticatedError):
            return PermissionDenied(one_line(f"{what}: {text}; {self._credentials.advice}"))
        if isinstance(exc, ValueError | failures.InvalidPathError):
            return Unsupported(one_line(f"{what}: {text}"))
        # Connections refused or reset, timeouts, broken bodies. The reason is at the bottom of obstore's
        # dump.
        reasons = re.findall(r'(?:message|error): "([^"]*)"', text)
        return Transient(one_line(f"{what}: {reasons[-1] if reasons else _timeout(text) or text}"))


def client_options(stall_s: float) -> Any:
    """Connections that end when the store is silent for `stall_s`; no limit on a body that keeps coming."""
    options: dict[str, Any] = {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=stall_s),
        "timeout": timedelta(days=1),
    }
    if trusted := authorities():
        options["root_certificate"] = trusted
    return options


def retry_config() -> Any:
    return {"max_retries": 0}


def _info(key: str, meta: Any) -> ObjectInfo:
    mtime_ns, size = seconds_ns(meta["last_modified"]), meta["size"]
    etag = quoted(meta["e_tag"] or "") or made_up(mtime_ns, size)
    return ObjectInfo(key, size, mtime_ns, etag)


def made_up(mtime_ns: int, size: int) -> str:
    """The etag of an object in a store that has none."""
    return f"mtime-{mtime_ns}-{size}"


def _is_made_up(etag: str) -> bool:
    return etag.startswith("mtime-")


def _timeout(text: str) -> str:
    return "the store stayed silent for too long" if "TimedOut" in text or "kind: Timeout" in text else ""

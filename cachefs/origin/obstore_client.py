"""Bytes through obstore: S3, Azure, Google and plain HTTP behind one library written in Rust.

Its synchronous calls release the interpreter and run in worker threads. Its own retries are off: a 503 must reach the
limiter, and a broken body is resumed where it broke. Listing and writing go over `cachefs.origin.http`.

obstore takes a key for a path: it refuses control characters and empty segments, and reads `lead` when `/lead` is asked for.
Object stores have no such notions, and their listings show these keys. They are rare, so they are read over
`cachefs.origin.http`, too: bytes and errors are the same, CPU per gigabyte is higher.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import obstore
from obstore import exceptions as failures

from cachefs.base.errors import (
    CachefsError,
    NotFound,
    ObjectChanged,
    PermissionDenied,
    Transient,
    Unsupported,
)
from cachefs.origin.credentials import Credentials, Opened
from cachefs.origin.http import CONNECT_S, SignedHttp, Transport, authorities, quoted, seconds_ns
from cachefs.origin.protocol import Lister, ObjectInfo, Writer, made_up
from cachefs.origin.replies import one_line, refusal

if TYPE_CHECKING:
    from obstore.store import ObjectStore

AT_ONCE = 256 << 10
"""A range up to this many bytes is taken as one buffer, without a copy into Python's bytes. A larger one is streamed, so
that its first reader can be woken early. Guessed: 256 KiB is 1 ms at 2 Gbit/s."""

CHUNK = 128 << 10
"""The least bytes of one streamed chunk. Measured over loopback, 16 MiB ranges: 0.25 CPU seconds a GB at 64 and 128 KiB,
0.29 at 256, 0.48 at 1024 (obstore copies smaller chunks together)."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def expressible(key: str) -> bool:
    """True if obstore's idea of a path can hold `key` as it is."""
    return not (_CONTROL.search(key) or any(segment in ("", ".", "..") for segment in key.split("/")))


class ObstorePlace(Protocol):
    """A bucket, container or host that obstore reads. `label` and `credentials` as for `cachefs.origin.http.Place`."""

    @property
    def label(self) -> str: ...
    @property
    def credentials(self) -> Credentials: ...
    def open_store(self, stall_s: float) -> ObjectStore: ...


class ObstoreClient:
    """One origin: obstore reads, `lister` lists, `writer` writes, `http` reads the keys that obstore cannot name."""

    def __init__(
        self,
        place: ObstorePlace,
        transport: Transport,
        *,
        lister: Lister,
        writer: Writer | None = None,
        http: SignedHttp | None = None,
    ) -> None:
        self.can_list = True
        self.writer = writer
        self.list_page = lister.list_page
        self._transport, self._http = transport, http
        self._label, self._credentials = place.label, place.credentials
        self._store = Opened(lambda: place.open_store(transport.stall_s), place.credentials.current)

    def head(self, key: str) -> ObjectInfo:
        if self._http is not None and not expressible(key):
            return self._http.head(key)[0]
        try:
            meta = obstore.head(self._store.get(), key)
        except Exception as exc:
            raise self._translated(exc, key) from exc
        return _info(key, meta)

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        if self._http is not None and not expressible(key):
            yield from self._http.read(key, etag, start, stop, whole)
            return
        options: dict[str, Any] = {}
        if not _is_made_up(etag) and not etag.startswith("W/"):
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
                f"{self._label}/{key}: asked for bytes {start} to {stop}, the origin sent {reply.range}"
            )
        yield from self._body(reply, key, stop - start)

    def renew(self, since: float) -> bool:
        return self._credentials.renew(since)

    def close(self) -> None:
        self._store.forget()
        self._transport.close()

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
        """For servers that answer a range with the whole object (Python's http.server): skip the other bytes."""
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
        # Compared although If-Match was sent: some stores ignore it.
        if _info(key, meta).etag != etag:
            raise ObjectChanged(f"{self._label}/{key}: the object changed at the origin")

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
            return ObjectChanged(f"{what}: the object changed at the origin")
        if isinstance(exc, failures.PermissionDeniedError | failures.UnauthenticatedError):
            return PermissionDenied(one_line(f"{what}: {text}; {self._credentials.advice}"))
        if isinstance(exc, ValueError | failures.InvalidPathError):
            return Unsupported(one_line(f"{what}: {text}"))
        # Connections refused or reset, timeouts, broken bodies. obstore's text tells the reason last.
        reasons = re.findall(r'(?:message|error): "([^"]*)"', text)
        return Transient(one_line(f"{what}: {reasons[-1] if reasons else _timeout(text) or text}"))


def client_options(stall_s: float) -> Any:
    """Connections that end when the origin is silent for `stall_s`; a body that keeps coming may take a day."""
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


def _is_made_up(etag: str) -> bool:
    return etag.startswith("mtime-")


def _timeout(text: str) -> str:
    return "the origin stayed silent for too long" if "TimedOut" in text or "kind: Timeout" in text else ""

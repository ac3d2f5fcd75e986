"""Signed requests to the objects of one place, and the client that all origins over HTTP share.

A vendor's module says what to send (`Request`) and reads the reply. `SignedHttp` makes the URL, has it signed, and turns
refusals into errors. `cachefs.origin.transport` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol
from urllib.parse import quote
from xml.etree import ElementTree

import trio

from cachefs.base.errors import (
    CachefsError,
    NotFound,
    ObjectChanged,
    OriginFailed,
    Transient,
    Unsupported,
)
from cachefs.origin.credentials import Credentials
from cachefs.origin.protocol import PATIENCE, Body, Lister, ObjectInfo, Taker, Writer, Written, made_up
from cachefs.origin.replies import refusal
from cachefs.origin.transport import AT_ONCE, CHUNK, Exchange, Reply, Transport

ANY_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Request:
    """One request in a vendor's dialect, before it has a URL and a signature.

    `key` is "" for the bucket itself. Parameters that are None are left out. `slow`: the origin works before it replies.
    `about`: the key that errors name, where it is not `key`."""

    method: str
    key: str = ""
    parameters: Mapping[str, str | None] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body | bytes = b""
    slow: bool = False
    about: str | None = None


class Place(Protocol):
    """A bucket or container: where its objects are, and how requests to it are signed."""

    @property
    def label(self) -> str:
        """Its URL as users write it, for messages."""

    @property
    def credentials(self) -> Credentials: ...

    def url(self) -> str:
        """The URL that a key is appended to after a slash. S3 may learn another region from a reply, so it may change."""

    def sign(
        self, method: str, url: str, headers: Mapping[str, str], body: Body | bytes
    ) -> tuple[str, Mapping[str, str]]:
        """URL and headers of the authorised request. May wait for credentials."""

    def sign_at_once(self, url: str, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]] | None:
        """The same for a GET, without waiting: None when the credentials are not at hand."""


class SignedHttp:
    """Signed requests to the objects of one place."""

    def __init__(self, place: Place, transport: Transport) -> None:
        self.place, self.transport = place, transport

    def name(self, key: str) -> str:
        """A key as messages name it."""
        return f"{self.place.label}/{key}"

    def ask(self, request: Request) -> Reply:
        """The reply to a request; a refusal is raised."""
        return self.checked(request, self.exchange(request))

    def exchange(self, request: Request) -> Reply:
        """The reply to a request, whatever its status."""
        given, body, size = dict(request.headers), request.body, 0
        if request.method in ("PUT", "POST"):
            size = len(body) if isinstance(body, bytes) else body.size
            given["Content-Length"] = str(size)
            given.setdefault("Content-Type", ANY_TYPE)
        url, headers = self.place.sign(request.method, self._url(request), given, body)
        return self.transport.request(
            request.method,
            url,
            headers,
            body if isinstance(body, bytes) else body.chunks(),
            size=size,
            patience=PATIENCE if request.slow else 1,
        )

    def checked(self, request: Request, reply: Reply) -> Reply:
        """The reply if it is a success; else its refusal is raised."""
        if not 200 <= reply.status < 300:
            raise self._refusal(reply.status, reply.headers, reply.body, self._what(request))
        return reply

    def head(self, key: str) -> tuple[ObjectInfo, Mapping[str, str]]:
        """An object, and all headers of the reply that shows it."""
        headers = self.ask(Request("HEAD", key)).headers
        try:
            return _shown(key, int(headers["content-length"]), headers), headers
        except (KeyError, ValueError) as exc:
            raise OriginFailed(f"{self.name(key)}: the origin's reply does not describe an object") from exc

    async def fetch(self, key: str, etag: str, start: int, stop: int, whole: bool, taker: Taker) -> None:
        """As `Fetching.fetch`."""
        given = {} if etag.startswith(("mtime-", "W/")) else {"If-Match": etag}
        if not whole:
            given["Range"] = f"bytes={start}-{stop - 1}"
        url = self._url(Request("GET", key))
        signed = self.place.sign_at_once(url, given)
        if signed is None:
            signed = await trio.to_thread.run_sync(
                self.place.sign, "GET", url, given, b"", abandon_on_cancel=True
            )
        received = _Received(self, key, etag, start, stop, whole, taker)
        size = stop - start
        least = size if size <= AT_ONCE else 4 * CHUNK if taker.waits else CHUNK
        exchange = Exchange("GET", *signed, receiver=received, least=least)
        await self.transport.run(exchange)
        if received.refused:
            raise self._refusal(exchange.status, exchange.told, exchange.body, received.what)

    def delete(self, key: str) -> None:
        """The key has no object afterwards."""
        with suppress(NotFound):
            self.ask(Request("DELETE", key))

    def document(self, reply: Reply, key: str) -> ElementTree.Element:
        """The reply's XML without namespaces. S3 sends the head of a reply before it has done a slow request, so an error
        may stand in a success; it is raised."""
        try:
            found = xml(reply.body)
        except ValueError as exc:
            raise OriginFailed(f"{self.name(key)}: the origin's reply is not XML: {exc}") from exc
        if found.tag == "Error":
            raise self._refusal(reply.status, {}, reply.body, self.name(key))
        return found

    def _what(self, request: Request) -> str:
        return self.name(request.key if request.about is None else request.about)

    def _url(self, request: Request) -> str:
        key = request.key
        if any(segment in (".", "..") for segment in key.split("/")):
            raise Unsupported(f"{self._what(request)}: HTTP drops the segments . and .. of a path")
        url = f"{self.place.url()}/{quote(key, errors='surrogateescape')}" if key else self.place.url()
        if request.parameters:
            url += f"?{query(request.parameters)}"
        return url

    def _refusal(self, status: int, headers: Mapping[str, str], body: bytes, what: str) -> CachefsError:
        return refusal(
            status,
            body.decode("utf-8", "replace"),
            what=what,
            code=headers.get("x-ms-error-code", ""),
            advice=self.place.credentials.advice,
            retry_after=headers.get("retry-after"),
            date=headers.get("date"),
        )


class _Received:
    """The reply to a GET of bytes [start, stop) of one version, on its way to `taker`. `refused`: it is a refusal."""

    def __init__(
        self, http: SignedHttp, key: str, etag: str, start: int, stop: int, whole: bool, taker: Taker
    ) -> None:
        self.what = http.name(key)
        self.waits = taker.waits
        self.refused = False
        self._key, self._etag, self._start, self._stop, self._whole = key, etag, start, stop, whole
        self._taker = taker
        self._at = start
        self._cut = False

    def begin(self, status: int, headers: Mapping[str, str]) -> bool:
        """As `Receiver.begin`. The etag is compared although If-Match was sent: some stores ignore it."""
        if status not in (200, 206):
            self.refused = True
            return False
        told, _, size = headers.get("content-range", "").rpartition("/")
        if status == 206 and told != f"bytes {self._start}-{self._stop - 1}":
            raise Transient(
                f"{self.what}: asked for bytes {self._start} to {self._stop}, the origin sent {told or 'no range'}"
            )
        try:
            if not headers.get("etag"):
                size = size or headers["content-length"]
            same = _shown(self._key, int(size or 0), headers).etag == self._etag
        except (KeyError, ValueError):
            same = False
        if not same:
            raise ObjectChanged(f"{self.what}: the object changed at the origin")
        if status == 200 and not self._whole:
            # A server that knows no ranges (Python's http.server) sends everything: the other bytes are dropped.
            self._at, self._cut = 0, True
        return True

    def take(self, data: bytes) -> bool:
        if not self._cut:
            return self._taker.take(data)
        at, self._at = self._at, self._at + len(data)
        wanted = data[max(0, self._start - at) : max(0, self._stop - at)]
        return (not wanted or self._taker.take(wanted)) and self._at < self._stop


class HttpClient:
    """One origin over HTTP: `http` reads, `lister` lists, `writer` writes."""

    def __init__(self, http: SignedHttp, lister: Lister, writer: Writer | None = None) -> None:
        self.can_list = True
        self.writer = writer
        self.list_page = lister.list_page
        self.fetch = http.fetch
        self.renew = http.place.credentials.renew
        self.close = http.transport.close
        self._http = http

    def head(self, key: str) -> ObjectInfo:
        return self._http.head(key)[0]


def _shown(key: str, size: int, headers: Mapping[str, str]) -> ObjectInfo:
    """The object that a reply's headers describe."""
    told = headers.get("last-modified")
    mtime_ns = http_date_ns(told) if told else 0
    return ObjectInfo(key, size, mtime_ns, quoted(headers.get("etag", "")) or made_up(mtime_ns, size))


def written(reply: Reply) -> Written:
    """What a reply's headers tell of the new version."""
    told = reply.headers.get("last-modified")
    return Written(quoted(reply.headers.get("etag", "")), http_date_ns(told) if told else None)


def xml(body: bytes) -> ElementTree.Element:
    """The root of an XML document, its tags without namespaces; `ValueError` when it is none."""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as exc:
        raise ValueError(str(exc)) from exc
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    return root


def child(node: ElementTree.Element, tag: str) -> str:
    """The text of a child; `ValueError` when there is no such child."""
    found = node.findtext(tag)
    if found is None:
        raise ValueError(f"no {tag} in {node.tag}")
    return found


def query(parameters: Mapping[str, str | None]) -> str:
    """A query string in the canonical form that signatures cover: sorted, percent-encoded, no plus signs."""
    given = sorted((name, value) for name, value in parameters.items() if value is not None)
    return "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in given)


def quoted(etag: str) -> str:
    """An etag as If-Match takes it: some listings leave the quotes out."""
    return etag if etag.endswith('"') or not etag else f'"{etag}"'


def seconds_ns(when: datetime) -> int:
    """A time as nanoseconds, cut to seconds: LIST replies tell milliseconds, HEAD replies do not, and one object must not
    have two mtimes."""
    return int(when.timestamp()) * 1_000_000_000


MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def http_date_ns(text: str) -> int:
    """`Sat, 21 Nov 2026 08:06:30 GMT` as nanoseconds. Not by the library's parser, which takes ten times as long: a page has
    a thousand of them."""
    _, day, month, year, clock, _ = text.split()
    return seconds_ns(
        datetime.fromisoformat(f"{year}-{MONTHS.index(month) + 1:02d}-{int(day):02d}T{clock}+00:00")
    )

"""HTTP to an object store: a transport (urllib3), and signed requests to the objects of one bucket.

A vendor's module says what to send (`Request`) and reads the reply. `SignedHttp` makes the URL, has it signed, and turns
refusals into errors. `Transport` alone knows the HTTP library.

Listing and writing go this way and not through obstore. obstore's listing collects every page in memory, fails for a whole
directory when one key in it has a `..` segment, and folds `a//b` into `a`. Its put takes a file only as a whole, numbers the
parts itself, and neither resumes an upload nor lists parts. Reading goes this way for the few keys that obstore cannot
name (`cachefs.origin.obstore_client`).
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from cachefs.base.errors import (
    CachefsError,
    ConfigError,
    NotFound,
    ObjectChanged,
    OriginFailed,
    Transient,
    Unsupported,
)
from cachefs.origin.credentials import Credentials
from cachefs.origin.protocol import PATIENCE, Body, ObjectInfo, Written
from cachefs.origin.replies import one_line, refusal

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

CONNECT_S = 5.0
"""Guessed: a store in reach answers a SYN in milliseconds, one lost packet costs a second."""

CHUNK = 128 << 10
"""Bytes of one chunk of a body. Borrowed from obstore's chunks."""

ANY_TYPE = "application/octet-stream"

CA_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables that name a PEM file of trusted authorities; the first that is set counts, as in botocore."""


@dataclass(frozen=True, slots=True)
class Reply:
    """`headers` has lower-case names, or is a mapping that ignores case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Stream:
    """A reply whose body is still to come."""

    def __init__(self, reply: BaseHTTPResponse, what: str) -> None:
        self.status: int = reply.status
        self.headers: Mapping[str, str] = reply.headers
        self._reply, self._what = reply, what

    def chunks(self) -> Iterator[bytes]:
        """The body without decoding; `Transient` where it breaks."""
        import urllib3

        try:
            yield from self._reply.stream(CHUNK, decode_content=False)
        except urllib3.exceptions.HTTPError as exc:
            raise _broken(self._what, exc) from exc

    def close(self) -> None:
        """End the connection. One whose body was read to its end went back to the pool before."""
        self._reply.close()


class Transport:
    """Pooled connections. Thread-safe. `stall_s`: the longest silence of the origin within a reply. Redirects are not
    followed, because a signature is good for one host."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._by_proxy: dict[str, Any] = {}
        self._by_host: dict[tuple[str, str], Any] = {}  # (scheme, host)

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | Iterator[bytes] | None = None,
        patience: int = 1,
    ) -> Reply:
        """The reply, whatever its status; `Transient` when there is none. `headers` tell the length of a body.
        `patience`: that many times the usual silence is allowed before the reply."""
        reply = self._send(method, url, headers, body, patience, preload_content=True)
        return Reply(reply.status, reply.headers, reply.data)

    def stream(self, method: str, url: str, headers: Mapping[str, str], what: str) -> Stream:
        """The same with the body still to come; the caller closes it. Errors of the body name `what`."""
        return Stream(self._send(method, url, headers, None, 1, preload_content=False), what)

    def close(self) -> None:
        for pool in self._by_proxy.values():
            pool.clear()

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | Iterator[bytes] | None,
        patience: int,
        preload_content: bool,
    ) -> BaseHTTPResponse:
        import urllib3

        try:
            reply: BaseHTTPResponse = self._pool(url).request(
                method,
                url,
                headers=dict(headers),
                body=body,
                redirect=False,
                retries=False,
                preload_content=preload_content,
                timeout=urllib3.Timeout(connect=CONNECT_S, read=self.stall_s * patience),
            )
        except urllib3.exceptions.HTTPError as exc:
            raise _broken(urlsplit(url).netloc.rpartition("@")[2], exc) from exc
        return reply

    def _pool(self, url: str) -> Any:
        """The connections to a host. The environment's proxies are looked up once per host: a lookup takes as long as
        signing a small request."""
        parts = urlsplit(url)
        host = parts.scheme, parts.hostname or ""
        found = self._by_host.get(host)
        if found is None:
            found = self._by_host[host] = self._manager(*host)
        return found

    def _manager(self, scheme: str, host: str) -> Any:
        import urllib3

        proxy = urllib.request.getproxies().get(scheme, "")
        if proxy and urllib.request.proxy_bypass(host):
            proxy = ""
        if proxy not in self._by_proxy:
            if scheme == "https":
                authorities()  # urllib3's error would not name the file that cannot be read
            settings: dict[str, Any] = {
                "maxsize": 64,  # connections kept: as many as parts of files are written at once
                "ca_certs": _authorities_file()[1] or None,
            }
            manager = urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)
            self._by_proxy[proxy] = manager
        return self._by_proxy[proxy]


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
        """URL and headers of the authorised request."""


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
        given, sent = dict(request.headers), None
        if request.method in ("PUT", "POST"):
            body = request.body
            given["Content-Length"] = str(len(body) if isinstance(body, bytes) else body.size)
            given.setdefault("Content-Type", ANY_TYPE)
            sent = body if isinstance(body, bytes) else body.chunks()
        url, headers = self._signed(request, given)
        return self.transport.request(request.method, url, headers, sent, PATIENCE if request.slow else 1)

    def checked(self, request: Request, reply: Reply) -> Reply:
        """The reply if it is a success; else its refusal is raised."""
        if not 200 <= reply.status < 300:
            raise self._refusal(reply.status, reply.headers, reply.body, self._what(request))
        return reply

    def head(self, key: str) -> tuple[ObjectInfo, Mapping[str, str]]:
        """An object, and all headers of the reply that shows it."""
        reply = self.ask(Request("HEAD", key))
        try:
            headers = reply.headers
            size, mtime_ns = int(headers["content-length"]), http_date_ns(headers["last-modified"])
            return ObjectInfo(key, size, mtime_ns, quoted(headers["etag"])), headers
        except (KeyError, ValueError) as exc:
            raise OriginFailed(f"{self.name(key)}: the origin's reply does not describe an object") from exc

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        """As `Client.read`."""
        what, given = self.name(key), {"If-Match": etag}
        if not whole:
            given["Range"] = f"bytes={start}-{stop - 1}"
        url, headers = self._signed(Request("GET", key), given)
        reply = self.transport.stream("GET", url, headers, what)
        try:
            if reply.status not in (200, 206):
                raise self._refusal(reply.status, reply.headers, b"".join(reply.chunks()), what)
            if quoted(reply.headers.get("etag", "")) != etag:
                raise ObjectChanged(f"{what}: the object changed at the origin")
            sent = reply.headers.get("content-range", "the whole object")
            if not whole and not sent.startswith(f"bytes {start}-{stop - 1}/"):
                raise Transient(f"{what}: asked for bytes {start} to {stop}, the origin sent {sent}")
            yield from reply.chunks()
        finally:
            reply.close()

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

    def _signed(self, request: Request, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        key = request.key
        if any(segment in (".", "..") for segment in key.split("/")):
            raise Unsupported(f"{self._what(request)}: HTTP drops the segments . and .. of a path")
        url = f"{self.place.url()}/{quote(key)}" if key else self.place.url()
        if request.parameters:
            url += f"?{query(request.parameters)}"
        return self.place.sign(request.method, url, headers, request.body)

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


def authorities() -> bytes | None:
    """The certificates (PEM) of the authorities that the environment names; None when it names none."""
    name, path = _authorities_file()
    try:
        return Path(path).read_bytes() if path else None
    except OSError as exc:
        raise ConfigError(f"{name}={path} cannot be read ({exc.strerror}): name a PEM file") from exc


def _authorities_file() -> tuple[str, str]:
    """(variable, path), or two empty strings."""
    named = ((name, os.environ.get(name, "")) for name in CA_VARIABLES)
    return next(((name, path) for name, path in named if path), ("", ""))


def _broken(what: str, exc: Exception) -> Transient:
    reason = getattr(exc, "reason", None) or exc
    return Transient(one_line(f"{what}: {type(reason).__name__}: {reason}"))


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

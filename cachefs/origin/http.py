"""HTTP to object stores: signed requests, the client that all origins over HTTP share, and what it is made of.

A vendor's client says what to send (`Request`) and reads the reply. Its base class, `HttpClient`, makes the URL, has it
signed, and turns refusals into errors. `Transport` exchanges the bytes. `Md5Etags` compares objects with their etags."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import select
import ssl
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

import pycurl
import trio

from cachefs.base.errors import (
    CachefsError,
    ConfigError,
    NoSuchUpload,
    NotFound,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    Throttled,
    Transient,
    Unsupported,
)
from cachefs.base.logs import Repeats
from cachefs.base.tasks import in_thread
from cachefs.origin.protocol import (
    MD5_ETAG,
    PATIENCE,
    AskedToWait,
    Body,
    ByteRange,
    CompletionInProgress,
    ConnectionEnded,
    ObjectInfo,
    Taker,
    Writer,
    Written,
    made_up,
    raise_if_abandoned,
)

ANY_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Request:
    """One request to an object store, before it has a URL and a signature.

    `key` is "" for the bucket itself. Parameters that are None are left out. `slow`: the origin works before it replies.
    `about`: the key that error messages name, if it is not `key`."""

    method: str
    key: str = ""
    parameters: Mapping[str, str | None] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body | bytes = b""
    slow: bool = False
    about: str | None = None


Signed = tuple[str, Mapping[str, str]]
"""URL and headers of an authorised request."""

Sign = Callable[[str, str, Mapping[str, str], "Body | bytes"], Signed]
"""As `Place.sign`: (method, URL, headers, body)."""


class Place(Protocol):
    """A bucket or container: where its objects are, and how requests to it are signed."""

    @property
    def label(self) -> str:
        """Its URL as users write it, for messages."""

    @property
    def source(self) -> str:
        """As `Client.source`."""

    @property
    def credentials(self) -> Credentials: ...

    def url(self) -> str:
        """The URL that a slash and a key are appended to. It may change: S3 may learn another region from a reply."""

    def sign(self, method: str, url: str, headers: Mapping[str, str], body: Body | bytes) -> Signed:
        """Authorise a request. May wait for credentials."""

    def signer(self) -> Sign | None:
        """A function like `sign`, with the credentials for reading, which any thread may call and which does not wait. None
        if getting these credentials would have to wait."""


class HttpClient:
    """What the clients of all origins over HTTP have in common: signed requests to the objects of one place, and reading."""

    def __init__(self, place: Place, transport: Transport) -> None:
        self.place, self.transport, self.source = place, transport, place.source
        self.writer: Writer | None = None
        self.patience_s = transport.stall_s
        self.renew, self.close = place.credentials.renew, transport.close
        self.md5 = Md5Etags()
        # Credentials are looked for by one caller at a time, so more threads would only wait for that one.
        self._looking = trio.CapacityLimiter(1)

    def name(self, key: str) -> str:
        """A key as messages name it."""
        return f"{self.place.label}/{key}"

    def ask(self, request: Request) -> Reply:
        """The reply to a request; raises the error of a refusal."""
        return self.checked(request, self.exchange(request))

    def exchange(self, request: Request) -> Reply:
        """The reply to a request, whatever its status."""
        exchange, body = self._exchange(request, self.place.sign), request.body
        return self.transport.send(exchange, body if isinstance(body, bytes) else body.chunks())

    async def ask_without_thread(self, request: Request) -> Reply | None:
        """As `ask`, on the trio thread, for a small body in memory. None, and nothing is sent, if signing it would wait."""
        reply = await self.exchange_without_thread(request)
        return None if reply is None else self.checked(request, reply)

    async def exchange_without_thread(self, request: Request) -> Reply | None:
        """As `exchange`, where `ask_without_thread` is as `ask`."""
        sign = self.place.signer()
        if sign is None:
            return None
        exchange = self._exchange(request, sign)
        exchange.short = True
        if not isinstance(request.body, bytes):
            exchange.pieces.extend(request.body.chunks())
        await self.transport.run(exchange)
        return exchange.reply

    def _exchange(self, request: Request, sign: Sign) -> Exchange:
        """The signed request, without its body."""
        given, body, size = dict(request.headers), request.body, 0
        if request.method in ("PUT", "POST"):
            size = len(body) if isinstance(body, bytes) else body.size
            given["Content-Length"] = str(size)
            given.setdefault("Content-Type", ANY_TYPE)
        url = self.url(request.key)
        if request.parameters:
            url += f"?{query(request.parameters)}"
        patience = PATIENCE if request.slow else 1
        return Exchange(request.method, *sign(request.method, url, given, body), size=size, patience=patience)

    def checked(self, request: Request, reply: Reply) -> Reply:
        """The reply if it is a success; else raises the error of its refusal."""
        if not 200 <= reply.status < 300:
            name = self.name(request.key if request.about is None else request.about)
            raise self.refusal(reply.status, reply.headers, reply.body, name)
        return reply

    def head(self, key: str) -> ObjectInfo:
        return self.looked_up(key)[0]

    def looked_up(self, key: str) -> tuple[ObjectInfo, Mapping[str, str]]:
        """(the object, all headers of the reply) from a HEAD."""
        reply = self.exchange(Request("HEAD", key))
        return self._described(key, reply), reply.headers

    async def head_without_thread(self, key: str) -> ObjectInfo | None:
        """The object from a HEAD, where `ask_without_thread` is as `ask`."""
        reply = await self.exchange_without_thread(Request("HEAD", key))
        return None if reply is None else self._described(key, reply)

    def _described(self, key: str, reply: Reply) -> ObjectInfo:
        """The object that the reply to a HEAD describes."""
        headers = self.checked(Request("HEAD", key), reply).headers
        try:
            return _object_of(key, int(headers["content-length"]), headers)
        except (KeyError, ValueError) as exc:
            raise OriginFailed(f"{self.name(key)}: the origin's reply does not describe an object") from exc

    async def fetch(self, wanted: ByteRange, taker: Taker) -> None:
        """Give the bytes to `taker` as they arrive. Raises `ObjectChanged` if the reply is of another version. A cancelled
        caller returns at once; `taker` may be called once more after that."""
        sign = self.place.signer()
        reading = _Reading(self, sign or self.place.sign, wanted, taker)
        if sign is None:
            try:
                signed = await in_thread(reading.signed, abandon_on_cancel=True, limiter=self._looking)
            except OSError as exc:
                raise Transient(f"{self.place.label}: {exc.strerror}") from exc
            reading.exchange.prepare = lambda: signed
        await self.transport.run(reading.exchange)
        if (error := reading.error) is not None:
            raise error

    def begin_fetch(
        self, wanted: ByteRange, taker: Taker, ended: Callable[[Exception | None], None]
    ) -> Callable[[], None] | None:
        """As `fetch`, without a task that waits. `ended` is called on the trio thread at the end, and `taker` is not called
        after that. Returns a function that ends it early; None if it cannot begin at once."""
        sign = self.place.signer()
        if sign is None:
            return None
        reading = _Reading(self, sign, wanted, taker)
        return self.transport.begin(reading.exchange, lambda: ended(reading.error))

    def delete(self, key: str) -> None:
        """As `Writer.delete`."""
        with suppress(NotFound):
            self.ask(Request("DELETE", key))

    def document(self, reply: Reply, key: str) -> ElementTree.Element:
        """The reply's XML without namespaces. Raises the error in it: S3 sends the status before it has finished a slow
        request, so the body of a success may be an error."""
        try:
            found = xml(reply.body)
        except ValueError as exc:
            raise OriginFailed(f"{self.name(key)}: the origin's reply is not XML: {exc}") from exc
        if found.tag == "Error":
            raise self.refusal(reply.status, {}, reply.body, self.name(key))
        return found

    def url(self, key: str) -> str:
        """The URL of an object, or of the bucket itself for ""."""
        if any(segment in (".", "..") for segment in key.split("/")):
            raise Unsupported(f"{self.name(key)}: HTTP drops the segments . and .. of a path")
        return f"{self.place.url()}/{quote(key, errors='surrogateescape')}" if key else self.place.url()

    def refusal(self, status: int, headers: Mapping[str, str], body: bytes, name: str) -> CachefsError:
        advice, text = self.place.credentials.advice, body.decode("utf-8", "replace")
        return refusal(status, text, name=name, advice=advice, headers=headers)


class _Reading:
    """A conditional GET: its exchange, and the receiver that passes the body to `taker`."""

    def __init__(self, client: HttpClient, sign: Sign, wanted: ByteRange, taker: Taker) -> None:
        self._client, self._sign, self._wanted = client, sign, wanted
        self._refused = False
        size = wanted.stop - wanted.start
        self._md5 = client.md5.choose(wanted.key, wanted.etag, size) if wanted.whole else ""
        self.waits = taker.waits or (self._md5 != "" and size > AT_ONCE)
        first = least = size
        if not self._md5 and size > AT_ONCE:
            first, least = FIRST_CHUNK, 4 * CHUNK if taker.waits else CHUNK
        self.exchange = Exchange("GET", client.place.url(), {}, receiver=self, first=first, least=least)
        self.exchange.prepare, self.exchange.short = self.signed, size <= AT_ONCE and not self.waits
        self._taker, self.coming = taker, taker.coming
        self._at = wanted.start
        self._cut = False

    @property
    def name(self) -> str:
        return self._client.name(self._wanted.key)

    def signed(self) -> Signed:
        """URL and headers."""
        wanted = self._wanted
        given = {} if wanted.etag.startswith(("mtime-", "W/")) else {"If-Match": wanted.etag}
        if not wanted.whole:
            given["Range"] = f"bytes={wanted.start}-{wanted.stop - 1}"
        return self._sign("GET", self._client.url(wanted.key), given, b"")

    @property
    def error(self) -> Exception | None:
        """Why the exchange failed, which has ended; None if it did not."""
        ended = self.exchange
        if ended.error is None and self._refused:
            return self._client.refusal(ended.status, ended.reply_headers, ended.body, self.name)
        return ended.error

    def begin(self, status: int, headers: Mapping[str, str]) -> bool:
        """As `Receiver.begin`. The etag is compared although If-Match was sent: some stores ignore it."""
        if status not in (200, 206):
            self._refused = True
            return False
        key, etag, start, stop, whole = self._wanted
        content_range, _, size = headers.get("content-range", "").rpartition("/")
        if status == 206 and content_range != f"bytes {start}-{stop - 1}":
            came = content_range or "no range"
            raise Transient(f"{self.name}: asked for bytes {start} to {stop}, the origin sent {came}")
        try:
            found = quoted(headers.get("etag", ""))
            if not found:
                found = _object_of(key, int(size or headers["content-length"]), headers).etag
            same = found == etag
        except (KeyError, ValueError):
            same = False
        if not same:
            raise ObjectChanged(f"{self.name}: the object changed at the origin")
        if not ENCRYPTED.isdisjoint(headers):
            self._md5 = ""
        if status == 200 and not whole:
            # A server without ranges (Python's http.server) sends the whole object: the other bytes are dropped.
            self._at, self._cut = 0, True
        return True

    def take(self, data: memoryview | bytes) -> bool:
        key, _, start, stop, _ = self._wanted
        if self._md5 and len(data) == stop - start:
            self._client.md5.compare(key, self.name, self._md5, data)
        if not self._cut:
            return self._taker.take(data)
        at, self._at = self._at, self._at + len(data)
        within = data[max(0, start - at) : max(0, stop - at)]
        return (not within or self._taker.take(within)) and self._at < stop


def _object_of(key: str, size: int, headers: Mapping[str, str]) -> ObjectInfo:
    """The object that the headers of a reply describe."""
    last_modified = headers.get("last-modified")
    mtime_ns = http_date_ns(last_modified) if last_modified else 0
    return ObjectInfo(key, size, mtime_ns, quoted(headers.get("etag", "")) or made_up(mtime_ns, size))


def written(reply: Reply) -> Written:
    """The etag and time of a new version, as far as the reply's headers have them."""
    last_modified = reply.headers.get("last-modified")
    return Written(
        quoted(reply.headers.get("etag", "")), http_date_ns(last_modified) if last_modified else None
    )


def xml(body: bytes) -> ElementTree.Element:
    """The root of an XML document, its tags without namespaces. Raises `ValueError` if it is not XML."""
    try:
        root = ElementTree.fromstring(body)
    except (ElementTree.ParseError, LookupError) as exc:  # LookupError: an encoding that Python does not know
        raise ValueError(str(exc)) from exc
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    return root


def child(node: ElementTree.Element, tag: str) -> str:
    """The text of a child. Raises `ValueError` if there is no such child."""
    found = node.findtext(tag)
    if found is None:
        raise ValueError(f"no {tag} in {node.tag}")
    return found


def query(parameters: Mapping[str, str | None]) -> str:
    """A query string in the canonical form that signatures cover: sorted, percent-encoded, no plus signs."""
    given = sorted((name, value) for name, value in parameters.items() if value is not None)
    return "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in given)


def quoted(etag: str) -> str:
    """The etag as If-Match takes it, in quotes: some listings leave them out."""
    return etag if etag.endswith('"') or not etag else f'"{etag}"'


def seconds_ns(when: datetime) -> int:
    """A time in nanoseconds, without the fraction of a second: LIST replies have milliseconds, HEAD replies have not, and
    one object must not have two mtimes."""
    return int(when.timestamp()) * 1_000_000_000


def http_date_ns(text: str) -> int:
    """`Sat, 21 Nov 2026 08:06:30 GMT` in nanoseconds. Raises `ValueError`."""
    try:
        return seconds_ns(parsedate_to_datetime(text))
    except OverflowError as exc:  # a year of many digits
        raise ValueError(str(exc)) from exc


# HTTP exchanges with object stores: libcurl's multi interface, in loops that wait for nothing but sockets. Each origin has
# two loops: a task on the trio thread for short exchanges, a thread for the others. A caller hands over an `Exchange` by
# appending it to a queue and waking the loop. libcurl repeats nothing: an exchange is one attempt. No loop runs, and no
# descriptor is open, before the first exchange.

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""How long connecting may take. Derived: the kernel repeats a SYN after 1 and 3 s (RFC 6298), so two may be lost."""

AT_ONCE = 256 << 10
"""A body of up to so many bytes is handed over in one piece and hashed by the loop; a larger one in several pieces,
to wake its first reader early. Derived: its MD5 takes 0.4 ms at 650 MB/s, and all of it comes within 1 ms at 2 Gbit/s."""

CHUNK = 128 << 10
"""The least bytes of one piece of a larger body. Borrowed from obstore, for which it was measured: each piece costs a call
of the receiver, and a longer piece makes the first reader wait longer."""

FIRST_CHUNK = 32 << 10
"""The least bytes of the first piece of a larger body. Derived: the kernel asks for 16 KiB where a program begins to read
with 4 KiB. Waiting for 128 KiB beside one other transfer takes 1.3 ms at 200 MB/s."""

BUFFER = 256 << 10
"""Bytes that libcurl takes from a socket at once. All exchanges of a loop share the buffer."""

LONGEST_REFUSAL = 64 << 10
"""Bytes of a refusal's body that are kept. Derived: stores explain themselves in a few hundred."""

LONGEST_REPLY = 64 << 20
"""Bytes of a reply without a receiver. Derived: a page of a listing has at most 16 MiB, with 1,000 names of 1,024 characters
that are all percent-encoded; an index page of a web server so long has half a million names."""

REPLY_S = 60.0
"""How long such a reply, and the head of any reply, may take behind the request. Derived: the usual deadline of a request,
after which no caller waits for it."""

_STATUS_LINE = re.compile(r"HTTP/[0-9.]+[ \t]+([0-9]{3})")

KEPT_CONNECTIONS = 256
"""Idle connections kept for an origin. Derived: four times the usual concurrency; libcurl closes them after two minutes."""

UNSENT = 2
"""Pieces of a request's body that may wait for the connection. Derived: one is sent while the next is read."""

SOCKETS_A_TURN = 16
"""Most sockets that a loop on the trio thread handles before other tasks run. Measured: with half as many, a cold small file
takes an eighth more processor time with 32 readers; with twice as many, as much. 100 KB from each take 2 ms."""

CLOSED = "the HTTP client was closed"

CA_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables that name a PEM file of trusted authorities; the first that is set counts, as in botocore."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply with its whole body. `headers` has lower-case names. `url` is where the reply came from, after redirects."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str


class Receiver(Taker, Protocol):
    """Takes the head and the body of a reply, one call at a time: from the loop, or if it `waits`, from worker threads."""

    def begin(self, status: int, headers: Mapping[str, str]) -> bool:
        """Take the head of the reply. True: the body goes to `take`. False: the body is kept as `Exchange.body`."""


class Exchange:
    """One request and its reply. It belongs to the loop until `ended`; `error` is set if there is no whole reply.
    `prepare`, if set, makes URL and headers in the loop; until then only the host of `url` counts. `size` is the
    length of the request's body, which `pieces` holds or will hold. A piece of the reply's body is handed over once it has
    `least` bytes, the first one once it has `first`. The origin may be silent for `patience` times as long as usual.
    `short`: the trio thread can send it and take its reply, because neither body is long and the receiver does not wait."""

    def __init__(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        *,
        patience: int = 1,
        size: int = 0,
        receiver: Receiver | None = None,
        first: int = FIRST_CHUNK,
        least: int = CHUNK,
    ) -> None:
        self.method, self.url, self.headers = method, url, headers
        self.patience, self.size, self.short = patience, size, False
        self.prepare: Callable[[], Signed] | None = None
        self.proxy = ""
        self.trusted = ""  # path of the certificate authorities to trust; "" without TLS
        self.error: Exception | None = None
        self.ended = False
        self.on_end: Callable[[], None] | None = None  # wakes a waiting thread; called by the loop
        self.wake: Callable[[], None] | None = None  # called on the trio thread; None once no task waits
        self.handle: pycurl.Curl | None = None
        # The request's body.
        self.pieces: deque[bytes] = deque()
        self.room: threading.Semaphore | None = None  # for pieces that come one by one
        self._sent = 0  # bytes of the first piece that are sent
        # The reply.
        self.status = 0
        self.reply_headers: dict[str, str] = {}  # by lower-case name
        self.final_url = url
        self.lines: list[bytes] = []
        self.lines_seen = 0
        self.seen_active_at = 0.0
        self.active_at = math.inf  # when bytes of the request or the reply last moved
        self.asked_at = math.inf  # when bytes of the request last moved
        self.paused = False
        self.complete = False  # libcurl is done with it
        self.delivering = False  # a worker thread is calling the receiver
        self.refused = False  # the receiver wants no more bytes
        self.deliver_in_thread: Callable[[Exchange, Callable[[], None]], None]
        self.receiver, self._wanted, self._least = receiver, first, least  # `_wanted`: of the next piece
        # True if the body goes to the receiver; None before its first byte.
        self._receives: bool | None = None
        self._data: list[bytes] = []
        self._held_bytes = 0

    @property
    def body(self) -> bytes:
        return b"".join(self._data)

    @property
    def reply(self) -> Reply:
        return Reply(self.status, self.reply_headers, self.body, self.final_url)

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc.rpartition("@")[2]

    # libcurl's callbacks. They must not raise: libcurl would end the exchange, and the reason would be lost.

    def on_request(self, *_: object) -> object:
        """libcurl is about to send the request. Aborts if it was sent before: the origin has ended a kept connection before
        it replied, and libcurl would repeat the request uncounted."""
        if self.active_at < math.inf and not self.lines:
            self.error = ConnectionEnded(f"{self.host}: the origin ended the connection before it replied")
            return pycurl.PREREQFUNC_ABORT
        self.active_at = self.asked_at = time.monotonic()
        return pycurl.PREREQFUNC_OK

    def on_read(self, count: int) -> object:
        """Give libcurl the next bytes of the request's body. Pauses the exchange if there are none yet."""
        self.active_at = self.asked_at = time.monotonic()
        if not self.pieces:
            self.paused = True
            return pycurl.READFUNC_PAUSE
        data = self.pieces[0][self._sent : self._sent + count]
        self._sent += len(data)
        if self._sent == len(self.pieces[0]):
            self.pieces.popleft()
            self._sent = 0
            if self.room is not None:
                self.room.release()
        return data

    def on_body(self, data: bytes) -> object:
        """Take bytes of the reply's body; 0 ends the exchange. After a pause, libcurl passes the same bytes again."""
        self.active_at = time.monotonic()
        if self._receives is None:
            self.begin()
        if self.error is not None or self.refused:
            return 0
        if not self._receives:
            if self.receiver is None and self._held_bytes >= LONGEST_REPLY:
                self.error = OriginFailed(f"{self.host}: the reply has more than {LONGEST_REPLY >> 20} MiB")
                return 0
            if self.receiver is None or self._held_bytes < LONGEST_REFUSAL:
                self._data.append(data)
                self._held_bytes += len(data)
            return None
        if self.delivering and self._held_bytes >= self._wanted:
            self.paused = True
            return pycurl.WRITEFUNC_PAUSE
        self._data.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= self._wanted and not self.delivering:
            self.deliver()
        return 0 if self.error is not None or self.refused else None

    # The reply.

    def begin(self) -> None:
        """Parse the head of the reply: the last one, after redirects and 100-continue."""
        self._receives = False
        for line in b"".join(self.lines).decode("utf-8", "replace").split("\n"):
            # A header may begin so, too.
            if line[:5] == "HTTP/" and (status_line := _STATUS_LINE.match(line)):
                self.status = int(status_line[1])
                self.reply_headers = {}
            else:
                name, colon, value = line.partition(":")
                if colon:
                    self.reply_headers[name.lower()] = value.strip()
        if self.receiver is not None:
            try:
                self._receives = self.receiver.begin(self.status, self.reply_headers)
            except Exception as exc:
                self.error = exc

    def _has_head(self) -> bool:
        """True if the empty line has come that ends the last head. Trailers may follow it."""
        ended = False
        for line in self.lines:
            ended = not line.startswith(b"HTTP/") and (ended or not line.strip())
        return ended

    def lasts_too_long(self, now: float) -> bool:
        """True if the reply should have come, also if its bytes trickle in: its head, or without a receiver all of it."""
        return not (self._receives or self.paused) and now - self.asked_at > REPLY_S * self.patience

    def report(self) -> None:
        """Tell the receiver that bytes have arrived which it has not been given."""
        if self._receives and self._held_bytes and self.receiver is not None:
            self.receiver.coming()

    def deliver(self) -> None:
        """Give the receiver the bytes that are held."""
        receiver, data = self.receiver, self.body
        assert receiver is not None
        self._data, self._held_bytes, self._wanted = [], 0, self._least
        if receiver.waits:
            self.delivering = True
            try:
                self.deliver_in_thread(self, partial(self._give, receiver, data))
            except RuntimeError as exc:
                self.delivering, self.refused = False, True
                self.error = Transient(f"{self.host}: {exc}")  # no thread can be started
        else:
            self._give(receiver, data)

    def _give(self, receiver: Receiver, data: bytes) -> None:
        try:
            self.refused = not receiver.take(data)
        except Exception as exc:
            self.error, self.refused = exc, True

    def finish(self) -> bool:
        """Called when libcurl is done. True if the receiver has been given all bytes that came."""
        self.complete = True
        if self._receives is None and self.error is None:
            if self._has_head():
                self.begin()
            else:  # which is no error for libcurl
                self.error = Transient(f"{self.host}: the connection ended within the head of the reply")
        if self._receives and self._held_bytes and not (self.delivering or self.refused):
            self.deliver()
        return not self.delivering


class Transport:
    """The exchanges of one origin. Thread-safe. `stall_s`: the longest silence of the origin within an exchange. `follow`:
    follow redirects; not for signed requests, because a signature is valid for one host."""

    def __init__(self, stall_s: float, *, follow: bool = False) -> None:
        self.stall_s = stall_s
        self._follow = follow
        self._lock = threading.Lock()
        self._loops: dict[type[_Loop], _Loop] = {}
        self._closed = False
        self._routes: dict[str, tuple[str, str]] = {}  # scheme://host → (proxy, authorities)

    async def run(self, exchange: Exchange) -> None:
        """On the trio thread: return when the exchange has ended; raises its error. A cancelled caller returns at once. The
        receiver may be called once more after that, and must then refuse the bytes itself."""
        # A task that is cancelled already must not send a PUT: its caller takes it that nothing was sent.
        await trio.lowlevel.checkpoint_if_cancelled()
        cancel = self.begin(exchange, partial(trio.lowlevel.reschedule, trio.lowlevel.current_task()))

        def leave(_: object) -> trio.lowlevel.Abort:
            exchange.wake = None
            cancel()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)
        if exchange.error is not None:
            raise exchange.error

    def begin(self, exchange: Exchange, ended: Callable[[], None]) -> Callable[[], None]:
        """On the trio thread: begin an exchange; `ended` is called there when it is over. Returns a function that ends it
        early."""
        loop = self._loop_for(exchange)
        loop.token = loop.token or trio.lowlevel.current_trio_token()
        exchange.wake = ended
        loop.post(loop.begin, exchange)
        return partial(loop.post, loop.cancel, exchange)

    def send(self, exchange: Exchange, body: bytes | Iterator[bytes] = b"") -> Reply:
        """Send a request and return the reply, whatever its status. Raises `Transient` if there is none. Blocks, so call it
        in a worker thread. Exceptions of `body` are raised unchanged."""
        raise_if_abandoned()  # signing it may have waited for credentials
        ended = threading.Event()
        exchange.on_end = ended.set
        loop = self._loop_for(exchange)
        if isinstance(body, bytes):
            exchange.pieces.extend((body,) if body else ())
            loop.post(loop.begin, exchange)
        else:
            room = exchange.room = threading.Semaphore(UNSENT)
            loop.post(loop.begin, exchange)
            try:
                for piece in body:
                    room.acquire()
                    if exchange.ended:  # with a refusal, or an error
                        break
                    exchange.pieces.append(piece)
                    loop.post(loop.resume, exchange)
            except BaseException:
                loop.post(loop.cancel, exchange)
                raise
        ended.wait()
        if exchange.error is not None:
            raise exchange.error
        return exchange.reply

    def close(self) -> None:
        """End all exchanges, with an error, and the loops."""
        with self._lock:
            self._closed = True
        for loop in self._loops.values():
            loop.stop()

    def _loop_for(self, exchange: Exchange) -> _Loop:
        """The loop for the exchange, which is started if none runs. Sets the proxy and the certificate authorities of
        `exchange` from the environment. They are looked up once for each host, because that takes as long as signing a small
        request."""
        host = "/".join(exchange.url.split("/", 3)[:3])
        route = self._routes.get(host)
        if route is None:
            parts = urlsplit(exchange.url)
            proxy = urllib.request.getproxies().get(parts.scheme, "")
            if proxy and urllib.request.proxy_bypass(parts.hostname or ""):
                proxy = ""
            encrypted = "https" in (parts.scheme, urlsplit(proxy).scheme) or self._follow
            route = self._routes[host] = proxy, authorities() if encrypted else ""
        exchange.proxy, exchange.trusted = route
        with self._lock:
            if self._closed:
                raise Transient(CLOSED)
            kind = _TaskLoop if exchange.short else _ThreadLoop
            loop = self._loops.get(kind)
            if loop is None or loop.over:
                try:
                    loop = self._loops[kind] = kind(self.stall_s, self._follow)
                except (OSError, RuntimeError) as exc:  # too many files are open, or threads run
                    raise Transient(f"the HTTP client cannot begin: {exc}") from exc
            return loop


class _Loop:
    """Exchanges through libcurl's multi interface, and the state that one thread alone touches. `over`: it takes no more
    exchanges."""

    def __init__(self, stall_s: float, follow: bool) -> None:
        self.token: trio.lowlevel.TrioToken | None = None
        self.over = False
        self._follow = follow
        self._stall_s, self._tick_s = stall_s, min(1.0, stall_s / 8)
        self._queue: deque[tuple[Callable[[Exchange], None], Exchange]] = deque()
        self._stopped = False
        self._live: dict[pycurl.Curl, Exchange] = {}
        self._idle: list[pycurl.Curl] = []
        self._ended: list[Exchange] = []
        # How many of the next exchanges get a new connection, because kept ones had ended.
        self._new_connections = 0
        self._timer_at, self._look_at = math.inf, 0.0
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, KEPT_CONNECTIONS)
        self._poll = select.epoll()

    def post(self, verb: Callable[[Exchange], None], exchange: Exchange) -> None:
        """Have the loop call `verb(exchange)`."""
        raise NotImplementedError

    def stop(self) -> None:
        """End all exchanges and the loop soon. From any thread."""
        raise NotImplementedError

    def _notify(self) -> None:
        """Tell the callers of the exchanges that have ended."""
        raise NotImplementedError

    # Verbs, which the loop calls.

    def begin(self, exchange: Exchange) -> None:
        exchange.deliver_in_thread = self._deliver_in_thread
        try:
            handle = exchange.handle = self._idle.pop() if self._idle else pycurl.Curl()
            self._configure(handle, exchange)
            self._multi.add_handle(handle)
        except Exception as exc:
            exchange.handle = None
            failed = OriginFailed(one_line(f"{exchange.host}: {exc}"))
            self._end(exchange, exc if isinstance(exc, CachefsError) else failed)
        else:
            self._live[handle] = exchange

    def cancel(self, exchange: Exchange) -> None:
        if not exchange.ended:
            self._end(exchange, Transient("cancelled"))

    def resume(self, exchange: Exchange) -> None:
        """Continue an exchange that may be paused."""
        if exchange.ended or exchange.handle is None:
            return
        if exchange.complete:
            self._finish(exchange)
        elif exchange.error is not None or exchange.refused:
            self._end(exchange, exchange.error)
        elif exchange.paused:
            exchange.paused = False
            exchange.active_at = exchange.asked_at = time.monotonic()
            with suppress(pycurl.error):  # it has just failed, and `info_read` will report that
                exchange.handle.pause(pycurl.PAUSE_CONT)

    def _deliver_in_thread(self, exchange: Exchange, give: Callable[[], None]) -> None:
        trio.lowlevel.start_thread_soon(give, lambda _: self.post(self._delivered, exchange))

    def _delivered(self, exchange: Exchange) -> None:
        exchange.delivering = False
        self.resume(exchange)

    def _configure(self, handle: pycurl.Curl, exchange: Exchange) -> None:
        if exchange.prepare is not None:
            exchange.url, exchange.headers = exchange.prepare()
            exchange.prepare = None
        setopt = handle.setopt
        setopt(pycurl.URL, exchange.url)
        setopt(pycurl.PATH_AS_IS, 1)
        setopt(pycurl.NOSIGNAL, 1)
        setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
        setopt(pycurl.CONNECTTIMEOUT_MS, int(CONNECT_S * 1000))
        setopt(pycurl.BUFFERSIZE, BUFFER)
        setopt(pycurl.TCP_KEEPALIVE, 1)
        setopt(pycurl.PROXY, exchange.proxy)
        setopt(pycurl.NOPROXY, "")  # `Transport._loop_for` has read the environment
        if self._follow:
            setopt(pycurl.FOLLOWLOCATION, 1)
            setopt(pycurl.MAXREDIRS, 10)
            setopt(pycurl.REDIR_PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        if exchange.trusted:
            directory = os.path.isdir(exchange.trusted)
            setopt(pycurl.CAPATH if directory else pycurl.CAINFO, exchange.trusted)
            setopt(pycurl.PROXY_CAPATH if directory else pycurl.PROXY_CAINFO, exchange.trusted)
        if self._new_connections:
            self._new_connections -= 1
            setopt(pycurl.FRESH_CONNECT, 1)
        setopt(pycurl.PREREQFUNCTION, exchange.on_request)
        setopt(pycurl.HEADERFUNCTION, exchange.lines.append)
        setopt(pycurl.WRITEFUNCTION, exchange.on_body)
        given = [f"{name}: {value}".encode() for name, value in exchange.headers.items()]
        if exchange.method == "HEAD":
            setopt(pycurl.NOBODY, 1)
        elif exchange.method in ("PUT", "POST"):
            setopt(pycurl.UPLOAD, 1)
            setopt(pycurl.CUSTOMREQUEST, exchange.method)
            setopt(pycurl.INFILESIZE_LARGE, exchange.size)
            setopt(pycurl.READFUNCTION, exchange.on_read)
            setopt(pycurl.UPLOAD_BUFFERSIZE, CHUNK)
            given.append(b"Expect:")  # waiting for a 100-continue would cost a round trip
        elif exchange.method != "GET":
            setopt(pycurl.CUSTOMREQUEST, exchange.method)
        setopt(pycurl.HTTPHEADER, given)

    # One turn.

    def _wait_s(self) -> float:
        """Seconds until something is to be done without a socket being ready; infinite if only another exchange counts."""
        if self._queue:
            return 0.0
        due = min(self._timer_at, self._look_at) if self._live else self._timer_at
        return max(0.0, due - time.monotonic())

    def _turn(self, ready: list[tuple[int, int]]) -> None:
        """Handle the sockets that are ready (descriptor, epoll's events), what was posted, and what is due."""
        for fd, mask in ready:
            self._multi.socket_action(fd, _ACTIONS.get(mask, pycurl.CSELECT_IN | pycurl.CSELECT_ERR))
        while self._queue:
            verb, exchange = self._queue.popleft()
            verb(exchange)
        now = time.monotonic()
        if self._timer_at <= now:
            self._timer_at = math.inf
            self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
        more = 1
        while more:
            more, done, failed = self._multi.info_read()
            for handle in done:
                self._finish(self._live[handle])
            for handle, code, text in failed:
                self._fail(self._live[handle], code, text)
        if now >= self._look_at:
            self._look_at = now + self._tick_s
            self._look_for_silence(now)
        if self._ended:
            self._notify()

    def _close(self) -> None:
        """End all exchanges. `over` is set."""
        for exchange in list(self._live.values()):
            self._end(exchange, Transient(CLOSED))
        self._end_queued()
        self._multi.close()
        self._poll.close()

    def _end_queued(self) -> None:
        with suppress(IndexError):
            while True:
                exchange = self._queue.popleft()[1]
                if not exchange.ended and exchange.handle is None:  # `_close` ends those with a handle
                    self._end(exchange, Transient(CLOSED))
        self._notify()

    def _finish(self, exchange: Exchange) -> None:
        """libcurl is done with the exchange: end it as soon as the receiver has all bytes."""
        exchange.active_at = math.inf
        if exchange.finish():
            self._end(exchange, exchange.error)

    def _fail(self, exchange: Exchange, code: int, text: str) -> None:
        if exchange.error is None and not exchange.refused:
            if code == pycurl.E_PEER_FAILED_VERIFICATION:
                text = f"certificate verify failed: {text}"
            text = text or f"libcurl failed with code {code}"
            exchange.error = Transient(one_line(f"{exchange.host}: {text}"))
        self._new_connections += isinstance(exchange.error, ConnectionEnded)
        self._finish(exchange)  # the receiver gets the bytes that came

    def _look_for_silence(self, now: float) -> None:
        for exchange in list(self._live.values()):
            if exchange.lasts_too_long(now):
                allowed_s = REPLY_S * exchange.patience
                exchange.error = Transient(f"{exchange.host}: the reply did not end within {allowed_s:g} s")
                self._finish(exchange)
            elif len(exchange.lines) > exchange.lines_seen:
                exchange.lines_seen, exchange.active_at = len(exchange.lines), now
            elif exchange.active_at != exchange.seen_active_at:
                exchange.seen_active_at = exchange.active_at
                exchange.report()
            elif not exchange.paused and now - exchange.active_at > self._stall_s * exchange.patience:
                exchange.error = Transient(f"{exchange.host}: the origin stayed silent for too long")
                self._finish(exchange)

    def _end(self, exchange: Exchange, error: Exception | None) -> None:
        """End the exchange and free its handle. `_notify` reports it to its caller."""
        handle, exchange.handle = exchange.handle, None
        if handle is not None:
            if self._follow:
                exchange.final_url = handle.getinfo(pycurl.EFFECTIVE_URL)
            del self._live[handle]
            self._multi.remove_handle(handle)
            handle.reset()
            self._idle.append(handle)
        exchange.error, exchange.ended = error, True
        exchange.receiver = None  # it refers back to the exchange, and Python frees a reference cycle late
        if exchange.room is not None:
            exchange.room.release()
        self._ended.append(exchange)

    # libcurl's callbacks.

    def _watch(self, events: int, fd: int, *_: object) -> None:
        """Have epoll watch a socket for the events that libcurl wants."""
        if events == pycurl.POLL_REMOVE:
            with suppress(OSError):  # closed already
                self._poll.unregister(fd)
            return
        mask = (select.EPOLLIN if events & pycurl.POLL_IN else 0) | (
            select.EPOLLOUT if events & pycurl.POLL_OUT else 0
        )
        try:  # in this order, because libcurl lets go of a socket after each exchange
            self._poll.register(fd, mask)
        except FileExistsError:
            self._poll.modify(fd, mask)

    def _set_timer(self, timeout_ms: int) -> None:
        self._timer_at = math.inf if timeout_ms < 0 else time.monotonic() + timeout_ms / 1000


class _ThreadLoop(_Loop):
    """A loop in a thread of its own, for any thread."""

    def __init__(self, stall_s: float, follow: bool) -> None:
        super().__init__(stall_s, follow)
        self._sleeps = True
        self._closing = threading.Lock()
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._poll.register(self._wakeup_fd, select.EPOLLIN)
            threading.Thread(target=self._run, name="cachefs http", daemon=True).start()
        except BaseException:
            os.close(self._wakeup_fd)
            raise

    def post(self, verb: Callable[[Exchange], None], exchange: Exchange) -> None:
        self._queue.append((verb, exchange))
        if self._sleeps:
            self._wake_up()
        if self.over:
            self._end_queued()

    def stop(self) -> None:
        self._stopped = True
        self._wake_up()

    def _wake_up(self) -> None:
        self._sleeps = False  # one wake-up suffices
        with self._closing:
            if not self.over:  # after that, the number may be another file's
                os.eventfd_write(self._wakeup_fd, 1)

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._iterate()
        except Exception:
            log.exception("the HTTP client failed; the next request starts another")
        with self._closing:
            self.over = True
        self._close()
        os.close(self._wakeup_fd)

    def _iterate(self) -> None:
        self._sleeps = True  # set before the queue is checked, so that a later `post` wakes the loop
        wait_s = self._wait_s()
        ready = self._poll.poll(None if wait_s == math.inf else wait_s)
        self._sleeps = False
        if any(fd == self._wakeup_fd for fd, _ in ready):
            os.eventfd_read(self._wakeup_fd)
        self._turn([(fd, mask) for fd, mask in ready if fd != self._wakeup_fd])

    def _notify(self) -> None:
        """Wake the threads and tasks whose exchanges have ended, all tasks by one call into trio."""
        ended, self._ended = self._ended, []
        for exchange in ended:
            if exchange.on_end is not None:
                exchange.on_end()
        if self.token is not None and any(exchange.wake is not None for exchange in ended):
            with suppress(trio.RunFinishedError):
                self.token.run_sync_soon(_wake, ended)


class _TaskLoop(_Loop):
    """A loop in a task on the trio thread, for short exchanges. Nothing is handed to another thread, and the interpreter's
    lock is not passed back and forth."""

    def __init__(self, stall_s: float, follow: bool) -> None:
        super().__init__(stall_s, follow)
        self.token = trio.lowlevel.current_trio_token()
        self._waiting: trio.CancelScope | None = None
        trio.lowlevel.spawn_system_task(self._run)

    def post(self, verb: Callable[[Exchange], None], exchange: Exchange) -> None:
        """On the trio thread."""
        self._queue.append((verb, exchange))
        self._wake_up()
        if self.over:
            self._end_queued()

    def stop(self) -> None:
        self._stopped = True
        assert self.token is not None
        with suppress(trio.RunFinishedError):
            self.token.run_sync_soon(self._wake_up)

    def _wake_up(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    async def _run(self) -> None:
        try:
            while not self._stopped:
                self._turn(self._poll.poll(0, SOCKETS_A_TURN))
                with trio.move_on_after(self._wait_s()) as self._waiting:
                    await trio.lowlevel.wait_readable(self._poll.fileno())
                self._waiting = None
        except Exception:
            log.exception("the HTTP client failed; the next request starts another")
        finally:
            self.over = True
            self._close()

    def _notify(self) -> None:
        ended, self._ended = self._ended, []
        _wake(ended)


_ACTIONS = {
    select.EPOLLIN: pycurl.CSELECT_IN,
    select.EPOLLOUT: pycurl.CSELECT_OUT,
    select.EPOLLIN | select.EPOLLOUT: pycurl.CSELECT_IN | pycurl.CSELECT_OUT,
}
"""epoll's events → libcurl's. All other events mean an error or an end."""


def _wake(ended: list[Exchange]) -> None:
    for exchange in ended:
        wake, exchange.wake = exchange.wake, None
        if wake is not None:
            try:
                wake()
            except Exception:  # an exception would end trio's run
                log.exception("the end of a request could not be told")


def authorities() -> str:
    """The path of the certificate authorities to trust: a PEM file that the environment names, else the system's; "" if
    there are none. libcurl's own default is a path of the machine on which its wheel was built."""
    for name in CA_VARIABLES:
        if path := os.environ.get(name, ""):
            try:
                Path(path).read_bytes()
            except OSError as exc:
                raise ConfigError(f"{name}={path} cannot be read ({exc.strerror}): name a PEM file") from exc
            return path
    found = ssl.get_default_verify_paths()
    return found.cafile or found.capath or ""


# An origin's refusal becomes an error of `base.errors`, by one table for every HTTP store and every library. Its message is
# one line that a user can act on, without a URL (which may carry a signature) or a library's dump of several lines.

LONGEST_LINE = 300
NO_STORE = {
    "NoSuchBucket",
    "ContainerNotFound",
    "AccountNotFound",
    "InvalidBucketName",
    "InvalidResourceName",
}
BAD_CREDENTIALS = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "TokenRefreshRequired",
    "AuthorizationHeaderMalformed",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "AuthenticationFailed",
    "InvalidAuthenticationInfo",
}
CLOCK_IS_OFF = {"RequestTimeTooSkewed", "RequestExpired"}
BUSY = {"SlowDown", "ServerBusy", "TooManyRequests", "RequestLimitExceeded", "ThrottlingException"}
BROKEN = {
    "RequestTimeout",
    "InternalError",
    "OperationTimedOut",
    "IncompleteBody",
    # The body was damaged on its way.
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "Md5Mismatch",
    # Another request is writing to the key.
    "OperationAborted",
    "ConditionalRequestConflict",
    "PendingCopyOperation",
}
INSIDE_SUCCESS = {"AccessDenied": 403, "NoSuchKey": 404, "PreconditionFailed": 412, "ServiceUnavailable": 503}
"""The status that goes with an error code. S3 sends 200 before it has finished a copy or a completion, and for a batch of
deletions; an error is in the body then."""
OF_CLOUDFLARE = range(520, 525)
"""Its proxies, which also stand before R2, got no reply of the origin, or none in time."""
NO_UPLOAD = {"NoSuchUpload", "InvalidBlockList"}
OCCUPIED = {"BlobAlreadyExists"}
ARCHIVED = {"InvalidObjectState", "BlobArchived", "BlobBeingRehydrated"}


def refusal(
    status: int,
    body: str = "",
    *,
    name: str,
    code: str = "",
    message: str = "",
    advice: str = "check the credentials",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> CachefsError:
    """The error for an HTTP reply that is not a success. `name` names the object; `advice` tells what to change when the
    store does not accept the credentials; `body` (XML, JSON, or a library's text with one of them in it) is searched for
    the code and message when they are not given. `headers` are the reply's, by lower-case names."""
    code = code or headers.get("x-ms-error-code") or _tag("Code", body)
    message = message or _tag("Message", body)
    answer = f"{status} {code}".strip() + (f" ({message})" if message else "")
    line = one_line(f"{name}: the origin answered {answer}")
    if status == 200:
        status = INSIDE_SUCCESS.get(code, status)
    if code in NO_STORE:
        return NotFound(
            one_line(f"{name}: no such bucket or container ({answer}); check its name and the endpoint")
        )
    if code in NO_UPLOAD:
        return NoSuchUpload(line)
    if code in OCCUPIED:
        return ObjectChanged(f"{name}: there is such an object at the origin")
    if code in BUSY or status in (429, 503):
        seconds = _seconds(headers.get("retry-after"))
        return Throttled(line) if seconds is None else AskedToWait(line, seconds)
    if code == "InternalError" and "completion is already in progress" in message:
        return CompletionInProgress(line)
    if code in BROKEN or status in (408, 500, 502, 504, *OF_CLOUDFLARE):
        return Transient(line)
    if code in CLOCK_IS_OFF:
        return PermissionDenied(f"{line}; {_clock(headers.get('date') or _tag('ServerTime', body))}")
    if code in ARCHIVED:
        return OriginFailed(one_line(f"{line}; the object is archived: restore it first"))
    # A HEAD's reply has no body. On S3, a 400 without one means an expired token or a wrong region.
    if code in BAD_CREDENTIALS or status in (401, 403) or (status == 400 and not code):
        return PermissionDenied(one_line(f"{line}; {advice}"))
    if status == 404:
        return NotFound(line)
    if status in (412, 416) and not code.startswith("Lease"):  # Azure's leases are no versions
        return ObjectChanged(f"{name}: the object changed at the origin")
    if status in (301, 302, 307, 308):
        return OriginFailed(f"{line}: the origin lives elsewhere; set --region or --endpoint-url")
    if status in (405, 501):
        return Unsupported(line)
    return OriginFailed(line)


def one_line(text: str) -> str:
    """The first line of `text`, without signatures or secrets in URLs, cut to a readable length."""
    first = text.strip().partition("\n")[0]
    first = re.sub(r"(https?://)[^/\s@]*@", r"\1", first)
    first = re.sub(r"\?[^\s)]*=[^\s)]*", "", first)
    return first if len(first) <= LONGEST_LINE else first[: LONGEST_LINE - 1] + "…"


def _tag(name: str, body: str) -> str:
    found = re.search(rf"<{name}>\s*([^<]*?)\s*</{name}>", body) or re.search(
        rf'"{name.lower()}"\s*:\s*"([^"]*)"', body
    )
    return found.group(1).partition("\n")[0] if found else ""


def _clock(origin_time: str) -> str:
    """How far this machine's clock is off, by the origin's time (an HTTP or ISO date; "" where it is unknown)."""
    try:
        when = (
            datetime.fromisoformat(origin_time)
            if origin_time[10:11] == "T"  # an HTTP date may begin with Tue or Thu
            else parsedate_to_datetime(origin_time)
        )
    except (ValueError, OverflowError):
        return "the clock of this machine is off: set it"
    off_s = time.time() - (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    return f"the clock of this machine is {abs(off_s):.0f} s {'ahead' if off_s > 0 else 'behind'}: set it"


def _seconds(retry_after: str | None) -> float | None:
    try:
        return float(retry_after) if retry_after else None
    except ValueError:
        return None  # an HTTP date: the backoff serves as well


class Credentials(Protocol):
    """The credentials of one mount."""

    def renew(self, since: float) -> bool:
        """As `Client.renew`."""

    @property
    def advice(self) -> str:
        """What the user can change when the origin refuses these credentials."""


# Whole objects are compared with their etags, where these are MD5s. TLS protects bytes on the wire only; the MD5 also finds
# what a proxy, a broken memory or the origin itself has changed.

LARGEST_COMPARED, LARGEST_COMPARED_OF_ALL = 1 << 20, 4 << 20
"""Bytes of the largest object that is compared, usually and with `--verify full`: its first reader waits until all of it has
come. Derived: 1 MiB is 10 ms at 100 MB/s, about a round trip; 4 MiB is the most that comes in one request."""

HASHED_PER_S = 24 << 20
"""Bytes hashed a second; those of one second may be hashed at once. Derived: 4 % of one processor, which hashes 650 MB/s;
small files that all come cold are read less than 3 % slower."""

UNLIKE = 3
"""After so many objects in a row that came twice with the same bytes, unlike their etags, this origin's etags count as no
MD5s. Derived: a damaged object and its copy do not end the comparison; each more costs an origin without MD5s a request."""

MOST_REFUSED = 1000
"""Objects unlike their etags that are remembered until they are fetched again, up to 1 KiB each. A bound of memory."""

ENCRYPTED = frozenset(
    (
        "x-amz-server-side-encryption-aws-kms-key-id",
        "x-amz-server-side-encryption-customer-algorithm",
        "x-goog-encryption-kms-key-name",
        "x-goog-encryption-algorithm",
    )
)
"""Headers of replies whose etag is no MD5 although it looks like one."""


class Md5Etags:
    """Compares objects of one origin. `choose` is called on the trio thread, `compare` on any, one object at a time."""

    def __init__(self) -> None:
        self.compared = self.unlike = 0
        self.verify("first")
        self._since = time.monotonic()
        self._no_md5s = 0  # in a row
        self._repeats = Repeats()
        self._refused: dict[str, str] = {}  # key → MD5 of what came, which was unlike its etag

    def verify(self, how: str) -> None:
        """Apply `--verify`: `full` compares every object, `first` as many as `HASHED_PER_S` allows, `none` no object."""
        self._largest = LARGEST_COMPARED_OF_ALL if how == "full" else LARGEST_COMPARED
        self._bytes_per_s = {"full": math.inf, "first": HASHED_PER_S, "none": 0.0}[how]
        self._left = self._bytes_per_s

    def choose(self, key: str, etag: str, size: int) -> str:
        """The MD5 that the bytes of this object must have; "" if it is not compared."""
        found = MD5_ETAG.fullmatch(etag)
        if found is None or size > self._largest or self._no_md5s >= UNLIKE:
            return ""
        if self._bytes_per_s < math.inf:
            now = time.monotonic()
            self._left = min(self._bytes_per_s, self._left + (now - self._since) * self._bytes_per_s)
            self._since = now
            if self._left <= 0 and key not in self._refused:
                return ""
            self._left -= size
        return found[1]

    def compare(self, key: str, name: str, md5: str, data: memoryview | bytes) -> None:
        """Compare an object's bytes with its MD5. Raises `Transient` if the object must be fetched again: the bytes do not
        match, and these bytes came for the first time. Bytes that come twice are what the origin has, and are accepted."""
        digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
        self.compared += 1
        previous = self._refused.pop(key, "")
        if digest == md5:
            self._no_md5s = 0
            return
        self.unlike += 1
        if digest != previous:
            if len(self._refused) >= MOST_REFUSED:
                self._refused.clear()
            self._refused[key] = digest
            raise Transient(f"{name}: the bytes that came are not those of its etag, an MD5")
        self._no_md5s += 1
        if self._no_md5s == UNLIKE:
            log.warning("%s: not compared with their etags any more: %d in a row were no MD5s", name, UNLIKE)
        elif self._repeats.admit("unlike") is not None:
            log.warning("%s: the origin has other bytes than its etag says, or the etag is no MD5", name)

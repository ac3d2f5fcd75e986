"""Heads of requests and replies: how they are spelled, and how they are read.

What a node of ours says is recognised as a whole, by an expression that leaves it no freedom: in a cluster that is well
nothing else passes, and it takes a tenth of the time that h11 does. Whatever else comes, a head in pieces included, is read
by h11, as strictly as ever; each such expression takes less than h11 would. Pure.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Literal, NamedTuple

import h11

from cachefs.peers.protocol import PeerFailed
from cachefs.peers.wire import AUTHORIZATION, KIND_OF, MAX_HEAD_BYTES, SEAL, Malformed

WORKING = b"HTTP/1.1 102 Processing\r\n\r\n"
"""A head without a reply, which is to come."""

LONGEST_RETRY_AFTER_S = 60

_REQUEST = re.compile(
    rb"GET (/[!-~]*) HTTP/1\.1\r\nHost: ([!-~]+)\r\n(?:Authorization: ([!-~]+(?: [!-~]+)*)\r\n)?\r\n"
)
_REPLY = re.compile(
    rb"HTTP/1\.1 (200|4\d\d|503) [A-Za-z ]+\r\nContent-Length: (\d{1,18})\r\n"
    rb"(?:Cachefs-Seal: ([0-9a-f]{64})\r\n)?(?:Retry-After: (\d{1,9})\r\n)?(Connection: close\r\n)?\r\n"
)
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class Request(NamedTuple):
    """What a client asks. `host` and `authorization` are "" when they were not said; `headers` counts them all; with `last`,
    no other may follow."""

    method: str
    target: str
    host: str
    authorization: str
    headers: int
    last: bool


class Head(NamedTuple):
    """Of a reply. `seal` is "" when it carries none; `close` says that the connection ends with the body."""

    status: int
    length: int
    seal: str
    retry_after_s: int
    close: bool

    def failure(self, text: str) -> PeerFailed:
        """What a status other than 200 means."""
        return PeerFailed(KIND_OF.get(self.status, "refused"), text, retry_after_s=self.retry_after_s)


class NotHttp(Malformed):
    """`status` is what a server says to it."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def spell_request(target: str, host: str, authorization: str | None) -> bytes:
    """A GET."""
    said = "" if authorization is None else f"Authorization: {authorization}\r\n"
    return f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{said}\r\n".encode()


def spell_reply(head: Head) -> bytes:
    said = f"HTTP/1.1 {head.status} {_PHRASES[head.status]}\r\nContent-Length: {head.length}\r\n"
    if head.seal:
        said += f"Cachefs-Seal: {head.seal}\r\n"
    if head.retry_after_s:
        said += f"Retry-After: {head.retry_after_s}\r\n"
    if head.close:
        said += "Connection: close\r\n"
    return f"{said}\r\n".encode()


class RequestReader:
    """Reads one request. `rest` is what came behind it."""

    def __init__(self) -> None:
        self.rest = b""
        self._http: h11.Connection | None = None
        self._found: h11.Request | None = None

    def feed(self, data: bytes) -> Request | None:
        """The request, once all of it was fed. b"" is the end of the connection. Raises `NotHttp`, and EOFError when the
        client has nothing more to say."""
        if self._http is None:
            ours = _REQUEST.match(data)
            if ours is not None:
                self.rest = data[ours.end() :]
                target, host, authorization = (text.decode() for text in ours.groups(b""))
                return Request("GET", target, host, authorization, 1 + bool(authorization), last=False)
            self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            self._http.receive_data(data)
            return self._by_h11(self._http)
        except h11.RemoteProtocolError as exc:
            raise NotHttp("not a request this node understands", exc.error_status_hint or 400) from exc

    def _by_h11(self, http: h11.Connection) -> Request | None:
        event = http.next_event()
        if event is h11.NEED_DATA:
            return None
        if not isinstance(event, h11.Request):
            raise EOFError  # noqa: TRY004 - nothing more comes
        if not isinstance(http.next_event(), h11.EndOfMessage):
            raise NotHttp("requests have no body here")
        self.rest = http.trailing_data[0]
        said = dict(event.headers)
        return Request(
            event.method.decode("ascii"),
            event.target.decode("ascii"),
            said.get(b"host", b"").decode("latin-1"),
            said.get(AUTHORIZATION, b"").decode("latin-1"),
            len(event.headers),
            last=http.their_state is not h11.DONE,
        )


class ReplyReader:
    """Reads the head of one reply to a GET. `rest` is what has come and was not read: at last, the begin of the body."""

    def __init__(self) -> None:
        self.rest = b""
        self._http: h11.Connection | None = None

    def feed(self, data: bytes) -> None:
        """Some more bytes."""
        if self._http is None:
            self.rest += data
        else:
            self._http.receive_data(data)
            self.rest = self._http.trailing_data[0]

    def next(self) -> Head | Literal["working"] | None:
        """The head, or a sign of life before it; None when more bytes are needed. Raises `NotHttp`."""
        if self._http is None:
            if not self.rest:
                return None
            if self.rest.startswith(WORKING):
                self.rest = self.rest[len(WORKING) :]
                return "working"
            ours = _REPLY.match(self.rest)
            if ours is not None:
                self.rest = self.rest[ours.end() :]
                status, length, seal, retry_after, close = ours.groups(b"")
                return Head(int(status), int(length), seal.decode(), _wait_s(retry_after), bool(close))
            self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
            self._http.send(h11.Request(method="GET", target="/", headers=[("Host", "peer")]))
            self._http.send(h11.EndOfMessage())
            self._http.receive_data(self.rest)
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as exc:
            raise NotHttp("no HTTP") from exc
        self.rest = self._http.trailing_data[0]
        if event is h11.NEED_DATA:
            return None
        if isinstance(event, h11.InformationalResponse):
            return "working"
        if not isinstance(event, h11.Response):
            raise NotHttp("no reply")
        return _head(event)


def _head(response: h11.Response) -> Head:
    said = dict(response.headers)
    length = said.get(b"content-length")
    if length is None or b"transfer-encoding" in said:
        raise NotHttp("a reply without a length")
    return Head(
        response.status_code,
        int(length),
        said.get(SEAL, b"").decode("latin-1"),
        _wait_s(said.get(b"retry-after", b"")),
        b"close" in said.get(b"connection", b"").lower() or response.http_version < b"1.1",
    )


def _wait_s(text: bytes) -> int:
    return min(int(text[:9]), LONGEST_RETRY_AFTER_S) if text.isdigit() else 0

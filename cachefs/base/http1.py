"""Parser and writer of HTTP/1.1 heads for the peer protocol and the metrics page: requests, and replies with a
Content-Length. Pure.

Not h11: 4 µs instead of 21 µs for a signed request (measured). `tests/test_http1.py` compares what the two accept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

from cachefs.base.errors import CachefsError

MAX_HEAD_BYTES = 16 << 10
"""Longest head of a request or reply. Derived: the longest key of an origin (1,024 characters) takes 12 KiB
percent-encoded."""

MAX_HEADERS = 100
"""Most headers of a message. Borrowed from Apache's `LimitRequestFields`."""

_REQUEST = re.compile(rb"([A-Z]{1,16}) ([!-~]+) HTTP/1\.([01])")
_REPLY = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [\t -~\x80-\xff]*)?")
_BEGIN = re.compile(rb"(?:[!-~][\t -~\x80-\xff]*\r?)?")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t ]*([\t -~\x80-\xff]*)")
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class NotHttp(CachefsError):
    """The bytes are not such a head. `status` is the status of a server's reply."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class Request(NamedTuple):
    """`headers` by lower-case name, values of a repeated one joined by commas. `body`: a body follows. `last`: the client
    sends no further request. `stop` is the length of the head in bytes."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bool
    last: bool
    stop: int


class Reply(NamedTuple):
    """`length` is the body's in bytes (0 for a 1xx), which begins at offset `stop`. `last`: the connection ends after it."""

    status: int
    headers: Mapping[str, str]
    length: int
    last: bool
    stop: int


def parse_request(data: bytes) -> Request | None:
    """The request at the beginning of `data`; None while its head is incomplete. Raises `NotHttp`."""
    head = _head(data, _REQUEST)
    if head is None:
        return None
    line, headers, stop = head
    method, target, minor = line.group(1, 2, 3)
    body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    if minor == b"1" and "host" not in headers:
        raise NotHttp("a request without a Host header")
    return Request(method.decode(), target.decode(), headers, body, _last(minor, headers), stop)


def parse_reply(data: bytes) -> Reply | None:
    """The reply, or the 1xx before it, at the beginning of `data`; None while its head is incomplete. Raises `NotHttp`."""
    head = _head(data, _REPLY)
    if head is None:
        return None
    line, headers, stop = head
    status = int(line[2])
    length = headers.get("content-length", "0" if status < 200 else "")
    if not (length.isascii() and length.isdigit() and len(length) <= 20) or "transfer-encoding" in headers:
        raise NotHttp("a reply without a length")
    return Reply(status, headers, int(length), _last(line[1], headers), stop)


class _Head(NamedTuple):
    line: re.Match[bytes]
    headers: dict[str, str]
    stop: int


def _head(data: bytes, first: re.Pattern[bytes]) -> _Head | None:
    """The head at the beginning of `data`, whose first line matches `first`; None while it is incomplete."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        if len(data) >= MAX_HEAD_BYTES:
            raise NotHttp("the head is too long", 431)
        begun, more, _ = data.partition(b"\r\n")
        # Other protocols, such as a TLS handshake, are refused at once and not at the deadline.
        if not (first if more else _BEGIN).fullmatch(begun):
            raise NotHttp("not an HTTP/1.1 message")
        return None
    lines = data[:end].split(b"\r\n")
    line = first.fullmatch(lines[0])
    if line is None:
        raise NotHttp("not an HTTP/1.1 message")
    if len(lines) > MAX_HEADERS + 1:
        raise NotHttp("too many headers", 431)
    headers: dict[str, str] = {}
    for text in lines[1:]:
        header = _HEADER.fullmatch(text)
        if header is None:
            raise NotHttp("not a header")
        name, value = header[1].decode().lower(), header[2].decode("latin-1").strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return _Head(line, headers, end + 4)


def _last(minor: bytes, headers: Mapping[str, str]) -> bool:
    return minor == b"0" or "close" in headers.get("connection", "").lower()


def spell_request(target: str, headers: Mapping[str, str]) -> bytes:
    """The head of a GET."""
    return _spell(f"GET {target} HTTP/1.1", headers)


def spell_reply(status: int, headers: Mapping[str, str]) -> bytes:
    """The head of a reply."""
    return _spell(f"HTTP/1.1 {status} {_PHRASES[status]}", headers)


def _spell(first: str, headers: Mapping[str, str]) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"{first}\r\n{lines}\r\n".encode("latin-1")

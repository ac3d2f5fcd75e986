"""HTTP/1.1 on a blocking socket, one thread per connection.

httptools parses. This module adds bodies as iterators (so an upload is never held in memory), the aws-chunked framing of
uploads by SDKs, and `100 Continue`, which is sent only when a handler asks for the body.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterator
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote

import httptools

_RECEIVE = 256 << 10
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class BadRequest(Exception):
    """The bytes are no request that this server can answer."""


class Request:
    """The head of a request, whose body is not read yet."""

    def __init__(self, method: str, target: bytes, headers: dict[str, str]) -> None:
        self.method = method
        # Google's XML interface is S3's with other names for the vendor's own headers.
        self.headers = {name.replace("x-goog-", "x-amz-", 1): value for name, value in headers.items()}
        path, _, query = target.decode("ascii", "replace").partition("?")
        try:
            # Split before decoding: "%2F" belongs to the key, as do leading and doubled slashes.
            bucket, _, key = path.removeprefix("/").partition("/")
            self.bucket = unquote(bucket, errors="strict")
            self.key = unquote(key, errors="strict")
            self.query = dict(parse_qsl(query, keep_blank_values=True, errors="strict"))
        except UnicodeDecodeError as exc:
            raise BadRequest("the URI is not UTF-8") from exc

    def header(self, name: str) -> str:
        return self.headers.get(name, "")


class Connection:
    """A client's connection, with the callbacks of httptools."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.keep_alive = True
        self._start()

    def _start(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._head_done = self._all_done = self._expects = False

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._head_done = True
        self.keep_alive = self._parser.should_keep_alive()  # asked later, the parser has forgotten

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._all_done = True

    def _feed(self) -> bool:
        data = self.sock.recv(_RECEIVE)
        if not data:
            return False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            raise BadRequest(str(exc)) from exc
        return True

    def receive(self) -> Request | None:
        """The next request; None when the client has left."""
        self._start()
        while not self._head_done:
            if not self._feed():
                return None
        self._expects = self._headers.get("expect", "").lower() == "100-continue"
        return Request(self._parser.get_method().decode("ascii"), self._target, self._headers)

    def body(self) -> Iterator[bytes]:
        """The request's body as sent."""
        if self._expects and not self._all_done:
            self._expects = False
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while True:
            pieces, self._pieces = self._pieces, []
            yield from pieces
            if self._all_done and not self._pieces:
                return
            if not self._all_done and not self._feed():
                raise ConnectionResetError("the client left within its body")

    def skip_body(self) -> None:
        """Prepare for the reply: read the rest of the body, unless the client waits for `100 Continue`."""
        if self._expects and not self._all_done:
            self.keep_alive = False
            return
        for _ in self.body():
            pass

    def head(self, status: int, headers: dict[str, str]) -> bytes:
        """A reply's head as bytes."""
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not self.keep_alive:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def send(self, data: bytes, more: bool = False) -> None:
        """Send; `more`: a body follows at once and may share the packet."""
        view = memoryview(data)
        flags = socket.MSG_MORE if more else 0
        while view:
            view = view[self.sock.send(view, flags) :]

    def gone(self) -> bool:
        """Whether the client has closed its end."""
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def reset(self) -> None:
        """End the connection with an RST instead of a FIN. What was sent before is delivered first, within reason:
        an RST would throw it away."""
        deadline = time.monotonic() + 1
        while _unacknowledged(self.sock) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.keep_alive = False


def _unacknowledged(sock: socket.socket) -> int:
    """Bytes in the kernel's send queue."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def unchunk(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The payload of an aws-chunked body: hex size [";" signature] CRLF data CRLF ... "0" CRLF trailers."""
    buffer = bytearray()

    def more() -> None:
        piece = next(pieces, None)
        if piece is None:
            raise BadRequest("the aws-chunked body ends early")
        buffer.extend(piece)

    def line() -> bytes:
        while (end := buffer.find(b"\r\n")) < 0:
            more()
        text = bytes(buffer[:end])
        del buffer[: end + 2]
        return text

    while True:
        try:
            left = int(line().partition(b";")[0], 16)
        except ValueError as exc:
            raise BadRequest("not an aws-chunked body") from exc
        if not left:
            for _ in pieces:  # checksum trailers: tolerated, not used
                pass
            return
        while left:
            if not buffer:
                more()
            data = bytes(buffer[:left])
            del buffer[: len(data)]
            left -= len(data)
            yield data
        line()

"""The HTTP client alone, against real sockets: a server that plays a script, byte by byte."""

from __future__ import annotations

import gzip
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pycurl
import pytest
import trio
import trustme
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base.errors import ObjectChanged, OriginFailed, Transient, Unreachable
from cachefs.base.metrics import Metrics
from cachefs.origin import ByteRange, InMemory, Origin, Ticket, open_origin
from cachefs.origin.http import AT_ONCE, SOCKETS_A_TURN, Exchange, Transport, query
from cachefs.origin.s3 import signed_v4
from tests.origin.reading import Collect, content, run
from tests.origin.servers import QUICK

DATE = "Last-Modified: Sat, 21 Nov 2026 08:06:30 GMT\r\n"
HEAD = f'ETag: "e"\r\n{DATE}'
Answer = Callable[["Wire", bytes], None]


class Wire:
    """One connection, as the script sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._data, self.bodiless = sock, b"", False

    def request(self) -> bytes | None:
        """The next request's head; None when the client has closed the connection."""
        while b"\r\n\r\n" not in self._data:
            try:
                data = self.sock.recv(65536)
            except OSError:
                return None
            if not data:
                return None
            self._data += data
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        self.bodiless = head.startswith(b"HEAD ")
        return head

    def body(self, size: int) -> bytes:
        while len(self._data) < size:
            data = self.sock.recv(65536)
            if not data:
                break
            self._data += data
        found, self._data = self._data[:size], self._data[size:]
        return found

    def send(self, text: str, body: bytes = b"") -> None:
        self.sock.sendall(text.replace("\n", "\r\n").replace("\r\r", "\r").encode() + body)

    def reply(self, body: bytes, status: str = "200 OK", more: str = HEAD) -> None:
        self.send(
            f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(body)}\r\n\r\n", b"" if self.bodiless else body
        )


class Server:
    """Answers each request of each connection with `answer`; `heads` are the requests."""

    def __init__(
        self, answer: Answer, family: int = socket.AF_INET, tls: ssl.SSLContext | None = None
    ) -> None:
        self.answer, self.heads, self.connections = answer, list[bytes](), 0
        self._tls = tls
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self._listener = socket.create_server((host, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self.url = f"http{'s' if tls else ''}://{'[::1]' if ':' in host else host}:{self.port}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            if self._tls:
                sock = self._tls.wrap_socket(sock, server_side=True)
                self._open.append(sock)
            wire = Wire(sock)
            while (head := wire.request()) is not None:
                self.heads.append(head)
                self.answer(wire, head)
        except OSError:
            pass

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)  # or `accept` goes on waiting
        self._listener.close()
        for sock in self._open:
            sock.close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    servers: list[Server] = []

    def make(answer: Answer, **options: Any) -> Server:
        servers.append(Server(answer, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def web(server: Server, url: str | None = None, **options: Any) -> Origin:
    return open_origin(
        url or server.url, **{"metrics": Metrics(), "backoff": QUICK, "stall_s": 5.0, **options}
    )


def fetched(origin: Origin, size: int, start: int = 0, stop: int | None = None, etag: str = '"e"') -> bytes:
    sink = Collect()
    stop = size if stop is None else stop
    whole = (start, stop) == (0, size)
    run(origin, lambda o: o.read("k", etag, start, stop, sink, whole=whole))
    return bytes(sink.data)


# What servers do.


def test_a_chunked_reply_with_trailers(serve: Callable[..., Server]) -> None:
    def answer(wire: Wire, head: bytes) -> None:
        wire.send(f"HTTP/1.1 200 OK\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n")
        for piece in (b"hello", b" ", b"world"):
            wire.send(f"{len(piece):x};ext=1\r\n", piece + b"\r\n")
        wire.send('0\r\nETag: "other"\r\n\r\n')

    server = serve(answer)
    for _ in range(2):
        assert fetched(web(server), 11) == b"hello world"


def test_a_hundred_continue_before_the_reply(serve: Callable[..., Server]) -> None:
    def answer(wire: Wire, head: bytes) -> None:
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        wire.send('HTTP/1.1 100 Continue\r\nETag: "wrong"\r\n\r\n')
        assert len(wire.body(size)) == size
        wire.reply(b"done", more='ETag: "right"\r\n')

    server = serve(answer)
    transport = Transport(5.0)
    body = bytes(range(256)) * 8000
    pieces = (body[at : at + 100_000] for at in range(0, len(body), 100_000))
    headers = {"Content-Length": str(len(body))}
    reply = transport.send(Exchange("PUT", server.url + "/k", headers, size=len(body)), pieces)
    assert (reply.status, reply.body, reply.headers["etag"]) == (200, b"done", '"right"')
    assert b"expect:" not in server.heads[0].lower()  # waiting for the server's word costs a round trip
    transport.close()


def test_a_refusal_before_the_body_was_sent(serve: Callable[..., Server]) -> None:
    def answer(wire: Wire, head: bytes) -> None:
        wire.reply(b"<Code>SlowDown</Code>", "503 Slow Down")
        time.sleep(0.2)
        wire.sock.close()

    server, given = serve(answer), []

    def pieces() -> Iterator[bytes]:
        for number in range(1000):
            given.append(number)
            yield bytes(1 << 20)

    transport = Transport(5.0)
    reply = transport.send(Exchange("PUT", server.url + "/k", {}, size=1000 << 20), pieces())
    assert reply.status == 503 and b"SlowDown" in reply.body
    assert len(given) < 100
    transport.close()


def test_an_error_of_the_bodys_source_ends_the_exchange(serve: Callable[..., Server]) -> None:
    ended = threading.Event()

    def answer(wire: Wire, head: bytes) -> None:
        try:
            wire.body(1 << 30)
        finally:
            ended.set()

    def pieces() -> Iterator[bytes]:
        yield bytes(1000)
        while not server.heads:
            time.sleep(0.01)
        raise RuntimeError("the disk")

    transport, server = Transport(5.0), serve(answer)
    with pytest.raises(RuntimeError, match="the disk"):
        transport.send(Exchange("PUT", server.url + "/k", {}, size=1 << 30), pieces())
    assert ended.wait(5), "the connection is still open"
    transport.close()


def test_a_connection_that_ends_as_its_body_goes_on_ends_no_other(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    """libcurl has seen the reset and not told of it yet, when the next piece of the body comes."""
    asked, held, goes_on = threading.Event(), threading.Event(), threading.Event()

    def answer(wire: Wire, head: bytes) -> None:
        if head.startswith(b"GET"):
            asked.set()
            goes_on.wait(10)
            wire.reply(b"hello")
        else:
            wire.body(1000)
            held.wait(10)
            wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wire.sock.close()

    def watched() -> set[int]:
        about = Path(f"/proc/self/fdinfo/{loop._poll.fileno()}").read_text()
        return {int(fd) for fd in re.findall(r"tfd:\s*(\d+)", about)}

    def see_the_reset(_: object) -> None:
        """On the loop's thread, just before what the next piece has posted."""
        held.set()
        time.sleep(0.3)  # the reset and the next piece have come
        for fd in watched() - old:
            loop._multi.socket_action(fd, pycurl.CSELECT_IN)

    def pieces() -> Iterator[bytes]:
        yield bytes(1000)
        time.sleep(0.3)  # the body has been sent so far, and the exchange is paused
        loop.post(see_the_reset, None)
        held.wait(10)
        yield bytes(1000)

    transport, server = Transport(5.0), serve(answer)
    got: list[bytes] = []
    other = threading.Thread(target=lambda: got.append(transport.send(Exchange("GET", server.url, {})).body))
    other.start()
    assert asked.wait(5)
    (loop,) = transport._loops.values()
    old = watched()
    with pytest.raises(Transient):
        transport.send(Exchange("PUT", server.url + "/k", {}, size=2000), pieces())
    goes_on.set()
    other.join(10)
    assert got == [b"hello"]
    assert "the HTTP client failed" not in caplog.text
    transport.close()


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_kept_connection_that_the_server_closes(serve: Callable[..., Server], after: int) -> None:
    """After a reply that promised to keep it, as a request comes, or after some replies."""
    served: dict[Wire, int] = {}

    def answer(wire: Wire, head: bytes) -> None:
        served[wire] = served.get(wire, 0) + 1
        if served[wire] > after > 0:
            wire.sock.close()  # the request came, and gets no reply
            return
        wire.reply(b"hello")
        if not after:
            wire.sock.shutdown(socket.SHUT_RDWR)

    server = serve(answer)
    origin = web(server)
    sink = Collect()

    async def use(there: Origin) -> None:
        for _ in range(6):
            await there.read("k", '"e"', 0, 5, sink, whole=True)
            await trio.sleep(0.02)

    run(origin, use)
    assert sink.data == b"hello" * 6
    # None is sent again uncounted. With `after` 0, half of them do not reach the server.
    metrics = origin._attempts.metrics
    assert metrics.origin_get == len(server.heads) if after else 6 <= metrics.origin_get <= 11
    assert metrics.origin_retries == metrics.origin_get - 6 and metrics.origin_errors == 0


def test_connections_are_kept(serve: Callable[..., Server]) -> None:
    server = serve(lambda wire, head: wire.reply(b"hello"))

    async def use(there: Origin) -> None:
        for _ in range(10):
            assert (await there.head("k")).size == 5
            await there.read("k", '"e"', 0, 5, Collect(), whole=True)

    run(web(server), use)
    assert len(server.heads) == 20 and server.connections == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_of_a_web_server(serve: Callable[..., Server], status: int) -> None:
    target = serve(
        lambda wire, head: wire.reply(b'<a href="k">k</a>', more=HEAD + "Content-Type: text/html\r\n")
    )

    def answer(wire: Wire, head: bytes) -> None:
        path = head.split(b" ")[1].decode()
        wire.reply(b"elsewhere", f"{status} Moved", f"Location: {target.url}{path}\r\n")

    async def use(there: Origin) -> None:
        assert [o.key for o in (await there.list_page("")).objects] == ["k"]
        info = await there.head("k")
        assert await content(there, info) == b'<a href="k">k</a>'

    run(web(serve(answer)), use)
    assert len(target.heads) == 3


def test_redirects_without_end(serve: Callable[..., Server]) -> None:
    server = serve(lambda wire, head: wire.reply(b"", "302 Found", "Location: /k\r\n"))
    with pytest.raises(OriginFailed, match="redirects"):
        fetched(web(server), 5)


def test_a_redirect_of_a_signed_request_is_not_followed(serve: Callable[..., Server]) -> None:
    other = serve(lambda wire, head: wire.reply(b"hello"))
    server = serve(lambda wire, head: wire.reply(b"", "307 Moved", f"Location: {other.url}/k\r\n"))
    origin = web(server, "s3://bucket", endpoint_url=server.url, anonymous=True)
    with pytest.raises(OriginFailed, match="lives elsewhere"):
        fetched(origin, 5)
    assert not other.heads


def test_google_sends_an_object_as_it_is_stored(serve: Callable[..., Server]) -> None:
    """One with `Content-Encoding: gzip` comes decompressed, whole and without a length, where gzip is not accepted."""
    body = b"what a computer counts in ones and zeros " * 100
    stored = gzip.compress(body)

    def answer(wire: Wire, head: bytes) -> None:
        if b"\r\nAccept-Encoding: gzip" not in head:
            wire.send(f"HTTP/1.1 200 OK\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n")
            if not wire.bodiless:
                wire.send(f"{len(body):x}\r\n", body + b"\r\n0\r\n\r\n")
        elif b"\r\nRange: bytes=10-19" in head:
            more = f"{HEAD}Content-Encoding: gzip\r\nContent-Range: bytes 10-19/{len(stored)}\r\n"
            wire.reply(stored[10:20], "206 Partial", more)
        else:
            wire.reply(stored, more=f"{HEAD}Content-Encoding: gzip\r\n")

    async def use(there: Origin) -> None:
        info = await there.head("k")
        assert info.size == len(stored)
        assert await content(there, info, 10, 20) == stored[10:20]
        assert await content(there, info) == stored

    server = serve(answer)
    run(web(server, "gs://bucket", endpoint_url=server.url, anonymous=True), use)


# Replies that lie.


@pytest.mark.parametrize(
    ("status", "more", "body", "error"),
    [
        (
            "206 Partial",
            'Content-Range: bytes 3-7/10\r\nETag: "e"\r\n',
            b"34567",
            "the origin sent bytes 3-7",
        ),
        ("206 Partial", 'ETag: "e"\r\n', b"23456", "the origin sent no range"),
        ("206 Partial", 'Content-Range: bytes 2-6/10\r\nETag: "e"\r\n', b"", "5 bytes too early"),
        (
            "206 Partial",
            'Content-Range: bytes 2-6/10\r\nETag: "e"\r\n',
            b"234567",
            "more bytes than were asked",
        ),
        ("200 OK", 'ETag: "e"\r\n', b"0123", "3 bytes too early"),
    ],
)
def test_lying_lengths_and_ranges(
    serve: Callable[..., Server], status: str, more: str, body: bytes, error: str
) -> None:
    server = serve(lambda wire, head: wire.reply(body, status, more + DATE))
    with pytest.raises(OriginFailed, match=error):
        fetched(web(server), 10, 2, 7)


@pytest.mark.parametrize("status", ["200 OK", "206 Partial"])
def test_another_etag(serve: Callable[..., Server], status: str) -> None:
    more = f'Content-Range: bytes 2-6/10\r\nETag: "other"\r\n{DATE}'
    server = serve(lambda wire, head: wire.reply(b"01234", status, more))
    with pytest.raises(ObjectChanged):
        fetched(web(server), 10, 2, 7)
    assert b'If-Match: "e"' in server.heads[0] and len(server.heads) == 1


def test_an_object_without_an_etag_is_known_by_time_and_size(serve: Callable[..., Server]) -> None:
    etag = "mtime-1795248390000000000-10"

    def answer(wire: Wire, head: bytes) -> None:
        if b"Range:" in head:
            wire.reply(b"234", "206 Partial", f"Content-Range: bytes 2-4/10\r\n{DATE}")
        else:
            wire.reply(b"0123456789", more=DATE)

    server = serve(answer)
    assert fetched(web(server), 10, 2, 5, etag) == b"234"
    assert fetched(web(server), 10, etag=etag) == b"0123456789"
    assert not any(b"If-Match" in head for head in server.heads)
    with pytest.raises(ObjectChanged):
        fetched(web(server), 11, 2, 5, etag="mtime-1795248390000000000-11")


@pytest.mark.parametrize("size", [1000, 3_000_000])
def test_a_server_without_ranges_sends_everything_once(serve: Callable[..., Server], size: int) -> None:
    body = os.urandom(size)
    server = serve(lambda wire, head: wire.reply(body))
    assert fetched(web(server), size, 100, 600) == body[100:600]
    assert len(server.heads) == 1


def test_416_means_another_version(serve: Callable[..., Server]) -> None:
    server = serve(lambda wire, head: wire.reply(b"", "416 Range Not Satisfiable"))
    with pytest.raises(ObjectChanged):
        fetched(web(server), 10, 2, 7)


@pytest.mark.parametrize(
    "sent",
    [
        b"\0\1\2\3 this is no HTTP\r\n\r\n",
        b"HTTP/1.1 banana\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nETag: "e"\r\n\r\nzz\r\n',
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 400_000,
    ],
    ids=lambda v: repr(v[:40]),
)
def test_garbage(serve: Callable[..., Server], sent: bytes) -> None:
    def answer(wire: Wire, head: bytes) -> None:
        wire.sock.sendall(sent)
        wire.sock.close()

    with pytest.raises((OriginFailed, ObjectChanged)) as failure:
        fetched(web(serve(answer)), 10)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("line", ["HTTP/1.1 abc def: 5", "HTTP/abc: 5"])
def test_a_header_that_looks_like_a_status_is_a_header(
    serve: Callable[..., Server], method: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(lambda wire, head: wire.reply(b"hello", more=f"{line}\r\n{HEAD}"))
    transport = Transport(5.0)
    reply = transport.send(Exchange(method, server.url, {}))
    assert (reply.status, reply.headers["etag"]) == (200, '"e"')
    (loop,) = transport._loops.values()
    assert not loop.over
    assert not caplog.records
    transport.close()


def test_a_time_of_many_digits_describes_no_object(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    late = "Last-Modified: Sat, 21 Nov 99999999999 08:06:30 GMT\r\n"
    server = serve(lambda wire, head: wire.reply(b"hello", more=late))
    with pytest.raises(OriginFailed, match="does not describe an object"):
        run(web(server), lambda there: there.head("k"))
    with pytest.raises(ObjectChanged):
        fetched(web(server), 5)
    assert not caplog.records


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "silent"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_reply_that_breaks_within_its_head_is_asked_for_again(
    serve: Callable[..., Server], method: str, ends: bool
) -> None:
    """It does not tell that the object is another, or how large it is: that has not come."""
    goes_on = threading.Event()

    def answer(wire: Wire, head: bytes) -> None:
        if len(server.heads) > 1:
            return wire.reply(b"hello")
        wire.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n")
        if ends:
            wire.sock.close()
        else:
            goes_on.wait(10)

    server = serve(answer)
    origin = web(server, stall_s=0.3)
    if method == "GET":
        assert fetched(origin, 5) == b"hello"
    else:
        assert run(origin, lambda there: there.head("k")).etag == '"e"'
    goes_on.set()
    assert len(server.heads) == 2


def test_trailers_after_an_empty_body(serve: Callable[..., Server]) -> None:
    server = serve(
        lambda wire, head: wire.send(
            f"HTTP/1.1 200 OK\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\r\n\r\n"
        )
    )
    transport = Transport(5.0)
    reply = transport.send(Exchange("GET", server.url, {}))
    assert (reply.status, reply.headers["etag"], reply.body) == (200, '"e"', b"")
    transport.close()


# Waiting.


@pytest.mark.long
def test_a_silent_server_and_one_that_trickles(serve: Callable[..., Server]) -> None:
    silent = serve(lambda wire, head: time.sleep(5))
    begun = time.monotonic()
    with pytest.raises(OriginFailed, match="silent for too long"):
        fetched(web(silent, stall_s=0.2), 10)
    assert time.monotonic() - begun < 4

    def trickle(wire: Wire, head: bytes) -> None:
        wire.send(f"HTTP/1.1 200 OK\r\n{HEAD}")
        time.sleep(0.3)
        wire.send("Content-Length: 10\r\n\r\n")
        for digit in b"0123456789":
            time.sleep(0.15)
            wire.sock.sendall(bytes([digit]))

    server = serve(trickle)
    assert fetched(web(server, stall_s=0.6), 10) == b"0123456789"
    assert len(server.heads) == 1


class Refuses:
    """A receiver that does not want the body."""

    waits = False

    def begin(self, status: int, headers: Any) -> bool:
        return False

    def take(self, data: memoryview | bytes) -> bool:
        raise AssertionError

    def coming(self) -> None:
        pass


@pytest.mark.parametrize("part", ["head", "body", "refusal"])
def test_a_reply_that_trickles_ends_although_no_caller_waits(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Its caller's deadline abandons the thread that waits for it, and a probe comes every second."""
    monkeypatch.setattr("cachefs.origin.http.REPLY_S", 0.4)
    ended = threading.Event()

    def answer(wire: Wire, head: bytes) -> None:
        wire.send("HTTP/1.1 200 OK\n" if part == "head" else "HTTP/1.1 403 No\nContent-Length: 100000\n\n")
        try:
            while not ended.wait(0.01):
                wire.send("X: y\n" if part == "head" else "x")
        finally:
            ended.set()

    server = serve(answer)
    transport = Transport(5.0)
    receiver = Refuses() if part == "refusal" else None
    with pytest.raises(Transient, match=r"did not end within 0\.4 s"):
        transport.send(Exchange("GET", server.url, {}, receiver=receiver))
    assert ended.wait(5)
    transport.close()


def test_bytes_that_go_on_are_not_late(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that a reader takes may come as slowly as it does, and so may a body that is sent."""
    monkeypatch.setattr("cachefs.origin.http.REPLY_S", 0.3)

    def answer(wire: Wire, head: bytes) -> None:
        if head.startswith(b"PUT"):
            wire.body(8)
            return wire.reply(b"")
        wire.send(f"HTTP/1.1 200 OK\r\n{HEAD}Content-Length: 8\r\n\r\n")
        for digit in b"01234567":
            time.sleep(0.1)
            wire.sock.sendall(bytes([digit]))

    def pieces() -> Iterator[bytes]:
        for _ in range(8):
            time.sleep(0.1)
            yield b"x"

    server = serve(answer)
    assert fetched(web(server, stall_s=0.8), 8) == b"01234567"
    transport = Transport(0.8)
    assert transport.send(Exchange("PUT", server.url, {}, size=8), pieces()).status == 200
    transport.close()


def test_a_reply_without_end_takes_no_memory_without_end(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs.origin.http.LONGEST_REPLY", 4 << 20)

    def answer(wire: Wire, head: bytes) -> None:
        wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            wire.sock.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")

    server = serve(answer)
    transport = Transport(5.0)
    with pytest.raises(OriginFailed, match="more than 4 MiB"):
        transport.send(Exchange("GET", server.url, {}))
    transport.close()


def test_a_server_that_takes_no_more_of_a_body(serve: Callable[..., Server]) -> None:
    server = serve(lambda wire, head: time.sleep(5))
    transport = Transport(0.3)
    with pytest.raises(Transient, match="silent for too long"):
        transport.send(Exchange("PUT", server.url, {}, size=100 << 20), (bytes(1 << 20) for _ in range(100)))
    transport.close()


def test_a_cancelled_read_ends_its_connection_and_its_sink(serve: Callable[..., Server]) -> None:
    gone = threading.Event()

    def answer(wire: Wire, head: bytes) -> None:
        wire.send(f"HTTP/1.1 200 OK\r\n{HEAD}Content-Length: 100000000\r\n\r\n")
        try:
            while True:
                wire.sock.sendall(bytes(65536))
                time.sleep(0.001)
        finally:
            gone.set()

    sink = Collect()

    async def use(there: Origin) -> None:
        with trio.move_on_after(0.3):
            await there.read("k", '"e"', 0, 100_000_000, sink, whole=True)
        count = sink.chunks
        assert count and there.status()["in_flight"] == 0
        await trio.to_thread.run_sync(gone.wait, 5)
        assert gone.is_set() and sink.chunks == count

    run(web(serve(answer)), use)


def test_a_caller_that_was_cancelled_before_sends_nothing(serve: Callable[..., Server]) -> None:
    """An upload is cancelled before its PUT, for a rename: nobody looks for its object afterwards."""
    server, transport = serve(lambda wire, head: wire.reply(b"")), Transport(5.0)

    async def put(key: str) -> None:
        exchange = Exchange("PUT", f"{server.url}/{key}", {}, size=5)
        exchange.pieces.append(b"bytes")
        await transport.run(exchange)

    async def use() -> None:
        await put("before")  # its connection is kept: the next request would leave at once
        for _ in range(20):
            with trio.CancelScope() as scope:
                scope.cancel()
                await put("cancelled")
        await put("after")

    trio.run(use)
    transport.close()
    assert [head.split()[1] for head in server.heads] == [b"/before", b"/after"]


@pytest.mark.parametrize("size", [50_000, 8_000_000])
def test_a_sink_that_waits_holds_up_no_other(serve: Callable[..., Server], size: int) -> None:
    """A disk that hangs: its writes hang in threads of their own, other reads go on, and memory stays bounded."""
    body = os.urandom(size)
    server = serve(lambda wire, head: wire.reply(body))
    go_on, begun = threading.Event(), threading.Event()

    class Hanging(Collect):
        waits = True

        def write(self, data: memoryview | bytes) -> None:
            begun.set()
            assert len(data) <= 2_000_000
            go_on.wait(20)
            super().write(data)

    stuck = [Hanging() for _ in range(4)]

    async def use(there: Origin) -> None:
        async with trio.open_nursery() as nursery:
            for sink in stuck:
                nursery.start_soon(lambda sink=sink: there.read("k", '"e"', 0, size, sink, whole=True))
            await trio.to_thread.run_sync(begun.wait)
            sink = Collect()
            with trio.fail_after(10):
                await there.read("k", '"e"', 0, size, sink, whole=True)
            assert sink.data == body
            go_on.set()

    run(web(server, stall_s=0.5), use)
    assert [bytes(sink.data) for sink in stuck] == [body] * 4


def test_a_download_limit_pauses_connections(serve: Callable[..., Server]) -> None:
    body = os.urandom(2_000_000)
    server = serve(lambda wire, head: wire.reply(body))
    begun = time.monotonic()
    assert fetched(web(server, download_limit=2_000_000, stall_s=0.5), len(body)) == body
    assert 0.8 < time.monotonic() - begun < 3
    assert len(server.heads) == 1


def test_the_first_bytes_of_a_large_body_wait_for_few_others(serve: Callable[..., Server]) -> None:
    body, taken = os.urandom(1_000_000), threading.Event()

    def answer(wire: Wire, head: bytes) -> None:
        wire.send(f"HTTP/1.1 200 OK\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n")
        wire.sock.sendall(body[:40_000])
        if taken.wait(5):
            wire.sock.sendall(body[40_000:])

    class First(Collect):
        def write(self, data: memoryview | bytes) -> None:
            super().write(data)
            taken.set()

    async def use(there: Origin) -> None:
        sink = First()
        await there.read("k", '"e"', 0, len(body), sink, whole=True)
        assert sink.data == body

    server = serve(answer)
    run(web(server), use)
    assert len(server.heads) == 1


def test_what_has_come_before_a_break_is_kept(serve: Callable[..., Server]) -> None:
    body = os.urandom(1_000_000)

    def answer(wire: Wire, head: bytes) -> None:
        start = int(head.partition(b"bytes=")[2].split(b"-")[0] or 0)
        status = "206 Partial" if start else "200 OK"
        range_ = f"Content-Range: bytes {start}-{len(body) - 1}/{len(body)}\r\n" if start else ""
        wire.send(f"HTTP/1.1 {status}\r\n{HEAD}{range_}Content-Length: {len(body) - start}\r\n\r\n")
        wire.sock.sendall(body[start : start + 300_001])
        wire.sock.close()

    origin = web(serve(answer))
    assert fetched(origin, len(body)) == body
    assert origin._attempts.metrics.origin_get == 4
    assert origin._attempts.metrics.origin_bytes == len(body)


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (2, 7)])
def test_a_break_after_the_last_byte_is_no_failure(
    serve: Callable[..., Server], start: int, stop: int
) -> None:
    """No byte is left to ask for: a store refuses such a range, as if the object had become shorter."""
    body = b"0123456789"

    def answer(wire: Wire, head: bytes) -> None:
        if len(server.heads) > 1:
            return wire.reply(b"", "416 Range Not Satisfiable")
        about = "200 OK" if stop == 10 else f"206 Partial\r\nContent-Range: bytes {start}-{stop - 1}/10"
        wire.send(f"HTTP/1.1 {about}\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n")
        wire.send(f"{stop - start:x}\r\n", body[start:stop] + b"\r\n")
        wire.sock.close()

    server = serve(answer)
    assert fetched(web(server), 10, start, stop) == body[start:stop]
    assert len(server.heads) == 1
    server.heads.clear()
    sink, ends, over = Collect(), list[Exception | None](), trio.Event()

    def ended(error: Exception | None) -> None:
        ends.append(error)
        over.set()

    async def use(there: Origin) -> None:
        wanted = ByteRange("k", '"e"', start, stop, stop == 10)
        assert there.begin(wanted, sink, ended, ticket=Ticket())
        await over.wait()

    run(web(server), use)
    assert (bytes(sink.data), ends) == (body[start:stop], [None])


def test_what_is_read_of_a_file_to_send_it_ends_no_outage(serve: Callable[..., Server]) -> None:
    """A write is tried all the same, and the upload limit lets its first bytes pass: none of them reaches a server."""
    server = serve(lambda wire, head: wire.reply(b""))
    server.close()
    options = {"upload_limit": 100 << 20, "deadline_s": 0.9}
    origin = web(server, "s3://bucket", endpoint_url=server.url, anonymous=True, **options)
    metrics, body = origin._attempts.metrics, InMemory(bytes(500_000))

    async def use(there: Origin) -> None:
        while not there.complaint:
            with pytest.raises(OriginFailed):
                await there.head("k")
        for _ in range(2):
            with pytest.raises(OriginFailed, match="gave up after 6 attempts"):
                await there.put("k", body, len(body.data))
            with pytest.raises(Unreachable):
                await there.head("k")
        assert metrics.origin_outages == 1 and metrics.origin_bytes_sent >= len(body.data)

    run(origin, use)


# Ways to the server.


def test_ipv6(serve: Callable[..., Server]) -> None:
    server = serve(lambda wire, head: wire.reply(b"hello"), family=socket.AF_INET6)
    assert fetched(web(server), 5) == b"hello"


def test_proxies_of_the_environment(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = serve(lambda wire, head: wire.reply(b"proxy"))
    server = serve(lambda wire, head: wire.reply(b"plain"))
    monkeypatch.setenv("http_proxy", proxy.url)
    assert fetched(web(server), 5) == b"proxy"
    assert proxy.heads[0].startswith(f"GET {server.url}/k HTTP/1.1".encode())
    monkeypatch.setenv("no_proxy", "127.0.0.1,other")
    assert fetched(web(server), 5) == b"plain"


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A server's context; the environment names its authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "authority.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def test_tls_through_a_proxy(
    serve: Callable[..., Server], tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(lambda wire, head: wire.reply(b"hello"), tls=tls)

    def tunnel(wire: Wire, head: bytes) -> None:
        there = socket.create_connection(("127.0.0.1", server.port))
        wire.send('HTTP/1.1 200 Connection established\r\nETag: "proxy"\r\n\r\n')

        def pump(source: socket.socket, target: socket.socket) -> None:
            try:
                while data := source.recv(65536):
                    target.sendall(data)
            except OSError:
                pass

        threading.Thread(target=pump, args=(there, wire.sock), daemon=True).start()
        pump(wire.sock, there)

    proxy = serve(tunnel)
    monkeypatch.setenv("https_proxy", proxy.url)
    origin = web(server)
    assert fetched(origin, 5) == b"hello"
    (head,) = proxy.heads
    assert head.startswith(f"CONNECT 127.0.0.1:{server.port} HTTP/1.1".encode())
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert fetched(web(server), 5) == b"hello" and len(proxy.heads) == 1


def test_a_tunnel_that_breaks_is_no_reply(
    serve: Callable[..., Server], tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tunnel(wire: Wire, head: bytes) -> None:
        wire.send("HTTP/1.1 200 Connection established\r\n\r\n")
        wire.sock.close()

    proxy = serve(tunnel)
    monkeypatch.setenv("https_proxy", proxy.url)
    with pytest.raises(OriginFailed, match="gave up after 6 attempts"):
        fetched(web(proxy, "https://127.0.0.1:9"), 5)
    assert len(proxy.heads) == 6


def test_a_certificate_of_another_host(
    serve: Callable[..., Server], tls: ssl.SSLContext, tmp_path: Path
) -> None:
    server = serve(lambda wire, head: wire.reply(b"hello"), tls=tls)
    with pytest.raises(OriginFailed, match="certificate verify failed"):
        fetched(web(server, server.url.replace("127.0.0.1", "localhost")), 5)
    (tmp_path / "authority.pem").write_text("no certificate")
    with pytest.raises(OriginFailed, match=r"authority\.pem") as failure:
        fetched(web(server), 5)
    assert "\n" not in str(failure.value)


# The thread.


def http_threads() -> int:
    return sum(thread.name == "cachefs http" for thread in threading.enumerate())


def test_no_thread_before_the_first_exchange_and_none_after_the_end(serve: Callable[..., Server]) -> None:
    server = serve(lambda wire, head: wire.reply(b"hello"))
    before, descriptors = http_threads(), len(os.listdir("/proc/self/fd"))
    transport = Transport(5.0)
    assert http_threads() == before
    assert transport.send(Exchange("GET", server.url, {})).body == b"hello"
    assert http_threads() == before + 1
    transport.close()
    for _ in range(200):
        if http_threads() == before:
            break
        time.sleep(0.01)
    assert http_threads() == before
    with pytest.raises(Transient, match="closed"):
        transport.send(Exchange("GET", server.url, {}))
    server.close()
    time.sleep(0.1)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_closing_ends_what_is_under_way(serve: Callable[..., Server]) -> None:
    server = serve(lambda wire, head: time.sleep(5))
    transport = Transport(5.0)
    failed: list[str] = []

    def ask() -> None:
        try:
            transport.send(Exchange("GET", server.url, {}))
        except Transient as exc:
            failed.append(str(exc))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    while len(server.heads) < 5:
        time.sleep(0.01)
    transport.close()
    for thread in threads:
        thread.join(5)
    assert failed == ["the HTTP client was closed"] * 5


def test_a_loop_that_fails_begins_anew(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(lambda wire, head: wire.reply(b"hello"))
    transport = Transport(5.0)
    assert transport.send(Exchange("GET", server.url, {})).body == b"hello"
    (loop,) = transport._loops.values()
    monkeypatch.setattr(type(loop), "_look_for_silence", lambda *_: 1 / 0)
    loop._look_at = 0.0
    with pytest.raises(Transient):
        for _ in range(10):
            transport.send(Exchange("GET", server.url, {}))
    monkeypatch.undo()
    assert transport.send(Exchange("GET", server.url, {})).body == b"hello"
    assert "the HTTP client failed" in caplog.text
    transport.close()


# The loop on the trio thread.


async def ask(transport: Transport, url: str) -> bytes:
    """The body of the reply to a short exchange."""
    exchange = Exchange("GET", url, {})
    exchange.short = True
    await transport.run(exchange)
    return exchange.body


def test_a_short_exchange_needs_no_thread(serve: Callable[..., Server]) -> None:
    server = serve(lambda wire, head: wire.reply(b"hello"))

    async def play() -> None:
        before, transport = http_threads(), Transport(5.0)
        assert await ask(transport, server.url) == b"hello" and http_threads() == before
        transport.close()

    trio.run(play)


def test_a_large_body_does_not_come_on_the_trio_thread(serve: Callable[..., Server]) -> None:
    bodies = {b"/small ": b"x" * AT_ONCE, b"/large ": b"x" * (AT_ONCE + 1)}
    server = serve(lambda wire, head: wire.reply(next(body for key, body in bodies.items() if key in head)))
    threads: dict[str, set[str]] = {}

    class Noting(Collect):
        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

        def write(self, data: memoryview | bytes) -> None:
            threads.setdefault(self.key, set()).add(threading.current_thread().name)
            super().write(data)

    async def use(there: Origin) -> None:
        for key, size in (("small", AT_ONCE), ("large", AT_ONCE + 1)):
            await there.read(key, '"e"', 0, size, Noting(key), whole=True)

    run(web(server), use)
    assert threads == {"small": {threading.current_thread().name}, "large": {"cachefs http"}}


def test_other_tasks_run_between_short_exchanges(serve: Callable[..., Server]) -> None:
    """All replies come at the same moment. Between two turns of another task one or two turns of the loop lie."""
    count, together = 5 * SOCKETS_A_TURN, threading.Barrier(5 * SOCKETS_A_TURN)

    def answer(wire: Wire, head: bytes) -> None:
        together.wait(20)
        wire.reply(b"hello")

    server, transport = serve(answer), Transport(20.0)
    ended: list[bytes] = []

    async def one() -> None:
        ended.append(await ask(transport, server.url))

    async def play() -> None:
        most = before = 0
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(one)
            while len(ended) < count:
                await trio.lowlevel.checkpoint()
                most, before = max(most, len(ended) - before), len(ended)
        assert ended == [b"hello"] * count and most <= 2 * SOCKETS_A_TURN
        transport.close()

    trio.run(play)


def test_closing_ends_short_exchanges(serve: Callable[..., Server]) -> None:
    asked, together = threading.Event(), threading.Barrier(3, action=lambda: asked.set())
    server, transport = serve(lambda wire, head: (together.wait(5), time.sleep(5))), Transport(5.0)

    async def refused() -> None:
        with pytest.raises(Transient, match="closed"):
            await ask(transport, server.url)

    async def play() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(refused)
            await trio.to_thread.run_sync(asked.wait)
            transport.close()
        await refused()

    trio.run(play)


def test_the_end_of_trio_ends_its_loop(serve: Callable[..., Server]) -> None:
    server, transport = serve(lambda wire, head: wire.reply(b"hello")), Transport(5.0)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert trio.run(ask, transport, server.url) == b"hello"
        (loop,) = transport._loops.values()
        assert loop.over
    server.close()
    for _ in range(200):
        if len(os.listdir("/proc/self/fd")) <= descriptors:
            break
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    transport.close()


def test_a_loop_on_the_trio_thread_that_fails_begins_anew(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def answer(wire: Wire, head: bytes) -> None:
        if len(server.heads) == 2:
            failed.wait(5)
        wire.reply(b"hello")

    server, transport = serve(answer), Transport(5.0)

    async def play() -> None:
        assert await ask(transport, server.url) == b"hello"
        (loop,) = transport._loops.values()
        monkeypatch.setattr(type(loop), "_look_for_silence", lambda *_: 1 / 0)
        loop._look_at = 0.0
        with pytest.raises(Transient, match="closed"):
            await ask(transport, server.url)
        failed.set()
        monkeypatch.undo()
        assert await ask(transport, server.url) == b"hello"
        transport.close()

    trio.run(play)
    assert caplog.text.count("the HTTP client failed") == 1


def test_an_exchange_that_cannot_begin_ends_alone(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(lambda wire, head: wire.reply(b"hello"))
    transport = Transport(5.0)

    def no_memory() -> pycurl.Curl:
        raise MemoryError

    async def main() -> None:
        with trio.fail_after(5):
            with monkeypatch.context() as patch:
                patch.setattr(pycurl, "Curl", no_memory)
                with pytest.raises(OriginFailed):
                    await transport.run(Exchange("GET", server.url, {}))
            exchange = Exchange("GET", server.url, {})
            await transport.run(exchange)
            assert exchange.body == b"hello"

    trio.run(main)
    assert not caplog.records
    transport.close()


def test_many_at_once_are_woken_together(serve: Callable[..., Server]) -> None:
    server = serve(lambda wire, head: wire.reply(b"x" * 1000))
    origin = web(server, concurrency=300)
    sinks = [Collect() for _ in range(300)]

    async def use(there: Origin) -> None:
        async with trio.open_nursery() as nursery:
            for sink in sinks:
                nursery.start_soon(lambda sink=sink: there.read("k", '"e"', 0, 1000, sink, whole=True))

    run(origin, use)
    assert all(sink.data == b"x" * 1000 for sink in sinks)


# Signatures.


@given(
    st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD"]),
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.dictionaries(
        st.text("abc-DEF/", min_size=1), st.text(st.characters(codec="utf-8"), max_size=8), max_size=3
    ),
    st.dictionaries(
        st.sampled_from(["Range", "If-Match", "x-amz-b", "Content-Type", "x-amz-A"]),
        st.text("a \t'\"=9-", max_size=9),
    ),
    st.sampled_from(["", "token/with+=signs"]),
)
def test_signatures_are_botocores(
    method: str, key: str, parameters: dict[str, str | None], headers: dict[str, str], token: str
) -> None:
    url = f"http://host:9000/bucket/{quote(key)}" + (f"?{query(parameters)}" if parameters else "")
    reference = AWSRequest(method, url, dict(headers))
    signer = S3SigV4Auth(Credentials("id", "secret", token or None), "s3", "eu-west-1")
    signer.payload = lambda request: "UNSIGNED-PAYLOAD"
    signer.add_auth(reference)
    sent_at = (
        reference.headers["X-Amz-Date"]
        if "X-Amz-Date" in reference.headers
        else reference.context["timestamp"]
    )
    when = time.mktime(time.strptime(sent_at, "%Y%m%dT%H%M%SZ")) - time.timezone
    credentials = SimpleNamespace(access_key="id", secret_key="secret", token=token or None)
    ours = signed_v4(method, url, headers, "UNSIGNED-PAYLOAD", credentials, "eu-west-1", when)
    assert ours["Authorization"] == reference.headers["Authorization"]

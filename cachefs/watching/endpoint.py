"""A small HTTP server: GET, a table of pages, one reply a connection.

Nobody can hold the daemon up: connections are bounded, a request has a size and a time, a reply that is not taken is broken
off. On the loopback only requests that name the loopback are answered, so that no web page that a browser of this machine
shows can read them under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

import h11
import trio

from cachefs.errors import MountError
from cachefs.tasks import containing

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""Guessed: some scrapers, probes and open pages."""

REQUEST_S, REPLY_S = 5.0, 15.0
"""For a request to come, and for its reply to be made and taken. Guessed."""

MAX_HEAD_BYTES = 16 << 10


class Reply(NamedTuple):
    status: int
    kind: str
    body: bytes


Page = Callable[[], Awaitable[Reply]]

TEXT = "text/plain; charset=utf-8"

HEADERS = [
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    # A page may run what it brings along, and ask nobody but this endpoint.
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
]


def plain(text: str, status: int = 200) -> Reply:
    return Reply(status, TEXT, (text + "\n").encode())


def is_loopback(host: str) -> bool:
    """Whether a host, as it is written in addresses, can only be this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


async def open_endpoint(where: str) -> Endpoint:
    """Listen at HOST:PORT, for `Endpoint.serve`. Raises `MountError`."""
    host, _, port = where.rpartition(":")
    try:
        listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]"))
    except (OSError, ValueError, OverflowError) as exc:
        cause = exc.__cause__ if isinstance(exc.__cause__, OSError) else exc
        reason = getattr(cause, "strerror", None) or cause
        raise MountError(f"cannot listen at {where}: {reason}: choose another --metrics") from exc
    return Endpoint(host, listeners)


class Endpoint:
    """`address` is where it is reached, with the port that port 0 became."""

    def __init__(self, host: str, listeners: Sequence[trio.SocketListener]) -> None:
        self.address = f"{host}:{listeners[0].socket.getsockname()[1]}"
        self.warning = (
            ""
            if is_loopback(host)
            else (
                f"metrics, names of files and of processes are shown at {self.address} to whoever reaches it: there is no "
                "password"
            )
        )
        self._listeners = listeners
        self._local = is_loopback(host)
        self._room = trio.Semaphore(MAX_CONNECTIONS)

    async def serve(self, pages: Mapping[str, Page]) -> None:
        """Answer until cancelled; the port is closed then."""

        async def handle(stream: trio.SocketStream) -> None:
            try:
                self._room.acquire_nowait()
            except trio.WouldBlock:
                await trio.aclose_forcefully(stream)
                return
            try:
                async with stream:
                    await self._converse(stream, pages)
            except (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError, OSError):
                pass  # the client has gone, or was none
            finally:
                self._room.release()

        await trio.serve_listeners(containing("a request for metrics", handle), list(self._listeners))

    async def _converse(self, stream: trio.SocketStream, pages: Mapping[str, Page]) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        request = None
        with trio.move_on_after(REQUEST_S):
            try:
                request = await _request(stream, connection)
            except h11.RemoteProtocolError as exc:
                await _send(stream, connection, plain(str(exc), exc.error_status_hint))
                return
        if request is None:
            return
        with trio.move_on_after(REPLY_S):
            reply = await self._answer(request, pages)
            await _send(stream, connection, reply, body=request.method != b"HEAD")

    async def _answer(self, request: h11.Request, pages: Mapping[str, Page]) -> Reply:
        path = request.target.partition(b"?")[0].decode("latin-1")
        if self._local and not _names_loopback(request):
            return plain("this is shown to this machine only: ask for it as localhost", 403)
        if request.method not in (b"GET", b"HEAD"):
            return plain("only GET", 405)
        page = pages.get(path)
        if page is None:
            return plain(f"here are {', '.join(pages)}", 404)
        try:
            return await page()
        except Exception:
            log.exception("%s failed", path)
            return plain("internal error: the log has more", 500)


def _names_loopback(request: h11.Request) -> bool:
    host = next((value for name, value in request.headers if name == b"host"), b"").decode("latin-1")
    name, _, port = host.rpartition(":")
    return is_loopback(name if name and port.isdigit() else host)


async def _request(stream: trio.SocketStream, connection: h11.Connection) -> h11.Request | None:
    """The head; a body is left where it is. None: the client has gone."""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        connection.receive_data(await stream.receive_some(MAX_HEAD_BYTES))


async def _send(
    stream: trio.SocketStream, connection: h11.Connection, reply: Reply, *, body: bool = True
) -> None:
    head = h11.Response(
        status_code=reply.status,
        reason=HTTPStatus(reply.status).phrase.encode(),
        headers=[
            ("Content-Type", reply.kind),
            ("Content-Length", str(len(reply.body))),
            ("Connection", "close"),
            *HEADERS,
        ],
    )
    data = connection.send(head) or b""
    await stream.send_all(data + (reply.body if body else b""))
    await stream.send_eof()

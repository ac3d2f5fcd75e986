"""A small HTTP server: it answers GET and HEAD from a table of pages, with one reply a connection.

No client can block the daemon: the number of connections, the size of a request and the duration of a connection are
bounded. A server on the loopback address answers only requests whose Host header names the loopback, so that no web page in
a browser of this machine can read it under the page's own host name (DNS rebinding).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import trio

from cachefs.base.errors import MountError
from cachefs.base.http1 import MAX_HEAD_BYTES, NotHttp, Request, parse_request, spell_reply
from cachefs.base.listening import Listener, is_loopback
from cachefs.base.tasks import containing

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""Bound of open connections; further ones are closed at once. Derived: less than a hundredth of the 4096 descriptors that
`doctor` wants for a mount, and more than some scrapers, probes and open pages need."""

ANSWER_S = 15.0
"""Deadline of a connection. Derived: Prometheus gives up after 10 s (`scrape_timeout`)."""


class Reply(NamedTuple):
    status: int
    kind: str
    body: bytes


Page = Callable[[], Awaitable[Reply]]

TEXT = "text/plain; charset=utf-8"

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # Limits a page to its inline scripts and to connections to this endpoint.
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
}


def plain(text: str, status: int = 200) -> Reply:
    return Reply(status, TEXT, (text + "\n").encode())


async def open_endpoint(where: str) -> Endpoint:
    """Listen at HOST:PORT. `Endpoint.serve` then answers. Raises `MountError`."""
    host, _, port = where.rpartition(":")
    try:
        listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]"))
    except (OSError, ValueError, OverflowError) as exc:
        cause = exc.__cause__ if isinstance(exc.__cause__, OSError) else exc
        reason = getattr(cause, "strerror", None) or cause
        raise MountError(f"cannot listen at {where}: {reason}: choose another --metrics") from exc
    return Endpoint(host, listeners)


class Endpoint:
    """A server that listens. `address` has the port that the kernel chose for port 0. `warning` is "" on the loopback."""

    def __init__(self, host: str, listeners: Sequence[trio.SocketListener]) -> None:
        self.address = f"{host}:{listeners[0].socket.getsockname()[1]}"
        self.warning = ""
        self._local = is_loopback(host)
        if not self._local:
            self.warning = (
                f"metrics, names of files and of processes are shown at {self.address} to every client that reaches it: "
                "there is no password"
            )
        self._listeners = listeners
        self._connections = trio.Semaphore(MAX_CONNECTIONS)

    async def serve(self, pages: Mapping[str, Page]) -> None:
        """Answer requests until cancelled, then close the port."""

        async def handle(stream: trio.SocketStream) -> None:
            try:
                async with stream:
                    self._connections.acquire_nowait()
                    try:
                        await self._serve_one(stream, pages)
                    finally:
                        self._connections.release()
            except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError, OSError):
                pass  # there are too many connections, or the client has closed this one

        listeners = [Listener(listener, "metrics") for listener in self._listeners]
        await trio.serve_listeners(containing("a request for metrics", handle), listeners)

    async def _serve_one(self, stream: trio.SocketStream, pages: Mapping[str, Page]) -> None:
        with trio.move_on_after(ANSWER_S):
            try:
                request = await _request(stream)
            except NotHttp as exc:
                await _send(stream, plain(str(exc), exc.status))
                return
            if request is not None:
                reply = await self._answer(request, pages)
                await _send(stream, reply, body=request.method != "HEAD")

    async def _answer(self, request: Request, pages: Mapping[str, Page]) -> Reply:
        path = request.target.partition("?")[0]
        if self._local and not _names_loopback(request):
            return plain("this is shown to this machine only: ask for it as localhost", 403)
        if request.method not in ("GET", "HEAD"):
            return plain("only GET", 405)
        page = pages.get(path)
        if page is None:
            return plain(f"here are {', '.join(pages)}", 404)
        try:
            return await page()
        except Exception:
            log.exception("%s failed", path)
            return plain("internal error: the log has more", 500)


def _names_loopback(request: Request) -> bool:
    host = request.headers.get("host", "")
    name, _, port = host.rpartition(":")
    return is_loopback(name if name and port.isdigit() else host)


async def _request(stream: trio.SocketStream) -> Request | None:
    """The request; None if the client has closed the connection."""
    data = b""
    while (request := parse_request(data)) is None:
        received = await stream.receive_some(MAX_HEAD_BYTES)
        if not received:
            return None
        data += received
    return request


async def _send(stream: trio.SocketStream, reply: Reply, *, body: bool = True) -> None:
    length = str(len(reply.body))
    head = {"Content-Type": reply.kind, "Content-Length": length, "Connection": "close", **HEADERS}
    await stream.send_all(spell_reply(reply.status, head) + (reply.body if body else b""))
    await stream.send_eof()

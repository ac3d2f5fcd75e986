"""A client of etcd: its v3 gateway, JSON over HTTP/1.1.

Five calls are needed, and the gateway answers them without gRPC, protobuf or a client library (the maintained ones for
Python bring asyncio or threads). It is spoken over trio and h11, as the peers speak, rather than urllib3 in threads: a watch
is an endless reply, which a thread could neither wait for with a deadline nor leave.

Everything has a deadline, and an endpoint that does not answer in time is left for the next one. In the gateway's JSON,
bytes are base64, 64-bit numbers are strings, and what is zero is left out.
"""

from __future__ import annotations

import json
import logging
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import h11
import trio

from cachefs.errors import CachefsError, Transient
from cachefs.peers.places import Endpoint

log = logging.getLogger(__name__)

ATTEMPT_S = 2.0
"""For one endpoint to answer. Derived: three of them may hang, and a lease of 10 s is still renewed in time."""

MAX_MESSAGE_BYTES = 16 << 20
"""One message. Derived: a full reading of 10,000 members is 6 MiB."""

RECEIVE_BYTES = 64 << 10

UNAUTHENTICATED = 16
NOT_FOUND = 5
_ELSEWHERE = {4, 14}
"""gRPC codes that another endpoint may not answer with: deadline exceeded, unavailable (which includes "no leader")."""

Message = Mapping[str, Any]


class EtcdUnavailable(Transient):
    """No endpoint answered in time."""


class EtcdRefused(CachefsError):
    """An endpoint answered no. `code` is gRPC's."""

    code = 0


class Messages:
    """The JSON messages of one reply, as they come."""

    def __init__(self, stream: trio.abc.Stream, connection: h11.Connection) -> None:
        self._stream = stream
        self._connection = connection
        self._buffer = bytearray()
        self._status = 200

    async def first(self) -> Message:
        """As `next`, but there has to be one."""
        event = await self._event()
        self._status = event.status_code if isinstance(event, h11.Response) else 0
        try:
            message = await self.next()
        except h11.RemoteProtocolError:
            if self._status == 200:
                raise
            message = None
        if message is None:
            raise h11.RemoteProtocolError(f"HTTP {self._status} without a message")
        return message

    async def next(self) -> Message | None:
        """None at the end. Raises `EtcdRefused` for an error in the stream, else what connections raise."""
        seen = 0
        while True:
            end = self._buffer.find(b"\n", seen)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                if line.strip():
                    return _message(line, self._status)
                seen = 0
                continue
            seen = len(self._buffer)
            if seen > MAX_MESSAGE_BYTES:
                raise h11.RemoteProtocolError("a message without an end")
            event = await self._event()
            if isinstance(event, h11.Data):
                self._buffer += event.data
            elif self._buffer.strip():
                self._buffer += b"\n"
            else:
                return None

    async def _event(self) -> Any:
        while True:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                self._connection.receive_data(bytes(await self._stream.receive_some(RECEIVE_BYTES)))
            elif not isinstance(event, h11.InformationalResponse):
                return event


def _message(line: bytes, status: int) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise h11.RemoteProtocolError("not JSON") from None
    if not isinstance(message, dict):
        raise h11.RemoteProtocolError("not a JSON object")
    if "error" in message or status != 200:
        # The three shapes of etcd 3.4 (unary, stream) and 3.6 (no "error" in a unary one).
        error = message.get("error")
        details = error if isinstance(error, dict) else message
        refused = EtcdRefused(str(details.get("message") or error or f"HTTP {status}"))
        code = details.get("grpc_code", details.get("code", 0))
        refused.code = code if isinstance(code, int) else 0
        raise refused
    return message


class Gateway:
    """One cluster. `tls` is for its https endpoints (default: the system's certificate authorities); with a user, requests
    carry a token that is asked for when needed."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        rng: random.Random,
        *,
        tls: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
        connect: Callable[[str, int], Awaitable[trio.abc.Stream]] = trio.open_tcp_stream,
    ) -> None:
        self._endpoints = list(endpoints)
        rng.shuffle(self._endpoints)  # so that nodes spread over them
        self._tls = tls
        self._user = user
        self._password = password
        self._token = ""
        self._connect = connect

    async def call(self, path: str, body: Message) -> Message:
        """The reply, or the first message of several. Raises `EtcdUnavailable` or `EtcdRefused`."""
        async with self.stream(path, body) as (first, _):
            return first

    @asynccontextmanager
    async def stream(self, path: str, body: Message) -> AsyncIterator[tuple[Message, Messages]]:
        """The first message, and those to come; closes the connection afterwards. Raises as `call` does, and inside of the
        block what connections raise (`BROKEN`)."""
        if self._user and not self._token:
            await self._authenticate()
        try:
            opened = await self._somewhere(path, body)
        except EtcdRefused as exc:
            if not self._user or exc.code != UNAUTHENTICATED:
                raise
            await self._authenticate()  # a token does not live long
            opened = await self._somewhere(path, body)
        first, messages, stream = opened
        try:
            yield first, messages
        finally:
            await trio.aclose_forcefully(stream)

    @property
    def preferred(self) -> Endpoint:
        """The endpoint that is asked first."""
        return self._endpoints[0]

    def forget_token(self) -> None:
        """It may be why a watch was refused, which is not told by a code."""
        self._token = ""

    async def _authenticate(self) -> None:
        self.forget_token()
        asked = {"name": self._user, "password": self._password}
        said, _, stream = await self._somewhere("/v3/auth/authenticate", asked)
        await trio.aclose_forcefully(stream)
        self._token = str(said.get("token", ""))

    async def _somewhere(self, path: str, body: Message) -> tuple[Message, Messages, trio.abc.Stream]:
        reasons = []
        for _ in self._endpoints:
            endpoint = self._endpoints[0]
            try:
                with trio.fail_after(ATTEMPT_S):
                    return await self._ask(endpoint, path, body)
            except EtcdRefused as exc:
                if exc.code not in _ELSEWHERE:
                    raise
                reasons.append(f"{endpoint}: {exc}")
            except BROKEN as exc:
                reasons.append(f"{endpoint}: {_reason(exc)}")
            # Another request may have turned away from it meanwhile.
            if self._endpoints[0] == endpoint:
                self._endpoints.append(self._endpoints.pop(0))
        raise EtcdUnavailable("etcd does not answer: " + "; ".join(reasons))

    async def _ask(
        self, endpoint: Endpoint, path: str, body: Message
    ) -> tuple[Message, Messages, trio.abc.Stream]:
        stream = await self._connect(*endpoint.address)
        try:
            if endpoint.tls:
                context = self._tls or ssl.create_default_context()
                stream = trio.SSLStream(
                    stream, context, server_hostname=endpoint.address.host, https_compatible=True
                )
            messages = await self._send(stream, endpoint, path, json.dumps(body).encode())
            return await messages.first(), messages, stream
        except BaseException:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)
            raise

    async def _send(self, stream: trio.abc.Stream, endpoint: Endpoint, path: str, body: bytes) -> Messages:
        connection = h11.Connection(h11.CLIENT)
        headers = [
            ("Host", str(endpoint.address)),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            # A watch on a member that lost its leader would else be silent.
            ("Grpc-Metadata-hasleader", "true"),
        ]
        if self._token:
            headers.append(("Authorization", self._token))
        request = h11.Request(method="POST", target=path, headers=headers)
        parts = [connection.send(event) for event in (request, h11.Data(data=body), h11.EndOfMessage())]
        await stream.send_all(b"".join(part for part in parts if part))
        return Messages(stream, connection)


BROKEN = (OSError, trio.BrokenResourceError, trio.TooSlowError, h11.ProtocolError, ValueError)
"""What a connection raises (`ssl.SSLError` is an OSError; ValueError: a name that IDNA cannot spell)."""


def _reason(exc: BaseException) -> str:
    if isinstance(exc, trio.TooSlowError):
        return f"no answer in {ATTEMPT_S:g} s"
    return str(exc) or str(exc.__cause__ or type(exc).__name__)  # trio's own errors have theirs as a cause

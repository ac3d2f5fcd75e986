"""Members that register in etcd, and a client of etcd's v3 gateway (JSON over HTTP/1.1).

A node's key is `prefix/group/host:port`, and its value is the node's handshake. If two keys have one node id (the node is
back under another address, and its old lease still runs), the key written last counts. The key is attached to a lease:
etcd deletes the key of a node that died, and a node that stops revokes its lease. At every poll a node renews its lease and
requests the number of keys and the newest revision among them. It reads the keys only when these have changed, and registers
again when its lease is lost or its key is not its own. While etcd does not answer, the members stay as they are.

In the gateway's JSON, bytes are base64, 64-bit numbers are strings, and zeros are left out. There is no client library that
brings neither asyncio nor threads."""

from __future__ import annotations

import json
import logging
import random
import socket
import ssl
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import h11
import trio

from cachefs.base.errors import CachefsError, Transient
from cachefs.base.tasks import in_thread
from cachefs.peers.client import Resolver
from cachefs.peers.membership import Sighting
from cachefs.peers.settings import Endpoint, parse_address
from cachefs.peers.wire import Address, Handshake

log = logging.getLogger(__name__)

LEASE_S = 10
"""Seconds that a dead node stays a member; its peers notice its death sooner. etcd's own minimum is about twice its
election timeout, 2 s. Derived: five renewals fit into it."""

ATTEMPT_S = 2.0
"""Seconds that one endpoint may take to answer. Derived: three of them may hang, and a lease is still renewed in time."""

MAX_MESSAGE_BYTES = 16 << 20
"""Bytes of one reply. Derived: 10,000 members take 6 MiB."""

RECEIVE_BYTES = 64 << 10

UNAUTHENTICATED = 16
_OTHER_ENDPOINT_MAY_ANSWER = {4, 14}
"""gRPC codes after which another endpoint is asked: deadline exceeded, unavailable (which includes "no leader")."""

Message = Mapping[str, Any]

State: TypeAlias = tuple[int, int]
"""(number of keys, newest revision among them) of a range."""


class EtcdUnavailable(Transient):
    """No endpoint answered in time."""


class EtcdRefused(CachefsError):
    """An endpoint answered with an error. `code` is gRPC's."""

    code = 0


BROKEN = (OSError, trio.BrokenResourceError, trio.TooSlowError, h11.ProtocolError, ValueError)
"""Exceptions of a connection (`ssl.SSLError` is an OSError; ValueError: a name that IDNA cannot encode)."""


def advertised(listen: Address, toward: Address) -> Address:
    """The address at which other nodes reach a node that listens at `listen`. For a wildcard it is the source address of
    packets to `toward`; no packet is sent. Blocks for the resolver. Raises OSError if there is no route."""
    if listen.host not in ("", "0.0.0.0", "::"):
        return listen
    for family, *_, sockaddr in socket.getaddrinfo(*toward, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(sockaddr)
            return Address(str(probe.getsockname()[0]), listen.port)
    raise OSError(f"{toward.host} has no address")


class Registry:
    """A source of members (`membership.Source`) that also writes this node's key. `listen` is where this node listens. If
    it is None, or the handshake has weight 0, the node serves no blocks and is not registered."""

    def __init__(self, gateway: Gateway, prefix: str, handshake: Handshake, listen: Address | None) -> None:
        self.trouble = ""
        self._gateway = gateway
        self._directory = f"{prefix}/{handshake.group}/"
        self._handshake = handshake
        self._listen = listen if handshake.weight > 0 else None
        self._entries: dict[Address, Handshake] | None = None
        """The nodes' handshakes in the order in which they were written; None before the first reading."""
        self._state: State = (0, 0)
        """The state of the keys when they were read."""
        self._failures = 0
        self._address: Address | None = None
        self._lease = ""
        self._disputed = False

    async def present(self) -> list[Sighting] | None:
        doing = "read members"
        try:
            await self._read()
            if self._listen is not None:
                doing = "register"
                if await self._stay_registered(self._listen):
                    await self._read()
        except (EtcdUnavailable, EtcdRefused, OSError) as exc:
            self._failures += 1
            log.log(
                logging.WARNING if self._failures == 2 else logging.DEBUG, "cannot %s in etcd: %s", doing, exc
            )
            # One failure after a success may be an election.
            if self._failures >= 2 or self._entries is None:
                self.trouble = f"cannot {doing} in etcd: {exc}"
        else:
            self._failures, self.trouble = 0, ""
        if self._entries is None:
            return None
        return [Sighting(address, handshake) for address, handshake in self._entries.items()]

    def handshake_requested(self, host: str) -> bool:
        return False  # a new node registers, and the next poll finds it

    async def leave(self) -> None:
        if not self._lease:
            return
        with trio.move_on_after(1.0, shield=True):
            try:
                await self._gateway.call("/v3/lease/revoke", {"ID": self._lease})
            except CachefsError as exc:
                log.debug("the lease in etcd is left to expire: %s", exc)

    async def _stay_registered(self, listen: Address) -> bool:
        """Renew the lease, and write the key if it is missing. True if it was written."""
        if self._address is None:
            toward = self._gateway.endpoints[0].address
            look, threads = partial(advertised, listen, toward), self._gateway.resolve.threads
            self._address = await in_thread(look, abandon_on_cancel=True, limiter=threads)
        if self._lease and not await self._renew():
            log.info("the lease in etcd is lost: registering %s again", self._address)
            self._lease = ""
        if not self._lease:
            granted = await self._gateway.call("/v3/lease/grant", {"TTL": LEASE_S})
            self._lease = str(granted.get("ID", ""))
        elif self._sees_itself(self._address):
            return False
        key, value = f"{self._directory}{self._address}".encode(), self._handshake.pack()
        put = {"key": _coded(key), "value": _coded(value), "lease": self._lease}
        await self._gateway.call("/v3/kv/put", put)
        return True

    async def _renew(self) -> bool:
        reply = await self._gateway.call("/v3/lease/keepalive", {"ID": self._lease})
        result = reply.get("result")
        return isinstance(result, dict) and _number(result, "TTL") > 0

    def _sees_itself(self, address: Address) -> bool:
        """True if this node's key is there and holds its handshake."""
        entry = (self._entries or {}).get(address)
        disputed = entry is not None and entry.node != self._handshake.node
        if disputed and not self._disputed:
            log.warning("another node registers as %s: let each listen on an address of its own", address)
        self._disputed = disputed
        return entry == self._handshake

    async def _read(self) -> None:
        """Read the entries again if the keys have changed."""
        # The range ends at the directory with "0", the character after the slash, in place of the slash.
        everything = {
            "key": _coded(self._directory.encode()),
            "range_end": _coded(self._directory[:-1].encode() + b"0"),
            "sort_target": "MOD",
        }
        newest = await self._gateway.call(
            "/v3/kv/range", everything | {"sort_order": "DESCEND", "limit": 1, "keys_only": True}
        )
        # Each write raises the newest revision, and a deletion without a write lowers the count.
        if self._entries is not None and _state(newest) == self._state:
            return
        page = await self._gateway.call("/v3/kv/range", everything | {"sort_order": "ASCEND"})
        entries: dict[Address, Handshake] = {}
        for pair in _parts(page, "kvs"):
            try:
                address = parse_address(_decoded(pair, "key").decode().removeprefix(self._directory))
                entries[address] = Handshake.parse(_decoded(pair, "value"))
            except (ValueError, CachefsError) as exc:
                log.debug("not an entry of a node in etcd: %s", exc)
        self._entries, self._state = entries, _state(page)


def _state(page: Message) -> State:
    return _number(page, "count"), max(
        (_number(pair, "mod_revision") for pair in _parts(page, "kvs")), default=0
    )


@dataclass(eq=False, repr=False)
class Gateway:
    """A client of one etcd cluster. An endpoint that does not answer within `ATTEMPT_S` becomes the last. `tls` is for
    https endpoints (default: the system's certificate authorities). With a user, requests carry a token."""

    endpoints: Sequence[Endpoint]
    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = ""
    connect: Callable[[str, int], Awaitable[trio.abc.Stream]] | None = None
    _token: str = ""

    def __post_init__(self) -> None:
        # With threads of its own: one that hangs takes none of those in which the journal and the names are written.
        self.resolve = Resolver(socket.getaddrinfo)
        self.endpoints = random.sample(self.endpoints, len(self.endpoints))  # so that nodes spread over them
        if self.tls is None and any(endpoint.tls for endpoint in self.endpoints):
            self.tls = ssl.create_default_context()  # once: it reads all authorities, which takes 60 ms

    async def call(self, path: str, body: Message) -> Message:
        """Send a request. Returns the reply, or its first message of several. Raises `EtcdUnavailable` or `EtcdRefused`."""
        if self.user and not self._token:
            await self._authenticate()
        try:
            return await self._call_any(path, body)
        except EtcdRefused as exc:
            if not self.user or exc.code != UNAUTHENTICATED:
                raise
        await self._authenticate()  # a token expires after minutes
        return await self._call_any(path, body)

    async def _authenticate(self) -> None:
        self._token = ""
        reply = await self._call_any("/v3/auth/authenticate", {"name": self.user, "password": self.password})
        self._token = str(reply.get("token", ""))

    async def _call_any(self, path: str, body: Message) -> Message:
        reasons = []
        for _ in self.endpoints:
            endpoint = self.endpoints[0]
            try:
                with trio.fail_after(ATTEMPT_S):
                    return await self._ask(endpoint, path, body)
            except EtcdRefused as exc:
                if exc.code not in _OTHER_ENDPOINT_MAY_ANSWER:
                    raise
                reasons.append(f"{endpoint}: {exc}")
            except BROKEN as exc:
                reasons.append(f"{endpoint}: {_reason(exc)}")
            self.endpoints = [*self.endpoints[1:], self.endpoints[0]]
        raise EtcdUnavailable("etcd does not answer: " + "; ".join(reasons))

    async def _ask(self, endpoint: Endpoint, path: str, body: Message) -> Message:
        stream = await (self.connect or self._connect)(*endpoint.address)
        try:
            if endpoint.tls:
                assert self.tls is not None
                stream = trio.SSLStream(
                    stream, self.tls, server_hostname=endpoint.address.host, https_compatible=True
                )
            return await self._exchange(stream, endpoint, path, json.dumps(body).encode())
        finally:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    async def _connect(self, host: str, port: int) -> trio.abc.Stream:
        """Connect to the first address of the name that accepts. Each has its part of half an attempt."""
        failure: Exception = OSError("it has no address")
        ips = await self.resolve(host, port)
        for ip in ips:
            try:
                with trio.fail_after(ATTEMPT_S / 2 / len(ips)):
                    return await trio.open_tcp_stream(ip, port)
            except (OSError, trio.TooSlowError) as exc:
                failure = exc
        raise failure

    async def _exchange(self, stream: trio.abc.Stream, endpoint: Endpoint, path: str, body: bytes) -> Message:
        connection = h11.Connection(h11.CLIENT)
        headers = [
            ("Host", str(endpoint.address)),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            # With this header, a member that has lost its leader refuses at once instead of waiting for the next leader.
            ("Grpc-Metadata-hasleader", "true"),
        ]
        if self._token:
            headers.append(("Authorization", self._token))
        request = h11.Request(method="POST", target=path, headers=headers)
        sent = [connection.send(event) for event in (request, h11.Data(data=body), h11.EndOfMessage())]
        await stream.send_all(b"".join(part for part in sent if part))
        status, reply = 0, bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await stream.receive_some(RECEIVE_BYTES)))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                reply += event.data
                # A streaming call (keepalive) sends a message a line, and may not end.
                if reply.strip() and b"\n" in event.data:
                    return _message(reply.split(b"\n", 1)[0], status)
                if len(reply) > MAX_MESSAGE_BYTES:
                    raise h11.RemoteProtocolError("a reply without an end")
            elif isinstance(event, h11.EndOfMessage):
                return _message(bytes(reply), status)


def _message(line: bytes | bytearray, status: int) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise h11.RemoteProtocolError(f"HTTP {status} without a JSON object")
    if "error" in message or status != 200:
        # Errors have three shapes: of etcd 3.4 (unary, stream), and of 3.6 (no "error" in a unary one).
        error = message.get("error")
        details = error if isinstance(error, dict) else message
        refused = EtcdRefused(str(details.get("message") or error or f"HTTP {status}"))
        code = details.get("grpc_code", details.get("code", 0))
        refused.code = code if isinstance(code, int) else 0
        raise refused
    return message


def _reason(exc: BaseException) -> str:
    if isinstance(exc, trio.TooSlowError):
        return f"no answer in {ATTEMPT_S:g} s"
    return str(exc) or str(exc.__cause__ or type(exc).__name__)  # trio's own errors have a cause that tells


def _coded(raw: bytes) -> str:
    return b64encode(raw).decode()


def _decoded(pair: Message, name: str) -> bytes:
    """The decoded bytes of a field; empty if it is not base64."""
    try:
        return b64decode(str(pair.get(name, "")))
    except ValueError:
        return b""


def _parts(message: Message, name: str) -> list[Message]:
    parts = message.get(name)
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _number(message: Message, name: str) -> int:
    """A number of a message: 64-bit numbers are strings, and a missing one is zero."""
    try:
        return int(message.get(name, 0))
    except (TypeError, ValueError, OverflowError):  # OverflowError: 1e999 is infinite
        return 0

"""The client of etcd against servers that are none: silence, rubbish, broken replies. Scripted streams, trio's clock."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import h11
import pytest
import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cachefs.peers import etcd
from cachefs.peers.etcd import ATTEMPT_S, BROKEN, EtcdRefused, EtcdUnavailable, Gateway, Registry
from cachefs.peers.membership import Membership
from cachefs.peers.settings import Endpoint
from cachefs.peers.wire import VERSION, Address, Handshake

HANDSHAKE = Handshake("me", VERSION, "g", "f", 1.0)

Script = Callable[[trio.testing.MemorySendStream | Any], Awaitable[None]]


def in_virtual_time(function: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0))

    run.__name__ = function.__name__
    return run


class Servers:
    """One script per endpoint, run for each connection; the requests that came."""

    def __init__(self, **scripts: Script) -> None:
        self._scripts = scripts
        self.requests: list[tuple[str, str, dict[str, Any], Mapping[str, str]]] = []
        self.connections: list[str] = []

    async def connect(self, host: str, port: int) -> trio.abc.Stream:
        self.connections.append(host)
        if host not in self._scripts:
            raise ConnectionRefusedError("nobody there")
        ours, theirs = trio.testing.memory_stream_pair()
        trio.lowlevel.spawn_system_task(self._serve, host, theirs)
        return ours

    async def _serve(self, host: str, stream: Any) -> None:
        connection = h11.Connection(h11.SERVER)
        request, body = None, b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await stream.receive_some()))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
        assert request is not None
        headers = {name.decode(): value.decode() for name, value in request.headers}
        self.requests.append((host, request.target.decode(), json.loads(body), headers))
        try:
            await self._scripts[host](stream)
        except trio.BrokenResourceError:
            pass
        await stream.aclose()

    def gateway(self, *hosts: str, **more: Any) -> Gateway:
        gateway = Gateway(
            [Endpoint(Address(host, 2379), False) for host in hosts],
            connect=self.connect,
            **more,
        )
        gateway.endpoints.sort(key=lambda endpoint: endpoint.address)  # so that tests know who is first
        return gateway


def reply(*messages: object, status: int = 200) -> Script:
    lines = [message if isinstance(message, bytes) else json.dumps(message).encode() for message in messages]
    return raw(b"HTTP/1.1 %d x\r\nConnection: close\r\n\r\n" % status + b"\n".join(lines))


def raw(said: bytes) -> Script:
    async def script(stream: Any) -> None:
        await stream.send_all(said)

    return script


async def silence(stream: Any) -> None:
    await trio.sleep_forever()


async def endless(stream: Any) -> None:
    await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        await stream.send_all(b"x" * 65536)


async def endless_head(stream: Any) -> None:
    await stream.send_all(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        await stream.send_all(b"x" * 65536)


@pytest.mark.parametrize(
    "bad",
    [
        silence,
        endless,
        endless_head,
        raw(b""),
        raw(b"\x15\x03\x01"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
        raw(b"HTTP/1.1 200 OK\r\n\r\n"),
        reply(b"<html>", status=502),
        reply(b"[1]"),
        reply(b"[" * 100_000),
        reply({"error": "no leader", "code": 14, "message": "etcdserver: no leader"}, status=503),
        reply({"error": {"grpc_code": 14, "message": "etcdserver: no leader"}}),
        None,
    ],
)
def test_a_bad_endpoint_is_left_for_the_next_and_then_asked_last(
    bad: Script | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "MAX_MESSAGE_BYTES", 1 << 20)
    servers = Servers(**({"a": bad} if bad else {}), b=reply({"n": "1"}))

    @in_virtual_time
    async def run() -> None:
        gateway = servers.gateway("a", "b")
        with trio.fail_after(ATTEMPT_S + 0.1):
            assert await gateway.call("/v3/x", {}) == {"n": "1"}
        await gateway.call("/v3/x", {})

    run()
    assert servers.connections == ["a", "b", "b"]


@in_virtual_time
async def test_when_none_answers_the_reason_names_each() -> None:
    gateway = Servers(a=silence, b=reply(b"<html>", status=502)).gateway("a", "b", "c")
    with trio.fail_after(3 * ATTEMPT_S), pytest.raises(EtcdUnavailable) as failed:
        await gateway.call("/v3/x", {})
    assert "http://a:2379: no answer in 2 s" in str(failed.value)
    assert "http://b:2379: HTTP 502" in str(failed.value)
    assert "http://c:2379: nobody there" in str(failed.value)


@in_virtual_time
async def test_a_refusal_is_final_and_not_asked_elsewhere() -> None:
    servers = Servers(
        a=reply({"error": "x", "code": 7, "message": "permission denied"}, status=403), b=silence
    )
    with pytest.raises(EtcdRefused, match="permission denied"):
        await servers.gateway("a", "b").call("/v3/x", {})
    assert servers.connections == ["a"]


@in_virtual_time
async def test_the_first_message_of_a_stream_in_any_pieces() -> None:
    async def script(stream: Any) -> None:
        said = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n4\r\n1}\n{\r\n'
        for index in range(len(said)):
            await stream.send_all(said[index : index + 1])
        await trio.sleep_forever()

    assert await Servers(a=script).gateway("a").call("/v3/lease/keepalive", {}) == {"a": 1}


@in_virtual_time
async def test_a_token_is_asked_for_once_and_again_when_it_is_refused() -> None:
    tokens = iter(["first", "second"])
    expired: set[str] = set()

    async def script(stream: Any) -> None:
        _, path, body, headers = servers.requests[-1]
        if path == "/v3/auth/authenticate":
            assert body == {"name": "u", "password": "p"} and "authorization" not in headers
            await reply({"token": next(tokens)})(stream)
        elif headers["authorization"] in expired:
            await reply({"code": 16, "message": "etcdserver: invalid auth token"}, status=401)(stream)
        else:
            await reply({"ok": headers["authorization"]})(stream)

    servers = Servers(a=script)
    gateway = servers.gateway("a", user="u", password="p")
    assert [await gateway.call("/v3/x", {}) for _ in range(2)] == [{"ok": "first"}] * 2
    expired.add("first")
    assert await gateway.call("/v3/x", {}) == {"ok": "second"}
    assert len(servers.requests) == 6


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("L2NhY2hlZnMvZy9oOjE="),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["result", "header", "revision", "kvs", "count", "key", "value", "mod_revision"])
            | st.sampled_from(["TTL", "ID", "error"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=15,
)


@settings(deadline=None)
@example({"kvs": [{"key": "L2NhY2hlZnMvZy9oOjE="}]})
@example({"result": {"TTL": "9"}, "ID": "7"})
@example({"count": float("inf")})
@given(
    message=st.dictionaries(
        st.sampled_from(["result", "header", "kvs", "count", "ID", "error"]), JSON, max_size=4
    )
)
def test_whatever_an_endpoint_says_a_registry_goes_on(message: dict[str, Any]) -> None:
    """Wrong types everywhere: each poll ends in a pause, never in an exception."""
    servers = Servers(a=reply(message))

    @in_virtual_time
    async def run() -> None:
        registry = Registry(servers.gateway("a"), "/cachefs", HANDSHAKE, Address("h", 1))
        membership = Membership(registry, HANDSHAKE)
        with trio.move_on_after(20):
            await membership.run()

    run()
    assert 2 <= len(servers.requests) < 100


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_whatever_bytes_come(said: bytes) -> None:
    @in_virtual_time
    async def run() -> None:
        gateway = Servers(a=raw(said)).gateway("a")
        with pytest.raises((EtcdUnavailable, EtcdRefused)):
            await gateway.call("/v3/x", {})

    run()


def test_broken_are_all_that_connections_raise() -> None:
    for kind in (
        ConnectionResetError,
        trio.BrokenResourceError,
        h11.RemoteProtocolError,
        h11.LocalProtocolError,
    ):
        assert issubclass(kind, BROKEN)


@in_virtual_time
async def test_the_system_s_authorities_are_read_once() -> None:
    contexts: list[ssl.SSLContext] = []

    def read() -> ssl.SSLContext:
        contexts.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return contexts[-1]

    async def connect(host: str, port: int) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        await theirs.aclose()
        return ours

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", read)
        gateway = Gateway([Endpoint(Address("a", 2379), True)], connect=connect)
        for _ in range(3):
            with pytest.raises(EtcdUnavailable):
                await gateway.call("/v3/kv/range", {})
    assert len(contexts) == 1


def test_a_resolver_that_hangs_takes_no_thread_of_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trio's forty threads, in which the names are written, too."""
    over, asked = threading.Event(), list[str]()

    def hangs(
        host: str, port: int, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[Any]:
        if flags & socket.AI_NUMERICHOST:  # trio looks so at first whether it is a name, without a thread
            raise socket.gaierror(socket.EAI_NONAME, "a name")
        asked.append(host)
        over.wait(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    monkeypatch.setattr(etcd, "ATTEMPT_S", 0.05)

    async def main() -> int:
        gateway = Gateway([Endpoint(Address("etcd.test", 2379), False)])
        for _ in range(3):
            with pytest.raises(EtcdUnavailable):
                await gateway.call("/v3/x", {})
        taken: int = trio.to_thread.current_default_thread_limiter().borrowed_tokens
        over.set()
        return taken

    assert trio.run(main) == 0
    assert asked == ["etcd.test"] * 3


@in_virtual_time
async def test_a_name_with_several_addresses_is_reached_at_the_one_that_accepts() -> None:
    tried: list[str] = []

    async def connect(ip: str, port: int) -> Any:
        tried.append(ip)
        if ip == "10.0.0.1":
            await trio.sleep_forever()
        if ip == "10.0.0.2":
            raise ConnectionRefusedError
        return "a stream"

    async def resolve(host: str, port: int) -> list[str]:
        return ["10.0.0.1", "10.0.0.2", "10.0.0.3"]

    gateway = Gateway([Endpoint(Address("etcd.test", 2379), False)])
    gateway.resolve = resolve  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio, "open_tcp_stream", connect)
        assert await gateway._connect("etcd.test", 2379) == "a stream"
    assert tried == ["10.0.0.1", "10.0.0.2", "10.0.0.3"] and trio.current_time() < ATTEMPT_S / 2

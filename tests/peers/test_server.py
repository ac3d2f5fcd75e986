"""What strangers and clumsy clients can do to a server: nothing but lose their connection."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import h11
import pytest
import trio
import trio.testing
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachefs.base import tasks
from cachefs.base.http1 import MAX_HEAD_BYTES
from cachefs.peers import server as serving_module
from cachefs.peers.auth import Signer, Verifier
from cachefs.peers.client import Client
from cachefs.peers.health import MAX_PEERS, PeerTable
from cachefs.peers.wire import BLOCKS, Address, Busy
from tests.conftest import examples
from tests.peers.exchange import (
    HANDSHAKE as NODE,
)
from tests.peers.exchange import (
    KEY,
    KIB,
    MIB,
    Kept,
    PlanStore,
    asking,
    content,
    in_jumping_time,
    in_trio,
    serving,
    until,
)

LINE = b"GET /v1/handshake HTTP/1.1\r\n"
GOOD = LINE + b"Host: a\r\n\r\n"


async def said(address: Address, request: bytes) -> bytes:
    """What the server says until it closes the connection."""
    received = bytearray()
    async with await trio.open_tcp_stream(address.host, address.port) as stream:
        try:
            await stream.send_all(request)
            async for part in stream:
                received += part
        except trio.BrokenResourceError:
            pass
    return bytes(received)


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


BAD = {
    "not http": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "another version": (b"GET /v1/handshake HTTP/3\r\n\r\n", 400),
    "a body": (LINE + b"Host: a\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello", 400),
    "a body to come": (LINE + b"Host: a\r\nContent-Length: 5\r\n\r\n", 400),
    "chunks": (LINE + b"Host: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 400),
    "no host": (LINE + b"\r\n", 400),
    "another method": (b"POST /v1/handshake HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 405),
    "another path": (b"GET /etc/passwd HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 400),
    "another query": (
        b"GET /v1/blocks?path=/etc/passwd HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        400,
    ),
    "many headers": (
        LINE
        + b"Host: a\r\nConnection: close\r\n"
        + b"".join(b"x%d: y\r\n" % i for i in range(140))
        + b"\r\n",
        431,
    ),
    "a long target": (b"GET /" + b"x" * 15_000 + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 400),
}


@pytest.mark.parametrize("what", BAD)
@in_jumping_time
async def test_what_is_no_request_gets_a_refusal(what: str) -> None:
    request, status = BAD[what]
    plan_store = PlanStore()
    async with serving(plan_store) as (address, counted):
        assert status_of(await said(address, request)) == status
        assert status_of(await said(address, GOOD)) == 200
        assert counted.peer_turned_away == 1
    assert plan_store.opened == 0


@in_jumping_time
async def test_a_head_without_end_is_cut_off() -> None:
    async with serving(PlanStore()) as (address, _):
        reply = await said(address, LINE + b"x: " + b"y" * (MAX_HEAD_BYTES + 100))
        assert not reply or status_of(reply) == 431


@in_jumping_time
async def test_a_head_that_comes_too_slowly_is_not_waited_for() -> None:
    async with serving(PlanStore()) as (address, _):
        async with await trio.open_tcp_stream(*address) as stream:
            begun = trio.current_time()
            try:
                for byte in GOOD * 10:
                    await stream.send_all(bytes([byte]))
                    await trio.sleep(1)
            except trio.BrokenResourceError:
                pass
            assert trio.current_time() - begun < 10
        begun = trio.current_time()
        assert status_of(await said(address, GOOD)) == 200
        assert 59 < trio.current_time() - begun < 70


@in_jumping_time
async def test_an_unused_connection_is_closed_without_a_warning_after_a_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan_store = PlanStore()
    version = plan_store.put(content(MIB))
    plan_store.held_back, plan_store.failure_in_body = 0, Busy("no tier takes it now")
    async with serving(plan_store) as (address, _):
        request = f"GET {asking(version).target(BLOCKS)} HTTP/1.1\r\nHost: a\r\n\r\n"
        reply = await said(address, request.encode())
        assert status_of(reply.partition(b"\r\n\r\n")[2]) == 503, "after a sign of life"
    assert not caplog.records


@in_jumping_time
async def test_a_stranger_holds_a_connection_for_seconds() -> None:
    async with serving(PlanStore(), verifier=Verifier(KEY)) as (address, _):
        for request, status in ((b"", None), (GOOD, 401)):
            begun = trio.current_time()
            reply = await said(address, request)
            assert (status_of(reply) if reply else None) == status
            assert trio.current_time() - begun < 20
        signed, _ = Signer(KEY).sign("/v1/handshake", str(address))
        request = f"GET /v1/handshake HTTP/1.1\r\nHost: {address}\r\nAuthorization: {signed}\r\n\r\n"
        begun = trio.current_time()
        assert status_of(await said(address, request.encode())) == 200
        assert 59 < trio.current_time() - begun < 70


@in_jumping_time
async def test_many_requests_on_one_connection_each_get_their_time() -> None:
    async with serving(PlanStore()) as (address, _), await trio.open_tcp_stream(*address) as stream:
        for _ in range(5):
            await stream.send_all(GOOD)
            received = b""
            while NODE.pack() not in received:
                received += await stream.receive_some()
            await trio.sleep(20)


@in_jumping_time
async def test_connections_are_bounded_for_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "CONNECTIONS_PER_HOST", 3)
    async with serving(PlanStore()) as (address, _):
        streams = [await trio.open_tcp_stream(*address) for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert await said(address, GOOD) == b""
        await streams.pop().aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        async with await trio.open_tcp_stream(*address) as stream:
            await stream.send_all(GOOD)
            assert status_of(await stream.receive_some()) == 200
        for stream in streams:
            await stream.aclose()


@pytest.mark.parametrize("in_bits", [False, True])
@in_jumping_time
async def test_who_does_not_take_a_reply_loses_it(in_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing taken for ten seconds, or so little at a time that two minutes are not enough."""
    monkeypatch.setattr(serving_module, "PATIENCE_S", 0.0)  # of a thread, whose time does not jump
    plan_store = PlanStore()
    version = plan_store.put(content(16 * MIB))
    target = asking(version).target(BLOCKS)
    async with serving(plan_store, send_buffer=64 * KIB) as (address, counted):
        sock = trio.socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
        await sock.connect(address)
        stream = trio.SocketStream(sock)
        begun = trio.current_time()
        await stream.send_all(f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        while in_bits and not plan_store.closed:
            try:
                await stream.receive_some(64 * KIB)
            except trio.BrokenResourceError:
                break
            await trio.sleep(2)
        while not plan_store.closed:  # noqa: ASYNC110
            await trio.sleep(1)
        waited_s = trio.current_time() - begun
        assert 119 < waited_s < 130 if in_bits else 9 < waited_s < 15
        assert counted.peer_bytes_out < 16 * MIB and counted.peer_served == 0
        await stream.aclose()


@in_trio
async def test_who_takes_nothing_holds_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "THREADS", 1)
    plan_store, client, sink = PlanStore(), Client(), Kept()
    data = content(16 * MIB)
    version = plan_store.put(data)
    target = asking(version).target(BLOCKS)
    async with serving(plan_store, send_buffer=64 * KIB) as (address, counted):
        stuck = [await trio.open_tcp_stream(*address) for _ in range(3)]
        for stream in stuck:
            await stream.send_all(f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            assert status_of(await stream.receive_some(100)) == 200
        await client.read(address, asking(version), sink, deadline_s=5)
        assert sink.data == data
        assert counted.peer_served <= 1
        for stream in stuck:
            await stream.aclose()
    client.close()


@in_trio
async def test_a_little_reply_that_is_taken_in_bits_comes_whole() -> None:
    """Head, block and check are one call, which takes what there is room for."""
    plan_store, client, sink = PlanStore(), Client(), Kept()
    data = content(100 * KIB)
    version = plan_store.put(data)
    async with serving(plan_store, send_buffer=4 * KIB) as (address, counted):
        for _ in range(3):
            await client.read(address, asking(version), sink, deadline_s=20)
        assert sink.data == 3 * data and counted.peer_served == 3
    client.close()


@in_trio
async def test_who_hangs_up_within_a_body_leaves_nothing_behind() -> None:
    plan_store = PlanStore()
    version = plan_store.put(content(16 * MIB))
    target = asking(version).target(BLOCKS)
    async with serving(plan_store) as (address, counted):
        async with await trio.open_tcp_stream(*address) as stream:
            await stream.send_all(f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            assert await stream.receive_some(1000)
        await until(lambda: plan_store.closed == 1)
        assert counted.peer_served == 0


@in_trio
async def test_a_body_is_what_the_protocol_says() -> None:
    """Read by hand, so that client and server cannot agree on something else."""
    plan_store = PlanStore()
    data = content(MIB + 3)
    version = plan_store.put(data)
    target = asking(version).target(BLOCKS)
    request = f"GET {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
    expected = b"".join(
        block + struct.pack(">Q", xxhash.xxh3_64_intdigest(block)) for block in (data[:MIB], data[MIB:])
    )
    async with serving(plan_store) as (address, _):
        head, _, body = (await said(address, request)).partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(expected) in head.lower()
        assert body == expected


@in_trio
async def test_a_signed_request_that_is_played_again_gets_nothing() -> None:
    plan_store = PlanStore()
    version = plan_store.put(content(5))
    signer = Signer(KEY)
    target = asking(version).target(BLOCKS)
    async with serving(plan_store, verifier=Verifier(KEY)) as (address, _):
        signed, _ = signer.sign(target, str(address))
        request = (
            f"GET {target} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
            f"Authorization: {signed}\r\n\r\n"
        ).encode()
        assert status_of(await said(address, request)) == 200
        assert status_of(await said(address, request)) == 401
        assert status_of(await said(address, request.replace(b"stop=1", b"stop=2"))) == 401
    assert plan_store.opened == 1


@in_trio
async def test_a_fault_of_ours_costs_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    plan_store = PlanStore()
    version = plan_store.put(content(100 * KIB))

    def broken(request: object, peer: str, background: bool = False) -> None:
        raise ZeroDivisionError

    good, plan_store.open = plan_store.open, broken  # type: ignore[method-assign, assignment]
    client, sink = Client(), Kept()
    async with serving(plan_store) as (address, _):
        with pytest.raises(Exception, match="hung up"):
            await client.read(address, asking(version), sink, deadline_s=5)
        assert "ZeroDivisionError" in caplog.text
        plan_store.open = good  # type: ignore[method-assign]
        await client.read(address, asking(version), sink, deadline_s=5)
    client.close()


@in_trio
async def test_a_file_that_became_shorter_breaks_the_reply_off() -> None:
    plan_store = PlanStore()
    version = plan_store.put(content(100 * KIB))
    os.truncate(plan_store.files[version][0], 1000)
    client, sink = Client(), Kept()
    async with serving(plan_store) as (address, _):
        for plan_store.in_ram in (True, False):
            with pytest.raises(Exception, match="hung up"):
                await client.read(address, asking(version), sink, deadline_s=5)
    assert not sink.parts
    client.close()


WORDS = st.sampled_from(
    [
        GOOD,
        LINE,
        b"GET ",
        b" HTTP/1.1",
        b"\r\n",
        b"\r\n\r\n",
        b"Host: a\r\n",
        b"Content-Length: 3\r\n",
        b"Content-Length: -1\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: close\r\n",
        b"Upgrade: h2c\r\n",
        b"Expect: 100-continue\r\n",
        b"Authorization: Cachefs-HMAC-SHA256 1 00 00\r\n",
        b"/v1/blocks?source=s&key=k&etag=e&size=5&block=1048576&start=0&stop=1",
        b"/v1/have?source=s&key=k&etag=e&size=5&block=1048576&start=0&stop=1",
        b"\0",
        b"\xff" * 100,
        b"x" * 5000,
    ]
)
TALK = st.lists(st.one_of(WORDS, st.binary(max_size=50)), max_size=12)


@pytest.mark.parametrize("keyed", [False, True])
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(talk=TALK)
def test_whatever_is_said_the_server_goes_on(keyed: bool, talk: list[bytes]) -> None:
    async def main() -> None:
        plan_store = PlanStore()
        async with serving(plan_store, verifier=Verifier(KEY) if keyed else None) as (address, _):
            async with await trio.open_tcp_stream(*address) as stream:
                try:
                    for part in talk:
                        if part:
                            await stream.send_all(part)
                    await stream.send_eof()
                    received = b""
                    async for part in stream:
                        received += part
                except trio.BrokenResourceError:
                    return
            replies_are_http(received)
            assert status_of(
                await said(address, GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            ) == (401 if keyed else 200)

    with trio_logs_nothing():
        trio.run(main)


def replies_are_http(received: bytes) -> None:
    parser = h11.Connection(h11.CLIENT)
    while received:
        parser.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(received)
        event = parser.next_event()
        assert isinstance(event, h11.Response)
        while not isinstance(event, h11.EndOfMessage):
            event = parser.next_event()
            assert isinstance(event, h11.Data | h11.EndOfMessage)
        received = parser.trailing_data[0]
        if parser.their_state is not h11.DONE:
            assert not received
        parser = h11.Connection(h11.CLIENT)


@contextmanager
def trio_logs_nothing() -> Iterator[None]:
    """A traceback in the log of the server's task fails the test."""

    def fail(*args: object, **how: object) -> None:
        raise AssertionError(args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.log, "exception", fail)
        yield


def test_counters_are_bounded() -> None:
    table = PeerTable()
    for i in range(2 * MAX_PEERS):  # of nodes that came and went
        table.of(f"10.0.{i}").requests += 1
        table.of("10.1.1").requests += 1
    counted = table.rows
    assert len(counted) == MAX_PEERS
    assert counted["10.1.1"].requests == 2 * MAX_PEERS and counted[f"10.0.{i}"].requests == 1

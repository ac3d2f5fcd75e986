"""Peers that lie, stall, break off or talk without end: each is a failure of a kind, and nothing wrong reaches a sink."""

from __future__ import annotations

import struct
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
import trio
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachefs.base.names import ObjectId
from cachefs.peers.auth import Signer
from cachefs.peers.client import RESOLVERS, Client
from cachefs.peers.health import ALWAYS_ALLOWED_S
from cachefs.peers.wire import Address, Kind, PeerFailed
from tests.conftest import examples
from tests.peers.exchange import (
    KEY,
    KIB,
    MIB,
    Kept,
    asking,
    content,
    in_jumping_time,
    in_trio,
    scripted,
    until,
)

DATA = content(100 * KIB)
LONG = content(3 * MIB)
VERSION = ObjectId("s3://bucket", "key", '"etag"', len(DATA))
LONG_VERSION = ObjectId("s3://bucket", "long", '"etag"', len(LONG))


def body(data: bytes) -> bytes:
    blocks = [data[at : at + MIB] for at in range(0, len(data), MIB)]
    return b"".join(block + struct.pack(">Q", xxhash.xxh3_64_intdigest(block)) for block in blocks)


def reply(
    content: bytes, *, length: int | None = None, status: bytes = b"200 OK", more: bytes = b""
) -> bytes:
    length = len(content) if length is None else length
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n" % (status, length, more) + content


GOOD = reply(body(DATA))
FLIPPED = bytearray(body(DATA))
FLIPPED[5000] ^= 1

LIES: dict[str, tuple[bytes, Kind]] = {
    "one bit": (reply(bytes(FLIPPED)), "corrupt"),
    "another checksum": (reply(body(DATA)[:-1] + b"\0"), "corrupt"),
    "another object": (reply(body(content(100 * KIB, seed=1))[:-8] + body(DATA)[-8:]), "corrupt"),
    "a short length": (reply(body(DATA)[:-1]), "corrupt"),
    "a long length": (reply(body(DATA) + b"x"), "corrupt"),
    "an enormous length": (reply(b"", length=10**18), "corrupt"),
    "half of the body": (GOOD[:50_000], "reset"),
    "half of the head": (GOOD[:20], "reset"),
    "nothing": (b"", "reset"),
    "no http": (b"SSH-2.0-OpenSSH_9.2\r\n", "refused"),
    "no length": (b"HTTP/1.1 200 OK\r\n\r\n" + body(DATA), "refused"),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "refused"),
    "two lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "refused"),
    "a negative length": (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "refused"),
    "headers without end": (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10_000, "refused"),
    "one endless header": (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000, "refused"),
    "only a promise": (b"HTTP/1.1 102 Processing\r\n\r\n", "reset"),
    "a redirection": (reply(b"", status=b"307 Elsewhere", more=b"Location: http://a/\r\n"), "refused"),
    "a long refusal": (reply(b"x" * 100_000, status=b"404 Not Found"), "corrupt"),
    "a strange wait": (reply(b"", status=b"503 Busy", more=b"Retry-After: Tue, 1 Jan\r\n"), "busy"),
    "an endless wait": (reply(b"", status=b"503 Busy", more=b"Retry-After: 99999999\r\n"), "busy"),
}


def saying(what: bytes) -> Callable[[trio.SocketStream, bytes], Awaitable[None]]:
    async def script(stream: trio.SocketStream, head: bytes) -> None:
        await stream.send_all(what)

    return script


@pytest.mark.parametrize("lie", LIES)
@in_trio
async def test_a_lie_is_a_failure_and_reaches_no_sink(lie: str) -> None:
    what, kind = LIES[lie]
    client, sink = Client(), Kept()
    async with scripted(saying(what)) as address:
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(VERSION), sink, deadline_s=5)
        assert caught.value.kind == kind
        assert caught.value.delivered == 0 and not sink.parts
        assert "\n" not in str(caught.value)
        assert address not in client._peers or kind in ("busy", "refused")
    client.close()


@in_trio
async def test_blocks_before_the_lie_are_delivered_and_counted() -> None:
    wrong = bytearray(body(LONG))
    wrong[2 * MIB + 1000] ^= 1
    for what, kind in ((bytes(wrong), "corrupt"), (bytes(wrong)[: 2 * MIB + 500], "reset")):
        client, sink = Client(), Kept()
        async with scripted(saying(reply(what, length=len(wrong)))) as address:
            with pytest.raises(PeerFailed) as caught:
                await client.read(address, asking(LONG_VERSION), sink, deadline_s=5)
        assert caught.value.kind == kind
        assert caught.value.delivered == len(sink.data) == 2 * MIB and sink.data == LONG[: 2 * MIB]
        client.close()


@in_trio
async def test_what_follows_a_reply_is_not_taken_for_the_next() -> None:
    client, sink = Client(), Kept()
    async with scripted(saying(GOOD + GOOD)) as address:
        for _ in range(2):
            await client.read(address, asking(VERSION), sink, deadline_s=5)
        assert sink.data == DATA + DATA
    client.close()


@pytest.mark.parametrize("sent", [0, 20, 2000])
@in_jumping_time
async def test_silence_is_waited_for_as_long_as_was_said(sent: int) -> None:
    async def script(stream: trio.SocketStream, head: bytes) -> None:
        await stream.send_all(GOOD[:sent])
        await trio.sleep(1000)

    client, sink = Client(), Kept()
    async with scripted(script) as address:
        begun = trio.current_time()
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(VERSION), sink, deadline_s=3, sink_waits=False)
        assert caught.value.kind == "timeout"
        assert 2.9 < trio.current_time() - begun < 3.5
    client.close()


@in_jumping_time
async def test_a_head_in_drops_is_waited_for_no_longer_than_a_head_in_silence() -> None:
    async def script(stream: trio.SocketStream, head: bytes) -> None:
        for byte in GOOD:
            await stream.send_all(bytes([byte]))
            await trio.sleep(1)

    client = Client()
    async with scripted(script) as address:
        begun = trio.current_time()
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(VERSION), Kept(), deadline_s=3, sink_waits=False)
        assert caught.value.kind == "timeout"
        assert trio.current_time() - begun < 5
    client.close()


@in_jumping_time
async def test_a_body_in_drops_is_given_up_long_before_its_deadline() -> None:
    async def script(stream: trio.SocketStream, head: bytes) -> None:
        await stream.send_all(GOOD[:1000])
        for at in range(1000, len(GOOD)):
            await stream.send_all(GOOD[at : at + 1])
            await trio.sleep(1)

    client = Client()
    async with scripted(script) as address:
        begun = trio.current_time()
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(VERSION), Kept(), deadline_s=3, sink_waits=False)
        assert caught.value.kind == "slow"
        assert trio.current_time() - begun < ALWAYS_ALLOWED_S + 1
    client.close()


@pytest.mark.long
@in_trio
async def test_silence_in_a_long_body_ends_it_too() -> None:
    """In a worker thread, so on the real clock."""

    async def script(stream: trio.SocketStream, head: bytes) -> None:
        await stream.send_all(reply(body(LONG)[: MIB + 100], length=len(body(LONG))))
        await trio.sleep_forever()

    client, sink = Client(), Kept()
    async with scripted(script) as address:
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(LONG_VERSION), sink, deadline_s=0.1)
        assert caught.value.kind in ("timeout", "slow") and caught.value.delivered == MIB
    client.close()


@pytest.mark.parametrize("cuts", [(), (1,), (MIB - 1,), (300 * KIB, 700 * KIB, 800 * KIB)])
@in_trio
async def test_a_long_body_in_spurts_comes_block_by_block(cuts: tuple[int, ...]) -> None:
    """The next block is not sent before the last one was delivered: whoever waits for more of it would wait for ever."""
    whole, block = body(LONG), MIB + 8

    async def script(stream: trio.SocketStream, head: bytes) -> None:
        await stream.send_all(reply(b"", length=len(whole)))
        for count in range(3):
            await until(lambda count=count: len(sink.parts) == count)
            for begin, end in pairwise([0, *cuts, block]):
                await stream.send_all(whole[count * block :][begin:end])
                await trio.sleep(0.01)
        await trio.sleep_forever()

    client, sink = Client(), Kept()
    async with scripted(script) as address:
        await client.read(address, asking(LONG_VERSION), sink, deadline_s=20)
        assert sink.data == LONG
    client.close()


@in_trio
async def test_names_that_are_not_resolved_in_time_are_not_waited_for_and_take_few_threads() -> None:
    answers, asked = threading.Event(), []

    def getaddrinfo(name: str, *_: object, **__: object) -> list[Any]:
        asked.append(name)
        answers.wait(20)
        return []

    client = Client(getaddrinfo=getaddrinfo)
    others = trio.to_thread.current_default_thread_limiter()
    try:
        for number in range(RESOLVERS + 3):
            with trio.fail_after(2), pytest.raises(PeerFailed) as caught:
                await client.read(
                    Address(f"node-{number}.cluster", 7000), asking(VERSION), Kept(), deadline_s=5
                )
            assert caught.value.kind == "connect"
        assert len(asked) == RESOLVERS and not others.borrowed_tokens
    finally:
        answers.set()


@in_trio
async def test_all_addresses_of_a_name_are_tried() -> None:
    def getaddrinfo(name: str, port: object, **_: object) -> list[Any]:
        return [(0, 0, 0, "", ("127.0.0.2", 0)), (0, 0, 0, "", ("127.0.0.1", 0))]

    client, sink = Client(getaddrinfo=getaddrinfo), Kept()
    async with scripted(saying(GOOD)) as address:
        for _ in range(2):
            await client.read(Address("node-1", address.port), asking(VERSION), sink, deadline_s=5)
    assert sink.data == DATA + DATA
    client.close()


@in_trio
async def test_without_a_key_nobody_beyond_this_machine_is_believed() -> None:
    def getaddrinfo(*_: object, **__: object) -> list[Any]:
        return [(0, 0, 0, "", ("192.0.2.1", 0))]

    client = Client(getaddrinfo=getaddrinfo)
    for host in ("192.0.2.1", "node-1", "2001:db8::1"):
        with pytest.raises(PeerFailed) as caught:
            await client.read(Address(host, 7000), asking(VERSION), Kept(), deadline_s=5)
        assert caught.value.kind == "refused"
        with pytest.raises(PeerFailed, match="without a key"):
            await client.handshake(Address(host, 7000))
    keyed = Client(signer=Signer(KEY))
    with pytest.raises(PeerFailed) as caught:
        await keyed.read(Address("192.0.2.1", 7000), asking(VERSION), Kept(), deadline_s=5)
    assert caught.value.kind == "connect"


@in_trio
async def test_a_reset_within_a_body() -> None:
    async def script(stream: trio.SocketStream, head: bytes) -> None:
        await stream.send_all(reply(body(LONG)[:MIB], length=len(body(LONG))))
        stream.socket.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER 0: close() resets
        stream.socket.close()

    client, sink = Client(), Kept()
    async with scripted(script) as address:
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(LONG_VERSION), sink, deadline_s=5)
        assert caught.value.kind == "reset"
    client.close()


@in_trio
async def test_an_old_answer_is_not_believed() -> None:
    """What the owner once said to us, under the key, is played to us again."""
    from cachefs.peers.auth import Verifier
    from tests.peers.exchange import PlanStore, serving

    plan_store = PlanStore()
    version = plan_store.put(DATA)
    heard: list[bytes] = []
    client = Client(signer=Signer(KEY))
    async with serving(plan_store, verifier=Verifier(KEY)) as (owner, _):

        async def between(stream: trio.SocketStream, head: bytes) -> None:
            if heard:
                await stream.send_all(heard[0])
                return
            async with await trio.open_tcp_stream(*owner) as through:
                await through.send_all(head)
                received = b""
                while len(received) < len(DATA):
                    received += await through.receive_some()
            heard.append(received)
            await stream.send_all(received)

        async with scripted(between) as address:
            sink = Kept()
            await client.read(address, asking(version), sink, deadline_s=5)
            assert sink.data == DATA
            with pytest.raises(PeerFailed, match="not signed") as caught:
                await client.read(address, asking(version), sink, deadline_s=5)
            assert caught.value.kind == "refused" and sink.data == DATA
            await until(lambda: plan_store.closed == 1)
    client.close()


@in_trio
async def test_a_block_that_is_without_a_mac_is_not_believed() -> None:
    """The head is from somebody with the key, the body from somebody without."""
    seen: list[bytes] = []

    async def script(stream: trio.SocketStream, head: bytes) -> None:
        nonce = bytes.fromhex(head.split(b"Cachefs-HMAC-SHA256 ")[1].split(b" ")[1].decode())
        from cachefs.peers.auth import Macs

        without_mac = body(DATA) + bytes(16)
        mac = Macs(KEY, nonce).reply(200, len(without_mac), b"")
        seen.append(head)
        await stream.send_all(reply(without_mac, more=f"Cachefs-MAC: {mac}\r\n".encode()))

    client, sink = Client(signer=Signer(KEY)), Kept()
    async with scripted(script) as address:
        with pytest.raises(PeerFailed, match="not signed") as caught:
            await client.read(address, asking(VERSION), sink, deadline_s=5)
        assert caught.value.kind == "corrupt" and not sink.parts and seen
    client.close()


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cut=st.integers(0, len(GOOD)),
    at=st.integers(0, 200),
    insert=st.binary(max_size=40),
)
def test_whatever_a_peer_says_is_right_or_a_failure(cut: int, at: int, insert: bytes) -> None:
    what = (GOOD[:at] + insert + GOOD[at + len(insert) :])[:cut]

    async def main() -> None:
        client, sink = Client(), Kept()
        async with scripted(saying(what)) as address:
            try:
                await client.read(address, asking(VERSION), sink, deadline_s=5, sink_waits=False)
            except PeerFailed:
                assert not sink.parts
            else:
                assert sink.data == DATA
            try:
                await client.handshake(address)
            except PeerFailed:
                pass
        client.close()

    with_deadline(main)


def with_deadline(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        with trio.fail_after(20):
            await main()

    trio.run(run)

"""Certificates, real ones: who shows one of the CA is served, and who does not, is not."""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
import trustme

from cachefs.base.errors import ConfigError
from cachefs.peers.auth import Signer, Verifier, check_listen, tls_context
from cachefs.peers.client import Client
from cachefs.peers.wire import Address, PeerFailed
from tests.peers.exchange import (
    HANDSHAKE,
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


class Cluster:
    """A CA and one node's files."""

    def __init__(self, at: Path) -> None:
        at.mkdir()
        ca = trustme.CA()
        node = ca.issue_cert("node-1.cluster")
        self.ca, self.cert, self.key = at / "ca.pem", at / "cert.pem", at / "key.pem"
        ca.cert_pem.write_to_path(self.ca)
        node.private_key_pem.write_to_path(self.key)
        self.cert.write_bytes(b"".join(blob.bytes() for blob in node.cert_chain_pems))

    def server(self) -> ssl.SSLContext:
        return tls_context(ssl.PROTOCOL_TLS_SERVER, self.cert, self.key, self.ca)

    def client(self) -> ssl.SSLContext:
        return tls_context(ssl.PROTOCOL_TLS_CLIENT, self.cert, self.key, self.ca)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "ours")


@pytest.fixture
def strangers(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "theirs")


@pytest.mark.parametrize("in_ram", [True, False])
@pytest.mark.parametrize("keyed", [False, True])
@in_trio
async def test_bytes_arrive_as_they_are(cluster: Cluster, keyed: bool, in_ram: bool) -> None:
    plan_store = PlanStore(in_ram=in_ram)
    client = Client(tls=cluster.client(), signer=Signer(KEY) if keyed else None)
    connections = set()
    async with serving(plan_store, tls=cluster.server(), verifier=Verifier(KEY) if keyed else None) as (
        address,
        _,
    ):
        for size in (1, 100 * KIB, 3 * MIB + 7, 16 * MIB):
            data = content(size, size)
            sink = Kept()
            await client.read(address, asking(plan_store.put(data, f"{size}")), sink, deadline_s=10)
            assert sink.data == data
            connections |= {connection for _, connection in client._peers[address].idle}
        assert len(connections) == 1
        await client.handshake(address)
    client.close()


@in_trio
async def test_whoever_has_no_certificate_of_the_ca_is_not_served(
    cluster: Cluster, strangers: Cluster
) -> None:
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.load_verify_locations(cluster.ca)
    nobody.check_hostname = False
    half = strangers.client()
    half.load_verify_locations(cluster.ca)  # believes our server, but has a certificate of somebody else
    plan_store = PlanStore()
    version = plan_store.put(content(100 * KIB))
    async with serving(plan_store, tls=cluster.server()) as (address, _):
        for context in (nobody, half, None):
            client, sink = Client(tls=context), Kept()
            with pytest.raises(PeerFailed) as caught:
                await client.read(address, asking(version), sink, deadline_s=5)
            assert caught.value.kind in ("refused", "reset") and not sink.parts
            client.close()
    assert plan_store.opened == 0


@in_trio
async def test_a_server_of_another_ca_is_not_believed(cluster: Cluster, strangers: Cluster) -> None:
    plan_store = PlanStore()
    version = plan_store.put(content(100 * KIB))
    client, sink = Client(tls=cluster.client()), Kept()
    async with serving(plan_store, tls=strangers.server()) as (address, _):
        with pytest.raises(PeerFailed, match="TLS") as caught:
            await client.read(address, asking(version), sink, deadline_s=5)
        assert caught.value.kind == "refused"
    async with serving(plan_store) as (address, _):  # one without TLS at all
        with pytest.raises(PeerFailed):
            await client.read(address, asking(version), sink, deadline_s=5)
    assert plan_store.opened == 0
    client.close()


@in_trio
async def test_what_follows_a_reply_in_one_record_is_not_taken_for_the_next(cluster: Cluster) -> None:
    asked = 0

    async def answer(stream: trio.SSLStream[trio.SocketStream]) -> None:
        nonlocal asked
        with suppress(trio.BrokenResourceError):  # the client hangs up without TLS's goodbye
            while await stream.receive_some():
                asked += 1
                said = HANDSHAKE.pack() if asked == 1 else replace(HANDSHAKE, node="another").pack()
                reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said)
                await stream.send_all(reply * 2)

    client = Client(tls=cluster.client())
    async with trio.open_nursery() as nursery:
        listener = (await trio.open_ssl_over_tcp_listeners(0, cluster.server(), host="127.0.0.1"))[0]
        nursery.start_soon(partial(trio.serve_listeners, answer, [listener]))
        address = Address(*listener.transport_listener.socket.getsockname())
        assert [(await client.handshake(address)).node for _ in range(2)] == [HANDSHAKE.node, "another"]
        nursery.cancel_scope.cancel()
    client.close()


@in_trio
async def test_who_gives_up_is_noticed(cluster: Cluster) -> None:
    plan_store = PlanStore()
    plan_store.held_back = 2
    version = plan_store.put(content(8 * MIB))
    client, sink = Client(tls=cluster.client()), Kept()
    async with serving(plan_store, tls=cluster.server()) as (address, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client.read(address, asking(version), sink, deadline_s=20))
            await plan_store.waited_for.wait()
            nursery.cancel_scope.cancel()
        await until(lambda: plan_store.closed == 1)
        assert plan_store.cancelled == 1
    client.close()


@in_trio
async def test_a_listener_that_only_connects_is_not_waited_for(cluster: Cluster) -> None:
    """Connects and never shakes hands."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    from cachefs.peers.wire import Address

    client = Client(tls=cluster.client())
    with pytest.raises(PeerFailed) as caught:
        address = Address("127.0.0.1", listener.socket.getsockname()[1])
        await client.handshake(address, deadline_s=0.1)
    assert caught.value.kind == "timeout"
    await listener.aclose()
    client.close()


@in_jumping_time
async def test_who_connects_and_never_shakes_hands_is_not_waited_for(cluster: Cluster) -> None:
    async with serving(PlanStore(), tls=cluster.server()) as (address, _):
        begun = trio.current_time()
        async with await trio.open_tcp_stream(*address) as stream:
            assert await stream.receive_some() == b""
        assert 4.9 < trio.current_time() - begun < 6


def test_versions_before_1_2_are_not_spoken(cluster: Cluster) -> None:
    for context in (cluster.server(), cluster.client()):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.verify_mode == ssl.CERT_REQUIRED


def test_files_that_cannot_be_used_are_named_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.write_text("")
    for cert, key, ca in (
        (missing, cluster.key, cluster.ca),
        (cluster.cert, missing, cluster.ca),
        (cluster.cert, cluster.key, missing),
        (empty, cluster.key, cluster.ca),
        (cluster.cert, cluster.key, empty),
        (cluster.cert, cluster.ca, cluster.ca),
    ):
        with pytest.raises(ConfigError, match="cannot use") as caught:
            tls_context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca)
        assert "\n" not in str(caught.value)


def test_with_certificates_any_place_may_be_listened_on(cluster: Cluster) -> None:
    check_listen("0.0.0.0", None, cluster.server())

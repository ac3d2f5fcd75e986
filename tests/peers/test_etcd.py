"""Registration and membership with a real etcd of three members, and with one that asks for a password over TLS."""

from __future__ import annotations

import functools
import json
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from cachefs.peers import etcd, membership
from cachefs.peers.etcd import EtcdRefused, EtcdUnavailable, Gateway, Registry, advertised
from cachefs.peers.membership import Membership
from cachefs.peers.wire import VERSION, Address, Handshake
from tests.peers.cluster import Cluster, needs_etcd

pytestmark = needs_etcd

SHORT_LEASE_S = 2

HANDSHAKE = Handshake("n1", VERSION, "g", "f", 1.0)


def within(seconds: float) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """An async test with a watchdog."""

    def decorate(function: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            async def guarded() -> None:
                with trio.fail_after(seconds):
                    await function(*args, **kwargs)

            trio.run(guarded)

        return run

    return decorate


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("etcd"))
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "LEASE_S", SHORT_LEASE_S)
    monkeypatch.setattr(membership, "POLL_S", SHORT_LEASE_S / 5)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Each test its own keys."""
    return f"/{request.node.name}"


class Node:
    """One node's view, and how to wait for it."""

    def __init__(self, cluster: Cluster, prefix: str, number: int, weight: float = 1.0) -> None:
        self.gateway = Gateway(cluster.endpoints)
        self.listen = Address("10.0.0.1", 7000 + number)
        self.name = str(self.listen)
        self.handshake = replace(HANDSHAKE, node=self.name, weight=weight)
        self.registry = Registry(self.gateway, prefix, self.handshake, self.listen)
        self.membership = Membership(self.registry, self.handshake)
        self.membership.on_change = self._changed
        self._change = trio.Event()
        self.changes = 0

    def _changed(self) -> None:
        self.changes += 1
        self._change.set()
        self._change = trio.Event()

    async def sees(self, *nodes: Node) -> None:
        """Wait until these are the members."""
        while set(self.membership.members) != {node.name for node in nodes}:
            await self._change.wait()

    async def next_change(self) -> None:
        await self._change.wait()

    def running(self) -> AbstractAsyncContextManager[trio.CancelScope]:
        return running(self)


@asynccontextmanager
async def running(node: Node) -> Any:
    """As the daemon does it; leaving is a clean stop."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.membership.run)
        yield nursery.cancel_scope
        nursery.cancel_scope.cancel()


def coded(text: str) -> str:
    return b64encode(text.encode()).decode()


async def leases(node: Node) -> list[str]:
    found = await node.gateway.call("/v3/lease/leases", {})
    return [lease["ID"] for lease in found.get("leases", ())]


@within(30)
async def test_joins_and_leaves_are_seen_without_waiting_for_a_lease(
    cluster: Cluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "LEASE_S", 600)
    first, second = Node(cluster, prefix, 1), Node(cluster, prefix, 2, weight=3.0)
    async with first.running():
        await first.sees(first)
        assert first.membership.own == {first.name}
        async with second.running():
            await first.sees(first, second)
            await second.sees(first, second)
            assert first.membership.ring.members == second.membership.ring.members
            assert first.membership.members[second.name].weight == 3.0
        await first.sees(first)


@within(30)
async def test_a_node_without_a_share_is_not_registered(cluster: Cluster, prefix: str) -> None:
    first, client = Node(cluster, prefix, 1), Node(cluster, prefix, 2, weight=0.0)
    async with first.running(), client.running():
        await client.sees(first)
        await first.sees(first)
        assert len(await leases(first)) == 1


@pytest.mark.long
@within(30)
async def test_who_dies_is_gone_with_its_lease(
    cluster: Cluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead(self: Registry) -> None:
        pass

    first, second = Node(cluster, prefix, 1), Node(cluster, prefix, 2)
    async with first.running():
        async with second.running():
            await first.sees(first, second)
            monkeypatch.setattr(Registry, "leave", dead)
        await first.sees(first)


async def second_sees(cluster: Cluster, prefix: str, *nodes: Node) -> None:
    """Wait until a newcomer without a share sees these."""
    client = Node(cluster, prefix, 9, weight=0.0)
    async with client.running():
        await client.sees(*nodes)


@within(30)
async def test_a_node_whose_lease_was_lost_registers_again(cluster: Cluster, prefix: str) -> None:
    first = Node(cluster, prefix, 1)
    async with first.running():
        await first.sees(first)
        before = await leases(first)
        for lease in before:
            await first.gateway.call("/v3/lease/revoke", {"ID": lease})
        while not (now := await leases(first)) or set(now) & set(before):  # noqa: ASYNC110 - etcd sets no event
            await trio.sleep(0.05)
        await second_sees(cluster, prefix, first)
        assert len(await leases(first)) == 1


@within(30)
async def test_a_key_that_somebody_deleted_or_took_is_placed_again(cluster: Cluster, prefix: str) -> None:
    first = Node(cluster, prefix, 1)
    key = coded(f"{prefix}/g/{first.name}")
    async with first.running():
        await first.sees(first)
        await first.gateway.call("/v3/kv/deleterange", {"key": key})
        await second_sees(cluster, prefix, first)
        other = replace(first.handshake, node="other").pack().decode()
        await first.gateway.call("/v3/kv/put", {"key": key, "value": coded(other)})
        await second_sees(cluster, prefix, first)
        assert first.membership.own


@within(30)
async def test_other_keys_below_the_prefix_are_nobody(cluster: Cluster, prefix: str) -> None:
    first, second = Node(cluster, prefix, 1), Node(cluster, prefix, 2)
    value = first.handshake.pack().decode()
    for key, said in [
        ("10.0.0.9:1", "not a handshake"),
        ("10.0.0.9:2", json.dumps({"node": 1})),
        ("10.0.0.9:3", ""),
        ("no address", value),
        ("deeper/10.0.0.9:4", value),
        ("", value),
    ]:
        await first.gateway.call("/v3/kv/put", {"key": coded(f"{prefix}/g/{key}"), "value": coded(said)})
    for neighbour in (f"{prefix}/g0/10.0.0.9:5", f"{prefix}/g", f"{prefix}/ga/10.0.0.9:6"):
        await first.gateway.call("/v3/kv/put", {"key": coded(neighbour), "value": coded(value)})
    async with first.running():
        await first.sees(first)
        await first.gateway.call(
            "/v3/kv/put", {"key": coded(f"{prefix}/g/10.0.0.9:7"), "value": coded("rubbish while watching")}
        )
        async with second.running():
            await first.sees(first, second)


@within(30)
async def test_a_poll_without_a_change_reads_no_keys(cluster: Cluster, prefix: str) -> None:
    """A node's poll costs etcd a short reply, however many members there are, and every change is noticed."""
    node = Node(cluster, prefix, 0, weight=0.0)
    calls: list[bool] = []
    call = node.gateway.call

    async def counted(path: str, body: Any) -> Any:
        calls.append(body.get("keys_only", False))
        return await call(path, body)

    async def put(number: int, weight: float = 1.0) -> None:
        handshake = replace(HANDSHAKE, node=f"n{number}", weight=weight).pack().decode()
        await call("/v3/kv/put", {"key": key(number), "value": coded(handshake)})

    def key(number: int) -> str:
        return coded(f"{prefix}/g/10.1.0.{number}:7070")

    async def reads() -> int:
        """Readings of all keys by two polls."""
        calls.clear()
        for _ in range(2):
            await node.registry.present()
        assert calls.count(True) == 2
        return calls.count(False)

    node.gateway.call = counted  # type: ignore[method-assign]
    for number in range(3):
        await put(number)
    assert await reads() == 1 and len(list(await node.registry.present() or ())) == 3
    assert await reads() == 0
    await put(1, weight=2.0)
    assert await reads() == 1
    await call("/v3/kv/deleterange", {"key": key(2)})
    assert await reads() == 1
    await call("/v3/kv/deleterange", {"key": key(0)})
    await put(0)
    assert await reads() == 1 and len(list(await node.registry.present() or ())) == 2
    assert await reads() == 0


@within(60)
async def test_the_leader_is_killed(cluster: Cluster, prefix: str) -> None:
    """Nobody is lost, and who comes afterwards is seen."""
    first, second, third = (Node(cluster, prefix, number) for number in (1, 2, 3))
    async with first.running(), second.running():
        await first.sees(first, second)
        await second.sees(first, second)
        leader = await leader_of(cluster, first)
        seen = [first.changes, second.changes]
        cluster.kill(leader)
        try:
            async with third.running():
                await first.sees(first, second, third)
                await second.sees(first, second, third)
                assert [first.changes, second.changes] == [seen[0] + 1, seen[1] + 1]
            await first.sees(first, second)
        finally:
            cluster.start(leader)
            await trio.to_thread.run_sync(cluster.wait_for, leader)


async def leader_of(cluster: Cluster, node: Node) -> int:
    for number, endpoint in enumerate(cluster.endpoints):
        said = await Gateway([endpoint]).call("/v3/maintenance/status", {})
        if said["leader"] == said["header"]["member_id"]:
            return number
    raise AssertionError("no leader")


@pytest.mark.long
@within(90)
async def test_without_etcd_members_stay_and_with_it_nodes_register_again(
    cluster: Cluster, prefix: str
) -> None:
    first, second = Node(cluster, prefix, 1), Node(cluster, prefix, 2)
    async with first.running() as _:
        async with second.running():
            await first.sees(first, second)
            for number in range(3):
                cluster.kill(number)
            try:
                for _ in range(2):
                    with pytest.raises(EtcdUnavailable, match="does not answer"):
                        await first.gateway.call("/v3/kv/range", {"key": coded("x")})
                await trio.sleep(SHORT_LEASE_S + 1)  # every lease would have run out
                assert set(first.membership.members) == {first.name, second.name}
            finally:
                for number in range(3):
                    cluster.start(number)
                for number in range(3):
                    await trio.to_thread.run_sync(cluster.wait_for, number)
            third = Node(cluster, prefix, 3)
            async with third.running():
                await first.sees(first, second, third)
                await third.sees(first, second, third)
        await first.sees(first)


@within(30)
async def test_a_refusal_says_why(cluster: Cluster, prefix: str) -> None:
    node = Node(cluster, prefix, 1)
    with pytest.raises(EtcdRefused, match="lease not found") as refused:
        await node.gateway.call("/v3/lease/revoke", {"ID": "12345"})
    assert refused.value.code == 5
    with pytest.raises((EtcdUnavailable, EtcdRefused), match=r"HTTP 404|Not Found"):  # etcd 3.4, 3.5
        await node.gateway.call("/v3/no/such/call", {})


@within(30)
async def test_a_node_that_listens_everywhere_says_where_it_is_reached(cluster: Cluster, prefix: str) -> None:
    node = Node(cluster, prefix, 1)
    registry = Registry(node.gateway, prefix, node.handshake, Address("0.0.0.0", 7070))
    membership = Membership(registry, node.handshake)
    membership.on_change = node._changed
    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        while membership.own_addresses != {Address("127.0.0.1", 7070)}:
            await node.next_change()
        nursery.cancel_scope.cancel()
    assert advertised(Address("10.0.0.1", 7), Address("127.0.0.1", 1)) == Address("10.0.0.1", 7)


# -- password and TLS --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """One member behind TLS that knows a user, and the certificate to trust."""
    root = tmp_path_factory.mktemp("guarded")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(root / "authority")
    own = authority.issue_cert("127.0.0.1")
    own.private_key_pem.write_to_path(root / "key")
    own.cert_chain_pems[0].write_to_path(root / "cert")
    cluster = Cluster(
        root, 1, ["--cert-file", str(root / "cert"), "--key-file", str(root / "key")], scheme="https"
    )

    async def prepare() -> None:
        gateway = Gateway(cluster.endpoints, tls=ssl.create_default_context(cafile=root / "authority"))
        with trio.fail_after(30):
            while True:
                try:
                    await gateway.call("/v3/auth/user/add", {"name": "root", "password": "secret"})
                    break
                except EtcdUnavailable:
                    await trio.sleep(0.1)
            await gateway.call("/v3/auth/role/add", {"name": "root"})
            await gateway.call("/v3/auth/user/grant", {"user": "root", "role": "root"})
            await gateway.call("/v3/auth/enable", {})

    try:
        trio.run(prepare)
        yield cluster, root / "authority"
    finally:
        cluster.stop()


@within(30)
async def test_members_behind_tls_and_a_password(guarded: tuple[Cluster, Path], prefix: str) -> None:
    cluster, certificate = guarded
    trusting = ssl.create_default_context(cafile=certificate)
    nodes = [Node(cluster, prefix, number) for number in (1, 2)]
    for node in nodes:
        gateway = Gateway(cluster.endpoints, tls=trusting, user="root", password="secret")
        node.gateway = node.registry._gateway = gateway
    first, second = nodes
    async with first.running():
        await first.sees(first)
        first.gateway._token = second.gateway._token = "expired.1"
        async with second.running():
            await first.sees(first, second)
        await first.sees(first)


@within(30)
async def test_a_wrong_password_and_a_certificate_of_nobody(guarded: tuple[Cluster, Path]) -> None:
    cluster, certificate = guarded
    trusting = ssl.create_default_context(cafile=certificate)
    wrong = Gateway(cluster.endpoints, tls=trusting, user="root", password="wrong")
    with pytest.raises(EtcdRefused, match="authentication failed"):
        await wrong.call("/v3/kv/range", {"key": coded("x")})
    without_user = Gateway(cluster.endpoints, tls=trusting)
    with pytest.raises(EtcdRefused, match="user name is empty"):
        await without_user.call("/v3/kv/range", {"key": coded("x")})
    with pytest.raises(EtcdUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await Gateway(cluster.endpoints).call("/v3/kv/range", {"key": coded("x")})

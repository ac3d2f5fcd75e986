"""A client and a server of ours, over real sockets: what arrives, what is refused, and what a broken reply leaves."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio

from cachefs.base.errors import CachefsError, ObjectChanged
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.peers import client as client_module
from cachefs.peers import server as server_module
from cachefs.peers.auth import Key, Signer, Verifier
from cachefs.peers.client import IDLE_S, LITTLE, Client
from cachefs.peers.health import ALWAYS_ALLOWED_S, PeerTable
from cachefs.peers.server import Server
from cachefs.peers.wire import Address, Busy, Kind, NotShared, PeerFailed
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

SIZES = [1, 100 * KIB, LITTLE, LITTLE + 1, MIB, MIB + 1, 5 * MIB + 7, 16 * MIB]


@pytest.mark.parametrize("in_ram", [True, False])
@pytest.mark.parametrize("keyed", [False, True])
@in_trio
async def test_bytes_arrive_as_they_are(keyed: bool, in_ram: bool) -> None:
    plan_store = PlanStore(in_ram=in_ram)
    signer, verifier = (Signer(KEY), Verifier(KEY)) if keyed else (None, None)
    metrics = Metrics()
    client = Client(signer=signer, metrics=metrics)
    stats = PeerTable()
    async with serving(plan_store, verifier=verifier, stats=stats) as (address, counted):
        for size in SIZES:
            data = content(size, size)
            version = plan_store.put(data, f"key-{size}")
            for sink_waits in (True, False):
                sink = Kept()
                await client.read(address, asking(version), sink, deadline_s=5, sink_waits=sink_waits)
                assert sink.data == data
                assert all(len(part) == MIB for part in sink.parts[:-1])
        await until(lambda: counted.peer_served == 2 * len(SIZES))  # the last byte comes before that
        assert counted.peer_bytes_out == 2 * sum(SIZES) == metrics.peer_bytes_in
        assert stats.of("127.0.0.1").bytes_out == counted.peer_bytes_out
        assert counted.peer_served == 2 * len(SIZES) == metrics.peer_requests
        client.close()


@in_trio
async def test_a_part_of_an_object_is_the_blocks_that_were_asked_for() -> None:
    plan_store = PlanStore()
    data = content(20 * MIB + 5)
    version = plan_store.put(data)
    client = Client()
    async with serving(plan_store) as (address, _):
        for start, stop in ((3, 4), (14, 16), (16, 21), (20, 21)):
            sink = Kept()
            await client.read(address, asking(version, start, stop), sink, deadline_s=5)
            assert sink.data == data[start * MIB : stop * MIB]
        client.close()


@in_trio
async def test_one_connection_serves_one_after_the_other_and_many_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_PER_HOST", 16)
    monkeypatch.setattr(server_module, "IN_FLIGHT_PER_HOST", 16)
    plan_store = PlanStore()
    data = content(100 * KIB)
    version = plan_store.put(data)
    client = Client()
    connections = set()
    async with serving(plan_store) as (address, counted):
        kept = client._peers
        for _ in range(20):
            await client.read(address, asking(version), Kept(), deadline_s=5)
            connections |= {connection for _, connection in kept[address].idle}
        assert len(connections) == 1

        async def one() -> None:
            sink = Kept()
            await client.read(address, asking(version), sink, deadline_s=5)
            assert sink.data == data

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(one)
        assert 1 <= len(kept[address].idle) <= 16
        assert counted.peer_turned_away == 0
        client.close()


@in_trio
async def test_blocks_are_delivered_while_later_ones_are_still_on_their_way_to_the_owner() -> None:
    plan_store = PlanStore()
    plan_store.held_back = 2
    data = content(4 * MIB)
    version = plan_store.put(data)
    client = Client()
    sink = Kept()
    async with serving(plan_store) as (address, _), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.read(address, asking(version), sink, deadline_s=5))
        await plan_store.waited_for.wait()
        await until(lambda: len(sink.parts) == 2)
        assert sink.data == data[: 2 * MIB]
        plan_store.more.set()
    assert sink.data == data
    client.close()


REFUSALS: list[tuple[CachefsError, Kind]] = [
    (NotShared("not mine"), "not_here"),
    (ObjectChanged("another version"), "changed"),
    (Busy("not now"), "busy"),
]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize(("failure", "kind"), REFUSALS)
@pytest.mark.parametrize("late", [False, True])
@in_trio
async def test_what_the_owner_says_is_what_the_requester_hears(
    failure: CachefsError, kind: Kind, late: bool, keyed: bool
) -> None:
    """`late`: the owner learns it only while it waits for the first piece."""
    plan_store = PlanStore()
    version = plan_store.put(content(MIB))
    if late:
        plan_store.held_back, plan_store.failure_in_body = 0, failure
    else:
        plan_store.failure = failure
    client = Client(signer=Signer(KEY) if keyed else None)
    async with serving(plan_store, verifier=Verifier(KEY) if keyed else None) as (address, _):
        for _ in range(2):
            with pytest.raises(PeerFailed, match=str(failure)) as caught:
                await client.read(address, asking(version), Kept(), deadline_s=5)
            assert caught.value.kind == kind and caught.value.delivered == 0
        assert len(client._peers[address].idle) == 1  # a refusal costs no connection
        client.close()


@in_trio
async def test_an_owner_that_fails_halfway_breaks_off_and_says_how_far_it_came() -> None:
    plan_store = PlanStore()
    plan_store.held_back, plan_store.failure_in_body = 2, ObjectChanged("replaced meanwhile")
    version = plan_store.put(content(4 * MIB))
    client, sink = Client(), Kept()
    async with serving(plan_store) as (address, _):
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version), sink, deadline_s=5)
    assert caught.value.kind == "reset"
    assert caught.value.delivered == len(sink.data) == 2 * MIB
    client.close()


@in_trio
async def test_a_block_that_is_not_what_its_checksum_says_reaches_no_sink() -> None:
    plan_store = PlanStore()
    plan_store.shift = 1
    client = Client()
    async with serving(plan_store) as (address, _):
        for size in (100 * KIB, 4 * MIB):
            sink = Kept()
            with pytest.raises(PeerFailed) as caught:
                await client.read(address, asking(plan_store.put(content(size))), sink, deadline_s=5)
            assert caught.value.kind == "corrupt" and caught.value.delivered == 0 and not sink.parts
    client.close()


@pytest.mark.parametrize("size", [100 * KIB, 4 * MIB])
@in_trio
async def test_what_a_sink_raises_is_raised_and_ends_the_transfer(size: int) -> None:
    class Full(Exception):
        pass

    class Sink:
        calls = 0

        def write_block(self, data: memoryview, checksum: int) -> None:
            self.calls += 1
            raise Full

    plan_store, sink, client = PlanStore(), Sink(), Client()
    async with serving(plan_store) as (address, _):
        with pytest.raises(Full):
            await client.read(address, asking(plan_store.put(content(size))), sink, deadline_s=5)
        assert sink.calls == 1
        assert not client._peers
    client.close()


@pytest.mark.parametrize("held_back", [0, 3])
@in_trio
async def test_who_gives_up_is_noticed_by_the_owner(held_back: int) -> None:
    """Before the head, and within a body that a thread receives."""
    plan_store = PlanStore()
    plan_store.held_back = held_back
    version = plan_store.put(content(8 * MIB))
    client, sink = Client(), Kept()
    async with serving(plan_store) as (address, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client.read(address, asking(version), sink, deadline_s=20))
            await plan_store.waited_for.wait()
            nursery.cancel_scope.cancel()
        came = len(sink.data)
        await until(lambda: plan_store.closed == 1)
        assert plan_store.cancelled == 1
        plan_store.more.set()
        assert len(sink.data) == came <= held_back * MIB
        plan_store.held_back = None
        await client.read(address, asking(version), sink, deadline_s=20)
    client.close()


@in_trio
async def test_a_sink_is_not_called_after_a_cancelled_read_has_returned() -> None:
    import threading

    class Slow:
        def __init__(self) -> None:
            self.inside = threading.Event()
            self.go_on = threading.Event()
            self.calls = self.ended = 0

        def write_block(self, data: memoryview, checksum: int) -> None:
            self.calls += 1
            self.inside.set()
            self.go_on.wait(10)
            self.ended += 1

    plan_store, sink, client = PlanStore(), Slow(), Client()
    version = plan_store.put(content(4 * MIB))
    async with serving(plan_store) as (address, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client.read(address, asking(version), sink, deadline_s=5))
            await trio.to_thread.run_sync(sink.inside.wait, 10)
            nursery.cancel_scope.cancel()
            # It waits for the write that runs, and is not over before.
            threading.Timer(0.05, sink.go_on.set).start()
        assert sink.calls == sink.ended == 1
        await trio.sleep(0.05)
        assert sink.calls == 1
    client.close()


@in_trio
async def test_a_read_that_takes_too_long_in_all_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "TOTAL_S", 0.2 - ALWAYS_ALLOWED_S)
    plan_store, sink, client = PlanStore(), Kept(), Client()
    plan_store.held_back = 1
    version = plan_store.put(content(4 * MIB))
    async with serving(plan_store) as (address, _):
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version), sink, deadline_s=20)
        assert caught.value.kind == "timeout" and caught.value.delivered == len(sink.data) == MIB
    client.close()


@in_trio
async def test_a_connection_that_died_while_idle_is_replaced_unseen() -> None:
    plan_store, client = PlanStore(), Client()
    data = content(100 * KIB)
    version = plan_store.put(data)
    async with serving(plan_store) as (address, _):
        await client.read(address, asking(version), Kept(), deadline_s=5)
        (_, connection) = client._peers[address].idle[0]
        connection._socket.shutdown(socket.SHUT_RDWR)
        sink = Kept()
        await client.read(address, asking(version), sink, deadline_s=5)
        assert sink.data == data
    client.close()


@in_jumping_time
async def test_connections_that_are_not_needed_any_more_are_closed() -> None:
    async with serving(PlanStore()) as (address, _):
        client = Client()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(client.handshake, address)
        idle = client._peers[address].idle
        before = [connection for _, connection in idle]
        for _ in range(2):
            await trio.sleep(0.6 * IDLE_S)
            await client.handshake(address)
        assert [connection for _, connection in idle] == before[-1:]
        assert [connection.fileno() for connection in before[:-1]] == [-1, -1]
        client.close()


@in_trio
async def test_handshake_and_have() -> None:
    plan_store = PlanStore()
    version = plan_store.put(content(MIB))
    large = ObjectId(version.source, "large", "e", 100 * MIB)
    plan_store.files[large] = plan_store.files[version]
    for signer, verifier in ((None, None), (Signer(KEY), Verifier(KEY))):
        client = Client(signer=signer)
        async with serving(plan_store, verifier=verifier) as (address, _):
            assert await client.handshake(address) == HANDSHAKE
            assert await client.have(address, asking(large, 0, 40)) == [i % 3 == 0 for i in range(40)]
            with pytest.raises(PeerFailed) as caught:
                await client.have(address, asking(ObjectId("s", "k", "e", 5)))
            assert caught.value.kind == "not_here"
        client.close()


# Which requests are accepted.


@pytest.mark.parametrize(
    "signer",
    [None, Signer(Key(b"another secret!!")), Signer(KEY, clock=lambda: 0.0)],
    ids=["none", "wrong", "old"],
)
@in_trio
async def test_without_the_key_or_at_the_wrong_time_there_is_nothing(signer: Signer | None) -> None:
    plan_store = PlanStore()
    version = plan_store.put(content(MIB))
    client = Client(signer=signer)
    async with serving(plan_store, verifier=Verifier(KEY)) as (address, counted):
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version), Kept(), deadline_s=5)
        assert caught.value.kind == "refused"
        with pytest.raises(PeerFailed):
            await client.handshake(address)
        assert plan_store.opened == 0 and counted.peer_turned_away == 2
    client.close()


@in_trio
async def test_a_peer_without_the_key_is_not_believed() -> None:
    plan_store = PlanStore()
    version = plan_store.put(content(MIB))
    client, sink = Client(signer=Signer(KEY)), Kept()
    async with serving(plan_store) as (address, _):
        with pytest.raises(PeerFailed, match="not signed") as caught:
            await client.read(address, asking(version), sink, deadline_s=5)
        assert caught.value.kind == "refused" and not sink.parts
        plan_store.failure = ObjectChanged("so they say")
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version), sink, deadline_s=5)
        assert caught.value.kind == "refused"
        with pytest.raises(PeerFailed, match="not signed"):
            await client.handshake(address)
    client.close()


@in_trio
async def test_a_request_for_another_node_is_refused_by_one_that_knows_its_name() -> None:
    plan_store = PlanStore()
    version = plan_store.put(content(MIB))
    client = Client(signer=Signer(KEY))
    names = frozenset({"node-1:7000"})
    async with serving(plan_store, verifier=Verifier(KEY), names=names) as (address, _):
        assert await client.handshake(address) == HANDSHAKE  # that is how names are learnt
        with pytest.raises(PeerFailed, match="another node: this one is node-1:7000") as caught:
            await client.read(address, asking(version), Kept(), deadline_s=5)
        assert caught.value.kind == "refused"
    client.close()


# Nobody there, or too much asked.


@in_trio
async def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = Address(*gone.getsockname())
    metrics = Metrics()
    client = Client(metrics=metrics)
    wanted = asking(ObjectId("s", "k", "e", 5))
    for where in (address, Address("no such name.invalid", 1)):
        for ask in (
            partial(client.read, where, wanted, Kept(), deadline_s=5),
            partial(client.prefetch, where, wanted),
            partial(client.have, where, wanted),
        ):
            with pytest.raises(PeerFailed) as caught:
                await ask()
            assert caught.value.kind == "connect"
    assert metrics.peer_failures == metrics.peer_requests == 6
    assert not client._peers, "of addresses without a node nothing is kept"
    client.close()


@in_trio
async def test_a_peer_whose_address_another_node_has_now_is_found_at_its_new_one() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.2")
    port = listener.socket.getsockname()[1]
    (other,) = await trio.open_tcp_listeners(port, host="127.0.0.3")
    at: str | OSError = "127.0.0.2"

    def resolved(*_: object, **__: object) -> list[Any]:
        if isinstance(at, OSError):
            raise at
        return [(0, 0, 0, "", (at, port))]

    client, peer = Client(getaddrinfo=resolved), Address("peer", port)
    first, second = (
        Server(PlanStore(), lambda host, node=node: replace(HANDSHAKE, node=node), block_size=MIB)
        for node in ("peer", "another")
    )
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def serve() -> None:
            with scope:
                await first.serve([listener])

        nursery.start_soon(serve)
        assert (await client.handshake(peer)).node == "peer"
        scope.cancel()  # both are started again, each with the other's address
        await until(lambda: listener.socket.fileno() < 0)
        (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.2")
        nursery.start_soon(second.serve, [listener])
        nursery.start_soon(first.serve, [other])
        at = "127.0.0.3"
        assert (await client.handshake(peer)).node == "peer"
        at = OSError("the name server is down")
        client._peers[peer].drop_idle()
        assert (await client.handshake(peer)).node == "peer"
        nursery.cancel_scope.cancel()
    client.close()


@in_trio
async def test_an_address_that_is_silent_leaves_time_for_the_next_one() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.3")
    port = listener.socket.getsockname()[1]
    with socket.create_server(("127.0.0.2", port), backlog=0) as silent, ExitStack() as queued:
        for _ in range(2):  # more than it queues: it drops the next SYN
            waiting = queued.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())

        def resolved(*_: object, **__: object) -> list[Any]:
            return [(0, 0, 0, "", (f"127.0.0.{number}", port)) for number in (2, 3)]

        client = Client(getaddrinfo=resolved)
        server = Server(PlanStore(), lambda host: HANDSHAKE, block_size=MIB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve, [listener])
            assert await client.handshake(Address("peer", port)) == HANDSHAKE
            nursery.cancel_scope.cancel()
        client.close()


@in_trio
async def test_more_at_once_than_a_server_allows_is_told_to_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "IN_FLIGHT_PER_HOST", 2)
    plan_store = PlanStore()
    plan_store.held_back = 0
    version = plan_store.put(content(MIB))
    client = Client()
    async with serving(plan_store) as (address, _), trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(lambda: client.read(address, asking(version), Kept(), deadline_s=20))
        await until(lambda: plan_store.opened == 2)
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version), Kept(), deadline_s=5)
        assert caught.value.kind == "busy"
        plan_store.more.set()
    client.close()


@in_trio
async def test_names_that_are_too_long_or_of_another_block_size_are_refused() -> None:
    plan_store, client = PlanStore(), Client()
    async with serving(plan_store) as (address, _):
        with pytest.raises(PeerFailed, match="too long") as caught:
            await client.read(address, asking(ObjectId("s", "k" * 20_000, "e", 5)), Kept(), deadline_s=5)
        assert caught.value.kind == "refused"
        with pytest.raises(PeerFailed, match="blocks have") as caught:
            request = asking(ObjectId("s", "k", "e", 5), block_size=4096)
            await client.read(address, request, Kept(), deadline_s=5)
        assert caught.value.kind == "refused"
        with pytest.raises(PeerFailed, match="one extent"):
            await client.read(address, asking(ObjectId("s", "k", "e", 40 * MIB)), Kept(), deadline_s=5)
    client.close()

"""A client and a server of ours, over real sockets: what arrives, what is refused, and what a broken reply leaves."""

from __future__ import annotations

import socket
from functools import partial

import pytest
import trio

from cachefs.errors import CachefsError, ObjectChanged
from cachefs.metrics import Metrics
from cachefs.names import ObjectId
from cachefs.peers.auth import Key, Signer, Verifier
from cachefs.peers.client import Client
from cachefs.peers.protocol import Busy, NotShared, PeerFailed
from cachefs.peers.receiving import LITTLE
from cachefs.peers.server import Limits
from cachefs.peers.wire import Address, Kind
from tests.peers.exchange import HELLO, KEY, KIB, MIB, Kept, Shelf, asking, content, in_trio, serving, until

SIZES = [1, 100 * KIB, LITTLE, LITTLE + 1, MIB, MIB + 1, 5 * MIB + 7, 16 * MIB]


@pytest.mark.parametrize("in_ram", [True, False])
@pytest.mark.parametrize("keyed", [False, True])
@in_trio
async def test_bytes_arrive_as_they_are(keyed: bool, in_ram: bool) -> None:
    shelf = Shelf(in_ram=in_ram, pieces=3)
    signer, verifier = (Signer(KEY), Verifier(KEY)) if keyed else (None, None)
    metrics = Metrics()
    client = Client(signer=signer, metrics=metrics)
    async with serving(shelf, verifier=verifier) as (address, stats):
        for size in SIZES:
            data = content(size, size)
            version = shelf.put(data, f"key-{size}")
            for sink_waits in (True, False):
                sink = Kept()
                await client.read(address, asking(version), sink, deadline_s=5, sink_waits=sink_waits)
                assert sink.data == data
                assert all(len(part) == MIB for part in sink.parts[:-1])
        await until(lambda: stats.of("127.0.0.1").served == 2 * len(SIZES))  # the last byte comes before that
        assert stats.of("127.0.0.1").bytes_out == 2 * sum(SIZES) == metrics.peer_bytes_in
        assert stats.of("127.0.0.1").served == 2 * len(SIZES) == metrics.peer_requests
        client.close()


@in_trio
async def test_a_part_of_an_object_is_the_blocks_that_were_asked_for() -> None:
    shelf = Shelf()
    data = content(20 * MIB + 5)
    version = shelf.put(data)
    client = Client()
    async with serving(shelf) as (address, _):
        for start, stop in ((3, 4), (14, 16), (16, 21), (20, 21)):
            sink = Kept()
            await client.read(address, asking(version, start, stop), sink, deadline_s=5)
            assert sink.data == data[start * MIB : stop * MIB]
        client.close()


@in_trio
async def test_one_connection_serves_one_after_the_other_and_many_at_once() -> None:
    shelf = Shelf()
    data = content(100 * KIB)
    version = shelf.put(data)
    client = Client()
    connections = set()
    async with serving(shelf, limits=Limits(connections_per_host=16, in_flight_per_host=16)) as (
        address,
        stats,
    ):
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
        assert stats.of("127.0.0.1").turned_away == 0
        client.close()


@in_trio
async def test_blocks_are_delivered_while_later_ones_are_still_on_their_way_to_the_owner() -> None:
    shelf = Shelf()
    shelf.held_back = 2
    data = content(4 * MIB)
    version = shelf.put(data)
    client = Client()
    sink = Kept()
    async with serving(shelf) as (address, _), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.read(address, asking(version), sink, deadline_s=5))
        await shelf.waited_for.wait()
        await until(lambda: len(sink.parts) == 2)
        assert sink.data == data[: 2 * MIB]
        shelf.more.set()
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
async def test_what_the_owner_says_is_what_the_asker_hears(
    failure: CachefsError, kind: Kind, late: bool, keyed: bool
) -> None:
    """`late`: the owner learns it only while it waits for the first piece."""
    shelf = Shelf()
    version = shelf.put(content(MIB))
    if late:
        shelf.held_back, shelf.failure_in_body = 0, failure
    else:
        shelf.failure = failure
    client = Client(signer=Signer(KEY) if keyed else None)
    async with serving(shelf, verifier=Verifier(KEY) if keyed else None) as (address, _):
        for _ in range(2):
            with pytest.raises(PeerFailed, match=str(failure)) as caught:
                await client.read(address, asking(version), Kept(), deadline_s=5)
            assert caught.value.kind == kind and caught.value.delivered == 0
            assert (caught.value.retry_after_s > 0) == (kind == "busy")
        assert len(client._peers[address].idle) == 1  # a refusal costs no connection
        client.close()


@in_trio
async def test_an_owner_that_fails_halfway_breaks_off_and_says_how_far_it_came() -> None:
    shelf = Shelf()
    shelf.held_back, shelf.failure_in_body = 2, ObjectChanged("replaced meanwhile")
    version = shelf.put(content(4 * MIB))
    client, sink = Client(), Kept()
    async with serving(shelf) as (address, _):
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version), sink, deadline_s=5)
    assert caught.value.kind == "reset"
    assert caught.value.delivered == len(sink.data) == 2 * MIB
    client.close()


@in_trio
async def test_a_block_that_is_not_what_its_checksum_says_reaches_no_sink() -> None:
    shelf = Shelf()
    shelf.shift = 1
    client = Client()
    async with serving(shelf) as (address, _):
        for size in (100 * KIB, 4 * MIB):
            sink = Kept()
            with pytest.raises(PeerFailed) as caught:
                await client.read(address, asking(shelf.put(content(size))), sink, deadline_s=5)
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

    shelf, sink, client = Shelf(), Sink(), Client()
    async with serving(shelf) as (address, _):
        with pytest.raises(Full):
            await client.read(address, asking(shelf.put(content(size))), sink, deadline_s=5)
        assert sink.calls == 1
        assert not client._peers
    client.close()


@pytest.mark.parametrize("held_back", [0, 3])
@in_trio
async def test_who_gives_up_is_noticed_by_the_owner(held_back: int) -> None:
    """Before the head, and within a body that a thread receives."""
    shelf = Shelf()
    shelf.held_back = held_back
    version = shelf.put(content(8 * MIB))
    client, sink = Client(), Kept()
    async with serving(shelf) as (address, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client.read(address, asking(version), sink, deadline_s=20))
            await shelf.waited_for.wait()
            nursery.cancel_scope.cancel()
        came = len(sink.data)
        await until(lambda: shelf.closed == 1)
        assert shelf.cancelled == 1
        shelf.more.set()
        assert len(sink.data) == came <= held_back * MIB
        shelf.held_back = None
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

    shelf, sink, client = Shelf(), Slow(), Client()
    version = shelf.put(content(4 * MIB))
    async with serving(shelf) as (address, _):
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
async def test_a_read_that_takes_too_long_in_all_ends() -> None:
    shelf, sink, client = Shelf(), Kept(), Client()
    shelf.held_back = 1
    version = shelf.put(content(4 * MIB))
    async with serving(shelf) as (address, _):
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version), sink, deadline_s=20, total_s=0.2)
        assert caught.value.kind == "timeout" and caught.value.delivered == len(sink.data) == MIB
    client.close()


@in_trio
async def test_a_connection_that_died_while_idle_is_replaced_unseen() -> None:
    shelf, client = Shelf(), Client()
    data = content(100 * KIB)
    version = shelf.put(data)
    async with serving(shelf) as (address, _):
        await client.read(address, asking(version), Kept(), deadline_s=5)
        (_, connection) = client._peers[address].idle[0]
        connection._socket.shutdown(socket.SHUT_RDWR)
        sink = Kept()
        await client.read(address, asking(version), sink, deadline_s=5)
        assert sink.data == data
    client.close()


@in_trio
async def test_hello_and_have() -> None:
    shelf = Shelf()
    version = shelf.put(content(MIB))
    large = ObjectId(version.source, "large", "e", 100 * MIB)
    shelf.files[large] = shelf.files[version]
    for signer, verifier in ((None, None), (Signer(KEY), Verifier(KEY))):
        client = Client(signer=signer)
        async with serving(shelf, verifier=verifier) as (address, _):
            assert await client.hello(address) == HELLO
            assert await client.have(address, asking(large, 0, 40)) == [i % 3 == 0 for i in range(40)]
            with pytest.raises(PeerFailed) as caught:
                await client.have(address, asking(ObjectId("s", "k", "e", 5)))
            assert caught.value.kind == "not_here"
        client.close()


# Who is believed.


@pytest.mark.parametrize(
    "signer",
    [None, Signer(Key(b"another secret!!")), Signer(KEY, clock=lambda: 0.0)],
    ids=["none", "wrong", "old"],
)
@in_trio
async def test_without_the_key_or_at_the_wrong_time_there_is_nothing(signer: Signer | None) -> None:
    shelf = Shelf()
    version = shelf.put(content(MIB))
    client = Client(signer=signer)
    async with serving(shelf, verifier=Verifier(KEY)) as (address, stats):
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version), Kept(), deadline_s=5)
        assert caught.value.kind == "refused"
        with pytest.raises(PeerFailed):
            await client.hello(address)
        assert shelf.opened == 0 and stats.of("127.0.0.1").turned_away == 2
    client.close()


@in_trio
async def test_a_peer_without_the_key_is_not_believed() -> None:
    shelf = Shelf()
    version = shelf.put(content(MIB))
    client, sink = Client(signer=Signer(KEY)), Kept()
    async with serving(shelf) as (address, _):
        with pytest.raises(PeerFailed, match="not signed") as caught:
            await client.read(address, asking(version), sink, deadline_s=5)
        assert caught.value.kind == "refused" and not sink.parts
        shelf.failure = ObjectChanged("so they say")
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version), sink, deadline_s=5)
        assert caught.value.kind == "refused"
        with pytest.raises(PeerFailed, match="not signed"):
            await client.hello(address)
    client.close()


@in_trio
async def test_a_request_for_another_node_is_refused_by_one_that_knows_its_name() -> None:
    shelf = Shelf()
    version = shelf.put(content(MIB))
    client = Client(signer=Signer(KEY))
    names = frozenset({"node-1:7000"})
    async with serving(shelf, verifier=Verifier(KEY), names=names) as (address, _):
        assert await client.hello(address) == HELLO  # that is how names are learnt
        with pytest.raises(PeerFailed, match="another node") as caught:
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
            partial(client.bring, where, wanted),
            partial(client.have, where, wanted),
        ):
            with pytest.raises(PeerFailed) as caught:
                await ask()
            assert caught.value.kind == "connect"
    assert metrics.peer_failures == metrics.peer_requests == 6
    assert not client._peers, "of addresses without a node nothing is kept"
    client.close()


@in_trio
async def test_more_at_once_than_a_server_allows_is_told_to_come_later() -> None:
    shelf = Shelf()
    shelf.held_back = 0
    version = shelf.put(content(MIB))
    client = Client()
    limits = Limits(in_flight_per_host=2)
    async with serving(shelf, limits=limits) as (address, _), trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(lambda: client.read(address, asking(version), Kept(), deadline_s=20))
        await until(lambda: shelf.opened == 2)
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version), Kept(), deadline_s=5)
        assert caught.value.kind == "busy" and caught.value.retry_after_s == limits.retry_after_s
        shelf.more.set()
    client.close()


@in_trio
async def test_names_that_are_too_long_or_of_another_block_size_are_refused() -> None:
    shelf, client = Shelf(), Client()
    async with serving(shelf) as (address, _):
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

"""Nodes that share: what the store is asked for, what readers get, and what is left of it when nodes fail."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base import errors
from cachefs.base.names import ObjectId
from cachefs.peers.client import CONNECTIONS_PER_PEER, Client
from cachefs.peers.membership import Sighting
from cachefs.peers.wire import Address, BlockRequest, Busy, Kind, NotShared, PeerFailed
from tests.fetch.scripted import SOURCE, ScriptedOrigin, content, in_trio
from tests.peers.nodes import Node, Nodes, in_time, nodes
from tests.store.lab import BLOCK, EXTENT, KIB, MIB, cache_files, until


async def read_all(node: Node, object_id: ObjectId, data: bytes, piece: int = 128 * KIB) -> None:
    for offset in range(0, len(data), piece):
        size = min(piece, len(data) - offset)
        assert await node.read(object_id, offset, size) == data[offset : offset + size]


async def read_on(node: Node, object_id: ObjectId, data: bytes) -> None:
    """From the beginning, through one handle."""
    handle = node.fetcher.open(node.origin, object_id)  # type: ignore[arg-type]
    for at in range(0, len(data), BLOCK):
        assert await node.read_open(handle, at, BLOCK) == data[at : at + BLOCK]
    node.fetcher.close(handle)


@in_trio
async def test_every_object_is_fetched_once_whoever_reads_it_in_whatever_order(cache_dir: Path) -> None:
    async with nodes(cache_dir) as cluster:
        files = [content(number, random.Random(number).randrange(1, 12 * BLOCK)) for number in range(40)]
        ids = [cluster.origin.put(f"file{number}", data) for number, data in enumerate(files)]
        assert all(any(node.owns(i) for i in ids) for node in cluster)

        async def read_in(node: Node, order: list[int]) -> None:
            for number in order:
                await read_all(node, ids[number], files[number])

        async with trio.open_nursery() as nursery:
            for seed, node in enumerate(cluster):
                order = list(range(len(files)))
                random.Random(seed).shuffle(order)
                nursery.start_soon(read_in, node, order)
        await cluster.quiet()
        assert sorted(get.key for get in cluster.origin.gets) == sorted(i.key for i in ids)
        assert cluster.origin.delivered == sum(map(len, files))
        assert sum(node.metrics.peer_failures for node in cluster) == 0
        assert sum(node.metrics.peer_bytes_in for node in cluster) == 2 * sum(map(len, files))
        await until(
            lambda: sum(node.metrics.peer_bytes_out for node in cluster) == 2 * sum(map(len, files)), 5
        )
        cluster.check_accounts()


@in_trio
async def test_a_large_object_is_fetched_once_by_the_owners_of_its_extents(cache_dir: Path) -> None:
    async with nodes(cache_dir, readahead=8 * MIB) as cluster:
        data = content(1, 12 * EXTENT + 5000)
        object_id = cluster.origin.put("large", data)
        async with trio.open_nursery() as nursery:
            for node in cluster:
                nursery.start_soon(read_all, node, object_id, data)
        await cluster.quiet()
        ranges = sorted((get.start, get.stop) for get in cluster.origin.gets)
        assert sum(stop - start for start, stop in ranges) == len(data)
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        assert all(node.metrics.peer_hits for node in cluster)
        cluster.check_accounts()


@in_trio
async def test_what_is_fetched_ahead_of_another_nodes_comes_an_extent_a_reply(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2, part_bytes=4 * BLOCK) as cluster:
        here, there = cluster
        size = EXTENT - 5
        object_id = cluster.put_owned_by(there, "k", content(1, size))
        assert await here.fetcher.prefetch(cluster.origin, object_id) == size  # type: ignore[arg-type]
        assert here.metrics.peer_requests == 1
        parts = sorted((get.start, get.stop) for get in cluster.origin.gets)
        assert parts == [(at, min(size, at + 4 * BLOCK)) for at in range(0, EXTENT, 4 * BLOCK)]
        assert all(get.ticket is not None and not get.ticket.background for get in cluster.origin.gets)
        own = cluster.put_owned_by(here, "own", content(2, size))
        cluster.origin.gets.clear()
        assert await here.fetcher.prefetch(cluster.origin, own) == size  # type: ignore[arg-type]
        assert len(cluster.origin.gets) == 4 and here.metrics.peer_requests == 1
        cluster.check_accounts()


@in_trio
async def test_a_growing_window_of_another_nodes_is_not_asked_for_in_halves(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2, part_bytes=8 * BLOCK, readahead=4 * MIB) as cluster:
        here, there = cluster
        data = content(1, 5 * MIB)
        object_id = cluster.put_owned_by(there, "k", data)
        await read_on(here, object_id, data[: 4 * BLOCK])
        await cluster.quiet()
        asked = here.metrics.peer_requests
        assert here.fetcher.cached_bytes(object_id) >= 15 * BLOCK
        assert asked <= 8, (
            "the block that was read, windows of 1, 2, 4 and 8, and what lies behind the extent"
        )


@in_trio
async def test_bytes_of_an_owner_that_dies_within_a_reply_are_not_fetched_twice(cache_dir: Path) -> None:
    async with nodes(cache_dir) as cluster:
        data = content(1, EXTENT)
        object_id = cluster.origin.put("k", data)
        owner = cluster.owner(object_id)
        reader = cluster.others(object_id)[0]
        hold = cluster.origin.hold("k", 5 * BLOCK + 10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, reader, object_id, data, EXTENT)
            await hold.reached.wait()
            await until(lambda: reader.metrics.peer_requests > 0)
            await until(lambda: owner.metrics.peer_bytes_out == 5 * BLOCK, 5)
            await until(
                lambda: (
                    next(
                        iter(reader.fetcher.transfers.of(reader.store.object(object_id)).values())
                    ).cache_write.written
                    == 5 * BLOCK
                ),
                5,
            )
            owner.die()
            cluster.origin.holds.clear()
            hold.release.set()
        await cluster.quiet()
        first, *rest = cluster.origin.gets
        assert (first.start, first.stop) == (0, EXTENT)
        assert [(get.start, get.stop) for get in rest] == [(5 * BLOCK, EXTENT)]
        assert reader.cluster.status()[0]["state"] in ("healthy", "suspect")
        assert reader.metrics.peer_failures >= 1


@in_time(rate=4)
async def test_an_owner_that_hangs_is_given_up_for_its_successor_within_the_deadline(cache_dir: Path) -> None:
    async with nodes(cache_dir) as cluster:
        data = content(1, 3 * BLOCK)
        object_id = cluster.origin.put("k", data)
        cluster.owner(object_id).hang()
        begun = trio.current_time()
        readers = cluster.others(object_id)
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(read_all, reader, object_id, data)
        assert trio.current_time() - begun < 4
        assert len(cluster.origin.gets) == 1


@in_trio
async def test_successors_of_a_dead_owner_fetch_once_for_all(cache_dir: Path) -> None:
    async with nodes(cache_dir, 5) as cluster:
        dead = cluster[0]
        files = [content(number, 2 * BLOCK) for number in range(12)]
        ids = [cluster.put_owned_by(dead, f"file{n}-", data) for n, data in enumerate(files)]
        dead.die()
        await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as nursery:
            for node in cluster[1:]:
                for object_id, data in zip(ids, files, strict=True):
                    nursery.start_soon(read_all, node, object_id, data)
        await cluster.quiet()
        assert sorted(get.key for get in cluster.origin.gets) == sorted(i.key for i in ids)


@in_trio
async def test_a_peer_that_lies_costs_a_request_and_is_left_alone(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2) as cluster:
        liar, reader = cluster
        files = [content(number, 2 * BLOCK) for number in range(6)]
        ids = [cluster.put_owned_by(liar, f"file{n}-", data) for n, data in enumerate(files)]
        for object_id, data in zip(ids, files, strict=True):
            await read_all(liar, object_id, data)
            for copy in liar.store.catalog.copies(liar.store.object(object_id), 1):
                copy.checksums[1] ^= 1
        for object_id, data in zip(ids, files, strict=True):
            await read_all(reader, object_id, data)
        (status,) = [row for row in reader.cluster.status() if not row["here"]]
        assert status["state"] in ("suspect", "dead") and status["failures"]["corrupt"] >= 1
        assert reader.metrics.peer_hits == status["failures"]["corrupt"]  # the first block of each was good


@in_trio
async def test_a_failure_after_the_last_byte_sends_no_further_request(cache_dir: Path) -> None:
    async with nodes(cache_dir) as cluster:
        data = content(1, 2 * BLOCK + 5)
        object_id = cluster.put_owned_by(cluster[0], "k", data)
        reader, read, asked = cluster[1], cluster[1].client.read, []

        async def read_late(address: Address, *args: Any, **more: Any) -> float:
            asked.append(address)
            await read(address, *args, **more)
            raise PeerFailed("timeout", "it did not deliver in time")

        reader.client.read = read_late  # type: ignore[method-assign]
        await read_all(reader, object_id, data)
        await cluster.quiet()
        assert asked == [cluster[0].address] and len(cluster.origin.gets) == 1
        assert reader.metrics.peer_failures == 0 and reader.metrics.peer_misses == 0


@in_time(rate=4)
async def test_a_peer_that_is_back_is_asked_again(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2) as cluster:
        owner, reader = cluster
        ids = [cluster.put_owned_by(owner, f"file{n}-", content(n, BLOCK)) for n in range(8)]
        give, owner.serving.open = owner.serving.open, None  # type: ignore[method-assign, assignment]
        for object_id in ids[:3]:
            await reader.read(object_id)
            await trio.sleep(1.1)
        assert next(row for row in reader.cluster.status() if not row["here"])["state"] == "dead"
        assert reader.metrics.peer_hits == 0
        owner.serving.open = give  # type: ignore[method-assign]
        await trio.sleep(2.1)
        for object_id in ids[3:]:
            await reader.read(object_id)
            await cluster.quiet()  # who has its bytes does not wait for the end of the transfer
        assert reader.metrics.peer_hits == 5


@pytest.mark.long
@in_time(rate=4)
async def test_a_slow_store_is_asked_once_however_long_it_takes(cache_dir: Path) -> None:
    async with nodes(cache_dir) as cluster:
        data = content(1, 4 * BLOCK)
        object_id = cluster.origin.put("k", data)
        holds = [cluster.origin.hold("k", 0), cluster.origin.hold("k", 2 * BLOCK)]
        async with trio.open_nursery() as nursery:
            for node in cluster:
                nursery.start_soon(read_all, node, object_id, data)
            for hold in holds:
                await hold.reached.wait()
                await trio.sleep(6)
                hold.release.set()
        await cluster.quiet()
        assert len(cluster.origin.gets) == 1
        assert all(row["state"] == "healthy" for node in cluster for row in node.cluster.status())


@pytest.mark.long
@pytest.mark.parametrize("after_s", [4.0, 1000.0])
@in_time(rate=4)
async def test_an_owner_that_has_lost_the_store_is_not_waited_for_to_the_end(
    cache_dir: Path, caplog: pytest.LogCaptureFixture, after_s: float
) -> None:
    class Lost(ScriptedOrigin):
        source, prefix = SOURCE, ""

        async def read(self, *_: object, **__: object) -> None:
            await trio.sleep(after_s)
            raise errors.OriginFailed("gave up")

    async with nodes(cache_dir, 2, deadline_s=18.0) as cluster:
        owner, reader = cluster
        files = [content(number, BLOCK) for number in range(4)]
        ids = [cluster.put_owned_by(owner, f"file{n}-", data) for n, data in enumerate(files)]
        owner.serving._origins = [Lost()]  # type: ignore[list-item]
        waits = []
        for object_id, data in zip(ids, files, strict=True):
            begun = trio.current_time()
            await read_all(reader, object_id, data)
            waits.append(trio.current_time() - begun)
        assert max(waits) < 8, "the store is asked while the reader still waits"
        assert sorted(waits)[1] < 2, "and the owner is left alone then"
        assert [get.key for get in cluster.origin.gets] == [object_id.key for object_id in ids]


@pytest.mark.long
@in_time(rate=4)
async def test_a_long_queue_in_front_of_a_slow_peer_is_left_for_the_store(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2, deadline_s=12.0) as cluster:
        owner, reader = cluster
        count = CONNECTIONS_PER_PEER + 4
        files = [content(number, 2 * BLOCK) for number in range(count)]
        ids = [cluster.put_owned_by(owner, f"file{n}-", data) for n, data in enumerate(files)]
        for object_id, data in zip(ids, files, strict=True):
            await read_all(owner, object_id, data)
        await cluster.quiet()
        receive = Client.read

        async def slowly(*args: Any, **how: Any) -> float:
            await trio.sleep(10)
            return await receive(*args, **how)

        reader.client.read = partial(slowly, reader.client)  # type: ignore[method-assign]
        begun = trio.current_time()
        took: list[float] = []

        async def read(object_id: ObjectId, data: bytes) -> None:
            await read_all(reader, object_id, data)
            took.append(trio.current_time() - begun)

        async with trio.open_nursery() as nursery:
            for object_id, data in zip(ids, files, strict=True):
                nursery.start_soon(read, object_id, data)
        assert max(took) < 12 and sorted(took)[3] < 6, "those without a place ask the store in time"
        assert len(cluster.origin.gets) == count + 4


@pytest.mark.long
@in_time(rate=4)
async def test_what_a_dead_node_kept_is_kept_by_its_successor_until_it_is_back(cache_dir: Path) -> None:
    async with nodes(cache_dir, 3, sizes={"ssd": 8 * MIB, "ram": 8 * MIB}) as cluster:
        dead, *others = cluster
        ids = [cluster.put_owned_by(dead, f"file{n}-", content(n, BLOCK)) for n in range(12)]

        def kept(node: Node, object_id: ObjectId) -> bool:
            (copy,) = node.store.catalog.copies(node.store.object(object_id), 0)
            return copy.key not in node.store.eviction.remote_owned

        dead.die()
        for object_id in ids:
            for node in others:
                await node.read(object_id)
                await cluster.quiet()
            await trio.sleep(1.1)
        states = [row["state"] for node in others for row in node.cluster.status() if not row["here"]]
        assert sorted(states) == ["dead", "dead", "healthy", "healthy"]
        for object_id in ids[8:]:
            assert [kept(node, object_id) for node in others].count(True) == 1
            assert not any(
                kept(node, object_id) and node is not successor(cluster, object_id) for node in others
            )
        for node in others:
            node.cluster._health_of(dead.handshake.node).succeeded(0.01)
            assert not any(node.owns(object_id) for object_id in ids)


def successor(cluster: Nodes, object_id: ObjectId) -> Node:
    name = cluster[1].cluster.membership.ring.owners(object_id.digest, 0, 2)[1]
    return next(node for node in cluster if node.handshake.node == name)


@in_trio
async def test_of_members_that_left_nothing_is_kept(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2) as cluster:
        owner, reader = cluster
        object_id = cluster.put_owned_by(owner, "k", content(1, 2 * BLOCK))
        (asked,) = reader.cluster.candidates(object_id.digest, 0)
        hold = cluster.origin.hold("", 0)
        hold.key = object_id.key
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.read, object_id)
            await hold.reached.wait()
            cluster.introduce([reader], [reader])
            hold.release.set()
        await cluster.quiet()
        assert not reader.cluster.failed_since(asked, 0)
        assert not reader.cluster._health and not reader.client._peers


@in_trio
async def test_a_replaced_object_is_told_as_such(cache_dir: Path) -> None:
    async with nodes(cache_dir) as cluster:
        object_id = cluster.origin.put("k", content(1, 2 * BLOCK))
        cluster.origin.put("k", content(2, 2 * BLOCK))
        for node in cluster.others(object_id):
            with pytest.raises(errors.ObjectChanged):
                await node.read(object_id)
        assert sum(node.metrics.peer_hits for node in cluster) == 0


@in_trio
async def test_a_store_that_fails_at_the_owner_is_asked_by_the_reader_itself(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2) as cluster:
        data = content(1, 2 * BLOCK)
        object_id = cluster.put_owned_by(cluster[0], "k", data)
        cluster.origin.fail(lambda: errors.OriginFailed("gave up"))
        assert await cluster[1].read(object_id) == data
        assert len(cluster.origin.gets) == 2


@in_trio
async def test_what_is_not_shown_here_is_not_given(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2) as cluster:
        owner, reader = cluster
        cluster.origin.prefix = "data/"  # type: ignore[attr-defined]
        wrong = [
            ObjectId(SOURCE, "other/key", "e", 100),
            ObjectId(SOURCE, "data", "e", 100),
            ObjectId("s3://another", "data/key", "e", 100),
            ObjectId(SOURCE, "data/../other/key", "e", 100),
            ObjectId(SOURCE, "data/./key", "e", 100),
            ObjectId(SOURCE, "data//key", "e", 100),
        ]
        for object_id in wrong:
            request = BlockRequest(object_id, 0, 1, BLOCK)
            with pytest.raises(NotShared):
                await owner.serving.open(request, "127.0.0.1")
            with pytest.raises(NotShared):
                await owner.serving.have(request)
            with pytest.raises(PeerFailed) as caught:
                await reader.client.have(owner.address, request)
            assert caught.value.kind == "not_here"
        assert not cluster.origin.gets


@in_trio
async def test_only_owners_and_successors_fetch_and_everybody_gives_what_lies_here(cache_dir: Path) -> None:
    async with nodes(cache_dir, 4) as cluster:
        data = content(1, 2 * BLOCK)
        object_id = cluster.origin.put("k", data)
        order = cluster[0].cluster.membership.ring.owners(object_id.digest, 0, 4)
        ranked = sorted(cluster, key=lambda node: order.index(node.handshake.node))
        for place, node in enumerate(ranked):
            for rank in range(4):
                allowed = node.cluster.may_fetch(object_id.digest, 0, rank)
                assert allowed == (place <= rank and place < 3)
        with pytest.raises(NotShared):
            await ranked[1].serving.open(BlockRequest(object_id, 0, 2, BLOCK, 0), "a")
        assert not cluster.origin.gets
        assert await ranked[1].read(object_id) == data
        reply = await ranked[1].serving.open(BlockRequest(object_id, 0, 2, BLOCK, 0), "a")
        blocks = []
        while len(blocks) < 2:
            if (block := reply.take()) is None:
                await reply.wait()  # the file is opened beside the loop
            else:
                blocks.append(block.length)
        assert blocks == [BLOCK, BLOCK]
        reply.close()
        assert len(cluster.origin.gets) == 1


@in_trio
async def test_nodes_that_ask_each_other_for_the_same_do_not_wait_for_each_other(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2, replicas=2) as cluster:
        a, b = cluster
        data = content(1, 3 * BLOCK)
        object_id = cluster.origin.put("k", data)
        # Each believes that the other owns everything, and may fetch it, too.
        for node, other in ((a, b), (b, a)):
            heavy = Sighting(other.address, replace(other.handshake, weight=1e6))
            node.cluster.membership._report(
                [heavy, Sighting(node.address, replace(node.handshake, weight=1e-6))]
            )
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read_all, a, object_id, data)
                nursery.start_soon(read_all, b, object_id, data)
        assert len(cluster.origin.gets) <= 2


@in_trio
async def test_members_may_come_and_go_while_everybody_reads(cache_dir: Path) -> None:
    async with nodes(cache_dir, 4, readahead=4 * MIB) as cluster:
        files = [content(number, 3 * EXTENT // 2) for number in range(12)]
        ids = [cluster.origin.put(f"file{number}", data) for number, data in enumerate(files)]
        views = [list(view) for size in (1, 2, 3, 4) for view in permutations(cluster, size)]
        reading = True

        async def change() -> None:
            rng = random.Random(1)
            while reading:
                cluster.introduce([rng.choice(cluster)], rng.choice(views))
                await trio.sleep(0.002)

        async def read(node: Node, seed: int) -> None:
            for number in random.Random(seed).sample(range(len(files)), len(files)):
                await read_all(node, ids[number], files[number])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            async with trio.open_nursery() as readers:
                for seed, node in enumerate(cluster):
                    readers.start_soon(read, node, seed)
            reading = False
        await cluster.quiet()
        cluster.check_accounts()


@pytest.mark.parametrize("replicas", [2, 3])
@in_trio
async def test_replicas_ask_the_owner_and_keep_what_they_get(cache_dir: Path, replicas: int) -> None:
    async with nodes(cache_dir, 3, replicas=replicas, sizes={"ssd": 8 * MIB, "ram": 8 * MIB}) as cluster:
        data = content(1, 2 * BLOCK)
        object_id = cluster.origin.put("k", data)
        order = cluster[0].cluster.membership.ring.owners(object_id.digest, 0, 3)
        for node in cluster:
            assert await node.read(object_id) == data
            kept = order.index(node.handshake.node) < replicas
            copies = node.store.catalog.copies(node.store.object(object_id), 0)
            assert copies and all((copy.key in node.store.eviction.remote_owned) != kept for copy in copies)
        assert len(cluster.origin.gets) == 1


@in_trio
async def test_an_owner_without_room_says_so_and_the_reader_gets_its_bytes(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2) as cluster:
        data = content(1, 2 * BLOCK)
        object_id = cluster.put_owned_by(cluster[0], "k", data)
        for tier in cluster[0].store.tiers:
            tier.cap_bytes = 0
        with pytest.raises(Busy):
            await cluster[0].serving.open(BlockRequest(object_id, 0, 2, BLOCK), "a")
        assert await cluster[1].read(object_id) == data


@in_trio
async def test_what_another_node_keeps_never_comes_to_ssd_and_displaces_nothing(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2, sizes={"ssd": 8 * MIB, "ram": 4 * MIB}, background=True) as cluster:
        here, there = cluster
        own = [cluster.put_owned_by(here, f"own{n}-", content(n, BLOCK)) for n in range(40)]
        other = [cluster.put_owned_by(there, f"other{n}-", content(n, BLOCK)) for n in range(100)]
        for object_id in own:
            await here.read(object_id)
        for object_id in other:
            await here.read(object_id)
        await cluster.quiet()
        gets = len(cluster.origin.gets)
        assert gets == len(own) + len(other)
        assert all(here.fetcher.whole(object_id) for object_id in own)
        catalog = here.store.catalog
        held = [object_id for object_id in other if here.fetcher.whole(object_id)]
        assert 5 <= len(held) <= 24
        for object_id in other:
            assert not catalog.copies(here.store.object(object_id), 1)
        # Its own displace them, and nothing of them is saved.
        more = [cluster.put_owned_by(here, f"more{n}-", content(n, BLOCK)) for n in range(20)]
        for object_id in more:
            await here.read(object_id)
        assert all(here.fetcher.whole(object_id) for object_id in own + more)
        ssd = here.store.tiers[1].path
    assert len(cache_files(ssd)) == len(own) + len(more)


@in_trio
async def test_remote_owned_blocks_that_find_no_room_pass_through_memory(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2, sizes={"ssd": 8 * MIB, "ram": 10 * BLOCK}) as cluster:
        here, there = cluster
        own = [cluster.put_owned_by(here, f"own{n}-", content(n, BLOCK)) for n in range(8)]
        other = [cluster.put_owned_by(there, f"other{n}-", content(n, BLOCK)) for n in range(14)]
        for object_id in own:
            await here.read(object_id)
        hold = [cluster.origin.hold(object_id.key, 100) for object_id in other]
        async with trio.open_nursery() as nursery:
            for number, object_id in enumerate(other):
                nursery.start_soon(read_all, here, object_id, content(number, BLOCK))
            for one in hold:
                await one.reached.wait()
            for one in hold:
                one.release.set()
        await cluster.quiet()
        assert here.metrics.bypassed_blocks == 12  # of ten, eight are its own
        catalog = here.store.catalog
        assert not any(catalog.copies(here.store.object(object_id), 1) for object_id in other)
        assert all(here.fetcher.whole(object_id) for object_id in own)
        assert not await here.fetcher.prefetch(cluster.origin, own[0])  # type: ignore[arg-type]
        for object_id in own:
            for copy in catalog.copies(here.store.object(object_id), 0):
                copy.pins += 1
        more = [cluster.put_owned_by(there, f"more{n}-", content(n, 3 * BLOCK)) for n in range(1)]
        with pytest.raises(errors.NoRoom):
            await here.fetcher.prefetch(cluster.origin, more[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "level"), [("connect", "INFO"), ("refused", "WARNING"), ("corrupt", "WARNING")]
)
@in_trio
async def test_a_peer_that_is_given_up_is_told_of_once_and_why(
    cache_dir: Path, caplog: pytest.LogCaptureFixture, kind: Kind, level: str
) -> None:
    caplog.set_level("INFO", "cachefs.peers.cluster")
    async with nodes(cache_dir, 2) as cluster:
        owner, reader = cluster
        object_id = cluster.put_owned_by(owner, "k", content(1, BLOCK))
        now = trio.current_time()
        reader.cluster._now = lambda: now
        (asked,) = reader.cluster.candidates(object_id.digest, 0)

        async def fail(*_: object, **__: object) -> float:
            raise PeerFailed(kind, "the clock is off")

        give, reader.client.read = reader.client.read, fail  # type: ignore[method-assign, assignment]
        for _ in range(5):
            now += 40
            with pytest.raises(PeerFailed):
                await reader.cluster.read(asked, object_id, 0, BLOCK, Nobody(), sink_waits=False)
        reader.client.read = give  # type: ignore[method-assign]
        await reader.cluster.read(asked, object_id, 0, BLOCK, Nobody(), sink_waits=False)
        told = [(r.levelname, r.message) for r in caplog.records if r.name == "cachefs.peers.cluster"]
        name = owner.address
        assert told == [
            (level, f"peer {name} is left alone for a while: the clock is off"),
            ("INFO", f"peer {name} is back"),
        ]


class Nobody:
    def write_block(self, data: memoryview, checksum: int) -> None:
        pass

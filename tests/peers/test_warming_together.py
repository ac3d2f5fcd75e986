"""What a warm-up over several nodes relies on: whom it has bring what, who stands in for whom, and under which address."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from cachefs.base.names import ObjectId
from cachefs.peers.membership import Sighting
from cachefs.peers.wire import Address
from tests.fetch.scripted import content, in_trio
from tests.peers.nodes import Node, Nodes, nodes
from tests.store.lab import BLOCK, EXTENT, until


async def bring_all(node: Node, object_id: ObjectId) -> int:
    """As a job with --cluster does it: the bytes that only others have now."""

    async def here(start: int, stop: int) -> None:
        await node.fetcher.prefetch(node.origin, object_id, start, stop, prefetched=False, as_own=True)  # type: ignore[arg-type]

    return await node.fetcher.prefetch_everywhere(object_id, 0, object_id.size, here)


def holders(cluster: Nodes, object_id: ObjectId, extent: int) -> set[str]:
    """The nodes that have all of it, and not only as remote-owned."""
    found = set()
    for node in cluster:
        catalog = node.store.catalog
        copy = catalog.copy(node.store.object(object_id), node.store.tiers[0].number, extent)
        if copy is not None and copy.key not in node.store.eviction.remote_owned:
            first = extent * (EXTENT // BLOCK)
            blocks = range(first, min(first + EXTENT // BLOCK, -(-object_id.size // BLOCK)))
            if all(node.store.has(node.store.object(object_id), block) for block in blocks):
                found.add(node.handshake.node)
    return found


def order(cluster: Nodes, object_id: ObjectId, extent: int, count: int) -> tuple[str, ...]:
    return cluster[0].cluster.membership.ring.owners(object_id.digest, extent, count)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@in_trio
async def test_as_many_nodes_as_replicas_have_it_and_the_store_gave_it_once(
    cache_dir: Path, replicas: int
) -> None:
    async with nodes(cache_dir, 4, replicas=replicas) as cluster:
        size = 8 * EXTENT + 3 * BLOCK + 7
        object_id = cluster.origin.put("large", content(1, size))
        elsewhere = await bring_all(cluster[0], object_id)
        await cluster.quiet()
        own = 0
        for extent in range(9):
            assert holders(cluster, object_id, extent) == set(order(cluster, object_id, extent, replicas))
            if "node-0" in order(cluster, object_id, extent, replicas):
                own += min(EXTENT, size - extent * EXTENT)
        assert elsewhere == size - own
        assert cluster.origin.delivered == size
        cluster.check_accounts()


@in_trio
async def test_past_a_dead_owner_its_successor_brings_or_we_do(cache_dir: Path) -> None:
    async with nodes(cache_dir, 3) as cluster:
        dead, here, _ = cluster
        size = 12 * EXTENT
        object_id = cluster.origin.put("large", content(1, size))
        dead.die()
        await trio.lowlevel.checkpoint()
        await bring_all(here, object_id)
        await cluster.quiet()
        for extent in range(12):
            standing = [name for name in order(cluster, object_id, extent, 3) if name != dead.handshake.node]
            assert holders(cluster, object_id, extent) == {standing[0]}
        assert cluster.origin.delivered == size
        (row,) = [row for row in here.cluster.status() if row["name"] == str(dead.address)]
        assert row["state"] != "healthy", "bringing judges, too"


@in_trio
async def test_alone_among_the_dead_all_is_brought_here(cache_dir: Path) -> None:
    async with nodes(cache_dir, 3) as cluster:
        here, *dead = cluster
        object_id = cluster.origin.put("large", content(1, 6 * EXTENT))
        for node in dead:
            node.die()
        await trio.lowlevel.checkpoint()
        assert await bring_all(here, object_id) == 0
        assert here.fetcher.whole(object_id)


@in_trio
async def test_who_is_greeted_is_judged_so_that_successors_keep_the_share_of_the_dead(
    cache_dir: Path,
) -> None:
    async with nodes(cache_dir, 4) as cluster:
        dead, *others = cluster
        ids = [cluster.put_owned_by(dead, f"f{n}-", content(n, BLOCK)) for n in range(12)]
        assert not any(node.owns(object_id) for node in others for object_id in ids)
        assert await others[0].cluster.probe() == []
        dead.die()
        await trio.lowlevel.checkpoint()
        for node in others:
            assert await node.cluster.probe() == [str(dead.address)]
        # Each of them has one keeper, the same in everybody's view, and may be asked for it even by who knows of no death.
        for object_id in ids:
            keepers = [node for node in others if node.owns(object_id)]
            assert len(keepers) == 1
            assert keepers[0].cluster.may_fetch(object_id.digest, 0, 0)


@in_trio
async def test_who_never_answered_is_told_of_too(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2) as cluster:
        here, _ = cluster
        nobody = Sighting(Address("203.0.113.9", 7070), None)
        sightings = [Sighting(node.address, node.handshake) for node in cluster]
        here.cluster.membership._report([*sightings, nobody])
        assert await here.cluster.probe() == ["203.0.113.9:7070"]


@in_trio
async def test_of_two_addresses_the_one_that_answers_is_asked(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2) as cluster:
        here, there = cluster
        with trio.socket.socket() as closed:
            await closed.bind(("127.0.0.1", 0))
            dead_end = Address("127.0.0.1", closed.getsockname()[1])
            first = min(dead_end, there.address)
            places = [Sighting(place, there.handshake) for place in (dead_end, there.address)]
            here.cluster.membership._report([Sighting(here.address, here.handshake), *places])
            assert here.cluster.membership.members["node-1"].addresses[0] == first
            for number in range(5):
                object_id = cluster.put_owned_by(there, f"f{number}-", content(number, BLOCK))
                assert await here.read(object_id) == content(number, BLOCK)
        await cluster.quiet()
        await until(lambda: there.metrics.peer_served == 5)  # the last byte comes before that
        assert there.metrics.peer_served == 5
        (row,) = [row for row in here.cluster.status() if not row["here"]]
        assert row["state"] == "healthy" and row["bytes_in"] == 5 * BLOCK
        assert set(row["addresses"]) == {str(dead_end), str(there.address)}
        # Of other kinds there may be some: a busy machine's peer is late.
        assert row["failures"].get("connect", 0) <= 1, "the address that answered is the first from then on"


@in_trio
async def test_who_is_back_under_another_address_is_asked_at_once(cache_dir: Path) -> None:
    async with nodes(cache_dir, 2) as cluster:
        here, there = cluster
        elsewhere = Address("127.0.0.1", 1)
        mine = Sighting(here.address, here.handshake)
        here.cluster.membership._report([mine, Sighting(elsewhere, there.handshake)])
        assert await here.cluster.probe() == [str(elsewhere)]
        owned = cluster.put_owned_by(there, "f", content(1, BLOCK))
        here.cluster.membership._report([mine, Sighting(there.address, replace(there.handshake, life="new"))])
        assert await here.read(owned) == content(1, BLOCK)
        await until(lambda: there.metrics.peer_served == 1)
        assert there.metrics.peer_served == 1

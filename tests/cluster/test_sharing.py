"""What a cluster is for: the store is asked once for what many nodes read, and each node's cache is a part of one."""

from __future__ import annotations

import pytest

from bench.lab.netns import Host, StoreOn
from tests.cluster.nodes import Clustered, Dataset, Reading
from tests.mount.mounts import eventually

MIB = 1 << 20


@pytest.mark.long
def test_four_nodes_read_everything_and_the_store_sends_it_once(
    data: Dataset, hosts: list[Host], cluster_of: Clustered
) -> None:
    data.many(250, 300_000)
    for number in range(2):
        # Three extents each, of which several nodes own one.
        data.put(f"large/{number}.bin", 40 * MIB + 12_345)
    cluster = cluster_of(data, hosts, ram="256M").start()
    cluster.read_all()
    assert data.sent() <= 1.02 * data.size
    for metrics in cluster.metrics():
        # A node holds a quarter of the little files, and of the six extents what chance gives it; others sent the rest.
        assert 0.05 * data.size < metrics["origin_bytes"] < 0.7 * data.size
        assert metrics["peer_bytes_in"] >= 0.3 * data.size and metrics["peer_bytes_out"] > 0
    cluster.assert_counters_reconcile()


@pytest.mark.long
def test_four_caches_of_a_quarter_hold_all_of_it(
    data: Dataset, lab: StoreOn, hosts: list[Host], cluster_of: Clustered
) -> None:
    count, size = 2000, 80 << 10
    data.many(count, size)
    quarter = count * size // 4
    cluster = cluster_of(data, hosts, ram=quarter // 16, cache_size=quarter - quarter // 16).start()
    cluster.read_all()
    # What there is no room for goes when all have had it; a node that lags behind has some of it fetched once more.
    assert data.sent() <= 1.05 * data.size
    cluster.assert_counters_reconcile()
    # Nobody owns exactly a quarter: with so few files, some own up to a tenth more. A tenth of RAM is left to what comes.
    # What there is no room for is fetched 2.2 times an epoch (simulated), and at most once for each of the four.
    room = quarter - quarter // 16 // 10
    too_much = sum(max(0, metrics["origin_bytes"] - room) for metrics in cluster.metrics())
    for epoch in (1, 2):
        lab.reset()
        cluster.read_all(seed=epoch)
        assert data.sent() <= max(0.05 * data.size, 4 * too_much)
    assert cluster.failures() == {}


@pytest.mark.long
def test_a_checkpoint_is_loaded_by_all_processes_at_once(
    data: Dataset, lab: StoreOn, hosts: list[Host], cluster_of: Clustered
) -> None:
    checkpoint = data.put("checkpoint.pt", 128 * MIB + 1)
    lab.shape(latency_ms=10, bandwidth=100e6)
    cluster = cluster_of(data, hosts, ram="256M").start()
    readings = [Reading(node, [checkpoint]) for node in cluster.nodes for _ in range(6)]
    try:
        said = [reading.said() for reading in readings]
    finally:
        for reading in readings:
            reading.kill()
    assert [(s.errors, s.bytes) for s in said] == [([], data.size)] * 24
    assert data.sent() <= 1.01 * data.size
    cluster.assert_counters_reconcile()


def test_a_node_that_shares_nothing_still_reads_from_the_others(
    data: Dataset, hosts: list[Host], cluster_of: Clustered
) -> None:
    data.many(60, 200_000)
    cluster = cluster_of(data, hosts[:3]).start()
    guest = cluster_of(
        data, hosts[3:], peers=cluster.nodes[0].options["peers"], peer_listen=None, no_sharing=True
    )
    guest.start()
    cluster.read_all(nodes=guest.nodes)
    assert data.sent() == data.size
    assert guest.total("origin_bytes") == 0 and guest.total("peer_bytes_out") == 0
    assert guest.total("peer_bytes_in") == data.size
    eventually(lambda: cluster.total("peer_bytes_out") == data.size, "what was sent is counted", 5)


def test_without_peers_each_node_asks_the_store(
    data: Dataset, hosts: list[Host], cluster_of: Clustered
) -> None:
    # What the other tests' figures are to be held against.
    data.many(20, 100_000)
    cluster = cluster_of(data, hosts[:2], peers=None, peer_listen=None, peer_key_file=None).start()
    cluster.read_all()
    assert data.sent() == 2 * data.size

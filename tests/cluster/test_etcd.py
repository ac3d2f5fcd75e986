"""Nodes that find each other in an etcd of three members, one of which dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lab.netns import Host, StoreOn
from cachefs.peers.etcd import LEASE_S
from tests.cluster.etcd import Etcd
from tests.cluster.nodes import Cluster, Clustered, Dataset, eventually
from tests.peers.cluster import needs_etcd

pytestmark = needs_etcd


@pytest.fixture
def etcd(hosts: list[Host], tmp_path: Path) -> Iterator[Etcd]:
    running = Etcd(hosts[:3], tmp_path)
    yield running
    running.stop()


@pytest.mark.long
def test_members_come_and_go_and_so_does_the_leader_of_etcd(
    data: Dataset, lab: StoreOn, hosts: list[Host], etcd: Etcd, cluster_of: Clustered
) -> None:
    early = data.many(160, 250_000, "early")
    late = data.many(160, 100_000, "late")
    cluster = cluster_of(data, hosts, peers=etcd.peers, ram="256M")
    *first, joining = cluster.nodes
    three = Cluster(data, first).start()
    eventually(lambda: three.peers_listed() == [3, 3, 3], "three see each other")
    three.read_all(early)
    assert data.sent() <= 1.02 * sum(file.size for file in early)

    # The leader dies, and somebody joins while all read.
    lab.reset()
    lab.shape(bandwidth=20e6)
    etcd.kill(etcd.leader())
    joining.allowed.append("not among its peers")  # nobody tells it until there is a leader again
    for node in cluster.nodes:
        # How long an election takes is the machine's to say.
        node.allowed.append(r"cannot (read members|register) in etcd: .*(no leader|does not answer)")
    with three.reading(late) as readings:
        joining.start()
        said = [reading.said() for reading in readings]
    assert not any(s.errors for s in said)
    eventually(lambda: cluster.peers_listed() == [4] * 4, "four see each other")
    cluster.read_all(late)
    cluster.read_all(early)
    assert joining.metrics()["peer_bytes_in"] > 0
    # Only what changed its owner came again, once: a quarter of it all, and what chance adds.
    assert data.sent() <= 1.35 * data.size

    # Who stops says so; who is killed is gone with its lease.
    joining.stop()
    eventually(lambda: three.peers_listed() == [3, 3, 3], "the one that stopped has left", LEASE_S / 2)
    first[2].kill()
    two = Cluster(data, first[:2])
    eventually(lambda: two.peers_listed() == [2, 2], "the one that was killed has left")
    two.read_all(late)

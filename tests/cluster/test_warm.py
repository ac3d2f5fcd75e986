"""Warming a cluster: every replica is made, whoever is dead; and one node may die afterwards."""

from __future__ import annotations

import pytest

from bench.lab.netns import Host, StoreOn
from tests.cluster.nodes import Cluster, Clustered, Dataset, Node, eventually

pytestmark = pytest.mark.long

MIB = 1 << 20


def put_all(data: Dataset) -> None:
    data.many(60, 150_000)
    data.put("large.bin", 50 * MIB + 17)  # four extents


def warm(node: Node, *words: str) -> str:
    done = node.cli("warm", *words, node.path)
    assert done.returncode == 0, done.stderr
    return done.stderr


def known(cluster: Cluster) -> None:
    count = len(cluster.nodes)
    eventually(lambda: cluster.peers_listed() == [count] * count, "they know each other")


@pytest.mark.parametrize("how", ["read", "warm", "warm --cluster"])
def test_with_two_replicas_one_node_may_die(
    data: Dataset, lab: StoreOn, hosts: list[Host], cluster_of: Clustered, how: str
) -> None:
    put_all(data)
    cluster = cluster_of(data, hosts[:3], replicas=2, prefetch="off").start()
    known(cluster)
    if how == "read":
        cluster.read_all()
    else:
        for node in cluster.nodes if how == "warm" else cluster.nodes[:1]:
            warm(node, *how.split()[1:])
    assert data.sent() <= 1.02 * data.size, "once, however many keep it"
    cluster.nodes[1].kill()
    lab.reset()
    cluster.read_all(nodes=[cluster.nodes[0], cluster.nodes[2]])
    assert data.sent() == 0


@pytest.mark.parametrize("how", ["on each", "--cluster"])
def test_a_dead_node_s_share_is_warmed_by_its_successors(
    data: Dataset, lab: StoreOn, hosts: list[Host], cluster_of: Clustered, how: str
) -> None:
    put_all(data)
    cluster = cluster_of(data, hosts[:3], prefetch="off").start()
    known(cluster)
    one, dead, three = cluster.nodes
    dead.kill()
    said = warm(one, "--cluster") if how == "--cluster" else warm(one) + warm(three)
    assert f"{dead.name} does not answer" in said
    assert data.sent() <= 1.02 * data.size
    lab.reset()
    cluster.read_all(nodes=[one, three])
    assert data.sent() == 0

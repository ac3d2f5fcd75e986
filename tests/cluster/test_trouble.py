"""Nodes that die, hang, come late or cannot be reached, while all the others read: no reader fails, no byte is wrong, and
the store is asked again only for what the trouble took away."""

from __future__ import annotations

import time

import pytest

from bench.lab.netns import Host, Network, StoreOn
from tests.cluster.nodes import Cluster, Clustered, Dataset, Node, Reading, Said, eventually
from tests.cluster.reader import File

SHARE = 0.35
"""Of the data one of four nodes owns at most: a quarter, and what chance adds."""

BACK_S = 40.0
"""For a node that is back to be asked again: the longest that its peers leave it alone, and a little."""


@pytest.fixture
def early(data: Dataset) -> list[File]:
    """Read while there is trouble."""
    return data.many(320, 250_000, "early")


@pytest.fixture
def late(data: Dataset) -> list[File]:
    """Read when it is over."""
    # A folder for every few: whoever reads one of them is not brought all the others.
    return [file for n in range(60) for file in data.many(4, 20_000, f"late/{n}")]


def size_of(files: list[File]) -> int:
    return sum(file.size for file in files)


def until_asked_again(cluster: Cluster, node: Node, asking: list[Node], files: list[File]) -> None:
    """Read a few at a time until this node serves again."""
    before = node.metrics()["peer_served"]
    batches = iter([files[at : at + 4] for at in range(0, len(files), 4)])

    def served() -> bool:
        time.sleep(0.5)
        cluster.read_all(next(batches), nodes=asking[:1])
        return node.metrics()["peer_served"] > before

    eventually(served, "the node is asked again", BACK_S)


@pytest.mark.long
def test_an_owner_is_killed_while_it_sends_and_returns(
    data: Dataset,
    early: list[File],
    late: list[File],
    lab: StoreOn,
    hosts: list[Host],
    cluster_of: Clustered,
) -> None:
    lab.shape(bandwidth=30e6)
    cluster = cluster_of(data, hosts, ram="256M").start()
    victim, *others = cluster.nodes
    with cluster.reading(early, nodes=others) as readings:
        eventually(lambda: victim.metrics()["peer_bytes_out"] > 0.1 * size_of(early), "it sends")
        victim.kill()
        assert not any(reading.done for reading in readings)
        said = [reading.said() for reading in readings]
    assert [(s.errors, s.bytes) for s in said] == [([], size_of(early))] * 3
    assert data.sent() <= (1 + SHARE) * size_of(early)
    lab.shape(bandwidth=0)
    victim.start()
    until_asked_again(cluster, victim, others, late)
    cluster.read_all(late)
    cluster.read_all(early)


@pytest.mark.long
def test_a_peer_hangs_and_goes_on(
    data: Dataset,
    early: list[File],
    late: list[File],
    lab: StoreOn,
    hosts: list[Host],
    cluster_of: Clustered,
) -> None:
    lab.shape(bandwidth=30e6)
    cluster = cluster_of(data, hosts, ram="256M").start()
    victim, *others = cluster.nodes
    with cluster.reading(early, nodes=others) as readings:
        eventually(lambda: victim.metrics()["peer_bytes_out"] > 0.1 * size_of(early), "it sends")
        victim.pause()
        victim.allowed.append("broken off")  # replies whose time is over when it goes on
        said = [reading.said() for reading in readings]
    assert [(s.errors, s.bytes) for s in said] == [([], size_of(early))] * 3
    assert data.sent() <= (1 + SHARE) * size_of(early)
    lab.shape(bandwidth=0)
    victim.resume()
    until_asked_again(cluster, victim, others, late)
    cluster.read_all(late)


@pytest.mark.long
def test_a_node_joins_while_all_others_read(
    data: Dataset,
    early: list[File],
    late: list[File],
    lab: StoreOn,
    hosts: list[Host],
    cluster_of: Clustered,
) -> None:
    lab.shape(bandwidth=30e6)
    cluster = cluster_of(data, hosts, ram="256M")
    joining, *others = cluster.nodes
    Cluster(data, others).start()
    with cluster.reading(early, nodes=others) as readings:
        eventually(lambda: data.sent() > 0.2 * size_of(early), "they read")
        joining.start()
        said = [reading.said() for reading in readings]
    assert [(s.errors, s.bytes) for s in said] == [([], size_of(early))] * 3
    cluster.read_all(early)
    # What others had fetched of its share before it came, it fetches again.
    assert data.sent() <= (1 + SHARE) * size_of(early)
    lab.shape(bandwidth=0)
    until_asked_again(cluster, joining, others, late)


@pytest.mark.long
def test_two_nodes_do_not_reach_each_other(
    data: Dataset,
    early: list[File],
    late: list[File],
    lab: StoreOn,
    network: Network,
    hosts: list[Host],
    cluster_of: Clustered,
) -> None:
    lab.shape(bandwidth=30e6)
    cluster = cluster_of(data, hosts, ram="256M").start()
    one, other, *_ = cluster.nodes
    with cluster.reading(early) as readings:
        eventually(lambda: data.sent() > 0.2 * size_of(early), "they read")
        network.divide(one.host, other.host)
        said = [reading.said() for reading in readings]
    assert [(s.errors, s.bytes) for s in said] == [([], size_of(early))] * 4
    # Each has the share of the other from an successor.
    assert data.sent() <= (1 + 2 * SHARE) * size_of(early)
    network.heal()
    lab.shape(bandwidth=0)
    until_asked_again(cluster, other, [one], late)


@pytest.mark.long
def test_a_node_is_cut_off_from_everything(
    data: Dataset,
    early: list[File],
    late: list[File],
    lab: StoreOn,
    network: Network,
    hosts: list[Host],
    cluster_of: Clustered,
) -> None:
    lab.shape(bandwidth=30e6)
    cluster = cluster_of(data, hosts, ram="256M").start()
    lonely, *others = cluster.nodes
    known = data.put("known.bin", 100_000)
    for node in cluster.nodes:
        node.refresh()
    cluster.read_all([known])
    with cluster.reading(early, nodes=others) as readings:
        eventually(lambda: data.sent() > 0.2 * size_of(early), "they read")
        network.cut(lonely.host)
        lonely.allowed += ["gave up after 5 s without progress", "has not answered for", "answers again"]
        lonely_said = said_of(lonely, [known, late[0]])
        said = [reading.said() for reading in readings]
    assert [(s.errors, s.bytes) for s in said] == [([], size_of(early))] * 3
    assert data.sent() <= known.size + (1 + SHARE) * size_of(early)
    # Cut off, it has what it has, and says of the rest that it cannot be had.
    assert (lonely_said.bytes, len(lonely_said.errors)) == (known.size, 1)
    network.heal()
    lab.shape(bandwidth=0)
    until_asked_again(cluster, lonely, others, late)
    cluster.read_all(late)


def said_of(node: Node, files: list[File]) -> Said:
    reading = Reading(node, files)
    try:
        return reading.said()
    finally:
        reading.kill()

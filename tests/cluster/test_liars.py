"""A member that lies: its share is read from the store, and no reader ever notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lab.netns import Host, static_peers
from cachefs.peers.auth import read_key
from tests.cluster.liar import LIES, Lie, honest, lying
from tests.cluster.nodes import PORT, Clustered, Dataset

FILES, SIZE = 40, 1_500_000  # two blocks each


def test_an_honest_peer_of_this_kind_is_believed(
    data: Dataset, hosts: list[Host], key_file: Path, cluster_of: Clustered
) -> None:
    # Without this, the other tests would say nothing.
    data.many(FILES, SIZE)
    with lying(hosts[1], read_key(key_file), honest) as peer:
        cluster = cluster_of(data, hosts[:1], peers=static_peers(hosts[:2], PORT)).start()
        cluster.read_all()
    metrics = cluster.nodes[0].settled()
    assert 0.2 * data.size < metrics["peer_bytes_in"] < 0.8 * data.size
    assert data.sent() == metrics["origin_bytes"] == data.size - metrics["peer_bytes_in"]
    assert peer.asked >= metrics["peer_bytes_in"] // SIZE and metrics["peer_failures"] == 0


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lie, id=name, marks=[] if name == "flipped" else [pytest.mark.long])
        for name, lie in LIES.items()
    ],
)
def test_who_lies_is_not_believed(
    lie: Lie, data: Dataset, hosts: list[Host], key_file: Path, cluster_of: Clustered
) -> None:
    data.many(FILES, SIZE)
    with lying(hosts[1], read_key(key_file), lie) as peer:
        cluster = cluster_of(data, hosts[:1], peers=static_peers(hosts[:2], PORT)).start()
        (said,) = cluster.read_all()
    metrics = cluster.nodes[0].settled()
    assert peer.asked > 0 and metrics["peer_failures"] > 0
    # Whole blocks before a lie are right, and kept: the store sends what is missing, and nothing twice.
    assert data.sent() == metrics["origin_bytes"] == data.size - metrics["peer_bytes_in"]
    assert metrics["peer_bytes_in"] < 0.5 * data.size
    # A few deadlines, and then it is left alone.
    assert said.seconds < 20

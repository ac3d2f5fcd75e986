"""Hosts far from each other, over wires that lose packets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lab.netns import Host, Network, StoreOn
from tests.cluster.nodes import Clustered, Dataset, eventually


@pytest.fixture
def far() -> Iterator[list[Host]]:
    with Network(4, delay_ms=5, loss=0.005) as network:
        yield network.hosts


@pytest.fixture
def store(far: list[Host], tmp_path: Path) -> Iterator[StoreOn]:
    with StoreOn(far[3], tmp_path / "far") as store:
        yield store


@pytest.mark.long
def test_a_slow_and_lossy_network_costs_time_and_little_else(
    far: list[Host], store: StoreOn, cluster_of: Clustered
) -> None:
    data = Dataset(store, "far")
    data.many(60, 150_000)
    data.put("large.bin", 5_000_000)
    cluster = cluster_of(data, far[:3], endpoint_url=store.endpoint).start()
    # A lost handshake takes its time.
    eventually(lambda: cluster.peers_listed() == [3] * 3, "all see each other")
    cluster.read_all()
    # A peer that is late is passed over, and then its blocks come twice.
    assert data.sent() <= 1.3 * data.size
    assert cluster.total("peer_bytes_in") > data.size

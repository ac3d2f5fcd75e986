"""Fixtures of the tests over several hosts: the hosts, a lab store on one of them, and clusters that clean up.

The hosts and the store are made once. A cluster is made for each test: what a test counts begins with empty caches.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.lab.netns import Host, Network, StoreOn, why_not
from tests.cluster.nodes import Cluster, Clustered, Dataset, clustered
from tests.mount.conftest import _why_not as why_no_mount
from tests.mount.mounts import Mount, Watchdog

HERE = Path(__file__).parent
HOSTS = 5
"""Of the network that tests share; the store has the last one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    reason = (why_not() or why_no_mount()) if ours else ""
    for item in ours:
        item.add_marker(pytest.mark.root)
        item.add_marker(pytest.mark.mount)
        item.add_marker(pytest.mark.alone)  # a peer has a quarter of a second to answer
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def runtime_directory() -> Iterator[Path]:
    """Sockets of our own. A socket's path is short, so this is not below pytest's directories."""
    with tempfile.TemporaryDirectory(prefix="cf-") as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", place)
        patch.setenv("XDG_CACHE_HOME", f"{place}/cache")
        yield Path(place)


@pytest.fixture(scope="session")
def the_network() -> Iterator[Network]:
    with Network(HOSTS) as network:
        yield network


@pytest.fixture
def network(the_network: Network) -> Iterator[Network]:
    """All cables are in."""
    yield the_network
    the_network.heal()


@pytest.fixture
def hosts(network: Network) -> list[Host]:
    """Those for daemons."""
    return network.hosts[:-1]


@pytest.fixture(scope="session")
def the_lab(the_network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreOn]:
    with StoreOn(the_network.hosts[-1], tmp_path_factory.mktemp("lab")) as store:
        yield store


@pytest.fixture
def lab(the_lab: StoreOn) -> Iterator[StoreOn]:
    """The store, well behaved, with counters at nothing."""
    the_lab.reset()
    yield the_lab
    the_lab.clear_faults()
    the_lab.shape(latency_ms=0, bandwidth=0)


_numbers = itertools.count(1)


@pytest.fixture
def data(lab: StoreOn) -> Dataset:
    """An empty bucket."""
    return Dataset(lab, f"data-{next(_numbers)}")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """What all nodes know."""
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text("known to all the nodes of a test")
    return path


@pytest.fixture
def cluster_of(tmp_path: Path, key_file: Path, network: Network, lab: StoreOn) -> Iterator[Clustered]:
    """A function: data set, hosts, options → a `Cluster`, not started. At the end nothing of it may be left, and no daemon
    may have complained of anything that its test did not allow."""
    made: list[Mount] = []

    def make(data: Dataset, hosts: list[Host], **options: Any) -> Cluster:
        place = tmp_path / f"cluster{len(made)}"
        cluster = clustered(data, hosts, place, lab.env, {"peer_key_file": key_file, **options})
        made.extend(cluster.nodes)
        return cluster

    with Watchdog(made) as watchdog:
        yield make
        lab.clear_faults()
        network.heal()
    wrong = [f"{node.path}: {line}" for node in made for line in node.finish()]
    assert not wrong, "\n".join(wrong)
    assert not watchdog.bitten, "the test hung: its daemons were killed"

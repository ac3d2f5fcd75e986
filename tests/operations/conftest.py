"""Operating a mount for real: a machine with systemd, a container engine, users without rights.

What only looks at files runs with all tests. The rest is marked `operations`, needs root, builds a Debian of its own and
is run by `scripts/test-operations`, which installs what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lab.client import LabStore
from tests.operations.debian import PLACE, Rootfs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("CACHEFS_OPERATIONS") == "1":
        return
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("operations"):
            item.add_marker(pytest.mark.skip(reason="scripts/test-operations runs it"))


@pytest.fixture(scope="session")
def rootfs() -> Rootfs:
    """A Debian on which `scripts/install` has installed this cachefs."""
    PLACE.mkdir(parents=True, exist_ok=True)
    rootfs = Rootfs(PLACE)
    rootfs.build()
    return rootfs


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabStore]:
    with LabStore(tmp_path_factory.mktemp("lab")) as store:
        yield store

"""Fixtures shared by the origin's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.origin.rgw import Rgw
from tests.origin.servers import Azurite, Directory, Lab, Memory, Moto, Server, Web


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the credentials and endpoints of the user who runs the tests."""
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Started on demand by `server`, ended with the session."""
    running: dict[str, Server] = {}
    yield running
    for server in running.values():
        server.stop()


@pytest.fixture
def start(
    servers: dict[str, Server], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[object]:
    """A function: server by name, with its environment set for this test."""

    def make(name: str) -> Server:
        root: Path = tmp_path_factory.mktemp(name)
        if name not in servers:
            match name:
                case "moto":
                    servers[name] = Moto()
                case "lab":
                    servers[name] = Lab(root)
                case "lab-google":
                    servers[name] = Lab(root, "gs")
                case "azurite":
                    servers[name] = Azurite()
                case "rgw":
                    servers[name] = Rgw()
                case "web":
                    servers[name] = Web(root)
                case "directory":
                    servers[name] = Directory(root)
                case "memory":
                    servers[name] = Memory()
        for variable, value in servers[name].env.items():
            monkeypatch.setenv(variable, value)
        return servers[name]

    yield make


@pytest.fixture
def lab(start: object) -> Iterator[Lab]:
    """The lab store, without faults and with counters at nothing."""
    server = start("lab")  # type: ignore[operator]
    server.store.clear_faults()
    server.store.credentials()
    server.store.reset()
    yield server
    server.store.clear_faults()
    server.store.credentials()
    server.store.quirks()

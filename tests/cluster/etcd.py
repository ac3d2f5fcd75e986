"""An etcd of three members, each on a host of its own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bench.lab.netns import Host
from tests.peers.cluster import ETCD

CLIENTS, PEERS = 2379, 2380


class Etcd:
    """Elections are short, so that losing a leader takes a second."""

    def __init__(self, hosts: Sequence[Host], root: Path) -> None:
        self.hosts = list(hosts)
        self._root = root
        self._running: dict[Host, subprocess.Popen[bytes]] = {}
        try:
            for host in hosts:
                self._start(host)
            for host in hosts:
                self._wait_for(host)
        except BaseException:
            self.stop()
            raise

    @property
    def peers(self) -> str:
        """What `--peers` says."""
        return "etcd:" + ",".join(f"http://{host.address}:{CLIENTS}" for host in self.hosts)

    def _start(self, host: Host) -> None:
        assert ETCD is not None
        cluster = ",".join(f"{other.name}=http://{other.address}:{PEERS}" for other in self.hosts)
        clients, peers = (f"http://{host.address}:{port}" for port in (CLIENTS, PEERS))
        command = [
            ETCD,
            "--name",
            host.name,
            "--data-dir",
            str(self._root / host.name),
            "--listen-client-urls",
            clients,
            "--advertise-client-urls",
            clients,
            "--listen-peer-urls",
            peers,
            "--initial-advertise-peer-urls",
            peers,
            "--initial-cluster",
            cluster,
            "--heartbeat-interval",
            "50",
            "--election-timeout",
            "500",
        ]
        with open(self._root / f"{host.name}.log", "wb") as log, host.inside():
            self._running[host] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def _wait_for(self, host: Host) -> None:
        """Until it answers, leader and all."""
        until = time.monotonic() + 30
        while True:
            try:
                if self._status(host).get("leader", "0") != "0":
                    return
            except OSError:
                pass
            assert time.monotonic() < until, (self._root / f"{host.name}.log").read_text()[-3000:]
            time.sleep(0.05)

    def _status(self, host: Host) -> dict[str, Any]:
        with host.inside():
            connection = HTTPConnection(host.address, CLIENTS, timeout=2)
            try:
                connection.request("POST", "/v3/maintenance/status", b"{}")
                status: dict[str, Any] = json.loads(connection.getresponse().read())
            finally:
                connection.close()
        return status

    def leader(self) -> Host:
        for host in self._running:
            status = self._status(host)
            if status["header"]["member_id"] == status["leader"]:
                return host
        raise AssertionError("nobody leads")

    def kill(self, host: Host) -> None:
        process = self._running.pop(host)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for host in list(self._running):
            self.kill(host)

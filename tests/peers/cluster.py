"""A real etcd on loopback: Debian's `etcd-server`, with data in a temporary directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from cachefs.peers.settings import Endpoint
from cachefs.peers.wire import Address
from tests.conftest import ON_CI, free_ports

ETCD = shutil.which("etcd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/bin")

needs_etcd = pytest.mark.skipif(
    ETCD is None and not ON_CI, reason="no etcd here: apt-get install etcd-server"
)


class Cluster:
    """`size` members. Leases and elections are short, so that losing a leader takes a second."""

    def __init__(
        self, root: Path, size: int = 3, arguments: Sequence[str] = (), scheme: str = "http"
    ) -> None:
        self._root = root
        self._arguments = list(arguments)
        self._scheme = scheme
        ports = free_ports(2 * size)
        self.clients, self._peers = ports[:size], ports[size:]
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(size):
            self.start(number)
        if scheme == "http":
            for number in range(size):
                self.wait_for(number)

    @property
    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(Address("127.0.0.1", port), self._scheme == "https") for port in self.clients]

    def start(self, number: int) -> None:
        assert ETCD is not None, "apt-get install etcd-server"
        urls = [f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peers)]
        client = f"{self._scheme}://127.0.0.1:{self.clients[number]}"
        peer = f"http://127.0.0.1:{self._peers[number]}"
        command = [
            ETCD,
            "--name",
            f"m{number}",
            "--data-dir",
            str(self._root / f"m{number}"),
            "--listen-client-urls",
            client,
            "--advertise-client-urls",
            client,
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            ",".join(urls),
            "--heartbeat-interval",
            "50",
            "--election-timeout",
            "500",
            *self._arguments,
        ]
        with open(self._root / f"m{number}.log", "ab") as output:
            # Its own group: a test's Ctrl-C is not for it.
            self._running[number] = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True
            )

    def wait_for(self, number: int) -> None:
        """Until it answers, leader and all."""
        deadline = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{self.clients[number]}/health", timeout=2
                ) as reply:
                    if b'"true"' in reply.read():
                        return
            except OSError:
                pass
            assert time.monotonic() < deadline, (self._root / f"m{number}.log").read_text()[-3000:]
            time.sleep(0.05)

    def kill(self, number: int) -> None:
        process = self._running.pop(number)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for number in list(self._running):
            self.kill(number)

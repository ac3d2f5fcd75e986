"""Daemons on hosts of their own, what they read, and the counters they keep: real commands, real mounts, real packets."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bench.lab.client import LabStore
from bench.lab.dataset import content
from bench.lab.netns import Host, static_peers
from tests.cluster.reader import File
from tests.mount.mounts import Completed, Mount, alive, eventually

PORT = 7070
ROOT = Path(__file__).resolve().parents[2]
READ_S = 60.0
"""Readers that take longer hang."""


class Dataset:
    """A bucket whose files' bytes are known."""

    def __init__(self, store: LabStore, name: str) -> None:
        self.store = store
        self.name = name
        self.files: list[File] = []
        store.bucket(name)

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def many(self, count: int, size: int, folder: str = "many") -> list[File]:
        """That many more files of one size; the store makes up their bytes when asked."""
        self.store.synthesize(self.name, f"{folder}/", count, size)
        names = [f"{folder}/name-{number:07d}.bin" for number in range(count)]
        return self._add([File(name, size, _digest(content(name, size))) for name in names])

    def put(self, name: str, size: int) -> File:
        """One more file."""
        data = content(f"{self.name}/{name}", size)
        self.store.put(self.name, name, data)
        return self._add([File(name, size, _digest(data))])[0]

    def _add(self, files: list[File]) -> list[File]:
        self.files += files
        return files

    def sent(self) -> int:
        """Bytes of bodies the store sent since the last reset."""
        return int(self.store.counters()["bytes_sent"].get("get", 0))


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True)
class Said:
    """What a reader found."""

    bytes: int
    seconds: float
    errors: list[str]


class Reading:
    """A reader process on a mount, at work."""

    def __init__(self, node: Mount, files: Iterable[File]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert self._process.stdin is not None
        json.dump({"root": str(node.path), "files": list(files)}, self._process.stdin)
        self._process.stdin.close()
        self._process.stdin = None

    @property
    def done(self) -> bool:
        return self._process.poll() is not None

    def said(self, timeout: float = READ_S) -> Said:
        """Wait for its end. Whatever it could read was right."""
        try:
            out, _ = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        assert self._process.returncode == 0
        said = json.loads(out)
        assert said["wrong"] == [], f"wrong bytes: {said['wrong'][:5]}"
        return Said(said["bytes"], said["seconds"], said["errors"])

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Node(Mount):
    """A mount whose daemon lives on a host."""

    def __init__(
        self, host: Host, place: Path, source: str, env: Mapping[str, str], options: Mapping[str, Any]
    ) -> None:
        super().__init__(place, source, env, {"peer_listen": f"{host.address}:{PORT}", **options})
        self.host = host

    @property
    def name(self) -> str:
        """As the others list it."""
        return f"{self.host.address}:{PORT}"

    def try_start(self, **more: Any) -> Completed:
        with self.host.inside():
            return super().try_start(**more)

    def pause(self) -> None:
        """It neither answers nor goes away, and its connections stay."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def finish(self) -> list[str]:
        for pid in self.pids:
            if alive(pid):
                os.kill(pid, signal.SIGCONT)
        return super().finish()


class Cluster:
    """Daemons over one data set, in the order of their hosts."""

    def __init__(self, data: Dataset, nodes: Sequence[Node]) -> None:
        self.data = data
        self.nodes = nodes
        self._failed: Counter[str] = Counter()

    def start(self) -> Cluster:
        """All at once. So some ask others who they are before those listen: such failures are not counted."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(lambda node: node.start(), self.nodes))
        self._failed = self._failures()
        return self

    def orders(self, files: Sequence[File] | None = None, seed: int = 0) -> list[list[File]]:
        """All files in an order of its own for each node."""
        files = self.data.files if files is None else files
        return [random.Random(f"{seed} {n}").sample(files, len(files)) for n in range(len(self.nodes))]

    @contextmanager
    def reading(
        self, files: Sequence[File] | None = None, seed: int = 0, nodes: Sequence[Node] | None = None
    ) -> Iterator[list[Reading]]:
        """A reader on each node. Those that are not waited for are ended."""
        nodes = self.nodes if nodes is None else nodes
        orders = self.orders(files, seed)
        readings = [Reading(node, order) for node, order in zip(nodes, orders, strict=False)]
        try:
            yield readings
        finally:
            for reading in readings:
                reading.kill()

    def read_all(
        self, files: Sequence[File] | None = None, seed: int = 0, nodes: Sequence[Node] | None = None
    ) -> list[Said]:
        """All files on each node, side by side; none may fail."""
        with self.reading(files, seed, nodes) as readings:
            said = [reading.said() for reading in readings]
        size = sum(file.size for file in (self.data.files if files is None else files))
        assert [(s.errors, s.bytes) for s in said] == [([], size)] * len(readings)
        return said

    def metrics(self) -> list[dict[str, int]]:
        """Of each node, once all have stopped moving."""
        for node in self.nodes:
            node.settled()
        return [node.settled() for node in self.nodes]

    def total(self, name: str) -> int:
        return sum(metrics[name] for metrics in self.metrics())

    def peers_listed(self) -> list[int]:
        """How many members each node sees."""
        return [len(node.ask("status")["peers"]["members"]) for node in self.nodes]

    def failures(self) -> dict[str, int]:
        """Requests to peers that failed since the start, by kind, over all nodes."""
        return dict(self._failures() - self._failed)

    def _failures(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for node in self.nodes:
            for row in (node.ask("status")["peers"] or {}).get("members", ()):
                total.update(row["failures"])
        return total

    def assert_counters_reconcile(self) -> None:
        """Every byte that a node has from a peer was sent by one, and all that the store sent was taken."""

        def agree() -> bool:
            metrics = self.metrics()
            return sum(m["peer_bytes_in"] for m in metrics) == sum(m["peer_bytes_out"] for m in metrics)

        # First, to know the kind: a reply that was given up is in no counter.
        assert self.failures() == {}, self.failures()
        # What is fetched ahead goes on, and the last byte of a reply comes before it is counted.
        eventually(agree, "every byte is counted on both sides", 5)
        eventually(lambda: self.total("origin_bytes") == self.data.sent(), "all that was sent is counted", 5)
        assert self.failures() == {}, self.failures()


Clustered = Callable[..., Cluster]


def clustered(
    data: Dataset, hosts: Sequence[Host], place: Path, env: Mapping[str, str], options: Mapping[str, Any]
) -> Cluster:
    """A daemon for each host, not started yet; unless told otherwise, all of them are listed."""
    options = {"peers": static_peers(hosts, PORT), **options}
    nodes = []
    for host in hosts:
        home = place / host.name
        home.mkdir(parents=True)
        nodes.append(Node(host, home, data.url, env, options))
    return Cluster(data, nodes)


__all__ = ["PORT", "Cluster", "Clustered", "Dataset", "Node", "Reading", "Said", "clustered", "eventually"]

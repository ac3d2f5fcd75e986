"""Several nodes: four daemons on hosts of their own (`bench.lab.netns`), and one store for all of them.

All hosts share the processors of this machine: they do the work of four daemons, their readers, the store and the kernel's
network. So rates that processors limit are lower than on four machines. The bytes that the store sends are counted, and do
not depend on that. The nodes share a key, as nodes on any address but the loopback must.
"""

from __future__ import annotations

import functools
import http.client
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import trio

from bench import training
from bench.epochs import BANDWIDTH, PAGE, below, whole_once
from bench.harness import Result, Series, interleave, number, scenario
from bench.lab.netns import Host, Network, StoreOn, static_peers, why_not
from bench.mounts import Cachefs, Unavailable
from bench.peers import AT_ONCE, HTTP, MIB, PLAIN, over_http, over_sockets, server
from bench.raw import RawClient
from bench.readers import sequential, share, together
from bench.workspace import LATENCY_MS, Processors, SpareMemory, Workspace
from cachefs.base.names import ObjectId
from cachefs.peers.auth import Signer, read_key
from cachefs.peers.client import Client
from cachefs.peers.wire import Address, BlockRequest
from cachefs.store.ram import provide, remove_ram

NODES = 4
PORT = 7070
WITH, WITHOUT = "with peers", "without"
WIRE, MOUNT = "daemon to client", "through the mount"
KEPT = "kept and read by the plain client"
ROOMY = ("--ram", "512M", "--keep-free", "0")
EXTENTS = 64
"""Objects of 16 MiB, so that their first part, which is read before the cluster knows that they are read whole, is a
sixteenth."""
HOLDS_ALL = ("--ram", "2G", "--keep-free", "0")
"""Options of a cache with space for twice the data."""


class Node(Cachefs):
    """A mount whose daemon runs on a host."""

    def __init__(self, host: Host, scratch: Path, lab: StoreOn, bucket: str, *options: str) -> None:
        super().__init__(scratch, lab, bucket, *options, name=host.name)
        self.host = host

    def start(self) -> None:
        with self.host.inside():
            super().start()


class Cluster:
    """The hosts, and the store on a further one. It has the workspace's data, with a shape or without."""

    def __init__(self, work: Workspace, nodes: int = NODES) -> None:
        self._work = work
        self._count = nodes

    def __enter__(self) -> Cluster:
        if reason := why_not():
            raise Unavailable(f"several hosts: {reason}")
        with ExitStack() as stack:
            network = stack.enter_context(Network(self._count + 1))
            *self.hosts, beyond = network.hosts
            self.place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._work.disk)))
            self.store = stack.enter_context(StoreOn(beyond, self.place / "store"))
            self.key = self.place / "key"
            self.key.touch(mode=0o600)
            self.key.write_bytes(b"known to all of the nodes")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, bucket: str) -> None:
        """Give the store a bucket of the workspace."""
        self.store.serve(bucket, self._work.tree(bucket))

    @contextmanager
    def shaped(self, bandwidth: float = BANDWIDTH) -> Iterator[None]:
        self.store.shape(latency_ms=LATENCY_MS, bandwidth=bandwidth)
        try:
            yield
        finally:
            self.store.shape(latency_ms=0, bandwidth=0)

    @contextmanager
    def nodes(self, bucket: str, *options: str, peers: bool = True) -> Iterator[list[Node]]:
        """A daemon on each host, started at the same time."""
        made = [self.node(host, bucket, *options, peers=self.hosts if peers else ()) for host in self.hosts]
        try:
            with ThreadPoolExecutor(len(made)) as pool:
                list(pool.map(lambda node: node.start(), made))
            yield made
        finally:
            for node in made:
                node.remove()

    def node(
        self,
        host: Host,
        bucket: str,
        *options: str,
        peers: Sequence[Host],
        listens: bool = True,
    ) -> Node:
        """A daemon that knows these members, not started yet."""
        words = list(options)
        if peers:
            words += ["--peers", static_peers(peers, PORT), "--peer-key-file", str(self.key)]
            words += ["--peer-listen", f"{host.address}:{PORT}"] if listens else ["--no-sharing"]
        return Node(host, self.place, self.store, bucket, *words)

    def sent(self) -> int:
        """Bytes of objects that the store has sent since the last reset, once it is idle."""
        before = -1
        until = time.monotonic() + 30
        while time.monotonic() < until:
            counters = self.store.counters()
            now = counters["bytes_sent"].get("get", 0)
            if now == before and not counters["in_flight"]:
                break
            before = now
            time.sleep(0.05)
        return int(before)


def _read_all(paths: Sequence[str]) -> None:
    for path in paths:
        whole_once(path)


def _epoch(nodes: Sequence[Node], keys: Sequence[str], seed: int) -> float:
    """Seconds until each node has read all files, each in its own order."""
    orders = [
        random.Random(f"{seed} {number}").sample(below(node.path, keys), len(keys))
        for number, node in enumerate(nodes)
    ]
    return together([functools.partial(_read_all, order) for order in orders])


def _counters(nodes: Sequence[Node], result: Result) -> None:
    sums = {
        name: sum(node.metrics()[name] for node in nodes)
        for name in ("peer_bytes_in", "peer_bytes_out", "peer_failures", "bypassed_blocks")
    }
    result.note("over all nodes: " + ", ".join(f"{name} {value:,}" for name, value in sums.items()))


# -- what the store sends --------------------------------------------------------------------------


@scenario("peers-epoch")
def peers_epoch(work: Workspace, rounds: int) -> Result:
    """Four nodes read a data set, each with a quarter of it as its cache: the bytes from the store."""
    result = Result()
    scale = work.scale
    # Small files, and many: what hashing gives one node beyond its quarter shrinks with the root of their number, and
    # real data sets have more than a benchmark has time for.
    count, size = 2 * scale.epoch_files, scale.epoch_size // 2
    keys = work.files("peers-epoch", ["train"], count, size)
    total = count * size
    quarter = count * -(-size // PAGE) * PAGE // NODES
    # A tenth of RAM is kept free for what comes, so a large share of it would make the cache smaller than a quarter.
    ram = quarter // 16
    options = ("--ram", f"{ram}B", "--cache-size", f"{quarter - ram}B", "--keep-free", "0")
    with Cluster(work) as cluster:
        cluster.show("peers-epoch")

        def epochs(number: int, *options: str) -> list[float]:
            """Bytes from the store divided by the data's, of each epoch."""
            shares = []
            with cluster.nodes("peers-epoch", *options) as nodes:
                for epoch in range(number):
                    cluster.store.reset()
                    seconds = _epoch(nodes, keys, epoch)
                    shares.append(cluster.sent() / total)
                    result.note(f"epoch {epoch + 1}: {NODES * count / seconds:,.0f} files/s over all nodes")
                _counters(nodes, result)
            return shares

        (roomy,) = epochs(1, *ROOMY)
        small = epochs(2, *options)
    result.series.append(
        Series("4 nodes, cache = 1/4 each: bytes from the store / D by epoch", "", {WITH: small})
    )
    result.demand("4 nodes read all of D: bytes from the store / D", roomy, "≤", 1.02)
    result.demand("4 nodes, cache = 1/4 each, epoch 2: bytes from the store / D", small[1], "≤", 0.05)
    return result


@scenario("peers-checkpoint", rounds=3)
def peers_checkpoint(work: Workspace, rounds: int) -> Result:
    """24 processes on four nodes load one file at once."""
    result = Result()
    size, each = work.scale.shared, 6
    work.big("peers-checkpoint", size)
    with Cluster(work) as cluster, cluster.shaped():
        cluster.show("peers-checkpoint")
        sent: list[float] = []

        def raw() -> float:
            with cluster.hosts[0].inside():
                return RawClient(cluster.store, "peers-checkpoint").sequential("0.bin", size).seconds

        def loaded() -> float:
            cluster.store.reset()
            # Each node keeps it twice: in its RAM tier and in the kernel's page cache.
            with SpareMemory(2 * NODES * size) as spare, cluster.nodes("peers-checkpoint", *ROOMY) as nodes:
                paths = [str(node.path / "0.bin") for node in nodes for _ in range(each)]
                with spare.free(), Processors() as processors:
                    seconds = together([functools.partial(_streamed, path, size) for path in paths])
                result.note(f"processors busy: {processors.busy:.0%}")
                sent.append(cluster.sent() / size)
                _counters(nodes, result)
                return seconds

        contenders = {"raw download": raw, WITH: loaded}
        series = interleave(rounds, contenders, result, what="24 processes load one file", unit="s")
    result.demand("24 processes on 4 nodes load one file: bytes from the store / size", max(sent), "≤", 1.01)
    result.demand(
        "24 processes on 4 nodes load one file: time / one raw download",
        series.ratio(WITH, "raw download"),
        "≤",
        1.3,
    )
    return result


def _streamed(path: str, size: int) -> None:
    got = sequential(Path(path)).bytes
    if got != size:
        raise RuntimeError(f"{got:,} bytes were read instead of {size:,}")


@scenario("peers-killed")
def peers_killed(work: Workspace, rounds: int) -> Result:
    """One of four nodes is killed while the three others read: the time and the bytes that it costs."""
    result = Result()
    scale = work.scale
    count, size = scale.epoch_files // 2, scale.epoch_size
    keys = work.files("peers-killed", ["train"], count, size)
    total = count * size
    with Cluster(work) as cluster, cluster.shaped():
        cluster.show("peers-killed")

        def epoch(kill: bool) -> tuple[float, int, int]:
            """(seconds, bytes from the store, bytes that the victim fetched)."""
            with cluster.nodes("peers-killed", *ROOMY) as nodes:
                cluster.store.reset()
                *others, victim = nodes
                with ThreadPoolExecutor(1) as aside:
                    killing = aside.submit(_kill_at, victim, cluster, total // 3) if kill else None
                    seconds = _epoch(others, keys, 0)
                    if killing is not None:
                        killing.result()
                own = 0 if kill else victim.metrics()["origin_bytes"]
                return seconds, cluster.sent(), own

        calm_s, calm_sent, owned = epoch(kill=False)
        killed_s, killed_sent, _ = epoch(kill=True)
    result.series.append(
        Series("3 of 4 nodes read", "s", {"all live": [calm_s], "one is killed": [killed_s]})
    )
    result.note(
        f"the killed node owned {owned / total:.1%}; bytes from the store / D {calm_sent / total:.3f} before"
    )
    result.demand("one of 4 nodes killed: time of the epoch / without", killed_s / calm_s, "≤", 1.3)
    result.demand("one of 4 nodes killed: extra bytes / its share", (killed_sent - calm_sent) / owned, "≤", 1)
    return result


def _kill_at(victim: Node, cluster: Cluster, sent: int) -> None:
    """Kill the node once the store has sent so many bytes."""
    while cluster.store.counters()["bytes_sent"].get("get", 0) < sent:
        time.sleep(0.02)
    victim.crash()


# -- how fast --------------------------------------------------------------------------------------


@scenario("peers-read", rounds=5)
def peers_read(work: Workspace, rounds: int) -> Result:
    """From a warm daemon to another host: extents and small objects, over the wire and through the mount."""
    result = Result()
    extent = 16 * MIB if work.scale.drops else 2 * MIB
    extents = [f"{number}.bin" for number in range(EXTENTS if work.scale.drops else 16)]
    work.big("peers-extents", extent, len(extents))
    small, keys = work.small("peers-small")
    with Cluster(work, nodes=2) as cluster:
        cluster.show("peers-extents")
        cluster.store.serve("peers-small", small)
        wire, through, moved = _warm(cluster, "peers-extents", extents, extent, rounds, result)
        result.demand(f"extents from a warm peer, daemon to client / {PLAIN}", wire, "≥", 0.8)
        result.demand(f"extents from a warm peer, through the mount / {PLAIN}", through, "≥", 0.5)
        for name, per_s in moved.medians().items():
            result.note(f"extents, {name}: {number(per_s * extent / 1e6)} MB/s")
        wire, through, _ = _warm(cluster, "peers-small", keys, work.scale.small_size, rounds, result)
        result.demand(f"100 KB objects from a warm peer, daemon to client / {HTTP}", wire, "≥", 0.6)
        result.note(f"100 KB objects, through the mount / {HTTP}: {number(through)}")
    return result


def _warm(
    cluster: Cluster, bucket: str, keys: Sequence[str], size: int, rounds: int, result: Result
) -> tuple[float, float, Series]:
    """(wire / plain, mount / plain, objects a second) for objects that one node has and another one requests, `AT_ONCE` at
    a time. The second node has none of them before each measurement. The plain client also receives extents into files in
    memory and reads them: the least that a cache costs."""
    asking, owning = cluster.hosts
    peer = Address(owning.address, PORT)
    base = PLAIN if size > MIB else HTTP
    # Small ones are asked for more than once over the wire, where nothing is kept: a tenth of a second tells too little.
    times = 1 if size > MIB else 4
    with ExitStack() as stack:
        with owning.inside():
            plain = stack.enter_context(server("plain", size, owning.address))
        owner = stack.enter_context(cluster.node(owning, bucket, *HOLDS_ALL, peers=[owning]))
        _read_all(below(owner.path, keys))
        versions = _versions(cluster, owner, bucket, keys, size)
        spare = stack.enter_context(SpareMemory(2 * len(keys) * size))
        busy: list[float] = []

        def over_wire() -> float:
            with asking.inside():
                return _asked(peer, versions * times, size, cluster.key)

        def over_plain() -> float:
            with asking.inside():
                return (over_sockets if size > MIB else over_http)(plain, size, times * len(keys))

        def kept() -> float:
            cache = cluster.place / "kept"
            place = provide(cache, 2 * len(keys) * size).path
            try:
                with asking.inside(), spare.free():
                    return over_sockets(plain, size, len(keys), place)
            finally:
                remove_ram(cache)

        def mounted() -> float:
            with cluster.node(asking, bucket, *HOLDS_ALL, peers=[owning], listens=False) as node:
                os.listdir(node.path)
                with spare.free(), Processors() as processors:
                    reading = share(below(node.path, keys), AT_ONCE, whole_once)
                busy.append(processors.busy)
                if node.metrics()["origin_bytes"]:
                    raise RuntimeError("the store was asked for what a peer has")
                return reading.files / reading.seconds

        contenders = {base: over_plain, WIRE: over_wire, MOUNT: mounted}
        if size > MIB:
            contenders[KEPT] = kept
        what = f"{bucket.removeprefix('peers-')} from a warm peer"
        series = interleave(rounds, contenders, result, what=what, unit="1/s")
        result.note(f"{what}, {MOUNT}: processors busy {median(busy):.0%}")
        if size > MIB:
            result.note(f"{what}, {KEPT} / {base}: {number(series.ratio(KEPT, base))}")
    return series.ratio(WIRE, base), series.ratio(MOUNT, base), series


def _versions(cluster: Cluster, owner: Node, bucket: str, names: Sequence[str], size: int) -> list[ObjectId]:
    """The versions of these objects, as the owner names them."""
    source: str = owner.status()["sources"][0]["origin"]["source"]
    versions = []
    with cluster.hosts[0].inside():
        connection = http.client.HTTPConnection(cluster.store.host, cluster.store.port)
        for name in names:
            connection.request("HEAD", f"/{bucket}/{name}")
            reply = connection.getresponse()
            reply.read()
            versions.append(ObjectId(source, name, reply.headers["ETag"], size))
        connection.close()
    return versions


class _Dropped:
    def write_block(self, data: memoryview, checksum: int) -> None:
        pass


def _asked(address: Address, versions: Sequence[ObjectId], size: int, key: Path) -> float:
    """Objects a second of a client that checks and drops them, `AT_ONCE` at a time."""

    async def main() -> float:
        client = Client(signer=Signer(read_key(key)))
        left = iter(versions)

        async def ask() -> None:
            for version in left:
                request = BlockRequest(version, 0, -(-size // MIB), MIB)
                await client.read(address, request, _Dropped(), deadline_s=5, sink_waits=False)

        begun = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(ask)
        took = time.perf_counter() - begun
        client.close()
        return len(versions) / took

    return trio.run(main)


# -- a training job --------------------------------------------------------------------------------


TRAINED = 3
SCALED = 5
"""By how much the samples are larger than resnet50's, and fewer: so that a loop waits for the store, and not for the two or
four processors that the nodes, their loaders and the store share."""


@scenario("peers-training")
def peers_training(work: Workspace, rounds: int) -> Result:
    """A training loop on each of four nodes, with a store of 100 MB/s in all, with peers and without."""
    result = Result()
    scale = work.scale
    count, size = scale.epoch_files // 2 // SCALED, scale.epoch_size * SCALED
    work.files("peers-training", ["train"], count, size)
    third = count * -(-size // PAGE) * PAGE // 3
    options = ("--ram", f"{third // 4}B", "--cache-size", f"{third - third // 4}B", "--keep-free", "0")
    with Cluster(work) as cluster, cluster.shaped():
        cluster.show("peers-training")

        def train(name: str) -> float:
            with cluster.nodes("peers-training", *options, peers=name == WITH) as nodes:
                cluster.store.reset()
                with ThreadPoolExecutor(NODES) as pool:
                    said = list(pool.map(_trained, nodes, range(NODES)))
                epochs = [max(epoch["seconds"] for epoch in of) for of in zip(*said, strict=True)]
                sent = cluster.sent() / count / size
                result.note(
                    f"{name}: epochs of {', '.join(map(number, epochs))} s, {sent:.2f} D from the store"
                )
                return sum(epochs)

        series = interleave(
            rounds,
            {name: functools.partial(train, name) for name in (WITHOUT, WITH)},
            result,
            what=f"training loop on 4 nodes, cache = 1/3 each, {TRAINED} epochs",
            unit="s",
        )
    result.demand("training loop on 4 nodes: time without peers / with", series.ratio(WITHOUT, WITH), "≥", 3)
    return result


def _trained(node: Node, seed: int) -> list[dict[str, Any]]:
    """Seconds of each epoch, with resnet50's batches and order, without decoding, and with a step that hides nothing."""
    options = ("--shape", "resnet50", "--workers", 4, "--decode-ms-per-mb", 0, "--step-ms", 1, "--seed", seed)
    said: list[dict[str, Any]] = training.apart(node.path, *options, "--epochs", TRAINED)["epochs"]
    return said

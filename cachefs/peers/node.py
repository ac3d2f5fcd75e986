"""This node among the others: what it listens on, whom it knows, what it gives.

It is opened before the mount, so that a port in use is told in a line; it serves once there is something to give; and it
leaves before the mount goes: no longer listed, no new requests, and a moment for replies under way.
"""

from __future__ import annotations

import logging
import os
import random
import uuid
from collections.abc import Collection
from typing import Any

import trio

from cachefs.config import Config
from cachefs.errors import ConfigError, MountError
from cachefs.metrics import Metrics
from cachefs.peers.auth import Signer, Verifier, check_listen
from cachefs.peers.client import Client
from cachefs.peers.cluster import Cluster
from cachefs.peers.listed import Resolver, is_local
from cachefs.peers.membership import Membership, fingerprint
from cachefs.peers.opening import open_source
from cachefs.peers.places import StaticPeers
from cachefs.peers.protocol import Shares
from cachefs.peers.server import Server
from cachefs.peers.settings import Settings
from cachefs.peers.stats import PeerTable
from cachefs.peers.wire import VERSION, Address, Hello

log = logging.getLogger(__name__)

INTRODUCED_S = 2.0
"""How long a mount waits until this node knows which member it is: before, it would ask itself. Guessed; a list tells at
once, etcd after its first replies."""

DRAIN_S = 1.0
"""For replies under way at a stop. Guessed: whoever gets no more asks the next."""

RESOLVE_S = 10.0


class PeerNode:
    """Made by `open`. On the trio thread only."""

    def __init__(
        self,
        config: Config,
        chosen: Settings,
        listen: Address | None,
        sources: Collection[str],
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._chosen = chosen
        self._listen = listen
        self._metrics = metrics
        self._listeners: list[trio.SocketListener] = []
        self._server: Server | None = None
        self._introduced = trio.Event()
        self._membership_scope, self._server_scope = trio.CancelScope(), trio.CancelScope()
        rng = random.Random()
        weight = config.group_weight if listen is not None else 0.0
        self._hello = Hello(
            uuid.uuid4().hex, VERSION, config.cache_group, fingerprint(sources, config.block_size), weight
        )
        stats = self._stats = PeerTable()
        signer = Signer(chosen.key) if chosen.key is not None else None
        self._client = Client(signer=signer, tls=chosen.client_tls, stats=stats, metrics=metrics)

        async def identify(host: str, port: int) -> Hello:
            return await self._client.hello(Address(host, port))

        source = open_source(
            *(chosen.peers, self._hello, listen, identify, rng),
            tls=chosen.etcd_tls,
            user=os.environ.get("CACHEFS_ETCD_USER", ""),
            password=os.environ.get("CACHEFS_ETCD_PASSWORD", ""),
        )
        self._membership = Membership(source, self._hello)
        self.cluster = Cluster(
            *(self._membership, self._client, stats, rng),
            block_size=config.block_size,
            replicas=config.replicas,
            serves=listen is not None,
            deadline_s=config.deadline_s,
        )
        self._membership.on_change = self._changed

    @classmethod
    async def open(
        cls, config: Config, chosen: Settings, sources: Collection[str], metrics: Metrics
    ) -> PeerNode:
        """Listens, but answers nobody yet. `sources` are the names of the stores shown. Raises `ConfigError`, and
        `MountError` when it cannot listen there."""
        listen = chosen.listen
        if listen is None and config.sharing and isinstance(chosen.peers, StaticPeers):
            listen = await _found(chosen.peers)
            check_listen(listen.host, chosen.key, chosen.server_tls)
        node = cls(config, chosen, listen, sources, metrics)
        if listen is not None:
            try:
                node._listeners = await trio.open_tcp_listeners(listen.port, host=listen.host)
            except OSError as exc:
                cause = exc.__cause__ if isinstance(exc.__cause__, OSError) else exc
                raise MountError(
                    f"cannot listen for peers on {listen}: {cause.strerror or cause}: choose another --peer-listen"
                ) from exc
        return node

    async def start(self, shares: Shares, nursery: trio.Nursery) -> None:
        """Serve, and get to know the others; returns when this node knows itself, or nobody can tell."""
        chosen = self._chosen
        self._server = Server(
            shares,
            lambda: self._hello,
            block_size=self._config.block_size,
            verifier=Verifier(chosen.key) if chosen.key is not None else None,
            tls=chosen.server_tls,
            stats=self._stats,
            metrics=self._metrics,
        )
        nursery.start_soon(self._serve, self._server)
        nursery.start_soon(self._follow)
        with trio.move_on_after(INTRODUCED_S) as scope:
            if self._listeners:
                await self._introduced.wait()
        if scope.cancelled_caught:
            log.warning("this node is not among its peers (yet): it asks them, and nobody asks it")

    async def _serve(self, server: Server) -> None:
        self._server_scope.shield = True  # until `leave`
        with self._server_scope:
            if self._listeners:
                await server.serve(self._listeners)

    async def _follow(self) -> None:
        with self._membership_scope:
            await self._membership.run()

    def _changed(self) -> None:
        self.cluster.changed()
        if self._membership.own:
            self._introduced.set()
        if self._server is not None:
            self._server.names = self._membership.own

    async def leave(self) -> None:
        """Before the mount goes. Replies under way have a second."""
        self._membership_scope.cancel()
        if self._server is not None:
            with trio.move_on_after(DRAIN_S):
                await self._server.drained()
        self._server_scope.cancel()
        self._client.close()

    async def aclose(self) -> None:
        for listener in self._listeners:
            await listener.aclose()

    def status(self) -> dict[str, Any]:
        """For `cachefs status`: plain values."""
        return {
            "from": str(self._chosen.peers),
            "listen": str(self._listen) if self._listen is not None else "",
            "group": self._config.cache_group,
            "replicas": self._config.replicas,
            "members": self.cluster.status(),
        }


async def _found(peers: StaticPeers) -> Address:
    """Which of the list is this machine."""
    resolver, found = Resolver(), []
    for address in peers.addresses:
        with trio.move_on_after(RESOLVE_S):
            try:
                if any(is_local(ip) for ip in await resolver(*address)):
                    found.append(address)
            except OSError as exc:
                log.debug("cannot resolve %s: %s", address, exc)
    if len(found) == 1:
        return found[0]
    said = "several of" if found else "none of"
    raise ConfigError(
        f"{said} --peers are this machine: say with --peer-listen where it listens, or add --no-sharing"
    )

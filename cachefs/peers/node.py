"""This node among the others: what it listens on, whom it knows, what it gives.

It is opened before the mount, so that a port in use is told in a line; it serves once there is something to give; and it
leaves before the mount goes: no longer listed, no new requests, and a moment for replies under way.

Its id is kept with the cache (`identity`). Two nodes of one id, because a cache directory was copied, see each other's
hello: the one whose daemon drew the higher `life` takes a fresh id, and with it another share.
"""

from __future__ import annotations

import logging
import os
import random
import uuid
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from cachefs.config import Config
from cachefs.errors import ConfigError, MountError
from cachefs.metrics import Metrics
from cachefs.peers.auth import Signer, Verifier, check_listen
from cachefs.peers.client import Client
from cachefs.peers.cluster import Cluster
from cachefs.peers.identity import fresh_id, node_id
from cachefs.peers.listed import Resolver, is_local
from cachefs.peers.membership import COPIED, Membership, Source, fingerprint, spelled
from cachefs.peers.opening import open_source
from cachefs.peers.places import StaticPeers
from cachefs.peers.protocol import PeerFailed, Shares
from cachefs.peers.server import Server
from cachefs.peers.settings import Settings, settings
from cachefs.peers.stats import PeerTable
from cachefs.peers.wire import VERSION, Address, Hello
from cachefs.tasks import contained

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
        state_dir: Path,
    ) -> None:
        self._config = config
        self._chosen = chosen
        self._listen = listen
        self._state_dir = state_dir
        self._metrics = metrics
        self._listeners: list[trio.SocketListener] = []
        self._server: Server | None = None
        self._introduced = trio.Event()
        self._membership_scope, self._server_scope = trio.CancelScope(), trio.CancelScope()
        self._doubted = trio.Event()
        rng = self._rng = random.Random()
        self._hello = Hello(
            # Who owns nothing has no place to come back to.
            node_id(state_dir) if listen is not None else uuid.uuid4().hex,
            *(VERSION, config.cache_group, fingerprint(sources, config.block_size)),
            weight=config.group_weight if listen is not None else 0.0,
            life=uuid.uuid4().hex,
            block_size=config.block_size,
            shows=spelled(sources),
        )
        stats = self._stats = PeerTable()
        signer = Signer(chosen.key) if chosen.key is not None else None
        self._client = Client(signer=signer, tls=chosen.client_tls, stats=stats, metrics=metrics)
        self._membership = Membership(self._source(), self._hello)
        self.cluster = Cluster(
            *(self._membership, self._client, stats, rng),
            block_size=config.block_size,
            replicas=config.replicas,
            serves=listen is not None,
            deadline_s=config.deadline_s,
        )
        self._membership.on_change = self._changed

    def _source(self) -> Source:
        async def identify(host: str, port: int) -> Hello:
            return await self._client.hello(Address(host, port))

        return open_source(
            *(self._chosen.peers, self._hello, self._listen, identify, self._rng),
            tls=self._chosen.etcd_tls,
            user=os.environ.get("CACHEFS_ETCD_USER", ""),
            password=os.environ.get("CACHEFS_ETCD_PASSWORD", ""),
        )

    @classmethod
    async def open(
        cls, config: Config, sources: Collection[str], metrics: Metrics, state_dir: Path
    ) -> PeerNode | None:
        """Listens, but answers nobody yet; None without `--peers`. `sources` are the names of the stores shown, `state_dir`
        is where the cache is. Raises `ConfigError`, and `MountError` when it cannot listen there."""
        chosen = settings(config)
        if chosen is None:
            return None
        if chosen.warning:
            log.warning("%s", chosen.warning)
        listen = chosen.listen
        if listen is None and config.sharing and isinstance(chosen.peers, StaticPeers):
            listen = await _found(chosen.peers)
            check_listen(listen.host, chosen.key, chosen.server_tls)
        node = cls(config, chosen, listen, sources, metrics, state_dir)
        if listen is not None:
            try:
                # Without a host: every address of both families, where "::" would be those of IPv6 alone.
                host = None if listen.host == "::" else listen.host
                node._listeners = await trio.open_tcp_listeners(listen.port, host=host)
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
            on_hello=lambda host: self._membership.source.heard(host),
        )
        contained(nursery, "serving peers", self._serve, self._server)
        contained(nursery, "following the list of peers", self._follow)
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
            while True:
                async with trio.open_nursery() as following:
                    following.start_soon(self._membership.run)
                    await self._copied()
                    following.cancel_scope.cancel()
                self._hello = replace(self._hello, node=fresh_id(self._state_dir))
                self._membership.become(self._source(), self._hello)

    async def _copied(self) -> None:
        """Return when another node has our id, and the right to keep it. Its own word is asked for: a register may still
        have what we were before."""
        while True:
            await self._doubted.wait()
            self._doubted = trio.Event()
            for address in [address for address, why in self._membership.apart.items() if why == COPIED]:
                try:
                    said = await self._client.hello(address)
                except PeerFailed:
                    continue
                if said.node != self._hello.node or said.life == self._hello.life:
                    continue
                keeps = self._hello.life < said.life
                log.warning(
                    "peer %s has this node's id, as after a copy of its cache directory: %s takes another, and its share",
                    *(address, "it" if keeps else "this node"),
                )
                if not keeps:
                    return

    def _changed(self) -> None:
        self.cluster.changed()
        if self._membership.own:
            self._introduced.set()
        if COPIED in self._membership.apart.values():
            self._doubted.set()
        if self._server is not None:
            self._server.names = {str(address) for address in self._membership.own_addresses}

    @property
    def warnings(self) -> list[str]:
        """For status: what is wrong now with this node's certificate, and with how the others are found."""
        return [line for line in (self._chosen.warning, self._membership.source.trouble) if line]

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
            "trouble": self._membership.source.trouble,
            "members": self.cluster.status(),
            "apart": [
                {"name": str(address), "state": found.state, "why": found.why, "wrong": found.wrong}
                for address, found in sorted(self._membership.apart.items())
            ],
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

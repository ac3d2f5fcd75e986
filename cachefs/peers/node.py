"""This node among its peers: its id, its server, its membership and its client.

The node's id is a random word in the cache directory. The ring is made of ids, and a node's place in the ring decides which
files it caches. So the id is created with the cache, survives restarts and changes of address, and goes when the cache is
removed. After a cache directory was copied, two nodes have one id, and each sees the other's handshake. The one whose
daemon drew the higher `life` then takes a new id, and with it another share."""

from __future__ import annotations

import logging
import os
import random
import ssl
import uuid
from collections.abc import Collection
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any

import trio

from cachefs.base import durable
from cachefs.base.errors import ConfigError, MountError
from cachefs.base.metrics import Metrics
from cachefs.base.tasks import contained
from cachefs.config.config import Config
from cachefs.peers.auth import Signer, Verifier, check_listen
from cachefs.peers.client import Client, Resolver
from cachefs.peers.cluster import Cluster
from cachefs.peers.etcd import Gateway, Registry
from cachefs.peers.health import PeerTable
from cachefs.peers.listed import LOOK_DEADLINE_S, Dns, Identify, Listed, is_local
from cachefs.peers.membership import COPIED, POLL_S, Membership, Source, fingerprint, sources_for_people
from cachefs.peers.server import Server
from cachefs.peers.settings import DnsPeers, EtcdPeers, Peers, Settings, StaticPeers, settings
from cachefs.peers.wire import VERSION, Address, Handshake, PeerFailed, Shares

log = logging.getLogger(__name__)

MEMBERSHIP_DEADLINE_S = 2.0
"""Seconds that a mount waits until this node knows which member it is: before that, it would send requests to itself. It
knows that at once from a list, and after the first replies from etcd."""

DRAIN_S = 1.0
"""Seconds for the replies in progress when this node stops. A client whose reply is broken off asks the next member."""


@dataclass(eq=False, repr=False)
class PeerNode:
    """This node's id, server, membership and client. Made by `open`. On the trio thread only."""

    _config: Config
    _chosen: Settings
    _listen: Address | None
    sources: InitVar[Collection[str]]
    _metrics: Metrics
    _state_dir: Path

    def __post_init__(self, sources: Collection[str]) -> None:
        config, chosen, serves = self._config, self._chosen, self._listen is not None
        self._listeners: list[trio.SocketListener] = []
        self._server: Server | None = None
        self._is_member = trio.Event()
        self._membership_scope, self._server_scope = trio.CancelScope(), trio.CancelScope()
        self._id_contested = trio.Event()
        self._handshake = Handshake(
            # A node that serves no blocks has no share to return to, so its id need not last.
            node=node_id(self._state_dir) if serves else uuid.uuid4().hex,
            version=VERSION,
            group=config.cache_group,
            sources=fingerprint(sources, config.block_size),
            weight=config.group_weight if serves else 0.0,
            life=uuid.uuid4().hex,
            block_size=config.block_size,
            shows=sources_for_people(sources),
        )
        self._stats = PeerTable()
        signer = Signer(chosen.key) if chosen.key is not None else None
        self._client = Client(signer, chosen.client_tls, self._stats, self._metrics)
        self._membership = Membership(self._source(), self._handshake)
        self.cluster = Cluster(
            self._membership,
            self._client,
            self._stats,
            random.Random(),
            block_size=config.block_size,
            replicas=config.replicas,
            serves=serves,
            deadline_s=config.timeout,
        )
        self._membership.on_change = self._changed

    def _source(self) -> Source:
        tls = self._chosen.etcd_tls
        return open_source(self._chosen.peers, self._handshake, self._listen, self._client.handshake, tls)

    @classmethod
    async def open(
        cls, config: Config, sources: Collection[str], metrics: Metrics, state_dir: Path
    ) -> PeerNode | None:
        """Listen, without answering yet. None without `--peers`. `sources` are the names of the mounted origins,
        `state_dir` is the cache directory. Raises `ConfigError`, and `MountError` if it cannot listen."""
        chosen = settings(config)
        if chosen is None:
            return None
        if chosen.warning:
            log.warning("%s", chosen.warning)
        listen = chosen.listen
        if listen is None and config.sharing and isinstance(chosen.peers, StaticPeers):
            listen = await _own_address(chosen.peers)
            check_listen(listen.host, chosen.key, chosen.server_tls)
        node = cls(config, chosen, listen, sources, metrics, state_dir)
        if listen is not None:
            try:
                # None means every address of both families; "::" would mean those of IPv6 alone.
                host = None if listen.host == "::" else listen.host
                node._listeners = await trio.open_tcp_listeners(listen.port, host=host)
            except OSError as exc:
                cause = exc.__cause__ if isinstance(exc.__cause__, OSError) else exc
                raise MountError(
                    f"cannot listen for peers on {listen}: {cause.strerror or cause}: choose another --peer-listen"
                ) from exc
        return node

    async def start(self, shares: Shares, nursery: trio.Nursery) -> None:
        """Serve, and follow the membership. Returns when this node is a member, or after `MEMBERSHIP_DEADLINE_S`."""
        chosen = self._chosen
        self._server = Server(
            shares,
            self._membership.handshake_requested,
            block_size=self._config.block_size,
            verifier=Verifier(chosen.key) if chosen.key is not None else None,
            tls=chosen.server_tls,
            stats=self._stats,
            metrics=self._metrics,
        )
        contained(nursery, "serving peers", self._serve, self._server)
        contained(nursery, "following the list of peers", self._follow)
        with trio.move_on_after(MEMBERSHIP_DEADLINE_S) as scope:
            if self._listeners:
                await self._is_member.wait()
        if scope.cancelled_caught:
            log.warning(
                "this node is not among its peers (yet): it reads from them, and they do not read from it"
            )

    async def _serve(self, server: Server) -> None:
        self._server_scope.shield = True  # a cancelled daemon still answers until `leave`
        with self._server_scope:
            if self._listeners:
                await server.serve(self._listeners)

    async def _follow(self) -> None:
        with self._membership_scope:
            while True:
                async with trio.open_nursery() as following:
                    following.start_soon(self._membership.run)
                    await self._id_lost()
                    following.cancel_scope.cancel()
                self._handshake = replace(self._handshake, node=fresh_id(self._state_dir))
                self._membership.take_id(self._source(), self._handshake)

    async def _id_lost(self) -> None:
        """Return when another node has our id and may keep it (its `life` is lower). Requests a handshake to be sure: etcd
        may still have an earlier key of this node."""
        while True:
            await self._id_contested.wait()
            self._id_contested = trio.Event()
            for address in [
                address for address, why in self._membership.incompatible.items() if why == COPIED
            ]:
                try:
                    theirs = await self._client.handshake(address)
                except PeerFailed:
                    self._id_contested.set()  # the members may stay as they are, and nothing else would ask again
                    continue
                if theirs.node != self._handshake.node or theirs.life == self._handshake.life:
                    continue
                keeps = self._handshake.life < theirs.life
                log.warning(
                    "peer %s has this node's id, as after a copy of its cache directory: %s takes another, and its share",
                    address,
                    "it" if keeps else "this node",
                )
                if not keeps:
                    return
            if self._id_contested.is_set():
                await trio.sleep(POLL_S)

    def _changed(self) -> None:
        self.cluster.changed()
        if self._membership.own:
            self._is_member.set()
        if COPIED in self._membership.incompatible.values():
            self._id_contested.set()
        if self._server is not None:
            self._server.names = {str(address) for address in self._membership.own_addresses}

    @property
    def warnings(self) -> list[str]:
        """For the status: what is wrong with this node's certificate and with the source of members."""
        return [line for line in (self._chosen.warning, self._membership.source.trouble) if line]

    async def leave(self, *, handed_over: bool) -> None:
        """Stop serving and unregister, before the mount goes. Replies in progress have `DRAIN_S`. If `handed_over`, it
        stays registered for the next daemon, so the others keep its share where it is."""
        self._membership.stays = handed_over
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
            "incompatible": [
                {"name": str(address), "state": found.state, "why": found.why, "wrong": found.wrong}
                for address, found in sorted(self._membership.incompatible.items())
            ],
        }


async def _own_address(peers: StaticPeers) -> Address:
    """The one address of the list that belongs to this machine. Raises `ConfigError` if not exactly one does."""
    resolver, found = Resolver(), []
    for address in peers.addresses:
        with trio.move_on_after(LOOK_DEADLINE_S):
            try:
                if any(is_local(ip) for ip in await resolver(*address)):
                    found.append(address)
            except OSError as exc:
                log.debug("cannot resolve %s: %s", address, exc)
    if len(found) == 1:
        return found[0]
    how_many = "several of" if found else "none of"
    raise ConfigError(
        f"{how_many} --peers are this machine: say with --peer-listen where it listens, or add --no-sharing"
    )


ID_FILE = "node"


def node_id(directory: Path) -> str:
    """The id in the cache directory; a new one if there is none or it cannot be read."""
    try:
        return uuid.UUID((directory / ID_FILE).read_text().strip()).hex
    except (OSError, ValueError):
        return fresh_id(directory)


def fresh_id(directory: Path) -> str:
    """A new id, written to the cache directory before it is used. If writing fails, the id lasts as long as this daemon."""
    made = uuid.uuid4().hex
    try:
        durable.write(directory / ID_FILE, f"{made}\n")
    except OSError as exc:
        log.warning(
            "this node's id cannot be kept in %s, so a restart finds another share: %s",
            directory,
            exc.strerror,
        )
    return made


def open_source(
    peers: Peers,
    handshake: Handshake,
    listen: Address | None,
    identify: Identify,
    tls: ssl.SSLContext | None = None,
) -> Source:
    """The source of members that `--peers` names. Sends nothing yet. `listen` is where this node listens, None if it serves
    no blocks. `identify` requests a handshake (not needed with etcd). `tls` is for etcd."""
    if isinstance(peers, EtcdPeers):
        user, password = (os.environ.get(f"CACHEFS_ETCD_{name}", "") for name in ("USER", "PASSWORD"))
        gateway = Gateway(peers.endpoints, tls=tls, user=user, password=password)
        return Registry(gateway, peers.prefix, handshake, listen)
    resolver = Resolver()
    if isinstance(peers, DnsPeers):
        return Listed(Dns(peers.name, peers.port, resolver, listen), handshake, listen, identify, resolver)

    async def addresses() -> tuple[Address, ...]:
        return peers.addresses

    return Listed(addresses, handshake, listen, identify, resolver)

"""From what `--peers` says to a source of members."""

from __future__ import annotations

import random
import ssl
from collections.abc import Collection
from ipaddress import ip_address

from cachefs.peers.etcd import Registry
from cachefs.peers.etcd_gateway import Gateway
from cachefs.peers.listed import Dns, Identify, Listed, Resolve, Resolver, Static
from cachefs.peers.membership import Source
from cachefs.peers.places import DnsPeers, Peers, StaticPeers
from cachefs.peers.wire import Address, Hello


def open_source(
    peers: Peers,
    hello: Hello,
    listen: Address | None,
    identify: Identify,
    rng: random.Random,
    *,
    tls: ssl.SSLContext | None = None,
    user: str = "",
    password: str = "",
) -> Source:
    """Asks nobody yet. `listen` is where this node listens, None if it serves nobody; `identify` asks an address for its
    hello (not needed with etcd). `tls`, `user` and `password` are for etcd."""
    resolver = Resolver()
    if isinstance(peers, StaticPeers):
        return Listed(Static(peers.addresses), hello, listen, identify, resolver, rng)
    if isinstance(peers, DnsPeers):
        return Listed(
            Dns(peers.name, peers.port, _narrowed(resolver, listen)), hello, listen, identify, resolver, rng
        )
    gateway = Gateway(peers.endpoints, rng, tls=tls, user=user, password=password)
    return Registry(gateway, peers.prefix, hello, listen, rng)


def _narrowed(resolve: Resolve, listen: Address | None) -> Resolve:
    """A name may have addresses of both families. Nodes are mounted alike, so who listens on one of them finds the others
    there; on the other nobody would answer."""
    try:
        family = None if listen is None or listen.host == "::" else ip_address(listen.host).version
    except ValueError:  # it listens on a name
        family = None

    async def narrowed(name: str, port: int) -> Collection[str]:
        found = await resolve(name, port)
        return [a for a in found if family in (None, 6 if ":" in a else 4)] or found

    return narrowed

"""From what `--peers` says to a source of members."""

from __future__ import annotations

import random
import ssl

from cachefs.peers.etcd import Registry
from cachefs.peers.etcd_gateway import Gateway
from cachefs.peers.listed import Dns, Identify, Listed, Resolver, Static
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
        return Listed(Dns(peers.name, peers.port, resolver), hello, listen, identify, resolver, rng)
    gateway = Gateway(peers.endpoints, rng, tls=tls, user=user, password=password)
    return Registry(gateway, peers.prefix, hello, listen, rng)

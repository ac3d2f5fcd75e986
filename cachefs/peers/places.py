"""What `--peers` says: where the other nodes are to be learnt.

    static:h1:7070,h2:7070                   these, always
    dns:cachefs.training.svc:7070            every address of that name, asked again every few seconds
    etcd:http://e1:2379,http://e2:2379/name  whoever registers there, below that prefix

IPv6 addresses stand in brackets. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from cachefs.peers.wire import Address

DEFAULT_PREFIX = "/cachefs"

EXAMPLES = "write static:host:port,host:port or dns:name:port or etcd:http://host:2379"


@dataclass(frozen=True, slots=True)
class StaticPeers:
    """A list that never changes; this node may be in it."""

    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        return "static:" + ",".join(map(str, self.addresses))


@dataclass(frozen=True, slots=True)
class DnsPeers:
    """All addresses of one name (a headless service), one port."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"dns:{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One member of an etcd cluster."""

    address: Address
    tls: bool

    def __str__(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.address}"


@dataclass(frozen=True, slots=True)
class EtcdPeers:
    """A cluster, and the prefix of the keys under which nodes register: it begins with a slash and does not end in one."""

    endpoints: tuple[Endpoint, ...]
    prefix: str = DEFAULT_PREFIX

    def __str__(self) -> str:
        return "etcd:" + ",".join(map(str, self.endpoints)) + self.prefix


Peers = StaticPeers | DnsPeers | EtcdPeers


def parse_address(text: str) -> Address:
    """``host:port`` or ``[v6]:port``, lower case. Raises `ValueError` whose text completes "'…' is"."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("ambiguous: an IPv6 address stands in brackets, [fd00::1]:7070")
    if not colon or not host or not set(host).isdisjoint("[]/@ "):
        raise ValueError("not an address: write it like host:7070 or [fd00::1]:7070")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError("not an address: the port is a number from 1 to 65535")
    return Address(host.lower(), int(port))


def parse_peers(text: str) -> Peers:
    """Raises `ValueError` whose text completes "'…' is"."""
    kind, _, rest = text.strip().partition(":")
    if not rest:
        raise ValueError(f"not a place to find peers: {EXAMPLES}")
    match kind:
        case "static":
            # Each once, as the order says nothing.
            return StaticPeers(tuple(sorted({parse_address(part) for part in rest.split(",")})))
        case "dns":
            return DnsPeers(*parse_address(rest))
        case "etcd":
            return _etcd(rest)
    raise ValueError(f"not a place to find peers: {EXAMPLES}")


def _etcd(text: str) -> EtcdPeers:
    endpoints: list[Endpoint] = []
    prefix = ""
    for part in text.split(","):
        if prefix:
            raise ValueError("unclear: the prefix of keys comes once, after the last etcd endpoint")
        url = urlsplit(part.strip())
        if url.scheme not in ("http", "https") or url.query or url.fragment:
            raise ValueError("not an etcd endpoint: write it like http://host:2379")
        if "@" in url.netloc:
            raise ValueError(
                "an endpoint with credentials: they would be seen in logs, so they do not go here"
            )
        host = url.netloc if url.netloc.rpartition(":")[2].isdigit() else f"{url.netloc}:2379"
        endpoints.append(Endpoint(parse_address(host), url.scheme == "https"))
        prefix = url.path.rstrip("/")
    return EtcdPeers(tuple(dict.fromkeys(endpoints)), prefix or DEFAULT_PREFIX)

"""The options about peers, checked before anything is mounted.

`--peers` says where to find the other nodes:

    static:h1:7070,h2:7070                   these addresses
    dns:cachefs.training.svc:7070            every address of that name
    etcd:http://e1:2379,http://e2:2379/name  the nodes that register there, below that prefix

IPv6 addresses stand in brackets."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from cachefs.base.errors import ConfigError
from cachefs.config.config import ROWS, Config
from cachefs.peers.auth import Key, check_listen, check_server, read_key, tls_context, why_untrusted
from cachefs.peers.wire import MAX_HANDSHAKE_TEXT, MAX_RANK, Address

NEED_PEERS = [name for name, row in ROWS.items() if row.group == "Peers" and name != "peers"]
"""Options that have no effect without `--peers`."""

DEFAULT_PREFIX = "/cachefs"

EXAMPLES = "write static:host:port,host:port or dns:name:port or etcd:http://host:2379"


class StaticPeers(NamedTuple):
    """A list that never changes; this node may be in it."""

    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        return "static:" + ",".join(map(str, self.addresses))


class DnsPeers(NamedTuple):
    """All addresses of one name (a headless service), one port."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"dns:{self.name}:{self.port}"


class Endpoint(NamedTuple):
    """One member of an etcd cluster."""

    address: Address
    tls: bool

    def __str__(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.address}"


class EtcdPeers(NamedTuple):
    """An etcd cluster, and the prefix of the keys under which nodes register, with a slash before and none behind it."""

    endpoints: tuple[Endpoint, ...]
    prefix: str = DEFAULT_PREFIX

    def __str__(self) -> str:
        return "etcd:" + ",".join(map(str, self.endpoints)) + self.prefix


Peers = StaticPeers | DnsPeers | EtcdPeers


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked options. `listen` is None for a node that serves no blocks, or finds its address in the static list."""

    peers: Peers
    listen: Address | None
    key: Key | None
    server_tls: ssl.SSLContext | None
    client_tls: ssl.SSLContext | None
    etcd_tls: ssl.SSLContext | None
    warning: str = ""


def settings(config: Config) -> Settings | None:
    """Check the options about peers. None without `--peers`. Raises `ConfigError`."""
    if config.peers is None:
        defaults = {option.name: option.default for option in fields(Config)}
        for name in NEED_PEERS:
            if getattr(config, name) != defaults[name]:
                option_name = "no-sharing" if name == "sharing" else name.replace("_", "-")
                raise ConfigError(f"--{option_name} needs --peers: where the other nodes are to be found")
        return None
    try:
        peers = parse_peers(config.peers)
    except ValueError as exc:
        raise ConfigError(f"--peers: {config.peers!r} is {exc}") from None
    if config.replicas > MAX_RANK // 2:
        raise ConfigError(f"--replicas: {config.replicas} is too many: at most {MAX_RANK // 2} are kept")
    if len(config.cache_group) > MAX_HANDSHAKE_TEXT:
        raise ConfigError(f"--cache-group: the name is too long: at most {MAX_HANDSHAKE_TEXT} characters")
    key = read_key(config.peer_key_file) if config.peer_key_file is not None else None
    server, client = _certificates(config)
    listen = _listen(config, peers)
    if listen is not None:
        check_listen(listen.host, key, server)
    if not config.sharing and not isinstance(peers, EtcdPeers):
        asked = [peers.name] if isinstance(peers, DnsPeers) else [address.host for address in peers.addresses]
        for host in asked:
            check_server(host, key, client)
    etcd_tls = None
    if config.etcd_ca is not None:
        if not isinstance(peers, EtcdPeers):
            raise ConfigError("--etcd-ca is for --peers etcd:https://…")
        etcd_tls = _etcd_tls(config.etcd_ca)
    warning = ""
    if server is not None and client is not None and (why := why_untrusted(server, client)):
        warning = f"other nodes will not trust the certificate {config.peer_cert}: {why}"
    return Settings(peers, listen, key, server, client, etcd_tls, warning)


def _listen(config: Config, peers: Peers) -> Address | None:
    if not config.sharing:
        if config.peer_listen is not None:
            raise ConfigError("--no-sharing gives nothing to others: leave --peer-listen out")
        return None
    if config.peer_listen is not None:
        try:
            return parse_address(config.peer_listen)
        except ValueError as exc:
            raise ConfigError(f"--peer-listen: {config.peer_listen!r} is {exc}") from None
    if isinstance(peers, DnsPeers):
        return Address("::", peers.port)  # both families, because the name may have addresses of both
    if isinstance(peers, StaticPeers):
        return None
    raise ConfigError("--peers etcd: needs --peer-listen HOST:PORT, or --no-sharing")


def _certificates(config: Config) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    files = (config.peer_cert, config.peer_cert_key, config.peer_ca)
    given = [path for path in files if path is not None]
    if not given:
        return None, None
    if len(given) != 3:
        raise ConfigError("--peer-cert, --peer-cert-key and --peer-ca belong together: give all three")
    server, client = (
        tls_context(side, *given) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    return server, client


def _etcd_tls(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"cannot use --etcd-ca {ca}: {exc.strerror or exc}") from exc


def parse_address(text: str) -> Address:
    """The address ``host:port`` or ``[v6]:port``, in lower case. Raises `ValueError` whose text completes "'…' is"."""
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
    """Parse `--peers`. Raises `ValueError` whose text completes "'…' is"."""
    kind, _, rest = text.strip().partition(":")
    if not rest:
        raise ValueError(f"not a place to find peers: {EXAMPLES}")
    match kind:
        case "static":
            # Sorted, and each address once: their order has no meaning.
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

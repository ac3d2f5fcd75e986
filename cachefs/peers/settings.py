"""What the options say about peers, checked before anything is mounted."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, fields
from pathlib import Path

from cachefs.config import Config
from cachefs.errors import ConfigError
from cachefs.peers.auth import Key, check_believed, check_listen, client_tls, distrust, read_key, server_tls
from cachefs.peers.places import DnsPeers, EtcdPeers, Peers, StaticPeers, parse_address, parse_peers
from cachefs.peers.wire import MAX_RANK, Address

READABLE_BY_ALL = 0o004

NEED_PEERS = (
    *("peer_listen", "peer_key_file", "peer_cert", "peer_cert_key", "peer_ca", "etcd_ca"),
    *("cache_group", "group_weight", "replicas", "sharing"),
)
"""Options that mean nothing alone."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`listen` is None for a node that gives nothing, or whose place is to be found in the list (see `node`)."""

    peers: Peers
    listen: Address | None
    key: Key | None
    server_tls: ssl.SSLContext | None
    client_tls: ssl.SSLContext | None
    etcd_tls: ssl.SSLContext | None
    warning: str = ""


def settings(config: Config) -> Settings | None:
    """None without `--peers`. Raises `ConfigError`."""
    if config.peers is None:
        defaults = {option.name: option.default for option in fields(Config)}
        for name in NEED_PEERS:
            if getattr(config, name) != defaults[name]:
                said = "no-sharing" if name == "sharing" else name.replace("_", "-")
                raise ConfigError(f"--{said} needs --peers: where the other nodes are to be found")
        return None
    try:
        peers = parse_peers(config.peers)
    except ValueError as exc:
        raise ConfigError(f"--peers: {config.peers!r} is {exc}") from None
    if config.replicas > MAX_RANK // 2:
        raise ConfigError(f"--replicas: {config.replicas} is too many: at most {MAX_RANK // 2} are kept")
    key = _key(config.peer_key_file)
    server, client = _certificates(config)
    listen = _listen(config, peers)
    if listen is not None:
        check_listen(listen.host, key, server)
    if not config.sharing and not isinstance(peers, EtcdPeers):
        asked = [peers.name] if isinstance(peers, DnsPeers) else [address.host for address in peers.addresses]
        for host in asked:
            check_believed(host, key, client)
    etcd_tls = None
    if config.etcd_ca is not None:
        if not isinstance(peers, EtcdPeers):
            raise ConfigError("--etcd-ca is for --peers etcd:https://…")
        etcd_tls = _etcd_tls(config.etcd_ca)
    warning = ""
    if server is not None and client is not None and (why := distrust(server, client)):
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
        return Address("::", peers.port)  # of both families, as the name may be
    if isinstance(peers, StaticPeers):
        return None
    raise ConfigError("--peers etcd: needs --peer-listen HOST:PORT, or --no-sharing")


def _key(path: Path | None) -> Key | None:
    if path is None:
        return None
    key = read_key(path)
    if os.stat(path).st_mode & READABLE_BY_ALL:
        raise ConfigError(f"everybody can read the peers' key {path}: chmod 600 {path}")
    return key


def _certificates(config: Config) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    files = (config.peer_cert, config.peer_cert_key, config.peer_ca)
    given = [path for path in files if path is not None]
    if not given:
        return None, None
    if len(given) != 3:
        raise ConfigError("--peer-cert, --peer-cert-key and --peer-ca belong together: give all three")
    return server_tls(*given), client_tls(*given)


def _etcd_tls(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"cannot use --etcd-ca {ca}: {exc.strerror or exc}") from exc

"""Authentication of nodes: a shared key, or certificates, or both.

**Shared key.** Every request carries an HMAC-SHA256 over its method, target, Host, time and a nonce. A nonce is the
sender's random session with this receiver, followed by a counter. So the receiver remembers one number and a window of bits
per sender, whatever the rate (the anti-replay window of IPsec, RFC 4303). A request is valid for `WINDOW_S` before and
after its time by the receiver's clock, and is accepted once. A restarted receiver has forgotten the counters: for
`WINDOW_S`, an eavesdropper could replay an old request, and would get a reply that it has overheard before.

Replies carry a MAC over the request's nonce, the status, the length and, except for blocks, the body. In a body of blocks,
a MAC over nonce, block and checksum follows each checksum. That keeps out strangers, and replies that are old or belong to
another request, but not an attacker on the path that finds other bytes with the same xxh3_64, which is not a cryptographic
hash; and it hides nothing.

**Certificates.** TLS 1.2 or later; both sides show a certificate. Every holder of a certificate from the CA is a peer:
names are not compared, because nodes come and go under addresses that no certificate lists."""

from __future__ import annotations

import hmac
import itertools
import os
import ssl
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cachefs.base.errors import CachefsError, ConfigError
from cachefs.base.listening import is_loopback
from cachefs.peers.wire import MAC_BYTES

WINDOW_S = 30.0
"""How far the clocks of two nodes may differ, transfer time included: nodes of a cluster keep time by NTP."""

REORDERED_AT_MOST = 1024
"""How far a request of one sender may fall behind later ones. Derived: more than a sender may have in flight."""

MAX_SESSIONS = 8192
"""Sessions that are remembered, each for a minute. Derived: a thousand nodes that restart every ten seconds."""

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 4096

SCHEME = "Cachefs-HMAC-SHA256"
SESSION_BYTES = 16
NONCE_BYTES = SESSION_BYTES + 8


class Unauthorized(CachefsError):
    """The request is not from a peer, is too old, or is a replay."""


class Key:
    """The shared secret."""

    def __init__(self, secret: bytes) -> None:
        self._keyed = hmac.new(secret, digestmod="sha256")

    def mac(self, label: bytes, *parts: bytes) -> bytes:
        """HMAC-SHA256 over a label and parts, each behind its length, so that no two lists of parts look the same."""
        text = b"".join([len(part).to_bytes(4, "big") + part for part in (label, *parts)])
        mac = self._keyed.copy()  # measured: takes a third less time than with the key
        mac.update(text)
        return mac.digest()

    def request_mac(self, target: str, host: str, when: str, nonce: bytes) -> bytes:
        return self.mac(b"request", b"GET", target.encode(), host.encode(), when.encode(), nonce)


class Macs(NamedTuple):
    """Makes the MACs of the reply to one request. Server and client both compute them; the client compares."""

    key: Key
    nonce: bytes

    def reply(self, status: int, length: int, body: bytes) -> str:
        """The MAC for the header of a reply, in hex. `body` is empty for blocks, which have MACs of their own."""
        return self.key.mac(b"reply", self.nonce, b"%d" % status, b"%d" % length, body).hex()

    def block(self, block: int, checksum: bytes) -> bytes:
        """The `MAC_BYTES` bytes that follow the checksum of a block."""
        return self.key.mac(b"block", self.nonce, b"%d" % block, checksum)[:MAC_BYTES]


def read_key(path: Path) -> Key:
    """The key in a file, without white space around it. Raises `ConfigError`, also if every user can read the file."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as exc:
        raise ConfigError(f"cannot read the peers' key {path}: {exc.strerror}") from exc
    if not MIN_KEY_BYTES <= len(secret) <= MAX_KEY_BYTES:
        raise ConfigError(f"the peers' key {path} must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes")
    if mode & stat.S_IROTH:
        raise ConfigError(f"every user can read the peers' key {path}: chmod 600 {path}")
    return Key(secret)


class Signer:
    """Signs the requests of one process. It has a session for each server, because requests to other servers must not move
    the window of a server that receives its requests late."""

    def __init__(self, key: Key, *, clock: Callable[[], float] = time.time) -> None:
        self.key = key
        self._clock = clock
        self._sessions: defaultdict[str, tuple[bytes, Iterator[int]]] = defaultdict(
            lambda: (os.urandom(SESSION_BYTES), itertools.count(1))
        )

    def sign(self, target: str, host: str) -> tuple[str, Macs]:
        """Sign a GET. Returns the value of its header Authorization, and the MACs that the reply will carry."""
        session, counter = self._sessions[host]
        nonce = session + next(counter).to_bytes(8, "big")
        when = str(int(self._clock()))
        mac = self.key.request_mac(target, host, when, nonce)
        return f"{SCHEME} {when} {nonce.hex()} {mac.hex()}", Macs(self.key, nonce)

    def forget(self, host: str) -> None:
        """Drop the session of a member that left."""
        self._sessions.pop(host, None)


@dataclass(slots=True)
class _Session:
    """Counters that were received: the highest, and bit i of `seen` for the one i below it. Kept until `until`."""

    highest: int = 0
    seen: int = 0
    until: float = 0.0

    def accept(self, counter: int) -> bool:
        """False for a counter that was seen before, or that is below the window."""
        ahead = counter - self.highest
        if ahead > 0:
            self.seen = (self.seen << ahead | 1) & _WINDOW_BITS if ahead < REORDERED_AT_MOST else 1
            self.highest = counter
            return True
        if -ahead >= REORDERED_AT_MOST or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True


_WINDOW_BITS = (1 << REORDERED_AT_MOST) - 1


class Verifier:
    """Checks the requests to one server."""

    def __init__(self, key: Key, *, clock: Callable[[], float] = time.time) -> None:
        self.key = key
        self._clock = clock
        self._sessions: dict[bytes, _Session] = {}

    def verify(self, target: str, host: str, authorization: str) -> Macs:
        """Check a GET. Returns its reply's MACs. Raises `Unauthorized`. Only a request with a valid MAC takes memory."""
        try:
            scheme, when, nonce_hex, mac_hex = authorization.split(" ")
            sent_at = int(when)
            nonce, mac = bytes.fromhex(nonce_hex), bytes.fromhex(mac_hex)
        except ValueError:
            scheme = ""
        if scheme != SCHEME or len(nonce) != NONCE_BYTES:
            raise Unauthorized("this node wants requests signed with its key")
        if not hmac.compare_digest(mac, self.key.request_mac(target, host, when, nonce)):
            raise Unauthorized("signed with another key, or for another node")
        now = self._clock()
        if abs(now - sent_at) > WINDOW_S:
            raise Unauthorized(f"the request's time is {sent_at - now:+.0f} s off: set the clocks")
        session = self._session(nonce[:SESSION_BYTES], now)
        if not session.accept(int.from_bytes(nonce[SESSION_BYTES:], "big")):
            raise Unauthorized("the request is a replay")
        session.until = max(session.until, sent_at + WINDOW_S)
        return Macs(self.key, nonce)

    def _session(self, name: bytes, now: float) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            if len(self._sessions) >= MAX_SESSIONS:
                self._sessions = {name: s for name, s in self._sessions.items() if s.until >= now}
            if len(self._sessions) >= MAX_SESSIONS:
                raise Unauthorized("too many senders within a minute")
            session = self._sessions[name] = _Session()
        return session


def tls_context(side: int, certificate: Path, key: Path, ca: Path) -> ssl.SSLContext:
    """TLS for PROTOCOL_TLS_SERVER or _CLIENT: shows our certificate, accepts any peer's of `ca`. Raises `ConfigError`."""
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # see the module's docstring
    context.verify_mode = ssl.CERT_REQUIRED
    named = f"certificate {ca}"
    try:
        context.load_verify_locations(ca)
        named = f"certificate {certificate}"
        ssl.SSLContext(side).load_verify_locations(certificate)  # alone, so that a later failure is the key's
        named = f"key {key}"
        context.load_cert_chain(certificate, key, password="")  # never prompt for one
    except (OSError, ssl.SSLError) as exc:
        reason = exc.reason if isinstance(exc, ssl.SSLError) and exc.reason else exc.strerror or str(exc)
        raise ConfigError(f"cannot use the peers' {named}: {reason.lower().replace('_', ' ')}") from exc
    return context


def why_untrusted(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """Why a node with the same files would refuse this node; empty if it would not. Makes a TLS handshake in memory,
    because an expired certificate, for example, can be loaded although every peer refuses it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as exc:
            return exc.verify_message
        except ssl.SSLError as exc:
            return exc.reason or str(exc)
    return ""


def check_listen(host: str, key: Key | None, tls: ssl.SSLContext | None) -> None:
    """Check an address to listen on. Raises `ConfigError` if other machines reach it and there is no key or certificate."""
    if key is None and tls is None and not is_loopback(host):
        raise ConfigError(
            f"peers would listen on {host or 'every address'} for any client: "
            "give them a key or certificates, or listen on 127.0.0.1"
        )


def check_server(host: str, key: Key | None, tls: ssl.SSLContext | None) -> None:
    """Check a server to send requests to. Raises `ConfigError` if it is on another machine and there is no key or
    certificate. A name is resolved only when a connection is made, so `client` checks again."""
    if key is None and tls is None and not is_loopback(host):
        raise ConfigError(
            f"any machine could answer in the place of {host}: give --peer-key-file or certificates, as the other nodes have"
        )

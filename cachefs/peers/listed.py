"""Members from a list of addresses: the one on the command line, or the addresses of a DNS name.

A list has addresses, but the ring needs node ids. So `Listed.present` asks each address for its handshake: an unknown one
at every poll, a known one once a minute, because a daemon may return with another weight or other sources. The node's own
address is recognised without a request. A node that answered once stays a member while it is silent: its `health` decides
whether it gets requests for blocks."""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import trio

from cachefs.base.errors import CachefsError
from cachefs.base.tasks import contained
from cachefs.peers.membership import POLL_S, Sighting
from cachefs.peers.wire import Address, Handshake, PeerFailed

log = logging.getLogger(__name__)

HANDSHAKE_TTL_S = 60.0
"""How long a handshake is cached. Derived: each of a thousand nodes then answers 17 requests a second."""

ASKED_AT_ONCE = 256
"""Handshakes in flight. Derived: with `client.CONNECT_S`, a poll of a thousand silent addresses takes a second."""

IDENTIFY_S = 1.0
"""Deadline of one handshake. Derived: with `POLL_S`, a join is seen within 3 s although another address hangs."""

LOOK_DEADLINE_S = 10.0
"""Seconds for a resolver: twice its usual timeout of 5 s, so that a second name server can answer."""

MISSES = 8
"""An address has left after so many successive answers without it, which are 15 s of polls. Some servers return only a part
of many addresses, and others leave out a pod that is not ready for a moment."""

Identify = Callable[[Address], Awaitable[Handshake]]
"""Requests the handshake of the node that listens at an address. Raises OSError or `CachefsError`."""

Resolve = Callable[[str, int], Awaitable[Collection[str]]]
"""(name, port) → IP addresses. Raises OSError, also if the name cannot be a host's. The caller sets a deadline."""

Look = Callable[[], Awaitable[Collection[Address]]]
"""Returns the addresses that are listed now."""


def is_local(address: str) -> bool:
    """True if packets to this IP address stay on this machine. Sends nothing: it connects a datagram socket and compares
    the source address that the kernel chose. (`ip_nonlocal_bind` would mislead a test by `bind`.)"""
    try:
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return True
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return bool(probe.getsockname()[0] == address)
    except (OSError, ValueError):
        return False


async def is_own(address: Address, listen: Address, resolve: Resolve) -> bool:
    """True if `address` is where this node listens. Raises OSError when the name cannot be resolved."""
    if address.port != listen.port:
        return False
    if address.host == listen.host:
        return True
    try:
        everywhere = ipaddress.ip_address(listen.host).is_unspecified
    except ValueError:  # `listen.host` is a name
        return False
    resolved = await resolve(address.host, address.port)
    return any(found == listen.host or (everywhere and is_local(found)) for found in resolved)


class Dns:
    """A `Look` at a DNS name. While a lookup fails, it returns the last known addresses and `trouble` says why."""

    def __init__(self, name: str, port: int, resolve: Resolve, listen: Address | None = None) -> None:
        self.trouble = ""
        self._name, self._port, self._resolve = name, port, resolve
        self._family = _family(listen)
        self._missed: dict[str, int] = {}  # address → answers in a row without it

    async def __call__(self) -> list[Address]:
        found: Collection[str] = ()
        trouble = ""
        try:
            with trio.fail_after(LOOK_DEADLINE_S):
                found = await self._resolve(self._name, self._port)
        except (OSError, trio.TooSlowError) as exc:
            reason = getattr(exc, "strerror", None) or str(exc) or f"no answer in {LOOK_DEADLINE_S:g} s"
            trouble = f"cannot look up the peers' name {self._name}: {reason}"
            log.log(logging.DEBUG if self.trouble else logging.WARNING, "%s", trouble)
        self.trouble = trouble
        # Nodes are configured alike: if this one listens on one family, the others do, too.
        found = [a for a in found if self._family in (None, 6 if ":" in a else 4)] or found
        return [Address(address, self._port) for address in self.answered(found)]

    def answered(self, addresses: Collection[str]) -> list[str]:
        """Record an answer. Returns its addresses, and those that were missing from fewer than `MISSES` answers in a row.
        An empty answer counts as a failed lookup and changes nothing."""
        if addresses:
            for known in list(self._missed):
                self._missed[known] += 1
            self._missed |= dict.fromkeys(addresses, 0)
            self._missed = {known: missed for known, missed in self._missed.items() if missed < MISSES}
        return sorted(self._missed)


def _family(listen: Address | None) -> int | None:
    """The IP version that a node listens on; None for both versions, or if it listens on a name."""
    try:
        return None if listen is None or listen.host == "::" else ipaddress.ip_address(listen.host).version
    except ValueError:
        return None


@dataclass(slots=True)
class _Listed:
    """One listed address: its last handshake, and since when that has been the same; why the node there refused us, else
    ""; when it last answered. Times are trio's."""

    handshake: Handshake | None = None
    refusal: str = ""
    since: float = -math.inf
    requested_at: float = -math.inf


@dataclass(eq=False, repr=False)
class Listed:
    """A source (`membership.Source`) over the addresses of `_look`. `_listen` is None for a node that serves no blocks."""

    _look: Look
    _handshake: Handshake
    _listen: Address | None
    _identify: Identify
    _resolve: Resolve

    def __post_init__(self) -> None:
        self._listed: dict[Address, _Listed] = {}
        self._at_once = trio.CapacityLimiter(ASKED_AT_ONCE)

    @property
    def trouble(self) -> str:
        return self._look.trouble if isinstance(self._look, Dns) else ""

    async def present(self) -> list[Sighting]:
        addresses = await self._look()
        self._listed = {address: self._listed.get(address) or _Listed() for address in addresses}
        async with trio.open_nursery() as nursery:
            for address in self._due(trio.current_time()):
                contained(nursery, f"peer {address}", self._ask_for_handshake, address, self._listed[address])
        in_order = sorted(self._listed.items(), key=lambda item: (item[1].since, item[0]))
        return [Sighting(address, found.handshake, found.refusal) for address, found in in_order]

    def handshake_requested(self, host: str) -> bool:
        """Request the handshake of the node at this host at the next poll, unless it answered within the last two: two
        nodes would otherwise ask each other for ever. True if a node has not answered yet: it may be listed by its name."""
        at_host = [found for address, found in self._listed.items() if address.host == host]
        for found in at_host:
            if trio.current_time() - found.requested_at >= 2 * POLL_S:
                found.requested_at = -math.inf
        return any(found.handshake is None for found in at_host or self._listed.values())

    async def leave(self) -> None:
        """Do nothing: peers notice that this node no longer answers."""

    def _due(self, now: float) -> list[Address]:
        lives: defaultdict[str, set[str]] = defaultdict(set)
        for found in self._listed.values():
            if found.handshake is not None:
                lives[found.handshake.node].add(found.handshake.life)
        return [
            address
            for address, found in self._listed.items()
            if found.handshake is None
            or now - found.requested_at >= HANDSHAKE_TTL_S
            # Two daemons have one id: one of them has ended, or will take another id.
            or len(lives[found.handshake.node]) > 1
        ]

    async def _ask_for_handshake(self, address: Address, listed: _Listed) -> None:
        try:
            async with self._at_once:
                with trio.fail_after(IDENTIFY_S):
                    handshake = await self._ask(address)
        except (OSError, CachefsError, trio.TooSlowError) as exc:
            log.debug("peer %s did not answer a handshake: %s", address, exc)
            listed.requested_at = -math.inf
            if isinstance(exc, PeerFailed) and exc.kind == "refused":
                listed.refusal = str(exc)
            return
        listed.refusal = ""
        listed.requested_at = trio.current_time()
        if listed.handshake != handshake:
            listed.handshake, listed.since = handshake, listed.requested_at

    async def _ask(self, address: Address) -> Handshake:
        if self._listen is not None and await is_own(address, self._listen, self._resolve):
            return self._handshake
        return await self._identify(address)

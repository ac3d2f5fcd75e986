"""Members from a list of addresses: the one on the command line, or what a DNS name means.

A list says where, not who. So each address is introduced: if it is one of this machine's and the port is ours, it is
this node; otherwise `identify` asks it (a hello of the exchange), and asks again now and then, because a daemon may
return with another weight or other sources. Who never answered stays listed: whether it is asked for extents is for its
health to decide.
"""

from __future__ import annotations

import ipaddress
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

import trio

from cachefs.errors import CachefsError
from cachefs.peers.membership import Report, Sighting
from cachefs.peers.wire import Address, Hello

log = logging.getLogger(__name__)

LOOK_EVERY_S = (5.0, 10.0)
"""A random time between these, so that nodes that start together do not ask together. The usual TTL of a cluster's DNS is
5 s (CoreDNS 5 to 30)."""

INTRODUCED_FOR_S = 60.0
"""How long an answer is believed. Guessed: a thousand nodes then get 17 hellos a second each."""

ASK_AGAIN_S = 10.0
"""When nobody answered. Guessed."""

ASKED_AT_ONCE = 64
"""Derived: a thousand silent addresses take half a minute."""

IDENTIFY_S = 2.0
"""As for the first byte of a peer that nothing is known of."""

RESOLVERS = 4
"""Threads that may hang in a resolver. A bound of their own: the daemon's other threads are not to wait for names."""

LOOK_DEADLINE_S = 10.0
"""For a resolver: twice its usual timeout of 5 s, so that a second server can answer."""

MISSES = 3
"""Answers without an address before it has left. Guessed: some servers answer with a part of many addresses, others leave
out a pod that is not ready for a moment."""

Identify = Callable[[str, int], Awaitable[Hello]]
"""(host, port) → who answers there. Raises OSError or `CachefsError`. Has `IDENTIFY_S`."""

Resolve = Callable[[str, int], Awaitable[Collection[str]]]
"""(name, port) → addresses. Raises OSError, also for a name that cannot be one. Whoever asks brings a deadline."""

Look = Callable[[], Awaitable[Collection[Address]]]


class Resolver:
    """The system's resolver, in threads. One that hangs is left behind, and so are at most `RESOLVERS`: then further
    questions wait until one of them has returned."""

    def __init__(self, getaddrinfo: Callable[..., list[Any]] = socket.getaddrinfo) -> None:
        self._getaddrinfo = getaddrinfo
        self.threads = trio.CapacityLimiter(RESOLVERS)

    async def __call__(self, name: str, port: int) -> list[str]:
        ask = partial(self._getaddrinfo, name, port, type=socket.SOCK_STREAM)
        try:
            found = await trio.to_thread.run_sync(ask, limiter=self.threads, abandon_on_cancel=True)
        except ValueError as exc:
            raise OSError(f"no name of a host: {name}") from exc
        return sorted({str(sockaddr[0]) for *_, sockaddr in found})


def is_local(address: str) -> bool:
    """Whether packets to this IP address stay on this machine. Nothing is sent: a datagram socket is connected, and the
    kernel's choice of a source address tells. (Whether one could bind to it says less: `ip_nonlocal_bind`.)"""
    try:
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return True
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return bool(probe.getsockname()[0] == address)
    except (OSError, ValueError):
        return False


async def is_own(address: Address, listen: Address, resolve: Resolve) -> bool:
    """Whether this is where the node listens. Raises OSError when that cannot be told: the name means nothing now."""
    if address.port != listen.port:
        return False
    if address.host == listen.host:
        return True
    try:
        everywhere = ipaddress.ip_address(listen.host).is_unspecified
    except ValueError:  # it listens on a name
        return False
    meant = await resolve(address.host, address.port)
    return any(found == listen.host or (everywhere and is_local(found)) for found in meant)


class Lookups:
    """What a name has meant lately. Pure."""

    def __init__(self) -> None:
        self._missed: dict[str, int] = {}

    def answered(self, addresses: Collection[str]) -> list[str]:
        """Those of this answer, and those that were missing from fewer than `MISSES` answers in a row. An empty answer is
        a failed one: nothing is concluded from it."""
        if addresses:
            for known in list(self._missed):
                self._missed[known] += 1
            self._missed |= dict.fromkeys(addresses, 0)
            self._missed = {known: missed for known, missed in self._missed.items() if missed < MISSES}
        return sorted(self._missed)


def static(addresses: Collection[Address]) -> Look:
    """These."""

    async def look() -> Collection[Address]:
        return addresses

    return look


def dns(name: str, port: int, resolve: Resolve) -> Look:
    """What the name means; what it meant last while that cannot be learnt."""
    lookups = Lookups()

    async def look() -> Collection[Address]:
        found: Collection[str] = ()
        try:
            with trio.fail_after(LOOK_DEADLINE_S):
                found = await resolve(name, port)
        except (OSError, trio.TooSlowError) as exc:
            log.debug("cannot look up %s: %s", name, exc)
        return [Address(address, port) for address in lookups.answered(found)]

    return look


class Listed:
    """A source (`membership.Source`) over a list that `look` gives. `listen` is None for a node that serves nobody."""

    def __init__(
        self,
        look: Look,
        hello: Hello,
        listen: Address | None,
        identify: Identify,
        resolve: Resolve,
        rng: random.Random,
    ) -> None:
        self._look = look
        self._hello = hello
        self._listen = listen
        self._identify = identify
        self._rng = rng
        self._resolve = resolve
        self._known: dict[Address, Hello | None] = {}
        self._ask_at: dict[Address, float] = {}

    async def run(self, report: Report) -> None:
        while True:
            listed = await self._look()
            self._known = {address: self._known.get(address) for address in listed}
            self._ask_at = {address: at for address, at in self._ask_at.items() if address in self._known}
            self._say(report)
            now = trio.current_time()
            due = [address for address in self._known if self._ask_at.get(address, now) <= now]
            at_once = trio.CapacityLimiter(ASKED_AT_ONCE)
            async with trio.open_nursery() as nursery:
                for address in due:
                    nursery.start_soon(self._introduce, address, at_once, report)
            if due:
                self._say(report)
            await trio.sleep(self._rng.uniform(*LOOK_EVERY_S))

    def _say(self, report: Report) -> None:
        report([Sighting(address, hello) for address, hello in self._known.items()])

    async def _introduce(self, address: Address, at_once: trio.CapacityLimiter, report: Report) -> None:
        async with at_once:
            try:
                with trio.fail_after(IDENTIFY_S):
                    self._known[address] = await self._ask(address)
                if self._known[address] is self._hello:
                    self._say(report)  # at once: whoever does not know itself would ask itself
                again = INTRODUCED_FOR_S
            except (OSError, CachefsError, trio.TooSlowError) as exc:
                log.debug("peer %s did not say who it is: %s", address, exc)
                again = ASK_AGAIN_S
            self._ask_at[address] = trio.current_time() + again * self._rng.uniform(0.8, 1.0)

    async def _ask(self, address: Address) -> Hello:
        if self._listen is not None and await is_own(address, self._listen, self._resolve):
            return self._hello
        return await self._identify(*address)

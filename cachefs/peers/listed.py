"""Members from a list of addresses: the one on the command line, or what a DNS name means.

A list says where, not who, and only who is known has a place in the ring. So each address is introduced: if it is one of
this machine's and the port is ours, it is this node; otherwise `identify` asks it (a hello of the exchange), and asks again
now and then, because a daemon may return with another weight or other sources, or another node may have the address. Who
asks for our hello is asked for its own at once: so nodes that start together know each other as soon as the last of them
listens. Who answered once stays what it was while it is silent: whether it is asked for extents is for its health to decide.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import random
import socket
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import trio

from cachefs.errors import CachefsError
from cachefs.peers.membership import Report, Sighting
from cachefs.peers.protocol import PeerFailed
from cachefs.peers.wire import Address, Hello
from cachefs.tasks import contained

log = logging.getLogger(__name__)

LOOK_EVERY_S = (5.0, 10.0)
"""A random time between these, so that nodes that start together do not ask together. The usual TTL of a cluster's DNS is
5 s (CoreDNS 5 to 30)."""

INTRODUCED_FOR_S = 60.0
"""How long an answer is believed. Guessed: a thousand nodes then get 17 hellos a second each."""

ASK_AGAIN_S = (0.5, 10.0)
"""When nobody answered: doubling from the first to the second. Guessed: who starts with us is there within seconds."""

FRESH_S = 2.0
"""Who was asked since then is not asked for having asked us: two nodes would go on for ever. As `IDENTIFY_S`. Two addresses
whose daemons have one id are asked again after it: one is gone, or will take another."""

STRANGERS_S = 1.0
"""How often somebody at an address that is not listed (listed by name, or one of several) has all unknown ones asked.
Guessed."""

FIRST_S = 1.0
"""How long the first report waits for those who are being asked. Guessed: a peer answers within a millisecond."""

TOGETHER_S = 0.05
"""How long each later one does, so that a thousand answers are a few reports. Guessed."""

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


class Look(Protocol):
    """A list, looked at anew each time it is called. `trouble` says why that failed, if it did."""

    @property
    def trouble(self) -> str: ...

    async def __call__(self) -> Collection[Address]: ...


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


class Static:
    """These addresses."""

    trouble = ""

    def __init__(self, addresses: Collection[Address]) -> None:
        self._addresses = addresses

    async def __call__(self) -> Collection[Address]:
        return self._addresses


class Dns:
    """What a name means; what it meant last while that cannot be learnt."""

    def __init__(self, name: str, port: int, resolve: Resolve) -> None:
        self.trouble = ""
        self._name, self._port = name, port
        self._resolve = resolve
        self._lookups = Lookups()

    async def __call__(self) -> Collection[Address]:
        found: Collection[str] = ()
        trouble = ""
        try:
            with trio.fail_after(LOOK_DEADLINE_S):
                found = await self._resolve(self._name, self._port)
        except (OSError, trio.TooSlowError) as exc:
            said = (
                (isinstance(exc, OSError) and exc.strerror)
                or str(exc)
                or f"no answer in {LOOK_DEADLINE_S:g} s"
            )
            trouble = f"cannot look up the peers' name {self._name}: {said}"
            log.log(logging.DEBUG if self.trouble else logging.WARNING, "%s", trouble)
        self.trouble = trouble
        return [Address(address, self._port) for address in self._lookups.answered(found)]


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
        """In the order in which that was heard first."""
        self._refusals: dict[Address, str] = {}
        self._asks: dict[Address, _Asks] = {}
        self._under_way = 0
        self._at_once = trio.CapacityLimiter(ASKED_AT_ONCE)
        self._wakes_at = -math.inf
        self._wake, self._news, self._all_said = trio.Event(), trio.Event(), trio.Event()
        self._strangers_at = -math.inf

    @property
    def trouble(self) -> str:
        return self._look.trouble

    async def run(self, report: Report) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell, report)
            while True:
                self._take(await self._look())
                look_at = trio.current_time() + self._rng.uniform(*LOOK_EVERY_S)
                while (now := trio.current_time()) < look_at:
                    due = [a for a, asks in self._asks.items() if not asks.under_way and asks.next_at <= now]
                    if due and not self._under_way:
                        self._all_said = trio.Event()
                    for address in due:
                        self._asks[address].under_way = True
                        self._under_way += 1
                        contained(nursery, f"peer {address}", self._introduce, address, self._asks[address])
                    if not self._under_way:
                        self._all_said.set()
                    waiting = (asks.next_at for asks in self._asks.values() if not asks.under_way)
                    self._wakes_at = min(look_at, min(waiting, default=look_at))
                    with trio.move_on_at(self._wakes_at):
                        await self._wake.wait()
                    self._wake = trio.Event()

    def heard(self, host: str) -> None:
        now = trio.current_time()
        there = [address for address in self._known if address.host == host]
        for address in there:
            asks = self._asks[address]
            if self._known[address] is None or now - asks.begun_at >= FRESH_S:
                self._due(asks, now)
        if not there and now - self._strangers_at >= STRANGERS_S:
            self._strangers_at = now
            for address, hello in self._known.items():
                if hello is None:
                    self._due(self._asks[address], now)

    def _take(self, listed: Collection[Address]) -> None:
        """The list as it is now."""
        if not self._known or set(listed) != self._known.keys():
            self._news.set()
        self._known = {address: hello for address, hello in self._known.items() if address in listed}
        for address in listed:
            self._known.setdefault(address, None)
        self._refusals = {where: said for where, said in self._refusals.items() if where in self._known}
        self._asks = {address: self._asks.get(address) or _Asks() for address in self._known}

    def _due(self, asks: _Asks, at: float) -> None:
        asks.next_at = at
        if at < self._wakes_at:
            self._wake.set()

    async def _tell(self, report: Report) -> None:
        patience_s = FIRST_S
        while True:
            await self._news.wait()
            with trio.move_on_after(patience_s):
                await self._all_said.wait()
            self._news = trio.Event()
            refusals = self._refusals
            report([Sighting(where, hello, refusals.get(where, "")) for where, hello in self._known.items()])
            patience_s = TOGETHER_S

    async def _introduce(self, address: Address, asks: _Asks) -> None:
        try:
            async with self._at_once:
                asks.begun_at = trio.current_time()
                with trio.fail_after(IDENTIFY_S):
                    said = await self._ask(address)
        except (OSError, CachefsError, trio.TooSlowError) as exc:
            log.debug("peer %s did not say who it is: %s", address, exc)
            if isinstance(exc, PeerFailed) and exc.kind == "refused":
                self._news.set()
                self._refusals[address] = str(exc)
            first, longest = ASK_AGAIN_S
            again = min(longest, first * 2.0 ** min(asks.failures, 16))
            asks.failures += 1
        else:
            asks.failures = 0
            self._refusals.pop(address, None)
            again = INTRODUCED_FOR_S
            for other, known in self._known.items():
                if known is not None and known.node == said.node and known.life != said.life:
                    again = FRESH_S
                    self._due(self._asks[other], min(self._asks[other].next_at, trio.current_time() + again))
            if address in self._known and self._known[address] != said:
                del self._known[address]  # what was heard last comes last
                self._known[address] = said
                self._news.set()
        asks.under_way = False
        self._under_way -= 1
        if not self._under_way:
            self._all_said.set()
        self._due(asks, trio.current_time() + again * self._rng.uniform(0.8, 1.0))

    async def _ask(self, address: Address) -> Hello:
        if self._listen is not None and await is_own(address, self._listen, self._resolve):
            return self._hello
        return await self._identify(*address)


@dataclass(slots=True)
class _Asks:
    """How often one address is asked."""

    next_at: float = -math.inf
    begun_at: float = -math.inf
    failures: int = 0
    under_way: bool = False

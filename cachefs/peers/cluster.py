"""Which members to ask for an extent, and what a member's answers say about its health.

The members of an extent, in the ring's order, are its owner, the other replicas, and its successors. A node that misses a
block asks them in that order. It skips members that may not be tried now, and asks at most `ASKED` before the origin. If the
next member is the node itself, it fetches from the origin.

A request carries the server's place in this order (its rank). A node fetches for a client only what it owns by its own
members, or what it is the successor for by the client's rank. So when an owner dies, the origin serves its extents once
more, and not once for each reader. If two nodes know different members, the worst result is one more request to the origin.

A node sends no request to a third node to answer one. So a request takes one hop and cannot go in circles."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, NamedTuple, TypeVar

import trio

from cachefs.base.names import ObjectId
from cachefs.base.tasks import contained
from cachefs.peers.client import TOTAL_S, Client
from cachefs.peers.health import DEAD_AFTER, LONGEST_DEADLINE_S, Health, Pace, PeerStats, PeerTable
from cachefs.peers.membership import REFUSED, UNKNOWN, Member, Membership
from cachefs.peers.wire import Address, BlockRequest, Kind, PeerFailed, Sink

log = logging.getLogger(__name__)

T = TypeVar("T")

ASKED = 2
"""Members that are asked for one range before the origin. If two fail, the fault is not that of one node."""

SHARES_OF_TIME = ASKED + 1
"""A peer that sends signs of life may take this fraction (one part in so many) of a reader's time. The rest must suffice
for the origin, because the peer may be cut off from the origin when this node is not."""

SUCCESSORS = 2
"""Members after the replicas, which stand in for dead ones. Derived: the owner and one successor may both be gone."""

PROBES_AT_ONCE = 64
"""Handshakes in flight."""

ANSWERS: Collection[Kind] = ("not_here", "busy", "changed")
"""Failures of a request to a healthy peer."""

TELLING: Collection[Kind] = ("refused", "corrupt")
"""Failures that the user must mend (another key or clock, broken memory): they are logged as warnings."""


class Candidate(NamedTuple):
    """A member to ask, and its place among those of the extent."""

    member: Member
    rank: int


@dataclass(eq=False, repr=False)
class Cluster:
    """This node's view of the members, and its requests to them. `replicas` members keep an extent; `serves` is False for a
    node without a share; `deadline_s` is how long a reader waits in all. On the trio thread only."""

    membership: Membership
    _client: Client
    _stats: PeerTable
    _rng: random.Random
    block_size: int
    replicas: int = 1
    serves: bool = True
    deadline_s: float = TOTAL_S

    def __post_init__(self) -> None:
        self.patience_s = self.deadline_s / SHARES_OF_TIME
        """How long a reader waits for a peer that sends signs of life, queue included."""
        self._now = trio.current_time
        self._health: dict[str, Health] = {}
        self._reached: dict[str, Address] = {}
        self._known: dict[str, Member] = {}
        self.membership.on_change = self.changed

    # -- ownership -------------------------------------------------------------------------------

    def candidates(self, digest: bytes, extent: int) -> Iterator[Candidate]:
        """The members to ask before the origin. The caller must ask each that it takes: `Health.may_try` permits one trial
        of a member that failed, and this uses it."""
        own = self.membership.own
        others = takewhile(lambda candidate: candidate.member.name not in own, self.keepers(digest, extent))
        return islice(others, ASKED)

    def owner(self, digest: bytes, extent: int) -> Member | None:
        """The owner of the extent; None when it is this node, or there are no members."""
        order = self._ring_order(digest, extent)
        return self.membership.members[order[0]] if order and order[0] not in self.membership.own else None

    def keeps(self, digest: bytes, extent: int) -> bool:
        """True if this node caches the extent as its own: it is one of the replicas, or stands in for dead ones. A node that
        serves no blocks keeps all that it reads."""
        order = self._ring_order(digest, extent)
        return not self.serves or not order or self._is_among_first(order, self.replicas)

    def may_fetch(self, digest: bytes, extent: int, rank: int) -> bool:
        """True if this node should fetch the extent for a client that gives it this rank: it has at most this rank by its
        own members too, or would without those that it knows to be dead (which the client may not know)."""
        return self._is_among_first(self._ring_order(digest, extent), max(self.replicas, rank + 1))

    def _is_among_first(self, order: Collection[str], count: int) -> bool:
        """True if this node is among the first `count` of these members that are not dead."""
        alive = 0
        for name in order:
            if name in self.membership.own:
                return True
            alive += self._health_of(name).state != "dead"
            if alive == count:
                return False
        return False

    def keepers(self, digest: bytes, extent: int) -> Iterator[Candidate]:
        """The replicas of the extent, then its successors: this node, and those of the others that may be tried. As with
        `candidates`, the caller must ask each that it takes."""
        # Read once, together: both may be replaced while the caller asks.
        members, own = self.membership.members, self.membership.own
        for rank, name in enumerate(self._ring_order(digest, extent)):
            if name in own or self._health_of(name).may_try(self._now()):
                yield Candidate(members[name], rank)

    def _ring_order(self, digest: bytes, extent: int) -> tuple[str, ...]:
        """The names of the owner, the other replicas and the successors."""
        return self.membership.ring.owners(digest, extent, self.replicas + SUCCESSORS)

    # -- requests ------------------------------------------------------------------------------------

    async def read(
        self,
        candidate: Candidate,
        version: ObjectId,
        start: int,
        stop: int,
        sink: Sink,
        *,
        sink_waits: bool,
        origin_rate: float = 0.0,
        others: int = 0,
    ) -> None:
        """Read bytes [start, stop) of a version, whole blocks of one extent, into `sink`. `origin_rate` and `others` are as
        in `Pace`. Raises `PeerFailed`, and what the sink raises."""
        request = self._request(version, start, stop, candidate.rank)
        deadline_s = self._health_of(candidate.member.name).read_deadline()
        await self._ask(
            candidate.member,
            lambda address: self._client.read(
                address,
                request,
                sink,
                deadline_s=deadline_s,
                working_s=self.patience_s,
                sink_waits=sink_waits,
                pace=Pace(origin_rate, others, self.patience_s),
            ),
        )

    def lied(self, member: Member) -> None:
        """Send this member no more requests until it or this node restarts."""
        self._health_of(member.name).lying = True

    def failed_since(self, candidate: Candidate, moment: float) -> bool:
        """True if a request to this member has failed at or after `moment` (of trio's clock)."""
        return self._health_of(candidate.member.name).failed_at >= moment

    async def prefetch(self, candidate: Candidate, version: ObjectId, start: int, stop: int) -> None:
        """Have the member fetch and cache bytes [start, stop) of one extent. Raises `PeerFailed`."""
        request = self._request(version, start, stop, candidate.rank)
        await self._ask(
            candidate.member,
            lambda address: self._client.prefetch(address, request, working_s=self.deadline_s),
        )

    async def have(self, member: Member, version: ObjectId, start: int, stop: int) -> list[bool]:
        """For each block of the bytes [start, stop), True if the member has it. Raises `PeerFailed`."""
        request = self._request(version, start, stop, 0)
        return await self._reach(member, lambda address: self._client.have(address, request))

    async def probe(self) -> list[str]:
        """Request a handshake of all other members. Those that do not answer count as dead when this returns, and their
        successors stand in. Returns their addresses, and the listed addresses that have never answered."""
        unknown = (UNKNOWN.state, REFUSED)
        silent = [
            str(where) for where, found in self.membership.incompatible.items() if found.state in unknown
        ]
        at_once = trio.CapacityLimiter(PROBES_AT_ONCE)

        async def ask(member: Member) -> None:
            health = self._health_of(member.name)
            async with at_once:
                for _ in range(DEAD_AFTER):
                    sent_at = self._now()
                    try:
                        await self._reach(member, self._client.handshake)
                    except PeerFailed:
                        health.failed(sent_at, self._now())
                    else:
                        return health.succeeded(self._now() - sent_at)
            silent.append(str(member))

        async with trio.open_nursery() as nursery:
            for member in self.others():
                contained(nursery, f"peer {member}", ask, member)
        return sorted(silent)

    async def _ask(self, member: Member, ask: Callable[[Address], Awaitable[float]]) -> None:
        """Call `ask`, which returns the seconds to the first sign of life, and record in the member's health how it ended.
        Raises as `ask`."""
        health, sent_at = self._health_of(member.name), self._now()
        try:
            first_s = await self._reach(member, ask)
        except PeerFailed as exc:
            now, before = self._now(), health.state
            took_long = now - sent_at > LONGEST_DEADLINE_S
            # A late answer counts as slow, too: the peer may have lost the origin.
            if exc.kind == "timeout" or (took_long and exc.kind in ANSWERS):
                health.slow(sent_at, now)
            elif exc.kind in ANSWERS:
                health.succeeded(now - sent_at)
            # A peer whose origin pauses breaks off its reply behind some blocks: that is no failure.
            elif not (exc.kind == "reset" and exc.delivered):
                health.failed(sent_at, now)
            if health.state == "dead" != before:
                level = logging.WARNING if exc.kind in TELLING else logging.INFO
                log.log(level, "peer %s is left alone for a while: %s", member, exc)
            raise
        if health.state == "dead":
            log.info("peer %s is back", member)
        health.succeeded(first_s)

    async def _reach(self, member: Member, ask: Callable[[Address], Awaitable[T]]) -> T:
        """Try the member's addresses one after the other until one answers, beginning with the one that answered last."""
        usual = self._reached.get(member.name)
        *others, last = sorted(member.addresses, key=lambda address: address != usual)
        for address in others:
            try:
                found = await ask(address)
            except PeerFailed as exc:
                if exc.kind != "connect":
                    raise
            else:
                self._reached[member.name] = address
                return found
        found = await ask(last)
        if others:
            self._reached[member.name] = last
        return found

    def others(self) -> list[Member]:
        """All members but this node."""
        membership = self.membership
        return [m for name, m in membership.members.items() if name not in membership.own]

    def _request(self, version: ObjectId, start: int, stop: int, rank: int) -> BlockRequest:
        size = self.block_size
        return BlockRequest(version, start // size, -(-stop // size), size, rank)

    def _health_of(self, name: str) -> Health:
        found = self._health.get(name)
        if found is None:
            found = Health(self._rng)
            if name in self.membership.members:  # it may have left during the request
                self._health[name] = found
        return found

    def changed(self) -> None:
        """Forget what is known of members that left or restarted. Called when the members have changed."""
        members = self.membership.members
        for name, known in self._known.items():
            now = members.get(name)
            if now is None or now.life != known.life:
                self._health.pop(name, None)
            if now != known:
                self._reached.pop(name, None)
        for address in _addresses(self._known) - _addresses(members):
            self._client.forget(address)
        self._known = dict(members)

    # -- status ---------------------------------------------------------------------------

    def status(self) -> list[dict[str, Any]]:
        """One row for each member, sorted by address. `share` is that of the ring. `bytes_out` is counted by host, so
        several daemons of one machine have the same count."""
        members = self.membership.members
        total = sum(member.weight for member in members.values()) or 1.0
        table, unknown = self._stats.rows, PeerStats()
        rows = []
        for name, member in sorted(members.items(), key=lambda item: item[1].addresses):
            asked = [table.get(str(address), unknown) for address in member.addresses]
            latencies = [row.first_byte_s / row.answered for row in asked if row.answered]
            rows.append(
                {
                    "name": str(member),
                    "id": name,
                    "addresses": [str(address) for address in member.addresses],
                    "here": name in self.membership.own,
                    "share": member.weight / total,
                    "state": self._health_of(name).state,
                    "bytes_in": sum(row.bytes_in for row in asked),
                    "bytes_out": table.get(self._client.host_of(member.addresses[0]), unknown).bytes_out,
                    "requests": sum(row.requests for row in asked),
                    "failures": dict(sum((row.failures for row in asked), Counter())),
                    "latency_s": sum(latencies) / len(latencies) if latencies else 0.0,
                }
            )
        return rows


def _addresses(members: Mapping[str, Member]) -> set[Address]:
    return {address for member in members.values() for address in member.addresses}

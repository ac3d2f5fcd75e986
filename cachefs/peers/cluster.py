"""Whom to ask for an extent, and what came of it.

The members of an extent, in the ring's order, are its owner, then (with replicas) those that keep a copy of what they read,
then its heirs. Who misses something walks that order: where it meets itself it fetches from the store, for it is the owner,
or all before it are believed dead. Members that are left alone for now are passed over. At most `ASKED` are asked, then the
store. The request says how far the asker has come (its rank), so a node fetches for others only what is its own in its own
view, or what it is the heir of in the asker's. So when an owner dies, its extents come from the store once more, and not
once for each reader; and where views differ, the worst is one more request.

A node never asks another one in order to answer: one hop, and no circles.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import trio

from cachefs.names import ObjectId
from cachefs.peers.client import TOTAL_S, Client
from cachefs.peers.health import DEAD_AFTER, LONGEST_DEADLINE_S, Health
from cachefs.peers.membership import REFUSED, UNKNOWN, Member, Membership
from cachefs.peers.pace import Pace
from cachefs.peers.protocol import PeerFailed, Sink
from cachefs.peers.stats import PeerTable
from cachefs.peers.wire import Address, BlockRequest, Kind
from cachefs.tasks import contained

log = logging.getLogger(__name__)

T = TypeVar("T")

ASKED = 2
"""Members asked for one range before the store. Guessed: with two that fail, something is wrong with more than a node."""

HASTE = ASKED + 1
"""A peer that says that it works may do so for this part of a reader's time, so that the store is asked within it, too: the
peer may be cut off from the store, and we are not."""

HEIRS = 2
"""Members behind the replicas that may stand in. Derived from `ASKED`: the owner and its heir may both be gone."""

GREETED_AT_ONCE = 64
"""As `listed.ASKED_AT_ONCE`."""

ANSWERS: Collection[Kind] = ("not_here", "busy", "changed")
"""Of a peer that is well."""

TELLING: Collection[Kind] = ("refused", "corrupt")
"""What does not mend by itself: another key or clock, a broken memory."""


class Asked(NamedTuple):
    """A member to be asked, and its place among those of the extent."""

    member: Member
    rank: int


class Cluster:
    """This node among the members. `replicas` of them keep an extent; `serves` says whether this node is one of them;
    `deadline_s` is how long a reader waits in all. On the trio thread only."""

    def __init__(
        self,
        membership: Membership,
        client: Client,
        stats: PeerTable,
        rng: random.Random,
        *,
        block_size: int,
        replicas: int = 1,
        serves: bool = True,
        deadline_s: float = TOTAL_S,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.membership = membership
        self.stats = stats
        self.replicas = replicas
        self.serves = serves
        self._client = client
        self._rng = rng
        self.block_size = block_size
        self._deadline_s = deadline_s
        self.patience_s = deadline_s / HASTE
        """How long a reader waits for a peer that works, and in the queue in front of it."""
        self._now = clock
        self._health: dict[str, Health] = {}
        self._reached: dict[str, Address] = {}
        self._known: dict[str, Member] = {}
        membership.on_change = self.changed

    # -- whose it is -------------------------------------------------------------------------------

    def candidates(self, digest: bytes, extent: int) -> Iterator[Asked]:
        """Whom to ask, one after the other; then the store. Whoever takes one from here asks it: for a member that
        failed it is the one trial."""
        asked = 0
        members, own = (
            self.membership.members,
            self.membership.own,
        )  # of now, whoever comes and goes meanwhile
        for rank, name in enumerate(self._owners(digest, extent)):
            if name in own or asked == ASKED:
                return
            if self._of(name).may_try(self._now()):
                asked += 1
                yield Asked(members[name], rank)

    def owner(self, digest: bytes, extent: int) -> Member | None:
        """Whose the extent is; None when it is this node's, or nobody's."""
        names = self._owners(digest, extent)
        return self.membership.members[names[0]] if names and names[0] not in self.membership.own else None

    def keeps(self, digest: bytes, extent: int) -> bool:
        """Whether this node keeps what it has of the extent: as one of its owners, or as the heir of those that are dead. A
        node that serves nobody has no part of the ring, and keeps what it likes."""
        owners = self._owners(digest, extent)
        return not self.serves or not owners or self._stands(owners, self.replicas)

    def may_fetch(self, digest: bytes, extent: int, rank: int) -> bool:
        """Whether to fetch it for somebody who believes that this node has that rank: it has in our view, or would have
        without those that we find dead (whoever asks may not know them at all)."""
        return self._stands(self._owners(digest, extent), max(self.replicas, rank + 1))

    def _stands(self, owners: Collection[str], count: int) -> bool:
        """Whether this node is among the first `count` that are not dead."""
        alive = 0
        for name in owners:
            if name in self.membership.own:
                return True
            alive += self._of(name).state != "dead"
            if alive == count:
                return False
        return False

    def keepers(self, digest: bytes, extent: int) -> Iterator[Asked]:
        """Those who are to keep it, in the ring's order, and behind them who stands in: this node among them, of the others
        those that may be asked. As with `candidates`, whoever takes one asks it."""
        members, own = self.membership.members, self.membership.own
        for rank, name in enumerate(self._owners(digest, extent)):
            if name in own or self._of(name).may_try(self._now()):
                yield Asked(members[name], rank)

    def _owners(self, digest: bytes, extent: int) -> tuple[str, ...]:
        return self.membership.ring.owners(digest, extent, self.replicas + HEIRS)

    # -- asking ------------------------------------------------------------------------------------

    async def read(
        self,
        asked: Asked,
        version: ObjectId,
        start: int,
        stop: int,
        sink: Sink,
        *,
        sink_waits: bool,
        origin_rate: float = 0.0,
        others: int = 0,
    ) -> None:
        """Bytes [start, stop) of a version, whole blocks of one extent, into `sink`. `origin_rate` and `others` are as in
        `Pace`. Raises `PeerFailed`, and what the sink raises."""
        request = self._request(version, start, stop, asked.rank)
        deadline_s = self._of(asked.member.name).read_deadline()
        await self._judged(
            asked.member,
            lambda address: self._client.read(
                *(address, request, sink),
                deadline_s=deadline_s,
                working_s=self.patience_s,
                sink_waits=sink_waits,
                pace=Pace(origin_rate, others, self.patience_s),
            ),
        )

    def lied(self, member: Member) -> None:
        """It is asked for nothing more, until it or this node starts again: its successors stand in."""
        self._of(member.name).lying = True

    def failed_since(self, asked: Asked, moment: float) -> bool:
        """Whether it has failed for somebody from that moment (of trio's clock) on."""
        return self._of(asked.member.name).failed_since(moment)

    async def bring(self, asked: Asked, version: ObjectId, start: int, stop: int) -> None:
        """Have it fetch bytes [start, stop) (of one extent) and keep them. Raises `PeerFailed`."""
        request = self._request(version, start, stop, asked.rank)
        await self._judged(
            asked.member,
            lambda address: self._client.bring(address, request, working_s=self._deadline_s),
        )

    async def have(self, member: Member, version: ObjectId, start: int, stop: int) -> list[bool]:
        """Which blocks of [start, stop) (in bytes) the member holds. Raises `PeerFailed`."""
        request = self._request(version, start, stop, 0)
        return await self._reach(member, lambda address: self._client.have(address, request))

    async def greet(self) -> list[str]:
        """Ask all others whether they are there, before much depends on it: those that are not are dead when this returns,
        so their heirs stand in. Their addresses, and those at which nobody has ever answered."""
        unknown = (UNKNOWN.state, REFUSED)
        silent = [str(where) for where, found in self.membership.apart.items() if found.state in unknown]
        at_once = trio.CapacityLimiter(GREETED_AT_ONCE)

        async def ask(member: Member) -> None:
            health = self._of(member.name)
            async with at_once:
                for _ in range(DEAD_AFTER):
                    sent_at = self._now()
                    try:
                        await self._reach(member, self._client.hello)
                    except PeerFailed:
                        health.failed(sent_at, self._now())
                    else:
                        return health.succeeded(self._now() - sent_at)
            silent.append(str(member))

        async with trio.open_nursery() as nursery:
            for member in self.others():
                contained(nursery, f"peer {member}", ask, member)
        return sorted(silent)

    async def _judged(self, member: Member, ask: Callable[[Address], Awaitable[float]]) -> None:
        """`ask` returns the seconds to the first sign of life. Raises what it raises."""
        health, sent_at = self._of(member.name), self._now()
        try:
            first_s = await self._reach(member, ask)
        except PeerFailed as exc:
            self._judge(member, health, exc, sent_at)
            raise
        if health.state == "dead":
            log.info("peer %s is back", member)
        health.succeeded(first_s)

    async def _reach(self, member: Member, ask: Callable[[Address], Awaitable[T]]) -> T:
        """At its addresses in turn, until somebody answers: the one that did last is the first."""
        usual = self._reached.get(member.name)
        *others, last = sorted(member.addresses, key=lambda address: address != usual)
        for address in others:
            try:
                found = await ask(address)
            except PeerFailed as exc:
                if exc.kind == "connect":
                    continue
                raise
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

    def _judge(self, member: Member, health: Health, exc: PeerFailed, sent_at: float) -> None:
        now, before = self._now(), health.state
        late = now - sent_at > LONGEST_DEADLINE_S
        if exc.kind == "timeout" or (late and exc.kind in ANSWERS):
            health.slow(sent_at, now)  # also a no that takes so long: perhaps it has lost the store
        elif exc.kind in ANSWERS:
            health.succeeded(now - sent_at)
        elif not (exc.kind == "reset" and exc.delivered):  # that may be a pause; the next request will tell
            health.failed(sent_at, now)
        if health.state == "dead" != before:
            level = logging.WARNING if exc.kind in TELLING else logging.INFO
            log.log(level, "peer %s is left alone for a while: %s", member, exc)

    def _of(self, name: str) -> Health:
        found = self._health.get(name)
        if found is None:
            found = Health(self._rng)
            if name in self.membership.members:  # and has not left since it was asked
                self._health[name] = found
        return found

    def changed(self) -> None:
        """Others are members now, or are elsewhere: what was known of those that left, or began anew, is forgotten."""
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

    # -- to be looked at ---------------------------------------------------------------------------

    def status(self) -> list[dict[str, Any]]:
        """The members, in the order of their addresses; `share` is of the ring. What they took from us is counted by host,
        so several daemons of one machine have one count."""
        members = self.membership.members
        total = sum(member.weight for member in members.values()) or 1.0
        table = self.stats.as_dict()
        rows = []
        for name, member in sorted(members.items(), key=lambda item: item[1].addresses):
            asked = [table[str(address)] for address in member.addresses if str(address) in table]
            answered = [row["latency_s"] for row in asked if row["latency_s"]]
            failures: Counter[str] = Counter()
            for row in asked:
                failures.update(row["failures"])
            rows.append(
                {
                    "name": str(member),
                    "id": name,
                    "addresses": [str(address) for address in member.addresses],
                    "here": name in self.membership.own,
                    "share": member.weight / total,
                    "state": self._of(name).state,
                    "bytes_in": sum(row["bytes_in"] for row in asked),
                    "bytes_out": table.get(self._client.host_of(member.address), {}).get("bytes_out", 0),
                    "requests": sum(row["requests"] for row in asked),
                    "failures": dict(failures),
                    "latency_s": sum(answered) / len(answered) if answered else 0.0,
                }
            )
        return rows


def _addresses(members: Mapping[str, Member]) -> set[Address]:
    return {address for member in members.values() for address in member.addresses}

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
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import trio

from cachefs.names import ObjectId
from cachefs.peers.client import TOTAL_S, Client
from cachefs.peers.health import LONGEST_DEADLINE_S, Health
from cachefs.peers.membership import Member, Membership
from cachefs.peers.protocol import PeerFailed, Sink
from cachefs.peers.stats import PeerTable
from cachefs.peers.wire import BlockRequest, Kind

log = logging.getLogger(__name__)

ASKED = 2
"""Members asked for one range before the store. Guessed: with two that fail, something is wrong with more than a node."""

HASTE = ASKED + 1
"""A peer that says that it works may do so for this part of a reader's time, so that the store is asked within it, too: the
peer may be cut off from the store, and we are not."""

HEIRS = 2
"""Members behind the replicas that may stand in. Derived from `ASKED`: the owner and its heir may both be gone."""


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
        self._block_size = block_size
        self._deadline_s = deadline_s
        self.patience_s = deadline_s / HASTE
        """How long a reader waits for a peer that works, and in the queue in front of it."""
        self._now = clock
        self._health: dict[str, Health] = {}
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
        alive = 0
        for name in owners if self.serves else ():
            if name in self.membership.own:
                return True
            alive += self._of(name).state != "dead"
            if alive == self.replicas:
                return False
        return not self.serves or not owners

    def may_fetch(self, digest: bytes, extent: int, rank: int) -> bool:
        """Whether to fetch it for somebody who believes that this node has that rank."""
        return not self.membership.own.isdisjoint(
            self._owners(digest, extent)[: max(self.replicas, rank + 1)]
        )

    def _owners(self, digest: bytes, extent: int) -> tuple[str, ...]:
        return self.membership.ring.owners(digest, extent, self.replicas + HEIRS)

    # -- asking ------------------------------------------------------------------------------------

    async def read(
        self, asked: Asked, version: ObjectId, start: int, stop: int, sink: Sink, *, sink_waits: bool
    ) -> None:
        """Bytes [start, stop) of a version, whole blocks of one extent, into `sink`. Raises `PeerFailed`, and what the
        sink raises."""
        member, request = asked.member, self._request(version, start, stop, asked.rank)
        health, sent_at = self._of(member.name), self._now()
        try:
            first_s = await self._client.read(
                member.address,
                request,
                sink,
                deadline_s=health.read_deadline(),
                working_s=self.patience_s,
                sink_waits=sink_waits,
            )
        except PeerFailed as exc:
            self._judge(member.name, health, exc, sent_at)
            raise
        if health.state == "dead":
            log.info("peer %s is back", member.name)
        health.succeeded(first_s)

    def failed_since(self, asked: Asked, moment: float) -> bool:
        """Whether it has failed for somebody from that moment (of trio's clock) on."""
        return self._of(asked.member.name).failed_since(moment)

    async def bring(self, member: Member, version: ObjectId, start: int, stop: int) -> None:
        """Have the owner fetch bytes [start, stop) (of one extent) and keep them. Raises `PeerFailed`."""
        await self._client.bring(
            member.address, self._request(version, start, stop, 0), working_s=self._deadline_s
        )

    async def have(self, member: Member, version: ObjectId, start: int, stop: int) -> list[bool]:
        """Which blocks of [start, stop) (in bytes) the member holds. Raises `PeerFailed`."""
        return await self._client.have(member.address, self._request(version, start, stop, 0))

    def others(self) -> list[Member]:
        """All members but this node."""
        membership = self.membership
        return [m for name, m in membership.members.items() if name not in membership.own]

    def _request(self, version: ObjectId, start: int, stop: int, rank: int) -> BlockRequest:
        size = self._block_size
        return BlockRequest(version, start // size, -(-stop // size), size, rank)

    def _judge(self, name: str, health: Health, exc: PeerFailed, sent_at: float) -> None:
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
            log.log(level, "peer %s is left alone for a while: %s", name, exc)

    def _of(self, name: str) -> Health:
        found = self._health.get(name)
        if found is None:
            found = Health(self._rng)
            if name in self.membership.members:  # and has not left since it was asked
                self._health[name] = found
        return found

    def changed(self) -> None:
        """Others are members now: what was known of those that left is forgotten."""
        members = self.membership.members
        for name in self._known.keys() - members.keys():
            self._client.forget(self._known[name].address)
            self._health.pop(name, None)
        self._known = dict(members)

    # -- to be looked at ---------------------------------------------------------------------------

    def status(self) -> list[dict[str, Any]]:
        """The members, in the order of their names; `share` is of the ring. What they took from us is counted by host, so
        several daemons of one machine have one count."""
        members = self.membership.members
        total = sum(member.weight for member in members.values()) or 1.0
        table = self.stats.as_dict()
        nothing: dict[str, Any] = {}
        return [
            {
                "name": name,
                "here": name in self.membership.own,
                "share": member.weight / total,
                "state": self._of(name).state,
                "bytes_in": table.get(name, nothing).get("bytes_in", 0),
                "bytes_out": table.get(self._client.host_of(member.address), nothing).get("bytes_out", 0),
                "requests": table.get(name, nothing).get("requests", 0),
                "failures": table.get(name, nothing).get("failures", {}),
                "latency_s": table.get(name, nothing).get("latency_s", 0.0),
            }
            for name, member in sorted(members.items())
        ]

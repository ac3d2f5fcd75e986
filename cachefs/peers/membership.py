"""Who is there.

A *source* (a list, a DNS name, etcd) reports addresses and, as far as it knows, who answers there. `Membership` keeps
those that belong to this node's ring: of the same cache group, with the same sources, and with a share. Nodes may see
different members for a while, and nothing has to wait for that: an extent then has two owners, or is asked of one who does
not know it, and in the worst case comes from the store once more.

A member's *name* in the ring is its address. It outlives restarts, and so does what the node has on disk; a node id is
drawn anew by each daemon and serves to recognise oneself behind an address. Somebody unknown yet is taken for a usual
member: listed hosts are mostly right, and all nodes that read the list do the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cachefs.peers.ring import Ring
from cachefs.peers.wire import Address, Hello

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A node that owns a share of the extents, this one included. `name` is the same on every node."""

    name: str
    host: str
    port: int
    weight: float
    group: str

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


class Sighting(NamedTuple):
    """Somebody is listed at this address; who, if that is known yet."""

    address: Address
    hello: Hello | None


Report = Callable[[Iterable[Sighting]], None]


class Source(Protocol):
    """Where members are learnt."""

    async def run(self, report: Report) -> None:
        """Until cancelled: call `report` with all that is known now, at the start and whenever it changes. What was
        reported holds until the next time, so a source that cannot look says nothing. Raises nothing of its own."""


def fingerprint(sources: Collection[str], block_size: int) -> str:
    """Of what two nodes must have in common to share extents: the names of their stores (`ObjectId.source`), in any
    order, and the size of a block. 32 hexadecimal digits; says nothing about the names."""
    text = json.dumps([sorted(sources), block_size])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Membership:
    """The members now. On the trio thread only.

    `hello` is what this node says of itself; with a weight of 0 it owns nothing and only asks others.
    """

    def __init__(self, source: Source, hello: Hello, on_change: Callable[[], None] = lambda: None) -> None:
        self.members: Mapping[str, Member] = {}
        self.ring = Ring({})
        """Of exactly `members`."""
        self.own: frozenset[str] = frozenset()
        """Names of members that are this node (several, when a list has several of its addresses)."""
        self.version = 0
        """Grows with each change."""
        self.on_change = on_change
        self._source = source
        self._hello = hello

    async def run(self) -> None:
        """Keep them up to date, until cancelled."""
        await self._source.run(self._report)

    def _report(self, sightings: Iterable[Sighting]) -> None:
        members: dict[str, Member] = {}
        own = set()
        for address, hello in sightings:
            if hello is not None and not self._shares_with(hello):
                continue
            name = str(address)
            weight = 1.0 if hello is None else hello.weight
            members[name] = Member(name, address.host, address.port, weight, self._hello.group)
            if hello is not None and hello.node == self._hello.node:
                own.add(name)
        if members == self.members and own == self.own:
            return
        for name in members.keys() - self.members.keys():
            log.info("peer %s joined%s", name, " (this node)" if name in own else "")
        for name in self.members.keys() - members.keys():
            log.info("peer %s left", name)
        self.ring = Ring({name: member.weight for name, member in members.items()})
        self.members, self.own = members, frozenset(own)
        self.version += 1
        self.on_change()

    def _shares_with(self, hello: Hello) -> bool:
        def circle(who: Hello) -> tuple[int, str, str]:
            return who.version, who.group, who.sources

        return hello.weight > 0 and circle(hello) == circle(self._hello)

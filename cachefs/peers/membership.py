"""Who is there.

A *source* (a list, a DNS name, etcd) reports addresses and, as far as it knows, who answers there. `Membership` keeps
those that belong to this node's ring: of the same cache group, with the same sources, and with a share. Nodes may see
different members for a while, and nothing has to wait for that: an extent then has two owners, or is asked of one who does
not know it, and in the worst case comes from the store once more.

A member's *name* in the ring is its id (`identity`), which belongs to what the node has on disk, wherever it is reached;
several addresses of one node are one member. So an address where nobody has answered yet is nobody's: it has no place in
the ring, and the others keep its share. A place under its address would be another one than it will have, and two parts of
the data would move instead of one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cachefs.peers.ring import Ring
from cachefs.peers.wire import MAX_HELLO_TEXT, Address, Hello

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A node that owns a share of the extents, this one included. `name` is the same on every node; `addresses` are those
    of its present `life`, one at least."""

    name: str
    addresses: tuple[Address, ...]
    weight: float
    group: str
    life: str = ""

    @property
    def address(self) -> Address:
        return self.addresses[0]

    def __str__(self) -> str:
        """For people: where it is reached."""
        return str(self.address)


class Sighting(NamedTuple):
    """Somebody is listed at this address; who, if that is known yet. `refusal` is why not, where somebody answers who does
    not trust us, or whom we do not trust."""

    address: Address
    hello: Hello | None
    refusal: str = ""


class Apart(NamedTuple):
    """Somebody listed who is no member: `state` for a table, `why` for a sentence after the address. `wrong`: nobody wants
    that."""

    state: str
    why: str
    wrong: bool = False


REFUSED = "refused"
UNKNOWN = Apart("unknown", "has not answered yet")
COPIED = Apart("our id", "has this node's id, as after a copy of its cache directory", wrong=True)

Report = Callable[[Iterable[Sighting]], None]
"""What a source says. Of two sightings of one node, the later is what was heard last."""


class Source(Protocol):
    """Where members are learnt."""

    @property
    def trouble(self) -> str:
        """Why it cannot look now, for people; else empty."""

    async def run(self, report: Report) -> None:
        """Until cancelled: call `report` with all that is known now, at the start and whenever it changes. What was
        reported holds until the next time, so a source that cannot look says nothing. Raises nothing of its own."""

    def heard(self, host: str) -> None:
        """Somebody at this IP address has asked who we are: it runs, and may be new."""


def fingerprint(sources: Collection[str], block_size: int) -> str:
    """Of what two nodes must have in common to share extents: the names of their stores (`ObjectId.source`), in any
    order, and the size of a block. 32 hexadecimal digits."""
    text = json.dumps([sorted(sources), block_size])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def spelled(sources: Collection[str]) -> str:
    """The names of stores as a hello carries them for people: shortened."""
    text = ", ".join(sorted(sources)).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_HELLO_TEXT else text[: MAX_HELLO_TEXT - 1] + "…"


class Membership:
    """The members now. On the trio thread only.

    `hello` is what this node says of itself; with a weight of 0 it owns nothing and only asks others.
    """

    def __init__(self, source: Source, hello: Hello, on_change: Callable[[], None] = lambda: None) -> None:
        self.members: Mapping[str, Member] = {}
        self.ring = Ring({})
        """Of exactly `members`."""
        self.own: frozenset[str] = frozenset()
        """This node's name, if it is a member."""
        self.own_addresses: frozenset[Address] = frozenset()
        self.apart: Mapping[Address, Apart] = {}
        """Who is listed and no member."""
        self.version = 0
        """Grows with each change."""
        self.on_change = on_change
        self.source = source
        self._hello = hello

    async def run(self) -> None:
        """Keep them up to date, until cancelled."""
        await self.source.run(self._report)

    def become(self, source: Source, hello: Hello) -> None:
        """Another self, while nothing runs: what is known of the others holds until the next report."""
        self.source, self._hello = source, hello

    def _report(self, sightings: Iterable[Sighting]) -> None:
        me = self._hello
        last: dict[str, Hello] = {}
        where: dict[tuple[str, str], list[Address]] = {}
        apart: dict[Address, Apart] = {}
        for address, hello, refusal in sightings:
            if hello is None:
                apart[address] = (
                    Apart(REFUSED, f"is not trusted ({refusal})", wrong=True) if refusal else UNKNOWN
                )
                continue
            why = self._apart(hello)
            if why is None and hello.node == me.node and hello.life != me.life:
                why = COPIED
            if why is not None:
                apart[address] = why
                continue
            last[hello.node] = hello
            where.setdefault((hello.node, hello.life), []).append(address)
        members = {
            name: Member(name, tuple(sorted(where[name, hello.life])), hello.weight, hello.group, hello.life)
            for name, hello in last.items()
        }
        own = frozenset({me.node} & members.keys())
        if (members, own, apart) == (self.members, self.own, self.apart):
            return
        self._tell(members, own, apart)
        if {name: m.weight for name, m in members.items()} != self.ring.members:
            self.ring = Ring({name: member.weight for name, member in members.items()})
        self.members, self.own, self.apart = members, own, apart
        self.own_addresses = frozenset(address for name in own for address in members[name].addresses)
        self.version += 1
        self.on_change()

    def _tell(
        self, members: Mapping[str, Member], own: Collection[str], apart: Mapping[Address, Apart]
    ) -> None:
        for name in members.keys() - self.members.keys():
            log.info("peer %s joined%s", members[name], " (this node)" if name in own else "")
        for name in self.members.keys() - members.keys():
            log.info("peer %s left", self.members[name])
        for address, found in apart.items():
            before = self.apart.get(address)
            if found != UNKNOWN and (before is None or found.state != before.state):
                level = logging.WARNING if found.wrong else logging.INFO
                log.log(level, "peer %s %s: nothing is shared with it", address, found.why)

    def _apart(self, hello: Hello) -> Apart | None:
        """Why it is no member, whoever it is."""
        me = self._hello
        if hello.version != me.version:
            why = f"speaks version {hello.version} of the protocol, this node version {me.version}"
            return Apart("another version", why, wrong=True)
        if hello.group != me.group:
            return Apart("another group", f"is of cache group {hello.group!r}, this node of {me.group!r}")
        if hello.block_size != me.block_size:
            why = f"has a --block-size of {hello.block_size} bytes, this node one of {me.block_size}"
            return Apart("another block size", why, wrong=True)
        if hello.sources != me.sources:
            return Apart("other sources", f"shows {hello.shows}, this node {me.shows}", wrong=True)
        if not hello.weight > 0:
            return Apart("gives nothing", "gives nothing to others")
        return None

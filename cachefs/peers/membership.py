"""Which nodes are members of this node's ring.

Every `POLL_S`, `Membership` asks its *source* (a list, a DNS name, etcd) for the addresses that are present now, with the
handshake of the node at each, as far as it is known. A member has this node's cache group, sources and block size, and a
share of the ring. Nodes may know different members for a while, and nothing waits until they agree: in the worst case the
origin serves an extent once more.

A member's *name* in the ring is its id (`node.node_id`), which belongs to the files in its cache directory; several
addresses of one id are one member. An address without a known id has no place in the ring."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import nlargest
from typing import NamedTuple, Protocol

import trio
from xxhash import xxh3_64_intdigest, xxh64_intdigest

from cachefs.peers.wire import MAX_HANDSHAKE_TEXT, Address, Handshake

REMEMBERED = 4096
"""Extents whose owners are remembered, together 64 GiB: a reader asks for the owners once for each block."""

_WHOLE = 2.0**64


class Ring:
    """The owner of each extent: rendezvous hashing with weights.

    Every member has a hash with every extent, and the member with the best hash owns it. So nodes that know the same
    members agree without a message, and when one leaves only its own extents move: each to its second best, which
    spreads them over the rest by weight. The unit is the extent because that is also what the store evicts, and the longest
    part that one GET fetches.

    With weights it is a race: with `u` the hash as a number in (0, 1], member m arrives at -ln(u) / w, and the first of
    several such arrivals is m's with probability w / total. Among members of one weight the largest hash wins, so the
    logarithm is taken once per distinct weight. Measured: 50 µs at 1,000 members and 6 µs at 100.

    `members` maps names to weights: 1 is usual, and 0 or less owns nothing. Immutable."""

    def __init__(self, members: Mapping[str, float]) -> None:
        self.members = {name: weight for name, weight in sorted(members.items()) if weight > 0}
        classes: dict[float, tuple[list[str], list[int]]] = defaultdict(lambda: ([], []))
        for name, weight in self.members.items():
            names, seeds = classes[weight]
            names.append(name)
            # Another hash function than in `_race`, so that a seed is never the hash of an extent.
            seeds.append(xxh64_intdigest(name.encode("utf-8", "surrogatepass")))
        self.owners = lru_cache(REMEMBERED)(partial(_race, classes))
        """(digest, extent, count) → as `_race`."""


def _race(
    classes: Mapping[float, tuple[list[str], list[int]]], digest: bytes, extent: int, count: int = 1
) -> tuple[str, ...]:
    """The `count` best members for an extent of the version with this digest, best first; fewer if there are not so many. If
    the first leaves, the second becomes the first. `classes`: weight → (names of its members, their seeds)."""
    key = digest + extent.to_bytes(8, "little")
    arrivals: list[tuple[float, str]] = []
    for weight, (names, seeds) in classes.items():
        hashes = (xxh3_64_intdigest(key, seed) for seed in seeds)
        first = nlargest(count, zip(hashes, names, strict=True))
        arrivals += [(-math.log((number + 1) / _WHOLE) / weight, name) for number, name in first]
    arrivals.sort()
    return tuple(name for _, name in arrivals[:count])


log = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds from the beginning of one poll to that of the next, at most: it is shorter by a random part of up to a fifth, so
that the polls of nodes spread. Given: joins and leaves that a source knows of are seen within 3 s."""

SOON_S = 0.02
"""Seconds to wait before an early poll: many nodes may start together, and one poll then serves the handshakes of all."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node that owns a share of the extents; this node is one, too. `name` is the same on every node; `addresses` are
    those of its present `life`, at least one."""

    name: str
    addresses: tuple[Address, ...]
    weight: float
    life: str = ""

    def __str__(self) -> str:
        """Its first address, for messages."""
        return str(self.addresses[0])


class Sighting(NamedTuple):
    """A listed address, and the handshake of the node there, if it is known. If one of the two nodes does not trust the
    other, there is no handshake, and `refusal` says why."""

    address: Address
    handshake: Handshake | None
    refusal: str = ""


class Incompatible(NamedTuple):
    """Why the node at a listed address is no member: `state` for a table, `why` for a sentence that begins with the
    address. `wrong` is True if it must be a mistake in the configuration."""

    state: str
    why: str
    wrong: bool = False


REFUSED = "refused"
UNKNOWN = Incompatible("unknown", "has not answered yet")
COPIED = Incompatible("our id", "has this node's id, as after a copy of its cache directory", wrong=True)


class Source(Protocol):
    """Finds the addresses of members."""

    @property
    def trouble(self) -> str:
        """Why the last poll failed, for people; else empty."""

    async def present(self) -> Iterable[Sighting] | None:
        """All addresses that are listed now. If the list cannot be read, those of the last reading; None before the first
        reading. Of two sightings of one node, the later in the order is the newer. Raises nothing of its own."""

    def handshake_requested(self, host: str) -> bool:
        """A node at this IP address has requested our handshake. True if the next `present` may return more."""

    async def leave(self) -> None:
        """Leave the list, because this node stops. Takes a second at most, also when cancelled."""


def fingerprint(sources: Collection[str], block_size: int) -> str:
    """A digest, as 32 hexadecimal digits, of what two nodes must have in common to share extents: the block size, and the
    names of their origins (`ObjectId.source`) in any order."""
    text = json.dumps([sorted(sources), block_size])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def sources_for_people(sources: Collection[str]) -> str:
    """The names of origins as a handshake has them for messages: shortened to `MAX_HANDSHAKE_TEXT`."""
    text = ", ".join(sorted(sources)).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_HANDSHAKE_TEXT else text[: MAX_HANDSHAKE_TEXT - 1] + "…"


class Membership:
    """The present members. On the trio thread only.

    `handshake` is this node's own; with a weight of 0 the node owns nothing and only reads from others."""

    def __init__(self, source: Source, handshake: Handshake) -> None:
        self.members: Mapping[str, Member] = {}
        self.ring = Ring({})
        """The ring of exactly `members`."""
        self.own: frozenset[str] = frozenset()
        """This node's name, if it is a member."""
        self.own_addresses: frozenset[Address] = frozenset()
        self.incompatible: Mapping[Address, Incompatible] = {}
        """Listed addresses whose nodes are no members, and why."""
        self.on_change: Callable[[], None] = lambda: None
        self.source = source
        self.stays = False
        """Another daemon goes on as this node."""
        self._handshake = handshake
        self._wake = trio.Event()

    async def run(self) -> None:
        """Poll the source until cancelled; then leave it, unless this node `stays`."""
        try:
            while True:
                self._wake = trio.Event()
                next_at = trio.current_time() + POLL_S * random.uniform(0.8, 1.0)
                sightings = await self.source.present()
                if sightings is not None:
                    self._report(sightings)
                with trio.move_on_at(next_at):
                    await self._wake.wait()
                    await trio.sleep(SOON_S)
        finally:
            if not self.stays:
                await self.source.leave()

    def handshake_requested(self, host: str) -> Handshake:
        """Our handshake, for a node at this IP address. Polls early if that node may be new, so nodes that start together
        know each other as soon as the last of them listens."""
        if self.source.handshake_requested(host):
            self._wake.set()
        return self._handshake

    def take_id(self, source: Source, handshake: Handshake) -> None:
        """Use another id from the next report on. Called while `run` does not run."""
        self.source, self._handshake = source, handshake

    def _report(self, sightings: Iterable[Sighting]) -> None:
        me = self._handshake
        newest: dict[str, Handshake] = {}
        addresses_of: dict[tuple[str, str], list[Address]] = {}
        incompatible: dict[Address, Incompatible] = {}
        for address, handshake, refusal in sightings:
            if handshake is None:
                incompatible[address] = (
                    Incompatible(REFUSED, f"is not trusted ({refusal})", wrong=True) if refusal else UNKNOWN
                )
                continue
            mismatch = self._mismatch(handshake)
            if mismatch is None and handshake.node == me.node and handshake.life != me.life:
                mismatch = COPIED
            if mismatch is not None:
                incompatible[address] = mismatch
                continue
            newest[handshake.node] = handshake
            addresses_of.setdefault((handshake.node, handshake.life), []).append(address)
        members = {
            name: Member(name, tuple(sorted(addresses_of[name, known.life])), known.weight, known.life)
            for name, known in newest.items()
        }
        own = frozenset({me.node} & members.keys())
        if (members, own, incompatible) == (self.members, self.own, self.incompatible):
            return
        self._log_changes(members, own, incompatible)
        if {name: m.weight for name, m in members.items()} != self.ring.members:
            self.ring = Ring({name: member.weight for name, member in members.items()})
        self.members, self.own, self.incompatible = members, own, incompatible
        self.own_addresses = frozenset(address for name in own for address in members[name].addresses)
        self.on_change()

    def _log_changes(
        self,
        members: Mapping[str, Member],
        own: Collection[str],
        incompatible: Mapping[Address, Incompatible],
    ) -> None:
        for name in members.keys() - self.members.keys():
            log.info("peer %s joined%s", members[name], " (this node)" if name in own else "")
        for name in self.members.keys() - members.keys():
            log.info("peer %s left", self.members[name])
        for address, found in incompatible.items():
            before = self.incompatible.get(address)
            if found != UNKNOWN and (before is None or found.state != before.state):
                level = logging.WARNING if found.wrong else logging.INFO
                log.log(level, "peer %s %s: nothing is shared with it", address, found.why)

    def _mismatch(self, handshake: Handshake) -> Incompatible | None:
        """Why a node with this handshake is no member; None if it is one."""
        me = self._handshake
        if handshake.version != me.version:
            why = f"speaks version {handshake.version} of the protocol, this node version {me.version}"
            return Incompatible("another version", why, wrong=True)
        if handshake.group != me.group:
            return Incompatible(
                "another group", f"is of cache group {handshake.group!r}, this node of {me.group!r}"
            )
        if handshake.block_size != me.block_size:
            why = f"has a --block-size of {handshake.block_size} bytes, this node one of {me.block_size}"
            return Incompatible("another block size", why, wrong=True)
        if handshake.sources != me.sources:
            return Incompatible("other sources", f"shows {handshake.shows}, this node {me.shows}", wrong=True)
        if not handshake.weight > 0:
            return Incompatible("gives nothing", "gives nothing to others")
        return None

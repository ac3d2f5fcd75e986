"""One version of an object, as the store keeps book of it while it is open or was lately used."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from cachefs.names import ObjectId
from cachefs.store.index import Copy
from cachefs.store.tier import Tier

if TYPE_CHECKING:
    from cachefs.store.backing import Backing


class CachedObject:
    """One version that is open or was lately used. `copies` has the loaded ones by (tier, extent), None where there is
    none; `fds` its open files by tier; `sealed` the tiers where its file is known to have been lent; `leaving` those of them
    where all its blocks are forgotten and the file waits for its last pin; `backing` what the kernel has of it; `pinned`
    whether new copies are. Two slots
    belong to the fetch room: `flights` (block → the transfer that is bringing it) and `readahead` (what its readers are
    seen to do)."""

    __slots__ = (
        "backing",
        "copies",
        "fds",
        "flights",
        "id",
        "leaving",
        "pinned",
        "readahead",
        "refs",
        "sealed",
    )

    def __init__(self, object_id: ObjectId) -> None:
        self.id = object_id
        self.copies: dict[tuple[int, int], Copy | None] = {}
        self.fds: dict[int, int] = {}
        self.sealed: set[int] = set()
        self.leaving: set[int] = set()
        self.backing: Backing | None = None
        self.flights: dict[int, Any] = {}
        self.readahead: Any = None
        self.pinned = False
        self.refs = 0

    def in_use(self) -> bool:
        return bool(self.refs or self.flights or any(c and c.pins for c in self.copies.values()))

    def is_sealed(self, tier: Tier) -> bool:
        """Whether its file on the tier may never change any more. The file says so itself; here it is remembered."""
        if tier.number not in self.sealed and tier.sealed(self.id.digest):
            self.sealed.add(tier.number)
        return tier.number in self.sealed

    def on(self, tier: Tier) -> list[Copy]:
        """Its loaded copies on the tier."""
        return [copy for (number, _), copy in self.copies.items() if number == tier.number and copy]

    def file(self, tier: Tier) -> int:
        """A descriptor of its file on the tier, kept open while the object is in use. OSError when it is not there."""
        fd = self.fds.get(tier.number)
        if fd is None:
            fd = self.fds[tier.number] = tier.open_file(self.id.digest, create=False)
        return fd

    def close_files(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class Unnamed:
    """Stands in for the ObjectId of a version only met by its digest (while evicting): the index keeps no keys."""

    __slots__ = ("digest", "key")
    size = sys.maxsize  # not known: it may have any number of extents

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.key = f"version {digest.hex()}"

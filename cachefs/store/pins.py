"""What people decide themselves: versions that stay, and versions that go.

A pin is a flag of each copy, in its row: it holds over restarts, follows the copy between tiers, and is given to copies that
come later while the version is known. So pinning reserves nothing; whoever pins fetches first.
"""

from __future__ import annotations

from cachefs.errors import NoRoom
from cachefs.names import BLOCKS_PER_EXTENT, block_count, block_length, extent_bits
from cachefs.store.catalog import Catalog
from cachefs.store.room import Room
from cachefs.store.tier import Tier, allocated
from cachefs.store.versions import CachedObject
from cachefs.units import Size, format_bytes


class Pins:
    """Pinning and dropping versions, on all tiers. `budget` is what may be pinned, a share of the tiers' limits or bytes."""

    def __init__(self, catalog: Catalog, room: Room, tiers: list[Tier], block_size: int) -> None:
        self._catalog = catalog
        self._room = room
        self._tiers = tiers
        self._block_size = block_size
        self.budget = Size(percent=50.0)

    @property
    def bytes(self) -> int:
        return sum(tier.pinned_bytes for tier in self._tiers)

    @property
    def budget_bytes(self) -> int:
        """What may be pinned on this node now."""
        return self.budget.resolve(sum(tier.limit_bytes() for tier in self._tiers))

    def check(self, obj: CachedObject) -> None:
        """Raises `NoRoom` if pinning the whole version would exceed the budget."""
        copies = [c for tier in self._tiers for c in self._catalog.copies(obj, tier.number)]
        budget = self.budget_bytes
        held = sum(
            allocated(length) for c in copies if c.pinned for _, length in self._catalog.ranges(c, c.bitmap)
        )
        if self.bytes - held + self._whole_bytes(obj) > budget:
            raise NoRoom(
                f"{obj.id.key} cannot be pinned: {format_bytes(self.bytes)} of {format_bytes(budget)} are in use"
            )

    def pin(self, obj: CachedObject) -> None:
        """Raises `NoRoom` beyond the budget; then nothing has changed."""
        copies = [c for tier in self._tiers for c in self._catalog.copies(obj, tier.number)]
        loose = [copy for copy in copies if not copy.pinned]
        if obj.pinned and not loose:
            return
        self.check(obj)
        obj.pinned = True
        for copy in loose:
            self._room.pin(copy, True)

    def unpin(self, obj: CachedObject) -> None:
        obj.pinned = False
        for tier in self._tiers:
            for copy in self._catalog.copies(obj, tier.number):
                self._room.pin(copy, False)
        obj.pinned = False  # looking at its rows has set it again

    def evict(self, obj: CachedObject) -> int:
        """Drop what is not pinned. Bytes in use are counted, too, and go with their last user."""
        freed = 0
        for tier in self._tiers:
            copies = self._catalog.copies(obj, tier.number)
            if obj.is_sealed(tier) and any(copy.pinned for copy in copies):
                continue  # a lent file goes whole or not at all
            for copy in copies:
                if copy.bitmap and not copy.pinned:
                    freed += sum(allocated(length) for _, length in self._catalog.ranges(copy, copy.bitmap))
            for copy in copies:
                if copy.bitmap and not copy.pinned:
                    self._room.drop(obj, copy, copy.bitmap)
        return freed

    def whole(self, obj: CachedObject) -> bool:
        """Whether all its blocks lie on some tier."""
        blocks = block_count(obj.id.size, self._block_size)
        for extent in range(-(-blocks // BLOCKS_PER_EXTENT)):
            held = 0
            for tier in self._tiers:
                copy = self._catalog.copy(obj, tier.number, extent)
                held |= copy.bitmap if copy is not None else 0
            if held != extent_bits(blocks, extent):
                return False
        return True

    def _whole_bytes(self, obj: CachedObject) -> int:
        blocks = block_count(obj.id.size, self._block_size)
        last = allocated(block_length(blocks - 1, obj.id.size, self._block_size)) if blocks else 0
        return max(0, blocks - 1) * allocated(self._block_size) + last

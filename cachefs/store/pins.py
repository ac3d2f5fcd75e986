"""`cachefs pin` and `cachefs evict`: versions that people keep, and versions that they drop.

A pin is a flag of each copy, in its row: it holds over restarts, follows the copy between tiers, and is given to copies that
come later while the version is known. So pinning reserves nothing: the caller fetches first.
"""

from __future__ import annotations

from cachefs.base.errors import NoRoom
from cachefs.base.names import BLOCKS_PER_EXTENT, block_count, block_length, extent_bits
from cachefs.base.units import Size, format_bytes
from cachefs.store.catalog import CachedObject, Catalog
from cachefs.store.space import Space
from cachefs.store.tier import Tier, allocated


class Pins:
    """Pinning and dropping versions, on all tiers. `budget` is what may be pinned, a share of the tiers' limits or bytes."""

    def __init__(self, catalog: Catalog, space: Space, tiers: list[Tier], block_size: int) -> None:
        self._catalog = catalog
        self._space = space
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
        copies = self._catalog.all_copies(obj)
        budget = self.budget_bytes
        held = sum(
            allocated(length) for c in copies if c.pinned for _, length in self._catalog.ranges(c, c.bitmap)
        )
        if self.bytes - held + self._whole_bytes(obj) > budget:
            raise NoRoom(
                f"{obj.id.key} cannot be pinned: {format_bytes(self.bytes)} of {format_bytes(budget)} are in use"
            )

    def pin(self, obj: CachedObject) -> None:
        """What is cached of the version, or will be while it is known, stays until `unpin`, over restarts. Raises `NoRoom`
        beyond the budget; then nothing has changed."""
        copies = self._catalog.all_copies(obj)
        loose = [copy for copy in copies if not copy.pinned]
        if obj.pinned and not loose:
            return
        self.check(obj)
        obj.pinned = True
        for copy in loose:
            self._space.set_pinned(copy, True)

    def unpin(self, obj: CachedObject) -> None:
        """It may be evicted again, like a version just used."""
        obj.pinned = False
        for copy in self._catalog.all_copies(obj):
            self._space.set_pinned(copy, False)
        obj.pinned = False  # looking at its rows has set it again

    def evict(self, obj: CachedObject) -> int:
        """Drop what is not pinned. Bytes in use are counted, too, and go with their last user."""
        freed = 0
        for tier in self._tiers:
            copies = self._catalog.copies(obj, tier.number)
            if obj.is_immutable(tier) and any(copy.pinned for copy in copies):
                continue  # an immutable file goes whole or not at all
            for copy in copies:
                if copy.bitmap and not copy.pinned:
                    freed += sum(allocated(length) for _, length in self._catalog.ranges(copy, copy.bitmap))
            for copy in copies:
                if copy.bitmap and not copy.pinned:
                    self._space.drop(obj, copy, copy.bitmap)
        return freed

    def whole(self, obj: CachedObject) -> bool:
        """True if all its blocks lie on some tier."""
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

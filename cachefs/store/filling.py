"""Taking blocks in: where there is room for them, when they exist for everybody, and what a transfer leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

from cachefs.metrics import Metrics
from cachefs.names import BLOCKS_PER_EXTENT, block_length
from cachefs.store.catalog import Catalog
from cachefs.store.fill import Fill, HeapFill, TierFill
from cachefs.store.heap import Heap
from cachefs.store.moves import SPILL_ABOVE, Moves
from cachefs.store.room import Evict, Room
from cachefs.store.tier import RAM, Tier, allocated
from cachefs.store.versions import CachedObject

READERS_SHARE = 64
"""Of the fastest tier, this part is not filled ahead with what other nodes keep, nor is room for one more transfer: that is
for readers. Guessed."""


class Filling:
    """Into `tiers`, from fastest to slowest, or the heap when none has room."""

    def __init__(
        self,
        catalog: Catalog,
        room: Room,
        moves: Moves | None,
        heap: Heap,
        tiers: list[Tier],
        block_size: int,
        metrics: Metrics,
    ) -> None:
        self._catalog = catalog
        self._room = room
        self._moves = moves
        self._heap = heap
        self._tiers = tiers
        self._block_size = block_size
        self._metrics = metrics

    def begin(
        self, obj: CachedObject, start: int, stop: int, *, ahead: bool = False, borrowed: bool = False
    ) -> Fill | None:
        """Room for blocks [start, stop) (within one extent) in the fastest tier that has it, or None. `ahead`: nobody has
        asked for them, so they take the place of nothing that somebody may miss; and once here, they wait for a reader.
        `borrowed`: another node keeps them, so here they take the place of nothing but their like."""
        for tier, evict in self._places(ahead, borrowed):
            # Held while room is made: making it may evict this very object's other blocks, and with them its file.
            obj.refs += 1
            try:
                fill = self._fill_in(obj, tier, start, stop, evict, ahead, borrowed)
            except OSError as exc:
                self._metrics.tier_errors += 1
                tier.failed(exc)
                continue
            finally:
                obj.refs -= 1
            if fill is None:
                continue
            fill.ahead = ahead
            copy = fill.copy
            if not borrowed:
                self._room.own(copy)
            elif not (copy.bitmap or copy.arriving or copy.pinned):
                self._catalog.borrowed.add(copy.key)
            copy.pins += 1
            self._room.reserve(copy, _bits(start, stop))
            if tier.number == RAM and self._moves is not None:
                self._moves.filled()
            return fill
        return None

    def _places(self, ahead: bool, borrowed: bool) -> Iterator[tuple[Tier, Evict]]:
        """Where a fill may go, in the order to try: what nobody will miss goes from all tiers before anything else does."""
        if borrowed:
            yield from ((tier, Evict.BORROWED) for tier in self._tiers[:1] if tier.writable())
            return
        tiers = [tier for tier in self._tiers if tier.writable()]
        first, last = tiers[:1], tiers[-1:]
        yield from ((tier, Evict.BORROWED) for tier in tiers[:-1])
        if not ahead:
            # What is kept has a right to all but what spilling leaves free, whatever waits there.
            short = [tier for tier in first if tier.kept_bytes < SPILL_ABOVE * tier.limit_bytes()]
            yield from ((tier, Evict.NOTHING) for tier in last)
            yield from ((tier, Evict.ANY_BORROWED) for tier in short)
        yield from ((tier, Evict.SPARE) for tier in reversed(tiers))
        if not ahead:
            yield from ((tier, Evict.ANY_BORROWED) for tier in first)
            yield from ((tier, Evict.ANY) for tier in last)

    def _fill_in(
        self,
        obj: CachedObject,
        tier: Tier,
        start: int,
        stop: int,
        evict: Evict,
        ahead: bool,
        borrowed: bool,
    ) -> TierFill | None:
        need = sum(allocated(block_length(b, obj.id.size, self._block_size)) for b in range(start, stop))
        left = self._room.left_to_readers(tier, need) if ahead and evict is Evict.SPARE else 0
        if borrowed and ahead:
            left = max(need, tier.limit_bytes() // READERS_SHARE)
        if not self._room.make(tier, need + left, evict=evict):
            return None
        file = self._room.way_to_write(obj, tier)
        if file is None:
            return None
        dataset = self._catalog.datasets(obj.id)
        copy = self._catalog.create(obj, tier.number, start // BLOCKS_PER_EXTENT, obj.id.size, dataset)
        if copy.arriving & _bits(start, stop):
            return None  # a move is writing them: two writers would not know of each other
        return TierFill(tier, copy, file, obj.id.size, self._block_size, start, stop)

    def bypass(self, obj: CachedObject, block: int) -> Fill:
        """One block into memory, for a reader that waits for it and whom no tier can serve. So what the heap takes is
        bounded by the readers waiting."""
        return HeapFill(obj.id.size, self._block_size, block, block + 1)

    def settle(self, obj: CachedObject, fill: Fill) -> None:
        """Make the blocks that have wholly landed exist."""
        completed = fill.take_completed()
        if not completed:
            return
        if isinstance(fill, HeapFill):
            for block, _ in completed:
                length = block_length(block, obj.id.size, self._block_size)
                self._heap.put(obj.id.digest, block, fill.read(block * self._block_size, length))
                self._metrics.ledger.misses.gone(obj.id.digest, block // BLOCKS_PER_EXTENT, "passed")
                self._metrics.bypassed_bytes += length
            self._metrics.bypassed_blocks += len(completed)
            return
        assert isinstance(fill, TierFill)
        bits = 0
        for block, checksum in completed:
            fill.copy.checksums[block % BLOCKS_PER_EXTENT] = checksum
            bits |= _bits(block, block + 1)
            self._metrics.admitted_bytes += block_length(block, obj.id.size, self._block_size)
        self._room.land(fill.copy, bits, bits)
        if fill.wanted:
            self._count_miss(obj, fill)
        else:
            self._catalog.came_ahead(fill.copy)
        self._metrics.admitted_blocks += len(completed)

    def _count_miss(self, obj: CachedObject, fill: TierFill) -> None:
        """Somebody waited for what a fill brings: that is a use of it, one for all of it."""
        self._catalog.touch(fill.copy)
        if not fill.counted:
            fill.counted = True
            self._catalog.use(obj, fill.copy, hit=False, asker=fill.asker)

    def end(self, obj: CachedObject, fill: Fill) -> None:
        """The transfer is over, whole or not: settle what landed, give back what did not."""
        fill.close()
        self.settle(obj, fill)
        whole = min(fill.stop, (fill.start_block + fill.settled) * self._block_size)
        self._metrics.discarded_bytes += fill.landed - whole
        if not isinstance(fill, TierFill):
            return
        copy, tier = fill.copy, fill.tier
        if fill.wanted and not fill.counted and copy.bitmap:
            self._count_miss(obj, fill)  # read while it came
        missing = _bits(fill.start_block + fill.settled, fill.stop_block)
        self._room.abandon(copy, missing)
        if fill.not_opened is not None:
            self._room.not_opened(obj, tier, fill.not_opened)
        elif fill.failure is not None:
            self._metrics.tier_errors += 1
            tier.failed(fill.failure)
        elif tier.errors_in_a_row and not missing:
            tier.worked()
        self._room.unpin(obj, copy)
        if tier.number == RAM and self._moves is not None:
            self._moves.filled()  # now it can be moved


def _bits(start: int, stop: int) -> int:
    """Blocks [start, stop) of one extent, as bits."""
    return ((1 << (stop - start)) - 1) << (start % BLOCKS_PER_EXTENT)

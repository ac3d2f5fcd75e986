"""Cache writes: blocks on their way into a tier, or into the heap when no tier has room.

A fill is an origin's sink. `write` runs in a worker thread and touches nothing but the fill itself; everything that other
callers see happens in `Fills.settle`, on the trio thread. Until a block is settled only the readers that wait for this very
transfer can read it: they may read bytes below `landed`, which never goes back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import xxhash

from cachefs.base.errors import NoRoom
from cachefs.base.names import BLOCKS_PER_EXTENT, block_length
from cachefs.store.catalog import CachedObject
from cachefs.store.eviction import ANY, ANY_REMOTE_OWNED, LOWEST, NOTHING, REMOTE_OWNED, Classes
from cachefs.store.index import Copy
from cachefs.store.moves import SPILL_ABOVE, Moves
from cachefs.store.space import READERS_SHARE, Space
from cachefs.store.tier import RAM, Tier, allocated

Completed = tuple[int, int]
"""(block, its xxh3_64)"""


class FillClosed(Exception):
    """The transfer outlived its fill: it must stop."""


class Fill:
    """Blocks [start_block, stop_block) of one version, delivered in order from the first byte on.

    `kept` says that its bytes can be read after it was closed; `waits`, that writing may wait for a disk; `ahead`, that no
    reader had asked for them when it began; `counted`, that a use of it was counted. `requester` is the requesting peer."""

    kept = False
    waits = False
    ahead = False
    requester = ""
    counted = False

    def __init__(self, size: int, block_size: int, start_block: int, stop_block: int) -> None:
        self.start_block = start_block
        self.stop_block = stop_block
        self.start = start_block * block_size
        self.stop = min(size, stop_block * block_size)
        self.landed = self.start
        # The lowest offset that a reader waits for: bytes that land below it wake no reader.
        self.wake_at = self.stop + 1
        self.on_landed: Callable[[], None] | None = None
        self.settled = 0  # blocks that exist for everybody
        self._size = size
        self.block_size = block_size
        self._completed: list[Completed] = []
        self._hash = xxhash.xxh3_64()
        self._lock = threading.Lock()
        self._closed = False

    def write(self, data: memoryview | bytes) -> None:
        """Take the next bytes. Worker thread. Raises `NoRoom` when the tier cannot take them, `FillClosed` when late."""
        view = memoryview(data)
        with self._lock:
            self._place(view)
            position = self.landed
            while len(view):
                block = position // self.block_size
                end = block * self.block_size + block_length(block, self._size, self.block_size)
                part = view[: end - position]
                self._hash.update(part)
                position += len(part)
                view = view[len(part) :]
                if position == end:
                    self._completed.append((block, self._hash.intdigest()))
                    self._hash = xxhash.xxh3_64()
            self.landed = position
        self._wake_readers(len(data))

    def write_block(self, data: memoryview, checksum: int) -> None:
        """The same for a whole block whose checksum the sender's reply carried and the client verified: no byte is hashed
        twice."""
        with self._lock:
            block, within = divmod(self.landed, self.block_size)
            if within or len(data) != block_length(block, self._size, self.block_size):
                raise ValueError("not a whole block")
            self._place(data)
            self._completed.append((block, checksum))
            self.landed += len(data)
        self._wake_readers(len(data))

    def _place(self, view: memoryview) -> None:
        if self._closed:
            raise FillClosed
        if self.landed + len(view) > self.stop:
            raise ValueError("more bytes than the range has")
        self._put(view, self.landed)

    def _wake_readers(self, count: int) -> None:
        """`count` bytes more have landed. If that is all there is, the transfer ends now, which wakes its readers: once."""
        wake = self.on_landed if count < self.stop - self.start else None
        if self.landed >= self.wake_at and wake is not None:
            wake()

    @property
    def wanted(self) -> bool:
        """True if a reader waits for it, or has read from it."""
        return not self.ahead or self.wake_at <= self.stop

    def take_completed(self) -> list[Completed]:
        """Blocks that became whole since the last call."""
        completed = self._completed[self.settled :]
        self.settled += len(completed)
        return completed

    def close(self) -> None:
        """No bytes are taken from here on. Waits for a `write` under way."""
        with self._lock:
            self._closed = True

    def read(self, offset: int, size: int) -> bytes:
        """Bytes that have landed (offset + size <= landed), for a reader."""
        self.ahead = False
        return self.look(offset, size)

    def look(self, offset: int, size: int) -> bytes:
        """The same, for a caller that is no reader."""
        raise NotImplementedError

    def _put(self, view: memoryview, offset: int) -> None:
        raise NotImplementedError


class TierFill(Fill):
    """Into a tier's file. `fd` is its descriptor, -1 before the first write opens it: on a disk that may take long, and a
    small file's system calls belong in the transfer's thread. `Fills.end` takes it."""

    def __init__(
        self,
        tier: Tier,
        copy: Copy,
        open_file: Callable[[], int],
        size: int,
        block_size: int,
        start: int,
        stop: int,
    ) -> None:
        super().__init__(size, block_size, start, stop)
        self.tier = tier
        self.waits = tier.blocking
        self.copy = copy
        self.fd = -1
        self.not_opened: OSError | None = None
        self.failure: OSError | None = None
        self._open = open_file

    def _put(self, view: memoryview, offset: int) -> None:
        try:
            if self.fd < 0:
                self.fd = self._open()
            with self.tier.disk.busy():
                while len(view):
                    count = os.pwrite(self.fd, view, offset)
                    offset += count
                    view = view[count:]
        except OSError as exc:
            if self.fd < 0:
                self.not_opened = exc
            else:
                self.failure = exc
            raise NoRoom(f"{self.tier.name} tier: {exc.strerror}") from exc

    def look(self, offset: int, size: int) -> bytes:
        return os.pread(self.fd, size, offset)


class HeapFill(Fill):
    """Into memory, for readers that are served although no tier can take the blocks."""

    kept = True

    def __init__(self, size: int, block_size: int, start: int, stop: int) -> None:
        super().__init__(size, block_size, start, stop)
        self._buffer = bytearray()

    def _put(self, view: memoryview, offset: int) -> None:
        if not self._buffer:  # not before: the transfer may have waited for a slot
            self._buffer = bytearray(self.stop - self.start)
        at = offset - self.start
        self._buffer[at : at + len(view)] = view

    def look(self, offset: int, size: int) -> bytes:
        at = offset - self.start
        return bytes(memoryview(self._buffer)[at : at + size])


class Fills:
    """Into the tiers, or the heap when none has room."""

    def __init__(self, space: Space, moves: Moves | None) -> None:
        self._catalog = space.catalog
        self._eviction = space.eviction
        self._space = space
        self._moves = moves
        self._tiers = space.tiers
        self._block_size = space.block_size
        self._metrics = space.metrics

    def begin(
        self, obj: CachedObject, start: int, stop: int, *, ahead: bool = False, remote_owned: bool = False
    ) -> Fill | None:
        """Reserve room for blocks [start, stop) (within one extent) in the fastest tier that has it; None if none has.
        `ahead`: they are prefetched, so they displace only the lowest priority classes, and once here they wait for a
        reader. `remote_owned`: another node owns them, so they displace only other remote-owned blocks."""
        for tier, evict in self._places(ahead, remote_owned):
            # Held while room is made: making it may evict this very object's other blocks, and with them its file.
            with obj.held():
                fill = self._fill_in(obj, tier, start, stop, evict, ahead, remote_owned)
                if fill is None:
                    continue
                fill.ahead = ahead
                if remote_owned:
                    self._space.remote_owned(fill.copy)
                else:
                    self._space.own(fill.copy)
                self._space.pin(fill.copy)
                self._space.reserve(fill.copy, _bits(start, stop))
            if tier.number == RAM and self._moves is not None:
                self._moves.filled()
            return fill
        return None

    def _places(self, ahead: bool, remote_owned: bool) -> Iterator[tuple[Tier, Classes]]:
        """(tier, what may be evicted there), in the order to try: the lowest classes go from all tiers before any other
        does."""
        if remote_owned:
            yield from ((tier, REMOTE_OWNED) for tier in self._tiers[:1] if tier.writable())
            return
        tiers = [tier for tier in self._tiers if tier.writable()]
        first, last = tiers[:1], tiers[-1:]
        yield from ((tier, REMOTE_OWNED) for tier in tiers[:-1])
        if not ahead:
            # This node's own copies have a right to all but what spilling leaves free, whatever waits there.
            short = [tier for tier in first if tier.kept_bytes < SPILL_ABOVE * tier.limit_bytes()]
            yield from ((tier, NOTHING) for tier in last)
            yield from ((tier, ANY_REMOTE_OWNED) for tier in short)
        yield from ((tier, LOWEST) for tier in reversed(tiers))
        if not ahead:
            yield from ((tier, ANY_REMOTE_OWNED) for tier in first)
            yield from ((tier, ANY) for tier in last)

    def _fill_in(
        self,
        obj: CachedObject,
        tier: Tier,
        start: int,
        stop: int,
        evict: Classes,
        ahead: bool,
        remote_owned: bool,
    ) -> TierFill | None:
        need = allocated(min(obj.id.size, stop * self._block_size) - start * self._block_size)
        left = self._space.left_to_readers(tier, need) if ahead and evict == LOWEST else 0
        if remote_owned and ahead:
            left = max(need, tier.limit_bytes() // READERS_SHARE)
        if not self._space.evict_for(tier, need + left, evict):
            return None
        open_file = self._space.file_to_write(obj, tier)
        if open_file is None:
            return None
        dataset = self._eviction.datasets(obj.id)
        copy = self._catalog.create(obj, tier.number, start // BLOCKS_PER_EXTENT, obj.id.size, dataset)
        if copy.arriving & _bits(start, stop):
            return None  # a move is writing them: two writers would not know of each other
        return TierFill(tier, copy, open_file, obj.id.size, self._block_size, start, stop)

    def bypass(self, obj: CachedObject, block: int) -> Fill:
        """One block into memory, for a reader that waits for it and that no tier can serve. So the readers that wait bound
        what the heap takes."""
        return HeapFill(obj.id.size, self._block_size, block, block + 1)

    def settle(self, obj: CachedObject, fill: Fill) -> None:
        """Make the blocks that have wholly landed exist."""
        completed = fill.take_completed()
        if not completed:
            return
        if isinstance(fill, HeapFill):
            for block, _ in completed:
                length = block_length(block, obj.id.size, self._block_size)
                self._space.heap.put(obj.id.digest, block, fill.read(block * self._block_size, length))
                self._metrics.ledger.misses.gone(obj.id.digest, block // BLOCKS_PER_EXTENT, "not_admitted")
                self._metrics.bypassed_bytes += length
            self._metrics.bypassed_blocks += len(completed)
            return
        assert isinstance(fill, TierFill)
        bits = 0
        for block, checksum in completed:
            fill.copy.checksums[block % BLOCKS_PER_EXTENT] = checksum
            bits |= _bits(block, block + 1)
            self._metrics.admitted_bytes += block_length(block, obj.id.size, self._block_size)
        self._space.land(fill.copy, bits, bits)
        if fill.wanted:
            self._count_miss(obj, fill)
        else:
            self._eviction.prefetched(fill.copy)
        self._metrics.admitted_blocks += len(completed)

    def _count_miss(self, obj: CachedObject, fill: TierFill) -> None:
        """A reader waited for what a fill brings: that is a use of it, one for all of it."""
        self._eviction.touch(fill.copy)
        if not fill.counted:
            fill.counted = True
            self._eviction.used(obj, fill.copy, hit=False, requester=fill.requester)

    def end(self, obj: CachedObject, fill: Fill) -> None:
        """The transfer is over, whole or not: settle what landed, give back what did not."""
        fill.close()
        self.settle(obj, fill)
        whole = min(fill.stop, (fill.start_block + fill.settled) * self._block_size)
        self._metrics.discarded_bytes += fill.landed - whole
        if not isinstance(fill, TierFill):
            return
        copy, tier = fill.copy, fill.tier
        if fill.fd >= 0 and obj.fds.setdefault(tier.number, fill.fd) != fill.fd:
            os.close(fill.fd)  # another fill has opened it, too
        if fill.wanted and not fill.counted and copy.bitmap:
            self._count_miss(obj, fill)  # read while it came
        missing = _bits(fill.start_block + fill.settled, fill.stop_block)
        self._space.abandon(copy, missing)
        if fill.not_opened is not None:
            self._space.not_opened(obj, tier, fill.not_opened)
        elif fill.failure is not None:
            self._space.failed(tier, fill.failure)
        elif tier.errors_in_a_row and not missing:
            tier.worked()
        self._space.unpin(obj, copy)
        obj.rest()
        if tier.number == RAM and self._moves is not None:
            self._moves.filled()  # now it can be moved


def _bits(start: int, stop: int) -> int:
    """Blocks [start, stop) of one extent, as bits."""
    return ((1 << (stop - start)) - 1) << (start % BLOCKS_PER_EXTENT)

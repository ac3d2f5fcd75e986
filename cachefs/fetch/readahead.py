"""Sequential readahead: pure policy. The caller reports each read to `observe`, which returns the blocks to fetch.

Reads are sorted into *streams* by (pid, offset), because forked loader workers share a file handle, and one process may read
a file at two places. A stream that is continued requests windows of blocks ahead of its reader, each twice as large as the
one before, up to the cap. A read that is near no stream starts a new one, which gets a window when two reads have continued
it. A stream at the file's start gets one at once, because sequential reads are likely there, until three jumps have shown
otherwise. A read of the footer starts no stream: readers of columnar formats begin there, whatever they read afterwards.

A stream from the file's start that has used two full windows will probably read the whole file (a shard, a checkpoint). Then
more blocks are fetched whenever a part is written, up to the object's end, as far as the budget of all streams allows."""

from __future__ import annotations

from dataclasses import dataclass

NEAR_BYTES = 4 << 20
"""How far from a stream's position a read still belongs to it. Derived: the kernel sends up to 12 (or, raised, 128)
read-aheads of up to 1 MiB at once, and they arrive out of order."""

STREAMS = 64
"""Streams remembered per object: of 64 loader workers (eight accelerators, eight workers each), each keeps its own. Measured
(`python -m bench.choosing streams`): a read at random is compared with all of them in 9 µs, with twice as many in 14."""

JUMPS_TO_DOUBT = 3
"""After so many new streams, without one that is continued, a read at the file's start gets no window. Borrowed."""

FOOTER_SHARE, FOOTER_LEAST, FOOTER_MOST = 64, 1 << 20, 8 << 20
"""The footer is the last 64th of the object, at least and at most that many bytes. Guessed from Parquet files: about 1 KiB
for each column of a row group of 100 MiB, and more for page indexes."""

_NOTHING = range(0)


def footer_at(size: int) -> int:
    """Where the footer of an object of `size` bytes begins."""
    return size - min(max(size // FOOTER_SHARE, FOOTER_LEAST), FOOTER_MOST)


@dataclass(slots=True)
class Budget:
    """The blocks that all streams of all objects together may be ahead of their readers, beyond one window each."""

    blocks: int
    used: int = 0


@dataclass(slots=True)
class Stream:
    pid: int
    position: int  # offset at which its last read ended
    window: int  # blocks
    ahead: int  # the first block that was not yet requested for this stream
    whole: bool  # it began at the file's start, so it may read the whole object
    mark: int  # the offset from which its density is measured
    covered: int  # bytes read since then
    hits: int = 0  # reads that have continued it
    unused: int = 0  # requested blocks ahead of its position


class Readahead:
    """The readahead of one object of `size` bytes. Windows are counted in blocks of `block_size`, and have at most
    `max_blocks`. Full windows advance in parts of `part_blocks`. The caller counts in `under_way` the requested blocks that
    are not written yet, and in `users` the readers."""

    def __init__(
        self, size: int, block_size: int, max_blocks: int, part_blocks: int = 8, budget: Budget | None = None
    ) -> None:
        self._blocks = -(-size // block_size)
        self._block_size = block_size
        self._max = max_blocks
        self._part = max(1, min(part_blocks, max_blocks // 2))
        self._budget = budget or Budget(0)
        self._footer = footer_at(size)
        self._streams: list[Stream] = []  # used last first
        self._jumps = 0
        self.under_way = 0
        self.users = 0

    def observe(self, pid: int, offset: int, length: int) -> range:
        """Note a read. Returns the blocks to fetch after it, without its own; each block is returned once per stream."""
        stream = self._match(pid, offset)
        end = offset + length
        if stream is None:
            if 0 < offset >= self._footer:
                return _NOTHING
            stream = self._begin(pid, offset, end)
        else:
            stream.covered += length
            if end <= stream.position:
                return _NOTHING
            block = self._block_of(stream)
            stream.position = end
            stream.hits += 1
            self._measure_density(stream)
            if stream.hits > 2 and block == self._block_of(stream):
                return _NOTHING  # the position is still in the same block
        return self._extend(stream)

    def committed(self) -> range:
        """Note that requested blocks are written. Returns the next blocks for a stream that will read the whole object."""
        for stream in self._streams:
            if stream.whole and (wanted := self._extend(stream)):
                return wanted
        return _NOTHING

    def declined(self, block: int) -> None:
        """Note that the last requested blocks, from this one on, are not fetched, because no tier takes them. Those further
        away than a window are requested again when the reader is within a window of them."""
        for stream in self._streams:
            if stream.ahead > block > self._block_of(stream) + stream.window:
                stream.ahead = block
                stream.whole = False
                self._account(stream)

    def close(self) -> None:
        """Release the streams' share of the budget. Call it after the last reader has closed the object."""
        while self._streams:
            self._budget.used -= self._streams.pop().unused

    def _block_of(self, stream: Stream) -> int:
        return -(-stream.position // self._block_size)

    def _begin(self, pid: int, offset: int, end: int) -> Stream:
        presumed = offset == 0 and self._jumps < JUMPS_TO_DOUBT
        self._jumps += not presumed
        window = min(1, self._max) if presumed else 0
        ahead = -(-end // self._block_size)
        stream = Stream(pid, end, window, ahead, whole=offset < NEAR_BYTES, mark=offset, covered=end - offset)
        if len(self._streams) >= STREAMS:
            self._budget.used -= self._streams.pop().unused
        self._streams.insert(0, stream)
        return stream

    def _measure_density(self, stream: Stream) -> None:
        """Adjust a stream's window to its density. One that skips most gets none: random reads may be near each other."""
        advance = stream.position - stream.mark
        dense = 2 * stream.covered >= advance
        if stream.hits >= 2 and dense:
            self._jumps = 0
            stream.window = stream.window or min(1, self._max)
        if advance >= 2 * NEAR_BYTES:  # reads that came out of order are counted by then
            if not dense:
                stream.window = stream.hits = 0
            stream.mark, stream.covered = stream.position, 0

    def _extend(self, stream: Stream) -> range:
        window, block = stream.window, self._block_of(stream)
        start = max(stream.ahead, block)
        count = window - (start - block)  # blocks that the window lacks
        # When half of a growing window is used up, request twice as much: so fast readers get large windows, and each
        # request is worth its round trip. A full window advances a part at a time, so that the most parts are in flight.
        full = window == self._max
        least = self._part if full else window - window // 2
        if full and stream.whole and block >= 2 * window:
            count = max(count, min(window - self.under_way, self._budget.blocks - self._budget.used))
        stop = start
        if window and count >= min(least, self._blocks - start):
            stop = min(start + count, self._blocks)
            if full and stop < self._blocks:
                stop = max(stop // self._part * self._part, start)
        if stop > start:
            stream.window = min(self._max, window * 2)
            stream.ahead = stop
        self._account(stream)
        return range(start, stop)

    def _account(self, stream: Stream) -> None:
        unused = max(0, stream.ahead - self._block_of(stream))
        self._budget.used += unused - stream.unused
        stream.unused = unused

    def _match(self, pid: int, offset: int) -> Stream | None:
        """The stream that a read belongs to, or None: the nearest one of this process, else the nearest of another."""
        if self._streams and (last := self._streams[0]).position == offset and last.pid == pid:
            return last
        best, best_rank = -1, (2, 0)  # (1 for a stream of another process, distance)
        for index, stream in enumerate(self._streams):
            distance = abs(offset - stream.position)
            if distance <= NEAR_BYTES and (rank := (int(stream.pid != pid), distance)) < best_rank:
                best, best_rank = index, rank
        if best < 0:
            return None
        stream = self._streams[best]
        if best:
            self._streams.insert(0, self._streams.pop(best))
        return stream

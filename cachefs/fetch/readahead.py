"""Sequential readahead: pure policy. `observe` is told each read and answers which blocks will be wanted.

Reads are sorted into *streams* by (pid, offset): forked loader workers share a file handle, and one process may read a
file at two places. A read that continues a stream doubles its window up to the cap; a read nowhere near one starts a new
stream, which has to prove itself, except at the file's start, where sequential is the likely case until three jumps have
shown otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

NEAR_BYTES = 4 << 20
"""How far from a stream's position a read still belongs to it. Derived: the kernel sends up to 12 (or, raised, 128)
read-aheads of up to 1 MiB at once, and they arrive out of order."""

STREAMS = 16
"""Streams remembered per object. Guessed: loader workers per node are about that many."""

JUMPS_TO_DOUBT = 3
"""New streams without a continued one after which the file's start is no longer presumed sequential. Borrowed."""


@dataclass(slots=True)
class Stream:
    pid: int
    position: int
    window: int
    ahead: int  # first block not yet asked for on this stream's behalf
    hits: int
    used: int


class Readahead:
    """For one object of `size` bytes; windows in blocks of `block_size`, at most `max_blocks`."""

    def __init__(self, size: int, block_size: int, max_blocks: int) -> None:
        self._blocks = -(-size // block_size)
        self._block_size = block_size
        self._max = max_blocks
        self._streams: list[Stream] = []
        self._jumps = 0
        self._tick = 0

    def observe(self, pid: int, offset: int, length: int) -> range:
        """The blocks to have on their way after this read (its own blocks excluded); each is named once per stream."""
        self._tick += 1
        stream = self._match(pid, offset)
        end = offset + length
        if stream is None:
            presumed = offset == 0 and self._jumps < JUMPS_TO_DOUBT
            self._jumps += not presumed
            stream = Stream(
                pid, end, min(1, self._max) if presumed else 0, -(-end // self._block_size), 0, self._tick
            )
            if len(self._streams) >= STREAMS:
                self._streams.remove(min(self._streams, key=lambda s: s.used))
            self._streams.append(stream)
        else:
            stream.used = self._tick
            if end <= stream.position:
                return range(0)
            stream.position = end
            stream.hits += 1
            if stream.hits >= 2:
                self._jumps = 0
            if stream.window == 0 and stream.hits >= 2:
                stream.window = min(1, self._max)
        here = -(-stream.position // self._block_size)
        start = max(stream.ahead, here)
        # Ask again when half of what was ahead is used up, and for twice as much: a faster reader gets further ahead,
        # and each request is worth its round trip.
        if not stream.window or start - here > stream.window // 2 or start >= self._blocks:
            return range(0)
        stop = min(here + stream.window, self._blocks)
        stream.window = min(self._max, stream.window * 2)
        stream.ahead = stop
        return range(start, stop)

    def _match(self, pid: int, offset: int) -> Stream | None:
        best = None
        for stream in self._streams:
            if abs(offset - stream.position) <= NEAR_BYTES and (best is None or stream.pid == pid):
                best = stream
        return best

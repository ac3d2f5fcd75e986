"""Blocks that are asked for together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from cachefs.names import BLOCKS_PER_EXTENT


def whole_extent(block: int) -> int:
    """The longest run that there can be."""
    return BLOCKS_PER_EXTENT


def runs(blocks: Iterable[int], longest: Callable[[int], int] = whole_extent) -> Iterator[tuple[int, int]]:
    """Consecutive blocks as [start, stop) that do not leave their extent, of at most `longest(start)` blocks each. `blocks`
    are looked at as late as can be: one further than what has been given."""
    start = stop = most = -1
    for block in blocks:
        if block == stop and block < most and block % BLOCKS_PER_EXTENT:
            stop += 1
            continue
        if stop > start:
            yield start, stop
        start, stop, most = block, block + 1, block + longest(block)
    if stop > start:
        yield start, stop

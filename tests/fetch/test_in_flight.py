"""Bytes on their way in: however they come, the same blocks are whole with the same checksums."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cachefs.store.space import HeapWrite, WriteClosed
from tests.peers.exchange import content

BLOCK = 1000
SIZE = 4 * BLOCK + 300
DATA = content(SIZE)
BLOCKS = [DATA[at : at + BLOCK] for at in range(0, SIZE, BLOCK)]
SUMS = [(block, xxhash.xxh3_64_intdigest(data)) for block, data in enumerate(BLOCKS)]


@given(st.integers(0, 5), st.lists(st.integers(1, 2500), max_size=12))
def test_blocks_of_peers_and_bytes_of_the_store_make_the_same_fill(from_peers: int, cuts: list[int]) -> None:
    cache_write = HeapWrite(SIZE, BLOCK, 0, 5)
    for block, checksum in SUMS[:from_peers]:
        cache_write.write_block(memoryview(BLOCKS[block]), checksum)
        assert cache_write.written == min(SIZE, (block + 1) * BLOCK)
    while cache_write.written < SIZE:
        cache_write.write(DATA[cache_write.written :][: cuts.pop() if cuts else SIZE])
    assert cache_write.take_completed() == SUMS
    assert cache_write.read(0, SIZE) == DATA


@pytest.mark.parametrize(
    ("written", "block"),
    [(0, BLOCKS[0][:-1]), (0, BLOCKS[0] + b"x"), (BLOCK + 1, BLOCKS[1]), (4 * BLOCK, BLOCKS[0]), (SIZE, b"")],
    ids=["short", "long", "across two", "longer than the last", "beyond the end"],
)
def test_what_is_not_a_whole_block_is_refused_and_nothing_of_it_is_written(
    written: int, block: bytes
) -> None:
    cache_write = HeapWrite(SIZE, BLOCK, 0, 5)
    cache_write.write(DATA[:written])
    with pytest.raises(ValueError):
        cache_write.write_block(memoryview(block), 1)
    assert (
        cache_write.written == written
        and cache_write.take_completed() == SUMS[: written // BLOCK + written // SIZE]
    )


def test_a_closed_fill_takes_no_blocks_and_a_reader_is_told_of_the_one_he_waits_for() -> None:
    cache_write, told = HeapWrite(SIZE, BLOCK, 0, 5), []
    cache_write.on_written = lambda: told.append(cache_write.written)
    cache_write.wake_at = BLOCK + 1
    for block, checksum in SUMS[:2]:
        cache_write.write_block(memoryview(BLOCKS[block]), checksum)
    assert told == [2 * BLOCK]
    cache_write.close()
    with pytest.raises(WriteClosed):
        cache_write.write_block(memoryview(BLOCKS[2]), SUMS[2][1])
    assert cache_write.written == 2 * BLOCK

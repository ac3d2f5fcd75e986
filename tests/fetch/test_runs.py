"""Blocks that are asked for together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base.names import BLOCKS_PER_EXTENT
from cachefs.fetch.fetcher import runs


@pytest.mark.parametrize(
    ("blocks", "longest", "expected"),
    [
        ([], 4, []),
        ([3], 4, [(3, 4)]),
        ([0, 1, 2, 3, 4], 4, [(0, 4), (4, 5)]),
        ([0, 1, 3, 4], 4, [(0, 2), (3, 5)]),
        ([14, 15, 16, 17], 8, [(14, 16), (16, 18)]),
        (range(40), 99, [(0, 16), (16, 32), (32, 40)]),
    ],
)
def test_are_consecutive_short_enough_and_of_one_extent(
    blocks: list[int], longest: int, expected: list[tuple[int, int]]
) -> None:
    assert list(runs(blocks, lambda _: longest)) == expected


def test_how_long_they_may_be_depends_on_where_they_begin() -> None:
    asked: list[int] = []

    def longest(start: int) -> int:
        asked.append(start)
        return 16 if start < 16 else 8

    assert list(runs(range(32), longest)) == [(0, 16), (16, 24), (24, 32)]
    assert asked == [0, 16, 24]


@given(st.sets(st.integers(0, 100)), st.integers(1, 20))
def test_every_block_is_in_one_of_them(blocks: set[int], longest: int) -> None:
    found = list(runs(sorted(blocks), lambda _: longest))
    assert [block for start, stop in found for block in range(start, stop)] == sorted(blocks)
    for start, stop in found:
        assert 0 < stop - start <= longest
        assert start // BLOCKS_PER_EXTENT == (stop - 1) // BLOCKS_PER_EXTENT

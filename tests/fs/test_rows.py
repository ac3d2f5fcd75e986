from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.fs.inodes import NUMBER_BYTES
from cachefs.fs.rows import Row, decode, encode, generation_of

MD5 = '"0123456789abcdef0123456789abcdef"'

ETAGS = st.one_of(
    st.text(max_size=40),
    st.just(MD5),
    st.integers(1, 99999).map(lambda n: f'{MD5[:-1]}-{n}"'),
    st.sampled_from(
        [MD5.upper(), MD5[1:], MD5 + "x", f'{MD5[:-1]}-0"', f'{MD5[:-1]}-007"', '"0x8DC0000"', ""]
    ),
)


@given(
    st.builds(
        Row,
        st.integers(0, 2**32 - 1),
        st.one_of(st.integers(-(2**62), 2**62), st.integers(0, 2**33).map(lambda s: s * 10**9)),
        st.integers(0, 2**63),
        ETAGS,
        st.integers(0, 256**NUMBER_BYTES - 1),
        st.booleans(),
    )
)
def test_a_row_comes_back_as_it_was(row: Row) -> None:
    assert decode(encode(row)) == row
    assert generation_of(encode(row)) == row.generation


@pytest.mark.parametrize("year", [1, 1500, 2300, 9999])
def test_a_date_beyond_the_range_of_rows_is_the_nearest_in_it(year: int) -> None:
    """Go programs write the year 1 where they know none; a directory of this machine may have files of 2300."""
    mtime_ns = int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) * 10**9
    row = Row(1, mtime_ns, 5, MD5)
    shown = datetime.fromtimestamp(decode(encode(row)).mtime_ns // 10**9, UTC).year
    assert shown == (1677 if year < 1970 else 2262)


def test_a_common_row_is_small() -> None:
    assert len(encode(Row(1, 1_700_000_000 * 10**9, 120_000, MD5))) == 32

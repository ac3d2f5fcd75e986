from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachefs.fs.inodes import FIRST_LOW, LOW_MASK, ROOT, join, low_of, next_low, number_of
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
        st.one_of(st.none(), st.integers(0, LOW_MASK)),
        st.booleans(),
    )
)
def test_a_row_comes_back_as_it_was(row: Row) -> None:
    assert decode(encode(row)) == row
    assert generation_of(encode(row)) == row.generation


def test_a_common_row_is_small() -> None:
    assert len(encode(Row(1, 1_700_000_000 * 10**9, 120_000, MD5))) == 26


@given(st.binary(min_size=1, max_size=255))
def test_numbers_are_in_range_and_always_the_same(name: bytes) -> None:
    low = low_of(name)
    assert FIRST_LOW <= low <= LOW_MASK and low == low_of(name)
    assert FIRST_LOW <= next_low(low) <= LOW_MASK
    number = number_of(join(number_of(ROOT), low))
    assert 0 < number < 1 << 28
    assert ROOT < join(number, low) < 1 << 63

"""The index against plain dictionaries: rows, their places in the order of eviction, cursors, and what it says of itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cachefs.base.errors import CacheUnusable, NoRoom
from cachefs.store.catalog import _CLOCK, _KEY, Copy, CopyKey, Index, Saved, pack_copy, unpack_copy
from cachefs.store.tier import RAM, SSD

DIGESTS = [b"%016d" % number for number in range(4)] + [bytes(16), b"\xff" * 16]
WIDE = DIGESTS[2]
"""Of many extents: a search reads 64 rows at a time, and the number of an extent takes more than a byte."""


class Plain:
    """What an index holds."""

    def __init__(self) -> None:
        self.rows: dict[CopyKey, Copy] = {}
        self.notes: dict[bytes, bytes] = {}
        self.totals = {RAM: (0, 0, 0), SSD: (0, 0, 0)}

    def order(self, tier: int) -> list[tuple[int, CopyKey, int]]:
        placed = (copy for key, copy in self.rows.items() if key[0] == tier)
        return sorted((copy.stored_clock, copy.key, copy.dataset) for copy in placed if copy.stored_clock)


def copy_of(key: CopyKey, clock: int, rng: random.Random) -> Copy:
    copy = Copy(*key, object_size=rng.getrandbits(40), clock=clock, bitmap=rng.randrange(1, 1 << 16))
    copy.dataset, copy.pinned = rng.getrandbits(32), rng.random() < 0.3
    copy.checksums = [rng.getrandbits(64) for _ in range(16)]
    return copy


def write(index: Index, plain: Plain, rng: random.Random, clock: int) -> int:
    """Some rows come, some change, some go; returns the clock."""
    keys = [(tier, digest, rng.randrange(3)) for tier in (RAM, SSD) for digest in DIGESTS]
    keys += [(SSD, WIDE, extent) for extent in rng.sample(range(1000), 200)]
    saved: list[Saved] = []
    removed: list[tuple[CopyKey, int | None]] = []
    for key in dict.fromkeys(rng.sample(keys, rng.choice([1, 5, 150]))):
        before = plain.rows.get(key)
        stored = before.stored_clock if before is not None else None
        if before is not None and rng.random() < 0.4:
            removed.append((key, stored))
            del plain.rows[key]
        else:
            if before is None or rng.random() < 0.7:
                clock += rng.randrange(1, 4)
                copy = copy_of(key, clock, rng)
            else:  # as old as before
                copy = copy_of(key, before.clock, rng)
            copy.stored_clock = 0 if copy.pinned and key[0] == SSD else copy.clock
            row = pack_copy(copy, ordered=copy.stored_clock > 0)
            saved.append((key, row, copy.dataset, copy.stored_clock, stored))
            plain.rows[key] = copy
    plain.totals = {
        tier: (rng.getrandbits(40), rng.getrandbits(20), rng.getrandbits(40)) for tier in (RAM, SSD)
    }
    notes = {b"n%d" % rng.randrange(3): rng.randbytes(4)}
    plain.notes |= notes
    index.write(saved, removed, plain.totals, notes)
    return clock


def same(found: Copy | None, wanted: Copy | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    count = wanted.bitmap.bit_length()
    assert found.checksums == wanted.checksums[:count] + [0] * (16 - count)
    names = ("key", "object_size", "bitmap", "clock", "stored_clock", "dataset", "pinned")
    assert [getattr(found, n) for n in names] == [getattr(wanted, n) for n in names]
    return (found.used, found.verified, found.pins, found.in_progress, found.forgotten) == (
        wanted.clock,
        0,
        0,
        0,
        0,
    )


def check(index: Index, plain: Plain, rng: random.Random, least: int = 1) -> None:
    for key in {*plain.rows, *((t, d, e) for t in (RAM, SSD) for d in DIGESTS for e in range(3))}:
        assert same(index.load([key])[0], plain.rows.get(key))
    for tier in (RAM, SSD):
        limit, after, walked = rng.choice([least, 7, 1000]), b"", []
        while rows := index.oldest(tier, after, limit):
            assert len(rows) <= limit
            walked += [(clock, key, dataset) for _, key, clock, dataset in rows]
            after = rows[-1][0]
        assert walked == plain.order(tier)
        for digest in DIGESTS:
            extents = sorted(key[2] for key in plain.rows if key[:2] == (tier, digest))
            assert list(index.extents_of(tier, digest)) == extents
        digests = list[bytes]()
        for some in index.digests(tier, limit):
            assert 0 < len(some) <= limit
            digests += some
        assert list(dict.fromkeys(digests)) == sorted({key[1] for key in plain.rows if key[0] == tier})
        assert index.totals(tier) == plain.totals[tier]
    assert {name: index.note(name) for name in plain.notes} == plain.notes
    assert index.note(b"none") is None


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_found_as_they_were_written(tmp_path: Path, seed: int) -> None:
    rng, plain, clock = random.Random(seed), Plain(), 0
    index = Index(tmp_path / "index", 4096)
    for number in range(14):
        clock = write(index, plain, rng, clock)
        check(index, plain, rng)
        if number % 6 == 5:
            tier = rng.choice([RAM, SSD])
            index.forget_tier(tier, b"tag %d" % number)
            plain.rows = {key: copy for key, copy in plain.rows.items() if key[0] != tier}
            plain.totals[tier] = (0, 0, 0)
            assert index.tag(tier) == b"tag %d" % number
            check(index, plain, rng)
        if number % 4 == 3:
            whole = rng.random() < 0.5
            index.close(whole=whole)
            index = Index(tmp_path / "index", 4096)
            assert (index.dropped, index.was_clean) == (False, whole)
            check(index, plain, rng)
    index.close()


def test_a_damaged_row_is_none(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(20):
        copy = copy_of((SSD, DIGESTS[0], 300), 5, rng)
        row = pack_copy(copy)
        copy.stored_clock = 5
        assert same(unpack_copy(copy.key, row), copy)
        for length in range(len(row)):
            assert unpack_copy(copy.key, row[:length]) is None
        at = rng.randrange(len(row))
        damaged = row[:at] + bytes([row[at] ^ 1 << rng.randrange(8)]) + row[at + 1 :]
        assert unpack_copy(copy.key, damaged) is None


def test_what_is_no_row_of_ours_names_nothing(tmp_path: Path) -> None:
    """Keys and values of another length, as damage leaves them."""
    index, plain, rng = Index(tmp_path / "index", 4096), Plain(), random.Random(2)
    write(index, plain, rng, 0)
    check(index, plain, rng)
    index._db.write(
        [
            ("order", _CLOCK.pack(SSD, 0) + b"x", b"short"),
            ("order", _CLOCK.pack(SSD, 1), b"short"),
            ("copies", _KEY.pack(SSD, DIGESTS[1], 0) + b"longer", b"rubbish"),
            ("meta", b"total%d" % RAM, b"short"),
        ]
    )
    plain.totals[RAM] = (0, 0, 0)
    check(index, plain, rng, least=7)
    index.close()


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize(("whole", "trusted"), [(True, True), (True, False), (False, True)])
def test_files_are_trusted_if_all_was_told_before_the_end(
    tmp_path: Path, empty: bool, whole: bool, trusted: bool
) -> None:
    index, plain = Index(tmp_path / "index", 4096), Plain()
    assert index.trusted and not index.was_clean and not index.unfinished, "it is new"
    if not empty:
        write(index, plain, random.Random(3), 0)
    index.close(whole=whole, trusted=trusted)
    index = Index(tmp_path / "index", 4096)
    assert index.was_clean is whole and index.trusted is (empty or (whole and trusted))
    assert index.unfinished is not (whole or (empty and not trusted))
    index.close(whole=True, trusted=False)
    index = Index(tmp_path / "index", 4096)
    assert index.trusted is empty, "one daemon that promised nothing is enough"
    index.close(whole=True, trusted=True)
    index = Index(tmp_path / "index", 4096)
    assert index.trusted is empty, "and no later one can make it good"
    index.close()


def test_one_that_cannot_be_told_anything_is_not_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, plain = Index(tmp_path / "index", 4096), Plain()
    write(index, plain, random.Random(4), 0)
    index.close(trusted=True)

    def full(*_: object, **__: object) -> None:
        raise NoRoom("full")

    with monkeypatch.context() as patch:
        patch.setattr("cachefs.base.database.Database.write", full)
        index = Index(tmp_path / "index", 4096)
        assert index.trusted
        index.close(trusted=True)
    index = Index(tmp_path / "index", 4096)
    assert not index.was_clean and not index.trusted and not index.dropped
    index.close()


def test_where_it_cannot_be_read_there_is_nothing(tmp_path: Path) -> None:
    index, plain = Index(tmp_path / "index", 4096), Plain()
    write(index, plain, random.Random(5), 0)
    index._db.close()
    key = next(iter(plain.rows))
    assert index.load([key])[0] is None and index.note(b"n0") is None
    assert list(index.extents_of(*key[:2])) == [] and index.oldest(key[0], b"", 5) == []
    assert list(index.digests(key[0], 5)) == []
    with pytest.raises(CacheUnusable):
        index.totals(SSD)

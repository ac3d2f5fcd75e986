"""The policy of parts: whatever is written in whatever order, what would be assembled is the file."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cachefs.origin import Limits
from cachefs.origin.fsspec_client import LIMITS as WHOLE
from cachefs.origin.google import LIMITS as GOOGLE
from cachefs.origin.local import LIMITS as LOCAL
from cachefs.origin.protocol import MIB
from cachefs.origin.s3 import LIMITS as S3
from cachefs.upload.sending import Parts, Piece
from tests.conftest import examples


class Tiny(Limits):
    """Parts of ten bytes, from 50 on of twenty."""

    def part_size(self, sent: int) -> int:
        return 10 if sent < 50 else 20


TINY = Tiny(1 << 20, 1 << 20, 1, 1 << 20, 1000, 1 << 20)

WRITES = st.tuples(st.just("write"), st.integers(0, 80), st.integers(0, 30))
APPENDS = st.tuples(st.just("append"), st.just(0), st.integers(1, 40))
CUTS = st.tuples(st.just("cut"), st.integers(0, 90), st.just(0))
SENDS = st.tuples(
    st.sampled_from(["all", "all", "begin", "spill", "fail", "commit"]), st.integers(0, 5), st.just(0)
)


class Wire:
    """A store, and what is on its way to it: bytes are read when a part ends, as late as can be, or when it begins."""

    def __init__(self, parts: Parts, file: bytearray) -> None:
        self.parts, self.file = parts, file
        self.under_way: list[tuple[Piece, bytes]] = []
        self.held: dict[int, bytes] = {}

    def begin(self, piece: Piece) -> None:
        assert piece.number not in self.parts.under_way, "one of its number is under way"
        self.parts.begin(piece)
        self.under_way.append((piece, bytes(self.file[piece.start : piece.stop])))

    def end(self, which: int, *, stored: bool, late: bool = False) -> None:
        piece, data = self.under_way.pop(which % len(self.under_way))
        now = bytes(self.file[piece.start : piece.stop])
        if late and len(now) == len(data):
            data = now[: len(now) // 2] + data[len(now) // 2 :]  # read while it was being changed
        if stored:
            self.held[piece.number] = data
        self.parts.ended(piece, stored=stored)

    def assemble(self) -> bytes:
        while self.under_way:
            self.end(0, stored=len(self.under_way) % 2 == 0)
        pieces = self.parts.pieces()
        for piece in self.parts.missing(pieces):
            self.begin(piece)
            self.end(0, stored=True)
        assert self.parts.missing(pieces) == []
        return b"".join(self.held[piece.number] for piece in pieces)


@settings(max_examples=examples(600), deadline=None)
@example(0, [("append", 0, 25), ("all", 0, 0), ("cut", 5, 0), ("cut", 25, 0)])
@example(0, [("append", 0, 25), ("all", 0, 0), ("cut", 15, 0), ("write", 20, 5)])
@given(st.integers(0, 60), st.lists(WRITES | APPENDS | CUTS | SENDS, max_size=25))
def test_what_is_assembled_is_the_file(base: int, steps: list[tuple[str, int, int]]) -> None:
    file = bytearray(b"\xff" * base)
    parts = Parts(TINY, base)
    wire = Wire(parts, file)
    token = 0
    for what, where, length in steps:
        token = token % 250 + 1
        if what in ("write", "append"):
            offset = len(file) if what == "append" else where
            if length:
                file.extend(bytes(max(0, offset + length - len(file))))
                file[offset : offset + length] = bytes([token]) * length
            parts.wrote(offset, length)
        elif what == "cut":
            del file[where:]
            file.extend(bytes(where - len(file)))
            parts.resized(where)
        elif what == "begin":
            piece = parts.ready()
            if piece is not None:
                assert piece.stop < len(file), "the frontier has gone beyond it"
                wire.begin(piece)
        elif what == "all":
            while (piece := parts.ready()) is not None:
                wire.begin(piece)
                wire.end(-1, stored=True)
        elif what == "commit":
            assert wire.assemble() == file
            parts.forget()
            wire.held.clear()
        elif wire.under_way:
            wire.end(where, stored=what == "spill", late=bool(where % 2))
        assert parts.size == len(file)
        assert parts.waiting_bytes >= sum(p.stop - p.start for p in parts.under_way.values())
        assert 0 <= parts.sent_bytes <= len(file)
    assert wire.assemble() == file


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30))
def test_who_writes_in_order_has_sent_all_but_the_end(lengths: list[int]) -> None:
    parts, sent = Parts(TINY), []
    for length in lengths:
        parts.wrote(parts.size, length)
        while (piece := parts.ready()) is not None:
            parts.begin(piece)
            parts.ended(piece, stored=True)
            sent.append(piece.number)
    assert sent == list(range(1, len(sent) + 1))
    assert len(sent) == max(0, parts.count - 1), "each once, and the last one is not known to be whole"
    assert [p.number for p in parts.missing(parts.pieces())] == [parts.count]
    _, start, stop, _ = parts.pieces()[-1]
    assert parts.waiting_bytes == stop - start


@pytest.mark.parametrize("limits", [S3, GOOGLE, LOCAL])
@pytest.mark.parametrize("size", [1, 8 * MIB, 8 * MIB + 1, 100 * MIB, 30_000 * MIB])
def test_sizes_are_those_of_the_store(limits: Limits, size: int) -> None:
    parts = Parts(limits, size)
    pieces = parts.pieces()
    assert [p.number for p in pieces] == list(range(1, parts.count + 1))
    at = 0
    for piece in pieces:
        assert piece.start == at and piece.stop == min(size, at + limits.part_size(at))
        at = piece.stop
    assert at == size and parts.count <= limits.most_parts


def test_the_largest_object_needs_no_more_parts_than_there_may_be() -> None:
    assert Parts(S3, S3.largest_object).count <= S3.most_parts


def test_an_empty_file_has_no_parts() -> None:
    parts = Parts(TINY)
    assert (parts.count, parts.pieces(), parts.missing(parts.pieces()), parts.ready()) == (0, [], [], None)
    parts.wrote(0, 25)
    parts.resized(0)
    assert (parts.count, parts.pieces(), parts.ready()) == (0, [], None)


def test_a_part_that_is_under_way_when_the_file_is_cut_is_not_begun_again() -> None:
    parts = Parts(TINY)
    parts.wrote(0, 25)
    first, second = parts.pieces()[:2]
    parts.begin(first)
    parts.begin(second)
    parts.resized(5)
    parts.wrote(5, 20)
    assert parts.ready() is None, "the first is still under way"
    parts.ended(first, stored=True)
    again = parts.ready()
    assert again is not None and (again.number, again.start, again.stop) == (1, 0, 10)
    assert not parts.is_current(first)


def test_a_store_without_parts_is_never_ready() -> None:
    parts = Parts(WHOLE)
    parts.wrote(0, 1 << 30)
    assert parts.ready() is None and parts.under_way == {}


def test_nothing_is_sent_early_of_what_is_written_out_of_order() -> None:
    parts = Parts(TINY)
    parts.wrote(20, 100)
    assert parts.ready() is None and parts.waiting_bytes == 0
    parts.wrote(0, 11)
    piece = parts.ready()
    assert piece is not None and (piece.start, piece.stop) == (0, 10)


def test_what_waits_is_what_is_ready_and_has_not_landed() -> None:
    parts = Parts(TINY)
    parts.wrote(0, 25)
    assert parts.waiting_bytes == 25
    waiting = []
    for _ in range(2):
        piece = parts.ready()
        assert piece is not None
        parts.begin(piece)
        waiting.append((piece, parts.waiting_bytes))
    assert [count for _, count in waiting] == [25, 25] and parts.ready() is None
    parts.ended(waiting[1][0], stored=True)
    assert parts.waiting_bytes == 15
    parts.ended(waiting[0][0], stored=True)
    assert parts.waiting_bytes == 5 and parts.sent_bytes == 20
    parts.wrote(25, 5)
    assert parts.waiting_bytes == 10
    parts.resized(0)
    assert parts.waiting_bytes == 0


def test_a_part_rewritten_under_way_is_stale() -> None:
    parts = Parts(TINY)
    parts.wrote(0, 25)
    piece = parts.ready()
    assert piece is not None
    parts.begin(piece)
    assert parts.is_current(piece)
    parts.wrote(3, 1)
    assert not parts.is_current(piece)
    parts.ended(piece, stored=True)
    assert [p.number for p in parts.missing(parts.pieces())] == [1, 2, 3]


@given(st.integers(1, 40 * 10), st.integers(0, 40 * 10), st.integers(1, 3 * 10), st.booleans())
@settings(max_examples=examples(200))
def test_what_is_sent_again_is_what_was_changed(size: int, offset: int, length: int, edges: bool) -> None:
    """No part beside it, also where it begins and ends where parts do."""
    parts = Parts(TINY, size)
    if edges:
        offset, length = offset // 10 * 10, max(1, length // 10) * 10
    sent = parts.pieces()
    for piece in sent:
        parts.begin(piece)
        parts.ended(piece, stored=True)
    assert parts.missing(parts.pieces()) == [] and parts.sent_bytes == size
    parts.wrote(offset, length)
    assert parts.size == max(size, offset + length)
    now = parts.pieces()
    # What is longer now is another part, though it was not written.
    wanted = {
        piece.number
        for piece in now
        if (piece.start < offset + length and offset < piece.stop)
        or piece.number > len(sent)
        or piece.stop != sent[piece.number - 1].stop
    }
    assert {piece.number for piece in parts.missing(now)} == wanted
    assert parts.sent_bytes == sum(p.stop - p.start for p in now if p.number not in wanted)
    before = parts.pieces()
    parts.rewritten(size)
    assert len(parts.missing(parts.pieces())) == parts.count > 0 and parts.pieces() != before
    parts.forget()
    assert parts.sent_bytes == 0

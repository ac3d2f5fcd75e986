"""Bytes on their way into a tier or the heap, and the heap itself: against what plain bytes say."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.base.errors import NoRoom
from cachefs.store import space
from cachefs.store.catalog import Copy
from cachefs.store.space import CacheWrite, Heap, HeapWrite, TierWrite, WriteClosed
from cachefs.store.tier import RAM, Tier
from tests.conftest import examples

BLOCK = 8
SIZE = 5 * BLOCK + 3  # of the version: its last block is short


def content(start: int, stop: int) -> bytes:
    return bytes((7 * at + at // 256) % 251 for at in range(start, stop))


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[int, int, list[int], int]:
    """(first block, one past the last, lengths in which the bytes come, the offset that a reader waits for)"""
    start = draw(st.integers(0, 5))
    stop = draw(st.integers(start + 1, 6))
    lengths = draw(st.lists(st.integers(0, 2 * BLOCK + 1), max_size=12))
    return start, stop, lengths, draw(st.integers(start * BLOCK, SIZE + 1))


def check(cache_write: CacheWrite, start: int, stop: int, lengths: list[int], wake_at: int) -> None:
    first, end = start * BLOCK, min(SIZE, stop * BLOCK)
    assert (cache_write.start, cache_write.stop, cache_write.written) == (first, end, first)
    assert not cache_write.take_completed()
    cache_write.prefetched = True
    assert not cache_write.wanted, "no reader has asked for it"
    cache_write.wake_at = wake_at
    assert cache_write.wanted is (wake_at <= end)
    woken: list[int] = []
    cache_write.on_written = lambda: woken.append(cache_write.written)
    at, taken, ends = first, list[tuple[int, int]](), list[tuple[int, int]]()
    for number, length in enumerate(lengths):
        if at + length > end:
            with pytest.raises(ValueError, match="more bytes than the range has"):
                cache_write.write(content(at, at + length))
            length = 0
        elif at % BLOCK == 0 and length == min(BLOCK, SIZE - at) and number % 2:
            data = content(at, at + length)
            cache_write.write_block(memoryview(data), xxhash.xxh3_64_intdigest(data))
            ends.append((at + length, length))
        else:
            cache_write.write(content(at, at + length))
            ends.append((at + length, length))
        at += length
        assert cache_write.written == at
        for offset in range(first, at):
            assert cache_write.peek(offset, at - offset) == content(offset, at)
        if number % 3 == 0:
            taken += cache_write.take_completed()
            assert cache_write.settled == len(taken)
    taken += cache_write.take_completed()
    assert cache_write.take_completed() == []
    whole = [(b, content(b * BLOCK, min(SIZE, (b + 1) * BLOCK))) for b in range(start, stop)]
    assert taken == [(b, xxhash.xxh3_64_intdigest(d)) for b, d in whole if b * BLOCK + len(d) <= at]
    # All at once: the end of the transfer wakes its readers.
    assert woken == [written for written, length in ends if written >= wake_at and length < end - first]
    cache_write.close()
    with pytest.raises(WriteClosed):
        cache_write.write(b"")
    if at % BLOCK == 0 and at < end:
        with pytest.raises(WriteClosed):
            cache_write.write_block(memoryview(content(at, min(at + BLOCK, SIZE))), 0)
    assert cache_write.written == at


@given(deliveries())
@settings(max_examples=examples(150))
def test_what_comes_in_pieces_is_in_the_heap_as_it_is(how: tuple[int, int, list[int], int]) -> None:
    filled = HeapWrite(SIZE, BLOCK, *how[:2])
    check(filled, *how)
    assert filled.in_heap and not filled.waits


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Tier:
    path = tmp_path_factory.mktemp("tier")
    return Tier(RAM, path, 1 << 20, keep_free_bytes=0, clock=lambda: 0.0)


@given(deliveries(), st.integers(1, 9))
@settings(max_examples=examples(100))
def test_what_comes_in_pieces_is_in_the_file_as_it_is(
    tier: Tier, how: tuple[int, int, list[int], int], at_once: int
) -> None:
    """Though the file system takes a part of each write."""
    path, before = tier.path / "file", len(os.listdir("/proc/self/fd"))
    path.write_bytes(b"")
    flags, pwrite = os.O_RDWR | os.O_CLOEXEC, os.pwrite
    filled = TierWrite(tier, Copy(RAM, b"", 0, SIZE), lambda: os.open(path, flags), SIZE, BLOCK, *how[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:at_once], offset))
        assert len(os.listdir("/proc/self/fd")) == before
        filled.write(b"")
        check(filled, *how)
    os.close(filled.fd)
    assert len(os.listdir("/proc/self/fd")) == before
    assert filled.error is None and not tier.disk._calls


@pytest.mark.parametrize("wake_at", [0, BLOCK, BLOCK + 1, 2 * BLOCK, SIZE, SIZE + 1])
def test_whole_blocks_wake_those_who_wait_for_them(wake_at: int) -> None:
    filled, woken = HeapWrite(SIZE, BLOCK, 0, 6), list[int]()
    filled.wake_at = wake_at
    filled.on_written = lambda: woken.append(filled.written)
    for at in range(0, SIZE, BLOCK):
        filled.write_block(memoryview(content(at, min(at + BLOCK, SIZE))), 0)
    ends = [*range(BLOCK, SIZE, BLOCK), SIZE]
    assert woken == [end for end in ends if end >= wake_at]
    alone = HeapWrite(SIZE, BLOCK, 5, 6)
    alone.wake_at, alone.on_written = 0, lambda: woken.append(-1)
    alone.write_block(memoryview(content(5 * BLOCK, SIZE)), 0)
    assert -1 not in woken, "its end wakes them"


def test_a_block_that_is_none_is_refused() -> None:
    for before, length in ((0, BLOCK - 1), (0, BLOCK + 1), (1, BLOCK), (1, BLOCK - 1)):
        filled = HeapWrite(SIZE, BLOCK, 0, 6)
        filled.write(bytes(before))
        with pytest.raises(ValueError, match="not a whole block"):
            filled.write_block(memoryview(bytes(length)), 0)
        assert filled.written == before
    filled = HeapWrite(SIZE, BLOCK, 5, 6)
    with pytest.raises(ValueError, match="not a whole block"):
        filled.write_block(memoryview(bytes(BLOCK)), 0)
    filled.write_block(memoryview(bytes(3)), 5)
    assert filled.take_completed() == [(5, 5)]


def test_a_file_that_cannot_be_opened_or_written_is_told_apart(tier: Tier) -> None:
    def refused() -> int:
        raise OSError(errno.EACCES, "no")

    filled = TierWrite(tier, Copy(RAM, b"", 0, SIZE), refused, SIZE, BLOCK, 0, 1)
    with pytest.raises(NoRoom):
        filled.write(b"1")
    assert filled.error is not None and filled.error.errno == errno.EACCES and filled.fd == -1
    assert (filled.written, filled.take_completed()) == (0, [])
    filled.close()
    path = tier.path / "read only"
    path.write_bytes(b"")
    filled = TierWrite(tier, Copy(RAM, b"", 0, SIZE), lambda: os.open(path, os.O_RDONLY), SIZE, BLOCK, 0, 1)
    with pytest.raises(NoRoom):
        filled.write(b"1")
    assert filled.error is not None and filled.error.errno == errno.EBADF and filled.fd >= 0
    filled.close()
    os.close(filled.fd)


def test_who_reads_what_comes_ahead_wants_it(tier: Tier) -> None:
    path = tier.path / "ahead"
    path.write_bytes(b"")
    filled = TierWrite(tier, Copy(RAM, b"", 0, SIZE), lambda: os.open(path, os.O_RDWR), SIZE, BLOCK, 0, 1)
    filled.prefetched = True
    filled.write(b"12345678")
    assert filled.peek(2, 3) == b"345" and not filled.wanted
    assert filled.read(2, 3) == b"345" and filled.wanted
    filled.close()
    os.close(filled.fd)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(-1, 12)), max_size=40))
@settings(max_examples=examples(150))
def test_the_heap_holds_what_came_last(steps: list[tuple[int, int, int]]) -> None:
    """(version, block, bytes): put; a length below 0 drops the version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space, "HEAP_BYTES", 20)
        heap, plain = Heap(), OrderedDict[tuple[bytes, int], bytes]()
        for number, (version, block, length) in enumerate(steps):
            digest = bytes([version])
            if length < 0:
                gone = [key for key in plain if key[0] == digest]
                assert heap.drop(digest) == sum(len(plain.pop(key)) for key in gone)
            else:
                data = bytes([number]) * (length * 3)  # one block may be larger than all of it
                plain.pop((digest, block), None)
                plain[digest, block] = data
                heap.put(digest, block, data)
                while sum(map(len, plain.values())) > 20 and len(plain) > 1:
                    plain.popitem(last=False)
            found = {(bytes([v]), b): heap.blocks.get((bytes([v]), b)) for v in range(3) for b in range(4)}
            assert {key: data for key, data in found.items() if data is not None} == plain
            assert heap._bytes == sum(map(len, plain.values()))

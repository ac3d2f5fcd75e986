"""Reads of a version whose blocks lie in several places, against plain bytes; what is counted of them; files with holes."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import xxhash

from cachefs.store import adopting
from cachefs.store.store import Store
from cachefs.store.tier import RAM, SSD, checksums
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, Lab, begin_write, running

SIZE = EXTENT + 5 * BLOCK + 7
BLOCKS = 22


def lay(lab: Lab, data: bytes, rng: random.Random) -> dict[int, str]:
    """Block → where it is: "ram", "ssd", "both", "heap" or nowhere."""
    store = lab.store
    object_id = lab.origin.put("k", data)
    obj, places = store.object(object_id), dict[int, str]()
    ram = store.tiers[0]
    for block in range(BLOCKS):
        place = rng.choice(["ram", "ssd", "both", "heap", "none"] if rng.random() < 0.5 else ["ram", "ssd"])
        piece = data[block * BLOCK : (block + 1) * BLOCK]
        for tier in (SSD, RAM):
            if place in ("both", "ram" if tier == RAM else "ssd"):
                ram.errors_in_a_row, ram._retry_at = (0, 0.0) if tier == RAM else (1, 1e18)
                if tier == RAM and place == "both":
                    store.tiers[1].errors_in_a_row, store.tiers[1]._retry_at = 1, 1e18
                cache_write = begin_write(store, obj, block, block + 1)
                assert cache_write is not None and cache_write.copy.tier == tier  # type: ignore[attr-defined]
                cache_write.write(piece)
                store.end_write(obj, cache_write)
                for each in store.tiers:
                    each.errors_in_a_row = 0
        if place == "heap":
            passing = store.begin_bypass(obj, block)
            passing.write(piece)
            store.end_write(obj, passing)
        if place != "none":
            places[block] = place
    return places


def spoil(lab: Lab, rng: random.Random) -> None:
    """Some blocks have yet to be verified."""
    for obj in lab.store.catalog._objects.values():
        for copy in lab.store.catalog.all_copies(obj):
            copy.verified &= ~(rng.getrandbits(16) & rng.getrandbits(16))


@pytest.mark.parametrize("verify", ["first", "full"])
@pytest.mark.parametrize("seed", range(5))
@in_trio
async def test_what_is_read_is_what_there_is(cache_dir: Path, seed: int, verify: str) -> None:
    rng, data = random.Random(seed), content(seed, SIZE)
    async with running(cache_dir, ram=64 * BLOCK, verify=verify) as lab:
        places = lay(lab, data, rng)
        store: Store = lab.store
        obj = next(iter(store.catalog._objects.values()))
        assert all(store.has(obj, block) is (block in places) for block in range(BLOCKS))
        metrics = lab.metrics
        for _ in range(150):
            if rng.random() < 0.3:
                spoil(lab, rng)
            unverified = unverified_now(store, obj)
            first = rng.randrange(BLOCKS)
            last = min(BLOCKS - 1, first + rng.choice([0, 0, 1, 2, 20]))
            offset = rng.choice([first * BLOCK, rng.randrange(first * BLOCK, min(SIZE, (first + 1) * BLOCK))])
            end = rng.choice(
                [(last + 1) * BLOCK, rng.randrange(max(last * BLOCK, offset), (last + 1) * BLOCK) + 1]
            )
            size = min(end, SIZE) - offset
            touched = range(first, (offset + size - 1) // BLOCK + 1)
            here = all(block in places for block in touched)
            before = (metrics.ram_hits, metrics.ssd_hits, metrics.heap_hits)
            count = rng.random() < 0.5
            found = store.read_now(obj, offset, size, count=count)
            if found is not None:
                assert here and bytes(found) == data[offset : offset + size] and verify != "full"
            elif verify != "full" and all(in_memory(places, unverified, block) for block in touched):
                raise AssertionError("it is verified and in memory, and nothing is waited for")
            if found is None:
                waited = await store.read(obj, offset, size, count=count)
                assert (waited is not None) is here
                if waited is not None:
                    assert bytes(waited) == data[offset : offset + size]
            after = (metrics.ram_hits, metrics.ssd_hits, metrics.heap_hits)
            if not here or not count:
                assert after == before
            elif verify != "full":
                hits = [b - a for a, b in zip(before, after, strict=True)]
                heap = sum(places[block] == "heap" for block in touched)
                ssd = [
                    sum(places[b] == "ssd" for b in touched),
                    sum(places[b] in ("ssd", "both") for b in touched),
                ]
                assert sum(hits) == len(touched)
                assert hits[2] <= heap and hits[1] <= ssd[1]
        for size in (0, 1):
            found = store.read_now(obj, 5, size)
            assert found in (None, data[5 : 5 + size])
            if 0 in places or not size:
                assert bytes(await store.read(obj, 5, size) or b"") == data[5 : 5 + size]
        assert metrics.checksum_failures == 0
        obj.close_if_unused()


def unverified_now(store: Store, obj: object) -> set[tuple[int, int]]:
    copies = store.catalog.all_copies(obj)  # type: ignore[arg-type]
    return {
        (copy.tier, copy.extent * 16 + at)
        for copy in copies
        for at in range(16)
        if (copy.bitmap & ~copy.verified) >> at & 1
    }


def in_memory(places: dict[int, str], unverified: set[tuple[int, int]], block: int) -> bool:
    place = places.get(block)
    return place == "heap" or (place in ("ram", "both") and (RAM, block) not in unverified)


@in_trio
async def test_where_the_blocks_of_a_version_are_is_told(cache_dir: Path) -> None:
    async with running(cache_dir, ram=64 * BLOCK) as lab:
        store, object_id = lab.store, lab.origin.put("k", content(1, EXTENT + 2 * BLOCK))
        obj = store.object(object_id)
        for block, remote in ((0, False), (1, False), (16, True)):
            cache_write = begin_write(store, obj, block, block + 1, remote_owned=remote)
            assert cache_write is not None
            cache_write.write(content(1, EXTENT + 2 * BLOCK)[block * BLOCK : (block + 1) * BLOCK])
            store.end_write(obj, cache_write)
        copies = store.catalog.all_copies(obj)
        copies[0].verified = 0b01
        store.pin(obj)
        store.space.make_own(copies[1])
        coming = begin_write(store, obj, 3, 5)
        assert coming is not None
        rest = {"tier": "ram", "pinned": True, "remote_owned": False}
        assert store.layout(object_id) == [
            {"extent": 0, "blocks": 2, "verified": 1, "in_progress": 2, "in_use": True, **rest},
            {"extent": 1, "blocks": 1, "verified": 1, "in_progress": 0, "in_use": False, **rest},
        ]
        assert store.cached_bytes(object_id) == 3 * BLOCK
        store.end_write(obj, coming)
        store.unpin(obj)
        obj.close_if_unused()
        other = lab.origin.put("o", content(1, BLOCK))
        cache_write = begin_write(store, store.object(other), 0, 1, remote_owned=True)
        assert cache_write is not None
        cache_write.write(content(1, BLOCK))
        store.end_write(store.object(other), cache_write)
        store.object(other).close_if_unused()
        [row] = store.layout(other)
        assert (row["remote_owned"], row["pinned"], row["in_use"], row["blocks"]) == (True, False, False, 1)
        assert store.layout(lab.origin.put("none", b"1")) == []


@pytest.mark.parametrize("seed", range(8))
def test_holes_are_filled_and_nothing_else_changes(tmp_path: Path, seed: int) -> None:
    """Wherever they begin and end in the range that is looked at."""
    rng, page, pages = random.Random(seed), 4096, 40
    plain, path = bytearray(pages * page), tmp_path / "f"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, len(plain))
    for at in rng.sample(range(pages), rng.choice([0, 1, 10, 39, 40])):
        plain[at * page : (at + 1) * page] = bytes([at + 1]) * page
        os.pwrite(fd, bytes([at + 1]) * page, at * page)
    start = rng.choice([0, page, 7 * page])
    stop = rng.choice([start, start + page, start + 5 * page, len(plain)])
    before = [hole(fd, at) for at in range(pages)]
    adopting._write_zeros(fd, start, stop)
    assert path.read_bytes() == plain
    for at in range(pages):
        assert hole(fd, at) is (before[at] and not start <= at * page < stop)
    ranges = [(page * rng.randrange(20), page * rng.randrange(1, 5)) for _ in range(6)]
    wanted = [xxhash.xxh3_64_intdigest(bytes(plain[at : at + length])) for at, length in ranges]
    assert checksums(fd, ranges) == wanted
    with pytest.raises(OSError, match="short read") as short:
        checksums(fd, [(len(plain) - page, page), (len(plain), 1)])
    assert short.value.errno == errno.EIO
    os.close(fd)


def hole(fd: int, page: int) -> bool:
    try:
        return os.lseek(fd, page * 4096, os.SEEK_DATA) >= (page + 1) * 4096
    except OSError as exc:
        assert exc.errno == errno.ENXIO
        return True

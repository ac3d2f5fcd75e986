"""Passthrough files: only what is whole and verified is registered, and no byte of it changes ever after.

A mapping stands for the kernel: like it, it sees every change of the file, and outlives its name.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachefs.base.errors import NoRoom
from cachefs.base.names import ObjectId
from cachefs.store import Backing, backing, catalog, scrub, store
from cachefs.store.ram import remove_ram
from cachefs.store.tier import RAM, SSD
from tests.conftest import examples
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store.lab import BLOCK, EXTENT, MIB, Lab, begin_write, cache_files, flip_bit, running, until

SIZES = [1, 4097, BLOCK, BLOCK + 1, 3 * BLOCK - 1, EXTENT + 5, 2 * EXTENT]


class Backend:
    """Stands in for the backend: registers backing files, maps them, and checks what it is told."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.ids = count(1)
        self.all: list[Backing] = []
        self.retired: list[Backing] = []
        self.maps: list[tuple[mmap.mmap, bytes]] = []
        lab.store.backing_files.on_retired = self.on_retired

    def on_retired(self, passthrough: Backing) -> None:
        assert passthrough.users == 0
        assert passthrough not in self.retired
        assert passthrough.tier.file_path(passthrough.object.id.digest).exists(), (
            "it is retired before its file goes"
        )
        self.retired.append(passthrough)

    def open_backing(self, object_id: ObjectId, data: bytes | None = None) -> Backing | None:
        passthrough = self.lab.store.open_backing(self.lab.store.object(object_id))
        if passthrough is not None and not passthrough.id:
            assert passthrough not in self.all
            self.all.append(passthrough)
            if data is not None:
                mapping = mmap.mmap(passthrough.fd, 0, prot=mmap.PROT_READ)
                assert len(mapping) == len(data)
                self.maps.append((mapping, data))
            passthrough.registered(next(self.ids))
        return passthrough

    def check(self) -> None:
        assert all(bytes(mapping) == data for mapping, data in self.maps)


def spread(lab: Lab, object_id: ObjectId, tier: int) -> list[int]:
    """Bitmaps of the version's extents on a tier."""
    extents = range(-(-object_id.size // EXTENT))
    copies = [lab.store.catalog.copy(lab.store.object(object_id), tier, e) for e in extents]
    return [copy.bitmap if copy else 0 for copy in copies]


async def cache_object(lab: Lab, object_id: ObjectId, offset: int = 0, size: int | None = None) -> None:
    """Read, and wait until what brought it has put everything away."""
    await lab.read(object_id, offset, size)
    await lab.quiet()


def drop(lab: Lab, object_id: ObjectId, tier: int, extent: int, bits: int) -> None:
    obj = lab.store.object(object_id)
    copy = lab.store.catalog.copy(obj, tier, extent)
    assert copy is not None
    lab.store.space.drop(obj, copy, bits)


async def split(lab: Lab, object_id: ObjectId) -> None:
    """Of a version that RAM has: the first two blocks stay there, the others go to SSD."""
    obj, store = lab.store.object(object_id), lab.store
    for copy in store.catalog.copies(obj, RAM):
        assert store._moves is not None
        assert await store._moves.move(obj, copy, store.tiers[1], evict=True)
        drop(lab, object_id, RAM, copy.extent, ~0b11)
        drop(lab, object_id, SSD, copy.extent, 0b11)


def kill(lab: Lab) -> None:
    """What the index has not been told is lost; every file stays as it is."""
    lab.closed = True
    lab.store.catalog._index._db.close(clean=False)
    for obj in lab.store.catalog._objects.values():
        obj.close_files()


@contextmanager
def no_files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "stat", "lstat", "fstat", "fchmod", "close"):
            patch.setattr(os, name, None)
        yield


# -- what is registered --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ram", [0, 8 * MIB])
@in_trio
async def test_what_was_read_whole_is_passthrough_immutable_and_has_its_bytes(
    cache_dir: Path, ram: int, size: int
) -> None:
    async with running(cache_dir, ram=ram) as lab:
        data = content(1, size)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        passthrough = lab.store.open_backing(lab.store.object(object_id))
        assert (
            passthrough is not None
            and passthrough.tier is lab.store.tiers[0]
            and (passthrough.id, passthrough.users) == (0, 1)
        )
        assert os.pread(passthrough.fd, size + 1, 0) == data
        with pytest.raises(OSError):
            os.write(passthrough.fd, b"x")
        assert stat.S_IMODE(passthrough.tier.file_path(object_id.digest).stat().st_mode) == 0o400
        before = passthrough.fd
        passthrough.registered(7)
        assert (passthrough.fd, passthrough.id) == (-1, 7)
        with pytest.raises(OSError):
            os.fstat(before)
        assert await lab.read(object_id) == data
        lab.store.release_backing(passthrough)
        lab.check_accounts()


@pytest.mark.parametrize(
    "why", ["nothing", "partial", "empty", "longer", "shorter", "gone", "refused", "full", "no tiers"]
)
@in_trio
async def test_what_is_not_whole_is_not_passthrough(cache_dir: Path, why: str) -> None:
    verify = "full" if why == "full" else "first"
    async with running(cache_dir, ssd=0 if why == "no tiers" else 64 * MIB, verify=verify) as lab:
        object_id = lab.origin.put("k", content(1, 0 if why == "empty" else 2 * EXTENT + 5))
        if why != "nothing":
            await cache_object(lab, object_id)
        await lab.quiet()
        if why == "partial":
            drop(lab, object_id, SSD, 1, 1 << 7)
        if why in ("longer", "shorter"):
            os.truncate(cache_files(cache_dir)[0], object_id.size + (1 if why == "longer" else -1))
        if why == "gone":
            os.unlink(cache_files(cache_dir)[0])
        if why == "refused":
            lab.store.refuse(lab.store.tiers[0], "it says so")
        assert lab.store.passthrough == (why not in ("full", "no tiers", "refused"))
        before = len(os.listdir("/proc/self/fd"))
        assert lab.store.open_backing(lab.store.object(object_id)) is None
        assert len(os.listdir("/proc/self/fd")) == before
        for path in cache_files(cache_dir):
            assert path.stat().st_mode & 0o200, "what is not registered is not immutable"


@in_trio
async def test_blocks_still_arriving_are_waited_for(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data = content(1, 4 * BLOCK)
        object_id = lab.origin.put("k", data)
        obj = lab.store.object(object_id)
        hold = lab.origin.hold("k", 3 * BLOCK + 10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lab.read, object_id)
            await hold.reached.wait()
            assert lab.store.open_backing(obj) is None
            hold.release.set()
        await lab.quiet()
        assert lab.store.open_backing(obj) is not None


@pytest.mark.parametrize("verify, stop, at_once", [("first", "clean", False), ("none", "clean", True)])
@in_trio
async def test_after_a_restart_only_what_is_trusted_or_read_again_is_passthrough(
    cache_dir: Path, verify: str, stop: str, at_once: bool
) -> None:
    origin = ScriptedOrigin()
    object_id = origin.put("k", content(1, EXTENT + 5))
    async with running(cache_dir, origin, verify=verify) as lab:
        await cache_object(lab, object_id)
        assert Backend(lab).open_backing(object_id)
    async with running(cache_dir, origin, verify=verify) as lab:
        backend = Backend(lab)
        assert bool(backend.open_backing(object_id)) == at_once
        await cache_object(lab, object_id, 0, EXTENT)
        assert bool(backend.open_backing(object_id)) == at_once
        await cache_object(lab, object_id)
        assert backend.open_backing(object_id)


@in_trio
async def test_halves_on_two_tiers_are_not_a_whole(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        object_id = lab.origin.put("k", content(1, 6 * BLOCK))
        await cache_object(lab, object_id)
        await split(lab, object_id)
        assert lab.store.open_backing(lab.store.object(object_id)) is None
        assert [spread(lab, object_id, t) for t in (RAM, SSD)] == [[0b11], [0b111100]]


@in_trio
async def test_a_refused_tier_leaves_the_other(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        object_id = lab.origin.put("k", content(1, 6 * BLOCK))
        await cache_object(lab, object_id)
        retired: list[Backing] = []
        lab.store.backing_files.on_retired = retired.append
        obj = lab.store.object(object_id)
        passthrough = lab.store.open_backing(obj)
        assert passthrough is not None
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            lab.store.refuse(passthrough.tier, "stacked too deep")
        lab.store.release_backing(passthrough)
        assert retired == [passthrough] and passthrough.fd == -1
        assert len(os.listdir("/proc/self/fd")) < before
        assert len([r for r in caplog.records if "stacked too deep" in r.message]) == 1
        assert lab.store.passthrough and lab.store.open_backing(obj) is None
        for copy in lab.store.catalog.copies(obj, RAM):
            assert lab.store._moves is not None
            assert await lab.store._moves.move(obj, copy, lab.store.tiers[1], evict=True)
        again = lab.store.open_backing(obj)
        assert again is not None and again.tier.number == SSD


@in_trio
async def test_a_file_that_took_the_place_of_the_one_in_use_is_not_given_to_the_kernel(
    cache_dir: Path,
) -> None:
    """It has the size of the version, and other bytes."""
    async with running(cache_dir) as lab:
        lab.closes_files = False
        data = content(1, 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        obj, (tier,) = lab.store.object(object_id), lab.store.tiers
        file = tier.file_path(object_id.digest)
        with obj.held():
            obj.file(tier)
            file.unlink()
            file.write_bytes(bytes(len(data)))
            file.chmod(0o600)
            assert lab.store.open_backing(obj) is None
            await lab.store.make_immutable(obj)
            assert file.stat().st_mode & 0o777 == 0o600, "it is left as it is"
            assert await lab.store.read(obj, 0, len(data)) == data
        lab.store.evict(obj)


# -- sharing -------------------------------------------------------------------------------------------


@in_trio
async def test_one_backing_for_all_users_and_no_system_call_for_the_next(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        backend = Backend(lab)
        object_id = lab.origin.put("k", content(1, EXTENT + 5))
        await cache_object(lab, object_id)
        first = backend.open_backing(object_id)
        assert first is not None
        with no_files():
            assert backend.open_backing(object_id) is first
            lab.store.reopen_backing(first)
            assert first.users == 3
            for _ in range(3):
                lab.store.release_backing(first)
            assert backend.retired == []
            assert backend.open_backing(object_id) is first and first.users == 1
            lab.store.release_backing(first)
        await lab.aclose()
        assert backend.retired == [first]


@in_trio
async def test_the_longest_idle_are_retired(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "IDLE_BACKINGS", 3)
    async with running(cache_dir) as lab:
        backend = Backend(lab)
        ids = [lab.origin.put(f"k{i}", content(i, 10)) for i in range(6)]
        for i in ids:
            await cache_object(lab, i)
            passthrough = backend.open_backing(i)
            assert passthrough is not None
            lab.store.release_backing(passthrough)
            if i is ids[2]:
                again = backend.open_backing(ids[0])
                assert again is not None
                lab.store.release_backing(again)
        assert backend.retired == [backend.all[i] for i in (1, 2, 0)]
        assert await lab.read(ids[1]) == content(1, 10)


@in_trio
async def test_a_version_forgotten_by_the_catalog_is_retired_unless_it_is_passthrough(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "OBJECTS_IN_MEMORY", 16)
    async with running(cache_dir) as lab:
        backend = Backend(lab)
        ids = [lab.origin.put(f"k{i}", content(i, 10)) for i in range(64)]
        for i in ids[:2]:
            await cache_object(lab, i)
        idle, living = backend.open_backing(ids[0]), backend.open_backing(ids[1])
        assert idle and living
        lab.store.release_backing(idle)
        for i in ids[2:]:
            await cache_object(lab, i)
            await lab.store.flush()
        assert backend.retired == [idle]
        assert backend.open_backing(ids[1]) is living and living.users == 2


@in_trio
async def test_descriptors_are_given_back(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        ids = [lab.origin.put(f"k{i}", content(i, 10)) for i in range(20)]
        before = len(os.listdir("/proc/self/fd"))
        passthrough = []
        for i in ids:
            opened = lab.fetcher.open(lab.origin, i)  # type: ignore[arg-type]
            await lab.read_open(opened, 0, 10)
            await lab.quiet()
            one = lab.store.open_backing(lab.store.object(i))
            assert one is not None
            passthrough.append(one)
            lab.fetcher.close(opened)
        for n, one in enumerate(passthrough):
            if n % 2:
                one.registered(n)
            lab.store.release_backing(one)
        assert len(os.listdir("/proc/self/fd")) == before


# -- leaving -------------------------------------------------------------------------------------------


@in_trio
async def test_eviction_takes_an_idle_file_whole_and_none_of_its_bytes_change(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=5 * EXTENT) as lab:
        backend = Backend(lab)
        data = content("big", 2 * EXTENT + 100)
        big = lab.origin.put("big", data)
        await cache_object(lab, big)
        passthrough = backend.open_backing(big, data)
        assert passthrough is not None
        lab.store.release_backing(passthrough)
        await lab.store.flush()
        for i in range(3):
            await cache_object(lab, lab.origin.put(f"k{i}", content(i, EXTENT)))
            backend.check()
            lab.check_accounts()
        assert lab.store.cached_bytes(big) == 0
        assert backend.retired == [passthrough]
        assert lab.metrics.evicted_blocks == 33
        assert await lab.read(big) == data
        backend.check()
        fresh = lab.store.tiers[0].file_path(big.digest)
        assert fresh.stat().st_mode & 0o200, "a new file, not immutable"


@pytest.mark.parametrize("pinned_by", ["users", "a reading thread"])
@in_trio
async def test_eviction_goes_round_a_file_in_use(cache_dir: Path, pinned_by: str) -> None:
    async with running(cache_dir, ssd=5 * EXTENT) as lab:
        backend = Backend(lab)
        data = content("big", 2 * EXTENT)
        big = lab.origin.put("big", data)
        await cache_object(lab, big)
        passthrough = backend.open_backing(big, data)
        assert passthrough is not None
        if pinned_by == "a reading thread":
            lab.store.release_backing(passthrough)
            passthrough.copies[1].pins += 1
        for i in range(8):
            await lab.store.flush()
            await cache_object(lab, lab.origin.put(f"k{i}", content(i, EXTENT)))
        assert lab.store.cached_bytes(big) == len(data)
        assert lab.metrics.evicted_blocks == 5 * 16
        lab.check_accounts()
        backend.check()
        if pinned_by == "a reading thread":
            passthrough.copies[1].pins -= 1


@pytest.mark.parametrize("size", [1, 3 * BLOCK - 1, EXTENT + 5])
@in_trio
async def test_a_file_in_use_is_taken_out_with_its_users_and_the_cache_forgets_it(
    cache_dir: Path, tmp_path: Path, size: int
) -> None:
    async with running(cache_dir) as lab:
        backend, store = Backend(lab), lab.store
        data = content(1, size)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        passthrough = backend.open_backing(object_id)
        assert passthrough is not None
        store.reopen_backing(passthrough)
        there, path = passthrough.tier.file_path(object_id.digest), cache_dir / "taken"
        assert store.take_out(passthrough, 1, path) is None, "another has it open"
        with store.space.pinned(passthrough.object, *passthrough.copies):
            assert store.take_out(passthrough, 2, path) is None, "it is being read"
        assert there.exists() and not path.exists()
        fd = store.take_out(passthrough, 2, path)
        assert fd is not None
        mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        os.close(fd)
        path.write_bytes(b"x" * size)
        assert mapping[:] == b"x" * size, "it is the same file"
        mapping.close()
        await trio.to_thread.run_sync(passthrough.tier.disposal.wait_for, object_id.digest)
        assert not there.exists() and backend.retired == []
        assert store.cached_bytes(object_id) == lab.used() == passthrough.tier.registered == 0
        lab.check_accounts()
        assert await lab.read(object_id) == data, "from the origin"
        await lab.quiet()
        lab.check_accounts()
        again = backend.open_backing(object_id, data)
        assert again is not None and again is not passthrough
        backend.check()


@in_trio
async def test_a_file_in_memory_is_not_taken_out_nor_opened_where_it_may_have_to_be(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        backend, store = Backend(lab), lab.store
        object_id = lab.origin.put("k", content(1, BLOCK))
        await cache_object(lab, object_id)
        assert store.open_backing(store.object(object_id), on_disk=True) is None
        passthrough = backend.open_backing(object_id)
        assert passthrough is not None and passthrough.tier is store.tiers[0]
        assert store.open_backing(store.object(object_id), on_disk=True) is None
        assert passthrough.users == 1
        assert store.take_out(passthrough, 1, cache_dir / "taken") is None
        store.release_backing(passthrough)
        lab.check_accounts()


@pytest.mark.parametrize("ram", [0, 8 * MIB])
@in_trio
async def test_a_bad_block_of_a_file_in_use_lets_it_go_with_its_last_user(cache_dir: Path, ram: int) -> None:
    async with running(cache_dir, ram=ram) as lab:
        backend, store = Backend(lab), lab.store
        data = content(1, EXTENT + 5)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        passthrough = backend.open_backing(object_id, data)
        assert passthrough is not None
        used = lab.used()
        store.space.corrupt(passthrough.object, passthrough.copies[0], 0b100)
        assert store.cached_bytes(object_id) == 0
        assert lab.used() == used, "the bytes are still there"
        lab.check_accounts()
        assert lab.metrics.checksum_failures == 1
        await store.flush()
        assert store.open_backing(passthrough.object) is None
        store.reopen_backing(passthrough)
        assert await lab.read(object_id) == data, "from elsewhere: the other tier, or the heap"
        await lab.quiet()
        if ram:
            assert store.open_backing(passthrough.object) is None, "one living backing for a version"
        else:
            assert lab.metrics.bypassed_blocks
        backend.check()
        store.release_backing(passthrough)
        assert backend.retired == [] and passthrough.tier.file_path(object_id.digest).exists()
        store.release_backing(passthrough)
        assert backend.retired == [passthrough] and not passthrough.tier.file_path(object_id.digest).exists()
        lab.check_accounts()
        assert passthrough.tier.used_bytes == passthrough.tier.unlisted_bytes == passthrough.tier.blocks == 0
        assert await lab.read(object_id) == data
        await lab.quiet()
        backend.check()
        lab.check_accounts()


@in_trio
async def test_a_block_that_comes_after_the_file_has_gone_lies_in_the_next_file(cache_dir: Path) -> None:
    """Memory takes what a reader waits for while the old file leaves. What arrives later would be missing in the new one."""
    async with running(cache_dir, ram=0) as lab:
        backend, store = Backend(lab), lab.store
        data = content(1, 3 * BLOCK)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        passthrough = backend.open_backing(object_id, data)
        assert passthrough is not None
        obj = passthrough.object
        store.space.corrupt(obj, passthrough.copies[0], 0b100)
        early, late = store.begin_bypass(obj, 0), store.begin_bypass(obj, 1)
        early.write(data[:BLOCK])
        store.end_write(obj, early)
        assert store.has(obj, 0), "read from memory while the file leaves"
        store.release_backing(passthrough)
        assert not store.has(obj, 0)
        late.write(data[BLOCK : 2 * BLOCK])
        store.end_write(obj, late)
        assert not store.has(obj, 1)
        passing = store.begin_bypass(obj, 2)
        passing.write(data[2 * BLOCK :])
        store.end_write(obj, passing)
        assert store.has(obj, 2), "where only the disk has no room, memory keeps it"


@in_trio
async def test_moves_do_not_write_into_a_file_that_is_leaving(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        backend, store = Backend(lab), lab.store
        data = content(1, 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        obj = store.object(object_id)
        (copy,) = store.catalog.copies(obj, RAM)
        assert store._moves is not None
        assert await store._moves.move(obj, copy, store.tiers[1], evict=True)
        drop(lab, object_id, RAM, 0, 0b11)
        passthrough = backend.open_backing(object_id, data)
        assert passthrough is not None and passthrough.tier.number == SSD
        drop(lab, object_id, SSD, 0, 0b01)
        assert await lab.read(object_id) == data
        (copy,) = store.catalog.copies(obj, RAM)
        assert not await store._moves.move(obj, copy, store.tiers[1], evict=True)
        store.release_backing(passthrough)
        assert await store._moves.move(obj, copy, store.tiers[1], evict=True)
        backend.check()
        lab.check_accounts()


@pytest.mark.parametrize("how", ["spill", "stop"])
@in_trio
async def test_an_immutable_file_leaves_ram_with_all_its_extents(cache_dir: Path, how: str) -> None:
    origin = ScriptedOrigin()
    data = content(1, 2 * EXTENT + 5)
    object_id = origin.put("k", data)
    async with running(cache_dir, origin, ram=3 * EXTENT) as lab:
        backend = Backend(lab)
        await cache_object(lab, object_id)
        passthrough = backend.open_backing(object_id, data)
        assert passthrough is not None and passthrough.tier.number == RAM
        lab.store.release_backing(passthrough)
        if how == "spill":
            await lab.store.flush()
            assert lab.store._moves is not None
            lab.store.tiers[0].cap_bytes = EXTENT
            await lab.store._moves._spill()
            assert spread(lab, object_id, RAM) == [0, 0, 0]
            assert lab.metrics.spilled_blocks == 33
            assert backend.retired == [passthrough]
            lab.store.tiers[0].cap_bytes = 3 * EXTENT
        backend.check()
        lab.check_accounts()
    backend.check()
    fetched = origin.delivered
    async with running(cache_dir, origin, ram=0) as lab:
        assert await lab.read(object_id) == data
    assert origin.delivered == fetched
    backend.check()


@in_trio
async def test_passthrough_while_it_is_spilled(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two extents is being copied to SSD: what is registered and released just then leaves with both or not."""
    async with running(cache_dir, ram=3 * EXTENT) as lab:
        backend, store = Backend(lab), lab.store
        data = content(1, 2 * EXTENT)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        assert store._moves is not None
        real = store._moves.move

        async def move(*args: Any, **kwargs: Any) -> bool:
            done = await real(*args, **kwargs)
            passthrough = backend.open_backing(object_id, data)
            if passthrough is not None:
                store.release_backing(passthrough)
            return done

        monkeypatch.setattr(store._moves, "move", move)
        store.tiers[0].cap_bytes = EXTENT
        await store._moves._spill()
        assert store.cached_bytes(object_id) == len(data)
        backend.check()
        lab.check_accounts()


@in_trio
async def test_a_stop_with_users_leaves_no_file_without_rows(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    data = content(1, 2 * BLOCK)
    object_id = origin.put("k", data)
    async with running(cache_dir, origin) as lab:
        backend = Backend(lab)
        await cache_object(lab, object_id)
        passthrough = backend.open_backing(object_id, data)
        assert passthrough is not None
        lab.store.space.corrupt(passthrough.object, passthrough.copies[0], 1)
        await lab.aclose()
        assert cache_files(cache_dir) == []
        lab.store.backing_files.on_retired = backend.retired.append
        lab.store.release_backing(passthrough)
        assert backend.retired == [passthrough]
        backend.check()


# -- restarts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", ["all", "one extent", "nothing"])
@pytest.mark.parametrize("then", ["scrub", "read", "evict"])
@pytest.mark.parametrize("ram", [0, pytest.param(8 * EXTENT, marks=pytest.mark.long)])
@in_trio
async def test_a_mapping_that_outlives_a_kill_keeps_its_bytes(
    cache_dir: Path, known: str, then: str, ram: int
) -> None:
    origin = ScriptedOrigin()
    data = content("k", 5 * EXTENT)  # larger than what comes whole
    object_id = origin.put("k", data)
    async with running(cache_dir, origin, ssd=8 * EXTENT, ram=ram) as lab:
        backend = Backend(lab)
        if known != "nothing":
            await cache_object(lab, object_id, 0, EXTENT)
            if known == "one extent":
                await lab.store.flush()
        await cache_object(lab, object_id)
        if known == "all":
            await lab.store.flush()
        assert backend.open_backing(object_id, data)
        kill(lab)
    async with running(cache_dir, origin, ssd=8 * EXTENT, ram=ram) as lab:
        fetched = origin.delivered
        if then == "scrub":
            await scrub(lab.store)
            backend.check()
            lab.check_accounts()
            assert lab.store.cached_bytes(object_id) == (len(data) if known == "all" else 0)
        if then == "evict":
            for i in range(12):
                await cache_object(lab, origin.put(f"k{i}", content(i, 12 * BLOCK)))
                backend.check()
            assert lab.store.cached_bytes(object_id) == 0 or ram
        else:
            assert await lab.read(object_id) == data
            await lab.quiet()
            assert (origin.delivered == fetched) == (known == "all")
        backend.check()
        await scrub(lab.store)
        lab.check_accounts()
        backend.check()


@in_trio
async def test_what_a_crash_left_of_an_immutable_file_is_not_completed_while_it_is_read(
    cache_dir: Path,
) -> None:
    origin = ScriptedOrigin()
    data = content("k", 5 * EXTENT)
    object_id = origin.put("k", data)
    async with running(cache_dir, origin) as lab:
        backend = Backend(lab)
        await cache_object(lab, object_id, 0, EXTENT)
        await lab.store.flush()
        await cache_object(lab, object_id)
        assert backend.open_backing(object_id, data)
        kill(lab)
    async with running(cache_dir, origin) as lab:
        obj = lab.store.object(object_id)
        copy = lab.store.catalog.copy(obj, SSD, 0)
        assert copy is not None and copy.bitmap == 0xFFFF
        copy.pins += 1
        fill_ = begin_write(lab.store, obj, 16, 20)
        assert fill_ is not None
        with pytest.raises(NoRoom):
            fill_.write(data[:10])
        lab.store.end_write(obj, fill_)
        assert copy.bitmap == 0 and lab.used() == EXTENT + 4 * BLOCK  # until it is in use no more
        lab.store.space.unpin(obj, copy)
        assert lab.used() == 0 and cache_files(cache_dir) == []
        assert await lab.read(object_id) == data
        await lab.quiet()
        lab.check_accounts()
        backend.check()


@in_trio
async def test_whoever_may_not_write_sealed_files_can_read_them(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = ScriptedOrigin()
    data = content(1, 3 * BLOCK)
    object_id = origin.put("k", data)
    async with running(cache_dir, origin) as lab:
        await cache_object(lab, object_id)
        backend = Backend(lab)
        assert backend.open_backing(object_id, data)
    real = os.open

    def as_a_user(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        known = "/objects/" in str(path) and os.path.exists(path)
        if flags & os.O_RDWR and known and not os.stat(path).st_mode & 0o200:
            raise PermissionError(errno.EACCES, "immutable")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", as_a_user)
    fetched = origin.delivered
    async with running(cache_dir, origin) as lab:
        assert await lab.read(object_id) == data
        assert origin.delivered == fetched
        drop(lab, object_id, SSD, 0, 0b10)
        assert lab.store.cached_bytes(object_id) == 0
        assert await lab.read(object_id) == data
        assert lab.metrics.tier_errors == 0
        await lab.quiet()
        lab.check_accounts()
        backend.check()


# -- recency -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used_by", ["registering", "releasing", "nothing"])
@in_trio
async def test_passthrough_and_giving_back_count_as_use(cache_dir: Path, used_by: str) -> None:
    async with running(cache_dir, ssd=4 * EXTENT) as lab:
        backend = Backend(lab)
        ids = [lab.origin.put(f"k{i}", content(i, 2 * EXTENT)) for i in range(3)]
        await cache_object(lab, ids[0])
        passthrough = backend.open_backing(ids[0])
        assert passthrough is not None
        if used_by != "releasing":
            lab.store.release_backing(passthrough)
        await lab.store.flush()
        await cache_object(lab, ids[1])
        await lab.store.flush()
        if used_by == "registering":
            assert backend.open_backing(ids[0]) is passthrough
        if used_by == "releasing":
            lab.store.release_backing(passthrough)
        elif used_by == "registering":
            # Only the registration's touch is seen: with users it could not be evicted at all.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lab.store.eviction, "touch_if_separate", lambda copy: False)
                lab.store.release_backing(passthrough)
        await lab.store.flush()
        await cache_object(lab, ids[2])
        kept = [bool(lab.store.cached_bytes(i)) for i in ids]
        assert kept == ([False, True, True] if used_by == "nothing" else [True, False, True])


@in_trio
async def test_passthrough_touches_a_row_once_per_flush(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        backend = Backend(lab)
        object_id = lab.origin.put("k", content(1, 2 * EXTENT))
        await cache_object(lab, object_id)
        await lab.store.flush()
        clock = lab.store.catalog.clock
        for _ in range(10):
            passthrough = backend.open_backing(object_id)
            assert passthrough is not None
            lab.store.release_backing(passthrough)
        assert lab.store.catalog.clock == clock + 2


@in_trio
async def test_a_file_that_is_opened_again_from_its_backing_is_used_once_per_flush(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        backend, catalog = Backend(lab), lab.store.catalog
        object_id = lab.origin.put("k", content(1, 2 * EXTENT))
        await cache_object(lab, object_id)
        passthrough = backend.open_backing(object_id)
        assert passthrough is not None and not passthrough.reuse(), "it is in use"
        lab.store.release_backing(passthrough)
        told: list[int] = []
        lab.store.eviction.used = lambda obj, copy, hit: told.append(copy.extent)  # type: ignore[method-assign]
        for _ in range(2):
            await lab.store.flush()
            clock, counted = catalog.clock, lab.metrics.passthrough_blocks
            for turn in range(3):
                assert passthrough.reuse() and not passthrough.reuse() and passthrough.users == 1
                assert [copy.pins for copy in passthrough.copies] == [1, 1]
                lab.store.release_backing(passthrough)
                assert [copy.pins for copy in passthrough.copies] == [0, 0]
                assert lab.metrics.passthrough_blocks == counted + (turn + 1) * passthrough.blocks
            assert catalog.clock == clock + 2 and told == [0, 1]
            told.clear()
        lab.check_accounts()
        passthrough.tier.disk.down = True
        assert not passthrough.reuse()
        passthrough.tier.disk.down = False
        lab.store.pins.evict(passthrough.object)
        assert backend.retired == [passthrough] and not passthrough.reuse()
        lab.check_accounts()


# -- known to be whole, without passthrough ------------------------------------------------------------


@pytest.mark.parametrize("change", ["nothing", "evicted", "forgotten by the catalog", "moved"])
@in_trio
async def test_what_is_whole_in_memory_only_stays_so_until_it_changes(
    cache_dir: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "OBJECTS_IN_MEMORY", 16)
    async with running(cache_dir, ram=16 * MIB) as lab:
        object_id = lab.origin.put("k", content(1, 6 * BLOCK))
        assert lab.store.reusable(object_id, passthrough=True, on_disk=True) is None, "it is not here"
        await cache_object(lab, object_id)
        drop(lab, object_id, RAM, 0, 0b1)
        assert lab.store.reusable(object_id, passthrough=True, on_disk=True) is None, "it is not whole"
        await cache_object(lab, object_id)
        assert lab.store.reusable(object_id, passthrough=True, on_disk=False) is None, "passthrough takes it"
        settled = lab.store.reusable(object_id, passthrough=True, on_disk=True)
        assert settled is not None and settled.reuse()
        if change == "evicted":
            drop(lab, object_id, RAM, 0, 0b1)
        elif change == "forgotten by the catalog":
            for number in range(64):
                await cache_object(lab, lab.origin.put(f"other{number}", content(number, 10)))
                await lab.store.flush()
        elif change == "moved":
            await split(lab, object_id)
        assert settled.reuse() is (change == "nothing")


@in_trio
async def test_without_passthrough_what_is_whole_on_any_tier_is_settled(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, 6 * BLOCK))
        await cache_object(lab, object_id)
        assert lab.store.reusable(object_id, passthrough=True, on_disk=True) is None
        settled = lab.store.reusable(object_id, passthrough=False, on_disk=True)
        assert settled is not None and settled.reuse()
        lab.store.refuse(lab.store.tiers[0], "the kernel does not take it")
        assert lab.store.reusable(object_id, passthrough=True, on_disk=True) is not None


@in_trio
async def test_what_lies_where_passthrough_could_serve_it_is_not_settled(cache_dir: Path) -> None:
    """It may be whole or verified there in a moment, and is opened in passthrough then."""
    async with running(cache_dir, ram=16 * MIB) as lab:
        object_id = lab.origin.put("k", content(1, 6 * BLOCK))
        await cache_object(lab, object_id)
        await split(lab, object_id)
        await cache_object(lab, object_id)
        assert lab.store.reusable(object_id, passthrough=True, on_disk=True) is None


# -- making ready --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [6 * BLOCK, EXTENT + 5 * BLOCK + 7])
@in_trio
async def test_what_lies_in_two_tiers_is_gathered(cache_dir: Path, size: int) -> None:
    async with running(cache_dir, ram=8 * MIB, background=True) as lab:
        backend = Backend(lab)
        data = content(1, size)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        await split(lab, object_id)
        fetched = lab.origin.delivered
        lab.store.prepare_later(lab.store.object(object_id))
        await until(lambda: lab.metrics.prepared_versions == 1)
        assert lab.metrics.prepared_versions == 1
        passthrough = backend.open_backing(object_id, data)
        assert passthrough is not None and passthrough.tier.number == SSD
        assert set(spread(lab, object_id, RAM)) == {0}
        assert lab.origin.delivered == fetched
        backend.check()
        lab.check_accounts()


@in_trio
async def test_gathering_does_not_make_its_room_from_what_it_gathers(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=16 * BLOCK, ram=8 * MIB, background=True) as lab:
        backend = Backend(lab)
        data = content(1, 12 * BLOCK)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        await split(lab, object_id)
        other = lab.origin.put("o", content(2, 6 * BLOCK))
        obj = lab.store.object(other)
        await cache_object(lab, other)
        assert lab.store._moves is not None
        (copy,) = lab.store.catalog.copies(obj, RAM)
        assert await lab.store._moves.move(obj, copy, lab.store.tiers[1], evict=False)
        await lab.store.flush()  # the other is the youngest, and has to go all the same
        lab.store.prepare_later(lab.store.object(object_id))
        await until(lambda: lab.metrics.prepared_versions == 1)
        assert lab.metrics.prepared_versions == 1
        assert backend.open_backing(object_id, data)
        assert spread(lab, other, SSD) == [0]
        backend.check()
        lab.check_accounts()


@pytest.mark.parametrize("bad", [False, True])
@in_trio
async def test_what_nobody_has_read_since_the_start_is_verified(cache_dir: Path, bad: bool) -> None:
    origin = ScriptedOrigin()
    data = content(1, EXTENT + 5 * BLOCK + 7)
    object_id = origin.put("k", data)
    async with running(cache_dir, origin) as lab:
        await cache_object(lab, object_id)
    if bad:
        flip_bit(cache_files(cache_dir)[0], random.Random(1), offset=EXTENT + BLOCK + 1)
    async with running(cache_dir, origin, background=True) as lab:
        backend, obj = Backend(lab), lab.store.object(object_id)
        lab.store.prepare_later(obj)
        await until(lambda: bool(lab.metrics.prepared_versions or lab.metrics.checksum_failures))
        assert (lab.metrics.prepared_versions, lab.metrics.checksum_failures) == (not bad, bad)
        assert bool(backend.open_backing(object_id, data)) is not bad
        assert spread(lab, object_id, SSD) == [0xFFFF, 0b111101 if bad else 0b111111]
        assert await lab.read(object_id) == data
        await lab.quiet()
        lab.check_accounts()
        assert backend.open_backing(object_id, data)
        backend.check()
        assert origin.delivered == len(data) + (BLOCK if bad else 0)


@in_trio
async def test_a_block_that_is_dropped_while_it_is_verified_is_not_verified(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = ScriptedOrigin()
    object_id = origin.put("k", content(1, 3 * BLOCK))
    async with running(cache_dir, origin) as lab:
        await cache_object(lab, object_id)
    async with running(cache_dir, origin) as lab:
        obj, real = lab.store.object(object_id), store._take_steps
        token = trio.lowlevel.current_trio_token()

        def take_and_drop(steps: list[store.Step], *args: Any) -> Any:
            found = real(steps, *args)
            if steps[0].block == 1:
                trio.from_thread.run_sync(drop, lab, object_id, SSD, 0, 0b10, trio_token=token)
            return found

        monkeypatch.setattr(store, "_take_steps", take_and_drop)
        assert not await lab.store.backing_files._prepare(obj)
        (copy,) = lab.store.catalog.copies(obj, SSD)
        assert (copy.bitmap, copy.verified) == (0b101, 0b101)
        obj.close_if_unused()


@in_trio
async def test_what_is_not_whole_is_left_alone_and_trouble_does_not_end_the_work(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = ScriptedOrigin()
    partial, vanished, odd, good = (origin.put(n, content(n, 4 * BLOCK)) for n in "abcd")
    async with running(cache_dir, origin) as lab:
        for object_id in (partial, vanished, odd, good):
            await cache_object(lab, object_id)
        drop(lab, partial, SSD, 0, 0b1)
        os.unlink(lab.store.tiers[0].file_path(vanished.digest))
    fetched = origin.delivered
    async with running(cache_dir, origin, background=True) as lab:
        real = lab.store.backing_files._prepare

        async def prepare(obj: Any) -> bool:
            if obj.id is odd:
                raise RuntimeError("unforeseen")
            return await real(obj)

        monkeypatch.setattr(lab.store.backing_files, "_prepare", prepare)
        for object_id in (partial, vanished, odd, good):
            for _ in range(3):
                lab.store.prepare_later(lab.store.object(object_id))
        assert len(lab.store.backing_files._queue) == 4
        await until(lambda: lab.metrics.prepared_versions == 1)
        assert lab.metrics.prepared_versions == 1
        backend = Backend(lab)
        passthrough = [bool(backend.open_backing(i)) for i in (partial, vanished, odd, good)]
        assert passthrough == [False, False, False, True]
        assert lab.store.cached_bytes(partial) == 3 * BLOCK
        assert lab.store.cached_bytes(vanished) == 0
    assert origin.delivered == fetched


@in_trio
async def test_the_queue_is_bounded_and_the_oldest_is_dropped(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        ids = [lab.origin.put(f"k{i}", b"x") for i in range(backing.TO_PREPARE + 5)]
        for i in ids:
            lab.store.prepare_later(lab.store.object(i))
        assert list(lab.store.backing_files._queue) == [i.digest for i in ids[5:]]
    async with running(cache_dir, verify="full") as lab:
        lab.store.prepare_later(lab.store.object(ids[0]))
        assert not lab.store.backing_files._queue


# -- everything at once --------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            # Twice what the others only work on.
            [
                *["read", "register", "release"] * 2,
                "drop",
                "spill",
                "prepare",
                "split",
                "adopt",
                "flush",
                "stop",
                "kill",
                "damage",
            ]
        ),
        st.integers(0, 11),
    ),
    min_size=5,
    max_size=60,
)


@settings(
    max_examples=int(os.environ.get("CACHEFS_EXAMPLES", examples(40))),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(OPERATIONS)
def test_through_everything_passthrough_bytes_stay_and_accounts_are_exact(
    operations: list[tuple[str, int]],
) -> None:
    place = Path(tempfile.mkdtemp(prefix="passthrough-"))
    try:
        everything(place / "cache", operations)
    finally:
        remove_ram(place / "cache")
        shutil.rmtree(place)


@in_trio
async def everything(cache_dir: Path, operations: list[tuple[str, int]]) -> None:
    origin = ScriptedOrigin()
    sizes = [1, 3 * BLOCK, 5 * BLOCK + 1, EXTENT, EXTENT + 5, 2 * EXTENT + BLOCK]
    data = {i: content(i, sizes[i % len(sizes)]) for i in range(12)}
    ids = {i: origin.put(f"k{i}", d) for i, d in data.items()}
    maps: list[tuple[mmap.mmap, bytes]] = []
    left = list(operations)
    while left:
        async with running(cache_dir, origin, ssd=5 * EXTENT, ram=3 * EXTENT) as lab:
            await scrub(lab.store)
            backend = Backend(lab)
            backend.maps = maps
            end = await life(backend, ids, data, left)
            tiers = [t.path for t in lab.store.tiers]
            if end in ("kill", "damage"):
                kill(lab)
        if end in ("stop", ""):
            assert set(backend.retired) >= {b for b in backend.all if not b.users}
        if end == "damage":
            for path in cache_files(*tiers):
                if path.stat().st_mode & 0o200:
                    flip_bit(path, random.Random(len(left)))
        assert all(bytes(mapping) == d for mapping, d in maps)


async def life(
    backend: Backend, ids: dict[int, ObjectId], data: dict[int, bytes], left: list[tuple[str, int]]
) -> str:
    """Operations until one ends the daemon."""
    lab, store = backend.lab, backend.lab.store
    users: list[Backing] = []
    while left:
        name, i = left.pop(0)
        obj = store.object(ids[i])
        if name in ("stop", "kill", "damage"):
            return name
        if name == "read":
            assert await lab.read(ids[i]) == data[i]
        elif name == "register":
            passthrough = backend.open_backing(ids[i], data[i])
            if passthrough is not None:
                users.append(passthrough)
        elif name == "release" and users:
            store.release_backing(users.pop(i % len(users)))
        elif name == "drop":
            for copy in store.catalog.copies(obj, i % 2)[-1:]:
                store.space.corrupt(obj, copy, 1 << i % 16)
        elif name == "spill":
            store.tiers[0].cap_bytes = EXTENT
            assert store._moves is not None
            await store._moves._spill()
            store.tiers[0].cap_bytes = 3 * EXTENT
        elif name == "split":
            ram = {c.extent: c for c in store.catalog.copies(obj, RAM)}
            for extent, copy in ram.items():
                assert store._moves is not None
                if await store._moves.move(obj, copy, store.tiers[1], evict=True):
                    drop(lab, ids[i], SSD, extent, 0b101)
        elif name == "prepare":
            if await store.backing_files._prepare(obj):
                passthrough = backend.open_backing(ids[i], data[i])
                assert passthrough is not None
                store.release_backing(passthrough)
        elif name == "adopt":
            path = store.tiers[1].path / "written"
            path.write_bytes(data[i])
            if await store.adopt(ids[i], path):
                passthrough = backend.open_backing(ids[i], data[i])
                assert passthrough is not None
                users.append(passthrough)
        elif name == "flush":
            await store.flush()
        await lab.quiet()
        backend.check()
        lab.check_accounts()
        for tier in store.tiers:
            assert tier.unlisted_bytes >= 0
    for passthrough in users:
        store.release_backing(passthrough)
    backend.check()
    lab.check_accounts()
    assert all(t.unlisted_bytes == 0 for t in store.tiers)
    return ""

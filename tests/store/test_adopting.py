"""Files that were written here become cached versions as they are: in passthrough at once, accounted for, never wrong."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.base.names import ObjectId
from cachefs.store import adopting, scrub
from cachefs.store import tier as tiers
from cachefs.store.space import SPILL_ABOVE
from cachefs.store.tier import RAM, SSD, Disposal
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store.lab import (
    BLOCK,
    EXTENT,
    MIB,
    PAGE,
    Lab,
    as_kill_leaves_it,
    begin_write,
    cache_files,
    flip_bit,
    killed_at_random,
    running,
    until,
)
from tests.store.test_passthrough import Backend, kill, spread

LARGE = 5 * EXTENT + 5
"""Too large to be fetched whole for a look at it."""

SIZES = [1, 4097, BLOCK, BLOCK + 1, 3 * BLOCK - 1, EXTENT, EXTENT + 5, 2 * EXTENT]


def dirty_file(lab: Lab, data: bytes, name: str = "staged") -> Path:
    """A file as the upload room leaves it."""
    staging = lab.store.tiers[-1].path / "staging" if lab.store.tiers else lab.opened.state_dir / "staging"
    staging.mkdir(exist_ok=True)
    path = staging / name
    path.write_bytes(data)
    path.chmod(0o600)
    return path


async def adopt(lab: Lab, object_id: ObjectId, name: str = "staged") -> bool:
    """What the store has been given before."""
    data = lab.origin.objects[object_id.key][1]
    return await lab.store.adopt(object_id, dirty_file(lab, data, name))


def whole(size: int) -> list[int]:
    """Bitmaps of the extents of a version."""
    blocks = -(-size // BLOCK)
    return [(1 << min(16, blocks - first)) - 1 for first in range(0, blocks, 16)]


# -- what adopting gives -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ram", [0, 8 * MIB])
@in_trio
async def test_what_was_adopted_is_passthrough_and_read_at_once(
    cache_dir: Path, ram: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir, ram=ram) as lab:
        data = content(1, size)
        object_id = lab.origin.put("k", data)
        path = dirty_file(lab, data)
        inode = path.stat().st_ino
        assert await lab.store.adopt(object_id, path)
        assert not path.exists()
        monkeypatch.setattr(lab.store.backing_files, "_verify", None)  # the bytes are not looked at once more
        backend = Backend(lab)
        passthrough = backend.open_backing(object_id, data)
        assert passthrough is not None and passthrough.tier.number == SSD
        backend.check()
        file = passthrough.tier.file_path(object_id.digest)
        assert (file.stat().st_ino, stat.S_IMODE(file.stat().st_mode)) == (inode, 0o400)
        assert bytes(await lab.store.read(lab.store.object(object_id), 0, size) or b"") == data
        lab.store.release_backing(passthrough)
        assert await lab.read(object_id) == data
        assert lab.store.cached_bytes(object_id) == size
        assert not lab.origin.gets
        assert lab.metrics.adopted_versions == 1
        assert lab.metrics.admitted_blocks == -(-size // BLOCK)
        lab.check_accounts()
        assert passthrough.tier.unlisted_bytes == 0
    async with running(cache_dir, lab.origin) as lab:
        assert await lab.read(object_id) == data
        assert not lab.origin.gets and lab.metrics.checksum_failures == 0
        lab.check_accounts()


@in_trio
async def test_of_an_empty_file_nothing_is_kept(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", b"")
        path = dirty_file(lab, b"")
        assert await lab.store.adopt(object_id, path)
        assert not path.exists() and cache_files(cache_dir) == [] and lab.used() == 0


@pytest.mark.parametrize("where", ["begin", "middle", "end", "all", "a page", "preallocated"])
@in_trio
async def test_holes_take_their_place_on_the_disk(cache_dir: Path, where: str) -> None:
    size = 2 * EXTENT + 3 * BLOCK + 77
    async with running(cache_dir) as lab:
        path = dirty_file(lab, b"")
        full = bytearray(content(1, size))
        holes = {
            "begin": (0, EXTENT + 2 * BLOCK),
            "middle": (BLOCK + PAGE, 2 * EXTENT),
            "end": (EXTENT, size),
            "a page": (5 * PAGE, 6 * PAGE),
        }.get(where, (0, size))
        full[slice(*holes)] = bytes(holes[1] - holes[0])
        with path.open("wb") as file:
            os.truncate(path, size)
            for start, stop in ((0, holes[0]), (holes[1], size)):
                os.pwrite(file.fileno(), full[start:stop], start)
            if where == "preallocated":
                os.posix_fallocate(file.fileno(), 0, size)
        if where != "preallocated":
            assert path.stat().st_blocks * 512 < size, "there are holes"
        object_id = lab.origin.put("k", bytes(full))
        assert await lab.store.adopt(object_id, path)
        assert lab.used() == -(-size // PAGE) * PAGE
        lab.check_accounts()
        assert await lab.read(object_id) == full
        await lab.store.flush()
        await scrub(lab.store)
        assert lab.store.cached_bytes(object_id) == size, "to the scrub nothing is missing"
        assert not lab.origin.gets


@pytest.mark.parametrize("bad", [False, True])
@in_trio
async def test_who_checks_every_read_checks_these(cache_dir: Path, bad: bool) -> None:
    async with running(cache_dir, verify="full") as lab:
        data = content(1, EXTENT + 5)
        object_id = lab.origin.put("k", data)
        assert await adopt(lab, object_id)
        if bad:
            path = lab.store.tiers[-1].file_path(object_id.digest)
            path.chmod(0o600)
            flip_bit(path, random.Random(1))
        assert await lab.read(object_id) == data
        assert (lab.metrics.checksum_failures, bool(lab.origin.gets)) == (bad, bad)


# -- what it does not take -----------------------------------------------------------------------------


def fail(number: int) -> Callable[..., Any]:
    def failing(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return failing


REFUSED = {
    **dict.fromkeys(["longer", "shorter", "a link", "a directory", "elsewhere", "no room", "pinned"], 0),
    **dict.fromkeys(["no tier", "tier down", "whole", "no modes"], 0),
    **dict.fromkeys(["gone", "unreadable", "rename fails"], 1),
}
"""Why → whether the tier has failed at something."""


@pytest.mark.parametrize("why", REFUSED)
@in_trio
async def test_what_cannot_be_adopted_is_left_alone(
    cache_dir: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssd = {"no tier": 0, "no room": EXTENT, "pinned": 3 * EXTENT}.get(why, 64 * MIB)
    async with running(cache_dir, ssd=ssd) as lab:
        data = content(1, EXTENT + 5)
        object_id = lab.origin.put("k", data)
        path = dirty_file(lab, data + b"x" if why == "longer" else data[:-1] if why == "shorter" else data)
        if why == "a link":
            path = path.rename(path.with_name("other"))
            path.with_name("staged").symlink_to(path)
            path = path.with_name("staged")
        elif why == "a directory":
            path = path.parent
        elif why == "elsewhere":
            with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as file:
                file.write(data)
            path = Path(file.name)
        elif why == "gone":
            path.unlink()
        elif why == "whole":
            await lab.read(object_id)
            await lab.quiet()
        elif why == "pinned":
            other = lab.origin.put("other", content(2, 2 * EXTENT))
            await lab.read(other)
            await lab.quiet()
            lab.store.pins.budget = lab.store.pins.budget.__class__(percent=100.0)
            lab.store.pin(lab.store.object(other))
        elif why == "tier down":
            lab.store.tiers[0].failed(OSError(errno.EIO, "dying"))
        elif why == "no modes":
            monkeypatch.setattr(os, "chmod", fail(errno.EPERM))
        elif why == "unreadable":
            monkeypatch.setattr(os, "preadv", fail(errno.EIO))
        elif why == "rename fails":
            monkeypatch.setattr(os, "rename", fail(errno.EIO))
        used, files, fds = lab.used(), cache_files(cache_dir), len(os.listdir("/proc/self/fd"))
        before = path.lstat() if path.exists() else None
        assert not await lab.store.adopt(object_id, path)
        monkeypatch.undo()
        if before is not None:
            after = path.lstat()
            assert (after.st_ino, after.st_mode, after.st_size) == (
                before.st_ino,
                before.st_mode,
                before.st_size,
            )
        assert (lab.used(), cache_files(cache_dir)) == (used, files)
        assert len(os.listdir("/proc/self/fd")) == fds
        assert lab.metrics.tier_errors == REFUSED[why]
        assert lab.metrics.evicted_blocks == lab.metrics.adopted_versions == 0
        lab.check_accounts()
        assert all(tier.unlisted_bytes == 0 for tier in lab.store.tiers)
        assert await lab.read(object_id) == data
        if why == "elsewhere":
            path.unlink()


@in_trio
async def test_a_file_that_is_written_meanwhile_is_not_adopted(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir) as lab:
        data = content(1, 2 * EXTENT)
        object_id = lab.origin.put("k", data)
        path = dirty_file(lab, data)
        hashing = adopting.checksums

        def write_then_hash(fd: int, ranges: list[tuple[int, int]]) -> list[int]:
            if ranges[0][0]:
                time.sleep(0.02)  # as coarse as a file system's clock may be
                with path.open("r+b") as file:
                    file.write(b"changed")
            return hashing(fd, ranges)

        monkeypatch.setattr(adopting, "checksums", write_then_hash)
        assert not await lab.store.adopt(object_id, path)
        assert path.exists() and lab.used() == 0 and lab.metrics.tier_errors == 0
        assert await lab.read(object_id) == data


@in_trio
async def test_a_version_on_its_way_here_is_left_to_who_brings_it(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        data = content(1, 4 * BLOCK)
        object_id = lab.origin.put("k", data)
        hold = lab.origin.hold("k", 3 * BLOCK + 10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lab.read, object_id)
            await hold.reached.wait()
            assert not await adopt(lab, object_id)
            hold.release.set()
        await lab.quiet()
        lab.check_accounts()
        assert await adopt(lab, object_id), "RAM alone is no reason against it"
        lab.check_accounts()


@in_trio
async def test_of_two_files_of_one_version_one_is_adopted(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data = content(1, 2 * EXTENT)
        object_id = lab.origin.put("k", data)
        paths = [dirty_file(lab, data, name) for name in ("a", "b")]
        said: list[bool] = []

        async def one(path: Path) -> None:
            said.append(await lab.store.adopt(object_id, path))

        async with trio.open_nursery() as nursery:
            for path in paths:
                nursery.start_soon(one, path)
        assert sorted(said) == [False, True]
        assert [path.exists() for path in paths].count(True) == 1
        lab.check_accounts()
        assert await lab.read(object_id) == data and not lab.origin.gets


@in_trio
async def test_a_cancelled_adoption_gives_its_room_back(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data = content(1, 8 * EXTENT)
        object_id = lab.origin.put("k", data)
        path = dirty_file(lab, data)
        with trio.CancelScope() as scope:
            scope.cancel()
            await lab.store.adopt(object_id, path)
        assert scope.cancelled_caught
        assert path.read_bytes() == data
        assert lab.used() == lab.store.tiers[0].unlisted_bytes == 0
        assert not lab.store.object(object_id).in_use()


# -- what was here of the version ----------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["ssd", "ram", "both", "remote_owned"])
@in_trio
async def test_parts_that_were_cached_are_superseded(cache_dir: Path, tier: str) -> None:
    async with running(cache_dir, ram=8 * MIB if tier in ("ram", "both") else 0) as lab:
        data = content(1, LARGE)
        object_id = lab.origin.put("k", data)
        obj = lab.store.object(object_id)
        if tier == "remote_owned":
            cache_write = begin_write(lab.store, obj, 16, 18, remote_owned=True)
            assert cache_write is not None
            cache_write.write(data[EXTENT : EXTENT + 2 * BLOCK])
            lab.store.end_write(obj, cache_write)
        else:
            await lab.read(object_id, BLOCK, 3 * BLOCK)
            await lab.read(object_id, EXTENT + BLOCK, BLOCK)
        await lab.quiet()
        if tier == "both":
            assert lab.store._moves is not None
            for copy in lab.store.catalog.copies(obj, RAM):
                assert await lab.store._moves.move(obj, copy, lab.store.tiers[1], True)  # type: ignore[arg-type]
        asked = len(lab.origin.gets)
        reader = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        assert await adopt(lab, object_id)
        assert spread(lab, object_id, SSD) == whole(len(data))
        assert not any(
            copy.key in lab.store.eviction.remote_owned for copy in obj.copies_on(lab.store.tiers[-1])
        )
        lab.check_accounts()
        assert await lab.read_open(reader, 0, len(data)) == data
        lab.fetcher.close(reader)
        assert len(lab.origin.gets) == asked
        passthrough = Backend(lab).open_backing(object_id, data)
        assert passthrough is not None and passthrough.tier.number == SSD
        await lab.store.flush()
        assert lab.store.catalog._loaded == sum(map(bool, obj.copies.values()))


@in_trio
async def test_parts_that_somebody_reads_are_not_torn(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data = content(1, LARGE)
        object_id = lab.origin.put("k", data)
        await lab.read(object_id, 0, BLOCK)
        await lab.quiet()
        obj = lab.store.object(object_id)
        obj.refs += 1
        assert lab.store.pin_block(obj, 0) is None  # its file is not open
        assert await lab.store.read(obj, 0, BLOCK) == data[:BLOCK]
        shared = lab.store.pin_block(obj, 0)
        assert shared is not None
        obj.refs -= 1
        assert not await adopt(lab, object_id)
        assert os.pread(shared.fd, shared.length, shared.offset) == data[:BLOCK]
        lab.store.unpin_block(obj, shared)
        lab.check_accounts()
        assert await adopt(lab, object_id)


@in_trio
async def test_what_ram_lends_goes_on_being_passthrough(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        backend = Backend(lab)
        data = content(1, EXTENT + 5)
        object_id = lab.origin.put("k", data)
        await lab.read(object_id)
        await lab.quiet()
        passthrough = backend.open_backing(object_id, data)
        assert passthrough is not None and passthrough.tier.number == RAM
        assert await adopt(lab, object_id)
        backend.check()
        lab.check_accounts()
        assert backend.open_backing(object_id) is passthrough
        lab.store.release_backing(passthrough)
        lab.store.release_backing(passthrough)
        ram = passthrough.tier
        first, *_ = lab.store.catalog.copies(passthrough.object, RAM)
        lab.store.space.drop(passthrough.object, first, first.bitmap)  # and all of the file with it
        assert backend.retired == [passthrough] and not ram.used_bytes
        again = backend.open_backing(object_id, data)
        assert again is not None and again.tier.number == SSD
        assert len(lab.origin.gets) <= 2


@pytest.mark.parametrize("immutable", [False, True])
@in_trio
async def test_what_an_earlier_daemon_left_unchecked_is_superseded(cache_dir: Path, immutable: bool) -> None:
    origin = ScriptedOrigin()
    data = content(1, EXTENT + 5)
    object_id = origin.put("k", data)
    async with running(cache_dir, origin) as lab:
        await lab.read(object_id)
        await lab.quiet()
        if immutable:
            assert Backend(lab).open_backing(object_id)
    asked = len(origin.gets)
    async with running(cache_dir, origin) as lab:
        mapping = None
        if immutable:
            with lab.store.tiers[0].file_path(object_id.digest).open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert Backend(lab).open_backing(object_id) is None
        assert await adopt(lab, object_id)
        assert Backend(lab).open_backing(object_id, data)
        assert mapping is None or bytes(mapping) == data
        lab.check_accounts()
    assert len(origin.gets) == asked


@in_trio
async def test_a_pinned_version_stays_pinned(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data = content(1, LARGE)
        object_id = lab.origin.put("k", data)
        await lab.read(object_id, 0, BLOCK)
        await lab.quiet()
        lab.store.pin(lab.store.object(object_id))
        assert await adopt(lab, object_id)
        assert lab.store.pinned_bytes == lab.used()
        assert lab.store.evict(lab.store.object(object_id)) == 0
        await lab.store.flush()
        lab.store.unpin(lab.store.object(object_id))
        assert lab.store.pinned_bytes == 0
        assert lab.store.evict(lab.store.object(object_id)) == -(-len(data) // PAGE) * PAGE
        lab.check_accounts()
        assert lab.used() == 0


# -- room ----------------------------------------------------------------------------------------------


@in_trio
async def test_what_was_used_longest_ago_makes_room_and_the_cap_holds(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=6 * EXTENT) as lab:
        ids = [lab.origin.put(f"k{i}", content(i, EXTENT)) for i in range(6)]
        for object_id in ids:
            await lab.read(object_id)
            await lab.quiet()
        await lab.store.flush()
        new = lab.origin.put("new", content("new", 2 * EXTENT))
        assert await adopt(lab, new)
        assert [lab.store.cached_bytes(i) > 0 for i in (*ids, new)] == [False] * 2 + [True] * 5
        assert lab.metrics.evicted_blocks == 32
        lab.check_accounts()


@in_trio
async def test_an_evicted_file_leaves_its_readers_what_they_have(cache_dir: Path) -> None:
    """Who wrote it still has it open: it goes whole, and no byte of it changes."""
    async with running(cache_dir, ssd=5 * EXTENT) as lab:
        data = content("mine", 2 * EXTENT + 100)
        mine = lab.origin.put("mine", data)
        path = dirty_file(lab, data)
        with path.open("rb") as own:
            assert await lab.store.adopt(mine, path)
            await lab.store.flush()
            for i in range(5):
                await lab.read(lab.origin.put(f"k{i}", content(i, EXTENT)))
                await lab.quiet()
                lab.check_accounts()
            assert lab.store.cached_bytes(mine) == 0
            assert own.read() == data
        assert await lab.read(mine) == data


class Disk:
    """What statvfs says of a disk of `size` bytes, of which all files below a directory take their part."""

    def __init__(self, place: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.size = place, size
        monkeypatch.setattr(
            os, "statvfs", lambda _: SimpleNamespace(f_bavail=self.free, f_frsize=1, f_files=0)
        )

    @property
    def free(self) -> int:
        return self.size - sum(
            os.lstat(os.path.join(folder, name)).st_blocks * 512
            for folder, _, names in os.walk(self.place)
            for name in names
            if {"objects", "staging"} & set(Path(folder).parts)
        )


@in_trio
async def test_bytes_that_the_disk_has_already_displace_nothing(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(cache_dir, 12 * EXTENT, monkeypatch)
    async with running(cache_dir, ssd=64 * EXTENT, keep_free=2 * EXTENT) as lab:
        ids = [lab.origin.put(f"k{i}", content(i, EXTENT)) for i in range(6)]
        for object_id in ids:
            await lab.read(object_id)
            await lab.quiet()
        data = content("new", 4 * EXTENT)
        new = lab.origin.put("new", data)
        path = dirty_file(lab, data)
        assert disk.free == 2 * EXTENT, "not a byte to spare"
        lab.store.tiers[0]._free_read_again_at = 0
        assert await lab.store.adopt(new, path)
        assert lab.metrics.evicted_blocks == 0
        assert lab.store.tiers[0].limit_bytes() == lab.used() == 10 * EXTENT
        lab.store.tiers[0]._free_read_again_at = 0
        assert lab.store.tiers[0].limit_bytes() == 10 * EXTENT
        lab.check_accounts()


@pytest.mark.parametrize("wanted, goes", [(0, 0), (1, 1), (EXTENT, 1), (3 * EXTENT, 3), (99 * EXTENT, 6)])
@in_trio
async def test_room_is_made_for_what_is_written(
    cache_dir: Path, wanted: int, goes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(cache_dir, 8 * EXTENT, monkeypatch)
    async with running(cache_dir, ssd=64 * EXTENT, keep_free=2 * EXTENT) as lab:
        for i in range(6):
            await lab.read(lab.origin.put(f"k{i}", content(i, EXTENT)))
            await lab.quiet()
        assert await lab.store.evict_to_hold(wanted) == (goes < 6)
        assert lab.metrics.evicted_blocks == 16 * goes
        assert disk.free - 2 * EXTENT == goes * EXTENT
        assert await lab.store.evict_to_hold(wanted) == (goes < 6)
        assert lab.metrics.evicted_blocks == 16 * goes, "there was room by now"
        lab.check_accounts()


@in_trio
async def test_more_room_than_asked_for_is_not_made_where_bytes_are_freed_later(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir, ssd=64 * EXTENT, keep_free=2 * EXTENT) as lab:
        for i in range(6):
            await lab.read(lab.origin.put(f"k{i}", content(i, EXTENT)))
            await lab.quiet()
        frozen = SimpleNamespace(f_bavail=2 * EXTENT, f_frsize=1, f_files=0)
        monkeypatch.setattr(os, "statvfs", lambda _: frozen)
        assert await lab.store.evict_to_hold(2 * EXTENT)
        assert lab.metrics.evicted_blocks == 32


@in_trio
async def test_several_writers_do_not_each_have_the_same_room_made_while_files_wait_for_their_removal(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one writer that looks again before the disk has removed them: the whole cache could go for a few bytes."""
    disk = Disk(cache_dir, 8 * EXTENT, monkeypatch)
    async with running(cache_dir, ssd=64 * EXTENT, keep_free=2 * EXTENT) as lab:
        for i in range(6):
            await lab.read(lab.origin.put(f"k{i}", content(i, EXTENT)))
            await lab.quiet()
        disposal = lab.store.tiers[0].disposal
        with monkeypatch.context() as patch:
            patch.setattr(disposal, "_begin", lambda: None)
            for _ in range(3):
                assert await lab.store.evict_to_hold(EXTENT)
                assert lab.metrics.evicted_blocks == 16 and disk.free == 2 * EXTENT
        disposal._begin()
        assert disk.free == 3 * EXTENT
        assert await lab.store.evict_to_hold(EXTENT) and lab.metrics.evicted_blocks == 16


@in_trio
async def test_the_daemon_goes_on_while_much_room_is_made(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(cache_dir, 8 * EXTENT, monkeypatch)
    async with running(cache_dir, ssd=64 * EXTENT, keep_free=2 * EXTENT) as lab:
        for i in range(6):
            await lab.read(lab.origin.put(f"k{i}", content(i, EXTENT)))
            await lab.quiet()
        went: list[int] = []

        async def noted() -> None:
            went.append(lab.metrics.evicted_blocks // 16)

        monkeypatch.setattr(adopting, "VICTIMS_AT_ONCE", 2)
        with monkeypatch.context() as patched:
            patched.setattr(trio.lowlevel, "checkpoint", noted)
            assert await lab.store.evict_to_hold(5 * EXTENT)
        assert went == [2, 4]


@in_trio
async def test_without_a_disk_there_is_no_room_to_make(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=0, ram=8 * MIB) as lab:
        await lab.read(lab.origin.put("k", content(1, EXTENT)))
        await lab.quiet()
        assert not await lab.store.evict_to_hold(1)
        assert not await adopt(lab, lab.origin.put("new", b"x"))
        assert lab.metrics.evicted_blocks == 0


# -- epochs --------------------------------------------------------------------------------------------


@in_trio
async def test_a_checkpoint_beside_a_dataset_is_no_part_of_it(cache_dir: Path) -> None:
    """Not even one in its directory, though everything there is protected for an epoch once it was used."""
    async with running(cache_dir, ssd=64 * EXTENT) as lab:
        ids = [lab.origin.put(f"train/{i:03d}", content(i, BLOCK)) for i in range(64)]
        checkpoint = lab.origin.put("train/checkpoint", content("c", 2 * EXTENT))
        catalog = lab.store.catalog
        rng = random.Random(1)
        for epoch in range(3):
            for object_id in rng.sample(ids, len(ids)):
                await lab.read(object_id)
            await lab.quiet()
            await lab.store.flush()
            if epoch == 1:
                before = lab.store.eviction_status()
                assert await adopt(lab, checkpoint)
                assert lab.store.eviction_status() == before
        (known,) = lab.store.eviction_status()["datasets"]
        assert known["mode"] == "epoch" and known["footprint_bytes"] == 64 * BLOCK
        for object_id in rng.sample(ids, 10):  # the next epoch: what it has not had is kept
            await lab.read(object_id)
        kept = [lab.store.eviction.protected(c) for i in ids for c in catalog.copies(catalog.object(i), SSD)]
        assert sum(kept) == 54
        copies = catalog.copies(catalog.object(checkpoint), SSD)
        assert len(copies) == 2 and not any(map(lab.store.eviction.protected, copies))
        await lab.read(checkpoint)
        assert {copy.dataset for copy in copies} == {lab.store.datasets(checkpoint)}, "now it was used"


# -- the end of the daemon -----------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [False, True])
@in_trio
async def test_a_kill_right_after_costs_the_file_at_most(cache_dir: Path, flushed: bool) -> None:
    data = content(1, 2 * EXTENT + 5)
    origin = ScriptedOrigin()
    object_id = origin.put("k", data)
    async with running(cache_dir, origin) as lab:
        await lab.read(origin.put("other", content(2, EXTENT)))
        await lab.quiet()
        await lab.store.flush()
        assert await adopt(lab, object_id)
        if flushed:
            await lab.store.flush()
        copy = as_kill_leaves_it(cache_dir, cache_dir.with_name("cache-killed"))
        kill(lab)
    asked = len(origin.gets)
    async with running(copy, origin) as lab:
        assert not lab.store.was_clean
        await scrub(lab.store)
        assert lab.store.cached_bytes(object_id) == flushed * len(data)
        lab.check_accounts()
        assert len(cache_files(copy)) == 1 + flushed
        assert await lab.read(object_id) == data
        assert (len(origin.gets) == asked) == flushed
        assert lab.metrics.checksum_failures == 0


COUNT = 24


def versions() -> tuple[ScriptedOrigin, list[ObjectId], list[bytes]]:
    origin = ScriptedOrigin()
    sizes = [1, 5 * BLOCK + 1, EXTENT, EXTENT + BLOCK]
    data = [content(f"version{i}", sizes[i % len(sizes)]) for i in range(COUNT)]
    return origin, [origin.put(f"k{i}", d) for i, d in enumerate(data)], data


async def writer(place: Path, seed: int, ready: Callable[[], None]) -> None:
    """The child: adopts and reads at random in a cache that is too small, until it is killed."""
    rng = random.Random(seed)
    origin, ids, data = versions()
    async with running(place, origin, ssd=8 * MIB, ram=2 * MIB, background=True) as lab:
        names = itertools.count()

        async def adopter() -> None:
            while True:
                i = rng.randrange(COUNT)
                path = dirty_file(lab, data[i], str(next(names)))
                if not await lab.store.adopt(ids[i], path):
                    path.unlink()

        async def reader() -> None:
            while True:
                i = rng.randrange(COUNT)
                assert await lab.read(ids[i]) == data[i]

        async def flusher() -> None:
            while True:
                await trio.sleep(0.02)
                await lab.store.flush()

        async with trio.open_nursery() as nursery:
            for task in (adopter, adopter, reader, reader, flusher):
                nursery.start_soon(task)
            ready()


@pytest.mark.long
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_kills_never_make_a_wrong_byte_of_what_was_adopted(cache_dir: Path, kills: int) -> None:
    for number in killed_at_random(writer, cache_dir, kills):
        look(cache_dir, ("first", "none", "full")[number % 3])


@in_trio
async def look(cache_dir: Path, verify: str) -> None:
    origin, ids, data = versions()
    async with running(cache_dir, origin, ssd=8 * MIB, ram=2 * MIB, verify=verify) as lab:
        await scrub(lab.store)
        lab.check_accounts()
        for object_id, d in zip(ids, data, strict=True):
            assert await lab.read(object_id) == d
        assert lab.metrics.checksum_failures == 0
        await lab.quiet()
        lab.check_accounts()


# -- the origin has copied it --------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("used", ["", "open", "passthrough"])
@in_trio
async def test_a_copy_at_the_origin_is_the_same_file_here(cache_dir: Path, size: int, used: str) -> None:
    async with running(cache_dir) as lab:
        data = content(1, size)
        old = lab.origin.put("tmp", data)
        assert await adopt(lab, old)
        new = lab.origin.put("final", data)
        file = lab.store.tiers[-1].file_path(old.digest)
        inode = file.stat().st_ino
        backend = Backend(lab)
        passthrough = backend.open_backing(old, data) if used == "passthrough" else None
        was = lab.store.object(old)
        if used == "open":
            was.refs += 1
            assert bytes(await lab.store.read(was, 0, size) or b"") == data
        assert await lab.store.recast(old, new)
        assert lab.store.tiers[-1].file_path(new.digest).stat().st_ino == inode
        assert await lab.read(new) == data and not lab.origin.gets
        backend.check()
        again = backend.open_backing(new, data)
        assert again is not None
        assert used != "passthrough" or again is passthrough, "the kernel has one file for each inode"
        lab.store.release_backing(again)
        if passthrough is not None:
            lab.store.release_backing(passthrough)
        if used == "open":
            was.release()
        assert not file.exists() and lab.store.cached_bytes(old) == 0
        lab.check_accounts()
    async with running(cache_dir, lab.origin) as lab:
        assert await lab.read(new) == data and not lab.origin.gets
        assert lab.metrics.checksum_failures == 0
        lab.check_accounts()


@pytest.mark.parametrize("size", SIZES)
@in_trio
async def test_readers_of_a_copy_give_the_file_to_its_writer(cache_dir: Path, size: int) -> None:
    """It was renamed while they had it in passthrough."""
    async with running(cache_dir) as lab:
        data = content(1, size)
        old = lab.origin.put("tmp", data)
        assert await adopt(lab, old)
        new = lab.origin.put("final", data)
        backing = Backend(lab).open_backing(old, data)
        assert backing is not None and await lab.store.recast(old, new)
        lab.check_accounts()
        path = cache_dir / "taken"
        fd = lab.store.take_out(backing, 1, path)
        assert fd is not None and path.read_bytes() == data
        os.close(fd)
        assert lab.store.cached_bytes(new) == lab.store.cached_bytes(old) == 0
        await lab.quiet()
        lab.check_accounts()


@in_trio
async def test_the_old_name_of_a_copy_is_removed_after_its_writer_has_the_file(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removals of a disk are behind: the large file of the old name is the staging file by then."""

    def no_thread(_: Disposal) -> None:
        raise RuntimeError("can't start new thread")

    begin = Disposal._begin
    monkeypatch.setattr(tiers, "SLICE_BYTES", PAGE)
    monkeypatch.setattr(tiers, "LOOK_EVERY_S", 0.01)
    async with running(cache_dir) as lab:
        data = content(1, EXTENT)
        old = lab.origin.put("tmp", data)
        assert await adopt(lab, old)
        new = lab.origin.put("final", data)
        backing = Backend(lab).open_backing(old, data)
        monkeypatch.setattr(Disposal, "_begin", no_thread)
        assert backing is not None and await lab.store.recast(old, new)
        path, disposal = cache_dir / "taken", lab.store.tiers[-1].disposal
        fd = lab.store.take_out(backing, 1, path)
        assert fd is not None and disposal.pending(old.digest)
        os.close(fd)
        monkeypatch.setattr(Disposal, "_begin", begin)
        disposal.wait_for(old.digest)
        assert path.read_bytes() == data
        path.unlink()
        lab.check_accounts()


@in_trio
async def test_a_copy_of_what_is_not_all_here_is_fetched(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data = content(1, 2 * EXTENT)
        old, new = lab.origin.put("tmp", data), lab.origin.put("final", data)
        await lab.read(old, 0, BLOCK)
        assert not await lab.store.recast(old, new)
        assert not await lab.store.recast(new, old)
        assert await lab.read(new) == data
        await lab.quiet()
        lab.check_accounts()


# -- from memory, and on a disk that hangs -----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1, 3 * BLOCK - 1])
@in_trio
async def test_what_lies_in_memory_is_adopted_as_a_file_is(cache_dir: Path, size: int) -> None:
    async with running(cache_dir) as lab:
        data = content(1, size)
        object_id = lab.origin.put("k", data)
        gets = len(lab.origin.gets)
        assert await lab.store.adopt_bytes([(object_id, data)]) == [True]
        obj = lab.store.object(object_id)
        assert lab.store.tiers[-1].immutable(object_id.digest) and not obj.leaving
        assert await lab.read(object_id) == data and len(lab.origin.gets) == gets
        assert await lab.store.adopt_bytes([(object_id, data)]) == [False], "it is there"
        assert await lab.store.adopt_bytes([(lab.origin.put("empty", b""), b"")]) == [False]
        lab.check_accounts()


@in_trio
async def test_contents_go_to_ram_as_long_as_it_need_not_spill_for_them(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        ram, ssd = lab.store.tiers
        spills_above = int(SPILL_ABOVE * ram.limit_bytes())
        versions = [(lab.origin.put(f"k{n}", content(n, MIB)), content(n, MIB)) for n in range(9)]
        for version in versions:
            assert await lab.store.adopt_bytes([version]) == [True]
        there = [[layout["tier"] for layout in lab.store.layout(object_id)] for object_id, _ in versions]
        in_ram = there.count(["ram"])
        assert in_ram == spills_above // MIB and there[in_ram:] == [["ssd"]] * (9 - in_ram)
        assert ram.immutable(versions[0][0].digest) and not lab.metrics.spilled_blocks
        for object_id, data in versions:
            assert await lab.read(object_id) == data
        backing = Backend(lab).open_backing(*versions[0])
        assert backing is not None and backing.tier is ram
        assert lab.store.take_out(backing, 1, ssd.path / "taken") is None, "it is on another file system"
        lab.store.release_backing(backing)
        assert not lab.origin.gets
        lab.check_accounts()
    async with running(cache_dir, lab.origin, ram=8 * MIB) as lab:
        for object_id, data in versions:
            assert await lab.read(object_id) == data
        assert not lab.origin.gets and lab.metrics.checksum_failures == 0
        lab.check_accounts()


@in_trio
async def test_a_copy_of_what_lies_in_ram_is_the_same_file_there(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        data = content(1, BLOCK + 1)
        old, new = lab.origin.put("tmp", data), lab.origin.put("final", data)
        assert await lab.store.adopt_bytes([(old, data)]) == [True]
        inode = lab.store.tiers[0].file_path(old.digest).stat().st_ino
        assert await lab.store.recast(old, new)
        assert lab.store.tiers[0].file_path(new.digest).stat().st_ino == inode
        assert await lab.read(new) == data and not lab.origin.gets
        assert lab.store.cached_bytes(old) == 0
        lab.check_accounts()


@in_trio
async def test_several_small_versions_cost_one_turn_of_a_thread(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is kept or not by itself: one has no room on the disk, one is there already, one is asked for twice."""
    async with running(cache_dir) as lab:
        tier = lab.store.tiers[-1]
        versions = [(lab.origin.put(f"k{n}", content(n, 1000 + n)), content(n, 1000 + n)) for n in range(6)]
        assert await lab.store.adopt_bytes(versions[:1]) == [True]
        calls, put, run = list[str](), tier.put, tier.disk.run

        def full(digest: bytes, data: bytes) -> bool:
            calls.append("put")
            if digest == versions[3][0].digest:
                raise OSError(errno.ENOSPC, "full")
            return put(digest, data)

        async def counted(*how: Any) -> Any:
            calls.append("turn")
            return await run(*how)

        monkeypatch.setattr(tier, "put", full)
        monkeypatch.setattr(tier.disk, "run", counted)
        kept = await lab.store.adopt_bytes([*versions, versions[1]])
        assert kept == [False, True, True, False, True, True, True]
        assert calls == ["turn", *["put"] * 5]
        monkeypatch.undo()
        has = [lab.store.cached_bytes(object_id) for object_id, _ in versions]
        assert has == [1000, 1001, 1002, 0, 1004, 1005]
        for object_id, data in versions:
            assert not lab.store.object(object_id).leaving and await lab.read(object_id) == data
        lab.check_accounts()


@pytest.mark.parametrize("how", ["file", "bytes", "recast"])
@in_trio
async def test_what_a_disk_does_after_it_was_given_up_is_undone(
    cache_dir: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename returns when its caller has gone: the version's file is no version's then, and goes."""
    import threading

    monkeypatch.setattr(tiers, "HANGS_AFTER_S", 0.2)
    answers = threading.Event()
    async with running(cache_dir) as lab:
        tier = lab.store.tiers[-1]
        data = content(1, 2 * BLOCK)
        object_id, other = lab.origin.put("k", data), lab.origin.put("other", data)
        if how == "recast":
            assert await adopt(lab, other)

        def slowly(call: Callable[..., bool]) -> Callable[..., bool]:
            def slow(*arguments: Any) -> bool:
                done = call(*arguments)
                assert answers.wait(30)
                return done

            return slow

        for name in ("move_in", "put", "link"):
            monkeypatch.setattr(tier, name, slowly(getattr(tier, name)))
        taken: list[bool] = []

        async def give() -> None:
            if how == "file":
                taken.append(await adopt(lab, object_id))
            elif how == "bytes":
                taken.extend(await lab.store.adopt_bytes([(object_id, data)]))
            else:
                taken.append(await lab.store.recast(other, object_id))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give)
            while not tier.disk.down:
                await trio.sleep(0.02)
                tier.disk.look()
        assert taken == [False]
        obj = lab.store.object(object_id)
        assert obj.leaving == {SSD}, "nothing makes a file there as long as the thread may"
        assert not lab.store.cached_bytes(object_id) and not lab.store.evict(obj)
        assert obj.immutable == {SSD}, "a caller has looked at the file that is there for now"
        answers.set()
        await until(lambda: not (obj.leaving or tier.disk.down), 10)
        assert not obj.leaving
        await lab.quiet()
        tier.disposal.idle(5)
        assert not tier.file_path(object_id.digest).exists()
        assert await lab.read(object_id) == data
        await lab.quiet()
        assert lab.store.cached_bytes(object_id) == len(data) and tier.errors_in_a_row == 0
        lab.check_accounts()


@in_trio
async def test_a_recast_takes_no_backing_file_from_a_version_that_has_one(cache_dir: Path) -> None:
    """As `cp a b; mv a b`: the new name has the version already, and it is open in passthrough from the RAM tier."""
    data = content(1, 3 * BLOCK)
    async with running(cache_dir, ram=64 * BLOCK) as lab:
        store, old, new = lab.store, lab.origin.put("a", data), lab.origin.put("b", data)
        await lab.read(new)
        await lab.quiet()
        opened = store.open_backing(store.object(new))
        assert await store.adopt(old, dirty_file(lab, data))
        other = store.open_backing(store.object(old))
        assert opened is not None and other is not None and opened.tier is not other.tier
        for number, backing in enumerate((opened, other), 1):
            backing.registered(number)
        assert not await store.recast(old, new)
        assert (store.object(new).backing, store.object(old).backing) == (opened, other)
        for backing in (opened, other):
            store.release_backing(backing)
        assert [tier.registered for tier in store.tiers] == [1, 1]

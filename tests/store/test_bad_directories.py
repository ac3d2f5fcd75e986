"""Read-only, missing, vanishing and full cache directories, and disks that fail: the best service left, and right bytes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from cachefs.base.errors import NoRoom
from cachefs.store import ram, scrub
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store.lab import BLOCK, EXTENT, MIB, begin_write, cache_files, in_child, running

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """16 MiB of tmpfs."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", path], capture_output=True)
    if done.returncode:
        pytest.skip("may not mount")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def small_ext4(tmp_path: Path) -> Iterator[Path]:
    """16 MiB of ext4, with all a disk file system has."""
    image, path = tmp_path / "image", tmp_path / "ext4"
    path.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 16 * MIB)
    for command in (
        ["mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", "-m", "0", image],
        ["mount", "-o", "loop", image, path],
    ):
        try:
            done = subprocess.run(command, capture_output=True)
        except FileNotFoundError:
            pytest.skip("no mkfs.ext4")
        if done.returncode:
            pytest.skip("may not mount a loop device")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def fill_up(disk: Path, leave: int = 0) -> Path:
    """Another program's file takes all the space."""
    other = disk / "other"
    with open(other, "ab", buffering=0) as file:
        for size in (MIB, 4096):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as exc:
                assert exc.errno == errno.ENOSPC
        os.truncate(other, max(0, file.tell() - leave))
    return other


async def read_everything(lab, ids, data) -> None:  # type: ignore[no-untyped-def]
    for object_id, d in zip(ids, data, strict=True):
        for offset in range(0, len(d), 100_000):
            assert await lab.read(object_id, offset, min(100_000, len(d) - offset)) == d[offset:][:100_000]


def objects(origin: ScriptedOrigin, count: int = 10, size: int = 5 * BLOCK + 7) -> tuple[list, list[bytes]]:  # type: ignore[type-arg]
    data = [content(i, size) for i in range(count)]
    return [origin.put(f"k{i}", d) for i, d in enumerate(data)], data


@in_trio
async def test_missing_parents_are_made(cache_dir: Path) -> None:
    deep = cache_dir / "a" / "b" / "c"
    async with running(deep) as lab:
        assert lab.opened.warnings == []
        ids, data = objects(lab.origin)
        await read_everything(lab, ids, data)
        lab.check_accounts()


@in_trio
async def test_a_file_in_the_directorys_place_costs_the_tier_not_the_mount(cache_dir: Path) -> None:
    cache_dir.write_bytes(b"")  # noqa: ASYNC240
    async with running(cache_dir, ram=2 * MIB) as lab:
        assert [t.name for t in lab.store.tiers] == ["ram"]
        assert lab.opened.warnings
        assert all(str(cache_dir) in w for w in lab.opened.warnings)
        ids, data = objects(lab.origin)
        await read_everything(lab, ids, data)


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("how", ["directory", "link"])
@in_trio
async def test_what_somebody_else_put_in_a_public_place_is_not_touched(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Anybody can make a directory in /dev/shm under the name that ours would have."""
    monkeypatch.setattr(ram, "SHM", tmp_path)
    theirs = ram.shared_directory(cache_dir)
    elsewhere = tmp_path / "elsewhere" if how == "link" else theirs
    elsewhere.mkdir()
    (elsewhere / "trash-1").mkdir()
    if how == "link":
        theirs.symlink_to(elsewhere)
    else:
        os.chown(theirs, 12345, 12345)
    cache_dir.write_bytes(b"")  # noqa: ASYNC240 (so that the index would go there)
    async with running(cache_dir, ram=0) as lab:
        ids, data = objects(lab.origin)
        await read_everything(lab, ids, data)
    assert [path.name for path in elsewhere.iterdir()] == ["trash-1"]


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("ram", [0, 2 * MIB])
@in_trio
async def test_a_read_only_directory_costs_the_tier_not_the_mount(small_disk: Path, ram: int) -> None:
    place = small_disk / "cache"
    place.mkdir()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)  # noqa: ASYNC221
    try:
        async with running(place, ram=ram) as lab:
            assert [t.name for t in lab.store.tiers] == (["ram"] if ram else [])
            assert any("ead-only" in w for w in lab.opened.warnings), lab.opened.warnings
            ids, data = objects(lab.origin)
            await read_everything(lab, ids, data)
    finally:
        from cachefs.store.ram import remove_ram

        remove_ram(place)


@pytest.mark.parametrize("whole", [True, False], ids=["whole directory", "objects only"])
@in_trio
async def test_a_directory_removed_while_running_never_makes_a_wrong_byte(
    cache_dir: Path, whole: bool
) -> None:
    async with running(cache_dir, ssd=32 * MIB) as lab:
        ids, data = objects(lab.origin, count=4, size=3 * EXTENT + 7)
        handle = lab.fetcher.open(lab.origin, ids[0])  # type: ignore[arg-type]
        assert await lab.read_open(handle, 0, 1000) == data[0][:1000]
        for i in ids[1:]:
            await lab.read(i, 0, EXTENT)
        shutil.rmtree(cache_dir if whole else cache_dir / "objects")
        for i, d in zip(ids[1:], data[1:], strict=True):
            # A new extent first: that makes a new file, in which the old extent would be a hole.
            assert await lab.read(i, EXTENT, 2 * EXTENT) == d[EXTENT : 3 * EXTENT]
            assert await lab.read(i, 0, EXTENT) == d[:EXTENT]
        assert await lab.read_open(handle, 0, EXTENT) == data[0][:EXTENT]
        lab.fetcher.close(handle)
        await read_everything(lab, ids, data)
        await lab.store.flush()


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("memory", [False, True])
@in_trio
async def test_a_file_that_is_removed_between_two_cache_writes_is_not_made_again_by_the_second(
    cache_dir: Path, memory: bool, ended: bool
) -> None:
    """The blocks of the first would read as zeros in the new file."""
    sizes = {"ssd": 0, "ram": 8 * MIB} if memory else {}
    async with running(cache_dir, **sizes) as lab:
        lab.closes_files = False
        data, store = content(1, 3 * BLOCK), lab.store
        object_id = lab.origin.put("k", data)
        obj, (tier,) = store.object(object_id), store.tiers
        file = tier.file_path(object_id.digest)
        with obj.held():
            first, second = begin_write(store, obj, 0, 1), begin_write(store, obj, 1, 2)
            assert first is not None and second is not None
            first.write(data[:BLOCK])
            if ended:
                store.end_write(obj, first)
            file.unlink()
            with pytest.raises(NoRoom):
                second.write(data[BLOCK : 2 * BLOCK])
            assert not file.exists()
            if not ended:
                store.end_write(obj, first)
                assert await store.read(obj, 0, BLOCK) == data[:BLOCK], "it has the removed file open"
            store.end_write(obj, second)
        assert await lab.read(object_id) == data
        await lab.quiet()
        assert tier.state == "normal" and not lab.metrics.checksum_failures
        assert await lab.read(object_id) == data
        await lab.quiet()
        lab.check_accounts()


@in_trio
async def test_a_removed_directory_is_made_again_and_caches_again(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=32 * MIB) as lab:
        await trio.lowlevel.checkpoint()
        shutil.rmtree(cache_dir, ignore_errors=True)  # a start removes what an earlier one has left there
        monotonic = trio.current_time() + 0.7  # older than any remembered reading of the free space
        ids, data = objects(lab.origin, count=2)
        while trio.current_time() < monotonic:
            await read_everything(lab, ids, data)
            await trio.sleep(0.05)
        await lab.quiet()
        fetched = lab.origin.delivered
        more, bytes_of = objects(lab.origin, count=3)
        await read_everything(lab, more, bytes_of)
        await lab.quiet()
        assert lab.used() > 0
        assert fetched < lab.origin.delivered


@in_trio
async def test_a_cleared_directory_while_stopped_is_a_cold_start(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    ids, data = objects(origin)
    async with running(cache_dir, origin) as lab:
        await read_everything(lab, ids, data)
    shutil.rmtree(cache_dir / "objects")
    async with running(cache_dir, origin) as lab:
        await read_everything(lab, ids, data)
        await scrub(lab.store)
        await lab.quiet()
        lab.check_accounts()


@pytest.mark.long
@pytest.mark.root
@needs_root
@pytest.mark.parametrize("kind", ["small_disk", "small_ext4"])
@in_trio
async def test_a_disk_that_others_fill_up_while_running(request: pytest.FixtureRequest, kind: str) -> None:
    small_disk = request.getfixturevalue(kind)
    origin = ScriptedOrigin()
    async with running(small_disk / "cache", origin, ssd=12 * MIB) as lab:
        ids, data = objects(origin, count=30)
        await read_everything(lab, ids[:10], data[:10])
        await lab.store.flush()
        other = fill_up(small_disk)
        await read_everything(lab, ids, data)  # full at first touch, then known to be full
        await lab.store.flush()
        await trio.sleep(0.6)
        await read_everything(lab, ids, data)
        await lab.store.flush()
        assert lab.store.tiers[0].state == "normal"
        await lab.quiet()
        other.unlink()
        await trio.sleep(0.6)
        await read_everything(lab, ids, data)
        await lab.store.flush()
        assert lab.store.catalog.index_error == ""
        assert lab.used() > 5 * MIB
        await lab.quiet()
        lab.check_accounts()


@pytest.mark.root
@needs_root
@in_trio
async def test_a_full_disk_when_the_daemon_starts(small_ext4: Path) -> None:
    place = small_ext4 / "cache"
    origin = ScriptedOrigin()
    ids, data = objects(origin)
    async with running(place, origin, ssd=8 * MIB) as lab:
        await read_everything(lab, ids, data)
    fill_up(small_ext4)
    async with running(place, origin, ssd=8 * MIB) as lab:
        await read_everything(lab, ids, data)
        more, other = objects(origin, count=12)
        await read_everything(lab, more, other)


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("before", ["empty", "warm"])
def test_a_start_on_a_full_tmpfs_does_not_crash(small_disk: Path, tmp_path: Path, before: str) -> None:
    """LMDB maps its lock file: a page that the disk cannot give is a SIGBUS. So a process of its own."""
    place = small_disk / "cache"
    place.mkdir()

    @in_trio
    async def start() -> None:
        async with running(place, ssd=8 << 20) as lab:
            for i in range(4):
                data = content(i, 300_000)
                assert await lab.read(lab.origin.put(f"k{i}", data)) == data
            await lab.store.flush()

    if before == "warm":
        assert in_child(start, tmp_path / "report") == ""
    fill_up(small_disk)
    try:
        assert in_child(start, tmp_path / "report") == ""
    finally:
        from cachefs.store.ram import remove_ram

        remove_ram(place)


@pytest.mark.root
@needs_root
@in_trio
async def test_a_file_system_without_nonblocking_reads_is_not_a_sick_one(small_disk: Path) -> None:
    """tmpfs, NFS and overlays refuse RWF_NOWAIT: that says nothing about the blocks."""
    async with running(small_disk / "cache", ssd=8 * MIB) as lab:
        ids, data = objects(lab.origin, count=4)
        await read_everything(lab, ids, data)
        await lab.quiet()
        fetched = lab.origin.delivered
        await read_everything(lab, ids, data)
        assert lab.metrics.tier_errors == 0
        assert lab.origin.delivered == fetched
        assert lab.store.tiers[0].state == "normal"


class Trouble:
    """os.pread and friends fail for files below `folder` when `armed` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str], code: int) -> None:
        self.left = 0
        self.hits = 0
        for name in names:
            real = getattr(os, name)

            def fake(fd: int, *args: object, _real=real, **kwargs: object) -> object:  # type: ignore[no-untyped-def]
                if self.left and os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder / "objects")):
                    self.left -= 1
                    self.hits += 1
                    raise OSError(code, os.strerror(code))
                return _real(fd, *args, **kwargs)

            monkeypatch.setattr(os, name, fake)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@in_trio
async def test_write_errors_on_a_tier_cost_a_refetch_and_never_reach_a_reader(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async with running(cache_dir, ram=2 * MIB, ssd=8 * MIB) as lab:
        ids, data = objects(lab.origin, count=12)
        trouble = Trouble(monkeypatch, lab.store.tiers[0].path, ["pwrite"], code)
        await read_everything(lab, ids[:3], data[:3])
        trouble.left = 4
        await read_everything(lab, ids, data)
        assert trouble.hits >= 1
        await lab.quiet()
        lab.check_accounts()
        trouble.left = 0
        await read_everything(lab, ids, data)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("name", ["open", "pwrite"])
@in_trio
async def test_a_full_disk_is_tried_once_and_not_again_with_the_same_bytes(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """A quota is not to be seen in the file system's free space: what failed would seem to fit again."""
    monkeypatch.setattr("cachefs.store.tier.FREE_SPACE_EVERY_S", 1000.0)
    async with running(cache_dir, ssd=8 * MIB) as lab:
        ids, data = objects(lab.origin, count=2, size=4 * BLOCK)
        real = getattr(os, name)

        def fails(place: Any, *how: Any, **more: Any) -> Any:
            if name == "pwrite" or how[0] & os.O_CREAT:
                raise OSError(code, os.strerror(code))
            return real(place, *how, **more)

        monkeypatch.setattr(os, name, fails)
        await read_everything(lab, ids, data)
        parts = [(get.key, get.start // BLOCK, get.stop // BLOCK) for get in lab.origin.gets]
        blocks = [(object_id.key, block, block + 1) for object_id in ids for block in range(4)]
        assert sorted(parts) == sorted([(ids[0].key, 0, 4), *blocks])


@pytest.mark.parametrize("tier", ["ram", "ssd"])
@in_trio
async def test_read_errors_on_a_tier_cost_a_refetch_and_never_reach_a_reader(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    async with running(
        cache_dir, ram=8 * MIB if tier == "ram" else 0, ssd=8 * MIB if tier == "ssd" else 0
    ) as lab:
        ids, data = objects(lab.origin, count=6)
        await read_everything(lab, ids, data)
        trouble = Trouble(monkeypatch, lab.store.tiers[0].path, ["pread", "preadv"], errno.EIO)
        rng = random.Random(3)
        for _ in range(20):
            trouble.left = rng.randrange(3)
            i = rng.randrange(6)
            assert await lab.read(ids[i]) == data[i]
        trouble.left = 0
        assert lab.metrics.tier_errors > 0
        await read_everything(lab, ids, data)
        await lab.quiet()
        lab.check_accounts()


@in_trio
async def test_a_read_error_while_the_object_is_still_coming_makes_no_hole(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that were written are dropped and punched; a reader who joins the transfer must not be given the hole."""
    async with running(cache_dir, ram=8 * MIB, ssd=0) as lab:
        data = content(1, 8 * BLOCK)
        object_id = lab.origin.put("k", data)
        hold = lab.origin.hold("k", 5 * BLOCK)
        handle = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        assert await lab.read_open(handle, 0, BLOCK) == data[:BLOCK]
        await hold.reached.wait()
        assert await lab.read_open(handle, 0, 3 * BLOCK) == data[: 3 * BLOCK]
        trouble = Trouble(monkeypatch, lab.store.tiers[0].path, ["pread"], errno.EIO)
        trouble.left = 1
        async with trio.open_nursery() as nursery:

            async def read(offset: int) -> None:
                assert await lab.read_open(handle, offset, BLOCK) == data[offset : offset + BLOCK]

            for block in range(4):
                nursery.start_soon(read, block * BLOCK)
            await trio.sleep(0.05)
            hold.release.set()
        assert await lab.read_open(handle, 0, len(data)) == data
        lab.fetcher.close(handle)
        await lab.quiet()
        lab.check_accounts()


@in_trio
async def test_an_error_reading_back_a_transfer_under_way_is_a_miss_not_an_error(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir, ssd=8 * MIB) as lab:
        data = content(1, 8 * BLOCK)
        object_id = lab.origin.put("k", data)
        hold = lab.origin.hold("k", BLOCK // 2)
        trouble = Trouble(monkeypatch, cache_dir, ["pread", "preadv"], errno.EIO)
        trouble.left = 1
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                assert await lab.read(object_id, 0, 1000) == data[:1000]

            nursery.start_soon(read)
            await hold.reached.wait()
            await trio.sleep(0.05)
            hold.release.set()
        await lab.quiet()
        lab.check_accounts()


@in_trio
async def test_a_spill_that_runs_into_a_full_disk_gives_its_bytes_back(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir, ram=4 * EXTENT, ssd=32 * MIB, background=True) as lab:
        real = os.sendfile
        calls = 0

        def sendfile(out: int, *args: int) -> int:
            nonlocal calls
            calls += 1
            if calls == 20:  # the second extent of a file that already holds one
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(out, *args)

        monkeypatch.setattr(os, "sendfile", sendfile)
        data = content(1, 6 * EXTENT)
        object_id = lab.origin.put("k", data)
        for offset in range(0, len(data), BLOCK):
            assert await lab.read(object_id, offset, BLOCK) == data[offset : offset + BLOCK]
            await trio.sleep(0.001)
        await lab.quiet()
        await trio.sleep(0.05)
        assert calls >= 20
        lab.check_accounts()
        await read_everything(lab, [object_id], [data])


@in_trio
async def test_an_index_that_cannot_be_written_is_said_and_served_around(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cachefs.base.database import Database
    from cachefs.base.errors import NoRoom

    async with running(cache_dir, ssd=2 * MIB) as lab:
        ids, data = objects(lab.origin, count=12)
        await read_everything(lab, ids[:3], data[:3])
        await lab.store.flush()
        real = Database.write

        def full(*_: object, **__: object) -> None:
            raise NoRoom("disk full")

        monkeypatch.setattr(Database, "write", full)
        for _ in range(2):
            # Evicts, drops and refills under an index that stays behind.
            await read_everything(lab, ids, data)
            await lab.store.flush()
            assert "disk full" in lab.store.catalog.index_error
        monkeypatch.setattr(Database, "write", real)
        await lab.store.flush()
        assert lab.store.catalog.index_error == ""
        await lab.quiet()
        lab.check_accounts()
        origin = lab.origin
    fetched = origin.delivered
    async with running(cache_dir, origin, ssd=2 * MIB, verify="none") as lab:
        lab.check_accounts()
        held = [i for i in ids if lab.store.cached_bytes(i) == i.size]
        assert held
        for i in held:
            assert await lab.read(i) == data[ids.index(i)]
    assert origin.delivered == fetched


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("ram", [0, 8 * MIB], ids=["on the disk", "in memory"])
@in_trio
async def test_descriptors_running_out_drop_nothing_that_is_cached(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, ram: int, number: int
) -> None:
    async with running(cache_dir, ram=ram) as lab:
        [object_id], [data] = objects(lab.origin, count=1)
        assert await lab.read(object_id) == data
        await lab.quiet()
        obj = lab.store.object(object_id)
        obj.close_files()
        real_open = os.open

        def no_open(path: object, *args: int, **kwargs: int) -> int:
            if "/objects/" in str(path):
                raise OSError(number, os.strerror(number))
            return real_open(path, *args, **kwargs)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", no_open)
            assert await lab.store.read(obj, 0, len(data)) is None
            assert await lab.read(object_id) == data, "the origin's bytes"
        assert lab.store.cached_bytes(object_id) == len(data)
        fetched = lab.origin.delivered
        assert await lab.read(object_id) == data
        assert lab.origin.delivered == fetched


@in_trio
async def test_descriptors_running_out_cost_the_cache_not_the_reader(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir, ssd=8 * MIB) as lab:
        ids, data = objects(lab.origin, count=8)
        await read_everything(lab, ids[:4], data[:4])
        real_open, real_dup = os.open, os.dup

        def no_open(path: object, *args: int, **kwargs: int) -> int:
            if "/objects/" in str(path):
                raise OSError(errno.EMFILE, "Too many open files")
            return real_open(path, *args, **kwargs)  # type: ignore[arg-type]

        def no_dup(fd: int) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(os, "open", no_open)
        await read_everything(lab, ids, data)
        monkeypatch.setattr(os, "open", real_open)
        monkeypatch.setattr(os, "dup", no_dup)
        await read_everything(lab, ids, data)
        monkeypatch.setattr(os, "dup", real_dup)
        await read_everything(lab, ids, data)
        await lab.quiet()
        lab.check_accounts()
        assert len(cache_files(cache_dir)) <= 8

"""The RAM tier's directory: a tmpfs of its own where that can be mounted, else /dev/shm; and nothing left of either."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.base.linux import Mount, mount_at
from cachefs.store import ram, scrub
from cachefs.store.tier import HUGE_PAGE
from tests.conftest import ROOT
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store.lab import (
    BLOCK,
    EXTENT,
    MIB,
    Lab,
    as_kill_leaves_it,
    begin_write,
    cache_files,
    du,
    running,
    until,
)
from tests.store.test_passthrough import Backend, kill


def may_mount() -> bool:
    place = ram.OWN / f"may-mount-{os.getpid()}"
    try:
        ram._own(place, MIB)
    except OSError:
        return False
    finally:
        ram.take_away(place)
    return True


mounts = pytest.mark.skipif(not may_mount(), reason="root with CAP_SYS_ADMIN mounts a tmpfs")
HUGE_BLOCK = 1 * MIB


@pytest.fixture
def huge(monkeypatch: pytest.MonkeyPatch) -> None:
    """As daemons have it."""
    monkeypatch.setattr(ram, "HUGE", "huge=within_size")
    monkeypatch.setattr(ram, "HUGE_FROM_BYTES", 0)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function: from now on mount(2) fails so."""

    def refuse(code: int) -> None:
        def fail(path: Path, flags: int, options: str) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(ram, "_mount", fail)

    return refuse


def mounted(cache_dir: Path) -> Mount | None:
    return mount_at(ram.own_directory(cache_dir))


def size_of(path: Path) -> int:
    stats = os.statvfs(path)
    return stats.f_blocks * stats.f_frsize


def taken(path: Path) -> int:
    stats = os.statvfs(path)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


async def filled(lab: Lab, count: int = 8, size: int = 3 * BLOCK + 5) -> dict[object, bytes]:
    data = {lab.origin.put(f"k{i}", d): d for i in range(count) for d in [content(i, size)]}
    await compare(lab, data)
    await lab.quiet()
    return data  # type: ignore[return-value]


async def compare(lab: Lab, data: dict[object, bytes]) -> None:
    for object_id, d in data.items():
        assert await lab.read(object_id) == d  # type: ignore[arg-type]


# -- its own -------------------------------------------------------------------------------------------


@mounts
@in_trio
async def test_it_is_a_private_tmpfs_of_the_size_of_the_cap(
    cache_dir: Path, huge: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="cachefs"):
        async with running(cache_dir, ram=32 * MIB) as lab:
            place = lab.store.tiers[0].path
            assert place == ram.own_directory(cache_dir) == ram.ram_directory(cache_dir)
            found = mounted(cache_dir)
            assert found is not None and found.fstype == "tmpfs"
            assert {"nosuid", "nodev", "huge=within_size", "mode=700"} <= set(found.options)
            assert "noexec" not in found.options
            assert size_of(place) == 32 * MIB + ram.SLACK_BYTES
            assert place.stat().st_uid == 0 and place.stat().st_mode & 0o777 == 0o700
            assert [p.stat().st_mode & 0o022 for p in (place.parent, place.parent.parent)] == [0, 0]
            await filled(lab)
            assert not ram.shared_directory(cache_dir).exists()
            assert lab.store.tiers[0].limit_bytes() == 32 * MIB
            assert lab.opened.warnings == []
    assert str(place) in caplog.text and "within_size" in caplog.text
    assert mounted(cache_dir) is None
    assert not place.exists()


@mounts
@in_trio
async def test_a_program_in_it_can_be_run(cache_dir: Path) -> None:
    async with running(cache_dir, ram=4 * MIB) as lab:
        program = lab.store.tiers[0].path / "true"
        shutil.copy("/bin/true", program)
        assert subprocess.run([program]).returncode == 0  # noqa: ASYNC221
        program.unlink()


@mounts
@in_trio
async def test_without_huge_pages_in_the_kernel_it_is_mounted_without(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram, "HUGE", "huge=no-such-thing")
    monkeypatch.setattr(ram, "HUGE_FROM_BYTES", 0)
    async with running(cache_dir, ram=4 * MIB) as lab:
        assert lab.store.tiers[0].path == ram.own_directory(cache_dir)
        await compare(lab, await filled(lab))
        lab.check_accounts()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENODEV, errno.ENOMEM])
@in_trio
async def test_where_it_may_not_mount_it_lies_in_shared_memory(
    cache_dir: Path, refused: Callable[[int], None], caplog: pytest.LogCaptureFixture, code: int
) -> None:
    refused(code)
    with caplog.at_level(logging.INFO, logger="cachefs"):
        async with running(cache_dir, ram=4 * MIB) as lab:
            place = lab.store.tiers[0].path
            assert place == ram.shared_directory(cache_dir) == ram.ram_directory(cache_dir)
            assert not ram.own_directory(cache_dir).exists()
            await compare(lab, await filled(lab))
            lab.check_accounts()
            assert lab.opened.warnings == []
    assert str(place) in caplog.text
    assert not place.exists()


@mounts
@in_trio
async def test_a_place_that_others_can_write_to_is_not_taken(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram, "OWN", tmp_path / "run" / "ram")
    (tmp_path / "run" / "ram").mkdir(parents=True)
    (tmp_path / "run" / "ram").chmod(0o777)
    async with running(cache_dir, ram=4 * MIB) as lab:
        assert lab.store.tiers[0].path == ram.shared_directory(cache_dir)


@mounts
@in_trio
async def test_a_small_tier_has_small_pages_and_huge_ones_once_it_is_large(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram, "HUGE", "huge=within_size")
    for cap, huge in ((ram.HUGE_FROM_BYTES - 1, False), (ram.HUGE_FROM_BYTES, True), (MIB, False)):
        async with running(cache_dir, ram=cap) as lab:
            found = mounted(cache_dir)
            assert found is not None and ("huge=within_size" in found.options) is huge
            kill(lab)


# -- after a daemon that was killed --------------------------------------------------------------------


@mounts
@in_trio
async def test_its_blocks_survive_a_kill(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    async with running(cache_dir, origin, ram=8 * MIB, ssd=0) as lab:
        data = await filled(lab)
        await lab.store.flush()
        kill(lab)
    assert cache_files(ram.own_directory(cache_dir))
    before = mounted(cache_dir)
    fetched = origin.delivered
    async with running(cache_dir, origin, ram=8 * MIB, ssd=0) as lab:
        assert mounted(cache_dir) == before
        await scrub(lab.store)
        await compare(lab, data)
        assert origin.delivered == fetched
        lab.check_accounts()
    assert mounted(cache_dir) is None


CHILD = """
import sys, time, trio
from pathlib import Path
from tests.fetch.scripted import content
from tests.store.lab import MIB, running
async def main():
    async with running(Path(sys.argv[1]), ram=8 * MIB) as lab:
        for i in range(4):
            await lab.read(lab.origin.put(f"k{i}", content(i, 200_000)))
        await lab.store.flush()
        print("ready", flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


@mounts
@in_trio
async def test_a_real_kill_leaves_it_mounted_and_the_next_start_has_it(cache_dir: Path) -> None:
    child = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", CHILD, cache_dir], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    async with running(cache_dir, ram=8 * MIB) as lab:
        for i in range(4):
            assert await lab.read(lab.origin.put(f"k{i}", content(i, 200_000))) == content(i, 200_000)
        assert lab.origin.delivered == 0
        assert lab.metrics.ram_hits


@mounts
@pytest.mark.parametrize("cap", [4 * MIB, 16 * MIB])
@in_trio
async def test_another_cap_is_another_size(cache_dir: Path, cap: int) -> None:
    origin = ScriptedOrigin()
    async with running(cache_dir, origin, ram=8 * MIB, ssd=0) as lab:
        data = await filled(lab)
        await lab.store.flush()
        kill(lab)
    fetched = origin.delivered
    async with running(cache_dir, origin, ram=cap, ssd=0) as lab:
        assert size_of(lab.store.tiers[0].path) == cap + ram.SLACK_BYTES
        found = mounted(cache_dir)
        assert found is not None and {"nosuid", "nodev"} <= set(found.options)
        assert lab.store.tiers[0].limit_bytes() == cap
        await compare(lab, data)
        assert origin.delivered == fetched


@mounts
@in_trio
async def test_what_holds_more_than_the_new_cap_is_evicted_down_to_it(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    async with running(cache_dir, origin, ram=8 * MIB, ssd=0) as lab:
        data = await filled(lab, count=30)
        assert lab.used() > 5 * MIB
        await lab.store.flush()
        kill(lab)
    async with running(cache_dir, origin, ram=2 * MIB, ssd=0, background=True) as lab:
        tier = lab.store.tiers[0]
        await until(lambda: tier.used_bytes <= 2 * MIB, 5)
        assert tier.used_bytes <= 2 * MIB
        await compare(lab, data)
        await lab.quiet()
        assert tier.used_bytes <= tier.limit_bytes() <= 2 * MIB
        assert taken(tier.path) <= 2 * MIB + ram.SLACK_BYTES
        lab.check_accounts()


@mounts
@pytest.mark.parametrize("left_in", ["own", "shared"])
@in_trio
async def test_without_a_ram_tier_nothing_stays_of_a_killed_one(
    cache_dir: Path, left_in: str, request: pytest.FixtureRequest
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if left_in == "shared":
            patch.setattr(ram, "_own", no_rights)
        async with running(cache_dir, ram=8 * MIB) as lab:
            await filled(lab)
            kill(lab)
    place = ram.ram_directory(cache_dir)
    assert cache_files(place)
    async with running(cache_dir, ram=0):
        await until(lambda: not place.exists())
        assert not place.exists()
        assert mounted(cache_dir) is None


def no_rights(path: Path, cap_bytes: int) -> str:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@mounts
@in_trio
async def test_what_lies_in_the_other_place_goes(cache_dir: Path) -> None:
    own, shared = ram.own_directory(cache_dir), ram.shared_directory(cache_dir)
    origin = ScriptedOrigin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ram, "_own", no_rights)
        async with running(cache_dir, origin, ram=8 * MIB, ssd=0) as lab:
            data = await filled(lab)
            kill(lab)
    assert cache_files(shared)
    async with running(cache_dir, origin, ram=8 * MIB, ssd=0) as lab:
        assert lab.store.tiers[0].path == own
        await until(lambda: not shared.exists())
        assert not shared.exists()
        await compare(lab, data)
        await lab.quiet()
        lab.check_accounts()
        kill(lab)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ram, "_own", no_rights)
        async with running(cache_dir, origin, ram=8 * MIB, ssd=0) as lab:
            assert lab.store.tiers[0].path == shared
            assert mounted(cache_dir) is None and not own.exists()
            await compare(lab, data)


@mounts
@in_trio
async def test_a_mount_that_is_not_there_any_more_has_no_blocks(cache_dir: Path) -> None:
    """As in another mount namespace, or after a reboot."""
    origin = ScriptedOrigin()
    async with running(cache_dir, origin, ram=8 * MIB, ssd=0) as lab:
        data = await filled(lab)
        await lab.store.flush()
        kill(lab)
    ram._unmount(ram.own_directory(cache_dir))
    async with running(cache_dir, origin, ram=8 * MIB, ssd=0) as lab:
        assert lab.used() == 0
        await compare(lab, data)
        await lab.quiet()
        lab.check_accounts()
        assert lab.metrics.checksum_failures == 0


@mounts
@in_trio
async def test_nothing_is_written_below_a_mount_that_somebody_took_away(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        data = await filled(lab)
        place = lab.store.tiers[0].path
        ram._unmount(place)
        await compare(lab, data)
        for i in range(20, 40):
            d = content(i, 2 * BLOCK)
            assert await lab.read(lab.origin.put(f"k{i}", d)) == d
        assert cache_files(place) == []
        assert lab.store.tiers[0].state != "normal"
        assert lab.store.tiers[1].state == "normal"


@mounts
@in_trio
async def test_two_caches_do_not_disturb_one_another(cache_dir: Path) -> None:
    other = cache_dir.with_name("cache-other")
    async with running(cache_dir, ram=8 * MIB, ssd=0) as lab:
        data = await filled(lab)
        async with running(other, ram=4 * MIB, ssd=0) as second:
            assert second.store.tiers[0].path != lab.store.tiers[0].path
            await filled(second)
        assert mounted(other) is None
        fetched = lab.origin.delivered
        await compare(lab, data)
        assert lab.origin.delivered == fetched


@mounts
@in_trio
async def test_remove_ram_takes_both_away(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        await filled(lab)
        copy = as_kill_leaves_it(cache_dir, cache_dir.with_name("cache-copy"))
    assert cache_files(ram.own_directory(copy))
    shared = ram.shared_directory(copy)
    (shared / "index").mkdir(parents=True)
    ram.remove_ram(copy)
    assert mounted(copy) is None
    assert not shared.exists() and not ram.own_directory(copy).exists()
    ram.remove_ram(copy)  # nothing is there: nothing happens


# -- at a stop -----------------------------------------------------------------------------------------


@mounts
@in_trio
async def test_a_mapping_of_a_passthrough_file_outlives_the_mount(cache_dir: Path, huge: None) -> None:
    async with running(cache_dir, ram=16 * MIB) as lab:
        data = await filled(lab, count=2, size=4 * EXTENT + 77)
        backend = Backend(lab)
        passthrough = [backend.open_backing(object_id, d) for object_id, d in data.items()]  # type: ignore[arg-type]
        assert all(passthrough)
        place = lab.store.tiers[0].path
        free = os.open(place, os.O_RDONLY)
        for backing in passthrough:
            assert backing is not None
            lab.store.release_backing(backing)
    assert mounted(cache_dir) is None and not place.exists()
    backend.check()
    assert taken_of(free) > 0
    for mapping, _ in backend.maps:
        mapping.close()
    assert taken_of(free) == 0, "the memory goes with the last mapping"
    os.close(free)


def taken_of(fd: int) -> int:
    stats = os.statvfs(fd)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


# -- its size ------------------------------------------------------------------------------------------


@mounts
@in_trio
async def test_single_blocks_at_random_take_less_room_than_counted_or_go_elsewhere(
    cache_dir: Path, huge: None
) -> None:
    """A page of 2 MiB lies under a block of 1: the kernel's count is the cap, and nobody notices but the hit rate."""
    rng = random.Random(3)
    cap, size = 24 * MIB, 40 * MIB
    async with running(cache_dir, ram=cap, ssd=200 * MIB, block=HUGE_BLOCK, background=True) as lab:
        data = content(1, size)
        object_id = lab.origin.put("k", data)
        blocks = list(range(size // HUGE_BLOCK))
        rng.shuffle(blocks)
        tier = lab.store.tiers[0]
        more = 0
        for block in blocks:
            start = block * HUGE_BLOCK
            assert await lab.read(object_id, start, 4096) == data[start : start + 4096]
            await lab.quiet()
            assert tier.used_bytes <= cap
            assert taken(tier.path) <= cap + ram.SLACK_BYTES
            more = max(more, du(tier.path)[0] - tier.used_bytes)
        assert more > 0, "no huge page was seen: this tests nothing"
        assert tier.state == "normal"
        assert lab.metrics.checksum_failures == 0
        fetched = lab.origin.delivered
        assert await lab.read(object_id) == data
        await lab.quiet()
        # Nearly all that RAM did not take is in the other tier; a block or two are dropped while the limit sinks.
        assert lab.origin.delivered - fetched <= 4 * HUGE_BLOCK


@mounts
@in_trio
async def test_the_other_half_of_a_huge_page_goes_with_its_block(cache_dir: Path, huge: None) -> None:
    async with running(cache_dir, ram=32 * MIB, block=HUGE_BLOCK) as lab:
        object_id = lab.origin.put("k", content(1, 40 * MIB))
        tier, obj = lab.store.tiers[0], lab.store.object(object_id)
        before = taken(tier.path)
        for block in (2, 5, 20):
            await lab.read(object_id, block * HUGE_BLOCK, 4096)
        await lab.quiet()
        pages = 3 * 2 * HUGE_BLOCK
        assert taken(tier.path) - before == pages, "no huge page was seen: this tests nothing"
        catalog, room = lab.store.catalog, lab.store.space
        first, second = catalog.copies(obj, tier.number)
        room.drop(obj, first, 1 << 5)
        # Both halves of its own page, and the empty one of the other page, which is no huge one any more.
        assert (tier.used_bytes, taken(tier.path) - before) == (2 * HUGE_BLOCK, 3 * HUGE_BLOCK)
        room.drop(obj, first, first.bitmap)
        assert (tier.used_bytes, taken(tier.path) - before) == (HUGE_BLOCK, 2 * HUGE_BLOCK)
        assert catalog.copies(obj, tier.number) == [second]


@mounts
@pytest.mark.parametrize("ssd", [0, 64 * MIB])
@in_trio
async def test_a_tmpfs_smaller_than_the_cap_says_is_full_not_sick(cache_dir: Path, ssd: int) -> None:
    async with running(cache_dir, ram=16 * MIB, ssd=ssd) as lab:
        tier = lab.store.tiers[0]
        hog = tier.path / "hog"
        hog.write_bytes(bytes(12 * MIB))
        data = await filled(lab, count=40)
        await compare(lab, data)
        await lab.quiet()
        assert tier.state == "normal"
        assert 0 < tier.used_bytes <= 4 * MIB + ram.SLACK_BYTES
        lab.check_accounts()
        hog.unlink()


@mounts
@in_trio
async def test_pages_are_huge_where_a_file_is_filled_in_order(cache_dir: Path, huge: None) -> None:
    """And exactly what is counted is taken."""
    async with running(cache_dir, ram=32 * MIB, block=HUGE_BLOCK, readahead=8 * MIB) as lab:
        data = content(1, 16 * MIB)
        object_id = lab.origin.put("k", data)
        for start in range(0, len(data), HUGE_BLOCK):
            assert await lab.read(object_id, start, HUGE_BLOCK) == data[start : start + HUGE_BLOCK]
        await lab.quiet()
        tier = lab.store.tiers[0]
        assert du(tier.path)[0] == tier.used_bytes == len(data)
        share = huge_share(cache_files(tier.path)[0])
        assert share > 0.8, f"{share:.0%} of the pages are huge"


def huge_share(path: Path) -> float:
    """The part of a file's pages that are of huge ones (`KPF_THP`), as /proc/kpageflags says."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    count = len(mapping) // 4096
    _ = sum(memoryview(mapping)[::4096])
    with open("/proc/self/maps") as maps:
        address = next(int(line.split("-")[0], 16) for line in maps if str(path) in line)
    huge = 0
    try:
        with open("/proc/self/pagemap", "rb", 0) as pagemap, open("/proc/kpageflags", "rb", 0) as flags:
            for page in range(count):
                pagemap.seek((address // 4096 + page) * 8)
                frame = int.from_bytes(pagemap.read(8), "little") & (1 << 55) - 1
                flags.seek(frame * 8)
                huge += int.from_bytes(flags.read(8), "little") >> 22 & 1
    except OSError:
        pytest.skip("no /proc/kpageflags")
    return huge / count


@in_trio
async def test_a_file_that_came_at_once_can_be_read_before_its_transfer_ends(cache_dir: Path) -> None:
    async with running(cache_dir, ram=4 * MIB) as lab:
        data = content(1, BLOCK // 2)
        obj = lab.store.object(lab.origin.put("k", data))
        woken: list[int] = []
        with obj.held():
            cache_write = begin_write(lab.store, obj, 0, 1, prefetched=True)
            assert cache_write is not None
            cache_write.on_written = lambda: woken.append(1)
            cache_write.wake_at = 1
            cache_write.write(data)
            assert cache_write.read(5, 100) == data[5:105]
            lab.store.end_write(obj, cache_write)
            assert lab.store.read_now(obj, 0, len(data)) == data
        assert not woken  # the end of the transfer wakes its readers
        assert lab.store.catalog._loaded == 1


@in_trio
async def test_a_file_that_may_not_be_as_large_as_its_version_is_not_left_open(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a limit on the size of files (ulimit -f). The fixture `closed` counts descriptors."""

    def too_large(fd: int, size: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    async with running(cache_dir, ssd=0, ram=8 * MIB) as lab:
        data = content(1, HUGE_PAGE + 1)
        object_id = lab.origin.put("k", data)
        (tier,) = lab.store.tiers
        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", too_large)
            assert await lab.read(object_id) == data
        await lab.quiet()
        assert tier.last_error == os.strerror(errno.EFBIG)
        lab.check_accounts()


@in_trio
async def test_a_file_in_the_way_of_a_small_version_goes(cache_dir: Path) -> None:
    """What a crash left: immutable, and without a row."""
    async with running(cache_dir, ram=4 * MIB) as lab:
        data = content(1, BLOCK // 2)
        object_id = lab.origin.put("k", data)
        (tier,) = (tier for tier in lab.store.tiers if not tier.blocking)
        os.close(tier.open_for_writing(object_id.digest, 0, known=False))
        os.close(tier.make_immutable(object_id.digest, 0))
        assert await lab.read(object_id) == data
        assert await lab.read(object_id) == data
        assert len(lab.origin.gets) <= 2


@pytest.mark.parametrize("cap, own", [(32 * BLOCK, False), (0, False), (32 * BLOCK, True)])
@in_trio
async def test_a_tier_that_another_daemon_has_is_left_to_it(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, cap: int, own: bool
) -> None:
    """Two cache directories have one path in two mount namespaces, as with a /tmp of each job, and share /dev/shm."""
    monkeypatch.setattr(ram, "LOOK_S", 0.0)
    monkeypatch.setattr(ram, "_name", lambda cache_dir: f"cachefs-{os.getuid()}-{'0' * 12}")
    mount = ram._own

    def refused(path: Path, cap_bytes: int) -> str:
        raise PermissionError(errno.EPERM, "only root can mount")

    try:
        monkeypatch.setattr(ram, "_own", refused)
        async with running(cache_dir, ssd=0, ram=32 * BLOCK) as lab:
            object_id = lab.origin.put("k", content(1, BLOCK))
            await lab.read(object_id)
            await lab.quiet()
            (tier,) = lab.store.tiers
            assert tier.path.parent == ram.SHM
            if own:
                monkeypatch.setattr(ram, "_own", mount)
            async with running(cache_dir.with_name("other"), ssd=0, ram=cap) as other:
                assert [one.name for one in other.store.tiers] == ["ram"] * own
                assert any("another daemon" in line for line in other.opened.warnings) is bool(
                    cap and not own
                )
            assert tier.file_path(object_id.digest).exists() and tier.state == "normal"
            assert await lab.read(object_id) == content(1, BLOCK)
            assert len(lab.origin.gets) == 1
    finally:
        ram.remove_ram(cache_dir)

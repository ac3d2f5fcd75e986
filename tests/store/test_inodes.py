"""Inodes are counted as bytes are: the cache leaves a share of its disk's to others, and gives way when they take more."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachefs.base.names import BLOCKS_PER_EXTENT
from cachefs.store.tier import SSD, Tier
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, MIB, Lab, cache_files, running

INODES = 1200


class Disk:
    """What statvfs says of a disk of 1 GiB; `taken` of its inodes are others'."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
        self.inodes, self.taken = 100, 0
        self._place = cache_dir
        monkeypatch.setattr(os, "statvfs", self._say)

    def make_folders(self) -> None:
        """They are not counted, so that a test can say how many files there will be."""
        for number in range(256):
            (self._place / "objects" / f"{number:02x}").mkdir()

    @property
    def free(self) -> int:
        return self.inodes - self.taken - len(cache_files(self._place))

    def _say(self, _: object) -> SimpleNamespace:
        free = self.free if self.inodes else 0
        return SimpleNamespace(
            f_bavail=1 << 18, f_blocks=1 << 18, f_frsize=4096, f_files=self.inodes, f_favail=free
        )


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> Disk:
    return Disk(monkeypatch, cache_dir)


KEEP_FREE = (1 << 30) // 10


async def read_small(lab: Lab, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        data = content(number, 1000)
        assert await lab.read(lab.origin.put(f"small{number}", data)) == data
    await lab.quiet()


@in_trio
async def test_the_share_that_stays_free_of_bytes_stays_free_of_inodes(cache_dir: Path, disk: Disk) -> None:
    async with running(cache_dir, keep_free=KEEP_FREE) as lab:
        disk.make_folders()
        await read_small(lab, 150)
        assert disk.free == 10 and lab.metrics.evicted_blocks == 60
        lab.check_accounts()
        assert lab.metrics.tier_errors == 0


@in_trio
async def test_the_cache_gives_way_to_others(cache_dir: Path, disk: Disk) -> None:
    async with running(cache_dir, keep_free=KEEP_FREE) as lab:
        disk.make_folders()
        await read_small(lab, 80)
        disk.taken = 50
        lab.store.tiers[0]._free_read_again_at = 0.0
        await read_small(lab, 1, first=1000)
        assert disk.free == 10
        disk.taken = 100  # none is left, whatever goes
        lab.store.tiers[0]._free_read_again_at = 0.0
        await read_small(lab, 5, first=2000)
        assert not cache_files(cache_dir) and lab.used() == 0


@in_trio
async def test_for_an_inode_a_whole_file_goes(cache_dir: Path, disk: Disk) -> None:
    disk.inodes = 20
    async with running(cache_dir, keep_free=KEEP_FREE) as lab:
        disk.make_folders()
        large = lab.origin.put("large", content(1, 3 * EXTENT + BLOCK))
        await lab.read(large)
        await read_small(lab, 30)
        assert disk.free == 2
        assert not lab.store.tiers[0].file_path(large.digest).exists()
        lab.check_accounts()


@in_trio
async def test_for_an_inode_no_other_file_goes_than_the_first(cache_dir: Path, disk: Disk) -> None:
    """Though a part of that was used after the others."""
    disk.inodes = 20
    async with running(cache_dir, keep_free=KEEP_FREE) as lab:
        disk.make_folders()
        large = lab.origin.put("large", content(1, 3 * EXTENT + BLOCK))
        await lab.read(large)
        await read_small(lab, 17)
        await lab.read(large, 3 * EXTENT, BLOCK)
        assert disk.free == 2 and lab.metrics.evicted_blocks == 0
        await read_small(lab, 1, first=100)
        assert lab.store.cached_bytes(large) == 0 and len(cache_files(cache_dir)) == 18
        assert lab.metrics.evicted_blocks == 3 * BLOCKS_PER_EXTENT + 1


@in_trio
async def test_a_file_system_that_counts_no_inodes_is_not_limited(cache_dir: Path, disk: Disk) -> None:
    disk.inodes = 0
    async with running(cache_dir, keep_free=KEEP_FREE) as lab:
        disk.make_folders()
        await read_small(lab, 150)
        assert len(cache_files(cache_dir)) == 150


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    options = f"size=64m,nr_inodes={INODES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "inodes", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@in_trio
async def test_a_real_disk_never_runs_out_of_inodes(small_disk: Path) -> None:
    async with running(small_disk / "cache", keep_free=64 * MIB // 10) as lab:
        await read_small(lab, INODES + 300)
        about = os.statvfs(small_disk)
        assert about.f_favail > 0.05 * INODES  # but for directories made since the last look
        assert len(cache_files(small_disk / "cache")) > INODES // 10
        lab.check_accounts()
        assert lab.metrics.tier_errors == 0
    again = Tier(SSD, small_disk / "cache", MIB, keep_free_bytes=0, clock=lambda: 0.0)
    assert again.takes_files

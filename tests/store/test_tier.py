"""A tier alone: what it may take, whether it works, and what its files are."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from cachefs.base.tasks import RETRY_S
from cachefs.store import store, tier
from cachefs.store.tier import (
    FREE_MEMORY_EVERY_S,
    FREE_SPACE_EVERY_S,
    RAM,
    SSD,
    Tier,
    allocated,
)
from tests.fetch.scripted import content, in_trio
from tests.store.counters import rows
from tests.store.lab import BLOCK, cache_files, running, until

CAP, KEPT = 1000 * 4096, 100 * 4096
DIGEST, OTHER = bytes(16), b"\x01" * 16


class Disk:
    """What `statvfs` says, how often it was asked, and what time it is."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.free, self.files, self.free_files = 5000, 1000, 1000
        self.now, self.asked, self.fails = 0.0, 0, 0

        def statvfs(path: Any) -> Any:
            self.asked += 1
            if self.fails:
                raise OSError(self.fails, os.strerror(self.fails))
            return SimpleNamespace(
                f_bavail=self.free,
                f_frsize=4096,
                f_blocks=10_000,
                f_files=self.files,
                f_favail=self.free_files,
            )

        patch.setattr(os, "statvfs", statvfs)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(tier.Disposal, "_begin", lambda self: None)  # nothing goes before a test has it go
    return Disk(monkeypatch)


@pytest.fixture
def make(tmp_path: Path, there: Disk) -> Callable[..., Tier]:
    def made(number: int = SSD, cap: int = CAP, kept: int = KEPT) -> Tier:
        return Tier(
            number,
            tmp_path / "tier",
            cap,
            keep_free_bytes=kept,
            clock=lambda: there.now,
        )

    return made


def test_sizes_on_disk_are_whole_pages() -> None:
    assert [allocated(n) for n in (0, 1, 4095, 4096, 4097, 8192)] == [0, 4096, 4096, 4096, 8192, 8192]


@pytest.mark.parametrize(
    "free, used, here, limit",
    [
        (5000, 0, 0, 1000),  # the cap
        (1100, 0, 0, 1000),  # exactly the cap beside what is kept free
        (1099, 0, 0, 999),
        (100, 0, 0, 0),
        (50, 0, 0, 0),  # not below nothing
        (100, 300, 0, 300),  # what it has it may keep
        (50, 300, 0, 250),
        (100, 300, 7, 307),  # bytes that the disk has already
    ],
)
def test_the_limit_is_what_the_disk_has_to_give(
    make: Callable[..., Tier], there: Disk, free: int, used: int, here: int, limit: int
) -> None:
    one, there.free = make(), free
    one.reserve(used * 4096)
    assert one.limit_bytes(here * 4096) == limit * 4096
    assert one.spare_bytes() == (free - 100) * 4096


@pytest.mark.parametrize("number, every", [(SSD, FREE_SPACE_EVERY_S), (RAM, FREE_MEMORY_EVERY_S)])
def test_the_disk_is_asked_now_and_then(
    make: Callable[..., Tier], there: Disk, number: int, every: float
) -> None:
    one, there.free = make(number), 600
    assert one.limit_bytes() == 500 * 4096 and one.limit_bytes() == 500 * 4096 and there.asked == 1
    one.reserve(10 * 4096)  # it comes out of the same free space
    there.free, there.now = 700, every * 0.99
    assert one.limit_bytes() == 500 * 4096 and there.asked == 1
    there.now = every
    assert one.limit_bytes() == 610 * 4096 and there.asked == 2
    there.fails, there.now = errno.EIO, 2 * every
    assert one.limit_bytes() == 610 * 4096 and one.state == "unstable", "it goes on with the last answer"


def test_a_full_disk_gives_no_more_until_it_is_asked_again(make: Callable[..., Tier], there: Disk) -> None:
    one = make()
    one.reserve(30 * 4096)
    one.failed(OSError(errno.ENOSPC, "full"))
    assert one.limit_bytes() == 30 * 4096 and one.state == "normal" and there.asked == 0
    one.failed(OSError(errno.ENOSPC, "full"), 10 * 4096)  # so many of them were reserved for what failed
    assert one.limit_bytes() == 20 * 4096
    there.now = FREE_SPACE_EVERY_S
    assert one.limit_bytes() == CAP


@pytest.mark.parametrize(
    "files, free_files, going, takes",
    [
        (1000, 11, 0, True),  # a hundredth of the disk is kept free, so ten inodes are
        (1000, 10, 0, False),
        (1000, 10, 1, True),  # one is on its way out
        (1000, 0, tier.GOING_FILES + 1, True),
        (1000, 10 - tier.GOING_FILES, tier.GOING_FILES + 1, False),  # ... but no more than so many count
        (0, 0, 0, True),  # a file system that makes inodes as it needs them
    ],
)
def test_files_need_inodes(
    make: Callable[..., Tier], there: Disk, files: int, free_files: int, going: int, takes: bool
) -> None:
    one = make()
    there.files, there.free_files = files, free_files
    one.disposal.going_files = going
    assert one.takes_files is takes


def test_files_that_come_and_go_are_counted_between_two_answers(
    make: Callable[..., Tier], there: Disk
) -> None:
    one = make()
    assert one.takes_files
    there.free_files, there.now = 13, FREE_SPACE_EVERY_S
    assert one.takes_files and one._free_files == 3
    fd = one.new_file(DIGEST, 1)
    assert fd is not None and one._free_files == 1, "a file and its directory"
    os.close(fd)
    assert one.new_file(DIGEST, 1) is None and one._free_files == 1
    one.unlink(DIGEST, 4096)
    assert one._free_files == 2 and one.disposal.pending(DIGEST)
    one.disposal._work(0.0)
    assert not one.file_path(DIGEST).exists() and not one.disposal.pending(DIGEST)


def test_what_is_on_its_way_out_counts_beyond_the_first_of_it(make: Callable[..., Tier]) -> None:
    one = make(cap=2 * tier.GOING_SHARE * tier.GOING_BYTES)
    one.reserve(4096)
    free = 2 * tier.GOING_BYTES  # a share of the cap, if that is more
    for going, counted in ((0, 0), (1, 0), (free, 0), (free + 4096, 4096)):
        one.disposal.going_bytes = going
        assert one.counted_bytes() == 4096 + counted
    small = make(cap=4096)
    small.disposal.going_bytes = tier.GOING_BYTES + 7
    assert small.counted_bytes() == 7


def test_a_directory_that_was_removed_is_said_to_be(
    make: Callable[..., Tier], there: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    one = make()
    shutil.rmtree(one.path)
    there.now = FREE_SPACE_EVERY_S
    one.limit_bytes()
    assert one.state == "removed" and one.writable()
    os.close(one.open_for_writing(b"d" * 16, 4096, known=False))
    there.now = 2 * FREE_SPACE_EVERY_S
    one.limit_bytes()
    assert one.state == "removed", "what is there now is lost when the mount ends"
    assert caplog.text.count("was removed while it is in use") == 1


def test_three_errors_without_a_success_are_down(make: Callable[..., Tier], there: Disk) -> None:
    one = make()
    states = []
    for _ in range(4):
        states.append((one.state, one.writable()))
        one.failed(OSError(errno.EIO, "broken"))
    assert states == [("normal", True), ("unstable", False), ("unstable", False), ("down", False)]
    assert (one.errors_in_a_row, one.last_error) == (4, os.strerror(errno.EIO))
    there.now = RETRY_S - 0.1
    assert not one.writable()
    there.now = RETRY_S
    assert one.writable() and one.state == "down", "a write tries it again"
    one.worked()
    assert one.state == "normal" and one.writable()
    one.failed(FileNotFoundError(errno.ENOENT, "gone"))
    one.failed(OSError(errno.EDQUOT, "quota"))
    assert one.state == "normal", "neither is a failure of the disk"
    one.disk.down = True
    assert one.state == "down" and not one.writable()


def test_bytes_are_reserved_and_freed(make: Callable[..., Tier], there: Disk) -> None:
    one = make()
    seen = []
    for change, count in (("reserve", 50), ("freed", 25)):
        getattr(one, change)(count)
        seen.append((one.used_bytes, one.unlisted_bytes))
    assert seen == [(50, 50), (25, 25)]
    one.remote_owned_bytes = 5
    assert one.own_bytes == 20
    there.free = 200
    assert one.limit_bytes() == 100 * 4096 + 25
    one.reserve(4096, 1000)
    assert (one.used_bytes, one.unlisted_bytes) == (4121, 4121)
    assert one.limit_bytes() == 100 * 4096 + 25 + 1000, "so much of it comes out of no free space"


def test_an_immutable_file_is_opened_for_reading_only(make: Callable[..., Tier]) -> None:
    one = make()
    fd = one.new_file(DIGEST, 5)
    assert fd is not None
    os.write(fd, b"12345")
    os.close(fd)
    path = one.file_path(DIGEST)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and not one.immutable(DIGEST)
    before = len(os.listdir("/proc/self/fd"))
    for size in (4, 6):
        with pytest.raises(OSError) as refused:
            one.make_immutable(DIGEST, size)
        assert refused.value.errno == errno.EINVAL and not one.immutable(DIGEST)
    for _ in range(2):
        fd = one.make_immutable(DIGEST, 5)
        assert os.pread(fd, 9, 0) == b"12345" and not os.get_inheritable(fd)
        with pytest.raises(OSError):
            os.write(fd, b"x")
        os.close(fd)
    assert one.immutable(DIGEST) and stat.S_IMODE(path.stat().st_mode) == tier.IMMUTABLE
    with pytest.raises(OSError) as refused:
        one.open_for_writing(DIGEST, 1, known=True)
    assert refused.value.errno == errno.EROFS
    assert not one.immutable(OTHER)
    with pytest.raises(FileNotFoundError):
        one.open_for_writing(OTHER, 1, known=True)
    os.close(one.open_for_writing(OTHER, 1, known=False))
    os.close(one.open_for_writing(OTHER, 1, known=True))
    assert len(os.listdir("/proc/self/fd")) == before
    one.unlink(DIGEST)
    assert not one.immutable(DIGEST), "it goes"


def test_a_file_that_was_written_becomes_a_versions(make: Callable[..., Tier], tmp_path: Path) -> None:
    one, written = make(), tmp_path / "tier" / "written"
    written.write_bytes(b"data")
    assert one.move_in(written, DIGEST) and one.immutable(DIGEST) and not written.exists()
    assert one.link(DIGEST, OTHER)
    path = one.file_path(OTHER)
    assert one.immutable(OTHER) and path.read_bytes() == b"data"
    with pytest.raises(FileExistsError):
        one.link(DIGEST, OTHER)
    with pytest.raises(FileNotFoundError):
        one.move_in(written, DIGEST)
    assert one.sync()


@pytest.mark.parametrize("tag", ["its own", "another", "empty", "none"])
@in_trio
async def test_a_directory_that_is_not_the_one_of_the_index_has_no_blocks(cache_dir: Path, tag: str) -> None:
    """A disk that was swapped, or was emptied."""
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, 3 * BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        origin, place = lab.origin, lab.store.tiers[0].path
    if tag == "none":
        (place / "tag").unlink()
    elif tag != "its own":
        (place / "tag").write_bytes(b"" if tag == "empty" else bytes(16))
    async with running(cache_dir, origin) as lab:
        known = tag == "its own"
        assert lab.store.cached_bytes(object_id) == (object_id.size if known else 0)
        assert len(cache_files(place)) == known
        assert (place / "tag").read_bytes() == lab.store.catalog._index.tag(SSD) not in (None, b"", bytes(16))
        assert await lab.read(object_id) == content(1, 3 * BLOCK)
        await lab.quiet()
        lab.check_accounts()


@in_trio
async def test_a_disk_that_hangs_is_noticed_while_the_store_runs(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "HANGS_AFTER_S", 0.0)
    async with running(cache_dir, background=True) as lab:
        [one] = lab.store.tiers
        noticed: list[bool] = []
        one.disk.on_down.append(lambda: noticed.append(True))
        with one.disk.busy():
            await until(lambda: bool(noticed), 10)
        assert noticed
        await until(lambda: not one.disk.down, 10)
        assert one.state == "normal", "it has answered"


@in_trio
async def test_the_index_is_written_now_and_then(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FLUSH_EVERY_S", 3600.0)
    async with running(cache_dir, background=True) as lab:
        flushes: list[bool] = []
        real = lab.store.flush

        async def flush(**how: bool) -> None:
            flushes.append(True)
            await real(**how)

        monkeypatch.setattr(lab.store, "flush", flush)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        assert not flushes
    monkeypatch.setattr(store, "FLUSH_EVERY_S", 0.001)
    async with running(cache_dir, background=True) as lab:
        await lab.read(lab.origin.put("k", bytes(BLOCK)))
        await until(lambda: len(rows(lab.store)) == 1, 10)
        assert len(rows(lab.store)) == 1


def test_a_kill_loses_what_came_in_a_second_and_the_disk_syncs_no_more_than_once_in_it() -> None:
    """A minute in which blocks come ten times a second, and a kill at any moment of it."""
    came: list[float] = []
    lost: list[int] = []
    syncs: list[float] = []

    async def flush() -> None:
        syncs.append(trio.current_time())
        came.clear()

    async def sleep() -> None:
        await trio.sleep_forever()

    stands_in: Any = SimpleNamespace(
        _moves=None, backing_files=SimpleNamespace(run=sleep), _watch_disks=sleep, tiers=[], flush=flush
    )

    async def main() -> None:
        with trio.move_on_after(60.5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.Store.run, stands_in)
                while True:
                    await trio.sleep(0.1)
                    came.append(trio.current_time())
                    lost.append(len(came))

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert max(lost) <= 11, "blocks of a second, and the one that comes at its end"
    assert len(syncs) <= 60

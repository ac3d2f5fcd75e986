"""A disk that hangs: calls that wait get an error, reads go to the origin, and it is used again when it answers."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.base import linux
from cachefs.store import tier
from cachefs.store.tier import Disk
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, Lab, running, until

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "HANGS_AFTER_S", 0.2)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is clear, nothing that opens or probes returns."""
    answers = threading.Event()
    answers.set()
    open_file, new_file, probe = tier.Tier.open_file, tier.Tier.new_file, tier._write_and_remove

    def slow_open(self: Any, *arguments: Any, **options: Any) -> int:
        assert answers.wait(PATIENCE_S)
        return open_file(self, *arguments, **options)

    def slow_new(self: Any, *arguments: Any) -> int | None:
        assert answers.wait(PATIENCE_S)
        return new_file(self, *arguments)

    def slow_probe(path: Path) -> None:
        assert answers.wait(PATIENCE_S)
        probe(path)

    monkeypatch.setattr(tier.Tier, "open_file", slow_open)
    monkeypatch.setattr(tier.Tier, "new_file", slow_new)
    monkeypatch.setattr(tier, "_write_and_remove", slow_probe)
    yield answers
    answers.set()


async def down(lab: Lab, is_down: bool = True) -> None:
    ssd = lab.store.tiers[-1]

    def look() -> bool:
        ssd.disk.look()
        return ssd.disk.down is is_down

    await until(look, PATIENCE_S)
    assert ssd.disk.down is is_down
    assert ssd.state == ("down" if is_down else "normal")
    assert ssd.writable() is not is_down


@in_trio
async def test_readers_of_a_transfer_that_cannot_be_written_get_their_bytes(
    cache_dir: Path, hang: threading.Event
) -> None:
    async with running(cache_dir) as lab:
        data = content(1, 3 * EXTENT)
        object_id = lab.origin.put("k", data)
        hang.clear()
        got: list[bytes] = []

        async def read(offset: int) -> None:
            got.append(await lab.read(object_id, offset, BLOCK))

        async with trio.open_nursery() as nursery:
            for offset in (0, BLOCK, 2 * EXTENT):
                nursery.start_soon(read, offset)
            await down(lab)
        assert sorted(got) == sorted(data[o : o + BLOCK] for o in (0, BLOCK, 2 * EXTENT))
        assert await lab.read(object_id, EXTENT, 5) == data[EXTENT : EXTENT + 5]
        assert lab.metrics.bypassed_blocks == 4
        hang.set()
        await lab.quiet()
        await down(lab, False)
        assert await lab.read(object_id) == data
        await lab.quiet()
        assert await lab.store.read(lab.store.object(object_id), 0, len(data)) == data
        assert lab.metrics.tier_errors == 0
        lab.check_accounts()


@in_trio
async def test_readers_of_what_lies_there_are_sent_to_the_origin(
    cache_dir: Path, hang: threading.Event
) -> None:
    """And nothing of it is lost, for it is there again afterwards."""
    async with running(cache_dir) as lab:
        data = content(1, 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        assert await lab.read(object_id) == data
        await lab.quiet()
        gets = len(lab.origin.gets)
        obj = lab.store.object(object_id)
        hang.clear()
        got: list[bytes] = []

        async def read() -> None:
            got.append(await lab.read(object_id))

        async with trio.open_nursery() as nursery:
            for _ in range(20):  # more than there are threads
                nursery.start_soon(read)
            await until(lambda: len(lab.store.tiers[-1].disk._calls) == tier.READ_THREADS, PATIENCE_S)
            await down(lab)
        assert got == [data] * 20
        assert obj.refs > 0  # the threads are still at it
        assert len(lab.origin.gets) > gets
        gets = len(lab.origin.gets)
        hang.set()
        await down(lab, False)
        await until(lambda: not obj.in_use(), PATIENCE_S)
        assert not obj.in_use() and not obj.fds
        assert await lab.store.read(obj, 0, len(data)) == data
        assert lab.metrics.tier_errors == 0
        lab.check_accounts()


@in_trio
async def test_a_call_on_the_disk_begins_no_task(tmp_path: Path) -> None:
    """It is one wait for its reader. A call for which no thread is free is not made once its reader has left."""
    disk, ended, goes_on = Disk("ssd", tmp_path), list[int | None](), threading.Event()
    begun = SimpleNamespace(tasks=0)

    class Tasks(trio.abc.Instrument):
        def task_spawned(self, task: trio.lowlevel.Task) -> None:
            begun.tasks += 1

    assert await disk.run(lambda: 1, ended.append) == 1 and ended == [1]
    instrument = Tasks()
    trio.lowlevel.add_instrument(instrument)
    try:
        assert await disk.run(lambda: 2, ended.append) == 2 and ended == [1, 2]
        with pytest.raises(ZeroDivisionError):
            await disk.run(lambda: 1 // 0, ended.append)
        assert ended == [1, 2, None] and not begun.tasks
    finally:
        trio.lowlevel.remove_instrument(instrument)
    for _ in range(tier.READ_THREADS + 1):
        with trio.move_on_after(0.01):
            await disk.run(lambda: int(goes_on.wait(PATIENCE_S)) + 2, ended.append)
    assert ended == [1, 2, None, None] and len(disk._calls) == tier.READ_THREADS
    goes_on.set()
    await until(lambda: ended == [1, 2, None, None, *[3] * tier.READ_THREADS])
    assert len(ended) == 4 + tier.READ_THREADS
    assert not disk._calls and not disk._threads.borrowed_tokens


@in_trio
async def test_a_call_that_takes_long_but_not_too_long(tmp_path: Path) -> None:
    disk, finished = Disk("ssd", tmp_path), []
    assert await disk.run(lambda: 5, finished.append) == 5
    disk.look()
    assert (finished, disk.down) == ([5], False)
    with pytest.raises(FileNotFoundError):
        await disk.run(lambda: (tmp_path / "none").read_bytes(), finished.append)
    assert finished == [5, None]
    assert not disk._calls and not disk._readers


@in_trio
async def test_a_reader_that_gives_up_leaves_its_call(tmp_path: Path) -> None:
    """What the call has in use is given back when it has ended, and not before."""
    disk, finished, going = Disk("ssd", tmp_path), [], threading.Event()
    with trio.move_on_after(0.05) as given_up:
        await disk.run(lambda: going.wait(PATIENCE_S), finished.append)
    assert given_up.cancelled_caught
    assert not finished
    going.set()
    await until(lambda: finished == [True], PATIENCE_S)
    assert finished == [True]


# -- what goes ---------------------------------------------------------------------------------------


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the tests of this room have files removed on the spot."""

    def begin(self: tier.Disposal) -> None:
        threading.Thread(target=self._work, args=(0.1,), daemon=True).start()

    monkeypatch.setattr(tier.Disposal, "_begin", begin)


def test_what_is_to_go_goes_once_a_thread_can_be_started(
    tmp_path: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = tier.Disposal._begin, list[bool]()

    def fails(self: tier.Disposal) -> None:
        begun.append(True)
        if len(begun) < 3:
            raise RuntimeError("can't start new thread")
        begin(self)

    monkeypatch.setattr(tier.Disposal, "_begin", fails)
    monkeypatch.setattr(tier, "LOOK_EVERY_S", 0.01)
    disposal = tier.Disposal(Disk("ssd", tmp_path), pytest.fail)
    (tmp_path / "one").touch()
    disposal.remove(b"1", str(tmp_path / "one"), (), 0)
    assert disposal.pending(b"1") and begun == [True]
    disposal.wait_for(b"1")
    assert not (tmp_path / "one").exists() and len(begun) == 3


@in_trio
async def test_files_go_beside_the_loop_and_count_until_they_are_gone(
    cache_dir: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    may, here = threading.Event(), threading.get_ident()
    remove = tier._remove
    monkeypatch.setattr(tier, "GOING_BYTES", 0)
    monkeypatch.setattr(tier, "GOING_SHARE", 1 << 40)

    def slow(path: str) -> None:
        assert threading.get_ident() != here
        assert may.wait(PATIENCE_S)
        remove(path)

    monkeypatch.setattr(tier, "_remove", slow)
    async with running(cache_dir, ssd=2 * EXTENT) as lab:
        first, second = content(1, EXTENT), content(2, EXTENT)
        one, two = lab.origin.put("1", first), lab.origin.put("2", second)
        three = lab.origin.put("3", content(3, EXTENT))
        for object_id, data in ((one, first), (two, second)):
            assert await lab.read(object_id) == data
        await lab.quiet()
        (ssd,) = lab.store.tiers
        assert lab.store.evict(lab.store.object(one)) == EXTENT
        assert (ssd.used_bytes, ssd.counted_bytes()) == (EXTENT, 2 * EXTENT)
        # Past the tier, for nothing else is evicted for it.
        assert await lab.read(three) == content(3, EXTENT)
        assert lab.metrics.evicted_blocks == 0 and lab.store.cached_bytes(two) == EXTENT
        may.set()
        await until(lambda: not ssd.disposal.going_bytes, PATIENCE_S)
        assert ssd.counted_bytes() == EXTENT
        await lab.quiet()
        lab.check_accounts()


@pytest.mark.parametrize("in_use", [False, True])
@in_trio
async def test_what_comes_again_waits_for_what_was_there(
    cache_dir: Path, threads: None, monkeypatch: pytest.MonkeyPatch, in_use: bool
) -> None:
    """Else its new blocks would go with the old ones: punched out, or with the file. A used file stays open."""
    may = threading.Event()
    remove, punch = tier._remove, tier._punch

    def slowly(call: Any) -> Any:
        def slow(*arguments: Any) -> None:
            assert may.wait(PATIENCE_S)
            call(*arguments)

        return slow

    monkeypatch.setattr(tier, "_remove", slowly(remove))
    monkeypatch.setattr(tier, "_punch", slowly(punch))
    async with running(cache_dir) as lab:
        data = content(1, 2 * EXTENT)
        object_id = lab.origin.put("k", data)
        obj = lab.store.object(object_id)
        if in_use:
            obj.hold()
        for gone in ([1], [0, 1]):
            may.clear()
            assert await lab.read(object_id) == data
            await lab.quiet()
            for extent in gone:
                copy = lab.store.catalog.copy(obj, tier.SSD, extent)
                assert copy is not None
                lab.store.space.drop(obj, copy, copy.bitmap)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lab.read, object_id)
                await until(lambda: lab.fetcher.in_flight_fetches > 0, PATIENCE_S)
                assert not lab.store.whole(obj)
                may.set()
            await lab.quiet()
            assert await lab.store.read(obj, 0, len(data)) == data
            assert lab.metrics.checksum_failures == 0
            lab.check_accounts()
        if in_use:
            obj.release()


@in_trio
async def test_a_large_file_goes_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "SLICE_BYTES", 4096)
    lengths: list[int] = []
    truncate = tier.os.ftruncate
    monkeypatch.setattr(tier.os, "ftruncate", lambda fd, at: lengths.append(at) or truncate(fd, at))
    for mode, expected in ((0o600, [12288, 8192, 4096, 0]), (0o400, [])):
        file = tmp_path / "file"
        file.write_bytes(b"x" * 16384)
        file.chmod(mode)
        with file.open("rb") as reader:
            tier._remove(str(file))
            assert not file.exists()
            assert lengths == expected
            assert len(reader.read()) == (0 if expected else 16384)  # one that was immutable may be mapped
        lengths.clear()


@in_trio
async def test_a_large_immutable_file_is_removed_without_the_right_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that is not root's may unlink such a file, and may not open it for writing."""
    monkeypatch.setattr(tier, "SLICE_BYTES", 4096)
    file = tmp_path / "file"
    file.write_bytes(b"x" * 16384)
    file.chmod(tier.IMMUTABLE)
    open_file = os.open

    def as_no_root(path: str, flags: int, *rest: Any) -> int:
        if flags & os.O_RDWR and not os.stat(path).st_mode & 0o200:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(path, flags, *rest)

    monkeypatch.setattr(tier.os, "open", as_no_root)
    tier._remove(str(file))
    assert not file.exists()


@in_trio
async def test_a_large_file_that_has_another_name_keeps_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a version that was renamed at the origin is that of its new name, too, and a writer may have taken it."""
    monkeypatch.setattr(tier, "SLICE_BYTES", 4096)
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"x" * 16384)
    os.link(old, new)
    tier._remove(str(old))
    assert not old.exists() and new.read_bytes() == b"x" * 16384


@pytest.mark.parametrize("seed", range(6))
def test_what_is_punched_is_gone_and_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In slices, of ranges that need not end where a slice does."""
    rng, page, pages = random.Random(seed), 4096, 60
    monkeypatch.setattr(tier, "SLICE_BYTES", 3 * page)
    plain, path = bytearray(rng.randbytes(pages * page)), tmp_path / "f"
    path.write_bytes(plain)
    sizes: list[int] = []

    def counted(fd: int, offset: int, length: int) -> bool:
        sizes.append(length)
        return linux.punch(fd, offset, length)

    monkeypatch.setattr(tier, "punch", counted)
    edges = sorted(rng.sample(range(pages + 1), 6))
    ranges = [(a * page, (b - a) * page) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    before = len(os.listdir("/proc/self/fd"))
    tier._punch(str(path), ranges)
    for start, length in ranges:
        plain[start : start + length] = bytes(length)
    assert path.read_bytes() == plain and max(sizes) <= 3 * page
    assert sum(sizes) == sum(length for _, length in ranges) and len(os.listdir("/proc/self/fd")) == before
    assert len(sizes) == sum(-(-length // (3 * page)) for _, length in ranges)
    assert path.stat().st_blocks * 512 == pages * page - sum(sizes)


@pytest.mark.parametrize("full", [False, True])
def test_a_probe_asks_the_disk_for_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """It writes some out, and reads them back, not from the page cache. A full disk writes the file's inode."""
    (tmp_path / "probe").touch()  # by a daemon that was killed: to write out an empty file takes no disk
    left = os.stat(tmp_path / "probe").st_ino
    os.link(tmp_path / "probe", tmp_path / "keeps its inode")
    synced: list[tuple[bool, int]] = []
    steps: list[str] = []
    fsync, fadvise, pread = os.fsync, os.posix_fadvise, os.pread

    def to_disk(fd: int) -> None:
        about = os.fstat(fd)
        synced.append((about.st_ino == left, about.st_size))
        steps.append("fsync")
        fsync(fd)

    def forget(fd: int, *arguments: int) -> None:
        assert arguments == (0, 0, os.POSIX_FADV_DONTNEED)
        steps.append("drop pages")
        fadvise(fd, *arguments)

    def read(fd: int, *arguments: int) -> bytes:
        data = pread(fd, *arguments)
        steps.append(f"read {len(data)}")
        return data

    def no_room(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", to_disk)
    monkeypatch.setattr(os, "posix_fadvise", forget)
    monkeypatch.setattr(os, "pread", read)
    if full:
        monkeypatch.setattr(os, "pwrite", no_room)
    tier._write_and_remove(tmp_path / "probe")
    size = 0 if full else 5
    assert synced == [(False, size)] and steps == ["fsync", "drop pages", f"read {size}"]
    assert os.listdir(tmp_path) == ["keeps its inode"]

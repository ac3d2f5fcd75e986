"""The calls on staging files by themselves: what each answer of the system means, and what is left after it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import CachefsError, CacheUnusable, NoRoom, TooLarge
from cachefs.upload import staging
from cachefs.upload.staging import HELD, Lost, StagingDisk, StagingFile
from tests.fetch.scripted import content
from tests.upload.scripted import desk, in_trio
from tests.upload.test_passthrough import Kernel, ends, in_passthrough


@pytest.mark.parametrize(
    "number, error",
    [
        (errno.ENOSPC, NoRoom),
        (errno.EDQUOT, NoRoom),
        (errno.EFBIG, TooLarge),
        (errno.EIO, CacheUnusable),
        (errno.EROFS, CacheUnusable),
        (errno.ENOENT, CacheUnusable),
    ],
)
def test_what_a_failing_disk_is_to_a_writer(tmp_path: Path, number: int, error: type[CachefsError]) -> None:
    found = staging.translated(OSError(number, os.strerror(number)), tmp_path)
    assert type(found) is error and str(tmp_path) in str(found)


@pytest.mark.parametrize("number", [0, errno.EAGAIN, errno.EINVAL, errno.EACCES])
def test_a_lease_is_given_refused_or_not_known(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    called: list[tuple[int, int]] = []

    def control(fd: int, command: int, argument: int) -> int:
        called.append((command, argument))
        if number and (command, argument) == (fcntl.F_SETLEASE, fcntl.F_RDLCK):
            raise OSError(number, os.strerror(number))
        return 0

    monkeypatch.setattr(fcntl, "fcntl", control)
    assert staging._has_writer(5) is (number == errno.EAGAIN)
    leases = [argument for command, argument in called if command == fcntl.F_SETLEASE]
    assert leases == [fcntl.F_RDLCK] + ([] if number else [fcntl.F_UNLCK]), "it is given back"


@pytest.mark.parametrize("answer", [True, False])
def test_a_directory_has_leases_if_a_writer_keeps_one_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bool
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(staging, "_has_writer", lambda fd: answer)
    assert staging.can_lease(tmp_path) is answer
    assert not staging.can_lease(tmp_path / "none") and not staging.tells_of_mappings(tmp_path / "none")
    assert len(os.listdir("/proc/self/fd")) == before and os.listdir(tmp_path) == []


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_copy_goes_on_until_all_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    data, copied = content(1, 50), os.copy_file_range
    (tmp_path / "a").write_bytes(data)
    monkeypatch.setattr(
        os, "copy_file_range", lambda a, b, count, at, to: copied(a, b, min(count, at_once), at, to)
    )
    source, sink = os.open(tmp_path / "a", os.O_RDONLY), os.open(tmp_path / "b", os.O_RDWR | os.O_CREAT)
    try:
        for size in (0, 1, 49, 50):
            os.ftruncate(sink, 0)
            staging._copy(source, sink, size)
            assert (tmp_path / "b").read_bytes() == data[:size]
        with pytest.raises(OSError, match="shorter") as short:
            staging._copy(source, sink, 51)
        assert short.value.errno == errno.EIO
    finally:
        os.close(source)
        os.close(sink)


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        os.close(staging._written_file(tmp_path / "f", b"ours"))
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600


@pytest.mark.parametrize("in_passthrough", [True, False])
@in_trio
async def test_a_link_in_the_place_of_a_staging_file_is_not_followed(
    tmp_path: Path, in_passthrough: bool
) -> None:
    disk = StagingDisk(tmp_path / "staging")
    (tmp_path / "theirs").write_bytes(b"theirs")
    (disk.directory / "f").symlink_to(tmp_path / "theirs")
    file = StagingFile(disk, "f")
    file.in_passthrough = in_passthrough
    with pytest.raises(CacheUnusable):
        file.take()
    assert (file._users, file._fd) == (0, -1)


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        staging._written_file(tmp_path / "f", b"ours")
    assert (tmp_path / "f").read_bytes() == b"theirs"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOENT])
@in_trio
async def test_a_file_that_cannot_be_opened_for_writing_is_read_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "f").write_bytes(b"data")
    file, opened = StagingFile(StagingDisk(tmp_path), "f"), os.open

    def refuse(path: Any, flags: int, *mode: int, **where: Any) -> int:
        if flags & os.O_RDWR:
            raise OSError(number, os.strerror(number))
        return opened(path, flags, *mode, **where)

    monkeypatch.setattr(os, "open", refuse)
    if number == errno.EROFS:
        with file.used():
            assert await file.read(0, 9) == b"data" and not file._writes
    else:
        with pytest.raises(Lost if number == errno.ENOENT else CacheUnusable) as error:
            file.take()
        assert isinstance(error.value, Lost) is (number == errno.ENOENT)
    assert file._users == 0 and file._fd == -1
    file.remove()
    if number == errno.ENOENT:
        with pytest.raises(CacheUnusable) as error:
            file.take()
        assert not isinstance(error.value, Lost), "it was removed here"


@pytest.mark.parametrize("in_passthrough", [True, False])
@in_trio
async def test_a_file_that_was_removed_from_outside_is_lost(tmp_path: Path, in_passthrough: bool) -> None:
    """Each call that needs its name says so; none does for a file that was removed through the mount."""
    for name in ("f", "g"):
        (tmp_path / name).write_bytes(b"data")
    for name in ("f", "g"):
        file = StagingFile(StagingDisk(tmp_path), name)
        file.in_passthrough = in_passthrough
        removed_here = name == "g"
        if removed_here:
            file.remove()
            with trio.fail_after(10):
                await file._disk.quiet()
            file.check_name()
        else:
            (tmp_path / name).unlink()
        calls = [file.take, file.shape] if removed_here else [file.take, file.shape, file.check_name]
        for call in calls:
            with pytest.raises(CacheUnusable) as error:
                call()
            assert isinstance(error.value, Lost) is not removed_here
        assert (file._users, file._fd) == (0, -1)


@pytest.mark.parametrize("when", ["open", "closed", "still written"])
@in_trio
async def test_a_passthrough_file_that_was_removed_from_outside_is_promised_to_no_mount(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """Before its commit, right behind its close, and while a mapping keeps it in passthrough."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"data")
        if when == "open":
            dirty_file.file.path.unlink()
            with pytest.raises(Lost):
                await d.uploads.commit(dirty_file)
            assert d.uploads.journal.rows("drafts") == {}
            ends(d, dirty_file, fd)
            await d.quiet()
            assert d.uploads.journal.rows("drafts") == {} and "is lost" in caplog.text
        else:
            await d.uploads.commit(dirty_file)
            mapping = os.dup(fd) if when == "still written" else -1
            ends(d, dirty_file, fd)
            assert dirty_file.kernel.in_passthrough is (when == "still written") and dirty_file.dirty
            dirty_file.file.path.unlink()
            if when == "still written":
                os.close(mapping)
        left = await d.uploads.aclose(0)
        assert left == [dirty_file] and isinstance(dirty_file.failure, Lost), (
            "it is not said to wait for the next mount"
        )
    assert [r.levelname for r in caplog.records if "is lost" in r.getMessage()][:1] == ["ERROR"]


@in_trio
async def test_what_lies_in_memory_is_sent_from_there(tmp_path: Path) -> None:
    """And what is larger, or is not in the kernel's memory, through its descriptor."""
    file = StagingFile(StagingDisk(tmp_path), "f", new=True)
    with file.used():
        await file.write(0, b"small")
        assert (await file.source(3)).read(0, 9) == b"sma" and file.held == b"small"
        await file.spill()
        assert file.held is None and (await file.source(5)).read(0, 5) == b"small"
        await file.write(0, bytes(HELD + 1))
        assert type(await file.source(HELD)).__name__ == "InMemory"
        assert type(await file.source(HELD + 1)).__name__ == "FileRange"
    file.remove()


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("held", [False, True])
@in_trio
async def test_a_file_lands_unless_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool, hangs: bool
) -> None:
    disk = StagingDisk(tmp_path)
    file = StagingFile(disk, "f", new=True)
    await file.write(0, b"data")
    with file.used():
        if not held:
            await file.spill()
        monkeypatch.setattr(StagingDisk, "hangs", property(lambda self: hangs))
        assert await file.try_spill() is not (hangs and held)
        assert (tmp_path / "f").exists() is not (hangs and held)
    monkeypatch.undo()
    file.remove()
    await disk.quiet()
    assert list(tmp_path.iterdir()) == [] and disk.memory_left == staging.HELD_ALTOGETHER  # noqa: ASYNC240


@in_trio
async def test_a_disk_has_sixteen_calls_at_a_time(tmp_path: Path) -> None:
    disk, may, most = StagingDisk(tmp_path), threading.Event(), list[int]()

    def call() -> None:
        most.append(disk.busy)
        assert may.wait(30)

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(disk.run, call)
        while len(most) < 16:
            await trio.lowlevel.checkpoint()
        assert disk._limiter.statistics().tasks_waiting == 4
        may.set()
    assert max(most) == staging.THREADS == 16 and len(most) == 20 and disk.busy == 0


@in_trio
async def test_what_is_done_later_is_counted_until_it_is_done(tmp_path: Path) -> None:
    disk, done = StagingDisk(tmp_path), list[int]()

    def fails() -> None:
        done.append(1)
        raise OSError(errno.EIO, "broken")

    for call in (fails, lambda: done.append(2)):
        disk.later(call)
    assert disk.busy == 2 and not done
    with trio.fail_after(10):
        await disk.quiet()
    assert disk.busy == 0 and sorted(done) == [1, 2]
    assert await disk.run(lambda: disk.busy) == 1 and disk.busy == 0

"""A staging file against plain bytes: in memory, on the disk, in passthrough and back; and what it leaves open."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cachefs.base.errors import CacheUnusable, NoRoom
from cachefs.upload import staging
from cachefs.upload.staging import Shape, StagingDisk, StagingFile
from tests.conftest import examples
from tests.upload.scripted import in_trio

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.just(0), st.integers(1, 30)),
        st.tuples(st.just("write"), st.integers(0, 90), st.integers(1, 60)),
        st.tuples(st.just("truncate"), st.integers(0, 120), st.just(0)),
        st.tuples(st.just("allocate"), st.integers(0, 90), st.integers(1, 40)),
        st.tuples(
            st.sampled_from(["sync", "spill", "copy", "passthrough", "use", "give"]), st.just(0), st.just(0)
        ),
        st.tuples(st.just("full"), st.integers(0, 60), st.integers(0, 1)),
    ),
    max_size=20,
)


@given(STEPS, st.integers(0, 200), st.integers(1, 7))
@example([("write", 5, 60), ("append", 0, 1), ("full", 0, 0)], 64, 1)  # the disk has no room for the end
@example([("passthrough", 0, 0), ("full", 1, 1), ("append", 0, 2), ("passthrough", 0, 0)], 0, 1)
@settings(max_examples=examples(150))
def test_it_holds_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]], left: int, at_once: int
) -> None:
    """Whatever memory is left, though the disk takes a few bytes of each write, is full now and then, and copies a few at a
    time."""
    place = tmp_path_factory.mktemp("staging")
    with pytest.MonkeyPatch.context() as patch:
        copy, before = os.copy_file_range, len(os.listdir("/proc/self/fd"))
        full = Full(patch, 8 * at_once)
        patch.setattr(
            os, "copy_file_range", lambda fd, to, count, *at: copy(fd, to, min(count, at_once), *at)
        )
        patch.setattr(staging, "HELD", 64)
        patch.setattr(staging, "SMALL", 16)
        trio.run(_hold, place, steps, left, full)
        assert len(os.listdir("/proc/self/fd")) == before
    assert not list(place.iterdir())


class Full:
    """A disk that is full once it has taken `left` bytes more, and where a file cannot be cut `cuts_fail` times."""

    def __init__(self, patch: pytest.MonkeyPatch, at_once: int) -> None:
        self.left, self.cuts_fail = 1 << 30, 0
        pwrite, ftruncate = os.pwrite, os.ftruncate

        def write(fd: int, data: Any, at: int) -> int:
            if not self.left:
                raise OSError(errno.ENOSPC, "full")
            count = pwrite(fd, data[: min(at_once, self.left)], at)
            self.left -= count
            return count

        def cut(fd: int, size: int) -> None:
            if self.cuts_fail:
                self.cuts_fail -= 1
                raise OSError(errno.EIO, "broken")
            ftruncate(fd, size)

        patch.setattr(os, "pwrite", write)
        patch.setattr(os, "ftruncate", cut)

    def end(self) -> None:
        self.left, self.cuts_fail = 1 << 30, 0


async def _hold(place: Path, steps: list[tuple[str, int, int]], left: int, full: Full) -> None:
    disk = StagingDisk(place, left)
    file, plain, users = StagingFile(disk, "f", new=True), bytearray(), 0
    file.take()
    for number, (what, at, length) in enumerate(steps):
        if what == "full":
            full.left, full.cuts_fail = at, length
            continue
        data = bytes([number + 1]) * length
        if what == "append":
            at = len(plain)
        after = bytearray(plain)
        if what in ("write", "append", "allocate"):
            after.extend(bytes(max(0, at + length - len(plain))))
        if what in ("write", "append"):
            after[at : at + length] = data
        elif what == "truncate":
            after = after[:at] + bytes(max(0, at - len(plain)))
        try:
            match what:
                case "write" | "append":
                    await file.write(at, data, appends=what == "append")
                case "truncate":
                    await file.truncate(at)
                case "allocate":
                    await file.allocate(at, length)
                case "sync":
                    await file.sync()
                    assert (place / "f").read_bytes() == plain
                case "spill":
                    await file.spill()
                    assert file._held is None and (place / "f").read_bytes()[: len(plain)] == plain
                case "copy":
                    copy = await file.copied(len(plain))
                    try:
                        assert await copy.read(0, 1000) == plain
                    finally:
                        copy.remove()
                        await disk.quiet()
                case "passthrough":
                    await file.spill()
                    shape = await file.open_backing()
                    assert shape == Shape(len(plain), staging.LONG_AGO_NS) == file.shape()
                    assert not file.has_writer()
                    file.in_passthrough = False
                case "use":
                    file.take()
                    users += 1
                case "give" if users:
                    file.give_back()
                    users -= 1
        except (NoRoom, CacheUnusable):
            assert full.left == 0 or full.cuts_fail == 0, "the disk has room"
            full.end()
            if what == "write":  # any part of it may be written, and nothing behind the end
                found = await file.read(at, len(plain) - at) if at < len(plain) else b""
                assert all(new in (old, number + 1) for new, old in zip(found, plain[at:], strict=True))
                plain[at:] = found
        else:
            full.end()
            plain = after
        held = len(file._held) if file._held is not None else 0
        assert disk.memory_left + held == left and held <= 64 and disk.memory_left >= 0
        assert (file._fd >= 0) is file._made and (file._made or file._held is not None)
        if number % 3:
            for start, size in ((0, len(plain)), (len(plain) - 5, 5), (len(plain) // 2, 3)):
                wanted = plain[max(0, start) :][:size]
                now = file.read_now(max(0, start), len(wanted))
                assert now is None or now == wanted
            continue
        assert bytes((await file.source(len(plain))).read(0, len(plain))) == plain
        assert await file.read(0, len(plain)) == plain, "behind its end a file may still have what failed"
        assert await file.read(3, max(0, min(5, len(plain) - 3))) == plain[3:8]
    while users:
        file.give_back()
        users -= 1
    file.remove()
    await disk.quiet()
    assert not (place / "f").exists()
    assert await file.read(0, len(plain)) == plain, "its user has it"
    file.give_back()
    await disk.quiet()
    assert disk.memory_left == left and file._fd == -1


@in_trio
async def test_a_cut_that_fails_loses_nothing_of_what_waits_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = StagingDisk(tmp_path, 10 * staging.HELD)
    file = StagingFile(disk, "f", new=True)
    with file.used():
        await file.write(0, b"1" * (staging.HELD + 1))
        await file.write(staging.HELD + 1, b"the end", appends=True)
        assert file.ends_in_memory
        with monkeypatch.context() as patch:
            Full(patch, 1 << 20).cuts_fail = 1
            with pytest.raises(CacheUnusable):
                await file.truncate(5)
        assert await file.read(staging.HELD + 1, 100) == b"the end"
        assert await file.read(0, 5) == b"11111"
        with monkeypatch.context() as patch:  # there is no room for what is cut off
            Full(patch, 1 << 20).left = 0
            await file.truncate(5)
        assert await file.read(0, 100) == b"11111" and disk.memory_left == 10 * staging.HELD
    file.remove()
    await disk.quiet()


@pytest.mark.parametrize("cuts_fail", [0, 1])
@pytest.mark.parametrize("waits", [False, True])
@in_trio
async def test_nothing_of_a_write_that_failed_comes_back_when_the_file_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool, cuts_fail: int
) -> None:
    """POSIX: what was never written is zeros. Of a write, and of a file's end that waits in memory."""
    disk = StagingDisk(tmp_path, 10 * staging.HELD)
    file, size = StagingFile(disk, "f", new=True), staging.HELD + 1
    with file.used():
        await file.write(0, b"1" * size)
        if waits:
            await file.write(size, b"2" * 100, appends=True)
        with monkeypatch.context() as patch:
            full = Full(patch, 1 << 20)
            full.left, full.cuts_fail = 50, cuts_fail
            with pytest.raises(NoRoom):
                await (file.spill() if waits else file.write(size, b"2" * 100))
        if waits:
            await file.truncate(size + 10)
            await file.spill()
        await file.write(size + 80, b"3" * 10)
        expected = b"2" * 10 * waits + bytes(80 - 10 * waits) + b"3" * 10
        assert await file.read(size, 1000) == expected
        await file.sync()
        assert (tmp_path / "f").read_bytes() == b"1" * size + expected
    file.remove()
    await disk.quiet()


@pytest.mark.parametrize(
    ("number", "error"), [(28, NoRoom), (122, NoRoom), (5, CacheUnusable), (30, CacheUnusable)]
)
@in_trio
async def test_a_disk_that_fails_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    """One in memory stays there, with all that it held."""
    disk, before = StagingDisk(tmp_path, 100), len(os.listdir("/proc/self/fd"))
    file = StagingFile(disk, "f", new=True)
    pwrite, calls = os.pwrite, [0]

    def failing(fd: int, data: Any, at: int) -> int:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(number, os.strerror(number))
        return pwrite(fd, data[:3], at)

    with file.used():
        await file.write(0, b"all of it")
        monkeypatch.setattr(os, "pwrite", failing)
        with pytest.raises(error, match=str(tmp_path)):
            await file.spill()
        assert not list(tmp_path.iterdir()) and disk.memory_left == 91  # noqa: ASYNC240
        assert await file.read(0, 100) == b"all of it"
        monkeypatch.undo()
        await file.spill()
        assert (tmp_path / "f").read_bytes() == b"all of it" and disk.memory_left == 100
    assert len(os.listdir("/proc/self/fd")) == before
    file.remove()


def test_the_names_of_a_directory_are_synced_or_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync, before = os.fsync, len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    staging.sync_names(tmp_path)
    assert synced == [str(tmp_path)]
    with pytest.raises(CacheUnusable):
        staging.sync_names(tmp_path / "none")
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_of_a_descriptor_is_only_read_through_it(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"what was there")
    fd = os.open(tmp_path / "f", os.O_RDONLY)

    async def use() -> None:
        file = StagingFile(StagingDisk(tmp_path), "f", fd=fd)
        with file.used():
            await file.write(5, b"is")
            assert await file.read(0, 100) == b"what iss there" and file.fd == fd
            with pytest.raises(OSError):
                os.pwrite(fd, b"x", 0)
            await file.truncate(4)
        assert file._fd == -1
        with pytest.raises(OSError):
            os.fstat(fd)
        assert await file.read(0, 100) == b"what"

    trio.run(use)


@in_trio
async def test_what_was_appended_stays_when_the_begin_is_written_again(tmp_path: Path) -> None:
    """An append goes on while an attempt sends what was there before, and may restore it."""
    file = StagingFile(StagingDisk(tmp_path), "f", new=True)
    file.take()
    await file.write(0, b"1" * 10 + b"2" * 5)
    await file.restore(b"1" * 10)
    assert await file.read(0, 15) == b"1" * 10 + b"2" * 5
    file.give_back()
    file.remove()


@in_trio
async def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader gets fewer bytes, and none from another place."""
    disk = StagingDisk(tmp_path)
    file = StagingFile(disk, "f", new=True)
    monkeypatch.setattr(staging, "SMALL", 16)
    with file.used():
        await file.write(0, b"0123456789")
        await file.spill()
        await file.write(10, b"abc", appends=True)
        run = disk.run

        async def cut(call: Any) -> Any:
            monkeypatch.setattr(disk, "run", run)
            await file.truncate(4)
            return await run(call)

        monkeypatch.setattr(disk, "run", cut)
        assert await file.read(0, 13) == b"0123"
    file.remove()
    await disk.quiet()


@in_trio
async def test_a_file_that_cannot_be_prepared_for_passthrough_is_written_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer then writes it through the daemon."""

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    file = StagingFile(StagingDisk(tmp_path), "f", new=True)
    with file.used():
        await file.write(0, b"1")
        await file.spill()
        with monkeypatch.context() as full:
            full.setattr(os, "utime", fails)
            with pytest.raises(NoRoom):
                await file.open_backing()
        assert not file.in_passthrough
        await file.write(1, b"2")
        assert await file.read(0, 9) == b"12"
    file.remove()
    await file._disk.quiet()

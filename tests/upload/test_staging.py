"""A staging file against plain bytes: in memory, on the disk, in passthrough and back; and what it leaves open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
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
            st.sampled_from(["sync", "land", "copy", "passthrough", "use", "give"]), st.just(0), st.just(0)
        ),
    ),
    max_size=20,
)


@given(STEPS, st.integers(0, 200), st.integers(1, 7))
@settings(max_examples=examples(150))
def test_it_holds_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]], left: int, at_once: int
) -> None:
    """Whatever memory is left, though the disk takes a few bytes of each write and copies a few at a time."""
    place = tmp_path_factory.mktemp("staging")
    with pytest.MonkeyPatch.context() as patch:
        pwrite, copy, before = os.pwrite, os.copy_file_range, len(os.listdir("/proc/self/fd"))
        patch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: 8 * at_once], at))
        patch.setattr(
            os, "copy_file_range", lambda fd, to, count, *at: copy(fd, to, min(count, at_once), *at)
        )
        patch.setattr(staging, "HELD", 64)
        patch.setattr(staging, "SMALL", 16)
        trio.run(_hold, place, steps, left)
        assert len(os.listdir("/proc/self/fd")) == before
    assert not list(place.iterdir())


async def _hold(place: Path, steps: list[tuple[str, int, int]], left: int) -> None:
    disk = StagingDisk(place, left)
    file, plain, users = StagingFile(disk, "f", new=True), bytearray(), 0
    file.take()
    for number, (what, at, length) in enumerate(steps):
        match what:
            case "write":
                data = bytes([number + 1]) * length
                await file.write(at, data)
                plain.extend(bytes(max(0, at + length - len(plain))))
                plain[at : at + length] = data
            case "append":
                data = bytes([number + 1]) * length
                await file.write(len(plain), data, appends=True)
                plain.extend(data)
            case "truncate":
                await file.truncate(at)
                plain.extend(bytes(max(0, at - len(plain))))
                del plain[at:]
            case "allocate":
                await file.allocate(at, length)
                plain.extend(bytes(max(0, at + length - len(plain))))
            case "sync":
                await file.sync()
                assert (place / "f").read_bytes() == plain
            case "land":
                await file.land()
                assert file._held is None and (place / "f").read_bytes() == plain
            case "copy":
                copy = StagingFile(disk, "copy", new=True)
                await file.copy_to(copy, len(plain))
                assert await copy.read(0, 1000) == plain
                copy.remove()
                await disk.quiet()
            case "passthrough":
                await file.land()
                shape = await file.open_backing()
                assert shape == Shape(len(plain), staging.LONG_AGO_NS) == file.shape()
                assert not file.written()
                file.in_passthrough = False
            case "use":
                file.take()
                users += 1
            case "give" if users:
                file.give_back()
                users -= 1
        held = len(file._held) if file._held is not None else 0
        assert disk.memory_left + held == left and held <= 64 and disk.memory_left >= 0
        assert (file._fd >= 0) is file._made and (file._made or file._held is not None)
        if number % 3:  # a reader has what it reads land
            for start, size in ((0, len(plain)), (len(plain) - 5, 5), (len(plain) // 2, 3)):
                now = file.read_now(max(0, start), size)
                assert now is None or now == plain[max(0, start) :][:size]
            continue
        assert bytes((await file.source(len(plain))).read(0, len(plain))) == plain
        assert await file.read(0, 1000) == plain
        assert await file.read(3, 5) == plain[3:8]
    while users:
        file.give_back()
        users -= 1
    file.remove()
    await disk.quiet()
    assert not (place / "f").exists()
    assert await file.read(0, 1000) == plain, "its user has it"
    file.give_back()
    await disk.quiet()
    assert disk.memory_left == left and file._fd == -1


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
            await file.land()
        assert not list(tmp_path.iterdir()) and disk.memory_left == 91  # noqa: ASYNC240
        assert await file.read(0, 100) == b"all of it"
        monkeypatch.undo()
        await file.land()
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

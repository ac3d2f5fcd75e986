"""A disk that fails under the staging files: one operation gets an errno, and the daemon goes on."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import CachefsError, CacheUnusable, NoRoom, OriginFailed
from cachefs.upload.journal import Journal
from cachefs.upload.staging import HELD
from tests.upload.scripted import ScriptedStore, add, desk, in_trio

LARGE = HELD + 1
"""Bytes of a file that is on the disk at once."""


class Failing:
    """`os.<call>` fails with `number` while `on`, for paths and descriptors below `directory`."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str, number: int, directory: Path) -> None:
        self.on = False
        self.times = 0
        real: Callable[..., Any] = getattr(os, call)

        def wrapped(target: Any, *args: Any, **options: Any) -> Any:
            if self.on and self._concerns(target, directory):
                self.times += 1
                raise OSError(number, os.strerror(number))
            return real(target, *args, **options)

        patch.setattr(os, call, wrapped)

    def _concerns(self, target: Any, directory: Path) -> bool:
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}").startswith(str(directory))
        if str(target).startswith("/proc/self/fd/"):
            return os.readlink(target).startswith(str(directory))
        return str(target).startswith(str(directory))


# -- a failed fsync ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@in_trio
async def test_a_failed_fsync_is_not_followed_by_one_that_says_it_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sync = Failing(monkeypatch, "fdatasync", number, tmp_path / "staging")
    async with desk(tmp_path, writeback=True) as d:
        dirty_file = await d.create("k", b"1" * LARGE)
        sync.on = True
        with pytest.raises(NoRoom if number == errno.ENOSPC else CacheUnusable):
            await d.uploads.commit(dirty_file)
        sync.on = False
        for _ in range(3):
            with pytest.raises(CacheUnusable, match="and write it again"):
                await d.uploads.commit(dirty_file)
        await dirty_file.write(10, b"a part of it")
        with pytest.raises(CacheUnusable):
            await d.uploads.commit(dirty_file)
        d.uploads.release(dirty_file)
        await trio.sleep(200)
        assert d.store.counts["put"] == 0, "bytes that no fsync vouches for are not uploaded"
        assert not dirty_file.acknowledged and d.uploads.pending() == [dirty_file]


@in_trio
async def test_a_file_that_is_emptied_and_written_again_after_a_failed_fsync_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = Failing(monkeypatch, "fdatasync", errno.EIO, tmp_path / "staging")
    data = b"2" * LARGE
    async with desk(tmp_path, writeback=True) as d:
        dirty_file = await d.create("k", b"1" * LARGE)
        sync.on = True
        with pytest.raises(CacheUnusable):
            await d.uploads.commit(dirty_file)
        sync.on = False
        await dirty_file.truncate(1)
        await dirty_file.write(0, data)
        with pytest.raises(CacheUnusable):
            await d.uploads.commit(dirty_file)  # the first byte was never cut off
        await dirty_file.truncate(0)
        await dirty_file.write(0, data)
        await d.close(dirty_file)
        assert dirty_file.acknowledged
        assert await d.uploads.flush() == []
        assert d.store.content("k") == data


@in_trio
async def test_a_durable_file_whose_upload_and_fsync_failed_is_not_uploaded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = Failing(monkeypatch, "fdatasync", errno.EIO, tmp_path / "staging")
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"1" * LARGE)
        d.store.fail("put", lambda: OriginFailed("down"), times=1)
        d.store.fail("part", lambda: OriginFailed("down"), times=100)
        sync.on = True
        with pytest.raises(OriginFailed):
            await d.uploads.commit(dirty_file)
        sync.on = False
        d.store.rules.clear()
        with pytest.raises(CacheUnusable):
            await d.uploads.commit(dirty_file)
        assert "k" not in d.store.objects
        await dirty_file.truncate(0)
        await dirty_file.write(0, b"2" * LARGE)
        await d.close(dirty_file)
        assert d.store.content("k") == b"2" * LARGE


# -- a staging file that cannot be opened --------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EROFS, errno.EMFILE, errno.EIO, errno.ENOENT])
@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_a_file_that_cannot_be_opened_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, writeback: bool
) -> None:
    """On the way: while it is uploaded in the background, read, written, settled, closed."""
    opening = Failing(monkeypatch, "open", number, tmp_path / "staging")
    store = ScriptedStore()
    async with desk(tmp_path, store, writeback=writeback) as d:
        store.fail("put", lambda: OriginFailed("down"), times=1)
        store.fail("part", lambda: OriginFailed("down"), times=10)
        try:
            closed = await d.save("closed", b"1" * LARGE)
        except OriginFailed:
            closed = d.uploads.pending()[0]
        opening.on = True
        await trio.sleep(100)  # some attempts
        with pytest.raises(CacheUnusable):
            d.uploads.open(closed)
        with pytest.raises(CacheUnusable):
            await closed.read(0, 10)
        with pytest.raises(CacheUnusable):
            await d.create("other", b"2" * LARGE)
        assert opening.times > 2 and closed.handles == 0
        assert d.uploads.status()["pending"] >= 1
        opening.on = False
        store.rules.clear()
        await trio.sleep(100)
        assert store.content("closed") == b"1" * LARGE
        await d.save("third", b"3" * LARGE)
        assert await d.uploads.flush() == [] and store.content("third") == b"3" * LARGE


@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_a_file_that_cannot_be_opened_for_the_cache_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writeback: bool
) -> None:
    """The origin has it: that the cache does not get it hurts no caller."""
    opening = Failing(monkeypatch, "open", errno.EMFILE, tmp_path / "staging")
    async with desk(tmp_path, writeback=writeback, upload_delay_s=1.0) as d:
        d.uploads.on_committed = lambda dirty_file, info: setattr(opening, "on", True)
        await d.save("k", b"1" * LARGE)
        await trio.sleep(10)
        assert d.store.content("k") == b"1" * LARGE
        assert d.settled == ["k"] and d.cache.adopted == {} and opening.times


@in_trio
async def test_a_file_that_cannot_be_removed_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    removing = Failing(monkeypatch, "unlink", errno.EROFS, tmp_path / "staging")
    async with desk(tmp_path, cache=None, recover=True) as d:
        d.cache.adopts = False
        removing.on = True
        await d.save("k", b"1" * LARGE)
        await d.quiet()
        assert d.settled == ["k"] and removing.times == 1
        assert "cannot remove" in caplog.text and len(await d.files()) == 1
        removing.on = False
    async with desk(tmp_path, d.store) as d:
        assert await d.files() == [] and d.uploads.pending() == []


@in_trio
async def test_the_staging_file_of_a_waiting_upload_was_removed(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        dirty_file = await d.save("k", b"1" * LARGE)
        dirty_file.file.path.unlink()
        await trio.sleep(100)
        assert [dirty_file.key for dirty_file in d.uploads.pending()] == ["k"]
        assert isinstance(dirty_file.failure, CacheUnusable)
        await d.save("other", b"2")
        assert [left.key for left in await d.uploads.flush()] == ["k"]
        assert d.store.content("other") == b"2"
        assert [left.key for left in await d.uploads.aclose(1)] == ["k"], (
            "nor does it keep a stop from its end"
        )


@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_a_state_directory_that_was_removed_costs_what_was_in_it(
    tmp_path: Path, writeback: bool
) -> None:
    """Its journal goes on in files without names. What is written from now on is at the store when a close returns."""
    async with desk(tmp_path, writeback=writeback, upload_delay_s=1e6) as d:
        before = await d.create("before", b"1" * LARGE)
        await before.file.spill()
        shutil.rmtree(d.staging)
        shutil.rmtree(d.state)
        for key, data in ("small", b"2"), ("large", b"3" * LARGE):
            await d.save(key, data)
            assert d.store.content(key) == data
        dirty_file = await d.create("synced", b"4" * LARGE)
        await d.uploads.commit(dirty_file)
        await add(dirty_file, b"5")
        await d.close(dirty_file)
        assert d.store.content("synced") == b"4" * LARGE + b"5"
        if writeback:
            with pytest.raises(CacheUnusable, match="removed"):
                await d.close(before)
        else:
            await d.close(before)
        await d.uploads.discard(before)
        assert d.uploads.pending() == []
        assert d.staging.stat().st_mode & 0o777 == 0o700


@in_trio
async def test_a_journal_that_is_another_mounts_by_now_promises_nothing(tmp_path: Path) -> None:
    """The directory was removed, and a second mount began one of its own there: the rows of the first are in no file."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        shutil.rmtree(d.state)
        Journal(d.state / "journal").close()
        await d.save("k", b"1" * LARGE)
        assert d.store.content("k") == b"1" * LARGE


@in_trio
async def test_a_staging_directory_is_not_made_again_on_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache's disk was unmounted: what is below has no reserve of ours."""
    async with desk(tmp_path) as d:
        d.staging.rmdir()
        monkeypatch.setattr(d.uploads._disk, "_device", -1)
        with pytest.raises(CacheUnusable):
            await d.create("k", b"1" * LARGE)
        assert not d.staging.exists()


@in_trio
async def test_a_disk_that_does_not_say_how_full_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = Failing(monkeypatch, "statvfs", errno.EIO, tmp_path / "staging")
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"1")
        await trio.sleep(1)
        asking.on = True
        with pytest.raises(CacheUnusable):
            await add(dirty_file, b"2")
        asking.on = False
        await add(dirty_file, b"3")
        await d.close(dirty_file)
        assert d.store.content("k") == b"13"


@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_a_close_that_fails_is_told_by_the_next_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writeback: bool
) -> None:
    """A network file system says at a close that it could not keep what was written, and an fsync after that answers 0."""
    async with desk(tmp_path, writeback=writeback, upload_delay_s=1.0) as d:
        dirty_file = await d.create("k", b"1" * LARGE)
        close = os.close

        def closed(fd: int) -> None:
            close(fd)
            raise OSError(errno.EIO, "broken")

        with monkeypatch.context() as patch:
            patch.setattr(os, "close", closed)
            d.uploads.release(dirty_file)
        await trio.sleep(10)
        assert "k" not in d.store.objects and d.uploads.pending() == [dirty_file]
        assert isinstance(dirty_file.failure, CacheUnusable) and not dirty_file.acknowledged
        d.uploads.open(dirty_file)
        await dirty_file.truncate(0)
        await dirty_file.write(0, b"2" * LARGE)
        with suppress(CacheUnusable):
            await d.uploads.commit(dirty_file)  # tells of the upload that failed
        await d.uploads.commit(dirty_file)
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", closed)
            d.uploads.release(dirty_file)
        assert await d.uploads.flush() == []
        assert d.store.content("k") == b"2" * LARGE, "what was synced before is safe"


@in_trio
async def test_bytes_that_cannot_be_read_are_an_expected_failure_of_their_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading = Failing(monkeypatch, "pread", errno.EIO, tmp_path / "staging")
    async with desk(tmp_path, writeback=True) as d:
        reading.on = True
        dirty_file = await d.save("k", b"1" * LARGE)
        await trio.sleep(10)
        assert d.uploads.pending() == [dirty_file] and reading.times == 1, "it is tried again after a minute"
        assert "cannot be read: Input/output error" in str(dirty_file.failure)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        reading.on = False
        assert await d.uploads.flush() == [] and d.store.content("k") == b"1" * LARGE


# -- failures that are bugs -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["settling", "attempt", "release"])
@in_trio
async def test_a_bug_in_the_task_of_one_file_ends_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("a bug")

    caplog.set_level(logging.ERROR)
    async with desk(tmp_path, writeback=where == "release") as d:
        if where == "settling":
            d.uploads.on_settled = broken
        elif where == "attempt":
            d.uploads.on_committed = broken
        dirty_file = await d.create("k", b"1")
        if where == "release":
            dirty_file.file.content = broken  # type: ignore[method-assign]
            d.uploads.release(dirty_file)
        else:
            try:
                await d.close(dirty_file)
            except CachefsError:
                assert where == "attempt"
        await d.quiet()
        d.uploads.on_settled = d.uploads.on_committed = lambda *_: None
        await d.save("other", b"2")
        await trio.sleep(10)
        assert d.store.content("other") == b"2"
        assert sum("a bug" in (r.exc_text or "") for r in caplog.records) == 1, "its traceback is said once"


@in_trio
async def test_a_dirty_file_is_kept_while_its_name_still_shows_it(tmp_path: Path) -> None:
    """The names database could not take the row of what the origin has."""
    async with desk(tmp_path) as d:
        shows = True
        d.uploads.on_settling = lambda dirty_file: not shows
        dirty_file = await d.save("k", b"1" * LARGE)
        await trio.sleep(10)
        assert d.settled == [] and d.cache.adopted == {} and len(await d.files()) == 1
        d.uploads.open(dirty_file)
        assert bytes(await dirty_file.read(0, 1)) == b"1"
        d.uploads.release(dirty_file)
        shows = False
        await trio.sleep(10)
        assert d.settled == ["k"] and await d.files() == []

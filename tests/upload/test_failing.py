"""Each system call on a staging file fails once: the file holds what was written without an error, no more, and goes to the
store so."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import CachefsError
from cachefs.upload import DirtyFile, staging
from tests.fetch.scripted import content
from tests.upload.scripted import Desk, add, desk, in_trio

CALLS = (
    "open",
    "close",
    "fstat",
    "pread",
    "pwrite",
    "ftruncate",
    "posix_fallocate",
    "fdatasync",
    "copy_file_range",
)


class FailingOs:
    """`os` as staging files see it: the `at`th of these calls fails."""

    def __init__(self, at: int, code: int) -> None:
        self.at, self.code, self.count, self.failed = at, code, 0, ""

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name not in CALLS:
            return call

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                self.failed = name
                if name == "close":
                    call(*args)  # the descriptor is gone all the same
                raise OSError(self.code, os.strerror(self.code))
            return call(*args, **kwargs)

        return counted


async def works(change: Awaitable[object]) -> bool:
    try:
        await change
    except CachefsError:
        return False
    return True


async def writes(d: Desk, dirty_file: DirtyFile) -> bytes:
    """Changes of all kinds; what the file should hold then."""
    plain = bytearray()
    for number, size in enumerate((10, 70_000, 3)):
        if await works(add(dirty_file, content(number, size))):
            plain += content(number, size)
        assert dirty_file.size == len(plain)
    if await works(dirty_file.allocate(0, 100_000)):
        plain.extend(bytes(100_000 - len(plain)))
    if await works(dirty_file.truncate(80_000)):
        plain = plain[:80_000] + bytes(max(0, 80_000 - len(plain)))
    assert dirty_file.size == len(plain)
    with suppress(CachefsError):
        assert await dirty_file.read(0, 200_000) == bytes(plain)
    if await works(add(dirty_file, b"end")):
        plain += b"end"
    return bytes(plain)


@pytest.mark.long
@pytest.mark.parametrize("code", [pytest.param(errno.EIO, marks=pytest.mark.long), errno.ENOSPC])
@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_what_fails_is_not_there_and_what_does_not_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writeback: bool, code: int
) -> None:
    monkeypatch.setattr(staging, "HELD", 64 << 10)
    at, failing = 0, FailingOs(0, 0)
    while at == 0 or failing.failed:
        at += 1
        failing = FailingOs(at, code)
        async with desk(tmp_path / f"{at}", writeback=writeback, upload_delay_s=1e6) as d:
            monkeypatch.setattr(staging, "os", failing)
            dirty_file = await d.uploads.begin(d.store, "k")
            if not await works(opened(d, dirty_file)):
                await d.uploads.discard(dirty_file)
                assert await d.files() == []
                continue
            plain = await writes(d, dirty_file)
            saved = await works(d.uploads.commit(dirty_file))
            again = await works(d.uploads.commit(dirty_file))
            assert saved or failing.failed
            if failing.failed not in ("fdatasync", "close"):
                assert again, "what failed once may be tried again"
            with suppress(CachefsError):
                assert await dirty_file.read(0, 200_000) == plain
            d.uploads.release(dirty_file)
            await d.uploads.flush()
            await trio.sleep(100)  # what failed in it is tried again
            await d.quiet()
            left = d.uploads.pending()
            if again or not left:
                assert d.store.content("k") == plain and not left
                assert await d.files() == [] and d.uploads.journal.rows("drafts") == {}
            else:
                assert "k" not in d.store.objects, "it may hold anything"
                await d.uploads.discard(dirty_file)
                assert await d.files() == []
    assert at > 10


async def opened(d: Desk, dirty_file: DirtyFile) -> None:
    d.uploads.open(dirty_file)

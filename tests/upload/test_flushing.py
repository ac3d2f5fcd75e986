"""What `flush` finds, and what it leaves to others."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from cachefs.base.errors import PermissionDenied
from tests.upload.scripted import ScriptedStore, desk, in_trio


@in_trio
async def test_a_failure_that_flush_was_told_is_told_to_the_writer(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=10) as d:
        dirty_file = await d.create("k", b"one")
        await d.uploads.commit(dirty_file)
        d.store.fail("put", lambda: PermissionDenied("no"), times=2)
        assert await d.uploads.flush() == [dirty_file]
        with pytest.raises(PermissionDenied):
            await d.uploads.commit(dirty_file)
        await d.uploads.commit(dirty_file)  # once is enough
        assert await d.uploads.flush() == [dirty_file]
        with pytest.raises(PermissionDenied):
            await d.close(dirty_file)
        assert await d.uploads.flush() == []


@in_trio
async def test_what_waits_for_another_store_is_counted(tmp_path: Path) -> None:
    theirs = ScriptedStore(source="scripted://other")
    async with desk(tmp_path, theirs, writeback=True, upload_delay_s=10) as d:
        for number in range(3):
            await d.save(f"{number}", bytes(1000))
    for _ in range(2):
        async with desk(tmp_path, writeback=True) as d:
            await d.save("k", b"mine")
            await trio.sleep(5)
            assert d.uploads.pending() == [] and d.uploads.elsewhere == [(theirs.source, 1000)] * 3
    async with desk(tmp_path, theirs, writeback=True) as d:
        assert d.uploads.elsewhere == [] and len(d.uploads.pending()) == 3
        assert await d.uploads.flush() == []

"""What holds when an upload or a rename is halfway through, or fails there; which parts are taken for what a file holds."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import CachefsError, CacheUnusable, NoRoom
from cachefs.origin import Part
from cachefs.upload import sending
from cachefs.upload.content import Row
from cachefs.upload.journal import DIRTY_FILES
from tests.fetch.scripted import content
from tests.upload.scripted import desk, in_trio


@pytest.mark.parametrize("again", ["", "written", "acknowledged"])
@in_trio
async def test_what_was_acknowledged_during_an_upload_comes_back_after_a_crash(
    tmp_path: Path, again: str
) -> None:
    """Of what was only written there is a row still, because what was acknowledged before it is gone from the file."""
    async with desk(tmp_path, writeback=True, upload_delay_s=5.0) as d:
        dirty_file = await d.create("k", b"first")
        await d.uploads.commit(dirty_file)
        held = d.store.hold("put")
        await held.reached.wait()
        if again:
            await dirty_file.write(5, b" and second")
        if again == "acknowledged":
            await d.uploads.commit(dirty_file)
        assert held.release is not None
        held.release.set()
        await d.quiet()
        assert d.store.content("k") == b"first" and dirty_file.dirty is bool(again)
        rows = d.uploads.journal.rows(DIRTY_FILES)
        assert (dirty_file.content.row is Row.ACKNOWLEDGED) is bool(again)
        assert [row["acknowledged"] for row in rows.values()] == [True] * bool(again)
        await d.close(dirty_file)
        await trio.sleep(20)
        assert not d.uploads.journal.rows(DIRTY_FILES)


@pytest.mark.parametrize("error", [NoRoom, CacheUnusable])
@pytest.mark.parametrize("over", [False, True])
@in_trio
async def test_a_rename_that_cannot_be_noted_has_not_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool, error: type[CachefsError]
) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        dirty_file = await d.save("old", b"data")
        other = await d.save("new", b"theirs") if over else None
        keep, failures = d.uploads._records.keep, [error("full")]

        async def fails(*arguments: Any) -> None:
            if failures:
                raise failures.pop()
            await keep(*arguments)

        monkeypatch.setattr(d.uploads._records, "keep", fails)
        before = dirty_file.origin, dirty_file.key, dirty_file.base
        with pytest.raises(error):
            await d.uploads.rename(dirty_file, d.store, "new", base="x", over=other)
        assert (dirty_file.origin, dirty_file.key, dirty_file.base) == before
        assert dirty_file.record.over is None and not dirty_file.trying.turn.locked()
        row = d.uploads.journal.rows(DIRTY_FILES)[dirty_file.id]
        assert (row["key"], row["over"], row["acknowledged"]) == ("old", None, True)
        assert not await d.uploads.rename(dirty_file, d.store, "new", over=other)
        row = d.uploads.journal.rows(DIRTY_FILES)[dirty_file.id]
        assert (row["key"], row["over"]) == ("new", None if other is None else other.id)


@pytest.mark.parametrize("size", [1, sending.HASHED, sending.HASHED + 1, 2 * sending.HASHED + 7])
def test_a_part_is_the_same_if_its_size_and_its_digest_are(tmp_path: Path, size: int) -> None:
    """Read to its end and no further, from where it begins."""
    data = content(1, size)
    (tmp_path / "f").write_bytes(b"xx" + data + b"yyy")
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    digest = hashlib.md5(data).hexdigest()
    for etag, length, same in (
        (digest, size, True),
        (f'"{digest}"', size, True),
        (f'"{digest.upper()}"', size, True),
        (f'"{digest}"', size + 1, False),
        (f'"{digest}"', size - 1, False),
        (f'"{digest}-2"', size, False),
        (f'"{digest[:-1]}"', size, False),
        ('"' + "0" * 32 + '"', size, False),
        ("", size, False),
    ):
        assert sending.same(Part(etag, length), fd, 2, size) is same
    assert not sending.same(Part(digest, size), fd, 3, size)
    os.close(fd)

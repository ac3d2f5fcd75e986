"""Operations that are cancelled at each of their awaits: a file has one name then, the journal says the same, and what was
written reaches the store under it, or nothing does."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import CacheUnusable
from cachefs.upload import DirtyFile, staging, uploads
from cachefs.upload.journal import DiskHangs
from tests.fetch.scripted import content
from tests.interrupting import interrupted
from tests.upload.scripted import PART, Desk, desk, in_trio

OLD, NEW = content(1, 3 * PART), content(2, 4 * PART + 1)
STATES = ("here", "stored", "changed", "half sent")


async def file_in(d: Desk, state: str) -> tuple[DirtyFile, bytes]:
    """An open dirty file `a` in that state, and what it holds."""
    if state in ("stored", "changed"):
        dirty_file = await d.create("a", OLD)
        await d.uploads._queue.upload(dirty_file)
        if state == "stored":
            return dirty_file, OLD
        await dirty_file.write(0, NEW)
    else:
        dirty_file = await d.create("a", NEW)
    if state != "half sent":
        await d.uploads.commit(dirty_file)
    await d.quiet()
    return dirty_file, NEW


async def ends(d: Desk, dirty_file: DirtyFile) -> None:
    d.uploads.release(dirty_file)
    assert await d.uploads.flush() == []
    await trio.sleep(3)
    await d.quiet()
    assert d.store.uploads == {} and d.uploads.journal.rows("drafts") == {}
    assert await d.files() == [] and d.uploads._dirty_files == {} and d.uploads.pending() == []


@pytest.mark.parametrize("state", STATES)
@in_trio
async def test_a_rename_that_is_cancelled_leaves_one_name(tmp_path: Path, state: str) -> None:
    step, goes_on = 0, True
    while goes_on:
        step += 1
        writeback = state != "half sent"
        async with desk(tmp_path / f"{step}", writeback=writeback, upload_delay_s=1e6) as d:
            d.store.latency_s = 0.01
            dirty_file, data = await file_in(d, state)
            goes_on = await interrupted(step, partial(d.rename, dirty_file, "b"))
            rows = d.uploads.journal.rows("drafts")
            if dirty_file.acknowledged:
                assert rows[dirty_file.id]["key"] == dirty_file.key, (
                    "after a crash it has the name that it has now"
                )
            key = dirty_file.key
            await ends(d, dirty_file)
            assert d.store.content(key) == data
            other = d.store.objects.get("b" if key == "a" else "a", ("", b""))[1]
            assert other in (b"", OLD, data) and (goes_on or (key == "b" and not other))
    assert step >= 2


@pytest.mark.parametrize("state", STATES)
@in_trio
async def test_a_removal_that_is_cancelled_happens_or_does_not(tmp_path: Path, state: str) -> None:
    step, goes_on = 0, True
    while goes_on:
        step += 1
        writeback = state != "half sent"
        async with desk(tmp_path / f"{step}", writeback=writeback, upload_delay_s=1e6) as d:
            d.store.latency_s = 0.01
            dirty_file, data = await file_in(d, state)
            discard = partial(d.uploads.discard, dirty_file, instead=partial(d.store.delete, "a"))
            goes_on = await interrupted(step, discard)
            gone, kept = dirty_file.discarded, dirty_file.dirty
            await ends(d, dirty_file)
            if gone:
                assert d.store.objects == {}
            elif kept:
                assert d.store.content("a") == data
            assert goes_on or gone
    assert step >= 2


@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("state", STATES)
@in_trio
async def test_a_commit_that_is_cancelled_is_made_by_the_next(
    tmp_path: Path, state: str, writeback: bool
) -> None:
    step, goes_on = 0, True
    while goes_on:
        step += 1
        async with desk(tmp_path / f"{step}", writeback=writeback, upload_delay_s=1e6) as d:
            d.store.latency_s = 0.01
            dirty_file, data = await file_in(d, state)
            await dirty_file.write(0, b"changed")
            goes_on = await interrupted(step, partial(d.uploads.commit, dirty_file))
            assert dirty_file.dirty == (writeback or goes_on) or d.store.content("a")[:7] == b"changed"
            await ends(d, dirty_file)
            assert d.store.objects.keys() == {"a"} and d.store.content("a") == b"changed" + data[7:]


@in_trio
async def test_a_beginning_that_is_cancelled_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "HELD", 64 << 10)
    step, goes_on = 0, True
    while goes_on:
        step += 1
        async with desk(tmp_path / f"{step}") as d:
            d.store.show("a", NEW[:70_000])
            begun: list[DirtyFile] = []

            async def begin(d: Desk = d, begun: list[DirtyFile] = begun) -> None:
                begun.append(await d.uploads.begin(d.store, "a", base=d.store.version("a")))

            goes_on = await interrupted(step, begin)
            assert len(await d.files()) == len(d.uploads._dirty_files) == len(begun)
            for dirty_file in begun:
                assert dirty_file.size == 70_000
                d.uploads.open(dirty_file)
                await ends(d, dirty_file)
            await d.quiet()
    assert step >= 3


@in_trio
async def test_on_a_disk_that_hangs_a_cancelled_rename_keeps_the_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "HANGS_AFTER_S", 0.0)
    step, goes_on = 0, True
    while goes_on:
        step += 1
        async with desk(tmp_path / f"{step}", writeback=True, upload_delay_s=1e6) as d:
            dirty_file, _ = await file_in(d, "here")
            answers, write = threading.Event(), d.uploads.journal._database.write

            def slow(*changes: Any, answers: threading.Event = answers, write: Any = write) -> None:
                answers.wait(20)
                write(*changes)

            d.uploads.journal._database.write = slow  # type: ignore[method-assign]
            goes_on = await interrupted(step, partial(refused, d, dirty_file))
            answers.set()
            await d.quiet()
            assert dirty_file.key == "a" and d.uploads.journal.rows("drafts")[dirty_file.id]["key"] == "a"
            await ends(d, dirty_file)
    assert step >= 3


@pytest.mark.parametrize("verb", ["acknowledge", "keep", "forget"])
@in_trio
async def test_a_row_that_waits_for_another_of_its_file_waits_no_longer_than_it_may(
    tmp_path: Path, verb: str
) -> None:
    """A close waits as long as the disk does, and has the turn. The kernel holds the directory for a change of a name."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        dirty_file, _ = await file_in(d, "changed")

        async def closes(task_status: trio.TaskStatus[None]) -> None:
            async with dirty_file.record.turn:
                task_status.started()
                await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            await nursery.start(closes)
            began = trio.current_time()
            with trio.fail_after(60), pytest.raises(DiskHangs):
                await getattr(d.uploads._records, verb)(dirty_file, uploads.HANGS_AFTER_S)
            assert trio.current_time() - began == pytest.approx(uploads.HANGS_AFTER_S)
            nursery.cancel_scope.cancel()
        await ends(d, dirty_file)


@pytest.mark.parametrize("verb", ["rename", "discard"])
@in_trio
async def test_a_change_of_a_name_waits_for_no_upload_whose_row_waits_for_a_disk_that_hangs(
    tmp_path: Path, verb: str
) -> None:
    """All of the file is at the origin, and the last step of its upload is to remove its row."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1) as d:
        dirty_file = await d.save("a", b"1")
        hangs, answers, write = trio.Event(), trio.Event(), d.uploads.journal.write

        async def waits(table: str, key: str, row: Any, **how: Any) -> None:
            if row is None:
                hangs.set()
                with trio.CancelScope(shield=True):
                    await answers.wait()
            await write(table, key, row, **how)

        d.uploads.journal.write = waits  # type: ignore[method-assign, assignment]
        await hangs.wait()
        d.uploads.journal.hangs_elsewhere = lambda: True
        changed = (
            partial(d.rename, dirty_file, "b") if verb == "rename" else partial(d.uploads.discard, dirty_file)
        )
        with trio.fail_after(1), pytest.raises(DiskHangs):
            await changed()
        answers.set()
        await d.quiet()
        assert d.store.content("a") == b"1" and d.uploads._dirty_files == {}


async def refused(d: Desk, dirty_file: DirtyFile) -> None:
    with suppress(CacheUnusable):
        await d.uploads.rename(dirty_file, "b")

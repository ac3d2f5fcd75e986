"""What was known before the room waited may be false behind it: each of these changes something meanwhile."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.errors import NoRoom, OriginFailed
from cachefs.base.names import ObjectId
from cachefs.upload import DirtyFile, journal, staging
from cachefs.upload.journal import DIRTY_FILES, DiskHangs
from cachefs.upload.staging import LOOK_S
from tests.upload.scripted import Desk, Room, ScriptedStore, add, desk, in_trio
from tests.upload.test_passthrough import Kernel, taken


class Slow(Room):
    """Takes a file when it is `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.released = trio.Event(), trio.Event()

    async def adopt(self, object_id: ObjectId, path: Path) -> bool:
        self.reached.set()
        await self.released.wait()
        return await super().adopt(object_id, path)


@pytest.mark.parametrize("adopts", [True, False])
@pytest.mark.parametrize("in_memory", [True, False])
@in_trio
async def test_a_file_that_a_name_shows_again_while_the_cache_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool, adopts: bool
) -> None:
    """It stays, and can be opened, until the name does not show it any more."""
    monkeypatch.setattr(staging, "HELD", staging.HELD if in_memory else 0)
    cache, shown = Slow(), [False]
    cache.adopts = adopts
    async with desk(tmp_path, cache=cache) as d:
        d.uploads.on_settling = lambda dirty_file: not shown[0]
        dirty_file = await d.save("k", b"data")
        await cache.reached.wait()
        shown[0] = True
        cache.released.set()
        await trio.sleep(10 * LOOK_S)
        assert bool(cache.adopted) == adopts and d.settled == []
        for _ in range(2):
            d.uploads.open(dirty_file)
            assert await dirty_file.read(0, 9) == b"data"
            d.uploads.release(dirty_file)
            await trio.sleep(10 * LOOK_S)
            assert d.settled == []
        shown[0] = False
        await trio.sleep(10 * LOOK_S)
        assert d.settled == ["k"]


@pytest.mark.parametrize("in_memory", [True, False])
@in_trio
async def test_a_file_that_a_name_shows_again_when_its_last_user_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    """The cache has it already."""
    monkeypatch.setattr(staging, "HELD", staging.HELD if in_memory else 0)
    cache, shown = Slow(), [False]
    async with desk(tmp_path, cache=cache) as d:
        d.uploads.on_settling = lambda dirty_file: not shown[0]
        dirty_file = await d.save("k", b"data")
        await cache.reached.wait()
        d.uploads.open(dirty_file)
        cache.released.set()
        await d.quiet()
        assert dirty_file.content.adopted
        shown[0] = True
        d.uploads.release(dirty_file)
        await trio.sleep(10 * LOOK_S)
        assert d.settled == []
        d.uploads.open(dirty_file)
        await add(dirty_file, b" and more")
        assert await dirty_file.read(0, 99) == b"data and more"
        await d.close(dirty_file)
        shown[0] = False
        await trio.sleep(10 * LOOK_S)
        assert d.settled == ["k"] and d.store.content("k") == b"data and more"


class TakenDuringRecast(Slow):
    """The cache has taken a file before it answers whether it has one to recast."""

    async def recast(self, old: ObjectId, new: ObjectId) -> bool:
        found = await super().recast(old, new)
        if not self.released.is_set():
            self.released.set()
            await trio.testing.wait_all_tasks_blocked(0.01)
        return found


@pytest.mark.parametrize("cache", [Slow, TakenDuringRecast])
@pytest.mark.parametrize("in_memory", [True, False])
@in_trio
async def test_a_file_that_is_renamed_while_the_cache_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool, cache: type[Slow]
) -> None:
    """It is cached under its new name, whenever the rename is done, and not under its old one."""
    monkeypatch.setattr(staging, "HELD", staging.HELD if in_memory else 0)
    taking = cache()
    async with desk(tmp_path, cache=taking) as d:
        dirty_file = await d.save("old", b"data")
        await taking.reached.wait()
        await d.rename(dirty_file, "new")
        taking.released.set()
        await trio.sleep(10 * LOOK_S)
        assert d.settled == ["new"] and list(d.store.objects) == ["new"]
        assert taking.adopted == {d.store.version("new"): b"data"}


@pytest.mark.parametrize("adopts", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@in_trio
async def test_a_file_that_is_settled_when_the_turn_to_rename_it_comes(
    tmp_path: Path, shared: bool, adopts: bool
) -> None:
    """Its staging file is gone then, also if readers had that as their backing file."""
    cache = Slow()
    cache.adopts = adopts
    async with desk(tmp_path, cache=cache) as d:
        kernel = Kernel(d)
        if shared:
            dirty_file, fd = await taken(d, tmp_path, b"data")
            kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
            os.close(fd)
            d.uploads.returned(dirty_file)
            d.uploads.release(dirty_file)
        else:
            dirty_file = await d.save("k", b"1" * (staging.HELD + 1))
        await cache.reached.wait()
        async with trio.open_nursery() as nursery, dirty_file.trying.turn:
            nursery.start_soon(d.rename, dirty_file, "new")
            await trio.testing.wait_all_tasks_blocked(0.01)
            cache.released.set()
            await d.quiet()
            assert d.settled == ["k"]
        assert list(d.store.objects) == ["new"]
        assert list(cache.adopted) == ([d.store.version("new")] if adopts else [])


async def save_half(d: Desk) -> Any:
    """A file of which the store has a version, and the journal knows that more is to come."""
    dirty_file = await d.save("a", b"first")
    d.uploads.open(dirty_file)
    assert await d.uploads.flush() == []
    await add(dirty_file, b" and second")
    await d.uploads.commit(dirty_file)
    await add(dirty_file, b" and half")
    return dirty_file


@in_trio
async def test_a_journal_that_fails_when_the_copy_of_a_rename_is_made(tmp_path: Path) -> None:
    """The file has its old name, and is uploaded under it."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        dirty_file = await save_half(d)
        fail_once(d, lambda row: row is not None and row["key"] == "b")
        with pytest.raises(NoRoom):
            await d.uploads.rename(dirty_file, "b")
        assert dirty_file.key == "a"
        assert d.uploads.journal.rows("drafts")[dirty_file.id]["key"] == "a"
        await d.close(dirty_file)
        assert await d.uploads.flush() == []
        await d.quiet()
        assert d.store.content("a") == b"first and second and half" and d.settled == ["a"]


def fail_once(d: Desk, which: Callable[[Any], bool]) -> None:
    """The next such row is refused."""
    plain: Callable[..., Awaitable[None]] = d.uploads.journal.write

    async def write(table: str, key: str, row: Any, **how: Any) -> None:
        if which(row):
            d.uploads.journal.write = plain  # type: ignore[method-assign]
            raise NoRoom("the disk is full")
        await plain(table, key, row, **how)

    d.uploads.journal.write = write  # type: ignore[method-assign]


@in_trio
async def test_a_file_that_is_stored_while_it_is_made_safe_here(tmp_path: Path) -> None:
    """It needs no row in the journal any more, which would bring it back; and what is written later is uploaded."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1) as d:
        dirty_file = await d.create("k", b"data")
        plain, reached, released = dirty_file.file.content, trio.Event(), trio.Event()

        async def content(size: int) -> bytes | None:
            found = await plain(size)
            reached.set()
            await released.wait()
            return found

        dirty_file.file.content = content  # type: ignore[method-assign]
        d.uploads.release(dirty_file)
        await reached.wait()
        put = d.store.hold("put")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.flush)
            await put.reached.wait()
            d.uploads.open(dirty_file)
            assert put.release is not None
            put.release.set()
        assert d.store.content("k") == b"data" and not dirty_file.dirty
        released.set()
        await trio.sleep(5)
        assert d.uploads.journal.rows("drafts") == {}
        dirty_file.file.content = plain  # type: ignore[method-assign]
        await add(dirty_file, b" and more")
        await d.close(dirty_file)
        await trio.sleep(5)
        assert d.store.content("k") == b"data and more" and d.settled == ["k"]


def hold_row(d: Desk) -> tuple[trio.Event, trio.Event]:
    """Have the next row of the journal wait: events that it waits, and until when."""
    write, reached, released = d.uploads.journal.write, trio.Event(), trio.Event()

    async def held(*what: Any, **how: Any) -> None:
        d.uploads.journal.write = write  # type: ignore[method-assign]
        reached.set()
        await released.wait()
        await write(*what, **how)

    d.uploads.journal.write = held  # type: ignore[method-assign]
    return reached, released


@in_trio
async def test_a_file_that_is_acknowledged_at_the_end_of_a_rename(tmp_path: Path) -> None:
    """The rename ends while the row of the acknowledgement is written. The row stays: a crash must not lose the file."""
    store = ScriptedStore()
    store.show("a", b"v1")
    async with desk(tmp_path, store, writeback=True, upload_delay_s=100) as d, trio.open_nursery() as nursery:
        dirty_file = await d.create("a", b"v2", base=store.version("a"), upto=0)
        copy = store.hold("copy")
        nursery.start_soon(d.rename, dirty_file, "b")
        await copy.reached.wait()
        reached, released = hold_row(d)
        nursery.start_soon(d.uploads.commit, dirty_file)
        await reached.wait()
        assert copy.release is not None
        copy.release.set()
        await d.quiet()
        released.set()
        await d.quiet()
        assert dirty_file.acknowledged
        assert d.uploads.journal.rows(DIRTY_FILES)[dirty_file.id]["key"] == "b"


@pytest.mark.parametrize("uploaded", [False, True], ids=["removed", "uploaded"])
@in_trio
async def test_a_removal_that_meets_an_acknowledgement_which_waits_for_the_disk(
    tmp_path: Path, uploaded: bool
) -> None:
    """The row of the acknowledgement goes when the disk answers. Otherwise the next start would bring the file back, removed
    as it is, or over what was uploaded since."""
    async with desk(tmp_path, writeback=True, upload_delay_s=100) as d, trio.open_nursery() as nursery:
        dirty_file = await d.create("k", b"data")
        reached, released = hold_row(d)
        nursery.start_soon(d.uploads.commit, dirty_file)
        await reached.wait()
        if uploaded:
            put = d.store.hold("put")
            nursery.start_soon(d.uploads._queue.upload, dirty_file)
            await put.reached.wait()
            assert put.release is not None
            d.store.fail("delete", lambda: OriginFailed("not now"))
            async with trio.open_nursery() as removing:
                removing.start_soon(refused, d, dirty_file)
                await trio.testing.wait_all_tasks_blocked()
                put.release.set()
        else:
            with pytest.raises(DiskHangs):
                await d.uploads.discard(dirty_file)
        released.set()
        await d.quiet()
        assert d.uploads.journal.rows(DIRTY_FILES) == {}
        d.uploads.release(dirty_file)


async def refused(d: Desk, dirty_file: DirtyFile) -> None:
    with pytest.raises(OriginFailed, match="not now"):
        await d.uploads.discard(dirty_file, instead=partial(d.store.delete, "k"))


@in_trio
async def test_rows_that_wait_for_the_disk_when_the_daemon_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written if it answers soon, as before a stop."""
    async with desk(tmp_path) as d, trio.open_nursery() as nursery:
        answers, in_thread = trio.Event(), journal.in_thread

        async def hangs(call: Any) -> Any:
            await answers.wait()
            return await in_thread(call)

        monkeypatch.setattr(journal, "in_thread", hangs)
        for name in ("committing", "next"):
            with pytest.raises(DiskHangs):
                await d.uploads.note(name, {})
        nursery.start_soon(d.uploads.hand_over)
        await trio.testing.wait_all_tasks_blocked()
        answers.set()
    async with desk(tmp_path) as d:
        assert d.uploads.notes().keys() == {"committing", "next"}


@in_trio
async def test_a_row_that_could_not_be_removed_and_is_needed_again(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.create("k", b"data")
        await d.uploads.commit(dirty_file)
        fail_once(d, lambda row: row is None)
        assert await d.uploads.flush() == []
        assert d.store.content("k") == b"data" and not dirty_file.acknowledged
        await add(dirty_file, b" and more")
        await d.uploads.commit(dirty_file)
        await trio.sleep(100)
        row = d.uploads.journal.rows("drafts")[dirty_file.id]
        assert row["acknowledged"] and dirty_file.acknowledged

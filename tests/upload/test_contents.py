"""Small files that are acknowledged have their content in the journal. One that lies in memory has no staging file until it
is changed, and a staging file is not synced: what becomes of them after a kill, and after a power cut, which leaves of a
staging file what the kernel has written back by itself."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.database import MARK, Database, Put
from cachefs.base.errors import CacheUnusable, NoRoom, OriginFailed
from cachefs.base.shared_memory import SharedMemory
from cachefs.daemon.uploading import left_behind
from cachefs.upload import DirtyFile, journal, orphans, staging
from cachefs.upload.journal import CONTENTS, CONTENTS_BYTES, Journal
from cachefs.upload.staging import HELD
from cachefs.upload.uploads import TOGETHER
from tests.upload.scripted import SOURCE, Room, ScriptedStore, Turns, add, desk, in_trio

LOST = pytest.mark.parametrize("lost", ["empty", "zeros", "missing"])
"""What a power cut makes of a file that was not synced."""


def cut(path: Path, after: Path, lost: str = "", boot: str = "another") -> Path:
    """The power is cut now: `after` is what the disk has then. Without `lost` only the process is killed; "nothing" is lost
    if all is synced."""
    shutil.copytree(path, after)
    for file in (after / "staging").iterdir() if lost not in ("", "nothing") else ():
        size = file.stat().st_size
        if lost == "missing":
            file.unlink()
        else:
            file.write_bytes(bytes(size if lost == "zeros" else 0))
    mark = after / "state" / "journal" / MARK
    if lost:
        mark.write_text(re.sub(r"\bopen \S+", f"open {boot}", mark.read_text()))
    return after


async def spilled(dirty_file: DirtyFile) -> None:
    """It has a staging file, with what was acknowledged."""
    with dirty_file.file.used():
        await dirty_file.file.spill()


async def left(path: Path, store: Any = None) -> dict[str, bytes]:
    """What the next daemon uploads."""
    async with desk(path, store, writeback=True) as d:
        names = {dirty_file.id for dirty_file in d.uploads.pending() if dirty_file.file.in_memory}
        assert {name.decode() for name, _ in d.uploads.journal._database.scan(CONTENTS)} == names
        assert await d.uploads.flush() == []
        await d.quiet()
        assert d.uploads.journal._database.scan(CONTENTS) == [] and d.uploads.journal._room == CONTENTS_BYTES
        assert d.uploads._disk.memory_left == staging.HELD_ALTOGETHER
        return {key: d.store.content(key) for key in d.store.objects}


@pytest.mark.parametrize("discarded", [True, False])
@in_trio
async def test_a_replaced_file_whose_row_the_disk_refused_to_change_does_not_come_back(
    tmp_path: Path, discarded: bool
) -> None:
    """Its row says that it was acknowledged. It goes with the row of the file which has replaced it, if not before."""
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        old, new = await d.save("k", b"old"), await d.save("tmp", b"new")
        write, refused = d.uploads.journal._database.write, list[Put]()

        def refuses(puts: Sequence[Put]) -> None:
            if not refused and any(name == old.id.encode() for _, name, _ in puts):
                refused.extend(puts)
                raise CacheUnusable("Input/output error")
            write(puts)

        d.uploads.journal._database.write = refuses  # type: ignore[method-assign, assignment]
        await d.rename(new, "k", over=old)
        if discarded:
            await d.uploads.discard(old, replaced=True)
        await d.uploads._queue.upload(new)
        await d.quiet()
        assert refused and d.store.content("k") == b"new"
        after = cut(tmp_path / "a", tmp_path / "b", "missing")
    assert await left(after) == {}


@in_trio
async def test_a_content_that_the_disk_refused_to_replace_is_replaced_by_the_next_close(
    tmp_path: Path,
) -> None:
    """It is an older one, and no later close may leave it there."""
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.create("k", b"1")
        await d.uploads.commit(dirty_file)
        write = d.uploads.journal._database.write
        d.uploads.journal._database.write = lambda puts: (_ for _ in ()).throw(
            CacheUnusable("Input/output error")
        )  # type: ignore[assignment]
        await add(dirty_file, b"2" * HELD)
        with pytest.raises(CacheUnusable):
            await d.uploads.commit(dirty_file)
        d.uploads.journal._database.write = write  # type: ignore[method-assign]
        await d.uploads.commit(dirty_file)
        assert d.uploads.journal._database.scan(CONTENTS) == []
        d.uploads.release(dirty_file)


@LOST
@in_trio
async def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path: Path, lost: str) -> None:
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        await d.save("small", b"1" * 100_000)
        await d.save("empty", b"")
        again = await d.save("again", b"2" * 10)
        d.uploads.open(again)
        await again.write(5, b"3" * 10)
        await d.close(again)
        gone = await d.save("gone", b"4")
        await d.uploads.discard(gone)
        moved = await d.save("old", b"5")
        await d.uploads.rename(moved, "new")
        replaced, by = await d.save("k", b"6"), await d.save("tmp", b"7")
        await d.uploads.rename(by, "k", over=replaced)
        await d.uploads.discard(replaced, replaced=True)
        await d.create("open", b"8")
        await d.files()  # what was removed has gone, or it goes while it is copied
        after = cut(tmp_path / "a", tmp_path / "b", lost)
    assert await left(after) == {
        "small": b"1" * 100_000,
        "empty": b"",
        "again": b"2" * 5 + b"3" * 10,
        "new": b"5",
        "k": b"7",
    }


@in_trio
async def test_a_power_cut_leaves_the_last_content_that_was_acknowledged(tmp_path: Path) -> None:
    """Not an older one that the journal had before the file grew beyond what it takes."""
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.save("k", b"1" * 100)
        d.uploads.open(dirty_file)
        await add(dirty_file, b"2" * HELD)
        await d.uploads.commit(dirty_file)
        assert not d.uploads.journal.has_content(dirty_file.id)
        after = cut(tmp_path / "a", tmp_path / "b")
        mark = after / "state" / "journal" / MARK
        mark.write_text(re.sub(r"\bopen \S+", "open another", mark.read_text()))
        d.uploads.release(dirty_file)
    assert await left(after) == {"k": b"1" * 100 + b"2" * HELD}


@in_trio
async def test_a_content_that_was_read_before_a_later_one_was_acknowledged_does_not_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.create("k", b"1" * 100)
        read, has_read, goes_on = dirty_file.file.content, trio.Event(), trio.Event()

        async def slow(size: int) -> bytes | None:
            found = await read(size)
            has_read.set()
            await goes_on.wait()
            return found

        monkeypatch.setattr(dirty_file.file, "content", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.commit, dirty_file)
            await has_read.wait()
            await add(dirty_file, b"2" * HELD)
            await d.uploads.commit(dirty_file)
            goes_on.set()
        after = cut(tmp_path / "a", tmp_path / "b")
        mark = after / "state" / "journal" / MARK
        mark.write_text(re.sub(r"\bopen \S+", "open another", mark.read_text()))
        d.uploads.release(dirty_file)
    assert await left(after) == {"k": b"1" * 100 + b"2" * HELD}


@in_trio
async def test_a_kill_leaves_what_was_written_after_the_last_promise(tmp_path: Path) -> None:
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.save("k", b"1")
        d.uploads.open(dirty_file)
        await add(dirty_file, b"2")
        after = cut(tmp_path / "a", tmp_path / "b")
        again = cut(after, tmp_path / "c")
    assert await left(after) == {"k": b"12"}
    Journal(again / "state" / "journal", again / "staging").close()  # as a command that only looks does
    assert await left(again) == {"k": b"12"}


@in_trio
async def test_what_was_removed_from_outside_comes_back_as_it_was_acknowledged(tmp_path: Path) -> None:
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.save("k", b"1")
        await spilled(dirty_file)
        after = cut(tmp_path / "a", tmp_path / "b")
    (after / "staging" / dirty_file.id).unlink()
    assert await left(after) == {"k": b"1"}


@pytest.mark.parametrize("how", ["overwritten", "appended", "truncated", "emptied", "grown", "allocated"])
@in_trio
async def test_a_kill_leaves_what_was_changed_after_the_promise(tmp_path: Path, how: str) -> None:
    """As on a local file system: a change is not held in memory, because no promise may follow it."""
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.save("k", b"12345")
        assert await d.files() == [] and dirty_file.file.in_memory
        d.uploads.open(dirty_file)
        assert not dirty_file.write_now(0, b"x"), "it waits for the disk"
        if how == "overwritten":
            await dirty_file.write(1, b"xx")
        elif how == "appended":
            await add(dirty_file, b"xx")
        elif how == "allocated":
            await dirty_file.allocate(5, 2)
        else:
            await dirty_file.truncate({"truncated": 2, "emptied": 0, "grown": 7}[how])
        now = bytes(await dirty_file.read(0, 100))
        assert dirty_file.file.path.read_bytes() == now != b"12345"
        after = cut(tmp_path / "a", tmp_path / "b")
        assert not orphans.never_acknowledged(dirty_file.file.path)
        await d.close(dirty_file)
    assert await left(after) == {"k": now}


@pytest.mark.parametrize("lost", ["", "empty"])
@pytest.mark.parametrize("uploaded", [False, True])
@in_trio
async def test_a_file_that_was_emptied_on_the_disk_is_there_as_it_was_acknowledged(
    tmp_path: Path, uploaded: bool, lost: str
) -> None:
    """After a kill the file counts more than its content, so it may not be left empty."""
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.create("k", b"1" * (10 if uploaded else HELD + 1))
        if uploaded:
            await d.uploads.commit(dirty_file)
            await d.uploads._queue.upload(dirty_file)
        await dirty_file.truncate(0)
        await add(dirty_file, b"2")
        await d.close(dirty_file)
        after = cut(tmp_path / "a", tmp_path / "b", lost)
    assert (await left(after))["k"] == b"2"


@pytest.mark.parametrize("boot", [True, False])
@pytest.mark.parametrize("dies", ["spilled", "rewritten"])
@in_trio
async def test_a_kill_while_the_staging_file_is_made_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str, boot: bool
) -> None:
    """A file that is there counts more than the content: so it appears whole."""
    data, write, copies = b"1" * 1000, staging._write, list[Path]()

    def halfway(fd: int, offset: int, content: staging.Buffer) -> None:
        write(fd, offset, memoryview(content)[:500])
        copies.append(cut(tmp_path / "a", tmp_path / f"copy{len(copies)}", "" if boot else "empty"))
        write(fd, offset, content)

    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.save("k", data)
        monkeypatch.setattr(staging, "_write", halfway)
        if dies == "spilled":
            await spilled(dirty_file)
        else:
            await trio.to_thread.run_sync(d.uploads.journal.close)
        monkeypatch.undo()
        assert await d.files() == [dirty_file.id] and dirty_file.file.path.read_bytes() == data
    (after,) = copies
    assert await left(after) == {"k": data}
    assert [path for path in (after / "staging").iterdir() if path.suffix == ".0"] == []
    assert orphans.places(after) == []


@in_trio
async def test_a_file_that_was_acknowledged_in_memory_says_so_once_it_is_made(tmp_path: Path) -> None:
    """Under its name of that moment; and no more when its row is gone."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        first, second = await d.save("a", b"1"), await d.save("b", b"2")
        await d.rename(first, "new")
        await spilled(first)
        assert not orphans.never_acknowledged(first.file.path)
        (said,) = [one for one in orphans.found(tmp_path, waiting=True) if one.waiting]
        assert (said.key, said.source) == ("new", SOURCE)
        d.uploads.open(second)
        await d.uploads.discard(second)
        await add(second, b"3")
        assert await second.read(0, 9) == b"23" and await d.files() == [first.id]
        d.uploads.release(second)


@in_trio
async def test_a_file_that_the_journal_refused_stays_in_memory_and_is_promised_later(tmp_path: Path) -> None:
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.create("k", b"1")
        write = d.uploads.journal._database.write

        def full(*_: object) -> None:
            raise NoRoom(os.strerror(errno.ENOSPC))

        d.uploads.journal._database.write = full  # type: ignore[method-assign]
        with pytest.raises(NoRoom):
            await d.uploads.commit(dirty_file)
        assert not dirty_file.acknowledged and await d.files() == []
        d.uploads.journal._database.write = write  # type: ignore[method-assign]
        await d.close(dirty_file)
        after = cut(tmp_path / "a", tmp_path / "b")
    assert await left(after) == {"k": b"1"}


@in_trio
async def test_a_file_that_is_changed_while_it_is_acknowledged_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has what it was, and a kill leaves what it is."""
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.create("k", b"1")
        read = dirty_file.file.content

        async def changed(size: int) -> bytes | None:
            found = await read(size)
            assert dirty_file.write_now(0, b"2")
            return found

        monkeypatch.setattr(dirty_file.file, "content", changed)
        await d.uploads.commit(dirty_file)
        assert d.uploads.journal.content(dirty_file.id) == b"1" and dirty_file.between
        after = cut(tmp_path / "a", tmp_path / "b")
        monkeypatch.undo()
        await d.close(dirty_file)
    assert await left(after) == {"k": b"2"}


@in_trio
async def test_what_was_synced_while_its_removal_failed_is_acknowledged_afterwards(tmp_path: Path) -> None:
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.create("k", b"1")

        async def fails() -> None:
            await d.uploads.commit(dirty_file)
            await d.uploads._records.acknowledge(dirty_file)
            raise OriginFailed("no")

        with pytest.raises(OriginFailed):
            await d.uploads.discard(dirty_file, instead=fails)
        assert not dirty_file.acknowledged
        await d.close(dirty_file)
        assert dirty_file.acknowledged
        after = cut(tmp_path / "a", tmp_path / "b")
    assert await left(after) == {"k": b"1"}


@in_trio
async def test_a_file_in_memory_is_removed_in_one_turn_of_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.save("k", b"1" * 1000)
        turns = Turns(monkeypatch)
        await d.uploads.discard(dirty_file)
        assert turns.count == 1 and d.uploads._disk.memory_left == staging.HELD_ALTOGETHER
        after = cut(tmp_path / "a", tmp_path / "b")
    assert await left(after) == {}


@in_trio
async def test_a_disk_that_loses_a_staging_file_without_a_word_changes_no_byte(tmp_path: Path) -> None:
    """It was not synced, so no error was seen. The origin gets what was acknowledged, and so does the cache."""
    async with desk(tmp_path, cache=Room(adopts=True), writeback=True, upload_delay_s=1) as d:
        dirty_file = await d.save("k", b"1" * 1000)
        await spilled(dirty_file)
        dirty_file.file.path.write_bytes(bytes(900))
        await trio.sleep(5)
        await d.quiet()
        assert d.store.content("k") == b"1" * 1000 and list(d.cache.adopted.values()) == [b"1" * 1000]
        changed = await d.save("l", b"2")
        d.uploads.open(changed)
        await changed.write(0, b"3")
        await d.uploads.flush(at_the_end=True)
        assert d.store.content("l") == b"3", "what was written later is no damage"
        d.uploads.release(changed)


@in_trio
async def test_an_acknowledgement_costs_one_turn_of_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        turns = Turns(monkeypatch)
        dirty_file = await d.save("k", b"1" * 10_000)
        assert turns.count == 1, "the transaction"
        assert await d.files() == [] and dirty_file.acknowledged
        await d.uploads.commit(dirty_file)
        d.uploads.open(dirty_file)
        assert dirty_file.read_now(0, 20_000) == b"1" * 10_000
        await d.close(dirty_file)
        await d.rename(dirty_file, "l")
        assert await d.files() == [] and turns.count == 2, "the row with its new name"


@in_trio
async def test_files_in_memory_are_sent_from_there_and_go_to_the_cache_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1) as d:
        files = [await d.save(str(n), b"%d" % n * 1000) for n in range(TOGETHER)]
        read = list[str]()
        monkeypatch.setattr(d.uploads.journal, "content", read.append)
        await trio.sleep(2)
        await d.quiet()
        assert {key: d.store.content(key) for key in d.store.objects} == {
            one.key: one.key.encode() * 1000 for one in files
        }
        assert len(d.cache.adopted) == TOGETHER and d.cache.given == [TOGETHER]
        assert read == [] and await d.files() == [] and d.uploads._dirty_files == {}
        assert d.uploads._disk.memory_left == staging.HELD_ALTOGETHER


@in_trio
async def test_what_waits_for_its_upload_takes_no_tail_of_the_memory_that_outlives_the_daemon(
    tmp_path: Path,
) -> None:
    fd = os.memfd_create("test")
    try:
        memory = SharedMemory(fd, 0)
        async with desk(tmp_path, writeback=True, upload_delay_s=1000, memory=memory) as d:
            free = len(memory.tails.free)
            dirty_file = await d.create("k", b"1" * 1000)
            assert len(memory.tails.free) == free - 1
            await d.close(dirty_file)
            assert len(memory.tails.free) == free and dirty_file.read_now(0, 2000) == b"1" * 1000
    finally:
        os.close(fd)


@in_trio
async def test_the_journal_takes_no_more_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "CONTENTS_BYTES", 1000)
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=5) as d:
        files = [await d.save(str(n), b"%d" % n * 400) for n in range(4)]
        has = [d.uploads.journal.has_content(one.id) for one in files]
        assert has == [True, True, False, False] and d.uploads.journal._room == 200
        d.uploads.open(files[0])
        await add(files[0], b"0" * 200)
        await d.close(files[0])
        assert d.uploads.journal.has_content(files[0].id) and d.uploads.journal._room == 0
        await trio.sleep(20)
        await d.quiet()
        assert d.uploads.journal._room == 1000 and d.uploads.journal._database.scan(CONTENTS) == []
        assert {key: len(d.store.content(key)) for key in d.store.objects} == dict(
            zip("0123", (600, 400, 400, 400), strict=True)
        )


@in_trio
async def test_a_journal_that_is_closed_relies_on_staging_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the next start need not know whether the machine stopped in between."""
    synced, real = list[int](), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(os.fstat(fd).st_ino), real(fd)))
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.save("k", b"1")
        assert synced == []
        await d.uploads.hand_over()
        assert synced == [dirty_file.file.path.stat().st_ino]
    after = cut(tmp_path / "a", tmp_path / "b")
    assert await left(after) == {"k": b"1"}


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "full")


def no_room(*_: object) -> None:
    raise NoRoom(os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("lost", ["", "empty"])
@in_trio
async def test_a_start_on_a_full_disk_has_contents_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Of the three files one has a staging file, which the power cut has emptied or the kill has left. No row of the journal
    can be changed, either: all are there again after the next kill."""
    expected = {"memory": b"1" * 100, "disk": b"2" * 100, "empty": b""}
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        saved = {key: await d.save(key, data) for key, data in expected.items()}
        await spilled(saved["disk"])
        after = cut(tmp_path / "a", tmp_path / "b", lost)
    with monkeypatch.context() as patched:
        patched.setattr(staging, "_write", full)
        patched.setattr(Database, "write", no_room)
        async with desk(after, writeback=True, upload_delay_s=1000) as d:
            assert {one.key: bytes(await one.read(0, 1000)) for one in d.uploads.pending()} == expected
            used = sum(len(data) for key, data in expected.items() if lost or key != "disk")
            assert staging.HELD_ALTOGETHER - d.uploads._disk.memory_left == used
            assert await d.files() == ([] if lost else [saved["disk"].id])
            again = cut(after, tmp_path / "c")
            assert await d.uploads.flush() == []
            assert {key: d.store.content(key) for key in d.store.objects} == expected
            uploaded = cut(after, tmp_path / "d")
    assert await left(again) == expected
    assert (await left(uploaded))["memory"] == expected["memory"], "its row could not be removed"


@in_trio
async def test_a_content_that_counts_no_more_is_removed_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut before then restores what was acknowledged; one after it, what the staging file has."""
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.save("k", b"1")
        d.uploads.open(dirty_file)
        await add(dirty_file, b"2")
        after = cut(tmp_path / "a", tmp_path / "b")
        await d.close(dirty_file)
    with monkeypatch.context() as patched:
        patched.setattr(Database, "write", no_room)
        started = Journal(after / "state" / "journal", after / "staging")
    before = cut(after, tmp_path / "c", "empty")
    started.remove_later("other")
    await started.write(journal.NOTES, "note", {})
    assert started._database.scan(CONTENTS) == []
    started.close()
    assert await left(before) == {"k": b"1"}
    assert await left(after) == {"k": b"12"}


@in_trio
async def test_a_content_waits_in_the_journal_for_a_mount_of_its_source(tmp_path: Path) -> None:
    store, other = ScriptedStore(), ScriptedStore(source="scripted://other")
    async with desk(tmp_path / "a", store, writeback=True, upload_delay_s=1000) as d:
        await d.save("k", b"1" * 100)
        after = cut(tmp_path / "a", tmp_path / "b")
    async with desk(after, other, writeback=True) as d:
        assert d.uploads.pending() == [] and d.uploads.elsewhere == [(SOURCE, 100)]
        again = cut(after, tmp_path / "c")
    (again / "staging").rename(again / "state" / "staging")
    assert left_behind(again / "state").sizes == [100]
    (again / "state" / "staging").rename(again / "staging")
    assert await left(again) == {"k": b"1" * 100}


@pytest.mark.parametrize("before", journal.EARLIER)
@in_trio
async def test_a_journal_of_a_format_before_is_read_and_one_of_a_later_is_not(
    tmp_path: Path, before: str
) -> None:
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        d.uploads.journal._room = 0
        await d.save("k", b"1")
        after = cut(tmp_path / "a", tmp_path / "b")
    mark = after / "state" / "journal" / MARK
    mark.write_text(mark.read_text().replace(journal.FORMAT, before))
    journal.refuse_foreign(mark.parent)
    later = shutil.copytree(after, tmp_path / "c") / "state" / "journal" / MARK
    assert await left(after) == {"k": b"1"} and mark.read_text().startswith(journal.FORMAT)
    later.write_text(later.read_text().replace(before, "journal-4"))
    with pytest.raises(CacheUnusable):
        journal.refuse_foreign(later.parent)


@pytest.mark.parametrize("how", ["grows", "has no content"])
@in_trio
async def test_what_is_synced_after_a_start_on_a_full_disk_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The full disk has kept a content that is older than the staging file."""
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        await spilled(await d.save("k", b"1" * 100))
        after = cut(tmp_path / "a", tmp_path / "b")
    with monkeypatch.context() as patched:
        patched.setattr(Database, "write", no_room)
        d = await (started := desk(after, writeback=True, upload_delay_s=1000)).__aenter__()
    try:
        (one,) = d.uploads.pending()
        d.uploads.open(one)
        if how == "grows":
            await add(one, b"2" * HELD)
        else:
            await one.write(0, b"2" * 100)

            async def cold(size: int) -> None:
                """As if the page cache did not have it."""

            monkeypatch.setattr(one.file, "content", cold)
        await d.uploads.commit(one)
        expected = bytes(await one.read(0, 2 * HELD))
        later = cut(after, tmp_path / "c", "nothing")
        d.uploads.release(one)
    finally:
        await started.__aexit__(None, None, None)
    assert await left(later) == {"k": expected}


@in_trio
async def test_after_a_failed_sync_no_later_start_takes_the_staging_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a failed write once, and then drops the pages."""
    async with desk(tmp_path / "a", writeback=True, upload_delay_s=1000) as d:
        await spilled(await d.save("k", b"1" * 100))
        after = cut(tmp_path / "a", tmp_path / "b")

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched, suppress(CacheUnusable):
        patched.setattr(os, "fdatasync", fails)
        started = Journal(after / "state" / "journal", after / "staging")
        started._database.close(clean=False)  # killed
    for file in (after / "staging").iterdir():
        file.write_bytes(bytes(100))
    assert await left(after) == {"k": b"1" * 100}

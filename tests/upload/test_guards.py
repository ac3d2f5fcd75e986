"""What successes and failures leave behind, what is pending and shown, how often is tried again, what the disk is asked."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.lowlevel

from cachefs.base.database import Database
from cachefs.base.errors import CacheUnusable, Conflict, NoRoom, OriginFailed
from cachefs.origin import ObjectInfo
from cachefs.upload import orphans, recovery, room, sending, staging
from cachefs.upload.content import Row, State, Stored
from cachefs.upload.dirty_file import TOKENS, DirtyFile, Way
from cachefs.upload.journal import LONGEST_RETRY_S, DiskHangs
from cachefs.upload.queue import IN_BACKGROUND
from cachefs.upload.room import WAIT_S, StagingRoom
from cachefs.upload.staging import LOOK_S, StagingDisk
from cachefs.upload.uploads import GIVING_UP_S, SHOWN
from tests.fetch.scripted import content
from tests.upload.scripted import PART, Room, ScriptedReader, add, desk, in_trio
from tests.upload.test_passthrough import Kernel, in_passthrough, open_backing, taken
from tests.upload.test_series import Pwrite


@pytest.mark.parametrize("size", [5, 3 * PART + 1])
@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_after_a_success_nothing_of_the_failures_before_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writeback: bool, size: int
) -> None:
    monkeypatch.setattr(sending, "PUT_BYTES", PART)
    async with desk(tmp_path, writeback=writeback) as d:
        dirty_file, data = await d.create("k", content(1, size)), content(1, size)
        for kind in ("put", "complete"):
            d.store.fail(kind, lambda: OriginFailed("no"), times=3)
        for number in range(1, 4):
            if writeback:
                await d.uploads.commit(dirty_file) if number == 1 else None
                while dirty_file.trying.failures < number:  # noqa: ASYNC110 - what is waited for has no event
                    await trio.sleep(0.1)
            else:
                with pytest.raises(OriginFailed):
                    await d.uploads.commit(dirty_file)
            assert (dirty_file.trying.failures, str(dirty_file.failure), dirty_file.trying.unsure) == (
                number,
                "no",
                True,
            )
            assert d.metrics.upload_failures == number and dirty_file.acknowledged
            assert len(dirty_file.record.tokens) >= number and dirty_file.dirty and not dirty_file.conflicts
            assert d.uploads.pending() == [dirty_file] and d.uploads.status()["failed"] == 1
        if writeback:
            with pytest.raises(OriginFailed):
                await d.uploads.commit(dirty_file)
            assert dirty_file.trying.told
            while dirty_file.dirty or dirty_file.attempt:  # noqa: ASYNC110 - as above
                await trio.sleep(0.1)
        else:
            await d.uploads.commit(dirty_file)
        assert d.store.content("k") == data and not dirty_file.dirty
        left = (
            dirty_file.failure,
            dirty_file.trying.failures,
            dirty_file.trying.unsure,
            dirty_file.trying.told,
        )
        assert left == (None, 0, False, False)
        assert (dirty_file.record.tokens, dirty_file.record.upload, dirty_file.attempt) == ([], None, None)
        assert (dirty_file.acknowledged, dirty_file.content.row) == (False, Row.NONE)
        assert dirty_file.base == d.store.objects["k"][0] and d.metrics.uploaded_files == 1
        assert dirty_file.committed is dirty_file.stored is d.told[-1][1]
        assert dirty_file.committed is not None and dirty_file.committed.mtime_ns
        assert d.uploads.pending() == [] and d.uploads.journal.rows("drafts") == {}
        assert d.uploads.status()["pending"] == 0, "a reader has it open, and nothing waits"
        d.uploads.release(dirty_file)
        await d.quiet()
        assert d.settled == ["k"] and list(d.cache.adopted.values()) == [data] and (await d.files()) == []


@in_trio
async def test_who_is_shown_first_and_how(tmp_path: Path) -> None:
    now = 10**18
    async with desk(tmp_path, writeback=True, now_ns=lambda: now, upload_delay_s=1e6) as d:
        files = []
        for number in range(SHOWN + 3):
            now += 10**9
            files.append(await d.create(f"k{number}", b"x" * (number + 1)))
        held = d.store.hold("put", key="k2")
        d.uploads._queue.plan(files[2], 0.0)
        d.uploads.release(files[2])
        d.store.fail("put", lambda: OriginFailed("later"), key="k3", times=1000)
        d.store.fail("put", lambda: OriginFailed("earlier"), key="k1", times=1000)
        for number in (3, 1):
            await d.uploads.commit(files[number])
            d.uploads._queue.plan(files[number], 0.0)
        await held.reached.wait()
        await trio.sleep(0.1)
        now += 5 * 10**8
        status = d.uploads.status()
        count = SHOWN + 3
        assert status["writeback"] and status["pending"] == count
        assert status["pending_bytes"] == count * (count + 1) // 2
        assert (status["uploading"], status["failed"], status["last_error"]) == (1, 2, "later")
        assert status["oldest_s"] == count - 1 + 0.5
        assert [row["key"] for row in status["dirty_files"]] == [f"k{n}" for n in range(SHOWN)]
        rows = status["dirty_files"][:4]
        assert [row["size"] for row in rows] == [1, 2, 3, 4] and {row["sent"] for row in rows} == {0}
        assert [row["open"] for row in rows] == [1, 1, 0, 1]
        assert [row["acknowledged"] for row in rows] == [False, True, True, True] or rows[2]["uploading"]
        assert [row["uploading"] for row in rows] == [False, False, True, False]
        assert [row["error"] for row in rows] == ["", "earlier", "", "later"]
        assert rows[0]["source"] == d.store.source
        now -= 10**12
        assert d.uploads.status()["oldest_s"] == 0.0, "the clock was set back"
        assert held.release is not None
        held.release.set()
        d.store.rules.clear()


@pytest.mark.parametrize("forgotten", [False, True])
@in_trio
async def test_parts_are_sent_early_again_after_an_upload_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: bool
) -> None:
    """Of a file that was cut to nothing, or whose upload the store has forgotten."""
    monkeypatch.setattr(sending, "PUT_BYTES", PART)
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", content(1, 4 * PART))
        await d.quiet()
        if forgotten:
            d.store.uploads.clear()
        else:
            await dirty_file.truncate(0)
        await d.uploads.commit(dirty_file)
        assert d.store.content("k") == (content(1, 4 * PART) if forgotten else b"")
        assert not d.store.uploads
        parts = d.store.counts["part"]
        await dirty_file.truncate(0)
        for number in range(4):
            await dirty_file.write(number * PART, content(2, PART))
        await d.quiet()
        assert d.store.counts["part"] >= parts + 3, "no commit has asked for it"
        await d.close(dirty_file)
        assert d.store.content("k") == 4 * content(2, PART)


@in_trio
async def test_what_cannot_be_cleared_away_is_tried_again_and_not_all_the_time(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", content(1, 3 * PART))
        await d.quiet()
        d.store.fail("abort", lambda: OriginFailed("no"), times=1000)
        await d.uploads.discard(dirty_file)
        await d.quiet()
        assert d.store.counts["abort"] == 1, "not again at once"
        await trio.sleep(1.5)
        assert d.store.counts["abort"] == 2
        await trio.sleep(5 * LONGEST_RETRY_S)
        assert d.store.counts["abort"] == 7
        d.store.rules.clear()
        await trio.sleep(LONGEST_RETRY_S)
        assert d.store.uploads == {} and d.uploads.journal.rows("orphans") == {}
        done = d.store.counts["abort"]
        await trio.sleep(5 * LONGEST_RETRY_S)
        assert d.store.counts["abort"] == done == 8
        d.uploads.release(dirty_file)


@pytest.mark.parametrize("offset", [0, 50, 99, 100])
@in_trio
async def test_a_failed_write_makes_what_the_store_has_another_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    """How much of it was written is not known; behind the end it is cut off again."""
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", content(1, 100))
        await dirty_file.file.spill()
        await d.uploads.commit(dirty_file)
        assert not dirty_file.dirty
        pwrite = Pwrite(tmp_path)
        pwrite.times = 2
        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(NoRoom):
            await dirty_file.write(offset, b"?" * (20 if offset < 100 else staging.SMALL + 1))
        monkeypatch.undo()
        assert dirty_file.size == 100 and dirty_file.dirty is (offset < 100)
        held = bytes(await dirty_file.read(0, 200))
        await d.close(dirty_file)
        assert d.store.content("k") == held and len(held) == 100


@in_trio
async def test_what_the_kernel_had_is_no_descriptor_of_ours(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        Kernel(d)
        dirty_file, fd = await taken(d, tmp_path, b"data")
        backing = dirty_file.backing
        assert backing is not None and (backing.fd, backing.id) == (-1, 77)
        os.close(fd)
        d.uploads.passthrough._retire = lambda backing: backing.close()
        d.uploads.returned(dirty_file)
        d.uploads.release(dirty_file)
        await d.quiet()
        os.fstat(0)


def test_what_is_kept_aside_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Twice in one second, too."""
    directory = tmp_path / "staging"
    directory.mkdir()
    umask = os.umask(0)
    try:
        for number in range(3):
            (directory / "f").write_bytes(b"%d" % number)
            orphans.set_aside(directory, ["f"], "why")
    finally:
        os.umask(umask)
    orphans.set_aside(directory, [], "why")
    places = orphans.places(tmp_path)
    assert len(places) == 3 and places == sorted(places, reverse=True) and not list(directory.iterdir())
    assert {stat.S_IMODE(place.stat().st_mode) for place in places} == {0o700}
    assert {(place / "f").read_bytes() for place in places} == {b"0", b"1", b"2"}
    assert orphans.warning(tmp_path).startswith("3 files ")


def test_a_journal_that_cannot_be_locked_is_told_apart_from_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "lock.pid").write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    for number in (errno.EAGAIN, errno.EACCES, errno.ENOLCK):

        def refuse(fd: int, how: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(orphans.fcntl, "flock", refuse)
        if number == errno.ENOLCK:
            with pytest.raises(OSError, match="No locks"), orphans.unused(tmp_path):
                pass
        else:
            with orphans.unused(tmp_path) as unused:
                assert not unused
    monkeypatch.undo()
    for place in (tmp_path, tmp_path / "none"):
        with orphans.unused(place) as unused:
            assert unused
    assert len(os.listdir("/proc/self/fd")) == before


def test_which_rows_come_back() -> None:
    def row(file: str, acknowledged: bool = True, over: str | None = None) -> dict[str, Any]:
        return {"file": file, "acknowledged": acknowledged, "over": over}

    rows = {
        "a": row("a"),
        "b": row("b", acknowledged=False),
        "gone": row("gone"),
        "old": row("old"),
        "new": row("new", over="old"),
        "kept": row("kept"),
        "half": row("half", acknowledged=False, over="kept"),
    }
    files = {"a", "b", "old", "new", "kept", "half", "other"}
    assert recovery.restorable(rows, files) == {"a", "new", "kept"}
    assert recovery.restorable({}, files) == set()


@in_trio
async def test_only_the_last_attempts_are_known_by_their_tokens(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k")
        for number in range(TOKENS + 5):
            dirty_file.has_token(f"t{number}")
            assert dirty_file.record.tokens == [
                f"t{n}" for n in range(max(0, number + 1 - TOKENS), number + 1)
            ]
        dirty_file.record.tokens = []
        d.uploads.release(dirty_file)


@in_trio
async def test_what_is_said_of_a_content_follows_its_generations(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        dirty_file, info = await d.create("k"), ObjectInfo("k", 0, 5, '"e"')

        def said(dirty_file: DirtyFile) -> tuple[bool, bool, bool, bool]:
            return (
                dirty_file.dirty,
                dirty_file.committed is info,
                dirty_file.stored is info,
                dirty_file.between,
            )

        assert said(dirty_file) == (True, False, False, True) and not dirty_file.has(0)
        dirty_file.content.synced = 0
        assert not dirty_file.between
        await dirty_file.write(0, b"12345")
        assert said(dirty_file) == (True, False, False, True)
        dirty_file.content.stored_as(Stored(0, info))
        assert said(dirty_file) == (True, False, True, True) and dirty_file.has(0) and not dirty_file.has(1)
        dirty_file.content.stored_as(Stored(1, info))
        assert said(dirty_file) == (False, True, True, True) and dirty_file.has(1) and dirty_file.has(0)
        dirty_file.kernel.way = Way.MAPPED
        assert said(dirty_file) == (False, False, True, True)
        dirty_file.kernel.way = Way.HERE
        dirty_file.trying.failure = Conflict("theirs")
        assert dirty_file.conflicts
        dirty_file.trying.failure = OriginFailed("no")
        assert not dirty_file.conflicts
        dirty_file.trying.failure = None
        for offset, size in ((0, 5), (0, 9), (2, 2), (4, 9), (5, 1), (7, 3)):
            assert bytes(await dirty_file.read(offset, size)) == b"12345"[offset : offset + size]
            assert bytes(dirty_file.read_now(offset, size) or b"") == b"12345"[offset : offset + size]
        dirty_file.copied(ObjectInfo("k", 5, 1, '"another"'), ObjectInfo("n", 5, 1, '"n"'))
        assert dirty_file.stored is info
        new = ObjectInfo("n", 5, 1, '"n"')
        dirty_file.trying.unsure = True
        dirty_file.copied(info, new)
        assert dirty_file.stored is new and not dirty_file.trying.unsure and dirty_file.has(1)
        d.uploads.release(dirty_file)
        assert not dirty_file.between, "no process has it open"
        await d.quiet()
        await d.uploads.discard(dirty_file)


@pytest.mark.parametrize(("more", "whole"), [(-1, True), (0, True), (1, False)])
@in_trio
async def test_up_to_a_bound_a_file_goes_in_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, whole: bool
) -> None:
    monkeypatch.setattr(sending, "PUT_BYTES", 3 * PART)
    async with desk(tmp_path, writeback=True) as d:
        data = content(1, 3 * PART + more)
        await d.save("k", data)
        assert await d.uploads.flush() == []
        assert d.store.content("k") == data
        assert (d.store.counts["put"], d.store.counts["begin"]) == ((1, 0) if whole else (0, 1))


@in_trio
async def test_a_disk_that_is_full_has_room_for_nothing(tmp_path: Path) -> None:
    """Neither for what is written nor for what is allocated; what holds less goes on."""
    async with desk(tmp_path, keep_free_bytes=1 << 60) as d:
        dirty_file = await d.create("k")
        for call in (
            lambda: dirty_file.allocate(0, 10),
            lambda: dirty_file.write(0, b"1"),
            lambda: add(dirty_file, b"1"),
        ):
            with pytest.raises(NoRoom):
                await call()
            assert dirty_file.size == 0 and dirty_file.content.generation == 0
        await dirty_file.truncate(5)
        await d.close(dirty_file)
        assert d.store.content("k") == bytes(5)


# -- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("acknowledged", "is_open"), [(True, True), (False, False), (False, True)])
@in_trio
async def test_what_could_not_be_removed_goes_to_the_store_after_all(
    tmp_path: Path, acknowledged: bool, is_open: bool
) -> None:
    """Unless a process is just writing it, and was told nothing yet."""
    async with desk(tmp_path, writeback=acknowledged, upload_delay_s=1e6 if acknowledged else 1.0) as d:
        dirty_file = await d.create("k", b"data")
        if acknowledged:
            await d.uploads.commit(dirty_file)
        if not is_open:
            held = d.store.fail("put", lambda: OriginFailed("no"))
            d.uploads.release(dirty_file)
            await held.reached.wait()
            await d.quiet()

        async def refused() -> None:
            raise OriginFailed("it stays")

        with pytest.raises(OriginFailed, match="it stays"):
            await d.uploads.discard(dirty_file, instead=refused)
        assert not dirty_file.discarded
        await trio.sleep(0.01)
        await d.quiet()
        assert ("k" in d.store.objects) is (acknowledged or not is_open)
        if is_open:
            await d.close(dirty_file)
        await trio.sleep(2)
        await d.quiet()
        assert d.store.content("k") == b"data"


@in_trio
async def test_what_was_broken_off_for_nothing_is_sent_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process has it open, and no caller was told anything yet."""
    monkeypatch.setattr(sending, "PUT_BYTES", PART)
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", content(1, 2 * PART))
        dirty_file.sender.failed = OriginFailed("nothing is sent early")
        held = d.store.hold("part", times=2)
        d.uploads.release(dirty_file)
        await held.reached.wait()

        async def refused() -> None:
            raise OriginFailed("it stays")

        with pytest.raises(OriginFailed, match="it stays"):
            await d.uploads.discard(dirty_file, instead=refused)
        assert not dirty_file.acknowledged and dirty_file.dirty and dirty_file.attempt is None
        d.store.rules.clear()
        await trio.sleep(1)
        await d.quiet()
        assert d.store.content("k") == content(1, 2 * PART) and d.settled == ["k"]


@pytest.mark.parametrize("short", [0, 1, 5000, 20_001])
@in_trio
async def test_what_begins_with_less_than_was_promised_does_not_begin(tmp_path: Path, short: int) -> None:
    data = content(1, 20_001)

    reader = ScriptedReader(short)
    async with desk(tmp_path, reader=reader) as d:
        d.store.show("k", data)
        if short:
            with pytest.raises(OriginFailed, match="shorter than it was"):
                await d.create("k", base=d.store.version("k"))
        else:
            dirty_file = await d.create("k", base=d.store.version("k"), upto=15_000)
            assert bytes(await dirty_file.read(0, 30_000)) == data[:15_000]
            await d.close(dirty_file)
            await d.quiet()
        assert d.uploads._dirty_files == {} and (await d.files()) == [] and reader.users == 0


@in_trio
async def test_a_name_that_goes_leaves_no_parts_at_the_store(tmp_path: Path) -> None:
    """Half a change: what the store had is copied, and what was sent of the change is given up."""
    async with desk(tmp_path) as d:
        await d.save("k", b"what was there")
        dirty_file = await d.create("k", base=d.store.version("k"))
        await dirty_file.write(0, content(1, 4 * PART))
        await d.quiet()
        assert d.store.uploads and dirty_file.record.tokens == [f"token of {next(iter(d.store.uploads))}"]
        await d.rename(dirty_file, "n")
        await d.quiet()
        assert all(key == "n" for key, _ in d.store.uploads.values())
        assert d.store.content("n") == b"what was there" and "k" not in d.store.objects
        await d.close(dirty_file)
        await d.quiet()
        assert d.store.content("n") == content(1, 4 * PART) and not d.store.uploads


@pytest.mark.parametrize("is_open", [False, True])
@in_trio
async def test_what_was_refused_under_its_old_name_goes_at_once_under_the_new_one(
    tmp_path: Path, is_open: bool
) -> None:
    async with desk(tmp_path, writeback=True, on_conflict="fail") as d:
        dirty_file = await d.create("k", b"ours")
        d.store.show("k", b"theirs")
        await d.uploads.commit(dirty_file)
        if not is_open:
            d.uploads.release(dirty_file)
        await trio.sleep(10)
        assert dirty_file.conflicts and dirty_file.trying.failures
        await d.uploads.rename(dirty_file, "n")
        assert not dirty_file.conflicts
        await trio.sleep(0.01)
        await d.quiet()
        assert d.store.content("n") == b"ours" and d.store.content("k") == b"theirs"
        if is_open:
            d.uploads.release(dirty_file)
            await d.quiet()


# -- written by others ---------------------------------------------------------------------------------


@in_trio
async def test_what_is_taken_and_written_is_half_a_change_until_it_is_closed(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        Kernel(d)
        dirty_file, fd = await taken(d, tmp_path, b"data")
        assert not dirty_file.between and dirty_file.content.synced == dirty_file.content.generation
        await dirty_file.write(0, b"D")
        assert dirty_file.between and dirty_file.dirty
        os.close(fd)
        await d.uploads.commit(dirty_file)
        d.uploads.passthrough._retire = lambda backing: None
        d.uploads.returned(dirty_file)
        d.uploads.release(dirty_file)
        await d.quiet()
        assert d.store.content("k") == b"Data"


@in_trio
async def test_what_a_mapping_kept_and_did_not_change_is_settled_when_it_ends(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        kernel = Kernel(d)
        dirty_file, fd = await taken(d, tmp_path, b"data")
        kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
        d.uploads.returned(dirty_file)
        d.uploads.release(dirty_file)
        await trio.sleep(5)
        await d.quiet()
        assert dirty_file.kernel.mapped and d.settled == [] and dirty_file.committed is None
        os.close(fd)
        await trio.sleep(1)
        await d.quiet()
        assert d.settled == ["k"] and list(d.cache.adopted.values()) == [b"data"]
        assert "put" not in d.store.counts and d.uploads._dirty_files == {}


@in_trio
async def test_an_empty_file_that_is_just_sent_is_not_given_to_a_writer(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=0.0) as d:
        kernel = Kernel(d)
        dirty_file = await d.create("k")
        held = d.store.hold("put")
        await d.uploads.commit(dirty_file)
        await held.reached.wait()
        given = trio.Event()

        async def give() -> None:
            assert await d.uploads.open_backing(dirty_file) is not None
            given.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give)
            await trio.sleep(10)
            assert not given.is_set(), "its outcome is out of our hands"
            assert held.release is not None
            held.release.set()
        assert given.is_set() and d.store.content("k") == b""
        d.uploads.returned(dirty_file)
        d.uploads.release(dirty_file)
        await d.quiet()
        assert kernel.backings == []


@pytest.mark.parametrize("adopts", [False, True])
@in_trio
async def test_a_removal_that_fails_while_the_cache_takes_the_file_leaves_it_readable(
    tmp_path: Path, adopts: bool
) -> None:
    """Also if the cache has taken it, because its name shows it until it is settled."""
    async with desk(tmp_path) as d:
        adopt, taking, go_on = d.cache.adopt, trio.Event(), trio.Event()
        d.cache.adopts = adopts

        async def slow(object_id: Any, path: Path) -> bool:
            taking.set()
            await go_on.wait()
            return await adopt(object_id, path)

        async def refused() -> None:
            go_on.set()
            await d.quiet()
            raise OriginFailed("it stays")

        d.cache.adopt = slow  # type: ignore[method-assign]
        dirty_file = await d.save("k", b"data")
        await taking.wait()
        with pytest.raises(OriginFailed, match="it stays"):
            await d.uploads.discard(dirty_file, instead=refused)
        assert d.settled == []
        d.uploads.open(dirty_file)
        assert bytes(await dirty_file.read(0, 100)) == b"data"
        d.uploads.release(dirty_file)
        await trio.sleep(1)
        await d.quiet()
        assert d.settled == ["k"] and list(d.cache.adopted.values()) == [b"data"] * adopts
        assert await d.files() == []


@in_trio
async def test_what_the_cache_is_taking_is_not_removed_under_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name goes meanwhile; the file is the cache's then."""
    async with desk(tmp_path) as d:
        adopt, taking, go_on = d.cache.adopt, trio.Event(), trio.Event()

        async def slow(object_id: Any, path: Path) -> bool:
            taking.set()
            await go_on.wait()
            return await adopt(object_id, path)

        d.cache.adopt = slow  # type: ignore[method-assign]
        dirty_file = await d.save("k", b"data")
        await taking.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: d.uploads.discard(dirty_file, replaced=True))
            await d.quiet()
            go_on.set()
        await d.quiet()
        assert list(d.cache.adopted.values()) == [b"data"] and "failed to take" not in caplog.text
        assert (await d.files()) == [] and dirty_file.content.state is not State.SETTLING


@in_trio
async def test_the_staging_directory_is_its_owners_whatever_was_there(tmp_path: Path) -> None:
    for name in ("staging", "state"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    async with desk(tmp_path) as d:
        assert stat.S_IMODE(d.staging.stat().st_mode) == 0o700
        dirty_file = await d.create("k", bytes(staging.HELD + 1))
        assert [stat.S_IMODE((d.staging / name).stat().st_mode) for name in (await d.files())] == [0o600]
        await d.close(dirty_file)


def test_all_in_the_staging_directory_is_ours_and_it_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / "any name").write_bytes(b"")
    (tmp_path / "staging" / "any name").chmod(0o644)
    staging.StagingDisk(tmp_path / "staging")
    assert stat.S_IMODE((tmp_path / "staging" / "any name").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "staging").stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "staging")
    with pytest.raises(CacheUnusable):
        staging.StagingDisk(tmp_path / "link")


@in_trio
async def test_a_writer_that_outlives_its_close_makes_a_file_pending(tmp_path: Path) -> None:
    """Though nothing was written since the store got it: it may be, through a mapping."""
    async with desk(tmp_path, writeback=True) as d:
        kernel = Kernel(d)
        dirty_file, fd = await in_passthrough(d, "k", b"first")
        await d.uploads.commit(dirty_file)
        d.uploads.returned(dirty_file)
        os.close(fd)
        d.uploads._queue.plan(dirty_file, 0.0)
        await trio.sleep(2)
        await d.quiet()
        assert d.store.content("k") == b"first" and not dirty_file.dirty
        fd = await open_backing(d, dirty_file)
        d.uploads.returned(dirty_file)
        assert dirty_file.dirty and d.uploads.pending() == [dirty_file]
        await trio.sleep(5)
        assert d.store.counts["put"] == 1, "it is not sent while it may be written"
        os.pwrite(fd, b"F", 0)
        os.close(fd)
        d.uploads.release(dirty_file)
        await trio.sleep(5)
        await d.quiet()
        assert d.store.content("k") == b"First" and kernel.backings == []


# -- the disk of the staging files ---------------------------------------------------------------------


class Asked:
    """`statvfs`, and how often it was asked."""

    def __init__(self, patch: pytest.MonkeyPatch, free: int) -> None:
        self.free, self.count = free, 0

        def statvfs(path: Any) -> Any:
            self.count += 1
            return SimpleNamespace(f_bavail=self.free, f_frsize=1)

        patch.setattr(os, "statvfs", statvfs)


class Gives(Room):
    """A cache that makes room, or not."""

    def __init__(self, asked: Asked, gives: int) -> None:
        super().__init__()
        self._disk, self.gives = asked, gives

    async def evict_to_hold(self, wanted: int) -> bool:
        self.asked.append(wanted)
        self._disk.free += self.gives
        return self.gives > 0


NOTHING_SENT: Any = SimpleNamespace(
    sender=SimpleNamespace(parts=SimpleNamespace(under_way={}, waiting_bytes=1 << 40))
)


@pytest.mark.parametrize(
    ("free", "count", "gives", "hopeful", "admitted", "waited"),
    [
        (100, 100, 0, False, True, 0.0),  # all that is free
        (99, 100, 0, False, True, 0.0),  # what is kept free is written into, but for a tenth
        (-800, 100, 0, False, True, 0.0),
        (-801, 100, 0, False, False, 0.0),
        (-801, 100, 901, False, True, 0.0),  # the cache gives way
        (-900, 300, 1, False, False, WAIT_S),  # not enough, for as long as it is waited
        (-900, 100, 0, True, False, WAIT_S),
        (-900, 100, 10, False, True, 99 * LOOK_S),
    ],
)
@in_trio
async def test_who_writes_waits_for_room_so_long(
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    count: int,
    gives: int,
    hopeful: bool,
    admitted: bool,
    waited: float,
) -> None:
    """1000 bytes are kept free. Nothing is given where none is short."""
    asked = Asked(monkeypatch, 1000 + free)
    cache = Gives(asked, gives)
    place = StagingRoom(Path("/"), 1000, cache, lambda _: hopeful)
    begun = trio.current_time()
    if admitted:
        await place.admit(NOTHING_SENT, count)
    else:
        with pytest.raises(NoRoom):
            await place.admit(NOTHING_SENT, count)
    took = trio.current_time() - begun
    if gives in (0, 901) or not admitted:
        assert abs(took - waited) <= LOOK_S
    assert bool(cache.asked) is (free < count)
    if waited == WAIT_S and not gives:
        begun = trio.current_time()
        with pytest.raises(NoRoom):
            await place.admit(NOTHING_SENT, count)
        assert trio.current_time() == begun, "who waited in vain does not wait again at each write"
        await trio.sleep(WAIT_S)
        with pytest.raises(NoRoom):
            await place.admit(NOTHING_SENT, 10_000)
        assert trio.current_time() > begun + WAIT_S, "but later"


@pytest.mark.parametrize("cache", [0, 5])
@in_trio
async def test_who_does_not_ask_is_given_room_where_it_is_short(
    monkeypatch: pytest.MonkeyPatch, cache: int
) -> None:
    for free, short in ((1, False), (-1, True)):
        asked, hoped = Asked(monkeypatch, 1000 + free), list[Any]()
        gives = Gives(asked, cache)
        place = StagingRoom(Path("/"), 1000, gives, lambda other: bool(hoped.append(other)))  # noqa: B023
        await place.relieve()
        assert hoped == ([None] if short and not cache else [])
        assert gives.asked == ([0] if short else [])


@in_trio
async def test_who_is_ahead_of_the_wire_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as something is sent, and no longer than `UNSENT` bytes wait."""
    monkeypatch.setattr(room, "UNSENT", 2 * PART)
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k")
        held = d.store.hold("part", times=1000)
        written = 0

        async def write() -> None:
            nonlocal written
            for _ in range(8):
                await add(dirty_file, bytes(PART))
                written += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await held.reached.wait()
            await d.quiet()
            assert written == 3 and dirty_file.parts.waiting_bytes == 3 * PART
            await trio.sleep(100)
            assert written == 3
            assert held.release is not None
            held.release.set()
        assert written == 8
        await d.close(dirty_file)


@in_trio
async def test_who_waits_for_the_parts_of_a_commit_goes_on_when_they_have_landed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With writeback nothing is sent early: only a commit's parts are under way."""
    monkeypatch.setattr(room, "UNSENT", PART)
    monkeypatch.setattr(sending, "PUT_BYTES", PART)
    async with desk(tmp_path, writeback=True, upload_delay_s=0.0) as d:
        dirty_file = await d.create("k", content(1, 4 * PART))
        held = d.store.hold("part", times=4)
        await d.uploads.commit(dirty_file)
        await held.reached.wait()
        appended = trio.Event()

        async def append() -> None:
            await add(dirty_file, b"more")
            appended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(append)
            await trio.sleep(100)
            assert not appended.is_set() and held.release is not None
            held.release.set()
            with trio.fail_after(100):
                await appended.wait()
        await d.close(dirty_file)
        assert await d.uploads.flush() == []
        assert d.store.content("k") == content(1, 4 * PART) + b"more"


@in_trio
async def test_what_the_disk_does_not_say_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def statvfs(path: Any) -> Any:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(CacheUnusable):
        StagingRoom(Path("/"), 0, Room(), lambda _: False).free_bytes()


@in_trio
async def test_what_cannot_be_looked_at_may_hold_something_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path, writeback=True) as d:
        dirty_file = await d.create("k", b"data")
        await d.uploads.commit(dirty_file)
        assert await d.uploads.flush() == [] and d.uploads.pending() == []

        def look(dirty_file: DirtyFile) -> bool:
            raise CacheUnusable("no descriptors")

        with monkeypatch.context() as patch:
            patch.setattr(DirtyFile, "look", look)
            assert d.uploads.pending() == [dirty_file]
        await d.close(dirty_file)


@in_trio
async def test_a_stop_waits_a_moment_for_what_is_up_to_the_origin(tmp_path: Path) -> None:
    """And begins nothing afterwards, whatever is planned."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        held = d.store.hold("put")
        dirty_file = await d.save("k", b"data")
        d.uploads._queue.plan(dirty_file, 0.0)
        await held.reached.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.aclose, 0.0)
            await trio.sleep(1)
            assert held.release is not None
            held.release.set()
        assert d.store.content("k") == b"data"
        d.uploads._queue.plan(dirty_file, 0.0)
        await trio.sleep(10)
        assert d.store.counts["put"] == 1
    async with desk(tmp_path, d.store, writeback=True) as d:
        assert d.uploads.pending() == [] and d.uploads.journal.rows("drafts") == {}


@in_trio
async def test_a_stop_waits_three_seconds_for_an_origin_that_hangs(tmp_path: Path) -> None:
    """Less than the shortest deadline of an upload; the next start uploads the file."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        held = d.store.hold("put")
        dirty_file = await d.save("k", b"data")
        d.uploads._queue.plan(dirty_file, 0.0)
        await held.reached.wait()
        began = trio.current_time()
        assert await d.uploads.aclose(0.0) == [dirty_file]
        assert trio.current_time() - began == pytest.approx(GIVING_UP_S, abs=0.5)


@pytest.mark.parametrize("what", ["store", "journal", "disk", "nothing"])
@in_trio
async def test_any_disk_that_hangs_saves_the_others_their_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with desk(tmp_path) as d:
        place = {"store": d.cache, "journal": d.uploads.journal, "disk": d.uploads._disk}.get(what)
        with monkeypatch.context() as patch:
            if place is not None:
                patch.setattr(type(place), "hangs", True)
            began = trio.current_time()
            if place is None:
                await d.uploads.note("n", {})
            else:
                with pytest.raises(DiskHangs):
                    await d.uploads.note("n", {})
            assert trio.current_time() - began < 1
        await d.quiet()


def test_a_disk_that_does_not_make_a_small_file_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, answers, write = [0.0], threading.Event(), staging._written_file
    monkeypatch.setattr(staging, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(staging, "_written_file", lambda *a, **k: answers.wait(30) and write(*a, **k))
    disk = StagingDisk(tmp_path)

    async def make() -> None:
        os.close(await disk.make(tmp_path / "f", b"data"))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(make)
            while not disk._making:  # noqa: ASYNC110 - of a thread
                await trio.sleep(0.001)
            now[0] = staging.HANGS_AFTER_S
            assert not disk.hangs
            now[0] += 0.1
            assert disk.hangs
            answers.set()
        assert not disk.hangs and (tmp_path / "f").read_bytes() == b"data"

    trio.run(main)


def test_a_stop_waits_for_removals_and_closes_the_journal(tmp_path: Path) -> None:
    removed: list[bool] = []

    async def main() -> None:
        async with desk(tmp_path) as d:
            d.uploads._disk.later(lambda: (time.sleep(0.05), removed.append(True)))
            await d.uploads.aclose(1)
            assert removed
            database = Database(d.uploads.journal._database.path, (), version="", fsync=False)
            database.close()

    trio.run(main)


@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_a_commit_promises_nothing_of_a_file_without_a_name(tmp_path: Path, writeback: bool) -> None:
    async with desk(tmp_path, writeback=writeback) as d:
        dirty_file = await d.create("k", b"data")
        await d.uploads.discard(dirty_file)
        await d.uploads.commit(dirty_file)
        assert d.uploads.journal.rows("drafts") == {} and "put" not in d.store.counts
        d.uploads.release(dirty_file)


@pytest.mark.parametrize("removed", [False, True])
@in_trio
async def test_a_file_on_a_disk_that_can_only_be_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    async with desk(tmp_path, writeback=True, outlived=removed) as d:
        d.store.hold("put")
        dirty_file = await d.save("k", content(1, 3 * PART))
        plain = os.open

        def refused(path: Any, flags: int, *more: Any, **how: Any) -> int:
            if flags & os.O_RDWR and str(path).startswith(str(tmp_path)):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return plain(path, flags, *more, **how)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refused)
            dirty_file.file.removed = removed
            d.uploads.open(dirty_file)
            assert await dirty_file.read(0, 3 * PART) == content(1, 3 * PART)
            dirty_file.file.removed = False
            d.uploads.release(dirty_file)


@in_trio
async def test_a_file_is_not_cut_while_an_fsync_sends_it(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        held, data = d.store.hold("put"), content(1, 1000)
        dirty_file = await d.create("k", data)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.commit, dirty_file)
            await held.reached.wait()
            nursery.start_soon(dirty_file.truncate, 3)
            await d.quiet()
            assert dirty_file.size == 1000
            assert held.release is not None
            held.release.set()
        assert d.store.content("k") == data and dirty_file.size == 3
        await d.close(dirty_file)
        assert d.store.content("k") == data[:3]


@in_trio
async def test_what_is_written_after_an_upload_has_begun_is_no_part_of_it(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        dirty_file = await d.create("k", b"data")
        await d.uploads.commit(dirty_file)
        await d.uploads._queue.begin(dirty_file)
        await add(dirty_file, b" and more")
        await d.quiet()
        assert d.store.content("k") == b"data"
        await d.close(dirty_file)


@in_trio
async def test_an_upload_that_is_broken_off_begins_no_further_part(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        data = content(1, 40 * PART)
        held = d.store.hold("part", times=1000)
        dirty_file = await d.create("k", data)
        await held.reached.wait()
        await d.quiet()
        before = d.store.counts["part"]
        await dirty_file.sender.break_off()
        assert held.release is not None
        held.release.set()
        await d.quiet()
        assert d.store.counts["part"] == before
        await d.close(dirty_file)
        assert d.store.content("k") == data


@in_trio
async def test_who_waits_for_others_does_not_make_the_queue_longer(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        held = d.store.hold("put", times=1000)
        for number in range(2 * IN_BACKGROUND):
            await d.save(f"k{number}", b"data")
        for _ in range(100):
            assert d.uploads._begin_planned(None)
        assert len(d.uploads._queue._due) <= 4 * IN_BACKGROUND
        assert held.release is not None
        held.release.set()
        await d.quiet()
        assert len(d.store.objects) == 2 * IN_BACKGROUND

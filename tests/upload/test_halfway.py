"""What holds when an upload or a rename is halfway through, or fails there; which parts are taken for what a file holds."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.database import Database, Put
from cachefs.base.errors import CachefsError, CacheUnusable, Conflict, NoRoom, OriginFailed
from cachefs.origin import Part
from cachefs.upload import orphans, sending
from cachefs.upload.content import Attempt, Row
from cachefs.upload.dirty_file import Where
from cachefs.upload.journal import DIRTY_FILES, LONGEST_RETRY_S, DiskHangs, Journal
from cachefs.upload.recovery import restorable
from cachefs.upload.staging import LOOK_S, StagingDisk
from tests.fetch.scripted import content
from tests.upload.scripted import PART, desk, in_trio


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
@in_trio
async def test_a_note_that_a_full_disk_keeps_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[CachefsError]
) -> None:
    """What it is about is done, so its caller gets no error. If it stayed, the next start would do that again."""

    def fails(*_: object) -> None:
        raise error("full")

    async with desk(tmp_path) as d:
        await d.uploads.note("kept", {"from": "c", "to": "d"})
        await d.uploads.note("name", {"from": "a", "to": "b"})
        with monkeypatch.context() as patched:
            patched.setattr(Database, "write", fails)
            with pytest.raises(CachefsError):
                await d.uploads.note("other", {"from": "a", "to": "b"})
            await d.uploads.note("name", None)
            assert d.uploads.notes().keys() == {"kept", "name"}
        await trio.sleep(100)
        assert d.uploads.notes().keys() == {"kept"}


@pytest.mark.parametrize("error", [NoRoom, CacheUnusable])
@pytest.mark.parametrize("over", [False, True])
@in_trio
async def test_a_rename_that_cannot_be_noted_has_not_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool, error: type[CachefsError]
) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        dirty_file = await d.save("old", b"data")
        other = await d.save("new", b"theirs") if over else None
        moved, failures = d.uploads._records.moved, [error("full")]

        async def fails(*arguments: Any) -> None:
            if failures:
                raise failures.pop()
            await moved(*arguments)

        monkeypatch.setattr(d.uploads._records, "moved", fails)
        before = dirty_file.origin, dirty_file.key, dirty_file.base
        with pytest.raises(error):
            await d.uploads.rename(dirty_file, "new", base="x", over=other)
        assert (dirty_file.origin, dirty_file.key, dirty_file.base) == before
        assert dirty_file.record.over is None and not dirty_file.trying.turn.locked()
        row = d.uploads.journal.rows(DIRTY_FILES)[dirty_file.id]
        assert (row["key"], row["over"], row["acknowledged"]) == ("old", None, True)
        assert not await d.uploads.rename(dirty_file, "new", over=other)
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


@pytest.mark.parametrize("size", [5, 3 * PART])
@pytest.mark.parametrize("new", [True, False])
@in_trio
async def test_another_clients_object_stays_and_what_it_was_to_replace_is_known_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: bool, size: int
) -> None:
    """One request says so."""
    monkeypatch.setattr(sending, "PUT_BYTES", PART)
    async with desk(tmp_path, on_conflict="fail") as d:
        base = None
        if not new:
            d.store.show("k", b"first")
            base = d.store.version("k")
        dirty_file = await d.create("k", base=base)
        await dirty_file.truncate(0)
        await dirty_file.write(0, content(1, size))
        d.store.show("k", b"theirs")
        before = dirty_file.base
        with pytest.raises(Conflict):
            await d.uploads.commit(dirty_file)
        assert dirty_file.base == before and dirty_file.conflicts and dirty_file.dirty
        assert d.store.content("k") == b"theirs"
        assert d.store.counts["put" if size == 5 else "complete"] == 1
        await d.uploads.discard(dirty_file)
        d.uploads.release(dirty_file)
        assert d.store.content("k") == b"theirs"


@in_trio
async def test_what_is_not_begun_is_in_no_writers_way(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"data")
        attempt = Attempt()
        dirty_file.content.begin(attempt)
        with trio.fail_after(5):
            for offset in (-1, 0, 1, 4):
                await dirty_file.unsent(offset)
        assert not attempt.scope.cancel_called and attempt.frozen == attempt.generation == -1
        attempt.frozen = 2
        with trio.fail_after(5):
            await dirty_file.unsent(2)
        with trio.move_on_after(1):
            await dirty_file.unsent(1)
            raise AssertionError("it is being sent")
        assert attempt.scope.cancel_called, "no caller waits for it"
        dirty_file.content.end()
        await d.close(dirty_file)


@pytest.mark.parametrize("refusals", [0, 1, 3])
@in_trio
async def test_what_may_not_be_settled_yet_is_settled_later(tmp_path: Path, refusals: int) -> None:
    async with desk(tmp_path) as d:
        asked: list[float] = []

        def may(_: Any) -> bool:
            asked.append(trio.current_time())
            return len(asked) > refusals

        d.uploads.on_settling = may
        await d.save("k", b"data")
        await d.quiet()
        assert d.settled == ([] if refusals else ["k"])
        await trio.sleep(refusals * LOOK_S + 0.01)
        await d.quiet()
        assert d.settled == ["k"] and len(d.cache.adopted) == 1
        first = asked[: refusals + 1]
        assert [b - a for a, b in itertools.pairwise(first)] == pytest.approx([LOOK_S] * refusals, abs=0.05)


def test_where_nothing_can_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheUnusable, match="cannot keep what is written"):
        StagingDisk(tmp_path / "file" / "staging")


@pytest.mark.parametrize("within_s", [math.inf, 5.0])
@pytest.mark.parametrize("hangs", [False, True])
@in_trio
async def test_a_row_is_waited_for_unless_a_disk_is_known_to_hang(
    tmp_path: Path, hangs: bool, within_s: float
) -> None:
    """A caller with a deadline does not wait then. The row is written all the same."""
    journal = Journal(tmp_path / "journal")
    journal.hangs_elsewhere = lambda: hangs
    try:
        if hangs and within_s < math.inf:
            with pytest.raises(DiskHangs):
                await journal.write(DIRTY_FILES, "k", {"a": 1}, within_s=within_s)
            journal.hangs_elsewhere = lambda: False
            await journal.write(DIRTY_FILES, "other", {}, within_s=within_s)
        else:
            await journal.write(DIRTY_FILES, "k", {"a": 1}, within_s=within_s)
        assert journal.rows(DIRTY_FILES)["k"] == {"a": 1} and not journal.hangs
        await journal.write(DIRTY_FILES, "k", None)
        assert "k" not in journal.rows(DIRTY_FILES)
    finally:
        journal.close()


@pytest.mark.parametrize("said", [{}, {"mtime_ns": 0}, {"mtime_ns": 77, "source": "s", "key": "a/b"}])
def test_a_file_that_is_kept_aside_says_what_it_is(tmp_path: Path, said: dict[str, Any]) -> None:
    """Without that, it has the time that the file system knows."""
    place = tmp_path / "staging.orphaned-1"
    place.mkdir()
    (place / "f").write_bytes(b"12345")
    os.utime(place / "f", ns=(5, 999))
    if said:
        orphans.describe(place / "f", {"source": "", "key": "", **said})
    [found] = orphans.found(tmp_path, waiting=False)
    wanted = (place / "f", 5, said.get("mtime_ns") or 999, said.get("source", ""), said.get("key", ""), False)
    assert found == orphans.Orphan(*wanted)
    assert orphans.warning(tmp_path).startswith("1 file ")
    orphans.remove(found)
    assert (
        not place.exists() and orphans.warning(tmp_path) == "" and orphans.found(tmp_path, waiting=True) == []
    )


@pytest.mark.parametrize(
    "state, hope",
    [("", False), ("written", False), ("due", True), ("due later", True), ("failed", False), ("sent", True)],
)
@in_trio
async def test_others_give_hope_of_room_that_are_on_their_way(tmp_path: Path, state: str, hope: bool) -> None:
    """Those that only wait for their time begin now."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        mine = await d.create("mine", b"data")
        d.uploads._queue.plan(mine, 0.0 if state == "due later" else 1e6)
        other = await d.create("other", b"data") if state else None
        held = d.store.hold("put")
        if other is not None and state != "written":
            await d.uploads.commit(other)
            if state == "due":
                other.trying.due = trio.current_time()
            elif state == "failed":
                other.trying.failure = OriginFailed("no")
            elif state == "sent":
                d.uploads._queue.plan(other, 0.0)
                await held.reached.wait()
        due = None if other is None else other.trying.due
        assert d.uploads._begin_planned(mine) is hope
        if other is not None:
            now = trio.current_time()
            assert other.trying.due == (now if state == "due later" else due)
        assert held.release is not None
        held.release.set()
        d.store.rules.clear()


@pytest.mark.parametrize("why", ["", "removed", "stored"])
@in_trio
async def test_a_file_gets_its_old_name_back_if_it_is_there_and_not_stored(tmp_path: Path, why: str) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        dirty_file = await d.create("new", b"data")
        await d.uploads.commit(dirty_file)
        if why == "stored":
            await d.uploads._queue.upload(dirty_file)
        wanted = dirty_file.content.generation
        if why == "removed":
            dirty_file.content.name_goes()
        await d.uploads._back(dirty_file, wanted, Where("old", "base", ["token"], None))
        back = why == ""
        assert dirty_file.key == ("old" if back else "new") and not dirty_file.trying.turn.locked()
        assert (dirty_file.record.tokens == ["token"]) is back and dirty_file.trying.unsure is back
        assert (dirty_file.base == "base") is back
        rows = [row["key"] for row in d.uploads.journal.rows(DIRTY_FILES).values()]
        assert rows == ([] if why == "stored" else ["old" if back else "new"])
        dirty_file.content.name_stays()


@pytest.mark.parametrize("waiters", [1, 2, 3])
@in_trio
async def test_those_who_wait_for_an_upload_are_counted(tmp_path: Path, waiters: int) -> None:
    """One that is cancelled waits no longer; as long as one waits, nothing breaks it off."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        dirty_file = await d.create("k", b"data")
        held, scopes = d.store.hold("put"), [trio.CancelScope() for _ in range(waiters)]

        async def wait(scope: trio.CancelScope) -> None:
            with scope:
                await d.uploads._queue.upload(dirty_file)

        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(wait, scope)
            await held.reached.wait()
            await d.quiet()
            attempt = dirty_file.attempt
            assert attempt is not None and attempt.waiters == waiters
            for left in reversed(range(waiters)):
                scopes[left].cancel()
                await d.quiet()
                assert attempt.waiters == left and dirty_file.attempt is attempt
            assert held.release is not None
            held.release.set()
        await d.quiet()
        assert d.store.content("k") == b"data" and not dirty_file.dirty


@pytest.mark.parametrize("answers", [[True, False], [True, False, False], [False, True, False]])
@in_trio
async def test_what_is_opened_by_its_name_while_the_cache_takes_it_is_settled_later(
    tmp_path: Path, answers: list[bool]
) -> None:
    """It is asked before the file is given, and once more before the name shows the cache's."""
    async with desk(tmp_path) as d:
        left = list(answers)
        d.uploads.on_settling = lambda _: left.pop(0) if left else True
        await d.save("k", b"data")
        await d.quiet()
        assert not d.settled
        await trio.sleep(len(answers) * LOOK_S + 0.1)
        await d.quiet()
        assert d.settled == ["k"] and not d.uploads._dirty_files and len(d.cache.adopted) == 1
        assert await d.files() == []


@pytest.mark.parametrize("failures", [0, 1, 2])
@in_trio
async def test_a_row_that_could_not_be_removed_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    async with desk(tmp_path, writeback=True) as d:
        write, left = d.uploads.journal._database.write, [NoRoom("full") for _ in range(failures)]

        def fails(puts: Sequence[Put]) -> None:
            if left and any(value is None for _, _, value in puts):
                raise left.pop()
            write(puts)

        dirty_file = await d.create("k", b"data")
        await d.uploads.commit(dirty_file)
        monkeypatch.setattr(d.uploads.journal._database, "write", fails)
        await d.uploads._queue.upload(dirty_file)
        await d.quiet()
        assert len(d.uploads.journal.rows(DIRTY_FILES)) == (failures > 0)
        await trio.sleep(2 + max(0, failures - 1) * (LONGEST_RETRY_S + 2))
        await d.quiet()
        assert not d.uploads.journal.rows(DIRTY_FILES) and d.uploads.journal.left is None
        await d.close(dirty_file)


@pytest.mark.parametrize("unlinks", [True, False])
@in_trio
async def test_a_removal_that_the_disk_cannot_note_may_be_undone_by_a_crash_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unlinks: bool
) -> None:
    """Of what the origin does not have yet. Where the staging file goes, as it does unless the power fails, all is well."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        d.uploads.journal._room = 0  # of its content, which would bring it back
        dirty_file = await d.save("k", b"data")
        write, unlink, broken = d.uploads.journal._database.write, Path.unlink, [True]

        def fails(puts: Sequence[Put]) -> None:
            if broken:
                raise CacheUnusable("input/output error")
            write(puts)

        def stays(path: Path, missing_ok: bool = False) -> None:
            if path != dirty_file.file.path or unlinks:
                unlink(path, missing_ok)

        monkeypatch.setattr(d.uploads.journal._database, "write", fails)
        monkeypatch.setattr(Path, "unlink", stays)
        await d.uploads.discard(dirty_file)
        await d.quiet()

        def back() -> set[str]:
            return restorable(d.uploads.journal.rows(DIRTY_FILES), os.listdir(dirty_file.file.path.parent))

        assert back() == (set() if unlinks else {dirty_file.id})
        broken.clear()
        await trio.sleep(LONGEST_RETRY_S + 2)
        await d.quiet()
        assert not back() and not d.uploads.journal.rows(DIRTY_FILES)
        unlink(dirty_file.file.path, missing_ok=True)

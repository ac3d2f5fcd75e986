"""Which dirty files a flush takes, which the cache is given, and what a commit does of each state."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.base.errors import CachefsError, CacheUnusable, Conflict, NoRoom, OriginFailed
from cachefs.upload import room
from cachefs.upload.content import Attempt, State
from cachefs.upload.dirty_file import Way
from cachefs.upload.staging import HELD, LOOK_S, StagingDisk
from cachefs.upload.uploads import FLUSH_RETRY_S
from tests.upload.scripted import Desk, Room, desk, in_trio
from tests.upload.test_passthrough import Kernel, in_passthrough


async def of_each_state(d: Desk) -> dict[str, Any]:
    """Open, acknowledged, closed, acknowledged and changed since, removed."""
    files = {name: await d.create(name, b"data") for name in ("open", "noted", "closed", "half", "gone")}
    await d.uploads.commit(files["noted"])
    await d.uploads.commit(files["half"])
    await files["half"].write(4, b" and more")
    d.uploads.release(files["closed"])
    await d.uploads.discard(files["gone"])
    await d.quiet()
    return files


@pytest.mark.parametrize(
    "how, tried",
    [
        ({}, {"noted", "closed"}),
        ({"at_the_end": True}, {"noted", "closed", "half"}),
        ({"under": lambda d: d.key in ("open", "noted", "gone")}, {"noted"}),
        ({"under": lambda d: d.key == "half"}, set()),
        ({"under": lambda d: d.key == "half", "at_the_end": True}, {"half"}),
    ],
)
@in_trio
async def test_a_flush_takes_what_was_acknowledged_or_closed(
    tmp_path: Path, how: dict[str, Any], tried: set[str]
) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        await of_each_state(d)
        d.store.fail("put", lambda: OriginFailed("no"), times=1000)
        assert {file.key for file in await d.uploads.flush(**how)} == tried
        assert d.store.counts["put"] == len(tried), "each once"
        d.store.rules.clear()
        assert await d.uploads.flush(**how) == [] and set(d.store.objects) == tried


@in_trio
async def test_a_stop_sends_what_the_origin_takes_again_six_seconds_before_its_deadline(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        dirty_file = await d.create("k", b"data")
        await d.uploads.commit(dirty_file)
        dirty_file.trying.failures = 20  # it is left alone for long
        d.store.fail("put", lambda: OriginFailed("no"), times=1000)
        async with trio.open_nursery() as nursery:

            async def again() -> None:
                await trio.sleep(54)
                d.store.rules.clear()

            nursery.start_soon(again)
            assert await d.uploads.flush(deadline_s=60) == []
        assert d.store.content("k") == b"data"
        d.uploads.release(dirty_file)


@in_trio
async def test_a_stop_while_the_origin_is_out_asks_it_fifteen_times_a_minute_at_most(tmp_path: Path) -> None:
    """For each file; there may be ten thousand."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        dirty_file = await d.create("k", b"data")
        await d.uploads.commit(dirty_file)
        dirty_file.trying.failures = 20
        d.store.fail("put", lambda: OriginFailed("no"), times=1000)
        assert await d.uploads.flush(deadline_s=60) == [dirty_file]
        assert 1 < d.store.counts["put"] <= 15
        d.store.rules.clear()
        assert await d.uploads.flush() == []
        d.uploads.release(dirty_file)


@pytest.mark.parametrize("error, tries", [(OriginFailed, 4), (Conflict, 1), (NoRoom, 1)])
@in_trio
async def test_a_flush_tries_again_until_its_deadline_unless_it_is_in_vain(
    tmp_path: Path, error: type[CachefsError], tries: int
) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        dirty_file = await d.create("k", b"data")
        await d.uploads.commit(dirty_file)
        dirty_file.trying.failures = 20  # it is left alone for long
        d.store.fail("put", lambda: error("no"), times=1000)
        begun = trio.current_time()
        assert await d.uploads.flush(deadline_s=3.5 * FLUSH_RETRY_S) == [dirty_file]
        assert d.store.counts["put"] == tries
        took_s = trio.current_time() - begun
        assert took_s == pytest.approx(3.5 * FLUSH_RETRY_S if tries > 1 else 0.0, abs=0.5)
        d.store.rules.clear()
        assert await d.uploads.flush(deadline_s=math.inf) == []


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    "why",
    [
        "",
        "overtaken",
        "empty",
        "the cache hangs",
        "the disk hangs",
        "spoiled",
        "it refuses",
        "it fails",
        "a bug",
    ],
)
@in_trio
async def test_the_cache_is_given_what_the_origin_shows_unless_something_is_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, held: bool
) -> None:
    """Whatever it says, the file goes, and its users are told."""
    cache, asked = Room(adopts=why != "it refuses"), list[str]()
    data = b"" if why == "empty" else b"data" if held else bytes(HELD + 1)
    async with desk(tmp_path, cache=cache) as d:
        calls = {name: getattr(cache, name) for name in ("adopt", "adopt_bytes")}

        async def adopt(name: str, *arguments: Any) -> Any:
            if name not in asked:
                asked.append(name)
            if why == "it fails":
                raise NoRoom("full")
            if why == "a bug":
                raise ZeroDivisionError
            return await calls[name](*arguments)

        for name in calls:
            monkeypatch.setattr(cache, name, partial(adopt, name))
        dirty_file = await d.create("k", data)
        await d.uploads.commit(dirty_file)
        stored = dirty_file.content.stored
        assert stored is not None
        match why:
            case "overtaken":
                dirty_file.content.stored = replace(stored, overtaken=True)
            case "the cache hangs":
                cache.hangs = True
            case "the disk hangs":
                monkeypatch.setattr(StagingDisk, "hangs", property(lambda self: True))
            case "spoiled":
                dirty_file.file.spoiled = True
        d.uploads.release(dirty_file)
        await d.quiet()
        offered = why in ("", "it refuses", "it fails", "a bug")
        assert asked[:1] == ([("adopt_bytes" if held else "adopt")] if offered else [])
        assert list(cache.adopted.values()) == ([data] if why == "" else [])
        assert d.settled == ["k"] and not d.uploads._dirty_files
        monkeypatch.undo()
        assert await d.files() == []


@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("failed", ["", "told", "not told"])
@pytest.mark.parametrize("overdue", [False, True])
@in_trio
async def test_a_commit_begins_what_is_overdue_and_tells_a_failure_once(
    tmp_path: Path, overdue: bool, failed: str, writeback: bool
) -> None:
    async with desk(tmp_path, writeback=writeback, upload_delay_s=1e6) as d:
        dirty_file = await d.create("k", b"data")
        await d.uploads._records.acknowledge(dirty_file)
        dirty_file.trying.overdue = overdue
        if failed:
            dirty_file.trying.failure, dirty_file.trying.told = OriginFailed("before"), failed == "told"
        held = d.store.hold("put")
        assert held.release is not None
        if not writeback:
            held.release.set()
        raised = ""
        try:
            await d.uploads.commit(dirty_file)
        except OriginFailed as exc:
            raised = str(exc)
        assert raised == ("before" if writeback and failed == "not told" else "")
        begun = overdue or not writeback
        assert (dirty_file.attempt is not None) is (writeback and begun)
        assert dirty_file.trying.overdue is (overdue and not begun)
        if writeback:
            assert (dirty_file.trying.due < math.inf) is not begun
            if failed:
                assert dirty_file.trying.told
        held.release.set()
        await d.quiet()
        assert ("k" in d.store.objects) is begun
        d.uploads._queue.plan(dirty_file, 0.0)
        await d.quiet()
        assert await d.uploads.flush() == []
        counts = dict(d.store.counts)
        await d.uploads.commit(dirty_file)
        assert d.store.counts == counts, "it is there"


@in_trio
async def test_a_commit_of_what_a_process_writes_in_passthrough_only_notes_it(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"data")
        dirty_file.trying.overdue = True
        await d.uploads.commit(dirty_file)
        assert dirty_file.acknowledged and dirty_file.attempt is None and dirty_file.trying.due == math.inf
        os.close(fd)
        d.uploads.returned(dirty_file)
        assert dirty_file.trying.due < math.inf
        d.uploads.release(dirty_file)
        await trio.sleep(5)
        await d.quiet()
        assert d.store.content("k") == b"data"


@pytest.mark.parametrize(
    "base, unsure, there, ours",
    [
        (False, False, "ours", False),
        (True, False, "none", False),
        (True, False, "base", True),
        (True, False, "theirs", False),
        (False, True, "none", False),
        (False, True, "theirs", False),
        (False, True, "token", True),
        (True, True, "token", True),
    ],
)
@in_trio
async def test_what_is_there_is_its_own_by_its_version_or_its_token(
    tmp_path: Path, base: bool, unsure: bool, there: str, ours: bool
) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        dirty_file = await d.create("k", b"data")
        dirty_file.base = "the base" if base else None
        dirty_file.trying.unsure, dirty_file.record.tokens = unsure, ["one", "two"]
        if there != "none":
            info = d.store.show("k", b"there")
            if there == "base":
                dirty_file.base = info.etag
            d.store.tokens["k"] = (info.etag, "two" if there == "token" else "another")
        found = await d.uploads._own(dirty_file)
        assert (found is not None) is ours
        assert d.store.counts["head"] == (1 if base or unsure else 0)


NOW = [
    ("", True),
    ("nothing", False),
    ("locked", False),
    ("in passthrough", False),
    ("the cache takes it", False),
    ("too large", False),
    ("no room", False),
    ("landed", False),
    ("sent", False),
    ("behind what is sent", True),
]


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("why, can", NOW)
@in_trio
async def test_what_takes_no_waiting_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, can: bool, offset: int
) -> None:
    """Else nothing has happened."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1e6) as d:
        dirty_file = await d.create("k", b"data")
        content, data = dirty_file.content, b"" if why == "nothing" else b"more"
        with monkeypatch.context() as patch:
            match why:
                case "locked":
                    await dirty_file.lock.acquire()
                case "in passthrough":
                    dirty_file.kernel.way = Way.SHARED
                case "the cache takes it":
                    content.state = State.SETTLING
                case "too large":
                    largest = offset + len(data) - 1
                    patch.setattr(
                        dirty_file, "origin", SimpleNamespace(limits=SimpleNamespace(largest_object=largest))
                    )
                case "no room":
                    patch.setattr(d.uploads.room, "free_bytes", lambda: len(data) - 1)
                case "landed":
                    with dirty_file.file.used():
                        await dirty_file.file.spill()
                case "sent" | "behind what is sent":
                    content.attempt = Attempt()
                    content.attempt.frozen = offset + (why == "sent")
            before = (dirty_file.size, content.generation)
            assert dirty_file.write_now(offset, data) is can
            after = (dirty_file.size, content.generation)
            assert after == ((offset + 4, before[1] + 1) if can else before)
        if why == "locked":
            dirty_file.lock.release()
        content.attempt, content.state, dirty_file.kernel.way = None, State.DIRTY, Way.HERE
        held = (b"data"[:offset] + b"more") if can else b"data"
        assert bytes(await dirty_file.read(0, 99)) == held and dirty_file.dirty
        await d.uploads._queue.upload(dirty_file)
        assert d.store.content("k") == held


@pytest.mark.parametrize(
    "under_way, waiting, free, admits",
    [(0, 0, 4, True), (0, 0, 3, False), (1, 0, 4, True), (1, 1, 4, False), (0, 1, 4, True)],
)
@in_trio
async def test_a_writer_is_admitted_that_is_not_ahead_of_the_wire_and_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under_way: int, waiting: int, free: int, admits: bool
) -> None:
    async with desk(tmp_path) as d:
        dirty_file, staging_room = await d.create("k"), d.uploads.room
        parts: Any = SimpleNamespace(under_way=[1] * under_way, waiting_bytes=room.UNSENT + waiting)
        stand_in: Any = SimpleNamespace(sender=SimpleNamespace(parts=parts))
        monkeypatch.setattr(staging_room, "free_bytes", lambda: free)
        assert staging_room.admits(stand_in, 4) is admits

        def fails() -> int:
            raise CacheUnusable("broken")

        monkeypatch.setattr(staging_room, "free_bytes", fails)
        assert not staging_room.admits(stand_in, 4)
        monkeypatch.undo()
        await d.close(dirty_file)


@pytest.mark.parametrize(
    "passthrough, reclaims, writers, quiet, due_s",
    [
        (False, None, 0, True, 7.0),
        (True, True, 0, True, 7.0),
        (True, False, 1, False, math.inf),
        (True, False, 0, False, LOOK_S),
        (True, None, 0, True, 7.0),
        (True, None, 1, True, 7.0),
    ],
)
@in_trio
async def test_what_a_process_writes_is_sent_when_it_is_quiet(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    passthrough: bool,
    reclaims: bool | None,
    writers: int,
    quiet: bool,
    due_s: float,
) -> None:
    """None: its file cannot be looked at, and an attempt will say so."""
    async with desk(tmp_path, writeback=True) as d:
        dirty_file = await d.create("k", b"data")

        def reclaim() -> bool:
            if reclaims is None:
                raise CacheUnusable("broken")
            return reclaims

        with monkeypatch.context() as patch:
            patch.setattr(dirty_file, "reclaim", reclaim)
            dirty_file.kernel.way = Way.PASSTHROUGH if passthrough else Way.HERE
            dirty_file.kernel.writers = writers
            now = trio.current_time()
            dirty_file.trying.due = now + 7.0
            assert d.uploads._queue._is_quiet(dirty_file) is quiet
            assert dirty_file.trying.due == now + due_s
        dirty_file.kernel.way, dirty_file.kernel.writers = Way.HERE, 0
        await d.close(dirty_file)

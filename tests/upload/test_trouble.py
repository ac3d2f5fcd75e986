"""Full disks, slow stores, conflicts: who pays for them, and who does not."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import (
    CacheUnusable,
    Conflict,
    NoRoom,
    NoSuchUpload,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    TooLarge,
)
from cachefs.base.names import ObjectId
from cachefs.upload import room
from cachefs.upload.staging import LOOK_S, SMALL
from tests.fetch.scripted import content
from tests.upload.scripted import LIMITS, PART, Room, ScriptedStore, add, desk, in_trio

# -- room ------------------------------------------------------------------------------------------


class Disk:
    """What `statvfs` says is free; `pwrite` fails for one file when told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free = free
        self.full: set[int] = set()
        pwrite = os.pwrite

        def statvfs(path: Any) -> Any:
            class Found:
                f_bavail, f_frsize = self.free // 4096, 4096

            return Found

        def write(fd: int, data: Any, offset: int) -> int:
            if os.fstat(fd).st_ino in self.full:
                if offset % 2:
                    raise OSError(errno.ENOSPC, "full")
                return pwrite(fd, data[: len(data) // 2 * 2 - 1], offset)  # then the odd offset fails
            return pwrite(fd, data, offset)

        monkeypatch.setattr(os, "statvfs", statvfs)
        monkeypatch.setattr(os, "pwrite", write)

    def fill(self, path: Path) -> None:
        self.full.add(path.stat().st_ino)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch, 1 << 30)


@in_trio
async def test_a_full_disk_is_an_error_to_who_writes_and_to_nobody_else(tmp_path: Path, disk: Disk) -> None:
    async with desk(tmp_path) as d:
        good, bad = await d.create("good", b"1" * 100), await d.create("bad", b"2" * 100)
        await bad.file.spill()
        disk.fill(bad.file.path)
        with pytest.raises(NoRoom):
            await bad.write(50, b"3" * 100)
        with pytest.raises(NoRoom):
            await add(bad, b"4" * (SMALL + 1))
        assert bad.size == 100, "nothing was appended"
        await add(good, b"!" * 10)
        await d.close(good)
        disk.full.clear()
        await bad.write(50, b"5" * 50)
        await bad.truncate(120)
        await d.close(bad)
        assert d.store.content("good") == b"1" * 100 + b"!" * 10
        assert d.store.content("bad") == b"2" * 50 + b"5" * 50 + bytes(20), "nothing is left of what failed"


@in_trio
async def test_what_a_failed_write_left_before_the_end_is_sent(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what it left behind the end cannot be removed at once."""
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"1" * 100)
        await dirty_file.file.spill()
        await d.uploads.commit(dirty_file)
        disk.fill(dirty_file.file.path)

        def broken(fd: int, size: int) -> None:
            raise OSError(errno.EIO, "broken")

        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", broken)
            with pytest.raises(CacheUnusable, match="broken"):
                await dirty_file.write(50, b"2" * 100)
        assert dirty_file.size == 100 and dirty_file.dirty
        disk.full.clear()
        await d.uploads.commit(dirty_file)
        assert d.store.content("k") == b"1" * 50 + b"2" * 50
        await dirty_file.write(150, b"3")
        await d.close(dirty_file)
        assert d.store.content("k") == b"1" * 50 + b"2" * 50 + bytes(50) + b"3"


@in_trio
async def test_what_a_change_begins_with_needs_room_too(tmp_path: Path, disk: Disk) -> None:
    async with desk(tmp_path, keep_free_bytes=1 << 20) as d:
        d.store.show("k", b"1" * (2 * SMALL))
        disk.free = 0
        with pytest.raises(NoRoom):
            await d.create("k", base=d.store.version("k"))
        assert d.cache.asked and await d.files() == []


@in_trio
async def test_what_is_kept_free_stays_free_and_the_cache_gives_way(tmp_path: Path, disk: Disk) -> None:
    class Giving(Room):
        async def evict_to_hold(self, wanted: int) -> bool:
            await super().evict_to_hold(wanted)
            disk.free += wanted
            return True

    cache = Giving()
    async with desk(tmp_path, cache=cache, keep_free_bytes=1 << 20) as d:
        disk.free = (1 << 20) + 50_000
        await d.save("k", b"1" * 40_000)
        assert cache.asked == []
        disk.free -= 40_000
        await d.save("l", b"2" * 40_000)
        assert cache.asked == [40_000] and d.store.content("l") == b"2" * 40_000


@in_trio
async def test_without_hope_a_full_disk_is_told_at_once(tmp_path: Path, disk: Disk) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"1" * 100)
        disk.free = 0
        await trio.sleep(1)
        before = trio.current_time()
        with pytest.raises(NoRoom):
            await add(dirty_file, b"2" * 100)
        assert trio.current_time() == before
        assert bytes(await dirty_file.read(0, 1000)) == b"1" * 100
        await d.close(dirty_file)
        assert d.store.content("k") == b"1" * 100


@in_trio
async def test_when_nothing_helps_what_is_kept_free_is_written_into_but_for_a_tenth(
    tmp_path: Path, disk: Disk
) -> None:
    async with desk(tmp_path, keep_free_bytes=1 << 20) as d:
        disk.free = 1 << 20
        await d.save("k", b"1" * 40_000)
        disk.free = (1 << 20) // 10 + 30_000
        await trio.sleep(1)
        dirty_file = await d.create("l", b"2" * 20_000)
        with pytest.raises(NoRoom):
            await add(dirty_file, b"2" * 40_000)
        assert dirty_file.size == 20_000


@pytest.mark.parametrize("gives_way", [True, False])
@in_trio
async def test_a_cache_that_gives_way_slowly_is_waited_for(
    tmp_path: Path, disk: Disk, gives_way: bool
) -> None:
    """Some file systems free what was unlinked a little later."""

    class Slow(Room):
        async def evict_to_hold(self, wanted: int) -> bool:
            await super().evict_to_hold(wanted)
            if len(self.asked) == 4:
                disk.free = 1 << 30
            return gives_way

    async with desk(tmp_path, cache=Slow()) as d:
        dirty_file = await d.create("k")
        disk.free = 0
        await trio.sleep(1)
        before = trio.current_time()
        if gives_way:
            await add(dirty_file, b"1" * 100)
            assert trio.current_time() == before + 3 * LOOK_S and d.cache.asked == [100] * 4
        else:
            with pytest.raises(NoRoom):
                await add(dirty_file, b"1" * 100)
            assert trio.current_time() == before and d.cache.asked == [100]


@pytest.mark.parametrize("helps", [True, False])
@in_trio
async def test_a_writer_waits_for_others_to_be_uploaded(tmp_path: Path, disk: Disk, helps: bool) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=10_000) as d:
        await d.save("other", b"1" * 100)
        dirty_file = await d.create("k", b"2" * 100)
        disk.free = 0
        await trio.sleep(1)
        d.store.latency_s = 10 if helps else 1000

        def committed(key: str) -> None:
            if helps:
                disk.free = 1 << 20

        d.uploads.on_committed = lambda dirty_file, info: committed(dirty_file.key)
        before = trio.current_time()
        if helps:
            await add(dirty_file, b"3" * 100)
            assert 10 <= trio.current_time() - before <= 11
        else:
            for _ in range(5):
                with pytest.raises(NoRoom):
                    await add(dirty_file, b"3" * 100)
            assert room.WAIT_S <= trio.current_time() - before <= room.WAIT_S + 1, "once, not for each write"
        assert d.store.objects.keys() == ({"other"} if helps else set())


@in_trio
async def test_who_writes_faster_than_the_store_takes_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "UNSENT", 20 * PART)
    async with desk(tmp_path) as d:
        d.store.hold("part", times=1000)
        dirty_file = await d.create("k")
        written = 0

        async def write() -> None:
            nonlocal written
            for _ in range(60):
                await add(dirty_file, b"x" * PART)
                written += PART

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await trio.sleep(100)
            assert 20 * PART <= written <= 22 * PART
            holding = d.store.rules.pop()
            assert holding.release is not None
            holding.release.set()
        await d.close(dirty_file)
        assert d.store.content("k") == b"x" * 60 * PART


@in_trio
async def test_a_store_that_fails_does_not_hold_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "UNSENT", 20 * PART)
    async with desk(tmp_path) as d:
        d.store.fail("part", lambda: OriginFailed("down"), times=10_000)
        dirty_file = await d.create("k")
        for _ in range(60):
            await add(dirty_file, b"x" * PART)
        await d.quiet()
        assert d.store.counts["part"] <= 16, "who fails is not asked for every part"
        with pytest.raises(OriginFailed):
            await d.uploads.commit(dirty_file)
        d.store.rules.clear()
        await d.close(dirty_file)
        assert d.store.content("k") == b"x" * 60 * PART


@in_trio
async def test_a_file_larger_than_the_store_takes(tmp_path: Path) -> None:
    async with desk(tmp_path, ScriptedStore(replace(LIMITS, largest_object=1000))) as d:
        dirty_file = await d.create("k", b"1" * 990)
        for change in (
            add(dirty_file, b"2" * 11),
            dirty_file.truncate(1001),
            dirty_file.allocate(0, 1001),
            dirty_file.write(1 << 50, b"2"),
        ):
            with pytest.raises(TooLarge):
                await change
        await d.close(dirty_file)
        assert d.store.content("k") == b"1" * 990


# -- the cache -------------------------------------------------------------------------------------


@in_trio
async def test_writing_again_does_not_touch_what_the_cache_has(tmp_path: Path) -> None:
    class Slow(Room):
        async def adopt(self, object_id: ObjectId, path: Path) -> bool:
            taken = await super().adopt(object_id, path)
            await trio.sleep(5)
            return taken

    async with desk(tmp_path, cache=Slow()) as d:
        data = content(1, 3 * PART)
        dirty_file = await d.save("k", data)
        await trio.sleep(1)
        adopted = next(path for path in d.staging.iterdir() if path.suffix == ".adopted")
        d.uploads.open(dirty_file)  # while the cache is taking it
        await dirty_file.write(0, b"new")
        assert bytes(await dirty_file.read(0, 10)) == b"new" + data[3:10]
        await d.close(dirty_file)
        await trio.sleep(20)
        assert d.store.content("k") == b"new" + data[3:] and d.settled == ["k"]
        assert adopted.read_bytes() == data
        assert d.cache.adopted[d.store.version("k")] == b"new" + data[3:] and await d.files() == []


@in_trio
async def test_what_the_cache_does_not_take_is_removed(tmp_path: Path) -> None:
    async with desk(tmp_path, cache=Room(adopts=False)) as d:
        await d.save("k", b"data")
        await d.quiet()
        assert await d.files() == [] and d.settled == ["k"]


@in_trio
async def test_a_reader_keeps_the_dirty_file_until_he_goes(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"data")
        d.uploads.open(dirty_file)
        await d.close(dirty_file)
        await d.quiet()
        assert d.settled == [] and bytes(await dirty_file.read(0, 10)) == b"data"
        assert bytes(dirty_file.read_now(1, 2) or b"") == b"at"
        d.uploads.release(dirty_file)
        await d.quiet()
        assert d.settled == ["k"]


# -- other writers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 5 * PART])
@pytest.mark.parametrize("new", [True, False])
@in_trio
async def test_conflicts(tmp_path: Path, size: int, new: bool) -> None:
    data = content(1, size)
    for policy in ("overwrite", "fail"):
        store = ScriptedStore()
        async with desk(tmp_path / policy, store, on_conflict=policy) as d:
            if not new:
                store.show("k", b"old")
            dirty_file = await d.create("k", data, base=None if new else store.version("k"))
            store.show("k", b"of another client")
            if policy == "overwrite":
                await d.close(dirty_file)
                assert store.content("k") == data
                continue
            with pytest.raises(Conflict):
                await d.uploads.commit(dirty_file)
            assert store.content("k") == b"of another client" and isinstance(dirty_file.failure, Conflict)
            await d.uploads.rename(dirty_file, "elsewhere")
            await d.close(dirty_file)
            assert store.content("elsewhere")[:size] == data and store.content("k") == b"of another client"


@pytest.mark.parametrize("size", [10, 5 * PART])
@in_trio
async def test_without_conflict_the_next_commit_replaces_our_own(tmp_path: Path, size: int) -> None:
    async with desk(tmp_path, on_conflict="fail") as d:
        dirty_file = await d.create("k", content(1, size))
        for _ in range(3):
            await d.uploads.commit(dirty_file)
            await add(dirty_file, b"!")
        await d.close(dirty_file)
        assert d.store.content("k") == content(1, size) + b"!!!"


@pytest.mark.parametrize("kill", [False, True])
@in_trio
async def test_an_object_of_an_earlier_attempt_is_no_conflict(tmp_path: Path, kill: bool) -> None:
    """The reply was lost, or the process; then more was written."""
    store = ScriptedStore()
    async with desk(tmp_path, store, on_conflict="fail", writeback=True) as d:
        if kill:
            held = store.hold("put", lost=True)
        else:
            store.fail("put", lambda: OriginFailed("silence"), lost=True)
        dirty_file = await d.create("k", b"one")
        await d.uploads.commit(dirty_file)
        if kill:
            await held.reached.wait()
            store.tokens["k"] = (store.show("k", b"one").etag, dirty_file.record.tokens[-1])
        else:
            await trio.sleep(1.2)
            await d.quiet()
            assert store.content("k") == b"one" and dirty_file.dirty
            await add(dirty_file, b" two")
            with pytest.raises(OriginFailed):
                await d.uploads.commit(dirty_file)
            await d.uploads.flush()
    if kill:
        store.rules.clear()
        async with desk(tmp_path, store, on_conflict="fail", writeback=True) as d:
            dirty_file = d.uploads.pending()[0]
            d.uploads.open(dirty_file)
            await add(dirty_file, b" two")
            await d.close(dirty_file)
            assert await d.uploads.flush() == []
    assert store.content("k") == b"one two"


@pytest.mark.parametrize("seed", range(5))
@in_trio
async def test_an_attempt_that_reaches_the_origin_a_minute_late_is_no_conflict(
    tmp_path: Path, seed: int
) -> None:
    """A proxy held it back, while later ones failed."""
    async with desk(tmp_path, on_conflict="fail", writeback=True) as d:
        d.uploads._queue._rng.seed(seed)
        rule = d.store.fail("put", lambda: OriginFailed("silence"), times=1000)
        dirty_file = await d.save("k", b"data")
        await rule.reached.wait()
        token = dirty_file.record.tokens[0]
        await trio.sleep(60)
        d.store.tokens["k"] = (d.store.show("k", b"data").etag, token)
        d.store.rules.clear()
        await trio.sleep(60)
        assert dirty_file.trying.failure is None and not dirty_file.dirty


@in_trio
async def test_a_conflict_is_reported_after_at_most_ten_requests(tmp_path: Path) -> None:
    """However many attempts have failed before, each of which could have made the object that is there now."""
    async with desk(tmp_path, on_conflict="fail", writeback=True) as d:
        rule = d.store.fail("put", lambda: OriginFailed("silence"), times=1000)
        dirty_file = await d.save("k", b"data")
        await trio.sleep(3600)
        assert rule.times < 1000 - 30
        d.store.rules.clear()
        d.store.show("k", b"of another client")
        put, ours, asked = d.store.counts["put"], d.store.ours, list[str]()

        async def counted(key: str, token: str, *rest: Any) -> Any:
            asked.append(token)
            return await ours(key, token, *rest)

        d.store.ours = counted
        await trio.sleep(60)
        tries = d.store.counts["put"] - put
        assert tries and len(asked) + tries <= 10 * tries
        assert isinstance(dirty_file.trying.failure, Conflict)


@in_trio
async def test_who_is_replaced_as_soon_as_he_wrote_has_written(tmp_path: Path) -> None:
    """The last one wins, and it was another client."""
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"ours")
        d.store.fail("put", lambda: ObjectChanged("was replaced"), lost=True)
        held = d.store.hold("head")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.close, dirty_file)
            await held.reached.wait()
            d.store.show("k", b"theirs")
            assert held.release is not None
            held.release.set()
        await d.quiet()
        assert d.store.content("k") == b"theirs" and d.settled == ["k"] and d.cache.adopted == {}
        assert d.told[-1][1].etag == d.store.version("k").etag


@pytest.mark.parametrize("kind", ["part", "complete"])
@in_trio
async def test_an_upload_that_vanishes_in_the_middle_is_begun_anew(tmp_path: Path, kind: str) -> None:
    async with desk(tmp_path) as d:
        data = content(1, 300 * PART)
        dirty_file = await d.create("k", data[: 10 * PART])
        await d.quiet()
        if kind == "part":
            d.store.uploads.clear()
        else:
            d.store.fail("complete", lambda: NoSuchUpload("expired"))
        await add(dirty_file, data[10 * PART :])
        await d.close(dirty_file)
        assert d.store.content("k") == data and d.store.counts["begin"] == 2


@in_trio
async def test_the_log_names_a_failing_upload_once_a_minute_for_each_kind_of_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else any user could fill it: with many files that fail, or with one that is tried for ever. The status counts all."""

    def said() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        caplog.clear()
        return found

    async with desk(tmp_path, writeback=True, upload_delay_s=0) as d:
        d.store.fail("put", lambda: OriginFailed("down"), times=10_000)
        for number in range(50):
            await d.save(f"k{number}", b"data")
        await d.quiet()
        d.store.rules.clear()
        d.store.fail("put", lambda: PermissionDenied("denied"), times=10_000)
        await d.save("l", b"data")
        await d.quiet()
        down, denied = said()
        assert down.startswith("down; trying again in") and denied.startswith("denied; trying again in")
        assert d.uploads.status()["failed"] == d.metrics.upload_failures == 51
        await trio.sleep(61)
        await d.save("m", b"data")
        await d.quiet()
        assert d.metrics.upload_failures > 100
        (again,) = said()
        assert re.fullmatch(r"denied; trying again in .* \(\d+ more failures of this kind before it\)", again)
        d.store.rules.clear()
        assert await d.uploads.flush() == []


@in_trio
async def test_files_that_cannot_be_kept_are_named_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full, or fails, says so for each of them, and at each try."""
    async with desk(tmp_path) as d:
        d.store.fail("put", lambda: OriginFailed("down"), times=10_000)

        async def full(*_: Any, **__: Any) -> None:
            raise NoRoom("the journal is full")

        write, d.uploads.journal.write = d.uploads.journal.write, full  # type: ignore[method-assign]
        for number in range(20):
            with pytest.raises(OriginFailed):
                await d.save(f"k{number}", b"data")
        assert sum("the journal is full" in record.getMessage() for record in caplog.records) == 1
        d.uploads.journal.write = write  # type: ignore[method-assign]
        d.store.rules.clear()
        assert await d.uploads.flush() == []


@in_trio
async def test_what_is_shown(tmp_path: Path) -> None:
    now = 10**18
    async with desk(tmp_path, writeback=True, now_ns=lambda: now) as d:
        assert d.uploads.status()["pending"] == 0
        await d.save("a", b"12345")
        assert d.uploads.status()["oldest_s"] == 0.0
        d.store.fail("put", lambda: OriginFailed("down"), times=1000)
        now += 10**9
        await d.save("b", b"678")
        await trio.sleep(3)
        now += 4 * 10**9
        status = d.uploads.status()
        assert (status["pending"], status["pending_bytes"], status["failed"]) == (2, 8, 2)
        assert status["oldest_s"] == 5.0 and status["last_error"] == "down"
        assert [dirty_file["key"] for dirty_file in status["dirty_files"]] == ["a", "b"]

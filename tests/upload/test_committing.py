"""Durable: what a close promises, and what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from cachefs.base.errors import NoRoom, OriginFailed, PermissionDenied
from cachefs.upload import DirtyFile
from tests.fetch.scripted import content
from tests.upload.scripted import MIB, PART, ScriptedStore, add, desk, in_trio


@pytest.mark.parametrize("size", [0, 1, PART, PART - 1])
@in_trio
async def test_a_small_file_is_one_request(tmp_path: Path, size: int) -> None:
    async with desk(tmp_path) as d:
        data = content(1, size)
        dirty_file = await d.create("k", data)
        await d.uploads.commit(dirty_file)
        assert d.store.content("k") == data and dirty_file.committed is not None and not dirty_file.dirty
        assert d.store.counts == {"put": 1}
        await d.close(dirty_file)
        await d.quiet()
        assert d.store.counts == {"put": 1}
        assert await d.files() == [] and d.settled == ["k"]
        assert d.cache.adopted == ({d.store.version("k"): data} if size else {})


@in_trio
async def test_a_large_file_goes_in_parts_while_it_is_written(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        data = content(1, 40 * PART + 17)
        dirty_file = await d.create("big")
        for at in range(0, len(data), PART // 2):
            await dirty_file.write(at, data[at : at + PART // 2])
        await d.quiet()
        early = d.store.counts["part"]
        assert early >= 30 and d.store.counts["begin"] == 1 and d.store.objects == {}
        assert bytes(await dirty_file.read(PART - 5, 10)) == data[PART - 5 : PART + 5]
        await d.close(dirty_file)
        assert d.store.content("big") == data
        counts = {"begin": 1, "part": dirty_file.parts.count or early + 1, "complete": 1}
        assert d.store.counts == counts
        await d.quiet()
        assert d.store.counts == counts, "an upload that is completed is over: there is nothing to abort"
        assert d.cache.adopted == {d.store.version("big"): data} and await d.files() == []
        assert d.uploads.journal.rows("drafts") == {}


@in_trio
async def test_what_is_written_back_into_a_sent_part_is_sent_again(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        data = bytearray(content(1, 8 * PART))
        dirty_file = await d.create("k", bytes(data))
        await d.quiet()
        assert d.store.counts["part"] == 7
        data[3:9] = b"header"
        await dirty_file.write(3, b"header")
        await d.close(dirty_file)
        assert d.store.content("k") == data and d.store.counts["part"] == 9


@in_trio
async def test_room_that_is_allocated_is_a_change_where_the_file_grows(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"data")
        await d.uploads.commit(dirty_file)
        await dirty_file.allocate(0, 4)
        assert not dirty_file.dirty and dirty_file.size == 4
        await dirty_file.allocate(2, 8)
        assert dirty_file.dirty and dirty_file.size == 10
        await d.close(dirty_file)
        assert d.store.content("k") == b"data" + bytes(6)


@in_trio
async def test_an_upload_that_cannot_be_written_down_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash nothing would know of it."""
    async with desk(tmp_path) as d:
        with monkeypatch.context() as patch:

            async def full(dirty_file: DirtyFile) -> None:
                raise NoRoom("the journal is full")

            patch.setattr(d.uploads, "keep", full)
            dirty_file = await d.create("k", content(1, 40 * PART))
            await d.quiet()
            assert d.store.counts == {"begin": 1, "abort": 1} and d.store.uploads == {}
            assert isinstance(dirty_file.sender.failed, NoRoom) and dirty_file.sender.upload is None
        await d.close(dirty_file)
        assert d.store.content("k") == content(1, 40 * PART)


@in_trio
async def test_appending_truncating_and_gaps(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"hello")
        await add(dirty_file, b" world")
        await dirty_file.truncate(8)
        await dirty_file.truncate(12)
        await dirty_file.write(20, b"end")
        wanted = b"hello wo" + bytes(12) + b"end"
        assert bytes(await dirty_file.read(0, 100)) == wanted and dirty_file.size == 23
        await dirty_file.allocate(0, 30)
        await d.close(dirty_file)
        assert d.store.content("k") == wanted + bytes(7)


@in_trio
async def test_a_dirty_file_begins_with_the_version_that_it_replaces(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        old = content(1, 3 * PART)
        d.store.show("k", old)
        dirty_file = await d.create("k", b"new", base=d.store.version("k"))
        assert bytes(await dirty_file.read(0, len(old))) == b"new" + old[3:]
        await d.close(dirty_file)
        assert d.store.content("k") == b"new" + old[3:]
        dirty_file = await d.create("k", b"", base=d.store.version("k"), upto=PART)
        await add(dirty_file, b"!")
        await d.close(dirty_file)
        assert d.store.content("k") == b"new" + old[3:PART] + b"!"


@in_trio
async def test_fsync_in_the_middle(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        first, second = content(1, 3 * PART), content(2, 3 * PART)
        dirty_file = await d.create("k", first)
        await d.uploads.commit(dirty_file)
        assert d.store.content("k") == first and not dirty_file.dirty
        await d.uploads.commit(dirty_file)  # nothing changed
        assert d.store.counts["complete"] == 1
        await add(dirty_file, second)
        assert dirty_file.dirty and dirty_file.committed is None
        await d.close(dirty_file)
        assert d.store.content("k") == first + second
        assert [key for key, _ in d.told] == ["k", "k"] and d.told[-1][1].etag == d.store.version("k").etag


@in_trio
async def test_those_who_commit_at_once_share_an_upload(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"data")
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(d.uploads.commit, dirty_file)
        assert d.store.counts == {"put": 1}


@in_trio
async def test_a_waiter_that_is_cancelled_ends_nothing(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"data")
        held = d.store.hold("put")
        with trio.move_on_after(5):
            await d.uploads.commit(dirty_file)
        assert held.reached.is_set() and dirty_file.dirty
        held.release.set()
        await d.quiet()
        assert d.store.content("k") == b"data" and not dirty_file.dirty


@pytest.mark.parametrize("kind", ["put", "begin", "part", "complete"])
@in_trio
async def test_a_failure_is_told_and_tried_again(tmp_path: Path, kind: str) -> None:
    async with desk(tmp_path) as d:
        data = content(1, 10 if kind == "put" else 5 * PART)
        d.store.fail(kind, lambda: OriginFailed("no luck"), times=100 if kind in ("part", "begin") else 2)
        dirty_file = await d.create("k", data)
        with pytest.raises(OriginFailed, match="no luck"):
            await d.uploads.commit(dirty_file)
        assert isinstance(dirty_file.failure, OriginFailed) and d.uploads.pending() == [dirty_file]
        assert dirty_file.acknowledged  # its writer knows that it is not there, and we do not give it up
        d.uploads.release(dirty_file)
        d.store.rules.clear()
        await trio.sleep(5)
        await d.quiet()
        assert d.store.content("k") == data and dirty_file.failure is None and await d.files() == []
        assert d.uploads.pending() == [] and d.settled == ["k"]
        assert d.uploads.journal.rows("drafts") == {} and d.store.uploads == {}


@in_trio
async def test_what_is_refused_is_tried_again_rarely(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        d.store.fail("put", lambda: PermissionDenied("403"), times=1000)
        dirty_file = await d.create("k", b"data")
        with pytest.raises(PermissionDenied):
            await d.close(dirty_file)
        await trio.sleep(25)
        assert d.store.counts["put"] == 1
        await trio.sleep(600)
        assert 8 <= d.store.counts["put"] <= 21
        d.store.rules.clear()
        await trio.sleep(60)
        await d.quiet()
        assert d.store.content("k") == b"data" and d.metrics.upload_failures >= 8


@in_trio
async def test_a_store_without_parts(tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.upload.scripted import LIMITS

    async with desk(tmp_path, ScriptedStore(replace(LIMITS, most_parts=0))) as d:
        data = content(1, 20 * MIB)
        await d.save("k", data)
        assert d.store.counts == {"put": 1} and d.store.content("k") == data


@in_trio
async def test_no_more_parts_at_once_than_said(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        d.store.latency_s = 1
        await d.save("k", content(1, 200 * PART))
        assert d.store.most_in_flight == 32, "while it is written, and as many at the commit"

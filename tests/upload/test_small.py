"""Small files wait in memory for what becomes of them: the disk sees one when it has to, and never half of it."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.errors import CacheUnusable, NoRoom, OriginFailed
from cachefs.base.names import ObjectId
from cachefs.upload import orphans, staging
from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.staging import HELD
from cachefs.upload.uploads import TOGETHER
from tests.upload.scripted import Room, ScriptedStore, Turns, add, desk, in_trio
from tests.upload.test_passthrough import Kernel


@in_trio
async def test_a_small_file_is_saved_without_the_disk_and_kept_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path) as d:
        turns = Turns(monkeypatch)
        dirty_file = await d.create("k", b"1" * 10_000)
        assert await dirty_file.read(0, 20_000) == dirty_file.read_now(0, 20_000) == b"1" * 10_000
        await d.uploads.commit(dirty_file)
        assert await d.files() == [] and turns.count == 0, "but for the request, which is the store's"
        assert d.store.counts == {"put": 1} and d.store.content("k") == b"1" * 10_000
        d.uploads.release(dirty_file)
        await d.quiet()
        assert turns.count == 1 and list(d.cache.adopted.values()) == [b"1" * 10_000]
        assert await d.files() == [] and d.uploads._disk.memory_left == staging.HELD_ALTOGETHER


@in_trio
async def test_small_files_go_to_the_cache_together_and_those_that_were_removed_do_not(
    tmp_path: Path,
) -> None:
    given = list[int]()

    class Counting(Room):
        async def adopt_bytes(self, versions: Sequence[tuple[ObjectId, bytes]]) -> list[bool]:
            given.append(len(versions))
            return await super().adopt_bytes(versions)

    async with desk(tmp_path, cache=Counting()) as d:
        files = [await d.save(str(n), b"%d" % n) for n in range(10)]
        await d.uploads.discard(files[3])
        d.uploads.open(files[4])
        assert given == [] and files[4].read_now(0, 10) == b"4", "they can be read here meanwhile"
        await d.quiet()
        assert given == [8] and sorted(d.settled) == [str(n) for n in range(10) if n not in (3, 4)]
        d.uploads.release(files[4])
        await d.quiet()
        assert given == [8, 1] and len(d.cache.adopted) == 9 and d.uploads._dirty_files == {}
        for n in range(20, 20 + TOGETHER):
            await d.save(str(n), b"1")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert given[2:] == [TOGETHER], "they wait for no clock then"
        assert d.uploads._disk.memory_left == staging.HELD_ALTOGETHER


@in_trio
async def test_one_that_is_opened_while_others_are_settled_keeps_its_content(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        first, second = [await d.save(key, b"1" * 100) for key in ("a", "b")]
        settled = d.uploads.on_settled

        def open_second(dirty_file: DirtyFile) -> None:
            settled(dirty_file)
            if dirty_file is first:
                d.uploads.open(second)

        d.uploads.on_settled = open_second
        await d.quiet()
        assert d.settled == ["a"]
        await second.write(0, b"2")
        assert await second.read(0, 200) == b"2" + b"1" * 99
        await d.uploads.commit(second)
        assert d.store.content("b") == b"2" + b"1" * 99
        d.uploads.release(second)
        await d.quiet()
        assert d.settled == ["a", "b"]


def waiting_cache(cache: Room) -> tuple[trio.Event, trio.Event]:
    """(set when the cache is given small files, to be set for it to take them)"""
    plain, reached, go_on = cache.adopt_bytes, trio.Event(), trio.Event()

    async def slow(versions: Sequence[tuple[ObjectId, bytes]]) -> list[bool]:
        reached.set()
        await go_on.wait()
        return await plain(versions)

    cache.adopt_bytes = slow  # type: ignore[method-assign]
    return reached, go_on


@pytest.mark.parametrize("adopts", [True, False])
@in_trio
async def test_what_happens_to_a_small_file_while_the_cache_takes_it(tmp_path: Path, adopts: bool) -> None:
    """One is removed, one opened and written again, one is left alone."""
    async with desk(tmp_path, cache=Room(adopts=adopts)) as d:
        reached, go_on = waiting_cache(d.cache)
        gone, again, rest = [await d.save(key, key.encode()) for key in ("gone", "again", "rest")]
        await reached.wait()
        await d.uploads.discard(gone)
        d.uploads.open(again)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(again.write, 0, b"A")
            await trio.sleep(1)
            go_on.set()
        assert await again.read(0, 10) == b"Again"
        await d.close(again)
        await d.quiet()
        assert d.store.content("again") == b"Again" and rest.key in d.settled
        assert d.uploads._dirty_files == {} and d.uploads._disk.memory_left == staging.HELD_ALTOGETHER
        assert await d.files() == []


@in_trio
async def test_the_index_is_to_list_the_version_that_the_cache_is_just_adopting(tmp_path: Path) -> None:
    cache = Room()
    reached, go_on = waiting_cache(cache)
    async with desk(tmp_path, cache=cache) as d:
        dirty_file = await d.save("k", b"data")
        version = ObjectId("s", "of the handle", "etag", 4)
        await reached.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.keep_cached, version, dirty_file)
            await trio.testing.wait_all_tasks_blocked()
            assert not cache.listed
            go_on.set()
        assert cache.listed == [b"data"]
        await d.uploads.keep_cached(version, None)
        assert cache.listed == [b"data", None]


@pytest.mark.parametrize("adopts", [True, False])
@in_trio
async def test_a_small_file_that_was_given_to_the_cache_waits_for_no_other_one(
    tmp_path: Path, adopts: bool
) -> None:
    """A writer has another one of them: this one is settled."""
    async with desk(tmp_path, cache=Room(adopts=adopts)) as d:
        reached, go_on = waiting_cache(d.cache)
        again, rest = [await d.save(key, key.encode()) for key in ("again", "rest")]
        written = trio.Event()

        async def write() -> None:
            async with again.lock:
                await written.wait()

        await reached.wait()
        d.uploads.open(again)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked(0.01)
            go_on.set()
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert d.settled == [rest.key]
            written.set()
        d.uploads.release(again)
        await d.quiet()
        assert d.uploads._dirty_files == {} and sorted(d.settled) == ["again", "rest"]


@in_trio
async def test_what_is_written_at_the_end_is_copied_once(tmp_path: Path) -> None:
    """No zeros are written first where the bytes go, but a gap before them is zeros."""

    class Held(bytearray):
        zeros = 0

        def extend(self, data: Any) -> None:
            self.zeros += len(data)
            super().extend(data)

    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"")
        held = dirty_file.file._held = Held()
        assert dirty_file.write_now(0, b"1" * 1000) and dirty_file.write_now(900, b"2" * 200)
        assert held.zeros == 0 and d.uploads._disk.memory_left == staging.HELD_ALTOGETHER - 1100
        assert dirty_file.write_now(1110, b"3")
        assert held.zeros == 10 and dirty_file.read_now(0, 2000) == b"1" * 900 + b"2" * 200 + bytes(10) + b"3"
        await d.close(dirty_file)


@in_trio
async def test_one_that_grows_lands_with_all_that_was_written(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"1" * HELD)
        await dirty_file.truncate(HELD // 2)
        await dirty_file.write(HELD - 1, b"2")
        assert await d.files() == []
        await add(dirty_file, b"3")
        assert await d.files() == [dirty_file.id]
        # The last byte is in memory, unless a part that is sent early has taken it to the disk by now.
        assert staging.HELD_ALTOGETHER - d.uploads._disk.memory_left in (0, 1)
        await dirty_file.truncate(10)
        await add(dirty_file, b"4")
        assert await dirty_file.read(0, 100) == b"1" * 10 + b"4"
        await d.close(dirty_file)
        assert d.store.content("k") == b"1" * 10 + b"4"


@in_trio
async def test_all_together_take_no_more_memory_than_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path) as d:
        d.uploads._disk.memory_left = 2500
        dirty_files = [await d.create(str(n), b"1" * 1000) for n in range(4)]
        assert (
            await d.files() == sorted([dirty_files[2].id, dirty_files[3].id])
            and d.uploads._disk.memory_left == 500
        )
        await dirty_files[0].truncate(0)
        await add(dirty_files[1], b"2" * 1500)
        assert len(await d.files()) == 2 and d.uploads._disk.memory_left == 0
        for dirty_file in dirty_files:
            await d.close(dirty_file)
        await d.quiet()
        assert d.uploads._disk.memory_left == 2500 and await d.files() == []
        d.uploads._disk.memory_left = staging.HELD_ALTOGETHER
        assert d.store.content("1") == b"1" * 1000 + b"2" * 1500


@in_trio
async def test_one_that_was_removed_leaves_no_file_however_it_grows(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"1" * 10)
        await d.uploads.discard(dirty_file)
        assert await dirty_file.read(0, 10) == b"1" * 10
        await add(dirty_file, b"2" * HELD)
        assert await dirty_file.read(0, 2 * HELD) == b"1" * 10 + b"2" * HELD
        assert await d.files() == []
        d.uploads.release(dirty_file)
        other = await d.create("l", b"1" * 10)
        await d.uploads.discard(other)
        d.uploads.release(other)
        assert d.uploads._disk.memory_left == staging.HELD_ALTOGETHER and d.store.objects == {}


@in_trio
async def test_what_is_written_while_it_lands_is_there_afterwards(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        dirty_file = await d.create("k", b"1" * 1000)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(d.uploads.commit, dirty_file)
            for at in range(0, 1000, 100):
                nursery.start_soon(dirty_file.write, at, b"2" * 50)
                nursery.start_soon(dirty_file.read, 0, 1000)
        assert await dirty_file.read(0, 2000) == (b"2" * 50 + b"1" * 50) * 10
        assert dirty_file.file.path.read_bytes() == (b"2" * 50 + b"1" * 50) * 10
        d.uploads.release(dirty_file)


@in_trio
async def test_one_whose_upload_failed_survives_a_kill_before_its_writer_hears_of_it(tmp_path: Path) -> None:
    store = ScriptedStore()
    async with desk(tmp_path, store) as d:
        store.fail("put", lambda: OriginFailed("no"))
        dirty_file = await d.create("k", b"1" * 1000)
        with pytest.raises(OriginFailed):
            await d.uploads.commit(dirty_file)
        assert dirty_file.acknowledged and d.uploads.journal.content(dirty_file.id) == b"1" * 1000
    async with desk(tmp_path, store) as d:
        assert [dirty_file.key for dirty_file in d.uploads.pending()] == ["k"]


@in_trio
async def test_a_disk_without_room_for_it_keeps_it_from_the_cache_and_from_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes, **how: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    async with desk(tmp_path) as d:
        with monkeypatch.context() as patch:
            patch.setattr(staging, "_written_file", full)
            dirty_file = await d.create("k", b"1" * 1000)
            with pytest.raises(NoRoom):
                await add(dirty_file, b"2" * HELD)
            assert dirty_file.size == 1000
            await d.close(dirty_file)
            await d.quiet()
        assert d.store.content("k") == b"1" * 1000 and d.cache.adopted == {} and await d.files() == []
        assert d.settled == ["k"]


@in_trio
async def test_a_landing_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"1" * 1000)

        def full(fd: int, data: Any, offset: int) -> int:
            raise OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(NoRoom):
                await dirty_file.file.spill()
        assert await d.files() == [] and dirty_file.read_now(0, 10) == b"1" * 10
        await dirty_file.file.spill()
        assert dirty_file.file.path.read_bytes() == b"1" * 1000
        await d.close(dirty_file)


@in_trio
async def test_small_pieces_at_the_end_of_a_large_file_share_the_turns_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path, writeback=True) as d:
        data = b"1" * (HELD + 1)
        dirty_file = await d.create("k", data)
        turns = Turns(monkeypatch)
        for number in range(100):
            data += bytes([number]) * 10_000
            await add(dirty_file, data[-10_000:])
        assert turns.count == 3, "a million bytes"
        assert dirty_file.read_now(len(data) - 10, 100) == data[-10:]
        assert await dirty_file.read(0, len(data)) == data and turns.count == 4
        await dirty_file.write(len(data) - 1, b"2")
        await dirty_file.truncate(len(data) - 5)
        await dirty_file.truncate(len(data) - 1)
        await add(dirty_file, b"3")
        data = data[:-5] + bytes(4) + b"3"
        await d.close(dirty_file)
        await d.uploads.flush()
        assert d.store.content("k") == data
        await d.quiet()
        assert list(d.cache.adopted.values()) == [data]


@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_the_end_that_finds_no_room_fails_the_close_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writeback: bool
) -> None:
    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    async with desk(tmp_path, writeback=writeback) as d:
        data = b"1" * (HELD + 1)
        dirty_file = await d.create("k", data)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            await add(dirty_file, b"2" * 10)
            with pytest.raises(NoRoom):
                await add(dirty_file, b"3" * HELD)
            with pytest.raises(NoRoom):
                await d.uploads.commit(dirty_file)
            await add(dirty_file, b"4" * 10)
        assert dirty_file.size == len(data) + 20
        await d.close(dirty_file)
        await d.uploads.flush()
        assert d.store.content("k") == data + b"2" * 10 + b"4" * 10


@in_trio
async def test_the_end_of_a_file_without_a_name_is_its_users_until_they_close_it(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"1" * (HELD + 1))
        await add(dirty_file, b"2" * 10)
        await d.uploads.discard(dirty_file)
        await add(dirty_file, b"3" * 10)
        assert bytes(await dirty_file.read(HELD, 100)) == b"1" + b"2" * 10 + b"3" * 10
        await add(dirty_file, b"4" * 10)
        assert d.uploads._disk.memory_left == staging.HELD_ALTOGETHER - 30
        d.uploads.release(dirty_file)
        assert d.uploads._disk.memory_left == staging.HELD_ALTOGETHER and await d.files() == []


@in_trio
async def test_a_file_that_is_empty_on_the_disk_is_kept_from_memory(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k")
        await dirty_file.file.spill()
        assert await d.files() != []
        await add(dirty_file, b"more")
        await d.close(dirty_file)
        await d.quiet()
        assert list(d.cache.adopted.values()) == [b"more"] and await d.files() == []
        assert d.uploads._disk.memory_left == staging.HELD_ALTOGETHER


class Steps(trio.abc.Instrument):
    """Counts how often a test, and the tasks of uploads, go on."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._test = trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._test or task.name.endswith("run_contained"):
            self.counts["test" if task is self._test else "upload"] += 1


@in_trio
async def test_a_commit_of_a_small_file_takes_few_turns_of_the_loop(tmp_path: Path) -> None:
    """What it costs the thread that answers all requests, in a measure that no machine changes: the caller waits for the
    upload once, and that for the store alone, which takes one turn."""
    async with desk(tmp_path) as d:
        dirty_file, steps = await d.create("k", b"1" * 10_000), Steps()
        trio.lowlevel.add_instrument(steps)
        await d.uploads.commit(dirty_file)
        trio.lowlevel.remove_instrument(steps)
        assert steps.counts == {"test": 1, "upload": 2}


@in_trio
async def test_a_file_that_the_kernel_writes_is_made_in_one_turn_of_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        turns = Turns(monkeypatch)
        dirty_file = await d.create("k")
        assert await d.uploads.open_backing(dirty_file) is not None
        assert turns.count == 1, "its name, its mark, its time, and that it is only read here"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(dirty_file.file.fd, b"1")
        dirty_file.file.path.write_bytes(b"1")
        assert dirty_file.look() and dirty_file.size == 1
        d.uploads.returned(dirty_file)
        await d.close(dirty_file)


@in_trio
async def test_a_file_that_is_not_sent_yet_is_removed_in_one_turn_of_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no request: its row goes, and then its name, which says before that it need not be kept."""
    async with desk(tmp_path, writeback=True, upload_delay_s=60) as d:
        d.uploads.journal._room = 0  # of its content: it has a staging file
        dirty_file = await d.save("k", b"1" * 1000)
        said, write = list[bool](), d.uploads.journal._database.write

        def spied(puts: Any) -> None:
            said.append(orphans.never_acknowledged(dirty_file.file.path))
            write(puts)

        monkeypatch.setattr(d.uploads.journal._database, "write", spied)
        turns = Turns(monkeypatch)
        await d.uploads.discard(dirty_file)
        assert said == [True] and d.uploads.journal.rows("drafts") == {}
        assert os.listdir(d.staging) == [] and turns.count == 1 and d.uploads._disk.busy == 0
        assert d.uploads._disk.unlinked == set()
        assert d.store.counts == {}


@pytest.mark.parametrize("fails", ["row", "name"])
@in_trio
async def test_a_file_whose_removal_fails_half_way_goes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=60) as d:
        d.uploads.journal._room = 0  # of its content: it has a staging file
        dirty_file = await d.save("k", b"1" * 1000)

        def refuse(*args: Any) -> None:
            raise CacheUnusable("broken") if fails == "row" else OSError(errno.EIO, "broken")

        with monkeypatch.context() as patch:
            where = (d.uploads.journal._database, "write") if fails == "row" else (staging.os, "unlink")
            patch.setattr(*where, refuse)
            await d.uploads.discard(dirty_file)
            assert len(os.listdir(d.staging)) == 1
        assert await d.files() == []
        await trio.sleep(2)
        assert d.uploads.journal.rows("drafts") == {}

"""What becomes of a dirty file when its writers have gone, readers stay, or the mount goes; and whose turn it is."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.origin import attempts
from cachefs.upload import sending
from cachefs.upload.content import Row
from cachefs.upload.journal import DIRTY_FILES
from tests.fetch.scripted import content
from tests.upload.scripted import PART, desk, in_trio
from tests.upload.test_passthrough import Kernel, in_passthrough, open_backing, taken


@in_trio
async def test_what_a_mapping_wrote_is_uploaded_when_the_last_reader_has_gone(tmp_path: Path) -> None:
    """No commit has asked for it, and no mapping is left when its writer closes it."""
    async with desk(tmp_path) as d:
        kernel, data = Kernel(d), bytearray(content(1, 2 * PART))
        dirty_file, fd = await taken(d, tmp_path, bytes(data))
        kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
        d.uploads.open(dirty_file)  # the reader
        with mmap.mmap(fd, 2 * PART) as mapping:
            mapping[5] = data[5] = 77 ^ data[5]
        os.close(fd)
        d.uploads.returned(dirty_file)
        d.uploads.release(dirty_file)
        await trio.sleep(10)
        assert dirty_file.dirty and not d.settled and kernel.backings
        d.uploads.release(dirty_file)
        await d.quiet()
        assert d.store.content("k") == data and not dirty_file.dirty
        assert d.settled == ["k"] and kernel.backings == []


@in_trio
async def test_when_the_mount_has_gone_writers_are_looked_for(tmp_path: Path) -> None:
    """The kernel will report no closes: what one wrote is sent once no process has the file open."""
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"written")
        await d.uploads.commit(dirty_file)
        assert d.uploads.passthrough._writers == dirty_file.kernel.writers == 1
        d.uploads.unmounted()
        assert d.uploads.passthrough._writers == dirty_file.kernel.writers == 0
        await trio.sleep(10)
        assert not d.store.counts
        os.close(fd)
        assert await d.uploads.aclose(20.0) == [] and d.store.content("k") == b"written"


class Turns:
    """The tickets of requests in the order in which they were made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.all: list[attempts.Ticket] = []
        made = attempts.Ticket

        def noted(background: bool = False) -> attempts.Ticket:
            self.all.append(made(background))
            return self.all[-1]

        patch.setattr(sending, "Ticket", noted)

    @property
    def background(self) -> list[bool]:
        return [turn.background for turn in self.all]


@pytest.mark.parametrize("waits", ["before", "meanwhile", "never"])
@pytest.mark.parametrize("parts", [False, True])
@in_trio
async def test_what_a_caller_waits_for_comes_before_what_none_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: bool, waits: str
) -> None:
    """Of all its requests: those that are made already, and those that follow."""
    monkeypatch.setattr(sending, "PUT_BYTES", 0 if parts else PART)
    monkeypatch.setattr(sending, "AT_ONCE", 1)
    turns = Turns(monkeypatch)
    kind = "part" if parts else "put"
    async with desk(tmp_path, writeback=True) as d:
        dirty_file = await d.create("k", content(1, 3 * PART if parts else 5))
        await d.uploads.commit(dirty_file)
        held = d.store.hold(kind)
        assert held.release is not None
        async with trio.open_nursery() as nursery:
            if waits == "before":
                nursery.start_soon(d.uploads._queue.upload, dirty_file)
            await held.reached.wait()
            assert turns.background == [waits != "before"]
            if waits == "meanwhile":
                nursery.start_soon(d.uploads._queue.upload, dirty_file)
                await d.quiet()
                assert turns.background == [False]
            held.release.set()
        await trio.sleep(1)
        assert d.store.content("k") == content(1, dirty_file.size)
        assert turns.background == [waits == "never"] * (3 if parts else 1)
        assert not dirty_file.sender._tickets
        d.uploads.release(dirty_file)
        await d.quiet()


@pytest.mark.parametrize("direct", [True, False])
@in_trio
async def test_a_file_that_was_removed_is_not_looked_at_when_its_writer_goes(
    tmp_path: Path, direct: bool
) -> None:
    """Though it is still mapped: nothing of it goes to the origin."""
    async with desk(tmp_path, writeback=not direct) as d:
        kernel, data = Kernel(d), content(1, PART)
        if direct:
            dirty_file, fd = await taken(d, tmp_path, data)
            kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
        else:
            dirty_file = await d.create("k", data)
            await d.uploads.commit(dirty_file)
            await trio.sleep(10)
            fd = await open_backing(d, dirty_file)
        assert not dirty_file.dirty
        changed: list[Any] = []
        d.uploads.on_changed = changed.append
        with mmap.mmap(fd, PART):
            os.close(fd)
            await d.uploads.discard(dirty_file)
            generation, way = dirty_file.content.generation, dirty_file.kernel.way
            d.uploads.returned(dirty_file)
            assert (dirty_file.content.generation, dirty_file.kernel.way) == (generation, way)
            assert not changed and not dirty_file.kernel.mapped
        d.uploads.release(dirty_file)
        await d.quiet()
        assert kernel.backings == [] and d.uploads.pending() == [] and not d.uploads._dirty_files


@pytest.mark.parametrize("what", ["durable", "writeback", "removed", "shared"])
@in_trio
async def test_parts_are_sent_early_of_what_a_commit_will_want_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(sending, "PUT_BYTES", PART)
    async with desk(tmp_path, writeback=what == "writeback") as d:
        kernel, fd = Kernel(d), -1
        if what == "shared":
            dirty_file, fd = await taken(d, tmp_path, b"x")
            kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
        else:
            dirty_file = await d.create("k", b"x")
        if what == "removed":
            await d.uploads.discard(dirty_file)
        for number in range(4):
            await dirty_file.write(number * PART, content(number, PART))
            await d.quiet()
        assert d.store.counts["part"] == (3 if what == "durable" else 0)
        assert d.store.counts["begin"] == (1 if what == "durable" else 0)
        await d.uploads.commit(dirty_file)
        if fd >= 0:
            os.close(fd)
            d.uploads.returned(dirty_file)
        d.uploads.release(dirty_file)
        await trio.sleep(10)
        await d.quiet()
        assert ("k" in d.store.objects) is (what != "removed") and not d.store.uploads


@pytest.mark.parametrize("deadline_s", [math.inf, 30.0])
@in_trio
async def test_a_flush_tries_a_file_that_is_being_written_once_or_until_its_deadline(
    tmp_path: Path, deadline_s: float
) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"written")
        await d.uploads.commit(dirty_file)
        begun = trio.current_time()
        with trio.fail_after(100):
            left = await d.uploads.flush(deadline_s=deadline_s)
        assert left == [dirty_file] and not d.store.counts
        assert trio.current_time() - begun == pytest.approx(30.0 if deadline_s == 30.0 else 0.0, abs=0.5)
        os.close(fd)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.flush, None, 30.0)
            await trio.sleep(1)
            d.uploads.returned(dirty_file)
        assert d.store.content("k") == b"written"
        d.uploads.release(dirty_file)
        await d.quiet()


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("how", ["keep", "acknowledge"])
@in_trio
async def test_no_row_is_written_of_a_file_that_was_removed(tmp_path: Path, how: str, removed: bool) -> None:
    async with desk(tmp_path, writeback=True) as d:
        dirty_file = await d.create("k", b"data")
        if removed:
            dirty_file.content.name_goes()
        await getattr(d.uploads._records, how)(dirty_file)
        assert len(d.uploads.journal.rows(DIRTY_FILES)) == (not removed)
        assert (dirty_file.content.row is Row.NONE) is removed
        assert dirty_file.acknowledged is (how == "acknowledge" and not removed)
        dirty_file.content.name_stays()
        await d.close(dirty_file)


@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("state", ["new", "acknowledged", "clean", "changed since"])
@in_trio
async def test_of_a_removed_file_its_users_have_all_and_nobody_else_anything(
    tmp_path: Path, state: str, writeback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk(tmp_path, writeback=writeback) as d:
        dirty_file, uploads = await d.create("k", b"data"), d.uploads
        if state == "acknowledged":
            await uploads._records.acknowledge(dirty_file)
        elif state != "new":
            await uploads.commit(dirty_file)
            await trio.sleep(10)
        if state == "changed since":
            await dirty_file.write(0, b"D")
        await uploads.discard(dirty_file)
        before = dict(d.store.counts)
        assert dirty_file.discarded and not dirty_file.waits and uploads.pending() == []
        await dirty_file.write(4, b" and more")
        held = (b"Data" if state == "changed since" else b"data") + b" and more"
        assert await dirty_file.read(0, 99) == held and not dirty_file.waits and uploads.pending() == []
        await uploads.commit(dirty_file)
        await uploads._queue.upload(dirty_file)
        assert not await uploads.rename(dirty_file, "new") and dirty_file.key == "k"
        assert await uploads.flush(at_the_end=True) == [] and uploads.status()["pending"] == 0
        await trio.sleep(100)
        assert d.store.counts == before and not dirty_file.acknowledged
        assert not uploads.journal.rows(DIRTY_FILES) and list(uploads._dirty_files.values()) == [dirty_file]
        assert await uploads.aclose(5.0) == []
        assert "given up" not in caplog.text and d.store.counts == before
        assert not d.settled and not d.cache.adopted and await d.files() == []


@in_trio
async def test_a_mapping_of_a_removed_file_is_not_waited_for(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        kernel, data = Kernel(d), content(1, PART)
        dirty_file, fd = await taken(d, tmp_path, data)
        kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
        with mmap.mmap(fd, PART) as mapping:
            os.close(fd)
            d.uploads.returned(dirty_file)
            assert dirty_file.kernel.mapped
            await d.uploads.discard(dirty_file)
            before = dict(d.store.counts)
            looked: list[int] = []
            dirty_file.look_for_mappings = lambda: looked.append(1)  # type: ignore[method-assign]
            mapping[0] = 1
            await trio.sleep(10)
            assert not looked and d.store.counts == before and not d.told
        d.uploads.release(dirty_file)
        await d.quiet()
        assert kernel.backings == [] and not d.settled

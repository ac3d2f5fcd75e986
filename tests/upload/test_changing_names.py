"""Renames and removals of files on their way: nothing is left at the store that should not be, and nothing is lost."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path

import pytest
import trio

from cachefs.base.database import Database
from cachefs.base.errors import Conflict, NoRoom, OriginFailed
from cachefs.base.names import ObjectId
from cachefs.upload import DirtyFile, sending
from cachefs.upload.journal import DIRTY_FILES
from cachefs.upload.staging import HELD
from tests.fetch.scripted import content
from tests.upload.scripted import PART, Desk, Room, ScriptedStore, add, desk, in_trio
from tests.upload.test_contents import no_room


@in_trio
async def test_renaming_what_is_not_uploaded_is_free(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("a", b"data")
        await d.rename(dirty_file, "b")
        assert dirty_file.key == "b" and d.store.counts == {}
        await d.close(dirty_file)
        assert d.store.counts == {"put": 1} and d.store.content("b") == b"data" and "a" not in d.store.objects


@in_trio
async def test_renaming_while_parts_are_sent(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        data = content(1, 20 * PART)
        dirty_file = await d.create("a", data)
        await d.quiet()
        assert d.store.counts["part"] == 19
        await d.rename(dirty_file, "b")
        assert d.store.counts["abort"] == 1
        await d.close(dirty_file)
        assert d.store.content("b") == data and d.store.uploads == {} and d.store.objects.keys() == {"b"}


class SlowRoom(Room):
    """A cache that takes files once it is told to."""

    def __init__(self, adopts: bool = True) -> None:
        super().__init__(adopts)
        self.reached, self.goes_on = trio.Event(), trio.Event()

    async def adopt(self, object_id: ObjectId, path: Path) -> bool:
        self.reached.set()
        await self.goes_on.wait()
        return await super().adopt(object_id, path)


@pytest.mark.parametrize("size", [100, HELD + 1000])
@pytest.mark.parametrize("refused", [True, False])
@in_trio
async def test_a_file_that_the_cache_takes_amid_its_removal_can_be_opened_if_that_is_refused(
    tmp_path: Path, refused: bool, size: int
) -> None:
    cache, data = SlowRoom(), content(1, size)
    async with desk(tmp_path, cache=cache) as d:
        dirty_file = await d.save("k", data)
        await cache.reached.wait()
        shown = True
        d.uploads.on_settling = lambda one: one.discarded or not shown

        async def remove() -> None:
            cache.goes_on.set()
            await d.quiet()
            assert dirty_file.content.adopted
            if refused:
                raise OriginFailed("no")

        if refused:
            with pytest.raises(OriginFailed):
                await d.uploads.discard(dirty_file, instead=remove)
            assert d.settled == []  # the name shows it
            d.uploads.open(dirty_file)
            assert bytes(await dirty_file.read(0, size)) == data
            shown = False
            d.uploads.release(dirty_file)
        else:
            await d.uploads.discard(dirty_file, instead=remove)
        await trio.sleep(1)
        assert d.settled == ["k"] * refused and d.uploads._dirty_files == {}
        assert await d.files() == []


@pytest.mark.parametrize("size", [100, HELD + 1000])
@pytest.mark.parametrize("adopts", [True, False])
@in_trio
async def test_a_file_that_the_cache_refuses_at_the_end_of_its_removal_leaves_nothing(
    tmp_path: Path, adopts: bool, size: int
) -> None:
    """Its name is gone, and what its last upload has made is being deleted."""
    cache = SlowRoom(adopts)
    async with desk(tmp_path, cache=cache, writeback=True) as d, trio.open_nursery() as nursery:
        memory = d.uploads._disk.memory_left
        put, delete = d.store.hold("put"), d.store.hold("delete")
        dirty_file = await d.save("k", content(1, size))
        await put.reached.wait()
        nursery.start_soon(d.uploads.discard, dirty_file)
        await trio.sleep(1)
        put.release.set()
        await cache.reached.wait()
        await delete.reached.wait()
        cache.goes_on.set()
        await trio.sleep(1)
        delete.release.set()
        await trio.sleep(1)
        assert await d.files() == [] and d.uploads._dirty_files == {} and d.store.objects == {}
        assert d.uploads._disk.memory_left == memory


@in_trio
async def test_a_file_whose_last_user_closes_it_at_the_end_of_its_removal_is_forgotten(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"data")
        d.store.fail("put", lambda: OriginFailed("no reply"), lost=True)
        with pytest.raises(OriginFailed):
            await d.uploads.commit(dirty_file)
        held = d.store.hold("delete")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.discard, dirty_file)
            await held.reached.wait()  # of what the upload has made
            d.uploads.release(dirty_file)
            assert held.release is not None
            held.release.set()
        await d.quiet()
        assert d.uploads._dirty_files == {} and d.store.objects == {}


@in_trio
async def test_a_removed_file_whose_last_user_closes_it_while_an_upload_looks_at_it_is_forgotten(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"data")
        await d.uploads.discard(dirty_file)
        async with dirty_file.trying.turn:  # as for an upload that was planned before
            d.uploads.release(dirty_file)
        await d.quiet()
        assert d.uploads._dirty_files == {}


@in_trio
async def test_an_upload_of_unknown_outcome_goes_with_the_file_that_has_replaced_it(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1) as d:
        lost = d.store.fail("put", lambda: OriginFailed("no reply"), lost=True)
        old = await d.save("b", b"old")
        await lost.reached.wait()
        await d.quiet()
        assert d.store.content("b") == b"old" and old.dirty
        new = await d.create("a", b"new")
        await d.rename(new, "b", over=old)
        await d.uploads.discard(old, replaced=True)
        await d.rename(new, "c")
        assert "b" not in d.store.objects  # otherwise a listing would show it again
        await d.close(new)
        assert await d.uploads.flush() == []
        assert d.store.objects.keys() == {"c"} and d.store.content("c") == b"new"


@pytest.mark.parametrize("kind", ["part", "begin"])
@in_trio
async def test_renaming_breaks_a_commit_off_that_goes_on_under_the_new_name(
    tmp_path: Path, kind: str
) -> None:
    async with desk(tmp_path) as d:
        data = content(1, 300 * PART)
        dirty_file = await d.create("a")
        await dirty_file.write(PART, data[PART:])  # nothing is sent early
        await dirty_file.write(0, data[:100])
        await dirty_file.write(0, data[:PART])
        held = d.store.hold(kind)
        done = trio.Event()

        async def commit() -> None:
            await d.uploads.commit(dirty_file)
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit)
            await held.reached.wait()
            if kind == "begin":  # that one is waited for: nobody else would know of the upload
                nursery.start_soon(release_later, held)
            await d.rename(dirty_file, "b")
            await done.wait()
        assert d.store.content("b") == data and d.store.objects.keys() == {"b"} and d.store.uploads == {}
        assert [key for key, _ in d.told] == ["b"]


async def release_later(held: object) -> None:
    await trio.sleep(1)
    held.release.set()  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [10, 5 * PART])
@in_trio
async def test_renaming_waits_for_an_outcome_out_of_our_hands(tmp_path: Path, size: int) -> None:
    async with desk(tmp_path) as d:
        data = content(1, size)
        dirty_file = await d.create("a", data)
        held = d.store.hold("put" if size == 10 else "complete")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.commit, dirty_file)
            await held.reached.wait()
            nursery.start_soon(release_later, held)
            await d.rename(dirty_file, "b")
        assert d.store.objects.keys() == {"b"} and d.store.content("b") == data
        assert d.store.counts["copy"] == d.store.counts["delete"] == 1
        assert [key for key, _ in d.told] == ["a", "b"] and not dirty_file.dirty
        await d.close(dirty_file)
        await d.quiet()
        assert d.store.objects.keys() == {"b"} and d.settled == ["b"]


@pytest.mark.parametrize("lost", [False, True])
@in_trio
async def test_renaming_after_an_upload_whose_outcome_nobody_knows(tmp_path: Path, lost: bool) -> None:
    async with desk(tmp_path) as d:
        d.store.fail("put", lambda: OriginFailed("silence"), lost=lost)
        dirty_file = await d.create("a", b"data")
        with pytest.raises(OriginFailed):
            await d.uploads.commit(dirty_file)
        assert ("a" in d.store.objects) == lost
        await d.rename(dirty_file, "b")
        assert "a" not in d.store.objects
        await d.close(dirty_file)
        assert d.store.objects.keys() == {"b"}


@pytest.mark.parametrize("half_changed", [False, True])
@in_trio
async def test_once_it_has_another_name_its_outcome_is_known(tmp_path: Path, half_changed: bool) -> None:
    """So what another client puts there is not taken for ours when the file is removed."""
    async with desk(tmp_path) as d:
        d.store.fail("put", lambda: OriginFailed("silence"), lost=True)
        dirty_file = await d.create("a", b"data")
        with pytest.raises(OriginFailed):
            await d.uploads.commit(dirty_file)
        if half_changed:  # what the store has is copied then, and not sent again
            await add(dirty_file, b" and more")
        await d.rename(dirty_file, "b")
        assert d.store.counts["copy"] == half_changed
        assert d.store.content("b") == b"data"
        d.store.show("b", b"theirs")
        await d.uploads.discard(dirty_file)
        assert d.store.content("b") == b"theirs"


@pytest.mark.parametrize("lost", [False, True])
@in_trio
async def test_removing_after_an_upload_whose_outcome_nobody_knows(tmp_path: Path, lost: bool) -> None:
    async with desk(tmp_path) as d:
        d.store.fail("put", lambda: OriginFailed("silence"), lost=lost)
        dirty_file = await d.create("a", b"data")
        with pytest.raises(OriginFailed):
            await d.uploads.commit(dirty_file)
        assert ("a" in d.store.objects) == lost
        await d.uploads.discard(dirty_file)
        assert d.store.objects == {} and d.store.counts["delete"] == 1


@in_trio
async def test_renaming_what_was_committed_and_changed_since(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("a", b"one")
        await d.uploads.commit(dirty_file)
        await add(dirty_file, b" two")
        d.store.fail("copy", lambda: OriginFailed("no"))
        with pytest.raises(OriginFailed):
            await d.rename(dirty_file, "b")
        assert dirty_file.key == "a" and d.store.objects.keys() == {"a"}
        await d.rename(dirty_file, "b")
        assert d.store.content("b") == b"one" and d.store.objects.keys() == {"b"}, "half a change is not sent"
        await d.close(dirty_file)
        assert d.store.content("b") == b"one two" and d.uploads.journal.rows("drafts") == {}


@pytest.mark.parametrize("conflict", ["overwrite", "fail"])
@pytest.mark.parametrize("lost", [False, True])
@in_trio
async def test_the_old_name_does_not_go_before_the_new_one_is_there(
    tmp_path: Path, lost: bool, conflict: str
) -> None:
    store = ScriptedStore()
    store.show("a", b"v1")
    async with desk(tmp_path, store, on_conflict=conflict) as d:
        dirty_file = await d.create("a", b"v2!", base=store.version("a"), upto=0)
        store.fail("put", lambda: OriginFailed("500"), times=3, lost=lost, key="a")
        with pytest.raises(OriginFailed):
            await d.close(dirty_file)
        at_store = store.content("a")
        store.fail("put", lambda: OriginFailed("500"), key="b")
        with pytest.raises(OriginFailed):
            await d.rename(dirty_file, "b")
        assert (
            dirty_file.key == "a"
            and dirty_file.dirty
            and store.content("a") == at_store
            and "b" not in store.objects
        )
        row = d.uploads.journal.rows("drafts")[dirty_file.id]
        assert row["key"] == "a" and row["acknowledged"]
        await d.rename(dirty_file, "b")
        assert store.objects.keys() == {"b"} and store.content("b") == b"v2!" and not dirty_file.dirty
        await trio.sleep(100)
        assert store.objects.keys() == {"b"} and d.uploads.journal.rows("drafts") == {} and d.settled == ["b"]


@pytest.mark.parametrize("conflict", ["overwrite", "fail"])
@pytest.mark.parametrize("kind", ["put", "complete"])
@in_trio
async def test_a_rename_whose_upload_has_lost_its_reply_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, conflict: str
) -> None:
    """Otherwise the object would stay under the new name, where the rename has failed."""
    if kind == "complete":
        monkeypatch.setattr(sending, "PUT_BYTES", PART)
    store, data = ScriptedStore(), bytes(PART + 1)
    store.show("a", b"v1")
    store.show("b", b"other")
    async with desk(tmp_path, store, on_conflict=conflict, writeback=True, upload_delay_s=10) as d:
        dirty_file = await d.create("a", data, base=store.version("a"), upto=0)
        await d.uploads.commit(dirty_file)
        store.fail(kind, lambda: OriginFailed("silence"), lost=True)
        await d.rename(dirty_file, "b", base=store.version("b").etag)
        assert not store.rules and store.counts[kind] == 1, "the reply was lost"
        assert store.objects.keys() == {"b"} and store.content("b") == data and not dirty_file.dirty
        assert [(key, info.etag) for key, info in d.told] == [("b", store.version("b").etag)]
        d.uploads.release(dirty_file)
        await trio.sleep(100)
        assert store.counts[kind] == 1 and store.uploads == {}
        assert d.uploads.journal.rows("drafts") == {} and d.settled == ["b"]


@pytest.mark.parametrize("there", [False, True])
@in_trio
async def test_a_rename_whose_row_the_disk_refuses_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    store = ScriptedStore()
    store.show("a", b"v1")
    if there:
        store.show("b", b"replaced")
    async with desk(tmp_path, store, writeback=True, upload_delay_s=100) as d:
        dirty_file = await d.create("a", b"v2", base=store.version("a"), upto=0)
        await d.uploads.commit(dirty_file)
        await add(dirty_file, b" and half a change")
        with monkeypatch.context() as patched:
            patched.setattr(Database, "write", no_room)
            with pytest.raises(NoRoom):
                await d.rename(dirty_file, "b", base=store.version("b").etag if there else None)
        assert dirty_file.key == "a" and store.content("a") == b"v1" and not store.counts["copy"]
        assert not there or store.content("b") == b"replaced"
        await d.close(dirty_file)
        assert await d.uploads.flush() == [] and store.content("a") == b"v2 and half a change"


async def rename_and_disk_fail(
    d: Desk, monkeypatch: pytest.MonkeyPatch, dirty_file: DirtyFile, request: str
) -> None:
    """Rename the file to "b". This `request` to the origin fails, and from then on the journal."""
    with monkeypatch.context() as patched:

        def failing() -> OriginFailed:
            patched.setattr(Database, "write", no_room)
            return OriginFailed("refused")

        d.store.fail(request, failing)
        with pytest.raises(OriginFailed, match="refused"):
            await d.rename(dirty_file, "b")
    assert dirty_file.key == "a"


@in_trio
async def test_a_rename_fails_as_its_copy_does_though_the_disk_then_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ScriptedStore()
    store.show("a", b"v1")
    async with desk(tmp_path, store, writeback=True, upload_delay_s=100) as d:
        dirty_file = await d.create("a", b"v2", base=store.version("a"), upto=0)
        await d.uploads.commit(dirty_file)
        await add(dirty_file, b" and half a change")
        await rename_and_disk_fail(d, monkeypatch, dirty_file, "copy")
        await trio.sleep(2)
        assert d.uploads.journal.rows(DIRTY_FILES)[dirty_file.id]["key"] == "a"
        await d.close(dirty_file)
        assert await d.uploads.flush() == []
        assert store.content("a") == b"v2 and half a change" and "b" not in store.objects


@in_trio
async def test_a_rename_whose_upload_fails_is_undone_though_the_disk_then_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name shows the file, so the file has the key of that name."""
    store = ScriptedStore()
    store.show("a", b"v1")
    async with desk(tmp_path, store, writeback=True, upload_delay_s=100) as d:
        dirty_file = await d.create("a", b"v2", base=store.version("a"), upto=0)
        await d.uploads.commit(dirty_file)
        await rename_and_disk_fail(d, monkeypatch, dirty_file, "put")
        await trio.sleep(100)
        assert store.content("a") == b"v2" and "b" not in store.objects
        await d.close(dirty_file)
        assert d.uploads.journal.rows(DIRTY_FILES) == {}


@pytest.mark.parametrize("lost", [False, True])
@in_trio
async def test_a_copy_that_a_failed_rename_has_left_goes_with_the_file_it_was_to_replace(
    tmp_path: Path, lost: bool
) -> None:
    store = ScriptedStore()
    store.show("a", b"v1")
    store.fail("copy", lambda: OriginFailed("no reply"), lost=lost)
    async with desk(tmp_path, store, writeback=True, upload_delay_s=100, on_conflict="fail") as d:
        dirty_file = await d.create("a", b"v2", base=store.version("a"), upto=0)
        await d.uploads.commit(dirty_file)
        await add(dirty_file, b" and half a change")
        over = await d.save("b", b"to be replaced")
        with pytest.raises(OriginFailed):
            await d.rename(dirty_file, "b", over=over)
        assert dirty_file.key == "a" and ("b" in store.objects) is lost
        if lost:  # another name for it, and another upload that meets the copy
            assert await d.uploads.rename(over, "c")
            await store.delete("b")
        await d.close(dirty_file)
        assert await d.uploads.flush() == []
        assert store.content("a") == b"v2 and half a change"
        assert store.content("c" if lost else "b") == b"to be replaced"


@pytest.mark.parametrize("there", ["the copy", "its own", "nothing", "no answer"])
@in_trio
async def test_a_clean_file_that_a_failed_rename_may_have_replaced_is_sent_once_more(
    tmp_path: Path, there: str
) -> None:
    """Not if the origin has its object, or none because another client has removed that."""
    async with desk(tmp_path) as d:
        over = await d.create("b", b"to be replaced")
        await d.uploads.commit(over)

        async def fails() -> None:
            await d.uploads.copy_comes(over, len(b"copied"))
            if there == "the copy":
                d.store.show("b", b"copied")
            elif there == "nothing":
                del d.store.objects["b"]
            elif there == "no answer":
                d.store.fail("head", lambda: OriginFailed("silence"), key="b")
            raise OriginFailed("no reply")

        with pytest.raises(OriginFailed, match="no reply"):
            await d.uploads.discard(over, replaced=True, instead=fails)
        assert over.dirty is (there in ("the copy", "no answer"))
        await d.close(over)
        assert await d.uploads.flush() == []
        assert ("b" in d.store.objects) is (there != "nothing")
        assert there == "nothing" or d.store.content("b") == b"to be replaced"


@in_trio
async def test_an_upload_that_meets_the_copy_of_a_failed_rename_replaces_it(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=100, on_conflict="fail") as d:
        over = await d.save("b", b"to be replaced")
        await d.uploads.copy_comes(over, len(b"copied"))
        d.store.show("b", b"copied")
        assert await d.uploads.flush() == [] and d.store.content("b") == b"to be replaced"
        over = await d.save("c", b"to be replaced")
        await d.uploads.copy_comes(over, len(b"copied"))
        d.store.show("c", b"another client's")
        assert await d.uploads.flush() == [over] and d.store.content("c") == b"another client's"


@in_trio
async def test_a_rename_whose_upload_may_have_failed_is_undone_where_the_origin_does_not_answer(
    tmp_path: Path,
) -> None:
    store = ScriptedStore()
    store.show("a", b"v1")
    async with desk(tmp_path, store, writeback=True, upload_delay_s=10) as d:
        dirty_file = await d.create("a", b"v2!", base=store.version("a"), upto=0)
        await d.close(dirty_file)
        store.fail("put", lambda: OriginFailed("silence"), lost=True)
        store.fail("head", lambda: OriginFailed("silence"), key="b")
        with pytest.raises(OriginFailed):
            await d.rename(dirty_file, "b")
        assert dirty_file.key == "a" and dirty_file.dirty and store.content("a") == b"v1"
        await d.rename(dirty_file, "b")
        assert store.objects.keys() == {"b"} and store.content("b") == b"v2!"


@in_trio
async def test_with_writeback_neither(tmp_path: Path) -> None:
    store = ScriptedStore()
    store.show("a", b"v1")
    async with desk(tmp_path, store, writeback=True, upload_delay_s=10) as d:
        dirty_file = await d.create("a", b"v2!", base=store.version("a"), upto=0)
        await d.close(dirty_file)
        held = store.hold("put")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.rename, dirty_file, "b")
            await held.reached.wait()
            assert store.content("a") == b"v1"
            assert held.release is not None
            held.release.set()
        assert store.objects.keys() == {"b"} and store.counts["delete"] == 1 and store.counts["copy"] == 0


@in_trio
async def test_half_a_change_takes_along_what_it_was_of(tmp_path: Path) -> None:
    store = ScriptedStore()
    store.show("a", b"v1")
    async with desk(tmp_path, store) as d:
        dirty_file = await d.create("a", b"v2!", base=store.version("a"), upto=0)
        await d.rename(dirty_file, "b")
        assert store.objects.keys() == {"b"} and store.content("b") == b"v1"
        await d.close(dirty_file)
        assert store.content("b") == b"v2!" and store.counts["put"] == 1


@pytest.mark.parametrize("conflict", ["overwrite", "fail"])
@in_trio
async def test_what_somebody_else_has_put_there_stays(tmp_path: Path, conflict: str) -> None:
    store = ScriptedStore()
    store.show("a", b"v1")
    async with desk(tmp_path, store, on_conflict=conflict) as d:
        dirty_file = await d.create("a", b"mine", base=store.version("a"), upto=0)
        store.fail("put", lambda: OriginFailed("500"))
        with pytest.raises(OriginFailed):
            await d.uploads.commit(dirty_file)
        store.show("a", b"theirs")
        if conflict == "fail":
            with pytest.raises(Conflict):
                await d.uploads.commit(dirty_file)
        d.uploads.release(dirty_file)
        await d.rename(dirty_file, "b")
        assert store.content("a") == b"theirs"
        await trio.sleep(0.1)
        await d.quiet()
        assert store.content("b") == b"mine" and store.content("a") == b"theirs", "and at once"


@in_trio
async def test_removing_what_is_in_conflict_leaves_theirs(tmp_path: Path) -> None:
    store = ScriptedStore()
    async with desk(tmp_path, store, on_conflict="fail") as d:
        dirty_file = await d.create("a", b"mine")
        store.fail("put", lambda: OriginFailed("500"))
        with pytest.raises(OriginFailed):
            await d.uploads.commit(dirty_file)
        store.show("a", b"theirs")
        with pytest.raises(Conflict):
            await d.close(dirty_file)
        await d.uploads.discard(dirty_file)
        assert store.content("a") == b"theirs" and await d.files() == [] and d.uploads.pending() == []


@pytest.mark.parametrize("closed", [False, True])
@in_trio
async def test_what_the_store_has_is_not_sent_again_when_it_is_renamed(tmp_path: Path, closed: bool) -> None:
    class Slow(Room):
        async def adopt(self, object_id: ObjectId, path: Path) -> bool:
            await trio.sleep(5)
            return await super().adopt(object_id, path)

    async with desk(tmp_path, cache=Slow()) as d:
        dirty_file = await d.create("a", content(1, 5 * PART))
        await d.uploads.commit(dirty_file)
        if closed:
            d.uploads.release(dirty_file)
            await trio.sleep(1)
        await d.rename(dirty_file, "b")
        await d.quiet()
        assert d.store.counts["begin"] == d.store.counts["complete"] == 1 and d.store.uploads == {}
        assert d.store.counts["part"] == 5
        if not closed:
            await d.close(dirty_file)
        await trio.sleep(10)
        assert d.store.uploads == {} and d.store.objects.keys() == {"b"} and d.settled == ["b"]


@in_trio
async def test_a_removed_file_is_not_uploaded_and_its_users_keep_it(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"data")
        await d.uploads.discard(dirty_file)
        assert await d.files() == [] and d.uploads.pending() == []
        await add(dirty_file, b" more")
        assert bytes(await dirty_file.read(0, 100)) == b"data more"
        await d.close(dirty_file)
        await trio.sleep(100)
        assert d.store.counts == {} and d.settled == []


@in_trio
async def test_removing_while_parts_are_sent(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        held = d.store.hold("part", times=3)
        dirty_file = await d.create("k", content(1, 5 * PART))
        await held.reached.wait()
        await d.uploads.discard(dirty_file)
        assert d.store.counts["abort"] == 1 and d.store.uploads == {} and d.store.in_flight == 0
        await d.close(dirty_file)
        await trio.sleep(100)
        assert d.store.counts["begin"] == 1 and d.store.objects == {}
        assert d.uploads.journal.rows("drafts") == {}


@in_trio
async def test_what_was_replaced_is_not_kept_in_memory(tmp_path: Path) -> None:
    made: list[weakref.ref[DirtyFile]] = []

    async def replace(d: Desk, old: DirtyFile) -> DirtyFile:
        new = await d.save("tmp", b"data")
        made.append(weakref.ref(new))

        async def rename() -> None:
            await d.rename(new, "k", over=old)

        await d.uploads.discard(old, replaced=True, instead=rename)
        return new

    async with desk(tmp_path, writeback=True, upload_delay_s=1) as d:
        dirty_file = await d.save("k", b"data")
        for _ in range(20):
            dirty_file = await replace(d, dirty_file)
            await trio.sleep(0.5)
        gc.collect()
        assert d.store.counts == {} and sum(one() is not None for one in made) < 10


@pytest.mark.parametrize("replaced", [False, True])
@in_trio
async def test_removing_what_is_just_becoming_an_object(tmp_path: Path, replaced: bool) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", b"data")
        held = d.store.hold("put")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(d.uploads.commit, dirty_file)
            await held.reached.wait()
            nursery.start_soon(release_later, held)
            await d.uploads.discard(dirty_file, replaced=replaced)
        assert ("k" in d.store.objects) == replaced
        assert d.store.counts["delete"] == (not replaced)


@in_trio
async def test_an_upload_that_cannot_be_aborted_now_is_aborted_later(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        dirty_file = await d.create("k", content(1, 5 * PART))
        await d.quiet()
        d.store.fail("abort", lambda: OriginFailed("no"), times=2)
        await d.uploads.discard(dirty_file)
        assert len(d.store.uploads) == 1 and len(d.uploads.journal.rows("orphans")) == 1
        await trio.sleep(200)
        await d.quiet()
        assert d.store.uploads == {} and d.uploads.journal.rows("orphans") == {}


@in_trio
async def test_an_upload_that_cannot_be_noted_nor_aborted_is_aborted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path) as d:
        aborted = d.store.fail("abort", lambda: OriginFailed("500"))
        with monkeypatch.context() as patched:
            patched.setattr(Database, "write", no_room)
            dirty_file = await d.create("k", content(1, 2 * PART))
            await aborted.reached.wait()
            await d.quiet()
        assert len(d.store.uploads) == 1
        await trio.sleep(100)
        assert d.store.uploads == {}
        await d.close(dirty_file)
        assert d.store.content("k") == content(1, 2 * PART)


@in_trio
async def test_a_file_removed_while_the_cache_takes_it(tmp_path: Path) -> None:
    class Slow(Room):
        async def adopt(self, object_id: ObjectId, path: Path) -> bool:
            await trio.sleep(5)
            return await super().adopt(object_id, path)

    for adopts in (True, False):
        async with desk(tmp_path / str(adopts), cache=Slow(adopts)) as d:
            dirty_file = await d.save("k", b"data")
            await trio.sleep(1)
            await d.uploads.discard(dirty_file, replaced=True)
            await trio.sleep(10)
            assert await d.files() == [] and d.settled == []


@pytest.mark.parametrize("how", ["whole", "being changed", "in parts", "not sent"])
@in_trio
async def test_renaming_after_an_upload_that_the_daemon_did_not_live_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The origin has the file under its old name, and no row says so."""
    if how == "in parts":
        monkeypatch.setattr(sending, "PUT_BYTES", 0)
    store = ScriptedStore()
    async with desk(tmp_path / "a", store, writeback=True, upload_delay_s=1) as d:
        kind = "complete" if how == "in parts" else "put"
        store.fail(kind, lambda: OriginFailed("killed"), times=99, lost=how != "not sent")
        await d.save("a", b"data")
        await trio.sleep(1.1)
        assert ("a" in store.objects) is (how != "not sent")
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    store.rules.clear()
    async with desk(tmp_path / "b", store, writeback=True, upload_delay_s=1000) as d:
        (dirty_file,) = d.uploads.pending()
        if how == "being changed":
            d.uploads.open(dirty_file)
            await add(dirty_file, b"more")
        await d.rename(dirty_file, "b")
        if how == "being changed":
            await d.close(dirty_file)
        assert await d.uploads.flush() == []
        await d.quiet()
    assert {key: store.content(key) for key in store.objects} == {
        "b": b"datamore" if how == "being changed" else b"data"
    }

"""A kill at each step: after every transaction of the journal and every request, what the next run makes of it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from cachefs.upload import orphans, sending
from tests.fetch.scripted import content
from tests.upload.scripted import PART, Desk, ScriptedStore, add, desk, in_trio

OLDER, OLD, NEW = b"an older one", content(1, 5 * PART), content(2, 3 * PART)


class Steps:
    """Copies of all that a kill leaves: the journal, the staging files, and what the store has."""

    def __init__(self, path: Path, store: RecordingStore) -> None:
        self.path, self.store = path, store
        self.count = 0
        self.stores: list[ScriptedStore] = []
        store.steps = self

    def take(self) -> None:
        self.count += 1
        place = self.path / f"step{self.count}"
        for name in ("state", "staging"):
            shutil.copytree(
                self.path / "now" / name, place / name, ignore=shutil.ignore_patterns("*.adopted")
            )
        self.stores.append(self.store.snapshot())

    async def after_each(self) -> AsyncIterator[dict[str, bytes]]:
        """What the store has at last, for each step by itself."""
        for number, store in enumerate(self.stores, 1):
            async with desk(self.path / f"step{number}", store, writeback=True) as d:
                assert await d.uploads.flush() == []
                await d.quiet()
                assert await d.files() == [] and d.uploads.journal.rows("drafts") == {}
            assert orphans.places(self.path / f"step{number}") == [], "nothing is doubtful after a kill"
            yield {key: data for key, (_, data) in store.objects.items()}


class RecordingStore(ScriptedStore):
    steps: Steps | None = None

    def snapshot(self) -> ScriptedStore:
        other = ScriptedStore()
        other.objects, other.tokens = dict(self.objects), dict(self.tokens)
        other.uploads = {name: (key, dict(parts)) for name, (key, parts) in self.uploads.items()}
        return other

    @asynccontextmanager
    async def request(self, kind: str, key: str) -> AsyncIterator[None]:
        async with super().request(kind, key):
            yield
        if self.steps is not None:
            self.steps.take()


@asynccontextmanager
async def recorded(path: Path, store: RecordingStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    async with desk(path / "now", store, writeback=True, upload_delay_s=1) as d:
        write = d.uploads.journal._database.write

        def record(*changes: object) -> None:
            write(*changes)  # type: ignore[arg-type]
            if store.steps is not None:
                store.steps.take()

        monkeypatch.setattr(d.uploads.journal._database, "write", record)
        yield d


@pytest.mark.long
@pytest.mark.parametrize("sent", [False, True], ids=["here", "sent"])
@in_trio
async def test_a_file_that_is_overwritten_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    """What is in the store stays as it is there until all of the new one is; what is only here is changed in place."""
    store = RecordingStore()
    async with recorded(tmp_path, store, monkeypatch) as d:
        dirty_file = await d.create("k", OLD)
        await d.close(dirty_file)
        if sent:
            assert await d.uploads.flush() == []
            await d.quiet()
            dirty_file = await d.create("k", base=store.version("k"), upto=0)
        else:
            d.uploads.open(dirty_file)
        steps = Steps(tmp_path, store)
        if not sent:
            await dirty_file.truncate(0)
            steps.take()
        await dirty_file.write(0, NEW[:PART])
        steps.take()
        await add(dirty_file, NEW[PART:])
        steps.take()
        await d.close(dirty_file)
        closed = steps.count
        await trio.sleep(10)
        await d.quiet()
    found = [objects async for objects in steps.after_each()]
    assert all(objects.keys() == {"k"} for objects in found)
    before = [OLD] if sent else [b"", NEW[:PART], NEW]
    assert all(objects["k"] in (*before, NEW) for objects in found[:closed])
    assert all(objects["k"] == NEW for objects in found[closed:]) and found[closed:]


@pytest.mark.long
@pytest.mark.parametrize(
    "how", ["new", "had-an-older-version", pytest.param("is-being-changed", marks=pytest.mark.long)]
)
@in_trio
async def test_what_was_replaced_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Both files were acknowledged. While the upload of the replaced one takes long to abort, the other one is not lost."""
    monkeypatch.setattr(sending, "PUT_BYTES", 4 * PART)
    store = RecordingStore()
    async with recorded(tmp_path, store, monkeypatch) as d:
        if how != "new":
            await d.save("tmp", OLDER)
            assert await d.uploads.flush() == []
        store.latency_s = 0.1
        replaced = await d.save("k", OLD)
        begun = store.hold("part", times=100)
        await begun.reached.wait()
        store.rules.clear()
        dirty_file = await d.save("tmp", NEW, base=None if how == "new" else store.version("tmp"), upto=0)
        if how == "is-being-changed":
            d.uploads.open(dirty_file)
            await add(dirty_file, b"!")
        steps = Steps(tmp_path, store)
        abort = store.hold("abort")

        async def rename() -> None:
            await d.rename(dirty_file, "k", over=replaced)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: d.uploads.discard(replaced, replaced=True, instead=rename))
            await abort.reached.wait()
            await trio.sleep(10)
            steps.take()
            assert abort.release is not None
            abort.release.set()
        renamed = steps.count
        if how == "is-being-changed":
            await d.close(dirty_file)
        await trio.sleep(10)
        await d.quiet()
        steps.take()
    new = NEW + b"!" * (how == "is-being-changed")
    moved = [{"k": new}, {"k": new, "tmp": OLDER}]
    found = [objects async for objects in steps.after_each()]
    assert all(objects in ({"k": OLD, "tmp": new}, *moved) for objects in found[:renamed])
    assert all(objects == {"k": new} for objects in found[renamed:]) and found[renamed:]

"""Files that are written, renamed, removed and committed at random, on a store that fails at random, and kills: what is
at the store is always what somebody had written at some moment, and what was promised is found."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import trio

from cachefs.base.errors import CachefsError, OriginFailed
from cachefs.upload import DirtyFile, sending
from tests.conftest import LEVEL
from tests.upload.scripted import PART, Desk, Room, ScriptedStore, add, desk, in_trio

NAMES = ["a", "b", "c", "d"]


class File:
    """What a dirty file should hold, and all that it ever held."""

    def __init__(self, dirty_file: DirtyFile) -> None:
        self.dirty_file = dirty_file
        self.data = bytearray()
        self.history = {b""}
        self.promised = False  # a commit has returned, and nothing was changed since

    def changed(self) -> None:
        self.promised = False
        self.history.add(bytes(self.data))


class World:
    """Some files, each with one user, and several tasks that do things to them."""

    def __init__(self, seed: int, writeback: bool) -> None:
        self.rng = random.Random(seed)
        self.writeback = writeback
        self.store = ScriptedStore()
        self.live: dict[str, File] = {}
        self.ever: dict[str, set[bytes]] = {name: set() for name in NAMES}
        self.done = 0

    def note(self, name: str, file: File) -> None:
        self.ever[name] |= file.history

    async def step(self, d: Desk, name: str) -> None:
        rng, file = self.rng, self.live.get(name)
        self.done += 1
        if file is None:
            dirty_file = await d.uploads.begin(self.store, name)  # type: ignore[arg-type]
            d.uploads.open(dirty_file)
            self.live[name] = file = File(dirty_file)
        what = rng.choice(
            ["write", "write", "append", "append", "cut", "commit", "close", "sleep", "rename", "rm"]
        )
        if not file.dirty_file.handles:
            if d.uploads._dirty_files.get(file.dirty_file.id) is not file.dirty_file:
                del self.live[name]  # the cache has it
                return
            d.uploads.open(file.dirty_file)
        dirty_file, data = file.dirty_file, file.data
        size = rng.choice([1, 100, PART // 3, PART, 3 * PART])
        piece = bytes([rng.randrange(1, 255)]) * size
        match what:
            case "write":
                offset = rng.randrange(len(data) + 1)
                data.extend(bytes(max(0, offset + size - len(data))))
                data[offset : offset + size] = piece
                file.changed()
                self.note(name, file)
                await dirty_file.write(offset, piece)
            case "append":
                data.extend(piece)
                file.changed()
                self.note(name, file)
                await add(dirty_file, piece)
            case "cut":
                length = rng.randrange(len(data) + PART)
                del data[length:]
                data.extend(bytes(length - len(data)))
                file.changed()
                self.note(name, file)
                await dirty_file.truncate(length)
            case "commit" | "close":
                self.note(name, file)
                try:
                    await d.uploads.commit(dirty_file)
                    if not dirty_file.discarded:
                        file.promised = True
                        if not self.writeback:
                            # Two names while it is renamed: until a copy is made, the object has the old one.
                            names = [name for name, one in self.live.items() if one is file]
                            stored = [
                                self.store.content(name) for name in names if name in self.store.objects
                            ]
                            assert data in stored
                except OriginFailed:
                    pass
                if what == "close":
                    d.uploads.release(dirty_file)
            case "sleep":
                await trio.sleep(rng.choice([0.1, 1, 10]))
            case "rm":
                await self.remove(d, name)
            case "rename":
                free = [other for other in NAMES if other not in self.live]
                if free:
                    to = rng.choice(free)
                    self.live[to] = file  # nobody else takes it meanwhile
                    self.note(to, file)
                    try:
                        await d.rename(dirty_file, to)
                        del self.live[name]
                    except CachefsError:
                        if dirty_file.key == to:  # only removing what the store had under the old name failed
                            self.store.objects.pop(name, None)
                            del self.live[name]
                        else:
                            del self.live[to]
        if dirty_file.handles:
            assert bytes(await dirty_file.read(0, len(data) + 1)) == data

    async def remove(self, d: Desk, name: str) -> None:
        file = self.live[name]
        there = name in self.store.objects
        try:
            await d.uploads.discard(file.dirty_file)
            if there:
                await self.store.delete(name)
        except OriginFailed:
            if not file.dirty_file.discarded and (file.dirty_file.dirty or name in self.store.objects):
                return  # the removal has failed
            self.store.objects.pop(name, None)
        while file.dirty_file.handles:
            d.uploads.release(file.dirty_file)
        del self.live[name]

    async def run(self, d: Desk, steps: int) -> None:
        rng = self.rng

        async def life(name: str) -> None:
            while self.done < steps:
                file = self.live.get(name)
                if file is not None and file.dirty_file.key != name:
                    await trio.sleep(0.5)  # it is just being renamed to here
                    continue
                await self.step(d, name)
                await trio.sleep(rng.choice([0, 0, 0.01, 0.3]))

        async def trouble() -> None:
            while self.done < steps:
                await trio.sleep(rng.choice([0.1, 1, 3]))
                kind = rng.choice(["put", "part", "complete", "begin", "abort", "delete", "copy"])
                self.store.latency_s = rng.choice([0, 0.05, 1])
                # An upload whose begin nobody heard of can be cleared away by nobody.
                lost = kind != "begin" and rng.random() < 0.4
                self.store.fail(kind, lambda: OriginFailed("trouble"), times=rng.choice([1, 3]), lost=lost)

        async with trio.open_nursery() as nursery:
            for name in NAMES[:3]:
                nursery.start_soon(life, name)
            nursery.start_soon(trouble)
        self.store.rules.clear()
        self.store.latency_s = 0

    def check_seen(self) -> None:
        """No mixture and no part of anything was ever shown."""
        for name, contents in self.store.seen.items():
            strange = [content for content in contents if content not in self.ever[name]]
            assert not strange, f"{name} showed {len(strange[0])} bytes that it never held"


@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", "2" if LEVEL == "short" else "4"))))
@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_whatever_happens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seed: int,
    writeback: bool,
) -> None:
    monkeypatch.setattr(sending, "PUT_BYTES", 2 * PART)
    world = World(seed, writeback)
    kept: dict[str, bytes] = {}
    async with desk(tmp_path, world.store, Room(adopts=bool(seed % 2)), writeback=writeback) as d:
        await world.run(d, 120)
        if seed % 3:
            await d.uploads.flush()
        for name, file in world.live.items():
            if file.dirty_file.acknowledged and file.dirty_file.dirty:
                kept[name] = bytes(file.data)
            elif not file.dirty_file.dirty:
                assert world.store.content(name) == file.data
        world.check_seen()
        promised = {name: bytes(f.data) for name, f in world.live.items() if f.promised}
    async with desk(tmp_path, world.store, writeback=writeback) as d:
        assert {dirty_file.key for dirty_file in d.uploads.pending()} == kept.keys()
        assert await d.uploads.flush() == []
        for name, data in {**promised, **kept}.items():
            assert world.store.content(name) == data
        await trio.sleep(200)
        await d.quiet()
        assert world.store.uploads == {} and await d.files() == []
        assert d.uploads.journal.rows("drafts") == d.uploads.journal.rows("orphans") == {}
    world.check_seen()
    assert "unexpected" not in caplog.text

"""Renames and removals whose program is killed at each of their awaits, or amid it: what the mount shows then is before or
after, or a file under both names, and the origin gets just that."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.names import ObjectId
from tests.fs.test_writing_model import File, NoCache, World
from tests.interrupting import interrupted

Prepare = Callable[[World], Awaitable[None]]

OLDER, WRITTEN, THERE = b"older", b"what was written", b"what is there"
STATES = ("stored", "here", "changed", "half", "clean")
HOW = ("at", "amid", "amid, durable", "unanswered", "unanswered, durable")
"""`at` a step of the program's task, `amid` a request, or also behind a copy whose reply is not here yet."""


class Waiting(NoCache):
    async def recast(self, old: ObjectId, new: ObjectId) -> bool:
        await trio.lowlevel.checkpoint()
        return False


async def file_in(world: World, name: str, state: str, written: bytes = WRITTEN) -> bytes:
    """A file in that state, and what it holds. A rename moves the object of one that is stored, sends nothing of one that is
    here, uploads one that is changed, and copies the older version of one that is half changed."""
    mount = world.mount
    if state != "here":
        await mount.write(name, written if state == "stored" else OLDER)
        assert await world.uploads.flush() == []
        await trio.sleep(1)
    if state in ("here", "changed"):
        await mount.write(name, written)
    elif state in ("half", "clean"):
        fh = await mount.open(name, os.O_RDWR)
        await mount.pwrite(fh, 0, written)
        world.open.append((fh, File(written)))
        if state == "clean":
            await mount.fs.fsync(fh)
            assert await world.uploads.flush() == []
    return written


async def shown(world: World) -> dict[str, bytes]:
    names = await world.mount.walk()
    return {
        os.fsdecode(n): await world.mount.read(os.fsdecode(n))
        for n, size in names.items()
        if size is not None
    }


async def check(path: Path, nursery: trio.Nursery, prepare: Prepare, step: int, how: str, *what: str) -> bool:
    """Whether the change has as many steps."""
    world = World(path, nursery, writeback="durable" not in how)
    world.bucket.objects.clear()
    world.store = Waiting()
    if "unanswered" in how:
        copy = world.bucket.copy

        async def answer_later(*what: Any, **how: Any) -> Any:
            info = await copy(*what, **how)
            await trio.sleep(world.bucket.delay)
            return info

        world.bucket.copy = answer_later  # type: ignore[method-assign]
    await world.start()
    mount = world.mount
    await prepare(world)
    before = await shown(world)
    opened = {mount.fs.handles[fh].object.key for fh, _ in world.open}
    change = {"rename": mount.rename, "unlink": mount.unlink}[what[0]]
    if how == "at":
        goes_on = await interrupted(step, partial(change, *what[1:]))
    else:
        with trio.move_on_after((step - 0.5) * world.bucket.delay) as killed:
            await change(*what[1:])
        goes_on = killed.cancelled_caught
    found = await shown(world)
    if what[0] == "unlink":
        assert found in (before, {}), found
    else:
        after = {name: data for name, data in before.items() if not name.startswith(what[1])}
        moved = {what[2] + name[len(what[1]) :]: d for name, d in before.items() if name.startswith(what[1])}
        after |= moved
        for name in before.keys() | after.keys():
            assert found.get(name) in (before.get(name), after.get(name), OLDER), (step, found)
        whole = [before, after]
        # This node has its bytes in the cache at most.
        if "unanswered" in how and what[2] in before.keys() - opened:
            whole.append(before | {what[2]: OLDER})
        assert any(all(found.get(n) == d for n, d in one.items()) for one in whole), (step, found)
        assert goes_on or found == after
    for fh, _ in world.open:
        await mount.close_file(fh)
    world.open.clear()
    assert await world.uploads.flush() == []
    await trio.sleep(5)
    last = await shown(world)
    objects = {key: world.bucket.content(key) for key in world.bucket.objects if not key.endswith("/")}
    assert last == objects, (step, found, last, objects)
    await mount.fs.refresh()
    assert await shown(world) == objects
    assert all(last[name] == data for name, data in found.items() if data != OLDER), (step, found, last)
    assert not world.uploads.notes() and not world.uploads.pending()
    await world.stop()
    return goes_on


def at_each_step(path: Path, prepare: Prepare, *what: str) -> None:
    async def main() -> None:
        step, goes_on = 0, True
        async with trio.open_nursery() as nursery:
            while goes_on:
                step += 1
                (path / f"{step}").mkdir()
                goes_on = await check(path / f"{step}", nursery, prepare, step, *what)
            nursery.cancel_scope.cancel()
        assert step >= 2 or what[0] in ("amid", "unanswered")  # without a request, nothing takes time

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.002))


@pytest.mark.parametrize("over", ["", "stored", "here", "clean", "read"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("state", STATES)
def test_a_rename(tmp_path: Path, state: str, over: str, how: str, no_threads: None) -> None:
    async def prepare(world: World) -> None:
        await file_in(world, "a", state)
        if over == "clean":
            await file_in(world, "b", over, THERE)
        elif over:
            await world.mount.write("b", THERE)
        if over == "read":  # a clean file that a program reads
            fh = await world.mount.open("b")
            world.open.append((fh, File(THERE)))
            assert await world.uploads.flush(lambda one: one.key == "b") == []
        if over == "stored":
            fh = await world.mount.open("b")
            assert (await world.uploads.flush(lambda one: one.key == "b")) == []
            await trio.sleep(0.2)
            world.mount.fs.release(fh)

    at_each_step(tmp_path, prepare, how, "rename", "a", "b")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("state", STATES)
def test_a_rename_of_a_directory(tmp_path: Path, state: str, how: str, no_threads: None) -> None:
    async def prepare(world: World) -> None:
        await world.mount.mkdir("d")
        await file_in(world, "d/a", state)

    at_each_step(tmp_path, prepare, how, "rename", "d", "e")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("state", STATES)
def test_a_removal(tmp_path: Path, state: str, how: str, no_threads: None) -> None:
    async def prepare(world: World) -> None:
        await file_in(world, "a", state)

    at_each_step(tmp_path, prepare, how, "unlink", "a")

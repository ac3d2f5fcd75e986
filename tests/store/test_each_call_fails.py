"""Each system call of the store fails once: readers have their bytes, and what was used or reserved is given back."""

from __future__ import annotations

import errno
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from cachefs.base.names import ObjectId
from cachefs.store.eviction import ANY
from cachefs.store.ram import remove_ram
from cachefs.store.tier import SSD
from tests.conftest import LEVEL
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store.lab import BLOCK, EXTENT, MIB, Lab, running
from tests.store.test_adopting import dirty_file

SIZES = {"a": 3 * BLOCK + 7, "b": EXTENT + 5, "c": 100, "written": 2 * BLOCK + 1, "small": 50}

CALLS = (
    "open",
    "pread",
    "preadv",
    "pwrite",
    "sendfile",
    "ftruncate",
    "fstat",
    "lstat",
    "stat",
    "statvfs",
    "rename",
    "link",
    "unlink",
    "chmod",
    "fchmod",
    "mkdir",
    "lseek",
)


class Failing:
    """The call `name` fails when the store makes it for the `number`th time."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, number: int, error: int) -> None:
        self.calls = 0
        self._number, self._error, self._real = number, error, getattr(os, name)
        patch.setattr(os, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("cachefs.store"):
            self.calls += 1
            if self.calls == self._number:
                raise OSError(self._error, os.strerror(self._error))
        return self._real(*args, **options)


async def everything(lab: Lab) -> list[ObjectId]:
    """All that a store does with files, in an order of its own. What cannot be done is left."""
    store, ids = lab.store, {name: lab.origin.put(name, content(name, size)) for name, size in SIZES.items()}
    for name in "abc":
        assert await lab.read(ids[name]) == content(name, SIZES[name])
    await lab.quiet()
    for copy in store.catalog.copies(store.object(ids["b"]), 0):  # it lies in both tiers
        await store._moves.move(store.object(ids["b"]), copy, store.tiers[-1], ANY)  # type: ignore[union-attr]
    await store._moves.save_all()  # type: ignore[union-attr]
    await store.flush()
    path = dirty_file(lab, content("written", SIZES["written"]))
    adopted = await store.adopt(ids["written"], path)
    assert adopted is not path.exists()
    await store.adopt_bytes([(ids["small"], content("small", SIZES["small"]))])
    moved = ObjectId("s", "moved", "e", SIZES["written"])
    if await store.recast(ids["written"], moved):
        assert bytes(await store.read(store.object(moved), 0, moved.size) or b"") in (
            b"",
            content("written", SIZES["written"]),
        )
    for name in "abc":
        obj = store.object(ids[name])
        with obj.held():
            await store.backing_files._prepare(obj)
            await store.make_immutable(obj)
            backing = store.open_backing(obj)
            if backing is not None:
                assert os.pread(backing.fd, SIZES[name], 0) == content(name, SIZES[name])
                backing.registered(1)
                store.release_backing(backing)
    out = store.open_backing(store.object(ids["a"]), on_disk=True)
    if out is not None:
        out.registered(out.id or 2)
        fd = store.take_out(out, 1, path.with_name("out"))
        if fd is None:
            store.release_backing(out)
        else:
            assert os.pread(fd, SIZES["a"], 0) == content("a", SIZES["a"])
            os.close(fd)
    store.evict(store.object(ids["b"]))
    for copy in store.catalog.copies(store.object(ids["c"]), SSD):
        await store._moves.move(store.object(ids["c"]), copy, store.tiers[0], ANY)  # type: ignore[union-attr]
    for name, object_id in ids.items():
        assert await lab.read(object_id) == content(name, SIZES[name])
    await lab.quiet()
    for object_id in (*ids.values(), moved):
        store.object(object_id).close_if_unused()
    return list(ids.values())


@pytest.mark.parametrize(
    "error",
    [
        errno.EIO,
        pytest.param(errno.ENOSPC, marks=pytest.mark.long),
        pytest.param(errno.EMFILE, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", CALLS)
@in_trio
async def test_each_call_fails_once(tmp_path: Path, name: str, error: int) -> None:
    rng, number = random.Random(f"{name} {error}"), 0
    while True:
        number += 1 if LEVEL != "short" else rng.choice([5, 11, 17, 27])
        place = tmp_path / f"cache{number}"
        with pytest.MonkeyPatch.context() as patch:
            async with running(place, ScriptedOrigin(), ram=8 * MIB) as lab:
                failing = Failing(patch, name, number, error)
                ids = await everything(lab)
                patch.undo()
                for object_id in ids:
                    obj = lab.store.object(object_id)
                    found = await lab.store.read(obj, 0, object_id.size)
                    assert found is None or bytes(found) == content(object_id.key, object_id.size)
                    obj.close_if_unused()
        remove_ram(place)
        if failing.calls < number:
            return

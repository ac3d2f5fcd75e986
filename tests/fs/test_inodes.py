"""Hashes that collide: everything still has one number, and it is found again."""

from __future__ import annotations

import random

import pytest
import trio

from cachefs.fs import inodes, pages, tree
from tests.fs.bucket import Bucket
from tests.fs.mount import mounted


@pytest.fixture
def few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def low_of(name: bytes) -> int:
        return inodes.FIRST_LOW + sum(name) % 3

    def number_of(ino: int) -> int:
        return 0 if ino == inodes.ROOT else 1 + ino % 2

    for module in (inodes, pages, tree):
        monkeypatch.setattr(module, "low_of", low_of)
        monkeypatch.setattr(module, "number_of", number_of)


@pytest.mark.usefixtures("few_numbers")
@pytest.mark.parametrize("page", [1, 3, 1000])
async def test_collisions_are_told_apart(page: int) -> None:
    keys = [f"{a}/{b}/{c}" for a in "abc" for b in "xyz" for c in "123"] + ["a-", "b.", "q"]
    async with mounted(Bucket(keys, page=page)) as mount:
        for key in random.Random(page).sample(keys, 10):
            assert await mount.stat(key) is not None, key
        shown = await mount.walk()
        assert {path.decode() for path, size in shown.items() if size is not None} == set(keys)
        numbers = [await mount.ino(path) for path in shown]
        assert len(set(numbers)) == len(numbers)
        for path, ino in zip(shown, numbers, strict=True):
            assert (await mount.fs.getattr(ino))[0] == await mount.stat(path)
        await trio.sleep(61)
        assert await mount.walk() == shown
        assert [await mount.ino(path) for path in shown] == numbers

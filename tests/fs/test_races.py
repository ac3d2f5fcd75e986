"""Several processes change the same few names at once: none gets an error that a local disk would not give, and in the end
the mount shows what the origin has, before and after a restart.

Each history is replayed from its seed: trio's scheduler is made deterministic.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from cachefs.base.errors import (
    AlreadyExists,
    CachefsError,
    Invalid,
    IsADirectory,
    NotADirectory,
    NotEmpty,
    NotFound,
    ObjectChanged,
)
from tests.fs.test_writing_model import WRITERS, World

HISTORIES = int(os.environ.get("CACHEFS_RACES", "12"))
"""For each mode. `CACHEFS_RACES=5000` is the long series."""

PATHS = ["a", "b", "c", "dir/x", "dir/y", "other/x"]
DIRECTORIES = ["dir", "other"]
T = TypeVar("T")

USUAL = (NotFound, AlreadyExists, IsADirectory, NotADirectory, NotEmpty, Invalid)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from trio._core import _run

    monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    state = _run._r.getstate()
    yield
    _run._r.setstate(state)


class Actor:
    """One process: random operations on the names that all share."""

    def __init__(self, world: World, rng: random.Random, seen: Counter[str], number: int) -> None:
        self.world, self.rng, self.seen = world, rng, seen
        self.own = f"own{number}"

    async def run(self, count: int) -> None:
        for _ in range(count):
            name = self.rng.choice(
                [
                    "create",
                    "append",
                    "unlink",
                    "rename",
                    "read",
                    "held",
                    "list",
                    "mkdir",
                    "rmdir",
                    "move",
                    "chmod",
                    "replace",
                    "poll",
                    "look",
                ]
            )
            try:
                await getattr(self, name)()
                self.seen[name] += 1
            except USUAL:
                pass
            except ObjectChanged:
                self.seen[f"{name}: ESTALE"] += 1
            await trio.sleep(self.rng.choice((0, 0, 0.0005, 0.003)))

    def path(self) -> str:
        return self.rng.choice(PATHS)

    async def create(self) -> None:
        await self.world.mount.write(self.path(), self.rng.randbytes(self.rng.randrange(12)))

    async def append(self) -> None:
        await self.world.mount.write(self.path(), b"more", os.O_WRONLY | os.O_CREAT, 3)

    async def unlink(self) -> None:
        await self.world.mount.unlink(self.path())

    async def rename(self) -> None:
        await self.world.mount.rename(self.path(), self.path())

    async def read(self) -> None:
        await self.world.mount.read(self.path())

    async def held(self) -> None:
        fh = await self.world.mount.open(self.path(), os.O_RDWR)
        try:
            await self.world.mount.fs.write(fh, 0, b"held")
            await trio.sleep(0.002)
            await self.world.mount.pread(fh)
        finally:
            await self.world.mount.close_file(fh)

    async def replace(self) -> None:
        """As programs save a file that others poll."""
        data = bytes([self.rng.randrange(256)]) * self.rng.choice((5, 20, 40))
        await self.world.mount.write(self.own, data)
        await self.world.mount.rename(self.own, "latest")

    async def poll(self) -> None:
        """A descriptor shows one version, whatever comes to its name."""
        fh = await self.world.mount.open("latest")
        try:
            data = b""
            for _ in range(6):
                data += await self.world.mount.pread(fh, len(data), 10)
                await trio.sleep(self.rng.choice((0, 0.001)))
            assert data and data == data[:1] * len(data) and len(data) in (5, 20, 40)
            for _ in range(4):  # all of it is cached or staged by now
                assert await self.answered(self.world.mount.pread, fh) == data
                assert (await self.answered(self.world.mount.fstat, fh)).size == len(data)
                await trio.sleep(self.rng.choice((0, 0.001)))
        finally:
            await self.world.mount.close_file(fh)

    async def look(self) -> None:
        """A descriptor can be looked at, whatever becomes of its name."""
        fh = await self.world.mount.open(self.path())
        try:
            ino = (await self.answered(self.world.mount.fstat, fh)).ino
            for _ in range(6):
                await trio.sleep(self.rng.choice((0, 0.001, 0.005)))
                found = await self.answered(self.world.mount.fstat, fh)
                assert not found.is_dir and found.ino == ino and found.nlink in (0, 1)
        finally:
            await self.world.mount.close_file(fh)

    async def answered(self, what: Callable[[int], Awaitable[T]], fh: int) -> T:
        """A question about an open file that no change of names may answer with an error."""
        try:
            return await what(fh)
        except CachefsError as exc:
            raise AssertionError(f"{what.__name__} of an open file: {exc!r}") from exc

    async def list(self) -> None:
        await self.world.mount.entries()

    async def mkdir(self) -> None:
        await self.world.mount.mkdir(self.rng.choice(DIRECTORIES))

    async def rmdir(self) -> None:
        await self.world.mount.rmdir(self.rng.choice(DIRECTORIES))

    async def move(self) -> None:
        await self.world.mount.rename(*self.rng.sample(DIRECTORIES, 2))

    async def chmod(self) -> None:
        await self.world.mount.fs.setattr(await self.world.mount.ino(self.path()), mode=0o600)


async def content(world: World) -> dict[bytes, Any]:
    tree: dict[bytes, Any] = dict(await world.mount.walk())
    for path, size in tree.items():
        if size is not None:
            tree[path] = await world.mount.read(path.decode())
    return tree


@pytest.mark.parametrize("mode", WRITERS)
@pytest.mark.parametrize("seed", range(HISTORIES))
async def test_names_that_several_processes_change(seed: int, mode: str, tmp_path: Path) -> None:
    from trio._core import _run

    _run._r.seed(seed)
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        world = World(tmp_path, nursery, writeback=mode == "writeback")
        await world.start()
        async with trio.open_nursery() as actors:
            for number in range(rng.randrange(2, 5)):
                actors.start_soon(Actor(world, random.Random(rng.random()), seen, number).run, 40)
        shown = await content(world)
        assert not await world.uploads.flush()
        assert await content(world) == shown
        files = {path.decode(): data for path, data in shown.items() if data is not None}
        stored = {key: world.bucket.content(key) for key in world.bucket.objects if not key.endswith("/")}
        assert stored == files
        assert len(world.mount.fs._writing.locks) == 0  # type: ignore[union-attr]
        await world.stop()
        await world.start()
        assert await content(world) == shown
        for path in ("a", "b", "c"):
            await world.mount.write(path, b"after")
            assert await world.mount.read(path) == b"after"
            await world.mount.unlink(path)
        await world.stop()
        nursery.cancel_scope.cancel()
    estale = sum(count for name, count in seen.items() if "ESTALE" in name)
    assert estale <= 0.05 * seen.total(), seen


def test_no_error_is_left_out() -> None:
    assert ObjectChanged not in USUAL and all(issubclass(one, CachefsError) for one in USUAL)

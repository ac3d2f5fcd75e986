"""Any sequence of changes does to the mount what it does to a dictionary, at every step; and in the end to the store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.upload import Uploads
from tests.conftest import examples
from tests.fs.bucket import WritableBucket
from tests.fs.mount import ROOT, Clock, Mount, mounted

WRITERS = ("durable", "writeback")


class NoCache:
    """Takes nothing, and has nothing to evict."""

    hangs = False

    async def adopt(self, version: ObjectId, path: Path) -> bool:
        return False

    async def adopt_bytes(self, versions: Sequence[tuple[ObjectId, bytes]]) -> list[bool]:
        return [False] * len(versions)

    async def recast(self, old: ObjectId, new: ObjectId) -> bool:
        return False

    async def evict_to_hold(self, wanted: int) -> bool:
        return False

    async def list_all(self, object_id: ObjectId) -> None:
        pass


class Reader:
    """Reads the versions that a bucket has."""

    def open(self, origin: Any, object_id: ObjectId) -> bytes:
        if origin.objects.get(object_id.key) is None or origin.objects[object_id.key].etag != object_id.etag:
            raise ObjectChanged(object_id.key)
        data: bytes = origin.content(object_id.key)
        return data

    def close(self, opened: bytes, unread_blocks: int | None = 0) -> None:
        pass

    async def read(self, opened: bytes, offset: int, size: int, pid: int) -> bytes:
        return opened[offset : offset + size]


class File:
    """What handles share; `drafted`: since it was opened it has been written, so it lives without its name."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.removed = False
        self.handles = 0
        self.drafted = False


Tree = dict[str, File | None]


class World:
    """A mount over an upload room over a bucket, and what it should look like."""

    def __init__(self, path: Path, nursery: trio.Nursery, *, writeback: bool) -> None:
        self.path, self.writeback = path, writeback
        self._nursery = nursery
        self.bucket = WritableBucket(["old", "dir/x", "dir/deep/y"], delay=0.001)
        self.clock = Clock()
        self.tree: Tree = {
            "old": File(self.bucket.content("old")),
            "dir": None,
            "dir/x": File(self.bucket.content("dir/x")),
            "dir/deep": None,
            "dir/deep/y": File(self.bucket.content("dir/deep/y")),
        }
        self.open: list[tuple[int, File]] = []
        self.mount: Mount
        self.uploads: Uploads
        self.store: Any = NoCache()
        self._stack = AsyncExitStack()
        self.reader = Reader()

    async def start(self) -> None:
        self._stack = AsyncExitStack()
        nursery: trio.Nursery = await self._nursery.start(_serve)
        self._stack.callback(nursery.cancel_scope.cancel)
        self.uploads = Uploads(
            self.path / "state",
            self.path / "staging",
            [self.bucket],  # type: ignore[list-item]
            self.store,
            Metrics(),
            nursery=nursery,
            reader=self.reader,
            writeback=self.writeback,
        )
        await self.uploads.recover()
        nursery.start_soon(self.uploads.run)
        context = mounted(
            self.bucket,
            path=self.path / "names",
            clock=self.clock,
            writer=self.uploads,
            file_mode=0o644,
            dir_mode=0o755,
        )
        self.mount = await self._stack.enter_async_context(context)
        await self.mount.fs.recover()

    async def stop(self, *, deadline_s: float = 30.0) -> None:
        for fh, _ in self.open:
            await self.mount.close_file(fh)
        self.open.clear()
        left = await self.uploads.aclose(deadline_s)
        assert not left or deadline_s == 0
        await self._stack.aclose()

    # -- the model ---------------------------------------------------------------------------------

    def kind(self, path: str) -> str:
        return "none" if path not in self.tree else "dir" if self.tree[path] is None else "file"

    def file(self, path: str) -> File:
        found = self.tree[path]
        assert found is not None
        return found

    def below(self, path: str) -> list[str]:
        return [p for p in self.tree if p.startswith(path + "/")]

    def has_parent(self, path: str) -> bool:
        above = path.rpartition("/")[0]
        return not above or self.kind(above) == "dir"

    def remove(self, path: str) -> None:
        file = self.tree.pop(path)
        if file is not None:
            file.removed = True

    # -- the steps: each does to both the same, or sees the error that it must ---------------------------

    async def write(self, path: str, data: bytes, how: str) -> None:
        if not self.has_parent(path):
            assert await self.mount.stat(path) is None
            return
        kind = self.kind(path)
        flags = os.O_WRONLY | os.O_CREAT | {"all": os.O_TRUNC, "new": os.O_EXCL}.get(how, 0)
        if kind == "dir" or (kind == "file" and how == "new"):
            with pytest.raises(AlreadyExists if how == "new" else IsADirectory):
                await self.mount.write(path, data, flags)
            return
        file = self.file(path) if kind == "file" else File(b"")
        at = len(file.data) if how == "append" else 3 if how == "middle" else 0
        if how == "all":
            file.data.clear()
        if data:
            file.data.extend(bytes(max(0, at - len(file.data))))
            file.data[at : at + len(data)] = data
        file.drafted |= file.handles > 0 and (bool(data) or how == "all")
        self.tree[path] = file
        await self.mount.write(path, data, flags, at)

    async def truncate(self, path: str, size: int) -> None:
        if self.kind(path) != "file":
            return
        file = self.file(path)
        changed = len(file.data) != size
        del file.data[size:]
        file.data.extend(bytes(size - len(file.data)))
        file.drafted |= changed and file.handles > 0
        for attempt in (1, 2):
            try:
                found, _ = await self.mount.fs.setattr(await self.mount.ino(path), size=size)
            except ObjectChanged:
                assert attempt == 1
            else:
                assert found.size == size
                return

    async def unlink(self, path: str) -> None:
        if not self.has_parent(path):
            return
        kind = self.kind(path)
        if kind != "file":
            with pytest.raises(NotFound if kind == "none" else IsADirectory):
                await self.mount.unlink(path)
            return
        await self.mount.unlink(path)
        self.remove(path)

    async def mkdir(self, path: str) -> None:
        if not self.has_parent(path):
            return
        if self.kind(path) != "none":
            with pytest.raises(AlreadyExists):
                await self.mount.mkdir(path)
            return
        await self.mount.mkdir(path)
        self.tree[path] = None

    async def rmdir(self, path: str) -> None:
        if not self.has_parent(path):
            return
        kind = self.kind(path)
        if kind != "dir" or self.below(path):
            wanted = {"none": NotFound, "file": NotADirectory, "dir": NotEmpty}[kind]
            with pytest.raises(wanted):
                await self.mount.rmdir(path)
            return
        await self.mount.rmdir(path)
        del self.tree[path]

    async def rename(self, path: str, to: str) -> None:
        if not self.has_parent(path) or not self.has_parent(to):
            return
        kind, there = self.kind(path), self.kind(to)
        wrong: type[CachefsError] | None = None
        if kind == "none":
            wrong = NotFound
        elif path == to:
            pass
        elif kind == "file" and there == "dir":
            wrong = IsADirectory
        elif kind == "dir" and there == "file":
            wrong = NotADirectory
        elif kind == "dir" and to.startswith(path + "/"):
            wrong = Invalid
        elif kind == "dir" and there == "dir" and self.below(to):
            wrong = NotEmpty
        if wrong is not None:
            with pytest.raises(wrong):
                await self.mount.rename(path, to)
            return
        await self.mount.rename(path, to)
        if path == to:
            return
        if there == "file":
            self.remove(to)
        for old in [path, *self.below(path)]:
            self.tree[to + old[len(path) :]] = self.tree.pop(old)

    async def hold(self, path: str) -> None:
        if self.kind(path) == "file" and len(self.open) < 4:
            file = self.file(path)
            self.open.append((await self.mount.open(path, os.O_RDWR), file))
            file.handles += 1

    async def use(self, which: int, data: bytes, at: int) -> None:
        """Write through a handle (or only read), and read it all through each."""
        if not self.open:
            return
        fh, file = self.open[which % len(self.open)]
        lost = file.removed and not file.drafted
        try:
            if data:
                await self.mount.pwrite(fh, at, data)
                file.data.extend(bytes(max(0, at - len(file.data))))
                file.data[at : at + len(data)] = data
                file.drafted = True
            assert await self.mount.pread(fh) == bytes(file.data)
        except ObjectChanged:
            assert lost

    async def close(self, which: int) -> None:
        if self.open:
            fh, file = self.open.pop(which % len(self.open))
            await self.mount.close_file(fh)
            file.handles -= 1
            file.drafted &= file.handles > 0

    async def fsync(self, which: int) -> None:
        if self.open:
            await self.mount.fs.fsync(self.open[which % len(self.open)][0])

    async def wait(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def restart(self, kill: bool) -> None:
        await self.stop(deadline_s=0 if kill and self.writeback else 30)
        for file in self.tree.values():
            if file is not None:
                file.handles, file.drafted = 0, False
        await self.start()

    # -- comparing ---------------------------------------------------------------------------------

    def sizes(self) -> dict[bytes, int | None]:
        return {p.encode(): None if f is None else len(f.data) for p, f in self.tree.items()}

    async def compare(self) -> None:
        assert await self.mount.walk() == self.sizes()
        for path, file in self.tree.items():
            if file is not None:
                assert await self.mount.read(path) == bytes(file.data), path

    async def compare_at_store(self) -> None:
        for fh, _ in self.open:
            await self.mount.close_file(fh)
        self.open.clear()
        assert not await self.uploads.flush()
        assert {k for k in self.bucket.objects if not k.endswith("/")} == {
            p for p, f in self.tree.items() if f is not None
        }
        async with mounted(self.bucket) as other:
            assert await other.walk() == self.sizes()
        for path, file in self.tree.items():
            if file is not None:
                assert self.bucket.content(path) == bytes(file.data)


names = st.sampled_from(["a", "b", "dir", "deep", "old", "x"])
paths = st.one_of(
    st.sampled_from(["old", "dir", "dir/x", "dir/deep", "dir/deep/y", "a", "b"]),
    st.lists(names, min_size=1, max_size=3).map("/".join),
)
data = st.binary(max_size=12)
which = st.integers(0, 3)
steps = st.one_of(
    st.tuples(st.just("write"), paths, data, st.sampled_from(["all", "new", "append", "middle"])),
    st.tuples(st.just("truncate"), paths, st.integers(0, 15)),
    st.tuples(st.just("unlink"), paths),
    st.tuples(st.just("mkdir"), paths),
    st.tuples(st.just("rmdir"), paths),
    st.tuples(st.just("rename"), paths, paths),
    st.tuples(st.just("rename"), paths, paths),
    st.tuples(st.just("hold"), paths),
    st.tuples(st.just("use"), which, data, st.integers(0, 15)),
    st.tuples(st.just("close"), which),
    st.tuples(st.just("fsync"), which),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 61.0])),
    st.tuples(st.just("restart"), st.booleans()),
)


@pytest.mark.parametrize("mode", WRITERS)
@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(steps, max_size=25))
def test_the_mount_is_what_was_done_to_it(mode: str, script: list[Any]) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            async with trio.open_nursery() as nursery:
                world = World(Path(place), nursery, writeback=mode == "writeback")
                await world.start()
                for name, *arguments in script:
                    await getattr(world, name)(*arguments)
                    await world.compare()
                await world.compare_at_store()
                await world.stop()

    try:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _serve(task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    async with trio.open_nursery() as nursery:
        task_status.started(nursery)
        await trio.sleep_forever()


async def test_nothing_is_left_behind(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        world = World(tmp_path, nursery, writeback=False)
        await world.start()
        assert await world.mount.entries(ROOT)
        await world.write("a", b"1", "all")
        await world.rename("a", "old")
        await world.stop()
    assert world.mount.bytes.open_count == 0
    assert not list((tmp_path / "staging").iterdir())

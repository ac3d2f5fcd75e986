"""Several processes change the same few names and files at once. They see what some order of their steps would show on a
local disk (`linear`), and so does the origin in the end, and the mount after a restart.

A history is made from its seed: what each process does, how long each request to the origin and each call on the disk takes,
which requests fail, and which task runs next. So a failing one is replayed by its number alone:

    CACHEFS_HISTORY=1234 pytest tests/fs/test_concurrent_model.py -k replay

`CACHEFS_HISTORIES=10000 pytest tests/fs/test_concurrent_model.py` is the long series.
"""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.errors import CachefsError, ObjectChanged, OriginFailed
from cachefs.base.names import ObjectId
from cachefs.fs import FileSystem
from cachefs.fs.attributes import Attributes
from cachefs.fuse.errno_table import errno_of
from cachefs.fuse.walks import SecondWalks
from cachefs.origin.protocol import ObjectInfo
from tests import threads
from tests.conftest import examples
from tests.fs import linear
from tests.fs.bucket import MTIME, Bytes, PausingBucket, content_of, etag_of
from tests.fs.linear import FAILED, OK, State, Step
from tests.fs.mount import ROOT
from tests.fs.test_writing_model import NoCache, Reader, World

HISTORIES = int(os.environ.get("CACHEFS_HISTORIES", "0")) or examples(300)
IN_A_TEST = 100

FILES = ["a", "b", "c"]
DIRECTORIES = ["d", "e"]
INSIDE = ["x", "y"]
PAUSES_S = (0.0, 0.0, 0.0, 0.0001, 0.001, 0.004)

HELD_S = 10.0
"""How long a file that a second walk finds is held open."""


class Chance:
    """What the world does besides its programs. `failing` is the share of requests to the origin that fail."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.failing = self.rng.choice((0.0, 0.0, 0.0, 0.05))
        self.fails = self.failing > 0
        self.quick = self.rng.random() < 0.3
        self.writeback = self.rng.random() < 0.5
        self.locks = self.rng.random() < 0.5
        self.cached = self.locks and self.rng.random() < 0.6
        self.directories = self.locks and self.rng.random() < 0.5
        self.takes, self.in_memory = self.rng.random() < 0.6, self.rng.random() < 0.5
        self.same_etags = self.rng.random() < 0.5

    def pause_s(self) -> float:
        return 0.0 if self.quick else self.rng.choice(PAUSES_S)


class Origin(PausingBucket):
    """Each request takes a time of its own before it is done, and another until its answer is here."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        super().__init__()
        self.before = self.strike

    def _made(self, key: str, data: bytes) -> Any:
        """Most stores give the same content the same etag, under any key."""
        if self.chance.same_etags:
            self.version += 1
            etag = etag_of(repr(data))
            self.written[etag] = data
            self.objects[key] = ObjectInfo(key, len(data), MTIME + self.version, etag)
            return self.objects[key]
        return super()._made(key, data)

    def strike(self, kind: str, key: str) -> CachefsError | None:
        failing = self.chance.failing
        return OriginFailed(f"no {kind} of {key}") if failing and self.chance.rng.random() < failing else None

    async def put(self, *what: Any, **how: Any) -> Any:  # type: ignore[override]
        return await self._answered(super().put(*what, **how))

    async def copy(self, *what: Any, **how: Any) -> Any:
        return await self._answered(super().copy(*what, **how))

    async def delete(self, key: str) -> None:
        await self._answered(super().delete(key))


class Kept(Bytes):
    """All versions can be read for ever, as what is cached."""

    async def read(self, opened: ObjectId, offset: int, size: int, pid: int) -> bytes:
        assert isinstance(self.bucket, Origin)
        await trio.sleep(self.bucket.chance.pause_s())
        return content_of(self.bucket, opened)[offset : offset + size]

    def cached_bytes(self, obj: ObjectId) -> int:
        return obj.size


class Cache:
    """Takes what was written, or does not, and takes its time."""

    hangs = False

    def __init__(self, chance: Chance, path: Path) -> None:
        self.chance, self.path = chance, path

    async def adopt(self, version: ObjectId, path: Path) -> bool:
        await trio.sleep(self.chance.pause_s())
        if self.chance.rng.random() < 0.2:
            return False
        os.replace(path, self.path)
        await trio.sleep(self.chance.pause_s())
        return True

    async def adopt_bytes(self, versions: Sequence[tuple[ObjectId, bytes]]) -> list[bool]:
        await trio.sleep(self.chance.pause_s())
        return [self.chance.rng.random() < 0.8 for _ in versions]

    async def recast(self, old: ObjectId, new: ObjectId) -> bool:
        await trio.sleep(self.chance.pause_s())
        return False

    async def evict_to_hold(self, wanted: int) -> bool:
        return False

    async def list_all(self, object_id: ObjectId) -> None:
        pass


class Shaken(World):
    """A world with such an origin and such a cache."""

    def __init__(self, path: Path, nursery: trio.Nursery, chance: Chance) -> None:
        super().__init__(path, nursery, writeback=chance.writeback)
        self.bucket = Origin(chance)
        self.store = Cache(chance, path / "taken") if chance.takes else NoCache()
        self.in_memory = chance.in_memory
        self.reader = SlowReader(chance)

    async def start(self) -> None:
        await super().start()
        self.uploads._queue._rng = random.Random(1)
        if not self.in_memory:
            self.uploads._disk.memory_left = 0


class SlowReader(Reader):
    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def open(self, origin: Any, object_id: ObjectId) -> tuple[Any, ObjectId]:
        return origin, object_id

    async def read(self, opened: tuple[Any, ObjectId], offset: int, size: int, pid: int) -> bytes:
        await trio.sleep(self._chance.pause_s())
        return content_of(*opened)[offset : offset + size]


class Inodes:
    """What Linux keeps of inodes: it locks a directory for each change of a name in it, and the directory that is removed.
    What is found by a lookup is not locked. Without these locks, no directory comes or goes. `cached`: it also keeps names
    for as long as it may, takes them along when it renames, locks a directory while it asks for a name in it, and keeps what
    was read of a file until an open tells it not to."""

    def __init__(self, fs: FileSystem, locked: bool, cached: bool = False) -> None:
        self.locked, self.cached = locked, cached
        self.locks: dict[int, trio.Lock] = {}
        self.kernels: list[Kernel] = []
        self.names: dict[tuple[int, bytes], tuple[int, str, float]] = {}
        """By directory and name: number, kind, and until when it is known."""
        self.pages: dict[int, bytes] = {}  # what was read, by number
        self.dropped: Counter[int] = Counter()
        fs.on_invalidate = self.invalidate

    def invalidate(self, ino: int, parent: int, name: bytes) -> None:
        self.names.pop((parent, name), None)
        self.drop_pages(ino)

    def drop_pages(self, ino: int) -> None:
        self.pages.pop(ino, None)
        self.dropped[ino] += 1  # nor keep what is being read

    @asynccontextmanager
    async def exclusive(self, *numbers: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as locks:
            for number in sorted(set(numbers)) if self.locked else ():
                await locks.enter_async_context(self.locks.setdefault(number, trio.Lock()))
            yield

    @contextmanager
    def changing(self, ino: int) -> Iterator[None]:
        """Of the content of a file."""
        self.drop_pages(ino)
        try:
            yield
        finally:
            self.drop_pages(ino)

    def asking(self, number: int) -> AbstractAsyncContextManager[None]:
        """Of a lookup."""
        return self.exclusive(*[number] * self.cached)

    def known(self, parent: int, name: bytes) -> tuple[int, str] | None:
        found = self.names.get((parent, name))
        return found[:2] if found is not None and found[2] > trio.current_time() else None

    def keep(self, parent: int, name: bytes, found: Attributes | None, ttl: float) -> None:
        self.names.pop((parent, name), None)
        if self.cached:
            number, kind = (0, "") if found is None else (found.ino, "directory" if found.is_dir else "file")
            self.names[parent, name] = number, kind, trio.current_time() + ttl

    def changed(self, what: str, *names: tuple[int, bytes]) -> None:
        """A change of these names is done."""
        kept = self.names.pop(names[0], None)
        self.names.pop(names[-1], None)
        if what == "rename" and kept is not None and kept[0]:
            self.names[names[-1]] = kept

    def removed(self, number: int) -> None:
        """A process that has looked up this directory has a dead one."""
        for kernel in self.kernels:
            kernel.dead |= {found for found, ino in kernel.inodes.items() if ino == number}


class Kernel:
    """System calls, as steps of a history. A call that is told ESTALE is begun once more, as Linux does."""

    def __init__(
        self, world: World, walks: SecondWalks, inodes: Inodes, history: list[Step], thread: int
    ) -> None:
        self.world, self.fs, self.walks, self.shared = world, world.mount.fs, walks, inodes
        inodes.kernels.append(self)
        self.dead: set[int] = set()  # directories that were removed since they were looked up
        self.history, self.thread = history, thread
        self.handles: dict[int, int] = {}  # by the step that opened it
        self.inodes: dict[int, int] = {-1: ROOT}  # by the step that found it
        self.where: dict[int, int] = {}  # the directory that the process is in
        self.sure = False  # whether it walks once more, asking for each name

    def tick(self) -> int:
        CLOCK[0] += 1
        return CLOCK[0]

    async def step(self, what: str, *arguments: Any, work: Callable[[Step], Awaitable[Any]]) -> Any:
        """Do one step; what is answered with ESTALE has not happened."""
        began = self.tick()
        step = Step(began, self.thread, what, arguments, began)
        self.history.append(step)
        try:
            step.result = await work(step)
        except ObjectChanged:
            self.walks.begin(self.thread)
            self.history.remove(step)
            raise
        except CachefsError as exc:
            step.result = errno.errorcode[errno_of(exc)[0]]
        step.ended = self.tick()
        return step

    async def call(self, work: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """A system call."""
        for attempt in (1, 2):
            self.sure = attempt == 2
            try:
                answer = await work(*arguments)
            except ObjectChanged as exc:
                if attempt == 2:
                    raise AssertionError(f"{work.__name__}{arguments}: ESTALE: {exc}") from exc
            else:
                self.walks.end(self.thread)
                return answer
            finally:
                self.inodes = {-1: ROOT, **self.where}
        raise AssertionError

    async def lookup(self, above: int, name: str) -> Step:
        async def look(step: Step) -> str:
            parent, wanted = self.inodes[above], name.encode()
            if above in self.dead:
                return "ENOENT"
            known = None if self.sure else self.shared.known(parent, wanted)
            if known is None:
                known = await ask(parent, wanted)
            if not known[0]:
                return "ENOENT"
            self.inodes[step.number] = known[0]
            return known[1]

        async def ask(parent: int, wanted: bytes) -> tuple[int, str]:
            async with self.shared.asking(parent):
                if above in self.dead:
                    return 0, ""
                if self.walks.is_second(self.thread):
                    found, ttl = await self.walks.lookup(self.thread, parent, wanted)
                else:
                    found, ttl = self.fs.lookup_now(parent, wanted) or await self.fs.lookup(parent, wanted)
                self.shared.keep(parent, wanted, found, ttl)
            return (0, "") if found is None else (found.ino, "directory" if found.is_dir else "file")

        found: Step = await self.step("walk", above, name, work=look)
        return found

    async def above(self, path: str) -> tuple[int, str] | None:
        """The directory of a path, as the step that found it, and the name in it; None where there is none."""
        above, _, name = path.rpartition("/")
        if not above:
            return -1, name
        if above == ".":
            return next(iter(self.where), -1), name
        found = await self.lookup(-1, above)
        if found.result == "file":
            await self.drop(found.number)
        return (found.number, name) if found.result == "directory" else None

    async def find(self, path: str) -> Step | None:
        place = await self.above(path)
        if place is None:
            return None
        try:
            found = await self.lookup(*place)
        finally:
            await self.drop(place[0])
        return found if found.result in ("file", "directory") else None

    async def drop(self, *found: int) -> None:
        """What was looked up is not used any more."""

        async def nothing(step: Step) -> str:
            return OK

        for one in found:
            if one >= 0 and one not in self.where:
                await self.step("drop", one, work=nothing)

    # -- calls by name -----------------------------------------------------------------------------

    async def open(self, path: str, flags: str) -> int | None:
        """A handle; `flags` of "r", "w", "c" (create), "t" (truncate), "x" (O_EXCL)."""
        place = await self.above(path)
        if place is None:
            return None
        bits = os.O_RDWR if "w" in flags else os.O_RDONLY
        bits |= (os.O_TRUNC if "t" in flags else 0) | (os.O_EXCL if "x" in flags else 0)
        try:
            found = await self.lookup(*place)
            if found.result == "ENOENT" and "c" in flags:
                return await self.create(*place, flags, bits | os.O_CREAT)
        finally:
            await self.drop(place[0])
        if found.result not in ("file", "directory"):
            return None
        try:
            if found.result == "directory" or "x" in flags:
                return None

            async def open_it(step: Step) -> str:
                ino = self.inodes[found.number]
                opened = self.fs.open_now(ino, bits, self.thread)
                opened = opened or await self.fs.open(ino, bits, self.thread)
                self.handles[step.number] = opened[0]
                if not opened[1] or bits & os.O_TRUNC:
                    self.shared.drop_pages(ino)
                return OK

            opened: Step = await self.step("open", found.number, flags, work=open_it)
            return opened.number if opened.result == OK else None
        finally:
            await self.drop(found.number)

    async def create(self, above: int, name: str, flags: str, bits: int) -> int | None:
        async def create(step: Step) -> str:
            where = self.inodes[above], name.encode(), bits, 0o640, self.thread, 1000, 1000
            async with self.shared.exclusive(self.inodes[above]):
                if above in self.dead:
                    return "ENOENT"
                made, ttl, opened = await self.fs.create(*where)
                self.shared.keep(*where[:2], made, ttl)
            self.handles[step.number] = opened[0]
            self.shared.drop_pages(made.ino)
            return OK

        step: Step = await self.step("create", above, name, flags, 0o640, work=create)
        return step.number if step.result == OK else None

    async def change(self, what: str, *paths: str) -> None:
        """unlink, mkdir, rmdir, rename."""
        places: list[tuple[int, str]] = []
        try:
            for path in paths:
                place = await self.above(path)
                if place is None:
                    return
                places.append(place)

            async def change(step: Step) -> str:
                where = [(self.inodes[above], name.encode()) for above, name in places]
                more = {"mkdir": (0o755, 1000, 1000), "rename": (0,)}.get(what, ())
                async with self.shared.exclusive(*(above for above, _ in where)):
                    if self.dead & {above for above, _ in places}:
                        return "ENOENT"
                    victim = None
                    if self.shared.locked and what in ("rmdir", "rename"):
                        victim, _ = await self.fs.lookup(*where[-1])
                    number = victim.ino if victim is not None and victim.is_dir else 0
                    async with self.shared.exclusive(*[number] * bool(number)):
                        made = await getattr(self.fs, what)(
                            *(part for place in where for part in place), *more
                        )
                        self.shared.changed(what, *where)
                        if what == "mkdir":
                            self.shared.keep(*where[0], *made)
                    if number:
                        self.shared.removed(number)
                return OK

            await self.step(what, *(part for place in places for part in place), work=change)
        finally:
            await self.drop(*(above for above, _ in places))

    async def stat(self, path: str) -> None:
        if (found := await self.find(path)) is not None:
            await self.look(found.number, self.inodes[found.number])
            await self.drop(found.number)

    async def chdir(self, path: str) -> None:
        """The process is in this directory from now on, also when that is removed."""
        found = await self.lookup(-1, path)
        if found.result == "file":
            await self.drop(found.number)
        elif found.result == "directory":
            before, self.where = self.where, {found.number: self.inodes[found.number]}
            await self.drop(*before)

    async def stat_here(self) -> None:
        for number, ino in self.where.items():
            await self.look(number, ino)

    async def chmod(self, path: str, mode: int) -> None:
        await self._set(path, "chmod", mode, mode=mode)

    async def truncate(self, path: str, size: int) -> None:
        await self._set(path, "truncate", size, size=size)

    async def _set(self, path: str, what: str, value: int, **news: int) -> None:
        found = await self.find(path)
        if found is None:
            return
        try:
            if found.result == "file":

                async def change(step: Step) -> str:
                    with self.shared.changing(self.inodes[found.number]):
                        await self.fs.setattr(self.inodes[found.number], **news)
                    return OK

                await self.step(what, found.number, value, work=change)
        finally:
            await self.drop(found.number)

    async def list(self, path: str) -> None:
        """Each name is a question of its own: a local disk lists names as they are one by one, too."""
        number = -1
        if path:
            found = await self.lookup(-1, path)
            if found.result != "directory":
                if found.result == "file":
                    await self.drop(found.number)
                return
            number = found.number
        names = [*FILES, *DIRECTORIES] if not path else INSIDE
        began = self.tick()
        try:
            async with self.shared.asking(self.inodes[number]):  # as each change of a name in it does
                entries = await self.world.mount.entries(self.inodes[number])
            listed = {entry.name.decode() for entry in entries}
        except CachefsError as exc:
            if isinstance(exc, ObjectChanged):
                self.walks.begin(self.thread)
                raise
            listed = None
        ended = self.tick()
        if listed is not None:
            assert listed <= set(names)
            self.history += [
                Step(self.tick(), self.thread, "exists", (number, name), began, ended, name in listed)
                for name in names
            ]
        await self.drop(number)

    # -- calls by handle ---------------------------------------------------------------------------

    async def look(self, number: int, ino: int) -> None:
        async def look(step: Step) -> Any:
            shown: Attributes = (self.fs.attributes_now(ino) or await self.fs.getattr(ino))[0]
            return "directory" if shown.is_dir else (shown.size, shown.mode & 0o7777, shown.nlink)

        await self.step("stat", number, work=look)

    async def fstat(self, opened: int) -> None:
        await self.look(opened, self.ino_of(opened))

    def ino_of(self, opened: int) -> int:
        return self.fs._files.handles[self.handles[opened]].ino

    async def read(self, opened: int) -> None:
        async def read(step: Step) -> bytes:
            pages, ino = self.shared.pages, self.ino_of(opened)
            if (kept := pages.get(ino)) is not None:
                return kept
            dropped = self.shared.dropped[ino]
            data = await self.world.mount.pread(self.handles[opened])
            if self.shared.cached and dropped == self.shared.dropped[ino]:
                pages[ino] = data
            return data

        await self.step("read", opened, work=read)

    async def write(self, opened: int, offset: int, data: bytes) -> None:
        async def write(step: Step) -> str:
            with self.shared.changing(self.ino_of(opened)):
                assert await self.world.mount.pwrite(self.handles[opened], offset, data) == len(data)
            return OK

        await self.step("write", opened, offset, data, work=write)

    async def ftruncate(self, opened: int, size: int) -> None:
        await self._fset(opened, "truncate", size, size=size)

    async def fchmod(self, opened: int, mode: int) -> None:
        await self._fset(opened, "chmod", mode, mode=mode)

    async def _fset(self, opened: int, what: str, value: int, **news: int) -> None:
        async def change(step: Step) -> str:
            with self.shared.changing(self.ino_of(opened)):
                await self.fs.setattr(self.ino_of(opened), **news, fh=self.handles[opened])
            return OK

        await self.step(what, opened, value, work=change)

    async def fsync(self, opened: int) -> None:
        async def sync(step: Step) -> str:
            await self.fs.fsync(self.handles[opened])
            return OK

        await self.step("fsync", opened, work=sync)

    async def close(self, opened: int) -> None:
        async def close(step: Step) -> str:
            fh = self.handles.pop(opened)
            try:
                await self.fs.flush(fh)
            finally:
                self.fs.release(fh)
            return OK

        await self.step("close", opened, work=close)


CLOCK = [0]
CHANCE: list[Chance] = []


class Program:
    """One process: random calls on the names that all share."""

    def __init__(self, kernel: Kernel, rng: random.Random, chance: Chance) -> None:
        self.kernel, self.rng, self.chance = kernel, rng, chance
        self.open: list[tuple[int, bool]] = []

    def path(self) -> str:
        if self.rng.random() < (0.3 if self.chance.directories else 0.7):
            return self.rng.choice(FILES)
        if self.kernel.where and self.rng.random() < 0.4:
            return f"./{self.rng.choice(INSIDE)}"
        return f"{self.rng.choice(DIRECTORIES)}/{self.rng.choice(INSIDE)}"

    def data(self) -> bytes:
        CLOCK[0] += 1
        return b"<%d>" % CLOCK[0] * self.rng.choice((1, 1, 3))

    async def run(self, count: int) -> None:
        for _ in range(count):
            await self.one()
            if self.rng.random() < 0.5:
                await trio.sleep(self.chance.pause_s())
        while self.open:
            await self.use("close", self.open.pop()[0])
        left, self.kernel.where = self.kernel.where, {}
        await self.kernel.drop(*left)

    async def use(self, what: str, *arguments: Any) -> Any:
        return await self.kernel.call(getattr(self.kernel, what), *arguments)

    async def one(self) -> None:
        rng, kind = self.rng, self.rng.random()
        if self.chance.directories and rng.random() < 0.25:
            await self.with_directories()
        elif self.open and kind < 0.45:
            await self.with_handle(*rng.choice(self.open))
        elif kind < 0.6 and len(self.open) < 3:
            flags = rng.choice(("r", "w", "wt", "wc", "wct", "wcx"))
            opened = await self.use("open", self.path(), flags)
            if opened is not None:
                self.open.append((opened, "w" in flags))
                if "c" in flags:
                    await self.use("write", opened, 0, self.data())
        elif kind < 0.7:
            await self.use("change", "rename", self.path(), self.path())
        elif kind < 0.76:
            await self.use("change", "unlink", self.path())
        elif kind < 0.82:
            await self.use("stat", self.path())
        elif kind < 0.86:
            await self.use("truncate", self.path(), rng.randrange(12))
        elif kind < 0.9:
            await self.use("chmod", self.path(), rng.choice((0o600, 0o644, 0o755)))
        elif kind < 0.94:
            await self.use("list", rng.choice(("", *DIRECTORIES)))
        elif not self.chance.locks:
            await self.use("list", rng.choice(DIRECTORIES))
        elif kind < 0.96:
            await self.use("change", "mkdir", rng.choice(DIRECTORIES))
        elif kind < 0.98:
            await self.use("change", "rmdir", rng.choice(DIRECTORIES))
        elif not self.chance.failing:  # a half of it may have been done, then
            await self.use("change", "rename", *rng.sample(DIRECTORIES, 2))

    async def with_directories(self) -> None:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.3:
            await self.use("change", "mkdir", rng.choice(DIRECTORIES))
        elif kind < 0.5:
            await self.use("change", "rmdir", rng.choice(DIRECTORIES))
        elif kind < 0.75 and not self.chance.failing:
            await self.use("change", "rename", *rng.sample(DIRECTORIES, 2))
        elif kind < 0.9:
            await self.use("chdir", rng.choice(DIRECTORIES))
        else:
            await self.use("stat_here")

    async def with_handle(self, opened: int, writes: bool) -> None:
        kind = self.rng.random()
        if kind < 0.25:
            self.open.remove((opened, writes))
            await self.use("close", opened)
        elif kind < 0.5:
            await self.use("read", opened)
        elif kind < 0.6:
            await self.use("fstat", opened)
        elif kind < 0.65:
            await self.use("fchmod", opened, self.rng.choice((0o600, 0o644, 0o755)))
        elif not writes:
            await self.use("read", opened)
        elif kind < 0.85:
            await self.use("write", opened, self.rng.randrange(8), self.data())
        elif kind < 0.93:
            await self.use("ftruncate", opened, self.rng.randrange(12))
        else:
            await self.use("fsync", opened)


async def observe(kernel: Kernel) -> dict[str, bytes]:
    """Look at all there is, one after another; the content of each file."""
    found: dict[str, bytes] = {}
    for directory in ("", *DIRECTORIES):
        await kernel.call(kernel.list, directory)
        for name in INSIDE if directory else FILES:
            path = f"{directory}/{name}" if directory else name
            await kernel.call(kernel.stat, path)
            opened = await kernel.call(kernel.open, path, "r")
            if opened is not None:
                await kernel.call(kernel.read, opened)
                found[path] = kernel.history[-1].result
                await kernel.call(kernel.close, opened)
    return found


async def play(seed: int, path: Path) -> list[Step]:
    """What the processes of this history saw, and one behind them, before and after a restart."""
    chance = Chance(seed)
    rng = random.Random(chance.rng.random())
    CLOCK[0] = 0
    CHANCE[:] = [chance]
    history: list[Step] = []
    async with trio.open_nursery() as nursery:
        world = Shaken(path, nursery, chance)
        await world.start()
        walks, inodes = (
            SecondWalks(world.mount.fs, HELD_S),
            Inodes(world.mount.fs, chance.locks, chance.cached),
        )
        if not chance.locks:
            for name in DIRECTORIES:
                await Kernel(world, walks, inodes, history, 99).change("mkdir", name)
        async with trio.open_nursery() as running:
            for number in range(rng.randrange(2, 7)):
                kernel = Kernel(world, walks, inodes, history, number)
                program = Program(kernel, random.Random(rng.random()), chance)
                running.start_soon(program.run, rng.randrange(4, 14))
        chance.failing = 0.0
        await trio.sleep(2 * HELD_S)
        last = Kernel(world, walks, inodes, history, 99)
        shown = await observe(last)
        if rng.random() < 0.5:
            assert not await world.uploads.flush()
        await trio.sleep(2 * HELD_S)
        assert not world.mount.fs.status()["open_files"]
        used = [dirty_file.key for dirty_file in world.uploads._dirty_files.values() if dirty_file.handles]
        assert not used, f"all is closed, and dirty files are in use: {used}"
        await world.stop()
        if not chance.writeback or rng.random() < 0.7:
            stored = {key: world.bucket.content(key) for key in world.bucket.objects if key[-1] != "/"}
            assert stored == shown, "the origin holds something else than the mount"
        await world.start()
        last = Kernel(world, SecondWalks(world.mount.fs, HELD_S), Inodes(world.mount.fs, True), history, 99)
        assert await observe(last) == shown, "something else is there after a restart"
        await world.stop()
        nursery.cancel_scope.cancel()
    return history


def check(seed: int) -> None:
    from trio._core import _run

    state = _run._r.getstate()
    _run._r.seed(seed)
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            clock = trio.testing.MockClock(autojump_threshold=0)
            history = trio.run(play, seed, Path(place), clock=clock)
    except BaseException as exc:
        raise AssertionError(f"history {seed}: {_innermost(exc)!r}") from exc
    finally:
        _run._r.setstate(state)
    failed = [step for step in history if step.result == FAILED and not CHANCE[0].fails]
    left, best = linear.linearized(history, State())
    if left or failed:
        lines = [f"history {seed}: fails without a reason: {step}" for step in failed]
        lines += [
            f"history {seed}: no order of its steps gives what was seen; {left} do not fit after {best}"
        ]
        lines += [str(step) for step in sorted(history, key=lambda step: step.began)]
        raise AssertionError("\n".join(lines))


def _innermost(exc: BaseException) -> BaseException:
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc


async def in_a_thread(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
    """What the disk does takes its time, too."""
    await trio.sleep(CHANCE[0].pause_s())
    result = function(*arguments)
    await trio.sleep(CHANCE[0].pause_s())
    return result


@pytest.fixture(autouse=True)
def shaken(monkeypatch: pytest.MonkeyPatch, no_threads: None) -> None:
    from trio._core import _run

    monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    monkeypatch.setattr("tests.fs.mount.Bytes", Kept)
    threads.replace(monkeypatch, in_a_thread)


@pytest.mark.parametrize("first", range(0, HISTORIES, IN_A_TEST))
def test_histories(first: int) -> None:
    for seed in range(first, min(first + IN_A_TEST, HISTORIES)):
        check(seed)


@pytest.mark.skipif("CACHEFS_HISTORY" not in os.environ, reason="no history is given")
def test_replay() -> None:
    check(int(os.environ["CACHEFS_HISTORY"]))


def test_what_no_order_gives_is_noticed() -> None:
    """Two readers see two writes in different orders; a read that ended sees what was written later."""
    file = State(files={1: (b"", 0o600)}, names={(0, "a"): 1}, directories={0: 1}, found={-1: 0, 5: 1})

    def steps(*asked: tuple[str, tuple[Any, ...], Any, int, int]) -> list[Step]:
        return [
            Step(n, n, what, arguments, began, ended, result)
            for n, (what, arguments, result, began, ended) in enumerate(asked, 10)
        ]

    changes = [("chmod", (5, mode), OK, 0, 9) for mode in (1, 2)]
    looks = [("stat", (5,), (0, mode, 1), began, began + 1) for mode, began in ((1, 1), (2, 3), (1, 5))]
    assert not linear.linearized(steps(*changes, *looks[:2]), file)[0]
    assert linear.linearized(steps(*changes, *looks), file)[0]
    assert not linear.linearized(steps(changes[0], ("stat", (5,), (0, 1, 1), 0, 1)), file)[0]
    assert linear.linearized(steps(("write", (5, 0, b"1"), OK, 3, 4), ("read", (5,), b"1", 0, 1)), file)[0]
    assert not linear.linearized(steps(("unlink", (-1, "a"), FAILED, 0, 1), ("read", (5,), b"", 2, 3)), file)[
        0
    ]
    assert linear.linearized(steps(("walk", (-1, "a"), "ENOENT", 2, 3)), file)[0]

"""A store that does as it is told, where dirty files go: holds requests back, fails, loses replies, and counts."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio
import trio.testing

from cachefs.base import tasks
from cachefs.base.behind import GATHER_S
from cachefs.base.errors import CachefsError, Conflict, NoSuchUpload, NotFound, ObjectChanged
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.origin import Limits, ObjectInfo, Part, Source
from cachefs.upload import DirtyFile, Uploads, staging
from tests import threads
from tests.upload import counters

SOURCE = "scripted://bucket"
KIB, MIB = 1 << 10, 1 << 20
PART = 64 * KIB


class SmallLimits(Limits):
    """A store of small parts, so that tests have many: 64 KiB each, up to a mebibyte, then larger ones."""

    def part_size(self, sent: int) -> int:
        return max(PART, sent // (16 * PART) * PART)


LIMITS = SmallLimits(1 << 30, 1, 1 << 30, 1000, 1 << 30)


class _Threads:
    """Keeps the clock from jumping while worker threads are busy."""

    def __init__(self) -> None:
        self.busy = 0
        self._some = trio.Event()

    def watched(self, run_sync: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        return functools.partial(self._run, run_sync)

    async def _run(self, run_sync: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        self.busy += 1
        self._some.set()
        try:
            return await run_sync(*args, **kwargs)
        finally:
            self.busy -= 1

    async def watch(self) -> None:
        while True:
            while self.busy:
                time.sleep(0.0005)  # noqa: ASYNC251 - the loop shall be busy, and the threads shall run
                await trio.lowlevel.checkpoint()
            self._some = trio.Event()
            await self._some.wait()


def in_trio(function: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """An async test on a clock that jumps when nothing happens; a hang is a failure."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        async def guarded() -> None:
            threads = _Threads()
            trio.lowlevel.spawn_system_task(threads.watch)
            with (
                trio.CancelScope() as scope,
                mock.patch("trio.to_thread.run_sync", threads.watched(trio.to_thread.run_sync)),
                mock.patch("cachefs.base.tasks.in_worker", threads.watched(tasks.in_worker)),
            ):
                token = trio.lowlevel.current_trio_token()
                watchdog = threading.Timer(60, lambda: token.run_sync_soon(scope.cancel))
                watchdog.start()
                try:
                    await function(*args, **kwargs)
                finally:
                    watchdog.cancel()
            assert not scope.cancelled_caught, "it hangs"

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", trio.TrioDeprecationWarning)
            clock = trio.testing.MockClock(autojump_threshold=0.005)
            trio.run(guarded, strict_exception_groups=False, clock=clock)

    return run


@dataclass
class Rule:
    """The next `times` requests of `kind` (of `key`) wait for `release`, or fail; `lost`: after they took effect."""

    kind: str
    error: Callable[[], Exception] | None = None
    times: int = 1
    key: str | None = None
    lost: bool = False
    reached: trio.Event = field(default_factory=trio.Event)
    release: trio.Event | None = None


class ScriptedStore:
    """Stands in for `cachefs.origin.Origin`, without its patience."""

    can_write = True

    def __init__(self, limits: Limits = LIMITS, source: str = SOURCE) -> None:
        self.source, self.prefix, self.limits = source, "", limits
        self.objects: dict[str, tuple[str, bytes]] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.counts: Counter[str] = Counter()
        self.rules: list[Rule] = []
        self.in_flight = self.most_in_flight = 0
        self.latency_s = 0.0
        self.tokens: dict[str, tuple[str, str]] = {}
        self.seen: dict[str, list[bytes]] = {}  # every content a key ever showed
        self._numbers = itertools.count(1)

    def name(self, key: str) -> str:
        return f"{self.source}/{key}"

    def show(self, key: str, data: bytes) -> ObjectInfo:
        etag = f'"{hashlib.md5(data).hexdigest()}-{next(self._numbers)}"'
        self.objects[key] = (etag, data)
        self.seen.setdefault(key, []).append(data)
        return ObjectInfo(key, len(data), next(self._numbers), etag)

    def version(self, key: str) -> ObjectId:
        etag, data = self.objects[key]
        return ObjectId(self.source, key, etag, len(data))

    def content(self, key: str) -> bytes:
        return self.objects[key][1]

    def hold(self, kind: str, **how: Any) -> Rule:
        self.rules.append(Rule(kind, release=trio.Event(), **how))
        return self.rules[-1]

    def fail(self, kind: str, error: Callable[[], Exception], **how: Any) -> Rule:
        self.rules.append(Rule(kind, error, **how))
        return self.rules[-1]

    @asynccontextmanager
    async def request(self, kind: str, key: str) -> AsyncIterator[None]:
        self.counts[kind] += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        rule = next((r for r in self.rules if r.kind == kind and r.key in (None, key)), None)
        try:
            await trio.sleep(self.latency_s)
            if rule is not None:
                rule.times -= 1
                if not rule.times and rule in self.rules:
                    self.rules.remove(rule)
                rule.reached.set()
                if rule.release is not None:
                    await rule.release.wait()
                if rule.error is not None and not rule.lost:
                    raise rule.error()
            yield
            if rule is not None and rule.error is not None and rule.lost:
                raise rule.error()
        finally:
            self.in_flight -= 1

    def _check(self, key: str, if_match: str | None, if_absent: bool) -> None:
        there = self.objects.get(key)
        if (if_absent and there) or (if_match and (there is None or there[0] != if_match)):
            raise Conflict(key)

    async def put(
        self,
        key: str,
        source: Any,
        size: int,
        *,
        if_match: str | None = None,
        if_absent: bool = False,
        token: str = "",
        settle: bool = True,
        ticket: Any = None,
    ) -> ObjectInfo:
        assert not settle, "a HEAD would double the time that a small file takes"
        async with self.request("put", key):
            self._check(key, if_match, if_absent)
            data = source.read(0, size)
            assert len(data) == size
            info = self.show(key, data)
            self.tokens[key] = (info.etag, token)
        return info

    async def ours(self, key: str, token: str, size: int | None, error: CachefsError) -> ObjectInfo:
        etag, data = self.objects.get(key, ("", b""))
        if etag and self.tokens.get(key) == (etag, token):
            return ObjectInfo(key, len(data), 0, etag)
        raise error

    async def begin_upload(self, key: str) -> ScriptedUpload:
        async with self.request("begin", key):
            name = f"upload{next(self._numbers)}"
            self.uploads[name] = (key, {})
        return ScriptedUpload(self, key, name)

    def resume_upload(self, key: str, state: Any) -> ScriptedUpload:
        return ScriptedUpload(self, key, state["id"])

    async def copy(self, key: str, to: str, *, size: int, etag: str | None = None) -> ObjectInfo:
        async with self.request("copy", key):
            if key not in self.objects:
                raise NotFound(key)
            if etag not in (None, self.objects[key][0]):
                raise ObjectChanged(key)
            return self.show(to, self.objects[key][1])

    async def delete(self, key: str) -> None:
        async with self.request("delete", key):
            self.objects.pop(key, None)

    async def head(self, key: str) -> ObjectInfo:
        async with self.request("head", key):
            etag, data = self.objects[key]
            return ObjectInfo(key, len(data), 0, etag)

    async def look(self, key: str) -> tuple[ObjectInfo, str]:
        async with self.request("head", key):
            if key not in self.objects:
                raise NotFound(key)
            etag, data = self.objects[key]
            made_by, token = self.tokens.get(key, ("", ""))
            return ObjectInfo(key, len(data), 0, etag), token if made_by == etag else ""


class ScriptedUpload:
    def __init__(self, store: ScriptedStore, key: str, name: str) -> None:
        self.store, self.key, self.id = store, key, name
        self.known: dict[int, Part] = {}

    def state(self) -> dict[str, Any]:
        return {"id": self.id, "stamp": f"token of {self.id}", "parts": {}}

    def _parts(self) -> dict[int, bytes]:
        if self.id not in self.store.uploads:
            raise NoSuchUpload(self.id)
        return self.store.uploads[self.id][1]

    async def part(self, number: int, source: Source, length: int, *, ticket: Any = None) -> str:
        async with self.store.request("part", self.key):
            data = source.read(0, length)
            if len(data) != length:
                raise CachefsError("the source of a write is shorter than was said")
            self._parts()[number] = data
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        self.known[number] = Part(etag, length)
        return etag

    async def parts(self) -> dict[int, Part]:
        async with self.store.request("parts", self.key):
            held = self._parts()
        self.known = {n: Part(f'"{hashlib.md5(d).hexdigest()}"', len(d)) for n, d in held.items()}
        return self.known

    async def complete(
        self,
        numbers: list[int],
        *,
        if_match: str | None = None,
        if_absent: bool = False,
        settle: bool = True,
    ) -> ObjectInfo:
        async with self.store.request("complete", self.key):
            held = self._parts()
            self.store._check(self.key, if_match, if_absent)
            for number in numbers:
                assert self.known[number].etag == f'"{hashlib.md5(held[number]).hexdigest()}"'
            info = self.store.show(self.key, b"".join(held[n] for n in sorted(numbers)))
            self.store.tokens[self.key] = (info.etag, f"token of {self.id}")
            del self.store.uploads[self.id]
        return info

    async def abort(self) -> None:
        async with self.store.request("abort", self.key):
            self.store.uploads.pop(self.id, None)


class Room:
    """A cache beside it: takes files, or not."""

    hangs = False

    def __init__(self, adopts: bool = True) -> None:
        self.adopts = adopts
        self.adopted: dict[ObjectId, bytes] = {}
        self.asked: list[int] = []
        self.given: list[int] = []  # small files, together
        self.listed: list[bytes | None] = []  # what it had of each version that its index was to list

    async def adopt(self, object_id: ObjectId, path: Path) -> bool:
        await trio.lowlevel.checkpoint()
        if self.adopts:
            self.adopted[object_id] = path.read_bytes()  # noqa: ASYNC240
            path.rename(path.with_name(path.name + ".adopted"))  # noqa: ASYNC240
        return self.adopts

    async def adopt_bytes(self, versions: Sequence[tuple[ObjectId, bytes]]) -> list[bool]:
        self.given.append(len(versions))
        return [await self._adopt_bytes(object_id, data) for object_id, data in versions]

    async def _adopt_bytes(self, object_id: ObjectId, data: bytes) -> bool:
        """As a file that a thread makes of it."""
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "held"
            try:
                os.close(await trio.to_thread.run_sync(staging._written_file, path, data))
            except OSError:
                return False
            return await self.adopt(object_id, path)

    def take_out(self, backing: Path, users: int, path: Path) -> int | None:
        """`backing` is the file."""
        if not backing.exists():
            return None
        backing.rename(path)
        return os.open(path, os.O_RDONLY)

    async def recast(self, old: ObjectId, new: ObjectId) -> bool:
        if (data := self.adopted.pop(old, None)) is not None:
            self.adopted[new] = data
        return data is not None

    async def list_all(self, object_id: ObjectId) -> None:
        self.listed.append(self.adopted.get(object_id))

    async def evict_to_hold(self, wanted: int) -> bool:
        self.asked.append(wanted)
        return False


class Turns:
    """Counts what threads are asked to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        run_sync = trio.to_thread.run_sync

        async def counted(*args: Any, **how: Any) -> Any:
            self.count += 1
            return await run_sync(*args, **how)

        threads.replace(monkeypatch, counted)


class Desk:
    """What a test holds in its hand."""

    def __init__(self, uploads: Uploads, store: Any, cache: Room, metrics: Metrics, path: Path) -> None:
        self.uploads, self.store, self.cache, self.metrics = uploads, store, cache, metrics
        self.staging, self.state = path / "staging", path / "state"
        self.told: list[tuple[str, ObjectInfo]] = []
        self.settled: list[str] = []
        uploads.on_committed = lambda dirty_file, info: self.told.append((dirty_file.key, info))
        uploads.on_settled = lambda dirty_file: self.settled.append(dirty_file.key)

    async def create(self, key: str = "k", data: bytes = b"", **how: Any) -> DirtyFile:
        """An open dirty file with this content."""
        dirty_file = await self.uploads.begin(self.store, key, **how)
        self.uploads.open(dirty_file)
        if data:
            await dirty_file.write(0, data)
        return dirty_file

    async def close(self, dirty_file: DirtyFile) -> None:
        """As close(2) and what follows."""
        try:
            await self.uploads.commit(dirty_file)
        finally:
            self.uploads.release(dirty_file)

    async def save(self, key: str, data: bytes, **how: Any) -> DirtyFile:
        dirty_file = await self.create(key, data, **how)
        await self.close(dirty_file)
        return dirty_file

    async def rename(self, dirty_file: DirtyFile, key: str, **how: Any) -> None:
        """As rename(2) does it."""
        old = dirty_file.key
        if await self.uploads.rename(dirty_file, key, **how):
            await self.store.delete(old)

    async def quiet(self) -> None:
        """Until nothing happens any more by itself (but what time brings)."""
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked(0.01)
            # What time brings soon: they are gathered.
            while self.uploads.journal._next.rows or self.uploads._together.waiting:
                await trio.sleep(GATHER_S)
                await trio.testing.wait_all_tasks_blocked(0.01)

    async def files(self) -> list[str]:
        """Of the staging directory, once what was removed has gone."""
        await self.uploads._disk.quiet()
        return sorted(p.name for p in self.staging.iterdir() if p.suffix != ".adopted")


def let_go(uploads: Uploads) -> None:
    """A dead process has no file open."""
    for dirty_file in uploads._dirty_files.values():
        while dirty_file.handles:
            dirty_file.release()


class ScriptedReader:
    """Reads versions that a `ScriptedStore` has; the last `short` bytes of each are missing."""

    def __init__(self, short: int = 0) -> None:
        self.short = short
        self.users = 0

    def open(self, origin: Any, object_id: ObjectId) -> bytes:
        etag, data = origin.objects[object_id.key]
        assert etag == object_id.etag
        self.users += 1
        return bytes(data[: len(data) - self.short])

    def close(self, opened: bytes) -> None:
        self.users -= 1

    async def read(self, opened: bytes, offset: int, size: int, pid: int) -> bytes:
        return opened[offset : offset + size]


async def add(dirty_file: DirtyFile, data: bytes) -> None:
    """Write at the end."""
    await dirty_file.write(dirty_file.size, data)


@asynccontextmanager
async def desk(
    path: Path,
    store: Any = None,
    cache: Room | None = None,
    recover: bool = True,
    outlived: bool = False,
    **how: Any,
) -> AsyncIterator[Desk]:
    """A room over `store`, until this ends; then its journal is closed and all else is as a kill would leave it. `outlived`:
    the test has a file of it open longer."""
    store = store or ScriptedStore()
    cache = cache or Room()
    metrics = Metrics()

    async with trio.open_nursery() as nursery:
        uploads = Uploads(
            path / "state",
            path / "staging",
            [store],
            cache,
            metrics,
            nursery=nursery,
            reader=how.pop("reader", ScriptedReader()),
            **how,
        )
        try:
            if recover:
                await uploads.recover()
                nursery.start_soon(uploads.run)
            yield Desk(uploads, store, cache, metrics, path)
            counters.check_rows(uploads)
        finally:
            nursery.cancel_scope.cancel()
            uploads.journal.close()
            let_go(uploads)
    with trio.fail_after(10):
        await uploads._disk.quiet()
    counters.check_unused(uploads)
    if not outlived:
        counters.check_closed(path)

"""A filesystem, a cache and a prefetcher over a bucket that counts, on a clock that jumps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from cachefs.base.behind import WriteBehind
from cachefs.base.database import Database
from cachefs.base.errors import ObjectChanged
from cachefs.fs import FORMAT, TABLES, FileSystem, Volume
from cachefs.prefetch import Prefetcher
from tests.fs.bucket import Bucket
from tests.fs.mount import ROOT, Clock, options_of
from tests.store.lab import KIB, MIB, Lab, running

LARGE_FILE = 4 * MIB + 64 * KIB


def content(key: str, size: int) -> bytes:
    pattern = f"<{key}>".encode()
    return (pattern * (size // len(pattern) + 1))[:size]


class Shop(Bucket):
    """A bucket whose objects can be read: each GET takes `latency` and is counted, at most 64 at a time."""

    def __init__(self, keys: Sequence[str] = (), *, size: int = 1000, latency: float = 0.02) -> None:
        super().__init__(delay=0.001)
        self.latency = latency
        self.gets: list[tuple[str, int, int]] = []
        self.refuse: Callable[[str], Exception | None] = lambda key: None
        self.most_in_flight = self._in_flight = 0
        self._gate = trio.Semaphore(64)
        for key in keys:
            self.put(key, size)

    @property
    def got(self) -> list[str]:
        return [key for key, _, _ in self.gets]

    def begin(self, *_: object, **__: object) -> None:
        """Every attempt has a task here."""

    async def read(self, key: str, etag: str, start: int, stop: int, sink: Any, **how: Any) -> None:
        async with self._gate:
            self.gets.append((key, start, stop))
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            try:
                await trio.sleep(self.latency)
            finally:
                self._in_flight -= 1
            failure = self.refuse(key)
            if failure is not None:
                raise failure
            found = self.objects.get(key)
            if found is None or found.etag != etag:
                raise ObjectChanged(f"{key} was replaced")
            sink.write(memoryview(content(key, found.size))[start:stop])


class World:
    def __init__(self, shop: Shop, lab: Lab, fs: FileSystem, prefetcher: Prefetcher) -> None:
        self.shop = shop
        self.lab = lab
        self.fs = fs
        self.prefetcher = prefetcher
        self.metrics = lab.metrics

    async def look(self, path: str, offset: int, size: int, pid: int = 1) -> None:
        """Open, read a part, close."""
        ino, _ = await self._find(path)
        fh, _ = self.fs.open_now(ino, os.O_RDONLY, pid) or await self.fs.open(ino, os.O_RDONLY, pid)
        now = self.fs.read_now(fh, offset, size)
        data = bytes(await self.fs.read(fh, offset, size) if now is None else now)
        self.fs.release(fh)
        assert data == content(path, offset + size)[offset:]

    async def _find(self, path: str) -> tuple[int, int]:
        """Number and size."""
        ino, size = ROOT, 0
        for name in os.fsencode(path).split(b"/"):
            found, _ = self.fs.lookup_now(ino, name) or await self.fs.lookup(ino, name)
            assert found is not None, path
            ino, size = found.ino, found.size
        return ino, size

    async def read(self, path: str, pid: int = 1) -> bytes:
        """Open, read all, close; checked against what the store has."""
        ino, size = await self._find(path)
        fh, _ = self.fs.open_now(ino, os.O_RDONLY, pid) or await self.fs.open(ino, os.O_RDONLY, pid)
        try:
            parts = []
            for at in range(0, size, MIB):
                now = self.fs.read_now(fh, at, MIB)
                parts.append(bytes(await self.fs.read(fh, at, MIB) if now is None else now))
            data = b"".join(parts)
        finally:
            self.fs.release(fh)
        assert data == content(path, size)
        return data

    async def read_all(self, paths: Sequence[str], workers: int = 4, think: float = 0.0002) -> None:
        """`workers` processes, each its share, one file after the other."""

        async def work(pid: int) -> None:
            for path in paths[pid::workers]:
                await self.read(path, 100 + pid)
                await trio.sleep(think)

        async with trio.open_nursery() as nursery:
            for pid in range(workers):
                nursery.start_soon(work, pid)

    async def quiet(self) -> None:
        """Until nothing more is fetched."""
        await trio.sleep(5)


@asynccontextmanager
async def world(
    shop: Shop,
    *,
    ssd: int = 256 * MIB,
    budget: int = 128 * MIB,
    slots: int = 56,
    plans: Path | None = None,
    **options: Any,
) -> AsyncIterator[World]:
    origin: Any = shop
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        database = WriteBehind(Database(Path(place) / "names", TABLES, version=FORMAT, fsync=False))
        async with running(Path(place) / "cache", origin, ssd=ssd, readahead=4 * MIB) as lab:
            shape, ttls = options_of(**options)
            volumes = [Volume("", origin, ttls)]
            fs = FileSystem(volumes, database, lab.fetcher, shape, lab.metrics, Clock())
            prefetcher = Prefetcher(
                fs,
                lab.fetcher,
                volumes,
                lab.metrics,
                slots=slots,
                capacity=lambda: 2 * budget,
                directory=plans or Path(place) / "plans",
                clock=Clock(),
            )
            fs.watch_opens(prefetcher.opened, prefetcher.awaited)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(prefetcher.run)
                try:
                    yield World(shop, lab, fs, prefetcher)
                finally:
                    nursery.cancel_scope.cancel()
            await fs.aclose()
        database.close()

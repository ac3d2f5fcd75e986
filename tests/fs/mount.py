"""A filesystem over a `Bucket`, with a clock to turn and the walks a kernel would do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from cachefs.database import Database
from cachefs.errors import ObjectChanged
from cachefs.fs import FORMAT, TABLES, Attributes, Entry, FileSystem, Options, Volume
from cachefs.metrics import Metrics
from tests.fs.bucket import Bucket, Bytes

ROOT = 1


class Clock:
    """Goes with trio's virtual time; `now` is what it shows at time 0, to be turned forward."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        try:
            return self.now + trio.current_time()
        except RuntimeError:
            return self.now


class Mount:
    def __init__(self, path: Path, volumes: Sequence[Volume], options: Options, clock: Clock) -> None:
        self.metrics = Metrics()
        self.clock = clock
        origin: Any = volumes[0].origin
        self.bytes = Bytes(origin)
        self.database = Database(path, TABLES, version=FORMAT, fsync=False)
        self.fs = FileSystem(volumes, self.database, self.bytes, options, self.metrics, clock)
        self.invalidated: list[tuple[int, int, bytes]] = []
        self.fs.on_invalidate = lambda ino, parent, name: self.invalidated.append((ino, parent, name))

    def close(self) -> None:
        self.database.close()

    async def stat(self, path: str | bytes) -> Attributes | None:
        """As the kernel resolves a path: a lookup per component; None for ENOENT and ENOTDIR."""
        ino, found = ROOT, (await self.fs.getattr(ROOT))[0]
        for name in os.fsencode(path).split(b"/"):
            if not found.is_dir:
                return None
            answer = self.fs.lookup_now(ino, name) or await self.fs.lookup(ino, name)
            if answer[0] is None:
                return None
            found, ino = answer[0], answer[0].ino
        return found

    async def ino(self, path: str | bytes) -> int:
        found = await self.stat(path)
        assert found is not None, path
        return found.ino

    async def entries(self, ino: int = ROOT, limit: int = 100) -> list[Entry]:
        handle = await self.fs.opendir(ino)
        try:
            found: list[Entry] = []
            while page := await self.fs.readdir(handle, found[-1].next_offset if found else 0, limit):
                found += page
            return found
        finally:
            self.fs.releasedir(handle)

    async def names(self, path: str = "", limit: int = 100) -> list[bytes]:
        return [e.name for e in await self.entries(await self.ino(path) if path else ROOT, limit)]

    async def read(self, path: str, size: int = 1 << 20) -> bytes:
        try:
            fh, _, _ = await self.fs.open(await self.ino(path), os.O_RDONLY, 1)
        except ObjectChanged:  # ESTALE: the kernel walks the path once more, asking for each name
            fh, _, _ = await self.fs.open(await self.ino(path), os.O_RDONLY, 1)
        try:
            now = self.fs.read_now(fh, 0, size)
            return bytes(await self.fs.read(fh, 0, size) if now is None else now)
        finally:
            self.fs.release(fh)

    async def walk(self, ino: int = ROOT, above: bytes = b"") -> dict[bytes, int | None]:
        """path → size, or None for a directory; every entry is looked up too."""
        tree: dict[bytes, int | None] = {}
        for entry in await self.entries(ino, limit=3):
            looked, _ = await self.fs.lookup(ino, entry.name)
            assert looked is not None
            assert entry.attributes == looked or not entry.ttl
            path = above + entry.name
            assert path not in tree
            tree[path] = None if looked.is_dir else looked.size
            if looked.is_dir:
                tree |= await self.walk(looked.ino, path + b"/")
        return tree


@asynccontextmanager
async def mounted(
    bucket: Bucket,
    *,
    path: Path | None = None,
    clock: Clock | None = None,
    volumes: Sequence[Volume] | None = None,
    **options: Any,
) -> AsyncIterator[Mount]:
    origin: Any = bucket
    with tempfile.TemporaryDirectory(dir="/dev/shm") as fresh:
        mount = Mount(
            path or Path(fresh),
            volumes or [Volume("", origin)],
            Options(uid=1000, gid=1000, **options),
            clock or Clock(),
        )
        try:
            yield mount
        finally:
            await mount.fs.aclose()
            mount.close()

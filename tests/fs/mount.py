"""A filesystem over a `Bucket`, with a clock to turn and the walks a kernel would do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from cachefs.base.behind import WriteBehind
from cachefs.base.database import Database
from cachefs.base.errors import AlreadyExists, NotFound, ObjectChanged
from cachefs.base.metrics import Metrics
from cachefs.fs import FORMAT, TABLES, Attributes, Entry, FileSystem, Options, Ttls, Volume
from tests.fs import counters
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


def options_of(**given: Any) -> tuple[Options, Ttls]:
    """The options of a mount of user 1000, and the TTLs of its volumes, from both together."""
    ttl = float("inf") if given.pop("immutable", False) else given.pop("metadata_ttl", Ttls().ttl)
    negative_ttl = given.pop("negative_ttl", Ttls().negative_ttl)
    ttls = Ttls(ttl, negative_ttl, given.pop("revalidate_at_open", False))
    return Options(**{"uid": 1000, "gid": 1000, **given}), ttls


class Mount:
    def __init__(
        self, path: Path, volumes: Sequence[Volume], options: Options, clock: Clock, writer: Any = None
    ) -> None:
        self.metrics = Metrics()
        self.clock = clock
        origin: Any = volumes[0].origin
        self.bytes = Bytes(origin)
        self.database = WriteBehind(Database(path, TABLES, version=FORMAT, fsync=False))
        self.fs = FileSystem(volumes, self.database, self.bytes, options, self.metrics, clock, writer)
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
        if found is None:
            raise NotFound(os.fsdecode(path))
        return found.ino

    async def entries(self, ino: int = ROOT, limit: int = 100) -> list[Entry]:
        handle = self.fs.opendir(ino)
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
            fh, _ = await self.fs.open(await self.ino(path), os.O_RDONLY, 1)
        except ObjectChanged:  # ESTALE: the kernel walks the path once more, asking for each name
            fh, _ = await self.fs.open(await self.ino(path), os.O_RDONLY, 1)
        try:
            now = self.fs.read_now(fh, 0, size)
            return bytes(await self.fs.read(fh, 0, size) if now is None else now)
        finally:
            self.fs.release(fh)

    async def parent(self, path: str) -> tuple[int, bytes]:
        above, _, name = path.rpartition("/")
        return (await self.ino(above) if above else ROOT), os.fsencode(name)

    async def open(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
        """open(2): a lookup, then a create or an open, walked once more after ESTALE."""
        for attempt in (1, 2):
            try:
                parent, name = await self.parent(path)
                found = await self.stat(path)
                if found is None and flags & os.O_CREAT:
                    _, _, opened = await self.fs.create(parent, name, flags, mode, 1, 1000, 1000)
                    return opened[0]
                if found is None:
                    raise NotFound(path)
                if flags & os.O_EXCL:
                    raise AlreadyExists(path)
                now = self.fs.open_now(found.ino, flags, 1)
                return (now or await self.fs.open(found.ino, flags, 1))[0]
            except ObjectChanged:
                if attempt == 2:
                    raise
        raise AssertionError

    async def close_file(self, fh: int) -> None:
        """close(2) of the last descriptor."""
        try:
            await self.fs.flush(fh)
        finally:
            self.fs.release(fh)

    async def write(
        self, path: str, data: bytes, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC, at: int = 0
    ) -> None:
        fh = await self.open(path, flags)
        try:
            if data:
                assert await self.pwrite(fh, at, data) == len(data)
        finally:
            await self.close_file(fh)

    async def pwrite(self, fh: int, offset: int, data: bytes) -> int:
        now = self.fs.write_now(fh, offset, data)
        return await self.fs.write(fh, offset, data) if now is None else now

    async def fstat(self, fh: int) -> Attributes:
        """fstat(2): the kernel asks by the number that was opened."""
        ino = self.fs._files.handles[fh].ino
        return (self.fs.attributes_now(ino) or await self.fs.getattr(ino))[0]

    async def pread(self, fh: int, offset: int = 0, size: int = 1 << 20) -> bytes:
        now = self.fs.read_now(fh, offset, size)
        return bytes(await self.fs.read(fh, offset, size) if now is None else now)

    async def mkdir(self, path: str, mode: int = 0o755) -> int:
        return (await self.fs.mkdir(*await self.parent(path), mode, 1000, 1000))[0].ino

    async def unlink(self, path: str) -> None:
        await self.fs.unlink(*await self.parent(path))

    async def rmdir(self, path: str) -> None:
        await self.fs.rmdir(*await self.parent(path))

    async def rename(self, path: str, to: str, flags: int = 0, *, again: bool = False) -> None:
        await self.fs.rename(*await self.parent(path), *await self.parent(to), flags, again=again)

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
    writer: Any = None,
    **options: Any,
) -> AsyncIterator[Mount]:
    origin: Any = bucket
    shape, ttls = options_of(**options)
    volumes = [replace(volume, ttls=ttls) for volume in volumes or [Volume("", origin)]]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as fresh:
        mount = Mount(path or Path(fresh), volumes, shape, clock or Clock(), writer)
        try:
            yield mount
            counters.check_unused(mount.fs)
        finally:
            await mount.fs.aclose()
            mount.close()

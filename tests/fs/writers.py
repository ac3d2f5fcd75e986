"""A `Writer` in memory: dirty files are bytearrays, a commit is one PUT. What the upload room is to the filesystem."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from cachefs.base.errors import CachefsError, NotFound, ObjectChanged
from cachefs.base.names import ObjectId
from cachefs.origin import InMemory
from cachefs.origin.protocol import ObjectInfo


class MemoryBacking:
    """`data` is what the kernel has made of the file since the last look."""

    fd = -1

    def __init__(self, number: int) -> None:
        self.id = number
        self.data: bytearray | None = None

    def registered(self, backing_id: int) -> None:
        raise AssertionError("it is already")

    def reuse(self) -> bool:
        return False


class MemoryDirtyFile:
    def __init__(self, name: str, origin: Any, key: str, data: bytes, mtime_ns: int, attrs: Any) -> None:
        self.id, self.origin, self.key = name, origin, key
        self.data = bytearray(data)
        self.mtime_ns = mtime_ns
        self.attrs = dict(attrs)
        self.ino = 0
        self.handles = 0
        self.dirty, self.discarded, self.conflicts = True, False, False
        self.changed: Callable[[MemoryDirtyFile], None] = lambda dirty_file: None
        self.made: ObjectInfo | None = None
        self.passthrough: MemoryBacking | None = None
        self.writers = 0
        self.base: str | None = None

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def backing(self) -> MemoryBacking | None:
        return self.passthrough

    @property
    def committed(self) -> ObjectInfo | None:
        return None if self.dirty else self.made

    def read_now(self, offset: int, size: int) -> bytes | None:
        return None if offset % 2 else bytes(self.data[offset : offset + size])

    async def read(self, offset: int, size: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def look(self) -> bool:
        """The kernel's writes are in `passthrough.data`, if it has the file."""
        if self.passthrough is None or self.passthrough.data is None:
            return False
        self.data, self.passthrough.data, self.dirty = self.passthrough.data, None, True
        self.changed(self)
        return True

    def write_now(self, offset: int, data: Any) -> bool:
        if offset % 2 or offset > self.size:
            return False
        self.data[offset : offset + len(data)] = data
        self.dirty = True
        return True

    async def write(self, offset: int, data: Any) -> None:
        await self.truncate(max(self.size, offset))
        self.data[offset : offset + len(data)] = data
        self.dirty = True

    async def truncate(self, size: int) -> None:
        self.dirty |= size != self.size
        del self.data[size:]
        self.data.extend(bytes(size - self.size))

    async def allocate(self, offset: int, length: int) -> None:
        await self.truncate(max(self.size, offset + length))


class MemoryWriter:
    """`writeback`: a commit promises and nothing else; `upload_all` brings what is pending to the store."""

    def __init__(self, *, writeback: bool = False) -> None:
        self.on_committed: Callable[[Any, ObjectInfo], None] = lambda dirty_file, info: None
        self.on_settling: Callable[[Any], bool] = lambda dirty_file: True
        self.on_settled: Callable[[Any], None] = lambda dirty_file: None
        self.on_changed: Callable[[Any], None] = lambda dirty_file: None
        self.passthrough = False
        self.takes = False
        self.taken: list[int] = []  # by how many users
        self.settles = True  # False: the cache takes its time
        self.writeback = writeback
        self.failure: CachefsError | None = None
        self.dirty_files: list[MemoryDirtyFile] = []
        self.noted: dict[str, dict[str, Any]] = {}
        self.stored_before: list[Any] = []
        self.kept_cached = 0  # calls of `keep_cached`
        self._names = map(str, itertools.count(1))

    async def begin(
        self,
        origin: Any,
        key: str,
        *,
        base: ObjectId | None,
        upto: int | None,
        mtime_ns: int,
        attrs: dict[str, Any],
    ) -> MemoryDirtyFile:
        data = b""
        if base is not None and base.size and upto != 0:
            if key not in origin.objects:
                raise NotFound(key)
            if origin.objects[key].etag != base.etag:
                raise ObjectChanged(key)
            data = origin.content(key)[:upto]
        dirty_file = MemoryDirtyFile(next(self._names), origin, key, data, mtime_ns, attrs)
        dirty_file.base = base and base.etag
        dirty_file.changed = self.on_changed
        self.dirty_files.append(dirty_file)
        return dirty_file

    def begin_now(self, *what: Any) -> None:
        return None

    def take(
        self, origin: Any, base: ObjectInfo, backing: Any, users: int, attrs: Any
    ) -> MemoryDirtyFile | None:
        if not self.takes:
            return None
        dirty_file = MemoryDirtyFile(
            next(self._names), origin, base.key, origin.content(base.key), base.mtime_ns, attrs
        )
        dirty_file.dirty, dirty_file.made, dirty_file.base = False, base, base.etag
        dirty_file.passthrough = MemoryBacking(backing.id)
        dirty_file.changed = self.on_changed
        self.dirty_files.append(dirty_file)
        self.taken.append(users)
        return dirty_file

    def open(self, dirty_file: MemoryDirtyFile) -> None:
        assert dirty_file in self.dirty_files, "it was settled: its file is the cache's"
        dirty_file.handles += 1

    async def open_backing(self, dirty_file: MemoryDirtyFile) -> MemoryBacking | None:
        if not self.passthrough:
            return None
        dirty_file.writers += 1
        dirty_file.passthrough = dirty_file.passthrough or MemoryBacking(int(dirty_file.id))
        return dirty_file.passthrough

    def returned(self, dirty_file: MemoryDirtyFile) -> None:
        dirty_file.look()
        dirty_file.writers -= 1
        assert dirty_file.writers >= 0

    def release(self, dirty_file: MemoryDirtyFile) -> None:
        dirty_file.handles -= 1
        assert dirty_file.handles >= dirty_file.writers
        if not dirty_file.handles:
            dirty_file.passthrough = None
        self._settle(dirty_file)

    def _settle(self, dirty_file: MemoryDirtyFile) -> None:
        if self.settles and not dirty_file.handles and (dirty_file.discarded or not dirty_file.dirty):
            self.dirty_files.remove(dirty_file)
            self.on_settled(dirty_file)

    def nameless(self) -> list[MemoryDirtyFile]:
        return []

    def outlive(self, dirty_file: MemoryDirtyFile, ino: int, *, named: bool) -> None:
        dirty_file.ino = ino

    async def commit(self, dirty_file: MemoryDirtyFile) -> None:
        dirty_file.look()
        if not self.writeback and dirty_file.dirty and not dirty_file.discarded:
            await self.upload(dirty_file)

    async def upload(self, dirty_file: MemoryDirtyFile) -> None:
        if self.failure is not None:
            raise self.failure
        data = bytes(dirty_file.data)
        info = await dirty_file.origin.put(dirty_file.key, InMemory(data), len(data))
        if data == bytes(dirty_file.data):
            dirty_file.dirty, dirty_file.made, dirty_file.base = False, info, info.etag
            self.on_committed(dirty_file, info)
            self._settle(dirty_file)

    async def upload_all(self) -> None:
        for dirty_file in self.pending():
            await self.upload(dirty_file)

    async def rename(
        self,
        dirty_file: MemoryDirtyFile,
        key: str,
        *,
        base: str | None,
        over: Any = None,
        upload: bool = True,
        leaves: Any = None,
    ) -> bool:
        origin, old, made = dirty_file.origin, dirty_file.key, dirty_file.made
        if made is not None and not dirty_file.dirty:
            info = await origin.copy(old, key, size=made.size, etag=made.etag)
            dirty_file.key, dirty_file.made, dirty_file.base = key, info, info.etag
            self.on_committed(dirty_file, info)
            return True
        before = dirty_file.base
        if before is not None and not upload:
            info = await origin.copy(old, key, size=origin.objects[old].size, etag=before)
            dirty_file.key, dirty_file.base = key, info.etag
            return True
        dirty_file.key, dirty_file.base = key, base
        if before is not None:
            try:
                await self.upload(dirty_file)
            except CachefsError:
                dirty_file.key, dirty_file.base = old, before
                raise
        return before is not None

    async def discard(
        self,
        dirty_file: MemoryDirtyFile,
        *,
        replaced: bool,
        instead: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        if instead is not None:
            await instead()
        dirty_file.discarded = True
        if not dirty_file.handles:
            self.dirty_files.remove(dirty_file)

    async def disk_answers(self) -> None:
        pass

    async def copy_comes(self, dirty_file: MemoryDirtyFile, size: int) -> None:
        assert not dirty_file.discarded

    async def keep_cached(self, version: ObjectId, dirty_file: MemoryDirtyFile | None) -> None:
        self.kept_cached += 1

    async def moved(self, old: ObjectId, new: ObjectId) -> None:
        assert old.size == new.size

    async def note(self, name: str, row: dict[str, Any] | None) -> None:
        if row is None:
            self.noted.pop(name, None)
        else:
            self.noted[name] = row

    def notes(self) -> dict[str, dict[str, Any]]:
        return dict(self.noted)

    def pending(self) -> list[MemoryDirtyFile]:
        return [
            dirty_file for dirty_file in self.dirty_files if dirty_file.dirty and not dirty_file.discarded
        ]

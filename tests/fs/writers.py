"""A `Writer` in memory: drafts are bytearrays, a commit is one PUT. What the upload room is to the filesystem."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from cachefs.errors import CachefsError, ObjectChanged
from cachefs.names import ObjectId
from cachefs.origin.protocol import ObjectInfo
from cachefs.origin.writing import InMemory


class MemoryLoan:
    """`data` is what the kernel has made of the file since the last look."""

    fd = -1

    def __init__(self, number: int) -> None:
        self.id = number
        self.data: bytearray | None = None

    def registered(self, backing_id: int) -> None:
        raise AssertionError("it is already")


class MemoryDraft:
    def __init__(self, name: str, origin: Any, key: str, data: bytes, mtime_ns: int, attrs: Any) -> None:
        self.id, self.origin, self.key = name, origin, key
        self.data = bytearray(data)
        self.mtime_ns = mtime_ns
        self.attrs = dict(attrs)
        self.handles = 0
        self.dirty, self.discarded, self.conflicts = True, False, False
        self.changed: Callable[[MemoryDraft], None] = lambda draft: None
        self.made: ObjectInfo | None = None
        self.lent: MemoryLoan | None = None
        self.writers = 0
        self.base: str | None = None

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def committed(self) -> ObjectInfo | None:
        return None if self.dirty else self.made

    def read_now(self, offset: int, size: int) -> bytes | None:
        return None if offset % 2 else bytes(self.data[offset : offset + size])

    async def read(self, offset: int, size: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def look(self) -> bool:
        """The kernel's writes are in `lent.data`, if it has the file."""
        if self.lent is None or self.lent.data is None:
            return False
        self.data, self.lent.data, self.dirty = self.lent.data, None, True
        self.changed(self)
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
        self.on_committed: Callable[[Any, ObjectInfo], None] = lambda draft, info: None
        self.on_settling: Callable[[Any], bool] = lambda draft: True
        self.on_settled: Callable[[Any], None] = lambda draft: None
        self.on_changed: Callable[[Any], None] = lambda draft: None
        self.lends = False
        self.writeback = writeback
        self.failure: CachefsError | None = None
        self.drafts: list[MemoryDraft] = []
        self.noted: dict[str, dict[str, Any]] = {}
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
    ) -> MemoryDraft:
        data = b""
        if base is not None and base.size and upto != 0:
            if origin.objects[key].etag != base.etag:
                raise ObjectChanged(key)
            data = origin.content(key)[:upto]
        draft = MemoryDraft(next(self._names), origin, key, data, mtime_ns, attrs)
        draft.base = base and base.etag
        draft.changed = self.on_changed
        self.drafts.append(draft)
        return draft

    def open(self, draft: MemoryDraft) -> None:
        assert not draft.handles or draft in self.drafts
        draft.handles += 1

    async def lend(self, draft: MemoryDraft) -> MemoryLoan | None:
        if not self.lends:
            return None
        draft.writers += 1
        draft.lent = draft.lent or MemoryLoan(int(draft.id))
        return draft.lent

    def returned(self, draft: MemoryDraft) -> None:
        draft.look()
        draft.writers -= 1
        assert draft.writers >= 0

    def release(self, draft: MemoryDraft) -> None:
        draft.handles -= 1
        assert draft.handles >= draft.writers
        if not draft.handles:
            draft.lent = None
        self._settle(draft)

    def _settle(self, draft: MemoryDraft) -> None:
        if not draft.handles and (draft.discarded or not draft.dirty):
            self.drafts.remove(draft)
            self.on_settled(draft)

    async def commit(self, draft: MemoryDraft) -> None:
        draft.look()
        if not self.writeback and draft.dirty and not draft.discarded:
            await self.upload(draft)

    async def upload(self, draft: MemoryDraft) -> None:
        if self.failure is not None:
            raise self.failure
        data = bytes(draft.data)
        info = await draft.origin.put(draft.key, InMemory(data), len(data))
        if data == bytes(draft.data):
            draft.dirty, draft.made, draft.base = False, info, info.etag
            self.on_committed(draft, info)
            self._settle(draft)

    async def upload_all(self) -> None:
        for draft in self.pending():
            await self.upload(draft)

    async def rename(
        self,
        draft: MemoryDraft,
        origin: Any,
        key: str,
        *,
        base: str | None,
        over: Any = None,
        upload: bool = True,
    ) -> bool:
        old, made = draft.key, draft.made
        if made is not None and not draft.dirty:
            info = await origin.copy(old, key, size=made.size, etag=made.etag)
            draft.key, draft.made, draft.base = key, info, info.etag
            self.on_committed(draft, info)
            return True
        before = draft.base
        if before is not None and not upload:
            info = await origin.copy(old, key, size=origin.objects[old].size, etag=before)
            draft.key, draft.base = key, info.etag
            return True
        draft.key, draft.base = key, base
        if before is not None:
            try:
                await self.upload(draft)
            except CachefsError:
                draft.key, draft.base = old, before
                raise
        return before is not None

    async def discard(
        self, draft: MemoryDraft, *, replaced: bool, instead: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        if instead is not None:
            await instead()
        draft.discarded = True
        if not draft.handles:
            self.drafts.remove(draft)

    def moved(self, old: ObjectId, new: ObjectId) -> None:
        assert old.size == new.size

    async def note(self, name: str, row: dict[str, Any] | None) -> None:
        if row is None:
            self.noted.pop(name, None)
        else:
            self.noted[name] = row

    def notes(self) -> dict[str, dict[str, Any]]:
        return dict(self.noted)

    def pending(self) -> list[MemoryDraft]:
        return [draft for draft in self.drafts if draft.dirty and not draft.discarded]

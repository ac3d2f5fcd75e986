"""A bucket in memory that counts, fails, hangs and changes on command: what `Origin` is to the filesystem."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import trio

from cachefs.base.errors import CachefsError, NotFound, ObjectChanged
from cachefs.base.names import ObjectId
from cachefs.origin.protocol import ListPage, ObjectInfo
from cachefs.origin.s3 import LIMITS as S3

MTIME = 1_700_000_000 * 10**9


def etag_of(what: str) -> str:
    return f'"{hashlib.md5(what.encode("utf-8", "surrogatepass")).hexdigest()}"'


class Bucket:
    """Keys and sizes. `page` caps the names of one LIST page; `delay` is virtual seconds per request."""

    def __init__(
        self, keys: Iterable[str] = (), *, prefix: str = "", page: int = 1000, delay: float = 0.01
    ) -> None:
        self.source = "s3://test"
        self.prefix = prefix
        self.can_list = True
        self.concurrency = 64
        self.serves_stale = False
        self.page = page
        self.delay = delay
        self.objects: dict[str, ObjectInfo] = {}
        self.lists: list[tuple[str, str | None, int]] = []
        self.heads: list[str] = []
        self.can_write = False
        self.written: dict[str, bytes] = {}  # by etag: the content of what is not made of its etag
        self.before: Callable[[str, str], CachefsError | None] = lambda kind, key: None
        self.tells_sizes = True
        self.ordered = True
        for key in keys:
            self.set(key)

    def set(self, key: str, size: int | None = None, version: int = 0, mtime_ns: int = MTIME) -> None:
        size = (0 if key.endswith("/") else 10) if size is None else size
        self.objects[key] = ObjectInfo(key, size, mtime_ns, etag_of(f"{key} {size} {version}"))

    put = set

    @property
    def counts(self) -> tuple[int, int]:
        """(LIST, HEAD) since the last `reset`."""
        return len(self.lists), len(self.heads)

    def reset(self) -> None:
        self.lists.clear()
        self.heads.clear()

    async def list_page(self, prefix: str, *, token: str | None = None, limit: int = 1000) -> ListPage:
        self.lists.append((prefix, token, limit))
        await trio.sleep(self.delay)
        self._strike("list", prefix)
        marks: dict[bytes, tuple[str, bool]] = {}
        for key in self.objects:
            if key.startswith(prefix):
                rest = key[len(prefix) :]
                head, slash, _ = rest.partition("/")
                name = prefix + head + slash
                marks[name.encode("utf-8", "surrogatepass")] = (name, bool(slash))
        names = sorted(marks)
        if not self.ordered:
            names.sort(key=lambda n: n[::-1])
        # A token is the last name shown, as at the real stores: names that come and go shift nothing.
        first = 0
        if token:
            shown_last = bytes.fromhex(token)
            first = bisect.bisect_right(names, shown_last) if self.ordered else names.index(shown_last) + 1
        last = first + min(limit, self.page)
        shown = [marks[name] for name in names[first:last]]
        infos = [self.objects[name] for name, is_dir in shown if not is_dir]
        if not self.tells_sizes:
            infos = [ObjectInfo(i.key, -1, i.mtime_ns, "") for i in infos]
        return ListPage(
            infos,
            [name for name, is_dir in shown if is_dir],
            names[last - 1].hex() if last < len(names) else None,
            self.ordered,
        )

    async def head(self, key: str) -> ObjectInfo:
        self.heads.append(key)
        await trio.sleep(self.delay)
        self._strike("head", key)
        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key]

    def _strike(self, kind: str, key: str) -> None:
        failure = self.before(kind, key)
        if failure is not None:
            raise failure


class WritableBucket(Bucket):
    """The same, which takes writes. `set` is somebody else's hand, `put` is what `Origin` has."""

    limits = S3

    def __init__(self, keys: Iterable[str] = (), **kwargs: Any) -> None:
        super().__init__(keys, **kwargs)
        self.can_write = True
        self.puts: list[str] = []
        self.copies: list[tuple[str, str]] = []
        self.deletes: list[str] = []
        self.version = 0

    @property
    def writes(self) -> tuple[int, int, int]:
        """(PUT, COPY, DELETE) since the last `reset`."""
        return len(self.puts), len(self.copies), len(self.deletes)

    def reset(self) -> None:
        super().reset()
        self.puts.clear()
        self.copies.clear()
        self.deletes.clear()

    def content(self, key: str) -> bytes:
        info = self.objects[key]
        return content_of(self, ObjectId(self.source, key, info.etag, info.size))

    async def put(  # type: ignore[override]
        self, key: str, source: Any, size: int, **preconditions: Any
    ) -> ObjectInfo:
        self.puts.append(key)
        await trio.sleep(self.delay)
        self._strike("put", key)
        return self._made(key, source.read(0, size))

    def _made(self, key: str, data: bytes) -> ObjectInfo:
        self.version += 1
        etag = etag_of(f"{self.version} {data!r}")
        self.written[etag] = data
        self.objects[key] = ObjectInfo(key, len(data), MTIME + self.version, etag)
        return self.objects[key]

    async def copy(self, key: str, to: str, *, size: int, etag: str | None = None) -> ObjectInfo:
        self.copies.append((key, to))
        await trio.sleep(self.delay)
        self._strike("copy", key)
        if key not in self.objects:
            raise NotFound(key)
        if etag not in (None, self.objects[key].etag):
            raise ObjectChanged(key)
        return self._made(to, self.content(key))

    def name(self, key: str) -> str:
        return f"{self.source}/{key}"

    async def look(self, key: str) -> tuple[ObjectInfo, str]:
        """No object here carries a token."""
        return await self.head(key), ""

    async def delete(self, key: str) -> None:
        self.deletes.append(key)
        await trio.sleep(self.delay)
        self._strike("delete", key)
        self.objects.pop(key, None)

    async def delete_many(self, keys: Iterable[str]) -> dict[str, CachefsError]:
        kept: dict[str, CachefsError] = {}
        for key in list(keys):
            try:
                await self.delete(key)
            except CachefsError as exc:
                kept[key] = exc
        return kept


def content_of(bucket: Bucket | None, obj: ObjectId) -> bytes:
    data = bucket.written.get(obj.etag) if bucket is not None else None
    return Bytes.content(obj) if data is None else data


class Bytes:
    """A `Reader` whose objects are made of their own etag, or what was written; warm once read."""

    passthrough = False
    in_flight_fetches = 0

    def soon_cached(self, obj: ObjectId) -> bool:
        return False

    def __init__(self, bucket: Bucket | None = None) -> None:
        self.bucket = bucket
        self.warm: set[ObjectId] = set()
        self.open_count = 0

    def open(self, origin: Any, obj: ObjectId) -> ObjectId:
        self.open_count += 1
        return obj

    def close(self, opened: ObjectId, unread_blocks: int | None = 0) -> None:
        self.open_count -= 1

    @staticmethod
    def content(obj: ObjectId) -> bytes:
        text = obj.etag.encode()
        return (text * (obj.size // len(text) + 1))[: obj.size]

    def read_now(self, opened: ObjectId, offset: int, size: int, pid: int) -> bytes | None:
        assert 0 <= offset < opened.size and offset + size <= opened.size
        if opened not in self.warm:
            return None
        return content_of(self.bucket, opened)[offset : offset + size]

    async def read(self, opened: ObjectId, offset: int, size: int, pid: int) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.bucket is not None:
            now = self.bucket.objects.get(opened.key)
            if now is None:
                raise NotFound(opened.key)
            if now.etag != opened.etag:
                raise ObjectChanged(opened.key)
        self.warm.add(opened)
        return content_of(self.bucket, opened)[offset : offset + size]

    def reusable(self, opened: ObjectId) -> None:
        """None is: no file is known."""

    def cached_bytes(self, obj: ObjectId) -> int:
        return obj.size if obj in self.warm else 0


class PausingBucket(WritableBucket):
    """Each answer takes as long as `chance.pause_s()` says."""

    chance: Any

    @property
    def delay(self) -> float:
        return self.chance.pause_s()

    @delay.setter
    def delay(self, seconds: float) -> None:
        pass

    async def _answered(self, answer: Awaitable[Any]) -> Any:
        found = await answer
        await trio.sleep(self.chance.pause_s())
        return found

    async def list_page(self, prefix: str, **how: Any) -> Any:
        return await self._answered(super().list_page(prefix, **how))

    async def head(self, key: str) -> Any:
        return await self._answered(super().head(key))

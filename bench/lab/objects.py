"""Buckets, and the objects in them.

The index is a sorted list of keys in memory. Bytes lie in files with serial numbers for names, so every key that S3 permits
is permitted here. A directory tree can be shown as a bucket, without reading or copying its files, and a run of a million
generated objects costs one small record. To replace an object, its key is pointed to another body: a client that is reading
the old version goes on reading it, as in S3.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import os
import re
import socket
import threading
import time
import zlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.lab.dataset import content

_UNDECODED = re.compile("[\ud800-\udfff]")
JOINED = 64
"""Most parts of an object that keeps them as they are."""

_INVERSE = bytes(255 - value for value in range(256))


class Body:
    """The source of an object's bytes. `opened` pins one version of them."""

    def opened(self) -> OpenBody:
        raise NotImplementedError

    def discard(self) -> None:
        """Release the bytes: the object was removed."""


class OpenBody:
    def read(self, offset: int, count: int) -> bytes:
        raise NotImplementedError

    def send(self, sock: socket.socket, offset: int, count: int) -> None:
        sock.sendall(self.read(offset, count))

    def pieces(self, size: int) -> Iterator[bytes]:
        """The first `size` bytes, in pieces."""
        step = 1 << 20
        return (self.read(at, min(step, size - at)) for at in range(0, size, step))

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FileBody(Body):
    path: str
    ours: bool

    def opened(self) -> OpenBody:
        return _OpenFile(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))

    def discard(self) -> None:
        if self.ours:
            with suppress(FileNotFoundError):
                os.unlink(self.path)


class _OpenFile(OpenBody):
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, offset: int, count: int) -> bytes:
        return os.pread(self._fd, count, offset)

    def send(self, sock: socket.socket, offset: int, count: int) -> None:
        stop = offset + count
        while offset < stop:
            sent = os.sendfile(sock.fileno(), self._fd, offset, stop - offset)
            if not sent:
                raise ConnectionAbortedError(
                    "the file is shorter than it was when the store was told about it"
                )
            offset += sent

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class JoinedBody(Body):
    """The bytes of stored parts, one after the other. The parts belong to the object: they are discarded with it."""

    parts: tuple[Stored, ...]

    def opened(self) -> OpenBody:
        with ExitStack() as opened:
            bodies = [(part.size, part.body.opened()) for part in self.parts]
            for _, body in bodies:
                opened.callback(body.close)
            return _OpenJoined(bodies, opened.pop_all())

    def discard(self) -> None:
        for part in self.parts:
            part.body.discard()


class _OpenJoined(OpenBody):
    def __init__(self, bodies: list[tuple[int, OpenBody]], opened: ExitStack) -> None:
        self._bodies = bodies
        self._opened = opened

    def _spans(self, offset: int, count: int) -> Iterator[tuple[OpenBody, int, int]]:
        """(body, offset in it, bytes) for each part of a range."""
        start = 0
        for size, body in self._bodies:
            begin, end = max(offset, start), min(offset + count, start + size)
            if begin < end:
                yield body, begin - start, end - begin
            start += size

    def read(self, offset: int, count: int) -> bytes:
        return b"".join(body.read(at, length) for body, at, length in self._spans(offset, count))

    def send(self, sock: socket.socket, offset: int, count: int) -> None:
        for body, at, length in self._spans(offset, count):
            body.send(sock, at, length)

    def close(self) -> None:
        self._opened.close()


@dataclass(frozen=True, slots=True)
class GeneratedBody(Body, OpenBody):
    """Bytes generated from a seed by `dataset.content`, without a file."""

    seed: str

    def opened(self) -> OpenBody:
        return self

    def read(self, offset: int, count: int) -> bytes:
        return content(self.seed, count, offset)


@dataclass(frozen=True, slots=True)
class BytesBody(OpenBody):
    """Bytes in memory, for replies that are no objects."""

    data: bytes

    def read(self, offset: int, count: int) -> bytes:
        return self.data[offset : offset + count]


@dataclass(frozen=True, slots=True)
class InvertedBody(OpenBody):
    """The same number of other bytes: every one differs."""

    inner: OpenBody

    def read(self, offset: int, count: int) -> bytes:
        return self.inner.read(offset, count).translate(_INVERSE)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True, slots=True)
class Stored:
    """One version of an object. `etag` includes its quotes; reads return `headers` as they were put."""

    size: int
    etag: str
    mtime: float
    body: Body
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """The generation number of Google's API; here it is derived from the etag."""
        return zlib.crc32(self.etag.encode()) + 1


@dataclass(frozen=True, slots=True)
class Run:
    """Generated objects `<prefix>name-0000000.bin` and on: a sorted sequence that takes no memory."""

    prefix: str
    count: int
    size: int
    mtime: float

    def key(self, index: int) -> str:
        return f"{self.prefix}name-{index:07d}.bin"

    @property
    def first(self) -> str:
        return self.key(0)

    @property
    def last(self) -> str:
        return self.key(self.count - 1)

    def keys_from(self, cursor: str) -> Iterator[str]:
        return map(self.key, range(bisect_left(range(self.count), cursor, key=self.key), self.count))

    def get(self, key: str) -> Stored | None:
        digits = key[len(self.prefix) + 5 : -4]
        if not (digits.isdecimal() and int(digits) < self.count and self.key(int(digits)) == key):
            return None
        tag = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        return Stored(self.size, f'"{tag}-{self.size:x}"', self.mtime, GeneratedBody(key))


class Bucket:
    """Keys in order. Not thread-safe: the `Warehouse` holds its lock around every use."""

    def __init__(self, objects: dict[str, Stored] | None = None) -> None:
        self.created = time.time()
        self._objects = objects or {}
        self._keys = sorted(self._objects)
        self._runs: list[Run] = []
        self._holes: set[str] = set()
        """Deleted keys of a run."""

    def get(self, key: str) -> Stored | None:
        found = self._objects.get(key)
        if found is None and self._runs and key not in self._holes:
            run = self._run_at(key)
            found = run.get(key) if run else None
        return found

    def put(self, key: str, stored: Stored) -> None:
        before = self._objects.get(key)
        if before is None:
            insort(self._keys, key)
        else:
            before.body.discard()
        self._objects[key] = stored

    def delete(self, key: str) -> None:
        found = self._objects.pop(key, None)
        if found is not None:
            found.body.discard()
            del self._keys[bisect_left(self._keys, key)]
        if self._runs:
            self._holes.add(key)

    def add_run(self, run: Run) -> None:
        """ValueError if its keys would interleave with another run's: runs are searched as one sequence."""
        others = [other for other in self._runs if other.prefix != run.prefix]
        if any(other.first <= run.last and run.first <= other.last for other in others):
            raise ValueError("the run's keys interleave with those of another run")
        self._runs = sorted([*others, run], key=lambda other: other.first)
        self._holes = {key for key in self._holes if not run.first <= key <= run.last}

    def keys_from(self, cursor: str) -> Iterator[str]:
        """All keys at or after `cursor`, in order. Seeking is O(log n)."""
        start = bisect_left(self._keys, cursor)
        stored = (self._keys[index] for index in range(start, len(self._keys)))
        if not self._runs:
            yield from stored
            return
        previous = None
        for key in heapq.merge(stored, self._run_keys_from(cursor)):
            # A run's key that was put again comes twice; one that was deleted comes once, or not at all.
            if key != previous and (key not in self._holes or key in self._objects):
                yield key
            previous = key

    def _run_keys_from(self, cursor: str) -> Iterator[str]:
        start = bisect_left(self._runs, cursor, key=lambda run: run.last)
        for index in range(start, len(self._runs)):
            yield from self._runs[index].keys_from(cursor)

    def _run_at(self, key: str) -> Run | None:
        index = bisect_left(self._runs, key, key=lambda run: run.last)
        return self._runs[index] if index < len(self._runs) else None


class Blob:
    """A new file that is being written, with the MD5 of which S3 makes etags."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.size = 0
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._file = path.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._md5.update(data)
        self.size += len(data)

    def done(self, headers: dict[str, str] | None = None) -> Stored:
        self._file.close()
        return Stored(
            self.size,
            f'"{self._md5.hexdigest()}"',
            time.time(),
            FileBody(self.path, ours=True),
            headers or {},
        )

    def drop(self) -> None:
        self._file.close()
        Path(self.path).unlink(missing_ok=True)


@dataclass
class Upload:
    """A multipart upload in progress."""

    bucket: str
    key: str
    headers: dict[str, str]
    parts: dict[int, Stored] = field(default_factory=dict)
    begun: float = field(default_factory=time.time)


class Warehouse:
    """All buckets, the files of their objects, and uploads in progress. `lock` protects all access to a bucket."""

    def __init__(self, root: Path) -> None:
        self._blobs = root / "blobs"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count(1)
        self.lock = threading.RLock()
        self.buckets: dict[str, Bucket] = {}
        self.uploads: dict[str, Upload] = {}

    def bucket(self, name: str) -> Bucket:
        """The bucket, made if it does not exist."""
        with self.lock:
            return self.buckets.setdefault(name, Bucket())

    def blob(self) -> Blob:
        # The process id keeps two stores that were given one root apart.
        return Blob(self._blobs / f"{os.getpid()}-{next(self._numbers)}")

    def store(self, pieces: Iterable[bytes], headers: dict[str, str] | None = None) -> Stored:
        """A new object of these bytes, without a key."""
        blob = self.blob()
        try:
            for piece in pieces:
                blob.write(piece)
            return blob.done(headers)
        except BaseException:
            blob.drop()
            raise

    def join(self, parts: Sequence[Stored], etag: str, headers: dict[str, str]) -> Stored:
        """A new object of the bytes of stored parts, which belong to it from now on. It is made without a copy, as in an
        object store: copying 256 MiB takes longer than its last part needs to arrive. An object of many parts is copied,
        because a reader holds a descriptor of each part."""
        if len(parts) <= JOINED:
            return Stored(
                sum(part.size for part in parts), etag, time.time(), JoinedBody(tuple(parts)), headers
            )
        whole = self.store(itertools.chain.from_iterable(_pieces(part) for part in parts), headers)
        for part in parts:
            part.body.discard()
        return replace(whole, etag=etag)

    def change(self, bucket: str, key: str) -> Stored | None:
        """Give the object another version: same size, every byte different. None if there is no such object."""
        with self.lock:
            stored = self.bucket(bucket).get(key)
            if stored is None:
                return None
            opened = stored.body.opened()
        try:
            changed = self.store(InvertedBody(opened).pieces(stored.size), stored.headers)
        finally:
            opened.close()
        if not changed.size:
            # Nothing to invert: only the name of the version can differ.
            changed = replace(changed, etag=f'"{time.time_ns():x}-0"')
        with self.lock:
            self.bucket(bucket).put(key, changed)
        return changed

    def serve(self, name: str, tree: Path) -> int:
        """Let a bucket have the files below `tree` as they are now, and no others. Returns their number."""
        objects = dict(_files(str(tree.resolve()), ""))
        with self.lock:
            self.buckets[name] = Bucket(objects)
        return len(objects)

    def synthesize(self, name: str, prefix: str, count: int, size: int) -> None:
        if not 0 < count <= 10_000_000:
            raise ValueError("count must be within 1..10,000,000")
        with self.lock:
            self.bucket(name).add_run(Run(prefix, count, size, time.time()))


def _pieces(stored: Stored) -> Iterator[bytes]:
    with closing(stored.body.opened()) as body:
        yield from body.pieces(stored.size)


def _files(folder: str, prefix: str) -> Iterator[tuple[str, Stored]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            key = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, key + "/")
            elif entry.is_file() and not _UNDECODED.search(key):  # bytes that are not UTF-8 are not a key
                about = entry.stat()
                # Not 32 hex digits: clients would take that for an MD5 and compare.
                etag = f'"{about.st_mtime_ns:x}-{about.st_size:x}"'
                yield key, Stored(about.st_size, etag, about.st_mtime, FileBody(entry.path, ours=False))

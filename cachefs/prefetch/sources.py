"""Candidates for prefetch: the objects of the files that the policies predict.

Each source asks its policy which files to fetch, finds their objects in the cached listings, and skips those that are cached
or in flight. It returns a group of candidates, of at most the requested number. A plan may name a path that no listing has:
then the task that fetches it looks it up at the origin."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from cachefs.base.errors import CachefsError
from cachefs.fetch import footer_at
from cachefs.fs import LARGE, FileSystem, Sibling, Volume
from cachefs.prefetch.directories import START, Directory
from cachefs.prefetch.plans import Item, Plans
from cachefs.prefetch.shards import READ_SHARE, Shards, StreamKey

if TYPE_CHECKING:
    from cachefs.base.names import ObjectId
    from cachefs.origin import Origin
    from cachefs.store.eviction import EpochProgress

SLICE = 64
"""Names examined between two checkpoints, about 10 µs each."""

REMEMBERED = 256
"""Directories remembered. A data set with a directory for each class has a thousand, and a job reads a few at a time."""

FORGET_AFTER_S = 600.0
"""After so long without a demand, a directory's counts start again: the next reader may be another job."""

SCANS = 8
"""Slices of a listing that are searched for large files among small ones."""

QUEUES = 64
"""Most streams of shards with predictions that wait to be fetched; the newest is fetched first."""

MOST_PROGRESS = 1024
"""Recently opened large files whose reads are counted, about 500 bytes each."""

MOST_PIDS = 16
"""Processes remembered for each of these files."""

Found: TypeAlias = "tuple[Origin, ObjectId]"
"""A version of a file, and its origin."""

Wanted = Callable[["ObjectId"], bool]
"""True for a version that is neither cached nor in flight and, unless a plan names it, was not read in this epoch."""

Preload = Callable[[Iterable["ObjectId"]], None]
"""Called with versions shortly before `Wanted` is called for them, so that the store reads their rows together."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A file to fetch. `found` is None for a path of a plan that must be looked up first. If the file cannot be fetched now,
    `put_back` makes it a candidate again."""

    found: Found | None
    put_back: Callable[[], None]
    item: Item | None = None
    walk: _Walk | None = None  # of its directory
    stream: StreamKey | None = None  # of a shard

    def postpone(self) -> None:
        """Put it back before its fetch has begun, and tell the policy of its directory."""
        self.put_back()
        if self.walk is not None:
            self.walk.policy.failed()


class Paths:
    """The paths of objects, relative to the mount."""

    def __init__(self, volumes: list[Volume]) -> None:
        self._above = {id(volume.origin): f"{volume.name}/" if volume.name else "" for volume in volumes}

    def of(self, origin: Origin, obj: ObjectId) -> str:
        return self._above[id(origin)] + obj.key.removeprefix(origin.prefix)


@dataclass(eq=False, repr=False)
class FromPlans:
    """Files of the plans that jobs sent."""

    _fs: FileSystem
    _wanted: Wanted
    _still_wanted: Wanted
    _clock: Callable[[], float]
    _preload: Preload
    plans: Plans = field(default_factory=Plans)

    async def next(self, most: int) -> list[Candidate]:
        examined = 0
        while items := self._take(most):
            known = self._known(items)
            self._preload(found[1] for _, found in known if found is not None)
            group = []
            for item, found in known:
                wanted = self._still_wanted if item.is_behind else self._wanted
                if found is None or wanted(found[1]):
                    group.append(Candidate(found, partial(item.plan.put_back, item), item))
            if group:
                return group
            examined += len(items)
            if examined >= SLICE:
                await trio.lowlevel.checkpoint()
                examined = 0
        return []

    def _take(self, most: int) -> list[Item]:
        items: list[Item] = []
        while len(items) < most and (item := self.plans.take(self._clock())) is not None:
            items.append(item)
        return items

    def _known(self, items: list[Item]) -> list[tuple[Item, Found | None]]:
        """The files as the listings have them (None: in none). Paths that no listing can have are left out."""
        known = []
        for item in items:
            try:
                known.append((item, self._fs.tree_queries.known(os.fsdecode(item.path))))
            except CachefsError:
                continue
        return known


@dataclass(slots=True)
class _Progress:
    """How much of a large file its readers have read, without the footer, and these processes."""

    listing: _Large
    footer: int
    left: int  # bytes until it counts as read
    pids: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def read(self, offset: int, size: int) -> bool:
        """Count a read. True if this makes the file count as read."""
        if self.left <= 0:
            return False
        self.left -= max(0, min(offset + size, self.footer) - offset)
        return self.left <= 0


@dataclass(eq=False, repr=False)
class FromShards:
    """The large files that are predicted next. `_queues` has those of each (directory, pid), soonest first."""

    _fs: FileSystem
    _paths: Paths
    _wanted: Wanted
    shards: Shards = field(default_factory=Shards)
    _queues: OrderedDict[StreamKey, list[Found]] = field(default_factory=OrderedDict)
    _progress: OrderedDict[bytes, _Progress] = field(default_factory=OrderedDict)

    def opened(self, ino: int, pid: int, origin: Origin, obj: ObjectId, *, cold: bool, counts: bool) -> None:
        """Note that a large file was opened. `cold`: none of it was cached, or it was prefetched and not read yet."""
        above, _, name = self._paths.of(origin, obj).rpartition("/")
        listing = _Large(self._fs, ino, above)
        progress = self._progress.pop(obj.digest, None)
        if progress is None or cold:
            progress = _Progress(listing, footer_at(obj.size), obj.size // READ_SHARE)
        self._progress[obj.digest] = progress
        progress.pids[pid] = None
        for table, most in ((self._progress, MOST_PROGRESS), (progress.pids, MOST_PIDS)):
            if len(table) > most:
                table.popitem(last=False)
        key = (above, pid)
        self._queue(key, listing, self.shards.opened(*key, name.encode(), listing, counts=counts))
        if counts and progress.left <= 0:
            self._queue(key, listing, self.shards.was_read(*key, listing))

    def read(self, obj: ObjectId, offset: int, size: int) -> bool:
        """Note that a part of a large file was read. True if the file counts as read with it, so others are predicted."""
        progress = self._progress.get(obj.digest)
        if progress is None or not progress.read(offset, size):
            return False
        for pid in progress.pids:
            key = (progress.listing.above, pid)
            self._queue(key, progress.listing, self.shards.was_read(*key, progress.listing))
        return True

    def _queue(self, key: StreamKey, listing: _Large, names: list[bytes]) -> None:
        found = [found for name in names if (found := listing.known(name)) is not None]
        if found:
            self._queues.pop(key, None)
            self._queues[key] = found
            if len(self._queues) > QUEUES:
                self._queues.popitem(last=False)

    async def next(self) -> list[Candidate]:
        """The next candidate, if there is one. There is at most one, because each takes several transfers."""
        while self._queues:
            await trio.lowlevel.checkpoint()
            key, queue = next(reversed(self._queues.items()))
            while queue and self.shards.worth_fetching(*key):
                found = queue.pop(0)
                if self._wanted(found[1]):
                    return [Candidate(found, partial(self._put_back, key, found), stream=key)]
            del self._queues[key]
        return []

    def _put_back(self, key: StreamKey, found: Found) -> None:
        self._queues.setdefault(key, []).insert(0, found)


@dataclass(eq=False)
class _Large:
    """A `shards.Listing`: the large files of the directory with path `above`, which holds the file `ino`."""

    _fs: FileSystem
    _ino: int
    above: str

    def known(self, name: bytes) -> Found | None:
        found = self._fs.tree_queries.known(f"{self.above}/{os.fsdecode(name)}")
        return found if found is not None and found[1].size > LARGE else None

    def holds(self, name: bytes) -> bool:
        return self.known(name) is not None

    def behind(self, name: bytes, count: int) -> list[bytes]:
        names: list[bytes] = []
        after: bytes | None = name
        for _ in range(SCANS):
            if after is None:
                break
            files, after = self._fs.tree_queries.siblings(self._ino, after, SLICE)
            names += [file.mark for file in files if file.object.size > LARGE]
            if len(names) >= count or not files:
                break
        return names[:count]


@dataclass(eq=False)
class _Walk:
    """A pass through one directory's listing: from the first demanded file to the end, then from the beginning to it."""

    ino: int  # of any file in it
    start: bytes
    name: str
    policy: Directory
    version: int = -1  # of the epoch progress, when `policy` was told its epoch
    after: bytes | None = None
    second_half: bool = False
    buffer: deque[Sibling] = field(default_factory=deque)
    count_at: int = START


@dataclass(eq=False, repr=False)
class FromDirectories:
    """The other small files of a directory. `_walks` are by the directory's path, and the one that was demanded last comes
    last. `_eager` are those with files to fetch."""

    _fs: FileSystem
    _paths: Paths
    _wanted: Wanted
    _preload: Preload
    _epoch_progress: EpochProgress
    _walks: OrderedDict[str, _Walk] = field(default_factory=OrderedDict)
    _eager: OrderedDict[_Walk, None] = field(default_factory=OrderedDict)

    def missed(self, ino: int, origin: Origin, obj: ObjectId, now: float) -> _Walk | None:
        """Note that a small file that was not cached was opened, for the first time in an epoch. Returns the directory's
        walk if the caller should count its files now."""
        key, _, name = self._paths.of(origin, obj).rpartition("/")
        walk = self._walks.get(key)
        if walk is None or now - walk.policy.last > FORGET_AFTER_S:
            walk = self._walks[key] = _Walk(ino, name.encode(), key, Directory(now))
        self._walks.move_to_end(key)
        if len(self._walks) > REMEMBERED:
            self._walks.popitem(last=False)
        policy = walk.policy
        walk.ino = ino
        policy.in_epoch(self._epoch_progress.epoch(obj))
        policy.missed(now)
        if policy.demanded <= START:
            walk.start = min(walk.start, name.encode())
        self._go_on(walk)
        if policy.files is None and policy.demanded >= walk.count_at:
            walk.count_at = 2 * policy.demanded
            return walk
        return None

    def hit(self, walk: _Walk, obj: ObjectId, now: float) -> None:
        """Note that a prefetched file was opened."""
        policy, version = walk.policy, self._epoch_progress.version
        # All files of a directory are of one dataset, so its epoch is asked for only if one has begun.
        if walk.version != version or not policy.epoch:
            walk.version = version
            policy.in_epoch(self._epoch_progress.epoch(obj))
        policy.hit(now)
        self._go_on(walk)

    def _go_on(self, walk: _Walk) -> None:
        if walk.policy.more_files():
            self._eager[walk] = None
            self._eager.move_to_end(walk)

    async def count(self, walk: _Walk) -> None:
        """Count the small files of a directory."""
        try:
            counted = await self._fs.tree_queries.count_files(walk.ino, LARGE)
        except CachefsError:
            return
        if counted is not None:
            walk.policy.files = counted[0]

    async def next(self, most: int) -> list[Candidate]:
        """At most `most` candidates, all of one directory."""
        while self._eager:
            walk = next(reversed(self._eager))
            group: list[Candidate] = []
            remembered = self._walks.get(walk.name) is walk
            more = min(most, walk.policy.more_files()) if remembered else 0
            while len(group) < more and (sibling := self._next_of(walk)) is not None:
                put_back = partial(self._put_back, walk, sibling)
                group.append(Candidate((sibling.origin, sibling.object), put_back, walk=walk))
                walk.policy.started()
            if group:
                return group  # without an await, during which a reader could open one of them
            if not more or not await self._read_slice(walk):
                self._eager.pop(walk, None)
        return []

    def _put_back(self, walk: _Walk, sibling: Sibling) -> None:
        walk.buffer.appendleft(sibling)
        self._eager[walk] = None

    def _next_of(self, walk: _Walk) -> Sibling | None:
        """The next file of the buffer that should be fetched; None if there is none."""
        while walk.buffer:
            sibling = walk.buffer.popleft()
            if self._wanted(sibling.object):
                return sibling
        return None

    async def _read_slice(self, walk: _Walk) -> bool:
        """Read a slice of the listing into the buffer. False at the end of a pass, or where the listing ends so far."""
        await trio.lowlevel.checkpoint()
        if walk.after is None:
            if not walk.policy.begin_pass():
                return False
            walk.after, walk.second_half = walk.start, False
        before = walk.after
        try:
            files, after = self._fs.tree_queries.siblings(walk.ino, before, SLICE)
        except CachefsError:
            return False
        if after == before:
            return False
        files = [file for file in files if file.object.size <= LARGE]
        self._preload(file.object for file in files)
        walk.buffer.extend(files)
        walk.after = after
        if after is None and not walk.second_half:
            walk.after, walk.second_half = b"", True
        elif after is not None and walk.second_half and after >= walk.start:
            walk.after = None
        return True

    def status(self, most: int) -> list[dict[str, Any]]:
        """The `most` directories used last, for the status: plain values."""
        shown: list[dict[str, Any]] = []
        for walk in reversed(self._walks.values()):
            policy = walk.policy
            if policy.fetched and len(shown) < most:
                state = "left alone" if policy.rarely_used else "ahead" if policy.more_files() else "waiting"
                shown.append(
                    {
                        "name": walk.name,
                        "files": policy.files,
                        "wanted": policy.demanded,
                        "fetched": policy.fetched,
                        "used": policy.used,
                        "state": state,
                    }
                )
        return shown

"""Which blocks lie where: the index on the disk, and the catalog in memory. `eviction.py` decides what is evicted first.

A row of the index is a *copy*: an extent of one version on one tier, its age, and the checksums of its blocks. The order
of eviction is a table of its own, (tier, clock) → copy and dataset, so a start reads no rows and eviction reads only its
victims. Copies pinned on the last tier have no row in that table.

The catalog holds the copies that were looked at, and writes changes back in batches (a flush every second or so, fsynced,
from a worker thread). A batch lost in a crash costs a refetch. All rules that keep the two consistent are here: a key that
was removed, or that a running flush is writing, is not loaded from the index; a row whose clock is not the copy's is out
of date.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import trio
import xxhash

from cachefs.base.database import Database, Put
from cachefs.base.errors import CacheUnusable, NoRoom
from cachefs.base.metrics import Metrics
from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId, block_count, block_length, extent_bits
from cachefs.base.tasks import in_thread
from cachefs.store.tier import Tier

log = logging.getLogger(__name__)

_HEAD = struct.Struct(">QQIHBB")  # object size, clock, dataset, bitmap, flags, number of checksums
_KEY = struct.Struct(">B16sI")
_ORDERED = struct.Struct(">B16sII")  # the key of a copy, its dataset
_CLOCK = struct.Struct(">BQ")
_TOTAL = struct.Struct(">QQQ")
_CHECK = struct.Struct(">I")
_PINNED, _UNORDERED = 1, 2
_NO_CHECKSUMS = [0] * BLOCKS_PER_EXTENT

UNITS = 1 << 64
"""Units, which stand for extents, are hashes below this number."""

CopyKey = tuple[int, bytes, int]
"""(tier number, object digest, extent index)"""

Row = tuple[bytes, CopyKey, int, int]
"""A row in the order of eviction: (cursor, copy key, stored clock, dataset)"""

Totals = tuple[int, int, int]
"""Counters of a tier: (allocated bytes, blocks, pinned bytes)"""

Placed = tuple[CopyKey, int, int]
"""What a flush has written in the order of eviction: (key, clock, dataset)"""

Saved = tuple[CopyKey, bytes, int, int, int | None]
"""(key, packed row, dataset, clock or 0 if it gets no row in the order of eviction, clock stored before)"""


@dataclass(slots=True)
class Copy:
    """The blocks of one extent that one tier holds.

    `bitmap` and `verified` have a bit per block of the extent; `checksums` are xxh3_64 of each block. `clock` is the
    logical time of the last use, `stored_clock` the one in the index (None: there is no row; 0: there may be one, without a
    place in the order of eviction). `pins` counts the users of the bytes across an await. `space.py` changes it, and
    `backing.py`, where a call would cost an open too much. `in_progress` are blocks that one cache write or move is writing;
    `forgotten` are dropped blocks whose bytes stay in the file until the last pin is gone. `first_use` is when an SSD copy
    was first read in this process. `used` is `clock`, or 0 while prefetched blocks wait for a reader. `pinned` copies stay
    until they are unpinned. `dataset_version` is the version of the `Datasets` that gave `dataset`."""

    tier: int
    digest: bytes
    extent: int
    object_size: int
    bitmap: int = 0
    verified: int = 0
    clock: int = 0
    stored_clock: int | None = None
    pins: int = 0
    first_use: float = 0.0
    in_progress: int = 0
    forgotten: int = 0
    dataset: int = 0
    used: int = 0
    pinned: bool = False
    dataset_version: int = -1
    checksums: list[int] = field(default_factory=_NO_CHECKSUMS.copy)

    @property
    def key(self) -> CopyKey:
        return (self.tier, self.digest, self.extent)


def unit_hash(digest: bytes, extent: int) -> int:
    """The unit (a 64-bit hash) of an extent of the version `digest`."""
    return (int.from_bytes(digest[:8], "big") + extent * 0x9E3779B97F4A7C15) % UNITS


def pack_copy(copy: Copy, *, ordered: bool = True) -> bytes:
    """The row of a copy. `ordered`: the copy has a row in the order of eviction, too."""
    count = copy.bitmap.bit_length()
    flags = _PINNED * copy.pinned | _UNORDERED * (not ordered)
    head = _HEAD.pack(copy.object_size, copy.clock, copy.dataset, copy.bitmap, flags, count)
    body = head + struct.pack(f">{count}Q", *copy.checksums[:count])
    return body + _CHECK.pack(xxhash.xxh32_intdigest(body))


def unpack_copy(key: CopyKey, row: bytes) -> Copy | None:
    """The copy of a row, or None if the row is damaged (then its blocks are misses)."""
    if len(row) < _HEAD.size + _CHECK.size:
        return None
    body, check = row[: -_CHECK.size], row[-_CHECK.size :]
    if _CHECK.pack(xxhash.xxh32_intdigest(body)) != check:
        return None
    size, clock, dataset, bitmap, flags, count = _HEAD.unpack_from(body)
    checksums = list(struct.unpack_from(f">{count}Q", body, _HEAD.size))
    checksums += [0] * (BLOCKS_PER_EXTENT - count)
    return Copy(
        *key,
        object_size=size,
        bitmap=bitmap,
        clock=clock,
        stored_clock=0 if flags & _UNORDERED else clock,
        dataset=dataset,
        used=clock,
        pinned=bool(flags & _PINNED),
        checksums=checksums,
    )


def _is_pinned(row: bytes) -> bool:
    return len(row) >= _HEAD.size and bool(_HEAD.unpack_from(row)[4] & _PINNED)


# -- the index -------------------------------------------------------------------------------------


class Index:
    """Typed access to the three tables. Reads take microseconds and need no thread; `write` belongs in one. For `killed`
    see `Database`."""

    def __init__(self, path: Path, block_size: int, *, killed: bool = False) -> None:
        tables = ["copies", "order", "meta"]
        self._db = Database(path, tables, version=f"blocks-2-{block_size}", fsync=True, killed=killed)
        self.dropped = self._db.dropped is not None
        self.was_clean = self._db.was_clean
        # The daemon before was killed, or no scrub has ended since one was. A new index has no rows of `meta`.
        self.unfinished = not self.was_clean and self._db.count("meta") > 0
        # Skipping checksums is safe only if each daemon since the cache was empty has synced all files before it closed.
        self.trusted = self._db.count("copies") == 0 or (
            self.was_clean and self._db.get("meta", b"trusted") == b"yes"
        )
        self._unreadable = False
        self._has_no_mark = True
        try:
            self._db.write([("meta", b"trusted", None)])
        except NoRoom:
            # The disk is full and the mark of the daemon before stays, so `close` must leave the index unclean.
            self._has_no_mark = False

    def load(self, keys: list[CopyKey]) -> list[Copy | None]:
        """The copies of these keys as last written, in their order; None for each without a valid row."""
        try:
            rows = self._db.get_many("copies", [_KEY.pack(*key) for key in keys])
        except CacheUnusable:
            return [None] * len(keys)  # the index is damaged: misses
        return [
            unpack_copy(key, row) if row is not None else None for key, row in zip(keys, rows, strict=True)
        ]

    def _scan(self, table: str, start: bytes, stop: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        try:
            return self._db.scan(table, start, stop, limit)
        except CacheUnusable as exc:
            if not self._unreadable:  # once, because a full cache comes here at each read
                log.warning(
                    "%s: until the next start nothing is evicted, and what is not cached is not kept", exc
                )
            self._unreadable = True
            return []

    def extents_of(self, tier: int, digest: bytes) -> Iterator[int]:
        """Extent indices of a version for which the tier has rows, in order, read lazily."""
        start = _KEY.pack(tier, digest, 0)
        stop = start[:-4] + b"\xff\xff\xff\xff\xff"
        while rows := self._scan("copies", start, stop, 64):
            yield from (_KEY.unpack(key)[2] for key, _ in rows if len(key) == _KEY.size)
            start = rows[-1][0] + b"\0"

    def digests(self, tier: int, limit: int, *, pinned: bool = False) -> Iterator[list[bytes]]:
        """The digests of a tier's rows, in order, those of `limit` rows at a time, read lazily. `pinned`: of rows of pinned
        copies only."""
        start = _KEY.pack(tier, b"", 0)
        while rows := self._scan("copies", start, bytes([tier + 1]), limit):
            start = rows[-1][0] + b"\0"
            keys = (key for key, row in rows if not pinned or _is_pinned(row))
            yield list(dict.fromkeys(key[1:17] for key in keys if len(key) == _KEY.size))

    def oldest(self, tier: int, after: bytes, limit: int) -> list[Row]:
        """The next `limit` rows in the order of eviction, oldest first, after the cursor `after` (b"" to begin)."""
        start = after + b"\0" if after else _CLOCK.pack(tier, 0)
        found = []
        for key, value in self._scan("order", start, _CLOCK.pack(tier + 1, 0), limit):
            if len(key) == _CLOCK.size and len(value) == _ORDERED.size:  # otherwise the row is damaged
                *copy_key, dataset = _ORDERED.unpack(value)
                found.append((key, (copy_key[0], copy_key[1], copy_key[2]), _CLOCK.unpack(key)[1], dataset))
        return found

    def totals(self, tier: int) -> Totals:
        """The tier's counters at the last flush."""
        row = self._db.get("meta", b"total%d" % tier)
        return _TOTAL.unpack(row) if row is not None and len(row) == _TOTAL.size else (0, 0, 0)

    def note(self, name: bytes) -> bytes | None:
        """The note of this name that was last given to `write`, if any."""
        try:
            return self._db.get("meta", b"note-" + name)
        except CacheUnusable:
            return None

    def tag(self, tier: int) -> bytes | None:
        return self._db.get("meta", b"tag%d" % tier)

    def forget_tier(self, tier: int, tag: bytes) -> None:
        """Drop a tier's rows and store the `tag` of its new directory. The rows describe another (a tmpfs before a
        reboot)."""
        self._db.write(
            [("meta", b"tag%d" % tier, tag), ("meta", b"total%d" % tier, None)],
            ranges=[
                ("copies", _KEY.pack(tier, b"", 0), bytes([tier + 1])),
                ("order", _CLOCK.pack(tier, 0), bytes([tier + 1])),
            ],
        )

    def write(
        self,
        saved: list[Saved],
        removed: Iterable[tuple[CopyKey, int | None]],
        totals: dict[int, Totals],
        notes: dict[bytes, bytes],
    ) -> None:
        """Write all of this in one durable transaction. `removed`: (key, stored clock). Blocking."""
        puts: list[Put] = []
        for key, stored in removed:
            puts.append(("copies", _KEY.pack(*key), None))
            if stored:
                puts.append(("order", _CLOCK.pack(key[0], stored), None))
        for key, row, dataset, clock, stored in saved:
            if stored and stored != clock:
                puts.append(("order", _CLOCK.pack(key[0], stored), None))
            puts.append(("copies", _KEY.pack(*key), row))
            if clock:
                puts.append(("order", _CLOCK.pack(key[0], clock), _ORDERED.pack(*key, dataset)))
        for tier, total in totals.items():
            puts.append(("meta", b"total%d" % tier, _TOTAL.pack(*total)))
        puts += [("meta", b"note-" + name, note) for name, note in notes.items()]
        self._db.write(puts)

    def close(self, whole: bool = True, trusted: bool = False) -> None:
        """Close it. `whole`: everything was written, so it is closed cleanly. `trusted`: all files are on the disk, too, so
        the next daemon may skip checksums."""
        try:
            if trusted and self.trusted:
                self._db.write([("meta", b"trusted", b"yes")])
        except (NoRoom, CacheUnusable):
            pass
        self._db.close(clean=whole and self._has_no_mark)


# -- the catalog -----------------------------------------------------------------------------------

OBJECTS_IN_MEMORY = 8192
"""Versions whose records are kept in memory after use, about 1 KiB each, and as many that were only looked at, 500 bytes
each. A bound of memory."""

COPIES_IN_MEMORY = 32_768
"""Copies in memory above which fewer versions are kept, about 1.5 KiB each (measured), and as many of versions that were
only looked at. A bound of memory."""

CHECKED_COPIES = 131_072
"""Copies of each of two generations in `Checked`, about 70 bytes each (measured), so 18 MiB in all. A bound of memory."""


class CachedObject:
    """The record of a version that is open or was lately used. `refs` counts its users (`hold`, `release`, `held`).

    `copies` maps (tier, extent) to a loaded copy, or None if the tier has none. `fds` are its open files by tier.
    `immutable` are the tiers where its file is known to be immutable, `leaving` those where all its blocks are forgotten and
    the file waits for its last pin. `inodes` are the inodes of its files by tier, as far as one was opened: another program
    may remove a file. `backing` is its passthrough file. `pinned`: new copies are pinned."""

    __slots__ = ("backing", "copies", "fds", "id", "immutable", "inodes", "leaving", "pinned", "refs")

    def __init__(self, object_id: ObjectId) -> None:
        self.id = object_id
        self.copies: dict[tuple[int, int], Copy | None] = {}
        self.fds: dict[int, int] = {}
        self.immutable: set[int] = set()
        self.leaving: set[int] = set()
        self.inodes: dict[int, int] = {}
        self.backing: Backing | None = None
        self.pinned = False
        self.refs = 0

    def hold(self) -> None:
        """Add a user: the record stays in memory, with its files open, until `release`."""
        self.refs += 1

    def release(self) -> None:
        self.refs -= 1
        if self.fds and not self.refs:
            self.close_if_unused()

    @contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.release()

    def close_if_unused(self) -> None:
        """Close its files if neither the record nor a copy has users."""
        if self.fds and not self.in_use():
            self.close_files()

    def in_use(self) -> bool:
        if self.refs:
            return True
        for copy in self.copies.values():  # noqa: SIM110 - a plain loop takes a third of the time, and each use calls this
            if copy is not None and copy.pins:
                return True
        return False

    def is_immutable(self, tier: Tier) -> bool:
        """True if its file on the tier is immutable, or may be, because the disk does not answer. The mode of the file says
        so; a positive answer is remembered."""
        if tier.number in self.immutable:
            return True
        immutable = tier.immutable(self.id.digest)
        if immutable:
            self.immutable.add(tier.number)
        return immutable is not False

    def copies_on(self, tier: Tier) -> list[Copy]:
        """Its loaded copies on the tier."""
        return [copy for (number, _), copy in self.copies.items() if number == tier.number and copy]

    def has(self, copy: Copy) -> bool:
        """True unless the copy was removed while a reader had it."""
        return self.copies.get((copy.tier, copy.extent)) is copy

    def file(self, tier: Tier) -> int:
        """A descriptor of its file on the tier, kept open while the object is in use. OSError if it is not there."""
        fd = self.fds.get(tier.number)
        if fd is None:
            fd = self.fds[tier.number] = self.open(tier)
        return fd

    def open(self, tier: Tier) -> int:
        """Open its file on the tier, in any thread. OSError if it is not there, or is not the one that has its blocks."""
        fd = tier.open_file(self.id.digest)
        try:
            if self.is_its_file(tier.number, fd):
                return fd
            raise FileNotFoundError(errno.ENOENT, "its file was replaced")
        except OSError:
            os.close(fd)
            raise

    def is_its_file(self, tier: int, fd: int) -> bool:
        """True unless another file of it was opened on the tier before, which has its blocks. Only `close_file` forgets that
        one. In any thread. May raise OSError."""
        inode = os.fstat(fd).st_ino
        return self.inodes.setdefault(tier, inode) == inode

    def close_file(self, tier: int) -> None:
        self.inodes.pop(tier, None)
        fd = self.fds.pop(tier, None)
        if fd is not None:
            os.close(fd)

    def close_files(self) -> None:
        for tier in list(self.fds):
            self.close_file(tier)


@dataclass(eq=False, slots=True)
class BackingFile:
    """A file to register with the kernel. `id` is its backing id, 0 until it is registered; `fd` is -1 after that. `blocks`
    is how many of its blocks are cached."""

    fd: int
    id: int = field(default=0, init=False)
    blocks: int = field(default=0, init=False)

    def registered(self, backing_id: int) -> None:
        """Note the backing id, and close the descriptor: the kernel has its own reference to the file now."""
        self.id = backing_id
        self.close()

    def reuse(self) -> bool:
        """Always False. See `cachefs.fs.reader.Backing`."""
        return False

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(eq=False, slots=True)
class Backing(BackingFile):
    """A whole, verified, immutable file of the cache. `users` counts the opens that share it, `copies` are its extents.
    `_idle` are the backing files without users, of which it becomes one and which have the value True. `reused`: it was
    opened by `reuse`, so its release notes the use."""

    object: CachedObject
    tier: Tier
    copies: list[Copy]
    _idle: OrderedDict[Backing, bool]
    _retire: Callable[[Backing], None]
    _metrics: Metrics
    users: int = field(default=0, init=False)
    reused: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.blocks = sum([copy.bitmap.bit_count() for copy in self.copies])

    def reuse(self) -> bool:
        """Open an idle backing file again, as `Passthrough.open` does, with less work. False if it is not idle."""
        if self.tier.disk.down or not self._idle.pop(self, False):
            return False
        self.users = 1
        self.reused = True
        for copy in self.copies:
            copy.pins += 1
        self._metrics.passthrough_blocks += self.blocks
        return True

    def retire(self) -> None:
        """Unregister it from the kernel and the cache. It must have no users."""
        self._retire(self)


class Unnamed:
    """Stands in for the ObjectId of a version of which only the digest is known, because the index keeps no keys."""

    __slots__ = ("digest", "key")
    size = sys.maxsize  # not known: it may have any number of extents

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.key = f"version {digest.hex()}"


class Checked:
    """The set of copies that were verified since the daemon started and are not in memory any more, so that a file that was
    prefetched and verified can be opened in passthrough hours later. It has at least the `CHECKED_COPIES` added last. Copies
    are stored as 64-bit hashes, so one of 2^46 unverified copies is taken for a verified one."""

    def __init__(self) -> None:
        self._young: set[int] = set()
        self._old: set[int] = set()

    def __contains__(self, key: CopyKey) -> bool:
        name = self._name(key)
        return name in self._young or name in self._old

    def add(self, key: CopyKey) -> None:
        if len(self._young) >= CHECKED_COPIES:
            self._old, self._young = self._young, set()
        self._young.add(self._name(key))

    def discard(self, key: CopyKey) -> None:
        if self._young or self._old:
            name = self._name(key)
            self._young.discard(name)
            self._old.discard(name)

    @staticmethod
    def _name(key: CopyKey) -> int:
        return unit_hash(key[1], key[2]) ^ key[0]


class Catalog:
    """The records in memory, and their changes for the index. `trust`: blocks are not checked; otherwise each is verified
    before its first use. `clock` is the logical time, which grows with each use."""

    def __init__(self, index: Index, tiers: list[Tier], block_size: int, *, trust: bool) -> None:
        self._index = index
        self._tiers = tiers
        self._tier = {tier.number: tier for tier in tiers}
        self._block_size = block_size
        self._trust = trust
        self._objects: OrderedDict[bytes, CachedObject] = OrderedDict()
        self._dirty: dict[CopyKey, Copy] = {}  # in the order of their last use
        self._removed: dict[CopyKey, int] = {}  # keys whose row the next flush deletes → stored clock
        self._flushing: dict[CopyKey, Copy | int | None] = {}  # the values of both, while a flush writes them
        self._loaded = 0  # copies in the records of `_objects`
        # Records that only `peek` has made: prefetch peeks at files before it fetches them.
        self._peeked: dict[bytes, CachedObject] = {}
        self._peeked_copies = 0  # copies that they loaded since the last clearing
        self._checked = Checked()
        # Noted with each flush, because rows that a start does not read may have the newest clock.
        self.clock = int.from_bytes(index.note(b"clock") or b"", "big") + 1
        self.recent = self.clock  # the clock at the last flush: the next one writes copies used after it
        self.index_error = ""
        self.unfinished = index.unfinished  # files may be left that are in no row, until a scrub has ended
        for tier in tiers:
            tier.used_bytes, tier.blocks, tier.pinned_bytes = index.totals(tier.number)

    # -- objects and copies ------------------------------------------------------------------------

    def object(self, object_id: ObjectId) -> CachedObject:
        """The record of this version, created if there is none."""
        digest = object_id.digest
        found = self._objects.get(digest)
        if found is None:
            return self._add(digest, object_id)
        self._objects.move_to_end(digest)
        found.id = object_id  # the record may have an `Unnamed`
        return found

    def by_digest(self, digest: bytes) -> CachedObject:
        """The record of a version of which only the digest is known."""
        found = self._objects.get(digest)
        if found is None:
            return self._add(digest, Unnamed(digest))
        self._objects.move_to_end(digest)
        return found

    def peek(self, object_id: ObjectId) -> CachedObject:
        """The record of a version for a caller that only reads it. It does not become more recently used."""
        found = self._objects.get(object_id.digest)
        if found is None:
            found = self._peeked.get(object_id.digest)
            if found is None:
                found = CachedObject(object_id)
                self._remember_peeked({object_id.digest: found})
        found.id = object_id
        return found

    def preload(self, versions: Iterable[ObjectId]) -> None:
        """Prepare `peek` for these versions: read the rows of their first extents in one transaction."""
        records = {v.digest: CachedObject(v) for v in versions if v.digest not in self._objects}
        self._load_into(records, [(tier, digest, 0) for digest in records for tier in self._tier])
        self._remember_peeked(records)

    def _remember_peeked(self, records: dict[bytes, CachedObject]) -> None:
        if len(self._peeked) > OBJECTS_IN_MEMORY or self._peeked_copies > COPIES_IN_MEMORY:
            self._peeked.clear()
            self._peeked_copies = 0
        self._peeked.update(records)

    def idle(self, digest: bytes) -> CachedObject | None:
        """`peek` for a version of which only the digest is known; None while it is in use."""
        obj = self._objects.get(digest)
        if obj is None:
            return CachedObject(Unnamed(digest))  # type: ignore[arg-type]
        return None if obj.in_use() else obj

    def _add(self, digest: bytes, object_id: Any) -> CachedObject:
        if len(self._objects) >= OBJECTS_IN_MEMORY or self._loaded >= COPIES_IN_MEMORY:
            self._forget_some()
        peeked = self._peeked.pop(digest, None)
        found = self._objects[digest] = peeked or CachedObject(object_id)
        for (tier, extent), copy in found.copies.items():  # `peek` loaded these
            self._loaded += copy is not None
            self._checked.discard((tier, digest, extent))
        return found

    def remembers(self, obj: CachedObject) -> bool:
        """True if the record is in memory, and not one that only `peek` has made."""
        return self._objects.get(obj.id.digest) is obj

    def _forget_some(self) -> None:
        for digest in list(islice(self._objects, OBJECTS_IN_MEMORY // 8)):
            obj = self._objects[digest]
            copies = [c for c in obj.copies.values() if c]
            # The users of a backing file pin its copies, but a restored one may have none.
            opened = obj.backing is not None and obj.backing.users > 0
            unwritten = any(c.key in self._dirty or c.key in self._flushing for c in copies)
            if obj.in_use() or opened or unwritten:
                self._objects.move_to_end(digest)  # it is tried again after all others
                continue
            if obj.backing is not None:
                obj.backing.retire()
            self._loaded -= len(copies)
            for copy in copies:
                if copy.verified == copy.bitmap:
                    self._checked.add(copy.key)
            obj.close_files()
            del self._objects[digest]

    def copy(self, obj: CachedObject, tier: int, extent: int) -> Copy | None:
        """The tier's copy of the extent, if any. The first call loads those of all tiers in one transaction, because callers
        ask for the others next."""
        try:
            return obj.copies[tier, extent]
        except KeyError:
            self._load(obj, [extent])
            return obj.copies[tier, extent]

    def _load(self, obj: CachedObject, extents: Iterable[int]) -> None:
        """Load the copies of these extents on all tiers, as far as they are not loaded, in one transaction."""
        digest = obj.id.digest
        keys = [(t, digest, e) for e in extents for t in self._tier if (t, e) not in obj.copies]
        self._load_into({digest: obj}, keys)
        if self.remembers(obj):
            for key in keys:
                self._loaded += obj.copies[key[0], key[2]] is not None
                self._checked.discard(key)  # the loaded copy records it from now on
        elif self._peeked.get(digest) is obj:
            self._peeked_copies += len(keys)

    def _load_into(self, records: dict[bytes, CachedObject], keys: list[CopyKey]) -> None:
        """Load the copies of these keys, None for those without a valid row, into the records of their versions."""
        for tier, digest, extent in keys:
            records[digest].copies[tier, extent] = None
        listed = [key for key in keys if key not in self._removed and key not in self._flushing]
        for key, copy in zip(listed, self._index.load(listed), strict=True):
            if copy is not None:
                obj = records[copy.digest]
                obj.copies[copy.tier, copy.extent] = copy
                obj.pinned |= copy.pinned
                if self._trust or key in self._checked:
                    copy.verified = copy.bitmap

    def copies(self, obj: CachedObject, tier: int) -> list[Copy]:
        """All copies of the version on a tier, by extent."""
        # One extent, as most versions have: no search is needed.
        if obj.id.size <= BLOCKS_PER_EXTENT * self._block_size:
            copy = self.copy(obj, tier, 0)
            return [] if copy is None else [copy]
        extents = {0, *(e for t, e in obj.copies if t == tier)}
        extents.update(self._index.extents_of(tier, obj.id.digest))
        if any((tier, e) not in obj.copies for e in extents):
            self._load(obj, extents)
        return [c for e in sorted(extents) if (c := obj.copies[tier, e]) is not None]

    def extents(self, obj: CachedObject) -> Iterable[tuple[int, int]]:
        """(extent, bit mask of its blocks) for each extent of the version."""
        blocks = -(-obj.id.size // self._block_size)
        # A shortcut for small files, because each of their opens calls this.
        if 0 < blocks <= BLOCKS_PER_EXTENT:
            return ((0, (1 << blocks) - 1),)
        count = block_count(blocks, BLOCKS_PER_EXTENT)
        return ((extent, extent_bits(blocks, extent)) for extent in range(count))

    def all_copies(self, obj: CachedObject) -> list[Copy]:
        """All copies of the version, tier by tier."""
        return [copy for tier in self._tiers for copy in self.copies(obj, tier.number)]

    def whole(self, obj: CachedObject) -> bool:
        """True if each block of the version lies on some tier."""
        for extent, bits in self.extents(obj):
            for tier in self._tier:
                if (copy := self.copy(obj, tier, extent)) is not None:
                    bits &= ~copy.bitmap
            if bits:
                return False
        return True

    def find(self, obj: CachedObject, block: int) -> Copy | None:
        """The fastest tier's copy that has the block, verified ones first. Tiers whose disk is down are left out."""
        extent, bit = block // BLOCKS_PER_EXTENT, 1 << (block % BLOCKS_PER_EXTENT)
        held = None
        for tier in self._tiers:
            if tier.disk.down:
                continue
            copy = self.copy(obj, tier.number, extent)
            if copy is not None and copy.bitmap & bit:
                if copy.verified & bit:
                    return copy
                held = held or copy
        return held

    def ranges(self, copy: Copy, bits: int) -> Iterator[tuple[int, int]]:
        """(offset, length) in bytes of each block in `bits`."""
        while bits:
            block = copy.extent * BLOCKS_PER_EXTENT + (bits & -bits).bit_length() - 1
            bits &= bits - 1
            yield block * self._block_size, block_length(block, copy.object_size, self._block_size)

    def extent_bytes(self, copy: Copy) -> int:
        """Length in bytes of the copy's extent."""
        extent_bytes = BLOCKS_PER_EXTENT * self._block_size
        return min(extent_bytes, copy.object_size - copy.extent * extent_bytes)

    def has_copies(self, obj: CachedObject, tier: int) -> bool:
        """True if the tier has a copy of the version, or a cache write or move is making one."""
        if any(copy for (number, _), copy in obj.copies.items() if number == tier and copy):
            return True
        keys = ((tier, obj.id.digest, e) for e in self._index.extents_of(tier, obj.id.digest))
        return any(not self.is_row_stale(key) and (tier, key[2]) not in obj.copies for key in keys)

    def is_row_stale(self, key: CopyKey) -> bool:
        """True if the index's row of this key is out of date: the copy was removed, or a flush is writing it."""
        return key in self._removed or key in self._flushing

    def lists_all(self, object_id: ObjectId) -> bool:
        """True if the index has rows of all blocks of the version that are cached. Clocks may be out of date there."""
        obj = self._objects.get(object_id.digest)
        # Copies with changes stay in memory (`_forget_some`).
        copies = [] if obj is None else [copy for copy in obj.copies.values() if copy]
        if any(copy.key in self._flushing for copy in copies):
            return False
        changed = [copy for copy in copies if copy.key in self._dirty]
        rows = self._index.load([copy.key for copy in changed])
        return all(row and not copy.bitmap & ~row.bitmap for copy, row in zip(changed, rows, strict=True))

    def unwritten(self) -> Iterator[Copy]:
        """Copies whose rows are out of date or missing, least recently used first."""
        changed = chain(self._flushing.values(), self._dirty.values())
        return (copy for copy in changed if isinstance(copy, Copy))

    # -- changes -----------------------------------------------------------------------------------

    def create(
        self, obj: CachedObject, tier: int, extent: int, object_size: int, dataset: int, version: int = -1
    ) -> Copy:
        """The copy of an extent on a tier, created without blocks if there is none. `version` is its `dataset_version`."""
        copy = self.copy(obj, tier, extent)
        if copy is None:
            digest = obj.id.digest
            copy = Copy(
                tier, digest, extent, object_size, dataset=dataset, pinned=obj.pinned, dataset_version=version
            )
            stored = self._removed.pop((tier, digest, extent), None)
            if stored is not None:
                # The index still has an old row of this key, with blocks that are gone: the next flush replaces it.
                copy.stored_clock = stored
                self._dirty[copy.key] = copy
            obj.copies[tier, extent] = copy
            self._loaded += self.remembers(obj)
        return copy

    def touch(self, copy: Copy) -> CopyKey:
        """Set the copy's clock to now; the next flush writes it. Returns its key."""
        copy.clock = copy.used = self.clock = self.clock + 1
        key = copy.tier, copy.digest, copy.extent
        self._dirty.pop(key, None)
        self._dirty[key] = copy
        return key

    def changed(self, copy: Copy) -> None:
        """Have the next flush write the copy, without changing its age."""
        self._dirty.setdefault((copy.tier, copy.digest, copy.extent), copy)

    def remove(self, obj: CachedObject, copy: Copy) -> None:
        """Remove a copy that has no blocks any more."""
        if obj.copies.pop((copy.tier, copy.extent), None) is not None:
            self._loaded -= self.remembers(obj)
        key = copy.key
        self._dirty.pop(key, None)
        if copy.stored_clock is not None:
            # Other keys would only add up here while the index cannot be written.
            self._removed[key] = copy.stored_clock

    def damaged(self, key: CopyKey, clock: int) -> None:
        """Have the next flush remove a row in the order of eviction whose copy has no row, or a damaged one."""
        self._removed[key] = clock

    # -- the index ---------------------------------------------------------------------------------

    @property
    def changes(self) -> bool:
        """True if there is something to flush."""
        return bool(self._dirty or self._removed)

    def flush_begins(self) -> None:
        """Make each use from now on a separate one."""
        self.recent = self.clock

    async def flush(self, notes: dict[bytes, bytes]) -> list[Placed]:
        """Write changes and `notes` to the index; one call at a time. Returns the rows written in the order of eviction. If
        it failed, all changes are kept for the next flush, and `index_error` says why."""
        saving, self._dirty = self._dirty, {}
        removing, self._removed = self._removed, {}
        saved: list[Saved] = []
        placed: list[Placed] = []
        gone: list[tuple[CopyKey, int | None]] = [*removing.items()]
        before = {key: copy.stored_clock for key, copy in saving.items()}
        for key, copy in saving.items():
            if copy.bitmap:
                # A copy pinned on the last tier cannot be evicted or moved, so it gets no row in the order.
                clock = 0 if copy.pinned and copy.tier == self._tiers[-1].number else copy.clock
                row = pack_copy(copy, ordered=clock > 0)
                saved.append((key, row, copy.dataset, clock, copy.stored_clock))
                copy.stored_clock = clock
                if clock:
                    placed.append((key, clock, copy.dataset))
            else:  # all its blocks are forgotten, but a user still has a pin
                gone.append((key, copy.stored_clock))
                copy.stored_clock = 0  # the row is there until this flush has ended
        self._flushing = {**saving, **removing}
        notes = {b"clock": self.clock.to_bytes(8, "big"), **notes}
        totals = {
            t.number: (max(0, t.used_bytes - t.unlisted_bytes), max(0, t.blocks), max(0, t.pinned_bytes))
            for t in self._tiers
        }
        try:
            with trio.CancelScope(shield=True):
                await in_thread(partial(self._index.write, saved, gone, totals, notes))
        except (NoRoom, CacheUnusable, OSError) as exc:  # OSError: no thread can be started
            if not self.index_error:
                log.warning("cannot write the cache index, a restart will be colder: %s", exc)
            self.index_error = str(exc)
            self._undo_flush(saving, removing, before)
            return []
        else:
            if self.index_error:
                log.warning("the cache index can be written again")
            self.index_error = ""
            return placed
        finally:
            self._flushing = {}

    def _undo_flush(
        self, saving: dict[CopyKey, Copy], removing: dict[CopyKey, int], before: dict[CopyKey, int | None]
    ) -> None:
        """After a failed flush: have the next one write all of it, with what has changed since."""
        for key, copy in saving.items():
            stored = copy.stored_clock = before[key]
            if key in self._removed:
                del self._removed[key]
                if stored is not None:
                    self._removed[key] = stored
            elif copy.bitmap or stored is not None or key in self._dirty:
                # Another copy may be in the place of this one by now.
                self._dirty.setdefault(key, copy).stored_clock = stored
        for key, clock in removing.items():
            if (made := self._dirty.get(key)) is not None:
                made.stored_clock = clock
            else:
                self._removed.setdefault(key, clock)

    def listed(self, tier: int, *, pinned: bool = False) -> Iterator[list[bytes]]:
        """The digests for which the index has rows of the tier, some at a time. `pinned`: rows of pinned copies only."""
        return self._index.digests(tier, 1000, pinned=pinned)

    def forget_tier(self, tier: int) -> None:
        """Forget all copies of a tier whose files are being removed."""
        self._peeked = {}
        for obj in self._objects.values():
            for key in [key for key in obj.copies if key[0] == tier]:
                self._loaded -= obj.copies.pop(key) is not None
            obj.close_file(tier)
        self._dirty = {key: copy for key, copy in self._dirty.items() if key[0] != tier}
        self._removed = {key: clock for key, clock in self._removed.items() if key[0] != tier}
        self._checked = Checked()
        try:
            self._index.forget_tier(tier, b"")
        except (NoRoom, CacheUnusable) as exc:
            # A full disk must not prevent a stop. The index is then not closed cleanly.
            self.index_error = str(exc)

    def remove_leaving(self) -> None:
        """Remove the files whose blocks are all forgotten. Their users have them open, but no row has them."""
        for obj in self._objects.values():
            for number in obj.leaving:
                self._tier[number].unlink(obj.id.digest)

    def abandon(self) -> None:
        """Close the index as unclean: the next start compares all of it with the files."""
        self._index.close(whole=False)

    async def aclose(self, *, whole: bool, trusted: bool) -> None:
        """Close the index after the last flush, cleanly if it is `whole`. `trusted`: all files are on the disk, too."""
        for obj in self._objects.values():
            obj.close_files()
        whole = whole and not (self.index_error or self.unfinished)
        await trio.to_thread.run_sync(self._index.close, whole, trusted)

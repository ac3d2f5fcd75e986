"""The index: which blocks lie where, how old they are and what they hash to. Rows and their codec.

One row per *copy*: an extent of one version on one tier. Rows are only written in batches (a flush every second or so,
fsynced, from a worker thread); a lost batch after a crash costs a refetch. The order of eviction is a table of its own,
(tier, clock) → copy and dataset, so a start reads nothing and eviction reads only its victims. What is pinned on the last
tier has no row there.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from cachefs.base.database import Database, Put
from cachefs.base.errors import CacheUnusable, NoRoom
from cachefs.base.names import BLOCKS_PER_EXTENT
from cachefs.store.tier import RAM, SSD

log = logging.getLogger(__name__)

_HEAD = struct.Struct(">QQIHBB")  # object size, clock, dataset, bitmap, flags, number of checksums
_KEY = struct.Struct(">B16sI")
_ORDERED = struct.Struct(">B16sII")  # the key of a copy, its dataset
_CLOCK = struct.Struct(">BQ")
_TOTAL = struct.Struct(">QQQ")
_CHECK = struct.Struct(">I")
_PINNED, _UNORDERED = 1, 2

CopyKey = tuple[int, bytes, int]
"""(tier number, object digest, extent index)"""

Row = tuple[bytes, CopyKey, int, int]
"""A row in the order of eviction: (cursor, copy key, stored clock, dataset)"""

Totals = tuple[int, int, int]
"""Of a tier: (allocated bytes, blocks, pinned bytes)"""

Saved = tuple[CopyKey, bytes, int, int | None, int | None]
"""(key, packed row, dataset, clock or None where it has no place in the order, clock stored before)"""


@dataclass(slots=True)
class Copy:
    """The blocks of one extent that one tier holds.

    `bitmap` and `verified` have a bit per block of the extent; `checksums` are xxh3_64 of each block. `clock` is the
    logical time of the last use, `stored_clock` the one in the index (None: not there yet). `pins` counts the users of
    the bytes across an await: fills, moves and threaded reads; `space.py` alone changes it. `arriving` are blocks that
    one fill or move is writing; `forgotten` are blocks dropped, whose bytes stay in the file until the last pin is gone.
    `first_use` is when an SSD copy was first read in this process. `used` is `clock`, or 0 while prefetched blocks wait
    for a reader. `pinned` copies stay until they are unpinned. `dataset_version` says when `dataset` was found out.
    """

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
    arriving: int = 0
    forgotten: int = 0
    dataset: int = 0
    used: int = 0
    pinned: bool = False
    dataset_version: int = -1
    checksums: list[int] = field(default_factory=lambda: [0] * BLOCKS_PER_EXTENT)

    @property
    def key(self) -> CopyKey:
        return (self.tier, self.digest, self.extent)


def pack_key(key: CopyKey) -> bytes:
    return _KEY.pack(*key)


def pack_copy(copy: Copy, *, ordered: bool = True) -> bytes:
    """`ordered`: there is a row in the order of eviction."""
    count = copy.bitmap.bit_length()
    flags = _PINNED * copy.pinned | _UNORDERED * (not ordered)
    head = _HEAD.pack(copy.object_size, copy.clock, copy.dataset, copy.bitmap, flags, count)
    body = head + struct.pack(f">{count}Q", *copy.checksums[:count])
    return body + _CHECK.pack(xxhash.xxh32_intdigest(body))


def unpack_copy(key: CopyKey, row: bytes) -> Copy | None:
    """The copy, or None when the row is damaged (then it is a miss)."""
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
        stored_clock=None if flags & _UNORDERED else clock,
        dataset=dataset,
        used=clock,
        pinned=bool(flags & _PINNED),
        checksums=checksums,
    )


class Index:
    """Typed access to the three tables. Reads are microseconds and happen on the spot; `write` belongs in a thread."""

    def __init__(self, path: Path, block_size: int) -> None:
        self._db = Database(path, ["copies", "order", "meta"], version=f"blocks-2-{block_size}", fsync=True)
        self.dropped = self._db.dropped is not None
        self.was_clean = self._db.was_clean
        # Never checking checksums is safe only if no daemon since the cache was empty may have left doubtful bytes.
        self.trusted = self._db.count("copies") == 0 or (
            self.was_clean and self._db.get("meta", b"trusted") == b"yes"
        )
        self._unreadable = False
        self._told = True
        try:
            self._db.write([("meta", b"trusted", None)])
        except NoRoom:
            self._told = False  # a full disk: what the index says of itself cannot be changed, so it is not closed cleanly

    def load(self, keys: list[CopyKey]) -> list[Copy | None]:
        """The copies as they were written, in the order of the keys."""
        try:
            rows = self._db.get_many("copies", map(pack_key, keys))
        except CacheUnusable:
            return [None] * len(keys)  # damage met while running: a miss
        return [
            unpack_copy(key, row) if row is not None else None for key, row in zip(keys, rows, strict=True)
        ]

    def _scan(self, table: str, start: bytes, stop: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        try:
            return self._db.scan(table, start, stop, limit)
        except CacheUnusable as exc:
            if not self._unreadable:  # a full cache asks at each read
                log.warning(
                    "%s: until the next start nothing is evicted, and what is not cached is not kept", exc
                )
            self._unreadable = True
            return []

    def extents_of(self, tier: int, digest: bytes) -> Iterator[int]:
        """Extent indices of a version that the tier has rows for, in order, read as they are asked for."""
        start = _KEY.pack(tier, digest, 0)
        stop = start[:-4] + b"\xff\xff\xff\xff\xff"
        while rows := self._scan("copies", start, stop, 64):
            yield from (_KEY.unpack(key)[2] for key, _ in rows if len(key) == _KEY.size)
            start = rows[-1][0] + b"\0"

    def digests(self, tier: int, after: bytes, limit: int) -> tuple[list[bytes], bytes]:
        """Digests of the next `limit` rows of a tier behind the cursor `after` (b"" to begin), and the next cursor."""
        start = after + b"\0" if after else _KEY.pack(tier, b"", 0)
        rows = self._scan("copies", start, bytes([tier + 1]), limit)
        found = dict.fromkeys(key[1:17] for key, _ in rows if len(key) == _KEY.size)
        return list(found), rows[-1][0] if rows else b""

    def oldest(self, tier: int, after: bytes, limit: int) -> list[Row]:
        """The next `limit` rows, oldest first; `after` is the last cursor, b"" to begin."""
        start = after + b"\0" if after else _CLOCK.pack(tier, 0)
        found = []
        for key, value in self._scan("order", start, _CLOCK.pack(tier + 1, 0), limit):
            if len(key) == _CLOCK.size and len(value) == _ORDERED.size:  # else damaged: it names nothing
                *copy_key, dataset = _ORDERED.unpack(value)
                found.append((key, (copy_key[0], copy_key[1], copy_key[2]), _CLOCK.unpack(key)[1], dataset))
        return found

    def newest_clock(self) -> int:
        rows = [self._db.last("order", _CLOCK.pack(tier + 1, 0)) for tier in (RAM, SSD)]
        keys = [row[0] for row in rows if row is not None and len(row[0]) == _CLOCK.size]
        return max((_CLOCK.unpack(key)[1] for key in keys), default=0)

    def totals(self, tier: int) -> Totals:
        """As of the last flush."""
        row = self._db.get("meta", b"total%d" % tier)
        return _TOTAL.unpack(row) if row is not None and len(row) == _TOTAL.size else (0, 0, 0)

    def note(self, name: bytes) -> bytes | None:
        """What `write` was given as a note."""
        try:
            return self._db.get("meta", b"note-" + name)
        except CacheUnusable:
            return None

    def tag(self, tier: int) -> bytes | None:
        return self._db.get("meta", b"tag%d" % tier)

    def forget_tier(self, tier: int, tag: bytes) -> None:
        """The tier's directory is not the one the rows speak of (tmpfs after a reboot): drop its rows."""
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
        removed: list[tuple[CopyKey, int | None]],
        totals: dict[int, Totals],
        notes: dict[bytes, bytes] | None = None,
    ) -> None:
        """One durable transaction. `removed`: (key, stored clock). Blocking."""
        puts: list[Put] = []
        for key, stored in removed:
            puts.append(("copies", pack_key(key), None))
            if stored is not None:
                puts.append(("order", _CLOCK.pack(key[0], stored), None))
        for key, row, dataset, clock, stored in saved:
            if stored is not None and stored != clock:
                puts.append(("order", _CLOCK.pack(key[0], stored), None))
            puts.append(("copies", pack_key(key), row))
            if clock is not None:
                puts.append(("order", _CLOCK.pack(key[0], clock), _ORDERED.pack(*key, dataset)))
        for tier, total in totals.items():
            puts.append(("meta", b"total%d" % tier, _TOTAL.pack(*total)))
        puts += [("meta", b"note-" + name, note) for name, note in (notes or {}).items()]
        self._db.write(puts)

    def close(self, whole: bool = True, trusted: bool = False) -> None:
        """`whole`: everything was written, so the next open may trust it; `trusted`: all files are on the disk, too."""
        try:
            if trusted and self.trusted:
                self._db.write([("meta", b"trusted", b"yes")])
        except (NoRoom, CacheUnusable):
            pass
        self._db.close(clean=whole and self._told)

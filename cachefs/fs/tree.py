"""The tree as it is known: names, inode numbers and the state of listings, in LMDB.

Idea: a name is one row, filed under its directory and its mark (`cachefs.fs.keys`), so that a table looks like the
listing it came from. No Python object is kept per name: a million names cost disk pages, not heap. Objects exist only
for directories in use, and exactly one for each.

Tables: ``names`` directory number + mark → row; ``inodes`` inode number → mark (the directory is part of the number);
``directories`` number → state of its listing; ``state`` whatever concerns all; ``local`` the keys of `names` that are being
written here; ``kept`` what was set here of files and directories (`cachefs.fs.overrides`).

A file row beside a directory row of the same name is hidden: the directory wins, and owns the inode number.

Reads are synchronous and cheap. So are writes, for the rows are brought to the disk behind them; they go through
`cachefs.fs.pages` under the one lock `writing`.
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import trio

from cachefs.base.behind import WriteBehind
from cachefs.base.clock import Machine, SteadyClock
from cachefs.base.database import Put
from cachefs.base.errors import ConfigError, NotADirectory, NotFound
from cachefs.fs.attributes import Ttls
from cachefs.fs.inodes import LOW_BITS, LOW_MASK, ROOT, join, low_of, next_number, number_of
from cachefs.fs.keys import mark_of_directory, name_in, nameable
from cachefs.fs.rows import PINNED, Row, decode, encode

if TYPE_CHECKING:
    from cachefs.fs.listing import Listing
    from cachefs.origin import Origin

log = logging.getLogger(__name__)

TABLES = ("names", "inodes", "directories", "state", "local", "kept")
FORMAT = "names 2"
"""Name of the tables' format, for `Database`."""

KEPT_DIRECTORIES = 4096
"""Directories remembered as objects (about 500 bytes each); others are read again when asked for. Guessed."""

CHANGES_REMEMBERED = 16_384
"""Names that were changed here lately, about 150 bytes each. Guessed: more than change while one page is on its way."""

ALWAYS = 0xFFFFFFFF

_STATE = struct.Struct(">QIIdIII")
_EPOCH = b"epoch"
_FINGERPRINT = b"volumes"
_CLOCK = b"clock"
_NEWEST = b"newest"
_TIME = struct.Struct(">d")


@dataclass(frozen=True)
class Volume:
    """One store under the mount; `name` is its top-level directory, "" when it is the mount's root itself."""

    name: str
    origin: Origin
    ttls: Ttls | None = None  # None: as the mount's


class Found(NamedTuple):
    """A name that exists. `until` is when what is known of it has to be looked at again."""

    ino: int
    is_dir: bool
    row: Row
    until: float


class KernelListing:
    """The listing of a directory that the kernel has, or is reading: what it has read under the number `ino` since it last
    dropped what it had. `version` is the directory's then, `generation` the listing that it is read from, 0 until then."""

    __slots__ = ("generation", "ino", "version")

    def __init__(self, ino: int, version: int) -> None:
        self.ino = ino
        self.version = version
        self.generation = 0


_versions = count(1)


class Directory:
    """One directory in use. `prefix` is the key prefix of what is in it; no origin means the list of volumes. `early`: its
    listing was begun before a reader came. It shows what is there, but not what is missing: that may have come since."""

    __slots__ = (
        "__weakref__",
        "complete",
        "early",
        "epoch_needed",
        "epoch_seen",
        "generation",
        "hidden",
        "ino",
        "kernel",
        "key",
        "listed_at",
        "listed_epoch",
        "listing",
        "mark",
        "marked",
        "number",
        "origin",
        "parent",
        "prefix",
        "refreshed",
        "stale_asks",
        "stale_since",
        "ttls",
        "version",
        "warned",
    )

    def __init__(
        self,
        ino: int,
        number: int,
        parent: Directory | None,
        mark: bytes,
        origin: Origin | None,
        prefix: str,
        ttls: Ttls,
    ) -> None:
        self.ttls = ttls
        self.early = False
        self.ino = ino
        self.number = number
        self.key = number.to_bytes(4, "big")
        self.parent = parent
        self.mark = mark
        self.origin = origin
        self.prefix = prefix
        self.generation = 0  # the last one given to a listing
        self.complete = 0  # that of the last listing that reached the end; 0: none did
        self.listed_at = 0.0
        self.listed_epoch = 0
        self.refreshed = 0  # the epoch in which a refresh of everything below was requested
        self.hidden = 0
        self.listing: Listing | None = None
        self.marked = False  # whether it is known that the store has a marker of it
        self.stale_asks = 0
        self.stale_since = 0.0
        self.warned = False
        self.epoch_seen = -1
        self.epoch_needed = 0
        self.kernel: KernelListing | None = None
        self.changed()

    def changed(self) -> None:
        """A name has come or gone since the last complete listing, or may have. To be called once that is written."""
        self.version = next(_versions)  # in the whole process: the object may be made again

    def load(self, state: bytes) -> None:
        (
            _,
            self.generation,
            self.complete,
            self.listed_at,
            self.listed_epoch,
            self.refreshed,
            self.hidden,
        ) = _STATE.unpack(state)

    def state(self) -> Put:
        """The row that says all this."""
        packed = _STATE.pack(
            self.ino,
            self.generation,
            self.complete,
            self.listed_at,
            self.listed_epoch,
            self.refreshed,
            self.hidden,
        )
        return ("directories", self.key, packed)

    @property
    def is_top(self) -> bool:
        """Whether it is there because it is mounted, not because a key says so."""
        return self.parent is None or self.parent.origin is None


def clock_of(database: WriteBehind, machine: Machine | None = None) -> SteadyClock:
    """The clock that the times in this database are by."""
    earlier = database.get("state", _CLOCK)
    clock = SteadyClock(earlier, machine)
    if clock.state != earlier:
        database.write([("state", _CLOCK, clock.state)])
    return clock


class _Turn:
    """The lock of those who write names. Each waits first while more rows wait for the disk than memory is to hold."""

    def __init__(self, database: WriteBehind) -> None:
        self._database = database
        self._lock = trio.Lock()

    async def __aenter__(self) -> None:
        if self._database.crowded:
            await self._database.uncrowded()
        await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class Tree:
    """What is known of all names. Opening it forgets everything that was learnt from other volumes, and makes everything
    unknown if some of it was learnt later than now: then nothing says how old the rest is."""

    def __init__(
        self,
        database: WriteBehind,
        volumes: Sequence[Volume],
        clock: Callable[[], float],
        ttls: Ttls | None = None,
    ) -> None:
        self._ttls = ttls or Ttls()
        self.database = database
        self.writing = _Turn(database)
        self._by_ino: weakref.WeakValueDictionary[int, Directory] = weakref.WeakValueDictionary()
        self._by_number: weakref.WeakValueDictionary[int, Directory] = weakref.WeakValueDictionary()
        self._kept: dict[int, Directory] = {}
        self._volumes: dict[bytes, tuple[Origin, Ttls]] = {}
        self.changes = 0  # made here so far
        self._changed: dict[tuple[int, bytes], int] = {}
        self.renewals = 0
        self._lasting: list[Put] = []  # rows that are the same as long as the mount is there
        self.moved: dict[int, int] = {}  # number whose name was moved away → number of the path it is at now
        same_volumes = self._check_fingerprint(volumes)
        self._forget_dirty_files()
        self.epoch = int.from_bytes(database.get("state", _EPOCH) or b"", "big")
        only = volumes[0].origin if len(volumes) == 1 and not volumes[0].name else None
        ttls = (only and volumes[0].ttls) or self._ttls
        self.root = Directory(ROOT, 0, None, b"", only, _prefix_of(only) if only else "", ttls)
        if state := database.get("directories", self.root.key):
            self.root.load(state)
        if only is None:
            self._write_volumes(volumes)
        self._by_ino[ROOT] = self._by_number[0] = self.root
        newest = database.get("state", _NEWEST)
        if same_volumes and (newest is None or _TIME.unpack(newest)[0] > clock()):
            log.info("the clock was set back since names were listed: looking again")
            database.write([*self.refresh(self.root), self.newest(clock())])

    def _check_fingerprint(self, volumes: Sequence[Volume]) -> bool:
        """Whether these volumes are those of the last run."""
        parts = sorted(f"{v.name}\0{v.origin.source}\0{_prefix_of(v.origin)}" for v in volumes)
        fingerprint = "\n".join(parts).encode("utf-8", "surrogatepass")
        known = self.database.get("state", _FINGERPRINT)
        if known != fingerprint:
            if known is not None:
                log.info("other sources than last time: forgetting the names that were known")
            everything = [(table, b"", b"\xff" * 8) for table in TABLES]
            clock = self.database.get("state", _CLOCK)
            self.database.write([("state", _FINGERPRINT, fingerprint), ("state", _CLOCK, clock)], everything)
        self._lasting += [
            ("state", _FINGERPRINT, fingerprint),
            ("state", _CLOCK, self.database.get("state", _CLOCK)),
        ]
        return known == fingerprint

    def _forget_dirty_files(self) -> None:
        """What was being written when the last daemon died: what is at the store under these names is not known."""
        while rows := self.database.scan("local", b"", b"\xff" * 8, 1000):
            puts: list[Put] = []
            for key, _ in rows:
                data, state = self.database.get("names", key), self.database.get("directories", key[:4])
                puts.append(("local", key, None))
                if data is not None and decode(data).generation == PINNED:
                    name, low = key[4:], decode(data).low
                    ino = join(int.from_bytes(key[:4], "big"), low_of(name) if low is None else low)
                    puts += [("names", key, None), ("inodes", inode_key(ino), None)]
                if state is not None:
                    puts.append(("directories", key[:4], _unlisted(state)))
            self.database.write(puts)

    def _write_volumes(self, volumes: Sequence[Volume]) -> None:
        """The root is the list of volumes: always listed, always fresh."""
        root = self.root
        root.generation = root.complete = 1
        root.listed_at, root.listed_epoch = float("inf"), ALWAYS
        puts: list[Put] = [root.state()]
        row = encode(Row(1, 0, 0, ""))
        for volume in volumes:
            name = volume.name.encode()
            if not nameable(name) or name in self._volumes:
                raise ConfigError(f"{volume.name!r} cannot be the name of a source: give it another name")
            self._volumes[name] = volume.origin, volume.ttls or self._ttls
            mark = mark_of_directory(name)
            low = low_of(name)
            puts += [("names", root.key + mark, row), ("inodes", inode_key(join(0, low)), mark)]
        self.database.write(puts)
        self._lasting += puts

    # -- directories -------------------------------------------------------------------------------

    def directory(self, ino: int) -> Directory:
        """The directory with this inode number. Raises `NotFound` or `NotADirectory`."""
        found = self._by_ino.get(ino)
        if found is not None:
            return found
        ino = self.moved.get(ino, ino)
        found = self._by_ino.get(ino)
        chain: list[tuple[int, bytes]] = []
        while found is None:
            mark = self._mark(ino)
            if not mark.endswith(b"/"):
                raise NotADirectory(f"inode {ino} is a file")
            chain.append((ino, mark))
            ino = self._owner(ino >> LOW_BITS)
            found = self._by_ino.get(ino)
        for child, mark in reversed(chain):
            found = self._adopt(found, child, mark)
        return found

    def locate(self, ino: int) -> tuple[Directory, bytes]:
        """Where an inode (not the root) is: its directory and its mark there. Raises `NotFound`."""
        ino = self.moved.get(ino, ino)
        mark = self._mark(ino)
        directory = self._by_number.get(ino >> LOW_BITS)
        return directory or self.directory(self._owner(ino >> LOW_BITS)), mark

    def _mark(self, ino: int) -> bytes:
        mark = self.database.get("inodes", inode_key(ino))
        if mark is None:
            raise NotFound(f"no inode {ino}")
        return mark

    def _owner(self, number: int) -> int:
        directory = self._by_number.get(number)
        if directory is not None:
            return directory.ino
        state = self.database.get("directories", number.to_bytes(4, "big"))
        if state is None:
            raise NotFound(f"no directory {number}")
        ino: int = _STATE.unpack(state)[0]
        return ino

    def _adopt(self, parent: Directory, ino: int, mark: bytes) -> Directory:
        number = number_of(ino)
        while True:
            other = self._by_number.get(number)
            state = self.database.get("directories", number.to_bytes(4, "big"))
            if other is None and (state is None or _STATE.unpack(state)[0] == ino):
                break
            number = next_number(number)
        if parent.origin is None:
            origin, ttls = self._volumes[name_in(mark)]
            directory = Directory(ino, number, parent, mark, origin, _prefix_of(origin), ttls)
        else:
            prefix = parent.prefix + mark.decode("utf-8")
            directory = Directory(ino, number, parent, mark, parent.origin, prefix, parent.ttls)
        if state is not None:
            directory.load(state)
        self._by_ino[ino] = self._by_number[number] = self._kept[number] = directory
        if len(self._kept) > KEPT_DIRECTORIES:
            del self._kept[next(iter(self._kept))]
        return directory

    def drop(self, directory: Directory) -> None:
        """Forget the object of a directory that is gone."""
        self._by_ino.pop(directory.ino, None)
        self._by_number.pop(directory.number, None)
        self._kept.pop(directory.number, None)

    def known(self, ino: int) -> Directory | None:
        """The directory, when it is in use."""
        return self._by_ino.get(ino)

    def by_number(self, number: int) -> Directory | None:
        return self._by_number.get(number)

    def epoch_needed(self, directory: Directory) -> int:
        """The epoch since which a listing of `directory` may have begun to be used."""
        if directory.epoch_seen != self.epoch:
            needed, above = 0, directory
            while above is not None:
                needed = max(needed, above.refreshed)
                above = above.parent  # type: ignore[assignment]
            directory.epoch_needed, directory.epoch_seen = needed, self.epoch
        return directory.epoch_needed

    def refresh(self, directory: Directory) -> list[Put]:
        """From now on nothing known about `directory` and below is used. Returns the rows that make it last."""
        self.epoch += 1
        directory.refreshed = self.epoch
        return [directory.state(), ("state", _EPOCH, self.epoch.to_bytes(4, "big"))]

    def renew(self) -> None:
        """Nothing is written any more: write the directories that are in use. All else is to be asked for again."""
        self.renewals += 1
        puts = list(self._lasting)
        for directory in self.in_use():
            if directory.origin is not None:
                directory.complete = 0
            directory.changed()
            puts.append(directory.state())
            parent, mark = directory.parent, directory.mark
            if parent is not None and parent.origin is not None:
                low = directory.ino & LOW_MASK
                row = Row(0, 0, 0, "", None if low == low_of(name_in(mark)) else low)
                puts += [
                    ("names", parent.key + mark, encode(row)),
                    ("inodes", inode_key(directory.ino), mark),
                ]
        self.database.write([*puts, *self.refresh(self.root)])

    def newest(self, listed_at: float) -> Put:
        """The row that says when the last listing ended."""
        return ("state", _NEWEST, _TIME.pack(listed_at))

    def tops(self) -> list[Directory]:
        """The directories that are mounted."""
        if self.root.origin is not None:
            return [self.root]
        return [self.directory(join(0, low_of(name))) for name in self._volumes]

    def in_use(self) -> list[Directory]:
        return list(self._by_number.values())

    # -- changes made here ---------------------------------------------------------------------------

    def note_change(self, directory: Directory, name: bytes) -> None:
        """A change of this name is done: what was asked for before must not undo it."""
        self.changes += 1
        self._changed.pop((directory.number, name), None)
        self._changed[directory.number, name] = self.changes
        if len(self._changed) > CHANGES_REMEMBERED:
            del self._changed[next(iter(self._changed))]

    def changed_since(self, directory: Directory, name: bytes, changes: int) -> bool:
        """Whether it was changed here after the first `changes` changes."""
        return self.changes != changes and self._changed.get((directory.number, name), 0) > changes

    # -- names -------------------------------------------------------------------------------------

    def find(self, directory: Directory, name: bytes) -> tuple[Row | None, Row | None]:
        """What is written about a name: as a directory, as a file."""
        key = directory.key + name
        as_dir, as_file = self.database.get_many("names", (key + b"/", key))
        return as_dir and decode(as_dir), as_file and decode(as_file)  # type: ignore[return-value]

    def row(self, directory: Directory, mark: bytes) -> Row | None:
        data = self.database.get("names", directory.key + mark)
        return None if data is None else decode(data)

    def scan(self, directory: Directory, after: bytes, limit: int) -> list[tuple[bytes, Row]]:
        """(mark, row) of the names behind the mark `after`, in order."""
        rows = self.database.scan(
            "names", directory.key + after + b"\0" if after else directory.key, end_of(directory.key), limit
        )
        return [(key[4:], decode(data)) for key, data in rows]

    def as_directories(self, directory: Directory, names: Sequence[bytes]) -> list[Row | None]:
        """What is written about these names as directories."""
        rows = self.database.get_many("names", [directory.key + name + b"/" for name in names])
        return [None if data is None else decode(data) for data in rows]

    def mark_at(self, directory: Directory, low: int) -> bytes | None:
        return self.database.get("inodes", inode_key(join(directory.number, low)))


def _unlisted(state: bytes) -> bytes:
    """The state of a directory whose last listing does not count any more."""
    ino, generation, _, _, listed_epoch, refreshed, hidden = _STATE.unpack(state)
    return _STATE.pack(ino, generation, 0, 0.0, listed_epoch, refreshed, hidden)


def inode_of(directory: Directory, name: bytes, row: Row) -> int:
    """The inode number of a name that has a row."""
    return directory.number << LOW_BITS | (low_of(name) if row.low is None else row.low)


def inode_key(ino: int) -> bytes:
    return ino.to_bytes(8, "big")


def end_of(key: bytes) -> bytes:
    """The first key behind everything that begins with `key` (never all 0xFF: numbers have 28 bits)."""
    return (int.from_bytes(key, "big") + 1).to_bytes(len(key), "big")


def _prefix_of(origin: Origin) -> str:
    prefix = origin.prefix
    return prefix if not prefix or prefix.endswith("/") else prefix + "/"

"""The tree of known names: names, inode numbers and the state of listings, in LMDB.

Each name is one row, under its directory and its mark (`cachefs.fs.keys`), so the rows of a directory have the order of its
listing. The row has the inode of the name. No Python object is kept for a name: a million names cost disk pages, not heap.
Each directory in use has exactly one `Directory`, which it keeps when it is renamed.

Tables: ``names`` inode of a directory + mark → row; ``inodes`` inode → inode of its directory + mark; ``directories`` inode
→ state of its listing; ``state`` values of the whole tree; ``local`` the keys of `names` that are being written here, or
whose objects a rename is deleting (`Tree.left`); ``kept`` inode → attribute overrides (`cachefs.fs.overrides`).

An inode is a directory, or one version of a file with the changes that this node makes to it. When the origin has another
version under a name, the name gets another inode.

If a name has a row as a file and a row as a directory, the file is hidden.

Reads are synchronous and cheap. So are writes, because the rows reach the disk later (`WriteBehind`). Writes go through
`cachefs.fs.pages` under the one lock `writing`.
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import TYPE_CHECKING, NamedTuple

from cachefs.base.behind import WriteBehind
from cachefs.base.clock import Machine, SteadyClock
from cachefs.base.database import Put
from cachefs.base.errors import CachefsError, ConfigError, NotADirectory, ObjectChanged
from cachefs.base.tasks import Lock, Outcome
from cachefs.fs.attributes import Ttls
from cachefs.fs.inodes import NUMBER_BYTES, ROOT, Numbers, inode_key
from cachefs.fs.keys import mark_of_directory, name_in, nameable
from cachefs.fs.rows import PINNED, Row, decode, encode

if TYPE_CHECKING:
    from cachefs.origin import Origin
    from cachefs.origin.protocol import ListPage

log = logging.getLogger(__name__)

TABLES = ("names", "inodes", "directories", "state", "local", "kept")
FORMAT = "names 3"
"""Name of the tables' format, for `Database`."""

KEPT_DIRECTORIES = 4096
"""How many directories are remembered as objects, about 500 bytes each; others are read again when they are used. Also how
many removed directories are remembered for processes that are in them; older ones answer ESTALE. A bound of memory: 2 MB
for each."""

CHANGES_REMEMBERED = 16_384
"""Recently changed names that are remembered, about 150 bytes each. A bound of memory: 2.5 MB."""

ADDED_REMEMBERED = 65_536
"""Names added to a directory while it is open that are remembered, about 150 bytes each. A bound of memory: 10 MB a
directory."""

ALWAYS = 0xFFFFFFFF

_STATE = struct.Struct(">IIdIII")
_NEVER = (-1, 0)
_EPOCH = b"epoch"
_FINGERPRINT = b"volumes"
_CLOCK = b"clock"
_NEWEST = b"newest"
_TIME = struct.Struct(">d")


@dataclass(frozen=True)
class Volume:
    """One origin under the mount. `name` is its top-level directory; "" means that it is the mount's root."""

    name: str
    origin: Origin
    ttls: Ttls = field(default_factory=Ttls)


class Found(NamedTuple):
    """A name that exists. After `until` (time of the tree's clock), the origin has to be asked again."""

    ino: int
    is_dir: bool
    row: Row
    until: float


@dataclass(slots=True, eq=False, repr=False)
class KernelListing:
    """The listing of a directory that the kernel caches, or is reading, for the inode `ino`. `version` is the directory's
    when that began; `generation` is the listing that it is read from, 0 before the first read."""

    ino: int
    version: int
    generation: int = 0


_versions = count(1)


@dataclass(slots=True)
class Listed:
    """The state of a directory's listings. `generation` is the last one given to a listing. `complete` is that of the last
    listing that reached its end, 0 without one: it began in `epoch`, its last page was requested `at` that time, and it
    met so many `hidden` keys. `refreshed` is the epoch of the last refresh of the directory and everything below. `early`:
    the listing began before a reader came, so a name that it does not show may have come since, and is asked for.
    `doubtful`: a change of a name failed since, so the listing counts only while the origin does not answer. `came` is when
    the last page of any listing came."""

    generation: int = 0
    complete: int = 0
    at: float = 0.0
    epoch: int = 0
    refreshed: int = 0
    hidden: int = 0
    early: bool = False
    doubtful: bool = False
    came: float = 0.0

    def next(self) -> int:
        """The generation of a new listing."""
        self.generation += 1
        return self.generation

    def ended(self, generation: int, epoch: int, at: float, hidden: int = 0) -> None:
        self.complete, self.epoch, self.at, self.hidden = generation, epoch, at, hidden
        self.doubtful = False

    def packed(self) -> bytes:
        """The stored state: all but `early` and `came`. The next daemon does not use a listing that is doubtful."""
        complete = 0 if self.doubtful else self.complete
        return _STATE.pack(self.generation, complete, self.at, self.epoch, self.refreshed, self.hidden)


@dataclass(slots=True, eq=False, repr=False)
class PageRequest:
    """A request for a page, sent `at` that time, after `changes` changes of this node (`Tree.changes`)."""

    token: str | None
    at: float
    changes: int
    page: Outcome[ListPage] = field(default_factory=Outcome)


@dataclass(slots=True, eq=False, repr=False)
class Listing:
    """One generation of one directory, running or resting."""

    generation: int
    epoch: int
    leftovers: bool  # rows of earlier generations may exist
    token: str | None = None
    position: bytes | None = None  # the last key seen, relative to the directory
    ordered: bool = True
    requested_at: float = 0.0  # when the last page was requested
    pages: int = 0
    allowed: int = 0
    misses: int = 0
    hidden: int = 0
    failures: int = 0
    requested: PageRequest | None = None  # the request for the next page, sent ahead
    next_page: Outcome[None] = field(default_factory=Outcome)  # ends when that page is written

    def covers(self, name: bytes) -> bool:
        """True if the pages so far decide whether `name` exists, as a file or as a directory."""
        return self.position is not None and self.ordered and name + b"/" <= self.position

    def passed(self, rows: list[tuple[bytes, Row]]) -> list[tuple[bytes, Row]]:
        """The leading ones of these rows (mark, row) whose names the pages so far decide."""
        return list(takewhile(lambda one: self.covers(name_in(one[0])), rows))

    def wake(self, failure: CachefsError | None = None) -> None:
        """Wake the tasks that wait for the next page."""
        page, self.next_page = self.next_page, Outcome()
        page.end(failure=failure)


@dataclass(slots=True, eq=False, repr=False)
class SingleAsks:
    """Counts the names of a directory that were recently asked for one by one."""

    count: int = 0
    since: float = 0.0

    def one_more(self, now: float, ttl: float) -> int:
        """Count one more. Returns how many there were within a TTL."""
        if now - self.since > ttl or self.since > now:
            self.count, self.since = 0, now
        self.count += 1
        return self.count


@dataclass(slots=True, eq=False, repr=False)
class Names:
    """The names of a directory, as far as its readers must know that they change. `version` is that of the last change,
    `handles` is the number of open handles. `added` has the names that this node added since the first of these was opened,
    with the versions since which they are there."""

    version: int = 0
    handles: int = 0
    added: dict[bytes, int] = field(default_factory=dict)

    def add(self, name: bytes) -> None:
        """Note that this node has just added a name. Readers that began before leave it out: otherwise a program that adds a
        name for each name it reads (a prefix for all files) would never come to the end."""
        if self.handles and len(self.added) < ADDED_REMEMBERED:
            self.added[name] = self.version

    def opened(self) -> None:
        self.handles += 1

    def closed(self) -> None:
        self.handles -= 1
        if not self.handles:
            self.added.clear()


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Directory:
    """One directory in use. `prefix` is the prefix of the keys in it. `origin` is None for the list of volumes. `marked`:
    the origin is known to have a marker for it. `needed` caches (current epoch, result) of `Tree.epoch_needed`. `key` is
    the beginning of its rows' keys."""

    ino: int
    parent: Directory | None
    mark: bytes
    origin: Origin | None
    prefix: str
    ttls: Ttls
    listed: Listed
    listing: Listing | None = None
    asks: SingleAsks = field(default_factory=SingleAsks)
    marked: bool = False
    warned: bool = False
    needed: tuple[int, int] = _NEVER
    kernel: KernelListing | None = None
    names: Names = field(default_factory=Names)
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.key = inode_key(self.ino)
        self.changed()

    def changed(self) -> None:
        """Note that names may have come or gone. Call it when their rows are written."""
        self.names.version = next(_versions)  # unique in the process, because the object may be made again

    def state(self) -> Put:
        """The row with the state of its listings."""
        return ("directories", self.key, self.listed.packed())

    @property
    def is_top(self) -> bool:
        """True for the root of a source, which exists because it is mounted, whatever keys there are."""
        return self.parent is None or self.parent.origin is None


Present = tuple[Directory, bytes, Row]
"""The directory, the mark and the row of the name that leads to an inode now."""


def clock_of(database: WriteBehind, machine: Machine | None = None) -> SteadyClock:
    """The clock by which the times in this database were taken."""
    earlier = database.get("state", _CLOCK)
    clock = SteadyClock(earlier, machine)
    if clock.state != earlier:
        database.write([("state", _CLOCK, clock.state)])
    return clock


class _WriteLock(Lock):
    """The lock of all writers of names. A writer first waits while too many rows in memory wait for the disk."""

    def __init__(self, database: WriteBehind) -> None:
        super().__init__()
        self._database = database

    @property
    def free(self) -> bool:
        """True if a writer would not wait."""
        return not (self._held or self._database.crowded)

    async def acquire(self) -> None:
        if self._database.crowded:
            await self._database.uncrowded()
        await super().acquire()


class Tree:
    """All known names. `clock` returns seconds since the epoch; it dates answers and listings. Opening the tree drops all
    rows if the volumes are not those of the last run. If a listing is dated later than now, the clock was set back and no
    age is certain: then everything is refreshed."""

    def __init__(self, database: WriteBehind, volumes: Sequence[Volume], clock: Callable[[], float]) -> None:
        self.database = database
        self.clock = clock
        self.writing = _WriteLock(database)
        self._by_ino: weakref.WeakValueDictionary[int, Directory] = weakref.WeakValueDictionary()
        self._remembered: dict[int, Directory] = {}
        self._volumes: dict[bytes, tuple[Origin, Ttls]] = {}
        self.changes = 0  # how many changes of names this node has made
        self._changed: dict[tuple[int, bytes], int] = {}
        self.renewals = 0
        self._lasting: list[Put] = []  # rows that stay the same while the mount exists
        same_volumes = self._check_fingerprint(volumes)
        self.numbers = Numbers(database)
        # (inode of the directory, name, JSON) of files that the last daemon renamed: the objects under their old names,
        # which it has not deleted. The JSON has the new key (`to`) and the etags of what may be deleted (`versions`). Or of
        # names that it was changing (`Changing._noted`): the JSON has the key that it was removing (`removes`), or that of
        # the file which it was renaming to this name (`copy_of`).
        self.left: list[tuple[int, bytes, bytes]] = []
        self._forget_dirty_files()
        self.epoch = int.from_bytes(database.get("state", _EPOCH) or b"", "big")
        only = volumes[0].origin if len(volumes) == 1 and not volumes[0].name else None
        ttls = volumes[0].ttls if only else Ttls()
        prefix = _prefix_of(only) if only else ""
        self.root = Directory(ROOT, None, b"", only, prefix, ttls, self._listed(ROOT))
        if only is None:
            self._write_volumes(volumes)
        self._by_ino[ROOT] = self.root
        newest = database.get("state", _NEWEST)
        if same_volumes and (newest is None or _TIME.unpack(newest)[0] > clock()):
            log.info("the clock was set back since names were listed: looking again")
            database.write([*self.refresh(self.root), self.newest(clock())])

    # -- directories -------------------------------------------------------------------------------

    def directory(self, ino: int) -> Directory:
        """The directory with this inode number. Raises `ObjectChanged` or `NotADirectory`."""
        found = self._remembered.get(ino) or self._by_ino.get(ino)
        chain: list[tuple[int, bytes]] = []
        while found is None:
            above, mark = self._place(ino)
            if not mark.endswith(b"/"):
                raise NotADirectory(f"inode {ino} is a file")
            chain.append((ino, mark))
            ino = above
            found = self._by_ino.get(ino)
        for child, mark in reversed(chain):
            found = self._adopt(found, child, mark)
        return found

    def locate(self, ino: int) -> tuple[Directory, bytes]:
        """The directory of an inode (not the root), and its mark there. Raises `ObjectChanged` if no name leads to it any
        more: it becomes ESTALE, on which the kernel walks the path again."""
        above, mark = self._place(ino)
        return self._by_ino.get(above) or self.directory(above), mark

    def present(self, ino: int) -> Present | None:
        """The name that leads to an inode (not the root), with its row; None without one."""
        try:
            directory, mark = self.locate(ino)
        except ObjectChanged:
            return None
        row = self.row(directory, mark)
        return None if row is None or row.ino != ino else (directory, mark, row)

    def _place(self, ino: int) -> tuple[int, bytes]:
        place = self._written_place(ino)
        if place is None:
            raise ObjectChanged(f"inode {ino} was removed or replaced")
        return int.from_bytes(place[:NUMBER_BYTES], "big"), place[NUMBER_BYTES:]

    def _written_place(self, ino: int) -> bytes | None:
        """The key of an inode's row in `names`; None if there is none. `ino` may be any number that the kernel sends."""
        return None if ino >> 8 * NUMBER_BYTES else self.database.get("inodes", inode_key(ino))

    def _adopt(self, parent: Directory, ino: int, mark: bytes) -> Directory:
        origin, ttls = (parent.origin, parent.ttls) if parent.origin else self._volumes[name_in(mark)]
        prefix = parent.prefix + mark.decode("utf-8") if parent.origin else _prefix_of(origin)
        directory = Directory(ino, parent, mark, origin, prefix, ttls, self._listed(ino))
        self._by_ino[ino] = self._remembered[ino] = directory
        if len(self._remembered) > KEPT_DIRECTORIES:
            del self._remembered[next(iter(self._remembered))]
        return directory

    def _listed(self, ino: int) -> Listed:
        state = self.database.get("directories", inode_key(ino))
        return Listed(*_STATE.unpack(state)) if state else Listed()

    def drop(self, directory: Directory) -> None:
        """Forget the object of a removed directory."""
        self._by_ino.pop(directory.ino, None)
        self._remembered.pop(directory.ino, None)

    def replace(self, directory: Directory, parent: Directory, mark: bytes) -> list[Directory]:
        """Give a directory another parent and mark. Returns it and the directories in use below it, which all have other
        prefixes now."""
        # Refreshes of its former parents still apply.
        directory.listed.refreshed = self.epoch_needed(directory)
        directory.parent, directory.mark = parent, mark
        before, after = directory.prefix, parent.prefix + mark.decode()
        moved = [one for one in self.in_use() if is_below(one, directory)]
        for one in moved:
            one.prefix = after + one.prefix.removeprefix(before)
            one.needed = _NEVER
        return moved

    def known(self, ino: int) -> Directory | None:
        """The directory if it is in use, else None."""
        return self._by_ino.get(ino)

    def epoch_needed(self, directory: Directory) -> int:
        """The earliest epoch whose listings of `directory` may be used: that of the last refresh of it or of one above."""
        if directory.needed[0] != self.epoch:
            needed, above = 0, directory
            while above is not None:
                needed = max(needed, above.listed.refreshed)
                above = above.parent  # type: ignore[assignment]
            directory.needed = self.epoch, needed
        return directory.needed[1]

    def refresh(self, directory: Directory) -> list[Put]:
        """Make everything known about `directory` and below unusable. Returns the rows that the caller must write."""
        self.epoch += 1
        directory.listed.refreshed = self.epoch
        return [directory.state(), ("state", _EPOCH, self.epoch.to_bytes(4, "big"))]

    def renew(self) -> None:
        """Fill an emptied database: write the directories that are in use. All else is asked for again."""
        self.renewals += 1
        puts = list(self._lasting)
        for directory in self.in_use():
            if directory.origin is not None:
                directory.listed.complete = 0
            directory.changed()
            puts.append(directory.state())
            parent, mark = directory.parent, directory.mark
            if parent is not None and parent.origin is not None:
                puts += named(parent, mark, Row(0, 0, 0, "", directory.ino))
        self.numbers.reserve()
        self.database.write([*puts, *self.refresh(self.root)])

    def newest(self, listed_at: float) -> Put:
        """The row with the time of the last listing."""
        return ("state", _NEWEST, _TIME.pack(listed_at))

    def tops(self) -> list[Directory]:
        """The root directories of the sources."""
        if self.root.origin is not None:
            return [self.root]
        rows = self.as_directories(self.root, list(self._volumes))
        return [self.directory(row.ino) for row in rows if row is not None]

    def in_use(self) -> list[Directory]:
        return list(self._by_ino.values())

    # -- changes made here ---------------------------------------------------------------------------

    def note_change(self, directory: Directory, name: bytes) -> None:
        """Note a change of a name, so that answers which were requested before do not undo it."""
        self.changes += 1
        self._changed.pop((directory.ino, name), None)
        self._changed[directory.ino, name] = self.changes
        if len(self._changed) > CHANGES_REMEMBERED:
            del self._changed[next(iter(self._changed))]

    def changed_since(self, directory: Directory, name: bytes, changes: int) -> bool:
        """True if this node changed the name after the first `changes` changes."""
        return self.changes != changes and self._changed.get((directory.ino, name), 0) > changes

    # -- names -------------------------------------------------------------------------------------

    def find(self, directory: Directory, name: bytes) -> tuple[Row | None, Row | None]:
        """The rows of a name: (as a directory, as a file)."""
        key = directory.key + name
        as_dir, as_file = self.database.get_many("names", (key + b"/", key))
        return as_dir and decode(as_dir), as_file and decode(as_file)  # type: ignore[return-value]

    def row(self, directory: Directory, mark: bytes) -> Row | None:
        data = self.database.get("names", directory.key + mark)
        return None if data is None else decode(data)

    def scan(self, directory: Directory, after: bytes, limit: int) -> list[tuple[bytes, Row]]:
        """At most `limit` (mark, row) behind the mark `after`, in order."""
        rows = self.database.scan(
            "names", directory.key + after + b"\0" if after else directory.key, end_of(directory.key), limit
        )
        return [(key[NUMBER_BYTES:], decode(data)) for key, data in rows]

    def as_directories(self, directory: Directory, names: Sequence[bytes]) -> list[Row | None]:
        """The rows of these names as directories."""
        rows = self.database.get_many("names", [directory.key + name + b"/" for name in names])
        return [None if data is None else decode(data) for data in rows]

    def shown(
        self, directory: Directory, rows: list[tuple[bytes, Row]], generation: int
    ) -> list[tuple[bytes, Row]]:
        """Those of the rows that listing `generation` shows: none of earlier listings, and no file that a directory
        hides."""
        rows = [one for one in rows if one[1].generation >= generation]
        files = [mark for mark, _ in rows if not mark.endswith(b"/")]
        as_directories = zip(files, self.as_directories(directory, files), strict=True)
        hidden = {mark for mark, row in as_directories if row is not None and row.generation >= generation}
        return [one for one in rows if one[0] not in hidden] if hidden else rows

    def mark_at(self, directory: Directory, ino: int) -> bytes | None:
        """The mark of an inode if it is in this directory, else None."""
        place = self._written_place(ino)
        return place[NUMBER_BYTES:] if place is not None and place.startswith(directory.key) else None

    # -- at the start ------------------------------------------------------------------------------

    def forget_local(self) -> None:
        """Forget what was left of names that the last daemon was writing, once the dirty files are recovered: until then the
        next daemon needs it, if this one is killed. Rows of `left` stay until their objects are deleted."""
        after = b""
        while rows := self.database.scan("local", after, b"\xff" * 8, 1000):
            found = [key for key, left in rows if not left]
            names = self.database.get_many("names", found)
            self.database.write(
                ("local", key, None)
                for key, data in zip(found, names, strict=True)
                if data is None or decode(data).generation != PINNED
            )
            after = rows[-1][0] + b"\0"

    def _check_fingerprint(self, volumes: Sequence[Volume]) -> bool:
        """True if these volumes are those of the last run; otherwise the rows of the last run are dropped."""
        parts = sorted(f"{v.name}\0{v.origin.source}\0{_prefix_of(v.origin)}" for v in volumes)
        fingerprint = "\n".join(parts).encode("utf-8", "surrogatepass")
        known = self.database.get("state", _FINGERPRINT)
        if known != fingerprint:
            if known is not None:
                log.info("other sources than last time: forgetting the names that were known")
            everything = [(table, b"", b"\xff" * 8) for table in TABLES if table != "state"]
            answers = [("state", _EPOCH, None), ("state", _NEWEST, None)]
            self.database.write([("state", _FINGERPRINT, fingerprint), *answers], everything)
        self._lasting += [
            ("state", _FINGERPRINT, fingerprint),
            ("state", _CLOCK, self.database.get("state", _CLOCK)),
        ]
        return known == fingerprint

    def _forget_dirty_files(self) -> None:
        """Make the names unknown that were being written when the last daemon died. Each row keeps its inode, for a dirty
        file that is recovered. The rows of `local` stay until `forget_local`."""
        after = b""
        while rows := self.database.scan("local", after, b"\xff" * 8, 1000):
            puts: list[Put] = []
            for key, left in rows:
                if left:
                    self.left.append((int.from_bytes(key[:NUMBER_BYTES], "big"), key[NUMBER_BYTES:], left))
                above = key[:NUMBER_BYTES]
                data, state = self.database.get("names", key), self.database.get("directories", above)
                if data is not None and (row := decode(data)).generation == PINNED:
                    puts.append(("names", key, encode(row._replace(generation=0))))
                if state is not None:
                    listed = Listed(*_STATE.unpack(state))
                    listed.complete = 0
                    puts.append(("directories", above, listed.packed()))
            self.database.write(puts)
            after = rows[-1][0] + b"\0"

    def _write_volumes(self, volumes: Sequence[Volume]) -> None:
        """Write the root directory, which is the list of volumes, as listed and always fresh."""
        root = self.root
        root.listed.generation = 1
        root.listed.ended(1, ALWAYS, float("inf"), root.listed.hidden)
        puts: list[Put] = [root.state()]
        for volume in volumes:
            name = volume.name.encode()
            if not nameable(name) or name in self._volumes:
                raise ConfigError(f"{volume.name!r} cannot be the name of a source: give it another name")
            self._volumes[name] = volume.origin, volume.ttls
            mark = mark_of_directory(name)
            puts += named(root, mark, self.row(root, mark) or Row(1, 0, 0, "", self.numbers.next()))
        self.database.write(puts)
        self._lasting += puts


def named(directory: Directory, mark: bytes, row: Row) -> list[Put]:
    """The rows that give an inode a name."""
    return [
        ("names", directory.key + mark, encode(row)),
        ("inodes", inode_key(row.ino), directory.key + mark),
    ]


def is_below(directory: Directory | None, above: Directory) -> bool:
    """True if `directory` is `above` or below it."""
    while directory is not None and directory is not above:
        directory = directory.parent
    return directory is above


def end_of(key: bytes) -> bytes:
    """The first key behind all keys that begin with `key`. `key` is never all 0xFF, because inode numbers are smaller."""
    return (int.from_bytes(key, "big") + 1).to_bytes(len(key), "big")


def _prefix_of(origin: Origin) -> str:
    prefix = origin.prefix
    return prefix if not prefix or prefix.endswith("/") else prefix + "/"

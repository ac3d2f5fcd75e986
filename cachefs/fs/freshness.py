"""The freshness policy: which known names may be used without asking the origin, and for how long. It reads the tree and
does no other I/O.

Whether a name exists is decided by a listing of its directory that has passed the name, or by an answer about this one name.
Either must be fresh, and neither is used once the name is known to have changed since (`doubt`). The tables of single
answers are bounded; a name whose answer was dropped is asked for again.

A request may use what is younger than the TTL, or younger than the request itself. So a TTL of 0 means one request to the
origin for each request of the kernel, and not an endless loop.

On a strict mount, one open(2) makes the kernel send several requests. Together they are one *burst*: `recent` returns what
an answer of the last moment says. It is used only for names that exist. For a file, a path walk uses only a listing, so an
open never depends on an answer that is older than the open."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cachefs.fs.files import Node
from cachefs.fs.keys import name_in
from cachefs.fs.tree import Directory, Found, Tree

REMEMBERED = 65_536
"""Single answers kept, about 110 bytes each. A bound of memory: 7 MB for each table."""

BURST_S = 0.1
"""An answer that is no older may belong to the same system call. The kernel's requests for one call are less than a
millisecond apart, and a loaded daemon may be a hundred times slower. With a longer time, a directory would be shown after
its last key was deleted."""


EVERY_NAME = b""
"""Stands for all names of a directory (`Freshness.hidden`)."""

STALE_S = 1.0
"""How long the kernel may keep a stale answer, which is used because the origin does not answer. Guessed: soon enough after
an outage."""


class PendingNames(dict[tuple[int, bytes], Node]):
    """The pending nodes, by (inode of the directory, name). They override listings and answers about these names.
    `LocalChanges` writes this table. `in_directory` counts the nodes by directory."""

    def __init__(self) -> None:
        self.in_directory: Counter[Directory] = Counter()

    def hold(self, node: Node) -> None:
        self[node.directory.ino, node.name] = node
        self.in_directory[node.directory] += 1

    def let_go(self, node: Node) -> None:
        del self[node.directory.ino, node.name]
        self.in_directory[node.directory] -= 1
        if not self.in_directory[node.directory]:
            del self.in_directory[node.directory]

    def names_in(self, directory: Directory) -> frozenset[bytes]:
        """The names of those directories in this one that have a pending file below them. They exist, even while the origin
        has no key below them."""
        names: set[bytes] = set()
        for below in self.in_directory:
            while below.parent is not None:
                if below.parent is directory:
                    names.add(name_in(below.mark))
                below = below.parent
        return frozenset(names)


class Freshness:
    """The tables of single answers, and the decisions. Each directory has the TTLs of its volume (`Ttls`)."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._checked: dict[int, float] = {}  # by inode: when the last answer about its name was requested
        self._arrived: dict[int, float] = {}  # when that answer came; only for bursts
        self._stale: dict[int, float] = {}
        self._absent: dict[tuple[int, bytes], float] = {}
        self.pending = PendingNames()
        self.doubts = 0  # how often something was found to have changed, or a refresh requested
        # Names that are shown as missing whatever the origin has: (inode of the directory, name), or `EVERY_NAME`.
        self.hidden: set[tuple[int, bytes]] = set()

    def is_hidden(self, directory: Directory, name: bytes) -> bool:
        """True if a rename that is under way hides the name."""
        return bool(self.hidden) and not self.hidden.isdisjoint(
            ((directory.ino, name), (directory.ino, EVERY_NAME))
        )

    def horizon(self, directory: Directory, since: float = float("inf")) -> float:
        """The time from which on answers are new enough for a request that began at `since`, or now."""
        return min(since, self._tree.clock() - directory.ttls.ttl)

    def coverage(self, directory: Directory, name: bytes) -> tuple[int, float] | None:
        """(generation, time of its request) of the newest listing that decides `name`; None if none does."""
        listing = directory.listing
        if listing is not None and listing.covers(name) and self.in_force(directory, listing.epoch):
            return listing.generation, listing.requested_at
        return self.whole(directory)

    def whole(self, directory: Directory) -> tuple[int, float] | None:
        """(generation, time of its request) of the last complete listing; None if it is doubtful, or a refresh was requested
        since."""
        listed = directory.listed
        if listed.complete and not listed.doubtful and self.in_force(directory, listed.epoch):
            return listed.complete, listed.at
        return None

    def in_force(self, directory: Directory, epoch: int) -> bool:
        """True if no refresh was requested since a listing that began in `epoch`."""
        return epoch >= self._tree.epoch_needed(directory)

    def decide(self, directory: Directory, name: bytes, since: float, now: float) -> Found | float | None:
        """The fresh answer about a name: a `Found`, or for how many seconds it is missing. None if the origin has to be
        asked."""
        if self.hidden and self.is_hidden(directory, name):
            return 0.0
        if self.pending and (pending := self.pending.get((directory.ino, name))) is not None:
            return pending.found(now)
        as_dir, as_file = self._tree.find(directory, name)
        cover = self.coverage(directory, name)
        ttls = directory.ttls
        horizon = since if since < now - ttls.ttl else now - ttls.ttl
        if cover is not None and cover[1] < horizon:
            cover = None
        doubtful = False
        for row, is_dir in ((as_dir, True), (as_file, False)):
            if row is None:
                continue
            ino = row.ino
            seen = self._checked.get(ino) if self._checked else None
            if cover is not None and row.generation >= cover[0] and (seen is None or cover[1] > seen):
                seen = cover[1]
            if seen is None or seen < horizon:
                continue
            if not row.known or (self._stale and ino in self._stale):
                doubtful = True
                continue
            return Found(ino, is_dir, row, seen + ttls.ttl)
        if doubtful:
            return None
        if cover is not None and not directory.listed.early:
            return min(ttls.negative_ttl, cover[1] + ttls.ttl - now)
        if self._absent:
            until = self._absent.get((directory.ino, name), 0.0)
            if until > now:
                return until - now
        return None

    def last_known(self, directory: Directory, name: bytes, now: float) -> Found | float | None:
        """`decide` without a limit of age and without regard to refreshes of directories, for an origin that does not
        answer. None for a file that is known to have changed, or whose own refresh was requested."""
        as_dir, as_file = self._tree.find(directory, name)
        listing, generation = directory.listing, directory.listed.complete
        if listing is not None and listing.covers(name):
            generation = listing.generation
        for row, is_dir in ((as_dir, True), (as_file, False)):
            if row is None:
                continue
            ino = row.ino
            if not is_dir and (not row.known or ino in self._stale):
                return None
            if row.generation >= generation or ino in self._checked:
                return Found(ino, is_dir, row, now + STALE_S)
        return STALE_S if generation or (directory.ino, name) in self._absent else None

    def just_absent(self, directory: Directory, name: bytes) -> bool:
        """True if the origin was asked a moment ago for a name that is known to be missing."""
        cover = self.coverage(directory, name)
        answered = self._absent.get((directory.ino, name), float("-inf")) - directory.ttls.negative_ttl
        return max(answered, cover[1] if cover else answered) >= self._tree.clock() - BURST_S

    def recent(
        self, directory: Directory, name: bytes, *, answers: bool = True, listings: bool = True
    ) -> Found | None:
        """A name that exists by an answer of this burst, about this one name or from a listing; else None. A directory
        exists, too, if an answer of the burst shows something below it."""
        now = self._tree.clock()
        if self.pending and (pending := self.pending.get((directory.ino, name))) is not None:
            return pending.found(now)
        cover = self.coverage(directory, name) if listings else None
        if directory.listed.came < now - BURST_S:
            cover = None
        as_dir, as_file = self._tree.find(directory, name)
        for row, is_dir in ((as_dir, True), (as_file, False)):
            if row is None:
                continue
            ino = row.ino
            listed = cover is not None and row.generation >= cover[0]
            answered = (answers or is_dir) and self._arrived.get(ino, float("-inf")) >= now - BURST_S
            if listed or answered:
                return None if not row.known or ino in self._stale else Found(ino, is_dir, row, now)
        return None

    def end_burst(self, ino: int) -> None:
        """Forget that an answer about this inode has just come: it must not count for the next burst."""
        self._arrived.pop(ino, None)

    def was_asked(self, ino: int) -> bool:
        """True if an answer about this inode's name is remembered, however old."""
        return ino in self._checked

    def note_answer(self, directory: Directory, name: bytes, ino: int | None, requested_at: float) -> None:
        """Note an answer about one name; `ino` is None if the name is missing."""
        if ino is None:
            _put(self._absent, (directory.ino, name), requested_at + directory.ttls.negative_ttl)
            return
        self._absent.pop((directory.ino, name), None)
        if self._stale.get(ino, 0.0) <= requested_at:
            self._stale.pop(ino, None)
        _put(self._checked, ino, requested_at)
        if directory.ttls.strict:
            _put(self._arrived, ino, self._tree.clock())
            self.note_below(directory)

    def note_below(self, directory: Directory) -> None:
        """Note that something was just shown in `directory`, so it and the directories above it exist."""
        if not directory.ttls.strict:
            return
        now, above = self._tree.clock(), directory
        while above.parent is not None:
            _put(self._arrived, above.ino, now)
            above = above.parent

    def note_page(self, inos: list[int], requested_at: float) -> None:
        """Note that a listing showed these inodes, which ends older doubts about them."""
        if self._stale:
            for ino in inos:
                if self._stale.get(ino, float("inf")) <= requested_at:
                    del self._stale[ino]

    def doubt(self, ino: int) -> None:
        """Note that an inode is known to have changed: its row is not used until the origin was asked."""
        self.doubts += 1
        self._checked.pop(ino, None)
        self._arrived.pop(ino, None)
        if len(self._stale) >= REMEMBERED and ino not in self._stale:
            # Too many to remember: refresh everything, as the TTL would do a little later.
            self._stale.clear()
            self._checked.clear()
            self._arrived.clear()
            self._tree.refresh(self._tree.root)
        self._stale[ino] = self._tree.clock()

    def is_doubted(self, ino: int) -> bool:
        return ino in self._stale

    def forget_answers(self) -> None:
        """Drop all single answers because of a refresh. They are cheap to ask for again."""
        self.doubts += 1
        self._checked.clear()
        self._arrived.clear()
        self._absent.clear()


def _put(table: dict[Any, float], key: object, value: float) -> None:
    """Set a value, and drop the oldest entry if there are too many."""
    table.pop(key, None)
    table[key] = value
    if len(table) > REMEMBERED:
        del table[next(iter(table))]

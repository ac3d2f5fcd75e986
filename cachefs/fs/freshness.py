"""What of the known is still fresh, and for how long. No I/O but reads of the tree.

There are three grounds on which a name exists (or does not): a listing of its directory that has passed it and is
not too old; an answer about that very name that is not too old; and neither of them when something is known to have
changed since. Lists of single answers are bounded; what falls out of them is asked for again.

A request uses what is younger than the TTL or younger than the request itself, so that a TTL of 0 means "look every
time" and not "never be satisfied".

One open(2) of a strict mount is several requests of the kernel. They make one *burst*: `recent` tells what an answer says
that came a moment ago. Only what exists is used so; and of a file, a walk to its name uses nothing but a listing,
so that an open never rests on an answer from before it began.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from cachefs.fs.keys import name_in
from cachefs.fs.tree import Directory, Found, Tree

if TYPE_CHECKING:
    from cachefs.fs.local_changes import Node

REMEMBERED = 65_536
"""Single answers kept, about 110 bytes each. A bound of memory: 7 MB for each table."""

BURST_S = 0.1
"""How long ago an answer may have come to belong to the same system call. The kernel's requests for one are less than a
millisecond apart; a loaded daemon may be a hundred times slower. Longer, and directories would outlive their last key."""


EVERY_NAME = b""
"""Stands for all names of a directory (`Freshness.hidden`)."""

STALE_S = 1.0
"""How long the kernel may keep what is used only because its origin is out. Guessed: soon enough after an outage."""


class PendingNames(dict[tuple[int, bytes], "Node"]):
    """The files that are written here, by directory number and name: what is true of these names, whatever a listing says.
    `LocalChanges` writes it. `in_directory` counts them by directory."""

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
        """Names of directories in this one below which something is pending: they are there, whatever an origin says that
        has nothing below them yet."""
        names: set[bytes] = set()
        for below in self.in_directory:
            while below.parent is not None:
                if below.parent is directory:
                    names.add(name_in(below.mark))
                below = below.parent
        return frozenset(names)


class Freshness:
    """What is still used without asking. Each directory has the TTLs of its volume (`Ttls`)."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._checked: dict[int, float] = {}  # when the question was asked
        self._arrived: dict[int, float] = {}  # when the answer came; kept only for bursts
        self._stale: dict[int, float] = {}
        self._absent: dict[tuple[int, bytes], float] = {}
        self.pending = PendingNames()
        self.doubts = 0  # how often something was found to have changed, or a refresh requested
        # Names that are missing here whatever the origin says, by directory number and name (`EVERY_NAME`: all in it).
        self.hidden: set[tuple[int, bytes]] = set()

    def is_hidden(self, directory: Directory, name: bytes) -> bool:
        """Whether a rename that is under way hides the name."""
        return bool(self.hidden) and not self.hidden.isdisjoint(
            ((directory.ino, name), (directory.ino, EVERY_NAME))
        )

    def horizon(self, directory: Directory, since: float, now: float) -> float:
        """The oldest knowledge that a request which began at `since` may use."""
        return min(since, now - directory.ttls.ttl)

    def coverage(self, directory: Directory, name: bytes) -> tuple[int, float] | None:
        """(generation, when it was asked for) of the newest listing that decides `name`."""
        listing = directory.listing
        if listing is not None and listing.covers(name) and self.in_force(directory, listing.epoch):
            return listing.generation, listing.asked_at
        return self.whole(directory)

    def whole(self, directory: Directory) -> tuple[int, float] | None:
        """(generation, time) of the last complete listing, unless a refresh was requested since."""
        listed = directory.listed
        if listed.complete and self.in_force(directory, listed.epoch):
            return listed.complete, listed.at
        return None

    def in_force(self, directory: Directory, epoch: int) -> bool:
        return epoch >= self._tree.epoch_needed(directory)

    def decide(self, directory: Directory, name: bytes, since: float, now: float) -> Found | float | None:
        """What is fresh of a name: found; absent, for so many seconds; or None, when the origin has to be asked."""
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
        """The same without a limit to how old it is, and of refreshes below a directory: for an origin that cannot
        be asked. Not a file that is known to have changed since, or whose refresh was requested."""
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

    def absent_since(self, directory: Directory, name: bytes) -> float:
        """When that was asked for which says that a name is missing; long ago if nothing does."""
        cover = self.coverage(directory, name)
        until = self._absent.get((directory.ino, name), float("-inf"))
        return max(until - directory.ttls.negative_ttl, float("-inf") if cover is None else cover[1])

    def recent(
        self, directory: Directory, name: bytes, *, answers: bool = True, listings: bool = True
    ) -> Found | None:
        """A name that exists by an answer of this burst: one about that very name, or a listing. A directory exists, too,
        when something below it does."""
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
        """What comes next must not take an older answer for one of its own."""
        self._arrived.pop(ino, None)

    def was_asked(self, ino: int) -> bool:
        """Whether there was an answer about this very name, however old."""
        return ino in self._checked

    def note_answer(self, directory: Directory, name: bytes, ino: int | None, asked_at: float) -> None:
        """An answer about one name came; `ino` is None when there is nothing."""
        if ino is None:
            _put(self._absent, (directory.ino, name), asked_at + directory.ttls.negative_ttl)
            return
        self._absent.pop((directory.ino, name), None)
        if self._stale.get(ino, 0.0) <= asked_at:
            self._stale.pop(ino, None)
        _put(self._checked, ino, asked_at)
        if directory.ttls.strict:
            _put(self._arrived, ino, self._tree.clock())
            self.note_below(directory)

    def note_below(self, directory: Directory) -> None:
        """Something was just shown in `directory`: it exists, and so do those above it."""
        if not directory.ttls.strict:
            return
        now, above = self._tree.clock(), directory
        while above.parent is not None:
            _put(self._arrived, above.ino, now)
            above = above.parent

    def note_page(self, inos: list[int], asked_at: float) -> None:
        """A listing showed these."""
        if self._stale:
            for ino in inos:
                if self._stale.get(ino, float("inf")) <= asked_at:
                    del self._stale[ino]

    def doubt(self, ino: int) -> None:
        """Something is known to have changed there: do not use what is written."""
        self.doubts += 1
        self._checked.pop(ino, None)
        self._arrived.pop(ino, None)
        if len(self._stale) >= REMEMBERED and ino not in self._stale:
            # Too many to remember: doubt everything that was listed up to now (the TTL would, a little later).
            self._stale.clear()
            self._checked.clear()
            self._arrived.clear()
            self._tree.refresh(self._tree.root)
        self._stale[ino] = self._tree.clock()

    def is_doubted(self, ino: int) -> bool:
        return ino in self._stale

    def forget_answers(self) -> None:
        """A refresh was requested somewhere: drop all single answers, which are cheap to ask for again."""
        self.doubts += 1
        self._checked.clear()
        self._arrived.clear()
        self._absent.clear()


def _put(table: dict[Any, float], key: object, value: float) -> None:
    """Set, as the newest; the oldest goes when there are too many."""
    table.pop(key, None)
    table[key] = value
    if len(table) > REMEMBERED:
        del table[next(iter(table))]

"""Which large file comes next. Pure.

Large files (tar, parquet, record files) are read whole, one after the other, in an order that their names or their places in
the listing give away: a reader goes through them by one, a worker w of W by W, and workers that share a queue take the
next ones of the directory between them. What is inside of them does not matter.

Two shards make a step: from one name to the other either one number changes, or the second stands a few places behind the
first in the listing. A *stream* is what one process opens in one directory: after a step the next shard is foretold, after
a second equal step the next two. The *front* of a directory is the furthest shard that several processes together have
come to in small steps: two for each of them, eight at most, are foretold behind it. At the end of the directory nothing is:
who begins again finds what is cached.

Who opens shards in order may be looking at them only: at their footers, for a schema or a count of rows, or at one column.
So nothing is foretold before a shard of the stream was *read*, and never more than are believed to have been; and when more
were opened since the last one that was read than were read before (`Trust`), nothing is until another is. What is read of a
file that the kernel was lent nobody sees: so every few shards one that is fetched ahead should not be lent.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from math import gcd
from typing import Protocol

PLACES = 64
"""How far apart in the listing two shards of one stream may be. Guessed: more workers than a node has."""

NEAR = 64
"""Steps between numbers up to this are believed at once, longer ones when they come twice: in a shuffled order of shards a
long step is always there, and a wrong guess costs a shard. Guessed."""

FARTHEST = 1024
"""The longest step between numbers: workers of a whole cluster. Guessed."""

AHEAD = 2
"""Shards of one stream: one that is read next, and one that comes meanwhile. Guessed."""

FRONT_AHEAD = 8
"""Shards before a front, at most, whatever the number of processes. Guessed."""

MOST_WAITING = 2 * FRONT_AHEAD
"""Shards that a front has foretold and nobody has opened: beyond that, it guesses as often as it was right. For where
processes have blocks of their own, or nodes take turns by blocks, their front is nobody's way. Guessed."""

READ_SHARE = 4
"""A shard is taken as read when this part (a quarter) of it was. Guessed: tables are read by the column, records from the
beginning to the end; both are further away from it than what the kernel adds."""

MOST_TRUST = 4
"""Shards that each process may open without one that is seen to be read: so many, and the two ahead, are the most that are
fetched for nothing when it turns to looking. Guessed; of one stream one in three is not lent for it, and of four processes
at a front one in seven."""

STREAMS = 1024
"""Streams remembered, about 500 bytes each. Guessed."""

RECENT = 32
"""Shards lately opened in a directory, to tell a new one from one that a second process opens. Guessed."""

_NUMBER = re.compile(rb"([0-9]+)")


class Listing(Protocol):
    """What is known of a directory's large files."""

    def holds(self, name: bytes) -> bool: ...

    def behind(self, name: bytes, count: int) -> list[bytes]:
        """At most `count` names that follow, in order; fewer when the listing ends."""
        ...


class Step:
    """The way from one shard to another: `by` a number in the name, the `field`th, or places in the listing (None)."""

    __slots__ = ("by", "field")

    def __init__(self, by: int, field: int | None) -> None:
        self.by = by
        self.field = field

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and (self.by, self.field) == (other.by, other.field)

    def __hash__(self) -> int:
        return hash((self.by, self.field))

    def times(self, count: int) -> Step:
        return Step(self.by * count, self.field)

    def near(self) -> bool:
        return abs(self.by) <= NEAR

    def take(self, name: bytes, listing: Listing) -> bytes | None:
        """Where it leads from `name`, if there is such a file."""
        if self.field is None:
            follow = listing.behind(name, self.by)
            return follow[-1] if len(follow) == self.by else None
        parts = _NUMBER.split(name)
        number, width = int(parts[self.field]) + self.by, len(parts[self.field])
        if number < 0:
            return None
        for digits in (b"%0*d" % (width, number), b"%d" % number):
            parts[self.field] = digits
            found = b"".join(parts)
            if listing.holds(found):
                return found
        return None


def step(first: bytes, second: bytes, listing: Listing) -> Step | None:
    """How `second` follows `first`; None when it does not in any way that may go on."""
    ours, theirs = _NUMBER.split(first), _NUMBER.split(second)
    if len(ours) == len(theirs):
        differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        if len(differing) == 1 and differing[0] % 2:
            by = int(theirs[differing[0]]) - int(ours[differing[0]])
            return Step(by, differing[0]) if by and abs(by) <= FARTHEST else None
    follow = listing.behind(first, PLACES) if first < second else []
    return Step(follow.index(second) + 1, None) if second in follow else None


class Trust:
    """Whether shards are read, or looked at: `read` of them were (counted up to a bound), and `unread` opened since then,
    `unseen` of these so that nobody would see them read."""

    __slots__ = ("read", "unread", "unseen")

    def __init__(self) -> None:
        self.read = self.unread = self.unseen = 0

    def was_opened(self, seen: bool) -> None:
        self.unread += 1
        self.unseen += not seen
        if self.unread > self.read:
            self.read //= 2
            self.unseen = 0

    def was_read(self, most: int) -> None:
        """One that is seen to be read speaks for the unseen since the last, for as many as were believed before."""
        self.read = min(most, self.read + 1 + min(self.unseen, self.read))
        self.unread = self.unseen = 0

    @property
    def shards(self) -> int:
        """How many may be foretold."""
        return self.read if self.unread <= self.read else 0

    @property
    def doubts(self) -> bool:
        """Whether the next open is beyond half of what may be opened unread; when one of these is watched, the last."""
        watched = self.unread > self.unseen
        return self.unread + 1 >= self.read if watched else 2 * (self.unread + 1) > self.read


class _Stream:
    __slots__ = ("count", "doubted", "last", "step", "trust")

    def __init__(self) -> None:
        self.last = b""
        self.step: Step | None = None
        self.count = 0  # how many steps are believed to follow
        self.doubted = False  # a guess was wrong: the next step has to come twice
        self.trust = Trust()

    def opened(self, name: bytes, listing: Listing) -> bool:
        """Whether it is another than before: it may be opened again for its footer, or by a second thread."""
        if name == self.last:
            return False
        taken = step(self.last, name, listing) if self.last else None
        again = taken is not None and taken == self.step
        self.doubted = not again and (self.doubted or self.step is not None)
        self.last, self.step = name, taken
        self.count = AHEAD if again else 1 if taken is not None and taken.near() and not self.doubted else 0
        return True

    def ahead(self, listing: Listing) -> list[bytes]:
        count = min(self.count, self.trust.shards)
        if self.step is None or not count:
            return []
        return _existing([self.step.times(n).take(self.last, listing) for n in range(1, count + 1)])


class _Front:
    """Several processes in one directory. `furthest` moves on in small steps; `steps` of them came in a row, all of them
    multiples of `unit`: of shards that are dealt out to several nodes, this one's are some way apart. `waiting` are those
    that were foretold and not opened."""

    __slots__ = ("field", "furthest", "pids", "recent", "steps", "trust", "unit", "waiting")

    def __init__(self) -> None:
        self.furthest = b""
        self.field: int | None = None  # by which the steps are counted
        self.steps = self.unit = 0
        self.trust = Trust()
        self.waiting: OrderedDict[bytes, None] = OrderedDict()
        self.recent: deque[bytes] = deque(maxlen=RECENT)
        self.pids: deque[int] = deque(maxlen=RECENT)

    @property
    def processes(self) -> int:
        return len(set(self.pids))

    def opened(self, pid: int, name: bytes, listing: Listing) -> bool:
        """Whether it is new."""
        if name in self.recent:
            return False
        self.recent.append(name)
        self.pids.append(pid)
        if name in self.waiting:
            del self.waiting[name]
            if self.waiting:
                self.waiting.popitem(last=False)  # a guess that was right makes up for a wrong one
        reach = 2 * self.processes
        forward = step(self.furthest, name, listing) if self.furthest else None
        back = None if forward is not None and forward.by > 0 else step(name, self.furthest, listing)
        if forward is not None and 0 < forward.by <= reach:
            self.furthest = name
            self._stepped(forward)
        elif self.furthest and back is not None and 0 < back.by <= reach:
            self._stepped(back)
        else:
            self.steps = self.unit = 0
            self.furthest = name
        return True

    def _stepped(self, taken: Step) -> None:
        if taken.field == self.field:
            self.steps += 1
            self.unit = gcd(self.unit, taken.by)
        else:
            self.steps, self.unit, self.field = 1, taken.by, taken.field

    @property
    def moves(self) -> bool:
        return self.processes >= 2 and self.steps >= 2

    def ahead(self, listing: Listing) -> list[bytes]:
        count = min(AHEAD * self.processes, FRONT_AHEAD, self.trust.shards)
        if not self.moves:
            return []
        unit = Step(self.unit, self.field)
        names = _existing([unit.times(n).take(self.furthest, listing) for n in range(1, count + 1)])
        for number, name in enumerate(names):
            if name not in self.waiting:
                if len(self.waiting) == MOST_WAITING:
                    return names[:number]
                self.waiting[name] = None
        return names


def _existing(names: list[bytes | None]) -> list[bytes]:
    """Up to where the directory ends."""
    return [name for name in names[: names.index(None) if None in names else None] if name is not None]


class Shards:
    """All streams and fronts, by any key of their directories."""

    def __init__(self) -> None:
        self._streams: OrderedDict[tuple[int, int], _Stream] = OrderedDict()
        self._fronts: OrderedDict[int, _Front] = OrderedDict()

    def __len__(self) -> int:
        return sum(stream.step is not None for stream in self._streams.values())

    def opened(
        self,
        directory: int,
        pid: int,
        name: bytes,
        listing: Listing,
        *,
        counts: bool = True,
        seen: bool = True,
    ) -> list[bytes]:
        """A large file was opened: what to fetch now, soonest first. `counts` says that it tells something whether it is
        read: of what was here already nothing may be, for the kernel has it in its memory. `seen` says that its reads will
        be seen."""
        stream = self._streams.pop((directory, pid), None) or _Stream()
        front = self._fronts.pop(directory, None) or _Front()
        self._streams[directory, pid], self._fronts[directory] = stream, front
        for table in (self._streams, self._fronts):
            if len(table) > STREAMS:
                table.popitem(last=False)
        foretold: list[bytes] = []
        # The front's first: what one process takes of a queue that several share may look like steps, too.
        for one, new in ((front, front.opened(pid, name, listing)), (stream, stream.opened(name, listing))):
            if new:
                if counts:
                    one.trust.was_opened(seen)
                foretold += one.ahead(listing)
        return list(dict.fromkeys(foretold))

    def was_read(self, directory: int, pid: int, listing: Listing) -> list[bytes]:
        """One that this process has opened was read, not just looked at: what to fetch now."""
        stream, front = self._streams.get((directory, pid)), self._fronts.get(directory)
        foretold: list[bytes] = []
        if front is not None:
            front.trust.was_read(MOST_TRUST * min(front.processes, FRONT_AHEAD))
            foretold += front.ahead(listing)
        if stream is not None:
            stream.trust.was_read(MOST_TRUST)
            foretold += stream.ahead(listing)
        return list(dict.fromkeys(foretold))

    def _trusts(self, directory: int, pid: int) -> list[Trust]:
        """Of the stream and the front, those whose readers are believed to read."""
        both = (self._streams.get((directory, pid)), self._fronts.get(directory))
        return [one.trust for one in both if one is not None and one.trust.shards]

    def trusts(self, directory: int, pid: int) -> bool:
        """Whether what was foretold of a stream is still worth fetching."""
        return bool(self._trusts(directory, pid))

    def doubts(self, directory: int, pid: int) -> bool:
        """Whether it should be seen how much its next shard is read. Where a front moves, one of its processes is seen for
        all of them."""
        front = self._fronts.get(directory)
        if front is not None and front.moves and front.trust.shards:
            return front.trust.doubts
        return any(trust.doubts for trust in self._trusts(directory, pid))

"""Which large file comes next. Pure.

Large files (tar, parquet, record files) are read whole, one after the other, in an order that their names or their places in
the listing give away: a reader goes through them by one, a worker w of W by W, and workers that share a queue take the
next ones of the directory between them. What is inside of them does not matter.

Two shards make a step: from one name to the other either one number changes, or the second stands a few places behind the
first in the listing. A *stream* is what one process opens in one directory: after a step the next shard is foretold, after
a second equal step the next two. The *front* of a directory is the furthest shard that several processes together have
come to in small steps: that many are foretold behind it. At the end of the directory nothing is: who begins again finds
what is cached.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
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


class _Stream:
    __slots__ = ("doubted", "last", "step")

    def __init__(self, last: bytes) -> None:
        self.last = last
        self.step: Step | None = None
        self.doubted = False  # a guess was wrong: the next step has to come twice

    def opened(self, name: bytes, listing: Listing) -> list[bytes]:
        if name == self.last:
            return []  # opened again: for its footer, by a second thread
        taken = step(self.last, name, listing)
        again = taken is not None and taken == self.step
        self.doubted = not again and (self.doubted or self.step is not None)
        self.last, self.step = name, taken
        if taken is None or not (again or (taken.near() and not self.doubted)):
            return []
        count = AHEAD if again else 1
        return _existing([taken.times(n).take(name, listing) for n in range(1, count + 1)])


class _Front:
    """Several processes in one directory. `furthest` moves on in small steps; `steps` of them came in a row."""

    __slots__ = ("furthest", "pids", "recent", "steps")

    def __init__(self) -> None:
        self.furthest = b""
        self.steps = 0
        self.recent: deque[bytes] = deque(maxlen=RECENT)
        self.pids: deque[int] = deque(maxlen=RECENT)

    def opened(self, pid: int, name: bytes, listing: Listing) -> list[bytes]:
        if name in self.recent:
            return []
        self.recent.append(name)
        self.pids.append(pid)
        processes = len(set(self.pids))
        forward = step(self.furthest, name, listing) if self.furthest else None
        back = None if forward is not None and forward.by > 0 else step(name, self.furthest, listing)
        if forward is not None and 0 < forward.by <= 2 * processes:
            self.steps += 1
            self.furthest = name
        elif self.furthest and back is not None and 0 < back.by <= 2 * processes:
            self.steps += 1
        else:
            self.steps = 0
            self.furthest = name
        if processes < 2 or self.steps < 2:
            return []
        unit = Step(1, (forward or back).field)  # type: ignore[union-attr]
        count = min(processes, FRONT_AHEAD)
        return _existing([unit.times(n).take(self.furthest, listing) for n in range(1, count + 1)])


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

    def opened(self, directory: int, pid: int, name: bytes, listing: Listing) -> list[bytes]:
        """A large file was opened: what to fetch now, soonest first."""
        stream = self._streams.pop((directory, pid), None)
        self._streams[directory, pid] = stream or _Stream(name)
        front = self._fronts.pop(directory, None) or _Front()
        self._fronts[directory] = front
        for table in (self._streams, self._fronts):
            if len(table) > STREAMS:
                table.popitem(last=False)
        own = stream.opened(name, listing) if stream is not None else []
        return list(dict.fromkeys(own + front.opened(pid, name, listing)))

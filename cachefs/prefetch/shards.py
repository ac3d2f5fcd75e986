"""Which large file comes next. Pure.

Large files (tar, parquet, record files) are read whole, one after the other. Their names or their places in the listing
show the order: one process reads every shard, worker w of W reads every W-th, and workers that share a queue take turns on
the directory's next shards.

A *step* leads from one shard to another: either one number in the name changes, or the second stands a few places behind
the first in the listing. A *stream* is the sequence of shards that one process opens in one directory; all processes
together are one more stream. After a near step the next shard is predicted, after a second equal step the next two. At the
end of the directory nothing is predicted: a reader that begins again finds its shards cached.

A process that opens shards in order may read little of each: the footer, for a schema or a count of rows, or one column. So
nothing is predicted before a shard of the stream was *read* (`READ_SHARE`), nor after `MOST_UNREAD` more were opened and
none of them was read. Reads of a passthrough file never reach the daemon, so after half of those opens the next prefetched
shard should be opened without passthrough."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

PLACES = 64
"""The longest step in places of the listing: as many as a node has workers."""

NEAR = 64
"""The longest step that predicts the next shard when it comes once. A longer one has to come twice: in a shuffled order of
shards most steps are long, and a wrong prediction costs a shard."""

FARTHEST = 1024
"""The longest step between numbers: workers of a whole cluster."""

AHEAD = 2
"""Shards predicted in one stream: one to read next, and one that arrives meanwhile."""

READ_SHARE = 4
"""A shard counts as read when one part in so many of it was. The kernel's readahead is far less than that. One column of a
table is usually less, too, and all records of a file are more."""

MOST_UNREAD = 4
"""Shards that a stream may open before the daemon must see one read. When a process begins to read footers only, so many and
`AHEAD` more are fetched for nothing. For this check one shard in three is opened without passthrough."""

STREAMS = 1024
"""Streams remembered, about 300 bytes each."""

ANY_PROCESS = -1
"""In place of a pid: the stream of all processes together."""

StreamKey: TypeAlias = tuple[str, int]
"""(path of the directory, pid)."""

_NUMBER = re.compile(rb"([0-9]+)")


class Listing(Protocol):
    """The large files of a directory, as far as they are listed."""

    def holds(self, name: bytes) -> bool: ...

    def behind(self, name: bytes, count: int) -> list[bytes]:
        """The `count` names that follow `name`, in order; fewer where the listing ends."""
        ...


class Step(NamedTuple):
    """The difference between two shards: the `field`th part of the name, a number, grows by `by`; or the second stands `by`
    places behind the first in the listing (`field` is None)."""

    by: int
    field: int | None

    def take(self, name: bytes, listing: Listing, times: int) -> bytes | None:
        """The file `times` such steps from `name`, if there is one."""
        by = self.by * times
        if self.field is None:
            follow = listing.behind(name, by)
            return follow[-1] if len(follow) == by else None
        parts = _NUMBER.split(name)
        number, width = int(parts[self.field]) + by, len(parts[self.field])
        if number < 0:
            return None
        for digits in (b"%0*d" % (width, number), b"%d" % number):
            parts[self.field] = digits
            found = b"".join(parts)
            if listing.holds(found):
                return found
        return None


def step(first: bytes, second: bytes, listing: Listing) -> Step | None:
    """The step from `first` to `second`; None if there is no regular one."""
    ours, theirs = _NUMBER.split(first), _NUMBER.split(second)
    if len(ours) == len(theirs):
        differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        if len(differing) == 1 and differing[0] % 2:
            by = int(theirs[differing[0]]) - int(ours[differing[0]])
            return Step(by, differing[0]) if by and abs(by) <= FARTHEST else None
    follow = listing.behind(first, PLACES) if first < second else []
    return Step(follow.index(second) + 1, None) if second in follow else None


@dataclass(slots=True)
class _Stream:
    last: bytes = b""
    step: Step | None = None
    count: int = 0  # steps that are predicted to follow
    doubted: bool = False  # a prediction was wrong, so the next step has to come twice
    unread_left: int = 0  # opens until the daemon has to see one read

    def opened(self, name: bytes, listing: Listing) -> bool:
        """Note an open. False if it is the same shard as before, opened again for its footer or by a second thread."""
        if name == self.last:
            return False
        taken = step(self.last, name, listing) if self.last else None
        again = taken is not None and taken == self.step
        self.doubted = not again and (self.doubted or self.step is not None)
        near = taken is not None and abs(taken.by) <= NEAR and not self.doubted
        self.last, self.step, self.count = name, taken, AHEAD if again else int(near)
        return True

    def predicted(self, listing: Listing) -> list[bytes]:
        """The next shards, up to the end of the directory."""
        names: list[bytes] = []
        if self.step is not None and self.unread_left > 0:
            for times in range(1, self.count + 1):
                found = self.step.take(self.last, listing, times)
                if found is None:
                    break
                names.append(found)
        return names


class Shards:
    """All streams."""

    def __init__(self) -> None:
        self._streams: OrderedDict[StreamKey, _Stream] = OrderedDict()

    def __len__(self) -> int:
        return sum(s.step is not None for (_, pid), s in self._streams.items() if pid != ANY_PROCESS)

    def opened(
        self, directory: str, pid: int, name: bytes, listing: Listing, *, counts: bool = True
    ) -> list[bytes]:
        """Note that a large file was opened. Returns the names of files to fetch now, soonest first. `counts` is False for a
        file that was cached before any prefetch: the kernel may have all of it in memory, so the daemon may see no reads."""
        names: list[bytes] = []
        # The shared stream first: the shards that one process takes from a queue may look like steps, too.
        for key in ((directory, ANY_PROCESS), (directory, pid)):
            stream = self._streams.pop(key, None) or _Stream()
            self._streams[key] = stream
            if stream.opened(name, listing):
                stream.unread_left = max(0, stream.unread_left - counts)
                names += stream.predicted(listing)
        while len(self._streams) > STREAMS:
            self._streams.popitem(last=False)
        return list(dict.fromkeys(names))

    def was_read(self, directory: str, pid: int, listing: Listing) -> list[bytes]:
        """Note that a shard which this process has opened was read. Returns the names of files to fetch now."""
        names: list[bytes] = []
        for stream in self._of(directory, pid):
            stream.unread_left = MOST_UNREAD
            names += stream.predicted(listing)
        return list(dict.fromkeys(names))

    def worth_fetching(self, directory: str, pid: int) -> bool:
        """True while predictions of this stream are worth fetching."""
        return any(stream.unread_left > 0 for stream in self._of(directory, pid))

    def must_see_reads(self, directory: str, pid: int) -> bool:
        """True if the daemon should see the reads of the next shard, which is then opened without passthrough."""
        return any(0 < stream.unread_left <= MOST_UNREAD // 2 for stream in self._of(directory, pid))

    def _of(self, directory: str, pid: int) -> list[_Stream]:
        both = (self._streams.get((directory, ANY_PROCESS)), self._streams.get((directory, pid)))
        return [stream for stream in both if stream is not None]

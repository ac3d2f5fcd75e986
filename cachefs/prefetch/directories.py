"""How many files of a directory to prefetch. Pure.

Small files of one directory are opened, none of them cached, in any order. The order does not tell whether all of them will
be read or a few: a random twentieth of a directory looks like the begin of a shuffled epoch. So the number of files that are
fetched and not used yet may be a share of the directory that grows with the share that was demanded. It is small until a
twentieth was demanded, and steep from there on.

With N files of which D were demanded, d = D/N, the share is

    u(d) = 1.5 d                    up to d = 0.05
    u(d) = 0.075 + 12 (d - 0.05)    beyond, at most 1

Derived: when a twentieth is wanted, at most a thirteenth of the directory is fetched for nothing; when all of 4,000 files of
100 kB are wanted by four workers at 20 ms a request and 100 MB/s, the epoch reaches 0.85 of what 64 requests in flight
would (`tests/prefetch/test_directories.py` has the model). Steeper gains little, for the first part is what takes time.

If the demanded part is not spread evenly (one class, one day), fewer of the prefetched files are used than their share of
the remaining ones. Then nothing more is fetched until the ratio recovers.

All counts are of one epoch of the data set, as the store detects it (`store/eviction.py`). A file that was read in this
epoch is neither counted nor prefetched: in a directory larger than the cache it may be gone, and will not be read again
soon."""

from __future__ import annotations

START = 3
"""Demanded files before anything is prefetched. Given: two files say nothing."""

GENTLE_UNTIL = 0.05
GENTLE = 1.5
STEEP = 12.0

ENOUGH_EXPECTED = 8.0
"""Hits expected by chance before their lack counts: that none came then has a chance of e^-8."""

RARELY = 0.25
"""The share of those hits below which nothing more is fetched. Derived: with 8 expected, two come by chance in 1 of 70."""

PASS_SHARE = 32
"""A listing is passed again when one file in so many was demanded since, and not cached."""


def share(demanded: float) -> float:
    """The part of a directory that may be fetched and unused when the part `demanded` was demanded."""
    gentle = GENTLE * min(demanded, GENTLE_UNTIL)
    return min(1.0, gentle + STEEP * max(0.0, demanded - GENTLE_UNTIL))


class Directory:
    """The counts of one directory. `files` is its number of small files, None until it is known."""

    def __init__(self, now: float = float("-inf")) -> None:
        self.files: int | None = None
        self.demanded = 0
        self.fetched = 0  # prefetched, including those in flight
        self.used = 0
        self.last = now
        self.epoch = 0
        self._expected = 0.0
        self._missed = START  # since the last pass of the listing

    def missed(self, now: float) -> None:
        """A file was opened for the first time in this epoch, and none of it was cached."""
        self._missed += 1
        self._demand(now)

    def hit(self, now: float) -> None:
        """A prefetched file was opened for the first time."""
        self._demand(now)
        self.used += 1

    def _demand(self, now: float) -> None:
        self.last = now
        if self.files is not None:
            left = max(self.files - self.demanded, self.unused, 1)
            self._expected += self.unused / left
        self.demanded += 1

    def in_epoch(self, epoch: int) -> None:
        """Begin again when the epoch is another than before."""
        before, self.epoch = self.epoch, epoch
        if before in (0, epoch):
            return
        self.fetched, self.used, self.demanded = self.unused, 0, 0
        self._expected = 0.0
        self._missed = self.files or START

    def started(self) -> None:
        """A file is being prefetched."""
        self.fetched += 1

    def failed(self) -> None:
        """It could not be fetched."""
        self.fetched -= 1

    @property
    def unused(self) -> int:
        """Files prefetched and not opened, also those that were evicted since."""
        return self.fetched - self.used

    @property
    def rarely_used(self) -> bool:
        return self._expected >= ENOUGH_EXPECTED and self.used < RARELY * self._expected

    def more_files(self) -> int:
        """How many more files to prefetch now."""
        if self.demanded < START or self.rarely_used:
            return 0
        if self.files is None:
            # As at the gentle slope of any directory: of what is fetched, less than two thirds is for nothing.
            return max(0, int(GENTLE * self.demanded) - self.unused)
        allowed = int(share(self.demanded / max(self.files, 1)) * self.files)
        return max(0, min(allowed, self.files - self.demanded) - self.unused)

    def begin_pass(self) -> bool:
        """True if the listing should be passed (again); a pass is too long for every miss."""
        if self._missed < max(START, (self.files or 0) // PASS_SHARE):
            return False
        self._missed = 0
        return True

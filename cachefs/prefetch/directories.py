"""How many files of a directory to prefetch. Pure.

A job opens small files of one directory, none of them cached, in any order. The order does not tell whether it will read
all of them or a few. So a share of the directory may be fetched and not used yet, and that share grows with the share that
was demanded: slowly until a twentieth was demanded, and steeply from there on. With N files of which D were demanded, d =
D/N, the share is

    u(d) = 1.5 d                    up to d = 0.05
    u(d) = 0.075 + 12 (d - 0.05)    beyond, at most 1

Derived: when a job reads a twentieth, at most a thirteenth of the directory is fetched for nothing. When four workers read
all of 4,000 files of 100 kB, at 20 ms a request and 100 MB/s, the epoch reaches 0.85 of the rate of 64 requests in flight
(`tests/prefetch/test_directories.py` has the model).

If the demanded files are not spread evenly (one class, one day), fewer of the prefetched files are used than their share of
the remaining ones. Then nothing more is fetched until the ratio recovers.

All counts are of one epoch of the data set, as the store detects it (`store/eviction.py`). A file that was read in this
epoch is neither counted nor prefetched: the job will not read it again soon."""

from __future__ import annotations

from dataclasses import dataclass

START = 3
"""Demanded files before anything is prefetched. Given: two files say nothing."""

GENTLE_UNTIL = 0.05
GENTLE = 1.5
STEEP = 12.0

ENOUGH_EXPECTED = 8.0
"""The prefetch is judged by its hits once so many were expected by chance. The chance that none comes is then e^-8."""

RARELY = 0.25
"""The share of those hits below which nothing more is fetched. Derived: with 8 expected, two come by chance in 1 of 70."""

PASS_SHARE = 32
"""A new pass through the listing begins when one file in so many was demanded since the last, and was not cached."""


def share(demanded: float) -> float:
    """The part of a directory that may be fetched and unused, between 0 and 1, when the part `demanded` was demanded."""
    gentle = GENTLE * min(demanded, GENTLE_UNTIL)
    return min(1.0, gentle + STEEP * max(0.0, demanded - GENTLE_UNTIL))


@dataclass(slots=True)
class Directory:
    """The counts of one directory. `files` is its number of small files, None until it is known."""

    last: float = float("-inf")  # time of the last demand
    files: int | None = None
    demanded: int = 0
    fetched: int = 0  # prefetched, including those in flight
    used: int = 0
    epoch: int = 0
    _expected: float = 0.0
    _missed: int = START  # since the last pass of the listing

    def missed(self, now: float) -> None:
        """Note that a file was opened for the first time in this epoch, and none of it was cached."""
        self._missed += 1
        self._demand(now)

    def hit(self, now: float) -> None:
        """Note that a prefetched file was opened for the first time."""
        self._demand(now)
        self.used += 1

    def _demand(self, now: float) -> None:
        self.last = now
        if self.files is not None:
            self._expected += self.unused / max(self.files - self.demanded, self.unused, 1)
        self.demanded += 1

    def in_epoch(self, epoch: int) -> None:
        """Start the counts again if this is another epoch than before."""
        before, self.epoch = self.epoch, epoch
        if before in (0, epoch):
            return
        self.fetched, self.used, self.demanded = self.unused, 0, 0
        self._expected = 0.0
        self._missed = self.files or START

    def started(self) -> None:
        """Note that the prefetch of a file begins."""
        self.fetched += 1

    def failed(self) -> None:
        """Note that the prefetch of a file failed, or was put off."""
        self.fetched -= 1

    @property
    def unused(self) -> int:
        """Files prefetched and not opened, also those that were evicted since."""
        return self.fetched - self.used

    @property
    def rarely_used(self) -> bool:
        """True if clearly fewer of the prefetched files were used than by chance."""
        return self._expected >= ENOUGH_EXPECTED and self.used < RARELY * self._expected

    def more_files(self) -> int:
        """How many more files to prefetch now."""
        demanded, files = self.demanded, self.files
        if demanded < START or self.rarely_used:
            return 0
        if files is None:
            # The count is not known, so the gentle slope holds: less than two thirds of the fetched files go unused.
            allowed = int(GENTLE * demanded)
        else:
            allowed = min(int(share(demanded / max(files, 1)) * files), files - demanded)
        return max(0, allowed - self.unused)

    def begin_pass(self) -> bool:
        """True if a pass through the listing should begin. One at every miss would take too long."""
        if self._missed < max(START, (self.files or 0) // PASS_SHARE):
            return False
        self._missed = 0
        return True

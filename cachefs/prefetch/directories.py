"""How many files of a directory are worth fetching before they are asked for. Pure.

Many small files of one directory are opened cold, in any order. Whether all of them will be wanted or a few, the demand
cannot tell: a random twentieth of a directory looks like the beginning of a shuffled epoch. So the rule is a ratio: what is
fetched and not used yet may be a share of the directory that grows with the share that was asked for. It is small until
a twentieth was asked for, and steep from there on.

With N files of which D were asked for, d = D/N, the share is

    u(d) = 1.5 d                    up to d = 0.05
    u(d) = 0.075 + 12 (d - 0.05)    beyond, at most 1

Derived: when a twentieth is wanted, at most a thirteenth of the directory is fetched for nothing; when all of 4,000 files of
100 kB are wanted by four workers at 20 ms a request and 100 MB/s, the epoch reaches 0.85 of what 64 requests in flight
would (`tests/prefetch/test_directories.py` has the model). Steeper gains little, for the first part is what takes time.

A wanted part that is not spread evenly (one class, one day) shows in what is used: fewer of the files fetched ahead than
their share of those that are left. Then nothing more is fetched until the ratio recovers.

All of it counts within one epoch of the data set, as the cache sees it (`store/epochs.py`). What an epoch has had already is
neither counted nor fetched ahead: in a directory larger than the cache it may be gone, and will not be wanted soon.
"""

from __future__ import annotations

from collections import OrderedDict

START = 3
"""Files asked for before anything is fetched ahead. Guessed: two are looked at by chance."""

GENTLE_UNTIL = 0.05
GENTLE = 1.5
STEEP = 12.0

EXPECTED_ENOUGH = 8.0
"""Hits that chance would have given before the lack of them means something: that none came then has a chance of e^-8."""

DISAPPOINTING = 0.25
"""The share of those hits below which the rest is left alone. Guessed; with 8 expected, two come by chance in 1 of 70."""

REMEMBERED = 256
"""Directories. Guessed: a data set by class has a thousand, of which a few are read at a time."""

FORGET_AFTER_S = 600.0
"""Without a demand, what a directory has shown is forgotten: the next reader may be another. Guessed."""

PASS_SHARE = 32
"""A listing is gone through again when a file for each of this many has been missed since. Guessed."""


def share(asked: float) -> float:
    """The part of a directory that may be fetched and unused when the part `asked` was asked for."""
    gentle = GENTLE * min(asked, GENTLE_UNTIL)
    return min(1.0, gentle + STEEP * max(0.0, asked - GENTLE_UNTIL))


class Directory:
    """What one directory has shown. `files` is how many small files it has, None until that is known."""

    def __init__(self) -> None:
        self.files: int | None = None
        self.demanded = 0
        self.fetched = 0  # ahead, those on their way included
        self.used = 0
        self.last = float("-inf")
        self.epoch = 0
        self._expected = 0.0
        self._missed = START  # since the listing was last gone through

    def missed(self, now: float) -> None:
        """A file that this epoch has not had was opened, and nothing of it was here."""
        self._missed += 1
        self._ask(now)

    def hit(self, now: float) -> None:
        """A file that was fetched ahead was opened for the first time."""
        self._ask(now)
        self.used += 1

    def _ask(self, now: float) -> None:
        self.last = now
        if self.files is not None:
            left = max(self.files - self.demanded, self.unused, 1)
            self._expected += self.unused / left
        self.demanded += 1

    def in_epoch(self, epoch: int) -> None:
        """Begin anew when it is another than before."""
        before, self.epoch = self.epoch, epoch
        if before in (0, epoch):
            return
        self.fetched, self.used, self.demanded = self.unused, 0, 0
        self._expected = 0.0
        self._missed = self.files or START

    def started(self) -> None:
        """A file is being fetched ahead."""
        self.fetched += 1

    def failed(self) -> None:
        """It was not fetched after all."""
        self.fetched -= 1

    @property
    def unused(self) -> int:
        """Files fetched ahead and not opened, wherever they are now: what was thrown away is waste, too."""
        return self.fetched - self.used

    @property
    def disappoints(self) -> bool:
        return self._expected >= EXPECTED_ENOUGH and self.used < DISAPPOINTING * self._expected

    def wish(self) -> int:
        """How many more files to fetch ahead now."""
        if self.demanded < START or self.disappoints:
            return 0
        if self.files is None:
            # As at the gentle slope of any directory: of what is fetched, less than two thirds is for nothing.
            return max(0, int(GENTLE * self.demanded) - self.unused)
        allowed = int(share(self.demanded / max(self.files, 1)) * self.files)
        return max(0, min(allowed, self.files - self.demanded) - self.unused)

    def begin_pass(self) -> bool:
        """Whether to go through the listing (again): not for every file missed, for it is long."""
        if self._missed < max(START, (self.files or 0) // PASS_SHARE):
            return False
        self._missed = 0
        return True


class Directories:
    """The directories lately in use, by any key, newest use last."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Directory] = OrderedDict()

    def at(self, key: int, now: float) -> Directory:
        """The directory; made, or begun anew when nothing was asked for in it for long."""
        found = self._known.get(key)
        if found is None or now - found.last > FORGET_AFTER_S:
            found = self._known[key] = Directory()
            found.last = now
        self._known.move_to_end(key)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found

    def get(self, key: int) -> Directory | None:
        return self._known.get(key)

    def newest_first(self) -> list[tuple[int, Directory]]:
        return list(reversed(self._known.items()))

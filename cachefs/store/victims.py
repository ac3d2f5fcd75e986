"""Looking for what may go: the index's rows of a tier, least recently used first.

A row that is kept (its epoch has not had it yet, or nobody has read it since it was fetched ahead) stays kept until an epoch
begins, so it is looked at once and passed over: with a million rows, the search goes on where it was. Rows that only cannot
go right now, and those that come in below, are looked at again after each flush.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

from cachefs.store.index import CopyKey, Index

Row = tuple[bytes, CopyKey, int, int]
"""(cursor, copy, clock, dataset). Rows looked at once more have no cursor."""

KEPT_AT_ONCE = 1024
"""Kept rows passed over in one search, about 1 ms. Derived: after an epoch began, a million rows cost a thousand demands the
right victim, a thousandth of them."""

HELD = 4096
"""Rows remembered because they could not go just then; beyond it the walk starts over. Guessed."""


class Verdict(enum.Enum):
    """What is known of a row's copy: it can go; not now; it is no longer there, or another row speaks of it."""

    GOES = enum.auto()
    HELD = enum.auto()
    GONE = enum.auto()


class Walk:
    """One way through a tier's rows. `keep` tells which to pass over."""

    def __init__(self, index: Index, tier: int, keep: Callable[[CopyKey, int, int], bool]) -> None:
        self._index = index
        self._tier = tier
        self._keep = keep
        self._rows: deque[Row] = deque()
        self._held: list[Row] = []
        self._after = b""
        self.passed = -1
        """Clock of the last row passed: nothing below it will be looked at without `add`."""

    def first(self, judge: Callable[[CopyKey, int], Verdict], older_than: int | None) -> CopyKey | None:
        """The first copy that can go. It is found again until it has gone."""
        kept = 0
        while True:
            if not self._rows:
                self._rows.extend(self._index.oldest(self._tier, self._after, 256))
                if not self._rows:
                    return None
            row = self._rows[0]
            _, key, clock, dataset = row
            if older_than is not None and clock >= older_than:
                return None
            if self._keep(key, clock, dataset):
                kept += 1
            else:
                verdict = judge(key, clock)
                if verdict is Verdict.GOES:
                    return key
                if verdict is Verdict.HELD:
                    self.add(key, clock, dataset)
            self._rows.popleft()
            if row[0]:
                self._after, self.passed = row[0], clock
            if kept >= KEPT_AT_ONCE:
                return None

    def add(self, key: CopyKey, clock: int, dataset: int) -> None:
        """A row below what was passed is to be looked at after the next flush."""
        self._held.append((b"", key, clock, dataset))

    def flushed(self) -> None:
        """Rows are up to date again: go on where the walk was, after those that were held."""
        if len(self._held) > HELD:
            self.restart()
            return
        self._held += (row for row in self._rows if not row[0])  # no search has come that far
        self._rows = deque(sorted(self._held, key=lambda row: row[2]))
        self._held = []

    def restart(self) -> None:
        self._rows.clear()
        self._held.clear()
        self._after, self.passed = b"", -1

"""What the index is told besides its rows: how far the clock is, and what is known of datasets and their epochs.

The clock is in each flush. Rows alone do not tell it: what is pinned on the last tier has none in the order of eviction, and
a start reads no others. Were it to go back, what is used now would look older than what was used then.
"""

from __future__ import annotations

from cachefs.store.datasets import Datasets
from cachefs.store.epochs import Epochs
from cachefs.store.index import Index

EPOCHS_SAVED_EVERY = 10
"""Flushes from one writing of what is known of epochs to the next, 100 KB for each dataset in use. Guessed: what a crash
loses of it makes the next epoch look a little less like one."""

_CLOCK = b"clock"


class Notes:
    """Restores `epochs` and `datasets`; `clock` is behind all that an earlier daemon has given."""

    def __init__(self, index: Index, epochs: Epochs, datasets: Datasets) -> None:
        self._epochs = epochs
        self._datasets = datasets
        self._flushes = 0
        self.closing = False
        datasets.restore(index.note(b"datasets"))
        listed = index.note(b"epochs")
        known = epochs.restore(listed, [(n, index.note(b"epochs%08x" % n)) for n in epochs.listed(listed)])
        noted = int.from_bytes(index.note(_CLOCK) or b"", "big")
        self.clock = max(index.newest_clock(), known, noted) + 1
        self._saved_version = epochs.version

    def take(self, clock: int) -> dict[bytes, bytes]:
        """For a flush: the clock, and what is known of epochs when it is time to write it."""
        notes = {_CLOCK: clock.to_bytes(8, "big")}
        self._flushes += 1
        if (
            self._saved_version == self._epochs.version
            and self._flushes % EPOCHS_SAVED_EVERY
            and not self.closing
        ):
            return notes
        self._saved_version = self._epochs.version
        listed, rows = self._epochs.changes()
        return {
            **notes,
            b"epochs": listed,
            b"datasets": self._datasets.dump(),
            **{b"epochs%08x" % number: row for number, row in rows.items()},
        }

"""What of the uploads must survive this process: one row a dirty file, in a database that is written through.

Rows that are written at the same time share one transaction, and so does what makes the names of their staging files
durable: many small files cost the disk one wait. A journal is no cache: one that is damaged is never emptied, but refused
with the name of its directory, because the files beside it may be the only copy of a user's work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from cachefs.base.behind import HANGS_AFTER_S
from cachefs.base.database import Database, Put, read_mark
from cachefs.base.errors import CacheInUse, CacheUnusable

FORMAT = "journal-1"
DIRTY_FILES, ORPHANS, NOTES = "drafts", "orphans", "notes"
"""Dirty files by id; multipart uploads that are to be aborted, by id; what the rooms above note for themselves."""


def refuse_foreign(directory: Path) -> None:
    """Raises `CacheUnusable` for a journal of another format, and changes nothing: to be asked before anything else of a
    cache directory is opened, which may drop what it cannot read."""
    found, _ = read_mark(directory)
    if found not in ("", FORMAT):
        raise CacheUnusable(
            f"what was written here and is not in the store yet is noted in {directory} in the format {found!r}, and this "
            f"version reads {FORMAT!r}: start the version of cachefs that wrote it, until all is in the store"
        )


class DiskHangs(CacheUnusable):
    """A row waits for a disk that does not answer, and is written once it does."""


class _Batch:
    """Rows that wait for one transaction, and what became of it. `first` and `then` are called around it."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, bytes], bytes | None] = {}
        self.first: list[Callable[[], None]] = []
        self.then: list[Callable[[], None]] = []
        self.ended = trio.Event()
        self.error: Exception | None = None


class Journal:
    """Rows are JSON objects. What `write` has returned for is on the disk."""

    def __init__(self, directory: Path, before: Callable[[], None] = lambda: None) -> None:
        """`before` is called in a worker thread before rows are written, for what they rely on.

        Raises `CacheUnusable` when it cannot be read as a whole, and then changes nothing. Blocking."""
        try:
            self._database = Database(
                directory, (DIRTY_FILES, ORPHANS, NOTES), version=FORMAT, fsync=True, precious=True
            )
        except CacheInUse:
            raise
        except CacheUnusable as exc:
            raise CacheUnusable(
                f"{exc}; cachefs recover {directory.parent} lists the files that it is about"
            ) from exc
        self._before = before
        self._next = _Batch()
        self.hangs_elsewhere: Callable[[], bool] = lambda: False
        self._working = False
        self._since = math.inf  # when the transaction under way began

    @property
    def hangs(self) -> bool:
        """Whether a transaction takes too long."""
        return self._since < trio.current_time() - HANGS_AFTER_S

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        """All rows of a table, as they were before this start; later ones are their owners' to know."""
        return {key.decode(): json.loads(value) for key, value in self._database.scan(table)}

    async def write(
        self,
        table: str,
        key: str,
        row: Mapping[str, Any] | None,
        *,
        first: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
        within_s: float = math.inf,
    ) -> None:
        """Put a row, or remove it. `first` and `then`, which must not raise, are called in the worker thread before it is
        written, and after it is on the disk. Raises `NoRoom`, `CacheUnusable`; and `DiskHangs` when a transaction takes
        longer than `within_s`, or the disk is known to hang: the row is written all the same, once the disk answers."""
        batch = self._next
        batch.first += [first] if first is not None else []
        batch.then += [then] if then is not None else []
        batch.rows[table, key.encode()] = None if row is None else json.dumps(row).encode()
        if not self._working:
            self._working = True
            trio.lowlevel.spawn_system_task(self._work)
        with trio.CancelScope(shield=True):  # a cancelled caller's row is written whole, or not at all
            known = within_s < math.inf and self.hangs_elsewhere()
            began = -math.inf if known else min(trio.current_time(), self._since)
            with trio.move_on_at(began + within_s):
                await batch.ended.wait()
        if not batch.ended.is_set():
            raise DiskHangs("the disk of the journal does not answer")
        if batch.error is not None:
            raise batch.error

    async def _work(self) -> None:
        """One transaction after the other, until no row waits."""
        while self._next.rows:
            batch, self._next = self._next, _Batch()
            self._since = trio.current_time()
            puts = [(where, name, value) for (where, name), value in batch.rows.items()]
            try:
                await trio.to_thread.run_sync(self._write, puts, batch.first, batch.then)
            except Exception as exc:
                batch.error = exc
            batch.ended.set()
        self._working, self._since = False, math.inf

    def _write(
        self, puts: list[Put], first: list[Callable[[], None]], then: list[Callable[[], None]]
    ) -> None:
        for call in first:
            call()
        self._before()
        self._database.write(puts)
        for call in then:
            call()

    def close(self) -> None:
        self._database.close()

"""A write-behind database: `write` changes memory alone, and one thread commits the rows.

A disk may hang: no write to it returns, and the trio thread must not wait for one. So a row is valid as soon as it is in
memory, and reads see it in place of the database's row. The thread gathers rows for `GATHER_S` and commits them together, in
the order in which they were written. So a kill leaves an earlier state of the database, never a part of a write. Rows that
replace each other, as those of a small file do while it is saved, are committed once, with those of other files.

A caller that needs rows to outlive this process awaits `written`. A caller that may write many rows awaits `uncrowded`
first: at most `MOST_ROWS` wait in memory while the disk takes none. A failed commit is retried until it succeeds.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

import trio

from cachefs.base.database import Database, KeyRange, Put
from cachefs.base.errors import CachefsError, CacheUnusable
from cachefs.base.linux import LOOK_EVERY_S
from cachefs.base.shared_memory import RowLog
from cachefs.base.tasks import Outcome

log = logging.getLogger(__name__)

GATHER_S = 0.02
"""How long rows are gathered when no caller waits for them, here and in the journal. A removal that finds the upload of its
file at its end waits as long. Measured (`python -m bench.choosing rows`): while small files are saved one after another, the
commits take 1.4 % of a processor; with half the time, 2.0 %."""

MANY_ROWS, PATIENCE_S = 1000, 1.0
"""With more rows than this in memory, `uncrowded` waits up to `PATIENCE_S` for a commit, so that rows pile up only while the
disk does not answer. Derived: less than a page of a listing; each row may change a page of 4 KiB, which LMDB holds in memory
until the commit."""

MOST_ROWS = 100_000
"""Most rows in memory; with more, `uncrowded` waits for the disk. Derived: about 30 MB of memory; a listing writes two rows
for each name."""

_MISSING = object()


@dataclass(slots=True, eq=False)
class _Rows:
    """Rows that are not committed yet. A key is the table's number (one byte) and the key in the table, so that one `update`
    adds all rows of a write: a reader in another thread sees all of them or none. The value None is a deletion."""

    values: dict[bytes, bytes | None]
    _order: list[bytes] = field(default_factory=list)

    def between(self, start: bytes, stop: bytes, limit: int) -> tuple[dict[bytes, bytes | None], bytes]:
        """(at most `limit` rows with start <= key < stop, the key below which no such row is left out)."""
        order = self._order
        if len(order) != len(self.values):  # rows are never removed, so equal lengths mean equal keys
            order = self._order = sorted(self.values)
        first = bisect_left(order, start)
        last = bisect_left(order, stop, first)
        if last - first > limit:
            last = first + limit
            stop = order[last]
        return {key: self.values[key] for key in order[first:last]}, stop


class WriteBehind:
    """The tables of a database, which `close` closes, too; `stored` is that database, with the committed rows. Reads and
    writes may run in any thread. With `row_log`, whose memory outlives this process, a kill loses no row: the rows that the
    previous process left there are committed first. Raises `CacheUnusable` if its thread cannot be started; then the
    database is closed."""

    def __init__(self, database: Database, row_log: RowLog | None = None) -> None:
        self.stored = database
        self._log = row_log
        self._tables = database.tables
        self._prefix = {name: bytes([number]) for number, name in enumerate(self._tables)}
        # (new rows, rows that are being committed); replaced as a whole, because readers take no lock.
        self._waiting = _Rows({}), _Rows({})
        # The lock of `_changed`. Each write takes it itself, because the methods of a condition are written in Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closing = self._hurry = False
        self._running = True
        self._error: CachefsError | None = None
        # The tasks that wait for a commit, each with the event loop that it is in.
        self._callers: list[tuple[Outcome[None], trio.lowlevel.TrioToken]] = []
        self._since = math.inf  # when the present commit began
        self._group: dict[bytes, bytes | None] | None = None  # the rows of the running `together`
        if row_log is not None and (left := dict(row_log.found())):
            # If the database was dropped, these rows would be a part of lost data, so they are not committed.
            error = None if database.dropped else self._commit(_Rows(left))
            if error is None:
                row_log.clear()
            else:  # perhaps the disk is full: they are committed with the next rows
                log.warning("%s; trying again", error)
                self._waiting[0].values.update(left)
        # One thread for the whole lifetime: a row must never wait for a thread that cannot be started.
        try:
            threading.Thread(target=self._run, name="names", daemon=True).start()
        except RuntimeError as exc:
            database.close()
            raise CacheUnusable(f"no thread can be started to write {self.stored.path}") from exc

    @property
    def waiting_rows(self) -> int:
        new, committing = self._waiting
        return len(new.values) + len(committing.values)

    # -- reading -----------------------------------------------------------------------------------

    def get(self, table: str, key: bytes) -> bytes | None:
        """See `Database`."""
        # Read before the database: a row that leaves memory after this is in the database then.
        new, committing = self._waiting
        if new.values or committing.values:
            prefixed = self._prefix[table] + key
            for rows in (new, committing):
                value = rows.values.get(prefixed, _MISSING)
                if value is not _MISSING:
                    return value  # type: ignore[return-value]
        return self.stored.get(table, key)

    def get_many(self, table: str, keys: Iterable[bytes]) -> list[bytes | None]:
        """See `Database`."""
        keys = list(keys)
        new, committing = self._waiting
        if not new.values and not committing.values:
            return self.stored.get_many(table, keys)
        prefix = self._prefix[table]
        prefixed = [prefix + key for key in keys]
        # One call in C, not a loop, so that rows which another thread writes together are all seen, or none.
        found: list[object] = list(map(new.values.get, prefixed, repeat(_MISSING)))
        if committing.values:
            found = [
                committing.values.get(key, _MISSING) if value is _MISSING else value
                for key, value in zip(prefixed, found, strict=True)
            ]
        missing = [index for index, value in enumerate(found) if value is _MISSING]
        if missing:
            rest = self.stored.get_many(table, [keys[index] for index in missing])
            for index, value in zip(missing, rest, strict=True):
                found[index] = value
        return found  # type: ignore[return-value]

    def scan(
        self, table: str, start: bytes = b"", stop: bytes | None = None, limit: int | None = None
    ) -> list[tuple[bytes, bytes]]:
        """See `Database`."""
        new, committing = self._waiting
        if not new.values and not committing.values:
            return self.stored.scan(table, start, stop, limit)
        number = self._prefix[table]
        end = bytes([number[0] + 1]) if stop is None else number + stop
        most = 1 << 62 if limit is None else limit
        at, found = number + start, [(b"", b"")][:0]
        while at < end and len(found) < most:
            # All rows below `upto` are known, of memory and of the database. The next round begins there.
            changed, upto = committing.between(at, end, most)
            newer, upto_newer = new.between(at, end, most)
            upto = min(upto, upto_newer)
            rows = self.stored.scan(table, at[1:], None if upto[:1] != number else upto[1:], limit)
            if len(rows) == limit:
                upto = min(upto, number + rows[-1][0] + b"\0")
            merged: dict[bytes, bytes | None] = {number + key: value for key, value in rows}
            merged.update(changed)
            merged.update(newer)
            found += [
                (key[1:], value) for key, value in sorted(merged.items()) if value is not None and key < upto
            ]
            at = upto
        return found if limit is None else found[:limit]

    # -- writing -----------------------------------------------------------------------------------

    def write(self, puts: Iterable[Put], ranges: Iterable[KeyRange] = (), *, soon: bool = False) -> None:
        """See `Database`. Never waits, and raises only if `ranges` cannot be read. `soon`: commit without gathering more."""
        rows: dict[bytes, bytes | None] = {}
        for table, start, stop in ranges:
            rows |= {self._prefix[table] + key: None for key, _ in self.scan(table, start, stop)}
        rows.update({self._prefix[table] + key: value for table, key, value in puts})
        with self._lock:
            new = self._waiting[0].values
            wake = not new or (soon and not self._hurry)
            new.update(rows)
            if self._group is not None:
                self._group.update(rows)
            elif self._log is not None:
                self._log.append(rows)
            self._hurry |= soon
            if wake:
                self._changed.notify()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Commit all rows that the block writes in one transaction: a kill leaves all of them or none. The block must not
        await, because no other thread can write meanwhile, and must not contain another one."""
        with self._lock:
            self._group = {}
            try:
                yield
            finally:
                rows, self._group = self._group, None
                if self._log is not None:
                    self._log.append(rows)

    @property
    def crowded(self) -> bool:
        """Whether a caller should await `uncrowded` before it writes."""
        return self.waiting_rows > MANY_ROWS

    async def uncrowded(self) -> None:
        """Return when more may be written. Raises the last commit's error if `MOST_ROWS` are in memory."""
        with trio.move_on_after(PATIENCE_S), suppress(CachefsError):
            await self.written()
        while self.waiting_rows > MOST_ROWS:
            await self.written()

    async def written(self, within_s: float = math.inf) -> None:
        """Return when all rows written until now are committed: a kill does not undo them. Raises the commit's error, or
        `CacheUnusable` if a commit takes longer than `within_s`; the commit is retried, or goes on, all the same."""
        if not self.waiting_rows:
            return
        outcome = Outcome[None]()
        with self._changed:
            if not self._running:
                raise CacheUnusable(f"the database in {self.stored.path} is closed")
            self._callers.append((outcome, trio.lowlevel.current_trio_token()))
            self._hurry = True
            self._changed.notify()
        under_way_s = max(0.0, time.monotonic() - self._since)
        with trio.move_on_after(max(0.0, within_s - under_way_s)) as scope:
            await outcome.wait()
        if scope.cancelled_caught:
            raise CacheUnusable(f"the disk of {self.stored.path} does not answer")

    def flush(self) -> None:
        """Commit the rows in memory, so that a kill does not undo them. Blocking. A failed commit is retried later."""
        with self._changed:
            self._hurry = True
            self._error = None
            self._changed.notify_all()
            while self._running and self.waiting_rows and self._error is None:
                self._changed.wait()

    def close(self) -> None:
        """Commit the rows in memory, and close. Blocking, for as long as the disk does not answer. Idempotent."""
        self._closing = True
        self.flush()
        self.stored.close(clean=not self.waiting_rows)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting[0].values or self._callers or self._closing)
                if not (self._waiting[0].values or self._callers):
                    self._running = False
                    return
                self._changed.wait_for(lambda: self._hurry, GATHER_S)
                self._hurry = self._closing
                callers, self._callers = self._callers, []
                committing = self._waiting[0]
                self._waiting = _Rows({}), committing
                if self._log is not None:
                    self._log.swap()
            self._since = time.monotonic()
            error = self._commit(committing)
            self._since = math.inf
            with self._changed:
                new = self._waiting[0]
                if error is None:
                    self._waiting = new, _Rows({})
                    if self._log is not None:
                        self._log.committed()
                else:
                    self._waiting = _Rows({**committing.values, **new.values}), _Rows({})
                if error is not None and self._error is None and not self._closing:
                    log.warning("%s; trying again", error)
                self._error = error
                self._running = error is None or not self._closing
                self._changed.notify_all()
            for outcome, token in callers:
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(partial(outcome.end, failure=error))
            if not self._running:
                return
            if error is not None:
                time.sleep(LOOK_EVERY_S)

    def _commit(self, rows: _Rows) -> CachefsError | None:
        """Commit the rows. Returns the error."""
        if not rows.values:
            return None
        tables = self._tables
        try:
            self.stored.write([(tables[key[0]], key[1:], value) for key, value in rows.values.items()])
        except CachefsError as exc:
            return exc
        return None

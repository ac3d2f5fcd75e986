"""The schedule of uploads: when each dirty file is uploaded, and the tasks that wait for it.

An upload is an *attempt*, which runs in a task of its own; several callers can wait for it. Cancelling a caller does not end
the attempt. A failed upload is retried at growing intervals, as long as the dirty file is pending."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import trio

from cachefs.base.errors import (
    CachefsError,
    Conflict,
    NoSuchUpload,
    ObjectChanged,
    OriginFailed,
    Transient,
)
from cachefs.base.logs import Repeats
from cachefs.base.metrics import Metrics
from cachefs.base.tasks import Ts, contained
from cachefs.origin import ObjectInfo, Preconditions
from cachefs.upload.content import Attempt, Row, Stored
from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.journal import LONGEST_RETRY_S, RETRY_S, DiskHangs, Records
from cachefs.upload.sending import Piece, expected
from cachefs.upload.staging import LOOK_S, Lost

log = logging.getLogger(__name__)

IN_BACKGROUND = 64
"""Most concurrent attempts without a waiter, and most concurrent uploads of one `flush`. Derived: the usual concurrency of
an origin, whose gate bounds their requests."""

RETRYABLE = (OriginFailed, Transient, NoSuchUpload)
"""Errors of the origin that may end by themselves, and that leave the outcome of an upload unknown. Any other error stays
until a user removes its cause."""


@dataclass(eq=False, repr=False)
class Queue:
    """The queue of uploads. `committed` is called with each uploaded version before its waiters wake, and `settle` with each
    clean file that is not in use. `conditional`: an upload replaces no other client's object. `delay_s`: seconds from a
    commit, a last close, or the end of an attempt during which the file was changed, to its upload in the background."""

    nursery: trio.Nursery
    _records: Records
    _metrics: Metrics
    _committed: Callable[[DirtyFile, ObjectInfo], None]
    _settle: Callable[[DirtyFile], None]
    delay_s: float
    conditional: bool
    _repeats: Repeats = field(default_factory=partial(Repeats, clock=trio.current_time))
    _rng: random.Random = field(default_factory=random.Random)
    # A heap of planned uploads: due time, serial number (it orders plans of equal times), dirty file.
    _due: list[tuple[float, int, DirtyFile]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _busy: int = 0  # running tasks of `_in_background`
    _closed: bool = False
    _changed: trio.Event = field(default_factory=trio.Event)

    def plan(self, dirty_file: DirtyFile, in_s: float) -> None:
        """Have the file uploaded in `in_s` seconds, unless it is uploaded before. Replaces an earlier plan."""
        dirty_file.trying.due = trio.current_time() + in_s
        if not self._closed:
            planned = dirty_file.trying.due, next(self._numbers), dirty_file
            heapq.heappush(self._due, planned)
            if self._due[0] is planned:  # otherwise `run` wakes for an earlier one anyway
                self._changed.set()

    def start(self, what: str, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        """Start a task (see `contained`), unless this is closed: then the nursery ends, or has ended."""
        if not self._closed:
            contained(self.nursery, what, work, *args)

    def close(self) -> None:
        """Begin no more planned uploads, and no more tasks."""
        self._closed = True
        self._due.clear()

    async def run(self) -> None:
        """Start uploads that are due, until cancelled."""
        while True:
            self._changed = trio.Event()
            now = trio.current_time()
            while self._due and self._due[0][0] <= now and self._busy < IN_BACKGROUND:
                due, _, dirty_file = heapq.heappop(self._due)
                if dirty_file.trying.due != due:
                    continue
                # Also if no attempt begins below; otherwise the file would count as planned (`DirtyFile.waits`).
                dirty_file.trying.due = math.inf
                if dirty_file.between:
                    dirty_file.trying.overdue = True  # the next close or fsync begins the upload
                elif dirty_file.attempt is None:
                    self._busy += 1
                    what = f"the upload of {dirty_file.key}"
                    contained(self.nursery, what, self._in_background, dirty_file)
            waits = self._due and self._busy < IN_BACKGROUND
            with trio.move_on_after(self._due[0][0] - now if waits else math.inf):
                await self._changed.wait()

    async def _in_background(self, dirty_file: DirtyFile) -> None:
        """Upload a file whose upload is due, in this task; return at the end of the attempt."""
        try:
            if (attempt := await self._new_attempt(dirty_file)) is not None:
                await self._attempt(dirty_file, attempt)
        finally:
            if self._busy == IN_BACKGROUND:
                self._changed.set()  # `run` waits for a place
            self._busy -= 1

    async def begin(self, dirty_file: DirtyFile) -> None:
        """Wait until an upload of the file's present content has begun: later writes do not change what it sends."""
        attempt = await self._started(dirty_file)
        if attempt is not None:
            await attempt.begun.wait()

    async def upload(self, dirty_file: DirtyFile) -> None:
        """Wait until the origin has the file's present content, or the file was removed. Raises the upload's error."""
        wanted = dirty_file.content.generation
        while not dirty_file.has(wanted):
            if (attempt := await self._started(dirty_file)) is None:
                return
            attempt.waiters += 1
            dirty_file.sender.promote()
            try:
                await attempt.done.wait()
            finally:
                attempt.waiters -= 1
            if attempt.error is not None:
                raise type(attempt.error)(*attempt.error.args) from attempt.error

    async def halt(self, dirty_file: DirtyFile, *, gives_up: bool = False) -> None:
        """End the running attempt: cancel it, or wait for it if the origin may already be carrying it out. The caller holds
        the file's `trying.turn`. `gives_up`: raise `DiskHangs` while a disk is known to hang, because the last step of an
        attempt, the removal of its row, waits for the disk without a limit."""
        while (attempt := dirty_file.attempt) is not None:
            if not dirty_file.sender.final:
                attempt.scope.cancel()
            while not attempt.done.is_set():
                with trio.move_on_after(LOOK_S if gives_up else math.inf):
                    await attempt.done.wait()
                if gives_up and not attempt.done.is_set() and self._records.journal.hangs_elsewhere():
                    raise DiskHangs(
                        f"{dirty_file.origin.name(dirty_file.key)}: the disk of its row does not answer"
                    )

    async def _started(self, dirty_file: DirtyFile) -> Attempt | None:
        """The running attempt, or a new one in a task of its own; None if there is nothing to upload, or not now."""
        if (attempt := await self._new_attempt(dirty_file)) is not None:
            contained(self.nursery, f"the upload of {dirty_file.key}", self._attempt, dirty_file, attempt)
        return dirty_file.attempt

    async def _new_attempt(self, dirty_file: DirtyFile) -> Attempt | None:
        """A new attempt, which the caller must carry out at once; None if one is running, or as for `_started`."""
        if dirty_file.attempt is not None:
            return None
        async with dirty_file.trying.turn:  # a rename or a removal may hold it
            if dirty_file.attempt is not None or dirty_file.discarded or not self._is_quiet(dirty_file):
                return None
            if dirty_file.dirty and (info := dirty_file.clear_suspicion()) is not None:
                await self._unchanged(dirty_file, info)
            if not dirty_file.dirty:
                return None
            dirty_file.trying.due, dirty_file.trying.overdue = math.inf, False
            attempt = Attempt()
            dirty_file.content.begin(attempt)
            return attempt

    async def _unchanged(self, dirty_file: DirtyFile, info: ObjectInfo) -> None:
        """Handle a file that counted as changed, and was not (`DirtyFile.suspect_change`): the origin has its content."""
        self._committed(dirty_file, info)
        await self._records.forget(dirty_file)
        if not dirty_file.handles and not dirty_file.dirty:
            self._settle(dirty_file)

    def _is_quiet(self, dirty_file: DirtyFile) -> bool:
        """True if no program writes the file in passthrough. If False, its last close, or a new plan, tries again."""
        try:
            if not dirty_file.kernel.in_passthrough or dirty_file.reclaim():
                return True
        except CachefsError:
            return True  # its file cannot be opened: the attempt meets that error, too, and reports it
        dirty_file.trying.due = math.inf
        if not dirty_file.kernel.writers:
            self.plan(dirty_file, LOOK_S)
        return False

    async def _attempt(self, dirty_file: DirtyFile, attempt: Attempt) -> None:
        """Carry out an attempt. If it fails, its waiters get the error, and the next attempt is planned."""
        sender = dirty_file.sender
        sender.background = not attempt.waiters
        try:
            with attempt.scope, dirty_file.file.used():
                async with dirty_file.lock:
                    # Since `_new_attempt`, the file may have been changed, or opened in passthrough.
                    dirty_file.trying.overdue = dirty_file.between and not attempt.waiters
                    if dirty_file.trying.overdue or dirty_file.kernel.in_passthrough:
                        attempt.scope.cancel()
                        await trio.lowlevel.checkpoint()
                    if dirty_file.kernel.shared:
                        # After the sync, a write through a mapping changes the file's mtime, so the next look finds it.
                        dirty_file.look()
                        await dirty_file.file.sync()
                    dirty_file.file.check()
                    attempt.generation, attempt.frozen = dirty_file.content.generation, dirty_file.size
                    pieces = dirty_file.parts.pieces()
                    attempt.begun.set()
                began = trio.current_time()
                stored = await self._finish(dirty_file, attempt, pieces)
                self._metrics.ledger.upload_seconds.add(trio.current_time() - began)
                with trio.CancelScope(shield=True):
                    await self.stored(dirty_file, stored, patient=not attempt.waiters)
        except Exception as exc:
            attempt.error = error = expected(exc)
            dirty_file.trying.unsure |= isinstance(error, RETRYABLE)
            with trio.CancelScope(shield=True):
                wait_s = await self._failed(dirty_file, error)
            self.warn(dirty_file, exc, f"{error}; trying again in {wait_s:.1f} s")
        finally:
            dirty_file.content.end()
            attempt.begun.set()
            attempt.done.set()
            if dirty_file.waits:  # the attempt was cancelled, or the file was changed meanwhile
                self.plan(dirty_file, self.delay_s)
        if not dirty_file.dirty and not dirty_file.handles:
            self._settle(dirty_file)

    async def _finish(self, dirty_file: DirtyFile, attempt: Attempt, pieces: list[Piece]) -> Stored:
        """Upload what an attempt has begun with."""
        generation, size = attempt.generation, attempt.frozen
        try:
            try:
                return Stored(generation, await self._send(dirty_file, pieces, size))
            except Conflict:
                # The object at the origin may be that of an earlier attempt whose reply was lost, perhaps in a crash.
                if (own := await dirty_file.own_object()) is None:
                    raise
                dirty_file.base = own.etag
                return Stored(generation, await self._send(dirty_file, pieces, size))
        except ObjectChanged:
            # The upload has succeeded, and then another client's object has replaced it: the last upload wins.
            return Stored(generation, await dirty_file.origin.head(dirty_file.key), overtaken=True)

    async def _send(self, dirty_file: DirtyFile, pieces: list[Piece], size: int) -> ObjectInfo:
        """Upload with a new token, which the dirty file remembers before the request."""
        preconditions = Preconditions(token=dirty_file.new_token())
        if self.conditional:
            if dirty_file.acknowledged:
                # Before the request, so that a later run recognizes the object as its own.
                await self._records.keep(dirty_file)
            base = dirty_file.base
            preconditions = replace(preconditions, if_match=base, if_absent=base is None)
        return await dirty_file.sender.finish(pieces, size, preconditions)

    async def stored(self, dirty_file: DirtyFile, stored: Stored, *, patient: bool) -> None:
        """Handle a successful upload: note the version, and remove the row if nothing has changed meanwhile."""
        info, trying = stored.info, dirty_file.trying
        if not info.mtime_ns:  # a HEAD for the origin's mtime would double the time of a small upload
            info = replace(info, mtime_ns=dirty_file.mtime_ns)
        dirty_file.content.stored_as(replace(stored, info=info))
        dirty_file.base = info.etag
        trying.failure, trying.failures, trying.unsure, trying.told = None, 0, False, False
        dirty_file.record.tokens, dirty_file.record.upload, dirty_file.record.copied = [], None, None
        dirty_file.noted()
        self._metrics.uploaded_files += 1
        self._committed(dirty_file, info)
        if dirty_file.record.over is not None:
            await self._records.forget_replaced(dirty_file)
        # While the name is being removed, the row stays: if a kill ends the removal early, the name shows this file.
        if not (dirty_file.dirty or dirty_file.discarded or dirty_file.content.row is Row.NONE):
            await self._records.forget(dirty_file, patient=patient)

    async def _failed(self, dirty_file: DirtyFile, error: CachefsError) -> float:
        """Handle a failed upload: acknowledge the file, so that it survives a crash, and plan the next attempt. Returns in
        how many seconds that begins."""
        trying = dirty_file.trying
        trying.failure, trying.told = error, False
        self._metrics.upload_failures += 1
        try:
            await self._records.acknowledge(dirty_file)
        except CachefsError as exc:
            self.warn(dirty_file, exc, f"{dirty_file.origin.name(dirty_file.key)}: {exc}")
        trying.failures += 1
        wait_s = LONGEST_RETRY_S
        if not in_vain(error):
            wait_s = min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(trying.failures - 1, 32))
        wait_s *= self._rng.uniform(0.5, 1.0)
        self.plan(dirty_file, wait_s)
        return wait_s

    def warn(self, dirty_file: DirtyFile, exc: Exception, text: str) -> None:
        """Log why a file was not uploaded, or not stored on this disk. Each kind of error of a source is logged once a
        minute, so that a user whose files fail cannot fill the log; at level debug, each error is."""
        left_out: int | None = 0
        if not log.isEnabledFor(logging.DEBUG):
            left_out = self._repeats.admit((dirty_file.origin.source, type(exc)))
        if left_out is None:
            return
        if left_out:
            text += f" ({left_out} more failures of this kind before it)"
        bug = None if isinstance(exc, CachefsError) else exc
        log.log(logging.ERROR if bug or isinstance(exc, Lost) else logging.WARNING, "%s", text, exc_info=bug)


def in_vain(error: CachefsError) -> bool:
    """True if a retry would probably fail with the same error."""
    return not isinstance(error, RETRYABLE)

"""When which dirty file goes to the origin, and its waiters.

An upload is an *attempt*, a task of its own that waiters join; cancelling a waiter does not end it. What fails is tried
again, at growing intervals, as long as it is pending."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import trio

from cachefs.base.errors import CachefsError, Conflict, NoSuchUpload, ObjectChanged, OriginFailed, Transient
from cachefs.base.logs import Repeats
from cachefs.base.metrics import Metrics
from cachefs.base.tasks import contained, run_contained, taken
from cachefs.origin import ObjectInfo, new_token
from cachefs.upload.content import Attempt, Row, Stored
from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.journal import LONGEST_RETRY_S, RETRY_S, DiskHangs, Records
from cachefs.upload.sending import Piece, Preconditions, expected
from cachefs.upload.staging import LOOK_S, Lost

log = logging.getLogger(__name__)

IN_BACKGROUND = 64
"""Attempts without a waiter, and dirty files that one `flush` waits for, at a time. Derived from the usual concurrency of an
origin, whose gate bounds their requests."""

ABOUT_THE_STORE = (OriginFailed, Transient, NoSuchUpload)
"""What may pass by itself. Any other error stays until the user removes its cause."""


class Queue:
    """`committed` is told of each version before its waiters wake; `settle` is given dirty files that the origin has.
    `conditional`: an upload replaces no other client's object. A file is sent `delay_s` after its last change."""

    def __init__(
        self,
        nursery: trio.Nursery,
        records: Records,
        metrics: Metrics,
        committed: Callable[[DirtyFile, ObjectInfo], None],
        settle: Callable[[DirtyFile], Awaitable[None]],
        *,
        delay_s: float,
        conditional: bool,
    ) -> None:
        self.nursery = nursery
        self.delay_s = delay_s
        self._records = records
        self._metrics = metrics
        self._committed, self._settle = committed, settle
        self._conditional = conditional
        self._repeats = Repeats(clock=trio.current_time)
        self._rng = random.Random()
        self._due: list[tuple[float, int, DirtyFile]] = []
        self._numbers = itertools.count()
        self._busy = 0
        self._closed = False
        self._changed = trio.Event()

    def plan(self, dirty_file: DirtyFile, in_s: float) -> None:
        """Upload it then, unless that was done meanwhile."""
        dirty_file.trying.due = trio.current_time() + in_s
        if not self._closed:
            planned = dirty_file.trying.due, next(self._numbers), dirty_file
            heapq.heappush(self._due, planned)
            if self._due[0] is planned:  # else `run` looks again before that time
                self._changed.set()

    def close(self) -> None:
        """Nothing is begun any more."""
        self._closed = True
        self._due.clear()

    async def run(self) -> None:
        """Start what is due, until cancelled."""
        while True:
            self._changed = trio.Event()
            now = trio.current_time()
            while self._due and self._due[0][0] <= now and self._busy < IN_BACKGROUND:
                due, _, dirty_file = heapq.heappop(self._due)
                if dirty_file.trying.due != due:
                    continue
                dirty_file.trying.due = math.inf  # also if nothing is to be sent now: a later plan counts
                if dirty_file.between:
                    dirty_file.trying.overdue = True  # the next close or fsync has it sent
                elif dirty_file.attempt is None:
                    self._busy += 1
                    contained(
                        self.nursery, f"the upload of {dirty_file.key}", self._in_background, dirty_file
                    )
            waits = self._due and self._busy < IN_BACKGROUND
            with trio.move_on_after(self._due[0][0] - now if waits else math.inf):
                await self._changed.wait()

    async def _in_background(self, dirty_file: DirtyFile) -> None:
        try:
            attempt, is_new = await self._joined(dirty_file)
            if is_new and attempt is not None:
                await run_contained(f"the upload of {dirty_file.key}", self._attempt, dirty_file, attempt)
            elif attempt is not None:
                await attempt.done.wait()
        except CachefsError:
            pass  # said, and planned again
        finally:
            self._busy -= 1
            self._changed.set()

    async def begin(self, dirty_file: DirtyFile) -> None:
        """Return when an upload of what the dirty file holds now has begun: then writing it further does not change that."""
        attempt = await self._started(dirty_file)
        if attempt is not None:
            await attempt.begun.wait()

    async def upload(self, dirty_file: DirtyFile) -> None:
        """Return when the origin has what the dirty file holds now, or it was removed. Raises the upload's error."""
        wanted = dirty_file.content.generation
        while not dirty_file.has(wanted):
            attempt = await self._started(dirty_file)
            if attempt is None:
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
        """No attempt is in progress afterwards. The caller holds the dirty file's `turn`, so that none begins. One whose
        outcome is out of our hands is waited for. `gives_up`: raises `DiskHangs` while a disk is known to hang, because the
        last step of an attempt, its row, waits for the disk without a limit."""
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
        """The attempt under way, or a new one, in a task of its own."""
        attempt, is_new = await self._joined(dirty_file)
        if is_new and attempt is not None:
            contained(self.nursery, f"the upload of {dirty_file.key}", self._attempt, dirty_file, attempt)
        return attempt

    async def _joined(self, dirty_file: DirtyFile) -> tuple[Attempt | None, bool]:
        """The attempt under way, or a new one, which the caller carries out at once; and whether it is new."""
        if dirty_file.attempt is None:
            async with taken(dirty_file.trying.turn):  # not while it is being renamed
                if dirty_file.attempt is not None or dirty_file.discarded or not self._is_quiet(dirty_file):
                    return dirty_file.attempt, False
                if dirty_file.dirty and (info := dirty_file.clear_suspicion()) is not None:
                    await self._unchanged(dirty_file, info)
                if dirty_file.dirty:
                    dirty_file.trying.due, dirty_file.trying.overdue = math.inf, False
                    attempt = Attempt()
                    dirty_file.content.begin(attempt)
                    return attempt, True
        return dirty_file.attempt, False

    async def _unchanged(self, dirty_file: DirtyFile, info: ObjectInfo) -> None:
        """No process has changed it after all: the origin has it."""
        self._committed(dirty_file, info)
        await self._records.forget(dirty_file)
        if not dirty_file.handles and not dirty_file.dirty:
            contained(self.nursery, f"settling {dirty_file.key}", self._settle, dirty_file)

    def _is_quiet(self, dirty_file: DirtyFile) -> bool:
        """False while a program writes it in passthrough; its last close, or time, brings it here again."""
        try:
            if not dirty_file.kernel.in_passthrough or dirty_file.reclaim():
                return True
        except CachefsError:
            return True  # its file cannot be opened: the attempt finds that, too, and says so
        dirty_file.trying.due = math.inf
        if not dirty_file.kernel.writers:
            self.plan(dirty_file, LOOK_S)
        return False

    async def _attempt(self, dirty_file: DirtyFile, attempt: Attempt) -> None:
        sender = dirty_file.sender
        sender.background = not attempt.waiters
        try:
            with attempt.scope, dirty_file.file.used():
                async with taken(dirty_file.lock):
                    if dirty_file.kernel.in_passthrough:  # just now
                        attempt.scope.cancel()
                        await trio.lowlevel.checkpoint()
                    if dirty_file.between and not attempt.waiters:  # just now
                        dirty_file.trying.overdue = True
                        attempt.scope.cancel()
                        await trio.lowlevel.checkpoint()
                    if dirty_file.kernel.shared:
                        # After the sync each store through a mapping moves the file's time on, so the next look finds it.
                        dirty_file.look()
                        await dirty_file.file.sync()
                    dirty_file.file.check()
                    attempt.generation, attempt.frozen = dirty_file.content.generation, dirty_file.size
                    pieces = dirty_file.parts.pieces()
                    attempt.begun.set()
                began = trio.current_time()
                info, overtaken = await self._finish(dirty_file, pieces, attempt.frozen)
                self._metrics.ledger.upload_seconds.add(trio.current_time() - began)
                with trio.CancelScope(shield=True):
                    stored = Stored(attempt.generation, info, overtaken)
                    await self._stored(dirty_file, stored, patient=not attempt.waiters)
        except Exception as exc:
            attempt.error = error = expected(exc)
            dirty_file.trying.unsure |= isinstance(error, ABOUT_THE_STORE)
            with trio.CancelScope(shield=True):
                await self._failed(dirty_file, error)
            wait_s = self._again(dirty_file, error)
            self.warn(dirty_file, exc, f"{error}; trying again in {wait_s:.1f} s")
        finally:
            dirty_file.content.end()
            attempt.begun.set()
            attempt.done.set()
            if dirty_file.waits:  # broken off, or written meanwhile
                self.plan(dirty_file, self.delay_s)
        if not dirty_file.dirty and not dirty_file.handles:
            await self._settle(dirty_file)

    async def _finish(self, dirty_file: DirtyFile, pieces: list[Piece], size: int) -> tuple[ObjectInfo, bool]:
        """The version that the origin shows, and whether another client has overtaken this one."""
        earlier = list(dirty_file.record.tokens)
        try:
            try:
                preconditions = await self._preconditions(dirty_file)
                return await dirty_file.sender.finish(pieces, size, preconditions), False
            except Conflict as exc:
                # Is it of an earlier attempt, whose reply was lost, perhaps with the process that waited for it?
                dirty_file.base = await self._ours(dirty_file, earlier, exc)
                preconditions = await self._preconditions(dirty_file)
                return await dirty_file.sender.finish(pieces, size, preconditions), False
        except ObjectChanged:
            # It was there, and another client's object came after it: the last one wins.
            return await dirty_file.origin.head(dirty_file.key), True

    async def _ours(self, dirty_file: DirtyFile, tokens: list[str], conflict: Conflict) -> str:
        for token in reversed(tokens):
            try:
                return (await dirty_file.origin.ours(dirty_file.key, token, None, conflict)).etag
            except Conflict:
                pass
        raise conflict

    async def _preconditions(self, dirty_file: DirtyFile) -> Preconditions:
        """What the next attempt may replace."""
        token = new_token()
        dirty_file.has_token(token)
        if not self._conditional:
            return Preconditions(token=token)
        if dirty_file.acknowledged:
            await self._records.keep(dirty_file)  # before: a later run must know its own object
        return Preconditions(dirty_file.base, dirty_file.base is None, token)

    async def _stored(self, dirty_file: DirtyFile, stored: Stored, *, patient: bool) -> None:
        info, trying = stored.info, dirty_file.trying
        if not info.mtime_ns:  # asking for it would double the time that a small file takes
            info = replace(info, mtime_ns=dirty_file.mtime_ns)
        dirty_file.content.stored_as(replace(stored, info=info))
        dirty_file.base = info.etag
        trying.failure, trying.failures, trying.unsure, trying.told = None, 0, False, False
        dirty_file.record.tokens, dirty_file.record.upload = [], None
        dirty_file.noted()
        self._metrics.uploaded_files += 1
        self._committed(dirty_file, info)
        if dirty_file.record.over is not None:
            await self._records.forget_replaced(dirty_file)
        if not dirty_file.dirty and dirty_file.content.row is not Row.NONE:
            await self._records.forget(dirty_file, patient=patient)

    async def _failed(self, dirty_file: DirtyFile, error: CachefsError) -> None:
        dirty_file.trying.failure, dirty_file.trying.told = error, False
        self._metrics.upload_failures += 1
        try:
            await self._records.acknowledge(dirty_file)
        except CachefsError as exc:
            self.warn(dirty_file, exc, f"{dirty_file.origin.name(dirty_file.key)}: {exc}")

    def _again(self, dirty_file: DirtyFile, error: CachefsError) -> float:
        """Plan the next attempt; returns in how many seconds."""
        dirty_file.trying.failures += 1
        wait_s = LONGEST_RETRY_S
        if not in_vain(error):
            wait_s = min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(dirty_file.trying.failures - 1, 32))
        wait_s *= self._rng.uniform(0.5, 1.0)
        self.plan(dirty_file, wait_s)
        return wait_s

    def warn(self, dirty_file: DirtyFile, exc: Exception, text: str) -> None:
        """Log why a file is not at the origin, or not kept here: each kind of error of a source once a minute, or each time
        at level debug. Else any user whose files fail could fill the log. The status counts all of them."""
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
    """Whether the same again would most probably come to the same."""
    return not isinstance(error, ABOUT_THE_STORE)

"""When which draft goes to the store, and who waits for it.

An upload is an *attempt*, a task of its own that those who wait join; none of them ends it. What fails is tried again, at
growing intervals, as long as it is pending.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
from collections.abc import Awaitable, Callable

import trio

from cachefs.errors import CachefsError, Conflict, NoSuchUpload, ObjectChanged, OriginFailed, Transient
from cachefs.origin import ObjectInfo
from cachefs.tasks import contained
from cachefs.upload.draft import Attempt, Draft
from cachefs.upload.parts import Piece
from cachefs.upload.sending import Terms, expected

log = logging.getLogger(__name__)

RETRY_S, LONGEST_RETRY_S = 0.5, 60.0
"""Waits after failures, doubled from the first to the last; the origin has repeated each request already. Guessed."""

IN_BACKGROUND = 32
"""Attempts that nobody waits for, at a time. Guessed: small files need many at once, the gate bounds their requests."""

STILL_WRITTEN_S = 0.25
"""How often is looked whether a file is still written by somebody who has closed it, through a mapping. Guessed."""

ABOUT_THE_STORE = (OriginFailed, Transient, NoSuchUpload)
"""What may pass by itself. The rest is refused until somebody does something about it."""


class Queue:
    """`stored` and `failed` are told of the outcome before those who wait; `settle` of drafts that the store has. `terms`
    says what a draft may replace."""

    def __init__(
        self,
        nursery: trio.Nursery,
        terms: Callable[[Draft], Awaitable[Terms]],
        stored: Callable[[Draft, int, ObjectInfo], Awaitable[None]],
        failed: Callable[[Draft, CachefsError], Awaitable[None]],
        settle: Callable[[Draft], Awaitable[None]],
        delay_s: float,
    ) -> None:
        self.nursery = nursery
        self._terms, self._stored, self._failed, self._settle = terms, stored, failed, settle
        self._delay_s = delay_s
        self._rng = random.Random()
        self._due: list[tuple[float, int, Draft]] = []
        self._numbers = itertools.count()
        self._busy = 0
        self._closed = False
        self._changed = trio.Event()

    def plan(self, draft: Draft, in_s: float) -> None:
        """Upload it then, if nobody has by then."""
        draft.due = trio.current_time() + in_s
        if not self._closed:
            heapq.heappush(self._due, (draft.due, next(self._numbers), draft))
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
                due, _, draft = heapq.heappop(self._due)
                if draft.due != due:
                    continue
                if draft.between:
                    draft.due, draft.overdue = math.inf, True  # the next close or fsync has it sent
                elif draft.attempt is None:
                    self._busy += 1
                    contained(self.nursery, f"the upload of {draft.key}", self._in_background, draft)
            waits = self._due and self._busy < IN_BACKGROUND
            with trio.move_on_after(self._due[0][0] - now if waits else math.inf):
                await self._changed.wait()

    async def _in_background(self, draft: Draft) -> None:
        try:
            attempt = await self._started(draft)
            if attempt is not None:
                await attempt.done.wait()
        except CachefsError:
            pass  # said, and planned again
        finally:
            self._busy -= 1
            self._changed.set()

    async def begin(self, draft: Draft) -> None:
        """Return when an upload of what the draft holds now has begun: then writing it further does not change that."""
        attempt = await self._started(draft)
        if attempt is not None:
            await attempt.begun.wait()

    async def upload(self, draft: Draft) -> None:
        """Return when the store has what the draft holds now, or nobody wants that any more. Raises why it has not."""
        wanted = draft.generation
        while not draft.has(wanted):
            attempt = await self._started(draft)
            if attempt is None:
                return
            attempt.waiters += 1
            draft.sender.promote()
            try:
                await attempt.done.wait()
            finally:
                attempt.waiters -= 1
            if attempt.error is not None:
                raise type(attempt.error)(*attempt.error.args) from attempt.error

    async def halt(self, draft: Draft) -> None:
        """No attempt is under way afterwards; for who holds the draft's `turn`, so that none begins. One whose outcome is
        out of our hands is waited for."""
        while (attempt := draft.attempt) is not None:
            if not draft.sender.final:
                attempt.scope.cancel()
            await attempt.done.wait()

    async def _started(self, draft: Draft) -> Attempt | None:
        """The attempt under way, or a new one."""
        if draft.attempt is None:
            async with draft.turn:  # not while it is being renamed
                if (
                    draft.attempt is None
                    and not draft.discarded
                    and await self._is_quiet(draft)
                    and draft.dirty
                ):
                    draft.due, draft.overdue = math.inf, False
                    draft.attempt = attempt = Attempt()
                    contained(self.nursery, f"the upload of {draft.key}", self._attempt, draft, attempt)
        return draft.attempt

    async def _is_quiet(self, draft: Draft) -> bool:
        """False while a program writes it in passthrough; its last close, or time, brings it here again. Raises
        `CacheUnusable` where its file cannot be opened; that is tried again like a failed attempt."""
        try:
            if not draft.lent or draft.reclaim():
                return True
        except CachefsError as exc:
            await self._failed(draft, exc)
            self._again(draft, exc)
            raise
        draft.due = math.inf
        if not draft.writers:
            self.plan(draft, STILL_WRITTEN_S)
        return False

    async def _attempt(self, draft: Draft, attempt: Attempt) -> None:
        sender = draft.sender
        sender.background = not attempt.waiters
        try:
            with attempt.scope, draft.file.used():
                async with draft.lock:
                    if draft.lent:  # just now
                        attempt.scope.cancel()
                        await trio.lowlevel.checkpoint()
                    if draft.between and not attempt.waiters:  # just now
                        draft.overdue = True
                        attempt.scope.cancel()
                        await trio.lowlevel.checkpoint()
                    draft.file.check()
                    attempt.generation, attempt.frozen = draft.generation, draft.size
                    pieces = draft.parts.pieces()
                    attempt.begun.set()
                info = await self._finish(draft, pieces, attempt.frozen)
                with trio.CancelScope(shield=True):
                    await self._stored(draft, attempt.generation, info)
        except Exception as exc:
            attempt.error = error = expected(exc)
            draft.unsure |= isinstance(error, ABOUT_THE_STORE)
            with trio.CancelScope(shield=True):
                await self._failed(draft, error)
            self._again(draft, error)
        finally:
            draft.attempt = None
            attempt.begun.set()
            attempt.done.set()
            wanted = draft.dirty and not draft.discarded and (draft.acknowledged or not draft.handles)
            if wanted and not draft.overdue and draft.due == math.inf:  # broken off, or written meanwhile
                self.plan(draft, self._delay_s)
        if not draft.dirty and not draft.handles:
            await self._settle(draft)

    async def _finish(self, draft: Draft, pieces: list[Piece], size: int) -> ObjectInfo:
        earlier = list(draft.stamps)
        try:
            return await draft.sender.finish(pieces, size, await self._terms(draft))
        except Conflict as exc:
            # Is it of an earlier attempt, whose reply was lost, perhaps with the process that waited for it?
            draft.base = await self._ours(draft, earlier, exc)
            return await draft.sender.finish(pieces, size, await self._terms(draft))
        except ObjectChanged:
            # It was there, and somebody else's came after it: the last one wins.
            draft.overtaken = True
            return await draft.origin.head(draft.key)

    async def _ours(self, draft: Draft, stamps: list[str], conflict: Conflict) -> str:
        for stamp in reversed(stamps):
            try:
                return (await draft.origin.ours(draft.key, stamp, None, conflict)).etag
            except Conflict:
                pass
        raise conflict

    def _again(self, draft: Draft, error: CachefsError) -> None:
        draft.failures += 1
        wait_s = LONGEST_RETRY_S
        if not in_vain(error):
            wait_s = min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(draft.failures - 1, 32))
        wait_s *= self._rng.uniform(0.5, 1.0)
        log.warning("%s; trying again in %.1f s", error, wait_s)
        self.plan(draft, wait_s)


def in_vain(error: CachefsError) -> bool:
    """Whether the same again would most probably come to the same."""
    return not isinstance(error, ABOUT_THE_STORE)

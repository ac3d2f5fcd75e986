"""Renaming and removing what is on its way: nothing is left under a name that is gone, and no name goes before its content
is under the other one.

Holding a draft's `turn`, who changes its name first ends the attempt under way: breaks it off, or, where its outcome is
out of our hands, waits for it. What the store has under the old name then may be the draft's *own*: the version it began
with, one it made, or one that shows the stamp of an attempt of unknown outcome. A draft that is as somebody meant it is sent
under the new name before that goes; otherwise it is copied there. What is somebody else's stays where it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from cachefs.errors import CachefsError, NotFound, OriginFailed
from cachefs.names import ObjectId
from cachefs.origin import ObjectInfo, Origin
from cachefs.upload.draft import Draft
from cachefs.upload.queue import Queue
from cachefs.upload.records import Records


class Names:
    """`committed` is told of versions that a rename has made, `moved` of what they were before; `push` sends early what can
    be, `drop` forgets a draft."""

    def __init__(
        self,
        queue: Queue,
        records: Records,
        committed: Callable[[Draft, ObjectInfo], None],
        moved: Callable[[ObjectId, ObjectId], None],
        push: Callable[[Draft], None],
        drop: Callable[[Draft], None],
    ) -> None:
        self._queue, self._records = queue, records
        self._committed, self._moved, self._push, self._drop = committed, moved, push, drop

    async def rename(
        self,
        draft: Draft,
        origin: Origin,
        key: str,
        *,
        base: str | None = None,
        over: Draft | None = None,
        upload: bool = True,
    ) -> bool:
        """Its content goes to `key` (of the same store). `base` is the etag of what it is to replace there, `over` the
        draft, which the caller is discarding: after a crash at most one of them is back. Free as long as nothing of it is
        at the store; else it is uploaded under the new name first, or, if it is half a change, or all at the store, or
        `upload` is not wanted, what the store has is copied.

        Returns whether the store has something of it under the old key still, which the caller deletes. Raises what
        uploads and copies do, and then it has its old name."""
        async with draft.turn:
            await self._queue.halt(draft)
            if draft.discarded:
                return False
            draft.look()
            own = draft.committed or await self._own(draft)
            whole = not draft.between and (not draft.lent or draft.reclaim())
            first = upload and whole and draft.dirty and own is not None
            before = draft.origin, draft.key, draft.base, draft.stamps
            if own is None:
                await self._move(draft, origin, key, base, over)
            elif not first:
                await self._copy(draft, own, origin, key)
            else:
                await self._records.acknowledge(draft)
                await self._move(draft, origin, key, base, over)
            if draft.dirty and not first:
                self._push(draft)
                self._soon(draft)
        if first:
            await self._send(draft, *before)
        return own is not None

    async def _own(self, draft: Draft) -> ObjectInfo | None:
        """What the store has under its name, if that goes with it."""
        if draft.base is None and not draft.unsure:
            return None
        try:
            info, stamp = await draft.origin.look(draft.key)
        except NotFound:
            return None
        known = {draft.base, draft.stored.etag if draft.stored else None}
        return info if info.etag in known or stamp in draft.stamps else None

    async def _copy(self, draft: Draft, own: ObjectInfo, origin: Origin, key: str) -> None:
        info = await origin.copy(draft.key, key, size=own.size, etag=own.etag)
        self._moved(own.version(draft.origin.source), info.version(origin.source))
        await draft.sender.abandon()  # of what was written meanwhile
        draft.moved(origin, key, info.etag)
        draft.copied(own, info)
        if draft.acknowledged:
            await self._records.keep(draft)
        else:
            await self._records.forget(draft)
        if draft.stored is info:
            self._committed(draft, info)

    async def _move(
        self, draft: Draft, origin: Origin, key: str, base: str | None, over: Draft | None
    ) -> None:
        before = draft.origin, draft.key, draft.base
        await draft.sender.abandon()
        try:
            draft.moved(origin, key, base)
            draft.over = None if over is None else over.id
            if draft.acknowledged:
                await self._records.keep(draft)
        except BaseException:
            draft.moved(*before)
            draft.over = None
            if draft.acknowledged:
                with trio.CancelScope(shield=True):
                    await self._records.keep(draft)
            raise
        if not draft.acknowledged:
            await self._records.forget(draft)

    async def _send(
        self, draft: Draft, origin: Origin, key: str, base: str | None, stamps: list[str]
    ) -> None:
        """Return when the store has it under its new name; when it has not, it gets the old one back, which these are of."""
        wanted = draft.generation
        error: CachefsError = OriginFailed(
            f"{draft.origin.name(draft.key)} is being written: it keeps its name"
        )
        try:
            await self._queue.upload(draft)
        except CachefsError as exc:
            error = exc
        finally:
            if not draft.has(wanted):
                with trio.CancelScope(shield=True):
                    await self._back(draft, wanted, origin, key, base, stamps)
        if not draft.has(wanted):
            raise error

    async def _back(
        self, draft: Draft, wanted: int, origin: Origin, key: str, base: str | None, stamps: list[str]
    ) -> None:
        async with draft.turn:
            await self._queue.halt(draft)
            if not draft.has(wanted) and not draft.discarded:
                await self._move(draft, origin, key, base, None)
                draft.stamps, draft.unsure = stamps, True

    def _soon(self, draft: Draft) -> None:
        """What was refused under another name need not wait any longer."""
        if draft.failures and (draft.acknowledged or not draft.handles):
            draft.failures = 0
            if draft.conflicts:
                draft.failure = None
            self._queue.plan(draft, 0.0)

    async def discard(
        self, draft: Draft, replaced: bool, instead: Callable[[], Awaitable[object]] | None
    ) -> None:
        """See `Uploads.discard`."""
        stored = draft.stored
        draft.discarded = True
        async with draft.turn:
            try:
                await self._queue.halt(draft)
                if instead is not None:
                    await instead()
            except BaseException:
                draft.discarded = False
                if draft.dirty and (draft.acknowledged or not draft.handles):
                    self._queue.plan(draft, 0.0)
                raise
            await draft.sender.abandon()
            await self._records.forget(draft)
            self._drop(draft)
            made = draft.unsure or draft.stored is not stored
            if made and not replaced and (not draft.conflicts or await self._own(draft)):
                await draft.origin.delete(draft.key)

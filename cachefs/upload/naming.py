"""Renaming and removing what is on its way: nothing is left under a name that is gone.

Holding a draft's `turn`, who changes its name first ends the attempt under way: breaks it off, or, where its outcome is
out of our hands, waits for it and undoes what it made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

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
        self, draft: Draft, origin: Origin, key: str, base: str | None, over: Draft | None
    ) -> None:
        """See `Uploads.rename`."""
        async with draft.turn:
            await self._queue.halt(draft)
            if draft.discarded:
                return
            draft.look()
            if draft.committed is not None:
                await self._rename_stored(draft, draft.committed, origin, key)
            else:
                await self._rename_dirty(draft, origin, key, base, over)
            if draft.dirty:
                self._push(draft)

    async def _rename_stored(self, draft: Draft, info: ObjectInfo, origin: Origin, key: str) -> None:
        generation = draft.generation
        before = info.version(draft.origin.source)
        info = await origin.copy(draft.key, key, size=info.size, etag=info.etag)
        await origin.delete(draft.key)
        self._moved(before, info.version(origin.source))
        await draft.sender.abandon()  # of what was written meanwhile
        draft.moved(origin, key, info.etag)
        draft.stored_as(generation, info)
        self._committed(draft, info)

    async def _rename_dirty(
        self, draft: Draft, origin: Origin, key: str, base: str | None, over: Draft | None
    ) -> None:
        before = draft.origin, draft.key, draft.base
        left_behind = draft.stored is not None or draft.unsure
        await draft.sender.abandon()
        try:
            if left_behind:
                await self._records.acknowledge(draft)  # what it made goes, so what it holds must stay
            draft.moved(origin, key, base)
            draft.over = None if over is None else over.id
            if draft.acknowledged:
                await self._records.keep(draft)
            if left_behind:
                await before[0].delete(before[1])
                draft.forget_stored()
        except BaseException:
            draft.moved(*before)
            draft.over = None
            if draft.acknowledged:
                with trio.CancelScope(shield=True):
                    await self._records.keep(draft)
            raise
        if not draft.acknowledged:
            await self._records.forget(draft)

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
            if not replaced and (draft.unsure or draft.stored is not stored):
                await draft.origin.delete(draft.key)

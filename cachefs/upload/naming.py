"""Renaming and removing what is on its way: nothing is left under a name that is gone, and no name goes before its content
is under the other one.

A rename holds the dirty file's `turn` and first ends the attempt in progress: it cancels it, or, where the outcome is
up to the origin, waits for it. What the store has under the old name then may be the dirty file's *own*: the version it
began with, one it made, or one that carries the token of an attempt of unknown outcome. A dirty file that no writer is
changing is sent under the new name before that goes; otherwise it is copied there. Another client's object stays where it
is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from cachefs.base.behind import HANGS_AFTER_S
from cachefs.base.errors import CachefsError, NotFound, OriginFailed
from cachefs.base.names import ObjectId
from cachefs.origin import ObjectInfo, Origin
from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.queue import Queue
from cachefs.upload.records import Records


class Names:
    """`committed` is told of versions that a rename has made, `moved` of what they were before; `push` sends early what can
    be, `drop` forgets a dirty file."""

    def __init__(
        self,
        queue: Queue,
        records: Records,
        committed: Callable[[DirtyFile, ObjectInfo], None],
        moved: Callable[[ObjectId, ObjectId], Awaitable[None]],
        push: Callable[[DirtyFile], None],
        drop: Callable[[DirtyFile], None],
    ) -> None:
        self._queue, self._records = queue, records
        self._committed, self._moved, self._push, self._drop = committed, moved, push, drop

    async def rename(
        self,
        dirty_file: DirtyFile,
        origin: Origin,
        key: str,
        *,
        base: str | None = None,
        over: DirtyFile | None = None,
        upload: bool = True,
    ) -> bool:
        """Its content goes to `key` (of the same store). `base` is the etag of what it is to replace there, `over` the
        dirty file, which the caller is discarding: after a crash at most one of them is back. Free as long as nothing of it
        is at the store; else it is uploaded under the new name first, or, if it is half a change, or all at the store, or
        `upload` is not wanted, what the store has is copied.

        Returns whether the store has something of it under the old key still, which the caller deletes. Raises what
        uploads and copies do, and then it has its old name."""
        async with dirty_file.turn:
            await self._queue.halt(dirty_file)
            if dirty_file.discarded:
                return False
            dirty_file.look()
            own = dirty_file.committed or await self._own(dirty_file)
            whole = not dirty_file.between and (not dirty_file.in_passthrough or dirty_file.reclaim())
            first = upload and whole and dirty_file.dirty and own is not None
            before = dirty_file.origin, dirty_file.key, dirty_file.base, dirty_file.tokens
            if own is None:
                await self._move(dirty_file, origin, key, base, over)
            elif not first:
                await self._copy(dirty_file, own, origin, key, over)
            else:
                await self._records.acknowledge(dirty_file)
                await self._move(dirty_file, origin, key, base, over)
            if dirty_file.dirty and not first:
                self._push(dirty_file)
                self._soon(dirty_file)
        if first:
            await self._send(dirty_file, *before)
        return own is not None

    async def _own(self, dirty_file: DirtyFile) -> ObjectInfo | None:
        """What the store has under its name, if that goes with it."""
        if dirty_file.base is None and not dirty_file.unsure:
            return None
        try:
            info, token = await dirty_file.origin.look(dirty_file.key)
        except NotFound:
            return None
        known = {dirty_file.base, dirty_file.stored.etag if dirty_file.stored else None}
        return info if info.etag in known or token in dirty_file.tokens else None

    async def _copy(
        self, dirty_file: DirtyFile, own: ObjectInfo, origin: Origin, key: str, over: DirtyFile | None
    ) -> None:
        info = await origin.copy(dirty_file.key, key, size=own.size, etag=own.etag)
        await self._moved(own.version(dirty_file.origin.source), info.version(origin.source))
        await dirty_file.sender.abandon()  # of what was written meanwhile
        dirty_file.moved(origin, key, info.etag)
        dirty_file.copied(own, info)
        dirty_file.over = over
        if dirty_file.acknowledged:
            await self._records.keep(dirty_file)
        else:
            await self._records.forget(dirty_file)
        if dirty_file.stored is info:
            self._committed(dirty_file, info)

    async def _move(
        self, dirty_file: DirtyFile, origin: Origin, key: str, base: str | None, over: DirtyFile | None
    ) -> None:
        before = dirty_file.origin, dirty_file.key, dirty_file.base
        await dirty_file.sender.abandon()
        try:
            dirty_file.moved(origin, key, base)
            dirty_file.over = over
            if dirty_file.acknowledged:
                await self._records.keep(dirty_file, HANGS_AFTER_S)
        except BaseException:
            dirty_file.moved(*before)
            dirty_file.over = None
            if dirty_file.acknowledged:
                with trio.CancelScope(shield=True):
                    await self._records.keep(dirty_file, HANGS_AFTER_S)
            raise
        if not dirty_file.acknowledged:
            await self._records.forget(dirty_file, HANGS_AFTER_S)

    async def _send(
        self, dirty_file: DirtyFile, origin: Origin, key: str, base: str | None, tokens: list[str]
    ) -> None:
        """Return when the store has it under its new name; when it has not, it gets the old one back, which these are of."""
        wanted = dirty_file.generation
        error: CachefsError = OriginFailed(
            f"{dirty_file.origin.name(dirty_file.key)} is being written: it keeps its name"
        )
        try:
            await self._queue.upload(dirty_file)
        except CachefsError as exc:
            error = exc
        finally:
            if not dirty_file.has(wanted):
                with trio.CancelScope(shield=True):
                    await self._back(dirty_file, wanted, origin, key, base, tokens)
        if not dirty_file.has(wanted):
            raise error

    async def _back(
        self,
        dirty_file: DirtyFile,
        wanted: int,
        origin: Origin,
        key: str,
        base: str | None,
        tokens: list[str],
    ) -> None:
        async with dirty_file.turn:
            await self._queue.halt(dirty_file)
            if not dirty_file.has(wanted) and not dirty_file.discarded:
                await self._move(dirty_file, origin, key, base, None)
                dirty_file.tokens, dirty_file.unsure = tokens, True

    def _soon(self, dirty_file: DirtyFile) -> None:
        """What was refused under another name need not wait any longer."""
        if dirty_file.failures and (dirty_file.acknowledged or not dirty_file.handles):
            dirty_file.failures = 0
            if dirty_file.conflicts:
                dirty_file.failure = None
            self._queue.plan(dirty_file, 0.0)

    async def discard(
        self, dirty_file: DirtyFile, replaced: bool, instead: Callable[[], Awaitable[object]] | None
    ) -> None:
        """See `Uploads.discard`."""
        stored = dirty_file.stored
        dirty_file.discarded = True
        async with dirty_file.turn:
            try:
                await self._queue.halt(dirty_file)
                if instead is not None:
                    await instead()
            except BaseException:
                dirty_file.discarded = False
                if dirty_file.dirty and (dirty_file.acknowledged or not dirty_file.handles):
                    self._queue.plan(dirty_file, 0.0)
                raise
            await dirty_file.sender.abandon()
            try:
                await self._records.forget(dirty_file, HANGS_AFTER_S)
            finally:
                # Or a file that is replaced again and again would keep all that it ever was.
                dirty_file.over = None
                self._drop(dirty_file)
            made = dirty_file.unsure or dirty_file.stored is not stored
            if made and not replaced and (not dirty_file.conflicts or await self._own(dirty_file)):
                await dirty_file.origin.delete(dirty_file.key)

"""All drafts of this node: begun by a write, brought to the store by a commit, kept until the store has them.

Durable: a commit is an upload. With `writeback` it only makes sure of the bytes and of a row in the journal, and the upload
follows by itself. Without, a draft has a row only while something of it would have to be cleared away after a crash (an
upload in parts), or kept (its upload failed, and the writer was told so).

In the end the staging file becomes the version's file in the cache, so what was written here is warm here.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import trio

from cachefs.errors import CachefsError, OriginFailed
from cachefs.metrics import Metrics
from cachefs.names import ObjectId
from cachefs.origin import ObjectInfo, Origin, Upload
from cachefs.origin.writes import each, new_stamp
from cachefs.tasks import contained, run_contained
from cachefs.upload import orphans, recovery, status
from cachefs.upload.draft import Draft
from cachefs.upload.journal import NOTES, Journal
from cachefs.upload.lending import Lending, Loan
from cachefs.upload.naming import Names
from cachefs.upload.queue import Queue, in_vain
from cachefs.upload.records import Records
from cachefs.upload.room import UNASKED, Cache, StagingRoom
from cachefs.upload.sending import Terms
from cachefs.upload.staging import THREADS, Buffer, Memory, StagingFile, prepare, sync_names

log = logging.getLogger(__name__)

FLUSHED_AT_ONCE = 64
"""Drafts that one `flush` waits for at a time. Derived from the usual concurrency of a store."""

FLUSH_RETRY_S = 5.0
"""How long at most `flush` leaves a failed draft alone. Guessed: somebody waits."""

SETTLE_AGAIN_S = 1.0
"""How long a draft is kept that cannot be settled yet, before that is tried again. Guessed."""

GIVING_UP_S = 3.0
"""How long a stop may take for each file that is being written. Guessed."""

Take = Callable[[Buffer], Awaitable[None]]
Bring = Callable[[Origin, ObjectId, int, Take], Awaitable[None]]
"""(origin, version, count, take): hand the first `count` bytes of a version to `take`, in order."""

OnConflict = Literal["overwrite", "fail"]


class Uploads:
    """`bring` reads what a draft begins with; `keep_free_bytes` stay free of the disk. `on_committed` is told of each
    version that the store has from now on, before those who waited for it (its `mtime_ns` is the draft's, where the
    store's would cost a request); `on_settling` is asked before a draft is settled, which
    waits while it says False; `on_settled` is told that a draft's content is the cache's or the store's alone, and the draft
    is not to be used any more: until then it can be opened; `on_changed`, of one that is lent, that it was written.

    Opens the journal, which blocks: make it before the mount is. Raises `CacheUnusable`."""

    def __init__(
        self,
        state_dir: Path,
        staging_dir: Path,
        origins: Iterable[Origin],
        store: Cache | None,
        metrics: Metrics,
        *,
        nursery: trio.Nursery,
        bring: Bring,
        writeback: bool = False,
        upload_delay_s: float = 1.0,
        on_conflict: OnConflict = "overwrite",
        keep_free_bytes: int = 0,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.on_committed: Callable[[Draft, ObjectInfo], None] = lambda draft, info: None
        self.on_settling: Callable[[Draft], bool] = lambda draft: True
        self.on_settled: Callable[[Draft], None] = lambda draft: None
        self.on_changed: Callable[[Draft], None] = lambda draft: None
        self._staging = staging_dir
        self._store = store
        self._metrics = metrics
        self._bring = bring
        self._writeback = writeback
        self._delay_s = upload_delay_s
        self._conditional = on_conflict == "fail"
        self._now_ns = now_ns
        self._threads = trio.CapacityLimiter(THREADS)
        self._memory = Memory()
        prepare(staging_dir)
        orphans.without_journal(staging_dir, state_dir / "journal")
        self.journal = Journal(state_dir / "journal", partial(sync_names, staging_dir))
        self._records = Records(self.journal, list(origins))
        self._room = StagingRoom(staging_dir, keep_free_bytes, store, self._hopeful)
        self._queue = Queue(nursery, self._terms, self._stored, self._failed, self._settle, upload_delay_s)
        self._names = Names(
            *(self._queue, self._records, lambda *stored: self.on_committed(*stored)),
            *(self.moved, self._push, self._drop),
        )
        self._lending = Lending(staging_dir, self._room.relieve)
        self._drafts: dict[str, Draft] = {}
        self._numbers = itertools.count()

    # -- drafts ------------------------------------------------------------------------------------

    async def begin(
        self,
        origin: Origin,
        key: str,
        *,
        base: ObjectId | None = None,
        upto: int | None = None,
        mtime_ns: int | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> Draft:
        """A draft for `key`, dirty, with the content of `base` (its first `upto` bytes) or none. `base` is also what the
        draft may replace where conflicts are failures; None: nothing.

        Raises `NoRoom`, `CacheUnusable`, and what reading `base` does; nothing is left then."""
        name = uuid4().hex
        count = 0 if base is None else base.size if upto is None else min(upto, base.size)
        draft = Draft(
            self,
            name,
            origin,
            key,
            self._file(name),
            count,
            base=None if base is None else base.etag,
            mtime_ns=self._now_ns() if mtime_ns is None else mtime_ns,
            attrs=attrs or {},
        )
        try:
            if base is not None and count:
                with draft.file.used():
                    await self._fill(draft, base, count)
        except BaseException:
            draft.file.remove()
            raise
        self._drafts[name] = draft
        return draft

    def open(self, draft: Draft) -> None:
        """One user more, reader or writer."""
        draft.open()

    def release(self, draft: Draft) -> None:
        """One user less. Behind the last one a dirty draft goes to the store by itself."""
        draft.release()
        if draft.handles:
            return
        self._lending.released(draft)
        if draft.discarded:
            self._drafts.pop(draft.id, None)
        elif not draft.dirty and draft.adopted:
            self._settled(draft)  # at once: its file is the cache's, so nobody can open it here any more
        elif not draft.dirty:
            contained(self._queue.nursery, f"settling {draft.key}", self._settle, draft)
        elif draft.attempt is None and draft.due == math.inf:
            contained(self._queue.nursery, f"closing {draft.key}", self._after_release, draft)

    def lend_to(self, tell: Callable[[Loan], None], retire: Callable[[Loan], None]) -> None:
        """From now on the kernel writes files by itself; see `Lending`. Not where parts are sent while they are written."""
        if self._writeback:
            self._lending.to(tell, retire)

    async def lend(self, draft: Draft) -> Loan | None:
        """Its file, for one of its users who writes it by himself until `returned`; None: it is not lent. The same one until
        the last user has gone. Nothing of it is sent meanwhile; an upload that somebody waits for is waited for."""
        if draft.loan is None and self._room.free_bytes() < UNASKED:
            return None
        return await self._lending.lend(draft)

    def returned(self, draft: Draft) -> None:
        """One of those is at his end. Never raises, never waits."""
        self._lending.returned(draft)
        if not draft.writers and draft.acknowledged:
            self._plan(draft)

    def unmounted(self) -> None:
        """Nobody will say any more that he has closed a file. Who still writes is found out before it is sent."""
        for draft in self._drafts.values():
            draft.writers = 0

    async def _after_release(self, draft: Draft) -> None:
        if self._writeback:
            try:
                await self._records.acknowledge(draft)
            except CachefsError as exc:
                log.warning("%s", exc)
        self._queue.plan(draft, self._delay_s if self._writeback else 0.0)

    async def commit(self, draft: Draft) -> None:
        """Durable: what it holds now is in the store. Writeback: on this disk, and will be in the store. Raises what failed:
        the draft stays pending then, and is tried again by itself. With writeback, the failure of an upload since the last
        commit is raised, once."""
        draft.look()
        if draft.discarded or not draft.dirty:
            return
        if not self._writeback:
            await self._queue.upload(draft)
            return
        draft.within_limits()
        await self._records.acknowledge(draft)
        if draft.overdue and not draft.writers:
            await self._queue.begin(draft)
        elif not draft.writers:
            self._plan(draft)
        if draft.failure is not None and not draft.told:
            draft.told = True
            raise type(draft.failure)(*draft.failure.args) from draft.failure

    def _plan(self, draft: Draft) -> None:
        if draft.attempt is None and draft.due == math.inf and draft.dirty and not draft.discarded:
            self._queue.plan(draft, self._delay_s)

    async def rename(self, draft: Draft, origin: Origin, key: str, **how: Any) -> bool:
        """See `Names.rename`."""
        return await self._names.rename(draft, origin, key, **how)

    async def discard(
        self,
        draft: Draft,
        *,
        replaced: bool = False,
        instead: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Its name is gone: nothing of it goes to the store any more, and its users keep what they have. Unless the name was
        `replaced` by another, what an upload under way may just have made is deleted at the store. `instead` is what takes
        the name away, called when no upload is under way: until it has returned, the draft survives a crash, and when it
        raises, nothing has happened."""
        await self._names.discard(draft, replaced, instead)

    def moved(self, old: ObjectId, new: ObjectId) -> None:
        """The store has copied a version: what is cached of it here is the other's from now on."""
        if self._store is not None:
            self._store.recast(old, new)

    def pending(self) -> list[Draft]:
        """All that the store does not have as it is."""
        return [draft for draft in self._drafts.values() if not draft.discarded and _is_pending(draft)]

    @property
    def elsewhere(self) -> list[tuple[str, int]]:
        """Sources of which an earlier run has left files that this one cannot send, and the size of each file."""
        return self._records.elsewhere

    async def note(self, name: str, row: Mapping[str, Any] | None) -> None:
        """Keep a JSON object over a crash, for the rooms above; None removes it. Raises `NoRoom`, `CacheUnusable`."""
        await self.journal.write(NOTES, name, row)

    def notes(self) -> dict[str, dict[str, Any]]:
        """What an earlier run has noted and not removed."""
        return self.journal.rows(NOTES)

    def _drop(self, draft: Draft) -> None:
        """Nobody wants it. Who uses it keeps the file."""
        if not draft.adopted and not draft.settling:
            draft.file.remove()
        if not draft.handles:
            self._drafts.pop(draft.id, None)

    # -- what drafts ask (Owner) -------------------------------------------------------------------

    async def admit(self, draft: Draft, count: int) -> None:
        await self._room.admit(draft, count)

    async def more_room(self, draft: Draft, count: int) -> bool:
        return await self._room.more(draft, count)

    def wrote(self, draft: Draft) -> None:
        draft.mtime_ns = self._now_ns()
        self._push(draft)

    def _push(self, draft: Draft) -> None:
        if not self._writeback and not draft.discarded:
            draft.sender.push(self._queue.nursery)

    async def renew(self, draft: Draft) -> StagingFile:
        file = self._file(f"{draft.id}.{next(self._numbers)}")
        try:
            await draft.file.copy_to(file, draft.size)
        except BaseException:
            file.remove()
            raise
        return file

    async def keep(self, draft: Draft) -> None:
        await self._records.keep(draft)

    async def orphaned(self, draft: Draft, upload: Upload) -> None:
        await self._records.orphaned(draft.origin.source, upload.key, upload.state())

    def _hopeful(self, draft: Draft | None) -> bool:
        """Whether others are on their way, which begin now if they only wait for their time."""
        found = False
        for other in self._drafts.values():
            if other is draft or not other.dirty or other.discarded:
                continue
            waits = other.attempt is None and other.failure is None and other.due < math.inf
            if waits and other.due > trio.current_time():
                self._queue.plan(other, 0.0)
            found |= waits or other.attempt is not None
        return found

    # -- what the queue tells ----------------------------------------------------------------------

    async def _terms(self, draft: Draft) -> Terms:
        """What the next attempt may replace."""
        stamp = new_stamp()
        draft.stamped(stamp)
        if not self._conditional:
            return Terms(stamp=stamp)
        if draft.acknowledged:
            await self._records.keep(draft)  # before: a later run must know its own object
        return Terms(draft.base, draft.base is None, stamp)

    async def _stored(self, draft: Draft, generation: int, info: ObjectInfo) -> None:
        if not info.mtime_ns:  # asking for it would double the time that a small file takes
            info = replace(info, mtime_ns=draft.mtime_ns)
        draft.stored_as(generation, info)
        draft.base = info.etag
        draft.failure = None
        draft.failures, draft.unsure, draft.told = 0, False, False
        draft.stamps, draft.upload_state = [], None
        self._metrics.uploaded_files += 1
        self.on_committed(draft, info)
        if not draft.dirty:
            await self._records.forget(draft)

    async def _failed(self, draft: Draft, error: CachefsError) -> None:
        draft.failure, draft.told = error, False
        self._metrics.upload_failures += 1
        try:
            await self._records.acknowledge(draft)
        except CachefsError as exc:
            log.warning("%s: %s", draft.origin.name(draft.key), exc)

    async def _settle(self, draft: Draft) -> None:
        """Nobody uses it and the store has it: the cache gets the file."""
        async with draft.lock:
            try:
                if draft.lent and not draft.reclaim():
                    return
            except CachefsError:  # its file cannot be opened now
                self._settle_later(draft)
                return
            info = draft.committed
            if draft.handles or info is None or self._drafts.get(draft.id) is not draft:
                return
            if not self.on_settling(draft):
                self._settle_later(draft)
                return
            if draft.sender.upload is not None:  # of a completion that somebody's newer object hid, for one
                await draft.sender.abandon()
            if not draft.adopted:
                draft.settling = True
                draft.adopted = await self._adopt(draft, info)
                draft.settling = False
                if draft.discarded and not draft.adopted:
                    draft.file.remove()
            if draft.handles or draft.dirty or draft.discarded:
                return  # the last of those who have come meanwhile does the rest
            if not draft.adopted:
                draft.file.remove()
            self._settled(draft)

    def _settled(self, draft: Draft) -> None:
        if self._drafts.pop(draft.id, None) is not None:
            self.on_settled(draft)

    async def _adopt(self, draft: Draft, info: ObjectInfo) -> bool:
        if self._store is None or draft.overtaken or not draft.size:
            return False
        try:
            draft.file.check()
            with draft.file.used():
                await draft.file.land()
                return await self._store.adopt(info.version(draft.origin.source), draft.file.path)
        except CachefsError as exc:
            log.info("%s is not kept here: %s", draft.origin.name(draft.key), exc)
            return False
        except Exception:
            log.exception("the cache failed to take %s", draft.origin.name(draft.key))
            return False

    def _settle_later(self, draft: Draft) -> None:
        async def settle() -> None:
            await trio.sleep(SETTLE_AGAIN_S)
            await self._settle(draft)

        contained(self._queue.nursery, f"settling {draft.key}", settle)

    # -- the life of the room ----------------------------------------------------------------------

    async def run(self) -> None:
        """Uploads that are due, and what is to be cleared away, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._records.run)
            nursery.start_soon(self._lending.run)
            await self._queue.run()

    async def flush(
        self,
        under: Callable[[Draft], bool] | None = None,
        deadline_s: float = math.inf,
        *,
        at_the_end: bool = False,
    ) -> list[Draft]:
        """Wait until the store has all that was acknowledged or closed (of those that `under` chooses), but for what is
        being changed just now, unless it is `at_the_end`; returns what it has not. Without a deadline each is tried once,
        with one until then, except where it would be in vain."""
        chosen = [draft for draft in self.pending() if draft.acknowledged or not draft.handles]
        chosen = [d for d in chosen if (under is None or under(d)) and (at_the_end or not d.between)]

        async def one(draft: Draft) -> None:
            while True:
                try:
                    await self._queue.upload(draft)
                    if not draft.lent or deadline_s == math.inf:
                        return None
                except CachefsError as exc:
                    if deadline_s == math.inf or in_vain(exc):
                        return None
                await trio.sleep_until(min(draft.due, trio.current_time() + FLUSH_RETRY_S))

        with trio.move_on_after(deadline_s):
            await each(one, chosen, FLUSHED_AT_ONCE)
        return [draft for draft in chosen if draft.dirty and not draft.discarded]

    async def recover(self) -> list[Draft]:
        """What an earlier run has left: call once, before anything else. Acknowledged drafts are pending again, and are
        returned; the rest is cleared away, where the store has a part of it in the background."""
        found = await recovery.look(self._records, self._staging, self._revive)
        for draft in found:
            self._drafts[draft.id] = draft
            self._queue.plan(draft, self._delay_s)
        return found

    def _revive(self, name: str, row: Mapping[str, Any], origin: Origin) -> Draft:
        file = StagingFile(self._staging / row["file"], self._threads)
        draft = Draft(
            *(self, name, origin, row["key"], file, file.path.stat().st_size),
            base=row["base"],
            mtime_ns=row["mtime_ns"],
            attrs=row["attrs"],
        )
        draft.has_row = draft.acknowledged = True
        draft.may_be_written()  # by who has outlived that run
        draft.stamps, draft.upload_state = row["stamps"], row["upload"]
        draft.synced = draft.generation
        if row["upload"] is not None:
            draft.sender.resume(origin.resume_upload(row["key"], row["upload"]))
        return draft

    async def aclose(self, deadline_s: float) -> list[Draft]:
        """Upload what can be uploaded until the deadline; returns what is left for the next run. What is being written and
        was never acknowledged is given up. Works also when the nursery it was made with has been cancelled."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                self._queue.nursery = nursery
                left = await self.flush(deadline_s=deadline_s, at_the_end=True)
                for draft in list(self._drafts.values()):
                    with trio.move_on_after(GIVING_UP_S):
                        await run_contained(f"giving up {draft.key}", self._give_up, draft)
                self._queue.close()
                nursery.cancel_scope.cancel()
            await trio.to_thread.run_sync(self.journal.close)
        return left

    async def _give_up(self, draft: Draft) -> None:
        if not draft.dirty:
            while draft.handles:
                draft.release()
            await self._settle(draft)
        elif draft.acknowledged or not draft.handles:
            await self._queue.halt(draft)
            try:
                await self._records.acknowledge(draft)
            except CachefsError as exc:
                log.warning("%s: %s", draft.origin.name(draft.key), exc)
            while draft.handles:
                draft.release()
        else:
            log.warning("%s was being written and is given up", draft.origin.name(draft.key))
            await self.discard(draft, replaced=True)

    def status(self) -> dict[str, Any]:
        """For `cachefs status`: plain values, of the longest pending drafts first."""
        return {"writeback": self._writeback, **status.of(self.pending(), self._now_ns())}

    def _file(self, name: str) -> StagingFile:
        """A new one."""
        return StagingFile(self._staging / name, self._threads, self._memory)

    async def _fill(self, draft: Draft, base: ObjectId, count: int) -> None:
        at = 0

        async def take(data: Buffer) -> None:
            nonlocal at
            data = memoryview(data)[: count - at]
            await self._room.admit(draft, len(data))
            await draft.file.write(at, data)
            at += len(data)

        await self._bring(draft.origin, base, count, take)
        if at != count:
            raise OriginFailed(f"{draft.origin.name(base.key)}: only {at} of {count} bytes came")


def _is_pending(draft: Draft) -> bool:
    try:
        return draft.look() or draft.dirty
    except CachefsError:
        return True  # its file cannot be looked at now, and may hold something new

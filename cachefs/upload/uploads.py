"""All dirty files of this node: begun by a write, brought to the origin by a commit, kept until the origin has them.

Durable: a commit is an upload. With `writeback` it only makes sure of the bytes and of a row in the journal, and the upload
follows by itself. Without, a dirty file has a row only while something of it would have to be cleared away after a crash (an
upload in parts), or kept (its upload failed, and the writer was told so).

In the end the staging file becomes the version's file in the cache, so what was written here is warm here.

A rename holds the turn of the dirty file and first ends the attempt in progress: it cancels it, or, where the outcome is up
to the origin, waits for it. What the origin has under the old name then may be the dirty file's *own*: the version it began
with, one it made, or one that carries the token of an attempt of unknown outcome. A dirty file that no writer is changing is
sent under the new name before that goes; otherwise it is copied there. Another client's object stays where it is.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import uuid4

import trio

from cachefs.base.behind import HANGS_AFTER_S
from cachefs.base.errors import CachefsError, CacheUnusable, NotFound, OriginFailed
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.base.shared_memory import SharedMemory
from cachefs.base.tasks import contained, run_contained, taken
from cachefs.origin import ObjectInfo, Origin, Upload, each
from cachefs.store.backing import BackingFile
from cachefs.upload import orphans
from cachefs.upload.content import Row, State, Stored
from cachefs.upload.dirty_file import DirtyFile, Way
from cachefs.upload.journal import NOTES, Journal, JournalRemoved, Records, look
from cachefs.upload.passthrough import Passthrough
from cachefs.upload.queue import IN_BACKGROUND, Queue, in_vain
from cachefs.upload.room import UNASKED, Cache, StagingRoom
from cachefs.upload.staging import (
    LOOK_S,
    Buffer,
    StagingDisk,
    StagingFile,
    begin,
    spill_tail,
    touch,
)

log = logging.getLogger(__name__)

FLUSH_RETRY_S = 5.0
"""How long at most `flush` leaves a failed dirty file alone. Guessed: a user waits."""

SHOWN = 20
"""Dirty files that are shown one by one. Guessed: a screen."""

GIVING_UP_S = 3.0
"""How long a stop may take for each file that is being written. Guessed: after a second signal the user waits for it."""

REPEATED_S = 2.0
"""How long what was not open when a daemon died waits for its upload: an open that was not answered is repeated meanwhile.
Guessed: the kernel repeats all requests at once."""

PIECE = 1 << 20
"""Read at once: a block."""

TOGETHER, TOGETHER_S = 16, 0.1
"""Small files that the cache is given together, and how long at most the first of them waits for others. Derived: a turn of
a thread, and a task, cost as much as making the cache file of one; their memory is in use meanwhile (`MEMORY_KEPT`)."""

OnConflict = Literal["overwrite", "fail"]


class Reader(Protocol):
    """What is used of `Fetcher`."""

    def open(self, origin: Origin, object_id: ObjectId) -> Any: ...
    def close(self, opened: Any) -> None: ...
    async def read(self, opened: Any, offset: int, size: int, pid: int) -> Buffer: ...


class Together:
    """Small files that wait for others; `work` is given them, in a task."""

    def __init__(self, queue: Queue, work: Callable[[Sequence[DirtyFile]], Awaitable[None]]) -> None:
        self.waiting: list[DirtyFile] = []
        self._queue, self._work = queue, work
        self._enough = trio.Event()

    def add(self, dirty_file: DirtyFile) -> None:
        self.waiting.append(dirty_file)
        if len(self.waiting) == 1:
            self._enough = trio.Event()
            contained(self._queue.nursery, "settling small files", self._run)
        elif len(self.waiting) == TOGETHER:
            self._enough.set()

    async def _run(self) -> None:
        with trio.move_on_after(TOGETHER_S):
            await self._enough.wait()
        waiting, self.waiting = self.waiting, []
        await self._work(waiting)


class Uploads:
    """`reader` reads what a dirty file begins with; `keep_free_bytes` stay free of the disk. `on_committed` is told of each
    version that the origin has from now on, before its waiters wake (its `mtime_ns` is the dirty file's, where the origin's
    would cost a request). `on_settling` is asked before a dirty file is settled, which waits while it says False.
    `on_settled` is told that a dirty file's content is the cache's or the origin's alone: until then it can be opened.
    `on_changed` is told that one in passthrough was written. With `memory`, which outlives this process, files that are
    being written do so, too. For `killed` see `Database`.

    Opens the journal, which blocks: make it before the mount is. Raises `CacheUnusable`."""

    def __init__(
        self,
        state_dir: Path,
        staging_dir: Path,
        origins: Iterable[Origin],
        store: Cache,
        metrics: Metrics,
        *,
        nursery: trio.Nursery,
        reader: Reader,
        writeback: bool = False,
        upload_delay_s: float = 1.0,
        on_conflict: OnConflict = "overwrite",
        keep_free_bytes: int = 0,
        now_ns: Callable[[], int] = time.time_ns,
        memory: SharedMemory | None = None,
        killed: bool = False,
    ) -> None:
        self.on_committed: Callable[[DirtyFile, ObjectInfo], None] = lambda dirty_file, info: None
        self.on_settling: Callable[[DirtyFile], bool] = lambda dirty_file: True
        self.on_settled: Callable[[DirtyFile], None] = lambda dirty_file: None
        self.on_changed: Callable[[DirtyFile], None] = lambda dirty_file: None
        self._store = store
        self._reader = reader
        self._writeback = writeback
        self._now_ns = now_ns
        self._disk = StagingDisk(staging_dir, shared=memory)
        orphans.without_journal(staging_dir, state_dir / "journal")
        journal = Journal(state_dir / "journal", staging_dir, killed=killed)
        journal.hangs_elsewhere = self._hangs
        self._records = Records(journal, list(origins))
        self.room = StagingRoom(staging_dir, keep_free_bytes, store, self._hopeful)
        self._queue = Queue(
            nursery,
            self._records,
            metrics,
            lambda dirty_file, info: self.on_committed(dirty_file, info),
            self._settle_sent,
            delay_s=upload_delay_s,
            conditional=on_conflict == "fail",
        )
        self.passthrough = Passthrough(staging_dir, self.room.relieve)
        self._dirty_files: dict[str, DirtyFile] = {}
        self._together = Together(self._queue, self._settle_together)

    @property
    def journal(self) -> Journal:
        return self._records.journal

    # -- dirty files ------------------------------------------------------------------------------------

    async def begin(
        self,
        origin: Origin,
        key: str,
        *,
        base: ObjectId | None = None,
        upto: int | None = None,
        mtime_ns: int | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> DirtyFile:
        """A dirty file for `key`, dirty, with the content of `base` (its first `upto` bytes) or none. `base` is also what
        the dirty file may replace where conflicts are failures; None: nothing.

        Raises `NoRoom`, `CacheUnusable`, and what reading `base` does; nothing is left then."""
        name = uuid4().hex
        count = 0 if base is None else base.size if upto is None else min(upto, base.size)
        dirty_file = DirtyFile(
            self,
            name,
            origin,
            key,
            StagingFile(self._disk, name, new=True),
            count,
            base=None if base is None else base.etag,
            mtime_ns=self._now_ns() if mtime_ns is None else mtime_ns,
            attrs=attrs or {},
        )
        try:
            if not dirty_file.file.ends_in_memory:  # too many do
                with dirty_file.file.used():
                    await dirty_file.file.spill()
            if base is not None and count:
                with dirty_file.file.used():
                    await self._fill(dirty_file, base, count)
        except BaseException:
            dirty_file.file.remove()
            raise
        self._dirty_files[name] = dirty_file
        if self._writeback:
            self.passthrough.new_files.begun(dirty_file)
        return dirty_file

    async def disk_answers(self) -> None:
        """Return when the disk of the staging files has taken a change, as `take` makes one on the loop."""
        await self._disk.run(partial(touch, self._disk.directory))

    def take(
        self, origin: Origin, base: ObjectInfo, backing: Any, users: int, attrs: Mapping[str, Any]
    ) -> DirtyFile | None:
        """A dirty file that is to replace `base` and holds its content, so it is not dirty: its staging file is the cache's
        file of that version, which the kernel has as `backing` for as many `users`, all of them the caller's. None while
        others use that file."""
        name = uuid4().hex
        path = self._disk.directory / name
        fd = self._store.take_out(backing, users, path) if self.passthrough.possible else None
        if fd is None:
            return None
        begin(path)
        file = StagingFile(self._disk, name, fd=fd)
        dirty_file = DirtyFile(
            self,
            name,
            origin,
            base.key,
            file,
            base.size,
            base=base.etag,
            mtime_ns=base.mtime_ns,
            attrs=attrs,
        )
        dirty_file.content.stored_as(Stored(0, base))
        dirty_file.content.synced = 0
        self.passthrough.share(dirty_file, backing.id)
        self._dirty_files[name] = dirty_file
        return dirty_file

    def open(self, dirty_file: DirtyFile) -> None:
        """Add one user, a reader or a writer."""
        dirty_file.open()
        if dirty_file.handles == 1 and not self._is_noted(dirty_file):
            self.noted(dirty_file)

    def release(self, dirty_file: DirtyFile) -> None:
        """Remove one user. After the last one has gone, a file that is dirty is uploaded without a caller."""
        if dirty_file.handles == 1 and self._shown_from_cache(dirty_file):
            self._release_later(dirty_file)
            return
        dirty_file.release()
        if dirty_file.handles:
            return
        self._forget_acknowledged(dirty_file)
        if dirty_file.backing is not None:
            self.passthrough.released(dirty_file)
        if dirty_file.discarded:
            if not dirty_file.trying.turn.locked():  # or its name is still going, and may stay
                self._dirty_files.pop(dirty_file.id, None)
                self._forget(dirty_file)
        elif not dirty_file.dirty:
            self._settle_soon(dirty_file)
        elif dirty_file.waits:
            contained(self._queue.nursery, f"closing {dirty_file.key}", self._after_release, dirty_file)

    def _settle_soon(self, dirty_file: DirtyFile) -> None:
        """Begin to settle a file that is not in use and that the origin has."""
        if dirty_file.content.adopted:
            # At once: its file is the cache's, so it cannot be opened here any more.
            self._settled(dirty_file)
        elif not dirty_file.file.in_memory or dirty_file.kernel.way is not Way.HERE:
            contained(self._queue.nursery, f"settling {dirty_file.key}", self._settle, dirty_file)
        else:
            self._together.add(dirty_file)

    def _shown_from_cache(self, dirty_file: DirtyFile) -> bool:
        """True if a name shows it and the cache has its file: only while that is open can a reader of the name open it."""
        return dirty_file.content.adopted and not self.on_settling(dirty_file)

    def _release_later(self, dirty_file: DirtyFile) -> None:
        async def release() -> None:
            await trio.sleep(LOOK_S)
            if dirty_file.handles:
                self.release(dirty_file)

        contained(self._queue.nursery, f"settling {dirty_file.key}", release)

    def enable_passthrough(
        self, tell: Callable[[BackingFile], None], retire: Callable[[BackingFile], None]
    ) -> None:
        """From now on the kernel writes files by itself; see `Passthrough`. Not where parts are sent while they are
        written: there only what it has for readers."""
        self.passthrough.to(tell, retire, direct=not self._writeback)

    async def open_backing(self, dirty_file: DirtyFile) -> BackingFile | None:
        """Its backing file for one passthrough writer, until `returned`; None: no passthrough. The same one until
        the last user has gone. Nothing of it is sent meanwhile; an upload that a caller waits for is waited for."""
        if dirty_file.backing is None and (self.room.free_bytes() < UNASKED or self.journal.removed):
            return None  # without a journal a commit is an upload, which waits for no passthrough writer
        if dirty_file.backing is None and self.passthrough.new_files.is_likely_small(dirty_file):
            return None
        return await self.passthrough.open_backing(dirty_file)

    def returned(self, dirty_file: DirtyFile) -> None:
        """One passthrough writer has closed it. Never raises, never waits."""
        self.passthrough.returned(dirty_file)
        if not dirty_file.kernel.writers and (dirty_file.acknowledged or dirty_file.kernel.shared):
            self._plan(dirty_file)
        if dirty_file.kernel.mapped:
            contained(self._queue.nursery, f"mappings of {dirty_file.key}", self._until_unmapped, dirty_file)

    async def _until_unmapped(self, dirty_file: DirtyFile) -> None:
        """Upload what is written through mappings that outlive their close, until there are none."""
        while dirty_file.kernel.mapped:
            await trio.sleep(LOOK_S)
            if dirty_file.kernel.writers or dirty_file.discarded:
                return  # the last of them begins again, if need be
            with suppress(CachefsError):
                dirty_file.look_for_mappings()
            self._plan(dirty_file)
        if (info := dirty_file.committed) is not None:
            self.on_committed(dirty_file, info)
            if not dirty_file.handles:
                await self._settle(dirty_file)

    def unmounted(self) -> None:
        """The kernel will report no more closes. Files that are still being written are found before they are sent."""
        self.passthrough.unmounted(self._dirty_files.values())

    async def _after_release(self, dirty_file: DirtyFile) -> None:
        if self._writeback:
            try:
                await self._records.acknowledge(dirty_file)
            except CachefsError as exc:
                self._queue.warn(dirty_file, exc, str(exc))
            self._forget_acknowledged(dirty_file)
        self._queue.plan(dirty_file, self._queue.delay_s if self._writeback else 0.0)

    async def commit(self, dirty_file: DirtyFile) -> None:
        """Durable: what it holds now is at the origin. Writeback: on this disk, and will be at the origin;
        or at the origin, where the journal was removed. Raises what failed:
        the dirty file stays pending then, and is tried again by itself. With writeback, the failure of an upload since the
        last commit is raised, once."""
        dirty_file.look()
        if dirty_file.discarded or not dirty_file.dirty:
            return
        if not self._writeback:
            await self._queue.upload(dirty_file)
            return
        dirty_file.within_limits(dirty_file.size)
        wanted = dirty_file.content.generation
        try:
            await self._records.acknowledge(dirty_file)
        except JournalRemoved:  # nothing can be promised here any more, until the next mount
            await self._queue.upload(dirty_file)
            if not dirty_file.has(wanted):
                raise
            return
        if dirty_file.trying.overdue and not dirty_file.kernel.writers:
            await self._queue.begin(dirty_file)
        elif not dirty_file.kernel.writers:
            self._plan(dirty_file)
        if dirty_file.failure is not None and not dirty_file.trying.told:
            dirty_file.trying.told = True
            raise type(dirty_file.failure)(*dirty_file.failure.args) from dirty_file.failure

    def _plan(self, dirty_file: DirtyFile) -> None:
        if dirty_file.waits:
            self._queue.plan(dirty_file, self._queue.delay_s)

    async def moved(self, old: ObjectId, new: ObjectId) -> None:
        """The origin has copied a version: what is cached of `was` here belongs to the copy from now on."""
        if not self._hangs():
            await self._store.recast(old, new)

    def nameless(self) -> list[DirtyFile]:
        """Those that were removed, and that handles of the daemon before have open."""
        return [dirty_file for dirty_file in self._dirty_files.values() if dirty_file.discarded]

    def pending(self) -> list[DirtyFile]:
        """The dirty files whose present content the origin does not have."""
        return [
            dirty_file
            for dirty_file in self._dirty_files.values()
            if not dirty_file.discarded and _is_pending(dirty_file)
        ]

    @property
    def elsewhere(self) -> list[tuple[str, int]]:
        """Sources of which an earlier run has left files that this one cannot send, and the size of each file."""
        return self._records.elsewhere

    async def note(self, name: str, row: Mapping[str, Any] | None) -> None:
        """Keep a JSON object over a crash, for the rooms above; None removes it. Raises `NoRoom`, `CacheUnusable`."""
        await self.journal.write(NOTES, name, row, within_s=HANGS_AFTER_S)

    def notes(self) -> dict[str, dict[str, Any]]:
        """What an earlier run has noted and not removed."""
        return self.journal.rows(NOTES)

    # -- what outlives this process ------------------------------------------------------------------

    def outlive(self, dirty_file: DirtyFile, ino: int, *, named: bool) -> None:
        """It is of this inode: where the connection to the kernel outlives this process, the next daemon goes on with it.
        One that no name shows is about to be discarded."""
        if self._disk.shared is not None:
            dirty_file.record.ino = ino
            if named:
                self.noted(dirty_file)

    def noted(self, dirty_file: DirtyFile) -> None:
        if self._disk.shared is None or not dirty_file.ino or dirty_file.discarded:
            return
        if dirty_file.handles or not dirty_file.acknowledged:
            self._put_record(dirty_file)
        else:  # the journal has it; a record that stayed would say what was before
            self._forget(dirty_file)

    def _is_noted(self, dirty_file: DirtyFile) -> bool:
        return self._disk.shared is not None and dirty_file.id in self._disk.shared.records

    def _put_record(self, dirty_file: DirtyFile) -> None:
        assert self._disk.shared is not None
        dirty_file.record.says_clean = not dirty_file.dirty
        if not self._disk.shared.records.put(dirty_file.id, dirty_file.mtime_ns, dirty_file.resumed_row()):
            log.info("%s: too many files are being written to outlive this process", dirty_file.key)

    def _forget_acknowledged(self, dirty_file: DirtyFile) -> None:
        """The journal has it, and no process has it open: many may wait for their upload."""
        if dirty_file.acknowledged and not dirty_file.handles:
            self._forget(dirty_file)

    def resume_backing(self, dirty_file: DirtyFile, backing_id: int, *, writes: bool) -> BackingFile:
        """The kernel has its file for a handle of the daemon before: to write it until `returned`, or to read it."""
        return self.passthrough.resume(dirty_file, backing_id, writes=writes)

    async def _resume(self, open_inos: Container[int]) -> tuple[dict[str, DirtyFile], set[str]]:
        """What the daemon before was writing: the dirty files by id, and the ids of those that they have replaced. What was
        in memory lies on the disk then. `open_inos` are the inodes that the kernel has open."""
        assert self._disk.shared is not None
        records, found = self._disk.shared.records, dict[str, DirtyFile]()
        rows = records.found()
        over = {row["over"] for _, row in rows.values() if row["over"] is not None}
        going_on = dict[str, tuple[int, dict[str, Any], Origin]]()
        for name, (mtime_ns, row) in rows.items():
            origin = self._records.origin(row["source"], row["key"])
            row["removed"] |= name in over
            # What is written in passthrough, or through a mapping, may not be known to be.
            is_new = (row["dirty"] or row["way"] != Way.HERE.name) and not row["removed"]
            if origin is not None and (is_new or row["ino"] in open_inos):
                going_on[name] = mtime_ns, row, origin
            else:
                records.drop(name)
        files = {row["file"]: mtime_ns for mtime_ns, row, _ in going_on.values()}
        lost = dict[str, str]()
        for tail in self._disk.shared.tails.found():
            if tail.name in files:  # else it is not needed, and no row would name its file
                spill = partial(spill_tail, self._disk.directory, tail, files[tail.name])
                try:
                    await trio.to_thread.run_sync(spill)
                except OSError as exc:
                    lost[tail.name] = str(exc)
            tail.release()
        for name, (mtime_ns, row, origin) in going_on.items():
            try:
                if row["file"] in lost:
                    raise CacheUnusable(lost[row["file"]])
                dirty_file = self._again(name, row, mtime_ns, origin)
                dirty_file.resumed(row)
                found[name] = dirty_file
            except (OSError, CachefsError) as exc:
                records.drop(name)
                if row["dirty"]:
                    log.error("%s was being written, and is lost: %s", origin.name(row["key"]), str(exc))  # noqa: TRY400
        return found, over

    def _again(self, name: str, row: Mapping[str, Any], mtime_ns: int, origin: Origin) -> DirtyFile:
        """A dirty file of an earlier run, whose upload goes on."""
        file = StagingFile(self._disk, row["file"])
        size, base, attrs = file.path.stat().st_size, row["base"], row["attrs"]
        dirty_file = DirtyFile(
            self, name, origin, row["key"], file, size, base=base, mtime_ns=mtime_ns, attrs=attrs
        )
        dirty_file.record.tokens, dirty_file.record.upload = row["tokens"], row["upload"]
        if row["upload"] is not None:
            dirty_file.sender.resume(origin.resume_upload(row["key"], row["upload"]))
        return dirty_file

    def _forget(self, dirty_file: DirtyFile) -> None:
        """Remove a dirty file that is not needed any more."""
        if self._disk.shared is not None:
            self._disk.shared.records.drop(dirty_file.id)

    def _drop(self, dirty_file: DirtyFile) -> None:
        """Remove the staging file of a dirty file that lost its name. Open handles keep it."""
        if self._disk.shared is not None and dirty_file.ino and dirty_file.handles:
            self._put_record(dirty_file)
        else:
            self._forget(dirty_file)
        if dirty_file.content.is_ours:
            dirty_file.file.remove()
        if not dirty_file.handles:
            self._dirty_files.pop(dirty_file.id, None)

    # -- renaming and removing ----------------------------------------------------------------------

    async def rename(
        self,
        dirty_file: DirtyFile,
        origin: Origin,
        key: str,
        *,
        base: str | None = None,
        over: DirtyFile | None = None,
        upload: bool = True,
        leaves: Callable[[ObjectInfo], Awaitable[object]] | None = None,
    ) -> bool:
        """Its content goes to `key` (of the same origin). `base` is the etag of what it is to replace there, `over` the
        dirty file, which the caller is discarding: after a crash at most one of them is back. Free as long as nothing of it
        is at the origin; else it is uploaded under the new name first, or, if it is half a change, or all at the origin, or
        `upload` is not wanted, what the origin has is copied.

        Returns whether the origin has something of it under the old key still, which the caller deletes; `leaves` is told
        what, before a crash may bring the dirty file back under the new one. Raises what uploads and copies do, and then it
        has its old name."""
        async with dirty_file.trying.turn:
            await self._queue.halt(dirty_file, gives_up=True)
            if dirty_file.discarded:
                return False
            dirty_file.look()
            own = dirty_file.committed or await self._own(dirty_file)
            whole = not dirty_file.between and (not dirty_file.kernel.in_passthrough or dirty_file.reclaim())
            first = upload and whole and dirty_file.dirty and own is not None
            before = dirty_file.origin, dirty_file.key, dirty_file.base, dirty_file.record.tokens
            if first:
                await self._records.acknowledge(dirty_file, HANGS_AFTER_S)
            comes_back = dirty_file.acknowledged or self._disk.shared is not None
            if own is not None and leaves is not None and dirty_file.dirty and comes_back:
                await leaves(own)
            if own is None or first:
                await self._move(dirty_file, origin, key, base, over)
            else:
                await self._copy(dirty_file, own, origin, key, over)
            if dirty_file.dirty and not first:
                self._soon(dirty_file)
        if first:
            await self._send_renamed(dirty_file, *before)
        return own is not None

    async def _own(self, dirty_file: DirtyFile) -> ObjectInfo | None:
        """The origin's current object at this key, if it is a version this file wrote."""
        if dirty_file.base is None and not dirty_file.trying.unsure:
            return None
        try:
            info, token = await dirty_file.origin.look(dirty_file.key)
        except NotFound:
            return None
        return info if dirty_file.is_own(info.etag, token) else None

    async def _copy(
        self, dirty_file: DirtyFile, own: ObjectInfo, origin: Origin, key: str, over: DirtyFile | None
    ) -> None:
        info = await origin.copy(dirty_file.key, key, size=own.size, etag=own.etag)
        source = dirty_file.origin.source
        await self._move(dirty_file, origin, key, info.etag, over)
        dirty_file.copied(own, info)
        # Behind `copied`: if the cache takes the file just now and has not got it yet, `_adopted_as` looks again.
        await self.moved(own.version(source), info.version(origin.source))
        if not dirty_file.acknowledged:
            await self._records.forget(dirty_file)
        if dirty_file.stored is info:
            self.on_committed(dirty_file, info)

    async def _move(
        self, dirty_file: DirtyFile, origin: Origin, key: str, base: str | None, over: DirtyFile | None
    ) -> None:
        before = dirty_file.origin, dirty_file.key, dirty_file.base
        await dirty_file.sender.abandon()  # of what was written meanwhile, too
        try:
            dirty_file.record.over = over
            dirty_file.moved(origin, key, base)
            if dirty_file.acknowledged:
                await self._records.keep(dirty_file, HANGS_AFTER_S)
        except BaseException:
            dirty_file.record.over = None
            dirty_file.moved(*before)
            if dirty_file.acknowledged:
                with trio.CancelScope(shield=True):
                    await self._records.keep(dirty_file, HANGS_AFTER_S)
            raise

    async def _send_renamed(
        self, dirty_file: DirtyFile, origin: Origin, key: str, base: str | None, tokens: list[str]
    ) -> None:
        """Return when the origin has the file under its new name. If that fails, the file gets its old name back, which is
        `key` at `origin`, with `base` and `tokens`."""
        wanted = dirty_file.content.generation
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
        async with dirty_file.trying.turn:
            await self._queue.halt(dirty_file)
            if not dirty_file.has(wanted) and not dirty_file.discarded:
                await self._move(dirty_file, origin, key, base, None)
                dirty_file.record.tokens, dirty_file.trying.unsure = tokens, True

    def _soon(self, dirty_file: DirtyFile) -> None:
        """Retry at once an upload that was refused under another name."""
        if dirty_file.trying.failures and dirty_file.acknowledged:
            dirty_file.trying.failures = 0
            if dirty_file.conflicts:
                dirty_file.trying.failure = None
            self._queue.plan(dirty_file, 0.0)

    async def discard(
        self,
        dirty_file: DirtyFile,
        *,
        replaced: bool = False,
        instead: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Give a dirty file up, because its name goes. Nothing of it is uploaded any more, and its users keep what they
        have. Unless the name was `replaced` by another file, an object that an upload under way may just have made is
        deleted at the origin. `instead` takes the name away; it is called when no upload is under way. Until it has
        returned, the dirty file survives a crash; when it raises, nothing has happened."""
        stored = dirty_file.stored
        dirty_file.content.removed = True
        async with taken(dirty_file.trying.turn):
            try:
                await self._queue.halt(dirty_file, gives_up=True)
                if instead is not None:
                    await instead()
            except BaseException:
                dirty_file.content.removed = False
                if dirty_file.dirty and (dirty_file.acknowledged or not dirty_file.handles):
                    self._queue.plan(dirty_file, 0.0)
                elif not dirty_file.handles:  # its last user has gone meanwhile
                    self._settle_soon(dirty_file)
                raise
            try:
                await dirty_file.sender.abandon()
            finally:  # also of a caller that is cancelled: the name is gone
                try:
                    with trio.CancelScope(shield=True):
                        # What is not dirty may be on its way to the cache, as the file that it is.
                        unlinks = dirty_file.content.is_ours and dirty_file.dirty
                        await self._records.forget(dirty_file, HANGS_AFTER_S, unlinks=unlinks)
                finally:
                    # Or a file that is replaced again and again would keep all that it ever was.
                    dirty_file.record.over = None
                    self._drop(dirty_file)
            made = dirty_file.trying.unsure or dirty_file.stored is not stored
            if made and not replaced and (not dirty_file.conflicts or await self._own(dirty_file)):
                await dirty_file.origin.delete(dirty_file.key)

    # -- what dirty files ask -----------------------------------------------------------------------

    def wrote(self, dirty_file: DirtyFile) -> None:
        """Its content has changed."""
        dirty_file.mtime_ns = self._now_ns()
        self.changed(dirty_file)
        self._push(dirty_file)

    def changed(self, dirty_file: DirtyFile) -> None:
        """Its content is another, and so is its time. What a next daemon would go on from is the same, if that says already
        that it is dirty."""
        if self._disk.shared is None:
            return
        if dirty_file.record.says_clean:
            self.noted(dirty_file)
        else:
            self._disk.shared.records.touch(dirty_file.id, dirty_file.mtime_ns)

    def _push(self, dirty_file: DirtyFile) -> None:
        if not (self._writeback or dirty_file.discarded or dirty_file.kernel.shared):
            dirty_file.sender.push(self._queue.nursery)

    async def renew(self, dirty_file: DirtyFile) -> StagingFile:
        """A new staging file for it, with its content: the cache has the old one."""
        file = StagingFile(self._disk, uuid4().hex, new=True)
        try:
            await dirty_file.file.copy_to(file, dirty_file.size)
        except BaseException:
            file.remove()
            raise
        return file

    async def keep(self, dirty_file: DirtyFile) -> None:
        await self._records.keep(dirty_file)

    def journaled(self, dirty_file: DirtyFile) -> bytes | None:
        """The content that the journal has of it."""
        return self.journal.content(dirty_file.id)

    async def orphaned(self, dirty_file: DirtyFile, upload: Upload) -> None:
        """This upload will not be completed."""
        await self._records.orphaned(dirty_file.origin.source, upload.key, upload.state())

    def _hopeful(self, dirty_file: DirtyFile | None) -> bool:
        """Whether others are on their way, which begin now if they only wait for their time."""
        found = False
        for other in self._dirty_files.values():
            if other is dirty_file:
                continue
            waits = other.attempt is None and other.failure is None and other.trying.due < math.inf
            if waits and other.trying.due > trio.current_time():
                self._queue.plan(other, 0.0)
            found |= waits or other.attempt is not None
        return found

    # -- settling ------------------------------------------------------------------------------------

    async def _settle_together(self, waiting: Sequence[DirtyFile]) -> None:
        """Small files that lie in memory, and are not in use: the cache makes its files of them in one turn of a thread. One
        that was removed meanwhile has cost nothing of that."""
        going = list[DirtyFile]()
        for dirty_file in waiting:
            if self._dirty_files.get(dirty_file.id) is not dirty_file:
                continue
            if not self._goes_with_others(dirty_file):
                contained(self._queue.nursery, f"settling {dirty_file.key}", self._settle, dirty_file)
            elif not self.on_settling(dirty_file):
                self._settle_later(dirty_file)
            else:
                dirty_file.lock.acquire_nowait()
                dirty_file.content.settle()
                going.append(dirty_file)
        try:
            await self._give_to_cache(going)
        finally:
            for dirty_file in going:
                dirty_file.lock.release()
        for dirty_file in going:
            await self._settle(dirty_file, adopt=False)

    def _goes_with_others(self, dirty_file: DirtyFile) -> bool:
        """Whether the cache may be given it as it is; `_settle` knows what else is to be done."""
        if dirty_file.handles or dirty_file.discarded or dirty_file.lock.locked():
            return False
        if dirty_file.content.state is not State.CLEAN or dirty_file.sender.upload is not None:
            return False
        return dirty_file.file.in_memory and dirty_file.size > 0 and not dirty_file.file.spoiled

    async def _settle_sent(self, dirty_file: DirtyFile) -> None:
        """Settle one whose upload has ended by itself: with others, if it may wait for them."""
        if self._goes_with_others(dirty_file):
            self._together.add(dirty_file)
        else:
            await self._settle(dirty_file)

    async def _settle(self, dirty_file: DirtyFile, *, adopt: bool = True) -> None:
        """It is not in use and the origin has it: the cache adopts the file, unless it has refused it."""
        async with taken(dirty_file.lock):
            try:
                if dirty_file.kernel.in_passthrough and not dirty_file.reclaim():
                    return
            except CachefsError:  # its file cannot be opened now
                self._settle_later(dirty_file)
                return
            info = dirty_file.committed
            if dirty_file.handles or info is None or self._dirty_files.get(dirty_file.id) is not dirty_file:
                return
            if dirty_file.attempt is not None:
                return  # its task settles it at its end
            if not self.on_settling(dirty_file):
                self._settle_later(dirty_file)
                return
            if dirty_file.sender.upload is not None:
                # For example of a completion that another client's newer object hides.
                await dirty_file.sender.abandon()
            if not dirty_file.content.adopted and adopt:
                dirty_file.content.settle()
                await self._give_to_cache([dirty_file])
            if dirty_file.handles or dirty_file.dirty or dirty_file.discarded:
                return  # the last user that came meanwhile does the rest
            if not self.on_settling(dirty_file):
                self._settle_later(dirty_file)
                return
            if not dirty_file.content.adopted:
                dirty_file.file.remove()
            self._settled(dirty_file)

    def _settled(self, dirty_file: DirtyFile) -> None:
        self._forget(dirty_file)
        if self._dirty_files.pop(dirty_file.id, None) is not None:
            self.on_settled(dirty_file)

    async def _give_to_cache(self, dirty_files: Sequence[DirtyFile]) -> None:
        """The cache takes the files of these, if it will. All are settling, and the caller holds their locks."""
        adopted, stored = (
            [False] * len(dirty_files),
            [dirty_file.content.stored for dirty_file in dirty_files],
        )
        with ExitStack() as used:
            try:
                for dirty_file in dirty_files:
                    with suppress(CachefsError):  # then the cache says why
                        used.enter_context(dirty_file.file.used())
                adopted = await self._adopt(dirty_files, stored)
                for dirty_file, done, one in zip(dirty_files, adopted, stored, strict=True):
                    if done and one is not None:
                        await self._adopted_as(dirty_file, one)
            finally:
                for dirty_file, done in zip(dirty_files, adopted, strict=True):
                    dirty_file.content.settled(done)
            for dirty_file, done in zip(dirty_files, adopted, strict=True):
                # A removal that is under way may fail: then the file stays, or else `_drop` removes it.
                if dirty_file.discarded and not done and not dirty_file.trying.turn.locked():
                    dirty_file.file.remove()
                if not done or dirty_file.handles or dirty_file.discarded:
                    continue
                # Its file is the cache's, and cannot be opened here once this has ended. So no await lies in between.
                if self._shown_from_cache(dirty_file):
                    dirty_file.open()
                    self._release_later(dirty_file)
                else:
                    self._settled(dirty_file)

    async def _adopt(self, dirty_files: Sequence[DirtyFile], stored: Sequence[Stored | None]) -> list[bool]:
        """For each, whether the cache has its file now as the version that is `stored`."""
        adopted, in_memory = [False] * len(dirty_files), dict[int, tuple[ObjectId, bytes]]()
        try:
            for place, (dirty_file, one) in enumerate(zip(dirty_files, stored, strict=True)):
                file = dirty_file.file
                if (
                    one is None
                    or one.overtaken
                    or not dirty_file.size
                    or self._store.hangs
                    or self._disk.hangs
                ):
                    continue
                file.check()
                version = one.info.version(dirty_file.origin.source)
                if (held := file.held) is not None:
                    in_memory[place] = version, held
                else:
                    with file.used():
                        adopted[place] = await self._store.adopt(version, file.path)
            if in_memory:
                kept = await self._store.adopt_bytes(list(in_memory.values()))
                for place, done in zip(in_memory, kept, strict=True):
                    adopted[place] = done
                    if done:
                        dirty_files[place].file.remove()
        except CachefsError as exc:
            log.info("not kept here: %s: %s", _names(dirty_files), exc)
        except Exception:
            log.exception("the cache failed to take %s", _names(dirty_files))
        return adopted

    async def _adopted_as(self, dirty_file: DirtyFile, stored: Stored) -> None:
        """The cache has it as `stored`. If it was renamed meanwhile, it is cached under its new name."""
        while (now := dirty_file.content.stored) is not None and now is not stored:
            source = dirty_file.origin.source
            await self.moved(stored.info.version(source), now.info.version(source))
            stored = now

    def _settle_later(self, dirty_file: DirtyFile) -> None:
        async def settle() -> None:
            await trio.sleep(LOOK_S)
            await self._settle(dirty_file)

        contained(self._queue.nursery, f"settling {dirty_file.key}", settle)

    def _hangs(self) -> bool:
        """Whether the disk is known not to answer. One caller whose deadline passed spares the others their own wait."""
        return self._store.hangs or self.journal.hangs or self._disk.hangs

    # -- the life of the room ----------------------------------------------------------------------

    async def run(self) -> None:
        """Uploads that are due, and what is to be cleared away, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._records.run)
            nursery.start_soon(self.passthrough.run)
            await self._queue.run()

    async def flush(
        self,
        under: Callable[[DirtyFile], bool] | None = None,
        deadline_s: float = math.inf,
        *,
        at_the_end: bool = False,
    ) -> list[DirtyFile]:
        """Wait until the origin has all that was acknowledged or closed (of those that `under` chooses), but for what is
        being changed just now, unless it is `at_the_end`; returns what it has not. Without a deadline each is tried once,
        with one until then, except where it would be in vain."""
        chosen = [
            dirty_file for dirty_file in self.pending() if dirty_file.acknowledged or not dirty_file.handles
        ]
        chosen = [d for d in chosen if (under is None or under(d)) and (at_the_end or not d.between)]

        async def one(dirty_file: DirtyFile) -> None:
            while True:
                try:
                    await self._queue.upload(dirty_file)
                    if not dirty_file.kernel.in_passthrough or deadline_s == math.inf:
                        return None
                except CachefsError as exc:
                    if deadline_s == math.inf or in_vain(exc):
                        return None
                await trio.sleep_until(min(dirty_file.trying.due, trio.current_time() + FLUSH_RETRY_S))

        with trio.move_on_after(deadline_s):
            await each(one, chosen, IN_BACKGROUND)
        return [dirty_file for dirty_file in chosen if dirty_file.dirty and not dirty_file.discarded]

    async def recover(self, open_inos: Container[int] = frozenset()) -> list[DirtyFile]:
        """What an earlier run has left: call once, before anything else. Acknowledged dirty files are pending again, and are
        returned; the rest is cleared away, where the origin has a part of it in the background. What was being written goes
        on where there is `memory`; `open_inos` are the inodes that the kernel has open."""
        resumed, over = (
            (dict[str, DirtyFile](), set[str]())
            if self._disk.shared is None
            else await self._resume(open_inos)
        )
        found = await look(self._records, self._disk.directory, self._revive, resumed, over)
        for dirty_file in resumed.values():
            self._dirty_files[dirty_file.id] = dirty_file
            if dirty_file.discarded:
                self._put_record(dirty_file)  # the one that has replaced it will not be there to say so
            elif dirty_file.ino not in open_inos:
                # Its last close is repeated; or the kernel repeats its open, meanwhile.
                if self._writeback:
                    with suppress(CachefsError):  # its upload says why
                        await self._records.acknowledge(dirty_file)
                self._queue.plan(dirty_file, max(REPEATED_S, self._queue.delay_s if self._writeback else 0.0))
        for dirty_file in found:
            self._dirty_files[dirty_file.id] = dirty_file
            self._queue.plan(dirty_file, self._queue.delay_s)
        return found

    def _revive(self, name: str, row: Mapping[str, Any], origin: Origin) -> DirtyFile:
        dirty_file = self._again(name, row, row["mtime_ns"], origin)
        dirty_file.content.row = Row.ACKNOWLEDGED
        dirty_file.may_be_written()  # by a process that has outlived that run
        dirty_file.content.synced = dirty_file.content.generation
        return dirty_file

    async def hand_over(self) -> None:
        """Instead of `aclose`, once all tasks have ended: another daemon goes on with all that there is."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(GIVING_UP_S):
                await self._disk.quiet()
            await trio.to_thread.run_sync(self.journal.close)

    async def aclose(self, deadline_s: float) -> list[DirtyFile]:
        """Upload what can be uploaded until the deadline; returns what is left for the next run. What is being written and
        was never acknowledged is given up. Works also when the nursery it was made with has been cancelled."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                self._queue.nursery = nursery
                left = await self.flush(deadline_s=deadline_s, at_the_end=True)
                for dirty_file in list(self._dirty_files.values()):
                    with trio.move_on_after(GIVING_UP_S):
                        await run_contained(f"giving up {dirty_file.key}", self._give_up, dirty_file)
                self._queue.close()
                with trio.move_on_after(GIVING_UP_S):
                    await self._disk.quiet()
                nursery.cancel_scope.cancel()
            await trio.to_thread.run_sync(self.journal.close)
        return left

    async def _give_up(self, dirty_file: DirtyFile) -> None:
        if not dirty_file.dirty:
            while dirty_file.handles:
                dirty_file.release()
            await self._settle(dirty_file)
        elif dirty_file.acknowledged or not dirty_file.handles:
            try:
                # Before its upload is waited for: that may hang, and the next run is promised all that is left.
                await self._records.acknowledge(dirty_file)
            except CachefsError as exc:
                dirty_file.trying.failure = exc  # says whether the next mount finds it
                self._queue.warn(dirty_file, exc, f"{dirty_file.origin.name(dirty_file.key)}: {exc}")
            await self._queue.halt(dirty_file)
            while dirty_file.handles:
                dirty_file.release()
        else:
            if not dirty_file.discarded:
                log.warning("%s was being written and is given up", dirty_file.origin.name(dirty_file.key))
            await self.discard(dirty_file, replaced=True)

    def status(self) -> dict[str, Any]:
        """For `cachefs status`: plain values, of the longest pending dirty files first."""
        return {"writeback": self._writeback, **_status(self.pending(), self._now_ns())}

    async def _fill(self, dirty_file: DirtyFile, base: ObjectId, count: int) -> None:
        """Write its first `count` bytes, read like a program from the beginning on, so that readahead works for it."""
        opened = self._reader.open(dirty_file.origin, base)
        try:
            for at in range(0, count, PIECE):
                size = min(PIECE, count - at)
                data = await self._reader.read(opened, at, size, 0)
                if len(data) != size:
                    raise OriginFailed(f"{dirty_file.origin.name(base.key)} is shorter than it was")
                await self.room.admit(dirty_file, size)
                await dirty_file.file.write(at, data)
        finally:
            self._reader.close(opened)


def _is_pending(dirty_file: DirtyFile) -> bool:
    try:
        return dirty_file.look() or dirty_file.dirty
    except CachefsError:
        return True  # its file cannot be looked at now, and may hold something new


def _status(pending: Sequence[DirtyFile], now_ns: int) -> dict[str, Any]:
    """Plain values; `dirty_files` are those that were changed last longest ago."""
    pending = sorted(pending, key=lambda dirty_file: dirty_file.mtime_ns)
    failed = [dirty_file for dirty_file in pending if dirty_file.failure is not None]
    return {
        "pending": len(pending),
        "pending_bytes": sum(dirty_file.size for dirty_file in pending),
        "uploading": sum(dirty_file.attempt is not None for dirty_file in pending),
        "failed": len(failed),
        "last_error": str(failed[-1].failure) if failed else "",
        "oldest_s": max(0.0, (now_ns - pending[0].mtime_ns) / 1e9) if pending else 0.0,
        "dirty_files": [
            {
                "source": dirty_file.origin.source,
                "key": dirty_file.key,
                "size": dirty_file.size,
                "sent": dirty_file.parts.sent_bytes,
                "open": dirty_file.handles,
                "acknowledged": dirty_file.acknowledged,
                "uploading": dirty_file.attempt is not None,
                "error": str(dirty_file.failure or ""),
            }
            for dirty_file in pending[:SHOWN]
        ],
    }


def _names(dirty_files: Sequence[DirtyFile]) -> str:
    return ", ".join(dirty_file.origin.name(dirty_file.key) for dirty_file in dirty_files)

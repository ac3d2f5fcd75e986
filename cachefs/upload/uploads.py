"""All dirty files of this node: a write begins one, a commit uploads it, and it is kept until the origin has its content.
Then the cache adopts its staging file, so that files written here are cached here.

The states of a dirty file are in `content.py`. What survives a crash is in its row (`journal.py`), and what survives the end
of this process alone in its record (`resumed_row`), which is written here. A start reads both (`recovery.py`).

By default a commit is an upload. With `writeback` a commit makes the bytes and a row of the journal durable on this disk,
and the upload follows in the background. Without `writeback`, a dirty file has a row in three cases: an upload in parts has
begun, which a crash would leave at the origin; an upload has failed, and the writer got the error; or a rename uploads the
file.

A rename takes the dirty file's `trying.turn` and first ends the running attempt: it cancels it, or waits for it if the
origin may already be carrying it out. The origin's object at the old key may then be the dirty file's *own*: the version it
began with, one it made, or one with the token of an attempt of unknown outcome. A dirty file that no writer is changing is
uploaded under the new key before its own object is deleted; otherwise that object is copied to the new key. Another client's
object stays where it is.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import uuid4

import trio

from cachefs.base.errors import CachefsError, NotFound, OriginFailed
from cachefs.base.linux import HANGS_AFTER_S
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.base.shared_memory import SharedMemory
from cachefs.base.tasks import Ts, run_contained
from cachefs.origin import ObjectInfo, Origin, Upload, each
from cachefs.store import BackingFile, Store
from cachefs.upload import orphans
from cachefs.upload.content import Name, Row, State, Stored
from cachefs.upload.dirty_file import DirtyFile, Where
from cachefs.upload.journal import (
    NOTES,
    DiskHangs,
    Journal,
    JournalRemoved,
    Records,
    StoredFile,
)
from cachefs.upload.passthrough import Passthrough
from cachefs.upload.queue import IN_BACKGROUND, Queue, in_vain
from cachefs.upload.recovery import Recovery
from cachefs.upload.room import UNASKED, StagingRoom
from cachefs.upload.staging import LOOK_S, Buffer, StagingDisk, StagingFile, mark_new

log = logging.getLogger(__name__)

FLUSH_RETRY_S = 5.0
"""Longest wait of `flush` before it tries a failed upload again. Guessed between two cases: an origin answers again six
seconds before the deadline of a stop, and one that is out all the time gets each file fifteen times a minute at most."""

SHOWN = 20
"""Most dirty files that the status lists. Derived: a screen of 24 lines has space for them and for a heading."""

GIVING_UP_S = 3.0
"""Most seconds that a stop spends on each file that it gives up. Guessed: after a second signal a user waits for the stop.
Less than the shortest deadline of an upload (5 s), so that no upload fails before."""

REPEATED_S = 2.0
"""Seconds before a new daemon uploads a file that no process had open when the previous daemon died. The kernel may first
repeat an open request that was not answered. Guessed: the kernel repeats all requests at once."""

PIECE = 1 << 20
"""Bytes of one read of the base version: a block."""

TOGETHER, TOGETHER_S = 16, 0.1
"""Most small files that are given to the cache together, and most seconds that the first of them waits for others. Derived:
a call in a worker thread and a task cost as much as making one cache file; the files take memory until then
(`MEMORY_KEPT`)."""


class Reader(Protocol):
    """The methods of `Fetcher` that are used here."""

    def open(self, origin: Origin, object_id: ObjectId) -> Any: ...
    def close(self, opened: Any) -> None: ...
    async def read(self, opened: Any, offset: int, size: int, pid: int) -> Buffer: ...


class Together:
    """Gathers small files, and calls `work` with them in a task once there are `TOGETHER`, or after `TOGETHER_S`."""

    def __init__(self, queue: Queue, work: Callable[[Sequence[DirtyFile]], Awaitable[None]]) -> None:
        self.waiting: list[DirtyFile] = []
        self._queue, self._work = queue, work
        self._enough = trio.Event()

    def add(self, dirty_file: DirtyFile) -> None:
        self.waiting.append(dirty_file)
        if len(self.waiting) == 1:
            self._enough = trio.Event()
            self._queue.start("settling small files", self._run)
        elif len(self.waiting) == TOGETHER:
            self._enough.set()

    async def _run(self) -> None:
        with trio.move_on_after(TOGETHER_S):
            await self._enough.wait()
        waiting, self.waiting = self.waiting, []
        await self._work(waiting)


class Uploads:
    """The dirty files, and their uploads. `reader` reads the version that a dirty file begins with. With `memory`, which
    outlives this process, files that are being written outlive it, too. For `killed` see `Database`.

    A dirty file is *settled* at its end: the cache adopts its staging file, or the file is removed, and the dirty file is
    forgotten. The filesystem sets the callbacks. `on_committed` is called with each version that the origin has got, before
    its waiters wake; its `mtime_ns` is the dirty file's if the origin's would cost a request. While `on_settling` returns
    False, settling waits. `on_settled` is called once the dirty file is settled; until then it can be opened. `on_changed`
    is called when a change in passthrough was found.

    The constructor opens the journal, and blocks. Raises `NoRoom`, `CacheUnusable`."""

    def __init__(
        self,
        state_dir: Path,
        staging_dir: Path,
        origins: Iterable[Origin],
        store: Store,
        metrics: Metrics,
        *,
        nursery: trio.Nursery,
        reader: Reader,
        writeback: bool = False,
        upload_delay_s: float = 1.0,
        on_conflict: Literal["overwrite", "fail"] = "overwrite",
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
        journal.hangs_elsewhere, journal.on_removed_late = self._hangs, self._removed_late
        self._records = Records(journal, list(origins))
        self.room = StagingRoom(staging_dir, keep_free_bytes, store, self._begin_planned)
        self._queue = Queue(
            nursery,
            self._records,
            metrics,
            lambda dirty_file, info: self.on_committed(dirty_file, info),
            self._settle_soon,
            delay_s=upload_delay_s,
            conditional=on_conflict == "fail",
        )
        self.passthrough = Passthrough(staging_dir, self.room.relieve, direct=not writeback)
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
        """Make a dirty file for `key`, with the first `upto` bytes of `base` (None: all of them), or empty without `base`.
        If conflicts are failures, `base` is also the version that the upload may replace (None: it may replace none).
        Raises `NoRoom`, `CacheUnusable`, and the errors of reading `base`."""
        count = 0 if base is None else base.size if upto is None else min(upto, base.size)
        etag = None if base is None else base.etag
        mtime_ns = self._now_ns() if mtime_ns is None else mtime_ns
        dirty_file = self._new(origin, key, count, etag, mtime_ns, attrs or {})
        try:
            if not dirty_file.file.ends_in_memory:  # shared memory has no place for one more file
                with dirty_file.file.used():
                    await dirty_file.file.spill()
            if base is not None and count:
                with dirty_file.file.used():
                    await self._fill(dirty_file, base, count)
        except BaseException:
            dirty_file.file.remove()
            raise
        return self._begun(dirty_file)

    def begin_now(
        self, origin: Origin, key: str, mtime_ns: int, attrs: Mapping[str, Any]
    ) -> DirtyFile | None:
        """`begin` an empty file in memory. None if there is no memory for it, or if its writer may get a backing file, for
        which `open_backing` waits."""
        if self.passthrough.offered and not self.passthrough.new_files.next_is_likely_small():
            return None
        dirty_file = self._new(origin, key, 0, None, mtime_ns, attrs)
        if not dirty_file.file.ends_in_memory:
            dirty_file.file.remove()
            return None
        return self._begun(dirty_file)

    def _new(
        self, origin: Origin, key: str, size: int, base: str | None, mtime_ns: int, attrs: Mapping[str, Any]
    ) -> DirtyFile:
        name = uuid4().hex
        file = StagingFile(self._disk, name, new=True)
        return DirtyFile(self, name, origin, key, file, size, base=base, mtime_ns=mtime_ns, attrs=attrs)

    def _begun(self, dirty_file: DirtyFile) -> DirtyFile:
        self._dirty_files[dirty_file.id] = dirty_file
        if self._writeback:
            self.passthrough.new_files.begun(dirty_file)
        return dirty_file

    def start(self, what: str, work: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        """See `Queue.start`."""
        self._queue.start(what, work, *args)

    async def disk_answers(self) -> None:
        """Wait until the staging directory's disk has carried out a change, before `take` makes one on the trio thread."""
        with suppress(OSError):  # the caller's next change meets the error
            await self._disk.run(partial(os.utime, self._disk.directory))

    def take(
        self, origin: Origin, base: ObjectInfo, backing: Any, users: int, attrs: Mapping[str, Any]
    ) -> DirtyFile | None:
        """Make a clean dirty file whose staging file is the cache file of `base`. The kernel has the cache file open as
        `backing`; `users` are the caller's uses of it. None if the file has other users, or passthrough is impossible."""
        name = uuid4().hex
        path = self._disk.directory / name
        fd = self._store.take_out(backing, users, path) if self.passthrough.possible else None
        if fd is None:
            return None
        mark_new(path)
        file = StagingFile(self._disk, name, fd=fd)
        dirty_file = DirtyFile(
            self, name, origin, base.key, file, base.size, base=base.etag, mtime_ns=base.mtime_ns, attrs=attrs
        )
        dirty_file.content.stored_as(Stored(0, base))
        dirty_file.content.synced = 0
        self.passthrough.share(dirty_file, backing.id)
        self._dirty_files[name] = dirty_file
        return dirty_file

    def open(self, dirty_file: DirtyFile) -> None:
        """Add a user, a reader or a writer."""
        dirty_file.open()
        if dirty_file.handles > 1:
            return
        if not dirty_file.acknowledged:
            # Its row may be gone since its upload, and the bytes with it. Without memory for them, its users meet EIO after
            # a kill.
            dirty_file.file.outlive_row()
        if not self._is_noted(dirty_file):
            self.noted(dirty_file)

    def release(self, dirty_file: DirtyFile) -> None:
        """Remove a user. After the last one, changes are uploaded in the background, and a clean file is settled."""
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
            if not dirty_file.trying.turn.locked():
                self._forget_removed(dirty_file)
            else:  # its removal may be running, and may fail
                self._queue.start(f"removing {dirty_file.key}", self._after_removal, dirty_file)
        elif not dirty_file.dirty:
            self._settle_soon(dirty_file)
        elif dirty_file.waits:
            self._queue.start(f"closing {dirty_file.key}", self._after_release, dirty_file)

    def _forget_removed(self, dirty_file: DirtyFile) -> None:
        """Forget a file that has lost its name and its last user."""
        self._dirty_files.pop(dirty_file.id, None)
        self._forget(dirty_file)

    async def _after_removal(self, dirty_file: DirtyFile) -> None:
        """Wait for the end of a removal during which the last user has closed the file."""
        async with dirty_file.trying.turn:
            if dirty_file.discarded and not dirty_file.handles:
                self._forget_removed(dirty_file)

    def _settle_soon(self, dirty_file: DirtyFile) -> None:
        """Begin to settle a clean file that is not in use: together with others, if it may wait for them. At once if the
        cache has adopted the staging file, because the dirty file cannot be opened any more."""
        if dirty_file.content.adopted:
            self._settled(dirty_file)
        elif self._goes_with_others(dirty_file):
            self._together.add(dirty_file)
        else:
            self._queue.start(f"settling {dirty_file.key}", self._settle, dirty_file)

    def _shown_from_cache(self, dirty_file: DirtyFile) -> bool:
        """True if the cache has adopted the staging file while a name still shows the dirty file. Then the dirty file must
        stay open, because it could not be opened again."""
        return dirty_file.content.adopted and not self.on_settling(dirty_file)

    def _release_later(self, dirty_file: DirtyFile) -> None:
        """Remove a user after `LOOK_S`."""

        async def release() -> None:
            await trio.sleep(LOOK_S)
            if dirty_file.handles:
                self.release(dirty_file)

        self._queue.start(f"settling {dirty_file.key}", release)

    async def open_backing(self, dirty_file: DirtyFile) -> BackingFile | None:
        """The backing file for one more passthrough writer, until `returned`; None if there is no passthrough. Nothing is
        uploaded until then, and this waits for an upload that a caller waits for."""
        if dirty_file.backing is None and (
            not self.passthrough.offered
            or self.passthrough.new_files.is_likely_small(dirty_file)
            or self.room.free_bytes() < UNASKED
            # Without a journal a commit is an upload, which does not wait for passthrough writers.
            or self.journal.removed
        ):
            return None
        return await self.passthrough.open_backing(dirty_file)

    def returned(self, dirty_file: DirtyFile) -> None:
        """Remove a passthrough writer, which has closed the file. Never raises, never waits."""
        self.passthrough.returned(dirty_file)
        if not dirty_file.kernel.writers and (dirty_file.acknowledged or dirty_file.kernel.shared):
            self._plan(dirty_file)
        if dirty_file.kernel.mapped:
            self._queue.start(f"mappings of {dirty_file.key}", self._until_unmapped, dirty_file)

    async def _until_unmapped(self, dirty_file: DirtyFile) -> None:
        """Upload changes made through mappings that outlive their close, until there are no mappings."""
        while dirty_file.kernel.mapped:
            await trio.sleep(LOOK_S)
            if dirty_file.kernel.writers or dirty_file.discarded:
                return  # the close of the last writer starts this again, if need be
            with suppress(CachefsError):
                dirty_file.look_for_mappings()
            self._plan(dirty_file)
        if (info := dirty_file.committed) is not None:
            self.on_committed(dirty_file, info)
            if not dirty_file.handles:
                await self._settle(dirty_file)

    def unmounted(self) -> None:
        """Note that the kernel reports no more closes. Files that are still written are noticed before they are uploaded."""
        self.passthrough.unmounted(self._dirty_files.values())

    async def _after_release(self, dirty_file: DirtyFile) -> None:
        """Handle the last close of a file that has changes: acknowledge it with `writeback`, and plan its upload."""
        if self._writeback:
            try:
                await self._records.acknowledge(dirty_file)
            except CachefsError as exc:
                self._queue.warn(dirty_file, exc, str(exc))
            self._forget_acknowledged(dirty_file)
        self._queue.plan(dirty_file, self._queue.delay_s if self._writeback else 0.0)

    async def commit(self, dirty_file: DirtyFile) -> None:
        """Make the present content durable: at the origin, or with `writeback` on this disk, to be uploaded later. If the
        journal was removed, the content is uploaded in any case. Raises the error; then the dirty file stays pending, and
        its upload is retried in the background. With `writeback`, a failure of an upload since the last commit is also
        raised, once."""
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
        except JournalRemoved:  # only the origin can make it durable until the next mount
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
        """Plan the upload of a file that has changes, unless one is planned or running."""
        if dirty_file.waits:
            self._queue.plan(dirty_file, self._queue.delay_s)

    async def moved(self, old: ObjectId, new: ObjectId) -> None:
        """Make the cached blocks of `old` those of `new`, because the origin has copied or moved the object."""
        if not self._hangs():
            await self._store.recast(old, new)

    async def keep_cached(self, version: ObjectId, dirty_file: DirtyFile | None) -> None:
        """Have the next daemon find what is cached of `version`, also if this one is killed. With a clean `dirty_file`, that
        is the version that it was uploaded as; if the cache is just adopting it, that comes first."""
        if self._hangs():
            return
        async with dirty_file.lock if dirty_file is not None else nullcontext():
            if dirty_file is not None and dirty_file.stored is not None:
                version = dirty_file.stored.version(dirty_file.origin.source)
            await self._store.list_all(version)

    def nameless(self) -> list[DirtyFile]:
        """The dirty files whose names are removed, which handles have open. After `recover`: files of handles of the
        previous daemon."""
        return [d for d in self._dirty_files.values() if d.discarded]

    def pending(self) -> list[DirtyFile]:
        """The dirty files whose present content the origin does not have."""
        return [d for d in self._dirty_files.values() if not d.discarded and _is_pending(d)]

    @property
    def elsewhere(self) -> list[tuple[str, int]]:
        """(source, bytes) of each file of an earlier run that cannot be uploaded, because its source is not mounted."""
        return self._records.elsewhere

    @property
    def stored_before(self) -> list[StoredFile]:
        """After `recover`: the files that the origin has got from the previous daemon, and that were not settled yet."""
        return self._records.stored_before

    async def note(self, name: str, row: Mapping[str, Any] | None) -> None:
        """Store a JSON object durably for the filesystem; None removes it. Raises `NoRoom`, `CacheUnusable` if it is not
        stored. A removal that fails is logged, and tried again."""
        if row is None:
            # What the object is about is done, so no caller gets an error, nor waits for a disk that hangs.
            with suppress(DiskHangs):
                await self._records.remove(name, HANGS_AFTER_S, table=NOTES)
        else:
            await self.journal.write(NOTES, name, row, within_s=HANGS_AFTER_S)

    def notes(self) -> dict[str, dict[str, Any]]:
        """The objects that `note` has stored and not removed, by name."""
        return self.journal.rows(NOTES)

    # -- records for the next daemon -----------------------------------------------------------------

    def outlive(self, dirty_file: DirtyFile, ino: int, *, named: bool) -> None:
        """Set the inode that the file has with the next daemon, too. A file that is not `named` is about to be discarded,
        and gets no record yet."""
        dirty_file.record.ino = ino
        if named:
            self.noted(dirty_file)

    def noted(self, dirty_file: DirtyFile) -> None:
        """Write or remove the record for the next daemon, after a change of the file's state."""
        if self._disk.shared is None or not dirty_file.ino:
            return
        if dirty_file.id not in self._dirty_files:
            return  # it was settled while a rename of it waited for the origin
        # A file that is being discarded gets no record. If it has one, the record stays right: the name comes back if the
        # origin refuses the removal, or if this daemon dies before.
        if dirty_file.discarded and not self._is_noted(dirty_file):
            return
        if dirty_file.handles or not dirty_file.acknowledged:
            self._put_record(dirty_file)
        else:  # the journal has the file, and a record would become out of date
            self._forget(dirty_file)

    def _is_noted(self, dirty_file: DirtyFile) -> bool:
        return self._disk.shared is not None and dirty_file.id in self._disk.shared.records

    def _put_record(self, dirty_file: DirtyFile) -> None:
        assert self._disk.shared is not None
        dirty_file.record.says_clean = not dirty_file.dirty
        if not self._disk.shared.records.put(dirty_file.id, dirty_file.mtime_ns, dirty_file.resumed_row()):
            log.info("%s: too many files are being written to outlive this process", dirty_file.key)

    def note_removed(self, dirty_file: DirtyFile) -> None:
        """Say in the record for the next daemon, if there is one, that the file is being discarded: it is kept for its users
        only."""
        dirty_file.content.name_gone()
        if self._is_noted(dirty_file):
            self._put_record(dirty_file)

    def _forget_acknowledged(self, dirty_file: DirtyFile) -> None:
        """Remove the record of a file that the journal has and no process has open: many such files may wait for uploads."""
        if dirty_file.acknowledged and not dirty_file.handles:
            self._forget(dirty_file)

    def _forget(self, dirty_file: DirtyFile) -> None:
        """Remove the record of a dirty file for the next daemon. If its row is out of date, the record stays, and says so.
        If the row should be gone, the record has no inode, because a process may open that for another file."""
        if self._disk.shared is None:
            return
        if dirty_file.acknowledged and dirty_file in self._records.unwritten:
            self._put_record(dirty_file)
        elif self.journal.leaves(dirty_file.id) and dirty_file.ino:
            dirty_file.record.ino = 0
            self._put_record(dirty_file)
        else:
            self._disk.shared.records.drop(dirty_file.id)

    def _removed_late(self, name: str) -> None:
        """Handle the end of a removal that a failed transaction had left: the next daemon need not know of the file."""
        if self._disk.shared is not None and name not in self._dirty_files:
            self._disk.shared.records.drop(name)

    def _drop(self, dirty_file: DirtyFile) -> None:
        """Remove the staging file of a dirty file whose name is removed. Open handles can still use it."""
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
        key: str,
        *,
        base: str | None = None,
        over: DirtyFile | None = None,
        upload: bool = True,
        leaves: Callable[[ObjectInfo], Awaitable[object]] | None = None,
    ) -> bool:
        """Move a dirty file to `key`. `base` is the etag of the version to replace there. `over` is the dirty file to
        replace, which the caller discards; a crash restores at most one of the two.

        If the origin has no version of the file, nothing is sent. Otherwise the file is uploaded under the new key. If it is
        half written, or clean, or without `upload`, the origin copies its object instead.

        True if the origin still has a version of the file at the old key, which the caller deletes. `leaves` is called with
        that version before a crash could restore the dirty file under the new key. Raises the errors of uploads and copies;
        then the file has its old key."""
        async with dirty_file.trying.turn:
            await self._queue.halt(dirty_file, gives_up=True)
            if dirty_file.discarded:
                return False
            dirty_file.look()
            own = dirty_file.committed or await self._own(dirty_file)
            whole = not dirty_file.between and (not dirty_file.kernel.in_passthrough or dirty_file.reclaim())
            first = upload and whole and dirty_file.dirty and own is not None
            before, to = dirty_file.where, Where(key, base, [], None)
            if first:
                await self._records.acknowledge(dirty_file, HANGS_AFTER_S)
            comes_back = self._records.has_promised(dirty_file) or self._disk.shared is not None
            # A clean file that is open comes back, too: its users may go on writing it.
            comes_back &= dirty_file.dirty or dirty_file.handles > 0
            if own is not None and leaves is not None and comes_back:
                await leaves(own)
            if own is None or first:
                await self._move(dirty_file, to, over)
            else:
                await self._copy(dirty_file, own, to, over)
            if dirty_file.dirty and not first:
                self._retry_soon(dirty_file)
        if first:
            await self._send_renamed(dirty_file, before)
        return own is not None

    async def _own(self, dirty_file: DirtyFile) -> ObjectInfo | None:
        """`DirtyFile.own_object`, without a request if the origin cannot have one."""
        if dirty_file.base is None and not dirty_file.trying.unsure:
            return None
        return await dirty_file.own_object()

    async def copy_comes(self, dirty_file: DirtyFile, size: int) -> None:
        """Note that a rename, which is to replace a dirty file, is about to copy an object of `size` bytes to its key. If
        that rename fails, also in a crash, the copy goes with the dirty file. A failure of the disk does not stop it."""
        dirty_file.copy_comes(size)
        with suppress(CachefsError):
            await self._records.moved(dirty_file, HANGS_AFTER_S)

    async def _copy(self, dirty_file: DirtyFile, own: ObjectInfo, to: Where, over: DirtyFile | None) -> None:
        """Move a dirty file to another key, and have the origin copy its object `own` there. If the journal refuses, nothing
        is copied."""
        before, source = dirty_file.where, dirty_file.origin.source
        if over is not None:
            await self.copy_comes(over, own.size)
        await self._move(dirty_file, to._replace(copied=own.size), over)
        async with self._or_back(dirty_file, before):
            info = await dirty_file.origin.copy(before.key, to.key, size=own.size, etag=own.etag)
        with trio.CancelScope(shield=True):  # because the file has its new key
            dirty_file.copied(own, info)
            # After `copied`: if the cache is adopting the file just now, `_adopted_as` sees the new version afterwards.
            await self.moved(own.version(source), info.version(source))
            # Not if an acknowledgement is being written: its caller is told that a crash keeps the file.
            if not self._records.has_promised(dirty_file):
                await self._records.forget(dirty_file)
        if dirty_file.stored is info:
            self.on_committed(dirty_file, info)

    async def _move(self, dirty_file: DirtyFile, to: Where, over: DirtyFile | None) -> None:
        """Move a dirty file to another key; its multipart upload is aborted. After an error it has its old key."""
        before = dirty_file.where
        await dirty_file.sender.abandon()  # also aborts parts that were sent after the attempt has ended
        async with self._or_back(dirty_file, before):
            dirty_file.moved(to, over)
            await self._records.moved(dirty_file, HANGS_AFTER_S)

    @asynccontextmanager
    async def _or_back(self, dirty_file: DirtyFile, before: Where) -> AsyncIterator[None]:
        """If the block fails, move a dirty file back to its old key."""
        try:
            yield
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._move_back(dirty_file, before)
            raise

    async def _move_back(self, dirty_file: DirtyFile, before: Where) -> None:
        """Move a dirty file back to its old key, because its rename has failed. If the journal fails, too, its row may have
        the new key until it is written again, and the record for the next daemon says so."""
        await dirty_file.sender.abandon()  # parts that were sent meanwhile have the new key
        dirty_file.moved(before)
        try:
            await self._records.moved(dirty_file, HANGS_AFTER_S)
        except CachefsError:
            self._records.write_later(dirty_file)
            self.noted(dirty_file)

    async def _send_renamed(self, dirty_file: DirtyFile, before: Where) -> None:
        """Upload the file under its new key. If that fails, move it back to where it was `before`."""
        wanted = dirty_file.content.generation
        error: BaseException = OriginFailed(
            f"{dirty_file.origin.name(dirty_file.key)} is being written: it keeps its name"
        )
        try:
            await self._queue.upload(dirty_file)
        except (CachefsError, trio.Cancelled) as exc:
            error = exc
        if not dirty_file.has(wanted):
            with trio.CancelScope(shield=True):
                await self._back(dirty_file, wanted, before)
        # A caller that is cancelled has to hear that the file is renamed, if it is.
        if not dirty_file.has(wanted):
            raise error

    async def _back(self, dirty_file: DirtyFile, wanted: int, before: Where) -> None:
        """Move a file back to where it was `before`, unless the content of the generation `wanted` was uploaded meanwhile,
        also by an upload whose reply was lost."""
        async with dirty_file.trying.turn:
            await self._queue.halt(dirty_file)
            if dirty_file.has(wanted) or dirty_file.discarded:
                return
            if (info := await self._sent(dirty_file)) is None:
                await self._move_back(dirty_file, before)
                dirty_file.trying.unsure = True
                return
            await dirty_file.sender.abandon()
            await self._queue.stored(dirty_file, Stored(wanted, info), patient=False)
        if not dirty_file.dirty and not dirty_file.handles:
            self._settle_soon(dirty_file)

    async def _sent(self, dirty_file: DirtyFile) -> ObjectInfo | None:
        """The object at a file's key, if an upload since its last rename has made it. None also if the origin does not
        answer."""
        over = dirty_file.record.over
        with suppress(CachefsError):
            info, token = await dirty_file.origin.look(dirty_file.key)
            if token in dirty_file.record.tokens and (over is None or not over.has_made(token)):
                return info
        return None

    def _retry_soon(self, dirty_file: DirtyFile) -> None:
        """Retry a failed upload at once, because the file has another key now."""
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
        """Give up a dirty file, because its name is removed. It is not uploaded any more; its users can still read and write
        it. `instead` removes the name; it is called when no upload is running. Without it, an object that a last upload may
        have made is deleted at the origin, unless another file has `replaced` the name. Until the origin has made this
        change, the dirty file survives a crash. If the change fails, the dirty file is as before."""
        stored, deletes = dirty_file.stored, False
        dirty_file.content.name_goes()
        try:
            await dirty_file.trying.turn.acquire()
        except BaseException:
            await self._comes_back(dirty_file)
            raise
        try:
            try:
                await self._queue.halt(dirty_file, gives_up=True)
                made = dirty_file.trying.unsure or dirty_file.stored is not stored
                if instead is not None:
                    deletes = not replaced
                    await instead()
                # Before the row is removed: after a kill in between, the object would have the name, and not its attributes.
                elif made and not replaced and (not dirty_file.conflicts or await self._own(dirty_file)):
                    deletes = True
                    await dirty_file.origin.delete(dirty_file.key)
            except BaseException:
                await self._undo(dirty_file, deletes=deletes)
                await self._comes_back(dirty_file)
                raise
            # Before the staging file is unlinked, which the next daemon would miss.
            self.note_removed(dirty_file)
            with trio.CancelScope(shield=True):  # because the name is removed
                # Without a cancel scope if it need not wait, because that costs as much as the rest of a removal.
                with trio.move_on_after(GIVING_UP_S) if dirty_file.sender.has_begun else nullcontext():
                    await dirty_file.sender.abandon()  # what is not aborted by then is aborted later
                try:
                    # Not if the dirty file is clean, because the cache may be adopting its staging file.
                    unlinks = dirty_file.content.is_ours and dirty_file.dirty
                    await self._forget_row(dirty_file, unlinks=unlinks)
                finally:
                    # Otherwise a file that is replaced again and again would keep all earlier ones in memory.
                    dirty_file.record.over = None
                    self._drop(dirty_file)
        finally:
            dirty_file.trying.turn.release()

    async def _forget_row(self, dirty_file: DirtyFile, *, unlinks: bool = False) -> None:
        """`Records.forget` for a file that is removed or clean. Raises `DiskHangs`. Then an acknowledgement of the file may
        have the row, and wait for the disk: the row is removed after it."""
        try:
            await self._records.forget(dirty_file, HANGS_AFTER_S, unlinks=unlinks)
        except DiskHangs:
            self._queue.start(f"the row of {dirty_file.key}", self._forget_row_late, dirty_file)
            raise

    async def _forget_row_late(self, dirty_file: DirtyFile) -> None:
        if dirty_file.discarded or not dirty_file.dirty:
            await self._records.forget(dirty_file)

    async def _undo(self, dirty_file: DirtyFile, *, deletes: bool) -> None:
        """Have a clean file sent once more, if the removal of its name has failed, and the origin may have carried it out
        all the same: it has a copy of another file in place of the object, or has deleted it (`deletes`). A dirty file is
        sent anyway."""
        if dirty_file.dirty or not (deletes or dirty_file.record.copied is not None):
            return
        if self._dirty_files.get(dirty_file.id) is not dirty_file:
            return
        with trio.CancelScope(shield=True), suppress(CachefsError):
            with trio.move_on_after(GIVING_UP_S), suppress(CachefsError):
                try:
                    info, token = await dirty_file.origin.look(dirty_file.key)
                except NotFound:
                    if not deletes:
                        return
                    dirty_file.base = None
                else:
                    if info.etag == dirty_file.base or not dirty_file.is_own(info, token):
                        return
            await dirty_file.send_again()

    async def _comes_back(self, dirty_file: DirtyFile) -> None:
        """Handle a removal that has failed: the name shows the dirty file as before."""
        if not dirty_file.dirty and dirty_file.content.row is not Row.NONE:  # its upload has ended meanwhile
            with trio.CancelScope(shield=True), suppress(DiskHangs):
                await self._forget_row(dirty_file)
        dirty_file.content.name_stays()
        if self._is_noted(dirty_file):
            self.noted(dirty_file)
        if dirty_file.dirty and (dirty_file.acknowledged or not dirty_file.handles):
            self._queue.plan(dirty_file, 0.0)
        elif not dirty_file.handles:  # the last user has closed the file meanwhile
            self._settle_soon(dirty_file)

    # -- called by dirty files: see `Owner` -----------------------------------------------------------

    def wrote(self, dirty_file: DirtyFile) -> None:
        """Handle a change that was made through the daemon."""
        dirty_file.mtime_ns = self._now_ns()
        self._touch(dirty_file)
        if not (self._writeback or dirty_file.discarded or dirty_file.kernel.shared):
            dirty_file.sender.push(self._queue.nursery)

    def found_changed(self, dirty_file: DirtyFile) -> None:
        """Handle a change that was made past the daemon."""
        self._touch(dirty_file)
        self.on_changed(dirty_file)

    def _touch(self, dirty_file: DirtyFile) -> None:
        """Update the record for the next daemon after a change of the content. If the record says already that the file is
        dirty, only the mtime is written."""
        if self._disk.shared is None:
            return
        if dirty_file.record.says_clean:
            self.noted(dirty_file)
        else:
            self._disk.shared.records.touch(dirty_file.id, dirty_file.mtime_ns)

    async def keep(self, dirty_file: DirtyFile) -> None:
        await self._records.keep(dirty_file)

    def journaled(self, dirty_file: DirtyFile) -> bytes | None:
        return self.journal.content(dirty_file.id)

    async def orphaned(self, dirty_file: DirtyFile, upload: Upload) -> None:
        """Have an upload aborted later that will not be completed."""
        await self._records.orphaned(dirty_file.origin.source, upload.key, upload.state())

    def _begin_planned(self, dirty_file: object) -> bool:
        """Begin the planned uploads of other dirty files now, without retries of failed ones. True if any upload of these
        is running or due."""
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
        """Settle small files that are in memory and not in use: one call in a thread makes all their cache files."""
        chosen = list[DirtyFile]()
        for dirty_file in dict.fromkeys(waiting):  # a file that was opened meanwhile waits twice
            if self._goes_with_others(dirty_file):
                chosen.append(dirty_file)
            else:
                self._queue.start(f"settling {dirty_file.key}", self._settle, dirty_file)
        await self._settle(*chosen)

    def _goes_with_others(self, dirty_file: DirtyFile) -> bool:
        """True if a file can be given to the cache together with others. Otherwise `_settle` handles it alone."""
        if dirty_file.handles or dirty_file.discarded or dirty_file.lock.locked():
            return False
        if dirty_file.content.state is not State.CLEAN or dirty_file.sender.upload is not None:
            return False
        return dirty_file.file.in_memory and dirty_file.size > 0 and not dirty_file.file.spoiled

    async def _settle(self, *dirty_files: DirtyFile) -> None:
        """Settle clean files that are not in use: give them to the cache together, and remove those that it refuses."""
        async with AsyncExitStack() as locks:
            for dirty_file in dirty_files:
                await locks.enter_async_context(dirty_file.lock)
            chosen = [dirty_file for dirty_file in dirty_files if self._is_settling(dirty_file)]
            for dirty_file in chosen:
                if dirty_file.sender.upload is not None:
                    # For example if an upload was completed, and the reply shows another client's newer object.
                    await dirty_file.sender.abandon()
            given = [dirty_file for dirty_file in chosen if not dirty_file.content.adopted]
            for dirty_file in given:
                dirty_file.content.settle()
            await self._give_to_cache(given)
            for dirty_file in chosen:
                # If a user has opened the file meanwhile, the last `release` settles it.
                if self._is_settling(dirty_file) and not dirty_file.discarded:
                    if not dirty_file.content.adopted:
                        dirty_file.file.remove()
                    self._settled(dirty_file)

    def _is_settling(self, dirty_file: DirtyFile) -> bool:
        """True if a file is clean and not in use, and no name shows it. Otherwise a later event settles it."""
        if self._dirty_files.get(dirty_file.id) is not dirty_file:
            return False  # it was removed or settled
        try:
            if dirty_file.kernel.in_passthrough and not dirty_file.reclaim():
                return False
        except CachefsError:  # the staging file cannot be examined now
            self._settle_later(dirty_file)
            return False
        # A running attempt settles the file at its end.
        if dirty_file.handles or dirty_file.committed is None or dirty_file.attempt is not None:
            return False
        if not self.on_settling(dirty_file):
            self._settle_later(dirty_file)
            return False
        return True

    def _settled(self, dirty_file: DirtyFile) -> None:
        """Forget a dirty file that is settled."""
        self._forget(dirty_file)
        if self._dirty_files.pop(dirty_file.id, None) is not None:
            self.on_settled(dirty_file)

    async def _give_to_cache(self, dirty_files: Sequence[DirtyFile]) -> None:
        """Give the staging files of these dirty files to the cache, which may refuse some. The caller holds their locks. All
        are in the state SETTLING before, and none is afterwards."""
        adopted = dict[DirtyFile, Stored]()
        with ExitStack() as used:
            try:
                for dirty_file in dirty_files:
                    with suppress(CachefsError):  # `_adopt` meets the error again, and logs it
                        used.enter_context(dirty_file.file.used())
                adopted = await self._adopt(dirty_files)
                for dirty_file, stored in adopted.items():
                    await self._adopted_as(dirty_file, stored)
            finally:
                for dirty_file in dirty_files:
                    dirty_file.content.settled(dirty_file in adopted)
            for dirty_file in dirty_files:
                name = dirty_file.content.name
                if dirty_file not in adopted:
                    # While a removal may fail, the staging file stays. Once it cannot, `_drop` may have come before this.
                    if name is Name.GONE:
                        dirty_file.file.remove()
                    continue
                if dirty_file.handles or name is Name.GONE:
                    continue
                # The cache has the staging file, which cannot be opened any more once the block of `used` has ended. So
                # there is no await from here to that end. If a removal is running and fails, the name shows the file again.
                if name is Name.GOING or self._shown_from_cache(dirty_file):
                    dirty_file.open()
                    self._release_later(dirty_file)
                else:
                    self._settled(dirty_file)

    async def _adopt(self, dirty_files: Sequence[DirtyFile]) -> dict[DirtyFile, Stored]:
        """Give each file to the cache as the version that was uploaded last. Returns those that the cache has taken, with
        these versions."""
        adopted, in_memory = dict[DirtyFile, Stored](), dict[DirtyFile, Stored]()
        contents = list[tuple[ObjectId, bytes]]()
        try:
            for dirty_file in dirty_files:
                file, stored = dirty_file.file, dirty_file.content.stored
                assert stored is not None
                if stored.overtaken or not dirty_file.size or self._store.hangs or self._disk.hangs:
                    continue
                file.check()
                version = stored.info.version(dirty_file.origin.source)
                if (held := file.held) is not None:
                    in_memory[dirty_file] = stored
                    contents.append((version, held))
                    continue
                with file.used():
                    if await self._store.adopt(version, file.path):
                        adopted[dirty_file] = stored
            if in_memory:
                kept = await self._store.adopt_bytes(contents)
                for (dirty_file, stored), done in zip(in_memory.items(), kept, strict=True):
                    if done:
                        adopted[dirty_file] = stored
                        dirty_file.file.remove()
        except CachefsError as exc:
            log.info("not kept here: %s: %s", _names(dirty_files), exc)
        except Exception:
            log.exception("the cache failed to take %s", _names(dirty_files))
        return adopted

    async def _adopted_as(self, dirty_file: DirtyFile, stored: Stored) -> None:
        """If a file was renamed while the cache adopted it as `stored`, have it cached as the version under its new key."""
        while (now := dirty_file.content.stored) is not None and now is not stored:
            source = dirty_file.origin.source
            await self.moved(stored.info.version(source), now.info.version(source))
            stored = now

    def _settle_later(self, dirty_file: DirtyFile) -> None:
        """Settle a dirty file after `LOOK_S`."""

        async def settle() -> None:
            await trio.sleep(LOOK_S)
            await self._settle(dirty_file)

        self._queue.start(f"settling {dirty_file.key}", settle)

    def _hangs(self) -> bool:
        """True if a disk of the cache is known to hang: callers with a deadline need not wait for it."""
        return self._store.hangs or self.journal.hangs or self._disk.hangs

    # -- start, run and stop -----------------------------------------------------------------------

    async def run(self) -> None:
        """Upload due files and clear up at the origin, until cancelled."""
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
        """Wait until the origin has all dirty files that are acknowledged or closed, and for which `under` returns True.
        Files with changes that are neither closed nor synced are left out, unless `at_the_end`. Without a deadline each
        upload is tried once; with one it is retried until then, unless that would be in vain. Returns the files that the
        origin does not have."""
        pending = [d for d in self.pending() if d.acknowledged or not d.handles]
        chosen = [d for d in pending if (under is None or under(d)) and (at_the_end or not d.between)]

        async def one(dirty_file: DirtyFile) -> None:
            """Upload one file; return when the origin has it, or when no further attempt is to be made."""
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
        """Restore the dirty files that an earlier run has left (`recovery.py`). Called once, before any other method.
        Returns the acknowledged files, which are pending again. With `memory`, files that were in use go on, too.
        `open_inos` are the inodes that the kernel has open."""
        recovery = Recovery(self, self._records, self._disk, open_inos)
        resumed = await recovery.resume()
        self._dirty_files |= resumed
        restored = await recovery.restore()
        recovery.drop_records()
        for dirty_file in resumed.values():
            if dirty_file.discarded:
                # Perhaps only the record of the file that has replaced it says so, which may be dropped first.
                self._put_record(dirty_file)
            elif dirty_file.ino not in open_inos:
                # No process has the file open. The upload waits, because the kernel may repeat an open request.
                if self._writeback:
                    with suppress(CachefsError):  # the upload fails with the error again
                        await self._records.acknowledge(dirty_file)
                self._queue.plan(dirty_file, max(REPEATED_S, self._queue.delay_s if self._writeback else 0.0))
        for dirty_file in restored:
            self._dirty_files[dirty_file.id] = dirty_file
            self._queue.plan(dirty_file, self._queue.delay_s)
        return restored

    async def hand_over(self) -> None:
        """Close the journal for the next daemon, which takes over all dirty files. Called after all tasks have ended."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(GIVING_UP_S):
                await self._disk.quiet()
                await self.journal.quiet()
            await trio.to_thread.run_sync(self.journal.close)

    async def aclose(self, deadline_s: float) -> list[DirtyFile]:
        """Upload as much as possible until the deadline; returns the files left for the next run. Open files that were never
        acknowledged are given up. Works also if the nursery of the constructor has been cancelled."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                self._queue.nursery = nursery
                left = await self.flush(deadline_s=deadline_s, at_the_end=True)
                with trio.move_on_after(GIVING_UP_S):
                    for dirty_file in list(self._dirty_files.values()):
                        # The last step of an upload that the origin has carried out: its row is being removed.
                        if dirty_file.attempt is not None and not dirty_file.dirty:
                            await dirty_file.attempt.done.wait()
                for dirty_file in list(self._dirty_files.values()):
                    with trio.move_on_after(GIVING_UP_S):
                        await run_contained(f"giving up {dirty_file.key}", self._give_up, dirty_file)
                self._queue.close()
                with trio.move_on_after(GIVING_UP_S):
                    await self._disk.quiet()
                    await self.journal.quiet()
                nursery.cancel_scope.cancel()
            await trio.to_thread.run_sync(self.journal.close)
        return left

    async def _give_up(self, dirty_file: DirtyFile) -> None:
        """End a dirty file at a stop: settle it if it is clean, leave it to the next run if it is acknowledged or closed,
        and discard it otherwise."""
        clean, name = not dirty_file.dirty, dirty_file.origin.name(dirty_file.key)
        if not clean and not dirty_file.acknowledged and dirty_file.handles:
            if not dirty_file.discarded:
                log.warning("%s was being written and is given up", name)
            await self.discard(dirty_file, replaced=True)
            return
        if not clean:
            try:
                # Before `halt`, which may hang: the next run must find all remaining files.
                await self._records.acknowledge(dirty_file)
            except CachefsError as exc:
                dirty_file.trying.failure = exc  # tells the daemon whether the next mount finds the file
                self._queue.warn(dirty_file, exc, f"{name}: {exc}")
            await self._queue.halt(dirty_file)
        while dirty_file.handles:
            dirty_file.release()
        if clean:
            await self._settle(dirty_file)

    def status(self) -> dict[str, Any]:
        """Plain values for `cachefs status`. `dirty_files` are the `SHOWN` whose last change is the oldest."""
        pending = sorted(self.pending(), key=lambda dirty_file: dirty_file.mtime_ns)
        failed = [dirty_file for dirty_file in pending if dirty_file.failure is not None]
        return {
            "writeback": self._writeback,
            "pending": len(pending),
            "pending_bytes": sum(dirty_file.size for dirty_file in pending),
            "uploading": sum(dirty_file.attempt is not None for dirty_file in pending),
            "failed": len(failed),
            "last_error": str(failed[-1].failure) if failed else "",
            "oldest_s": max(0.0, (self._now_ns() - pending[0].mtime_ns) / 1e9) if pending else 0.0,
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

    async def _fill(self, dirty_file: DirtyFile, base: ObjectId, count: int) -> None:
        """Copy the first `count` bytes of `base` into a new dirty file."""
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
    """True if the origin may not have the present content."""
    try:
        return dirty_file.look() or dirty_file.dirty
    except CachefsError:
        return True  # the staging file cannot be examined now, and may have changed


def _names(dirty_files: Sequence[DirtyFile]) -> str:
    return ", ".join(dirty_file.origin.name(dirty_file.key) for dirty_file in dirty_files)

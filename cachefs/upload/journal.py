"""The journal of the uploads: what must survive a crash, in a database that is synced with each transaction.

`Journal` is the database. Rows that are written at the same time share one transaction, and one sync of the directory that
has their staging files. So many small files cost the disk one wait. A damaged journal is never emptied. It is refused with
the name of its directory, because the staging files may be the only copy of a user's work.

`Records` writes the rows. A dirty file is *acknowledged* once its writer was told that its bytes are safe on this disk, or
that they did not reach the origin. After a crash it comes back, with all that its staging file holds then, as on a local
file system.

A small file that is acknowledged has its *content* in the journal, written in the same transaction as its row. Then its
staging file need not be synced, and is not even made if the file lies in memory. The next start keeps a staging file that is
there, which may be newer, and removes the content. If there is none, if it cannot be synced, or if the machine was rebooted,
the content stays in the journal, and the file lies in memory again. So a start also succeeds on a full disk. A stop writes
the staging files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import trio

from cachefs.base.behind import GATHER_S
from cachefs.base.database import Database, Put, is_full, read_mark
from cachefs.base.errors import CachefsError, CacheInUse, CacheUnusable, NoRoom
from cachefs.base.linux import HANGS_AFTER_S
from cachefs.base.tasks import in_thread
from cachefs.origin import ObjectInfo, Origin
from cachefs.upload import orphans
from cachefs.upload.content import Row
from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.staging import HELD, make_acknowledged, remove, sync_bytes, sync_names

log = logging.getLogger(__name__)

FORMAT, EARLIER = "journal-3", ("journal-1", "journal-2")
"""The format that is written, and earlier formats that are read, too. Format 1 has no contents. In format 2 each file with
a content also has a staging file."""

DIRTY_FILES, ORPHANS, NOTES, CONTENTS = "drafts", "orphans", "notes", "contents"
"""The tables: dirty files by id; multipart uploads to abort, by a hash of key and upload id; objects of the filesystem by
name (`Uploads.note`); contents of small dirty files by id."""

CONTENTS_BYTES = 64 << 20
"""Most bytes of all contents. Of further acknowledged files the staging files are synced. A bound of the database, which
never shrinks: hundreds of files of 100 KB, as many as are written in the second before their uploads begin."""

UNCHANGED: Final = "unchanged"
"""In place of a content: the journal keeps the content that it has of the file."""


def refuse_foreign(directory: Path) -> None:
    """Raise `CacheUnusable` if the journal has a format that this version cannot read. Changes nothing. Called before any
    other database of the cache directory is opened, because opening those drops data of unknown formats."""
    found, _ = read_mark(directory)
    if found not in ("", FORMAT, *EARLIER):
        raise CacheUnusable(
            f"what was written here and is not at the origin yet is noted in {directory} in the format {found!r}, and this "
            f"version reads {FORMAT!r}: start the version of cachefs that wrote it, until all is at the origin"
        )


class DiskHangs(CacheUnusable):
    """The journal's disk does not answer in time. A row that was given to `Journal.write` is written once it does."""


class JournalRemoved(CacheUnusable):
    """The journal was removed from outside: the next start would not find rows that are written now."""


class _Batch:
    """Rows that wait for one transaction (None: the row is removed), and its outcome. The transaction calls `first` before
    it writes, and `then` once the rows are on the disk. With `names`, it also syncs the staging directory before. It
    begins when `hurry` is set, or after `GATHER_S`. `ended` is set at its end, and `error` if it has failed."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, bytes], bytes | None] = {}
        self.first: list[Callable[[], None]] = []
        self.then: list[Callable[[], None]] = []
        self.names = False
        self.hurry, self.ended = trio.Event(), trio.Event()
        self.error: Exception | None = None


class Journal:
    """The database. Rows are JSON objects. Once `write` has returned, its row is on the disk."""

    def __init__(self, directory: Path, staging: Path | None = None, *, killed: bool = False) -> None:
        """Open or create the journal. Contents that an earlier run has left stay, except those whose files in `staging` may
        be newer (`_choose_contents`). For `killed` see `Database`. Blocking.

        Raises `CacheInUse` if another process has it open. Raises `CacheUnusable` if the database cannot be read, and then
        changes nothing. Raises `CacheUnusable` if a staging file cannot be removed; then the contents stay."""
        try:
            self._database = Database(
                directory,
                (DIRTY_FILES, ORPHANS, NOTES, CONTENTS),
                version=FORMAT,
                earlier=EARLIER,
                unsure=True,
                fsync=True,
                precious=True,
                killed=killed,
            )
        except CacheInUse:
            raise
        except CacheUnusable as exc:
            raise CacheUnusable(
                f"{exc}; cachefs recover {directory.parent} lists the files that it is about"
            ) from exc
        self.path = directory
        self._staging = staging
        self._last = self._next = _Batch()  # the batch that was written last, or is being written
        self._sizes: dict[str, int] = {}  # bytes of each content, by the dirty file's id
        # Rows that a failed transaction should have removed. The next transaction removes them together with its own, so
        # that the row of a replaced file never outlives the row of the file that replaced it.
        self._left: set[tuple[str, bytes]] = set()
        self._room = CONTENTS_BYTES  # bytes that further contents may have
        # Called with the id of a dirty file whose row was left by a failed transaction, once it is removed.
        self.on_removed_late: Callable[[str], None] = lambda key: None
        # Returns True if any disk of the cache is known to hang.
        self.hangs_elsewhere: Callable[[], bool] = lambda: False
        self._since = math.inf  # when the running transaction began; infinite if none is running
        try:
            self._choose_contents()
            self._database.sure()
        except CachefsError:
            self._database.close(clean=False)
            raise

    @property
    def hangs(self) -> bool:
        """True if a transaction has been running for more than `HANGS_AFTER_S`."""
        return self._since < trio.current_time() - HANGS_AFTER_S

    @property
    def removed(self) -> bool:
        """True if its files were removed from outside, though a second mount may have made new ones in their place."""
        return not self._database.in_place

    @property
    def left(self) -> str | None:
        """The id of a dirty file, or the name of a note, whose row a failed transaction has not removed; None if there is
        none."""
        return next((key.decode() for table, key in self._left if table != CONTENTS), None)

    def leaves(self, key: str) -> bool:
        """True if a failed transaction should have removed the row of this dirty file."""
        return (DIRTY_FILES, key.encode()) in self._left

    def remove_later(self, key: str) -> None:
        """Have the next transaction remove the row of this dirty file."""
        self._left |= {(DIRTY_FILES, key.encode()), (CONTENTS, key.encode())}

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        """All committed rows of a table, by key. Raises `CacheUnusable` if one is damaged: LMDB has no checksums."""
        try:
            return {key.decode(): json.loads(value) for key, value in self._database.scan(table)}
        except ValueError as exc:
            raise CacheUnusable(
                f"the database in {self.path} cannot be read (a row is damaged: {exc}), and nothing else knows what is in "
                f"it: move the directory away to begin without; cachefs recover {self.path.parent} lists the files that "
                "it is about"
            ) from exc

    # -- contents of small files -------------------------------------------------------------------

    def takes(self, key: str, size: int) -> bool:
        """True if a content of `size` bytes may be put for this dirty file, in place of the one that it may have already."""
        return size <= min(HELD, self._room + self._sizes.get(key, 0))

    def has_content(self, key: str) -> bool:
        """True if the journal has a content of this dirty file, or may have an older one after a failed transaction."""
        return key in self._sizes

    def content(self, key: str) -> bytes | None:
        """The committed content of a dirty file; None if there is none, or if the database cannot be read."""
        with suppress(CacheUnusable):
            return self._database.get(CONTENTS, key.encode())
        return None

    def contents_by_file(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        """The bytes of each content by the name of its staging file. `rows` are those of the dirty files."""
        return {row["file"]: self._sizes[key] for key, row in rows.items() if key in self._sizes}

    def _choose_contents(self) -> None:
        """For each content that an earlier run has left, keep the content or the staging file. Called at the start, before
        rows are written. Afterwards a file whose content stays has no staging file. Blocking. Raises `CacheUnusable`, and
        `NoRoom` if the directory cannot be synced."""
        rows, removed = self.rows(DIRTY_FILES), list[bytes]()
        for name, content in self._database.scan(CONTENTS):
            row = rows.get(name.decode())
            if row is None or not row["acknowledged"] or self._is_on_disk(row):
                removed.append(name)
            else:
                self._sizes[name.decode()] = len(content)
                self._room -= len(content)
        if not removed:
            return
        if self._staging is not None:
            sync_names(self._staging)
        try:
            self._database.write([(CONTENTS, name, None) for name in removed])
        except NoRoom as exc:
            log.warning("%s", exc)
            self._left |= {(CONTENTS, name) for name in removed}
            # The database still has an older content. Each later acknowledgement must replace it, as in `_commit`.
            self._sizes |= {
                key: 0 for name in removed if rows.get(key := name.decode(), {}).get("acknowledged")
            }

    def _is_on_disk(self, row: Mapping[str, Any]) -> bool:
        """At the start: True if an acknowledged file has a staging file that counts more than its content, and is synced.
        Otherwise it has no staging file afterwards. Blocking. Raises `CacheUnusable`."""
        if self._staging is None:
            return False
        path = self._staging / row["file"]
        if self.may_be_newer(path) and sync_bytes(path):
            return True
        # After a failed sync the next one would succeed, although the disk does not have the bytes.
        remove(path)
        return False

    def may_be_newer(self, path: Path) -> bool:
        """At the start: True if a staging file exists that counts more than its content. After a reboot none does, because
        the power may have failed before it was written out."""
        return self._database.same_boot and path.exists()

    def _move_contents(self) -> None:
        """Move all contents of acknowledged files to their staging files, on the disk, and remove them from the journal.
        Called before the journal is closed, because the next start could not tell whether a staging file was written later
        than its content. Blocking. Raises `NoRoom`, `CacheUnusable`; then the contents stay."""
        staging, found = self._staging, self._database.scan(CONTENTS)
        if not found or staging is None:
            return
        rows = self.rows(DIRTY_FILES)
        for name, content in found:
            row = rows.get(name.decode())
            if row is None or not row["acknowledged"]:
                continue
            path = staging / row["file"]
            if not sync_bytes(path):  # otherwise the file has all that was written, and may be newer
                remove(path)  # as in `_is_on_disk`
                make_acknowledged(path, content, partial(orphans.mark, row=row))
        sync_names(staging)
        self._database.write([(CONTENTS, name, None) for name, _ in found])
        self._sizes.clear()
        self._room = CONTENTS_BYTES

    # -- writing -----------------------------------------------------------------------------------

    async def write(
        self,
        table: str,
        key: str,
        row: Mapping[str, Any] | None,
        *,
        content: bytes | Literal["unchanged"] | None = UNCHANGED,
        first: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
        within_s: float = math.inf,
        patient: bool = False,
    ) -> None:
        """Put a row, or remove it (None), and wait until that is on the disk.

        `content`: of a dirty file, the bytes are put in the same transaction, or removed (None); a row that is removed takes
        its content along. `first` and `then` are called in the worker thread, before the row is written and once it is on
        the disk; they must not raise. A `patient` row waits for the next row that is not patient, `GATHER_S` at most, to
        share its transaction. A cancelled caller still waits.

        Raises `NoRoom`, `CacheUnusable`. With a finite `within_s`, raises `DiskHangs` if the transaction takes longer than
        so many seconds, or at once if a disk is known to hang; the row is written once the disk answers."""
        batch = self._next
        batch.first += [first] if first is not None else []
        batch.then += [then] if then is not None else []
        batch.rows[table, key.encode()] = None if row is None else json.dumps(row).encode()
        batch.names |= row is not None and not isinstance(content, bytes)
        if table == DIRTY_FILES and (row is None or content is not UNCHANGED):
            self._put_content(batch, key, content if isinstance(content, bytes) else None)
        if not patient:
            batch.hurry.set()
        if self._since < math.inf:
            await self._wait_for(batch, within_s)
        elif patient or within_s < math.inf:
            self._start_committing()
            await self._wait_for(batch, within_s)
        else:
            # The usual case, one writer after the other: the caller commits, and waits for the worker thread only.
            with trio.CancelScope(shield=True):
                await self._commit()
            self._since = math.inf
            if self._next.rows:
                self._start_committing()
        if not batch.ended.is_set():
            raise DiskHangs("the disk of the journal does not answer")
        if batch.error is not None:
            raise batch.error

    async def _wait_for(self, batch: _Batch, within_s: float) -> None:
        """Wait for the end of a batch, at most `within_s` seconds from the begin of the running transaction."""
        known = within_s < math.inf and self.hangs_elsewhere()
        began = -math.inf if known else min(trio.current_time(), self._since)
        # Shielded, because a row that was put is written: its caller must know the outcome.
        with trio.CancelScope(deadline=began + within_s, shield=True):
            await batch.ended.wait()

    def _put_content(self, batch: _Batch, key: str, content: bytes | None) -> None:
        """Put or remove (None) a content, and count its bytes."""
        before = self._sizes.pop(key, None)
        if before is None and content is None:
            return
        self._room += before or 0
        if content is not None:
            self._sizes[key] = len(content)
            self._room -= len(content)
        batch.rows[CONTENTS, key.encode()] = content

    def _start_committing(self) -> None:
        """Start a task that commits the rows that wait."""
        self._since = trio.current_time()
        trio.lowlevel.spawn_system_task(self._commit_all)

    async def _commit_all(self) -> None:
        """Commit batches one after the other, until no row waits."""
        while self._next.rows:
            if not self._next.hurry.is_set():
                with trio.move_on_after(GATHER_S):
                    await self._next.hurry.wait()
            await self._commit()
        self._since = math.inf

    async def _commit(self) -> None:
        """Commit all rows that wait in one transaction. Sets `error` of the batch if that fails."""
        batch = self._last = self._next
        self._next = _Batch()
        self._since = trio.current_time()
        rows = {**dict.fromkeys(self._left), **batch.rows}
        puts = [(where, name, value) for (where, name), value in rows.items()]
        try:
            await in_thread(partial(self._write, puts, batch))
        except OSError as exc:
            batch.error = CacheUnusable(f"the journal cannot be written: {exc.strerror}")
        except Exception as exc:
            batch.error = exc
        if batch.error is None:
            done = self._left & rows.keys()
            self._left -= done
            for table, name in done:
                if table == DIRTY_FILES and rows[table, name] is None:
                    self.on_removed_late(name.decode())
        else:
            self._left |= {key for key, value in batch.rows.items() if value is None}
            for table, key in batch.rows:
                if table == CONTENTS:
                    # The database may have an older content. With an entry here, each later acknowledgement replaces it.
                    self._sizes.setdefault(key.decode(), 0)
        batch.ended.set()

    async def quiet(self) -> None:
        """Return when no row waits to be written. To be awaited before `close`, after which no row is written."""
        for batch in (self._last, self._next):
            if batch.rows:
                batch.hurry.set()
                await batch.ended.wait()

    def _write(self, puts: list[Put], batch: _Batch) -> None:
        """Write the rows of a batch. Blocking."""
        for call in batch.first:
            call()
        if batch.names and self._staging is not None:
            sync_names(self._staging)
        try:
            self._database.write(puts)
        except NoRoom as exc:
            if is_full(exc):
                raise
            raise CacheUnusable(f"{exc}") from exc  # the disk fails: EIO, as for a staging file
        for call in batch.then:
            call()

    def close(self) -> None:
        """Write what failed transactions have left, move contents to their staging files, and close. If that fails, it is
        logged, and the next start repeats it. Blocking."""
        try:
            if self._left:
                self._database.write([(table, key, None) for table, key in self._left])
            self._move_contents()
        except CachefsError as exc:
            log.warning("%s", exc)
            self._database.close(clean=False)
        else:
            self._database.close()


# -- rows --------------------------------------------------------------------------------

RETRY_S, LONGEST_RETRY_S = 0.5, 60.0
"""Seconds between a failed upload and the next attempt: the first and the longest. They double with each failure; the client
of the origin has repeated each request already. The longest is also the time between two attempts to remove a row or to
abort an upload. Guessed."""


class StoredFile(NamedTuple):
    """A dirty file of the previous daemon that the origin has got as `info`, and that no process has open."""

    id: str
    origin: Origin
    info: ObjectInfo
    ino: int
    attrs: dict[str, Any]


class Records:
    """Writes the rows of dirty files, and clears away what uploads have left: rows, and uploads at the origins."""

    def __init__(self, journal: Journal, origins: Sequence[Origin]) -> None:
        self.journal = journal
        self.orphans: dict[str, dict[str, Any]] = {}  # the rows of multipart uploads to abort
        self.elsewhere: list[tuple[str, int]] = []  # see `Uploads.elsewhere`
        self.stored_before: list[StoredFile] = []
        # Files whose rows are out of date. `run` writes them. Until then their records say so, if these outlive this daemon.
        self.unwritten: list[DirtyFile] = []
        self._origins = origins
        self._wake = trio.Event()

    def origin(self, source: str, key: str) -> Origin | None:
        """The mounted origin that has this key, the one with the longest prefix; None if there is none."""
        found = [o for o in self._origins if o.source == source and key.startswith(o.prefix)]
        return max(found, key=lambda origin: len(origin.prefix), default=None)

    async def keep(self, dirty_file: DirtyFile, within_s: float = math.inf) -> None:
        """Write the present row of a dirty file, unless it is discarded. Raises `NoRoom`, `CacheUnusable`; `DiskHangs` after
        `within_s` seconds."""
        async with self._turn(dirty_file, within_s):
            if not dirty_file.discarded:
                dirty_file.content.row = max(dirty_file.content.row, Row.NOTED)
                await self._put(dirty_file, dirty_file.row(), within_s)

    def has_promised(self, dirty_file: DirtyFile) -> bool:
        """True if a dirty file is acknowledged, or may become so, because its row is being written."""
        return dirty_file.acknowledged or dirty_file.record.turn.locked()

    async def moved(self, dirty_file: DirtyFile, within_s: float) -> None:
        """Write the row of an acknowledged dirty file that has another place. An acknowledgement that is being written still
        has the old key, so this waits for it. Raises as `keep`."""
        if not self.has_promised(dirty_file):
            return
        async with self._turn(dirty_file, within_s):
            if dirty_file.acknowledged:
                await self._put(dirty_file, dirty_file.row(), within_s)

    def write_later(self, dirty_file: DirtyFile) -> None:
        """Have `run` write the row of a dirty file, because the journal has failed to."""
        self.unwritten.append(dirty_file)
        self._wake.set()

    @asynccontextmanager
    async def _turn(self, dirty_file: DirtyFile, within_s: float) -> AsyncIterator[None]:
        """Hold the lock of a dirty file's row while the block runs. Raises `DiskHangs` after `within_s` seconds, because
        another holder, a close, may wait for the disk without a limit."""
        turn = dirty_file.record.turn
        if not turn.locked():
            await turn.acquire()
        else:
            with trio.move_on_after(within_s) as waiting:
                await turn.acquire()
            if waiting.cancelled_caught:
                raise DiskHangs("the disk of the journal does not answer")
        try:
            yield
        finally:
            turn.release()

    async def acknowledge(self, dirty_file: DirtyFile, within_s: float = math.inf) -> None:
        """Make the present content of a dirty file durable on this disk: sync the staging file or put the content into the
        journal, and write a row that restores it. No row is written if the origin has the content, or if the file was
        discarded. Raises `NoRoom`, `CacheUnusable`, `Lost`, `JournalRemoved`; `DiskHangs` if the journal takes longer than
        `within_s` seconds."""
        dirty_file.look()
        generation, content = dirty_file.content.generation, None
        changed = dirty_file.content.synced < generation or dirty_file.kernel.in_passthrough
        changed |= dirty_file.file.in_memory and not dirty_file.acknowledged
        if changed:
            try:
                if self.journal.takes(dirty_file.id, dirty_file.size):
                    content = await dirty_file.file.content(dirty_file.size)
                if content is None:
                    await dirty_file.file.sync()
            except CacheUnusable:
                dirty_file.noted()  # the record for the next daemon says whether the file is spoiled
                raise
        if dirty_file.dirty and dirty_file.content.is_ours:
            # Otherwise the caller would get a promise that the next mount cannot keep, because it would not find the file.
            dirty_file.file.check_name()
            if self.journal.removed:
                raise JournalRemoved(f"{self.journal.path} was removed while it is in use: mount again")
        async with self._turn(dirty_file, within_s):
            if dirty_file.content.synced > generation:
                return  # another caller has acknowledged a later content meanwhile, which this one must not replace
            # True if the content in the journal has to change: it gets one, or has an older one to remove.
            stale = changed and (content is not None or self.journal.has_content(dirty_file.id))
            # If the origin has got the content meanwhile, the file must not come back after a crash.
            if dirty_file.dirty and not dirty_file.discarded and (stale or not dirty_file.acknowledged):
                dirty_file.content.row = max(dirty_file.content.row, Row.NOTED)
                file = dirty_file.file
                if content is not None:
                    stays = dirty_file.content.generation == generation
                    await file.promise(partial(mark, dirty_file), stays=stays)
                try:
                    row = {**dirty_file.row(), "acknowledged": True}
                    await self._put(dirty_file, row, within_s, content=content)
                except BaseException:
                    if not dirty_file.acknowledged:
                        file.unmark()
                    raise
                if content is not None:
                    file.promised(content)
                dirty_file.content.row = Row.ACKNOWLEDGED
                dirty_file.record.content_of = -1 if content is None else generation
        if changed:
            dirty_file.content.synced = max(dirty_file.content.synced, generation)

    async def _put(
        self,
        dirty_file: DirtyFile,
        row: Mapping[str, Any],
        within_s: float = math.inf,
        *,
        content: bytes | Literal["unchanged"] | None = UNCHANGED,
    ) -> None:
        """Write a row. An acknowledged one also sets the attributes of the staging file: it is described before, and marked
        after. One that is not acknowledged removes the content."""
        first: Callable[[], None] | None = None
        then: Callable[[], None] | None = None
        if row["acknowledged"]:
            path = dirty_file.file.path
            first, then = partial(orphans.describe, path, row), partial(orphans.acknowledge, path)
        else:
            content = None
        await self.journal.write(
            DIRTY_FILES, dirty_file.id, row, content=content, first=first, then=then, within_s=within_s
        )

    async def forget(
        self,
        dirty_file: DirtyFile,
        within_s: float = math.inf,
        *,
        patient: bool = False,
        unlinks: bool = False,
    ) -> None:
        """Remove the row of a dirty file, which must not come back after a crash. If the journal fails, `run` removes it
        later. `patient`: no caller waits for this. `unlinks`: the same call in a worker thread may also remove the name of
        the staging file. Raises `DiskHangs` after `within_s` seconds."""
        async with self._turn(dirty_file, within_s):
            if dirty_file.handles:
                await keep_bytes(dirty_file)
            before, dirty_file.content.row = dirty_file.content.row, Row.NONE
            if before is Row.NONE:
                return
            file, first, then = dirty_file.file, None, None
            file.unmark()
            if before is Row.ACKNOWLEDGED and unlinks and file.can_unlink:
                first, then = partial(orphans.disown, file.path), file.unlink
            elif before is Row.ACKNOWLEDGED:
                first = partial(orphans.forget, file.path)
            await self.remove(dirty_file.id, within_s, first=first, then=then, patient=patient)
            if self.journal.leaves(dirty_file.id):
                dirty_file.noted()  # the record for the next daemon says that the row is out of date

    async def forget_replaced(self, dirty_file: DirtyFile) -> None:
        """Record that the file which `dirty_file` replaced does not come back. Called before the row of `dirty_file` is
        removed, because only that says so until now (`over`). The replaced file's own row stays, as one that was not
        acknowledged: the next start aborts what is left of its upload."""
        over, dirty_file.record.over = dirty_file.record.over, None
        dirty_file.record.replaced = None
        if over is None:
            return
        over.note_removed()
        async with over.record.turn:
            if over.acknowledged:
                if over.handles:
                    await keep_bytes(over)
                over.content.row = Row.NOTED
                over.file.unmark()
                forget = partial(orphans.forget, over.file.path)
                try:
                    await self.journal.write(DIRTY_FILES, over.id, over.row(), content=None, first=forget)
                except CachefsError as exc:
                    log.warning("%s", exc)
                    self.journal.remove_later(over.id)

    async def orphaned(self, source: str, key: str, upload: Mapping[str, Any]) -> None:
        """Have a multipart upload (its `state`) aborted by `run`, or by a later run of the daemon. A failure of the journal
        is logged: then a crash may leave the upload at the origin."""
        name = hashlib.sha256(f"{key}\0{upload['id']}".encode()).hexdigest()
        row = {"source": source, "key": key, "upload": dict(upload)}
        self.orphans[name] = row
        self._wake.set()
        try:
            await self.journal.write(ORPHANS, name, row)
        except CachefsError as exc:
            log.warning("%s; the upload of %s/%s may be left at the origin", exc, source, key)

    async def run(self) -> None:
        """Remove rows and abort uploads for which that has failed before, until cancelled. A failure is retried after
        `LONGEST_RETRY_S`, or together with the next one."""
        while True:
            if (name := self.journal.left) is not None:
                await self.remove(name)  # its transaction removes all others that are left
            for dirty_file in list(self.unwritten):
                with suppress(CachefsError):
                    if dirty_file.content.row is not Row.NONE:  # otherwise it was uploaded or removed
                        await self.keep(dirty_file)
                    self.unwritten.remove(dirty_file)
                    dirty_file.noted()
            for name, row in list(self.orphans.items()):
                await self._abort(name, row)
            self._wake = trio.Event()
            waits = self.orphans or self.unwritten or self.journal.left
            with trio.move_on_after(LONGEST_RETRY_S if waits else math.inf):
                await self._wake.wait()
                await trio.sleep(1)

    async def remove(
        self, name: str, within_s: float = math.inf, *, table: str = DIRTY_FILES, **how: Any
    ) -> None:
        """Remove a row, or have `run` do it later. Raises `DiskHangs`; the row is removed once the disk answers."""
        try:
            await self.journal.write(table, name, None, within_s=within_s, **how)
        except CachefsError as exc:
            self._wake.set()
            if isinstance(exc, DiskHangs):
                raise
            log.warning("%s; trying again", exc)

    async def _abort(self, name: str, row: dict[str, Any]) -> None:
        """Abort an orphaned upload, and remove its row. Its row stays if that fails, or if its source is not mounted."""
        origin = self.origin(row["source"], row["key"])
        if origin is None:
            return
        try:
            await origin.resume_upload(row["key"], row["upload"]).abort()
            await self.journal.write(ORPHANS, name, None)
        except CachefsError as exc:
            log.info("%s; trying again", exc)
            return
        self.orphans.pop(name, None)
        log.info("aborted the unfinished upload of %s", origin.name(row["key"]))


def mark(dirty_file: DirtyFile, path: Path) -> None:
    """Mark a staging file, which was just made, as acknowledged, with the row that the dirty file has now. Blocking."""
    orphans.mark(path, dirty_file.row())


async def keep_bytes(dirty_file: DirtyFile) -> None:
    """Before the row of a file in use is removed: move bytes that the journal alone has to memory that outlives this
    process, or to the disk."""
    if not dirty_file.file.outlive_row():
        with suppress(CachefsError), dirty_file.file.used():  # then its users meet EIO if this daemon dies
            await dirty_file.file.try_spill()

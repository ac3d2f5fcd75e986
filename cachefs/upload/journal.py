"""What of the uploads must survive this process: one row a dirty file, in a database that is written through.

`Journal` is the database. Rows that are written at the same time share one transaction, and so does what makes the names of
their staging files durable: many small files cost the disk one wait. A journal is no cache: one that is damaged is never
emptied, but refused with the name of its directory, because the files beside it may be the only copy of a user's work.

`Records` writes the rows. An *acknowledged* dirty file is one whose writer was told that its bytes are safe here, or that
they did not reach the origin: it comes back after a crash, with all that its staging file holds then, as on a local file
system.

A small file that is acknowledged has its *content* in the journal, in the same transaction as its row: its staging file need
not be synced then, and is not even made where the file lies in memory. The next start writes it from there (`Journal`) where
there is none, and after a power cut in any case; as long as the machine runs, a staging file that is there counts.

`look` compares rows and files at a start, and each dirty file either comes back or is cleared away:

| row | file | then |
|---|---|---|
| acknowledged | there | pending again, its upload resumed |
| acknowledged, of a file that another one was renamed over | either | the upload is aborted, the file goes |
| acknowledged | missing, and no content | said, as an error: it was removed from outside |
| acknowledged, of an origin that is not mounted | there | both stay for the mount that has it |
| not acknowledged | either | the upload is aborted, the file is treated as one without a row |
| none | there | the file goes if its mark says that it was never acknowledged, else it is kept aside (`orphans.py`) |
| no journal | there | all files are kept aside |
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import trio

from cachefs.base.behind import GATHER_S
from cachefs.base.database import Database, Put, is_full, read_mark
from cachefs.base.errors import CachefsError, CacheInUse, CacheUnusable, NoRoom
from cachefs.base.linux import HANGS_AFTER_S
from cachefs.base.tasks import in_thread, take
from cachefs.origin import Origin
from cachefs.upload import orphans
from cachefs.upload.content import Row
from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.staging import HELD, rewrite, sync_bytes, sync_names

log = logging.getLogger(__name__)

FORMAT, EARLIER = "journal-3", ("journal-1", "journal-2")
"""The format that is written, and earlier ones that are read, too. Format 1 has no contents; in format 2 each file with a
content also has a staging file."""

DIRTY_FILES, ORPHANS, NOTES, CONTENTS = "drafts", "orphans", "notes", "contents"
"""Dirty files by id; multipart uploads that are to be aborted, by id; what the rooms above note for themselves; the bytes of
small dirty files, by id."""

CONTENTS_BYTES = 64 << 20
"""Of all contents. What is acknowledged beyond has its staging file synced. A bound of the database, which never shrinks:
hundreds of files of 100 KB, as many as are written in the second before their uploads begin."""

UNCHANGED: Final = "unchanged"
"""The content that the journal has of a file stays."""


def refuse_foreign(directory: Path) -> None:
    """Raises `CacheUnusable` for a journal of another format, and changes nothing: to be asked before anything else of a
    cache directory is opened, which may drop what it cannot read."""
    found, _ = read_mark(directory)
    if found not in ("", FORMAT, *EARLIER):
        raise CacheUnusable(
            f"what was written here and is not at the origin yet is noted in {directory} in the format {found!r}, and this "
            f"version reads {FORMAT!r}: start the version of cachefs that wrote it, until all is at the origin"
        )


class DiskHangs(CacheUnusable):
    """A row waits for a disk that does not answer, and is written once it does."""


class JournalRemoved(CacheUnusable):
    """The next start would find none of the rows that are written now."""


class _Batch:
    """Rows that wait for one transaction, and what became of it. `first` and `then` are called around it."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, bytes], bytes | None] = {}
        self.first: list[Callable[[], None]] = []
        self.then: list[Callable[[], None]] = []
        self.names = False  # rows rely on the names of their staging files
        self.hurry, self.ended = trio.Event(), trio.Event()
        self.error: Exception | None = None


class Journal:
    """Rows are JSON objects. What `write` has returned for is on the disk."""

    def __init__(self, directory: Path, staging: Path | None = None, *, killed: bool = False) -> None:
        """`staging` is where the files lie that rows are about. For `killed` see `Database`.

        Raises `CacheUnusable` when it cannot be read as a whole, and then changes nothing. Blocking."""
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
        self._staging = staging
        self._next = _Batch()
        self._sizes: dict[str, int] = {}  # of the contents
        # What a failed transaction has left. The next one removes it together with its own rows, so that the row of a file
        # that was replaced never outlives the row which says so.
        self._left: set[tuple[str, bytes]] = set()
        self._room = CONTENTS_BYTES
        self.hangs_elsewhere: Callable[[], bool] = lambda: False
        self._since = math.inf  # when the transaction under way began
        try:
            self._secure()
            self._database.sure()
        except CachefsError:
            self._database.close(clean=False)
            raise

    @property
    def hangs(self) -> bool:
        """Whether a transaction takes too long."""
        return self._since < trio.current_time() - HANGS_AFTER_S

    @property
    def removed(self) -> bool:
        """Whether its files were removed from outside. A second mount may have made others in their place."""
        return not self._database.in_place

    def check_name(self) -> None:
        """Raises `JournalRemoved`."""
        if self.removed:
            raise JournalRemoved(f"{self._database.path} was removed while it is in use: mount again")

    @property
    def left(self) -> str | None:
        """A dirty file whose row was to be removed, and is still there."""
        return next((key.decode() for table, key in self._left if table == DIRTY_FILES), None)

    def remove_later(self, key: str) -> None:
        """The next transaction removes the row of this dirty file."""
        self._left |= {(DIRTY_FILES, key.encode()), (CONTENTS, key.encode())}

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        """All rows of a table, as they were before this start; later ones are their owners' to know."""
        return {key.decode(): json.loads(value) for key, value in self._database.scan(table)}

    # -- contents of small files -------------------------------------------------------------------

    def takes(self, key: str, size: int) -> bool:
        """Whether there is room for the content of this dirty file."""
        return size <= min(HELD, self._room + self._sizes.get(key, 0))

    def has_content(self, key: str) -> bool:
        return key in self._sizes

    def content(self, key: str) -> bytes | None:
        """What `write` has put; None where the database cannot be read."""
        with suppress(CacheUnusable):
            return self._database.get(CONTENTS, key.encode())
        return None

    def _secure(self) -> None:
        """All contents are in their staging files, on the disk, and in the journal no more. Blocking. Raises `NoRoom`,
        `CacheUnusable`, and then they stay. At the start, before anything is written here; and before it is closed, or the
        next start could not tell whether a staging file was written later than its content."""
        staging, found = self._staging, self._database.scan(CONTENTS)
        if not found or staging is None:
            return
        rows, still_runs = self.rows(DIRTY_FILES), bool(self._sizes) or self._database.same_boot
        for name, content in found:
            row = rows.get(name.decode())
            if row is None or not row["acknowledged"]:
                continue
            path = staging / row["file"]
            if still_runs and sync_bytes(path):
                continue
            rewrite(path, content)
            orphans.mark(path, row)
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
        """Put a row, or remove it. With `content`, bytes or None, that goes along. `first` and `then`, which must not raise,
        are called in the worker thread before it is written, and after it is on the disk. One that is `patient` goes along
        with the next that is not, or alone after `GATHER_S`. Raises `NoRoom`, `CacheUnusable`; and `DiskHangs` when a
        transaction takes longer than `within_s`, or the disk is known to hang: the row is written all the same, once the
        disk answers."""
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
            await self._ended(batch, within_s)
        elif patient or within_s < math.inf:
            self._go_on()
            await self._ended(batch, within_s)
        else:
            # One writer after the other is met like this, and its thread is all that it waits for.
            with trio.CancelScope(shield=True):
                await self._commit()
            self._since = math.inf
            if self._next.rows:
                self._go_on()
        if not batch.ended.is_set():
            raise DiskHangs("the disk of the journal does not answer")
        if batch.error is not None:
            raise batch.error

    async def _ended(self, batch: _Batch, within_s: float) -> None:
        known = within_s < math.inf and self.hangs_elsewhere()
        began = -math.inf if known else min(trio.current_time(), self._since)
        # Shielded: a cancelled caller's row is written whole, or not at all.
        with trio.CancelScope(deadline=began + within_s, shield=True):
            await batch.ended.wait()

    def _put_content(self, batch: _Batch, key: str, content: bytes | None) -> None:
        before = self._sizes.pop(key, None)
        if before is None and content is None:
            return
        self._room += before or 0
        if content is not None:
            self._sizes[key] = len(content)
            self._room -= len(content)
        batch.rows[CONTENTS, key.encode()] = content

    def _go_on(self) -> None:
        self._since = trio.current_time()
        trio.lowlevel.spawn_system_task(self._work)

    async def _work(self) -> None:
        """One transaction after the other, until no row waits."""
        while self._next.rows:
            if not self._next.hurry.is_set():
                with trio.move_on_after(GATHER_S):
                    await self._next.hurry.wait()
            await self._commit()
        self._since = math.inf

    async def _commit(self) -> None:
        """One transaction, of all rows that wait."""
        batch, self._next = self._next, _Batch()
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
            self._left -= rows.keys()
        else:
            self._refused(batch)
        batch.ended.set()

    def _refused(self, batch: _Batch) -> None:
        """The database has what it had before."""
        self._left |= {key for key, value in batch.rows.items() if value is None}
        for table, key in batch.rows:
            if table == CONTENTS:
                # An older content is there, and each later close replaces it.
                self._sizes.setdefault(key.decode(), 0)

    def _write(self, puts: list[Put], batch: _Batch) -> None:
        for call in batch.first:
            call()
        if batch.names and self._staging is not None:
            sync_names(self._staging)
        try:
            self._database.write(puts)
        except NoRoom as exc:
            if is_full(exc):
                raise
            raise CacheUnusable(f"{exc}") from exc  # EIO, as a staging file on that disk
        for call in batch.then:
            call()

    def close(self) -> None:
        """Blocking."""
        try:
            if self._left:
                self._database.write([(table, key, None) for table, key in self._left])
            self._secure()
        except CachefsError as exc:
            log.warning("%s", exc)
            self._database.close(clean=False)  # the next start does it
        else:
            self._database.close()


# -- rows --------------------------------------------------------------------------------

RETRY_S, LONGEST_RETRY_S = 0.5, 60.0
"""Waits after failed uploads, doubled from the first to the last; the origin has repeated each request already. The last is
also how long what could not be cleared away is left alone. Guessed."""


class Records:
    def __init__(self, journal: Journal, origins: Sequence[Origin]) -> None:
        self.journal = journal
        self.orphans: dict[str, dict[str, Any]] = {}
        self.elsewhere: list[tuple[str, int]] = []  # what waits for another source: that, and bytes
        self._origins = origins
        self._wake = trio.Event()

    def origin(self, source: str, key: str) -> Origin | None:
        """The mounted origin that shows this key."""
        found = [o for o in self._origins if o.source == source and key.startswith(o.prefix)]
        return max(found, key=lambda origin: len(origin.prefix), default=None)

    async def keep(self, dirty_file: DirtyFile, within_s: float = math.inf) -> None:
        """Write the dirty file's row as it is now. Raises `NoRoom`, `CacheUnusable`; `DiskHangs` after `within_s`."""
        async with self._turn(dirty_file, within_s):
            if not dirty_file.discarded:
                dirty_file.content.row = max(dirty_file.content.row, Row.NOTED)
                await self._put(dirty_file, dirty_file.row(), within_s)

    @asynccontextmanager
    async def _turn(self, dirty_file: DirtyFile, within_s: float) -> AsyncIterator[None]:
        """Hold the turn to write the row of a dirty file. Raises `DiskHangs` after `within_s`: a close that has it waits for
        the disk without a limit."""
        turn = dirty_file.record.turn
        if not turn.locked():
            await take(turn)
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
        """What it holds now is on the disk, and so is a row that says so. Raises `NoRoom`, `CacheUnusable`, of
        which `Lost` and `JournalRemoved`; `DiskHangs` when the journal takes longer than `within_s`."""
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
                dirty_file.noted()  # that its file is spoiled
                raise
        if dirty_file.dirty and dirty_file.content.is_ours:
            # Or the next mount would be promised a file that it cannot find.
            dirty_file.file.check_name()
            self.journal.check_name()
        async with self._turn(dirty_file, within_s):
            if dirty_file.content.synced > generation:
                return  # another caller has acknowledged a later content meanwhile, and this one must not replace it
            # The content that the journal has is an older one.
            other = changed and (content is not None or self.journal.has_content(dirty_file.id))
            # What the origin has got meanwhile must not come back after a crash.
            if dirty_file.dirty and not dirty_file.discarded and (other or not dirty_file.acknowledged):
                dirty_file.content.row = max(dirty_file.content.row, Row.NOTED)
                file = dirty_file.file
                if content is not None:
                    stays = dirty_file.content.generation == generation
                    await file.promise(partial(_mark, dirty_file), stays=stays)
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
        if not row["acknowledged"]:
            await self.journal.write(DIRTY_FILES, dirty_file.id, row, content=None, within_s=within_s)
            return
        path = dirty_file.file.path
        await self.journal.write(
            DIRTY_FILES,
            dirty_file.id,
            row,
            content=content,
            first=partial(orphans.describe, path, row),
            then=partial(orphans.acknowledge, path),
            within_s=within_s,
        )

    async def forget(
        self,
        dirty_file: DirtyFile,
        within_s: float = math.inf,
        *,
        patient: bool = False,
        unlinks: bool = False,
    ) -> None:
        """The origin has it, or it was removed: it must not come back. Raises `DiskHangs` after `within_s`. `patient`: no
        caller waits for this. `unlinks`: its file may lose its name in the same turn of the thread."""
        async with self._turn(dirty_file, within_s):
            was, dirty_file.content.row = dirty_file.content.row, Row.NONE
            if was is Row.NONE:
                return
            file, first, then = dirty_file.file, None, None
            file.unmark()
            if was is Row.ACKNOWLEDGED and unlinks and file.can_unlink:
                first, then = partial(orphans.disown, file.path), file.unlink
            elif was is Row.ACKNOWLEDGED:
                first = partial(orphans.forget, file.path)
            await self._remove(dirty_file.id, within_s, first=first, then=then, patient=patient)

    async def forget_replaced(self, dirty_file: DirtyFile) -> None:
        """Record that the file which `dirty_file` replaced does not come back.

        Until now only the row of `dirty_file` says so (`over`), so this is called before that row is removed. The replaced
        file's own row stays, as one that was not acknowledged: the next start aborts what is left of its upload."""
        over, dirty_file.record.over = dirty_file.record.over, None
        if over is None:
            return
        async with over.record.turn:
            if over.acknowledged:
                over.content.row = Row.NOTED
                over.file.unmark()
                forget = partial(orphans.forget, over.file.path)
                try:
                    await self.journal.write(DIRTY_FILES, over.id, over.row(), content=None, first=forget)
                except CachefsError as exc:
                    log.warning("%s", exc)
                    self.journal.remove_later(over.id)

    async def orphaned(self, source: str, key: str, upload: Mapping[str, Any]) -> None:
        """This upload (its `state`) is to be aborted, if need be by a later run."""
        name = hashlib.sha256(f"{key}\0{upload['id']}".encode()).hexdigest()
        row = {"source": source, "key": key, "upload": dict(upload)}
        self.orphans[name] = row
        self._wake.set()
        try:
            await self.journal.write(ORPHANS, name, row)
        except CachefsError as exc:
            log.warning("%s; the upload of %s/%s may be left at the origin", exc, source, key)

    async def run(self) -> None:
        """Clear away what could not be cleared away at once, until cancelled."""
        while True:
            if (name := self.journal.left) is not None:
                await self._remove(name)
            for name, row in list(self.orphans.items()):
                await self._abort(name, row)
            self._wake = trio.Event()
            with trio.move_on_after(LONGEST_RETRY_S if self.orphans or self.journal.left else float("inf")):
                await self._wake.wait()
                await trio.sleep(1)

    async def _remove(self, name: str, within_s: float = math.inf, **how: Any) -> None:
        try:
            await self.journal.write(DIRTY_FILES, name, None, within_s=within_s, **how)
        except DiskHangs:
            raise
        except CachefsError as exc:
            log.warning("%s; trying again", exc)
            self._wake.set()

    async def _abort(self, name: str, row: dict[str, Any]) -> None:
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


def _mark(dirty_file: DirtyFile, path: Path) -> None:
    """Set the attributes of a staging file that is made after its dirty file was acknowledged. Blocking."""
    orphans.mark(path, dirty_file.row())


# -- what an earlier run has left --------------------------------------------------------

Revive = Callable[[str, Mapping[str, Any], Origin], DirtyFile]


async def look(
    records: Records, staging: Path, revive: Revive, resumed: Mapping[str, DirtyFile], over: Collection[str]
) -> list[DirtyFile]:
    """The dirty files that come back. Asks the origins nothing. Raises `NoRoom`, `CacheUnusable`. Those that are `resumed`
    are there already; those that are `over` were replaced by one of them."""
    journal, found = records.journal, list[DirtyFile]()
    records.orphans.update(journal.rows(ORPHANS))
    files = set(await trio.to_thread.run_sync(os.listdir, staging))
    rows = journal.rows(DIRTY_FILES)
    files -= {dirty_file.file.path.name for dirty_file in resumed.values()}
    replaced, going = _replaced(rows), set[str]()
    replaced |= set(over)
    wanted = kept(rows, files) - replaced
    for name, row in rows.items():
        if (going_on := resumed.get(name)) is not None:
            if going_on.discarded:
                await journal.write(
                    DIRTY_FILES, name, None, first=partial(orphans.forget, going_on.file.path)
                )
                continue
            going_on.content.row = Row.ACKNOWLEDGED if row["acknowledged"] else Row.NOTED
            if {**row, "mtime_ns": going_on.mtime_ns} != going_on.row():
                await records.keep(going_on)
            continue
        what = f"{row['source']}/{row['key']}"
        origin = records.origin(row["source"], row["key"])
        if name in wanted:
            files.discard(row["file"])
            if origin is None:
                records.elsewhere.append((row["source"], (staging / row["file"]).stat().st_size))
                continue
            dirty_file = revive(name, row, origin)
            log.info("%s waits for its upload since an earlier run (%d bytes)", what, dirty_file.size)
            found.append(dirty_file)
            continue
        if name in replaced:
            log.info("%s was replaced by another file", what)
            going.add(row["file"])  # also if its mark says that it was acknowledged: this row knows more
        elif row["acknowledged"]:
            log.error("%s was to be uploaded, but %s was removed", what, staging / row["file"])
        else:
            log.info("%s was being written when an earlier run ended: given up", what)
        if row["upload"] is not None:
            await records.orphaned(row["source"], row["key"], row["upload"])
        # Before its row goes, the file itself says that it need not be kept: the next start may come before it is removed.
        forget = partial(orphans.forget, staging / row["file"]) if name in replaced else None
        await journal.write(DIRTY_FILES, name, None, first=forget)
    kept_aside = [left for left in files - going if not orphans.accounted(staging, left)]
    orphans.set_aside(staging, kept_aside, "the journal does not account for what was acknowledged")
    for left in files.difference(kept_aside):
        log.info("removing %s, which was never acknowledged", staging / left)
        try:
            (staging / left).unlink()
        except OSError as exc:
            log.warning("cannot remove %s: %s", staging / left, exc.strerror)
    return found


def kept(rows: Mapping[str, Mapping[str, Any]], files: Collection[str]) -> set[str]:
    """The dirty files that are to come back, of all rows, where these are the staging files."""
    replaced = _replaced(rows)
    there = (name for name, row in rows.items() if row["acknowledged"] and row["file"] in files)
    return {name for name in there if name not in replaced}


def _replaced(rows: Mapping[str, Mapping[str, Any]]) -> set[str | None]:
    return {row["over"] for row in rows.values() if row["acknowledged"]}

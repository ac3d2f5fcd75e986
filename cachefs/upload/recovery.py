"""Recovery: a start restores the dirty files of an earlier daemon, or clears away what is left of them.

A dirty file leaves up to four things behind:

| what | outlives | says |
|---|---|---|
| a record in shared memory (`FileRecords`) | a kill | the state at the last change, whether or not it was promised |
| a tail in shared memory (`Tails`) | a kill | the bytes of its end that were in memory |
| a row in the journal, perhaps with a content | a power cut | what was acknowledged |
| a staging file | a power cut, if it was synced | its bytes |

A start decides in two steps, because a record is newer than a row. `Recovery.resume` decides by the records about files that
were in use. It has nothing to do after a reboot, or if the mount keeps no shared memory:

| the record says | its bytes | the kernel has it open | the file |
|---|---|---|---|
| changed (`_is_changed`) | are there | either | goes on, dirty, with its handles if there are any |
| unchanged | are there | yes | goes on with its handles |
| unchanged | either | no | does not come back: its name shows the origin's version (`StoredFile`) |
| unchanged | are not there | yes | the same: the cache may have the bytes |
| changed | are lost | either | is lost, which is logged; a file that it had replaced comes back |
| its name is removed, or another file has replaced it | are there | yes | goes on without a name, for its handles alone |
| the same | either | no | does not come back |
| changed, and its source is not mounted | either | either | is left to the second step |

`Recovery.restore` decides by the journal about all other files, and brings the rows of those that go on up to date:

| row | staging file | what happens |
|---|---|---|
| acknowledged | exists | the file is pending again, and its upload is resumed |
| acknowledged | missing, and the journal has the content | the same; the file lies in memory |
| of a file that another has replaced, or that the first step gave up | either | the upload is aborted, both are removed |
| acknowledged, and a later file has its key | either | an error is logged, the bytes are moved aside, the row is removed |
| acknowledged | missing, and no content | an error is logged: it was removed from outside; the row is removed |
| acknowledged, of a source that is not mounted | exists, or a content | row and bytes stay for a mount that has the source |
| not acknowledged | either | the upload is aborted, the staging file is treated as one without a row |
| none | exists | the file is removed if it was surely never acknowledged, otherwise moved aside (`orphans.py`) |
| no journal | exists | all files are moved aside |
"""

from __future__ import annotations

import enum
import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import trio

from cachefs.base.errors import CachefsError, CacheUnusable, NoRoom
from cachefs.base.shared_memory import Tail
from cachefs.origin import ObjectInfo, Origin
from cachefs.upload import orphans
from cachefs.upload.content import Row
from cachefs.upload.dirty_file import DirtyFile, Owner, Way
from cachefs.upload.journal import DIRTY_FILES, ORPHANS, Journal, Records, StoredFile, keep_bytes, mark
from cachefs.upload.staging import FULL, StagingDisk, StagingFile, make_acknowledged, mark_new, spill_tail

log = logging.getLogger(__name__)


class Fate(enum.Enum):
    """What becomes of a file by its record alone. Its name may still turn out to be another file's."""

    GOES_ON = enum.auto()
    AT_ORIGIN = enum.auto()
    """The origin has what its name shows, or its name is removed: no row must restore it."""
    LOST = enum.auto()
    ELSEWHERE = enum.auto()


class FoundRecord(NamedTuple):
    """The record of a dirty file that the previous daemon has left (`DirtyFile.resumed_row`). `origin` is None if its source
    is not mounted; `is_open`: the kernel has its inode open."""

    id: str
    mtime_ns: int
    row: Mapping[str, Any]
    origin: Origin | None
    is_open: bool


class Recovery:
    """The recovery of one start. The dirty files that it makes belong to `owner`. `open_inos` are the inodes that the kernel
    has open."""

    def __init__(self, owner: Owner, records: Records, disk: StagingDisk, open_inos: Container[int]) -> None:
        self._owner = owner
        self._records, self._journal = records, records.journal
        self._disk = disk
        self._open_inos = open_inos
        self._tails: dict[str, Tail] = {}  # by staging file: the bytes that stay in memory
        self._lost: dict[str, str] = {}  # by staging file: why its bytes are lost
        self._gone = set[str]()  # ids of files that must not come back, by the records
        self._unused: list[str] = []  # ids of records that no dirty file needs
        self._files = set[str]()  # staging files that no dirty file has
        self._unneeded = set[str]()  # those of them that are removed whatever their marks say
        self._resumed: dict[str, DirtyFile] = {}
        self._restored: list[DirtyFile] = []

    # -- first step: files that were in use ----------------------------------------------------------

    async def resume(self) -> dict[str, DirtyFile]:
        """Make the dirty files that go on from the memory of the previous daemon, by id. Ends of files that were in memory
        are on the disk afterwards; on a full disk a small file stays in memory."""
        if self._disk.shared is None:
            return {}
        records = list[FoundRecord]()
        for name, (mtime_ns, row) in self._disk.shared.records.found().items():
            origin = self._records.origin(row["source"], row["key"])
            records.append(FoundRecord(name, mtime_ns, row, origin, row["ino"] in self._open_inos))
        await self._take_tails(records)
        fates = [(record, self._fate(record)) for record in records]
        self._gone = self._which_are_gone(fates)
        for record, fate in fates:
            nameless = record.row["removed"] or record.id in self._gone
            if fate is Fate.AT_ORIGIN:
                self._leave_to_origin(record)
            elif fate is Fate.ELSEWHERE or (nameless and not record.is_open):
                self._give_up(record)
            elif fate is Fate.LOST:
                self._lose(record, self._lost.get(record.row["file"], "its staging file was removed"))
            else:
                self._go_on(record, nameless=nameless)
        return self._resumed

    async def _take_tails(self, records: Sequence[FoundRecord]) -> None:
        """Write the tails of files that may go on to the disk. One stays in memory if the disk is full and has nothing of
        its file."""
        assert self._disk.shared is not None
        wanted = {r.row["file"]: r for r in records if r.origin and (_is_changed(r.row) or r.is_open)}
        for tail in self._disk.shared.tails.found():
            if (record := wanted.get(tail.name)) is not None:
                promised = self._journal.has_content(record.id)
                new_mark = partial(orphans.mark, row=record.row) if promised else mark_new
                path = self._disk.directory / tail.name
                try:
                    await trio.to_thread.run_sync(spill_tail, path, tail, record.mtime_ns, new_mark)
                except OSError as exc:
                    if exc.errno in FULL and not tail.start and not path.exists():
                        self._tails[tail.name] = tail
                        continue
                    self._lost[tail.name] = str(exc)
            tail.release()

    def _fate(self, record: FoundRecord) -> Fate:
        file = record.row["file"]
        has_bytes = file not in self._lost and (
            file in self._tails
            or self._journal.has_content(record.id)
            or (self._disk.directory / file).exists()
        )
        if _is_changed(record.row):
            if record.origin is None:
                return Fate.ELSEWHERE
            return Fate.GOES_ON if has_bytes else Fate.LOST
        # Of a file that is open and unchanged, the cache may have the bytes.
        goes_on = record.is_open and has_bytes and record.origin is not None
        return Fate.GOES_ON if goes_on else Fate.AT_ORIGIN

    def _which_are_gone(self, fates: Sequence[tuple[FoundRecord, Fate]]) -> set[str]:
        """The ids of the files that others have replaced, or that the origin has."""
        gone = {record.id for record, fate in fates if fate is Fate.AT_ORIGIN}
        for record, fate in fates:
            # Records of earlier versions have no "copied".
            perhaps_not_copied = fate is Fate.AT_ORIGIN and record.row.get("copied") is not None
            # A lost file has replaced none, nor has one that the origin was perhaps still to copy to its key: the older file
            # comes back.
            if record.row["over"] is not None and fate is not Fate.LOST and not perhaps_not_copied:
                gone.add(record.row["over"])
        # A closed file that waits for its upload has no record. Its row tells which file it has replaced.
        recorded = {record.id for record, _ in fates}
        rows = self._journal.rows(DIRTY_FILES).items()
        return gone | replaced_files({name: row for name, row in rows if name not in recorded})

    def _leave_to_origin(self, record: FoundRecord) -> None:
        """Do not restore the file: its name shows the origin's version, under the same inode."""
        row = record.row
        if record.origin is not None and not row["removed"] and row["base"] is not None and row["ino"]:
            # Records of earlier versions have no "size".
            info = ObjectInfo(row["key"], row.get("size", 0), record.mtime_ns, row["base"])
            self._records.stored_before.append(
                StoredFile(record.id, record.origin, info, row["ino"], row["attrs"])
            )
        self._unused.append(record.id)

    def _give_up(self, record: FoundRecord) -> None:
        """Do not restore the file from memory."""
        self._unused.append(record.id)
        if (tail := self._tails.pop(record.row["file"], None)) is not None:
            tail.release()

    def _lose(self, record: FoundRecord, why: str) -> None:
        """Log that the changes of the file are lost. What the journal has of it may still come back."""
        self._unused.append(record.id)
        if record.row["dirty"]:
            url = f"{record.row['source']}/{record.row['key']}"
            log.error("%s was being written, and is lost: %s", url, why)

    def _go_on(self, record: FoundRecord, *, nameless: bool) -> None:
        """Make the file again, as its record and its staging file have it."""
        assert record.origin is not None
        try:
            dirty_file = self._rebuild(record.id, record.row, record.mtime_ns, record.origin)
            dirty_file.resumed(record.row, nameless=nameless)
        except (OSError, CachefsError) as exc:
            self._lose(record, str(exc))
        else:
            self._resumed[record.id] = dirty_file

    def _rebuild(self, name: str, row: Mapping[str, Any], mtime_ns: int, origin: Origin) -> DirtyFile:
        """Make a dirty file again from its record or row, and resume its multipart upload. Without a staging file it lies in
        memory: its tail, or the content that the journal has."""
        file = StagingFile(self._disk, row["file"])
        held: bytes | Tail | None = self._tails.get(row["file"])
        if held is None and not file.path.exists():
            held = self._journal.content(name)
        size = file.path.stat().st_size if held is None else len(held)
        base, attrs = row["base"], row["attrs"]
        dirty_file = DirtyFile(
            self._owner, name, origin, row["key"], file, size, base=base, mtime_ns=mtime_ns, attrs=attrs
        )
        if held is not None:
            file.found_in_memory(held, partial(mark, dirty_file) if self._journal.has_content(name) else None)
        dirty_file.record.tokens, dirty_file.record.upload = row["tokens"], row["upload"]
        dirty_file.record.replaced = row["over"]
        dirty_file.record.copied = row.get("copied")  # rows of earlier versions have none
        dirty_file.trying.unsure = True  # that run may have sent it just before its end
        if row["upload"] is not None:
            dirty_file.sender.resume(origin.resume_upload(row["key"], row["upload"]))
        return dirty_file

    # -- second step: rows and staging files ---------------------------------------------------------

    async def restore(self) -> list[DirtyFile]:
        """Bring rows and staging files in line. Returns the acknowledged dirty files that come back. Sends no request to an
        origin. Raises `NoRoom`, `CacheUnusable`."""
        self._records.orphans.update(self._journal.rows(ORPHANS))
        self._files = set(await trio.to_thread.run_sync(os.listdir, self._disk.directory))
        self._files -= {dirty_file.file.path.name for dirty_file in self._resumed.values()}
        rows = self._journal.rows(DIRTY_FILES)
        replaced = replaced_files(rows) | self._gone
        in_journal = self._journal.contents_by_file(rows).keys()
        coming_back = restorable(rows, self._files | in_journal) - replaced
        overtaken = _overtaken({name: rows[name] for name in coming_back}, self._resumed)
        # Replaced files come first: the row of the file that has replaced them loses its `over` when it is written again.
        for name, row in sorted(rows.items(), key=lambda item: item[0] not in replaced):
            url, path = f"{row['source']}/{row['key']}", self._disk.directory / row["file"]
            if name in self._resumed:
                await self._update_row(self._resumed[name], row)
            elif name in overtaken:
                log.error("two files were to be uploaded as %s: the older one is kept aside", url)
                self._write_content(name, row)
                await self._remove_row(name, row)
            elif name in coming_back:
                await self._come_back(name, row)
            elif name in replaced:
                log.info("%s was replaced by another file", url)
                # Whatever its mark says, because the row of the other file is newer.
                self._unneeded.add(row["file"])
                await self._remove_row(name, row, unneeded=path)
            elif row["acknowledged"]:
                log.error("%s was to be uploaded, but %s was removed", url, path)
                await self._remove_row(name, row)
            else:
                log.info("%s was being written when an earlier run ended: given up", url)
                await self._remove_row(name, row)
        self._clear_away()
        return self._restored

    def _write_content(self, name: str, row: Mapping[str, Any]) -> None:
        """Write a content that the journal alone has to the staging directory, where `_clear_away` finds it."""
        if row["file"] not in self._files:
            path, data = self._disk.directory / row["file"], self._journal.content(name) or b""
            make_acknowledged(path, data, partial(orphans.mark, row=row))
            self._files.add(row["file"])

    async def _come_back(self, name: str, row: Mapping[str, Any]) -> None:
        """Restore an acknowledged file, or leave it to a mount that has its source. If it cannot be read, its row goes."""
        url, path = f"{row['source']}/{row['key']}", self._disk.directory / row["file"]
        origin = self._records.origin(row["source"], row["key"])
        on_disk = row["file"] in self._files
        self._files.discard(row["file"])
        if origin is None:
            size = (
                path.stat().st_size if on_disk else self._journal.contents_by_file({name: row})[row["file"]]
            )
            self._records.elsewhere.append((row["source"], size))
            return
        try:
            dirty_file = self._rebuild(name, row, row["mtime_ns"], origin)
            dirty_file.acknowledged_before(row)
        except (OSError, CachefsError) as exc:
            if not on_disk:  # the journal alone has its bytes, and must not be emptied
                raise CacheUnusable(f"{url} waits for its upload, and cannot be read: {exc}") from exc
            # Without its row, the next start moves the staging file aside, if it is still there.
            log.error("%s was to be uploaded, and %s cannot be read: %s", url, path, exc)  # noqa: TRY400
            await self._remove_row(name, row)
        else:
            log.info("%s waits for its upload since an earlier run (%d bytes)", url, dirty_file.size)
            self._restored.append(dirty_file)

    async def _update_row(self, dirty_file: DirtyFile, row: Mapping[str, Any]) -> None:
        """Bring the row of a file that goes on up to date, or remove it if the file has no name."""
        if dirty_file.discarded:
            await keep_bytes(dirty_file)
            dirty_file.file.unmark()
            await self._remove_row(dirty_file.id, row, unneeded=dirty_file.file.path)
            return
        dirty_file.content.row = Row.ACKNOWLEDGED if row["acknowledged"] else Row.NOTED
        if {**row, "mtime_ns": dirty_file.mtime_ns} != dirty_file.row():
            try:
                await self._records.keep(dirty_file)
            except NoRoom as exc:
                log.warning("%s; trying again", exc)
                self._records.write_later(dirty_file)

    async def _remove_row(self, name: str, row: Mapping[str, Any], *, unneeded: Path | None = None) -> None:
        """Remove a row, and have its upload aborted. A staging file that is `unneeded` is marked before: after a crash in
        between, the next start may remove it."""
        if row["upload"] is not None:
            await self._records.orphaned(row["source"], row["key"], row["upload"])
        first = partial(orphans.forget, unneeded) if unneeded is not None else None
        await self._records.remove(name, first=first)

    def _clear_away(self) -> None:
        """Remove the staging files that no dirty file has, or move them aside if they may have been acknowledged."""
        staging, unneeded = self._disk.directory, self._unneeded
        kept_aside = [file for file in self._files - unneeded if not orphans.is_removable(staging, file)]
        orphans.set_aside(staging, kept_aside, "the journal does not account for what was acknowledged")
        for file in self._files.difference(kept_aside):
            log.info("removing %s, which was never acknowledged", staging / file)
            try:
                (staging / file).unlink()
            except OSError as exc:
                log.warning("cannot remove %s: %s", staging / file, exc.strerror)

    def drop_records(self) -> None:
        """Drop the records that no dirty file needs. Called after `restore`, because one may be the last to say which
        acknowledged file another has replaced."""
        for name in self._unused:
            assert self._disk.shared is not None
            if not self._journal.leaves(name):
                self._disk.shared.records.drop(name)


def _is_changed(row: Mapping[str, Any]) -> bool:
    """True if the origin may not have the content of a dirty file, by its record, which tells nothing of what was written in
    passthrough or through a mapping."""
    return (row["dirty"] or row["way"] != Way.HERE.name) and not row["removed"]


def _overtaken(rows: Mapping[str, Mapping[str, Any]], resumed: Mapping[str, DirtyFile]) -> set[str]:
    """The ids of those whose keys later files have. A disk that failed amid a transaction may leave such rows."""
    last = {(one.origin.source, one.key): one.id for one in resumed.values() if not one.discarded}
    for name in sorted(rows.keys() - resumed.keys(), key=lambda name: rows[name]["mtime_ns"], reverse=True):
        last.setdefault((rows[name]["source"], rows[name]["key"]), name)
    return rows.keys() - resumed.keys() - set(last.values())


def contents_of_unused(directory: Path, staging: Path) -> list[orphans.Orphan]:
    """The acknowledged files that the next mount takes from the journal in `directory`, which no daemon uses, and not from
    `staging`. Reads a copy, so nothing changes. Blocking. Raises `CacheUnusable` if the journal cannot be read."""
    found = list[orphans.Orphan]()
    if not (directory / "data.mdb").exists():
        return found
    try:
        with (
            tempfile.TemporaryDirectory(prefix="cachefs-journal-") as place,
            closing(Journal(Path(shutil.copytree(directory, Path(place) / "journal")))) as journal,
        ):
            rows = journal.rows(DIRTY_FILES)
            for name in restorable(rows, journal.contents_by_file(rows).keys()):
                row, path = rows[name], staging / rows[name]["file"]
                content = None if journal.may_be_newer(path) else journal.content(name)
                if content is not None:
                    about = len(content), row["mtime_ns"], row["source"], row["key"]
                    found.append(orphans.Orphan(path, *about, waiting=True, content=content))
    except (OSError, CachefsError) as exc:
        log.debug("%s", exc)
        raise CacheUnusable(
            f"{directory} cannot be read: small files that it alone has are not listed"
        ) from exc
    return found


def restorable(rows: Mapping[str, Mapping[str, Any]], files: Collection[str]) -> set[str]:
    """The ids of the dirty files that come back: they are acknowledged, were not replaced, and have bytes. `files` are the
    names of the staging files that exist, and of those whose contents the journal has."""
    there = {name for name, row in rows.items() if row["acknowledged"] and row["file"] in files}
    return there - replaced_files(rows)


def replaced_files(rows: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The ids of dirty files that an acknowledged one has replaced."""
    return {row["over"] for row in rows.values() if row["acknowledged"] and row["over"] is not None}

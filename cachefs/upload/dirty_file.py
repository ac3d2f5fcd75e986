"""A dirty file: the new content of one file, which is to be uploaded.

Its bytes are in a staging file. One writer at a time changes it, while readers may read. Bytes do not change while they are
being sent: a writer of such bytes waits for the upload if a caller waits for it, and cancels the upload otherwise.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from cachefs.base.errors import CachefsError, Conflict, NoRoom, TooLarge
from cachefs.origin import InMemory, ObjectInfo, Origin, Source, Upload
from cachefs.store.backing import BackingFile
from cachefs.upload.content import Attempt, Content, Row
from cachefs.upload.sending import Parts, Sender
from cachefs.upload.staging import LONG_AGO_NS, Buffer, Shape, StagingFile

if TYPE_CHECKING:
    from cachefs.upload.uploads import Uploads

TOKENS = 8
"""Attempts of unknown outcome whose tokens are remembered. Derived: one may reach the origin a minute late, the usual
deadline of a proxy, and then up to eight were begun (`journal.RETRY_S`). At a conflict, the origin is asked about each."""


class Trying:
    """The state of its uploads. `due` is when the next one begins, by trio's clock; `overdue`: that time came while a
    process was changing the file. `failure` is the error of the last one, until one succeeds; `failures` is how many failed
    in a row; `told`: a caller got the error. `unsure`: the outcome of one is unknown. The holder of the `turn` begins
    attempts, renames or removes."""

    def __init__(self) -> None:
        self.turn = trio.Lock()
        self.due, self.overdue = math.inf, False
        self.failure: CachefsError | None = None
        self.failures = 0
        self.told = self.unsure = False


class Record:
    """The contents of its row in the journal: the `tokens` of attempts whose outcome is unknown, the state of the multipart
    `upload`, and the dirty file that it has replaced (`over`), which a crash must not restore. The holder of the `turn`
    writes the row. The journal has the bytes of the generation `content_of` (-1: of none, or of an unknown one). The record
    for the next daemon has the inode `ino` (0: there is no record); `says_clean`: it says that the origin has the
    content."""

    def __init__(self) -> None:
        self.turn = trio.Lock()
        self.tokens: list[str] = []
        self.upload: dict[str, Any] | None = None
        self.over: DirtyFile | None = None
        self.content_of = -1
        self.ino, self.says_clean = 0, False


class Way(enum.Enum):
    """How the bytes of its staging file may change."""

    HERE = enum.auto()
    """Only through this daemon: by `write`, `truncate` and `allocate`."""
    PASSTHROUGH = enum.auto()
    """A process may write the file in passthrough, which the daemon does not see."""
    SHARED = enum.auto()
    """Through this daemon; and it is the backing file of its users, which may map it and write through the mapping."""
    MAPPED = enum.auto()
    """As SHARED, but no writer has it open any more, and a mapping of one may still exist."""


class Kernel:
    """The kernel's use of its file: the `backing` file as long as a process has it open, and the number of `writers`, which
    are open handles whose process writes in passthrough. `shape` is the file's size and times at the last look. `suspected`
    is the generation of a change that was assumed and not seen (-1: none)."""

    def __init__(self) -> None:
        self.way = Way.HERE
        self.backing: BackingFile | None = None
        self.writers = 0
        self.shape: Shape | None = None
        self.suspected = -1

    @property
    def in_passthrough(self) -> bool:
        return self.way is Way.PASSTHROUGH

    @property
    def shared(self) -> bool:
        return self.way in (Way.SHARED, Way.MAPPED)

    @property
    def mapped(self) -> bool:
        return self.way is Way.MAPPED


class DirtyFile:
    """A dirty file. Only `Uploads` makes it; it is used on the trio thread.

    `size` is in bytes; `mtime_ns` is the time of the last write, or what utimensat set. `base` is the etag of the version
    that it replaces. `attrs` belongs to the filesystem, and is restored after a crash. `handles` counts its users. Only the
    holder of the `lock` changes its content."""

    def __init__(
        self,
        owner: Uploads,
        name: str,
        origin: Origin,
        key: str,
        file: StagingFile,
        size: int,
        *,
        base: str | None,
        mtime_ns: int,
        attrs: Mapping[str, Any],
    ) -> None:
        self.id = name
        self.origin, self.key, self.base = origin, key, base
        self.mtime_ns = mtime_ns
        self.attrs = dict(attrs)
        self.handles = 0
        self.file = file
        self.content, self.trying, self.record, self.kernel = Content(), Trying(), Record(), Kernel()
        self.sender = Sender(self, Parts(origin.limits, size))
        self.lock = trio.Lock()
        self._owner = owner

    @property
    def parts(self) -> Parts:
        return self.sender.parts

    @property
    def size(self) -> int:
        return self.sender.parts.size

    @property
    def dirty(self) -> bool:
        """True if the origin does not have its present content."""
        return self.content.dirty

    @property
    def ino(self) -> int:
        """Its inode, if the next daemon could go on with it; else 0."""
        return self.record.ino

    @property
    def discarded(self) -> bool:
        return self.content.removed

    @property
    def acknowledged(self) -> bool:
        """True if its row restores it after a crash."""
        return self.content.row is Row.ACKNOWLEDGED

    @property
    def attempt(self) -> Attempt | None:
        return self.content.attempt

    @property
    def failure(self) -> CachefsError | None:
        return self.trying.failure

    @property
    def backing(self) -> BackingFile | None:
        return self.kernel.backing

    @property
    def committed(self) -> ObjectInfo | None:
        """The origin's version with exactly this content; None while it is dirty, or while a mapping may make it so."""
        return None if self.content.dirty or self.kernel.mapped else self.stored

    @property
    def stored(self) -> ObjectInfo | None:
        """The last version that was uploaded, of the present content or an earlier one."""
        stored = self.content.stored
        return None if stored is None else stored.info

    @property
    def between(self) -> bool:
        """True if it is open and was changed since the last close or sync, so that its content may be incomplete."""
        return self.handles > 0 and self.content.synced < self.content.generation

    @property
    def waits(self) -> bool:
        """True if it needs an upload, and none is running or planned."""
        return self.attempt is None and self.trying.due == math.inf and self.dirty and not self.discarded

    def has(self, generation: int) -> bool:
        """True if the content of this generation, or of a later one, was uploaded."""
        stored = self.content.stored
        return stored is not None and stored.generation >= generation

    def is_own(self, etag: str, token: str) -> bool:
        """True if an object of the origin is a version that it began with, or one that it made, even if the reply was
        lost."""
        return etag in (self.base, self.stored and self.stored.etag) or token in self.record.tokens

    @property
    def conflicts(self) -> bool:
        """True if its last upload failed because another client's object is at its key, which it must not replace."""
        return isinstance(self.failure, Conflict)

    def copied(self, own: ObjectInfo, info: ObjectInfo) -> None:
        """Note that the origin has copied its version `own` to its new key, as `info`."""
        self.trying.unsure = False
        stored = self.content.stored
        if stored is not None and stored.info.etag == own.etag:
            self.content.stored_as(replace(stored, info=info))

    def moved(self, origin: Origin, key: str, base: str | None) -> None:
        """Set another key. No upload may be running, and no part may be at the origin."""
        self.origin, self.key, self.base = origin, key, base
        self.sender = Sender(self, self.parts)
        self.record.upload, self.record.tokens = None, []
        self._owner.noted(self)

    def row(self) -> dict[str, Any]:
        """Its row in the journal."""
        over = self.record.over
        return {
            "source": self.origin.source,
            "key": self.key,
            "file": self.file.path.name,
            "acknowledged": self.acknowledged,
            "base": self.base,
            "mtime_ns": self.mtime_ns,
            "attrs": self.attrs,
            "tokens": self.record.tokens,
            "upload": self.record.upload,
            "over": None if over is None else over.id,
        }

    def resumed_row(self) -> dict[str, Any]:
        """Its record for the next daemon."""
        return {
            **self.row(),
            "ino": self.ino,
            "dirty": self.content.dirty,
            "way": self.kernel.way.name,
            "spoiled": self.file.spoiled,
            "removed": self.discarded,
        }

    def noted(self) -> None:
        """Update its record for the next daemon."""
        self._owner.noted(self)

    def has_token(self, token: str) -> None:
        """Remember the token of an attempt: an object with it is its own."""
        self.record.tokens = [*self.record.tokens[1 - TOKENS :], token]
        self._owner.noted(self)

    # -- content -----------------------------------------------------------------------------------

    def read_now(self, offset: int, size: int) -> Buffer | None:
        """The bytes, clipped to the content; None if `read` has to be awaited."""
        count = min(size, self.size - offset)
        return self.file.read_now(offset, count) if count > 0 else b""

    async def read(self, offset: int, size: int) -> Buffer:
        """The bytes, clipped to the content."""
        count = min(size, self.size - offset)
        return await self.file.read(offset, count) if count > 0 else b""

    async def write(self, offset: int, data: Buffer) -> None:
        """Write at an offset. Waits while too many bytes are unsent. `data` must not change until this has returned. Raises
        `NoRoom` if the disk stays full, `TooLarge` beyond the origin's limit."""
        async with self.lock:
            count, before = len(data), self.size
            if not count:
                return
            self.within_limits(offset + count)
            if self.kernel.shared:
                self.look()
                before = self.size
            await self._may_change(min(offset, before))
            await self._owner.room.admit(self, count)
            try:
                # Not `appends` for an acknowledged file, which a crash must restore with all later writes.
                appends = offset == before and self.kernel.way is Way.HERE and not self.acknowledged
                await self._with_room(count, lambda: self.file.write(offset, data, appends=appends))
            except CachefsError:
                # How much was written is unknown, but the file's end is where it was.
                if offset < before:
                    self.parts.wrote(offset, min(count, before - offset))
                    self._changed()
                raise
            self.parts.wrote(offset, count)
            self._changed()

    def write_now(self, offset: int, data: Buffer) -> bool:
        """`write` into memory, if that takes no waiting. False, with nothing changed, if it does."""
        count, attempt = len(data), self.attempt
        if not count or not self.file.ends_in_memory or self.kernel.way is not Way.HERE:
            return False
        if self.lock.locked() or not self.content.is_ours:
            return False
        if attempt is not None and min(offset, self.size) < attempt.frozen:
            return False  # these bytes are being sent
        if offset + count > self.origin.limits.largest_object or not self._owner.room.admits(self, count):
            return False
        if not self.file.write_now(offset, data):
            return False
        self.parts.wrote(offset, count)
        self._changed()
        return True

    async def truncate(self, size: int) -> None:
        """Cut or extend the content to `size` bytes; new bytes are zeros."""
        async with self.lock:
            self.within_limits(size)
            self.look()
            if size == self.size:
                return
            await self._may_change(min(size, self.size))
            await self.file.truncate(size)
            self.parts.resized(size)
            self._changed()

    async def allocate(self, offset: int, length: int) -> None:
        """Allocate disk space for [offset, offset + length), and extend the content with zeros to its end."""
        async with self.lock:
            end = offset + length
            self.within_limits(end)
            self.look()
            await self._may_change(self.size)
            await self._owner.room.admit(self, length)
            await self._with_room(length, lambda: self.file.allocate(offset, length))
            if end > self.size:
                self.parts.resized(end)
                self._changed()

    async def _with_room(self, count: int, change: Callable[[], Awaitable[None]]) -> None:
        try:
            await change()
        except NoRoom:
            if not await self._owner.room.more(self, count):
                raise
            await change()

    async def _may_change(self, offset: int) -> None:
        """Wait until bytes from `offset` on may be changed."""
        await self.unsent(offset)
        if self.content.adopted:
            await self._move(await self._owner.renew(self))

    async def unsent(self, offset: int) -> None:
        """Wait until no byte from `offset` on is being sent (-1: no attempt is running). The caller holds the `lock`. An
        attempt without a waiter is cancelled."""
        while (attempt := self.attempt) is not None and offset < attempt.frozen:
            if not attempt.waiters and not self.sender.final:
                attempt.scope.cancel()
            await attempt.done.wait()

    async def _move(self, file: StagingFile) -> None:
        if self.handles:
            file.take()
            self.file.give_back()
        self.file = file
        self.content.renewed()
        self._owner.noted(self)

    def _changed(self) -> None:
        if self.kernel.shared:
            self.kernel.shape = self.file.shared()
        self.content.changed()
        self._owner.wrote(self)

    def within_limits(self, size: int) -> None:
        """Raise `TooLarge` if the origin does not take so many bytes."""
        if size > self.origin.limits.largest_object:
            raise TooLarge(
                f"{self.origin.name(self.key)}: the origin takes {self.origin.limits.largest_object} bytes at most"
            )

    # -- written in passthrough --------------------------------------------------------------------

    def begin_passthrough(self, shape: Shape) -> None:
        """Note that a process may write its file in passthrough from now on. `shape` is the file's present one."""
        self.kernel.shape, self.kernel.way = shape, Way.PASSTHROUGH
        self._owner.noted(self)

    def share(self) -> None:
        """Note that its users read and map its file in passthrough from now on, and write through the daemon. `look` finds
        what they write through mappings."""
        with self.file.used():
            self.kernel.shape = self.file.shared()
        self.kernel.way = Way.SHARED

    def look_for_mappings(self) -> None:
        """For a shared file that no writer has open: find changes made through mappings, and whether a mapping remains.
        Raises `CacheUnusable`."""
        self.kernel.way = Way.MAPPED  # set first, so that it holds if the next line raises
        if not self.file.written():
            self.kernel.way = Way.SHARED
        self.look()

    def may_be_written(self) -> None:
        """Treat it as being in passthrough, because an earlier run may have had it so."""
        self.kernel.way, self.file.in_passthrough = Way.PASSTHROUGH, True
        self.kernel.shape = self.file.shape()

    def resumed(self, row: Mapping[str, Any]) -> None:
        """Restore its state from the previous daemon's record (`resumed_row`). It counts as dirty, because it may have been
        written after the record."""
        self.record.ino = row["ino"]
        self.content.removed = row["removed"]
        self.file.resumed(spoiled=row["spoiled"], removed=row["removed"])
        if row["upload"] is not None:
            self.parts.resumed()
        if row["way"] != Way.HERE.name:
            self.may_be_written()
            self.kernel.way = Way[row["way"]]
            if self.kernel.shape is not None and self.kernel.shape.mtime_ns != LONG_AGO_NS:
                self.mtime_ns = self.kernel.shape.mtime_ns

    def look(self) -> bool:
        """Examine its file, if it may be written in passthrough. True if it has changed since the last look. `size` and
        `mtime_ns` are right afterwards."""
        # The cache has its file, or the file is removed, while a name may still show it.
        if self.content.adopted or (not self.handles and (self.discarded or self.file.removed)):
            return False
        if self.kernel.way is Way.HERE or (shape := self.file.shape()) == self.kernel.shape:
            return False
        self.kernel.shape = shape
        self.parts.rewritten(shape.size)
        self.mtime_ns = shape.mtime_ns
        self.found_changed()
        return True

    def found_changed(self) -> None:
        self.content.changed()
        self._owner.changed(self)
        self._owner.on_changed(self)

    def suspect_change(self, *, shows: bool) -> None:
        """Count it as changed, because a process may still write it through a mapping after its last close. `shows`: the
        file system would show such a write in its mtime."""
        never_written = self.kernel.shape is not None and self.kernel.shape.mtime_ns == LONG_AGO_NS
        self.found_changed()
        if shows and never_written:  # after a write, the next one may leave the same mtime
            self.kernel.suspected = self.content.generation

    def clear_suspicion(self) -> ObjectInfo | None:
        """After `reclaim`: if no process has changed the file since `suspect_change`, make it clean; returns its version."""
        stored = self.content.stored
        if stored is None or self.kernel.suspected != self.content.generation:
            return None
        self.content.stored_as(replace(stored, generation=self.content.generation))
        return self.committed

    def reclaim(self) -> bool:
        """Take it out of passthrough if no process can write it any more. True if it only changes through the daemon now."""
        if self.kernel.writers or self.file.written():
            return False
        self.look()
        self.kernel.way, self.file.in_passthrough = Way.HERE, False
        return True

    # -- for its sender ----------------------------------------------------------------------------

    async def source(self, size: int) -> Source:
        """The first `size` bytes, for an upload. The caller must be a user of its file until they are sent."""
        if self.record.content_of == self.content.generation and not self.file.in_memory:
            content = self._owner.journaled(self)
            if content is not None and len(content) == size:
                if self.file.read_now(0, size) != content:
                    # The page cache has dropped the bytes, or has others: the file was not synced, and no writer is told of
                    # a disk that failed to write it.
                    await self.file.restore(content)
                return InMemory(content)
        return await self.file.source(size)

    async def begun(self, upload: Upload) -> None:
        self.record.upload = upload.state()
        self.has_token(self.record.upload["stamp"])
        await self._owner.keep(self)

    async def orphaned(self, upload: Upload) -> None:
        await self._owner.orphaned(self, upload)

    # -- users -------------------------------------------------------------------------------------

    def open(self) -> None:
        if not self.handles:
            self.file.take()
        self.handles += 1

    def release(self) -> None:
        self.handles -= 1
        if not self.handles:
            self.file.give_back()

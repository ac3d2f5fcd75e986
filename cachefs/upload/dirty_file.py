"""A dirty file: the new content of one file on its way to the origin.

Its bytes are in a staging file. Writers take turns, and readers read beside them. Bytes that are being sent do not change
meanwhile: a writer that reaches such bytes waits for an upload that a caller waits
for, and cancels any other.
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
"""Attempts of unknown outcome that are remembered. Guessed: the last one, and a few that came late."""


class Trying:
    """How its uploads go. `due` is when the next one begins, by the clock of trio; `overdue`: that time came while a process
    was changing it. `failure` is why the last one failed, until one succeeds, after `failures` in a row; `told`: a caller
    knows. `unsure`: the outcome of one is unknown. The holder of the `turn` begins attempts, or renames it."""

    def __init__(self) -> None:
        self.turn = trio.Lock()
        self.due, self.overdue = math.inf, False
        self.failure: CachefsError | None = None
        self.failures = 0
        self.told = self.unsure = False


class Record:
    """What its row in the journal remembers: `tokens` of attempts whose outcome is unknown, the `upload` in parts, and the
    dirty file that had its name before (`over`), which does not come back. The holder of the `turn` writes the row. The
    journal has the content of the generation `content_of` (-1: of none that is known). What the next daemon goes on from has
    the inode `ino` (0: there is no such thing), and may say that the origin has its content."""

    def __init__(self) -> None:
        self.turn = trio.Lock()
        self.tokens: list[str] = []
        self.upload: dict[str, Any] | None = None
        self.over: DirtyFile | None = None
        self.content_of = -1
        self.ino, self.says_clean = 0, False


class Way(enum.Enum):
    """How its bytes change."""

    HERE = enum.auto()
    """By `write` and its like alone."""
    PASSTHROUGH = enum.auto()
    """A process may write the file without our hearing of it."""
    SHARED = enum.auto()
    """Here, and it is the backing file of readers, which may map it."""
    MAPPED = enum.auto()
    """The same, no writer has it open, and one may still write it through a mapping."""


class Kernel:
    """The kernel's use of its file: the `backing` file as long as a process has it open, and the `writers`, open handles
    whose process writes it in passthrough. `shape` is the file as it was looked at last. `suspected` is the generation that
    stands for a change which nothing has shown yet."""

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
    """Made by `Uploads` only, and used from the trio thread.

    `size` is in bytes; `mtime_ns` is the time of the last write, or what utimensat set. `base` is the etag of the version
    that it replaces. `attrs` is the filesystem's to fill and comes back after a crash. `handles` are its open users. The
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
        """Whether it holds something that the origin does not have."""
        return self.content.dirty

    @property
    def ino(self) -> int:
        """Its inode, where the next daemon could go on with it; else 0."""
        return self.record.ino

    @property
    def discarded(self) -> bool:
        return self.content.removed

    @property
    def acknowledged(self) -> bool:
        """True if it comes back after a crash."""
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
        """The version of the origin that has exactly this content; None while dirty, or while a mapping may make it so."""
        return None if self.content.dirty or self.kernel.mapped else self.stored

    @property
    def stored(self) -> ObjectInfo | None:
        """The last version that it made, of whatever content."""
        stored = self.content.stored
        return None if stored is None else stored.info

    @property
    def between(self) -> bool:
        """True if a process that has it open has changed it since it was last closed or synced: what it holds now may be
        half of what is meant."""
        return self.handles > 0 and self.content.synced < self.content.generation

    @property
    def waits(self) -> bool:
        """True if it needs an upload, and none is under way or planned."""
        return self.attempt is None and self.trying.due == math.inf and self.dirty and not self.discarded

    def has(self, generation: int) -> bool:
        """Whether the origin has had what it held then, or later."""
        stored = self.content.stored
        return stored is not None and stored.generation >= generation

    def is_own(self, etag: str, token: str) -> bool:
        """Whether the origin's object under its name is a version that it began with or made, perhaps without being told."""
        return etag in (self.base, self.stored and self.stored.etag) or token in self.record.tokens

    @property
    def conflicts(self) -> bool:
        """Whether what the origin has under its name is another client's object, which was not to be replaced."""
        return isinstance(self.failure, Conflict)

    def copied(self, own: ObjectInfo, info: ObjectInfo) -> None:
        """What it had at the origin is under its new name, as `info`."""
        self.trying.unsure = False
        stored = self.content.stored
        if stored is not None and stored.info.etag == own.etag:
            self.content.stored_as(replace(stored, info=info))

    def moved(self, origin: Origin, key: str, base: str | None) -> None:
        """It is on its way to another key. Nothing of it is under way, or sent."""
        self.origin, self.key, self.base = origin, key, base
        self.sender = Sender(self, self.parts)
        self.record.upload, self.record.tokens = None, []
        self._owner.noted(self)

    def row(self) -> dict[str, Any]:
        """What the journal keeps of it."""
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
        """What the next daemon needs of it, if this one dies."""
        return {
            **self.row(),
            "ino": self.ino,
            "dirty": self.content.dirty,
            "way": self.kernel.way.name,
            "spoiled": self.file.spoiled,
            "removed": self.discarded,
        }

    def noted(self) -> None:
        """What a next daemon would go on from is another by now."""
        self._owner.noted(self)

    def has_token(self, token: str) -> None:
        """An object with this token is an earlier attempt's."""
        self.record.tokens = [*self.record.tokens[1 - TOKENS :], token]
        self._owner.noted(self)

    # -- content -----------------------------------------------------------------------------------

    def read_now(self, offset: int, size: int) -> Buffer | None:
        """The bytes, clipped to the content; None: use `read`."""
        count = min(size, self.size - offset)
        return self.file.read_now(offset, count) if count > 0 else b""

    async def read(self, offset: int, size: int) -> Buffer:
        """The bytes, clipped to the content."""
        count = min(size, self.size - offset)
        return await self.file.read(offset, count) if count > 0 else b""

    async def write(self, offset: int, data: Buffer) -> None:
        """Raises `NoRoom` when the disk stays full, `TooLarge` beyond what the origin takes. Waits while too much is
        unsent. `data` must not change until this has returned."""
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
                # What was acknowledged comes back after a crash with all that was written since.
                appends = offset == before and self.kernel.way is Way.HERE and not self.acknowledged
                await self._with_room(count, lambda: self.file.write(offset, data, appends=appends))
            except CachefsError:
                # How much of it was written is unknown, but for the end, which is where it was.
                if offset < before:
                    self.parts.wrote(offset, min(count, before - offset))
                    self._changed()
                raise
            self.parts.wrote(offset, count)
            self._changed()

    def write_now(self, offset: int, data: Buffer) -> bool:
        """The same if that takes no waiting: into memory. False: nothing has happened."""
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
        """The content ends at `size`; what is new of it is zeros."""
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
        """Room on the disk for [offset, offset + length); the content grows by zeros to its end."""
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
        """Return when bytes from `offset` on may be changed."""
        await self.unsent(offset)
        if self.content.adopted:
            await self._move(await self._owner.renew(self))

    async def unsent(self, offset: int) -> None:
        """Return when no byte from `offset` on is being sent (-1: nothing is). The caller holds the `lock`."""
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
        """Raises `TooLarge` where the origin cannot take so many bytes."""
        if size > self.origin.limits.largest_object:
            raise TooLarge(
                f"{self.origin.name(self.key)}: the origin takes {self.origin.limits.largest_object} bytes at most"
            )

    # -- written by others -------------------------------------------------------------------------

    def begin_passthrough(self, shape: Shape) -> None:
        """From now on a process may write its file, which is like this, in passthrough, unseen here."""
        self.kernel.shape, self.kernel.way = shape, Way.PASSTHROUGH
        self._owner.noted(self)

    def share(self) -> None:
        """From now on all that have it open read and map its file by themselves, and write it here. What one writes through
        a mapping is not heard of; its file tells (`look`)."""
        with self.file.used():
            self.kernel.shape = self.file.shared()
        self.kernel.way = Way.SHARED

    def look_for_mappings(self) -> None:
        """Of one that is shared and that no writer has open: find out what is written, and if more may be. Raises
        `CacheUnusable`."""
        self.kernel.way = Way.MAPPED  # also if this raises
        if not self.file.written():
            self.kernel.way = Way.SHARED
        self.look()

    def may_be_written(self) -> None:
        """An earlier run may have had it in passthrough."""
        self.kernel.way, self.file.in_passthrough = Way.PASSTHROUGH, True
        self.kernel.shape = self.file.shape()

    def resumed(self, row: Mapping[str, Any]) -> None:
        """Go on from what a daemon that has died says of it (`resumed_row`). What it holds is not compared with the
        origin's object: it may have been written since, so it is dirty."""
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
        """True if passthrough writers have changed it since the last look. `size` and `mtime_ns` are right after it."""
        # Its file is the cache's, or removed, while its name is still shown, or being changed.
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
        """A process may still change it after its last close, through a mapping. `shows`: its time would show that."""
        never_written = self.kernel.shape is not None and self.kernel.shape.mtime_ns == LONG_AGO_NS
        self.found_changed()
        if shows and never_written:  # a later time may be that of the next write, too
            self.kernel.suspected = self.content.generation

    def clear_suspicion(self) -> ObjectInfo | None:
        """After `reclaim`: the origin's version, if no process has changed the file after all. It is not dirty any more."""
        stored = self.content.stored
        if stored is None or self.kernel.suspected != self.content.generation:
            return None
        self.content.stored_as(replace(stored, generation=self.content.generation))
        return self.committed

    def reclaim(self) -> bool:
        """True if no process writes it in passthrough any more. Then it changes only through this room."""
        if self.kernel.writers or self.file.written():
            return False
        self.look()
        self.kernel.way, self.file.in_passthrough = Way.HERE, False
        return True

    # -- for its sender ----------------------------------------------------------------------------

    async def source(self, size: int) -> Source:
        """Its first `size` bytes, to be sent. The caller is a user of its file until they are."""
        if self.record.content_of == self.content.generation and not self.file.in_memory:
            content = self._owner.journaled(self)
            if content is not None and len(content) == size:
                if self.file.read_now(0, size) != content:
                    # The page cache has none of it any more, or other bytes. It was not synced, and a disk that fails to
                    # take such a file tells no writer.
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

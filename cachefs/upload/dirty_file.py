"""A dirty file: the new content of one file, which is to be uploaded.

Its bytes are in a staging file. One writer at a time changes it; readers may read meanwhile. Bytes do not change while they
are being sent: a write to such bytes waits for the upload if a caller waits for the upload, and cancels the upload
otherwise.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from cachefs.base.errors import CachefsError, Conflict, NoRoom, NotFound, TooLarge
from cachefs.base.tasks import Lock
from cachefs.origin import InMemory, ObjectInfo, Origin, Source, Upload, new_token
from cachefs.store import BackingFile
from cachefs.upload.content import Attempt, Content, Name, Row
from cachefs.upload.room import StagingRoom
from cachefs.upload.sending import Parts, Sender
from cachefs.upload.staging import LONG_AGO_NS, Buffer, Shape, StagingFile

TOKENS = 8
"""Most attempts of unknown outcome whose tokens are remembered. Derived: one may reach the origin a minute late, the usual
deadline of a proxy, and then up to eight were begun (`journal.RETRY_S`). At a conflict, the origin is asked about each."""


class Trying:
    """The attempts to upload a dirty file. `due` is when the next one begins, by trio's clock (infinite: none is planned).
    `overdue`: that time came while a process was changing the file. `failure` is the error of the last attempt, until one
    succeeds; `failures` is how many have failed in a row; `told`: a caller got the error. `unsure`: the outcome of an
    attempt is unknown. Only the holder of the `turn` begins an attempt, or renames or removes the file."""

    def __init__(self) -> None:
        self.turn = Lock()
        self.due, self.overdue = math.inf, False
        self.failure: CachefsError | None = None
        self.failures = 0
        self.told = self.unsure = False


class Where(NamedTuple):
    """A dirty file's place at the origin, and how it knows its own object there. `base` is the etag of the version that it
    began with or uploaded last (None: there is none). `tokens` are those of attempts whose outcome is unknown (or what they
    begin with, of a file that it has replaced). `copied` is the size of an object that a rename may have copied there (None:
    none has)."""

    key: str
    base: str | None
    tokens: list[str]
    copied: int | None


class Record:
    """What a dirty file stores for later runs. Its row in the journal has `tokens` and `copied` (see `Where`), the state of
    the multipart `upload`, and the id of the dirty file that it has `replaced`, which a crash must not restore. `over` is
    that file, if this run has replaced it.
    The holder of the `turn` writes the row. The journal also has the content of the generation `content_of` (-1: of none, or
    of an unknown one). `ino` is its inode (0: not known). `says_clean`: its record for the next daemon, in shared memory,
    says that the origin has the content."""

    def __init__(self) -> None:
        self.turn = Lock()
        self.tokens: list[str] = []
        self.copied: int | None = None
        self.upload: dict[str, Any] | None = None
        self.over: DirtyFile | None = None
        self.replaced: str | None = None
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
    """The kernel's use of a staging file: the `backing` file while a process has it open, and the number of `writers`, which
    are open handles for writing that use the backing file. `shape` is the file's size and mtime when `DirtyFile.look`
    examined it last. `suspected` is the generation of a change that was assumed and not seen (-1: none)."""

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


class Owner(Protocol):
    """What a dirty file needs of `Uploads`."""

    room: StagingRoom

    def noted(self, dirty_file: DirtyFile) -> None: ...
    def note_removed(self, dirty_file: DirtyFile) -> None: ...
    def wrote(self, dirty_file: DirtyFile) -> None: ...
    def found_changed(self, dirty_file: DirtyFile) -> None: ...
    def journaled(self, dirty_file: DirtyFile) -> bytes | None: ...
    async def keep(self, dirty_file: DirtyFile) -> None: ...
    async def orphaned(self, dirty_file: DirtyFile, upload: Upload) -> None: ...


class DirtyFile:
    """A dirty file. Only `Uploads` makes it; it is used on the trio thread.

    `size` is in bytes; `mtime_ns` is the time of the last write, or the time that utimensat set. `base` is the etag of the
    version at its key that it began with or uploaded last (None: there is none); if conflicts are failures, an upload
    replaces only that version. `attrs` belongs to the filesystem, and is restored after a crash. `handles` counts the users.
    Only the holder of the `lock` changes the content, except `write_now`."""

    def __init__(
        self,
        owner: Owner,
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
        self.lock = Lock()
        self._owner = owner

    @property
    def parts(self) -> Parts:
        return self.sender.parts

    @property
    def size(self) -> int:
        return self.sender.parts.size

    @property
    def dirty(self) -> bool:
        """True if the origin does not have the present content."""
        return self.content.dirty

    @property
    def ino(self) -> int:
        """Its inode; 0 until `Uploads.outlive` has set it."""
        return self.record.ino

    @property
    def discarded(self) -> bool:
        """True if its name is removed, or being removed."""
        return self.content.name is not Name.SHOWN

    @property
    def acknowledged(self) -> bool:
        """True if its row in the journal restores it after a crash."""
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
        """The version at the origin with exactly this content; None if the file is dirty, or if a mapping may change it."""
        return None if self.content.dirty or self.kernel.mapped else self.stored

    @property
    def stored(self) -> ObjectInfo | None:
        """The last version that was uploaded, of the present content or an earlier one."""
        stored = self.content.stored
        return None if stored is None else stored.info

    @property
    def between(self) -> bool:
        """True if the file is open, and was changed since its content was last made durable on this disk. A program may then
        be in the middle of writing it."""
        return self.handles > 0 and self.content.synced < self.content.generation

    @property
    def waits(self) -> bool:
        """True if it needs an upload, and none is running or planned."""
        return self.attempt is None and self.trying.due == math.inf and self.dirty and not self.discarded

    def has(self, generation: int) -> bool:
        """True if the content of this generation, or of a later one, was uploaded."""
        stored = self.content.stored
        return stored is not None and stored.generation >= generation

    def is_own(self, info: ObjectInfo, token: str) -> bool:
        """True if an object at the origin is the version that this file began with, one that its uploads have made, or
        uploads of a file that it has replaced, also if the reply was lost, or one that a rename has copied there."""
        if info.etag in (self.base, self.stored and self.stored.etag) or info.size == self.record.copied:
            return True
        return self.has_made(token)

    async def own_object(self) -> ObjectInfo | None:
        """The origin's current object at its key, if that is its own."""
        with suppress(NotFound):
            info, token = await self.origin.look(self.key)
            if self.is_own(info, token):
                return info
        return None

    def has_made(self, token: str) -> bool:
        """True if the object with this token was made by an upload of this file, or of one that it has replaced."""
        return token.startswith((self._tokens, *self.record.tokens))

    @property
    def conflicts(self) -> bool:
        """True if its last upload failed because another client's object is at its key, which it must not replace."""
        return isinstance(self.failure, Conflict)

    def copied(self, own: ObjectInfo, info: ObjectInfo) -> None:
        """Note that the origin has copied the file's version `own` to the new key, as `info`."""
        self.trying.unsure = False
        self.base, self.record.copied = info.etag, None
        stored = self.content.stored
        if stored is not None and stored.info.etag == own.etag:
            self.content.stored_as(replace(stored, info=info))
        self._owner.noted(self)

    @property
    def where(self) -> Where:
        return Where(self.key, self.base, self.record.tokens, self.record.copied)

    def moved(self, to: Where, over: DirtyFile | None = None) -> None:
        """Set another place, where it replaces `over`. No upload may be running, and no part may be at the origin."""
        self.key, self.base, self.record.tokens, self.record.copied = to
        self.sender = Sender(self, self.parts)
        self.record.upload = None
        self.record.over, self.record.replaced = over, None if over is None else over.id
        if over is not None and over.trying.unsure:
            # The object at the key may be one that `over` has made. It goes with this file, if that is renamed once more.
            self.trying.unsure = True
            self.record.tokens = [over._tokens, *over.record.tokens][:TOKENS]
            if to.copied is None:
                self.record.copied = over.record.copied
        self._owner.noted(self)

    def copy_comes(self, size: int) -> None:
        """Note that a rename, which is to replace this file, may put an object of `size` bytes at its key. If that fails,
        the object is the file's own."""
        self.trying.unsure, self.record.copied = True, size
        self._owner.noted(self)

    def row(self) -> dict[str, Any]:
        """Its row in the journal."""
        return {
            "source": self.origin.source,
            "key": self.key,
            "file": self.file.path.name,
            "acknowledged": self.acknowledged,
            "base": self.base,
            "mtime_ns": self.mtime_ns,
            "attrs": self.attrs,
            "tokens": self.record.tokens,
            "copied": self.record.copied,
            "upload": self.record.upload,
            "over": self.record.replaced,
            "ino": self.ino,
        }

    def resumed_row(self) -> dict[str, Any]:
        """The record for the next daemon: the row, and the state that the journal does not have."""
        return {
            **self.row(),
            "size": self.size,
            "dirty": self.content.dirty,
            "way": self.kernel.way.name,
            "spoiled": self.file.spoiled,
            "removed": self.content.name is Name.GONE,
        }

    def noted(self) -> None:
        """See `Uploads.noted`."""
        self._owner.noted(self)

    def note_removed(self) -> None:
        """See `Uploads.note_removed`."""
        self._owner.note_removed(self)

    @property
    def _tokens(self) -> str:
        """The beginning of the tokens of its attempts. By this, a later run knows an object that no row tells of."""
        return f"{self.id}-"

    def new_token(self) -> str:
        """A token for the next attempt, which is remembered."""
        token = self._tokens + new_token()
        self.has_token(token)
        return token

    def has_token(self, token: str) -> None:
        """Remember the token of an attempt, because an object with it is the file's own."""
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
                # An acknowledged file is not appended in memory, because a crash must restore it with all later writes.
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

    async def send_again(self) -> None:
        """Count the content as changed, because the origin has lost it: the next commit sends it once more."""
        async with self.lock:
            await self._may_change(self.size)
            self.content.changed()
            self._owner.noted(self)

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
        """Call `change`, which writes `count` bytes. If the disk is full, wait for space, and call it once more."""
        try:
            await change()
        except NoRoom:
            if not await self._owner.room.more(self, count):
                raise
            await change()

    async def _may_change(self, offset: int) -> None:
        """Wait until bytes from `offset` on may be changed. If the cache has adopted the staging file, a copy takes its
        place."""
        await self.unsent(offset)
        if self.content.adopted:
            file = await self.file.copied(self.size)
            if self.handles:
                file.take()
                self.file.give_back()
            self.file = file
            self.content.renewed()
            self.noted()

    async def unsent(self, offset: int) -> None:
        """Wait until no byte from `offset` on is being sent; with -1, until no attempt is running. An attempt without a
        waiter is cancelled. The caller holds the `lock`."""
        while (attempt := self.attempt) is not None and offset < attempt.frozen:
            if not attempt.waiters and not self.sender.final:
                attempt.scope.cancel()
            await attempt.done.wait()

    def _changed(self) -> None:
        """Note a change of the content that was made through the daemon."""
        if self.kernel.shared:
            self.kernel.shape = self.file.prepare_passthrough()
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
        changes that they make through mappings."""
        with self.file.used():
            self.kernel.shape = self.file.prepare_passthrough()
        self.kernel.way = Way.SHARED

    def look_for_mappings(self) -> None:
        """For a shared file that no writer has open: find changes made through mappings, and whether a mapping remains.
        Raises `CacheUnusable`."""
        self.kernel.way = Way.MAPPED  # set first, so that it holds if the next line raises
        if not self.file.has_writer():
            self.kernel.way = Way.SHARED
        self.look()

    def may_be_written(self) -> None:
        """Treat the file as being in passthrough, because an earlier run may have opened it in passthrough."""
        self.kernel.way, self.file.in_passthrough = Way.PASSTHROUGH, True
        self.kernel.shape = shape = self.file.shape()
        # The process may have written since the caller examined the file. `look` finds only changes from `shape` on, so the
        # size is that of `shape`, too: otherwise an earlier one would stay.
        self.parts.rewritten(shape.size)

    def resumed(self, row: Mapping[str, Any], *, nameless: bool) -> None:
        """Restore its state from the previous daemon's record (`resumed_row`). The file counts as dirty, because it may have
        been changed after the record was written. `nameless`: it goes on for its handles alone."""
        self.record.ino = row["ino"]
        if nameless:
            self.content.name_gone()
        self.file.spoiled, self.file.removed = row["spoiled"], nameless
        if row["upload"] is not None:
            self.parts.resumed()
        if row["way"] != Way.HERE.name:
            self.may_be_written()
            self.kernel.way = Way[row["way"]]
            if self.kernel.shape is not None and self.kernel.shape.mtime_ns != LONG_AGO_NS:
                self.mtime_ns = self.kernel.shape.mtime_ns

    def acknowledged_before(self, row: Mapping[str, Any]) -> None:
        """Restore its state from the row of an earlier run, which has acknowledged it."""
        self.record.ino = row.get("ino", 0)  # rows of earlier versions have none
        self.content.row = Row.ACKNOWLEDGED
        if self.file.in_memory:
            self.record.content_of = self.content.generation
        else:
            self.may_be_written()  # a process that opened it in that run may still write it in passthrough
        self.content.synced = self.content.generation

    def look(self) -> bool:
        """Examine the staging file, if it may be written in passthrough. True if it has changed since the last call. `size`
        and `mtime_ns` are right afterwards."""
        # The cache has adopted the staging file, or the staging file is removed. A name may still show the dirty file.
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
        """Note a change of the content that was made past the daemon."""
        self.content.changed()
        self._owner.found_changed(self)

    def suspect_change(self) -> None:
        """Count the file as changed, because a process may still write it through a mapping after its last close. The file
        system shows such a write in the mtime."""
        never_written = self.kernel.shape is not None and self.kernel.shape.mtime_ns == LONG_AGO_NS
        self.found_changed()
        if never_written:  # otherwise another write may leave the mtime as it is
            self.kernel.suspected = self.content.generation

    def clear_suspicion(self) -> ObjectInfo | None:
        """Make the file clean, and return its version, if no process has changed it since `suspect_change`; else return
        None. Called after `reclaim`."""
        stored = self.content.stored
        if stored is None or self.kernel.suspected != self.content.generation:
            return None
        self.content.stored_as(replace(stored, generation=self.content.generation))
        return self.committed

    def reclaim(self) -> bool:
        """End passthrough, unless a process can still write the file. True if it changes only through the daemon now."""
        if self.kernel.writers or self.file.has_writer():
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
                    # The page cache has dropped the bytes, or has others. The file was not synced, so no call has reported a
                    # disk that failed to write it.
                    await self.file.restore(content)
                return InMemory(content)
        return await self.file.source(size)

    async def begun(self, upload: Upload) -> None:
        """Record a multipart upload, before its first part."""
        self.record.upload = upload.state()
        self.has_token(self.record.upload["stamp"])
        await self._owner.keep(self)

    async def orphaned(self, upload: Upload) -> None:
        """Record a multipart upload that could not be aborted."""
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

"""A dirty file: the new content of one file on its way to the store.

Its bytes are in a staging file. Who writes finds it as a file of its own: one writer at a time, readers beside. What is
being made an object is not changed meanwhile: a writer that reaches such bytes waits for an upload that a caller waits
for, and cancels any other.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import trio

from cachefs.base.errors import CachefsError, Conflict, NoRoom, TooLarge
from cachefs.origin import ObjectInfo, Origin, Upload
from cachefs.upload.parts import Parts
from cachefs.upload.sending import Sender
from cachefs.upload.staging import Buffer, Shape, StagingFile

if TYPE_CHECKING:
    from cachefs.upload.passthrough import StagingBacking

TOKENS = 8
"""Attempts of unknown outcome that are remembered. Guessed: the last one, and a few that came late."""


class Attempt:
    """One upload of what the dirty file held at `generation`: its first `frozen` bytes, which are not to be changed until it
    is `done`."""

    def __init__(self) -> None:
        self.begun, self.done = trio.Event(), trio.Event()
        self.scope = trio.CancelScope()
        self.error: CachefsError | None = None
        self.waiters = 0
        self.frozen = 0
        self.generation = -1


class Owner(Protocol):
    """What a dirty file asks of `Uploads`."""

    async def keep(self, dirty_file: DirtyFile) -> None:
        """Its row in the journal says what is true now."""

    async def orphaned(self, dirty_file: DirtyFile, upload: Upload) -> None:
        """This upload will not be completed."""

    async def admit(self, dirty_file: DirtyFile, count: int) -> None:
        """Return when as many bytes may be written. `NoRoom` when the disk stays full."""

    async def more_room(self, dirty_file: DirtyFile, count: int) -> bool:
        """The disk was full after all: whether it is worth another attempt."""

    def wrote(self, dirty_file: DirtyFile) -> None:
        """Its content has changed."""

    on_changed: Callable[[DirtyFile], None]
    """Processes that write it in passthrough have changed it."""

    async def renew(self, dirty_file: DirtyFile) -> StagingFile:
        """A new staging file for it, with its content: the cache has the old one."""


class DirtyFile:
    """Made by `Uploads` only, and used from the trio thread.

    `size` is in bytes; `mtime_ns` is the time of the last write, or what utimensat set. `attrs` is the filesystem's to fill
    and comes back after a crash. `handles` are its open users. `failure` is why the last upload failed, until one
    succeeds."""

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
        self.origin, self.key = origin, key
        self.mtime_ns = mtime_ns
        self.attrs = dict(attrs)
        self.handles = 0
        self.failure: CachefsError | None = None
        # The room's own.
        self.file = file
        self.parts = Parts(origin.limits, size)
        self.sender = Sender(origin, key, self.parts, file, self)
        self.base = base  # the etag of the version that it replaces
        self.generation, self.synced = 0, -1  # its content now; as it is surely on the disk
        self.attempt: Attempt | None = None
        self.over: DirtyFile | None = (
            None  # the dirty file that had its name before, which does not come back
        )
        self.tokens: list[str] = []  # tokens of attempts whose outcome is unknown
        self.acknowledged = self.told = self.unsure = False
        self.discarded = self.adopted = self.settling = self.overtaken = False
        self.due, self.failures = math.inf, 0
        self.overdue = False  # it came in between
        self.lock = trio.Lock()  # its content
        self.turn = trio.Lock()  # its name
        self.row_turn = trio.Lock()  # its row in the journal
        self.has_row = False
        self.upload_state: dict[str, Any] | None = None
        self.backing: StagingBacking | None = None  # for the kernel, as long as a process has it open
        self.writers = 0  # open handles whose process writes the file in passthrough
        self.in_passthrough = False  # a process may write it without our hearing of it
        self.shared = False  # it is the backing file of readers: a process may map it, and write that unseen
        self.mapped = False  # of one that is shared: no writer has it open, and one may still write it
        self._shape: Shape | None = None
        self._owner = owner
        self._at_store: tuple[int, ObjectInfo] | None = None

    @property
    def size(self) -> int:
        return self.parts.size

    @property
    def dirty(self) -> bool:
        """Whether it holds something that the store does not have."""
        return self._at_store is None or self._at_store[0] != self.generation

    @property
    def committed(self) -> ObjectInfo | None:
        """The version of the store that has exactly this content; None while dirty, or while a mapping may make it so."""
        return None if self.dirty or self.mapped or self._at_store is None else self._at_store[1]

    @property
    def stored(self) -> ObjectInfo | None:
        """The last version that it made, of whatever content."""
        return self._at_store[1] if self._at_store is not None else None

    @property
    def between(self) -> bool:
        """True if a process that has it open has changed it since it was last closed or synced: what it holds now may be
        half of what is meant."""
        return self.handles > 0 and self.synced < self.generation

    def has(self, generation: int) -> bool:
        """Whether the store has had what it held then, or later."""
        return self._at_store is not None and self._at_store[0] >= generation

    @property
    def conflicts(self) -> bool:
        """Whether what the store has under its name is another client's object, which was not to be replaced."""
        return isinstance(self.failure, Conflict)

    def copied(self, own: ObjectInfo, info: ObjectInfo) -> None:
        """What it had at the store is under its new name, as `info`."""
        self.unsure = False
        if self._at_store is not None and self._at_store[1].etag == own.etag:
            self._at_store = (self._at_store[0], info)

    def moved(self, origin: Origin, key: str, base: str | None) -> None:
        """It is on its way to another key. Nothing of it is under way, or sent."""
        self.origin, self.key, self.base = origin, key, base
        self.sender = Sender(origin, key, self.parts, self.file, self)
        self.upload_state = None
        self.tokens = []

    def row(self) -> dict[str, Any]:
        """What the journal keeps of it."""
        return {
            "source": self.origin.source,
            "key": self.key,
            "file": self.file.path.name,
            "acknowledged": self.acknowledged,
            "base": self.base,
            "size": self.size,
            "mtime_ns": self.mtime_ns,
            "attrs": self.attrs,
            "tokens": self.tokens,
            "upload": self.upload_state,
            "over": None if self.over is None else self.over.id,
        }

    def has_token(self, token: str) -> None:
        """An object with this token is an earlier attempt's."""
        self.tokens = [*self.tokens[1 - TOKENS :], token]

    def stored_as(self, generation: int, info: ObjectInfo) -> None:
        self._at_store = (generation, info)

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
        """Raises `NoRoom` when the disk stays full, `TooLarge` beyond what the store takes. Waits while too much is
        unsent. `data` must not change until this has returned."""
        async with self.lock:
            await self._write(offset, data)

    async def append(self, data: Buffer) -> int:
        """The same at the end, wherever that is by then; returns the offset."""
        async with self.lock:
            offset = self.size
            await self._write(offset, data)
            return offset

    async def truncate(self, size: int) -> None:
        """The content ends at `size`; what is new of it is zeros."""
        async with self.lock:
            self._within_limits(size)
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
            self._within_limits(end)
            self.look()
            await self._may_change(self.size)
            await self._owner.admit(self, length)
            await self._with_room(length, lambda: self.file.allocate(offset, length))
            if end > self.size:
                self.parts.resized(end)
                self._changed()

    async def _write(self, offset: int, data: Buffer) -> None:
        count, before = len(data), self.size
        if not count:
            return
        self._within_limits(offset + count)
        if self.shared:
            self.look()
            before = self.size
        await self._may_change(min(offset, before))
        await self._owner.admit(self, count)
        try:
            await self._with_room(count, lambda: self.file.write(offset, data))
        except CachefsError:
            # How much of it was written is unknown.
            await self.file.truncate(before)
            if offset < before:
                self.parts.wrote(offset, min(count, before - offset))
                self._changed()
            raise
        self.parts.wrote(offset, count)
        self._changed()

    async def _with_room(self, count: int, change: Callable[[], Awaitable[None]]) -> None:
        try:
            await change()
        except NoRoom:
            if not await self._owner.more_room(self, count):
                raise
            await change()

    async def _may_change(self, offset: int) -> None:
        """Return when bytes from `offset` on may be changed."""
        await self.unsent(offset)
        if self.adopted:
            await self._move(await self._owner.renew(self))

    async def unsent(self, offset: int) -> None:
        """Return when no byte from `offset` on is being sent (-1: nothing is); for who holds the `lock`."""
        while (attempt := self.attempt) is not None and attempt.generation >= 0 and offset < attempt.frozen:
            if not attempt.waiters and not self.sender.final:
                attempt.scope.cancel()
            await attempt.done.wait()

    async def _move(self, file: StagingFile) -> None:
        if self.handles:
            file.take()
            self.file.give_back()
        self.file = self.sender.file = file
        self.adopted = False

    def _changed(self) -> None:
        if self.shared:
            self._shape = self.file.shared()
        self.generation += 1
        self._owner.wrote(self)

    def _within_limits(self, size: int) -> None:
        if size > self.origin.limits.largest_object:
            raise TooLarge(
                f"{self.origin.name(self.key)}: the store takes {self.origin.limits.largest_object} bytes at most"
            )

    def within_limits(self) -> None:
        """Raises `TooLarge` where the store cannot take what others have written."""
        self._within_limits(self.size)

    # -- written by others -------------------------------------------------------------------------

    async def begin_passthrough(self) -> None:
        """From now on a process may write it in passthrough, unseen here. The caller holds the `lock`."""
        if not self.in_passthrough:
            self._shape = await self.file.open_backing()
            self.in_passthrough = True

    def share(self) -> None:
        """From now on all who have it open read and map its file by themselves, and write it here. What one writes through
        a mapping is not heard of; its file tells (`look`)."""
        with self.file.used():
            self._shape = self.file.shared()
        self.shared = True

    def look_for_mappings(self) -> None:
        """Of one that is shared and that no writer has open: find out what is written, and if more may be. Raises
        `CacheUnusable`."""
        self.mapped = True
        self.mapped = self.file.written()
        self.look()

    def may_be_written(self) -> None:
        """An earlier run may have had it in passthrough."""
        self.in_passthrough = self.file.in_passthrough = True
        self._shape = self.file.shape()

    def look(self) -> bool:
        """True if passthrough writers have changed it since the last look. `size` and `mtime_ns` are right after it."""
        if self.discarded and not self.handles:  # its file is removed, while its name is still shown
            return False
        if not (self.in_passthrough or self.shared) or (shape := self.file.shape()) == self._shape:
            return False
        self._shape = shape
        self.parts.rewritten(shape.size)
        self.mtime_ns = shape.mtime_ns
        self.found_changed()
        return True

    def found_changed(self) -> None:
        self.generation += 1
        self._owner.on_changed(self)

    def reclaim(self) -> bool:
        """True if no process writes it in passthrough any more. Then it changes only through this room."""
        if self.writers or self.file.written():
            return False
        self.look()
        self.in_passthrough = self.file.in_passthrough = False
        return True

    # -- for its sender ----------------------------------------------------------------------------

    async def begun(self, upload: Upload) -> None:
        self.upload_state = upload.state()
        self.has_token(self.upload_state["stamp"])
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

"""What the filesystem asks of the room that brings written files to the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from cachefs.fs.reader import Backing, Buffer

if TYPE_CHECKING:
    from cachefs.base.names import ObjectId
    from cachefs.origin import Origin
    from cachefs.origin.protocol import ObjectInfo


class DirtyFile(Protocol):
    """The new content of one file on its way to the store. `dirty` says that it holds something the store does not have;
    `committed` is the store's version with exactly this content, None while dirty. `attrs` is what was given to `begin`."""

    @property
    def id(self) -> str: ...
    @property
    def origin(self) -> Origin: ...
    @property
    def key(self) -> str: ...
    @property
    def ino(self) -> int:
        """The inode that it had for the daemon before, if this one resumes it; else 0."""
        ...

    @property
    def size(self) -> int: ...
    @property
    def mtime_ns(self) -> int: ...
    @property
    def dirty(self) -> bool: ...
    @property
    def committed(self) -> ObjectInfo | None: ...
    @property
    def discarded(self) -> bool: ...
    @property
    def base(self) -> str | None:
        """The etag of the version that it replaces at the store; None: there is none."""

    @property
    def conflicts(self) -> bool:
        """Whether its last upload was refused, because what the store has under its name is another client's object."""
        ...

    @property
    def backing(self) -> Backing | None:
        """Its file, while the kernel has it."""

    @property
    def attrs(self) -> dict[str, Any]: ...

    def read_now(self, offset: int, size: int) -> Buffer | None:
        """The bytes, clipped to the dirty file; None when `read` has to be awaited."""

    async def read(self, offset: int, size: int) -> Buffer: ...
    async def write(self, offset: int, data: Buffer) -> None:
        """Raises `NoRoom` when there is no place for it on the disk."""

    def write_now(self, offset: int, data: Buffer) -> bool:
        """The same if that takes no waiting; False: nothing has happened."""
        ...

    def look(self) -> bool:
        """True if passthrough writers have changed it since the last look. `size` and `mtime_ns` are right after it."""
        ...

    async def truncate(self, size: int) -> None: ...
    async def allocate(self, offset: int, length: int) -> None: ...


class Writer(Protocol):
    """Dirty files. A reader or writer of one has it open (`open`, `release`); the last release of a dirty one begins its
    upload. Uploads are tasks of their own: cancelling a waiter does not cancel them."""

    on_committed: Callable[[Any, ObjectInfo], None]
    """Called in the trio thread when the store has a dirty file as it is, before those wake who wait for it."""

    on_settling: Callable[[Any], bool]
    """Called before a dirty file is settled, which is put off while this says False: a name still shows it."""

    on_settled: Callable[[Any], None]
    """Called when a dirty file that no handle has open is the cache's or the store's alone, and not to be opened any
    more."""

    async def begin(
        self,
        origin: Origin,
        key: str,
        *,
        base: ObjectId | None,
        upto: int | None,
        mtime_ns: int,
        attrs: dict[str, Any],
    ) -> Any:
        """A new dirty file that is to replace `base`, with its first `upto` bytes (None: all), or a new file. Raises
        `ObjectChanged` when the store has `base` no more."""

    async def disk_answers(self) -> None:
        """Return when the disk has taken a change: `take` will not wait for it."""

    def take(
        self, origin: Origin, base: ObjectInfo, backing: Any, users: int, attrs: dict[str, Any]
    ) -> Any | None:
        """A dirty file that is to replace `base` and begins with its content, in the very file that the kernel has as
        `backing`: its `users`, all of them the caller's, have the dirty file from now on. None while others use the file."""

    def open(self, dirty_file: Any) -> None: ...
    def release(self, dirty_file: Any) -> None:
        """Never raises, never waits."""

    on_changed: Callable[[Any], None]
    """Called when a dirty file in passthrough is found to have been written."""

    async def open_backing(self, dirty_file: Any) -> Backing | None:
        """The backing file of a dirty file, for one user that writes it in passthrough until `returned`; None: no
        passthrough. The same one until the last user has gone."""

    def returned(self, dirty_file: Any) -> None:
        """Never raises, never waits."""

    def outlive(self, dirty_file: Any, ino: int, *, named: bool) -> None:
        """It is of this inode. Where the connection to the kernel outlives this process, the next daemon has it again: as
        one of `pending`, or of `nameless`, with the number as `ino`. Not `named`: it is discarded next."""

    def resume_backing(self, dirty_file: Any, backing_id: int, *, writes: bool) -> Backing:
        """The same as `open_backing` for a handle of the daemon before, which has this backing id. If it only reads
        (`writes`), it is not `returned`."""
        ...

    async def commit(self, dirty_file: Any) -> None:
        """What close(2) and fsync(2) promise. Raises why it cannot be kept; the dirty file stays."""

    async def rename(
        self,
        dirty_file: Any,
        origin: Origin,
        key: str,
        *,
        base: str | None,
        over: Any = None,
        upload: bool = True,
        leaves: Callable[[ObjectInfo], Awaitable[object]] | None = None,
    ) -> bool:
        """Its content goes to another key, where it is to replace the version `base`, or the dirty file `over` that is being
        discarded. What the store has of it is there, too, when this returns, copied or, unless `upload` is not wanted,
        replaced by what it holds; when the store has all of it, `on_committed` was called. When this raises, it has its old
        name. Returns whether something of it is left under the old key, for the caller to delete. `leaves` is told what that
        will be, before a crash may bring the dirty file back under the new key."""
        ...

    async def discard(
        self, dirty_file: Any, *, replaced: bool, instead: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Nothing of it is uploaded any more; it can be read and written until its last handle is closed. Unless the name
        was `replaced` by another, nothing that its uploads made is left at the store. `instead` takes the name away while
        nothing of it is under way; when that raises, the dirty file is as it was."""

    async def moved(self, old: ObjectId, new: ObjectId) -> None:
        """The store has copied the version `old`, which goes now: `new` has the same bytes."""

    async def note(self, name: str, row: dict[str, Any] | None) -> None:
        """Keep a row (None: no more) that a later run is to find, whatever happens to this one."""

    def notes(self) -> dict[str, dict[str, Any]]:
        """What earlier runs have noted and not removed."""
        ...

    def nameless(self) -> list[Any]:
        """Before the first request: dirty files that were removed while the daemon before had them open."""
        ...

    def pending(self) -> list[Any]:
        """All dirty files that hold something the store does not have."""
        ...

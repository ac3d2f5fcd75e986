"""The protocols through which the filesystem reads bytes. `cachefs.fetch` implements `Reader`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from cachefs.base.names import ObjectId
    from cachefs.origin import Origin

Buffer = bytes | bytearray | memoryview


class Reusable(Protocol):
    """A version that was wholly cached at its last open. `blocks` is its number of blocks."""

    blocks: int

    def reuse(self) -> bool:
        """Open it again if it has no users, is cached as before, and this needs no I/O. False: the caller must open it
        through `Reader`."""
        ...


class Backing(Reusable, Protocol):
    """A whole cache file that the kernel reads by itself. `id` is the kernel's backing id, 0 until it is registered. `reuse`
    does what `Reader.open_backing` does for its version and origin. `Reader.release_backing` gives it back."""

    id: int
    fd: int

    def registered(self, backing_id: int) -> None:
        """Note that the kernel has registered the file. `fd` is closed, because the kernel holds the file itself."""


class Reader(Protocol):
    """Reads bytes of object versions. The filesystem clips offsets and sizes to the object. `passthrough`: files may be
    opened in passthrough, so cached files are made ready for it. `written`: an opened file may be changed here
    (`Uploads.take`)."""

    passthrough: bool
    written: bool

    def open(self, origin: Origin, obj: ObjectId) -> Any:
        """Open one version for reading. Cheap, no I/O. Returns a handle for the other methods."""

    def close(self, opened: Any, unread_blocks: int | None = 0) -> None:
        """Close a handle. If no read came, `unread_blocks` are counted as answered by the kernel's page cache (None: all
        blocks of the version, if all are cached). Never raises."""

    def read_now(self, opened: Any, offset: int, size: int, pid: int) -> Buffer | None:
        """The bytes if they are cached and need no wait; None if `read` has to be awaited."""

    async def read(self, opened: Any, offset: int, size: int, pid: int) -> Buffer:
        """The bytes. Raises `ObjectChanged` if the origin does not have the version any more, and what an origin raises."""
        ...

    def soon_cached(self, obj: ObjectId) -> bool:
        """True if a version should be ready for passthrough in a moment: its last blocks are in flight, or its cache file
        has to be made ready on a disk."""
        ...

    async def wait_until_cached(self, obj: ObjectId, pid: int) -> None:
        """Return when the version is ready for passthrough, or after a short deadline. Raises nothing."""

    def open_backing(self, opened: Any) -> Backing | None:
        """The version's cache file if all blocks are cached and verified, else None. Give it back with `release_backing`."""

    def reusable(self, opened: Any) -> Reusable | None:
        """How to open a version again that is wholly cached and cannot be opened in passthrough. None if it is not so."""

    def restore_backing(self, opened: Any, backing_id: int) -> Backing:
        """The version's cache file that an earlier daemon registered as `backing_id`. Give it back with
        `release_backing`."""
        ...

    def reopen_backing(self, backing: Any) -> None:
        """Add a user to a file in passthrough."""

    def release_backing(self, backing: Any) -> None:
        """Remove a user. Never raises."""

    def cached_bytes(self, obj: ObjectId) -> int:
        """How many bytes of the version are cached on this node."""
        ...

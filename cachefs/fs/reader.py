"""What the filesystem asks of the rooms that hold bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from cachefs.base.names import ObjectId
    from cachefs.origin import Origin

Buffer = bytes | bytearray | memoryview


class Reusable(Protocol):
    """How a version was cached when it was opened last. `blocks` is how many it has."""

    blocks: int

    def reuse(self) -> bool:
        """Open it again, if it has no users and is cached as before, and takes nothing but a look. False: `Reader` knows."""
        ...


class Backing(Reusable, Protocol):
    """A whole file of the cache, registered with the kernel. `id` is the kernel's name for it, 0 until it has one. `reuse`
    is `Reader.open_backing` for the version and origin that it was opened for; `Reader.release_backing` notes its use."""

    id: int
    fd: int

    def registered(self, backing_id: int) -> None:
        """The kernel holds the file by itself now: `fd` is closed."""


class Reader(Protocol):
    """Bytes of object versions. Offsets and sizes lie inside the object: the filesystem clips them. `passthrough` says that
    files are opened in passthrough, and worth making ready for it, `written` that what is opened may be changed here
    (`Uploads.take`)."""

    passthrough: bool
    written: bool

    def open(self, origin: Origin, obj: ObjectId) -> Any:
        """Begin reading one version. Cheap, no I/O."""

    def close(self, opened: Any, unread_blocks: int | None = 0) -> None:
        """No more reads will come. If none came, the kernel's page cache is taken to have answered, and these blocks are
        counted as its; None: all of the version, if they are here. Never raises."""

    def read_now(self, opened: Any, offset: int, size: int, pid: int) -> Buffer | None:
        """The bytes, if they are here already; None when `read` has to be awaited."""

    async def read(self, opened: Any, offset: int, size: int, pid: int) -> Buffer:
        """The bytes. Raises `ObjectChanged` when the version is gone, and what an origin raises."""
        ...

    def soon_cached(self, obj: ObjectId) -> bool:
        """Whether it can be opened in passthrough in a moment: it is on its way, or its file has to be made ready on a
        disk."""
        ...

    async def wait_until_cached(self, obj: ObjectId, pid: int) -> None:
        """Return in that moment, or when it has passed. Raises nothing."""

    def open_backing(self, opened: Any) -> Backing | None:
        """The version's file, when all of it is here, and right. Given back with `release_backing`."""

    def settled(self, opened: Any) -> Reusable | None:
        """What says whether a version is still wholly here, and not to be had in passthrough. None: it is not so now."""

    def restore_backing(self, opened: Any, backing_id: int) -> Backing:
        """The version's file that an earlier daemon has registered as `backing_id`. Given back with `release_backing`."""
        ...

    def reopen_backing(self, backing: Any) -> None:
        """One more user of a file in passthrough."""

    def release_backing(self, backing: Any) -> None:
        """One user less. Never raises."""

    def cached_bytes(self, obj: ObjectId) -> int:
        """How many bytes of it are on this node."""
        ...

"""What the exchange asks of the rooms around it, who gives bytes and where bytes go, and what it raises."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cachefs.errors import CachefsError
from cachefs.peers.wire import BlockRequest, Kind


class NotShared(CachefsError):
    """Not to be had from this node: it is not the owner, the store is not one it shares, or the object is gone."""


class Busy(CachefsError):
    """This node cannot serve more for now."""


class PeerFailed(CachefsError):
    """A peer did not deliver; `kind` says in which way. `delivered` bytes of the request went to the sink, all of them
    whole and checked blocks: the rest is to be had elsewhere. `retry_after_s` is what a busy peer asked for."""

    def __init__(self, kind: Kind, text: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.kind: Kind = kind
        self.delivered = 0
        self.retry_after_s = retry_after_s


class Piece(NamedTuple):
    """Bytes of one block, as a range of an open file.

    `checksum` is the block's xxh3_64 if the block ends with this piece, else None. `in_ram` says that reading the file
    never waits for a disk."""

    fd: int
    offset: int
    length: int
    in_ram: bool
    checksum: int | None


class Served(Protocol):
    """An answer under way. What `take` gave stays valid until `close`."""

    def take(self) -> Piece | None:
        """The next piece, in order, none across blocks; None when it has yet to arrive. Not called after the last."""

    async def wait(self) -> None:
        """Until `take` may have something; may be cancelled and called again. Raises what `Shares.open` raises: before the
        first piece it becomes a status, later it breaks the reply off."""

    def close(self) -> None:
        """The answer is over, sent or not. Called exactly once."""


class Shares(Protocol):
    """Who decides what this node gives away. The server checks only the form of a request."""

    async def open(self, request: BlockRequest, peer: str, *, background: bool = False) -> Served:
        """Raises `NotShared`, `cachefs.errors.ObjectChanged` or `Busy`. `peer` is the asking node's address. With
        `background` nobody waits for the bytes, they only are to be here."""

    async def have(self, request: BlockRequest, peer: str) -> list[bool]:
        """Of each block of the request whether it lies here now. Raises `NotShared`."""


class Sink(Protocol):
    """Where bytes of one request go: called from worker threads, in order, never concurrently."""

    def write_block(self, data: memoryview, checksum: int) -> None:
        """Take the next block; its bytes have this xxh3_64. May raise to stop the transfer (the reader is gone)."""

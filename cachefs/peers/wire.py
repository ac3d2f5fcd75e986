"""The protocol between nodes: HTTP/1.1, four requests, and replies whose every block can be checked.

    GET /v1/blocks?…      blocks [start, stop) of one object version, all within one extent
    GET /v1/prefetch?…    fetch and cache them; the reply is empty, and comes when they are cached
    GET /v1/have?…        which of them this node has cached, as a bitmap
    GET /v1/handshake     this node's handshake

The query has all that a node needs to fetch the object version itself. The fields have one order and none is optional, so
each request can be written in one way only, and its signature covers it as it is written.

The body of a blocks reply is, for each block, its bytes and then its *check*: the xxh3_64 of the bytes (8 bytes,
big-endian), followed by a MAC of 16 bytes if the nodes share a key (`auth`). The check follows the bytes because the owner
sends a block while it is still arriving from the origin. Either side cancels by closing the connection.

A node that must fetch the first block sends `102 Processing` at once and then every second, so a client's deadline detects
a dead peer and not a slow origin. Within a body no such sign is possible: a server that would have to pause for longer
breaks off the reply, and the client requests the rest again. A 102 carries no MAC, because it can do no more than renew a
deadline, up to the deadline of the whole request."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, NamedTuple, Protocol
from urllib.parse import quote, unquote

from cachefs.base.errors import CachefsError
from cachefs.base.http1 import spell_reply
from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId, block_count, block_length

BLOCKS = "/v1/blocks"
PREFETCH = "/v1/prefetch"
HAVE = "/v1/have"
HANDSHAKE = "/v1/handshake"

WORKING = spell_reply(102, {})
"""The sign of life before a reply."""

WORKING_EVERY_S = 1.0
"""Seconds between two signs of life, and the longest pause within a body. Derived: half of what a client waits at most."""

MAX_RANK = 15
"""The highest rank: replicas and successors of one extent together."""

MAC = "Cachefs-MAC"
"""The header with the MAC of a reply."""

MAX_TARGET_BYTES = 14 << 10
"""Leaves room for the other header lines within `http1.MAX_HEAD_BYTES`."""

MAX_SMALL_BODY = 16 << 10
"""Bytes of every reply without blocks. The longest is the bitmap of `MAX_HAVE_BLOCKS`, 8 KiB."""

MAX_HAVE_BLOCKS = 1 << 16
"""64 GiB of an object in one request, at the default block size."""

MAX_HANDSHAKE_TEXT = 256
"""Characters of each text in a handshake: with JSON's escapes, it fits into `MAX_SMALL_BODY`."""

CHECKSUM = struct.Struct(">Q")
MAC_BYTES = 16


def check_bytes(signed: bool) -> int:
    """The number of bytes that follow each block: its checksum, and with a key its MAC."""
    return CHECKSUM.size + (MAC_BYTES if signed else 0)


Kind = Literal["connect", "timeout", "slow", "reset", "not_here", "busy", "changed", "corrupt", "refused"]
"""Why a request to a peer failed. The caller decides what to do next.

- connect: no connection; timeout: silence, or not done in time; reset: the connection broke off.
- slow: bytes come, but much more slowly than the origin sends them (`health.Pace`).
- not_here: the peer is not the owner, does not share that origin, or the object is gone; busy: it serves no more requests
  for now; changed: the origin has another version now.
- corrupt: received bytes fail their check; refused: one of the two nodes does not trust or understand the other.
"""

KIND_OF: Mapping[int, Kind] = {404: "not_here", 412: "changed", 503: "busy"}
"""Status → kind; every other status but 200 is "refused"."""


class Malformed(CachefsError):
    """A peer sent bytes that do not follow this protocol."""


class Address(NamedTuple):
    """Where a peer listens. `host` is a name or an IP address, IPv6 without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        """`host:port`, as in a Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _quoted(name: str) -> str:
    """The name, percent-encoded but for quotation marks, which nearly all etags have."""
    return quote(name, safe='/:"', errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Blocks [start_block, stop_block) of one object version, of `block_size` bytes each but for the object's last.

    `rank` is the server's place in the extent's order of members, as the client knows it. 0 is the owner; above 0, the
    members before the server do not answer."""

    object: ObjectId
    start_block: int
    stop_block: int
    block_size: int
    rank: int = 0

    @property
    def start(self) -> int:
        return self.start_block * self.block_size

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return min(self.object.size, self.stop_block * self.block_size)

    def length(self, block: int) -> int:
        """Bytes of the block with this index in the object."""
        return block_length(block, self.object.size, self.block_size)

    def within_extent(self) -> bool:
        """True if one node owns all of it."""
        return self.start_block // BLOCKS_PER_EXTENT == (self.stop_block - 1) // BLOCKS_PER_EXTENT

    def body_length(self, signed: bool) -> int:
        """Content-Length of the reply."""
        return self.stop - self.start + check_bytes(signed) * (self.stop_block - self.start_block)

    def target(self, path: str) -> str:
        """The request target, ASCII. Raises `Malformed` if the name is too long for any peer."""
        version = self.object
        target = (
            f"{path}?source={_quoted(version.source)}&key={_quoted(version.key)}&etag={_quoted(version.etag)}"
            f"&size={version.size}&block={self.block_size}"
            f"&start={self.start_block}&stop={self.stop_block}&rank={self.rank}"
        )
        if len(target) > MAX_TARGET_BYTES:
            raise Malformed("the object's name is too long to ask a peer for")
        return target


_QUERY = re.compile(
    "source=([^&]+)&key=([^&]+)&etag=([^&]*)"
    "&size=([0-9]{1,18})&block=([0-9]{1,18})&start=([0-9]{1,18})&stop=([0-9]{1,18})&rank=([0-9]{1,18})"
)


def parse_query(query: str, block_size: int) -> BlockRequest:
    """The request that a query describes. Raises `Malformed`, also for a range beyond the object or another block size."""
    match = _QUERY.fullmatch(query)
    if match is None:
        raise Malformed("the query is not a source, a key, an etag and five numbers")
    try:
        source, key, etag = (unquote(name, errors="surrogatepass") for name in match.group(1, 2, 3))
    except UnicodeDecodeError as exc:
        raise Malformed("a name is not UTF-8") from exc
    # With a zero byte in a name, two versions could have one digest (`ObjectId`).
    if "\0" in source or "\0" in etag:
        raise Malformed("a name is impossible")
    size, block, start, stop, rank = map(int, match.group(4, 5, 6, 7, 8))
    if block != block_size:
        raise Malformed(f"blocks have {block_size} bytes here")
    if not 0 <= start < stop <= block_count(size, block):
        raise Malformed("the object has no such blocks")
    if rank > MAX_RANK:
        raise Malformed("a rank beyond all replicas and successors")
    return BlockRequest(ObjectId(source, key, etag, size), start, stop, block, rank)


def pack_bitmap(held: list[bool]) -> bytes:
    """The bitmap of a list: bit i, least significant first, is for the i-th block of the request."""
    bitmap = bytearray((len(held) + 7) // 8)
    for index, is_held in enumerate(held):
        bitmap[index >> 3] |= is_held << (index & 7)
    return bytes(bitmap)


def parse_bitmap(body: bytes, count: int) -> list[bool]:
    """The inverse of `pack_bitmap`. Raises `Malformed`."""
    if len(body) != (count + 7) // 8:
        raise Malformed("the bitmap has another length")
    return [bool(body[index >> 3] >> (index & 7) & 1) for index in range(count)]


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a node tells of itself: its id (`node`), which outlives restarts and changes of address, the protocol's version,
    its cache group, the fingerprint of its sources, and its share of the ring (0: it serves no blocks).

    Each daemon draws a random `life`. `block_size` and `shows` (its sources) explain to people why nodes do not share."""

    node: str
    version: int
    group: str
    sources: str
    weight: float
    life: str = ""
    block_size: int = 0
    shows: str = ""

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, body: bytes) -> Handshake:
        """Parse a handshake of any version: unknown fields are ignored. Raises `Malformed`."""
        try:
            parsed = json.loads(body)
            found = cls(**{field.name: parsed[field.name] for field in fields(cls) if field.name in parsed})
        except (ValueError, TypeError, RecursionError) as exc:
            raise Malformed("not a handshake") from exc
        texts = (found.node, found.group, found.sources, found.life, found.shows)
        if (
            not all(isinstance(text, str) and len(text) <= MAX_HANDSHAKE_TEXT for text in texts)
            or not all(type(number) is int for number in (found.version, found.block_size))
            or type(found.weight) not in (int, float)
        ):
            raise Malformed("not a handshake")
        if not 0 <= found.weight <= 1e6:  # a NaN is refused, too
            raise Malformed("an impossible weight")
        return replace(found, weight=float(found.weight))


VERSION = 3
"""The version of this protocol, and of the rules by which two nodes find the same owner (`Handshake.version`)."""


class NotShared(CachefsError):
    """This node does not serve these blocks: it is not the owner, does not share that origin, or the object is gone."""


class Busy(CachefsError):
    """This node serves no more requests for now."""


class PeerFailed(CachefsError):
    """A request to a peer failed, after `delivered` bytes in checked blocks. The caller fetches the rest elsewhere."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind: Kind = kind
        self.delivered = 0


class ServedBlock(NamedTuple):
    """A block as a range of an open file, and its xxh3_64. With `in_ram`, reading the file never waits for a disk."""

    fd: int
    offset: int
    length: int
    in_ram: bool
    checksum: int


class Served(Protocol):
    """A reply in progress. Blocks from `take` stay valid until `close`."""

    def take(self) -> ServedBlock | None:
        """The next block, in order; None if it has not arrived yet. Not called after the last block."""

    async def wait(self) -> None:
        """Return when `take` may have a block. Can be cancelled and called again. Raises what `Shares.open` raises: before
        the first block the server then replies with a status, after it the server breaks off the reply."""

    def close(self) -> None:
        """Called exactly once, when the reply has ended or was given up."""


class Shares(Protocol):
    """Decides which blocks this node serves to others. The server checks only the form of a request."""

    async def open(self, request: BlockRequest, peer: str, *, background: bool = False) -> Served:
        """Open the blocks of a request. Raises `NotShared`, `cachefs.base.errors.ObjectChanged` or `Busy`. `peer` is the
        client's IP address. With `background` the bytes are only to be cached, and no client waits for them."""

    async def have(self, request: BlockRequest) -> list[bool]:
        """For each block of the request, True if this node has it cached now. Raises `NotShared`."""


class Sink(Protocol):
    """Takes the bytes of one request. Called from worker threads, in order, never concurrently."""

    def write_block(self, data: memoryview, checksum: int) -> None:
        """Take the next block, whose xxh3_64 is `checksum`. May raise to stop the transfer."""

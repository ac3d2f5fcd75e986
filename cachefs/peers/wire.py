"""What nodes say to each other: HTTP/1.1, four questions, and replies whose every block can be checked.

    GET /v1/blocks?…   blocks [start, stop) of one object version, all within one extent
    GET /v1/bring?…    have them there; the reply is empty, and comes when they are
    GET /v1/have?…     which of them this node holds, as a bitmap
    GET /v1/hello      who this node is

The query names the version with all that a node needs to fetch it itself; nothing in it is ever a path. The fields have
one order and no optional members, so that there is one spelling of a request and it can be signed as it is.

The body of a blocks reply is, for each block, its bytes and then its *check*: the xxh3_64 of the bytes (8 bytes,
big-endian), followed by a seal of 16 bytes when the nodes share a key (`auth`). The check follows because the owner sends
a block while it still arrives from the store. Content-Length is known from the request alone, so a broken reply is a short
one. Giving up is closing the connection.

Waiting is not silence: a node that has to fetch the first block says so at once and then every second (`102 Processing`),
so the deadline of whoever asks is for a dead peer and not for a slow store. Within a body nothing can be said: a reply that
has to pause for longer is broken off, and the rest asked for anew. A 102 carries no seal: it can renew a deadline, up to a
total, and nothing else.

Everything here is pure.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

from cachefs.errors import CachefsError
from cachefs.names import BLOCKS_PER_EXTENT, ObjectId, block_count, block_length

BLOCKS = "/v1/blocks"
BRING = "/v1/bring"
HAVE = "/v1/have"
HELLO = "/v1/hello"

WORKING_EVERY_S = 1.0
"""Between two signs of life, and the longest pause within a body. Guessed: half of what an asker waits at most."""

MAX_RANK = 15
"""Members that may be asked for one extent, replicas and heirs together. Guessed."""

AUTHORIZATION = b"authorization"
SEAL = b"cachefs-seal"

MAX_HEAD_BYTES = 16 << 10
"""Of a request or a reply. Derived: the longest key of a store (1,024 characters) takes 12 KiB percent-encoded."""

MAX_TARGET_BYTES = 14 << 10
"""Leaves room for the other header lines."""

MAX_HEADERS = 32

MAX_SMALL_BODY = 16 << 10
"""Of every reply that is not blocks: the bitmap of `MAX_HAVE_BLOCKS` is the longest, 8 KiB."""

MAX_HAVE_BLOCKS = 1 << 16
"""64 GiB of an object in one question, at the default block size."""

MAX_HELLO_TEXT = 256
"""Characters of each text in a hello. Guessed."""

MAX_BLOCK_BYTES = 64 << 20
"""What a request may name; a node refuses any size but its own."""

CHECKSUM = struct.Struct(">Q")
SEAL_BYTES = 16

Kind = Literal["connect", "timeout", "slow", "reset", "not_here", "busy", "changed", "corrupt", "refused"]
"""What went wrong with a peer, for whoever decides what to do next:

- connect: nobody answers there; timeout: silence, or not done in time; reset: the connection broke off.
- slow: bytes come, but much more slowly than the origin sends them (`pace.py`).
- not_here: it is not the owner, does not share that store, or the object is gone; busy: it asked to be left alone for
  a while; changed: the store has another version now.
- corrupt: what came fails its check; refused: it does not trust us or does not understand us, or we do not trust it.
"""

KIND_OF: Mapping[int, Kind] = {404: "not_here", 412: "changed", 503: "busy"}
"""Status → kind; every other status but 200 is "refused"."""


class Malformed(CachefsError):
    """Bytes of a peer that are not this protocol."""


class Address(NamedTuple):
    """Where a peer listens. `host` is a name or an address, IPv6 without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        """As a Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_PLAIN = re.compile(r'[A-Za-z0-9_.~/:"-]*')


def _quoted(name: str) -> str:
    """Percent-encoded. Most names need none; quotation marks, in nearly all etags, are left as they are."""
    return name if _PLAIN.fullmatch(name) else quote(name, safe='/:"', errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Blocks [start_block, stop_block) of one object version, of `block_size` bytes each but for the object's last.

    `rank` is the place of who is asked among the extent's owners, as the asker sees them: 0 is the owner, above that
    those before it do not answer."""

    object: ObjectId
    start_block: int
    stop_block: int
    block_size: int
    rank: int = 0

    @property
    def start(self) -> int:
        """The first byte."""
        return self.start_block * self.block_size

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return min(self.object.size, self.stop_block * self.block_size)

    def length(self, block: int) -> int:
        """Bytes of the block with this index in the object."""
        return block_length(block, self.object.size, self.block_size)

    def within_extent(self) -> bool:
        """Whether one node owns all of it."""
        return self.start_block // BLOCKS_PER_EXTENT == (self.stop_block - 1) // BLOCKS_PER_EXTENT

    def body_length(self, sealed: bool) -> int:
        """Content-Length of the reply."""
        check = CHECKSUM.size + (SEAL_BYTES if sealed else 0)
        return self.stop - self.start + check * (self.stop_block - self.start_block)

    def target(self, path: str) -> str:
        """The request target, ASCII. Raises `Malformed` when no peer would take it (a name too long)."""
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
"""Names and numbers of which a version and its blocks consist."""


def parse_target(target: str) -> tuple[str, str]:
    """(path, query) of a request target. Raises `Malformed`."""
    if len(target) > MAX_TARGET_BYTES:
        raise Malformed("the request target is too long")
    path, _, query = target.partition("?")
    return path, query


def parse_query(query: str, block_size: int) -> BlockRequest:
    """The request that a query of ours spells. Raises `Malformed`, also for a range that the object does not have or a
    block size that is not `block_size`."""
    said = _QUERY.fullmatch(query)
    if said is None:
        raise Malformed("the query is not a source, a key, an etag and five numbers")
    source, key, etag = said.group(1, 2, 3)
    if "%" in query:
        try:
            source, key, etag = (
                unquote(name, errors="surrogatepass") if "%" in name else name for name in (source, key, etag)
            )
        except UnicodeDecodeError as exc:
            raise Malformed("a name is not UTF-8") from exc
    # With a zero byte in them, two versions could have one digest (`ObjectId`); no store has such.
    if "\0" in source or "\0" in etag:
        raise Malformed("a name is impossible")
    size, block, start, stop, rank = map(int, said.group(4, 5, 6, 7, 8))
    if block != block_size:
        raise Malformed(f"blocks have {block_size} bytes here")
    if not 0 <= start < stop <= block_count(size, block):
        raise Malformed("the object has no such blocks")
    if rank > MAX_RANK:
        raise Malformed("nobody is asked so late")
    return BlockRequest(ObjectId(source, key, etag, size), start, stop, block, rank)


def pack_bitmap(held: list[bool]) -> bytes:
    """Bit i of the whole, least significant first, is the i-th block of the request."""
    bits = sum(1 << index for index, here in enumerate(held) if here)
    return bits.to_bytes((len(held) + 7) // 8, "little")


def parse_bitmap(body: bytes, count: int) -> list[bool]:
    """What `pack_bitmap` was given. Raises `Malformed`."""
    if len(body) != (count + 7) // 8:
        raise Malformed("the bitmap has another length")
    bits = int.from_bytes(body, "little")
    return [bool(bits >> index & 1) for index in range(count)]


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a node is: its id, which outlives restarts and other addresses, the protocol's version, its cache group, the
    fingerprint of its sources, and its share of the ring (0: it serves nobody).

    `life` is drawn anew by each daemon. `block_size` and `shows` (its sources, for people) say why two do not share."""

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
    def parse(cls, body: bytes) -> Hello:
        """Raises `Malformed`. Members that a later version added are ignored; an earlier one's may miss the last three."""
        try:
            said = json.loads(body)
            node, version, group, sources, weight = (
                said[name] for name in ("node", "version", "group", "sources", "weight")
            )
            life, block_size, shows = said.get("life", ""), said.get("block_size", 0), said.get("shows", "")
            texts = (node, group, sources, life, shows)
            if not all(isinstance(text, str) and len(text) <= MAX_HELLO_TEXT for text in texts):
                raise Malformed("not a hello")
            if not all(type(number) is int for number in (version, block_size)):
                raise Malformed("not a hello")
            if type(weight) not in (int, float):
                raise Malformed("not a hello")
            if not 0 <= weight <= 1e6:  # also turns away NaN
                raise Malformed("an impossible weight")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise Malformed("not a hello") from exc
        return cls(node, version, group, sources, float(weight), life, block_size, shows)


VERSION = 2
"""Of this protocol, as `Hello.version` has it: of all by which two nodes find the same owner. 1 named members by address."""

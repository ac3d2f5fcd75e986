"""The encoding of one name's row: about 32 bytes for a file with an S3 etag. Pure.

A million names must fit into the memory of a daemon that is allowed 200 MB, so the row is fixed fields of the smallest
width that holds the value, then the etag, packed when it has the usual shape (32 hex digits in quotes).
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from cachefs.fs.inodes import NUMBER_BYTES, inode_key

_WIDE_GENERATION = 0x01
_NANOSECONDS = 0x02
_WIDE_SIZE = 0x04
_UNKNOWN = 0x10
_ETAG_FORM = 0x60
_ETAG_TEXT, _ETAG_MD5, _ETAG_PARTS = 0x00, 0x20, 0x40

_FIXED = [
    struct.Struct(
        ">" + ("I" if flags & 1 else "B") + ("q" if flags & 2 else "I") + ("Q" if flags & 4 else "I")
    )
    for flags in range(8)
]
_MD5 = re.compile(r'"([0-9a-f]{32})"')
_PARTS = re.compile(r'"([0-9a-f]{32})-([1-9][0-9]{0,4})"')  # a multipart upload: digest and number of parts
SECOND = 1_000_000_000
MAX_NS = (1 << 63) - 1
"""The farthest time that a row holds, in nanoseconds from 1970: in the years 1677 and 2262."""

PINNED = 0xFFFFFFFF
"""The generation of a name whose file is being written here. It is newer than any listing, so each listing shows the name,
and none sweeps it."""


class Row(NamedTuple):
    """What is known of one name.

    `generation` is that of the last listing of its directory that showed it. `ino` is its inode. `known` is False if the
    listing gave no size and etag, which are then those of the last known version, if there was one; it is False for a dirty
    file, too. Directories have size 0 and no etag."""

    generation: int
    mtime_ns: int
    size: int
    etag: str
    ino: int = 0
    known: bool = True


NO_ROW = Row(0, 0, 0, "")


def encode(row: Row) -> bytes:
    generation, mtime_ns, size, etag, ino, known = row
    flags = 0
    if generation > 0xFF:
        flags |= _WIDE_GENERATION
    seconds, rest = divmod(mtime_ns, SECOND)
    if rest or not 0 <= seconds <= 0xFFFFFFFF:
        flags |= _NANOSECONDS
        # One date of a placeholder (Go's is of the year 1) or of a wrong clock must not fail the listing of its directory.
        seconds = min(max(mtime_ns, -MAX_NS), MAX_NS)
    if not known:
        flags |= _UNKNOWN
    if size > 0xFFFFFFFF:
        flags |= _WIDE_SIZE
    head = _FIXED[flags & 7].pack(generation, seconds, size) + inode_key(ino)
    if match := _MD5.fullmatch(etag):
        flags |= _ETAG_MD5
        tail = bytes.fromhex(match[1])
    elif match := _PARTS.fullmatch(etag):
        flags |= _ETAG_PARTS
        tail = bytes.fromhex(match[1]) + int(match[2]).to_bytes(3, "big")
    else:
        tail = etag.encode("utf-8", "surrogatepass")
    return bytes((flags,)) + head + tail


def decode(data: bytes) -> Row:
    flags = data[0]
    fixed = _FIXED[flags & 7]
    generation, mtime, size = fixed.unpack_from(data, 1)
    end = 1 + fixed.size + NUMBER_BYTES
    ino = int.from_bytes(data[end - NUMBER_BYTES : end], "big")
    form = flags & _ETAG_FORM
    if form == _ETAG_MD5:
        etag = f'"{data[end:].hex()}"'
    elif form == _ETAG_TEXT:
        etag = data[end:].decode("utf-8", "surrogatepass")
    else:
        etag = f'"{data[end:-3].hex()}-{int.from_bytes(data[-3:], "big")}"'
    return Row(
        generation, mtime if flags & _NANOSECONDS else mtime * SECOND, size, etag, ino, not flags & _UNKNOWN
    )


def generation_of(data: bytes) -> int:
    """The generation of an encoded row. A sweep needs nothing else."""
    return int.from_bytes(data[1:5], "big") if data[0] & _WIDE_GENERATION else data[1]

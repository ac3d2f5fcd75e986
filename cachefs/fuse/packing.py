"""What the filesystem answers, as the kernel's structures want it."""

from __future__ import annotations

import stat

from cachefs.fs import Attributes, Entry
from cachefs.fuse import protocol
from cachefs.fuse.session import Malformed

NO_ATTRIBUTES = (0,) * 16
_U64 = (1 << 64) - 1  # times before 1970 are negative


def attr(attributes: Attributes) -> tuple[int, ...]:
    seconds, nanoseconds = divmod(attributes.mtime_ns, 1_000_000_000)
    size = attributes.size
    return (
        *(attributes.ino, size, -(-size // 512), *(seconds & _U64,) * 3),
        *(
            nanoseconds,
            nanoseconds,
            nanoseconds,
            attributes.mode,
            attributes.nlink,
            attributes.uid,
            attributes.gid,
        ),
        *(0, 1 << 20 if stat.S_ISREG(attributes.mode) else 4096, 0),
    )


def entry_of(attributes: Attributes, ttl: float, least: float = 0.0) -> tuple[int, ...]:
    """For `ttl` seconds the name leads there; the attributes hold as long, and `least` seconds."""
    name, attrs = divmod(int(ttl * 1e9), 10**9), divmod(int(max(ttl, least) * 1e9), 10**9)
    return (attributes.ino, 0, name[0], attrs[0], name[1], attrs[1], *attr(attributes))


def dirent(entry: Entry) -> bytes:
    attributes, name = entry.attributes, entry.name
    head = protocol.DIRENT.pack(attributes.ino, entry.next_offset, len(name), attributes.mode >> 12)
    return head + name.ljust(-(-len(name) // 8) * 8, b"\0")


def direntplus(entry: Entry) -> bytes:
    attributes, name = entry.attributes, entry.name
    head = protocol.DIRENTPLUS.pack(
        *entry_of(attributes, entry.ttl), attributes.ino, entry.next_offset, len(name), attributes.mode >> 12
    )
    return head + name.ljust(-(-len(name) // 8) * 8, b"\0")


def signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def name_of(body: memoryview) -> bytes:
    """The name that arguments end with. Raises `Malformed`."""
    name, nul, _ = bytes(body).partition(b"\0")
    if not nul or not name:
        raise Malformed("a name without an end")
    return name


def names_of(body: memoryview) -> tuple[bytes, bytes]:
    """Both names of a rename. Raises `Malformed`."""
    old, _, rest = bytes(body).partition(b"\0")
    new, nul, _ = rest.partition(b"\0")
    if not old or not new or not nul:
        raise Malformed("a rename without two names")
    return old, new

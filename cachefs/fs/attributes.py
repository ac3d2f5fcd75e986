"""What stat and readdir show."""

from __future__ import annotations

import stat
from dataclasses import dataclass

DIRECTORY_SIZE = 4096
"""Borrowed from ext4; some programs skip directories of size 0."""

FOREVER = 31_536_000.0
"""The longest the kernel is told to keep something: a year of seconds, as infinity is no timeout."""


@dataclass(slots=True)
class Attributes:
    """One inode; never changed. Times are nanoseconds since the epoch; `mode` includes the type. `atime_ns` is only ever set
    by a program (as with noatime); `ctime_ns` is the last change of content, attributes or name.

    Not frozen: making one takes a third of the time then, and a listing makes one for each name."""

    ino: int
    mode: int
    nlink: int
    size: int
    mtime_ns: int
    uid: int
    gid: int
    atime_ns: int
    ctime_ns: int

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)


@dataclass(slots=True)
class Entry:
    """One name of a directory, never changed.

    Reading goes on behind it at `next_offset`. `ttl` is how many seconds the attributes may be kept. It is 0 when they
    have to be looked at before use: what is shown is then what was known last (size 0 when nothing ever was)."""

    name: bytes
    attributes: Attributes
    next_offset: int
    ttl: float


FREE_NAMES = 1 << 40
"""Names that may still be made, as df shows them: there is no end of them, and some monitors take none left for trouble."""


@dataclass(frozen=True, slots=True)
class Space:
    """What statfs shows. An object store has no size; df needs one."""

    block_size: int
    blocks: int
    blocks_free: int
    files: int
    files_free: int
    name_max: int


@dataclass(slots=True)
class Ttls:
    """How long names and attributes of one volume may be used without asking, in seconds; may be changed at any time.
    Infinity never asks again. `revalidate`: each open asks the origin."""

    ttl: float = 60.0
    negative_ttl: float = 5.0
    revalidate: bool = False

    @property
    def strict(self) -> bool:
        """Every name of a path walk is asked for: what the walk was told a moment ago need not be asked again."""
        return self.revalidate and not self.ttl


@dataclass(frozen=True)
class Options:
    """How the tree looks, and the TTLs (in seconds) of volumes that have none of their own. Modes are permission bits."""

    uid: int = 0
    gid: int = 0
    file_mode: int = 0o444
    dir_mode: int = 0o555
    metadata_ttl: float = 60.0
    negative_ttl: float = 5.0
    revalidate_at_open: bool = False
    immutable: bool = False

    @property
    def ttls(self) -> Ttls:
        ttl = float("inf") if self.immutable else self.metadata_ttl
        return Ttls(ttl, self.negative_ttl, self.revalidate_at_open)

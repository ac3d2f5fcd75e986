"""The values that stat, readdir and statfs return, and the options for them."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import Any

DIRECTORY_SIZE = 4096
"""Borrowed from ext4; some programs skip directories of size 0."""

FOREVER = 31_536_000.0
"""The longest time for which the kernel may keep an answer: a year in seconds, because its timeouts must be finite."""


@dataclass(slots=True)
class Attributes:
    """The attributes of one inode. Never changed after it is made. Times are nanoseconds since the epoch; `mode` includes
    the type. Only a program sets `atime_ns` (as with noatime). `ctime_ns` is the last change of content, attributes or name.

    The dataclass is not frozen, which makes an instance in a third of the time; a listing makes one for each name."""

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
    """One name of a directory. Never changed after it is made.

    The next read goes on at `next_offset`. `ttl` is for how many seconds the kernel may keep the attributes. With 0 it must
    ask for them before use: these are then the last known ones (size 0 if none were known)."""

    name: bytes
    attributes: Attributes
    next_offset: int
    ttl: float


FREE_NAMES = 1 << 40
"""Free names that df shows. There is no limit, and some monitors report trouble if none are free."""


@dataclass(frozen=True, slots=True)
class Space:
    """The reply to statfs. An object store has no size, but df needs one."""

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
        """True if each open asks the origin and the TTL is 0, so that each name of a path walk is asked for. An answer of
        the last moment may then count (`Freshness.recent`)."""
        return self.revalidate and not self.ttl


@dataclass(frozen=True)
class Options:
    """How the tree looks. Modes are permission bits."""

    uid: int = 0
    gid: int = 0
    file_mode: int = 0o444
    dir_mode: int = 0o555

    def shape(
        self, ino: int, is_dir: bool, size: int, mtime_ns: int, overrides: dict[str, Any], links: int = 1
    ) -> Attributes:
        """The attributes of a file or directory. For `overrides` see `Overrides.get`."""
        mode = overrides.get("mode", self.dir_mode if is_dir else self.file_mode)
        return Attributes(
            ino,
            mode | (stat.S_IFDIR if is_dir else stat.S_IFREG),
            2 if is_dir else links,
            DIRECTORY_SIZE if is_dir else size,
            overrides.get("mtime_ns", mtime_ns),
            overrides.get("uid", self.uid),
            overrides.get("gid", self.gid),
            overrides.get("atime_ns", mtime_ns),
            overrides.get("ctime_ns", mtime_ns),
        )

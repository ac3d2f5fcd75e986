"""Attribute overrides: modes, owners and times that programs set on this node. An object store has no place for them.

They belong to an inode. If another client replaces the file, the name gets another inode, without them. Other nodes do not
see them."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any

from cachefs.base.linux import HANGS_AFTER_S
from cachefs.fs.inodes import inode_key

if TYPE_CHECKING:
    from cachefs.base.behind import WriteBehind


def without_set_ids(mode: int) -> int:
    """The mode of a file once another owner or another process's write has taken its privileges away. Set-gid without
    group execution means no privilege, and stays. Directories keep both."""
    if stat.S_ISDIR(mode):
        return mode
    return mode & ~stat.S_ISUID & ~(stat.S_ISGID if mode & stat.S_IXGRP else 0)


def written(attrs: dict[str, Any]) -> None:
    """Drop the times that were set, because the content has changed and its own time is shown from now on."""
    attrs.pop("mtime_ns", None)
    attrs.pop("ctime_ns", None)


class Overrides:
    """The overrides by inode. They are stored nowhere else, so they are committed without delay. A caller that promises
    durability awaits `written`."""

    def __init__(self, database: WriteBehind) -> None:
        self._database = database
        self.any = database.stored.count("kept") > 0  # without overrides, no read of the table is made

    def get(self, ino: int) -> dict[str, Any]:
        """The overrides of an inode: some of mode, uid, gid, atime_ns, mtime_ns, ctime_ns."""
        data = self._database.get("kept", inode_key(ino)) if self.any else None
        return {} if data is None else json.loads(data)

    def put(self, ino: int, row: dict[str, Any]) -> None:
        """Replace the overrides of an inode. An empty dict removes them."""
        if row:
            self._database.write([("kept", inode_key(ino), json.dumps(row).encode())], soon=True)
            self.any = True
        elif self.any and self._database.get("kept", inode_key(ino)) is not None:
            self._database.write([("kept", inode_key(ino), None)])

    async def written(self) -> None:
        """Return when what was put survives a kill. Raises `NoRoom`, `CacheUnusable`."""
        await self._database.written(HANGS_AFTER_S)

"""What was set here of files and directories and has no place at the origin: mode, owner, times.

It belongs to an inode on this node: what another client puts under the same name is another inode. Other nodes never see it.
"""

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
    """The content has changed: its own time counts from now on."""
    attrs.pop("mtime_ns", None)
    attrs.pop("ctime_ns", None)


class Overrides:
    """By inode. Nothing else knows it, so it is committed without delay. A caller that promises this awaits `written`."""

    def __init__(self, database: WriteBehind) -> None:
        self._database = database
        self.any = database.count("kept") > 0  # so that a mount where nothing is kept pays nothing

    def get(self, ino: int) -> dict[str, Any]:
        """What was set: mode, uid, gid, atime_ns, mtime_ns, ctime_ns."""
        data = self._database.get("kept", inode_key(ino)) if self.any else None
        return {} if data is None else json.loads(data)

    def put(self, ino: int, row: dict[str, Any]) -> None:
        """Nothing of the row is nothing kept."""
        if row:
            self._database.write([("kept", inode_key(ino), json.dumps(row).encode())], soon=True)
            self.any = True
        elif self.any and self._database.get("kept", inode_key(ino)) is not None:
            self._database.write([("kept", inode_key(ino), None)])

    async def written(self) -> None:
        """Return when a kill does not undo what was put. Raises `NoRoom`, `CacheUnusable`."""
        await self._database.written(HANGS_AFTER_S)

"""What was set here of files and directories and has no place in the store: mode, owner, times.

It belongs to one version of one path on this node. When the object becomes another version through another client, what was
set of the older one does not count any more; other nodes never see it.
"""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any

from cachefs.base.behind import HANGS_AFTER_S
from cachefs.fs.inodes import join

if TYPE_CHECKING:
    from cachefs.base.behind import WriteBehind

FIELDS = ("mode", "uid", "gid", "atime_ns", "mtime_ns", "ctime_ns")


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
    """By the number of the path, and the etag ("" for a directory). Nothing else knows it, so it is committed without delay;
    who promises that awaits `written`."""

    def __init__(self, database: WriteBehind) -> None:
        self._database = database
        self.any = database.count("kept") > 0  # so that a mount where nothing is kept pays nothing

    def get(self, stable: int, etag: str) -> dict[str, Any]:
        """What was set, by `FIELDS`; empty for what is another version by now."""
        data = self._database.get("kept", stable.to_bytes(8, "big"))
        if data is None:
            return {}
        row: dict[str, Any] = json.loads(data)
        return row if row.pop("etag") == etag else {}

    def within(self, number: int) -> list[tuple[int, str, dict[str, Any]]]:
        """(number, etag, what was set) of all that is in the directory of this number."""
        if not self.any:
            return []
        start, stop = join(number, 0).to_bytes(8, "big"), join(number + 1, 0).to_bytes(8, "big")
        rows = [
            (int.from_bytes(key, "big"), json.loads(data))
            for key, data in self._database.scan("kept", start, stop)
        ]
        return [(ino, row.pop("etag"), row) for ino, row in rows]

    def put_many(self, changes: dict[int, tuple[str, dict[str, Any]]]) -> None:
        """By number: the etag, and the row (nothing of it is nothing kept). One transaction."""
        self.any = self.any or bool(changes)
        self._database.write(
            [
                ("kept", ino.to_bytes(8, "big"), json.dumps({"etag": etag, **row}).encode() if row else None)
                for ino, (etag, row) in changes.items()
            ]
        )

    def put(self, stable: int, etag: str, row: dict[str, Any]) -> None:
        """Nothing of the row is nothing kept."""
        key = stable.to_bytes(8, "big")
        if row:
            self._database.write([("kept", key, json.dumps({"etag": etag, **row}).encode())], soon=True)
            self.any = True
        elif self.any and self._database.get("kept", key) is not None:
            self._database.write([("kept", key, None)])

    async def written(self) -> None:
        """Return when a kill does not undo what was put. Raises `NoRoom`, `CacheUnusable`."""
        await self._database.written(HANGS_AFTER_S)

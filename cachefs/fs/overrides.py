"""What was set here of files and directories and has no place in the store: mode, owner, time.

It belongs to one version of one path on this node. When the object becomes another version through another client, what was
set of the older one does not count any more; other nodes never see it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cachefs.base.behind import HANGS_AFTER_S

if TYPE_CHECKING:
    from cachefs.base.behind import WriteBehind

FIELDS = ("mode", "uid", "gid", "mtime_ns")


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

"""What an earlier run has left: rows and files are compared, and each draft either comes back or is cleared away.

| row | file | then |
|---|---|---|
| acknowledged | there | pending again, its upload resumed |
| acknowledged, of a file that another one was renamed over | either | as not acknowledged |
| acknowledged | missing | said, as an error: somebody has removed it |
| acknowledged, of a store that is not mounted | there | both stay for the mount that has it |
| not acknowledged | either | the upload is aborted, the file goes: its writer was told nothing |
| none | there | the file goes |
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from cachefs.origin import Origin
from cachefs.upload.draft import Draft
from cachefs.upload.journal import DRAFTS, ORPHANS
from cachefs.upload.records import Records

log = logging.getLogger(__name__)

Revive = Callable[[str, Mapping[str, Any], Origin], Draft]


async def look(records: Records, staging: Path, revive: Revive) -> list[Draft]:
    """The drafts that come back. Asks the stores nothing. Raises `NoRoom`, `CacheUnusable`."""
    journal, found = records.journal, list[Draft]()
    records.orphans.update(journal.rows(ORPHANS))
    files = set(await trio.to_thread.run_sync(os.listdir, staging))
    rows = journal.rows(DRAFTS)
    replaced = {row["over"] for row in rows.values() if row["acknowledged"]}
    for name, row in rows.items():
        what, there = f"{row['source']}/{row['key']}", row["file"] in files
        origin = records.origin(row["source"], row["key"])
        if row["acknowledged"] and there and name not in replaced:
            files.discard(row["file"])
            if origin is None:
                log.warning("%s waits for its upload, but that store is not mounted here", what)
                continue
            draft = revive(name, row, origin)
            log.info("%s waits for its upload since an earlier run (%d bytes)", what, draft.size)
            found.append(draft)
            continue
        if name in replaced:
            log.info("%s was replaced by another file", what)
        elif row["acknowledged"]:
            log.error("%s was to be uploaded, but somebody has removed %s", what, staging / row["file"])
        else:
            log.info("%s was being written when an earlier run ended: given up", what)
        if row["upload"] is not None:
            await records.orphaned(row["source"], row["key"], row["upload"])
        await journal.write(DRAFTS, name, None)
    for left in files:
        log.info("removing %s, which nobody was told to be safe", staging / left)
        (staging / left).unlink()
    return found

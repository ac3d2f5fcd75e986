"""What an earlier run has left: rows and files are compared, and each dirty file either comes back or is cleared away.

| row | file | then |
|---|---|---|
| acknowledged | there | pending again, its upload resumed |
| acknowledged, of a file that another one was renamed over | either | as not acknowledged |
| acknowledged | missing | said, as an error: it was removed from outside |
| acknowledged, of a store that is not mounted | there | both stay for the mount that has it |
| not acknowledged | either | the upload is aborted, the file goes: its writer was told nothing |
| none | there | the file goes; one that says it was acknowledged, or is none of ours, is kept aside (`orphans.py`) |
| no journal | there | all files are kept aside |
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import trio

from cachefs.origin import Origin
from cachefs.upload import orphans
from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.journal import DIRTY_FILES, ORPHANS
from cachefs.upload.records import Records

log = logging.getLogger(__name__)

Revive = Callable[[str, Mapping[str, Any], Origin], DirtyFile]


async def look(records: Records, staging: Path, revive: Revive) -> list[DirtyFile]:
    """The dirty files that come back. Asks the stores nothing. Raises `NoRoom`, `CacheUnusable`."""
    journal, found = records.journal, list[DirtyFile]()
    records.orphans.update(journal.rows(ORPHANS))
    files = set(await trio.to_thread.run_sync(os.listdir, staging))
    rows = journal.rows(DIRTY_FILES)
    wanted = kept(rows, files)
    replaced = _replaced(rows)
    for name, row in rows.items():
        what = f"{row['source']}/{row['key']}"
        origin = records.origin(row["source"], row["key"])
        if name in wanted:
            files.discard(row["file"])
            if origin is None:
                records.elsewhere.append((row["source"], (staging / row["file"]).stat().st_size))
                continue
            dirty_file = revive(name, row, origin)
            log.info("%s waits for its upload since an earlier run (%d bytes)", what, dirty_file.size)
            found.append(dirty_file)
            continue
        forget = None
        if name in replaced:
            log.info("%s was replaced by another file", what)
            # Its staging file says that it was acknowledged, and without a row it would be kept aside.
            forget = partial(orphans.forget, staging / row["file"])
        elif row["acknowledged"]:
            log.error("%s was to be uploaded, but %s was removed", what, staging / row["file"])
        else:
            log.info("%s was being written when an earlier run ended: given up", what)
        if row["upload"] is not None:
            await records.orphaned(row["source"], row["key"], row["upload"])
        await journal.write(DIRTY_FILES, name, None, first=forget)
    kept_aside = [left for left in files if not orphans.accounted(staging, left)]
    orphans.set_aside(staging, kept_aside, "the journal does not account for what was acknowledged")
    for left in files.difference(kept_aside):
        log.info("removing %s, which was never acknowledged", staging / left)
        try:
            (staging / left).unlink()
        except OSError as exc:
            log.warning("cannot remove %s: %s", staging / left, exc.strerror)
    return found


def kept(rows: Mapping[str, Mapping[str, Any]], files: Collection[str]) -> set[str]:
    """The dirty files that are to come back, of all rows, where these are the staging files."""
    replaced = _replaced(rows)
    there = (name for name, row in rows.items() if row["acknowledged"] and row["file"] in files)
    return {name for name in there if name not in replaced}


def _replaced(rows: Mapping[str, Mapping[str, Any]]) -> set[str | None]:
    return {row["over"] for row in rows.values() if row["acknowledged"]}

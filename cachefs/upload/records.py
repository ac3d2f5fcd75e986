"""What the journal says of each dirty file, and the uploads at the origin that will not be completed.

An *acknowledged* dirty file is one whose writer was told that its bytes are safe here, or that they did not reach the store:
it comes back after a crash, with all that its staging file holds then, as on a local file system."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from cachefs.base.errors import CachefsError
from cachefs.origin import Origin
from cachefs.upload import orphans
from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.journal import DIRTY_FILES, ORPHANS, DiskHangs, Journal

log = logging.getLogger(__name__)

AGAIN_S = 60.0
"""How long what could not be cleared away is left alone. Guessed."""


class Records:
    def __init__(self, journal: Journal, origins: Sequence[Origin]) -> None:
        self.journal = journal
        self.orphans: dict[str, dict[str, Any]] = {}
        self.elsewhere: list[tuple[str, int]] = []  # what waits for another source: that, and bytes
        self._origins = origins
        self._stale: set[str] = set()  # rows that could not be removed
        self._wake = trio.Event()

    def origin(self, source: str, key: str) -> Origin | None:
        """The mounted store that shows this key."""
        found = [o for o in self._origins if o.source == source and key.startswith(o.prefix)]
        return max(found, key=lambda origin: len(origin.prefix), default=None)

    async def keep(self, dirty_file: DirtyFile, within_s: float = math.inf) -> None:
        """Write the dirty file's row as it is now. Raises `NoRoom`, `CacheUnusable`; `DiskHangs` after `within_s`."""
        async with dirty_file.row_turn:
            if not dirty_file.discarded:
                dirty_file.has_row = True
                await self._put(dirty_file, dirty_file.row(), within_s)

    async def acknowledge(self, dirty_file: DirtyFile) -> None:
        """What it holds now is on the disk, and so is a row that says so. Raises `NoRoom`, `CacheUnusable`."""
        dirty_file.look()
        generation = dirty_file.generation
        if dirty_file.synced < generation or dirty_file.in_passthrough:
            await dirty_file.file.sync()
            dirty_file.synced = max(dirty_file.synced, generation)
        async with dirty_file.row_turn:
            if not dirty_file.acknowledged and not dirty_file.discarded:
                dirty_file.has_row = True
                await self._put(dirty_file, {**dirty_file.row(), "acknowledged": True})
                dirty_file.acknowledged = True

    async def _put(self, dirty_file: DirtyFile, row: Mapping[str, Any], within_s: float = math.inf) -> None:
        if not row["acknowledged"]:
            await self.journal.write(DIRTY_FILES, dirty_file.id, row, within_s=within_s)
            return
        path = dirty_file.file.path
        await self.journal.write(
            *(DIRTY_FILES, dirty_file.id, row),
            first=partial(orphans.describe, path, row),
            then=partial(orphans.acknowledge, path),
            within_s=within_s,
        )

    async def forget(self, dirty_file: DirtyFile, within_s: float = math.inf) -> None:
        """The origin has it, or it was removed: it must not come back. Raises `DiskHangs` after `within_s`."""
        async with dirty_file.row_turn:
            was, dirty_file.acknowledged = dirty_file.acknowledged, False
            if dirty_file.has_row:
                dirty_file.has_row = False
                await self._remove(dirty_file.id, dirty_file.file.path if was else None, within_s)

    async def forget_replaced(self, dirty_file: DirtyFile) -> None:
        """Record that the file which `dirty_file` replaced does not come back.

        Until now only the row of `dirty_file` says so (`over`), so this is called before that row is removed. The replaced
        file's own row stays, as one that was not acknowledged: the next start aborts what is left of its upload."""
        over, dirty_file.over = dirty_file.over, None
        if over is None:
            return
        async with over.row_turn:
            was, over.acknowledged = over.acknowledged, False
            if was:
                forget = partial(orphans.forget, over.file.path)
                try:
                    await self.journal.write(DIRTY_FILES, over.id, over.row(), first=forget)
                except CachefsError as exc:
                    log.warning("%s", exc)

    async def orphaned(self, source: str, key: str, upload: Mapping[str, Any]) -> None:
        """This upload (its `state`) is to be aborted, if need be by a later run."""
        name = hashlib.sha256(f"{key}\0{upload['id']}".encode()).hexdigest()
        row = {"source": source, "key": key, "upload": dict(upload)}
        self.orphans[name] = row
        self._wake.set()
        try:
            await self.journal.write(ORPHANS, name, row)
        except CachefsError as exc:
            log.warning("%s; the upload of %s/%s may be left at the store", exc, source, key)

    async def run(self) -> None:
        """Clear away what could not be cleared away at once, until cancelled."""
        while True:
            for name in list(self._stale):
                self._stale.discard(name)
                await self._remove(name)
            for name, row in list(self.orphans.items()):
                await self._abort(name, row)
            self._wake = trio.Event()
            with trio.move_on_after(AGAIN_S if self.orphans or self._stale else float("inf")):
                await self._wake.wait()
                await trio.sleep(1)

    async def _remove(self, name: str, file: Path | None = None, within_s: float = math.inf) -> None:
        first = None if file is None else partial(orphans.forget, file)
        try:
            await self.journal.write(DIRTY_FILES, name, None, first=first, within_s=within_s)
        except DiskHangs:
            raise
        except CachefsError as exc:
            log.warning("%s; trying again", exc)
            self._stale.add(name)
            self._wake.set()

    async def _abort(self, name: str, row: dict[str, Any]) -> None:
        origin = self.origin(row["source"], row["key"])
        if origin is None:
            return
        try:
            await origin.resume_upload(row["key"], row["upload"]).abort()
            await self.journal.write(ORPHANS, name, None)
        except CachefsError as exc:
            log.info("%s; trying again", exc)
            return
        self.orphans.pop(name, None)
        log.info("aborted the unfinished upload of %s", origin.name(row["key"]))

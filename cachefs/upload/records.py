"""What the journal says of each draft, and the uploads at the store that nobody will complete.

An *acknowledged* draft is one whose writer was told that its bytes are safe here, or that they did not reach the store: it
comes back after a crash, with all that its staging file holds then, as on a local file system.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from cachefs.errors import CachefsError
from cachefs.origin import Origin
from cachefs.upload import orphans
from cachefs.upload.draft import Draft
from cachefs.upload.journal import DRAFTS, ORPHANS, Journal

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

    async def keep(self, draft: Draft) -> None:
        """The draft's row says what is true now. Raises `NoRoom`, `CacheUnusable`."""
        async with draft.row_turn:
            if not draft.discarded:
                draft.has_row = True
                await self._put(draft, draft.row())

    async def acknowledge(self, draft: Draft) -> None:
        """What it holds now is on the disk, and so is a row that says so. Raises `NoRoom`, `CacheUnusable`."""
        draft.look()
        generation = draft.generation
        if draft.synced < generation or draft.lent:
            await draft.file.sync()
            draft.synced = max(draft.synced, generation)
        async with draft.row_turn:
            if not draft.acknowledged and not draft.discarded:
                draft.has_row = True
                await self._put(draft, {**draft.row(), "acknowledged": True})
                draft.acknowledged = True

    async def _put(self, draft: Draft, row: Mapping[str, Any]) -> None:
        if not row["acknowledged"]:
            await self.journal.write(DRAFTS, draft.id, row)
            return
        path = draft.file.path
        await self.journal.write(
            *(DRAFTS, draft.id, row),
            first=partial(orphans.describe, path, row),
            then=partial(orphans.acknowledge, path),
        )

    async def forget(self, draft: Draft) -> None:
        """The store has it, or nobody wants it: it shall not come back."""
        async with draft.row_turn:
            was, draft.acknowledged = draft.acknowledged, False
            if draft.has_row:
                draft.has_row = False
                await self._remove(draft.id, draft.file.path if was else None)

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

    async def _remove(self, name: str, file: Path | None = None) -> None:
        try:
            await self.journal.write(
                DRAFTS, name, None, first=None if file is None else partial(orphans.forget, file)
            )
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

"""The half of a daemon that brings what is written to the store: opened before the mount is there, ended after it has gone.

Its tasks belong to a nursery that outlives the mount's, so that a stop (umount, a signal, a failing room) first takes the
mount away and then waits for what is still on its way, as long as it was told to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from cachefs.config import Config
from cachefs.errors import CacheUnusable, NotFound
from cachefs.fetch import Fetcher
from cachefs.metrics import Metrics
from cachefs.origin import Origin
from cachefs.store import Store
from cachefs.units import about_bytes, about_files
from cachefs.upload import Draft, Uploads, through
from cachefs.upload.journal import DRAFTS, Journal
from cachefs.upload.queue import in_vain
from cachefs.upload.recovery import kept

log = logging.getLogger(__name__)

NAMED = 10
"""Failing files that are named in an answer."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """What an earlier mount of this cache directory had promised to bring to the store, and this one does not: the sizes of
    files, and `why`."""

    sizes: Sequence[int] = ()
    why: str = ""

    def __str__(self) -> str:
        """ "" when there is nothing."""
        if not self.sizes:
            return ""
        found = f"{about_files(len(self.sizes))} ({about_bytes(sum(self.sizes))})"
        return f"an earlier mount has not brought to the store: {found}: {self.why}"

    async def flush(self, path: str = "", seconds: float = 0.0, last: bool = False) -> dict[str, Any]:
        """As `Uploading.flush`, of a mount that sends nothing."""
        files = len(self.sizes)
        failures = [{"path": "of an earlier mount", "error": self.why}] if files else []
        return {"files": files, "bytes": sum(self.sizes), "in_vain": files, "failures": failures}


class Uploading:
    """Opens the journal, which blocks. Raises `CacheUnusable` when it cannot be read, or nothing lasting can be written and
    lasting is what `--writeback` promises."""

    def __init__(
        self,
        config: Config,
        state_dir: Path,
        keep_free_bytes: int,
        origins: Sequence[Origin],
        store: Store,
        fetcher: Fetcher,
        metrics: Metrics,
        nursery: trio.Nursery,
    ) -> None:
        if config.writeback and state_dir != config.cache_dir:
            raise CacheUnusable(
                f"--writeback needs a cache directory that can be written, and {config.cache_dir} cannot: choose another "
                "--cache-dir"
            )
        self._places = {id(o): (s.name, o) for s, o in zip(config.sources, origins, strict=True)}
        self._staging = staging_of(state_dir)
        self._deadline_s = config.flush_deadline
        self._hurry = trio.CancelScope()
        self.unsent = Unsent()
        self.uploads = Uploads(
            state_dir,
            self._staging,
            origins,
            store,
            metrics,
            nursery=nursery,
            bring=through(fetcher),
            writeback=config.writeback,
            upload_delay_s=config.upload_delay,
            on_conflict=config.on_conflict,
            keep_free_bytes=keep_free_bytes,
        )

    async def recover(self) -> None:
        """What an earlier daemon had not brought to the store: before the mount, so that nobody misses it."""
        found = await self.uploads.recover()
        if found:
            of = f"{about_files(len(found))} ({about_bytes(_bytes(found))}) of an earlier mount"
            log.info("on their way to the store: %s", of)
        if waiting := self.uploads.elsewhere:
            sources = ", ".join(sorted({source for source, _ in waiting}))
            self.unsent = Unsent(
                [size for _, size in waiting], f"mount {sources} with this cache directory once"
            )

    def hurry(self) -> None:
        """Whoever stops us does not want to wait."""
        self._hurry.cancel()

    async def finish(self) -> bool:
        """Nobody writes any more: wait for what is on its way, and say what could not be brought there. Whether the store
        has all of it."""
        self.uploads.unmounted()
        with trio.CancelScope(shield=True):
            pending = [draft for draft in self.uploads.pending() if draft.acknowledged or not draft.handles]
            if pending:
                log.info("uploading %s (%s)", about_files(len(pending)), about_bytes(_bytes(pending)))
                with self._hurry:
                    await self.uploads.flush(deadline_s=self._deadline_s, at_the_end=True)
            left = await self.uploads.aclose(0.0)
        for draft in left[:NAMED]:
            log.warning(
                "%s is not in the store: %s", self.path_of(draft), draft.failure or "it takes too long"
            )
        if left:
            log.warning(
                "not in the store: %s (%s) in %s, and the next mount of this cache that can be written sends it",
                about_files(len(left)),
                about_bytes(_bytes(left)),
                self._staging,
            )
        return not left

    # -- what people ask ---------------------------------------------------------------------------

    async def flush(self, path: str = "", seconds: float = 0.0, last: bool = False) -> dict[str, Any]:
        """What is not in the store at and below `path` (relative to the mount), after waiting so long for it. Uploads that
        would wait for their delay begin at once. `last`: whoever asks has waited long enough, and unmounts now."""
        self._hurry = trio.CancelScope()
        if last:
            self._hurry.cancel()
        left = await self.uploads.flush(self.below(path), seconds)
        failing = [draft for draft in left if draft.failure is not None]
        others = await (Unsent() if path.strip("/") else self.unsent).flush()
        return {
            "files": len(left) + others["files"],
            "bytes": _bytes(left) + others["bytes"],
            "in_vain": sum(in_vain(d.failure) for d in failing if d.failure is not None) + others["in_vain"],
            "failures": [
                *({"path": self.path_of(draft), "error": str(draft.failure)} for draft in failing[:NAMED]),
                *others["failures"],
            ],
        }

    def status(self) -> dict[str, Any]:
        """For `cachefs status`: plain values."""
        return {**self.uploads.status(), "flush_deadline": self._deadline_s}

    def below(self, path: str) -> Callable[[Draft], bool] | None:
        """Which drafts are at or below a path. Raises `NotFound` for one of no store."""
        parts = path.strip("/")
        if not parts:
            return None
        for name, origin in self._places.values():
            if name and parts != name and not parts.startswith(name + "/"):
                continue
            rest = parts[len(name) :].strip("/") if name else parts
            key = origin.prefix + rest
            return partial(_is_below, origin, key.rstrip("/"))
        raise NotFound(f"no such path: {path}")

    def path_of(self, draft: Draft) -> str:
        """Where a draft is below the mount."""
        name, origin = self._places[id(draft.origin)]
        return f"{name}/{draft.key.removeprefix(origin.prefix)}".lstrip("/")


def staging_of(state_dir: Path) -> Path:
    """Where drafts are. On the file system of the cache, which takes them over by renaming them."""
    return state_dir / "staging"


def left_behind(state_dir: Path) -> Unsent:
    """For a mount that sends nothing. Blocking. Raises `CacheUnusable` for a journal that cannot be read."""
    staging = staging_of(state_dir)
    try:
        sizes = {file.name: file.stat().st_size for file in staging.iterdir()}
    except OSError:
        return Unsent()
    if not sizes:
        return Unsent()
    if not (state_dir / "journal" / "data.mdb").exists():
        return (
            Unsent()
        )  # a mount that can be written keeps them aside: an empty journal must not account for them
    journal = Journal(state_dir / "journal")
    try:
        rows = journal.rows(DRAFTS)
    finally:
        journal.close()
    files = [sizes[rows[name]["file"]] for name in kept(rows, sizes)]
    return Unsent(files, "mount it without --read-only once")


def _is_below(origin: Origin, key: str, draft: Draft) -> bool:
    return draft.origin is origin and (not key or draft.key == key or draft.key.startswith(key + "/"))


def _bytes(drafts: Sequence[Draft]) -> int:
    return sum(draft.size for draft in drafts)

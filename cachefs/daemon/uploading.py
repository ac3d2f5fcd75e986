"""The uploads of a mount. They begin before the mount, and end after it has gone.

Their tasks belong to a nursery that outlives the mount's. So a stop (an umount, a signal, a failure) first unmounts, and
then waits for the remaining uploads, up to `--flush-deadline`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from cachefs.base.errors import NotFound
from cachefs.base.units import about_bytes, about_files
from cachefs.config.config import Config
from cachefs.origin import Origin
from cachefs.upload import DirtyFile, Uploads
from cachefs.upload.journal import DIRTY_FILES, Journal
from cachefs.upload.queue import in_vain
from cachefs.upload.recovery import restorable
from cachefs.upload.staging import Lost

log = logging.getLogger(__name__)

NAMED = 10
"""Most files that an answer or the log names."""

BEING_WRITTEN = "a program has it open for writing: it is uploaded when that closes it"


@dataclass(frozen=True, slots=True)
class Unsent:
    """The sizes of files that an earlier mount of this cache directory acknowledged and that this one does not upload."""

    sizes: Sequence[int] = ()
    why: str = ""

    def __str__(self) -> str:
        """One line for users; "" if there are no such files."""
        if not self.sizes:
            return ""
        found = f"{about_files(len(self.sizes))} ({about_bytes(sum(self.sizes))})"
        return f"an earlier mount has not brought to the origin: {found}: {self.why}"

    async def flush(self, path: str = "", seconds: float = 0.0, last: bool = False) -> dict[str, Any]:
        """The answer of `Uploading.flush` for a mount that uploads nothing."""
        files = len(self.sizes)
        failures = [{"path": "of an earlier mount", "error": self.why}] if files else []
        return {"files": files, "bytes": sum(self.sizes), "in_vain": files, "failures": failures}


class Uploading:
    """The uploads of a mount."""

    def __init__(
        self, config: Config, origins: Sequence[Origin], staging_dir: Path, uploads: Uploads
    ) -> None:
        self._names = {o: s.name for s, o in zip(config.sources, origins, strict=True)}
        self._staging = staging_dir
        self._deadline_s = config.flush_deadline
        self._hurry = trio.CancelScope()
        self.unsent = Unsent()
        self.uploads = uploads

    async def recover(self, open_inos: Container[int] = frozenset()) -> None:
        """Resume the uploads of an earlier daemon, before the mount, so that readers see these files from the start."""
        found = await self.uploads.recover(open_inos)
        if found:
            files = f"{about_files(len(found))} ({about_bytes(_bytes(found))}) of an earlier mount"
            log.info("on their way to the origin: %s", files)
        if waiting := self.uploads.elsewhere:
            sources = ", ".join(sorted({source for source, _ in waiting}))
            sizes = [size for _, size in waiting]
            self.unsent = Unsent(sizes, f"mount {sources} with this cache directory once")

    def hurry(self) -> None:
        """A second signal skips the remaining uploads."""
        self._hurry.cancel()

    async def finish(self) -> bool:
        """After the mount has gone, wait for uploads. Logs the files that are left; returns True if there are none."""
        self.uploads.unmounted()
        with trio.CancelScope(shield=True):
            pending = [file for file in self.uploads.pending() if file.acknowledged or not file.handles]
            if pending:
                log.info("uploading %s (%s)", about_files(len(pending)), about_bytes(_bytes(pending)))
                with self._hurry:
                    await self.uploads.flush(deadline_s=self._deadline_s, at_the_end=True)
            promised = not self.uploads.journal.removed
            left = await self.uploads.aclose(0.0)
        for dirty_file in left[:NAMED]:
            why = dirty_file.failure or "it takes too long"
            log.warning("%s is not at the origin: %s", self.path_of(dirty_file), why)
        staged = [dirty_file for dirty_file in left if not isinstance(dirty_file.failure, Lost)]
        if len(staged) < len(left):
            lost = about_files(len(left) - len(staged))
            log.error("lost: %s, removed from %s from outside", lost, self._staging)
        if staged:
            then = "and the next mount of this cache that can be written sends it"
            if not promised:
                then = f"whose journal was removed: cachefs recover {self._staging.parent} copies it"
            found = f"{about_files(len(staged))} ({about_bytes(_bytes(staged))})"
            log.warning("not at the origin: %s in %s, %s", found, self._staging, then)
        return not left

    # -- for the control socket --------------------------------------------------------------------

    async def flush(self, path: str = "", seconds: float = 0.0, last: bool = False) -> dict[str, Any]:
        """Wait up to `seconds` for uploads at and below `path` (relative to the mount). Returns what is left. Uploads that
        wait for their delay begin at once. `last`: the client unmounts now, and the stop does not wait for uploads again."""
        self._hurry = trio.CancelScope()
        if last:
            self._hurry.cancel()
        left = await self.uploads.flush(self.below(path), seconds)
        failing = [dirty_file for dirty_file in left if dirty_file.failure is not None]
        why = [(dirty_file, str(dirty_file.failure)) for dirty_file in failing]
        why += [(d, BEING_WRITTEN) for d in left if d.failure is None and d.kernel.in_passthrough]
        others = await (Unsent() if path.strip("/") else self.unsent).flush()
        return {
            "files": len(left) + others["files"],
            "bytes": _bytes(left) + others["bytes"],
            "lost": sum(isinstance(dirty_file.failure, Lost) for dirty_file in failing),
            "promised": not self.uploads.journal.removed,
            "in_vain": sum(in_vain(d.failure) for d in failing if d.failure is not None) + others["in_vain"],
            "failures": [{"path": self.path_of(d), "error": error} for d, error in why[:NAMED]]
            + others["failures"],
        }

    def status(self) -> dict[str, Any]:
        """The values for `cachefs status`."""
        return {**self.uploads.status(), "flush_deadline": self._deadline_s}

    def below(self, path: str) -> Callable[[DirtyFile], bool] | None:
        """A predicate for dirty files at or below a path; None for all. Raises `NotFound` for a path below no origin."""
        parts = path.strip("/")
        if not parts:
            return None
        for origin, name in self._names.items():
            if name and parts != name and not parts.startswith(name + "/"):
                continue
            key = origin.prefix + parts.removeprefix(name).strip("/")
            return partial(_is_below, origin, key.rstrip("/"))
        raise NotFound(f"no such path: {path}")

    def path_of(self, dirty_file: DirtyFile) -> str:
        """The path of a dirty file, relative to the mount."""
        origin = dirty_file.origin
        return f"{self._names[origin]}/{dirty_file.key.removeprefix(origin.prefix)}".lstrip("/")


def staging_of(state_dir: Path) -> Path:
    """The directory of staging files: on the file system of the cache, so that it can adopt them by a rename."""
    return state_dir / "staging"


def left_behind(state_dir: Path) -> Unsent:
    """The files that an earlier mount has left. Blocks. Raises `CacheUnusable` for a journal that cannot be read."""
    staging = staging_of(state_dir)
    if not staging.is_dir() or not (state_dir / "journal" / "data.mdb").exists():
        # The next writable mount moves them to a directory of their own. Opening the journal would create an empty one.
        return Unsent()
    journal = Journal(state_dir / "journal", staging)
    try:
        rows = journal.rows(DIRTY_FILES)
        sizes = journal.contents_by_file(rows)
        sizes |= {file.name: file.stat().st_size for file in staging.iterdir()}
    finally:
        journal.close()
    files = [sizes[rows[name]["file"]] for name in restorable(rows, sizes)]
    return Unsent(files, "mount it without --read-only once")


def _is_below(origin: Origin, key: str, dirty_file: DirtyFile) -> bool:
    return dirty_file.origin is origin and (
        not key or dirty_file.key == key or dirty_file.key.startswith(key + "/")
    )


def _bytes(dirty_files: Sequence[DirtyFile]) -> int:
    return sum(dirty_file.size for dirty_file in dirty_files)

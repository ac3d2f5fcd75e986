"""Opening the store with the tiers that the directories allow.

With a missing, read-only or full cache directory there is no SSD tier, without a tmpfs no RAM tier; without either, blocks
only pass through memory. The mount starts in any case, with a line in `warnings` for each missing tier. Only a directory
that another daemon uses is refused, because two owners would corrupt each other's accounting.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from cachefs.base import durable, ownership
from cachefs.base.errors import CacheInUse, CacheUnusable, NoRoom
from cachefs.base.metrics import Metrics
from cachefs.store import ram
from cachefs.store.catalog import Index
from cachefs.store.eviction import Policy
from cachefs.store.store import Store
from cachefs.store.tier import NAMES, RAM, SSD, Tier

log = logging.getLogger(__name__)

TRASH = "trash-" + "[0-9a-f]" * 32
"""What `_discard` names a directory. A user's own directory `trash-…` may lie beside a cache."""


@dataclass
class OpenStore:
    """The open store. `state_dir` is for small databases: the cache directory, or its replacement. `temporary` directories
    are removed by `close`. `claims` are descriptors that keep RAM tiers locked. `killed`: the daemon before ended by SIGKILL
    (see `Database`)."""

    store: Store
    state_dir: Path
    warnings: list[str] = field(default_factory=list)
    temporary: list[Path] = field(default_factory=list)
    claims: list[int] = field(default_factory=list)
    killed: bool = False

    def close(self) -> None:
        """Release all memory and directories, after `Store.aclose`, or instead of it if the daemon could not start.
        Blocking."""
        self.store.abandon()
        _close_all(self.claims)
        _remove_all(self.temporary)


def open_store(
    cache_dir: Path,
    cache_bytes: int,
    ram_bytes: int,
    keep_free_bytes: int,
    block_size: int,
    verify: str,
    metrics: Metrics,
    eviction: Policy = "auto",
    *,
    killed: bool = False,
) -> OpenStore:
    """Open the store. Raises `CacheInUse` if another daemon has the directory, `CacheUnusable` if no directory for the index
    can be written."""
    with ExitStack() as undo:  # removes what was made if a later step fails
        warnings: list[str] = []
        temporary: list[Path] = []
        claims: list[int] = []
        undo.callback(_remove_all, temporary)
        undo.callback(_close_all, claims)
        own, shared = ram.own_directory(cache_dir), ram.shared_directory(cache_dir)
        index, state_dir = _open_index(cache_dir, shared, block_size, warnings, temporary, killed)
        undo.callback(index.close, whole=False)
        places = [path for path in (cache_dir, own, shared) if _ours(path)]
        if index.dropped:
            warnings.append("the cache index was damaged or of another format: the cache starts empty")
            for path in places:
                _discard(path / "objects")
        for path in places:
            for rubbish in path.glob(TRASH):
                _delete_in_background(rubbish)
        tiers: list[Tier] = []
        for number, cap in ((RAM, ram_bytes), (SSD, cache_bytes)):
            if cap < block_size:
                if number == RAM:
                    # A killed daemon may have left a RAM tier, whose memory would not be counted.
                    ram.forget(own, shared)
                continue
            try:
                if number == RAM:
                    place = ram.provide(cache_dir, cap)
                    claims.append(ram.claim(place.path, cache_dir))
                    undo.callback(ram.take_away, place.path)
                else:
                    ownership.claim(cache_dir)
                    place = ram.Place(cache_dir, keep_free_bytes)
                tier = Tier(
                    number, place.path, cap, keep_free_bytes=place.keep_free_bytes, clock=time.monotonic
                )
                _check_tag(index, tier)
                tiers.append(tier)
            except (CacheUnusable, NoRoom, OSError) as exc:
                warnings.append(f"no {NAMES[number]} tier: {exc}")
                if number == RAM:
                    _close_all(claims)
                    ram.forget(own, shared)
        if not tiers:
            warnings.append("no tier at all: nothing is cached but what the kernel keeps")
        store = Store(index, tiers, block_size, verify, metrics, time.monotonic, eviction)
        undo.pop_all()
    return OpenStore(store, state_dir, warnings, temporary, claims, killed)


def _ours(path: Path) -> bool:
    """True if the path is missing or this user's directory. Any user can create names in /dev/shm."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    except OSError:  # another user's, below a file or a dead mount, on a disk with errors
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _open_index(
    cache_dir: Path, shared: Path, block_size: int, warnings: list[str], temporary: list[Path], killed: bool
) -> tuple[Index, Path]:
    first: CacheUnusable | None = None
    for place in (cache_dir, shared, None):
        if place is None:
            place = Path(tempfile.mkdtemp(prefix="cachefs-"))
        try:
            ownership.claim(place, whole=place != cache_dir)
            index = Index(place / "index", block_size, killed=killed)
        except CacheInUse:
            raise
        except (CacheUnusable, OSError) as exc:
            first = first or CacheUnusable(str(exc))
            continue
        if first is not None:
            temporary.append(place)  # the next start looks in the cache directory again
            warnings.append(f"{first}; keeping the index in {place} instead, a restart may be cold")
        return index, place
    assert first is not None
    raise first


def _check_tag(index: Index, tier: Tier) -> None:
    """Drop the tier's rows if its directory is not the one that they describe (a tmpfs after a reboot, a swapped disk)."""
    file = tier.path / "tag"
    tag = ownership.read(file) if file.exists() else b""
    if not tag or index.tag(tier.number) != tag:
        log.debug("the %s tier in %s is new: its blocks are forgotten", tier.name, tier.path)
        tag = uuid.uuid4().bytes
        _discard(tier.path / "objects")
        (tier.path / "objects").mkdir(mode=ownership.DIRECTORY_MODE, exist_ok=True)
        durable.write(file, tag)
        index.forget_tier(tier.number, tag)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _discard(path: Path) -> None:
    """Rename the directory now and delete it in the background, so that cleaning never delays a mount."""
    if not path.exists():
        return
    trash = path.with_name(f"trash-{uuid.uuid4().hex}")
    try:
        path.rename(trash)
    except OSError:
        return
    _delete_in_background(trash)


def _delete_in_background(path: Path) -> None:
    threading.Thread(target=shutil.rmtree, args=(path,), kwargs={"ignore_errors": True}, daemon=True).start()

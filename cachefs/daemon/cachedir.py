"""The cache directory: how much of its disk the cache may use, and opening the store and the names database in it."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from cachefs.base import durable, ownership
from cachefs.base.behind import WriteBehind
from cachefs.base.database import Database
from cachefs.base.errors import CacheUnusable
from cachefs.base.linux import memory_limit
from cachefs.base.metrics import Metrics
from cachefs.base.shared_memory import RowLog
from cachefs.base.units import about_bytes
from cachefs.config.config import Config
from cachefs.daemon.mounting import existing_above
from cachefs.fs import FORMAT, TABLES
from cachefs.store import SHM, OpenStore, Store, open_store, remove_orphans
from cachefs.upload import refuse_foreign

CACHE_FOLDER = re.compile("[0-9a-f]{2}")
"""The names in `objects` (`Tier.file_path`)."""


def _disk_of(config: Config) -> tuple[int, int]:
    """(free bytes, all bytes) of the disk that the cache directory is or will be on; (0, 0) if that cannot be read."""
    try:
        disk = os.statvfs(existing_above(config.cache_dir))
        return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    except OSError:
        return 0, 0


def open_cache(config: Config, metrics: Metrics, *, killed: bool = False) -> OpenStore:
    """Open the store in the cache directory. Raises `CacheInUse`; `CacheUnusable`, with nothing changed, if the directory is
    another user's, has other files where a new cache would remove them, or has a journal of uploads in the format of
    another version of cachefs."""
    _refuse_other_objects(config.cache_dir)
    with suppress(OSError):  # a directory that cannot be made or written costs the SSD tier, not the mount
        ownership.claim(config.cache_dir)
    if not config.read_only:
        refuse_foreign(config.cache_dir / "journal")
    remove_orphans()
    free, total = _disk_of(config)
    cached_bytes = _bytes_at_last_stop(config.cache_dir)
    limit = memory_limit()
    ssd_bytes, ram_bytes = config.cache_size.resolve(free + cached_bytes), config.ram.resolve(limit)
    opened = open_store(
        config.cache_dir,
        ssd_bytes,
        ram_bytes,
        config.keep_free.resolve(total),
        config.block_size,
        config.verify,
        metrics,
        config.eviction,
        killed=killed,
    )
    for tier, option, size, found in (
        ("ssd", "--cache-size", config.cache_size, ssd_bytes),
        ("ram", "--ram", config.ram, ram_bytes),
    ):
        if found < config.block_size and size.bytes != 0:  # 0 is a wish
            opened.warnings.append(
                f"no {tier} tier: {option} {size} is {about_bytes(found)} here, less than one block"
            )
    if ram_bytes > limit:
        opened.warnings.append(
            f"--ram {config.ram} is more than the {about_bytes(limit)} of memory that this process may use: lower it"
        )
    return opened


def _refuse_other_objects(cache_dir: Path) -> None:
    """Raise `CacheUnusable` if `objects` has entries that no cache makes, such as those of a dataset or a git repository."""
    # Path.exists raises for a name that is too long.
    if os.path.exists(cache_dir / "tag"):
        return
    with suppress(OSError):  # no such directory, or none that this process could empty
        for name in os.listdir(cache_dir / "objects"):
            if CACHE_FOLDER.fullmatch(name) is None:
                raise CacheUnusable(
                    f"{cache_dir / 'objects'} has files that are not of a cache, such as {name!r}: choose another "
                    "--cache-dir"
                )


def _bytes_at_last_stop(cache_dir: Path) -> int:
    """Bytes in this cache, as its last stop wrote them down. A size that is a share of the free disk includes them."""
    try:
        return int(ownership.read(cache_dir / "held"))
    except (OSError, ValueError):
        return 0


def open_names(opened: OpenStore, row_log: RowLog | None = None) -> WriteBehind:
    """Open the names database beside the cache, or in shared memory: names can always be listed again."""
    # A random name, because every user can create directories there and could occupy a fixed one.
    refuge = SHM / f"cachefs-{os.getuid()}-names-{secrets.token_hex(8)}"
    opened.temporary.append(refuge)
    try:
        names = opened.state_dir / "names"
        database = Database(names, TABLES, version=FORMAT, fsync=False, refuge=refuge, killed=opened.killed)
        return WriteBehind(database, row_log)
    except CacheUnusable as exc:
        opened.warnings.append(f"{exc}; keeping names in {refuge} until the mount ends")
        return WriteBehind(Database(refuge, TABLES, version=FORMAT, fsync=False), row_log)


def keep_free_bytes(config: Config) -> int:
    """Bytes of the disk that always stay free."""
    return config.keep_free.resolve(_disk_of(config)[1])


def note_used_bytes(cache_dir: Path, store: Store) -> None:
    """Write down the bytes of this cache for the next start (`_bytes_at_last_stop`)."""
    used = sum(tier.used_bytes for tier in store.tiers if tier.name == "ssd")
    with suppress(OSError):
        durable.write(cache_dir / "held", str(used))

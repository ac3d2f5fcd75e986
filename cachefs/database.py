"""The only file that opens LMDB: one environment, named tables of bytes to bytes.

Idea: what the tables mean belongs to the rooms that own them; what a database can suffer belongs here. A damaged
database is never repaired and never believed: it is dropped with one line in the log, because everything in it can be
learnt again. Only a `precious` one (the journal of uploads) cannot: that is refused and left as it is.

How damage is noticed, without scanning a healthy database at start: a clean close leaves the xxh3 of the file beside
it, so the next open compares one hash (a gigabyte a second and more). After an unclean stop there is no such hash, and a
forked child writes every row into a fresh file, which takes the old one's place: whatever a damaged page makes LMDB do
(raise, SIGBUS, SIGSEGV), it does to the child, and no such page is ever written to. That is half a second for a
million rows. `fsync=False` gives up the ordering of writes on power loss, so such a database is also dropped when it
was not closed and the machine has been rebooted since.

Two things LMDB leaves to its user are done here. Pages it has read stay mapped and count as the process's memory:
`release_memory` unmaps them (they stay in the page cache, where the kernel can take them when it needs to). And a disk
that fills up under a database that must go on is left for the `refuge`, a directory elsewhere.

Calls are synchronous and short. Reads may run in any thread; writes take LMDB's single writer lock, and with
``fsync=True`` they wait for the disk: call them from a worker thread.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import logging
import mmap
import os
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from cachefs.errors import CacheInUse, CacheUnusable, NoRoom

log = logging.getLogger(__name__)

MAP_SIZES = (1 << 40, 1 << 36, 1 << 33, 1 << 30)
"""Address space reserved, largest that the process may have (RLIMIT_AS). Not disk: the file grows as it is used."""

LOCK_BYTES = 64 << 10
"""Derived: 512 readers of 64 bytes, and LMDB's header."""

BATCH_ROWS = 100_000
"""Rows of one transaction in a rewrite. Derived: tens of megabytes of memory."""

_libc = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4

Put = tuple[str, bytes, bytes | None]
"""(table, key, value) to write; a value of None deletes the key."""


class Database:
    """A set of ordered tables in one LMDB environment. Keys are at most 511 bytes."""

    def __init__(
        self,
        path: Path,
        tables: Sequence[str],
        *,
        version: str,
        fsync: bool,
        refuge: Path | None = None,
        precious: bool = False,
    ) -> None:
        """Open or create. Raises `CacheInUse` if another process has it open, `CacheUnusable` if it cannot be created.

        `version` names the format of the rows; a database of another version is dropped. When a write fails and there is
        a `refuge` (a directory that must not exist yet), the database goes on there until it is closed. A `precious` one is
        never dropped: `CacheUnusable` then, and nothing is changed."""
        self.path = path
        self._precious = precious
        self._refuge = refuge
        self._names = tuple(tables)
        self.dropped: str | None = None
        self.was_clean = False
        self._left: Any = None
        self._fsync = fsync
        self._version = version
        self._clean_mark = path / "clean"
        self._dirty_mark = path / "dirty"
        self._closed = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock(path / "lock.pid")
        except OSError as exc:
            raise CacheUnusable(f"cannot use {path}: {exc.strerror}") from exc
        try:
            reason = self._damage()
            if reason:
                self._drop(reason)
            if precious and not (path / "data.mdb").exists():
                self._create_whole()
            try:
                self._open(tables)
            except (lmdb.Error, OSError) as exc:
                if _is_disk_trouble(exc):
                    raise
                self._drop(str(exc))
                self._open(tables)
            if _mark(path / "version") != version:
                _write_mark(path / "version", version)
            self._clean_mark.unlink(missing_ok=True)
            _write_mark(self._dirty_mark, _boot_id())
        except (lmdb.Error, OSError) as exc:
            os.close(self._lock_fd)
            raise CacheUnusable(f"cannot use the database in {path}: {exc}") from exc

    def _open(self, tables: Sequence[str]) -> None:
        self._opened = _open_tables(self.path, tables, fsync=self._fsync)

    def _create_whole(self) -> None:
        """A kill in the middle must not leave what looks like damage."""
        fresh = self.path / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        _open_tables(fresh, self._names, fsync=True)[0].close()
        _write_mark(self.path / "version", self._version)
        (fresh / "data.mdb").replace(self.path / "data.mdb")
        shutil.rmtree(fresh, ignore_errors=True)

    def _damage(self) -> str | None:
        """Why what lies at `path` must not be believed, or None."""
        data = self.path / "data.mdb"
        if not data.exists():
            return None
        found = _mark(self.path / "version") or "unknown"
        if found != self._version:
            return f"its format is {found}, this version reads {self._version}"
        if self._clean_mark.exists():
            if _mark(self._clean_mark) != _file_hash(data):
                return "its contents changed since it was closed"
            self.was_clean = True
            return None
        if not self._fsync and _mark(self._dirty_mark) != _boot_id():
            return "the machine stopped before it was written out"
        return _rewrite(self.path, self._names, fsync=self._fsync)

    def _drop(self, reason: str) -> None:
        if self._precious:
            os.close(self._lock_fd)
            raise CacheUnusable(
                f"the database in {self.path} cannot be read ({reason}), and nothing else knows what is in it: "
                "move the directory away to begin without"
            )
        self.dropped = reason
        log.warning("dropping the database in %s: %s; it will be learnt again", self.path, reason)
        for name in ("data.mdb", "lock.mdb", "version", "clean", "dirty"):
            (self.path / name).unlink(missing_ok=True)

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value of `key`, or None. Like all reads, raises `CacheUnusable` when it meets damage."""
        env, tables = self._opened
        try:
            with env.begin(db=tables[table]) as txn:
                value: bytes | None = txn.get(key)
                return value
        except lmdb.Error as exc:
            raise self._unreadable(exc) from exc

    def get_many(self, table: str, keys: Iterable[bytes]) -> list[bytes | None]:
        """Values in the order of `keys`, from one snapshot."""
        env, tables = self._opened
        try:
            with env.begin(db=tables[table]) as txn:
                return [txn.get(key) for key in keys]
        except lmdb.Error as exc:
            raise self._unreadable(exc) from exc

    def scan(
        self, table: str, start: bytes = b"", stop: bytes | None = None, limit: int | None = None
    ) -> list[tuple[bytes, bytes]]:
        """Rows with start <= key < stop in key order, at most `limit`. One snapshot."""
        rows: list[tuple[bytes, bytes]] = []
        env, tables = self._opened
        try:
            with env.begin(db=tables[table]) as txn, txn.cursor() as cursor:
                if not cursor.set_range(start):
                    return rows
                for key, value in cursor:
                    # A damaged page may hold keys out of order: whoever pages on must never be led back.
                    if key < start or (stop is not None and key >= stop) or len(rows) == limit:
                        break
                    rows.append((key, value))
        except lmdb.Error as exc:
            raise self._unreadable(exc) from exc
        return rows

    def last(self, table: str, before: bytes | None = None) -> tuple[bytes, bytes] | None:
        """The row with the greatest key (below `before`, when given)."""
        env, tables = self._opened
        try:
            with env.begin(db=tables[table]) as txn, txn.cursor() as cursor:
                past = before is not None and cursor.set_range(before)
                found = cursor.prev() if past else cursor.last()
                return (cursor.key(), cursor.value()) if found else None
        except lmdb.Error as exc:
            raise self._unreadable(exc) from exc

    def count(self, table: str) -> int:
        env, tables = self._opened
        try:
            with env.begin() as txn:
                entries: int = txn.stat(tables[table])["entries"]
                return entries
        except lmdb.Error as exc:
            raise self._unreadable(exc) from exc

    def _unreadable(self, exc: Exception) -> CacheUnusable:
        return CacheUnusable(f"the database in {self.path} cannot be read: {exc}")

    def write(self, puts: Iterable[Put], ranges: Iterable[tuple[str, bytes, bytes]] = ()) -> None:
        """Delete the (table, start, stop) `ranges`, then apply `puts`, in one transaction. `NoRoom` when the disk is full,
        `CacheUnusable` on any other failure; either way nothing of it is written."""
        if self._closed:
            return
        puts = list(puts)
        try:
            self._write(puts, ranges)
        except (NoRoom, CacheUnusable) as exc:
            if not self._flee(exc):
                raise
            self._write(puts, ranges)

    def _write(self, puts: list[Put], ranges: Iterable[tuple[str, bytes, bytes]]) -> None:
        env, tables = self._opened
        try:
            with env.begin(write=True) as txn:
                for table, start, stop in ranges:
                    with txn.cursor(db=tables[table]) as cursor:
                        alive = cursor.set_range(start)
                        while alive and cursor.key() < stop:
                            alive = cursor.delete()
                for table, key, value in puts:
                    if value is None:
                        txn.delete(key, db=tables[table])
                    else:
                        txn.put(key, value, db=tables[table])
        except lmdb.MapFullError as exc:
            raise NoRoom(f"the database in {self.path} is full") from exc
        except lmdb.Error as exc:
            if _is_disk_trouble(exc):
                raise NoRoom(f"cannot write the database in {self.path}: {exc}") from exc
            raise CacheUnusable(f"the database in {self.path} failed: {exc}") from exc

    def _flee(self, why: Exception) -> bool:
        """Go on in the refuge, with a copy of what is here. False when there is none, or it fails too."""
        if self._refuge is None:
            return False
        refuge, self._refuge = self._refuge, None
        try:
            refuge.mkdir(mode=0o700)
            self._opened[0].copy(str(refuge), compact=True)
            opened = _open_tables(refuge, self._names, fsync=False)
        except (lmdb.Error, OSError) as exc:
            log.warning("%s; and going on in %s failed: %s", why, refuge, exc)
            return False
        log.warning("%s; going on in %s until the end of this mount", why, refuge)
        # Another thread may be reading the old one right now, so it stays open until the end.
        self._left, self._opened = self._opened[0], opened
        return True

    def leave(self, why: str) -> None:
        """Go on in the refuge, if there is one, for its disk does not answer. Blocking."""
        self._flee(NoRoom(why))

    def release_memory(self, above_bytes: int) -> None:
        """Unmap the pages that reads have left mapped, when they are more than `above_bytes`."""
        name = str(self.path / "data.mdb")
        resident = start = 0
        for line in Path("/proc/self/smaps").read_text().splitlines() if _file_pages() > above_bytes else ():
            if line.endswith(name):
                start, stop = (int(edge, 16) for edge in line.split(" ", 1)[0].split("-"))
            elif start and line.startswith("Rss:"):
                resident = int(line.split()[1]) << 10
                break
        if resident > above_bytes:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)

    def sync(self) -> None:
        """Write everything out to the disk. Blocking."""
        if not self._closed:
            self._opened[0].sync(True)

    def close(self, *, clean: bool = True) -> None:
        """Close; when `clean`, the next open believes the file after one hash. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._opened[0].sync(True)
            self._opened[0].close()
            if self._left is not None:
                self._left.close()
                return  # what lies at `path` is true but older; without the mark it is looked through first
            if clean:
                _write_mark(self._clean_mark, _file_hash(self.path / "data.mdb"))
                self._dirty_mark.unlink(missing_ok=True)
        except (lmdb.Error, OSError) as exc:
            log.warning("could not close the database in %s cleanly: %s", self.path, exc)
        finally:
            os.close(self._lock_fd)


def _open_tables(
    path: Path, names: Sequence[str], *, fsync: bool, create: bool = True
) -> tuple[Any, dict[str, Any]]:
    env = _open_env(path, len(names), fsync=fsync)
    try:
        return env, {name: env.open_db(name.encode(), create=create) for name in names}
    except BaseException:
        env.close()
        raise


def _file_pages() -> int:
    """Resident bytes of this process that are backed by files."""
    return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE


def _open_env(path: Path, tables: int, *, fsync: bool) -> Any:
    # LMDB maps its lock file sparse: on a full disk, touching it would be a SIGBUS instead of an error.
    with open(path / "lock.mdb", "ab") as lock:
        os.posix_fallocate(lock.fileno(), 0, LOCK_BYTES)
    for size in MAP_SIZES:
        try:
            return lmdb.open(
                str(path),
                map_size=size,
                max_dbs=tables + 1,
                max_readers=512,
                sync=fsync,
                readahead=False,  # rows are small and scattered: reading ahead only inflates resident memory
                meminit=False,
            )
        except lmdb.MemoryError:
            if size == MAP_SIZES[-1]:
                raise
    raise AssertionError("unreachable")


def _lock(path: Path) -> int:
    """Take the lock that says this process uses the directory; the kernel gives it back however the process ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise CacheInUse(
            f"{path.parent} is in use by another cachefs (pid {holder}): give this one another --cache-dir"
        ) from exc
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        pass  # a full disk may not take eleven bytes; the lock itself holds
    return fd


def _is_disk_trouble(exc: Exception) -> bool:
    if isinstance(exc, OSError):
        return exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ENOENT)
    text = str(exc)
    return any(
        os.strerror(code) in text
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
    )


def _mark(path: Path) -> str:
    """What a mark says, "" when there is none; rubbish is as good as any other text that does not match."""
    return path.read_text(errors="replace") if path.exists() else ""


def _write_mark(path: Path, text: str) -> None:
    """Whole or not at all: on a full disk, half a mark would look like damage."""
    new = path.with_suffix(".new")
    try:
        new.write_text(text)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _file_hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        for chunk in _chunks(file):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: Any) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(4 << 20))
    while count := file.readinto(buffer):
        yield buffer[:count]


def _rewrite(path: Path, tables: Sequence[str], *, fsync: bool) -> str | None:
    """Write every row of a database that was not closed into a fresh one, and put that in its place; or why that failed.
    A forked child does it."""
    fresh = path / "fresh"
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for number in (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT):
                signal.signal(number, signal.SIG_DFL)
            os.close(2)
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            _copy_rows(path, fresh, tables, fsync=fsync)
            status = 0
        except Exception as exc:
            status = 2 if _is_disk_trouble(exc) else 1
        finally:
            os._exit(status)
    _, wait_status = os.waitpid(pid, 0)
    if wait_status == 0:
        (path / "lock.mdb").unlink(missing_ok=True)
        (fresh / "data.mdb").replace(path / "data.mdb")
    shutil.rmtree(fresh, ignore_errors=True)
    if os.WIFSIGNALED(wait_status):
        return f"reading it ends in {signal.Signals(os.WTERMSIG(wait_status)).name}"
    reasons = {0: None, 2: "it was not closed, and there is no room to write it anew"}
    return reasons.get(os.WEXITSTATUS(wait_status), "it is truncated or damaged")


def _copy_rows(path: Path, fresh: Path, tables: Sequence[str], *, fsync: bool) -> None:
    """Raises what a damaged database makes LMDB raise: also for a missing table, and for keys out of order."""
    old, _ = opened = _open_tables(path, tables, fsync=False, create=False)
    if (path / "data.mdb").stat().st_size < (old.info()["last_pgno"] + 1) * old.stat()["psize"]:
        raise lmdb.CorruptedError("cut short")
    new, into = _open_tables(fresh, tables, fsync=False)
    with old.begin() as reading:
        for name, table in opened[1].items():
            rows = iter(reading.cursor(db=table))
            while batch := list(itertools.islice(rows, BATCH_ROWS)):
                with new.begin(write=True) as writing, writing.cursor(db=into[name]) as cursor:
                    if cursor.putmulti(batch, append=True)[1] != len(batch):
                        raise lmdb.CorruptedError("keys out of order")
    new.sync(fsync)
    new.close()


def remove(path: Path) -> None:
    """Delete a closed database."""
    shutil.rmtree(path, ignore_errors=True)

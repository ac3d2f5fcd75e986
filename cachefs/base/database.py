"""A database: one LMDB environment with named tables, whose keys and values are bytes. No other module opens LMDB.

The rooms define what their tables mean; this module handles the failures of a database. A damaged database is neither
repaired nor used. It is dropped, with one line in the log, because all data in it can be learnt again. The data of a
`precious` one (the journal of uploads) cannot: opening it fails then, and it is not changed.

Damage is detected without a scan of a healthy database. A file `version` beside it, the mark, has the format of the rows and
a state. `closed HASH` has the xxh3 of the database's file, so that opening compares one hash (a gigabyte a second or more).
`open BOOT_ID` is written before LMDB changes anything, and stays until a clean close has written out all other data. A mark
that is missing or malformed means the same. Each mark is on the disk before the next step, so a database can be opened after
a power cut at any time.

A database that was not closed is rewritten: another process copies all rows to a fresh file, which replaces the old one. So
the effects of a damaged page on LMDB (an exception, SIGBUS, SIGSEGV, an endless loop) stay in that process, and no such page
is written to. A million rows take half a second. If the disk has no room for a copy, that process only reads all rows, and
the database is used as it is. With `killed`, the caller knows that SIGKILL ended the previous process, and no damaged page:
nothing is rewritten, unless the machine has been rebooted since. With `fsync=False` a power cut may leave writes out of
order, so such a database is dropped if it was not closed and the machine has been rebooted since.

This module also handles what LMDB leaves to its user:

- Pages that were read stay mapped and count as the process's memory. `release_memory` unmaps them; they stay in the page
  cache, from which the kernel can reclaim them.
- A failed write of the meta page makes an environment useless. It is opened again.
- If the disk is full, the database continues in the `refuge`, another directory.
- LMDB maps its lock file and writes to it in each transaction while it holds Python's lock, so a disk that hangs would stop
  the interpreter. So the lock file is in memory.
- The data is mapped, too. A page behind the end of a truncated file is a SIGBUS. So each transaction compares the file's
  length first, and fails until `renew` has begun an empty file.

Two failures remain: a file that is truncated while a transaction runs, and a disk that fails to read a mapped page, end the
process, and a disk that hangs then blocks the caller. Both are rare, because opening reads the whole file into memory.

Calls are synchronous and short. Reads may run in any thread. Writes take LMDB's single writer lock, and with ``fsync=True``
they wait for the disk, so call them in a worker thread.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import xxhash

from cachefs.base import durable, ownership
from cachefs.base.errors import CacheInUse, CacheUnusable, NoRoom
from cachefs.base.linux import boot_id, end_with_parent, resident_bytes, unmap_pages

log = logging.getLogger(__name__)

MAP_SIZES = (1 << 40, 1 << 36, 1 << 33, 1 << 30)
"""Sizes of the map, in bytes of address space: the largest that RLIMIT_AS admits is used. The file is shorter."""

LOCK_BYTES = 64 << 10
"""Size of the lock file. Derived: 512 readers of 64 bytes, and LMDB's header."""

BATCH_ROWS = 100_000
"""Rows of a transaction in a rewrite. Derived: tens of megabytes of memory."""

REWRITE_S = 60.0
"""Deadline of a rewrite, which is then killed. Derived: two thirds of the 90 s that the unit
gives a start (`TimeoutStartSec`), and a million rows take half a second."""

WAIT_S = 30.0
"""Deadline of a wait for another thread's transaction. Derived: half of what a request has by default
(`--timeout`), so its caller gets the reason in place of a timeout."""

LOCK = "lock.pid"
"""The file with the pid of the process that has the database open, and has this file locked (flock)."""

MARK = "version"
_MARK = re.compile(r"([ -~]+)\n((?:open|closed) [!-~]+)\n")

_NO_ROOM = 2  # the exit status of a rewrite that has read all rows, and could not write them

T = TypeVar("T")
Put = tuple[str, bytes, bytes | None]
"""(table, key, value) to write; a value of None deletes the key."""

KeyRange = tuple[str, bytes, bytes]
"""(table, start, stop): the keys of a table in [start, stop), to delete."""


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
        killed: bool = False,
        earlier: Sequence[str] = (),
        unsure: bool = False,
    ) -> None:
        """Open or create. Raises `CacheInUse` if another process has it open, `CacheUnusable` if it cannot be created, or if
        it is `precious` and would be dropped; then nothing is changed.

        `version` names the format of the rows; a database of another version is dropped, unless that is one of the
        `earlier` ones, whose rows are right as they are. The `refuge` must not exist yet. `unsure`: after a reboot the mark
        has no boot id until the caller calls `sure`, because the caller still has to repair the effects of a power cut."""
        self.path = path
        self._precious = precious
        self._killed = killed
        self._refuge = refuge
        self.tables = tuple(tables)
        self.dropped: str | None = None
        self.was_clean = self.same_boot = False
        """How the previous process left it: closed; open, in the present boot of the machine."""
        self._left: _Environment | None = None
        self._fsync = fsync
        self._version, self._earlier = version, earlier
        self._closed = False
        self._place = path  # the directory where it is open: `path` or the refuge
        self._opened: _Environment | None = None  # None while it is opened again, and after that failed
        # Called in any thread, until `renew` has succeeded.
        self.on_cut_short: Callable[[], None] = lambda: None
        self._write_lock = threading.Lock()  # held to write, to open again and to close
        self._reading: list[None] = []  # an entry for each reader; appending and popping are atomic
        try:
            durable.make_directory(path)
            self._locks = [_lock(path / LOCK)]
        except OSError as exc:
            raise CacheUnusable(f"cannot use {path}: {exc.strerror}") from exc
        try:
            if reason := self._distrust():
                self._drop(reason)
            # From here until a clean close, the mark says that the database is open.
            self._mark(f"open {'unsure' if unsure and not self.same_boot else boot_id()}")
            if not self._data.exists():
                self._create()
            try:
                self._opened = self._open()
            except (lmdb.Error, OSError) as exc:
                if _is_disk_trouble(exc):
                    raise
                self._drop(str(exc))
                self._create()
                self._opened = self._open()
        except (lmdb.Error, OSError, CacheUnusable) as exc:
            self._unlock()
            if isinstance(exc, CacheUnusable):
                raise
            raise CacheUnusable(f"cannot use the database in {path}: {exc}") from exc

    @property
    def _data(self) -> Path:
        return self.path / "data.mdb"

    @property
    def in_place(self) -> bool:
        """False if its file was removed from outside, though another one may be there by now."""
        opened = self._opened
        try:
            return opened is None or os.path.samestat(os.stat(self._data), os.fstat(opened.fd))
        except OSError:
            return False

    def _open(self) -> _Environment:
        return _Environment(self._place, self.tables, fsync=self._fsync and self._left is None)

    def _mark(self, state: str) -> None:
        """Have the mark on the disk."""
        text = f"{self._version}\n{state}\n"
        if read_mark(self.path) == (self._version, state):
            durable.sync_directory(self.path)  # a process may have been killed before it did that
            return
        try:
            durable.write(self.path / MARK, text)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # A power cut amid this leaves a malformed mark, which says no more than that the database is open.
            durable.overwrite(self.path / MARK, text)

    def _create(self) -> None:
        """Create an empty database atomically: a kill or a power cut must not leave what looks like damage."""
        fresh = self.path / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        durable.make_directory(fresh)
        _Environment(fresh, self.tables, fsync=True).close()
        durable.put(fresh / "data.mdb", self._data)
        shutil.rmtree(fresh, ignore_errors=True)

    def _distrust(self) -> str | None:
        """Why the database at `path` cannot be used, or None. Rewrites one that was not closed."""
        if self._data.is_symlink():  # LMDB would follow it
            return "its file is a link"
        if not self._data.exists():
            return None
        found, state = read_mark(self.path)
        if found not in ("", self._version, *self._earlier):
            return f"its format is {found}, this version reads {self._version}"
        if state.startswith("closed "):
            if state != f"closed {_file_hash(self._data)}":
                return "its contents changed since it was closed"
            self.was_clean = True
            return None
        self.same_boot = same_boot = state == f"open {boot_id()}"
        if not self._fsync and not same_boot:
            return "the machine stopped before it was written out"
        if self._killed and same_boot:
            return None  # the page cache has all writes of LMDB, whose file is consistent after each
        return _rewrite(self.path, self.tables)

    def _drop(self, reason: str) -> None:
        if self._precious:
            raise CacheUnusable(
                f"the database in {self.path} cannot be read ({reason}), and nothing else knows what is in it: "
                "move the directory away to begin without"
            )
        self.dropped = reason
        log.warning("dropping the database in %s: %s; it will be learnt again", self.path, reason)
        durable.remove(self._data)  # before there is a mark that fits another format

    def sure(self) -> None:
        """Write the mark that `unsure` has held back. Blocking. Raises `CacheUnusable`."""
        if not self.same_boot:
            try:
                self._mark(f"open {boot_id()}")
            except OSError as exc:
                raise CacheUnusable(f"cannot use {self.path}: {exc.strerror}") from exc

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value of `key`, or None. Like all reads, raises `CacheUnusable` if the database is damaged."""

        return self._read(table, lambda txn, _: txn.get(key))  # type: ignore[no-any-return]

    def get_many(self, table: str, keys: Iterable[bytes]) -> list[bytes | None]:
        """Values in the order of `keys`, from one snapshot."""
        keys = list(keys)
        return self._read(table, lambda txn, _: list(map(txn.get, keys)))

    def scan(
        self, table: str, start: bytes = b"", stop: bytes | None = None, limit: int | None = None
    ) -> list[tuple[bytes, bytes]]:
        """Rows with start <= key < stop in key order, at most `limit`. One snapshot."""

        def take(txn: Any, _: Any) -> list[tuple[bytes, bytes]]:
            rows: list[tuple[bytes, bytes]] = []
            with txn.cursor() as cursor:
                if not cursor.set_range(start):
                    return rows
                for key, value in cursor:
                    # A damaged page may have keys out of order: a caller that reads on from the last key must not loop.
                    if key < start or (stop is not None and key >= stop) or len(rows) == limit:
                        break
                    rows.append((key, value))
            return rows

        return self._read(table, take)

    def count(self, table: str) -> int:
        return self._read(table, lambda txn, handle: txn.stat(handle)["entries"])  # type: ignore[no-any-return]

    def _read(self, table: str, take: Callable[[Any, Any], T]) -> T:
        """The result of `take` with a transaction and the table's handle. Opens the environment again if a failed write has
        made it useless."""
        # Before `_opened` is read; `_reopen` changes that first, then waits for readers.
        self._reading.append(None)
        opened = self._opened
        try:
            if opened is not None:
                return self._take(opened, table, take)
        except lmdb.PanicError:
            pass
        finally:
            self._reading.pop()
        with self._exclusive():  # so that no write of another thread fails meanwhile
            if self._opened is opened:
                self._reopen()
            assert self._opened is not None
            try:
                return self._take(self._opened, table, take)
            except lmdb.PanicError as exc:
                raise self._unreadable(exc) from exc

    def _take(self, opened: _Environment, table: str, take: Callable[[Any, Any], T]) -> T:
        self._check_length(opened)
        handle = opened.tables[table]
        try:
            with opened.env.begin(db=handle) as txn:
                return take(txn, handle)
        except lmdb.PanicError:
            raise
        except lmdb.Error as exc:
            raise self._unreadable(exc) from exc

    def _unreadable(self, why: object) -> CacheUnusable:
        return CacheUnusable(f"the database in {self.path} cannot be read: {why}")

    def _check_length(self, opened: _Environment) -> None:
        committed = opened.committed  # before the length, because a commit in another thread raises both
        if opened.length() < committed:
            self.on_cut_short()
            raise _CutShort(f"the database in {self.path} cannot be read: its file was cut short")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._write_lock.acquire(timeout=WAIT_S):
            raise CacheUnusable(f"the database in {self.path} is stuck: its disk does not answer")
        try:
            yield
        finally:
            self._write_lock.release()

    def _reopen(self) -> None:
        """Open the file again, without readers; it then has all acknowledged rows. The caller has `_write_lock`. Raises
        `CacheUnusable`; the next reader or writer tries again."""
        if self._closed:
            raise self._unreadable("it is closed")
        broken, self._opened = self._opened, None
        if broken is not None:
            if not self._readers_left():
                self._opened = broken
                raise self._unreadable("a reader does not end")
            broken.close()
        try:
            self._opened = self._open()
        except (lmdb.Error, OSError) as exc:
            raise self._unreadable(exc) from exc
        log.warning("opened the database in %s again after a failed write", self.path)

    def renew(self) -> bool:
        """Begin an empty file if the old one was truncated, else return False. Blocking. Raises `CacheUnusable`."""
        with self._exclusive():
            broken = self._opened
            whole = broken is None or broken.length() >= broken.committed
            if whole or self._left is not None:
                return False
            self._opened = None
            try:
                if not self._readers_left():
                    raise self._unreadable("a reader does not end")
                self._drop("its file was cut short")
                self._opened = self._open()
            except (lmdb.Error, OSError) as exc:
                raise self._unreadable(exc) from exc
            finally:
                if self._opened is None:
                    self._opened = broken  # transactions fail as before; the next call tries again
            assert broken is not None
            broken.close()
            return True

    def _readers_left(self) -> bool:
        """Wait for the readers that saw the environment before `_opened` was None."""
        until = time.monotonic() + WAIT_S
        while self._reading:
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    def write(self, puts: Iterable[Put], ranges: Iterable[KeyRange] = ()) -> None:
        """Delete the `ranges`, then apply `puts`, in one transaction. Raises `NoRoom` if the disk is
        full, `CacheUnusable` for any other failure; then nothing is written."""
        puts, ranges = list(puts), list(ranges)
        with self._exclusive():
            if self._closed:
                return
            try:
                self._write_or_reopen(puts, ranges)
            except (NoRoom, CacheUnusable) as exc:
                if not self._flee(exc):
                    raise
                self._write(puts, ranges)

    def _write_or_reopen(self, puts: Sequence[Put], ranges: Sequence[KeyRange]) -> None:
        """Write. If the environment is or becomes useless, open it again and repeat the write once."""
        if self._opened is None:
            self._reopen()
        for again in (False, True):
            try:
                return self._write(puts, ranges)
            except (NoRoom, CacheUnusable) as exc:
                if isinstance(exc, _CutShort) or not self._panicked():
                    raise
                self._reopen()
                if again:
                    raise

    def _panicked(self) -> bool:
        assert self._opened is not None
        try:
            self._opened.env.begin().abort()
        except lmdb.Error:
            return True
        return False

    def _write(self, puts: Sequence[Put], ranges: Sequence[KeyRange]) -> None:
        opened = self._opened
        assert opened is not None
        self._check_length(opened)
        tables = opened.tables
        try:
            with opened.env.begin(write=True) as txn:
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
        except lmdb.Error as exc:
            if _is_disk_trouble(exc):
                raise NoRoom(f"cannot write the database in {self.path}: {exc}") from exc
            raise CacheUnusable(f"the database in {self.path} failed: {exc}") from exc
        opened.committed = opened.length()

    def _flee(self, why: Exception) -> bool:
        """Go on in the refuge, with a copy of the database. False if there is no refuge, or it fails, too."""
        if self._refuge is None or self._opened is None:
            return False
        refuge, self._refuge = self._refuge, None
        try:
            self._check_length(self._opened)
            refuge.mkdir(ownership.DIRECTORY_MODE)
            self._locks.append(_lock(refuge / LOCK))  # a refuge without a lock was left by a killed daemon
            self._opened.env.copy(str(refuge), compact=True)
            opened = _Environment(refuge, self.tables, fsync=False)
        except (lmdb.Error, OSError, CacheUnusable) as exc:
            log.warning("%s; and going on in %s failed: %s", why, refuge, exc)
            return False
        log.warning("%s; going on in %s until the end of this mount", why, refuge)
        # Another thread may be reading the old environment, so it stays open until the end.
        self._left, self._opened, self._place = self._opened, opened, refuge
        return True

    def release_memory(self, above_bytes: int) -> None:
        """Unmap the pages that reads have mapped, if they are more than `above_bytes`."""
        name = str(self.path / "data.mdb")
        resident = start = 0
        looking = resident_bytes(of_files=True) > above_bytes  # much cheaper than what follows
        for line in Path("/proc/self/smaps").read_text().splitlines() if looking else ():
            if line.endswith(name):
                start, stop = (int(edge, 16) for edge in line.partition(" ")[0].split("-"))
            elif start and line.startswith("Rss:"):
                resident = int(line.split()[1]) << 10
                break
        if resident > above_bytes:
            unmap_pages(start, stop)

    def close(self, *, clean: bool = True) -> None:
        """Close. `clean`: the next open compares only the file's hash. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            with self._exclusive():
                opened, self._opened = self._opened, None
                if opened is None or not self._readers_left():
                    return
                whole = opened.length() >= opened.committed
                if whole:  # otherwise LMDB might read a missing page
                    opened.env.sync(True)
                opened.close()
                if self._left is not None:
                    self._left.close()
                    return  # the file at `path` is consistent but older: it stays marked as open, and is rewritten
                if clean and whole:
                    self._mark(f"closed {_file_hash(self._data)}")
        except (lmdb.Error, OSError, CacheUnusable) as exc:
            log.warning("could not close the database in %s cleanly: %s", self.path, exc)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        while self._locks:
            os.close(self._locks.pop())


class _CutShort(CacheUnusable):
    """The file was truncated: LMDB must not read the missing pages."""


class _Environment:
    """An open LMDB environment with its tables. Only this process has it open."""

    def __init__(self, path: Path, names: Sequence[str], *, fsync: bool) -> None:
        self.env = _open_env(path, len(names), fsync=fsync)
        try:
            with self.env.begin(write=True) as creating:  # one fsync for all tables of a new database
                self.tables = {name: self.env.open_db(name.encode(), txn=creating) for name in names}
            os.chmod(path / "data.mdb", ownership.FILE_MODE)
            self.fd = os.open(path / "data.mdb", os.O_RDONLY)
        except BaseException:
            self.env.close()
            raise
        self.committed = self.length()
        """Length of the file after the last commit, in bytes. It never shrinks."""

    def length(self) -> int:
        """Length of the file now, in bytes. Measured: lseek takes a third of fstat's time."""
        return os.lseek(self.fd, 0, os.SEEK_END)

    def close(self) -> None:
        self.env.close()
        os.close(self.fd)


def _open_env(path: Path, tables: int, *, fsync: bool) -> Any:
    """Open an environment with a lock file in memory. LMDB opens that file by a link, which is then removed."""
    link = path / "lock.mdb"
    memory = os.memfd_create("cachefs-lock", os.MFD_CLOEXEC)
    try:
        # LMDB would map a sparse file: with memory full, writing to it would be a SIGBUS instead of an error.
        os.posix_fallocate(memory, 0, LOCK_BYTES)
        link.unlink(missing_ok=True)
        link.symlink_to(f"/proc/self/fd/{memory}")
        return _open_lmdb(path, tables, sync=fsync, max_readers=512)
    finally:
        os.close(memory)
        with suppress(OSError):
            link.unlink()


def _open_lmdb(path: Path, tables: int, **options: Any) -> Any:
    for size in MAP_SIZES:
        try:
            return lmdb.open(
                str(path),
                map_size=size,
                max_dbs=tables + 1,
                mode=ownership.FILE_MODE,
                readahead=False,  # rows are small and scattered: readahead only adds resident memory
                # Otherwise old content of this memory (headers, keys) would be written to the disk.
                meminit=True,
                **options,
            )
        except lmdb.MemoryError:
            if size == MAP_SIZES[-1]:
                raise
    raise AssertionError("unreachable")


def _lock(path: Path) -> int:
    """Lock the directory for this process; the kernel releases the lock when the process ends."""
    fd = ownership.open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise CacheInUse(
            f"{path.parent} is in use by another cachefs (pid {holder}): give this one another --cache-dir"
        ) from exc
    except OSError:
        os.close(fd)
        raise
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        pass  # a full disk may not take eleven bytes; the lock is held all the same
    return fd


def _is_disk_trouble(exc: Exception) -> bool:
    if isinstance(exc, OSError):
        return exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ENOENT)
    return is_full(exc) or _names(exc, errno.EROFS, errno.EACCES, errno.EIO)


def is_full(exc: Exception) -> bool:
    """True if `write` failed because the disk is full, and not because it fails or is read-only."""
    return _names(exc, errno.ENOSPC, errno.EDQUOT)


def _names(exc: Exception, *codes: int) -> bool:
    """True if the message of an error has the text of one of these errnos: LMDB reports no number."""
    return any(os.strerror(code) in str(exc) for code in codes)


def read_mark(path: Path) -> tuple[str, str]:
    """(format, state) of the database in a directory; the state is "open BOOT_ID" or "closed HASH". Both are "" if the mark
    is missing or malformed: a malformed one must not count as another format."""
    try:
        found = _MARK.fullmatch((path / MARK).read_text(errors="replace"))
    except OSError:
        return "", ""
    return (found[1], found[2]) if found else ("", "")


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _rewrite(path: Path, tables: Sequence[str]) -> str | None:
    """Replace a database that was not closed by a copy of its rows, if there is room for one. Returns why it cannot be used,
    or None. Another process reads the rows (`_main`). Blocking, for `REWRITE_S` at most."""
    fresh = path / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    with suppress(OSError):  # the other process meets the error again
        durable.make_directory(fresh)
    command = [sys.executable, "-P", "-m", "cachefs.base.database", str(os.getpid()), str(path)]
    nothing = subprocess.DEVNULL
    reader = subprocess.Popen([*command, *tables], stdin=nothing, stdout=nothing, stderr=nothing)
    try:
        status = reader.wait(REWRITE_S)
    except subprocess.TimeoutExpired:
        reader.kill()  # without wait, because it cannot end on a disk that hangs
        return f"it was not closed, and reading it takes more than {REWRITE_S:.0f} s"
    if status == 0:
        durable.put(fresh / "data.mdb", path / "data.mdb")
    shutil.rmtree(fresh, ignore_errors=True)
    if status < 0:
        return f"reading it ends in {signal.Signals(-status).name}"
    if status == _NO_ROOM:
        log.warning("no room to write the database in %s again: it is used as it is", path)
    return None if status in (0, _NO_ROOM) else "it is truncated or damaged"


def _main(parent: str, path: str, *tables: str) -> None:
    """The process of `_rewrite`. Its exit status is the result. It ends with its parent."""
    end_with_parent()
    if os.getppid() != int(parent):
        sys.exit(1)
    try:
        _copy_rows(Path(path), Path(path, "fresh"), tables)
    except Exception as exc:
        if not _is_disk_trouble(exc):
            sys.exit(1)
        _read_rows(Path(path), tables)
        sys.exit(_NO_ROOM)


@contextmanager
def _rows_of(path: Path, tables: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A cursor of each table, by its name. Raises `lmdb.Error` for a damaged database or a missing table."""
    old = _open_lmdb(path, len(tables), readonly=True, lock=False)
    size, page = (path / "data.mdb").stat().st_size, old.stat()["psize"]
    if size % page and size // page <= old.info()["last_pgno"]:
        # Truncated within a page. Reading a row of a missing page is a SIGBUS.
        raise lmdb.CorruptedError("cut short")
    sources = {name: old.open_db(name.encode(), create=False) for name in tables}
    with old.begin() as reading:
        yield {name: reading.cursor(db=table) for name, table in sources.items()}
    old.close()


def _copy_rows(path: Path, fresh: Path, tables: Sequence[str]) -> None:
    """Copy all rows, without syncing. Raises `lmdb.Error` for a damaged database, a missing table or keys out of order."""
    with _rows_of(path, tables) as sources:
        new = _open_lmdb(fresh, len(tables), lock=False, sync=False)
        for name, source in sources.items():
            into, rows = new.open_db(name.encode()), iter(source)
            while batch := list(itertools.islice(rows, BATCH_ROWS)):
                with new.begin(write=True) as writing, writing.cursor(db=into) as cursor:
                    if cursor.putmulti(batch, append=True)[1] != len(batch):
                        raise lmdb.CorruptedError("keys out of order")


def _read_rows(path: Path, tables: Sequence[str]) -> None:
    """Read all rows. Raises as `_copy_rows`."""
    with _rows_of(path, tables) as sources:
        for rows in sources.values():
            if any(key >= after for (key, _), (after, _) in itertools.pairwise(rows)):
                raise lmdb.CorruptedError("keys out of order")


if __name__ == "__main__":
    _main(*sys.argv[1:])

"""Saving files through a mount: its rate beside that of a program that only uploads, or only writes to the disk; its
requests to the store; and its memory.

By default close returns when the store has the file. Then the raw client is the baseline: it uploads the same bytes from
memory, with as many parts at a time. With `--writeback` close returns when the disk has the file. Then write and fsync on
the cache's own disk are the baseline. Uploads are measured until the store has the file, for rclone, too, whose close
returns before that.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench import readers
from bench.harness import Result, Series, interleave, number, scenario
from bench.mounts import OWN, Cachefs, Mount, RcloneWriting, Unavailable
from bench.raw import IN_FLIGHT, RawWriter
from bench.workspace import Workspace, can_drop_caches, drop_caches

MIB = 1 << 20
BANDWIDTH = 100e6
LONG_BANDWIDTH = 400e6
"""Bytes a second to the store during the long save, which takes ten seconds."""

SAVED, NAME = "saved", "model.bin"
RAW, EXT4, RCLONE = "raw client", "ext4", RcloneWriting.name
REPLACED, REPLACES = 64 * MIB, 4
CREATED = 100_000
MOST_MEMORY_MB = 256
FLAT_MB = 16
"""Growth of memory that the second half of a long save may have over the first. Guessed: far less than any part of the
file."""

UPLOADED_S = 120.0


# -- what is written -----------------------------------------------------------------------------------


@functools.cache
def _noise() -> bytes:
    return random.Random("writing").randbytes(MIB - 64)


def block(index: int) -> bytes:
    """A MiB of the file; no two are equal."""
    return f"{index}".encode().ljust(64) + _noise()


def content(start: int, stop: int) -> bytes:
    """Bytes of the file between two multiples of a MiB."""
    return b"".join(map(block, range(start // MIB, stop // MIB)))


def small(path: str | Path) -> bytes:
    """The content of a small file, by its name."""
    return Path(path).name.encode().ljust(64) + _noise()[:9936]


def save(path: Path, size: int, *, sync: bool = False) -> float:
    """MB/s of writing a file, a MiB a call, and closing it."""
    begun = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for index in range(size // MIB):
            _write(fd, block(index))
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    return size / (time.perf_counter() - begun) / 1e6


def save_small(path: str) -> int:
    data = small(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write(fd, data)
    finally:
        os.close(fd)
    return len(data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def rehearse(work: Workspace, size: int) -> None:
    """Provide the memory in which a plain file has just been written. Where the machine's host returns memory only at the
    first access, the choice of pages decides more than the writer: a GiB of such pages takes seconds of both processors."""
    plain = work.disk / "plain.bin"
    save(plain, size, sync=True)
    plain.unlink()
    os.sync()


def differs(read: Callable[[int], bytes], size: int) -> str:
    """Where the result of `read` (of the next so many bytes) differs from the file; "" if it does not."""
    for index in range(size // MIB):
        if read(MIB) != block(index):
            return f"byte {index * MIB} and on are others"
    return "it is longer" if read(1) else ""


def differs_at(path: Path, size: int) -> str:
    with path.open("rb", buffering=0) as file:
        return differs(lambda count: file.read(count) or b"", size)


def differs_in_store(work: Workspace, key: str, size: int) -> str:
    return differs(RawWriter(work.lab, SAVED).reading(key), size)


# -- where to --------------------------------------------------------------------------------------------


@contextmanager
def mounted(work: Workspace, *options: str) -> Iterator[Cachefs]:
    work.lab.bucket(SAVED)
    with Cachefs(work.disk, work.lab, SAVED, "-o", "rw", *options) as mount:
        if os.statvfs(mount.path).f_flag & os.ST_RDONLY:
            raise Unavailable("this cachefs mounts read-only")
        yield mount


@contextmanager
def rclone(work: Workspace) -> Iterator[Mount]:
    work.lab.bucket(SAVED)
    with RcloneWriting(work.disk, work.lab, SAVED) as mount:
        yield mount


def flush(mount: Cachefs) -> None:
    """Wait until the store has the whole file."""
    said = mount.command("flush", str(mount.path))
    if said.returncode:
        raise RuntimeError(f"cachefs flush: {said.stderr.strip()}")


def until_made(work: Workspace, count: int) -> None:
    """Wait until the store has created so many objects since its counters were reset."""
    until = time.monotonic() + UPLOADED_S
    while time.monotonic() < until:
        counters = work.lab.counters()
        requests = counters["requests"]
        if requests.get("put", 0) + requests.get("complete_upload", 0) >= count and not counters["in_flight"]:
            return
        time.sleep(0.005)
    raise TimeoutError(f"the store has not got {count} objects within {UPLOADED_S:.0f} s")


def beside(work: Workspace, measure: Callable[[], float], series: Series, result: Result) -> None:
    """One measurement of rclone in the same series."""
    if not work.scale.others:
        return
    own = interleave(1, {RCLONE: measure}, result, what="", unit="")
    result.series.remove(own)
    series.values.update(own.values)
    if RCLONE in own.values:
        result.demand(f"{series.what}: rate / {RCLONE}", series.ratio(OWN, RCLONE), "≥", 1)


def saved_whole(result: Result, what: str, difference: str) -> None:
    result.demand(f"{what}: objects that are not what was written", int(bool(difference)), "=", 0)
    if difference:
        result.note(f"{what}: {difference}")


# -- scenarios -------------------------------------------------------------------------------------------


@scenario("save-durable", rounds=3)
def save_durable(work: Workspace, rounds: int) -> Result:
    """A large file that is in the store when close returns, beside a parallel upload from memory."""
    result = Result()
    size = work.scale.saved
    work.lab.bucket(SAVED)
    raw = RawWriter(work.lab, SAVED)
    sent: list[float] = []
    made: list[float] = []

    def cachefs() -> float:
        rehearse(work, size)
        with mounted(work) as mount, work.traffic() as seen:
            rate = save(mount.path / NAME, size)
        sent.append(seen.received / size)
        made.append(seen.made)
        return rate

    def other() -> float:
        rehearse(work, size)
        with rclone(work) as mount:
            work.quiet()
            work.lab.reset()
            begun = time.perf_counter()
            save(mount.path / "other.bin", size)
            until_made(work, 1)
            return size / (time.perf_counter() - begun) / 1e6

    def alone() -> float:
        rehearse(work, size)
        return raw.large("raw.bin", size, content).mb_per_s

    contenders = {RAW: alone, OWN: cachefs}
    with work.shaped(BANDWIDTH):
        what = "large file saved, in the store, 20 ms and 100 MB/s"
        series = interleave(rounds, contenders, result, what=what, unit="MB/s")
        if OWN not in series.values:
            return result
        result.demand("durable save: rate / raw client, 16 parts in flight", series.ratio(OWN, RAW), "≥", 0.9)
        beside(work, other, series, result)
    result.demand("durable save: bytes sent to the store / size", max(sent), "=", 1)
    result.demand("durable save: objects made", max(made), "=", 1)
    saved_whole(result, "durable save", differs_in_store(work, NAME, size))
    for key in (NAME, "raw.bin", "other.bin"):
        work.lab.delete(SAVED, key)
    return result


@scenario("save-writeback", rounds=6)
def save_writeback(work: Workspace, rounds: int) -> Result:
    """A large file with --writeback that is on the disk when fsync and close return, beside a plain file there."""
    result = Result()
    size = work.scale.saved
    differences: list[str] = []

    def rate_of(path: Path) -> float:
        rehearse(work, size)
        return save(path, size, sync=True)

    def ext4() -> float:
        path = work.disk / "other.bin"
        rate = rate_of(path)
        path.unlink()
        return rate

    def cachefs() -> float:
        with mounted(work, "--writeback") as mount:
            rate = rate_of(mount.path / NAME)
            if not differences:
                flush(mount)
                differences.append(differs_in_store(work, NAME, size))
            return rate

    def other() -> float:
        with rclone(work) as mount:
            return rate_of(mount.path / "other.bin")

    what = "large file saved, on the disk, written, fsynced and closed"
    series = interleave(rounds, {EXT4: ext4, OWN: cachefs}, result, what=what, unit="MB/s")
    if OWN not in series.values:
        return result
    result.demand("writeback save: rate / ext4 of the cache's disk", series.ratio(OWN, EXT4), "≥", 0.85)
    beside(work, other, series, result)
    saved_whole(result, "writeback save", differences[0])
    for key in (NAME, "other.bin"):
        work.lab.delete(SAVED, key)
    return result


@scenario("save-again")
def save_again(work: Workspace, rounds: int) -> Result:
    """A file is read back right after its save, through the daemon and not from the kernel's page cache."""
    result = Result()
    size = work.scale.saved
    dropping = work.scale.drops and can_drop_caches()
    if not dropping:
        result.note("the kernel's page cache was not dropped")

    def look(mount: Cachefs, when: str) -> None:
        if dropping:
            drop_caches()
        with work.traffic() as seen:
            difference = differs_at(mount.path / NAME, size)
        result.demand(f"read back {when}: GETs", seen.get, "=", 0)
        saved_whole(result, f"read back {when}", difference)

    with mounted(work) as mount:
        save(mount.path / NAME, size)
        look(mount, "after a durable save")
    with mounted(work, "--writeback", "--upload-delay", "3s") as mount:
        save(mount.path / NAME, size)
        look(mount, "before the upload")
        flush(mount)
        look(mount, "after the upload")
    work.lab.delete(SAVED, NAME)
    return result


@scenario("save-replace")
def save_replace(work: Workspace, rounds: int) -> Result:
    """A file is written under another name and renamed over the old one, four times: the requests to the store."""
    result = Result()
    size = min(work.scale.saved, REPLACED)
    ways: dict[str, Sequence[str]] = {"writeback": ("--writeback",), "durable": ()}
    for way, options in ways.items():
        work.lab.put(SAVED, NAME, b"the old one")
        with mounted(work, *options) as mount:
            # The first copy at a store finds out, once a mount, which conditions it honours.
            first = mount.path / "first"
            save(first, 1)
            first.rename(mount.path / "second").unlink()
            if options:
                flush(mount)
            with work.traffic() as seen:
                for _ in range(REPLACES):
                    temporary = mount.path / f"{NAME}.tmp"
                    save(temporary, size)
                    temporary.rename(mount.path / NAME)
                    if options:
                        flush(mount)
        what = f"temporary file renamed over the old one, {way}"
        result.demand(f"{what}: objects made", seen.made / REPLACES, "=", 1)
        result.demand(f"{what}: copies", seen.copied / REPLACES, "≤", 0 if options else 1)
        result.demand(f"{what}: bytes sent / size", seen.received / size / REPLACES, "=", 1)
        result.demand(f"{what}: uploads begun and left at the store", seen.unfinished, "=", 0)
        result.note(
            f"{way}: {seen.parts} parts, {seen.deleted} deletions, {seen.head} HEADs, {seen.list} LISTs"
        )
        saved_whole(result, what, differs_in_store(work, NAME, size))
        gone = RawWriter(work.lab, SAVED).missing(f"{NAME}.tmp")
        result.demand(f"{what}: temporary names left at the store", int(not gone), "=", 0)
    work.lab.delete(SAVED, NAME)
    return result


@scenario("save-memory")
def save_memory(work: Workspace, rounds: int) -> Result:
    """The daemon's own memory while a very large file is saved through it."""
    result = Result()
    size = work.scale.saved_long
    with work.shaped(LONG_BANDWIDTH), mounted(work) as mount:
        idle = mount.memory().private
        with watching(lambda: mount.memory().private) as seen:
            rate = save(mount.path / NAME, size)
    result.note(f"{number(size / 1e9)} GB at {number(rate)} MB/s; idle {number(idle / 1e6)} MB")
    half = len(seen) // 2
    halves = [max(seen[:half]) / 1e6, max(seen[half:]) / 1e6]
    result.series.append(
        Series("most memory while saving", "MB", {"first half": halves[:1], "second": halves[1:]})
    )
    result.demand("long save: resident memory of the daemon's own, MB", max(halves), "≤", MOST_MEMORY_MB)
    result.demand(
        "long save: growth from its first to its second half, MB", halves[1] - halves[0], "≤", FLAT_MB
    )
    work.lab.delete(SAVED, NAME)
    return result


@contextmanager
def watching(look: Callable[[], int]) -> Iterator[list[int]]:
    """Sample a value every 20 ms in this block; at least two samples."""
    seen = [look()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            seen.append(look())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
        seen.append(look())


@scenario("save-small", rounds=3)
def save_small_files(work: Workspace, rounds: int) -> Result:
    """Small files by 8 writers, each in the store when its close returns."""
    result = Result()
    count = work.scale.saved_files
    work.lab.bucket(SAVED)
    raw = RawWriter(work.lab, SAVED)
    turns = itertools.count()
    made: list[float] = []
    asked: list[float] = []

    def names(kind: str) -> list[str]:
        turn = next(turns)
        return [f"{kind}-{turn}-{n:06d}.bin" for n in range(count)]

    def share(mount: Mount, keys: list[str]) -> readers.Reading:
        return readers.share([f"{mount.path}/{key}" for key in keys], IN_FLIGHT, save_small)

    def cachefs() -> float:
        keys = names("mine")
        with mounted(work) as mount, work.traffic() as seen:
            rate = share(mount, keys).files_per_s
        made.append(seen.made / count)
        asked.append((seen.head + seen.list) / count)
        wrong = [key for key in keys[:: max(1, count // 20)] if raw.reading(key)(MIB) != small(key)]
        if wrong:
            raise RuntimeError(f"not what was written: {wrong}")
        return rate

    def other() -> float:
        keys = names("other")
        with rclone(work) as mount:
            work.quiet()
            work.lab.reset()
            begun = time.perf_counter()
            share(mount, keys)
            until_made(work, count)
            return count / (time.perf_counter() - begun)

    contenders: dict[str, Any] = {RAW: lambda: raw.small(names("raw"), small).files_per_s, OWN: cachefs}
    with work.shaped(BANDWIDTH):
        what = "small files saved, in the store, 8 writers, 20 ms and 100 MB/s"
        series = interleave(rounds, contenders, result, what=what, unit="files/s")
        if OWN not in series.values:
            return result
        result.demand("small durable saves: rate / raw client, 8 in flight", series.ratio(OWN, RAW), "≥", 0.7)
        beside(work, other, series, result)
    result.demand("small durable saves: objects made a file", max(made), "=", 1)
    result.note(f"HEADs and LISTs a file: {number(max(asked))}")
    return result


@scenario("create-small", rounds=3)
def create_small(work: Workspace, rounds: int) -> Result:
    """Files of 100 KB created one after another and removed, by default and with --writeback: time and processor time."""
    result = Result()
    count = work.scale.created
    data = os.urandom(CREATED)
    work.lab.bucket(SAVED)
    raw = RawWriter(work.lab, SAVED)
    costs: list[float] = []
    removed: list[float] = []
    turns = itertools.count()

    def made(folder: Path, *, sync: bool = False) -> float:
        """Milliseconds a file."""
        folder.mkdir()
        begun = time.perf_counter()
        for index in range(count):
            fd = os.open(folder / f"{index}.bin", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            _write(fd, data)
            if sync:
                os.fsync(fd)
            os.close(fd)
        return 1e3 * (time.perf_counter() - begun) / count

    def remove(folder: Path) -> float:
        """Milliseconds a file."""
        begun = time.perf_counter()
        for index in range(count):
            (folder / f"{index}.bin").unlink()
        return 1e3 * (time.perf_counter() - begun) / count

    def own(*options: str) -> float:
        with mounted(work, *options) as mount:
            before = mount.cpu_s()
            folder = mount.path / f"made-{mount.pid}"
            value = made(folder)
            removed.append(remove(folder))
            costs.append(1e3 * (mount.cpu_s() - before) / count)
        return value

    def ext4() -> float:
        folder = work.disk / "made"
        try:
            return made(folder, sync=True)
        finally:
            shutil.rmtree(folder)

    what = "files of 100 KB made one after another, store unshaped"
    for way, options, most in (("durable", (), 1.4), ("writeback", ("--writeback",), 1.5)):
        costs.clear()
        removed.clear()
        contenders = {
            OWN: functools.partial(own, *options),
            EXT4: ext4,
            RAW: lambda: (
                1e3 / raw.small([f"raw/{next(turns)}" for _ in range(count)], lambda _: data, 1).files_per_s
            ),
        }
        series = interleave(rounds, contenders, result, what=f"{what}, {way}", unit="ms a file")
        cost = median(costs)
        result.demand(f"{what}, {way}: processor time a file, its removal with it", cost, "≤", most, " ms")
        if options:
            result.demand(f"{what}, {way}: time a file", series.medians()[OWN], "≤", 1.5, " ms")
        result.note(f"{way}: removed in {number(median(removed))} ms a file")
    return result

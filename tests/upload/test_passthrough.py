"""Dirty files that the kernel writes, through descriptors of their staging files, without telling the daemon."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.base.errors import OriginFailed, TooLarge
from cachefs.origin import ObjectInfo
from cachefs.store import BackingFile
from cachefs.upload import passthrough, sending, staging
from cachefs.upload.dirty_file import DirtyFile, Way
from cachefs.upload.passthrough import IN_A_ROW, WITHIN_S
from cachefs.upload.staging import HELD, LOOK_S
from tests.conftest import ROOT
from tests.fetch.scripted import content
from tests.upload.scripted import LIMITS, PART, Desk, Room, ScriptedStore, Turns, desk, in_trio


class Kernel:
    """Takes loans, and gives them numbers."""

    def __init__(self, d: Desk) -> None:
        self.backings: list[BackingFile] = []
        self.refuses = 0
        self.desk = d
        d.uploads.passthrough.enable(self.tell, self.retire)

    def tell(self, backing: BackingFile) -> None:
        if self.refuses:
            raise OSError(self.refuses, os.strerror(self.refuses))
        assert os.get_inheritable(backing.fd) is False
        backing.registered(len(self.backings) + 1)
        self.backings.append(backing)

    def retire(self, backing: BackingFile) -> None:
        self.backings.remove(backing)


async def in_passthrough(d: Desk, key: str = "k", data: bytes = b"") -> tuple[DirtyFile, int]:
    """A new dirty file, open in passthrough, and a descriptor of its file as the kernel has it."""
    dirty_file = await d.create(key)
    fd = await open_backing(d, dirty_file)
    os.write(fd, data)
    return dirty_file, fd


async def open_backing(d: Desk, dirty_file: DirtyFile) -> int:
    assert await d.uploads.open_backing(dirty_file) is not None
    return os.open(dirty_file.file.path, os.O_RDWR)


def ends(d: Desk, dirty_file: DirtyFile, fd: int) -> None:
    """As RELEASE: the kernel has closed its file."""
    os.close(fd)
    d.uploads.returned(dirty_file)
    d.uploads.release(dirty_file)


@pytest.mark.long
@in_trio
async def test_what_others_wrote_is_seen_promised_and_uploaded(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        kernel = Kernel(d)
        data = content(1, 3 * PART + 5)
        dirty_file, fd = await in_passthrough(d, data=data)
        changed: list[DirtyFile] = []
        d.uploads.on_changed = changed.append
        assert (
            dirty_file.size == 0
            and dirty_file.look()
            and dirty_file.size == len(data)
            and not dirty_file.look()
        )
        assert changed == [dirty_file]
        await d.uploads.commit(dirty_file)
        assert dirty_file.acknowledged
        await trio.sleep(100)
        assert d.store.counts == {}, "not while it is in passthrough"
        os.pwrite(fd, b"new", PART)
        await d.uploads.commit(dirty_file)
        ends(d, dirty_file, fd)
        assert kernel.backings == []
        await trio.sleep(2)
        await d.quiet()
        data = data[:PART] + b"new" + data[PART + 3 :]
        assert d.store.content("k") == data and d.store.seen["k"] == [data]
        assert list(d.cache.adopted.values()) == [data] and d.settled == ["k"]


@in_trio
async def test_a_promise_covers_what_no_look_has_seen(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"written")
        await d.uploads._records.acknowledge(dirty_file)
        assert (dirty_file.size, dirty_file.content.synced) == (
            7,
            dirty_file.content.generation,
        ) and not dirty_file.between
        (row,) = d.uploads.journal.rows("drafts").values()
        assert row["acknowledged"]
        ends(d, dirty_file, fd)


@in_trio
async def test_a_write_in_the_same_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    """It leaves the size and the time that the file had."""
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file = await d.create("k", b"one")
        d.uploads.journal._room = 0  # of its content: it has a staging file
        await d.uploads.commit(dirty_file)
        before = dirty_file.file.shape()
        fd = await open_backing(d, dirty_file)
        assert not dirty_file.look()
        os.pwrite(fd, b"two", 0)
        os.utime(fd, ns=(before.mtime_ns, before.mtime_ns))
        assert dirty_file.file.shape() == before and dirty_file.look()
        ends(d, dirty_file, fd)
        assert await d.uploads.flush() == [] and d.store.content("k") == b"two"


def test_a_directory_without_leases_is_known_and_nothing_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert not staging.can_lease(tmp_path / "none")
    assert staging.can_lease(tmp_path) == staging.can_lease(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before and os.listdir(tmp_path) == []


LEASED = """
import fcntl, os, sys
from cachefs.upload import staging

path, real = sys.argv[1], fcntl.fcntl

def control(fd, command, argument=0):
    done = real(fd, command, argument)
    if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_RDLCK):
        try:
            os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except BlockingIOError:
            print("broken")
    return done

fcntl.fcntl = control
print(staging._has_writer(os.open(path, os.O_RDONLY)))
"""


def test_a_process_that_opens_it_while_a_lease_is_held_does_not_end_us(tmp_path: Path) -> None:
    """The kernel tells the holder of a lease by a signal, and the usual one ends a process."""
    if not staging.can_lease(tmp_path):
        pytest.skip("no leases here")
    (tmp_path / "file").write_bytes(b"data")
    command = [sys.executable, "-c", LEASED, str(tmp_path / "file")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "broken\nFalse\n"), done.stderr


@in_trio
async def test_a_writer_is_given_no_passthrough_where_room_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file = await d.create("k")
        monkeypatch.setattr(d.uploads.room, "free_bytes", lambda: LOOK_S * 3.9e9)
        assert await d.uploads.open_backing(dirty_file) is None
        monkeypatch.setattr(d.uploads.room, "free_bytes", lambda: LOOK_S * 4.5e9)
        ends(d, dirty_file, await open_backing(d, dirty_file))


@in_trio
async def test_one_of_several_writers_that_has_written_nothing_changes_nothing(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, cache=Room(adopts=False)) as d:
        Kernel(d)
        dirty_file = await d.create("k", b"data")
        await d.uploads.commit(dirty_file)
        assert await d.uploads.flush() == [] and not dirty_file.dirty
        fds = [await open_backing(d, dirty_file) for _ in range(2)]
        d.uploads.open(dirty_file)
        ends(d, dirty_file, fds[0])
        assert dirty_file.kernel.writers == 1 and not dirty_file.dirty
        ends(d, dirty_file, fds[1])
        assert dirty_file.kernel.writers == 0 and not dirty_file.dirty
        await trio.sleep(60)
        assert d.store.counts == {"put": 1}


@in_trio
async def test_the_time_of_a_file_is_that_of_the_last_write_of_others(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"first")
        for mtime_ns in (2 * 10**18, 10**18 + 5):
            os.pwrite(fd, b"other", 0)
            os.utime(fd, ns=(0, mtime_ns))
            assert dirty_file.look() and dirty_file.mtime_ns == mtime_ns
        ends(d, dirty_file, fd)


@pytest.mark.parametrize("small", [True, False])
@in_trio
async def test_each_promise_keeps_what_nobody_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        if not small:
            d.uploads.journal._room = 0
        dirty_file, fd = await in_passthrough(d, data=b"x" * 100)
        synced = list[int]()
        real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), real(fd)))
        for number in range(3):
            token = os.fstat(fd)
            os.pwrite(fd, b"%d" % number, 0)
            os.utime(fd, ns=(token.st_atime_ns, token.st_mtime_ns))  # within one tick of the clock
            await d.uploads.commit(dirty_file)
            kept = d.uploads.journal.content(dirty_file.id)
            assert kept == (b"%d" % number + b"x" * 99 if small else None)
        assert len(synced) == (0 if small else 3)
        ends(d, dirty_file, fd)


@pytest.mark.long
@in_trio
async def test_a_mapping_that_outlives_its_close_is_waited_for(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=bytes(PART))
        mapping = mmap.mmap(fd, PART)  # which keeps a descriptor of its own
        await d.uploads.commit(dirty_file)
        ends(d, dirty_file, fd)
        mapping[0:4] = b"late"
        await trio.sleep(100)
        assert d.store.counts == {} and dirty_file.kernel.in_passthrough
        mapping[8:12] = b"more"
        mapping.close()
        await trio.sleep(1)
        await d.quiet()
        assert d.store.content("k") == b"late\0\0\0\0more".ljust(PART, b"\0")


@pytest.mark.long
@in_trio
async def test_so_is_who_outlives_the_run(tmp_path: Path) -> None:
    store = ScriptedStore()
    async with desk(tmp_path, store, writeback=True, outlived=True) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"synced")
        await d.uploads.commit(dirty_file)
    async with desk(tmp_path, store, writeback=True) as d:
        await trio.sleep(100)
        assert store.counts == {}
        os.write(fd, b" and more")
        os.close(fd)
        await trio.sleep(1)
        await d.quiet()
        assert store.content("k") == b"synced and more"


@pytest.mark.long
@in_trio
async def test_passthrough_breaks_off_an_upload_that_nobody_waits_for(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        data = content(1, 300 * PART)
        dirty_file = await d.save("k", data)
        d.store.hold("part", times=16)
        await trio.sleep(2)
        await d.quiet()
        assert d.store.in_flight
        d.uploads.open(dirty_file)
        fd = await open_backing(d, dirty_file)
        assert d.store.in_flight == 0 and dirty_file.attempt is None
        os.pwrite(fd, b"new", 0)
        await trio.sleep(100)
        assert "k" not in d.store.objects
        await d.uploads.commit(dirty_file)
        ends(d, dirty_file, fd)
        await trio.sleep(2)
        await d.quiet()
        assert d.store.seen["k"] == [b"new" + data[3:]]


@in_trio
async def test_a_reader_stays_and_the_file_is_passthrough_again(tmp_path: Path) -> None:
    """The store has it, but not the cache: so the same file is written again, and what is not changed is not sent."""
    async with desk(tmp_path, writeback=True) as d:
        kernel = Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"first")
        d.uploads.open(dirty_file)
        await d.uploads.commit(dirty_file)
        ends(d, dirty_file, fd)
        await trio.sleep(2)
        await d.quiet()
        assert d.store.content("k") == b"first" and not dirty_file.dirty
        for again in (b"", b"again"):
            d.uploads.open(dirty_file)
            fd = await open_backing(d, dirty_file)
            os.pwrite(fd, again, 0)
            await d.uploads.commit(dirty_file)
            ends(d, dirty_file, fd)
            await trio.sleep(2)
            await d.quiet()
            assert d.store.content("k") == (again or b"first")
        assert d.store.counts["put"] == 2 and len(kernel.backings) == 1
        d.uploads.release(dirty_file)
        await d.quiet()
        assert kernel.backings == [] and list(d.cache.adopted.values()) == [b"again"]


@pytest.mark.parametrize("after", [0, 1, passthrough.LOOKS - 1, passthrough.LOOKS])
@in_trio
async def test_the_kernel_lets_a_file_go_behind_its_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Its RELEASE can be here first. A file that no process has changed is not uploaded for that; one that a process still
    has, after as many looks, may be changed."""
    async with desk(tmp_path, writeback=True) as d:
        kernel = Kernel(d)
        dirty_file, fd = await taken(d, tmp_path, b"data")
        kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
        waits: list[float] = []

        def let_go() -> None:
            if len(waits) == after:
                os.close(fd)

        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", lambda seconds: (waits.append(seconds), let_go()))
            let_go()
            d.uploads.returned(dirty_file)
            d.uploads.release(dirty_file)
        kept = after == passthrough.LOOKS
        assert waits == [passthrough.LETS_GO_S] * min(after, passthrough.LOOKS - 1)
        assert dirty_file.dirty is dirty_file.kernel.in_passthrough is kept
        if kept:
            os.close(fd)
        await trio.sleep(5)
        await d.quiet()
        assert "put" not in d.store.counts and d.settled == ["k"] and kernel.backings == []
        assert list(d.cache.adopted.values()) == [b"data"]


@pytest.mark.parametrize("open_still", [False, True])
@pytest.mark.parametrize("what", ["unchanged", "mapped"])
@in_trio
async def test_a_file_that_was_let_go_late_and_not_changed_is_not_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, open_still: bool
) -> None:
    """Beyond the looks at its close. What a mapping has written is."""
    monkeypatch.setattr(passthrough, "LETS_GO_S", 0.0)
    async with desk(tmp_path, writeback=True) as d:
        kernel = Kernel(d)
        dirty_file, fd = await taken(d, tmp_path, b"data")
        kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
        if open_still:
            d.uploads.open(dirty_file)  # by a reader
        mapping = mmap.mmap(fd, 4)
        os.close(fd)
        d.uploads.returned(dirty_file)
        d.uploads.release(dirty_file)
        assert dirty_file.dirty and d.uploads.pending() == [dirty_file]
        await d.quiet()
        if what == "mapped":
            mapping[0] = ord("D")
        mapping.close()
        if open_still:
            await trio.sleep(5)
            assert dirty_file.dirty and d.settled == []
            d.uploads.release(dirty_file)
        await trio.sleep(5)
        await d.quiet()
        uploaded = what != "unchanged"
        assert d.store.counts["put"] == uploaded and not dirty_file.dirty
        assert d.told[-1][0] == "k" and d.uploads.journal.rows("drafts") == {}
        assert d.settled == ["k"] and kernel.backings == []
        assert list(d.cache.adopted.values()) == [b"Data" if what == "mapped" else b"data"]


@in_trio
async def test_a_changed_file_that_a_process_still_has_is_not_waited_for_at_its_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent in any case, once it is let go."""
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"data")
        await d.uploads.commit(dirty_file)
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
            d.uploads.returned(dirty_file)
        os.close(fd)
        d.uploads.release(dirty_file)
        await trio.sleep(5)
        await d.quiet()
        assert d.store.content("k") == b"data"


@in_trio
async def test_what_the_cache_has_is_not_passthrough(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"first")
        ends(d, dirty_file, fd)
        started = d.cache.adopt

        async def adopt(*args: object) -> bool:
            d.uploads.open(dirty_file)  # a second user comes just then
            return await started(*args)  # type: ignore[arg-type]

        d.cache.adopt = adopt  # type: ignore[method-assign]
        await trio.sleep(2)
        await d.quiet()
        assert dirty_file.content.adopted and await d.uploads.open_backing(dirty_file) is None
        await dirty_file.write(0, b"F")
        assert list(d.cache.adopted.values()) == [b"first"], "it has a file of its own by now"
        assert await d.uploads.open_backing(dirty_file) is not None
        d.uploads.returned(dirty_file)
        d.uploads.release(dirty_file)


@in_trio
async def test_changes_that_come_through_us_meanwhile(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"0123456789")
        await dirty_file.truncate(4)
        assert os.pread(fd, 99, 0) == b"0123" and dirty_file.size == 4
        await dirty_file.allocate(0, 6)
        os.pwrite(fd, b"x", 7)
        await dirty_file.truncate(8)
        assert dirty_file.size == 8
        await d.uploads.rename(dirty_file, "other")
        await d.uploads.commit(dirty_file)
        ends(d, dirty_file, fd)
        await trio.sleep(2)
        await d.quiet()
        assert d.store.content("other") == b"0123\0\0\0x" and d.store.objects.keys() == {"other"}


@in_trio
async def test_one_that_is_removed_meanwhile(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        kernel = Kernel(d)
        dirty_file, fd = await in_passthrough(d, data=b"x")
        await d.uploads.discard(dirty_file)
        os.write(fd, b"y")
        assert dirty_file.look() and dirty_file.size == 2
        ends(d, dirty_file, fd)
        await trio.sleep(10)
        assert d.store.counts == {} and await d.files() == [] and kernel.backings == []


@in_trio
async def test_one_that_is_removed_before_it_is_settled_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of its upload and its removal can come together. It would be looked for four times a second, without end."""
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        later: list[DirtyFile] = []
        monkeypatch.setattr(d.uploads, "_settle_later", later.append)
        dirty_file, fd = await in_passthrough(d, data=b"x")
        ends(d, dirty_file, fd)
        await d.uploads.discard(dirty_file)
        assert await d.files() == []
        dirty_file.kernel.way = Way.PASSTHROUGH  # as it was when the upload began
        await d.uploads._settle(dirty_file)
        assert later == []


@in_trio
async def test_more_than_the_store_takes_is_said_at_the_close(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        dirty_file, fd = await in_passthrough(d)
        os.ftruncate(fd, LIMITS.largest_object + 1)
        with pytest.raises(TooLarge):
            await d.uploads.commit(dirty_file)
        os.ftruncate(fd, 1)
        await d.uploads.commit(dirty_file)
        ends(d, dirty_file, fd)


@in_trio
async def test_the_cache_gives_way_to_who_does_not_ask(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        Kernel(d)
        await trio.sleep(10)
        assert d.cache.asked == []
        dirty_file, fd = await in_passthrough(d)
        d.uploads.room._keep_free = 1 << 60  # the disk is full all at once
        await trio.sleep(10)
        assert 35 <= len(d.cache.asked) <= 45
        ends(d, dirty_file, fd)
        asked = len(d.cache.asked)
        await trio.sleep(10)
        assert len(d.cache.asked) <= asked + 1


@in_trio
async def test_who_writes_to_a_disk_that_is_nearly_full_asks(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, keep_free_bytes=1 << 60) as d:
        Kernel(d)
        dirty_file = await d.create("k")
        assert await d.uploads.open_backing(dirty_file) is None
        await d.close(dirty_file)


@contextmanager
def without_leases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:

        def refuse(*args: object) -> int:
            raise OSError(errno.EINVAL, "no leases here")

        patch.setattr(staging.fcntl, "fcntl", refuse)
        yield


@in_trio
async def test_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert passthrough.can_lease(tmp_path)
    async with desk(tmp_path / "durable") as d:
        Kernel(d)
        dirty_file = await d.create("k")
        assert await d.uploads.open_backing(dirty_file) is None, "parts are sent while it is written"
        await d.close(dirty_file)
    async with desk(tmp_path / "refused", writeback=True) as d:
        Kernel(d).refuses = errno.EOPNOTSUPP
        dirty_file = await d.create("k", b"x")
        assert await d.uploads.open_backing(dirty_file) is None and not dirty_file.kernel.in_passthrough
        await d.close(dirty_file)
    with without_leases(monkeypatch):
        async with desk(tmp_path / "leases", writeback=True) as d:
            Kernel(d)
            dirty_file = await d.create("k", b"x")
            assert await d.uploads.open_backing(dirty_file) is None
            await d.close(dirty_file)
            assert not dirty_file.file.has_writer()


# -- files that readers have already -------------------------------------------------------------------


class CacheFile:
    """A file of the cache that readers have in passthrough."""

    id = 77

    def __init__(self, path: Path, data: bytes) -> None:
        self.path = path
        self.exists, self.rename = path.exists, path.rename
        path.write_bytes(data)
        path.chmod(0o400)


async def taken(d: Desk, tmp_path: Path, data: bytes) -> tuple[DirtyFile, int]:
    """The dirty file of what a reader has open, with a writer, and a descriptor that maps it past the daemon."""
    if not d.uploads.passthrough.possible:
        pytest.skip("files of this file system do not tell what a mapping writes")
    etag = d.store.show("k", data).etag
    base = ObjectInfo("k", len(data), 5, etag)
    dirty_file = d.uploads.take(d.store, base, CacheFile(tmp_path / "cached", data), 1, {})
    assert dirty_file is not None and dirty_file.backing is not None and dirty_file.backing.id == 77
    d.uploads.open(dirty_file)
    assert await d.uploads.open_backing(dirty_file) is dirty_file.backing
    assert dirty_file.committed == base and not dirty_file.look()
    return dirty_file, os.open(dirty_file.file.path, os.O_RDWR)


@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_nothing_is_taken_where_a_mapping_would_write_unnoticed(writeback: bool) -> None:
    """A store into a mapping moves no time on a tmpfs. So a clean file that was mapped and unmapped would count as clean."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        async with desk(Path(place), writeback=writeback) as d:
            Kernel(d)
            assert not staging.tells_of_mappings(Path(place)) and staging.can_lease(Path(place))
            assert not d.uploads.passthrough.possible


@in_trio
async def test_a_part_that_a_mapping_has_changed_is_sent_again_whatever_is_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "PUT_BYTES", 0)
    async with desk(tmp_path) as d:
        kernel = Kernel(d)
        data = bytearray(content(1, 4 * PART))
        dirty_file, fd = await taken(d, tmp_path, bytes(data))
        kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
        await dirty_file.write(0, b"W")
        d.store.fail("complete", lambda: OriginFailed("down"))
        with pytest.raises(OriginFailed):
            await d.uploads.commit(dirty_file)
        time.sleep(0.02)  # noqa: ASYNC251 - the file's time is to move on
        os.pwrite(fd, b"X", 5)
        await dirty_file.write(3 * PART, b"Y")
        await d.uploads.commit(dirty_file)
        data[0], data[5], data[3 * PART] = b"WXY"
        assert d.store.content("k") == data
        ends(d, dirty_file, fd)
        await d.quiet()


@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_what_is_taken_and_not_changed_goes_back(tmp_path: Path, writeback: bool) -> None:
    async with desk(tmp_path, writeback=writeback) as d:
        kernel, data = Kernel(d), content(1, PART + 5)
        dirty_file, fd = await taken(d, tmp_path, data)
        kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
        await d.uploads.commit(dirty_file)
        ends(d, dirty_file, fd)
        await d.quiet()
        assert "put" not in d.store.counts and list(d.cache.adopted.values()) == [data]
        assert d.settled == ["k"] and kernel.backings == []


@in_trio
async def test_what_is_taken_is_written_here_and_mapped_past_here(tmp_path: Path) -> None:
    """A store into a page that is writable already moves no time on: only the sync before an upload makes it do so again."""
    async with desk(tmp_path) as d:
        kernel, data = Kernel(d), bytearray(content(1, 3 * PART))
        dirty_file, fd = await taken(d, tmp_path, bytes(data))
        kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
        with mmap.mmap(fd, 3 * PART) as mapping:
            for number in range(4):
                mapping[7] = data[7] = number  # the same page each time, stored to by two at once
                await dirty_file.write(PART, b"%d" % number)
                data[PART : PART + 1] = b"%d" % number
                mapping[8] = data[8] = number
                assert await dirty_file.read(0, 3 * PART) == bytes(mapping[:]) == data
                await d.uploads.commit(dirty_file)
                assert d.store.content("k") == data
                mapping[9] = data[9] = number + 1
                await d.uploads.commit(dirty_file)
                assert d.store.content("k") == data
            puts = dict(d.store.counts)
            await d.uploads.commit(dirty_file)
            assert d.store.counts == puts, "nothing has changed since"
        await dirty_file.truncate(5)
        assert os.fstat(fd).st_size == 5
        await d.uploads.commit(dirty_file)
        assert d.store.content("k") == data[:5]
        ends(d, dirty_file, fd)
        await d.quiet()
        assert bytes(data[:5]) in d.cache.adopted.values() and kernel.backings == []


@in_trio
async def test_what_a_mapping_writes_after_its_close_is_uploaded_before_the_cache_has_it(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as d:
        kernel, data = Kernel(d), bytearray(content(1, 2 * PART))
        dirty_file, fd = await taken(d, tmp_path, bytes(data))
        kernel.backings.append(dirty_file.backing)  # type: ignore[arg-type]
        mapping = mmap.mmap(fd, 2 * PART)  # which keeps a descriptor of its own
        await d.uploads.commit(dirty_file)
        ends(d, dirty_file, fd)
        for number in range(3):
            mapping[number] = data[number] = 200 + number
            await trio.sleep(10)
            assert d.store.content("k") == data
            assert dirty_file.committed is None and not d.cache.adopted and not d.settled
        mapping[number] = data[number] = 1
        mapping.close()
        await trio.sleep(10)
        await d.quiet()
        assert d.store.content("k") == data and list(d.cache.adopted.values()) == [data]
        assert d.settled == ["k"]


@in_trio
async def test_a_new_file_after_many_small_ones_is_written_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs the turn of a thread that the journal needs, and no other one."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        Kernel(d)
        for number in range(IN_A_ROW - 1):
            dirty_file, fd = await in_passthrough(d, str(number), b"data")
            await d.uploads.commit(dirty_file)
            ends(d, dirty_file, fd)
        turns = Turns(monkeypatch)
        for number in range(3):
            small = await d.create(f"small {number}")
            assert await d.uploads.open_backing(small) is None
            await small.write(0, b"data")
            await d.close(small)
        assert turns.count == 3 and small.acknowledged and small.file.in_memory
        await trio.sleep(WITHIN_S + 0.1)
        await late_one(d)


async def late_one(d: Desk) -> None:
    """The kernel writes the next new file."""
    dirty_file, fd = await in_passthrough(d, "late", b"data")
    await d.uploads.commit(dirty_file)
    ends(d, dirty_file, fd)


@in_trio
async def test_a_file_that_grows_large_lets_the_kernel_write_the_next_new_one(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        Kernel(d)
        for number in range(IN_A_ROW):
            await d.save(str(number), b"data")
        large = await d.create("large")
        assert await d.uploads.open_backing(large) is None
        await large.write(0, b"1" * (HELD + 1))
        await late_one(d)
        await d.close(large)


@in_trio
async def test_a_file_that_holds_something_is_written_by_the_kernel_whatever_came_before(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        Kernel(d)
        for number in range(IN_A_ROW):
            dirty_file = await d.save(str(number), b"data")
        d.uploads.open(dirty_file)
        fd = await open_backing(d, dirty_file)
        os.pwrite(fd, b"more", 4)
        await d.uploads.commit(dirty_file)
        ends(d, dirty_file, fd)
        assert await d.uploads.flush() == [] and d.store.content(dirty_file.key) == b"datamore"

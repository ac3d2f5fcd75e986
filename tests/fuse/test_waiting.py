"""Requests that wait: signals, deadlines, bounds, and replies that the kernel does not take any more."""

from __future__ import annotations

import errno
import os
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from cachefs.base.errors import CachefsError, OriginFailed
from cachefs.base.linux import HANGS_AFTER_S
from cachefs.fuse import protocol, pyfuse3_backend
from cachefs.fuse.native_backend import NativeBackend
from cachefs.fuse.operations import REQUEST_BYTES, Admission
from cachefs.fuse.protocol import RESENT, Op, OpenFlags
from cachefs.origin.protocol import ObjectInfo
from tests.fs.bucket import Bucket
from tests.fuse.kernel import DEADLINE_S, OPEN_READ, ROOT, Kernel, kernel, opened, read_in, release_in


def interrupt(asking: Kernel, unique: int) -> None:
    asking.send(Op.INTERRUPT, 0, protocol.INTERRUPT_IN.pack(unique), unique=unique | 1)


@pytest.mark.parametrize("repeated", [0, RESENT])
async def test_an_interrupted_read_ends_at_once_and_the_others_go_on(repeated: int) -> None:
    """Also one that the kernel repeats after another daemon died: it has this number in its reply and its interrupt."""
    async with kernel(Bucket(["f"])) as asking:
        fh = await asking.open(ino := await asking.ino("f"))
        release = asking.cache.hold("f")
        readers = [asking.send(Op.READ, ino, read_in(fh), unique=number | repeated) for number in (2, 4, 6)]
        await asking.idle()
        assert asking.cache.reading == 3
        before = trio.current_time()
        interrupt(asking, readers[1])
        assert (await asking.reply(readers[1])).error == errno.EINTR
        assert trio.current_time() == before
        await asking.idle()
        assert asking.cache.reading == 2
        assert set(asking.replies).isdisjoint({readers[0], readers[2], readers[1] | 1})
        release.set()
        for reader in (readers[0], readers[2]):
            assert len((await asking.reply(reader)).body) == 10
        assert asking.metrics.fuse_errors == 0


async def test_interrupts_of_requests_that_do_not_wait() -> None:
    async with kernel(Bucket(["f"])) as asking:
        fh = await asking.open(ino := await asking.ino("f"))
        done = asking.send(Op.READ, ino, read_in(fh))
        await asking.reply(done)
        replied = dict(asking.replies)
        for unique in (done, 0, 2**64 - 1, 3):
            interrupt(asking, unique)
        interrupt(asking, (own := 998) | 1)
        asking.send(Op.INTERRUPT, 0, b"short", unique=own)
        await asking.idle()
        assert asking.replies == replied
        assert not (await asking.ask(Op.GETATTR)).error


async def test_a_request_and_its_interrupt_together() -> None:
    """The task has not begun to run yet when it is interrupted."""
    bucket = Bucket(["f"])
    async with kernel(bucket) as asking:
        lookup = asking.send(Op.LOOKUP, ROOT, b"f\0")
        interrupt(asking, lookup)
        interrupt(asking, lookup)
        assert (await asking.reply(lookup)).error == errno.EINTR
        assert await asking.ino("f")


async def test_an_interrupted_open_leaves_no_handle() -> None:
    bucket = Bucket(["f"], delay=1.0)
    async with kernel(bucket, revalidate_at_open=True, metadata_ttl=0.0) as asking:
        ino = await asking.ino("f")
        await trio.sleep(1)  # the walk that led here is over
        opening = asking.send(Op.OPEN, ino, OPEN_READ)
        await asking.idle()
        interrupt(asking, opening)
        assert (await asking.reply(opening)).error == errno.EINTR
        await trio.sleep(10)
        assert asking.counts == (0, 0)
        assert asking.cache.open_count == 0


@pytest.mark.parametrize("waits", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("passthrough", [False, True], ids=["ours", "passthrough"])
@pytest.mark.parametrize("how", ["deaf", "broken"])
async def test_an_open_whose_reply_is_not_taken_is_closed(waits: bool, passthrough: bool, how: str) -> None:
    async with kernel(Bucket(["f"]), revalidate_at_open=waits, metadata_ttl=0.0 if waits else 60.0) as asking:
        ino = await asking.ino("f")
        if passthrough:
            asking.cache.whole.add("f")
        await trio.sleep(1)
        getattr(asking.line, how).add(100)
        asking.send(Op.OPEN, ino, OPEN_READ, unique=100)
        await trio.sleep(5)
        await asking.idle()
        assert asking.counts == (0, 0)
        assert asking.cache.open_count == 0
        assert [b.users for b in asking.cache.backings.values()] == [0] * passthrough
        if how == "broken":
            assert asking.replies[100][0].error == errno.EIO
        fh = await asking.open(ino)
        assert asking.counts == (1, 0)
        assert not (await asking.ask(Op.RELEASE, ino, release_in(fh))).error


@pytest.mark.parametrize("passthrough", [False, True], ids=["ours", "passthrough"])
@pytest.mark.parametrize("how", ["deaf", "broken"])
async def test_an_open_of_a_known_file_whose_reply_is_not_taken_is_closed(
    passthrough: bool, how: str
) -> None:
    async with kernel(Bucket(["f"])) as asking:
        ino = await asking.ino("f")
        if passthrough:
            asking.cache.whole.add("f")
        fh = await asking.open(ino)
        if not passthrough:
            await asking.ask(Op.READ, ino, read_in(fh))
        assert not (await asking.ask(Op.RELEASE, ino, release_in(fh))).error
        await asking.idle()
        getattr(asking.line, how).add(100)
        asking.send(Op.OPEN, ino, OPEN_READ, unique=100)
        await asking.idle()
        assert asking.cache.reused == 1, "it was known"
        assert asking.counts == (0, 0)
        assert passthrough or asking.cache.open_count == 0
        assert [b.users for b in asking.cache.backings.values()] == [0] * passthrough
        assert not asking.fs._files._known.open
        fh = await asking.open(ino)
        assert asking.cache.reused == 2, "it still is"
        assert not (await asking.ask(Op.RELEASE, ino, release_in(fh))).error
        await asking.idle()
        assert asking.counts == (0, 0)


@pytest.mark.parametrize("how", ["deaf", "broken"])
async def test_the_same_of_directories_and_releases(how: str) -> None:
    async with kernel(Bucket(["f"])) as asking:
        line = getattr(asking.line, how)
        line |= {100, 102, 104}
        asking.send(Op.OPENDIR, ROOT, OPEN_READ, unique=100)
        await asking.idle()
        assert asking.counts == (0, 0)
        fh, dh = await asking.open(ino := await asking.ino("f")), await asking.opendir()
        assert asking.counts == (1, 1)
        asking.send(Op.RELEASE, ino, release_in(fh), unique=102)
        asking.send(Op.RELEASEDIR, ROOT, release_in(dh), unique=104)
        await asking.idle()
        assert asking.counts == (0, 0)


async def test_a_passthrough_file_is_told_of_and_shared() -> None:
    async with kernel(Bucket(["f"])) as asking:
        asking.cache.whole.add("f")
        ino = await asking.ino("f")
        handles = []
        for _ in range(2):
            fh, flags, backing = opened(await asking.ask(Op.OPEN, ino, OPEN_READ))
            assert (flags, backing) == (OpenFlags.PASSTHROUGH | OpenFlags.NOFLUSH, 1)
            handles.append(fh)
        assert asking.line.passthrough == {1: 99}
        assert asking.metrics.passthrough_opens == 2
        passthrough = asking.cache.backings["f"]
        assert passthrough.users == 2
        for fh in handles:
            await asking.ask(Op.RELEASE, ino, release_in(fh))
        assert passthrough.users == 0
        asking.backend.retire(passthrough)  # type: ignore[arg-type]
        assert asking.line.unregistered == [1]
        passthrough.id = 0
        asking.backend.retire(passthrough)  # type: ignore[arg-type]
        assert asking.line.unregistered == [1]


async def test_pages_may_be_kept_and_another_version_is_another_inode() -> None:
    bucket = Bucket(["f"])
    async with kernel(bucket) as asking:
        ino = await asking.ino("f")
        assert (
            opened(await asking.ask(Op.OPEN, ino, OPEN_READ))[1] == OpenFlags.KEEP_CACHE | OpenFlags.NOFLUSH
        )
        await asking.ask(Op.RELEASE, ino, release_in(1))
        bucket.put("f", version=1)
        await trio.sleep(61)
        assert (again := await asking.ino("f")) != ino
        assert (
            opened(await asking.ask(Op.OPEN, again, OPEN_READ))[1] == OpenFlags.KEEP_CACHE | OpenFlags.NOFLUSH
        )


async def test_a_deadline_ends_a_wait() -> None:
    async with kernel(Bucket(["f"])) as asking:
        fh = await asking.open(ino := await asking.ino("f"))
        asking.cache.hold("f")
        begun = trio.current_time()
        reply = await asking.ask(Op.READ, ino, read_in(fh))
        assert reply.error == errno.EIO
        assert trio.current_time() - begun == pytest.approx(DEADLINE_S + HANGS_AFTER_S)
        assert asking.cache.reading == 0
        assert asking.metrics.fuse_errors == 1
        assert not (await asking.ask(Op.GETATTR)).error


@pytest.mark.parametrize(
    ("failure", "number"),
    [
        (OriginFailed("no"), errno.EIO),
        (CachefsError(""), errno.EIO),
        (ValueError("a bug of ours"), errno.EIO),
        (MemoryError(), errno.ENOMEM),
        (ExceptionGroup("several", [OriginFailed("a"), OriginFailed("b")]), errno.EIO),
        (OSError(errno.ENOENT, "not for the kernel"), errno.EIO),
    ],
)
async def test_whatever_fails_is_an_errno(failure: Exception, number: int) -> None:
    async with kernel(Bucket(["f"])) as asking:
        fh = await asking.open(ino := await asking.ino("f"))

        async def fail(*_: object) -> bytes:
            await trio.lowlevel.checkpoint()
            raise failure

        asking.cache.read = fail  # type: ignore[method-assign]
        assert (await asking.ask(Op.READ, ino, read_in(fh))).error == number

        def fail_now(*_: object) -> bytes:
            raise failure

        asking.cache.read_now = fail_now  # type: ignore[method-assign]
        assert (await asking.ask(Op.READ, ino, read_in(fh))).error == number
        assert not (await asking.ask(Op.GETATTR)).error


async def test_requests_are_read_however_many_wait() -> None:
    """What waits holds up nothing that is known, and no signal."""
    async with kernel(Bucket(["f", "g"])) as asking:
        fh = await asking.open(ino := await asking.ino("f"))
        release = asking.cache.hold("f")
        readers = []
        for _ in range(50):
            readers += [asking.send(Op.READ, ino, read_in(fh)) for _ in range(100)]
            await asking.idle()
        assert asking.cache.reading == 5000
        for known in (Op.GETATTR, Op.STATFS):
            assert not (await asking.ask(known)).error
        interrupt(asking, readers[-1])
        assert (await asking.reply(readers[-1])).error == errno.EINTR
        release.set()
        for reader in readers[:-1]:
            assert len((await asking.reply(reader)).body) == 10
        assert admission(asking).held_bytes == 0


async def test_beyond_the_memory_for_them_requests_are_refused() -> None:
    async with kernel(Bucket(["f", "g"])) as asking:
        fh = await asking.open(ino := await asking.ino("f"))
        admission(asking).limit_bytes = 5 * REQUEST_BYTES
        release = asking.cache.hold("f")
        readers = [asking.send(Op.READ, ino, read_in(fh)) for _ in range(7)]
        await asking.idle()
        assert asking.cache.reading == 5
        assert [asking.replies[reader][0].error for reader in readers[5:]] == [errno.ENOMEM] * 2
        for known in (Op.GETATTR, Op.STATFS):
            assert not (await asking.ask(known)).error
        release.set()
        for reader in readers[:5]:
            assert len((await asking.reply(reader)).body) == 10
        assert len((await asking.ask(Op.READ, ino, read_in(fh))).body) == 10
        assert admission(asking).held_bytes == 0


def admission(asking: Kernel) -> Admission:
    return asking.backend.operations.admission


async def test_duplicates_are_each_answered() -> None:
    """No kernel does that; nothing is lost over it, and the bound still counts down."""
    async with kernel(Bucket(["f"])) as asking:
        fh = await asking.open(ino := await asking.ino("f"))
        release = asking.cache.hold("f")
        for _ in range(3):
            asking.send(Op.READ, ino, read_in(fh), unique=500)
        await asking.idle()
        interrupt(asking, 500)
        release.set()
        await asking.idle()
        assert sorted(reply.error for reply in asking.replies[500]) in ([0, 0, 0], [0, 0, errno.EINTR])
        assert not asking.backend._waiting


async def test_a_store_that_hangs_does_not_stop_what_is_known() -> None:
    bucket = Bucket(["f", "g", "d/x"])
    async with kernel(bucket) as asking:
        ino = await asking.ino("f")
        stuck = trio.Event()

        async def hang(key: str) -> ObjectInfo:
            await stuck.wait()
            raise AssertionError

        bucket.head = hang  # type: ignore[method-assign]
        bucket.list_page = partial(hang)  # type: ignore[method-assign,assignment]
        before = trio.current_time()
        assert not (await asking.ask(Op.GETATTR, ino, bytes(16))).error
        assert await asking.open(ino)
        assert trio.current_time() == before


async def test_the_end_of_the_mount_ends_the_service() -> None:
    """Also while requests wait: their replies would not be taken."""
    async with kernel(Bucket(["f"])) as asking:
        fh = await asking.open(ino := await asking.ino("f"))
        asking.cache.hold("f")
        asking.send(Op.READ, ino, read_in(fh))
        await asking.idle()
        asking.line.gone = True
        asking.send(Op.GETATTR)  # an aborted connection is readable
        await asking.idle()
        assert asking.cache.reading == 0
        assert not asking.backend._waiting


async def test_short_records_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async with kernel(Bucket(["f"])) as asking:
        for length in (1, 15, 39):
            asking.send_raw(b"\xff" * length)
        assert not (await asking.ask(Op.GETATTR)).error
        assert len(asking.replies) == 1


@pytest.mark.parametrize("opcode", [Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT])
async def test_what_gets_no_reply_gets_none_however_wrong_it_is(opcode: Op) -> None:
    async with kernel(Bucket(["f"])) as asking:
        asking.send(opcode, ROOT, b"", unique=200)
        asking.send(opcode, ROOT, b"\xff" * 64, unique=202)
        for length in (0, 39, 41, 2**32 - 1):
            asking.send_raw(protocol.IN_HEADER.pack(length, opcode, 204, 1, 0, 0, 0, 0, 0))
        assert not (await asking.ask(Op.GETATTR)).error
        assert len(asking.replies) == 1


async def test_a_hand_over_waits_two_seconds_for_requests_that_wait() -> None:
    """What takes longer is repeated to the next daemon."""
    backend = object.__new__(NativeBackend)
    readable, writable = os.pipe()
    names = {"open_known": None, "close_known": None}
    backend._records, backend._fs, backend._reading = None, SimpleNamespace(**names), trio.CancelScope()  # type: ignore[assignment]
    backend._device, backend._waiting = SimpleNamespace(fd=readable), {1: None}  # type: ignore[assignment, dict-item]
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(backend.serve, lambda: None)
        await trio.testing.wait_all_tasks_blocked()
        backend.pause()
    assert trio.current_time() - began == pytest.approx(2.0, abs=0.1)
    os.close(readable)
    os.close(writable)


def test_a_read_of_pyfuse3_that_blocks_ends_within_a_quarter_of_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may block if the process whose request it was has been killed."""
    timers: list[tuple[float, ...]] = []
    calls = SimpleNamespace(
        SIGALRM=signal.SIGALRM,
        ITIMER_REAL=signal.ITIMER_REAL,
        signal=lambda *_: None,
        setitimer=lambda _which, *seconds: timers.append(seconds),
    )

    async def ends(**_: int) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(pyfuse3_backend, "signal", calls)
    monkeypatch.setattr(pyfuse3_backend.pyfuse3, "main", ends)
    trio.run(object.__new__(pyfuse3_backend.Pyfuse3Backend).serve, lambda: None)
    assert timers == [(0.25, 0.25), (0,)]

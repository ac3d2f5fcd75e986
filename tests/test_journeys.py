"""The reader's way: which files of the product a request passes. Each figure is a ceiling; the aims, in
docs/explanation/architecture.md, are lower.

A journey is played in this process, from the record that the kernel writes to the reply it reads: backend, filesystem,
fetcher, cache store and origin are the real ones, in front of a lab store. Counted are the modules of cachefs in which any
function ran meanwhile, in the trio thread, in worker threads and in the HTTP client's. Another journey is one more row of
`CEILINGS` and a function that plays it inside `counted`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import trio

import cachefs
from cachefs.base.behind import WriteBehind
from cachefs.base.database import Database
from cachefs.base.metrics import Metrics
from cachefs.fetch import Fetcher
from cachefs.fs import FORMAT, TABLES, FileSystem, Options, Volume
from cachefs.fuse import callers, native_backend, protocol
from cachefs.fuse.native_backend import WANTED, NativeBackend, Negotiated
from cachefs.fuse.protocol import Op
from cachefs.store import open_store
from cachefs.upload import Uploads
from cachefs.upload.passthrough import IN_A_ROW
from tests import threads
from tests.fetch.scripted import in_trio
from tests.fuse.kernel import (
    DEADLINE_S,
    OPEN_READ,
    ROOT,
    Kernel,
    Line,
    opened,
    read_in,
    release_in,
    socket_pair,
)
from tests.fuse.test_writing import create_in, flush_in, write_in
from tests.origin.servers import Lab
from tests.store.lab import MIB, until

PACKAGE = Path(cachefs.__file__).parent
SIZE = 3 * MIB

CEILINGS = {
    # journey: (files of the rooms below the filesystem, of all rooms, functions)
    "a cached READ": (3, 7, 20),
    "a cold READ": (6, 15, 225),
}
"""Most files that the journey may pass: in cachefs/fetch and cachefs/store, and in all; and most functions, without lambdas
and comprehensions. The aims are 8 and 15 files in all, and 30 functions of a cold READ."""


WRITE = {"a file that the origin has": (10, 46), "a new file": (12, 46)}
"""Most files that the write journey may pass: in cachefs/upload and the write path of cachefs/fs, and in all. It is CREATE,
WRITE, FLUSH and RELEASE of a small file, and its adoption by the cache. A new file passes two more,
because its dirty file exists from the CREATE on: its open asks for a backing file and looks at the journal. The aim is 12 in
all."""

WRITE_PATH = tuple(f"fs/{name}.py" for name in ("changing", "dirty_files", "overrides", "writing"))


LOOP = {"serve", "_serve_burst", "read", "wait"}
KNOWN = {"OPEN": 9, "RELEASE": 5}
"""Most calls of functions of cachefs for a request about a known file (`OpenFiles`), the reply's write included, the loop's
(`LOOP`) left out. Tasks, the database and names take no part. In passthrough an OPEN takes 6. Without the table it was 74
and 13 calls for a file that is in memory on a mount that can be written."""


WRITEBACK = {"CREATE": 2, "FLUSH": 2, "UNLINK": 2}
"""How often the task of a request about a small file is continued, with --writeback and passthrough: it waits for the thread
that makes the file, which a task looks after (CREATE), and once for the journal. A lock that is free costs no wait. Each
wait is a pass of the loop, and takes 40 µs."""


SCOPES = {"CREATE": 1, "FLUSH": 2, "UNLINK": 2}
"""Cancel scopes that these tasks enter. Each takes 10 µs."""


OF_MANY = {**WRITEBACK, "CREATE": 0}
OF_MANY_SCOPES = {**SCOPES, "CREATE": 0}
"""The same for a file that is made after many small ones: it lies in memory, is made without a task, and waits for the
journal alone."""


class Passed:
    """Files of the product in which a function began, and the named functions, in any thread that `traced` was put into."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[str] = set()
        self.calls: list[str] = []  # of named functions by the backend, in order
        self.on = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if self.on and event == "call" and frame.f_code.co_name not in ("<module>", "__del__"):
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                name = str(path.relative_to(PACKAGE))
                self.files.add(name)
                if not frame.f_code.co_name.startswith("<"):
                    self.functions.add(f"{name}:{frame.f_code.co_qualname}")
                    if serves(frame):
                        self.calls.append(frame.f_code.co_qualname)


def serves(frame: FrameType | None) -> bool:
    """True for a call by the FUSE backend, and not by another task of the mount that runs meanwhile."""
    while frame is not None and frame.f_code.co_filename != native_backend.__file__:
        frame = frame.f_back
    return frame is not None


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passed]:
    found, plain = Passed(), trio.to_thread.run_sync

    async def run_sync(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        def traced(*arguments: Any) -> Any:
            sys.setprofile(found)
            try:
                return function(*arguments)
            finally:
                sys.setprofile(None)

        return await plain(traced, *arguments, **how)

    threads.replace(monkeypatch, run_sync)
    threading.setprofile(found)  # of threads that begin from now on: the HTTP client's
    sys.setprofile(found)
    yield found
    sys.setprofile(None)
    threading.setprofile(None)


@contextmanager
def counted(passed: Passed) -> Iterator[None]:
    passed.files.clear()
    passed.functions.clear()
    passed.on = True
    yield
    passed.on = False


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.stop()


@asynccontextmanager
async def mount(
    bucket: Lab, cache_dir: Path, *, writes: bool = False, takes: bool = False, writeback: bool = False
) -> AsyncIterator[tuple[Kernel, Fetcher, WriteBehind]]:
    metrics = Metrics()
    cache = open_store(cache_dir, 64 * MIB, 32 * MIB, 0, MIB, "first", metrics)
    origin = bucket.origin(metrics=metrics)
    near, far = socket_pair()
    line = Line(far.detach(), writable=writes)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        database = WriteBehind(Database(Path(place), TABLES, version=FORMAT, fsync=False))
        async with trio.open_nursery() as nursery:
            fetcher: Any = Fetcher(cache.store, nursery, metrics, max_readahead=8 * MIB)
            fetcher.passthrough = (
                True  # as on Linux from 6.9 on: an open asks the index whether the file is whole
            )
            uploads = None
            if writes:
                where = cache_dir / "state", cache_dir / "staging"
                how: Any = {"nursery": nursery, "reader": fetcher}
                how |= {"writeback": True, "upload_delay_s": 60} if writeback else {}
                uploads = Uploads(*where, [origin], cache.store, metrics, **how)
                nursery.start_soon(uploads.run)
            options: Any = Options(uid=0, gid=0), metrics
            fs = FileSystem([Volume("", origin)], database, fetcher, *options, writer=uploads)

            def register(backing: Any) -> bool:
                backing.registered(1)
                return True

            # As on Linux from 6.9 on: an open asks the index first; this kernel may take no file.
            if takes or not writes:
                fs.enable_passthrough(register if takes else lambda backing: False)
            if writeback and uploads is not None:
                uploads.passthrough.enable(lambda backing: backing.registered(1), lambda backing: None)
            kernel = Kernel(near, line, fs, fetcher, metrics)
            kernel.backend = NativeBackend(
                fs,
                metrics,
                DEADLINE_S,
                line,
                Negotiated(protocol.MINOR, protocol.Init(int(WANTED))),
                zero_open=False,
                keep_listings=False,
                writable=writes,
            )
            nursery.start_soon(kernel.backend.serve, lambda: None)
            yield kernel, fetcher, database
            if uploads is not None:
                await uploads.aclose(5)
            nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            kernel.backend.close()
            near.close()
            await fs.aclose()
            database.close()
            await cache.store.aclose(0)
            await origin.aclose()


@pytest.mark.parametrize("journey", CEILINGS)
def test_a_request_passes_few_files(
    journey: str, passed: Passed, bucket: Lab, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.env.items():
        monkeypatch.setenv(name, value)
    bucket.put("warm", bytes(SIZE))
    bucket.put("file", bytes(SIZE))

    async def play() -> None:
        async with mount(bucket, cache_dir) as (kernel, fetcher, names):
            if journey == "a cached READ":
                fh = await kernel.open(await kernel.ino("file"))
                assert not (await kernel.ask(Op.READ, fh, read_in(fh))).error
            else:
                # The first request of a process also sets up clients and connections.
                fh = await kernel.open(await kernel.ino("warm"))
                assert not (await kernel.ask(Op.READ, fh, read_in(fh))).error
                fh = await kernel.open(await kernel.ino("file"))
            await until(lambda: not fetcher.in_flight_fetches, 30)
            await names.written()  # these rows are of the look-up, not of the READ
            await trio.sleep(0.05)  # the HTTP client's thread comes to rest, too
            with counted(passed):
                reply = await kernel.ask(Op.READ, fh, read_in(fh, 4096))
                await until(lambda: not fetcher.in_flight_fetches, 30)
            assert not reply.error and reply.body == bytes(4096)

    in_trio(play)()
    below = [name for name in passed.files if name.startswith(("fetch/", "store/"))]
    most_below, most, most_functions = CEILINGS[journey]
    assert len(below) <= most_below and len(passed.files) <= most, f"{journey} passes {sorted(passed.files)}"
    assert len(passed.functions) <= most_functions, f"{journey} passes {sorted(passed.functions)}"


@pytest.mark.parametrize("written", WRITE)
def test_a_write_passes_few_files(
    written: str, passed: Passed, bucket: Lab, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.env.items():
        monkeypatch.setenv(name, value)
    first, second = b"first " + written.encode(), b"second " + written.encode()
    if written == "a file that the origin has":
        for path in (first, second):
            bucket.put(path.decode(), bytes(SIZE))

    async def write(kernel: Kernel, name: bytes, data: bytes) -> None:
        reply = await kernel.ask(Op.CREATE, ROOT, create_in(name))
        assert not reply.error, reply
        ino = int.from_bytes(reply.body[:8], "little")
        fh = protocol.CREATE_REPLY.unpack(bytes(16) + reply.body)[-3]
        assert not (await kernel.ask(Op.WRITE, ino, write_in(fh, 0, data))).error
        assert not (await kernel.ask(Op.FLUSH, ino, flush_in(fh))).error
        assert not (await kernel.ask(Op.RELEASE, ino, release_in(fh))).error
        await trio.sleep(0.3)  # the cache adopts it, and the name is written

    async def play() -> None:
        async with mount(bucket, cache_dir, writes=True) as (kernel, _, names):
            # The first request of a process also sets up clients and connections.
            await write(kernel, first, bytes(SIZE // 30))
            await names.written()
            with counted(passed):
                await write(kernel, second, bytes(SIZE // 30))

    in_trio(play)()
    own = [name for name in passed.files if name.startswith("upload/") or name in WRITE_PATH]
    most_own, most = WRITE[written]
    assert len(own) <= most_own and len(passed.files) <= most, f"a write passes {sorted(passed.files)}"


@pytest.mark.parametrize(
    "writes", [False, True], ids=["in passthrough", "in memory, on a mount that can be written"]
)
def test_a_known_file_is_opened_and_closed_in_few_steps(
    writes: bool, passed: Passed, bucket: Lab, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.env.items():
        monkeypatch.setenv(name, value)
    bucket.put("file", bytes(SIZE // 30))
    steps: dict[str, list[str]] = {}

    async def ask(kernel: Kernel, op: Op, ino: int, body: bytes) -> Any:
        passed.calls.clear()
        with counted(passed):
            reply = await kernel.ask(op, ino, body)
        assert not reply.error
        steps[op.name] = [call for call in passed.calls if call.rpartition(".")[2] not in LOOP]
        return reply

    async def play() -> None:
        async with mount(bucket, cache_dir, writes=writes, takes=True) as (kernel, fetcher, names):
            ino = await kernel.ino("file")
            fh = await kernel.open(ino)
            assert (await kernel.ask(Op.READ, ino, read_in(fh, size=SIZE // 30))).body == bytes(SIZE // 30)
            await until(lambda: not fetcher.in_flight_fetches, 30)
            for _ in range(2):  # it is not in passthrough yet, and then known
                assert not (await kernel.ask(Op.RELEASE, ino, release_in(fh))).error
                fh = await kernel.open(ino)
            assert not (await kernel.ask(Op.RELEASE, ino, release_in(fh))).error
            await names.written()
            backing_id = opened(await ask(kernel, Op.OPEN, ino, OPEN_READ))[2]
            assert backing_id == (0 if writes else 1)
            await ask(kernel, Op.RELEASE, ino, release_in(fh + 1))

    in_trio(play)()
    for name, most in KNOWN.items():
        assert 0 < len(steps[name]) <= most, f"{name}: {steps[name]}"


EMPTIED = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
"""How most programs create a file. Without O_TRUNC the origin is asked first whether another client has made it."""


def serves_a_request(task: trio.lowlevel.Task) -> bool:
    frame = getattr(task.coro, "cr_frame", None)
    return frame is not None and frame.f_locals.get("what") == "a request"


class Steps(trio.abc.Instrument):
    """How often tasks that serve one request are continued, their beginning included. `seen` is where they waited."""

    def __init__(self) -> None:
        self.seen = list[str]()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if serves_a_request(task):
            self.seen.append(" ".join(frame.f_code.co_name for frame, _ in task.iter_await_frames()))


@pytest.mark.parametrize("before", [1, IN_A_ROW])
def test_a_small_file_with_writeback_waits_for_few_things(
    bucket: Lab, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    for name, value in bucket.env.items():
        monkeypatch.setenv(name, value)
    steps, enter, scopes = Steps(), trio.CancelScope.__enter__, list[bool]()

    def entered(self: trio.CancelScope) -> trio.CancelScope:
        scopes.append(serves_a_request(trio.lowlevel.current_task()))
        return enter(self)

    monkeypatch.setattr(trio.CancelScope, "__enter__", entered)

    # This process, which the kernel names as the caller, may have many descriptors of other tests.
    monkeypatch.setattr(callers, "AT_ONCE", 1 << 20)

    async def ask(kernel: Kernel, op: Op, ino: int, body: bytes) -> Any:
        steps.seen.clear()
        scopes.clear()
        reply = await kernel.ask(op, ino, body)
        assert not reply.error, (op, reply)
        counts[op.name], waits[op.name] = (len(steps.seen), sum(scopes)), list(steps.seen)
        return reply

    async def play() -> None:
        trio.lowlevel.add_instrument(steps)
        async with mount(bucket, cache_dir, writes=True, takes=True, writeback=True) as (kernel, _, names):
            # The first one lists the directory.
            for name in (*(b"new%d" % number for number in range(before)), b"newer"):
                reply = await ask(kernel, Op.CREATE, ROOT, create_in(name, EMPTIED))
                ino = int.from_bytes(reply.body[:8], "little")
                fh = protocol.CREATE_REPLY.unpack(bytes(16) + reply.body)[-3]
                empty = [path for path in (cache_dir / "staging").iterdir() if not path.stat().st_size]
                if empty:
                    empty[0].write_bytes(b"1" * 1000)  # as the kernel does, unseen
                else:
                    assert not (await kernel.ask(Op.WRITE, ino, write_in(fh, 0, b"1" * 1000))).error
                await ask(kernel, Op.FLUSH, ino, flush_in(fh))
                await ask(kernel, Op.RELEASE, ino, release_in(fh))
                await names.written()
            await ask(kernel, Op.UNLINK, ROOT, b"newer\0")

    counts: dict[str, tuple[int, int]] = {}
    waits: dict[str, list[str]] = {}
    in_trio(play)()
    steps_of, scopes_of = (WRITEBACK, SCOPES) if before < IN_A_ROW else (OF_MANY, OF_MANY_SCOPES)
    assert {op: counts[op][0] for op in steps_of} == steps_of, waits
    assert {op: counts[op][1] for op in scopes_of} == scopes_of

"""Histories of a mount whose daemon is killed at any line of its code, also while it recovers from the kill before.

Each life of the daemon is a process of its own, forked from the test: the real `FileSystem` and `Uploads` over an origin
in memory. It ends by `os._exit` at the chosen line. What outlives it is in a memory file, in the directory of the history,
and in a log that the test reads: what became of the origin, of the kernel's handles, and of the program's changes.

With one client, `Model` says what a local disk would show. The next life compares; the change that was not answered may
have happened or not. With several clients, only what must hold in the end is checked: no internal error, no two dirty files
of one key, the origin has what the mount shows, and nothing is left of the uploads."""

from __future__ import annotations

import copy
import logging
import mmap
import os
import pickle
import random
import re
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import trio
import trio.testing

from cachefs.base import tasks
from cachefs.base.behind import WriteBehind
from cachefs.base.database import Database
from cachefs.base.errors import CachefsError, CacheUnusable, NoRoom, ObjectChanged, OriginFailed
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.base.shared_memory import SharedMemory
from cachefs.fs import FORMAT, TABLES, FileSystem, Former, Options, Volume
from cachefs.origin.protocol import ObjectInfo
from cachefs.upload import Uploads, journal
from tests.conftest import ROOT
from tests.fs.bucket import Bytes, PausingBucket, content_of
from tests.fs.mount import Clock, Mount

FILES = ["a", "b", "c", "d/x", "d/y"]
KILLED, FAILED = 9, 3
ALL = 1 << 24

Op = tuple[Any, ...]
Script = list[Op]


class Log:
    """What outlives a daemon besides its memory and its disk: what was done at the origin, by programs, and to handles."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def say(self, *what: Any) -> None:
        data = pickle.dumps(what)
        os.write(self.fd, struct.pack("=I", len(data)) + data)

    def read(self) -> list[tuple[Any, ...]]:
        data, at, found = self.path.read_bytes(), 0, []
        while at < len(data):
            (length,) = struct.unpack_from("=I", data, at)
            found.append(pickle.loads(data[at + 4 : at + 4 + length]))
            at += 4 + length
        return found


class Model:
    """What a local disk would show. Files have numbers; `handles` has (number, whether it writes) by the program's name of a
    handle. `mtime` has the times that were set and hold. The attributes of files in `loose` are not known."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.data: dict[int, bytes] = {}
        self.mode: dict[int, int] = {}
        self.mtime: dict[int, int] = {}
        self.handles: dict[int, tuple[int, bool]] = {}
        self.next = 1
        self.loose: set[int] = set()

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def new(self, name: str, data: bytes) -> int:
        number, self.next = self.next, self.next + 1
        self.names[name], self.data[number], self.mode[number] = number, data, 0o644
        return number

    def shown(self) -> dict[str, tuple[bytes, int]]:
        return {name: (self.data[number], self.mode[number]) for name, number in self.names.items()}

    def apply(self, what: str, *args: Any) -> None:
        if what == "open":
            name, h, writes, empties = args
            number = self.names.get(name)
            if number is None:
                number = self.new(name, b"")
            elif empties:
                self.write(number, b"")
            self.handles[h] = number, writes
        elif what == "write":
            h, at, data = args
            number = self.handles[h][0]
            old = self.data[number]
            old = old + bytes(max(0, at - len(old)))
            self.write(number, old[:at] + data + old[at + len(data) :])
        elif what == "close":
            del self.handles[args[0]]
        elif what == "unlink":
            del self.names[args[0]]
        elif what == "rename":
            if args[0] != args[1]:
                self.names[args[1]] = self.names.pop(args[0])
        elif what == "noreplace":
            self.names[args[1]] = self.names.pop(args[0])
        elif what == "make":
            name, h, mode = args
            self.mode[number := self.new(name, b"")] = mode
            self.handles[h] = number, True
        elif what in ("ftruncate", "allocate"):
            number = self.handles[args[0]][0]
            old = self.data[number]
            longer = old + bytes(max(0, args[1] - len(old)))
            self.write(number, longer[: args[1]] if what == "ftruncate" else longer)
        elif what == "truncate":
            number = self.names[args[0]]
            old = self.data[number]
            self.write(number, old[: args[1]] + bytes(max(0, args[1] - len(old))))
        elif what == "chmod":
            self.mode[self.names[args[0]]] = args[1]
        elif what == "utimens":
            self.mtime[self.names[args[0]]] = args[1]
        elif what == "movedir":
            for name in list(self.names):
                if name.startswith(args[0] + "/"):
                    self.names[args[1] + name[len(args[0]) :]] = self.names.pop(name)
        elif what == "save":
            name, data = args
            if name in self.names:
                self.write(self.names[name], data)
            else:
                self.new(name, data)
        elif what == "replace":
            name, data = args
            self.new(name, data)
        else:
            assert what in ("fsync", "pause", "check", "read", "stop"), what

    def forget_mtime(self, name: str) -> None:
        if name in self.names:
            self.mtime.pop(self.names[name], None)

    def both(self, name: str, to: str, copied: bytes | None, moved: bool) -> None:
        """Note that a rename was killed between its copy and its deletion. `copied` is the older version that it has copied,
        if that is not the content. `moved`: the inode has the new name."""
        old = self.names[name]
        number = self.new(to, self.data[old] if copied is None else copied)
        if moved:
            self.names[name], self.names[to] = number, old
            self.data[number], self.data[old] = self.data[old], self.data[number]
        self.loose |= {number, old}

    def write(self, number: int, data: bytes) -> None:
        self.mtime.pop(number, None)
        self.data[number] = data


class Chance:
    """What the world does besides its programs. It is made from the seed of a history, and `settings` replace parts."""

    def __init__(self, seed: int, life: int, settings: Mapping[str, Any]) -> None:
        world = random.Random(seed)
        self.writeback = world.random() < 0.7
        self.outlives = world.random() < 0.75
        self.delay_s = world.choice((0.0, 0.01, 0.05, 1.0))
        self.takes = world.random() < 0.5
        self.large = world.random() < 0.3
        self.directories = world.random() < 0.4
        self.journal_fails = world.choice((0.0, 0.0, 0.0, 0.2)) if self.writeback else 0.0
        self.puts_fail = world.choice((0.0, 0.0, 0.2)) if self.writeback else 0.0
        self.quick = world.random() < 0.3
        self.two_kills = world.random() < 0.5
        self.clients = 0
        self.more = world.random() < 0.6
        self.stops = 0.5 * (world.random() < 0.5)  # how often a daemon is stopped that is not killed
        self.attributes = False  # compare them also where no memory outlives a daemon
        self.adopts_s = 0.0  # if set, the cache takes each large file, after so many seconds
        vars(self).update(settings)
        self.rng = random.Random(f"{seed} {life}")

    def pause_s(self) -> float:
        return 0.0 if self.quick else self.rng.choice((0.0, 0.0, 0.0, 0.001, 0.004, 0.02))


class Origin(PausingBucket):
    """Each change is logged when it is made. An upload may fail, before or after that, until `end`."""

    def __init__(self, chance: Chance, log: Log) -> None:
        self.chance, self.log = chance, log
        self.token: dict[str, str] = {}
        super().__init__()
        self.end = False

    def load(self, key: str, info: ObjectInfo | None, data: bytes, token: str, version: int) -> None:
        self.version = version
        if info is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = info
            self.written[info.etag] = data
            self.token[info.etag] = token

    def _made(self, key: str, data: bytes, token: str = "") -> ObjectInfo:
        info = super()._made(key, data)
        self.token[info.etag] = token
        self.log.say("origin", key, info, data, token, self.version)
        return info

    async def put(self, key: str, source: Any, size: int, *, token: str = "", **how: Any) -> Any:
        fails = not self.end and self.chance.rng.random() < self.chance.puts_fail and not key.endswith("/")
        await trio.sleep(self.delay)
        if fails and self.chance.rng.random() < 0.5:
            raise OriginFailed(f"no put of {key}")
        info = self._made(key, bytes(source.read(0, size)), token)
        await trio.sleep(self.delay)
        if fails:
            raise OriginFailed(f"no reply to put of {key}")
        return info

    async def copy(self, *what: Any, **how: Any) -> Any:
        return await self._answered(super().copy(*what, **how))

    async def look(self, key: str) -> Any:
        info = await self.head(key)
        return info, self.token.get(info.etag, "")

    async def delete(self, key: str) -> None:
        await trio.sleep(self.delay)
        self.objects.pop(key, None)
        self.log.say("origin", key, None, b"", "", self.version)
        await trio.sleep(self.delay)


class Cached(Bytes):
    """All versions can be read for ever."""

    async def read(self, opened: ObjectId, offset: int, size: int, pid: int) -> bytes:
        await trio.sleep(self.bucket.chance.pause_s())
        return content_of(self.bucket, opened)[offset : offset + size]

    def cached_bytes(self, obj: ObjectId) -> int:
        return obj.size


class SlowReader:
    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def open(self, origin: Any, object_id: ObjectId) -> Any:
        return origin, object_id

    def close(self, opened: Any, unread_blocks: int | None = 0) -> None:
        pass

    async def read(self, opened: Any, offset: int, size: int, pid: int) -> bytes:
        await trio.sleep(self._chance.pause_s())
        return content_of(*opened)[offset : offset + size]


class Cache:
    """Takes what was written, or does not, and takes its time."""

    hangs = False

    def __init__(self, chance: Chance, path: Path) -> None:
        self.chance, self.path = chance, path

    async def adopt(self, version: ObjectId, path: Path) -> bool:
        await trio.sleep(self.chance.adopts_s or self.chance.pause_s())
        if not self.chance.adopts_s and (not self.chance.takes or self.chance.rng.random() < 0.2):
            return False
        os.replace(path, self.path)
        await trio.sleep(self.chance.pause_s())
        return True

    async def adopt_bytes(self, versions: Sequence[Any]) -> list[bool]:
        await trio.sleep(self.chance.pause_s())
        return [bool(self.chance.takes) and self.chance.rng.random() < 0.8 for _ in versions]

    async def recast(self, old: ObjectId, new: ObjectId) -> bool:
        await trio.sleep(self.chance.pause_s())
        return False

    async def evict_to_hold(self, wanted: int) -> bool:
        return False

    async def list_all(self, object_id: ObjectId) -> None:
        pass


class Failures(logging.Handler):
    """The lines that were logged; `bad` are the errors."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []
        self.bad: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("cachefs"):
            return
        line = self.format(record)
        self.lines.append(line)
        if record.levelno >= logging.ERROR:
            self.bad.append(line)


TRACED = ("cachefs/fs/", "cachefs/upload/", "cachefs/base/shared_memory", "cachefs/base/behind")


@cache
def traced_functions() -> set[str]:
    paths = [path for path in (ROOT / "cachefs").rglob("*.py") if any(part in str(path) for part in TRACED)]
    return {name for path in paths for name in re.findall(r"\bdef (\w+)\(", path.read_text())}


class Killer:
    """Ends the process at the line that is `left` lines from when it is armed, or at a call of `function`: `calls` are left
    until that one."""

    def __init__(self) -> None:
        self.left, self.function, self.calls = -1, "", 0

    def arm(self, lines: int) -> None:
        self.left = lines
        sys.settrace(self.call)

    def arm_in(self, function: str, calls: int = 1) -> None:
        assert function in traced_functions(), f"{function} was renamed or removed: nothing would be killed"
        self.function, self.calls = function, calls
        sys.settrace(self.call)

    def call(self, frame: Any, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in TRACED):
            return None
        if frame.f_code.co_name == self.function:
            self.calls -= 1
            if not self.calls:
                self.die(frame)
        return None if self.function else self.line

    def line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left <= 0:
                self.die(frame)
        return self.line

    def die(self, frame: Any) -> None:
        sys.settrace(None)
        where = []
        while frame is not None and len(where) < 12:
            name = frame.f_code.co_filename
            if "cachefs/" in name:
                where.append(f"{name.rpartition('cachefs/')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        LOG.say("killed", where, [line for line in LOGGED.lines if not line.startswith("DEBUG")])
        os._exit(KILLED)


LOG: Log
LOGGED: Failures


class Daemon:
    """One life of it, in this process, which ends with it. `script` has its changes; without one they are chosen."""

    def __init__(
        self, path: Path, log: Log, memory: int, chance: Chance, life: int, past: Past, script: Script | None
    ) -> None:
        self.path, self.log, self.memory = path, log, memory
        self.chance, self.script = chance, script
        self.rng = self.chance.rng
        self.life, self.past = life, past
        self.killer = Killer()
        self.failures = Failures()
        self.number = past.number
        self.busy: Counter[int] = Counter()  # requests by handle
        self.closing: set[int] = set()

    def run(self) -> None:
        global LOG, LOGGED
        LOG, LOGGED = self.log, self.failures
        logging.getLogger().addHandler(self.failures)
        logging.getLogger("cachefs").setLevel(logging.DEBUG)
        logging.getLogger("cachefs").propagate = True
        status = 0
        try:
            self._replace_threads()
            trio.run(self.main, clock=trio.testing.MockClock(autojump_threshold=0))
            assert not self.failures.bad, "logged: " + "\n".join(self.failures.bad)
        except BaseException:  # nothing may leave this process
            sys.settrace(None)
            self.log.say("failed", traceback.format_exc() + "\n" + "\n".join(self.failures.lines[-60:]))
            status = FAILED
        os._exit(status)

    def _replace_threads(self) -> None:
        async def run_inline(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
            await trio.lowlevel.checkpoint()
            with trio.CancelScope(shield=True):
                await trio.sleep(self.chance.pause_s())
                try:
                    return function(*arguments)
                finally:
                    await trio.sleep(self.chance.pause_s())

        async def commit_inline(names: WriteBehind, within_s: float = 0.0) -> None:
            await trio.lowlevel.checkpoint()
            names.flush()

        trio.to_thread.run_sync = run_inline
        tasks.in_worker = run_inline
        WriteBehind.written = commit_inline
        write = journal.Journal._write

        def failing(journal_: Any, puts: Any, batch: Any) -> None:
            if self.ready and self.rng.random() < self.chance.journal_fails:
                for call in batch.first:
                    call()
                raise self.rng.choice([NoRoom("full"), CacheUnusable("EIO")])
            write(journal_, puts, batch)

        journal.Journal._write = failing

    ready = False

    async def main(self) -> None:
        chance = self.chance
        if self.script is not None:
            if self.script and self.script[0][0] == "die at the start in":
                self.killer.arm_in(self.script[0][1])
        elif self.life and self.rng.random() < 0.4 and chance.two_kills and self.life < 4:
            self.killer.arm(int(self.rng.expovariate(1 / 600)) + 1)  # while it recovers
        self.origin = Origin(chance, self.log)
        for one in self.past.origin:
            self.origin.load(*one)
        clock = Clock()
        clock.now = time.time() + 10_000.0 * self.life
        memory = SharedMemory(self.memory, mmap.PAGESIZE) if chance.outlives else None
        async with trio.open_nursery() as nursery:
            self.uploads = Uploads(
                self.path / "state",
                self.path / "staging",
                [self.origin],
                Cache(chance, self.path / "taken"),
                Metrics(),
                nursery=nursery,
                reader=SlowReader(chance),
                writeback=chance.writeback,
                upload_delay_s=chance.delay_s,
                now_ns=lambda: round(clock() * 1e9),
                memory=memory,
                killed=self.life > 0 and not self.past.stopped,
            )
            records = self.past.records
            await self.uploads.recover({r[1] for r in records.values()})
            names = WriteBehind(
                Database(
                    self.path / "names",
                    TABLES,
                    version=FORMAT,
                    fsync=False,
                    killed=self.life > 0 and not self.past.stopped,
                ),
                memory and memory.rows,
            )
            self.mount = mount = Mount.__new__(Mount)
            mount.metrics, mount.clock, mount.bytes, mount.database = (
                Metrics(),
                clock,
                Cached(self.origin),
                names,
            )
            self.fs = mount.fs = FileSystem(
                [Volume("", self.origin)],
                names,
                mount.bytes,
                Options(uid=1000, gid=1000, file_mode=0o644, dir_mode=0o755),
                mount.metrics,
                clock,
                self.uploads,
                times=memory and memory.times,
            )
            self.check_keys()
            await self.fs.recover()
            nursery.start_soon(self.uploads.run)
            self.fs.follow(self.life + 1)
            if chance.outlives:
                for h, r in sorted(records.items()):
                    obj = ObjectId(self.origin.source, *r[3:6])
                    former = Former(
                        r[0], r[1], self.origin, obj, r[6], 0, r[2] == "WRITES", unsaved=r[2] != "READS"
                    )
                    assert self.fs.restore(former), f"handle {h} is lost"
            self.handles = {h: r[0] for h, r in records.items()}
            await self.live()
            nursery.cancel_scope.cancel()
        await self.fs.aclose()

    def check_keys(self) -> None:
        pending = self.uploads.pending()
        keys = [one.key for one in pending]
        assert len(keys) == len(set(keys)), (
            f"two dirty files have one key: {[one.resumed_row() for one in pending]}"
        )

    async def swarm(self) -> None:
        """Several processes at once, of which only what must hold in the end is known."""
        kills = self.life < 5
        self.number = 1000 * (self.life + 1)
        if kills and self.killer.left <= 0:

            async def later() -> None:
                await trio.sleep(self.rng.choice([0.0, 0.01, 0.03, 0.1, 0.5]))
                if self.killer.left <= 0:
                    self.killer.arm(int(self.rng.expovariate(1 / 700)) + 1)
        else:

            async def later() -> None:
                pass

        self.ready = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            for _ in range(int(self.chance.clients)):
                nursery.start_soon(self.client, 60 if kills else 8)
        if kills:
            os._exit(KILLED)
        self.ready = False
        self.origin.end = True
        for h in list(self.handles):
            await self.some("close", h)
        await trio.sleep(200)
        left = await self.uploads.flush()
        assert not left, left
        await trio.sleep(200)
        shown = {name: data for name, (data, *_) in (await self.observed()).items()}
        there = {key: self.origin.content(key) for key in self.origin.objects if not key.endswith("/")}
        assert there == shown, f"at the origin: {there} not {shown}"
        await self.nothing_left()

    async def client(self, count: int) -> None:
        """A process that makes `count` changes, each of which may fail."""
        for _ in range(count):
            files = FILES if self.chance.directories else ["a", "b", "c"]
            what = self.rng.choice(
                [
                    "open",
                    "open",
                    "write",
                    "write",
                    "close",
                    "close",
                    "rename",
                    "rename",
                    "rename",
                    "unlink",
                    "save",
                    "save",
                    "save",
                    "truncate",
                    "chmod",
                    "pause",
                    "fsync",
                    "append",
                ]
                + ["movedir"] * bool(self.chance.directories)
            )
            name, to = self.rng.choice(files), self.rng.choice(files)
            self.number += 1
            if what in ("write", "close", "fsync"):
                await self.use(what)
            elif what == "open":
                if len(self.handles) < 5 and self.chance.outlives:
                    await self.some(what, name, self.number, self.rng.random() < 0.8, self.rng.random() < 0.3)
            elif what == "rename":
                await self.some(what, name, to)
            elif what in ("save", "append"):
                await self.some(what, name, self.content())
            elif what == "truncate":
                await self.some(what, name, self.rng.choice([0, 2, 40]))
            elif what == "chmod":
                await self.some(what, name, self.rng.choice([0o600, 0o640]))
            elif what == "movedir":
                await self.some(what, *self.rng.choice([("d", "e"), ("e", "d")]))
            elif what == "unlink":
                await self.some(what, name)
            else:
                await self.some("pause", self.rng.choice([0.001, 0.01, 0.1, 1.0]))

    async def use(self, what: str) -> None:
        """Use a handle. As the kernel does, release none that another request is using."""
        handles = sorted(set(self.handles) - self.closing)
        if not handles or (what == "close" and self.busy[handles[0]]):
            return
        h = handles[0] if what == "close" else self.rng.choice(handles)
        if what == "close":
            self.closing.add(h)
            await self.some(what, h)
            return
        self.busy[h] += 1
        try:
            await self.some(what, h, *[self.rng.choice([0, 30]), self.content()] * (what == "write"))
        finally:
            self.busy[h] -= 1

    async def some(self, what: str, *args: Any) -> None:
        number = self.number
        self.log.say("began", number, what, args)
        try:
            if what == "append":
                fh = await self.mount.open(args[0], os.O_WRONLY | os.O_CREAT)
                try:
                    await self.mount.pwrite(
                        fh,
                        self.fs.handles[fh].node.dirty_file.size
                        if self.fs.handles[fh].node.dirty_file
                        else 0,
                        args[1],
                    )
                finally:
                    await self.mount.close_file(fh)
            else:
                await self.do(what, *args)
        except CachefsError as exc:
            self.log.say("told", number, repr(exc))
        else:
            self.log.say("ended", number)

    async def live(self) -> None:
        self.check_keys()
        if self.chance.clients:
            await self.swarm()
            return
        self.model = await self.choose()
        self.ready = True
        self.log.say("model", self.model)
        if self.script is not None:
            for op in self.script:
                if op[0] == "die in":
                    self.killer.arm_in(*op[1:])
                else:
                    await self.step(op)
            if self.life < self.past.lives - 1:
                os._exit(KILLED)
            self.ready = False
            await self.end()
            return
        kills = self.life < 5
        armed = self.rng.randrange(12) if kills else -1
        if kills:
            self.killer.left = self.killer.left if self.killer.left > 0 else -1
        for index in range(14 if kills else 4):
            if index == armed and self.killer.left < 0:
                self.killer.arm(int(self.rng.expovariate(1 / 700)) + 1)
            await self.step()
        if kills:
            if not self.chance.outlives and self.rng.random() < self.chance.stops:
                await self.stop()
            os._exit(KILLED)
        self.ready = False
        await self.end()

    # -- what is shown ---------------------------------------------------------------------------------

    async def choose(self) -> Model:
        """The first of the models that the mount agrees with."""
        shown = await self.observed()
        why = []
        for model in (one.copy() for one in self.past.models):
            wrong = self.differs(model, shown)
            if not wrong:
                for h in list(model.handles):
                    if h not in self.handles:
                        del model.handles[h]
                for h, (number, _) in model.handles.items():
                    data = await self.pread(h)
                    if data != model.data[number] and not self.mixes(data, number):
                        wrong = f"handle {h} reads {data[:60]!r}, not {model.data[number][:60]!r}"
                        break
                    model.data[number] = data
                    ino = self.fs.handles[self.handles[h]].ino
                    names = [name for name, (*_, found) in shown.items() if found == ino]
                    if names != [name for name, n in model.names.items() if n == number]:
                        wrong = f"handle {h} has the inode of {names}"
                        break
            if not wrong:
                return model
            why.append(wrong)
        raise AssertionError(f"life {self.life}: none of {len(why)} models: " + "; ".join(why))

    def mixes(self, data: bytes, number: int) -> bool:
        """A write that was not answered may be there in part."""
        olds = [m.data.get(number, b"") for m in self.past.models]
        if len(olds) < 2:
            return False
        if not min(map(len, olds)) <= len(data) <= max(map(len, olds)):
            return False
        return all(
            any(byte == old[at : at + 1][0] for old in olds if at < len(old)) or not byte
            for at, byte in enumerate(data)
        )

    def differs(self, model: Model, shown: dict[str, tuple[bytes, int, int, int]]) -> str:
        if shown.keys() != model.names.keys():
            return f"names {sorted(shown)} not {sorted(model.names)}"
        for name, (data, mode, mtime, _) in shown.items():
            number = model.names[name]
            if data != model.data[number] and not self.mixes(data, number):
                return f"{name}: {data[:60]!r} ({len(data)}) not {model.data[number][:60]!r} ({len(model.data[number])})"
            if number in model.loose or not (self.chance.outlives or self.chance.attributes):
                continue
            if mode != model.mode[number]:
                return f"{name}: mode {mode:o} not {model.mode[number]:o}"
            wanted = model.mtime.get(number)
            if wanted is not None and wanted != mtime:
                return f"{name}: mtime {mtime} not {wanted}"
        for name, (data, *_) in shown.items():
            model.data[model.names[name]] = data
        return ""

    async def observed(self) -> dict[str, tuple[bytes, int, int, int]]:
        shown: dict[str, tuple[bytes, int, int, int]] = {}
        for name, size in (await self.mount.walk()).items():
            path = name.decode()
            if size is None:
                continue
            found = await self.mount.stat(path)
            assert found is not None
            shown[path] = await self.mount.read(path, ALL), found.mode & 0o7777, found.mtime_ns, found.ino
        return shown

    async def pread(self, h: int) -> bytes:
        return await self.mount.pread(self.handles[h], size=ALL)

    # -- what a program does ---------------------------------------------------------------------------

    def pick(self) -> tuple[Any, ...]:
        rng, model = self.rng, self.model
        files = [n for n in FILES if self.chance.directories or "/" not in n]
        if self.chance.directories:
            files += ["e/x"]
        files = [n for n in files if "/" not in n or n.split("/")[0] in self.dirs()]
        there = sorted(model.names)
        writers = [h for h, (_, writes) in model.handles.items() if writes]
        for _ in range(100):
            what = rng.choice(
                ["open"] * 4
                + ["write"] * 5
                + ["close"] * 3
                + ["rename"] * 7
                + ["unlink"] * 2
                + [
                    "fsync",
                    "fsync",
                    "truncate",
                    "chmod",
                    "utimens",
                    "pause",
                    "pause",
                    "check",
                    "save",
                    "save",
                    "save",
                    "save",
                    "save",
                    "movedir",
                    "read",
                    *self.chance.more * ["make", "ftruncate", "allocate", "noreplace"],
                ]
            )
            if what == "open" and len(model.handles) < 4 and self.chance.outlives:
                name, writes = rng.choice(files), rng.random() < 0.7
                if name in there or writes:
                    return what, name, self.number, writes, writes and rng.random() < 0.3
            elif what == "make" and len(model.handles) < 4 and self.chance.outlives:
                if free := [name for name in files if name not in there]:
                    return what, rng.choice(free), self.number, rng.choice([0o600, 0o640, 0o755])
            elif what in ("ftruncate", "allocate") and writers:
                return what, rng.choice(writers), rng.choice([1, 4, 50])
            elif what == "noreplace" and there:
                if free := [name for name in files if name not in there]:
                    return what, rng.choice(there), rng.choice(free)
            elif what == "write" and writers:
                h = rng.choice(writers)
                size = len(model.data[model.handles[h][0]])
                return what, h, rng.choice([0, size, size, size, max(0, size - 3)]), self.content()
            elif what == "fsync" and writers:
                return what, rng.choice(writers)
            elif what == "close" and model.handles:
                return what, rng.choice(sorted(model.handles))
            elif what == "unlink" and there and not self.chance.journal_fails:
                return what, rng.choice(there)
            elif what == "rename" and there:
                return what, rng.choice(there), rng.choice(files)
            elif what == "truncate" and there:
                name = rng.choice(there)
                return what, name, rng.choice([0, 2, 10, len(model.data[model.names[name]])])
            elif what == "chmod" and there:
                return what, rng.choice(there), rng.choice([0o600, 0o640, 0o755])
            elif what == "utimens" and there:
                return what, rng.choice(there), rng.randrange(1, 10**9) * 10**9
            elif what == "pause":
                return what, rng.choice([0.001, 0.01, 0.1, 1.0, 3.0])
            elif what == "save":
                return what, rng.choice(files), self.content()
            elif what == "movedir" and self.chance.directories and not self.chance.journal_fails:
                dirs = self.dirs()
                if len(dirs) == 1:
                    return what, dirs[0], "e" if dirs[0] == "d" else "d"
            elif what == "read" and model.handles:
                return what, rng.choice(sorted(model.handles))
            elif what == "check":
                return (what,)
        return "pause", 0.1

    def dirs(self) -> list[str]:
        return sorted({n.split("/")[0] for n in self.model.names if "/" in n}) or []

    def content(self) -> bytes:
        size = self.rng.choice([0, 5, 30, 30, 30])
        if self.chance.large:
            size = self.rng.choice([5, 30, 100_000, 300_000])
        self.number += 1
        return (b"%d-%d;" % (self.life, self.number) * (size // 4 + 1))[:size]

    async def step(self, op: Op | None = None) -> None:
        op = op or self.pick()
        after = self.model.copy()
        after.apply(*op)
        self.number += 1
        self.log.say("begin", op, self.model, after, self.number)
        try:
            await self.do(*op)
        except CachefsError as exc:
            if not (self.chance.journal_fails or self.chance.puts_fail):
                raise
            self.log.say("refused", op, "".join(traceback.format_exception(exc))[-1500:])
            if op[0] in ("open", "close", "fsync", "save", "truncate", "write"):
                # The content may be there all the same.
                if op[0] == "close":
                    self.model = after
                elif op[0] in ("save", "truncate", "open", "write"):
                    await self.settle_doubt(after)
            elif op[0] == "rename":
                await self.settle_doubt(after, *renamed(self.model, op[1], op[2], None))
            elif op[0] in ("chmod", "utimens"):
                await self.settle_doubt(after)
            self.log.say("done", self.model)
            return
        self.model = after
        self.log.say("done", self.model)

    async def settle_doubt(self, *after: Model) -> None:
        self.past.models = [self.model, *after]
        self.model = await self.choose()

    async def do(self, what: str, *args: Any) -> None:
        mount, fs = self.mount, self.fs
        if what == "open":
            name, h, writes, empties = args
            flags = (
                (os.O_RDWR if writes else os.O_RDONLY)
                | (os.O_CREAT if writes else 0)
                | (os.O_TRUNC if empties else 0)
            )
            self.opened(h, await mount.open(name, flags))
        elif what == "write":
            h, at, data = args
            if data:
                assert await mount.pwrite(self.handles[h], at, data) == len(data)
        elif what == "make":
            name, h, mode = args
            self.opened(h, await mount.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode))
        elif what == "ftruncate":
            fh = self.handles[args[0]]
            await fs.setattr(fs.handles[fh].ino, size=args[1], fh=fh)
        elif what == "allocate":
            await fs.fallocate(self.handles[args[0]], 0, 0, args[1])
        elif what == "noreplace":
            above, below = await mount.parent(args[0]), await mount.parent(args[1])
            await self.twice(fs.rename, *above, *below, 1)
        elif what == "fsync":
            await fs.fsync(self.handles[args[0]])
        elif what == "close":
            fh = self.handles[args[0]]
            try:
                await fs.flush(fh)
            finally:
                self.log.say("closed", args[0])
                del self.handles[args[0]]
                fs.release(fh)
        elif what == "unlink":
            await self.twice(mount.unlink, args[0])
        elif what in ("rename", "movedir"):
            await self.twice(mount.rename, *args)
        elif what == "truncate":
            await self.twice(self.setattr, args[0], size=args[1])
        elif what == "chmod":
            await self.twice(self.setattr, args[0], mode=args[1])
        elif what == "utimens":
            await self.twice(self.setattr, args[0], mtime_ns=args[1])
        elif what == "pause":
            await trio.sleep(args[0])
        elif what == "save":
            await mount.write(args[0], args[1])
        elif what == "read":
            number, _ = self.model.handles[args[0]]
            data = await self.pread(args[0])
            assert data == self.model.data[number], (
                f"handle {args[0]} reads {data[:60]!r} not {self.model.data[number][:60]!r}"
            )
        elif what == "check":
            wrong = self.differs(self.model, await self.observed())
            assert not wrong, wrong

    def opened(self, h: int, fh: int) -> None:
        self.handles[h] = fh
        handle = self.fs.handles[fh]
        obj = handle.object
        use = "READS" if handle.node is None else "WRITES" if handle.writes else "READS_WRITTEN"
        self.log.say("handle", h, (fh, handle.ino, use, obj.key, obj.etag, obj.size, handle.mtime_ns))

    async def stop(self) -> None:
        """As after a signal: what cannot be uploaded in time is left to the next mount."""
        self.log.say("begin", ("stop",), self.model, self.model, self.number)
        await self.fs.aclose()
        self.uploads.unmounted()
        deadline_s = self.rng.choice([0.0, 0.001, 1.0])
        await self.uploads.flush(deadline_s=deadline_s, at_the_end=True)
        await self.uploads.aclose(0.0)
        self.mount.close()
        self.log.say("stopped")

    async def twice(self, work: Callable[..., Awaitable[Any]], *args: Any, **how: Any) -> None:
        try:
            await work(*args, **how)
        except ObjectChanged:
            await work(*args, **how)

    async def setattr(self, name: str, **how: Any) -> None:
        await self.fs.setattr(await self.mount.ino(name), **how)

    async def end(self) -> None:
        """Close and upload everything, and compare the origin."""
        self.origin.end = True
        for h in list(self.model.handles):
            try:
                await self.do("close", h)
            except CachefsError:
                if not self.chance.puts_fail and not self.chance.journal_fails:
                    raise
        await trio.sleep(200)
        left = await self.uploads.flush()
        assert not left, left
        await trio.sleep(200)
        wrong = self.differs(self.model, await self.observed())
        assert not wrong, f"at the end: {wrong}"
        there = {key: self.origin.content(key) for key in self.origin.objects if not key.endswith("/")}
        wanted = {name: self.model.data[number] for name, number in self.model.names.items()}
        assert there == wanted, f"at the origin: {there} not {wanted}"
        await self.nothing_left()

    async def nothing_left(self) -> None:
        rows = self.uploads.journal.rows(journal.DIRTY_FILES)
        assert not rows, rows
        assert not self.uploads.notes(), self.uploads.notes()
        await self.uploads._disk.quiet()
        files = os.listdir(self.path / "staging")
        assert not files, files
        if not self.chance.clients:  # a close that was not answered beside a write may leave a file aside
            aside = [p for p in os.listdir(self.path) if "orphaned" in p]
            assert not aside, aside
        if self.uploads._disk.shared is not None:
            left = SharedMemory(self.memory, mmap.PAGESIZE).records.found()
            assert not left, left


def renamed(model: Model, name: str, to: str, older: bytes | None) -> list[Model]:
    found = []
    if name != to:
        for copied in (None, older):
            for moved in (False, True):
                found.append(model.copy())
                found[-1].both(name, to, copied, moved)
    return found


class Past:
    """What the lives before have left: changes of the origin, records of open handles, the models of which one must be
    right, the last number that was used, and the story to tell if the history fails."""

    def __init__(self) -> None:
        self.origin: list[Any] = []
        self.records: dict[int, Any] = {}
        self.models: list[Model] = []
        self.number = 100
        self.story: list[str] = []
        self.lives = 0
        self.stopped = False

    def read(self, said: list[tuple[Any, ...]]) -> None:
        doubt: tuple[Any, ...] | None = None
        handle_said = closed = self.stopped = False
        for what, *rest in said:
            if what == "origin":
                self.origin.append(rest)
                self.story.append(f"    origin {rest[0]}: {'-' if rest[1] is None else rest[2][:40]!r}")
            elif what == "model":
                self.models, doubt = [rest[0]], None
            elif what == "begin":
                op, before, after, self.number = rest
                self.models, doubt = [before, after], op
                handle_said = closed = False
                self.story.append(f"  {tuple(a if not isinstance(a, bytes) else a[:20] for a in op)}")
            elif what == "done":
                self.models, doubt = [rest[0]], None
            elif what == "handle":
                self.records[rest[0]] = rest[1]
                handle_said = True
                self.story.append(f"    handle {rest[0]} {rest[1]}")
            elif what == "closed":
                self.records.pop(rest[0], None)
                closed = True
            else:
                self.stopped |= what == "stopped"
                self.story.append(f"  {what}: {rest}" if what != "failed" else f"  failed:\n{rest[0]}")
        if doubt is not None:
            if closed and doubt[0] == "close":
                # Between the record of the handle and the row of the uploaded file, the name may get another inode.
                self.models[1].loose.add(self.models[0].handles[doubt[1]][0])
            if handle_said or closed:
                self.models = self.models[1:]
            elif doubt[0] == "close":
                self.models = self.models[:1]
            elif doubt[0] == "save":
                self.models.append(self.models[0].copy())
                self.models[-1].apply("save", doubt[1], b"")
                for model in self.models:
                    model.forget_mtime(doubt[1])
                    model.loose |= {model.names[name] for name in doubt[1:2] if name in model.names}
            elif doubt[0] in ("open", "truncate"):
                for model in self.models:
                    model.forget_mtime(doubt[1])
            elif doubt[0] == "make":
                # It may be there, and its mode not: the program was not told that it has made it.
                self.models[1].loose.add(self.models[1].handles.pop(doubt[2])[0])
            elif doubt[0] in ("write", "ftruncate", "allocate"):
                for model in self.models:
                    model.mtime.pop(model.handles[doubt[1]][0], None)
            elif doubt[0] in ("rename", "noreplace"):
                for model in self.models:  # an upload that ended in the rename may have made another inode
                    model.loose |= {model.names[name] for name in doubt[1:] if name in model.names}
                key = [rest for rest in self.origin if rest[0] == doubt[1]][-1:]
                self.models += renamed(self.models[0], doubt[1], doubt[2], key[0][2] if key else None)


def run_lives(place: Path, seed: int = 0, scripts: Sequence[Script] | None = None, **settings: Any) -> str:
    """Run the lives of a history. Returns its story if one of them has failed, and "" otherwise."""
    past = Past()
    past.lives = 6 if scripts is None else len(scripts) + 1
    memory = os.memfd_create("history")
    os.ftruncate(memory, mmap.PAGESIZE)
    (place / "staging").mkdir()
    model = Model()
    bucket = Origin(Chance(seed, 0, settings), Log(place / "log first"))
    for key in ["a", "d/", "d/x"]:
        data = b"" if key.endswith("/") else b"first of " + key.encode()
        info = bucket._made(key, data)
        past.origin.append((key, info, data, "", bucket.version))
        if not key.endswith("/"):
            model.new(key, data)
    os.close(bucket.log.fd)
    past.models = [model]
    try:
        for life in range(past.lives):
            log, chance = Log(place / f"log{life}"), Chance(seed, life, settings)
            script = None if scripts is None else [*scripts, []][life]
            past.story.append(f"life {life}")
            pid = os.fork()
            if not pid:
                Daemon(place, log, memory, chance, life, past, script).run()
            status = wait(pid, 60)
            past.read(log.read())
            os.close(log.fd)
            if not chance.outlives:
                past.records.clear()
            if status not in (KILLED, 0):
                world = {name: value for name, value in vars(chance).items() if name != "rng"}
                return f"history {seed} {world}\n" + "\n".join(past.story) + f"\nstatus {status}"
    finally:
        os.close(memory)
    return ""


def wait(pid: int, timeout_s: float) -> int:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -100

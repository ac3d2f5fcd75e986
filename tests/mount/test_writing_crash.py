"""kill -9 while files are written: what was acknowledged is found, and nobody ever sees half a file.

First at random moments under a load (`writing_load.py`). The long series, with so many kills for each way of writing:
`CACHEFS_KILLS=200 pytest --timeout=0 -o faulthandler_timeout=0 tests/mount/test_writing_crash.py::TestAtAnyMoment`.
Then at each step of a write and of a rename by itself: the store hangs in one request, and the daemon is killed there. These
are the rows of "After a crash" in docs/explanation/semantics.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote

import pytest

from bench.lab.dataset import content
from tests.conftest import LEVEL
from tests.mount import mounts as mounts_module
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import COMMAND, Mount, eventually
from tests.mount.writing_load import Recipe, State, apply, build
from tests.mount.written import keys, stored

MIB = 1 << 20
REPOSITORY = Path(__file__).resolve().parents[2]

KILLS = int(os.environ.get("CACHEFS_KILLS", "0"))
"""So many for each way of writing; 0: what the suite has time for (`FEW`)."""

FEW = 2 if LEVEL == "short" else 4

SEED = int(os.environ.get("CACHEFS_KILLS_SEED", "1"))
WORKERS = 3
BIG = 40 * MIB if KILLS else 20 * MIB
ALL_EVERY = 10
"""Kills between two looks at every file; between them what may have changed is read."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These kills are wanted, and a long series is no test that hangs."""
    monkeypatch.setattr(mounts_module, "WATCHDOG_S", 90.0 + 20.0 * KILLS)


def listed(bucket: Bucket) -> dict[str, str]:
    """Keys and etags, without markers of directories."""
    url = f"{bucket.store.endpoint}/{bucket.name}?list-type=2&encoding-type=url"
    with urllib.request.urlopen(url) as reply:
        page = reply.read().decode()
    assert "<IsTruncated>true" not in page
    rows = re.findall(r"<Key>(.*?)</Key>.*?<ETag>(.*?)</ETag>", page)
    return {unquote(unescape(key)): unescape(tag) for key, tag in rows if not key.endswith("/")}


def unfinished(bucket: Bucket, spared: int = 0) -> list[str]:
    """Keys of multipart uploads that were neither completed nor aborted. One that was begun in the very moment of a kill has
    no part, and its name died with the daemon: so many at most are passed over."""
    url = f"{bucket.store.endpoint}/{bucket.name}"
    with urllib.request.urlopen(f"{url}?uploads") as reply:
        uploads = re.findall(r"<Key>(.*?)</Key><UploadId>(.*?)</UploadId>", reply.read().decode())
    found, empty = [], []
    for key, upload in uploads:
        try:
            with urllib.request.urlopen(f"{url}/{quote(unescape(key))}?uploadId={upload}") as reply:
                (found if b"<PartNumber>" in reply.read() else empty).append(key)
        except urllib.error.HTTPError as exc:
            assert exc.code == 404
    return found if len(empty) <= spared else found + empty


def staged(mount: Mount) -> list[str]:
    return os.listdir(mount.cache / "staging")


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


class Watcher(threading.Thread):
    """Another client that looks at the store all the time: every version of every key that it came across."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(daemon=True)
        self.seen: set[tuple[str, str]] = set()
        self._bucket = bucket
        self._etags: set[tuple[str, str]] = set(listed(bucket).items())
        self._over = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._over.wait(0.03):
                self._look()
        except Exception as exc:
            self._error = exc

    def _look(self) -> None:
        for key, etag in listed(self._bucket).items():
            if (key, etag) not in self._etags:
                self._etags.add((key, etag))
                try:
                    self.seen.add((key, digest(stored(self._bucket, key))))
                except urllib.error.HTTPError as exc:
                    assert exc.code == 404

    def stop(self) -> set[tuple[str, str]]:
        self._over.set()
        self.join()
        if self._error is not None:
            raise self._error
        return self.seen


class Doubt:
    """An operation that began and whose end was not told. `old` and `new` are the states around it."""

    def __init__(self, change: dict[str, Any], old: State, so_far: Recipe | None) -> None:
        self.change, self.old, self.new, self.so_far = change, old, apply(old, change), so_far
        names = {change["path"], change.get("to", change["path"])}
        around = old.keys() | self.new.keys()
        self.paths = {p for p in around for name in names if p == name or p.startswith(name + "/")}


class Worker:
    """What one worker has logged, and what must be true of its directory."""

    def __init__(self, place: Path, number: int) -> None:
        self.log, self.file = place / f"{number}.log", place / f"{number}.state"
        self.name = f"w{number}"
        self.state: State = {}
        self.doubt: Doubt | None = None
        self.touched: set[str] = set()
        self.whole: set[tuple[str, str]] = set()
        self._known: dict[str, str] = {}
        self.begin()

    def begin(self) -> None:
        self.file.write_text(json.dumps(self.state))
        if self.log.exists():
            self.log.rename(self.log.with_suffix(f".{len(os.listdir(self.log.parent))}"))
        self.log.write_text("")

    def entries(self) -> int:
        return self.log.read_bytes().count(b"\n")

    def digest(self, recipe: Recipe) -> str:
        name = json.dumps(recipe)
        if name not in self._known:
            self._known[name] = digest(build(recipe))
        return self._known[name]

    def read(self, *, mixed: bool) -> int:
        """Take in the log; returns how many operations were acknowledged. `mixed` as for `look`."""
        self.doubt, self.touched, self.whole = None, set(), set()
        for path, recipe in self.state.items():
            if recipe is not None:
                self.whole.add((f"{self.name}/{path}", self.digest(recipe)))
        wanted: dict[str, Any] | None = None
        so_far: Recipe | None = None
        count = 0
        for line in self.log.read_text().splitlines():
            entry = json.loads(line)
            if "want" in entry:
                wanted, so_far = entry["want"], None
                self.doubt = Doubt(wanted, self.state, None)
                self.touched |= self.doubt.paths
                self._note(self.doubt.new)
                if "middle" in wanted:
                    self._note({wanted["path"]: wanted["middle"]})
                if mixed and wanted["op"] == "rename" and self.state[wanted["path"]] is None:
                    self._older(*(f"{self.name}/{wanted[end]}/" for end in ("path", "to")))
            elif "so far" in entry:
                so_far = entry["so far"]
                assert wanted is not None
                self.doubt = Doubt(wanted, self.state, so_far)
            elif "done" in entry:
                assert wanted is not None
                self.state, self.doubt = apply(self.state, wanted), None
                count += 1
            else:
                assert entry["failed"] in (5, 103, 107), f"{wanted} failed: {entry['said']}"
        return count

    def _note(self, state: State) -> None:
        for path in self.touched & state.keys():
            if (recipe := state[path]) is not None:
                self.whole.add((f"{self.name}/{path}", self.digest(recipe)))

    def _older(self, prefix: str, new: str) -> None:
        """Of a file that is not uploaded yet the store may have an older version: with a directory that goes along."""
        self.whole |= {(new + key.removeprefix(prefix), d) for key, d in self.whole if key.startswith(prefix)}

    def look(self, mount: Mount, bucket: Bucket, *, everything: bool, mixed: bool) -> None:
        """Compare the directory with what it must be, and go on with what it is. `mixed`: what was being changed in place
        may hold any part of the change, as on a local file system."""
        root, doubt = mount.path / self.name, self.doubt
        there: set[str] = set()
        for above, folders, files in os.walk(root):
            below = os.path.relpath(above, root)
            there |= {os.path.normpath(os.path.join(below, name)) for name in (*folders, *files)}
        sure = self.state.keys() - (doubt.paths if doubt else set())
        assert not sure - there, f"lost: {sure - there}"
        assert not there - sure - (doubt.paths if doubt else set()), f"not expected: {there - sure}"
        for path in sorted(sure):
            recipe = self.state[path]
            if recipe is not None and (everything or path in self.touched):
                wanted = self.digest(recipe)
                assert digest((root / path).read_bytes()) == wanted, f"{path}: not what was acknowledged"
                assert self._at_store(bucket, path) == wanted, (
                    f"{path}: not what was acknowledged, at the store"
                )
        if doubt is not None:
            self._resolve(doubt, root, there, bucket, mixed)
            self.doubt = None  # the next look finds what this one has made of it

    def look_at_store(self, bucket: Bucket) -> None:
        """What was acknowledged lately is in the store, with no daemon there."""
        sure = self.touched & self.state.keys() - (self.doubt.paths if self.doubt else set())
        for path in sorted(sure):
            if (recipe := self.state[path]) is not None:
                assert self._at_store(bucket, path) == self.digest(recipe), f"{path} after the kill"

    def _at_store(self, bucket: Bucket, path: str) -> str:
        return digest(stored(bucket, f"{self.name}/{path}"))

    def _resolve(self, doubt: Doubt, root: Path, there: set[str], bucket: Bucket, mixed: bool) -> None:
        """Which of the states that the operation may have left is it?"""
        possible = [doubt.old, doubt.new]
        path = doubt.change["path"]
        if doubt.so_far is not None:
            possible = [{**doubt.old, path: doubt.so_far}, doubt.new]
        elif "middle" in doubt.change:
            possible.append({**doubt.old, path: doubt.change["middle"]})
        if doubt.change["op"] == "rename" and doubt.old[path] is not None:
            possible.append({**doubt.old, **doubt.new})
        found = {
            name: digest((root / name).read_bytes())
            for name in doubt.paths & there
            if (root / name).is_file()
        }
        for name, seen in found.items():
            assert self._at_store(bucket, name) == seen, f"{name} is another one at the store"
        for state in possible:
            files = {name: self.digest(r) for name in doubt.paths if (r := state.get(name)) is not None}
            if files == found and doubt.paths & there == doubt.paths & state.keys():
                self.state = state
                return
        if (
            mixed
            and doubt.change["op"] == "rename"
            and (f"{self.name}/{path}", found.get(path)) in self.whole
        ):
            # It arrived, and the store still had an older version of it under the old name.
            (root / path).unlink()
            self.state = doubt.new
            to = doubt.change["to"]
            assert found.keys() == {path, to} and found[to] == self.digest(doubt.new[to] or [])
            return
        before = doubt.so_far or doubt.old.get(path)
        assert mixed and before is not None and doubt.change["op"] == "write", f"{doubt.change} left {found}"
        made = (root / path).read_bytes()
        sources = [build(before), build(doubt.old.get(path) or []), build(doubt.change["recipe"])]
        assert mixture(made, sources), f"{path} holds what nobody has written"
        (root / path).unlink()
        self.state = {name: r for name, r in doubt.old.items() if name != path}


def mixture(made: bytes, sources: list[bytes]) -> bool:
    """Whether each byte is that of one of the sources, or a hole."""
    numpy = pytest.importorskip("numpy")
    data = numpy.frombuffer(made, "u1")
    fits = data == 0
    for source in sources:
        other = numpy.zeros(len(made), "u1")
        other[: len(source)] = numpy.frombuffer(source[: len(made)], "u1")
        fits |= data == other
    return len(made) <= max(map(len, sources)) and bool(fits.all())


class Load:
    """Workers on a mount that is killed again and again."""

    def __init__(self, mount: Mount, bucket: Bucket, place: Path, *, writeback: bool) -> None:
        self.mount, self.bucket, self.place, self.writeback = mount, bucket, place, writeback
        place.mkdir()
        self.workers = [Worker(place, number) for number in range(WORKERS)]
        for worker in self.workers:
            (mount.path / worker.name).mkdir()
        self.acknowledged = self.versions = self.doubts = self.kills = 0

    def kill(self, number: int, dice: random.Random) -> None:
        """One round: write, die, come back, compare."""
        mount, bucket = self.mount, self.bucket
        for worker in self.workers:
            worker.begin()
        bucket.store.shape(latency_ms=2, bandwidth=100 * MIB)
        watcher = Watcher(bucket)
        watcher.start()
        command = [sys.executable, "-m", "tests.mount.writing_load", mount.path, self.place]
        load = subprocess.Popen(
            [*map(str, command), f"{SEED}.{number}", str(BIG), str(WORKERS)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert load.stdout is not None
        assert load.stdout.readline() == "ready\n"
        entries = dice.choice((0, 10, 40, 100))
        eventually(lambda: sum(map(Worker.entries, self.workers)) >= entries, "the load is at work", 30)
        time.sleep(0.2 * dice.random())
        mount.kill()
        self.kills += 1
        _, said = load.communicate(timeout=30)
        seen = watcher.stop()
        self.acknowledged += sum(worker.read(mixed=self.writeback) for worker in self.workers)
        self.doubts += sum(worker.doubt is not None for worker in self.workers)
        assert load.returncode == 0, said
        self.versions += len(seen)
        strange = seen - set().union(*(worker.whole for worker in self.workers))
        assert not strange, f"seen at the store and never whole: {strange}"
        bucket.store.shape(latency_ms=0, bandwidth=0)
        if not self.writeback:
            for worker in self.workers:
                worker.look_at_store(bucket)
        mount.start()
        if dice.random() < 0.2:
            mount.kill()
            self.kills += 1
            mount.start()
        if self.writeback:
            done = mount.cli("flush", mount.path)
            assert done.returncode == 0, done.stderr
        self.look(everything=number % ALL_EVERY == 0)

    def look(self, *, everything: bool) -> None:
        for worker in self.workers:
            worker.look(self.mount, self.bucket, everything=everything, mixed=self.writeback)
        if self.writeback:
            assert self.mount.cli("flush", self.mount.path).returncode == 0
        spared = self.kills * WORKERS
        eventually(lambda: not unfinished(self.bucket, spared), "uploads that nobody completes are aborted")
        eventually(lambda: not staged(self.mount), "no staging file is left")


def hammered(mounted: Mounted, bucket: Bucket, place: Path, kills: int, **options: Any) -> None:
    mount = mounted(bucket.url, read_only=False, **options)
    load = Load(mount, bucket, place, writeback=bool(options))
    dice = random.Random(SEED)
    began = time.monotonic()
    try:
        for number in range(kills):
            load.kill(number, dice)
        load.look(everything=True)
    finally:
        print(
            f"\n{len(mount.pids)} daemons in {time.monotonic() - began:.0f} s: {load.acknowledged} operations "
            f"acknowledged, {load.doubts} in doubt, {load.versions} versions seen at the store"
        )


OLD: Recipe = [[0, "old", 100]]
NEW: Recipe = [[0, "new", 50]]


class TestTheLook:
    """The checks of `Worker` themselves. One directory stands for the mount and for the store."""

    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(
            sys.modules[__name__], "stored", lambda _, key: (tmp_path / "mnt" / key).read_bytes()
        )
        (tmp_path / "mnt/w0").mkdir(parents=True)
        (tmp_path / "load").mkdir()
        return tmp_path / "mnt/w0/f"

    @pytest.fixture
    def look(self, file: Path, tmp_path: Path) -> Callable[[], State]:
        """Looks once more at what was `OLD` and was being overwritten by `NEW` when the daemon died."""
        worker = Worker(tmp_path / "load", 0)
        worker.state = {"f": OLD}
        worker.log.write_text(json.dumps({"want": {"op": "write", "path": "f", "recipe": NEW}}) + "\n")
        worker.read(mixed=True)
        mount: Any = SimpleNamespace(path=tmp_path / "mnt")
        bucket: Any = None

        def look() -> State:
            worker.look(mount, bucket, everything=True, mixed=True)
            return worker.state

        return look

    @pytest.mark.parametrize("left", [b"", build(NEW)[:20]], ids=["emptied", "part"])
    def test_part_of_a_change_is_removed_once(
        self, file: Path, look: Callable[[], State], left: bytes
    ) -> None:
        file.write_bytes(left)
        assert [look(), look()] == [{}, {}]

    def test_a_doubt_is_settled_once(self, file: Path, look: Callable[[], State]) -> None:
        file.write_bytes(build(NEW))
        assert look() == {"f": NEW}
        file.write_bytes(build(OLD))
        with pytest.raises(AssertionError, match="not what was acknowledged"):
            look()


class TestAtAnyMoment:
    @pytest.mark.long
    @pytest.mark.backends("native")
    def test_durable(self, mounted: Mounted, bucket: Bucket, tmp_path: Path) -> None:
        hammered(mounted, bucket, tmp_path / "load", KILLS or FEW)

    @pytest.mark.backends("native")
    def test_writeback(self, mounted: Mounted, bucket: Bucket, tmp_path: Path) -> None:
        hammered(
            mounted,
            bucket,
            tmp_path / "load",
            KILLS or FEW,
            writeback=True,
            upload_delay="50ms",
        )

    @pytest.mark.long
    @pytest.mark.backends("pyfuse3")
    def test_pyfuse3(self, mounted: Mounted, bucket: Bucket, tmp_path: Path) -> None:
        hammered(mounted, bucket, tmp_path / "a", KILLS // 10 or 2)
        other = type(bucket)(bucket.store)
        hammered(mounted, other, tmp_path / "b", KILLS // 10 or 2, writeback=True, upload_delay="50ms")


BEFORE = b"what was there before"
NOW = b"what is written now"

WRITER = """
import os, sys, time
path, size, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
from bench.lab.dataset import content
with open(path, 'wb', buffering=0) as file:
    data = memoryview(content('now', size))
    while data:
        data = data[file.write(data[:1 << 20]):]
    if what == 'stay':
        print('written', flush=True)
        sys.stdin.read()
print('closed', flush=True)
"""


class Stage:
    """A mount whose store hangs where it is told to, and a program that is caught there when the daemon dies."""

    def __init__(self, mounted: Mounted, bucket: Bucket, **options: Any) -> None:
        self.bucket, self.store = bucket, bucket.store
        self.mount: Mount = mounted(bucket, **{"read_only": False, "timeout": 30, **options})
        self.programs: list[subprocess.Popen[str]] = []
        self.spared = 0  # uploads whose names have died with the daemon

    @property
    def path(self) -> Path:
        return self.mount.path

    def hangs(self, kind: str, key: str = "*", first: int = 1) -> Callable[[], object]:
        """From its `first` on such a request is not answered, nor done. Returns whether it has come. A copy that only finds
        out what the store does with conditions is not meant."""
        key = "[!.]*" if kind == "copy" and key == "*" else key
        rule = self.store.fault("hang", kind=kind, key=key, first=first)
        return lambda: self.store.faults_fired().get(rule)

    def loses(self, kind: str, key: str = "*") -> Callable[[], object]:
        """The first such request is done, but its answer gets lost; all that is asked about it then hangs."""
        self.store.fault("lost-reply", kind=kind, key=key, count=1)
        again = self.hangs(kind, key)
        if kind == "delete":
            return again
        heads = self.hangs("head", key)
        return lambda: heads() or again()

    def begin(self, code: str, *arguments: object) -> subprocess.Popen[str]:
        """A program that goes as far as it can."""
        program = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.programs.append(program)
        return program

    def write(self, name: str, size: int, what: str = "close") -> subprocess.Popen[str]:
        return self.begin(WRITER, self.path / name, size, what)

    def call(self, call: str, *names: str) -> subprocess.Popen[str]:
        """One call of `os` on paths of the mount."""
        code = f"import os, sys; os.{call}(*sys.argv[1:])"
        return self.begin(code, *(self.path / name for name in names))

    def crash(self, when: Callable[[], object], *, restart: bool = True) -> None:
        """Kill the daemon when it has come this far. The program has then been told of an error."""
        eventually(when, "it came to where it was to die", 20)
        self.mount.kill()
        for program in self.programs:
            said, _ = program.communicate(timeout=20)
            assert program.returncode != 0 and "closed" not in said
        self.programs.clear()
        self.notice()
        self.store.clear_faults()
        if restart:
            self.mount.start()

    def notice(self) -> None:
        """Let the store find out that nobody waits any more, lest it does what it hangs in. What has a body to be read it
        finds out only when it reads that, and then does not do it either."""
        until = time.monotonic() + 1
        while self.store.counters()["in_flight"] and time.monotonic() < until:
            time.sleep(0.02)

    def files(self) -> dict[str, bytes]:
        """What the mount shows, which is, once all is uploaded, what the store has; and nothing else is left of it."""
        done = self.mount.cli("flush", self.path)
        assert done.returncode == 0, done.stderr
        shown = {
            path.relative_to(self.path).as_posix(): path.read_bytes()
            for path in self.path.rglob("*")
            if path.is_file()
        }
        there = {key: stored(self.bucket, key) for key in keys(self.bucket) if not key.endswith("/")}
        assert {k: digest(v) for k, v in shown.items()} == {k: digest(v) for k, v in there.items()}
        left = partial(unfinished, self.bucket, self.spared)
        eventually(lambda: not left(), "uploads that nobody completes are aborted", 20)
        eventually(lambda: not staged(self.mount), "no staging file is left")
        return shown


@pytest.fixture
def durable(mounted: Mounted, bucket: Bucket) -> Stage:
    return Stage(mounted, bucket)


@pytest.fixture
def writeback(mounted: Mounted, bucket: Bucket) -> Stage:
    """Closed is here; what is closed begins to be uploaded only when it is waited for, or half a second later."""
    return Stage(mounted, bucket, writeback=True, upload_delay="500ms")


LARGE = 20 * MIB + 5
SMALL = 100_000


def now(size: int) -> bytes:
    return content("now", size)


@ONE_BACKEND
class TestDurable:
    """Nothing was acknowledged: what was there before is there, or all of the new."""

    @pytest.fixture(params=[pytest.param(False, marks=pytest.mark.long), True], ids=["new", "over"])
    def before(self, request: pytest.FixtureRequest, durable: Stage) -> dict[str, bytes]:
        if not request.param:
            return {}
        (durable.path / "f").write_bytes(BEFORE)
        return {"f": BEFORE}

    def test_while_it_is_written(self, durable: Stage, before: dict[str, bytes]) -> None:
        writer = durable.write("f", SMALL, "stay")
        durable.crash(lambda: writer.stdout and writer.stdout.readline() == "written\n")
        assert durable.files() == before

    def test_while_an_upload_is_begun(self, durable: Stage, before: dict[str, bytes]) -> None:
        here = durable.loses("create_upload")
        durable.spared = 2
        durable.write("f", LARGE)
        durable.crash(here)
        assert durable.files() == before

    @pytest.mark.long
    def test_with_a_part_on_its_way(self, durable: Stage, before: dict[str, bytes]) -> None:
        here = durable.hangs("upload_part", first=2)
        durable.write("f", LARGE)
        durable.crash(here)
        assert durable.files() == before

    @pytest.mark.long
    def test_with_all_parts_sent(self, durable: Stage, before: dict[str, bytes]) -> None:
        here = durable.hangs("complete_upload")
        durable.write("f", LARGE)
        durable.crash(here)
        assert durable.files() == before

    def test_completed_and_not_told(self, durable: Stage, before: dict[str, bytes]) -> None:
        here = durable.loses("complete_upload")
        durable.write("f", LARGE)
        durable.crash(here)
        assert durable.files() == {"f": now(LARGE)}

    @pytest.mark.long
    def test_while_it_is_put(self, durable: Stage, before: dict[str, bytes]) -> None:
        here = durable.hangs("put", "f")
        durable.write("f", SMALL)
        durable.crash(here)
        assert durable.files() == before

    def test_put_and_not_told(self, durable: Stage, before: dict[str, bytes]) -> None:
        here = durable.loses("put", "f")
        durable.write("f", SMALL)
        durable.crash(here)
        assert durable.files() == {"f": now(SMALL)}

    def test_at_once_behind_a_close(self, durable: Stage, before: dict[str, bytes]) -> None:
        writer = durable.write("f", LARGE)
        assert writer.wait(30) == 0
        durable.programs.clear()
        durable.crash(lambda: True)
        assert durable.files() == {"f": now(LARGE)}

    def test_after_a_close_that_failed(self, durable: Stage, before: dict[str, bytes]) -> None:
        """Its writer was told, and the bytes are kept all the same."""
        durable.mount.allowed.append("AccessDenied|denied|not at the origin")
        durable.store.fault("403", kind="put", key="f")
        with pytest.raises(PermissionError):
            (durable.path / "f").write_bytes(NOW)
        durable.crash(lambda: True)
        assert (durable.path / "f").read_bytes() == NOW
        assert durable.files() == {"f": NOW}


@ONE_BACKEND
class TestWriteback:
    """What was acknowledged comes back, whatever was under way; and is not sent again where the store has it."""

    def closed(self, stage: Stage, size: int) -> None:
        writer = stage.write("f", size)
        assert writer.wait(30) == 0
        stage.programs.clear()

    def test_a_new_file_that_was_not_closed(self, writeback: Stage) -> None:
        writer = writeback.write("f", LARGE, "stay")
        writeback.crash(lambda: writer.stdout and writer.stdout.readline() == "written\n")
        assert writeback.files() == {}

    @pytest.mark.long
    def test_before_anything_is_sent(self, writeback: Stage) -> None:
        here = writeback.hangs("*put*", "f")
        self.closed(writeback, LARGE)
        assert not here()
        writeback.crash(lambda: True)
        assert (writeback.path / "f").read_bytes() == now(LARGE)
        assert writeback.files() == {"f": now(LARGE)}

    @pytest.mark.long
    @pytest.mark.parametrize(("kind", "key"), [("put", "g"), ("delete", "f")])
    def test_while_a_file_is_renamed_that_has_an_older_version(
        self, mounted: Mounted, bucket: Bucket, kind: str, key: str
    ) -> None:
        """That stays at the origin until the new one is there under the other name; here it does not come back."""
        writeback = Stage(mounted, bucket, writeback=True, upload_delay="1h")
        (writeback.path / "f").write_bytes(BEFORE)
        writeback.files()
        here = writeback.hangs(kind, key)
        self.closed(writeback, SMALL)
        writeback.call("rename", "f", "g")
        writeback.crash(here, restart=False)
        assert stored(writeback.bucket, "f") == BEFORE
        writeback.mount.start()
        assert os.listdir(writeback.path) == ["g"]
        assert writeback.files() == {"g": now(SMALL)}

    @pytest.mark.long
    def test_with_parts_on_their_way(self, writeback: Stage) -> None:
        hangs = writeback.hangs("upload_part", first=3)
        self.closed(writeback, LARGE)
        # The origin has the first two.
        writeback.crash(lambda: hangs() and writeback.store.counters()["in_flight"] == 1, restart=False)
        writeback.store.reset()  # before the next daemon sends the third
        writeback.mount.start()
        assert writeback.files() == {"f": now(LARGE)}
        assert writeback.store.counters()["requests"]["upload_part"] == 1

    @pytest.mark.long
    def test_with_all_parts_sent(self, writeback: Stage) -> None:
        here = writeback.hangs("complete_upload")
        self.closed(writeback, LARGE)
        writeback.crash(here)
        writeback.store.reset()
        assert writeback.files() == {"f": now(LARGE)}
        assert "upload_part" not in writeback.store.counters()["requests"]

    @pytest.mark.parametrize("conflict", ["overwrite", pytest.param("fail", marks=pytest.mark.long)])
    @pytest.mark.parametrize("size", [pytest.param(SMALL, marks=pytest.mark.long), LARGE])
    def test_in_the_store_and_not_told(
        self, mounted: Mounted, bucket: Bucket, size: int, conflict: str
    ) -> None:
        stage = Stage(mounted, bucket, writeback=True, upload_delay="0s", on_conflict=conflict)
        here = stage.loses("put" if size == SMALL else "complete_upload", "f")
        self.closed(stage, size)
        stage.crash(here)
        assert stored(bucket, "f") == now(size)
        assert stage.files() == {"f": now(size)}

    @pytest.mark.long
    def test_while_it_is_put(self, writeback: Stage) -> None:
        here = writeback.hangs("put", "f")
        self.closed(writeback, SMALL)
        writeback.crash(here)
        assert writeback.files() == {"f": now(SMALL)}

    @pytest.mark.long
    def test_again_and_again_while_it_recovers(self, writeback: Stage) -> None:
        here = writeback.hangs("upload_part", first=2)
        self.closed(writeback, LARGE)
        (writeback.path / "small").write_bytes(NOW)
        writeback.crash(here, restart=False)
        for kind, first in (("list_parts", 1), ("upload_part", 1), ("complete_upload", 1)):
            here = writeback.hangs(kind, first=first)
            writeback.mount.start()
            writeback.crash(here, restart=False)
        writeback.mount.start()
        assert writeback.files() == {"f": now(LARGE), "small": NOW}

    def test_changed_in_place_and_not_closed(self, writeback: Stage) -> None:
        """As on a local file system: some of the change may be there."""
        self.closed(writeback, SMALL)
        with pytest.raises(OSError), (writeback.path / "f").open("r+b", buffering=0) as file:
            file.write(NOW)
            writeback.crash(lambda: True)
        assert writeback.files()["f"] in (now(SMALL), NOW + now(SMALL)[len(NOW) :])

    @pytest.mark.backends("native", "pyfuse3")
    def test_emptied_and_not_closed(self, mounted: Mounted, bucket: Bucket) -> None:
        """What is in the store stays as it is there; what is only here is changed in place. Both keep their names."""
        stage = Stage(mounted, bucket, writeback=True, upload_delay="1h")
        (stage.path / "sent").write_bytes(BEFORE)
        stage.files()
        (stage.path / "here").write_bytes(BEFORE)
        sent = os.open(stage.path / "sent", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        here = os.open(stage.path / "here", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        stage.crash(lambda: True)
        for fd in (sent, here):
            with pytest.raises(OSError):
                os.close(fd)
        assert stage.files() == {"sent": BEFORE, "here": b""}

    def test_removed_before_it_was_sent(self, writeback: Stage) -> None:
        self.closed(writeback, SMALL)
        (writeback.path / "f").unlink()
        writeback.crash(lambda: True)
        assert writeback.files() == {}

    def test_renamed_before_it_was_sent(self, writeback: Stage) -> None:
        (writeback.path / "g").write_bytes(BEFORE)
        self.closed(writeback, SMALL)
        (writeback.path / "f").rename(writeback.path / "g")
        writeback.crash(lambda: True)
        assert writeback.files() == {"g": now(SMALL)}

    @pytest.mark.long
    def test_while_what_is_in_the_store_is_renamed_over_it(self, writeback: Stage) -> None:
        """The one that was to be replaced was acknowledged, and its replacement was not."""
        (writeback.path / "saved").write_bytes(NOW)
        writeback.files()
        self.closed(writeback, SMALL)
        here = writeback.hangs("copy")
        writeback.call("rename", "saved", "f")
        writeback.crash(here)
        assert writeback.files() == {"f": now(SMALL), "saved": NOW}

    def test_while_it_is_removed_from_over_an_older_one(self, writeback: Stage) -> None:
        (writeback.path / "f").write_bytes(BEFORE)
        writeback.files()
        here = writeback.hangs("delete", "f")
        self.closed(writeback, SMALL)
        writeback.call("unlink", "f")
        writeback.crash(here)
        assert writeback.files() in ({}, {"f": now(SMALL)})


@ONE_BACKEND
class TestNames:
    """Made, moved, removed: as before, or as wanted. A file that moves is for a moment under both names."""

    def test_while_a_directory_is_made(self, durable: Stage) -> None:
        os.listdir(durable.path)
        here = durable.loses("put", "d/")
        durable.call("mkdir", "d")
        durable.crash(here)
        assert os.listdir(durable.path) == ["d"]  # whatever was listed before

    def test_while_a_file_is_removed(self, durable: Stage) -> None:
        (durable.path / "f").write_bytes(BEFORE)
        here = durable.hangs("delete")
        durable.call("unlink", "f")
        durable.crash(here)
        assert durable.files() == {"f": BEFORE}

    def test_removed_and_not_told(self, durable: Stage) -> None:
        (durable.path / "f").write_bytes(BEFORE)
        here = durable.loses("delete")
        durable.call("unlink", "f")
        durable.crash(here)
        assert durable.files() == {}

    @pytest.fixture(params=[pytest.param(False, marks=pytest.mark.long), True], ids=["new", "over"])
    def before(self, request: pytest.FixtureRequest, durable: Stage) -> dict[str, bytes]:
        (durable.path / "f").write_bytes(NOW)
        if not request.param:
            return {"f": NOW}
        (durable.path / "g").write_bytes(BEFORE)
        return {"f": NOW, "g": BEFORE}

    def test_while_a_rename_copies(self, durable: Stage, before: dict[str, bytes]) -> None:
        here = durable.hangs("copy")
        durable.call("rename", "f", "g")
        durable.crash(here)
        assert durable.files() == before

    def test_between_the_copy_of_a_rename_and_the_deletion(
        self, durable: Stage, before: dict[str, bytes]
    ) -> None:
        """The next start finishes it, if the row that says so was committed before the kill."""
        here = durable.hangs("delete")
        durable.call("rename", "f", "g")
        durable.crash(here)
        assert durable.files() in ({"g": NOW}, {"f": NOW, "g": NOW})

    def test_renamed_and_not_told(self, durable: Stage, before: dict[str, bytes]) -> None:
        here = durable.loses("delete")
        durable.call("rename", "f", "g")
        durable.crash(here)
        assert durable.files() == {"g": NOW}

    @pytest.mark.parametrize(
        ("kind", "first"),
        [
            pytest.param("list", 1, marks=pytest.mark.long),
            pytest.param("copy", 1, marks=pytest.mark.long),
            pytest.param("copy", 4, marks=pytest.mark.long),
            ("delete_many", 1),
        ],
    )
    @pytest.mark.parametrize("mode", ["durable", pytest.param("writeback", marks=pytest.mark.long)])
    def test_while_a_directory_is_renamed(
        self, request: pytest.FixtureRequest, mode: str, kind: str, first: int
    ) -> None:
        """Once the first copy was asked for, the next start goes through with it."""
        stage: Stage = request.getfixturevalue(mode)
        made = self._tree(stage)
        here = stage.hangs(kind, first=first)
        stage.call("rename", "old", "new")
        stage.crash(here)
        wanted = {("old/" if kind == "list" else "new/") + name: data for name, data in made.items()}
        assert stage.files() == wanted
        assert ("new" in os.listdir(stage.path)) == (kind != "list")
        assert ("old" in os.listdir(stage.path)) == (kind == "list")

    def test_an_older_version_that_is_still_there_does_not_come_back(self, writeback: Stage) -> None:
        """It is under the old name of the directory, and the newer one in the store already, under the new name."""
        made = self._tree(writeback)
        here = writeback.hangs("delete_many")
        writeback.call("rename", "old", "new")
        writeback.crash(lambda: here() and not writeback.mount.status()["uploads"]["pending"])
        assert writeback.files() == {f"new/{name}": data for name, data in made.items()}

    @pytest.mark.long
    def test_again_while_that_is_recovered(self, durable: Stage) -> None:
        made = self._tree(durable)
        here = durable.hangs("copy", first=3)
        durable.call("rename", "old", "new")
        durable.crash(here, restart=False)
        for kind in ("copy", "delete_many"):
            here = durable.hangs(kind, first=2 if kind == "copy" else 1)
            words = [*COMMAND, *durable.mount.arguments(foreground=True, log_file=None)]
            daemon = subprocess.Popen(
                words, env=durable.mount.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            eventually(here, "it recovers", 20)
            daemon.kill()
            daemon.wait()
            durable.notice()
            durable.store.clear_faults()
        durable.mount.start()
        assert durable.files() == {f"new/{name}": data for name, data in made.items()}
        assert os.listdir(durable.path) == ["new"]

    def _tree(self, stage: Stage) -> dict[str, bytes]:
        """Some files at the store, and, with writeback, some that are not there yet."""
        made: dict[str, bytes] = {}
        (stage.path / "old/deep").mkdir(parents=True)
        for number in range(6):
            name = f"{'deep/' * (number % 2)}{number}"
            (stage.path / "old" / name).write_bytes(made.setdefault(name, b"%d" % number * 1000))
        stage.files()
        for name in ("late", "deep/1"):
            made[name] = name.encode() * 100
            (stage.path / "old" / name).write_bytes(made[name])
        return made

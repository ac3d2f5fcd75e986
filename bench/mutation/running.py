"""Runs tests on copies of the project: each run is a forked child of this process, which has the third-party modules
loaded already. A mutant is written into a copy below a temporary directory, never into the working tree."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import inspect
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

from bench.mutation.mutants import Mutant, functions_of, within
from bench.mutation.plugin import Chosen, Mapper, runnable, use_fixed_seeds

PRELOADED = (
    "pytest",
    "hypothesis",
    "hypothesis.strategies",
    "hypothesis.stateful",
    "trio",
    "trio.testing",
    "lmdb",
    "xxhash",
    "h11",
    "pycurl",
    "botocore.session",
    "prometheus_client",
    "click",
    "rich.console",
    "cProfile",
    "unittest.mock",
    "xml.etree.ElementTree",
    "asyncio",
    "http.server",
    "urllib3",
    "httptools",
)
"""Modules of the tests that are slow to import and not of this project."""

COPIED = (
    "cachefs",
    "tests",
    "bench",
    "scripts",
    "docs",
    "man",
    "mkdocs.yml",
    "pyproject.toml",
    "README.md",
    "systemd",
    "docker",
)
PR_SET_PDEATHSIG = 1
CLONE_NEWNS, MS_REC, MS_PRIVATE, MNT_DETACH = 0x00020000, 0x4000, 1 << 18, 2

SLOWER = 10
"""A test hangs if it takes longer than so many times its usual time, plus `GRACE_S`."""
GRACE_S = 20.0


def preload() -> None:
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:
            pass


def copy_project(root: Path, to: Path) -> None:
    """Copy the tree with the times of its files, so that compiled modules stay valid."""
    to.mkdir(parents=True)
    for name in COPIED:
        source = root / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("results", ".hypothesis")
            shutil.copytree(source, to / name, ignore=ignore, symlinks=True)
        elif source.exists():
            shutil.copy2(source, to / name)


def fork(tree: Path, log: Path, work: Callable[[], int], *, fresh: bool = True) -> int:
    """Run `work` in a child whose modules come from `tree`; returns its pid. The child leads a process group and has its
    own mounts. Without `fresh` it keeps the modules that are loaded."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        # Else a command that is killed leaves processes that wait for their next mutant for ever, with what they inherited.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        os.close(null)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if os.geteuid() == 0:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(CLONE_NEWNS) == 0:
                libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
                _leave_mounts(libc)
        os.chdir(tree)
        for name in [
            name for name in sys.modules if fresh and name.split(".")[0] in ("bench", "cachefs", "tests")
        ]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(p for p in sys.path if p and not (Path(p) / "cachefs").is_dir())]
        os.environ["PYTHONPATH"] = str(tree)
        if fresh:
            use_fixed_seeds()
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _leave_mounts(libc: ctypes.CDLL) -> None:
    """Unmount file systems of daemons, here only: what is unmounted elsewhere would live on as long as this process, and its
    daemon with it."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - fuse." in line:
            libc.umount2(line.split()[4].encode(), MNT_DETACH)


def reap(pid: int) -> None:
    """Kill the processes that a child has left running."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def pytest_here(tree: Path, targets: Iterable[str], plugin: object, *more: str) -> int:
    """Run pytest in this process, which is a child."""
    base = tree.with_name(tree.name + "-tmp")
    shutil.rmtree(base, ignore_errors=True)
    quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--tb=short")
    return int(pytest.main([*quiet, *more, f"--basetemp={base}", *targets], plugins=[plugin]))


class Cost(NamedTuple):
    """Of a test: the processor time that it takes, how long it took while what it covers was read, which is several times as
    long as otherwise, and how many of our functions it runs; 0 where it was not seen to run what is changed."""

    processor_s: float
    seconds: float
    functions: int = 1


# -- which tests cover what ---------------------------------------------------------------------------


class Coverage:
    """Which tests run which lines, by test file; kept in `cache` until the test file changes. Lines are kept by function, so
    what is read once serves as long as the function is the same; of another, each test that ran it counts."""

    def __init__(self, root: Path, cache: Path, paths: set[str], test_files: list[str]) -> None:
        self._root = root
        self._cache = cache
        self._paths = paths
        self._files = test_files
        self._functions = {path: functions_of((root / path).read_bytes()) for path in paths}
        self.tests: dict[str, dict[str, Any]] = {}

    def _place(self, test_file: str) -> Path:
        about = b"cost\0" + test_file.encode() + b"\0" + (self._root / test_file).read_bytes()
        return self._cache / f"{hashlib.blake2b(about, digest_size=12).hexdigest()}.json"

    def _known(self, test_file: str) -> dict[str, Any] | None:
        place = self._place(test_file)
        if not place.exists():
            return None
        found = json.loads(place.read_text())
        tests: dict[str, Any] = found["tests"]
        return tests if self._paths <= set(found["paths"]) else None

    def collect(self, trees: list[Path], say: Callable[[str], None], *, again: bool) -> None:
        """Run the test files whose coverage is not known, one at a time for each of `trees`."""
        self._cache.mkdir(parents=True, exist_ok=True)
        missing = [name for name in self._files if again or self._known(name) is None]
        running: dict[int, Path] = {}
        while missing or running:
            while missing and len(running) < len(trees):
                tree = next(tree for tree in trees if tree not in running.values())
                name = missing.pop()
                say(f"reading what {name} covers ({len(missing)} more)")
                work = partial(self._read, tree, name, self._place(name))
                running[fork(tree, tree.with_name(tree.name + ".log"), work)] = tree
            pid, _ = os.wait()
            if pid in running:
                reap(pid)
                del running[pid]
        for name in self._files:
            if (known := self._known(name)) is not None:
                self.tests.update(known)
            else:
                say(f"{name} did not come to its end: left out")

    def _read(self, tree: Path, name: str, place: Path) -> int:
        costs = place.with_suffix(".cost")
        costs.unlink(missing_ok=True)
        # Reading lines makes a test that loops in our code twenty times as slow, and one that waits no slower.
        log = tree.with_name(f"{tree.name}.cost")
        pid = fork(tree, log, partial(self._measure, tree, name, costs), fresh=False)
        os.waitpid(pid, 0)
        reap(pid)
        measured = json.loads(costs.read_text()) if costs.exists() else {}
        mapper = Mapper(str(tree), self._paths)
        pytest_here(tree, [name], mapper)
        for test_name, test in mapper.tests.items():
            test["processor_s"] = measured.get(test_name, test["processor_s"])
            ran: dict[str, dict[str, tuple[str, list[int]]]] = {}
            test["ran"] = ran
            for path, lines in test.pop("lines").items():
                functions = self._functions[path]
                for line in lines:
                    function, at = within(functions, line)
                    digest = functions[function][2] if function else ""
                    ran.setdefault(path, {}).setdefault(function, (digest, []))[1].append(at)
        place.with_suffix(".new").write_text(
            json.dumps({"paths": sorted(self._paths), "tests": mapper.tests})
        )
        place.with_suffix(".new").replace(place)
        costs.unlink(missing_ok=True)
        return 0

    def _measure(self, tree: Path, name: str, into: Path) -> int:
        mapper = Mapper(str(tree), set())
        pytest_here(tree, [name], mapper)
        into.write_text(json.dumps({name: test["processor_s"] for name, test in mapper.tests.items()}))
        return 0

    def of(self, mutant: Mutant, near: tuple[str, ...]) -> dict[str, Cost]:
        """Test → what it took, of those that run what is changed, or may run it in a process that they start: those of the
        files `near`, and where no other runs it, all that use the module."""
        good = {name: test for name, test in self.tests.items() if not test["failed"]}
        users = {name for name, test in good.items() if mutant.path in test["ran"]}
        found = {name for name in users if self._runs(good[name]["ran"][mutant.path], mutant)} or users
        unseen = {name for name, test in good.items() if test["spawned"] and name.startswith(near)} - found
        return {
            name: Cost(
                float(test["processor_s"]),
                float(test["seconds"]),
                0 if name in unseen else sum(map(len, test["ran"].values())),
            )
            for name, test in good.items()
            if name in found | unseen
        }

    def _runs(self, ran: dict[str, Any], mutant: Mutant) -> bool:
        if not mutant.lines:
            return True
        for function, at in mutant.lines:
            digest, lines = ran.get(function, ("", ()))
            known = self._functions[mutant.path].get(function, (0, 0, ""))[2]
            if lines and (at in lines or digest != known):
                return True
        return False


# -- mutants ------------------------------------------------------------------------------------------


class Verdicts:
    """What notices which mutant; each of `sessions` runs one at a time. A test that notices one must pass without it, and a
    test of another room must notice it twice: what fails now and then kills nothing."""

    def __init__(self, sessions: list[Session], tests_of: Callable[[Mutant], list[dict[str, Cost]]]) -> None:
        self._sessions = sessions
        self._tests_of = tests_of
        self.sound: set[str] = set()
        self.broken: set[str] = set()

    def of_all(self, mutants: list[Mutant], done: Callable[[Mutant, str, float], None]) -> None:
        """Run all mutants. `done` gets each outcome and its time: "killed: ...", "not covered", or "" for a survivor."""
        waiting = iter(mutants)
        turn = threading.Lock()

        def work(session: Session) -> None:
            while True:
                with turn:
                    mutant = next(waiting, None)
                if mutant is None:
                    return
                begun = time.monotonic()
                outcome = self._of(session, mutant)
                with turn:
                    done(mutant, outcome, time.monotonic() - begun)

        threads = [threading.Thread(target=work, args=(session,), daemon=True) for session in self._sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _of(self, session: Session, mutant: Mutant) -> str:
        near, far = self._tests_of(mutant)
        tests = near | far
        if not tests:
            return "not covered"
        while tests := {name: cost for name, cost in tests.items() if name not in self.broken}:
            found = session.run(mutant, tests)
            if found == "":
                return ""
            if found not in tests:
                return f"killed: {found}"
            only = {found: tests[found]}
            if found not in self.sound:
                (self.broken if session.run(None, only) else self.sound).add(found)
            if found in self.sound and (found in near or session.run(mutant, only)):
                return f"killed: {found}"
            del tests[found]
        return ""


class Session:
    """The tests of `files`, collected once, in a process of its own on the copy in `tree`. A mutant costs what its tests
    cost, and no imports: it runs in a fork of that process, with the changed function's code in place of the old one's."""

    def __init__(self, tree: Path, files: list[str]) -> None:
        self._tree = tree
        self._written = 0
        self._jobs, theirs = Pipe()
        work = partial(pytest_here, tree, files, _Server(self, theirs), "-s")
        self._pid = fork(tree, tree.with_name(f"{tree.name}.collected"), work)
        theirs.close()
        self._collected = False

    def run(self, mutant: Mutant | None, tests: dict[str, Cost]) -> str:
        """The first test that fails with the mutant, or how the process ended; "" if no test fails."""
        if not self._collected:
            self._collected = self._jobs.recv()  # before anything changes in the tree
        limits = {name: GRACE_S + SLOWER * cost.seconds for name, cost in tests.items()}
        original = b""
        if mutant is not None:
            file = self._tree / mutant.path
            original, status = file.read_bytes(), file.stat()
            # For what the tests import late, and for the processes they start.
            file.write_bytes(mutant.apply(original))
            self._written += 1
            time_s = 1_000_000_000 + self._written  # no two mutants look alike to what is compiled
            os.utime(file, (time_s, time_s))
        try:
            self._jobs.send((mutant, original, limits))
            ended, failed = self._jobs.recv()
        finally:
            if mutant is not None:
                file.write_bytes(original)
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        if os.WIFSIGNALED(ended):
            name = signal.Signals(os.WTERMSIG(ended)).name
            return "a test hangs" if name == "SIGALRM" else f"ended by {name}"
        return "" if os.WEXITSTATUS(ended) in (0, 5) else str(failed) or "the tests do not start"

    def close(self) -> None:
        self._jobs.send(None)
        os.waitpid(self._pid, 0)

    def _serve(self, session: pytest.Session, jobs: Connection) -> None:
        """The main function of that process."""
        items = {item.nodeid: item for item in session.items if runnable(item)}
        functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        for found in gc.get_objects():
            if isinstance(found, FunctionType):
                functions.setdefault(_place(found.__code__), []).append(found)
        gc.freeze()
        failed = self._tree.with_name(f"{self._tree.name}.failed")
        jobs.send(True)
        while (job := jobs.recv()) is not None:
            mutant, original, limits = job
            failed.unlink(missing_ok=True)
            chosen = Chosen(limits, failed)
            swap = mutant is None or can_be_swapped(mutant, original)
            if swap:
                work = partial(self._run_here, session, items, functions, mutant, original, chosen)
            else:
                files = list(dict.fromkeys(name.split("::")[0] for name in limits))
                work = partial(pytest_here, self._tree, files, chosen, "-x")
            pid = fork(self._tree, self._tree.with_name(f"{self._tree.name}.log"), work, fresh=not swap)
            _, status = os.waitpid(pid, 0)
            reap(pid)
            jobs.send((status, failed.read_text() if failed.exists() else ""))

    def _run_here(
        self,
        session: pytest.Session,
        items: dict[str, pytest.Item],
        functions: dict[tuple[str, str, int], list[FunctionType]],
        mutant: Mutant | None,
        original: bytes,
        chosen: Chosen,
    ) -> int:
        if mutant is not None:
            file = self._tree / mutant.path
            old, new = (outermost(mutant, text, file) for text in (original, mutant.apply(original)))
            for function in functions.get(_place(old), ()):
                function.__code__ = new
        base = self._tree.with_name(f"{self._tree.name}-tmp")
        shutil.rmtree(base, ignore_errors=True)
        session.config._tmp_path_factory._given_basetemp = base  # type: ignore[attr-defined]
        session.config.pluginmanager.register(chosen)
        names = [name for name in chosen.limits_s if name in items]
        for name, after in zip(names, [*names[1:], ""], strict=True):
            item = items[name]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=items.get(after))
            if chosen.failed:
                return 1
        return 0


class _Server:
    """A plugin: what pytest has collected waits for mutants, instead of running."""

    def __init__(self, session: Session, jobs: Connection) -> None:
        self._session, self._jobs = session, jobs

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._session._serve(session, self._jobs)
        return True


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def outermost(mutant: Mutant, source: bytes, file: Path) -> CodeType:
    """The code of the function that contains the mutant, not of a function nested in it."""
    code = compile(source, str(file), "exec")
    for name in mutant.function.split("."):
        inner = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]
        code = max((c for c in inner if c.co_firstlineno <= mutant.line), key=lambda c: c.co_firstlineno)
        if code.co_flags & inspect.CO_OPTIMIZED:
            break
    return code


def can_be_swapped(mutant: Mutant, source: bytes) -> bool:
    """False outside of functions, where the function would use other variables of those around it, and where its code is the
    same: then the mutant is of a default."""
    if not mutant.lines or any(not function for function, _ in mutant.lines):
        return False
    before, after = (outermost(mutant, text, Path(mutant.path)) for text in (source, mutant.apply(source)))
    return before.co_freevars == after.co_freevars and before != after

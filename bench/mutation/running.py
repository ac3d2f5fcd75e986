"""Runs tests on copies of the project: each run is a forked child of this process, which has the third-party modules
loaded already. A mutant is written into a copy below a temporary directory, never into the working tree."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.mutation.mutants import Mutant, functions_of, within
from bench.mutation.plugin import Chosen, Mapper, use_fixed_seeds

PRELOADED = (
    *("pytest", "hypothesis", "hypothesis.strategies", "hypothesis.stateful", "trio", "trio.testing"),
    *("lmdb", "xxhash", "h11", "pycurl", "botocore.session", "prometheus_client", "click", "rich.console"),
    *("cProfile", "unittest.mock", "xml.etree.ElementTree", "asyncio", "http.server", "urllib3", "httptools"),
)
"""Of what the tests import: what takes time, and is not ours."""

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
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x00020000, 0x4000, 1 << 18

SLOWER = 10
"""A test may take as many times of what it took, and `GRACE_S`, before it counts as hanging."""
GRACE_S = 20.0


def preload() -> None:
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:
            pass


def copy_project(root: Path, to: Path) -> None:
    """With the times of files, so that what is compiled stays valid."""
    to.mkdir(parents=True)
    for name in COPIED:
        source = root / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("results", ".hypothesis")
            shutil.copytree(source, to / name, ignore=ignore, symlinks=True)
        elif source.exists():
            shutil.copy2(source, to / name)


def fork(tree: Path, log: Path, work: Callable[[], int]) -> int:
    """`work` in a child whose modules come from `tree`; its pid. It leads a process group and has its own mounts."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
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
        os.chdir(tree)
        for name in [name for name in sys.modules if name.split(".")[0] in ("bench", "cachefs", "tests")]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(p for p in sys.path if p and not (Path(p) / "cachefs").is_dir())]
        os.environ["PYTHONPATH"] = str(tree)
        use_fixed_seeds()
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def reap(pid: int) -> None:
    """What a child has left running."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def pytest_here(tree: Path, targets: Iterable[str], plugin: object, *more: str) -> int:
    """Of a child: run pytest in this process."""
    import pytest

    base = tree.with_name(tree.name + "-tmp")
    shutil.rmtree(base, ignore_errors=True)
    quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--tb=short")
    return int(pytest.main([*quiet, *more, f"--basetemp={base}", *targets], plugins=[plugin]))


class Cost(NamedTuple):
    """Of a test, while what it covers was read: that is several times what it takes otherwise."""

    processor_s: float
    seconds: float


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
        about = b"spawned\0" + test_file.encode() + b"\0" + (self._root / test_file).read_bytes()
        return self._cache / f"{hashlib.blake2b(about, digest_size=12).hexdigest()}.json"

    def _known(self, test_file: str) -> dict[str, Any] | None:
        place = self._place(test_file)
        if not place.exists():
            return None
        found = json.loads(place.read_text())
        tests: dict[str, Any] = found["tests"]
        return tests if self._paths <= set(found["paths"]) else None

    def collect(self, trees: list[Path], say: Callable[[str], None], *, again: bool) -> None:
        """Runs the test files that are not known yet, one for each of `trees` at a time."""
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
        mapper = Mapper(str(tree), self._paths)
        pytest_here(tree, [name], mapper)
        for test in mapper.tests.values():
            test["ran"] = ran = {}
            for path, lines in test.pop("lines").items():
                functions = self._functions[path]
                for line in lines:
                    function, at = within(functions, line)
                    digest = functions[function][2] if function else ""
                    ran.setdefault(path, {}).setdefault(function, [digest, []])[1].append(at)
        place.with_suffix(".new").write_text(
            json.dumps({"paths": sorted(self._paths), "tests": mapper.tests})
        )
        place.with_suffix(".new").replace(place)
        return 0

    def of(self, mutant: Mutant, near: tuple[str, ...]) -> dict[str, Cost]:
        """Test → what it took, of those that run what is changed, or may run it in a process that they start: those of the
        files `near`, and where no other runs it, all that use the module."""
        good = {name: test for name, test in self.tests.items() if not test["failed"]}
        users = {name for name, test in good.items() if mutant.path in test["ran"]}
        found = {name for name in users if self._runs(good[name]["ran"][mutant.path], mutant)} or users
        found |= {name for name, test in good.items() if test["spawned"] and name.startswith(near)}
        return {
            name: Cost(float(test["processor_s"]), float(test["seconds"]))
            for name, test in good.items()
            if name in found
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


class Run:
    """One mutant in one tree: its stages of tests, until one fails."""

    def __init__(self, mutant: Mutant, tree: Path, stages: list[dict[str, Cost]], number: int) -> None:
        self.mutant = mutant
        self.tree = tree
        self._stages = stages
        self.begun = time.monotonic()
        self.outcome = ""
        self.pid = 0
        file = tree / mutant.path
        self._original = file.read_bytes(), file.stat()
        file.write_bytes(mutant.apply(self._original[0]))
        time_s = 1_000_000_000 + number  # no two mutants look alike to what is compiled
        os.utime(file, (time_s, time_s))

    @property
    def log(self) -> Path:
        return self.tree.with_name(self.tree.name + ".log")

    def next_stage(self) -> bool:
        """Starts the next tests; False when there are none."""
        while self._stages:
            stage = self._stages.pop(0)
            if stage:
                limits = {name: GRACE_S + SLOWER * cost.seconds for name, cost in stage.items()}
                self.pid = fork(self.tree, self.log, partial(self._work, limits))
                return True
        return False

    def _work(self, limits: dict[str, float]) -> int:
        files = list(dict.fromkeys(name.split("::")[0] for name in limits))
        return pytest_here(self.tree, files, Chosen(limits), "-x")

    def ended(self, wait_status: int) -> bool:
        """Whether that decides it."""
        reap(self.pid)
        if os.WIFSIGNALED(wait_status):
            name = signal.Signals(os.WTERMSIG(wait_status)).name
            self.outcome = "killed: a test hangs" if name == "SIGALRM" else f"killed: ended by {name}"
        elif os.WEXITSTATUS(wait_status) in (0, 5):
            return False
        else:
            self.outcome = f"killed: {self._why()}"
        return True

    def _why(self) -> str:
        for line in reversed(self.log.read_text(errors="replace").splitlines()):
            if line.startswith(("FAILED", "ERROR")):
                return line.split(" - ")[0].split(" ", 1)[1]
        return "the tests do not start"

    def restore(self) -> None:
        content, status = self._original
        file = self.tree / self.mutant.path
        file.write_bytes(content)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def run_all(
    mutants: list[Mutant],
    trees: list[Path],
    stages_of: Callable[[Mutant], list[dict[str, Cost]]],
    done: Callable[[Run], None],
) -> None:
    """As many at a time as there are trees. A survivor's outcome is "" when tests covered it, else "not covered"."""
    waiting = list(enumerate(mutants))
    running: dict[int, Run] = {}
    while waiting or running:
        while waiting and len(running) < len(trees):
            number, mutant = waiting.pop(0)
            used = {run.tree for run in running.values()}
            tree = next(tree for tree in trees if tree not in used)
            run = Run(mutant, tree, stages_of(mutant), number)
            if run.next_stage():
                running[run.pid] = run
            else:
                run.restore()
                run.outcome = "not covered"
                done(run)
        if not running:
            continue
        pid, status = os.wait()
        ended = running.pop(pid, None)
        if ended is None:
            continue
        if ended.ended(status) or not ended.next_stage():
            ended.restore()
            done(ended)
        else:
            running[ended.pid] = ended

"""The pytest plugin of processes that run tests on a copy: it selects and orders tests and records what they cover."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

FIXED_SEED = "mutation"
"""The Hypothesis profile: the same examples each time, and no search for a smaller one."""


def use_fixed_seeds() -> None:
    """Before the tests' own settings are made, which inherit from these."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        FIXED_SEED, settings.default, derandomize=True, database=None, phases=phases, deadline=None
    )
    settings.load_profile(FIXED_SEED)


def runnable(item: pytest.Item) -> bool:
    """Select tests without mounts, servers or long runs."""
    marks = {mark.name for mark in item.iter_markers()}
    servers = "servers" in getattr(item, "fixturenames", ())
    return not servers and not marks & {"long", "mount", "alone", "operations"}


def _processor_s() -> float:
    """Processor time of this process and of the children that it has waited for, so that a busy machine measures the
    same."""
    return sum(os.times()[:4])


class Mapper:
    """Records for each test the lines that it runs in the files under `below`, whether it starts processes (whose lines are
    not seen), and its time. Without `paths` it records no lines and slows nothing."""

    def __init__(self, below: str, paths: set[str]) -> None:
        self._files = {os.path.join(below, path): path for path in paths}
        self._seen: set[tuple[str, int]] = set()
        self.tests: dict[str, dict[str, Any]] = {}
        self._failed = self._spawned = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _: tuple[object, ...]) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self._spawned = True

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if runnable(item)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._seen, self._failed, self._spawned = set(), False, False
        begun, work = time.monotonic(), _processor_s()
        if self._files:
            threading.settrace(self._trace)
            sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            lines: dict[str, list[int]] = {}
            for path, line in sorted(self._seen):
                lines.setdefault(path, []).append(line)
            self.tests[item.nodeid] = {
                "seconds": time.monotonic() - begun,
                "processor_s": _processor_s() - work,
                "failed": self._failed,
                "spawned": self._spawned,
                "lines": lines,
            }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.outcome != "passed"

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        code: CodeType = frame.f_code
        path = self._files.get(code.co_filename)
        if path is None:
            return None
        seen = self._seen
        seen.add((path, frame.f_lineno))

        def line(frame: FrameType, event: str, arg: object) -> Any:
            if event == "line":
                seen.add((path, frame.f_lineno))
            return line

        return line


class Chosen:
    """Runs these tests in this order, each with a deadline, after which SIGALRM ends the process. The first one that fails
    is written to a file."""

    def __init__(self, limits_s: dict[str, float], into: Path) -> None:
        self.limits_s = limits_s
        self._rank = {name: number for number, name in enumerate(limits_s)}
        self._into = into
        self.failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._rank), key=lambda item: self._rank[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = True
            self._into.write_text(report.nodeid)
            print(report.longreprtext)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_REAL, self.limits_s[item.nodeid])
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

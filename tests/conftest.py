"""Fixtures shared by all rooms' tests."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent
ON_CI = os.environ.get("CI", "").lower() in ("1", "true")
"""There, a test that lacks something of its machine fails: everything is installed."""

LEVEL = os.environ.get("TEST_LEVEL", "")
"""What scripts/test runs: "short", or "all" there is; else "": whatever pytest was told."""


def examples(count: int) -> int:
    """Of a property that has `count` examples in `scripts/test --all`."""
    return max(count // 10, 5) if LEVEL == "short" else count


# How long an example takes says how busy the machine is.
settings.register_profile(
    "unhurried",
    settings.default,
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("unhurried")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and all processes of the tests would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if str(ROOT) not in sys.path:  # so that `tests.store.lab` and `bench.lab` import however pytest was started
    sys.path.insert(0, str(ROOT))


def needs(program: str) -> pytest.MarkDecorator:
    """A test that runs a program which scripts/setup installs."""
    missing = shutil.which(program) is None
    return pytest.mark.skipif(missing and not ON_CI, reason=f"{program} is not installed")


def free_ports(count: int) -> list[int]:
    """Ports of loopback on which nobody listens. They are below those that the kernel gives away, to connections and to
    whoever asks for any port: so what runs beside this does not take them before the one they are for."""
    found: list[int] = []
    while len(found) < count:
        port = 10_000 + secrets.randbelow(20_000)  # not `random`: Hypothesis seeds it, alike everywhere
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        if port not in found:
            found.append(port)
    return found


LONGEST_FIRST = ("test_bench.py", "mount", "store", "origin", "upload", "peers", "fetch", "fs")
"""Below this directory. Measured, but nothing depends on it except for the time."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests, file by file, what takes long comes first: at the end none is waited for."""
    if hasattr(config, "workerinput"):
        rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
        here = Path(__file__).parent
        items.sort(key=lambda item: rank.get(item.path.relative_to(here).parts[0], len(rank)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect with the garbage collector off, and then have it leave alone what was collected, which stays to the end.

    Measured with all tests collected: a full garbage collection takes 0.2 s otherwise, and the fixture `descriptors` makes
    one after hundreds of tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


class FailuresAtOnce:
    """Names a failure when it comes: a run that is ended from outside prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        # None: a process of pytest-xdist, which reports to the one that prints.
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} failed ({report.when})")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config))


def open_files() -> Counter[str]:
    """What this process has open of files and directories."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # of the list itself
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            found[target] += 1
    return found


@pytest.fixture
def descriptors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Each file that a test or what it runs has opened is closed after it."""
    before = open_files()
    yield
    if left := open_files() - before:
        # An exception that was logged refers to its frames, and these to files.
        caplog.get_records("call").clear()
        gc.collect()  # of what nothing closes but its end
        left = open_files() - before
    assert not left, f"open: {dict(left)}"


@pytest.fixture
def cache_dir(tmp_path: Path) -> Iterator[Path]:
    """A cache directory that does not exist yet; its RAM half in tmpfs goes after the test."""
    from cachefs.store.ram import remove_ram

    path = tmp_path / "cache"
    yield path
    for place in [path, *tmp_path.glob("cache*")]:
        remove_ram(place)

"""A handful of system calls that fail, on a real mount; `scripts/inject` does all of them."""

from __future__ import annotations

import itertools
import os
import shutil

import pytest

from tests.mount import injecting
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.injecting import (
    ALWAYS,
    CALLS,
    MODES,
    NOT_MADE,
    OWN_ERRORS,
    Injection,
    made,
    series,
    traced,
    workload,
)
from tests.mount.mounts import eventually

pytestmark = [
    ONE_BACKEND,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing: scripts/setup test"),
]

CASES = [
    ("writeback", "fdatasync", "EIO", 1),
    pytest.param("writeback", "clone", "EAGAIN", ALWAYS, marks=pytest.mark.long),
    pytest.param("durable", "clone", "EAGAIN", ALWAYS, marks=pytest.mark.long),
    pytest.param("writeback", "openat", "EMFILE", 1, marks=pytest.mark.long),
    pytest.param("durable", "openat", "EIO", 2, marks=pytest.mark.long),
]
"""Mode, call, error, n: calls that the workload is certain to make."""

THREADS_AT_REST = 6
"""Of a daemon that has had nothing to do for ten seconds."""


@pytest.mark.parametrize("mode, call, error, number", CASES)
def test_a_call_that_fails_ends_no_daemon_and_loses_nothing(
    mounted: Mounted, bucket: Bucket, mode: str, call: str, error: str, number: int
) -> None:
    mount = mounted(bucket, read_only=None, **MODES[mode])
    mount.allowed.append("WARNING|ERROR|Error|Traceback")  # each call that fails is said
    if call == "clone":  # a thread that is idle would do the work; after some seconds it ends
        eventually(lambda: len(os.listdir(f"/proc/{mount.pid}/task")) <= THREADS_AT_REST, "it is at rest", 60)
    injection = Injection(mount, call, error)
    assert injection.once(number) > 0, "the call was made, and failed"
    injection.restart()


@pytest.mark.parametrize("mode", MODES)
def test_the_workload_makes_each_call_that_is_to_fail(mounted: Mounted, bucket: Bucket, mode: str) -> None:
    """But those that depend on which threads and connections there are already. A series of another would show nothing."""
    mount = mounted(bucket, read_only=None, **MODES[mode])
    output = mount.place / "strace"
    calls = {
        call: names
        for call, names in CALLS.items()
        if call not in OWN_ERRORS and (mode, call) not in NOT_MADE
    }
    numbers = itertools.count()

    def all_are_made() -> bool:
        # Some calls are made only if the cache has a file by the time at which it is written again.
        workload(mount.path / f"traced{next(numbers)}")
        return all(made(output, names) for names in calls.values())

    with traced(mount.pid, ",".join(calls.values()), output):
        eventually(all_are_made, "all calls are made", 40)


def test_a_series_of_a_call_that_is_never_made_has_shown_nothing(
    mounted: Mounted, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(injecting.CALLS, "acct", "acct")
    mount = mounted(bucket, read_only=None)
    assert series(mount, "acct", "EIO", step=1, every=9, most=9) == (
        1,
        0,
        "the workload never makes the call acct",
    )

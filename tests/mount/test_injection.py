"""A handful of system calls that fail, on a real mount; `scripts/inject` does all of them."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.injecting import ALWAYS, CALLS, MODES, Injection
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

THREADS_AT_REST = 5
"""Of a daemon that has had nothing to do for ten seconds."""


@pytest.mark.parametrize("mode, call, error, number", CASES)
def test_a_call_that_fails_ends_no_daemon_and_loses_nothing(
    mounted: Mounted, bucket: Bucket, mode: str, call: str, error: str, number: int
) -> None:
    mount = mounted(bucket, read_only=None, **MODES[mode])
    mount.allowed.append("WARNING|ERROR|Error|Traceback")  # each call that fails is said
    if call == "clone":  # a thread that is idle would do the work; after some seconds it ends
        eventually(lambda: len(os.listdir(f"/proc/{mount.pid}/task")) <= THREADS_AT_REST, "it is at rest", 60)
    injection = Injection(mount, CALLS[call], error)
    assert injection.once(number) > 0, "the call was made, and failed"
    injection.restart()

"""A handful of system calls that fail, on a real mount; `scripts/inject` does all of them."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.injecting import ALWAYS, CALLS, MODES, Injection

pytestmark = [
    ONE_BACKEND,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing: scripts/setup test"),
]

CASES = [
    ("writeback", "fdatasync", "EIO", 1),
    ("writeback", "clone", "EAGAIN", ALWAYS),
    pytest.param("durable", "clone", "EAGAIN", ALWAYS, marks=pytest.mark.long),
    pytest.param("writeback", "openat", "EMFILE", 1, marks=pytest.mark.long),
    pytest.param("durable", "openat", "EIO", 2, marks=pytest.mark.long),
]
"""Mode, call, error, n: calls that the workload is certain to make."""


@pytest.mark.parametrize("mode, call, error, number", CASES)
def test_a_call_that_fails_ends_no_daemon_and_loses_nothing(
    mounted: Mounted, bucket: Bucket, mode: str, call: str, error: str, number: int
) -> None:
    mount = mounted(bucket, read_only=None, **MODES[mode])
    mount.allowed.append("WARNING|ERROR|Error|Traceback")  # each call that fails is said
    injection = Injection(mount, CALLS[call], error)
    assert injection.once(number) > 0, "the call was made, and failed"
    injection.restart()
